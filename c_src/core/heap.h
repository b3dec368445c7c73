/* kmq_heap - what is due first: a min-heap of items that live inside their owners' structs.
 *
 *     items   [ 0 | 1 2 3 4 | 5 6 7 8 | ... ]        an array of pointers, four children a node:
 *               |   '-----' children of 0             child c of node i stands at 4 i + 1 + c
 *               v
 *             struct owner { ...; kmq_heap_item item; }      item.index = where it stands, so that any can leave at
 * once
 *
 * Order: deadline, then sequence; the caller hands out sequences, so ties come out in the order they were made. Four
 * children because a level costs a cache miss and comparing within one costs little.
 *
 * Invariants (kmq_heap_check):
 *   (1) no item is less than its parent;  (2) items[i]->index == i;  (3) count <= cap, and cap is 0 only when items is
 * NULL. Costs: push, pop, remove, update O(log n); top O(1). 8 to 12 bytes a slot, beside the item in its owner. The
 * array grows by half and shrinks when three quarters are free. Thread rule: one owner, no I/O, no clock. The heap
 * never allocates or frees items. */
#ifndef KMQ_HEAP_H
#define KMQ_HEAP_H
#include "kmq.h"

typedef struct kmq_heap_item {
    int64_t deadline;
    uint64_t sequence;
    size_t index; /* KMQ_HEAP_OUT when in no heap; the heap's own, do not write it */
} kmq_heap_item;

#define KMQ_HEAP_OUT SIZE_MAX

typedef struct kmq_heap {
    kmq_heap_item **items;
    size_t count, cap;
    kmq_alloc alloc;
} kmq_heap;

/* The owner of an embedded item, as in KMQ_HEAP_OWNER(item, struct lease, item). */
#define KMQ_HEAP_OWNER(item, type, member) ((type *)(void *)((char *)(item)-offsetof(type, member)))

/* alloc is copied; what its ctx points to must outlive the heap. Allocates nothing. */
void kmq_heap_init(kmq_heap *heap, const kmq_alloc *alloc);
/* Frees the array. The items that were in it are untouched, their index included. */
void kmq_heap_free(kmq_heap *heap);

/* Before an item's first push: marks it as being in no heap. */
void kmq_heap_item_init(kmq_heap_item *item);
static inline bool kmq_heap_item_in(const kmq_heap_item *item) { return item->index != KMQ_HEAP_OUT; }

/* Room for n more: until the next pop or remove the next n pushes cannot fail. OK | ENOMEM */
int kmq_heap_reserve(kmq_heap *heap, size_t n);
/* item is in no heap; its deadline and sequence are set by the caller. It must stay where it is until it leaves. OK |
 * ENOMEM */
int kmq_heap_push(kmq_heap *heap, kmq_heap_item *item);
/* the least item, NULL when empty */
kmq_heap_item *kmq_heap_top(const kmq_heap *heap);
/* takes the least item out; NULL when empty */
kmq_heap_item *kmq_heap_pop(kmq_heap *heap);
/* takes out an item that is in this heap */
void kmq_heap_remove(kmq_heap *heap, kmq_heap_item *item);
/* a new deadline and sequence for an item that is in this heap */
void kmq_heap_update(kmq_heap *heap, kmq_heap_item *item, int64_t deadline, uint64_t sequence);
/* an item that moved in memory (realloc of its owner) tells where it is now; its key and index came along */
void kmq_heap_moved(kmq_heap *heap, kmq_heap_item *item);

static inline size_t kmq_heap_count(const kmq_heap *heap) { return heap->count; }
size_t kmq_heap_bytes(const kmq_heap *heap); /* allocated by the heap, items not included */
void kmq_heap_check(const kmq_heap *heap);   /* asserts the invariants: O(n) */
#endif
