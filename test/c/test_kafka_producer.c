/* The producer on the mock cluster, and what a consumer reads back: keys, values and headers exactly as sent. */
#include "kafka_test.h"
#include "failpoint.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static cluster c;

static int start(void **state)
{
    (void)state;
    cluster_start(&c, 1);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    cluster_stop(&c);
    assert_nothing_left();
    return 0;
}

/* One partition, assigned from its beginning, read until n records have come. Each is handed to check with its number. */
static void read_back(const char *name, int n, void (*check)(int i, const kafka_record *record))
{
    kafka_error err;
    kafka_consumer *consumer = consumer_open(&c, "read-back", NULL, NULL);
    kafka_partition from = {.topic = name, .offset = -2};
    assert_int_equal(kafka_consumer_assign(consumer, &from, 1, &err), 0);
    kafka_queue *queue = kafka_consumer_queue(consumer, name, 0);
    assert_non_null(queue);
    int64_t limit_ms = now_ms() + scaled_ms(10);
    for (int i = 0; i < n;) {
        kafka_record records[64];
        size_t got = kafka_queue_wait(queue, records, 64, 100);
        for (size_t k = 0; k < got; k++)
            if (records[k].error == 0) check(i++, &records[k]);
        kafka_records_free(records, got);
        assert_true(now_ms() < limit_ms);
    }
    kafka_consumer_destroy(consumer, NULL, NULL);
}

/* ------------------------------------------------------------------ null and empty */

static int64_t base_ms; /* not some old time: a broker's retention would delete the records at once */

static void assert_name(const kmq_header *header, const char *name)
{
    assert_int_equal(header->name_len, strlen(name));
    assert_memory_equal(header->name, name, header->name_len);
}

static void check_null_empty(int i, const kafka_record *record)
{
    kmq_header headers[8];
    static const bool key_null[] = {true, false, true, false}, value_null[] = {true, true, false, false};
    assert_true((record->key == NULL) == key_null[i]);
    assert_true((record->value == NULL) == value_null[i]);
    assert_int_equal(record->key_len, 0);
    assert_int_equal(record->value_len, 0);
    assert_int_equal(record->offset, i);
    assert_int_equal(record->timestamp_ms, base_ms + i);
    assert_false(record->log_append_time);
    assert_int_equal(kafka_record_headers(record, headers, 8), 5);
    assert_name(&headers[0], "null");
    assert_null(headers[0].value);
    assert_name(&headers[1], "empty");
    assert_non_null(headers[1].value);
    assert_int_equal(headers[1].value_len, 0);
    assert_name(&headers[2], "nul");
    assert_int_equal(headers[2].value_len, 3);
    assert_memory_equal(headers[2].value, "a\0b", 3);
    assert_name(&headers[3], "null"); /* a repeated name stays, in its place */
    assert_int_equal(headers[3].value_len, 1);
    assert_memory_equal(headers[3].value, "2", 1);
    assert_name(&headers[4], ""); /* a name may be empty */
    assert_int_equal(kafka_record_headers(record, headers, 2), 5);
}

static void null_and_empty(void **state)
{
    (void)state;
    topic(&c, "null", 1);
    base_ms = (int64_t)time(NULL) * 1000 - 5000;
    kafka_error err;
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "null", &err);
    const kafka_header headers[] = {
        {"null", NULL, 0}, {"empty", "", 0}, {"nul", "a\0b", 3}, {"null", "2", 1}, {"", "x", 1}};
    for (int i = 0; i < 4; i++)
        assert_int_equal(kafka_producer_send(producer, t, 0, i & 1 ? "" : NULL, 0, i & 2 ? "" : NULL, 0, headers, 5,
                                             base_ms + i, NULL, &err),
                         0);
    assert_int_equal(reports_read(producer, 4), 0);
    kafka_producer_destroy(producer, NULL, NULL);
    read_back("null", 4, check_null_empty);
}

/* The path without headers is another function of librdkafka's. */
static void check_plain(int i, const kafka_record *record)
{
    kmq_header header;
    assert_true((record->key == NULL) == !(i & 1));
    assert_true((record->value == NULL) == !(i & 2));
    assert_int_equal(record->key_len, 0);
    assert_int_equal(record->value_len, 0);
    assert_int_equal(kafka_record_headers(record, &header, 1), 0);
    assert_true(record->timestamp_ms > 1600000000000);
}

static void null_and_empty_plain(void **state)
{
    (void)state;
    topic(&c, "null-plain", 1);
    kafka_error err;
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "null-plain", &err);
    for (int i = 0; i < 4; i++)
        assert_int_equal(
            kafka_producer_send(producer, t, 0, i & 1 ? "" : NULL, 0, i & 2 ? "" : NULL, 0, NULL, 0, 0, NULL, &err), 0);
    assert_int_equal(reports_read(producer, 4), 0);
    kafka_producer_destroy(producer, NULL, NULL);
    read_back("null-plain", 4, check_plain);
}

enum { MANY = 500 };
static void check_many_headers(int i, const kafka_record *record)
{
    static kmq_header headers[MANY];
    (void)i;
    assert_int_equal(kafka_record_headers(record, headers, MANY), MANY);
    for (int k = 0; k < MANY; k++) {
        char name[16];
        snprintf(name, sizeof name, "h%d", k);
        assert_name(&headers[k], name);
        assert_int_equal(headers[k].value_len, (size_t)k);
    }
    assert_int_equal(record->key_len, 4);
    assert_memory_equal(record->key, "k\0ey", 4);
    assert_int_equal(record->value_len, 100000);
}

static void many_headers(void **state)
{
    (void)state;
    static kafka_header headers[MANY];
    static char names[MANY][16], bytes[100000];
    kafka_error err;
    topic(&c, "many", 1);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "many", &err);
    for (int k = 0; k < MANY; k++) {
        snprintf(names[k], sizeof names[k], "h%d", k);
        headers[k] = (kafka_header){names[k], bytes, (size_t)k};
    }
    assert_int_equal(kafka_producer_send(producer, t, 0, "k\0ey", 4, bytes, sizeof bytes, headers, MANY, 0, NULL, &err),
                     0);
    assert_int_equal(reports_read(producer, 1), 0);
    kafka_producer_destroy(producer, NULL, NULL);
    read_back("many", 1, check_many_headers);
}

/* ------------------------------------------------------------------ reports */

/* More messages than one call reads: an event that is read in part goes on in the next call, each message exactly once, and
 * every batch of reports is announced. */
static void reports(void **state)
{
    enum { N = 5000 };
    static char seen[N];
    (void)state;
    waker w = {0};
    kafka_error err;
    topic(&c, "reports", 1);
    kafka_producer *producer = producer_open(&c, &w, true);
    kafka_topic *t = kafka_producer_topic(producer, "reports", &err);
    assert_ptr_equal(t, kafka_producer_topic(producer, "reports", &err));
    for (int i = 0; i < N; i++)
        assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, &seen[i], &err), 0);
    assert_true(kafka_producer_queued(producer) >= N);
    int left = N, calls = 0, wakes = 0;
    while (left > 0) {
        kafka_report out[7];
        EVENTUALLY(10, atomic_load(&w.count) > wakes); /* nobody looks before a wake-up */
        wakes = atomic_load(&w.count);
        size_t n;
        while ((n = kafka_producer_reports(producer, out, 7)) > 0) {
            calls++;
            for (size_t i = 0; i < n; i++) {
                assert_int_equal(out[i].error, 0);
                assert_null(out[i].error_name);
                assert_int_equal(out[i].partition, 0);
                char *mark = out[i].opaque;
                assert_int_equal(out[i].offset, mark - seen); /* and in order */
                assert_int_equal(*mark, 0);
                *mark = 1;
            }
            left -= (int)n;
        }
    }
    assert_true(calls > N / 8);
    assert_int_equal(kafka_producer_queued(producer), 0);
    kafka_producer_destroy(producer, NULL, NULL);
}

/* The local queue full: nothing is queued, and there is room again when reports have been read. */
static void full(void **state)
{
    (void)state;
    topic(&c, "full", 1);
    kafka_property props[] = {
        {"bootstrap.servers", c.bootstrap}, {"queue.buffering.max.messages", "10"}, {"linger.ms", "5"}};
    kafka_error err;
    kafka_producer *producer;
    assert_int_equal(kafka_producer_open(props, 3, true, NULL, &producer, &err), 0);
    kafka_topic *t = kafka_producer_topic(producer, "full", &err);
    kafka_header h = {"a", "b", 1};
    for (int i = 0; i < 10; i++)
        assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, &h, 1, 0, NULL, &err), 0);
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err), KAFKA_EFULL);
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, &h, 1, 0, NULL, &err), KAFKA_EFULL);
    assert_string_equal(err.name, "_QUEUE_FULL");
    assert_true(err.retriable);
    assert_int_equal(reports_read(producer, 10), 0);
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err), 0);
    assert_int_equal(reports_read(producer, 1), 0);
    kafka_producer_destroy(producer, NULL, NULL);
}

/* What the broker refuses is reported with its code; what it refuses for a while is tried again by librdkafka. */
static void broker_errors(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_report out[1];
    topic(&c, "errors", 1);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "errors", &err);
    rd_kafka_mock_push_request_errors(c.mock, 0 /* Produce */, 2, RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS,
                                      RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION);
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    assert_int_equal(reports_read(producer, 1), 0);
    rd_kafka_mock_push_request_errors(c.mock, 0, 1, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED);
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    EVENTUALLY(10, kafka_producer_reports(producer, out, 1) == 1);
    assert_int_equal(out[0].error, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED);
    assert_string_equal(out[0].error_name, "TOPIC_AUTHORIZATION_FAILED");
    kafka_producer_destroy(producer, NULL, NULL);
    /* too large is refused on the spot */
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}, {"message.max.bytes", "1000"}};
    assert_int_equal(kafka_producer_open(props, 2, true, NULL, &producer, &err), 0);
    t = kafka_producer_topic(producer, "errors", &err);
    static char big[2000];
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, big, sizeof big, NULL, 0, 0, NULL, &err),
                     KAFKA_EKAFKA);
    assert_string_equal(err.name, "MSG_SIZE_TOO_LARGE");
    assert_false(err.retriable);
    /* so is a partition that does not exist, once the topic is known; with headers too */
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    assert_int_equal(reports_read(producer, 1), 0);
    kafka_header h = {"a", "b", 1};
    assert_int_equal(kafka_producer_send(producer, t, 99, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err), KAFKA_EKAFKA);
    assert_int_equal(kafka_producer_send(producer, t, 99, NULL, 0, "v", 1, &h, 1, 0, NULL, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "_UNKNOWN_PARTITION");
    kafka_producer_destroy(producer, NULL, NULL);
}

/* A fatal producer says so: by an event, by fatal(), and for each send. Its messages come back as failed. */
static void fatal_producer(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_event event;
    kafka_report out[4];
    waker w = {0};
    topic(&c, "fatal", 1);
    kafka_producer *producer = producer_open(&c, &w, true);
    kafka_topic *t = kafka_producer_topic(producer, "fatal", &err);
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    assert_int_equal(reports_read(producer, 1), 0);
    assert_false(kafka_producer_fatal(producer, &err));
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 500);
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    assert_int_equal(kafka_producer_test_fatal(producer, "made by the test"), 0);
    assert_true(kafka_producer_fatal(producer, &err));
    assert_true(err.fatal);
    assert_false(err.retriable);
    assert_string_equal(err.name, "OUT_OF_ORDER_SEQUENCE_NUMBER");
    assert_non_null(strstr(err.text, "made by the test"));
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err), KAFKA_EKAFKA);
    assert_true(err.fatal);
    assert_string_equal(err.name, "OUT_OF_ORDER_SEQUENCE_NUMBER");
    kafka_producer_purge(producer);
    EVENTUALLY(10, kafka_producer_reports(producer, out, 4) == 1);
    while (kafka_producer_reports(producer, out, 4) > 0) {}
    bool found = false;
    while (kafka_producer_poll(producer, &event)) {
        found |= event.type == KAFKA_EVENT_ERROR && event.error.fatal;
        kafka_event_free(&event);
    }
    assert_true(found);
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 0);
    kafka_producer_destroy(producer, NULL, NULL);
}

static void purge(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_report out[100];
    topic(&c, "purge", 1);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "purge", &err);
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 60000); /* a broker that accepts and does not answer */
    for (int i = 0; i < 100; i++) kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    nap_ms(50);
    kafka_producer_purge(producer);
    size_t n = 0;
    while (n < 100) {
        size_t got = kafka_producer_reports(producer, out + n, 100 - n);
        for (size_t i = n; i < n + got; i++) {
            assert_true(out[i].error == RD_KAFKA_RESP_ERR__PURGE_QUEUE ||
                        out[i].error == RD_KAFKA_RESP_ERR__PURGE_INFLIGHT);
            assert_true(kafka_error_retriable(out[i].error));
        }
        n += got;
        nap_ms(1);
    }
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    kafka_producer_destroy(producer, NULL, NULL);
    assert_nothing_left();
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 0);
}

/* Destroyed with everything in it: unsent messages, a report read in part, events. No wake-up afterwards; done is called. */
static void count_done(void *ctx) { atomic_fetch_add((atomic_int *)ctx, 1); }

static void destroy_in_the_middle(void **state)
{
    (void)state;
    kafka_error err;
    kafka_report out[3];
    static waker w;
    static atomic_int done;
    topic(&c, "middle", 4);
    for (int round = 0; round < 5; round++) {
        kafka_producer *producer = producer_open(&c, &w, true);
        kafka_topic *t = kafka_producer_topic(producer, "middle", &err);
        for (int i = 0; i < 1000; i++) kafka_producer_send(producer, t, i % 4, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
        if (round > 0) EVENTUALLY(10, kafka_producer_reports(producer, out, 3) > 0);
        for (int i = 0; i < 1000; i++) kafka_producer_send(producer, t, i % 4, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
        int64_t before = now_ms();
        kafka_producer_destroy(producer, count_done, &done);
        assert_true(now_ms() - before < 100);
        int after = atomic_load(&w.count);
        EVENTUALLY(10, atomic_load(&done) == round + 1);
        assert_int_equal(atomic_load(&w.count), after);
    }
    assert_nothing_left();
}

/* A publisher that is not idempotent keeps its own acks. */
static void not_idempotent(void **state)
{
    (void)state;
    kafka_error err;
    topic(&c, "acks", 1);
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}, {"acks", "1"}, {"linger.ms", "0"}};
    kafka_producer *producer;
    assert_int_equal(kafka_producer_open(props, 3, false, NULL, &producer, &err), 0);
    kafka_topic *t = kafka_producer_topic(producer, "acks", &err);
    assert_int_equal(kafka_producer_send(producer, t, -1, "k", 1, "v", 1, NULL, 0, 0, NULL, &err), 0);
    assert_int_equal(reports_read(producer, 1), 0);
    kafka_producer_destroy(producer, NULL, NULL);
}

/* ------------------------------------------------------------------ properties */

static void properties(void **state)
{
    (void)state;
    kafka_error err;
    kafka_producer *producer = NULL;
    kafka_property unknown[] = {{"no.such.thing", "1"}};
    assert_int_equal(kafka_producer_open(unknown, 1, true, NULL, &producer, &err), KAFKA_EKAFKA);
    assert_non_null(strstr(err.text, "no.such.thing"));
    assert_int_equal(err.code, RD_KAFKA_RESP_ERR__INVALID_ARG);
    kafka_property secret[] = {{"linger.ms", "hunter2"}};
    assert_int_equal(kafka_producer_open(secret, 1, true, NULL, &producer, &err), KAFKA_EKAFKA);
    assert_null(strstr(err.text, "hunter2")); /* a value is never repeated */
    kafka_property clash[] = {{"bootstrap.servers", c.bootstrap}, {"max.in.flight", "100"}};
    assert_int_equal(kafka_producer_open(clash, 2, true, NULL, &producer, &err),
                     KAFKA_EKAFKA); /* idempotent needs <= 5 */
    assert_true(err.text[0] != '\0');
    kafka_property optional[] = {{"bootstrap.servers", c.bootstrap}, {"?no.such.thing", "1"}};
    assert_int_equal(kafka_producer_open(optional, 2, true, NULL, &producer, &err), 0);
    kafka_producer_destroy(producer, NULL, NULL);
    assert_nothing_left();
}

/* Logs and errors come as events, not on stderr. */
static void broker_down(void **state)
{
    (void)state;
    kafka_error err;
    kafka_event event;
    kafka_report out[1];
    waker w = {0};
    kafka_wake wake = waker_of(&w);
    kafka_property props[] = {{"bootstrap.servers", "127.0.0.1:1"}, {"message.timeout.ms", "600"}};
    kafka_producer *producer;
    assert_int_equal(kafka_producer_open(props, 2, true, &wake, &producer, &err), 0);
    kafka_topic *t = kafka_producer_topic(producer, "down", &err);
    kafka_producer_send(producer, t, 0, NULL, 0, "v", 1, NULL, 0, 0, NULL, &err);
    bool error = false, log = false;
    EVENTUALLY(10, kafka_producer_reports(producer, out, 1) == 1);
    assert_string_equal(out[0].error_name, "_MSG_TIMED_OUT");
    assert_true(kafka_error_retriable(out[0].error));
    while (kafka_producer_poll(producer, &event)) {
        if (event.type == KAFKA_EVENT_ERROR) {
            error = true;
            assert_true(event.error.retriable);
            assert_false(event.error.fatal);
            assert_string_equal(event.text, event.error.text);
        }
        log |= event.type == KAFKA_EVENT_LOG && event.text[0] != '\0';
        kafka_event_free(&event);
    }
    assert_true(error && log);
    assert_true(atomic_load(&w.count) > 0);
    kafka_producer_destroy(producer, NULL, NULL);
}

/* ------------------------------------------------------------------ failpoints */

static int child(const char *spec, const char *name, int hits)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        int fails = 0;
        setenv("KMQ_FAILPOINTS", spec, 1);
        for (int i = 0; i < hits; i++) fails += kmq_failpoint_hit(name);
        _exit(fails);
    }
    waitpid(pid, &status, WUNTRACED);
    if (WIFSTOPPED(status)) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        return -SIGSTOP;
    }
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

static void failpoints(void **state)
{
    (void)state;
    assert_int_equal(child("a=kill@3,b=fail", "a", 2), 0);
    assert_int_equal(child("a=kill@3,b=fail", "a", 3), -SIGKILL);
    assert_int_equal(child("a=kill@3,b=fail", "b", 4), 4);
    assert_int_equal(child("a=kill@3,b=fail", "c", 4), 0);
    assert_int_equal(child("b=fail@3", "b", 5), 3);
    assert_int_equal(child("b=fail@3*2", "b", 10), 2);
    assert_int_equal(child("b=stop", "b", 1), -SIGSTOP);
    assert_int_equal(child("", "b", 1), 0);
    assert_int_equal(child("nonsense", "b", 1), -SIGABRT);
}

int main(void)
{
    const struct CMUnitTest early[] = {cmocka_unit_test(failpoints)}; /* forks: before there are threads */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_and_empty),
        cmocka_unit_test(null_and_empty_plain),
        cmocka_unit_test(many_headers),
        cmocka_unit_test(reports),
        cmocka_unit_test(full),
        cmocka_unit_test(broker_errors),
        cmocka_unit_test(fatal_producer),
        cmocka_unit_test(purge),
        cmocka_unit_test(destroy_in_the_middle),
        cmocka_unit_test(not_idempotent),
        cmocka_unit_test(properties),
        cmocka_unit_test(broker_down),
    };
    int failed = cmocka_run_group_tests_name("failpoint", early, NULL, NULL);
    return failed + cmocka_run_group_tests_name("kafka producer", tests, start, stop);
}
