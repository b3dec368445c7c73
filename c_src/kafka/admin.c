/* admin - what blocks: metadata, commits of others, watermarks, topics. One short-lived client of consumer type.
 *
 * Why consumer type: it can read a group's commits. Asking for a topic never creates it: metadata requests say so, given
 * allow.auto.create.topics=false (a mock cluster of 2.0.2 does not look).
 * Every call blocks up to timeout_ms (a little more when librdkafka's thread is slow to notice). Thread rule: one thread at a time. */
#include "internal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct kafka_admin {
    rd_kafka_t *rk;
    rd_kafka_queue_t *main; /* errors and logs: read, and the one that says why nothing connects is kept */
    kafka_cause cause;
    rd_kafka_queue_t *result; /* of admin requests; late ones of an earlier call are dropped by their opaque */
    uintptr_t request;        /* number of the latest admin request */
    char *metadata;           /* what kafka_admin_committed has shown */
    kafka_reaper *reaper;
};

int kafka_admin_open(const kafka_property *props, size_t n_props, kafka_admin **out, kafka_error *err)
{
    static const kafka_property defaults[] = {{"group.id", "kmq-admin"}, {"isolation.level", "read_uncommitted"}};
    static const kafka_property forced[] = {{"enable.auto.commit", "false"}, {"enable.auto.offset.store", "false"}};
    kafka_admin *admin = calloc(1, sizeof *admin);
    kafka_reaper *reaper = kafka_reaper_new();
    if (admin == NULL || reaper == NULL) {
        free(admin);
        free(reaper);
        return kafka_no_memory(err);
    }
    admin->reaper = reaper;
    admin->rk = kafka_client_new(RD_KAFKA_CONSUMER, defaults, 2, props, n_props, forced, 2,
                                 kafka_common_events(props, n_props), err);
    if (admin->rk == NULL) {
        free(reaper);
        free(admin);
        return KAFKA_EKAFKA;
    }
    admin->main = rd_kafka_queue_get_main(admin->rk);
    rd_kafka_set_log_queue(admin->rk, admin->main);
    admin->result = rd_kafka_queue_new(admin->rk);
    *out = admin;
    return KAFKA_OK;
}

void kafka_admin_destroy(kafka_admin *admin)
{
    rd_kafka_queue_destroy(admin->result);
    rd_kafka_queue_destroy(admin->main);
    free(admin->metadata);
    kafka_reap(admin->reaper, admin->rk, RD_KAFKA_DESTROY_F_NO_CONSUMER_CLOSE, NULL, NULL);
    free(admin);
}

int kafka_admin_set_token(kafka_admin *admin, const kafka_token *token, kafka_error *err)
{
    return kafka_set_token(admin->rk, token, err);
}

/* ------------------------------------------------------------------ metadata */

/* One topic's, or all (topic NULL). */
static rd_kafka_resp_err_t metadata(kafka_admin *admin, const char *topic, int timeout_ms,
                                    const rd_kafka_metadata_t **out)
{
    rd_kafka_topic_t *rkt = topic == NULL ? NULL : rd_kafka_topic_new(admin->rk, topic, NULL);
    kafka_cause_read(&admin->cause, admin->main);
    if (topic != NULL && rkt == NULL) return rd_kafka_last_error();
    rd_kafka_resp_err_t code = kafka_metadata(admin->rk, rkt, rkt == NULL, &admin->cause, admin->main, timeout_ms, out);
    if (rkt != NULL) rd_kafka_topic_destroy(rkt);
    return code;
}

int kafka_admin_cluster_id(kafka_admin *admin, char *buf, size_t cap, int timeout_ms, kafka_error *err)
{
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    const rd_kafka_metadata_t *md;
    kafka_cause_read(&admin->cause, admin->main);
    /* The id comes with any answer about metadata; rd_kafka_clusterid alone waits for a periodic one, for a second. */
    rd_kafka_resp_err_t code = kafka_metadata(admin->rk, NULL, false, &admin->cause, admin->main, timeout_ms, &md);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return kafka_cause_fail(&admin->cause, err, admin->rk, code, "cluster id");
    rd_kafka_metadata_destroy(md);
    char *id = rd_kafka_clusterid(admin->rk, kafka_left_ms(deadline_ms));
    if (id == NULL) return kafka_fail(err, admin->rk, RD_KAFKA_RESP_ERR__TIMED_OUT, "cluster id");
    snprintf(buf, cap, "%s", id);
    rd_kafka_mem_free(admin->rk, id);
    return KAFKA_OK;
}

int kafka_admin_partitions(kafka_admin *admin, const char *topic, int timeout_ms, int *n_partitions, int *replication,
                           kafka_error *err)
{
    const rd_kafka_metadata_t *md;
    *n_partitions = *replication = 0;
    rd_kafka_resp_err_t code = metadata(admin, topic, timeout_ms, &md);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return kafka_cause_fail(&admin->cause, err, admin->rk, code, topic);
    code = md->topic_cnt == 1 ? md->topics[0].err : RD_KAFKA_RESP_ERR__BAD_MSG;
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        *n_partitions = md->topics[0].partition_cnt;
        if (*n_partitions > 0) *replication = md->topics[0].partitions[0].replica_cnt;
    }
    rd_kafka_metadata_destroy(md);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR || code == RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART) return KAFKA_OK;
    return kafka_fail(err, admin->rk, code, topic);
}

int kafka_admin_topics(kafka_admin *admin, int timeout_ms, void (*each)(void *ctx, const char *topic, int n_partitions),
                       void *ctx, kafka_error *err)
{
    const rd_kafka_metadata_t *md;
    rd_kafka_resp_err_t code = metadata(admin, NULL, timeout_ms, &md);
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) return kafka_cause_fail(&admin->cause, err, admin->rk, code, "topics");
    for (int i = 0; i < md->topic_cnt; i++)
        if (md->topics[i].err == RD_KAFKA_RESP_ERR_NO_ERROR)
            each(ctx, md->topics[i].topic, md->topics[i].partition_cnt);
    rd_kafka_metadata_destroy(md);
    return KAFKA_OK;
}

/* ------------------------------------------------------------------ offsets */

int kafka_admin_committed(kafka_admin *admin, kafka_partition *partitions, size_t n, int timeout_ms, kafka_error *err)
{
    int result = KAFKA_OK;
    size_t size = 0;
    kafka_cause_read(&admin->cause, admin->main);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new((int)n);
    for (size_t i = 0; i < n; i++)
        rd_kafka_topic_partition_list_add(list, partitions[i].topic, partitions[i].partition);
    rd_kafka_resp_err_t code = rd_kafka_committed(admin->rk, list, timeout_ms);
    for (size_t i = 0; i < n; i++) size += list->elems[i].metadata_size + 1;
    char *at = realloc(admin->metadata, size == 0 ? 1 : size);
    if (at == NULL) {
        result = kafka_no_memory(err);
        goto done;
    }
    admin->metadata = at;
    for (size_t i = 0; i < n; i++) { /* the list keeps the order it was made in */
        const rd_kafka_topic_partition_t *from = &list->elems[i];
        partitions[i].offset = code == RD_KAFKA_RESP_ERR_NO_ERROR && from->err == RD_KAFKA_RESP_ERR_NO_ERROR
                                   ? from->offset
                                   : RD_KAFKA_OFFSET_INVALID;
        partitions[i].error = code != RD_KAFKA_RESP_ERR_NO_ERROR ? code : from->err;
        partitions[i].metadata = NULL;
        if (from->metadata == NULL || from->metadata_size == 0) continue;
        partitions[i].metadata = memcpy(at, from->metadata, from->metadata_size);
        at[from->metadata_size] = '\0';
        at += from->metadata_size + 1;
    }
    for (size_t i = 0; i < n && code == RD_KAFKA_RESP_ERR_NO_ERROR; i++) code = list->elems[i].err;
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) result = kafka_fail(err, admin->rk, code, "committed");
done:
    rd_kafka_topic_partition_list_destroy(list);
    return result;
}

int kafka_admin_commit(kafka_admin *admin, const char *topic, int32_t partition, int64_t offset, int timeout_ms,
                       kafka_error *err)
{
    kafka_cause_read(&admin->cause, admin->main);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(1);
    rd_kafka_queue_t *answer = rd_kafka_queue_new(admin->rk);
    rd_kafka_topic_partition_list_add(list, topic, partition)->offset = offset;
    rd_kafka_resp_err_t code = rd_kafka_commit_queue(admin->rk, list, answer, NULL, NULL);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
        rd_kafka_event_t *event = rd_kafka_queue_poll(answer, timeout_ms);
        code = RD_KAFKA_RESP_ERR__TIMED_OUT;
        if (event != NULL) {
            const rd_kafka_topic_partition_list_t *result = rd_kafka_event_topic_partition_list(event);
            code = rd_kafka_event_error(event);
            if (code == RD_KAFKA_RESP_ERR_NO_ERROR && result != NULL) code = result->elems[0].err;
            rd_kafka_event_destroy(event);
        }
    }
    rd_kafka_queue_destroy(answer);
    rd_kafka_topic_partition_list_destroy(list);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, admin->rk, code, "commit");
}

int kafka_admin_watermarks(kafka_admin *admin, const char *topic, int32_t partition, int timeout_ms, int64_t *low,
                           int64_t *high, kafka_error *err)
{
    kafka_cause_read(&admin->cause, admin->main);
    rd_kafka_resp_err_t code = rd_kafka_query_watermark_offsets(admin->rk, topic, partition, low, high, timeout_ms);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, admin->rk, code, topic);
}

int kafka_admin_offset_for_time(kafka_admin *admin, const char *topic, int32_t partition, int64_t timestamp_ms,
                                int timeout_ms, int64_t *offset, kafka_error *err)
{
    kafka_cause_read(&admin->cause, admin->main);
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_t *one = rd_kafka_topic_partition_list_add(list, topic, partition);
    one->offset = timestamp_ms;
    rd_kafka_resp_err_t code = rd_kafka_offsets_for_times(admin->rk, list, timeout_ms);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) code = one->err;
    *offset = one->offset;
    rd_kafka_topic_partition_list_destroy(list);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, admin->rk, code, topic);
}

/* ------------------------------------------------------------------ the admin API */

/* Ready for one admin request: options with the time limits, or an error (sandbox, broker not reached). *left_ms: of the time. */
static int request(kafka_admin *admin, rd_kafka_admin_op_t op, const char *what, int timeout_ms, int64_t *deadline_ms,
                   rd_kafka_AdminOptions_t **options, kafka_error *err)
{
    char id[64], why[128];
    *deadline_ms = kafka_now_ms() + timeout_ms;
    if (kafka_admin_cluster_id(admin, id, sizeof id, timeout_ms, err) != KAFKA_OK) return KAFKA_EKAFKA;
    if (strncmp(id, "mockCluster", 11) == 0) {
        kafka_error_set(err, RD_KAFKA_RESP_ERR__UNSUPPORTED_FEATURE, "%s: the sandbox has no admin API", what);
        return KAFKA_EKAFKA;
    }
    int left = kafka_left_ms(*deadline_ms);
    if (left < 1) left = 1;
    *options = rd_kafka_AdminOptions_new(admin->rk, op);
    rd_kafka_AdminOptions_set_request_timeout(*options, left, why, sizeof why);
    rd_kafka_AdminOptions_set_operation_timeout(*options, left, why,
                                                sizeof why); /* refused where the request has none */
    rd_kafka_AdminOptions_set_opaque(*options, (void *)++admin->request);
    return KAFKA_OK;
}

/* The answer to the latest request, to be destroyed; NULL = failed. Takes the options. */
static rd_kafka_event_t *answer(kafka_admin *admin, rd_kafka_AdminOptions_t *options, const char *what,
                                int64_t deadline_ms, kafka_error *err)
{
    rd_kafka_event_t *rkev;
    rd_kafka_AdminOptions_destroy(options);
    /* a little longer than librdkafka's own limit, whose error says more */
    while ((rkev = rd_kafka_queue_poll(admin->result, kafka_left_ms(deadline_ms) + 250)) != NULL) {
        if (rd_kafka_event_opaque(rkev) == (void *)admin->request) break;
        rd_kafka_event_destroy(rkev); /* of an earlier one that was given up */
    }
    if (rkev == NULL) {
        kafka_fail(err, admin->rk, RD_KAFKA_RESP_ERR__TIMED_OUT, what);
    } else if (rd_kafka_event_error(rkev) != RD_KAFKA_RESP_ERR_NO_ERROR) {
        kafka_error_set(err, rd_kafka_event_error(rkev), "%s: %s", what, rd_kafka_event_error_string(rkev));
        rd_kafka_event_destroy(rkev);
        rkev = NULL;
    }
    return rkev;
}

/* The result of a request about one topic. Takes the event; NULL = failed already. */
static int one_topic(rd_kafka_event_t *rkev, const rd_kafka_topic_result_t **results, size_t n, const char *what,
                     kafka_error *err)
{
    int result = KAFKA_OK;
    if (rkev == NULL) return KAFKA_EKAFKA;
    rd_kafka_resp_err_t code = n == 1 ? rd_kafka_topic_result_error(results[0]) : RD_KAFKA_RESP_ERR__BAD_MSG;
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) {
        const char *text = n == 1 ? rd_kafka_topic_result_error_string(results[0]) : NULL;
        kafka_error_set(err, code, "%s: %s", what, text != NULL ? text : rd_kafka_err2str(code));
        result = KAFKA_EKAFKA;
    }
    rd_kafka_event_destroy(rkev);
    return result;
}

int kafka_admin_create_topic(kafka_admin *admin, const char *topic, int n_partitions, int replication,
                             const kafka_property *config, size_t n_config, int timeout_ms, kafka_error *err)
{
    rd_kafka_AdminOptions_t *options;
    int64_t deadline_ms;
    char why[256];
    size_t n = 0;
    const rd_kafka_topic_result_t **results = NULL;
    if (request(admin, RD_KAFKA_ADMIN_OP_CREATETOPICS, topic, timeout_ms, &deadline_ms, &options, err) != KAFKA_OK)
        return KAFKA_EKAFKA;
    rd_kafka_NewTopic_t *new_topic = rd_kafka_NewTopic_new(topic, n_partitions, replication, why, sizeof why);
    if (new_topic == NULL) {
        rd_kafka_AdminOptions_destroy(options);
        kafka_error_set(err, RD_KAFKA_RESP_ERR__INVALID_ARG, "%s: %s", topic, why);
        return KAFKA_EKAFKA;
    }
    for (size_t i = 0; i < n_config; i++) rd_kafka_NewTopic_set_config(new_topic, config[i].name, config[i].value);
    rd_kafka_CreateTopics(admin->rk, &new_topic, 1, options, admin->result);
    rd_kafka_NewTopic_destroy(new_topic);
    rd_kafka_event_t *rkev = answer(admin, options, topic, deadline_ms, err);
    if (rkev != NULL) results = rd_kafka_CreateTopics_result_topics(rd_kafka_event_CreateTopics_result(rkev), &n);
    return one_topic(rkev, results, n, topic, err);
}

int kafka_admin_create_partitions(kafka_admin *admin, const char *topic, int n_partitions, int timeout_ms,
                                  kafka_error *err)
{
    rd_kafka_AdminOptions_t *options;
    int64_t deadline_ms;
    char why[256];
    size_t n = 0;
    const rd_kafka_topic_result_t **results = NULL;
    if (request(admin, RD_KAFKA_ADMIN_OP_CREATEPARTITIONS, topic, timeout_ms, &deadline_ms, &options, err) != KAFKA_OK)
        return KAFKA_EKAFKA;
    rd_kafka_NewPartitions_t *more = rd_kafka_NewPartitions_new(topic, (size_t)n_partitions, why, sizeof why);
    if (more == NULL) {
        rd_kafka_AdminOptions_destroy(options);
        kafka_error_set(err, RD_KAFKA_RESP_ERR__INVALID_ARG, "%s: %s", topic, why);
        return KAFKA_EKAFKA;
    }
    rd_kafka_CreatePartitions(admin->rk, &more, 1, options, admin->result);
    rd_kafka_NewPartitions_destroy(more);
    rd_kafka_event_t *rkev = answer(admin, options, topic, deadline_ms, err);
    if (rkev != NULL)
        results = rd_kafka_CreatePartitions_result_topics(rd_kafka_event_CreatePartitions_result(rkev), &n);
    return one_topic(rkev, results, n, topic, err);
}

int kafka_admin_delete_topic(kafka_admin *admin, const char *topic, int timeout_ms, kafka_error *err)
{
    rd_kafka_AdminOptions_t *options;
    int64_t deadline_ms;
    size_t n = 0;
    const rd_kafka_topic_result_t **results = NULL;
    if (request(admin, RD_KAFKA_ADMIN_OP_DELETETOPICS, topic, timeout_ms, &deadline_ms, &options, err) != KAFKA_OK)
        return KAFKA_EKAFKA;
    rd_kafka_DeleteTopic_t *gone = rd_kafka_DeleteTopic_new(topic);
    rd_kafka_DeleteTopics(admin->rk, &gone, 1, options, admin->result);
    rd_kafka_DeleteTopic_destroy(gone);
    rd_kafka_event_t *rkev = answer(admin, options, topic, deadline_ms, err);
    if (rkev != NULL) results = rd_kafka_DeleteTopics_result_topics(rd_kafka_event_DeleteTopics_result(rkev), &n);
    return one_topic(rkev, results, n, topic, err);
}

int kafka_admin_topic_config(kafka_admin *admin, const char *topic, int timeout_ms,
                             void (*each)(void *ctx, const char *name, const char *value), void *ctx, kafka_error *err)
{
    rd_kafka_AdminOptions_t *options;
    int64_t deadline_ms;
    size_t n = 0;
    int result = KAFKA_OK;
    if (request(admin, RD_KAFKA_ADMIN_OP_DESCRIBECONFIGS, topic, timeout_ms, &deadline_ms, &options, err) != KAFKA_OK)
        return KAFKA_EKAFKA;
    rd_kafka_ConfigResource_t *resource = rd_kafka_ConfigResource_new(RD_KAFKA_RESOURCE_TOPIC, topic);
    rd_kafka_DescribeConfigs(admin->rk, &resource, 1, options, admin->result);
    rd_kafka_ConfigResource_destroy(resource);
    rd_kafka_event_t *rkev = answer(admin, options, topic, deadline_ms, err);
    if (rkev == NULL) return KAFKA_EKAFKA;
    const rd_kafka_ConfigResource_t **resources =
        rd_kafka_DescribeConfigs_result_resources(rd_kafka_event_DescribeConfigs_result(rkev), &n);
    rd_kafka_resp_err_t code = n == 1 ? rd_kafka_ConfigResource_error(resources[0]) : RD_KAFKA_RESP_ERR__BAD_MSG;
    if (code != RD_KAFKA_RESP_ERR_NO_ERROR) {
        const char *text = n == 1 ? rd_kafka_ConfigResource_error_string(resources[0]) : NULL;
        kafka_error_set(err, code, "%s: %s", topic, text != NULL ? text : rd_kafka_err2str(code));
        result = KAFKA_EKAFKA;
    } else {
        size_t n_entries;
        const rd_kafka_ConfigEntry_t **entries = rd_kafka_ConfigResource_configs(resources[0], &n_entries);
        for (size_t i = 0; i < n_entries; i++)
            each(ctx, rd_kafka_ConfigEntry_name(entries[i]), rd_kafka_ConfigEntry_value(entries[i]));
    }
    rd_kafka_event_destroy(rkev);
    return result;
}

int kafka_admin_delete_records(kafka_admin *admin, const char *topic, int32_t partition, int64_t before, int timeout_ms,
                               kafka_error *err)
{
    rd_kafka_AdminOptions_t *options;
    int64_t deadline_ms;
    if (request(admin, RD_KAFKA_ADMIN_OP_DELETERECORDS, topic, timeout_ms, &deadline_ms, &options, err) != KAFKA_OK)
        return KAFKA_EKAFKA;
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(1);
    rd_kafka_topic_partition_list_add(list, topic, partition)->offset = before;
    rd_kafka_DeleteRecords_t *records = rd_kafka_DeleteRecords_new(list);
    rd_kafka_topic_partition_list_destroy(list);
    rd_kafka_DeleteRecords(admin->rk, &records, 1, options, admin->result);
    rd_kafka_DeleteRecords_destroy(records);
    rd_kafka_event_t *rkev = answer(admin, options, topic, deadline_ms, err);
    if (rkev == NULL) return KAFKA_EKAFKA;
    const rd_kafka_topic_partition_list_t *results =
        rd_kafka_DeleteRecords_result_offsets(rd_kafka_event_DeleteRecords_result(rkev));
    rd_kafka_resp_err_t code =
        results != NULL && results->cnt == 1 ? results->elems[0].err : RD_KAFKA_RESP_ERR__BAD_MSG;
    rd_kafka_event_destroy(rkev);
    return code == RD_KAFKA_RESP_ERR_NO_ERROR ? KAFKA_OK : kafka_fail(err, admin->rk, code, topic);
}
