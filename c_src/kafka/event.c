/* event - a librdkafka event as a kafka_event. All that the event shows is copied into one block (priv), so that the library's own can be
 * destroyed in the same call: one that is kept makes rd_kafka_destroy wait for ever. */
#include "internal.h"
#include <stdlib.h>
#include <string.h>

/* Copies len bytes and a NUL to *at and moves it on. */
static const char *put(char **at, const void *bytes, size_t len)
{
    char *copy = *at;
    if (len > 0) memcpy(copy, bytes, len);
    copy[len] = '\0';
    *at += len + 1;
    return copy;
}

static bool copy(kafka_event *event, const rd_kafka_topic_partition_list_t *list, const char *text)
{
    size_t n = list == NULL ? 0 : (size_t)list->cnt, text_len = text == NULL ? 0 : strlen(text);
    size_t size = n * sizeof(kafka_partition) + text_len + 1;
    for (size_t i = 0; i < n; i++) size += strlen(list->elems[i].topic) + 1 + list->elems[i].metadata_size + 1;
    char *block = malloc(size);
    if (block == NULL) return false;
    kafka_partition *partitions = (void *)block;
    char *at = block + n * sizeof(kafka_partition);
    event->text = put(&at, text, text_len);
    for (size_t i = 0; i < n; i++) {
        const rd_kafka_topic_partition_t *from = &list->elems[i];
        partitions[i].topic = put(&at, from->topic, strlen(from->topic));
        partitions[i].partition = from->partition;
        partitions[i].offset = from->offset;
        partitions[i].metadata = from->metadata == NULL ? NULL : put(&at, from->metadata, from->metadata_size);
        partitions[i].error = from->err;
    }
    event->partitions = partitions;
    event->n_partitions = n;
    event->priv = block;
    return true;
}

static bool make_error(rd_kafka_t *rk, rd_kafka_event_t *rkev, kafka_event *event)
{
    event->type = KAFKA_EVENT_ERROR;
    kafka_error_made(&event->error, rk, rd_kafka_event_error(rkev), rd_kafka_event_error_string(rkev));
    if (rd_kafka_event_error_is_fatal(rkev)) { /* then it already shows the original code, which does not look fatal */
        event->error.fatal = true;
        event->error.retriable = false;
    }
    return copy(event, NULL, event->error.text);
}

static bool make_rebalance(rd_kafka_t *rk, rd_kafka_event_t *rkev, kafka_event *event)
{
    rd_kafka_resp_err_t what = rd_kafka_event_error(rkev);
    event->type = what == RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS ? KAFKA_EVENT_ASSIGN : KAFKA_EVENT_REVOKE;
    if (what != RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS && what != RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS)
        kafka_error_made(&event->error, rk, what, NULL); /* a failed rebalance: give all back */
    event->lost = event->type == KAFKA_EVENT_REVOKE && rd_kafka_assignment_lost(rk) != 0;
    return copy(event, rd_kafka_event_topic_partition_list(rkev), NULL);
}

bool kafka_event_make(rd_kafka_t *rk, rd_kafka_event_t *rkev, kafka_event *event)
{
    bool copied = true;
    const char *facility, *text;
    memset(event, 0, sizeof *event);
    switch (rd_kafka_event_type(rkev)) {
    case RD_KAFKA_EVENT_REBALANCE: copied = make_rebalance(rk, rkev, event); break;
    case RD_KAFKA_EVENT_OFFSET_COMMIT:
        event->type = KAFKA_EVENT_COMMIT;
        event->opaque = rd_kafka_event_opaque(rkev);
        if (rd_kafka_event_error(rkev) != RD_KAFKA_RESP_ERR_NO_ERROR)
            kafka_error_made(&event->error, rk, rd_kafka_event_error(rkev), NULL);
        copied = copy(event, rd_kafka_event_topic_partition_list(rkev), NULL);
        break;
    case RD_KAFKA_EVENT_ERROR: copied = make_error(rk, rkev, event); break;
    case RD_KAFKA_EVENT_LOG:
        event->type = KAFKA_EVENT_LOG;
        if (rd_kafka_event_log(rkev, &facility, &text, &event->level) != 0) return false;
        /* said of each mock broker: it is known, and nobody can do anything about it */
        if (strstr(text, "allow.auto.create.topics=false not supported") != NULL) return false;
        copied = copy(event, NULL, text);
        break;
    case RD_KAFKA_EVENT_STATS:
        event->type = KAFKA_EVENT_STATS;
        copied = copy(event, NULL, rd_kafka_event_stats(rkev));
        break;
    case RD_KAFKA_EVENT_OAUTHBEARER_TOKEN_REFRESH:
        event->type = KAFKA_EVENT_TOKEN;
        copied = copy(event, NULL, rd_kafka_event_config_string(rkev));
        break;
    default: return false;
    }
    if (!copied) {
        memset(event, 0, sizeof *event);
        event->type = KAFKA_EVENT_ERROR;
        event->text = "out of memory: an event is lost";
        kafka_error_set(&event->error, RD_KAFKA_RESP_ERR__CRIT_SYS_RESOURCE, "%s", event->text);
    }
    return true;
}

bool kafka_event_times(rd_kafka_t *rk, rd_kafka_resp_err_t code, const rd_kafka_topic_partition_list_t *list,
                       kafka_event *event)
{
    memset(event, 0, sizeof *event);
    event->type = KAFKA_EVENT_TIMES;
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) kafka_error_made(&event->error, rk, code, NULL);
    return copy(event, list, NULL);
}

void kafka_event_free(kafka_event *event)
{
    free(event->priv);
    memset(event, 0, sizeof *event);
}
