/* client - the clients of the helper threads: what blocks. Each belongs to one thread, is opened when first needed, opened anew after it could
 * not be, and closed when its thread rests: a client of librdkafka takes a thousandth of a core for nothing, most of it in a main thread that
 * spins through the last millisecond before each of its one-second timers. */
#include "tracker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct thread_keep {
    const tracker_config *config; /* does not change once threads run */
    tracker_token *token;
    kafka_admin *group, *tracker, *end, *stable;
    kafka_reader *reader;
    uint32_t group_token, tracker_token, end_token, stable_token, reader_token; /* versions that they have */
} thread_keep;

void *tracker_thread_new(const tracker_config *config, tracker_token *token)
{
    thread_keep *keep = tracker_alloc(sizeof *keep);
    keep->config = config;
    keep->token = token;
    return keep;
}

static void close_admin(kafka_admin **kept, uint32_t *seen)
{
    if (*kept) kafka_admin_destroy(*kept);
    *kept = NULL;
    *seen = 0;
}

void tracker_thread_rest(void *thread)
{
    thread_keep *keep = thread;
    close_admin(&keep->group, &keep->group_token);
    close_admin(&keep->tracker, &keep->tracker_token);
    close_admin(&keep->end, &keep->end_token);
    close_admin(&keep->stable, &keep->stable_token);
    if (keep->reader) kafka_reader_destroy(keep->reader);
    keep->reader = NULL;
    keep->reader_token = 0;
}

static kafka_property *props_of(const tracker_config *config, const kafka_property *before, size_t n_before,
                                const char *group, size_t *n)
{
    kafka_property *props = tracker_alloc((config->n_props + n_before + 2) * sizeof *props);
    if (n_before) memcpy(props, before, n_before * sizeof *props);
    memcpy(props + n_before, config->props, config->n_props * sizeof *props);
    *n = n_before + config->n_props;
    if (group) props[(*n)++] = (kafka_property){"group.id", group};
    return props;
}

static kafka_admin *admin(kafka_admin **kept, thread_keep *keep, uint32_t *seen, const char *group, kafka_error *err)
{
    size_t n;
    if (!*kept) {
        kafka_property *props = props_of(keep->config, NULL, 0, group, &n);
        if (kafka_admin_open(props, n, kept, err) != KAFKA_OK) *kept = NULL;
        free(props);
    }
    if (*kept && tracker_token_give_admin(keep->token, seen, *kept, err) != KAFKA_OK) return NULL;
    return *kept;
}

kafka_admin *tracker_group_admin(void *thread, kafka_error *err)
{
    thread_keep *keep = thread;
    return admin(&keep->group, keep, &keep->group_token, keep->config->group, err);
}

kafka_admin *tracker_tracker_admin(void *thread, kafka_error *err)
{
    thread_keep *keep = thread;
    return admin(&keep->tracker, keep, &keep->tracker_token, keep->config->tracker_group, err);
}

kafka_reader *tracker_reader(void *thread, kafka_error *err)
{
    static const kafka_property ours[] = {{"socket.nagle.disable", "true"},
                                          {"fetch.wait.max.ms", "100"},
                                          {"queued.min.messages", "10000"},
                                          {"queued.max.messages.kbytes", "16384"}};
    thread_keep *keep = thread;
    size_t n;
    if (!keep->reader) {
        kafka_property *props = props_of(keep->config, ours, sizeof ours / sizeof ours[0], NULL, &n);
        if (kafka_reader_open(props, n, &keep->reader, err) != KAFKA_OK) keep->reader = NULL;
        free(props);
    }
    if (keep->reader && tracker_token_give_reader(keep->token, &keep->reader_token, keep->reader, err) != KAFKA_OK)
        return NULL;
    return keep->reader;
}

kafka_admin *tracker_end_admin(void *thread, bool stable, kafka_error *err)
{
    thread_keep *keep = thread;
    kafka_admin **kept = stable ? &keep->stable : &keep->end;
    size_t n;
    if (!*kept) {
        kafka_property *props = props_of(keep->config, NULL, 0, keep->config->tracker_group, &n);
        props[n++] = (kafka_property){"isolation.level", stable ? "read_committed" : "read_uncommitted"};
        if (kafka_admin_open(props, n, kept, err) != KAFKA_OK) *kept = NULL;
        free(props);
    }
    uint32_t *seen = stable ? &keep->stable_token : &keep->end_token;
    if (*kept && tracker_token_give_admin(keep->token, seen, *kept, err) != KAFKA_OK) return NULL;
    return *kept;
}

kafka_txn *tracker_txn_open(const tracker_config *config, const char *markers, int32_t partition, kafka_error *err)
{
    static const kafka_property ours[] = {{"linger.ms", "1"},
                                          {"message.max.bytes", "100000000"},
                                          {"queue.buffering.max.messages", "100000"},
                                          {"queue.buffering.max.kbytes", "65536"}};
    size_t n, size = strlen(config->tracker_group) + strlen(markers) + 16;
    kafka_property *props = props_of(config, ours, sizeof ours / sizeof ours[0], NULL, &n);
    char *id = tracker_alloc(size);
    kafka_txn *txn = NULL;
    snprintf(id, size, "%s/%s/%d", config->tracker_group, markers, (int)partition);
    if (kafka_txn_open(props, n, id, (int)config->transaction_timeout_ms, &txn, err) != KAFKA_OK) txn = NULL;
    free(id);
    free(props);
    return txn;
}
