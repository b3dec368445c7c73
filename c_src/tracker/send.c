/* send - everything the tracker writes: CLOCKs, copies, ENDs, and what becomes of them.
 *
 *   ring of what is with the producer --report--> CLOCK: known end of M;  copy: END;  END: done
 *                                     --failure-> CLOCK: again;  copy: pause;  END: the same bytes again
 *   the producer turned fatal: what it still has counts as failed, a new one is opened.
 *
 * An END record is kept as the bytes that were sent, so that sending it again needs nothing else: not the book, not the partition.
 * With `redelivery = transactional` copies and their ENDs are txn.c's; CLOCKs, checkpoints and other ENDs go this way all the same. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

#include "failpoint.h"

enum { REPORTS = 1000, TLV_ROOM = 64 };

/* ------------------------------------------------------------------ the ring */

void tracker_send_add(tracker *t, tracker_send *send, tracker_send_kind kind)
{
    send->kind = kind;
    send->next = &t->sent;
    send->previous = t->sent.previous;
    t->sent.previous->next = send;
    t->sent.previous = send;
}

static void ring_remove(tracker_send *send)
{
    send->previous->next = send->next;
    send->next->previous = send->previous;
    send->next = send->previous = NULL;
}

/* ------------------------------------------------------------------ CLOCK */

typedef struct clock_record {
    tracker_send send;
    tracker_part *part;
    uint64_t id;
} clock_record;

void tracker_clock_send(tracker *t, tracker_part *part)
{
    uint8_t key[KMQ_MARKER_KEY_BYTES], bytes[64 + TLV_ROOM];
    kafka_error err;
    if (!t->producer) return;
    uint64_t id = ++t->instance;
    kmq_marker_tlv tlv = {.instance = id, .has_instance = true};
    int n = kmq_marker_encode_clock(bytes, sizeof bytes, &part->queue->scope, &tlv);
    if (n < 0) abort(); /* 64 bytes hold it */
    kmq_marker_encode_key(key, part->partition, -1);
    clock_record *record = tracker_alloc(sizeof *record);
    *record = (clock_record){.part = part, .id = id};
    int rc = kafka_producer_send(t->producer, part->queue->markers_out, part->partition, key, sizeof key, bytes,
                                 (size_t)n, NULL, 0, 0, record, &err);
    if (rc != KAFKA_OK) {
        free(record);
        if (rc != KAFKA_EFULL)
            tracker_alarm(t, &part->alarm_ms, "clock", part->queue->markers, part->partition, "%s", err.text);
        return; /* tried again by tracker_part_step */
    }
    tracker_send_add(t, &record->send, TRACKER_SEND_CLOCK);
    tracker_part_keep(part);
    part->barrier = BARRIER_SENT;
    part->clock_id = id;
    part->clock_sent_ms = t->now_ms;
    part->clock_written_ms = 0;
}

static void clock_report(tracker *t, clock_record *record, int error, int64_t offset)
{
    tracker_part *part = record->part;
    if (error == 0 && offset >= part->known_end) part->known_end = offset + 1;
    if (error == 0 && part->clock_id == record->id) part->clock_written_ms = t->now_ms;
    if (error && part->barrier == BARRIER_SENT && part->clock_id == record->id) {
        part->barrier = BARRIER_WANTED;
        part->barrier_retry_ms = t->now_ms + TRACKER_END_PAUSE_MS;
        tracker_alarm(t, &part->alarm_ms, "clock", part->queue->markers, part->partition, "not written: %s",
                      kafka_error_name(error));
    }
    tracker_part_put(part);
    free(record);
}

/* ------------------------------------------------------------------ END */

kafka_header tracker_group_header(const tracker_config *config)
{
    return (kafka_header){"kmq-group", config->group, strlen(config->group)};
}

static void end_wait(tracker *t, tracker_end_record *record, int64_t until_ms)
{
    record->next = NULL;
    record->until_ms = until_ms;
    if (t->ends_last)
        t->ends_last->next = record;
    else
        t->ends_first = record;
    t->ends_last = record;
}

/* False: not now. The record stays the caller's. */
static bool end_send(tracker *t, tracker_end_record *record)
{
    if (!t->producer) return false;
    kafka_header group = tracker_group_header(&t->config);
    int rc =
        kafka_producer_send(t->producer, record->queue->markers_out, record->partition, record->key, sizeof record->key,
                            record->bytes, record->n, &group, t->config.kmq_format, 0, record, NULL);
    if (rc != KAFKA_OK) return false;
    tracker_send_add(t, &record->send, TRACKER_SEND_END);
    return true;
}

static void end_new(tracker *t, const tracker_part *part, int64_t key_offset, const uint8_t *bytes, size_t n)
{
    tracker_end_record *record = tracker_alloc(sizeof *record + n);
    record->queue = part->queue;
    record->partition = part->partition;
    kmq_marker_encode_key(record->key, part->partition, key_offset);
    record->n = n;
    memcpy(record->bytes, bytes, n);
    t->n_ends++;
    if (KMQ_FAILPOINT("copy_end"))
        end_wait(t, record, t->now_ms + TRACKER_END_PAUSE_MS);
    else if (!end_send(t, record))
        end_wait(t, record, t->now_ms);
}

static void end_report(tracker *t, tracker_end_record *record, int error)
{
    if (error) {
        tracker_alarm(t, &t->alarm_ms[ALARM_PRODUCER], "end", record->queue->markers, record->partition,
                      "not written, sent again: %s", kafka_error_name(error));
        end_wait(t, record, t->now_ms + TRACKER_END_PAUSE_MS);
        return;
    }
    t->n_ends--;
    free(record);
}

typedef struct flushing {
    tracker *t;
    tracker_part *part;
} flushing;

static void flush_record(void *ctx, int64_t key_offset, const uint8_t *bytes, size_t n)
{
    flushing *flushed = ctx;
    end_new(flushed->t, flushed->part, key_offset, bytes, n);
}

static void part_flush(tracker *t, tracker_part *part)
{
    flushing flushed = {t, part};
    tracker_ends_encode(&part->queue->scope, t->config.kmq_format, part->ends, part->n_ends, flush_record, &flushed);
    part->n_ends = 0;
}

void tracker_end_add(tracker *t, tracker_part *part, int64_t offset, uint8_t cause, int64_t copy_offset)
{
    if (part->n_ends == part->cap_ends) {
        size_t cap = part->cap_ends ? part->cap_ends * 2 : 64;
        tracker_end *grown = realloc(part->ends, cap * sizeof *grown);
        if (!grown) tracker_no_memory();
        part->ends = grown;
        part->cap_ends = cap;
    }
    if (part->n_ends == 0) {
        tracker_part_keep(part);
        part->next_ending = t->ending;
        t->ending = part;
    }
    part->ends[part->n_ends++] = (tracker_end){offset, copy_offset, cause};
}

void tracker_ends_flush(tracker *t)
{
    while (t->ending) {
        tracker_part *part = t->ending;
        t->ending = part->next_ending;
        part->next_ending = NULL;
        part_flush(t, part);
        tracker_part_put(part);
    }
}

/* Sends again what waits; the same record is not looked at twice in one go. */
static void ends_again(tracker *t)
{
    tracker_end_record *record = t->ends_first, *last = t->ends_last;
    while (record && record->until_ms <= t->now_ms) {
        bool was_last = record == last;
        t->ends_first = record->next;
        if (!t->ends_first) t->ends_last = NULL;
        if (!end_send(t, record)) {
            end_wait(t, record, t->now_ms + TRACKER_END_PAUSE_MS);
            return;
        }
        if (was_last) return;
        record = t->ends_first;
    }
}

/* ------------------------------------------------------------------ copies */

void tracker_copy_build(const tracker_config *config, const tracker_item *item, int n_partitions, tracker_copy *out)
{
    const tracker_part *part = item->part;
    const tracker_payload *payload = item->payload;
    size_t n = payload->n_headers;
    out->many = n > TRACKER_COPY_FEW ? tracker_alloc((n + TRACKER_OWN_HEADERS) * sizeof *out->many) : NULL;
    out->headers = out->many ? out->many : out->few;
    tracker_source source = {.topic = part->queue->topic,
                             .partition = part->partition,
                             .offset = item->offset,
                             .timestamp_ms = payload->timestamp_ms,
                             .group = config->group,
                             .count_header = config->count_header,
                             .cause = item->cause,
                             .flags = item->flags,
                             .text = item->text,
                             .text_len = item->text_len,
                             .extent = item->extent,
                             .value_len = payload->value_len};
    bool key = item->extent != TRACKER_BARE_POINTER, value = item->extent == TRACKER_WHOLE;
    out->n_headers = tracker_rewrite(&source, &item->fate, payload->headers, n, out->headers, &out->stamp);
    out->partition =
        item->fate.dead && part->partition >= n_partitions ? part->partition % n_partitions : part->partition;
    out->key = key ? payload->key : NULL;
    out->key_len = key ? payload->key_len : 0;
    out->value = value ? payload->value : NULL;
    out->value_len = value ? payload->value_len : 0;
}

bool tracker_copy_send(tracker *t, tracker_item *item)
{
    if (!t->producer || !item->target->out) return false;
    tracker_target *target = item->target;
    if (t->config.transactional) {
        tracker_txn_add(t, item);
        return true;
    }
    tracker_copy copy;
    kafka_error err;
    tracker_copy_build(&t->config, item, target->n_partitions, &copy);
    int rc = kafka_producer_send(t->producer, target->out, copy.partition, copy.key, copy.key_len, copy.value,
                                 copy.value_len, copy.headers, copy.n_headers, 0, item, &err);
    free(copy.many);
    if (rc == KAFKA_EFULL) return false;
    if (rc == KAFKA_OK) {
        tracker_send_add(t, &item->send, TRACKER_SEND_COPY);
        item->alone = tracker_sent_alone(t, item);
        t->n_copies++;
        target->in_flight++;
        tracker_item_unload(t, item); /* the producer has its own copy, and bounds them */
    } else {
        tracker_copy_failed(t, item, err.code);
    }
    return true;
}

static void copy_report(tracker *t, tracker_item *item, int error, int64_t offset)
{
    t->n_copies--;
    item->target->in_flight--;
    if (error)
        tracker_copy_failed(t, item, error);
    else
        tracker_copy_done(t, item, offset);
}

/* ------------------------------------------------------------------ the producer */

static void report(tracker *t, tracker_send *send, int error, int64_t offset)
{
    ring_remove(send);
    if (error) t->check_fatal = true;
    switch (send->kind) {
    case TRACKER_SEND_CLOCK: clock_report(t, (clock_record *)(void *)send, error, offset); break;
    case TRACKER_SEND_END: end_report(t, (tracker_end_record *)(void *)send, error); break;
    case TRACKER_SEND_CHECKPOINT: tracker_checkpoint_report(t, send, error, offset); break;
    case TRACKER_SEND_COPY: copy_report(t, (tracker_item *)(void *)send, error, offset); break;
    }
}

bool tracker_producer_open(tracker *t, kafka_error *err)
{
    static const kafka_property ours[] = {{"linger.ms", "1"},
                                          {"message.max.bytes", "100000000"},
                                          {"queue.buffering.max.messages", "100000"},
                                          {"queue.buffering.max.kbytes", "65536"},
                                          {"socket.nagle.disable", "true"}};
    size_t n = sizeof ours / sizeof ours[0];
    kafka_property *props = tracker_alloc((n + t->config.n_props) * sizeof *props);
    memcpy(props, ours, sizeof ours);
    memcpy(props + n, t->config.props, t->config.n_props * sizeof *props);
    kafka_wake wake = {.fd = t->producer_wake[1]};
    int rc = kafka_producer_open(props, n + t->config.n_props, true, &wake, &t->producer, err);
    free(props);
    if (rc != KAFKA_OK) {
        t->producer = NULL;
        return false;
    }
    t->token_seen = 0; /* the new one has none */
    for (size_t i = 0; i < t->config.n_queues; i++) {
        tracker_queue *queue = &t->queues[i];
        tracker_target *targets[] = {&queue->copies, &queue->dead_letters};
        queue->markers_out = kafka_producer_topic(t->producer, queue->markers, err);
        for (size_t k = 0; k < 2; k++)
            targets[k]->out =
                targets[k]->state == TARGET_OPEN ? kafka_producer_topic(t->producer, targets[k]->topic, err) : NULL;
        if (!queue->markers_out) {
            kafka_producer_destroy(t->producer, NULL, NULL);
            t->producer = NULL;
            return false;
        }
    }
    return true;
}

static void read_reports(tracker *t)
{
    kafka_report reports[REPORTS];
    size_t n;
    /* bounded: what is left comes in the next turn, which the byte in the pipe would not tell */
    for (int pass = 0; t->producer && pass < 8; pass++) {
        n = kafka_producer_reports(t->producer, reports, REPORTS);
        for (size_t i = 0; i < n; i++)
            if (reports[i].opaque) report(t, reports[i].opaque, reports[i].error, reports[i].offset);
        t->more_reports = n == REPORTS;
        if (!t->more_reports) return;
    }
}

static void rebuild(tracker *t, const kafka_error *err)
{
    tracker_alarm(t, &t->alarm_ms[ALARM_PRODUCER], "producer", NULL, -1, "fatal, opened anew: %s", err->text);
    kafka_producer_purge(t->producer);
    do read_reports(t);
    while (t->more_reports);
    kafka_producer_destroy(t->producer, NULL, NULL);
    t->producer = NULL;
    while (t->sent.next != &t->sent) report(t, t->sent.next, err->code ? err->code : -150, -1);
    t->producer_retry_ms = t->now_ms;
}

void tracker_producer_step(tracker *t)
{
    kafka_event event;
    kafka_error err;
    if (t->queues && !t->producer && t->mode >= MODE_RUNNING && t->now_ms >= t->producer_retry_ms &&
        !tracker_producer_open(t, &err)) {
        t->producer_retry_ms = t->now_ms + TRACKER_PAUSE_MS;
        tracker_error_event(t, &err);
    }
    if (!t->producer) return;
    read_reports(t);
    bool fatal = false;
    while (kafka_producer_poll(t->producer, &event)) {
        if (event.type == KAFKA_EVENT_LOG) tracker_log_event(t, event.level, event.text);
        if (event.type == KAFKA_EVENT_TOKEN) tracker_token_want(t);
        kafka_outage_link(&t->outage, &event, t->now_ms);
        if (event.type == KAFKA_EVENT_ERROR) {
            tracker_client_error(t, &event.error);
            fatal |= event.error.fatal;
        }
        kafka_event_free(&event);
    }
    if (KMQ_FAILPOINT("producer_fatal")) kafka_producer_test_fatal(t->producer, "failpoint");
    if (fatal || t->check_fatal) {
        t->check_fatal = false;
        if (kafka_producer_fatal(t->producer, &err)) rebuild(t, &err);
    }
    ends_again(t);
}

int64_t tracker_send_wait(const tracker *t)
{
    if (t->more_reports) return 0;
    if (t->queues && !t->producer && t->mode >= MODE_RUNNING)
        return t->producer_retry_ms > t->now_ms ? t->producer_retry_ms - t->now_ms : 0;
    if (!t->ends_first) return INT64_MAX;
    return t->ends_first->until_ms > t->now_ms ? t->ends_first->until_ms - t->now_ms : 0;
}
