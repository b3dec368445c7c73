#include "isolate.h"

#include "engine.h"

typedef enum isolate_mode { NONE, WAITING, RUNNING, SETTLING } isolate_mode;

/* One for the whole VM: that is what a killer takes with it. */
static struct {
    ErlNifMutex *lock;
    _Atomic int mode; /* an isolate_mode, changed under the lock */
    engine *engines;
    int out; /* tickets */
    engine *who;
    isolate_ticket alone; /* of who */
    int64_t since;        /* of WAITING and SETTLING */
} state;

bool isolate_load(void)
{
    state.lock = enif_mutex_create((char *)(uintptr_t) "kmq:isolate");
    return state.lock != NULL;
}

bool isolate_busy(void) { return atomic_load(&state.mode) != NONE; }

/* ------------------------------------------------------------------ under the state's lock */
static void wake_all(void)
{
    for (engine *e = state.engines; e; e = e->isolate.next) {
        engine_wake_borrower(e);
        engine_notify_owner(e, 0);
    }
}

static void enter(isolate_mode mode, int64_t now)
{
    state.since = now;
    if (mode == NONE) state.who = NULL;
    for (engine *e = state.engines; e && mode == WAITING; e = e->isolate.next) e->isolate.quiet = false;
    atomic_store(&state.mode, (int)mode);
    if (mode == NONE || mode == WAITING) wake_all();
}

static bool all_quiet(void)
{
    for (const engine *e = state.engines; e; e = e->isolate.next)
        if (!e->isolate.quiet) return false;
    return true;
}

static bool is_alone(const engine *e, const part *p, int64_t offset)
{
    return state.who == e && state.alone.slot == p->slot && state.alone.offset == offset;
}

/* ------------------------------------------------------------------ what an engine holds */
static bool in_work(part *p, int64_t offset)
{
    enif_mutex_lock(p->lock);
    bool open = kmq_ledger_is_open(&p->ledger, offset);
    enif_mutex_unlock(p->lock);
    return open;
}

/* In work, or about to be. */
static bool holds(engine *e, const isolate_ticket *t, int64_t now)
{
    part *p = t->slot < e->n_slots ? e->slots[t->slot] : NULL;
    if (!p) return false;
    if (in_work(p, t->offset)) return true;
    int64_t patience = p->gated && p->gate_offset > t->offset ? ISOLATE_GATE_MS : ISOLATE_STALE_MS;
    return p->state == PART_ACTIVE && !e->draining && p->store.count && store_first(&p->store) == t->offset &&
           now - t->asked_at < patience;
}

/* Every END and RETRY is acknowledged. What is being settled is in its ledger before it counts as pending: that is asked, too. */
static bool is_settled(engine *e)
{
    bool settled = marks_settled(e);
    for (int32_t i = e->first_slot; i < e->n_slots && settled; i++) {
        part *p = e->slots[i];
        if (!p) continue;
        enif_mutex_lock(p->lock);
        settled = !p->retries && !kmq_ledger_ends(&p->ledger);
        enif_mutex_unlock(p->lock);
    }
    return settled;
}

static bool is_quiet(engine *e)
{
    for (int32_t i = e->first_slot; i < e->n_slots; i++) {
        part *p = e->slots[i];
        if (!p) continue;
        int64_t covered = p->gate_offset > p->sent ? p->gate_offset : p->sent;
        enif_mutex_lock(p->lock);
        bool busy =
            kmq_ledger_open(&p->ledger) > 0 || (p->state == PART_ACTIVE && covered > kmq_ledger_floor(&p->ledger));
        enif_mutex_unlock(p->lock);
        if (busy) return false;
    }
    return is_settled(e);
}

static int drop_tickets(engine *e, int64_t now)
{
    isolate_member *m = &e->isolate;
    int kept = 0, had = m->n_tickets;
    for (int i = 0; i < had; i++)
        if (holds(e, &m->tickets[i], now)) m->tickets[kept++] = m->tickets[i];
    m->n_tickets = kept;
    return had - kept;
}

static isolate_ticket *find_ticket(isolate_member *m, const part *p, int64_t offset)
{
    for (int i = 0; i < m->n_tickets; i++)
        if (m->tickets[i].slot == p->slot && m->tickets[i].offset == offset) return &m->tickets[i];
    return NULL;
}

/* ------------------------------------------------------------------ engines */
void isolate_join(engine *e)
{
    enif_mutex_lock(state.lock);
    e->isolate.next = state.engines;
    e->isolate.joined = true;
    state.engines = e;
    enif_mutex_unlock(state.lock);
}

void isolate_leave(engine *e)
{
    if (!e->isolate.joined) return;
    enif_mutex_lock(state.lock);
    engine **at = &state.engines;
    while (*at != e) at = &(*at)->isolate.next;
    *at = e->isolate.next;
    state.out -= e->isolate.n_tickets;
    e->isolate.joined = false;
    e->isolate.n_tickets = 0;
    if (state.who == e)
        enter(NONE, 0);
    else
        wake_all(); /* it may have been the last that was not quiet, or had the tickets */
    enif_mutex_unlock(state.lock);
}

/* The state's next step, as far as this engine can tell. */
static void step(engine *e, bool held, bool quiet, bool from_poll, int64_t now)
{
    isolate_mode mode = (isolate_mode)atomic_load(&state.mode);
    bool mine = state.who == e;
    if (mode == WAITING) {
        e->isolate.quiet = quiet;
        if (mine && !held)
            enter(NONE, now);
        else if (mine ? from_poll : all_quiet() || now - state.since >= state.who->config.drain_ms)
            engine_wake_borrower(state.who); /* its next hand-out begins it, and shows that it is still asked for */
    } else if (mode == RUNNING && mine && !held) {
        enter(quiet ? NONE : SETTLING, now);
    } else if (mode == SETTLING && mine && (quiet || now - state.since >= e->config.drain_ms)) {
        enter(NONE, now);
    }
}

void isolate_turn(engine *e, bool from_poll, int64_t now)
{
    isolate_member *m = &e->isolate;
    int freed = m->n_tickets ? drop_tickets(e, now) : 0;
    if (!freed && !isolate_busy()) return;
    enif_mutex_lock(state.lock);
    isolate_ticket alone = state.alone;
    bool mine = state.who == e; /* only this engine changes that, under its lock, which the caller holds */
    isolate_mode mode = (isolate_mode)atomic_load(&state.mode);
    enif_mutex_unlock(state.lock);
    bool held = mine && holds(e, &alone, now);
    bool quiet = mode == WAITING ? is_quiet(e) : mine && is_settled(e);
    enif_mutex_lock(state.lock);
    if (freed) {
        bool were_all = state.out == ISOLATE_MOST;
        state.out -= freed;
        if (were_all && !isolate_busy()) wake_all();
    }
    /* Another state than the one it was looked at for: the next turn has it. */
    if (atomic_load(&state.mode) == (int)mode) step(e, held, quiet, from_poll, now);
    enif_mutex_unlock(state.lock);
}

int64_t isolate_due(engine *e, int64_t now)
{
    if (!isolate_busy()) return e->isolate.n_tickets ? now + ISOLATE_STALE_MS : INT64_MAX;
    enif_mutex_lock(state.lock);
    bool mine = state.who == e, running = atomic_load(&state.mode) == RUNNING;
    enif_mutex_unlock(state.lock);
    if (running) return mine ? now + ISOLATE_STALE_MS : INT64_MAX;
    return now + ISOLATE_BUSY_MS;
}

/* ------------------------------------------------------------------ hand-out */
/* A suspect with attempts left. */
static bool may_go(engine *e, const part *p, int64_t offset, int64_t now)
{
    isolate_member *m = &e->isolate;
    isolate_mode mode = (isolate_mode)atomic_load(&state.mode);
    isolate_ticket *t = find_ticket(m, p, offset);
    if (t) {
        t->asked_at = now;
        return mode == NONE || mode == WAITING; /* begun before */
    }
    if (mode != NONE || state.out == ISOLATE_MOST) return false;
    m->tickets[m->n_tickets++] = (isolate_ticket){p->slot, offset, now};
    state.out++;
    return true;
}

/* One on its last attempt. */
static bool may_go_alone(engine *e, const part *p, int64_t offset, bool quiet, int64_t now)
{
    isolate_mode mode = (isolate_mode)atomic_load(&state.mode);
    if (mode == NONE) {
        state.who = e;
        state.alone = (isolate_ticket){p->slot, offset, now};
        enter(WAITING, now);
        e->isolate.quiet = quiet;
        mode = WAITING;
    }
    if (!is_alone(e, p, offset) || mode == SETTLING) return false;
    state.alone.asked_at = now;
    if (mode == WAITING && (all_quiet() || now - state.since >= e->config.drain_ms)) {
        enter(RUNNING, now);
        mode = RUNNING;
    }
    return mode == RUNNING;
}

int64_t isolate_most(engine *e, part *p, int64_t most, int64_t now)
{
    if (!p->store.count || most <= 0) return most;
    if (!store_first_crashed(&p->store)) {
        enif_mutex_lock(state.lock);
        isolate_mode mode = (isolate_mode)atomic_load(&state.mode);
        enif_mutex_unlock(state.lock);
        /* A window whose commit is asked for is handed out: it would count as lost. */
        if (mode == NONE) return store_uncrashed(&p->store, most, INT64_MAX);
        return mode == WAITING ? store_uncrashed(&p->store, most, p->gate_offset) : 0;
    }
    enif_mutex_lock(p->lock);
    bool ready = kmq_ledger_ready(&p->ledger) > 0;
    enif_mutex_unlock(p->lock);
    if (!ready) return 0;
    bool last = store_first_attempt(&p->store) > e->config.max_redeliveries, quiet = last && is_quiet(e), may;
    enif_mutex_lock(state.lock);
    may = last ? may_go_alone(e, p, store_first(&p->store), quiet, now) : may_go(e, p, store_first(&p->store), now);
    enif_mutex_unlock(state.lock);
    return may;
}
