/* kmq_ledger - what of one assigned partition is fetched, STARTed or parked, handed out and settled, and what may be
 * committed.
 *
 * One ledger per partition and assignment epoch: an ack that names an old epoch finds the old ledger or none, never
 * this one. Messages are fetched, STARTed and handed out in offset order; they are settled in any order.
 *
 *   offsets    . . . . | o . o o x o . | r r r | s s s s | u u u u u |
 *                      |               |                             |
 *          settled     |     open      |           waiting           |  not fetched yet
 *                 oldest open        floor                        position
 *
 *   waiting   segments [lo, hi) without holes, ascending, each in one state: u unstarted, s starting, r ready, parking
 *   open o    an offset set, and beside it the few with a limit of their own (extend, see limits.h);  late x: another, of those whose time limit passed;  settled: in no set at all
 *   ends      an offset set for each cause: settled, and its END record is not written yet
 *   blocks    (hi, limit): what was handed out below hi, and not below the block before, is late from limit on
 *
 *   fetched -> unstarted -(take_start)-> starting -(started)-> ready -(hand_out)-> open -(settle, retry)-> gone
 *                  ^----(start_failed)------'                                        |
 *                                                           (take_timeouts) -> late -'-(settle, retry)-> gone
 *           -> parking -(parked)-> gone: a delayed message, the tracker's from then on; it is never handed out
 *
 * With :offsets and :at_most_once there are no markers: what is fetched is ready at once, nothing is renewed, times
 * out, is retried or waits for an END. With :at_most_once what is handed out is done: it is never open.
 *
 * Invariants (kmq_ledger_check):
 *   (1) segments ascend, are not empty, end at or below the position; `waiting` is their sum;
 *   (2) the first `lead` segments are ready and the next is not; `lead_n`, their sum, can be handed out;
 *   (3) no segment before next_start is unstarted;
 *   (4) every open or late offset is below every waiting one, and none is both;
 *   (5) no open offset waits for an END;
 *   (6) blocks ascend in hi and in limit; every open offset is below the last block's hi, or below overdue_below;
 *   (7) what has a limit of its own is in none of the sets and below every waiting offset.
 *
 * Costs, with m segments (what waits, broken where offsets are missing and where STARTs begin): fetch, hand_out and
 * take_start O(1) a segment; started and start_failed O(log m) and what they change; parked O(m); settle and retry as the offset
 * set, a bit in a bitmap; a run of consecutive offsets in settle_many costs as one.
 * Memory: 24 B a segment; the offset sets, by holes and not by span; at most 1,025 blocks of 16 B, because limits are
 * rounded up to the 1,024th part of the time limit. Late offsets are bounded: beyond KMQ_LEDGER_LATE_MAX the lowest
 * are forgotten, and an ack for one of these is unknown instead of late. The caller bounds what is waiting and open.
 *
 * Thread rule: the caller holds the partition's lock (const calls too). No I/O, no clock: `now` comes in, from any
 * monotonic clock. ENOMEM always means: nothing changed. */
#ifndef KMQ_LEDGER_H
#define KMQ_LEDGER_H
#include "kmq.h"
#include "limits.h"
#include "offset_set.h"

enum { KMQ_LEDGER_LATE_MAX = 65536 };

typedef enum kmq_delivery { KMQ_DELIVERY_MARKERS, KMQ_DELIVERY_OFFSETS, KMQ_DELIVERY_AT_MOST_ONCE } kmq_delivery;

typedef struct kmq_ledger_counts {
    uint64_t repeats; /* fetched or skipped below the position */
    uint64_t unknown; /* settled or retried: never handed out, or gone already */
    uint64_t late;    /* settled or retried after the time limit */
} kmq_ledger_counts;

/* An array that is filled at its end and emptied at its front. */
typedef struct kmq_ledger_queue {
    void *items;
    size_t head, count, cap;
} kmq_ledger_queue;

typedef struct kmq_ledger {
    kmq_delivery delivery;
    bool retired;
    int64_t position, covered;
    int64_t max_processing_ms, step_ms; /* limits are multiples of step_ms */
    kmq_ledger_queue segments;
    int64_t waiting, parking, lead_n; /* parking is part of waiting */
    size_t lead, next_start;
    kmq_offset_set open, late, ends[KMQ_END_CAUSES];
    kmq_limits own; /* open, with limits of their own */
    kmq_ledger_queue blocks;
    int64_t overdue_below, overdue_ms; /* of the blocks dropped when their limit passed: the last hi and limit */
    kmq_ledger_counts counts;
    kmq_alloc alloc;
} kmq_ledger;

/* position >= 0: the first offset to be fetched. max_processing_ms >= 0: the time limit from the hand-out on, INT64_MAX
 * for none. alloc is copied; what its ctx points to must outlive the ledger. Allocates nothing. OK | EINVAL */
int kmq_ledger_init(kmq_ledger *ledger, const kmq_alloc *alloc, kmq_delivery delivery, int64_t position,
                    int64_t max_processing_ms);
void kmq_ledger_free(kmq_ledger *ledger);

/* ---- fetching */

/* offsets strictly ascending, as fetched; all of them or none. Those below the position are repeats: counted, no
 * effect; they can only come first, so *accepted (may be NULL) says how many at the END of the array were new. OK |
 * ENOMEM | EINVAL (not ascending, INT64_MAX, or the ledger is retired) */
int kmq_ledger_fetch(kmq_ledger *ledger, const int64_t *offsets, size_t n, size_t *accepted);
/* One fetched offset that is not for us (filtered, other group's copy): moves the position, is never handed out, holds
 * no commit. OK | EREPEAT (below the position: counted) | EINVAL */
int kmq_ledger_skip(kmq_ledger *ledger, int64_t offset);

/* One fetched offset that is delayed: it waits for its PARK record and holds the commit until then. OK | EREPEAT (below the
 * position: counted) | ENOMEM | EINVAL (retired, INT64_MAX, or a mode without markers) */
int kmq_ledger_park(kmq_ledger *ledger, int64_t offset);
/* Every parking offset in [lo, hi) is durable in the marker topic: it is the tracker's now. OK | ENOMEM | EINVAL (hi < lo) */
int kmq_ledger_parked(kmq_ledger *ledger, int64_t lo, int64_t hi);

/* ---- START (nothing to do in the modes without markers: 0 ranges) */

/* The next offsets that need a START, as exact ranges in order; they are `starting` from now on. At most max_ranges
 * ranges and max_offsets offsets; *n = ranges written. No offset that was starting before lies between the ranges of
 * one call, so that [out[0].lo, out[n - 1].hi) names just these, and so does any part of the sequence. OK | ENOMEM (*n
 * = 0) */
int kmq_ledger_take_start(kmq_ledger *ledger, kmq_range *out, size_t max_ranges, int64_t max_offsets, size_t *n);
/* Is there more for take_start? */
bool kmq_ledger_unstarted(const kmq_ledger *ledger);
/* Every starting offset in [lo, hi) is durable / must be STARTed again. Others in there are left alone. OK | ENOMEM |
 * EINVAL (hi < lo) */
int kmq_ledger_started(kmq_ledger *ledger, int64_t lo, int64_t hi);
int kmq_ledger_start_failed(kmq_ledger *ledger, int64_t lo, int64_t hi);

/* ---- handing out */

/* How many messages can be handed out now, in offset order: the ready ones before the first that is not ready. */
int64_t kmq_ledger_ready(const kmq_ledger *ledger);
/* Hands out the first n ready ones at now_ms. They are open until settled (:at_most_once: done at once); their limit is
 * now + max_processing, rounded up by at most its 1,024th part. OK | ENOMEM | EINVAL (n < 0 or n > ready) */
int kmq_ledger_hand_out(kmq_ledger *ledger, int64_t n, int64_t now_ms);
/* Offset of the k-th message that is fetched and neither handed out nor parked (k = 0: the first), or the position when
 * there are not so many. */
int64_t kmq_ledger_waiting_offset(const kmq_ledger *ledger, int64_t k);

/* ---- settling */

/* Settles one open offset: it waits for its END of that cause. OK | ELATE (its limit passed before; counted, and the
 * END is written all the same) | EUNKNOWN (never handed out, or gone already: counted, no effect) | ENOMEM */
int kmq_ledger_settle(kmq_ledger *ledger, int64_t offset, kmq_end_cause cause);
/* The same for many, in any order. results (may be NULL) gets a result for each offset, ENOMEM included; returns OK. */
int kmq_ledger_settle_many(kmq_ledger *ledger, const int64_t *offsets, size_t n, kmq_end_cause cause, int8_t *results);
/* The caller writes a RETRY for it: no longer open, renewed or timed out. Results as settle (ELATE: the RETRY of the
 * limit is written already, write none), and EINVAL in the modes without markers. */
int kmq_ledger_retry(kmq_ledger *ledger, int64_t offset);

/* The handler may take longer: its limit is limit_ms from now on, on the clock of hand_out. OK | ELATE | EUNKNOWN (both
 * counted) | ENOMEM | EFULL (KMQ_LIMITS_MAX others have one) | EINVAL in the modes without markers */
int kmq_ledger_extend(kmq_ledger *ledger, int64_t offset, int64_t limit_ms);

/* END records to write: takes up to max_ranges ranges (ascending, whole runs) that wait for an END of `cause`. OK */
int kmq_ledger_take_end(kmq_ledger *ledger, kmq_end_cause cause, kmq_range *out, size_t max_ranges, size_t *n);
/* Ranges that take_end gave could not be written: they wait again. OK | ENOMEM */
int kmq_ledger_end_failed(kmq_ledger *ledger, kmq_end_cause cause, const kmq_range *ranges, size_t n);
int64_t kmq_ledger_ends(const kmq_ledger *ledger); /* offsets waiting for an END */

/* ---- time */

/* Open offsets whose limit has passed by now_ms, up to max_ranges ranges, ascending; they are late from now on (the
 * caller writes RETRY timeout). Call again until *n is 0. OK | ENOMEM (*n = 0) */
int kmq_ledger_take_timeouts(kmq_ledger *ledger, int64_t now_ms, kmq_range *out, size_t max_ranges, size_t *n);
/* All that is open, whatever its limit, in the same way: it is given to others (the caller writes RETRY released), and whoever settles it from now
 * on is too late. Call again until *n is 0. OK | ENOMEM (*n = 0) */
int kmq_ledger_give_up(kmq_ledger *ledger, kmq_range *out, size_t max_ranges, size_t *n);
int64_t kmq_ledger_next_timeout(const kmq_ledger *ledger); /* ms, INT64_MAX when none */
/* What a renewal must name: STARTed and not handed out, and open. Ascending from *cursor on (begin with INT64_MIN),
 * which is moved behind what was written; *n = 0 = end. OK */
int kmq_ledger_held(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n);

/* ---- commit, end of the assignment */

/* Where the group's offset may stand: lowest not handed out (:markers, :at_most_once), lowest not settled (:offsets).
 * Never moves back. */
int64_t kmq_ledger_floor(const kmq_ledger *ledger);
/* A commit of this offset was sent (also one that may have got through unseen). The largest counts. */
void kmq_ledger_cover(kmq_ledger *ledger, int64_t offset);
/* For the end of an assignment, before retire: STARTed offsets never handed out that a commit already covers: no owner
 * would fetch them again, so the caller RETRYs them (released). Cursor as in held. OK */
int kmq_ledger_covered_waiting(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n);
/* Not handed out, with a START that is durable or on its way, below that offset: when these are to be skipped, an END says so. Cursor as in
 * held. OK */
int kmq_ledger_unseen(const kmq_ledger *ledger, int64_t below, int64_t *cursor, kmq_range *out, size_t max_ranges,
                      size_t *n);
/* The assignment is over: forgets what was not handed out; what is open can still be settled, renewed and times out. */
void kmq_ledger_retire(kmq_ledger *ledger);

/* ---- looking */
int64_t kmq_ledger_open(const kmq_ledger *ledger);        /* handed out, not settled, not late */
int64_t kmq_ledger_waiting(const kmq_ledger *ledger);     /* fetched, not handed out, not parked */
int64_t kmq_ledger_parking(const kmq_ledger *ledger);     /* of these: wait for their PARK */
int64_t kmq_ledger_oldest_open(const kmq_ledger *ledger); /* offset, or -1 */
/* When that one was handed out: at most the 1,024th part of the time limit too late, or, once its own limit is later than the shared
 * one, later still (the age it gives is a lower bound). INT64_MAX: nothing is open, or there is no time limit to know it by. */
int64_t kmq_ledger_oldest_open_ms(const kmq_ledger *ledger);
bool kmq_ledger_is_open(const kmq_ledger *ledger, int64_t offset);
kmq_ledger_counts kmq_ledger_counters(const kmq_ledger *ledger);
size_t kmq_ledger_bytes(const kmq_ledger *ledger); /* the struct and all it has allocated */
void kmq_ledger_check(const kmq_ledger *ledger);   /* asserts the invariants: O(memory) */
#endif
