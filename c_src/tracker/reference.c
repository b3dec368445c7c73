/* reference - see reference.h. */
#include "reference.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void tracker_reference_print(const tracker_reference *reference, tracker_witness witness,
                             char out[TRACKER_REFERENCE_BYTES])
{
    int n = 0;
    out[0] = 0;
    if (reference)
        n = snprintf(out, TRACKER_REFERENCE_BYTES, "ck1 %" PRId64 " %" PRId64 " %" PRIu32 " %" PRIx64, reference->first,
                     reference->last, reference->parts, reference->id);
    if (witness.offset >= 0)
        snprintf(out + n, TRACKER_REFERENCE_BYTES - (size_t)n, "%s%" PRId64 " %" PRId64, reference ? " " : "at1 ",
                 witness.offset, witness.timestamp_ms);
}

/* The rest of the metadata, or nothing. */
static bool parse_witness(const char *text, tracker_witness *out)
{
    int64_t offset, timestamp_ms;
    int end = 0;
    if (!*text) return true;
    if (sscanf(text, "%" SCNd64 " %" SCNd64 "%n", &offset, &timestamp_ms, &end) != 2 || text[end] || offset < 0)
        return false;
    *out = (tracker_witness){offset, timestamp_ms};
    return true;
}

tracker_reference_kind tracker_reference_parse(const char *metadata, int64_t as_of, tracker_reference *out,
                                               tracker_witness *witness)
{
    int64_t first, last;
    uint32_t parts;
    uint64_t id;
    int end = 0;
    *out = (tracker_reference){.as_of = -1};
    *witness = (tracker_witness){-1, 0};
    if (!metadata) return REFERENCE_NONE;
    if (strncmp(metadata, "at1 ", 4) == 0) parse_witness(metadata + 4, witness);
    if (strncmp(metadata, "ck", 2) != 0) return REFERENCE_NONE;
    if (strncmp(metadata, "ck1 ", 4) != 0) return REFERENCE_NEWER;
    if (sscanf(metadata + 4, "%" SCNd64 " %" SCNd64 " %" SCNu32 " %" SCNx64 "%n", &first, &last, &parts, &id, &end) !=
        4)
        return REFERENCE_BROKEN;
    if (!parse_witness(metadata + 4 + end, witness) || as_of < 0 || first < as_of || last < first || parts == 0 ||
        parts - 1 > last - first)
        return REFERENCE_BROKEN;
    *out = (tracker_reference){as_of, first, last, parts, id};
    return REFERENCE_OURS;
}

bool tracker_reference_part(const tracker_reference *reference, const kmq_marker *marker, uint32_t part)
{
    return marker->type == KMQ_MARKER_CHECKPOINT && marker->tlv.has_instance && marker->tlv.instance == reference->id &&
           marker->as_of == reference->as_of && marker->parts == reference->parts && marker->part == part;
}

void tracker_finder_init(tracker_finder *finder, int64_t low)
{
    *finder = (tracker_finder){.low = low, .best = {.as_of = -1}};
}

static void open_remove(tracker_finder *finder, size_t i)
{
    finder->n_open--;
    memmove(&finder->open[i], &finder->open[i + 1], (finder->n_open - i) * sizeof finder->open[0]);
}

static void open_add(tracker_finder *finder, const kmq_marker *marker, int64_t offset)
{
    if (finder->n_open == FINDER_OPEN) open_remove(finder, 0);
    finder->open[finder->n_open].next = 0;
    finder->open[finder->n_open++].reference =
        (tracker_reference){marker->as_of, offset, offset, marker->parts, marker->tlv.instance};
}

void tracker_finder_feed(tracker_finder *finder, const kmq_marker *marker, int64_t offset)
{
    if (marker->type != KMQ_MARKER_CHECKPOINT || !marker->tlv.has_instance || marker->as_of > offset) return;
    if (marker->part == 0) open_add(finder, marker, offset);
    for (size_t i = 0; i < finder->n_open; i++) {
        tracker_reference *reference = &finder->open[i].reference;
        if (!tracker_reference_part(reference, marker, finder->open[i].next)) continue;
        reference->last = offset;
        if (++finder->open[i].next < reference->parts) return;
        if (reference->as_of >= finder->low && reference->as_of > finder->best.as_of) finder->best = *reference;
        open_remove(finder, i);
        return;
    }
}
