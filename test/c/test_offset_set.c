/* The offset set against a naive one: a byte for each offset of a window of a few chunks, laid over different parts of
 * the number line. */
#include "kmq_test.h"

#include <string.h>

#include "offset_set.h"

enum { CHUNK = 65536, WINDOW = 5 * CHUNK };

typedef struct model {
    int64_t base; /* offset of cells[0] */
    int64_t unit; /* offsets in a cell */
    size_t n;     /* cells */
    int64_t count;
    uint8_t cells[WINDOW];
} model;

static void model_init(model *m, int64_t base, bool coarse)
{
    memset(m, 0, sizeof *m);
    m->unit = coarse ? CHUNK / 4 : 1;
    m->n = coarse ? 60 * 4 : WINDOW;
    m->base = base < INT64_MAX / 2 ? base / m->unit * m->unit : INT64_MAX - m->unit * (int64_t)m->n;
    if (coarse && base > INT64_MAX / 2) m->base -= CHUNK - 1; /* on chunk borders again */
}

static int64_t model_put(model *m, kmq_range r, uint8_t value)
{
    int64_t changed = 0;
    for (int64_t i = (r.lo - m->base) / m->unit; i < (r.hi - m->base) / m->unit; i++) {
        changed += m->cells[i] != value ? m->unit : 0;
        m->cells[i] = value;
    }
    m->count += value ? changed : -changed;
    return changed;
}

static bool model_next(const model *m, int64_t from, kmq_range *run)
{
    size_t at = from > m->base ? (size_t)((from - m->base) / m->unit) : 0;
    if (at >= m->n) return false;
    const uint8_t *lo = memchr(m->cells + at, 1, m->n - at);
    if (lo == NULL) return false;
    const uint8_t *hi = memchr(lo, 0, (size_t)(m->cells + m->n - lo));
    run->lo = m->base + (lo - m->cells) * m->unit;
    run->hi = m->base + (hi != NULL ? hi - m->cells : (int64_t)m->n) * m->unit;
    if (run->lo < from) run->lo = from; /* from lies within a cell */
    return true;
}

static void assert_same_next(const kmq_offset_set *set, const model *m, int64_t from)
{
    kmq_range want = {-1, -1}, got = {-1, -1};
    bool some = model_next(m, from, &want);
    assert_int_equal(kmq_offset_set_next(set, from, &got), some);
    assert_int_equal(got.lo, want.lo);
    assert_int_equal(got.hi, want.hi);
}

static void assert_same(const kmq_offset_set *set, const model *m)
{
    kmq_range want, got;
    int64_t from = INT64_MIN, last = -1, want_last = -1;
    kmq_offset_set_check(set);
    assert_int_equal(kmq_offset_set_count(set), m->count);
    while (model_next(m, from, &want)) {
        assert_true(kmq_offset_set_next(set, from, &got));
        assert_int_equal(got.lo, want.lo);
        assert_int_equal(got.hi, want.hi);
        from = want.hi;
        want_last = want.hi - 1;
    }
    assert_false(kmq_offset_set_next(set, from, &got));
    assert_int_equal(kmq_offset_set_last(set, &last), want_last >= 0);
    assert_int_equal(last, want_last);
}

/* Cells: mostly single ones and short ranges, at times over chunk borders, at times whole chunks. */
static kmq_range random_range(kmq_rng *rng, const model *m)
{
    static const uint32_t lengths[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 30, 30, 300, 3000, 3 * CHUNK};
    uint64_t pick = kmq_rng_below(rng, sizeof lengths / sizeof *lengths);
    int64_t chunk = CHUNK / m->unit, n = (int64_t)m->n;
    if (pick == 19 && !kmq_rng_chance(rng, 8)) pick = 0;
    int64_t length = lengths[pick] == 1 ? 1 : (int64_t)kmq_rng_below(rng, lengths[pick]);
    if (m->unit > 1) length = 1 + (int64_t)kmq_rng_below(rng, 14);
    int64_t lo = (int64_t)kmq_rng_below(rng, m->n - (uint64_t)length);
    if (kmq_rng_chance(rng, 6)) lo = lo / chunk * chunk; /* on the border */
    if (kmq_rng_chance(rng, 64)) length = (length + chunk - 1) / chunk * chunk;
    if (lo + length > n) length = n - lo;
    return (kmq_range){m->base + lo * m->unit, m->base + (lo + length) * m->unit};
}

static const int64_t BASES[] = {0, 123 * CHUNK, (INT64_C(1) << 40) + 777, INT64_MAX - WINDOW};

static void test_model(void **state)
{
    static model m;
    kmq_rng rng = kmq_test_rng("offset_set model");
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    int64_t steps = kmq_test_scale(200000);
    (void)state;
    for (size_t k = 0; k < 2 * sizeof BASES / sizeof *BASES; k++) {
        kmq_offset_set set;
        uint64_t add_of_8 = 4;
        model_init(&m, BASES[k / 2], k % 2 == 1);
        kmq_offset_set_init(&set, &alloc);
        for (int64_t i = 0; i < steps; i++) {
            kmq_range r = random_range(&rng, &m);
            int64_t got = -1;
            if (i % 2000 == 0) add_of_8 = kmq_rng_below(&rng, 9); /* the set fills and empties in turn */
            if (kmq_rng_below(&rng, 8) < add_of_8) {
                assert_int_equal(kmq_offset_set_add(&set, r.lo, r.hi, &got), KMQ_OK);
                assert_int_equal(got, model_put(&m, r, 1));
            } else {
                assert_int_equal(kmq_offset_set_remove(&set, r.lo, r.hi, &got), KMQ_OK);
                assert_int_equal(got, model_put(&m, r, 0));
            }
            assert_int_equal(kmq_offset_set_count(&set), m.count);
            int64_t probe = m.base + (int64_t)kmq_rng_below(&rng, m.n * (uint64_t)m.unit);
            assert_int_equal(kmq_offset_set_has(&set, probe), m.cells[(probe - m.base) / m.unit]);
            assert_int_equal(kmq_offset_set_bytes(&set), count.bytes);
            if (i % 8 == 0) assert_same_next(&set, &m, r.lo);
            if (i % 32 == 0) kmq_offset_set_check(&set);
            if (i % 4000 == 0) assert_same(&set, &m);
        }
        assert_same(&set, &m);
        kmq_offset_set_free(&set);
        assert_int_equal(count.bytes, 0);
    }
}

/* check() after every single step, in one chunk and a bit, where a step is cheap */
static void test_model_every_step(void **state)
{
    static model m;
    kmq_rng rng = kmq_test_rng("offset_set every step");
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_offset_set set;
    (void)state;
    model_init(&m, 0, false);
    kmq_offset_set_init(&set, &alloc);
    for (int64_t i = 0; i < kmq_test_scale(200000); i++) {
        int64_t lo = (int64_t)(CHUNK - 700 + kmq_rng_below(&rng, 1400)), hi = lo + 1 + (int64_t)kmq_rng_below(&rng, 40);
        bool add = kmq_rng_below(&rng, 20000) < 10000 + (uint64_t)(i % 20000) - 10000 / 2 * (uint64_t)(i / 20000 % 2);
        int64_t got = -1;
        if (add) {
            assert_int_equal(kmq_offset_set_add(&set, lo, hi, &got), KMQ_OK);
        } else {
            assert_int_equal(kmq_offset_set_remove(&set, lo, hi, &got), KMQ_OK);
        }
        assert_int_equal(got, model_put(&m, (kmq_range){lo, hi}, add));
        kmq_offset_set_check(&set);
        assert_same_next(&set, &m, lo - 50);
    }
    assert_same(&set, &m);
    kmq_offset_set_free(&set);
}

/* Every allocation of every operation fails once: the members stay, and then the operation succeeds. */
static void test_fail_malloc(void **state)
{
    static model m;
    kmq_rng rng = kmq_test_rng("offset_set fail-malloc");
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    int64_t failures = 0;
    (void)state;
    for (int round = 0; round < 100; round++) {
        kmq_offset_set set;
        model_init(&m, BASES[round / 2 % 4], round % 2 == 1);
        kmq_offset_set_init(&set, &alloc);
        for (int i = 0; i < 300; i++) {
            kmq_range r = random_range(&rng, &m);
            bool add = kmq_rng_chance(&rng, 2);
            int64_t got = -1;
            for (fail.fail_at = 1;; fail.fail_at++) {
                fail.calls = 0;
                fail.forever = kmq_rng_chance(&rng, 2);
                int rc =
                    add ? kmq_offset_set_add(&set, r.lo, r.hi, &got) : kmq_offset_set_remove(&set, r.lo, r.hi, &got);
                if (rc == KMQ_OK) break;
                assert_int_equal(rc, KMQ_ENOMEM);
                assert_int_equal(got, -1);
                assert_same(&set, &m);
                failures++;
            }
            fail.fail_at = 0;
            assert_int_equal(got, model_put(&m, r, add));
            if (i % 10 == 0) assert_same(&set, &m);
        }
        kmq_offset_set_free(&set);
        assert_int_equal(fail.blocks, 0);
    }
    assert_true(failures > 500);
}

/* What adds have put in, since hold or as the last call, goes out again when there is no memory at all. */
static void test_undo(void **state)
{
    static model m;
    kmq_rng rng = kmq_test_rng("offset_set undo");
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    (void)state;
    for (int round = 0; round < 100; round++) {
        kmq_offset_set set;
        model_init(&m, 0, round % 2 == 1);
        kmq_offset_set_init(&set, &alloc);
        for (int i = 0; i < 40; i++) {
            kmq_range r = random_range(&rng, &m), added[12];
            size_t n = 0, want = kmq_rng_below(&rng, 12) + 1;
            int64_t got;
            if (kmq_rng_chance(&rng, 3)) {
                assert_int_equal(kmq_offset_set_remove(&set, r.lo, r.hi, NULL), KMQ_OK);
                (void)model_put(&m, r, 0);
            }
            if (want > 1) kmq_offset_set_hold(&set);
            for (int tries = 0; n < want && tries < 200; tries++) {
                /* the gaps are what makes chunks full: now and then exactly one of them */
                kmq_range run, gap = random_range(&rng, &m);
                if (kmq_offset_set_has(&set, gap.lo)) {
                    (void)kmq_offset_set_next(&set, gap.lo, &run);
                    gap.lo = run.hi;
                }
                if (kmq_rng_chance(&rng, 2)) gap.hi = m.base + (int64_t)m.n * m.unit;
                if (kmq_offset_set_next(&set, gap.lo, &run) && run.lo < gap.hi) gap.hi = run.lo;
                if (gap.lo >= gap.hi) continue;
                assert_int_equal(kmq_offset_set_add(&set, gap.lo, gap.hi, &got), KMQ_OK);
                assert_int_equal(got, gap.hi - gap.lo);
                added[n++] = gap;
            }
            fail.calls = 0;
            fail.fail_at = 1;
            fail.forever = true;
            for (size_t k = n; k > 0; k--) {
                assert_int_equal(kmq_offset_set_remove(&set, added[k - 1].lo, added[k - 1].hi, &got), KMQ_OK);
                assert_int_equal(got, added[k - 1].hi - added[k - 1].lo);
            }
            fail.fail_at = 0;
            if (want > 1) kmq_offset_set_release(&set);
            assert_same(&set, &m);
            assert_int_equal(kmq_offset_set_add(&set, r.lo, r.hi, NULL), KMQ_OK);
            (void)model_put(&m, r, 1);
        }
        kmq_offset_set_free(&set);
        assert_int_equal(fail.blocks, 0);
    }
}

static void test_arguments_and_ends(void **state)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_offset_set set;
    kmq_range run;
    int64_t n = -1, last = -1;
    (void)state;
    kmq_offset_set_init(&set, &alloc);
    assert_int_equal(kmq_offset_set_add(&set, -1, 5, &n), KMQ_EINVAL);
    assert_int_equal(kmq_offset_set_add(&set, 5, 4, &n), KMQ_EINVAL);
    assert_int_equal(kmq_offset_set_remove(&set, -1, 5, &n), KMQ_EINVAL);
    assert_int_equal(n, -1);
    assert_int_equal(kmq_offset_set_add(&set, 5, 5, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kmq_offset_set_bytes(&set), 0);
    assert_false(kmq_offset_set_next(&set, 0, &run));
    assert_false(kmq_offset_set_last(&set, &last));
    assert_false(kmq_offset_set_has(&set, INT64_MAX));

    /* all there is, and a bite out of it at either end */
    assert_int_equal(kmq_offset_set_add(&set, 0, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(n, INT64_MAX);
    assert_int_equal(kmq_offset_set_add(&set, 0, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_true(kmq_offset_set_last(&set, &last));
    assert_int_equal(last, INT64_MAX - 1);
    assert_false(kmq_offset_set_has(&set, INT64_MAX));
    assert_true(kmq_offset_set_has(&set, INT64_MAX - 1));
    assert_false(kmq_offset_set_next(&set, INT64_MAX, &run));
    assert_int_equal(kmq_offset_set_remove(&set, INT64_MAX - 1, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(kmq_offset_set_remove(&set, 0, 1, &n), KMQ_OK);
    assert_true(kmq_offset_set_next(&set, INT64_MIN, &run));
    assert_int_equal(run.lo, 1);
    assert_int_equal(run.hi, INT64_MAX - 1);
    kmq_offset_set_check(&set);
    assert_int_equal(kmq_offset_set_remove(&set, 0, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(n, INT64_MAX - 2);
    assert_int_equal(kmq_offset_set_count(&set), 0);
    kmq_offset_set_free(&set);
}

static void test_memory(void **state)
{
    kmq_rng rng = kmq_test_rng("offset_set memory");
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_offset_set set;
    (void)state;

    /* offset 0 open, 50 million settled behind it, one after the other */
    kmq_offset_set_init(&set, &alloc);
    for (int64_t i = 1; i <= 50000000; i++)
        if (kmq_offset_set_add(&set, i, i + 1, NULL) != KMQ_OK) fail();
    assert_true(count.peak < 64 * 1024);
    assert_true(count.bytes < 20 * 1024);
    /* and a jump of 2^40 costs nothing that depends on its length */
    size_t before = count.bytes;
    assert_int_equal(kmq_offset_set_add(&set, INT64_C(1) << 40, (INT64_C(1) << 40) + 1, NULL), KMQ_OK);
    assert_true(count.bytes - before < 256);
    assert_int_equal(kmq_offset_set_remove(&set, 0, INT64_MAX, NULL), KMQ_OK);
    assert_true(count.bytes < 512);
    kmq_offset_set_free(&set);

    /* a random half of 10 million */
    kmq_offset_set_init(&set, &alloc);
    for (int64_t i = 0; i < 10000000; i++)
        if (kmq_rng_next(&rng) >> 63 && kmq_offset_set_add(&set, i, i + 1, NULL) != KMQ_OK) fail();
    print_message("random half of 10 million: %.3f B per offset\n", (double)count.bytes / 10e6);
    assert_true(count.bytes <= 2000000);

    /* one in a thousand left: the bitmaps go */
    for (int64_t i = 0; i < 10000000; i++)
        if (i % 1000 != 0 && kmq_offset_set_remove(&set, i, i + 1, NULL) != KMQ_OK) fail();
    assert_true(count.bytes < 64 * 1024);
    kmq_offset_set_check(&set);
    kmq_offset_set_free(&set);
    assert_int_equal(count.blocks, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arguments_and_ends),
        cmocka_unit_test(test_model_every_step),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_fail_malloc),
        cmocka_unit_test(test_undo),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
