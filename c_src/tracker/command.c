/* command - the protocol of the tracker, {packet, 4} frames of external terms on stdin and (privately kept) stdout.
 *
 *   first frame     {0, {ready, 1}}                              1 = the protocol's version
 *   in              {Id, Command, Args}                          Id: an integer > 0
 *   out             {Id, Reply}                                  one for each command, in any order
 *                   {0, {event, Name, #{...}}}                   unsolicited
 *
 *   configure       #{props := [{Name, Value}],                  librdkafka's properties; secrets travel here, never in argv
 *                     group := Bin, tracker_group := Bin, queues := [#{topic := Bin, markers := Bin, dead_letters := Bin, copies := Bin}],
 *                     instance => Bin, format => range | kmq, max_redeliveries => N, dead_letter_oversize => wait | pointer, backoff => Bin, count_header => Bin, rate => N,
 *                     checkpoint_records => N, checkpoint_pause_ms => Ms, checkpoint_age_ms => Ms, trim_markers => true | false, trim_records => N,
 *                     witness_ms => Ms, redelivery => idempotent | transactional, transaction_timeout_ms => Ms}
 *                                                                -> ok | {error, already_configured | {badarg, Field}}
 *   token           #{token := Bin, expires_ms := Ms since 1970, principal := Bin, extensions => [{Name, Value}]}
 *                                                                -> ok | {error, {badarg, Field}}; before configure and whenever wanted
 *   info            _                                            -> #{state, uptime_ms, partitions => [#{...}], ...}
 *   ping            _                                            -> pong
 *   stop            _                                            -> ok, when commits are made and the group is left; then wait for exit
 *   anything else                                                -> {error, unknown_command}
 *
 *   Events: token (an OAUTHBEARER token is wanted: told again every 10 s until it comes); started; assigned, revoked #{partitions => [{MarkerTopic, P}]}; ready #{topic, partition, open, markers, loaded, ms};
 *   checkpoint #{topic, partition, as_of, open, parts, bytes};
 *   redelivered, dead_lettered #{topic, partition, cause, count, lateness_ms (mean), lateness_max_ms, lateness_min_ms};
 *   gone #{topic, partition, count, offset}; malformed #{topic, partition, malformed, foreign, offset}, late_acks #{topic, partition, count} (counts since the last one);
 *   marker_gap #{topic, partition, from, to, open, reason (retention | no_commit | no_checkpoint | recreated)}; alarm #{reason, topic, partition, text} (at most every 30 s each); error #{name, code,
 *   retriable, fatal, text}; passing: the same with reason, for what is tried again and no alarm before 30 s; outage: the same as error, told once until connected #{ms}; log #{level, text}; gauges #{in_flight, waiting, partitions => [#{topic, partition, open, lag,
 *   oldest_age_ms, next_due_ms, due, checkpoint_age_ms, checkpoint_as_of}]} each second (-1: does not apply). Sums are told every 100 ms. Events are dropped, replies never, when nobody reads them.
 *
 *   Options that are not known are skipped. A frame that is not a command ends the program (status 1, a line on stderr). */
#include "command.h"

#include <stdlib.h>
#include <string.h>

#include "term.h"

enum { NAME_MAX_BYTES = MAXATOMLEN_UTF8, PROPS_MAX = 10000, QUEUES_MAX = 10000 };

int tracker_command_decode(const uint8_t *frame, size_t len, tracker_command *out)
{
    if (!tracker_term_check(frame, len)) return -1;
    const char *bytes = (const char *)frame;
    int at = 0, version, arity;
    long long id;
    char name[NAME_MAX_BYTES];
    if (ei_decode_version(bytes, &at, &version) || ei_decode_tuple_header(bytes, &at, &arity) || arity != 3) return -1;
    if (ei_decode_longlong(bytes, &at, &id) || id <= 0) return -1;
    if (ei_decode_atom_as(bytes, &at, name, sizeof name, ERLANG_UTF8, NULL, NULL)) return -1;
    static const struct {
        const char *name;
        tracker_verb verb;
    } verbs[] = {
        {"configure", TRACKER_CONFIGURE}, {"token", TRACKER_TOKEN}, {"info", TRACKER_INFO},
        {"ping", TRACKER_PING},           {"stop", TRACKER_STOP},
    };
    *out = (tracker_command){.id = id, .verb = TRACKER_UNKNOWN, .args = bytes, .at = at};
    for (size_t i = 0; i < sizeof verbs / sizeof verbs[0]; i++)
        if (strcmp(name, verbs[i].name) == 0) out->verb = verbs[i].verb;
    return 0;
}

/* ------------------------------------------------------------------ configure */

/* A binary without NUL as an owned string; NULL when it is something else. */
static char *take_text(const char *bytes, int *at)
{
    int type, size;
    if (ei_get_type(bytes, at, &type, &size) || type != ERL_BINARY_EXT) return NULL;
    char *text = malloc((size_t)size + 1);
    long n;
    if (!text) return NULL;
    if (ei_decode_binary(bytes, at, text, &n) || memchr(text, 0, (size_t)n)) {
        free(text);
        return NULL;
    }
    text[n] = 0;
    return text;
}

static bool set_text(const char *bytes, int *at, char **field)
{
    char *text = take_text(bytes, at);
    if (!text) return false;
    free(*field);
    *field = text;
    return true;
}

static bool set_spacing(const char *bytes, int *at, tracker_spacing *field)
{
    char *text = take_text(bytes, at);
    bool ok = text && tracker_spacing_parse(text, field);
    free(text);
    return ok;
}

static bool set_number(const char *bytes, int *at, int64_t *field)
{
    long long number;
    if (ei_decode_longlong(bytes, at, &number) || number < 0) return false;
    *field = number;
    return true;
}

/* A proper list of at most `most`; leaves `at` at the first element. An empty one is nil and has no tail. */
static int list_begin(const char *bytes, int *at, int most)
{
    int n;
    if (ei_decode_list_header(bytes, at, &n) || n > most) return -1;
    return n;
}

static bool list_end(const char *bytes, int *at, int n)
{
    int tail;
    return n == 0 || (ei_decode_list_header(bytes, at, &tail) == 0 && tail == 0);
}

/* What has been taken when it fails is in *props, too. */
static bool set_props(const char *bytes, int *at, kafka_property **props, size_t *n_props)
{
    if (*props) return false;
    int n = list_begin(bytes, at, PROPS_MAX);
    if (n < 0) return false;
    *props = calloc((size_t)n + 1, sizeof **props);
    if (!*props) return false;
    for (int i = 0; i < n; i++) {
        int arity;
        if (ei_decode_tuple_header(bytes, at, &arity) || arity != 2) return false;
        kafka_property *p = &(*props)[(*n_props)++];
        if (!(p->name = take_text(bytes, at)) || !(p->value = take_text(bytes, at))) return false;
    }
    return list_end(bytes, at, n);
}

static bool key_of(const char *bytes, int *at, char key[NAME_MAX_BYTES])
{
    return ei_decode_atom_as(bytes, at, key, NAME_MAX_BYTES, ERLANG_UTF8, NULL, NULL) == 0;
}

static bool set_queue(const char *bytes, int *at, tracker_queue_config *queue)
{
    int pairs;
    if (ei_decode_map_header(bytes, at, &pairs)) return false;
    for (int i = 0; i < pairs; i++) {
        char key[NAME_MAX_BYTES];
        if (!key_of(bytes, at, key)) return false;
        char **field = strcmp(key, "topic") == 0          ? &queue->topic
                       : strcmp(key, "markers") == 0      ? &queue->markers
                       : strcmp(key, "dead_letters") == 0 ? &queue->dead_letters
                       : strcmp(key, "copies") == 0       ? &queue->copies
                                                          : NULL;
        if (field ? !set_text(bytes, at, field) : ei_skip_term(bytes, at) != 0) return false;
    }
    return queue->topic && queue->markers && queue->dead_letters && queue->copies;
}

static bool set_queues(const char *bytes, int *at, tracker_config *config)
{
    if (config->queues) return false;
    int n = list_begin(bytes, at, QUEUES_MAX);
    if (n <= 0) return false;
    config->queues = calloc((size_t)n, sizeof *config->queues);
    if (!config->queues) return false;
    for (int i = 0; i < n; i++) {
        config->n_queues++;
        if (!set_queue(bytes, at, &config->queues[i])) return false;
    }
    return list_end(bytes, at, n);
}

static bool set_flag(const char *bytes, int *at, const char *yes, const char *no, bool *field)
{
    char name[NAME_MAX_BYTES];
    if (!key_of(bytes, at, name)) return false;
    *field = strcmp(name, yes) == 0;
    return *field || strcmp(name, no) == 0;
}

void tracker_config_defaults(tracker_config *config)
{
    *config = (tracker_config){.max_redeliveries = 3,
                               .rate = 10000,
                               .checkpoint_records = 20000,
                               .checkpoint_pause_ms = 5000,
                               .checkpoint_age_ms = 300000,
                               .transaction_timeout_ms = 10000,
                               .witness_ms = 5000,
                               .trim_records = 10000};
}

const char *tracker_config_decode(const tracker_command *command, tracker_config *config)
{
    const char *bytes = command->args, *wrong = "args";
    int at = command->at, pairs;
    tracker_config_defaults(config);
    if (ei_decode_map_header(bytes, &at, &pairs)) return wrong;
    for (int i = 0; i < pairs; i++) {
        char key[NAME_MAX_BYTES];
        wrong = "args";
        if (!key_of(bytes, &at, key)) goto fail;
        bool ok;
        if (strcmp(key, "props") == 0)
            wrong = "props", ok = set_props(bytes, &at, &config->props, &config->n_props);
        else if (strcmp(key, "group") == 0)
            wrong = "group", ok = set_text(bytes, &at, &config->group);
        else if (strcmp(key, "tracker_group") == 0)
            wrong = "tracker_group", ok = set_text(bytes, &at, &config->tracker_group);
        else if (strcmp(key, "count_header") == 0)
            wrong = "count_header", ok = set_text(bytes, &at, &config->count_header);
        else if (strcmp(key, "instance") == 0)
            wrong = "instance", ok = set_text(bytes, &at, &config->instance);
        else if (strcmp(key, "format") == 0)
            wrong = "format", ok = set_flag(bytes, &at, "kmq", "range", &config->kmq_format);
        else if (strcmp(key, "dead_letter_oversize") == 0)
            wrong = "dead_letter_oversize", ok = set_flag(bytes, &at, "pointer", "wait", &config->pointer);
        else if (strcmp(key, "max_redeliveries") == 0)
            wrong = "max_redeliveries", ok = set_number(bytes, &at, &config->max_redeliveries);
        else if (strcmp(key, "backoff") == 0)
            wrong = "backoff", ok = set_spacing(bytes, &at, &config->spacing);
        else if (strcmp(key, "rate") == 0)
            wrong = "rate", ok = set_number(bytes, &at, &config->rate);
        else if (strcmp(key, "trim_markers") == 0)
            wrong = "trim_markers", ok = set_flag(bytes, &at, "true", "false", &config->trim);
        else if (strcmp(key, "checkpoint_records") == 0)
            wrong = "checkpoint_records", ok = set_number(bytes, &at, &config->checkpoint_records);
        else if (strcmp(key, "checkpoint_pause_ms") == 0)
            wrong = "checkpoint_pause_ms", ok = set_number(bytes, &at, &config->checkpoint_pause_ms);
        else if (strcmp(key, "checkpoint_age_ms") == 0)
            wrong = "checkpoint_age_ms", ok = set_number(bytes, &at, &config->checkpoint_age_ms);
        else if (strcmp(key, "witness_ms") == 0)
            wrong = "witness_ms", ok = set_number(bytes, &at, &config->witness_ms);
        else if (strcmp(key, "redelivery") == 0)
            wrong = "redelivery", ok = set_flag(bytes, &at, "transactional", "idempotent", &config->transactional);
        else if (strcmp(key, "transaction_timeout_ms") == 0)
            wrong = "transaction_timeout_ms", ok = set_number(bytes, &at, &config->transaction_timeout_ms);
        else if (strcmp(key, "trim_records") == 0)
            wrong = "trim_records", ok = set_number(bytes, &at, &config->trim_records);
        else if (strcmp(key, "queues") == 0)
            wrong = "queues", ok = set_queues(bytes, &at, config);
        else
            ok = ei_skip_term(bytes, &at) == 0;
        if (!ok) goto fail;
    }
    if (!config->count_header) {
        config->count_header = malloc(sizeof "kmq-redelivery-count");
        if (config->count_header) memcpy(config->count_header, "kmq-redelivery-count", sizeof "kmq-redelivery-count");
    }
    wrong = !config->props           ? "props"
            : !config->group         ? "group"
            : !config->tracker_group ? "tracker_group"
            : !config->queues        ? "queues"
            : !config->count_header  ? "count_header"
                                     : NULL;
    if (!wrong) return NULL;
fail:
    tracker_config_free(config);
    return wrong;
}

const char *tracker_token_decode(const tracker_command *command, kafka_token *out)
{
    const char *bytes = command->args, *wrong = "args";
    int at = command->at, pairs;
    char *token = NULL, *principal = NULL;
    kafka_property *extensions = NULL;
    *out = (kafka_token){.token = NULL};
    bool ok = ei_decode_map_header(bytes, &at, &pairs) == 0;
    for (int i = 0; ok && i < pairs; i++) {
        char key[NAME_MAX_BYTES];
        wrong = "args";
        if (!key_of(bytes, &at, key))
            ok = false;
        else if (strcmp(key, "token") == 0)
            wrong = "token", ok = set_text(bytes, &at, &token) && token[0];
        else if (strcmp(key, "expires_ms") == 0)
            wrong = "expires_ms", ok = set_number(bytes, &at, &out->expires_ms);
        else if (strcmp(key, "principal") == 0)
            wrong = "principal", ok = set_text(bytes, &at, &principal);
        else if (strcmp(key, "extensions") == 0)
            wrong = "extensions", ok = set_props(bytes, &at, &extensions, &out->n_extensions);
        else
            ok = ei_skip_term(bytes, &at) == 0;
    }
    if (ok) wrong = !token ? "token" : !principal ? "principal" : !out->expires_ms ? "expires_ms" : NULL;
    out->token = token;
    out->principal = principal;
    out->extensions = extensions;
    return wrong;
}

void tracker_config_free(tracker_config *config)
{
    for (size_t i = 0; i < config->n_props; i++) {
        free((void *)(uintptr_t)config->props[i].name);
        free((void *)(uintptr_t)config->props[i].value);
    }
    for (size_t i = 0; i < config->n_queues; i++) {
        free(config->queues[i].topic);
        free(config->queues[i].markers);
        free(config->queues[i].dead_letters);
        free(config->queues[i].copies);
    }
    free(config->props);
    free(config->queues);
    free(config->group);
    free(config->tracker_group);
    free(config->count_header);
    free(config->instance);
    *config = (tracker_config){0};
}

/* ------------------------------------------------------------------ out
 * A failed ei_x_encode_* means no memory; the state is rebuilt from the marker topic, so the program ends instead of limping. */

static void need(int rc)
{
    if (rc) abort();
}

void tracker_put_atom(ei_x_buff *out, const char *atom) { need(ei_x_encode_atom_len(out, atom, (int)strlen(atom))); }
void tracker_put_int(ei_x_buff *out, int64_t number) { need(ei_x_encode_longlong(out, number)); }
void tracker_put_bytes(ei_x_buff *out, const void *bytes, size_t n) { need(ei_x_encode_binary(out, bytes, (int)n)); }

void tracker_put_text(ei_x_buff *out, const char *text)
{
    if (text)
        tracker_put_bytes(out, text, strlen(text));
    else
        tracker_put_atom(out, "nil");
}

void tracker_pair_atom(ei_x_buff *out, const char *key, const char *atom)
{
    tracker_put_atom(out, key);
    tracker_put_atom(out, atom);
}

void tracker_pair_int(ei_x_buff *out, const char *key, int64_t number)
{
    tracker_put_atom(out, key);
    tracker_put_int(out, number);
}

void tracker_pair_text(ei_x_buff *out, const char *key, const char *text)
{
    tracker_put_atom(out, key);
    tracker_put_text(out, text);
}

static void begin(ei_x_buff *out)
{
    out->index = 0;
    need(ei_x_encode_version(out));
    need(ei_x_encode_tuple_header(out, 2));
}

void tracker_reply_begin(ei_x_buff *out, int64_t id)
{
    begin(out);
    tracker_put_int(out, id);
}

void tracker_event_begin(ei_x_buff *out, const char *name, int pairs)
{
    begin(out);
    tracker_put_int(out, 0);
    need(ei_x_encode_tuple_header(out, 3));
    tracker_put_atom(out, "event");
    tracker_put_atom(out, name);
    need(ei_x_encode_map_header(out, pairs));
}
