/* prototypes; the implementation adds the picture, invariants, costs and thread rule (style.md)
 *
 * One ledger per assigned partition and assignment epoch. The caller holds the partition's lock. Messages of a partition
 * are fetched, STARTed and handed out in offset order; they are settled in any order.
 *
 *   fetched -> (take_start) starting -> (started) ready -> (hand_out) open -> settle/retry/take_timeouts -> gone
 *      ^------------ start_failed -------/
 */
#ifndef KMQ_LEDGER_H
#define KMQ_LEDGER_H
#include "kmq.h"
#include "offset_set.h"
typedef enum kmq_delivery { KMQ_DELIVERY_MARKERS, KMQ_DELIVERY_OFFSETS, KMQ_DELIVERY_AT_MOST_ONCE } kmq_delivery;
typedef struct kmq_ledger kmq_ledger;
/* position: the first offset to be fetched. max_processing_ms: the time limit from the hand-out on. */
int kmq_ledger_init(kmq_ledger *ledger, const kmq_alloc *alloc, kmq_delivery delivery, int64_t position, int64_t max_processing_ms);
void kmq_ledger_free(kmq_ledger *ledger);

/* offsets ascending, as fetched; all of them or (ENOMEM) none. Those below the position are repeats: *accepted tells how many
 * at the END of the array were new (repeats can only be a prefix of an ascending batch); repeats are counted, no effect. */
int kmq_ledger_fetch(kmq_ledger *ledger, const int64_t *offsets, size_t n, size_t *accepted);
/* one fetched offset that is not for us (filtered, other group's copy): moves the position, is never handed out, holds no commit */
int kmq_ledger_skip(kmq_ledger *ledger, int64_t offset);

/* The next offsets that need a START, as ranges in order (exact: no holes inside); moves them to `starting`. At most max_ranges
 * ranges and max_offsets offsets; *n = ranges written. In :offsets/:at_most_once fetched is ready at once and this gives 0. */
int kmq_ledger_take_start(kmq_ledger *ledger, kmq_range *out, size_t max_ranges, int64_t max_offsets, size_t *n);
int kmq_ledger_started(kmq_ledger *ledger, int64_t lo, int64_t hi);      /* every starting offset in [lo, hi) is durable */
int kmq_ledger_start_failed(kmq_ledger *ledger, int64_t lo, int64_t hi); /* ... must be STARTed again */

/* How many messages can be handed out now, in offset order: the ready ones before the first that is not ready. */
int64_t kmq_ledger_ready(const kmq_ledger *ledger);
/* Hands out the first n ready ones at `now_ms` (n <= ready). They are open until settled; their limit is now + max_processing. */
int kmq_ledger_hand_out(kmq_ledger *ledger, int64_t n, int64_t now_ms);
/* offset of the k-th message that is fetched and not handed out (k = 0: the first), or the position when there are not so many */
int64_t kmq_ledger_waiting_offset(const kmq_ledger *ledger, int64_t k);

/* Settles one open offset: it waits for its END of that cause. OK | ELATE (timed out before: END is written all the same)
 * | EUNKNOWN (never handed out, or settled already: no effect, counted) | ENOMEM */
int kmq_ledger_settle(kmq_ledger *ledger, int64_t offset, kmq_end_cause cause);
/* The same for many, in any order; one result per offset into results (may be NULL). Fast: 1,000 in under 20 us. */
int kmq_ledger_settle_many(kmq_ledger *ledger, const int64_t *offsets, size_t n, kmq_end_cause cause, int8_t *results);
/* The caller writes a RETRY for it: no longer open, renewed or timed out. Same results (ELATE: the limit's RETRY is already written). */
int kmq_ledger_retry(kmq_ledger *ledger, int64_t offset);
/* a RETRY that could not be written: open again, so that it is renewed and can be retried (the handle keeps trying) */

/* END records to write: takes up to max_ranges ranges (ascending) waiting for an END of `cause`. */
int kmq_ledger_take_end(kmq_ledger *ledger, kmq_end_cause cause, kmq_range *out, size_t max_ranges, size_t *n);
int kmq_ledger_end_failed(kmq_ledger *ledger, kmq_end_cause cause, const kmq_range *ranges, size_t n);  /* they wait again */
int64_t kmq_ledger_ends(const kmq_ledger *ledger); /* offsets waiting for an END */

/* Open offsets whose limit has passed by now_ms, up to max_ranges ranges; they become late (the caller writes RETRY timeout). */
int kmq_ledger_take_timeouts(kmq_ledger *ledger, int64_t now_ms, kmq_range *out, size_t max_ranges, size_t *n);
int64_t kmq_ledger_next_timeout(const kmq_ledger *ledger); /* ms, INT64_MAX when none */
/* What a renewal must name: STARTed and not handed out, and open. Ascending from *cursor on (begin with INT64_MIN); *n = 0 = end. */
int kmq_ledger_held(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n);

/* Where the group's offset may stand: lowest not handed out and not settled (:markers), lowest not settled (:offsets),
 * all handed out (:at_most_once). Never moves back. */
int64_t kmq_ledger_floor(const kmq_ledger *ledger);
/* A commit of this offset was sent (also one that may have got through unseen). Largest such. */
void kmq_ledger_cover(kmq_ledger *ledger, int64_t offset);
/* For the end of an assignment: STARTed offsets never handed out that a commit already covers: the caller RETRYs them (released). */
int kmq_ledger_covered_waiting(const kmq_ledger *ledger, int64_t *cursor, kmq_range *out, size_t max_ranges, size_t *n);
/* The assignment is over: forgets what was not handed out; what is open can still be settled, renewed and times out. */
void kmq_ledger_retire(kmq_ledger *ledger);
int64_t kmq_ledger_open(const kmq_ledger *ledger);    /* handed out, not settled */
int64_t kmq_ledger_waiting(const kmq_ledger *ledger); /* fetched, not handed out */
int64_t kmq_ledger_oldest_open(const kmq_ledger *ledger); /* offset, or -1 */
typedef struct kmq_ledger_counts { uint64_t repeats, unknown, late; } kmq_ledger_counts;
kmq_ledger_counts kmq_ledger_counters(const kmq_ledger *ledger);
size_t kmq_ledger_bytes(const kmq_ledger *ledger);
void kmq_ledger_check(const kmq_ledger *ledger);
#endif
