/* pace - see pace.h. */
#include "pace.h"

#define TIME_MAX (INT64_C(1) << 61)

static int64_t clamp(int64_t ms) { return ms < 0 ? 0 : ms > TIME_MAX ? TIME_MAX : ms; }

void tracker_clock_init(tracker_clock *clock, int64_t now_ms) { *clock = (tracker_clock){.read_ms = now_ms}; }

static int64_t pace_at(const tracker_clock *clock, int64_t mono_ms)
{
    return clock->anchor_log_ms + (mono_ms - clock->anchor_ms);
}

int64_t tracker_clock_feed(tracker_clock *clock, int64_t timestamp_ms, int64_t now_ms, int64_t sent_ms)
{
    int64_t time_ms = clamp(timestamp_ms) - clock->shift_ms;
    if (clock->paced) {
        int64_t latest = pace_at(clock, now_ms) + TRACKER_SLACK_MS;
        if (time_ms > latest) {
            clock->shift_ms += time_ms - latest;
            time_ms = latest;
        } else if (sent_ms != TRACKER_NOT_OURS) {
            int64_t earliest = pace_at(clock, sent_ms) - TRACKER_SLACK_MS;
            if (time_ms < earliest) {
                clock->shift_ms -= earliest - time_ms;
                time_ms = earliest;
            }
        }
    }
    time_ms = clamp(time_ms);
    if (time_ms > clock->log_ms) clock->log_ms = time_ms;
    clock->read_ms = now_ms;
    return time_ms;
}

int64_t tracker_clock_shifted(const tracker_clock *clock, int64_t epoch_ms)
{
    return clamp(clamp(epoch_ms) - clock->shift_ms);
}

void tracker_clock_pace(tracker_clock *clock, int64_t now_ms)
{
    clock->paced = true;
    clock->anchor_log_ms = clock->log_ms;
    clock->anchor_ms = now_ms;
}

int64_t tracker_clock_estimate(const tracker_clock *clock, int64_t now_ms)
{
    int64_t estimate = clock->log_ms + (now_ms - clock->read_ms);
    /* A log time that stands still (the broker's clock fell back) is only set right by a CLOCK: the pace asks for one. */
    if (clock->paced) {
        int64_t pace = pace_at(clock, now_ms) - TRACKER_SLACK_MS;
        if (pace > estimate) estimate = pace;
    }
    return estimate;
}

int64_t tracker_clock_wait(const tracker_clock *clock, int64_t due_ms, int64_t now_ms)
{
    if (due_ms == INT64_MAX) return INT64_MAX;
    int64_t estimate = tracker_clock_estimate(clock, now_ms);
    return due_ms <= estimate ? 0 : due_ms - estimate;
}

void tracker_rate_init(tracker_rate *rate, int64_t per_second, int64_t now_ms)
{
    int64_t most = INT64_C(1000000000);
    per_second = per_second < 0 ? 0 : per_second > most ? most : per_second;
    *rate = (tracker_rate){.per_second = per_second, .level = per_second * 250, .at_ms = now_ms};
    if (rate->level < 1000) rate->level = 1000;
}

static int64_t level_at(const tracker_rate *rate, int64_t now_ms)
{
    int64_t most = rate->per_second * 1000;
    int64_t elapsed = now_ms - rate->at_ms;
    if (elapsed < 0) elapsed = 0;
    if (elapsed > 1000000) elapsed = 1000000;
    int64_t level = rate->level + elapsed * rate->per_second;
    return level > most ? most : level;
}

size_t tracker_rate_take(tracker_rate *rate, size_t want, int64_t now_ms)
{
    if (rate->per_second == 0) return want;
    rate->level = level_at(rate, now_ms);
    rate->at_ms = now_ms;
    size_t have = (size_t)(rate->level / 1000);
    size_t taken = want < have ? want : have;
    rate->level -= (int64_t)taken * 1000;
    return taken;
}

void tracker_rate_back(tracker_rate *rate, size_t tokens)
{
    if (rate->per_second) rate->level += (int64_t)tokens * 1000;
}

int64_t tracker_rate_wait(const tracker_rate *rate, int64_t now_ms)
{
    if (rate->per_second == 0) return 0;
    int64_t level = level_at(rate, now_ms);
    return level >= 1000 ? 0 : (1000 - level + rate->per_second - 1) / rate->per_second;
}

/* ------------------------------------------------------------------ reading ahead */

enum { PASSES = 4 /* of a pass's time a period */ };

static int64_t within(int64_t ms, int64_t lo, int64_t hi) { return ms < lo ? lo : ms > hi ? hi : ms; }

void tracker_lead_init(tracker_lead *lead)
{
    *lead = (tracker_lead){.period_ms = TRACKER_LEAD_MS, .done_ms = INT64_MIN / 2};
}

int64_t tracker_lead_span(const tracker_lead *lead, int64_t now_ms)
{
    return now_ms - lead->done_ms > TRACKER_LEAD_COLD_MS ? TRACKER_LEAD_FIRST_MS : 2 * lead->period_ms;
}

void tracker_lead_none(tracker_lead *lead, int64_t now_ms) { lead->at_ms = now_ms + lead->period_ms; }

void tracker_lead_done(tracker_lead *lead, int64_t now_ms, int64_t took_ms, int64_t ahead_ms, bool failed)
{
    int64_t pause_ms;
    if (failed) { /* the next one has more time; after a second failure not now */
        pause_ms = lead->failed ? TRACKER_LEAD_MAX_MS : TRACKER_LEAD_MS;
        lead->period_ms = TRACKER_LEAD_MAX_MS;
    } else {
        lead->period_ms = within(took_ms * PASSES, TRACKER_LEAD_MS, TRACKER_LEAD_MAX_MS);
        pause_ms = within(ahead_ms - 2 * took_ms, took_ms, lead->period_ms);
    }
    lead->failed = failed;
    lead->done_ms = now_ms;
    lead->at_ms = now_ms + pause_ms;
}
