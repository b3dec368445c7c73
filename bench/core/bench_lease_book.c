/* The lease book and the marker codec in figures: one line each. Called by bench_core.c. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench_core.h"
#include "lease_book.h"

enum { N = 10000000, BATCH = 1000, SLICE = 500, WINDOW_MAX = 100000 };

static kmq_marker_scope scope;
static kmq_lease_book book;
static int64_t marker_offset;

/* CPU time: other programs on the machine do not blur it */
static double seconds(void)
{
    struct timespec ts;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void line(const char *what, double s, double n)
{
    printf("%-58s %8.1f ns/message  %8.2f M/s\n", what, s * 1e9 / n, n / s / 1e6);
    (void)fflush(stdout);
}

static void apply(const kmq_marker *marker, int64_t ts_ms)
{
    if (kmq_lease_book_apply(&book, marker, marker_offset++, ts_ms) != KMQ_OK) abort();
}

static void one(kmq_marker_type type, int64_t offset, int64_t ms, int64_t ts_ms)
{
    kmq_marker marker = {.type = type, .set = {.single = offset}, .time_ms = ms};
    apply(&marker, ts_ms);
}

/* from bytes to the book: what the tracker does with a record */
static void record(kmq_marker_type type, const kmq_range *ranges, size_t n, int64_t ms, int64_t ts_ms)
{
    static uint8_t buf[KMQ_MARKER_MAX_BYTES];
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_marker marker;
    size_t used;
    int len = kmq_marker_encode(buf, sizeof buf, &scope, type, ranges, n, ms, 0, 0, NULL, &used);
    if (len < 0 || used != n) abort();
    kmq_marker_encode_key(key, 0, -1);
    if (kmq_marker_decode(&scope, 0, key, sizeof key, buf, (size_t)len, NULL, 0, &marker) != KMQ_MARKER_OURS) abort();
    apply(&marker, ts_ms);
}

static void begin(void)
{
    kmq_alloc alloc = kmq_alloc_libc();
    (void)kmq_lease_book_init(&book, &alloc);
    marker_offset = 0;
}

/* START of 1,000, then END of the same, 100 batches behind; as runs or every other one at a time (bitmaps). */
static void ranges(bool halves)
{
    static kmq_range odd[BATCH / 2], even[BATCH / 2];
    begin();
    double t = seconds();
    for (int64_t i = 0; i < N / BATCH; i++) {
        record(KMQ_MARKER_START, &(kmq_range){i * BATCH, (i + 1) * BATCH}, 1, 30000, i);
        int64_t base = (i - 100) * BATCH;
        if (base < 0) continue;
        if (!halves) {
            record(KMQ_MARKER_END, &(kmq_range){base, base + BATCH}, 1, 0, i);
            continue;
        }
        for (int64_t j = 0; j < BATCH / 2; j++) {
            odd[j] = (kmq_range){base + 2 * j + 1, base + 2 * j + 2};
            even[j] = (kmq_range){base + 2 * j, base + 2 * j + 1};
        }
        record(KMQ_MARKER_END, odd, BATCH / 2, 0, i);
        record(KMQ_MARKER_END, even, BATCH / 2, 0, i);
    }
    line(halves ? "range markers: START + 2 END of every other offset" : "range markers: START + END", seconds() - t,
         N);
    kmq_lease_book_free(&book);
}

/* START in order, END in random order within a window of open messages. */
static void singles(int64_t n_window, const char *what)
{
    static int64_t window[WINDOW_MAX];
    uint64_t seed = 1;
    begin();
    double t = seconds();
    for (int64_t i = 0; i < N; i++) {
        one(KMQ_MARKER_START, i, 30000, i / 100);
        if (i < n_window) {
            window[i] = i;
            continue;
        }
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        int64_t *slot = &window[(seed >> 33) % (uint64_t)n_window];
        one(KMQ_MARKER_END, *slot, 0, i / 100);
        *slot = i;
    }
    line(what, seconds() - t, N);
    kmq_lease_book_free(&book);
}

static void expiry(const char *what, int64_t due)
{
    static kmq_due out[SLICE];
    size_t n;
    int64_t taken = 0;
    double t = seconds(), slowest = 0;
    do {
        double from = seconds();
        n = kmq_lease_book_take_due(&book, due, INT64_MAX, out, SLICE);
        double slice = seconds() - from;
        if (slice > slowest) slowest = slice;
        taken += (int64_t)n;
    } while (n > 0);
    t = seconds() - t;
    printf("%-58s %8.1f ms for %" PRId64 ", slowest slice of %d %.2f ms\n", what, t * 1e3, taken, SLICE, slowest * 1e3);
    (void)fflush(stdout);
}

static void memory(const char *what)
{
    int64_t open = kmq_lease_book_open(&book);
    printf("%-58s %8.2f B/message   %8.1f MB\n", what, (double)kmq_lease_book_bytes(&book) / (double)open,
           (double)kmq_lease_book_bytes(&book) / 1e6);
    (void)fflush(stdout);
}

static void open_ranges(void)
{
    begin();
    for (int64_t i = 0; i < N / BATCH; i++)
        record(KMQ_MARKER_START, &(kmq_range){i * BATCH, (i + 1) * BATCH}, 1, 30000, i);
    memory("10 M open in ranges of 1,000");
    expiry("10 M open in ranges, 1 M of them expire", 30000 + N / BATCH / 10 - 1);
    kmq_lease_book_free(&book);
    begin();
    uint64_t seed = 1;
    for (int64_t i = 0; i < N / BATCH; i++)
        record(KMQ_MARKER_START, &(kmq_range){i * BATCH, (i + 1) * BATCH}, 1, 30000, i);
    for (int64_t i = 0; i < N / 5; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        one(KMQ_MARKER_END, (int64_t)((seed >> 20) % N), 0, N / BATCH);
    }
    memory("the same, one in five acknowledged at random");
    kmq_lease_book_free(&book);
}

/* 10 M messages, each with a deadline of its own: in offset order, then in random order and 10 apart. */
static void open_singles(bool scattered)
{
    begin();
    double t = seconds();
    for (int64_t i = 0; i < N; i++) one(KMQ_MARKER_START, scattered ? i * 7919 % N * 10 : i, i * 48271 % N, 0);
    line(scattered ? "10 M singles opened in random order, 10 apart" : "10 M singles opened in order", seconds() - t,
         N);
    memory("    memory");
    expiry("    1 M of them expire", N / 10 - 1);
    kmq_lease_book_free(&book);
}

void bench_lease_book(void)
{
    kmq_marker_scope_init(&scope, "orders", 6, "workers", 7);
    ranges(false);
    ranges(true);
    singles(2000, "single markers: START + END, random, 2,000 open");
    singles(WINDOW_MAX, "single markers: START + END, random, 100,000 open");
    open_ranges();
    open_singles(false);
    open_singles(true);
}
