/* The program kmq_tracker, driven by frames without a BEAM: peers that misbehave, and the end within two seconds in every state.
 * It lies beside this test. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>
#include <ei.h>

#include "frame.h"

static char program[4096];

typedef struct peer {
    pid_t pid;
    int to, from;
    frame_in in;
} peer;

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static peer start(void)
{
    int to[2], from[2];
    assert_int_equal(pipe(to), 0);
    assert_int_equal(pipe(from), 0);
    peer p = {.to = to[1], .from = from[0]};
    fcntl(to[1], F_SETFD, FD_CLOEXEC);
    fcntl(from[0], F_SETFD, FD_CLOEXEC);
    p.pid = fork();
    assert_true(p.pid >= 0);
    if (p.pid == 0) {
        dup2(to[0], 0);
        dup2(from[1], 1);
        int null = open("/dev/null", O_WRONLY);
        if (!getenv("KMQ_TEST_STDERR")) dup2(null, 2);
        close(to[0]);
        close(from[1]);
        execl(program, program, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    frame_in_init(&p.in, p.from, FRAME_MAX_BYTES);
    return p;
}

static void send_bytes(peer *p, const void *bytes, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t k = write(p->to, (const char *)bytes + done, n - done);
        if (k < 0 && errno == EPIPE) return;
        assert_true(k > 0);
        done += (size_t)k;
    }
}

static void send_frame(peer *p, const ei_x_buff *x)
{
    uint8_t header[4] = {(uint8_t)(x->index >> 24), (uint8_t)(x->index >> 16), (uint8_t)(x->index >> 8),
                         (uint8_t)x->index};
    send_bytes(p, header, 4);
    send_bytes(p, x->buff, (size_t)x->index);
}

static void command_begin(ei_x_buff *x, long id, const char *name)
{
    ei_x_new_with_version(x);
    ei_x_encode_tuple_header(x, 3);
    ei_x_encode_long(x, id);
    ei_x_encode_atom(x, name);
}

static void send_command(peer *p, long id, const char *name)
{
    ei_x_buff x;
    command_begin(&x, id, name);
    ei_x_encode_empty_list(&x);
    send_frame(p, &x);
    ei_x_free(&x);
}

static void text(ei_x_buff *x, const char *s) { ei_x_encode_binary(x, s, (int)strlen(s)); }

static void send_configure(peer *p, long id, const char *bootstrap)
{
    static const char *const keys[] = {"topic", "markers", "dead_letters", "copies"};
    ei_x_buff x;
    command_begin(&x, id, "configure");
    ei_x_encode_map_header(&x, 4);
    ei_x_encode_atom(&x, "props");
    ei_x_encode_list_header(&x, 1);
    ei_x_encode_tuple_header(&x, 2);
    text(&x, "bootstrap.servers");
    text(&x, bootstrap);
    ei_x_encode_empty_list(&x);
    ei_x_encode_atom(&x, "group");
    text(&x, "g");
    ei_x_encode_atom(&x, "tracker_group");
    text(&x, "g__kmq_tracker");
    ei_x_encode_atom(&x, "queues");
    ei_x_encode_list_header(&x, 1);
    ei_x_encode_map_header(&x, 4);
    for (size_t i = 0; i < 4; i++) {
        ei_x_encode_atom(&x, keys[i]);
        text(&x, keys[i]);
    }
    ei_x_encode_empty_list(&x);
    send_frame(p, &x);
    ei_x_free(&x);
}

/* The next frame, printed as a term; events are skipped unless wanted. */
static void expect(peer *p, bool events, char *out, size_t cap)
{
    int64_t end = now_ms() + 20000;
    for (;;) {
        const uint8_t *body;
        size_t len;
        int rc = frame_in_next(&p->in, &body, &len);
        assert_true(rc >= 0);
        if (rc == 1) {
            char *printed = NULL;
            int at = 0, version;
            assert_int_equal(ei_decode_version((const char *)body, &at, &version), 0);
            assert_true(ei_s_print_term(&printed, (const char *)body, &at) > 0);
            snprintf(out, cap, "%s", printed);
            free(printed);
            if (events || strncmp(out, "{0, {event", 10) != 0) return;
            continue;
        }
        struct pollfd fd = {.fd = p->from, .events = POLLIN};
        assert_true(now_ms() < end);
        if (poll(&fd, 1, 1000) > 0) assert_int_equal(frame_in_read(&p->in), FRAME_OK);
    }
}

static void expect_term(peer *p, const char *term)
{
    char got[4096];
    expect(p, false, got, sizeof got);
    assert_string_equal(got, term);
}

/* Exit status within limit_ms, or a failure. */
static int ends(peer *p, int64_t limit_ms)
{
    int64_t start_ms = now_ms();
    int status;
    for (;;) {
        pid_t got = waitpid(p->pid, &status, WNOHANG);
        assert_true(got >= 0);
        if (got == p->pid) break;
        if (now_ms() - start_ms > limit_ms) {
            kill(p->pid, SIGKILL);
            waitpid(p->pid, &status, 0);
            fail_msg("still there after %d ms", (int)limit_ms);
        }
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, NULL);
    }
    if (p->to >= 0) close(p->to);
    if (p->from >= 0) close(p->from);
    frame_in_free(&p->in);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void end_input(peer *p)
{
    close(p->to);
    p->to = -1;
}

enum { LIMIT_MS = 2000 };

static peer ready(void)
{
    peer p = start();
    expect_term(&p, "{0, {ready, 1}}");
    return p;
}

static void speaks(void **state)
{
    (void)state;
    peer p = ready();
    char got[4096];
    send_command(&p, 1, "ping");
    expect_term(&p, "{1, pong}");
    send_command(&p, 2, "dance");
    expect_term(&p, "{2, {error, unknown_command}}");
    send_command(&p, 3, "info");
    expect(&p, false, got, sizeof got);
    assert_non_null(strstr(got, "idle"));
    send_command(&p, 4, "configure");
    expect_term(&p, "{4, {error, {badarg, args}}}");
    send_command(&p, 5, "stop");
    expect_term(&p, "{5, ok}");
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

typedef struct token_case {
    const char *token;
    long long expires_ms;
    const char *principal, *extension; /* NULL: not there */
    const char *answer;
} token_case;

static void send_token(peer *p, long id, const token_case *c)
{
    ei_x_buff x;
    command_begin(&x, id, "token");
    ei_x_encode_map_header(&x, !!c->token + !!c->expires_ms + !!c->principal + !!c->extension + 1);
    if (c->token) ei_x_encode_atom(&x, "token"), text(&x, c->token);
    if (c->expires_ms) ei_x_encode_atom(&x, "expires_ms"), ei_x_encode_longlong(&x, c->expires_ms);
    if (c->principal) ei_x_encode_atom(&x, "principal"), text(&x, c->principal);
    if (c->extension) {
        ei_x_encode_atom(&x, "extensions");
        ei_x_encode_list_header(&x, 1);
        ei_x_encode_tuple_header(&x, 2);
        text(&x, c->extension);
        text(&x, "v");
        ei_x_encode_empty_list(&x);
    }
    ei_x_encode_atom(&x, "of_a_later_version");
    ei_x_encode_longlong(&x, 1);
    send_frame(p, &x);
    ei_x_free(&x);
}

/* In any state; what is wrong is named, and nothing of it is kept. */
static void takes_tokens(void **state)
{
    (void)state;
    static const token_case cases[] = {
        {"t", 4000000000000, "me", NULL, "ok"},
        {"t", 4000000000000, "me", "cluster", "ok"},
        {NULL, 4000000000000, "me", NULL, "token"},
        {"", 4000000000000, "me", NULL, "token"},
        {"t", 0, "me", NULL, "expires_ms"},
        {"t", -5, "me", NULL, "expires_ms"},
        {"t", 4000000000000, NULL, NULL, "principal"},
        {"t", 1, "me", NULL, "ok"},
    };
    enum { CASES = sizeof cases / sizeof cases[0] };
    peer p = ready();
    for (long round = 0; round < 2; round++) {
        for (size_t i = 0; i < CASES; i++) {
            char want[128];
            long id = 100 * round + (long)i + 10;
            bool ok = strcmp(cases[i].answer, "ok") == 0;
            snprintf(want, sizeof want, ok ? "{%ld, %s}" : "{%ld, {error, {badarg, %s}}}", id, cases[i].answer);
            send_token(&p, id, &cases[i]);
            expect_term(&p, want);
        }
        send_command(&p, 1, "token");
        expect_term(&p, "{1, {error, {badarg, args}}}");
        if (round == 0) {
            send_configure(&p, 2, "127.0.0.1:1");
            expect_term(&p, "{2, ok}");
        }
    }
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

/* At 80 % of the life of the last one, at the soonest after a second. */
static void wants_the_next_token(void **state)
{
    (void)state;
    static const token_case brief = {"t", 1, "me", NULL, "ok"}; /* over already */
    peer p = ready();
    char got[4096] = "";
    send_token(&p, 1, &brief);
    expect_term(&p, "{1, ok}");
    send_configure(&p, 2, "127.0.0.1:1");
    for (int i = 0; i < 100 && strncmp(got, "{0, {event, token", 17) != 0; i++) expect(&p, true, got, sizeof got);
    assert_memory_equal(got, "{0, {event, token", 17);
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

static void byte_by_byte(void **state)
{
    (void)state;
    peer p = ready();
    ei_x_buff x;
    command_begin(&x, 9, "ping");
    ei_x_encode_empty_list(&x);
    uint8_t header[4] = {0, 0, 0, (uint8_t)x.index};
    for (size_t i = 0; i < 4; i++) send_bytes(&p, header + i, 1);
    for (int i = 0; i < x.index; i++) send_bytes(&p, x.buff + i, 1);
    ei_x_free(&x);
    expect_term(&p, "{9, pong}");
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

static void malformed_input_ends_it(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t n;
        bool framed;
    } cases[] = {
        {"\377\377\377\377", 4, true},              /* four gigabytes to come */
        {"\1\0\0\1", 4, true},                      /* one byte above the cap */
        {"", 0, false},                             /* an empty frame */
        {"abcd", 4, false},                         /* not a term */
        {"\203j", 2, false},                        /* a term that is no command */
        {"\203h\3a\1d\0\4ping", 12, false},         /* cut short */
        {"\203h\3a\0d\0\4pingj", 13, false},        /* id 0 */
        {"\203h\3a\1d\0\4pingjj", 14, false},       /* something behind it */
        {"\203h\3m\0\0\0\1xd\0\4pingj", 17, false}, /* id is text */
        {"\203h\3a\1m\0\0\0\4pingj", 15, false},    /* the command is text */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        peer p = ready();
        uint8_t header[4] = {0, 0, 0, (uint8_t)cases[i].n};
        if (!cases[i].framed) send_bytes(&p, header, 4);
        send_bytes(&p, cases[i].bytes, cases[i].n);
        assert_int_equal(ends(&p, LIMIT_MS), 1);
    }
}

static void half_a_frame_then_nothing(void **state)
{
    (void)state;
    peer p = ready();
    send_bytes(&p, "\0\0\1\0half", 8);
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 1);
}

static void deep_nesting(void **state)
{
    (void)state;
    size_t n = 15 << 20;
    uint8_t *bytes = malloc(n + 4);
    bytes[0] = (uint8_t)(n >> 24), bytes[1] = (uint8_t)(n >> 16), bytes[2] = (uint8_t)(n >> 8), bytes[3] = (uint8_t)n;
    bytes[4] = 131;
    for (size_t i = 5; i + 1 < n + 4; i += 2) bytes[i] = 104, bytes[i + 1] = 1;
    peer p = ready();
    send_bytes(&p, bytes, n + 4);
    free(bytes);
    assert_int_equal(ends(&p, 10000), 1);
}

static void many_atoms(void **state)
{
    (void)state;
    peer p = ready();
    ei_x_buff x;
    command_begin(&x, 1, "atoms");
    ei_x_encode_list_header(&x, 100000);
    for (int i = 0; i < 100000; i++) {
        char name[32];
        snprintf(name, sizeof name, "a%d", i);
        ei_x_encode_atom(&x, name);
    }
    ei_x_encode_empty_list(&x);
    send_frame(&p, &x);
    ei_x_free(&x);
    expect_term(&p, "{1, {error, unknown_command}}");
    end_input(&p);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

/* It is not read: replies pile up to a bound, then its input is left alone; the end still comes in time. */
static void a_peer_that_does_not_read(void **state)
{
    (void)state;
    peer p = ready();
    fcntl(p.to, F_SETFL, O_NONBLOCK);
    ei_x_buff x;
    command_begin(&x, 1, "info");
    ei_x_encode_empty_list(&x);
    uint8_t frame[64] = {0, 0, 0, (uint8_t)x.index};
    memcpy(frame + 4, x.buff, (size_t)x.index);
    size_t n = (size_t)x.index + 4;
    int64_t end = now_ms() + 5000;
    for (int i = 0; i < 2000000 && now_ms() < end; i++)
        if (write(p.to, frame, n) != (ssize_t)n) break;
    ei_x_free(&x);
    kill(p.pid, SIGTERM);
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

static void a_peer_that_closes_our_output(void **state)
{
    (void)state;
    peer p = ready();
    close(p.from);
    p.from = -1;
    send_command(&p, 1, "ping");
    assert_int_equal(ends(&p, LIMIT_MS), 0);
}

/* A port that listens and never answers. */
static int silent_server(char *address, size_t cap)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof in;
    assert_int_equal(bind(fd, (struct sockaddr *)&in, sizeof in), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&in, &len), 0);
    snprintf(address, cap, "127.0.0.1:%d", ntohs(in.sin_port));
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    return fd;
}

static void the_end_while_kafka_does_not_answer(void **state)
{
    (void)state;
    char silent[64];
    int server = silent_server(silent, sizeof silent);
    const char *const hosts[] = {"127.0.0.1:1", silent};
    for (size_t host = 0; host < 2; host++)
        for (int how = 0; how < 3; how++) {
            peer p = ready();
            send_configure(&p, 1, hosts[host]);
            expect_term(&p, "{1, ok}");
            send_configure(&p, 2, hosts[host]);
            expect_term(&p, "{2, {error, already_configured}}");
            struct timespec pause = {0, 300000000};
            nanosleep(&pause, NULL);
            if (how == 0) end_input(&p);
            if (how == 1) kill(p.pid, SIGTERM);
            if (how == 2) {
                send_command(&p, 3, "stop");
                expect_term(&p, "{3, ok}");
                end_input(&p);
            }
            assert_int_equal(ends(&p, LIMIT_MS), 0);
        }
    close(server);
}

int main(int argc, char **argv)
{
    (void)argc;
    const char *slash = strrchr(argv[0], '/');
    snprintf(program, sizeof program, "%.*skmq_tracker", slash ? (int)(slash - argv[0] + 1) : 0, argv[0]);
    if (access(program, X_OK)) {
        fprintf(stderr, "%s is not built\n", program);
        return 1;
    }
    signal(SIGPIPE, SIG_IGN);
    ei_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(speaks),
        cmocka_unit_test(takes_tokens),
        cmocka_unit_test(wants_the_next_token),
        cmocka_unit_test(byte_by_byte),
        cmocka_unit_test(malformed_input_ends_it),
        cmocka_unit_test(half_a_frame_then_nothing),
        cmocka_unit_test(deep_nesting),
        cmocka_unit_test(many_atoms),
        cmocka_unit_test(a_peer_that_does_not_read),
        cmocka_unit_test(a_peer_that_closes_our_output),
        cmocka_unit_test(the_end_while_kafka_does_not_answer),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
