/* kmq_nif - load, and the table of functions: what blocks is declared dirty, the rest stays well under a millisecond. */
#include "resource.h"

#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include "backoff.h"
#include "engine.h"
#include "kafka.h"
#include "term.h"

/* Compiled into both sides (src/kmq_nif.erl): a library of another build is refused. */
enum { KMQ_NIF_ABI = 1 };

ErlNifResourceType *consumer_type, *publisher_type, *admin_type;
_Atomic int live_consumers, live_publishers, live_admins;

bool resources_load(ErlNifEnv *env)
{
    ErlNifResourceTypeInit consumer = {.dtor = consumer_dtor, .down = consumer_down},
                           publisher = {.dtor = publisher_dtor, .down = publisher_down}, admin = {.dtor = admin_dtor};
    consumer_type = enif_open_resource_type_x(env, "kmq_consumer", &consumer, ERL_NIF_RT_CREATE, NULL);
    publisher_type = enif_open_resource_type_x(env, "kmq_publisher", &publisher, ERL_NIF_RT_CREATE, NULL);
    admin_type = enif_open_resource_type_x(env, "kmq_admin", &admin, ERL_NIF_RT_CREATE, NULL);
    return consumer_type && publisher_type && admin_type;
}

static KMQ_NIF(nif_version)
{
    (void)argc;
    (void)argv;
    return enif_make_tuple2(env, term_text(env, kafka_version()), enif_make_int(env, kafka_version_number()));
}

static KMQ_NIF(nif_live)
{
    (void)argc;
    (void)argv;
    ERL_NIF_TERM map = enif_make_new_map(env);
    enif_make_map_put(env, map, atoms.consumers, enif_make_int(env, atomic_load(&live_consumers)), &map);
    enif_make_map_put(env, map, atoms.publishers, enif_make_int(env, atomic_load(&live_publishers)), &map);
    enif_make_map_put(env, map, atoms.admins, enif_make_int(env, atomic_load(&live_admins)), &map);
    enif_make_map_put(env, map, atoms.clients, enif_make_int(env, kafka_live()), &map);
    return map;
}

static KMQ_NIF(nif_property)
{
    (void)argc;
    char *name = term_string(env, argv[0]), *value = term_string(env, argv[1]);
    ERL_NIF_TERM result;
    kafka_error err = {0};
    if (!name || !value)
        result = enif_make_badarg(env);
    else
        result = kafka_property_check(&(kafka_property){name, value}, &err) ? term_error(env, &err) : atoms.ok;
    enif_free(name);
    enif_free(value);
    return result;
}

struct errors {
    ErlNifEnv *env;
    ERL_NIF_TERM list;
};

static void add_error(void *ctx, int code)
{
    struct errors *to = ctx;
    ERL_NIF_TERM verdict = atoms.reported;
    switch (kafka_error_verdict(code)) {
    case KAFKA_RETRIED: verdict = atoms.retried; break;
    case KAFKA_ANSWERED: verdict = atoms.answered; break;
    case KAFKA_REPORTED: break;
    case KAFKA_REPLACED: verdict = atoms.replaced; break;
    case KAFKA_STOPS: verdict = atoms.stops; break;
    }
    kafka_error err;
    kafka_error_set(&err, code, "%s", kafka_error_text(code));
    ERL_NIF_TERM pair = enif_make_tuple2(to->env, term_kafka_error(to->env, &err), verdict);
    to->list = enif_make_list_cell(to->env, pair, to->list);
}

/* [{Error, retried | answered | reported | replaced | stops}], of all that the library knows */
static KMQ_NIF(nif_errors)
{
    (void)argc;
    (void)argv;
    struct errors to = {env, enif_make_list(env, 0)};
    kafka_error_each(add_error, &to);
    return to.list;
}

enum { BACKOFF_LIST = 64 };

/* backoff({exponential, Min, Max, Factor, Jitter} | {linear, Min, Max, Step, Jitter} | {list, [Ms], Jitter}, Attempt, U) */
static KMQ_NIF(nif_backoff)
{
    (void)argc;
    const ERL_NIF_TERM *t;
    int arity;
    ErlNifSInt64 attempt, ms[2];
    double u;
    int64_t list[BACKOFF_LIST];
    kmq_backoff backoff = {.kind = KMQ_BACKOFF_EXPONENTIAL};
    if (!enif_get_tuple(env, argv[0], &arity, &t) || !enif_get_int64(env, argv[1], &attempt) ||
        !enif_get_double(env, argv[2], &u))
        return enif_make_badarg(env);
    if (arity == 5 && (enif_compare(t[0], atoms.exponential) == 0 || enif_compare(t[0], atoms.linear) == 0)) {
        if (enif_compare(t[0], atoms.linear) == 0) backoff.kind = KMQ_BACKOFF_LINEAR;
        if (!enif_get_int64(env, t[1], &ms[0]) || !enif_get_int64(env, t[2], &ms[1]) ||
            !enif_get_double(env, t[3], &backoff.factor) || !enif_get_double(env, t[4], &backoff.jitter))
            return enif_make_badarg(env);
        backoff.min_ms = ms[0];
        backoff.max_ms = ms[1];
    } else if (arity == 3 && enif_compare(t[0], atoms.list) == 0) {
        ERL_NIF_TERM head, tail = t[1];
        ErlNifSInt64 one;
        backoff.kind = KMQ_BACKOFF_LIST;
        backoff.list_ms = list;
        while (backoff.n_list < BACKOFF_LIST && enif_get_list_cell(env, tail, &head, &tail)) {
            if (!enif_get_int64(env, head, &one)) return enif_make_badarg(env);
            list[backoff.n_list++] = one;
        }
        if (!backoff.n_list || !enif_get_double(env, t[2], &backoff.jitter)) return enif_make_badarg(env);
    } else {
        return enif_make_badarg(env);
    }
    return enif_make_int64(env, kmq_backoff_delay_ms(&backoff, attempt, u));
}

/* ------------------------------------------------------------------ how long a normal scheduler is held (test builds) */
#define ON_NORMAL_SCHEDULERS(X)                                                                                        \
    X(consumer_poll)                                                                                                   \
    X(consumer_take)                                                                                                   \
    X(consumer_settle) X(consumer_retry) X(consumer_extend) X(consumer_info) X(publisher_send) X(publisher_poll)

#ifdef KMQ_FAILPOINTS
#include <time.h>

enum {
#define X(name) BUSY_##name,
    ON_NORMAL_SCHEDULERS(X)
#undef X
        BUSY_COUNT
};
static _Atomic int64_t longest_us[BUSY_COUNT], longer_than_ms[BUSY_COUNT], calls[BUSY_COUNT];

/* Time of the processor, not of the clock: what a busy machine takes away does not count. */
static int64_t cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void note_busy(int which, int64_t us)
{
    int64_t longest = atomic_load(&longest_us[which]);
    atomic_fetch_add(&calls[which], 1);
    if (us >= 1000) atomic_fetch_add(&longer_than_ms[which], 1);
    while (us > longest && !atomic_compare_exchange_weak(&longest_us[which], &longest, us)) {}
}

#define X(name)                                                                                                        \
    KMQ_NIF(timed_##name)                                                                                              \
    {                                                                                                                  \
        int64_t began = cpu_us();                                                                                      \
        ERL_NIF_TERM result = nif_##name(env, argc, argv);                                                             \
        note_busy(BUSY_##name, cpu_us() - began);                                                                      \
        return result;                                                                                                 \
    }
ON_NORMAL_SCHEDULERS(X)
#undef X
/* [{Function, Calls, LongestUs, LongerThanAMillisecond}], of processor time, since the last call of this. */
static KMQ_NIF(nif_busy)
{
    static const char *const names[] = {
#define X(name) #name,
        ON_NORMAL_SCHEDULERS(X)
#undef X
    };
    (void)argc;
    (void)argv;
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (int i = BUSY_COUNT; i-- > 0;) {
        ERL_NIF_TERM one =
            enif_make_tuple4(env, enif_make_atom(env, names[i]), enif_make_int64(env, atomic_exchange(&calls[i], 0)),
                             enif_make_int64(env, atomic_exchange(&longest_us[i], 0)),
                             enif_make_int64(env, atomic_exchange(&longer_than_ms[i], 0)));
        list = enif_make_list_cell(env, one, list);
    }
    return list;
}
#else
static KMQ_NIF(nif_busy)
{
    (void)argc;
    (void)argv;
    return enif_make_list(env, 0);
}
#endif

static ErlNifFunc functions[] = {
    {"busy", 0, nif_busy, 0},
    {"version", 0, nif_version, 0},
    {"live", 0, nif_live, 0},
    {"errors", 0, nif_errors, 0},
    {"backoff", 3, nif_backoff, 0},
    {"property", 2, nif_property, 0},
    {"consumer_open", 3, nif_consumer_open, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_subscribe", 1, nif_consumer_subscribe, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_topics", 2, nif_consumer_topics, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_attach", 2, nif_consumer_attach, 0},
    {"consumer_poll", 1, NORMAL(consumer_poll), 0},
    {"consumer_take", 2, NORMAL(consumer_take), 0},
    {"consumer_take", 3, NORMAL(consumer_take), 0},
    {"consumer_lanes", 2, nif_consumer_lanes, 0},
    {"consumer_settle", 3, NORMAL(consumer_settle), 0},
    {"consumer_retry", 5, NORMAL(consumer_retry), 0},
    {"consumer_extend", 3, NORMAL(consumer_extend), 0},
    {"consumer_again", 1, nif_consumer_again, 0},
    {"consumer_reject", 2, nif_consumer_reject, 0},
    {"consumer_assign", 3, nif_consumer_assign, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_reset", 3, nif_consumer_reset, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_rebuild", 1, nif_consumer_rebuild, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_flush", 1, nif_consumer_flush, 0},
    {"consumer_uncovered", 1, nif_consumer_uncovered, 0},
    {"consumer_drain", 1, nif_consumer_drain, 0},
    {"consumer_close", 2, nif_consumer_close, 0},
    {"consumer_close", 3, nif_consumer_close, 0},
    {"consumer_kill", 1, nif_consumer_kill, 0},
    {"consumer_info", 1, NORMAL(consumer_info), 0},
    {"consumer_pause", 4, nif_consumer_pause, 0},
    {"consumer_seek", 4, nif_consumer_seek, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_set_token", 5, nif_consumer_set_token, 0},
    {"consumer_reopen", 1, nif_consumer_reopen, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"consumer_give_up", 1, nif_consumer_give_up, 0},
    {"consumer_test_fatal", 2, nif_consumer_test_fatal, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"publisher_open", 2, nif_publisher_open, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"publisher_send", 4, NORMAL(publisher_send), 0},
    {"publisher_space", 1, nif_publisher_space, 0},
    {"publisher_poll", 1, NORMAL(publisher_poll), 0},
    {"publisher_queued", 1, nif_publisher_queued, 0},
    {"publisher_close", 1, nif_publisher_close, 0},
    {"publisher_reopen", 1, nif_publisher_reopen, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"publisher_test_fatal", 1, nif_publisher_test_fatal, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"publisher_set_token", 5, nif_publisher_set_token, 0},
    {"admin_open", 1, nif_admin_open, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_close", 1, nif_admin_close, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_cluster_id", 2, nif_admin_cluster_id, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_partitions", 3, nif_admin_partitions, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_topics", 2, nif_admin_topics, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_create_topic", 6, nif_admin_create_topic, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_create_partitions", 4, nif_admin_create_partitions, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_delete_topic", 3, nif_admin_delete_topic, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_topic_config", 3, nif_admin_topic_config, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_committed", 3, nif_admin_committed, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_watermarks", 4, nif_admin_watermarks, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_offset_for_time", 5, nif_admin_offset_for_time, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_delete_records", 5, nif_admin_delete_records, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_commit", 5, nif_admin_commit, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_set_token", 5, nif_admin_set_token, ERL_NIF_DIRTY_JOB_IO_BOUND},
    {"admin_read", 6, nif_admin_read, ERL_NIF_DIRTY_JOB_IO_BOUND},
};

/* librdkafka allocates a buffer of about a megabyte for each answer of a broker. glibc would soon stop asking the kernel for fresh pages each time (it
 * learns from the sizes that are freed), but for the VM, which sets another of its limits at its start and so ends the learning. Then each page of
 * each answer is a fault. What the user has set himself holds. */
static void memory_load(void)
{
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
    enum { KEPT = 32 << 20 }; /* as far as glibc itself would go */
    const char *tunables = getenv("GLIBC_TUNABLES");
    if (getenv("MALLOC_MMAP_THRESHOLD_") || (tunables && strstr(tunables, "glibc.malloc.mmap_threshold"))) return;
    (void)mallopt(M_MMAP_THRESHOLD, KEPT);
#endif
}

static int load(ErlNifEnv *env, void **priv, ERL_NIF_TERM info)
{
    int abi;
    *priv = NULL;
    if (!enif_get_int(env, info, &abi) || abi != KMQ_NIF_ABI) return 1;
    memory_load();
    atoms_load(env);
    engine_clock_load();
    return isolate_load() && resources_load(env) ? 0 : 2;
}

/* librdkafka's threads may not lose their code: a second version of the module in one VM is refused. */
static int upgrade(ErlNifEnv *env, void **priv, void **old_priv, ERL_NIF_TERM info)
{
    (void)env;
    (void)priv;
    (void)old_priv;
    (void)info;
    return 3;
}

ERL_NIF_INIT(kmq_nif, functions, load, NULL, upgrade, NULL)
