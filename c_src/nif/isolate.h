/* isolate - killers do not take innocents with them: who may be handed out beside whom, in the whole VM. Engines without markers count no
 * attempts and take no part.
 *
 * A suspect is a message whose last cause was a crash: it was in work when its VM died, so it may have been what killed it. At most
 * ISOLATE_MOST of them are out at once, over all engines. On its last attempt a suspect goes alone: if the VM dies again, it alone is
 * counted out.
 *
 *            a suspect on its last          all engines quiet,               it is not in            its END or RETRY
 *            attempt is first in line       or drain_timeout over            work any more           is acknowledged
 *     NONE ------------------------> WAITING --------------------> RUNNING ------------> SETTLING ------------------> NONE
 *      ^  everybody hands out           |   nobody begins anything   |  nobody hands out     |  (or drain_timeout over)
 *      '--------------------------------+----------------------------+-----------------------'
 *           it is not there any more, nobody asks for it (ISOLATE_STALE_MS), or its engine is closed
 *
 *   ticket   a suspect's leave to be out, of one engine: {slot, offset}. It is taken before the commit that covers it is asked for (the
 *            gate of a first window), because what is committed and lost with the VM counts as a crash, too; it ends when the
 *            message is neither in work nor, still being asked for, first in its partition's store.
 *   quiet    of an engine: nothing in work, nothing committed that is not handed out, every END and RETRY acknowledged. As nobody hands
 *            out anything while one waits (but what is committed already), who is quiet stays so, and says it once.
 *
 * Invariants: (1) the sum of all engines' tickets is `out` <= ISOLATE_MOST; (2) tickets are given in NONE alone; (3) in RUNNING and
 * SETTLING nothing is handed out but the one message; (4) who leaves a state wakes every engine, so nobody waits for a call that
 * does not come; while one waits, owners poll each ISOLATE_BUSY_MS, so that a report or a settling that wakes nobody is seen.
 *
 * Costs: nothing where no suspect is stored and none is alone: one atomic load a hand-out. Else O(tickets + slots) a call.
 * Thread rule: the caller holds its engine's lock. The state's own lock comes after it and before wake_lock; part.lock is never taken
 * with it. */
#ifndef KMQ_ISOLATE_H
#define KMQ_ISOLATE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ISOLATE_MOST = 8,
    ISOLATE_STALE_MS = 1000, /* who has leave to hand out and does not */
    ISOLATE_GATE_MS = 10000, /* the same, while the commit that covers it is not acknowledged */
    ISOLATE_BUSY_MS = 20
};

struct engine;
struct part;

typedef struct isolate_ticket {
    int32_t slot;
    int64_t offset, asked_at;
} isolate_ticket;

/* An engine's part of it. */
typedef struct isolate_member {
    struct engine *next; /* in the list of all engines */
    bool joined, quiet;  /* quiet: under the state's lock */
    int n_tickets;
    isolate_ticket tickets[ISOLATE_MOST];
} isolate_member;

bool isolate_load(void); /* once; false: no memory */
void isolate_join(struct engine *engine);
/* Closed or killed: gives back what it holds. Any number of times. */
void isolate_leave(struct engine *engine);
/* A suspect is alone, or wants to be. */
bool isolate_busy(void);
/* Looks at what this engine holds and moves the state on. Cheap when there is nothing; called before hand-outs and in the owner's poll. */
void isolate_turn(struct engine *engine, bool from_poll, int64_t now);
/* How many of the first `most` messages of the partition's store may be handed out (or covered by a gate) now. */
int64_t isolate_most(struct engine *engine, struct part *part, int64_t most, int64_t now);
/* When the owner polls at the latest for it; INT64_MAX: not for this. */
int64_t isolate_due(struct engine *engine, int64_t now);

#endif
