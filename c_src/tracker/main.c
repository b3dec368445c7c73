/* kmq_tracker - the program that redelivers. As a port program it speaks {packet, 4} frames on stdin and stdout (command.c has the
 * grammar); with --config FILE it is a daemon of its own (settings.h has the file, daemon.h what it says).
 *
 * Exit status: 0 orderly end (stop, end of stdin, SIGTERM); 1 a malformed frame; 2 cannot start or go on; 3 no memory.
 * SIGPIPE is ignored (EPIPE counts as the end of stdin). SIGALRM, set when the end begins, is the guard behind it. */
#ifdef __linux__
#define _GNU_SOURCE /* pthread_setattr_default_np */
#endif
#include <ei.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#include <pthread.h>
#endif

#include "frame.h"
#include "http.h"
#include "tracker.h"

static int signal_pipe[2];

static void on_end(int number)
{
    int saved = errno;
    (void)number;
    if (write(signal_pipe[1], "x", 1) < 0) errno = saved;
    errno = saved;
}

static void on_alarm(int number)
{
    (void)number;
    _exit(0);
}

static void handle(int number, void (*handler)(int))
{
    struct sigaction action = {.sa_handler = handler};
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

/* The C library would reserve 8 MiB of address space for the stack of each thread (librdkafka has some thirty) and 64 for each of its
 * heaps: more than a gigabyte of which a few are used. This way it runs under `ulimit -v 524288`, too. */
static void be_modest(void)
{
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
    enum { STACK_BYTES = 1 << 20, HEAPS = 4 };
    pthread_attr_t attributes;
    mallopt(M_ARENA_MAX, HEAPS);
    if (pthread_attr_init(&attributes)) return;
    if (pthread_attr_setstacksize(&attributes, STACK_BYTES) == 0) pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
#endif
}

int main(int argc, char **argv)
{
    be_modest();
    static tracker_settings settings; /* outlives main's frame in threads */
    bool daemon = argc == 3 && strcmp(argv[1], "--config") == 0;
    if (argc > 1 && !daemon) {
        fprintf(stderr,
                "usage: %s                 a port program: configured over stdin, in frames\n"
                "       %s --config FILE   a daemon of its own\n",
                argv[0], argv[0]);
        return 2;
    }
    const char *wrong = daemon ? tracker_settings_read(argv[2], &settings) : NULL;
    if (wrong) {
        fprintf(stderr, "kmq_tracker: %s\n", wrong);
        return 2;
    }
#ifdef __linux__
    /* A port program that is stopped (SIGSTOP) when its VM dies goes on, reads the end of stdin, and ends. */
    if (!daemon) prctl(PR_SET_PDEATHSIG, SIGCONT);
#endif
    if (daemon && settings.metrics_port && !tracker_http_start((int)settings.metrics_port)) {
        fprintf(stderr, "kmq_tracker: metrics_port: cannot listen on 127.0.0.1:%d: %s\n", (int)settings.metrics_port,
                strerror(errno));
        return 2;
    }
    int out = daemon ? STDOUT_FILENO : frame_private_stdout();
    if (out < 0 || pipe(signal_pipe) || ei_init()) {
        fprintf(stderr, "kmq_tracker: cannot start: %s\n", strerror(errno));
        return 2;
    }
    for (int i = 0; i < 2; i++) {
        fcntl(signal_pipe[i], F_SETFL, O_NONBLOCK);
        fcntl(signal_pipe[i], F_SETFD, FD_CLOEXEC);
    }
    handle(SIGPIPE, SIG_IGN);
    handle(SIGTERM, on_end);
    handle(SIGINT, on_end);
    handle(SIGHUP, on_end);
    handle(SIGALRM, on_alarm);
    int status =
        daemon ? tracker_run_daemon(&settings, out, signal_pipe[0]) : tracker_run(STDIN_FILENO, out, signal_pipe[0]);
    fflush(stderr);
    _exit(status); /* threads may be blocked in Kafka: nothing waits for them */
}
