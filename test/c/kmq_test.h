/* kmq_test - what the C tests share: cmocka, a seeded random generator, an allocator that can fail, an allocator that
 * counts.
 *
 * Environment:  KMQ_SEED=n        repeats a run (every test prints the seed it uses)
 *               KMQ_TEST_WORK=n   n times as many random operations (default 1; make test-long sets more)
 *
 * A header alone, so that a test links nothing but what it tests. */
#ifndef KMQ_TEST_H
#define KMQ_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>

#include "kmq.h"

/* ---- random numbers: splitmix64, good enough for tests and the same everywhere */
typedef struct kmq_rng {
    uint64_t state;
} kmq_rng;

static inline uint64_t kmq_rng_next(kmq_rng *rng)
{
    uint64_t z = rng->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0 .. n - 1 */
static inline uint64_t kmq_rng_below(kmq_rng *rng, uint64_t n) { return kmq_rng_next(rng) % n; }

static inline bool kmq_rng_chance(kmq_rng *rng, uint64_t one_in) { return kmq_rng_below(rng, one_in) == 0; }

/* [0, 1) */
static inline double kmq_rng_unit(kmq_rng *rng) { return (double)(kmq_rng_next(rng) >> 11) / 9007199254740992.0; }

/* KMQ_SEED, or one from the clock; printed under the test's name, so that a failure can be repeated. */
static inline kmq_rng kmq_test_rng(const char *name)
{
    kmq_rng rng;
    const char *env = getenv("KMQ_SEED");
    if (env != NULL) {
        rng.state = strtoull(env, NULL, 0);
    } else {
        struct timespec ts;
        (void)clock_gettime(CLOCK_REALTIME, &ts);
        rng.state = (uint64_t)ts.tv_sec * 1000000007u + (uint64_t)ts.tv_nsec;
    }
    (void)printf("%s: KMQ_SEED=%llu\n", name, (unsigned long long)rng.state);
    (void)fflush(stdout); /* before a sanitizer ends the process */
    return rng;
}

static inline int64_t kmq_test_scale(int64_t n)
{
    const char *env = getenv("KMQ_TEST_WORK");
    long long scale = env != NULL ? strtoll(env, NULL, 10) : 1;
    return n * (scale > 0 ? scale : 1);
}

/* ---- an allocator whose fail_at-th allocation (counted from 1, frees not counted) returns NULL, and with `forever`
 * all after it too. fail_at 0 = never. Blocks come from malloc as they are, so ASan sees every overrun.
 *
 *     for (fail.fail_at = 1; ; fail.fail_at++) { fail.calls = 0; run; if (fail.calls < fail.fail_at) break; } */
typedef struct kmq_fail_alloc {
    uint64_t calls, fail_at;
    bool forever;
    int64_t blocks; /* live now; 0 in the end or something leaks */
} kmq_fail_alloc;

static inline void *kmq_fail_realloc(void *ctx, void *ptr, size_t size)
{
    kmq_fail_alloc *fail = ctx;
    if (size == 0) {
        if (ptr != NULL) fail->blocks--;
        free(ptr);
        return NULL;
    }
    fail->calls++;
    if (fail->fail_at != 0 && (fail->calls == fail->fail_at || (fail->forever && fail->calls > fail->fail_at)))
        return NULL;
    void *p = realloc(ptr, size);
    if (p != NULL && ptr == NULL) fail->blocks++;
    return p;
}

static inline kmq_alloc kmq_fail_alloc_init(kmq_fail_alloc *fail)
{
    *fail = (kmq_fail_alloc){0};
    return (kmq_alloc){kmq_fail_realloc, fail};
}

/* ---- an allocator that knows how many bytes are out, to hold kmq_x_bytes() against. The size stands before each
 * block. */
typedef struct kmq_count_alloc {
    size_t bytes, peak;
    int64_t blocks;
} kmq_count_alloc;

static inline void *kmq_count_realloc(void *ctx, void *ptr, size_t size)
{
    enum { HEAD = 16 }; /* keeps malloc's alignment */
    kmq_count_alloc *count = ctx;
    char *block = ptr != NULL ? (char *)ptr - HEAD : NULL;
    size_t old = block != NULL ? *(size_t *)(void *)block : 0;
    if (size == 0) {
        if (block != NULL) count->blocks--;
        count->bytes -= old;
        free(block);
        return NULL;
    }
    char *p = realloc(block, HEAD + size);
    if (p == NULL) return NULL;
    if (block == NULL) count->blocks++;
    *(size_t *)(void *)p = size;
    count->bytes += size - old;
    if (count->bytes > count->peak) count->peak = count->bytes;
    return p + HEAD;
}

static inline kmq_alloc kmq_count_alloc_init(kmq_count_alloc *count)
{
    *count = (kmq_count_alloc){0};
    return (kmq_alloc){kmq_count_realloc, count};
}

#endif
