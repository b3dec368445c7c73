/* ahead - what will soon be due is read back from Q before its time, so that only the decision and the copy are left for it.
 *
 *   book --coming--> one pass over the partition, in a thread of its own --> kept by offset --due, take--> planned (redeliver.c)
 *                                                                                 '--not asked for in time--> dropped
 *
 * What is due together lies all over the partition, and a read of it goes over everything in between: so one pass for all of a period is
 * better than one for each few that are due. Only what waits by somebody's wish (PARK, RETRY) is read: a lease is renewed, as a rule, and
 * who has crashed waits for his backoff.
 *
 * Nothing is decided here. A record at an offset stays what it is; whether the message is still open, due, and below the group's commit is
 * asked when it is due, as ever, and what was not read by then is read as ever.
 *
 * How far ahead, and how often, is tracker_lead's (pace.h), which takes the wait for the passes of other partitions as part of each.
 *
 * Bounds: one pass at a time; AHEAD_MOST offsets a pass, TRACKER_AHEAD_BYTES of payloads in all. */
#include "tracker.h"

#include <stdlib.h>

#include "failpoint.h"

_Static_assert((int)TRACKER_LEAD_COLD_MS == TRACKER_REST_S * 1000, "a client that was closed has to connect again");

enum {
    AHEAD_MOST = 20000,
    BEHIND_MS = 1000, /* what has been due for so long goes first */
    KEPT_MS = 5000    /* beyond its time */
};

struct tracker_pass {
    helper_job job;
    tracker_pass *next;
    tracker_part *part;
    const char *topic;
    int32_t partition;
    int timeout_ms;
    int64_t wanted_ms; /* since when */
    int64_t until_ms;  /* the broker's time by which all of it is due */
    int rc;
    kafka_error error;
    size_t n, at, bytes, most_bytes; /* at: those before it are known */
    int64_t *offsets;                /* AHEAD_MOST, while they are being collected */
    tracker_payload **payloads;      /* NULL: not found, or taken */
};

static void pass_free(tracker_pass *pass)
{
    for (size_t i = 0; pass->payloads && i < pass->n; i++) free(pass->payloads[i]);
    free(pass->payloads);
    free(pass->offsets);
    free(pass);
}

/* Where it is among the offsets of a pass; n: it is not. */
static size_t find(const tracker_pass *pass, int64_t offset)
{
    size_t lo = 0, hi = pass->n;
    while (lo < hi) {
        size_t middle = lo + (hi - lo) / 2;
        if (pass->offsets[middle] < offset)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo < pass->n && pass->offsets[lo] == offset ? lo : pass->n;
}

tracker_payload *tracker_ahead_take(tracker *t, tracker_part *part, int64_t offset)
{
    for (tracker_pass *pass = part->ahead.first; pass; pass = pass->next) {
        size_t i = find(pass, offset);
        if (i == pass->n) continue;
        tracker_payload *payload = pass->payloads[i];
        pass->payloads[i] = NULL;
        if (!payload) return NULL;
        t->ahead_bytes -= payload->bytes;
        pass->bytes -= payload->bytes;
        return payload;
    }
    return NULL;
}

static void drop_first(tracker *t, tracker_part *part)
{
    tracker_pass *pass = part->ahead.first;
    part->ahead.first = pass->next;
    if (!part->ahead.first) part->ahead.last = NULL;
    t->ahead_bytes -= pass->bytes;
    pass_free(pass);
}

void tracker_ahead_drop(tracker *t, tracker_part *part)
{
    while (part->ahead.first) drop_first(t, part);
}

/* ------------------------------------------------------------------ a pass */

static void each(void *ctx, int64_t offset, const kafka_record *record)
{
    tracker_pass *pass = ctx;
    while (pass->at < pass->n && pass->offsets[pass->at] < offset) pass->at++;
    if (pass->at == pass->n || pass->offsets[pass->at] != offset) return;
    size_t i = pass->at++;
    if (!record || pass->bytes >= pass->most_bytes) return;
    pass->payloads[i] = tracker_payload_new(record);
    if (pass->payloads[i]) pass->bytes += pass->payloads[i]->bytes;
}

static void run(helper_job *job, void *thread)
{
    tracker_pass *pass = (tracker_pass *)(void *)job;
    kafka_reader *reader = KMQ_FAILPOINT("ahead") ? NULL : tracker_reader(thread, &pass->error);
    pass->rc = reader ? kafka_reader_read(reader, pass->topic, pass->partition, pass->offsets, pass->n,
                                          pass->timeout_ms, each, pass, &pass->error)
                      : KAFKA_EKAFKA;
}

static void done(helper_job *job, void *owner)
{
    tracker_pass *pass = (tracker_pass *)(void *)job;
    tracker *t = owner;
    tracker_part *part = pass->part;
    int64_t ahead_ms = pass->until_ms - tracker_clock_estimate(&part->clock, t->now_ms);
    if (pass->n == AHEAD_MOST) ahead_ms = 0; /* there was more, who knows how soon it is due */
    tracker_lead_done(&part->ahead.lead, t->now_ms, t->now_ms - pass->wanted_ms, ahead_ms, pass->rc != KAFKA_OK);
    part->ahead.wanted_ms = 0;
    t->reading_ahead = false;
    /* What was found counts, the rest is the next one's. Why it failed is said when what is due is read. */
    if (pass->rc != KAFKA_OK) pass->n = pass->at;
    if (part->gone) {
        pass_free(pass);
    } else {
        if (part->ahead.last)
            part->ahead.last->next = pass;
        else
            part->ahead.first = pass;
        part->ahead.last = pass;
        t->ahead_bytes += pass->bytes;
    }
    tracker_part_put(part);
}

typedef struct collecting {
    const tracker_part *part;
    tracker_pass *pass;
} collecting;

static bool collect(void *ctx, int64_t offset)
{
    collecting *c = ctx;
    for (const tracker_pass *pass = c->part->ahead.first; pass; pass = pass->next)
        if (find(pass, offset) < pass->n) return true;
    c->pass->offsets[c->pass->n++] = offset;
    return c->pass->n < AHEAD_MOST;
}

/* Something comes soon, and nothing waits that is long due. */
static bool comes(const tracker *t, const tracker_part *part, int64_t log_ms)
{
    int64_t due_ms = kmq_lease_book_next_due(&part->book);
    return due_ms > log_ms - BEHIND_MS && due_ms <= log_ms + tracker_lead_span(&part->ahead.lead, t->now_ms);
}

/* What was in it is copied, or has been due for so long that it is held up: by the rate, or by a topic that is missing. */
static bool over(const tracker_pass *pass, int64_t log_ms)
{
    return pass->until_ms + (pass->bytes ? KEPT_MS : 0) < log_ms;
}

void tracker_ahead_step(tracker *t, tracker_part *part)
{
    if (part->gone || part->state != PART_READY || t->mode != MODE_RUNNING) return;
    int64_t log_ms = tracker_clock_estimate(&part->clock, t->now_ms);
    while (part->ahead.first && over(part->ahead.first, log_ms)) drop_first(t, part);
    if (t->now_ms < part->ahead.lead.at_ms || t->ahead_bytes >= TRACKER_AHEAD_BYTES || !comes(t, part, log_ms)) {
        part->ahead.wanted_ms = 0;
        return;
    }
    if (part->ahead.wanted_ms == 0) part->ahead.wanted_ms = t->now_ms;
    if (t->reading_ahead) return;
    int64_t ahead_ms = tracker_lead_span(&part->ahead.lead, t->now_ms);
    tracker_pass *pass = tracker_alloc(sizeof *pass);
    pass->offsets = tracker_alloc(AHEAD_MOST * sizeof *pass->offsets);
    pass->wanted_ms = part->ahead.wanted_ms;
    pass->until_ms = log_ms + ahead_ms;
    kmq_lease_book_coming(&part->book, log_ms, pass->until_ms, collect, &(collecting){part, pass});
    if (pass->n == 0) {
        tracker_lead_none(&part->ahead.lead, t->now_ms);
        part->ahead.wanted_ms = 0;
        pass_free(pass);
        return;
    }
    pass->payloads = tracker_alloc(pass->n * sizeof(tracker_payload *));
    pass->part = part;
    pass->topic = part->queue->topic;
    pass->partition = part->partition;
    pass->timeout_ms = (int)ahead_ms; /* later it is of no use */
    pass->most_bytes = TRACKER_AHEAD_BYTES - t->ahead_bytes;
    pass->job.run = run;
    pass->job.done = done;
    tracker_part_keep(part);
    t->reading_ahead = true;
    helper_give(&t->aheads, &pass->job);
}

int64_t tracker_ahead_wait(const tracker *t, const tracker_part *part)
{
    int64_t log_ms = tracker_clock_estimate(&part->clock, t->now_ms);
    int64_t due_ms = kmq_lease_book_next_due(&part->book);
    /* a pass that ends has a wake-up of its own, so has what is due, and what it has read is taken then */
    if (due_ms == INT64_MAX || due_ms <= log_ms - BEHIND_MS || t->reading_ahead ||
        t->ahead_bytes >= TRACKER_AHEAD_BYTES)
        return INT64_MAX;
    int64_t wait_ms = due_ms - tracker_lead_span(&part->ahead.lead, t->now_ms) - log_ms,
            pause_ms = part->ahead.lead.at_ms - t->now_ms;
    if (pause_ms > wait_ms) wait_ms = pause_ms;
    return wait_ms > 0 ? wait_ms : 0;
}
