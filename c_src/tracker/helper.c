/* helper - see helper.h. */
#include "helper.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef struct helper_thread {
    helper_pool *pool;
    void *keep;
    int index;
} helper_thread;

static void push(helper_list *list, helper_job *job)
{
    job->next = NULL;
    if (list->last)
        list->last->next = job;
    else
        list->first = job;
    list->last = job;
}

static bool may(const helper_pool *pool, const helper_job *job, int index)
{
    if (pool->n_threads == 1) return true;
    if (job->suspect) return index == 0;
    return index == 1 + (int)(job->affinity % (unsigned)(pool->n_threads - 1));
}

/* The first job that is for thread `index`. */
static helper_job *pick(helper_pool *pool, int index)
{
    helper_job **from = &pool->todo.first;
    helper_job *before = NULL;
    while (*from && !may(pool, *from, index)) {
        before = *from;
        from = &(*from)->next;
    }
    helper_job *job = *from;
    if (!job) return NULL;
    *from = job->next;
    if (pool->todo.last == job) pool->todo.last = before;
    return job;
}

/* The next job; NULL: none for `seconds` (0: however long it takes). The time of day serves: when it jumps, a rest comes sooner or later. */
static helper_job *await_job(helper_pool *pool, int index, int seconds)
{
    struct timespec until;
    helper_job *job;
    int rc = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&pool->lock);
    while (!(job = pick(pool, index)) && rc != ETIMEDOUT)
        rc = seconds ? pthread_cond_timedwait(&pool->more, &pool->lock, &until)
                     : pthread_cond_wait(&pool->more, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return job;
}

static void *work(void *argument)
{
    helper_thread *self = argument;
    helper_pool *pool = self->pool;
    for (;;) {
        helper_job *job = await_job(pool, self->index, pool->rest_s);
        if (!job) {
            pool->rest(self->keep);
            job = await_job(pool, self->index, 0);
        }
        job->run(job, self->keep);
        pthread_mutex_lock(&pool->lock);
        push(&pool->done, job);
        pthread_mutex_unlock(&pool->lock);
        /* a full pipe wakes as well as one byte more */
        if (write(pool->wake_fd, "x", 1) < 0) continue;
    }
    return NULL;
}

int helper_start(helper_pool *pool, int wake_fd, void *const *threads, int n, void (*rest)(void *thread), int rest_s)
{
    pool->todo = pool->done = (helper_list){NULL, NULL};
    pool->wake_fd = wake_fd;
    pool->n_threads = n;
    pool->rest = rest;
    pool->rest_s = rest ? rest_s : 0;
    if (pthread_mutex_init(&pool->lock, NULL) || pthread_cond_init(&pool->more, NULL)) return -1;
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old); /* signals are the loop's */
    int rc = 0;
    for (int i = 0; i < n && rc == 0; i++) {
        helper_thread *self = malloc(sizeof *self);
        if (!self) {
            rc = -1;
            break;
        }
        *self = (helper_thread){pool, threads[i], i};
        pthread_t id;
        rc = pthread_create(&id, NULL, work, self) == 0 && pthread_detach(id) == 0 ? 0 : -1;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

void helper_give(helper_pool *pool, helper_job *job)
{
    pthread_mutex_lock(&pool->lock);
    push(&pool->todo, job);
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
}

helper_job *helper_take(helper_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    helper_job *job = pool->done.first;
    if (job) {
        pool->done.first = job->next;
        if (!pool->done.first) pool->done.last = NULL;
    }
    pthread_mutex_unlock(&pool->lock);
    return job;
}
