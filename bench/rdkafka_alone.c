/* rdkafka_alone - the ceiling: librdkafka by itself, in C. First line of `make bench`, and what the other lines are a ratio of.
 *
 *   rdkafka_alone produce BOOTSTRAP TOPIC PARTITIONS COUNT BYTES [keyed]   fills the topic, round robin over the partitions; keyed: each
 *                                                                          message has a key and two headers
 *   rdkafka_alone consume BOOTSTRAP TOPIC GROUP COUNT WARM [keyed]         reads COUNT messages: split queues, pop up to 256, free together;
 *                                                                          the clock starts behind the first WARM of them; keyed: it looks at
 *                                                                          each one's headers, which librdkafka parses when they are asked for
 *   rdkafka_alone rate BOOTSTRAP TOPIC PARTITIONS COUNT BYTES RATE LINGER  sends RATE messages a second; each begins with the time it was sent
 *                                                                          at (CLOCK_REALTIME, us, 8 bytes, big endian)
 *   rdkafka_alone latency BOOTSTRAP TOPIC GROUP COUNT FILE                 reads such messages; how old each was goes into FILE, 4 bytes little
 *                                                                          endian each, us. Says "ready" when it has its partitions
 *
 * They print one line: MESSAGES SECONDS CPU_SECONDS RSS_KB, latency from the first message on. */
#include <librdkafka/rdkafka.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double cpu(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static long rss_kb(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_maxrss; /* KiB on Linux */
}

static void die(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void set(rd_kafka_conf_t *conf, const char *name, const char *value)
{
    char err[256];
    if (rd_kafka_conf_set(conf, name, value, err, sizeof err) == RD_KAFKA_CONF_INVALID) die(name, err);
}

static rd_kafka_t *client(rd_kafka_type_t type, rd_kafka_conf_t *conf)
{
    char err[256];
    set(conf, "log_level", "3"); /* what is tried again is no line among the results */
    rd_kafka_t *rk = rd_kafka_new(type, conf, err, sizeof err);
    if (!rk) die("rd_kafka_new", err);
    return rk;
}

static int send_one(rd_kafka_t *rk, rd_kafka_topic_t *topic, int32_t partition, char *value, size_t bytes,
                    const char *key)
{
    if (!key) return rd_kafka_produce(topic, partition, RD_KAFKA_MSG_F_COPY, value, bytes, NULL, 0, NULL);
    return (int)rd_kafka_producev(rk, RD_KAFKA_V_RKT(topic), RD_KAFKA_V_PARTITION(partition),
                                  RD_KAFKA_V_MSGFLAGS(RD_KAFKA_MSG_F_COPY), RD_KAFKA_V_VALUE(value, bytes),
                                  RD_KAFKA_V_KEY(key, strlen(key)), RD_KAFKA_V_HEADER("content-type", "text/plain", -1),
                                  RD_KAFKA_V_HEADER("trace", "4bf92f3577b34da6", -1), RD_KAFKA_V_END);
}

static int produce(char **argv, bool keyed)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", argv[2]);
    set(conf, "enable.idempotence", "true");
    set(conf, "linger.ms", "20");
    set(conf, "queue.buffering.max.messages", "1000000");
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, argv[3], NULL);
    long partitions = atol(argv[4]), count = atol(argv[5]), bytes = atol(argv[6]);
    char *value = malloc((size_t)bytes + 1), key[24];
    if (!value) die("malloc", "no memory");
    for (long i = 0; i < bytes; i++) value[i] = (char)('a' + (i * 7919 + i / 26) % 26);
    double start = now(), start_cpu = cpu();
    for (long i = 0; i < count;) {
        if (bytes >= 8) memcpy(value, &i, 8);
        if (keyed) snprintf(key, sizeof key, "key-%ld", i % 100000);
        if (send_one(rk, topic, (int32_t)(i % partitions), value, (size_t)bytes, keyed ? key : NULL) == 0)
            i++;
        else
            rd_kafka_poll(rk, 10);
        if (i % 1000 == 0) rd_kafka_poll(rk, 0);
    }
    if (rd_kafka_flush(rk, 120000)) die("flush", "not all messages were acknowledged");
    printf("%ld %.6f %.6f %ld\n", count, now() - start, cpu() - start_cpu, rss_kb());
    free(value);
    rd_kafka_topic_destroy(topic);
    rd_kafka_destroy(rk);
    return 0;
}

enum { PARTITIONS = 256, POP = 256 };

static size_t headers_seen;

static void look_at_headers(const rd_kafka_message_t *message)
{
    rd_kafka_headers_t *headers;
    const char *name;
    const void *value;
    size_t size;
    if (rd_kafka_message_headers(message, &headers)) return;
    for (size_t i = 0; !rd_kafka_header_get_all(headers, i, &name, &value, &size); i++) headers_seen += size;
}

static int consume(char **argv, long warm, bool keyed)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", argv[2]);
    set(conf, "group.id", argv[4]);
    set(conf, "auto.offset.reset", "earliest");
    set(conf, "enable.auto.commit", "false");
    set(conf, "enable.auto.offset.store", "false");
    set(conf, "fetch.message.max.bytes", "1048576");
    set(conf, "fetch.max.bytes", "16777216");
    set(conf, "queued.min.messages", "100000");
    set(conf, "queued.max.messages.kbytes", "16384");
    set(conf, "fetch.queue.backoff.ms", "10"); /* unknown before 2.2: ignored by set() */
    set(conf, "socket.nagle.disable", "true");
    rd_kafka_conf_set_events(conf, RD_KAFKA_EVENT_REBALANCE);
    rd_kafka_t *rk = client(RD_KAFKA_CONSUMER, conf);
    rd_kafka_poll_set_consumer(rk);
    rd_kafka_queue_t *control = rd_kafka_queue_get_consumer(rk), *queues[PARTITIONS];
    rd_kafka_topic_partition_list_t *topics = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(topics, argv[3], RD_KAFKA_PARTITION_UA);
    rd_kafka_subscribe(rk, topics);
    rd_kafka_topic_partition_list_destroy(topics);
    int n_queues = 0;
    long count = atol(argv[5]), got = 0, counted_from = 0;
    double start = 0, start_cpu = 0, last = now();
    while (got < count) {
        rd_kafka_event_t *event = rd_kafka_queue_poll(control, n_queues ? 0 : 100);
        if (event && rd_kafka_event_error(event) == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS) {
            rd_kafka_topic_partition_list_t *list = rd_kafka_event_topic_partition_list(event);
            for (int i = 0; i < list->cnt && n_queues < PARTITIONS; i++) {
                queues[n_queues] = rd_kafka_queue_get_partition(rk, list->elems[i].topic, list->elems[i].partition);
                rd_kafka_queue_forward(queues[n_queues++], NULL);
            }
            rd_kafka_assign(rk, list);
        }
        if (event) rd_kafka_event_destroy(event);
        long before = got;
        for (int i = 0; i < n_queues; i++) {
            rd_kafka_message_t *messages[POP];
            int n = 0;
            while (n < POP && (messages[n] = rd_kafka_consume_queue(queues[i], 0))) n++;
            if (n && got >= warm && !start) {
                start = now();
                start_cpu = cpu();
                counted_from = got;
            }
            for (int k = 0; k < n; k++) {
                if (!messages[k]->err) got++;
                if (keyed) look_at_headers(messages[k]);
                rd_kafka_message_destroy(messages[k]);
            }
        }
        if (got > before)
            last = now();
        else if (now() - last > 60)
            die("consume", "no message for 60 s");
        else if (n_queues)
            nanosleep(&(struct timespec){0, 100000}, NULL);
    }
    printf("%ld %.6f %.6f %ld\n", got - counted_from, now() - start, cpu() - start_cpu, rss_kb());
    for (int i = 0; i < n_queues; i++) rd_kafka_queue_destroy(queues[i]);
    rd_kafka_consumer_close(rk);
    rd_kafka_queue_destroy(control);
    rd_kafka_destroy(rk);
    return 0;
}

/* ------------------------------------------------------------------ latency */
static int64_t wall_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void stamp(unsigned char *value, int64_t us)
{
    for (int i = 0; i < 8; i++) value[i] = (unsigned char)((uint64_t)us >> (56 - 8 * i));
}

static int64_t stamped(const unsigned char *value)
{
    uint64_t us = 0;
    for (int i = 0; i < 8; i++) us = us << 8 | value[i];
    return (int64_t)us;
}

/* Each millisecond what is due by then, all to one partition, the next millisecond's to the next: as producers do with messages without
 * a key. When the machine held it up, the rest is sent late, with the time at which it is sent. */
static int rate(char **argv)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", argv[2]);
    set(conf, "enable.idempotence", "true");
    set(conf, "linger.ms", argv[8]);
    set(conf, "socket.nagle.disable", "true");
    set(conf, "queue.buffering.max.messages", "1000000");
    rd_kafka_t *rk = client(RD_KAFKA_PRODUCER, conf);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, argv[3], NULL);
    long partitions = atol(argv[4]), count = atol(argv[5]), bytes = atol(argv[6]);
    double per_second = atof(argv[7]);
    if (bytes < 8 || per_second <= 0) die("rate", "messages have 8 bytes at least, the rate is positive");
    char *value = malloc((size_t)bytes);
    if (!value) die("malloc", "no memory");
    memset(value, 'x', (size_t)bytes);
    double start = now(), start_cpu = cpu();
    long partition = 0;
    for (long i = 0; i < count; partition = (partition + 1) % partitions) {
        long due = (long)((now() - start) * per_second) + 1;
        if (due > count) due = count;
        while (i < due) {
            stamp((unsigned char *)value, wall_us());
            if (send_one(rk, topic, (int32_t)partition, value, (size_t)bytes, NULL) == 0)
                i++;
            else
                rd_kafka_poll(rk, 1);
        }
        rd_kafka_poll(rk, 0);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    if (rd_kafka_flush(rk, 60000)) die("flush", "not all messages were acknowledged");
    printf("%ld %.6f %.6f %ld\n", count, now() - start, cpu() - start_cpu, rss_kb());
    free(value);
    rd_kafka_topic_destroy(topic);
    rd_kafka_destroy(rk);
    return 0;
}

static void say_assigned(rd_kafka_t *rk, rd_kafka_resp_err_t err, rd_kafka_topic_partition_list_t *list, void *opaque)
{
    (void)opaque;
    rd_kafka_assign(rk, err == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS ? list : NULL);
    if (err == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS) printf("ready\n");
    fflush(stdout);
}

static int latency(char **argv)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", argv[2]);
    set(conf, "group.id", argv[4]);
    set(conf, "auto.offset.reset", "earliest");
    set(conf, "socket.nagle.disable", "true");
    rd_kafka_conf_set_rebalance_cb(conf, say_assigned);
    rd_kafka_t *rk = client(RD_KAFKA_CONSUMER, conf);
    rd_kafka_poll_set_consumer(rk);
    rd_kafka_topic_partition_list_t *topics = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(topics, argv[3], RD_KAFKA_PARTITION_UA);
    rd_kafka_subscribe(rk, topics);
    rd_kafka_topic_partition_list_destroy(topics);
    long count = atol(argv[5]), got = 0;
    uint32_t *late = malloc((size_t)count * sizeof *late);
    if (!late) die("malloc", "no memory");
    double start = 0, start_cpu = 0, last = now();
    while (got < count) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(rk, 100);
        if (message && !message->err && message->len >= 8) {
            last = now();
            if (!got) {
                start = last;
                start_cpu = cpu();
            }
            int64_t us = wall_us() - stamped(message->payload);
            late[got++] = us < 0 ? 0 : us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
        } else if (now() - last > 60) {
            die("latency", "no message for 60 s");
        }
        if (message) rd_kafka_message_destroy(message);
    }
    printf("%ld %.6f %.6f %ld\n", got, now() - start, cpu() - start_cpu, rss_kb());
    FILE *file = fopen(argv[6], "wb");
    if (!file || fwrite(late, sizeof *late, (size_t)got, file) != (size_t)got || fclose(file))
        die(argv[6], "not written");
    free(late);
    rd_kafka_consumer_close(rk);
    rd_kafka_destroy(rk);
    return 0;
}

int main(int argc, char **argv)
{
    if ((argc == 7 || (argc == 8 && !strcmp(argv[7], "keyed"))) && !strcmp(argv[1], "produce"))
        return produce(argv, argc == 8);
    if ((argc == 7 || argc == 8) && !strcmp(argv[1], "consume")) return consume(argv, atol(argv[6]), argc == 8);
    if (argc == 9 && !strcmp(argv[1], "rate")) return rate(argv);
    if (argc == 7 && !strcmp(argv[1], "latency")) return latency(argv);
    fprintf(stderr, "usage: rdkafka_alone produce BOOTSTRAP TOPIC PARTITIONS COUNT BYTES [keyed] | consume BOOTSTRAP "
                    "TOPIC GROUP COUNT [WARM]\n"
                    "       | rate BOOTSTRAP TOPIC PARTITIONS COUNT BYTES RATE LINGER | latency BOOTSTRAP TOPIC GROUP "
                    "COUNT FILE\n");
    return 2;
}
