/* client - from properties to a librdkafka client; the wake-ups of its queues.
 *
 * A property named "?name" is set where the library knows it and skipped where it does not (2.0.2 lacks some that later ones have). */
#include "internal.h"
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* What comes past the log queue (it is not read yet, or a call serves it by callback): the library would print it on the host's stderr. */
static void silent(const rd_kafka_t *rk, int level, const char *facility, const char *text)
{
    (void)rk, (void)level, (void)facility, (void)text;
}

/* The library's thread calls this with the queue's lock held. */
static void awake(rd_kafka_t *rk, void *opaque)
{
    kafka_wake *wake = opaque;
    (void)rk;
    wake->fn(wake->ctx);
}

void kafka_wake_on(rd_kafka_queue_t *queue, kafka_wake *wake)
{
    if (wake->fn != NULL)
        rd_kafka_queue_cb_event_enable(queue, awake, wake);
    else if (wake->fd >= 0)
        rd_kafka_queue_io_event_enable(queue, wake->fd, "x", 1);
}

void kafka_wake_ring(const kafka_wake *wake)
{
    if (wake->fn != NULL)
        wake->fn(wake->ctx);
    else if (wake->fd >= 0 && write(wake->fd, "x", 1) < 0)
        return; /* a full pipe wakes as well */
}

void kafka_wake_off(rd_kafka_queue_t *queue)
{
    rd_kafka_queue_cb_event_enable(queue, NULL,
                                   NULL); /* takes the lock: no callback runs after it; frees an io event too */
}

const char *kafka_property_get(const kafka_property *props, size_t n_props, const char *name)
{
    for (size_t i = n_props; i-- > 0;)
        if (strcmp(props[i].name, name) == 0) return props[i].value;
    return NULL;
}

int kafka_common_events(const kafka_property *props, size_t n_props)
{
    int events = RD_KAFKA_EVENT_ERROR | RD_KAFKA_EVENT_LOG | RD_KAFKA_EVENT_STATS;
    const char *method = kafka_property_get(props, n_props, "sasl.oauthbearer.method");
    const char *unsecure = kafka_property_get(props, n_props, "enable.sasl.oauthbearer.unsecure.jwt");
    if ((method == NULL || strcmp(method, "oidc") != 0) && (unsecure == NULL || strcmp(unsecure, "true") != 0))
        events |= RD_KAFKA_EVENT_OAUTHBEARER_TOKEN_REFRESH;
    return events;
}

static int set(rd_kafka_conf_t *conf, const kafka_property *props, size_t n, kafka_error *err)
{
    for (size_t i = 0; i < n; i++) {
        char why[256];
        const char *name = props[i].name;
        bool optional = name[0] == '?';
        rd_kafka_conf_res_t res = rd_kafka_conf_set(conf, optional ? name + 1 : name, props[i].value, why, sizeof why);
        if (res == RD_KAFKA_CONF_OK || (res == RD_KAFKA_CONF_UNKNOWN && optional)) continue;
        /* librdkafka's own text repeats the value, which may be a secret: only the name is shown */
        kafka_error_set(err, RD_KAFKA_RESP_ERR__INVALID_ARG, "%s: %s (librdkafka %s)", name,
                        res == RD_KAFKA_CONF_UNKNOWN ? "unknown property" : "value refused", rd_kafka_version_str());
        return KAFKA_EKAFKA;
    }
    return KAFKA_OK;
}

int kafka_property_check(const kafka_property *prop, kafka_error *err)
{
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    int result = set(conf, prop, 1, err);
    rd_kafka_conf_destroy(conf);
    return result;
}

rd_kafka_t *kafka_client_new(rd_kafka_type_t type, const kafka_property *defaults, size_t n_defaults,
                             const kafka_property *props, size_t n_props, const kafka_property *forced, size_t n_forced,
                             int events, kafka_error *err)
{
    return kafka_client_new_with(NULL, NULL, type, defaults, n_defaults, props, n_props, forced, n_forced, events, err);
}

rd_kafka_t *kafka_client_new_with(void (*prepare)(rd_kafka_conf_t *conf, void *ctx), void *ctx, rd_kafka_type_t type,
                                  const kafka_property *defaults, size_t n_defaults, const kafka_property *props,
                                  size_t n_props, const kafka_property *forced, size_t n_forced, int events,
                                  kafka_error *err)
{
    static const kafka_property ours[] = {{"log.queue", "true"}, {"allow.auto.create.topics", "false"}};
    static const kafka_property usual[] = {{"socket.nagle.disable", "true"}};
    char why[400];
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    if (set(conf, usual, 1, err) != 0 || set(conf, defaults, n_defaults, err) != 0 ||
        set(conf, props, n_props, err) != 0 || set(conf, forced, n_forced, err) != 0 || set(conf, ours, 2, err) != 0) {
        rd_kafka_conf_destroy(conf);
        return NULL;
    }
    rd_kafka_conf_set_events(conf, events);
    rd_kafka_conf_set_log_cb(conf, silent);
    kafka_cause_words(conf);
    if (prepare != NULL) prepare(conf, ctx);
    rd_kafka_t *rk = rd_kafka_new(type, conf, why, sizeof why);
    if (rk == NULL) {
        rd_kafka_resp_err_t code = rd_kafka_last_error();
        rd_kafka_conf_destroy(conf); /* not taken when it fails */
        kafka_error_set(err, code, "%s", why);
        return NULL;
    }
    kafka_live_add(1);
    return rk;
}

int kafka_set_token(rd_kafka_t *rk, const kafka_token *token, kafka_error *err)
{
    enum { EXTENSIONS = 32 };
    char why[256];
    const char *list[2 * EXTENSIONS];
    size_t n = 0;
    for (size_t i = 0; i < token->n_extensions && i < EXTENSIONS; i++) {
        list[n++] = token->extensions[i].name;
        list[n++] = token->extensions[i].value;
    }
    rd_kafka_resp_err_t code =
        rd_kafka_oauthbearer_set_token(rk, token->token, token->expires_ms, token->principal, list, n, why, sizeof why);
    if (code == RD_KAFKA_RESP_ERR_NO_ERROR) return KAFKA_OK;
    kafka_error_set(err, code, "token refused: %s", why);
    return KAFKA_EKAFKA;
}

int64_t kafka_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int kafka_left_ms(int64_t deadline_ms)
{
    int64_t left = deadline_ms - kafka_now_ms();
    return left > 0 ? (int)left : 0;
}

void kafka_pause_ms(int ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}
