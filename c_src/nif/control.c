/* control - what a user says about assigned partitions: pause, resume, seek.
 *
 * librdkafka's own pause and resume are not used: a resume of what runs goes back to an old position. A paused partition is just not
 * read: librdkafka fills its queue and waits, what is fetched and STARTed stays here and is renewed, what is handed out can be settled, the
 * commit goes on. A pause is remembered by name and holds for the next assignment of the partition to this engine, too: a
 * rebalance must not undo it.
 *
 * A seek is a new beginning of the partition, with a slot of its own (see engine_reset). It is the one exception from "a commit never goes
 * back": the new slot knows of no commit, so its first one is the new position, whatever was committed.
 *
 * Thread rule: engine.lock is held. */
#include "resource.h"

#include <string.h>
#include "engine.h"
#include "term.h"

/* ------------------------------------------------------------------ pause, resume */
static size_t find_paused(const engine *e, const char *topic, int32_t partition)
{
    size_t i = 0;
    while (i < e->n_paused && (e->paused[i].partition != partition || strcmp(e->paused[i].topic, topic) != 0)) i++;
    return i;
}

bool engine_is_paused(const engine *e, const char *topic, int32_t partition)
{
    return find_paused(e, topic, partition) < e->n_paused;
}

void engine_paused_free(engine *e)
{
    for (size_t i = 0; i < e->n_paused; i++) enif_free(e->paused[i].topic);
    enif_free(e->paused);
}

static bool remember(engine *e, const part *p)
{
    if (engine_is_paused(e, p->topic->name, p->partition)) return true;
    size_t size = strlen(p->topic->name) + 1;
    paused_part *list = enif_realloc(e->paused, (e->n_paused + 1) * sizeof *list);
    if (!list) return false;
    e->paused = list;
    char *topic = enif_alloc(size);
    if (!topic) return false;
    memcpy(topic, p->topic->name, size);
    list[e->n_paused++] = (paused_part){topic, p->partition};
    return true;
}

static bool forget(engine *e, const char *topic, int32_t partition)
{
    size_t i = find_paused(e, topic, partition);
    if (i == e->n_paused) return false;
    enif_free(e->paused[i].topic);
    e->paused[i] = e->paused[--e->n_paused];
    return true;
}

static part *find_flowing(engine *e, const char *topic, int32_t partition)
{
    part *p = engine_find(e, topic, partition);
    return p && p->state == PART_ACTIVE ? p : NULL;
}

/* A resume of what is paused and assigned to nobody here just now is one, too. false: not assigned, or no memory. */
static bool control_one(engine *e, const char *topic, int32_t partition, bool pause)
{
    part *p = find_flowing(e, topic, partition);
    if (pause) {
        if (!p || !remember(e, p)) return false;
        p->paused = true;
        return true;
    }
    bool was = forget(e, topic, partition);
    if (p && p->paused) {
        p->paused = false;
        p->hot = true; /* what librdkafka holds of it has woken somebody long ago */
    }
    return was || p;
}

/* consumer_pause(Ref, Topic, Partition, Pause) -> ok | {error, not_assigned} */
KMQ_NIF(nif_consumer_pause)
{
    (void)argc;
    int partition;
    engine *e = consumer_engine(env, argv[0]);
    char *topic = term_string(env, argv[1]);
    if (!e || !topic || !enif_get_int(env, argv[2], &partition)) {
        enif_free(topic);
        return enif_make_badarg(env);
    }
    bool pause = enif_compare(argv[3], atoms.true_) == 0;
    enif_mutex_lock(e->lock);
    bool open = e->state == ENGINE_OPEN, done = open && control_one(e, topic, partition, pause);
    enif_mutex_unlock(e->lock);
    enif_free(topic);
    if (done && !pause) {
        engine_notify_owner(e, 0);
        engine_wake_borrower(e);
    }
    return done ? atoms.ok : term_error_atom(env, open ? atoms.not_assigned : atoms.closed);
}

/* ------------------------------------------------------------------ seek */
static int seek(engine *e, part *p, int64_t offset, kafka_error *err)
{
    if (engine_marks(e)) marks_skip(e, p, offset);
    int rc = engine_reset(e, p, offset, -1, err);
    e->commit_due = engine_now();
    engine_notify_owner(e, 0);
    return rc;
}

/* consumer_seek(Ref, Topic, Partition, Offset) -> {ok, Position} | {error, not_assigned}: it was at Position. */
KMQ_NIF(nif_consumer_seek)
{
    (void)argc;
    int partition;
    ErlNifSInt64 offset;
    engine *e = consumer_engine(env, argv[0]);
    char *topic = term_string(env, argv[1]);
    if (!e || !topic || !enif_get_int(env, argv[2], &partition) || !enif_get_int64(env, argv[3], &offset) ||
        offset < 0) {
        enif_free(topic);
        return enif_make_badarg(env);
    }
    kafka_error err = {0};
    ERL_NIF_TERM result;
    enif_mutex_lock(e->lock);
    part *p = e->state == ENGINE_OPEN ? find_flowing(e, topic, partition) : NULL;
    int64_t from = p ? p->position : 0;
    if (e->state != ENGINE_OPEN)
        result = term_error_atom(env, atoms.closed);
    else if (!p)
        result = term_error_atom(env, atoms.not_assigned);
    else if (seek(e, p, offset, &err))
        result = term_error(env, &err);
    else
        result = term_ok(env, enif_make_int64(env, from));
    enif_mutex_unlock(e->lock);
    enif_free(topic);
    return result;
}
