/* prototypes; the implementation adds the formula and its bounds (style.md) */
#ifndef KMQ_BACKOFF_H
#define KMQ_BACKOFF_H
#include "kmq.h"
typedef enum kmq_backoff_kind { KMQ_BACKOFF_EXPONENTIAL, KMQ_BACKOFF_LINEAR, KMQ_BACKOFF_LIST } kmq_backoff_kind;
typedef struct kmq_backoff { kmq_backoff_kind kind; int64_t min_ms, max_ms; double factor; double jitter; const int64_t *list_ms; size_t n_list; } kmq_backoff;
/* Delay before the attempt-th retry (attempt 1 = the first). u in [0, 1) is the caller's random number: delay x (1 - jitter + 2 x jitter x u),
 * never negative, never above max x (1 + jitter). attempt 0 counts as 1. */
int64_t kmq_backoff_delay_ms(const kmq_backoff *backoff, int64_t attempt, double u);
#endif
