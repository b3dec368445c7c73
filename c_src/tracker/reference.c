/* reference - see reference.h. */
#include "reference.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void tracker_reference_print(const tracker_reference *reference, char out[TRACKER_REFERENCE_BYTES])
{
    snprintf(out, TRACKER_REFERENCE_BYTES, "ck1 %" PRId64 " %" PRId64 " %" PRIu32 " %" PRIx64, reference->first,
             reference->last, reference->parts, reference->id);
}

tracker_reference_kind tracker_reference_parse(const char *metadata, int64_t as_of, tracker_reference *out)
{
    int64_t first, last;
    uint32_t parts;
    uint64_t id;
    int end = 0;
    *out = (tracker_reference){.as_of = -1};
    if (!metadata || strncmp(metadata, "ck", 2) != 0) return REFERENCE_NONE;
    if (strncmp(metadata, "ck1 ", 4) != 0) return REFERENCE_NEWER;
    if (sscanf(metadata + 4, "%" SCNd64 " %" SCNd64 " %" SCNu32 " %" SCNx64 "%n", &first, &last, &parts, &id, &end) !=
        4)
        return REFERENCE_BROKEN;
    if (metadata[4 + end] || as_of < 0 || first < as_of || last < first || parts == 0 || parts - 1 > last - first)
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
