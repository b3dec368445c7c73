/* error - librdkafka's error codes as values: a name for programs, a text for people, and whether trying again can help. */
#include "internal.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *kafka_version(void) { return rd_kafka_version_str(); }

int kafka_version_number(void) { return rd_kafka_version(); }

const char *kafka_error_name(int code)
{
    if (code == KAFKA_RECORD_EOF) return "_PARTITION_EOF";
    if (code == KAFKA_RECORD_OUT_OF_RANGE) return "OFFSET_OUT_OF_RANGE";
    return rd_kafka_err2name((rd_kafka_resp_err_t)code);
}

const char *kafka_error_text(int code)
{
    if (code == KAFKA_RECORD_EOF) return "end of partition";
    if (code == KAFKA_RECORD_OUT_OF_RANGE) return "the offset is not in the partition (any more)";
    return rd_kafka_err2str((rd_kafka_resp_err_t)code);
}

/* The one table of what becomes of an error; guides/errors.md shows it, and a test compares the two. Broker codes follow the protocol's own
 * table (for a commit REBALANCE_IN_PROGRESS and its like are final: this member's generation is over). Purged messages
 * were withdrawn by us, nothing is wrong with them. */
kafka_verdict kafka_error_verdict(int code)
{
    switch (code) {
    case RD_KAFKA_RESP_ERR__TRANSPORT:
    case RD_KAFKA_RESP_ERR__RESOLVE:
    case RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN:
    case RD_KAFKA_RESP_ERR__TIMED_OUT:
    case RD_KAFKA_RESP_ERR__TIMED_OUT_QUEUE:
    case RD_KAFKA_RESP_ERR__MSG_TIMED_OUT:
    case RD_KAFKA_RESP_ERR__WAIT_COORD:
    case RD_KAFKA_RESP_ERR__WAIT_CACHE:
    case RD_KAFKA_RESP_ERR__NODE_UPDATE:
    case RD_KAFKA_RESP_ERR__IN_PROGRESS:
    case RD_KAFKA_RESP_ERR__PREV_IN_PROGRESS:
    case RD_KAFKA_RESP_ERR__QUEUE_FULL:
    case RD_KAFKA_RESP_ERR__RETRY:
    case RD_KAFKA_RESP_ERR__PURGE_QUEUE:
    case RD_KAFKA_RESP_ERR__PURGE_INFLIGHT:
    case RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC:
    case RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION:
    case RD_KAFKA_RESP_ERR__AUTHENTICATION: /* tokens and brokers' credential stores are renewed */
    case RD_KAFKA_RESP_ERR__SSL:
    case RD_KAFKA_RESP_ERR_INVALID_MSG: /* CORRUPT_MESSAGE */
    case RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART:
    case RD_KAFKA_RESP_ERR_LEADER_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION:
    case RD_KAFKA_RESP_ERR_REQUEST_TIMED_OUT:
    case RD_KAFKA_RESP_ERR_BROKER_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_REPLICA_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_NETWORK_EXCEPTION:
    case RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS:
    case RD_KAFKA_RESP_ERR_COORDINATOR_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_NOT_COORDINATOR:
    case RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS:
    case RD_KAFKA_RESP_ERR_NOT_ENOUGH_REPLICAS_AFTER_APPEND:
    case RD_KAFKA_RESP_ERR_NOT_CONTROLLER:
    case RD_KAFKA_RESP_ERR_CONCURRENT_TRANSACTIONS:
    case RD_KAFKA_RESP_ERR_KAFKA_STORAGE_ERROR:
    case RD_KAFKA_RESP_ERR_FETCH_SESSION_ID_NOT_FOUND:
    case RD_KAFKA_RESP_ERR_INVALID_FETCH_SESSION_EPOCH:
    case RD_KAFKA_RESP_ERR_LISTENER_NOT_FOUND:
    case RD_KAFKA_RESP_ERR_FENCED_LEADER_EPOCH:
    case RD_KAFKA_RESP_ERR_UNKNOWN_LEADER_EPOCH:
    case RD_KAFKA_RESP_ERR_OFFSET_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_PREFERRED_LEADER_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_ELIGIBLE_LEADERS_NOT_AVAILABLE:
    case RD_KAFKA_RESP_ERR_UNSTABLE_OFFSET_COMMIT:
    case RD_KAFKA_RESP_ERR_THROTTLING_QUOTA_EXCEEDED: return KAFKA_RETRIED;
    case RD_KAFKA_RESP_ERR__PARTITION_EOF:
    case RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS:
    case RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS:
    case RD_KAFKA_RESP_ERR__MAX_POLL_EXCEEDED:
    case RD_KAFKA_RESP_ERR__ASSIGNMENT_LOST:
    case RD_KAFKA_RESP_ERR__AUTO_OFFSET_RESET:
    case RD_KAFKA_RESP_ERR_OFFSET_OUT_OF_RANGE:
    case RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION:
    case RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID:
    case RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS:
    case RD_KAFKA_RESP_ERR_MEMBER_ID_REQUIRED: return KAFKA_ANSWERED;
    case RD_KAFKA_RESP_ERR__FATAL: /* and whatever the library declares fatal, see kafka_error_made */
    case RD_KAFKA_RESP_ERR_PRODUCER_FENCED: return KAFKA_REPLACED;
    case RD_KAFKA_RESP_ERR__FENCED:
    case RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID: return KAFKA_STOPS;
    default: return KAFKA_REPORTED;
    }
}

bool kafka_error_retriable(int code) { return kafka_error_verdict(code) == KAFKA_RETRIED; }

void kafka_error_each(void (*each)(void *ctx, int code), void *ctx)
{
    const struct rd_kafka_err_desc *descriptions;
    size_t n;
    rd_kafka_get_err_descs(&descriptions, &n);
    for (size_t i = 0; i < n; i++)
        if (descriptions[i].desc != NULL && descriptions[i].code != RD_KAFKA_RESP_ERR_NO_ERROR)
            each(ctx, descriptions[i].code);
}

bool kafka_error_rebalancing(int code)
{
    return code == RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS || code == RD_KAFKA_RESP_ERR_ILLEGAL_GENERATION;
}

static void fill(kafka_error *err, int code)
{
    memset(err, 0, sizeof *err);
    err->code = code;
    snprintf(err->name, sizeof err->name, "%s", kafka_error_name(code));
    err->retriable = kafka_error_verdict(code) == KAFKA_RETRIED;
    err->fatal = kafka_error_verdict(code) >= KAFKA_REPLACED;
}

void kafka_error_set(kafka_error *err, int code, const char *format, ...)
{
    if (err == NULL) return;
    fill(err, code);
    va_list args;
    va_start(args, format);
    vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
}

/* text NULL = librdkafka's own sentence. */
void kafka_error_made(kafka_error *error, rd_kafka_t *rk, rd_kafka_resp_err_t code, const char *text)
{
    char original[sizeof error->text];
    bool is_fatal = false;
    if (code == RD_KAFKA_RESP_ERR__FATAL && rk != NULL) {
        rd_kafka_resp_err_t cause = rd_kafka_fatal_error(rk, original, sizeof original);
        if (cause != RD_KAFKA_RESP_ERR_NO_ERROR) {
            code = cause;
            text = original;
        }
        is_fatal = true;
    }
    kafka_error_set(error, code, "%s", text != NULL ? text : rd_kafka_err2str(code));
    if (is_fatal) {
        error->fatal = true;
        error->retriable = false;
    }
}

int kafka_fail(kafka_error *err, rd_kafka_t *rk, rd_kafka_resp_err_t code, const char *what)
{
    if (err == NULL) return KAFKA_EKAFKA;
    kafka_error_made(err, rk, code, NULL);
    if (what != NULL) {
        char text[sizeof err->text];
        memcpy(text, err->text, sizeof text);
        int n = snprintf(err->text, sizeof err->text, "%s: ", what);
        if (n >= 0 && (size_t)n < sizeof err->text) snprintf(err->text + n, sizeof err->text - (size_t)n, "%s", text);
    }
    return KAFKA_EKAFKA;
}

int kafka_fail_object(kafka_error *err, rd_kafka_t *rk, rd_kafka_error_t *error, const char *what)
{
    if (error == NULL) return KAFKA_OK;
    if (err != NULL) {
        bool is_fatal = rd_kafka_error_is_fatal(error) != 0, retriable = rd_kafka_error_is_retriable(error) != 0;
        kafka_fail(err, rk, rd_kafka_error_code(error), what);
        if (!err->fatal)
            snprintf(err->text, sizeof err->text, "%s%s%s", what != NULL ? what : "", what != NULL ? ": " : "",
                     rd_kafka_error_string(error));
        err->fatal |= is_fatal;
        err->retriable = !err->fatal && (err->retriable || retriable);
    }
    rd_kafka_error_destroy(error);
    return KAFKA_EKAFKA;
}

int kafka_no_memory(kafka_error *err)
{
    kafka_error_set(err, RD_KAFKA_RESP_ERR__CRIT_SYS_RESOURCE, "out of memory");
    return KAFKA_ENOMEM;
}
