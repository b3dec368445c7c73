/* frame - {packet, 4} frames over file descriptors, shared by the port programs (tracker, sandbox).
 *
 *      fd 0  ->  frame_in   [ len:4 BE | body ][ len:4 BE | bo           one read() per frame_in_read, so that a poll() loop with a
 *                            ^ at                        ^ have           blocking descriptor never waits
 *      fd 1  ->  dup'ed to a private descriptor, then replaced by fd 2: a stray print of any library lands on stderr and cannot
 *                break the frames
 *      frame_out: queue of whole frames, written without blocking; bounded in bytes
 *
 * Invariants: (1) at <= have <= cap;  (2) a length above max is refused before anything is allocated for it, and memory grows with the
 * bytes that have come, not with the length that was claimed;  (3) a frame is queued whole or not at all.
 * Costs: a byte is copied once, plus once when the buffer is compacted.  Thread rule: one owner.  EINTR is handled here and nowhere else. */
#ifndef FRAME_H
#define FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_OK = 0,
    FRAME_EEOF = -1,     /* the other side is gone (also EPIPE) */
    FRAME_EIO = -2,      /* see errno */
    FRAME_ENOMEM = -3,   /* nothing was taken */
    FRAME_ETOOLONG = -4, /* a frame longer than max: the stream is lost, end with a message */
    FRAME_EFULL = -5     /* the queue would exceed its bound; nothing was queued */
};

enum { FRAME_MAX_BYTES = 16 * 1024 * 1024 };

typedef struct frame_in {
    int fd;
    size_t max; /* longest body accepted */
    uint8_t *buf;
    size_t at, have, cap;
} frame_in;

typedef struct frame_out {
    int fd;
    size_t max; /* most bytes waiting */
    uint8_t *buf;
    size_t at, have, cap;
} frame_out;

/* Moves stdout to a descriptor of its own (close-on-exec, non-blocking) and puts stderr in its place. Returns it, or FRAME_EIO.
 * Call once, before anything may print. */
int frame_private_stdout(void);

void frame_in_init(frame_in *in, int fd, size_t max);
void frame_in_free(frame_in *in);
/* One read(). FRAME_OK (perhaps 0 bytes on a non-blocking descriptor), FRAME_EEOF, FRAME_EIO, FRAME_ENOMEM. */
int frame_in_read(frame_in *in);
/* The next whole frame: 1, its body borrowed until the next call of frame_in_*; 0 = more bytes are needed; FRAME_ETOOLONG. */
int frame_in_next(frame_in *in, const uint8_t **body, size_t *len);
/* Bytes of a frame that has begun and not ended: what an EOF cuts off. */
size_t frame_in_rest(const frame_in *in);

void frame_out_init(frame_out *out, int fd, size_t max);
void frame_out_free(frame_out *out);
/* Queues a copy of body as one frame. FRAME_OK, FRAME_EFULL, FRAME_ENOMEM, FRAME_ETOOLONG (above 4 GiB). */
int frame_out_put(frame_out *out, const void *body, size_t len);
/* Writes what the descriptor takes now. FRAME_OK (look at frame_out_waiting), FRAME_EEOF, FRAME_EIO. */
int frame_out_flush(frame_out *out);
size_t frame_out_waiting(const frame_out *out);
/* Waits up to timeout_ms for the queue to empty; for the last words before an exit. True when all is written. */
bool frame_out_drain(frame_out *out, int timeout_ms);

#endif
