/* Connections that break and come back: which errors are one outage, and that each client tells who it is connected to. */
#include "kafka_test.h"

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

static kafka_outage_step heard(kafka_outage *outage, int code, const char *text, int64_t now_ms)
{
    kafka_error err;
    kafka_error_set(&err, code, "%s", text);
    return kafka_outage_error(outage, &err, now_ms);
}

static bool link_is(kafka_outage *outage, kafka_event_type type, const char *broker, int64_t now_ms)
{
    kafka_event event = {.type = type, .text = broker};
    return kafka_outage_link(outage, &event, now_ms);
}

static bool up(kafka_outage *outage, const char *broker, int64_t now_ms)
{
    return link_is(outage, KAFKA_EVENT_UP, broker, now_ms);
}

static const char refused[] = "127.0.0.1:9092/1: Connect to ipv4#127.0.0.1:9092 failed: Connection refused";
static const char coordinator[] = "GroupCoordinator: 127.0.0.1:9092: Disconnected (after 12ms in state UP)";
static const char down[] = "1/1 brokers are down";

/* Two clients lose a broker: four errors, said once; it is back: said once. */
static void one_broker(void **state)
{
    (void)state;
    kafka_outage outage = {0};
    int64_t lasted = 0;
    assert_false(up(&outage, "127.0.0.1:9092", 5)); /* the first connection */
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, 10), KAFKA_OUTAGE_BEGINS);
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN, down, 11), KAFKA_OUTAGE_GOES_ON);
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, coordinator, 12), KAFKA_OUTAGE_GOES_ON);
    for (int i = 0; i < 100; i++)
        assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, 13 + i), KAFKA_OUTAGE_GOES_ON);
    /* another broker, and one whose port begins alike */
    assert_false(up(&outage, "127.0.0.1:909", 200));
    assert_false(up(&outage, "127.0.0.2:9092", 200));
    assert_true(up(&outage, "127.0.0.1:9092", 310));
    assert_false(kafka_outage_over(&outage, 309 + KAFKA_OUTAGE_SETTLE_MS, &lasted));
    assert_true(kafka_outage_over(&outage, 310 + KAFKA_OUTAGE_SETTLE_MS, &lasted));
    assert_int_equal(lasted, 300);
    assert_false(up(&outage, "127.0.0.1:9092", 1000)); /* the other client's */
    assert_false(kafka_outage_over(&outage, 2000, &lasted));
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, 3000), KAFKA_OUTAGE_BEGINS);
}

/* A broker that takes connections and closes them is not back. */
static void settling(void **state)
{
    (void)state;
    kafka_outage outage = {0};
    int64_t lasted, now = 1000;
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, now), KAFKA_OUTAGE_BEGINS);
    for (int i = 0; i < 10; i++, now += KAFKA_OUTAGE_SETTLE_MS) {
        assert_true(up(&outage, "127.0.0.1:9092", now));
        if (i % 2)
            assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, now + 1), KAFKA_OUTAGE_GOES_ON);
        else
            assert_false(link_is(&outage, KAFKA_EVENT_DOWN, "127.0.0.1:9092", now + 1));
        assert_false(kafka_outage_over(&outage, now + KAFKA_OUTAGE_SETTLE_MS, &lasted));
    }
    /* an idle connection that is closed is nothing */
    assert_true(up(&outage, "127.0.0.1:9092", now));
    assert_true(kafka_outage_over(&outage, now + KAFKA_OUTAGE_SETTLE_MS, &lasted));
    assert_false(link_is(&outage, KAFKA_EVENT_DOWN, "127.0.0.1:9092", now + 1000));
    assert_false(outage.on);
}

/* It lasts until all that were lost are back; a broker of :hosts need not be. */
static void several(void **state)
{
    (void)state;
    kafka_outage outage = {0};
    char name[64], text[128];
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__RESOLVE, "kafka:9092/bootstrap: Failed to resolve", 1),
                     KAFKA_OUTAGE_BEGINS);
    for (int i = 0; i < 20; i++) { /* more than there are places */
        snprintf(text, sizeof text, "b%d:9092/%d: Disconnected", i, i);
        assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, text, 2), KAFKA_OUTAGE_GOES_ON);
    }
    int back_at = -1;
    for (int i = 0; i < 20 && back_at < 0; i++) {
        snprintf(name, sizeof name, "b%d:9092", i);
        if (up(&outage, name, 3)) back_at = i;
    }
    assert_int_equal(back_at, 19);
    /* all that is known is that nobody is there: whoever comes ends it */
    outage = (kafka_outage){0};
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN, down, 4), KAFKA_OUTAGE_BEGINS);
    assert_true(up(&outage, "anybody:1", 5));
}

/* Other errors are none of it; certificates and passwords are said as they are, and that nobody is connected then is no news. */
static void others(void **state)
{
    (void)state;
    kafka_outage outage = {0};
    int64_t lasted, now = KAFKA_OUTAGE_QUIET_MS;
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, "no right", 1), KAFKA_OUTAGE_NONE);
    assert_false(outage.on);
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__AUTHENTICATION, "sasl_ssl://b:1/1: no", 1), KAFKA_OUTAGE_NONE);
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN, down, 2), KAFKA_OUTAGE_GOES_ON);
    assert_true(up(&outage, "b:1", 3));
    assert_true(kafka_outage_over(&outage, 3 + KAFKA_OUTAGE_SETTLE_MS, &lasted));
    /* of a broker that never comes back nothing is heard any more: the next trouble is another one */
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, refused, now), KAFKA_OUTAGE_BEGINS);
    now += KAFKA_OUTAGE_QUIET_MS;
    assert_int_equal(heard(&outage, RD_KAFKA_RESP_ERR__TRANSPORT, "b:1/2: Disconnected", now), KAFKA_OUTAGE_BEGINS);
    assert_true(up(&outage, "b:1", now + 1));
}

/* ------------------------------------------------------------------ clients */

/* How often it would be said that an outage begins, and that it is over. */
typedef struct count {
    kafka_outage outage;
    int begins, ends;
} count;

static void told(count *n, const kafka_event *event)
{
    kafka_outage_link(&n->outage, event, now_ms());
    if (event->type == KAFKA_EVENT_ERROR)
        n->begins += kafka_outage_error(&n->outage, &event->error, now_ms()) == KAFKA_OUTAGE_BEGINS;
}

static void listen_to(kafka_producer *producer, kafka_consumer *consumer, count *n)
{
    kafka_event event;
    kafka_report none[1];
    int64_t lasted;
    if (producer) kafka_producer_reports(producer, none, 1);
    while ((producer && kafka_producer_poll(producer, &event)) || (consumer && kafka_consumer_poll(consumer, &event))) {
        told(n, &event);
        kafka_event_free(&event);
    }
    n->ends += kafka_outage_over(&n->outage, now_ms(), &lasted);
}

static bool consumer_met_up(kafka_consumer *consumer)
{
    kafka_event event;
    bool met = false;
    while (kafka_consumer_poll(consumer, &event)) {
        met |= event.type == KAFKA_EVENT_UP && strcmp(event.text, c.bootstrap) == 0;
        kafka_event_free(&event);
    }
    return met;
}

static bool met_up(kafka_producer *producer)
{
    kafka_event event;
    kafka_report none[1];
    bool met = false;
    kafka_producer_reports(producer, none, 1);
    while (kafka_producer_poll(producer, &event)) {
        met |= event.type == KAFKA_EVENT_UP && strcmp(event.text, c.bootstrap) == 0;
        kafka_event_free(&event);
    }
    return met;
}

/* Down and up, twice, with what is to be said each time. */
static void rounds(kafka_producer *producer, kafka_consumer *consumer)
{
    count n = {0};
    for (int i = 1; i <= 2; i++) {
        rd_kafka_mock_broker_set_down(c.mock, 1);
        EVENTUALLY(10, (listen_to(producer, consumer, &n), n.begins == i));
        assert_int_equal(n.ends, i - 1);
        rd_kafka_mock_broker_set_up(c.mock, 1);
        EVENTUALLY(20, (listen_to(producer, consumer, &n), n.ends == i));
        assert_int_equal(n.begins, i);
    }
}

/* A connection wakes its owner, who need not know of a trouble before. */
static void a_producer(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    waker w = {0};
    kafka_producer *producer = producer_open(&c, &w, true);
    EVENTUALLY(5, atomic_load(&w.count) > 0);
    EVENTUALLY(5, met_up(producer));
    rounds(producer, NULL);
    atomic_store(&w.off, true);
    kafka_producer_destroy(producer, NULL, NULL);
    EVENTUALLY(5, kafka_live() == 0);
    assert_int_equal(atomic_load(&w.late), 0);
}

/* A consumer and a producer of one owner are one trouble. */
static void both(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    const char *topics[] = {"both"};
    topic(&c, "both", 1);
    kafka_producer *producer = producer_open(&c, NULL, true);
    kafka_consumer *consumer = consumer_open(&c, "both", NULL, NULL);
    assert_int_equal(kafka_consumer_subscribe(consumer, topics, 1, &err), 0);
    EVENTUALLY(5, met_up(producer));
    EVENTUALLY(5, consumer_met_up(consumer));
    rounds(producer, consumer);
    kafka_consumer_destroy(consumer, NULL, NULL);
    kafka_producer_destroy(producer, NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_broker), cmocka_unit_test(settling),   cmocka_unit_test(several),
        cmocka_unit_test(others),     cmocka_unit_test(a_producer), cmocka_unit_test(both),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
