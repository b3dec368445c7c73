/* ends - ENDs of one partition as records, as few as can be.
 *
 * TLV 5 (offset of the copy) of a record with several offsets is the copy of the first one, and those of the others follow it one
 * by one: where the copies do not lie so, a new record begins.
 *
 * Costs: O(n log n).  Thread rule: pure; needs 64 KiB of stack. */
#include "tracker.h"

#include <stdlib.h>

enum { RECORD_RANGES = 1000 };

static int by_cause_and_offset(const void *a, const void *b)
{
    const tracker_end *x = a, *y = b;
    if (x->cause != y->cause) return x->cause < y->cause ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static bool follows(const tracker_end *previous, const tracker_end *end, const tracker_end *first, size_t i)
{
    if (end->cause != first->cause || end->offset == previous->offset) return false;
    return first->copy_offset < 0 ? end->copy_offset < 0 : end->copy_offset == first->copy_offset + (int64_t)i;
}

/* One record of the leading ENDs; returns how many went into it. */
static size_t range_record(const kmq_marker_scope *scope, const tracker_end *ends, size_t n, tracker_ends_out *out,
                           void *ctx)
{
    uint8_t bytes[KMQ_MARKER_MAX_BYTES];
    kmq_range ranges[RECORD_RANGES];
    size_t n_ranges = 0, i = 0, used = 0;
    for (; i < n && (i == 0 || follows(&ends[i - 1], &ends[i], &ends[0], i)); i++) {
        if (n_ranges && ranges[n_ranges - 1].hi == ends[i].offset) {
            ranges[n_ranges - 1].hi++;
        } else {
            if (n_ranges == RECORD_RANGES) break;
            ranges[n_ranges++] = (kmq_range){ends[i].offset, ends[i].offset + 1};
        }
    }
    kmq_marker_tlv tlv = {.copy_offset = ends[0].copy_offset, .has_copy_offset = ends[0].copy_offset >= 0};
    int len = kmq_marker_encode(bytes, sizeof bytes, scope, KMQ_MARKER_END, ranges, n_ranges, 0, ends[0].cause, 0, &tlv,
                                &used);
    if (len < 0 || used == 0) abort(); /* a thousand ranges fit */
    out(ctx, -1, bytes, (size_t)len);
    size_t done = 0;
    for (size_t r = 0; r < used; r++) done += (size_t)(ranges[r].hi - ranges[r].lo);
    return done;
}

void tracker_ends_encode(const kmq_marker_scope *scope, bool kmq_format, tracker_end *ends, size_t n,
                         tracker_ends_out *out, void *ctx)
{
    qsort(ends, n, sizeof *ends, by_cause_and_offset);
    for (size_t i = 0; i < n;) {
        if (!kmq_format) {
            i += range_record(scope, ends + i, n - i, out, ctx);
        } else {
            uint8_t end[1];
            int len = kmq_marker_encode_kmq_end(end);
            out(ctx, ends[i++].offset, end, len > 0 ? (size_t)len : sizeof end);
        }
    }
}
