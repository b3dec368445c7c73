/* Transactions on the mock cluster, which knows the protocol and fences by epoch, but shows what is aborted; with
 * KMQ_TEST_BOOTSTRAP on a real broker. */
#include "kafka_test.h"

enum { ADD_PARTITIONS = 24, ADD_OFFSETS = 25, END_TXN = 26, TXN_OFFSETS = 28, INIT = 22, PRODUCE = 0, SOON_MS = 10000 };

static cluster c;
static kafka_consumer *member;
static kafka_group *group;

static int start(void **state)
{
    (void)state;
    cluster_start(&c, 1);
    topic(&c, "txn-q", 2);
    topic(&c, "txn-m", 1);
    member = consumer_open(&c, "txn-group", NULL, NULL);
    if (kafka_consumer_group(member)) return -1; /* it is nobody yet */
    const char *topics[] = {"txn-m"};
    kafka_event event = {.type = KAFKA_EVENT_NONE};
    kafka_error err;
    assert_int_equal(kafka_consumer_subscribe(member, topics, 1, &err), 0);
    EVENTUALLY(20, (kafka_event_free(&event), kafka_consumer_poll(member, &event)) && event.type == KAFKA_EVENT_ASSIGN);
    assert_int_equal(kafka_consumer_assign(member, event.partitions, event.n_partitions, &err), 0);
    kafka_event_free(&event);
    group = kafka_consumer_group(member);
    return group ? 0 : -1;
}

static int stop(void **state)
{
    (void)state;
    kafka_group_put(kafka_group_keep(group));
    kafka_group_put(group);
    kafka_group_put(NULL);
    kafka_consumer_destroy(member, NULL, NULL);
    cluster_stop(&c);
    assert_nothing_left();
    return 0;
}

static kafka_txn *txn_open(const char *id)
{
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}};
    kafka_txn *txn = NULL;
    kafka_error err;
    if (kafka_txn_open(props, 1, id, 20000, &txn, &err) != 0) fail_msg("%s: %s", err.name, err.text);
    return txn;
}

static kafka_txn *txn_ready(const char *id)
{
    kafka_error err;
    kafka_txn *txn = txn_open(id);
    if (kafka_txn_init(txn, 30000, &err) != 0) fail_msg("%s: %s", err.name, err.text);
    return txn;
}

static int offsets(kafka_txn *txn, int64_t offset, const char *metadata, kafka_error *err)
{
    kafka_partition at = {.topic = "txn-m", .partition = 0, .offset = offset, .metadata = metadata};
    return kafka_txn_offsets(txn, group, &at, 1, SOON_MS, err);
}

static int sent(kafka_txn *txn, const char *name, int32_t partition, const char *value, kafka_txn_report *report,
                kafka_error *err)
{
    const kafka_header headers[] = {{"h", "v", 1}};
    return kafka_txn_send(txn, name, partition, "k", 1, value, strlen(value), headers, 1, report, err);
}

static void inject(int16_t request, rd_kafka_resp_err_t code, size_t times)
{
    rd_kafka_resp_err_t codes[8];
    for (size_t i = 0; i < times; i++) codes[i] = code;
    rd_kafka_mock_push_request_errors_array(c.mock, request, times, codes);
}

/* A whole transaction that must succeed. */
static void whole(kafka_txn *txn)
{
    kafka_error err;
    kafka_txn_report reports[3];
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    assert_int_equal(offsets(txn, 7, "md", &err), 0);
    for (int i = 0; i < 3; i++) assert_int_equal(sent(txn, "txn-q", 0, "value", &reports[i], &err), 0);
    if (kafka_txn_flush(txn, SOON_MS, &err) != 0) fail_msg("%s: %s", err.name, err.text);
    for (int i = 0; i < 3; i++) {
        assert_true(reports[i].known);
        assert_int_equal(reports[i].error, 0);
        if (i) assert_int_equal(reports[i].offset, reports[i - 1].offset + 1);
    }
    kafka_txn_report last;
    assert_int_equal(sent(txn, "txn-m", 0, "end", &last, &err), 0);
    assert_int_equal(kafka_txn_flush(txn, SOON_MS, &err), 0);
    assert_true(last.known);
    if (kafka_txn_commit(txn, SOON_MS, &err) != 0) fail_msg("%s: %s", err.name, err.text);
}

/* ------------------------------------------------------------------ good ends */

static void committed_again_and_again(void **state)
{
    (void)state;
    kafka_txn *txn = txn_ready("again");
    for (int i = 0; i < 5; i++) whole(txn);
    kafka_txn_destroy(txn);
}

static void aborted_then_good(void **state)
{
    (void)state;
    kafka_error err;
    kafka_txn_report report;
    kafka_txn *txn = txn_ready("aborted");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    assert_int_equal(sent(txn, "txn-q", 1, "never", &report, &err), 0);
    assert_int_equal(kafka_txn_abort(txn, SOON_MS, &err), 0);
    assert_true(report.known);
    whole(txn);
    kafka_txn_destroy(txn);
}

/* Each call is made again until it succeeds. */
static void passing_errors_are_waited_out(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_txn *txn = txn_open("passing");
    kafka_error err;
    inject(INIT, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS, 2);
    assert_int_equal(kafka_txn_init(txn, 30000, &err), 0);
    inject(ADD_OFFSETS, RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS, 3);
    inject(TXN_OFFSETS, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS, 2);
    inject(ADD_PARTITIONS, RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS, 3);
    inject(END_TXN, RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS, 2);
    whole(txn);
    kafka_txn_destroy(txn);
}

/* ------------------------------------------------------------------ what must be aborted */

static void a_message_that_is_refused_is_named(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_txn_report report;
    kafka_txn *txn = txn_ready("refused");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    inject(PRODUCE, RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, 1);
    assert_int_equal(sent(txn, "txn-q", 0, "large", &report, &err), 0);
    assert_int_equal(kafka_txn_flush(txn, SOON_MS, &err), KAFKA_EABORT);
    assert_string_equal(err.name, "MSG_SIZE_TOO_LARGE");
    assert_true(report.known);
    assert_int_equal(report.error, RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE);
    assert_int_equal(kafka_txn_abort(txn, SOON_MS, &err), 0);
    kafka_txn_destroy(txn); /* as kafka.h has it */
    txn = txn_ready("refused");
    whole(txn);
    kafka_txn_destroy(txn);
}

/* No message says why: the reason is the transaction's, and comes soon, not when the messages have timed out. */
static void a_topic_that_is_denied_is_told_soon(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_txn_report report;
    kafka_txn *txn = txn_ready("denied");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    inject(ADD_PARTITIONS, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, 1);
    assert_int_equal(sent(txn, "txn-q", 0, "denied", &report, &err), 0);
    int64_t began_ms = now_ms();
    assert_int_equal(kafka_txn_flush(txn, 18000, &err), KAFKA_EABORT);
    assert_true(now_ms() - began_ms < 15000);
    assert_string_equal(err.name, "TOPIC_AUTHORIZATION_FAILED");
    assert_int_equal(kafka_txn_abort(txn, SOON_MS, &err), 0);
    whole(txn);
    kafka_txn_destroy(txn);
}

static void a_generation_that_is_over_is_refused(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_txn *txn = txn_ready("generation");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    inject(TXN_OFFSETS, RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION, 1);
    assert_int_equal(offsets(txn, 1, NULL, &err), KAFKA_EABORT);
    assert_string_equal(err.name, "ILLEGAL_GENERATION");
    assert_int_equal(kafka_txn_abort(txn, SOON_MS, &err), 0);
    whole(txn);
    kafka_txn_destroy(txn);
}

static void bad_metadata_is_refused_here(void **state)
{
    (void)state;
    kafka_error err;
    kafka_txn *txn = txn_ready("metadata");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    assert_int_equal(offsets(txn, 1, "\xc3\xa4", &err), KAFKA_EABORT);
    assert_string_equal(err.name, "OFFSET_METADATA_TOO_LARGE");
    assert_int_equal(offsets(txn, -1, NULL, &err), KAFKA_EABORT);
    assert_int_equal(kafka_txn_abort(txn, SOON_MS, &err), 0);
    kafka_txn_destroy(txn);
}

/* ------------------------------------------------------------------ what ends the producer */

/* The mock does not fence by id: there the coordinator's answer stands for it. */
static void the_same_id_fences(void **state)
{
    (void)state;
    kafka_error err;
    kafka_txn_report report;
    kafka_txn *zombie = txn_ready("fenced");
    assert_int_equal(kafka_txn_begin(zombie, &err), 0);
    assert_int_equal(sent(zombie, "txn-q", 0, "zombie", &report, &err), 0);
    assert_int_equal(kafka_txn_flush(zombie, SOON_MS, &err), 0);
    kafka_txn *successor = txn_ready("fenced");
    if (c.mock) inject(END_TXN, RD_KAFKA_RESP_ERR_PRODUCER_FENCED, 1);
    assert_int_equal(kafka_txn_commit(zombie, SOON_MS, &err), KAFKA_EDEAD);
    assert_true(err.fatal);
    assert_int_equal(kafka_txn_begin(zombie, &err), KAFKA_EDEAD);
    kafka_txn_destroy(zombie);
    whole(successor);
    kafka_txn_destroy(successor);
}

static void a_broker_that_is_away_ends_each_call_in_time(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_txn_report report;
    kafka_txn *txn = txn_ready("away");
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    assert_int_equal(sent(txn, "txn-q", 0, "x", &report, &err), 0);
    assert_int_equal(kafka_txn_flush(txn, SOON_MS, &err), 0);
    rd_kafka_mock_broker_set_down(c.mock, 1);
    assert_int_equal(sent(txn, "txn-q", 0, "x", &report, &err), 0);
    int64_t began_ms = now_ms();
    assert_int_equal(kafka_txn_flush(txn, 300, &err), KAFKA_EABORT);
    assert_string_equal(err.name, "_TIMED_OUT");
    assert_int_equal(kafka_txn_abort(txn, 300, &err), KAFKA_EDEAD);
    assert_true(now_ms() - began_ms < scaled_ms(5));
    kafka_txn_destroy(txn);
    kafka_txn *other = txn_open("away");
    assert_int_equal(kafka_txn_init(other, 300, &err), KAFKA_EDEAD);
    assert_true(err.retriable);
    kafka_txn_destroy(other);
    rd_kafka_mock_broker_set_up(c.mock, 1);
    other = txn_ready("away");
    whole(other);
    kafka_txn_destroy(other);
}

/* Under ASan: what comes after destroy does not touch the report any more. */
static void destroyed_in_the_middle(void **state)
{
    (void)state;
    kafka_error err;
    kafka_txn *txn = txn_ready("middle");
    kafka_txn_report *report = malloc(sizeof *report);
    assert_int_equal(kafka_txn_begin(txn, &err), 0);
    assert_int_equal(sent(txn, "txn-q", 0, "x", report, &err), 0);
    kafka_txn_destroy(txn);
    free(report);
    txn = txn_ready("middle");
    whole(txn);
    kafka_txn_destroy(txn);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(committed_again_and_again),
        cmocka_unit_test(aborted_then_good),
        cmocka_unit_test(passing_errors_are_waited_out),
        cmocka_unit_test(a_message_that_is_refused_is_named),
        cmocka_unit_test(a_topic_that_is_denied_is_told_soon),
        cmocka_unit_test(a_generation_that_is_over_is_refused),
        cmocka_unit_test(bad_metadata_is_refused_here),
        cmocka_unit_test(the_same_id_fences),
        cmocka_unit_test(a_broker_that_is_away_ends_each_call_in_time),
        cmocka_unit_test(destroyed_in_the_middle),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
