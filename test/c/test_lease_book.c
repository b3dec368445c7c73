/* The lease book: the traces, the reference model's histories, a naive model under millions of random changes, memory
 * that runs out at every allocation, checkpoints at every cut. */
#include "kmq_test.h"

#include <string.h>

#include "lease_book.h"

/* make runs the tests in c_src */
#define KMQ_VECTORS "../test/c/vectors/lease_book.txt"

enum { RUNS_MAX = 2048 };

static kmq_marker_scope scope;
static uint8_t record[KMQ_MARKER_MAX_BYTES];

/* encoded and decoded, as it comes from Kafka */
static kmq_marker marker_of(kmq_marker_type type, const kmq_range *runs, size_t n, int64_t ms, uint8_t cause,
                            uint8_t flags, const char *text)
{
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    size_t used;
    kmq_marker marker;
    kmq_marker_tlv tlv = {.text = text, .text_len = text != NULL ? strlen(text) : 0};
    int len = kmq_marker_encode(record, sizeof record, &scope, type, runs, n, ms, cause, flags, &tlv, &used);
    assert_true(len > 0);
    assert_int_equal(used, n);
    kmq_marker_encode_key(key, 0, -1);
    assert_int_equal(kmq_marker_decode(&scope, 0, key, sizeof key, record, (size_t)len, NULL, 0, &marker),
                     KMQ_MARKER_OURS);
    return marker;
}

static void feed(kmq_lease_book *book, kmq_marker_type type, int64_t lo, int64_t hi, int64_t ms, int64_t mo, int64_t ts)
{
    kmq_marker marker =
        marker_of(type, &(kmq_range){lo, hi}, 1, ms, 0, type == KMQ_MARKER_RETRY ? KMQ_FLAG_COUNTS : 0, NULL);
    assert_int_equal(kmq_lease_book_apply(book, &marker, mo, ts), KMQ_OK);
    kmq_lease_book_check(book);
}

/* ---- the traces */

static kmq_lease_book trace;

static void S(int64_t mo, int64_t key, int64_t after, int64_t ts)
{
    feed(&trace, KMQ_MARKER_START, key, key + 1, after, mo, ts);
}

static void E(int64_t mo, int64_t key) { feed(&trace, KMQ_MARKER_END, key, key + 1, 0, mo, 0); }

static void R(int64_t now, size_t n, const int64_t *keys)
{
    kmq_due due[8];
    assert_int_equal(kmq_lease_book_take_due(&trace, now, INT64_MAX, due, 8), n);
    for (size_t i = 0; i < n; i++) assert_int_equal(due[i].offset, keys[i]);
    kmq_lease_book_check(&trace);
}

#define R0(now) R(now, 0, NULL)
#define R1(now, a) R(now, 1, (const int64_t[]){a})
#define FLOOR(mo) assert_int_equal(kmq_lease_book_floor(&trace), mo)

static void again(void)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book_free(&trace);
    (void)kmq_lease_book_init(&trace, &alloc);
}

static void test_traces(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    (void)kmq_lease_book_init(&trace, &alloc);
    FLOOR(-1);
    S(100, 1000, 4000, 10000); /* T1 */
    R0(13999);
    R1(14000, 1000);
    R0(14000);
    FLOOR(100);
    E(101, 1000);
    FLOOR(-1);
    assert_int_equal(kmq_lease_book_in_flight(&trace), 0);
    again(); /* T2 */
    S(100, 1000, 4000, 10000);
    S(101, 1001, 4000, 12000);
    R1(15000, 1000);
    R1(17000, 1001);
    FLOOR(100);
    again(); /* T3 */
    S(100, 1000, 4000, 10000);
    S(101, 1001, 1000, 10000);
    S(102, 1002, 2000, 10000);
    R(20000, 3, (const int64_t[]){1000, 1001, 1002});
    again(); /* T4 */
    for (int64_t i = 0; i < 5; i++) S(100 + i, 1000 + i, 4000, 10000);
    E(105, 1002), FLOOR(100);
    E(106, 1001), FLOOR(100);
    E(107, 1000), FLOOR(103);
    E(108, 1004), FLOOR(103);
    E(109, 1003), FLOOR(-1);
    again(); /* T5 */
    E(100, 1000);
    S(101, 1000, 4000, 10001);
    FLOOR(101);
    R1(14001, 1000);
    again(); /* T6 */
    S(100, 1000, 4000, 10000);
    S(101, 1000, 4000, 12000);
    R0(14000);
    R1(16000, 1000);
    R0(16000);
    again(); /* T7 */
    S(100, 1000, 4000, 10000);
    E(101, 1000);
    S(102, 1000, 4000, 12000);
    FLOOR(102);
    R0(14000);
    R1(16000, 1000);
    R0(16000);
    again(); /* T11: a START with 0 is a nack */
    S(100, 1000, 60000, 10000);
    S(101, 1000, 0, 11000);
    R1(11000, 1000);
    again(); /* T12 */
    S(100, 1000, 4000, 10000);
    S(101, 1000, 60000, 13000);
    R0(14000);
    R1(73000, 1000);
    again(); /* T13: never due */
    S(100, 1000, INT64_MAX, 10000);
    R0(10000);
    R0(INT64_MAX);
    assert_int_equal(kmq_lease_book_next_due(&trace), INT64_MAX);
    FLOOR(100);
    again(); /* T14: deadlines count from the running maximum */
    S(100, 1000, 4000, 20000);
    S(101, 1001, 4000, 10000);
    R0(14000);
    R(24000, 2, (const int64_t[]){1000, 1001});
    kmq_lease_book_free(&trace);
}

/* ---- what the rules say about the rest, one by one */

static void test_rules(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book *book = &trace;
    kmq_due due[16];
    kmq_marker marker;
    (void)kmq_lease_book_init(book, &alloc);
    assert_int_equal(kmq_lease_book_log_time(book), INT64_MIN);
    /* RETRY and EXTEND of what is not open: no residue, but for the log time */
    feed(book, KMQ_MARKER_RETRY, 5, 9, 10, 1, 100);
    feed(book, KMQ_MARKER_EXTEND, 5, 9, 10, 2, 100);
    assert_int_equal(kmq_lease_book_open(book), 0);
    assert_int_equal(kmq_lease_book_log_time(book), 100);
    /* a RETRY has cause, flags and text until the lease changes; EXTEND does not touch it */
    feed(book, KMQ_MARKER_START, 0, 10, 50, 3, 100);
    marker = marker_of(KMQ_MARKER_RETRY, &(kmq_range){3, 5}, 1, 20, KMQ_RETRY_TIMEOUT, KMQ_FLAG_DLQ, "boom");
    assert_int_equal(kmq_lease_book_apply(book, &marker, 4, 100), KMQ_OK);
    feed(book, KMQ_MARKER_EXTEND, 0, 10, 500, 5, 110);
    assert_true(kmq_lease_book_has(book, 4, due));
    assert_int_equal(due[0].due_ms, 120);
    assert_int_equal(due[0].cause, KMQ_RETRY_TIMEOUT);
    assert_int_equal(due[0].flags, KMQ_FLAG_DLQ);
    assert_int_equal(due[0].text_len, 4);
    assert_memory_equal(due[0].text, "boom", 4);
    assert_true(kmq_lease_book_has(book, 5, due));
    assert_int_equal(due[0].due_ms, 610);
    assert_int_equal(due[0].cause, KMQ_RETRY_CRASH);
    assert_int_equal(due[0].flags, KMQ_FLAG_COUNTS);
    assert_null(due[0].text);
    feed(book, KMQ_MARKER_START, 4, 5, 10, 6, 120);
    assert_true(kmq_lease_book_has(book, 4, due));
    assert_null(due[0].text);
    assert_int_equal(kmq_lease_book_floor(book), 3);
    /* PARK: not an attempt; due at the time it names, also over an open lease */
    feed(book, KMQ_MARKER_PARK, 7, 8, 125, 7, 120);
    assert_int_equal(kmq_lease_book_take_due(book, 125, INT64_MAX, due, 16), 2);
    assert_int_equal(due[0].offset, 3);
    assert_int_equal(due[1].offset, 7);
    assert_int_equal(due[1].cause, KMQ_RETRY_RELEASED);
    assert_int_equal(due[1].flags, KMQ_FLAG_PARKED);
    /* in flight, and renewed meanwhile: no longer due, but not to be taken by others either */
    assert_true(kmq_lease_book_still_due(book, 7, 125));
    feed(book, KMQ_MARKER_START, 7, 8, 100, 8, 120);
    assert_false(kmq_lease_book_still_due(book, 7, 125));
    assert_int_equal(kmq_lease_book_take_due(book, 300, 8, due, 16), 1); /* 4 alone */
    assert_int_equal(due[0].offset, 4);
    assert_int_equal(kmq_lease_book_give_back(book, 7), KMQ_OK);
    assert_int_equal(kmq_lease_book_next_due(book), 220);
    assert_int_equal(kmq_lease_book_take_due(book, 300, 7, due, 16), 0);
    assert_int_equal(kmq_lease_book_take_due(book, 300, 8, due, 16), 1);
    assert_int_equal(kmq_lease_book_give_back(book, 1234), KMQ_OK);
    /* END takes it out of flight, and a START after it is not in flight */
    feed(book, KMQ_MARKER_END, 0, 100, 0, 9, 300);
    assert_int_equal(kmq_lease_book_in_flight(book), 0);
    feed(book, KMQ_MARKER_START, 7, 8, 0, 10, 300);
    assert_int_equal(kmq_lease_book_take_due(book, 300, INT64_MAX, due, 16), 1);
    /* a START of more offsets than any handle holds is refused; an END of as many is a walk over what is open */
    marker = marker_of(KMQ_MARKER_START, &(kmq_range){0, KMQ_LEASE_SET_MAX + 1}, 1, 5, 0, 0, NULL);
    assert_int_equal(kmq_lease_book_apply(book, &marker, 11, 400), KMQ_EINVAL);
    assert_int_equal(kmq_lease_book_open(book), 1);
    feed(book, KMQ_MARKER_START, INT64_MAX - 2000, INT64_MAX, 5, 12, 400);
    assert_int_equal(kmq_lease_book_open(book), 2001);
    feed(book, KMQ_MARKER_END, 0, INT64_MAX, 0, 13, 400);
    assert_int_equal(kmq_lease_book_open(book), 0);
    /* a CLOCK moves the log time, and nothing else */
    kmq_marker clock = {.type = KMQ_MARKER_CLOCK};
    assert_int_equal(kmq_lease_book_apply(book, &clock, 14, 500), KMQ_OK);
    assert_int_equal(kmq_lease_book_log_time(book), 500);
    assert_int_equal(kmq_lease_book_open(book), 0);
    kmq_lease_book_free(book);
}

/* The walk over what is due enters subtrees that have something due only before the offset it starts from. */
static void test_seek_due(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book *book = &trace;
    kmq_lease_path path;
    (void)kmq_lease_book_init(book, &alloc);
    for (int64_t i = 0; i < 10000; i++) {
        kmq_marker marker = {.type = KMQ_MARKER_START, .set = {.single = i}, .time_ms = i == 5 || i == 9000 ? 0 : 100};
        assert_int_equal(kmq_lease_book_apply(book, &marker, i, 0), KMQ_OK);
    }
    assert_true(kmq_lease_tree_seek_due(&book->tree, 5, 0, &path));
    assert_int_equal(kmq_lease_tree_at(&book->tree, &path)->lo, 5);
    assert_true(kmq_lease_tree_seek_due(&book->tree, 6, 0, &path));
    assert_int_equal(kmq_lease_tree_at(&book->tree, &path)->lo, 9000);
    assert_false(kmq_lease_tree_seek_due(&book->tree, 9001, 0, &path));
    kmq_lease_book_free(book);
}

/* An END of an unknown offset, a million times: nothing is left behind (the tracker may see it for ever). */
static void test_no_residue(void **state)
{
    (void)state;
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_lease_book book;
    (void)kmq_lease_book_init(&book, &alloc);
    size_t before = 0;
    for (int64_t i = 0; i < 100000; i++) {
        kmq_marker marker = {.type = i % 3 == 0   ? KMQ_MARKER_END
                                     : i % 3 == 1 ? KMQ_MARKER_RETRY
                                                  : KMQ_MARKER_EXTEND,
                             .set = {.single = i * 77}};
        assert_int_equal(kmq_lease_book_apply(&book, &marker, i, i), KMQ_OK);
        if (i == 10) before = count.bytes;
    }
    assert_int_equal(count.bytes, before);
    assert_int_equal(count.bytes, kmq_lease_book_bytes(&book));
    kmq_lease_book_free(&book);
    assert_int_equal(count.bytes, 0);
}

/* ---- a naive book: an array of cells */

struct cell {
    bool open, flight;
    int64_t due_ms, marker;
    uint8_t cause, flags;
    int text; /* 0 = none */
};

enum { CELLS = 4096 };
static const char *const texts[] = {NULL, "one", "a second one", "x"};

struct naive {
    int64_t base, log_time_ms;
    struct cell cells[CELLS];
};

static int64_t plus(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

static void naive_apply(struct naive *naive, kmq_marker_type type, const kmq_range *runs, size_t n, int64_t ms,
                        uint8_t cause, uint8_t flags, int text, int64_t mo, int64_t ts)
{
    if (ts > naive->log_time_ms) naive->log_time_ms = ts;
    int64_t due_ms = plus(naive->log_time_ms, ms);
    for (size_t i = 0; i < n; i++) {
        for (int64_t o = runs[i].lo; o < runs[i].hi; o++) {
            struct cell *cell = &naive->cells[o - naive->base];
            bool flight = cell->open && cell->flight;
            switch (type) {
            case KMQ_MARKER_START:
                *cell = (struct cell){true, flight, due_ms, mo, KMQ_RETRY_CRASH, KMQ_FLAG_COUNTS, 0};
                break;
            case KMQ_MARKER_PARK:
                *cell = (struct cell){true, flight, ms, mo, KMQ_RETRY_RELEASED, KMQ_FLAG_PARKED, 0};
                break;
            case KMQ_MARKER_END: *cell = (struct cell){0}; break;
            case KMQ_MARKER_EXTEND:
                if (cell->open && cell->cause == KMQ_RETRY_CRASH) cell->due_ms = due_ms;
                break;
            case KMQ_MARKER_RETRY:
                if (cell->open) *cell = (struct cell){true, flight, due_ms, cell->marker, cause, flags, text};
                break;
            case KMQ_MARKER_CHECKPOINT:
            case KMQ_MARKER_CLOCK: break;
            }
        }
    }
}

static bool naive_due(const struct cell *cell, int64_t now_ms)
{
    return cell->open && !cell->flight && cell->due_ms <= now_ms && cell->due_ms < INT64_MAX;
}

static void compare_cell(const struct naive *naive, const kmq_lease_book *book, int64_t i)
{
    kmq_due due;
    const struct cell *cell = &naive->cells[i];
    bool has = kmq_lease_book_has(book, naive->base + i, &due);
    assert_int_equal(has, cell->open);
    if (!has) return;
    const char *text = texts[cell->text];
    assert_int_equal(due.due_ms, cell->due_ms);
    assert_int_equal(due.cause, cell->cause);
    assert_int_equal(due.flags, cell->flags);
    assert_int_equal(due.text_len, text != NULL ? strlen(text) : 0);
    if (text != NULL) assert_memory_equal(due.text, text, due.text_len);
    assert_int_equal(kmq_lease_book_still_due(book, naive->base + i, INT64_MAX),
                     cell->flight && cell->due_ms < INT64_MAX);
}

static void compare_sums(const struct naive *naive, const kmq_lease_book *book)
{
    int64_t open = 0, flying = 0, next_due = INT64_MAX, floor = INT64_MAX, now_ms = naive->log_time_ms, due = 0,
            ever = 0;
    for (int i = 0; i < CELLS; i++) {
        const struct cell *cell = &naive->cells[i];
        if (!cell->open) continue;
        open++;
        flying += cell->flight;
        if (!cell->flight && cell->due_ms < next_due) next_due = cell->due_ms;
        due += naive_due(cell, now_ms);
        ever += naive_due(cell, INT64_MAX);
        if (cell->marker < floor) floor = cell->marker;
    }
    assert_int_equal(kmq_lease_book_open(book), open);
    assert_int_equal(kmq_lease_book_in_flight(book), flying);
    assert_int_equal(kmq_lease_book_next_due(book), next_due);
    assert_int_equal(kmq_lease_book_count_due(book, now_ms, SIZE_MAX), due);
    assert_int_equal(kmq_lease_book_count_due(book, INT64_MAX, SIZE_MAX), ever);
    assert_int_equal(kmq_lease_book_count_due(book, INT64_MAX, 0), 0);
    assert_int_equal(kmq_lease_book_floor(book), open > 0 ? floor : -1);
}

static void compare_all(const struct naive *naive, const kmq_lease_book *book)
{
    int64_t cursor = INT64_MIN, due_ms, at = 0;
    kmq_range run;
    uint8_t cause, flags;
    for (int64_t i = 0; i < CELLS; i++) compare_cell(naive, book, i);
    compare_sums(naive, book);
    while (kmq_lease_book_next(book, &cursor, &run, &due_ms, &cause, &flags)) {
        for (; at < run.lo - naive->base; at++) assert_false(naive->cells[at].open);
        for (; at < run.hi - naive->base; at++) {
            const struct cell *cell = &naive->cells[at];
            assert_true(cell->open && cell->due_ms == due_ms && cell->cause == cause && cell->flags == flags);
        }
    }
    for (; at < CELLS; at++) assert_false(naive->cells[at].open);
}

/* Ascending runs within the cells: a single, a stretch, or a pattern. */
static size_t random_runs(kmq_rng *rng, int64_t base, int64_t span, kmq_range *runs)
{
    size_t n = 0;
    int64_t lo = (int64_t)kmq_rng_below(rng, (uint64_t)span);
    int64_t len = 1 + (int64_t)kmq_rng_below(rng, kmq_rng_chance(rng, 3) ? (uint64_t)span : 64);
    int64_t end = lo + len < span ? lo + len : span;
    switch (kmq_rng_below(rng, 4)) {
    case 0: runs[n++] = (kmq_range){base + lo, base + lo + 1}; break;
    case 1: runs[n++] = (kmq_range){base + lo, base + end}; break;
    default: {
        uint64_t gap = 1 + kmq_rng_below(rng, 9), stretch = 1 + kmq_rng_below(rng, 9);
        while (lo < end && n < RUNS_MAX) {
            int64_t hi = lo + 1 + (int64_t)kmq_rng_below(rng, stretch);
            if (hi > end) hi = end;
            runs[n++] = (kmq_range){base + lo, base + hi};
            lo = hi + (int64_t)kmq_rng_below(rng, gap + 1);
        }
    }
    }
    return n;
}

struct op {
    kmq_marker_type type;
    size_t n;
    int64_t ms, ts;
    uint8_t cause, flags;
    int text;
    kmq_range runs[RUNS_MAX];
};

static void random_op(kmq_rng *rng, int64_t base, int64_t span, int64_t *clock, struct op *op)
{
    static const kmq_marker_type types[] = {KMQ_MARKER_START, KMQ_MARKER_START, KMQ_MARKER_START,  KMQ_MARKER_END,
                                            KMQ_MARKER_END,   KMQ_MARKER_END,   KMQ_MARKER_EXTEND, KMQ_MARKER_RETRY,
                                            KMQ_MARKER_RETRY, KMQ_MARKER_PARK};
    *clock += (int64_t)kmq_rng_below(rng, 4);
    op->type = types[kmq_rng_below(rng, sizeof types / sizeof types[0])];
    op->n = random_runs(rng, base, span, op->runs);
    op->ts = *clock - (int64_t)kmq_rng_below(rng, 3);
    op->ms = kmq_rng_chance(rng, 50) ? INT64_MAX : (int64_t)kmq_rng_below(rng, 5) * 10;
    if (op->type == KMQ_MARKER_PARK) op->ms = plus(op->ms, *clock);
    op->cause = op->type == KMQ_MARKER_RETRY ? (uint8_t)kmq_rng_below(rng, 5) : 0;
    op->flags = op->type == KMQ_MARKER_RETRY ? (uint8_t)kmq_rng_below(rng, 4) : 0;
    op->text = op->type == KMQ_MARKER_RETRY && kmq_rng_chance(rng, 2) ? (int)kmq_rng_below(rng, 4) : 0;
}

static int op_apply(const struct op *op, kmq_lease_book *book, int64_t mo)
{
    kmq_marker marker =
        marker_of(op->type, op->runs, op->n, op->ms, op->cause, op->flags, op->text != 0 ? texts[op->text] : NULL);
    return kmq_lease_book_apply(book, &marker, mo, op->ts);
}

static void op_apply_naive(const struct op *op, struct naive *naive, int64_t mo)
{
    naive_apply(naive, op->type, op->runs, op->n, op->ms, op->cause, op->flags, op->text, mo, op->ts);
}

static void take_and_compare(kmq_rng *rng, struct naive *naive, kmq_lease_book *book, int64_t now_ms, int64_t span)
{
    static kmq_due due[CELLS];
    size_t max = 1 + (size_t)kmq_rng_below(rng, kmq_rng_chance(rng, 4) ? CELLS : 40), n = 0;
    int64_t below = kmq_rng_chance(rng, 2) ? INT64_MAX : naive->base + (int64_t)kmq_rng_below(rng, (uint64_t)span);
    size_t got = kmq_lease_book_take_due(book, now_ms, below, due, max);
    for (int64_t i = 0; i < CELLS && naive->base + i < below && n < max; i++) {
        struct cell *cell = &naive->cells[i];
        if (!naive_due(cell, now_ms)) continue;
        assert_true(n < got);
        assert_int_equal(due[n].offset, naive->base + i);
        assert_int_equal(due[n].due_ms, cell->due_ms);
        cell->flight = true;
        n++;
    }
    assert_int_equal(n, got);
}

struct coming {
    const struct naive *naive;
    int64_t after_ms, until_ms, at; /* cells before `at` are looked at */
    size_t n, most;
};

static bool comes(const struct coming *coming, int64_t i)
{
    const struct cell *cell = &coming->naive->cells[i];
    return naive_due(cell, coming->until_ms) && cell->due_ms > coming->after_ms && cell->cause != KMQ_RETRY_CRASH;
}

static bool one_comes(void *ctx, int64_t offset)
{
    struct coming *coming = ctx;
    int64_t i = offset - coming->naive->base;
    for (; coming->at < i; coming->at++) assert_false(comes(coming, coming->at));
    assert_int_equal(coming->at, i);
    assert_true(comes(coming, coming->at++));
    return ++coming->n < coming->most;
}

static void compare_coming(kmq_rng *rng, const struct naive *naive, const kmq_lease_book *book, int64_t after_ms)
{
    struct coming coming = {
        .naive = naive, .after_ms = after_ms, .until_ms = after_ms + (int64_t)kmq_rng_below(rng, 40)};
    if (kmq_rng_chance(rng, 9)) coming.until_ms = INT64_MAX;
    coming.most = kmq_rng_chance(rng, 3) ? 1 + (size_t)kmq_rng_below(rng, 9) : SIZE_MAX;
    kmq_lease_book_coming(book, coming.after_ms, coming.until_ms, one_comes, &coming);
    if (coming.n == coming.most) return;
    for (; coming.at < CELLS; coming.at++) assert_false(comes(&coming, coming.at));
}

static struct naive model;

static void model_run(kmq_rng *rng, int64_t base, int64_t span, int64_t ops)
{
    static struct op op;
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_lease_book book;
    int64_t clock = 1000;
    (void)kmq_lease_book_init(&book, &alloc);
    memset(&model, 0, sizeof model);
    model.base = base;
    model.log_time_ms = INT64_MIN;
    for (int64_t i = 0; i < ops; i++) {
        uint64_t what = kmq_rng_below(rng, 20);
        int64_t at = (int64_t)kmq_rng_below(rng, (uint64_t)span);
        if (what < 15) {
            random_op(rng, base, span, &clock, &op);
            assert_int_equal(op_apply(&op, &book, i), KMQ_OK);
            op_apply_naive(&op, &model, i);
        } else if (what < 17) {
            compare_coming(rng, &model, &book, clock + (int64_t)kmq_rng_below(rng, 20) - 10);
            take_and_compare(rng, &model, &book, clock + (int64_t)kmq_rng_below(rng, 20), span);
        } else {
            assert_int_equal(kmq_lease_book_give_back(&book, base + at), KMQ_OK);
            model.cells[at].flight = false;
        }
        compare_cell(&model, &book, at);
        kmq_lease_book_check(&book);
        if (i % 64 == 0) compare_sums(&model, &book);
        if (i % 1024 == 0) compare_all(&model, &book);
        assert_int_equal(kmq_lease_book_log_time(&book), model.log_time_ms);
    }
    compare_all(&model, &book);
    assert_int_equal(count.bytes, kmq_lease_book_bytes(&book));
    kmq_lease_book_free(&book);
    assert_int_equal(count.blocks, 0);
}

static void test_model(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    model_run(&rng, 0, 40, kmq_test_scale(40000));
    model_run(&rng, 1000, 1500, kmq_test_scale(10000));
    model_run(&rng, INT64_C(5000000000), CELLS, kmq_test_scale(6000));
    model_run(&rng, INT64_MAX - CELLS, CELLS, kmq_test_scale(2000));
}

/* Single offsets only, many, in random order: the tree splits, joins and shrinks. Millions of changes, checked at the
 * end of each round. */
static void test_singles(void **state)
{
    (void)state;
    enum { N = 1 << 15 };
    static int64_t due[N];
    kmq_rng rng = kmq_test_rng(__func__);
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book book;
    (void)kmq_lease_book_init(&book, &alloc);
    int64_t mo = 0, open = 0;
    memset(due, 0xff, sizeof due);
    for (int round = 0; round < 24; round++) {
        uint64_t closing = (uint64_t)round % 3; /* filling up, holding, emptying */
        for (int64_t i = 0; i < kmq_test_scale(30000); i++) {
            int64_t at = (int64_t)kmq_rng_below(&rng, N);
            bool end = kmq_rng_below(&rng, 4) < 1 + closing;
            kmq_marker marker = {.type = end ? KMQ_MARKER_END : KMQ_MARKER_START,
                                 .set = {.single = at * 7},
                                 .time_ms = (int64_t)kmq_rng_below(&rng, 1000)};
            assert_int_equal(kmq_lease_book_apply(&book, &marker, mo++, 0), KMQ_OK);
            open += (end ? 0 : 1) - (due[at] >= 0 ? 1 : 0);
            due[at] = end ? -1 : marker.time_ms;
        }
        kmq_lease_book_check(&book);
        assert_int_equal(kmq_lease_book_open(&book), open);
        for (int64_t i = 0; i < N; i++) {
            kmq_due out;
            assert_int_equal(kmq_lease_book_has(&book, i * 7, &out), due[i] >= 0);
            if (due[i] >= 0) assert_int_equal(out.due_ms, due[i]);
        }
    }
    for (int64_t i = 0; i < N; i++) {
        kmq_marker marker = {.type = KMQ_MARKER_END, .set = {.single = i * 7}};
        assert_int_equal(kmq_lease_book_apply(&book, &marker, mo++, 0), KMQ_OK);
    }
    kmq_lease_book_check(&book);
    assert_int_equal(kmq_lease_book_open(&book), 0);
    kmq_lease_book_free(&book);
}

static int count_leases(const kmq_lease_book *book)
{
    kmq_lease_path path;
    int n = 0;
    if (!kmq_lease_tree_seek(&book->tree, 0, &path)) return 0;
    do n++;
    while (kmq_lease_tree_next(&book->tree, &path));
    return n;
}

/* Offsets that got a deadline of their own join again when they are extended with the rest. */
static void test_merge(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book book;
    static kmq_range odd[1024];
    (void)kmq_lease_book_init(&book, &alloc);
    feed(&book, KMQ_MARKER_START, 0, 400, 50, 1, 0); /* one record's terms, in two pieces */
    feed(&book, KMQ_MARKER_START, 400, 1000, 50, 1, 0);
    assert_int_equal(kmq_lease_book_open(&book), 1000);
    assert_int_equal(count_leases(&book), 1);
    for (int i = 0; i < 500; i++) odd[i] = (kmq_range){2 * i, 2 * i + 1};
    kmq_marker marker = marker_of(KMQ_MARKER_EXTEND, odd, 500, 70, 0, 0, NULL);
    assert_int_equal(kmq_lease_book_apply(&book, &marker, 2, 0), KMQ_OK);
    kmq_lease_book_check(&book);
    assert_int_equal(count_leases(&book), 1000); /* every other one has another deadline */
    feed(&book, KMQ_MARKER_EXTEND, 0, 1000, 90, 3, 0);
    assert_int_equal(count_leases(&book), 1);
    kmq_range run;
    int64_t cursor = INT64_MIN;
    assert_true(kmq_lease_book_next(&book, &cursor, &run, NULL, NULL, NULL));
    assert_int_equal(run.hi, 1000);
    /* taken in slices and given back one by one: whole again */
    kmq_due due[300];
    while (kmq_lease_book_take_due(&book, 90, INT64_MAX, due, 300) > 0) kmq_lease_book_check(&book);
    for (int64_t i = 0; i < 1000; i++) assert_int_equal(kmq_lease_book_give_back(&book, (i * 7) % 1000), KMQ_OK);
    kmq_lease_book_check(&book);
    assert_int_equal(kmq_lease_book_in_flight(&book), 0);
    assert_int_equal(count_leases(&book), 1);
    kmq_lease_book_free(&book);
}

/* ---- memory that runs out: at each allocation once, and from each on for good */

static void walk_digest(const kmq_lease_book *book, uint64_t *digest)
{
    kmq_due due;
    int64_t cursor = INT64_MIN;
    kmq_range run;
    *digest = (uint64_t)kmq_lease_book_log_time(book);
    while (kmq_lease_book_next(book, &cursor, &run, NULL, NULL, NULL)) {
        for (int64_t o = run.lo; o < run.hi; o++) {
            assert_true(kmq_lease_book_has(book, o, &due));
            uint64_t parts[] = {(uint64_t)o, (uint64_t)due.due_ms, due.cause,
                                due.flags,   due.text_len,         kmq_lease_book_still_due(book, o, INT64_MAX)};
            for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
                *digest = (*digest ^ parts[i]) * 0x100000001b3u + (*digest >> 29);
        }
    }
    *digest = *digest * 31 + (uint64_t)kmq_lease_book_floor(book);
    *digest = *digest * 31 + (uint64_t)kmq_lease_book_next_due(book);
}

/* the same history; at step `at` memory fails, and the step is tried again with memory */
static bool fail_run(uint64_t seed, int steps, int at, uint64_t fail_at, bool forever, uint64_t *digest)
{
    static struct op op;
    kmq_rng rng = {seed};
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_lease_book book;
    kmq_due due[64];
    int64_t clock = 1000;
    bool failed = false;
    (void)kmq_lease_book_init(&book, &alloc);
    for (int i = 0; i < steps; i++) {
        uint64_t before, after;
        random_op(&rng, 0, 2500, &clock, &op);
        bool take = kmq_rng_chance(&rng, 4);
        int64_t back = (int64_t)kmq_rng_below(&rng, 2500);
        if (i == at) {
            walk_digest(&book, &before);
            fail.calls = 0;
            fail.fail_at = fail_at;
            fail.forever = forever;
        }
        int rc = op_apply(&op, &book, i);
        if (i == at) {
            fail.fail_at = 0;
            failed = fail.calls >= fail_at;
            kmq_lease_book_check(&book);
            if (rc != KMQ_OK) {
                assert_int_equal(rc, KMQ_ENOMEM);
                walk_digest(&book, &after);
                assert_int_equal(before, after);
                assert_int_equal(op_apply(&op, &book, i), KMQ_OK);
            }
        }
        if (take) (void)kmq_lease_book_take_due(&book, clock, INT64_MAX, due, 64);
        assert_int_equal(kmq_lease_book_give_back(&book, back), KMQ_OK);
    }
    kmq_lease_book_check(&book);
    walk_digest(&book, digest);
    kmq_lease_book_free(&book);
    assert_int_equal(fail.blocks, 0);
    return failed;
}

static void test_no_memory(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    for (int round = 0; round < (int)kmq_test_scale(5); round++) {
        uint64_t seed = kmq_rng_next(&rng), want, got;
        int steps = 30;
        (void)fail_run(seed, steps, -1, 0, false, &want);
        for (int at = 0; at < steps; at++) {
            for (int forever = 0; forever < 2; forever++) {
                for (uint64_t i = 1; fail_run(seed, steps, at, i, forever != 0, &got); i++) {
                    assert_int_equal(got, want);
                    if (i > 40 && !getenv("KMQ_LONG")) i += i / 4; /* the spare nodes of a large plan are all alike */
                }
                assert_int_equal(got, want);
            }
        }
    }
}

/* Taking and giving back without memory: fewer are taken, none is lost. */
static void test_no_memory_take(void **state)
{
    (void)state;
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_lease_book book;
    kmq_due due[100];
    (void)kmq_lease_book_init(&book, &alloc);
    feed(&book, KMQ_MARKER_START, 0, 1000, 0, 1, 10);
    kmq_lease_tree_trim(&book.tree, 0);
    fail.fail_at = fail.calls + 1;
    fail.forever = true;
    assert_int_equal(kmq_lease_book_take_due(&book, 10, INT64_MAX, due, 100), 0);
    assert_int_equal(kmq_lease_book_next_due(&book), 10);
    fail.fail_at = 0;
    assert_int_equal(kmq_lease_book_take_due(&book, 10, INT64_MAX, due, 100), 100);
    kmq_lease_tree_trim(&book.tree, 0);
    fail.fail_at = fail.calls + 1;
    assert_int_equal(kmq_lease_book_give_back(&book, 50), KMQ_ENOMEM);
    assert_true(kmq_lease_book_still_due(&book, 50, 10));
    fail.fail_at = 0;
    assert_int_equal(kmq_lease_book_give_back(&book, 50), KMQ_OK);
    assert_int_equal(kmq_lease_book_in_flight(&book), 99);
    kmq_lease_book_check(&book);
    kmq_lease_book_free(&book);
    assert_int_equal(fail.blocks, 0);
}

/* ---- checkpoints */

struct parts {
    size_t n;
    struct {
        uint8_t *entries;
        size_t bytes;
    } part[64];
};

static int keep_part(void *ctx, const uint8_t *entries, size_t bytes)
{
    struct parts *parts = ctx;
    assert_true(parts->n < 64 && bytes > 0 && bytes <= KMQ_CHECKPOINT_ENTRIES_MAX);
    parts->part[parts->n].entries = malloc(bytes);
    memcpy(parts->part[parts->n].entries, entries, bytes);
    parts->part[parts->n++].bytes = bytes;
    return 0;
}

/* book -> records -> new book */
static void copy_book(const kmq_lease_book *book, int64_t as_of, kmq_lease_book *copy)
{
    struct parts parts = {0};
    kmq_marker marker;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_alloc alloc = kmq_alloc_libc();
    (void)kmq_lease_book_init(copy, &alloc);
    assert_int_equal(kmq_lease_book_checkpoint(book, keep_part, &parts), KMQ_OK);
    if (parts.n == 0) {
        assert_int_equal(kmq_lease_book_open(book), 0);
        parts.n = 1; /* for the log time */
    }
    int64_t log_time_ms = kmq_lease_book_log_time(book);
    kmq_marker_tlv tlv = {.log_time_ms = log_time_ms, .has_log_time = log_time_ms >= 0};
    for (size_t i = 0; i < parts.n; i++) {
        int len = kmq_marker_encode_checkpoint(record, sizeof record, &scope, as_of, (uint32_t)i, (uint32_t)parts.n,
                                               parts.part[i].entries, parts.part[i].bytes, &tlv);
        assert_true(len > 0);
        kmq_marker_encode_key(key, 3, -1);
        assert_int_equal(kmq_marker_decode(&scope, 3, key, sizeof key, record, (size_t)len, NULL, 0, &marker),
                         KMQ_MARKER_OURS);
        assert_int_equal(kmq_lease_book_load(copy, &marker), KMQ_OK);
        free(parts.part[i].entries);
    }
}

static void same_books(const kmq_lease_book *a, const kmq_lease_book *b)
{
    int64_t at = INT64_MIN, bt = INT64_MIN, due_a, due_b;
    uint8_t cause_a, cause_b, flags_a, flags_b;
    kmq_range x, y;
    for (;;) {
        bool more = kmq_lease_book_next(a, &at, &x, &due_a, &cause_a, &flags_a);
        assert_int_equal(more, kmq_lease_book_next(b, &bt, &y, &due_b, &cause_b, &flags_b));
        if (!more) break;
        assert_int_equal(x.lo, y.lo);
        assert_int_equal(x.hi, y.hi);
        assert_int_equal(due_a, due_b);
        assert_int_equal(cause_a, cause_b);
        assert_int_equal(flags_a, flags_b);
    }
    assert_int_equal(kmq_lease_book_open(a), kmq_lease_book_open(b));
    assert_int_equal(kmq_lease_book_log_time(a), kmq_lease_book_log_time(b));
}

static void test_checkpoint(void **state)
{
    (void)state;
    enum { STEPS = 40 };
    static struct op ops[STEPS];
    kmq_rng rng = kmq_test_rng(__func__);
    kmq_alloc alloc = kmq_alloc_libc();
    for (int64_t round = 0; round < kmq_test_scale(15); round++) {
        kmq_lease_book book, copy, final;
        int64_t clock = 1000;
        (void)kmq_lease_book_init(&final, &alloc);
        for (int i = 0; i < STEPS; i++) {
            random_op(&rng, 0, 3000, &clock, &ops[i]);
            assert_int_equal(op_apply(&ops[i], &final, i), KMQ_OK);
        }
        (void)kmq_lease_book_init(&book, &alloc);
        for (int cut = 0; cut <= STEPS; cut++) { /* book holds the steps before the cut */
            copy_book(&book, cut, &copy);
            kmq_lease_book_check(&copy);
            same_books(&book, &copy);
            assert_int_equal(kmq_lease_book_floor(&copy), kmq_lease_book_open(&book) > 0 ? cut : -1);
            for (int i = cut; i < STEPS; i++) assert_int_equal(op_apply(&ops[i], &copy, i), KMQ_OK);
            same_books(&final, &copy);
            kmq_lease_book_free(&copy);
            if (cut < STEPS) assert_int_equal(op_apply(&ops[cut], &book, cut), KMQ_OK);
        }
        kmq_lease_book_free(&book);
        kmq_lease_book_free(&final);
    }
}

/* more than one record's worth, and a sink that refuses */
static int refuse(void *ctx, const uint8_t *entries, size_t bytes)
{
    (void)ctx, (void)entries, (void)bytes;
    return KMQ_EFULL;
}

static void test_checkpoint_parts(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_lease_book book, copy;
    kmq_fail_alloc fail;
    (void)kmq_lease_book_init(&book, &alloc);
    for (int64_t i = 0; i < 20000; i++) {
        kmq_marker marker = {.type = KMQ_MARKER_START, .set = {.single = i * 3}, .time_ms = i % 977};
        assert_int_equal(kmq_lease_book_apply(&book, &marker, i, 1000000 + i), KMQ_OK);
    }
    copy_book(&book, 20000, &copy);
    same_books(&book, &copy);
    assert_int_equal(kmq_lease_book_checkpoint(&book, refuse, NULL), KMQ_EFULL);
    kmq_lease_book_free(&copy);
    kmq_lease_book_free(&book);
    alloc = kmq_fail_alloc_init(&fail);
    fail.fail_at = 1;
    (void)kmq_lease_book_init(&book, &alloc);
    assert_int_equal(kmq_lease_book_checkpoint(&book, refuse, NULL), KMQ_ENOMEM);
    assert_int_equal(kmq_lease_book_load(&book, &(kmq_marker){.type = KMQ_MARKER_CLOCK}), KMQ_EINVAL);
    kmq_lease_book_free(&book);
}

/* ---- the reference model's histories */

static uint32_t digest_text(const char *text)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++) h = (h ^ (uint8_t)*text) * 0x100000001b3u;
    return (uint32_t)((h ^ h >> 16 ^ h >> 32 ^ h >> 48) & 0xffff);
}

/* The book as the model's digest has it: offset:kind:due:marker:counts dlq; in offset order. */
static uint32_t book_digest(const kmq_lease_book *book)
{
    static char text[1 << 17];
    kmq_lease_path path;
    kmq_due due;
    int n = snprintf(text, sizeof text, "%lld|", (long long)kmq_lease_book_log_time(book));
    int64_t cursor = INT64_MIN;
    kmq_range run;
    while (kmq_lease_book_next(book, &cursor, &run, NULL, NULL, NULL)) {
        for (int64_t o = run.lo; o < run.hi; o++) {
            assert_true(kmq_lease_book_has(book, o, &due));
            (void)kmq_lease_tree_seek(&book->tree, o, &path);
            char kind = due.cause == KMQ_RETRY_CRASH ? 'L' : (due.flags & KMQ_FLAG_PARKED) != 0 ? 'P' : 'R';
            n += snprintf(text + n, sizeof text - (size_t)n, "%lld:%c:%lld:%lld:%d%d;", (long long)o, kind,
                          (long long)due.due_ms, (long long)kmq_lease_tree_at(&book->tree, &path)->marker,
                          due.flags & KMQ_FLAG_COUNTS, (due.flags & KMQ_FLAG_DLQ) >> 1);
            assert_true((size_t)n < sizeof text - 100);
        }
    }
    return digest_text(text);
}

static void apply_event(kmq_lease_book *book, const char *event, int64_t mo)
{
    static const char names[] = "SEXRP";
    static const kmq_marker_type types[] = {KMQ_MARKER_START, KMQ_MARKER_END, KMQ_MARKER_EXTEND, KMQ_MARKER_RETRY,
                                            KMQ_MARKER_PARK};
    kmq_range runs[64];
    size_t n = 0;
    int64_t ms = 0;
    uint8_t flags = 0;
    const char *name = strchr(names, event[0]);
    assert_non_null(name);
    char *at;
    int64_t ts = strtoll(event + 1, &at, 10);
    do {
        assert_true((*at == '@' || *at == ',') && n < 64);
        runs[n].lo = strtoll(at + 1, &at, 10);
        runs[n].hi = (*at == '-' ? strtoll(at + 1, &at, 10) : runs[n].lo) + 1;
        n++;
    } while (*at == ',');
    if (*at == '+') ms = strtoll(at + 1, &at, 10);
    if (*at == 'f') flags = (uint8_t)strtol(at + 1, &at, 10);
    assert_int_equal(*at, '=');
    kmq_marker marker = marker_of(types[name - names], runs, n, ms, 0, flags, NULL);
    assert_int_equal(kmq_lease_book_apply(book, &marker, mo, ts), KMQ_OK);
    kmq_lease_book_check(book);
    if (book_digest(book) != (uint32_t)strtol(at + 1, NULL, 16)) fail_msg("after event %d: %s", (int)mo, event);
}

static void test_reference(void **state)
{
    (void)state;
    static char line[8192];
    int n = 0;
    FILE *file = fopen(KMQ_VECTORS, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) != NULL) {
        if (line[0] == '#') continue;
        kmq_alloc alloc = kmq_alloc_libc();
        kmq_lease_book book;
        int64_t mo = 0;
        (void)kmq_lease_book_init(&book, &alloc);
        char *save = NULL;
        for (char *event = strtok_r(line, " \n", &save); event != NULL; event = strtok_r(NULL, " \n", &save))
            apply_event(&book, event, mo++);
        kmq_lease_book_free(&book);
        n++;
    }
    (void)fclose(file);
    assert_int_equal(n, 10000);
}

/* ---- the memory that is promised */

static void test_memory(void **state)
{
    (void)state;
    enum { N = 1000000 };
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_lease_book book;
    kmq_rng rng = kmq_test_rng(__func__);
    (void)kmq_lease_book_init(&book, &alloc);
    for (int64_t i = 0; i < N; i += 1000) feed(&book, KMQ_MARKER_START, i, i + 1000, 30000, i / 1000, i);
    assert_true(count.bytes < N * 3 / 10);
    for (int64_t i = 0; i < N / 5; i++) { /* one in five acknowledged, anywhere */
        kmq_marker marker = {.type = KMQ_MARKER_END, .set = {.single = (int64_t)kmq_rng_below(&rng, N)}};
        assert_int_equal(kmq_lease_book_apply(&book, &marker, 1000, N), KMQ_OK);
    }
    assert_true(count.bytes < N * 3 / 10); /* holes cost a bit an offset */
    kmq_lease_book_free(&book);

    (void)kmq_lease_book_init(&book, &alloc);
    for (int64_t i = 0; i < N; i++) { /* in no order, each with a deadline of its own, 10 apart */
        kmq_marker marker = {.type = KMQ_MARKER_START, .set = {.single = i * 7919 % N * 10}, .time_ms = i};
        assert_int_equal(kmq_lease_book_apply(&book, &marker, i, i), KMQ_OK);
    }
    assert_int_equal(kmq_lease_book_open(&book), N);
    assert_true(count.bytes < (size_t)N * 48);
    kmq_lease_book_free(&book);
    assert_int_equal(count.blocks, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_traces),
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_seek_due),
        cmocka_unit_test(test_no_residue),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_singles),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_no_memory_take),
        cmocka_unit_test(test_checkpoint),
        cmocka_unit_test(test_checkpoint_parts),
        cmocka_unit_test(test_reference),
        cmocka_unit_test(test_memory),
    };
    kmq_marker_scope_init(&scope, "orders", 6, "workers", 7);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
