/* kmq_offset_set - a set of offsets of one partition whose memory follows its holes, not its span.
 *
 *     entries, ascending, one for each chunk of 65,536 offsets that has members, or one for a run of full chunks:
 *
 *       | first 0     | first 700     | first 701 | first 702      |      first = number of its (first) chunk
 *       | FULL        | BITS          | ARRAY     | FULL           |
 *       | n_full 700  | count 61,440  | count 3   | n_full 2^30    |
 *             |              |             |             |
 *        no memory        8 KiB        uint16_t x 4   no memory        in no entry = no members
 *                       one bit an     ascending
 *                         offset
 *
 * Members are 0 .. 2^63 - 2; ranges are half-open, so hi = INT64_MAX reaches the end.
 *
 * Invariants (kmq_offset_set_check):
 *   (1) entries ascend and do not overlap;
 *   (2) no entry is empty, and ARRAY and BITS are never full: that is a FULL entry;
 *   (3) two FULL entries never touch: they would be one;
 *   (4) an ARRAY ascends strictly and has at most 128 members;
 *   (5) the counts and the byte total are exact.
 *
 *        absent --add--> ARRAY --129th member--> BITS --65,536th--> FULL
 *          ^---remove----' ^------32 left--------' ^---any removed----'
 *
 * Costs: finding a chunk O(1) when it is the last one used or the entries are dense, else O(log entries). One
 * offset in BITS O(1), in an ARRAY at most 256 B moved; a new entry moves those above it. A range costs its two
 * ends: what lies between them becomes one FULL entry or none. next() is O(1) when walking.
 * Memory: 24 B an entry; 2 B a member up to 128 in a chunk, else 8 KiB a chunk (0.125 B for each offset it spans); a
 * run of full chunks is one entry.
 *
 * Failure: ENOMEM leaves the members as they were. Removing allocates only to cut into a FULL entry; and what an
 * add has put in can always be taken out again (see hold), so that callers can undo.
 * Thread rule: one owner (const calls may run side by side). No I/O, no clock. */
#ifndef KMQ_OFFSET_SET_H
#define KMQ_OFFSET_SET_H
#include "kmq.h"

/* One entry; offset_set.c says what its fields mean. */
typedef struct kmq_offset_entry kmq_offset_entry;
typedef struct kmq_offset_spare kmq_offset_spare;

typedef struct kmq_offset_set {
    kmq_offset_entry *entries;
    size_t n_entries, cap;
    size_t hint;              /* the entry used last */
    int64_t count;            /* members */
    size_t bytes;             /* allocated, spares included */
    kmq_offset_spare *spares; /* bitmaps of chunks that the last add (or the adds since hold) filled */
    bool held;
    kmq_alloc alloc;
} kmq_offset_set;

/* alloc is copied; what its ctx points to must outlive the set. Allocates nothing. */
void kmq_offset_set_init(kmq_offset_set *set, const kmq_alloc *alloc);
/* Gives back all memory; the set is empty and may be used again. */
void kmq_offset_set_free(kmq_offset_set *set);

/* Adds [lo, hi). *added (may be NULL): how many of them were not members yet. OK | ENOMEM | EINVAL (lo < 0 or hi < lo)
 */
int kmq_offset_set_add(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *added);
/* Removes [lo, hi). *removed (may be NULL): how many of them were members. OK | ENOMEM | EINVAL */
int kmq_offset_set_remove(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *removed);

/* Removes one offset if that needs no memory, now or for an add that undoes it at once. *removed: was it a member.
 * false: it is not so (a full chunk, or one with few members), nothing done. The quick way, for most calls. */
bool kmq_offset_set_try_remove(kmq_offset_set *set, int64_t offset, bool *removed);

/* Undo. After an add of [lo, hi) of which nothing was a member, remove(lo, hi) cannot fail as long as nothing else was
 * done to the set. Between hold and release that is true of each such add since hold, undone last one first. Holding
 * keeps 8 KiB for each chunk that an add fills. No nesting. */
void kmq_offset_set_hold(kmq_offset_set *set);
void kmq_offset_set_release(kmq_offset_set *set);

bool kmq_offset_set_has(const kmq_offset_set *set, int64_t offset);
static inline int64_t kmq_offset_set_count(const kmq_offset_set *set) { return set->count; }
/* The first maximal run of members at or after `from`: its part from `from` on. false: there is none, *run unchanged.
 */
bool kmq_offset_set_next(const kmq_offset_set *set, int64_t from, kmq_range *run);
/* The largest member. false: the set is empty, *offset unchanged. */
bool kmq_offset_set_last(const kmq_offset_set *set, int64_t *offset);

size_t kmq_offset_set_bytes(const kmq_offset_set *set); /* allocated; the struct itself is not included */
void kmq_offset_set_check(const kmq_offset_set *set);   /* asserts the invariants: O(memory) */
#endif
