/* txn - a producer of transactions, for a thread that may block.
 *
 *      init --> READY --begin--> OPEN --commit--> READY
 *                 ^               | abortable error
 *                 '----abort------'                     fatal, fenced, or time over in commit or abort --> DEAD: only destroy
 *
 * Reports come by callback, not as events: commit and abort wait for them inside, and serve callbacks while they do.
 *
 * Invariants:
 *   (1) a call that librdkafka calls retriable is made again, with the same arguments, until its time is over;
 *   (2) KAFKA_OK of commit and abort is certain; everything doubtful is KAFKA_EDEAD;
 *   (3) a report is written in flush, commit and abort only, never after destroy has begun: late ones find the sink closed.
 * Costs: a transaction of one message about 10 ms on a quiet local broker, six round trips.
 * Thread rule: one thread at a time, and one that may block. */
#include "internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RETRY_PAUSE_MS = 20 };

/* Outlives the producer, in which messages may still be on their way. */
typedef struct sink {
    atomic_bool open;
    size_t n_sent, n_known, n_failed;
    int error; /* the first that is one by itself */
} sink;

typedef struct txn_topic {
    rd_kafka_topic_t *rkt;
    struct txn_topic *next;
} txn_topic;

struct kafka_txn {
    rd_kafka_t *rk;
    rd_kafka_queue_t *main;
    sink *sink;
    txn_topic *topics;
    kafka_reaper *reaper;
};

/* ------------------------------------------------------------------ callbacks */

static void on_report(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque)
{
    sink *to = opaque;
    kafka_txn_report *report = message->_private;
    (void)rk;
    if (!atomic_load(&to->open)) return;
    to->n_known++;
    *report = (kafka_txn_report){.known = true, .error = message->err, .offset = message->offset};
    if (message->err == RD_KAFKA_RESP_ERR_NO_ERROR) return;
    to->n_failed++;
    /* those that a failure has taken with it say nothing about it */
    bool purged = message->err == RD_KAFKA_RESP_ERR__PURGE_QUEUE || message->err == RD_KAFKA_RESP_ERR__PURGE_INFLIGHT;
    if (!purged && to->error == 0) to->error = message->err;
}

/* The calls' own errors tell what matters. */
static void on_error(rd_kafka_t *rk, int code, const char *text, void *opaque)
{
    (void)rk;
    (void)code;
    (void)text;
    (void)opaque;
}

static void prepare(rd_kafka_conf_t *conf, void *ctx)
{
    rd_kafka_conf_set_opaque(conf, ctx);
    rd_kafka_conf_set_dr_msg_cb(conf, on_report);
    rd_kafka_conf_set_error_cb(conf, on_error);
}

/* ------------------------------------------------------------------ open, destroy */

int kafka_txn_open(const kafka_property *props, size_t n_props, const char *id, int timeout_ms, kafka_txn **out,
                   kafka_error *err)
{
    char timeout[16];
    /* a message's own time-out may not be longer than the transaction's; what is in flight with it is one, too */
    const kafka_property forced[] = {
        {"transactional.id", id}, {"transaction.timeout.ms", timeout}, {"message.timeout.ms", timeout}};
    static const kafka_property defaults[] = {{"retry.backoff.ms", "20"}};
    kafka_txn *txn = calloc(1, sizeof *txn);
    sink *to = calloc(1, sizeof *to);
    kafka_reaper *reaper = kafka_reaper_new();
    if (txn == NULL || to == NULL || reaper == NULL) {
        free(txn);
        free(to);
        free(reaper);
        return kafka_no_memory(err);
    }
    snprintf(timeout, sizeof timeout, "%d", timeout_ms);
    atomic_init(&to->open, true);
    txn->sink = to;
    txn->reaper = reaper;
    int events = kafka_common_events(props, n_props) & ~(RD_KAFKA_EVENT_ERROR | RD_KAFKA_EVENT_LOG);
    txn->rk =
        kafka_client_new_with(prepare, to, RD_KAFKA_PRODUCER, defaults, 1, props, n_props, forced, 3, events, err);
    if (txn->rk == NULL) {
        free(reaper);
        free(to);
        free(txn);
        return KAFKA_EDEAD;
    }
    txn->main = rd_kafka_queue_get_main(txn->rk);
    rd_kafka_set_log_queue(txn->rk, txn->main);
    *out = txn;
    return KAFKA_OK;
}

int kafka_txn_set_token(kafka_txn *txn, const kafka_token *token, kafka_error *err)
{
    return kafka_set_token(txn->rk, token, err);
}

void kafka_txn_destroy(kafka_txn *txn)
{
    atomic_store(&txn->sink->open, false);
    rd_kafka_purge(txn->rk, RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_INFLIGHT | RD_KAFKA_PURGE_F_NON_BLOCKING);
    while (txn->topics != NULL) {
        txn_topic *topic = txn->topics;
        txn->topics = topic->next;
        rd_kafka_topic_destroy(topic->rkt);
        free(topic);
    }
    rd_kafka_queue_destroy(txn->main);
    kafka_reap(txn->reaper, txn->rk, 0, free, txn->sink);
    free(txn);
}

/* ------------------------------------------------------------------ errors */

/* Takes the error. */
static int verdict(kafka_txn *txn, rd_kafka_error_t *error, const char *what, kafka_error *err)
{
    bool aborts = rd_kafka_error_txn_requires_abort(error) != 0;
    kafka_fail_object(err, txn->rk, error, what);
    return aborts ? KAFKA_EABORT : KAFKA_EDEAD;
}

/* True: time is left, and the same call may succeed. Waits a little, so that a broker that says no at once is not asked at once. */
static bool again(rd_kafka_error_t *error, int64_t deadline_ms)
{
    if (!rd_kafka_error_is_retriable(error) || rd_kafka_error_is_fatal(error) ||
        rd_kafka_error_txn_requires_abort(error) || kafka_left_ms(deadline_ms) <= RETRY_PAUSE_MS)
        return false;
    rd_kafka_error_destroy(error);
    kafka_pause_ms(RETRY_PAUSE_MS);
    return true;
}

/* ------------------------------------------------------------------ the calls */

int kafka_txn_init(kafka_txn *txn, int timeout_ms, kafka_error *err)
{
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    rd_kafka_error_t *error;
    do {
        error = rd_kafka_init_transactions(txn->rk, kafka_left_ms(deadline_ms));
    } while (error != NULL && again(error, deadline_ms));
    if (error == NULL) return KAFKA_OK;
    kafka_fail_object(err, txn->rk, error, "init_transactions");
    return KAFKA_EDEAD;
}

int kafka_txn_begin(kafka_txn *txn, kafka_error *err)
{
    sink *to = txn->sink;
    rd_kafka_error_t *error = rd_kafka_begin_transaction(txn->rk);
    to->n_sent = to->n_known = to->n_failed = 0;
    to->error = 0;
    if (error == NULL) return KAFKA_OK;
    kafka_fail_object(err, txn->rk, error, "begin_transaction");
    return KAFKA_EDEAD;
}

int kafka_txn_offsets(kafka_txn *txn, const kafka_group *group, const kafka_partition *partitions, size_t n,
                      int timeout_ms, kafka_error *err)
{
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    rd_kafka_error_t *error;
    rd_kafka_topic_partition_list_t *list = kafka_commit_list(txn->rk, partitions, n, err);
    if (list == NULL) return KAFKA_EABORT;
    do {
        error = rd_kafka_send_offsets_to_transaction(txn->rk, list, group->metadata, kafka_left_ms(deadline_ms));
    } while (error != NULL && again(error, deadline_ms));
    rd_kafka_topic_partition_list_destroy(list);
    if (error == NULL) return KAFKA_OK;
    /* out of time: nobody knows whether they will still arrive, but the transaction can be aborted */
    if (rd_kafka_error_is_retriable(error) && !rd_kafka_error_is_fatal(error)) {
        kafka_fail_object(err, txn->rk, error, "send_offsets_to_transaction");
        return KAFKA_EABORT;
    }
    return verdict(txn, error, "send_offsets_to_transaction", err);
}

static rd_kafka_topic_t *topic_of(kafka_txn *txn, const char *name, kafka_error *err)
{
    txn_topic *topic = txn->topics;
    while (topic != NULL && strcmp(rd_kafka_topic_name(topic->rkt), name) != 0) topic = topic->next;
    if (topic != NULL) return topic->rkt;
    if ((topic = calloc(1, sizeof *topic)) == NULL) {
        kafka_no_memory(err);
        return NULL;
    }
    topic->rkt = rd_kafka_topic_new(txn->rk, name, NULL);
    if (topic->rkt == NULL) {
        kafka_fail(err, txn->rk, rd_kafka_last_error(), name);
        free(topic);
        return NULL;
    }
    topic->next = txn->topics;
    txn->topics = topic;
    return topic->rkt;
}

int kafka_txn_send(kafka_txn *txn, const char *topic, int32_t partition, const void *key, size_t key_len,
                   const void *value, size_t value_len, const kafka_header *headers, size_t n_headers,
                   kafka_txn_report *report, kafka_error *err)
{
    rd_kafka_topic_t *rkt = topic_of(txn, topic, err);
    if (rkt == NULL) return KAFKA_EABORT;
    *report = (kafka_txn_report){.offset = -1};
    rd_kafka_resp_err_t code =
        kafka_produce(txn->rk, rkt, partition, key, key_len, value, value_len, headers, n_headers, 0, report);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        txn->sink->n_sent++;
        return KAFKA_OK;
    }
    kafka_fail(err, txn->rk, code, topic);
    if (code == RD_KAFKA_RESP_ERR__QUEUE_FULL) return KAFKA_EFULL;
    if (code == RD_KAFKA_RESP_ERR__FATAL || code == RD_KAFKA_RESP_ERR__FENCED) return KAFKA_EDEAD;
    *report = (kafka_txn_report){.known = true, .error = code, .offset = -1};
    return KAFKA_EABORT;
}

/* What has failed the transaction, where no message says so: commit, which is refused then, does. */
static int why(kafka_txn *txn, int timeout_ms, kafka_error *err)
{
    rd_kafka_error_t *error = rd_kafka_commit_transaction(txn->rk, timeout_ms);
    if (error != NULL) return verdict(txn, error, "transaction", err);
    kafka_error_set(err, RD_KAFKA_RESP_ERR__INCONSISTENT, "a transaction with failed messages was committed");
    return KAFKA_EDEAD;
}

int kafka_txn_flush(kafka_txn *txn, int timeout_ms, kafka_error *err)
{
    sink *to = txn->sink;
    rd_kafka_flush(txn->rk, timeout_ms); /* a failure purges the rest, so this does not wait for what will not come */
    if (rd_kafka_fatal_error(txn->rk, NULL, 0) != RD_KAFKA_RESP_ERR_NO_ERROR) {
        kafka_fail(err, txn->rk, RD_KAFKA_RESP_ERR__FATAL, NULL);
        return KAFKA_EDEAD;
    }
    if (to->error != 0) {
        kafka_fail(err, txn->rk, to->error, "message");
        return KAFKA_EABORT;
    }
    if (to->n_failed > 0) return why(txn, 1000, err);
    if (to->n_known == to->n_sent) return KAFKA_OK;
    kafka_error_set(err, RD_KAFKA_RESP_ERR__TIMED_OUT, "%zu messages are not acknowledged in time",
                    to->n_sent - to->n_known);
    return KAFKA_EABORT;
}

int kafka_txn_commit(kafka_txn *txn, int timeout_ms, kafka_error *err)
{
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    rd_kafka_error_t *error;
    do {
        error = rd_kafka_commit_transaction(txn->rk, kafka_left_ms(deadline_ms));
    } while (error != NULL && again(error, deadline_ms));
    return error == NULL ? KAFKA_OK : verdict(txn, error, "commit_transaction", err);
}

int kafka_txn_abort(kafka_txn *txn, int timeout_ms, kafka_error *err)
{
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    rd_kafka_error_t *error;
    do {
        error = rd_kafka_abort_transaction(txn->rk, kafka_left_ms(deadline_ms));
    } while (error != NULL && again(error, deadline_ms));
    if (error == NULL) return KAFKA_OK;
    kafka_fail_object(err, txn->rk, error, "abort_transaction");
    return KAFKA_EDEAD;
}
