/* kmq_lease_book - see lease_book.h for the picture, the rules and the invariants; lease_page.h for how leases change.
 * Sections: markers, due messages, checkpoints, the whole. */
#include "lease_page.h"

#include <assert.h>

enum { CHECKPOINT_RUNS = 512 };

/* ---- markers */

/* a, b >= 0 */
static int64_t add_sat(int64_t a, int64_t b) { return a > INT64_MAX - b ? INT64_MAX : a + b; }

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
    struct kmq_lease_change change = {
        .marker = marker_offset, .due_ms = due_ms, .cause = KMQ_RETRY_CRASH, .flags = KMQ_FLAG_COUNTS};
    switch (marker->type) {
    case KMQ_MARKER_START: change.deed = KMQ_LEASE_OPEN; break;
    case KMQ_MARKER_PARK:
        change.deed = KMQ_LEASE_OPEN;
        change.due_ms = marker->time_ms;
        change.cause = KMQ_RETRY_RELEASED;
        change.flags = KMQ_FLAG_PARKED;
        break;
    case KMQ_MARKER_END: change.deed = KMQ_LEASE_CLOSE; break;
    case KMQ_MARKER_EXTEND: change.deed = KMQ_LEASE_RENEW; break;
    case KMQ_MARKER_RETRY:
        change.deed = KMQ_LEASE_DELAY;
        change.cause = marker->cause;
        change.flags = marker->flags;
        break;
    case KMQ_MARKER_CHECKPOINT:
    case KMQ_MARKER_CLOCK: return KMQ_OK;
    }
    if (change.deed == KMQ_LEASE_OPEN && too_large(&marker->set)) return KMQ_EINVAL;
    if (change.deed == KMQ_LEASE_DELAY && marker->tlv.text != NULL && marker->tlv.text_len > 0) {
        change.text = kmq_lease_text_new(book, marker->tlv.text, marker->tlv.text_len);
        if (change.text == NULL) return KMQ_ENOMEM;
    }
    int rc = kmq_lease_change_set(book, &marker->set, &change);
    kmq_lease_text_put(book, change.text);
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
    kmq_lease_pages_free(book);
    (void)kmq_lease_book_init(book, &(kmq_alloc){book->alloc.realloc, book->alloc.ctx});
}

/* ---- due messages */

static void tell_due(const kmq_lease_book *book, const kmq_lease *lease, int64_t offset, kmq_due *out)
{
    const struct kmq_lease_text *text = kmq_lease_text_of(book, lease);
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
    while (n < max && kmq_lease_open_run(book, lease, run.hi, &run))
        for (int64_t o = run.lo; o < run.hi && o < below && n < max; o++) tell_due(book, lease, o, &out[n++]);
    return n;
}

/* Part of a lease: it is split. 0 when there is no memory for that. */
static size_t take_some(kmq_lease_book *book, const kmq_lease *lease, int64_t below, kmq_due *out, size_t max)
{
    size_t n = tell_all_due(book, lease, below, out, max);
    if (n == 0) return 0;
    return kmq_lease_change_run(book, lease->lo, out[n - 1].offset + 1,
                                &(struct kmq_lease_change){.deed = KMQ_LEASE_TAKE}) == KMQ_OK
               ? n
               : 0;
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
            uint32_t open = kmq_lease_open_count(book, lease);
            whole = kmq_lease_end(lease) <= below && open <= max - n;
            if (!whole) break;
            n += tell_all_due(book, lease, below, out + n, max - n);
            lease->flags |= KMQ_LEASE_IN_FLIGHT;
            book->in_flight += open;
            from = kmq_lease_end(lease);
        } while (n < max && kmq_lease_tree_next_due(&book->tree, &path, now_ms));
        kmq_lease_tree_touched(&book->tree, &path);
        if (!whole) return n + take_some(book, kmq_lease_tree_at(&book->tree, &path), below, out + n, max - n);
    }
    return n;
}

void kmq_lease_book_coming(const kmq_lease_book *book, int64_t after_ms, int64_t until_ms,
                           bool (*each)(void *ctx, int64_t offset), void *ctx)
{
    kmq_lease_path path;
    int64_t from = 0;
    if (until_ms == INT64_MAX) until_ms--; /* INT64_MAX is never due */
    while (kmq_lease_tree_seek_due(&book->tree, from, until_ms, &path)) {
        do {
            const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
            kmq_range run = {.hi = lease->lo};
            from = kmq_lease_end(lease);
            if (lease->cause == KMQ_RETRY_CRASH || lease->due_ms <= after_ms) continue;
            while (kmq_lease_open_run(book, lease, run.hi, &run))
                for (int64_t o = run.lo; o < run.hi; o++)
                    if (!each(ctx, o)) return;
        } while (kmq_lease_tree_next_due(&book->tree, &path, until_ms));
    }
}

int kmq_lease_book_give_back(kmq_lease_book *book, int64_t offset)
{
    const kmq_lease *lease = kmq_lease_lookup(book, offset);
    if (lease == NULL || !kmq_lease_in_flight(lease)) return KMQ_OK;
    return kmq_lease_change_run(book, offset, offset + 1, &(struct kmq_lease_change){.deed = KMQ_LEASE_GIVE_BACK});
}

bool kmq_lease_book_still_due(const kmq_lease_book *book, int64_t offset, int64_t now_ms)
{
    const kmq_lease *lease = kmq_lease_lookup(book, offset);
    return lease != NULL && kmq_lease_in_flight(lease) && lease->due_ms <= now_ms && lease->due_ms < INT64_MAX;
}

int64_t kmq_lease_book_log_time(const kmq_lease_book *book) { return book->log_time_ms; }

int64_t kmq_lease_book_count_due(const kmq_lease_book *book, int64_t now_ms, size_t most)
{
    kmq_lease_path path;
    int64_t n = 0, from = 0;
    if (now_ms == INT64_MAX) now_ms--; /* INT64_MAX is never due */
    while (most > 0 && kmq_lease_tree_seek_due(&book->tree, from, now_ms, &path)) {
        do {
            const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
            n += kmq_lease_open_count(book, lease);
            from = kmq_lease_end(lease);
        } while (--most > 0 && kmq_lease_tree_next_due(&book->tree, &path, now_ms));
    }
    return n;
}

int64_t kmq_lease_book_next_due(const kmq_lease_book *book) { return kmq_lease_tree_min_due(&book->tree); }

int64_t kmq_lease_book_floor(const kmq_lease_book *book)
{
    return book->open > 0 ? kmq_lease_tree_min_marker(&book->tree) : -1;
}

int64_t kmq_lease_book_open(const kmq_lease_book *book) { return book->open; }

int64_t kmq_lease_book_in_flight(const kmq_lease_book *book) { return book->in_flight; }

bool kmq_lease_book_has(const kmq_lease_book *book, int64_t offset, kmq_due *out)
{
    const kmq_lease *lease = kmq_lease_lookup(book, offset);
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
    if (!kmq_lease_find_from(book, *cursor > 0 ? *cursor : 0, &path)) return false;
    const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
    while (!kmq_lease_open_run(book, lease, *cursor, run)) { /* its open offsets may all be before the cursor */
        if (!kmq_lease_tree_next(&book->tree, &path)) return false;
        lease = kmq_lease_tree_at(&book->tree, &path);
    }
    const kmq_lease *next = lease;
    while (run->hi == kmq_lease_end(next) && kmq_lease_tree_next(&book->tree, &path)) {
        next = kmq_lease_tree_at(&book->tree, &path);
        if (!same_due(lease, next) || !kmq_lease_open_run(book, next, run->hi, &more) || more.lo != run->hi) break;
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
        struct kmq_lease_change change = {.deed = KMQ_LEASE_OPEN,
                                          .due_ms = entry.due_ms,
                                          .marker = checkpoint_part->as_of,
                                          .cause = entry.cause,
                                          .flags = entry.flags};
        int rc = too_large(&entry.set) ? KMQ_EINVAL : kmq_lease_change_set(book, &entry.set, &change);
        if (rc < 0) return rc;
    }
    if (tlv->has_log_time && tlv->log_time_ms > book->log_time_ms) book->log_time_ms = tlv->log_time_ms;
    return KMQ_OK;
}

/* ---- the whole */

size_t kmq_lease_book_bytes(const kmq_lease_book *book) { return book->bytes + book->tree.bytes; }

void kmq_lease_book_check(const kmq_lease_book *book)
{
    kmq_lease_path path;
    int64_t open = 0, flying = 0;
    uint32_t slots = 0;
    kmq_lease_tree_check(&book->tree);
    if (kmq_lease_tree_seek(&book->tree, INT64_MIN, &path)) {
        do {
            const kmq_lease *lease = kmq_lease_tree_at(&book->tree, &path);
            kmq_lease_check(book, lease);
            open += kmq_lease_open_count(book, lease);
            flying += kmq_lease_in_flight(lease) ? kmq_lease_open_count(book, lease) : 0;
            slots += lease->extra != 0;
        } while (kmq_lease_tree_next(&book->tree, &path));
    }
    assert(open == book->open && flying == book->in_flight);
    assert(book->n_slots == 0 || slots + book->n_free_slots + 1 == book->n_slots);
    (void)open, (void)flying, (void)slots;
}
