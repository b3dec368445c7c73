/* helper: threads that rest, once, and work again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <poll.h>
#include <unistd.h>
#include <cmocka.h>

#include "helper.h"

enum { LIMIT_MS = 60000 };

static _Atomic int rests, runs;
static int wake[2], rest_told[2];

static void run(helper_job *job, void *thread)
{
    (void)job;
    (void)thread;
    atomic_fetch_add(&runs, 1);
}

static void rest(void *thread)
{
    assert_ptr_equal(thread, &runs);
    atomic_fetch_add(&rests, 1);
    assert_int_equal(write(rest_told[1], "x", 1), 1);
}

static void await(int fd)
{
    char c;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&p, 1, LIMIT_MS), 1);
    assert_int_equal(read(fd, &c, 1), 1);
}

static void a_thread_without_work_rests_and_works_again(void **state)
{
    (void)state;
    static helper_pool pool;
    void *keep = &runs;
    helper_job job = {.run = run};
    assert_int_equal(pipe(wake), 0);
    assert_int_equal(pipe(rest_told), 0);
    assert_int_equal(helper_start(&pool, wake[1], &keep, 1, rest, 1), 0);
    for (int i = 1; i <= 2; i++) {
        helper_give(&pool, &job);
        await(wake[0]);
        assert_ptr_equal(helper_take(&pool), &job);
        assert_int_equal(atomic_load(&runs), i);
        await(rest_told[0]);
        /* longer than the time after which it rests: once is enough */
        assert_int_equal(poll(&(struct pollfd){.fd = rest_told[0], .events = POLLIN}, 1, 1500), 0);
        assert_int_equal(atomic_load(&rests), i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_thread_without_work_rests_and_works_again)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
