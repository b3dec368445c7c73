/* settings - see settings.h. */
#include "settings.h"

#include "http.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { LINE_BYTES = 8192, SECRET_BYTES = 65536 };

static char why[LINE_BYTES + 256];

static const char *wrong(const char *path, int line, const char *format, ...)
{
    va_list args;
    int n = line ? snprintf(why, sizeof why, "%s:%d: ", path, line) : snprintf(why, sizeof why, "%s: ", path);
    if (n < 0 || (size_t)n >= sizeof why) return path;
    va_start(args, format);
    vsnprintf(why + n, sizeof why - (size_t)n, format, args);
    va_end(args);
    return why;
}

static char *joined(const char *a, const char *b, const char *c, const char *d)
{
    size_t n = strlen(a) + strlen(b) + strlen(c) + strlen(d) + 1;
    char *text = malloc(n);
    if (text) snprintf(text, n, "%s%s%s%s", a, b, c, d);
    return text;
}

static char *strip(char *text)
{
    while (isspace((unsigned char)*text)) text++;
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) text[--n] = 0;
    return text;
}

/* ------------------------------------------------------------------ values */

static char *file_content(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = file ? calloc(1, SECRET_BYTES + 1) : NULL;
    if (text) {
        size_t n = fread(text, 1, SECRET_BYTES, file);
        bool bad = ferror(file) || memchr(text, 0, n);
        while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r')) text[--n] = 0;
        if (bad) free(text), text = NULL;
    }
    if (file) fclose(file);
    return text;
}

/* An owned copy of what the value stands for; NULL when it stands for nothing. */
static char *resolved(const char *value)
{
    errno = 0;
    if (strncmp(value, "file:", 5) == 0) return file_content(value + 5);
    if (strncmp(value, "env:", 4) == 0) {
        value = getenv(value + 4);
        if (!value) return NULL;
    }
    return strdup(value);
}

/* Right after resolved() has given NULL. A name, but never what it names, is told. */
static const char *unresolved(const char *path, int line, const char *key, const char *value)
{
    int error = errno;
    if (strncmp(value, "env:", 4) == 0) return wrong(path, line, "%s: %s is not in the environment", key, value + 4);
    if (strncmp(value, "file:", 5) == 0)
        return wrong(path, line, "%s: %s: %s", key, value + 5,
                     error ? strerror(error) : "cannot be read, or is no text");
    return wrong(path, line, "%s: no memory", key);
}

static bool number(const char *value, int64_t least, int64_t *out)
{
    char *end;
    errno = 0;
    long long n = strtoll(value, &end, 10);
    if (errno || end == value || *end || n < least) return false;
    *out = n;
    return true;
}

static bool flag(const char *value, const char *yes, const char *no, bool *out)
{
    *out = strcmp(value, yes) == 0;
    return *out || strcmp(value, no) == 0;
}

/* ------------------------------------------------------------------ keys */

typedef struct reading {
    tracker_settings *settings;
    size_t cap_props, cap_queues;
    uint32_t seen;      /* keys that may come once */
    char expected[128]; /* of a value that was BAD */
    kafka_error error;
} reading;

static bool prop_add(reading *r, const char *name, char *value)
{
    tracker_config *config = &r->settings->config;
    if (config->n_props == r->cap_props) {
        size_t cap = r->cap_props ? 2 * r->cap_props : 16;
        kafka_property *grown = realloc(config->props, cap * sizeof *grown);
        if (!grown) return false;
        config->props = grown;
        r->cap_props = cap;
    }
    char *own = strdup(name);
    if (!own) return false;
    config->props[config->n_props++] = (kafka_property){own, value};
    return true;
}

static tracker_queue_config *queue_of(tracker_config *config, const char *topic, size_t len)
{
    for (size_t i = 0; i < config->n_queues; i++)
        if (strlen(config->queues[i].topic) == len && memcmp(config->queues[i].topic, topic, len) == 0)
            return &config->queues[i];
    return NULL;
}

static bool queue_add(reading *r, char *topic)
{
    tracker_config *config = &r->settings->config;
    if (config->n_queues == r->cap_queues) {
        size_t cap = r->cap_queues ? 2 * r->cap_queues : 4;
        tracker_queue_config *grown = realloc(config->queues, cap * sizeof *grown);
        if (!grown) return false;
        config->queues = grown;
        r->cap_queues = cap;
    }
    config->queues[config->n_queues++] = (tracker_queue_config){.topic = topic};
    return true;
}

/* "queue.<topic>.<field>", where the topic may hold dots. */
static char **queue_field(tracker_config *config, const char *key)
{
    const char *dot = strrchr(key, '.');
    tracker_queue_config *queue = dot > key + 6 ? queue_of(config, key + 6, (size_t)(dot - key - 6)) : NULL;
    if (!queue) return NULL;
    return strcmp(dot, ".markers") == 0        ? &queue->markers
           : strcmp(dot, ".dead_letters") == 0 ? &queue->dead_letters
           : strcmp(dot, ".copies") == 0       ? &queue->copies
                                               : NULL;
}

/* Is it queue_field's, though there may be no such queue? */
static bool queue_key(const char *key)
{
    const char *dot = strrchr(key, '.');
    return strncmp(key, "queue.", 6) == 0 && dot > key + 6 &&
           (strcmp(dot, ".markers") == 0 || strcmp(dot, ".dead_letters") == 0 || strcmp(dot, ".copies") == 0);
}

typedef enum outcome { GOOD, UNKNOWN, BAD, TWICE, NO_TOPIC, NO_QUEUE, NO_PROPERTY, NO_MEMORY } outcome;

#define TOPIC_RULE "a topic's name has 1 to 249 of the characters a-z A-Z 0-9 . _ - and is not . or .."

static bool topic_name(const char *name)
{
    size_t n = strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-");
    return n > 0 && n <= 249 && !name[n] && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

static outcome set_text(char **field, char **value)
{
    if (*field) return TWICE;
    *field = *value;
    *value = NULL;
    return GOOD;
}

/* The value is taken (and *value made NULL) or stays the caller's. */
static outcome set(reading *r, const char *key, char **value)
{
    tracker_settings *settings = r->settings;
    tracker_config *config = &settings->config;
    const struct {
        const char *key;
        int64_t least, *number;
    } numbers[] = {{"max_redeliveries", 0, &config->max_redeliveries},
                   {"rate", 0, &config->rate},
                   {"checkpoint_records", 1, &config->checkpoint_records},
                   {"checkpoint_pause_ms", 1, &config->checkpoint_pause_ms},
                   {"checkpoint_age_ms", 1, &config->checkpoint_age_ms},
                   {"trim_records", 1, &config->trim_records},
                   {"transaction_timeout_ms", 1000, &config->transaction_timeout_ms},
                   {"metrics_interval_ms", 100, &settings->metrics_interval_ms},
                   {"metrics_port", 1, &settings->metrics_port},
                   {"log_level", 0, &settings->log_level}};
    const struct {
        const char *key, *yes, *no;
        bool *flag;
    } flags[] = {{"format", "kmq", "range", &config->kmq_format},
                 {"dead_letter_oversize", "pointer", "wait", &config->pointer},
                 {"redelivery", "transactional", "idempotent", &config->transactional},
                 {"trim_markers", "true", "false", &config->trim},
                 {"log", "json", "text", &settings->json}};
    enum { NUMBERS = sizeof numbers / sizeof numbers[0], FLAGS = sizeof flags / sizeof flags[0] };
    for (unsigned i = 0; i < NUMBERS + FLAGS; i++) {
        if (strcmp(key, i < NUMBERS ? numbers[i].key : flags[i - NUMBERS].key) != 0) continue;
        if (r->seen & 1u << i) return TWICE;
        r->seen |= 1u << i;
        if (i < NUMBERS) {
            snprintf(r->expected, sizeof r->expected, "a whole number from %lld on", (long long)numbers[i].least);
            return number(*value, numbers[i].least, numbers[i].number) ? GOOD : BAD;
        }
        const char *yes = flags[i - NUMBERS].yes, *no = flags[i - NUMBERS].no;
        snprintf(r->expected, sizeof r->expected, "%s or %s", yes, no);
        return flag(*value, yes, no, flags[i - NUMBERS].flag) ? GOOD : BAD;
    }
    if (strncmp(key, "kafka.", 6) == 0 && key[6]) {
        for (size_t i = 0; i < config->n_props; i++)
            if (strcmp(config->props[i].name, key + 6) == 0) return TWICE;
        /* found out by a client, it would be an alarm for ever; "?" would make it optional */
        if (key[6] == '?') return UNKNOWN;
        if (kafka_property_check(&(kafka_property){key + 6, *value}, &r->error) != KAFKA_OK) return NO_PROPERTY;
        if (!prop_add(r, key + 6, *value)) return NO_MEMORY;
        *value = NULL;
        return GOOD;
    }
    if (strcmp(key, "queue") == 0) {
        if (queue_of(config, *value, strlen(*value))) return TWICE;
        if (!topic_name(*value)) return NO_TOPIC;
        if (!queue_add(r, *value)) return NO_MEMORY;
        *value = NULL;
        return GOOD;
    }
    if (strcmp(key, "backoff") == 0) {
        if (config->spacing.given) return TWICE;
        snprintf(
            r->expected, sizeof r->expected,
            "exponential MIN MAX FACTOR JITTER, linear MIN MAX STEP JITTER, or list JITTER MS MS ...; jitter 0 to 1");
        return tracker_spacing_parse(*value, &config->spacing) ? GOOD : BAD;
    }
    char **text = strcmp(key, "group") == 0           ? &config->group
                  : strcmp(key, "tracker_group") == 0 ? &config->tracker_group
                  : strcmp(key, "count_header") == 0  ? &config->count_header
                  : strcmp(key, "metrics_file") == 0  ? &settings->metrics_file
                  : strcmp(key, "token_file") == 0    ? &settings->token_file
                  : strncmp(key, "queue.", 6) == 0    ? queue_field(config, key)
                                                      : NULL;
    if (!text && queue_key(key)) return NO_QUEUE;
    if (text && strncmp(key, "queue.", 6) == 0 && !topic_name(*value)) return NO_TOPIC;
    return text ? set_text(text, value) : UNKNOWN;
}

/* ------------------------------------------------------------------ the whole */

static const char *prop(const tracker_config *config, const char *name)
{
    for (size_t i = 0; i < config->n_props; i++)
        if (strcmp(config->props[i].name, name) == 0) return config->props[i].value;
    return "";
}

/* A mechanism that needs tokens, and nobody who gives any: without, nothing would ever connect, and nothing say so. */
static bool tokenless(const tracker_settings *settings)
{
    const tracker_config *config = &settings->config;
    bool bearer = strcasecmp(prop(config, "sasl.mechanism"), "OAUTHBEARER") == 0 ||
                  strcasecmp(prop(config, "sasl.mechanisms"), "OAUTHBEARER") == 0;
    return bearer && !settings->token_file && strcmp(prop(config, "sasl.oauthbearer.method"), "oidc") != 0 &&
           strcmp(prop(config, "enable.sasl.oauthbearer.unsecure.jwt"), "true") != 0;
}

/* NULL, or the name of what is missing. */
static const char *complete(tracker_config *config)
{
    if (!*prop(config, "bootstrap.servers") && !*prop(config, "metadata.broker.list")) return "kafka.bootstrap.servers";
    if (!config->group || !config->group[0]) return "group";
    if (config->n_queues == 0) return "queue";
    if (!config->tracker_group) config->tracker_group = joined(config->group, "__kmq_tracker", "", "");
    if (!config->count_header) config->count_header = strdup("kmq-redelivery-count");
    bool memory = config->tracker_group && config->count_header;
    for (size_t i = 0; i < config->n_queues; i++) {
        tracker_queue_config *queue = &config->queues[i];
        if (!queue->markers) queue->markers = joined(queue->topic, "__", config->group, "__markers");
        if (!queue->dead_letters) queue->dead_letters = joined(queue->topic, "__undelivered", "", "");
        if (!queue->copies) queue->copies = strdup(queue->topic);
        memory = memory && queue->markers && queue->dead_letters && queue->copies;
    }
    return memory ? NULL : "memory";
}

/* Whether what is put into `from` can come into `to`: as a copy or a dead letter of a queue, and so on. */
static bool reaches(const tracker_config *config, const char *from, const char *to)
{
    if (strcmp(from, to) == 0) return true;
    bool found = false, grown = true, *seen = calloc(config->n_queues, sizeof *seen);
    if (!seen) return false;
    for (size_t i = 0; i < config->n_queues; i++) seen[i] = strcmp(config->queues[i].topic, from) == 0;
    while (grown && !found) {
        grown = false;
        for (size_t i = 0; i < config->n_queues && !found; i++) {
            const char *next[] = {config->queues[i].copies, config->queues[i].dead_letters};
            for (size_t k = 0; seen[i] && k < 2; k++) {
                found = found || strcmp(next[k], to) == 0;
                for (size_t j = 0; j < config->n_queues; j++)
                    if (!seen[j] && strcmp(config->queues[j].topic, next[k]) == 0) seen[j] = grown = true;
            }
        }
    }
    free(seen);
    return found;
}

/* NULL, or what is wrong between the topics of one queue and those of another, or its own. */
static const char *conflict(const tracker_queue_config *a, const tracker_queue_config *b, const char **field)
{
    *field = "markers";
    if (strcmp(a->markers, b->topic) == 0) return "is a queue itself";
    if (a != b && strcmp(a->markers, b->markers) == 0) return "two queues cannot share it";
    *field = "dead_letters";
    if (strcmp(a->dead_letters, b->markers) == 0) return "is a marker topic";
    *field = "copies";
    if (strcmp(a->copies, b->markers) == 0) return "is a marker topic";
    /* a queue's own topic may be the dead letters of one before it: those have a reader of their own then */
    if (strcmp(a->copies, a->topic) != 0 && strcmp(a->copies, b->dead_letters) == 0)
        return "is a dead letter topic: what is to be tried again would end there";
    return NULL;
}

static const char *topics(const char *path, const tracker_config *config)
{
    for (size_t i = 0; i < config->n_queues; i++) {
        const tracker_queue_config *queue = &config->queues[i];
        const char *field = NULL, *why_not = NULL;
        if (!topic_name(queue->markers))
            return wrong(path, 0, "queue.%s.markers is <queue>__<group>__markers, but " TOPIC_RULE "; name one",
                         queue->topic);
        if (!topic_name(queue->dead_letters))
            return wrong(path, 0, "queue.%s.dead_letters is <queue>__undelivered, but " TOPIC_RULE "; name one",
                         queue->topic);
        if (reaches(config, queue->dead_letters, queue->topic))
            return wrong(path, 0, "queue.%s.dead_letters: leads back to the queue, dead letters would come round again",
                         queue->topic);
        for (size_t j = 0; j < config->n_queues && !why_not; j++) why_not = conflict(queue, &config->queues[j], &field);
        if (why_not) return wrong(path, 0, "queue.%s.%s: %s", queue->topic, field, why_not);
    }
    return NULL;
}

static const char *read_line(reading *r, const char *path, int line, char *text)
{
    char *key = strip(text), *equals = strchr(key, '=');
    if (*key == 0 || *key == '#') return NULL;
    if (!equals) return wrong(path, line, "not \"key = value\"");
    *equals = 0;
    key = strip(key);
    const char *given = strip(equals + 1);
    char *value = resolved(given);
    if (!value) return unresolved(path, line, key, given);
    if (!*value) {
        free(value);
        return wrong(path, line, "%s: has no value", key);
    }
    outcome result = set(r, key, &value);
    free(value); /* what has been taken is NULL here; the value itself is never shown: it may be a secret */
    switch (result) {
    case GOOD: break;
    case UNKNOWN: return wrong(path, line, "unknown key %s", key);
    case BAD: return wrong(path, line, "%s: not a value it can have: %s", key, r->expected);
    case TWICE: return wrong(path, line, "%s comes twice", key);
    case NO_TOPIC: return wrong(path, line, "%s: " TOPIC_RULE, key);
    case NO_QUEUE: return wrong(path, line, "%s: there is no \"queue = ...\" of that name above it", key);
    case NO_MEMORY: return wrong(path, line, "%s: no memory", key);
    case NO_PROPERTY: return wrong(path, line, "kafka.%s", r->error.text);
    }
    return NULL;
}

const char *tracker_settings_read(const char *path, tracker_settings *out)
{
    char text[LINE_BYTES];
    const char *error = NULL;
    *out = (tracker_settings){.metrics_interval_ms = 5000, .log_level = 4};
    tracker_config_defaults(&out->config);
    reading r = {.settings = out};
    FILE *file = fopen(path, "r");
    if (!file) return wrong(path, 0, "%s", strerror(errno));
    for (int line = 1; !error && fgets(text, sizeof text, file); line++) {
        if (!strchr(text, '\n') && !feof(file))
            error = wrong(path, line, "longer than %d bytes", LINE_BYTES - 2);
        else /* an editor may have put a byte order mark before the first one */
            error = read_line(&r, path, line, text + (line == 1 && strncmp(text, "\xef\xbb\xbf", 3) == 0 ? 3 : 0));
    }
    if (!error && ferror(file)) error = wrong(path, 0, "cannot be read");
    fclose(file);
    if (!error) {
        const char *missing = complete(&out->config);
        if (missing)
            error = wrong(path, 0, "%s is missing", missing);
        else if (tokenless(out))
            error = wrong(
                path, 0,
                "OAUTHBEARER needs token_file = FILE (the token in its first line, read again every 30 s), or (where "
                "librdkafka has it) kafka.sasl.oauthbearer.method = oidc");
    }
    if (!error) error = topics(path, &out->config);
    if (!error && out->metrics_port > 65535) error = wrong(path, 0, "metrics_port: not a port");
    if (!error && out->metrics_port && !tracker_http_built())
        error =
            wrong(path, 0,
                  "metrics_port: this program was built without it; build it with make HTTP=1 (it needs libmicrohttpd, "
                  "libmicrohttpd-dev on Debian), or use metrics_file");
    if (error) tracker_settings_free(out);
    return error;
}

void tracker_settings_free(tracker_settings *settings)
{
    tracker_config_free(&settings->config);
    free(settings->metrics_file);
    free(settings->token_file);
    *settings = (tracker_settings){0};
}
