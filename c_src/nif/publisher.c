/* publisher - a producer for messages: each call's results come back as one message to its caller.
 *
 *   caller --send([..], Token)--> batch of items --> librdkafka --reports--> owner's poll --{published, Token, Results}--> caller
 *
 * The local queue is bounded (librdkafka's queue.buffering.max.*), and so is the time that one call has: send tells how many it took.
 *
 * Callers send while others do and while reports are read: nobody waits for another one's thousand messages. Locks, in this order:
 *   life       read by whoever uses the producer, written by who replaces it or takes it away; nobody holds it longer than a slice
 *   poll_lock  the reports: one reader
 *   lock       topics, batches, waiters
 *   wake_lock  a leaf, also taken in librdkafka's callback */
#include "resource.h"

#include <stdatomic.h>
#include <string.h>
#include "kafka.h"
#include "term.h"

enum {
    MAX_TOPICS = 1024,
    REPORTS = 256,
    SEND_STEP = 1000,   /* messages of one batch ... */
    SEND_BYTES = 65536, /* ... and how many bytes, or */
    SEND_LOOK = 32,     /* messages, between two looks at the clock */
    SLICE_US = 300,     /* about so long a call may hold a normal scheduler */
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
    size_t n;            /* the sender's, until it is done */
    _Atomic size_t left; /* without a report, and one for the sender: who brings it to 0 completes the batch */
    item items[];
};

typedef struct topic_entry {
    char *name;
    kafka_topic *topic;
} topic_entry;

typedef struct publisher {
    ErlNifRWLock *life;
    ErlNifMutex *poll_lock, *lock, *wake_lock;
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
    kafka_outage outage;
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
    kafka_error_set(&err, i->error, "not published: %s", kafka_error_text(i->error));
    return term_error(env, &err);
}

static void link_batch(publisher *p, batch *b)
{
    enif_mutex_lock(p->lock);
    b->next = p->first;
    if (p->first) p->first->prev = b;
    p->first = b;
    enif_mutex_unlock(p->lock);
}

static void unlink_batch(publisher *p, batch *b)
{
    enif_mutex_lock(p->lock);
    if (b->prev)
        b->prev->next = b->next;
    else
        p->first = b->next;
    if (b->next) b->next->prev = b->prev;
    enif_mutex_unlock(p->lock);
}

static void free_batch(batch *b)
{
    enif_free_env(b->env);
    enif_free(b);
}

static void complete(publisher *p, batch *b, ErlNifEnv *caller_env)
{
    unlink_batch(p, b);
    ErlNifEnv *env = b->env;
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (size_t i = b->n; i-- > 0;) list = enif_make_list_cell(env, item_term(env, &b->items[i]), list);
    ERL_NIF_TERM what = enif_make_tuple3(env, atoms.published, b->token, list);
    enif_send(caller_env, &b->caller, env, enif_make_tuple3(env, atoms.kmq, enif_make_resource(env, p), what));
    free_batch(b);
}

/* n of its items are known now, or its sender is done. */
static void settle(publisher *p, batch *b, size_t n, ErlNifEnv *caller_env)
{
    if (n && atomic_fetch_sub(&b->left, n) == n) complete(p, b, caller_env);
}

static void forget_topics(publisher *p)
{
    for (size_t i = 0; i < p->n_topics; i++) enif_free(p->topics[i].name);
    p->n_topics = 0;
}

static void tell_space(publisher *p, ErlNifEnv *caller_env)
{
    enif_mutex_lock(p->lock);
    for (size_t i = 0; i < p->n_waiters; i++) send_simple(p, &p->waiters[i], caller_env, atoms.space);
    p->n_waiters = 0;
    enif_mutex_unlock(p->lock);
}

/* The producer is gone, and with it what it had not reported. life is written: nobody sends or reads reports. */
static void fail_all(publisher *p, ErlNifEnv *caller_env, int code)
{
    while (p->first) {
        batch *b = p->first;
        for (size_t i = 0; i < b->n; i++)
            if (b->items[i].error == 0 && b->items[i].offset < 0) b->items[i].error = code;
        complete(p, b, caller_env);
    }
}

/* life is written. */
static void close_now(publisher *p, ErlNifEnv *caller_env)
{
    if (!p->producer) return;
    kafka_producer_destroy(p->producer, NULL, NULL);
    p->producer = NULL;
    atomic_fetch_sub(&live_publishers, 1);
    fail_all(p, caller_env, CLOSED_CODE);
    tell_space(p, caller_env);
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
        free_batch(b);
    }
    forget_topics(p);
    enif_free(p->topics);
    enif_free(p->memory);
    enif_free(p->waiters);
    enif_rwlock_destroy(p->life);
    enif_mutex_destroy(p->poll_lock);
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
    enif_rwlock_rwlock(p->life);
    close_now(p, env);
    enif_rwlock_rwunlock(p->life);
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
    p->life = enif_rwlock_create((char *)(uintptr_t) "kmq:publisher_life");
    p->poll_lock = enif_mutex_create((char *)(uintptr_t) "kmq:publisher_poll");
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

#define PUBLISHER_OR_RETURN(p, lock, unlock)                                                                           \
    publisher *p;                                                                                                      \
    if (!enif_get_resource(env, argv[0], publisher_type, (void **)&p)) return enif_make_badarg(env);                   \
    enif_rwlock_##lock(p->life);                                                                                       \
    if (!p->producer) {                                                                                                \
        enif_rwlock_##unlock(p->life);                                                                                 \
        return term_error_atom(env, atoms.closed);                                                                     \
    }
#define USE_OR_RETURN(p) PUBLISHER_OR_RETURN(p, rlock, runlock)
#define CHANGE_OR_RETURN(p) PUBLISHER_OR_RETURN(p, rwlock, rwunlock)

/* publisher_reopen(Ref): a producer that turned fatal is replaced. What it had not reported is failed, with an outcome nobody knows. */
KMQ_NIF(nif_publisher_reopen)
{
    (void)argc;
    CHANGE_OR_RETURN(p)
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
            tell_space(p, env);
        }
    }
    enif_rwlock_rwunlock(p->life);
    return rc ? term_error(env, &err) : atoms.ok;
}

KMQ_NIF(nif_publisher_test_fatal)
{
    (void)argc;
    USE_OR_RETURN(p)
    int rc = kafka_producer_test_fatal(p->producer, "asked for by a test");
    enif_rwlock_runlock(p->life);
    kafka_error err = {0};
    return rc ? term_error(env, &err) : atoms.ok;
}

KMQ_NIF(nif_publisher_close)
{
    (void)argc;
    CHANGE_OR_RETURN(p)
    close_now(p, env);
    enif_rwlock_rwunlock(p->life);
    return atoms.ok;
}

/* ------------------------------------------------------------------ send */
static kafka_topic *find_topic(publisher *p, const char *name, kafka_error *err)
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

static kafka_topic *get_topic(publisher *p, const char *name, kafka_error *err)
{
    enif_mutex_lock(p->lock);
    kafka_topic *topic = find_topic(p, name, err);
    enif_mutex_unlock(p->lock);
    return topic;
}

static bool get_nullable(ErlNifEnv *env, ERL_NIF_TERM term, const void **bytes, size_t *len)
{
    ErlNifBinary bin;
    *bytes = NULL;
    *len = 0;
    if (term == atoms.nil) return true;
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

typedef enum sent { SENT_QUEUED, SENT_REFUSED, SENT_FULL, SENT_NO_MESSAGE } sent;

static sent send_one(ErlNifEnv *env, publisher *p, kafka_topic *topic, ERL_NIF_TERM term, item *to, size_t *bytes)
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
        return SENT_NO_MESSAGE;
    kafka_error err = {0};
    int rc = kafka_producer_send(p->producer, topic, partition, key, key_len, value, value_len, headers, n_headers,
                                 timestamp, to, &err);
    if (memory) enif_free(memory);
    *bytes += key_len + value_len;
    if (rc == KAFKA_EFULL) return SENT_FULL;
    if (rc) to->error = err.code ? err.code : -1;
    return rc ? SENT_REFUSED : SENT_QUEUED;
}

/* As many of the list as there is room and time for. */
static sent send_some(ErlNifEnv *env, publisher *p, kafka_topic *topic, ERL_NIF_TERM list, size_t most, batch *b)
{
    ErlNifTime start = enif_monotonic_time(ERL_NIF_USEC);
    ERL_NIF_TERM head;
    size_t bytes = 0, refused = 0;
    sent result = SENT_QUEUED;
    while (b->n < most && enif_get_list_cell(env, list, &head, &list)) {
        item *i = &b->items[b->n];
        *i = (item){.batch = b, .offset = -1};
        result = send_one(env, p, topic, head, i, &bytes);
        if (result == SENT_FULL || result == SENT_NO_MESSAGE) break;
        refused += result == SENT_REFUSED;
        if (++b->n % SEND_LOOK && bytes < SEND_BYTES) continue;
        if (enif_monotonic_time(ERL_NIF_USEC) - start > SLICE_US) break;
        bytes = 0;
    }
    /* what was not sent, or not taken, has no report to come */
    if (most - b->n + refused) atomic_fetch_sub(&b->left, most - b->n + refused);
    return result;
}

static batch *new_batch(ErlNifEnv *env, ERL_NIF_TERM token, size_t most)
{
    batch *b = enif_alloc(sizeof *b + most * sizeof(item));
    if (!b) return NULL;
    *b = (batch){.env = enif_alloc_env()};
    atomic_init(&b->left, most + 1);
    b->token = enif_make_copy(b->env, token);
    enif_self(env, &b->caller);
    return b;
}

/* The list may be as long as its owner likes: it is not walked to its end. */
static size_t step_of(ErlNifEnv *env, ERL_NIF_TERM list)
{
    ERL_NIF_TERM head;
    size_t n = 0;
    while (n < SEND_STEP && enif_get_list_cell(env, list, &head, &list)) n++;
    return n;
}

static ERL_NIF_TERM send_batch(ErlNifEnv *env, publisher *p, kafka_topic *topic, ERL_NIF_TERM list, ERL_NIF_TERM token)
{
    size_t most = step_of(env, list);
    batch *b = new_batch(env, token, most);
    if (!b) return term_error_atom(env, enif_make_atom(env, "enomem"));
    link_batch(p, b);
    sent last = send_some(env, p, topic, list, most, b);
    /* A malformed message ends the list; what stands before it is on its way, and told as such. */
    size_t n = b->n;
    if (n) {
        settle(p, b, 1, env);
    } else {
        unlink_batch(p, b);
        free_batch(b);
    }
    enif_consume_timeslice(env, n >= 1000 ? 100 : n < 10 ? 1 : (int)(n / 10));
    return last == SENT_NO_MESSAGE && !n ? enif_make_badarg(env) : term_ok(env, enif_make_uint64(env, n));
}

/* publisher_send(Ref, Topic, Messages, Token) -> {ok, N}: the first N are taken. Fewer than all: the rest with the next call; 0: the local queue is
 * full. */
KMQ_NIF(nif_publisher_send)
{
    (void)argc;
    publisher *p;
    if (!enif_get_resource(env, argv[0], publisher_type, (void **)&p) || !enif_is_list(env, argv[2]))
        return enif_make_badarg(env);
    char *name = term_string(env, argv[1]);
    if (!name) return enif_make_badarg(env);
    ERL_NIF_TERM result;
    kafka_error err = {0};
    enif_rwlock_rlock(p->life);
    kafka_topic *topic = p->producer ? get_topic(p, name, &err) : NULL;
    if (topic)
        result = send_batch(env, p, topic, argv[2], argv[3]);
    else
        result = p->producer ? term_error(env, &err) : term_error_atom(env, atoms.closed);
    enif_rwlock_runlock(p->life);
    enif_free(name);
    return result;
}

/* One `space` message to the caller after reports were read next. */
KMQ_NIF(nif_publisher_space)
{
    (void)argc;
    USE_OR_RETURN(p)
    ErlNifPid self;
    enif_self(env, &self);
    enif_mutex_lock(p->lock); /* reports that are read from now on find the waiter */
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
    enif_rwlock_runlock(p->life);
    return atoms.ok;
}

/* ------------------------------------------------------------------ reports */
static ERL_NIF_TERM error_term(ErlNifEnv *env, publisher *p, const kafka_error *error)
{
    ERL_NIF_TERM term = term_kafka_error(env, error);
    switch (kafka_outage_error(&p->outage, error, enif_monotonic_time(ERL_NIF_MSEC))) {
    case KAFKA_OUTAGE_BEGINS: return enif_make_tuple2(env, atoms.outage, term);
    case KAFKA_OUTAGE_GOES_ON: return enif_make_tuple3(env, atoms.passing, atoms.connection, term);
    case KAFKA_OUTAGE_NONE: break;
    }
    return enif_make_tuple2(env, atoms.error, term);
}

static ERL_NIF_TERM events_term(ErlNifEnv *env, publisher *p)
{
    kafka_event event;
    int64_t lasted, now = enif_monotonic_time(ERL_NIF_MSEC);
    ERL_NIF_TERM list = enif_make_list(env, 0);
    while (kafka_producer_poll(p->producer, &event)) {
        if (event.type == KAFKA_EVENT_ERROR)
            list = enif_make_list_cell(env, error_term(env, p, &event.error), list);
        else if (kafka_outage_link(&p->outage, &event, now))
            list = enif_make_list_cell(
                env, enif_make_tuple2(env, atoms.settling, enif_make_int(env, KAFKA_OUTAGE_SETTLE_MS)), list);
        else if (event.type == KAFKA_EVENT_LOG)
            list = enif_make_list_cell(
                env, enif_make_tuple3(env, atoms.log, enif_make_int(env, event.level), term_text(env, event.text)),
                list);
        else if (event.type == KAFKA_EVENT_TOKEN)
            list = enif_make_list_cell(env, enif_make_tuple2(env, atoms.token, term_text(env, event.text)), list);
        kafka_event_free(&event);
    }
    if (kafka_outage_over(&p->outage, now, &lasted))
        list = enif_make_list_cell(env, enif_make_tuple2(env, atoms.connected, enif_make_int64(env, lasted)), list);
    enif_make_reverse_list(env, list, &list);
    return list;
}

/* Neighbours are mostly of one batch: settled together. */
static void read_reports(publisher *p, const kafka_report *reports, size_t n, ErlNifEnv *env)
{
    batch *b = NULL;
    size_t known = 0;
    for (size_t i = 0; i < n; i++) {
        item *done = reports[i].opaque;
        done->error = reports[i].error;
        done->partition = reports[i].partition;
        done->offset = reports[i].offset;
        if (done->batch != b) {
            settle(p, b, known, env);
            b = done->batch;
            known = 0;
        }
        known++;
    }
    settle(p, b, known, env);
}

KMQ_NIF(nif_publisher_poll)
{
    (void)argc;
    USE_OR_RETURN(p)
    enif_mutex_lock(p->poll_lock);
    enif_mutex_lock(p->wake_lock);
    p->ready_sent = false;
    enif_mutex_unlock(p->wake_lock);
    kafka_report reports[REPORTS];
    size_t n;
    ErlNifTime start = enif_monotonic_time(ERL_NIF_USEC), took;
    do {
        n = kafka_producer_reports(p->producer, reports, REPORTS);
        read_reports(p, reports, n, env);
        took = enif_monotonic_time(ERL_NIF_USEC) - start;
    } while (n == REPORTS && took < SLICE_US);
    tell_space(p, env);
    ERL_NIF_TERM events = events_term(env, p);
    enif_mutex_unlock(p->poll_lock);
    enif_rwlock_runlock(p->life);
    if (n == REPORTS) woken(p); /* the rest after others had their turn */
    enif_consume_timeslice(env, took >= 1000 ? 100 : took < 10 ? 1 : (int)(took / 10));
    return events;
}

KMQ_NIF(nif_publisher_queued)
{
    (void)argc;
    USE_OR_RETURN(p)
    int queued = kafka_producer_queued(p->producer);
    enif_rwlock_runlock(p->life);
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
    enif_rwlock_rlock(p->life);
    bool open = p->producer != NULL;
    if (open) rc = kafka_producer_set_token(p->producer, &memory.token, &err);
    enif_rwlock_runlock(p->life);
    term_token_free(&memory);
    if (!open) return term_error_atom(env, atoms.closed);
    return rc ? term_error(env, &err) : atoms.ok;
}
