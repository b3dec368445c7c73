/* tracker - what the files of the port program share: its parts and who owns them. Private to c_src/tracker.
 *
 *   stdin --frames--> loop ---------------------------------------------------------------> frames --> stdout (private descriptor)
 *                      |                                                                       ^ replies, events
 *      consumer of M --+-> part (one per assigned marker partition): lease book, log time, barrier, commit
 *                      |        | due offsets, below the group's commit, after a CLOCK was read back
 *                      |        v
 *      helper threads -+-> reads of Q (exact offsets; also ahead of their time), commits of the group, do topics exist
 *                      |        v
 *      producer -------+-> copies and dead letters --acknowledged--> ENDs --acknowledged--> forgotten
 *
 * Life of a due offset (its book entry stays open, so the commit cannot pass it, until its END is read back from M):
 *
 *      due --take--> reading --> planned --> sent --> acknowledged --> END pending --> END sent --> END acknowledged
 *       ^               |           |          |                          ^______________|  failed: the same bytes again
 *       |               |           |          +-- failed --> pausing
 *       |               |           +-- topic missing, denied, or takes nothing so large --> waiting at the target
 *       +-- give back --+-----------------------------------+
 *
 * Rules:
 *   (1) only the loop's thread touches what is declared here; helper threads get copies and give them back whole;
 *   (2) a part lives as long as anything refers to it (refs); `gone` says that the partition is not ours any more;
 *   (3) an END is never forgotten, not even when its partition is gone: it is sent until it is acknowledged;
 *   (4) the book changes only by what is read from M.
 *   (5) no memory = the program ends (status 3): its state is in M, its owner starts it again. */
#ifndef TRACKER_H
#define TRACKER_H

#include <ei.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "command.h"
#include "copy.h"
#include "daemon.h"
#include "frame.h"
#include "helper.h"
#include "kafka.h"
#include "heap.h"
#include "lease_book.h"
#include "marker.h"
#include "pace.h"
#include "reference.h"
#include "token.h"

enum {
    TRACKER_BATCH = 1000,            /* due offsets per read of Q */
    TRACKER_BATCH_BYTES = 8 << 20,   /* of payload kept per read */
    TRACKER_PART_ACTIVE = 4000,      /* offsets of one partition being read or copied */
    TRACKER_ACTIVE = 32000,          /* the same, of all */
    TRACKER_ACTIVE_BYTES = 96 << 20, /* of payloads read and not yet given to the producer */
    TRACKER_READS = 8,               /* reads of Q given to the helper threads */
    TRACKER_AHEAD_BYTES = 32 << 20,  /* of payloads that are not due yet */
    TRACKER_FRESH_MS = 500,          /* how long a barrier's proof holds */
    TRACKER_PAUSE_MS = 2000,         /* a copy that failed is tried again after */
    TRACKER_END_PAUSE_MS = 250,      /* an END that failed */
    TRACKER_PROBE_MS = 2000,         /* a topic that is missing is looked for every, one that refuses tried every */
    TRACKER_REFUSED_MS = 60000,      /* how long a size is known to be too large */
    TRACKER_ASK_MS = 5000,           /* time limit of a question to Kafka */
    TRACKER_READ_MS = 5000,          /* time limit of a read of Q */
    TRACKER_COMMIT_MS = 250,         /* between commits */
    TRACKER_TICK_MS = 1000,          /* gauges */
    TRACKER_REST_S = 30,             /* a helper without work closes its clients */
    TRACKER_ALARM_MS = 30000,        /* the same alarm at most every */
    TRACKER_LANES = 16               /* producers of transactions, each with a thread of its own */
};

typedef struct tracker tracker;
typedef struct tracker_part tracker_part;
typedef struct tracker_item tracker_item;
typedef struct tracker_past tracker_past;
typedef struct tracker_checkpoint tracker_checkpoint;
typedef struct tracker_lane tracker_lane;
typedef struct tracker_pass tracker_pass;

/* What was given to the producer and not yet reported; in a ring, so that nothing is lost when the producer is rebuilt. */
typedef enum tracker_send_kind {
    TRACKER_SEND_COPY,
    TRACKER_SEND_END,
    TRACKER_SEND_CLOCK,
    TRACKER_SEND_CHECKPOINT
} tracker_send_kind;
typedef struct tracker_send {
    struct tracker_send *next, *previous;
    tracker_send_kind kind;
} tracker_send;

/* An offset that waits for another try, its payload given up. */
typedef struct tracker_wait {
    struct tracker_wait *next;
    tracker_part *part;
    int64_t offset, until_ms;
} tracker_wait;
typedef struct tracker_waits {
    tracker_wait *first, *last;
    size_t n;
} tracker_waits;

/* A topic that copies go to. */
typedef enum tracker_target_state { TARGET_UNKNOWN, TARGET_ASKED, TARGET_OPEN, TARGET_MISSING } tracker_target_state;
typedef struct tracker_target {
    const char *topic;
    kafka_topic *out; /* NULL until it is known to exist */
    int n_partitions;
    tracker_target_state state;
    int64_t ask_ms; /* not asked again before */
    bool dead;      /* the dead letter topic: may have fewer partitions than Q */
    tracker_item *planned_first, *planned_last;
    size_t in_flight;
    int64_t
        solo_until_ms; /* a batch was too large: until then one copy at a time, so that only the one that is too large waits */
    tracker_waits waits;
    int64_t alarm_ms;
    /* blocked.c: what the topic refuses is tried one by one */
    tracker_waits blocked;
    bool denied, may_probe;
    bool probing;             /* one is in flight, alone */
    size_t refused_bytes;     /* the smallest size that was too large by itself; 0 = none is known */
    int64_t refused_until_ms; /* the topic may have changed: after that, not known */
    int64_t probe_ms;         /* no other before */
} tracker_target;

typedef struct tracker_queue {
    const char *topic, *markers;
    kmq_marker_scope scope;
    kafka_topic *markers_out;
    tracker_target copies, dead_letters;
} tracker_queue;

/* An END to be written, collected until the end of the loop's turn. */
typedef struct tracker_end {
    int64_t offset, copy_offset; /* -1 = no copy */
    uint8_t cause;
} tracker_end;

/* One END record, kept as bytes until it is acknowledged. */
typedef struct tracker_end_record {
    tracker_send send;
    struct tracker_end_record *next; /* while it waits to be sent again */
    tracker_queue *queue;
    int32_t partition;
    int64_t until_ms;
    uint8_t key[KMQ_MARKER_KEY_BYTES];
    size_t n;
    uint8_t bytes[];
} tracker_end_record;

/* Sums for one event. */
typedef struct tracker_sum {
    int64_t count, lateness_ms, lateness_max_ms, lateness_min_ms;
} tracker_sum;
enum { TRACKER_CAUSES = 7 };

/* txn.c's of a partition */
typedef struct tracker_txn {
    tracker_lane *lane;                      /* NULL: has none */
    bool wanted;                             /* needs one */
    bool confirm;                            /* a commit must be acknowledged before a producer is made again */
    bool dead_next;                          /* whose turn it is */
    struct tracker_item *first[2], *last[2]; /* to go out: copies, dead letters */
    int64_t retry_ms, pause_ms, void_ms;     /* not before; grows; what was decided up to then is void */
    kafka_group *group;                      /* who we were when it was decided */
} tracker_txn;

typedef enum tracker_part_state { PART_NEW, PART_REPLAY, PART_READY, PART_STOPPED } tracker_part_state;
typedef enum tracker_barrier { BARRIER_NONE, BARRIER_WANTED, BARRIER_SENT } tracker_barrier;

struct tracker_part {
    tracker_part *next;
    tracker_queue *queue;
    int32_t partition;
    int refs;
    bool gone;
    tracker_part_state state;

    kafka_queue *records;
    bool hot; /* its queue may hold more */
    kmq_lease_book book;
    tracker_clock clock;
    int64_t position;              /* the marker offset to be read next */
    tracker_witness witness, last; /* by which M is known again; the record read last */
    int64_t witness_ms;            /* not looked for again before */
    bool suspect_witness;          /* the last look failed */
    int64_t known_end;             /* of M, a lower bound */
    int64_t assigned_ms;

    /* the barrier: a CLOCK of our own, read back */
    tracker_barrier barrier;
    int64_t barrier_retry_ms;
    uint64_t clock_id;                       /* of the CLOCK that is out: its instance TLV */
    int64_t clock_sent_ms, clock_written_ms; /* 0: not yet */
    int64_t deaf_ms;                         /* it is to be read within, or the fetching has stopped; grows */
    int64_t barrier_below; /* what the group had committed before this CLOCK was sent; -1 = not asked */

    /* decisions: valid for what is due by decide_ms, until decide_until_ms of the monotonic clock */
    int64_t decide_ms, decide_until_ms;
    int64_t below;                                       /* the group's committed offset, proven by a barrier */
    int64_t asked_below, asked_ms, ask_ms, ask_pause_ms; /* last answer, when, not again before, pause that grows */
    bool asking, renewing, warm;
    int64_t warm_ms; /* since when */
    int64_t *held;   /* due, but at or above `below`: the group will fetch them itself; in flight in the book */
    size_t n_held, cap_held;

    size_t n_active, n_reads;
    size_t batch; /* adapts to the size of the records */
    bool suspect; /* its last read failed */
    int64_t read_pause_ms;
    struct tracker_ahead { /* ahead.c's */
        tracker_pass *first, *last;
        tracker_lead lead;
        int64_t wanted_ms; /* a pass has been, since; 0 = is not */
    } ahead;

    tracker_end *ends; /* of this turn of the loop */
    size_t n_ends, cap_ends;
    tracker_part *next_ending;

    int64_t committed; /* acknowledged; -1 = none that later ones must be above */
    bool committing;   /* one at a time, be it by itself or in a transaction */
    tracker_txn txn;
    tracker_reference reference;    /* the newest checkpoint that is durable; as_of -1 = none */
    int64_t reference_ms;           /* since when */
    int64_t n_loaded, loaded_ts_ms; /* what recovery found in it; its broker time */
    tracker_checkpoint *checkpoint; /* being written */
    int64_t checkpoint_ms;          /* no other before */
    size_t checkpoint_bytes;        /* size of the last one */
    int64_t trimmed, trim_ms, trim_by_ms;
    bool trimming;

    struct tracker_mark {
        int64_t position, at_ms;
    } marks[64]; /* when what was read: the age of the oldest open marker */
    size_t n_marks;
    int64_t mark_ms, mark_every_ms;

    int64_t n_read, n_malformed, n_foreign, told_malformed, told_foreign, odd_offset;
    int64_t n_late, told_late; /* acks that came after the copy */
    tracker_sum redelivered[TRACKER_CAUSES], dead_lettered[TRACKER_CAUSES];
    int64_t n_gone, gone_offset;
    int64_t alarm_ms;
};

struct tracker_item {
    tracker_send send;
    tracker_item *next;
    tracker_part *part;
    tracker_target *target;
    int64_t offset, due_ms;
    uint8_t cause, flags;
    bool found; /* false: gone from Q */
    bool known; /* false: it could not be read */
    bool alone; /* sent with no other copy beside it */
    bool probe; /* does the topic still refuse it? */
    tracker_extent extent;
    size_t written; /* bytes of it, of that extent */
    char *text;     /* of a RETRY */
    size_t text_len;
    tracker_payload *payload;
    tracker_fate fate;
};

/* Alarms that are about no part and no target; each is told at most every TRACKER_ALARM_MS. */
typedef enum tracker_alarm_kind {
    ALARM_TOKEN,
    ALARM_CHECK,
    ALARM_PRODUCER,
    ALARM_COMMIT,
    ALARM_ASSIGN,
    ALARM_READ,
    ALARM_ASK,
    ALARM_METRICS,
    ALARM_KINDS
} tracker_alarm_kind;

/* Of each of these: whether it is one trouble with the last one of its kind. */
typedef struct tracker_trouble {
    int64_t since_ms, heard_ms;
} tracker_trouble;

typedef enum tracker_mode {
    MODE_IDLE,     /* not configured */
    MODE_CHECKING, /* do the topics exist */
    MODE_RUNNING,
    MODE_REVOKING, /* an answer to REVOKE is due: what is in flight first */
    MODE_STOPPING, /* the same, then out of the group */
    MODE_LEAVING,  /* a static member has to say so: unsubscribed, its partitions to be revoked */
    MODE_CLOSING,
    MODE_ENDED
} tracker_mode;

struct tracker {
    frame_in in;
    frame_out out;
    ei_x_buff scratch;
    int signal_fd;
    int records_wake[2], control_wake[2], producer_wake[2], jobs_wake[2]; /* [0] read, [1] written */
    bool input_ended;
    int status; /* to exit with */

    tracker_daemon *daemon; /* NULL: events are frames for the owner */
    int64_t metrics_ms, metrics_interval_ms;

    tracker_mode mode;
    int64_t now_ms, started_ms, woken_ms;
    int64_t step_until_ms; /* of REVOKING, STOPPING, CLOSING */
    bool final_commit;     /* the last commit of a revoke has been sent */
    int64_t stop_id;       /* the command to answer; 0 = none */
    bool closing_begun;

    tracker_config config;
    tracker_queue *queues;
    kafka_consumer *consumer;
    kafka_producer *producer;
    bool sandbox;

    tracker_part *parts;
    _Atomic uint32_t epoch; /* of the assignment; the loop's, but helper threads look whether theirs is over */
    int n_commits;
    int64_t commit_ms, tick_ms, sums_ms, check_ms;
    int64_t recover_retry_ms;
    tracker_past *pasts;         /* of partitions that were given up */
    helper_job *recover_waiting; /* failed: tried again at recover_retry_ms */
    bool checking;

    tracker_token token;
    uint32_t token_seen;    /* the version that consumer and producer have */
    int64_t token_ask_ms;   /* when the next one is asked for, or read; INT64_MAX = never */
    const char *token_file; /* the daemon's; NULL = the owner gives tokens */

    uint64_t instance; /* high bits random, low bits count CLOCKs */
    tracker_lane *lanes[TRACKER_LANES];
    size_t n_txns; /* that run */
    void *threads
        [9]; /* what the helper threads keep: one that asks, one that trims, one that loads, five that read, one ahead */
    tracker_send sent; /* ring */
    size_t n_copies, n_ends;
    size_t n_active, active_bytes, n_reads, ahead_bytes;
    bool reading_ahead;
    tracker_waits pauses;
    kmq_heap spaced;      /* crashed, or in work for too long: not before their backoff is over */
    tracker_part *ending; /* parts with ENDs to be written, gone ones too */
    tracker_end_record *ends_first, *ends_last;
    tracker_rate rate;
    bool more_reports, check_fatal;
    int64_t producer_retry_ms;

    helper_pool asks, loads, reads, aheads;
    bool asking_commits;
    bool witnessing; /* one partition at a time */
    int64_t witness_ms;
    int64_t alarm_ms[ALARM_KINDS];
    tracker_trouble troubles[ALARM_KINDS];
    kafka_outage outage; /* of consumer and producer */
    int64_t n_redelivered, n_dead_lettered, n_gone, n_told /* of their sum */;
    int64_t n_ahead /* of what was due: read before */;
};

/* loop.c */
/* Serves frames until the end. signal_fd: readable when a signal asks for the end. Returns the exit status. */
int tracker_run(int in_fd, int out_fd, int signal_fd);
/* The same without an owner. Takes settings->config. */
int tracker_run_daemon(tracker_settings *settings, int out_fd, int signal_fd);
_Noreturn void tracker_no_memory(void);
void *tracker_alloc(size_t size); /* zeroed; never NULL */
int64_t tracker_now_ms(void);
void tracker_event_send(tracker *t);                              /* what was written into t->scratch */
tracker_queue *tracker_queue_of(tracker *t, const char *markers); /* NULL: none of ours */
void tracker_token_want(tracker *t);                              /* a client asked for one */

/* tell.c */
/* Begins an event about a part: topic, partition, and more_pairs to follow. */
void tracker_part_event(tracker *t, const char *name, const tracker_part *part, int more_pairs);
void tracker_partitions_event(tracker *t, const char *name, const kafka_partition *partitions, size_t n);
/* {event, alarm, #{reason, topic, partition, text}}; at most every TRACKER_ALARM_MS per last_ms. */
void tracker_alarm(tracker *t, int64_t *last_ms, const char *reason, const char *topic, int32_t partition,
                   const char *format, ...) __attribute__((format(printf, 6, 7)));
void tracker_error_event(tracker *t, const kafka_error *err);
void tracker_log_event(tracker *t, int level, const char *text);
/* An error of a client: an outage is told once, and by the step that it is over. */
void tracker_client_error(tracker *t, const kafka_error *err);
void tracker_outage_step(tracker *t);
/* What is tried again: {event, passing, #{reason, name, code, retriable, fatal, text}}, or an alarm. */
void tracker_failed(tracker *t, tracker_alarm_kind kind, const kafka_error *err, const char *reason, const char *what);

/* recover.c: where to begin */
void tracker_recover(tracker *t, const kafka_partition *partitions,
                     size_t n); /* assigned: parts appear when it is known */
void tracker_recover_again(tracker *t);
/* Its position is not in the log any more, or (anew) the topic is another one: begins afresh. */
void tracker_part_lost(tracker *t, tracker_part *part, bool anew);

/* checkpoint.c */
void tracker_checkpoint_step(tracker *t, tracker_part *part);
void tracker_checkpoint_report(tracker *t, tracker_send *send, int error, int64_t offset);
void tracker_checkpoint_drop(tracker_part *part); /* the partition is gone */
/* For tests: the bytes of a part that is not with the producer yet; NULL = there is none. */
const uint8_t *tracker_checkpoint_part(const tracker_checkpoint *checkpoint, size_t i, size_t *n);
void tracker_trim_step(tracker *t, tracker_part *part);

/* client.c: what a helper thread keeps: clients that block, opened when first needed. Safe in that thread only. NULL: see err. */
kafka_admin *tracker_group_admin(void *thread, kafka_error *err);   /* reads the consumer group's commits */
kafka_admin *tracker_tracker_admin(void *thread, kafka_error *err); /* reads the tracker group's */
kafka_reader *tracker_reader(void *thread, kafka_error *err);
/* Two that see M's and Q's ends: the high watermark, and where the first open transaction begins. */
kafka_admin *tracker_end_admin(void *thread, bool stable, kafka_error *err);
/* Not kept: the caller's. Its id is "<tracker group>/<marker topic>/<partition>". */
kafka_txn *tracker_txn_open(const tracker_config *config, const char *markers, int32_t partition, kafka_error *err);
void *tracker_thread_new(const tracker_config *config, tracker_token *token);
/* Closes its clients; the next job opens what it needs. */
void tracker_thread_rest(void *thread);

/* ends.c. out gets the record's key offset and value, which are its own. Sorts ends. */
typedef void tracker_ends_out(void *ctx, int64_t key_offset, const uint8_t *bytes, size_t n);
void tracker_ends_encode(const kmq_marker_scope *scope, bool kmq_format, tracker_end *ends, size_t n,
                         tracker_ends_out *out, void *ctx);

/* txn.c: redelivery in transactions */
bool tracker_txn_ready(tracker *t, tracker_part *part); /* its id is ours; if not, that is seen to */
bool tracker_txn_has(const tracker_part *part);         /* the same, only asked */
bool tracker_txn_may_take(const tracker *t, const tracker_part *part);
void tracker_txn_add(tracker *t, tracker_item *item); /* takes it */
void tracker_txn_step(tracker *t);
int64_t tracker_txn_wait(const tracker *t);
helper_job *tracker_txn_done(tracker *t);                   /* the next job that is done; NULL = none */
void tracker_txn_drop(tracker *t);                          /* what has not gone out is due again */
void tracker_txn_part_drop(tracker *t, tracker_part *part); /* the partition is gone */

/* fence.c: for a helper thread. Ends transactions that others have left open where these partitions' copies and markers go. */
typedef struct tracker_fenced {
    const char *markers, *copies, *dead_letters;
    int32_t partition, dead_partition; /* -1: not to be looked at */
} tracker_fenced;
int tracker_fence(const tracker_config *config, tracker_token *token, void *thread, const tracker_fenced *places,
                  size_t n, kafka_error *err);

/* send.c: the producer */
/* Of every marker in :kmq format, which has no other place for it: groups that share a marker topic are kept apart. */
kafka_header tracker_group_header(const tracker_config *config);
bool tracker_producer_open(tracker *t, kafka_error *err);
void tracker_producer_step(tracker *t); /* reports, events, a fatal producer rebuilt, ENDs sent again */
void tracker_send_add(tracker *t, tracker_send *send, tracker_send_kind kind);
void tracker_clock_send(tracker *t, tracker_part *part);
void tracker_ends_flush(tracker *t);
bool tracker_copy_send(tracker *t, tracker_item *item); /* false: the local queue is full, item untouched */
/* A copy as it goes out: borrows from item, config and itself. */
enum { TRACKER_COPY_FEW = 64 };
typedef struct tracker_copy {
    kafka_header few[TRACKER_COPY_FEW + TRACKER_OWN_HEADERS], *many /* to be freed */, *headers;
    size_t n_headers;
    tracker_stamp stamp;
    int32_t partition;
    const void *key, *value;
    size_t key_len, value_len;
} tracker_copy;
void tracker_copy_build(const tracker_config *config, const tracker_item *item, int n_partitions, tracker_copy *out);
int64_t tracker_send_wait(const tracker *t); /* ms until it wants to be called again */

/* part.c: one marker partition */
tracker_part *tracker_part_new(tracker *t, tracker_queue *queue, int32_t partition);
void tracker_part_keep(tracker_part *part);
void tracker_part_put(tracker_part *part);
void tracker_part_start(tracker *t, tracker_part *part, int64_t position, int64_t end);
void tracker_part_read(tracker *t, tracker_part *part); /* bounded; hot stays true when there may be more */
void tracker_part_step(tracker *t, tracker_part *part); /* barrier and decision */
int64_t tracker_part_wait(const tracker *t, const tracker_part *part);
/* What to commit: the smallest marker offset that must be replayed; with the checkpoint that this is enough with, or NULL. */
typedef struct tracker_value {
    int64_t offset;
    const tracker_reference *reference;
} tracker_value;
tracker_value tracker_part_commit_value(const tracker_part *part);
void tracker_part_mark(tracker_part *part, int64_t now_ms); /* once a tick */
int64_t tracker_part_age_ms(const tracker_part *part,
                            int64_t now_ms); /* since the oldest open marker was read; 0 = none is open */
/* Gauges of one partition; -1 = does not apply. */
typedef struct tracker_part_gauges {
    int64_t oldest_age_ms;     /* 0 = nothing is open */
    int64_t next_due_ms;       /* until something is due; 0 = now; -1 = nothing is open that ever will be */
    int64_t due;               /* due and not yet copied; what the group will fetch itself is not */
    int64_t checkpoint_age_ms; /* of the one that commits refer to */
} tracker_part_gauges;
void tracker_part_measure(const tracker *t, const tracker_part *part, tracker_part_gauges *out);
bool tracker_commits_wanted(const tracker *t);
void tracker_commits_send(tracker *t);
void tracker_give_back(tracker_part *part, int64_t offset);
void tracker_commit_done(tracker *t, const kafka_event *event);
void tracker_commits_ask(tracker *t); /* the group's commits, for parts that want them */

/* blocked.c: what a topic refuses, so that it harms no other */
bool tracker_sent_alone(const tracker *t, const tracker_item *item); /* nothing else is to be in flight beside it */
bool tracker_blocked(tracker *t, tracker_item *item);                /* taken: it waits. False: send it */
void tracker_refused(tracker *t, tracker_item *item,
                     const char *name); /* denied, or too large when it was alone; takes it */
void tracker_taken(tracker_item *item); /* by its topic */
void tracker_blocked_step(tracker *t, tracker_target *target);
int64_t tracker_blocked_at(const tracker_target *target); /* when it wants to be called; INT64_MAX = never */

/* witness.c: is a marker topic still the one that was read? */
typedef enum tracker_seen { WITNESS_UNKNOWN, WITNESS_SAME, WITNESS_GONE, WITNESS_OTHER } tracker_seen;
/* For a helper thread. Reads the witness back. WITNESS_UNKNOWN: see err. */
tracker_seen tracker_witness_look(kafka_reader *reader, const char *markers, int32_t partition, tracker_witness witness,
                                  kafka_error *err);
void tracker_witness_step(tracker *t, tracker_part *part);
int64_t tracker_witness_wait(const tracker *t, const tracker_part *part);

/* past.c: a marker topic that was made anew under its name */
void tracker_past_keep(tracker *t, const tracker_part *part); /* it is given up, or its position is lost */
/* The partition begins again, with this commit and end, or in a topic that is known to be another one (anew). True: it is another one than
 * before, when this was read and so much open. */
bool tracker_past_take(tracker *t, const tracker_part *part, bool anew, int64_t committed, int64_t high,
                       int64_t *position, int64_t *open);

/* ahead.c: what will soon be due is read before */
void tracker_ahead_step(tracker *t, tracker_part *part);
int64_t tracker_ahead_wait(const tracker *t, const tracker_part *part);
tracker_payload *tracker_ahead_take(tracker *t, tracker_part *part, int64_t offset); /* the caller's; NULL: not read */
void tracker_ahead_drop(tracker *t, tracker_part *part);                             /* the partition is gone */

/* redeliver.c */
void tracker_item_wait(tracker *t, tracker_item *item, tracker_waits *waits,
                       int64_t until_ms); /* without its payload */
void tracker_waits_release(tracker_waits *waits, int64_t now_ms, size_t most);
void tracker_item_reread(tracker *t, tracker_item *item); /* its payload is gone, it is to be sent again all the same */
/* What is due and decided, into reads, or planned at once where it was read ahead. True: tracker_redeliver_step has work. */
bool tracker_redeliver_take(tracker *t, tracker_part *part);
void tracker_reader_warm(tracker *t, const tracker_part *part);
void tracker_redeliver_step(tracker *t); /* planned copies to the producer, pauses, targets */
int64_t tracker_redeliver_wait(const tracker *t);
void tracker_redeliver_drop(tracker *t);                  /* what is planned and what waits goes back to its book */
void tracker_item_back(tracker *t, tracker_item *item);   /* not now: due again in its book */
void tracker_item_unload(tracker *t, tracker_item *item); /* its payload is given up */
void tracker_copy_done(tracker *t, tracker_item *item,
                       int64_t copy_offset); /* its END is in M already, or is to be written */
void tracker_copy_failed(tracker *t, tracker_item *item, int error);
void tracker_targets_ask(tracker *t, tracker_target *target); /* does it exist */
void tracker_end_add(tracker *t, tracker_part *part, int64_t offset, uint8_t cause, int64_t copy_offset);
bool tracker_sums_open(const tracker *t); /* something is not told yet */
void tracker_sums_tell(tracker *t);

#endif
