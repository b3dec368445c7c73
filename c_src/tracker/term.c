/* term - see term.h. */
#include "term.h"

enum {
    VERSION = 131,
    NEW_FLOAT = 70,
    SMALL_INTEGER = 97,
    INTEGER = 98,
    ATOM = 100,
    SMALL_TUPLE = 104,
    LARGE_TUPLE = 105,
    NIL = 106,
    STRING = 107,
    LIST = 108,
    BINARY = 109,
    SMALL_BIG = 110,
    SMALL_ATOM = 115,
    MAP = 116,
    ATOM_UTF8 = 118,
    SMALL_ATOM_UTF8 = 119,
    ATOM_BYTES_MAX = 255 * 4
};

static uint64_t big_endian(const uint8_t *p, size_t n)
{
    uint64_t value = 0;
    for (size_t i = 0; i < n; i++) value = value << 8 | p[i];
    return value;
}

/* Bytes of the length or arity field behind a tag; -1 = a tag the protocol does not know. */
static int field_bytes(uint8_t tag)
{
    switch (tag) {
    case NIL:
    case SMALL_INTEGER:
    case INTEGER:
    case NEW_FLOAT: return 0;
    case SMALL_TUPLE:
    case SMALL_BIG:
    case SMALL_ATOM:
    case SMALL_ATOM_UTF8: return 1;
    case ATOM:
    case ATOM_UTF8:
    case STRING: return 2;
    case LARGE_TUPLE:
    case LIST:
    case BINARY:
    case MAP: return 4;
    default: return -1;
    }
}

bool tracker_term_check(const uint8_t *bytes, size_t n)
{
    uint64_t open[TRACKER_TERM_DEPTH]; /* terms still to come, per level */
    size_t depth = 0, at = 1;
    if (n < 2 || bytes[0] != VERSION) return false;
    open[depth++] = 1;
    while (depth > 0) {
        if (open[depth - 1] == 0) {
            depth--;
            continue;
        }
        open[depth - 1]--;
        if (at >= n) return false;
        uint8_t tag = bytes[at++];
        int field = field_bytes(tag);
        if (field < 0 || n - at < (size_t)field) return false;
        uint64_t length = big_endian(bytes + at, (size_t)field);
        at += (size_t)field;
        uint64_t body = 0, inside = 0;
        switch (tag) {
        case SMALL_INTEGER: body = 1; break;
        case INTEGER: body = 4; break;
        case NEW_FLOAT: body = 8; break;
        case SMALL_BIG:
            if (length > 8) return false;
            body = length + 1;
            break;
        case ATOM:
        case ATOM_UTF8:
        case SMALL_ATOM:
        case SMALL_ATOM_UTF8:
            if (length > ATOM_BYTES_MAX) return false;
            body = length;
            break;
        case STRING:
        case BINARY: body = length; break;
        case SMALL_TUPLE:
        case LARGE_TUPLE: inside = length; break;
        case LIST: inside = length + 1; break;
        case MAP: inside = length * 2; break;
        default: break;
        }
        if (body > n - at) return false;
        at += (size_t)body;
        if (inside > n - at) return false; /* each takes a byte at least */
        if (inside > 0) {
            if (depth == TRACKER_TERM_DEPTH) return false;
            open[depth++] = inside;
        }
    }
    return at == n;
}
