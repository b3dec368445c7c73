/* txn - redelivery in transactions: copies, their ENDs and our own commit in M become visible together, or not at all.
 *
 *      planned --add--> waiting in its part --job of a lane--> begin, offsets, copies, ENDs, commit --> committed: forgotten
 *                           ^                                            | aborted: certainly nothing of it
 *                           '-- due again, decided anew <----------------+ dead: nobody knows yet
 *
 *   a lane = a thread and a producer, for one marker partition at a time; TRACKER_LANES of them
 *
 *      FREE --a part wants one--> OPENING --init--> READY --job--> BUSY --committed, aborted--> READY
 *        ^                           | failed: later               | dead
 *        '---------------------------+-----------------------------+------- part gone, or another part waits and this one rests
 *
 * Why nothing is copied twice:
 *   (1) The transactional id is the partition's, so whoever begins to serve it (init) ends what a predecessor has left open, and fences him.
 *   (2) A decision is made behind a CLOCK that was sent after our init: what the predecessor had committed is read before it. (M is read
 *       read_committed, or an aborted END would end a message that was never copied.)
 *   (3) The commit in M goes first, with the group's metadata of the moment of the decision: one that has lost the partition meanwhile is
 *       refused before it writes anything, even when it has made its producer anew.
 *   (4) What a dead transaction has become is known when its id has been initialised again. So its part makes a new producer, and
 *       decides all of it anew, behind another CLOCK. It does so only after a commit of its own was acknowledged: one who has been fenced
 *       because the partition is another's by now must not fence back.
 *
 * One bad message: copies and dead letters never share a transaction, so a dead letter topic fails dead letters only. A message that is
 * refused aborts what went with it; which one it was is found out by sending them one at a time within the transaction, the largest first;
 * then it waits (blocked.c) and the others go without it.
 *
 * Our commit: while a transaction of a part is out no other commit of it is, and the other way round. So the order in which they are
 * written is that in which they are sent, and it never goes back.
 *
 * Bounds: TRACKER_LANES producers; MESSAGES and BYTES a transaction; its time-out, and ABORT_MS more until its lane is free again. A part
 * whose transactions fail pauses, for PAUSE_MAX_MS at most, and leaves its lane to others. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

#include "failpoint.h"

enum {
    MESSAGES = 4000,
    BYTES = 16 << 20,
    INIT_MS = 10000,
    ABORT_MS = 5000,
    PAUSE_MIN_MS = 250,
    PAUSE_MAX_MS = 30000,
    SOLO_MS = 10000,
    WARM_MS = 2000, /* a producer is made so long before something is due */
    REST_MS = 1000  /* a lane that had nothing to do for so long can be taken by another part */
};

typedef enum lane_state { LANE_FREE, LANE_OPENING, LANE_READY, LANE_BUSY } lane_state;

struct tracker_lane {
    helper_pool pool;
    lane_state state;
    tracker_part *part; /* NULL: FREE */
    int64_t used_ms;
    /* the thread's while a job is out, else the loop's */
    kafka_txn *producer;
    uint32_t token_seen;
};

typedef enum txn_result { TXN_COMMITTED, TXN_ABORTED, TXN_DEAD } txn_result;

typedef struct txn_job {
    helper_job job;
    tracker_lane *lane;
    const tracker_config *config;
    tracker_token *token;
    tracker_part *part; /* its queue and partition are read by the thread, nothing else */
    const char *markers;
    bool open; /* only a producer */
    /* a transaction */
    kafka_group *group;
    kafka_partition commit;
    char metadata[TRACKER_REFERENCE_BYTES];
    const char *target;
    int n_partitions;
    bool solo;
    tracker_item **items;
    size_t n;
    kafka_txn_report *reports; /* of the copies */
    kafka_txn_report *end_reports;
    size_t n_ends;
    int64_t deadline_ms;
    /* what came out */
    txn_result result;
    int64_t markers_end;
    kafka_error error;
} txn_job;

/* ------------------------------------------------------------------ in the lane's thread */

static int left_ms(const txn_job *job)
{
    int64_t left = job->deadline_ms - tracker_now_ms();
    return left > 0 ? (int)left : 0;
}

static void producer_close(tracker_lane *lane)
{
    if (lane->producer) kafka_txn_destroy(lane->producer);
    lane->producer = NULL;
}

static int producer_open(txn_job *job)
{
    tracker_lane *lane = job->lane;
    bool fresh = !lane->producer;
    if (fresh) {
        lane->token_seen = 0;
        lane->producer = tracker_txn_open(job->config, job->markers, job->part->partition, &job->error);
        if (!lane->producer) return KAFKA_EDEAD;
    }
    int rc = tracker_token_give_txn(job->token, &lane->token_seen, lane->producer, &job->error);
    if (fresh && KMQ_FAILPOINT("txn_open")) rc = KAFKA_EDEAD;
    if (rc == KAFKA_OK && fresh) rc = kafka_txn_init(lane->producer, INIT_MS, &job->error);
    if (rc != KAFKA_OK) producer_close(lane);
    return rc;
}

static int copies_send(txn_job *job)
{
    int rc = KAFKA_OK;
    for (size_t i = 0; i < job->n && rc == KAFKA_OK; i++) {
        tracker_copy copy;
        tracker_copy_build(job->config, job->items[i], job->n_partitions, &copy);
        do {
            rc = kafka_txn_send(job->lane->producer, job->target, copy.partition, copy.key, copy.key_len, copy.value,
                                copy.value_len, copy.headers, copy.n_headers, &job->reports[i], &job->error);
            if (rc != KAFKA_EFULL) break;
            rc = kafka_txn_flush(job->lane->producer, left_ms(job), &job->error);
        } while (rc == KAFKA_OK);
        free(copy.many);
        if (rc == KAFKA_OK && job->solo) rc = kafka_txn_flush(job->lane->producer, left_ms(job), &job->error);
    }
    return rc == KAFKA_OK ? kafka_txn_flush(job->lane->producer, left_ms(job), &job->error) : rc;
}

typedef struct ends_sending {
    txn_job *job;
    int rc;
} ends_sending;

static void end_out(void *ctx, int64_t key_offset, const uint8_t *bytes, size_t n)
{
    ends_sending *sending = ctx;
    txn_job *job = sending->job;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    if (sending->rc != KAFKA_OK) return;
    kmq_marker_encode_key(key, job->part->partition, key_offset);
    kafka_header group = tracker_group_header(job->config);
    sending->rc = kafka_txn_send(job->lane->producer, job->markers, job->part->partition, key, sizeof key, bytes, n,
                                 &group, job->config->kmq_format, &job->end_reports[job->n_ends++], &job->error);
}

static int ends_send(txn_job *job)
{
    ends_sending sending = {job, KAFKA_OK};
    tracker_end *ends = tracker_alloc(job->n * sizeof *ends);
    job->end_reports = tracker_alloc(job->n * sizeof *job->end_reports);
    for (size_t i = 0; i < job->n; i++)
        ends[i] = (tracker_end){job->items[i]->offset, job->reports[i].offset,
                                job->items[i]->fate.dead ? KMQ_END_DEAD_LETTERED : KMQ_END_REDELIVERED};
    tracker_ends_encode(&job->part->queue->scope, job->config->kmq_format, ends, job->n, end_out, &sending);
    free(ends);
    if (sending.rc == KAFKA_OK) sending.rc = kafka_txn_flush(job->lane->producer, left_ms(job), &job->error);
    for (size_t i = 0; i < job->n_ends && sending.rc == KAFKA_OK; i++)
        if (job->end_reports[i].offset >= job->markers_end) job->markers_end = job->end_reports[i].offset + 1;
    return sending.rc;
}

static int transact(txn_job *job)
{
    kafka_txn *producer = job->lane->producer;
    if (KMQ_FAILPOINT("txn_begin")) return KAFKA_EDEAD;
    int rc = kafka_txn_begin(producer, &job->error);
    if (rc != KAFKA_OK) return rc;
    rc = kafka_txn_offsets(producer, job->group, &job->commit, 1, left_ms(job), &job->error);
    if (rc == KAFKA_OK && KMQ_FAILPOINT("txn_offsets")) rc = KAFKA_EABORT;
    if (rc == KAFKA_OK) rc = copies_send(job);
    if (rc == KAFKA_OK && KMQ_FAILPOINT("txn_copies")) rc = KAFKA_EABORT;
    if (rc == KAFKA_OK) rc = ends_send(job);
    if (rc == KAFKA_OK && KMQ_FAILPOINT("txn_ends")) rc = KAFKA_EABORT;
    if (rc == KAFKA_OK) rc = kafka_txn_commit(producer, left_ms(job), &job->error);
    if (rc == KAFKA_OK && KMQ_FAILPOINT("txn_committed")) rc = KAFKA_EDEAD;
    return rc;
}

static void run(helper_job *helper, void *thread)
{
    txn_job *job = (txn_job *)(void *)helper;
    kafka_error err;
    (void)thread;
    int rc = producer_open(job);
    job->result = rc == KAFKA_OK ? TXN_COMMITTED : TXN_DEAD;
    if (rc != KAFKA_OK || job->open) return;
    rc = transact(job);
    if (rc == KAFKA_OK) return;
    job->result =
        rc == KAFKA_EABORT && kafka_txn_abort(job->lane->producer, ABORT_MS, &err) == KAFKA_OK ? TXN_ABORTED : TXN_DEAD;
    /* the next one begins with a fresh producer, and init; and what is still on its way does not touch our reports */
    producer_close(job->lane);
}

/* ------------------------------------------------------------------ lanes */

static void lane_free(tracker_lane *lane)
{
    producer_close(lane);
    lane->part->txn.lane = NULL;
    tracker_part_put(lane->part);
    lane->part = NULL;
    lane->state = LANE_FREE;
}

static tracker_lane *lane_new(tracker *t)
{
    tracker_lane *lane = tracker_alloc(sizeof *lane);
    void *keep = lane;
    if (helper_start(&lane->pool, t->jobs_wake[1], &keep, 1, NULL, 0) == 0) return lane;
    free(lane);
    return NULL;
}

static bool rests(const tracker *t, const tracker_lane *lane)
{
    const tracker_txn *txn = &lane->part->txn;
    return lane->state == LANE_READY && !txn->first[0] && !txn->first[1] && t->now_ms - lane->used_ms >= REST_MS;
}

/* A lane for one more part; NULL: all are at work, or another part's and not to be taken. */
static tracker_lane *lane_find(tracker *t, bool urgent)
{
    tracker_lane *resting = NULL;
    for (size_t i = 0; i < TRACKER_LANES; i++) {
        if (!t->lanes[i]) return t->lanes[i] = lane_new(t);
        if (t->lanes[i]->state == LANE_FREE) return t->lanes[i];
        if (rests(t, t->lanes[i]) && (!resting || t->lanes[i]->used_ms < resting->used_ms)) resting = t->lanes[i];
    }
    if (!resting || !urgent) return NULL;
    lane_free(resting);
    return resting;
}

static txn_job *job_new(tracker *t, tracker_lane *lane)
{
    txn_job *job = tracker_alloc(sizeof *job);
    job->job.run = run;
    job->lane = lane;
    job->config = &t->config;
    job->token = &t->token;
    job->part = lane->part;
    job->markers = lane->part->queue->markers;
    return job;
}

static void job_free(txn_job *job)
{
    kafka_group_put(job->group);
    free(job->items);
    free(job->reports);
    free(job->end_reports);
    free(job);
}

static void pause_part(tracker *t, tracker_part *part)
{
    tracker_txn *txn = &part->txn;
    txn->pause_ms = txn->pause_ms ? 2 * txn->pause_ms : PAUSE_MIN_MS;
    if (txn->pause_ms > PAUSE_MAX_MS) txn->pause_ms = PAUSE_MAX_MS;
    txn->retry_ms = t->now_ms + txn->pause_ms;
}

/* A right that is missing is named, as it is to be granted. */
static void open_alarm(tracker *t, tracker_part *part, const kafka_error *error)
{
    bool denied = strcmp(error->name, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED") == 0;
    tracker_alarm(t, &part->alarm_ms, "transaction", part->queue->markers, part->partition,
                  "no transactional producer, nothing is redelivered: %s%s%s%s", error->text,
                  denied ? ": grant WRITE and DESCRIBE on transactional ids with the prefix " : "",
                  denied ? t->config.tracker_group : "", denied ? "/" : "");
}

static void open_done(helper_job *helper, void *owner)
{
    txn_job *job = (txn_job *)(void *)helper;
    tracker *t = owner;
    tracker_lane *lane = job->lane;
    tracker_part *part = lane->part;
    if (job->result == TXN_COMMITTED) {
        lane->state = LANE_READY;
        lane->used_ms = t->now_ms;
    } else {
        pause_part(t, part);
        if (!part->gone) open_alarm(t, part, &job->error);
        lane_free(lane);
    }
    job_free(job);
}

static void lane_give(tracker *t, tracker_part *part, bool urgent)
{
    tracker_lane *lane = lane_find(t, urgent);
    if (!lane) return;
    part->txn.wanted = false;
    part->txn.lane = lane;
    lane->part = part;
    tracker_part_keep(part);
    lane->state = LANE_OPENING;
    txn_job *job = job_new(t, lane);
    job->open = true;
    job->job.done = open_done;
    helper_give(&lane->pool, &job->job);
}

bool tracker_txn_has(const tracker_part *part)
{
    const tracker_lane *lane = part->txn.lane;
    return lane && (lane->state == LANE_READY || lane->state == LANE_BUSY);
}

bool tracker_txn_ready(tracker *t, tracker_part *part)
{
    if (!part->txn.lane) part->txn.wanted = t->mode == MODE_RUNNING;
    return tracker_txn_has(part);
}

bool tracker_txn_may_take(const tracker *t, const tracker_part *part)
{
    return tracker_txn_has(part) && t->now_ms >= part->txn.retry_ms && !part->txn.confirm;
}

/* ------------------------------------------------------------------ what waits to go out */

void tracker_txn_add(tracker *t, tracker_item *item)
{
    tracker_txn *txn = &item->part->txn;
    int which = item->fate.dead;
    item->next = NULL;
    if (txn->last[which])
        txn->last[which]->next = item;
    else
        txn->first[which] = item;
    txn->last[which] = item;
    item->target->in_flight++;
    t->n_copies++;
}

static tracker_item *take(tracker *t, tracker_txn *txn, int which)
{
    tracker_item *item = txn->first[which];
    if (!item) return NULL;
    txn->first[which] = item->next;
    if (!txn->first[which]) txn->last[which] = NULL;
    item->target->in_flight--;
    t->n_copies--;
    return item;
}

void tracker_txn_part_drop(tracker *t, tracker_part *part)
{
    tracker_item *item;
    for (int which = 0; which < 2; which++)
        while ((item = take(t, &part->txn, which))) tracker_item_back(t, item);
}

void tracker_txn_drop(tracker *t)
{
    for (tracker_part *part = t->parts; part; part = part->next) tracker_txn_part_drop(t, part);
}

/* ------------------------------------------------------------------ what became of one */

/* Errors that are the target's, whichever message they came with. */
static bool of_target(const char *name)
{
    return strcmp(name, "TOPIC_AUTHORIZATION_FAILED") == 0 || strstr(name, "UNKNOWN_TOPIC") ||
           strstr(name, "UNKNOWN_PARTITION");
}

/* True: it is about single messages, or their target, which see to themselves; the part need not pause. */
static bool aborted(tracker *t, txn_job *job)
{
    bool all = of_target(job->error.name) && job->n_ends == 0, small = all;
    for (size_t i = 0; i < job->n; i++) {
        int error = job->reports[i].known ? job->reports[i].error : 0;
        const char *name = kafka_error_name(error);
        tracker_item *item = job->items[i];
        bool own = error && strncmp(name, "_PURGE", 6) != 0;
        if (!own && !all) {
            tracker_item_back(t, item);
            continue;
        }
        bool single = !kafka_error_retriable(error);
        small |= single || of_target(name);
        item->alone = job->solo;
        tracker_item_unload(t, item);
        if (single && !all && !job->solo && !of_target(name)) { /* its whole batch says so: which one is it? */
            item->target->solo_until_ms = t->now_ms + SOLO_MS;
            tracker_item_back(t, item);
        } else {
            tracker_copy_failed(t, item, own ? error : job->error.code);
        }
    }
    return small;
}

static void dead(tracker *t, txn_job *job)
{
    tracker_part *part = job->part;
    part->txn.void_ms = t->now_ms;
    part->txn.confirm = true;
    part->decide_until_ms = 0;
    for (size_t i = 0; i < job->n; i++) tracker_item_back(t, job->items[i]);
    tracker_txn_part_drop(t, part);
}

static void run_done(helper_job *helper, void *owner)
{
    txn_job *job = (txn_job *)(void *)helper;
    tracker *t = owner;
    tracker_lane *lane = job->lane;
    tracker_part *part = lane->part;
    bool pauses = job->result != TXN_COMMITTED;
    t->n_txns--;
    part->committing = false;
    lane->state = LANE_READY;
    lane->used_ms = t->now_ms;
    for (size_t i = 0; i < job->n; i++) job->items[i]->target->in_flight--;
    t->n_copies -= job->n;
    switch (job->result) {
    case TXN_COMMITTED:
        part->txn.pause_ms = 0;
        part->committed = job->commit.offset;
        if (job->markers_end > part->known_end) part->known_end = job->markers_end;
        for (size_t i = 0; i < job->n; i++) tracker_copy_done(t, job->items[i], job->reports[i].offset);
        break;
    case TXN_ABORTED: pauses = !aborted(t, job); break;
    case TXN_DEAD: dead(t, job); break;
    }
    if (pauses) {
        pause_part(t, part);
        if (!part->gone && t->mode == MODE_RUNNING)
            tracker_alarm(t, &part->alarm_ms, "transaction", part->queue->markers, part->partition,
                          "%s, tried again: %s", job->result == TXN_DEAD ? "its outcome is unknown" : "aborted",
                          job->error.text);
    }
    if (job->result == TXN_DEAD || part->gone) lane_free(lane);
    job_free(job);
}

/* ------------------------------------------------------------------ beginning one */

static int largest_first(const void *a, const void *b)
{
    const tracker_item *x = *(tracker_item *const *)a, *y = *(tracker_item *const *)b;
    if (x->written != y->written) return x->written > y->written ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Those that still have to go out: settled ones do not, which may have become known since they were read. */
static void fill(tracker *t, tracker_part *part, txn_job *job, int which)
{
    size_t bytes = 0;
    int64_t now_ms = kmq_lease_book_log_time(&part->book);
    tracker_item *item;
    job->items = tracker_alloc(MESSAGES * sizeof(tracker_item *));
    while (job->n < MESSAGES && bytes < BYTES && (item = part->txn.first[which])) {
        if (item->probe && job->n) break; /* alone */
        take(t, &part->txn, which);
        if (!kmq_lease_book_still_due(&part->book, item->offset, now_ms)) {
            tracker_item_back(t, item);
            continue;
        }
        item->target->in_flight++;
        t->n_copies++;
        bytes += item->payload->bytes;
        job->items[job->n++] = item;
        if (item->probe) break;
    }
}

static void begin(tracker *t, tracker_part *part)
{
    tracker_txn *txn = &part->txn;
    int which = txn->first[txn->dead_next] ? txn->dead_next : !txn->dead_next;
    tracker_value value = tracker_part_commit_value(part);
    if (value.offset < part->committed) return; /* never back */
    if (!txn->group && !(txn->group = kafka_consumer_group(t->consumer))) return;
    txn_job *job = job_new(t, txn->lane);
    fill(t, part, job, which);
    if (job->n == 0) {
        job_free(job);
        return;
    }
    tracker_target *target = job->items[0]->target;
    txn->dead_next = !which;
    job->job.done = run_done;
    job->group = kafka_group_keep(txn->group);
    job->commit = (kafka_partition){.topic = job->markers, .partition = part->partition, .offset = value.offset};
    tracker_reference_print(value.reference, part->witness, job->metadata);
    if (job->metadata[0]) job->commit.metadata = job->metadata;
    job->target = target->topic;
    job->n_partitions = target->n_partitions;
    job->solo = job->n == 1 || t->now_ms < target->solo_until_ms;
    if (job->solo) qsort(job->items, job->n, sizeof(tracker_item *), largest_first);
    job->reports = tracker_alloc(job->n * sizeof *job->reports);
    job->deadline_ms = t->now_ms + t->config.transaction_timeout_ms;
    part->committing = true;
    txn->lane->state = LANE_BUSY;
    t->n_txns++;
    helper_give(&txn->lane->pool, &job->job);
}

/* Something will be due soon: then its producer is to be there. */
static bool soon(const tracker *t, const tracker_part *part)
{
    return part->state == PART_READY &&
           tracker_clock_wait(&part->clock, kmq_lease_book_next_due(&part->book), t->now_ms) <= WARM_MS;
}

void tracker_txn_step(tracker *t)
{
    if (!t->config.transactional) return;
    for (size_t i = 0; i < TRACKER_LANES && t->lanes[i]; i++)
        if (t->lanes[i]->state == LANE_READY && t->lanes[i]->part->gone) lane_free(t->lanes[i]);
    if (t->mode != MODE_RUNNING) return;
    for (tracker_part *part = t->parts; part; part = part->next) {
        tracker_txn *txn = &part->txn;
        if (part->gone || part->state != PART_READY || t->now_ms < txn->retry_ms || txn->confirm) continue;
        bool urgent = txn->wanted || txn->first[0] || txn->first[1];
        if (!txn->lane && (urgent || soon(t, part))) lane_give(t, part, urgent);
        if (txn->lane && txn->lane->state == LANE_READY && (txn->first[0] || txn->first[1]) && !part->committing)
            begin(t, part);
    }
}

int64_t tracker_txn_wait(const tracker *t)
{
    int64_t wait = INT64_MAX;
    if (!t->config.transactional || t->mode != MODE_RUNNING) return wait;
    for (const tracker_part *part = t->parts; part; part = part->next) {
        const tracker_txn *txn = &part->txn;
        if ((txn->wanted || txn->first[0] || txn->first[1]) && txn->retry_ms > t->now_ms &&
            txn->retry_ms - t->now_ms < wait)
            wait = txn->retry_ms - t->now_ms;
    }
    return wait;
}

helper_job *tracker_txn_done(tracker *t)
{
    helper_job *job = NULL;
    for (size_t i = 0; i < TRACKER_LANES && t->lanes[i] && !job; i++) job = helper_take(&t->lanes[i]->pool);
    return job;
}
