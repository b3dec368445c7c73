/* failpoint - see failpoint.h. Reads KMQ_FAILPOINTS once; counts hits of each point. Not in a release build. */
#include "failpoint.h"

#ifdef KMQ_FAILPOINTS
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_POINTS = 32, MAX_NAME = 64 };
typedef enum action { ACTION_KILL, ACTION_STOP, ACTION_FAIL } action;

typedef struct point {
    char name[MAX_NAME];
    action action;
    long from;  /* the first hit that counts */
    long times; /* how many hits count from there; 0 = all */
    long hits;
} point;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static point points[MAX_POINTS];
static int n_points;

/* name=action[@from[*times]] */
static bool parse(const char *item, point *p)
{
    char word[MAX_NAME];
    memset(p, 0, sizeof *p);
    if (sscanf(item, "%63[^=]=%63[a-z]", p->name, word) != 2) return false;
    if (strcmp(word, "kill") == 0)
        p->action = ACTION_KILL;
    else if (strcmp(word, "stop") == 0)
        p->action = ACTION_STOP;
    else if (strcmp(word, "fail") == 0)
        p->action = ACTION_FAIL;
    else
        return false;
    p->from = 1;
    p->times = p->action == ACTION_FAIL ? 0 : 1;
    const char *at = strchr(item, '@');
    if (at != NULL) {
        char *end;
        p->from = strtol(at + 1, &end, 10);
        if (*end == '*') p->times = strtol(end + 1, NULL, 10);
    }
    return p->from >= 1 && p->times >= 0;
}

static void load(void)
{
    const char *spec = getenv("KMQ_FAILPOINTS");
    char *copy = spec == NULL ? NULL : strdup(spec), *rest = NULL;
    if (copy == NULL) return;
    for (char *item = strtok_r(copy, ",", &rest); item != NULL; item = strtok_r(NULL, ",", &rest)) {
        if (n_points == MAX_POINTS || !parse(item, &points[n_points])) {
            fprintf(stderr, "KMQ_FAILPOINTS: not understood: %s\n",
                    item); /* a test that silently tests nothing is worse */
            abort();
        }
        n_points++;
    }
    free(copy);
}

bool kmq_failpoint_hit(const char *name)
{
    bool counts = false;
    action todo = ACTION_FAIL;
    pthread_once(&once, load);
    if (n_points == 0) return false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_points; i++) {
        point *p = &points[i];
        if (strcmp(p->name, name) != 0) continue;
        p->hits++;
        if (p->hits >= p->from && (p->times == 0 || p->hits < p->from + p->times)) {
            counts = true;
            todo = p->action;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!counts) return false;
    switch (todo) {
    case ACTION_KILL: raise(SIGKILL); return false;
    case ACTION_STOP: raise(SIGSTOP); return false;
    case ACTION_FAIL: return true;
    }
    return false;
}
#else
typedef int kmq_failpoint_none; /* ISO C wants something in a file */
#endif
