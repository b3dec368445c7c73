/* kmq_lease_book - what of one queue partition is open, when it is due, and from which marker it must be replayed.
 *
 *   offsets    0        2,048      4,096      6,144
 *   pages      |..........|..........|..........|
 *   leases     [=========)[====)x[==)[=.=..=.=)      a lease: a span of a page with one deadline, marker, cause, flags
 *                                     '- with holes: 1 bit an offset, in a slot beside the tree
 *              \__________ kmq_lease_tree ___________/   offset order, minima of deadline and marker
 *
 * A pure fold over the marker topic: it changes only by what is read back from there. The rules:
 *
 *   START        opens, or takes over: due = log time + lease; must be replayed from this marker on
 *   PARK         likewise, due at the time it names; not an attempt
 *   EXTEND       open leases only (a START's, not a RETRY's): due = log time + lease
 *   RETRY        open offsets only: due = log time + delay, with its cause, flags and text
 *   END          closes what is open
 *   log time     the largest timestamp read; all sums saturate, and INT64_MAX is never due
 *
 * Markers that make no sense where they stand (END or RETRY of what is not open, EXTEND of a RETRY) leave no residue.
 *
 * In flight: taken by take_due, and not due meanwhile, whatever markers say, until its END is read or it is given back.
 *
 * Invariants (kmq_lease_book_check), beside the tree's:
 *   (1) a lease lies in one page of 2,048 offsets;  (2) its slot, if it has one, holds bits or text or both, and is its own;
 *   (3) with bits, at least one is open, and none outside its span;  (4) open and in_flight are the sums over the leases;
 *   (5) a text is counted once for each slot that holds it.
 *
 * Memory: 32 B a lease; 1 bit an offset of its span, and about 32 B once, when it has holes. So in ranges of 1,000 it is
 * 0.05 B an open message, with acknowledgements at random in between 0.25 B an offset; 33 to 42 B for a message with a
 * deadline of its own.
 * Costs: a marker of one offset O(log leases); a range O(pages + log leases); a page with holes in a new pattern a few
 * microseconds; due messages O(1) each + O(log leases) a call.
 * Thread rule: one owner. No I/O, no clock. */
#ifndef KMQ_LEASE_BOOK_H
#define KMQ_LEASE_BOOK_H
#include "kmq.h"
#include "lease_tree.h"
#include "marker.h"

/* Offsets that one START or PARK may open. More is no batch of any handle, and would cost memory without end. */
enum { KMQ_LEASE_SET_MAX = 1 << 24 };

typedef struct kmq_lease_slot kmq_lease_slot;

typedef struct kmq_lease_book {
    kmq_alloc alloc;
    kmq_lease_tree tree;
    kmq_lease_slot *slots; /* [0] unused */
    uint32_t n_slots, slots_cap, free_slot, n_free_slots;
    uint64_t **spare_bits; /* for when the allocator fails in the middle of a change */
    size_t n_spare_bits, spare_bits_cap;
    int64_t log_time_ms;
    int64_t open, in_flight;
    size_t bytes; /* beside the tree's */
} kmq_lease_book;

/* Always KMQ_OK: the first allocation comes with the first lease. */
int kmq_lease_book_init(kmq_lease_book *book, const kmq_alloc *alloc);
void kmq_lease_book_free(kmq_lease_book *book);

/* Applies one marker read from M at marker_offset with timestamp ts_ms. CHECKPOINT and CLOCK change the log time only.
 * ENOMEM: unchanged. EINVAL: unchanged but for the log time: a START or PARK of more than KMQ_LEASE_SET_MAX offsets. */
int kmq_lease_book_apply(kmq_lease_book *book, const kmq_marker *marker, int64_t marker_offset, int64_t ts_ms);
int64_t kmq_lease_book_log_time(const kmq_lease_book *book); /* INT64_MIN before the first marker */

/* cause CRASH for a lapsed lease (flags COUNTS); RELEASED with flags PARKED for a delayed message whose time has come.
 * text of a RETRY's TLV 1 (NULL = none), valid until the next call that changes the book. */
typedef struct kmq_due {
    int64_t offset, due_ms;
    uint8_t cause, flags;
    const char *text;
    size_t text_len;
} kmq_due;

/* Takes up to max due offsets (due <= now_ms and offset < below), ascending; they are in flight from then on. Still open:
 * they hold the floor. Fewer than max: there are no more; or no memory to split a lease, and then next_due stays in the
 * past, so that they are asked for again. */
size_t kmq_lease_book_take_due(kmq_lease_book *book, int64_t now_ms, int64_t below, kmq_due *out, size_t max);
/* Due again at its deadline; no effect (KMQ_OK) when not in flight. ENOMEM: still in flight. */
int kmq_lease_book_give_back(kmq_lease_book *book, int64_t offset);
/* Is it open and in flight, and is what it is due for still true at now (no renewal read meanwhile)? For the last look
 * before a copy. */
bool kmq_lease_book_still_due(const kmq_lease_book *book, int64_t offset, int64_t now_ms);
/* What will be due by somebody's wish, a PARK or a RETRY (a lease is renewed before it lapses), after after_ms and by until_ms,
 * and is not in flight: calls each, in offset order, until it says false. Nothing is taken. O(what is due by until_ms). */
void kmq_lease_book_coming(const kmq_lease_book *book, int64_t after_ms, int64_t until_ms,
                           bool (*each)(void *ctx, int64_t offset), void *ctx);
int64_t kmq_lease_book_next_due(const kmq_lease_book *book); /* of what is not in flight; INT64_MAX = none */
/* What is due and not in flight, of the first `most` leases that are. O(these + log leases). */
int64_t kmq_lease_book_count_due(const kmq_lease_book *book, int64_t now_ms, size_t most);
int64_t kmq_lease_book_floor(const kmq_lease_book *book); /* smallest marker offset to replay; -1 = nothing open */
int64_t kmq_lease_book_open(const kmq_lease_book *book);
int64_t kmq_lease_book_in_flight(const kmq_lease_book *book);
bool kmq_lease_book_has(const kmq_lease_book *book, int64_t offset, kmq_due *out); /* out may be NULL */
/* Walks what is open in offset order: runs with equal due, cause and flags. cursor starts at INT64_MIN; the book may
 * change between calls. Each output may be NULL but run. */
bool kmq_lease_book_next(const kmq_lease_book *book, int64_t *cursor, kmq_range *run, int64_t *due_ms, uint8_t *cause,
                         uint8_t *flags);

/* CHECKPOINT out: calls sink for each part's entry bytes, at most KMQ_CHECKPOINT_ENTRIES_MAX. None when nothing is open: a
 * part without entries then still tells the log time. A negative result of sink ends it and is returned. Error texts are
 * not in it, nor what is in flight: that is open.
 * CHECKPOINT in: adds a decoded part's entries, with its as_of as their marker, and its log time. ENOMEM: some entries are
 * in, loading the part again completes them. EINVAL as apply. */
int kmq_lease_book_checkpoint(const kmq_lease_book *book, int (*sink)(void *ctx, const uint8_t *entries, size_t bytes),
                              void *ctx);
int kmq_lease_book_load(kmq_lease_book *book, const kmq_marker *checkpoint_part);

size_t kmq_lease_book_bytes(const kmq_lease_book *book); /* allocated, without the allocator's own overhead */
void kmq_lease_book_check(const kmq_lease_book *book);
#endif
