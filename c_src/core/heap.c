/* kmq_heap - see heap.h for the picture, the invariants and the costs. */
#include "heap.h"

#include <assert.h>

enum { ARITY = 4, MIN_CAP = 16 };

static bool less(const kmq_heap_item *a, const kmq_heap_item *b)
{
    return a->deadline < b->deadline || (a->deadline == b->deadline && a->sequence < b->sequence);
}

static void place(kmq_heap *heap, kmq_heap_item *item, size_t i)
{
    heap->items[i] = item;
    item->index = i;
}

static void sift_up(kmq_heap *heap, kmq_heap_item *item, size_t i)
{
    while (i > 0) {
        size_t parent = (i - 1) / ARITY;
        if (!less(item, heap->items[parent])) break;
        place(heap, heap->items[parent], i);
        i = parent;
    }
    place(heap, item, i);
}

static void sift_down(kmq_heap *heap, kmq_heap_item *item, size_t i)
{
    for (;;) {
        size_t first = i * ARITY + 1, last = first + ARITY; /* cannot overflow: count pointers fit in memory */
        if (first >= heap->count) break;
        if (last > heap->count) last = heap->count;
        size_t best = first;
        for (size_t c = first + 1; c < last; c++)
            if (less(heap->items[c], heap->items[best])) best = c;
        if (!less(heap->items[best], item)) break;
        place(heap, heap->items[best], i);
        i = best;
    }
    place(heap, item, i);
}

/* An item whose key or place is new finds where it belongs: only one of the two directions moves it. */
static void settle(kmq_heap *heap, kmq_heap_item *item, size_t i)
{
    if (i > 0 && less(item, heap->items[(i - 1) / ARITY]))
        sift_up(heap, item, i);
    else
        sift_down(heap, item, i);
}

static int set_cap(kmq_heap *heap, size_t cap)
{
    if (cap > SIZE_MAX / sizeof(*heap->items)) return KMQ_ENOMEM;
    kmq_heap_item **items = heap->alloc.realloc(heap->alloc.ctx, heap->items, cap * sizeof(*items));
    if (items == NULL && cap > 0) return KMQ_ENOMEM;
    heap->items = items;
    heap->cap = cap;
    return KMQ_OK;
}

void kmq_heap_init(kmq_heap *heap, const kmq_alloc *alloc)
{
    heap->items = NULL;
    heap->count = heap->cap = 0;
    heap->alloc = *alloc;
}

void kmq_heap_free(kmq_heap *heap)
{
    if (heap->items != NULL) (void)set_cap(heap, 0); /* to free cannot fail */
    heap->count = 0;
}

void kmq_heap_item_init(kmq_heap_item *item)
{
    item->deadline = 0;
    item->sequence = 0;
    item->index = KMQ_HEAP_OUT;
}

int kmq_heap_reserve(kmq_heap *heap, size_t n)
{
    if (n <= heap->cap - heap->count) return KMQ_OK;
    if (n > SIZE_MAX - heap->count) return KMQ_ENOMEM;
    size_t need = heap->count + n, cap = heap->cap + heap->cap / 2;
    if (cap < need) cap = need;
    if (cap < MIN_CAP) cap = MIN_CAP;
    return set_cap(heap, cap);
}

int kmq_heap_push(kmq_heap *heap, kmq_heap_item *item)
{
    assert(!kmq_heap_item_in(item));
    int rc = kmq_heap_reserve(heap, 1);
    if (rc != KMQ_OK) return rc;
    sift_up(heap, item, heap->count++);
    return KMQ_OK;
}

kmq_heap_item *kmq_heap_top(const kmq_heap *heap) { return heap->count > 0 ? heap->items[0] : NULL; }

kmq_heap_item *kmq_heap_pop(kmq_heap *heap)
{
    kmq_heap_item *item = kmq_heap_top(heap);
    if (item != NULL) kmq_heap_remove(heap, item);
    return item;
}

void kmq_heap_remove(kmq_heap *heap, kmq_heap_item *item)
{
    size_t i = item->index;
    assert(i < heap->count && heap->items[i] == item);
    kmq_heap_item *last = heap->items[--heap->count];
    if (last != item) settle(heap, last, i);
    item->index = KMQ_HEAP_OUT;
    /* A refused shrink costs memory, nothing else. */
    if (heap->cap > MIN_CAP && heap->count < heap->cap / 4) (void)set_cap(heap, heap->cap / 2);
}

void kmq_heap_update(kmq_heap *heap, kmq_heap_item *item, int64_t deadline, uint64_t sequence)
{
    assert(item->index < heap->count && heap->items[item->index] == item);
    item->deadline = deadline;
    item->sequence = sequence;
    settle(heap, item, item->index);
}

void kmq_heap_moved(kmq_heap *heap, kmq_heap_item *item)
{
    assert(item->index < heap->count);
    heap->items[item->index] = item;
}

size_t kmq_heap_bytes(const kmq_heap *heap) { return heap->cap * sizeof(*heap->items); }

void kmq_heap_check(const kmq_heap *heap)
{
    assert(heap->count <= heap->cap);
    assert((heap->items == NULL) == (heap->cap == 0));
    for (size_t i = 0; i < heap->count; i++) {
        assert(heap->items[i]->index == i);
        assert(i == 0 || !less(heap->items[i], heap->items[(i - 1) / ARITY]));
    }
}
