/* engine - life, timers and commits of one consumer. The picture is in engine.h. */
#include "engine.h"

#include <string.h>
#include "atoms.h"
#include "resource.h"
#include "term.h"
#include "../kafka/failpoint.h"

enum {
    WORKS_MS = 1000,
    CONTROL_EVENTS = 64,
    BUSY_MS = 20,
    COMMIT_PAUSE_MS = 200,
    REFUSED_PAUSE_MS = 5000,
    PATIENCE_MS = 30000,
    SLICE_US = 400
};

/* Positive, unlike the VM's own: 0 can mean "never". */
static int64_t base_ms;
void engine_clock_load(void) { base_ms = enif_monotonic_time(ERL_NIF_MSEC) - 1000; }
int64_t engine_now(void) { return enif_monotonic_time(ERL_NIF_MSEC) - base_ms; }
int64_t engine_wall_ms(void) { return enif_monotonic_time(ERL_NIF_MSEC) + enif_time_offset(ERL_NIF_MSEC); }

void engine_slice_begin(engine *e) { e->slice = enif_monotonic_time(ERL_NIF_USEC); }
bool engine_slice_over(const engine *e) { return enif_monotonic_time(ERL_NIF_USEC) - e->slice > SLICE_US; }

/* ------------------------------------------------------------------ waking */
static void send_to(engine *e, const ErlNifPid *to, ERL_NIF_TERM what, int64_t in_ms)
{
    ErlNifEnv *env = enif_alloc_env();
    ERL_NIF_TERM message = in_ms < 0 ? what : enif_make_tuple2(env, what, enif_make_int64(env, in_ms));
    ERL_NIF_TERM term = enif_make_tuple3(env, atoms.kmq, enif_make_resource(env, e->resource), message);
    enif_send(NULL, to, env, term);
    enif_free_env(env);
}

void engine_wake_borrower(engine *e)
{
    enif_mutex_lock(e->wake_lock);
    if (!e->ready_sent && e->owner_alive) {
        e->ready_sent = true;
        send_to(e, e->borrower_set ? &e->borrower : &e->owner, atoms.ready, -1);
    }
    enif_mutex_unlock(e->wake_lock);
}

void engine_notify_owner(engine *e, int64_t in_ms)
{
    int64_t due = engine_now() + in_ms, current = atomic_load(&e->owner_due);
    do {
        if (due >= current) return;
    } while (!atomic_compare_exchange_weak(&e->owner_due, &current, due));
    enif_mutex_lock(e->wake_lock);
    if (e->owner_alive) send_to(e, &e->owner, atoms.due, in_ms);
    enif_mutex_unlock(e->wake_lock);
}

void engine_control_woken(void *ctx) { engine_notify_owner(ctx, 0); }

void engine_records_woken(void *ctx)
{
    engine *e = ctx;
    atomic_store(&e->records_woken, true);
    engine_wake_borrower(e);
}

void engine_reports_woken(void *ctx)
{
    engine *e = ctx;
    engine_wake_borrower(e);
    if (atomic_load(&e->owner_wants_reports)) engine_notify_owner(e, 0);
}

static void *core_realloc(void *ctx, void *ptr, size_t size)
{
    (void)ctx;
    if (size) return enif_realloc(ptr, size);
    enif_free(ptr);
    return NULL;
}
const kmq_alloc core_alloc = {core_realloc, NULL};

/* ------------------------------------------------------------------ commits */
/* When the next commit can go out; INT64_MAX: none is due, or what is awaited first wakes the owner itself. A commit that is due while none is
 * taken would have it polled at once, again and again. */
static int64_t commit_at(const engine *e)
{
    if (e->commit_in_flight || e->revoking == REVOKE_SETTLE) return INT64_MAX;
    return e->commit_due < e->commit_refused_until ? e->commit_refused_until : e->commit_due;
}

/* Where a message kills its VM again and again, it does so soon after an assignment: for a while commits go out with the hand-out itself, so
 * that also a killer behind the first window is below the committed offset the next time. */
void engine_want_commit(engine *e, int64_t now)
{
    int64_t due = now < e->prompt_until && engine_marks(e) ? now : now + e->config.commit_interval_ms;
    if (e->commit_due > due) e->commit_due = due;
    int64_t at = commit_at(e);
    if (at != INT64_MAX) engine_notify_owner(e, at > now ? at - now : 0);
}

/* part.lock is held */
static int64_t to_commit(const part *p)
{
    int64_t offset = modes_floor(p);
    if (offset < p->gate_offset) offset = p->gate_offset;
    if (offset < p->sent && !p->back) offset = p->sent; /* a commit never goes back, but for this */
    return offset;
}

/* One commit at a time; what changes meanwhile goes with the next. */
void engine_send_commit(engine *e, int64_t now)
{
    enum { MOST = 1024 };
    kafka_partition list[MOST];
    size_t n = 0;
    if (e->commit_in_flight || !e->consumer || now < e->commit_refused_until || e->revoking == REVOKE_SETTLE) return;
    e->commit_due = INT64_MAX;
    e->commit_again = false;
    atomic_store(&e->settled, false);
    (void)KMQ_FAILPOINT("handout_commit");
    for (size_t i = 0; i < e->n_assigned && n < MOST; i++) {
        part *p = e->active[i];
        enif_mutex_lock(p->lock);
        int64_t offset = to_commit(p);
        if (offset > p->committed) kmq_ledger_cover(&p->ledger, offset);
        enif_mutex_unlock(p->lock);
        if (p->back ? offset == p->committed : offset <= p->committed) continue;
        p->sent = offset;
        list[n++] = (kafka_partition){.topic = p->topic->name, .partition = p->partition, .offset = offset};
    }
    if (!n) return;
    if (kafka_consumer_commit(e->consumer, list, n, NULL, NULL)) {
        e->commit_due = now + COMMIT_PAUSE_MS;
        engine_notify_owner(e, COMMIT_PAUSE_MS); /* a hand-out's call comes from somebody else */
    } else {
        e->commit_in_flight = true;
    }
}

static void add(ErlNifEnv *env, ERL_NIF_TERM *events, ERL_NIF_TERM name, ERL_NIF_TERM value)
{
    *events = enif_make_list_cell(env, enif_make_tuple2(env, name, value), *events);
}

/* {passing, What, Error}: tried again, and nobody need look. */
static void add_passing(ErlNifEnv *env, ERL_NIF_TERM *events, ERL_NIF_TERM what, const kafka_error *error)
{
    *events =
        enif_make_list_cell(env, enif_make_tuple3(env, atoms.passing, what, term_kafka_error(env, error)), *events);
}

/* The group moves on, a coordinator moves: it goes with the next commit. What does not for PATIENCE_MS has another cause. */
static void commit_failed(engine *e, const kafka_error *error, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    kafka_verdict verdict = kafka_error_verdict(error->code);
    if (!e->commit_failing) e->commit_failing = now;
    if (verdict == KAFKA_ANSWERED || (verdict == KAFKA_RETRIED && now - e->commit_failing < PATIENCE_MS))
        add_passing(env, events, atoms.commit, error);
    else
        add(env, events, atoms.commit_failed, term_kafka_error(env, error));
}

/* With markers, what is acknowledged is settled by its END. A commit that is refused for good (a right is missing), which only keeps it from being
 * handed out again after a crash, is waited for no longer: other topics go on. */
static void commit_hopeless(const engine *e, part *p, int code)
{
    kafka_verdict verdict = kafka_error_verdict(code);
    if (engine_marks(e) && verdict != KAFKA_RETRIED && verdict != KAFKA_ANSWERED) p->flush_to = -1;
}

static void committed(engine *e, const kafka_event *event, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    bool failed = event->error.code != 0;
    kafka_error err = event->error;
    if (!failed) (void)KMQ_FAILPOINT("commit_ack");
    e->commit_in_flight = false;
    for (size_t i = 0; i < event->n_partitions; i++) {
        const kafka_partition *kp = &event->partitions[i];
        part *p = engine_find(e, kp->topic, kp->partition);
        if (kp->error) {
            if (!failed)
                kafka_error_set(&err, kp->error, "%s-%d at %lld", kp->topic, (int)kp->partition, (long long)kp->offset);
            failed = true;
            if (p) commit_hopeless(e, p, kp->error);
        } else if (p && event->error.code) {
            commit_hopeless(e, p, event->error.code);
        } else if (p && kp->offset >= 0 && kp->offset == p->sent) { /* and not of a slot before */
            if (p->committed < kp->offset || p->back) p->committed = kp->offset;
            if (p->gated && p->gate_offset >= 0 && p->committed >= p->gate_offset) {
                p->gated = false;
                engine_wake_borrower(e);
            }
            modes_committed(e, p);
        }
    }
    modes_commit_over(e);
    if (failed) {
        /* Incrementally, what stays is committed while the rest of the group moves: nothing is wrong, it goes with the next. */
        bool expected = e->config.cooperative && kafka_error_rebalancing(err.code);
        e->commit_again = expected;
        if (!expected) commit_failed(e, &err, env, events, now);
        e->commit_due = now + COMMIT_PAUSE_MS;
        /* Refused for good: of this generation it is no member any more. librdkafka says so by an event of its own, soon. */
        if (!expected && kafka_error_verdict(err.code) == KAFKA_ANSWERED)
            e->commit_due = e->commit_refused_until = now + REFUSED_PAUSE_MS;
        return;
    }
    e->commit_failing = 0;
    if (e->commit_due == INT64_MAX)
        e->commit_due = now + e->config.commit_interval_ms; /* the floor may have moved meanwhile */
}

/* ------------------------------------------------------------------ the owner's poll */
static void add_error(engine *e, const kafka_error *error, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    switch (kafka_outage_error(&e->outage, error, now)) {
    case KAFKA_OUTAGE_NONE: add(env, events, atoms.error, term_kafka_error(env, error)); break;
    case KAFKA_OUTAGE_BEGINS: add(env, events, atoms.outage, term_kafka_error(env, error)); break;
    case KAFKA_OUTAGE_GOES_ON: add_passing(env, events, atoms.connection, error); break;
    }
}

static void simple_event(engine *e, const kafka_event *event, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    switch (event->type) {
    case KAFKA_EVENT_ASSIGN:
    case KAFKA_EVENT_REVOKE: engine_rebalance_event(e, event, env, events, now); break;
    case KAFKA_EVENT_COMMIT: committed(e, event, env, events, now); break;
    case KAFKA_EVENT_TIMES: witness_answer(e, event); break;
    case KAFKA_EVENT_ERROR: add_error(e, &event->error, env, events, now); break;
    case KAFKA_EVENT_UP:
    case KAFKA_EVENT_DOWN: kafka_outage_link(&e->outage, event, now); break;
    case KAFKA_EVENT_LOG:
        *events = enif_make_list_cell(
            env, enif_make_tuple3(env, atoms.log, enif_make_int(env, event->level), term_text(env, event->text)),
            *events);
        break;
    case KAFKA_EVENT_STATS: add(env, events, atoms.stats, term_text(env, event->text)); break;
    case KAFKA_EVENT_TOKEN: add(env, events, atoms.token, term_text(env, event->text)); break;
    case KAFKA_EVENT_NONE: break;
    }
}

static bool serve_queues(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    kafka_event event;
    int n = 0;
    while (e->consumer && n < CONTROL_EVENTS && kafka_consumer_poll(e->consumer, &event)) {
        if (event.type == KAFKA_EVENT_ERROR && event.error.fatal &&
            kafka_error_verdict(event.error.code) != KAFKA_STOPS) {
            e->consumer_broken = true;
            e->consumer_error = event.error;
        } else {
            simple_event(e, &event, env, events, now);
        }
        kafka_event_free(&event);
        n++;
    }
    while (e->producer && n < 2 * CONTROL_EVENTS && kafka_producer_poll(e->producer, &event)) {
        if (event.type == KAFKA_EVENT_ERROR && event.error.fatal)
            e->producer_broken = true; /* it is replaced: the consumer goes on */
        else
            simple_event(e, &event, env, events, now);
        kafka_event_free(&event);
        n++;
    }
    return n >= CONTROL_EVENTS;
}

/* A topic made anew: librdkafka's fetcher does not always say that the position is out of range, and then stands still. That the end is below
 * the position for a while says the same. */
static void beyond_end(engine *e, int64_t now)
{
    enum { BEYOND_MS = 3000 };
    for (size_t i = 0; i < e->n_active && e->consumer; i++) {
        part *p = e->active[i];
        if (p->broken || p->store.count || !p->queue) continue;
        int64_t end = kafka_consumer_end(e->consumer, p->topic->name, p->partition);
        if (end < 0 || end >= p->position) {
            p->beyond_since = 0;
        } else if (!p->beyond_since) {
            p->beyond_since = now;
            engine_notify_owner(e, BEYOND_MS + 1);
        } else if (now - p->beyond_since > BEYOND_MS) {
            p->beyond_since = 0;
            p->broken = true;
            kafka_queue_stopped(p->queue);
        }
    }
}

static void out_of_range(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    for (size_t i = 0; i < e->n_active; i++) {
        part *p = e->active[i];
        if (!p->broken || p->store.count) continue; /* what is fetched is handed out first */
        ERL_NIF_TERM event[] = {atoms.out_of_range, enif_make_int(env, p->slot), term_text(env, p->topic->name),
                                enif_make_int(env, p->partition), enif_make_int64(env, p->position)};
        *events = enif_make_list_cell(env, enif_make_tuple_from_array(env, event, 5), *events);
    }
}

static void restart_lame(engine *e, int64_t now)
{
    for (size_t i = 0; i < e->n_active && e->state == ENGINE_OPEN; i++) {
        part *p = e->active[i];
        if (!p->lame) continue;
        enif_mutex_lock(p->lock);
        int64_t floor = modes_floor(p);
        enif_mutex_unlock(p->lock);
        if (engine_reset(e, p, floor, p->sent, NULL))
            engine_want_commit(e, now); /* looked at again with the next poll */
    }
}

/* What is awaited is confirmed when the group's commit is past it, too: else the next owner would begin with it again, and hand it out. With
 * markers the floor is behind all that was handed out, so that one commit covers it, and most often it was there before. What was given
 * back meanwhile was committed then. */
void engine_flush_commit(engine *e, int64_t now)
{
    for (size_t i = 0; i < e->n_assigned; i++) {
        part *p = e->active[i];
        enif_mutex_lock(p->lock);
        p->flush_to = modes_floor(p);
        enif_mutex_unlock(p->lock);
        if (p->flush_to > p->committed) e->commit_due = now;
    }
}

bool engine_flush_committed(const engine *e)
{
    for (size_t i = 0; i < e->n_assigned; i++)
        if (e->active[i]->flush_to > e->active[i]->committed) return false;
    return true;
}

static void flush_on(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (!e->flush_seq) return;
    if (!engine_marks(e)) {
        modes_flush(e, env, events, now);
        return;
    }
    if (e->flush_seq == UINT64_MAX) {
        if (e->flush_due > now && e->flush_due != INT64_MAX) return;
        e->flush_seq = e->seq ? e->seq : 1;
        marks_flush(e, now); /* gives UINT64_MAX again when not all could be queued */
        if (e->flush_seq != UINT64_MAX) e->flush_seq = e->seq ? e->seq : 1;
        engine_flush_commit(e, now);
    }
    if (!engine_flush_committed(e)) return;
    for (const mark *m = e->oldest; m && m->seq <= e->flush_seq; m = m->next)
        if (marks_awaited(m->type, m->cause)) return;
    e->flush_seq = 0;
    *events = enif_make_list_cell(env, atoms.flushed, *events);
}

static void destroy_clients(engine *e)
{
    isolate_leave(e);
    if (e->consumer) kafka_consumer_destroy(e->consumer, NULL, NULL);
    if (e->producer) kafka_producer_destroy(e->producer, NULL, NULL);
    e->consumer = NULL;
    e->producer = NULL;
    atomic_fetch_sub(&live_consumers, 1);
}

static void close_client(engine *e)
{
    e->close_step = CLOSE_CLIENT;
    if (kafka_consumer_close_begin(e->consumer, NULL)) { /* fatal: it is no member any more */
        engine_retire_all(e);
        e->close_step = CLOSE_FLUSH;
    }
}

/* A group gives a new member its id first, and then waits for it to join with it, until a session is over. So one that is closed in that moment
 * waits for its id, to leave with it. */
static bool may_leave(const engine *e, int64_t now)
{
    return e->epoch || now >= e->close_join_until || kafka_consumer_member(e->consumer);
}

static void close_leave(engine *e)
{
    e->close_step = CLOSE_LEAVE;
    if (e->config.cooperative) {
        engine_take_asked(e, 0);
        if (kafka_consumer_leave(e->consumer)) return;
    } else {
        if (e->asked) kafka_consumer_unassign(e->consumer, NULL); /* never answered: there is nothing to settle */
        engine_asked_nothing(e);
    }
    close_client(e);
}

static void close_join(engine *e, int64_t now)
{
    enum { JOIN_MS = 1000 };
    e->close_step = CLOSE_JOIN;
    e->close_join_until = now + JOIN_MS < e->close_drain_until ? now + JOIN_MS : e->close_drain_until;
    marks_flush(e, now);
    if (may_leave(e, now)) close_leave(e);
}

/* Without markers what is in work is waited for, and in a cooperative group its rebalance; closing, with the last commit, takes the last
 * quarter of the time, at most 2 s. */
void engine_close_begin(engine *e, int64_t deadline, bool drain)
{
    if (e->state != ENGINE_OPEN) return;
    int64_t now = engine_now(), reserve = (deadline - now) / 4;
    e->state = ENGINE_CLOSING;
    e->draining = true;
    e->close_deadline = deadline;
    e->close_drain_until = deadline - (reserve < 2000 ? reserve : 2000);
    e->close_step = CLOSE_DRAIN;
    e->close_waits = drain;
    e->close_uncovered = e->n_uncovered;
    if (engine_marks(e)) close_join(e, now);
    engine_notify_owner(e, 0);
}

/* Of a close whose time is over: whether anything of what was settled may come again for that. A member that held nothing (its group had not let it in
 * yet, or gave it nothing) has lost nothing, however little its brokers answered. */
static bool close_complete(const engine *e) { return marks_settled(e) && e->n_uncovered == e->close_uncovered; }

static void close_on(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (e->state != ENGINE_CLOSING) return;
    bool over = now >= e->close_deadline;
    if (e->close_step == CLOSE_DRAIN) {
        if (!modes_drained(e, e->close_waits) && now < e->close_drain_until) return;
        if (!modes_drained(e, true)) *events = enif_make_list_cell(env, atoms.undrained, *events);
        close_join(e, now);
    }
    if (e->close_step == CLOSE_JOIN && may_leave(e, now)) close_leave(e);
    if (e->close_step == CLOSE_LEAVE && (now >= e->close_drain_until || !kafka_consumer_member(e->consumer)))
        close_client(e);
    if (e->close_step == CLOSE_CLIENT && (kafka_consumer_closed(e->consumer) || over)) {
        engine_retire_all(e);
        e->close_step = CLOSE_FLUSH;
    }
    if (e->close_step == CLOSE_FLUSH) { /* what is still open goes back at once, at no attempt */
        for (int32_t i = e->first_slot; i < e->n_slots; i++)
            if (e->slots[i]) marks_release(e, e->slots[i], true);
        marks_flush(e, now);
        e->close_step = CLOSE_WAIT;
    }
    if (e->close_step == CLOSE_WAIT) {
        if (!marks_settled(e) && !over) {
            if (atomic_load(&e->pending) && e->flush_due <= now) marks_flush(e, now);
            return;
        }
        bool complete = !over || close_complete(e);
        destroy_clients(e);
        e->state = ENGINE_CLOSED;
        *events =
            enif_make_list_cell(env, enif_make_tuple2(env, atoms.closed, complete ? atoms.ok : atoms.timeout), *events);
    }
}

void engine_kill(engine *e)
{
    if (e->state == ENGINE_CLOSED) return;
    e->state = ENGINE_CLOSED;
    e->draining = true;
    destroy_clients(e);
}

int engine_open_producer(engine *e, kafka_error *err)
{
    kafka_wake wake = {.fn = engine_reports_woken, .ctx = e, .fd = -1};
    if (!engine_marks(e)) return KAFKA_OK;
    int rc = kafka_producer_open(e->producer_props, e->n_producer_props, true, &wake, &e->producer, err);
    for (size_t i = 0; i < e->n_topics && !rc; i++) {
        e->topics[i]->marker = kafka_producer_topic(e->producer, e->topics[i]->marker_name, err);
        if (!e->topics[i]->marker) rc = KAFKA_EKAFKA;
    }
    if (rc && e->producer) {
        kafka_producer_destroy(e->producer, NULL, NULL);
        e->producer = NULL;
    }
    return rc;
}

/* A producer that turned fatal is replaced; what it had in flight is unknown, so it counts as failed and is written again. */
int engine_rebuild(engine *e, kafka_error *err)
{
    if (!e->producer_broken) return KAFKA_OK;
    if (e->producer) kafka_producer_destroy(e->producer, NULL, NULL);
    e->producer = NULL;
    marks_fail_all(e, engine_now());
    int rc = engine_open_producer(e, err);
    if (!rc) e->producer_broken = false;
    e->rebuild_asked = 0;
    engine_notify_owner(e, rc ? COMMIT_PAUSE_MS : 0);
    return rc;
}

/* ENDs and RETRYs are written ack_flush_ms after the first of them, not with whatever poll comes sooner: each is a request to the broker. */
static int64_t flush_at(engine *e)
{
    if (!atomic_load(&e->pending)) return INT64_MAX;
    if (e->flush_due != INT64_MAX) return e->flush_due;
    bool awaited = e->revoking || e->flush_seq || e->state != ENGINE_OPEN || isolate_busy();
    return awaited ? 0 : atomic_load(&e->pending_since) + e->config.ack_flush_ms;
}

static int64_t earliest(engine *e, int64_t now)
{
    int64_t next = now + e->config.max_poll_ms / 3;
#define SOONER(t)                                                                                                      \
    do {                                                                                                               \
        int64_t t_ = (t);                                                                                              \
        if (t_ < next) next = t_;                                                                                      \
    } while (0)
    SOONER(commit_at(e));
    SOONER(e->flush_due);
    SOONER(flush_at(e));
    if (engine_marks(e))
        SOONER(e->renew_due);
    else
        SOONER(modes_due(e, now));
    SOONER(isolate_due(e, now));
    SOONER(witness_due(e));
    if (e->outage.settling) SOONER(e->outage.up_ms + KAFKA_OUTAGE_SETTLE_MS);
    for (size_t i = 0; i < e->n_topics; i++)
        if (e->topics[i]->told_error && e->topics[i]->written && now - e->topics[i]->failed_at < WORKS_MS)
            SOONER(e->topics[i]->failed_at + WORKS_MS);
    if (e->revoking || e->state == ENGINE_CLOSING || e->flush_seq) SOONER(now + BUSY_MS);
    for (int32_t i = e->first_slot; i < e->n_slots; i++) {
        part *p = e->slots[i];
        if (!p) continue;
        if (p->start_pause_until > now) SOONER(p->start_pause_until);
        enif_mutex_lock(p->lock);
        SOONER(kmq_ledger_next_timeout(&p->ledger));
        enif_mutex_unlock(p->lock);
    }
#undef SOONER
    return next > now ? next - now : 0;
}

/* One event when a topic's markers cannot be written any more, one when they have been written again for a while. */
static void note_markers(engine *e, engine_topic *t, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    const part *failing = NULL;
    char text[320];
    for (int32_t i = e->first_slot; i < e->n_slots && !failing; i++)
        if (e->slots[i] && e->slots[i]->topic == t && e->slots[i]->marker_error) failing = e->slots[i];
    if (failing && !t->told_error) {
        t->told_error = failing->marker_error;
        snprintf(text, sizeof text, "%s-%d: %s", t->marker_name, (int)failing->partition,
                 kafka_error_name(failing->marker_error));
        add(env, events, atoms.start_failed, term_text(env, text));
    } else if (!failing && t->told_error && t->written && now - t->failed_at >= WORKS_MS) {
        t->told_error = 0;
        add(env, events, atoms.start_works, term_text(env, t->marker_name));
    }
}

static void note_broken(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (e->producer_broken && now - e->rebuild_asked > 1000) {
        kafka_error err;
        kafka_error_set(&err, 0, "no producer");
        if (e->producer) kafka_producer_fatal(e->producer, &err);
        add(env, events, atoms.rebuild, term_kafka_error(env, &err));
        e->rebuild_asked = now;
    }
    if (e->consumer_broken && e->state == ENGINE_OPEN && now - e->reopen_asked > 1000) {
        add(env, events, atoms.reopen, term_kafka_error(env, &e->consumer_error));
        e->reopen_asked = now;
    }
    int64_t lasted;
    if (kafka_outage_over(&e->outage, now, &lasted)) add(env, events, atoms.connected, enif_make_int64(env, lasted));
    if (e->read_error.code) {
        add(env, events, atoms.error, term_kafka_error(env, &e->read_error));
        e->read_error.code = 0;
    }
    if (e->end_note.text[0]) add(env, events, atoms.end_failed, term_text(env, e->end_note.text));
    e->end_note.text[0] = 0;
    if (e->anew[0]) add(env, events, atoms.markers_anew, term_text(env, e->anew));
    e->anew[0] = 0;
    for (size_t i = 0; i < e->n_topics; i++) note_markers(e, e->topics[i], env, events, now);
}

int engine_poll(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t *next_ms)
{
    int64_t now = engine_now();
    engine_slice_begin(e);
    atomic_store(&e->owner_due, INT64_MAX);
    *events = enif_make_list(env, 0);
    *next_ms = e->config.max_poll_ms / 3;
    if (e->state == ENGINE_CLOSED) return 0;

    bool busy = serve_queues(e, env, events, now);
    pump(e, 0, now);
    if (flush_at(e) <= now) marks_flush(e, now);
    if (now >= e->renew_due) marks_renew(e, now);
    marks_timeouts(e, now);
    isolate_turn(e, true, now);
    if (!engine_marks(e)) modes_say(e, env, events, now);
    flush_on(e, env, events, now);
    engine_revoke_on(e, env, events, now);
    if (now >= commit_at(e) && e->state == ENGINE_OPEN) engine_send_commit(e, now);
    close_on(e, env, events, now);
    note_broken(e, env, events, now);
    beyond_end(e, now);
    witness_on(e, env, events, now);
    out_of_range(e, env, events);
    restart_lame(e, now);
    engine_reap(e);
    enif_make_reverse_list(env, *events, events);

    atomic_store(&e->owner_wants_reports,
                 e->revoking || e->blocked || e->state == ENGINE_CLOSING || e->flush_seq || isolate_busy());
    enif_mutex_lock(e->wake_lock);
    if (!e->borrower_set) e->ready_sent = false;
    enif_mutex_unlock(e->wake_lock);
    int64_t next = busy ? 0 : earliest(e, now);
    *next_ms = next;
    int64_t due = now + next, current = INT64_MAX;
    while (due < current && !atomic_compare_exchange_weak(&e->owner_due, &current, due)) {}
    return 0;
}

void engine_free(engine *e)
{
    while (e->oldest) {
        mark *m = e->oldest;
        e->oldest = m->next;
        enif_free(m->text);
        enif_free(m);
    }
    for (int32_t i = e->first_slot; i < e->n_slots; i++)
        if (e->slots[i]) engine_part_free(e->slots[i]);
    store_pool_free(&e->store_pool);
    for (size_t i = 0; i < e->n_topics; i++) {
        enif_free(e->topics[i]->name);
        enif_free(e->topics[i]->marker_name);
        enif_free(e->topics[i]);
    }
    if (e->letters_env) enif_free_env(e->letters_env);
    enif_free(e->topics);
    enif_free(e->slots);
    enif_free(e->active);
    enif_free(e->kept);
    engine_asked_nothing(e);
    engine_paused_free(e);
    enif_free(e->producer_memory);
    enif_free(e->consumer_memory);
    enif_free(e->config.group_id);
    enif_free(e->config.count_header);
    kmq_filter_free(&e->config.filter);
    if (e->slots_lock) enif_rwlock_destroy(e->slots_lock);
    if (e->wake_lock) enif_mutex_destroy(e->wake_lock);
    if (e->lock) enif_mutex_destroy(e->lock);
    enif_free(e);
}
