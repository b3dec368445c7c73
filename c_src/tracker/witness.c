/* witness - is a marker topic still the one that was read?
 *
 *      M   . . W . . . . . L | . .         W: the witness, a record that was read earlier: its offset, its timestamp
 *                            ^ position    L: the record read last
 *
 * A topic that was deleted, made anew under its name and has grown past our position goes on, to whoever reads it by offsets, as if nothing
 * had happened; what lies in it below the position would never be read. But where W was, it has another record. So W is read back:
 *
 *      there                --> all up to L, read before, was of this topic: L is the next W
 *      another one there    --> the topic is another one: the partition begins afresh (recover.c), and that is told
 *      none there (deleted) --> says nothing: L is the next W
 *
 * When something was read since the last look, after witness_ms, one partition at a time and PAUSE_MS between two; so a new topic is known
 * within some seconds. W goes along in the metadata of commits (reference.h) for those that begin at one which was made too late. Kafka
 * itself forgets the commits of a topic that it deletes.
 *
 * Costs: one fetch for each look; nothing while nothing is read. */
#include "tracker.h"

#include <stdlib.h>

enum { PAUSE_MS = 50 };

typedef struct look {
    int64_t timestamp_ms;
    tracker_seen seen;
} look;

static void look_each(void *ctx, int64_t offset, const kafka_record *record)
{
    look *at = ctx;
    (void)offset;
    if (!record)
        at->seen = WITNESS_GONE;
    else if (!record->error)
        at->seen = record->timestamp_ms == at->timestamp_ms ? WITNESS_SAME : WITNESS_OTHER;
}

tracker_seen tracker_witness_look(kafka_reader *reader, const char *markers, int32_t partition, tracker_witness witness,
                                  kafka_error *err)
{
    look at = {witness.timestamp_ms, WITNESS_UNKNOWN};
    int rc = kafka_reader_read(reader, markers, partition, &witness.offset, 1, TRACKER_READ_MS, look_each, &at, err);
    return rc == KAFKA_OK ? at.seen : WITNESS_UNKNOWN;
}

typedef struct witness_job {
    helper_job job;
    tracker_part *part;
    const char *markers;
    int32_t partition;
    tracker_witness witness, next;
    tracker_seen seen;
} witness_job;

static void witness_run(helper_job *job, void *thread)
{
    witness_job *witness = (witness_job *)(void *)job;
    kafka_error err;
    kafka_reader *reader = tracker_reader(thread, &err);
    witness->seen = reader ? tracker_witness_look(reader, witness->markers, witness->partition, witness->witness, &err)
                           : WITNESS_UNKNOWN; /* a marker topic that cannot be read is told by those who read it */
}

static void witness_done(helper_job *job, void *owner)
{
    witness_job *witness = (witness_job *)(void *)job;
    tracker *t = owner;
    tracker_part *part = witness->part;
    t->witnessing = false;
    t->witness_ms = t->now_ms + PAUSE_MS;
    part->witness_ms = t->now_ms + t->config.witness_ms;
    part->suspect_witness = witness->seen == WITNESS_UNKNOWN;
    if (witness->seen == WITNESS_SAME || witness->seen == WITNESS_GONE) part->witness = witness->next;
    if (witness->seen == WITNESS_OTHER && !part->gone && t->mode == MODE_RUNNING) tracker_part_lost(t, part, true);
    tracker_part_put(part);
    free(witness);
}

static bool wants(const tracker *t, const tracker_part *part)
{
    return !part->gone && part->state == PART_READY && t->mode == MODE_RUNNING && !t->witnessing &&
           part->last.offset >= 0 && part->last.offset != part->witness.offset;
}

int64_t tracker_witness_wait(const tracker *t, const tracker_part *part)
{
    int64_t at_ms = part->witness_ms > t->witness_ms ? part->witness_ms : t->witness_ms;
    return wants(t, part) ? at_ms - t->now_ms : INT64_MAX;
}

void tracker_witness_step(tracker *t, tracker_part *part)
{
    if (!wants(t, part)) return;
    if (t->now_ms < part->witness_ms || t->now_ms < t->witness_ms) return;
    witness_job *witness = tracker_alloc(sizeof *witness);
    witness->job.run = witness_run;
    witness->job.done = witness_done;
    witness->job.suspect = part->suspect_witness;
    witness->part = part;
    witness->markers = part->queue->markers;
    witness->partition = part->partition;
    witness->witness = part->witness;
    witness->next = part->last;
    t->witnessing = true;
    tracker_part_keep(part);
    helper_give(&t->loads, &witness->job);
}
