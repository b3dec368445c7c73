/* lanes - where an order is kept: which of the caller's processors a message goes to, and whether that one has room.
 *
 *      partition 0 | m3 m2 m1 ---> lane 0  room 7
 *      partition 1 | stands        lane 1  room 0       LANES_PARTITION: a partition has one lane
 *      partition 2 | m9 m8 m7 ---> lane 0
 *
 *      partition 0 | c a b a ----> lanes of crc32(topic NUL key) % n; a null key goes where most room is (LANES_KEY)
 *
 * A message whose lane has no room holds up its own partition (hand-out is in offset order) and nobody else: demand that other
 * processors have asked for is never spent on it.
 *
 * Invariant: no lane gets more than the room that the caller gave. Costs: O(1) a partition, O(key) a message. No lock: engine.lock. */
#ifndef KMQ_LANES_H
#define KMQ_LANES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LANES_MAX = 65536, LANE_UNKNOWN = -1 };

typedef enum lanes_mode { LANES_PARTITION, LANES_KEY } lanes_mode;

typedef struct lanes {
    lanes_mode mode;
    size_t n;
    int64_t *room; /* by lane: what it may still get */
} lanes;

/* CRC-32 as zlib's and erlang:crc32's, carried on from one piece to the next; begins with 0. */
uint32_t lanes_crc(uint32_t crc, const void *bytes, size_t n);
/* The lane of a key, with room or without. key NULL: the one with most room. */
int32_t lanes_of_key(const lanes *l, const char *topic, const void *key, size_t key_len);

#endif
