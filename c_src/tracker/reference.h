/* reference - what a commit of a marker partition says in its metadata: which checkpoint it stands on, and in which topic it was made.
 *
 *      M   ... | . . . . | K0 K1 m K2 | . . .          K: the parts of one CHECKPOINT, markers of others in between
 *              ^ as_of   ^ first    ^ last
 *
 *      commit: offset = as_of, metadata = "ck1 first last parts id witness-offset witness-timestamp"
 *              without a checkpoint: metadata = "at1 witness-offset witness-timestamp"; without either: none
 *
 * Recovery loads first..last into an empty book, then replays from as_of. A part belongs to the checkpoint when id, as_of and the number
 * of parts agree; it is whole when parts 0, 1, ... have come, in that order.
 *
 * The finder is for when there is no such commit: fed with the parts in the order of the log, it remembers the newest whole one.
 * It follows FINDER_OPEN checkpoints at once (trackers that write at the same time); more are not expected, the oldest is given up.
 *
 * Costs: O(1).  Thread rule: pure. */
#ifndef TRACKER_REFERENCE_H
#define TRACKER_REFERENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "marker.h"

typedef struct tracker_reference {
    int64_t as_of;       /* -1 = none */
    int64_t first, last; /* marker offsets of its parts */
    uint32_t parts;
    uint64_t id;
} tracker_reference;

/* A record that was read, by which the topic is known again (witness.c). */
typedef struct tracker_witness {
    int64_t offset; /* -1 = none */
    int64_t timestamp_ms;
} tracker_witness;

enum { TRACKER_REFERENCE_BYTES = 128 };

/* The metadata of a commit, with its NUL; at reference->as_of, or without a reference (NULL). Empty when there is nothing to say. */
void tracker_reference_print(const tracker_reference *reference, tracker_witness witness,
                             char out[TRACKER_REFERENCE_BYTES]);

typedef enum tracker_reference_kind {
    REFERENCE_NONE,  /* no metadata, or somebody else's */
    REFERENCE_OURS,  /* *out is filled */
    REFERENCE_NEWER, /* ours, of a version that this code does not know: as_of alone is not enough */
    REFERENCE_BROKEN /* ours by its first letters, and senseless */
} tracker_reference_kind;
tracker_reference_kind tracker_reference_parse(const char *metadata, int64_t as_of, tracker_reference *out,
                                               tracker_witness *witness);

/* Is this CHECKPOINT the part of that number? */
bool tracker_reference_part(const tracker_reference *reference, const kmq_marker *marker, uint32_t part);

enum { FINDER_OPEN = 8 };
typedef struct tracker_finder {
    int64_t low;            /* as_of below it: no use */
    tracker_reference best; /* as_of -1: none yet */
    struct {
        tracker_reference reference;
        uint32_t next;
    } open[FINDER_OPEN];
    size_t n_open;
} tracker_finder;

void tracker_finder_init(tracker_finder *finder, int64_t low);
void tracker_finder_feed(tracker_finder *finder, const kmq_marker *marker, int64_t offset);

#endif
