/* The consumer on the mock cluster: split queues and their wake-ups, out of range, seek, the group, commits, closing. */
#include "kafka_test.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
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

static int number(const kafka_record *record)
{
    char text[16];
    assert_true(record->value_len < sizeof text);
    memcpy(text, record->value, record->value_len);
    text[record->value_len] = '\0';
    return atoi(text);
}

/* ------------------------------------------------------------------ split queues */

/* Every partition has its own queue, in its own order; what one is not asked for stays. A consumer that looks only after
 * a wake-up, and then pops until empty, gets everything: while a producer keeps writing. */
typedef struct writer {
    kafka_producer *producer;
    kafka_topic *topic;
    int n;
} writer;

static void *write_slowly(void *arg)
{
    writer *w = arg;
    kafka_error err;
    for (int i = 0; i < w->n; i++) {
        char value[16];
        int len = snprintf(value, sizeof value, "%d", i);
        for (int32_t p = 0; p < 4; p++)
            assert_int_equal(
                kafka_producer_send(w->producer, w->topic, p, NULL, 0, value, (size_t)len, NULL, 0, 0, NULL, &err), 0);
        if (i % 7 == 0) nap_ms(1);
        kafka_report out[64];
        while (kafka_producer_reports(w->producer, out, 64) > 0) {}
    }
    return NULL;
}

static void wake_ups(void **state)
{
    enum { N = 2000 };
    (void)state;
    kafka_error err;
    waker records = {0};
    pthread_t thread;
    topic(&c, "wakes", 4);
    kafka_consumer *consumer = consumer_open(&c, "wakes", NULL, &records);
    kafka_partition from[4];
    for (int p = 0; p < 4; p++) from[p] = (kafka_partition){.topic = "wakes", .partition = p, .offset = -2};
    assert_int_equal(kafka_consumer_assign(consumer, from, 4, &err), 0);
    assert_null(kafka_consumer_queue(consumer, "wakes", 4));
    assert_null(kafka_consumer_queue(consumer, "other", 0));
    writer w = {.producer = producer_open(&c, NULL, true), .n = N};
    w.topic = kafka_producer_topic(w.producer, "wakes", &err);
    pthread_create(&thread, NULL, write_slowly, &w);
    int next[4] = {0}, seen = 0, total = 0;
    while (total < 4 * N) {
        EVENTUALLY(10, atomic_load(&records.count) > seen); /* a lost wake-up ends here */
        seen = atomic_load(&records.count);
        for (int p = 0; p < 4; p++) {
            kafka_record out[16];
            size_t n;
            kafka_queue *queue = kafka_consumer_queue(consumer, "wakes", p);
            while ((n = kafka_queue_pop(queue, out, 16)) > 0) {
                for (size_t i = 0; i < n; i++) {
                    if (out[i].error == KAFKA_RECORD_EOF) continue;
                    assert_int_equal(out[i].error, 0);
                    assert_int_equal(out[i].partition, p);
                    assert_int_equal(number(&out[i]), next[p]++);
                    total++;
                }
                kafka_records_free(out, n);
            }
        }
    }
    pthread_join(thread, NULL);
    kafka_producer_destroy(w.producer, NULL, NULL);
    kafka_consumer_destroy(consumer, NULL, NULL);
}

/* The same by descriptor: a byte says that there is something; none when there is nothing. */
static void wake_by_descriptor(void **state)
{
    (void)state;
    kafka_error err;
    int fds[2];
    char bytes[64];
    assert_int_equal(pipe(fds), 0);
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    fcntl(fds[1], F_SETFL, O_NONBLOCK);
    topic(&c, "bytes", 1);
    fill_partition(&c, "bytes", 0, 100);
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap},
                              {"fetch.wait.max.ms", "10"}}; /* no group.id: assign only */
    kafka_wake wake = {.fd = fds[1]};
    kafka_consumer *consumer;
    assert_int_equal(kafka_consumer_open(props, 2, NULL, &wake, &consumer, &err), 0);
    kafka_partition from = {.topic = "bytes", .offset = 40};
    assert_int_equal(kafka_consumer_assign(consumer, &from, 1, &err), 0);
    int got = 0;
    while (got < 60) {
        struct pollfd pfd = {.fd = fds[0], .events = POLLIN};
        assert_int_equal(poll(&pfd, 1, 5000), 1);
        while (read(fds[0], bytes, sizeof bytes) > 0) {}
        kafka_record out[7];
        size_t n;
        while ((n = kafka_queue_pop(kafka_consumer_queue(consumer, "bytes", 0), out, 7)) > 0) {
            for (size_t i = 0; i < n; i++) assert_int_equal(number(&out[i]), 40 + got++);
            kafka_records_free(out, n);
        }
    }
    nap_ms(50);
    while (read(fds[0], bytes, sizeof bytes) > 0) {}
    kafka_consumer_destroy(consumer, NULL, NULL);
    assert_nothing_left();
    assert_int_equal(read(fds[0], bytes, 1), -1);
    close(fds[0]);
    close(fds[1]);
}

/* Of large records no more than fit, and one, are popped at once: who copies them looks at the clock between two pops. */
static void pop_by_bytes(void **state)
{
    (void)state;
    kafka_error err;
    topic(&c, "heavy", 1);
    fill_partition(&c, "heavy", 0, 100); /* "0" to "99": 190 bytes */
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}, {"fetch.wait.max.ms", "10"}};
    kafka_consumer *consumer;
    assert_int_equal(kafka_consumer_open(props, 2, NULL, NULL, &consumer, &err), 0);
    kafka_partition from = {.topic = "heavy", .offset = 0};
    assert_int_equal(kafka_consumer_assign(consumer, &from, 1, &err), 0);
    kafka_queue *queue = kafka_consumer_queue(consumer, "heavy", 0);
    kafka_record out[100];
    int got = 0;
    assert_int_equal(kafka_queue_pop_bytes(queue, out, 100, 0), 0);
    EVENTUALLY(20, kafka_queue_wait(queue, out, 1, 100) == 1);
    for (got = 1; got < 100;) {
        size_t n = kafka_queue_pop_bytes(queue, out + got, (size_t)(100 - got), 21), bytes = 0;
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(number(&out[got + (int)i]), got + (int)i);
            assert_true(bytes < 21); /* it had room for this one */
            bytes += out[got + (int)i].value_len;
        }
        got += (int)n;
        if (n == 0) nap_ms(5);
    }
    kafka_records_free(out, 100);
    kafka_consumer_destroy(consumer, NULL, NULL);
    assert_nothing_left();
}

/* Destroyed with full queues, an unread control queue and a record in hand just given back; no wake-up after it. */
static void count_done(void *ctx) { atomic_fetch_add((atomic_int *)ctx, 1); }

static void destroy_full(void **state)
{
    (void)state;
    kafka_error err;
    static waker control, records;
    static atomic_int done;
    topic(&c, "full", 4);
    for (int p = 0; p < 4; p++) fill_partition(&c, "full", p, 2000);
    for (int round = 0; round < 5; round++) {
        kafka_consumer *consumer = consumer_open(&c, "full", &control, &records);
        kafka_partition from[4];
        for (int p = 0; p < 4; p++) from[p] = (kafka_partition){.topic = "full", .partition = p, .offset = -2};
        assert_int_equal(kafka_consumer_assign(consumer, from, 4, &err), 0);
        kafka_record out[10];
        size_t n = kafka_queue_wait(kafka_consumer_queue(consumer, "full", round % 4), out, 10, 5000);
        assert_true(n > 0);
        kafka_records_free(out, n);
        int64_t before = now_ms();
        kafka_consumer_destroy(consumer, count_done, &done);
        assert_true(now_ms() - before < 100);
        int after = atomic_load(&records.count) + atomic_load(&control.count);
        EVENTUALLY(10, atomic_load(&done) == round + 1);
        assert_int_equal(atomic_load(&records.count) + atomic_load(&control.count), after);
    }
    assert_nothing_left();
}

/* A local queue of 200 messages, 20,000 messages: a fetcher that rests a second each time the queue is full takes minutes. */
static void small_queue(void **state)
{
    (void)state;
    enum { N = 20000 };
    kafka_error err;
    topic(&c, "small", 1);
    /* in batches of 50: a fetch brings at least one */
    kafka_property batches[] = {{"bootstrap.servers", c.bootstrap}, {"batch.num.messages", "50"}};
    kafka_producer *producer;
    assert_int_equal(kafka_producer_open(batches, 2, true, NULL, &producer, &err), 0);
    fill(producer, "small", 0, N);
    kafka_producer_destroy(producer, NULL, NULL);
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap},
                              {"fetch.wait.max.ms", "10"},
                              {"queued.min.messages", "200"},
                              {"fetch.message.max.bytes", "4000"},
                              {"?fetch.queue.backoff.ms", "10"}};
    kafka_consumer *consumer;
    assert_int_equal(kafka_consumer_open(props, 5, NULL, NULL, &consumer, &err), 0);
    kafka_partition from = {.topic = "small", .offset = 0};
    assert_int_equal(kafka_consumer_assign(consumer, &from, 1, &err), 0);
    kafka_queue *queue = kafka_consumer_queue(consumer, "small", 0);
    kafka_record out[64];
    int got = 0;
    int64_t limit_ms = now_ms() + scaled_ms(10);
    while (got < N) {
        size_t n = kafka_queue_pop(queue, out, 64);
        for (size_t i = 0; i < n; i++) assert_int_equal(number(&out[i]), got++);
        kafka_records_free(out, n);
        if (n == 0) nap_ms(1);
        if (now_ms() > limit_ms) fail_msg("%d of %d messages: the fetcher rests", got, (int)N);
    }
    kafka_consumer_destroy(consumer, NULL, NULL);
    assert_nothing_left();
}

/* ------------------------------------------------------------------ end of partition, out of range, seek */

/* Next record that is one; EOFs are skipped unless wanted. */
static kafka_record next(kafka_consumer *consumer, const char *name, int32_t partition, bool eof)
{
    kafka_record record;
    int64_t limit_ms = now_ms() + scaled_ms(10);
    for (;;) {
        if (kafka_queue_wait(kafka_consumer_queue(consumer, name, partition), &record, 1, 100) == 1) {
            if (eof || record.error != KAFKA_RECORD_EOF) return record;
            kafka_records_free(&record, 1);
        }
        assert_true(now_ms() < limit_ms);
    }
}

static void expect_number(kafka_consumer *consumer, const char *name, int32_t partition, int n)
{
    kafka_record record = next(consumer, name, partition, false);
    assert_int_equal(record.error, 0);
    assert_int_equal(number(&record), n);
    kafka_records_free(&record, 1);
}

static void out_of_range(void **state)
{
    (void)state;
    kafka_error err;
    topic(&c, "range", 2);
    fill_partition(&c, "range", 0, 50);
    fill_partition(&c, "range", 1, 50);
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap},
                              {"fetch.wait.max.ms", "10"},
                              {"auto.offset.reset", "error"},
                              {"enable.partition.eof", "true"}};
    kafka_consumer *consumer;
    assert_int_equal(kafka_consumer_open(props, 4, NULL, NULL, &consumer, &err), 0);
    kafka_partition from[2] = {{.topic = "range", .partition = 0, .offset = 48},
                               {.topic = "range", .partition = 1, .offset = 1000}};
    assert_int_equal(kafka_consumer_assign(consumer, from, 2, &err), 0);
    kafka_record record = next(consumer, "range", 1, true);
    assert_int_equal(record.error, KAFKA_RECORD_OUT_OF_RANGE);
    assert_true(record.error_text[0] != '\0');
    assert_string_equal(kafka_error_name(record.error), "OFFSET_OUT_OF_RANGE");
    kafka_records_free(&record, 1);
    expect_number(consumer, "range", 0, 48);
    /* sought, it runs again, and the other goes on where it was */
    assert_int_equal(kafka_consumer_seek(consumer, "range", 1, 30, &err), 0);
    for (int i = 30; i < 50; i++) expect_number(consumer, "range", 1, i);
    expect_number(consumer, "range", 0, 49);
    record = next(consumer, "range", 0, true);
    assert_int_equal(record.error, KAFKA_RECORD_EOF);
    assert_int_equal(record.offset, 50);
    kafka_records_free(&record, 1);
    /* an ordinary seek, and out of range again */
    assert_int_equal(kafka_consumer_seek(consumer, "range", 0, 10, &err), 0);
    for (int i = 10; i < 50; i++) expect_number(consumer, "range", 0, i);
    assert_int_equal(kafka_consumer_seek(consumer, "range", 0, 777, &err), 0);
    record = next(consumer, "range", 0, false);
    assert_int_equal(record.error, KAFKA_RECORD_OUT_OF_RANGE);
    kafka_records_free(&record, 1);
    assert_int_equal(kafka_consumer_seek(consumer, "range", 0, -2, &err), 0);
    expect_number(consumer, "range", 0, 0);
    assert_int_equal(kafka_consumer_seek(consumer, "range", 7, 0, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "_STATE");
    kafka_consumer_destroy(consumer, NULL, NULL);
}

static void out_of_range_again(kafka_consumer *consumer, int64_t offset)
{
    kafka_error err;
    assert_int_equal(kafka_consumer_seek(consumer, "others", 1, 1000, &err), 0);
    kafka_record record;
    do { /* what it had fetched before may come first */
        record = next(consumer, "others", 1, false);
        kafka_records_free(&record, 1);
    } while (record.error != KAFKA_RECORD_OUT_OF_RANGE);
    assert_int_equal(kafka_consumer_seek(consumer, "others", 1, offset, &err), 0);
    expect_number(consumer, "others", 1, (int)offset);
}

/* One is begun afresh several times: the others go on where they were, also those of which nothing was popped between two of these times, or
 * since they were sought. */
static void others_go_on(void **state)
{
    (void)state;
    kafka_error err;
    topic(&c, "others", 2);
    fill_partition(&c, "others", 0, 50);
    fill_partition(&c, "others", 1, 50);
    kafka_property props[] = {
        {"bootstrap.servers", c.bootstrap}, {"fetch.wait.max.ms", "10"}, {"auto.offset.reset", "error"}};
    kafka_consumer *consumer;
    assert_int_equal(kafka_consumer_open(props, 3, NULL, NULL, &consumer, &err), 0);
    kafka_partition from[2] = {{.topic = "others", .partition = 0, .offset = 20},
                               {.topic = "others", .partition = 1, .offset = 0}};
    assert_int_equal(kafka_consumer_assign(consumer, from, 2, &err), 0);
    for (int i = 20; i < 30; i++) expect_number(consumer, "others", 0, i);
    expect_number(consumer, "others", 1, 0);
    out_of_range_again(consumer, 30);
    out_of_range_again(consumer, 40);
    expect_number(consumer, "others", 0, 30);
    assert_int_equal(kafka_consumer_seek(consumer, "others", 0, 5, &err), 0);
    out_of_range_again(consumer, 10);
    expect_number(consumer, "others", 0, 5);
    kafka_consumer_destroy(consumer, NULL, NULL);
}

/* ------------------------------------------------------------------ the group */

typedef struct member {
    kafka_consumer *consumer;
    waker control, records;
    int assigned, revoked, lost, commits, polled_at;
    kafka_partition last_commit; /* topic not kept */
    kafka_error commit_error, error;
    void *commit_opaque;
    bool cooperative;
} member;

static void member_open_as(member *m, const char *group, const char *name, const char *assignor)
{
    kafka_error err;
    const char *names[] = {name};
    memset(m, 0, sizeof *m);
    m->consumer = consumer_open_as(&c, group, assignor, &m->control, &m->records);
    assert_int_equal(kafka_consumer_subscribe(m->consumer, names, 1, &err), 0);
}

static void member_open(member *m, const char *group, const char *name)
{
    member_open_as(m, group, name, "roundrobin");
}

/* Serves the control queue, if a wake-up has said that there is something. */
static void serve(member *m)
{
    kafka_event event;
    kafka_error err;
    int woken = atomic_load(&m->control.count);
    if (woken == m->polled_at) return;
    m->polled_at = woken;
    while (kafka_consumer_poll(m->consumer, &event)) {
        switch (event.type) {
        case KAFKA_EVENT_ASSIGN:
            m->cooperative = kafka_consumer_cooperative(m->consumer);
            assert_int_equal((m->cooperative ? kafka_consumer_assign_add : kafka_consumer_assign)(
                                 m->consumer, event.partitions, event.n_partitions, &err),
                             0);
            m->assigned += (int)event.n_partitions;
            break;
        case KAFKA_EVENT_REVOKE:
            if (kafka_consumer_cooperative(m->consumer))
                assert_int_equal(kafka_consumer_assign_remove(m->consumer, event.partitions, event.n_partitions, &err),
                                 0);
            else
                assert_int_equal(kafka_consumer_unassign(m->consumer, &err), 0);
            m->revoked += (int)event.n_partitions;
            m->lost += event.lost;
            break;
        case KAFKA_EVENT_COMMIT:
            m->commits++;
            m->commit_error = event.error;
            m->commit_opaque = event.opaque;
            if (event.n_partitions > 0) m->last_commit = event.partitions[0];
            break;
        case KAFKA_EVENT_ERROR: m->error = event.error; break;
        case KAFKA_EVENT_NONE:
        case KAFKA_EVENT_LOG:
        case KAFKA_EVENT_STATS:
        case KAFKA_EVENT_TOKEN:
        case KAFKA_EVENT_TIMES:
        case KAFKA_EVENT_UP:
        case KAFKA_EVENT_DOWN: break;
        }
        kafka_event_free(&event);
    }
}

static void leave(member *m)
{
    kafka_error err;
    assert_int_equal(kafka_consumer_close_begin(m->consumer, &err), 0);
    EVENTUALLY(10, (serve(m), kafka_consumer_closed(m->consumer)));
    kafka_consumer_destroy(m->consumer, NULL, NULL);
}

static int holds(const member *m) { return m->assigned - m->revoked; }

/* Two members: the first has all, then half; records go to its own queues at all times; the second leaves, the first has all again. */
static void rebalance(void **state)
{
    (void)state;
    char id[128];
    member a, b;
    topic(&c, "group", 4);
    for (int p = 0; p < 4; p++) fill_partition(&c, "group", p, 10);
    member_open(&a, "rebalance", "group");
    EVENTUALLY(15, (serve(&a), a.assigned == 4));
    for (int i = 0; i < 10; i++)
        for (int p = 0; p < 4; p++) expect_number(a.consumer, "group", p, i);
    assert_true(strlen(kafka_consumer_member_id(a.consumer, id, sizeof id)) > 0);
    assert_false(kafka_consumer_cooperative(a.consumer));
    member_open(&b, "rebalance", "group");
    /* in one round or more: whoever joins anew first may be given all again */
    EVENTUALLY(15, (serve(&a), serve(&b), holds(&a) == 2 && holds(&b) == 2));
    assert_int_equal(a.lost, 0);
    /* nothing was committed: each starts its own from the beginning, in its own queue (split again after the re-assign) */
    for (int p = 0; p < 4; p++) {
        kafka_consumer *owner = kafka_consumer_queue(a.consumer, "group", p) != NULL ? a.consumer : b.consumer;
        assert_true((kafka_consumer_queue(a.consumer, "group", p) == NULL) !=
                    (kafka_consumer_queue(b.consumer, "group", p) == NULL));
        for (int i = 0; i < 10; i++) expect_number(owner, "group", p, i);
    }
    leave(&b);
    assert_int_equal(holds(&b), 0);
    EVENTUALLY(15, (serve(&a), holds(&a) == 4));
    leave(&a);
    assert_nothing_left();
}

/* Incremental rebalancing: only what moves is revoked; the queues of what stays are the same and go on where they were. */
static void cooperative(void **state)
{
    (void)state;
    member a, b;
    kafka_queue *queue[4];
    topic(&c, "sticky", 4);
    for (int p = 0; p < 4; p++) fill_partition(&c, "sticky", p, 10);
    member_open_as(&a, "cooperative", "sticky", "cooperative-sticky");
    EVENTUALLY(15, (serve(&a), a.assigned == 4));
    assert_true(a.cooperative);
    for (int p = 0; p < 4; p++) {
        queue[p] = kafka_consumer_queue(a.consumer, "sticky", p);
        for (int i = 0; i < 5; i++) expect_number(a.consumer, "sticky", p, i);
    }
    member_open_as(&b, "cooperative", "sticky", "cooperative-sticky");
    EVENTUALLY(25, (serve(&a), serve(&b), a.revoked == 2 && b.assigned == 2));
    for (int p = 0; p < 4; p++) {
        kafka_queue *left = kafka_consumer_queue(a.consumer, "sticky", p);
        if (left == NULL) {
            expect_number(b.consumer, "sticky", p, 0); /* nothing was committed */
            continue;
        }
        assert_ptr_equal(left, queue[p]);
        for (int i = 5; i < 10; i++) expect_number(a.consumer, "sticky", p, i);
    }
    kafka_consumer_destroy(b.consumer, NULL, NULL);
    leave(&a);
}

/* A commit ends as an event, with its opaque; an outsider reads it; what a broker would refuse is refused before it is sent. */
static void commit_and_outsider(void **state)
{
    (void)state;
    kafka_error err;
    member m;
    char long_text[4200];
    topic(&c, "commit", 2);
    fill_partition(&c, "commit", 0, 10);
    member_open(&m, "committers", "commit");
    EVENTUALLY(15, (serve(&m), m.assigned == 2));
    kafka_partition p[2] = {{.topic = "commit", .partition = 0, .offset = 7, .metadata = "meta data"},
                            {.topic = "commit", .partition = 1, .offset = 3}};
    int token;
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 2, &token, &err), 0);
    EVENTUALLY(5, (serve(&m), m.commits == 1));
    assert_int_equal(m.commit_error.code, 0);
    assert_ptr_equal(m.commit_opaque, &token);
    assert_int_equal(m.last_commit.offset, 7);
    assert_int_equal(m.last_commit.error, 0);
    /* an outsider reads it */
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap}, {"group.id", "committers"}};
    kafka_admin *admin;
    assert_int_equal(kafka_admin_open(props, 2, &admin, &err), 0);
    kafka_partition read[3] = {
        {.topic = "commit", .partition = 0}, {.topic = "commit", .partition = 1}, {.topic = "full", .partition = 0}};
    assert_int_equal(kafka_admin_committed(admin, read, 3, 5000, &err), 0);
    assert_int_equal(read[0].offset, 7);
    assert_string_equal(read[0].metadata, "meta data");
    assert_int_equal(read[1].offset, 3);
    assert_null(read[1].metadata);
    assert_int_equal(read[2].offset, -1001);
    kafka_admin_destroy(admin);
    /* what the broker would refuse is refused before */
    memset(long_text, 'x', sizeof long_text);
    long_text[4096] = '\0';
    p[0].metadata = long_text;
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 1, NULL, &err), 0);
    EVENTUALLY(5, (serve(&m), m.commits == 2));
    assert_int_equal(m.commit_error.code, 0);
    long_text[4096] = 'x';
    long_text[4097] = '\0';
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 1, NULL, &err), KAFKA_EKAFKA);
    assert_string_equal(err.name, "OFFSET_METADATA_TOO_LARGE");
    p[0].metadata = "\xc3\xa4";
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 1, NULL, &err), KAFKA_EKAFKA);
    p[0].metadata = NULL;
    p[0].offset = -1001;
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 1, NULL, &err), KAFKA_EKAFKA);
    /* a refusal by the broker comes back as an event, with its code, not retriable */
    if (c.mock == NULL) {
        leave(&m);
        return;
    }
    rd_kafka_mock_push_request_errors(c.mock, 8 /* OffsetCommit */, 1, RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION);
    p[0].offset = 8;
    assert_int_equal(kafka_consumer_commit(m.consumer, p, 1, &p, &err), 0);
    EVENTUALLY(5, (serve(&m), m.commits == 3));
    assert_string_equal(m.commit_error.name, "ILLEGAL_GENERATION");
    assert_false(m.commit_error.retriable);
    assert_ptr_equal(m.commit_opaque, &p);
    leave(&m);
}

/* A topic that is not there is told by an event. */
static void missing_topic(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    kafka_event event;
    member m;
    rd_kafka_mock_topic_set_error(c.mock, "missing", RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    member_open(&m, "missing", "missing");
    bool told = false;
    int64_t limit_ms = now_ms() + scaled_ms(10);
    while (!told && now_ms() < limit_ms) {
        while (kafka_consumer_poll(m.consumer, &event)) {
            told |= event.type == KAFKA_EVENT_ERROR && strcmp(event.error.name, "UNKNOWN_TOPIC_OR_PART") == 0;
            if (event.type == KAFKA_EVENT_ASSIGN)
                kafka_consumer_assign(m.consumer, event.partitions, event.n_partitions, &err);
            kafka_event_free(&event);
        }
        nap_ms(5);
    }
    assert_true(told);
    kafka_consumer_destroy(m.consumer, NULL, NULL);
}

/* A broker that does not answer, then one that is gone: errors and logs come as events and are retriable; neither destroying nor an
 * unfinished close waits for it, even with a commit on its way. */
static void broker_gone(void **state)
{
    (void)state;
    kafka_error err;
    MOCK_ONLY(c);
    cluster own, saved = c;
    member m, silent;
    cluster_start(&own, 1);
    topic(&own, "gone", 2);
    fill_partition(&own, "gone", 0, 10);
    c = own;
    member_open(&m, "gone", "gone");
    member_open(&silent, "silent", "gone");
    c = saved;
    EVENTUALLY(15, (serve(&m), serve(&silent), m.assigned == 2 && silent.assigned == 2));
    expect_number(m.consumer, "gone", 0, 0);
    rd_kafka_mock_broker_set_rtt(own.mock, 1, 60000);
    kafka_partition p = {.topic = "gone", .partition = 0, .offset = 1};
    assert_int_equal(kafka_consumer_commit(silent.consumer, &p, 1, NULL, &err), 0);
    nap_ms(100);
    assert_int_equal(kafka_consumer_close_begin(silent.consumer, &err), 0);
    for (int i = 0; i < 50; i++) {
        serve(&silent);
        nap_ms(10);
    }
    assert_false(kafka_consumer_closed(silent.consumer));
    int64_t before = now_ms();
    kafka_consumer_destroy(silent.consumer, NULL, NULL);
    assert_true(now_ms() - before < 100);
    EVENTUALLY(20, kafka_live() == 1);
    rd_kafka_mock_broker_set_down(own.mock, 1);
    EVENTUALLY(15, (serve(&m), m.error.code != 0));
    assert_true(m.error.retriable);
    assert_false(m.error.fatal);
    assert_int_equal(kafka_consumer_commit(m.consumer, &p, 1, NULL, &err), 0); /* pending for ever */
    before = now_ms();
    kafka_consumer_destroy(m.consumer, NULL, NULL);
    assert_true(now_ms() - before < 100);
    assert_nothing_left();
    cluster_stop(&own);
}

/* The answer is an event, with a wake-up, in the order asked; a mock cluster knows no times. */
static void times_answered(kafka_consumer *consumer, waker *control, bool failed)
{
    kafka_event event = {0};
    bool told = false;
    kafka_partition asked[3] = {{.topic = "times", .partition = 2, .offset = 1},
                                {.topic = "times", .offset = 2},
                                {.topic = "times", .offset = 3}};
    asked[2].partition = 1;
    int woken = atomic_load(&control->count);
    assert_int_equal(kafka_consumer_times(consumer, asked, 3, 1000), 0);
    assert_int_equal(kafka_consumer_times(consumer, asked, 3, 1000), KAFKA_EFULL); /* one at a time */
    int64_t limit_ms = now_ms() + scaled_ms(5);
    while (!told && now_ms() < limit_ms) {
        while (!told && kafka_consumer_poll(consumer, &event)) {
            told = event.type == KAFKA_EVENT_TIMES;
            if (told) {
                assert_true(atomic_load(&control->count) > woken);
                assert_true(failed == (event.error.code != 0));
                assert_int_equal(event.n_partitions, 3);
                for (int i = 0; i < 3; i++) {
                    assert_string_equal(event.partitions[i].topic, "times");
                    assert_int_equal(event.partitions[i].partition, asked[i].partition);
                    if (!failed) assert_int_equal(event.partitions[i].offset, KAFKA_OFFSET_END);
                }
            }
            kafka_event_free(&event);
        }
        nap_ms(2);
    }
    assert_true(told);
}

/* Answered, in time without a broker, and destroyed while nobody answers. */
static void times(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    cluster own;
    waker control = {0};
    cluster_start(&own, 1);
    topic(&own, "times", 3);
    kafka_consumer *consumer = consumer_open(&own, "times", &control, NULL);
    kafka_partition from = {.topic = "times", .offset = 0};
    assert_int_equal(kafka_consumer_assign(consumer, &from, 1, &err), 0);
    times_answered(consumer, &control, false);
    times_answered(consumer, &control, false);
    rd_kafka_mock_broker_set_rtt(own.mock, 1, 60000);
    times_answered(consumer, &control, true);
    assert_int_equal(kafka_consumer_times(consumer, &from, 1, 1000), 0);
    int64_t before = now_ms();
    kafka_consumer_destroy(consumer, NULL, NULL);
    assert_true(now_ms() - before < 100);
    EVENTUALLY(20, kafka_live() == 0);
    cluster_stop(&own);
}

/* Closing with records in the queues, a commit in flight and a slow broker: REVOKE is answered, closed() comes, nothing is left. */
static void close_sequence(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    kafka_error err;
    member m;
    topic(&c, "close", 2);
    fill_partition(&c, "close", 0, 1000);
    member_open(&m, "close", "close");
    EVENTUALLY(15, (serve(&m), m.assigned == 2));
    expect_number(m.consumer, "close", 0, 0);
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 100);
    kafka_partition p = {.topic = "close", .partition = 0, .offset = 1};
    assert_int_equal(kafka_consumer_commit(m.consumer, &p, 1, NULL, &err), 0);
    assert_int_equal(kafka_consumer_close_begin(m.consumer, &err), 0);
    EVENTUALLY(10, (serve(&m), kafka_consumer_closed(m.consumer)));
    assert_int_equal(m.revoked, 2);
    assert_int_equal(m.commits, 1);
    assert_int_equal(m.commit_error.code, 0);
    rd_kafka_mock_broker_set_rtt(c.mock, 1, 0);
    assert_int_equal(kafka_consumer_close_begin(m.consumer, &err), KAFKA_EKAFKA); /* twice is an error, not a crash */
    kafka_consumer_destroy(m.consumer, NULL, NULL);
    assert_nothing_left();
}

/* A topic that a member does not see any more, deleted or hidden, while it reads it: what it has is taken back, and it is destroyed; also without having been
 * closed, and also when it does not look again at all. (Before 2.6.1 the library keeps what is left in the queues of such partitions.) */
static void hidden(const char *name, const char *assignor, bool served, bool closed)
{
    kafka_error err;
    member m = {0};
    kafka_property props[] = {{"bootstrap.servers", c.bootstrap},
                              {"group.id", name},
                              {"auto.offset.reset", "earliest"},
                              {"session.timeout.ms", "6000"},
                              {"heartbeat.interval.ms", "200"},
                              {"fetch.wait.max.ms", "20"},
                              {"partition.assignment.strategy", assignor},
                              {"topic.metadata.refresh.interval.ms", "100"}};
    kafka_wake wake = waker_of(&m.control);
    topic(&c, name, 2);
    for (int p = 0; p < 2; p++) fill_partition(&c, name, p, 100);
    assert_int_equal(kafka_consumer_open(props, 8, &wake, NULL, &m.consumer, &err), 0);
    assert_int_equal(kafka_consumer_subscribe(m.consumer, &name, 1, &err), 0);
    EVENTUALLY(15, (serve(&m), m.assigned == 2));
    for (int p = 0; p < 2; p++) expect_number(m.consumer, name, p, 0);
    rd_kafka_mock_topic_set_error(c.mock, name, RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART);
    if (served)
        EVENTUALLY(15, (serve(&m), m.revoked == 2));
    else
        nap_ms(1000); /* only whether the library knows it already depends on that */
    if (closed)
        leave(&m);
    else
        kafka_consumer_destroy(m.consumer, NULL, NULL);
    assert_nothing_left();
}

static void hidden_topic(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    hidden("hidden-1", "roundrobin", true, true);
    hidden("hidden-2", "cooperative-sticky", true, true);
    hidden("hidden-3", "roundrobin", false, false);
    hidden("hidden-4", "cooperative-sticky", false, false);
    hidden("hidden-5", "roundrobin", true, false);
}

/* A static member does not take its leave: the library's group handler ends as soon as the partitions are taken back, and throws away whatever
 * question it has not answered by then. Whoever asked one would wait for ever; each close here is a chance to do so. */
static void static_closes(void **state)
{
    (void)state;
    MOCK_ONLY(c);
    enum { MEMBERS = 40 };
    static member members[MEMBERS];
    kafka_error err;
    const char *name = "static";
    topic(&c, name, 2);
    for (int i = 0; i < MEMBERS; i++) {
        member *m = &members[i];
        char group[16];
        snprintf(group, sizeof group, "static-%d", i);
        kafka_property props[] = {{"bootstrap.servers", c.bootstrap},
                                  {"group.id", group},
                                  {"group.instance.id", "one"},
                                  {"partition.assignment.strategy", "roundrobin"}};
        kafka_wake wake = waker_of(&m->control);
        assert_int_equal(kafka_consumer_open(props, 4, &wake, NULL, &m->consumer, &err), 0);
        assert_int_equal(kafka_consumer_subscribe(m->consumer, &name, 1, &err), 0);
    }
    for (int i = 0; i < MEMBERS; i++) EVENTUALLY(30, (serve(&members[i]), members[i].assigned == 2));
    alarm((unsigned)(scaled_ms(30) / 1000));
    for (int i = 0; i < MEMBERS; i++) {
        assert_int_equal(kafka_consumer_close_begin(members[i].consumer, &err), 0);
        EVENTUALLY(10, (serve(&members[i]), kafka_consumer_closed(members[i].consumer)));
        assert_int_equal(members[i].revoked, 2);
        kafka_consumer_destroy(members[i].consumer, NULL, NULL);
    }
    assert_nothing_left();
    alarm(0);
}

static void error_table(void **state)
{
    (void)state;
    kafka_error err;
    kafka_error_set(&err, RD_KAFKA_RESP_ERR__TRANSPORT, "x %d", 1);
    assert_string_equal(err.name, "_TRANSPORT");
    assert_string_equal(err.text, "x 1");
    assert_true(err.retriable && !err.fatal);
    kafka_error_set(&err, RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID, "x");
    assert_true(!err.retriable && err.fatal);
    kafka_error_set(&err, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED, "x");
    assert_true(!err.retriable && !err.fatal);
    kafka_error_set(&err, 9999, "unknown codes too");
    assert_true(err.name[0] != '\0' && !err.retriable && !err.fatal);
    kafka_error_set(NULL, 1, "nobody wants it");
    assert_true(kafka_version_number() >= 0x02000200);
    assert_true(strlen(kafka_version()) >= 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(error_table),
        cmocka_unit_test(wake_ups),
        cmocka_unit_test(wake_by_descriptor),
        cmocka_unit_test(pop_by_bytes),
        cmocka_unit_test(destroy_full),
        cmocka_unit_test(small_queue),
        cmocka_unit_test(out_of_range),
        cmocka_unit_test(others_go_on),
        cmocka_unit_test(rebalance),
        cmocka_unit_test(cooperative),
        cmocka_unit_test(commit_and_outsider),
        cmocka_unit_test(missing_topic),
        cmocka_unit_test(broker_gone),
        cmocka_unit_test(close_sequence),
        cmocka_unit_test(hidden_topic),
        cmocka_unit_test(static_closes),
        cmocka_unit_test(times),
    };
    return cmocka_run_group_tests_name("kafka consumer", tests, start, stop);
}
