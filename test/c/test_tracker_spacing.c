/* The text of a backoff, and waits that are the same whoever computes them. */
#include "kmq_test.h"

#include <string.h>

#include "spacing.h"

static void test_texts(void **state)
{
    static const char *const good[] = {"exponential 1000 300000 2.0 0.2", "linear 0 10 5 0", "list 0.0 5",
                                       "list 0.5 5 10 15"};
    static const char *const bad[] = {"",
                                      "list",
                                      "list 0.0",
                                      "list x 5",
                                      "list 0.0 -5",
                                      "exponential",
                                      "exponential 1 2 3",
                                      "exponential 1 2 3 0 5",
                                      "exponential a 2 3 0",
                                      "exponential 1 2 nan 0",
                                      "linear 99999999999999999999 2 3 0",
                                      "quadratic 1 2 3 0"};
    (void)state;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        tracker_spacing spacing = {.given = false};
        if (!tracker_spacing_parse(good[i], &spacing) || !spacing.given) fail_msg("%s", good[i]);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tracker_spacing spacing = {.given = false};
        if (tracker_spacing_parse(bad[i], &spacing) || spacing.given) fail_msg("%s", bad[i]);
    }
    char many[1024] = "list 0";
    for (int i = 0; i < 65; i++) strcat(many, " 5");
    tracker_spacing spacing;
    assert_false(tracker_spacing_parse(many, &spacing));
    many[strlen(many) - 2] = 0;
    assert_true(tracker_spacing_parse(many, &spacing));
    assert_int_equal(spacing.backoff.n_list, 64);
}

static void test_waits(void **state)
{
    tracker_spacing none = {.given = false}, list, jitter;
    (void)state;
    assert_int_equal(tracker_spacing_ms(&none, 3, 1, 5), 0);
    assert_true(tracker_spacing_parse("list 0.0 100 200", &list));
    tracker_spacing copy = list;
    memset(&list, 0, sizeof list);
    assert_int_equal(tracker_spacing_ms(&copy, 1, 1, 5), 100);
    assert_int_equal(tracker_spacing_ms(&copy, 2, 1, 5), 200);
    assert_int_equal(tracker_spacing_ms(&copy, INT32_MAX, 1, 5), 200);
    assert_true(tracker_spacing_parse("exponential 1000 8000 2 0.2", &jitter));
    int64_t least = INT64_MAX, most = 0;
    for (int64_t offset = 0; offset < 1000; offset++) {
        int64_t wait = tracker_spacing_ms(&jitter, 2, 7, offset);
        assert_int_equal(wait, tracker_spacing_ms(&jitter, 2, 7, offset));
        assert_true(wait >= 1600 && wait <= 2400);
        if (wait < least) least = wait;
        if (wait > most) most = wait;
    }
    assert_true(least < 1650 && most > 2350); /* spread over all that it may be */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_texts), cmocka_unit_test(test_waits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
