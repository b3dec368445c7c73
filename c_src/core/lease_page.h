/* kmq_lease_page - the inside of a lease book: leases within pages, and how a set of offsets changes them.
 *
 *   a page     [=====)[===)x[=.=..=.=)        leases, disjoint; the last with holes: its slot has the open bits
 *
 *   unpacked   own[]     1 1 1 1 1 2 2 2 0 0 3 0 3 0 0 3 0 3     who owns each offset; 0 = nobody
 *              owners[]  1: due, marker, cause ...   2: ...   3: ...
 *
 * A change of a page takes one of two ways. The plain one edits leases in place: whole leases, ends of leases, bits, a new
 * lease in a gap. Everything else is unpacked (who owns which offset), changed, and packed again into the fewest leases:
 * this splits and merges without a case for each. A set that touches several pages is planned first, so that the memory it
 * needs is there before the first page changes: a change is whole or not at all.
 *
 * The invariants are those of lease_book.h (1, 2, 4, 5); only lease_book.c includes this.
 * Costs: in place O(log leases); unpacked O(2,048) for each page, and 140 KB of
 * stack.  Thread rule: one owner. No I/O, no clock. */
#ifndef KMQ_LEASE_PAGE_H
#define KMQ_LEASE_PAGE_H
#include "lease_book.h"

/* A RETRY's error text, shared by the leases it made. */
struct kmq_lease_text {
    uint32_t refs, len;
    char bytes[];
};

/* What happens to a set of offsets. */
enum kmq_lease_deed {
    KMQ_LEASE_OPEN,     /* START, PARK */
    KMQ_LEASE_CLOSE,    /* END */
    KMQ_LEASE_RENEW,    /* EXTEND */
    KMQ_LEASE_DELAY,    /* RETRY */
    KMQ_LEASE_TAKE,     /* into flight */
    KMQ_LEASE_GIVE_BACK /* out of it */
};

struct kmq_lease_change {
    enum kmq_lease_deed deed;
    int64_t due_ms, marker;
    uint8_t cause, flags;
    struct kmq_lease_text *text; /* borrowed: slots take references of their own */
};

/* Both: ENOMEM: unchanged. */
int kmq_lease_change_set(kmq_lease_book *book, const kmq_marker_set *set, const struct kmq_lease_change *change);
/* [lo, hi) within one page */
int kmq_lease_change_run(kmq_lease_book *book, int64_t lo, int64_t hi, const struct kmq_lease_change *change);

/* One reference is the caller's, until put. NULL: no memory. */
struct kmq_lease_text *kmq_lease_text_new(kmq_lease_book *book, const char *bytes, size_t len);
void kmq_lease_text_put(kmq_lease_book *book, struct kmq_lease_text *text);

static inline int64_t kmq_lease_end(const kmq_lease *lease) { return lease->lo + lease->len; }

static inline bool kmq_lease_in_flight(const kmq_lease *lease) { return (lease->flags & KMQ_LEASE_IN_FLIGHT) != 0; }

struct kmq_lease_text *kmq_lease_text_of(const kmq_lease_book *book, const kmq_lease *lease);
uint32_t kmq_lease_open_count(const kmq_lease_book *book, const kmq_lease *lease);
/* The first run of open offsets in the lease at or after `from`. */
bool kmq_lease_open_run(const kmq_lease_book *book, const kmq_lease *lease, int64_t from, kmq_range *run);
/* To the first lease that ends behind lo. false: none; the path is then at the last lease, if there is any. */
bool kmq_lease_find_from(const kmq_lease_book *book, int64_t lo, kmq_lease_path *path);
/* The lease that holds this open offset, or NULL. */
kmq_lease *kmq_lease_lookup(const kmq_lease_book *book, int64_t offset);

/* Everything but the book's own fields. */
void kmq_lease_pages_free(kmq_lease_book *book);
void kmq_lease_check(const kmq_lease_book *book, const kmq_lease *lease);
#endif
