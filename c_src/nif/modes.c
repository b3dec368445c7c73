/* modes - the deliveries without markers.
 *
 *   :offsets         fetched -> handed out -> open ---ack, discard---> settled        floor = lowest of waiting, open, letters
 *                                              '-reject, expired-> letters ---written--> settled
 *
 *   :at_most_once    fetched -> asked --commit acknowledged--> covered -> handed out, done      floor = lowest waiting
 *
 *        done . . . | covered_n      | asked_n - covered_n | not asked for
 *                   ^ floor          ^ committed           ^ gate_offset          one commit on its way at a time
 *
 * A window is asked for when half of the one before is handed out: as much as is taken in two of a commit's round trips, what is asked
 * for at least, start_ahead at most; what is covered of partitions that stand comes beside it. That much is lost when the VM dies; an orderly end
 * commits the floor again, and loses nothing.
 *
 * letters: messages that go to the dead letter topic. The owner has their bytes and writes them; the floor (:offsets) and the end of the
 * engine wait for that. Thread rule: as engine.h says; what takes a part alone wants its lock held. */
#include "engine.h"

#include <string.h>
#include "atoms.h"
#include "term.h"
#include "../kafka/failpoint.h"

enum { UNDELAYED_MS = 60000 };

static bool ahead(const engine *e) { return e->config.delivery == KMQ_DELIVERY_AT_MOST_ONCE && !e->config.bare; }

/* ------------------------------------------------------------------ floor */
int64_t modes_floor(const part *p)
{
    kmq_range first;
    int64_t floor = kmq_ledger_floor(&p->ledger);
    if (p->ledger.delivery == KMQ_DELIVERY_OFFSETS && kmq_offset_set_next(&p->letters, 0, &first) && first.lo < floor)
        return first.lo;
    return floor;
}

int64_t modes_open(const part *p) { return kmq_ledger_open(&p->ledger) + kmq_offset_set_count(&p->letters); }

/* ------------------------------------------------------------------ windows of at most once */
int64_t modes_most(const engine *e, const part *p, int64_t most)
{
    if (e->n_letters >= MODES_LETTERS_MAX) return 0; /* the owner writes them first */
    return ahead(e) && p->covered_n < most ? p->covered_n : most;
}

void modes_handed(const engine *e, part *p, int64_t n)
{
    if (!ahead(e)) return;
    p->covered_n -= n;
    p->asked_n -= n;
}

void modes_committed(engine *e, part *p)
{
    if (!ahead(e) || p->asked_n == p->covered_n || p->committed < p->gate_offset) return;
    p->covered_n = p->asked_n;
    uint64_t handed = e->handed_total - e->gate_handed;
    e->handed_per_trip -= e->handed_per_trip / 8;
    if (e->handed_per_trip < handed) e->handed_per_trip = handed;
    engine_wake_borrower(e);
}

void modes_commit_over(engine *e)
{
    if (ahead(e)) engine_wake_borrower(e); /* the next window is asked for when somebody takes */
}

void modes_ask(engine *e, int64_t want, int64_t now)
{
    if (!ahead(e) || e->commit_in_flight) return;
    int64_t window = e->handed_per_trip < INT32_MAX ? (int64_t)(2 * e->handed_per_trip) : INT32_MAX, covered = 0;
    if (window < want) window = want;
    if (window > e->config.start_ahead) window = e->config.start_ahead;
    for (size_t i = 0; i < e->n_active; i++) {
        if (e->active[i]->asked_n > e->active[i]->covered_n) return; /* it failed, and is sent again */
        if (!part_stands(e->active[i]))
            covered += e->active[i]->covered_n; /* what stands leaves the window to the others */
    }
    if (2 * covered > window) return;
    e->gate_handed = e->handed_total;
    e->gate_cursor++; /* each has its turn to be the first */
    for (size_t i = 0; i < e->n_active && covered < window; i++) {
        part *p = e->active[(e->gate_cursor + i) % e->n_active];
        if (part_stands(p)) continue;
        enif_mutex_lock(p->lock);
        int64_t n = kmq_ledger_ready(&p->ledger) - p->covered_n;
        if (n > window - covered) n = window - covered;
        if (n > 0) {
            p->asked_n = p->covered_n + n;
            p->gate_offset = kmq_ledger_waiting_offset(&p->ledger, p->asked_n);
            covered += n;
            e->commit_due = now;
        }
        enif_mutex_unlock(p->lock);
        modes_committed(e, p); /* below what was committed before, in another life */
    }
}

/* ------------------------------------------------------------------ settling */
static void fill(int8_t *results, size_t n, int rc) { memset(results, rc, n); }

static int gone(part *p, int64_t offset)
{
    if (!kmq_offset_set_has(&p->letters, offset)) return KMQ_EUNKNOWN;
    (void)KMQ_FAILPOINT("reject_settle");
    return kmq_offset_set_remove(&p->letters, offset, offset + 1, NULL);
}

/* Of an assignment that is over: the message is the next owner's, or (at most once) done long ago. */
static int fenced(const engine *e, int slot)
{
    if (slot < 0 || slot >= e->n_slots) return KMQ_EUNKNOWN;
    return e->config.delivery == KMQ_DELIVERY_OFFSETS ? KMQ_ELATE : KMQ_OK;
}

bool modes_settle(engine *e, part *p, int slot, kmq_end_cause cause, const int64_t *offsets, size_t n, int8_t *results)
{
    if (!p) {
        fill(results, n, fenced(e, slot));
        return false;
    }
    enif_mutex_lock(p->lock);
    bool was_full = p->full;
    if (p->state == PART_RETIRED)
        fill(results, n, fenced(e, slot));
    else if (cause == KMQ_END_DEAD_LETTERED)
        for (size_t i = 0; i < n; i++) results[i] = (int8_t)gone(p, offsets[i]);
    else if (e->config.delivery == KMQ_DELIVERY_OFFSETS)
        (void)kmq_ledger_settle_many(&p->ledger, offsets, n, cause, results);
    else
        fill(results, n, KMQ_OK); /* done when it was handed out */
    p->full = false;
    enif_mutex_unlock(p->lock);
    return was_full;
}

int modes_leave(engine *e, part *p, int slot, int64_t offset)
{
    int rc;
    if (!p) return fenced(e, slot) == KMQ_EUNKNOWN ? KMQ_EUNKNOWN : KMQ_ELATE;
    if (p->state == PART_RETIRED) return KMQ_ELATE;
    if (kmq_offset_set_has(&p->letters, offset) || offset < 0 || offset >= kmq_ledger_waiting_offset(&p->ledger, 0))
        return KMQ_EUNKNOWN;
    rc = kmq_offset_set_add(&p->letters, offset, offset + 1, NULL);
    if (rc != KMQ_OK) return rc;
    if (e->config.delivery == KMQ_DELIVERY_OFFSETS) rc = kmq_ledger_settle(&p->ledger, offset, KMQ_END_DEAD_LETTERED);
    if (rc != KMQ_OK) (void)kmq_offset_set_remove(&p->letters, offset, offset + 1, NULL); /* an undo: cannot fail */
    if (rc == KMQ_OK) (void)KMQ_FAILPOINT("reject_write");
    return rc;
}

/* ------------------------------------------------------------------ what expired */
bool modes_expire(engine *e, part *p)
{
    int64_t offset = store_first(&p->store);
    int rc = KMQ_OK;
    enif_mutex_lock(p->lock);
    if (!e->config.expired_discard)
        rc = modes_leave(e, p, p->slot, offset);
    else if (e->config.delivery == KMQ_DELIVERY_OFFSETS)
        rc = kmq_ledger_settle(&p->ledger, offset, KMQ_END_EXPIRED);
    enif_mutex_unlock(p->lock);
    if (rc) return false;
    p->expired++;
    if (!atomic_exchange(&e->settled, true) || !e->n_letters) engine_notify_owner(e, 0);
    if (e->config.expired_discard) {
        store_drop(&p->store);
        return true;
    }
    ErlNifEnv *env = e->letters_env ? e->letters_env : (e->letters_env = enif_alloc_env());
    size_t bytes = 0;
    store_names names = {0};
    ERL_NIF_TERM record = store_take(&p->store, env, &names, &bytes);
    ERL_NIF_TERM letter = enif_make_tuple4(env, enif_make_int(env, p->slot), term_text(env, p->topic->name),
                                           enif_make_int(env, p->partition), record);
    if (!e->n_letters) e->letters = enif_make_list(env, 0);
    e->letters = enif_make_list_cell(env, letter, e->letters);
    e->n_letters++;
    return true;
}

/* ------------------------------------------------------------------ for the owner */
static void say_expired(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events)
{
    if (!e->n_letters) return;
    ERL_NIF_TERM list;
    enif_make_reverse_list(env, enif_make_copy(env, e->letters), &list);
    *events = enif_make_list_cell(env, enif_make_tuple2(env, atoms.expired, list), *events);
    enif_clear_env(e->letters_env);
    if (e->n_letters >= MODES_LETTERS_MAX) engine_wake_borrower(e);
    e->n_letters = 0;
}

/* There is no other delivery that a time limit could lead to: that one message holds the commit for so long is said, once. */
static void say_overdue(engine *e, part *p, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    enif_mutex_lock(p->lock);
    int64_t oldest = kmq_ledger_oldest_open(&p->ledger);
    enif_mutex_unlock(p->lock);
    if (oldest != p->oldest) {
        p->oldest = oldest;
        p->oldest_since = now;
    }
    if (oldest < 0 || !p->oldest_since || now - p->oldest_since < e->config.max_processing_ms) return;
    p->oldest_since = 0;
    ERL_NIF_TERM event[] = {atoms.overdue, term_text(env, p->topic->name), enif_make_int(env, p->partition),
                            enif_make_int64(env, oldest)};
    *events = enif_make_list_cell(env, enif_make_tuple_from_array(env, event, 4), *events);
}

void modes_say(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    say_expired(e, env, events);
    for (size_t i = 0; i < e->n_assigned; i++) say_overdue(e, e->active[i], env, events, now);
    if (e->undelayed && (!e->undelayed_at || now - e->undelayed_at >= UNDELAYED_MS)) {
        ERL_NIF_TERM n = enif_make_uint64(env, e->undelayed);
        *events = enif_make_list_cell(env, enif_make_tuple2(env, atoms.undelayed, n), *events);
        e->undelayed = 0;
        e->undelayed_at = now;
    }
    if (atomic_load(&e->settled) && e->commit_due == INT64_MAX) e->commit_due = now + e->config.commit_interval_ms;
}

int64_t modes_due(engine *e, int64_t now)
{
    int64_t due = e->undelayed ? e->undelayed_at + UNDELAYED_MS : INT64_MAX;
    for (size_t i = 0; i < e->n_assigned; i++) {
        const part *p = e->active[i];
        if (p->oldest < 0 || !p->oldest_since || e->config.max_processing_ms > INT64_MAX - now) continue;
        if (p->oldest_since + e->config.max_processing_ms < due) due = p->oldest_since + e->config.max_processing_ms;
    }
    return due;
}

bool modes_drained(engine *e, bool all)
{
    int64_t open = (int64_t)e->n_letters;
    for (size_t i = 0; i < e->n_assigned && !open && !e->config.bare; i++) {
        enif_mutex_lock(e->active[i]->lock);
        open = all ? modes_open(e->active[i]) : kmq_offset_set_count(&e->active[i]->letters);
        enif_mutex_unlock(e->active[i]->lock);
    }
    return !open;
}

/* What was settled before is durable when its commit is acknowledged, as far as the floor lets it; dead letters are written before. */
void modes_flush(engine *e, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now)
{
    if (e->flush_seq == UINT64_MAX) {
        if (!modes_drained(e, false)) return;
        e->flush_seq = 1;
        engine_flush_commit(e, now);
    }
    if (!engine_flush_committed(e)) return;
    e->flush_seq = 0;
    *events = enif_make_list_cell(env, atoms.flushed, *events);
}
