/* pace: the log time held to the monotonic clock, and the token bucket. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "pace.h"

#define T0 INT64_C(1700000000000)
enum { HOUR = 3600000 };

static tracker_clock caught_up(void)
{
    tracker_clock clock;
    tracker_clock_init(&clock, 0);
    assert_int_equal(tracker_clock_feed(&clock, T0, 0, TRACKER_NOT_OURS), T0);
    tracker_clock_pace(&clock, 0);
    return clock;
}

static void replay_takes_timestamps_as_they_are(void **state)
{
    (void)state;
    tracker_clock clock;
    tracker_clock_init(&clock, 0);
    assert_int_equal(tracker_clock_feed(&clock, T0, 0, TRACKER_NOT_OURS), T0);
    assert_int_equal(tracker_clock_feed(&clock, T0 + HOUR, 1, TRACKER_NOT_OURS), T0 + HOUR);
    assert_int_equal(tracker_clock_feed(&clock, T0, 2, TRACKER_NOT_OURS), T0);
    assert_int_equal(clock.log_ms, T0 + HOUR);
}

static void a_jump_forward_expires_nobody(void **state)
{
    (void)state;
    tracker_clock clock = caught_up();
    assert_int_equal(tracker_clock_feed(&clock, T0 + 1000 + HOUR, 1000, TRACKER_NOT_OURS),
                     T0 + 1000 + TRACKER_SLACK_MS);
    /* from here on the broker's new time is on the pace */
    assert_int_equal(tracker_clock_feed(&clock, T0 + 2000 + HOUR, 2000, TRACKER_NOT_OURS),
                     T0 + 2000 + TRACKER_SLACK_MS);
    assert_int_equal(tracker_clock_wait(&clock, T0 + 30000, 2000), 30000 - 2000 - TRACKER_SLACK_MS);
    /* what names an absolute time moves with it */
    assert_int_equal(tracker_clock_shifted(&clock, T0 + HOUR + 10000), T0 + 10000 + TRACKER_SLACK_MS);
}

static void many_small_steps_cannot_run_away(void **state)
{
    (void)state;
    tracker_clock clock = caught_up();
    for (int64_t i = 1; i < 1000; i++) {
        tracker_clock_feed(&clock, T0 + i * 4000, i, TRACKER_NOT_OURS);
        assert_true(clock.log_ms <= T0 + i + TRACKER_SLACK_MS);
    }
}

static void a_fall_back_does_not_stop_time(void **state)
{
    (void)state;
    tracker_clock clock = caught_up();
    /* records of others may be read late: they prove nothing */
    assert_int_equal(tracker_clock_feed(&clock, T0, 60000, TRACKER_NOT_OURS), T0);
    assert_int_equal(clock.shift_ms, 0);
    /* the estimate still asks for a CLOCK in time */
    assert_true(tracker_clock_wait(&clock, T0 + 30000, 60000) == 0);
    /* and that one, sent at 60 s and stamped an hour before, does */
    assert_int_equal(tracker_clock_feed(&clock, T0 + 60000 - HOUR, 60010, 60000), T0 + 60000 - TRACKER_SLACK_MS);
    assert_int_equal(tracker_clock_feed(&clock, T0 + 61000 - HOUR, 61000, TRACKER_NOT_OURS),
                     T0 + 61000 - TRACKER_SLACK_MS);
    /* one client's wrong stamp (CreateTime) leaves no lasting mark */
    clock = caught_up();
    tracker_clock_feed(&clock, T0 + 1000 + HOUR, 1000, TRACKER_NOT_OURS);
    tracker_clock_feed(&clock, T0 + 20000, 20010, 20000);
    assert_int_equal(clock.log_ms, T0 + 15000);
    tracker_clock_feed(&clock, T0 + 30000, 30010, 30000);
    assert_true(clock.log_ms >= T0 + 25000 && clock.log_ms <= T0 + 30000);
}

static void a_slow_clock_record_is_no_fall_back(void **state)
{
    (void)state;
    tracker_clock clock = caught_up();
    assert_int_equal(tracker_clock_feed(&clock, T0 + 1000, 90000, 1000), T0 + 1000);   /* read late, sent at 1 s */
    assert_int_equal(tracker_clock_feed(&clock, T0 + 91000, 91000, 2000), T0 + 91000); /* written late */
    assert_int_equal(clock.shift_ms, 0);
}

static void wild_times_do_not_overflow(void **state)
{
    (void)state;
    static const int64_t wild[] = {INT64_MIN, -1, 0, 1, INT64_MAX, INT64_MAX - 1, INT64_C(1) << 61};
    tracker_clock clock = caught_up();
    int64_t last = clock.log_ms;
    uint32_t seed = 7;
    for (int64_t i = 0; i < 100000; i++) {
        seed = seed * 1664525u + 1013904223u;
        tracker_clock_feed(&clock, wild[(seed >> 8) % 7], i, (seed >> 16) % 2 ? i : TRACKER_NOT_OURS);
        assert_true(clock.log_ms >= last && clock.log_ms <= T0 + i + TRACKER_SLACK_MS);
        last = clock.log_ms;
        tracker_clock_shifted(&clock, wild[(seed >> 12) % 7]);
    }
    assert_true(tracker_clock_wait(&clock, INT64_MAX, 0) == INT64_MAX);
}

static void the_rate_is_kept(void **state)
{
    (void)state;
    static const int64_t rates[] = {1, 7, 1000, 50000};
    for (size_t r = 0; r < 4; r++) {
        tracker_rate rate;
        tracker_rate_init(&rate, rates[r], 0);
        size_t taken = 0;
        for (int64_t now = 0; now <= 20000; now += 1 + tracker_rate_wait(&rate, now))
            taken += tracker_rate_take(&rate, 1000, now);
        int64_t least = rates[r] * 20, most = rates[r] * 20 + rates[r] / 4 + 1;
        if ((int64_t)taken < least * 98 / 100 || (int64_t)taken > most) fail_msg("rate %d: %zu", (int)rates[r], taken);
    }
    tracker_rate rate;
    tracker_rate_init(&rate, 0, 0);
    assert_int_equal(tracker_rate_take(&rate, 123456, 0), 123456);
    assert_int_equal(tracker_rate_wait(&rate, 0), 0);
    tracker_rate_init(&rate, 10, 0);
    assert_int_equal(tracker_rate_take(&rate, 100, 0), 2);
    tracker_rate_back(&rate, 1);
    assert_int_equal(tracker_rate_take(&rate, 100, 0), 1);
    /* a pause is made up for, up to a second's worth */
    assert_int_equal(tracker_rate_take(&rate, 100, 800), 8);
    assert_int_equal(tracker_rate_take(&rate, 100, 60000), 10);
    tracker_rate_back(&rate, 1000);
    assert_int_equal(tracker_rate_take(&rate, 10000, 60000), 10);
}

/* Passes one after the other: when each begins, and up to where all that is due has been read. */
typedef struct passes {
    tracker_lead lead;
    int64_t now, covered;
} passes;

static void pass(passes *p, int64_t took)
{
    int64_t begin = p->now > p->lead.at_ms ? p->now : p->lead.at_ms, span = tracker_lead_span(&p->lead, begin);
    bool failed = took > span; /* its time is over */
    p->now = begin + (failed ? span : took);
    if (!failed && begin + span > p->covered) p->covered = begin + span;
    tracker_lead_done(&p->lead, p->now, p->now - begin, begin + span - p->now, failed);
}

static void what_is_due_is_read_ahead_without_a_gap(void **state)
{
    (void)state;
    passes p = {.now = 1000000};
    uint32_t seed = 11;
    int64_t took = 900; /* with a client that has yet to connect */
    tracker_lead_init(&p.lead);
    pass(&p, took);
    for (int i = 0; i < 100000; i++) {
        seed = seed * 1664525u + 1013904223u;
        took = 1 + (int64_t)(seed >> 8) % (2 * took); /* up to twice as long as the one before */
        if (took > 2500) took = 2500;
        int64_t covered = p.covered, before = p.now;
        pass(&p, took);
        if (p.now > covered) fail_msg("pass %d, of %d ms: a gap of %d ms", i, (int)took, (int)(p.now - covered));
        assert_false(p.lead.failed);
        assert_true(p.now - before <= TRACKER_LEAD_MAX_MS + 2500);
    }
}

static void a_partition_is_not_read_all_the_time(void **state)
{
    (void)state;
    static const int64_t took[] = {1, 100, 125, 400, 1000, 3000};
    for (size_t i = 0; i < 6; i++) {
        passes p = {.now = 1000000};
        tracker_lead_init(&p.lead);
        for (int n = 0; n < 10; n++) pass(&p, took[i]);
        int64_t since = p.now, reading = 0;
        for (int n = 0; n < 100; n++, reading += took[i]) pass(&p, took[i]);
        /* a fifth of the time, more only where one takes longer than a quarter of the longest period */
        int64_t most = took[i] > TRACKER_LEAD_MAX_MS / 4 ? 2 : 5;
        assert_true(reading * most <= (p.now - since) + took[i]);
        assert_true(p.covered > p.now);
    }
}

static void one_that_failed_is_made_again_with_more_time(void **state)
{
    (void)state;
    passes p = {.now = 1000000};
    tracker_lead_init(&p.lead);
    assert_int_equal(tracker_lead_span(&p.lead, p.now), TRACKER_LEAD_FIRST_MS);
    pass(&p, 10);
    assert_int_equal(p.lead.at_ms, p.now + TRACKER_LEAD_MS);
    assert_int_equal(tracker_lead_span(&p.lead, p.now), 2 * TRACKER_LEAD_MS);
    pass(&p, 5000);
    assert_true(p.lead.failed);
    assert_int_equal(p.lead.at_ms, p.now + TRACKER_LEAD_MS);
    assert_int_equal(tracker_lead_span(&p.lead, p.now), 2 * TRACKER_LEAD_MAX_MS);
    /* what fails again and again is left in peace for a while */
    pass(&p, 50000);
    assert_int_equal(p.lead.at_ms, p.now + TRACKER_LEAD_MAX_MS);
    pass(&p, 100);
    assert_false(p.lead.failed);
    assert_int_equal(p.lead.at_ms, p.now + TRACKER_LEAD_MS);
    /* nothing there: not asked for with each turn of the loop */
    tracker_lead_none(&p.lead, p.now + 5000);
    assert_int_equal(p.lead.at_ms, p.now + 5000 + TRACKER_LEAD_MS);
    /* a client that has been closed */
    assert_int_equal(tracker_lead_span(&p.lead, p.now + TRACKER_LEAD_COLD_MS + 1), TRACKER_LEAD_FIRST_MS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replay_takes_timestamps_as_they_are),
        cmocka_unit_test(a_jump_forward_expires_nobody),
        cmocka_unit_test(many_small_steps_cannot_run_away),
        cmocka_unit_test(a_fall_back_does_not_stop_time),
        cmocka_unit_test(a_slow_clock_record_is_no_fall_back),
        cmocka_unit_test(wild_times_do_not_overflow),
        cmocka_unit_test(the_rate_is_kept),
        cmocka_unit_test(what_is_due_is_read_ahead_without_a_gap),
        cmocka_unit_test(a_partition_is_not_read_all_the_time),
        cmocka_unit_test(one_that_failed_is_made_again_with_more_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
