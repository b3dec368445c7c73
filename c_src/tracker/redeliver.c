/* redeliver - due offsets: read back from Q, judged once more, copied, ended.
 *
 *   book --take--> read (helper thread, exact offsets) --> still due? --> fate --> planned at its target --> producer
 *             \--> was read ahead (ahead.c) ------------/             \-> gone: END gone
 *
 * Bounds: TRACKER_BATCH offsets and TRACKER_BATCH_BYTES a read, TRACKER_PART_ACTIVE and TRACKER_ACTIVE offsets under way,
 * TRACKER_ACTIVE_BYTES of payloads here, and the producer's own queue limits; a token bucket over all.
 * What cannot be copied now gives up its payload and waits with 48 bytes: for a pause, or for its topic to appear. Others pass by. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

enum { PART_READS = 2, SOLO_MS = 10000, SUSPECT_PAUSE_MS = 500 };

static void account(tracker *t, tracker_item *item)
{
    t->n_active--;
    item->part->n_active--;
    if (item->payload) t->active_bytes -= item->payload->bytes;
}

static void item_free(tracker *t, tracker_item *item)
{
    account(t, item);
    if (item->probe) item->target->probing = false;
    tracker_part_put(item->part);
    free(item->payload);
    free(item->text);
    free(item);
}

/* Not now: due again in its book. */
void tracker_item_back(tracker *t, tracker_item *item)
{
    if (!item->part->gone) tracker_give_back(item->part, item->offset);
    item_free(t, item);
}

void tracker_item_unload(tracker *t, tracker_item *item)
{
    if (item->payload) t->active_bytes -= item->payload->bytes;
    free(item->payload);
    item->payload = NULL;
}

/* Waits in `waits` without its payload. */
void tracker_item_wait(tracker *t, tracker_item *item, tracker_waits *waits, int64_t until_ms)
{
    tracker_wait *wait = tracker_alloc(sizeof *wait);
    *wait = (tracker_wait){.part = item->part, .offset = item->offset, .until_ms = until_ms};
    tracker_part_keep(item->part);
    if (waits->last)
        waits->last->next = wait;
    else
        waits->first = wait;
    waits->last = wait;
    waits->n++;
    item_free(t, item);
}

void tracker_waits_release(tracker_waits *waits, int64_t now_ms, size_t most)
{
    while (most-- && waits->first && waits->first->until_ms <= now_ms) {
        tracker_wait *wait = waits->first;
        waits->first = wait->next;
        if (!waits->first) waits->last = NULL;
        waits->n--;
        if (!wait->part->gone) tracker_give_back(wait->part, wait->offset);
        tracker_part_put(wait->part);
        free(wait);
    }
}

/* ------------------------------------------------------------------ backoff */

typedef struct spaced {
    kmq_heap_item item; /* its deadline in ms of the monotonic clock */
    tracker_part *part;
    int64_t offset;
} spaced;

/* A lapsed lease or a time limit says nothing about a delay: the next attempt waits as the backoff has it. The count is in
 * the message's headers, the moment in the book, so that this needs no memory of its own across restarts. */
static bool space(tracker *t, tracker_item *item)
{
    bool by_itself = item->cause == KMQ_RETRY_CRASH || item->cause == KMQ_RETRY_TIMEOUT;
    if (!by_itself || item->fate.dead || (item->flags & KMQ_FLAG_PARKED) || item->fate.count < 1) return false;
    int64_t delay_ms = tracker_spacing_ms(&t->config.spacing, item->fate.count, item->part->partition, item->offset);
    item->due_ms = item->due_ms > INT64_MAX - delay_ms ? INT64_MAX - 1 : item->due_ms + delay_ms;
    int64_t wait_ms = tracker_clock_wait(&item->part->clock, item->due_ms, t->now_ms);
    if (wait_ms <= 0) return false;
    spaced *s = tracker_alloc(sizeof *s);
    *s = (spaced){.part = item->part, .offset = item->offset};
    kmq_heap_item_init(&s->item);
    s->item.deadline = t->now_ms + wait_ms;
    s->item.sequence = (uint64_t)item->offset;
    if (kmq_heap_push(&t->spaced, &s->item) != KMQ_OK) tracker_no_memory();
    tracker_part_keep(item->part);
    item_free(t, item);
    return true;
}

static void spaced_release(tracker *t, int64_t now_ms)
{
    const kmq_heap_item *top;
    while ((top = kmq_heap_top(&t->spaced)) && top->deadline <= now_ms) {
        spaced *s = KMQ_HEAP_OWNER(kmq_heap_pop(&t->spaced), spaced, item);
        if (!s->part->gone) tracker_give_back(s->part, s->offset);
        tracker_part_put(s->part);
        free(s);
    }
}

/* ------------------------------------------------------------------ reading Q */

typedef struct read_job {
    helper_job job;
    tracker_part *part;
    const char *topic;
    int32_t partition;
    int64_t given_ms;
    int rc;
    kafka_error error;
    size_t n, n_offsets, at, bytes;
    int64_t *offsets;
    tracker_item *items[];
} read_job;

static void read_each(void *ctx, int64_t offset, const kafka_record *record)
{
    read_job *read = ctx;
    while (read->at < read->n && read->items[read->at]->offset < offset) read->at++;
    if (read->at == read->n || read->items[read->at]->offset != offset) return;
    tracker_item *item = read->items[read->at++];
    if (!record) {
        item->known = true;
        return;
    }
    if (read->bytes >= TRACKER_BATCH_BYTES) return; /* the rest is read again, in a smaller batch */
    item->payload = tracker_payload_new(record);
    if (!item->payload) return;
    item->known = item->found = true;
    read->bytes += item->payload->bytes;
}

static void read_run(helper_job *job, void *thread)
{
    read_job *read = (read_job *)(void *)job;
    kafka_reader *reader = tracker_reader(thread, &read->error);
    read->rc = reader ? kafka_reader_read(reader, read->topic, read->partition, read->offsets, read->n_offsets,
                                          TRACKER_READ_MS, read_each, read, &read->error)
                      : KAFKA_EKAFKA;
}

static void plan(tracker *t, tracker_item *item, bool stale)
{
    tracker_part *part = item->part;
    int64_t now_ms = kmq_lease_book_log_time(&part->book);
    if (stale || t->mode != MODE_RUNNING || part->gone || part->state != PART_READY || !item->known ||
        !kmq_lease_book_still_due(&part->book, item->offset, now_ms)) {
        tracker_item_back(t, item);
        return;
    }
    if (!item->found) {
        part->n_gone++;
        part->gone_offset = item->offset;
        t->n_gone++;
        tracker_end_add(t, part, item->offset, KMQ_END_GONE, -1);
        item_free(t, item);
        return;
    }
    item->fate = tracker_decide(item->payload->headers, item->payload->n_headers, t->config.count_header,
                                t->config.max_redeliveries, item->cause, item->flags);
    if (space(t, item)) return;
    tracker_target *target = item->target = item->fate.dead ? &part->queue->dead_letters : &part->queue->copies;
    item->next = NULL;
    if (target->planned_last)
        target->planned_last->next = item;
    else
        target->planned_first = item;
    target->planned_last = item;
}

static void read_done(helper_job *job, void *owner)
{
    read_job *read = (read_job *)(void *)job;
    tracker *t = owner;
    tracker_part *part = read->part;
    size_t known = 0;
    t->n_reads--;
    part->n_reads--;
    for (size_t i = 0; i < read->n; i++) {
        known += read->items[i]->known;
        if (read->items[i]->payload) t->active_bytes += read->items[i]->payload->bytes;
    }
    if (read->bytes >= TRACKER_BATCH_BYTES)
        part->batch = known > 1 ? known : 1;
    else if (part->batch < TRACKER_BATCH)
        part->batch = part->batch * 2 < TRACKER_BATCH ? part->batch * 2 : TRACKER_BATCH;
    part->suspect = read->rc != KAFKA_OK;
    if (part->suspect) {
        part->read_pause_ms = t->now_ms + SUSPECT_PAUSE_MS;
        tracker_alarm(t, &t->alarm_ms[ALARM_READ], "read", read->topic, read->partition,
                      "cannot be read, tried again: %s", read->error.text);
    }
    bool stale = read->given_ms < t->woken_ms || read->given_ms <= part->txn.void_ms;
    for (size_t i = 0; i < read->n; i++) plan(t, read->items[i], stale);
    tracker_part_put(part);
    free(read->offsets);
    free(read);
}

static void give(tracker *t, tracker_part *part, read_job *read)
{
    read->given_ms = t->now_ms;
    read->part = part;
    read->topic = part->queue->topic;
    read->partition = part->partition;
    read->job.run = read_run;
    read->job.done = read_done;
    read->job.suspect = part->suspect;
    read->job.affinity = (unsigned)part->partition;
    tracker_part_keep(part);
    part->n_reads++;
    t->n_reads++;
    helper_give(&t->reads, &read->job);
}

static tracker_item *item_new(tracker *t, tracker_part *part, const kmq_due *due)
{
    tracker_item *item = tracker_alloc(sizeof *item);
    item->part = part;
    item->offset = due->offset;
    item->due_ms = due->due_ms;
    item->cause = due->cause;
    item->flags = due->flags;
    if (due->text && due->text_len) {
        item->text = tracker_alloc(due->text_len);
        memcpy(item->text, due->text, due->text_len);
        item->text_len = due->text_len;
    }
    tracker_part_keep(part);
    part->n_active++;
    t->n_active++;
    return item;
}

static void hold(tracker *t, tracker_part *part, int64_t offset)
{
    if (part->n_held == part->cap_held) {
        size_t cap = part->cap_held ? part->cap_held * 2 : 64;
        int64_t *grown = realloc(part->held, cap * sizeof *grown);
        if (!grown) tracker_no_memory();
        part->held = grown;
        part->cap_held = cap;
    }
    if (part->n_held == 0) { /* the answer in hand may be older than they are: look at once */
        part->ask_ms = t->now_ms;
        part->ask_pause_ms = 0;
    }
    if (part->ask_pause_ms < 50) part->ask_pause_ms = 50;
    part->held[part->n_held++] = offset;
}

void tracker_item_reread(tracker *t, tracker_item *item)
{
    tracker_part *part = item->part;
    read_job *read = tracker_alloc(sizeof *read + sizeof(tracker_item *));
    read->offsets = tracker_alloc(sizeof *read->offsets);
    read->offsets[0] = item->offset;
    read->items[0] = item;
    read->n = read->n_offsets = 1;
    item->found = item->known = false;
    give(t, part, read);
}

/* What was read ahead is ready; the rest into one read. */
static bool ready(tracker *t, tracker_part *part, tracker_item **items, size_t n)
{
    read_job *read = tracker_alloc(sizeof *read + n * sizeof(tracker_item *));
    size_t n_ready = 0;
    read->offsets = tracker_alloc(n * sizeof *read->offsets);
    for (size_t i = 0; i < n; i++) {
        tracker_item *item = items[i];
        item->payload = tracker_ahead_take(t, part, item->offset);
        if (!item->payload) {
            read->offsets[read->n] = item->offset;
            read->items[read->n++] = item;
            continue;
        }
        item->known = item->found = true;
        t->active_bytes += item->payload->bytes;
        items[n_ready++] = item;
    }
    t->n_ahead += (int64_t)n_ready;
    read->n_offsets = read->n;
    if (read->n) {
        give(t, part, read);
    } else {
        free(read->offsets);
        free(read);
    }
    for (size_t i = 0; i < n_ready; i++) plan(t, items[i], false);
    return n_ready > 0;
}

/* One batch; false: nothing more for now. */
static bool take(tracker *t, tracker_part *part, bool *planned)
{
    kmq_due due[TRACKER_BATCH];
    tracker_item *items[TRACKER_BATCH];
    size_t want = part->batch, below = 0;
    if (part->n_reads >= PART_READS || t->n_reads >= TRACKER_READS || t->active_bytes >= TRACKER_ACTIVE_BYTES ||
        t->now_ms < part->read_pause_ms)
        return false;
    if (part->n_active >= TRACKER_PART_ACTIVE || t->n_active >= TRACKER_ACTIVE) return false;
    if (want > TRACKER_PART_ACTIVE - part->n_active) want = TRACKER_PART_ACTIVE - part->n_active;
    if (want > TRACKER_ACTIVE - t->n_active) want = TRACKER_ACTIVE - t->n_active;
    if (kmq_lease_book_next_due(&part->book) > part->decide_ms) return false;
    size_t granted = tracker_rate_take(&t->rate, want, t->now_ms);
    if (granted == 0) return false;
    size_t n = kmq_lease_book_take_due(&part->book, part->decide_ms, INT64_MAX, due, granted);
    while (below < n && due[below].offset < part->below) below++; /* they come in offset order */
    for (size_t i = 0; i < below; i++) items[i] = item_new(t, part, &due[i]);
    for (size_t i = below; i < n; i++) hold(t, part, due[i].offset);
    /* the rate is for what failed: what was only delayed is not late because of it */
    size_t parked = 0;
    for (size_t i = 0; i < below; i++) parked += (due[i].flags & KMQ_FLAG_PARKED) != 0;
    tracker_rate_back(&t->rate, granted - below + parked);
    if (below) *planned |= ready(t, part, items, below);
    return n == granted;
}

bool tracker_redeliver_take(tracker *t, tracker_part *part)
{
    bool planned = false;
    if (t->mode != MODE_RUNNING || part->gone || part->state != PART_READY) return false;
    if (tracker_now_ms() >= part->decide_until_ms) return false; /* a clock of its own: we may just have been asleep */
    if (t->config.transactional && !tracker_txn_may_take(t, part)) return false;
    while (take(t, part, &planned)) continue;
    return planned;
}

/* A read whose result nobody wants: the first of a client takes up to a second (connections, metadata), and is not to be made when
 * something is due. */
static void warm_done(helper_job *job, void *owner)
{
    read_job *read = (read_job *)(void *)job;
    (void)owner;
    free(read->offsets);
    free(read);
}

void tracker_reader_warm(tracker *t, const tracker_part *part)
{
    read_job *read = tracker_alloc(sizeof *read);
    read->offsets = tracker_alloc(sizeof *read->offsets);
    read->offsets[0] = part->asked_below - 1;
    read->n = 0; /* read_each keeps nothing */
    read->n_offsets = 1;
    read->topic = part->queue->topic;
    read->partition = part->partition;
    read->job.run = read_run;
    read->job.done = warm_done;
    read->job.affinity = (unsigned)part->partition;
    helper_give(&t->reads, &read->job);
}

/* ------------------------------------------------------------------ targets */

typedef struct target_job {
    helper_job job;
    tracker_target *target;
    const char *topic;
    int rc, n_partitions;
    kafka_error error;
} target_job;

static void target_run(helper_job *job, void *thread)
{
    target_job *ask = (target_job *)(void *)job;
    int replication;
    kafka_admin *admin = tracker_group_admin(thread, &ask->error);
    ask->rc =
        admin ? kafka_admin_partitions(admin, ask->topic, TRACKER_ASK_MS, &ask->n_partitions, &replication, &ask->error)
              : KAFKA_EKAFKA;
}

static void target_done(helper_job *job, void *owner)
{
    target_job *ask = (target_job *)(void *)job;
    tracker *t = owner;
    tracker_target *target = ask->target;
    target->state = TARGET_MISSING;
    target->ask_ms = t->now_ms + TRACKER_PROBE_MS;
    if (ask->rc != KAFKA_OK) {
        target->state = TARGET_UNKNOWN;
    } else if (ask->n_partitions > 0 && t->producer) {
        target->n_partitions = ask->n_partitions;
        target->out = kafka_producer_topic(t->producer, target->topic, NULL);
        if (target->out) target->state = TARGET_OPEN;
    }
    if (target->state == TARGET_OPEN) {
        tracker_waits_release(&target->waits, INT64_MAX, SIZE_MAX);
    } else if (target->waits.n) {
        tracker_alarm(t, &target->alarm_ms, target->dead ? "dead_letter_topic" : "copy_topic", target->topic, -1,
                      "%s; %zu messages wait for it",
                      ask->rc == KAFKA_OK ? "does not exist: create it" : ask->error.text, target->waits.n);
    }
    free(ask);
}

void tracker_targets_ask(tracker *t, tracker_target *target)
{
    target_job *ask = tracker_alloc(sizeof *ask);
    ask->job.run = target_run;
    ask->job.done = target_done;
    ask->target = target;
    ask->topic = target->topic;
    target->state = TARGET_ASKED;
    helper_give(&t->asks, &ask->job);
}

static void planned_drop(tracker *t, tracker_target *target)
{
    tracker_item *item = target->planned_first, *next;
    target->planned_first = target->planned_last = NULL;
    for (; item; item = next) {
        next = item->next;
        tracker_item_back(t, item);
    }
}

/* Planned copies to the producer. False: its queue is full. */
static bool target_send(tracker *t, tracker_target *target)
{
    while (target->planned_first) {
        tracker_item *item = target->planned_first;
        bool ours = !item->part->gone && t->mode == MODE_RUNNING;
        bool open = ours && target->state == TARGET_OPEN;
        if (open && tracker_sent_alone(t, item) && target->in_flight > 0) return true;
        if (open && !t->producer) return false;
        target->planned_first = item->next;
        if (!target->planned_first) target->planned_last = NULL;
        if (open && tracker_blocked(t, item)) continue;
        if (!ours) {
            tracker_item_back(t, item);
        } else if (target->state != TARGET_OPEN || (!target->dead && item->part->partition >= target->n_partitions)) {
            if (target->state == TARGET_OPEN) {
                target->state = TARGET_UNKNOWN; /* it may have grown */
                tracker_alarm(t, &target->alarm_ms, "copy_topic", target->topic, item->part->partition,
                              "has only %d partitions", target->n_partitions);
            }
            tracker_item_wait(t, item, &target->waits, INT64_MAX);
        } else if (!tracker_copy_send(t, item)) {
            item->next = target->planned_first;
            target->planned_first = item;
            if (!target->planned_last) target->planned_last = item;
            return false;
        }
    }
    return true;
}

void tracker_redeliver_step(tracker *t)
{
    tracker_waits_release(&t->pauses, t->now_ms, SIZE_MAX);
    spaced_release(t, t->now_ms);
    for (size_t i = 0; i < t->config.n_queues; i++) {
        tracker_target *targets[] = {&t->queues[i].copies, &t->queues[i].dead_letters};
        for (size_t k = 0; k < 2; k++) {
            tracker_target *target = targets[k];
            tracker_blocked_step(t, target);
            if (!target_send(t, target)) return;
            bool asks = target->state == TARGET_UNKNOWN || target->state == TARGET_MISSING;
            if (asks && target->waits.n && t->now_ms >= target->ask_ms && t->mode == MODE_RUNNING)
                tracker_targets_ask(t, target);
        }
    }
}

int64_t tracker_redeliver_wait(const tracker *t)
{
    int64_t at = t->pauses.first ? t->pauses.first->until_ms : INT64_MAX;
    const kmq_heap_item *top = kmq_heap_top(&t->spaced);
    if (top && top->deadline < at) at = top->deadline;
    if (t->mode != MODE_RUNNING) return INT64_MAX;
    for (size_t i = 0; i < t->config.n_queues; i++) {
        const tracker_target *targets[] = {&t->queues[i].copies, &t->queues[i].dead_letters};
        for (size_t k = 0; k < 2; k++) {
            bool asks = targets[k]->state == TARGET_UNKNOWN || targets[k]->state == TARGET_MISSING;
            if (asks && targets[k]->waits.n && targets[k]->ask_ms < at) at = targets[k]->ask_ms;
            int64_t blocked_ms = tracker_blocked_at(targets[k]);
            if (blocked_ms < at) at = blocked_ms;
        }
    }
    if (at == INT64_MAX) return at;
    return at > t->now_ms ? at - t->now_ms : 0;
}

void tracker_redeliver_drop(tracker *t)
{
    tracker_txn_drop(t);
    for (size_t i = 0; i < t->config.n_queues; i++) {
        planned_drop(t, &t->queues[i].copies);
        planned_drop(t, &t->queues[i].dead_letters);
        tracker_waits_release(&t->queues[i].copies.waits, INT64_MAX, SIZE_MAX);
        tracker_waits_release(&t->queues[i].dead_letters.waits, INT64_MAX, SIZE_MAX);
        tracker_waits_release(&t->queues[i].copies.blocked, INT64_MAX, SIZE_MAX);
        tracker_waits_release(&t->queues[i].dead_letters.blocked, INT64_MAX, SIZE_MAX);
    }
    tracker_waits_release(&t->pauses, INT64_MAX, SIZE_MAX);
    spaced_release(t, INT64_MAX);
    kmq_heap_free(&t->spaced); /* its array; it may be filled again */
}

/* ------------------------------------------------------------------ what became of a copy */

static void add(tracker_sum *sum, int64_t lateness_ms)
{
    if (sum->count == 0 || lateness_ms < sum->lateness_min_ms) sum->lateness_min_ms = lateness_ms;
    if (sum->count == 0 || lateness_ms > sum->lateness_max_ms) sum->lateness_max_ms = lateness_ms;
    sum->count++;
    sum->lateness_ms += lateness_ms;
}

void tracker_copy_done(tracker *t, tracker_item *item, int64_t copy_offset)
{
    tracker_part *part = item->part;
    size_t cause = item->cause < TRACKER_CAUSES - 1 ? item->cause : TRACKER_CAUSES - 1;
    int64_t lateness_ms = tracker_clock_estimate(&part->clock, t->now_ms) - item->due_ms;
    add(item->fate.dead ? &part->dead_lettered[cause] : &part->redelivered[cause], lateness_ms);
    if (item->fate.dead)
        t->n_dead_lettered++;
    else
        t->n_redelivered++;
    if (!t->config.transactional)
        tracker_end_add(t, part, item->offset, item->fate.dead ? KMQ_END_DEAD_LETTERED : KMQ_END_REDELIVERED,
                        copy_offset);
    tracker_taken(item);
    item_free(t, item);
}

void tracker_copy_failed(tracker *t, tracker_item *item, int error)
{
    const char *name = kafka_error_name(error);
    tracker_target *target = item->target;
    if (strstr(name, "UNKNOWN_TOPIC") || strstr(name, "UNKNOWN_PARTITION")) {
        if (target->state == TARGET_OPEN) {
            target->state = TARGET_UNKNOWN;
            target->ask_ms = t->now_ms;
        }
        tracker_item_wait(t, item, &target->waits, INT64_MAX);
        return;
    }
    bool too_large = strcmp(name, "MSG_SIZE_TOO_LARGE") == 0;
    if (too_large && !item->alone) { /* one of its batch, perhaps another one, or the batch as such */
        target->solo_until_ms = t->now_ms + SOLO_MS;
        tracker_item_back(t, item);
        return;
    }
    if (too_large || strcmp(name, "TOPIC_AUTHORIZATION_FAILED") == 0) {
        tracker_refused(t, item, name);
        return;
    }
    if (strncmp(name, "_PURGE", 6) != 0) {
        tracker_alarm(t, &target->alarm_ms, "copy", target->topic, item->part->partition,
                      "not written, tried again: %s", name);
    }
    tracker_item_wait(t, item, &t->pauses, t->now_ms + TRACKER_PAUSE_MS);
}

/* ------------------------------------------------------------------ events */

static void sum_tell(tracker *t, tracker_part *part, const char *event, tracker_sum *sum, size_t cause)
{
    if (sum->count == 0) return;
    tracker_part_event(t, event, part, 5);
    tracker_pair_atom(&t->scratch, "cause",
                      tracker_cause_name(cause == TRACKER_CAUSES - 1 ? KMQ_RETRY_CRASH : (uint8_t)cause));
    tracker_pair_int(&t->scratch, "count", sum->count);
    tracker_pair_int(&t->scratch, "lateness_ms", sum->lateness_ms / sum->count);
    tracker_pair_int(&t->scratch, "lateness_max_ms", sum->lateness_max_ms);
    tracker_pair_int(&t->scratch, "lateness_min_ms", sum->lateness_min_ms);
    tracker_event_send(t);
    *sum = (tracker_sum){0};
}

static int64_t total(const tracker *t) { return t->n_redelivered + t->n_dead_lettered + t->n_gone; }

bool tracker_sums_open(const tracker *t) { return t->n_told != total(t); }

void tracker_sums_tell(tracker *t)
{
    t->n_told = total(t);
    for (tracker_part *part = t->parts; part; part = part->next) {
        for (size_t cause = 0; cause < TRACKER_CAUSES; cause++) {
            sum_tell(t, part, "redelivered", &part->redelivered[cause], cause);
            sum_tell(t, part, "dead_lettered", &part->dead_lettered[cause], cause);
        }
        if (part->n_gone) {
            tracker_part_event(t, "gone", part, 2);
            tracker_pair_int(&t->scratch, "count", part->n_gone);
            tracker_pair_int(&t->scratch, "offset", part->gone_offset);
            tracker_event_send(t);
            part->n_gone = 0;
        }
    }
}
