/* publisher - a producer for messages: each call's results come back as one message to its caller.
 *
 *   caller --send([..], Token)--> batch of items --> librdkafka --reports--> owner's poll --{published, Token, Results}--> caller
 *
 * The local queue is bounded (librdkafka's queue.buffering.max.*): send tells how many it took. Lock: publisher.lock over everything;
 * wake_lock is a leaf, also taken in librdkafka's callback. */
#include "resource.h"

#include <string.h>
#include "kafka.h"
#include "term.h"

enum {
    MAX_TOPICS = 1024,
    REPORTS = 256,
    ROUNDS = 8,
    CLOSED_CODE = -197 /* _DESTROY */,
    PURGED_CODE = -151 /* _PURGE_INFLIGHT */,
    MAX_HEADERS = 4096
};

typedef struct batch batch;
typedef struct item {
    batch *batch;
    int64_t offset;
    int32_t partition;
    int error;
} item;

struct batch {
    batch *prev, *next;
    ErlNifPid caller;
    ErlNifEnv *env; /* holds the token */
    ERL_NIF_TERM token;
    size_t n, left;
    item items[];
};

typedef struct topic_entry {
    char *name;
    kafka_topic *topic;
} topic_entry;

typedef struct publisher {
    ErlNifMutex *lock, *wake_lock;
    kafka_producer *producer; /* NULL = closed */
    kafka_property *props;    /* to open another one, when this one turned fatal */
    size_t n_props;
    void *memory;
    bool idempotent;
    topic_entry *topics;
    size_t n_topics;
    batch *first;
    ErlNifPid *waiters; /* for space */
    size_t n_waiters;
    ErlNifPid owner;
    bool owner_alive, ready_sent;
} publisher;

static void send_simple(publisher *p, const ErlNifPid *to, ErlNifEnv *caller_env, ERL_NIF_TERM what)
{
    ErlNifEnv *env = enif_alloc_env();
    enif_send(caller_env, to, env, enif_make_tuple3(env, atoms.kmq, enif_make_resource(env, p), what));
    enif_free_env(env);
}

static void woken(void *ctx)
{
    publisher *p = ctx;
    enif_mutex_lock(p->wake_lock);
    if (p->owner_alive && !p->ready_sent) {
        p->ready_sent = true;
        send_simple(p, &p->owner, NULL, atoms.ready);
    }
    enif_mutex_unlock(p->wake_lock);
}

/* ------------------------------------------------------------------ batches */
static ERL_NIF_TERM item_term(ErlNifEnv *env, const item *i)
{
    if (!i->error) return enif_make_tuple2(env, enif_make_int(env, i->partition), enif_make_int64(env, i->offset));
    kafka_error err;
    kafka_error_set(&err, i->error, "not published");
    return term_error(env, &err);
}

static void complete(publisher *p, batch *b, ErlNifEnv *caller_env)
{
    if (b->prev)
        b->prev->next = b->next;
    else
        p->first = b->next;
    if (b->next) b->next->prev = b->prev;
    ErlNifEnv *env = b->env;
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (size_t i = b->n; i-- > 0;) list = enif_make_list_cell(env, item_term(env, &b->items[i]), list);
    ERL_NIF_TERM what = enif_make_tuple3(env, atoms.published, b->token, list);
    enif_send(caller_env, &b->caller, env, enif_make_tuple3(env, atoms.kmq, enif_make_resource(env, p), what));
    enif_free_env(env);
    enif_free(b);
}

static void forget_topics(publisher *p)
{
    for (size_t i = 0; i < p->n_topics; i++) enif_free(p->topics[i].name);
    p->n_topics = 0;
}

/* The producer is gone, and with it what it had not reported. */
static void fail_all(publisher *p, ErlNifEnv *caller_env, int code)
{
    while (p->first) {
        batch *b = p->first;
        for (size_t i = 0; i < b->n; i++)
            if (b->items[i].error == 0 && b->items[i].offset < 0) b->items[i].error = code;
        complete(p, b, caller_env);
    }
}

static void close_locked(publisher *p, ErlNifEnv *caller_env)
{
    if (!p->producer) return;
    kafka_producer_destroy(p->producer, NULL, NULL);
    p->producer = NULL;
    atomic_fetch_sub(&live_publishers, 1);
    fail_all(p, caller_env, CLOSED_CODE);
    for (size_t i = 0; i < p->n_waiters; i++) send_simple(p, &p->waiters[i], caller_env, atoms.space);
    p->n_waiters = 0;
}

void publisher_dtor(ErlNifEnv *env, void *object)
{
    (void)env;
    publisher *p = object;
    /* batches in flight have no reader left that could know this handle */
    if (p->producer) {
        kafka_producer_destroy(p->producer, NULL, NULL);
        atomic_fetch_sub(&live_publishers, 1);
    }
    while (p->first) {
        batch *b = p->first;
        p->first = b->next;
        enif_free_env(b->env);
        enif_free(b);
    }
    forget_topics(p);
    enif_free(p->topics);
    enif_free(p->memory);
    enif_free(p->waiters);
    enif_mutex_destroy(p->lock);
    enif_mutex_destroy(p->wake_lock);
}

void publisher_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor)
{
    (void)pid;
    (void)monitor;
    publisher *p = object;
    enif_mutex_lock(p->wake_lock);
    p->owner_alive = false;
    enif_mutex_unlock(p->wake_lock);
    enif_mutex_lock(p->lock);
    close_locked(p, env);
    enif_mutex_unlock(p->lock);
}

/* ------------------------------------------------------------------ open, close */
KMQ_NIF(nif_publisher_open)
{
    (void)argc;
    kafka_property *props;
    size_t n;
    void *memory = NULL;
    if (!term_properties(env, argv[0], &props, &n, &memory)) return enif_make_badarg(env);
    ERL_NIF_TERM value;
    bool idempotent =
        !enif_get_map_value(env, argv[1], atoms.idempotent, &value) || enif_compare(value, atoms.true_) == 0;
    publisher *p = enif_alloc_resource(publisher_type, sizeof *p);
    memset(p, 0, sizeof *p);
    p->lock = enif_mutex_create((char *)(uintptr_t) "kmq:publisher");
    p->wake_lock = enif_mutex_create((char *)(uintptr_t) "kmq:publisher_wake");
    enif_self(env, &p->owner);
    p->owner_alive = true;
    p->props = props;
    p->n_props = n;
    p->memory = memory;
    p->idempotent = idempotent;
    kafka_error err = {0};
    kafka_wake wake = {.fn = woken, .ctx = p, .fd = -1};
    ErlNifMonitor monitor;
    int rc = kafka_producer_open(props, n, idempotent, &wake, &p->producer, &err);
    if (!rc) atomic_fetch_add(&live_publishers, 1);
    if (!rc) rc = enif_monitor_process(env, p, &p->owner, &monitor);
    ERL_NIF_TERM result = rc ? term_error(env, &err) : term_ok(env, enif_make_resource(env, p));
    enif_release_resource(p);
    return result;
}

#define PUBLISHER_OR_RETURN(p)                                                                                         \
    publisher *p;                                                                                                      \
    if (!enif_get_resource(env, argv[0], publisher_type, (void **)&p)) return enif_make_badarg(env);                   \
    enif_mutex_lock(p->lock);                                                                                          \
    if (!p->producer) {                                                                                                \
        enif_mutex_unlock(p->lock);                                                                                    \
        return term_error_atom(env, atoms.closed);                                                                     \
    }

/* publisher_reopen(Ref): a producer that turned fatal is replaced. What it had not reported is failed, with an outcome nobody knows. */
KMQ_NIF(nif_publisher_reopen)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    kafka_error err = {0};
    kafka_wake wake = {.fn = woken, .ctx = p, .fd = -1};
    kafka_producer *fresh;
    int rc = KAFKA_OK;
    if (kafka_producer_fatal(p->producer, NULL)) {
        rc = kafka_producer_open(p->props, p->n_props, p->idempotent, &wake, &fresh, &err);
        if (!rc) {
            kafka_producer_destroy(p->producer, NULL, NULL);
            p->producer = fresh;
            forget_topics(p);
            fail_all(p, env, PURGED_CODE);
            for (size_t i = 0; i < p->n_waiters; i++) send_simple(p, &p->waiters[i], env, atoms.space);
            p->n_waiters = 0;
        }
    }
    enif_mutex_unlock(p->lock);
    return rc ? term_error(env, &err) : atoms.ok;
}

KMQ_NIF(nif_publisher_test_fatal)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    int rc = kafka_producer_test_fatal(p->producer, "asked for by a test");
    enif_mutex_unlock(p->lock);
    kafka_error err = {0};
    return rc ? term_error(env, &err) : atoms.ok;
}

KMQ_NIF(nif_publisher_close)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    close_locked(p, env);
    enif_mutex_unlock(p->lock);
    return atoms.ok;
}

/* ------------------------------------------------------------------ send */
static kafka_topic *get_topic(publisher *p, const char *name, kafka_error *err)
{
    for (size_t i = 0; i < p->n_topics; i++)
        if (!strcmp(p->topics[i].name, name)) return p->topics[i].topic;
    if (p->n_topics == MAX_TOPICS) {
        kafka_error_set(err, 0, "more than %d topics in one publisher", MAX_TOPICS);
        return NULL;
    }
    kafka_topic *topic = kafka_producer_topic(p->producer, name, err);
    topic_entry *topics = topic ? enif_realloc(p->topics, (p->n_topics + 1) * sizeof *topics) : NULL;
    if (!topics) return NULL;
    char *copy = enif_alloc(strlen(name) + 1);
    strcpy(copy, name);
    p->topics = topics;
    p->topics[p->n_topics++] = (topic_entry){.name = copy, .topic = topic};
    return topic;
}

static bool get_nullable(ErlNifEnv *env, ERL_NIF_TERM term, const void **bytes, size_t *len)
{
    ErlNifBinary bin;
    *bytes = NULL;
    *len = 0;
    if (enif_compare(term, atoms.nil) == 0) return true;
    if (!enif_inspect_binary(env, term, &bin)) return false;
    *bytes = bin.size ? (const void *)bin.data : (const void *)"";
    *len = bin.size;
    return true;
}

/* Header names need a NUL behind them: they are copied into one block, *memory. */
static bool get_headers(ErlNifEnv *env, ERL_NIF_TERM list, kafka_header **out, size_t *n, void **memory)
{
    unsigned length;
    *memory = NULL;
    *n = 0;
    if (enif_is_empty_list(env, list)) return true;
    if (!enif_get_list_length(env, list, &length) || length > MAX_HEADERS) return false;
    size_t bytes = length * sizeof(kafka_header);
    ERL_NIF_TERM head, tail = list;
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        const ERL_NIF_TERM *pair;
        int arity;
        ErlNifBinary name;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !enif_inspect_binary(env, pair[0], &name) ||
            memchr(name.data, 0, name.size))
            return false;
        bytes += name.size + 1;
    }
    kafka_header *headers = enif_alloc(bytes);
    if (!headers) return false;
    char *at = (char *)(headers + length);
    for (tail = list; enif_get_list_cell(env, tail, &head, &tail); ++*n) {
        const ERL_NIF_TERM *pair;
        int arity;
        ErlNifBinary name;
        enif_get_tuple(env, head, &arity, &pair);
        enif_inspect_binary(env, pair[0], &name);
        memcpy(at, name.data, name.size);
        at[name.size] = 0;
        kafka_header *h = &headers[*n];
        h->name = at;
        at += name.size + 1;
        if (!get_nullable(env, pair[1], &h->value, &h->value_len)) {
            enif_free(headers);
            return false;
        }
    }
    *out = headers;
    *memory = headers;
    return true;
}

/* 1 queued, 0 queue full, -1 not a message */
static int send_one(ErlNifEnv *env, publisher *p, kafka_topic *topic, ERL_NIF_TERM term, item *to, bool *refused)
{
    const ERL_NIF_TERM *t;
    int arity, partition;
    const void *key, *value;
    size_t key_len, value_len, n_headers;
    ErlNifSInt64 timestamp;
    kafka_header *headers = NULL;
    void *memory;
    if (!enif_get_tuple(env, term, &arity, &t) || arity != 5 || !enif_get_int(env, t[0], &partition) ||
        !get_nullable(env, t[1], &key, &key_len) || !get_nullable(env, t[2], &value, &value_len) ||
        !enif_get_int64(env, t[4], &timestamp) || !get_headers(env, t[3], &headers, &n_headers, &memory))
        return -1;
    kafka_error err = {0};
    int rc = kafka_producer_send(p->producer, topic, partition, key, key_len, value, value_len, headers, n_headers,
                                 timestamp, to, &err);
    enif_free(memory);
    if (rc == KAFKA_EFULL) return 0;
    *refused = rc != 0;
    if (rc) to->error = err.code ? err.code : -1;
    return 1;
}

/* publisher_send(Ref, Topic, Messages, Token) -> {ok, N} */
KMQ_NIF(nif_publisher_send)
{
    (void)argc;
    unsigned length;
    char *name = term_string(env, argv[1]);
    if (!name || !enif_get_list_length(env, argv[2], &length)) {
        enif_free(name);
        return enif_make_badarg(env);
    }
    publisher *p;
    if (!enif_get_resource(env, argv[0], publisher_type, (void **)&p)) {
        enif_free(name);
        return enif_make_badarg(env);
    }
    ERL_NIF_TERM result;
    kafka_error err = {0};
    enif_mutex_lock(p->lock);
    kafka_topic *topic = p->producer ? get_topic(p, name, &err) : NULL;
    enif_free(name);
    batch *b = topic ? enif_alloc(sizeof *b + length * sizeof(item)) : NULL;
    if (!b) {
        result = p->producer ? term_error(env, &err) : term_error_atom(env, atoms.closed);
        enif_mutex_unlock(p->lock);
        return result;
    }
    *b = (batch){.env = enif_alloc_env(), .next = p->first};
    b->token = enif_make_copy(b->env, argv[3]);
    enif_self(env, &b->caller);
    if (p->first) p->first->prev = b;
    p->first = b;
    ERL_NIF_TERM head, tail = argv[2];
    int rc = 1;
    while (rc == 1 && enif_get_list_cell(env, tail, &head, &tail)) {
        item *i = &b->items[b->n];
        *i = (item){.batch = b, .offset = -1};
        bool refused = false;
        rc = send_one(env, p, topic, head, i, &refused);
        if (rc != 1) break;
        b->n++;
        if (!refused) b->left++;
    }
    /* A malformed message ends the list; what stands before it is on its way, and told as such. */
    size_t n = b->n;
    result = rc < 0 && !n ? enif_make_badarg(env) : term_ok(env, enif_make_uint64(env, n));
    if (!n) {
        p->first = b->next;
        if (b->next) b->next->prev = NULL;
        enif_free_env(b->env);
        enif_free(b);
    } else if (!b->left) {
        complete(p, b, env);
    }
    enif_mutex_unlock(p->lock);
    enif_consume_timeslice(env, length >= 2000 ? 100 : length < 20 ? 1 : (int)(length / 20));
    return result;
}

/* One `space` message to the caller after reports were read next. */
KMQ_NIF(nif_publisher_space)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    ErlNifPid self;
    enif_self(env, &self);
    if (!kafka_producer_queued(p->producer)) {
        send_simple(p, &self, env, atoms.space);
    } else {
        ErlNifPid *waiters = enif_realloc(p->waiters, (p->n_waiters + 1) * sizeof *waiters);
        if (waiters) {
            p->waiters = waiters;
            p->waiters[p->n_waiters++] = self;
        }
    }
    enif_mutex_unlock(p->lock);
    return atoms.ok;
}

/* ------------------------------------------------------------------ reports */
static ERL_NIF_TERM events_term(ErlNifEnv *env, publisher *p)
{
    kafka_event event;
    ERL_NIF_TERM list = enif_make_list(env, 0);
    while (kafka_producer_poll(p->producer, &event)) {
        if (event.type == KAFKA_EVENT_ERROR)
            list =
                enif_make_list_cell(env, enif_make_tuple2(env, atoms.error, term_kafka_error(env, &event.error)), list);
        else if (event.type == KAFKA_EVENT_LOG)
            list = enif_make_list_cell(
                env, enif_make_tuple3(env, atoms.log, enif_make_int(env, event.level), term_text(env, event.text)),
                list);
        else if (event.type == KAFKA_EVENT_TOKEN)
            list = enif_make_list_cell(env, enif_make_tuple2(env, atoms.token, term_text(env, event.text)), list);
        kafka_event_free(&event);
    }
    enif_make_reverse_list(env, list, &list);
    return list;
}

KMQ_NIF(nif_publisher_poll)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    enif_mutex_lock(p->wake_lock);
    p->ready_sent = false;
    enif_mutex_unlock(p->wake_lock);
    kafka_report reports[REPORTS];
    size_t n = REPORTS;
    int rounds = 0;
    for (; n == REPORTS && rounds < ROUNDS; rounds++) {
        n = kafka_producer_reports(p->producer, reports, REPORTS);
        for (size_t i = 0; i < n; i++) {
            item *done = reports[i].opaque;
            done->error = reports[i].error;
            done->partition = reports[i].partition;
            done->offset = reports[i].offset;
            if (--done->batch->left == 0) complete(p, done->batch, env);
        }
    }
    for (size_t i = 0; i < p->n_waiters; i++) send_simple(p, &p->waiters[i], env, atoms.space);
    p->n_waiters = 0;
    ERL_NIF_TERM events = events_term(env, p);
    enif_mutex_unlock(p->lock);
    if (n == REPORTS) woken(p); /* the rest after others had their turn */
    enif_consume_timeslice(env, rounds >= ROUNDS ? 100 : 1 + rounds * 6);
    return events;
}

KMQ_NIF(nif_publisher_queued)
{
    (void)argc;
    PUBLISHER_OR_RETURN(p)
    int queued = kafka_producer_queued(p->producer);
    enif_mutex_unlock(p->lock);
    return enif_make_int(env, queued);
}

/* publisher_set_token(Ref, Token, ExpiresMs, Principal, Extensions) */
KMQ_NIF(nif_publisher_set_token)
{
    (void)argc;
    term_token_memory memory;
    publisher *p;
    if (!enif_get_resource(env, argv[0], publisher_type, (void **)&p) || !term_token(env, argv + 1, &memory))
        return enif_make_badarg(env);
    kafka_error err = {0};
    int rc = 0;
    enif_mutex_lock(p->lock);
    bool open = p->producer != NULL;
    if (open) rc = kafka_producer_set_token(p->producer, &memory.token, &err);
    enif_mutex_unlock(p->lock);
    term_token_free(&memory);
    if (!open) return term_error_atom(env, atoms.closed);
    return rc ? term_error(env, &err) : atoms.ok;
}
