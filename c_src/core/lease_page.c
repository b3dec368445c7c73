/* kmq_lease_page - see lease_page.h. Sections: slots, leases, parts (what a set says about one page), the plain way, the
 * unpacked way, changes of sets. */
#include "lease_page.h"

#include <assert.h>
#include <string.h>

enum {
    PAGE = 2048,
    WORDS = PAGE / 64,
    BITS_FROM_RUNS = 4, /* a lease with fewer runs than this is written as one lease a run */
    KEEP_NODES = 8,     /* spare memory that stays between markers */
    KEEP_BITS = 4
};

struct kmq_lease_slot {
    uint64_t *bits;              /* the words of the page that the span touches; NULL: all of the span is open */
    struct kmq_lease_text *text; /* NULL: none */
    uint16_t open;               /* set bits */
    uint16_t words;              /* allocated */
    uint32_t next_free;
};

/* ---- slots: what few leases have, beside the tree */

static void *mem(kmq_lease_book *book, void *ptr, size_t old_bytes, size_t bytes)
{
    void *p = book->alloc.realloc(book->alloc.ctx, ptr, bytes);
    if (p == NULL && bytes > 0) return NULL;
    book->bytes += bytes;
    book->bytes -= old_bytes;
    return p;
}

struct kmq_lease_text *kmq_lease_text_new(kmq_lease_book *book, const char *bytes, size_t len)
{
    struct kmq_lease_text *text = mem(book, NULL, 0, sizeof *text + len);
    if (text == NULL) return NULL;
    text->refs = 1;
    text->len = (uint32_t)len;
    memcpy(text->bytes, bytes, len);
    return text;
}

void kmq_lease_text_put(kmq_lease_book *book, struct kmq_lease_text *text)
{
    if (text != NULL && --text->refs == 0) mem(book, text, sizeof *text + text->len, 0);
}

/* cannot fail while spare bits are left */
static uint64_t *bits_new(kmq_lease_book *book, uint32_t words, uint16_t *got)
{
    uint64_t *bits = mem(book, NULL, 0, words * sizeof *bits);
    *got = (uint16_t)words;
    if (bits != NULL) return bits;
    assert(book->n_spare_bits > 0);
    *got = WORDS;
    return book->spare_bits[--book->n_spare_bits];
}

static int reserve_bits(kmq_lease_book *book, size_t n)
{
    if (n > book->spare_bits_cap) {
        void *spare = mem(book, book->spare_bits, book->spare_bits_cap * sizeof(uint64_t *), n * sizeof(uint64_t *));
        if (spare == NULL) return KMQ_ENOMEM;
        book->spare_bits = spare;
        book->spare_bits_cap = n;
    }
    while (book->n_spare_bits < n) {
        uint64_t *bits = mem(book, NULL, 0, WORDS * sizeof *bits);
        if (bits == NULL) return KMQ_ENOMEM;
        book->spare_bits[book->n_spare_bits++] = bits;
    }
    return KMQ_OK;
}

static int reserve_slots(kmq_lease_book *book, size_t n)
{
    size_t have = book->n_free_slots + book->slots_cap - book->n_slots;
    if (n <= have) return KMQ_OK;
    size_t cap = book->slots_cap + book->slots_cap / 4u;
    size_t least = book->slots_cap + (n - have) + 1; /* slot 0 is unused */
    if (cap < least) cap = least;
    if (cap > UINT32_MAX) return KMQ_ENOMEM;
    void *slots = mem(book, book->slots, book->slots_cap * sizeof *book->slots, cap * sizeof *book->slots);
    if (slots == NULL) return KMQ_ENOMEM;
    book->slots = slots;
    book->slots_cap = (uint32_t)cap;
    if (book->n_slots == 0) book->n_slots = 1;
    return KMQ_OK;
}

static uint32_t slot_new(kmq_lease_book *book)
{
    uint32_t extra = book->free_slot;
    if (extra != 0) {
        book->free_slot = book->slots[extra].next_free;
        book->n_free_slots--;
    } else {
        assert(book->n_slots < book->slots_cap);
        extra = book->n_slots++;
    }
    book->slots[extra] = (kmq_lease_slot){0};
    return extra;
}

static void slot_free(kmq_lease_book *book, uint32_t extra)
{
    if (extra == 0) return;
    kmq_lease_slot *slot = &book->slots[extra];
    if (slot->bits != NULL) mem(book, slot->bits, slot->words * sizeof *slot->bits, 0);
    kmq_lease_text_put(book, slot->text);
    *slot = (kmq_lease_slot){.next_free = book->free_slot};
    book->free_slot = extra;
    book->n_free_slots++;
}

/* ---- leases */

static int64_t page_of(int64_t offset) { return offset - offset % PAGE; }

/* one behind the last offset of a page; the last page of all has one offset less */
static int64_t page_end(int64_t base) { return base > INT64_MAX - PAGE ? INT64_MAX : base + PAGE; }

static uint64_t *bits_of(const kmq_lease_book *book, const kmq_lease *lease)
{
    return lease->extra != 0 ? book->slots[lease->extra].bits : NULL;
}

struct kmq_lease_text *kmq_lease_text_of(const kmq_lease_book *book, const kmq_lease *lease)
{
    return lease->extra != 0 ? book->slots[lease->extra].text : NULL;
}

uint32_t kmq_lease_open_count(const kmq_lease_book *book, const kmq_lease *lease)
{
    return bits_of(book, lease) != NULL ? book->slots[lease->extra].open : lease->len;
}

/* words of the page that the span [lo, hi) touches: first and one behind the last */
static uint32_t word_lo(int64_t lo) { return (uint32_t)(lo % PAGE) / 64; }

static uint32_t word_hi(int64_t hi) { return (uint32_t)((hi - 1) % PAGE) / 64 + 1; }

/* the bits of [from, to) in word w; from, to: positions in the page */
static uint64_t word_mask(uint32_t w, uint32_t from, uint32_t to)
{
    uint32_t first = w * 64;
    uint64_t mask = UINT64_MAX;
    if (from >= first + 64 || to <= first) return 0;
    if (from > first) mask &= UINT64_MAX << (from - first);
    if (to < first + 64) mask &= UINT64_MAX >> (first + 64 - to);
    return mask;
}

/* the lease's open offsets in word w of its page */
static uint64_t open_word(const kmq_lease_book *book, const kmq_lease *lease, uint32_t w)
{
    const uint64_t *bits = bits_of(book, lease);
    if (bits != NULL) return bits[w - word_lo(lease->lo)];
    uint32_t from = (uint32_t)(lease->lo % PAGE);
    return word_mask(w, from, from + lease->len);
}

/* The first run of open offsets in the lease at or after `from`. */
bool kmq_lease_open_run(const kmq_lease_book *book, const kmq_lease *lease, int64_t from, kmq_range *run)
{
    int64_t end = kmq_lease_end(lease), base = page_of(lease->lo);
    if (from < lease->lo) from = lease->lo;
    if (from >= end) return false;
    if (bits_of(book, lease) == NULL) {
        *run = (kmq_range){from, end};
        return true;
    }
    uint32_t w = word_lo(from), stop = word_hi(end);
    uint64_t word = open_word(book, lease, w) & UINT64_MAX << from % 64;
    while (word == 0) {
        if (++w == stop) return false;
        word = open_word(book, lease, w);
    }
    run->lo = base + w * 64 + __builtin_ctzll(word);
    word = ~open_word(book, lease, w) & UINT64_MAX << run->lo % 64;
    while (word == 0 && ++w < stop) word = ~open_word(book, lease, w);
    run->hi = w == stop ? end : base + w * 64 + __builtin_ctzll(word);
    if (run->hi > end) run->hi = end;
    return true;
}

/* The first lease that ends behind lo. false: none; the path is then at the last lease, if there is any. */
bool kmq_lease_find_from(const kmq_lease_book *book, int64_t lo, kmq_lease_path *path)
{
    if (!kmq_lease_tree_seek(&book->tree, lo, path)) return false;
    return kmq_lease_end(kmq_lease_tree_at(&book->tree, path)) > lo || kmq_lease_tree_next(&book->tree, path);
}

/* the lease that holds this open offset, or NULL */
kmq_lease *kmq_lease_lookup(const kmq_lease_book *book, int64_t offset)
{
    kmq_lease_path path;
    if (offset < 0 || !kmq_lease_tree_seek(&book->tree, offset, &path)) return NULL;
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    if (lease->lo > offset || kmq_lease_end(lease) <= offset) return NULL;
    return (open_word(book, lease, word_lo(offset)) >> offset % 64 & 1) != 0 ? lease : NULL;
}

/* ---- parts: what a set says about one page */

struct part {
    int64_t base, lo, hi; /* hull: [lo, hi) within the page that begins at base */
    uint32_t n_runs;
    uint64_t mask[WORDS];
};

static void part_add(struct part *part, int64_t lo, int64_t hi)
{
    if (part->n_runs == 0) part->lo = lo;
    if (part->n_runs == 0 || part->hi != lo) part->n_runs++;
    part->hi = hi;
    uint32_t from = (uint32_t)(lo - part->base), to = (uint32_t)(hi - part->base);
    for (uint32_t w = from / 64; w * 64 < to; w++) part->mask[w] |= word_mask(w, from, to);
}

static struct part part_of(int64_t lo, int64_t hi)
{
    struct part part = {.base = page_of(lo)};
    part_add(&part, lo, hi);
    return part;
}

/* A set cut into parts, in order. */
struct feed {
    kmq_marker_cursor cursor;
    kmq_range run;
    bool more;
};

static void feed_begin(struct feed *feed, const kmq_marker_set *set)
{
    kmq_marker_set_begin(set, &feed->cursor);
    feed->more = kmq_marker_set_next(&feed->cursor, &feed->run);
}

/* A long run that opens nothing goes straight to the pages that have leases. false: there is none in it. */
static bool skip_empty(const kmq_lease_book *book, kmq_range *run)
{
    kmq_lease_path path;
    if (run->hi <= page_end(page_of(run->lo))) return true;
    if (!kmq_lease_find_from(book, run->lo, &path)) return false;
    int64_t base = page_of(kmq_lease_tree_at(&book->tree, &path)->lo);
    if (base >= run->hi) return false;
    if (run->lo < base) run->lo = base;
    return true;
}

static bool feed_next(const kmq_lease_book *book, struct feed *feed, bool opens, struct part *part)
{
    while (feed->more && !opens && !skip_empty(book, &feed->run))
        feed->more = kmq_marker_set_next(&feed->cursor, &feed->run);
    if (!feed->more) return false;
    memset(part, 0, sizeof *part);
    part->base = page_of(feed->run.lo);
    int64_t end = page_end(part->base);
    while (feed->more && feed->run.lo < end) {
        if (feed->run.hi > end) {
            part_add(part, feed->run.lo, end);
            feed->run.lo = end;
            break;
        }
        part_add(part, feed->run.lo, feed->run.hi);
        feed->more = kmq_marker_set_next(&feed->cursor, &feed->run);
    }
    return true;
}

/* ---- the plain way: in place. Each returns false, and has changed nothing, when the page must be unpacked. */

static bool same_terms(const kmq_lease *lease, const struct kmq_lease_change *change)
{
    return lease->extra == 0 && lease->due_ms == change->due_ms && lease->marker == change->marker &&
           lease->cause == change->cause && lease->flags == change->flags;
}

static void replace_terms(kmq_lease_book *book, kmq_lease_path *path, const struct kmq_lease_change *change)
{
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, path);
    book->open += (int64_t)lease->len - kmq_lease_open_count(book, lease);
    slot_free(book, lease->extra);
    *lease = (kmq_lease){.lo = lease->lo,
                         .due_ms = change->due_ms,
                         .marker = change->marker,
                         .len = lease->len,
                         .cause = change->cause,
                         .flags = change->flags};
    kmq_lease_tree_touched(&book->tree, path);
}

/* One run of a page into a gap, or exactly over one lease. Takes one insert: nodes for it are reserved. */
static bool open_plainly(kmq_lease_book *book, const kmq_range *run, const struct kmq_lease_change *change)
{
    kmq_lease_path path;
    if (kmq_lease_tree_seek(&book->tree, run->lo, &path)) {
        kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        int64_t end = kmq_lease_end(lease);
        if (end > run->lo && lease->lo < run->hi) {
            if (lease->lo != run->lo || end != run->hi || kmq_lease_in_flight(lease)) return false;
            replace_terms(book, &path, change);
            return true;
        }
        if (lease->lo < run->lo) {
            if (kmq_lease_tree_next_lo(&book->tree, &path) < run->hi) return false;
            if (end == run->lo && lease->lo >= page_of(run->lo) && same_terms(lease, change)) {
                lease->len = (uint16_t)(run->hi - lease->lo);
                book->open += run->hi - run->lo;
                return true;
            }
        }
    }
    kmq_lease lease = {.lo = run->lo,
                       .due_ms = change->due_ms,
                       .marker = change->marker,
                       .len = (uint16_t)(run->hi - run->lo),
                       .cause = change->cause,
                       .flags = change->flags};
    kmq_lease_tree_insert(&book->tree, &path, &lease);
    book->open += lease.len;
    return true;
}

/* What is left open of a lease without the part: count, first and last position in the page. */
struct left {
    uint32_t n, first, last;
    uint64_t words[WORDS];
};

static void left_of(const kmq_lease_book *book, const kmq_lease *lease, const struct part *part, struct left *left)
{
    left->n = 0;
    for (uint32_t w = word_lo(lease->lo), stop = word_hi(kmq_lease_end(lease)); w < stop; w++) {
        uint64_t word = left->words[w] = open_word(book, lease, w) & ~part->mask[w];
        if (word == 0) continue;
        if (left->n == 0) left->first = w * 64 + (uint32_t)__builtin_ctzll(word);
        left->last = w * 64 + 63 - (uint32_t)__builtin_clzll(word);
        left->n += (uint32_t)__builtin_popcountll(word);
    }
}

/* Would closing the part leave holes in a lease that has no bits yet? path: at the first lease that ends behind part->lo. */
static bool makes_holes(const kmq_lease_book *book, kmq_lease_path path, const struct part *part)
{
    struct left left;
    do {
        const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        int64_t end = kmq_lease_end(lease);
        if (lease->lo >= part->hi) return false;
        if (bits_of(book, lease) != NULL) continue;
        if (part->n_runs == 1) {
            if (lease->lo < part->lo && part->hi < end) return true;
        } else {
            left_of(book, lease, part, &left);
            if (left.n > 0 && left.last - left.first + 1 != left.n) return true;
        }
        if (end >= part->hi) return false;
    } while (kmq_lease_tree_next(&book->tree, &path));
    return false;
}

static void narrow(kmq_lease_book *book, kmq_lease_path *path, int64_t lo, uint32_t len)
{
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, path);
    lease->lo = lo;
    lease->len = (uint16_t)len;
    kmq_lease_tree_moved(&book->tree, path);
}

static void close_lease(kmq_lease_book *book, kmq_lease_path *path, const struct part *part)
{
    struct left left;
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, path);
    uint64_t *bits = bits_of(book, lease);
    left_of(book, lease, part, &left);
    int64_t closed = (int64_t)kmq_lease_open_count(book, lease) - left.n;
    if (closed == 0) return;
    book->open -= closed;
    if (kmq_lease_in_flight(lease)) book->in_flight -= closed;
    if (left.n == 0) {
        slot_free(book, lease->extra);
        kmq_lease_tree_remove(&book->tree, path);
    } else if (bits == NULL) {
        narrow(book, path, part->base + left.first, left.n);
    } else if (left.n == 1 && kmq_lease_text_of(book, lease) == NULL) { /* a straggler pays for itself only */
        slot_free(book, lease->extra);
        lease->extra = 0;
        narrow(book, path, part->base + left.first, 1);
    } else {
        uint32_t from = word_lo(lease->lo), n = word_hi(kmq_lease_end(lease)) - from;
        memcpy(bits, &left.words[from], n * sizeof *bits);
        book->slots[lease->extra].open = (uint16_t)left.n;
    }
}

static bool close_plainly(kmq_lease_book *book, const struct part *part)
{
    kmq_lease_path path;
    int64_t from = part->lo;
    if (!kmq_lease_find_from(book, from, &path)) return true;
    if (makes_holes(book, path, part)) return false;
    do {
        const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        if (lease->lo >= part->hi) break;
        from = kmq_lease_end(lease);
        close_lease(book, &path, part);
    } while (from < part->hi && kmq_lease_find_from(book, from, &path));
    return true;
}

static bool concerns(const struct kmq_lease_change *change, uint8_t cause, uint8_t flags)
{
    switch (change->deed) {
    case KMQ_LEASE_RENEW: return cause == KMQ_RETRY_CRASH;
    case KMQ_LEASE_TAKE: return (flags & KMQ_LEASE_IN_FLIGHT) == 0;
    case KMQ_LEASE_GIVE_BACK: return (flags & KMQ_LEASE_IN_FLIGHT) != 0;
    case KMQ_LEASE_OPEN:
    case KMQ_LEASE_CLOSE:
    case KMQ_LEASE_DELAY: break;
    }
    return true;
}

/* could the lease be one with its changed neighbour? Then unpacking joins them. */
static bool may_join(const kmq_lease *lease, const struct part *part, int64_t due_ms, int64_t marker)
{
    return lease->lo >= part->base && lease->lo < page_end(part->base) && lease->due_ms == due_ms &&
           lease->marker == marker;
}

static bool neighbour_may_join(const kmq_lease_book *book, const kmq_lease_path *path, const struct part *part,
                               int64_t due_ms)
{
    int64_t marker = kmq_lease_tree_at(&book->tree, path)->marker;
    kmq_lease_path side = *path;
    if (kmq_lease_tree_next(&book->tree, &side) &&
        may_join(kmq_lease_tree_at(&book->tree, &side), part, due_ms, marker))
        return true;
    side = *path;
    return kmq_lease_tree_prev(&book->tree, &side) &&
           may_join(kmq_lease_tree_at(&book->tree, &side), part, due_ms, marker);
}

/* One lease at the most, wholly, without a new text. */
static bool amend_plainly(kmq_lease_book *book, const struct part *part, const struct kmq_lease_change *change)
{
    kmq_lease_path path;
    struct left left;
    if (!kmq_lease_find_from(book, part->lo, &path)) return true;
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    if (lease->lo >= part->hi) return true;
    if (kmq_lease_tree_next_lo(&book->tree, &path) < part->hi) return false;
    if (!concerns(change, lease->cause, lease->flags)) return true;
    left_of(book, lease, part, &left);
    if (left.n == kmq_lease_open_count(book, lease)) return true; /* only holes were named */
    bool flight = change->deed == KMQ_LEASE_TAKE || change->deed == KMQ_LEASE_GIVE_BACK;
    int64_t due_ms = flight ? lease->due_ms : change->due_ms;
    if (left.n > 0 || change->text != NULL || neighbour_may_join(book, &path, part, due_ms)) return false;
    lease->due_ms = due_ms;
    if (flight) {
        lease->flags ^= KMQ_LEASE_IN_FLIGHT;
        book->in_flight += kmq_lease_in_flight(lease) ? kmq_lease_open_count(book, lease)
                                                      : -(int64_t)kmq_lease_open_count(book, lease);
    } else if (change->deed == KMQ_LEASE_DELAY) {
        lease->cause = change->cause;
        lease->flags = (uint8_t)((lease->flags & KMQ_LEASE_IN_FLIGHT) | change->flags);
        if (kmq_lease_text_of(book, lease) != NULL) { /* the new RETRY says nothing */
            kmq_lease_text_put(book, kmq_lease_text_of(book, lease));
            book->slots[lease->extra].text = NULL;
            if (bits_of(book, lease) == NULL) {
                slot_free(book, lease->extra);
                lease->extra = 0;
            }
        }
    }
    kmq_lease_tree_touched(&book->tree, &path);
    return true;
}

static bool change_plainly(kmq_lease_book *book, const struct part *part, const struct kmq_lease_change *change)
{
    switch (change->deed) {
    case KMQ_LEASE_OPEN: return part->n_runs == 1 && open_plainly(book, &(kmq_range){part->lo, part->hi}, change);
    case KMQ_LEASE_CLOSE: return close_plainly(book, part);
    case KMQ_LEASE_RENEW:
    case KMQ_LEASE_DELAY:
    case KMQ_LEASE_TAKE:
    case KMQ_LEASE_GIVE_BACK: break;
    }
    return amend_plainly(book, part, change);
}

/* ---- the unpacked way: who owns which offset; then changed; then packed again */

struct owner {
    int64_t due_ms, marker;
    struct kmq_lease_text *text;
    uint8_t cause, flags;
    uint16_t twin; /* the owner that its offsets go to in this change; 0 = not yet made */
};

struct page {
    int64_t base;
    uint32_t from, to; /* positions that are unpacked */
    uint32_t n_owners; /* owners[0] is nobody */
    int64_t first_lo;  /* of the leases that were unpacked */
    uint32_t n_old;
    int64_t open, in_flight; /* before */
    uint16_t own[PAGE];
    struct owner owners[2 * PAGE + 2]; /* at the most a lease an offset, and a twin of each */
};

/* what packing takes */
struct need {
    size_t leases, slots, bits, nodes;
};

static uint16_t owner_add(struct page *page, const struct owner *owner)
{
    page->owners[page->n_owners] = *owner;
    if (owner->text != NULL) owner->text->refs++; /* its slot may go before it is packed */
    return (uint16_t)page->n_owners++;
}

static void unpack_lease(const kmq_lease_book *book, struct page *page, const kmq_lease *lease)
{
    struct owner owner = {.due_ms = lease->due_ms,
                          .marker = lease->marker,
                          .text = kmq_lease_text_of(book, lease),
                          .cause = lease->cause,
                          .flags = lease->flags};
    uint16_t id = owner_add(page, &owner);
    uint32_t from = (uint32_t)(lease->lo - page->base), to = from + lease->len;
    kmq_range run = {.hi = lease->lo};
    while (kmq_lease_open_run(book, lease, run.hi, &run))
        for (int64_t o = run.lo; o < run.hi; o++) page->own[o - page->base] = id;
    if (page->n_old++ == 0) page->first_lo = lease->lo;
    if (from < page->from) page->from = from;
    if (to > page->to) page->to = to;
    page->open += kmq_lease_open_count(book, lease);
    if (kmq_lease_in_flight(lease)) page->in_flight += kmq_lease_open_count(book, lease);
}

/* A neighbour in the page comes along if the change could make the two alike. When a hole is made, so do the other
 * pieces of what was one lease: with enough of them, one lease with bits takes their place. */
static bool comes_along(const kmq_lease *lease, const struct part *part, const struct kmq_lease_change *change,
                        const kmq_lease *first)
{
    if (lease->lo < part->base || lease->lo >= page_end(part->base)) return false;
    switch (change->deed) {
    case KMQ_LEASE_OPEN:
    case KMQ_LEASE_RENEW:
    case KMQ_LEASE_DELAY: return lease->due_ms == change->due_ms;
    case KMQ_LEASE_CLOSE:
    case KMQ_LEASE_TAKE:
    case KMQ_LEASE_GIVE_BACK: break;
    }
    return first != NULL && lease->due_ms == first->due_ms && lease->marker == first->marker;
}

static void unpack(const kmq_lease_book *book, struct page *page, const struct part *part,
                   const struct kmq_lease_change *change)
{
    kmq_lease_path path, before;
    const kmq_lease *first = NULL;
    page->base = part->base;
    page->from = (uint32_t)(part->lo - part->base);
    page->to = (uint32_t)(part->hi - part->base);
    page->n_owners = 1;
    page->n_old = 0;
    page->open = page->in_flight = 0;
    memset(page->own, 0, sizeof page->own);
    bool found = kmq_lease_find_from(book, part->lo, &path);
    if (book->tree.height == 0) return;
    before = path;
    if (found) first = kmq_lease_tree_at(&book->tree, &path);
    if (!found || kmq_lease_tree_prev(&book->tree, &before)) {
        const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &before);
        if (comes_along(lease, part, change, first)) unpack_lease(book, page, lease);
    }
    while (found) {
        const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        bool behind = lease->lo >= part->hi;
        if (behind && !comes_along(lease, part, change, first)) break;
        unpack_lease(book, page, lease);
        found = !behind && kmq_lease_tree_next(&book->tree, &path);
    }
}

static void release(kmq_lease_book *book, struct page *page)
{
    for (uint32_t i = 1; i < page->n_owners; i++) kmq_lease_text_put(book, page->owners[i].text);
}

/* the owner that offsets of this one go to; nobody's go to the plain new one */
static uint16_t twin(struct page *page, uint16_t id, const struct kmq_lease_change *change)
{
    if (page->owners[id].twin != 0) return page->owners[id].twin;
    struct owner owner = page->owners[id];
    uint8_t flight = owner.flags & KMQ_LEASE_IN_FLIGHT;
    switch (change->deed) {
    case KMQ_LEASE_OPEN:
        owner.marker = change->marker;
        /* fall through */
    case KMQ_LEASE_DELAY:
        owner.due_ms = change->due_ms;
        owner.cause = change->cause;
        owner.flags = change->flags | flight;
        owner.text = change->text;
        break;
    case KMQ_LEASE_RENEW: owner.due_ms = change->due_ms; break;
    case KMQ_LEASE_TAKE:
    case KMQ_LEASE_GIVE_BACK: owner.flags ^= KMQ_LEASE_IN_FLIGHT; break;
    case KMQ_LEASE_CLOSE: return 0;
    }
    return page->owners[id].twin = owner_add(page, &owner);
}

static void change_page(struct page *page, const struct part *part, const struct kmq_lease_change *change)
{
    page->owners[0] = (struct owner){0};
    for (uint32_t w = 0; w < WORDS; w++) {
        for (uint64_t word = part->mask[w]; word != 0; word &= word - 1) {
            uint16_t *own = &page->own[w * 64 + (uint32_t)__builtin_ctzll(word)];
            if (*own == 0 && change->deed != KMQ_LEASE_OPEN) continue;
            const struct owner *owner = &page->owners[*own];
            if (*own == 0 || concerns(change, owner->cause, owner->flags)) *own = twin(page, *own, change);
        }
    }
}

static bool same_owner(const struct page *page, uint16_t a, uint16_t b)
{
    const struct owner *x = &page->owners[a], *y = &page->owners[b];
    return a == b || (x->due_ms == y->due_ms && x->marker == y->marker && x->text == y->text && x->cause == y->cause &&
                      x->flags == y->flags);
}

/* Offsets of one owner with nothing but holes between them. */
struct group {
    uint32_t from, to, open, runs;
    uint16_t id;
};

static bool next_group(const struct page *page, uint32_t at, struct group *group)
{
    while (at < page->to && page->own[at] == 0) at++;
    if (at == page->to) return false;
    group->from = at;
    group->to = at + 1;
    group->open = group->runs = 1;
    group->id = page->own[at];
    for (at++; at < page->to; at++) {
        uint16_t id = page->own[at];
        if (id == 0) continue;
        if (id != group->id && !same_owner(page, id, group->id)) break;
        group->runs += at > group->to;
        group->open++;
        group->to = at + 1;
    }
    return true;
}

static void measure(const kmq_lease_book *book, const struct page *page, struct need *need)
{
    struct group group;
    size_t leases = 0;
    for (uint32_t at = page->from; next_group(page, at, &group); at = group.to) {
        bool bits = group.runs >= BITS_FROM_RUNS;
        uint32_t n = bits ? 1 : group.runs;
        leases += n;
        need->bits += bits;
        need->slots += bits || page->owners[group.id].text != NULL ? n : 0;
    }
    need->leases += leases;
    need->nodes += kmq_lease_tree_nodes_for(&book->tree, leases);
}

static void pack_lease(kmq_lease_book *book, const struct page *page, uint16_t id, uint32_t from, uint32_t to,
                       uint32_t open)
{
    kmq_lease_path path;
    const struct owner *owner = &page->owners[id];
    kmq_lease lease = {.lo = page->base + from,
                       .due_ms = owner->due_ms,
                       .marker = owner->marker,
                       .len = (uint16_t)(to - from),
                       .cause = owner->cause,
                       .flags = owner->flags};
    if (owner->text != NULL || open < to - from) {
        lease.extra = slot_new(book);
        kmq_lease_slot *slot = &book->slots[lease.extra];
        slot->text = owner->text;
        if (owner->text != NULL) owner->text->refs++;
        if (open < to - from) {
            uint32_t word = from / 64, words = (to - 1) / 64 + 1 - word;
            slot->bits = bits_new(book, words, &slot->words);
            slot->open = (uint16_t)open;
            memset(slot->bits, 0, words * sizeof *slot->bits);
            for (uint32_t i = from; i < to; i++)
                if (page->own[i] != 0) slot->bits[i / 64 - word] |= UINT64_C(1) << i % 64;
        }
    }
    (void)kmq_lease_tree_seek(&book->tree, lease.lo, &path);
    kmq_lease_tree_insert(&book->tree, &path, &lease);
    book->open += open;
    if (kmq_lease_in_flight(&lease)) book->in_flight += open;
}

/* The unpacked leases out, the packed ones in. All memory has been reserved. */
static void pack(kmq_lease_book *book, const struct page *page)
{
    kmq_lease_path path;
    struct group group;
    for (uint32_t i = 0; i < page->n_old; i++) {
        (void)kmq_lease_find_from(book, page->first_lo, &path);
        slot_free(book, kmq_lease_tree_at(&book->tree, &path)->extra);
        kmq_lease_tree_remove(&book->tree, &path);
    }
    book->open -= page->open;
    book->in_flight -= page->in_flight;
    for (uint32_t at = page->from; next_group(page, at, &group); at = group.to) {
        if (group.runs >= BITS_FROM_RUNS) {
            pack_lease(book, page, group.id, group.from, group.to, group.open);
            continue;
        }
        for (uint32_t lo = group.from, hi; lo < group.to; lo = hi) { /* a lease a run */
            while (page->own[lo] == 0) lo++;
            for (hi = lo; hi < group.to && page->own[hi] != 0; hi++) {}
            pack_lease(book, page, page->own[lo], lo, hi, hi - lo);
        }
    }
}

static int reserve(kmq_lease_book *book, const struct need *need)
{
    int rc = kmq_lease_tree_reserve(&book->tree, need->nodes);
    if (rc == KMQ_OK) rc = reserve_slots(book, need->slots);
    if (rc == KMQ_OK) rc = reserve_bits(book, need->bits);
    return rc;
}

static void trim(kmq_lease_book *book)
{
    kmq_lease_tree_trim(&book->tree, KEEP_NODES);
    while (book->n_spare_bits > KEEP_BITS)
        mem(book, book->spare_bits[--book->n_spare_bits], WORDS * sizeof(uint64_t), 0);
}

/* ---- changes of sets */

static int change_part(kmq_lease_book *book, const struct part *part, const struct kmq_lease_change *change)
{
    struct page page;
    struct need need = {0};
    int rc = kmq_lease_tree_reserve(&book->tree, kmq_lease_tree_nodes_for(&book->tree, 1));
    if (rc < 0) return rc;
    if (change_plainly(book, part, change)) return KMQ_OK;
    unpack(book, &page, part, change);
    change_page(&page, part, change);
    measure(book, &page, &need);
    rc = reserve(book, &need);
    if (rc == KMQ_OK) pack(book, &page);
    release(book, &page);
    trim(book);
    return rc;
}

/* Nothing is open in the part's hull; *after = first offset of the lease behind it. */
static bool opens_in_gap(const kmq_lease_book *book, const struct part *part, int64_t *after)
{
    kmq_lease_path path;
    *after = INT64_MAX;
    if (kmq_lease_find_from(book, part->lo, &path)) *after = kmq_lease_tree_at(&book->tree, &path)->lo;
    return *after >= part->hi;
}

/* What the parts of a set will need. Parts that open one run each in the same gap of the tree go in side by side. */
static void plan(kmq_lease_book *book, const kmq_marker_set *set, const struct kmq_lease_change *change,
                 struct need *need)
{
    struct feed feed;
    struct part part;
    struct page page;
    kmq_lease_path path;
    int64_t gap = -1, after;
    size_t n_gap = 0;
    feed_begin(&feed, set);
    while (feed_next(book, &feed, change->deed == KMQ_LEASE_OPEN, &part)) {
        if (change->deed == KMQ_LEASE_CLOSE &&
            (!kmq_lease_find_from(book, part.lo, &path) || !makes_holes(book, path, &part)))
            continue;
        if (change->deed == KMQ_LEASE_OPEN && part.n_runs == 1 && opens_in_gap(book, &part, &after)) {
            if (after != gap) {
                need->nodes += kmq_lease_tree_nodes_for(&book->tree, n_gap);
                n_gap = 0;
            }
            gap = after;
            n_gap++;
            continue;
        }
        unpack(book, &page, &part, change);
        change_page(&page, &part, change);
        measure(book, &page, need);
        release(book, &page);
    }
    need->nodes += kmq_lease_tree_nodes_for(&book->tree, n_gap);
}

static void change_planned(kmq_lease_book *book, const struct part *part, const struct kmq_lease_change *change)
{
    struct page page;
    if (change_plainly(book, part, change)) return;
    unpack(book, &page, part, change);
    change_page(&page, part, change);
    pack(book, &page);
    release(book, &page);
}

/* END of all that one lease has */
static bool close_alone(kmq_lease_book *book, const kmq_range *run)
{
    kmq_lease_path path;
    if (!kmq_lease_tree_seek(&book->tree, run->lo, &path)) return true;
    const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    if (lease->lo != run->lo || kmq_lease_end(lease) != run->hi) return false;
    uint32_t open = kmq_lease_open_count(book, lease);
    book->open -= open;
    if (kmq_lease_in_flight(lease)) book->in_flight -= open;
    slot_free(book, lease->extra);
    kmq_lease_tree_remove(&book->tree, &path);
    return true;
}

/* The short way for most records of the :kmq format: one run, one page, one lease. false: nothing has changed. */
static bool change_alone(kmq_lease_book *book, const struct feed *feed, const struct kmq_lease_change *change)
{
    const kmq_range *run = &feed->run;
    if (!feed->more || feed->cursor.form != 0 || feed->cursor.left != 0) return false;
    if (run->hi > page_end(page_of(run->lo))) return false;
    if (change->deed == KMQ_LEASE_CLOSE) return close_alone(book, run);
    return change->deed == KMQ_LEASE_OPEN &&
           kmq_lease_tree_reserve(&book->tree, kmq_lease_tree_nodes_for(&book->tree, 1)) == KMQ_OK &&
           open_plainly(book, run, change);
}

int kmq_lease_change_set(kmq_lease_book *book, const kmq_marker_set *set, const struct kmq_lease_change *change)
{
    struct feed feed;
    struct part part, second;
    struct need need = {0};
    bool opens = change->deed == KMQ_LEASE_OPEN;
    feed_begin(&feed, set);
    if (change_alone(book, &feed, change)) return KMQ_OK;
    if (!feed_next(book, &feed, opens, &part)) return KMQ_OK;
    if (!feed_next(book, &feed, opens, &second)) return change_part(book, &part, change);
    plan(book, set, change, &need);
    int rc = reserve(book, &need);
    if (rc == KMQ_OK) {
        feed_begin(&feed, set);
        while (feed_next(book, &feed, opens, &part)) change_planned(book, &part, change);
    }
    trim(book);
    return rc;
}

int kmq_lease_change_run(kmq_lease_book *book, int64_t lo, int64_t hi, const struct kmq_lease_change *change)
{
    struct part part = part_of(lo, hi);
    return change_part(book, &part, change);
}

/* ---- the whole */

void kmq_lease_pages_free(kmq_lease_book *book)
{
    kmq_lease_path path;
    if (kmq_lease_tree_seek(&book->tree, INT64_MIN, &path)) {
        do {
            slot_free(book, kmq_lease_tree_at(&book->tree, &path)->extra);
        } while (kmq_lease_tree_next(&book->tree, &path));
    }
    kmq_lease_tree_free(&book->tree);
    while (book->n_spare_bits > 0) mem(book, book->spare_bits[--book->n_spare_bits], WORDS * sizeof(uint64_t), 0);
    mem(book, book->spare_bits, book->spare_bits_cap * sizeof(uint64_t *), 0);
    mem(book, book->slots, book->slots_cap * sizeof *book->slots, 0);
    assert(book->bytes == 0);
}

void kmq_lease_check(const kmq_lease_book *book, const kmq_lease *lease)
{
    uint32_t open = 0, from = (uint32_t)(lease->lo % PAGE);
    assert(lease->lo >= 0 && page_of(lease->lo) == page_of(kmq_lease_end(lease) - 1));
    if (lease->extra == 0) return;
    assert(lease->extra < book->n_slots);
    const kmq_lease_slot *slot = &book->slots[lease->extra];
    assert(slot->bits != NULL || slot->text != NULL);
    assert(slot->text == NULL || slot->text->refs > 0);
    if (slot->bits == NULL) return;
    for (uint32_t w = word_lo(lease->lo); w < word_hi(kmq_lease_end(lease)); w++) {
        uint64_t word = open_word(book, lease, w);
        assert((word & ~word_mask(w, from, from + lease->len)) == 0);
        open += (uint32_t)__builtin_popcountll(word);
    }
    assert(open > 0 && open == slot->open && open <= lease->len);
    (void)from, (void)open;
}
