/* kmq_sandbox - a Kafka of its own for iex, demos and tests: librdkafka's mock cluster in a process that may die alone.
 *
 *      BEAM --stdin-->  {Id, Command, Args}   command.c
 *           <-stdout--  {0, {ready, 1, Bootstrap}} first, then {Id, Reply}
 *
 *      kmq_sandbox BROKERS      brokers listen on 127.0.0.1, on free ports; all is in memory and gone with the process
 *
 * EOF on stdin ends the process at once, in whatever state: nothing here is worth an orderly end, and nothing may
 * outlive its BEAM. The mock's thread aborts the process when two members of a group disagree on the assignor: the
 * reason why this is no NIF. Thread rule: the loop's thread alone speaks to the mock. */
#include "command.h"
#include "frame.h"
#include "hurry.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum { PROTOCOL = 1, BROKERS_MAX = 100, REPLIES_MAX_BYTES = 1024 * 1024 };

static void log_line(const rd_kafka_t *rk, int level, const char *facility, const char *text)
{
    static _Atomic int foreign; /* who does not speak Kafka, or TLS, tries again and again: one line says it */
    (void)rk;
    if (strcmp(facility, "PROTOERR") == 0 && foreign++ > 0) return;
    if (level <= 4)
        fprintf(stderr, "kmq_sandbox: [%d] %s: %s\n", level, facility, text);
    else
        hurry_line(text);
}

static rd_kafka_mock_cluster_t *start_cluster(int brokers)
{
    char text[512] = "out of memory";
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    rd_kafka_conf_set_log_cb(conf, log_line);
    if (rd_kafka_conf_set(conf, "client.id", "kmq_sandbox", text, sizeof text) != RD_KAFKA_CONF_OK ||
        rd_kafka_conf_set(conf, "log_level", "7", text, sizeof text) != RD_KAFKA_CONF_OK ||
        rd_kafka_conf_set(conf, "debug", "mock", text, sizeof text) != RD_KAFKA_CONF_OK) {
        rd_kafka_conf_destroy(conf);
        fprintf(stderr, "kmq_sandbox: %s\n", text);
        return NULL;
    }
    rd_kafka_t *rk = rd_kafka_new(RD_KAFKA_PRODUCER, conf, text, sizeof text);
    if (!rk) {
        rd_kafka_conf_destroy(conf);
        fprintf(stderr, "kmq_sandbox: %s\n", text);
        return NULL;
    }
    rd_kafka_mock_cluster_t *cluster = rd_kafka_mock_cluster_new(rk, brokers);
    if (!cluster) {
        fprintf(stderr, "kmq_sandbox: cannot listen on 127.0.0.1\n");
        return NULL;
    }
    hurry_cluster(cluster);
    return cluster;
}

static int put_ready(frame_out *out, ei_x_buff *x, const char *bootstrap)
{
    x->index = 0;
    int rc = ei_x_encode_version(x) | ei_x_encode_tuple_header(x, 2) | ei_x_encode_long(x, 0) |
             ei_x_encode_tuple_header(x, 3) | ei_x_encode_atom(x, "ready") | ei_x_encode_long(x, PROTOCOL) |
             ei_x_encode_binary(x, bootstrap, (int)strlen(bootstrap));
    return rc ? -1 : frame_out_put(out, x->buff, (size_t)x->index);
}

/* Answers every whole frame that has come. NULL, or why the stream has come to its end. */
static const char *answer(frame_in *in, frame_out *out, ei_x_buff *x, rd_kafka_mock_cluster_t *cluster)
{
    const uint8_t *body;
    size_t len;
    int rc;
    while ((rc = frame_in_next(in, &body, &len)) > 0) {
        if (sandbox_command(cluster, body, len, x) < 0) return "malformed request";
        if (frame_out_put(out, x->buff, (size_t)x->index) != FRAME_OK) return "replies are not read";
    }
    return rc < 0 ? "request too long" : NULL;
}

/* Returns the exit code. */
static int loop(frame_in *in, frame_out *out, ei_x_buff *x, rd_kafka_mock_cluster_t *cluster)
{
    for (;;) {
        if (frame_out_flush(out) != FRAME_OK) return 0;
        struct pollfd fds[2] = {
            {.fd = in->fd, .events = POLLIN},
            {.fd = frame_out_waiting(out) ? out->fd : -1, .events = POLLOUT},
        };
        if (poll(fds, 2, -1) < 0) {
            if (errno == EINTR) continue;
            perror("kmq_sandbox: poll");
            return 1;
        }
        if (fds[1].revents & (POLLERR | POLLHUP)) return 0;
        if (!fds[0].revents) continue;
        int rc = frame_in_read(in);
        if (rc == FRAME_EEOF) return 0;
        if (rc != FRAME_OK) {
            perror("kmq_sandbox: stdin");
            return 1;
        }
        const char *reason = answer(in, out, x, cluster);
        if (reason) {
            fprintf(stderr, "kmq_sandbox: %s\n", reason);
            return 2;
        }
    }
}

int main(int argc, char **argv)
{
    frame_in in;
    frame_out out;
    ei_x_buff x;
    int brokers = argc == 2 ? atoi(argv[1]) : 0;
    if (brokers < 1 || brokers > BROKERS_MAX || isatty(STDIN_FILENO)) {
        fprintf(stderr,
                "usage: kmq_sandbox BROKERS (1 to %d), with frames on stdin and stdout; started by Kmq.Sandbox\n",
                BROKERS_MAX);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
#ifdef __linux__
    prctl(PR_SET_PDEATHSIG, SIGCONT); /* stopped when its VM dies, it goes on to read the end of stdin */
#endif
    signal(SIGINT, SIG_IGN); /* a Ctrl-C in iex is not meant for us: stdin says when it is over */
    int fd = frame_private_stdout();
    if (fd < 0) {
        perror("kmq_sandbox: stdout");
        return 1;
    }
    ei_init();
    frame_in_init(&in, STDIN_FILENO, FRAME_MAX_BYTES);
    frame_out_init(&out, fd, REPLIES_MAX_BYTES);
    rd_kafka_mock_cluster_t *cluster = start_cluster(brokers);
    if (!cluster || ei_x_new(&x) < 0) return 1;
    if (put_ready(&out, &x, rd_kafka_mock_cluster_bootstraps(cluster)) != FRAME_OK) return 1;
    _exit(loop(&in, &out, &x, cluster));
}
