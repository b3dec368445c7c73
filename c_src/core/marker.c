/* kmq_marker - see marker.h for the bytes and the rules. Sections: sets, decoding, encoding, small values. */
#include "marker.h"
#include "wire.h"

#include <assert.h>
#include <string.h>

enum {
    MAGIC_0 = 0x00, /* a Java tracker's END */
    MAGIC_1 = 0x4b,
    VERSION = 1,
    HEAD_BYTES = 8, /* magic, version, type, crc */
    KMQ_START_BYTE = 0x01,
    KMQ_START_BYTES = 9,
    KMQ_END_BYTE = 0x00
};

enum { FORM_RUNS = 0, FORM_BITMAP = 1 };

enum { TLV_TEXT = 1, TLV_NODE = 2, TLV_KEY_HASH = 3, TLV_INSTANCE = 4, TLV_COPY_OFFSET = 5, TLV_LOG_TIME = 6 };

enum { RETRY_FLAGS = KMQ_FLAG_COUNTS | KMQ_FLAG_DLQ };

/* ---- sets */

/* 64 bits of a bitmap from bit 64 * index on; bits behind its last byte are 0 */
static uint64_t bitmap_word(const uint8_t *bytes, size_t n_bytes, uint64_t index)
{
    uint64_t word = 0;
    size_t from = (size_t)index * 8;
    for (size_t i = 0; i < 8 && from + i < n_bytes; i++) word |= (uint64_t)bytes[from + i] << (8 * i);
    return word;
}

/* the first bit at or after `bit` that is `value`; `bits` if there is none */
static uint64_t bitmap_find(const uint8_t *bytes, size_t n_bytes, uint64_t bits, uint64_t bit, bool value)
{
    while (bit < bits) {
        uint64_t word = bitmap_word(bytes, n_bytes, bit / 64);
        if (!value) word = ~word;
        word &= UINT64_MAX << bit % 64;
        if (word != 0) {
            bit = bit / 64 * 64 + (uint64_t)__builtin_ctzll(word);
            return bit < bits ? bit : bits;
        }
        bit = (bit / 64 + 1) * 64;
    }
    return bits;
}

static bool read_runs(kmq_wire_reader *reader, int64_t base)
{
    uint64_t n, gap, length;
    if (!kmq_wire_read_uvar_max(reader, kmq_wire_left(reader) / 2, &n) || n == 0) return false;
    for (; n > 0; n--) {
        if (!kmq_wire_read_uvar_max(reader, (uint64_t)(INT64_MAX - base), &gap)) return false;
        base += (int64_t)gap;
        if (!kmq_wire_read_uvar_max(reader, (uint64_t)(INT64_MAX - base), &length) || length == 0) return false;
        base += (int64_t)length;
    }
    return true;
}

static bool read_bitmap(kmq_wire_reader *reader, int64_t base)
{
    uint64_t bits;
    const uint8_t *bytes;
    if (!kmq_wire_read_uvar_max(reader, (uint64_t)(INT64_MAX - base), &bits)) return false;
    uint64_t n_bytes = bits / 8 + (bits % 8 != 0);
    if (bits == 0 || n_bytes > kmq_wire_left(reader) || !kmq_wire_read_bytes(reader, (size_t)n_bytes, &bytes))
        return false;
    if (bits % 8 != 0 && bytes[n_bytes - 1] >> bits % 8 != 0) return false; /* bits that no offset stands for */
    return bitmap_find(bytes, (size_t)n_bytes, bits, 0, true) < bits;
}

/* checks a set and steps over it */
static bool read_set(kmq_wire_reader *reader, kmq_marker_set *set)
{
    uint64_t base;
    uint8_t form;
    const uint8_t *from = reader->at;
    if (!kmq_wire_read_uvar_max(reader, INT64_MAX, &base) || !kmq_wire_read_u8(reader, &form)) return false;
    if (form == FORM_RUNS) {
        if (!read_runs(reader, (int64_t)base)) return false;
    } else if (form != FORM_BITMAP || !read_bitmap(reader, (int64_t)base)) {
        return false;
    }
    *set = (kmq_marker_set){.bytes = from, .n_bytes = (size_t)(reader->at - from)};
    return true;
}

void kmq_marker_set_begin(const kmq_marker_set *set, kmq_marker_cursor *cursor)
{
    kmq_wire_reader reader;
    uint64_t base = 0;
    *cursor = (kmq_marker_cursor){.form = FORM_RUNS};
    if (set->bytes == NULL) {
        cursor->base = set->single;
        cursor->left = set->single >= 0 && set->single < INT64_MAX;
        return;
    }
    kmq_wire_reader_init(&reader, set->bytes, set->n_bytes);
    bool ok = kmq_wire_read_uvar(&reader, &base) && kmq_wire_read_u8(&reader, &cursor->form) &&
              kmq_wire_read_uvar(&reader, &cursor->left);
    assert(ok); /* decode has walked it */
    if (!ok) cursor->left = 0;
    cursor->base = (int64_t)base;
    cursor->at = reader.at;
    cursor->end = reader.end;
}

bool kmq_marker_set_next(kmq_marker_cursor *cursor, kmq_range *run)
{
    if (cursor->form == FORM_BITMAP) {
        size_t n_bytes = (size_t)(cursor->end - cursor->at);
        uint64_t from = bitmap_find(cursor->at, n_bytes, cursor->left, cursor->bit, true);
        if (from == cursor->left) return false;
        cursor->bit = bitmap_find(cursor->at, n_bytes, cursor->left, from, false);
        *run = (kmq_range){cursor->base + (int64_t)from, cursor->base + (int64_t)cursor->bit};
        return true;
    }
    if (cursor->left == 0) return false;
    cursor->left--;
    if (cursor->at == NULL) { /* a single offset */
        *run = (kmq_range){cursor->base, cursor->base + 1};
        return true;
    }
    kmq_wire_reader reader;
    uint64_t gap = 0, length = 0;
    kmq_wire_reader_init(&reader, cursor->at, (size_t)(cursor->end - cursor->at));
    bool ok = kmq_wire_read_uvar(&reader, &gap) && kmq_wire_read_uvar(&reader, &length);
    assert(ok); /* decode has walked it */
    if (!ok) return false;
    run->lo = cursor->base + (int64_t)gap;
    run->hi = cursor->base = run->lo + (int64_t)length;
    cursor->at = reader.at;
    return true;
}

/* ---- decoding */

static bool read_time(kmq_wire_reader *reader, int64_t *time_ms)
{
    uint64_t v;
    if (!kmq_wire_read_uvar(reader, &v)) return false;
    *time_ms = v < INT64_MAX ? (int64_t)v : INT64_MAX;
    return true;
}

static bool read_tlv_u64(const uint8_t *bytes, uint64_t len, bool *has, uint64_t *out)
{
    if (len != 8) return false;
    if (!*has) *out = kmq_wire_get_u64(bytes);
    *has = true;
    return true;
}

static bool read_tlv_uvar(const uint8_t *bytes, uint64_t len, bool *has, int64_t *out)
{
    kmq_wire_reader reader;
    uint64_t v;
    kmq_wire_reader_init(&reader, bytes, (size_t)len);
    if (!kmq_wire_read_uvar_max(&reader, INT64_MAX, &v) || kmq_wire_left(&reader) != 0) return false;
    if (!*has) *out = (int64_t)v;
    *has = true;
    return true;
}

static bool read_tlvs(kmq_wire_reader *reader, kmq_marker_tlv *tlv)
{
    while (kmq_wire_left(reader) > 0) {
        uint64_t tag, len;
        const uint8_t *bytes;
        bool ok = true;
        if (!kmq_wire_read_uvar(reader, &tag) || !kmq_wire_read_uvar(reader, &len)) return false;
        if (len > kmq_wire_left(reader) || !kmq_wire_read_bytes(reader, (size_t)len, &bytes)) return false;
        switch (tag) {
        case TLV_TEXT:
            if (len > KMQ_ERROR_TEXT_MAX) return false;
            if (tlv->text == NULL) tlv->text = (const char *)bytes, tlv->text_len = (size_t)len;
            break;
        case TLV_NODE:
            if (tlv->node == NULL) tlv->node = (const char *)bytes, tlv->node_len = (size_t)len;
            break;
        case TLV_KEY_HASH: ok = read_tlv_u64(bytes, len, &tlv->has_key_hash, &tlv->key_hash); break;
        case TLV_INSTANCE: ok = read_tlv_u64(bytes, len, &tlv->has_instance, &tlv->instance); break;
        case TLV_COPY_OFFSET: ok = read_tlv_uvar(bytes, len, &tlv->has_copy_offset, &tlv->copy_offset); break;
        case TLV_LOG_TIME: ok = read_tlv_uvar(bytes, len, &tlv->has_log_time, &tlv->log_time_ms); break;
        default: break; /* of a later writer, or free for anybody */
        }
        if (!ok) return false;
    }
    return true;
}

static bool entry_cause_ok(uint8_t cause) { return cause <= KMQ_RETRY_EXPIRED || cause == KMQ_RETRY_CRASH; }

static bool read_entry(kmq_wire_reader *reader, kmq_checkpoint_entry *entry)
{
    return read_set(reader, &entry->set) && read_time(reader, &entry->due_ms) &&
           kmq_wire_read_u8(reader, &entry->cause) && kmq_wire_read_u8(reader, &entry->flags) &&
           entry_cause_ok(entry->cause) && (entry->flags & ~(RETRY_FLAGS | KMQ_FLAG_PARKED)) == 0;
}

static bool read_checkpoint(kmq_wire_reader *reader, kmq_marker *out)
{
    uint64_t as_of, part, parts, n;
    kmq_checkpoint_entry entry;
    if (!kmq_wire_read_uvar_max(reader, INT64_MAX, &as_of) || !kmq_wire_read_uvar_max(reader, UINT32_MAX, &part) ||
        !kmq_wire_read_uvar_max(reader, UINT32_MAX, &parts) || part >= parts || !kmq_wire_read_uvar(reader, &n))
        return false;
    out->as_of = (int64_t)as_of;
    out->part = (uint32_t)part;
    out->parts = (uint32_t)parts;
    out->entries = reader->at;
    for (; n > 0; n--)
        if (!read_entry(reader, &entry)) return false;
    out->entries_bytes = (size_t)(reader->at - out->entries);
    return true;
}

static bool read_body(kmq_wire_reader *reader, kmq_marker *out)
{
    switch (out->type) {
    case KMQ_MARKER_START:
    case KMQ_MARKER_EXTEND:
    case KMQ_MARKER_PARK: return read_set(reader, &out->set) && read_time(reader, &out->time_ms);
    case KMQ_MARKER_END:
        return read_set(reader, &out->set) && kmq_wire_read_u8(reader, &out->cause) && out->cause < KMQ_END_CAUSES;
    case KMQ_MARKER_RETRY:
        return read_set(reader, &out->set) && read_time(reader, &out->time_ms) &&
               kmq_wire_read_u8(reader, &out->cause) && out->cause <= KMQ_RETRY_EXPIRED &&
               kmq_wire_read_u8(reader, &out->flags) && (out->flags & ~RETRY_FLAGS) == 0;
    case KMQ_MARKER_CHECKPOINT: return read_checkpoint(reader, out);
    case KMQ_MARKER_CLOCK: return true;
    }
    return false; /* no such type: the caller has looked, no test gets here */
}

static kmq_verdict decode_range(const kmq_marker_scope *scope, const uint8_t *value, size_t value_len, kmq_marker *out)
{
    kmq_wire_reader reader;
    if (value_len < HEAD_BYTES || value[0] != MAGIC_0 || value[1] != MAGIC_1) return KMQ_MARKER_MALFORMED;
    if (kmq_wire_get_u32(value + 4) != scope->crc) return KMQ_MARKER_FOREIGN;
    if (value[2] != VERSION || value[3] < KMQ_MARKER_START || value[3] > KMQ_MARKER_CLOCK) return KMQ_MARKER_NEWER;
    out->type = (kmq_marker_type)value[3];
    kmq_wire_reader_init(&reader, value + HEAD_BYTES, value_len - HEAD_BYTES);
    return read_body(&reader, out) && read_tlvs(&reader, &out->tlv) ? KMQ_MARKER_OURS : KMQ_MARKER_MALFORMED;
}

static const kmq_header *find_header(const kmq_header *headers, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (kmq_header_is(&headers[i], name)) return &headers[i];
    return NULL;
}

/* Where to cut UTF-8 so that at most max bytes are left and no character is split. Text that is not UTF-8 is cut at
 * max. */
static size_t cut_text(const char *text, size_t len, size_t max)
{
    if (len <= max) return len;
    size_t cut = max;
    while (cut > 0 && max - cut < 4 && ((uint8_t)text[cut] & 0xc0) == 0x80) cut--;
    return ((uint8_t)text[cut] & 0xc0) == 0x80 ? max : cut;
}

/* A kmq-cause header makes a START a RETRY, an EXTEND or a PARK, or leaves it what it is: a lease. */
static kmq_verdict decode_cause(const kmq_header *cause, const kmq_header *headers, size_t n_headers, kmq_marker *out)
{
    int parsed = kmq_retry_cause_parse(cause->value, cause->value_len);
    if (parsed < 0) return KMQ_MARKER_MALFORMED;
    if (parsed == KMQ_RETRY_CRASH) return KMQ_MARKER_OURS;
    if (parsed == KMQ_CAUSE_EXTENDED) {
        out->type = KMQ_MARKER_EXTEND;
        return KMQ_MARKER_OURS;
    }
    if (parsed ==
        KMQ_CAUSE_PARKED) { /* the time itself is in a header: exact, and the same for whoever reads it when */
        const kmq_header *due = find_header(headers, n_headers, "kmq-due");
        out->type = KMQ_MARKER_PARK;
        out->time_ms = due != NULL && due->value != NULL ? kmq_time_parse(due->value, due->value_len) : -1;
        return out->time_ms >= 0 ? KMQ_MARKER_OURS : KMQ_MARKER_MALFORMED;
    }
    out->type = KMQ_MARKER_RETRY;
    out->cause = (uint8_t)parsed;
    out->flags = parsed == KMQ_RETRY_RELEASED || parsed == KMQ_RETRY_SNOOZED ? 0
                 : parsed == KMQ_RETRY_REJECTED                              ? RETRY_FLAGS
                 : parsed == KMQ_RETRY_EXPIRED                               ? KMQ_FLAG_DLQ
                                                                             : KMQ_FLAG_COUNTS;
    const kmq_header *flags = find_header(headers, n_headers, "kmq-flags");
    if (flags != NULL) {
        const uint8_t *digit = flags->value;
        if (digit == NULL || flags->value_len != 1 || *digit < '0' || *digit > '0' + RETRY_FLAGS)
            return KMQ_MARKER_MALFORMED;
        out->flags = (uint8_t)(*digit - '0');
    }
    const kmq_header *error = find_header(headers, n_headers, "kmq-error");
    if (error != NULL && error->value != NULL) {
        out->tlv.text = error->value;
        out->tlv.text_len = cut_text(error->value, error->value_len, KMQ_ERROR_TEXT_MAX);
    }
    return KMQ_MARKER_OURS;
}

static kmq_verdict decode_kmq(const kmq_marker_scope *scope, int64_t offset, const uint8_t *value, size_t value_len,
                              const kmq_header *headers, size_t n_headers, kmq_marker *out)
{
    const kmq_header *group = find_header(headers, n_headers, "kmq-group");
    if (group != NULL && (group->value_len != scope->group_len ||
                          (scope->group_len > 0 && memcmp(group->value, scope->group, scope->group_len) != 0)))
        return KMQ_MARKER_FOREIGN;
    out->set = (kmq_marker_set){.single = offset};
    if (value[0] == KMQ_END_BYTE && value_len == 1) {
        out->type = KMQ_MARKER_END;
        out->cause = KMQ_END_ACK;
        return KMQ_MARKER_OURS;
    }
    if (value[0] != KMQ_START_BYTE || value_len < KMQ_START_BYTES) return KMQ_MARKER_MALFORMED;
    out->type = KMQ_MARKER_START;
    out->time_ms = kmq_wire_i64(kmq_wire_get_u64(value + 1));
    if (out->time_ms < 0) return KMQ_MARKER_MALFORMED;
    const kmq_header *cause = find_header(headers, n_headers, "kmq-cause");
    return cause == NULL ? KMQ_MARKER_OURS : decode_cause(cause, headers, n_headers, out);
}

kmq_verdict kmq_marker_decode(const kmq_marker_scope *scope, int32_t partition, const void *key, size_t key_len,
                              const void *value, size_t value_len, const kmq_header *headers, size_t n_headers,
                              kmq_marker *out)
{
    *out = (kmq_marker){.type = KMQ_MARKER_CLOCK};
    if (key == NULL || key_len != KMQ_MARKER_KEY_BYTES || value == NULL || value_len == 0) return KMQ_MARKER_MALFORMED;
    out->partition = kmq_wire_i32(kmq_wire_get_u32(key));
    int64_t offset = kmq_wire_i64(kmq_wire_get_u64((const uint8_t *)key + 4));
    if (partition < 0 || out->partition != partition || offset < -1) return KMQ_MARKER_MALFORMED;
    if (offset == -1) return decode_range(scope, value, value_len, out);
    return decode_kmq(scope, offset, value, value_len, headers, n_headers, out);
}

void kmq_marker_newer(const void *value, size_t value_len, uint8_t *version, uint8_t *type)
{
    const uint8_t *bytes = value;
    *version = value_len > 2 ? bytes[2] : 0;
    *type = value_len > 3 ? bytes[3] : 0;
}

void kmq_marker_entries_begin(const kmq_marker *marker, kmq_checkpoint_cursor *cursor)
{
    *cursor = (kmq_checkpoint_cursor){marker->entries, marker->entries + marker->entries_bytes};
}

bool kmq_marker_entries_next(kmq_checkpoint_cursor *cursor, kmq_checkpoint_entry *entry)
{
    kmq_wire_reader reader;
    if (cursor->at == cursor->end) return false;
    kmq_wire_reader_init(&reader, cursor->at, (size_t)(cursor->end - cursor->at));
    if (!read_entry(&reader, entry)) return false;
    cursor->at = reader.at;
    return true;
}

/* ---- encoding */

/* CRC-32 (IEEE 802.3, reflected), bit by bit: it runs once for a handle */
static uint32_t crc32_feed(uint32_t crc, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        crc ^= (uint8_t)bytes[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & (0u - (crc & 1u)));
    }
    return crc;
}

void kmq_marker_scope_init(kmq_marker_scope *scope, const char *topic, size_t topic_len, const char *group,
                           size_t group_len)
{
    uint32_t crc = crc32_feed(UINT32_MAX, topic, topic_len);
    crc = crc32_feed(crc, "", 1); /* the NUL between them */
    *scope = (kmq_marker_scope){.crc = ~crc32_feed(crc, group, group_len), .group = group, .group_len = group_len};
}

void kmq_marker_encode_key(uint8_t key[KMQ_MARKER_KEY_BYTES], int32_t partition, int64_t offset)
{
    kmq_wire_put_u32(key, (uint32_t)partition);
    kmq_wire_put_u64(key + 4, (uint64_t)offset);
}

/* What the leading ranges of a set take up in each form. */
typedef struct set_size {
    size_t n;          /* ranges */
    size_t runs_bytes; /* of the pairs */
    uint64_t bits;
    size_t best; /* bytes of the shorter form, base and form byte included */
    bool bitmap; /* is it the bitmap? */
} set_size;

/* The longest prefix of ranges whose shorter form fits in room: both forms grow with each range, so the shorter one
 * does. n = 0: not even one range fits. KMQ_EINVAL: not ascending, disjoint, not empty, from 0 on. */
static int measure_set(const kmq_range *ranges, size_t n_ranges, size_t room, set_size *fits)
{
    set_size size = {0};
    *fits = size;
    for (size_t i = 0; i < n_ranges; i++) {
        const kmq_range *range = &ranges[i];
        int64_t after = i > 0 ? ranges[i - 1].hi : range->lo;
        if (range->lo < 0 || range->lo < after || range->hi <= range->lo) return KMQ_EINVAL;
        if (fits->n < i) continue; /* full: only checking the rest */
        size.n = i + 1;
        size.runs_bytes +=
            kmq_wire_uvar_bytes((uint64_t)(range->lo - after)) + kmq_wire_uvar_bytes((uint64_t)(range->hi - range->lo));
        size.bits = (uint64_t)(range->hi - ranges[0].lo);
        uint64_t bitmap = kmq_wire_uvar_bytes(size.bits) + (size.bits + 7) / 8; /* bits < 2^63: no overflow */
        uint64_t runs = kmq_wire_uvar_bytes(size.n) + size.runs_bytes;
        size.bitmap = bitmap < runs;
        uint64_t best = kmq_wire_uvar_bytes((uint64_t)ranges[0].lo) + 1 + (size.bitmap ? bitmap : runs);
        if (best > room) continue;
        size.best = (size_t)best;
        *fits = size;
    }
    return KMQ_OK;
}

static void set_bits(uint8_t *bytes, uint64_t from, uint64_t to)
{
    for (; from < to && from % 8 != 0; from++) bytes[from / 8] |= (uint8_t)(1u << from % 8);
    if (to - from >= 8) {
        memset(bytes + from / 8, 0xff, (size_t)((to - from) / 8));
        from += (to - from) / 8 * 8;
    }
    for (; from < to; from++) bytes[from / 8] |= (uint8_t)(1u << from % 8);
}

static void write_bitmap(kmq_wire_writer *writer, const kmq_range *ranges, const set_size *size)
{
    size_t n_bytes = (size_t)((size->bits + 7) / 8);
    bool ok = kmq_wire_write_u8(writer, FORM_BITMAP) && kmq_wire_write_uvar(writer, size->bits) &&
              kmq_wire_room(writer) >= n_bytes;
    assert(ok); /* measured */
    if (!ok) return;
    memset(writer->at, 0, n_bytes);
    for (size_t i = 0; i < size->n; i++)
        set_bits(writer->at, (uint64_t)(ranges[i].lo - ranges[0].lo), (uint64_t)(ranges[i].hi - ranges[0].lo));
    writer->at += n_bytes;
}

static void write_runs(kmq_wire_writer *writer, const kmq_range *ranges, const set_size *size)
{
    bool ok = kmq_wire_write_u8(writer, FORM_RUNS) && kmq_wire_write_uvar(writer, size->n);
    for (size_t i = 0; ok && i < size->n; i++) {
        int64_t after = i > 0 ? ranges[i - 1].hi : ranges[0].lo;
        ok = kmq_wire_write_uvar(writer, (uint64_t)(ranges[i].lo - after)) &&
             kmq_wire_write_uvar(writer, (uint64_t)(ranges[i].hi - ranges[i].lo));
    }
    assert(ok); /* measured */
    (void)ok;
}

static void write_set(kmq_wire_writer *writer, const kmq_range *ranges, const set_size *size)
{
    bool ok = kmq_wire_write_uvar(writer, (uint64_t)ranges[0].lo);
    assert(ok); /* measured */
    (void)ok;
    if (size->bitmap)
        write_bitmap(writer, ranges, size);
    else
        write_runs(writer, ranges, size);
}

static bool write_head(kmq_wire_writer *writer, const kmq_marker_scope *scope, kmq_marker_type type)
{
    return kmq_wire_write_u8(writer, MAGIC_0) && kmq_wire_write_u8(writer, MAGIC_1) &&
           kmq_wire_write_u8(writer, VERSION) && kmq_wire_write_u8(writer, (uint8_t)type) &&
           kmq_wire_write_u32(writer, scope->crc);
}

static bool write_tlv_bytes(kmq_wire_writer *writer, uint64_t tag, const void *bytes, size_t n)
{
    return kmq_wire_write_uvar(writer, tag) && kmq_wire_write_uvar(writer, n) && kmq_wire_write_bytes(writer, bytes, n);
}

static bool write_tlv_u64(kmq_wire_writer *writer, uint64_t tag, uint64_t v)
{
    return kmq_wire_write_uvar(writer, tag) && kmq_wire_write_uvar(writer, 8) && kmq_wire_write_u64(writer, v);
}

static bool write_tlv_uvar(kmq_wire_writer *writer, uint64_t tag, uint64_t v)
{
    return kmq_wire_write_uvar(writer, tag) && kmq_wire_write_uvar(writer, kmq_wire_uvar_bytes(v)) &&
           kmq_wire_write_uvar(writer, v);
}

static size_t tlv_uvar_bytes(int64_t v) { return 2 + kmq_wire_uvar_bytes((uint64_t)v); }

static size_t tlv_text_bytes(size_t len) { return 1 + kmq_wire_uvar_bytes(len) + len; }

static bool tlvs_ok(const kmq_marker_tlv *tlv)
{
    return tlv == NULL ||
           ((!tlv->has_copy_offset || tlv->copy_offset >= 0) && (!tlv->has_log_time || tlv->log_time_ms >= 0));
}

static size_t tlvs_bytes(const kmq_marker_tlv *tlv)
{
    if (tlv == NULL) return 0;
    return (tlv->text != NULL ? tlv_text_bytes(cut_text(tlv->text, tlv->text_len, KMQ_ERROR_TEXT_MAX)) : 0) +
           (tlv->node != NULL ? tlv_text_bytes(tlv->node_len) : 0) + (tlv->has_key_hash ? 10 : 0) +
           (tlv->has_instance ? 10 : 0) + (tlv->has_copy_offset ? tlv_uvar_bytes(tlv->copy_offset) : 0) +
           (tlv->has_log_time ? tlv_uvar_bytes(tlv->log_time_ms) : 0);
}

static bool write_tlvs(kmq_wire_writer *writer, const kmq_marker_tlv *tlv)
{
    if (tlv == NULL) return true;
    if (tlv->text != NULL &&
        !write_tlv_bytes(writer, TLV_TEXT, tlv->text, cut_text(tlv->text, tlv->text_len, KMQ_ERROR_TEXT_MAX)))
        return false;
    if (tlv->node != NULL && !write_tlv_bytes(writer, TLV_NODE, tlv->node, tlv->node_len)) return false;
    if (tlv->has_key_hash && !write_tlv_u64(writer, TLV_KEY_HASH, tlv->key_hash)) return false;
    if (tlv->has_instance && !write_tlv_u64(writer, TLV_INSTANCE, tlv->instance)) return false;
    if (tlv->has_copy_offset && !write_tlv_uvar(writer, TLV_COPY_OFFSET, (uint64_t)tlv->copy_offset)) return false;
    return !tlv->has_log_time || write_tlv_uvar(writer, TLV_LOG_TIME, (uint64_t)tlv->log_time_ms);
}

/* bytes of a body behind its set; KMQ_EINVAL for a cause, flag or time that no decoder would take */
static int tail_bytes(kmq_marker_type type, int64_t time_ms, uint8_t cause, uint8_t flags)
{
    switch (type) {
    case KMQ_MARKER_START:
    case KMQ_MARKER_EXTEND:
    case KMQ_MARKER_PARK: return time_ms >= 0 ? (int)kmq_wire_uvar_bytes((uint64_t)time_ms) : KMQ_EINVAL;
    case KMQ_MARKER_END: return cause < KMQ_END_CAUSES ? 1 : KMQ_EINVAL;
    case KMQ_MARKER_RETRY:
        if (time_ms < 0 || cause > KMQ_RETRY_EXPIRED || (flags & ~RETRY_FLAGS) != 0) return KMQ_EINVAL;
        return (int)kmq_wire_uvar_bytes((uint64_t)time_ms) + 2;
    case KMQ_MARKER_CHECKPOINT:
    case KMQ_MARKER_CLOCK: break;
    }
    return KMQ_EINVAL;
}

static bool write_tail(kmq_wire_writer *writer, kmq_marker_type type, int64_t time_ms, uint8_t cause, uint8_t flags)
{
    if (type != KMQ_MARKER_END && !kmq_wire_write_uvar(writer, (uint64_t)time_ms)) return false;
    if ((type == KMQ_MARKER_END || type == KMQ_MARKER_RETRY) && !kmq_wire_write_u8(writer, cause)) return false;
    return type != KMQ_MARKER_RETRY || kmq_wire_write_u8(writer, flags);
}

static size_t clamp_cap(size_t cap) { return cap < KMQ_MARKER_MAX_BYTES ? cap : KMQ_MARKER_MAX_BYTES; }

int kmq_marker_encode(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, kmq_marker_type type,
                      const kmq_range *ranges, size_t n_ranges, int64_t time_ms, uint8_t cause, uint8_t flags,
                      const kmq_marker_tlv *tlv, size_t *used)
{
    set_size size;
    kmq_wire_writer writer;
    *used = 0;
    int tail = tail_bytes(type, time_ms, cause, flags);
    if (tail < 0 || n_ranges == 0 || !tlvs_ok(tlv)) return KMQ_EINVAL;
    size_t fixed = HEAD_BYTES + (size_t)tail + tlvs_bytes(tlv);
    cap = clamp_cap(cap);
    int rc = measure_set(ranges, n_ranges, cap > fixed ? cap - fixed : 0, &size);
    if (rc < 0) return rc;
    if (size.n == 0) return KMQ_EFULL;
    kmq_wire_writer_init(&writer, buf, cap);
    bool ok = write_head(&writer, scope, type);
    write_set(&writer, ranges, &size);
    ok = ok && write_tail(&writer, type, time_ms, cause, flags) && write_tlvs(&writer, tlv);
    assert(ok && (size_t)(writer.at - buf) == fixed + size.best);
    if (!ok) return KMQ_EFULL;
    *used = size.n;
    return (int)(writer.at - buf);
}

int kmq_marker_encode_clock(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, const kmq_marker_tlv *tlv)
{
    kmq_wire_writer writer;
    if (!tlvs_ok(tlv)) return KMQ_EINVAL;
    if (HEAD_BYTES + tlvs_bytes(tlv) > clamp_cap(cap)) return KMQ_EFULL;
    kmq_wire_writer_init(&writer, buf, clamp_cap(cap));
    bool ok = write_head(&writer, scope, KMQ_MARKER_CLOCK) && write_tlvs(&writer, tlv);
    return ok ? (int)(writer.at - buf) : KMQ_EFULL;
}

int kmq_marker_encode_entry(uint8_t *buf, size_t cap, const kmq_range *ranges, size_t n_ranges, int64_t due_ms,
                            uint8_t cause, uint8_t flags, size_t *used)
{
    set_size size;
    kmq_wire_writer writer;
    *used = 0;
    if (n_ranges == 0 || due_ms < 0 || !entry_cause_ok(cause) || (flags & ~(RETRY_FLAGS | KMQ_FLAG_PARKED)) != 0)
        return KMQ_EINVAL;
    size_t tail = kmq_wire_uvar_bytes((uint64_t)due_ms) + 2;
    int rc = measure_set(ranges, n_ranges, cap > tail ? cap - tail : 0, &size);
    if (rc < 0) return rc;
    if (size.n == 0) return KMQ_EFULL;
    kmq_wire_writer_init(&writer, buf, cap);
    write_set(&writer, ranges, &size);
    bool ok = kmq_wire_write_uvar(&writer, (uint64_t)due_ms) && kmq_wire_write_u8(&writer, cause) &&
              kmq_wire_write_u8(&writer, flags);
    assert(ok); /* measured */
    if (!ok) return KMQ_EFULL;
    *used = size.n;
    return (int)(writer.at - buf);
}

int kmq_marker_encode_checkpoint(uint8_t *buf, size_t cap, const kmq_marker_scope *scope, int64_t as_of, uint32_t part,
                                 uint32_t parts, const uint8_t *entries, size_t entries_bytes,
                                 const kmq_marker_tlv *tlv)
{
    kmq_wire_reader reader;
    kmq_wire_writer writer;
    kmq_checkpoint_entry entry;
    uint64_t n = 0;
    if (as_of < 0 || part >= parts || !tlvs_ok(tlv)) return KMQ_EINVAL;
    kmq_wire_reader_init(&reader, entries, entries_bytes);
    for (; kmq_wire_left(&reader) > 0; n++)
        if (!read_entry(&reader, &entry)) return KMQ_EINVAL;
    kmq_wire_writer_init(&writer, buf, clamp_cap(cap));
    bool ok = write_head(&writer, scope, KMQ_MARKER_CHECKPOINT) && kmq_wire_write_uvar(&writer, (uint64_t)as_of) &&
              kmq_wire_write_uvar(&writer, part) && kmq_wire_write_uvar(&writer, parts) &&
              kmq_wire_write_uvar(&writer, n) && kmq_wire_write_bytes(&writer, entries, entries_bytes) &&
              write_tlvs(&writer, tlv);
    return ok ? (int)(writer.at - buf) : KMQ_EFULL;
}

int kmq_marker_encode_kmq_start(uint8_t buf[9], int64_t after_ms)
{
    if (after_ms < 0) return KMQ_EINVAL;
    buf[0] = KMQ_START_BYTE;
    kmq_wire_put_u64(buf + 1, (uint64_t)after_ms);
    return KMQ_START_BYTES;
}

int kmq_marker_encode_kmq_end(uint8_t buf[1])
{
    buf[0] = KMQ_END_BYTE;
    return 1;
}

/* ---- small values */

static const struct {
    uint8_t cause;
    const char *name;
} causes[] = {{KMQ_RETRY_FAILED, "failed"},   {KMQ_RETRY_TIMEOUT, "timeout"},   {KMQ_RETRY_RELEASED, "released"},
              {KMQ_RETRY_SNOOZED, "snoozed"}, {KMQ_RETRY_REJECTED, "rejected"}, {KMQ_RETRY_EXPIRED, "expired"},
              {KMQ_RETRY_CRASH, "crash"},     {KMQ_CAUSE_EXTENDED, "extended"}, {KMQ_CAUSE_PARKED, "parked"}};

const char *kmq_retry_cause_name(uint8_t cause)
{
    for (size_t i = 0; i < sizeof causes / sizeof causes[0]; i++)
        if (causes[i].cause == cause) return causes[i].name;
    return NULL;
}

int kmq_retry_cause_parse(const void *text, size_t len)
{
    if (text == NULL) return -1;
    for (size_t i = 0; i < sizeof causes / sizeof causes[0]; i++)
        if (strlen(causes[i].name) == len && memcmp(causes[i].name, text, len) == 0) return causes[i].cause;
    return -1;
}

int64_t kmq_time_parse(const void *text, size_t len)
{
    const uint8_t *digits = text;
    int64_t ms = 0;
    if (len == 0) return -1;
    for (size_t i = 0; i < len; i++) {
        if (digits[i] < '0' || digits[i] > '9') return -1;
        int64_t digit = digits[i] - '0';
        ms = ms > (INT64_MAX - digit) / 10 ? INT64_MAX : ms * 10 + digit;
    }
    return ms;
}

int32_t kmq_count_decode(const void *bytes, size_t len)
{
    int32_t count = -1;
    if (bytes == NULL) return 0;
    if (len == 1) {
        uint8_t byte = *(const uint8_t *)bytes;
        count = byte <= INT8_MAX ? byte : -1;
    } else if (len == 4) {
        count = kmq_wire_i32(kmq_wire_get_u32(bytes));
    }
    return count >= 0 ? count : INT32_MAX;
}

size_t kmq_count_encode(uint8_t buf[4], int32_t count)
{
    if (count <= INT8_MAX) {
        buf[0] = (uint8_t)(count > 0 ? count : 0);
        return 1;
    }
    kmq_wire_put_u32(buf, (uint32_t)count);
    return 4;
}
