/* part - one marker partition: reading it, its log time, the barrier before every decision, its commit.
 *
 *   NEW ---start---> REPLAY ---own CLOCK read back---> READY ---a newer marker---> STOPPED (its commit holds)
 *
 * A decision (what is due?) is made only right after a CLOCK of our own has been read back:
 *
 *   the estimate says due --> ask for the group's commit, if the last answer is old --> write CLOCK --> read up to it --> decide
 *
 * so that everything written to M before that moment is in the book, whatever held us up meanwhile, and so that "now" is the
 * broker's. What is due at or above the group's committed offset is held: the group itself will fetch it again. It comes back into
 * the book when a later answer covers it, again behind a CLOCK.
 *
 * Costs: one CLOCK per decision; nothing at all while nothing is due. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

#include "failpoint.h"

enum {
    RECORDS = 500,
    PASSES = 4,
    ASK_FRESH_MS = 1000,
    ASK_PAUSE_MIN_MS = 50,
    ASK_PAUSE_MAX_MS = 1000,
    CLOCK_RETRY_MS = 200,
    DEAF_MS = 10000,
    DEAF_MAX_MS = 300000,
    COUNT_LEASES = 100000,
    HEADERS = 16,
    WARM_MS = (TRACKER_REST_S - 5) * 1000
};

tracker_part *tracker_part_new(tracker *t, tracker_queue *queue, int32_t partition)
{
    tracker_part *part = tracker_alloc(sizeof *part);
    kmq_alloc libc = kmq_alloc_libc();
    part->queue = queue;
    part->partition = partition;
    part->refs = 1;
    part->committed = -1;
    part->reference.as_of = -1;
    part->witness.offset = part->last.offset = -1;
    part->asked_ms = INT64_MIN / 2;
    part->barrier_below = -1;
    part->batch = TRACKER_BATCH;
    part->assigned_ms = t->now_ms;
    part->ask_pause_ms = ASK_PAUSE_MIN_MS;
    part->mark_every_ms = TRACKER_TICK_MS;
    part->deaf_ms = DEAF_MS;
    tracker_lead_init(&part->ahead.lead);
    if (kmq_lease_book_init(&part->book, &libc) != KMQ_OK) tracker_no_memory();
    tracker_clock_init(&part->clock, t->now_ms);
    return part;
}

void tracker_part_keep(tracker_part *part) { part->refs++; }

void tracker_part_put(tracker_part *part)
{
    if (--part->refs > 0) return;
    kmq_lease_book_free(&part->book);
    kafka_group_put(part->txn.group);
    free(part->held);
    free(part->ends);
    free(part);
}

void tracker_part_start(tracker *t, tracker_part *part, int64_t position, int64_t end)
{
    part->position = position;
    part->known_end = end;
    part->state = PART_REPLAY;
    part->barrier = BARRIER_WANTED;
    part->barrier_retry_ms = t->now_ms;
    part->hot = true;
}

void tracker_give_back(tracker_part *part, int64_t offset)
{
    if (kmq_lease_book_give_back(&part->book, offset) != KMQ_OK) tracker_no_memory();
}

/* ------------------------------------------------------------------ reading */

static void barrier_passed(tracker *t, tracker_part *part)
{
    part->barrier = BARRIER_NONE;
    part->deaf_ms = DEAF_MS;
    part->decide_ms = kmq_lease_book_log_time(&part->book);
    part->decide_until_ms = t->now_ms + TRACKER_FRESH_MS;
    if (t->config.transactional) {
        kafka_group_put(part->txn.group);
        part->txn.group = kafka_consumer_group(t->consumer);
    }
    if (part->barrier_below > part->below) {
        part->below = part->barrier_below;
        size_t kept = 0;
        for (size_t i = 0; i < part->n_held; i++) {
            if (part->held[i] < part->below)
                tracker_give_back(part, part->held[i]);
            else if (kmq_lease_book_has(&part->book, part->held[i], NULL))
                part->held[kept++] = part->held[i];
        }
        part->n_held = kept;
    }
    if (part->state != PART_REPLAY) return;
    part->state = PART_READY;
    tracker_clock_pace(&part->clock, t->now_ms);
    part->ask_ms = t->now_ms;                                   /* the first answer before it is needed */
    if (part->n_loaded && part->loaded_ts_ms < part->decide_ms) /* how old the checkpoint is, by the broker's clock */
        part->reference_ms -= part->decide_ms - part->loaded_ts_ms;
    tracker_part_event(t, "ready", part, 4);
    tracker_pair_int(&t->scratch, "loaded", part->n_loaded);
    tracker_pair_int(&t->scratch, "open", kmq_lease_book_open(&part->book));
    tracker_pair_int(&t->scratch, "markers", part->n_read);
    tracker_pair_int(&t->scratch, "ms", t->now_ms - part->assigned_ms);
    tracker_event_send(t);
}

static void stopped_by_newer(tracker *t, tracker_part *part, const kafka_record *record)
{
    uint8_t version, type;
    kmq_marker_newer(record->value, record->value_len, &version, &type);
    part->state = PART_STOPPED;
    part->hot = false;
    tracker_alarm(
        t, &part->alarm_ms, "newer_marker", part->queue->markers, part->partition,
        "offset %lld holds a marker of version %d, type %d: this partition waits until the tracker is upgraded",
        (long long)record->offset, version, type);
}

static int64_t set_size(const kmq_marker_set *set)
{
    kmq_marker_cursor cursor;
    kmq_range run;
    int64_t n = 0;
    kmq_marker_set_begin(set, &cursor);
    while (kmq_marker_set_next(&cursor, &run)) n += run.hi - run.lo;
    return n;
}

/* What may come to be due soon: the clients that it then takes are not to rest, for their first call is slow. */
static void stay_warm(const tracker *t, tracker_part *part)
{
    if (part->state == PART_READY && t->now_ms - part->warm_ms > WARM_MS) part->warm = false;
}

/* False: read no further. */
static bool read_record(tracker *t, tracker_part *part, const kafka_record *record)
{
    if (record->offset < part->position) return true; /* left over from before a seek */
    kmq_header headers[HEADERS];
    size_t n = kafka_record_headers(record, headers, HEADERS);
    if (n > HEADERS) n = HEADERS;
    kmq_marker marker;
    switch (kmq_marker_decode(&part->queue->scope, part->partition, record->key, record->key_len, record->value,
                              record->value_len, headers, n, &marker)) {
    case KMQ_MARKER_NEWER:
        if (KMQ_FAILPOINT("newer_marker")) break; /* as if this were the newer version, to which it says nothing */
        stopped_by_newer(t, part, record);
        return false;
    case KMQ_MARKER_FOREIGN:
        part->n_foreign++;
        part->odd_offset = record->offset;
        break;
    case KMQ_MARKER_MALFORMED:
        part->n_malformed++;
        part->odd_offset = record->offset;
        break;
    case KMQ_MARKER_OURS: {
        bool own = part->barrier == BARRIER_SENT && marker.type == KMQ_MARKER_CLOCK && marker.tlv.has_instance &&
                   marker.tlv.instance == part->clock_id && !KMQ_FAILPOINT("clock_read");
        int64_t time_ms = tracker_clock_feed(&part->clock, record->timestamp_ms, t->now_ms,
                                             own ? part->clock_sent_ms : TRACKER_NOT_OURS);
        if (marker.type == KMQ_MARKER_PARK) marker.time_ms = tracker_clock_shifted(&part->clock, marker.time_ms);
        int64_t open = kmq_lease_book_open(&part->book);
        switch (kmq_lease_book_apply(&part->book, &marker, record->offset, time_ms)) {
        case KMQ_OK: part->n_read++; break;
        case KMQ_ENOMEM: tracker_no_memory();
        default: /* a START of more offsets than any batch has */
            part->n_malformed++;
            part->odd_offset = record->offset;
        }
        if (marker.type == KMQ_MARKER_END && marker.cause == KMQ_END_ACK && part->state == PART_READY)
            part->n_late += set_size(&marker.set) - (open - kmq_lease_book_open(&part->book));
        part->position = record->offset + 1;
        if (own) barrier_passed(t, part);
        if (marker.type != KMQ_MARKER_CLOCK && marker.type != KMQ_MARKER_END) stay_warm(t, part);
        break;
    }
    }
    part->position = record->offset + 1;
    part->last = (tracker_witness){record->offset, record->timestamp_ms};
    if (part->witness.offset < 0) part->witness = part->last;
    return true;
}

void tracker_part_read(tracker *t, tracker_part *part)
{
    kafka_record records[RECORDS];
    bool lost = false;
    for (int pass = 0; pass < PASSES && part->hot && !lost; pass++) {
        if (part->state == PART_NEW || part->state == PART_STOPPED || !part->records) {
            part->hot = false;
            return;
        }
        size_t n = kafka_queue_pop(part->records, records, RECORDS);
        if (n == 0) part->hot = false;
        for (size_t i = 0; i < n && part->state != PART_STOPPED; i++) {
            if (records[i].error == 0) {
                if (!read_record(t, part, &records[i])) break;
            } else if (records[i].error == KAFKA_RECORD_OUT_OF_RANGE) {
                lost = true;
                break;
            } else if (records[i].error != KAFKA_RECORD_EOF) {
                tracker_alarm(t, &part->alarm_ms, "marker_topic", part->queue->markers, part->partition,
                              "cannot be read: %s",
                              records[i].error_text ? records[i].error_text : kafka_error_name(records[i].error));
            }
        }
        kafka_records_free(records, n);
    }
    if (part->position > part->known_end) part->known_end = part->position;
    if (lost) tracker_part_lost(t, part, false);
}

/* ------------------------------------------------------------------ deciding */

static bool decided(const tracker_part *part, int64_t now_ms, int64_t due_ms)
{
    return now_ms < part->decide_until_ms && due_ms <= part->decide_ms;
}

static bool answer_is_old(const tracker *t, const tracker_part *part)
{
    return t->now_ms - part->asked_ms > ASK_FRESH_MS;
}

/* A CLOCK that stands in M and does not come, nor anything before it: whatever has stopped the fetching, without a word, it is begun anew. */
static int64_t deaf_at(const tracker_part *part)
{
    if (part->barrier != BARRIER_SENT || !part->clock_written_ms) return INT64_MAX;
    int64_t since_ms = part->clock.read_ms > part->clock_written_ms ? part->clock.read_ms : part->clock_written_ms;
    return since_ms + part->deaf_ms;
}

static void hear_again(tracker *t, tracker_part *part)
{
    kafka_error err;
    tracker_alarm(t, &part->alarm_ms, "marker_topic", part->queue->markers, part->partition,
                  "nothing was read for %lld s although there is something: it is fetched anew from offset %lld on",
                  (long long)(part->deaf_ms / 1000), (long long)part->position);
    part->deaf_ms = 2 * part->deaf_ms < DEAF_MAX_MS ? 2 * part->deaf_ms : DEAF_MAX_MS;
    kafka_queue_stopped(part->records);
    if (kafka_consumer_seek(t->consumer, part->queue->markers, part->partition, part->position, &err) != KAFKA_OK)
        tracker_error_event(t, &err);
    part->hot = true;
    part->barrier = BARRIER_WANTED;
    part->barrier_retry_ms = t->now_ms;
}

void tracker_part_step(tracker *t, tracker_part *part)
{
    if (part->gone || (part->state != PART_REPLAY && part->state != PART_READY) || t->mode != MODE_RUNNING) return;
    if (t->now_ms >= deaf_at(part)) hear_again(t, part);
    if (part->state == PART_READY && part->barrier == BARRIER_NONE) {
        int64_t due_ms = kmq_lease_book_next_due(&part->book);
        bool due = tracker_clock_wait(&part->clock, due_ms, t->now_ms) == 0 && !decided(part, t->now_ms, due_ms);
        if (due || (part->n_held && part->asked_below > part->below)) {
            part->barrier = BARRIER_WANTED;
            part->barrier_retry_ms = t->now_ms;
        }
    }
    if (part->barrier != BARRIER_WANTED || t->now_ms < part->barrier_retry_ms) return;
    if (part->state == PART_READY && answer_is_old(t, part)) {
        part->asking = true; /* tracker_commits_ask; the barrier goes on with the answer */
        return;
    }
    part->renewing =
        t->now_ms - part->asked_ms > ASK_FRESH_MS / 2; /* where much is due, no barrier has to wait for it */
    if (part->state == PART_READY && t->config.transactional && !tracker_txn_ready(t, part)) return;
    part->barrier_below = part->state == PART_READY ? part->asked_below : -1;
    part->barrier_retry_ms = t->now_ms + CLOCK_RETRY_MS;
    if (!KMQ_FAILPOINT("clock")) tracker_clock_send(t, part);
}

int64_t tracker_part_wait(const tracker *t, const tracker_part *part)
{
    int64_t wait = INT64_MAX;
    if (part->hot && part->state != PART_STOPPED && part->state != PART_NEW) return 0;
    if (t->mode != MODE_RUNNING) return wait;
    /* while it waits for a producer, that has wake-ups of its own */
    bool producer = !t->config.transactional || part->state != PART_READY || tracker_txn_has(part);
    if (part->barrier == BARRIER_WANTED && !part->asking && producer) wait = part->barrier_retry_ms - t->now_ms;
    if (part->barrier == BARRIER_SENT && deaf_at(part) - t->now_ms < wait) wait = deaf_at(part) - t->now_ms;
    if (part->state == PART_READY && part->barrier == BARRIER_NONE) {
        int64_t due_ms = kmq_lease_book_next_due(&part->book);
        if (!decided(part, t->now_ms, due_ms))
            wait = tracker_clock_wait(&part->clock, due_ms, t->now_ms);
        else
            wait = part->decide_until_ms -
                   t->now_ms; /* what holds it up (reads, copies, the rate) has wake-ups of its own ... */
        if (part->read_pause_ms > t->now_ms && part->read_pause_ms - t->now_ms < wait)
            wait = part->read_pause_ms - t->now_ms; /* ... but this */
    }
    if (part->state == PART_READY && (part->n_held || !part->warm) && !part->asking && part->ask_ms - t->now_ms < wait)
        wait = part->ask_ms - t->now_ms;
    if (part->state == PART_READY && tracker_ahead_wait(t, part) < wait) wait = tracker_ahead_wait(t, part);
    int64_t witness = tracker_witness_wait(t, part);
    if (witness < wait) wait = witness;
    return wait < 0 ? 0 : wait;
}

/* ------------------------------------------------------------------ the group's commits, read as an outsider */

typedef struct ask_job {
    helper_job job;
    int rc;
    kafka_error error;
    size_t n;
    kafka_partition *partitions;
    tracker_part *parts[];
} ask_job;

static void ask_run(helper_job *job, void *thread)
{
    ask_job *ask = (ask_job *)(void *)job;
    kafka_admin *admin = tracker_group_admin(thread, &ask->error);
    ask->rc = admin ? kafka_admin_committed(admin, ask->partitions, ask->n, TRACKER_ASK_MS, &ask->error) : KAFKA_EKAFKA;
}

static void answered(tracker *t, tracker_part *part, const kafka_partition *answer)
{
    part->asking = part->renewing = false;
    part->asked_ms =
        t->now_ms; /* a failed question too: what is known goes on, the rest is asked again after the pause */
    bool news = false;
    if (answer && answer->error == 0) {
        int64_t offset = answer->offset > 0 ? answer->offset : 0;
        news = offset > part->asked_below;
        if (news) part->asked_below = offset;
        if (!part->warm && offset > 0) {
            part->warm = true;
            part->warm_ms = t->now_ms;
            tracker_reader_warm(t, part);
        }
    }
    part->ask_pause_ms = news ? ASK_PAUSE_MIN_MS : part->ask_pause_ms * 2;
    if (part->ask_pause_ms > ASK_PAUSE_MAX_MS) part->ask_pause_ms = ASK_PAUSE_MAX_MS;
    part->ask_ms = t->now_ms + part->ask_pause_ms;
}

static void ask_done(helper_job *job, void *owner)
{
    ask_job *ask = (ask_job *)(void *)job;
    tracker *t = owner;
    t->asking_commits = false;
    for (size_t i = 0; i < ask->n; i++) {
        /* one partition's failure does not take the others' answers */
        answered(t, ask->parts[i], ask->rc == KAFKA_OK || ask->partitions[i].offset >= 0 ? &ask->partitions[i] : NULL);
        tracker_part_put(ask->parts[i]);
    }
    /* librdkafka before 2.1 tells a missing right as a time-out */
    const char *name = ask->error.name;
    bool right = strcmp(name, "_TIMED_OUT") == 0 || strstr(name, "AUTHORIZATION");
    if (ask->rc != KAFKA_OK && right)
        tracker_alarm(t, &t->alarm_ms[ALARM_ASK], "group_commits", NULL, -1,
                      "cannot read the commits of group %s: %s. If this goes on while its brokers answer: does the "
                      "tracker have the right DESCRIBE on the group?",
                      t->config.group, ask->error.text);
    else if (ask->rc != KAFKA_OK)
        tracker_failed(t, ALARM_ASK, &ask->error, "group_commits", "cannot read the commits of its group");
    free(ask->partitions);
    free(ask);
}

static bool wants_answer(const tracker *t, const tracker_part *part)
{
    if (part->gone || part->state != PART_READY) return false;
    return part->asking || part->renewing || ((part->n_held || !part->warm) && t->now_ms >= part->ask_ms);
}

void tracker_commits_ask(tracker *t)
{
    size_t n = 0;
    if (t->asking_commits || t->mode != MODE_RUNNING) return;
    for (tracker_part *part = t->parts; part; part = part->next) n += wants_answer(t, part);
    if (n == 0) return;
    ask_job *ask = tracker_alloc(sizeof *ask + n * sizeof(tracker_part *));
    ask->job.run = ask_run;
    ask->job.done = ask_done;
    ask->partitions = tracker_alloc(n * sizeof *ask->partitions);
    for (tracker_part *part = t->parts; part; part = part->next) {
        if (!wants_answer(t, part)) continue;
        part->asking = true;
        tracker_part_keep(part);
        ask->partitions[ask->n] =
            (kafka_partition){.topic = part->queue->topic, .partition = part->partition, .offset = -1001};
        ask->parts[ask->n++] = part;
    }
    t->asking_commits = true;
    helper_give(&t->asks, &ask->job);
}

/* ------------------------------------------------------------------ our own commits */

typedef struct commit_record {
    size_t n;
    tracker_part **parts;
    char (*metadata)[TRACKER_REFERENCE_BYTES];
    kafka_partition partitions[];
} commit_record;

tracker_value tracker_part_commit_value(const tracker_part *part)
{
    int64_t floor = kmq_lease_book_floor(&part->book);
    if (floor < 0) return (tracker_value){part->position, NULL};
    /* What was loaded from a checkpoint has its as_of as marker: hence <=, which at worst refers to it for longer than needed. */
    if (floor <= part->reference.as_of) return (tracker_value){part->reference.as_of, &part->reference};
    return (tracker_value){floor, NULL};
}

void tracker_part_mark(tracker_part *part, int64_t now_ms)
{
    enum { MAX = sizeof part->marks / sizeof part->marks[0] };
    if (now_ms < part->mark_ms) return;
    if (part->n_marks == MAX) { /* every other one will do, from now on at half the pace */
        for (size_t i = 0; i < MAX / 2; i++) part->marks[i] = part->marks[2 * i];
        part->n_marks = MAX / 2;
        part->mark_every_ms *= 2;
    }
    part->marks[part->n_marks++] = (struct tracker_mark){part->position, now_ms};
    part->mark_ms = now_ms + part->mark_every_ms;
}

int64_t tracker_part_age_ms(const tracker_part *part, int64_t now_ms)
{
    int64_t floor = kmq_lease_book_floor(&part->book), since_ms = part->assigned_ms;
    if (floor < 0) return 0;
    for (size_t i = 0; i < part->n_marks && part->marks[i].position <= floor; i++) since_ms = part->marks[i].at_ms;
    return now_ms - since_ms;
}

/* What is in flight was due when it was taken. The walk is bounded: what is due beyond it is not counted. */
static int64_t count_due(const tracker_part *part, int64_t log_ms)
{
    int64_t n = kmq_lease_book_in_flight(&part->book) - (int64_t)part->n_held;
    return (n > 0 ? n : 0) + kmq_lease_book_count_due(&part->book, log_ms, COUNT_LEASES);
}

void tracker_part_measure(const tracker *t, const tracker_part *part, tracker_part_gauges *out)
{
    int64_t next_ms = kmq_lease_book_next_due(&part->book), log_ms = tracker_clock_estimate(&part->clock, t->now_ms);
    int64_t wait_ms = tracker_clock_wait(&part->clock, next_ms, t->now_ms);
    *out = (tracker_part_gauges){
        .oldest_age_ms = tracker_part_age_ms(part, t->now_ms),
        .next_due_ms = wait_ms == INT64_MAX ? -1 : wait_ms,
        .due = count_due(part, log_ms),
        .checkpoint_age_ms = tracker_part_commit_value(part).reference ? t->now_ms - part->reference_ms : -1,
    };
}

static bool wants_commit(const tracker_part *part)
{
    if (part->state != PART_READY || part->gone || part->committing) return false;
    int64_t offset = tracker_part_commit_value(part).offset;
    return offset > part->committed || (part->txn.confirm && offset == part->committed);
}

bool tracker_commits_wanted(const tracker *t)
{
    for (const tracker_part *part = t->parts; part; part = part->next)
        if (wants_commit(part)) return t->mode == MODE_RUNNING;
    return false;
}

static void commit_free(commit_record *commit)
{
    free(commit->parts);
    free(commit->metadata);
    free(commit);
}

void tracker_commits_send(tracker *t)
{
    size_t n = 0;
    for (tracker_part *part = t->parts; part; part = part->next) n += wants_commit(part);
    if (n == 0 || KMQ_FAILPOINT("tracker_commit")) return;
    commit_record *commit = tracker_alloc(sizeof *commit + n * sizeof(kafka_partition));
    commit->parts = tracker_alloc(n * sizeof *commit->parts);
    commit->metadata = tracker_alloc(n * sizeof *commit->metadata);
    for (tracker_part *part = t->parts; part; part = part->next) {
        if (!wants_commit(part)) continue;
        tracker_value value = tracker_part_commit_value(part);
        kafka_partition *partition = &commit->partitions[commit->n];
        *partition =
            (kafka_partition){.topic = part->queue->markers, .partition = part->partition, .offset = value.offset};
        tracker_reference_print(value.reference, part->witness, commit->metadata[commit->n]);
        if (commit->metadata[commit->n][0]) partition->metadata = commit->metadata[commit->n];
        if (value.reference && KMQ_FAILPOINT("ck_commit")) partition->metadata = "ck1 broken";
        commit->parts[commit->n++] = part;
    }
    kafka_error err;
    if (kafka_consumer_commit(t->consumer, commit->partitions, commit->n, commit, &err) != KAFKA_OK) {
        tracker_failed(t, ALARM_COMMIT, &err, "commit", "not sent");
        commit_free(commit);
        return;
    }
    for (size_t i = 0; i < commit->n; i++) {
        commit->parts[i]->committing = true;
        tracker_part_keep(commit->parts[i]);
    }
    t->n_commits++;
}

void tracker_commit_done(tracker *t, const kafka_event *event)
{
    commit_record *commit = event->opaque;
    if (!commit) return;
    t->n_commits--;
    int code = event->error.code;
    for (size_t i = 0; i < commit->n; i++) {
        tracker_part *part = commit->parts[i];
        int error = code ? code : i < event->n_partitions ? event->partitions[i].error : 0;
        part->committing = false;
        if (error == 0) {
            part->committed = commit->partitions[i].offset;
            part->txn.confirm = false;
            if (commit->metadata[i][0] == 'c' && KMQ_FAILPOINT("ck_committed")) part->committed = -1;
        } else {
            code = error;
        }
        tracker_part_put(part);
    }
    /* A commit that a rebalance has overtaken is refused, as it should be: the next owner's counts. */
    if (code && t->mode == MODE_RUNNING) {
        kafka_error err;
        kafka_error_set(&err, code, "%s", kafka_error_name(code));
        tracker_failed(t, ALARM_COMMIT, &err, "commit", "refused");
    }
    commit_free(commit);
}
