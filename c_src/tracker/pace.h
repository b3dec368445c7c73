/* pace - the clocks of the tracker that need no I/O: the log time of a marker partition, the rate of redelivery, and how far ahead of its
 * time what is due is read.
 *
 *      timestamp of a marker ---(- shift)---> log time (running maximum; what the lease book is fed with and decisions are made by)
 *                                   |
 *      monotonic clock --- pace ----+   pace = log time at the moment of being caught up + monotonic time since
 *
 *                    pace - slack        pace        pace + slack
 *      ------------------[------------------+-----------------]------------------> a timestamp
 *        only a CLOCK of our own,                                 the broker's clock has jumped: what is beyond
 *        sent later than that, may say it:                        goes into shift
 *        the broker's clock fell back
 *
 * Once caught up, log time stays within the slack of the monotonic clock's pace, whatever one broker's (or with CreateTime: one
 * client's) clock does: a jump forward does not expire everybody, a fall back does not stop time. Before that (replay) timestamps
 * count as they are. Deadlines and decisions live on the same axis, so that a shift makes neither early nor late.
 *
 * Invariants: (1) log_ms never goes back;  (2) paced: a fed timestamp <= pace + slack.
 * Times of brokers are clamped to 0 .. 2^61, so that sums cannot overflow.  Costs: O(1).  Thread rule: one owner. No I/O, no clock. */
#ifndef TRACKER_PACE_H
#define TRACKER_PACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TRACKER_SLACK_MS = 5000 };
#define TRACKER_NOT_OURS INT64_MIN

typedef struct tracker_clock {
    bool paced;
    int64_t log_ms;  /* running maximum of what was fed */
    int64_t read_ms; /* monotonic time of the last record read */
    int64_t anchor_log_ms, anchor_ms;
    int64_t shift_ms; /* log time = timestamp - shift */
} tracker_clock;

void tracker_clock_init(tracker_clock *clock, int64_t now_ms);
/* A record was read at now_ms. sent_ms: when a CLOCK of our own was sent, else TRACKER_NOT_OURS. Returns the timestamp to give to the book. */
int64_t tracker_clock_feed(tracker_clock *clock, int64_t timestamp_ms, int64_t now_ms, int64_t sent_ms);
/* An absolute time of a record (PARK) on the clock's axis. */
int64_t tracker_clock_shifted(const tracker_clock *clock, int64_t epoch_ms);
/* Caught up: from here on the pace holds. */
void tracker_clock_pace(tracker_clock *clock, int64_t now_ms);
/* A lower bound of the broker's time now: worth a CLOCK when it says that something is due, never worth a decision. */
int64_t tracker_clock_estimate(const tracker_clock *clock, int64_t now_ms);
/* Milliseconds until the estimate reaches due_ms: 0 = it has; INT64_MAX = never. */
int64_t tracker_clock_wait(const tracker_clock *clock, int64_t due_ms, int64_t now_ms);

/* A token bucket; per_second 0 = no limit. Begins with a quarter of a second's worth and holds a second's: what a pause of the machine takes is made up for. */
typedef struct tracker_rate {
    int64_t per_second;
    int64_t level; /* thousandths of a token */
    int64_t at_ms;
} tracker_rate;

void tracker_rate_init(tracker_rate *rate, int64_t per_second, int64_t now_ms);
/* Takes up to want tokens; returns how many. */
size_t tracker_rate_take(tracker_rate *rate, size_t want, int64_t now_ms);
void tracker_rate_back(tracker_rate *rate, size_t tokens);
int64_t tracker_rate_wait(const tracker_rate *rate, int64_t now_ms); /* until there is one token */

/* When a partition is gone over for what is soon due, and how far ahead (ahead.c).
 *
 *      now        + period     + span
 *       |------------|------------|------------------> due
 *       '- the next pass here     '- as far as a pass reads ahead: span = 2 periods
 *
 * A period is four times as long as a pass takes: so there is always time for other work, and a large partition is read less often, and
 * further ahead. How long a pass takes changes with what else the machine has to do. One that took longer than the one before asks for
 * a longer period, but has itself only read as far ahead as the shorter one had it. The next one then begins early enough to be over
 * before that is used up, even if it takes twice as long again; with a pass's time between two, at least. The first one, whose
 * client has yet to connect, begins TRACKER_LEAD_FIRST_MS before its time. */
enum {
    TRACKER_LEAD_MS = 500, /* a period, at least */
    TRACKER_LEAD_MAX_MS = 5000,
    TRACKER_LEAD_FIRST_MS = 4000,
    TRACKER_LEAD_COLD_MS = 30000 /* without a pass: the client is gone */
};

typedef struct tracker_lead {
    int64_t period_ms;
    int64_t at_ms;   /* no pass before */
    int64_t done_ms; /* the last one */
    bool failed;     /* it did */
} tracker_lead;

void tracker_lead_init(tracker_lead *lead);
int64_t tracker_lead_span(const tracker_lead *lead, int64_t now_ms);
void tracker_lead_none(tracker_lead *lead, int64_t now_ms); /* there is nothing to read yet */
/* A pass is over. ahead_ms: until all that it has read is due. failed: it did not come to its end, most often because its time was over. */
void tracker_lead_done(tracker_lead *lead, int64_t now_ms, int64_t took_ms, int64_t ahead_ms, bool failed);

#endif
