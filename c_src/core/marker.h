/* prototypes; the implementation adds the picture, the byte tables and the rules (style.md)
 *
 * The one file that reads and writes marker bytes: both formats. Decoding is strict and total: any bytes give one of the
 * verdicts, nothing is read outside the buffers, nothing is allocated; a decoded marker borrows the buffers. */
#ifndef KMQ_MARKER_H
#define KMQ_MARKER_H
#include "kmq.h"
typedef enum kmq_marker_type {
    KMQ_MARKER_START = 1, KMQ_MARKER_END = 2, KMQ_MARKER_EXTEND = 3, KMQ_MARKER_RETRY = 4,
    KMQ_MARKER_PARK = 5, KMQ_MARKER_CHECKPOINT = 6, KMQ_MARKER_CLOCK = 7
} kmq_marker_type;
typedef enum kmq_verdict { KMQ_MARKER_OURS, KMQ_MARKER_NEWER, KMQ_MARKER_FOREIGN, KMQ_MARKER_MALFORMED } kmq_verdict;

enum { KMQ_MARKER_KEY_BYTES = 12, KMQ_MARKER_MAX_BYTES = 65535, KMQ_ERROR_TEXT_MAX = 512 };

/* A set of offsets inside a record, walked without allocation: init with the marker's set, then next until false. */
typedef struct kmq_marker_set { const uint8_t *bytes; size_t n_bytes; int64_t single; } kmq_marker_set; /* author may change the fields */
typedef struct kmq_marker_cursor { const uint8_t *at, *end; int64_t base; uint64_t left; uint8_t form; } kmq_marker_cursor; /* likewise */
void kmq_marker_set_begin(const kmq_marker_set *set, kmq_marker_cursor *cursor);
bool kmq_marker_set_next(kmq_marker_cursor *cursor, kmq_range *run);

typedef struct kmq_marker_tlv { const char *text; size_t text_len; const char *node; size_t node_len; uint64_t key_hash, instance; int64_t copy_offset; bool has_key_hash, has_instance, has_copy_offset; } kmq_marker_tlv;

typedef struct kmq_marker {
    kmq_marker_type type;
    int32_t partition;   /* of the queue topic, from the key */
    kmq_marker_set set;  /* START END EXTEND RETRY PARK */
    int64_t time_ms;     /* lease_ms, delay_ms; PARK: due in epoch ms; saturated to INT64_MAX */
    uint8_t cause, flags;
    kmq_marker_tlv tlv;
    int64_t as_of; uint32_t part, parts; const uint8_t *entries; size_t entries_bytes; /* CHECKPOINT */
} kmq_marker;

/* Record headers that :kmq format uses: kmq-group, kmq-cause, kmq-error. */
typedef struct kmq_marker_header { const char *name; const void *value; size_t value_len; } kmq_marker_header;
typedef struct kmq_marker_scope { uint32_t crc; const char *group; size_t group_len; } kmq_marker_scope; /* of one (Q, group) */
void kmq_marker_scope_init(kmq_marker_scope *scope, const char *topic, size_t topic_len, const char *group, size_t group_len);
/* value NULL = tombstone (malformed). partition = the marker record's own partition: a key that names another is malformed. */
kmq_verdict kmq_marker_decode(const kmq_marker_scope *scope, int32_t partition, const void *key, size_t key_len, const void *value, size_t value_len,
                              const kmq_marker_header *headers, size_t n_headers, kmq_marker *out);
/* version and type that a NEWER record carries, for the alarm's text */
void kmq_marker_newer(const void *value, size_t value_len, uint8_t *version, uint8_t *type);

void kmq_marker_encode_key(uint8_t key[KMQ_MARKER_KEY_BYTES], int32_t partition, int64_t offset); /* offset -1 for :range */

/* :range records. Encodes as many leading ranges as fit (ascending, disjoint, non-empty); *used = ranges consumed (a range that
 * does not fit whole goes to the next record), returns bytes written or KMQ_EINVAL / KMQ_EFULL. tlv may be NULL. */
int kmq_marker_encode(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, kmq_marker_type type, const kmq_range *ranges, size_t n_ranges,
                      int64_t time_ms, uint8_t cause, uint8_t flags, const kmq_marker_tlv *tlv, size_t *used);
int kmq_marker_encode_clock(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, const kmq_marker_tlv *tlv);

/* CHECKPOINT: entries are encoded one by one into a part; see kmq_lease_book_checkpoint. */
typedef struct kmq_checkpoint_entry { kmq_marker_set set; int64_t due_ms; uint8_t cause, flags; } kmq_checkpoint_entry;
typedef struct kmq_checkpoint_cursor { const uint8_t *at, *end; } kmq_checkpoint_cursor;
void kmq_marker_entries_begin(const kmq_marker *marker, kmq_checkpoint_cursor *cursor);
bool kmq_marker_entries_next(kmq_checkpoint_cursor *cursor, kmq_checkpoint_entry *entry);
int kmq_marker_encode_checkpoint(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, int64_t as_of, uint32_t part, uint32_t parts,
                                 const uint8_t *entries, size_t entries_bytes);
int kmq_marker_encode_entry(uint8_t *buf, size_t cap, const kmq_range *ranges, size_t n_ranges, int64_t due_ms, uint8_t cause, uint8_t flags, size_t *used);

/* :kmq values: START/EXTEND/RETRY = 9 bytes, END = 1 byte. */
int kmq_marker_encode_kmq_start(uint8_t buf[9], int64_t after_ms);
int kmq_marker_encode_kmq_end(uint8_t buf[1]);
/* names for the kmq-cause header: "failed" "timeout" "released" "snoozed" "rejected" "crash" "extended"; -1 = unknown */
const char *kmq_retry_cause_name(uint8_t cause);
int kmq_retry_cause_parse(const void *text, size_t len);

/* The count of kmq-redelivery-count: one signed byte, else int32 BE. Absent = 0; any other length or a negative = saturated to INT32_MAX. */
int32_t kmq_count_decode(const void *bytes, size_t len);
size_t kmq_count_encode(uint8_t buf[4], int32_t count);
#endif
