/* pump - from librdkafka's partition queues to the caller's list: fetch, START, hand out.
 *
 * Nobody asks again and again: a borrower that got less than it wanted waits for one message, `ready` (its own `room` and demand beside it,
 * see Kmq.Lanes). So whatever holds a message back names, when it lets go, who is woken:
 *
 *   the queue is empty              librdkafka's call when a first record comes: `hot`, and ready
 *   the queue is not empty          nobody calls. So a take that ends hungry has read all queues that it may read, or (`more`) is called again:
 *                                   its slice was over, or what stood, or took the room, when it read does so no more (`unread`)
 *   not STARTed: too few for a run  more are read, or nothing that flows is STARTed: then any number is a run (`starts_urgent`); after START_MS, too,
 *                                   of which the owner's timer sees to it
 *   window full                     a hand-out. Of a partition below its share, which others' backlog keeps out, the owner's timer at shares_due
 *   START on its way                its report: ready. Failed: the owner's timer at start_pause_until
 *   gated                           its commit's answer: ready; failed: the owner's timer at commit_due. Covered already: open at once
 *   window (at most once)           the same; an answer also says that the next may be asked for
 *   full                            the settling, or the time limit, that clears the flag: ready
 *   blocked (no room in its lane)   an ack, then the processor's next demand; with batchers `room`, from whoever raises the lane's count
 *   lane unknown                    take's answer names it: the borrower says which, and wakes itself
 *   isolated                        isolate.c, when the others are out of work or its wait is over
 *   paused, lame, broken, assigned  resume, the new slot (the owner was told when it broke), and an assignment wake at their end
 *
 * ready is said once (`ready_sent`) until somebody takes. A take clears the mark before it looks, under engine.lock, and all these change
 * what it looks at before they set the mark: what it did not see wakes it again. A borrower without demand leaves the mark set: its next
 * demand is a take. */
#include "engine.h"

#include <string.h>
#include "atoms.h"
#include "term.h"
#include "../kafka/failpoint.h"

enum {
    POP = 256,          /* records popped and freed together ... */
    POP_BYTES = 131072, /* ... and how much of them: all that is popped is copied before the next look at the clock */
    POP_HEADERS = 1024, /* of these, that are looked at together */
    QUANTUM = 1024, /* of one partition in a row, over several calls: a START of 1,000 costs what one of 10 costs ... */
    STAY = 256,     /* ready, and the next take stays with their partition */
    HAND_OUT = 64,  /* messages between two looks at the clock */
    AHEAD_MAX = 65536, /* messages STARTed beside start_ahead, at most, ... */
    /* ... and before it is known how many are handed out in a round trip: enough for the longest runs, still in the cache when their turn comes */
    HUNGER_MAX = 4 * MARKS_RUN,
    AHEAD_FRESH_MS = 200,
    HUNGER_MS = 100,
    START_MS = 20,
    RUN_MS = 8,    /* ... for so long: beside a backlog that is worked off slowly the others have their turn */
    SLICE_US = 400 /* a normal scheduler is not held longer than about this */
};

static bool slice_over(ErlNifTime start) { return enif_monotonic_time(ERL_NIF_USEC) - start > SLICE_US; }

/* ------------------------------------------------------------------ kmq's own headers */
static bool header_is_kmq(const kmq_header *h) { return h->name_len >= 4 && !memcmp(h->name, "kmq-", 4); }

static int32_t parse_count(const kmq_header *h)
{
    int64_t n = 0;
    const char *text = h->value;
    if (!text || !h->value_len || h->value_len > 10) return 0;
    for (size_t i = 0; i < h->value_len; i++) {
        if (text[i] < '0' || text[i] > '9') return 0;
        n = n * 10 + (text[i] - '0');
    }
    return n < INT32_MAX ? (int32_t)n : INT32_MAX - 1;
}

/* A copy's origin is "topic/partition/offset/timestamp". One of a topic that this group does not read is a dead letter, or was
 * moved here by hand: whoever reads this topic wants it, whatever group it failed in. */
static bool origin_is_read(const engine *e, const kmq_header *origin)
{
    if (!origin || !origin->value) return true;
    const char *end = memchr(origin->value, '/', origin->value_len);
    size_t len = end ? (size_t)(end - (const char *)origin->value) : origin->value_len;
    for (size_t i = 0; i < e->n_topics; i++)
        if (strlen(e->topics[i]->name) == len && !memcmp(e->topics[i]->name, origin->value, len)) return true;
    return false;
}

static int64_t time_of(const kmq_header *h) { return h->value ? kmq_time_parse(h->value, h->value_len) : -1; }

/* When the message was published first. */
static int64_t born_ms(const kafka_record *record, const kmq_header *origin)
{
    int64_t ms = -1;
    if (origin && origin->value) {
        const char *text = origin->value;
        size_t at = origin->value_len;
        while (at && text[at - 1] != '/') at--;
        ms = kmq_time_parse(text + at, origin->value_len - at);
    }
    return ms >= 0 ? ms : record->timestamp_ms;
}

/* The pipeline's time to live begins with the publication; that of a delayed message, when it was due. */
static void limit_life(const engine *e, const kafka_record *record, const kmq_header *origin, int64_t due_ms,
                       store_kmq *kmq)
{
    if (!e->config.ttl_ms) return;
    int64_t from = born_ms(record, origin);
    if (from < due_ms) from = due_ms;
    int64_t until = from > INT64_MAX - e->config.ttl_ms ? INT64_MAX : from + e->config.ttl_ms;
    if (until < kmq->expires_ms) kmq->expires_ms = until;
}

/* false = a copy made for another group: not for us. The first header of a name counts. *due_ms: a delayed message that was not
 * delivered anywhere yet is to wait until then; 0 = it is not. */
static bool read_headers(const engine *e, const kafka_record *record, const kmq_header *headers, size_t n,
                         store_kmq *kmq, int64_t *due_ms)
{
    int64_t due = -1, expires = -1;
    bool ours = true, group = false, count = false, deliveries = false, cause = false;
    for (size_t i = 0; i < n; i++) {
        const kmq_header *h = &headers[i];
        if (!count && kmq_header_is(h, e->config.count_header)) {
            int32_t failures = kmq_count_decode(h->value ? h->value : "", h->value ? h->value_len : 0);
            kmq->attempt = failures < INT32_MAX ? failures + 1 : INT32_MAX;
            count = true;
        } else if (!header_is_kmq(h)) {
            continue;
        } else if (!group && kmq_header_is(h, "kmq-group")) {
            ours = h->value && h->value_len == strlen(e->config.group_id) &&
                   !memcmp(h->value, e->config.group_id, h->value_len);
            group = true;
        } else if (!deliveries && kmq_header_is(h, "kmq-deliveries")) {
            kmq->deliveries = parse_count(h) + 1;
            deliveries = true;
        } else if (!cause && kmq_header_is(h, "kmq-cause")) {
            kmq->crashed = h->value && h->value_len == 5 && !memcmp(h->value, "crash", 5);
            cause = true;
        } else if (kmq->id_header < 0 && kmq_header_is(h, "kmq-origin")) {
            kmq->id_header = (int32_t)i;
        } else if (due < 0 && kmq_header_is(h, "kmq-due")) {
            due = time_of(h);
        } else if (expires < 0 && kmq_header_is(h, "kmq-expires")) {
            expires = time_of(h);
        }
    }
    const kmq_header *origin = kmq->id_header < 0 ? NULL : &headers[kmq->id_header];
    if (expires >= 0) kmq->expires_ms = expires;
    limit_life(e, record, origin, due, kmq);
    *due_ms = due > 0 && !group ? due : 0;
    return ours || !origin_is_read(e, origin);
}

/* ------------------------------------------------------------------ fetch */
static void note_error(engine *e, part *p, const kafka_record *record)
{
    if (record->error == KAFKA_RECORD_OUT_OF_RANGE) {
        p->broken = true;
        engine_notify_owner(e, 0);
    } else if (record->error == KAFKA_RECORD_EOF && record->offset > p->position) {
        /* the last offsets hold no messages (ends of transactions, aborted ones, compacted ones): the commit passes them, too */
        enif_mutex_lock(p->lock);
        if (kmq_ledger_skip(&p->ledger, record->offset - 1) == KMQ_OK) p->position = record->offset;
        enif_mutex_unlock(p->lock);
    }
    /* a right that is missing is said by the partition alone; others (a leader moving, EOF) are librdkafka's to retry, and the control queue
     * reports what matters */
    if (record->error != KAFKA_RECORD_OUT_OF_RANGE && record->error != KAFKA_RECORD_EOF && !e->read_error.code &&
        !kafka_error_retriable(record->error)) {
        kafka_error_set(&e->read_error, record->error, "%s-%d: %s", p->topic->name, (int)p->partition,
                        record->error_text ? record->error_text : kafka_error_text(record->error));
        engine_notify_owner(e, 0);
    }
}

/* The ledger first, then the store: when there is no memory for a message, its offset waits in the ledger without one, nothing
 * behind it is taken, and the partition begins again at the first offset that was not handed out. Never a gap. */
static bool store_or_break(part *p, const kafka_record *record, const kmq_header *headers, size_t n,
                           const store_kmq *kmq)
{
    if (store_push(&p->store, record, headers, n, kmq)) return true;
    p->lame = true;
    return false;
}

/* Its PARK is written with the next STARTs; until it is durable the offset holds the commit. */
static int park_it(part *p, int64_t offset, int64_t due_ms)
{
    enif_mutex_lock(p->lock);
    int rc = kmq_ledger_park(&p->ledger, offset);
    enif_mutex_unlock(p->lock);
    if (rc == KMQ_OK && !marks_park(p, offset, due_ms)) rc = KMQ_ENOMEM;
    if (rc == KMQ_OK) p->parked++;
    return rc;
}

static bool keep_headed(engine *e, part *p, const kafka_record *record, const kmq_header *headers, size_t n,
                        int64_t now)
{
    store_kmq kmq = {.attempt = 1, .deliveries = 1, .id_header = -1, .expires_ms = INT64_MAX};
    int64_t due_ms = 0;
    bool ours = read_headers(e, record, headers, n, &kmq, &due_ms),
         wants = ours && kmq_filter_match(&e->config.filter, headers, n);
    bool delayed = wants && engine_marks(e) && due_ms > 0 && due_ms > part_now(p, now);
    int rc;
    if (wants && !engine_marks(e) &&
        due_ms > engine_wall_ms()) { /* nothing to park it with: it is handed out, and that is said */
        p->undelayed++;
        if (!e->undelayed++) engine_notify_owner(e, 0);
    }
    if (delayed) {
        rc = park_it(p, record->offset, due_ms);
    } else {
        enif_mutex_lock(p->lock);
        rc = wants ? kmq_ledger_fetch(&p->ledger, &record->offset, 1, NULL)
                   : kmq_ledger_skip(&p->ledger, record->offset);
        enif_mutex_unlock(p->lock);
    }
    if (rc) {
        p->lame = true;
        return false;
    }
    p->position = record->offset + 1;
    p->foreign_copies += !ours;
    p->filtered += ours && !wants;
    return delayed || (wants && store_or_break(p, record, headers, n, &kmq));
}

/* A message is kept or parked (true: it takes room), or skipped (another group's copy, filtered out): in each case the position
 * moves. */
static bool keep(engine *e, part *p, const kafka_record *record, int64_t now)
{
    kmq_header small[16], *headers = small;
    size_t n = kafka_record_headers(record, small, sizeof small / sizeof *small);
    if (n > sizeof small / sizeof *small) {
        headers = enif_alloc(n * sizeof *headers);
        if (!headers) {
            p->lame = true;
            return false;
        }
        n = kafka_record_headers(record, headers, n);
    }
    bool ok = keep_headed(e, p, record, headers, n, now);
    if (headers != small) enif_free(headers);
    return ok;
}

/* Nothing that is for us to read: kept as it is. */
static bool ordinary(const engine *e, const kmq_header *headers, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (header_is_kmq(&headers[i]) || kmq_header_is(&headers[i], e->config.count_header)) return false;
    return true;
}

/* The common case, many ordinary messages: one call into the ledger for all of them. */
static size_t keep_ordinary(engine *e, part *p, const kafka_record *records, size_t n)
{
    static const store_kmq fresh = {.attempt = 1, .deliveries = 1, .id_header = -1, .expires_ms = INT64_MAX};
    kmq_header headers[POP_HEADERS];
    size_t ends[POP]; /* of each one's headers */
    int64_t offsets[POP], next = p->position;
    size_t count = 0, kept = 0, used = 0;
    for (; count < n; count++) {
        const kafka_record *r = &records[count];
        if (r->error || r->offset < next) break;
        size_t more = kafka_record_headers(r, headers + used, POP_HEADERS - used);
        if (more > POP_HEADERS - used || !ordinary(e, headers + used, more)) break;
        used += more;
        ends[count] = used;
        offsets[count] = r->offset;
        next = r->offset + 1;
    }
    if (!count) return 0;
    enif_mutex_lock(p->lock);
    int rc = kmq_ledger_fetch(&p->ledger, offsets, count, NULL);
    enif_mutex_unlock(p->lock);
    if (rc) {
        p->lame = true;
        return 0;
    }
    p->position = next;
    for (size_t from = 0; kept < count; from = ends[kept++])
        if (!store_or_break(p, &records[kept], headers + from, ends[kept] - from, &fresh)) break;
    return kept;
}

static size_t fetch_some(engine *e, part *p, size_t max, int64_t now)
{
    bool all_are_wanted = !e->config.ttl_ms && kmq_filter_is_empty(&e->config.filter);
    kafka_record records[POP];
    if (max > POP) max = POP;
    size_t n = kafka_queue_pop_bytes(p->queue, records, max, POP_BYTES), i = 0, kept = 0, bytes = 0;
    for (size_t k = 0; k < n; k++) bytes += records[k].value_len;
    while (i < n && !p->broken && !p->lame) {
        size_t plain = all_are_wanted ? keep_ordinary(e, p, records + i, n - i) : 0;
        i += plain;
        kept += plain;
        if (i == n || p->lame) break;
        const kafka_record *r = &records[i++];
        if (r->error)
            note_error(e, p, r);
        else if (r->offset >= p->position && keep(e, p, r, now))
            kept++;
    }
    witness_read(p, records, i);
    kafka_records_free(records, n);
    if (n < max && bytes < POP_BYTES) p->hot = false; /* it is empty */
    if (!p->unstarted) p->unstarted_since = now;
    p->unstarted += kept;
    return kept;
}

/* What is fetched and not handed out, and could be. */
static void stored(const engine *e, int64_t *count, size_t *bytes)
{
    *count = 0;
    *bytes = 0;
    for (size_t i = 0; i < e->n_active; i++) {
        const part *p = e->active[i];
        if (part_stands(p)) continue;
        *count += (int64_t)p->store.count + kmq_ledger_parking(&p->ledger);
        *bytes += p->store.bytes;
    }
}

/* Twice what is handed out in a START's round trip, while hand-outs go on: as fast as the caller takes. And what the callers that
 * went away with less than they wanted made it grow to, however long the trip takes. Up to AHEAD_MAX. */
static int64_t ahead(const engine *e, int64_t now)
{
    if (!engine_marks(e)) return 0;
    bool fresh = now - e->handed_at <= AHEAD_FRESH_MS;
    uint64_t most = fresh ? 2 * e->handed_per_trip : 0;
    if (most < e->hunger) most = e->hunger;
    return most < AHEAD_MAX ? (int64_t)most : AHEAD_MAX;
}

/* What may be fetched and not handed out. */
static int64_t window(const engine *e, int64_t want, int64_t now)
{
    return e->config.start_ahead + want + ahead(e, now);
}

static int64_t ready(part *p)
{
    enif_mutex_lock(p->lock);
    int64_t n = kmq_ledger_ready(&p->ledger);
    enif_mutex_unlock(p->lock);
    return n;
}

/* Somebody wants more, and all that may be STARTed is under way: eight times as much, once for each round trip. */
static void starved(engine *e, int64_t now)
{
    if (e->start_reported < e->hungry_since) return;
    for (size_t i = 0; i < e->n_active; i++)
        if (ready(e->active[i])) return; /* it waits for something else: a commit, a lane */
    e->hungry_since = e->seq + 1;
    if (!e->hunger) e->hunger_at = now;
    if (e->hunger < (uint64_t)e->config.start_ahead) e->hunger = (uint64_t)e->config.start_ahead;
    e->hunger *= 8;
    if (e->hunger > HUNGER_MAX) e->hunger = HUNGER_MAX;
}

/* It shrinks with time: it fills the window with messages that callers who are slow by now will take long to get to. */
static void sated(engine *e, int64_t now)
{
    for (; e->hunger && now - e->hunger_at >= HUNGER_MS; e->hunger_at += HUNGER_MS) e->hunger -= (e->hunger + 7) / 8;
}

/* Is less than half of what is to be STARTed ahead on its way or durable? With nothing STARTed always: a backlog of few messages would wait for
 * a long run that does not come. */
static bool starts_urgent(const engine *e, int64_t now)
{
    int64_t started = 0;
    for (size_t i = 0; i < e->n_active; i++) {
        const part *p = e->active[i];
        if (!part_stands(p)) started += (int64_t)p->store.count - (int64_t)p->unstarted;
    }
    return 2 * started < window(e, 0, now);
}

/* STARTs, each partition in its turn; what the slice has no room for is written with the next poll. Each is a request to the broker: while there is
 * no hurry, a partition that has a backlog waits until it has a long run for one, or START_MS. */
static void start_some(engine *e, size_t run, int64_t now)
{
    bool urgent = starts_urgent(e, now);
    for (size_t i = 0; i < e->n_active; i++) {
        if (i && engine_slice_over(e)) {
            engine_notify_owner(e, 0);
            return;
        }
        e->start_cursor = (e->start_cursor + 1) % e->n_active;
        part *p = e->active[e->start_cursor];
        bool waited = p->unstarted && now - p->unstarted_since >= START_MS;
        if (urgent || waited || !p->hot || p->unstarted >= run || p->n_parks) marks_start(e, p, now);
        if (p->unstarted && p->hot && now >= p->start_pause_until) engine_notify_owner(e, START_MS);
    }
}

static bool flows(const part *p) { return p->hot && !p->broken && !p->lame && !part_stands(p); }

/* Would the next fetch read a queue? What stood when the last one looked may stand no more (a hand-out found room in its lane), or
 * what took its room stands now. Such a queue wakes nobody: it did when its first record came. */
static bool unread(const engine *e, int64_t want, int64_t now)
{
    int64_t count;
    size_t bytes;
    stored(e, &count, &bytes);
    if (count >= window(e, want, now) || (int64_t)bytes >= e->config.store_bytes) return false;
    for (size_t i = 0; i < e->n_active; i++) {
        const part *p = e->active[i];
        if (flows(p)) return true;
    }
    return false;
}

/* So much of each partition is fetched now and then, however much is of others: where one's backlog fills the window, and its callers are slow to work it
 * off, the others' messages would wait until there is room. Not each time: these are STARTed in short runs. */
static void fetch_shares(engine *e, size_t bytes, int64_t now, ErlNifTime start)
{
    size_t share = (size_t)e->config.start_ahead / e->n_active + 1;
    bool read = false;
    for (size_t i = 0; i < e->n_active; i++) {
        part *p = e->active[(e->fetching.at + i) % e->n_active];
        if (!flows(p) || p->store.count >= share) continue;
        if (now < e->shares_due) {
            engine_notify_owner(e, e->shares_due - now);
            return;
        }
        read = true;
        while (flows(p) && p->store.count < share) {
            size_t before = p->store.bytes;
            if ((int64_t)bytes >= e->config.store_bytes || slice_over(start)) return;
            fetch_some(e, p, share - p->store.count, now);
            bytes += p->store.bytes - before;
        }
    }
    if (read) e->shares_due = now + START_MS;
}

/* One that nothing was taken of yet is not over by time: of two, the same would be passed over each time. */
static void next_turn(engine_turn *turn, int64_t now) { *turn = (engine_turn){.at = turn->at + 1, .since = now}; }

static part *whose_turn(const engine *e, const engine_turn *turn) { return e->active[turn->at % e->n_active]; }

static void fetch(engine *e, int64_t want, int64_t now, ErlNifTime start)
{
    if (atomic_exchange(&e->records_woken, false))
        for (size_t i = 0; i < e->n_active; i++) e->active[i]->hot = true;
    int64_t count;
    size_t idle = 0, bytes;
    stored(e, &count, &bytes);
    sated(e, now);
    if (want > 0 && engine_marks(e) && count >= window(e, want, now)) starved(e, now);
    int64_t room = window(e, want, now) - count;
    bool skipped = false;
    /* Each START is a request to the broker: callers in a hurry get longer runs, of which the window holds three (one that is read, one on its
     * way, one that is handed out) however many partitions there are. */
    size_t quantum = (size_t)ahead(e, now) / 3;
    quantum = quantum < QUANTUM ? QUANTUM : quantum > MARKS_RUN ? MARKS_RUN : quantum;
    engine_turn *turn = &e->fetching;
    if (turn->run && now - turn->since > RUN_MS) next_turn(turn, now);
    while (room > 0 && idle < e->n_active && (int64_t)bytes < e->config.store_bytes && !slice_over(start)) {
        part *p = whose_turn(e, turn);
        size_t got = 0, before = p->store.bytes;
        int64_t position = p->position;
        while (flows(p) && turn->run < quantum && (int64_t)got < room &&
               (int64_t)(bytes + p->store.bytes - before) < e->config.store_bytes) {
            size_t left = (size_t)(room - (int64_t)got), n = quantum - turn->run;
            int64_t from = p->position;
            got += fetch_some(e, p, left < n ? left : n, now);
            turn->run += (size_t)(p->position - from); /* also what is skipped: it takes no room, but time */
            if (slice_over(start)) break;
        }
        if (!flows(p) || turn->run >= quantum) next_turn(turn, now);
        bytes += p->store.bytes - before;
        skipped = skipped || p->position - position > (int64_t)got;
        room -= (int64_t)got;
        idle = p->position > position ? 0 : idle + 1;
    }
    if (engine_marks(e)) fetch_shares(e, bytes, now, start);
    if (skipped) engine_want_commit(e, now); /* what is skipped moves the floor, too */
    for (size_t i = 0; i < e->n_active; i++)
        if (e->active[i]->lame) engine_notify_owner(e, 0); /* who begins it again */
    if (engine_marks(e)) start_some(e, quantum, now);
}

static bool may_fetch(const engine *e) { return e->state == ENGINE_OPEN && !e->draining && e->n_active; }

void pump(engine *e, int64_t want, int64_t now)
{
    marks_reports(e, now);
    if (!may_fetch(e)) return;
    fetch(e, want, now, e->slice);
    if (engine_slice_over(e)) engine_notify_owner(e, 0); /* there may be more: what is skipped wakes nobody */
}

/* ------------------------------------------------------------------ hand out */
/* The gate of a new assignment: asks once for the commit that covers the first window. One that was covered before (the partition began again
 * below what its last slot had committed) is open: no commit would go out for it, and none come back. */
static void ask_gate(engine *e, part *p, int64_t window, int64_t now)
{
    if (p->gate_offset >= 0) return;
    enif_mutex_lock(p->lock);
    p->gate_offset = kmq_ledger_waiting_offset(&p->ledger, window);
    enif_mutex_unlock(p->lock);
    if (p->committed < p->gate_offset) {
        e->commit_due = now;
        return;
    }
    p->gated = false;
    engine_wake_borrower(e);
}

/* The first message's time to live is over: nobody sees it. false: no memory, it is handed out after all. */
static bool expire(engine *e, part *p, int64_t now)
{
    if (!engine_marks(e)) return modes_expire(e, p);
    int64_t offset = store_first(&p->store);
    retry *r = NULL;
    if (!e->config.expired_discard) {
        kmq_range one = {offset, offset + 1};
        r = marks_retry_new(KMQ_MARKER_RETRY, one, 0, KMQ_RETRY_EXPIRED, KMQ_FLAG_DLQ, NULL, 0);
        if (!r) return false;
    }
    enif_mutex_lock(p->lock);
    int rc = r ? kmq_ledger_retry(&p->ledger, offset) : kmq_ledger_settle(&p->ledger, offset, KMQ_END_EXPIRED);
    if (!rc && r) marks_retry_queue(p, r);
    enif_mutex_unlock(p->lock);
    if (rc) {
        enif_free(r);
        return false;
    }
    store_drop(&p->store);
    p->expired++;
    if (!atomic_fetch_add(&e->pending, 1)) engine_notify_owner(e, e->config.ack_flush_ms);
    engine_want_commit(e, now);
    return true;
}

/* One hand-out, through all its partitions. */
typedef struct handing {
    int64_t now;
    ErlNifTime start;
    lanes *lanes;   /* NULL: no order is kept */
    int64_t unseen; /* messages since the last look at the clock */
    bool cut;       /* by the time slice */
    store_names names;
    ERL_NIF_TERM batches, unknown;
} handing;

static int64_t hand_out_some(engine *e, part *p, ErlNifEnv *env, int64_t max, handing *h, ERL_NIF_TERM *list)
{
    int64_t got = 0;
    size_t bytes = 0;
    int64_t broker_now = engine_marks(e) ? part_now(p, h->now) : engine_wall_ms();
    while (got < max) {
        int64_t most = max - got;
        if (!engine_marks(e))
            most = modes_most(e, p, most);
        else if (p->store.crashed || isolate_busy())
            most = isolate_most(e, p, most, h->now);
        enif_mutex_lock(p->lock);
        int64_t ready = kmq_ledger_ready(&p->ledger), free_slots = e->config.max_in_flight - modes_open(p);
        p->full = ready > 0 && free_slots <= 0;
        int64_t n = ready < most ? ready : most;
        if (n > free_slots) n = free_slots;
        if (n > HAND_OUT) n = HAND_OUT;
        if (n > (int64_t)p->store.count) n = (int64_t)p->store.count;
        if (n > 0 && p->gated) {
            enif_mutex_unlock(p->lock);
            ask_gate(e, p, ready < most ? ready : most, h->now);
            return got;
        }
        if (n > 0 && kmq_ledger_hand_out(&p->ledger, n, h->now)) n = 0;
        enif_mutex_unlock(p->lock);
        if (n <= 0) break;
        modes_handed(e, p, n);
        for (int64_t i = 0; i < n; i++) {
            if (store_first_expires(&p->store) <= broker_now && expire(e, p, h->now)) continue;
            *list = enif_make_list_cell(env, store_take(&p->store, env, &h->names, &bytes), *list);
            got++;
        }
        h->unseen += n;
        if (h->unseen >= HAND_OUT) {
            h->unseen = 0;
            h->cut = slice_over(h->start);
        }
        if (h->cut || h->lanes) break; /* the next message may be another lane's */
    }
    p->handed_out += (uint64_t)got;
    return got;
}

/* Where a partition's next messages go, and how many of them may: all of its lane's, with keys one by one. LANE_UNKNOWN: none now. */
static int32_t next_lane(part *p, lanes *l, int64_t *most)
{
    int32_t lane = p->lane;
    if (l->mode == LANES_KEY) {
        size_t len;
        const void *key = store_first_key(&p->store, &len);
        lane = lanes_of_key(l, p->topic->name, key, len);
        if (*most > 1) *most = 1;
    }
    if (*most > l->room[lane]) *most = l->room[lane];
    p->blocked = *most <= 0;
    return p->blocked ? LANE_UNKNOWN : lane;
}

static int64_t hand_out_lanes(engine *e, part *p, ErlNifEnv *env, int64_t max, handing *h)
{
    int64_t got = 0;
    ERL_NIF_TERM slot = enif_make_int(env, p->slot), topic = term_text(env, p->topic->name),
                 partition = enif_make_int(env, p->partition);
    if (h->lanes->mode == LANES_PARTITION && (p->lane < 0 || (size_t)p->lane >= h->lanes->n)) {
        h->unknown = enif_make_list_cell(env, enif_make_tuple3(env, slot, topic, partition), h->unknown);
        return 0;
    }
    while (got < max && p->store.count && !h->cut) {
        size_t before = p->store.count;
        int64_t most = max - got;
        int32_t lane = next_lane(p, h->lanes, &most);
        if (lane == LANE_UNKNOWN) break;
        ERL_NIF_TERM list = enif_make_list(env, 0);
        int64_t n = hand_out_some(e, p, env, most, h, &list);
        h->lanes->room[lane] -= n;
        got += n;
        if (n) {
            enif_make_reverse_list(env, list, &list);
            ERL_NIF_TERM batch = enif_make_tuple5(env, slot, topic, partition, list, enif_make_int(env, lane));
            h->batches = enif_make_list_cell(env, batch, h->batches);
        }
        if (p->store.count == before) break;
    }
    return got;
}

static int64_t hand_out_all(engine *e, part *p, ErlNifEnv *env, int64_t max, handing *h)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    int64_t n = hand_out_some(e, p, env, max, h, &list);
    if (!n) return 0;
    enif_make_reverse_list(env, list, &list);
    ERL_NIF_TERM batch = enif_make_tuple4(env, enif_make_int(env, p->slot), term_text(env, p->topic->name),
                                          enif_make_int(env, p->partition), list);
    h->batches = enif_make_list_cell(env, batch, h->batches);
    return n;
}

/* What is handed out in a row is acked in a row, and its ENDs are one record. But where few are ready, each take goes on with the next partition: what comes
 * slowly waits for nobody's run. */
static int64_t hand_out(engine *e, ErlNifEnv *env, int64_t max, handing *h)
{
    int64_t got = 0;
    engine_turn *turn = &e->handing;
    if (turn->run && (h->now - turn->since > RUN_MS || turn->run >= MARKS_RUN)) next_turn(turn, h->now);
    for (size_t i = 0; i < e->n_active && got < max && !h->cut; i++) {
        part *p = whose_turn(e, turn);
        int64_t n = 0;
        if (p->store.count && !p->paused)
            n = h->lanes ? hand_out_lanes(e, p, env, max - got, h) : hand_out_all(e, p, env, max - got, h);
        got += n;
        turn->run += (size_t)n;
        if ((got < max && !h->cut) || ready(p) < STAY) next_turn(turn, h->now);
    }
    /* It has gone once round all of them: two that share a lane take turns. */
    if (got < max && !h->cut) next_turn(turn, h->now);
    if (got) {
        e->handed_total += (uint64_t)got;
        e->handed_at = h->now;
        if (engine_marks(e)) engine_want_commit(e, h->now);
    }
    modes_ask(e, max, h->now);
    if (e->commit_due <= h->now) engine_send_commit(e, h->now);
    return got;
}

/* First what is ready, then its successors: their STARTs are under way while the caller works on what it got. Without markers
 * nothing is ready before it is fetched. */
ERL_NIF_TERM pump_take_lanes(engine *e, ErlNifEnv *env, int64_t max, lanes *l, int64_t now, bool *more,
                             ERL_NIF_TERM *unknown)
{
    engine_slice_begin(e);
    handing h = {.now = now, .start = e->slice, .lanes = l};
    h.batches = h.unknown = *unknown = enif_make_list(env, 0);
    *more = false;
    marks_reports(e, now);
    if (!may_fetch(e) || max <= 0) return h.batches;
    if (!engine_marks(e)) fetch(e, max, now, h.start);
    isolate_turn(e, false, now);
    int64_t got = hand_out(e, env, max, &h);
    if (!h.cut && engine_marks(e)) fetch(e, max - got, now, h.start);
    *more = h.cut || slice_over(h.start) || (got < max && !engine_marks(e) && unread(e, max - got, now));
    *unknown = h.unknown;
    return h.batches;
}

ERL_NIF_TERM pump_take(engine *e, ErlNifEnv *env, int64_t max, int64_t now, bool *more)
{
    ERL_NIF_TERM unknown;
    return pump_take_lanes(e, env, max, NULL, now, more, &unknown);
}
