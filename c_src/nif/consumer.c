/* consumer - the NIFs of one engine: decode, call, encode. */
#include "resource.h"

#include <string.h>
#include "engine.h"
#include "term.h"

enum { SETTLE_AT_ONCE = 16384, SETTLE_CHUNK = 1024 };
/* A list of any length is worked off in steps, each well under a millisecond; between two of them others have their turn. */
enum { SETTLE_STEP = 2 * SETTLE_CHUNK, ASK_STEP = 1024 };

typedef struct consumer {
    engine *engine; /* NULL: never opened */
} consumer;

static engine *get_engine(ErlNifEnv *env, ERL_NIF_TERM term)
{
    consumer *c;
    return enif_get_resource(env, term, consumer_type, (void **)&c) ? c->engine : NULL;
}

engine *consumer_engine(ErlNifEnv *env, ERL_NIF_TERM term) { return get_engine(env, term); }

void consumer_dtor(ErlNifEnv *env, void *object)
{
    (void)env;
    consumer *c = object;
    if (!c->engine) return;
    engine_kill(c->engine);
    engine_free(c->engine);
}

/* The owner or the borrower died. A borrower's death only redirects the wake-ups; the owner's ends the consumer. */
void consumer_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)env;
    (void)monitor;
    engine *e = ((consumer *)object)->engine;
    if (!e) return;
    enif_mutex_lock(e->wake_lock);
    bool owner = enif_compare_pids(pid, &e->owner) == 0;
    if (owner)
        e->owner_alive = false;
    else if (e->borrower_set && enif_compare_pids(pid, &e->borrower) == 0)
        e->borrower_set = e->ready_sent = false;
    enif_mutex_unlock(e->wake_lock);
    if (!owner) return;
    enif_mutex_lock(e->lock);
    engine_kill(e);
    enif_mutex_unlock(e->lock);
}

/* ------------------------------------------------------------------ open */
/* [{Topic, MarkerTopic}]: these are read, and no others. */
static bool read_topics(ErlNifEnv *env, ERL_NIF_TERM list, engine *e)
{
    unsigned n;
    if (!enif_get_list_length(env, list, &n)) return false;
    ERL_NIF_TERM head;
    for (size_t i = 0; i < e->n_topics; i++) e->topics[i]->subscribed = false;
    while (enif_get_list_cell(env, list, &head, &list)) {
        const ERL_NIF_TERM *pair;
        int arity;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2) return false;
        char *name = term_string(env, pair[0]);
        engine_topic *t = name ? engine_topic_find(e, name) : NULL;
        if (t) {
            enif_free(name);
            t->subscribed = true;
        } else if (!engine_topic_add(e, name, term_string(env, pair[1]))) {
            return false;
        }
    }
    return true;
}

/* [{tag, Tag} | {header, Name, Value} | {routing, Pattern}] */
static bool read_filter(ErlNifEnv *env, ERL_NIF_TERM list, kmq_filter *filter)
{
    ERL_NIF_TERM head;
    while (enif_get_list_cell(env, list, &head, &list)) {
        const ERL_NIF_TERM *t;
        int arity, rc = KMQ_EINVAL;
        ErlNifBinary a, b;
        if (!enif_get_tuple(env, head, &arity, &t) || arity < 2 || !enif_inspect_binary(env, t[1], &a)) return false;
        if (arity == 2 && enif_compare(t[0], atoms.tag) == 0)
            rc = kmq_filter_add_tag(filter, (const char *)a.data, a.size);
        else if (arity == 2 && enif_compare(t[0], atoms.routing) == 0)
            rc = kmq_filter_add_routing(filter, (const char *)a.data, a.size);
        else if (arity == 3 && enif_compare(t[0], atoms.header) == 0 && enif_inspect_binary(env, t[2], &b))
            rc = kmq_filter_add_header(filter, (const char *)a.data, a.size, b.data, b.size);
        if (rc) return false;
    }
    return true;
}

static bool read_config(ErlNifEnv *env, ERL_NIF_TERM map, engine *e)
{
    engine_config *c = &e->config;
    ERL_NIF_TERM value;
    int64_t instance = 0;
    if (!enif_get_map_value(env, map, atoms.group_id, &value) || !(c->group_id = term_string(env, value))) return false;
    if (!enif_get_map_value(env, map, atoms.count_header, &value) || !(c->count_header = term_string(env, value)))
        return false;
    if (!enif_get_map_value(env, map, atoms.format, &value)) return false;
    c->format = enif_compare(value, atoms.kmq) == 0 ? FORMAT_KMQ : FORMAT_RANGE;
    if (!enif_get_map_value(env, map, atoms.delivery, &value)) return false;
    c->bare = enif_compare(value, atoms.no_markers) == 0;
    if (c->bare || enif_compare(value, atoms.at_most_once) == 0)
        c->delivery = KMQ_DELIVERY_AT_MOST_ONCE;
    else if (enif_compare(value, atoms.offsets) == 0)
        c->delivery = KMQ_DELIVERY_OFFSETS;
    else if (enif_compare(value, atoms.markers) == 0)
        c->delivery = KMQ_DELIVERY_MARKERS;
    else
        return false;
    bool ok = term_map_int64(env, map, atoms.lease_ms, &c->lease_ms) &&
              term_map_int64(env, map, atoms.max_processing_ms, &c->max_processing_ms) &&
              term_map_int64(env, map, atoms.start_ahead, &c->start_ahead) &&
              term_map_int64(env, map, atoms.max_in_flight, &c->max_in_flight) &&
              term_map_int64(env, map, atoms.commit_interval_ms, &c->commit_interval_ms) &&
              term_map_int64(env, map, atoms.ack_flush_ms, &c->ack_flush_ms) &&
              term_map_int64(env, map, atoms.revoke_wait_ms, &c->revoke_wait_ms) &&
              term_map_int64(env, map, atoms.max_poll_ms, &c->max_poll_ms) &&
              term_map_int64(env, map, atoms.store_bytes, &c->store_bytes) &&
              term_map_int64(env, map, atoms.instance, &instance);
    c->instance = (uint64_t)instance;
    if (c->delivery == KMQ_DELIVERY_AT_MOST_ONCE) c->max_in_flight = INT64_MAX; /* nothing is in flight */
    ok = ok && term_map_int64(env, map, atoms.max_redeliveries, &c->max_redeliveries) &&
         term_map_int64(env, map, atoms.drain_ms, &c->drain_ms);
    ok = ok && term_map_int64(env, map, atoms.ttl_ms, &c->ttl_ms) && c->ttl_ms >= 0 &&
         enif_get_map_value(env, map, atoms.on_expired, &value);
    c->expired_discard = ok && enif_compare(value, atoms.discard) == 0;
    c->drain_on_revoke = enif_get_map_value(env, map, atoms.drain_on_revoke, &value) && value == atoms.true_;
    c->cooperative = enif_get_map_value(env, map, atoms.cooperative, &value) && value == atoms.true_;
    ok = ok && enif_get_map_value(env, map, atoms.filter, &value) && read_filter(env, value, &c->filter);
    return ok && c->lease_ms > 0 && c->start_ahead > 0 && c->max_in_flight > 0 && c->max_poll_ms > 0 &&
           enif_get_map_value(env, map, atoms.topics, &value) && read_topics(env, value, e);
}

static engine *new_engine(void)
{
    engine *e = enif_alloc(sizeof *e);
    if (!e) return NULL;
    memset(e, 0, sizeof *e);
    e->lock = enif_mutex_create((char *)(uintptr_t) "kmq:engine");
    e->wake_lock = enif_mutex_create((char *)(uintptr_t) "kmq:wake");
    e->slots_lock = enif_rwlock_create((char *)(uintptr_t) "kmq:slots");
    kmq_filter_init(&e->config.filter, &core_alloc);
    e->commit_due = e->flush_due = INT64_MAX;
    atomic_store(&e->owner_due, INT64_MAX);
    return e;
}

/* consumer_open(Props, ProducerProps, Opts): the caller is the owner. */
KMQ_NIF(nif_consumer_open)
{
    (void)argc;
    engine *e = new_engine();
    consumer *c = e ? enif_alloc_resource(consumer_type, sizeof *c) : NULL;
    if (!c) {
        if (e) engine_free(e);
        return term_error_atom(env, enif_make_atom(env, "enomem"));
    }
    c->engine = e;
    atomic_fetch_add(&live_consumers, 1);
    e->resource = c;
    ERL_NIF_TERM result;
    if (!read_config(env, argv[2], e) ||
        !term_properties(env, argv[0], &e->consumer_props, &e->n_consumer_props, &e->consumer_memory) ||
        !term_properties(env, argv[1], &e->producer_props, &e->n_producer_props, &e->producer_memory)) {
        result = enif_make_badarg(env);
        goto out;
    }
    e->renew_due = engine_now() + e->config.lease_ms / 3;
    enif_self(env, &e->owner);
    e->owner_alive = true;
    if (engine_marks(e)) isolate_join(e); /* before anything can end it; without markers nobody is counted out */
    kafka_error err = {0};
    kafka_wake control = {.fn = engine_control_woken, .ctx = e, .fd = -1},
               records = {.fn = engine_records_woken, .ctx = e, .fd = -1};
    int rc = engine_open_producer(e, &err);
    if (!rc) rc = kafka_consumer_open(e->consumer_props, e->n_consumer_props, &control, &records, &e->consumer, &err);
    ErlNifMonitor monitor;
    if (!rc && enif_monitor_process(env, c, &e->owner, &monitor)) rc = KAFKA_ENOMEM;
    if (rc) {
        engine_kill(e);
        result = term_error(env, &err);
    } else {
        result = term_ok(env, enif_make_resource(env, c));
    }
out:
    enif_release_resource(c);
    return result;
}

/* ------------------------------------------------------------------ calls that need the engine open */
#define ENGINE_OR_RETURN(e)                                                                                            \
    engine *e = get_engine(env, argv[0]);                                                                              \
    if (!e) return enif_make_badarg(env);                                                                              \
    enif_mutex_lock(e->lock);                                                                                          \
    if (e->state == ENGINE_CLOSED) {                                                                                   \
        enif_mutex_unlock(e->lock);                                                                                    \
        return term_error_atom(env, atoms.closed);                                                                     \
    }

static ERL_NIF_TERM unlock_result(ErlNifEnv *env, engine *e, int rc, const kafka_error *err)
{
    enif_mutex_unlock(e->lock);
    return rc ? term_error(env, err) : atoms.ok;
}

KMQ_NIF(nif_consumer_subscribe)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    kafka_error err = {0};
    return unlock_result(env, e, engine_subscribe(e, e->consumer, &err), &err);
}

/* consumer_topics(Ref, [{Topic, MarkerTopic}]): from now on these, perhaps none. What is open of the others stays. */
KMQ_NIF(nif_consumer_topics)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    kafka_error err = {0};
    int rc = KAFKA_OK;
    bool read = read_topics(env, argv[1], e);
    for (size_t i = 0; i < e->n_topics && e->producer && read && !rc; i++) {
        engine_topic *t = e->topics[i];
        if (!t->marker) t->marker = kafka_producer_topic(e->producer, t->marker_name, &err);
        if (!t->marker) rc = KAFKA_EKAFKA;
    }
    if (read && !rc) rc = engine_subscribe(e, e->consumer, &err);
    if (read) return unlock_result(env, e, rc, &err);
    enif_mutex_unlock(e->lock);
    return enif_make_badarg(env);
}

/* attach(Ref, Pid | nil): who is woken when there is something to take. */
KMQ_NIF(nif_consumer_attach)
{
    (void)argc;
    consumer *c;
    ErlNifPid pid;
    bool none = enif_compare(argv[1], atoms.nil) == 0;
    if (!enif_get_resource(env, argv[0], consumer_type, (void **)&c) ||
        (!none && !enif_get_local_pid(env, argv[1], &pid)))
        return enif_make_badarg(env);
    engine *e = c->engine;
    ErlNifMonitor monitor;
    bool dead = !none && enif_monitor_process(env, c, &pid, &monitor) != 0;
    enif_mutex_lock(e->lock); /* a new borrower has lanes of its own */
    for (int32_t i = e->first_slot; i < e->n_slots; i++)
        if (e->slots[i]) e->slots[i]->lane = LANE_UNKNOWN, e->slots[i]->blocked = false;
    enif_mutex_unlock(e->lock);
    enif_mutex_lock(e->wake_lock);
    e->borrower_set = !none && !dead;
    if (e->borrower_set) e->borrower = pid;
    e->ready_sent = false;
    enif_mutex_unlock(e->wake_lock);
    engine_wake_borrower(e);
    return atoms.ok;
}

KMQ_NIF(nif_consumer_poll)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    ERL_NIF_TERM events;
    int64_t next_ms;
    engine_poll(e, env, &events, &next_ms);
    enif_mutex_unlock(e->lock);
    return enif_make_tuple2(env, events, enif_make_int64(env, next_ms));
}

static bool get_rooms(ErlNifEnv *env, ERL_NIF_TERM list, lanes *l)
{
    unsigned length;
    ERL_NIF_TERM head;
    if (!enif_get_list_length(env, list, &length) || !length || length > LANES_MAX) return false;
    l->n = length;
    l->room = enif_alloc(length * sizeof *l->room);
    if (!l->room) return false;
    for (size_t i = 0; enif_get_list_cell(env, list, &head, &list); i++) {
        ErlNifSInt64 room;
        if (!enif_get_int64(env, head, &room)) return false;
        l->room[i] = room;
    }
    return true;
}

static ERL_NIF_TERM take(ErlNifEnv *env, const ERL_NIF_TERM argv[], int64_t max, lanes *l)
{
    ENGINE_OR_RETURN(e)
    enif_mutex_lock(e->wake_lock);
    e->ready_sent = false;
    enif_mutex_unlock(e->wake_lock);
    bool more;
    ERL_NIF_TERM unknown;
    ERL_NIF_TERM batches = pump_take_lanes(e, env, max, l, engine_now(), &more, &unknown);
    ErlNifTime took = enif_monotonic_time(ERL_NIF_USEC) - e->slice;
    enif_mutex_unlock(e->lock);
    enif_consume_timeslice(env, took >= 1000 ? 100 : took < 10 ? 1 : (int)(took / 10));
    ERL_NIF_TERM again = more ? atoms.true_ : atoms.false_;
    return l ? enif_make_tuple3(env, batches, again, unknown) : enif_make_tuple2(env, batches, again);
}

/* take(Ref, Max), or take(Ref, Max, {partition | key, [Room]}) within the room of each lane. */
KMQ_NIF(nif_consumer_take)
{
    ErlNifSInt64 max;
    if (!enif_get_int64(env, argv[1], &max)) return enif_make_badarg(env);
    if (argc == 2) return take(env, argv, max, NULL);
    const ERL_NIF_TERM *t;
    int arity;
    if (!enif_get_tuple(env, argv[2], &arity, &t) || arity != 2) return enif_make_badarg(env);
    lanes l = {.mode = enif_compare(t[0], atoms.key) == 0 ? LANES_KEY : LANES_PARTITION};
    ERL_NIF_TERM result = get_rooms(env, t[1], &l) ? take(env, argv, max, &l) : enif_make_badarg(env);
    enif_free(l.room);
    return result;
}

/* lanes(Ref, [{Slot, Lane}]): where a partition's messages go from now on. */
KMQ_NIF(nif_consumer_lanes)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    ERL_NIF_TERM head, tail = argv[1], result = atoms.ok;
    const ERL_NIF_TERM *t;
    int arity, slot, lane;
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        if (!enif_get_tuple(env, head, &arity, &t) || arity != 2 || !enif_get_int(env, t[0], &slot) ||
            !enif_get_int(env, t[1], &lane)) {
            result = enif_make_badarg(env);
            break;
        }
        part *p = slot >= 0 && slot < e->n_slots ? e->slots[slot] : NULL;
        if (p) p->lane = lane;
    }
    enif_mutex_unlock(e->lock);
    return result;
}

static bool get_partition(ErlNifEnv *env, ERL_NIF_TERM term, kafka_partition *out, bool *has_commit)
{
    const ERL_NIF_TERM *t;
    int arity, partition;
    ErlNifSInt64 offset;
    if (!enif_get_tuple(env, term, &arity, &t) || arity != 4 || !enif_get_int(env, t[1], &partition) ||
        !enif_get_int64(env, t[2], &offset))
        return false;
    char *topic = term_string(env, t[0]);
    if (!topic) return false;
    *out = (kafka_partition){.topic = topic, .partition = partition, .offset = offset};
    *has_commit = enif_compare(t[3], atoms.true_) == 0;
    return true;
}

/* consumer_assign(Ref, Epoch, [{Topic, Partition, Offset, HasCommit}]) */
KMQ_NIF(nif_consumer_assign)
{
    (void)argc;
    ErlNifUInt64 epoch;
    unsigned length;
    if (!enif_get_uint64(env, argv[1], &epoch) || !enif_get_list_length(env, argv[2], &length))
        return enif_make_badarg(env);
    kafka_partition *list = enif_alloc((length + 1) * sizeof *list);
    bool *has_commit = enif_alloc(length + 1);
    size_t n = 0;
    ERL_NIF_TERM head, tail = argv[2], result = 0; /* 0 = a bad argument: making that term already raises */
    if (!list || !has_commit) goto out;
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        if (!get_partition(env, head, &list[n], &has_commit[n])) goto out;
        n++;
    }
    engine *e = get_engine(env, argv[0]);
    if (!e) goto out;
    enif_mutex_lock(e->lock);
    kafka_error err = {0};
    if (e->state != ENGINE_OPEN)
        result = term_error_atom(env, atoms.closed);
    else if (!epoch || e->asked != epoch)
        result = term_error_atom(env, atoms.stale);
    else if (engine_assign(e, list, has_commit, n, &err))
        result = term_error(env, &err);
    else
        result = atoms.ok;
    enif_mutex_unlock(e->lock);
    engine_notify_owner(e, 0);
out:
    for (size_t i = 0; i < n; i++) enif_free((void *)(uintptr_t)list[i].topic);
    enif_free(list);
    enif_free(has_commit);
    return result ? result : enif_make_badarg(env);
}

/* consumer_reset(Ref, Slot, Offset): after {out_of_range, Slot, ...}; Offset < 0: begin again at its own position. After {doubted, Slot, ...};
 * Offset < 0: it is the topic that it was. */
KMQ_NIF(nif_consumer_reset)
{
    (void)argc;
    int slot;
    ErlNifSInt64 offset;
    if (!enif_get_int(env, argv[1], &slot) || !enif_get_int64(env, argv[2], &offset)) return enif_make_badarg(env);
    ENGINE_OR_RETURN(e)
    part *p = slot >= 0 && slot < e->n_slots ? e->slots[slot] : NULL;
    if (!p || p->state != PART_ACTIVE || (!p->broken && !p->witness.doubted)) {
        enif_mutex_unlock(e->lock);
        return term_error_atom(env, atoms.stale);
    }
    kafka_error err = {0};
    if (!p->broken && offset < 0) {
        witness_same(p);
        return unlock_result(env, e, 0, NULL);
    }
    int rc = engine_reset(e, p, offset < 0 ? p->position : offset, offset < 0 ? p->sent : -1, &err);
    if (!rc && offset >= 0) engine_made_anew(e, p->topic, p->partition, offset);
    return unlock_result(env, e, rc, &err);
}

KMQ_NIF(nif_consumer_rebuild)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    kafka_error err = {0};
    return unlock_result(env, e, engine_rebuild(e, &err), &err);
}

/* A `flushed` event of poll tells when everything settled before this call is durable. */
KMQ_NIF(nif_consumer_flush)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    e->flush_seq = UINT64_MAX;
    e->flush_due = INT64_MAX;
    engine_notify_owner(e, 0);
    return unlock_result(env, e, 0, NULL);
}

/* consumer_uncovered(Ref) -> [{Slot, Committed}], also when it is closed: settled or not, what was handed out of these from Committed on is handed
 * out again by the group. */
KMQ_NIF(nif_consumer_uncovered)
{
    (void)argc;
    engine *e = get_engine(env, argv[0]);
    if (!e) return enif_make_badarg(env);
    ERL_NIF_TERM list = enif_make_list(env, 0);
    enif_mutex_lock(e->lock);
    for (size_t i = 0; i < e->n_uncovered && i < UNCOVERED_MAX; i++) {
        const uncovered *u = &e->uncovered[i];
        ERL_NIF_TERM pair = enif_make_tuple2(env, enif_make_int(env, u->slot), enif_make_int64(env, u->committed));
        list = enif_make_list_cell(env, pair, list);
    }
    enif_mutex_unlock(e->lock);
    return list;
}

KMQ_NIF(nif_consumer_drain)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    e->draining = true;
    return unlock_result(env, e, 0, NULL);
}

/* consumer_close(Ref, TimeoutMs[, Drain]): a `{closed, ok | timeout}` event of poll ends it. Drain (true), without markers: wait for what is in
 * work. */
KMQ_NIF(nif_consumer_close)
{
    bool drain = argc < 3 || enif_compare(argv[2], atoms.true_) == 0;
    ErlNifSInt64 timeout;
    if (!enif_get_int64(env, argv[1], &timeout)) return enif_make_badarg(env);
    ENGINE_OR_RETURN(e)
    engine_close_begin(e, engine_now() + timeout, drain);
    return unlock_result(env, e, 0, NULL);
}

KMQ_NIF(nif_consumer_kill)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    engine_kill(e);
    return unlock_result(env, e, 0, NULL);
}

KMQ_NIF(nif_consumer_test_fatal)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    int rc = KAFKA_OK;
    if (enif_compare(argv[1], atoms.producer) != 0)
        rc = kafka_consumer_test_fatal(e->consumer, "asked for by a test");
    else if (e->producer)
        rc = kafka_producer_test_fatal(e->producer, "asked for by a test");
    kafka_error err = {0};
    return unlock_result(env, e, rc, &err);
}

/* consumer_set_token(Ref, Token, ExpiresMs, Principal, Extensions): for the consumer and its producer */
KMQ_NIF(nif_consumer_set_token)
{
    (void)argc;
    term_token_memory memory;
    engine *e = get_engine(env, argv[0]);
    if (!e || !term_token(env, argv + 1, &memory)) return enif_make_badarg(env);
    kafka_error err = {0};
    int rc = 0;
    enif_mutex_lock(e->lock);
    if (e->consumer) rc = kafka_consumer_set_token(e->consumer, &memory.token, &err);
    if (e->producer && !rc) rc = kafka_producer_set_token(e->producer, &memory.token, &err);
    enif_mutex_unlock(e->lock);
    term_token_free(&memory);
    return rc ? term_error(env, &err) : atoms.ok;
}

/* ------------------------------------------------------------------ settle: any process, no engine lock */
/* What waits is written within ack_flush_interval by the owner, or at once by whoever brings one too many. */
static void after_settle(engine *e, int64_t added)
{
    if (!added) return;
    if (!engine_marks(e)) { /* said once until the next commit */
        if (!atomic_exchange(&e->settled, true)) engine_notify_owner(e, 0);
        return;
    }
    int64_t before = atomic_fetch_add(&e->pending, added);
    if (before + added >= SETTLE_AT_ONCE && enif_mutex_trylock(e->lock) == 0) {
        engine_slice_begin(e);
        if (e->state != ENGINE_CLOSED && atomic_load(&e->pending) >= SETTLE_AT_ONCE) marks_flush(e, engine_now());
        enif_mutex_unlock(e->lock);
        if (atomic_load(&e->pending)) engine_notify_owner(e, e->config.ack_flush_ms);
    } else if (!before) {
        atomic_store(&e->pending_since, engine_now());
        engine_notify_owner(e, e->config.ack_flush_ms);
    }
}

static ERL_NIF_TERM failure(ErlNifEnv *env, int slot, int64_t offset, int rc)
{
    ERL_NIF_TERM reason = rc == KMQ_ELATE      ? atoms.late
                          : rc == KMQ_EUNKNOWN ? atoms.unknown
                          : rc == KMQ_ENOMEM   ? enif_make_atom(env, "enomem")
                          : rc == KMQ_EFULL    ? atoms.full
                          : rc == KMQ_EINVAL   ? atoms.unsupported
                                               : atoms.closed;
    return enif_make_tuple3(env, enif_make_int(env, slot), enif_make_int64(env, offset), reason);
}

static bool get_token(ErlNifEnv *env, ERL_NIF_TERM term, int arity_wanted, int *slot, int64_t *offset,
                      ErlNifSInt64 *third)
{
    const ERL_NIF_TERM *t;
    int arity;
    ErlNifSInt64 o;
    if (!enif_get_tuple(env, term, &arity, &t) || arity != arity_wanted || !enif_get_int(env, t[0], slot) ||
        !enif_get_int64(env, t[1], &o) || (third && !enif_get_int64(env, t[2], third)))
        return false;
    *offset = o;
    return true;
}

/* A run of offsets of one slot, settled together. */
typedef struct settling {
    engine *engine;
    kmq_end_cause cause;
    int slot;
    size_t n;
    int64_t offsets[SETTLE_CHUNK];
    int64_t added;
    ERL_NIF_TERM failures;
} settling;

static void settle_run(ErlNifEnv *env, settling *s)
{
    int8_t results[SETTLE_CHUNK];
    engine *e = s->engine;
    if (!s->n) return;
    enif_rwlock_rlock(e->slots_lock);
    part *p = s->slot >= 0 && s->slot < e->n_slots ? e->slots[s->slot] : NULL;
    bool was_full = false;
    if (!engine_marks(e)) {
        was_full = modes_settle(e, p, s->slot, s->cause, s->offsets, s->n, results);
    } else if (p) {
        enif_mutex_lock(p->lock);
        int rc = kmq_ledger_settle_many(&p->ledger, s->offsets, s->n, s->cause, results);
        if (rc) memset(results, rc, s->n);
        was_full = p->full;
        p->full = false;
        enif_mutex_unlock(p->lock);
    } else {
        memset(results, KMQ_EUNKNOWN, s->n);
    }
    enif_rwlock_runlock(e->slots_lock);
    if (was_full) engine_wake_borrower(e);
    for (size_t i = 0; i < s->n; i++) {
        if (results[i] == KMQ_OK || results[i] == KMQ_ELATE) s->added++;
        if (results[i] != KMQ_OK)
            s->failures = enif_make_list_cell(env, failure(env, s->slot, s->offsets[i], results[i]), s->failures);
    }
    s->n = 0;
}

/* What a call of n arguments gives, or the call that goes on with the rest of its list (argv[at]); that one has one more, the failures so
 * far. */
static ERL_NIF_TERM result_or_rest(ErlNifEnv *env, const char *name,
                                   ERL_NIF_TERM (*rest)(ErlNifEnv *, int, const ERL_NIF_TERM[]), int n,
                                   const ERL_NIF_TERM argv[], int at, ERL_NIF_TERM tail, ERL_NIF_TERM failures)
{
    ERL_NIF_TERM args[6];
    if (enif_is_empty_list(env, tail))
        return enif_is_empty_list(env, failures) ? atoms.ok : enif_make_tuple2(env, atoms.error, failures);
    for (int i = 0; i < n; i++) args[i] = argv[i];
    args[at] = tail;
    args[n] = failures;
    enif_consume_timeslice(env, 100);
    return enif_schedule_nif(env, name, 0, rest, n + 1, args);
}

static ERL_NIF_TERM failures_so_far(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[], int n)
{
    return argc > n ? argv[n] : enif_make_list(env, 0);
}

static void settle_next(ErlNifEnv *env, settling *s, int slot, int64_t offset)
{
    if (s->n == SETTLE_CHUNK || s->slot != slot) settle_run(env, s);
    s->slot = slot;
    s->offsets[s->n++] = offset;
}

/* All of {Slot, Topic, Partition, [{Offset, ...}]}: as long as a take makes it. */
static bool settle_batch(ErlNifEnv *env, settling *s, ERL_NIF_TERM batch, size_t *done)
{
    const ERL_NIF_TERM *t, *message;
    int arity, slot;
    ErlNifSInt64 offset;
    if (!enif_get_tuple(env, batch, &arity, &t) || arity != 4 || !enif_get_int(env, t[0], &slot)) return false;
    ERL_NIF_TERM head, tail = t[3];
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        if (!enif_get_tuple(env, head, &arity, &message) || arity < 1 || !enif_get_int64(env, message[0], &offset))
            return false;
        settle_next(env, s, slot, offset);
        ++*done;
    }
    return true;
}

/* consumer_settle(Ref, Cause 0 | 1 | 3, [{Slot, Offset} | Batch of consumer_take]) -> ok | {error, [{Slot, Offset, Reason}]} */
KMQ_NIF(nif_consumer_settle)
{
    int cause, slot;
    int64_t offset;
    size_t done = 0;
    engine *e = get_engine(env, argv[0]);
    if (!e || !enif_get_int(env, argv[1], &cause) || cause < 0 || cause >= KMQ_END_CAUSES ||
        !enif_is_list(env, argv[2]))
        return enif_make_badarg(env);
    if (e->state == ENGINE_CLOSED) return term_error_atom(env, atoms.closed);
    settling s = {.engine = e, .cause = (kmq_end_cause)cause, .failures = failures_so_far(env, argc, argv, 3)};
    ERL_NIF_TERM head, tail = argv[2];
    for (; done < SETTLE_STEP && enif_get_list_cell(env, tail, &head, &tail); done++) {
        if (get_token(env, head, 2, &slot, &offset, NULL))
            settle_next(env, &s, slot, offset);
        else if (!settle_batch(env, &s, head, &done))
            return enif_make_badarg(env);
    }
    settle_run(env, &s);
    after_settle(e, s.added);
    enif_consume_timeslice(env, done < 100 ? 1 : done > 10000 ? 100 : (int)(done / 100));
    return result_or_rest(env, "consumer_settle", NORMAL(consumer_settle), 3, argv, 2, tail, s.failures);
}

/* consumer_reject(Ref, [{Slot, Offset}]) -> ok | {error, [{Slot, Offset, Reason}]}: without markers. The caller writes the dead letters, and then
 * settles them with cause 3. */
KMQ_NIF(nif_consumer_reject)
{
    (void)argc;
    engine *e = get_engine(env, argv[0]);
    if (!e || !enif_is_list(env, argv[1]) || engine_marks(e)) return enif_make_badarg(env);
    if (e->state == ENGINE_CLOSED) return term_error_atom(env, atoms.closed);
    int slot;
    int64_t offset;
    ERL_NIF_TERM head, tail = argv[1], failures = enif_make_list(env, 0);
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        if (!get_token(env, head, 2, &slot, &offset, NULL)) return enif_make_badarg(env);
        enif_rwlock_rlock(e->slots_lock);
        part *p = slot >= 0 && slot < e->n_slots ? e->slots[slot] : NULL;
        if (p) enif_mutex_lock(p->lock);
        int rc = modes_leave(e, p, slot, offset);
        if (p) enif_mutex_unlock(p->lock);
        enif_rwlock_runlock(e->slots_lock);
        if (rc != KMQ_OK) failures = enif_make_list_cell(env, failure(env, slot, offset, rc), failures);
    }
    return enif_is_empty_list(env, failures) ? atoms.ok : enif_make_tuple2(env, atoms.error, failures);
}

/* consumer_again(Ref) -> ok: what is in work is in nobody's hands any more. By :offsets its partitions begin again at the commit; otherwise time
 * brings it back, or nothing. */
KMQ_NIF(nif_consumer_again)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    for (size_t i = 0; i < e->n_active && e->config.delivery == KMQ_DELIVERY_OFFSETS; i++) {
        part *p = e->active[i];
        enif_mutex_lock(p->lock);
        if (kmq_ledger_open(&p->ledger)) p->lame = true;
        enif_mutex_unlock(p->lock);
    }
    engine_notify_owner(e, 0);
    return unlock_result(env, e, 0, NULL);
}

/* A marker that somebody asks for, of an offset that is in work: the ledger says whether, then it waits to be written. With
 * limit_ms the offset stays in work until then, else it leaves. marker NULL: the ledger alone. Takes the marker. */
static int ask_one(engine *e, int slot, int64_t offset, int64_t limit_ms, retry *marker)
{
    enif_rwlock_rlock(e->slots_lock);
    part *p = slot >= 0 && slot < e->n_slots ? e->slots[slot] : NULL;
    int rc = engine_marks(e) ? KMQ_EUNKNOWN : KMQ_EINVAL;
    bool was_full = false;
    if (p && engine_marks(e)) {
        enif_mutex_lock(p->lock);
        rc = limit_ms ? kmq_ledger_extend(&p->ledger, offset, limit_ms) : kmq_ledger_retry(&p->ledger, offset);
        if (rc == KMQ_OK && marker) {
            marks_retry_queue(p, marker);
            marker = NULL;
        }
        if (!limit_ms) {
            was_full = p->full;
            p->full = false;
        }
        enif_mutex_unlock(p->lock);
    }
    enif_rwlock_runlock(e->slots_lock);
    enif_free(marker);
    if (was_full) engine_wake_borrower(e);
    return rc;
}

static int retry_one(engine *e, int slot, int64_t offset, int64_t delay_ms, int cause, int flags,
                     const ErlNifBinary *text)
{
    kmq_range one = {offset, offset + 1};
    retry *r = marks_retry_new(KMQ_MARKER_RETRY, one, delay_ms, (uint8_t)cause, (uint8_t)flags, text->data, text->size);
    return r ? ask_one(e, slot, offset, 0, r) : KMQ_ENOMEM;
}

/* Stays in work: in the range format the handle itself keeps the limit, in the kmq format the tracker does. Leaves: from now on it
 * is no more of ours, and only its marker says until when somebody may settle it. */
static int extend_one(engine *e, int slot, int64_t offset, int64_t ms, bool leave, int64_t now)
{
    kmq_range one = {offset, offset + 1};
    retry *r = NULL;
    if (leave || e->config.format == FORMAT_KMQ) {
        r = marks_retry_new(KMQ_MARKER_EXTEND, one, ms, EXTEND_ASKED, 0, NULL, 0);
        if (!r) return KMQ_ENOMEM;
    }
    if (leave) return ask_one(e, slot, offset, 0, r);
    return ask_one(e, slot, offset, ms > INT64_MAX - now ? INT64_MAX : now + ms, r);
}

/* consumer_retry(Ref, [{Slot, Offset, DelayMs}], Cause, Flags, Text) -> ok | {error, [{Slot, Offset, Reason}]} */
KMQ_NIF(nif_consumer_retry)
{
    engine *e = get_engine(env, argv[0]);
    int cause, flags, slot;
    ErlNifBinary text;
    if (!e || !enif_is_list(env, argv[1]) || !enif_get_int(env, argv[2], &cause) || cause < 0 ||
        cause > KMQ_RETRY_REJECTED || /* expired is the engine's own */ !enif_get_int(env, argv[3], &flags) ||
        flags < 0 || flags > 3 || !enif_inspect_binary(env, argv[4], &text))
        return enif_make_badarg(env);
    if (e->state == ENGINE_CLOSED) return term_error_atom(env, atoms.closed);
    if (text.size > KMQ_ERROR_TEXT_MAX) text.size = KMQ_ERROR_TEXT_MAX;
    int64_t offset, added = 0;
    ErlNifSInt64 delay;
    ERL_NIF_TERM head, tail = argv[1], failures = failures_so_far(env, argc, argv, 5);
    for (int done = 0; done < ASK_STEP && enif_get_list_cell(env, tail, &head, &tail); done++) {
        if (!get_token(env, head, 3, &slot, &offset, &delay) || delay < 0) return enif_make_badarg(env);
        int rc = retry_one(e, slot, offset, delay, cause, flags, &text);
        if (rc == KMQ_OK)
            added++;
        else
            failures = enif_make_list_cell(env, failure(env, slot, offset, rc), failures);
    }
    after_settle(e, added);
    return result_or_rest(env, "consumer_retry", NORMAL(consumer_retry), 5, argv, 1, tail, failures);
}

/* consumer_extend(Ref, [{Slot, Offset, Ms}], Leave) -> ok | {error, [{Slot, Offset, Reason}]}: in work for that long from now on,
 * with this consumer, or (Leave; Ms < 0 = the time limit) without it, for whoever has a receipt. */
KMQ_NIF(nif_consumer_extend)
{
    engine *e = get_engine(env, argv[0]);
    if (!e || !enif_is_list(env, argv[1])) return enif_make_badarg(env);
    if (e->state == ENGINE_CLOSED) return term_error_atom(env, atoms.closed);
    bool leave = enif_compare(argv[2], atoms.true_) == 0;
    int slot;
    int64_t offset, added = 0, now = engine_now();
    ErlNifSInt64 ms, soonest = INT64_MAX;
    ERL_NIF_TERM head, tail = argv[1], failures = failures_so_far(env, argc, argv, 3);
    for (int done = 0; done < ASK_STEP && enif_get_list_cell(env, tail, &head, &tail); done++) {
        if (!get_token(env, head, 3, &slot, &offset, &ms) || (ms < 0 && !leave)) return enif_make_badarg(env);
        if (ms < 0) ms = e->config.max_processing_ms;
        int rc = extend_one(e, slot, offset, ms, leave, now);
        if (rc != KMQ_OK) {
            failures = enif_make_list_cell(env, failure(env, slot, offset, rc), failures);
            continue;
        }
        added += leave || e->config.format == FORMAT_KMQ;
        if (ms < soonest) soonest = ms;
    }
    after_settle(e, added);
    if (!leave && soonest < e->config.max_processing_ms) engine_notify_owner(e, soonest);
    return result_or_rest(env, "consumer_extend", NORMAL(consumer_extend), 3, argv, 1, tail, failures);
}

/* ------------------------------------------------------------------ info */
static void put(ErlNifEnv *env, ERL_NIF_TERM *map, ERL_NIF_TERM key, int64_t value)
{
    enif_make_map_put(env, *map, key, enif_make_int64(env, value), map);
}

/* How far the group is behind the end, by its commit, and by what is not handed out where a commit covers that already: -1 where that is not known (nothing was fetched yet) or makes no sense (the topic is a
 * new one, a new position is being looked for). */
static int64_t lag_of(const part *p, int64_t floor, int64_t end)
{
    int64_t from = p->committed >= 0 && p->committed < floor ? p->committed : floor;
    return p->broken || end < from ? -1 : end - from;
}

static void put_lag(ErlNifEnv *env, engine *e, part *p, int64_t floor, ERL_NIF_TERM *map)
{
    int64_t end =
        p->state == PART_ACTIVE && e->consumer ? kafka_consumer_end(e->consumer, p->topic->name, p->partition) : -1;
    put(env, map, atoms.end_, end);
    put(env, map, atoms.lag, lag_of(p, floor, end));
}

static ERL_NIF_TERM part_info(ErlNifEnv *env, engine *e, part *p, int64_t now)
{
    ERL_NIF_TERM map = enif_make_new_map(env);
    enif_make_map_put(env, map, atoms.topic, term_text(env, p->topic->name), &map);
    enif_make_map_put(env, map, atoms.state,
                      p->state == PART_ACTIVE    ? atoms.assigned
                      : p->state == PART_LEAVING ? atoms.leaving
                                                 : atoms.retired,
                      &map);
    enif_make_map_put(env, map, atoms.gated, p->gated ? atoms.true_ : atoms.false_, &map);
    enif_mutex_lock(p->lock);
    put(env, &map, atoms.open, kmq_ledger_open(&p->ledger));
    put(env, &map, atoms.waiting, kmq_ledger_waiting(&p->ledger));
    put(env, &map, atoms.letters, kmq_offset_set_count(&p->letters));
    put(env, &map, atoms.ends, kmq_ledger_ends(&p->ledger));
    put(env, &map, atoms.started, kmq_ledger_ready(&p->ledger));
    int64_t floor = modes_floor(p), since = kmq_ledger_oldest_open_ms(&p->ledger);
    put(env, &map, atoms.floor, floor);
    put(env, &map, atoms.oldest_open, kmq_ledger_oldest_open(&p->ledger));
    kmq_ledger_counts counts = kmq_ledger_counters(&p->ledger);
    enif_mutex_unlock(p->lock);
    put(env, &map, atoms.oldest_open_ms, since == INT64_MAX ? -1 : since < now ? now - since : 0);
    put(env, &map, atoms.buffered, (int64_t)p->store.count);
    put_lag(env, e, p, floor, &map);
    enif_make_map_put(env, map, atoms.paused, p->paused ? atoms.true_ : atoms.false_, &map);
    put(env, &map, atoms.late, (int64_t)counts.late);
    put(env, &map, atoms.unknown, (int64_t)counts.unknown);
    put(env, &map, atoms.repeats, (int64_t)counts.repeats);
    put(env, &map, atoms.slot, p->slot);
    put(env, &map, atoms.partition, p->partition);
    put(env, &map, atoms.position, p->position);
    put(env, &map, atoms.committed, p->committed);
    put(env, &map, atoms.in_flight, p->in_flight);
    put(env, &map, atoms.handed_out, (int64_t)p->handed_out);
    put(env, &map, atoms.foreign_copies, (int64_t)p->foreign_copies);
    put(env, &map, atoms.filtered, (int64_t)p->filtered);
    put(env, &map, atoms.parked, (int64_t)p->parked);
    put(env, &map, atoms.expired, (int64_t)p->expired);
    return map;
}

KMQ_NIF(nif_consumer_info)
{
    (void)argc;
    ENGINE_OR_RETURN(e)
    ERL_NIF_TERM map = enif_make_new_map(env), list = enif_make_list(env, 0);
    int64_t now = engine_now();
    for (int32_t i = e->n_slots; i-- > e->first_slot;)
        if (e->slots[i]) list = enif_make_list_cell(env, part_info(env, e, e->slots[i], now), list);
    enif_make_map_put(env, map, atoms.partitions, list, &map);
    int64_t waiting = 0;
    for (size_t i = 0; i < e->n_active; i++) waiting += (int64_t)e->active[i]->store.count;
    put(env, &map, atoms.waiting, waiting);
    put(env, &map, atoms.ends, atomic_load(&e->pending));
    put(env, &map, atoms.in_flight, (int64_t)e->ends_in_flight);
    put(env, &map, atoms.epoch, (int64_t)e->epoch);
    put(env, &map, atoms.looks, (int64_t)e->looks);
    enif_mutex_unlock(e->lock);
    return term_ok(env, map);
}
