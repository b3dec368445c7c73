/* copy - what a due message becomes: which topic, which headers. Pure but for the allocation of the payload.
 *
 *      record of Q ----> payload (one allocation: headers array | key | value | names and values)
 *           |
 *      due: cause, flags ---> decide ---> copy (count, deliveries)  or  dead letter (the same headers, and the error text)
 *
 * Headers of a copy: all others in their order, then kmq's own, one of each: count, deliveries, cause, group, origin, error (dead
 * letters that have a text), pointer and value-bytes (dead letters without their value: where the original is, and its size). An origin that is there already is kept byte by byte: it names the first publication.
 * Repeated or broken counters: the first of its name is read, unreadable ones saturate (kmq_count_decode), all are replaced.
 * Thread rule: payloads are made in a helper thread and handed over; the rest is pure. */
#ifndef TRACKER_COPY_H
#define TRACKER_COPY_H

#include "kafka.h"
#include "kmq.h"

/* What is kept of a record of Q between reading and copying it. */
typedef struct tracker_payload {
    const void *key, *value; /* NULL = null */
    size_t key_len, value_len;
    kafka_header *headers;
    size_t n_headers;
    int64_t timestamp_ms;
    size_t bytes; /* of memory */
} tracker_payload;

/* How much of a payload goes into a dead letter: a topic that takes no large messages gets a pointer to the original. */
typedef enum tracker_extent {
    TRACKER_WHOLE,
    TRACKER_POINTER,     /* no value */
    TRACKER_BARE_POINTER /* no value, no key, no headers but kmq's own, no error text */
} tracker_extent;

/* About how many bytes of it are written. */
size_t tracker_payload_written(const tracker_payload *payload, tracker_extent extent);

/* Copies the record. NULL = out of memory. Release with free(). */
tracker_payload *tracker_payload_new(const kafka_record *record);

typedef struct tracker_fate {
    bool dead;          /* to the dead letter topic */
    int32_t count;      /* of the copy: failed attempts so far */
    int64_t deliveries; /* of the copy: deliveries so far */
} tracker_fate;

/* cause, flags: what it is due for. A lapsed lease counts, a RETRY says for itself, a PARKed message was never delivered. */
tracker_fate tracker_decide(const kafka_header *headers, size_t n_headers, const char *count_header,
                            int64_t max_redeliveries, uint8_t cause, uint8_t flags);

enum { TRACKER_OWN_HEADERS = 8, TRACKER_ORIGIN_BYTES = 249 + 3 * 21 + 1 };

/* Bytes that rewritten headers point into; as long-lived as they are. */
typedef struct tracker_stamp {
    uint8_t count[4];
    char deliveries[24];
    char origin[TRACKER_ORIGIN_BYTES], place[TRACKER_ORIGIN_BYTES];
    char value_bytes[24];
} tracker_stamp;

typedef struct tracker_source {
    const char *topic; /* of the original; at most 249 bytes, as Kafka has it */
    int32_t partition;
    int64_t offset;
    int64_t timestamp_ms;
    const char *group;
    const char *count_header;
    uint8_t cause, flags;
    const char *text; /* of a RETRY; NULL = none */
    size_t text_len;
    tracker_extent extent;
    size_t value_len; /* of the original, where the extent leaves it out */
} tracker_source;

/* out has room for n + TRACKER_OWN_HEADERS; borrowed from in, source and stamp. Returns how many there are. */
size_t tracker_rewrite(const tracker_source *source, const tracker_fate *fate, const kafka_header *in, size_t n,
                       kafka_header *out, tracker_stamp *stamp);

/* The word in kmq-cause. */
const char *tracker_cause_name(uint8_t cause);

#endif
