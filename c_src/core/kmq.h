/* kmq - what every core module shares: error codes, the allocator, the half-open range of offsets.
 *
 * The core has no clock, no randomness, no I/O and no threads: time and jitter are arguments, work comes out as data. */
#ifndef KMQ_H
#define KMQ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    KMQ_OK = 0,
    KMQ_ENOMEM = -1,   /* the allocator said no; the object is unchanged */
    KMQ_EINVAL = -2,   /* an argument out of its range */
    KMQ_EFULL = -3,    /* the output buffer is too small */
    KMQ_EREPEAT = -4,  /* an offset below the position: seen before */
    KMQ_EUNKNOWN = -5, /* never handed out, or settled already */
    KMQ_ELATE = -6     /* its time limit passed before it was settled */
};

/* The allocator: realloc(ctx, NULL, n) allocates, realloc(ctx, p, 0) frees and returns NULL. */
typedef struct kmq_alloc {
    void *(*realloc)(void *ctx, void *ptr, size_t size);
    void *ctx;
} kmq_alloc;

/* realloc and free of the C library */
kmq_alloc kmq_alloc_libc(void);

/* A header of a record that was read; borrowed. */
typedef struct kmq_header {
    const char *name; /* with no NUL behind it */
    size_t name_len;
    const void *value; /* NULL: null */
    size_t value_len;
} kmq_header;

static inline bool kmq_header_is(const kmq_header *header, const char *name)
{
    size_t len = strlen(name);
    return header->name_len == len && memcmp(header->name, name, len) == 0;
}

/* Offsets lo, lo + 1, ... hi - 1. */
typedef struct kmq_range {
    int64_t lo;
    int64_t hi;
} kmq_range;

/* END's cause (design: bytes of section "range markers"). */
typedef enum kmq_end_cause {
    KMQ_END_ACK = 0,
    KMQ_END_DISCARDED = 1,
    KMQ_END_REDELIVERED = 2,
    KMQ_END_DEAD_LETTERED = 3,
    KMQ_END_GONE = 4,
    KMQ_END_EXPIRED = 5,
    KMQ_END_CAUSES = 6
} kmq_end_cause;

/* RETRY's cause. KMQ_RETRY_CRASH stands in no RETRY: it is what a lapsed lease (START, EXTEND) is due for. */
typedef enum kmq_retry_cause {
    KMQ_RETRY_FAILED = 0,
    KMQ_RETRY_TIMEOUT = 1,
    KMQ_RETRY_RELEASED = 2,
    KMQ_RETRY_SNOOZED = 3,
    KMQ_RETRY_REJECTED = 4,
    KMQ_RETRY_EXPIRED = 5, /* its time to live was over before it was handed out */
    KMQ_RETRY_CRASH = 255
} kmq_retry_cause;

enum {
    KMQ_FLAG_COUNTS = 1, /* uses up an attempt */
    KMQ_FLAG_DLQ = 2,    /* goes to the dead letter topic */
    KMQ_FLAG_PARKED = 4  /* CHECKPOINT only: a delayed message */
};

#endif
