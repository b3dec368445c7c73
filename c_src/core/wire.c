/* kmq_wire - see wire.h for the picture and the rules. */
#include "wire.h"

#include <assert.h>
#include <string.h>

void kmq_wire_reader_init(kmq_wire_reader *reader, const void *bytes, size_t n)
{
    static const uint8_t none[1];
    reader->at = bytes != NULL ? bytes : none;
    assert(bytes != NULL || n == 0);
    reader->end = reader->at + n;
}

void kmq_wire_writer_init(kmq_wire_writer *writer, void *bytes, size_t n)
{
    assert(bytes != NULL || n == 0);
    writer->at = bytes;
    writer->end = n > 0 ? writer->at + n : writer->at;
}

bool kmq_wire_read_u8(kmq_wire_reader *reader, uint8_t *out)
{
    if (kmq_wire_left(reader) < 1) return false;
    *out = *reader->at++;
    return true;
}

bool kmq_wire_read_u32(kmq_wire_reader *reader, uint32_t *out)
{
    if (kmq_wire_left(reader) < 4) return false;
    *out = kmq_wire_get_u32(reader->at);
    reader->at += 4;
    return true;
}

bool kmq_wire_read_u64(kmq_wire_reader *reader, uint64_t *out)
{
    if (kmq_wire_left(reader) < 8) return false;
    *out = kmq_wire_get_u64(reader->at);
    reader->at += 8;
    return true;
}

bool kmq_wire_read_uvar(kmq_wire_reader *reader, uint64_t *out)
{
    uint64_t v = 0;
    size_t left = kmq_wire_left(reader);
    for (size_t i = 0; i < left && i < KMQ_UVAR_MAX_BYTES; i++) {
        uint8_t byte = reader->at[i];
        if (i == KMQ_UVAR_MAX_BYTES - 1 && byte > 1) return false; /* bit 64 and above, or an eleventh byte */
        v |= (uint64_t)(byte & 0x7f) << (7 * i);
        if ((byte & 0x80) == 0) {
            reader->at += i + 1;
            *out = v;
            return true;
        }
    }
    return false;
}

bool kmq_wire_read_uvar_max(kmq_wire_reader *reader, uint64_t max, uint64_t *out)
{
    kmq_wire_reader probe = *reader;
    uint64_t v;
    if (!kmq_wire_read_uvar(&probe, &v) || v > max) return false;
    *reader = probe;
    *out = v;
    return true;
}

bool kmq_wire_read_bytes(kmq_wire_reader *reader, size_t n, const uint8_t **out)
{
    if (kmq_wire_left(reader) < n) return false;
    *out = reader->at;
    reader->at += n;
    return true;
}

bool kmq_wire_write_u8(kmq_wire_writer *writer, uint8_t v)
{
    if (kmq_wire_room(writer) < 1) return false;
    *writer->at++ = v;
    return true;
}

bool kmq_wire_write_u32(kmq_wire_writer *writer, uint32_t v)
{
    if (kmq_wire_room(writer) < 4) return false;
    kmq_wire_put_u32(writer->at, v);
    writer->at += 4;
    return true;
}

bool kmq_wire_write_u64(kmq_wire_writer *writer, uint64_t v)
{
    if (kmq_wire_room(writer) < 8) return false;
    kmq_wire_put_u64(writer->at, v);
    writer->at += 8;
    return true;
}

size_t kmq_wire_uvar_bytes(uint64_t v)
{
    size_t n = 1;
    while (v >= 0x80) {
        v >>= 7;
        n++;
    }
    return n;
}

bool kmq_wire_write_uvar(kmq_wire_writer *writer, uint64_t v)
{
    if (kmq_wire_room(writer) < kmq_wire_uvar_bytes(v)) return false;
    while (v >= 0x80) {
        *writer->at++ = (uint8_t)(v | 0x80);
        v >>= 7;
    }
    *writer->at++ = (uint8_t)v;
    return true;
}

bool kmq_wire_write_bytes(kmq_wire_writer *writer, const void *bytes, size_t n)
{
    if (kmq_wire_room(writer) < n) return false;
    if (n > 0) memcpy(writer->at, bytes, n);
    writer->at += n;
    return true;
}
