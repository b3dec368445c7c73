/* Headers read where they lie: records of the present format as another writer would lay them out, broken ones, and those of older formats. Each lies in
 * a block of just its size, so that ASan sees a look before or behind it. */
#include <string.h>
#include "kmq_test.h"
#include "../../c_src/kafka/internal.h"

enum { MOST = 12, BYTES = 400000 };

typedef struct record {
    unsigned char bytes[BYTES];
    size_t n, key, value, headers; /* where they begin */
    size_t key_len, value_len, count;
    kmq_header want[MOST]; /* offsets in the record instead of addresses; SIZE_MAX: null */
} record;

static void varint(record *r, int64_t number)
{
    uint64_t n = ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
    for (; n > 0x7f; n >>= 7) r->bytes[r->n++] = (unsigned char)(n | 0x80);
    r->bytes[r->n++] = (unsigned char)n;
}

static size_t noise(kmq_rng *rng, record *r, size_t n, bool text)
{
    size_t at = r->n;
    for (size_t i = 0; i < n; i++)
        r->bytes[r->n++] = (unsigned char)(text ? 'a' + kmq_rng_below(rng, 26) : kmq_rng_next(rng));
    return at;
}

static size_t some(kmq_rng *rng, size_t large)
{
    return (size_t)kmq_rng_below(rng, kmq_rng_chance(rng, 8) ? large : kmq_rng_chance(rng, 2) ? 200 : 4);
}

/* What comes behind the length, and then the length in front of it. */
static void make(kmq_rng *rng, record *r)
{
    static record body;
    bool null_key = kmq_rng_chance(rng, 3);
    memset(&body, 0, offsetof(record, bytes));
    body.n = 0;
    body.bytes[body.n++] = 0;
    varint(&body, (int64_t)kmq_rng_next(rng) >> kmq_rng_below(rng, 64));
    varint(&body, (int64_t)kmq_rng_below(rng, kmq_rng_chance(rng, 2) ? 100 : 2000000));
    body.key_len = null_key ? 0 : some(rng, 1000);
    varint(&body, null_key ? -1 : (int64_t)body.key_len);
    body.key = null_key ? SIZE_MAX : noise(rng, &body, body.key_len, false);
    body.value_len = 1 + some(rng, 70000);
    varint(&body, (int64_t)body.value_len);
    body.value = noise(rng, &body, body.value_len, false);
    body.headers = body.n;
    body.count = (size_t)kmq_rng_below(rng, MOST + 1);
    varint(&body, (int64_t)body.count);
    for (size_t i = 0; i < body.count; i++) {
        size_t name_len = some(rng, 300), value_len = some(rng, 20000);
        bool null = kmq_rng_chance(rng, 6);
        varint(&body, (int64_t)name_len);
        body.want[i] = (kmq_header){.name = (const char *)noise(rng, &body, name_len, true), .name_len = name_len};
        varint(&body, null ? -1 : (int64_t)value_len);
        body.want[i].value = (const void *)(null ? SIZE_MAX : noise(rng, &body, value_len, false));
        body.want[i].value_len = null ? 0 : value_len;
    }
    *r = body;
    r->n = 0;
    varint(r, (int64_t)body.n);
    size_t ahead = r->n;
    memcpy(r->bytes + ahead, body.bytes, body.n);
    r->n += body.n;
    if (!null_key) r->key += ahead;
    r->value += ahead;
    r->headers += ahead;
    for (size_t i = 0; i < r->count; i++) {
        r->want[i].name += ahead;
        if (r->want[i].value != (const void *)SIZE_MAX) r->want[i].value = (const char *)r->want[i].value + ahead;
    }
}

/* Reads the record with `before` bytes in front of it. */
static bool reads(const record *r, const void *before, size_t n_before, kmq_header *out, size_t max, size_t *count,
                  unsigned char **block)
{
    *block = malloc(n_before + r->n);
    assert_non_null(*block);
    if (n_before) memcpy(*block, before, n_before);
    unsigned char *at = *block + n_before;
    memcpy(at, r->bytes, r->n);
    return kafka_headers_read(r->key == SIZE_MAX ? NULL : at + r->key, r->key_len, at + r->value, r->value_len, out,
                              max, count);
}

static bool is_as_wanted(const record *r, const unsigned char *at, const kmq_header *got, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const kmq_header *want = &r->want[i];
        bool null = want->value == (const void *)SIZE_MAX;
        if (got[i].name_len != want->name_len || got[i].name != (const char *)at + (size_t)want->name) return false;
        if (got[i].value_len != want->value_len || (got[i].value == NULL) != null) return false;
        if (!null && got[i].value != at + (size_t)want->value) return false;
    }
    return true;
}

static record r;

static void all_that_is_there(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    for (int64_t i = 0; i < kmq_test_scale(20000); i++) {
        unsigned char before[8], *block;
        kmq_header got[MOST + 1];
        size_t count = SIZE_MAX, n_before = (size_t)kmq_rng_below(&rng, sizeof before + 1),
               max = (size_t)kmq_rng_below(&rng, MOST + 1);
        for (size_t k = 0; k < sizeof before; k++)
            before[k] = (unsigned char)(0x80 | kmq_rng_next(&rng)); /* as if the length went on */
        make(&rng, &r);
        got[max].name = "behind max";
        bool ok = reads(&r, before, n_before, got, max, &count, &block);
        bool right = ok && count == r.count && is_as_wanted(&r, block + n_before, got, max < count ? max : count);
        free(block);
        assert_string_equal(got[max].name, "behind max");
        /* headers 127 times as long as all before them: left to librdkafka */
        if (!ok && (r.n - r.headers) / 127 >= r.headers - 5) continue;
        if (!right) fail_msg("record %lld: ok %d count %zu of %zu", (long long)i, ok, count, r.count);
    }
}

static void broken_headers_stay_in_their_record(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    int64_t refused = 0;
    for (int64_t i = 0; i < kmq_test_scale(40000); i++) {
        unsigned char *block;
        kmq_header got[MOST];
        size_t count;
        make(&rng, &r);
        for (size_t k = 1 + (size_t)kmq_rng_below(&rng, 3); k > 0; k--) /* most of them where numbers are */
            r.bytes[r.headers +
                    (size_t)kmq_rng_below(&rng, kmq_rng_chance(&rng, 2) || r.n - r.headers < 6 ? r.n - r.headers : 6)] =
                (unsigned char)kmq_rng_next(&rng);
        bool ok = reads(&r, NULL, 0, got, MOST, &count, &block);
        for (size_t k = 0; ok && k < count && k < MOST; k++) {
            const unsigned char *end = block + r.n, *name = (const unsigned char *)got[k].name, *value = got[k].value;
            assert_true(name >= block && name + got[k].name_len <= end);
            assert_true(value == NULL || (value >= block && value + got[k].value_len <= end));
        }
        refused += !ok;
        free(block);
    }
    assert_true(refused > 100);
}

/* ... | key length, key | value length, value: of four bytes each, a null's is -1. The last message of a set has nothing behind it. */
static void older_formats_are_left_alone(void **state)
{
    (void)state;
    kmq_rng rng = kmq_test_rng(__func__);
    for (size_t value_len = 1; value_len < 66000; value_len += value_len < 3000 ? 1 : 997) {
        r.n = 0;
        (void)noise(&rng, &r, 34, false);
        bool null_key = kmq_rng_chance(&rng, 2);
        r.key_len = null_key ? 0 : some(&rng, 300);
        uint32_t len = null_key ? UINT32_MAX : (uint32_t)r.key_len;
        for (int shift = 24; shift >= 0; shift -= 8) r.bytes[r.n++] = (unsigned char)(len >> shift);
        r.key = null_key ? SIZE_MAX : noise(&rng, &r, r.key_len, false);
        for (int shift = 24; shift >= 0; shift -= 8) r.bytes[r.n++] = (unsigned char)(value_len >> shift);
        r.value = noise(&rng, &r, value_len, false);
        r.value_len = value_len;
        unsigned char *block;
        kmq_header got[MOST];
        size_t count;
        bool ok = reads(&r, NULL, 0, got, MOST, &count, &block);
        free(block);
        assert_false(ok);
    }
}

/* {8, 'k', 'e', 'y', 's'}: the key; {2, 'v'}: the value; then the headers a: "1" and b: null. Each in its place. */
enum {
    LENGTH,
    ATTRIBUTES,
    TIME,
    OFFSET,
    KEY_LEN,
    KEY,
    VALUE_LEN = KEY + 4,
    VALUE,
    COUNT,
    NAME_LEN,
    NAME,
    A_LEN,
    A,
    B_NAME_LEN,
    B_NAME,
    B_LEN,
    END
};
static const unsigned char small[END] = {2 * (END - 1), 0, 0, 2,   8, 'k', 'e', 'y', 's', 2,
                                         'v',           4, 2, 'a', 2, '1', 2,   'b', 1};

/* Behind another record, which ends with a zero. */
static bool reads_small(const unsigned char *bytes, size_t n, size_t key_at, size_t key_len)
{
    enum { BEFORE = 8 };
    unsigned char *block = calloc(1, BEFORE + n), *at = block + BEFORE;
    kmq_header got[2];
    size_t count = 0;
    assert_non_null(block);
    memcpy(at, bytes, n);
    bool ok = kafka_headers_read(key_len ? (const void *)(at + key_at) : "", key_len, at + VALUE, 1, got, 2, &count);
    if (ok) assert_int_equal(count, 2);
    free(block);
    return ok;
}

static void every_number_counts(void **state)
{
    (void)state;
    static const struct {
        int at;
        unsigned char byte;
    } wrong[] = {{LENGTH, small[LENGTH] + 2},
                 {LENGTH, small[LENGTH] - 2},
                 {LENGTH, 2 * (COUNT - 1)},
                 {LENGTH, 1},
                 {ATTRIBUTES, 1},
                 {KEY_LEN, 6},
                 {KEY_LEN, 10},
                 {VALUE_LEN, 4},
                 {VALUE_LEN, 1},
                 {COUNT, 2},
                 {COUNT, 6},
                 {COUNT, 1},
                 {NAME_LEN, 4},
                 {NAME_LEN, 1},
                 {A_LEN, 4},
                 {A_LEN, 3},
                 {A_LEN, 126},
                 {B_LEN, 2},
                 {B_LEN, 3},
                 {COUNT, 0x84}};
    unsigned char bytes[END + 1];
    assert_true(reads_small(small, END, KEY, 4));
    assert_false(reads_small(small, END, KEY + 1, 4)); /* not the key that lies there */
    assert_false(reads_small(small, END, KEY + 1, 3));
    assert_false(reads_small(small, END, KEY, 0));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        memcpy(bytes, small, END);
        bytes[wrong[i].at] = wrong[i].byte;
        if (reads_small(bytes, END, KEY, 4)) fail_msg("byte %d as %d", wrong[i].at, wrong[i].byte);
    }
    /* behind the last header there is more of the record */
    memcpy(bytes, small, END);
    bytes[LENGTH] += 2;
    bytes[END] = 'x';
    assert_false(reads_small(bytes, END + 1, KEY, 4));
}

/* librdkafka shows it, as one without headers. What stands before it could be read as part of its length. */
static void a_record_that_ends_with_its_value(void **state)
{
    (void)state;
    static const unsigned char bytes[] = {0xc8, 2 * 6, 0, 0, 0, 1, 2, 'v'};
    for (size_t before = 0; before < 2; before++) {
        unsigned char *block = malloc(sizeof bytes - 1 + before);
        kmq_header got[1];
        size_t count;
        assert_non_null(block);
        memcpy(block, bytes + 1 - before, sizeof bytes - 1 + before);
        assert_false(kafka_headers_read(NULL, 0, block + before + 6, 1, got, 1, &count));
        free(block);
    }
}

/* librdkafka shows an empty key at an address of its own. */
static void an_empty_key_lies_somewhere_else(void **state)
{
    (void)state;
    static const unsigned char bytes[] = {2 * 11, 0, 0, 0, 0, 2, 'v', 2, 2, 'a', 2, '1'};
    kmq_header got[1];
    size_t count;
    unsigned char *block = malloc(sizeof bytes);
    assert_non_null(block);
    memcpy(block, bytes, sizeof bytes);
    assert_true(kafka_headers_read("", 0, block + 6, 1, got, 1, &count));
    assert_int_equal(count, 1);
    assert_ptr_equal(got[0].value, block + 11);
    free(block);
}

/* librdkafka shows a name up to its first NUL: so does whoever asks here, by asking it. */
static void a_name_with_a_nul_is_left_to_librdkafka(void **state)
{
    (void)state;
    static const unsigned char bytes[] = {26, 0, 0, 0, 1, 2, 'v', 2, 6, 'a', 0, 'b', 2, 'x'};
    kmq_header got[1];
    size_t count;
    unsigned char *copy = malloc(sizeof bytes);
    assert_non_null(copy);
    memcpy(copy, bytes, sizeof bytes);
    assert_false(kafka_headers_read(NULL, 0, copy + 6, 1, got, 1, &count));
    copy[10] = '-';
    assert_true(kafka_headers_read(NULL, 0, copy + 6, 1, got, 1, &count));
    assert_int_equal(count, 1);
    assert_int_equal(got[0].name_len, 3);
    assert_memory_equal(got[0].name, "a-b", 3);
    free(copy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_that_is_there),
        cmocka_unit_test(broken_headers_stay_in_their_record),
        cmocka_unit_test(older_formats_are_left_alone),
        cmocka_unit_test(every_number_counts),
        cmocka_unit_test(a_record_that_ends_with_its_value),
        cmocka_unit_test(an_empty_key_lies_somewhere_else),
        cmocka_unit_test(a_name_with_a_nul_is_left_to_librdkafka),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
