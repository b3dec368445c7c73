/* kmq_limits - see limits.h for the picture, the invariants and the costs. */
#include "limits.h"

#include <assert.h>
#include <string.h>

enum { MIN_CAP = 8 };

struct kmq_limit {
    kmq_heap_item item; /* its deadline is the limit */
    int64_t offset;
};

void kmq_limits_init(kmq_limits *limits, const kmq_alloc *alloc)
{
    *limits = (kmq_limits){.alloc = *alloc};
    kmq_heap_init(&limits->heap, alloc);
}

static void *resize(kmq_limits *limits, void *ptr, size_t bytes)
{
    return limits->alloc.realloc(limits->alloc.ctx, ptr, bytes);
}

void kmq_limits_free(kmq_limits *limits)
{
    kmq_heap_free(&limits->heap);
    for (size_t i = 0; i < limits->count; i++) (void)resize(limits, limits->items[i], 0);
    if (limits->items != NULL) (void)resize(limits, limits->items, 0);
    kmq_limits_init(limits, &(kmq_alloc){limits->alloc.realloc, limits->alloc.ctx});
}

/* the first item at or behind offset; the count when there is none */
static size_t find(const kmq_limits *limits, int64_t offset)
{
    size_t lo = 0, hi = limits->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (limits->items[mid]->offset < offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool kmq_limits_has(const kmq_limits *limits, int64_t offset)
{
    size_t i = find(limits, offset);
    return i < limits->count && limits->items[i]->offset == offset;
}

static int reserve(kmq_limits *limits)
{
    if (limits->count == KMQ_LIMITS_MAX) return KMQ_EFULL;
    if (limits->count < limits->cap) return KMQ_OK;
    size_t cap = limits->cap > 0 ? 2 * limits->cap : MIN_CAP;
    kmq_limit **items = resize(limits, limits->items, cap * sizeof(*items));
    if (items == NULL) return KMQ_ENOMEM;
    limits->items = items;
    limits->cap = cap;
    return KMQ_OK;
}

int kmq_limits_put(kmq_limits *limits, int64_t offset, int64_t limit_ms)
{
    size_t i = find(limits, offset);
    if (i < limits->count && limits->items[i]->offset == offset) {
        kmq_heap_update(&limits->heap, &limits->items[i]->item, limit_ms, ++limits->sequence);
        return KMQ_OK;
    }
    int rc = reserve(limits);
    if (rc != KMQ_OK) return rc;
    kmq_limit *limit = resize(limits, NULL, sizeof(*limit));
    if (limit == NULL) return KMQ_ENOMEM;
    kmq_heap_item_init(&limit->item);
    limit->item.deadline = limit_ms;
    limit->item.sequence = ++limits->sequence;
    limit->offset = offset;
    rc = kmq_heap_push(&limits->heap, &limit->item);
    if (rc != KMQ_OK) {
        (void)resize(limits, limit, 0);
        return rc;
    }
    memmove(limits->items + i + 1, limits->items + i, (limits->count - i) * sizeof(limit));
    limits->items[i] = limit;
    limits->count++;
    return KMQ_OK;
}

/* Many came and went: the array gives back what it does not need; when it cannot, it stays as it is. */
static void shrink(kmq_limits *limits)
{
    size_t cap = limits->cap / 2;
    if (cap < MIN_CAP || limits->count > limits->cap / 4) return;
    kmq_limit **items = resize(limits, limits->items, cap * sizeof(*items));
    if (items == NULL) return;
    limits->items = items;
    limits->cap = cap;
}

bool kmq_limits_remove(kmq_limits *limits, int64_t offset)
{
    size_t i = find(limits, offset);
    if (i == limits->count || limits->items[i]->offset != offset) return false;
    kmq_limit *limit = limits->items[i];
    kmq_heap_remove(&limits->heap, &limit->item);
    (void)resize(limits, limit, 0);
    limits->count--;
    memmove(limits->items + i, limits->items + i + 1, (limits->count - i) * sizeof(limit));
    shrink(limits);
    return true;
}

int64_t kmq_limits_first(const kmq_limits *limits)
{
    const kmq_heap_item *top = kmq_heap_top(&limits->heap);
    return top != NULL ? top->deadline : INT64_MAX;
}

static bool next_run(const kmq_limits *limits, int64_t from, int64_t now_ms, kmq_range *run)
{
    size_t i = find(limits, from);
    while (i < limits->count && limits->items[i]->item.deadline > now_ms) i++;
    if (i == limits->count) return false;
    run->lo = run->hi = limits->items[i]->offset;
    for (; i < limits->count && limits->items[i]->offset == run->hi && limits->items[i]->item.deadline <= now_ms; i++)
        run->hi++;
    return true;
}

bool kmq_limits_next(const kmq_limits *limits, int64_t from, kmq_range *run)
{
    return next_run(limits, from, INT64_MAX, run);
}

bool kmq_limits_next_due(const kmq_limits *limits, int64_t from, int64_t now_ms, kmq_range *run)
{
    if (now_ms == INT64_MAX) now_ms--; /* INT64_MAX is never due */
    return kmq_limits_first(limits) <= now_ms && next_run(limits, from, now_ms, run);
}

size_t kmq_limits_bytes(const kmq_limits *limits)
{
    return limits->cap * sizeof(*limits->items) + limits->count * sizeof(kmq_limit) + kmq_heap_bytes(&limits->heap);
}

void kmq_limits_check(const kmq_limits *limits)
{
    kmq_heap_check(&limits->heap);
    assert(limits->count == kmq_heap_count(&limits->heap));
    assert(limits->count <= limits->cap && limits->count <= KMQ_LIMITS_MAX);
    for (size_t i = 0; i < limits->count; i++) {
        assert(kmq_heap_item_in(&limits->items[i]->item));
        assert(limits->heap.items[limits->items[i]->item.index] == &limits->items[i]->item);
        assert(i == 0 || limits->items[i - 1]->offset < limits->items[i]->offset);
    }
}
