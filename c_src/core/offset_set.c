/* kmq_offset_set - see offset_set.h for the picture, the invariants and the costs.
 *
 * How a change of a range goes: its two ends may cut into a chunk each, what lies between them are whole chunks. First
 * everything that needs memory is done to the two end chunks without changing a member (prepare); then the members
 * change, which cannot fail (commit). When prepare fails, mend() brings the entries back into their one form. */
#include "offset_set.h"

#include <assert.h>
#include <string.h>

#define CHUNK_BITS 16
#define CHUNK (1u << CHUNK_BITS)
#define LOW_MASK (CHUNK - 1)
#define WORDS (CHUNK / 64)
#define BITS_BYTES (WORDS * sizeof(uint64_t))

enum {
    ARRAY_MAX = 512,     /* 1 KiB: above it, an insertion moves so much that a bitmap is worth its memory */
    BACK_TO_ARRAY = 128, /* far enough below ARRAY_MAX that a chunk does not go to and fro */
    ARRAY_MIN_CAP = 4,
    ENTRIES_MIN_CAP = 8,
    ADD_ROOM = 3 /* entries one add can need, and one more than its undo needs on its way */
};

typedef enum entry_kind { ARRAY, BITS, FULL } entry_kind;

struct kmq_offset_entry {
    uint64_t first; /* chunk number */
    union {
        uint16_t *array; /* ARRAY: count members, ascending, room for cap */
        uint64_t *bits;  /* BITS: WORDS words, bit i of word w = offset 64 w + i of the chunk */
        uint64_t n_full; /* FULL: chunks */
    } u;
    uint32_t count; /* ARRAY, BITS */
    uint16_t cap;   /* ARRAY */
    uint8_t kind;
};

struct kmq_offset_spare { /* lies in the bitmap it stands for */
    kmq_offset_spare *next;
};

/* ---- memory */

static void *resize(kmq_offset_set *set, void *ptr, size_t old_bytes, size_t new_bytes)
{
    void *p = set->alloc.realloc(set->alloc.ctx, ptr, new_bytes);
    if (p != NULL || new_bytes == 0) set->bytes += new_bytes - old_bytes;
    return p;
}

static void release_bits(kmq_offset_set *set, uint64_t *bits) { (void)resize(set, bits, BITS_BYTES, 0); }

static void trim_spares(kmq_offset_set *set)
{
    while (set->spares != NULL) {
        kmq_offset_spare *spare = set->spares;
        set->spares = spare->next;
        release_bits(set, (uint64_t *)(void *)spare);
    }
}

static void keep_spare(kmq_offset_set *set, uint64_t *bits)
{
    kmq_offset_spare *spare = (kmq_offset_spare *)(void *)bits;
    spare->next = set->spares;
    set->spares = spare;
}

static int resize_entries(kmq_offset_set *set, size_t cap)
{
    if (cap > SIZE_MAX / sizeof(*set->entries)) return KMQ_ENOMEM;
    size_t old_bytes = set->cap * sizeof(*set->entries);
    kmq_offset_entry *entries = resize(set, set->entries, old_bytes, cap * sizeof(*entries));
    if (entries == NULL) return KMQ_ENOMEM;
    set->entries = entries;
    set->cap = cap;
    return KMQ_OK;
}

static int make_room(kmq_offset_set *set, size_t k)
{
    if (k <= set->cap - set->n_entries) return KMQ_OK;
    size_t cap = set->cap + set->cap / 2;
    if (cap < set->n_entries + k) cap = set->n_entries + k;
    if (cap < ENTRIES_MIN_CAP) cap = ENTRIES_MIN_CAP;
    return resize_entries(set, cap);
}

/* A refused shrink costs memory, nothing else. Not while held: an undo needs the room. */
static void shrink_entries(kmq_offset_set *set)
{
    if (!set->held && set->cap > ENTRIES_MIN_CAP && set->n_entries < set->cap / 4)
        (void)resize_entries(set, set->cap / 2);
}

static int resize_array(kmq_offset_set *set, kmq_offset_entry *e, size_t cap)
{
    uint16_t *array = resize(set, e->u.array, e->cap * sizeof(*array), cap * sizeof(*array));
    if (array == NULL) return KMQ_ENOMEM;
    e->u.array = array;
    e->cap = (uint16_t)cap;
    return KMQ_OK;
}

static void free_container(kmq_offset_set *set, kmq_offset_entry *e)
{
    switch ((entry_kind)e->kind) {
    case ARRAY:
        if (e->u.array != NULL) (void)resize(set, e->u.array, e->cap * sizeof(*e->u.array), 0);
        break;
    case BITS: release_bits(set, e->u.bits); break;
    case FULL: break;
    }
}

/* ---- bits of one chunk: [a, b), 0 <= a < b <= CHUNK */

static uint64_t word_mask(uint32_t w, uint32_t a, uint32_t b)
{
    uint64_t mask = UINT64_MAX;
    if (w == a / 64) mask &= UINT64_MAX << (a % 64);
    if (w == (b - 1) / 64) mask &= UINT64_MAX >> (63 - (b - 1) % 64);
    return mask;
}

static uint32_t ones(uint64_t word) { return (uint32_t)__builtin_popcountll(word); }

static uint32_t set_bits(uint64_t *bits, uint32_t a, uint32_t b)
{
    uint32_t n = 0;
    for (uint32_t w = a / 64; w <= (b - 1) / 64; w++) {
        uint64_t fresh = word_mask(w, a, b) & ~bits[w];
        bits[w] |= fresh;
        n += ones(fresh);
    }
    return n;
}

static uint32_t clear_bits(uint64_t *bits, uint32_t a, uint32_t b)
{
    uint32_t n = 0;
    for (uint32_t w = a / 64; w <= (b - 1) / 64; w++) {
        uint64_t gone = word_mask(w, a, b) & bits[w];
        bits[w] &= ~gone;
        n += ones(gone);
    }
    return n;
}

/* the first bit at or after a whose value is `value`; CHUNK when there is none */
static uint32_t find_bit(const uint64_t *bits, uint32_t a, bool value)
{
    uint64_t flip = value ? 0 : UINT64_MAX, mask = UINT64_MAX << (a % 64);
    for (uint32_t w = a / 64; w < WORDS; w++) {
        uint64_t word = (bits[w] ^ flip) & mask;
        if (word != 0) return w * 64 + (uint32_t)__builtin_ctzll(word);
        mask = UINT64_MAX;
    }
    return CHUNK;
}

/* how many members of the array are below a: where a stands or would stand */
static uint32_t array_rank(const kmq_offset_entry *e, uint32_t a)
{
    const uint16_t *at = e->u.array;
    uint32_t n = e->count;
    if (n == 0) return 0;
    if (at[n - 1] < a) return n; /* appending is the common case */
    while (n > 1) { /* written so that it compiles to moves: a branch here is guessed wrong every other time */
        uint32_t half = n / 2;
        at += at[half - 1] < a ? half : 0;
        n -= half;
    }
    return (uint32_t)(at - e->u.array) + (*at < a);
}

/* ---- entries */

static uint64_t end_chunk(const kmq_offset_entry *e) { return e->first + (e->kind == FULL ? e->u.n_full : 1); }

/* the first entry that ends after chunk, by halving */
static size_t seek_far(const kmq_offset_set *set, uint64_t chunk)
{
    size_t lo = 0, hi = set->n_entries;
    if (hi > 0 && chunk >= end_chunk(&set->entries[hi - 1])) return hi; /* appending is the common case */
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (end_chunk(&set->entries[mid]) <= chunk)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* the first entry that ends after chunk: the one that has it, or the one before which it would be inserted */
static inline size_t seek(const kmq_offset_set *set, uint64_t chunk)
{
    const kmq_offset_entry *entries = set->entries;
    size_t n = set->n_entries;
    if (n == 0) return 0;
    if (set->hint < n && entries[set->hint].first <= chunk && chunk < end_chunk(&entries[set->hint])) return set->hint;
    uint64_t guess = chunk - entries[0].first; /* right when no chunk is missing and none is in a run */
    if (guess < n && entries[guess].first == chunk) return (size_t)guess;
    return seek_far(set, chunk);
}

static bool covers(const kmq_offset_set *set, size_t i, uint64_t chunk)
{
    return i < set->n_entries && set->entries[i].first <= chunk && chunk < end_chunk(&set->entries[i]);
}

/* room was made */
static void open_gap(kmq_offset_set *set, size_t i, size_t k)
{
    assert(k <= set->cap - set->n_entries);
    memmove(set->entries + i + k, set->entries + i, (set->n_entries - i) * sizeof(*set->entries));
    set->n_entries += k;
}

static void close_gap(kmq_offset_set *set, size_t i, size_t k)
{
    memmove(set->entries + i, set->entries + i + k, (set->n_entries - i - k) * sizeof(*set->entries));
    set->n_entries -= k;
}

/* FULL entries that touch the FULL entry i become one with it */
static void merge_full(kmq_offset_set *set, size_t i)
{
    kmq_offset_entry *e = &set->entries[i];
    if (i + 1 < set->n_entries && e[1].kind == FULL && e[1].first == end_chunk(e)) {
        e->u.n_full += e[1].u.n_full;
        close_gap(set, i + 1, 1);
    }
    if (i > 0 && e[-1].kind == FULL && end_chunk(&e[-1]) == e->first) {
        e[-1].u.n_full += e->u.n_full;
        close_gap(set, i, 1);
    }
}

/* BITS whose last member came becomes FULL; its bitmap stays near for an undo */
static void fill(kmq_offset_set *set, size_t i)
{
    kmq_offset_entry *e = &set->entries[i];
    keep_spare(set, e->u.bits);
    e->kind = FULL;
    e->u.n_full = 1;
    merge_full(set, i);
}

/* brings the entry at chunk back into its one form after a prepare that did not come to its commit */
static void mend(kmq_offset_set *set, uint64_t chunk)
{
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk)) return;
    kmq_offset_entry *e = &set->entries[i];
    if (e->kind == FULL) {
        merge_full(set, i);
    } else if (e->count == 0) {
        free_container(set, e);
        close_gap(set, i, 1);
    } else if (e->count == CHUNK) {
        fill(set, i);
    }
}

static int to_bits(kmq_offset_set *set, kmq_offset_entry *e)
{
    uint64_t *bits = resize(set, NULL, 0, BITS_BYTES);
    if (bits == NULL) return KMQ_ENOMEM;
    memset(bits, 0, BITS_BYTES);
    for (uint32_t k = 0; k < e->count; k++) bits[e->u.array[k] / 64] |= UINT64_C(1) << (e->u.array[k] % 64);
    free_container(set, e);
    e->kind = BITS;
    e->u.bits = bits;
    return KMQ_OK;
}

/* BITS with few members left. When there is no memory for the array it stays as it is. */
static void to_array(kmq_offset_set *set, kmq_offset_entry *e)
{
    uint32_t cap = e->count < ARRAY_MIN_CAP ? ARRAY_MIN_CAP : e->count, n = 0;
    uint16_t *array = resize(set, NULL, 0, cap * sizeof(*array));
    if (array == NULL) return;
    for (uint32_t w = 0; w < WORDS; w++)
        for (uint64_t word = e->u.bits[w]; word != 0; word &= word - 1)
            array[n++] = (uint16_t)(w * 64 + (uint32_t)__builtin_ctzll(word));
    assert(n == e->count);
    release_bits(set, e->u.bits);
    e->kind = ARRAY;
    e->u.array = array;
    e->cap = (uint16_t)cap;
}

/* ---- adding */

static int insert_empty(kmq_offset_set *set, size_t i, uint64_t chunk, uint32_t n)
{
    kmq_offset_entry e = {.first = chunk, .kind = ARRAY};
    int rc = n > ARRAY_MAX ? to_bits(set, &e) : resize_array(set, &e, n < ARRAY_MIN_CAP ? ARRAY_MIN_CAP : n);
    if (rc != KMQ_OK) return rc;
    open_gap(set, i, 1);
    set->entries[i] = e;
    return KMQ_OK;
}

/* After this, adding [a, b) to the chunk needs no memory. May leave an entry without members. */
static int prepare_add(kmq_offset_set *set, uint64_t chunk, uint32_t a, uint32_t b)
{
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk)) return insert_empty(set, i, chunk, b - a);
    kmq_offset_entry *e = &set->entries[i];
    if (e->kind != ARRAY) return KMQ_OK;
    uint32_t need = e->count - (array_rank(e, b) - array_rank(e, a)) + (b - a);
    if (need > ARRAY_MAX) return to_bits(set, e);
    if (need <= e->cap) return KMQ_OK;
    uint32_t cap = 2 * (uint32_t)e->cap;
    if (cap < need) cap = need;
    return resize_array(set, e, cap < ARRAY_MAX ? cap : ARRAY_MAX);
}

static uint32_t array_add(kmq_offset_entry *e, uint32_t a, uint32_t b)
{
    uint32_t p = array_rank(e, a), q = array_rank(e, b), n = b - a;
    memmove(e->u.array + p + n, e->u.array + q, (e->count - q) * sizeof(*e->u.array));
    for (uint32_t k = 0; k < n; k++) e->u.array[p + k] = (uint16_t)(a + k);
    e->count += n - (q - p);
    return n - (q - p);
}

static int64_t commit_add(kmq_offset_set *set, uint64_t chunk, uint32_t a, uint32_t b)
{
    size_t i = seek(set, chunk);
    kmq_offset_entry *e = &set->entries[i];
    uint32_t n = 0;
    set->hint = i;
    switch ((entry_kind)e->kind) {
    case ARRAY: n = array_add(e, a, b); break;
    case BITS:
        n = set_bits(e->u.bits, a, b);
        e->count += n;
        if (e->count == CHUNK) fill(set, i);
        break;
    case FULL: break;
    }
    return n;
}

/* the whole chunks [m0, m1) become members: one FULL entry together with what it overlaps or touches */
static int64_t commit_fill(kmq_offset_set *set, uint64_t m0, uint64_t m1)
{
    uint64_t first = m0, end = m1, had = 0;
    size_t i = seek(set, m0), j = i;
    for (; j < set->n_entries && set->entries[j].first < m1; j++) {
        kmq_offset_entry *e = &set->entries[j];
        if (e->kind == FULL) {
            uint64_t lo = e->first > m0 ? e->first : m0, hi = end_chunk(e) < m1 ? end_chunk(e) : m1;
            had += (hi - lo) * CHUNK;
            if (e->first < first) first = e->first;
            if (end_chunk(e) > end) end = end_chunk(e);
        } else {
            had += e->count;
            free_container(set, e);
        }
    }
    if (i == j)
        open_gap(set, i, 1);
    else
        close_gap(set, i + 1, j - i - 1);
    set->entries[i] = (kmq_offset_entry){.first = first, .kind = FULL, .u.n_full = end - first};
    merge_full(set, i);
    return (int64_t)((m1 - m0) * CHUNK - had);
}

static int add_range(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *added)
{
    uint64_t c0 = (uint64_t)lo >> CHUNK_BITS, c1 = (uint64_t)hi >> CHUNK_BITS;
    uint32_t a = (uint32_t)lo & LOW_MASK, b = (uint32_t)hi & LOW_MASK;
    bool one = c0 == c1, head = !one && a > 0, tail = !one && b > 0;
    int rc = make_room(set, ADD_ROOM);
    if (rc != KMQ_OK) return rc;
    if (one) rc = prepare_add(set, c0, a, b);
    if (head) rc = prepare_add(set, c0, a, CHUNK);
    if (rc != KMQ_OK) return rc;
    if (tail) rc = prepare_add(set, c1, 0, b);
    if (rc != KMQ_OK) {
        if (head) mend(set, c0);
        return rc;
    }
    if (one) *added += commit_add(set, c0, a, b);
    if (head) *added += commit_add(set, c0, a, CHUNK);
    if (tail) *added += commit_add(set, c1, 0, b);
    if (!one && c0 + head < c1) *added += commit_fill(set, c0 + head, c1);
    return KMQ_OK;
}

/* One offset of a chunk that needs no memory for it: what most calls are. false: it does, nothing done. */
static bool add_one(kmq_offset_set *set, int64_t offset, int64_t *added)
{
    uint64_t chunk = (uint64_t)offset >> CHUNK_BITS;
    uint32_t a = (uint32_t)offset & LOW_MASK;
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk)) return false;
    kmq_offset_entry *e = &set->entries[i];
    set->hint = i;
    if (e->kind == BITS) {
        uint64_t *word = &e->u.bits[a / 64], bit = UINT64_C(1) << (a % 64);
        if (*word & bit) return true;
        *word |= bit;
        *added = 1;
        if (++e->count == CHUNK) fill(set, i);
    } else if (e->kind == ARRAY) {
        uint32_t p = array_rank(e, a);
        if (p < e->count && e->u.array[p] == a) return true;
        if (e->count == e->cap) return false;
        memmove(e->u.array + p + 1, e->u.array + p, (e->count - p) * sizeof(*e->u.array));
        e->u.array[p] = (uint16_t)a;
        *added = 1;
        e->count++;
    }
    return true;
}

int kmq_offset_set_add(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *added)
{
    int64_t n = 0;
    int rc = KMQ_OK;
    if (lo < 0 || hi < lo) return KMQ_EINVAL;
    if (set->spares != NULL && !set->held) trim_spares(set);
    if (lo < hi && !(hi - lo == 1 && add_one(set, lo, &n))) rc = add_range(set, lo, hi, &n);
    if (rc != KMQ_OK) return rc;
    set->count += n;
    if (added != NULL) *added = n;
    return KMQ_OK;
}

/* ---- removing */

/* After this, no FULL entry reaches across the start of chunk. */
static int split_full(kmq_offset_set *set, uint64_t chunk)
{
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk) || set->entries[i].first == chunk) return KMQ_OK;
    int rc = make_room(set, 1);
    if (rc != KMQ_OK) return rc;
    open_gap(set, i + 1, 1);
    kmq_offset_entry *e = &set->entries[i];
    e[1] = (kmq_offset_entry){.first = chunk, .kind = FULL, .u.n_full = end_chunk(e) - chunk};
    e->u.n_full = chunk - e->first;
    return KMQ_OK;
}

/* After this, removing from the chunk needs no memory: a chunk of a FULL entry stands alone, as a bitmap of ones. */
static int prepare_remove(kmq_offset_set *set, uint64_t chunk)
{
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk) || set->entries[i].kind != FULL) return KMQ_OK;
    uint64_t first = set->entries[i].first, end = end_chunk(&set->entries[i]);
    size_t before = first < chunk, after = chunk + 1 < end;
    uint64_t *bits = (uint64_t *)(void *)set->spares;
    int rc = make_room(set, before + after);
    if (rc != KMQ_OK) return rc;
    if (bits != NULL)
        set->spares = set->spares->next;
    else
        bits = resize(set, NULL, 0, BITS_BYTES);
    if (bits == NULL) return KMQ_ENOMEM;
    memset(bits, 0xff, BITS_BYTES);
    open_gap(set, i, before + after);
    kmq_offset_entry *e = &set->entries[i];
    if (before) *e++ = (kmq_offset_entry){.first = first, .kind = FULL, .u.n_full = chunk - first};
    *e++ = (kmq_offset_entry){.first = chunk, .kind = BITS, .u.bits = bits, .count = CHUNK};
    if (after) *e = (kmq_offset_entry){.first = chunk + 1, .kind = FULL, .u.n_full = end - chunk - 1};
    return KMQ_OK;
}

static uint32_t array_remove(kmq_offset_set *set, kmq_offset_entry *e, uint32_t a, uint32_t b)
{
    uint32_t p = array_rank(e, a), q = array_rank(e, b);
    memmove(e->u.array + p, e->u.array + q, (e->count - q) * sizeof(*e->u.array));
    e->count -= q - p;
    if (e->cap > 2 * ARRAY_MIN_CAP && e->count <= e->cap / 4u) (void)resize_array(set, e, e->cap / 2u);
    return q - p;
}

static int64_t commit_remove(kmq_offset_set *set, uint64_t chunk, uint32_t a, uint32_t b)
{
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk)) return 0;
    kmq_offset_entry *e = &set->entries[i];
    uint32_t n;
    set->hint = i;
    assert(e->kind != FULL);
    if (e->kind == ARRAY) {
        n = array_remove(set, e, a, b);
    } else {
        n = clear_bits(e->u.bits, a, b);
        e->count -= n;
        if (e->count > 0 && e->count <= BACK_TO_ARRAY) to_array(set, e);
    }
    if (e->count == 0) {
        free_container(set, e);
        close_gap(set, i, 1);
    }
    return n;
}

/* the whole chunks [m0, m1) go; no FULL entry reaches across m0 or m1 */
static int64_t commit_drop(kmq_offset_set *set, uint64_t m0, uint64_t m1)
{
    size_t i = seek(set, m0), j = i;
    uint64_t n = 0;
    for (; j < set->n_entries && set->entries[j].first < m1; j++) {
        kmq_offset_entry *e = &set->entries[j];
        n += e->kind == FULL ? e->u.n_full * CHUNK : e->count;
        free_container(set, e);
    }
    close_gap(set, i, j - i);
    return (int64_t)n;
}

static int remove_range(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *removed)
{
    uint64_t c0 = (uint64_t)lo >> CHUNK_BITS, c1 = (uint64_t)hi >> CHUNK_BITS;
    uint32_t a = (uint32_t)lo & LOW_MASK, b = (uint32_t)hi & LOW_MASK;
    bool one = c0 == c1, head = !one && a > 0, tail = !one && b > 0;
    int rc = one || head ? prepare_remove(set, c0) : split_full(set, c0);
    if (rc != KMQ_OK) return rc;
    if (!one) rc = tail ? prepare_remove(set, c1) : split_full(set, c1);
    if (rc != KMQ_OK) {
        mend(set, c0);
        return rc;
    }
    if (one) *removed += commit_remove(set, c0, a, b);
    if (head) *removed += commit_remove(set, c0, a, CHUNK);
    if (tail) *removed += commit_remove(set, c1, 0, b);
    if (!one && c0 + head < c1) *removed += commit_drop(set, c0 + head, c1);
    shrink_entries(set);
    return KMQ_OK;
}

bool kmq_offset_set_try_remove(kmq_offset_set *set, int64_t offset, bool *removed)
{
    uint64_t chunk = (uint64_t)offset >> CHUNK_BITS;
    *removed = false;
    if (offset < 0) return true;
    size_t i = seek(set, chunk);
    if (!covers(set, i, chunk)) return true;
    kmq_offset_entry *e = &set->entries[i];
    if (e->kind != BITS || e->count <= BACK_TO_ARRAY + 1) return false; /* else it stays a bitmap, and add finds it */
    uint64_t *word = &e->u.bits[((uint32_t)offset & LOW_MASK) / 64], bit = UINT64_C(1) << ((uint32_t)offset % 64);
    set->hint = i;
    if ((*word & bit) == 0) return true;
    *word &= ~bit;
    *removed = true;
    e->count--;
    set->count--;
    return true;
}

int kmq_offset_set_remove(kmq_offset_set *set, int64_t lo, int64_t hi, int64_t *removed)
{
    int64_t n = 0;
    bool one = false;
    if (lo < 0 || hi < lo) return KMQ_EINVAL;
    if (hi - lo == 1 && kmq_offset_set_try_remove(set, lo, &one)) {
        n = one;
    } else if (lo < hi && set->n_entries > 0) {
        int rc = remove_range(set, lo, hi, &n);
        if (rc != KMQ_OK) return rc;
        set->count -= n;
    }
    if (removed != NULL) *removed = n;
    return KMQ_OK;
}

/* ---- the rest */

void kmq_offset_set_init(kmq_offset_set *set, const kmq_alloc *alloc) { *set = (kmq_offset_set){.alloc = *alloc}; }

void kmq_offset_set_free(kmq_offset_set *set)
{
    kmq_alloc alloc = set->alloc;
    trim_spares(set);
    for (size_t i = 0; i < set->n_entries; i++) free_container(set, &set->entries[i]);
    if (set->entries != NULL) (void)resize(set, set->entries, set->cap * sizeof(*set->entries), 0);
    assert(set->bytes == 0);
    kmq_offset_set_init(set, &alloc);
}

void kmq_offset_set_hold(kmq_offset_set *set)
{
    assert(!set->held);
    trim_spares(set);
    set->held = true;
}

void kmq_offset_set_release(kmq_offset_set *set)
{
    assert(set->held);
    set->held = false;
    trim_spares(set);
}

static bool entry_has(const kmq_offset_entry *e, uint32_t a)
{
    if (e->kind == FULL) return true;
    if (e->kind == BITS) return e->u.bits[a / 64] >> (a % 64) & 1;
    uint32_t p = array_rank(e, a);
    return p < e->count && e->u.array[p] == a;
}

bool kmq_offset_set_has(const kmq_offset_set *set, int64_t offset)
{
    if (offset < 0) return false;
    uint64_t chunk = (uint64_t)offset >> CHUNK_BITS;
    size_t i = seek(set, chunk);
    return covers(set, i, chunk) && entry_has(&set->entries[i], (uint32_t)offset & LOW_MASK);
}

/* the first run of an ARRAY or BITS entry at or after a: [*lo, *hi) */
static bool entry_next(const kmq_offset_entry *e, uint32_t a, uint32_t *lo, uint32_t *hi)
{
    if (e->kind == BITS) {
        *lo = find_bit(e->u.bits, a, true);
        if (*lo == CHUNK) return false;
        *hi = find_bit(e->u.bits, *lo, false);
        return true;
    }
    uint32_t p = array_rank(e, a);
    if (p == e->count) return false;
    *lo = e->u.array[p];
    *hi = *lo + 1;
    while (++p < e->count && e->u.array[p] == *hi) ++*hi;
    return true;
}

bool kmq_offset_set_next(const kmq_offset_set *set, int64_t from, kmq_range *run)
{
    if (from < 0) from = 0;
    uint64_t chunk = (uint64_t)from >> CHUNK_BITS;
    uint32_t lo = 0, hi = 0, a = (uint32_t)from & LOW_MASK;
    size_t i = seek(set, chunk);
    if (i == set->n_entries) return false;
    const kmq_offset_entry *e = &set->entries[i], *end = set->entries + set->n_entries;
    if (e->first > chunk) a = 0;
    if (e->kind != FULL && !entry_next(e, a, &lo, &hi)) {
        if (++e == end) return false;
        if (e->kind != FULL) (void)entry_next(e, 0, &lo, &hi); /* no entry is empty */
    }
    int64_t start = (int64_t)(e->first * CHUNK); /* no overflow: the last chunk of all is never full */
    if (e->kind == FULL) {
        run->lo = from > start ? from : start;
        run->hi = (int64_t)(end_chunk(e) * CHUNK);
    } else {
        run->lo = start + lo;
        run->hi = start + hi;
        if (hi < CHUNK) return true;
    }
    /* the run reached the end of its entry: it goes on where the next entry touches and has its first offset */
    while (e + 1 < end && e[1].first == end_chunk(e)) {
        e++;
        if (e->kind == FULL) {
            run->hi = (int64_t)(end_chunk(e) * CHUNK);
        } else {
            if (entry_has(e, 0) && entry_next(e, 0, &lo, &hi)) run->hi += hi;
            break;
        }
    }
    return true;
}

bool kmq_offset_set_last(const kmq_offset_set *set, int64_t *offset)
{
    if (set->n_entries == 0) return false;
    const kmq_offset_entry *e = &set->entries[set->n_entries - 1];
    int64_t start = (int64_t)(e->first * CHUNK);
    uint32_t w = WORDS - 1;
    switch ((entry_kind)e->kind) {
    case ARRAY: *offset = start + e->u.array[e->count - 1]; break;
    case BITS:
        while (e->u.bits[w] == 0) w--;
        *offset = start + w * 64 + 63 - __builtin_clzll(e->u.bits[w]);
        break;
    case FULL: *offset = (int64_t)(end_chunk(e) * CHUNK) - 1; break;
    }
    return true;
}

size_t kmq_offset_set_bytes(const kmq_offset_set *set) { return set->bytes; }

static uint32_t check_entry(const kmq_offset_entry *e)
{
    uint32_t n = 0;
    if (e->kind == ARRAY) {
        assert(e->count <= ARRAY_MAX && e->count <= e->cap && e->cap <= ARRAY_MAX);
        for (uint32_t k = 1; k < e->count; k++) assert(e->u.array[k - 1] < e->u.array[k]);
        n = e->count;
    } else {
        for (uint32_t w = 0; w < WORDS; w++) n += ones(e->u.bits[w]);
    }
    assert(n == e->count && n > 0 && n < CHUNK);
    return n;
}

void kmq_offset_set_check(const kmq_offset_set *set)
{
    uint64_t count = 0;
    size_t bytes = set->cap * sizeof(*set->entries);
    assert(set->n_entries <= set->cap);
    for (size_t i = 0; i < set->n_entries; i++) {
        const kmq_offset_entry *e = &set->entries[i];
        if (i > 0) assert(end_chunk(&e[-1]) <= e->first);
        if (e->kind == FULL) {
            assert(e->u.n_full > 0);
            assert(i == 0 || e[-1].kind != FULL || end_chunk(&e[-1]) < e->first);
            count += e->u.n_full * CHUNK;
        } else {
            count += check_entry(e);
            bytes += e->kind == ARRAY ? e->cap * sizeof(*e->u.array) : BITS_BYTES;
        }
    }
    for (const kmq_offset_spare *spare = set->spares; spare != NULL; spare = spare->next) bytes += BITS_BYTES;
    assert((int64_t)count == set->count);
    assert(bytes == set->bytes);
}
