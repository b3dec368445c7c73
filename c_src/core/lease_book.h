/* prototypes; the implementation adds the picture, invariants, costs and thread rule (style.md)
 *
 * One book per marker partition: a pure fold over M by the rules of design 3.3 (shared/model: class Book). */
#ifndef KMQ_LEASE_BOOK_H
#define KMQ_LEASE_BOOK_H
#include "kmq.h"
#include "marker.h"
typedef struct kmq_lease_book kmq_lease_book;
int kmq_lease_book_init(kmq_lease_book *book, const kmq_alloc *alloc);
void kmq_lease_book_free(kmq_lease_book *book);
/* Applies one marker read from M at marker_offset with timestamp ts_ms. ENOMEM: unchanged. CHECKPOINT is ignored here. */
int kmq_lease_book_apply(kmq_lease_book *book, const kmq_marker *marker, int64_t marker_offset, int64_t ts_ms);
int64_t kmq_lease_book_log_time(const kmq_lease_book *book); /* running maximum of the timestamps; INT64_MIN before the first */

typedef struct kmq_due { int64_t offset, due_ms; uint8_t cause, flags; const char *text; size_t text_len; } kmq_due; /* cause CRASH for a lapsed lease; text of a RETRY's TLV 1, valid until the next call */
/* Takes up to max due offsets (due <= now_ms and offset < below), ascending; they are in flight until their END is read or they are
 * given back, and are not due meanwhile. Still open: they hold the commit. */
size_t kmq_lease_book_take_due(kmq_lease_book *book, int64_t now_ms, int64_t below, kmq_due *out, size_t max);
void kmq_lease_book_give_back(kmq_lease_book *book, int64_t offset); /* due again at its deadline; no effect when not in flight */
/* is it open and in flight, and is what it is due for still true at now (no renewal read meanwhile)? For the last look before a copy. */
bool kmq_lease_book_still_due(const kmq_lease_book *book, int64_t offset, int64_t now_ms);
int64_t kmq_lease_book_next_due(const kmq_lease_book *book); /* of what is not in flight; INT64_MAX = none */
int64_t kmq_lease_book_floor(const kmq_lease_book *book);    /* smallest marker offset that must be replayed; -1 = nothing open */
int64_t kmq_lease_book_open(const kmq_lease_book *book);
int64_t kmq_lease_book_in_flight(const kmq_lease_book *book);
bool kmq_lease_book_has(const kmq_lease_book *book, int64_t offset, kmq_due *out); /* out may be NULL */
/* Walks what is open in offset order: runs with equal due, cause and flags. cursor starts at INT64_MIN. */
bool kmq_lease_book_next(const kmq_lease_book *book, int64_t *cursor, kmq_range *run, int64_t *due_ms, uint8_t *cause, uint8_t *flags);
/* CHECKPOINT out: calls sink for each part's entry bytes (each part fits a record); CHECKPOINT in: adds a decoded part's entries, with
 * `as_of` as their marker offset and log_time as the log time. */
int kmq_lease_book_checkpoint(const kmq_lease_book *book, int (*sink)(void *ctx, const uint8_t *entries, size_t bytes), void *ctx);
int kmq_lease_book_load(kmq_lease_book *book, const kmq_marker *checkpoint_part);
size_t kmq_lease_book_bytes(const kmq_lease_book *book);
void kmq_lease_book_check(const kmq_lease_book *book);
#endif
