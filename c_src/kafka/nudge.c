/* nudge - keeps the fetcher of librdkafka before 2.2 from resting while there is room.
 *
 * When a partition's local queue has reached its limit, that fetcher looks again only when its thread wakes for some other
 * reason, or after a full second. What wakes it is any request to that broker. So a thread of ours sends a cheap one (ListOffsets) to the
 * leader of a partition of which half a queue's worth was taken. The local queues can then be small: what they hold is still in the
 * processor's cache when it is taken, and costs little memory. From 2.2 on fetch.queue.backoff.ms does it.
 *
 *   pop: half a queue taken ──ask──► pending (a ring, bounded) ──► thread ──► ListOffsets to the leader ──► the fetcher wakes, and looks
 *
 * Costs: at most one request each PAUSE_MS. Bounds: PENDING partitions; what finds no room is asked for again with the next pop.
 * Thread rule: ask() from the consumer's thread; stop() from any, once; it waits for a request under way, at most REQUEST_MS. */
#include "internal.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PENDING = 64, PAUSE_MS = 2, REQUEST_MS = 500 };

typedef struct place {
    char *topic;
    int32_t partition;
} place;

struct kafka_nudge {
    rd_kafka_t *rk;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t asked;
    bool stop;
    size_t n;
    place pending[PENDING];
};

static bool take(kafka_nudge *nudge, place *out)
{
    pthread_mutex_lock(&nudge->lock);
    while (nudge->n == 0 && !nudge->stop) pthread_cond_wait(&nudge->asked, &nudge->lock);
    bool go_on = !nudge->stop;
    if (go_on) {
        *out = nudge->pending[0];
        memmove(nudge->pending, nudge->pending + 1, --nudge->n * sizeof *nudge->pending);
    }
    pthread_mutex_unlock(&nudge->lock);
    return go_on;
}

static void *run(void *arg)
{
    kafka_nudge *nudge = arg;
    place at;
    while (take(nudge, &at)) {
        int64_t low, high;
        (void)rd_kafka_query_watermark_offsets(nudge->rk, at.topic, at.partition, &low, &high, REQUEST_MS);
        free(at.topic);
        nanosleep(&(struct timespec){0, PAUSE_MS * 1000000L}, NULL);
    }
    return NULL;
}

kafka_nudge *kafka_nudge_new(rd_kafka_t *rk)
{
    kafka_nudge *nudge = calloc(1, sizeof *nudge);
    sigset_t all, old;
    if (nudge == NULL) return NULL;
    nudge->rk = rk;
    pthread_mutex_init(&nudge->lock, NULL);
    pthread_cond_init(&nudge->asked, NULL);
    sigfillset(&all); /* the host's signals are not for this thread */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&nudge->thread, NULL, run, nudge);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc == 0) return nudge;
    pthread_cond_destroy(&nudge->asked);
    pthread_mutex_destroy(&nudge->lock);
    free(nudge);
    return NULL;
}

bool kafka_nudge_ask(kafka_nudge *nudge, const char *topic, int32_t partition)
{
    bool known = false;
    pthread_mutex_lock(&nudge->lock);
    for (size_t i = 0; i < nudge->n && !known; i++)
        known = nudge->pending[i].partition == partition && strcmp(nudge->pending[i].topic, topic) == 0;
    if (!known && nudge->n < PENDING) {
        char *copy = strdup(topic);
        if (copy != NULL) {
            nudge->pending[nudge->n++] = (place){copy, partition};
            pthread_cond_signal(&nudge->asked);
            known = true;
        }
    }
    pthread_mutex_unlock(&nudge->lock);
    return known;
}

void kafka_nudge_stop(kafka_nudge *nudge)
{
    if (nudge == NULL) return;
    pthread_mutex_lock(&nudge->lock);
    nudge->stop = true;
    pthread_cond_signal(&nudge->asked);
    pthread_mutex_unlock(&nudge->lock);
    pthread_join(nudge->thread, NULL);
    for (size_t i = 0; i < nudge->n; i++) free(nudge->pending[i].topic);
    pthread_cond_destroy(&nudge->asked);
    pthread_mutex_destroy(&nudge->lock);
    free(nudge);
}
