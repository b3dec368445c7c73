/* reopen - a consumer client that turned fatal is replaced under the engine, as its producer is (engine_rebuild).
 *
 * All that is assigned is over, as after a loss: what is handed out keeps its slots, its acks, renewals and time limits; what is not is the
 * group's again. The group's side of it, a member that leaves and one that joins, takes as long as a rebalance does.
 *
 * The new client is opened without engine.lock (certificates are read), then both change places under it. */
#include "resource.h"

#include "engine.h"
#include "term.h"

static ERL_NIF_TERM assigned_term(const engine *e, ErlNifEnv *env)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (size_t i = e->n_assigned; i-- > 0;)
        list = enif_make_list_cell(env,
                                   enif_make_tuple2(env, term_text(env, e->active[i]->topic->name),
                                                    enif_make_int(env, e->active[i]->partition)),
                                   list);
    return list;
}

static void replace(engine *e, kafka_consumer *fresh)
{
    engine_give_up(e);
    kafka_consumer_abandon(e->consumer);
    e->consumer = fresh;
    e->consumer_broken = false;
    e->reopen_asked = 0;
}

/* consumer_reopen(Ref) -> {ok, [{Topic, Partition}]}: what was assigned. After {reopen, Error}; else there is nothing to do. */
KMQ_NIF(nif_consumer_reopen)
{
    (void)argc;
    engine *e = consumer_engine(env, argv[0]);
    if (!e) return enif_make_badarg(env);
    kafka_error err = {0};
    kafka_consumer *fresh = NULL;
    kafka_wake control = {.fn = engine_control_woken, .ctx = e, .fd = -1},
               records = {.fn = engine_records_woken, .ctx = e, .fd = -1};
    int rc = kafka_consumer_open(e->consumer_props, e->n_consumer_props, &control, &records, &fresh, &err);
    ERL_NIF_TERM result = enif_make_list(env, 0);
    enif_mutex_lock(e->lock);
    bool wanted = e->state == ENGINE_OPEN && e->consumer_broken;
    if (wanted && !rc) rc = engine_subscribe(e, fresh, &err);
    if (wanted && !rc) {
        result = assigned_term(e, env);
        replace(e, fresh);
        fresh = NULL;
    }
    enif_mutex_unlock(e->lock);
    if (fresh) kafka_consumer_destroy(fresh, NULL, NULL);
    engine_notify_owner(e, 0);
    return rc ? term_error(env, &err) : term_ok(env, result);
}

/* consumer_give_up(Ref) -> {ok, [{Topic, Partition}]}: what was assigned. Another member has its place, for good: what is handed out is still to be
 * settled, and that is all. */
KMQ_NIF(nif_consumer_give_up)
{
    (void)argc;
    engine *e = consumer_engine(env, argv[0]);
    if (!e) return enif_make_badarg(env);
    enif_mutex_lock(e->lock);
    bool open = e->state == ENGINE_OPEN;
    ERL_NIF_TERM result = open ? assigned_term(e, env) : enif_make_list(env, 0);
    if (open) engine_give_up(e);
    enif_mutex_unlock(e->lock);
    if (open) engine_notify_owner(e, 0);
    return open ? term_ok(env, result) : term_error_atom(env, atoms.closed);
}
