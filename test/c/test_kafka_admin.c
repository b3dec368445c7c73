/* The admin client and the reader on the mock cluster. What the mock cannot do (admin requests, trimming, compaction, control records)
 * is skipped there; KMQ_TEST_BOOTSTRAP=host:port runs it against a real broker. */
#include "kafka_test.h"

static cluster c;

#define REAL_ONLY(c)                                                                                                   \
    do {                                                                                                               \
        if ((c).mock != NULL) skip();                                                                                  \
    } while (0)

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

static kafka_admin *admin_open(const char *bootstrap)
{
    kafka_property props[] = {{"bootstrap.servers", bootstrap}, {"group.id", "admin-test"}};
    kafka_error err;
    kafka_admin *admin = NULL;
    if (kafka_admin_open(props, 2, &admin, &err) != 0) fail_msg("%s", err.text);
    return admin;
}

/* ------------------------------------------------------------------ admin */

static void count_topic(void *ctx, const char *name, int n_partitions)
{
    if (strcmp(name, "admin-three") == 0) *(int *)ctx = n_partitions;
}

static void metadata(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    char id[64];
    int n, replication, found = 0;
    int64_t low, high;
    topic(&c, "admin-three", 3);
    fill_partition(&c, "admin-three", 1, 17);
    kafka_admin *admin = admin_open(c.bootstrap);
    assert_int_equal(kafka_admin_cluster_id(admin, id, sizeof id, 5000, &err), 0);
    assert_int_equal(strncmp(id, "mockCluster", 11), 0);
    assert_int_equal(kafka_admin_partitions(admin, "admin-three", 5000, &n, &replication, &err), 0);
    assert_int_equal(n, 3);
    assert_int_equal(replication, 1);
    assert_int_equal(kafka_admin_topics(admin, 5000, count_topic, &found, &err), 0);
    assert_int_equal(found, 3);
    assert_int_equal(kafka_admin_watermarks(admin, "admin-three", 1, 5000, &low, &high, &err), 0);
    assert_int_equal(low, 0);
    assert_int_equal(high, 17);
    rd_kafka_mock_topic_set_error(c.mock, "admin-none", RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    assert_int_equal(kafka_admin_partitions(admin, "admin-none", 5000, &n, &replication, &err), 0);
    assert_int_equal(n, 0);
    rd_kafka_mock_topic_set_error(c.mock, "admin-secret", RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED);
    assert_int_equal(kafka_admin_partitions(admin, "admin-secret", 5000, &n, &replication, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "TOPIC_AUTHORIZATION_FAILED");
    kafka_admin_destroy(admin);
}

/* The sandbox has no admin API: it is said at once, not by a timeout. */
static void no_admin_api(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_admin *admin = admin_open(c.bootstrap);
    int64_t before = now_ms();
    assert_int_equal(kafka_admin_create_topic(admin, "new", 1, 1, NULL, 0, 5000, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "_UNSUPPORTED_FEATURE");
    assert_non_null(strstr(err.text, "sandbox"));
    assert_int_equal(kafka_admin_topic_config(admin, "new", 5000, NULL, NULL, &err), KAFKA_EKAFKA);
    assert_true(now_ms() - before < 3000);
    kafka_admin_destroy(admin);
}

static void no_broker(void **state)
{
    (void)state;
    kafka_error err;
    int n, replication;
    kafka_admin *admin = admin_open("127.0.0.1:1");
    int64_t before = now_ms();
    assert_int_equal(kafka_admin_partitions(admin, "x", 500, &n, &replication, &err), KAFKA_EKAFKA);
    assert_true(err.retriable);
    assert_int_equal(kafka_admin_create_topic(admin, "x", 1, 1, NULL, 0, 500, &err), KAFKA_EKAFKA);
    assert_true(err.retriable);
    kafka_partition p = {.topic = "x", .partition = 0};
    assert_int_equal(kafka_admin_committed(admin, &p, 1, 500, &err), KAFKA_EKAFKA);
    assert_true(err.retriable);
    assert_int_equal(p.offset, -1001);
    assert_true(now_ms() - before < 5000);
    kafka_admin_destroy(admin);
}

/* ------------------------------------------------------------------ reader */

typedef struct seen {
    int64_t offsets[100];
    bool found[100];
    size_t n;
    int64_t value_offset; /* value of a record = its offset minus this */
} seen;

static void see(void *ctx, int64_t offset, const kafka_record *record)
{
    seen *s = ctx;
    assert_true(s->n < 100);
    s->offsets[s->n] = offset;
    s->found[s->n++] = record != NULL;
    if (record == NULL) return;
    char text[24];
    assert_int_equal(record->offset, offset);
    assert_true(record->value_len < sizeof text);
    memcpy(text, record->value, record->value_len);
    text[record->value_len] = '\0';
    assert_int_equal(atoll(text), offset - s->value_offset);
}

static kafka_reader *reader_open(const char *bootstrap)
{
    kafka_property props[] = {{"bootstrap.servers", bootstrap}, {"group.id", "dropped"}};
    kafka_error err;
    kafka_reader *reader = NULL;
    if (kafka_reader_open(props, 2, &reader, &err) != 0) fail_msg("%s", err.text);
    return reader;
}

/* Reads and expects these, in this order; negative: gone. */
static void expect(kafka_reader *reader, const char *name, int32_t partition, int64_t value_offset, size_t n,
                   const int64_t *wanted)
{
    kafka_error err = {0};
    int64_t offsets[100];
    seen s = {.value_offset = value_offset};
    for (size_t i = 0; i < n; i++) offsets[i] = wanted[i] < 0 ? -wanted[i] : wanted[i];
    int64_t before = now_ms();
    if (kafka_reader_read(reader, name, partition, offsets, n, 10000, see, &s, &err) != 0)
        fail_msg("%s %s", err.name, err.text);
    if (getenv("KMQ_TEST_TIMES") != NULL)
        fprintf(stderr, "%s: %zu offsets from %lld in %lld ms\n", name, n, (long long)offsets[0],
                (long long)(now_ms() - before));
    assert_int_equal(s.n, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(s.offsets[i], offsets[i]);
        assert_int_equal(s.found[i], wanted[i] >= 0);
    }
}
#define EXPECT(reader, name, partition, ...)                                                                           \
    do {                                                                                                               \
        const int64_t wanted[] = {__VA_ARGS__};                                                                        \
        expect(reader, name, partition, 0, sizeof wanted / sizeof wanted[0], wanted);                                  \
    } while (0)

static void read_exact(void **state)
{
    (void)state;
    topic(&c, "read", 2);
    fill_partition(&c, "read", 0, 5000);
    fill_partition(&c, "read", 1, 10);
    kafka_reader *reader = reader_open(c.bootstrap);
    EXPECT(reader, "read", 0, 0);
    EXPECT(reader, "read", 0, 0, 1, 2, 3, 17, 18, 999, 1000, 4321, 4999);
    EXPECT(reader, "read", 0, 3); /* back again */
    EXPECT(reader, "read", 1, 9);
    EXPECT(reader, "read", 1, 0, 9);
    EXPECT(reader, "read", 0, 4999);
    /* beyond the end: gone, whether just behind it or far; the ones before are read */
    EXPECT(reader, "read", 1, 8, 9, -10, -11, -100000);
    EXPECT(reader, "read", 1, -10);
    EXPECT(reader, "read", 1, -123456);
    expect(reader, "read", 1, 0, 0, NULL);
    kafka_reader_destroy(reader);
}

/* The mock keeps 5 MiB a partition: older batches go, and with them the offsets. */
static void read_gone(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    enum { N = 20 };
    static char big[500000];
    kafka_error err;
    int64_t low, high;
    topic(&c, "gone", 1);
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}, {"batch.num.messages", "1"}};
    kafka_producer *producer;
    assert_int_equal(kafka_producer_open(props, 2, true, NULL, &producer, &err), 0);
    kafka_topic *t = kafka_producer_topic(producer, "gone", &err);
    for (int i = 0; i < N; i++) {
        char value[8];
        kafka_header pad = {"pad", big, sizeof big};
        int len = snprintf(value, sizeof value, "%d", i);
        assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, value, (size_t)len, &pad, 1, 0, NULL, &err), 0);
    }
    assert_int_equal(reports_read(producer, N), 0);
    kafka_producer_destroy(producer, NULL, NULL);
    kafka_admin *admin = admin_open(c.bootstrap);
    assert_int_equal(kafka_admin_watermarks(admin, "gone", 0, 5000, &low, &high, &err), 0);
    kafka_admin_destroy(admin);
    assert_true(low > 2 && low < N - 2);
    kafka_reader *reader = reader_open(c.bootstrap);
    EXPECT(reader, "gone", 0, -1, -2, -(low - 1), low, low + 1, N - 1, -N);
    EXPECT(reader, "gone", 0, -1);
    EXPECT(reader, "gone", 0, low + 1);
    kafka_reader_destroy(reader);
}

/* No broker, a topic that is not there, no right to read it: an error, and nothing is called gone. */
static void read_failing(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    seen s = {0};
    int64_t one = 1;
    kafka_reader *reader = reader_open("127.0.0.1:1");
    int64_t before = now_ms();
    assert_int_equal(kafka_reader_read(reader, "x", 0, &one, 1, 300, see, &s, &err), KAFKA_EKAFKA);
    assert_true(err.retriable);
    assert_true(now_ms() - before < 2000);
    kafka_reader_destroy(reader);
    reader = reader_open(c.bootstrap);
    rd_kafka_mock_topic_set_error(c.mock, "read-none", RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    assert_int_equal(kafka_reader_read(reader, "read-none", 0, &one, 1, 3000, see, &s, &err), KAFKA_EKAFKA);
    topic(&c, "read-two", 1);
    assert_int_equal(kafka_reader_read(reader, "read-two", 5, &one, 1, 3000, see, &s, &err), KAFKA_EKAFKA);
    topic(&c, "read-down", 1);
    fill_partition(&c, "read-down", 0, 10);
    EXPECT(reader, "read-down", 0, 1);
    rd_kafka_mock_push_request_errors(c.mock, 1 /* Fetch */, 3, RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION,
                                      RD_KAFKA_RESP_ERR__TRANSPORT, RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    EXPECT(reader, "read-down", 0, 2, 3); /* passing errors pass */
    rd_kafka_mock_broker_set_down(c.mock, 1);
    assert_int_equal(kafka_reader_read(reader, "read-down", 0, &one, 1, 500, see, &s, &err), KAFKA_EKAFKA);
    assert_int_equal(s.n, 0);
    rd_kafka_mock_broker_set_up(c.mock, 1);
    EXPECT(reader, "read-down", 0, 4);
    kafka_reader_destroy(reader);
}

/* ------------------------------------------------------------------ a real broker */

static void see_config(void *ctx, const char *name, const char *value)
{
    int *found = ctx;
    if (strcmp(name, "message.timestamp.type") == 0 && strcmp(value, "LogAppendTime") == 0) *found |= 1;
    if (strcmp(name, "min.insync.replicas") == 0 && strcmp(value, "1") == 0) *found |= 2;
}

static void admin_requests(void **state)
{
    (void)state;
    REAL_ONLY(c);
    kafka_error err;
    int n, replication, found = 0;
    int64_t low, high, at;
    kafka_admin *admin = admin_open(c.bootstrap);
    kafka_property config[] = {{"message.timestamp.type", "LogAppendTime"}, {"cleanup.policy", "delete"}};
    topic_with(&c, "admin-real", 2, config, 2);
    assert_int_equal(kafka_admin_create_topic(admin, "admin-real", 1, 1, NULL, 0, 10000, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "TOPIC_ALREADY_EXISTS");
    assert_int_equal(kafka_admin_create_topic(admin, "admin-real-3", 1, 3, NULL, 0, 10000, &err),
                     KAFKA_EKAFKA); /* one broker */
    assert_string_equal(err.name, "INVALID_REPLICATION_FACTOR");
    kafka_property bad[] = {{"no.such.config", "1"}};
    assert_int_equal(kafka_admin_create_topic(admin, "admin-real-4", 1, 1, bad, 1, 10000, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "INVALID_CONFIG");
    assert_int_equal(kafka_admin_create_topic(admin, "not/a/topic", 1, 1, NULL, 0, 10000, &err), KAFKA_EKAFKA);
    assert_int_equal(kafka_admin_topic_config(admin, "admin-real", 10000, see_config, &found, &err), 0);
    assert_int_equal(found, 3);
    assert_int_equal(kafka_admin_topic_config(admin, "admin-real-no", 10000, see_config, &found, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "UNKNOWN_TOPIC_OR_PART");
    assert_int_equal(kafka_admin_create_partitions(admin, "admin-real", 5, 10000, &err), 0);
    EVENTUALLY(10, kafka_admin_partitions(admin, "admin-real", 5000, &n, &replication, &err) == 0 && n == 5);
    assert_int_equal(replication, 1);
    assert_int_equal(kafka_admin_create_partitions(admin, "admin-real", 3, 10000, &err), KAFKA_EKAFKA);
    fill_partition(&c, "admin-real", 0, 100);
    assert_int_equal(kafka_admin_watermarks(admin, "admin-real", 0, 5000, &low, &high, &err), 0);
    assert_int_equal(high, 100);
    assert_int_equal(kafka_admin_offset_for_time(admin, "admin-real", 0, 1000, 5000, &at, &err), 0);
    assert_int_equal(at, 0);
    assert_int_equal(kafka_admin_offset_for_time(admin, "admin-real", 0, 9999999999999, 5000, &at, &err), 0);
    assert_int_equal(at, -1);
    assert_int_equal(kafka_admin_delete_records(admin, "admin-real", 0, 60, 10000, &err), 0);
    assert_int_equal(kafka_admin_watermarks(admin, "admin-real", 0, 5000, &low, &high, &err), 0);
    assert_int_equal(low, 60);
    kafka_reader *reader = reader_open(c.bootstrap);
    EXPECT(reader, "admin-real", 0, -1, -58, -59, 60, 61, 99, -100, -200);
    EXPECT(reader, "admin-real", 0, -59);
    assert_int_equal(kafka_admin_delete_records(admin, "admin-real", 0, 100, 10000, &err), 0); /* all of it */
    EXPECT(reader, "admin-real", 0, -59, -99, -100);
    kafka_reader_destroy(reader);
    assert_int_equal(kafka_admin_delete_records(admin, "admin-real", 0, 500, 10000, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "OFFSET_OUT_OF_RANGE");
    assert_int_equal(kafka_admin_delete_topic(admin, "admin-real", 10000, &err), 0);
    EVENTUALLY(10, kafka_admin_partitions(admin, "admin-real", 5000, &n, &replication, &err) == 0 && n == 0);
    kafka_admin_destroy(admin);
}

static bool exists(kafka_admin *admin, const char *name)
{
    kafka_error err;
    int n, replication;
    assert_int_equal(kafka_admin_partitions(admin, name, 5000, &n, &replication, &err), 0);
    return n > 0;
}

/* On a broker that creates topics by itself, none of our clients makes it create one: not by a question, a reading, a subscription, nor by
 * sending to it. A reader tells a topic that is not there from an offset that is gone, and reads it once it is there. */
static void nothing_creates(void **state)
{
    (void)state;
    REAL_ONLY(c);
    kafka_error err;
    seen s = {0};
    int64_t one = 1;
    const char *missing[] = {"never-made"};
    kafka_admin *admin = admin_open(c.bootstrap);
    kafka_admin_delete_topic(admin, missing[0], 10000, &err);
    EVENTUALLY(10, !exists(admin, missing[0]));
    kafka_reader *reader = reader_open(c.bootstrap);
    assert_int_equal(kafka_reader_read(reader, missing[0], 0, &one, 1, 5000, see, &s, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "UNKNOWN_TOPIC_OR_PART");
    kafka_consumer *consumer = consumer_open(&c, "never-made", NULL, NULL);
    assert_int_equal(kafka_consumer_subscribe(consumer, missing, 1, &err), 0);
    kafka_partition p = {.topic = missing[0], .partition = 0};
    kafka_admin_committed(admin, &p, 1, 5000, &err);
    for (int i = 0; i < 150; i++) {
        kafka_event event;
        while (kafka_consumer_poll(consumer, &event)) kafka_event_free(&event);
        nap_ms(10);
    }
    assert_false(exists(admin, missing[0]));
    kafka_consumer_destroy(consumer, NULL, NULL);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, missing[0], &err);
    assert_int_equal(kafka_producer_send(producer, t, 0, NULL, 0, "0", 1, NULL, 0, 0, NULL, &err), 0);
    nap_ms(1500);
    assert_false(exists(admin, missing[0]));
    assert_int_equal(kafka_reader_read(reader, missing[0], 0, &one, 1, 5000, see, &s, &err), KAFKA_EKAFKA);
    assert_int_equal(s.n, 0);
    topic(&c, missing[0], 1);
    assert_int_equal(reports_read(producer, 1), 0); /* it came in time */
    kafka_producer_destroy(producer, NULL, NULL);
    EXPECT(reader, missing[0], 0, 0, -1);
    /* deleted and made again: the offsets of its first life are gone */
    topic(&c, missing[0], 1);
    fill_partition(&c, missing[0], 0, 3);
    EXPECT(reader, missing[0], 0, 1, 2, -500);
    kafka_reader_destroy(reader);
    assert_int_equal(kafka_admin_delete_topic(admin, missing[0], 10000, &err), 0);
    kafka_admin_destroy(admin);
}

/* Control records: the end of each transaction takes an offset that no reader sees; one of them ends the log. */
static void read_control_records(void **state)
{
    (void)state;
    REAL_ONLY(c);
    char why[256];
    topic(&c, "control", 1);
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    rd_kafka_conf_set(conf, "bootstrap.servers", c.bootstrap, why, sizeof why);
    rd_kafka_conf_set(conf, "transactional.id", "control-test", why, sizeof why);
    rd_kafka_t *rk = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof why);
    assert_null(rd_kafka_init_transactions(rk, 20000));
    for (int i = 0; i < 3; i++) { /* offsets 0 c 2 a 4 c: the value is the offset */
        char value[4] = {(char)('0' + 2 * i)};
        assert_null(rd_kafka_begin_transaction(rk));
        assert_int_equal(rd_kafka_producev(rk, RD_KAFKA_V_TOPIC("control"), RD_KAFKA_V_PARTITION(0),
                                           RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY), RD_KAFKA_V_VALUE(value, 1),
                                           RD_KAFKA_V_END),
                         0);
        rd_kafka_flush(rk, 10000);
        assert_null(i == 1 ? rd_kafka_abort_transaction(rk, 10000) : rd_kafka_commit_transaction(rk, 10000));
    }
    rd_kafka_destroy(rk);
    kafka_reader *reader = reader_open(c.bootstrap);
    EXPECT(reader, "control", 0, 0, -1, 2, -3, 4, -5); /* 5 is a control record at the very end */
    EXPECT(reader, "control", 0, -5);
    EXPECT(reader, "control", 0, -5, -6, -7);
    EXPECT(reader, "control", 0, -3);
    kafka_reader_destroy(reader);
}

/* A compacted topic: what was compacted away is gone, its neighbours are not taken for it. */
static void read_compacted(void **state)
{
    (void)state;
    REAL_ONLY(c);
    kafka_error err;
    kafka_property config[] = {{"cleanup.policy", "compact"},
                               {"segment.ms", "100"},
                               {"min.cleanable.dirty.ratio", "0.01"},
                               {"min.compaction.lag.ms", "0"}};
    topic_with(&c, "compacted", 1, config, 4);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_topic *t = kafka_producer_topic(producer, "compacted", &err);
    for (int i = 0; i < 60; i++) { /* keys a, b, c in turns; the last segments are active */
        char value[8];
        int len = snprintf(value, sizeof value, "%d", i);
        assert_int_equal(kafka_producer_send(producer, t, 0, i % 20 == 7 ? "once" : "often", i % 20 == 7 ? 4 : 5, value,
                                             (size_t)len, NULL, 0, 0, NULL, &err),
                         0);
        assert_int_equal(reports_read(producer, 1), 0);
        if (i % 10 == 9) nap_ms(150);
    }
    kafka_producer_destroy(producer, NULL, NULL);
    kafka_reader *reader = reader_open(c.bootstrap);
    bool compacted = false;
    int64_t limit_ms = now_ms() + scaled_ms(40);
    while (!compacted && now_ms() < limit_ms) {
        int64_t offsets[60];
        seen s = {0};
        size_t found = 0;
        for (int i = 0; i < 60; i++) offsets[i] = i;
        assert_int_equal(kafka_reader_read(reader, "compacted", 0, offsets, 60, 10000, see, &s, &err),
                         0); /* values are checked */
        assert_int_equal(s.n, 60);
        for (int i = 0; i < 60; i++) found += s.found[i];
        assert_true(s.found[59]);
        compacted = found < 20;
        if (!compacted) nap_ms(500);
    }
    if (!compacted)
        print_message("the broker has not compacted in time\n");
    else
        EXPECT(reader, "compacted", 0, -1, -2, -20, 59);
    kafka_reader_destroy(reader);
}

/* The wish of a thousand scattered offsets in a long log: bounded by seeks, not by the log's length. */
static void read_scattered(void **state)
{
    (void)state;
    enum { N = 100000, WANTED = 100 };
    kafka_error err;
    int64_t offsets[WANTED];
    seen s = {0};
    topic(&c, "scattered", 1);
    fill_partition(&c, "scattered", 0, N);
    kafka_reader *reader = reader_open(c.bootstrap);
    for (int i = 0; i < WANTED; i++) offsets[i] = (int64_t)i * (N / WANTED) + i % 7;
    for (int round = 0; round < 3; round++) {
        int64_t before = now_ms();
        memset(&s, 0, sizeof s);
        assert_int_equal(kafka_reader_read(reader, "scattered", 0, offsets, WANTED, 20000, see, &s, &err), 0);
        assert_int_equal(s.n, WANTED);
        for (size_t i = 0; i < WANTED; i++) assert_true(s.found[i]);
        if (getenv("KMQ_TEST_TIMES") != NULL) fprintf(stderr, "scattered: %lld ms\n", (long long)(now_ms() - before));
    }
    kafka_reader_destroy(reader);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(metadata),        cmocka_unit_test(no_admin_api),
        cmocka_unit_test(no_broker),       cmocka_unit_test(read_exact),
        cmocka_unit_test(read_gone),       cmocka_unit_test(read_failing),
        cmocka_unit_test(read_scattered),  cmocka_unit_test(admin_requests),
        cmocka_unit_test(nothing_creates), cmocka_unit_test(read_control_records),
        cmocka_unit_test(read_compacted),
    };
    return cmocka_run_group_tests_name("kafka admin and reader", tests, start, stop);
}
