/* times - where partitions have their first message of a time or later, asked without anybody waiting for it.
 *
 *      idle --ask--> asked (a thread, which waits for the brokers) --> answered, wake-up --take--> idle
 *
 * librdkafka has no such question whose answer is an event before 2.3. The thread lives as long as one question.
 * Invariants: (1) at most one thread, and asked while it is not joined; (2) the list is the thread's until `answered`; (3) no wake-up after close.
 * Costs: a thread and a request to each broker for each question.
 * Thread rule: ask, take and close by one thread at a time; del by any, once, after close. */
#include "internal.h"
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

struct kafka_times {
    pthread_mutex_t lock; /* wake, answered */
    const kafka_wake *wake;
    bool asked, answered;
    pthread_t thread;
    rd_kafka_t *rk;
    rd_kafka_topic_partition_list_t *list;
    int timeout_ms;
    rd_kafka_resp_err_t code;
};

kafka_times *kafka_times_new(const kafka_wake *wake)
{
    kafka_times *times = calloc(1, sizeof *times);
    if (times == NULL) return NULL;
    if (pthread_mutex_init(&times->lock, NULL) != 0) {
        free(times);
        return NULL;
    }
    times->wake = wake;
    return times;
}

static void *run(void *arg)
{
    kafka_times *times = arg;
    times->code = rd_kafka_offsets_for_times(times->rk, times->list, times->timeout_ms);
    pthread_mutex_lock(&times->lock);
    times->answered = true;
    if (times->wake != NULL) kafka_wake_ring(times->wake);
    pthread_mutex_unlock(&times->lock);
    return NULL;
}

/* Takes the list when it returns true. */
bool kafka_times_ask(kafka_times *times, rd_kafka_t *rk, rd_kafka_topic_partition_list_t *list, int timeout_ms)
{
    sigset_t all, old;
    if (times->asked) return false;
    times->rk = rk;
    times->list = list;
    times->timeout_ms = timeout_ms;
    sigfillset(&all); /* the host's signals are not for this thread */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    times->asked = pthread_create(&times->thread, NULL, run, times) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return times->asked;
}

static void over(kafka_times *times)
{
    pthread_join(times->thread, NULL);
    rd_kafka_topic_partition_list_destroy(times->list);
    times->asked = times->answered = false;
}

bool kafka_times_take(kafka_times *times, rd_kafka_t *rk, kafka_event *event)
{
    if (!times->asked) return false;
    pthread_mutex_lock(&times->lock);
    bool answered = times->answered;
    pthread_mutex_unlock(&times->lock);
    if (!answered) return false;
    bool made = kafka_event_times(rk, times->code, times->list, event);
    if (!made) kafka_event_times(rk, RD_KAFKA_RESP_ERR__CRIT_SYS_RESOURCE, NULL, event);
    over(times); /* it has nothing more to do */
    return true;
}

void kafka_times_close(kafka_times *times)
{
    pthread_mutex_lock(&times->lock);
    times->wake = NULL;
    pthread_mutex_unlock(&times->lock);
}

void kafka_times_del(kafka_times *times)
{
    if (times == NULL) return;
    if (times->asked) over(times);
    pthread_mutex_destroy(&times->lock);
    free(times);
}
