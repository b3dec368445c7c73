/* helper - threads for what blocks: jobs go in, the same jobs come out done, a byte in a pipe says so.
 *
 *      loop --give--> todo ---> thread 0 (suspects) ----------------+
 *                        \----> thread 1 ... (by affinity) ---------+--> done --take--> loop
 *
 * A suspect is a job of which the last of its kind failed (a partition without a leader, say): it may block for its whole time
 * limit, and only where it holds up nobody but other suspects. The same affinity goes to the same thread, in order. A pool of one
 * thread does everything in order.
 * A thread that had no job for a while rests: what it keeps may be let go until the next one.
 * Ownership: a job belongs to the loop before give and after take, to one thread in between; threads see nothing but their jobs.
 * The threads end with the process: one that is blocked in Kafka cannot hold up the end.
 * Thread rule: give and take by the loop only. */
#ifndef TRACKER_HELPER_H
#define TRACKER_HELPER_H

#include <pthread.h>
#include <stdbool.h>

typedef struct helper_job helper_job;
struct helper_job {
    helper_job *next;
    void (*run)(helper_job *job, void *thread); /* thread: what the thread keeps between jobs */
    void (*done)(helper_job *job, void *owner); /* called by the loop after take */
    bool suspect;
    unsigned affinity;
};

typedef struct helper_list {
    helper_job *first, *last;
} helper_list;

typedef struct helper_pool {
    pthread_mutex_t lock;
    pthread_cond_t more;
    helper_list todo, done;
    int wake_fd;
    int n_threads;
    int rest_s;
    void (*rest)(void *thread);
} helper_pool;

/* Starts n threads; threads[i] is the keep of thread i and lives as long as the process. rest: called by a thread that had no job for rest_s
 * seconds, once before the next; NULL: there is nothing to let go. 0 or -1. */
int helper_start(helper_pool *pool, int wake_fd, void *const *threads, int n, void (*rest)(void *thread), int rest_s);
void helper_give(helper_pool *pool, helper_job *job);
/* A job that is done; NULL = none. */
helper_job *helper_take(helper_pool *pool);

#endif
