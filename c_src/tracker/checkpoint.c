/* checkpoint - the open set of a marker partition, written to the end of M, so that the commit can move on although old messages
 * are open; and the deletion of what lies below an acknowledged commit.
 *
 *   old enough --build--> parts in memory --producer--> all acknowledged = durable --> the next commit refers to it
 *                              |                 |
 *                              |                 '- one failed, or the partition is gone: forgotten, another one later
 *                              '- as of the position at that moment; what is just being redelivered is open, and in it
 *
 * What is old: the commit is CHECKPOINT_RECORDS or more behind the position (more, when the last checkpoint was large: writing them
 * costs at most a fraction of what M grows by) and has been so for CHECKPOINT_PAUSE_MS; or it is CHECKPOINT_AGE_MS old, whatever has been
 * written since, so that M's retention needs to be longer than that only. Deadlines go out as the broker's clock has them
 * (tracker_clock's shift taken back), because a successor begins without a shift. Error texts of RETRYs are not in it.
 *
 * Whether a commit refers to the checkpoint is decided anew for each commit (tracker_part_commit_value): as long as the book holds
 * anything from before as_of. So a commit that fails, or a successor, changes nothing here.
 *
 * Trimming: below an acknowledged commit, TRIM_RECORDS or TRIM_PAUSE_MS at once, one deletion at a time for a partition, in a helper
 * thread of its own. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

#include "failpoint.h"

enum { RETRY_MS = 5000, TRIM_PAUSE_MS = 60000, TRIM_RETRY_MS = 30000, BYTES_PER_RECORD = 16, RUNS = 512 };

typedef struct checkpoint_record {
    tracker_send send;
    tracker_checkpoint *owner;
    size_t n;
    uint8_t bytes[];
} checkpoint_record;

struct tracker_checkpoint {
    tracker_part *part;
    tracker_reference reference;
    checkpoint_record **records;
    size_t n_records, cap, n_sent, n_done, bytes;
    int64_t open;
    bool failed;
    /* while it is built */
    int64_t shift_ms;
    size_t n_entries;
    uint8_t *entries;
};

static int64_t shifted(int64_t time_ms, int64_t shift_ms)
{
    if (time_ms == INT64_MAX) return time_ms;
    if (shift_ms > 0 && time_ms > INT64_MAX - shift_ms) return INT64_MAX;
    return time_ms + shift_ms > 0 ? time_ms + shift_ms : 0;
}

/* ------------------------------------------------------------------ building */

static int record_add(tracker_checkpoint *checkpoint, const uint8_t *entries, size_t n)
{
    if (checkpoint->n_records == checkpoint->cap) {
        checkpoint->cap = checkpoint->cap ? 2 * checkpoint->cap : 8;
        checkpoint_record **grown = realloc(checkpoint->records, checkpoint->cap * sizeof(checkpoint_record *));
        if (!grown) tracker_no_memory();
        checkpoint->records = grown;
    }
    checkpoint_record *record = tracker_alloc(sizeof *record + n);
    record->owner = checkpoint;
    record->n = n;
    memcpy(record->bytes, entries, n);
    checkpoint->records[checkpoint->n_records++] = record;
    return KMQ_OK;
}

static int keep(void *ctx, const uint8_t *entries, size_t n) { return record_add(ctx, entries, n); }

static void flush_shifted(tracker_checkpoint *checkpoint)
{
    if (checkpoint->n_entries) record_add(checkpoint, checkpoint->entries, checkpoint->n_entries);
    checkpoint->n_entries = 0;
}

static void add_shifted(tracker_checkpoint *checkpoint, const kmq_checkpoint_entry *entry, const kmq_range *ranges,
                        size_t n)
{
    for (size_t done = 0, used; done < n; done += used) {
        int len = kmq_marker_encode_entry(
            checkpoint->entries + checkpoint->n_entries, KMQ_CHECKPOINT_ENTRIES_MAX - checkpoint->n_entries,
            ranges + done, n - done, shifted(entry->due_ms, checkpoint->shift_ms), entry->cause, entry->flags, &used);
        if (len > 0)
            checkpoint->n_entries += (size_t)len;
        else
            flush_shifted(checkpoint); /* full: a fresh part holds it */
    }
}

/* The same entries, their deadlines as the broker's clock has them. */
static int keep_shifted(void *ctx, const uint8_t *entries, size_t n)
{
    tracker_checkpoint *checkpoint = ctx;
    kmq_marker part = {.type = KMQ_MARKER_CHECKPOINT, .entries = entries, .entries_bytes = n};
    kmq_checkpoint_cursor at;
    kmq_checkpoint_entry entry;
    kmq_marker_entries_begin(&part, &at);
    while (kmq_marker_entries_next(&at, &entry)) {
        kmq_marker_cursor cursor;
        kmq_range ranges[RUNS];
        size_t n_ranges = 0;
        kmq_marker_set_begin(&entry.set, &cursor);
        while (kmq_marker_set_next(&cursor, &ranges[n_ranges])) {
            if (++n_ranges < RUNS) continue;
            add_shifted(checkpoint, &entry, ranges, n_ranges);
            n_ranges = 0;
        }
        add_shifted(checkpoint, &entry, ranges, n_ranges);
    }
    return KMQ_OK;
}

/* Entries become records, now that it is known how many there are. */
static void frame(tracker_checkpoint *checkpoint, int64_t log_time_ms)
{
    static uint8_t bytes[KMQ_MARKER_MAX_BYTES]; /* the loop's alone */
    kmq_marker_tlv tlv = {.instance = checkpoint->reference.id,
                          .has_instance = true,
                          .log_time_ms = log_time_ms,
                          .has_log_time = log_time_ms >= 0};
    checkpoint->reference.parts = (uint32_t)checkpoint->n_records;
    for (size_t i = 0; i < checkpoint->n_records; i++) {
        checkpoint_record *entries = checkpoint->records[i];
        int n = kmq_marker_encode_checkpoint(bytes, sizeof bytes, &checkpoint->part->queue->scope,
                                             checkpoint->reference.as_of, (uint32_t)i, checkpoint->reference.parts,
                                             entries->bytes, entries->n, &tlv);
        if (n < 0) abort(); /* entries of that size fit */
        checkpoint_record *record = tracker_alloc(sizeof *record + (size_t)n);
        record->owner = checkpoint;
        record->n = (size_t)n;
        memcpy(record->bytes, bytes, (size_t)n);
        checkpoint->records[i] = record;
        checkpoint->bytes += (size_t)n;
        free(entries);
    }
}

static void build(tracker *t, tracker_part *part)
{
    tracker_checkpoint *checkpoint = tracker_alloc(sizeof *checkpoint);
    int64_t log_time_ms = kmq_lease_book_log_time(&part->book);
    checkpoint->part = part;
    checkpoint->open = kmq_lease_book_open(&part->book);
    checkpoint->reference = (tracker_reference){.as_of = part->position, .first = -1, .last = -1, .id = ++t->instance};
    checkpoint->shift_ms = part->clock.shift_ms;
    int rc;
    if (checkpoint->shift_ms == 0) {
        rc = kmq_lease_book_checkpoint(&part->book, keep, checkpoint);
    } else {
        checkpoint->entries = tracker_alloc(KMQ_CHECKPOINT_ENTRIES_MAX);
        rc = kmq_lease_book_checkpoint(&part->book, keep_shifted, checkpoint);
        flush_shifted(checkpoint);
        free(checkpoint->entries);
        checkpoint->entries = NULL;
    }
    if (rc == KMQ_ENOMEM) tracker_no_memory();
    frame(checkpoint, log_time_ms < 0 ? -1 : shifted(log_time_ms, checkpoint->shift_ms));
    tracker_part_keep(part);
    part->checkpoint = checkpoint;
}

const uint8_t *tracker_checkpoint_part(const tracker_checkpoint *checkpoint, size_t i, size_t *n)
{
    if (i < checkpoint->n_sent || i >= checkpoint->n_records) return NULL;
    *n = checkpoint->records[i]->n;
    return checkpoint->records[i]->bytes;
}

/* ------------------------------------------------------------------ writing */

static void drop(tracker_checkpoint *checkpoint)
{
    tracker_part *part = checkpoint->part;
    if (part->checkpoint == checkpoint) part->checkpoint = NULL;
    for (size_t i = checkpoint->n_sent; i < checkpoint->n_records; i++) free(checkpoint->records[i]);
    free(checkpoint->records);
    free(checkpoint);
    tracker_part_put(part);
}

static void write_on(tracker *t, tracker_checkpoint *checkpoint)
{
    tracker_part *part = checkpoint->part;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_marker_encode_key(key, part->partition, -1);
    while (t->producer && !checkpoint->failed && checkpoint->n_sent < checkpoint->n_records) {
        checkpoint_record *record = checkpoint->records[checkpoint->n_sent];
        kafka_error err;
        int rc = KMQ_FAILPOINT("ck_write")
                     ? KAFKA_EKAFKA
                     : kafka_producer_send(t->producer, part->queue->markers_out, part->partition, key, sizeof key,
                                           record->bytes, record->n, NULL, 0, 0, record, &err);
        if (rc == KAFKA_EFULL) return;
        if (rc != KAFKA_OK) {
            checkpoint->failed = true;
            break;
        }
        tracker_send_add(t, &record->send, TRACKER_SEND_CHECKPOINT);
        checkpoint->n_sent++;
    }
    if (checkpoint->failed && checkpoint->n_done == checkpoint->n_sent) drop(checkpoint);
}

static void durable(tracker *t, tracker_checkpoint *checkpoint)
{
    tracker_part *part = checkpoint->part;
    if (KMQ_FAILPOINT("ck_durable")) return;
    part->reference = checkpoint->reference;
    part->reference_ms = t->now_ms;
    part->checkpoint_bytes = checkpoint->bytes;
    tracker_part_event(t, "checkpoint", part, 4);
    tracker_pair_int(&t->scratch, "as_of", checkpoint->reference.as_of);
    tracker_pair_int(&t->scratch, "open", checkpoint->open);
    tracker_pair_int(&t->scratch, "parts", (int64_t)checkpoint->n_records);
    tracker_pair_int(&t->scratch, "bytes", (int64_t)checkpoint->bytes);
    tracker_event_send(t);
}

void tracker_checkpoint_report(tracker *t, tracker_send *send, int error, int64_t offset)
{
    checkpoint_record *record = (checkpoint_record *)(void *)send;
    tracker_checkpoint *checkpoint = record->owner;
    tracker_part *part = checkpoint->part;
    tracker_reference *reference = &checkpoint->reference;
    free(record);
    checkpoint->n_done++;
    if (error) {
        checkpoint->failed = true;
        part->checkpoint_ms = t->now_ms + RETRY_MS;
        if (!part->gone)
            tracker_alarm(t, &part->alarm_ms, "checkpoint", part->queue->markers, part->partition,
                          "not written, another one later: %s", kafka_error_name(error));
    } else {
        if (reference->first < 0 || offset < reference->first) reference->first = offset;
        if (offset > reference->last) reference->last = offset;
        if (offset >= part->known_end) part->known_end = offset + 1;
    }
    bool whole = checkpoint->n_done == checkpoint->n_records;
    if (whole && !checkpoint->failed && !part->gone) durable(t, checkpoint);
    if (whole || (checkpoint->failed && checkpoint->n_done == checkpoint->n_sent)) drop(checkpoint);
}

void tracker_checkpoint_drop(tracker_part *part)
{
    tracker_checkpoint *checkpoint = part->checkpoint;
    if (!checkpoint) return;
    checkpoint->failed = true; /* its parts that are with the producer come back one by one */
    if (checkpoint->n_done == checkpoint->n_sent) drop(checkpoint);
}

/* ------------------------------------------------------------------ when */

static bool old(const tracker *t, const tracker_part *part)
{
    if (kmq_lease_book_open(&part->book) == 0) return false;
    tracker_value value = tracker_part_commit_value(part);
    int64_t behind = part->position - value.offset, records = t->config.checkpoint_records;
    int64_t age_ms = value.reference ? t->now_ms - part->reference_ms : tracker_part_age_ms(part, t->now_ms);
    int64_t worth = (int64_t)(part->checkpoint_bytes / BYTES_PER_RECORD);
    if (behind >= (records > worth ? records : worth) && age_ms >= t->config.checkpoint_pause_ms) return true;
    return behind > 0 && age_ms >= t->config.checkpoint_age_ms;
}

void tracker_checkpoint_step(tracker *t, tracker_part *part)
{
    if (part->gone || part->state != PART_READY || t->mode != MODE_RUNNING) return;
    if (!part->checkpoint && t->now_ms >= part->checkpoint_ms) {
        part->checkpoint_ms = t->now_ms + TRACKER_COMMIT_MS; /* looked at so often */
        if (!old(t, part)) return;
        part->checkpoint_ms = t->now_ms + t->config.checkpoint_pause_ms;
        build(t, part);
    }
    if (part->checkpoint) write_on(t, part->checkpoint);
}

/* ------------------------------------------------------------------ trimming */

typedef struct trim_job {
    helper_job job;
    tracker_part *part;
    const char *markers;
    int32_t partition;
    int64_t before;
    int rc;
    kafka_error error;
} trim_job;

static void trim_run(helper_job *job, void *thread)
{
    trim_job *trim = (trim_job *)(void *)job;
    kafka_admin *admin = tracker_tracker_admin(thread, &trim->error);
    if (KMQ_FAILPOINT("trim")) kafka_error_set(&trim->error, -1, "failpoint");
    trim->rc = admin ? kafka_admin_delete_records(admin, trim->markers, trim->partition, trim->before, TRACKER_ASK_MS,
                                                  &trim->error)
                     : KAFKA_EKAFKA;
    if (KMQ_FAILPOINT("trimmed")) trim->rc = KAFKA_EKAFKA;
}

static void trim_done(helper_job *job, void *owner)
{
    trim_job *trim = (trim_job *)(void *)job;
    tracker *t = owner;
    tracker_part *part = trim->part;
    part->trimming = false;
    if (trim->rc == KAFKA_OK) {
        part->trimmed = trim->before;
    } else {
        part->trim_ms = t->now_ms + TRIM_RETRY_MS;
        if (!part->gone)
            tracker_alarm(t, &part->alarm_ms, "trim", trim->markers, trim->partition, "records are not deleted: %s",
                          trim->error.text);
    }
    tracker_part_put(part);
    free(trim);
}

void tracker_trim_step(tracker *t, tracker_part *part)
{
    int64_t records = part->committed - part->trimmed;
    if (!t->config.trim || t->sandbox || part->gone || part->trimming || records <= 0 || t->mode != MODE_RUNNING)
        return;
    if (t->now_ms < part->trim_ms) return;
    if (records < t->config.trim_records && t->now_ms < part->trim_by_ms) return;
    trim_job *trim = tracker_alloc(sizeof *trim);
    trim->job.run = trim_run;
    trim->job.done = trim_done;
    trim->job.suspect = true; /* the pool's other thread loads */
    trim->part = part;
    trim->markers = part->queue->markers;
    trim->partition = part->partition;
    trim->before = part->committed;
    part->trimming = true;
    part->trim_by_ms = t->now_ms + TRIM_PAUSE_MS;
    tracker_part_keep(part);
    helper_give(&t->loads, &trim->job);
}
