#include "store.h"

#include <string.h>
#include "atoms.h"
#include "term.h"

struct store_block {
    store_block *next;
    size_t read, write, size;
    _Alignas(int64_t) unsigned char bytes[]; /* as the entries are; the VM aligns to no more */
};

enum { NO_LENGTH = -1 };

typedef struct store_entry {
    int64_t offset, timestamp_ms;
    int32_t key_len, value_len; /* NO_LENGTH = null */
    uint32_t headers_len, n_headers;
    store_kmq kmq;
    uint32_t size; /* of the whole entry, rounded up */
    bool is_large;
} store_entry;

typedef struct packed_header {
    uint32_t name_len;
    int32_t value_len;
} packed_header;

void store_init(store *s, store_pool *pool, size_t large) { *s = (struct store){.pool = pool, .large = large}; }

void store_pool_free(store_pool *pool)
{
    while (pool->blocks) {
        store_block *block = pool->blocks;
        pool->blocks = block->next;
        enif_free(block);
    }
    pool->n = 0;
}

static store_block *block_new(store_pool *pool, size_t room)
{
    store_block *block = pool && room == STORE_BLOCK ? pool->blocks : NULL;
    if (block) {
        pool->blocks = block->next;
        pool->n--;
    } else {
        block = enif_alloc(sizeof *block + room);
    }
    if (block) *block = (store_block){.size = room};
    return block;
}

static void block_free(store_pool *pool, store_block *block)
{
    if (!pool || pool->n >= STORE_POOL || block->size != STORE_BLOCK) {
        enif_free(block);
        return;
    }
    block->next = pool->blocks;
    pool->blocks = block;
    pool->n++;
}

static store_entry *first_entry(const store *s) { return (store_entry *)(void *)(s->first->bytes + s->first->read); }

/* A large value is a binary of its own already; its handle stands in the value's place, behind the key. */
static ErlNifBinary large_value(const store_entry *entry)
{
    ErlNifBinary bin;
    const unsigned char *at = (const unsigned char *)(entry + 1);
    memcpy(&bin, at + (entry->key_len > 0 ? entry->key_len : 0), sizeof bin);
    return bin;
}

static void drop_entry(store *s, store_entry *entry)
{
    store_block *block = s->first;
    block->read += entry->size;
    s->count--;
    s->crashed -= entry->kmq.crashed;
    if (block->read < block->write) return;
    s->first = block->next;
    if (!s->first) s->last = NULL;
    block_free(s->pool, block);
}

void store_free(store *s)
{
    while (s->count) {
        store_entry *entry = first_entry(s);
        if (entry->is_large) {
            ErlNifBinary bin = large_value(entry);
            enif_release_binary(&bin);
        }
        drop_entry(s, entry);
    }
    store_init(s, s->pool, s->large);
}

static unsigned char *reserve(store *s, size_t size)
{
    store_block *block = s->last;
    if (!block || block->size - block->write < size) {
        size_t room = size > STORE_BLOCK ? size : STORE_BLOCK;
        block = block_new(s->pool, room);
        if (!block) return NULL;
        if (s->last)
            s->last->next = block;
        else
            s->first = block;
        s->last = block;
    }
    unsigned char *at = block->bytes + block->write;
    block->write += size;
    return at;
}

static unsigned char *append(unsigned char *at, const void *bytes, size_t size)
{
    if (size) memcpy(at, bytes, size);
    return at + size;
}

bool store_push(store *s, const kafka_record *record, const kmq_header *headers, size_t n_headers, const store_kmq *kmq)
{
    size_t headers_len = 0;
    for (size_t i = 0; i < n_headers; i++)
        headers_len += sizeof(packed_header) + headers[i].name_len + headers[i].value_len;
    bool large = record->value && record->value_len >= s->large;
    size_t value_len = large ? sizeof(ErlNifBinary) : record->value ? record->value_len : 0;
    size_t key_len = record->key ? record->key_len : 0;
    size_t size = sizeof(store_entry) + key_len + value_len + headers_len;
    size = (size + 15) & ~(size_t)15;

    ErlNifBinary bin = {0};
    if (large) {
        if (!enif_alloc_binary(record->value_len, &bin)) return false;
        memcpy(bin.data, record->value, record->value_len);
    }
    unsigned char *at = reserve(s, size);
    if (!at) {
        if (large) enif_release_binary(&bin);
        return false;
    }
    store_entry *entry = (store_entry *)(void *)at;
    *entry = (store_entry){.offset = record->offset,
                           .timestamp_ms = record->timestamp_ms,
                           .key_len = record->key ? (int32_t)record->key_len : NO_LENGTH,
                           .value_len = record->value ? (int32_t)record->value_len : NO_LENGTH,
                           .headers_len = (uint32_t)headers_len,
                           .n_headers = (uint32_t)n_headers,
                           .kmq = *kmq,
                           .size = (uint32_t)size,
                           .is_large = large};
    at += sizeof *entry;
    at = append(at, record->key, key_len);
    at = append(at, large ? (const void *)&bin : record->value, value_len);
    for (size_t i = 0; i < n_headers; i++) {
        packed_header packed = {.name_len = (uint32_t)headers[i].name_len,
                                .value_len = headers[i].value ? (int32_t)headers[i].value_len : NO_LENGTH};
        at = append(at, &packed, sizeof packed);
        at = append(at, headers[i].name, packed.name_len);
        if (headers[i].value) at = append(at, headers[i].value, headers[i].value_len);
    }
    s->count++;
    s->crashed += kmq->crashed;
    s->bytes += key_len + record->value_len + headers_len;
    return true;
}

int64_t store_first(const store *s) { return first_entry(s)->offset; }

int64_t store_first_expires(const store *s) { return first_entry(s)->kmq.expires_ms; }

bool store_first_crashed(const store *s) { return first_entry(s)->kmq.crashed; }

int32_t store_first_attempt(const store *s) { return first_entry(s)->kmq.attempt; }

const void *store_first_key(const store *s, size_t *len)
{
    const store_entry *entry = first_entry(s);
    *len = entry->key_len > 0 ? (size_t)entry->key_len : 0;
    return entry->key_len == NO_LENGTH ? NULL : (const void *)(entry + 1);
}

int64_t store_uncrashed(const store *s, int64_t most, int64_t below)
{
    if (!s->crashed && below == INT64_MAX) return most;
    int64_t n = 0;
    for (const store_block *block = s->first; block; block = block->next)
        for (size_t at = block->read; at < block->write; n++) {
            const store_entry *entry = (const store_entry *)(const void *)(block->bytes + at);
            if (n == most || entry->kmq.crashed || entry->offset >= below) return n;
            at += entry->size;
        }
    return n;
}

static size_t payload_bytes(const store_entry *entry)
{
    return (entry->key_len > 0 ? (size_t)entry->key_len : 0) + (entry->value_len > 0 ? (size_t)entry->value_len : 0) +
           entry->headers_len;
}

void store_drop(store *s)
{
    store_entry *entry = first_entry(s);
    if (entry->is_large) {
        ErlNifBinary bin = large_value(entry);
        enif_release_binary(&bin);
    }
    s->bytes -= payload_bytes(entry);
    drop_entry(s, entry);
}

static ERL_NIF_TERM take_bytes(ErlNifEnv *env, const unsigned char **at, int32_t len)
{
    if (len == NO_LENGTH) return atoms.nil;
    ERL_NIF_TERM term = term_binary(env, *at, (size_t)len);
    *at += len;
    return term;
}

static ERL_NIF_TERM take_name(ErlNifEnv *env, store_name *known, const unsigned char **at, uint32_t len)
{
    if (known->term && known->len == len && !memcmp(known->bytes, *at, len)) {
        *at += len;
        return known->term;
    }
    const unsigned char *bytes = *at;
    ERL_NIF_TERM term = take_bytes(env, at, (int32_t)len);
    if (len > STORE_NAME_MAX) return term;
    *known = (store_name){.term = term, .len = len};
    memcpy(known->bytes, bytes, len);
    return term;
}

static ERL_NIF_TERM take_headers(ErlNifEnv *env, store_names *names, const unsigned char *at, const store_entry *entry,
                                 ERL_NIF_TERM *id)
{
    ERL_NIF_TERM list = enif_make_list(env, 0);
    for (uint32_t i = 0; i < entry->n_headers; i++) {
        packed_header packed;
        memcpy(&packed, at, sizeof packed);
        at += sizeof packed;
        ERL_NIF_TERM name = take_name(env, &names->at[i % STORE_NAMES], &at, packed.name_len);
        ERL_NIF_TERM value = take_bytes(env, &at, packed.value_len);
        if ((int32_t)i == entry->kmq.id_header) *id = value;
        list = enif_make_list_cell(env, enif_make_tuple2(env, name, value), list);
    }
    enif_make_reverse_list(env, list, &list);
    return list;
}

ERL_NIF_TERM store_take(store *s, ErlNifEnv *env, store_names *names, size_t *bytes)
{
    store_entry *entry = first_entry(s);
    const unsigned char *at = (const unsigned char *)(entry + 1);
    ERL_NIF_TERM key = take_bytes(env, &at, entry->key_len);
    ERL_NIF_TERM value;
    if (entry->is_large) {
        ErlNifBinary bin = large_value(entry);
        value = enif_make_binary(env, &bin);
        at += sizeof bin;
    } else {
        value = take_bytes(env, &at, entry->value_len);
    }
    ERL_NIF_TERM id = atoms.nil;
    ERL_NIF_TERM headers = entry->n_headers ? take_headers(env, names, at, entry, &id) : enif_make_list(env, 0);
    ERL_NIF_TERM term = enif_make_tuple8(
        env, enif_make_int64(env, entry->offset), enif_make_int64(env, entry->timestamp_ms), key, value, headers,
        enif_make_int(env, entry->kmq.attempt), enif_make_int(env, entry->kmq.deliveries), id);
    size_t size = payload_bytes(entry);
    s->bytes -= size;
    *bytes += size;
    drop_entry(s, entry);
    return term;
}
