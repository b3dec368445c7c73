/* reader - reads records by exact offset: those asked for, never a neighbour.
 *
 *      offsets wanted   12        15 16                  90412            (ascending)
 *      the log          12 13 14     16 17 c 19 ...      90412            c = control record; 15 was compacted away
 *                        |        ^   |      ^-- read on to                ^-- a long gap: seek
 *                      found    gone found
 *
 * A wanted offset is found when a record with it arrives, and gone when the reading has passed it: a record of a higher offset arrives, the
 * end of the partition is behind it, or the broker says that it is out of its range and the watermarks say so, too. An offset at or beyond
 * the high watermark is gone only when the leader itself names that watermark (a leader that does not know it yet answers with an
 * error, and the offset stays unknown). Time over, or an error: what was not reported is unknown.
 *
 * Invariants: (1) each wanted offset is reported at most once, in order; (2) fetching is stopped and no message is held when
 * kafka_reader_read returns. Costs: one start and stop of the fetcher a call (about 1 ms), then the speed of plain reading; a seek
 * costs as much as a megabyte of reading on. Memory: the fetcher reads ahead of us, at most 32 MiB.
 * Thread rule: one thread at a time, and one that may block. Transactions are not respected: an offset that was handed out was committed. */
#include "internal.h"
#include <stdlib.h>
#include <string.h>

enum {
    GAP_BYTES = 1 << 20, /* a gap that is larger, by the size of the records so far, is skipped by a seek ... */
    GAP_MIN = 100,       /* ... unless it is of a few offsets */
    RECORD_BYTES = 100,  /* what a record is taken for beside its key and value */
    LOOK = 256,          /* messages from one look at the clock to the next */
    RETRY_PAUSE_MS = 20  /* between two tries of what the broker contradicts itself about */
};

typedef struct reader_topic {
    rd_kafka_topic_t *rkt;
    int n_partitions; /* 0: to be asked for */
    struct reader_topic *next;
} reader_topic;

struct kafka_reader {
    rd_kafka_t *rk;
    rd_kafka_queue_t *main; /* errors and logs: read, and the one that says why nothing connects is kept */
    kafka_cause cause;
    rd_kafka_queue_t *queue; /* what is being read */
    reader_topic *topics;
    kafka_reaper *reaper;
};

/* One call of kafka_reader_read. */
typedef struct reading {
    kafka_reader *reader;
    rd_kafka_topic_t *rkt;
    int32_t partition;
    const int64_t *offsets;
    size_t n, i; /* offsets[0..i-1] are reported */
    int64_t deadline_ms;
    void (*each)(void *ctx, int64_t offset, const kafka_record *record);
    void *ctx;
    int64_t sought;
    int64_t n_records, n_bytes; /* that came so far */
    unsigned n_taken;
} reading;

/* ------------------------------------------------------------------ open, destroy */

int kafka_reader_open(const kafka_property *props, size_t n_props, kafka_reader **out, kafka_error *err)
{
    static const kafka_property defaults[] = {{"fetch.message.max.bytes", "262144"}, {"fetch.error.backoff.ms", "50"}};
    /* A fetch that waits at the end of one partition would hold up the next one. */
    static const kafka_property forced[] = {
        {"enable.auto.commit", "false"},
        {"enable.auto.offset.store", "false"},
        {"enable.partition.eof", "true"},
        {"auto.offset.reset", "error"},
        {"isolation.level", "read_uncommitted"},
        {"fetch.wait.max.ms", "10"},
        {"fetch.min.bytes", "1"},
        /* A full queue makes the fetcher rest for a second (librdkafka before 2.2): it is not to be full. */
        {"queued.min.messages", "1000000"},
        {"queued.max.messages.kbytes", "32768"},
        {"?fetch.queue.backoff.ms", "10"}};
    int result = KAFKA_OK;
    size_t n = 0;
    kafka_reader *reader = calloc(1, sizeof *reader);
    kafka_reaper *reaper = kafka_reaper_new();
    kafka_property *own = malloc((n_props + 1) * sizeof *own);
    if (reader == NULL || reaper == NULL || own == NULL) {
        result = kafka_no_memory(err);
        goto fail;
    }
    for (size_t i = 0; i < n_props; i++) /* no group: it would look for a coordinator that it has no use for */
        if (strcmp(props[i].name, "group.id") != 0 && strcmp(props[i].name, "group.instance.id") != 0)
            own[n++] = props[i];
    reader->reaper = reaper;
    reader->rk = kafka_client_new(RD_KAFKA_CONSUMER, defaults, 2, own, n, forced, sizeof forced / sizeof forced[0],
                                  kafka_common_events(props, n_props), err);
    if (reader->rk == NULL) {
        result = KAFKA_EKAFKA;
        goto fail;
    }
    free(own);
    reader->main = rd_kafka_queue_get_main(reader->rk);
    rd_kafka_set_log_queue(reader->rk, reader->main);
    reader->queue = rd_kafka_queue_new(reader->rk);
    *out = reader;
    return KAFKA_OK;
fail:
    free(own);
    free(reaper);
    free(reader);
    return result;
}

int kafka_reader_set_token(kafka_reader *reader, const kafka_token *token, kafka_error *err)
{
    return kafka_set_token(reader->rk, token, err);
}

void kafka_reader_destroy(kafka_reader *reader)
{
    while (reader->topics != NULL) {
        reader_topic *topic = reader->topics;
        reader->topics = topic->next;
        rd_kafka_topic_destroy(topic->rkt);
        free(topic);
    }
    rd_kafka_queue_destroy(reader->queue);
    rd_kafka_queue_destroy(reader->main);
    kafka_reap(reader->reaper, reader->rk, RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE, NULL, NULL);
    free(reader);
}

/* Kept for the reader's life: a topic handle that goes and comes back must ask for its metadata again. */
static reader_topic *topic_of(kafka_reader *reader, const char *name, kafka_error *err)
{
    reader_topic *topic = reader->topics;
    while (topic != NULL && strcmp(rd_kafka_topic_name(topic->rkt), name) != 0) topic = topic->next;
    if (topic != NULL) return topic;
    if ((topic = calloc(1, sizeof *topic)) == NULL) {
        kafka_no_memory(err);
        return NULL;
    }
    topic->rkt = rd_kafka_topic_new(reader->rk, name, NULL);
    if (topic->rkt == NULL) {
        kafka_fail(err, reader->rk, rd_kafka_last_error(), name);
        free(topic);
        return NULL;
    }
    topic->next = reader->topics;
    reader->topics = topic;
    return topic;
}

/* Asks once whether the topic is there: the fetcher alone would wait silently for it to appear. */
static int look_up(kafka_reader *reader, reader_topic *topic, int32_t partition, int timeout_ms, kafka_error *err)
{
    const rd_kafka_metadata_t *md;
    if (partition >= topic->n_partitions) {
        rd_kafka_resp_err_t code =
            kafka_metadata(reader->rk, topic->rkt, false, &reader->cause, reader->main, timeout_ms, &md);
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
            return kafka_cause_fail(&reader->cause, err, reader->rk, code, rd_kafka_topic_name(topic->rkt));
        code = md->topic_cnt == 1 ? md->topics[0].err : RD_KAFKA_RESP_ERR__BAD_MSG;
        topic->n_partitions = code == RD_KAFKA_RESP_ERR_NO_ERROR ? md->topics[0].partition_cnt : 0;
        rd_kafka_metadata_destroy(md);
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR && (partition < 0 || partition >= topic->n_partitions))
            code = RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART;
        if (code != RD_KAFKA_RESP_ERR_NO_ERROR)
            return kafka_fail(err, reader->rk, code, rd_kafka_topic_name(topic->rkt));
    }
    return KAFKA_OK;
}

/* ------------------------------------------------------------------ one reading */

static int left_ms(const reading *r) { return kafka_left_ms(r->deadline_ms); }

/* All that is wanted below this offset is gone. */
static void gone_below(reading *r, int64_t offset)
{
    while (r->i < r->n && r->offsets[r->i] < offset) r->each(r->ctx, r->offsets[r->i++], NULL);
}

/* What the leader says its range is: below and beyond it all is gone. False: it cannot say now. */
static bool gone_outside(reading *r)
{
    int64_t low, high;
    rd_kafka_resp_err_t code = rd_kafka_query_watermark_offsets(r->reader->rk, rd_kafka_topic_name(r->rkt),
                                                                r->partition, &low, &high, left_ms(r));
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return false;
    gone_below(r, low);
    if (r->i < r->n && r->offsets[r->i] >= high) gone_below(r, INT64_MAX);
    return true;
}

static void seek_over_gap(reading *r, int64_t position)
{
    if (r->i == r->n || r->offsets[r->i] == r->sought) return;
    int64_t gap = r->offsets[r->i] - position, each = r->n_bytes / r->n_records;
    if (gap <= GAP_MIN || gap <= GAP_BYTES / each) return;
    r->sought = r->offsets[r->i];
    /* does not wait: until it takes effect, records from before the gap still come, and are skipped */
    rd_kafka_seek(r->rkt, r->partition, r->sought, 0);
}

static void take_record(reading *r, rd_kafka_message_t *message)
{
    r->n_records++;
    r->n_bytes += RECORD_BYTES + (int64_t)(message->len + message->key_len);
    gone_below(r, message->offset);
    if (r->i < r->n && r->offsets[r->i] == message->offset) {
        kafka_record record;
        kafka_record_make(message, &record);
        r->each(r->ctx, r->offsets[r->i++], &record);
    }
    seek_over_gap(r, message->offset);
}

/* What a message is to the reading: go on, start again at what is wanted next (true in *again), or an error. */
static int take(reading *r, rd_kafka_message_t *message, bool *again, kafka_error *err)
{
    switch (message->err) {
    case RD_KAFKA_RESP_ERR_NO_ERROR: take_record(r, message); return KAFKA_OK;
    case RD_KAFKA_RESP_ERR__PARTITION_EOF:
        gone_below(r, message->offset);
        if (r->i < r->n && r->offsets[r->i] >= message->offset)
            gone_outside(r); /* if it cannot say: the record may still come */
        return KAFKA_OK;
    case RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET:
    case RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE: {
        size_t before = r->i;
        gone_outside(r);
        if (r->i == before) kafka_pause_ms(RETRY_PAUSE_MS); /* within its range after all, or no answer */
        *again = true;
        return KAFKA_OK;
    }
    default: kafka_fail(err, r->reader->rk, message->err, rd_kafka_topic_name(r->rkt)); return KAFKA_EKAFKA;
    }
}

/* What is there is taken without a look at the clock but for each LOOK-th: a reading goes over hundreds of thousands. NULL: time over. */
static rd_kafka_message_t *next(reading *r)
{
    rd_kafka_message_t *message = NULL;
    if (++r->n_taken % LOOK) message = rd_kafka_consume_queue(r->reader->queue, 0);
    if (message) return message;
    int left = left_ms(r);
    return left == 0 ? NULL : rd_kafka_consume_queue(r->reader->queue, left);
}

/* Reads on from the next wanted offset until all are reported, or the fetcher must be started afresh (*again). */
static int run(reading *r, bool *again, kafka_error *err)
{
    int result = KAFKA_OK;
    *again = false;
    r->sought = r->offsets[r->i];
    if (rd_kafka_consume_start_queue(r->rkt, r->partition, r->sought, r->reader->queue) != 0)
        return kafka_fail(err, r->reader->rk, rd_kafka_last_error(), rd_kafka_topic_name(r->rkt));
    while (r->i < r->n && !*again && result == KAFKA_OK) {
        rd_kafka_message_t *message = next(r);
        if (message == NULL) {
            result = kafka_fail(err, NULL, RD_KAFKA_RESP_ERR__TIMED_OUT, rd_kafka_topic_name(r->rkt));
        } else {
            result = take(r, message, again, err);
            rd_kafka_message_destroy(message);
        }
    }
    rd_kafka_consume_stop(r->rkt, r->partition);
    return result;
}

int kafka_reader_read(kafka_reader *reader, const char *topic, int32_t partition, const int64_t *offsets, size_t n,
                      int timeout_ms, void (*each)(void *ctx, int64_t offset, const kafka_record *record), void *ctx,
                      kafka_error *err)
{
    bool again = true;
    kafka_cause_read(&reader->cause, reader->main);
    reader_topic *named = topic_of(reader, topic, err);
    if (named == NULL) return KAFKA_EKAFKA;
    reading r = {.reader = reader,
                 .rkt = named->rkt,
                 .partition = partition,
                 .offsets = offsets,
                 .n = n,
                 .deadline_ms = kafka_now_ms() + timeout_ms,
                 .each = each,
                 .ctx = ctx};
    int result = look_up(reader, named, partition, timeout_ms, err);
    while (r.i < n && again && result == KAFKA_OK) {
        result = run(&r, &again, err);
        if (again && left_ms(&r) == 0 && r.i < n) result = kafka_fail(err, NULL, RD_KAFKA_RESP_ERR__TIMED_OUT, topic);
    }
    if (result != KAFKA_OK) named->n_partitions = 0; /* perhaps it is not there any more: look again next time */
    return result;
}
