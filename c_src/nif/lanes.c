/* lanes - the picture is in lanes.h. */
#include "lanes.h"

#include <string.h>

uint32_t lanes_crc(uint32_t crc, const void *bytes, size_t n)
{
    static const uint32_t nibble[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4, 0x4db26158, 0x5005713c,
        0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c, 0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    const uint8_t *at = bytes;
    crc = ~crc;
    for (size_t i = 0; i < n; i++) {
        crc ^= at[i];
        crc = crc >> 4 ^ nibble[crc & 15];
        crc = crc >> 4 ^ nibble[crc & 15];
    }
    return ~crc;
}

int32_t lanes_of_key(const lanes *l, const char *topic, const void *key, size_t key_len)
{
    if (key) return (int32_t)(lanes_crc(lanes_crc(0, topic, strlen(topic) + 1), key, key_len) % l->n);
    size_t best = 0;
    for (size_t i = 1; i < l->n; i++)
        if (l->room[i] > l->room[best]) best = i;
    return (int32_t)best;
}
