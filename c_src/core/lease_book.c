/* kmq_lease_book - see lease_book.h for the picture, the rules and the invariants. Sections: slots, leases, parts (what a
 * set says about one page), the plain way, the unpacked way, markers, due messages, checkpoints. */
#include "lease_book.h"

#include <assert.h>
#include <string.h>

enum {
    PAGE = 2048,
    WORDS = PAGE / 64,
    BITS_FROM_RUNS = 4, /* a lease with fewer runs than this is written as one lease a run */
    KEEP_NODES = 8,     /* spare memory that stays between markers */
    KEEP_BITS = 4,
    CHECKPOINT_RUNS = 512
};

struct text {
    uint32_t refs, len;
    char bytes[];
};

struct kmq_lease_slot {
    uint64_t *bits;    /* the words of the page that the span touches; NULL: all of the span is open */
    struct text *text; /* NULL: none */
    uint16_t open;     /* set bits */
    uint16_t words;    /* allocated */
    uint32_t next_free;
};

/* What happens to a set of offsets. */
typedef enum deed {
    OPEN,     /* START, PARK */
    CLOSE,    /* END */
    RENEW,    /* EXTEND */
    DELAY,    /* RETRY */
    TAKE,     /* into flight */
    GIVE_BACK /* out of it */
} deed;

struct change {
    deed deed;
    int64_t due_ms, marker;
    uint8_t cause, flags;
    struct text *text;
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

static struct text *text_new(kmq_lease_book *book, const char *bytes, size_t len)
{
    struct text *text = mem(book, NULL, 0, sizeof *text + len);
    if (text == NULL) return NULL;
    text->refs = 1;
    text->len = (uint32_t)len;
    memcpy(text->bytes, bytes, len);
    return text;
}

static void text_put(kmq_lease_book *book, struct text *text)
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
    text_put(book, slot->text);
    *slot = (kmq_lease_slot){.next_free = book->free_slot};
    book->free_slot = extra;
    book->n_free_slots++;
}

/* ---- leases */

static int64_t page_of(int64_t offset) { return offset - offset % PAGE; }

/* one behind the last offset of a page; the last page of all has one offset less */
static int64_t page_end(int64_t base) { return base > INT64_MAX - PAGE ? INT64_MAX : base + PAGE; }

static int64_t end_of(const kmq_lease *lease) { return lease->lo + lease->len; }

static bool in_flight(const kmq_lease *lease) { return (lease->flags & KMQ_LEASE_IN_FLIGHT) != 0; }

static uint64_t *bits_of(const kmq_lease_book *book, const kmq_lease *lease)
{
    return lease->extra != 0 ? book->slots[lease->extra].bits : NULL;
}

static struct text *text_of(const kmq_lease_book *book, const kmq_lease *lease)
{
    return lease->extra != 0 ? book->slots[lease->extra].text : NULL;
}

static uint32_t open_of(const kmq_lease_book *book, const kmq_lease *lease)
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
static bool open_run(const kmq_lease_book *book, const kmq_lease *lease, int64_t from, kmq_range *run)
{
    int64_t end = end_of(lease), base = page_of(lease->lo);
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
static bool find_from(const kmq_lease_book *book, int64_t lo, kmq_lease_path *path)
{
    if (!kmq_lease_tree_seek(&book->tree, lo, path)) return false;
    return end_of(kmq_lease_tree_at(&book->tree, path)) > lo || kmq_lease_tree_next(&book->tree, path);
}

/* the lease that holds this open offset, or NULL */
static kmq_lease *lookup(const kmq_lease_book *book, int64_t offset)
{
    kmq_lease_path path;
    if (offset < 0 || !kmq_lease_tree_seek(&book->tree, offset, &path)) return NULL;
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    if (lease->lo > offset || end_of(lease) <= offset) return NULL;
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
    if (!find_from(book, run->lo, &path)) return false;
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

static bool same_terms(const kmq_lease *lease, const struct change *change)
{
    return lease->extra == 0 && lease->due_ms == change->due_ms && lease->marker == change->marker &&
           lease->cause == change->cause && lease->flags == change->flags;
}

static void replace_terms(kmq_lease_book *book, kmq_lease_path *path, const struct change *change)
{
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, path);
    book->open += (int64_t)lease->len - open_of(book, lease);
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
static bool open_plainly(kmq_lease_book *book, const kmq_range *run, const struct change *change)
{
    kmq_lease_path path;
    if (kmq_lease_tree_seek(&book->tree, run->lo, &path)) {
        kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        int64_t end = end_of(lease);
        if (end > run->lo && lease->lo < run->hi) {
            if (lease->lo != run->lo || end != run->hi || in_flight(lease)) return false;
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
    for (uint32_t w = word_lo(lease->lo), stop = word_hi(end_of(lease)); w < stop; w++) {
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
        int64_t end = end_of(lease);
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
    int64_t closed = (int64_t)open_of(book, lease) - left.n;
    if (closed == 0) return;
    book->open -= closed;
    if (in_flight(lease)) book->in_flight -= closed;
    if (left.n == 0) {
        slot_free(book, lease->extra);
        kmq_lease_tree_remove(&book->tree, path);
    } else if (bits == NULL) {
        narrow(book, path, part->base + left.first, left.n);
    } else if (left.n == 1 && text_of(book, lease) == NULL) { /* a straggler pays for itself only */
        slot_free(book, lease->extra);
        lease->extra = 0;
        narrow(book, path, part->base + left.first, 1);
    } else {
        uint32_t from = word_lo(lease->lo), n = word_hi(end_of(lease)) - from;
        memcpy(bits, &left.words[from], n * sizeof *bits);
        book->slots[lease->extra].open = (uint16_t)left.n;
    }
}

static bool close_plainly(kmq_lease_book *book, const struct part *part)
{
    kmq_lease_path path;
    int64_t from = part->lo;
    if (!find_from(book, from, &path)) return true;
    if (makes_holes(book, path, part)) return false;
    do {
        const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
        if (lease->lo >= part->hi) break;
        from = end_of(lease);
        close_lease(book, &path, part);
    } while (from < part->hi && find_from(book, from, &path));
    return true;
}

static bool concerns(const struct change *change, uint8_t cause, uint8_t flags)
{
    switch (change->deed) {
    case RENEW: return cause == KMQ_RETRY_CRASH;
    case TAKE: return (flags & KMQ_LEASE_IN_FLIGHT) == 0;
    case GIVE_BACK: return (flags & KMQ_LEASE_IN_FLIGHT) != 0;
    case OPEN:
    case CLOSE:
    case DELAY: break;
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
static bool amend_plainly(kmq_lease_book *book, const struct part *part, const struct change *change)
{
    kmq_lease_path path;
    struct left left;
    if (!find_from(book, part->lo, &path)) return true;
    kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    if (lease->lo >= part->hi) return true;
    if (kmq_lease_tree_next_lo(&book->tree, &path) < part->hi) return false;
    if (!concerns(change, lease->cause, lease->flags)) return true;
    left_of(book, lease, part, &left);
    if (left.n == open_of(book, lease)) return true; /* only holes were named */
    bool flight = change->deed == TAKE || change->deed == GIVE_BACK;
    int64_t due_ms = flight ? lease->due_ms : change->due_ms;
    if (left.n > 0 || change->text != NULL || neighbour_may_join(book, &path, part, due_ms)) return false;
    lease->due_ms = due_ms;
    if (flight) {
        lease->flags ^= KMQ_LEASE_IN_FLIGHT;
        book->in_flight += in_flight(lease) ? open_of(book, lease) : -(int64_t)open_of(book, lease);
    } else if (change->deed == DELAY) {
        lease->cause = change->cause;
        lease->flags = (uint8_t)((lease->flags & KMQ_LEASE_IN_FLIGHT) | change->flags);
        if (text_of(book, lease) != NULL) { /* the new RETRY says nothing */
            text_put(book, text_of(book, lease));
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

static bool change_plainly(kmq_lease_book *book, const struct part *part, const struct change *change)
{
    switch (change->deed) {
    case OPEN: return part->n_runs == 1 && open_plainly(book, &(kmq_range){part->lo, part->hi}, change);
    case CLOSE: return close_plainly(book, part);
    case RENEW:
    case DELAY:
    case TAKE:
    case GIVE_BACK: break;
    }
    return amend_plainly(book, part, change);
}

/* ---- the unpacked way: who owns which offset; then changed; then packed again */

struct owner {
    int64_t due_ms, marker;
    struct text *text;
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
                          .text = text_of(book, lease),
                          .cause = lease->cause,
                          .flags = lease->flags};
    uint16_t id = owner_add(page, &owner);
    uint32_t from = (uint32_t)(lease->lo - page->base), to = from + lease->len;
    kmq_range run = {.hi = lease->lo};
    while (open_run(book, lease, run.hi, &run))
        for (int64_t o = run.lo; o < run.hi; o++) page->own[o - page->base] = id;
    if (page->n_old++ == 0) page->first_lo = lease->lo;
    if (from < page->from) page->from = from;
    if (to > page->to) page->to = to;
    page->open += open_of(book, lease);
    if (in_flight(lease)) page->in_flight += open_of(book, lease);
}

/* A neighbour in the page comes along if the change could make the two alike. When a hole is made, so do the other
 * pieces of what was one lease: with enough of them, one lease with bits takes their place. */
static bool comes_along(const kmq_lease *lease, const struct part *part, const struct change *change,
                        const kmq_lease *first)
{
    if (lease->lo < part->base || lease->lo >= page_end(part->base)) return false;
    switch (change->deed) {
    case OPEN:
    case RENEW:
    case DELAY: return lease->due_ms == change->due_ms;
    case CLOSE:
    case TAKE:
    case GIVE_BACK: break;
    }
    return first != NULL && lease->due_ms == first->due_ms && lease->marker == first->marker;
}

static void unpack(const kmq_lease_book *book, struct page *page, const struct part *part, const struct change *change)
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
    bool found = find_from(book, part->lo, &path);
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
    for (uint32_t i = 1; i < page->n_owners; i++) text_put(book, page->owners[i].text);
}

/* the owner that offsets of this one go to; nobody's go to the plain new one */
static uint16_t twin(struct page *page, uint16_t id, const struct change *change)
{
    if (page->owners[id].twin != 0) return page->owners[id].twin;
    struct owner owner = page->owners[id];
    uint8_t flight = owner.flags & KMQ_LEASE_IN_FLIGHT;
    switch (change->deed) {
    case OPEN:
        owner.marker = change->marker;
        /* fall through */
    case DELAY:
        owner.due_ms = change->due_ms;
        owner.cause = change->cause;
        owner.flags = change->flags | flight;
        owner.text = change->text;
        break;
    case RENEW: owner.due_ms = change->due_ms; break;
    case TAKE:
    case GIVE_BACK: owner.flags ^= KMQ_LEASE_IN_FLIGHT; break;
    case CLOSE: return 0;
    }
    return page->owners[id].twin = owner_add(page, &owner);
}

static void change_page(struct page *page, const struct part *part, const struct change *change)
{
    page->owners[0] = (struct owner){0};
    for (uint32_t w = 0; w < WORDS; w++) {
        for (uint64_t word = part->mask[w]; word != 0; word &= word - 1) {
            uint16_t *own = &page->own[w * 64 + (uint32_t)__builtin_ctzll(word)];
            if (*own == 0 && change->deed != OPEN) continue;
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
    if (in_flight(&lease)) book->in_flight += open;
}

/* The unpacked leases out, the packed ones in. All memory has been reserved. */
static void pack(kmq_lease_book *book, const struct page *page)
{
    kmq_lease_path path;
    struct group group;
    for (uint32_t i = 0; i < page->n_old; i++) {
        (void)find_from(book, page->first_lo, &path);
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

static int change_part(kmq_lease_book *book, const struct part *part, const struct change *change)
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
    if (find_from(book, part->lo, &path)) *after = kmq_lease_tree_at(&book->tree, &path)->lo;
    return *after >= part->hi;
}

/* What the parts of a set will need. Parts that open one run each in the same gap of the tree go in side by side. */
static void plan(kmq_lease_book *book, const kmq_marker_set *set, const struct change *change, struct need *need)
{
    struct feed feed;
    struct part part;
    struct page page;
    kmq_lease_path path;
    int64_t gap = -1, after;
    size_t n_gap = 0;
    feed_begin(&feed, set);
    while (feed_next(book, &feed, change->deed == OPEN, &part)) {
        if (change->deed == CLOSE && (!find_from(book, part.lo, &path) || !makes_holes(book, path, &part))) continue;
        if (change->deed == OPEN && part.n_runs == 1 && opens_in_gap(book, &part, &after)) {
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

static void change_planned(kmq_lease_book *book, const struct part *part, const struct change *change)
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
    if (lease->lo != run->lo || end_of(lease) != run->hi) return false;
    uint32_t open = open_of(book, lease);
    book->open -= open;
    if (in_flight(lease)) book->in_flight -= open;
    slot_free(book, lease->extra);
    kmq_lease_tree_remove(&book->tree, &path);
    return true;
}

/* The short way for most records of the :kmq format: one run, one page, one lease. false: nothing has changed. */
static bool change_alone(kmq_lease_book *book, const struct feed *feed, const struct change *change)
{
    const kmq_range *run = &feed->run;
    if (!feed->more || feed->cursor.form != 0 || feed->cursor.left != 0) return false;
    if (run->hi > page_end(page_of(run->lo))) return false;
    if (change->deed == CLOSE) return close_alone(book, run);
    return change->deed == OPEN &&
           kmq_lease_tree_reserve(&book->tree, kmq_lease_tree_nodes_for(&book->tree, 1)) == KMQ_OK &&
           open_plainly(book, run, change);
}

static int change_set(kmq_lease_book *book, const kmq_marker_set *set, const struct change *change)
{
    struct feed feed;
    struct part part, second;
    struct need need = {0};
    bool opens = change->deed == OPEN;
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

/* ---- markers */

static int64_t add_sat(int64_t a, int64_t b) /* a, b >= 0 */ { return a > INT64_MAX - b ? INT64_MAX : a + b; }

static bool too_large(const kmq_marker_set *set)
{
    kmq_marker_cursor cursor;
    kmq_range run;
    int64_t n = 0;
    if (set->bytes == NULL) return false;
    kmq_marker_set_begin(set, &cursor);
    while (n <= KMQ_LEASE_SET_MAX && kmq_marker_set_next(&cursor, &run)) n = add_sat(n, run.hi - run.lo);
    return n > KMQ_LEASE_SET_MAX;
}

/* A timestamp below 0 (Kafka's "none") counts as 0: deadlines are epoch ms. */
static int apply_at(kmq_lease_book *book, const kmq_marker *marker, int64_t marker_offset, int64_t now_ms)
{
    int64_t due_ms = add_sat(now_ms > 0 ? now_ms : 0, marker->time_ms);
    struct change change = {
        .marker = marker_offset, .due_ms = due_ms, .cause = KMQ_RETRY_CRASH, .flags = KMQ_FLAG_COUNTS};
    switch (marker->type) {
    case KMQ_MARKER_START: change.deed = OPEN; break;
    case KMQ_MARKER_PARK:
        change.deed = OPEN;
        change.due_ms = marker->time_ms;
        change.cause = KMQ_RETRY_RELEASED;
        change.flags = KMQ_FLAG_PARKED;
        break;
    case KMQ_MARKER_END: change.deed = CLOSE; break;
    case KMQ_MARKER_EXTEND: change.deed = RENEW; break;
    case KMQ_MARKER_RETRY:
        change.deed = DELAY;
        change.cause = marker->cause;
        change.flags = marker->flags;
        break;
    case KMQ_MARKER_CHECKPOINT:
    case KMQ_MARKER_CLOCK: return KMQ_OK;
    }
    if (change.deed == OPEN && too_large(&marker->set)) return KMQ_EINVAL;
    if (change.deed == DELAY && marker->tlv.text != NULL && marker->tlv.text_len > 0) {
        change.text = text_new(book, marker->tlv.text, marker->tlv.text_len);
        if (change.text == NULL) return KMQ_ENOMEM;
    }
    int rc = change_set(book, &marker->set, &change);
    text_put(book, change.text);
    return rc;
}

int kmq_lease_book_apply(kmq_lease_book *book, const kmq_marker *marker, int64_t marker_offset, int64_t ts_ms)
{
    int64_t now_ms = ts_ms > book->log_time_ms ? ts_ms : book->log_time_ms;
    int rc = apply_at(book, marker, marker_offset, now_ms);
    if (rc != KMQ_ENOMEM) book->log_time_ms = now_ms;
    return rc;
}

int kmq_lease_book_init(kmq_lease_book *book, const kmq_alloc *alloc)
{
    *book = (kmq_lease_book){.alloc = *alloc, .log_time_ms = INT64_MIN};
    kmq_lease_tree_init(&book->tree, alloc);
    return KMQ_OK;
}

void kmq_lease_book_free(kmq_lease_book *book)
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
    (void)kmq_lease_book_init(book, &(kmq_alloc){book->alloc.realloc, book->alloc.ctx});
}

/* ---- due messages */

static void tell_due(const kmq_lease_book *book, const kmq_lease *lease, int64_t offset, kmq_due *out)
{
    const struct text *text = text_of(book, lease);
    *out = (kmq_due){.offset = offset,
                     .due_ms = lease->due_ms,
                     .cause = lease->cause,
                     .flags = lease->flags & (uint8_t)~KMQ_LEASE_IN_FLIGHT,
                     .text = text != NULL ? text->bytes : NULL,
                     .text_len = text != NULL ? text->len : 0};
}

/* up to max open offsets of a lease, below a bound */
static size_t tell_all_due(const kmq_lease_book *book, const kmq_lease *lease, int64_t below, kmq_due *out, size_t max)
{
    size_t n = 0;
    kmq_range run = {.hi = lease->lo};
    while (n < max && open_run(book, lease, run.hi, &run))
        for (int64_t o = run.lo; o < run.hi && o < below && n < max; o++) tell_due(book, lease, o, &out[n++]);
    return n;
}

/* Part of a lease: it is split. 0 when there is no memory for that. */
static size_t take_some(kmq_lease_book *book, const kmq_lease *lease, int64_t below, kmq_due *out, size_t max)
{
    size_t n = tell_all_due(book, lease, below, out, max);
    if (n == 0) return 0;
    struct part part = part_of(lease->lo, out[n - 1].offset + 1);
    return change_part(book, &part, &(struct change){.deed = TAKE}) == KMQ_OK ? n : 0;
}

size_t kmq_lease_book_take_due(kmq_lease_book *book, int64_t now_ms, int64_t below, kmq_due *out, size_t max)
{
    kmq_lease_path path;
    size_t n = 0;
    int64_t from = 0;
    if (now_ms == INT64_MAX) now_ms--; /* INT64_MAX is never due */
    while (n < max && kmq_lease_tree_seek_due(&book->tree, from, now_ms, &path)) {
        bool whole = true;
        do {
            kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
            uint32_t open = open_of(book, lease);
            whole = end_of(lease) <= below && open <= max - n;
            if (!whole) break;
            n += tell_all_due(book, lease, below, out + n, max - n);
            lease->flags |= KMQ_LEASE_IN_FLIGHT;
            book->in_flight += open;
            from = end_of(lease);
        } while (n < max && kmq_lease_tree_next_due(&book->tree, &path, now_ms));
        kmq_lease_tree_touched(&book->tree, &path);
        if (!whole) return n + take_some(book, kmq_lease_tree_at(&book->tree, &path), below, out + n, max - n);
    }
    return n;
}

int kmq_lease_book_give_back(kmq_lease_book *book, int64_t offset)
{
    const kmq_lease *lease = lookup(book, offset);
    if (lease == NULL || !in_flight(lease)) return KMQ_OK;
    struct part part = part_of(offset, offset + 1);
    return change_part(book, &part, &(struct change){.deed = GIVE_BACK});
}

bool kmq_lease_book_still_due(const kmq_lease_book *book, int64_t offset, int64_t now_ms)
{
    const kmq_lease *lease = lookup(book, offset);
    return lease != NULL && in_flight(lease) && lease->due_ms <= now_ms && lease->due_ms < INT64_MAX;
}

int64_t kmq_lease_book_log_time(const kmq_lease_book *book) { return book->log_time_ms; }

int64_t kmq_lease_book_next_due(const kmq_lease_book *book) { return kmq_lease_tree_min_due(&book->tree); }

int64_t kmq_lease_book_floor(const kmq_lease_book *book)
{
    return book->open > 0 ? kmq_lease_tree_min_marker(&book->tree) : -1;
}

int64_t kmq_lease_book_open(const kmq_lease_book *book) { return book->open; }

int64_t kmq_lease_book_in_flight(const kmq_lease_book *book) { return book->in_flight; }

bool kmq_lease_book_has(const kmq_lease_book *book, int64_t offset, kmq_due *out)
{
    const kmq_lease *lease = lookup(book, offset);
    if (lease != NULL && out != NULL) tell_due(book, lease, offset, out);
    return lease != NULL;
}

static bool same_due(const kmq_lease *a, const kmq_lease *b)
{
    return a->due_ms == b->due_ms && a->cause == b->cause && ((a->flags ^ b->flags) & ~KMQ_LEASE_IN_FLIGHT) == 0;
}

bool kmq_lease_book_next(const kmq_lease_book *book, int64_t *cursor, kmq_range *run, int64_t *due_ms, uint8_t *cause,
                         uint8_t *flags)
{
    kmq_lease_path path;
    kmq_range more;
    if (!find_from(book, *cursor > 0 ? *cursor : 0, &path)) return false;
    const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    while (!open_run(book, lease, *cursor, run)) { /* its open offsets may all be before the cursor */
        if (!kmq_lease_tree_next(&book->tree, &path)) return false;
        lease = kmq_lease_tree_at(&book->tree, &path);
    }
    const kmq_lease *next = lease;
    while (run->hi == end_of(next) && kmq_lease_tree_next(&book->tree, &path)) {
        next = kmq_lease_tree_at(&book->tree, &path);
        if (!same_due(lease, next) || !open_run(book, next, run->hi, &more) || more.lo != run->hi) break;
        run->hi = more.hi;
    }
    *cursor = run->hi;
    if (due_ms != NULL) *due_ms = lease->due_ms;
    if (cause != NULL) *cause = lease->cause;
    if (flags != NULL) *flags = lease->flags & (uint8_t)~KMQ_LEASE_IN_FLIGHT;
    return true;
}

/* ---- checkpoints */

/* The part that is being filled, and the entry that is being gathered. */
struct draft {
    int (*sink)(void *ctx, const uint8_t *entries, size_t bytes);
    void *ctx;
    uint8_t *buf;
    size_t n_bytes;
    int64_t due_ms;
    uint8_t cause, flags;
    size_t n_ranges;
    kmq_range ranges[CHECKPOINT_RUNS];
};

static int draft_flush(struct draft *draft)
{
    int rc = draft->n_bytes > 0 ? draft->sink(draft->ctx, draft->buf, draft->n_bytes) : KMQ_OK;
    draft->n_bytes = 0;
    return rc;
}

static int draft_entry(struct draft *draft)
{
    size_t done = 0, used;
    while (done < draft->n_ranges) {
        int n = kmq_marker_encode_entry(draft->buf + draft->n_bytes, KMQ_CHECKPOINT_ENTRIES_MAX - draft->n_bytes,
                                        draft->ranges + done, draft->n_ranges - done, draft->due_ms, draft->cause,
                                        draft->flags, &used);
        if (n == KMQ_EFULL && draft->n_bytes > 0) {
            n = draft_flush(draft);
            if (n < 0) return n;
            continue;
        }
        if (n < 0) return n;
        draft->n_bytes += (size_t)n;
        done += used;
    }
    draft->n_ranges = 0;
    return KMQ_OK;
}

static int draft_all(const kmq_lease_book *book, struct draft *draft)
{
    int64_t cursor = INT64_MIN, due_ms;
    kmq_range run;
    uint8_t cause, flags;
    int rc = KMQ_OK;
    while (rc >= 0 && kmq_lease_book_next(book, &cursor, &run, &due_ms, &cause, &flags)) {
        bool same = draft->n_ranges > 0 && draft->due_ms == due_ms && draft->cause == cause && draft->flags == flags;
        if (!same || draft->n_ranges == CHECKPOINT_RUNS) rc = draft_entry(draft);
        draft->due_ms = due_ms;
        draft->cause = cause;
        draft->flags = flags;
        draft->ranges[draft->n_ranges++] = run;
    }
    if (rc >= 0) rc = draft_entry(draft);
    return rc >= 0 ? draft_flush(draft) : rc;
}

int kmq_lease_book_checkpoint(const kmq_lease_book *book, int (*sink)(void *ctx, const uint8_t *entries, size_t bytes),
                              void *ctx)
{
    struct draft draft = {.sink = sink, .ctx = ctx};
    draft.buf = book->alloc.realloc(book->alloc.ctx, NULL, KMQ_CHECKPOINT_ENTRIES_MAX);
    if (draft.buf == NULL) return KMQ_ENOMEM;
    int rc = draft_all(book, &draft);
    book->alloc.realloc(book->alloc.ctx, draft.buf, 0);
    return rc < 0 ? rc : KMQ_OK;
}

int kmq_lease_book_load(kmq_lease_book *book, const kmq_marker *checkpoint_part)
{
    kmq_checkpoint_cursor cursor;
    kmq_checkpoint_entry entry;
    const kmq_marker_tlv *tlv = &checkpoint_part->tlv;
    if (checkpoint_part->type != KMQ_MARKER_CHECKPOINT) return KMQ_EINVAL;
    kmq_marker_entries_begin(checkpoint_part, &cursor);
    while (kmq_marker_entries_next(&cursor, &entry)) {
        struct change change = {.deed = OPEN,
                                .due_ms = entry.due_ms,
                                .marker = checkpoint_part->as_of,
                                .cause = entry.cause,
                                .flags = entry.flags};
        int rc = too_large(&entry.set) ? KMQ_EINVAL : change_set(book, &entry.set, &change);
        if (rc < 0) return rc;
    }
    if (tlv->has_log_time && tlv->log_time_ms > book->log_time_ms) book->log_time_ms = tlv->log_time_ms;
    return KMQ_OK;
}

/* ---- the whole */

size_t kmq_lease_book_bytes(const kmq_lease_book *book) { return book->bytes + book->tree.bytes; }

static void check_lease(const kmq_lease_book *book, const kmq_lease *lease)
{
    uint32_t open = 0, from = (uint32_t)(lease->lo % PAGE);
    assert(lease->lo >= 0 && page_of(lease->lo) == page_of(end_of(lease) - 1));
    if (lease->extra == 0) return;
    assert(lease->extra < book->n_slots);
    const kmq_lease_slot *slot = &book->slots[lease->extra];
    assert(slot->bits != NULL || slot->text != NULL);
    assert(slot->text == NULL || slot->text->refs > 0);
    if (slot->bits == NULL) return;
    for (uint32_t w = word_lo(lease->lo); w < word_hi(end_of(lease)); w++) {
        uint64_t word = open_word(book, lease, w);
        assert((word & ~word_mask(w, from, from + lease->len)) == 0);
        open += (uint32_t)__builtin_popcountll(word);
    }
    assert(open > 0 && open == slot->open && open <= lease->len);
    (void)from, (void)open;
}

void kmq_lease_book_check(const kmq_lease_book *book)
{
    kmq_lease_path path;
    int64_t open = 0, flying = 0;
    uint32_t slots = 0;
    kmq_lease_tree_check(&book->tree);
    if (kmq_lease_tree_seek(&book->tree, INT64_MIN, &path)) {
        do {
            const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
            check_lease(book, lease);
            open += open_of(book, lease);
            flying += in_flight(lease) ? open_of(book, lease) : 0;
            slots += lease->extra != 0;
        } while (kmq_lease_tree_next(&book->tree, &path));
    }
    assert(open == book->open && flying == book->in_flight);
    assert(book->n_slots == 0 || slots + book->n_free_slots + 1 == book->n_slots);
    (void)open, (void)flying, (void)slots;
}
