/* producer - sends copies; what became of each is told by delivery reports.
 *
 *      kafka_producer_send --copy--> librdkafka --> broker
 *                                        |
 *      main queue: DR events (thousands of messages each), errors, logs, statistics   --wake-->
 *        kafka_producer_reports: reads the current DR event to its end, then the next; others go into the list that
 *        kafka_producer_poll reads
 *
 * Invariants:
 *   (1) a message that send accepted gets exactly one report, unless the producer is destroyed before;
 *   (2) at most one DR event is held between two calls, and none after destroy began;
 *   (3) at most EVENTS_MAX other events are held: more are dropped, a producer whose owner never looks does not grow;
 *   (4) after kafka_producer_destroy has returned, no wake-up runs.
 * Costs: send 350 to 500 ns for 100 bytes, report 150 ns.
 * Thread rule: send, topic, queued and fatal from any thread; reports, poll, purge and destroy from one at a time. */
#include "internal.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { EVENTS_MAX = 256 };

typedef struct kept_event {
    kafka_event event;
    struct kept_event *next;
} kept_event;

struct kafka_topic {
    rd_kafka_topic_t *rkt;
    kafka_topic *next;
};

struct kafka_producer {
    rd_kafka_t *rk;
    rd_kafka_queue_t *main;
    kafka_wake wake;
    rd_kafka_event_t *dr; /* partly read; NULL = none */
    kept_event *first_event, **last_event;
    size_t n_events;
    pthread_mutex_t topics_lock;
    kafka_topic *topics;
    kafka_links *links;
    kafka_reaper *reaper;
};

int kafka_producer_open(const kafka_property *props, size_t n_props, bool idempotent, const kafka_wake *wake,
                        kafka_producer **out, kafka_error *err)
{
    static const kafka_property forced[] = {{"enable.idempotence", "true"}, {"acks", "all"}};
    /* What is on its way to a broker that stands still goes to the next leader only when this is over; a minute by default. Sent twice is no harm. */
    static const kafka_property defaults[] = {{"socket.timeout.ms", "10000"}};
    static const kafka_wake none = {.fd = -1};
    int events = kafka_common_events(props, n_props) | RD_KAFKA_EVENT_DR;
    kafka_producer *producer = calloc(1, sizeof *producer);
    kafka_reaper *reaper = kafka_reaper_new();
    kafka_links *links = producer != NULL ? kafka_links_new(&producer->wake) : NULL;
    if (links == NULL || reaper == NULL || pthread_mutex_init(&producer->topics_lock, NULL) != 0) {
        kafka_links_del(links);
        free(producer);
        free(reaper);
        return kafka_no_memory(err);
    }
    producer->reaper = reaper;
    producer->links = reaper->links = links;
    producer->last_event = &producer->first_event;
    producer->wake = wake != NULL ? *wake : none;
    producer->rk = kafka_client_new_with(kafka_links_prepare, links, RD_KAFKA_PRODUCER, defaults, idempotent ? 1 : 0,
                                         props, n_props, forced, idempotent ? 2 : 0, events, err);
    if (producer->rk == NULL) {
        pthread_mutex_destroy(&producer->topics_lock);
        kafka_links_del(links);
        free(reaper);
        free(producer);
        return KAFKA_EKAFKA;
    }
    producer->main = rd_kafka_queue_get_main(producer->rk);
    kafka_wake_on(producer->main, &producer->wake);
    rd_kafka_set_log_queue(producer->rk, producer->main);
    *out = producer;
    return KAFKA_OK;
}

kafka_topic *kafka_producer_topic(kafka_producer *producer, const char *name, kafka_error *err)
{
    pthread_mutex_lock(&producer->topics_lock);
    kafka_topic *topic = producer->topics;
    while (topic != NULL && strcmp(rd_kafka_topic_name(topic->rkt), name) != 0) topic = topic->next;
    if (topic == NULL && (topic = calloc(1, sizeof *topic)) == NULL) {
        kafka_no_memory(err);
    } else if (topic->rkt == NULL) {
        topic->rkt = rd_kafka_topic_new(producer->rk, name, NULL);
        if (topic->rkt == NULL) {
            kafka_fail(err, producer->rk, rd_kafka_last_error(), name);
            free(topic);
            topic = NULL;
        } else {
            topic->next = producer->topics;
            producer->topics = topic;
        }
    }
    pthread_mutex_unlock(&producer->topics_lock);
    return topic;
}

/* ------------------------------------------------------------------ send */

static int send_failed(kafka_producer *producer, rd_kafka_resp_err_t code, kafka_topic *topic, kafka_error *err)
{
    if (code == RD_KAFKA_RESP_ERR__QUEUE_FULL) {
        kafka_error_set(err, code, "the local queue is full");
        return KAFKA_EFULL;
    }
    return kafka_fail(err, producer->rk, code, rd_kafka_topic_name(topic->rkt));
}

rd_kafka_resp_err_t kafka_produce(rd_kafka_t *rk, rd_kafka_topic_t *rkt, int32_t partition, const void *key,
                                  size_t key_len, const void *value, size_t value_len, const kafka_header *headers,
                                  size_t n_headers, int64_t timestamp_ms, void *opaque)
{
    void *payload = (void *)(uintptr_t)value; /* librdkafka's prototype lacks the const; with F_COPY it only reads */
    if (n_headers == 0 && timestamp_ms == 0) {
        if (rd_kafka_produce(rkt, partition, RD_KAFKA_MSG_F_COPY, payload, value_len, key, key_len, opaque) == 0)
            return RD_KAFKA_RESP_ERR_NO_ERROR;
        return rd_kafka_last_error();
    }
    rd_kafka_headers_t *list = n_headers == 0 ? NULL : rd_kafka_headers_new(n_headers);
    rd_kafka_resp_err_t code = RD_KAFKA_RESP_ERR_NO_ERROR;
    for (size_t i = 0; i < n_headers && code == RD_KAFKA_RESP_ERR_NO_ERROR; i++)
        code = rd_kafka_header_add(list, headers[i].name, -1, headers[i].value,
                                   headers[i].value == NULL ? 0 : (ssize_t)headers[i].value_len);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR)
        code = rd_kafka_producev(rk, RD_KAFKA_V_RKT(rkt), RD_KAFKA_V_PARTITION(partition),
                                 RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY), RD_KAFKA_V_KEY(key, key_len),
                                 RD_KAFKA_V_VALUE(payload, value_len), RD_KAFKA_V_TIMESTAMP(timestamp_ms),
                                 RD_KAFKA_V_HEADERS(list), RD_KAFKA_V_OPAQUE(opaque), RD_KAFKA_V_END);
    /* producev takes the list only when it succeeds */
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR && list != NULL) rd_kafka_headers_destroy(list);
    return code;
}

int kafka_producer_send(kafka_producer *producer, kafka_topic *topic, int32_t partition, const void *key,
                        size_t key_len, const void *value, size_t value_len, const kafka_header *headers,
                        size_t n_headers, int64_t timestamp_ms, void *opaque, kafka_error *err)
{
    rd_kafka_resp_err_t code = kafka_produce(producer->rk, topic->rkt, partition, key, key_len, value, value_len,
                                             headers, n_headers, timestamp_ms, opaque);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : send_failed(producer, code, topic, err);
}

/* ------------------------------------------------------------------ reports and events */

/* A mock cluster says 1234 for every record it appends, and stores the time that the producer gave. */
static int64_t log_time_ms(const rd_kafka_message_t *message)
{
    rd_kafka_timestamp_type_t type;
    int64_t ms = rd_kafka_message_timestamp(message, &type);
    return type == RD_KAFKA_TIMESTAMP_LOG_APPEND_TIME && ms == 1234 ? -1 : ms;
}

/* The event goes as soon as its last message is read: only then do its messages leave the local queue's limits. */
static size_t read_dr(kafka_producer *producer, kafka_report *out, size_t max)
{
    size_t n = 0;
    const rd_kafka_message_t *message;
    while (n < max && (message = rd_kafka_event_message_next(producer->dr)) != NULL)
        out[n++] = (kafka_report){
            .opaque = message->_private,
            .error = message->err,
            .error_name = message->err == RD_KAFKA_RESP_ERR_NO_ERROR ? NULL : rd_kafka_err2name(message->err),
            .partition = message->partition,
            .offset = message->offset,
            .timestamp_ms = log_time_ms(message)};
    if (rd_kafka_event_message_count(producer->dr) == 0) {
        rd_kafka_event_destroy(producer->dr);
        producer->dr = NULL;
    }
    return n;
}

static void keep_event(kafka_producer *producer, rd_kafka_event_t *rkev)
{
    kept_event *kept = producer->n_events == EVENTS_MAX ? NULL : malloc(sizeof *kept);
    if (kept == NULL) return;
    if (!kafka_event_make(producer->rk, rkev, &kept->event)) {
        free(kept);
        return;
    }
    kept->next = NULL;
    *producer->last_event = kept;
    producer->last_event = &kept->next;
    producer->n_events++;
}

size_t kafka_producer_reports(kafka_producer *producer, kafka_report *out, size_t max)
{
    size_t n = 0;
    while (n < max) {
        if (producer->dr != NULL) {
            n += read_dr(producer, out + n, max - n);
            continue;
        }
        rd_kafka_event_t *rkev = rd_kafka_queue_poll(producer->main, 0);
        if (rkev == NULL) break;
        if (rd_kafka_event_type(rkev) == RD_KAFKA_EVENT_DR) {
            producer->dr = rkev;
        } else {
            keep_event(producer, rkev);
            rd_kafka_event_destroy(rkev);
        }
    }
    return n;
}

bool kafka_producer_poll(kafka_producer *producer, kafka_event *event)
{
    kept_event *kept = producer->first_event;
    memset(event, 0, sizeof *event);
    if (kept == NULL) return kafka_links_take(producer->links, event);
    *event = kept->event;
    producer->first_event = kept->next;
    if (producer->first_event == NULL) producer->last_event = &producer->first_event;
    producer->n_events--;
    free(kept);
    return true;
}

int kafka_producer_queued(kafka_producer *producer) { return rd_kafka_outq_len(producer->rk); }

bool kafka_producer_fatal(kafka_producer *producer, kafka_error *err)
{
    char text[256];
    if (rd_kafka_fatal_error(producer->rk, text, sizeof text) == RD_KAFKA_RESP_ERR_NO_ERROR) return false;
    kafka_fail(err, producer->rk, RD_KAFKA_RESP_ERR__FATAL, NULL);
    return true;
}

int kafka_producer_test_fatal(kafka_producer *producer, const char *reason)
{
    rd_kafka_resp_err_t code =
        rd_kafka_test_fatal_error(producer->rk, RD_KAFKA_RESP_ERR_OUT_OF_ORDER_SEQUENCE_NUMBER, reason);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : KAFKA_EKAFKA;
}

void kafka_producer_purge(kafka_producer *producer)
{
    /* some reports are queued by this very thread: their wake-up would run inside the caller, so there is none (see kafka.h) */
    kafka_wake_off(producer->main);
    rd_kafka_purge(producer->rk, RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_INFLIGHT | RD_KAFKA_PURGE_F_NON_BLOCKING);
    kafka_wake_on(producer->main, &producer->wake);
}

int kafka_producer_set_token(kafka_producer *producer, const kafka_token *token, kafka_error *err)
{
    return kafka_set_token(producer->rk, token, err);
}

void kafka_producer_destroy(kafka_producer *producer, void (*done)(void *ctx), void *ctx)
{
    kafka_event event;
    kafka_wake_off(producer->main);
    kafka_links_close(producer->links);
    rd_kafka_purge(producer->rk, RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_INFLIGHT | RD_KAFKA_PURGE_F_NON_BLOCKING);
    if (producer->dr != NULL) rd_kafka_event_destroy(producer->dr);
    while (kafka_producer_poll(producer, &event)) kafka_event_free(&event);
    while (producer->topics != NULL) {
        kafka_topic *topic = producer->topics;
        producer->topics = topic->next;
        rd_kafka_topic_destroy(topic->rkt);
        free(topic);
    }
    rd_kafka_queue_destroy(producer->main);
    pthread_mutex_destroy(&producer->topics_lock);
    kafka_reap(producer->reaper, producer->rk, 0, done, ctx);
    free(producer);
}
