/* past - what this process knew of a marker partition when it gave it up, or lost its position: where it was, how much was open.
 *
 * A topic that is deleted and made again under its name has no commit and begins at 0, as one that is new. Only whoever has been there
 * before can tell them apart: an end that lies before what was read, a commit of ours that is gone, or another record where one was that is
 * remembered (witness.c). Then what was open in the book of that time is forgotten, and that is told.
 *
 * One entry for each marker partition that was ever ours, at most as many as there are. */
#include "tracker.h"

#include <stdlib.h>

struct tracker_past {
    tracker_past *next;
    const tracker_queue *queue;
    int32_t partition;
    int64_t position, committed, open;
};

static tracker_past **find(tracker *t, const tracker_part *part)
{
    tracker_past **at = &t->pasts;
    while (*at && ((*at)->queue != part->queue || (*at)->partition != part->partition)) at = &(*at)->next;
    return at;
}

void tracker_past_keep(tracker *t, const tracker_part *part)
{
    if (part->state == PART_NEW) return; /* it has not begun: what was before it still holds */
    tracker_past **at = find(t, part);
    if (!*at) {
        *at = tracker_alloc(sizeof **at);
        (*at)->queue = part->queue;
        (*at)->partition = part->partition;
    }
    (*at)->position = part->position;
    (*at)->committed = part->committed;
    (*at)->open = kmq_lease_book_open(&part->book);
}

bool tracker_past_take(tracker *t, const tracker_part *part, bool anew, int64_t committed, int64_t high,
                       int64_t *position, int64_t *open)
{
    tracker_past **at = find(t, part), *past = *at;
    if (!past) return false;
    bool another = anew || past->position > high || (past->committed >= 0 && committed < 0);
    *position = past->position;
    *open = past->open;
    *at = past->next;
    free(past);
    return another;
}
