/* kmq_ledger - see ledger.h for the picture, the invariants and the costs. */
#include "ledger.h"

#include <assert.h>
#include <string.h>

enum { QUEUE_MIN_CAP = 8, LIMIT_STEPS = 1024 };

typedef enum segment_state { UNSTARTED, STARTING, READY, PARKING } segment_state;

typedef struct segment {
    int64_t lo, hi;
    segment_state state;
} segment;

typedef struct block {
    int64_t hi, limit_ms;
} block;

static segment *segment_at(const kmq_ledger *ledger, size_t i)
{
    return (segment *)ledger->segments.items + ledger->segments.head + i;
}

static block *block_at(const kmq_ledger *ledger, size_t i)
{
    return (block *)ledger->blocks.items + ledger->blocks.head + i;
}

/* ---- queues */

/* Room for k more at the end. Items move to the front when that alone makes the room twice over, so that moving costs
 * O(1) an item; the array is halved then when it is three quarters empty. */
static int queue_reserve(kmq_ledger *ledger, kmq_ledger_queue *queue, size_t item_bytes, size_t k)
{
    if (k <= queue->cap - queue->head - queue->count) return KMQ_OK;
    if (queue->head > 0) {
        char *items = queue->items;
        memmove(items, items + queue->head * item_bytes, queue->count * item_bytes);
        queue->head = 0;
    }
    if (k > SIZE_MAX / item_bytes - queue->count) return KMQ_ENOMEM;
    size_t need = queue->count + k, cap = queue->cap;
    if (need > cap / 2)
        cap = 2 * need > QUEUE_MIN_CAP ? 2 * need : QUEUE_MIN_CAP;
    else if (need < cap / 4)
        cap /= 2;
    if (cap == queue->cap) return KMQ_OK;
    void *items = ledger->alloc.realloc(ledger->alloc.ctx, queue->items, cap * item_bytes);
    if (items == NULL) return need <= queue->cap ? KMQ_OK : KMQ_ENOMEM;
    queue->items = items;
    queue->cap = cap;
    return KMQ_OK;
}

static void queue_pop(kmq_ledger_queue *queue, size_t k)
{
    queue->head += k;
    queue->count -= k;
    if (queue->count == 0) queue->head = 0;
}

static void queue_free(kmq_ledger *ledger, kmq_ledger_queue *queue)
{
    if (queue->items != NULL) (void)ledger->alloc.realloc(ledger->alloc.ctx, queue->items, 0);
    *queue = (kmq_ledger_queue){0};
}

/* ---- segments */

/* the first segment that ends after offset; the count when there is none */
static size_t find_segment(const kmq_ledger *ledger, int64_t offset)
{
    size_t lo = 0, hi = ledger->segments.count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (segment_at(ledger, mid)->hi <= offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Segment i becomes two, the second one begins at `offset`. Two neighbours of one state mean the same as one segment.
 */
static int split_segment(kmq_ledger *ledger, size_t i, int64_t offset)
{
    int rc = queue_reserve(ledger, &ledger->segments, sizeof(segment), 1);
    if (rc != KMQ_OK) return rc;
    segment *s = segment_at(ledger, i);
    memmove(s + 1, s, (ledger->segments.count - i) * sizeof(*s));
    ledger->segments.count++;
    s[0].hi = s[1].lo = offset;
    return KMQ_OK;
}

/* no segment of that state reaches across offset */
static int cut(kmq_ledger *ledger, int64_t offset, segment_state state)
{
    size_t i = find_segment(ledger, offset);
    if (i == ledger->segments.count) return KMQ_OK;
    const segment *s = segment_at(ledger, i);
    return s->state == state && s->lo < offset ? split_segment(ledger, i, offset) : KMQ_OK;
}

static void advance_lead(kmq_ledger *ledger)
{
    for (; ledger->lead < ledger->segments.count; ledger->lead++) {
        const segment *s = segment_at(ledger, ledger->lead);
        if (s->state != READY) return;
        ledger->lead_n += s->hi - s->lo;
    }
}

static int64_t first_waiting(const kmq_ledger *ledger)
{
    return ledger->segments.count > 0 ? segment_at(ledger, 0)->lo : ledger->position;
}

/* ---- life */

int kmq_ledger_init(kmq_ledger *ledger, const kmq_alloc *alloc, kmq_delivery delivery, int64_t position,
                    int64_t max_processing_ms)
{
    if (position < 0 || max_processing_ms < 0) return KMQ_EINVAL;
    *ledger = (kmq_ledger){.delivery = delivery,
                           .position = position,
                           .max_processing_ms = max_processing_ms,
                           .step_ms = max_processing_ms / LIMIT_STEPS > 1 ? max_processing_ms / LIMIT_STEPS : 1,
                           .overdue_ms = INT64_MIN,
                           .alloc = *alloc};
    kmq_offset_set_init(&ledger->open, alloc);
    kmq_offset_set_init(&ledger->late, alloc);
    kmq_limits_init(&ledger->own, alloc);
    for (size_t i = 0; i < KMQ_END_CAUSES; i++) kmq_offset_set_init(&ledger->ends[i], alloc);
    return KMQ_OK;
}

void kmq_ledger_free(kmq_ledger *ledger)
{
    queue_free(ledger, &ledger->segments);
    queue_free(ledger, &ledger->blocks);
    kmq_offset_set_free(&ledger->open);
    kmq_offset_set_free(&ledger->late);
    kmq_limits_free(&ledger->own);
    for (size_t i = 0; i < KMQ_END_CAUSES; i++) kmq_offset_set_free(&ledger->ends[i]);
}

/* ---- fetching */

static void append(kmq_ledger *ledger, int64_t offset, segment_state state)
{
    size_t n = ledger->segments.count;
    segment *last = n > 0 ? segment_at(ledger, n - 1) : NULL;
    if (last != NULL && last->state == state && last->hi == offset) {
        last->hi++;
    } else {
        ledger->segments.count++;
        *segment_at(ledger, n) = (segment){offset, offset + 1, state};
    }
    ledger->waiting++;
    ledger->position = offset + 1;
}

int kmq_ledger_fetch(kmq_ledger *ledger, const int64_t *offsets, size_t n, size_t *accepted)
{
    size_t repeats = 0, runs = 0;
    segment_state state = ledger->delivery == KMQ_DELIVERY_MARKERS ? UNSTARTED : READY;
    if (ledger->retired || (n > 0 && offsets[n - 1] == INT64_MAX)) return KMQ_EINVAL;
    for (size_t i = 1; i < n; i++)
        if (offsets[i] <= offsets[i - 1]) return KMQ_EINVAL;
    while (repeats < n && offsets[repeats] < ledger->position) repeats++;
    for (size_t i = repeats; i < n; i++) runs += i == repeats || offsets[i] != offsets[i - 1] + 1;
    int rc = queue_reserve(ledger, &ledger->segments, sizeof(segment), runs);
    if (rc != KMQ_OK) return rc;
    for (size_t i = repeats; i < n; i++) append(ledger, offsets[i], state);
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) { /* all that waits is ready */
        ledger->lead = ledger->segments.count;
        ledger->lead_n = ledger->waiting;
    }
    ledger->counts.repeats += repeats;
    if (accepted != NULL) *accepted = n - repeats;
    return KMQ_OK;
}

int kmq_ledger_skip(kmq_ledger *ledger, int64_t offset)
{
    if (ledger->retired || offset == INT64_MAX) return KMQ_EINVAL;
    if (offset < ledger->position) {
        ledger->counts.repeats++;
        return KMQ_EREPEAT;
    }
    ledger->position = offset + 1;
    return KMQ_OK;
}

int kmq_ledger_park(kmq_ledger *ledger, int64_t offset)
{
    if (ledger->delivery != KMQ_DELIVERY_MARKERS || ledger->retired || offset == INT64_MAX) return KMQ_EINVAL;
    if (offset < ledger->position) {
        ledger->counts.repeats++;
        return KMQ_EREPEAT;
    }
    int rc = queue_reserve(ledger, &ledger->segments, sizeof(segment), 1);
    if (rc != KMQ_OK) return rc;
    append(ledger, offset, PARKING);
    ledger->parking++;
    return KMQ_OK;
}

int kmq_ledger_parked(kmq_ledger *ledger, int64_t lo, int64_t hi)
{
    if (hi < lo) return KMQ_EINVAL;
    int rc = cut(ledger, lo, PARKING);
    if (rc == KMQ_OK) rc = cut(ledger, hi, PARKING);
    if (rc != KMQ_OK) return rc;
    size_t kept = find_segment(ledger, lo), behind = 0;
    for (size_t i = kept; i < ledger->segments.count; i++) {
        const segment *s = segment_at(ledger, i);
        if (s->state != PARKING || s->lo >= hi) {
            *segment_at(ledger, kept++) = *s;
            continue;
        }
        ledger->waiting -= s->hi - s->lo;
        ledger->parking -= s->hi - s->lo;
        behind += i < ledger->next_start;
    }
    ledger->segments.count = kept;
    ledger->next_start -= behind;
    advance_lead(ledger);
    return KMQ_OK;
}

/* ---- START */

int kmq_ledger_take_start(kmq_ledger *ledger, kmq_range *out, size_t max_ranges, int64_t max_offsets, size_t *n)
{
    size_t i = ledger->next_start;
    *n = 0;
    for (; i < ledger->segments.count && max_offsets > 0; i++) {
        segment *s = segment_at(ledger, i);
        if (s->state == STARTING && *n > 0) break;
        if (s->state != UNSTARTED) continue;
        bool joins = *n > 0 && out[*n - 1].hi == s->lo;
        if (!joins && *n == max_ranges) break;
        if (s->hi - s->lo > max_offsets) {
            int rc = split_segment(ledger, i, s->lo + max_offsets);
            if (rc != KMQ_OK && *n == 0) return rc;
            if (rc != KMQ_OK) break; /* what was taken so far is a good answer */
            s = segment_at(ledger, i);
        }
        s->state = STARTING;
        max_offsets -= s->hi - s->lo;
        if (joins)
            out[*n - 1].hi = s->hi;
        else
            out[(*n)++] = (kmq_range){s->lo, s->hi};
    }
    ledger->next_start = i;
    return KMQ_OK;
}

bool kmq_ledger_unstarted(const kmq_ledger *ledger)
{
    for (size_t i = ledger->next_start; i < ledger->segments.count; i++)
        if (segment_at(ledger, i)->state == UNSTARTED) return true;
    return false;
}

static int end_starting(kmq_ledger *ledger, int64_t lo, int64_t hi, segment_state state)
{
    if (hi < lo) return KMQ_EINVAL;
    int rc = cut(ledger, lo, STARTING);
    if (rc == KMQ_OK) rc = cut(ledger, hi, STARTING);
    if (rc != KMQ_OK) return rc;
    for (size_t i = find_segment(ledger, lo); i < ledger->segments.count; i++) {
        segment *s = segment_at(ledger, i);
        if (s->lo >= hi) break;
        if (s->state != STARTING) continue;
        s->state = state;
        if (state == UNSTARTED && i < ledger->next_start) ledger->next_start = i;
    }
    advance_lead(ledger);
    return KMQ_OK;
}

int kmq_ledger_started(kmq_ledger *ledger, int64_t lo, int64_t hi) { return end_starting(ledger, lo, hi, READY); }

int kmq_ledger_start_failed(kmq_ledger *ledger, int64_t lo, int64_t hi)
{
    return end_starting(ledger, lo, hi, UNSTARTED);
}

/* ---- time limits */

static int64_t limit_of(const kmq_ledger *ledger, int64_t now_ms)
{
    int64_t max = ledger->max_processing_ms, step = ledger->step_ms;
    if (max == INT64_MAX || now_ms > INT64_MAX - max - step) return INT64_MAX;
    int64_t limit = now_ms + max, over = limit % step;
    if (over > 0) limit += step - over;
    if (over < 0) limit -= over;
    /* a clock that went back: limits ascend all the same */
    size_t n = ledger->blocks.count;
    int64_t least = n > 0 ? block_at(ledger, n - 1)->limit_ms : ledger->overdue_ms;
    return limit > least ? limit : least;
}

/* Blocks whose limit has passed need no memory: what is still open of them is all that is below overdue_below. */
static void drop_due_blocks(kmq_ledger *ledger, int64_t now_ms)
{
    while (ledger->blocks.count > 0) {
        const block *b = block_at(ledger, 0);
        /* a limit that has passed stays passed when a clock goes back */
        bool passed = b->limit_ms <= now_ms || b->limit_ms <= ledger->overdue_ms;
        if (!passed || b->limit_ms == INT64_MAX) return;
        ledger->overdue_below = b->hi;
        ledger->overdue_ms = b->limit_ms;
        queue_pop(&ledger->blocks, 1);
    }
}

static void push_block(kmq_ledger *ledger, int64_t hi, int64_t limit_ms)
{
    size_t n = ledger->blocks.count;
    if (n > 0 && block_at(ledger, n - 1)->limit_ms == limit_ms) {
        block_at(ledger, n - 1)->hi = hi;
    } else {
        ledger->blocks.count++;
        *block_at(ledger, n) = (block){hi, limit_ms};
    }
}

static void forget_late(kmq_ledger *ledger)
{
    kmq_range run;
    int64_t excess = kmq_offset_set_count(&ledger->late) - KMQ_LEDGER_LATE_MAX;
    while (excess > 0 && kmq_offset_set_next(&ledger->late, 0, &run)) {
        if (run.hi - run.lo > excess) run.hi = run.lo + excess;
        if (kmq_offset_set_remove(&ledger->late, run.lo, run.hi, NULL) != KMQ_OK) return; /* next time */
        excess -= run.hi - run.lo;
    }
}

/* The next run of what is open, from `from` on: of those that share their limits only what is below shared_below, of those
 * with their own only what is due by own_due. The two sets are disjoint, so their runs never cross. */
static bool next_open(const kmq_ledger *ledger, int64_t from, int64_t shared_below, int64_t own_due, kmq_range *run)
{
    kmq_range own;
    bool shared = kmq_offset_set_next(&ledger->open, from, run) && run->lo < shared_below;
    bool one = own_due == INT64_MAX ? kmq_limits_next(&ledger->own, from, &own)
                                    : kmq_limits_next_due(&ledger->own, from, own_due, &own);
    if (shared && run->hi > shared_below) run->hi = shared_below;
    if (one && (!shared || own.lo < run->lo)) *run = own;
    return shared || one;
}

/* Fills out with runs, joined where they touch; returns where it stopped. */
static int64_t open_runs(const kmq_ledger *ledger, int64_t from, int64_t shared_below, int64_t own_due, kmq_range *out,
                         size_t max_ranges, size_t *n)
{
    kmq_range run;
    while (next_open(ledger, from, shared_below, own_due, &run)) {
        if (*n > 0 && out[*n - 1].hi == run.lo)
            out[*n - 1].hi = run.hi;
        else if (*n < max_ranges)
            out[(*n)++] = run;
        else
            break;
        from = run.hi;
    }
    return from;
}

static void forget_own(kmq_ledger *ledger, const kmq_range *ranges, size_t n)
{
    kmq_range run;
    for (size_t i = 0; i < n; i++)
        while (kmq_limits_next(&ledger->own, ranges[i].lo, &run) && run.lo < ranges[i].hi)
            (void)kmq_limits_remove(&ledger->own, run.lo);
}

/* These runs, of open those below shared_below, from open and own into late: all or none. */
static int make_late(kmq_ledger *ledger, const kmq_range *ranges, size_t n, int64_t shared_below)
{
    int rc = KMQ_OK;
    size_t added = 0;
    kmq_offset_set_hold(&ledger->late);
    for (; added < n && rc == KMQ_OK; added += rc == KMQ_OK)
        rc = kmq_offset_set_add(&ledger->late, ranges[added].lo, ranges[added].hi, NULL);
    int64_t lo = ranges[0].lo, hi = ranges[n - 1].hi;
    if (hi > shared_below) hi = shared_below;
    if (rc == KMQ_OK && lo < hi) rc = kmq_offset_set_remove(&ledger->open, lo, hi, NULL);
    if (rc == KMQ_OK) forget_own(ledger, ranges, n);
    for (; rc != KMQ_OK && added > 0; added--) /* an undo: cannot fail */
        (void)kmq_offset_set_remove(&ledger->late, ranges[added - 1].lo, ranges[added - 1].hi, NULL);
    kmq_offset_set_release(&ledger->late);
    return rc;
}

/* What is open: with a shared limit what is below shared_below, with one of its own what is due by own_due. */
static int take_late(kmq_ledger *ledger, int64_t shared_below, int64_t own_due, kmq_range *out, size_t max_ranges,
                     size_t *n)
{
    (void)open_runs(ledger, 0, shared_below, own_due, out, max_ranges, n);
    int rc = *n > 0 ? make_late(ledger, out, *n, shared_below) : KMQ_OK;
    if (rc == KMQ_OK)
        forget_late(ledger);
    else
        *n = 0;
    return rc;
}

int kmq_ledger_take_timeouts(kmq_ledger *ledger, int64_t now_ms, kmq_range *out, size_t max_ranges, size_t *n)
{
    *n = 0;
    drop_due_blocks(ledger, now_ms);
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_OK;
    if (now_ms == INT64_MAX) now_ms--; /* INT64_MAX is no limit */
    return take_late(ledger, ledger->overdue_below, now_ms, out, max_ranges, n);
}

int kmq_ledger_give_up(kmq_ledger *ledger, kmq_range *out, size_t max_ranges, size_t *n)
{
    *n = 0;
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_OK;
    return take_late(ledger, INT64_MAX, INT64_MAX, out, max_ranges, n);
}

/* The limit that an open offset got at its hand-out: limits ascend with the offsets. */
static int64_t limit_at(const kmq_ledger *ledger, int64_t offset)
{
    size_t lo = 0, hi = ledger->blocks.count;
    if (offset < ledger->overdue_below) return ledger->overdue_ms;
    while (lo + 1 < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (block_at(ledger, mid - 1)->hi <= offset)
            lo = mid;
        else
            hi = mid;
    }
    return block_at(ledger, lo)->limit_ms;
}

/* of those that share their limits: the lowest open one is the first to be late */
static int64_t next_shared(const kmq_ledger *ledger)
{
    kmq_range run;
    return kmq_offset_set_next(&ledger->open, 0, &run) ? limit_at(ledger, run.lo) : INT64_MAX;
}

int64_t kmq_ledger_next_timeout(const kmq_ledger *ledger)
{
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return INT64_MAX;
    int64_t shared = next_shared(ledger), own = kmq_limits_first(&ledger->own);
    return own < shared ? own : shared;
}

/* ---- handing out */

int64_t kmq_ledger_ready(const kmq_ledger *ledger) { return ledger->lead_n; }

/* The first n ready offsets into `open` (where what is handed out is tracked): all or none. *hi = behind the last, *whole =
 * segments that are used up. */
static int open_first(kmq_ledger *ledger, int64_t n, int64_t *hi, size_t *whole)
{
    int rc = KMQ_OK;
    size_t i = 0;
    bool tracked = ledger->delivery != KMQ_DELIVERY_AT_MOST_ONCE;
    kmq_offset_set_hold(&ledger->open);
    for (; n > 0; i++) {
        const segment *s = segment_at(ledger, i);
        *hi = s->hi - s->lo > n ? s->lo + n : s->hi;
        if (tracked) rc = kmq_offset_set_add(&ledger->open, s->lo, *hi, NULL);
        if (rc != KMQ_OK) break;
        n -= *hi - s->lo;
    }
    if (rc == KMQ_OK) {
        *whole = i - (*hi < segment_at(ledger, i - 1)->hi);
    } else {
        while (i-- > 0) /* an undo: cannot fail; those before the last were taken whole */
            (void)kmq_offset_set_remove(&ledger->open, segment_at(ledger, i)->lo, segment_at(ledger, i)->hi, NULL);
    }
    kmq_offset_set_release(&ledger->open);
    return rc;
}

int kmq_ledger_hand_out(kmq_ledger *ledger, int64_t n, int64_t now_ms)
{
    int64_t hi = 0;
    size_t whole = 0;
    if (n < 0 || n > ledger->lead_n) return KMQ_EINVAL;
    if (n == 0) return KMQ_OK;
    int rc = queue_reserve(ledger, &ledger->blocks, sizeof(block), 1);
    if (rc == KMQ_OK) rc = open_first(ledger, n, &hi, &whole);
    if (rc != KMQ_OK) return rc;
    queue_pop(&ledger->segments, whole);
    if (ledger->segments.count > 0 && segment_at(ledger, 0)->lo < hi) segment_at(ledger, 0)->lo = hi;
    ledger->lead -= whole;
    ledger->next_start = ledger->next_start > whole ? ledger->next_start - whole : 0;
    ledger->lead_n -= n;
    ledger->waiting -= n;
    if (ledger->delivery == KMQ_DELIVERY_AT_MOST_ONCE) return KMQ_OK;
    push_block(ledger, hi, limit_of(ledger, now_ms));
    drop_due_blocks(ledger, now_ms);
    return KMQ_OK;
}

int64_t kmq_ledger_waiting_offset(const kmq_ledger *ledger, int64_t k)
{
    for (size_t i = 0; i < ledger->segments.count; i++) {
        const segment *s = segment_at(ledger, i);
        if (k < s->hi - s->lo) return s->lo + k;
        k -= s->hi - s->lo;
    }
    return ledger->position;
}

/* ---- settling */

typedef enum home { NOWHERE, IN_OPEN, IN_OWN, IN_LATE } home;

/* where the offset is, and what a call about it answers */
static home find_home(const kmq_ledger *ledger, int64_t offset, int *answer)
{
    *answer = KMQ_OK;
    if (kmq_offset_set_has(&ledger->open, offset)) return IN_OPEN;
    if (kmq_limits_has(&ledger->own, offset)) return IN_OWN;
    *answer = KMQ_ELATE;
    if (kmq_offset_set_count(&ledger->late) > 0 && kmq_offset_set_has(&ledger->late, offset)) return IN_LATE;
    *answer = KMQ_EUNKNOWN;
    return NOWHERE;
}

static void count_answer(kmq_ledger *ledger, int answer)
{
    ledger->counts.late += answer == KMQ_ELATE;
    ledger->counts.unknown += answer == KMQ_EUNKNOWN;
}

static int take_out(kmq_ledger *ledger, home from, int64_t offset)
{
    switch (from) {
    case IN_OPEN: return kmq_offset_set_remove(&ledger->open, offset, offset + 1, NULL);
    case IN_LATE: return kmq_offset_set_remove(&ledger->late, offset, offset + 1, NULL);
    case IN_OWN: (void)kmq_limits_remove(&ledger->own, offset); break;
    case NOWHERE: break;
    }
    return KMQ_OK;
}

/* Any offset, by an order of steps that can always be undone: into `ends` first, then out of where it was. */
static int settle_any(kmq_ledger *ledger, int64_t offset, kmq_end_cause cause)
{
    int answer, rc = KMQ_OK;
    home from = find_home(ledger, offset, &answer);
    kmq_offset_set *ends = &ledger->ends[cause];
    bool marked = ledger->delivery == KMQ_DELIVERY_MARKERS && from != NOWHERE;
    if (marked) rc = kmq_offset_set_add(ends, offset, offset + 1, NULL);
    if (rc != KMQ_OK) return rc;
    rc = take_out(ledger, from, offset);
    if (rc != KMQ_OK) {
        if (marked) (void)kmq_offset_set_remove(ends, offset, offset + 1, NULL); /* an undo: cannot fail */
        return rc;
    }
    count_answer(ledger, answer);
    return answer;
}

int kmq_ledger_settle(kmq_ledger *ledger, int64_t offset, kmq_end_cause cause)
{
    bool was_open;
    if (!kmq_offset_set_try_remove(&ledger->open, offset, &was_open) || !was_open)
        return settle_any(ledger, offset, cause);
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_OK;
    int rc = kmq_offset_set_add(&ledger->ends[cause], offset, offset + 1, NULL);
    if (rc != KMQ_OK) (void)kmq_offset_set_add(&ledger->open, offset, offset + 1, NULL); /* an undo: cannot fail */
    return rc;
}

/* How many offsets from the first on are consecutive and all open, so that they can be settled as one range; 1 when it is not
 * worth asking. Callers that work in batches settle runs. */
static size_t open_run(const kmq_ledger *ledger, const int64_t *offsets, size_t n)
{
    kmq_range run;
    size_t k = 1;
    while (k < n && offsets[k - 1] < INT64_MAX && offsets[k] == offsets[k - 1] + 1) k++;
    if (k < 4 || !kmq_offset_set_next(&ledger->open, offsets[0], &run) || run.lo != offsets[0]) return 1;
    return run.hi - run.lo < (int64_t)k ? (size_t)(run.hi - run.lo) : k;
}

static int settle_run(kmq_ledger *ledger, int64_t lo, int64_t hi, kmq_end_cause cause)
{
    bool marked = ledger->delivery == KMQ_DELIVERY_MARKERS;
    int rc = marked ? kmq_offset_set_add(&ledger->ends[cause], lo, hi, NULL) : KMQ_OK;
    if (rc != KMQ_OK) return rc;
    rc = kmq_offset_set_remove(&ledger->open, lo, hi, NULL);
    if (rc != KMQ_OK && marked)
        (void)kmq_offset_set_remove(&ledger->ends[cause], lo, hi, NULL); /* an undo: cannot fail */
    return rc;
}

int kmq_ledger_settle_many(kmq_ledger *ledger, const int64_t *offsets, size_t n, kmq_end_cause cause, int8_t *results)
{
    for (size_t i = 0, k; i < n; i += k) {
        int64_t lo = offsets[i];
        int rc;
        k = open_run(ledger, offsets + i, n - i);
        if (k > 1)
            rc = settle_run(ledger, lo, lo + (int64_t)k, cause);
        else
            rc = kmq_ledger_settle(ledger, lo, cause);
        for (size_t r = i; r < i + k && results != NULL; r++) results[r] = (int8_t)rc;
    }
    return KMQ_OK;
}

int kmq_ledger_retry(kmq_ledger *ledger, int64_t offset)
{
    int answer;
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_EINVAL;
    int rc = take_out(ledger, find_home(ledger, offset, &answer), offset);
    if (rc != KMQ_OK) return rc;
    count_answer(ledger, answer);
    return answer;
}

int kmq_ledger_extend(kmq_ledger *ledger, int64_t offset, int64_t limit_ms)
{
    int answer, rc;
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_EINVAL;
    home at = find_home(ledger, offset, &answer);
    if (answer != KMQ_OK) {
        count_answer(ledger, answer);
        return answer;
    }
    rc = kmq_limits_put(&ledger->own, offset, limit_ms);
    if (rc != KMQ_OK || at == IN_OWN) return rc;
    rc = take_out(ledger, IN_OPEN, offset);
    if (rc != KMQ_OK) (void)kmq_limits_remove(&ledger->own, offset);
    return rc;
}

int kmq_ledger_take_end(kmq_ledger *ledger, kmq_end_cause cause, kmq_range *out, size_t max_ranges, size_t *n)
{
    kmq_offset_set *ends = &ledger->ends[cause];
    int64_t from = 0;
    for (*n = 0; *n < max_ranges && kmq_offset_set_next(ends, from, &out[*n]); ++*n) from = out[*n].hi;
    if (*n > 0) {
        int rc = kmq_offset_set_remove(ends, out[0].lo, out[*n - 1].hi, NULL);
        assert(rc == KMQ_OK); /* whole runs: no full chunk is cut */
        (void)rc;
    }
    return KMQ_OK;
}

int kmq_ledger_end_failed(kmq_ledger *ledger, kmq_end_cause cause, const kmq_range *ranges, size_t n)
{
    kmq_offset_set *ends = &ledger->ends[cause];
    int rc = KMQ_OK;
    kmq_offset_set_hold(ends);
    for (size_t i = 0; i < n && rc == KMQ_OK; i++) {
        rc = kmq_offset_set_add(ends, ranges[i].lo, ranges[i].hi, NULL);
        if (rc == KMQ_OK) continue;
        while (i-- > 0) (void)kmq_offset_set_remove(ends, ranges[i].lo, ranges[i].hi, NULL); /* an undo: cannot fail */
        break;
    }
    kmq_offset_set_release(ends);
    return rc;
}

int64_t kmq_ledger_ends(const kmq_ledger *ledger)
{
    int64_t n = 0;
    for (size_t i = 0; i < KMQ_END_CAUSES; i++) n += kmq_offset_set_count(&ledger->ends[i]);
    return n;
}

/* ---- renewal, commit, end of the assignment */

/* Ready (and starting) segments in [from, below) behind the ranges that out has; returns where it stopped. */
static int64_t add_waiting(const kmq_ledger *ledger, bool starting, int64_t from, int64_t below, kmq_range *out,
                           size_t max_ranges, size_t *n)
{
    for (size_t i = find_segment(ledger, from); i < ledger->segments.count && from < below; i++) {
        const segment *s = segment_at(ledger, i);
        if (s->lo >= below) break;
        if (s->state != READY && !(starting && s->state == STARTING)) continue;
        kmq_range run = {s->lo > from ? s->lo : from, s->hi < below ? s->hi : below};
        if (*n > 0 && out[*n - 1].hi == run.lo)
            out[*n - 1].hi = run.hi;
        else if (*n < max_ranges)
            out[(*n)++] = run;
        else
            break;
        from = run.hi;
    }
    return from;
}

int kmq_ledger_held(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n)
{
    int64_t from = *cursor;
    *n = 0;
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_OK;
    from = open_runs(ledger, from, INT64_MAX, INT64_MAX, out, max_ranges, n);
    if (*n < max_ranges) from = add_waiting(ledger, false, from, INT64_MAX, out, max_ranges, n);
    *cursor = from;
    return KMQ_OK;
}

int kmq_ledger_covered_waiting(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n)
{
    *n = 0;
    if (ledger->delivery != KMQ_DELIVERY_MARKERS) return KMQ_OK;
    *cursor = add_waiting(ledger, false, *cursor, ledger->covered, out, max_ranges, n);
    return KMQ_OK;
}

int kmq_ledger_unseen(const kmq_ledger *ledger, int64_t below, int64_t *cursor, kmq_range *out, size_t max_ranges,
                      size_t *n)
{
    *n = 0;
    *cursor = add_waiting(ledger, true, *cursor, below, out, max_ranges, n);
    return KMQ_OK;
}

int64_t kmq_ledger_floor(const kmq_ledger *ledger)
{
    kmq_range run;
    int64_t floor = first_waiting(ledger);
    if (ledger->delivery == KMQ_DELIVERY_OFFSETS && kmq_offset_set_next(&ledger->open, 0, &run) && run.lo < floor)
        return run.lo;
    return floor;
}

void kmq_ledger_cover(kmq_ledger *ledger, int64_t offset)
{
    if (offset > ledger->covered) ledger->covered = offset;
}

void kmq_ledger_retire(kmq_ledger *ledger)
{
    ledger->position = first_waiting(ledger); /* the floor stays below what is forgotten */
    ledger->retired = true;
    queue_free(ledger, &ledger->segments);
    ledger->waiting = ledger->parking = ledger->lead_n = 0;
    ledger->lead = ledger->next_start = 0;
}

/* ---- looking */

int64_t kmq_ledger_open(const kmq_ledger *ledger)
{
    return kmq_offset_set_count(&ledger->open) + kmq_limits_count(&ledger->own);
}

int64_t kmq_ledger_waiting(const kmq_ledger *ledger) { return ledger->waiting; }

int64_t kmq_ledger_parking(const kmq_ledger *ledger) { return ledger->parking; }

int64_t kmq_ledger_oldest_open(const kmq_ledger *ledger)
{
    kmq_range run;
    return next_open(ledger, 0, INT64_MAX, INT64_MAX, &run) ? run.lo : -1;
}

int64_t kmq_ledger_oldest_open_ms(const kmq_ledger *ledger)
{
    int64_t offset = kmq_ledger_oldest_open(ledger), limit = offset < 0 ? INT64_MAX : limit_at(ledger, offset);
    return limit == INT64_MAX ? INT64_MAX : limit - ledger->max_processing_ms;
}

bool kmq_ledger_is_open(const kmq_ledger *ledger, int64_t offset)
{
    return kmq_offset_set_has(&ledger->open, offset) || kmq_limits_has(&ledger->own, offset);
}

kmq_ledger_counts kmq_ledger_counters(const kmq_ledger *ledger) { return ledger->counts; }

size_t kmq_ledger_bytes(const kmq_ledger *ledger)
{
    size_t bytes = sizeof(*ledger) + ledger->segments.cap * sizeof(segment) + ledger->blocks.cap * sizeof(block);
    bytes += kmq_offset_set_bytes(&ledger->open) + kmq_offset_set_bytes(&ledger->late) + kmq_limits_bytes(&ledger->own);
    for (size_t i = 0; i < KMQ_END_CAUSES; i++) bytes += kmq_offset_set_bytes(&ledger->ends[i]);
    return bytes;
}

/* ---- invariants */

#ifdef NDEBUG
void kmq_ledger_check(const kmq_ledger *ledger) { (void)ledger; }
#else
static bool disjoint(const kmq_offset_set *a, const kmq_offset_set *b)
{
    kmq_range x, y;
    int64_t from = 0;
    while (kmq_offset_set_next(a, from, &x) && kmq_offset_set_next(b, x.lo, &y)) {
        if (y.lo < x.hi) return false;
        from = y.lo; /* nothing of b before it */
    }
    return true;
}

static void check_segments(const kmq_ledger *ledger)
{
    int64_t waiting = 0, parking = 0, lead_n = 0, end = 0;
    for (size_t i = 0; i < ledger->segments.count; i++) {
        const segment *s = segment_at(ledger, i);
        assert(end <= s->lo && s->lo < s->hi);
        end = s->hi;
        waiting += s->hi - s->lo;
        if (s->state == PARKING) parking += s->hi - s->lo;
        if (i < ledger->lead) lead_n += s->hi - s->lo;
        assert(i > ledger->lead || (s->state == READY) == (i < ledger->lead));
        assert(i >= ledger->next_start || s->state != UNSTARTED);
    }
    assert(end <= ledger->position);
    assert(waiting == ledger->waiting && parking == ledger->parking && lead_n == ledger->lead_n);
    assert(ledger->lead <= ledger->segments.count && ledger->next_start <= ledger->segments.count);
}

static void check_blocks(const kmq_ledger *ledger)
{
    int64_t hi = ledger->overdue_below, last;
    for (size_t i = 0; i < ledger->blocks.count; i++) {
        const block *b = block_at(ledger, i);
        assert(b->hi > hi);
        assert(i == 0 || b->limit_ms > b[-1].limit_ms);
        hi = b->hi;
    }
    if (kmq_offset_set_last(&ledger->open, &last)) assert(last < hi);
}

static void check_own(const kmq_ledger *ledger)
{
    kmq_range run = {0, 0};
    kmq_limits_check(&ledger->own);
    while (kmq_limits_next(&ledger->own, run.hi, &run)) {
        assert(run.hi <= first_waiting(ledger));
        for (int64_t o = run.lo; o < run.hi; o++) {
            assert(!kmq_offset_set_has(&ledger->open, o) && !kmq_offset_set_has(&ledger->late, o));
            for (size_t i = 0; i < KMQ_END_CAUSES; i++) assert(!kmq_offset_set_has(&ledger->ends[i], o));
        }
    }
}

void kmq_ledger_check(const kmq_ledger *ledger)
{
    int64_t last;
    check_segments(ledger);
    check_blocks(ledger);
    check_own(ledger);
    kmq_offset_set_check(&ledger->open);
    kmq_offset_set_check(&ledger->late);
    if (kmq_offset_set_last(&ledger->open, &last)) assert(last < first_waiting(ledger));
    if (kmq_offset_set_last(&ledger->late, &last)) assert(last < first_waiting(ledger));
    assert(disjoint(&ledger->open, &ledger->late));
    assert(ledger->delivery == KMQ_DELIVERY_MARKERS || kmq_ledger_ends(ledger) == 0);
    for (size_t i = 0; i < KMQ_END_CAUSES; i++) {
        kmq_offset_set_check(&ledger->ends[i]);
        assert(disjoint(&ledger->open, &ledger->ends[i]));
    }
}
#endif
