/* outage - a connection breaks, and it is there again: each said once, however many clients, brokers and tries there are meanwhile.
 *
 *      librdkafka's broker threads --"UP", "DOWN"--> kafka_links (brokers, behind a lock) --kafka_*_poll--> EVENT_UP, EVENT_DOWN --.
 *      its errors ----------------------------------------------------------------------------------------> EVENT_ERROR ---------+--> kafka_outage
 *
 *      quiet --an error of a connection--> on: what was said of each broker --all of these are UP--> settling --KAFKA_OUTAGE_SETTLE_MS--> quiet
 *                                           ^                                                           |
 *                                           '---------------- an error, or DOWN -----------------------'
 *
 * librdkafka has no event for a connection that is made; an interceptor of broker states tells it. A broker that takes connections and closes
 * them is up for a millisecond each time: hence the settling.
 * Invariants: (1) links hold at most one state of a broker, the latest, and at most LINKS of them, the newest; (2) no wake-up after
 * kafka_links_close; (3) an outage of which nothing was heard for KAFKA_OUTAGE_QUIET_MS is over unsaid: its broker may never come back.
 * Thread rule: links: any thread; an outage belongs to one. */
#include "internal.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINKS = 8 };

typedef struct broker_link {
    bool up;
    char broker[KAFKA_BROKER_BYTES];
} broker_link;

struct kafka_links {
    pthread_mutex_t lock;
    const kafka_wake *wake; /* NULL = closed */
    broker_link links[LINKS];
    size_t n;
};

/* ------------------------------------------------------------------ links */

static void drop(kafka_links *links, size_t i)
{
    links->n--;
    memmove(&links->links[i], &links->links[i + 1], sizeof links->links[0] * (links->n - i));
}

/* librdkafka's thread, with the broker's lock held. */
static rd_kafka_resp_err_t on_state(rd_kafka_t *rk, int32_t id, const char *protocol, const char *name, int port,
                                    const char *state, void *opaque)
{
    kafka_links *links = opaque;
    broker_link link = {.up = strcmp(state, "UP") == 0};
    size_t i = 0;
    (void)rk, (void)id, (void)protocol;
    if (!link.up && strcmp(state, "DOWN") != 0) return RD_KAFKA_RESP_ERR_NO_ERROR;
    snprintf(link.broker, sizeof link.broker, "%s:%d", name, port);
    pthread_mutex_lock(&links->lock);
    while (i < links->n && strcmp(links->links[i].broker, link.broker) != 0) i++;
    if (i < links->n) drop(links, i);
    if (links->n == LINKS) drop(links, 0);
    links->links[links->n++] = link;
    if (links->wake != NULL) kafka_wake_ring(links->wake);
    pthread_mutex_unlock(&links->lock);
    return RD_KAFKA_RESP_ERR_NO_ERROR;
}

static rd_kafka_resp_err_t on_new(rd_kafka_t *rk, const rd_kafka_conf_t *conf, void *opaque, char *text, size_t cap)
{
    (void)conf, (void)text, (void)cap;
    return rd_kafka_interceptor_add_on_broker_state_change(rk, "kmq", on_state, opaque);
}

void kafka_links_prepare(rd_kafka_conf_t *conf, void *links)
{
    rd_kafka_conf_interceptor_add_on_new(conf, "kmq", on_new, links);
}

kafka_links *kafka_links_new(const kafka_wake *wake)
{
    kafka_links *links = calloc(1, sizeof *links);
    if (links == NULL) return NULL;
    if (pthread_mutex_init(&links->lock, NULL) != 0) {
        free(links);
        return NULL;
    }
    links->wake = wake;
    return links;
}

void kafka_links_close(kafka_links *links)
{
    pthread_mutex_lock(&links->lock);
    links->wake = NULL;
    pthread_mutex_unlock(&links->lock);
}

void kafka_links_del(kafka_links *links)
{
    if (links == NULL) return;
    pthread_mutex_destroy(&links->lock);
    free(links);
}

bool kafka_links_take(kafka_links *links, kafka_event *event)
{
    broker_link link;
    pthread_mutex_lock(&links->lock);
    bool some = links->n > 0;
    if (some) {
        link = links->links[0];
        drop(links, 0);
    }
    pthread_mutex_unlock(&links->lock);
    if (!some) return false;
    memset(event, 0, sizeof *event);
    event->type = link.up ? KAFKA_EVENT_UP : KAFKA_EVENT_DOWN;
    event->text = event->priv = strdup(link.broker);
    return event->text != NULL;
}

/* ------------------------------------------------------------------ outages */

/* A broker of :hosts may never be needed again once others are known. */
static bool back(const char *said, const char *broker)
{
    const char *at = strstr(said, broker);
    size_t n = strlen(broker);
    return (at != NULL && (at[n] < '0' || at[n] > '9')) || strstr(said, "/bootstrap: ") != NULL;
}

/* The newest of each: errors begin with who they are about, and a space comes next. */
static void say(kafka_outage *outage, const char *text)
{
    size_t i = 0, who = strcspn(text, " ");
    while (i < outage->n && strncmp(outage->said[i], text, who + 1) != 0) i++;
    if (i == KAFKA_OUTAGE_BROKERS) i--;
    if (i == outage->n) outage->n++;
    snprintf(outage->said[i], sizeof outage->said[i], "%.*s", KAFKA_BROKER_BYTES - 1, text);
}

/* Every error that leaves a broker out of reach. What is said of certificates and passwords is said as it is: it has a cause of its own. */
static bool breaks(const kafka_error *error, bool *own_cause)
{
    *own_cause = error->code == RD_KAFKA_RESP_ERR__SSL || error->code == RD_KAFKA_RESP_ERR__AUTHENTICATION;
    return *own_cause || error->code == RD_KAFKA_RESP_ERR__TRANSPORT || error->code == RD_KAFKA_RESP_ERR__RESOLVE ||
           error->code == RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN;
}

kafka_outage_step kafka_outage_error(kafka_outage *outage, const kafka_error *error, int64_t now_ms)
{
    bool own_cause;
    if (!breaks(error, &own_cause)) return KAFKA_OUTAGE_NONE;
    bool on = outage->on && now_ms - outage->heard_ms < KAFKA_OUTAGE_QUIET_MS;
    if (!on) *outage = (kafka_outage){.on = true, .since_ms = now_ms};
    outage->heard_ms = now_ms;
    outage->settling = false;
    if (error->code != RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN) say(outage, error->text); /* this one names nobody */
    return own_cause ? KAFKA_OUTAGE_NONE : on ? KAFKA_OUTAGE_GOES_ON : KAFKA_OUTAGE_BEGINS;
}

bool kafka_outage_link(kafka_outage *outage, const kafka_event *event, int64_t now_ms)
{
    size_t n = 0;
    if (!outage->on || (event->type != KAFKA_EVENT_UP && event->type != KAFKA_EVENT_DOWN)) return false;
    if (event->type == KAFKA_EVENT_DOWN) {
        if (outage->settling) say(outage, event->text);
        outage->settling = false;
        return false;
    }
    for (size_t i = 0; i < outage->n; i++) {
        if (back(outage->said[i], event->text)) continue;
        if (n != i) memcpy(outage->said[n], outage->said[i], sizeof outage->said[i]);
        n++;
    }
    outage->n = n;
    if (n > 0 || outage->settling) return false;
    outage->settling = true;
    outage->up_ms = now_ms;
    return true;
}

bool kafka_outage_over(kafka_outage *outage, int64_t now_ms, int64_t *lasted_ms)
{
    if (!outage->on || !outage->settling || now_ms - outage->up_ms < KAFKA_OUTAGE_SETTLE_MS) return false;
    outage->on = outage->settling = false;
    *lasted_ms = outage->up_ms - outage->since_ms;
    return outage->up_ms - outage->heard_ms < KAFKA_OUTAGE_QUIET_MS;
}
