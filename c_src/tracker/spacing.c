/* spacing - see spacing.h. */
#include "spacing.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* As Kmq.Backoff has them. */
enum { LARGEST_FACTOR = 1000 };
static const int64_t LONGEST_MS = 366LL * 24 * 60 * 60 * 1000;

static bool take_ms(const char **at, int64_t *out)
{
    char *end;
    errno = 0;
    long long number = strtoll(*at, &end, 10);
    if (end == *at || errno || number < 0 || number > LONGEST_MS) return false;
    *at = end;
    *out = number;
    return true;
}

static bool take_real(const char **at, double *out)
{
    char *end;
    double number = strtod(*at, &end);
    if (end == *at || !isfinite(number) || number < 0) return false;
    *at = end;
    *out = number;
    return true;
}

static bool ended(const char *at)
{
    while (*at == ' ') at++;
    return *at == 0;
}

static bool take_list(const char *at, tracker_spacing *spacing)
{
    if (!take_real(&at, &spacing->backoff.jitter) || spacing->backoff.jitter > 1) return false;
    while (!ended(at)) {
        if (spacing->backoff.n_list == TRACKER_SPACING_LIST) return false;
        if (!take_ms(&at, &spacing->list_ms[spacing->backoff.n_list++])) return false;
    }
    return spacing->backoff.n_list > 0;
}

static bool sound(const kmq_backoff *backoff)
{
    return backoff->min_ms <= backoff->max_ms && backoff->jitter <= 1 &&
           (backoff->kind != KMQ_BACKOFF_EXPONENTIAL || (backoff->factor >= 1 && backoff->factor <= LARGEST_FACTOR));
}

bool tracker_spacing_parse(const char *text, tracker_spacing *out)
{
    tracker_spacing spacing = {.given = true};
    const char *at = strchr(text, ' ');
    size_t word = at ? (size_t)(at - text) : 0;
    bool ok = false;
    if (word == 4 && memcmp(text, "list", 4) == 0) {
        spacing.backoff.kind = KMQ_BACKOFF_LIST;
        ok = take_list(at, &spacing);
    } else if ((word == 11 && memcmp(text, "exponential", 11) == 0) || (word == 6 && memcmp(text, "linear", 6) == 0)) {
        spacing.backoff.kind = word == 6 ? KMQ_BACKOFF_LINEAR : KMQ_BACKOFF_EXPONENTIAL;
        ok = take_ms(&at, &spacing.backoff.min_ms) && take_ms(&at, &spacing.backoff.max_ms) &&
             take_real(&at, &spacing.backoff.factor) && take_real(&at, &spacing.backoff.jitter) && ended(at) &&
             sound(&spacing.backoff);
    }
    if (ok) *out = spacing;
    return ok;
}

/* Steele's splitmix: every bit of the message's place moves every bit of the number. */
static double chance(int32_t failures, int32_t partition, int64_t offset)
{
    uint64_t z = (uint64_t)offset * 0x9e3779b97f4a7c15u + ((uint64_t)(uint32_t)partition << 32 | (uint32_t)failures);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) / 9007199254740992.0;
}

int64_t tracker_spacing_ms(const tracker_spacing *spacing, int32_t failures, int32_t partition, int64_t offset)
{
    if (!spacing->given) return 0;
    kmq_backoff backoff = spacing->backoff;
    backoff.list_ms = spacing->list_ms; /* the struct may have been copied */
    return kmq_backoff_delay_ms(&backoff, failures, chance(failures, partition, offset));
}
