/* Threads that share one ledger under its lock, as the engine and the callers of ack do. Built for ThreadSanitizer
 * (make tsan), which sees whether a ledger keeps anything outside itself; and the sums must come out right under any. */
#include "kmq_test.h"

#include <pthread.h>
#include <stdatomic.h>

#include "ledger.h"

enum { ACKERS = 3, MESSAGES = 60000, RING = 4096 };

typedef struct shared {
    pthread_mutex_t lock;
    kmq_ledger ledger;
    int64_t now;
    /* what was handed out and not picked up by an acker yet */
    int64_t ring[RING];
    size_t head, tail;
    atomic_bool done;
    atomic_llong acked, ends, retried;
} shared;

static int64_t step_engine(shared *s, int64_t offset)
{
    int64_t batch[64], ready;
    kmq_range ranges[16];
    size_t n = 0, n_ranges;
    while (offset < MESSAGES && n < 64) {
        if (offset % 7 != 0) batch[n++] = offset; /* with holes */
        offset++;
    }
    assert_int_equal(kmq_ledger_fetch(&s->ledger, batch, n, NULL), KMQ_OK);
    assert_int_equal(kmq_ledger_take_start(&s->ledger, ranges, 16, 100, &n_ranges), KMQ_OK);
    for (size_t i = 0; i < n_ranges; i++)
        assert_int_equal(kmq_ledger_started(&s->ledger, ranges[i].lo, ranges[i].hi), KMQ_OK);
    ready = kmq_ledger_ready(&s->ledger);
    if (ready > (int64_t)(RING - (s->tail - s->head))) ready = (int64_t)(RING - (s->tail - s->head));
    for (int64_t k = 0; k < ready; k++) s->ring[s->tail++ % RING] = kmq_ledger_waiting_offset(&s->ledger, k);
    assert_int_equal(kmq_ledger_hand_out(&s->ledger, ready, s->now++), KMQ_OK);
    return offset;
}

static void drain_ends(shared *s)
{
    kmq_range ranges[16];
    size_t n;
    assert_int_equal(kmq_ledger_take_end(&s->ledger, KMQ_END_ACK, ranges, 16, &n), KMQ_OK);
    for (size_t i = 0; i < n; i++) s->ends += ranges[i].hi - ranges[i].lo;
}

static void *engine(void *arg)
{
    shared *s = arg;
    for (int64_t offset = 0;;) {
        (void)pthread_mutex_lock(&s->lock);
        offset = step_engine(s, offset);
        drain_ends(s);
        bool all = offset >= MESSAGES && kmq_ledger_waiting(&s->ledger) == 0 && kmq_ledger_open(&s->ledger) == 0 &&
                   kmq_ledger_ends(&s->ledger) == 0;
        (void)pthread_mutex_unlock(&s->lock);
        if (all) break;
    }
    s->done = true;
    return NULL;
}

static void *acker(void *arg)
{
    shared *s = arg;
    while (!s->done) {
        int64_t mine[32];
        int8_t results[32];
        size_t n = 0;
        (void)pthread_mutex_lock(&s->lock);
        while (n < 32 && s->head < s->tail) mine[n++] = s->ring[s->head++ % RING];
        (void)pthread_mutex_unlock(&s->lock);
        if (n == 0) continue;
        (void)pthread_mutex_lock(&s->lock); /* apart from taking them, as a handler would */
        size_t acks = n > 4 ? n - 1 : n;
        assert_int_equal(kmq_ledger_settle_many(&s->ledger, mine, acks, KMQ_END_ACK, results), KMQ_OK);
        for (size_t i = 0; i < acks; i++) assert_int_equal(results[i], KMQ_OK);
        s->acked += (long long)acks;
        if (acks < n) {
            assert_int_equal(kmq_ledger_retry(&s->ledger, mine[acks]), KMQ_OK);
            s->retried++;
        }
        (void)pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

/* renewals, commits and the questions of info/1 */
static void *watcher(void *arg)
{
    shared *s = arg;
    int64_t floor = 0;
    while (!s->done) {
        int64_t cursor = INT64_MIN;
        kmq_range ranges[8];
        size_t n;
        do {
            (void)pthread_mutex_lock(&s->lock);
            assert_int_equal(kmq_ledger_held(&s->ledger, &cursor, ranges, 8, &n), KMQ_OK);
            int64_t now_floor = kmq_ledger_floor(&s->ledger);
            assert_true(now_floor >= floor);
            floor = now_floor;
            kmq_ledger_cover(&s->ledger, floor);
            assert_true(kmq_ledger_next_timeout(&s->ledger) > s->now);
            assert_true(kmq_ledger_oldest_open(&s->ledger) < floor);
            (void)pthread_mutex_unlock(&s->lock);
        } while (n > 0);
    }
    return NULL;
}

static void test_threads(void **state)
{
    static shared s;
    kmq_alloc alloc = kmq_alloc_libc();
    pthread_t threads[ACKERS + 2];
    (void)state;
    assert_int_equal(pthread_mutex_init(&s.lock, NULL), 0);
    assert_int_equal(kmq_ledger_init(&s.ledger, &alloc, KMQ_DELIVERY_MARKERS, 0, 1000000), KMQ_OK);
    assert_int_equal(pthread_create(&threads[0], NULL, engine, &s), 0);
    assert_int_equal(pthread_create(&threads[1], NULL, watcher, &s), 0);
    for (int i = 0; i < ACKERS; i++) assert_int_equal(pthread_create(&threads[2 + i], NULL, acker, &s), 0);
    for (int i = 0; i < ACKERS + 2; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    kmq_ledger_check(&s.ledger);
    assert_int_equal(s.acked, s.ends);
    assert_int_equal(s.acked + s.retried, MESSAGES - (MESSAGES + 6) / 7);
    assert_int_equal(kmq_ledger_counters(&s.ledger).unknown, 0);
    assert_int_equal(kmq_ledger_floor(&s.ledger), MESSAGES);
    kmq_ledger_free(&s.ledger);
    assert_int_equal(pthread_mutex_destroy(&s.lock), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
