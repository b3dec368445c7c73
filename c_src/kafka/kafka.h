/* kafka - the one place that knows librdkafka. Both the NIF and the tracker see Kafka through this header only.
 *
 *   kafka_consumer   control queue (poll) + one queue per assigned partition (pop); forwarding is off
 *   kafka_producer   idempotent, acks=all; send copies, reports tell what became of it
 *   kafka_txn        a producer of transactions; every call blocks: a thread of its own
 *   kafka_admin      a short-lived client for what blocks: metadata, committed, watermarks, topics
 *
 * Rules: nothing of librdkafka outlives a call, except records between pop and kafka_records_free (free them before the same
 * call of ours returns). No function here blocks unless its name or comment says so. Destroying is done by a detached reaper thread.
 * Errors: functions return 0 or a negative KAFKA_E*; details go to `err` (may be NULL). */
#ifndef KAFKA_H
#define KAFKA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "kmq.h"

enum {
    KAFKA_OK = 0,
    KAFKA_EKAFKA = -1 /* see err */,
    KAFKA_EFULL = -2 /* local queue full: read reports, try again */,
    KAFKA_ENOMEM = -3,
    KAFKA_EABORT = -4, /* of a transaction: abort it; the producer is good for the next one */
    KAFKA_EDEAD = -5   /* of a transaction: what became of it is unknown, or it is fenced; destroy its producer */
};

typedef struct kafka_error {
    int code;      /* librdkafka's rd_kafka_resp_err_t as a number; 0 = none */
    char name[48]; /* "UNKNOWN_TOPIC_OR_PART", "_TRANSPORT" (a leading _ = local) */
    bool retriable;
    bool fatal;
    char text[512]; /* for a person */
} kafka_error;
void kafka_error_set(kafka_error *err, int code, const char *format, ...);
const char *kafka_error_name(int code);
const char *kafka_error_text(int code); /* a sentence */
/* True: the same thing, done again later by the same client or by a new one, may well succeed. */
bool kafka_error_retriable(int code);
typedef enum kafka_verdict {
    KAFKA_RETRIED,  /* it passes: librdkafka or the engine tries again until it does */
    KAFKA_ANSWERED, /* part of the protocol: the engine acts on it */
    KAFKA_REPORTED, /* said; the engine goes on, somebody must mend something */
    KAFKA_REPLACED, /* the client is beyond use: a new one takes its place */
    KAFKA_STOPS     /* another one is in our place: this one ends */
} kafka_verdict;
kafka_verdict kafka_error_verdict(int code);
void kafka_error_each(void (*each)(void *ctx, int code), void *ctx); /* every code the library knows */
bool kafka_error_rebalancing(int code); /* of a commit: the group is just sharing out its partitions anew */

/* "2.0.2"; and the number, e.g. 0x020002ff */
const char *kafka_version(void);
int kafka_version_number(void);

/* A name that begins with '?' is set where the library knows the property, and skipped where it does not. */
typedef struct kafka_property {
    const char *name, *value;
} kafka_property;
/* The value of a property in props (the last one wins), or NULL. */
const char *kafka_property_get(const kafka_property *props, size_t n_props, const char *name);
/* Whether librdkafka knows the property and takes its value; no client is made. A KAFKA_E*; the text never has the value. */
int kafka_property_check(const kafka_property *prop, kafka_error *err);

/* For OAUTHBEARER. Borrowed for the call. Without one nothing connects, and nothing fails: the EVENT_TOKEN that asks for it is not repeated,
 * so whoever answers it tries until it has one. */
typedef struct kafka_token {
    const char *token;
    int64_t expires_ms; /* since 1970 */
    const char *principal;
    const kafka_property *extensions;
    size_t n_extensions;
} kafka_token;

/* A wake-up: fn is called from librdkafka's threads, on empty -> non-empty, with the queue's lock held: it may not call kafka_*.
 * (With the property `debug` set, library calls log, so fn can also run in the thread that makes a call.)
 * Or fn NULL and fd >= 0: one byte is written to fd, which should be non-blocking. Neither (fn NULL, fd -1): none.
 * Pop or poll UNTIL EMPTY, or remember that you did not: there is no second wake-up for what is already there. */
typedef struct kafka_wake {
    void (*fn)(void *ctx);
    void *ctx;
    int fd;
} kafka_wake;

/* ------------------------------------------------------------------ consumer */
typedef struct kafka_consumer kafka_consumer;
typedef struct kafka_queue kafka_queue; /* of one assigned partition */

/* Offsets that are not numbers of records. */
enum { KAFKA_OFFSET_END = -1, KAFKA_OFFSET_BEGINNING = -2, KAFKA_OFFSET_STORED = -1000, KAFKA_OFFSET_NONE = -1001 };

typedef struct kafka_partition {
    const char *topic;
    int32_t partition;
    int64_t offset;       /* < 0: none (-1001), where it has a meaning */
    const char *metadata; /* of a commit; NULL = none */
    int error;            /* code of this partition; 0 = none */
} kafka_partition;

typedef enum kafka_event_type {
    KAFKA_EVENT_NONE,
    KAFKA_EVENT_ASSIGN, /* partitions; answer with kafka_consumer_assign */
    KAFKA_EVENT_REVOKE, /* partitions, lost; answer with kafka_consumer_unassign */
    KAFKA_EVENT_COMMIT, /* partitions with offsets and errors, error, opaque */
    KAFKA_EVENT_ERROR,  /* error */
    KAFKA_EVENT_LOG,    /* level (syslog), text */
    KAFKA_EVENT_STATS,  /* text (JSON) */
    KAFKA_EVENT_TOKEN,  /* OAUTHBEARER wants a token; text = config */
    KAFKA_EVENT_TIMES,  /* the answer to kafka_consumer_times: error, or partitions with offsets and errors */
    KAFKA_EVENT_UP,     /* a connection is made; text = the broker, "host:port" */
    KAFKA_EVENT_DOWN    /* it is gone, wanted or not */
} kafka_event_type;

typedef struct kafka_event {
    kafka_event_type type;
    const kafka_partition *partitions;
    size_t n_partitions;
    bool lost; /* REVOKE: the assignment is already lost: no commit */
    kafka_error error;
    int level;
    const char *text;
    void *opaque;
    void *priv;
} kafka_event;

/* What of a client's errors is one outage, for whoever tells people: all zero = none. One for all clients of an owner. */
enum {
    KAFKA_BROKER_BYTES = 288,
    KAFKA_OUTAGE_BROKERS = 8,
    KAFKA_OUTAGE_SETTLE_MS = 500,
    KAFKA_OUTAGE_QUIET_MS = 60000
};
typedef struct kafka_outage {
    bool on, settling;
    int64_t since_ms, heard_ms, up_ms;
    size_t n;
    char said[KAFKA_OUTAGE_BROKERS][KAFKA_BROKER_BYTES];
} kafka_outage;
typedef enum kafka_outage_step {
    KAFKA_OUTAGE_NONE, /* about something else, or what is to be said as it is */
    KAFKA_OUTAGE_BEGINS,
    KAFKA_OUTAGE_GOES_ON /* said before */
} kafka_outage_step;
/* For each EVENT_ERROR. */
kafka_outage_step kafka_outage_error(kafka_outage *outage, const kafka_error *error, int64_t now_ms);
/* For each event that is no ERROR. True: all is connected that was not; look by kafka_outage_over in KAFKA_OUTAGE_SETTLE_MS whether it lasts. */
bool kafka_outage_link(kafka_outage *outage, const kafka_event *event, int64_t now_ms);
/* True once for each outage that is over. */
bool kafka_outage_over(kafka_outage *outage, int64_t now_ms, int64_t *lasted_ms);

/* One to be written; for those that were read see kmq_header. */
typedef struct kafka_header {
    const char *name;
    const void *value;
    size_t value_len; /* value NULL = null */
} kafka_header;

typedef struct kafka_record {
    int64_t offset;
    int64_t timestamp_ms; /* -1 = none */
    bool log_append_time;
    const void *key; /* NULL = null key; an empty key is non-NULL with length 0 */
    size_t key_len;
    const void *value;
    size_t value_len;
    int32_t partition;
    int error; /* != 0: not a message; key and value are void (offset too, but EOF's is the position at the end).
                             * KAFKA_RECORD_EOF, ..._OUT_OF_RANGE or a code */
    const char *error_text;
    void *priv;
} kafka_record;
enum { KAFKA_RECORD_EOF = 1000001, KAFKA_RECORD_OUT_OF_RANGE = 1000002 };

/* Opens a group consumer (or, without group.id, one for assign only). Ours are forced: enable.auto.commit=false,
 * enable.auto.offset.store=false, log.queue=true, events for rebalance/commit/error/stats/log/token, no callbacks.
 * control wakes for the control queue, records for every partition queue. May take some ms (CA files): dirty scheduler. */
int kafka_consumer_open(const kafka_property *props, size_t n_props, const kafka_wake *control,
                        const kafka_wake *records, kafka_consumer **out, kafka_error *err);
/* Instead of what was subscribed to before; none: it leaves the group, and may come back. */
int kafka_consumer_subscribe(kafka_consumer *consumer, const char *const *topics, size_t n_topics, kafka_error *err);
/* Leaves the group once what is assigned has been revoked and given up: a static member, too, which otherwise stays in it when it
 * closes, until its session is over. */
int kafka_consumer_unsubscribe(kafka_consumer *consumer, kafka_error *err);
/* One event of the control queue; false = empty. Release with kafka_event_free before anything else is asked of the consumer's events. */
bool kafka_consumer_poll(kafka_consumer *consumer, kafka_event *event);
/* An event owns what it shows: it may be kept, and moved to another variable, until freed. For consumers' and producers' alike. */
void kafka_event_free(kafka_event *event);
/* Replaces the assignment (eager). Each partition's queue is created, forwarding off and wake-up on, BEFORE the assign. offset >= 0 or
 * KAFKA_OFFSET_BEGINNING (-2) / END (-1) / STORED (-1000). */
int kafka_consumer_assign(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, kafka_error *err);
int kafka_consumer_unassign(kafka_consumer *consumer,
                            kafka_error *err); /* wake-ups off, queues destroyed, assign(NULL) */
/* When the group rebalances incrementally (cooperative-sticky), ASSIGN is answered with assign_add, REVOKE with assign_remove (a lost one, too);
 * the queues of the other partitions stay as they are. Answering by the wrong pair is an error. Waits for librdkafka's main thread, as assign does (< 1 ms). */
bool kafka_consumer_cooperative(kafka_consumer *consumer);
int kafka_consumer_assign_add(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, kafka_error *err);
int kafka_consumer_assign_remove(kafka_consumer *consumer, const kafka_partition *partitions, size_t n,
                                 kafka_error *err);
/* Borrowed until the next assign/unassign; NULL when not assigned. */
kafka_queue *kafka_consumer_queue(kafka_consumer *consumer, const char *topic, int32_t partition);
/* Pops up to max records without waiting. Free them all with kafka_records_free (in bulk: that is what is fast). */
size_t kafka_queue_pop(kafka_queue *queue, kafka_record *out, size_t max);
/* The same; the record whose value brings the sum to max_bytes or above is the last. */
size_t kafka_queue_pop_bytes(kafka_queue *queue, kafka_record *out, size_t max, size_t max_bytes);
size_t kafka_queue_wait(kafka_queue *queue, kafka_record *out, size_t max,
                        int timeout_ms); /* blocks up to timeout for the first: threads only */
void kafka_records_free(kafka_record *records, size_t n);
/* Up to max headers of a record (borrowed from it); returns how many there are. From where they lie in the record (see headers.c), some 20 ns each, next
 * to nothing when there are none; where that is not possible, 450 ns. */
size_t kafka_record_headers(const kafka_record *record, kmq_header *out, size_t max);
/* Asynchronous, as member of the group; ends as EVENT_COMMIT with `opaque`. Metadata is checked (ASCII, no NUL, <= 4096). */
int kafka_consumer_commit(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, void *opaque,
                          kafka_error *err);
/* Who it is in its group now (member, generation), for kafka_txn_offsets: what is committed with it is refused once the group has gone
 * on. May be read by any thread; as large as a few strings. NULL: no memory, or not a member now. About 0.1 ms. */
typedef struct kafka_group kafka_group;
kafka_group *kafka_consumer_group(kafka_consumer *consumer);
kafka_group *kafka_group_keep(kafka_group *group);
void kafka_group_put(kafka_group *group); /* NULL is allowed */
/* Does not wait. After KAFKA_RECORD_OUT_OF_RANGE the partition stands still until it is sought. What was fetched before the seek and not
 * popped is dropped by librdkafka. */
int kafka_consumer_seek(kafka_consumer *consumer, const char *topic, int32_t partition, int64_t offset,
                        kafka_error *err);
int kafka_consumer_set_token(kafka_consumer *consumer, const kafka_token *token, kafka_error *err);
/* The end of an assigned partition as its last Fetch answer told it; local, does not wait. Negative: not known (yet, or any more). */
int64_t kafka_consumer_end(kafka_consumer *consumer, const char *topic, int32_t partition);
/* Where each of these has its first message of a time (in `offset`, ms) or later: asked by a thread of its own, one request for all partitions of a
 * broker. Does not wait; ends as EVENT_TIMES, after timeout_ms at the latest, with the partitions in this order and KAFKA_OFFSET_END where
 * there is none. One question at a time. KAFKA_EFULL: one is under way, or there is no thread to be had. */
int kafka_consumer_times(kafka_consumer *consumer, const kafka_partition *partitions, size_t n, int timeout_ms);
/* Its fetching is taken for stopped, though no record said so: the next seek starts it afresh. */
void kafka_queue_stopped(kafka_queue *queue);
bool kafka_consumer_lost(kafka_consumer *consumer);
const char *kafka_consumer_member_id(kafka_consumer *consumer, char *buf, size_t cap);
/* The first step of leaving, for a member of a cooperative group: it says so to its group, after what is under way there, and gives back what it has
 * (REVOKE comes, if it has anything). A close in the middle of a rebalance, or of a member without partitions, says nothing: the group waits until
 * the session is over, and the last commit, of a generation that is gone, is refused. Waited for is that it is no member any more. false: there
 * is nothing to wait for (a static member stays one, a fatal one is none). */
bool kafka_consumer_leave(kafka_consumer *consumer);
/* Has an id from its group, and has not said yet that it leaves. */
bool kafka_consumer_member(kafka_consumer *consumer);
/* Leaving: begin, then poll (and answer REVOKE) until closed() is true, then destroy. */
int kafka_consumer_close_begin(kafka_consumer *consumer, kafka_error *err);
bool kafka_consumer_closed(kafka_consumer *consumer);
/* Of one that turned fatal, and cannot be closed any more: as kafka_consumer_destroy, and the reaper leaves the group before, which takes it about a
 * second: or the others would wait a session time-out for this member. */
void kafka_consumer_abandon(kafka_consumer *consumer);
int kafka_consumer_test_fatal(kafka_consumer *consumer, const char *reason); /* rd_kafka_test_fatal_error */
/* Wake-ups off at once (none runs after it returns), then the reaper thread destroys. Not closed before: it does not wait for the
 * group (NO_CONSUMER_CLOSE). done(ctx) is called by the reaper at the end; may be NULL. Usually that is some ms later; with a commit on its way to
 * a broker that does not answer, socket.timeout.ms (10 s here, if not set); with a LeaveGroup on its way, up to 5 s; with a question by
 * kafka_consumer_times, up to its time-out. */
void kafka_consumer_destroy(kafka_consumer *consumer, void (*done)(void *ctx), void *ctx);

/* ------------------------------------------------------------------ producer */
typedef struct kafka_producer kafka_producer;
typedef struct kafka_topic kafka_topic; /* a topic handle of one producer */

typedef struct kafka_report {
    void *opaque;
    int error; /* 0 = durable */
    const char *error_name;
    int32_t partition;
    int64_t offset;
    int64_t timestamp_ms; /* as the log has it: the broker's with LogAppendTime; <= 0: unknown */
} kafka_report;

/* Forced: enable.idempotence=true, acks=all (unless props say otherwise for a publisher: `idempotent` false), log.queue=true. */
int kafka_producer_open(const kafka_property *props, size_t n_props, bool idempotent, const kafka_wake *wake,
                        kafka_producer **out, kafka_error *err);
/* Keep for the producer's life; freed with it; the same handle for the same name. It never makes a broker create the topic
 * (allow.auto.create.topics=false, which real brokers honour for producers too; a sandbox creates whatever it is asked about). What is sent to a
 * missing topic fails only after 30 s (topic.metadata.propagation.max.ms) or message.timeout.ms, so look first: kafka_admin_partitions. */
kafka_topic *kafka_producer_topic(kafka_producer *producer, const char *name, kafka_error *err);
/* Copies key, value and headers. partition -1 = the partitioner's choice. timestamp_ms 0 = now. KAFKA_EFULL: nothing was queued. */
int kafka_producer_send(kafka_producer *producer, kafka_topic *topic, int32_t partition, const void *key,
                        size_t key_len, const void *value, size_t value_len, const kafka_header *headers,
                        size_t n_headers, int64_t timestamp_ms, void *opaque, kafka_error *err);
/* Up to max delivery reports. Also serves logs and errors into the event sink (kafka_producer_poll). */
size_t kafka_producer_reports(kafka_producer *producer, kafka_report *out, size_t max);
/* UP, DOWN, and ERROR, LOG, STATS, TOKEN events that reports() met on its way; false = none. Free with kafka_event_free. */
bool kafka_producer_poll(kafka_producer *producer, kafka_event *event);
int kafka_producer_queued(kafka_producer *producer); /* messages and reports not yet read */
bool kafka_producer_fatal(kafka_producer *producer, kafka_error *err);
int kafka_producer_test_fatal(kafka_producer *producer, const char *reason); /* rd_kafka_test_fatal_error */
/* What is queued or in flight comes back as failed reports (_PURGE_QUEUE, _PURGE_INFLIGHT). Read the reports until empty after it:
 * for those that this call itself makes there is no wake-up. */
void kafka_producer_purge(kafka_producer *producer);
int kafka_producer_set_token(kafka_producer *producer, const kafka_token *token, kafka_error *err);
void kafka_producer_destroy(kafka_producer *producer, void (*done)(void *ctx), void *ctx); /* purges, then reaper */

/* ------------------------------------------------------------------ transactions: every call but open and destroy blocks
 * One transaction at a time:  init (once) --> begin --> offsets, send, flush ... --> commit
 *                                               ^                     | KAFKA_EABORT  '--> the next
 *                                               '------- abort <------'
 * A call that fails in a retriable way is made again until its time is over. Each returns KAFKA_OK, KAFKA_EABORT or KAFKA_EDEAD.
 * KAFKA_EDEAD, from any call: what became of the transaction is unknown until init of the same id has returned, here or anywhere. */
typedef struct kafka_txn kafka_txn;

/* What became of one message: known when flush or abort has returned KAFKA_OK. Must not move, and live until then or until destroy. */
typedef struct kafka_txn_report {
    bool known;
    int error; /* 0 = in the log, visible once the transaction is committed */
    int64_t offset;
} kafka_txn_report;

/* timeout_ms: after which a broker aborts what stays open. Does not block; says nothing to a broker. */
int kafka_txn_open(const kafka_property *props, size_t n_props, const char *id, int timeout_ms, kafka_txn **out,
                   kafka_error *err);
int kafka_txn_set_token(kafka_txn *txn, const kafka_token *token, kafka_error *err);
/* Fences whoever has this id, and ends its transaction: aborted, or committed where that had been decided. KAFKA_EDEAD: see err. */
int kafka_txn_init(kafka_txn *txn, int timeout_ms, kafka_error *err);
int kafka_txn_begin(kafka_txn *txn, kafka_error *err);
/* Commits of the group that `group` is a member of, as part of the transaction. */
int kafka_txn_offsets(kafka_txn *txn, const kafka_group *group, const kafka_partition *partitions, size_t n,
                      int timeout_ms, kafka_error *err);
/* Copies all but the report. KAFKA_EFULL: flush, then again. */
int kafka_txn_send(kafka_txn *txn, const char *topic, int32_t partition, const void *key, size_t key_len,
                   const void *value, size_t value_len, const kafka_header *headers, size_t n_headers,
                   kafka_txn_report *report, kafka_error *err);
/* Until the reports of all that was sent are known; KAFKA_EABORT when one of them is an error, or time is over. */
int kafka_txn_flush(kafka_txn *txn, int timeout_ms, kafka_error *err);
int kafka_txn_commit(kafka_txn *txn, int timeout_ms, kafka_error *err);
/* KAFKA_OK: certainly aborted, all reports are known. When a message has failed, destroy the producer and open another one: librdkafka
 * 2.0.2 goes on behind the failed message's sequence number, and brokers refuse that. */
int kafka_txn_abort(kafka_txn *txn, int timeout_ms, kafka_error *err);
void kafka_txn_destroy(kafka_txn *txn); /* reaper; what is open stays open for its time-out, or until somebody's init */

/* ------------------------------------------------------------------ admin: every call blocks up to timeout_ms
 * A client of consumer type, which reads what is not committed by transactions too, so that a high watermark is the real one.
 * Against a sandbox ("mockCluster..."), which has no admin API, what needs it fails at once with _UNSUPPORTED_FEATURE. */
typedef struct kafka_admin kafka_admin;
int kafka_admin_open(const kafka_property *props, size_t n_props, kafka_admin **out, kafka_error *err);
void kafka_admin_destroy(kafka_admin *admin);
/* OAUTHBEARER: give the token right after open; nothing connects without. */
int kafka_admin_set_token(kafka_admin *admin, const kafka_token *token, kafka_error *err);
/* "mockCluster..." = the sandbox. */
int kafka_admin_cluster_id(kafka_admin *admin, char *buf, size_t cap, int timeout_ms, kafka_error *err);
/* Partition count and replication factor of the first partition. 0 = the topic does not exist (and asking did not create it, on real Kafka;
 * a sandbox of librdkafka 2.0.2 creates whatever is asked for). */
int kafka_admin_partitions(kafka_admin *admin, const char *topic, int timeout_ms, int *n_partitions, int *replication,
                           kafka_error *err);
int kafka_admin_topics(kafka_admin *admin, int timeout_ms, void (*each)(void *ctx, const char *topic, int n_partitions),
                       void *ctx, kafka_error *err);
/* Reads the commits of the group named by props' group.id as an outsider. In: topic, partition. Out: offset (-1001 = none), error, and metadata,
 * which the admin owns until its next call. Fails as a whole when any partition failed; the others are filled then, too. */
int kafka_admin_committed(kafka_admin *admin, kafka_partition *partitions, size_t n, int timeout_ms, kafka_error *err);
/* Sets the offset of the group named by props' group.id, as one that is no member: refused while the group has members. */
int kafka_admin_commit(kafka_admin *admin, const char *topic, int32_t partition, int64_t offset, int timeout_ms,
                       kafka_error *err);
int kafka_admin_watermarks(kafka_admin *admin, const char *topic, int32_t partition, int timeout_ms, int64_t *low,
                           int64_t *high, kafka_error *err);
/* The first offset whose timestamp is at least this; -1 (as Kafka's END) when there is none. */
int kafka_admin_offset_for_time(kafka_admin *admin, const char *topic, int32_t partition, int64_t timestamp_ms,
                                int timeout_ms, int64_t *offset, kafka_error *err);
/* An existing topic: TOPIC_ALREADY_EXISTS. replication -1 = the broker's default. */
int kafka_admin_create_topic(kafka_admin *admin, const char *topic, int n_partitions, int replication,
                             const kafka_property *config, size_t n_config, int timeout_ms, kafka_error *err);
int kafka_admin_create_partitions(kafka_admin *admin, const char *topic, int n_partitions, int timeout_ms,
                                  kafka_error *err); /* n = the new total */
int kafka_admin_delete_topic(kafka_admin *admin, const char *topic, int timeout_ms, kafka_error *err);
/* Effective topic config, one callback per entry (value NULL = sensitive). */
int kafka_admin_topic_config(kafka_admin *admin, const char *topic, int timeout_ms,
                             void (*each)(void *ctx, const char *name, const char *value), void *ctx, kafka_error *err);
int kafka_admin_delete_records(kafka_admin *admin, const char *topic, int32_t partition, int64_t before, int timeout_ms,
                               kafka_error *err);

/* ------------------------------------------------------------------ reading by exact offset: blocks; a thread of its own */
typedef struct kafka_reader kafka_reader;
int kafka_reader_open(const kafka_property *props, size_t n_props, kafka_reader **out, kafka_error *err);
int kafka_reader_set_token(kafka_reader *reader, const kafka_token *token, kafka_error *err);
/* Reads the records of one partition at exactly these ascending offsets. each() gets every one found (record borrowed) or NULL when
 * it is gone (retention, compaction, control record): never a neighbour in its place. Seeks over long gaps. Returns 0, or KAFKA_EKAFKA when it
 * could not be read in time: what was not reported is unknown, ask again. */
int kafka_reader_read(kafka_reader *reader, const char *topic, int32_t partition, const int64_t *offsets, size_t n,
                      int timeout_ms, void (*each)(void *ctx, int64_t offset, const kafka_record *record), void *ctx,
                      kafka_error *err);
void kafka_reader_destroy(kafka_reader *reader);

/* Clients not yet destroyed, the reaper's included: 0 when nothing is left behind. */
int kafka_live(void);

#endif
