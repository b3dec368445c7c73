/* consumer - a group member whose partitions are read one by one.
 *
 *      broker threads                                      the caller
 *        |  fetched records  -> queue of orders/0  --wake-->  kafka_queue_pop
 *        |                   -> queue of orders/1  --wake-->  kafka_queue_pop
 *        |  rebalance, commits, errors, logs -> control --wake--> kafka_consumer_poll
 *
 * Invariants:
 *   (1) a partition's queue exists, is not forwarded and has its wake-up before librdkafka is told of the assignment;
 *   (2) queues[] is sorted by (topic, partition) and holds exactly what was last assigned; once it closes, what was assigned then;
 *   (3) no message, event or partition list of librdkafka is held between two calls, but for records not yet freed;
 *   (4) after kafka_consumer_destroy has returned, no wake-up runs.
 * Costs: look-up O(log partitions); pop about 200 ns a record, freeing included.
 * Thread rule: one thread at a time. kafka_consumer_commit and kafka_records_free may be called from any. */
#include "internal.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    METADATA_MAX = 4096, /* the broker's offset.metadata.max.bytes, by default */
    CLOSE_MS = 2000      /* how long the reaper waits for a close that is under way */
};

struct kafka_queue {
    rd_kafka_queue_t *rkqu;
    char *topic;
    int32_t partition;
    int64_t start; /* as assigned last */
    bool stopped;  /* an out-of-range has stopped its fetching: seek must start it afresh */
    struct kafka_consumer *consumer;
    size_t taken, taken_bytes; /* since its fetcher was nudged */
};

struct kafka_consumer {
    rd_kafka_t *rk;
    rd_kafka_queue_t *control;
    kafka_wake control_wake, records_wake;
    kafka_queue **queues;
    size_t n_queues, cap_queues;
    kafka_links *links;
    kafka_times *times;
    kafka_reaper *reaper;
    bool fixed;                    /* a static member: its group keeps its place when it closes */
    bool closing;                  /* the library's group handler may end at any moment: see await_stopped */
    kafka_nudge *nudge;            /* NULL: librdkafka's own fetcher does not rest, or no thread to be had */
    size_t half_queue, half_bytes; /* of one partition's local queue, at most */
};

/* ------------------------------------------------------------------ open */

static size_t half(const kafka_property *props, size_t n_props, const char *name, size_t usual)
{
    const char *value = kafka_property_get(props, n_props, name);
    unsigned long limit = value != NULL ? strtoul(value, NULL, 10) : usual;
    return limit < 2 ? 1 : limit / 2;
}

int kafka_consumer_open(const kafka_property *props, size_t n_props, const kafka_wake *control,
                        const kafka_wake *records, kafka_consumer **out, kafka_error *err)
{
    /* a group.id is what makes librdkafka's assign() work at all: one without a group gets a name that is never joined */
    /* The time-out of a request is also how long the reaper waits when a commit is on its way to a broker that does not answer (and
     * librdkafka's thread spins meanwhile): a minute by default. */
    static const kafka_property defaults[] = {{"group.id", "kmq-assign"}, {"socket.timeout.ms", "10000"}};
    static const kafka_property forced[] = {{"enable.auto.commit", "false"}, {"enable.auto.offset.store", "false"}};
    static const kafka_wake none = {.fd = -1};
    int events = kafka_common_events(props, n_props) | RD_KAFKA_EVENT_REBALANCE | RD_KAFKA_EVENT_OFFSET_COMMIT;
    kafka_consumer *consumer = calloc(1, sizeof *consumer);
    kafka_reaper *reaper = kafka_reaper_new();
    kafka_links *links = consumer != NULL ? kafka_links_new(&consumer->control_wake) : NULL;
    kafka_times *times = links != NULL ? kafka_times_new(&consumer->control_wake) : NULL;
    if (times == NULL || reaper == NULL) {
        kafka_times_del(times);
        kafka_links_del(links);
        free(consumer);
        free(reaper);
        return kafka_no_memory(err);
    }
    consumer->reaper = reaper;
    consumer->links = reaper->links = links;
    consumer->times = reaper->times = times;
    consumer->control_wake = control != NULL ? *control : none;
    consumer->records_wake = records != NULL ? *records : none;
    consumer->rk = kafka_client_new_with(kafka_links_prepare, links, RD_KAFKA_CONSUMER, defaults, 2, props, n_props,
                                         forced, 2, events, err);
    if (consumer->rk == NULL) {
        kafka_times_del(times);
        kafka_links_del(links);
        free(reaper);
        free(consumer);
        return KAFKA_EKAFKA;
    }
    if (rd_kafka_version() < 0x02020000) reaper->nudge = consumer->nudge = kafka_nudge_new(consumer->rk);
    consumer->fixed = kafka_property_get(props, n_props, "group.instance.id") != NULL;
    consumer->half_queue = half(props, n_props, "queued.min.messages", 100000);
    consumer->half_bytes = half(props, n_props, "queued.max.messages.kbytes", 65536) * 1024;
    /* the wake-up first: what the other queues hold already moves over with one */
    consumer->control = rd_kafka_queue_get_consumer(consumer->rk);
    kafka_wake_on(consumer->control, &consumer->control_wake);
    rd_kafka_set_log_queue(consumer->rk, consumer->control);
    rd_kafka_poll_set_consumer(consumer->rk);
    *out = consumer;
    return KAFKA_OK;
}

int kafka_consumer_subscribe(kafka_consumer *consumer, const char *const *topics, size_t n_topics, kafka_error *err)
{
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)n_topics);
    for (size_t i = 0; i < n_topics; i++) rd_kafka_topic_partition_list_add(list, topics[i], RD_KAFKA_PARTITION_UA);
    rd_kafka_resp_err_t code =
        n_topics > 0 ? rd_kafka_subscribe(consumer->rk, list) : rd_kafka_unsubscribe(consumer->rk);
    rd_kafka_topic_partition_list_destroy(list);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, consumer->rk, code, "subscribe");
}

int kafka_consumer_unsubscribe(kafka_consumer *consumer, kafka_error *err)
{
    rd_kafka_resp_err_t code = rd_kafka_unsubscribe(consumer->rk);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, consumer->rk, code, "unsubscribe");
}

bool kafka_consumer_poll(kafka_consumer *consumer, kafka_event *event)
{
    rd_kafka_event_t *rkev;
    while ((rkev = rd_kafka_queue_poll(consumer->control, 0)) != NULL) {
        bool made = kafka_event_make(consumer->rk, rkev, event);
        rd_kafka_event_destroy(rkev);
        if (made) return true;
    }
    memset(event, 0, sizeof *event);
    return kafka_times_take(consumer->times, consumer->rk, event) || kafka_links_take(consumer->links, event);
}

/* ------------------------------------------------------------------ assignment */

static int compare(const kafka_queue *queue, const char *topic, int32_t partition)
{
    int order = strcmp(queue->topic, topic);
    if (order != 0) return order;
    return queue->partition < partition ? -1 : queue->partition > partition;
}

/* Where it is, or would have to be put. */
static size_t position(const kafka_consumer *consumer, const char *topic, int32_t partition)
{
    size_t lo = 0, hi = consumer->n_queues;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (compare(consumer->queues[mid], topic, partition) < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

kafka_queue *kafka_consumer_queue(kafka_consumer *consumer, const char *topic, int32_t partition)
{
    size_t at = position(consumer, topic, partition);
    return at < consumer->n_queues && compare(consumer->queues[at], topic, partition) == 0 ? consumer->queues[at]
                                                                                           : NULL;
}

/* What is left in a queue holds its partition, and that its leader's broker. The library itself empties only the queues of partitions that it
 * still knows at its end: of a topic that was deleted, or hidden by an ACL, one word would keep the client from ever being destroyed. */
static void queue_empty(kafka_queue *queue)
{
    rd_kafka_message_t *message;
    kafka_wake_off(queue->rkqu);
    while ((message = rd_kafka_consume_queue(queue->rkqu, 0)) != NULL) rd_kafka_message_destroy(message);
}

static void queue_del(kafka_queue *queue)
{
    queue_empty(queue);
    rd_kafka_queue_destroy(queue->rkqu);
    free(queue->topic);
    free(queue);
}

/* What was taken away before has been stopped, and its last word is in its queue: the library's thread answers when that is so. When a consumer
 * closes it throws away, at its end, what it has not answered, and who has asked waits for ever. Then that end itself is the answer. */
static void await_stopped(rd_kafka_t *rk, bool closing)
{
    rd_kafka_topic_partition_list_t *list = NULL;
    if (closing) {
        int64_t deadline_ms = kafka_now_ms() + CLOSE_MS;
        while (rd_kafka_consumer_closed(rk) == 0 && kafka_left_ms(deadline_ms) > 0)
            nanosleep(&(struct timespec){0, 10000000L}, NULL);
        return;
    }
    rd_kafka_assignment(rk, &list);
    if (list != NULL) rd_kafka_topic_partition_list_destroy(list);
}

void kafka_queues_free(rd_kafka_t *rk, bool closing, kafka_queue **queues, size_t n)
{
    if (n > 0) await_stopped(rk, closing);
    for (size_t i = 0; i < n; i++) queue_del(queues[i]);
}

/* Those of a consumer that closes are freed by the reaper, which finds the fetchers' last words in them; but records that lie there until then
 * keep the client of a deleted topic, too. */
static void queues_clear(kafka_consumer *consumer)
{
    if (consumer->closing) {
        for (size_t i = 0; i < consumer->n_queues; i++) queue_empty(consumer->queues[i]);
        return;
    }
    kafka_queues_free(consumer->rk, false, consumer->queues, consumer->n_queues);
    consumer->n_queues = 0;
}

/* Those of these partitions: to the end of the list, out of its order, and away. */
static void queues_remove(kafka_consumer *consumer, const kafka_partition *partitions, size_t n)
{
    size_t before = consumer->n_queues;
    for (size_t i = 0; i < n; i++) {
        size_t at = position(consumer, partitions[i].topic, partitions[i].partition);
        kafka_queue *queue = kafka_consumer_queue(consumer, partitions[i].topic, partitions[i].partition);
        if (queue == NULL) continue;
        if (consumer->closing) {
            queue_empty(queue);
            continue;
        }
        consumer->n_queues--;
        memmove(consumer->queues + at, consumer->queues + at + 1, (consumer->n_queues - at) * sizeof *consumer->queues);
        consumer->queues[consumer->n_queues] = queue;
    }
    kafka_queues_free(consumer->rk, false, consumer->queues + consumer->n_queues, before - consumer->n_queues);
}

/* Splits this partition off the consumer's queue. The flag that keeps it split survives later assignments. */
static int queue_add(kafka_consumer *consumer, const kafka_partition *partition, kafka_error *err)
{
    size_t at = position(consumer, partition->topic, partition->partition);
    if (at < consumer->n_queues && compare(consumer->queues[at], partition->topic, partition->partition) == 0) {
        consumer->queues[at]->start = partition->offset;
        consumer->queues[at]->stopped = false;
        return KAFKA_OK;
    }
    if (consumer->n_queues == consumer->cap_queues) {
        size_t cap = consumer->cap_queues == 0 ? 16 : 2 * consumer->cap_queues;
        kafka_queue **grown = realloc(consumer->queues, cap * sizeof *grown);
        if (grown == NULL) return kafka_no_memory(err);
        consumer->queues = grown;
        consumer->cap_queues = cap;
    }
    kafka_queue *queue = calloc(1, sizeof *queue);
    char *topic = strdup(partition->topic);
    if (queue == NULL || topic == NULL) {
        free(queue);
        free(topic);
        return kafka_no_memory(err);
    }
    *queue = (kafka_queue){
        .topic = topic, .partition = partition->partition, .start = partition->offset, .consumer = consumer};
    queue->rkqu = rd_kafka_queue_get_partition(consumer->rk, topic, partition->partition);
    if (queue->rkqu == NULL) {
        free(topic);
        free(queue);
        kafka_error_set(err, RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION, "no queue for %s/%d", partition->topic,
                        (int)partition->partition);
        return KAFKA_EKAFKA;
    }
    rd_kafka_queue_forward(queue->rkqu, NULL);
    kafka_wake_on(queue->rkqu, &consumer->records_wake);
    memmove(consumer->queues + at + 1, consumer->queues + at, (consumer->n_queues - at) * sizeof *consumer->queues);
    consumer->queues[at] = queue;
    consumer->n_queues++;
    return KAFKA_OK;
}

/* What librdkafka is told to start at: an offset, its beginning or end, else the commit. */
static int64_t start_of(int64_t offset)
{
    return offset >= 0 || offset == RD_KAFKA_OFFSET_BEGINNING || offset == RD_KAFKA_OFFSET_END ? offset
                                                                                               : RD_KAFKA_OFFSET_STORED;
}

static rd_kafka_topic_partition_list_t *to_list(const kafka_partition *partitions, size_t n)
{
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)n);
    for (size_t i = 0; i < n; i++)
        rd_kafka_topic_partition_list_add(list, partitions[i].topic, partitions[i].partition)->offset =
            start_of(partitions[i].offset);
    return list;
}

bool kafka_consumer_cooperative(kafka_consumer *consumer)
{
    const char *protocol = rd_kafka_rebalance_protocol(consumer->rk);
    return protocol != NULL && strcmp(protocol, "COOPERATIVE") == 0;
}

int kafka_consumer_assign(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, kafka_error *err)
{
    int result = KAFKA_OK;
    if (consumer->n_queues > 0) rd_kafka_assign(consumer->rk, NULL); /* before their queues go */
    queues_clear(consumer);
    for (size_t i = 0; i < n && result == KAFKA_OK; i++) result = queue_add(consumer, &partitions[i], err);
    if (result == KAFKA_OK) {
        rd_kafka_topic_partition_list_t *list = to_list(partitions, n);
        rd_kafka_resp_err_t code = rd_kafka_assign(consumer->rk, list);
        rd_kafka_topic_partition_list_destroy(list);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR) result = kafka_fail(err, consumer->rk, code, "assign");
    }
    if (result != KAFKA_OK) queues_clear(consumer);
    return result;
}

int kafka_consumer_unassign(kafka_consumer *consumer, kafka_error *err)
{
    rd_kafka_resp_err_t code = rd_kafka_assign(consumer->rk, NULL);
    queues_clear(consumer);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, consumer->rk, code, "unassign");
}

int kafka_consumer_assign_add(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, kafka_error *err)
{
    int result = KAFKA_OK;
    for (size_t i = 0; i < n && result == KAFKA_OK; i++) result = queue_add(consumer, &partitions[i], err);
    if (result == KAFKA_OK) {
        rd_kafka_topic_partition_list_t *list = to_list(partitions, n);
        result = kafka_fail_object(err, consumer->rk, rd_kafka_incremental_assign(consumer->rk, list), "assign");
        rd_kafka_topic_partition_list_destroy(list);
    }
    if (result != KAFKA_OK) queues_remove(consumer, partitions, n);
    return result;
}

int kafka_consumer_assign_remove(kafka_consumer *consumer, const kafka_partition *partitions, size_t n,
                                 kafka_error *err)
{
    rd_kafka_topic_partition_list_t *list = to_list(partitions, n);
    int result = kafka_fail_object(err, consumer->rk, rd_kafka_incremental_unassign(consumer->rk, list), "unassign");
    rd_kafka_topic_partition_list_destroy(list);
    queues_remove(consumer, partitions, n);
    return result;
}

/* ------------------------------------------------------------------ records */

void kafka_record_make(rd_kafka_message_t *message, kafka_record *record)
{
    rd_kafka_timestamp_type_t type;
    memset(record, 0, sizeof *record);
    record->priv = message;
    record->offset = message->offset;
    record->partition = message->partition;
    record->timestamp_ms = -1;
    if (message->err != RD_KAFKA_RESP_ERR_NO_ERROR) {
        record->error = message->err;
        record->error_text = rd_kafka_message_errstr(message);
        if (message->err == RD_KAFKA_RESP_ERR__PARTITION_EOF)
            record->error = KAFKA_RECORD_EOF;
        else if (message->err == RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET ||
                 message->err == RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE)
            record->error = KAFKA_RECORD_OUT_OF_RANGE;
        return;
    }
    record->timestamp_ms = rd_kafka_message_timestamp(message, &type);
    if (type == RD_KAFKA_TIMESTAMP_NOT_AVAILABLE) record->timestamp_ms = -1;
    record->log_append_time = type == RD_KAFKA_TIMESTAMP_LOG_APPEND_TIME;
    record->key = message->key;
    record->key_len = message->key_len;
    record->value = message->payload;
    record->value_len = message->len;
}

static size_t pop(kafka_queue *queue, kafka_record *out, size_t max, size_t max_bytes, int timeout_ms)
{
    size_t n = 0, bytes = 0;
    rd_kafka_message_t *message;
    while (n < max && bytes < max_bytes &&
           (message = rd_kafka_consume_queue(queue->rkqu, n == 0 ? timeout_ms : 0)) != NULL) {
        kafka_record_make(message, &out[n]);
        queue->stopped |= out[n].error == KAFKA_RECORD_OUT_OF_RANGE;
        bytes += out[n].value_len;
        n++;
    }
    return n;
}

size_t kafka_queue_wait(kafka_queue *queue, kafka_record *out, size_t max, int timeout_ms)
{
    return pop(queue, out, max, SIZE_MAX, timeout_ms);
}

/* Half a queue was taken: its fetcher may rest although there is room. */
static void nudge(kafka_queue *queue, const kafka_record *records, size_t n)
{
    const kafka_consumer *consumer = queue->consumer;
    if (consumer->nudge == NULL) return;
    queue->taken += n;
    for (size_t i = 0; i < n; i++) queue->taken_bytes += records[i].value_len;
    if (queue->taken < consumer->half_queue && queue->taken_bytes < consumer->half_bytes) return;
    if (kafka_nudge_ask(consumer->nudge, queue->topic, queue->partition)) queue->taken = queue->taken_bytes = 0;
}

size_t kafka_queue_pop_bytes(kafka_queue *queue, kafka_record *out, size_t max, size_t max_bytes)
{
    size_t n = pop(queue, out, max, max_bytes, 0);
    if (n != 0) nudge(queue, out, n);
    return n;
}

size_t kafka_queue_pop(kafka_queue *queue, kafka_record *out, size_t max)
{
    return kafka_queue_pop_bytes(queue, out, max, SIZE_MAX);
}

void kafka_records_free(kafka_record *records, size_t n)
{
    for (size_t i = 0; i < n; i++) rd_kafka_message_destroy(records[i].priv);
}

/* ------------------------------------------------------------------ commit, seek */

static bool metadata_ok(const char *metadata)
{
    size_t len = 0;
    for (; metadata[len] != '\0'; len++)
        if (len == METADATA_MAX || (unsigned char)metadata[len] >= 0x80) return false;
    return true;
}

rd_kafka_topic_partition_list_t *kafka_commit_list(rd_kafka_t *rk, const kafka_partition *partitions, size_t n,
                                                   kafka_error *err)
{
    for (size_t i = 0; i < n; i++) {
        /* checked here: the broker refuses one, and librdkafka then reports the error for all of them */
        if (partitions[i].metadata != NULL && !metadata_ok(partitions[i].metadata)) {
            kafka_error_set(err, RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE,
                            "commit of %s/%d: metadata must be ASCII, at most %d characters", partitions[i].topic,
                            (int)partitions[i].partition, (int)METADATA_MAX);
            return NULL;
        }
        if (partitions[i].offset < 0) {
            kafka_error_set(err, RD_KAFKA_RESP_ERR__INVALID_ARG, "commit of %s/%d: offset %lld", partitions[i].topic,
                            (int)partitions[i].partition, (long long)partitions[i].offset);
            return NULL;
        }
    }
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)n);
    for (size_t i = 0; i < n; i++) {
        rd_kafka_topic_partition_t *to =
            rd_kafka_topic_partition_list_add(list, partitions[i].topic, partitions[i].partition);
        to->offset = partitions[i].offset;
        if (partitions[i].metadata == NULL) continue;
        size_t len = strlen(partitions[i].metadata);
        to->metadata = rd_kafka_mem_malloc(rk, len + 1); /* the list frees it */
        if (to->metadata == NULL) {
            kafka_no_memory(err);
            rd_kafka_topic_partition_list_destroy(list);
            return NULL;
        }
        memcpy(to->metadata, partitions[i].metadata, len + 1);
        to->metadata_size = len;
    }
    return list;
}

int kafka_consumer_commit(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, void *opaque,
                          kafka_error *err)
{
    int result = KAFKA_OK;
    rd_kafka_topic_partition_list_t *list = kafka_commit_list(consumer->rk, partitions, n, err);
    if (list == NULL) return KAFKA_EKAFKA;
    rd_kafka_resp_err_t code = rd_kafka_commit_queue(consumer->rk, list, consumer->control, NULL, opaque);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) result = kafka_fail(err, consumer->rk, code, "commit");
    rd_kafka_topic_partition_list_destroy(list);
    return result;
}

/* ------------------------------------------------------------------ who it is in its group */

/* The generation, which the library shows in the serialised form only: "CGMDv2:", then an int32. */
static bool has_generation(const rd_kafka_consumer_group_metadata_t *metadata)
{
    static const char magic[] = "CGMDv2:";
    void *bytes = NULL;
    size_t n = 0;
    int32_t generation = 0;
    rd_kafka_error_t *error = rd_kafka_consumer_group_metadata_write(metadata, &bytes, &n);
    if (error != NULL) {
        rd_kafka_error_destroy(error);
        return false;
    }
    if (n >= sizeof magic - 1 + sizeof generation && memcmp(bytes, magic, sizeof magic - 1) == 0)
        memcpy(&generation, (const char *)bytes + sizeof magic - 1, sizeof generation);
    rd_kafka_mem_free(NULL, bytes);
    return generation >= 0;
}

kafka_group *kafka_consumer_group(kafka_consumer *consumer)
{
    kafka_group *group = malloc(sizeof *group);
    if (group == NULL) return NULL;
    atomic_init(&group->refs, 1);
    group->metadata = rd_kafka_consumer_group_metadata(consumer->rk);
    /* A broker takes what comes without a generation from anybody. Whoever has lost the group gets one again only after the loss was
     * answered, which is done by this thread: so asking after the fact is enough. */
    if (group->metadata != NULL && has_generation(group->metadata) && !rd_kafka_assignment_lost(consumer->rk))
        return group;
    if (group->metadata != NULL) rd_kafka_consumer_group_metadata_destroy(group->metadata);
    free(group);
    return NULL;
}

kafka_group *kafka_group_keep(kafka_group *group)
{
    atomic_fetch_add(&group->refs, 1);
    return group;
}

void kafka_group_put(kafka_group *group)
{
    if (group == NULL || atomic_fetch_sub(&group->refs, 1) > 1) return;
    rd_kafka_consumer_group_metadata_destroy(group->metadata);
    free(group);
}

/* Fetching that an out-of-range has stopped does not seek: it must be assigned again, which is the whole assignment in the eager
 * protocol. The others go on from their positions (what they had fetched ahead is fetched again). */
static int restart(kafka_consumer *consumer, kafka_queue *queue, int64_t offset, kafka_error *err)
{
    int result = KAFKA_OK;
    if (kafka_consumer_cooperative(consumer)) {
        rd_kafka_topic_partition_list_t *one = rd_kafka_topic_partition_list_new(1);
        rd_kafka_topic_partition_list_add(one, queue->topic, queue->partition)->offset = offset;
        result = kafka_fail_object(err, consumer->rk, rd_kafka_incremental_unassign(consumer->rk, one), "seek");
        if (result == KAFKA_OK)
            result = kafka_fail_object(err, consumer->rk, rd_kafka_incremental_assign(consumer->rk, one), "seek");
        rd_kafka_topic_partition_list_destroy(one);
    } else {
        rd_kafka_topic_partition_list_t *all = rd_kafka_topic_partition_list_new((int)consumer->n_queues);
        for (size_t i = 0; i < consumer->n_queues; i++)
            rd_kafka_topic_partition_list_add(all, consumer->queues[i]->topic, consumer->queues[i]->partition);
        rd_kafka_resp_err_t code = rd_kafka_position(consumer->rk, all);
        for (size_t i = 0; i < consumer->n_queues; i++) { /* the list keeps the order it was made in */
            if (consumer->queues[i] == queue)
                all->elems[i].offset = offset;
            else if (all->elems[i].offset < 0)
                all->elems[i].offset = start_of(consumer->queues[i]->start); /* nothing popped since it was assigned */
            else
                consumer->queues[i]->start = all->elems[i].offset;
            all->elems[i].err = RD_KAFKA_RESP_ERR_NO_ERROR;
        }
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR) code = rd_kafka_assign(consumer->rk, all);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR) result = kafka_fail(err, consumer->rk, code, "seek");
        rd_kafka_topic_partition_list_destroy(all);
    }
    if (result == KAFKA_OK) {
        queue->stopped = false;
        queue->start = offset;
    }
    return result;
}

int kafka_consumer_seek(kafka_consumer *consumer, const char *topic, int32_t partition, int64_t offset,
                        kafka_error *err)
{
    kafka_queue *queue = kafka_consumer_queue(consumer, topic, partition);
    if (queue == NULL) return kafka_fail(err, NULL, RD_KAFKA_RESP_ERR__STATE, "seek: not assigned");
    if (queue->stopped) return restart(consumer, queue, offset, err);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(list, topic, partition)->offset = offset;
    int result = kafka_fail_object(err, consumer->rk, rd_kafka_seek_partitions(consumer->rk, list, 0),
                                   "seek"); /* 0: does not wait */
    rd_kafka_topic_partition_list_destroy(list);
    if (result == KAFKA_OK) queue->start = offset;
    return result;
}

/* ------------------------------------------------------------------ the rest */

int kafka_consumer_set_token(kafka_consumer *consumer, const kafka_token *token, kafka_error *err)
{
    return kafka_set_token(consumer->rk, token, err);
}

int64_t kafka_consumer_end(kafka_consumer *consumer, const char *topic, int32_t partition)
{
    int64_t low, high;
    rd_kafka_resp_err_t code = rd_kafka_get_watermark_offsets(consumer->rk, topic, partition, &low, &high);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR && high >= 0 ? high : -1;
}

int kafka_consumer_times(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, int timeout_ms)
{
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)n);
    for (size_t i = 0; i < n; i++)
        rd_kafka_topic_partition_list_add(list, partitions[i].topic, partitions[i].partition)->offset =
            partitions[i].offset;
    if (kafka_times_ask(consumer->times, consumer->rk, list, timeout_ms)) return KAFKA_OK;
    rd_kafka_topic_partition_list_destroy(list);
    return KAFKA_EFULL;
}

void kafka_queue_stopped(kafka_queue *queue) { queue->stopped = true; }

bool kafka_consumer_lost(kafka_consumer *consumer) { return rd_kafka_assignment_lost(consumer->rk) != 0; }

const char *kafka_consumer_member_id(kafka_consumer *consumer, char *buf, size_t cap)
{
    char *id = rd_kafka_memberid(consumer->rk);
    snprintf(buf, cap, "%s", id != NULL ? id : "");
    if (id != NULL) rd_kafka_mem_free(consumer->rk, id);
    return buf;
}

bool kafka_consumer_leave(kafka_consumer *consumer)
{
    return !consumer->fixed && rd_kafka_unsubscribe(consumer->rk) == RD_KAFKA_RESP_ERR_NO_ERROR;
}

bool kafka_consumer_member(kafka_consumer *consumer)
{
    char id[8];
    return *kafka_consumer_member_id(consumer, id, sizeof id) != '\0';
}

int kafka_consumer_close_begin(kafka_consumer *consumer, kafka_error *err)
{
    if (kafka_consumer_cooperative(consumer)) kafka_consumer_leave(consumer);
    int rc =
        kafka_fail_object(err, consumer->rk, rd_kafka_consumer_close_queue(consumer->rk, consumer->control), "close");
    consumer->closing = rc == KAFKA_OK;
    return rc;
}

bool kafka_consumer_closed(kafka_consumer *consumer) { return rd_kafka_consumer_closed(consumer->rk) != 0; }

int kafka_consumer_test_fatal(kafka_consumer *consumer, const char *reason)
{
    rd_kafka_resp_err_t code = rd_kafka_test_fatal_error(consumer->rk, RD_KAFKA_RESP_ERR__INCONSISTENT, reason);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : KAFKA_EKAFKA;
}

/* So that what a fetcher says when it is stopped is there before the reaper looks: see queue_empty. */
static void stop_all(kafka_consumer *consumer)
{
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)consumer->n_queues);
    for (size_t i = 0; i < consumer->n_queues; i++)
        rd_kafka_topic_partition_list_add(list, consumer->queues[i]->topic, consumer->queues[i]->partition);
    if (kafka_consumer_cooperative(consumer))
        kafka_fail_object(NULL, consumer->rk, rd_kafka_incremental_unassign(consumer->rk, list), "unassign");
    else
        rd_kafka_assign(consumer->rk, NULL);
    rd_kafka_topic_partition_list_destroy(list);
}

static void quiet(kafka_consumer *consumer)
{
    for (size_t i = 0; i < consumer->n_queues; i++) kafka_wake_off(consumer->queues[i]->rkqu);
    kafka_wake_off(consumer->control);
    kafka_links_close(consumer->links);
    kafka_times_close(consumer->times);
}

/* The queues may be full: the reaper empties them. */
static void hand_over(kafka_consumer *consumer, int flags, void (*done)(void *ctx), void *ctx)
{
    consumer->reaper->queues = consumer->queues;
    consumer->reaper->n_queues = consumer->n_queues;
    consumer->reaper->closing = consumer->closing;
    kafka_reap(consumer->reaper, consumer->rk, flags, done, ctx);
    free(consumer);
}

void kafka_consumer_abandon(kafka_consumer *consumer)
{
    quiet(consumer);
    consumer->reaper->control = consumer->control;
    hand_over(consumer, RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE, NULL, NULL);
}

void kafka_consumer_destroy(kafka_consumer *consumer, void (*done)(void *ctx), void *ctx)
{
    /* not closed: leaving the group in an orderly way may take for ever (a broker that does not answer), so it is not tried */
    int flags = kafka_consumer_closed(consumer) ? 0 : RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE;
    quiet(consumer);
    if (consumer->n_queues > 0 && !consumer->closing) stop_all(consumer);
    rd_kafka_queue_destroy(consumer->control);
    hand_over(consumer, flags, done, ctx);
}
