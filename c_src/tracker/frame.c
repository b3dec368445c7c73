/* frame - see frame.h for the picture and the invariants. */
#include "frame.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 4, READ_BYTES = 64 * 1024, KEEP_BYTES = 256 * 1024 };

static uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static void put32(uint8_t *p, uint32_t value)
{
    p[0] = (uint8_t)(value >> 24);
    p[1] = (uint8_t)(value >> 16);
    p[2] = (uint8_t)(value >> 8);
    p[3] = (uint8_t)value;
}

int frame_private_stdout(void)
{
    int fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (fd < 0) return FRAME_EIO;
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
        close(fd);
        return FRAME_EIO;
    }
    return fd;
}

/* Makes room for `more` bytes behind have: first by moving what is unread to the front, then by growing to the double. */
static int reserve(uint8_t **buf, size_t *at, size_t *have, size_t *cap, size_t more)
{
    size_t unread = *have - *at;
    if (more <= *cap - *have) return FRAME_OK;
    if (*at > 0) {
        memmove(*buf, *buf + *at, unread);
        *at = 0;
        *have = unread;
        if (more <= *cap - unread) return FRAME_OK;
    }
    if (more > SIZE_MAX / 4 || unread > SIZE_MAX / 4) return FRAME_ENOMEM;
    size_t size = *cap ? *cap : READ_BYTES;
    while (size < unread + more) size *= 2;
    uint8_t *grown = realloc(*buf, size);
    if (!grown) return FRAME_ENOMEM;
    *buf = grown;
    *cap = size;
    return FRAME_OK;
}

/* An empty buffer that one big frame has blown up goes back to the system. */
static void shrink(uint8_t **buf, size_t *at, size_t *have, size_t *cap)
{
    if (*at < *have) return;
    *at = *have = 0;
    if (*cap <= KEEP_BYTES) return;
    free(*buf);
    *buf = NULL;
    *cap = 0;
}

void frame_in_init(frame_in *in, int fd, size_t max) { *in = (frame_in){.fd = fd, .max = max}; }

void frame_in_free(frame_in *in)
{
    free(in->buf);
    *in = (frame_in){.fd = -1};
}

int frame_in_read(frame_in *in)
{
    shrink(&in->buf, &in->at, &in->have, &in->cap);
    int rc = reserve(&in->buf, &in->at, &in->have, &in->cap, READ_BYTES);
    if (rc != FRAME_OK) return rc;
    ssize_t n;
    do n = read(in->fd, in->buf + in->have, READ_BYTES);
    while (n < 0 && errno == EINTR);
    if (n == 0) return FRAME_EEOF;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? FRAME_OK : FRAME_EIO;
    in->have += (size_t)n;
    return FRAME_OK;
}

int frame_in_next(frame_in *in, const uint8_t **body, size_t *len)
{
    size_t unread = in->have - in->at;
    if (unread < HEADER) return 0;
    uint32_t length = get32(in->buf + in->at);
    if (length > in->max) return FRAME_ETOOLONG;
    if (unread - HEADER < length) return 0;
    *body = in->buf + in->at + HEADER;
    *len = length;
    in->at += HEADER + (size_t)length;
    return 1;
}

size_t frame_in_rest(const frame_in *in) { return in->have - in->at; }

void frame_out_init(frame_out *out, int fd, size_t max) { *out = (frame_out){.fd = fd, .max = max}; }

void frame_out_free(frame_out *out)
{
    free(out->buf);
    *out = (frame_out){.fd = -1};
}

int frame_out_put(frame_out *out, const void *body, size_t len)
{
    if (len > UINT32_MAX) return FRAME_ETOOLONG;
    size_t waiting = out->have - out->at;
    /* one frame longer than the bound still goes out, alone */
    if (waiting > 0 && (len > out->max || waiting > out->max - len)) return FRAME_EFULL;
    int rc = reserve(&out->buf, &out->at, &out->have, &out->cap, HEADER + len);
    if (rc != FRAME_OK) return rc;
    put32(out->buf + out->have, (uint32_t)len);
    if (len) memcpy(out->buf + out->have + HEADER, body, len);
    out->have += HEADER + len;
    return FRAME_OK;
}

int frame_out_flush(frame_out *out)
{
    while (out->at < out->have) {
        ssize_t n = write(out->fd, out->buf + out->at, out->have - out->at);
        if (n >= 0) {
            out->at += (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return FRAME_OK;
        } else if (errno != EINTR) {
            return errno == EPIPE ? FRAME_EEOF : FRAME_EIO;
        }
    }
    shrink(&out->buf, &out->at, &out->have, &out->cap);
    return FRAME_OK;
}

size_t frame_out_waiting(const frame_out *out) { return out->have - out->at; }

static int64_t monotonic_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

bool frame_out_drain(frame_out *out, int timeout_ms)
{
    int64_t end = monotonic_ms() + timeout_ms;
    for (;;) {
        if (frame_out_flush(out) != FRAME_OK) return false;
        if (frame_out_waiting(out) == 0) return true;
        int64_t left = end - monotonic_ms();
        if (left <= 0) return false;
        struct pollfd p = {.fd = out->fd, .events = POLLOUT};
        if (poll(&p, 1, (int)left) < 0 && errno != EINTR) return false;
    }
}
