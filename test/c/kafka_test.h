/* kafka_test - what the tests of the adapter share: a mock cluster, waiting with a limit, wake-up counters. */
#ifndef KAFKA_TEST_H
#define KAFKA_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kafka.h"

/* A mock cluster in this process, owned by a client of its own; or, with KMQ_TEST_BOOTSTRAP=host:port, a real broker that the test may
 * fill (mock is NULL then; tests that inject faults are skipped). */
typedef struct cluster {
    rd_kafka_t *rk;
    rd_kafka_mock_cluster_t *mock;
    const char *bootstrap;
} cluster;

static inline void cluster_start(cluster *c, int brokers)
{
    char why[256];
    c->rk = NULL;
    c->mock = NULL;
    if ((c->bootstrap = getenv("KMQ_TEST_BOOTSTRAP")) != NULL) return;
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    rd_kafka_conf_set_log_cb(conf, NULL); /* it would say that it knows no broker */
    c->rk = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof why);
    assert_non_null(c->rk);
    c->mock = rd_kafka_mock_cluster_new(c->rk, brokers);
    assert_non_null(c->mock);
    c->bootstrap = rd_kafka_mock_cluster_bootstraps(c->mock);
}

static inline void cluster_stop(cluster *c)
{
    if (c->mock == NULL) return;
    rd_kafka_mock_cluster_destroy(c->mock);
    rd_kafka_destroy(c->rk);
}

#define MOCK_ONLY(c)                                                                                                   \
    do {                                                                                                               \
        if ((c).mock == NULL) skip();                                                                                  \
    } while (0)

static inline int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static inline void nap_ms(int ms)
{
    struct timespec t = {ms / 1000, (ms % 1000) * 1000000L};
    nanosleep(&t, NULL);
}

/* KMQ_TEST_SCALE makes the limits longer; twice the time they take on a quiet machine is granted in any case. */
static inline int64_t scaled_ms(int seconds)
{
    const char *scale = getenv("KMQ_TEST_SCALE");
    return (int64_t)seconds * 2000 * (scale != NULL && atoi(scale) > 0 ? atoi(scale) : 1);
}

/* Waits until the condition holds; fails the test after seconds, scaled. */
#define EVENTUALLY(seconds, condition)                                                                                 \
    do {                                                                                                               \
        int64_t limit_ms = now_ms() + scaled_ms(seconds);                                                              \
        while (!(condition)) {                                                                                         \
            if (now_ms() > limit_ms) fail_msg("not within %d s: %s", (int)(seconds), #condition);                      \
            nap_ms(2);                                                                                                 \
        }                                                                                                              \
    } while (0)

/* A new topic of this name, also where an old one is left from an earlier run. */
static inline void topic_with(cluster *c, const char *name, int partitions, const kafka_property *config,
                              size_t n_config)
{
    kafka_property props[] = {{"bootstrap.servers", c->bootstrap}};
    kafka_error err;
    kafka_admin *admin;
    int n = 0, replication;
    if (c->mock != NULL) {
        assert_int_equal(rd_kafka_mock_topic_create(c->mock, name, partitions, 1), 0);
        return;
    }
    assert_int_equal(kafka_admin_open(props, 1, &admin, &err), 0);
    kafka_admin_delete_topic(admin, name, 10000, &err);
    int res = -1;
    EVENTUALLY(10, (res = kafka_admin_create_topic(admin, name, partitions, 1, config, n_config, 10000, &err)) == 0);
    EVENTUALLY(10, kafka_admin_partitions(admin, name, 5000, &n, &replication, &err) == 0 && n == partitions);
    kafka_admin_destroy(admin);
}

static inline void topic(cluster *c, const char *name, int partitions) { topic_with(c, name, partitions, NULL, 0); }

typedef struct waker {
    atomic_int count;
    atomic_bool off; /* set after the wake-up was switched off: a call then is an error */
    atomic_int late;
} waker;

static inline void waker_fn(void *ctx)
{
    waker *w = ctx;
    atomic_fetch_add(&w->count, 1);
    if (atomic_load(&w->off)) atomic_fetch_add(&w->late, 1);
}

static inline kafka_wake waker_of(waker *w) { return (kafka_wake){.fn = waker_fn, .ctx = w, .fd = -1}; }

static inline kafka_producer *producer_open(cluster *c, waker *w, bool idempotent)
{
    kafka_property props[] = {{"bootstrap.servers", c->bootstrap}, {"linger.ms", "1"}, {"?retry.backoff.ms", "50"}};
    kafka_wake wake = waker_of(w);
    kafka_producer *producer = NULL;
    kafka_error err;
    if (kafka_producer_open(props, 3, idempotent, w == NULL ? NULL : &wake, &producer, &err) != 0)
        fail_msg("%s: %s", err.name, err.text);
    return producer;
}

/* Reads n reports, however long it takes (10 s); returns how many of them are errors. */
static inline size_t reports_read(kafka_producer *producer, size_t n)
{
    kafka_report report[100];
    size_t errors = 0;
    int64_t limit_ms = now_ms() + scaled_ms(10);
    while (n > 0) {
        size_t got = kafka_producer_reports(producer, report, n < 100 ? n : 100);
        for (size_t i = 0; i < got; i++) errors += report[i].error != 0;
        n -= got;
        if (got == 0) nap_ms(1);
        if (now_ms() > limit_ms) fail_msg("%zu reports missing", n);
    }
    return errors;
}

static inline void fill(kafka_producer *producer, const char *name, int32_t partition, int n)
{
    kafka_error err;
    kafka_topic *t = kafka_producer_topic(producer, name, &err);
    for (int i = 0; i < n; i++) {
        char value[32];
        int len = snprintf(value, sizeof value, "%d", i);
        int res = kafka_producer_send(producer, t, partition, NULL, 0, value, (size_t)len, NULL, 0, 0, NULL, &err);
        assert_int_equal(res, 0);
    }
    assert_int_equal(reports_read(producer, (size_t)n), 0);
}

static inline void fill_partition(cluster *c, const char *name, int32_t partition, int n)
{
    kafka_producer *producer = producer_open(c, NULL, true);
    fill(producer, name, partition, n);
    kafka_producer_destroy(producer, NULL, NULL);
}

/* The session must outlast the 3 s that the mock lets a new group wait, or it forgets the member meanwhile. */
static inline kafka_consumer *consumer_open_as(cluster *c, const char *group, const char *assignor, waker *control,
                                               waker *records)
{
    kafka_property props[] = {{"bootstrap.servers", c->bootstrap}, {"group.id", group},
                              {"auto.offset.reset", "earliest"},   {"session.timeout.ms", "6000"},
                              {"heartbeat.interval.ms", "200"},    {"fetch.wait.max.ms", "20"},
                              {"enable.partition.eof", "true"},    {"partition.assignment.strategy", assignor},
                              {"socket.timeout.ms", "3000"}};
    kafka_wake cw = waker_of(control), rw = waker_of(records);
    kafka_consumer *consumer = NULL;
    kafka_error err;
    if (kafka_consumer_open(props, 9, control == NULL ? NULL : &cw, records == NULL ? NULL : &rw, &consumer, &err) != 0)
        fail_msg("%s: %s", err.name, err.text);
    return consumer;
}

static inline kafka_consumer *consumer_open(cluster *c, const char *group, waker *control, waker *records)
{
    return consumer_open_as(c, group, "roundrobin", control, records);
}

/* Every client is gone, the reaper's too. */
static inline void assert_nothing_left(void) { EVENTUALLY(20, kafka_live() == 0); }

#endif
