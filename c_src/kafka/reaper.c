/* reaper - destroys clients. rd_kafka_destroy can take seconds and, by bugs of some versions, for ever: so each has a thread of its own,
 * detached, and nobody waits for it. kafka_live() tells what is left. */
#include "internal.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { LEAVE_MS = 1000 };

static atomic_int live; /* clients opened and not yet destroyed, in this process */

int kafka_live(void) { return atomic_load(&live); }

void kafka_live_add(int n) { atomic_fetch_add(&live, n); }

kafka_reaper *kafka_reaper_new(void) { return calloc(1, sizeof(kafka_reaper)); }

/* A client that turned fatal does not close, but it still unsubscribes. There is no word of its leaving, only of what must be given back
 * before; the request is on its way within milliseconds. */
static void leave(rd_kafka_t *rk, rd_kafka_queue_t *control)
{
    int64_t deadline_ms = kafka_now_ms() + LEAVE_MS;
    rd_kafka_unsubscribe(rk);
    while (kafka_left_ms(deadline_ms) > 0) {
        rd_kafka_event_t *rkev = rd_kafka_queue_poll(control, kafka_left_ms(deadline_ms));
        if (rkev != NULL && rd_kafka_event_type(rkev) == RD_KAFKA_EVENT_REBALANCE) rd_kafka_assign(rk, NULL);
        if (rkev != NULL) rd_kafka_event_destroy(rkev);
    }
    rd_kafka_queue_destroy(control);
}

static void *run(void *arg)
{
    kafka_reaper *reaper = arg;
    kafka_nudge_stop(reaper->nudge);
    kafka_times_del(reaper->times);
    if (reaper->control != NULL) leave(reaper->rk, reaper->control);
    kafka_queues_free(reaper->rk, reaper->closing, reaper->queues, reaper->n_queues);
    free(reaper->queues);
    rd_kafka_destroy_flags(reaper->rk, reaper->flags);
    kafka_links_del(reaper->links);
    kafka_live_add(-1);
    if (reaper->done != NULL) reaper->done(reaper->ctx);
    free(reaper);
    return NULL;
}

void kafka_reap(kafka_reaper *reaper, rd_kafka_t *rk, int flags, void (*done)(void *ctx), void *ctx)
{
    pthread_t thread;
    pthread_attr_t attr;
    sigset_t all, old;
    reaper->rk = rk;
    reaper->flags = flags;
    reaper->done = done;
    reaper->ctx = ctx;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all); /* the host's signals are not for this thread */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    if (pthread_create(&thread, &attr, run, reaper) != 0) {
        /* No thread to be had: the client stays, counted by kafka_live; better than a scheduler that may never come back. */
        free(reaper);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}
