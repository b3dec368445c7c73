/* kmq_tracker - the port program that redelivers. Speaks {packet, 4} frames on stdin and stdout (command.c has the grammar).
 *
 * Exit status: 0 orderly end (stop, end of stdin, SIGTERM); 1 a malformed frame; 2 cannot start or go on; 3 no memory.
 * SIGPIPE is ignored (EPIPE counts as the end of stdin). SIGALRM, set when the end begins, is the guard behind it. */
#include <ei.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "frame.h"
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

int main(int argc, char **argv)
{
    if (argc > 1) {
        fprintf(stderr, "usage: %s   (a port program: it is configured over stdin, in frames)\n", argv[0]);
        return 2;
    }
    int out = frame_private_stdout();
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
    int status = tracker_run(STDIN_FILENO, out, signal_pipe[0]);
    fflush(stderr);
    _exit(status); /* threads may be blocked in Kafka: nothing waits for them */
}
