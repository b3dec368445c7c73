/* daemon - see daemon.h. */
#include "daemon.h"

#include "http.h"

#include <ei.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { FIELDS = 24, KEY_BYTES = 32, ATOM_BYTES = MAXATOMLEN_UTF8, LABEL_BYTES = 640 };

/* ------------------------------------------------------------------ a buffer that grows; `bad` = no memory, what is in it is not used */

typedef struct text {
    char *bytes;
    size_t n, cap;
    bool bad;
} text;

static void add(text *to, const char *bytes, size_t n)
{
    if (to->n + n > to->cap && !to->bad) {
        size_t cap = (to->n + n) * 2 + 256;
        char *grown = realloc(to->bytes, cap);
        to->bad = !grown;
        if (grown) to->bytes = grown, to->cap = cap;
    }
    if (to->bad) return;
    memcpy(to->bytes + to->n, bytes, n);
    to->n += n;
}

static void adds(text *to, const char *bytes) { add(to, bytes, strlen(bytes)); }

static void addf(text *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void addf(text *to, const char *format, ...)
{
    char bytes[1024];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(bytes, sizeof bytes, format, args);
    va_end(args);
    if (n > 0) add(to, bytes, (size_t)n < sizeof bytes ? (size_t)n : sizeof bytes - 1);
}

/* In double quotes, as JSON has it; the text form and Prometheus' labels are a part of that. Bytes above 7f pass: they are UTF-8. */
static void add_quoted(text *to, const char *bytes, size_t n)
{
    adds(to, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c == '"' || c == '\\')
            addf(to, "\\%c", c);
        else if (c == '\n')
            adds(to, "\\n");
        else if (c < 0x20 || c == 0x7f)
            addf(to, "\\u%04x", c);
        else
            add(to, bytes + i, 1);
    }
    adds(to, "\"");
}

/* ------------------------------------------------------------------ events, taken apart */

typedef enum field_kind { FIELD_NONE, FIELD_NUMBER, FIELD_TEXT, FIELD_LIST } field_kind;
typedef struct field {
    char key[KEY_BYTES];
    field_kind kind;
    long long number;
    char atom[ATOM_BYTES];
    const char *text; /* of the term, or atom */
    size_t n;
    int at; /* of a list */
} field;

typedef struct event {
    char name[ATOM_BYTES];
    const char *term;
    field fields[FIELDS];
    size_t n;
} event;

static bool atom(const char *term, int *at, char *out, size_t cap)
{
    return ei_decode_atom_as(term, at, out, (int)cap, ERLANG_UTF8, NULL, NULL) == 0;
}

static bool read_value(const char *term, int *at, field *out)
{
    int type, size;
    if (ei_get_type(term, at, &type, &size)) return false;
    switch (type) {
    case ERL_BINARY_EXT:
        out->kind = FIELD_TEXT;
        out->text = term + *at + 5; /* tag, length */
        out->n = (size_t)size;
        return ei_skip_term(term, at) == 0;
    case ERL_ATOM_EXT:
    case ERL_SMALL_ATOM_EXT:
    case ERL_ATOM_UTF8_EXT:
    case ERL_SMALL_ATOM_UTF8_EXT:
        if (!atom(term, at, out->atom, sizeof out->atom)) return false;
        out->kind = strcmp(out->atom, "nil") == 0 ? FIELD_NONE : FIELD_TEXT;
        out->text = out->atom;
        out->n = strlen(out->atom);
        return true;
    case ERL_LIST_EXT:
    case ERL_NIL_EXT:
        out->kind = FIELD_LIST;
        out->at = *at;
        return ei_skip_term(term, at) == 0;
    default: out->kind = FIELD_NUMBER; return ei_decode_longlong(term, at, &out->number) == 0;
    }
}

/* To the next element; lists are written one cell after the other. *left begins with 0. False: the end. */
static bool list_next(const char *term, int *at, int *left)
{
    if (*left == 0 && (ei_decode_list_header(term, at, left) || *left <= 0)) return false;
    (*left)--;
    return true;
}

static bool read_map(const char *term, int *at, event *out)
{
    int pairs;
    out->term = term;
    out->n = 0;
    if (ei_decode_map_header(term, at, &pairs) || pairs > FIELDS) return false;
    for (int i = 0; i < pairs; i++) {
        field *f = &out->fields[out->n++];
        if (!atom(term, at, f->key, sizeof f->key) || !read_value(term, at, f)) return false;
    }
    return true;
}

static bool read_event(const char *term, event *out)
{
    int at = 0, version, arity;
    long long id;
    char tag[ATOM_BYTES];
    return ei_decode_version(term, &at, &version) == 0 && ei_decode_tuple_header(term, &at, &arity) == 0 &&
           ei_decode_longlong(term, &at, &id) == 0 && id == 0 && ei_decode_tuple_header(term, &at, &arity) == 0 &&
           arity == 3 && atom(term, &at, tag, sizeof tag) && atom(term, &at, out->name, sizeof out->name) &&
           read_map(term, &at, out);
}

static const field *find(const event *e, const char *key)
{
    for (size_t i = 0; i < e->n; i++)
        if (strcmp(e->fields[i].key, key) == 0) return &e->fields[i];
    return NULL;
}

static long long number_of(const event *e, const char *key)
{
    const field *f = find(e, key);
    return f && f->kind == FIELD_NUMBER ? f->number : 0;
}

/* ------------------------------------------------------------------ series */

typedef struct metric_kind {
    const char *name, *help;
    bool counter;
} metric_kind;

enum {
    REDELIVERED,
    DEAD_LETTERED,
    GONE,
    MALFORMED,
    LATE_ACKS,
    CHECKPOINTS,
    GAPS,
    ALARMS,
    IN_FLIGHT,
    WAITING,
    OPEN,
    OLDEST,
    NEXT_DUE,
    DUE,
    LAG,
    CHECKPOINT_AGE,
    METRICS
};
static const metric_kind metrics[METRICS] = {
    [REDELIVERED] = {"redelivered_total", "Copies written back to the queue topic.", true},
    [DEAD_LETTERED] = {"dead_lettered_total", "Messages written to the dead letter topic.", true},
    [GONE] = {"gone_total", "Due messages that were no longer in the queue topic.", true},
    [MALFORMED] = {"malformed_total", "Records of the marker topic that are not ours.", true},
    [LATE_ACKS] = {"late_acks_total", "Acknowledgements of what had been redelivered already.", true},
    [CHECKPOINTS] = {"checkpoints_total", "Checkpoints written.", true},
    [GAPS] = {"marker_gaps_total", "Times that markers were deleted before they were read.", true},
    [ALARMS] = {"alarms_total", "Alarms, at most one each half minute of a kind.", true},
    [IN_FLIGHT] = {"in_flight", "Messages being read or copied.", false},
    [WAITING] = {"waiting", "Messages whose copy cannot be written just now.", false},
    [OPEN] = {"open", "Messages handed out and not settled.", false},
    [OLDEST] = {"oldest_open_age_seconds", "How long the oldest of these has been known to this tracker.", false},
    [NEXT_DUE] = {"next_due_seconds", "Until something is due; absent when nothing will be.", false},
    [DUE] = {"due", "Messages that are due and not yet copied.", false},
    [LAG] = {"lag", "Markers not yet read.", false},
    [CHECKPOINT_AGE] = {"checkpoint_age_seconds", "Age of the checkpoint that the commit refers to.", false},
};

typedef struct series {
    struct series *next;
    int metric;
    double value;
    char labels[];
} series;

struct tracker_daemon {
    const tracker_settings *settings;
    int out;
    series *series;
    time_t started;
    long long restarts; /* since the metrics file was made */
};

static void count(tracker_daemon *daemon, int metric, const char *labels, double value)
{
    series *s = daemon->series;
    while (s && (s->metric != metric || strcmp(s->labels, labels) != 0)) s = s->next;
    if (!s) {
        s = malloc(sizeof *s + strlen(labels) + 1);
        if (!s) return;
        *s = (series){.next = daemon->series, .metric = metric};
        strcpy(s->labels, labels);
        daemon->series = s;
    }
    s->value = metrics[metric].counter ? s->value + value : value;
}

/* What is no longer there is not a gauge that stands still. */
static void gauges_clear(tracker_daemon *daemon)
{
    for (series **at = &daemon->series; *at;) {
        series *s = *at;
        if (metrics[s->metric].counter) {
            at = &s->next;
        } else {
            *at = s->next;
            free(s);
        }
    }
}

/* topic, partition and what else the event has of `more`; into labels, which is empty when there is no room. */
static void labels_of(const event *e, const char *more, char labels[LABEL_BYTES])
{
    const char *keys[] = {"topic", "partition", more};
    text to = {0};
    for (size_t i = 0; i < 3; i++) {
        const field *f = keys[i] ? find(e, keys[i]) : NULL;
        if (!f || f->kind == FIELD_NONE || f->kind == FIELD_LIST) continue;
        addf(&to, "%s%s=", to.n ? "," : "", f->key);
        if (f->kind == FIELD_TEXT)
            add_quoted(&to, f->text, f->n);
        else
            addf(&to, "\"%lld\"", f->number);
    }
    labels[0] = 0;
    if (!to.bad && to.n < LABEL_BYTES && to.n) {
        memcpy(labels, to.bytes, to.n);
        labels[to.n] = 0;
    }
    free(to.bytes);
}

static void partition_gauges(tracker_daemon *daemon, const event *e)
{
    static const struct {
        int metric;
        const char *key;
        double scale;
    } gauges[] = {{OPEN, "open", 1},
                  {OLDEST, "oldest_age_ms", 0.001},
                  {NEXT_DUE, "next_due_ms", 0.001},
                  {DUE, "due", 1},
                  {LAG, "lag", 1},
                  {CHECKPOINT_AGE, "checkpoint_age_ms", 0.001}};
    char labels[LABEL_BYTES];
    labels_of(e, NULL, labels);
    for (size_t i = 0; i < sizeof gauges / sizeof gauges[0]; i++) {
        long long value = number_of(e, gauges[i].key);
        if (value >= 0) count(daemon, gauges[i].metric, labels, (double)value * gauges[i].scale);
    }
}

static void gauges(tracker_daemon *daemon, const event *e)
{
    static event inner; /* the loop's alone; too large for a stack */
    const field *partitions = find(e, "partitions");
    gauges_clear(daemon);
    count(daemon, IN_FLIGHT, "", (double)number_of(e, "in_flight"));
    count(daemon, WAITING, "", (double)number_of(e, "waiting"));
    if (!partitions || partitions->kind != FIELD_LIST) return;
    int at = partitions->at, left = 0;
    while (list_next(e->term, &at, &left) && read_map(e->term, &at, &inner)) partition_gauges(daemon, &inner);
}

static void measure(tracker_daemon *daemon, const event *e)
{
    static const struct {
        const char *event;
        int metric;
        const char *by, *label;
    } counters[] = {{"redelivered", REDELIVERED, "count", "cause"},
                    {"dead_lettered", DEAD_LETTERED, "count", "cause"},
                    {"gone", GONE, "count", NULL},
                    {"malformed", MALFORMED, "malformed", NULL},
                    {"malformed", MALFORMED, "foreign", NULL},
                    {"late_acks", LATE_ACKS, "count", NULL},
                    {"checkpoint", CHECKPOINTS, NULL, NULL},
                    {"marker_gap", GAPS, NULL, "reason"},
                    {"alarm", ALARMS, NULL, "reason"}};
    char labels[LABEL_BYTES];
    if (strcmp(e->name, "gauges") == 0) {
        gauges(daemon, e);
        return;
    }
    for (size_t i = 0; i < sizeof counters / sizeof counters[0]; i++) {
        if (strcmp(e->name, counters[i].event) != 0) continue;
        labels_of(e, counters[i].label, labels);
        count(daemon, counters[i].metric, labels, counters[i].by ? (double)number_of(e, counters[i].by) : 1);
    }
}

/* ------------------------------------------------------------------ lines */

/* syslog's numbers */
static int level_of(const event *e)
{
    static const struct {
        const char *event;
        int level;
    } levels[] = {{"alarm", 3}, {"marker_gap", 3}, {"error", 4},     {"outage", 4}, {"dead_lettered", 4},
                  {"gone", 4},  {"malformed", 4},  {"late_acks", 4}, {"passing", 7}};
    if (strcmp(e->name, "log") == 0) return (int)number_of(e, "level");
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++)
        if (strcmp(e->name, levels[i].event) == 0) return levels[i].level;
    return 6;
}

static const char *level_name(int level)
{
    return level <= 3 ? "error" : level == 4 ? "warning" : level <= 6 ? "info" : "debug";
}

static bool plain(const char *bytes, size_t n)
{
    if (n == 0) return false;
    for (size_t i = 0; i < n; i++)
        if (bytes[i] <= ' ' || bytes[i] == '"' || bytes[i] == '=' || bytes[i] == '\\' || bytes[i] == 0x7f) return false;
    return true;
}

/* {Topic, Partition} of assigned and revoked */
static void add_places(text *line, const event *e, const field *list)
{
    int at = list->at, left = 0, arity;
    adds(line, "[");
    for (int i = 0; list_next(e->term, &at, &left); i++) {
        field topic, partition;
        char place[LABEL_BYTES];
        if (ei_decode_tuple_header(e->term, &at, &arity) || arity != 2 || !read_value(e->term, &at, &topic) ||
            !read_value(e->term, &at, &partition))
            break;
        int n = snprintf(place, sizeof place, "%.*s/%lld", (int)topic.n, topic.text, partition.number);
        if (i) adds(line, ",");
        add_quoted(line, place, n > 0 && (size_t)n < sizeof place ? (size_t)n : 0);
    }
    adds(line, "]");
}

static void add_value(text *line, const event *e, const field *f, bool json)
{
    switch (f->kind) {
    case FIELD_NUMBER: addf(line, "%lld", f->number); break;
    case FIELD_TEXT:
        if (!json && plain(f->text, f->n))
            add(line, f->text, f->n);
        else if (json && (strcmp(f->atom, "true") == 0 || strcmp(f->atom, "false") == 0) && f->text == f->atom)
            adds(line, f->atom);
        else
            add_quoted(line, f->text, f->n);
        break;
    case FIELD_LIST: add_places(line, e, f); break;
    case FIELD_NONE: adds(line, "null"); break;
    }
}

static void write_line(tracker_daemon *daemon, const event *e)
{
    text line = {0};
    struct timespec now;
    struct tm utc;
    char when[32];
    bool json = daemon->settings->json;
    int level = level_of(e);
    bool details = strcmp(e->name, "log") == 0 || strcmp(e->name, "passing") == 0;
    if (details && level > daemon->settings->log_level) return;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &utc);
    addf(&line, json ? "{\"time\":\"%s.%03ldZ\",\"level\":\"%s\",\"event\":\"%s\"" : "%s.%03ldZ %s %s", when,
         now.tv_nsec / 1000000, level_name(level), e->name);
    for (size_t i = 0; i < e->n; i++) {
        const field *f = &e->fields[i];
        bool none = f->kind == FIELD_NONE || (f->number < 0 && strcmp(f->key, "partition") == 0);
        if (strcmp(f->key, "level") == 0 || (!json && none)) continue;
        addf(&line, json ? ",\"%s\":" : " %s=", f->key);
        add_value(&line, e, f, json);
    }
    adds(&line, json ? "}\n" : "\n");
    for (size_t at = 0; !line.bad && at < line.n;) {
        ssize_t n = write(daemon->out, line.bytes + at, line.n - at);
        if (n < 0 && errno != EINTR) break; /* nobody reads: not our trouble */
        if (n > 0) at += (size_t)n;
    }
    free(line.bytes);
}

void tracker_daemon_event(tracker_daemon *daemon, const char *term, size_t n)
{
    static event e; /* the loop's alone; too large for a stack */
    if (n == 0 || !read_event(term, &e)) return;
    measure(daemon, &e);
    if (strcmp(e.name, "gauges") != 0) write_line(daemon, &e);
}

/* ------------------------------------------------------------------ the file */

static const char RESTARTS[] = "kmq_tracker_restarts_total";

static text metrics_text(const tracker_daemon *daemon)
{
    text out = {0};
    for (int metric = 0; metric < METRICS; metric++) {
        const char *name = metrics[metric].name;
        addf(&out, "# HELP kmq_tracker_%s %s\n# TYPE kmq_tracker_%s %s\n", name, metrics[metric].help, name,
             metrics[metric].counter ? "counter" : "gauge");
        for (const series *s = daemon->series; s; s = s->next)
            if (s->metric == metric) {
                addf(&out, "kmq_tracker_%s%s", name, s->labels[0] ? "{" : "");
                addf(&out, "%s%s %.15g\n", s->labels, s->labels[0] ? "}" : "", s->value);
            }
    }
    addf(&out,
         "# HELP kmq_tracker_start_time_seconds Since when this process runs.\n"
         "# TYPE kmq_tracker_start_time_seconds gauge\nkmq_tracker_start_time_seconds %lld\n",
         (long long)daemon->started);
    addf(&out, "# HELP %s Starts after the first one that wrote this file.\n# TYPE %s counter\n%s %lld\n", RESTARTS,
         RESTARTS, RESTARTS, daemon->restarts);
    return out;
}

/* Replaced whole, so that a reader never sees half of it. */
static bool write_file(const char *path, text out)
{
    char beside[4096];
    bool ok = !out.bad && snprintf(beside, sizeof beside, "%s.tmp", path) < (int)sizeof beside;
    FILE *file = ok ? fopen(beside, "w") : NULL;
    ok = file && fwrite(out.bytes, 1, out.n, file) == out.n;
    if (file) ok = fclose(file) == 0 && ok;
    return ok && rename(beside, path) == 0;
}

bool tracker_daemon_metrics(const tracker_daemon *daemon)
{
    const char *path = daemon->settings->metrics_file;
    if (!path && !daemon->settings->metrics_port) return true;
    text out = metrics_text(daemon);
    bool ok = !path || write_file(path, out);
    if (daemon->settings->metrics_port && !out.bad)
        tracker_http_publish(out.bytes, out.n);
    else
        free(out.bytes);
    return ok;
}

/* What the program before this one wrote there. */
static long long restarts_before(const char *path)
{
    char line[512];
    long long restarts = -1;
    FILE *file = path ? fopen(path, "r") : NULL;
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, RESTARTS, sizeof RESTARTS - 1) == 0) restarts = strtoll(line + sizeof RESTARTS - 1, NULL, 10);
    if (file) fclose(file);
    return restarts;
}

tracker_daemon *tracker_daemon_new(const tracker_settings *settings, int out_fd)
{
    tracker_daemon *daemon = calloc(1, sizeof *daemon);
    if (daemon)
        *daemon = (tracker_daemon){.settings = settings,
                                   .out = out_fd,
                                   .started = time(NULL),
                                   .restarts = restarts_before(settings->metrics_file) + 1};
    return daemon;
}

void tracker_daemon_del(tracker_daemon *daemon)
{
    while (daemon && daemon->series) {
        series *s = daemon->series;
        daemon->series = s->next;
        free(s);
    }
    free(daemon);
}
