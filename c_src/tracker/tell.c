/* tell - what the owner, or the daemon's lines, are told of troubles.
 *
 *      alarm    somebody must look: each at most every TRACKER_ALARM_MS
 *      outage   brokers are out of reach: told once, until `connected`
 *      passing  it is tried again and mostly passes; what does not for TRACKER_ALARM_MS becomes an alarm
 *      error    any other error of a client
 *
 * Thread rule: the loop's. */
#include "tracker.h"

#include <stdarg.h>
#include <stdio.h>

#include "term.h"

void tracker_part_event(tracker *t, const char *name, const tracker_part *part, int more_pairs)
{
    tracker_event_begin(&t->scratch, name, 2 + more_pairs);
    tracker_pair_text(&t->scratch, "topic", part->queue->topic);
    tracker_pair_int(&t->scratch, "partition", part->partition);
}

void tracker_alarm(tracker *t, int64_t *last_ms, const char *reason, const char *topic, int32_t partition,
                   const char *format, ...)
{
    char text[1024];
    if (*last_ms && t->now_ms - *last_ms < TRACKER_ALARM_MS) return;
    *last_ms = t->now_ms ? t->now_ms : 1;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    tracker_event_begin(&t->scratch, "alarm", 4);
    tracker_pair_atom(&t->scratch, "reason", reason);
    tracker_pair_text(&t->scratch, "topic", topic);
    tracker_pair_int(&t->scratch, "partition", partition);
    tracker_pair_text(&t->scratch, "text", text);
    tracker_event_send(t);
}

static void error_event(tracker *t, const char *name, const char *reason, const kafka_error *err)
{
    tracker_event_begin(&t->scratch, name, reason ? 6 : 5);
    if (reason) tracker_pair_atom(&t->scratch, "reason", reason);
    tracker_pair_text(&t->scratch, "name", err->name);
    tracker_pair_int(&t->scratch, "code", err->code);
    tracker_pair_atom(&t->scratch, "retriable", err->retriable ? "true" : "false");
    tracker_pair_atom(&t->scratch, "fatal", err->fatal ? "true" : "false");
    tracker_pair_text(&t->scratch, "text", err->text);
    tracker_event_send(t);
}

void tracker_error_event(tracker *t, const kafka_error *err) { error_event(t, "error", NULL, err); }

void tracker_client_error(tracker *t, const kafka_error *err)
{
    switch (kafka_outage_error(&t->outage, err, t->now_ms)) {
    case KAFKA_OUTAGE_NONE: error_event(t, "error", NULL, err); break;
    case KAFKA_OUTAGE_BEGINS: error_event(t, "outage", NULL, err); break;
    case KAFKA_OUTAGE_GOES_ON: error_event(t, "passing", "connection", err); break;
    }
}

void tracker_outage_step(tracker *t)
{
    int64_t lasted_ms;
    if (!kafka_outage_over(&t->outage, t->now_ms, &lasted_ms)) return;
    tracker_event_begin(&t->scratch, "connected", 1);
    tracker_pair_int(&t->scratch, "ms", lasted_ms);
    tracker_event_send(t);
}

/* The group moves on, a leader or a coordinator moves: tried again, and nobody need look. */
static bool passes(int code)
{
    kafka_verdict verdict = kafka_error_verdict(code);
    return verdict == KAFKA_RETRIED || verdict == KAFKA_ANSWERED;
}

void tracker_failed(tracker *t, tracker_alarm_kind kind, const kafka_error *err, const char *reason, const char *what)
{
    tracker_trouble *trouble = &t->troubles[kind];
    kafka_error told = *err;
    if (t->now_ms - trouble->heard_ms > TRACKER_ALARM_MS) trouble->since_ms = t->now_ms;
    trouble->heard_ms = t->now_ms;
    if (!passes(err->code) || t->now_ms - trouble->since_ms > TRACKER_ALARM_MS) {
        tracker_alarm(t, &t->alarm_ms[kind], reason, NULL, -1, "%s: %s", what, err->text);
        return;
    }
    snprintf(told.text, sizeof told.text, "%s: %.*s", what, (int)(sizeof told.text - 128), err->text);
    error_event(t, "passing", reason, &told);
}

void tracker_log_event(tracker *t, int level, const char *text)
{
    tracker_event_begin(&t->scratch, "log", 2);
    tracker_pair_int(&t->scratch, "level", level);
    tracker_pair_text(&t->scratch, "text", text);
    tracker_event_send(t);
}

void tracker_partitions_event(tracker *t, const char *name, const kafka_partition *partitions, size_t n)
{
    tracker_event_begin(&t->scratch, name, 1);
    tracker_put_atom(&t->scratch, "partitions");
    for (size_t i = 0; i < n; i++) {
        ei_x_encode_list_header(&t->scratch, 1);
        ei_x_encode_tuple_header(&t->scratch, 2);
        tracker_put_text(&t->scratch, partitions[i].topic);
        tracker_put_int(&t->scratch, partitions[i].partition);
    }
    ei_x_encode_empty_list(&t->scratch);
    tracker_event_send(t);
}
