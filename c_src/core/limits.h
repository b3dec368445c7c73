/* kmq_limits - offsets of which each has a time limit of its own.
 *
 *     items   [ * | * | * | * ]          ascending by offset
 *               |   '-------.
 *     heap    { limit 500 } { limit 900 } ...         by limit, the first one due on top
 *
 * For the few messages whose handlers asked for more time; the many share their limits (see ledger.h).
 *
 * Invariants (kmq_limits_check):
 *   (1) items ascend strictly;  (2) the heap holds just these items;  (3) count <= KMQ_LIMITS_MAX.
 *
 * Costs, with n items: put and remove O(log n) and a move of 8 B an item behind it; has O(log n); first O(1);
 * next and next_due O(log n) and what they walk over.
 * Memory: 32 B an item, and about 20 B for its places in the array and the heap.
 * Thread rule: one owner. No I/O, no clock. */
#ifndef KMQ_LIMITS_H
#define KMQ_LIMITS_H
#include "heap.h"
#include "kmq.h"

enum { KMQ_LIMITS_MAX = 65536 };

typedef struct kmq_limit kmq_limit;

typedef struct kmq_limits {
    kmq_limit **items;
    size_t count, cap;
    kmq_heap heap;
    uint64_t sequence;
    kmq_alloc alloc;
} kmq_limits;

/* alloc is copied; what its ctx points to must outlive the set. Allocates nothing. */
void kmq_limits_init(kmq_limits *limits, const kmq_alloc *alloc);
void kmq_limits_free(kmq_limits *limits);

/* The offset gets this limit; one that it had is replaced, which cannot fail. OK | ENOMEM | EFULL (KMQ_LIMITS_MAX others) */
int kmq_limits_put(kmq_limits *limits, int64_t offset, int64_t limit_ms);
/* false: it was not in there */
bool kmq_limits_remove(kmq_limits *limits, int64_t offset);
bool kmq_limits_has(const kmq_limits *limits, int64_t offset);

/* The least limit, INT64_MAX when empty. */
int64_t kmq_limits_first(const kmq_limits *limits);
/* The first run of consecutive offsets at or after `from`. false: there is none, *run unchanged. */
bool kmq_limits_next(const kmq_limits *limits, int64_t from, kmq_range *run);
/* The same of those whose limit is at or before now_ms; INT64_MAX is no limit. */
bool kmq_limits_next_due(const kmq_limits *limits, int64_t from, int64_t now_ms, kmq_range *run);

static inline int64_t kmq_limits_count(const kmq_limits *limits) { return (int64_t)limits->count; }
size_t kmq_limits_bytes(const kmq_limits *limits); /* allocated; the struct itself is not included */
void kmq_limits_check(const kmq_limits *limits);   /* asserts the invariants: O(n log n) */
#endif
