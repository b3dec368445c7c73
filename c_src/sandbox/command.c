/* command - see command.h for the grammar. */
#include "command.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

enum {
    TOPIC_MAX_BYTES = 249,
    GROUP_MAX_BYTES = 32767,
    PARTITIONS_MAX = 10000,
    ERRORS_MAX = 10000,
    RTT_MAX_MS = 3600 * 1000
};

/* The arguments of one request: where its terms are read, and what is wrong with them, if anything. */
typedef struct args {
    const char *buf;
    int at;
    int arity;
    const char *unknown; /* "unknown_api" or "unknown_error": the atom below is neither */
    char atom[MAXATOMLEN];
} args;

typedef struct command {
    const char *name;
    int arity;
    /* true: carried out, *err is what librdkafka said; false: the arguments are wrong, nothing was done */
    bool (*run)(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err);
} command;

static const struct {
    const char *name;
    int16_t key;
} apis[] = {
    {"produce", 0},
    {"fetch", 1},
    {"list_offsets", 2},
    {"offset_commit", 8},
    {"offset_fetch", 9},
    {"find_coordinator", 10},
    {"join_group", 11},
    {"heartbeat", 12},
    {"leave_group", 13},
    {"sync_group", 14},
    {"api_versions", 18},
    {"init_producer_id", 22},
    {"add_partitions_to_txn", 24},
    {"add_offsets_to_txn", 25},
    {"end_txn", 26},
    {"txn_offset_commit", 28},
};

static size_t get_be(const uint8_t *p, size_t bytes)
{
    size_t n = 0;
    while (bytes-- > 0) n = n << 8 | *p++;
    return n;
}

/* ei decodes without knowing where the buffer ends. So this walks the frame first: true when it is exactly one term of
 * the kinds that requests are made of. */
static bool one_whole_term(const uint8_t *body, size_t len)
{
    size_t at = 1, open = 1; /* behind the version byte, one term to come */
    while (open > 0) {
        if (at >= len) return false;
        uint8_t tag = body[at++];
        size_t left = len - at, head, n, bytes = 0, terms = 0;
        switch (tag) {
        case ERL_SMALL_INTEGER_EXT: head = 1; break;
        case ERL_INTEGER_EXT: head = 4; break;
        case ERL_NIL_EXT: head = 0; break;
        case ERL_SMALL_TUPLE_EXT:
        case ERL_SMALL_ATOM_UTF8_EXT:
        case ERL_SMALL_BIG_EXT: head = 1; break;
        case ERL_ATOM_EXT:
        case ERL_ATOM_UTF8_EXT:
        case ERL_STRING_EXT: head = 2; break;
        case ERL_LIST_EXT:
        case ERL_BINARY_EXT: head = 4; break;
        default: return false;
        }
        if (head > left) return false;
        n = get_be(body + at, head);
        if (tag == ERL_SMALL_TUPLE_EXT)
            terms = n;
        else if (tag == ERL_LIST_EXT)
            terms = n + 1; /* and the tail */
        else if (tag == ERL_SMALL_BIG_EXT)
            bytes = n + 1; /* and the sign */
        else if (tag != ERL_SMALL_INTEGER_EXT && tag != ERL_INTEGER_EXT)
            bytes = n;
        if (bytes > left - head || terms > left - head) return false;
        at += head + bytes;
        open += terms - 1;
    }
    return at == len;
}

static bool get_int(args *a, long min, long max, int32_t *value)
{
    long n;
    if (ei_decode_long(a->buf, &a->at, &n) < 0 || n < min || n > max) return false;
    *value = (int32_t)n;
    return true;
}

static bool get_broker(args *a, int32_t *broker) { return get_int(a, -1, INT32_MAX, broker); }

/* A binary of 1 to max bytes without NUL, as a C string. */
static bool get_text(args *a, char *text, size_t max)
{
    int type, size;
    long len;
    if (ei_get_type(a->buf, &a->at, &type, &size) < 0 || type != ERL_BINARY_EXT) return false;
    if (size < 1 || (size_t)size > max || ei_decode_binary(a->buf, &a->at, text, &len) < 0) return false;
    text[len] = '\0';
    return strlen(text) == (size_t)len;
}

static bool get_topic(args *a, char topic[TOPIC_MAX_BYTES + 1])
{
    if (!get_text(a, topic, TOPIC_MAX_BYTES)) return false;
    for (const char *c = topic; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr("._-", *c)) return false;
    return true;
}

static bool get_api(args *a, int16_t *key)
{
    if (ei_decode_atom(a->buf, &a->at, a->atom) < 0) return false;
    for (size_t i = 0; i < sizeof apis / sizeof apis[0]; i++) {
        if (strcmp(apis[i].name, a->atom) == 0) {
            *key = apis[i].key;
            return true;
        }
    }
    a->unknown = "unknown_api";
    return false;
}

static bool same_name(const char *upper, const char *lower)
{
    while (*upper && tolower((unsigned char)*upper) == *lower) upper++, lower++;
    return !*upper && !*lower;
}

static bool get_error(args *a, rd_kafka_resp_err_t *err)
{
    const struct rd_kafka_err_desc *descs;
    size_t count;
    if (ei_decode_atom(a->buf, &a->at, a->atom) < 0) return false;
    if (strcmp(a->atom, "no_error") == 0) {
        *err = RD_KAFKA_RESP_ERR_NO_ERROR;
        return true;
    }
    rd_kafka_get_err_descs(&descs, &count);
    /* Kafka's own errors first: `unknown` and the like exist with and without an underscore */
    for (int local = 0; local <= 1; local++) {
        for (size_t i = 0; i < count; i++) {
            const char *name = descs[i].name;
            if (!name || (local && *name != '_')) continue;
            if (same_name(local ? name + 1 : name, a->atom)) {
                *err = descs[i].code;
                return true;
            }
        }
    }
    a->unknown = "unknown_error";
    return false;
}

/* Length of a list to come, its head read. A list of small integers in string form cannot be one of ours. */
static bool get_list(args *a, int *length)
{
    return ei_decode_list_header(a->buf, &a->at, length) == 0 && *length >= 0 && *length <= ERRORS_MAX;
}

static bool create_topic(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    char topic[TOPIC_MAX_BYTES + 1];
    int32_t partitions;
    if (!get_topic(a, topic) || !get_int(a, 1, PARTITIONS_MAX, &partitions)) return false;
    *err = rd_kafka_mock_topic_create(cluster, topic, partitions, 1);
    return true;
}

static bool broker_down(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    int32_t broker;
    if (!get_broker(a, &broker)) return false;
    *err = rd_kafka_mock_broker_set_down(cluster, broker);
    return true;
}

static bool broker_up(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    int32_t broker;
    if (!get_broker(a, &broker)) return false;
    *err = rd_kafka_mock_broker_set_up(cluster, broker);
    return true;
}

static bool rtt(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    int32_t broker, ms;
    if (!get_broker(a, &broker) || !get_int(a, 0, RTT_MAX_MS, &ms)) return false;
    *err = rd_kafka_mock_broker_set_rtt(cluster, broker, ms);
    return true;
}

/* Errors are pushed only when the whole list has been understood: it is read twice. */
static bool request_errors(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    int16_t api;
    int length;
    rd_kafka_resp_err_t error;
    if (!get_api(a, &api) || !get_list(a, &length)) return false;
    int first = a->at;
    for (int i = 0; i < length; i++)
        if (!get_error(a, &error)) return false;

    *err = RD_KAFKA_RESP_ERR_NO_ERROR;
    if (length == 0) rd_kafka_mock_clear_request_errors(cluster, api);
    a->at = first;
    for (int i = 0; i < length && get_error(a, &error); i++)
        rd_kafka_mock_push_request_errors_array(cluster, api, 1, &error);
    return true;
}

static bool get_error_and_ms(args *a, rd_kafka_resp_err_t *error, int32_t *ms)
{
    int arity;
    return ei_decode_tuple_header(a->buf, &a->at, &arity) == 0 && arity == 2 && get_error(a, error) &&
           get_int(a, 0, RTT_MAX_MS, ms);
}

static bool broker_request_errors(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    int32_t broker, ms;
    int16_t api;
    int length;
    rd_kafka_resp_err_t error;
    if (!get_broker(a, &broker) || !get_api(a, &api) || !get_list(a, &length)) return false;
    int first = a->at;
    for (int i = 0; i < length; i++)
        if (!get_error_and_ms(a, &error, &ms)) return false;

    *err = RD_KAFKA_RESP_ERR_NO_ERROR;
    a->at = first;
    for (int i = 0; i < length && !*err && get_error_and_ms(a, &error, &ms); i++)
        *err = rd_kafka_mock_broker_push_request_error_rtts(cluster, broker, api, 1, error, ms);
    return true;
}

static bool topic_error(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    char topic[TOPIC_MAX_BYTES + 1];
    rd_kafka_resp_err_t error;
    if (!get_topic(a, topic) || !get_error(a, &error)) return false;
    rd_kafka_mock_topic_set_error(cluster, topic, error);
    *err = RD_KAFKA_RESP_ERR_NO_ERROR;
    return true;
}

static bool coordinator(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    char group[GROUP_MAX_BYTES + 1];
    int32_t broker;
    if (!get_text(a, group, GROUP_MAX_BYTES) || !get_broker(a, &broker)) return false;
    *err = rd_kafka_mock_coordinator_set(cluster, "group", group, broker);
    return true;
}

static bool partition_leader(rd_kafka_mock_cluster_t *cluster, args *a, rd_kafka_resp_err_t *err)
{
    char topic[TOPIC_MAX_BYTES + 1];
    int32_t partition, broker;
    if (!get_topic(a, topic) || !get_int(a, 0, PARTITIONS_MAX, &partition) || !get_broker(a, &broker)) return false;
    *err = rd_kafka_mock_partition_set_leader(cluster, topic, partition, broker);
    return true;
}

static const command commands[] = {
    {"create_topic", 2, create_topic},
    {"broker_down", 1, broker_down},
    {"broker_up", 1, broker_up},
    {"rtt", 2, rtt},
    {"request_errors", 2, request_errors},
    {"broker_request_errors", 3, broker_request_errors},
    {"topic_error", 2, topic_error},
    {"coordinator", 2, coordinator},
    {"partition_leader", 3, partition_leader},
};

static int put_error_head(ei_x_buff *x) { return ei_x_encode_tuple_header(x, 2) | ei_x_encode_atom(x, "error"); }

static int put_kafka(ei_x_buff *x, rd_kafka_resp_err_t err)
{
    const char *name = rd_kafka_err2name(err), *text = rd_kafka_err2str(err);
    if (!err) return ei_x_encode_atom(x, "ok");
    return put_error_head(x) | ei_x_encode_tuple_header(x, 4) | ei_x_encode_atom(x, "kafka") |
           ei_x_encode_binary(x, name, (int)strlen(name)) | ei_x_encode_long(x, (long)err) |
           ei_x_encode_binary(x, text, (int)strlen(text));
}

static int put_refusal(ei_x_buff *x, const args *a)
{
    if (!a->unknown) return put_error_head(x) | ei_x_encode_atom(x, "badarg");
    return put_error_head(x) | ei_x_encode_tuple_header(x, 2) | ei_x_encode_atom(x, a->unknown) |
           ei_x_encode_atom(x, a->atom);
}

static const command *find(const char *name)
{
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

int sandbox_command(rd_kafka_mock_cluster_t *cluster, const uint8_t *body, size_t len, ei_x_buff *reply)
{
    args a = {.buf = (const char *)body};
    int version, arity;
    long id;
    char name[MAXATOMLEN];
    rd_kafka_resp_err_t err = RD_KAFKA_RESP_ERR_NO_ERROR;

    if (len < 2 || !one_whole_term(body, len) || ei_decode_version(a.buf, &a.at, &version) < 0) return -1;
    if (ei_decode_tuple_header(a.buf, &a.at, &arity) < 0 || arity != 3 || ei_decode_long(a.buf, &a.at, &id) < 0 ||
        ei_decode_atom(a.buf, &a.at, name) < 0)
        return -1;

    reply->index = 0;
    int rc = ei_x_encode_version(reply) | ei_x_encode_tuple_header(reply, 2) | ei_x_encode_long(reply, id);
    const command *c = find(name);
    if (!c)
        rc |= put_error_head(reply) | ei_x_encode_atom(reply, "unknown_command");
    else if (ei_decode_tuple_header(a.buf, &a.at, &a.arity) < 0 || a.arity != c->arity || !c->run(cluster, &a, &err))
        rc |= put_refusal(reply, &a);
    else
        rc |= put_kafka(reply, err);
    return rc ? -1 : 0;
}
