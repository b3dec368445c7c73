/* engine - one consumer: what is assigned, fetched, STARTed, handed out, settled, and the markers that say so.
 *
 *    librdkafka          engine lock                                  partition lock        any process
 *   +-----------+  pop   +-------+ START, durable +-------+  take    +--------+  settle    +-----------+
 *   | partition |------->| store |--------------->| ready |--------->| ledger |<-----------| acks      |
 *   |   queues  |        +-------+                +-------+  demand  +--------+            +-----------+
 *   +-----------+             ^                                          | END, EXTEND, RETRY
 *   | control   |--> poll (the owner): rebalances, commits, timers       v
 *   +-----------+                                             marks --> producer --> marker topic
 *
 * The order of writes on which the guarantee rests: START durable -> hand out -> commit. Within a partition messages are
 * handed out in offset order, so the offset to commit is that of the first message not handed out. The first window after an
 * assignment is handed out only when the commit that covers it is acknowledged (`gated`): a message that kills the VM is then
 * below the committed offset the next time, and the tracker counts it.
 *
 * Without markers there is no producer. :offsets hands out what is fetched and commits the lowest offset that is not settled;
 * :at_most_once commits window by window, and hands out what an acknowledged commit covers.
 *
 * Files: engine.c (life, poll, timers, commits), rebalance.c (what is assigned), pump.c (fetch, START, hand-out), marks.c (records to the marker
 * topic and their reports), modes.c (what is otherwise without markers), isolate.c (what crashed before, beside all engines of the VM),
 * control.c (pause, seek), lanes.c (where an order is kept), witness.c (a topic of the same name in its place), reopen.c (a new client in the place of a fatal one).
 *
 * Locks, in this order: engine.lock -> slots_lock -> part.lock; engine.lock -> isolate.c's -> wake_lock; wake_lock is a leaf and is also taken in librdkafka's callbacks (which
 * hold a queue lock), so nobody calls librdkafka with it. No librdkafka call under a part.lock.
 * Threads: NIFs on any scheduler; callbacks of librdkafka touch wake_* only. */
#ifndef KMQ_ENGINE_H
#define KMQ_ENGINE_H

#include <erl_nif.h>
#include <stdatomic.h>
#include "filter.h"
#include "isolate.h"
#include "kmq.h"
#include "lanes.h"
#include "ledger.h"
#include "marker.h"
#include "kafka.h"
#include "store.h"

typedef struct engine engine;
typedef struct part part;

typedef enum engine_format { FORMAT_RANGE, FORMAT_KMQ } engine_format;

typedef struct engine_config {
    char *group_id;
    engine_format format;
    kmq_delivery delivery;
    bool bare; /* the bench's measure: as at most once, but handed out before it is committed */
    int64_t lease_ms, max_processing_ms, start_ahead, max_in_flight, commit_interval_ms, ack_flush_ms, revoke_wait_ms;
    int64_t max_poll_ms, store_bytes;
    char *count_header;
    uint64_t instance;
    int64_t ttl_ms; /* of every message from its publication on; 0: none */
    int64_t max_redeliveries, drain_ms;
    bool expired_discard; /* what expired is dropped, not dead-lettered */
    bool drain_on_revoke; /* a partition is given back when nothing handed out of it is in work */
    bool cooperative;     /* the group rebalances incrementally */
    kmq_filter filter;    /* what this consumer wants; the rest is skipped */
} engine_config;

typedef struct engine_topic {
    char *name, *marker_name;
    kafka_topic *marker; /* of the present producer */
    kmq_marker_scope scope;
    bool subscribed; /* false: not read any more; what is open of it still gets its markers */
    /* whether its markers are written: told when it changes, not each time */
    int told_error; /* 0: all is well, or nobody was told */
    bool written;   /* the last report of any partition was good */
    int64_t failed_at;
} engine_topic;

/* A RETRY or EXTEND that somebody asked for and that is not written yet. */
typedef struct retry {
    struct retry *next;
    kmq_range range;
    int64_t delay_ms;
    uint8_t type, cause, flags;
    size_t text_len;
    char text[];
} retry;

/* A delayed message whose PARK is not written yet. */
typedef struct park {
    int64_t offset, due_ms;
} park;

/* A pause holds for the next assignment of the partition, too. */
typedef struct paused_part {
    char *topic;
    int32_t partition;
} paused_part;

/* The group's gift, until it is known where it begins. */
typedef struct new_part {
    engine_topic *topic;
    int32_t partition;
} new_part;

/* See witness.c. A record that was read: where it stands, and the time that it bears; offset -1: none. */
typedef struct witness_record {
    int64_t offset, ms;
} witness_record;
enum { WITNESSES = 2 };
typedef struct witness {
    witness_record read[WITNESSES];  /* the last ones, the newest first */
    witness_record asked[WITNESSES]; /* the same, as it was when the look that is under way began */
    witness_record known[WITNESSES]; /* the same, of the last look that was good */
    int64_t after_ms, least;         /* nothing later than after_ms stands below `least`; after_ms -1: not begun */
    int64_t answer;                  /* of the last look; KAFKA_OFFSET_END: there is nothing later */
    bool asking, doubted;
} witness;

/* Of a partition that was given back: for when it comes again and stands where it was left. */
typedef struct kept_witness {
    const engine_topic *topic;
    int32_t partition;
    uint64_t epoch;
    int64_t committed;
    witness witness;
} kept_witness;

typedef enum part_state { PART_ACTIVE, PART_LEAVING, PART_RETIRED } part_state;

struct part {
    int32_t slot;
    engine_topic *topic;
    int32_t partition;
    part_state state;
    kafka_queue *queue; /* NULL when retired */
    bool hot;           /* its queue may hold more */
    bool broken;        /* waits for a new position (out of range) */
    bool forgotten;     /* of a topic that is made anew: nothing more is written about it */
    bool paused;        /* asked for: neither fetched nor handed out */
    int32_t lane;       /* the processor that keeps its order, or LANE_UNKNOWN */
    bool blocked;       /* its next message waits for room in its lane */
    int marker_error;   /* of the last report of a marker of it; 0: written */
    bool lame;          /* no memory on the way: begins again at the first offset not handed out */
    int64_t position;   /* next offset expected from the queue */
    store store;
    int64_t beyond_since; /* its position is beyond the topic's end, as far as is known; 0: it is not */
    witness witness;
    int64_t marks_end; /* offset of its last durable marker */
    bool restart;      /* its marker topic was made anew: what is held is STARTed there, not renewed */
    size_t unstarted;  /* kept since its last START was written; at least MARKS_RUN when one must be written again */
    int64_t unstarted_since;
    /* the gate of the first window, or (at most once) of the present one; -1: no commit asked for yet */
    bool gated;
    int64_t gate_offset;
    int64_t asked_n,
        covered_n;           /* at most once: messages below gate_offset; of these those whose commit is acknowledged */
    bool back;               /* the last commit may go back, to what was not handed out */
    int64_t committed, sent; /* acknowledged; last sent. -1: none */
    int starts_in_flight, in_flight; /* of starts: PARKs, too */
    int64_t start_pause_until;
    uint64_t foreign_copies, filtered, parked, expired, handed_out, undelayed;
    int64_t oldest, oldest_since, flush_to; /* offsets: what holds the commit, since when (0: said); of a flush */
    park *parks;
    size_t n_parks, cap_parks;
    int64_t log_ms, log_at; /* time of the marker partition's broker when this clock showed log_at; 0: not known yet */

    ErlNifMutex *lock; /* ledger, letters, retries, state */
    kmq_ledger ledger;
    kmq_offset_set letters; /* without markers: rejected or expired, their dead letters are not written yet */
    retry *retries, **retries_tail;
    _Atomic bool full; /* a hand-out stopped at max_in_flight; an ack ends it */
};

/* One record (range format) or one batch of records (kmq format) on its way to the marker topic. */
typedef struct mark {
    struct mark *prev, *next; /* what is in flight, oldest first */
    part *part;
    uint64_t seq;
    uint64_t handed_before; /* START: engine.handed_total when it was sent */
    int64_t time_ms;
    uint32_t left; /* records not reported yet */
    bool failed;
    uint8_t type, cause, flags;
    size_t text_len, n_ranges;
    char *text;
    kmq_range ranges[];
} mark;

/* What went wrong with a record, until the owner's next poll; at: when something was said last. */
typedef struct engine_note {
    char text[320];
    int64_t at;
} engine_note;

/* A partition that went while no commit covered all that had been handed out of it, or, by offsets, settled: from `committed` on it comes again,
 * whoever has it now. */
typedef struct uncovered {
    int32_t slot;
    int64_t committed;
} uncovered;
enum { UNCOVERED_MAX = 1024 };

/* Which of the active partitions is at work (modulo n_active), for so many offsets in a row, since when. */
typedef struct engine_turn {
    size_t at, run;
    int64_t since;
} engine_turn;

typedef enum engine_state { ENGINE_OPEN, ENGINE_CLOSING, ENGINE_CLOSED } engine_state;
typedef enum revoke_step { REVOKE_NONE, REVOKE_DRAIN, REVOKE_SETTLE, REVOKE_COMMIT } revoke_step;
typedef enum close_step { CLOSE_DRAIN, CLOSE_JOIN, CLOSE_LEAVE, CLOSE_CLIENT, CLOSE_FLUSH, CLOSE_WAIT } close_step;

struct engine {
    ErlNifMutex *lock;
    engine_config config;
    engine_state state;
    kafka_consumer *consumer;
    kafka_producer *producer;
    kafka_property *producer_props, *consumer_props;
    size_t n_producer_props, n_consumer_props;
    void *producer_memory, *consumer_memory;
    engine_topic **topics; /* never forgotten: partitions that are retired have them */
    size_t n_topics;

    part **slots;                           /* by slot number; NULL = gone */
    int32_t n_slots, cap_slots, first_slot; /* all below first_slot are gone */
    ErlNifRWLock *slots_lock;
    /* Hand-outs between a START and its report: what must be STARTed ahead, beside start_ahead, so that a long round trip starves nobody. */
    uint64_t handed_total, handed_per_trip;
    int64_t handed_at;
    /* The same, grown by callers that had to wait, and shrinking by itself; mark numbers: since it grew; last START reported. */
    uint64_t hunger, hungry_since, start_reported;
    int64_t hunger_at; /* when it shrank last */
    part **active; /* what is assigned: n_active that flow, in round-robin order, and behind them those that leave */
    size_t n_active, n_assigned, start_cursor;
    engine_turn fetching, handing;
    int64_t shares_due; /* when each partition's share is fetched next */
    store_pool store_pool;
    size_t n_retired;
    uncovered uncovered[UNCOVERED_MAX]; /* the newest of n_uncovered */
    size_t n_uncovered;

    paused_part *paused;
    size_t n_paused;

    uint64_t epoch, asked; /* asked: of the latest question where partitions begin; 0: none is open */
    new_part *asked_parts; /* what it is about */
    size_t n_asked;
    revoke_step revoking;
    bool lost;
    int64_t drain_until, revoke_until;

    bool draining; /* nothing more is handed out */
    close_step close_step;
    int64_t close_deadline, close_drain_until, close_join_until;
    bool close_waits;       /* for what is in work, and not for its dead letters alone */
    size_t close_uncovered; /* n_uncovered when it began */

    bool commit_in_flight;
    bool commit_again;      /* the last one was refused because the group is just sharing out */
    int64_t commit_failing; /* since when; 0: the last one was acknowledged */
    int64_t commit_due;     /* INT64_MAX: nothing changed */
    int64_t prompt_until;   /* until then a commit is due at once */
    bool restart_asked;     /* of some part, since the round of renewals began */
    char anew[160];         /* whose marker topic was made anew, to be told */
    int64_t renew_due, flush_due, rebuild_asked;
    int64_t look_due; /* see witness.c */
    bool looking;
    uint64_t looks; /* that were answered */
    kept_witness *kept;
    size_t n_kept;

    ErlNifTime slice; /* when the present call began */
    /* where a round of renewals goes on that was longer than a slice; renew_round: when the next one begins, 0: none is under way */
    int64_t renew_round, renew_cursor;
    int32_t renew_slot;
    bool blocked; /* the producer's queue was full: the next reports make room */

    mark *oldest, *newest;                 /* marks in flight */
    uint64_t seq, flush_seq;               /* flush_seq: 0 = nobody waits */
    size_t ends_in_flight;                 /* ENDs and RETRYs */
    bool producer_broken, consumer_broken; /* fatal: to be replaced */
    kafka_error consumer_error;
    int64_t reopen_asked, commit_refused_until;
    engine_note end_note;
    kafka_error read_error; /* of a partition, to be told; code 0: none */
    kafka_outage outage;    /* of both clients */

    isolate_member isolate;

    /* without markers */
    uint64_t gate_handed; /* handed_total when a window's commit was asked for */
    size_t gate_cursor;
    ErlNifEnv *letters_env; /* what expired and waits for the owner, who writes the dead letters */
    ERL_NIF_TERM letters;
    size_t n_letters;
    uint64_t undelayed; /* delayed messages handed out at once, and not said yet */
    int64_t undelayed_at;
    _Atomic bool settled; /* the floor may have moved since the last commit */

    _Atomic int64_t pending;       /* ENDs and RETRYs not yet in a record */
    _Atomic int64_t pending_since; /* none of them is older */
    _Atomic int64_t owner_due;     /* when the owner polls next */
    _Atomic bool records_woken;

    /* who is woken */
    ErlNifMutex *wake_lock;
    void *resource;
    ErlNifPid owner, borrower;
    bool owner_alive, borrower_set, ready_sent;
    _Atomic bool owner_wants_reports;

    uint8_t buffer[KMQ_MARKER_MAX_BYTES + 1]; /* one record being encoded */
    kmq_range ranges[2048];                   /* of one record */
};

extern const kmq_alloc core_alloc; /* the VM's */
int64_t engine_now(void);          /* monotonic, ms, > 0 */
/* A time that the broker's clock has reached for certain. */
static inline int64_t part_now(const part *p, int64_t now)
{
    return p->log_at ? p->log_ms + (now - p->log_at) : INT64_MIN;
}
/* At max_in_flight, paused, or its next message waits for its lane: it takes none of the room of those that flow. */
static inline bool part_stands(const part *p) { return p->full || p->paused || p->blocked; }
void engine_clock_load(void);
int64_t engine_wall_ms(void); /* this machine's time of day */
static inline bool engine_marks(const engine *e) { return e->config.delivery == KMQ_DELIVERY_MARKERS; }
/* A call on a normal scheduler ends its loops when its slice is over, about 0.4 ms after its begin, and sees to it that it is called again. */
void engine_slice_begin(engine *engine);
bool engine_slice_over(const engine *engine);

/* -- life (engine.c). Everything below is called with engine.lock held unless it says otherwise. */
void engine_notify_owner(engine *engine, int64_t in_ms); /* no lock needed */
void engine_wake_borrower(engine *engine);               /* no lock needed */
void engine_want_commit(engine *engine, int64_t now);
void engine_send_commit(engine *engine, int64_t now);
void engine_flush_commit(engine *engine, int64_t now); /* a flush waits for the floors of now */
bool engine_flush_committed(const engine *engine);
int engine_poll(engine *engine, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t *next_ms);
int engine_assign(engine *engine, const kafka_partition *partitions, const bool *has_commit, size_t n,
                  kafka_error *err);
int engine_reset(engine *engine, part *part, int64_t offset, int64_t committed, kafka_error *err);
int engine_rebuild(engine *engine, kafka_error *err);
engine *consumer_engine(ErlNifEnv *env, ERL_NIF_TERM term); /* of a consumer's term, or NULL; no lock needed */
void engine_close_begin(engine *engine, int64_t deadline, bool drain);
void engine_kill(engine *engine); /* at once, from any state; never blocks */
void engine_free(engine *engine); /* no lock: nobody else is there any more */
part *engine_find(engine *engine, const char *topic, int32_t partition);
int engine_open_producer(engine *engine, kafka_error *err);
/* Takes both names. NULL: no memory. */
engine_topic *engine_topic_add(engine *engine, char *name, char *marker_name);
engine_topic *engine_topic_find(engine *engine, const char *name);
/* This consumer, to the topics that are `subscribed`; none of them: unsubscribes. */
int engine_subscribe(engine *engine, kafka_consumer *consumer, kafka_error *err);
/* callbacks of librdkafka */
void engine_control_woken(void *ctx);
void engine_records_woken(void *ctx);
void engine_reports_woken(void *ctx);

/* -- rebalance.c */
void engine_rebalance_event(engine *engine, const kafka_event *event, ErlNifEnv *env, ERL_NIF_TERM *events,
                            int64_t now);
void engine_revoke_on(engine *engine, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now);
void engine_retire_all(engine *engine);
/* It is no member of its group any more, or of a life that is over: as after a loss. */
void engine_give_up(engine *engine);
void engine_take_asked(engine *e, size_t from); /* before it leaves (cooperative) */
void engine_asked_nothing(engine *engine);      /* whatever was asked: the answer is not waited for any more */
/* The partition begins at `offset`, before what was read of it: its topic is another one of the same name. What was handed out of the old one is
 * forgotten, or its acks would settle what stands in the same places now. */
void engine_made_anew(engine *engine, const engine_topic *topic, int32_t partition, int64_t offset);
void engine_reap(engine *engine); /* frees what is retired and holds nothing any more */
void engine_part_free(part *part);

/* -- witness.c */
void witness_init(witness *w);
/* Of these records, which were just taken out of the partition's queue, those below its position were read. */
void witness_read(part *part, const kafka_record *records, size_t n);
void witness_on(engine *engine, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now);
void witness_answer(engine *engine, const kafka_event *event);
void witness_keep(engine *engine, const part *part); /* it is given back */
void witness_recall(engine *engine, part *part);     /* it begins at its commit */
void witness_same(part *part);                       /* it was doubted, and stands where it stood */
int64_t witness_due(const engine *engine);           /* INT64_MAX: what is awaited wakes the owner itself */

/* -- control.c */
bool engine_is_paused(const engine *engine, const char *topic, int32_t partition);
void engine_paused_free(engine *engine);

/* -- modes.c: deliveries without markers */
enum { MODES_LETTERS_MAX = 512 };
/* Where the commit may stand, and what is in work; part.lock is held. */
int64_t modes_floor(const part *part);
int64_t modes_open(const part *part);
/* How many of the first `most` messages may be handed out; n of them were; asks for the next window's commit. */
int64_t modes_most(const engine *engine, const part *part, int64_t most);
void modes_handed(const engine *engine, part *part, int64_t n);
void modes_ask(engine *engine, int64_t want, int64_t now);
void modes_committed(engine *engine, part *part);
void modes_commit_over(engine *engine);
/* Settles offsets of a slot whose part is NULL when it is gone (no lock held). A result each; whether its partition was full. Cause dead-lettered: of
 * those that leave. */
bool modes_settle(engine *engine, part *part, int slot, kmq_end_cause cause, const int64_t *offsets, size_t n,
                  int8_t *results);
/* It leaves: nobody else settles it, and it holds the floor until its dead letter is written. part.lock is held. OK | ELATE | EUNKNOWN |
 * ENOMEM */
int modes_leave(engine *engine, part *part, int slot, int64_t offset);
/* The first of the store has expired, and was handed out just now: its bytes wait for the owner. false: no memory */
bool modes_expire(engine *engine, part *part);
void modes_say(engine *engine, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now);
int64_t modes_due(engine *engine, int64_t now);
/* Nothing is in work (all), or no dead letter waits to be written. */
bool modes_drained(engine *engine, bool all);
void modes_flush(engine *engine, ErlNifEnv *env, ERL_NIF_TERM *events, int64_t now);

/* -- pump.c */
void pump(engine *engine, int64_t want, int64_t now);
/* Hands out up to max messages: [{Slot, Topic, Partition, [Message]}], *more: there is more that the time slice cut off. */
ERL_NIF_TERM pump_take(engine *engine, ErlNifEnv *env, int64_t max, int64_t now, bool *more);
/* The same within the room of each lane, as [{Slot, Topic, Partition, [Message], Lane}]. *unknown: [{Slot, Topic, Partition}] that have
 * messages and no lane yet. */
ERL_NIF_TERM pump_take_lanes(engine *engine, ErlNifEnv *env, int64_t max, lanes *l, int64_t now, bool *more,
                             ERL_NIF_TERM *unknown);

/* -- marks.c */
enum { MARKS_RUN = 8192 }; /* long enough for a START of its own */
void marks_reports(engine *engine, int64_t now);
void marks_start(engine *engine, part *part, int64_t now);
void marks_flush(engine *engine, int64_t now); /* ENDs and RETRYs that wait */
void marks_renew(engine *engine, int64_t now);
void marks_timeouts(engine *engine, int64_t now);
void marks_release(engine *engine, part *part,
                   bool open); /* RETRY released: STARTed and covered by a commit; open ones too */
void marks_skip(engine *engine, part *part,
                int64_t below);                   /* END: what has a START, is not handed out, and will not be */
void marks_fail_all(engine *engine, int64_t now); /* the producer is gone: what was in flight failed */
bool marks_settled(const engine *engine);         /* nothing waits and no END or RETRY is in flight */
bool marks_awaited(uint8_t type, uint8_t cause);  /* does a flush wait for such markers */
bool marks_park(part *part, int64_t offset, int64_t due_ms); /* false: no memory */
/* No lock, then part.lock. NULL: no memory. */
enum { EXTEND_ASKED = 1 }; /* cause of an EXTEND that is more than a renewal, which the next one would make good */
retry *marks_retry_new(uint8_t type, kmq_range range, int64_t delay_ms, uint8_t cause, uint8_t flags, const void *text,
                       size_t text_len);
void marks_retry_queue(part *part, retry *retry);

#endif
