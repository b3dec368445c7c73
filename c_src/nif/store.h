/* store - the messages of one partition that are fetched and not handed out, as bytes of our own, in offset order.
 *
 *      first block                last block
 *     +-----------------------+  +---------------------+
 *     | entry bytes | entry.. |->| entry bytes |   free|      entry = store_entry + key + value + packed headers
 *     +----^------------------+  +-------------^-------+
 *          read                                write
 *
 * librdkafka's own message must not outlive the call that popped it (a held one pins megabytes and blocks destroy), and
 * at that moment no process has asked for it yet; so the bytes are copied here once, and once more into the binary of whoever
 * takes it. Large values go straight into the binary that is handed out: one copy. Large is what two copies cost more than an allocation: STORE_LARGE,
 * while the bytes are still in the cache when they are taken; where they wait for their START first they are not, and STORE_LARGE_WAITS is enough.
 *
 * Invariants: (1) count = entries between read and write; (2) only the last block is written; (3) a block is freed when its last
 * entry is taken. Costs: push and take O(bytes). Thread rule: the engine's lock. */
#ifndef KMQ_STORE_H
#define KMQ_STORE_H

#include <erl_nif.h>
#include "kafka.h"

enum { STORE_BLOCK = 64 * 1024, STORE_LARGE = 8 * 1024, STORE_LARGE_WAITS = 512, STORE_POOL = 64 };

typedef struct store_block store_block;

/* Blocks that were read to their end, for all stores of an engine: the VM would give their pages back, and fresh ones are a page fault each. The last
 * one is in the cache still. At most STORE_POOL of them, 4 MiB. */
typedef struct store_pool {
    store_block *blocks;
    size_t n;
} store_pool;

typedef struct store {
    store_pool *pool; /* NULL: none */
    size_t large;     /* in bytes */
    store_block *first, *last;
    size_t count;
    size_t bytes;   /* of keys, values and headers, for the engine's bound */
    size_t crashed; /* entries whose last cause was a crash */
} store;

/* What kmq's own headers say about a message. */
typedef struct store_kmq {
    int32_t attempt;    /* failures so far + 1 */
    int32_t deliveries; /* hand-outs so far + 1 */
    int32_t id_header;  /* index of kmq-origin in headers, -1 = none */
    int64_t expires_ms; /* epoch ms, INT64_MAX = never */
    bool crashed;       /* its last cause was a crash */
} store_kmq;

/* Names of headers that one call made terms of: the next message's most often are the same, in the same places, and share them. */
enum { STORE_NAMES = 8, STORE_NAME_MAX = 32 };
typedef struct store_name {
    ERL_NIF_TERM term; /* 0: none yet */
    uint32_t len;
    unsigned char bytes[STORE_NAME_MAX];
} store_name;
typedef struct store_names {
    store_name at[STORE_NAMES];
} store_names;

void store_pool_free(store_pool *pool);
void store_init(store *store, store_pool *pool, size_t large);
void store_free(store *store);
/* Copies the record and its headers. false = no memory, unchanged. */
bool store_push(store *store, const kafka_record *record, const kmq_header *headers, size_t n_headers,
                const store_kmq *kmq);
/* Offset of the first entry; only when count > 0. */
int64_t store_first(const store *store);
/* When it expires. */
int64_t store_first_expires(const store *store);
/* Its key, NULL = null; borrowed until the entry is taken. */
const void *store_first_key(const store *store, size_t *len);
/* Whether its last cause was a crash, and which attempt it is. */
bool store_first_crashed(const store *store);
int32_t store_first_attempt(const store *store);
/* How many of the first `most` entries are below the offset and before the first that crashed. O(1) without such limits, else O(most). */
int64_t store_uncrashed(const store *store, int64_t most, int64_t below);
/* Takes it out unseen. */
void store_drop(store *store);
/* Takes the first entry out as the term {Offset, Ts, Key, Value, Headers, Attempt, Deliveries, Id | nil}. names: of this env, zeroed at first. */
ERL_NIF_TERM store_take(store *store, ErlNifEnv *env, store_names *names, size_t *bytes);

#endif
