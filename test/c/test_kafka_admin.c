/* The admin client and the reader on the mock cluster. What the mock cannot do (admin requests, compaction, control records) is
 * tried where there is a real broker: KMQ_TEST_BOOTSTRAP=host:port runs the second group of tests, otherwise it is left out, saying so. */
#include "kafka_test.h"

static cluster c;
static const char *real; /* bootstrap of a real broker, or NULL */

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
static void expect(kafka_reader *reader, const char *name, int32_t partition, int64_t value_offset, size_t n, const int64_t *wanted)
{
    kafka_error err = {0};
    int64_t offsets[100];
    seen s = {.value_offset = value_offset};
    for (size_t i = 0; i < n; i++) offsets[i] = wanted[i] < 0 ? -wanted[i] : wanted[i];
    int64_t before = now_ms();
    if (kafka_reader_read(reader, name, partition, offsets, n, 10000, see, &s, &err) != 0) fail_msg("%s %s", err.name, err.text);
    if (getenv("KMQ_TEST_TIMES") != NULL) fprintf(stderr, "%s: %zu offsets from %lld in %lld ms\n", name, n, (long long)offsets[0], (long long)(now_ms() - before));
    assert_int_equal(s.n, n);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(s.offsets[i], offsets[i]);
        assert_int_equal(s.found[i], wanted[i] >= 0);
    }
}
#define EXPECT(reader, name, partition, ...)                                                                                       \
    do {                                                                                                                           \
        const int64_t wanted[] = {__VA_ARGS__};                                                                                    \
        expect(reader, name, partition, 0, sizeof wanted / sizeof wanted[0], wanted);                                              \
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
    rd_kafka_mock_push_request_errors(c.mock, 1 /* Fetch */, 3, RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION, RD_KAFKA_RESP_ERR__TRANSPORT,
                                      RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    EXPECT(reader, "read-down", 0, 2, 3); /* passing errors pass */
    rd_kafka_mock_broker_set_down(c.mock, 1);
    assert_int_equal(kafka_reader_read(reader, "read-down", 0, &one, 1, 500, see, &s, &err), KAFKA_EKAFKA);
    assert_int_equal(s.n, 0);
    rd_kafka_mock_broker_set_up(c.mock, 1);
    EXPECT(reader, "read-down", 0, 4);
    kafka_reader_destroy(reader);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(metadata),   cmocka_unit_test(no_admin_api), cmocka_unit_test(no_broker),
        cmocka_unit_test(read_exact), cmocka_unit_test(read_gone),    cmocka_unit_test(read_failing),
    };
    real = getenv("KMQ_TEST_BOOTSTRAP");
    return cmocka_run_group_tests_name("kafka admin and reader", tests, start, stop);
}
