/* Limits against a naive list; every allocation that fails leaves all as it was. */
#include "kmq_test.h"

#include "limits.h"

enum { OFFSETS = 64, NONE = -1 };

static bool model_next(const int64_t *model, int64_t from, int64_t now, kmq_range *run)
{
    int64_t o = from > 0 ? from : 0;
    while (o < OFFSETS && (model[o] == NONE || model[o] > now)) o++;
    if (o >= OFFSETS) return false;
    run->lo = o;
    while (o < OFFSETS && model[o] != NONE && model[o] <= now) o++;
    run->hi = o;
    return true;
}

static void compare(const kmq_limits *limits, const int64_t *model, int64_t now)
{
    int64_t first = INT64_MAX, count = 0;
    kmq_limits_check(limits);
    for (int64_t o = 0; o < OFFSETS; o++) {
        assert_int_equal(kmq_limits_has(limits, o), model[o] != NONE);
        if (model[o] == NONE) continue;
        count++;
        if (model[o] < first) first = model[o];
    }
    assert_int_equal(kmq_limits_count(limits), count);
    assert_int_equal(kmq_limits_first(limits), first);
    for (int due = 0; due < 2; due++) {
        kmq_range got = {-1, -1}, want = {-1, -1};
        for (int64_t from = INT64_MIN;; from = want.hi) {
            bool some = model_next(model, from, due ? now : INT64_MAX, &want);
            assert_int_equal(due ? kmq_limits_next_due(limits, from, now, &got) : kmq_limits_next(limits, from, &got),
                             some);
            assert_true(got.lo == want.lo && got.hi == want.hi);
            if (!some) break;
        }
    }
}

static void test_model(void **state)
{
    kmq_rng rng = kmq_test_rng("limits model");
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    int64_t model[OFFSETS], failures = 0;
    kmq_limits limits;
    (void)state;
    for (int life = 0; life < kmq_test_scale(30); life++) {
        for (size_t i = 0; i < OFFSETS; i++) model[i] = NONE;
        kmq_limits_init(&limits, &alloc);
        for (int step = 0; step < 1000; step++) {
            int64_t offset = (int64_t)kmq_rng_below(&rng, OFFSETS), now = (int64_t)kmq_rng_below(&rng, 1000);
            if (kmq_rng_below(&rng, 5) < (step % 200 < 100 ? 3u : 1u)) {
                int64_t limit = (int64_t)kmq_rng_below(&rng, 1000);
                for (fail.fail_at = 1;; fail.fail_at++) {
                    fail.calls = 0;
                    fail.forever = kmq_rng_chance(&rng, 2);
                    int rc = kmq_limits_put(&limits, offset, limit);
                    if (rc == KMQ_OK) break;
                    assert_int_equal(rc, KMQ_ENOMEM);
                    assert_int_equal(model[offset], NONE); /* another limit for one that has one needs no memory */
                    compare(&limits, model, now);
                    failures++;
                }
                fail.fail_at = 0;
                model[offset] = limit;
            } else {
                assert_int_equal(kmq_limits_remove(&limits, offset), model[offset] != NONE);
                model[offset] = NONE;
            }
            compare(&limits, model, now);
        }
        kmq_limits_free(&limits);
        assert_int_equal(fail.blocks, 0);
    }
    assert_true(failures > 100);
}

static void test_full(void **state)
{
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_limits limits;
    (void)state;
    kmq_limits_init(&limits, &alloc);
    for (int64_t o = 0; o < KMQ_LIMITS_MAX; o++)
        if (kmq_limits_put(&limits, o * 3, INT64_MAX - o) != KMQ_OK) fail();
    assert_int_equal(kmq_limits_put(&limits, 1, 5), KMQ_EFULL);
    assert_int_equal(kmq_limits_put(&limits, 3, 5), KMQ_OK);
    assert_int_equal(kmq_limits_first(&limits), 5);
    assert_int_equal(count.bytes, kmq_limits_bytes(&limits));
    print_message("%d limits: %zu B\n", KMQ_LIMITS_MAX, count.bytes);
    assert_true(count.bytes < 80 * (size_t)KMQ_LIMITS_MAX);
    kmq_range run;
    assert_true(kmq_limits_next_due(&limits, 0, INT64_MAX,
                                    &run)); /* 3 alone is due: INT64_MAX never is, and is not asked for */
    kmq_limits_check(&limits);
    for (int64_t o = 0; o < KMQ_LIMITS_MAX; o++) assert_true(kmq_limits_remove(&limits, o * 3));
    assert_int_equal(kmq_limits_first(&limits), INT64_MAX);
    assert_true(count.bytes < 200000); /* the array shrank on the way */
    kmq_limits_free(&limits);
    assert_int_equal(count.bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_model), cmocka_unit_test(test_full)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
