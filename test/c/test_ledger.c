/* The ledger against a naive one: a list of the fetched offsets, each with its state, searched from end to end for
 * every question. Then what only shows at size: full chunks, memory, forgotten late ones. */
#include "kmq_test.h"

#include <string.h>

#include "ledger.h"

/* ---- the naive ledger */

typedef enum item_state { UNSTARTED, STARTING, READY, PARKING, OPEN, LATE, GONE } item_state;

typedef struct item {
    int64_t offset, limit, shared; /* shared: the limit of its hand-out */
    item_state state;
    int end;  /* cause of the END it waits for, -1 none */
    bool own; /* a limit of its own */
} item;

enum { ITEMS_MAX = 300, TAKEN_MAX = 32 };

typedef struct taken { /* what take_end gave and may come back */
    kmq_end_cause cause;
    kmq_range range;
} taken;

typedef struct model {
    kmq_delivery delivery;
    bool retired;
    int64_t position, covered, max, last_limit;
    int64_t
        latest;  /* the latest `now` a limit was looked at with: what has passed stays passed when a clock goes back */
    int64_t now; /* of the call: limits of their own are looked at with that */
    kmq_ledger_counts counts;
    size_t n;
    item items[ITEMS_MAX];
    size_t n_taken;
    taken taken[TAKEN_MAX];
} model;

static item *model_find(model *m, int64_t offset)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->items[i].offset == offset) return &m->items[i];
    return NULL;
}

static bool is_waiting(const item *it) { return it->state <= PARKING; }

static int64_t model_limit(model *m, int64_t now)
{
    int64_t step = m->max / 1024 > 1 ? m->max / 1024 : 1;
    __extension__ __int128 limit = (__int128)now + m->max;
    while (m->max != INT64_MAX && limit % step != 0) limit++;
    if (m->max == INT64_MAX || limit > INT64_MAX) limit = INT64_MAX;
    if (limit < m->last_limit) limit = m->last_limit;
    return m->last_limit = (int64_t)limit;
}

/* ---- the answers of both, side by side */

/* What a seek beyond everything would have to end: the STARTed and starting ones, each once. */
static void compare_unseen(const kmq_ledger *ledger, const model *m)
{
    int64_t cursor = INT64_MIN, next = 0;
    kmq_range ranges[3];
    size_t n;
    do {
        assert_int_equal(kmq_ledger_unseen(ledger, INT64_MAX, &cursor, ranges, 3, &n), KMQ_OK);
        for (size_t r = 0; r < n; r++)
            for (int64_t o = ranges[r].lo; o < ranges[r].hi; o++) {
                while (next < (int64_t)m->n && m->items[next].state != READY && m->items[next].state != STARTING)
                    next++;
                assert_true(next < (int64_t)m->n);
                assert_int_equal(m->items[next++].offset, o);
            }
    } while (n > 0);
    while (next < (int64_t)m->n && m->items[next].state != READY && m->items[next].state != STARTING) next++;
    assert_int_equal(next, m->n);
}

/* When the oldest was handed out; when the shared limit has passed, any time from then on, up to the last that passed, will do. */
static void compare_age(const kmq_ledger *ledger, const model *m, int64_t oldest)
{
    int64_t since = kmq_ledger_oldest_open_ms(ledger), limit = INT64_MAX;
    for (size_t i = 0; i < m->n && oldest >= 0; i++)
        if (m->items[i].offset == oldest) limit = m->items[i].shared;
    if (limit == INT64_MAX)
        assert_int_equal(since, INT64_MAX);
    else if (since != limit - m->max)
        assert_true(since > limit - m->max && since <= ledger->overdue_ms - m->max);
}

static void compare(const kmq_ledger *ledger, const model *m)
{
    int64_t ready = 0, waiting = 0, parking = 0, open = 0, ends = 0, oldest = -1, next_timeout = INT64_MAX,
            floor = INT64_MAX;
    bool all_ready = true, unstarted = false;
    for (size_t i = 0; i < m->n; i++) {
        const item *it = &m->items[i];
        if (is_waiting(it)) {
            if (it->state != READY) all_ready = false;
            unstarted = unstarted || it->state == UNSTARTED;
            if (all_ready) ready++;
            assert_int_equal(kmq_ledger_waiting_offset(ledger, waiting), it->offset);
            waiting++;
            parking += it->state == PARKING;
        }
        if (it->state == OPEN) {
            open++;
            if (oldest < 0) oldest = it->offset;
            if (it->limit < next_timeout) next_timeout = it->limit;
        }
        if ((is_waiting(it) || (m->delivery == KMQ_DELIVERY_OFFSETS && it->state == OPEN)) && floor == INT64_MAX)
            floor = it->offset;
        ends += it->end >= 0;
    }
    if (floor > m->position) floor = m->position;
    if (m->delivery != KMQ_DELIVERY_MARKERS) next_timeout = INT64_MAX;
    kmq_ledger_check(ledger);
    assert_int_equal(kmq_ledger_waiting_offset(ledger, waiting), m->position);
    assert_int_equal(kmq_ledger_ready(ledger), ready);
    assert_int_equal(kmq_ledger_unstarted(ledger), unstarted);
    assert_int_equal(kmq_ledger_waiting(ledger), waiting);
    assert_int_equal(kmq_ledger_parking(ledger), parking);
    assert_int_equal(kmq_ledger_open(ledger), open);
    assert_int_equal(kmq_ledger_ends(ledger), ends);
    assert_int_equal(kmq_ledger_oldest_open(ledger), oldest);
    if (oldest >= 0) assert_true(kmq_ledger_is_open(ledger, oldest));
    assert_false(kmq_ledger_is_open(ledger, oldest - 1));
    assert_false(kmq_ledger_is_open(ledger, ledger->position));
    assert_int_equal(kmq_ledger_floor(ledger), floor);
    compare_age(ledger, m, oldest);
    if (m->delivery == KMQ_DELIVERY_MARKERS) compare_unseen(ledger, m);
    int64_t got_timeout = kmq_ledger_next_timeout(ledger);
    if (got_timeout !=
        next_timeout) { /* passed already and asked about: any time that has passed will do, up to the last */
        assert_true(got_timeout > next_timeout && got_timeout <= ledger->overdue_ms);
    }
    kmq_ledger_counts counts = kmq_ledger_counters(ledger);
    assert_int_equal(counts.repeats, m->counts.repeats);
    assert_int_equal(counts.unknown, m->counts.unknown);
    assert_int_equal(counts.late, m->counts.late);
}

/* What a call gave as ranges must be the offsets of the items that pass `want`, in order, as far as it went: all of
 * them when `all`. Neighbouring ranges do not touch. Returns how many offsets it gave. */
typedef bool (*item_test)(const model *m, const item *it, int64_t arg);

static size_t assert_ranges(const model *m, item_test want, int64_t arg, const kmq_range *out, size_t n, bool all)
{
    size_t i = 0, offsets = 0;
    for (size_t r = 0; r < n; r++) {
        assert_true(out[r].lo < out[r].hi);
        if (r > 0) assert_true(out[r - 1].hi < out[r].lo);
        for (int64_t o = out[r].lo; o < out[r].hi; o++, i++, offsets++) {
            while (i < m->n && !want(m, &m->items[i], arg)) i++;
            assert_true(i < m->n);
            assert_int_equal(m->items[i].offset, o);
        }
    }
    for (; all && i < m->n; i++) assert_false(want(m, &m->items[i], arg));
    return offsets;
}

static bool want_held(const model *m, const item *it, int64_t from)
{
    return m->delivery == KMQ_DELIVERY_MARKERS && it->offset >= from && (it->state == OPEN || it->state == READY);
}

static bool want_covered(const model *m, const item *it, int64_t from)
{
    return m->delivery == KMQ_DELIVERY_MARKERS && it->offset >= from && it->state == READY && it->offset < m->covered;
}

static bool want_end(const model *m, const item *it, int64_t cause)
{
    (void)m;
    return it->end == cause;
}

static bool want_timeout(const model *m, const item *it, int64_t now)
{
    return m->delivery == KMQ_DELIVERY_MARKERS && it->state == OPEN && it->limit <= (it->own ? m->now : now) &&
           it->limit != INT64_MAX;
}

static bool want_start(const model *m, const item *it, int64_t arg)
{
    (void)m;
    (void)arg;
    return it->state == UNSTARTED;
}

static void compare_walks(const kmq_ledger *ledger, const model *m, size_t max)
{
    for (int covered = 0; covered < 2; covered++) {
        int64_t cursor = INT64_MIN, from;
        kmq_range out[8];
        size_t n;
        do {
            from = cursor;
            if (covered) {
                assert_int_equal(kmq_ledger_covered_waiting(ledger, &cursor, out, max, &n), KMQ_OK);
            } else {
                assert_int_equal(kmq_ledger_held(ledger, &cursor, out, max, &n), KMQ_OK);
            }
            assert_true(n <= max);
            (void)assert_ranges(m, covered ? want_covered : want_held, from, out, n, n == 0);
        } while (n > 0);
    }
}

/* ---- one random operation: made up first, so that it can be done again after a failed allocation */

typedef enum op_kind {
    FETCH,
    SKIP,
    PARK,
    PARKED,
    EXTEND,
    TAKE_START,
    STARTED,
    START_FAILED,
    HAND_OUT,
    SETTLE,
    SETTLE_MANY,
    RETRY,
    TAKE_END,
    END_FAILED,
    TIMEOUTS,
    COVER,
    RETIRE,
    OPS
} op_kind;

typedef struct op {
    op_kind kind;
    int64_t offsets[24];
    size_t n;
    int64_t lo, hi, now;
    size_t max_ranges;
    kmq_end_cause cause;
} op;

static int64_t some_offset(kmq_rng *rng, const model *m, item_state like)
{
    for (int tries = 0; tries < 8 && m->n > 0; tries++) {
        const item *it = &m->items[kmq_rng_below(rng, m->n)];
        if (it->state == like || tries == 7) return it->offset;
    }
    return (int64_t)kmq_rng_below(rng, INT64_MAX);
}

static void make_fetch(kmq_rng *rng, const model *m, op *o)
{
    int64_t at = m->position;
    size_t room = ITEMS_MAX - m->n;
    o->n = kmq_rng_below(rng, 20) + 1;
    if (o->n > room) o->n = room;
    if (kmq_rng_chance(rng, 8)) at = at > 5 ? at - 5 : 0; /* repeats */
    for (size_t i = 0; i < o->n; i++) {
        if (kmq_rng_chance(rng, 6) && at < INT64_MAX - 4) at += (int64_t)kmq_rng_below(rng, 4);
        if (kmq_rng_chance(rng, 100) && at < INT64_MAX / 2) at += 70000;
        if (kmq_rng_chance(rng, 1000) && at < INT64_MAX / 2) at += INT64_C(1) << 40;
        if (at >= INT64_MAX) {
            o->n = i;
            break;
        }
        o->offsets[i] = at++;
    }
}

static op make_op(kmq_rng *rng, const model *m, const kmq_ledger *ledger, int64_t now)
{
    static const op_kind kinds[] = {FETCH,       FETCH,        SKIP,     TAKE_START, TAKE_START, STARTED,
                                    STARTED,     START_FAILED, HAND_OUT, HAND_OUT,   SETTLE,     SETTLE_MANY,
                                    SETTLE_MANY, RETRY,        TAKE_END, TAKE_END,   END_FAILED, TIMEOUTS,
                                    COVER,       PARK,         PARK,     PARKED,     EXTEND,     EXTEND};
    op o = {.kind = kinds[kmq_rng_below(rng, sizeof kinds / sizeof *kinds)], .now = now};
    item_state like = kmq_rng_chance(rng, 4) ? LATE : OPEN;
    o.cause = kmq_rng_chance(rng, 3) ? (kmq_end_cause)kmq_rng_below(rng, KMQ_END_CAUSES) : KMQ_END_ACK;
    o.max_ranges = kmq_rng_below(rng, 6) + 1;
    if (m->n > 0 && kmq_rng_chance(rng, 2000)) o.kind = RETIRE;
    switch (o.kind) {
    case FETCH: make_fetch(rng, m, &o); break;
    case PARK:
    case SKIP: o.lo = m->position + (m->position < INT64_MAX - 4 ? (int64_t)kmq_rng_below(rng, 4) : 0) - 1; break;
    case TAKE_START: o.hi = 1 + (int64_t)kmq_rng_below(rng, 30); break;
    case PARKED:
    case STARTED:
    case START_FAILED:
        o.lo = some_offset(rng, m, o.kind == PARKED ? PARKING : STARTING);
        o.hi = o.lo < INT64_MAX - 40 ? o.lo + (int64_t)kmq_rng_below(rng, 40) : INT64_MAX;
        break;
    case HAND_OUT:
        o.hi = (int64_t)kmq_rng_below(rng, (uint64_t)kmq_ledger_ready(ledger) + 1);
        if (kmq_rng_chance(rng, 50)) o.hi = kmq_ledger_ready(ledger) + 1;
        break;
    case EXTEND:
        o.hi = kmq_rng_chance(rng, 20) ? INT64_MAX : now + (int64_t)kmq_rng_below(rng, 400) - 20; /* fallthrough */
    case SETTLE:
    case RETRY: o.lo = some_offset(rng, m, like); break;
    case SETTLE_MANY:
        o.n = kmq_rng_below(rng, 24) + 1;
        for (size_t i = 0; i < o.n; i++) {
            bool run = i > 0 && o.offsets[i - 1] < INT64_MAX && !kmq_rng_chance(rng, 5);
            o.offsets[i] = run ? o.offsets[i - 1] + 1 : some_offset(rng, m, like);
        }
        break;
    case END_FAILED: o.n = m->n_taken > 0 ? kmq_rng_below(rng, m->n_taken) + 1 : 0; break;
    case COVER: o.lo = m->n > 0 ? some_offset(rng, m, READY) : 0; break;
    case TAKE_END:
    case TIMEOUTS:
    case RETIRE:
    case OPS: break;
    }
    return o;
}

static int model_settle(model *m, int64_t offset, int cause)
{
    item *it = model_find(m, offset);
    if (it == NULL || (it->state != OPEN && it->state != LATE)) {
        m->counts.unknown++;
        return KMQ_EUNKNOWN;
    }
    int rc = it->state == LATE ? KMQ_ELATE : KMQ_OK;
    m->counts.late += it->state == LATE;
    it->state = GONE;
    it->end = m->delivery == KMQ_DELIVERY_MARKERS ? cause : -1;
    return rc;
}

static int model_extend(model *m, const op *o)
{
    item *it = model_find(m, o->lo);
    if (it != NULL && it->state == OPEN) {
        it->limit = o->hi;
        it->own = true;
        return KMQ_OK;
    }
    bool late = it != NULL && it->state == LATE;
    m->counts.late += late;
    m->counts.unknown += !late;
    return late ? KMQ_ELATE : KMQ_EUNKNOWN;
}

static void model_parked(model *m, const op *o)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->items[i].state == PARKING && m->items[i].offset >= o->lo && m->items[i].offset < o->hi)
            m->items[i].state = GONE;
}

static void model_fetch(model *m, const op *o, size_t accepted)
{
    size_t fresh = 0;
    for (size_t i = 0; i < o->n; i++) {
        if (o->offsets[i] < m->position) {
            m->counts.repeats++;
            continue;
        }
        item_state state = m->delivery == KMQ_DELIVERY_MARKERS ? UNSTARTED : READY;
        m->items[m->n++] = (item){.offset = o->offsets[i], .state = state, .end = -1};
        m->position = o->offsets[i] + 1;
        fresh++;
    }
    assert_int_equal(accepted, fresh);
}

static void model_end_starting(model *m, const op *o, item_state state)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->items[i].state == STARTING && m->items[i].offset >= o->lo && m->items[i].offset < o->hi)
            m->items[i].state = state;
}

static void model_hand_out(model *m, const op *o)
{
    int64_t limit = model_limit(m, o->now), left = o->hi;
    if (left > 0 && o->now > m->latest) m->latest = o->now; /* nothing handed out: no limit was looked at */
    for (size_t i = 0; i < m->n && left > 0; i++) {
        if (m->items[i].state != READY) continue;
        m->items[i].state = m->delivery == KMQ_DELIVERY_AT_MOST_ONCE ? GONE : OPEN;
        m->items[i].limit = m->items[i].shared = limit;
        m->items[i].own = false;
        left--;
    }
}

static void model_retire(model *m)
{
    size_t n = 0;
    for (size_t i = m->n; i-- > 0;)
        if (is_waiting(&m->items[i])) m->position = m->items[i].offset;
    for (size_t i = 0; i < m->n; i++)
        if (!is_waiting(&m->items[i])) m->items[n++] = m->items[i];
    m->n = n;
    m->retired = true;
}

/* what take_start must not do: reach over something that was starting before */
static void assert_no_starting_between(const model *m, const kmq_range *out, size_t n)
{
    if (n == 0) return;
    for (size_t i = 0; i < m->n; i++)
        assert_false(m->items[i].state == STARTING && m->items[i].offset >= out[0].lo &&
                     m->items[i].offset < out[n - 1].hi);
}

static void model_take_start(model *m, const op *o, const kmq_range *out, size_t n, bool failed)
{
    size_t unstarted = 0, got = assert_ranges(m, want_start, 0, out, n, false);
    assert_no_starting_between(m, out, n);
    assert_true((int64_t)got <= o->hi);
    for (size_t i = 0; i < m->n; i++) unstarted += m->items[i].state == UNSTARTED;
    if (!failed && unstarted > 0) assert_true(got > 0);
    /* it stops for one of four reasons: no range left, no offset left, nothing unstarted left, something starting
     * between */
    if (!failed && n < o->max_ranges && (int64_t)got < o->hi && got < unstarted) {
        size_t i = 0;
        while (m->items[i].offset < out[n - 1].hi) i++;
        while (m->items[i].state != STARTING) assert_true(m->items[i++].state != UNSTARTED);
    }
    for (size_t i = 0; i < m->n && got > 0; i++)
        if (m->items[i].state == UNSTARTED) {
            m->items[i].state = STARTING;
            got--;
        }
}

static void model_take_end(model *m, const op *o, const kmq_range *out, size_t n)
{
    size_t offsets = assert_ranges(m, want_end, (int64_t)o->cause, out, n, n < o->max_ranges);
    (void)offsets;
    for (size_t r = 0; r < n; r++) {
        for (int64_t x = out[r].lo; x < out[r].hi; x++) model_find(m, x)->end = -1;
        if (m->n_taken < TAKEN_MAX) m->taken[m->n_taken++] = (taken){o->cause, out[r]};
    }
}

static void model_timeouts(model *m, const op *o, const kmq_range *out, size_t n, bool failed)
{
    size_t got = assert_ranges(m, want_timeout, m->latest, out, n, !failed && n < o->max_ranges);
    for (size_t i = 0; i < m->n && got > 0; i++)
        if (want_timeout(m, &m->items[i], m->latest)) {
            m->items[i].state = LATE;
            got--;
        }
}

/* the last o->n taken ranges, as far as they are of one cause */
static size_t last_taken(const model *m, const op *o, kmq_range *ranges, kmq_end_cause *cause)
{
    size_t n = 0;
    for (size_t i = m->n_taken; i > 0 && n < o->n; i--) {
        if (n > 0 && m->taken[i - 1].cause != *cause) break;
        *cause = m->taken[i - 1].cause;
        ranges[n++] = m->taken[i - 1].range;
    }
    return n;
}

static void model_end_failed(model *m, const kmq_range *ranges, size_t n, kmq_end_cause cause)
{
    for (size_t r = 0; r < n; r++)
        for (int64_t x = ranges[r].lo; x < ranges[r].hi; x++) {
            item *it = model_find(m, x);
            assert_int_equal(it->end, -1);
            it->end = (int)cause;
        }
    m->n_taken -= n;
}

/* Does it on the ledger; when that succeeds, on the model too, and holds the results against each other. ENOMEM: false.
 */
static bool run_op(kmq_ledger *ledger, model *m, const op *o, kmq_fail_alloc *fail)
{
    kmq_range out[TAKEN_MAX];
    int8_t results[24];
    size_t n = 77;
    kmq_end_cause cause = KMQ_END_ACK;
    int rc = KMQ_OK;
    switch (o->kind) {
    case FETCH:
        rc = kmq_ledger_fetch(ledger, o->offsets, o->n, &n);
        if (m->retired) {
            assert_int_equal(rc, KMQ_EINVAL);
        } else if (rc == KMQ_OK) {
            model_fetch(m, o, n);
        }
        break;
    case SKIP:
        rc = kmq_ledger_skip(ledger, o->lo);
        if (m->retired || o->lo == INT64_MAX) {
            assert_int_equal(rc, KMQ_EINVAL);
        } else if (o->lo < m->position) {
            assert_int_equal(rc, KMQ_EREPEAT);
            m->counts.repeats++;
        } else {
            assert_int_equal(rc, KMQ_OK);
            m->position = o->lo + 1;
        }
        break;
    case PARK:
        rc = kmq_ledger_park(ledger, o->lo);
        if (m->retired || m->delivery != KMQ_DELIVERY_MARKERS || o->lo == INT64_MAX) {
            assert_int_equal(rc, KMQ_EINVAL);
        } else if (o->lo < m->position) {
            assert_int_equal(rc, KMQ_EREPEAT);
            m->counts.repeats++;
        } else if (rc == KMQ_OK) {
            m->items[m->n++] = (item){.offset = o->lo, .state = PARKING, .end = -1};
            m->position = o->lo + 1;
        }
        break;
    case PARKED:
        rc = kmq_ledger_parked(ledger, o->lo, o->hi);
        if (rc == KMQ_OK) model_parked(m, o);
        break;
    case EXTEND:
        rc = kmq_ledger_extend(ledger, o->lo, o->hi);
        if (m->delivery != KMQ_DELIVERY_MARKERS) {
            assert_int_equal(rc, KMQ_EINVAL);
        } else if (rc != KMQ_ENOMEM) {
            assert_int_equal(rc, model_extend(m, o));
        }
        break;
    case TAKE_START:
        rc = kmq_ledger_take_start(ledger, out, o->max_ranges, o->hi, &n);
        if (rc == KMQ_OK) {
            model_take_start(m, o, out, n, fail->fail_at > 0 && fail->calls >= fail->fail_at);
        } else {
            assert_int_equal(n, 0);
        }
        break;
    case STARTED:
    case START_FAILED:
        rc = o->kind == STARTED ? kmq_ledger_started(ledger, o->lo, o->hi)
                                : kmq_ledger_start_failed(ledger, o->lo, o->hi);
        if (rc == KMQ_OK) model_end_starting(m, o, o->kind == STARTED ? READY : UNSTARTED);
        break;
    case HAND_OUT: {
        bool too_many = o->hi > kmq_ledger_ready(ledger);
        rc = kmq_ledger_hand_out(ledger, o->hi, o->now);
        if (too_many) assert_int_equal(rc, KMQ_EINVAL);
        if (rc == KMQ_OK && o->hi > 0) model_hand_out(m, o);
        break;
    }
    case SETTLE:
        rc = kmq_ledger_settle(ledger, o->lo, o->cause);
        if (rc != KMQ_ENOMEM) assert_int_equal(rc, model_settle(m, o->lo, (int)o->cause));
        break;
    case SETTLE_MANY:
        assert_int_equal(kmq_ledger_settle_many(ledger, o->offsets, o->n, o->cause, results), KMQ_OK);
        for (size_t i = 0; i < o->n; i++)
            if (results[i] != KMQ_ENOMEM) assert_int_equal(results[i], model_settle(m, o->offsets[i], (int)o->cause));
        break;
    case RETRY:
        rc = kmq_ledger_retry(ledger, o->lo);
        if (m->delivery != KMQ_DELIVERY_MARKERS) {
            assert_int_equal(rc, KMQ_EINVAL);
        } else if (rc != KMQ_ENOMEM) {
            assert_int_equal(rc, model_settle(m, o->lo, -1));
        }
        break;
    case TAKE_END:
        assert_int_equal(kmq_ledger_take_end(ledger, o->cause, out, o->max_ranges, &n), KMQ_OK);
        model_take_end(m, o, out, n);
        break;
    case END_FAILED:
        n = last_taken(m, o, out, &cause);
        rc = kmq_ledger_end_failed(ledger, cause, out, n);
        if (rc == KMQ_OK) model_end_failed(m, out, n, cause);
        break;
    case TIMEOUTS:
        if (o->now > m->latest) m->latest = o->now;
        m->now = o->now;
        rc = kmq_ledger_take_timeouts(ledger, o->now, out, o->max_ranges, &n);
        if (rc == KMQ_OK) {
            model_timeouts(m, o, out, n, fail->fail_at > 0 && fail->calls >= fail->fail_at);
        } else {
            assert_int_equal(n, 0);
        }
        break;
    case COVER:
        kmq_ledger_cover(ledger, o->lo);
        if (o->lo > m->covered) m->covered = o->lo;
        break;
    case RETIRE:
        kmq_ledger_retire(ledger);
        model_retire(m);
        break;
    case OPS: break;
    }
    return rc != KMQ_ENOMEM;
}

/* what is settled and written is of no more interest: the model stays small, the ledger lives on */
static void forget_gone(model *m)
{
    size_t n = 0;
    for (size_t i = 0; i < m->n; i++) {
        bool kept = m->items[i].state != GONE || m->items[i].end >= 0;
        for (size_t k = 0; k < m->n_taken && !kept; k++)
            kept = m->taken[k].range.lo <= m->items[i].offset && m->items[i].offset < m->taken[k].range.hi;
        if (kept) m->items[n++] = m->items[i];
    }
    m->n = n;
}

static int64_t run_lives(kmq_rng *rng, int64_t ops, bool failing)
{
    static const int64_t positions[] = {0, 65536 - 60, (INT64_C(1) << 40) - 3, INT64_MAX - 400};
    static const int64_t limits[] = {0, 50, 5000, 300000, INT64_MAX};
    static model m;
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    int64_t failures = 0;
    while (ops > 0) {
        kmq_ledger ledger;
        memset(&m, 0, sizeof m);
        m.delivery = kmq_rng_chance(rng, 4) ? (kmq_delivery)(1 + kmq_rng_below(rng, 2)) : KMQ_DELIVERY_MARKERS;
        m.position = positions[kmq_rng_below(rng, 4)];
        m.max = limits[kmq_rng_below(rng, 5)];
        m.last_limit = m.latest = INT64_MIN;
        int64_t now = (int64_t)kmq_rng_below(rng, 2000000) - 1000000; /* a monotonic clock may be negative */
        assert_int_equal(kmq_ledger_init(&ledger, &alloc, m.delivery, m.position, m.max), KMQ_OK);
        int64_t life = (int64_t)kmq_rng_below(rng, 6000);
        for (int64_t i = 0; i < life && ops > 0; i++, ops--) {
            if (m.n > ITEMS_MAX - 30) forget_gone(&m);
            if (m.n > ITEMS_MAX - 30) break;
            now += m.max < 1000 ? (int64_t)kmq_rng_below(rng, 8) : (int64_t)kmq_rng_below(rng, 600);
            if (kmq_rng_chance(rng, 500)) now -= 30;
            op o = make_op(rng, &m, &ledger, now);
            for (fail.fail_at = failing;; fail.fail_at++) {
                fail.calls = 0;
                fail.forever = kmq_rng_chance(rng, 2);
                if (run_op(&ledger, &m, &o, &fail)) break;
                compare(&ledger, &m);
                compare_walks(&ledger, &m, 3);
                failures++;
            }
            fail.fail_at = 0;
            compare(&ledger, &m);
            if (i % 16 == 0 || failing) compare_walks(&ledger, &m, 1 + kmq_rng_below(rng, 8));
        }
        kmq_ledger_free(&ledger);
        assert_int_equal(fail.blocks, 0);
    }
    return failures;
}

static void test_model(void **state)
{
    kmq_rng rng = kmq_test_rng("ledger model");
    (void)state;
    (void)run_lives(&rng, kmq_test_scale(1000000), false);
}

static void test_fail_malloc(void **state)
{
    kmq_rng rng = kmq_test_rng("ledger fail-malloc");
    (void)state;
    int64_t failures = run_lives(&rng, kmq_test_scale(100000), true);
    print_message("%lld failed allocations, nothing changed by any\n", (long long)failures);
    assert_true(failures > 1000);
}

/* ---- at size */

static void fetch_run(kmq_ledger *ledger, int64_t lo, int64_t hi)
{
    int64_t offsets[1000];
    for (int64_t o = lo; o < hi;) {
        size_t n = 0;
        while (n < 1000 && o < hi) offsets[n++] = o++;
        assert_int_equal(kmq_ledger_fetch(ledger, offsets, n, NULL), KMQ_OK);
    }
}

/* fetched, STARTed and handed out: [lo, hi) */
static void open_run(kmq_ledger *ledger, int64_t lo, int64_t hi, int64_t now)
{
    kmq_range range;
    size_t n;
    fetch_run(ledger, lo, hi);
    assert_int_equal(kmq_ledger_take_start(ledger, &range, 1, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(n, 1);
    assert_true(range.lo == lo && range.hi == hi);
    assert_int_equal(kmq_ledger_started(ledger, lo, hi), KMQ_OK);
    assert_int_equal(kmq_ledger_hand_out(ledger, hi - lo, now), KMQ_OK);
}

static void test_one_open_and_millions_settled(void **state)
{
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_ledger ledger;
    kmq_range ends[4];
    size_t n;
    (void)state;
    for (int d = 0; d < 2; d++) {
        assert_int_equal(kmq_ledger_init(&ledger, &alloc, (kmq_delivery)d, 0, 300000), KMQ_OK);
        for (int64_t o = 0, now = 0; o < 10000000; o += 1000, now++) {
            fetch_run(&ledger, o, o + 1000);
            if (d == KMQ_DELIVERY_MARKERS) {
                assert_int_equal(kmq_ledger_take_start(&ledger, ends, 4, 1000, &n), KMQ_OK);
                assert_int_equal(kmq_ledger_started(&ledger, o, o + 1000), KMQ_OK);
            }
            assert_int_equal(kmq_ledger_hand_out(&ledger, 1000, now * 30), KMQ_OK);
            for (int64_t k = o > 0 ? o : 1; k < o + 1000; k++)
                if (kmq_ledger_settle(&ledger, k, KMQ_END_ACK) != KMQ_OK) fail();
            assert_int_equal(kmq_ledger_take_end(&ledger, KMQ_END_ACK, ends, 4, &n), KMQ_OK);
            assert_int_equal(n, d == KMQ_DELIVERY_MARKERS);
        }
        assert_int_equal(kmq_ledger_open(&ledger), 1);
        assert_int_equal(kmq_ledger_oldest_open(&ledger), 0);
        assert_int_equal(kmq_ledger_floor(&ledger), d == KMQ_DELIVERY_OFFSETS ? 0 : 10000000);
        assert_int_equal(kmq_ledger_bytes(&ledger), count.bytes + sizeof ledger);
        print_message("offset 0 open, 10 million settled behind it: %zu B\n", kmq_ledger_bytes(&ledger));
        assert_true(kmq_ledger_bytes(&ledger) < 64 * 1024);
        /* a jump of 2^40 offsets */
        size_t before = count.bytes;
        assert_int_equal(kmq_ledger_skip(&ledger, INT64_C(1) << 40), KMQ_OK);
        assert_int_equal(kmq_ledger_fetch(&ledger, (int64_t[]){INT64_C(1) << 41}, 1, NULL), KMQ_OK);
        assert_int_equal(count.bytes, before);
        kmq_ledger_check(&ledger);
        kmq_ledger_free(&ledger);
        assert_int_equal(count.bytes, 0);
    }
}

/* At most once: what is handed out is done, a million of them cost nothing, and there is nothing to settle. */
static void test_done_when_handed_out(void **state)
{
    kmq_count_alloc count;
    kmq_alloc alloc = kmq_count_alloc_init(&count);
    kmq_ledger ledger;
    (void)state;
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_AT_MOST_ONCE, 0, 300000), KMQ_OK);
    for (int64_t o = 0; o < 1000000; o += 1000) {
        fetch_run(&ledger, o, o + 1000);
        assert_int_equal(kmq_ledger_hand_out(&ledger, 1000, o), KMQ_OK);
        assert_int_equal(kmq_ledger_open(&ledger), 0);
        assert_int_equal(kmq_ledger_floor(&ledger), o + 1000);
        assert_int_equal(kmq_ledger_settle(&ledger, o, KMQ_END_ACK), KMQ_EUNKNOWN);
    }
    assert_true(kmq_ledger_bytes(&ledger) < 1024 + sizeof ledger);
    kmq_ledger_check(&ledger);
    kmq_ledger_free(&ledger);
    assert_int_equal(count.bytes, 0);
}

static void shuffle(kmq_rng *rng, int64_t *offsets, size_t n)
{
    for (size_t i = n; i > 1; i--) {
        size_t k = kmq_rng_below(rng, i);
        int64_t swap = offsets[i - 1];
        offsets[i - 1] = offsets[k];
        offsets[k] = swap;
    }
}

/* Full chunks open, settled in random order, every allocation failing in turn: the counts always add up. */
static void test_full_chunks(void **state)
{
    enum { N = 270000 }; /* three full chunks: the run of acks breaks two, a single ack the third */
    kmq_rng rng = kmq_test_rng("ledger full chunks");
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_ledger ledger;
    kmq_range ends[1];
    size_t n, failed = 0;
    int64_t *offsets = malloc(N * sizeof *offsets);
    (void)state;
    assert_non_null(offsets);
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 100, 1000), KMQ_OK);
    fetch_run(&ledger, 100, 100 + N);
    assert_int_equal(kmq_ledger_take_start(&ledger, ends, 1, INT64_MAX, &n), KMQ_OK);
    assert_int_equal(kmq_ledger_started(&ledger, 0, INT64_MAX), KMQ_OK);
    for (int64_t left = N; left > 0;) {
        int64_t some = left < 70000 ? left : 70000;
        for (fail.fail_at = 1, fail.calls = 0; kmq_ledger_hand_out(&ledger, some, 0) != KMQ_OK;
             fail.fail_at++, fail.calls = 0) {
            kmq_ledger_check(&ledger);
            assert_int_equal(kmq_ledger_open(&ledger), N - left);
            assert_int_equal(kmq_ledger_ready(&ledger), left);
        }
        fail.fail_at = 0;
        left -= some;
    }
    for (int64_t i = 0; i < N; i++) offsets[i] = 100 + i;
    /* a run of acks over the border of two full chunks, out of memory at each step of the way */
    enum { RUN = 50, AT = 2 * 65536 - 100 - RUN / 2 };
    int8_t results[RUN];
    for (fail.fail_at = 1;; fail.fail_at++) {
        fail.calls = 0;
        assert_int_equal(kmq_ledger_settle_many(&ledger, offsets + AT, RUN, KMQ_END_ACK, results), KMQ_OK);
        for (size_t i = 1; i < RUN; i++) assert_int_equal(results[i], results[0]);
        if (results[0] == KMQ_OK) break;
        assert_int_equal(kmq_ledger_open(&ledger), N);
        assert_int_equal(kmq_ledger_ends(&ledger), 0);
        kmq_ledger_check(&ledger);
    }
    assert_true(fail.fail_at > 4);
    fail.fail_at = 0;
    assert_int_equal(kmq_ledger_open(&ledger), N - RUN);
    memmove(offsets + AT, offsets + AT + RUN, (N - AT - RUN) * sizeof *offsets);
    shuffle(&rng, offsets, N - RUN);
    for (int64_t i = 0; i < N - RUN; i++) {
        fail.calls = 0;
        for (fail.fail_at = 1; kmq_ledger_settle(&ledger, offsets[i], KMQ_END_ACK) != KMQ_OK;
             fail.fail_at++, fail.calls = 0) {
            failed++;
            assert_int_equal(kmq_ledger_open(&ledger), N - RUN - i);
            assert_int_equal(kmq_ledger_ends(&ledger), RUN + i);
            kmq_ledger_check(&ledger);
        }
        fail.fail_at = 0;
        if (i % 1000 == 0) kmq_ledger_check(&ledger);
    }
    assert_true(failed > 5);
    assert_int_equal(kmq_ledger_settle(&ledger, 100, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_take_end(&ledger, KMQ_END_ACK, ends, 1, &n), KMQ_OK);
    assert_true(n == 1 && ends[0].lo == 100 && ends[0].hi == 100 + N);

    /* the same range comes back, in pieces that fill chunks, and out of memory in the middle */
    enum { PIECES = N / 1000 };
    kmq_range *pieces = malloc(PIECES * sizeof *pieces);
    assert_non_null(pieces);
    for (int64_t i = 0; i < PIECES; i++) pieces[i] = (kmq_range){100 + i * 1000, 1100 + i * 1000};
    failed = 0;
    for (fail.fail_at = 1, fail.calls = 0; kmq_ledger_end_failed(&ledger, KMQ_END_ACK, pieces, PIECES) != KMQ_OK;
         fail.fail_at++, fail.calls = 0) {
        failed++;
        fail.forever = failed % 2;
        kmq_ledger_check(&ledger);
        assert_int_equal(kmq_ledger_ends(&ledger), 0);
    }
    fail.fail_at = 0;
    assert_true(failed > 4);
    assert_int_equal(kmq_ledger_ends(&ledger), N);
    free(pieces);
    free(offsets);
    kmq_ledger_free(&ledger);
    assert_int_equal(fail.blocks, 0);
}

/* A limit that ends within a full chunk, and more late ones than are remembered. */
static void test_timeouts_at_size(void **state)
{
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    kmq_ledger ledger;
    kmq_range late;
    size_t n, failed = 0;
    int rc;
    (void)state;
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 0, 1000), KMQ_OK);
    open_run(&ledger, 0, 70000, 0);
    open_run(&ledger, 70000, 200000, 500);
    assert_int_equal(kmq_ledger_next_timeout(&ledger), 1000);
    assert_int_equal(kmq_ledger_take_timeouts(&ledger, 999, &late, 1, &n), KMQ_OK);
    assert_int_equal(n, 0);
    for (fail.fail_at = 1, fail.calls = 0; (rc = kmq_ledger_take_timeouts(&ledger, 1000, &late, 1, &n)) != KMQ_OK;
         fail.fail_at++, fail.calls = 0) {
        assert_int_equal(rc, KMQ_ENOMEM);
        assert_int_equal(n, 0);
        assert_int_equal(kmq_ledger_open(&ledger), 200000);
        assert_int_equal(kmq_ledger_next_timeout(&ledger), 1000);
        kmq_ledger_check(&ledger);
        failed++;
    }
    fail.fail_at = 0;
    assert_true(failed > 1);
    assert_true(n == 1 && late.lo == 0 && late.hi == 70000);
    assert_int_equal(kmq_ledger_next_timeout(&ledger), 1500);
    kmq_ledger_check(&ledger);
    /* 65,536 are remembered, the highest ones (forgetting may fail for want of memory too: then the next call does it)
     */
    assert_int_equal(kmq_ledger_take_timeouts(&ledger, 1000, &late, 1, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kmq_ledger_settle(&ledger, 70000 - KMQ_LEDGER_LATE_MAX - 1, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_settle(&ledger, 70000 - KMQ_LEDGER_LATE_MAX, KMQ_END_ACK), KMQ_ELATE);
    assert_int_equal(kmq_ledger_settle(&ledger, 69999, KMQ_END_ACK), KMQ_ELATE);
    assert_int_equal(kmq_ledger_settle(&ledger, 69999, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_retry(&ledger, 69998), KMQ_ELATE);
    assert_int_equal(kmq_ledger_ends(&ledger), 2);
    assert_int_equal(kmq_ledger_counters(&ledger).late, 3);
    assert_int_equal(kmq_ledger_settle(&ledger, 70000, KMQ_END_ACK), KMQ_OK);
    kmq_ledger_check(&ledger);
    kmq_ledger_free(&ledger);
    assert_int_equal(fail.blocks, 0);
}

/* Two epochs of one partition: the ack of the old one's message does nothing to the new one. */
static void test_epochs(void **state)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_ledger old, fresh;
    int64_t cursor = INT64_MIN;
    kmq_range out[4];
    size_t n;
    (void)state;
    assert_int_equal(kmq_ledger_init(&old, &alloc, KMQ_DELIVERY_MARKERS, 0, 1000), KMQ_OK);
    open_run(&old, 0, 10, 0);
    fetch_run(&old, 10, 20);
    assert_int_equal(kmq_ledger_take_start(&old, out, 4, 5, &n), KMQ_OK);
    assert_int_equal(kmq_ledger_started(&old, 10, 15), KMQ_OK);
    kmq_ledger_cover(&old, 13);
    assert_int_equal(kmq_ledger_covered_waiting(&old, &cursor, out, 4, &n), KMQ_OK);
    assert_true(n == 1 && out[0].lo == 10 && out[0].hi == 13);
    kmq_ledger_retire(&old);
    assert_int_equal(kmq_ledger_floor(&old), 10);
    assert_int_equal(kmq_ledger_waiting(&old), 0);
    assert_int_equal(kmq_ledger_fetch(&old, (int64_t[]){20}, 1, NULL), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_started(&old, 15, 20), KMQ_OK); /* a late report: no effect */

    assert_int_equal(kmq_ledger_init(&fresh, &alloc, KMQ_DELIVERY_MARKERS, 10, 1000), KMQ_OK);
    open_run(&fresh, 10, 20, 50);
    assert_int_equal(kmq_ledger_settle(&fresh, 3, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_settle(&old, 3, KMQ_END_ACK), KMQ_OK);
    assert_int_equal(kmq_ledger_open(&old), 9);
    assert_int_equal(kmq_ledger_open(&fresh), 10);
    assert_int_equal(kmq_ledger_counters(&fresh).unknown, 1);
    assert_int_equal(kmq_ledger_take_timeouts(&old, 1000, out, 4, &n), KMQ_OK);
    assert_int_equal(n, 2);
    kmq_ledger_check(&old);
    kmq_ledger_check(&fresh);
    kmq_ledger_free(&old);
    kmq_ledger_free(&fresh);
}

/* What is given to others is late from then on, whatever its limit; what was settled before keeps its END. */
static void test_give_up(void **state)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_ledger ledger;
    kmq_range out[2];
    int64_t cursor = INT64_MIN;
    size_t n;
    (void)state;
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 0, INT64_MAX), KMQ_OK);
    open_run(&ledger, 0, 10, 0);
    assert_int_equal(kmq_ledger_settle(&ledger, 2, KMQ_END_ACK), KMQ_OK);
    assert_int_equal(kmq_ledger_settle(&ledger, 6, KMQ_END_ACK), KMQ_OK);
    assert_int_equal(kmq_ledger_extend(&ledger, 8, 500), KMQ_OK);
    assert_int_equal(kmq_ledger_give_up(&ledger, out, 2, &n), KMQ_OK);
    assert_true(n == 2 && out[0].lo == 0 && out[0].hi == 2 && out[1].lo == 3 && out[1].hi == 6);
    assert_int_equal(kmq_ledger_settle(&ledger, 4, KMQ_END_ACK), KMQ_ELATE);
    assert_int_equal(kmq_ledger_give_up(&ledger, out, 2, &n), KMQ_OK);
    assert_true(n == 1 && out[0].lo == 7 && out[0].hi == 10);
    assert_int_equal(kmq_ledger_settle(&ledger, 8, KMQ_END_ACK), KMQ_ELATE);
    assert_int_equal(kmq_ledger_give_up(&ledger, out, 2, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kmq_ledger_held(&ledger, &cursor, out, 2, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kmq_ledger_open(&ledger), 0);
    kmq_ledger_check(&ledger);
    kmq_ledger_free(&ledger);
}

static void test_arguments(void **state)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_ledger ledger;
    size_t n = 5;
    (void)state;
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, -1, 1000), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 0, -1), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 5, 1000), KMQ_OK);
    assert_int_equal(kmq_ledger_fetch(&ledger, (int64_t[]){7, 7}, 2, &n), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_fetch(&ledger, (int64_t[]){8, 7}, 2, &n), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_fetch(&ledger, (int64_t[]){7, INT64_MAX}, 2, &n), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_skip(&ledger, INT64_MAX), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_started(&ledger, 5, 4), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_start_failed(&ledger, 5, 4), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_hand_out(&ledger, -1, 0), KMQ_EINVAL);
    assert_int_equal(kmq_ledger_hand_out(&ledger, 1, 0), KMQ_EINVAL);
    assert_int_equal(n, 5);
    assert_int_equal(kmq_ledger_fetch(&ledger, NULL, 0, &n), KMQ_OK);
    assert_int_equal(n, 0);
    assert_int_equal(kmq_ledger_floor(&ledger), 5);
    assert_int_equal(kmq_ledger_settle(&ledger, -7, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_settle(&ledger, INT64_MAX, KMQ_END_ACK), KMQ_EUNKNOWN);
    assert_int_equal(kmq_ledger_settle(&ledger, 5, KMQ_END_ACK), KMQ_EUNKNOWN);
    kmq_ledger_check(&ledger);
    kmq_ledger_free(&ledger);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_epochs),
        cmocka_unit_test(test_give_up),
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_fail_malloc),
        cmocka_unit_test(test_one_open_and_millions_settled),
        cmocka_unit_test(test_done_when_handed_out),
        cmocka_unit_test(test_full_chunks),
        cmocka_unit_test(test_timeouts_at_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
