/* frame: partial reads and writes, lengths that lie, a full queue, the private descriptor. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#include "frame.h"

static void put(int fd, const void *bytes, size_t n) { assert_int_equal(write(fd, bytes, n), (ssize_t)n); }

static void byte_by_byte(void **state)
{
    (void)state;
    int p[2];
    assert_int_equal(pipe(p), 0);
    frame_in in;
    frame_in_init(&in, p[0], FRAME_MAX_BYTES);
    const uint8_t bytes[] = {0, 0, 0, 3, 'a', 'b', 'c', 0, 0, 0, 0, 0, 0, 0, 1, 'z'};
    const uint8_t *body;
    size_t len, frames = 0;
    for (size_t i = 0; i < sizeof bytes; i++) {
        put(p[1], bytes + i, 1);
        assert_int_equal(frame_in_read(&in), FRAME_OK);
        int rc;
        while ((rc = frame_in_next(&in, &body, &len)) == 1) {
            if (frames == 0) {
                assert_int_equal(len, 3);
                assert_memory_equal(body, "abc", 3);
            }
            if (frames == 1) assert_int_equal(len, 0);
            if (frames == 2) {
                assert_int_equal(len, 1);
                assert_memory_equal(body, "z", 1);
            }
            frames++;
        }
        assert_int_equal(rc, 0);
    }
    assert_int_equal(frames, 3);
    assert_int_equal(frame_in_rest(&in), 0);
    put(p[1], "\0\0\0\5xx", 6);
    close(p[1]);
    assert_int_equal(frame_in_read(&in), FRAME_OK);
    assert_int_equal(frame_in_next(&in, &body, &len), 0);
    assert_int_equal(frame_in_read(&in), FRAME_EEOF);
    assert_int_equal(frame_in_rest(&in), 6);
    frame_in_free(&in);
    close(p[0]);
}

static void too_long_is_refused_before_memory(void **state)
{
    (void)state;
    int p[2];
    assert_int_equal(pipe(p), 0);
    frame_in in;
    frame_in_init(&in, p[0], 1000);
    const uint8_t *body;
    size_t len;
    put(p[1], "\0\0\3\350", 4); /* 1000: allowed */
    assert_int_equal(frame_in_read(&in), FRAME_OK);
    size_t before = in.cap;
    assert_int_equal(frame_in_next(&in, &body, &len), 0);
    assert_int_equal(in.cap, before);
    in.at = in.have = 0;
    put(p[1], "\377\377\377\377", 4);
    assert_int_equal(frame_in_read(&in), FRAME_OK);
    assert_int_equal(frame_in_next(&in, &body, &len), FRAME_ETOOLONG);
    assert_true(in.cap <= 256 * 1024);
    frame_in_free(&in);
    close(p[0]);
    close(p[1]);
}

static void a_claimed_length_costs_nothing_until_bytes_come(void **state)
{
    (void)state;
    int p[2];
    assert_int_equal(pipe(p), 0);
    frame_in in;
    frame_in_init(&in, p[0], FRAME_MAX_BYTES);
    put(p[1], "\0\377\0\0", 4);
    for (int i = 0; i < 100; i++) {
        put(p[1], "x", 1);
        assert_int_equal(frame_in_read(&in), FRAME_OK);
    }
    const uint8_t *body;
    size_t len;
    assert_int_equal(frame_in_next(&in, &body, &len), 0);
    assert_true(in.cap <= 256 * 1024);
    frame_in_free(&in);
    close(p[0]);
    close(p[1]);
}

static void random_frames_come_out_as_they_went_in(void **state)
{
    (void)state;
    int p[2];
    assert_int_equal(pipe(p), 0);
    assert_int_equal(fcntl(p[1], F_SETFL, O_NONBLOCK), 0);
    frame_in in;
    frame_out out;
    frame_in_init(&in, p[0], FRAME_MAX_BYTES);
    frame_out_init(&out, p[1], 300000);
    uint32_t seed = 12345, sent = 0, got = 0;
    uint8_t *body = malloc(200000);
    while (got < 400) {
        uint32_t length = (seed >> 8) % 150000;
        if (length % 3) length %= 50;
        memset(body, (int)(sent & 255), length);
        if (sent < 400) {
            int rc = frame_out_put(&out, body, length);
            if (rc == FRAME_OK) {
                sent++;
                seed = seed * 1664525u + 1013904223u;
            } else {
                assert_int_equal(rc, FRAME_EFULL);
            }
        }
        assert_true(frame_out_waiting(&out) <= 300000 + 4 * 400);
        assert_int_equal(frame_out_flush(&out), FRAME_OK);
        if (frame_out_waiting(&out) == 0 && sent == got) continue;
        assert_int_equal(frame_in_read(&in), FRAME_OK);
        const uint8_t *b;
        size_t n;
        while (frame_in_next(&in, &b, &n) == 1) {
            for (size_t i = 0; i < n; i++) assert_int_equal(b[i], got & 255);
            got++;
        }
    }
    free(body);
    frame_in_free(&in);
    frame_out_free(&out);
    close(p[0]);
    close(p[1]);
}

static void a_gone_reader_is_the_end(void **state)
{
    (void)state;
    signal(SIGPIPE, SIG_IGN);
    int p[2];
    assert_int_equal(pipe(p), 0);
    frame_out out;
    frame_out_init(&out, p[1], 1000);
    close(p[0]);
    assert_int_equal(frame_out_put(&out, "x", 1), FRAME_OK);
    assert_int_equal(frame_out_flush(&out), FRAME_EEOF);
    frame_out_free(&out);
    close(p[1]);
}

static void a_slow_reader_cannot_hold_us(void **state)
{
    (void)state;
    int p[2];
    assert_int_equal(pipe(p), 0);
    assert_int_equal(fcntl(p[1], F_SETFL, O_NONBLOCK), 0);
    frame_out out;
    frame_out_init(&out, p[1], 1000000);
    static const uint8_t body[100000];
    int rc, n = 0;
    while ((rc = frame_out_put(&out, body, sizeof body)) == FRAME_OK && ++n < 100) frame_out_flush(&out);
    assert_int_equal(rc, FRAME_EFULL);
    assert_false(frame_out_drain(&out, 20));
    frame_out_free(&out);
    close(p[0]);
    close(p[1]);
}

static void prints_do_not_reach_the_frames(void **state)
{
    (void)state;
    int o[2], e[2];
    assert_int_equal(pipe(o), 0);
    assert_int_equal(pipe(e), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(o[1], 1);
        dup2(e[1], 2);
        int fd = frame_private_stdout();
        if (fd < 3) _exit(1);
        if (write(1, "noise", 5) != 5) _exit(2);
        frame_out out;
        frame_out_init(&out, fd, 100);
        frame_out_put(&out, "hi", 2);
        _exit(frame_out_drain(&out, 1000) ? 0 : 3);
    }
    close(o[1]);
    close(e[1]);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    char buf[16];
    assert_int_equal(read(o[0], buf, sizeof buf), 6);
    assert_memory_equal(buf, "\0\0\0\2hi", 6);
    assert_int_equal(read(e[0], buf, sizeof buf), 5);
    close(o[0]);
    close(e[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(byte_by_byte),
        cmocka_unit_test(too_long_is_refused_before_memory),
        cmocka_unit_test(a_claimed_length_costs_nothing_until_bytes_come),
        cmocka_unit_test(random_frames_come_out_as_they_went_in),
        cmocka_unit_test(a_gone_reader_is_the_end),
        cmocka_unit_test(a_slow_reader_cannot_hold_us),
        cmocka_unit_test(prints_do_not_reach_the_frames),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
