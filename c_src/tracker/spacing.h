/* spacing - how far apart the attempts of a message are that crashed or took too long; who fails by saying so brings a delay. */
#ifndef TRACKER_SPACING_H
#define TRACKER_SPACING_H

#include <stdbool.h>
#include <stdint.h>

#include "backoff.h"

enum { TRACKER_SPACING_LIST = 64 };

/* Made of a text: "exponential MIN MAX FACTOR JITTER", "linear MIN MAX STEP JITTER", "list JITTER MS MS ...", times in ms. */
typedef struct tracker_spacing {
    bool given; /* false: no wait */
    kmq_backoff backoff;
    int64_t list_ms[TRACKER_SPACING_LIST];
} tracker_spacing;

/* false: not such a text; then *out is unchanged. */
bool tracker_spacing_parse(const char *text, tracker_spacing *out);

/* The wait before the attempt after `failures` of them. The jitter follows from the message, so that a tracker that is started
 * again comes to the same answer. */
int64_t tracker_spacing_ms(const tracker_spacing *spacing, int32_t failures, int32_t partition, int64_t offset);

#endif
