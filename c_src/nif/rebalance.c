/* rebalance - which partitions an engine has: assigned, given back, begun anew.
 *
 *   e->active   | flowing ............ | leaving ...... |
 *               0               n_active       n_assigned
 *
 *   ASSIGN event -> asked -(engine_assign)-> flowing          positions are looked up meanwhile, by the owner (incrementally: see answer)
 *   REVOKE event -> leaving -> DRAIN -> SETTLE -> COMMIT -> retired, and librdkafka is told
 *                              |        |         '- the last commit is acknowledged
 *                              |        '- STARTs and commits in flight come back; nothing new is sent
 *                              '- where an order is kept: nothing handed out of them is in work, or not written down
 *              (lost: at once)
 *
 * What leaves is fetched, STARTed and handed out no more. An eager group takes everything back, a cooperative one what it names; the
 * rest goes on. Each step is looked at with the owner's next poll, so nobody is waited for; `revoke_until` ends them all, and `drain_until` the
 * drain a little earlier, to leave the last commit its time.
 *
 * A retired partition keeps its slot until nothing of it is open: acks, renewals and time limits go on. Slot numbers are never used twice,
 * so that an ack of an old assignment cannot touch a new one.
 *
 * Thread rule: engine.lock is held. */
#include "engine.h"

#include <string.h>
#include "atoms.h"
#include "term.h"

enum { PROMPT_MS = 2000, COMMIT_RESERVE_MS = 2000 };

/* ------------------------------------------------------------------ topics */
engine_topic *engine_topic_find(engine *e, const char *name)
{
    for (size_t i = 0; i < e->n_topics; i++)
        if (!strcmp(e->topics[i]->name, name)) return e->topics[i];
    return NULL;
}

engine_topic *engine_topic_add(engine *e, char *name, char *marker_name)
{
    engine_topic **topics = enif_realloc(e->topics, (e->n_topics + 1) * sizeof *topics);
    engine_topic *t = topics ? enif_alloc(sizeof *t) : NULL;
    if (topics) e->topics = topics;
    if (!t || !name || !marker_name) {
        enif_free(t);
        enif_free(name);
        enif_free(marker_name);
        return NULL;
    }
    *t = (engine_topic){.name = name, .marker_name = marker_name, .subscribed = true};
    kmq_marker_scope_init(&t->scope, name, strlen(name), e->config.group_id, strlen(e->config.group_id));
    e->topics[e->n_topics++] = t;
    return t;
}

int engine_subscribe(engine *e, kafka_consumer *consumer, kafka_error *err)
{
    const char **names = enif_alloc((e->n_topics + 1) * sizeof *names);
    if (!names) return KAFKA_ENOMEM;
    size_t n = 0;
    for (size_t i = 0; i < e->n_topics; i++)
        if (e->topics[i]->subscribed) names[n++] = e->topics[i]->name;
    int rc = kafka_consumer_subscribe(consumer, names, n, err);
    enif_free(names);
    return rc;
}

/* ------------------------------------------------------------------ partitions */

part *engine_find(engine *e, const char *topic, int32_t partition)
{
    for (size_t i = 0; i < e->n_assigned; i++)
        if (e->active[i]->partition == partition && !strcmp(e->active[i]->topic->name, topic)) return e->active[i];
    return NULL;
}

void engine_part_free(part *p)
{
    while (p->retries) {
        retry *r = p->retries;
        p->retries = r->next;
        enif_free(r);
    }
    store_free(&p->store);
    enif_free(p->parks);
    kmq_offset_set_free(&p->letters);
    kmq_ledger_free(&p->ledger);
    enif_mutex_destroy(p->lock);
    enif_free(p);
}

static part *part_new(engine *e, engine_topic *topic, int32_t partition, int64_t position, int64_t committed)
{
    part *p = enif_alloc(sizeof *p);
    if (!p) return NULL;
    *p = (part){.topic = topic,
                .partition = partition,
                .position = position,
                .lane = LANE_UNKNOWN,
                .hot = true,
                .paused = engine_is_paused(e, topic->name, partition),
                .gate_offset = -1,
                .gated = engine_marks(e),
                .oldest = -1,
                .committed = committed,
                .sent = committed,
                .flush_to = -1};
    p->retries_tail = &p->retries;
    witness_init(&p->witness);
    store_init(&p->store, &e->store_pool, engine_marks(e) ? STORE_LARGE_WAITS : STORE_LARGE);
    kmq_offset_set_init(&p->letters, &core_alloc);
    p->lock = enif_mutex_create((char *)(uintptr_t) "kmq:partition");
    if (!p->lock ||
        kmq_ledger_init(&p->ledger, &core_alloc, e->config.delivery, position, e->config.max_processing_ms)) {
        if (p->lock) enif_mutex_destroy(p->lock);
        enif_free(p);
        return NULL;
    }
    return p;
}

static bool add_slot(engine *e, part *p)
{
    enif_rwlock_rwlock(e->slots_lock);
    if (e->n_slots == e->cap_slots) {
        int32_t cap = e->cap_slots ? e->cap_slots * 2 : 64;
        part **slots = enif_realloc(e->slots, (size_t)cap * sizeof *slots);
        if (!slots) {
            enif_rwlock_rwunlock(e->slots_lock);
            return false;
        }
        e->slots = slots;
        e->cap_slots = cap;
    }
    p->slot = e->n_slots;
    e->slots[e->n_slots++] = p;
    enif_rwlock_rwunlock(e->slots_lock);
    return true;
}

/* What was handed out stays: its acks, renewals and time limit go on until nothing is open. Without markers it is the next owner's, and
 * a later ack is told so. */
static void retire(engine *e, part *p)
{
    enif_mutex_lock(p->lock);
    kmq_ledger_retire(&p->ledger);
    p->state = PART_RETIRED;
    enif_mutex_unlock(p->lock);
    p->queue = NULL;
    p->n_parks = 0;
    store_free(&p->store);
    e->n_retired++;
}

static void note_uncovered(engine *e, part *p)
{
    enif_mutex_lock(p->lock);
    int64_t floor = modes_floor(p);
    enif_mutex_unlock(p->lock);
    if (!p->handed_out || p->committed >= floor) return;
    e->uncovered[e->n_uncovered++ % UNCOVERED_MAX] = (uncovered){p->slot, p->committed};
}

/* Those that leave: all of them, where everything goes. */
static void retire_leaving(engine *e)
{
    while (e->n_assigned > e->n_active) {
        part *p = e->active[--e->n_assigned];
        note_uncovered(e, p);
        witness_keep(e, p);
        retire(e, p);
    }
}

void engine_retire_all(engine *e)
{
    e->n_active = 0;
    retire_leaving(e);
}

void engine_give_up(engine *e)
{
    /* covered by a commit and not handed out: no owner would fetch it again */
    for (size_t i = 0; i < e->n_assigned && engine_marks(e); i++) marks_release(e, e->active[i], false);
    engine_retire_all(e);
    e->epoch++;
    engine_asked_nothing(e);
    e->revoking = REVOKE_NONE;
    e->lost = e->commit_in_flight = e->looking = false;
    e->commit_due = INT64_MAX;
}

/* What is in work, and what became of it, is of no message that there is: its acks are unknown from now on. */
static void forget(engine *e, part *p)
{
    kmq_delivery delivery = p->ledger.delivery;
    enif_mutex_lock(p->lock);
    int64_t dropped = kmq_ledger_ends(&p->ledger);
    while (p->retries) {
        retry *r = p->retries;
        p->retries = r->next;
        dropped += r->range.hi - r->range.lo;
        enif_free(r);
    }
    p->retries_tail = &p->retries;
    kmq_ledger_free(&p->ledger);
    kmq_ledger_init(&p->ledger, &core_alloc, delivery, p->position, e->config.max_processing_ms);
    kmq_ledger_retire(&p->ledger);
    p->forgotten = true;
    enif_mutex_unlock(p->lock);
    atomic_fetch_sub(&e->pending, dropped);
}

void engine_made_anew(engine *e, const engine_topic *topic, int32_t partition, int64_t offset)
{
    for (int32_t i = e->first_slot; i < e->n_slots; i++) {
        part *p = e->slots[i];
        if (p && p->state == PART_RETIRED && p->topic == topic && p->partition == partition && p->position > offset)
            forget(e, p);
    }
}

void engine_reap(engine *e)
{
    for (int32_t i = e->first_slot; i < e->n_slots && e->n_retired; i++) {
        part *p = e->slots[i];
        if (!p || p->state != PART_RETIRED || p->in_flight) continue;
        enif_mutex_lock(p->lock);
        bool done = !engine_marks(e) || (!kmq_ledger_open(&p->ledger) && !kmq_ledger_ends(&p->ledger) && !p->retries);
        enif_mutex_unlock(p->lock);
        if (!done) continue;
        enif_rwlock_rwlock(e->slots_lock);
        e->slots[i] = NULL;
        enif_rwlock_rwunlock(e->slots_lock);
        engine_part_free(p);
        e->n_retired--;
    }
    while (e->first_slot < e->n_slots && !e->slots[e->first_slot]) e->first_slot++;
}

/* Slots for what is to be assigned. On failure those that were made are retired, and reaped. */
static int make_parts(engine *e, const kafka_partition *partitions, const bool *has_commit, size_t n, part **out,
                      kafka_error *err)
{
    int rc = KAFKA_OK;
    size_t made = 0;
    for (; made < n && !rc; made++) {
        const kafka_partition *kp = &partitions[made];
        engine_topic *topic = engine_topic_find(e, kp->topic);
        part *p = NULL;
        if (engine_find(e, kp->topic, kp->partition)) {
            kafka_error_set(err, 0, "%s-%d is assigned already", kp->topic, (int)kp->partition);
            rc = KAFKA_EKAFKA;
        } else if (!topic || !(p = part_new(e, topic, kp->partition, kp->offset, has_commit[made] ? kp->offset : -1)) ||
                   !add_slot(e, p)) {
            if (p) engine_part_free(p);
            rc = KAFKA_ENOMEM;
        }
        if (rc) break;
        out[made] = p;
    }
    if (rc)
        while (made--) retire(e, out[made]);
    return rc;
}

int engine_assign(engine *e, const kafka_partition *partitions, const bool *has_commit, size_t n, kafka_error *err)
{
    if (!e->config.cooperative) engine_retire_all(e); /* nothing is left, but for what an answer too much brought */
    part **active = enif_alloc((e->n_assigned + n + 1) * sizeof *active);
    if (!active) return KAFKA_ENOMEM;
    part **fresh = active + e->n_active;
    int rc = make_parts(e, partitions, has_commit, n, fresh, err);
    if (!rc) {
        rc = e->config.cooperative ? kafka_consumer_assign_add(e->consumer, partitions, n, err)
                                   : kafka_consumer_assign(e->consumer, partitions, n, err);
        for (size_t i = 0; i < n && rc; i++) retire(e, fresh[i]);
    }
    if (rc) {
        enif_free(active);
        return rc;
    }
    for (size_t i = 0; i < n; i++)
        if (has_commit[i]) witness_recall(e, fresh[i]);
    for (size_t i = 0; i < n; i++)
        if (!has_commit[i]) engine_made_anew(e, fresh[i]->topic, fresh[i]->partition, fresh[i]->position);
    for (size_t i = 0; i < n; i++)
        fresh[i]->queue = kafka_consumer_queue(e->consumer, fresh[i]->topic->name, fresh[i]->partition);
    if (e->active) {
        memcpy(active, e->active, e->n_active * sizeof *active);
        memcpy(fresh + n, e->active + e->n_active, (e->n_assigned - e->n_active) * sizeof *active);
    }
    enif_free(e->active);
    e->active = active;
    e->n_active += n;
    e->n_assigned += n;
    engine_asked_nothing(e);
    e->commit_due = engine_now(); /* an empty partition's position is committed, too: its first start is over */
    e->prompt_until = e->commit_due + PROMPT_MS;
    engine_wake_borrower(e);
    return KAFKA_OK;
}

/* The partition begins again at `offset` (out of range, topic made anew): as a new assignment of it, with a slot of its own. */
int engine_reset(engine *e, part *p, int64_t offset, int64_t committed, kafka_error *err)
{
    part *fresh = part_new(e, p->topic, p->partition, offset, committed);
    if (!fresh) return KAFKA_ENOMEM;
    if (!add_slot(e, fresh)) {
        engine_part_free(fresh);
        return KAFKA_ENOMEM;
    }
    fresh->queue = p->queue;
    for (size_t i = 0; i < e->n_active; i++)
        if (e->active[i] == p) e->active[i] = fresh;
    retire(e, p);
    int rc = kafka_consumer_seek(e->consumer, fresh->topic->name, fresh->partition, offset, err);
    if (rc) fresh->broken = true;
    engine_want_commit(e, engine_now());
    engine_wake_borrower(e);
    return rc;
}

/* ------------------------------------------------------------------ rebalances */
/* Where they begin is asked, of all that waits for that; an answer to an older question is refused. */
static void ask(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (size_t i = e->n_asked; i-- > 0;) {
        const new_part *p = &e->asked_parts[i];
        ERL_NIF_TERM pair = enif_make_tuple2(env, term_text(env, p->topic->name), enif_make_int(env, p->partition));
        list = enif_make_list_cell(env, pair, list);
    }
    e->asked = e->epoch;
    *events =
        enif_make_list_cell(env, enif_make_tuple3(env, atoms.assign, enif_make_uint64(env, e->asked), list), *events);
}

void engine_asked_nothing(engine *e)
{
    enif_free(e->asked_parts);
    e->asked_parts = NULL;
    e->n_asked = 0;
    e->asked = 0;
}

/* A member that leaves in the middle of that: librdkafka sends no LeaveGroup when it has nothing assigned of what the group has given it, and the group
 * waits until its session is over. So it is assigned, for as long as the leaving takes. The first `from` are already. */
void engine_take_asked(engine *e, size_t from)
{
    size_t n = e->n_asked - from;
    kafka_partition *list = n ? enif_alloc(n * sizeof *list) : NULL;
    for (size_t i = 0; i < n && list; i++)
        list[i] = (kafka_partition){.topic = e->asked_parts[from + i].topic->name,
                                    .partition = e->asked_parts[from + i].partition,
                                    .offset = KAFKA_OFFSET_END};
    e->asked = 0;
    if (!list || kafka_consumer_assign_add(e->consumer, list, n, NULL)) e->n_asked = from;
    enif_free(list);
}

static bool add_asked(engine *e, const kafka_event *event)
{
    new_part *list = enif_realloc(e->asked_parts, (e->n_asked + event->n_partitions + 1) * sizeof *list);
    if (!list) return false;
    e->asked_parts = list;
    for (size_t i = 0; i < event->n_partitions; i++) {
        engine_topic *topic = engine_topic_find(e, event->partitions[i].topic);
        if (topic) list[e->n_asked++] = (new_part){topic, event->partitions[i].partition};
    }
    return true;
}

static ERL_NIF_TERM leaving_term(const engine *e, ErlNifEnv *env)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (size_t i = e->n_assigned; i-- > e->n_active;)
        list = enif_make_list_cell(env,
                                   enif_make_tuple2(env, term_text(env, e->active[i]->topic->name),
                                                    enif_make_int(env, e->active[i]->partition)),
                                   list);
    return list;
}

/* Tells librdkafka. false: no memory, again with the next poll. */
static bool give_back(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    kafka_error err = {0};
    int rc;
    if (!e->config.cooperative) {
        rc = kafka_consumer_unassign(e->consumer, &err);
    } else {
        size_t n = 0;
        kafka_partition *list = enif_alloc((e->n_assigned - e->n_active + e->n_asked + 1) * sizeof *list);
        if (!list) return false;
        for (size_t i = e->n_active; i < e->n_assigned; i++)
            list[n++] = (kafka_partition){
                .topic = e->active[i]->topic->name, .partition = e->active[i]->partition, .offset = KAFKA_OFFSET_NONE};
        for (size_t i = 0; i < e->n_asked && e->state != ENGINE_OPEN; i++) /* engine_take_asked */
            list[n++] = (kafka_partition){.topic = e->asked_parts[i].topic->name,
                                          .partition = e->asked_parts[i].partition,
                                          .offset = KAFKA_OFFSET_NONE};
        rc = kafka_consumer_assign_remove(e->consumer, list, n, &err);
        enif_free(list);
        if (e->state != ENGINE_OPEN) engine_asked_nothing(e);
    }
    if (rc)
        *events = enif_make_list_cell(env, enif_make_tuple2(env, atoms.error, term_kafka_error(env, &err)), *events);
    return true;
}

static void say_revoked(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    *events = enif_make_list_cell(env,
                                  enif_make_tuple4(env, atoms.revoked, enif_make_uint64(env, e->epoch),
                                                   leaving_term(e, env), e->lost ? atoms.true_ : atoms.false_),
                                  *events);
}

/* What was committed ahead and not handed out goes back to the group, where there is no copy to be made of it (at most once), or
 * where a copy would stand behind all others (an order is kept): nobody has seen it, and until then nobody else reads the partition. */
static bool goes_back(const engine *e)
{
    if (e->config.delivery == KMQ_DELIVERY_AT_MOST_ONCE) return !e->config.bare;
    return e->config.delivery == KMQ_DELIVERY_MARKERS && e->config.drain_on_revoke;
}

/* false: that commit was refused, or not acknowledged in time. */
static bool rewound(part *p)
{
    enif_mutex_lock(p->lock);
    bool done = p->committed <= modes_floor(p);
    enif_mutex_unlock(p->lock);
    p->back = false;
    return done;
}

/* What a commit covers and nobody was given comes again as a copy, at no attempt: no owner would fetch it. */
static void release_leaving(engine *e)
{
    bool settled = e->revoking == REVOKE_COMMIT; /* done then, but for what was to go back */
    for (size_t i = e->n_active; i < e->n_assigned && engine_marks(e); i++)
        if (!settled || (e->active[i]->back && !rewound(e->active[i]))) marks_release(e, e->active[i], false);
}

static void revoked(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    release_leaving(e);
    e->revoking = REVOKE_COMMIT;
    e->revoke_until = 0; /* over, in whatever step it was */
    if (!give_back(e, env, events)) return;
    say_revoked(e, env, events);
    retire_leaving(e);
    e->revoking = REVOKE_NONE;
    e->lost = false;
}

/* Something of it is in work, or what became of it is not written down yet. */
static bool in_work(part *p)
{
    enif_mutex_lock(p->lock);
    bool open = modes_open(p) || kmq_ledger_ends(&p->ledger) || p->retries;
    enif_mutex_unlock(p->lock);
    return open || p->in_flight;
}

static bool drained(const engine *e)
{
    for (size_t i = e->n_active; i < e->n_assigned; i++)
        if (in_work(e->active[i])) return false;
    return true;
}

static bool starts_in_flight(const engine *e)
{
    for (size_t i = e->n_active; i < e->n_assigned; i++)
        if (e->active[i]->starts_in_flight) return true;
    return false;
}

void engine_revoke_on(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (e->revoking == REVOKE_NONE) return;
    bool over = now >= e->revoke_until || kafka_consumer_lost(e->consumer);
    if (e->revoking == REVOKE_DRAIN) {
        /* whoever closes waits for what is in work before it leaves, or does not want to */
        bool leaves = e->state != ENGINE_OPEN && e->close_step != CLOSE_DRAIN;
        bool wait = !leaves && now < e->drain_until && !over;
        if (wait && !drained(e)) return;
        e->revoking = REVOKE_SETTLE;
    }
    if (e->revoking == REVOKE_SETTLE) {
        if ((e->commit_in_flight || starts_in_flight(e)) && !over) return;
        for (size_t i = e->n_active; i < e->n_assigned; i++) {
            part *p = e->active[i];
            p->gate_offset = -1; /* a window that was not committed yet is not handed out any more: the group's */
            p->back = goes_back(e) && !over && !e->commit_in_flight; /* nothing is in flight that could come after it */
            if (!p->back) marks_release(e, p, false);
        }
        e->revoking = REVOKE_COMMIT;
        engine_send_commit(e, now);
    }
    if (!e->commit_in_flight || over) {
        if (e->commit_again &&
            !over) { /* what it covers would be handed out twice; nobody else has the partition before we give it back */
            if (now >= e->commit_due) engine_send_commit(e, now);
            return;
        }
        if (over) e->commit_in_flight = false;
        revoked(e, env, events);
    }
}

/* Those that the event names, or (eager) all. */
static bool goes(const engine *e, const kafka_event *event, const engine_topic *topic, int32_t partition)
{
    for (size_t i = 0; i < event->n_partitions && e->config.cooperative; i++)
        if (event->partitions[i].partition == partition && !strcmp(event->partitions[i].topic, topic->name))
            return true;
    return !e->config.cooperative;
}

/* Out of the flow. */
static void leave(engine *e, const kafka_event *event)
{
    size_t kept = 0;
    for (size_t i = 0; i < e->n_active; i++) {
        part *p = e->active[i];
        if (goes(e, event, p->topic, p->partition)) {
            p->state = PART_LEAVING;
            continue;
        }
        e->active[i] = e->active[kept];
        e->active[kept++] = p;
    }
    e->n_active = kept;
}

/* The rest is asked for anew: the answer that is on its way names some that are gone. */
static void leave_asked(engine *e, const kafka_event *event, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    size_t kept = 0, before = e->n_asked;
    if (e->state != ENGINE_OPEN) return; /* all of it is given back */
    for (size_t i = 0; i < before; i++)
        if (!goes(e, event, e->asked_parts[i].topic, e->asked_parts[i].partition))
            e->asked_parts[kept++] = e->asked_parts[i];
    e->n_asked = kept;
    if (!kept)
        engine_asked_nothing(e);
    else if (kept < before)
        ask(e, env, events);
}

/* Until an ASSIGN is answered librdkafka fetches nothing, of what stays neither, and the whole group waits with its next rebalance. An incremental
 * one is answered at once, by nothing; what is new is added as soon as it is known where it begins. */
static void answer(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    kafka_error err = {0};
    if (e->config.cooperative && kafka_consumer_assign_add(e->consumer, NULL, 0, &err))
        *events = enif_make_list_cell(env, enif_make_tuple2(env, atoms.error, term_kafka_error(env, &err)), *events);
}

void engine_rebalance_event(engine *e, const kafka_event *event, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    e->epoch++;
    e->commit_refused_until = 0;
    if (event->type == KAFKA_EVENT_ASSIGN) {
        if (!e->config.cooperative &&
            e->n_assigned) { /* a second one replaces the first; the un-assign that still waits is dropped: where a topic grows
                                librdkafka joins anew without waiting for it */
            e->n_active = 0;
            release_leaving(e);
            say_revoked(e, env, events);
            retire_leaving(e);
            e->revoking = REVOKE_NONE;
            e->lost = false;
        }
        answer(e, env, events);
        if (!e->config.cooperative) engine_asked_nothing(e);
        if (e->n_asked && !event->n_partitions) return; /* what is looked up is not begun again for nothing */
        size_t before = e->n_asked;
        if (!add_asked(e, event)) { /* a new client gets them again */
            kafka_error_set(&e->consumer_error, 0, "no memory for what was assigned");
            e->consumer_broken = true;
        } else if (e->config.cooperative && e->state != ENGINE_OPEN) {
            engine_take_asked(e, before);
        } else {
            ask(e, env, events);
        }
        return;
    }
    leave(e, event);
    leave_asked(e, event, env, events);
    e->lost = e->lost || event->lost;
    if (e->lost || e->n_assigned == e->n_active) {
        revoked(e, env, events);
    } else if (e->revoking == REVOKE_NONE) {
        int64_t wait = e->config.revoke_wait_ms, reserve = wait / 4 < COMMIT_RESERVE_MS ? wait / 4 : COMMIT_RESERVE_MS;
        e->revoking = e->config.drain_on_revoke ? REVOKE_DRAIN : REVOKE_SETTLE;
        e->revoke_until = now + wait;
        e->drain_until = e->revoke_until - reserve;
    }
}
