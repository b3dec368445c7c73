/* kmq_backoff - how long to wait before the next try.
 *
 *     exponential   delay(n) = min x factor^(n - 1)       3 s, factor 2, max 10 s:  3, 6, 10, 10, ...
 *     linear        delay(n) = min + factor x (n - 1)     factor is the step in ms
 *     list          delay(n) = list[n - 1], the last one for all that follow
 *
 * for the n-th try, n = 1, 2, ...; each at most max, then spread by jitter: x (1 - jitter + 2 x jitter x u).
 *
 * Bounds, for every input: (1) never negative, never NaN; (2) never above max x (1 + jitter), nor above INT64_MAX;
 * (3) without jitter, exponential and linear never fall as n grows.
 * Numbers out of range are brought into it: min and list entries below 0 are 0, max below min (or 0: none given) is no limit
 * for a list and min otherwise, a factor that is not finite or below what does not shrink (1; linear 0) is that, jitter is
 * 0 .. 1, u is 0 .. 1, an attempt below 1 is the first.
 *
 * Costs: O(1).  Thread rule: none, only the arguments are touched. The random number comes from the caller. */
#ifndef KMQ_BACKOFF_H
#define KMQ_BACKOFF_H
#include "kmq.h"

typedef enum kmq_backoff_kind { KMQ_BACKOFF_EXPONENTIAL, KMQ_BACKOFF_LINEAR, KMQ_BACKOFF_LIST } kmq_backoff_kind;

typedef struct kmq_backoff {
    kmq_backoff_kind kind;
    int64_t min_ms, max_ms;
    double factor; /* linear: ms */
    double jitter;
    const int64_t *list_ms; /* borrowed; an empty list is a delay of 0 */
    size_t n_list;
} kmq_backoff;

/* Delay before the attempt-th retry (attempt 1 = the first). u in [0, 1) is the caller's random number. */
int64_t kmq_backoff_delay_ms(const kmq_backoff *backoff, int64_t attempt, double u);
#endif
