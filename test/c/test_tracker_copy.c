/* copy: the fate of a due message and the headers of its copy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "copy.h"
#include "marker.h"

static const char COUNT[] = "kmq-redelivery-count";

static kafka_header text(const char *name, const char *value)
{
    return (kafka_header){name, value, value ? strlen(value) : 0};
}

static void a_lapsed_lease_counts_a_retry_says_for_itself(void **state)
{
    (void)state;
    kafka_header two = {COUNT, "\2", 1};
    static const struct {
        uint8_t cause, flags;
        bool dead;
        int32_t count;
    } cases[] = {
        {KMQ_RETRY_CRASH, 0, false, 3},
        {KMQ_RETRY_FAILED, KMQ_FLAG_COUNTS, false, 3},
        {KMQ_RETRY_TIMEOUT, KMQ_FLAG_COUNTS, false, 3},
        {KMQ_RETRY_RELEASED, 0, false, 2},
        {KMQ_RETRY_SNOOZED, 0, false, 2},
        {KMQ_RETRY_REJECTED, KMQ_FLAG_COUNTS | KMQ_FLAG_DLQ, true, 3},
        {KMQ_RETRY_REJECTED, KMQ_FLAG_DLQ, true, 2},
        {KMQ_RETRY_RELEASED, KMQ_FLAG_PARKED, false, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tracker_fate fate = tracker_decide(&two, 1, COUNT, 3, cases[i].cause, cases[i].flags);
        assert_int_equal(fate.dead, cases[i].dead);
        assert_int_equal(fate.count, cases[i].count);
        assert_int_equal(fate.deliveries, cases[i].flags & KMQ_FLAG_PARKED ? 0 : 1);
    }
}

static void delivered_one_and_n_times(void **state)
{
    (void)state;
    for (int64_t limit = 0; limit < 4; limit++) {
        uint8_t bytes[4];
        kafka_header counter = {COUNT, bytes, 0};
        size_t n = 0;
        int32_t deliveries = 0;
        for (bool dead = false; !dead;) {
            deliveries++;
            tracker_fate fate = tracker_decide(&counter, n, COUNT, limit, KMQ_RETRY_CRASH, 0);
            counter.value_len = kmq_count_encode(bytes, fate.count);
            n = 1;
            dead = fate.dead;
        }
        assert_int_equal(deliveries, limit + 1);
    }
}

static void broken_counters_still_end(void **state)
{
    (void)state;
    const kafka_header broken[] = {{COUNT, NULL, 0},
                                   {COUNT, "", 0},
                                   {COUNT, "ab", 2},
                                   {COUNT, "7", 1},
                                   {COUNT, "\377", 1},
                                   {COUNT, "123456789", 9},
                                   {COUNT, "\177\377\377\377", 4}};
    for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
        uint8_t bytes[4];
        kafka_header counter = broken[i];
        int steps = 0;
        for (bool dead = false; !dead; steps++) {
            tracker_fate fate = tracker_decide(&counter, 1, COUNT, 2, KMQ_RETRY_CRASH, 0);
            assert_true(fate.count > 0);
            counter = (kafka_header){COUNT, bytes, kmq_count_encode(bytes, fate.count)};
            dead = fate.dead;
        }
        assert_true(steps <= 3);
    }
    const kafka_header twice[] = {{COUNT, "\0", 1}, {COUNT, "\310", 1}};
    assert_int_equal(tracker_decide(twice, 2, COUNT, 3, KMQ_RETRY_CRASH, 0).count, 1);
}

static size_t rewrite(const kafka_header *in, size_t n, bool dead, kafka_header *out, tracker_stamp *stamp)
{
    tracker_source source = {.topic = "orders",
                             .partition = 7,
                             .offset = 123,
                             .timestamp_ms = 456,
                             .group = "shop",
                             .count_header = COUNT,
                             .cause = KMQ_RETRY_FAILED,
                             .flags = KMQ_FLAG_COUNTS,
                             .text = "boom",
                             .text_len = 4};
    tracker_fate fate = {.dead = dead, .count = 2, .deliveries = 5};
    return tracker_rewrite(&source, &fate, in, n, out, stamp);
}

static void is(const kafka_header *h, const char *name, const void *value, size_t len)
{
    assert_string_equal(h->name, name);
    assert_int_equal(h->value_len, len);
    if (len) assert_memory_equal(h->value, value, len);
}

static void others_stay_ours_are_one_each(void **state)
{
    (void)state;
    const kafka_header in[] = {text("a", "1"),
                               {COUNT, "\1", 1},
                               text("null", NULL),
                               {"a", "\0x", 2},
                               text("kmq-cause", "crash"),
                               text("kmq-due", "9"),
                               text("kmq-deliveries", "4"),
                               {COUNT, "\7", 1},
                               text("kmq-group", "other"),
                               text("kmq-error", "old"),
                               text("empty", "")};
    kafka_header out[sizeof in / sizeof in[0] + TRACKER_OWN_HEADERS];
    tracker_stamp stamp;
    size_t n = rewrite(in, sizeof in / sizeof in[0], false, out, &stamp);
    assert_int_equal(n, 10);
    is(&out[0], "a", "1", 1);
    is(&out[1], "null", NULL, 0);
    assert_null(out[1].value);
    is(&out[2], "a", "\0x", 2);
    is(&out[3], "kmq-due", "9", 1);
    is(&out[4], "empty", "", 0);
    assert_non_null(out[4].value);
    is(&out[5], COUNT, "\2", 1);
    is(&out[6], "kmq-deliveries", "5", 1);
    is(&out[7], "kmq-cause", "failed", 6);
    is(&out[8], "kmq-group", "shop", 4);
    is(&out[9], "kmq-origin", "orders/7/123/456", 16);
}

static void the_first_origin_is_kept_and_dead_letters_say_why(void **state)
{
    (void)state;
    const kafka_header in[] = {text("kmq-origin", "first/0/1/2"), text("x", "y")};
    kafka_header out[2 + TRACKER_OWN_HEADERS];
    tracker_stamp stamp;
    size_t n = rewrite(in, 2, true, out, &stamp);
    assert_int_equal(n, 7);
    is(&out[5], "kmq-origin", "first/0/1/2", 11);
    is(&out[6], "kmq-error", "boom", 4);
}

static void a_pointer_says_where_the_original_is(void **state)
{
    (void)state;
    const kafka_header in[] = {text("x", "y"), text("kmq-origin", "first/0/1/2"), text("kmq-pointer", "old"),
                               text("kmq-value-bytes", "1")};
    kafka_header out[4 + TRACKER_OWN_HEADERS];
    tracker_stamp stamp;
    tracker_source source = {.topic = "orders",
                             .partition = 7,
                             .offset = 123,
                             .timestamp_ms = 456,
                             .group = "shop",
                             .count_header = COUNT,
                             .text = "boom",
                             .text_len = 4,
                             .extent = TRACKER_POINTER,
                             .value_len = 5000000};
    tracker_fate fate = {.dead = true, .count = 2, .deliveries = 5};
    assert_int_equal(tracker_rewrite(&source, &fate, in, 4, out, &stamp), 9);
    is(&out[0], "x", "y", 1);
    is(&out[5], "kmq-origin", "first/0/1/2", 11);
    is(&out[6], "kmq-error", "boom", 4);
    is(&out[7], "kmq-pointer", "orders/7/123/456", 16);
    is(&out[8], "kmq-value-bytes", "5000000", 7);
    source.extent = TRACKER_BARE_POINTER;
    assert_int_equal(tracker_rewrite(&source, &fate, in, 4, out, &stamp), 7);
    is(&out[0], COUNT, "\2", 1);
    is(&out[4], "kmq-origin", "first/0/1/2", 11);
    is(&out[5], "kmq-pointer", "orders/7/123/456", 16);

    tracker_payload payload = {.key_len = 3, .value_len = 50, .n_headers = 1, .headers = (kafka_header *)(uintptr_t)in};
    assert_int_equal(tracker_payload_written(&payload, TRACKER_WHOLE), 55);
    assert_int_equal(tracker_payload_written(&payload, TRACKER_POINTER), 5);
    assert_int_equal(tracker_payload_written(&payload, TRACKER_BARE_POINTER), 0);
}

static void extreme_numbers_fit(void **state)
{
    (void)state;
    char topic[250];
    memset(topic, 't', 249);
    topic[249] = 0;
    tracker_source source = {.topic = topic,
                             .partition = INT32_MIN,
                             .offset = INT64_MIN,
                             .timestamp_ms = INT64_MIN,
                             .group = "g",
                             .count_header = "c"};
    tracker_fate fate = {.count = INT32_MAX, .deliveries = INT64_MAX};
    kafka_header out[TRACKER_OWN_HEADERS];
    tracker_stamp stamp;
    assert_int_equal(tracker_rewrite(&source, &fate, NULL, 0, out, &stamp), 5);
    assert_int_equal(out[4].value_len, 249 + 1 + 11 + 1 + 20 + 1 + 20);
    kafka_header many = text("kmq-deliveries", "99999999999999999999999999");
    assert_true(tracker_decide(&many, 1, "c", 3, KMQ_RETRY_CRASH, 0).deliveries > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lapsed_lease_counts_a_retry_says_for_itself),
        cmocka_unit_test(delivered_one_and_n_times),
        cmocka_unit_test(broken_counters_still_end),
        cmocka_unit_test(others_stay_ours_are_one_each),
        cmocka_unit_test(the_first_origin_is_kept_and_dead_letters_say_why),
        cmocka_unit_test(a_pointer_says_where_the_original_is),
        cmocka_unit_test(extreme_numbers_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
