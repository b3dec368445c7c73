/* fence - ends transactions that a predecessor has left open, before a partition is served.
 *
 *      killed in mid transaction:   Q  ... c c c | . . . .     readers that are read_committed see nothing behind |
 *                                   M  ... e e | S . S .       and neither do we
 *      first open offset < end: init_transactions of the partition's id aborts it, or waits for the end of one that was committed
 *
 * Where nothing is open, nothing is done here: what a predecessor may still begin is fenced when our own producer is made (txn.c), before
 * the first decision. A transaction of somebody else's in Q looks the same; then init is only not needed.
 *
 * Bounds: WORKERS producers at a time, each for INIT_MS.  Thread rule: for one helper thread, which may block. */
#include "tracker.h"

#include <stdlib.h>
#include <string.h>

enum { WORKERS = 8, INIT_MS = 10000 };

typedef struct fencing {
    const tracker_config *config;
    tracker_token *token;
    const tracker_fenced **places;
    size_t n;
    atomic_size_t next;
    pthread_mutex_t lock;
    int rc;
    kafka_error *err;
} fencing;

static void *work(void *argument)
{
    fencing *f = argument;
    size_t i;
    while ((i = atomic_fetch_add(&f->next, 1)) < f->n) {
        kafka_error err;
        const tracker_fenced *place = f->places[i];
        kafka_txn *txn = tracker_txn_open(f->config, place->markers, place->partition, &err);
        uint32_t seen = 0;
        int rc = txn ? tracker_token_give_txn(f->token, &seen, txn, &err) : KAFKA_EDEAD;
        if (rc == KAFKA_OK) rc = kafka_txn_init(txn, INIT_MS, &err);
        if (txn) kafka_txn_destroy(txn);
        if (rc == KAFKA_OK) continue;
        pthread_mutex_lock(&f->lock);
        f->rc = KAFKA_EKAFKA;
        *f->err = err;
        pthread_mutex_unlock(&f->lock);
    }
    return NULL;
}

/* The end first, then the first open offset: what is written in between only makes the second one larger. */
static int looks_open(void *thread, const char *topic, int32_t partition, bool *open, kafka_error *err)
{
    int64_t low, end, stable;
    if (partition < 0) return KAFKA_OK;
    kafka_admin *all = tracker_end_admin(thread, false, err);
    kafka_admin *committed = all ? tracker_end_admin(thread, true, err) : NULL;
    if (!committed) return KAFKA_EKAFKA;
    int rc = kafka_admin_watermarks(all, topic, partition, TRACKER_ASK_MS, &low, &end, err);
    if (rc == KAFKA_OK) rc = kafka_admin_watermarks(committed, topic, partition, TRACKER_ASK_MS, &low, &stable, err);
    if (rc == KAFKA_OK) *open |= stable < end;
    return rc;
}

int tracker_fence(const tracker_config *config, tracker_token *token, void *thread, const tracker_fenced *places,
                  size_t n, kafka_error *err)
{
    fencing f = {.config = config, .token = token, .err = err};
    int rc = KAFKA_OK;
    pthread_t threads[WORKERS];
    size_t n_threads = 0;
    f.places = tracker_alloc(n * sizeof(tracker_fenced *));
    atomic_init(&f.next, 0);
    for (size_t i = 0; i < n && rc == KAFKA_OK; i++) {
        bool open = false;
        rc = looks_open(thread, places[i].markers, places[i].partition, &open, err);
        if (rc == KAFKA_OK) rc = looks_open(thread, places[i].copies, places[i].partition, &open, err);
        /* a dead letter topic that cannot be asked holds up nothing else */
        if (rc == KAFKA_OK) looks_open(thread, places[i].dead_letters, places[i].dead_partition, &open, err);
        if (open) f.places[f.n++] = &places[i];
    }
    if (rc == KAFKA_OK && f.n && pthread_mutex_init(&f.lock, NULL) == 0) {
        while (n_threads < WORKERS - 1 && n_threads + 1 < f.n &&
               pthread_create(&threads[n_threads], NULL, work, &f) == 0)
            n_threads++;
        work(&f);
        for (size_t i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
        pthread_mutex_destroy(&f.lock);
        rc = f.rc;
    }
    free(f.places);
    return rc;
}
