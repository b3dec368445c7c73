/* kmq_wire - integers to bytes and back, by shifts and never by cast.
 *
 *     u32 u64           big-endian, as Kafka writes them; signed ones in two's complement
 *     uvar              unsigned LEB128: 7 bits a byte, lowest first, the top bit set on all bytes but the last
 *
 *            300 = 10 0101100     ->  AC 02
 *                                     |  '-- 0 0000010   (bits 7..13, the last byte)
 *                                     '----- 1 0101100   (bits 0..6, more to come)
 *
 * Reader and writer walk a borrowed buffer and never leave it: a call that does not fit, or does not make sense,
 * returns false and leaves the walker where it was. So a parser can be a chain of calls joined by &&.
 *
 * A uvar is read from at most 10 bytes and only when its value fits 64 bits. Padding (AC 82 00 for 300) is understood,
 * since some encoders leave room and fill it later; the writer never pads.
 *
 * Costs: O(1) each, no allocation.  Thread rule: none, only the arguments are touched. */
#ifndef KMQ_WIRE_H
#define KMQ_WIRE_H
#include "kmq.h"

enum { KMQ_UVAR_MAX_BYTES = 10 };

static inline void kmq_wire_put_u32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (24 - 8 * i));
}

static inline void kmq_wire_put_u64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> (56 - 8 * i));
}

static inline uint32_t kmq_wire_get_u32(const uint8_t *p)
{
    uint32_t v = 0;
    for (int i = 0; i < 4; i++) v = v << 8 | p[i];
    return v;
}

static inline uint64_t kmq_wire_get_u64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v = v << 8 | p[i];
    return v;
}

/* The int32 / int64 with these bits: a plain conversion of a large value is implementation-defined in C11, this is not.
 */
static inline int32_t kmq_wire_i32(uint32_t v) { return v <= INT32_MAX ? (int32_t)v : -1 - (int32_t)(UINT32_MAX - v); }

static inline int64_t kmq_wire_i64(uint64_t v) { return v <= INT64_MAX ? (int64_t)v : -1 - (int64_t)(UINT64_MAX - v); }

/* What is left of a borrowed buffer: at <= end. */
typedef struct kmq_wire_reader {
    const uint8_t *at, *end;
} kmq_wire_reader;

typedef struct kmq_wire_writer {
    uint8_t *at, *end;
} kmq_wire_writer;

/* An empty buffer may be NULL. */
void kmq_wire_reader_init(kmq_wire_reader *reader, const void *bytes, size_t n);
void kmq_wire_writer_init(kmq_wire_writer *writer, void *bytes, size_t n);

static inline size_t kmq_wire_left(const kmq_wire_reader *reader) { return (size_t)(reader->end - reader->at); }

static inline size_t kmq_wire_room(const kmq_wire_writer *writer) { return (size_t)(writer->end - writer->at); }

/* false: not enough bytes (uvar: or more than 64 bits); reader and *out unchanged. */
bool kmq_wire_read_u8(kmq_wire_reader *reader, uint8_t *out);
bool kmq_wire_read_u32(kmq_wire_reader *reader, uint32_t *out);
bool kmq_wire_read_u64(kmq_wire_reader *reader, uint64_t *out);
bool kmq_wire_read_uvar(kmq_wire_reader *reader, uint64_t *out);
/* a uvar no larger than max: what follows can then be computed without overflow */
bool kmq_wire_read_uvar_max(kmq_wire_reader *reader, uint64_t max, uint64_t *out);
/* n bytes in place: *out points into the reader's buffer */
bool kmq_wire_read_bytes(kmq_wire_reader *reader, size_t n, const uint8_t **out);

/* false: no room; writer and buffer unchanged. */
bool kmq_wire_write_u8(kmq_wire_writer *writer, uint8_t v);
bool kmq_wire_write_u32(kmq_wire_writer *writer, uint32_t v);
bool kmq_wire_write_u64(kmq_wire_writer *writer, uint64_t v);
bool kmq_wire_write_uvar(kmq_wire_writer *writer, uint64_t v);
bool kmq_wire_write_bytes(kmq_wire_writer *writer, const void *bytes, size_t n);

/* bytes that write_uvar needs for v: 1..10 */
size_t kmq_wire_uvar_bytes(uint64_t v);
#endif
