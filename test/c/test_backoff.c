/* Backoff: the sequences that are promised, and the bounds for every input. */
#include "kmq_test.h"

#include <math.h>

#include "backoff.h"

static void test_exponential(void **state)
{
    (void)state;
    kmq_backoff backoff = {.kind = KMQ_BACKOFF_EXPONENTIAL, .min_ms = 3000, .max_ms = 10000, .factor = 2};
    const int64_t want[] = {3000, 3000, 6000, 10000, 10000, 10000}; /* attempt 0 counts as 1 */
    for (int64_t i = 0; i < 6; i++) assert_int_equal(kmq_backoff_delay_ms(&backoff, i, 0.7), want[i]);
    backoff = (kmq_backoff){.min_ms = 1000, .max_ms = 300000, .factor = 2, .jitter = 0.2};
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 1, 0), 800);
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 1, 0.5), 1000);
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 2, 1), 2400);
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 100, 1), 360000);
    backoff = (kmq_backoff){.min_ms = 100, .max_ms = 1000, .factor = 1.5};
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 2, 0), 150);
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 3, 0), 225);
}

static void test_linear_and_list(void **state)
{
    (void)state;
    kmq_backoff backoff = {.kind = KMQ_BACKOFF_LINEAR, .min_ms = 1000, .max_ms = 4000, .factor = 1500};
    const int64_t linear[] = {1000, 2500, 4000, 4000};
    for (int64_t i = 0; i < 4; i++) assert_int_equal(kmq_backoff_delay_ms(&backoff, i + 1, 0), linear[i]);
    static const int64_t list[] = {10, 500, 60000};
    backoff = (kmq_backoff){.kind = KMQ_BACKOFF_LIST, .list_ms = list, .n_list = 3};
    const int64_t listed[] = {10, 500, 60000, 60000};
    for (int64_t i = 0; i < 4; i++) assert_int_equal(kmq_backoff_delay_ms(&backoff, i + 1, 0), listed[i]);
    assert_int_equal(kmq_backoff_delay_ms(&backoff, INT64_MAX, 0), 60000);
    backoff.max_ms = 1000;
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 3, 0), 1000);
    backoff.n_list = 0;
    assert_int_equal(kmq_backoff_delay_ms(&backoff, 3, 0), 0);
}

/* attempt 0 .. 2^31 and beyond, base 1 ms .. 1 h, cap 1 d, jitter 0 .. 100 % */
static void test_bounds(void **state)
{
    (void)state;
    static const int64_t attempts[] = {0,  1,  2,    31,         32,         33,         62,
                                       63, 64, 1000, 2147483647, 2147483648, 4294967296, INT64_MAX};
    static const int64_t bases[] = {0, 1, 7, 1000, 3600000};
    static const double factors[] = {1, 1.0001, 1.5, 2, 10, 1e300};
    for (size_t b = 0; b < 5; b++) {
        for (size_t f = 0; f < 6; f++) {
            for (int j = 0; j <= 10; j++) {
                kmq_backoff backoff = {
                    .min_ms = bases[b], .max_ms = 86400000, .factor = factors[f], .jitter = j / 10.0};
                int64_t before = 0;
                for (size_t a = 0; a < sizeof attempts / sizeof attempts[0]; a++) {
                    for (int u = 0; u <= 4; u++) {
                        int64_t ms = kmq_backoff_delay_ms(&backoff, attempts[a], u / 4.0);
                        assert_true(ms >= 0);
                        assert_true((double)ms <= 86400000.0 * (1 + backoff.jitter));
                    }
                    int64_t middle = kmq_backoff_delay_ms(&backoff, attempts[a], 0.5);
                    assert_true(middle >= before);
                    before = middle;
                }
            }
        }
    }
}

static void test_nonsense(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    static const double odd[] = {NAN, INFINITY, -INFINITY, -1, 0, 0.5, 1e308, -1e308, 1e-308, 2};
    static const int64_t numbers[] = {INT64_MIN, -1, 0, 1, 5000, INT64_MAX, INT64_MAX - 1, 1 << 20};
    static const int64_t list[] = {INT64_MIN, INT64_MAX, 5};
    for (int64_t i = 0; i < kmq_test_scale(200000); i++) {
        kmq_backoff backoff = {.kind = (kmq_backoff_kind)kmq_rng_below(&rng, 3),
                               .min_ms = numbers[kmq_rng_below(&rng, 8)],
                               .max_ms = numbers[kmq_rng_below(&rng, 8)],
                               .factor = odd[kmq_rng_below(&rng, 10)],
                               .jitter = odd[kmq_rng_below(&rng, 10)],
                               .list_ms = list,
                               .n_list = 3};
        int64_t ms = kmq_backoff_delay_ms(&backoff, numbers[kmq_rng_below(&rng, 8)], odd[kmq_rng_below(&rng, 10)]);
        assert_true(ms >= 0);
        int64_t max_ms = backoff.max_ms > backoff.min_ms ? backoff.max_ms : backoff.min_ms;
        if (backoff.kind != KMQ_BACKOFF_LIST) assert_true((double)ms <= 2.0 * (max_ms > 0 ? (double)max_ms : 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exponential),
        cmocka_unit_test(test_linear_and_list),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_nonsense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
