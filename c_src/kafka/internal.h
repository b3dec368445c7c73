/* internal - what the files of this folder share. Nothing outside this folder includes it, or librdkafka.
 *
 *   error.c    codes, names, which errors pass by themselves
 *   cause.c    why nothing connects
 *   client.c   properties -> a librdkafka client; wake-ups; the live counter
 *   headers.c  a record's headers, from where they lie
 *   event.c    a librdkafka event -> a kafka_event that owns all it shows
 *   outage.c   connections that are made, and which errors are one outage
 *   reaper.c   destroying, which may never return
 *   nudge.c    a fetcher that rests too long is woken
 *   times.c    where partitions have a time, asked by a thread
 *   consumer.c producer.c txn.c admin.c reader.c failpoint.c
 */
#ifndef KAFKA_INTERNAL_H
#define KAFKA_INTERNAL_H

#include "kafka.h"
#include <librdkafka/rdkafka.h>
#include <stdatomic.h>

/* Fills err (may be NULL) and returns KAFKA_EKAFKA, so that a caller can `return kafka_fail(...)`. what = what was being
 * tried, or NULL. When code is _FATAL and rk is not NULL, the client's original fatal error is shown instead. */
int kafka_fail(kafka_error *err, rd_kafka_t *rk, rd_kafka_resp_err_t code, const char *what);
/* The same for an error object, which is taken (destroyed); NULL = no error, KAFKA_OK. */
int kafka_fail_object(kafka_error *err, rd_kafka_t *rk, rd_kafka_error_t *error, const char *what);
int kafka_no_memory(kafka_error *err);

/* A client of this type. Defaults come first, then props, then forced: the later wins. events: RD_KAFKA_EVENT_* to be
 * delivered as events. Counted by kafka_live from here until the reaper has destroyed it. */
rd_kafka_t *kafka_client_new(rd_kafka_type_t type, const kafka_property *defaults, size_t n_defaults,
                             const kafka_property *props, size_t n_props, const kafka_property *forced, size_t n_forced,
                             int events, kafka_error *err);
/* The same, with a last word on the configuration before the client is made. */
rd_kafka_t *kafka_client_new_with(void (*prepare)(rd_kafka_conf_t *conf, void *ctx), void *ctx, rd_kafka_type_t type,
                                  const kafka_property *defaults, size_t n_defaults, const kafka_property *props,
                                  size_t n_props, const kafka_property *forced, size_t n_forced, int events,
                                  kafka_error *err);
/* The events that every consumer and producer has; TOKEN only where librdkafka does not find tokens by itself. */
int kafka_common_events(const kafka_property *props, size_t n_props);

/* wake must stay where it is until kafka_wake_off returned. */
void kafka_wake_on(rd_kafka_queue_t *queue, kafka_wake *wake);
void kafka_wake_off(rd_kafka_queue_t *queue);
void kafka_wake_ring(const kafka_wake *wake); /* by hand, where no queue does it */

/* Copies what is to be seen of rkev, which stays the caller's. False: an event of no interest. Out of memory: an ERROR event. */
bool kafka_event_make(rd_kafka_t *rk, rd_kafka_event_t *rkev, kafka_event *event);
/* EVENT_TIMES of what rd_kafka_offsets_for_times has left in list. False: no memory. */
bool kafka_event_times(rd_kafka_t *rk, rd_kafka_resp_err_t code, const rd_kafka_topic_partition_list_t *list,
                       kafka_event *event);
void kafka_error_made(kafka_error *error, rd_kafka_t *rk, rd_kafka_resp_err_t code, const char *text);

/* cause.c: why nothing connects. All zero: nothing is known. */
typedef struct kafka_cause {
    kafka_error error;
    bool worded; /* error.text is ours */
    bool all_down;
} kafka_cause;
void kafka_cause_words(rd_kafka_conf_t *conf);
/* Empties the queue of errors and logs of a client whose calls report their own errors. */
void kafka_cause_read(kafka_cause *cause, rd_kafka_queue_t *queue);
bool kafka_cause_final(const kafka_cause *cause); /* waiting does not help */
void kafka_cause_forget(kafka_cause *cause);
/* As kafka_fail; where code only says that no broker was there in time, err says why. */
int kafka_cause_fail(const kafka_cause *cause, kafka_error *err, rd_kafka_t *rk, rd_kafka_resp_err_t code,
                     const char *what);
/* Metadata of one topic, of all, or (rkt NULL, all false) of none but the brokers; blocks. A connection that broke on the way is tried again
 * while there is time, unless the cause is final. */
rd_kafka_resp_err_t kafka_metadata(rd_kafka_t *rk, rd_kafka_topic_t *rkt, bool all, kafka_cause *cause,
                                   rd_kafka_queue_t *queue, int timeout_ms, const rd_kafka_metadata_t **out);
/* A clock for time limits, and what is left to one of its times: never negative. */
int64_t kafka_now_ms(void);
int kafka_left_ms(int64_t deadline_ms);
void kafka_pause_ms(int ms); /* for threads that may wait */

/* record shows message and borrows from it. */
void kafka_record_make(rd_kafka_message_t *message, kafka_record *record);

/* See headers.c. The headers behind a value, which must lie in a record with this key; false: it is not certain that they are these. Up to max of them,
 * and how many there are. */
bool kafka_headers_read(const void *key, size_t key_len, const void *value, size_t value_len, kmq_header *out,
                        size_t max, size_t *count);

/* Hands a message to a producer, which copies all of it. */
rd_kafka_resp_err_t kafka_produce(rd_kafka_t *rk, rd_kafka_topic_t *rkt, int32_t partition, const void *key,
                                  size_t key_len, const void *value, size_t value_len, const kafka_header *headers,
                                  size_t n_headers, int64_t timestamp_ms, void *opaque);

/* Offsets and metadata as librdkafka wants them, checked. NULL: see err. */
rd_kafka_topic_partition_list_t *kafka_commit_list(rd_kafka_t *rk, const kafka_partition *partitions, size_t n,
                                                   kafka_error *err);

struct kafka_group {
    atomic_int refs;
    rd_kafka_consumer_group_metadata_t *metadata;
};

int kafka_set_token(rd_kafka_t *rk, const kafka_token *token, kafka_error *err);

/* See nudge.c. NULL: no thread or memory, and the fetcher rests. */
typedef struct kafka_nudge kafka_nudge;
kafka_nudge *kafka_nudge_new(rd_kafka_t *rk);
/* false: no room, ask again. */
bool kafka_nudge_ask(kafka_nudge *nudge, const char *topic, int32_t partition);
void kafka_nudge_stop(kafka_nudge *nudge); /* NULL is allowed; before the client is destroyed */

/* Which brokers a client has a connection to: EVENT_UP, EVENT_DOWN. wake must stay where it is until closed; the links until the client is destroyed. */
typedef struct kafka_links kafka_links;
kafka_links *kafka_links_new(const kafka_wake *wake);
void kafka_links_prepare(rd_kafka_conf_t *conf, void *links); /* for kafka_client_new_with */
bool kafka_links_take(kafka_links *links, kafka_event *event);
void kafka_links_close(kafka_links *links); /* no wake-up runs after it */
void kafka_links_del(kafka_links *links);   /* NULL is allowed */

/* See times.c. wake must stay where it is until closed; the rest until the client is destroyed. NULL: no memory. */
typedef struct kafka_times kafka_times;
kafka_times *kafka_times_new(const kafka_wake *wake);
bool kafka_times_ask(kafka_times *times, rd_kafka_t *rk, rd_kafka_topic_partition_list_t *list, int timeout_ms);
bool kafka_times_take(kafka_times *times, rd_kafka_t *rk, kafka_event *event);
void kafka_times_close(kafka_times *times); /* no wake-up runs after it */
void kafka_times_del(kafka_times *times);   /* waits for what is under way; NULL is allowed */

/* The job of destroying one client: allocated when the client is opened, so that destroying cannot fail for memory. */
typedef struct kafka_reaper {
    rd_kafka_t *rk;
    rd_kafka_queue_t *control; /* of a consumer that is to leave its group before; else NULL */
    kafka_nudge *nudge;        /* stopped first; set by whoever has one */
    kafka_times *times;        /* waited for, too; as nudge */
    kafka_links *links;        /* freed last; as nudge */
    kafka_queue **queues;      /* of a consumer, emptied before: see consumer.c */
    size_t n_queues;
    bool closing;
    int flags; /* RD_KAFKA_DESTROY_F_... */
    void (*done)(void *ctx);
    void *ctx;
} kafka_reaper;
kafka_reaper *kafka_reaper_new(void);
/* Starts the thread and returns at once; takes the reaper. */
void kafka_reap(kafka_reaper *reaper, rd_kafka_t *rk, int flags, void (*done)(void *ctx), void *ctx);

/* consumer.c: empties and frees the queues, whose fetchers were told to stop; not the list. Waits for the library's thread, a
 * millisecond at most; closing: for the end of its close, at most two seconds. */
void kafka_queues_free(rd_kafka_t *rk, bool closing, kafka_queue **queues, size_t n);

void kafka_live_add(int n);

#endif
