/* recover - where a marker partition begins: after an assignment, and when its position was trimmed away under it.
 *
 *      commit within the log, no reference                  --> replay from it
 *      commit with a reference, whole, as_of in the log     --> load the checkpoint, replay from as_of
 *      else, the log begins behind 0                        --> search M for the newest whole checkpoint with as_of in the log, load it,
 *                                                               replay from as_of
 *      nothing found, but the reference can still be loaded --> load it, replay from the log's start; what lay between is lost
 *      nothing at all                                       --> replay all that is there
 *
 * What retention has taken is told with its range (`marker_gap`), never skipped in silence; a newest whole checkpoint has everything
 * that was open, so it leaves no gap. A commit that was made in another topic of that name (witness.c) is none. A topic that was made anew is
 * told with what was open in the one before (past.c). A commit that refers to something of a newer version stops the partition.
 *
 * Asking, searching and loading are done by a helper thread, into a book of its own that the loop takes over whole. It gives up
 * when the assignment is over, and is given again after a pause when Kafka does not answer. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

#include "failpoint.h"

enum { RETRY_MS = 1000, STRIDE = 50000, LOOKS = 4 };

typedef enum gap_reason { GAP_NONE, GAP_RETENTION, GAP_NO_COMMIT, GAP_CHECKPOINT, GAP_RECREATED } gap_reason;

typedef struct recover_place {
    tracker_part *part;
    const char *markers;
    const kmq_marker_scope *scope;
    tracker_fenced fenced;
    int32_t partition;
    int64_t committed, low, high;
    tracker_reference_kind kind; /* of the commit's metadata */
    tracker_reference reference;
    tracker_witness witness; /* of the topic that the commit was made in */
    bool anew;               /* this is another one */
    /* what came out */
    bool adopt; /* the commit is good: later ones must be above it */
    bool newer;
    int64_t start, gap_from, forgotten; /* what was open in a topic that is gone */
    gap_reason gap;
    tracker_reference loaded; /* as_of -1: none */
    int64_t loaded_ts_ms;
    kmq_lease_book book; /* of the loaded checkpoint */
} recover_place;

typedef struct recover_job {
    helper_job job;
    tracker *owner; /* its epoch, configuration and token are looked at, nothing else */
    uint32_t epoch;
    bool restart; /* one part that lost its position */
    int rc;
    kafka_error error;
    size_t n;
    recover_place places[];
} recover_job;

/* ------------------------------------------------------------------ in the helper thread: walking over M */

typedef struct walk {
    recover_job *job;
    recover_place *place;
    kafka_reader *reader;
    int64_t at; /* next offset */
    bool halt;
    bool (*each)(struct walk *walk, int64_t offset, const kafka_record *record, const kmq_marker *marker);
    tracker_finder finder;
    uint32_t next; /* part to be loaded */
} walk;

static bool over(const recover_job *job) { return atomic_load(&job->owner->epoch) != job->epoch; }

static void walk_each(void *ctx, int64_t offset, const kafka_record *record)
{
    walk *w = ctx;
    kmq_marker marker;
    w->at = offset + 1;
    if (!record || record->error || w->halt) return;
    kmq_verdict verdict = kmq_marker_decode(w->place->scope, w->place->partition, record->key, record->key_len,
                                            record->value, record->value_len, NULL, 0, &marker);
    if (verdict == KMQ_MARKER_OURS) w->halt = !w->each(w, offset, record, &marker);
}

/* Shows `each` every marker of ours from `from` to `to` (excluded). A KAFKA_E*; halted or over is KAFKA_OK. */
static int walk_over(walk *w, int64_t from, int64_t to)
{
    int rc = KAFKA_OK;
    int64_t *offsets = tracker_alloc(STRIDE * sizeof *offsets);
    w->at = from;
    while (rc == KAFKA_OK && w->at < to && !w->halt && !over(w->job)) {
        int64_t begin = w->at;
        size_t n = 0;
        while (n < STRIDE && begin + (int64_t)n < to) offsets[n] = begin + (int64_t)n, n++;
        rc = kafka_reader_read(w->reader, w->place->markers, w->place->partition, offsets, n, TRACKER_READ_MS,
                               walk_each, w, &w->job->error);
        if (w->at > begin) rc = KAFKA_OK; /* slow is not stuck */
    }
    free(offsets);
    return rc;
}

static bool find_each(walk *w, int64_t offset, const kafka_record *record, const kmq_marker *marker)
{
    (void)record;
    tracker_finder_feed(&w->finder, marker, offset);
    return true;
}

static int find(walk *w)
{
    w->each = find_each;
    w->halt = false;
    tracker_finder_init(&w->finder, w->place->low);
    return walk_over(w, w->place->low, w->place->high);
}

static bool load_each(walk *w, int64_t offset, const kafka_record *record, const kmq_marker *marker)
{
    recover_place *place = w->place;
    (void)offset;
    if (!tracker_reference_part(&place->loaded, marker, w->next)) return true;
    int rc = kmq_lease_book_load(&place->book, marker);
    if (rc == KMQ_ENOMEM) tracker_no_memory();
    if (rc != KMQ_OK) return false;
    if (w->next == 0) place->loaded_ts_ms = record->timestamp_ms;
    if (KMQ_FAILPOINT("ck_load")) return false;
    return ++w->next < place->loaded.parts;
}

static void unload(recover_place *place)
{
    if (place->loaded.as_of >= 0) kmq_lease_book_free(&place->book);
    place->loaded = (tracker_reference){.as_of = -1};
}

/* place->loaded.as_of tells whether all of it is there. */
static int load(walk *w, const tracker_reference *reference)
{
    kmq_alloc libc = kmq_alloc_libc();
    recover_place *place = w->place;
    place->loaded = *reference;
    if (kmq_lease_book_init(&place->book, &libc) != KMQ_OK) tracker_no_memory();
    w->each = load_each;
    w->halt = false;
    w->next = 0;
    int rc = reference->first < place->low ? KAFKA_OK : walk_over(w, reference->first, reference->last + 1);
    if (w->next < reference->parts || rc != KAFKA_OK) unload(place);
    return rc;
}

/* ------------------------------------------------------------------ in the helper thread: where to begin */

static int begin_at(recover_place *place, int64_t start, gap_reason gap, int64_t gap_from)
{
    place->start = start;
    place->gap = gap_from < start || gap == GAP_RECREATED ? gap : GAP_NONE;
    place->gap_from = gap_from;
    return KAFKA_OK;
}

static int decide(walk *w)
{
    recover_place *place = w->place;
    bool inside = place->committed >= place->low && place->committed <= place->high;
    int rc;
    if (inside && !place->anew && place->witness.offset >= 0) {
        tracker_seen seen =
            tracker_witness_look(w->reader, place->markers, place->partition, place->witness, &w->job->error);
        if (seen == WITNESS_UNKNOWN) return KAFKA_EKAFKA;
        place->anew = seen == WITNESS_OTHER;
    }
    if (place->committed > place->high) place->anew = true;
    inside = inside && !place->anew;
    place->newer = place->kind == REFERENCE_NEWER && inside;
    if (place->newer || (inside && place->kind == REFERENCE_NONE)) {
        place->adopt = true;
        return begin_at(place, place->committed, GAP_NONE, 0);
    }
    if (inside && place->kind == REFERENCE_OURS) {
        if ((rc = load(w, &place->reference)) != KAFKA_OK) return rc;
        place->adopt = place->loaded.as_of >= 0;
        if (place->adopt) return begin_at(place, place->committed, GAP_NONE, 0);
    }
    if (place->low > 0) { /* from 0 on nothing is missing */
        if ((rc = find(w)) != KAFKA_OK) return rc;
        tracker_reference best = w->finder.best;
        if (best.as_of >= 0) {
            if ((rc = load(w, &best)) != KAFKA_OK) return rc;
            if (place->loaded.as_of >= 0)
                return begin_at(place, best.as_of, place->anew ? GAP_RECREATED : GAP_NONE, place->committed);
        }
    }
    if (place->anew) return begin_at(place, place->low, GAP_RECREATED, place->committed);
    if (place->committed < 0) return begin_at(place, place->low, GAP_NO_COMMIT, 0);
    if (place->committed >= place->low) return begin_at(place, place->low, GAP_CHECKPOINT, 0);
    if (place->kind == REFERENCE_OURS && (rc = load(w, &place->reference)) != KAFKA_OK) return rc;
    return begin_at(place, place->low, GAP_RETENTION, place->committed);
}

/* What a predecessor has left open would hide M's end. */
static int fence(recover_job *recover, void *thread)
{
    tracker_fenced *places = tracker_alloc(recover->n * sizeof *places);
    for (size_t i = 0; i < recover->n; i++) places[i] = recover->places[i].fenced;
    int rc = over(recover) ? KAFKA_OK
                           : tracker_fence(&recover->owner->config, &recover->owner->token, thread, places, recover->n,
                                           &recover->error);
    free(places);
    return rc;
}

static void commit_is(recover_place *place, const kafka_partition *partition)
{
    bool stale = KMQ_FAILPOINT("recover_asked");
    unload(place); /* of an earlier try */
    place->committed = stale ? -1001 : partition->offset;
    place->kind = tracker_reference_parse(stale ? NULL : partition->metadata, place->committed, &place->reference,
                                          &place->witness);
}

/* Between the two questions, for the commit and for what there is, time may pass: frozen meanwhile, this process would miss markers that another
 * tracker has read, committed past and deleted. So before a loss is told the commit is asked for again; it is true when it is still the
 * same. */
static int look(recover_job *recover, recover_place *place, kafka_admin *admin, kafka_reader *reader)
{
    bool anew = place->anew;
    kafka_partition again = {.topic = place->markers, .partition = place->partition, .offset = -1001};
    walk w = {.job = recover, .place = place, .reader = reader};
    for (int more = LOOKS;; more--) {
        place->anew = anew;
        place->adopt = false;
        int rc = kafka_admin_watermarks(admin, place->markers, place->partition, TRACKER_ASK_MS, &place->low,
                                        &place->high, &recover->error);
        if (rc == KAFKA_OK) rc = decide(&w);
        if (rc != KAFKA_OK || place->gap == GAP_NONE || !more || over(recover)) return rc;
        rc = kafka_admin_committed(admin, &again, 1, TRACKER_ASK_MS, &recover->error);
        if (rc != KAFKA_OK || again.offset == place->committed) return rc;
        commit_is(place, &again);
    }
}

static void recover_run(helper_job *job, void *thread)
{
    recover_job *recover = (recover_job *)(void *)job;
    kafka_error *err = &recover->error;
    recover->rc = recover->owner->config.transactional ? fence(recover, thread) : KAFKA_OK;
    if (recover->rc != KAFKA_OK) return;
    kafka_admin *admin = tracker_tracker_admin(thread, err);
    kafka_reader *reader = admin ? tracker_reader(thread, err) : NULL;
    kafka_partition *partitions = tracker_alloc(recover->n * sizeof *partitions);
    for (size_t i = 0; i < recover->n; i++)
        partitions[i] = (kafka_partition){
            .topic = recover->places[i].markers, .partition = recover->places[i].partition, .offset = -1001};
    recover->rc = reader ? kafka_admin_committed(admin, partitions, recover->n, TRACKER_ASK_MS, err) : KAFKA_EKAFKA;
    for (size_t i = 0; i < recover->n && recover->rc == KAFKA_OK; i++) commit_is(&recover->places[i], &partitions[i]);
    free(partitions);
    for (size_t i = 0; i < recover->n && recover->rc == KAFKA_OK && !over(recover); i++)
        recover->rc = look(recover, &recover->places[i], admin, reader);
}

/* ------------------------------------------------------------------ in the loop */

static void recover_free(recover_job *recover)
{
    for (size_t i = 0; i < recover->n; i++) {
        unload(&recover->places[i]);
        tracker_part_put(recover->places[i].part);
    }
    free(recover);
}

static const char *gap_name(gap_reason reason)
{
    switch (reason) {
    case GAP_NONE: break;
    case GAP_RETENTION: return "retention";
    case GAP_NO_COMMIT: return "no_commit";
    case GAP_CHECKPOINT: return "no_checkpoint";
    case GAP_RECREATED: return "recreated";
    }
    return "none";
}

static void tell_gap(tracker *t, const recover_place *place)
{
    if (place->gap == GAP_NONE) return;
    tracker_part_event(t, "marker_gap", place->part, 4);
    tracker_pair_int(&t->scratch, "from", place->gap_from);
    tracker_pair_int(&t->scratch, "to", place->start);
    tracker_pair_int(&t->scratch, "open", place->forgotten);
    tracker_pair_atom(&t->scratch, "reason", gap_name(place->gap));
    tracker_event_send(t);
}

/* Without a commit a topic that was made anew looks like a new one; not to those who have read the one before. */
static void remember(tracker *t, recover_place *place)
{
    int64_t position, open;
    if (!tracker_past_take(t, place->part, place->anew, place->committed, place->high, &position, &open)) return;
    place->gap = GAP_RECREATED;
    place->gap_from = position;
    place->forgotten = open;
}

/* The part takes over what was found. */
static void settle(tracker *t, recover_place *place)
{
    tracker_part *part = place->part;
    remember(t, place);
    tell_gap(t, place);
    if (place->adopt) {
        part->committed = place->committed;
        part->witness = place->witness;
    }
    part->trimmed = place->low;
    part->trim_by_ms = t->now_ms;
    if (place->loaded.as_of >= 0) {
        kmq_lease_book_free(&part->book);
        part->book = place->book;
        part->reference = place->loaded;
        part->reference_ms = t->now_ms;
        part->n_loaded = kmq_lease_book_open(&part->book);
        part->loaded_ts_ms = place->loaded_ts_ms;
        place->loaded.as_of = -1;
        tracker_clock_feed(&part->clock, kmq_lease_book_log_time(&part->book), t->now_ms, TRACKER_NOT_OURS);
    }
    tracker_part_start(t, part, place->start, place->high);
    if (!place->newer) return;
    part->state = PART_STOPPED;
    tracker_alarm(
        t, &part->alarm_ms, "newer_marker", place->markers, place->partition,
        "the commit refers to a checkpoint of a newer version: this partition waits until the tracker is upgraded");
}

static bool assign(tracker *t, recover_job *recover)
{
    kafka_error *err = &recover->error;
    kafka_partition *partitions = tracker_alloc(recover->n * sizeof *partitions);
    for (size_t i = 0; i < recover->n; i++)
        partitions[i] = (kafka_partition){.topic = recover->places[i].markers,
                                          .partition = recover->places[i].partition,
                                          .offset = recover->places[i].start};
    bool ok = kafka_consumer_assign(t->consumer, partitions, recover->n, err) == KAFKA_OK;
    for (size_t i = 0; i < recover->n && ok; i++) {
        tracker_part *part = recover->places[i].part;
        part->records = kafka_consumer_queue(t->consumer, partitions[i].topic, partitions[i].partition);
        settle(t, &recover->places[i]);
        tracker_part_keep(part);
        part->next = t->parts;
        t->parts = part;
    }
    if (ok) tracker_partitions_event(t, "assigned", partitions, recover->n);
    free(partitions);
    return ok;
}

static bool restart(tracker *t, recover_job *recover)
{
    recover_place *place = &recover->places[0];
    tracker_part *part = place->part;
    if (part->gone) return true;
    part->records = kafka_consumer_queue(t->consumer, place->markers, part->partition);
    if (kafka_consumer_seek(t->consumer, place->markers, part->partition, place->start, &recover->error) != KAFKA_OK)
        return false;
    settle(t, place);
    return true;
}

/* Until it works, or the assignment is over: nobody else reads these partitions. */
static void again_later(tracker *t, recover_job *recover, const char *what)
{
    tracker_failed(t, ALARM_ASSIGN, &recover->error, "assignment", what);
    recover->job.next = t->recover_waiting;
    t->recover_waiting = &recover->job;
    t->recover_retry_ms = t->now_ms + RETRY_MS;
}

static void recover_done(helper_job *job, void *owner)
{
    recover_job *recover = (recover_job *)(void *)job;
    tracker *t = owner;
    if (over(recover) || t->mode != MODE_RUNNING) {
        recover_free(recover);
        return;
    }
    if (recover->rc != KAFKA_OK)
        again_later(t, recover, "cannot find out where to begin");
    else if (!(recover->restart ? restart(t, recover) : assign(t, recover)))
        again_later(t, recover, "cannot begin");
    else
        recover_free(recover);
}

static recover_job *recover_new(tracker *t, size_t n)
{
    recover_job *recover = tracker_alloc(sizeof *recover + n * sizeof(recover_place));
    recover->job.run = recover_run;
    recover->job.done = recover_done;
    recover->owner = t;
    recover->epoch = atomic_load(&t->epoch);
    return recover;
}

static tracker_fenced fenced_of(const tracker_part *part)
{
    const tracker_queue *queue = part->queue;
    int n = queue->dead_letters.state == TARGET_OPEN ? queue->dead_letters.n_partitions : 0;
    return (tracker_fenced){.markers = queue->markers,
                            .copies = queue->copies.topic,
                            .dead_letters = queue->dead_letters.topic,
                            .partition = part->partition,
                            .dead_partition = n > 0 ? part->partition % n : -1};
}

static void place_add(recover_job *recover, tracker_part *part)
{
    recover->places[recover->n++] = (recover_place){.part = part,
                                                    .markers = part->queue->markers,
                                                    .scope = &part->queue->scope,
                                                    .fenced = fenced_of(part),
                                                    .partition = part->partition,
                                                    .witness = {.offset = -1},
                                                    .loaded = {.as_of = -1}};
}

void tracker_recover(tracker *t, const kafka_partition *partitions, size_t n)
{
    recover_job *recover = recover_new(t, n);
    for (size_t i = 0; i < n; i++) {
        tracker_queue *queue = tracker_queue_of(t, partitions[i].topic);
        if (queue) place_add(recover, tracker_part_new(t, queue, partitions[i].partition));
    }
    helper_give(&t->loads, &recover->job);
}

void tracker_part_lost(tracker *t, tracker_part *part, bool anew)
{
    tracker_part **from = &t->parts;
    while (*from && *from != part) from = &(*from)->next;
    if (!*from) return;
    tracker_part *fresh = tracker_part_new(t, part->queue, part->partition);
    fresh->next = part->next;
    *from = fresh;
    part->next = NULL;
    tracker_past_keep(t, part);
    part->gone = true; /* what is under way for the old book no longer touches it */
    part->hot = false;
    tracker_checkpoint_drop(part);
    tracker_ahead_drop(t, part);
    tracker_txn_part_drop(t, part);
    recover_job *recover = recover_new(t, 1);
    recover->restart = true;
    place_add(recover, fresh);
    recover->places[0].anew = anew;
    tracker_part_keep(fresh);
    helper_give(&t->loads, &recover->job);
    tracker_part_put(part);
}

void tracker_recover_again(tracker *t)
{
    while (t->recover_waiting && t->now_ms >= t->recover_retry_ms) {
        recover_job *recover = (recover_job *)(void *)t->recover_waiting;
        t->recover_waiting = recover->job.next;
        if (over(recover) || t->mode != MODE_RUNNING)
            recover_free(recover);
        else
            helper_give(&t->loads, &recover->job);
    }
}
