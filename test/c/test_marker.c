/* The marker codec: the bytes that are frozen, what is refused, a guard page behind every buffer, and a fuzz loop.
 *
 *     KMQ_FUZZ=n    inputs of the fuzz loop (default a million) */
#include "kmq_test.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "marker.h"

/* make runs the tests in c_src */
#define KMQ_FORMAT_PAGE "../guides/format.md"

static kmq_marker_scope scope; /* queue topic "orders", group "workers" */

static size_t unhex(const char *hex, uint8_t *out, size_t cap)
{
    size_t n = 0;
    int high = -1;
    for (; *hex != '\0'; hex++) {
        const char *digits = "0123456789abcdef", *digit = strchr(digits, *hex);
        if (digit == NULL) continue; /* blanks */
        if (high < 0) {
            high = (int)(digit - digits);
        } else {
            assert_true(n < cap);
            out[n++] = (uint8_t)(high * 16 + (int)(digit - digits));
            high = -1;
        }
    }
    assert_int_equal(high, -1);
    return n;
}

/* ---- bytes that end at a page nobody may touch */

static uint8_t *guard_end;
static size_t guard_size;

static void guard_open(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    guard_size = (KMQ_MARKER_MAX_BYTES / page + 1) * page;
    uint8_t *map = mmap(NULL, guard_size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    assert_int_equal(mprotect(map + guard_size, page, PROT_NONE), 0);
    guard_end = map + guard_size;
}

static uint8_t *guarded(const void *bytes, size_t n)
{
    assert_true(n <= guard_size);
    return n > 0 ? memmove(guard_end - n, bytes, n) : guard_end;
}

static kmq_verdict decode_range(const uint8_t *value, size_t n, kmq_marker *out)
{
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    kmq_marker_encode_key(key, 7, -1);
    return kmq_marker_decode(&scope, 7, key, sizeof key, guarded(value, n), n, NULL, 0, out);
}

static kmq_verdict decode_hex(const char *hex, kmq_marker *out)
{
    static uint8_t value[4096];
    return decode_range(value, unhex(hex, value, sizeof value), out);
}

static size_t runs_of(const kmq_marker_set *set, kmq_range *runs, size_t max)
{
    kmq_marker_cursor cursor;
    size_t n = 0;
    kmq_marker_set_begin(set, &cursor);
    for (kmq_range run; kmq_marker_set_next(&cursor, &run); n++)
        if (n < max) runs[n] = run;
    return n;
}

/* ---- softwaremill/kmq's bytes */

static void test_kmq_vectors(void **state)
{
    (void)state;
    static const struct {
        int32_t partition;
        int64_t offset, after; /* -2: END */
        const char *key, *value;
    } vectors[] = {
        {0, 0, 0, "000000000000000000000000", "010000000000000000"},
        {0, 1, 1, "000000000000000000000001", "010000000000000001"},
        {1, 1000, 1000, "0000000100000000000003e8", "0100000000000003e8"},
        {7, 123456789, 90000, "0000000700000000075bcd15", "010000000000015f90"},
        {255, 256, 4000, "000000ff0000000000000100", "010000000000000fa0"},
        {65536, INT64_C(4294967296), INT64_C(4294967296), "000100000000000100000000", "010000000100000000"},
        {INT32_MAX, INT64_MAX, INT64_MAX, "7fffffff7fffffffffffffff", "017fffffffffffffff"},
        {7, 123456789, 86400000, "0000000700000000075bcd15", "010000000005265c00"},
        {0, 1, 10000, "000000000000000000000001", "010000000000002710"},
        {1, 1000, -2, "0000000100000000000003e8", "00"},
        {7, 123456789, -2, "0000000700000000075bcd15", "00"},
        {0, 0, -2, "000000000000000000000000", "00"},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint8_t key[12], value[9], want[12];
        kmq_marker marker;
        kmq_range run;
        kmq_marker_encode_key(key, vectors[i].partition, vectors[i].offset);
        assert_int_equal(unhex(vectors[i].key, want, 12), 12);
        assert_memory_equal(key, want, 12);
        bool end = vectors[i].after == -2;
        int n = end ? kmq_marker_encode_kmq_end(value) : kmq_marker_encode_kmq_start(value, vectors[i].after);
        assert_int_equal(unhex(vectors[i].value, want, 12), n);
        assert_memory_equal(value, want, (size_t)n);
        assert_int_equal(kmq_marker_decode(&scope, vectors[i].partition, key, 12, guarded(value, (size_t)n), (size_t)n,
                                           NULL, 0, &marker),
                         KMQ_MARKER_OURS);
        assert_int_equal(marker.type, end ? KMQ_MARKER_END : KMQ_MARKER_START);
        assert_int_equal(marker.time_ms, end ? 0 : vectors[i].after);
        size_t runs = runs_of(&marker.set, &run, 1);
        if (vectors[i].offset == INT64_MAX) { /* no half-open range has it, and no log */
            assert_int_equal(runs, 0);
            continue;
        }
        assert_int_equal(runs, 1);
        assert_int_equal(run.lo, vectors[i].offset);
        assert_int_equal(run.hi, vectors[i].offset + 1);
    }
    uint8_t value[9];
    assert_int_equal(kmq_marker_encode_kmq_start(value, -1), KMQ_EINVAL);
}

static void test_kmq_odd(void **state)
{
    (void)state;
    static const struct {
        const char *key, *value;
        int32_t partition;
        kmq_verdict verdict;
    } cases[] = {
        {"ffffffffffffffffffffffff", "01ffffffffffffffff", -1, KMQ_MARKER_MALFORMED}, /* V8 */
        {"00000000ffffffffffffffff", "00", 0, KMQ_MARKER_MALFORMED},                  /* V14: END of no message */
        {"000000000000000000000001", "01ffffffffffffffff", 0, KMQ_MARKER_MALFORMED},  /* negative time */
        {"000000000000000000000001", "0100000000000003e8aabb", 0, KMQ_MARKER_OURS},   /* behind nine bytes: free */
        {"000000000000000000000001", "0100000000000003", 0, KMQ_MARKER_MALFORMED},
        {"000000000000000000000001", "", 0, KMQ_MARKER_MALFORMED},
        {"000000000000000000000001", "02", 0, KMQ_MARKER_MALFORMED}, /* Java: END */
        {"000000000000000000000001", "0000", 0, KMQ_MARKER_MALFORMED},
        {"000000000000000000000001", "00", 1, KMQ_MARKER_MALFORMED}, /* another partition's */
        {"00000000000000000000000100", "00", 0, KMQ_MARKER_MALFORMED},
        {"0000000000000000000001", "00", 0, KMQ_MARKER_MALFORMED},
        {"00000000fffffffffffffffe", "00", 0, KMQ_MARKER_MALFORMED},
    };
    uint8_t key[16], value[16];
    kmq_marker marker;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t key_len = unhex(cases[i].key, key, sizeof key), len = unhex(cases[i].value, value, sizeof value);
        kmq_verdict verdict =
            kmq_marker_decode(&scope, cases[i].partition, key, key_len, guarded(value, len), len, NULL, 0, &marker);
        if (verdict != cases[i].verdict) fail_msg("%s %s: %d", cases[i].key, cases[i].value, (int)verdict);
    }
    unhex("000000000000000000000001", key, sizeof key);
    assert_int_equal(kmq_marker_decode(&scope, 0, key, 12, NULL, 0, NULL, 0, &marker), KMQ_MARKER_MALFORMED);
    assert_int_equal(kmq_marker_decode(&scope, 0, NULL, 0, value, 1, NULL, 0, &marker), KMQ_MARKER_MALFORMED);
}

static void test_kmq_headers(void **state)
{
    (void)state;
    uint8_t key[12], value[9];
    char text[600];
    kmq_marker marker;
    memset(text, 'x', sizeof text);
    text[511] = (char)0xc3; /* a character of two bytes across the limit */
    text[512] = (char)0xa9;
    static const struct {
        const char *group, *cause, *flags;
        kmq_verdict verdict;
        kmq_marker_type type;
        uint8_t retry_cause, retry_flags;
    } cases[] = {
        {"workers", NULL, NULL, KMQ_MARKER_OURS, KMQ_MARKER_START, 0, 0},
        {"others", NULL, NULL, KMQ_MARKER_FOREIGN, KMQ_MARKER_CLOCK, 0, 0},
        {"worker", NULL, NULL, KMQ_MARKER_FOREIGN, KMQ_MARKER_CLOCK, 0, 0},
        {NULL, "failed", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_FAILED, KMQ_FLAG_COUNTS},
        {NULL, "timeout", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_TIMEOUT, KMQ_FLAG_COUNTS},
        {NULL, "released", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_RELEASED, 0},
        {NULL, "snoozed", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_SNOOZED, 0},
        {NULL, "rejected", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_REJECTED, KMQ_FLAG_COUNTS | KMQ_FLAG_DLQ},
        {NULL, "failed", "2", KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_FAILED, KMQ_FLAG_DLQ},
        {NULL, "failed", "4", KMQ_MARKER_MALFORMED, KMQ_MARKER_CLOCK, 0, 0},
        {NULL, "failed", "", KMQ_MARKER_MALFORMED, KMQ_MARKER_CLOCK, 0, 0},
        {NULL, "extended", NULL, KMQ_MARKER_OURS, KMQ_MARKER_EXTEND, 0, 0},
        {NULL, "expired", NULL, KMQ_MARKER_OURS, KMQ_MARKER_RETRY, KMQ_RETRY_EXPIRED, KMQ_FLAG_DLQ},
        {NULL, "parked", NULL, KMQ_MARKER_MALFORMED, KMQ_MARKER_CLOCK, 0, 0}, /* until when? */
        {NULL, "crash", NULL, KMQ_MARKER_OURS, KMQ_MARKER_START, 0, 0},
        {NULL, "whatever", NULL, KMQ_MARKER_MALFORMED, KMQ_MARKER_CLOCK, 0, 0},
        {NULL, "", NULL, KMQ_MARKER_MALFORMED, KMQ_MARKER_CLOCK, 0, 0},
    };
    kmq_marker_encode_key(key, 7, 42);
    assert_int_equal(kmq_marker_encode_kmq_start(value, 500), 9);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kmq_header headers[5];
        size_t n = 0;
        if (cases[i].group != NULL) headers[n++] = (kmq_header){"kmq-group", 9, cases[i].group, strlen(cases[i].group)};
        if (cases[i].cause != NULL) headers[n++] = (kmq_header){"kmq-cause", 9, cases[i].cause, strlen(cases[i].cause)};
        if (cases[i].flags != NULL) headers[n++] = (kmq_header){"kmq-flags", 9, cases[i].flags, strlen(cases[i].flags)};
        headers[n++] = (kmq_header){"kmq-error", 9, text, sizeof text};
        headers[n++] = (kmq_header){"kmq-group", 9, "others", 6}; /* the first of a name counts */
        if (cases[i].group == NULL) n--;
        if (kmq_marker_decode(&scope, 7, key, 12, value, 9, headers, n, &marker) != cases[i].verdict)
            fail_msg("case %zu", i);
        if (cases[i].verdict != KMQ_MARKER_OURS) continue;
        assert_int_equal(marker.type, cases[i].type);
        assert_int_equal(marker.time_ms, 500);
        if (marker.type != KMQ_MARKER_RETRY) continue;
        assert_int_equal(marker.cause, cases[i].retry_cause);
        assert_int_equal(marker.flags, cases[i].retry_flags);
        assert_int_equal(marker.tlv.text_len, 511);
    }
    static const struct {
        const char *due;
        int64_t due_ms;
    } parks[] = {{"1767225600000", INT64_C(1767225600000)},
                 {"0", 0},
                 {"99999999999999999999", INT64_MAX},
                 {"", -1},
                 {"-1", -1},
                 {"1e3", -1}};
    for (size_t i = 0; i < sizeof parks / sizeof parks[0]; i++) {
        kmq_header headers[] = {{"kmq-cause", 9, "parked", 6}, {"kmq-due", 7, parks[i].due, strlen(parks[i].due)}};
        bool good = parks[i].due_ms >= 0;
        assert_int_equal(kmq_marker_decode(&scope, 7, key, 12, value, 9, headers, 2, &marker),
                         good ? KMQ_MARKER_OURS : KMQ_MARKER_MALFORMED);
        if (good) assert_true(marker.type == KMQ_MARKER_PARK && marker.time_ms == parks[i].due_ms);
    }
    kmq_header group = {"kmq-group", 9, "others", 6};
    (void)kmq_marker_encode_kmq_end(value);
    assert_int_equal(kmq_marker_decode(&scope, 7, key, 12, value, 1, &group, 1, &marker), KMQ_MARKER_FOREIGN);
    assert_int_equal(
        kmq_marker_decode(&scope, 7, key, 12, value, 1, &(kmq_header){"kmq-group", 9, NULL, 0}, 1, &marker),
        KMQ_MARKER_FOREIGN);
}

/* ---- the :range format's frozen bytes: the page for other people's peers is the list of vectors */

typedef struct vector {
    const char *name;
    kmq_marker_type type;
    kmq_range runs[8];
    size_t n;
    int64_t ms;
    uint8_t cause, flags;
    kmq_marker_tlv tlv;
} vector;

static const vector vectors[] = {
    {"START", KMQ_MARKER_START, {{1000, 1500}}, 1, 30000, 0, 0, {0}},
    {"START with holes, instance and node",
     KMQ_MARKER_START,
     {{1000, 1010}, {1015, 1016}},
     2,
     30000,
     0,
     0,
     {.node = "app@host", .node_len = 8, .has_instance = true, .instance = 0x0102030405060708}},
    {"END", KMQ_MARKER_END, {{1000, 1001}}, 1, 0, KMQ_END_ACK, 0, {0}},
    {"END as a bitmap",
     KMQ_MARKER_END,
     {{5000, 5001}, {5002, 5004}, {5005, 5006}, {5007, 5009}, {5011, 5012}, {5013, 5014}, {5015, 5017}},
     7,
     0,
     KMQ_END_ACK,
     0,
     {0}},
    {"END redelivered",
     KMQ_MARKER_END,
     {{1007, 1008}},
     1,
     0,
     KMQ_END_REDELIVERED,
     0,
     {.has_copy_offset = true, .copy_offset = 2000}},
    {"EXTEND", KMQ_MARKER_EXTEND, {{1002, 1500}}, 1, 30000, 0, 0, {0}},
    {"RETRY failed",
     KMQ_MARKER_RETRY,
     {{1003, 1004}},
     1,
     1000,
     KMQ_RETRY_FAILED,
     KMQ_FLAG_COUNTS,
     {.text = "boom", .text_len = 4}},
    {"RETRY rejected", KMQ_MARKER_RETRY, {{1004, 1005}}, 1, 0, KMQ_RETRY_REJECTED, KMQ_FLAG_COUNTS | KMQ_FLAG_DLQ, {0}},
    {"RETRY expired", KMQ_MARKER_RETRY, {{1004, 1005}}, 1, 0, KMQ_RETRY_EXPIRED, KMQ_FLAG_DLQ, {0}},
    {"PARK", KMQ_MARKER_PARK, {{1005, 1006}}, 1, INT64_C(1767225600000), 0, 0, {0}},
    {"START with a key hash",
     KMQ_MARKER_START,
     {{INT64_C(4294967296), INT64_C(4294967297)}},
     1,
     0,
     0,
     0,
     {.has_key_hash = true, .key_hash = 0xfedcba9876543210}},
};

/* The hex of the code block under "NAME:" in the page, without its remarks. */
static bool page_vector(const char *name, uint8_t *out, size_t cap, size_t *n)
{
    static char line[1024], hex[4096];
    bool here = false;
    size_t want = strlen(name);
    FILE *file = fopen(KMQ_FORMAT_PAGE, "r");
    assert_non_null(file);
    hex[0] = '\0';
    while (fgets(line, sizeof line, file) != NULL) {
        size_t len = strcspn(line, "\r\n");
        line[len] = '\0';
        if (!here) {
            here = len == want + 1 && memcmp(line, name, want) == 0 && line[want] == ':';
            continue;
        }
        if (line[0] == '\0' && hex[0] == '\0') continue;
        if (strncmp(line, "    ", 4) != 0) break;
        char *note = strstr(line, "  #");
        if (note != NULL) *note = '\0';
        strcat(hex, line);
    }
    (void)fclose(file);
    *n = unhex(hex, out, cap);
    return here;
}

static void test_range_vectors(void **state)
{
    (void)state;
    uint8_t got[256], want[256];
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        const vector *v = &vectors[i];
        size_t used, n;
        kmq_marker marker;
        kmq_range runs[8];
        int len = kmq_marker_encode(got, sizeof got, &scope, v->type, v->runs, v->n, v->ms, v->cause, v->flags, &v->tlv,
                                    &used);
        assert_true(len > 0);
        assert_int_equal(used, v->n);
        if (!page_vector(v->name, want, sizeof want, &n) || n != (size_t)len || memcmp(got, want, n) != 0) {
            print_error("%s:\n    ", v->name);
            for (int b = 0; b < len; b++) print_error("%02x ", got[b]);
            fail_msg("guides/format.md has other bytes for it");
        }
        assert_int_equal(decode_range(got, n, &marker), KMQ_MARKER_OURS);
        assert_int_equal(marker.type, v->type);
        assert_int_equal(marker.partition, 7);
        assert_int_equal(marker.time_ms, v->ms);
        assert_int_equal(marker.cause, v->cause);
        assert_int_equal(marker.flags, v->flags);
        assert_int_equal(runs_of(&marker.set, runs, 8), v->n);
        assert_memory_equal(runs, v->runs, v->n * sizeof runs[0]);
        assert_int_equal(marker.tlv.text_len, v->tlv.text_len);
        assert_int_equal(marker.tlv.node_len, v->tlv.node_len);
        assert_int_equal(marker.tlv.has_instance, v->tlv.has_instance);
        assert_int_equal(marker.tlv.instance, v->tlv.instance);
        assert_int_equal(marker.tlv.has_copy_offset, v->tlv.has_copy_offset);
        assert_int_equal(marker.tlv.copy_offset, v->tlv.copy_offset);
        assert_int_equal(marker.tlv.key_hash, v->tlv.key_hash);
    }
}

static void test_checkpoint_vector(void **state)
{
    (void)state;
    uint8_t entries[128], got[256], want[256];
    size_t used, n;
    kmq_marker marker;
    kmq_checkpoint_cursor cursor;
    kmq_checkpoint_entry entry;
    kmq_range run;
    int a = kmq_marker_encode_entry(entries, sizeof entries, &(kmq_range){1000, 1010}, 1, INT64_C(1767225630000),
                                    KMQ_RETRY_CRASH, KMQ_FLAG_COUNTS, &used);
    assert_true(a > 0);
    int b = kmq_marker_encode_entry(entries + a, sizeof entries - (size_t)a, &(kmq_range){1015, 1016}, 1,
                                    INT64_C(1767229200000), KMQ_RETRY_RELEASED, KMQ_FLAG_PARKED, &used);
    assert_true(b > 0);
    kmq_marker_tlv tlv = {.log_time_ms = INT64_C(1767225600000), .has_log_time = true};
    int len = kmq_marker_encode_checkpoint(got, sizeof got, &scope, 123456, 0, 1, entries, (size_t)(a + b), &tlv);
    assert_true(len > 0);
    if (!page_vector("CHECKPOINT", want, sizeof want, &n) || n != (size_t)len || memcmp(got, want, n) != 0) {
        for (int i = 0; i < len; i++) print_error("%02x ", got[i]);
        fail_msg("guides/format.md has other bytes for CHECKPOINT");
    }
    assert_int_equal(decode_range(got, n, &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.type, KMQ_MARKER_CHECKPOINT);
    assert_int_equal(marker.as_of, 123456);
    assert_int_equal(marker.parts, 1);
    assert_int_equal(marker.tlv.log_time_ms, INT64_C(1767225600000));
    kmq_marker_entries_begin(&marker, &cursor);
    assert_true(kmq_marker_entries_next(&cursor, &entry));
    assert_int_equal(entry.cause, KMQ_RETRY_CRASH);
    assert_int_equal(runs_of(&entry.set, &run, 1), 1);
    assert_int_equal(run.hi, 1010);
    assert_true(kmq_marker_entries_next(&cursor, &entry));
    assert_int_equal(entry.flags, KMQ_FLAG_PARKED);
    assert_int_equal(entry.due_ms, INT64_C(1767229200000));
    assert_false(kmq_marker_entries_next(&cursor, &entry));
    tlv.instance = 77, tlv.has_instance = true;
    len = kmq_marker_encode_checkpoint(got, sizeof got, &scope, 123456, 1, 2, entries, (size_t)a, &tlv);
    assert_int_equal(decode_range(got, (size_t)len, &marker), KMQ_MARKER_OURS);
    assert_true(marker.tlv.has_instance && marker.tlv.instance == 77 && marker.part == 1);
    /* arguments */
    assert_int_equal(kmq_marker_encode_checkpoint(got, sizeof got, &scope, -1, 0, 1, entries, (size_t)a, NULL),
                     KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode_checkpoint(got, sizeof got, &scope, 1, 1, 1, entries, (size_t)a, NULL),
                     KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode_checkpoint(got, sizeof got, &scope, 1, 0, 1, entries, (size_t)a - 1, NULL),
                     KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode_checkpoint(got, 12, &scope, 1, 0, 1, entries, (size_t)a, NULL), KMQ_EFULL);
    assert_true(kmq_marker_encode_checkpoint(got, sizeof got, &scope, 1, 0, 1, NULL, 0, NULL) > 0);
    assert_int_equal(kmq_marker_encode_entry(entries, 3, &(kmq_range){1000, 1010}, 1, 5, 0, 0, &used), KMQ_EFULL);
    assert_int_equal(kmq_marker_encode_entry(entries, 64, &(kmq_range){0, 1}, 1, 5, 77, 0, &used), KMQ_EINVAL);
}

static void test_clock_vector(void **state)
{
    (void)state;
    uint8_t got[64], want[64];
    size_t n;
    kmq_marker marker;
    int len = kmq_marker_encode_clock(got, sizeof got, &scope, NULL);
    assert_int_equal(len, 8);
    assert_true(page_vector("CLOCK", want, sizeof want, &n));
    assert_int_equal(n, 8);
    assert_memory_equal(got, want, 8);
    assert_int_equal(decode_range(got, 8, &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.type, KMQ_MARKER_CLOCK);
    assert_int_equal(kmq_marker_encode_clock(got, 7, &scope, NULL), KMQ_EFULL);
    assert_int_equal(kmq_marker_encode_clock(got, 17, &scope, &(kmq_marker_tlv){.has_instance = true}), KMQ_EFULL);
    assert_int_equal(kmq_marker_encode_clock(got, 18, &scope, &(kmq_marker_tlv){.has_instance = true}), 18);
    assert_int_equal(
        kmq_marker_encode_clock(got, 64, &scope, &(kmq_marker_tlv){.has_copy_offset = true, .copy_offset = -1}),
        KMQ_EINVAL);
}

/* ---- what is refused; H is the head of a record of ours */
#define H(type) "004b01" type "c55eeed1"

static void test_range_odd(void **state)
{
    (void)state;
    static const struct {
        const char *hex;
        kmq_verdict verdict;
    } cases[] = {
        {H("07"), KMQ_MARKER_OURS},
        {"00", KMQ_MARKER_MALFORMED},
        {"004b0107c55eee", KMQ_MARKER_MALFORMED},
        {"004c0107c55eeed1", KMQ_MARKER_MALFORMED},
        {"014b0107c55eeed1", KMQ_MARKER_MALFORMED},
        {"004b0107c55eeed2", KMQ_MARKER_FOREIGN},
        {"004b0208c55eeed2", KMQ_MARKER_FOREIGN}, /* another group's newer record is none of our business */
        {"004b0207c55eeed1", KMQ_MARKER_NEWER},
        {"004b0108c55eeed1", KMQ_MARKER_NEWER},
        {"004b0100c55eeed1ffff", KMQ_MARKER_NEWER},
        /* sets: base, form, n, gap, length; lease */
        {H("01") "0a 00 01 00 05 0a", KMQ_MARKER_OURS},
        {H("01") "0a 00 02 00 05 00 01 0a", KMQ_MARKER_OURS}, /* runs that touch */
        {H("01") "0a 00 00 0a", KMQ_MARKER_MALFORMED},        /* no runs */
        {H("01") "0a 00 01 00 00 0a", KMQ_MARKER_MALFORMED},  /* a run of nothing */
        {H("01") "0a 00 02 00 05 0a", KMQ_MARKER_MALFORMED},  /* fewer runs than said */
        {H("01") "0a 00 ffffffff0f 00 05 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 02 01 00 05 0a", KMQ_MARKER_MALFORMED},                 /* no such form */
        {H("01") "feffffffffffffff7f 00 01 00 01 0a", KMQ_MARKER_OURS},      /* [2^63-2, 2^63-1) */
        {H("01") "ffffffffffffffff7f 00 01 00 01 0a", KMQ_MARKER_MALFORMED}, /* beyond */
        {H("01") "80808080808080808001 00 01 00 01 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 00 01 ffffffffffffffff7f 01 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 00 01 00 ffffffffffffffffff01 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 00 01 00 f5ffffffffffffff7f 0a", KMQ_MARKER_OURS}, /* up to 2^63-1 exactly */
        {H("01") "0a 00 01 00 f6ffffffffffffff7f 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 01 05 1b 0a", KMQ_MARKER_OURS},
        {H("01") "0a 01 05 3b 0a", KMQ_MARKER_MALFORMED}, /* a bit behind the last */
        {H("01") "0a 01 05 00 0a", KMQ_MARKER_MALFORMED}, /* empty */
        {H("01") "0a 01 00 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 01 ffffffffffffffff7f 01 0a", KMQ_MARKER_MALFORMED},
        {H("01") "0a 01 10 01 0a", KMQ_MARKER_MALFORMED}, /* the lease byte goes into the bitmap: no lease left */
        {H("01") "0a 00 01 00 05", KMQ_MARKER_MALFORMED},
        {H("01") "0a 00 01 00 05 ffffffffffffffffff01", KMQ_MARKER_OURS}, /* saturates */
        {H("01") "0a 00 01 00 05 ffffffffffffffffff02", KMQ_MARKER_MALFORMED},
        /* causes and flags */
        {H("02") "0a 00 01 00 05 05", KMQ_MARKER_OURS},
        {H("02") "0a 00 01 00 05 06", KMQ_MARKER_MALFORMED},
        {H("02") "0a 00 01 00 05", KMQ_MARKER_MALFORMED},
        {H("04") "0a 00 01 00 05 00 04 03", KMQ_MARKER_OURS},
        {H("04") "0a 00 01 00 05 00 06 03", KMQ_MARKER_MALFORMED},
        {H("04") "0a 00 01 00 05 00 04 04", KMQ_MARKER_MALFORMED},
        /* TLVs: unknown ones are skipped, broken ones not */
        {H("07") "32 02 aabb", KMQ_MARKER_OURS},
        {H("07") "32 03 aabb", KMQ_MARKER_MALFORMED},
        {H("07") "32", KMQ_MARKER_MALFORMED},
        {H("07") "00 01 00", KMQ_MARKER_OURS},
        {H("07") "8001 00", KMQ_MARKER_OURS},
        {H("07") "03 07 00000000000000", KMQ_MARKER_MALFORMED},
        {H("07") "04 09 000000000000000000", KMQ_MARKER_MALFORMED},
        {H("07") "05 02 0101", KMQ_MARKER_MALFORMED},
        {H("07") "05 00", KMQ_MARKER_MALFORMED},
        {H("07") "32 ffffffffffffffffff01 00", KMQ_MARKER_MALFORMED},
        /* CHECKPOINT: as_of, part, parts, n, entries */
        {H("06") "0a 00 01 00", KMQ_MARKER_OURS},
        {H("06") "0a 01 01 00", KMQ_MARKER_MALFORMED},
        {H("06") "0a 00 01 01", KMQ_MARKER_MALFORMED},
        {H("06") "0a 00 01 01 0a 00 01 00 05 0a ff 01", KMQ_MARKER_OURS},
        {H("06") "0a 00 01 01 0a 00 01 00 05 0a 06 01", KMQ_MARKER_MALFORMED},
        {H("06") "0a 00 01 01 0a 00 01 00 05 0a 04 08", KMQ_MARKER_MALFORMED},
        {H("06") "0a 00 01 ffffffffffffffffff01 0a 00 01 00 05 0a 04 01", KMQ_MARKER_MALFORMED},
    };
    kmq_marker marker;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        kmq_verdict verdict = decode_hex(cases[i].hex, &marker);
        if (verdict != cases[i].verdict) fail_msg("%s: %d", cases[i].hex, (int)verdict);
    }
    assert_int_equal(decode_hex(H("05") "0a 00 01 00 05 ffffffffffffffffff01", &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.time_ms, INT64_MAX);
    uint8_t version, type;
    kmq_marker_newer("\x00\x4b\x02\x09", 4, &version, &type);
    assert_int_equal(version, 2);
    assert_int_equal(type, 9);
    kmq_marker_newer("\x00\x4b", 2, &version, &type);
    assert_int_equal(version, 0);
    /* an error text longer than allowed */
    uint8_t value[8 + 3 + 513];
    size_t n = unhex(H("07") "01 8104", value, sizeof value);
    memset(value + n, 'x', 513);
    assert_int_equal(decode_range(value, n + 513, &marker), KMQ_MARKER_MALFORMED);
    value[n - 2] = 0x80;
    assert_int_equal(decode_range(value, n + 512, &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.tlv.text_len, 512);
}

/* ---- encoding: the limits */

static void test_encode_limits(void **state)
{
    (void)state;
    static uint8_t buf[KMQ_MARKER_MAX_BYTES + 100];
    static kmq_range runs[70000];
    enum { MANY = sizeof runs / sizeof runs[0] };
    size_t used;
    const kmq_range one = {10, 15}, none = {10, 10}, negative = {-1, 5};
    const kmq_range twice[] = {{10, 15}, {14, 20}};
    kmq_marker marker;
    assert_int_equal(kmq_marker_encode(buf, 13, &scope, KMQ_MARKER_START, &one, 1, 5, 0, 0, NULL, &used), 13);
    assert_int_equal(kmq_marker_encode(buf, 12, &scope, KMQ_MARKER_START, &one, 1, 5, 0, 0, NULL, &used), KMQ_EFULL);
    assert_int_equal(used, 0);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_START, &one, 0, 5, 0, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_START, &none, 1, 5, 0, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_START, &negative, 1, 5, 0, 0, NULL, &used),
                     KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_START, twice, 2, 5, 0, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_START, &one, 1, -5, 0, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_CLOCK, &one, 1, 5, 0, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_END, &one, 1, 5, 9, 0, NULL, &used), KMQ_EINVAL);
    assert_int_equal(kmq_marker_encode(buf, 64, &scope, KMQ_MARKER_RETRY, &one, 1, 5, 0, 4, NULL, &used), KMQ_EINVAL);
    /* far apart, so that only runs do: split by `used`, each record below 64 KiB, nothing lost */
    for (int64_t i = 0; i < MANY; i++) runs[i] = (kmq_range){i * 100000, i * 100000 + 1 + i % 3};
    size_t done = 0, records = 0;
    while (done < MANY) {
        int len =
            kmq_marker_encode(buf, sizeof buf, &scope, KMQ_MARKER_END, runs + done, MANY - done, 0, 0, 0, NULL, &used);
        if (done + used < MANY) assert_true(len > KMQ_MARKER_MAX_BYTES - 20); /* as much as fits */
        assert_true(len <= KMQ_MARKER_MAX_BYTES);
        assert_int_equal(decode_range(buf, (size_t)len, &marker), KMQ_MARKER_OURS);
        kmq_marker_cursor cursor;
        kmq_marker_set_begin(&marker.set, &cursor);
        for (kmq_range run; kmq_marker_set_next(&cursor, &run); done++) {
            assert_int_equal(run.lo, runs[done].lo);
            assert_int_equal(run.hi, runs[done].hi);
        }
        records++;
    }
    assert_true(records > 1);
    /* every other one: a bitmap of 8 in a byte */
    for (int64_t i = 0; i < MANY; i++) runs[i] = (kmq_range){2 * i, 2 * i + 1};
    int len = kmq_marker_encode(buf, sizeof buf, &scope, KMQ_MARKER_END, runs, MANY, 0, 0, 0, NULL, &used);
    assert_int_equal(used, MANY);
    assert_true(len < MANY / 4 + 40);
    /* a text is cut at a character's edge */
    char text[600];
    memset(text, 'x', sizeof text);
    memcpy(text + 510, "\xe2\x82\xac", 3);
    kmq_marker_tlv tlv = {.text = text, .text_len = sizeof text};
    len = kmq_marker_encode(buf, sizeof buf, &scope, KMQ_MARKER_RETRY, &one, 1, 5, 0, 1, &tlv, &used);
    assert_int_equal(decode_range(buf, (size_t)len, &marker), KMQ_MARKER_OURS);
    assert_int_equal(marker.tlv.text_len, 510);
}

/* Random sets there and back, in buffers that end at the guard page; the encoder never writes beyond what it returns. */
static void test_round_trip(void **state)
{
    (void)state;
    static kmq_range runs[300];
    kmq_rng rng = kmq_test_rng(__func__);
    for (int64_t i = 0; i < kmq_test_scale(100000); i++) {
        size_t n = 1 + (size_t)kmq_rng_below(&rng, kmq_rng_chance(&rng, 10) ? 300 : 6), used, at = 0;
        int64_t offset = (int64_t)(kmq_rng_next(&rng) >> (8 + kmq_rng_below(&rng, 50)));
        uint64_t gaps = 1 + kmq_rng_below(&rng, 20), lengths = 1 + kmq_rng_below(&rng, 20);
        for (size_t r = 0; r < n; r++) {
            runs[r].lo = offset + (int64_t)kmq_rng_below(&rng, gaps) + (r > 0);
            runs[r].hi = offset = runs[r].lo + 1 + (int64_t)kmq_rng_below(&rng, lengths);
        }
        kmq_marker_type type = (kmq_marker_type)(1 + kmq_rng_below(&rng, 5));
        int64_t ms = (int64_t)(kmq_rng_next(&rng) >> (1 + kmq_rng_below(&rng, 62)));
        kmq_marker_tlv tlv = {.has_instance = kmq_rng_chance(&rng, 2), .instance = kmq_rng_next(&rng)};
        size_t cap = kmq_rng_chance(&rng, 3) ? (size_t)kmq_rng_below(&rng, 200) : 4096;
        uint8_t *buf = guard_end - cap;
        int len = kmq_marker_encode(buf, cap, &scope, type, runs, n, ms, 0, 0, &tlv, &used);
        if (len == KMQ_EFULL) {
            assert_true(cap < 60);
            continue;
        }
        assert_true(len > 0 && (size_t)len <= cap && used > 0);
        kmq_marker marker;
        assert_int_equal(decode_range(buf, (size_t)len, &marker), KMQ_MARKER_OURS);
        kmq_marker_cursor cursor;
        kmq_marker_set_begin(&marker.set, &cursor);
        for (kmq_range run; kmq_marker_set_next(&cursor, &run); at++) {
            assert_int_equal(run.lo, runs[at].lo);
            assert_int_equal(run.hi, runs[at].hi);
        }
        assert_int_equal(at, used);
        assert_int_equal(marker.time_ms, type == KMQ_MARKER_END ? 0 : ms);
    }
}

/* ---- any bytes */

static void walk(const kmq_marker *marker)
{
    kmq_checkpoint_cursor entries;
    kmq_checkpoint_entry entry;
    kmq_marker_cursor cursor;
    kmq_range run;
    int64_t last = -1;
    if (marker->type == KMQ_MARKER_CHECKPOINT) {
        size_t n = 0;
        kmq_marker_entries_begin(marker, &entries);
        while (kmq_marker_entries_next(&entries, &entry)) {
            assert_true(entry.due_ms >= 0);
            n += runs_of(&entry.set, &run, 1);
        }
        assert_true(entries.at == entries.end);
    } else if (marker->type != KMQ_MARKER_CLOCK) {
        size_t n = 0;
        kmq_marker_set_begin(&marker->set, &cursor);
        for (; kmq_marker_set_next(&cursor, &run); n++) {
            assert_true(run.lo >= last && run.hi > run.lo);
            last = run.hi;
        }
        assert_true(n > 0 || marker->set.single == INT64_MAX);
        assert_true(marker->time_ms >= 0);
    }
    assert_true(marker->tlv.text_len <= KMQ_ERROR_TEXT_MAX);
}

static size_t fuzz_input(kmq_rng *rng, uint8_t *value)
{
    size_t n = 0, used, at;
    switch (kmq_rng_below(rng, 4)) {
    case 0: /* noise */
        n = (size_t)kmq_rng_below(rng, 40);
        for (size_t i = 0; i < n; i++) value[i] = (uint8_t)kmq_rng_next(rng);
        return n;
    case 1: /* a good head, then small numbers */
        n = (size_t)kmq_marker_encode_clock(value, 64, &scope, NULL);
        value[3] = (uint8_t)kmq_rng_below(rng, 9);
        for (size_t more = (size_t)kmq_rng_below(rng, 30); more > 0; more--)
            value[n++] = kmq_rng_chance(rng, 6) ? (uint8_t)kmq_rng_next(rng) : (uint8_t)kmq_rng_below(rng, 8);
        return n;
    default: { /* one of ours, with some bytes changed, cut or added */
        const vector *v = &vectors[kmq_rng_below(rng, sizeof vectors / sizeof vectors[0])];
        n = (size_t)kmq_marker_encode(value, 256, &scope, v->type, v->runs, v->n, v->ms, v->cause, v->flags, &v->tlv,
                                      &used);
        if (kmq_rng_chance(rng, 2)) n = (size_t)kmq_rng_below(rng, n + 1);
        for (size_t more = (size_t)kmq_rng_below(rng, 4); more > 0; more--) value[n++] = (uint8_t)kmq_rng_next(rng);
        for (size_t flips = (size_t)kmq_rng_below(rng, 4); flips > 0 && n > 0; flips--) {
            at = (size_t)kmq_rng_below(rng, n);
            value[at] = (uint8_t)(value[at] ^ 1u << kmq_rng_below(rng, 8));
        }
        return n;
    }
    }
}

static void test_fuzz(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    const char *env = getenv("KMQ_FUZZ");
    int64_t inputs = env != NULL ? strtoll(env, NULL, 10) : 1000000, seen[4] = {0};
    uint8_t value[512], key[KMQ_MARKER_KEY_BYTES];
    for (int64_t i = 0; i < inputs; i++) {
        kmq_marker marker;
        size_t n = fuzz_input(&rng, value);
        kmq_marker_encode_key(key, 7, kmq_rng_chance(&rng, 8) ? (int64_t)kmq_rng_next(&rng) : -1);
        kmq_verdict verdict = kmq_marker_decode(&scope, 7, key, sizeof key, guarded(value, n), n, NULL, 0, &marker);
        seen[verdict]++;
        if (verdict == KMQ_MARKER_OURS) walk(&marker);
    }
    for (int v = 0; v < 4; v++) assert_true(seen[v] > inputs / 1000);
}

/* ---- small values */

static void test_count(void **state)
{
    (void)state;
    static const struct {
        int32_t count;
        const char *hex;
    } cases[] = {{0, "00"}, {1, "01"}, {127, "7f"}, {128, "00000080"}, {1000, "000003e8"}, {INT32_MAX, "7fffffff"}};
    uint8_t buf[9], want[9];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t n = kmq_count_encode(buf, cases[i].count);
        assert_int_equal(unhex(cases[i].hex, want, sizeof want), n);
        assert_memory_equal(buf, want, n);
        assert_int_equal(kmq_count_decode(guarded(buf, n), n), cases[i].count);
    }
    assert_int_equal(kmq_count_encode(buf, -5), 1);
    assert_int_equal(kmq_count_decode(NULL, 0), 0);
    assert_int_equal(kmq_count_decode("", 0), INT32_MAX);
    assert_int_equal(kmq_count_decode("\xff", 1), INT32_MAX);
    assert_int_equal(kmq_count_decode("\x01\x02", 2), INT32_MAX);
    assert_int_equal(kmq_count_decode("\xff\xff\xff\xff", 4), INT32_MAX);
    assert_int_equal(kmq_count_decode("123456789", 9), INT32_MAX);
}

static void test_causes(void **state)
{
    (void)state;
    static const uint8_t causes[] = {KMQ_RETRY_FAILED,  KMQ_RETRY_TIMEOUT,  KMQ_RETRY_RELEASED,
                                     KMQ_RETRY_SNOOZED, KMQ_RETRY_REJECTED, KMQ_RETRY_EXPIRED,
                                     KMQ_RETRY_CRASH,   KMQ_CAUSE_EXTENDED, KMQ_CAUSE_PARKED};
    for (size_t i = 0; i < sizeof causes; i++) {
        const char *name = kmq_retry_cause_name(causes[i]);
        assert_int_equal(kmq_retry_cause_parse(name, strlen(name)), causes[i]);
    }
    assert_null(kmq_retry_cause_name(77));
    assert_int_equal(kmq_retry_cause_parse("fail", 4), -1);
    assert_int_equal(kmq_retry_cause_parse(NULL, 0), -1);
    kmq_marker_scope check; /* CRC-32's own check value, split by the NUL that stands between topic and group */
    kmq_marker_scope_init(&check, "orders", 6, "workers", 7);
    assert_int_equal(check.crc, 0xc55eeed1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kmq_vectors),
        cmocka_unit_test(test_kmq_odd),
        cmocka_unit_test(test_kmq_headers),
        cmocka_unit_test(test_range_vectors),
        cmocka_unit_test(test_checkpoint_vector),
        cmocka_unit_test(test_clock_vector),
        cmocka_unit_test(test_range_odd),
        cmocka_unit_test(test_encode_limits),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_fuzz),
        cmocka_unit_test(test_count),
        cmocka_unit_test(test_causes),
    };
    kmq_marker_scope_init(&scope, "orders", 6, "workers", 7);
    guard_open();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
