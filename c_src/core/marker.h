/* kmq_marker - the one file that reads and writes marker bytes, both formats.
 *
 *     :range   key    | partition i32 BE | -1 i64 BE |                       a Java tracker: END of no message, ignored
 *              value  | 00 | 4B | version 01 | type | crc u32 BE | body | TLVs ... |
 *                                                     '- CRC-32 of queue topic, NUL, group id
 *     :kmq     key    | partition i32 BE | offset i64 BE >= 0 |
 *              value  | 01 | redeliverAfter i64 BE | anything |   START      | 00 |   END
 *
 *     type            body (set: see below)                                    uvar = unsigned LEB128
 *     1 START         set, uvar lease_ms
 *     2 END           set, u8 cause
 *     3 EXTEND        set, uvar lease_ms
 *     4 RETRY         set, uvar delay_ms, u8 cause, u8 flags
 *     5 PARK          set, uvar due_ms
 *     6 CHECKPOINT    uvar as_of, uvar part, uvar parts, uvar n, n x (set, uvar due_ms, u8 cause, u8 flags)
 *     7 CLOCK         -
 *
 *     set             uvar base, u8 form, then
 *         form 0      uvar n, n x (uvar gap, uvar length): gap from base, then from the end of the run before
 *         form 1      uvar bits, bitmap of ceil(bits / 8) bytes, LSB first: bit i = offset base + i
 *
 *     TLV             uvar tag, uvar length, bytes: 1 error text, 2 node, 3 key hash u64 BE, 4 instance u64 BE,
 *                     5 offset of the copy uvar, 6 log time uvar (CHECKPOINT); others are skipped; the first of a tag
 * counts
 *
 * Decoding is strict and total: any bytes give one verdict, nothing is read outside the buffers, nothing is allocated.
 * The whole record is checked before a verdict of OURS, so the cursors over a decoded marker cannot fail. A decoded
 * marker borrows the buffers.
 *
 * Rules a decoded marker keeps: (1) a set has at least one offset (but see kmq_marker_set_next); (2) its runs are
 * ascending, disjoint, not empty, and end at INT64_MAX at most; (3) times are 0 .. INT64_MAX, larger ones saturate;
 * (4) causes and flags are known ones.
 *
 * Costs: linear in the bytes.  Thread rule: none, only the arguments are touched. */
#ifndef KMQ_MARKER_H
#define KMQ_MARKER_H
#include "kmq.h"

typedef enum kmq_marker_type {
    KMQ_MARKER_START = 1,
    KMQ_MARKER_END = 2,
    KMQ_MARKER_EXTEND = 3,
    KMQ_MARKER_RETRY = 4,
    KMQ_MARKER_PARK = 5,
    KMQ_MARKER_CHECKPOINT = 6,
    KMQ_MARKER_CLOCK = 7
} kmq_marker_type;

typedef enum kmq_verdict {
    KMQ_MARKER_OURS,     /* apply it */
    KMQ_MARKER_NEWER,    /* ours, but of a version or type that this code does not know: stop, do not skip */
    KMQ_MARKER_FOREIGN,  /* another queue's or group's: count and skip */
    KMQ_MARKER_MALFORMED /* count and skip */
} kmq_verdict;

enum { KMQ_MARKER_KEY_BYTES = 12, KMQ_MARKER_MAX_BYTES = 65535, KMQ_ERROR_TEXT_MAX = 512 };

/* What kmq_retry_cause_parse gives for the kmq-cause of an EXTEND ("extended") and of a PARK ("parked") in the :kmq format. */
enum { KMQ_CAUSE_PARKED = 253, KMQ_CAUSE_EXTENDED = 254 };

/* A set of offsets inside a record, walked without allocation: begin, then next until false. bytes NULL: the one offset
 * `single` of a :kmq record. */
typedef struct kmq_marker_set {
    const uint8_t *bytes;
    size_t n_bytes;
    int64_t single;
} kmq_marker_set;

typedef struct kmq_marker_cursor {
    const uint8_t *at, *end;
    int64_t base;  /* form 0: end of the run before; form 1: offset of bit 0 */
    uint64_t left; /* form 0: runs to come; form 1: bits in all */
    uint64_t bit;  /* form 1: the next bit to look at */
    uint8_t form;
} kmq_marker_cursor;

void kmq_marker_set_begin(const kmq_marker_set *set, kmq_marker_cursor *cursor);
/* Runs that touch may come one by one. The :kmq key with offset 2^63-1 is a legal record whose offset no half-open
 * range can hold (and no Kafka log): its set gives no run. */
bool kmq_marker_set_next(kmq_marker_cursor *cursor, kmq_range *run);

typedef struct kmq_marker_tlv {
    const char *text; /* NULL = none; not NUL-terminated */
    size_t text_len;
    const char *node;
    size_t node_len;
    uint64_t key_hash, instance;
    int64_t copy_offset, log_time_ms;
    bool has_key_hash, has_instance, has_copy_offset, has_log_time;
} kmq_marker_tlv;

typedef struct kmq_marker {
    kmq_marker_type type;
    int32_t partition;  /* of the queue topic, from the key */
    kmq_marker_set set; /* START END EXTEND RETRY PARK */
    int64_t time_ms;    /* lease_ms, delay_ms; PARK: due in epoch ms; saturated to INT64_MAX */
    uint8_t cause, flags;
    kmq_marker_tlv tlv;
    int64_t as_of; /* CHECKPOINT: from here on */
    uint32_t part, parts;
    const uint8_t *entries;
    size_t entries_bytes;
} kmq_marker;

/* One (queue topic, group). The group's bytes are borrowed as long as the scope is used. */
typedef struct kmq_marker_scope {
    uint32_t crc;
    const char *group;
    size_t group_len;
} kmq_marker_scope;

void kmq_marker_scope_init(kmq_marker_scope *scope, const char *topic, size_t topic_len, const char *group,
                           size_t group_len);

/* value NULL = tombstone (malformed). partition = the marker record's own partition: a key that names another is
 * malformed. Of the headers, :kmq format uses kmq-group, kmq-cause, kmq-error, kmq-flags, and kmq-due (epoch ms) for a PARK; the first
 * of a name counts. All verdicts leave *out valid to read; only OURS gives it meaning. */
kmq_verdict kmq_marker_decode(const kmq_marker_scope *scope, int32_t partition, const void *key, size_t key_len,
                              const void *value, size_t value_len, const kmq_header *headers, size_t n_headers,
                              kmq_marker *out);
/* version and type that a NEWER record carries, for the alarm's text */
void kmq_marker_newer(const void *value, size_t value_len, uint8_t *version, uint8_t *type);

void kmq_marker_encode_key(uint8_t key[KMQ_MARKER_KEY_BYTES], int32_t partition,
                           int64_t offset); /* offset -1: :range */

/* One :range record of type START, END, EXTEND, RETRY or PARK, with as many leading ranges as fit in cap and in
 * KMQ_MARKER_MAX_BYTES; *used = ranges consumed (a range that does not fit whole goes to the next record). ranges:
 * ascending, disjoint, not empty, from 0 on. Of cause and flags, only what the type has is looked at. tlv may be NULL;
 * its text is cut at KMQ_ERROR_TEXT_MAX bytes, at a character's edge. Returns bytes written, KMQ_EINVAL, or KMQ_EFULL
 * when not even one range fits; then *used is 0. */
int kmq_marker_encode(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, kmq_marker_type type,
                      const kmq_range *ranges, size_t n_ranges, int64_t time_ms, uint8_t cause, uint8_t flags,
                      const kmq_marker_tlv *tlv, size_t *used);
int kmq_marker_encode_clock(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, const kmq_marker_tlv *tlv);

/* CHECKPOINT: the entries are encoded one by one into a buffer, then framed; see kmq_lease_book_checkpoint. cause
 * KMQ_RETRY_CRASH = a lease (START, EXTEND). */
typedef struct kmq_checkpoint_entry {
    kmq_marker_set set;
    int64_t due_ms;
    uint8_t cause, flags;
} kmq_checkpoint_entry;

typedef struct kmq_checkpoint_cursor {
    const uint8_t *at, *end;
} kmq_checkpoint_cursor;

/* Bytes of entries that fit any CHECKPOINT record. */
enum { KMQ_CHECKPOINT_ENTRIES_MAX = KMQ_MARKER_MAX_BYTES - 128 };

void kmq_marker_entries_begin(const kmq_marker *marker, kmq_checkpoint_cursor *cursor);
bool kmq_marker_entries_next(kmq_checkpoint_cursor *cursor, kmq_checkpoint_entry *entry);
/* entries: whole ones as kmq_marker_encode_entry wrote them, possibly none. tlv: the log time, and an instance that is the
 * same for all parts of one checkpoint and for no other; may be NULL.
 * Bytes written, KMQ_EINVAL (also when entries are not well formed) or KMQ_EFULL. */
int kmq_marker_encode_checkpoint(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, int64_t as_of, uint32_t part,
                                 uint32_t parts, const uint8_t *entries, size_t entries_bytes,
                                 const kmq_marker_tlv *tlv);
/* ranges and *used as in kmq_marker_encode */
int kmq_marker_encode_entry(uint8_t *buf, size_t cap, const kmq_range *ranges, size_t n_ranges, int64_t due_ms,
                            uint8_t cause, uint8_t flags, size_t *used);

/* :kmq values: START, EXTEND and RETRY = 9 bytes, END = 1 byte. Return bytes written or KMQ_EINVAL (negative time). */
int kmq_marker_encode_kmq_start(uint8_t buf[9], int64_t after_ms);
int kmq_marker_encode_kmq_end(uint8_t buf[1]);

/* The text of a kmq-cause header: "failed" "timeout" "released" "snoozed" "rejected" "expired" "crash" "extended"
 * "parked"; NULL = no such cause. And back: a kmq_retry_cause or KMQ_CAUSE_...; -1 = unknown. */
const char *kmq_retry_cause_name(uint8_t cause);
int kmq_retry_cause_parse(const void *text, size_t len);

/* A time as a header carries it (kmq-due, kmq-expires): decimal epoch ms. -1 = not one; more than INT64_MAX saturates. */
int64_t kmq_time_parse(const void *text, size_t len);

/* The count of kmq-redelivery-count: one signed byte, else int32 BE. No header (bytes NULL) = 0; any other length or
 * a negative = saturated to INT32_MAX. Encoding a negative count gives 0. */
int32_t kmq_count_decode(const void *bytes, size_t len);
size_t kmq_count_encode(uint8_t buf[4], int32_t count);
#endif
