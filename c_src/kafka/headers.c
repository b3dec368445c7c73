/* headers - a record's headers, from where they lie.
 *
 * librdkafka shows key and value where they lie in the broker's answer, but headers as copies: an allocation of 700 bytes, and three more and
 * 0.2 us for each of them. In the record format since Kafka 0.11 (KIP-98) they stand right behind the value:
 *
 *     length | attributes | timestamp | offset | key length, key | value length, value | number | name length, name, value length, value | ...
 *            |     0      |                                                             ^ here: a zero for most messages
 *            ^------------------------ length bytes from here ------------------------------------------------------------ to the end ^
 *
 * Numbers are zigzag varints (as in Protocol Buffers), a null's length is -1. From the value we go backwards: its length must stand before it, before that
 * the key and its length; a varint ends with the byte that has no high bit, so the two numbers and the attributes are passed too, and the length says where
 * the record ends. In the formats before 0.11 a length has four bytes, of which no combination reads like a varint of the same value, so that these, and
 * whatever else does not look exactly as above, are left to librdkafka.
 *
 * The length is the one number whose begin the bytes do not tell: in front of it is the end of another record. The shortest that the record fits into
 * is taken. A shorter one than the true one leaves headers that do not end where the record does; a longer one is not taken, also where the true one has
 * no room for headers. So nothing is read that is not part of the record, of which librdkafka has seen that it is part of the answer.
 *
 * This holds in every version from 2.0.2 to the one named below; of these it is still checked now and then against librdkafka's own answer, and once it
 * was wrong it is not used any more in this process. */
#include "internal.h"
#include <stdatomic.h>
#include <string.h>

enum {
    SHOWN_KNOWN = 0x021000ff,
    CHECK_FIRST = 64,
    CHECK_EVERY = 4096,
    VARINT_MAX = 5,
    HEADERS_MAX = 100000 /* librdkafka's */
};
static atomic_bool shown_wrong;
static atomic_uint shown;

#if defined(__has_feature)
#define HAS_ASAN __has_feature(address_sanitizer)
#elif defined(__SANITIZE_ADDRESS__)
#define HAS_ASAN 1
#else
#define HAS_ASAN 0
#endif

typedef const unsigned char *bytes;

/* `at` is behind a number; afterwards before it. */
static bool back_over_varint(bytes *at)
{
    bytes p = *at - 1;
    if (*p & 0x80) return false;
    for (int i = 1; p[-1] & 0x80; i++, p--)
        if (i == 2 * VARINT_MAX) return false;
    *at = p;
    return true;
}

/* The same for a length that is known; -1: of a null. */
static bool back_over_length(bytes *at, int64_t length)
{
    uint64_t rest = length < 0 ? 1 : (uint64_t)length << 1;
    unsigned char text[2 * VARINT_MAX];
    size_t n = 0;
    for (; rest > 0x7f; rest >>= 7) text[n++] = (unsigned char)(rest | 0x80);
    text[n++] = (unsigned char)rest;
    if (memcmp(*at - n, text, n) != 0) return false;
    *at -= n;
    return true;
}

static bool read_varint(bytes *at, bytes end, int64_t *out)
{
    uint64_t n = 0;
    for (unsigned shift = 0; shift < 7 * VARINT_MAX && *at < end; shift += 7) {
        unsigned char byte = *(*at)++;
        n |= (uint64_t)(byte & 0x7f) << shift;
        if (byte & 0x80) continue;
        *out = (int64_t)(n >> 1) ^ -(int64_t)(n & 1);
        return true;
    }
    return false;
}

/* Where the record ends that has its headers at `headers`; NULL: it is none of that format. */
static bytes record_end(const void *key, size_t key_len, const void *value, bytes headers)
{
    bytes at = value;
    if (!back_over_length(&at, headers - at)) return NULL;
    if (key_len != 0 && (bytes)key + key_len != at) return NULL; /* librdkafka shows an empty key somewhere else */
    at -= key_len;
    if (!back_over_length(&at, key != NULL ? (int64_t)key_len : -1)) return NULL;
    for (int numbers = 0; numbers < 2; numbers++) /* offset, timestamp */
        if (!back_over_varint(&at)) return NULL;
    if (*--at != 0 || (at[-1] & 0x80)) return NULL;
    for (int n = 1; n <= VARINT_MAX; n++) {
        int64_t length;
        bytes from = at - n;
        if (!read_varint(&from, at, &length)) break;
        if (length == headers - at) break; /* no headers, not even how many: not of a writer that keeps to the format */
        if (length > headers - at) return length <= INT32_MAX ? at + length : NULL;
        if (!(at[-n - 1] & 0x80)) break;
    }
    return NULL;
}

bool kafka_headers_read(const void *key, size_t key_len, const void *value, size_t value_len, kmq_header *out,
                        size_t max, size_t *count)
{
    bytes at = (bytes)value + value_len, end = record_end(key, key_len, value, at);
    int64_t n, len;
    if (end == NULL || !read_varint(&at, end, &n) || n < 0 || n > HEADERS_MAX) return false;
    for (int64_t i = 0; i < n; i++) {
        kmq_header field;
        if (!read_varint(&at, end, &len) || len < 0 || len > end - at) return false;
        field.name = (const char *)at;
        field.name_len = (size_t)len;
        at += len;
        if (memchr(field.name, 0, field.name_len) != NULL) return false; /* librdkafka shows such a name up to there */
        if (!read_varint(&at, end, &len) || len < -1 || len > end - at) return false;
        field.value = len < 0 ? NULL : at;
        field.value_len = len < 0 ? 0 : (size_t)len;
        at += field.value_len;
        if ((size_t)i < max) out[i] = field;
    }
    *count = (size_t)n;
    return at == end;
}

static size_t ask(rd_kafka_message_t *message, kmq_header *out, size_t max)
{
    rd_kafka_headers_t *headers;
    if (rd_kafka_message_headers(message, &headers) != RD_KAFKA_RESP_ERR_NO_ERROR) return 0;
    for (size_t i = 0; i < max; i++) {
        if (rd_kafka_header_get_all(headers, i, &out[i].name, &out[i].value, &out[i].value_len) !=
            RD_KAFKA_RESP_ERR_NO_ERROR)
            break;
        out[i].name_len = strlen(out[i].name);
    }
    return rd_kafka_header_cnt(headers);
}

static bool is_shown(const rd_kafka_message_t *message)
{
    return !HAS_ASAN && message->payload != NULL && message->len != 0 && rd_kafka_version() <= SHOWN_KNOWN &&
           !atomic_load_explicit(&shown_wrong, memory_order_relaxed);
}

/* Its length stands before the value as it does in no older format, where the byte behind it may be none of the buffer's. */
static bool is_bare(const rd_kafka_message_t *message)
{
    bytes value = message->payload, at = value;
    return back_over_length(&at, (int64_t)message->len) && value[message->len] == 0;
}

static bool same(const kmq_header *a, const kmq_header *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (a[i].name_len != b[i].name_len || memcmp(a[i].name, b[i].name, a[i].name_len) != 0 ||
            (a[i].value == NULL) != (b[i].value == NULL) || a[i].value_len != b[i].value_len ||
            (a[i].value_len != 0 && memcmp(a[i].value, b[i].value, a[i].value_len) != 0))
            return false;
    return true;
}

enum { CHECK_HEADERS = 16 };

/* What was seen at the value, against librdkafka's own answer. */
static bool right(rd_kafka_message_t *message, const kmq_header *seen, size_t n, size_t max)
{
    unsigned count = atomic_fetch_add_explicit(&shown, 1, memory_order_relaxed);
    if (count >= CHECK_FIRST && count % CHECK_EVERY != 0) return true;
    kmq_header asked[CHECK_HEADERS];
    size_t look = max < CHECK_HEADERS ? max : CHECK_HEADERS;
    if (ask(message, asked, look) == n && same(seen, asked, n < look ? n : look)) return true;
    atomic_store(&shown_wrong, true);
    return false;
}

size_t kafka_record_headers(const kafka_record *record, kmq_header *out, size_t max)
{
    rd_kafka_message_t *message = record->priv;
    size_t n = 0;
    if (is_shown(message) &&
        (is_bare(message) ||
         kafka_headers_read(record->key, record->key_len, record->value, record->value_len, out, max, &n)) &&
        right(message, out, n, max))
        return n;
    return ask(message, out, max);
}
