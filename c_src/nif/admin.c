/* admin - the NIFs of what blocks: all of them run on dirty I/O schedulers, bounded by their TimeoutMs. */
#include "resource.h"

#include <string.h>
#include "kafka.h"
#include "store.h"
#include "term.h"

typedef struct admin {
    ErlNifMutex *lock;
    kafka_admin *admin;   /* NULL = closed */
    kafka_reader *reader; /* opened by the first read */
    kafka_property *props;
    size_t n_props;
    void *memory;            /* of the props */
    term_token_memory token; /* the reader gets it, too */
} admin;

void admin_dtor(ErlNifEnv *env, void *object)
{
    (void)env;
    admin *a = object;
    if (a->admin) {
        kafka_admin_destroy(a->admin);
        atomic_fetch_sub(&live_admins, 1);
    }
    if (a->reader) kafka_reader_destroy(a->reader);
    enif_free(a->memory);
    term_token_free(&a->token);
    enif_mutex_destroy(a->lock);
}

KMQ_NIF(nif_admin_open)
{
    (void)argc;
    kafka_property *props;
    size_t n;
    void *memory = NULL;
    if (!term_properties(env, argv[0], &props, &n, &memory)) return enif_make_badarg(env);
    admin *a = enif_alloc_resource(admin_type, sizeof *a);
    memset(a, 0, sizeof *a);
    a->lock = enif_mutex_create((char *)(uintptr_t) "kmq:admin");
    kafka_error err = {0};
    int rc = kafka_admin_open(props, n, &a->admin, &err);
    if (!rc) atomic_fetch_add(&live_admins, 1);
    a->props = props;
    a->n_props = n;
    a->memory = memory;
    ERL_NIF_TERM result = rc ? term_error(env, &err) : term_ok(env, enif_make_resource(env, a));
    enif_release_resource(a);
    return result;
}

/* Takes the handle's lock; the caller unlocks. NULL: *result says why. */
static admin *enter(ErlNifEnv *env, ERL_NIF_TERM term, ERL_NIF_TERM *result)
{
    admin *a;
    if (!enif_get_resource(env, term, admin_type, (void **)&a)) {
        *result = enif_make_badarg(env);
        return NULL;
    }
    enif_mutex_lock(a->lock);
    if (a->admin) return a;
    enif_mutex_unlock(a->lock);
    *result = term_error_atom(env, atoms.closed);
    return NULL;
}

static ERL_NIF_TERM leave(ErlNifEnv *env, admin *a, int rc, const kafka_error *err, ERL_NIF_TERM ok)
{
    enif_mutex_unlock(a->lock);
    return rc ? term_error(env, err) : ok;
}

KMQ_NIF(nif_admin_close)
{
    (void)argc;
    ERL_NIF_TERM result;
    admin *a = enter(env, argv[0], &result);
    if (!a) return result;
    kafka_admin_destroy(a->admin);
    a->admin = NULL;
    if (a->reader) kafka_reader_destroy(a->reader);
    a->reader = NULL;
    atomic_fetch_sub(&live_admins, 1);
    return leave(env, a, 0, NULL, atoms.ok);
}

/* admin_set_token(Ref, Token, ExpiresMs, Principal, Extensions): right after the opening, nothing connects without */
KMQ_NIF(nif_admin_set_token)
{
    (void)argc;
    term_token_memory memory;
    ERL_NIF_TERM result;
    if (!term_token(env, argv + 1, &memory)) return enif_make_badarg(env);
    admin *a = enter(env, argv[0], &result);
    if (!a) {
        term_token_free(&memory);
        return result;
    }
    kafka_error err = {0};
    int rc = kafka_admin_set_token(a->admin, &memory.token, &err);
    if (!rc && a->reader) rc = kafka_reader_set_token(a->reader, &memory.token, &err);
    term_token_free(&a->token);
    a->token = memory;
    return leave(env, a, rc, &err, atoms.ok);
}

KMQ_NIF(nif_admin_cluster_id)
{
    (void)argc;
    int timeout;
    ERL_NIF_TERM result;
    if (!enif_get_int(env, argv[1], &timeout)) return enif_make_badarg(env);
    admin *a = enter(env, argv[0], &result);
    if (!a) return result;
    char id[256] = "";
    kafka_error err = {0};
    int rc = kafka_admin_cluster_id(a->admin, id, sizeof id, timeout, &err);
    return leave(env, a, rc, &err, term_ok(env, term_text(env, id)));
}

KMQ_NIF(nif_admin_partitions)
{
    (void)argc;
    int timeout, n = 0, replication = 0;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a) {
            int rc = kafka_admin_partitions(a->admin, topic, timeout, &n, &replication, &err);
            ERL_NIF_TERM pair = enif_make_tuple2(env, enif_make_int(env, n), enif_make_int(env, replication));
            result = leave(env, a, rc, &err, term_ok(env, pair));
        }
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

typedef struct collector {
    ErlNifEnv *env;
    ERL_NIF_TERM list;
} collector;

static void collect_topic(void *ctx, const char *topic, int n_partitions)
{
    collector *c = ctx;
    c->list = enif_make_list_cell(
        c->env, enif_make_tuple2(c->env, term_text(c->env, topic), enif_make_int(c->env, n_partitions)), c->list);
}

KMQ_NIF(nif_admin_topics)
{
    (void)argc;
    int timeout;
    ERL_NIF_TERM result;
    if (!enif_get_int(env, argv[1], &timeout)) return enif_make_badarg(env);
    admin *a = enter(env, argv[0], &result);
    if (!a) return result;
    collector c = {env, enif_make_list(env, 0)};
    kafka_error err = {0};
    int rc = kafka_admin_topics(a->admin, timeout, collect_topic, &c, &err);
    return leave(env, a, rc, &err, term_ok(env, c.list));
}

KMQ_NIF(nif_admin_create_topic)
{
    (void)argc;
    int n, replication, timeout;
    char *topic = term_string(env, argv[1]);
    kafka_property *config = NULL;
    size_t n_config = 0;
    void *memory = NULL;
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &n) && enif_get_int(env, argv[3], &replication) &&
        term_properties(env, argv[4], &config, &n_config, &memory) && enif_get_int(env, argv[5], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a) {
            int rc = kafka_admin_create_topic(a->admin, topic, n, replication, config, n_config, timeout, &err);
            result = leave(env, a, rc, &err, atoms.ok);
        }
    }
    enif_free(memory);
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

KMQ_NIF(nif_admin_create_partitions)
{
    (void)argc;
    int n, timeout;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &n) && enif_get_int(env, argv[3], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a) result = leave(env, a, kafka_admin_create_partitions(a->admin, topic, n, timeout, &err), &err, atoms.ok);
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

KMQ_NIF(nif_admin_delete_topic)
{
    (void)argc;
    int timeout;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a) result = leave(env, a, kafka_admin_delete_topic(a->admin, topic, timeout, &err), &err, atoms.ok);
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

static void collect_config(void *ctx, const char *name, const char *value)
{
    collector *c = ctx;
    ERL_NIF_TERM v = value ? term_text(c->env, value) : atoms.nil;
    c->list = enif_make_list_cell(c->env, enif_make_tuple2(c->env, term_text(c->env, name), v), c->list);
}

KMQ_NIF(nif_admin_topic_config)
{
    (void)argc;
    int timeout;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a) {
            collector c = {env, enif_make_list(env, 0)};
            int rc = kafka_admin_topic_config(a->admin, topic, timeout, collect_config, &c, &err);
            result = leave(env, a, rc, &err, term_ok(env, c.list));
        }
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

/* admin_committed(Ref, [{Topic, Partition}], TimeoutMs) -> {ok, [{Topic, Partition, Offset}]} in the order asked */
KMQ_NIF(nif_admin_committed)
{
    (void)argc;
    unsigned length;
    int timeout;
    if (!enif_get_list_length(env, argv[1], &length) || !enif_get_int(env, argv[2], &timeout))
        return enif_make_badarg(env);
    kafka_partition *list = enif_alloc((length + 1) * sizeof *list);
    size_t n = 0;
    ERL_NIF_TERM head, tail = argv[1], result = 0; /* 0 = a bad argument: making that term already raises */
    while (list && enif_get_list_cell(env, tail, &head, &tail)) {
        const ERL_NIF_TERM *pair;
        int arity, partition;
        char *topic = NULL;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !enif_get_int(env, pair[1], &partition) ||
            !(topic = term_string(env, pair[0])))
            goto out;
        list[n++] = (kafka_partition){.topic = topic, .partition = partition, .offset = -1001};
    }
    admin *a = enter(env, argv[0], &result);
    if (!a) goto out;
    kafka_error err = {0};
    int rc = kafka_admin_committed(a->admin, list, n, timeout, &err);
    ERL_NIF_TERM out_list = enif_make_list(env, 0);
    for (size_t i = n; i-- > 0;)
        out_list = enif_make_list_cell(env,
                                       enif_make_tuple3(env, term_text(env, list[i].topic),
                                                        enif_make_int(env, list[i].partition),
                                                        enif_make_int64(env, list[i].offset)),
                                       out_list);
    result = leave(env, a, rc, &err, term_ok(env, out_list));
out:
    for (size_t i = 0; i < n; i++) enif_free((void *)(uintptr_t)list[i].topic);
    enif_free(list);
    return result ? result : enif_make_badarg(env);
}

KMQ_NIF(nif_admin_watermarks)
{
    (void)argc;
    int partition, timeout;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &partition) && enif_get_int(env, argv[3], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        int64_t low = 0, high = 0;
        if (a) {
            int rc = kafka_admin_watermarks(a->admin, topic, partition, timeout, &low, &high, &err);
            ERL_NIF_TERM pair = enif_make_tuple2(env, enif_make_int64(env, low), enif_make_int64(env, high));
            result = leave(env, a, rc, &err, term_ok(env, pair));
        }
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

KMQ_NIF(nif_admin_offset_for_time)
{
    (void)argc;
    int partition, timeout;
    ErlNifSInt64 time_ms;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &partition) && enif_get_int64(env, argv[3], &time_ms) &&
        enif_get_int(env, argv[4], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        int64_t offset = 0;
        if (a) {
            int rc = kafka_admin_offset_for_time(a->admin, topic, partition, time_ms, timeout, &offset, &err);
            result = leave(env, a, rc, &err, term_ok(env, enif_make_int64(env, offset)));
        }
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

KMQ_NIF(nif_admin_delete_records)
{
    (void)argc;
    int partition, timeout;
    ErlNifSInt64 before;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &partition) && enif_get_int64(env, argv[3], &before) &&
        enif_get_int(env, argv[4], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a)
            result = leave(env, a, kafka_admin_delete_records(a->admin, topic, partition, before, timeout, &err), &err,
                           atoms.ok);
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

/* admin_commit(Ref, Topic, Partition, Offset, TimeoutMs): of the group in the properties */
KMQ_NIF(nif_admin_commit)
{
    (void)argc;
    int partition, timeout;
    ErlNifSInt64 offset;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &partition) && enif_get_int64(env, argv[3], &offset) &&
        enif_get_int(env, argv[4], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        kafka_error err = {0};
        if (a)
            result =
                leave(env, a, kafka_admin_commit(a->admin, topic, partition, offset, timeout, &err), &err, atoms.ok);
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}

enum { READ_MOST = 20000 };

typedef struct reading {
    store store;
    bool no_memory;
} reading;

static void keep_record(void *ctx, int64_t offset, const kafka_record *record)
{
    static const store_kmq fresh = {.attempt = 1, .deliveries = 1, .id_header = -1, .expires_ms = INT64_MAX};
    reading *r = ctx;
    kmq_header small[32], *headers = small;
    (void)offset;
    if (!record || r->no_memory) return;
    size_t n = kafka_record_headers(record, small, 32);
    if (n > 32) {
        headers = enif_alloc(n * sizeof *headers);
        if (headers) n = kafka_record_headers(record, headers, n);
    }
    if (!headers || !store_push(&r->store, record, headers, n, &fresh)) r->no_memory = true;
    if (headers != small) enif_free(headers);
}

static int reader_open(admin *a, kafka_error *err)
{
    if (a->reader) return KAFKA_OK;
    int rc = kafka_reader_open(a->props, a->n_props, &a->reader, err);
    if (!rc && a->token.text) rc = kafka_reader_set_token(a->reader, &a->token.token, err);
    return rc;
}

static ERL_NIF_TERM read_records(ErlNifEnv *env, admin *a, const char *topic, int partition, int64_t from, size_t n,
                                 int timeout)
{
    int64_t *offsets = enif_alloc(n * sizeof *offsets);
    kafka_error err = {0};
    reading r = {.no_memory = offsets == NULL};
    store_init(&r.store, NULL, STORE_LARGE);
    if (!offsets) n = 0;
    for (size_t i = 0; i < n; i++) offsets[i] = from + (int64_t)i;
    int rc = reader_open(a, &err);
    if (!rc) rc = kafka_reader_read(a->reader, topic, partition, offsets, n, timeout, keep_record, &r, &err);
    enif_free(offsets);
    ERL_NIF_TERM list = enif_make_list(env, 0);
    size_t bytes = 0;
    store_names names = {0};
    while (!rc && r.store.count) list = enif_make_list_cell(env, store_take(&r.store, env, &names, &bytes), list);
    enif_make_reverse_list(env, list, &list);
    store_free(&r.store);
    if (r.no_memory) {
        enif_mutex_unlock(a->lock);
        return term_error_atom(env, enif_make_atom(env, "enomem"));
    }
    return leave(env, a, rc, &err, term_ok(env, list));
}

/* admin_read(Ref, Topic, Partition, From, N, TimeoutMs) -> {ok, [Message]}: what there is of the offsets From .. From + N - 1, as
 * consumer_take gives messages; N at most 20,000. */
KMQ_NIF(nif_admin_read)
{
    (void)argc;
    int partition, timeout, n;
    ErlNifSInt64 from;
    char *topic = term_string(env, argv[1]);
    ERL_NIF_TERM result = 0; /* 0 = a bad argument: making that term already raises */
    if (topic && enif_get_int(env, argv[2], &partition) && enif_get_int64(env, argv[3], &from) && from >= 0 &&
        enif_get_int(env, argv[4], &n) && n > 0 && n <= READ_MOST && enif_get_int(env, argv[5], &timeout)) {
        admin *a = enter(env, argv[0], &result);
        if (a) result = read_records(env, a, topic, partition, from, (size_t)n, timeout);
    }
    enif_free(topic);
    return result ? result : enif_make_badarg(env);
}
