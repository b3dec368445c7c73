/* witness - is a queue topic still the one that was read?
 *
 *      Q   . . . . w w | . . . .         w: the witnesses, records read last: their offsets and times
 *                      ^ position
 *
 * A topic that was deleted, made anew under its name and has grown as far as our position goes on, to whoever reads it by offsets, as if nothing had
 * happened; what lies in it below the position would never be read. Two things tell them apart.
 *
 *   cheap   the first record later than a certain time. Once this time is chosen, that of a record that was read, the answer can only move on, or be
 *           none: new records come behind all others, and retention takes away. A topic made anew has its first records there.
 *   sure    the witnesses read back. A record's time never changes: another one in its place is another topic's. (Why the cheap one alone
 *           is not believed: clocks of publishers that differ; replicas that are compacted each for itself, one of which becomes the leader.)
 *
 *      no record yet --read--> chosen --look, each LOOK_MS--> good: all that was read before the look is of the topic; these are the next witnesses
 *                                ^                       '--> doubted: the owner reads back ({doubted, ..}, said again until it is answered)
 *                                '--- the same (witness_same): the answer is the new `least` ----'--> another: engine_reset
 *
 * One witness could be in a hole of the new topic (the end of a transaction); two that stand beside each other hardly.
 * A partition that is given back and comes again to the same consumer, where it had left it, has its witnesses still. What is not seen: a topic
 * whose publishers gave all its records older times than the record chosen bears; a change between two owners of the partition. Messages
 * without a time are no witnesses.
 *
 * Costs: one request to each leader for all partitions of it (kafka_consumer_times), busy or idle. Thread rule: engine.lock is held. */
#include "engine.h"

#include <string.h>
#include "atoms.h"
#include "term.h"

enum { LOOK_MS = 5000, ODD_MS = 3600000 };

void witness_init(witness *w)
{
    *w = (witness){.after_ms = -1};
    for (int i = 0; i < WITNESSES; i++) w->read[i].offset = w->asked[i].offset = w->known[i].offset = -1;
}

static void choose(witness *w)
{
    w->after_ms = w->read[0].ms;
    w->least = w->read[0].offset + 1;
}

void witness_read(part *p, const kafka_record *records, size_t n)
{
    witness_record seen[WITNESSES];
    size_t k = 0;
    for (size_t i = n; i-- > 0 && k < WITNESSES;) {
        const kafka_record *r = &records[i];
        if (r->error || r->offset >= p->position || r->timestamp_ms < 0) continue;
        seen[k++] = (witness_record){r->offset, r->timestamp_ms};
    }
    if (!k) return;
    memmove(p->witness.read + k, p->witness.read, (WITNESSES - k) * sizeof *seen);
    memcpy(p->witness.read, seen, k * sizeof *seen);
    if (p->witness.after_ms >= 0) return;
    choose(&p->witness); /* at once: what is read later may be another topic's already */
    memcpy(p->witness.known, p->witness.read, sizeof p->witness.known);
}

/* ------------------------------------------------------------------ looking */
/* Something to ask about it? What bears a time that is far ahead of what came after it would be the last for ever. */
static bool prepare(part *p)
{
    witness *w = &p->witness;
    if (p->broken || w->doubted || w->read[0].offset < 0) return false;
    bool odd = w->answer == KAFKA_OFFSET_END && w->read[0].ms < w->after_ms - ODD_MS;
    if (odd) choose(w);
    if (w->after_ms == INT64_MAX) return false;
    memcpy(w->asked, w->read, sizeof w->asked);
    w->asking = true;
    return true;
}

static void look(engine *e, int64_t now)
{
    size_t n = 0;
    e->look_due = now + LOOK_MS;
    kafka_partition *list = e->n_active ? enif_alloc(e->n_active * sizeof *list) : NULL;
    for (size_t i = 0; i < e->n_active && list; i++) {
        part *p = e->active[i];
        p->witness.asking = false;
        if (!prepare(p)) continue;
        list[n++] =
            (kafka_partition){.topic = p->topic->name, .partition = p->partition, .offset = p->witness.after_ms + 1};
    }
    e->looking = n && kafka_consumer_times(e->consumer, list, n, LOOK_MS) == KAFKA_OK;
    enif_free(list);
}

static void judge(witness *w, int64_t answer)
{
    w->answer = answer;
    w->doubted = answer >= 0 && answer < w->least;
    if (!w->doubted) memcpy(w->known, w->asked, sizeof w->known);
}

/* The partitions come in the order in which they were asked about, which most often still is that of the active ones. */
static part *find_from(const engine *e, size_t *at, const kafka_partition *kp)
{
    for (size_t i = 0; i < e->n_active; i++) {
        part *p = e->active[(*at + i) % e->n_active];
        if (p->partition != kp->partition || strcmp(p->topic->name, kp->topic) != 0) continue;
        *at += i + 1;
        return p;
    }
    return NULL;
}

/* What cannot be asked, or is answered by an error, is asked about with the next look. A slot that was made meanwhile has not asked. */
void witness_answer(engine *e, const kafka_event *event)
{
    size_t at = 0;
    e->looking = false;
    e->looks++;
    for (size_t i = 0; i < event->n_partitions && !event->error.code; i++) {
        const kafka_partition *kp = &event->partitions[i];
        part *p = find_from(e, &at, kp);
        if (p && p->witness.asking && !kp->error && !p->broken) judge(&p->witness, kp->offset);
        if (p) p->witness.asking = false;
    }
}

/* Nothing of it may be said twice: what stood below the answer is known to have stood there before. */
void witness_same(part *p)
{
    witness *w = &p->witness;
    w->doubted = false;
    w->least = w->answer;
    memcpy(w->known, w->asked, sizeof w->known);
}

/* ------------------------------------------------------------------ over rebalances */
static kept_witness *find_kept(const engine *e, const part *p)
{
    for (size_t i = 0; i < e->n_kept; i++)
        if (e->kept[i].topic == p->topic && e->kept[i].partition == p->partition) return &e->kept[i];
    return NULL;
}

void witness_keep(engine *e, const part *p)
{
    kept_witness *k = find_kept(e, p);
    if (p->witness.read[0].offset < 0 || p->broken || e->lost) return;
    if (!k) {
        kept_witness *list = enif_realloc(e->kept, (e->n_kept + 1) * sizeof *list);
        if (!list) return; /* a change just now is not noticed */
        e->kept = list;
        k = &list[e->n_kept++];
    }
    *k = (kept_witness){p->topic, p->partition, e->epoch, p->committed, p->witness};
}

/* With the next assignment after it was given back: nobody else has had it meanwhile, who would know better. What was read after the last good look
 * is not known to be of the topic of old. */
void witness_recall(engine *e, part *p)
{
    const kept_witness *k = find_kept(e, p);
    if (!k || k->committed != p->committed || e->epoch > k->epoch + 1) return;
    witness *w = &p->witness;
    *w = k->witness;
    memcpy(w->read, w->known, sizeof w->read);
    w->asking = w->doubted = false;
}

/* ------------------------------------------------------------------ for the owner */
static void say_doubted(const part *p, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (int i = WITNESSES; i-- > 0;) {
        const witness_record *r = &p->witness.known[i];
        ERL_NIF_TERM pair = enif_make_tuple2(env, enif_make_int64(env, r->offset), enif_make_int64(env, r->ms));
        if (r->offset >= 0) list = enif_make_list_cell(env, pair, list);
    }
    ERL_NIF_TERM event[] = {atoms.doubted,
                            enif_make_int(env, p->slot),
                            term_text(env, p->topic->name),
                            enif_make_int(env, p->partition),
                            enif_make_int64(env, p->position),
                            list};
    *events = enif_make_list_cell(env, enif_make_tuple_from_array(env, event, 6), *events);
}

void witness_on(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (e->state != ENGINE_OPEN || e->consumer_broken) return;
    if (!e->looking && now >= e->look_due) look(e, now);
    for (size_t i = 0; i < e->n_active; i++)
        if (e->active[i]->witness.doubted && !e->active[i]->broken) say_doubted(e->active[i], env, events);
}

int64_t witness_due(const engine *e)
{
    return e->looking || e->state != ENGINE_OPEN || e->consumer_broken ? INT64_MAX : e->look_due;
}
