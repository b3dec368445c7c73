/* kmq_backoff - see backoff.h for the formulas and the bounds. */
#include "backoff.h"

/* The largest delay: a double just below 2^63, so that conversion back never overflows. */
#define LIMIT_MS 9223372036854774784.0

/* x where it lies in [lo, hi], else the nearer end; NaN is lo */
static double clamp(double x, double lo, double hi)
{
    if (!(x > lo)) return lo;
    return x < hi ? x : hi;
}

/* factor^n by squaring, infinite when it is beyond a double; factor >= 1 */
static double power(double factor, int64_t n)
{
    double result = 1;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1) result *= factor;
        if (result > LIMIT_MS) return LIMIT_MS; /* min_ms is at least 1 where this counts */
        factor *= factor;
    }
    return result;
}

static double grown_ms(const kmq_backoff *backoff, int64_t n)
{
    double min_ms = backoff->min_ms > 0 ? (double)backoff->min_ms : 0;
    double max_ms = clamp((double)backoff->max_ms, min_ms, LIMIT_MS);
    if (backoff->kind == KMQ_BACKOFF_LINEAR)
        return clamp(min_ms + clamp(backoff->factor, 0, LIMIT_MS) * (double)n, 0, max_ms);
    if (min_ms == 0) return 0; /* 0 x infinity */
    return clamp(min_ms * power(clamp(backoff->factor, 1, LIMIT_MS), n), 0, max_ms);
}

static double listed_ms(const kmq_backoff *backoff, int64_t n)
{
    if (backoff->n_list == 0) return 0;
    size_t i = (uint64_t)n < backoff->n_list ? (size_t)n : backoff->n_list - 1;
    double max_ms = backoff->max_ms > 0 ? (double)backoff->max_ms : LIMIT_MS;
    return clamp((double)backoff->list_ms[i], 0, max_ms);
}

int64_t kmq_backoff_delay_ms(const kmq_backoff *backoff, int64_t attempt, double u)
{
    int64_t n = attempt > 1 ? attempt - 1 : 0; /* tries before this one */
    double jitter = clamp(backoff->jitter, 0, 1);
    double ms = backoff->kind == KMQ_BACKOFF_LIST ? listed_ms(backoff, n) : grown_ms(backoff, n);
    return (int64_t)clamp(ms * (1 - jitter + 2 * jitter * clamp(u, 0, 1)), 0, LIMIT_MS);
}
