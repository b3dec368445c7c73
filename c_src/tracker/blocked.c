/* blocked - what a topic refuses waits at it, and is tried one by one, so that it harms no other.
 *
 *      sent --TOO_LARGE, others beside it--> back: for a while one copy at a time (solo), to find out which it was
 *           --TOO_LARGE, alone-------------> this size is refused: all of it and above wait, unsent; smaller ones go on
 *           --TOPIC_AUTHORIZATION_FAILED--> denied: all wait, unsent
 *
 *      waiting --every TRACKER_PROBE_MS the first one--> probe, sent alone --taken-----> all that waits is tried again
 *                                                                          --refused---> to the end of those that wait
 *
 * A dead letter that is too large is written without its value where the configuration says so: then nothing waits, unless not
 * even the bare pointer fits. Sizes are those of key, value and headers; a producer that compresses makes them an estimate, whose only
 * harm is a probe more or less.
 *
 * Bounds: 40 bytes for each that waits (its payload is given up and read again); one probe at a time per topic. */
#include "tracker.h"

#include <string.h>

static bool refuses(const tracker *t, const tracker_target *target, size_t bytes)
{
    return target->refused_bytes && bytes >= target->refused_bytes && t->now_ms < target->refused_until_ms;
}

/* Within a transaction those that are sent alone follow each other. */
bool tracker_sent_alone(const tracker *t, const tracker_item *item)
{
    if (item->probe || item->target->probing) return true;
    return !t->config.transactional && t->now_ms < item->target->solo_until_ms;
}

/* What is to go out as a probe goes back to the head of what is planned. */
bool tracker_blocked(tracker *t, tracker_item *item)
{
    tracker_target *target = item->target;
    if (item->probe) return false;
    item->written = tracker_payload_written(item->payload, item->extent);
    while (t->config.pointer && item->fate.dead && item->extent != TRACKER_BARE_POINTER &&
           refuses(t, target, item->written))
        item->written = tracker_payload_written(item->payload, ++item->extent);
    if (!target->denied && !refuses(t, target, item->written)) return false;
    if (!target->may_probe) {
        tracker_item_wait(t, item, &target->blocked, 0);
        return true;
    }
    /* goes out when nothing else is in flight */
    target->may_probe = false;
    target->probing = item->probe = true;
    item->next = target->planned_first;
    target->planned_first = item;
    if (!target->planned_last) target->planned_last = item;
    return true;
}

void tracker_refused(tracker *t, tracker_item *item, const char *name)
{
    tracker_target *target = item->target;
    tracker_part *part = item->part;
    if (item->probe) target->probing = item->probe = false;
    target->probe_ms = t->now_ms + TRACKER_PROBE_MS;
    if (strcmp(name, "MSG_SIZE_TOO_LARGE") != 0) {
        target->denied = true;
        tracker_alarm(t, &target->alarm_ms, target->dead ? "dead_letter_topic" : "copy_topic", target->topic, -1,
                      "may not be written to: %s; %zu messages wait for it", name, target->blocked.n + 1);
        tracker_item_wait(t, item, &target->blocked, 0);
        return;
    }
    size_t bytes = item->written ? item->written : 1;
    if (!refuses(t, target, bytes)) target->refused_bytes = bytes;
    target->refused_until_ms = t->now_ms + TRACKER_REFUSED_MS;
    if (t->config.pointer && item->fate.dead && item->extent != TRACKER_BARE_POINTER) {
        item->extent++;
        tracker_item_reread(t, item);
        return;
    }
    tracker_alarm(t, &target->alarm_ms, "too_large", target->topic, part->partition,
                  "a copy of %s/%d/%lld is larger than the topic takes; %zu messages wait for that", part->queue->topic,
                  part->partition, (long long)item->offset, target->blocked.n + 1);
    tracker_item_wait(t, item, &target->blocked, 0);
}

void tracker_taken(tracker_item *item)
{
    tracker_target *target = item->target;
    if (!item->probe) return;
    target->denied = false;
    if (item->written >= target->refused_bytes) target->refused_bytes = 0;
    target->probe_ms = 0;
    tracker_waits_release(&target->blocked, INT64_MAX, SIZE_MAX);
}

void tracker_blocked_step(tracker *t, tracker_target *target)
{
    if (!target->blocked.n || target->probing || t->now_ms < target->probe_ms || t->mode != MODE_RUNNING) return;
    target->probe_ms = t->now_ms + TRACKER_PROBE_MS;
    target->may_probe = true;
    tracker_waits_release(&target->blocked, INT64_MAX, 1);
}

int64_t tracker_blocked_at(const tracker_target *target)
{
    return target->blocked.n && !target->probing ? target->probe_ms : INT64_MAX;
}
