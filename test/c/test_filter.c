/* Filters: AMQP's patterns by table and against a recursive matcher, tags and headers, memory that runs out. */
#include "kmq_test.h"

#include <string.h>

#include "filter.h"

static bool routed(const char *pattern, const char *key)
{
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_filter filter;
    kmq_filter_init(&filter, &alloc);
    assert_int_equal(kmq_filter_add_routing(&filter, pattern, strlen(pattern)), KMQ_OK);
    bool match = kmq_filter_match_routing(&filter, key, strlen(key));
    kmq_filter_free(&filter);
    return match;
}

static void test_patterns(void **state)
{
    (void)state;
    static const struct {
        const char *pattern, *key;
        bool match;
    } cases[] = {
        {"", "", true},         {"", "a", false},         {"a", "a", true},           {"a", "b", false},
        {"a", "", false},       {"a", "a.a", false},      {"a.b", "a.b", true},       {"a.b", "a", false},
        {"*", "a", true},       {"*", "", false},         {"*", "a.b", false},        {"*.b", "a.b", true},
        {"a.*", "a", false},    {"a.*", "a.b", true},     {"a.*.c", "a.b.c", true},   {"a.*.c", "a.b.b.c", false},
        {"#", "", true},        {"#", "a", true},         {"#", "a.b.c", true},       {"a.#", "a", true},
        {"a.#", "a.b.c", true}, {"a.#", "b", false},      {"#.c", "c", true},         {"#.c", "a.b.c", true},
        {"#.c", "a.b", false},  {"a.#.c", "a.c", true},   {"a.#.c", "a.b.b.c", true}, {"a.#.c", "a.b.b", false},
        {"#.#", "", true},      {"#.*", "", false},       {"#.*", "a", true},         {"#.*.#", "a.b", true},
        {"*.#", "a.b", true},   {"a..b", "a..b", true},   {"a.*.b", "a..b", true},    {"a.", "a.", true},
        {"a.", "a", false},     {"#.b.#", "a.b.c", true}, {"#.b.#.d", "b.b.d", true}, {"#.b.#.d", "d.b.c", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (routed(cases[i].pattern, cases[i].key) != cases[i].match)
            fail_msg("%s ~ %s: not %d", cases[i].pattern, cases[i].key, cases[i].match);
}

static void test_refused(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_filter filter;
    char many[2 * KMQ_FILTER_STATES];
    kmq_filter_init(&filter, &alloc);
    assert_int_equal(kmq_filter_add_routing(&filter, "a*.b", 4), KMQ_EINVAL);
    assert_int_equal(kmq_filter_add_routing(&filter, "a.##", 4), KMQ_EINVAL);
    assert_int_equal(kmq_filter_add_tag(&filter, "", 0), KMQ_EINVAL);
    assert_int_equal(kmq_filter_add_tag(&filter, "a,b", 3), KMQ_EINVAL);
    assert_int_equal(kmq_filter_add_header(&filter, "", 0, "x", 1), KMQ_EINVAL);
    assert_true(kmq_filter_is_empty(&filter));
    memset(many, '.', sizeof many);
    assert_int_equal(kmq_filter_add_routing(&filter, many, KMQ_FILTER_STATES - 1),
                     KMQ_EFULL); /* as many words, and one */
    assert_int_equal(kmq_filter_add_routing(&filter, many, KMQ_FILTER_STATES - 2), KMQ_OK);
    assert_true(kmq_filter_match_routing(&filter, many, KMQ_FILTER_STATES - 2));
    assert_false(kmq_filter_match_routing(&filter, many, KMQ_FILTER_STATES - 3));
    assert_int_equal(kmq_filter_add_routing(&filter, "a", 1), KMQ_EFULL);
    kmq_filter_free(&filter);
}

/* the definition, word by word */
static bool naive(const char *pattern, const char *key)
{
    if (pattern == NULL) return key == NULL;
    const char *p = strchr(pattern, '.');
    size_t p_len = p != NULL ? (size_t)(p - pattern) : strlen(pattern);
    const char *p_rest = p != NULL ? p + 1 : NULL;
    if (p_len == 1 && *pattern == '#' && naive(p_rest, key)) return true;
    if (key == NULL) return false;
    const char *k = strchr(key, '.');
    size_t k_len = k != NULL ? (size_t)(k - key) : strlen(key);
    const char *k_rest = k != NULL ? k + 1 : NULL;
    if (p_len == 1 && *pattern == '#') return naive(pattern, k_rest);
    if (p_len == 1 && *pattern == '*') return naive(p_rest, k_rest);
    return p_len == k_len && memcmp(pattern, key, p_len) == 0 && naive(p_rest, k_rest);
}

static void words(kmq_rng *rng, const char *const *from, size_t n_from, size_t max, char *out)
{
    size_t n = 1 + (size_t)kmq_rng_below(rng, max);
    *out = '\0';
    for (size_t i = 0; i < n; i++) {
        if (i > 0) strcat(out, ".");
        strcat(out, from[kmq_rng_below(rng, n_from)]);
    }
}

static void test_many_patterns(void **state)
{
    (void)state;
    static const char *const parts[] = {"a", "b", "cc", "*", "#"};
    kmq_rng rng = kmq_test_rng(__func__);
    kmq_alloc alloc = kmq_alloc_libc();
    for (int64_t round = 0; round < kmq_test_scale(3000); round++) {
        char patterns[20][64], key[64];
        size_t n = 1 + (size_t)kmq_rng_below(&rng, 20);
        kmq_filter filter;
        kmq_filter_init(&filter, &alloc);
        for (size_t i = 0; i < n; i++) {
            words(&rng, parts, 5, 6, patterns[i]);
            assert_int_equal(kmq_filter_add_routing(&filter, patterns[i], strlen(patterns[i])), KMQ_OK);
        }
        for (int k = 0; k < 30; k++) {
            bool want = false;
            words(&rng, parts, 3, 7, key);
            for (size_t i = 0; i < n; i++) want = want || naive(patterns[i], key);
            assert_int_equal(kmq_filter_match_routing(&filter, key, strlen(key)), want);
        }
        kmq_filter_free(&filter);
    }
}

#define HEADER(name, value)                                                                                            \
    {                                                                                                                  \
        name, sizeof(name) - 1, value, sizeof(value) - 1                                                               \
    }

static void test_clauses(void **state)
{
    (void)state;
    kmq_alloc alloc = kmq_alloc_libc();
    kmq_filter filter;
    const kmq_header headers[] = {
        HEADER("kmq-tags", "red,green,,blue"),      HEADER("region", "eu"), HEADER("region", "us"),
        HEADER("kmq-routing-key", "orders.new.eu"), {"null", 4, NULL, 0},   HEADER("empty", "")};
    const size_t n = sizeof headers / sizeof headers[0];
    kmq_filter_init(&filter, &alloc);
    assert_true(kmq_filter_is_empty(&filter));
    assert_true(kmq_filter_match(&filter, NULL, 0));
    assert_true(kmq_filter_match(&filter, headers, n));
    /* one of the tags */
    assert_int_equal(kmq_filter_add_tag(&filter, "yellow", 6), KMQ_OK);
    assert_false(kmq_filter_match(&filter, headers, n));
    assert_int_equal(kmq_filter_add_tag(&filter, "blue", 4), KMQ_OK);
    assert_true(kmq_filter_match(&filter, headers, n));
    assert_false(kmq_filter_match(&filter, headers + 1, n - 1));
    /* all of the headers; the first of a name counts */
    assert_int_equal(kmq_filter_add_header(&filter, "region", 6, "eu", 2), KMQ_OK);
    assert_int_equal(kmq_filter_add_header(&filter, "empty", 5, "", 0), KMQ_OK);
    assert_true(kmq_filter_match(&filter, headers, n));
    /* and one of the patterns */
    assert_int_equal(kmq_filter_add_routing(&filter, "invoices.#", 10), KMQ_OK);
    assert_false(kmq_filter_match(&filter, headers, n));
    assert_int_equal(kmq_filter_add_routing(&filter, "orders.*.eu", 11), KMQ_OK);
    assert_true(kmq_filter_match(&filter, headers, n));
    assert_false(kmq_filter_match(&filter, headers, 3));
    assert_int_equal(kmq_filter_add_header(&filter, "null", 4, "", 0), KMQ_OK); /* null is not "" */
    assert_false(kmq_filter_match(&filter, headers, n));
    kmq_filter_free(&filter);
    kmq_filter_init(&filter, &alloc);
    assert_int_equal(kmq_filter_add_header(&filter, "region", 6, "us", 2), KMQ_OK);
    assert_false(kmq_filter_match(&filter, headers, n));
    kmq_filter_free(&filter);
}

static void test_no_memory(void **state)
{
    (void)state;
    kmq_fail_alloc fail;
    kmq_alloc alloc = kmq_fail_alloc_init(&fail);
    for (fail.fail_at = 1;; fail.fail_at++) {
        kmq_filter filter;
        fail.calls = 0;
        kmq_filter_init(&filter, &alloc);
        int tag = kmq_filter_add_tag(&filter, "red", 3);
        int header = kmq_filter_add_header(&filter, "a", 1, "b", 1);
        int first = kmq_filter_add_routing(&filter, "a.b.#.c", 7);
        int second = kmq_filter_add_routing(&filter, "x.y", 3);
        bool failed = fail.calls >= fail.fail_at;
        assert_int_equal(tag != KMQ_OK || header != KMQ_OK || first != KMQ_OK || second != KMQ_OK, failed);
        assert_int_equal(kmq_filter_match_routing(&filter, "a.b.c", 5), first == KMQ_OK);
        assert_int_equal(kmq_filter_match_routing(&filter, "x.y", 3), second == KMQ_OK);
        kmq_filter_free(&filter);
        assert_int_equal(fail.blocks, 0);
        if (!failed) break;
    }
    assert_true(fail.fail_at > 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_patterns), cmocka_unit_test(test_refused),   cmocka_unit_test(test_many_patterns),
        cmocka_unit_test(test_clauses),  cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
