/* make bench-core: the core's data structures alone, one line a measure. Times are the best of several runs, since
 * whatever else the machine does can only add to them. ARGS="ledger" runs one part.
 *
 * Here: main, the offset set, the ledger. */
#include "bench_core.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ledger.h"
#include "offset_set.h"

enum { MILLION = 1000000, OPEN_MOST = 100000 /* max_in_flight */ };

static double seconds(void)
{
    struct timespec ts;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void line(const char *what, double best, double n, const char *per)
{
    (void)printf("%-58s %8.1f ns/%-8s %8.2f M/s\n", what, best * 1e9 / n, per, n / best / 1e6);
    (void)fflush(stdout);
}

static void size_line(const char *what, size_t bytes, double n)
{
    (void)printf("%-58s %8zu KiB        %8.3f B/offset\n", what, bytes / 1024, (double)bytes / n);
    (void)fflush(stdout);
}

static void must(int rc)
{
    if (rc != KMQ_OK) abort();
}

/* splitmix64; a run is the same each time */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0 .. n - 1 in random order */
static int64_t *shuffled(size_t n)
{
    uint64_t state = 1;
    int64_t *offsets = malloc(n * sizeof *offsets);
    if (offsets == NULL) abort();
    for (size_t i = 0; i < n; i++) offsets[i] = (int64_t)i;
    for (size_t i = n; i > 1; i--) {
        size_t k = next_random(&state) % i;
        int64_t swap = offsets[i - 1];
        offsets[i - 1] = offsets[k];
        offsets[k] = swap;
    }
    return offsets;
}

/* the best of at least three runs, and of as many as fit in half a second */
#define BEST_OF(best, setup, work, teardown)                                                                           \
    do {                                                                                                               \
        double sum_ = 0;                                                                                               \
        (best) = 1e9;                                                                                                  \
        for (int run_ = 0; run_ < 3 || sum_ < 0.5; run_++) {                                                           \
            setup;                                                                                                     \
            double t_ = seconds();                                                                                     \
            work;                                                                                                      \
            t_ = seconds() - t_;                                                                                       \
            sum_ += t_;                                                                                                \
            if (t_ < (best)) (best) = t_;                                                                              \
            teardown;                                                                                                  \
        }                                                                                                              \
    } while (0)

/* ---- offset set */

static kmq_offset_set set;

static void set_begin(void)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_offset_set_init(&set, &alloc);
}

static void add_in_order(int64_t n)
{
    for (int64_t o = 1; o <= n; o++) must(kmq_offset_set_add(&set, o, o + 1, NULL));
}

static void add_list(const int64_t *offsets, size_t n)
{
    for (size_t i = 0; i < n; i++) must(kmq_offset_set_add(&set, offsets[i], offsets[i] + 1, NULL));
}

static void remove_list(const int64_t *offsets, size_t n)
{
    for (size_t i = 0; i < n; i++) must(kmq_offset_set_remove(&set, offsets[i], offsets[i] + 1, NULL));
}

static size_t walk(void)
{
    size_t n = 0;
    kmq_range run = {0, 0};
    while (kmq_offset_set_next(&set, run.hi, &run)) n++;
    return n;
}

void bench_offset_set(void)
{
    enum { N = 10 * MILLION };
    int64_t *offsets = shuffled(N);
    size_t bytes = 0, ranges = 0;
    double best;
    BEST_OF(best, set_begin(), add_in_order(5 * N), (bytes = kmq_offset_set_bytes(&set), kmq_offset_set_free(&set)));
    line("offset set: 50 M added in order, offset 0 missing", best, 5e7, "offset");
    size_line("offset set: 50 M added in order, memory", bytes, 5e7);
    BEST_OF(best, set_begin(), add_list(offsets, N / 2),
            (bytes = kmq_offset_set_bytes(&set), kmq_offset_set_free(&set)));
    line("offset set: random half of 10 M added", best, N / 2, "offset");
    size_line("offset set: random half of 10 M, memory", bytes, N);
    BEST_OF(best, (set_begin(), add_list(offsets, N / 2)), ranges = walk(), kmq_offset_set_free(&set));
    line("offset set: walk over a random half of 10 M", best, (double)ranges, "range");
    BEST_OF(best, (set_begin(), add_in_order(N)), remove_list(offsets, N / 2), kmq_offset_set_free(&set));
    line("offset set: random half of 10 M removed", best, N / 2, "offset");
    free(offsets);
}

/* ---- ledger */

static kmq_ledger ledger;

static void ledger_begin(void)
{
    kmq_alloc alloc = kmq_alloc_libc();
    must(kmq_ledger_init(&ledger, &alloc, KMQ_DELIVERY_MARKERS, 0, 300000));
}

static void settle(const int64_t *offsets, size_t n)
{
    for (size_t i = 0; i < n; i++) must(kmq_ledger_settle(&ledger, offsets[i], KMQ_END_ACK));
}

static void settle_many(const int64_t *offsets, size_t n)
{
    int8_t results[1000];
    for (size_t i = 0; i < n; i += 1000) must(kmq_ledger_settle_many(&ledger, offsets + i, 1000, KMQ_END_ACK, results));
}

/* n messages in batches of 1,000, every `hole`-th offset missing (0: none): fetched, STARTed, handed out in tens when
 * `in_tens` */
static void open_up(int64_t n, int64_t hole, bool in_tens)
{
    int64_t batch[1000], offset = 0, now = 0;
    kmq_range ranges[600];
    size_t n_ranges;
    for (int64_t done = 0; done < n; done += 1000, now++) {
        for (size_t i = 0; i < 1000; offset++)
            if (hole == 0 || offset % hole != 0) batch[i++] = offset;
        must(kmq_ledger_fetch(&ledger, batch, 1000, NULL));
        must(kmq_ledger_take_start(&ledger, ranges, 600, 1000, &n_ranges));
        must(kmq_ledger_started(&ledger, ranges[0].lo, ranges[n_ranges - 1].hi));
        for (int i = 0; in_tens && i < 100; i++) must(kmq_ledger_hand_out(&ledger, 10, now));
        if (!in_tens) must(kmq_ledger_hand_out(&ledger, 1000, now));
    }
}

static size_t drain_ends(void)
{
    kmq_range ranges[1000];
    size_t total = 0, n;
    do {
        must(kmq_ledger_take_end(&ledger, KMQ_END_ACK, ranges, 1000, &n));
        total += n;
    } while (n > 0);
    return total;
}

static size_t walk_held(void)
{
    kmq_range ranges[1000];
    int64_t cursor = INT64_MIN;
    size_t total = 0, n;
    do {
        must(kmq_ledger_held(&ledger, &cursor, ranges, 1000, &n));
        total += n;
    } while (n > 0);
    return total;
}

static size_t time_out(void)
{
    kmq_range ranges[1000];
    size_t total = 0, n;
    do {
        must(kmq_ledger_take_timeouts(&ledger, 1000000, ranges, 1000, &n));
        total += n;
    } while (n > 0);
    return total;
}

/* the life of a message in a steady flow: 1,000 fetched, STARTed, handed out and settled while 100,000 are open */
static void flow(int64_t n, bool in_tens)
{
    static int64_t order[1000];
    int64_t batch[1000];
    int8_t results[1000];
    kmq_range ranges[1000];
    size_t n_ranges;
    int64_t *mix = shuffled(1000);
    memcpy(order, mix, sizeof order);
    free(mix);
    for (int64_t at = 0, now = 0; at < n; at += 1000, now++) {
        for (int64_t i = 0; i < 1000; i++) batch[i] = at + i;
        must(kmq_ledger_fetch(&ledger, batch, 1000, NULL));
        must(kmq_ledger_take_start(&ledger, ranges, 4, 1000, &n_ranges));
        must(kmq_ledger_started(&ledger, at, at + 1000));
        for (int i = 0; in_tens && i < 100; i++) must(kmq_ledger_hand_out(&ledger, 10, now));
        if (!in_tens) must(kmq_ledger_hand_out(&ledger, 1000, now));
        if (at < OPEN_MOST) continue;
        for (int64_t i = 0; i < 1000; i++) batch[i] = at - OPEN_MOST + order[i];
        must(kmq_ledger_settle_many(&ledger, batch, 1000, KMQ_END_ACK, results));
        must(kmq_ledger_take_end(&ledger, KMQ_END_ACK, ranges, 1000, &n_ranges));
    }
}

void bench_ledger(void)
{
    enum { N = 10 * MILLION };
    int64_t *many = shuffled(N), *few = shuffled(OPEN_MOST);
    size_t bytes = 0, ranges = 0;
    double best;
    BEST_OF(best, ledger_begin(), open_up(N, 0, false), kmq_ledger_free(&ledger));
    line("ledger: fetch, START, hand out in thousands", best, N, "message");
    BEST_OF(best, ledger_begin(), open_up(N, 0, true), (bytes = kmq_ledger_bytes(&ledger), kmq_ledger_free(&ledger)));
    line("ledger: the same, handed out in tens", best, N, "message");
    size_line("ledger: 10 M open, memory", bytes, N);
    BEST_OF(best, ledger_begin(), open_up(N, 10, false), kmq_ledger_free(&ledger));
    line("ledger: the same in thousands, every tenth offset missing", best, N, "message");
    BEST_OF(best, (ledger_begin(), open_up(N, 0, false)), settle(many, N), kmq_ledger_free(&ledger));
    line("ledger: random acks of 10 M open", best, N, "ack");
    BEST_OF(best, (ledger_begin(), open_up(OPEN_MOST, 0, false)), settle(few, OPEN_MOST), kmq_ledger_free(&ledger));
    line("ledger: random acks of 100,000 open", best, OPEN_MOST, "ack");
    BEST_OF(best, (ledger_begin(), open_up(OPEN_MOST, 0, false)), settle_many(few, OPEN_MOST),
            kmq_ledger_free(&ledger));
    line("ledger: random acks, 1,000 in a call", best, OPEN_MOST / 1000, "call");
    BEST_OF(best, (ledger_begin(), open_up(OPEN_MOST, 0, false), settle(few, OPEN_MOST / 2)), ranges = drain_ends(),
            kmq_ledger_free(&ledger));
    line("ledger: END ranges of a random half of 100,000", best, (double)ranges, "range");
    BEST_OF(best, (ledger_begin(), open_up(OPEN_MOST, 0, false), settle(few, OPEN_MOST / 2)), ranges = walk_held(),
            kmq_ledger_free(&ledger));
    line("ledger: ranges to renew, the other half", best, (double)ranges, "range");
    BEST_OF(best, (ledger_begin(), open_up(OPEN_MOST, 0, false), settle(few, OPEN_MOST / 2)), ranges = time_out(),
            kmq_ledger_free(&ledger));
    line("ledger: time-outs of the other half", best, (double)ranges, "range");
    BEST_OF(best, ledger_begin(), flow(N, false), (bytes = kmq_ledger_bytes(&ledger), kmq_ledger_free(&ledger)));
    line("ledger: a message's whole life, 100,000 open", best, N, "message");
    size_line("ledger: 100,000 open, memory", bytes, OPEN_MOST);
    BEST_OF(best, ledger_begin(), flow(N, true), kmq_ledger_free(&ledger));
    line("ledger: the same, handed out in tens", best, N, "message");
    free(many);
    free(few);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"offset_set", bench_offset_set}, {"ledger", bench_ledger}, {"lease_book", bench_lease_book}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        bool asked = argc < 2;
        for (int a = 1; a < argc; a++) asked = asked || strcmp(argv[a], parts[i].name) == 0;
        if (asked) parts[i].run();
    }
    return 0;
}
