/* hurry - see hurry.h.
 *
 * The mock cluster waits 3 s for others when the first member joins a group, and a session timeout less a second when the
 * last one has left: most of what a test on the sandbox would take. The first can be set from librdkafka 2.6 on, the other
 * cannot. But it is a timer, set right behind a line in the debug log, by the same thread:
 *
 *      log_cb("... with 1 member(s) changing state Empty -> Joining: member join")     --> hurry_line()
 *      next = clock_gettime(CLOCK_MONOTONIC) + 3 s                                     --> ours, once, in the past
 *
 * A program that defines clock_gettime is what the loader (ELF) binds librdkafka's calls to. So such a line makes this
 * thread's next look at the clock be an earlier time, and no other. Where the line reads otherwise nothing happens, and the
 * group takes its 3 s. macOS binds otherwise: there the library is asked, by name, as it may be newer than its headers. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "hurry.h"

#include <dlfcn.h>
#include <string.h>
#include <time.h>

enum {
    FIRST_JOIN_MS = 3000, /* what the mock waits for */
    JOIN_MS = 200,        /* what is left of it: members that start together join together */
    ANY_MS = 3600 * 1000  /* more than any session timeout: the timer is due at once */
};

#ifndef __APPLE__

static _Thread_local long earlier_ms;

void hurry_line(const char *text)
{
    if (!strstr(text, "-> Joining: ")) return;
    if (strstr(text, " changing state Empty "))
        earlier_ms = FIRST_JOIN_MS - JOIN_MS;
    else if (strstr(text, " with 0 member(s) changing state "))
        earlier_ms = ANY_MS; /* nobody is left to wait for */
}

void hurry_cluster(rd_kafka_mock_cluster_t *cluster) { (void)cluster; }

/* NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): libc's are reserved */
__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *at)
{
    static int (*_Atomic libc)(clockid_t, struct timespec *);
    int (*original)(clockid_t, struct timespec *) = libc;
    if (!original) { /* whoever else looks it up finds the same */
        void *symbol = dlsym(RTLD_NEXT, "clock_gettime");
        memcpy(&original, &symbol, sizeof original); /* ISO C has no cast from data to function pointers */
        libc = original;
    }
    int rc = original(clock, at);
    if (rc == 0 && clock == CLOCK_MONOTONIC && earlier_ms) {
        at->tv_sec -= earlier_ms / 1000;
        at->tv_nsec -= earlier_ms % 1000 * 1000000;
        if (at->tv_nsec < 0) at->tv_sec--, at->tv_nsec += 1000000000;
        earlier_ms = 0;
    }
    return rc;
}

#else

void hurry_line(const char *text) { (void)text; }

void hurry_cluster(rd_kafka_mock_cluster_t *cluster)
{
    void *self = dlopen(NULL, RTLD_LAZY);
    void *symbol = self ? dlsym(self, "rd_kafka_mock_group_initial_rebalance_delay_ms") : NULL;
    void (*set)(rd_kafka_mock_cluster_t *, int32_t);
    if (!symbol) return;
    memcpy(&set, &symbol, sizeof set);
    set(cluster, JOIN_MS);
}

#endif
