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
    if (strncmp(value, "file:", 5) == 0) return file_content(value + 5);
    if (strncmp(value, "env:", 4) == 0) {
        value = getenv(value + 4);
        if (!value) return NULL;
    }
    return strdup(value);
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
    uint32_t seen; /* keys that may come once */
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

typedef enum outcome { GOOD, UNKNOWN, BAD, TWICE } outcome;

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
        bool ok = i < NUMBERS ? number(*value, numbers[i].least, numbers[i].number)
                              : flag(*value, flags[i - NUMBERS].yes, flags[i - NUMBERS].no, flags[i - NUMBERS].flag);
        return ok ? GOOD : BAD;
    }
    if (strncmp(key, "kafka.", 6) == 0 && key[6]) {
        for (size_t i = 0; i < config->n_props; i++)
            if (strcmp(config->props[i].name, key + 6) == 0) return TWICE;
        if (!prop_add(r, key + 6, *value)) return BAD;
        *value = NULL;
        return GOOD;
    }
    if (strcmp(key, "queue") == 0) {
        if (queue_of(config, *value, strlen(*value))) return TWICE;
        if (!queue_add(r, *value)) return BAD;
        *value = NULL;
        return GOOD;
    }
    if (strcmp(key, "backoff") == 0) {
        if (config->spacing.given) return TWICE;
        return tracker_spacing_parse(*value, &config->spacing) ? GOOD : BAD;
    }
    char **text = strcmp(key, "group") == 0           ? &config->group
                  : strcmp(key, "tracker_group") == 0 ? &config->tracker_group
                  : strcmp(key, "count_header") == 0  ? &config->count_header
                  : strcmp(key, "metrics_file") == 0  ? &settings->metrics_file
                  : strcmp(key, "token_file") == 0    ? &settings->token_file
                  : strncmp(key, "queue.", 6) == 0    ? queue_field(config, key)
                                                      : NULL;
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

static const char *read_line(reading *r, const char *path, int line, char *text)
{
    char *key = strip(text), *equals = strchr(key, '=');
    if (*key == 0 || *key == '#') return NULL;
    if (!equals) return wrong(path, line, "not \"key = value\"");
    *equals = 0;
    key = strip(key);
    char *value = resolved(strip(equals + 1));
    if (!value) return wrong(path, line, "%s: what its value refers to cannot be read", key);
    outcome result = *value ? set(r, key, &value) : BAD;
    free(value); /* what has been taken is NULL here; the value itself is never shown: it may be a secret */
    switch (result) {
    case GOOD: break;
    case UNKNOWN: return wrong(path, line, "unknown key %s", key);
    case BAD: return wrong(path, line, "%s: not a value it can have", key);
    case TWICE: return wrong(path, line, "%s comes twice", key);
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
        else
            error = read_line(&r, path, line, text);
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
