/* The daemon's configuration file, its log lines and its metrics. */
#include "kmq_test.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon.h"
#include "token.h"

static char dir[64];

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put(const char *name, const char *text)
{
    FILE *file = fopen(path_of(name), "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static const char *read_text(const char *text, tracker_settings *out)
{
    put("conf", text);
    return tracker_settings_read(path_of("conf"), out);
}

static int setup(void **state)
{
    (void)state;
    strcpy(dir, "/tmp/kmq-settings-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    static const char *const names[] = {"conf", "secret", "metrics", "log"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) unlink(path_of(names[i]));
    return rmdir(dir);
}

static const char *prop(const tracker_settings *settings, const char *name)
{
    for (size_t i = 0; i < settings->config.n_props; i++)
        if (strcmp(settings->config.props[i].name, name) == 0) return settings->config.props[i].value;
    return NULL;
}

static void defaults(void **state)
{
    (void)state;
    tracker_settings s;
    assert_null(read_text("group=g\nqueue = orders\nkafka.bootstrap.servers=h:1", &s));
    assert_string_equal(s.config.group, "g");
    assert_string_equal(s.config.tracker_group, "g__kmq_tracker");
    assert_string_equal(s.config.count_header, "kmq-redelivery-count");
    assert_int_equal(s.config.n_queues, 1);
    assert_string_equal(s.config.queues[0].topic, "orders");
    assert_string_equal(s.config.queues[0].markers, "orders__g__markers");
    assert_string_equal(s.config.queues[0].dead_letters, "orders__undelivered");
    assert_string_equal(s.config.queues[0].copies, "orders");
    assert_int_equal(s.config.max_redeliveries, 3);
    assert_int_equal(s.config.rate, 10000);
    assert_false(s.config.trim || s.config.pointer || s.json || s.config.kmq_format);
    assert_null(s.metrics_file);
    tracker_settings_free(&s);
}

static void everything(void **state)
{
    (void)state;
    tracker_settings s;
    char text[1024];
    put("secret", "s3cret = #1\r\n");
    setenv("KMQ_TEST_PASSWORD", "from the environment", 1);
    snprintf(
        text, sizeof text,
        "# a comment\n\n  group = g \nqueue=a.b\nqueue = c\nqueue.a.b.markers = m\nqueue.a.b.copies = again\n"
        "queue.c.dead_letters = d\ntracker_group = t\ncount_header = n\nformat = kmq\nmax_redeliveries = 0\nrate = 7\n"
        "dead_letter_oversize = pointer\nredelivery = transactional\ntrim_markers = true\nlog = json\nmetrics_file = "
        "/x\nmetrics_interval_ms = "
        "250\nkafka.bootstrap.servers = "
        "h:1,i:2\n"
        "kafka.sasl.password = env:KMQ_TEST_PASSWORD\nkafka.ssl.key.password = file:%s\n",
        path_of("secret"));
    assert_null(read_text(text, &s));
    assert_string_equal(s.config.queues[0].markers, "m");
    assert_string_equal(s.config.queues[0].copies, "again");
    assert_string_equal(s.config.queues[0].dead_letters, "a.b__undelivered");
    assert_string_equal(s.config.queues[1].dead_letters, "d");
    assert_string_equal(s.config.tracker_group, "t");
    assert_true(s.config.kmq_format && s.config.trim && s.config.pointer && s.config.transactional && s.json);
    assert_int_equal(s.config.max_redeliveries, 0);
    assert_int_equal(s.config.rate, 7);
    assert_int_equal(s.metrics_interval_ms, 250);
    assert_string_equal(prop(&s, "sasl.password"), "from the environment");
    assert_string_equal(prop(&s, "ssl.key.password"), "s3cret = #1");
    tracker_settings_free(&s);
}

static void refused(void **state)
{
    (void)state;
#define BASE "group=g\nqueue=q\nkafka.bootstrap.servers=h:1\n"
    static const struct {
        const char *text, *why;
    } cases[] = {
        {"queue=q\nkafka.bootstrap.servers=h:1\n", "group is missing"},
        {"group=g\nkafka.bootstrap.servers=h:1\n", "queue is missing"},
        {"group=g\nqueue=q\n", "kafka.bootstrap.servers is missing"},
        {BASE "rat = 3\n", ":4: unknown key rat"},
        {BASE "rate = x\n", ":4: rate: not a value it can have: a whole number from 0 on"},
        {BASE "rate = -1\n", ":4: rate: not a value"},
        {BASE "rate =\n", ":4: rate: has no value"},
        {BASE "rate = 1\nrate = 1\n", ":5: rate comes twice"},
        {BASE "group = h\n", ":4: group comes twice"},
        {BASE "queue = q\n", ":4: queue comes twice"},
        {BASE "kafka.bootstrap.servers = h\n", "comes twice"},
        {BASE "format = java\n", ":4: format: not a value it can have: kmq or range"},
        {BASE "metrics_port = 70000\n", "metrics_port: not a port"},
#ifndef KMQ_HTTP
        {BASE "metrics_port = 9404\n", "make HTTP=1"},
#endif
        {BASE "queue.x.markers = m\n", ":4: queue.x.markers: there is no \"queue = ...\" of that name"},
        {BASE "queue.q.marker = m\n", ":4: unknown key"},
        {BASE "nonsense\n", ":4: not \"key = value\""},
        {BASE "kafka.sasl.password = env:KMQ_TEST_NOT_SET\n", "KMQ_TEST_NOT_SET is not in the environment"},
        {BASE "kafka.sasl.password = file:/nowhere/at all\n", "/nowhere/at all: No such file"},
        {BASE "kafka.sasl.mechanism = OAUTHBEARER\n", "OAUTHBEARER needs token_file"},
        {BASE "token_file = a\ntoken_file = b\n", ":5: token_file comes twice"},
        {BASE "queue = ..\n", ":4: queue: a topic's name"},
        {BASE "queue = a b\n", ":4: queue: a topic's name"},
        {BASE "queue.q.copies = a/b\n", ":4: queue.q.copies: a topic's name"},
        {"group=a b\nqueue=q\nkafka.bootstrap.servers=h:1\n", "queue.q.markers is <queue>__<group>__markers, but"},
        {BASE "queue.q.dead_letters = q\n", "queue.q.dead_letters: leads back"},
        {BASE "queue = r\nqueue.q.dead_letters = r\nqueue.r.dead_letters = q\n", "queue.q.dead_letters: leads back"},
        {BASE "queue = r\nqueue.q.copies = r\nqueue.r.dead_letters = q\n", "queue.r.dead_letters: leads back"},
        {BASE "queue.q.dead_letters = q__g__markers\n", "queue.q.dead_letters: is a marker topic"},
        {BASE "queue = r\nqueue.q.dead_letters = m\nqueue.r.markers = m\n", "queue.q.dead_letters: is a marker topic"},
        {BASE "queue.q.copies = q__g__markers\n", "queue.q.copies: is a marker topic"},
        {BASE "queue.q.copies = q__undelivered\n", "queue.q.copies: is a dead letter topic"},
        {BASE "queue = r\nqueue.q.copies = r__undelivered\n", "queue.q.copies: is a dead letter topic"},
        {BASE "queue.q.markers = q\n", "queue.q.markers: is a queue"},
        {BASE "queue = r\nqueue.q.markers = r\n", "queue.q.markers: is a queue"},
        {BASE "queue = r\nqueue.q.markers = m\nqueue.r.markers = m\n", "queue.q.markers: two queues cannot share it"},
        {BASE "backoff = exponential 2000 1000 2 0.2\n", ":4: backoff: not a value"},
        {BASE "backoff = linear 2000 1000 2 0.2\n", ":4: backoff: not a value"},
        {BASE "backoff = exponential 1000 2000 0.5 0.2\n", ":4: backoff: not a value"},
        {BASE "backoff = exponential 1000 2000 2 1.5\n", ":4: backoff: not a value"},
        {BASE "backoff = list 1.5 1000\n", ":4: backoff: not a value"},
        {BASE "kafka.no.such.thing = 1\n", ":4: kafka.no.such.thing: unknown property"},
        {BASE "kafka.?no.such.thing = 1\n", ":4: unknown key kafka.?no.such.thing"},
        {BASE "kafka.socket.timeout.ms = soon\n", ":4: kafka.socket.timeout.ms: value refused"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        tracker_settings s;
        const char *why = read_text(cases[i].text, &s);
        assert_non_null(why);
        if (!strstr(why, cases[i].why)) fail_msg("%s: %s", cases[i].why, why);
    }
    tracker_settings s;
    assert_non_null(tracker_settings_read("/nowhere/conf", &s));
    /* a secret with a wrong key beside it is not shown */
    assert_null(strstr(read_text(BASE "trim_markers = pa55word\n", &s), "pa55word"));
}

/* What looks like the refused ones and is none of them. */
static void taken(void **state)
{
    (void)state;
    static const char *const texts[] = {"\xef\xbb\xbf" BASE, "\xef\xbb\xbf# a comment\n" BASE,
                                        /* dead letters that are a queue with dead letters of its own */
                                        BASE "queue = q__undelivered\nqueue.q__undelivered.dead_letters = grave\n",
                                        /* copies in a topic of their own, with one place for what fails in either */
                                        BASE "queue = r\nqueue.q.copies = r\nqueue.r.dead_letters = q__undelivered\n",
                                        BASE "backoff = exponential 1000 1000 1 1\nkafka.socket.timeout.ms = 5000\n"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        tracker_settings s;
        const char *why = read_text(texts[i], &s);
        if (why) fail_msg("%s: %s", texts[i], why);
        tracker_settings_free(&s);
    }
    /* one is enough */
    tracker_settings s;
    assert_non_null(read_text("\xef\xbb\xbf\xef\xbb\xbf" BASE, &s));
}

static void tokens(void **state)
{
    (void)state;
    tracker_settings s;
    assert_null(read_text(BASE "kafka.sasl.mechanisms = OAUTHBEARER\ntoken_file = /run/token\n", &s));
    assert_string_equal(s.token_file, "/run/token");
    tracker_settings_free(&s);
    const char *why = read_text(BASE "kafka.sasl.mechanism = OAUTHBEARER\nkafka.sasl.oauthbearer.method = oidc\n", &s);
    if (!why)
        tracker_settings_free(&s);
    else /* a librdkafka that was built without it */
        assert_non_null(strstr(why, ":5: kafka.sasl.oauthbearer.method: value refused"));

    static const struct {
        const char *text, *wrong;
    } files[] = {{"", "is empty"},
                 {"\nabc", "is empty"},
                 {"a b\n", "does not hold a token"},
                 {"a\tb", "does not hold a token"},
                 {"\xc3\xa4", "does not hold a token"},
                 {"abc.def.-_\r\nand more", NULL},
                 {"abc.def.-_", NULL}};
    kafka_token token;
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        put("secret", files[i].text);
        const char *wrong = tracker_token_read(path_of("secret"), &token);
        if (files[i].wrong) {
            assert_non_null(wrong);
            assert_string_equal(wrong, files[i].wrong);
            continue;
        }
        assert_null(wrong);
        assert_string_equal(token.token, "abc.def.-_");
        assert_true(token.expires_ms > 1700000000000);
        tracker_token_clear(&token);
    }
    assert_non_null(tracker_token_read("/nowhere/token", &token));
    assert_non_null(tracker_token_read(dir, &token));
    char *huge = malloc(100000);
    assert_non_null(huge);
    memset(huge, 'a', 99999);
    huge[99999] = 0;
    put("secret", huge);
    free(huge);
    assert_string_equal(tracker_token_read(path_of("secret"), &token), "is longer than a token");
}

static char *content(const char *name)
{
    static char text[65536];
    FILE *file = fopen(path_of(name), "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return text;
}

static void event(tracker_daemon *daemon, ei_x_buff *x)
{
    tracker_daemon_event(daemon, x->buff, (size_t)x->index);
    x->index = 0;
}

static void all_events(tracker_daemon *daemon)
{
    ei_x_buff x;
    ei_x_new(&x);
    for (int i = 0; i < 2; i++) {
        tracker_event_begin(&x, "redelivered", 4);
        tracker_pair_text(&x, "topic", "orders");
        tracker_pair_int(&x, "partition", 3);
        tracker_pair_atom(&x, "cause", "crash");
        tracker_pair_int(&x, "count", 5);
        event(daemon, &x);
    }
    tracker_event_begin(&x, "alarm", 4);
    tracker_pair_atom(&x, "reason", "copy");
    tracker_pair_text(&x, "topic", NULL);
    tracker_pair_int(&x, "partition", -1);
    tracker_pair_text(&x, "text", "a \"quoted\"\nline");
    event(daemon, &x);
    tracker_event_begin(&x, "assigned", 1);
    tracker_put_atom(&x, "partitions");
    for (int i = 0; i < 2; i++) {
        ei_x_encode_list_header(&x, 1);
        ei_x_encode_tuple_header(&x, 2);
        tracker_put_text(&x, "m");
        tracker_put_int(&x, i);
    }
    ei_x_encode_empty_list(&x);
    event(daemon, &x);
    tracker_event_begin(&x, "log", 2);
    tracker_pair_int(&x, "level", 7);
    tracker_pair_text(&x, "text", "talkative");
    event(daemon, &x);
    for (int n = 2; n >= 1; n--) { /* a partition that has gone takes its gauges along */
        tracker_event_begin(&x, "gauges", 3);
        tracker_pair_int(&x, "in_flight", 7);
        tracker_pair_int(&x, "waiting", 0);
        tracker_put_atom(&x, "partitions");
        for (int i = 0; i < n; i++) {
            ei_x_encode_list_header(&x, 1);
            ei_x_encode_map_header(&x, 4);
            tracker_pair_text(&x, "topic", "orders");
            tracker_pair_int(&x, "partition", i);
            tracker_pair_int(&x, "open", 11);
            tracker_pair_int(&x, "next_due_ms", i == 0 ? 1500 : -1);
        }
        ei_x_encode_empty_list(&x);
        event(daemon, &x);
    }
    ei_x_free(&x);
    tracker_daemon_event(daemon, "", 0);
}

static void says(void **state)
{
    (void)state;
    for (int json = 0; json < 2; json++) {
        tracker_settings s;
        char text[512];
        snprintf(text, sizeof text, BASE "log = %s\nmetrics_file = %s\n", json ? "json" : "text", path_of("metrics"));
        assert_null(read_text(text, &s));
        int fd = open(path_of("log"), O_RDWR | O_CREAT | O_TRUNC, 0600);
        tracker_daemon *daemon = tracker_daemon_new(&s, fd);
        all_events(daemon);
        assert_true(tracker_daemon_metrics(daemon));
        const char *log = content("log");
        if (json) {
            assert_non_null(strstr(log,
                                   "\"level\":\"info\",\"event\":\"redelivered\",\"topic\":\"orders\",\"partition\":3,"
                                   "\"cause\":\"crash\",\"count\":5}\n"));
            assert_non_null(strstr(log, "\"text\":\"a \\\"quoted\\\"\\nline\"}\n"));
            assert_non_null(strstr(log, "\"topic\":null"));
            assert_non_null(strstr(log, "\"partitions\":[\"m/0\",\"m/1\"]}\n"));
        } else {
            assert_non_null(strstr(log, "Z info redelivered topic=orders partition=3 cause=crash count=5\n"));
            assert_non_null(strstr(log, "Z error alarm reason=copy text=\"a \\\"quoted\\\"\\nline\"\n"));
        }
        assert_null(strstr(log, "talkative"));
        assert_null(strstr(log, "gauges"));
        const char *metrics = content("metrics");
        assert_non_null(strstr(metrics,
                               "# TYPE kmq_tracker_redelivered_total counter\n"
                               "kmq_tracker_redelivered_total{topic=\"orders\",partition=\"3\",cause=\"crash\"} 10\n"));
        assert_non_null(strstr(metrics, "kmq_tracker_open{topic=\"orders\",partition=\"0\"} 11\n"));
        assert_non_null(strstr(metrics, "kmq_tracker_next_due_seconds{topic=\"orders\",partition=\"0\"} 1.5\n"));
        assert_null(strstr(metrics, "partition=\"1\""));
        assert_non_null(strstr(metrics, "kmq_tracker_in_flight 7\n"));
        tracker_daemon_del(daemon);
        tracker_settings_free(&s);
        close(fd);
    }
}

int main(void)
{
    ei_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults), cmocka_unit_test(everything), cmocka_unit_test(refused),
        cmocka_unit_test(taken),    cmocka_unit_test(tokens),     cmocka_unit_test(says),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
