/* cause - why nothing connects. A call that needs a broker and finds none fails with "timed out"; the reason (a certificate, a password,
 * a name that does not resolve) was told by an event before, or in the middle of it. The most telling one is kept here.
 *
 *      main queue --read--> TLS, SASL  >  name  >  connection        a success forgets it
 *
 * What OpenSSL holds against a certificate is known only to the callback that librdkafka asks about each: it never changes the verdict, it
 * puts it into words, which come back as a log line.
 * Thread rule: as its owner, but for the callback: any thread of the library; it touches nothing of ours. */
#include "internal.h"
#include <stdio.h>
#include <string.h>

static const char failed[] = "verification callback failed: ";

/* X509_V_ERR_...: numbers that OpenSSL keeps. */
static const char *verdict(int x509_error)
{
    switch (x509_error) {
    case 2:
    case 18:
    case 19:
    case 20:
    case 21: return "the certificate is not signed by a CA that is trusted here";
    case 9: return "the certificate is not valid yet (is the clock right?)";
    case 10: return "the certificate has expired";
    case 23: return "the certificate is revoked";
    case 62:
    case 64: return "the certificate is for another host than this one";
    default: return "the certificate is not accepted";
    }
}

static int look_at_certificate(rd_kafka_t *rk, const char *broker, int32_t id, int *x509_error, int depth,
                               const char *bytes, size_t n, char *text, size_t cap, void *opaque)
{
    (void)rk, (void)id, (void)depth, (void)bytes, (void)n, (void)opaque;
    if (*x509_error == 0) return 1;
    snprintf(text, cap, "%s: %s (OpenSSL's verdict %d)", broker, verdict(*x509_error), *x509_error);
    return 0;
}

void kafka_cause_words(rd_kafka_conf_t *conf)
{
    rd_kafka_conf_set_ssl_cert_verify_cb(conf,
                                         look_at_certificate); /* refused by a library without TLS: nothing lost */
}

static int weight(int code)
{
    switch (code) {
    case RD_KAFKA_RESP_ERR__SSL:
    case RD_KAFKA_RESP_ERR__AUTHENTICATION: return 3;
    case RD_KAFKA_RESP_ERR__RESOLVE: return 2;
    case RD_KAFKA_RESP_ERR__TRANSPORT: return 1;
    default: return 0;
    }
}

static void read_log(kafka_cause *cause, rd_kafka_event_t *rkev)
{
    const char *facility, *text, *words;
    int level;
    if (rd_kafka_event_log(rkev, &facility, &text, &level) != 0) return;
    if ((words = strstr(text, failed)) == NULL) return;
    kafka_error_set(&cause->error, RD_KAFKA_RESP_ERR__SSL, "%s", words + sizeof failed - 1);
    cause->worded = true;
}

static void read_error(kafka_cause *cause, rd_kafka_event_t *rkev)
{
    int code = rd_kafka_event_error(rkev);
    if (code == RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN) cause->all_down = true;
    if (weight(code) == 0 || weight(code) < weight(cause->error.code)) return;
    if (cause->worded && code == RD_KAFKA_RESP_ERR__SSL) return; /* the words say more */
    kafka_error_set(&cause->error, code, "%s", rd_kafka_event_error_string(rkev));
    cause->worded = false;
}

void kafka_cause_read(kafka_cause *cause, rd_kafka_queue_t *queue)
{
    rd_kafka_event_t *rkev;
    while ((rkev = rd_kafka_queue_poll(queue, 0)) != NULL) {
        if (rd_kafka_event_type(rkev) == RD_KAFKA_EVENT_LOG) read_log(cause, rkev);
        if (rd_kafka_event_type(rkev) == RD_KAFKA_EVENT_ERROR) read_error(cause, rkev);
        rd_kafka_event_destroy(rkev);
    }
}

/* Credentials and certificates do not get better by waiting for the rest of a time limit. */
bool kafka_cause_final(const kafka_cause *cause) { return cause->all_down && weight(cause->error.code) == 3; }

void kafka_cause_forget(kafka_cause *cause) { memset(cause, 0, sizeof *cause); }

int kafka_cause_fail(const kafka_cause *cause, kafka_error *err, rd_kafka_t *rk, rd_kafka_resp_err_t code,
                     const char *what)
{
    bool nobody = code == RD_KAFKA_RESP_ERR__TIMED_OUT || code == RD_KAFKA_RESP_ERR__TRANSPORT ||
                  code == RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN;
    if (!nobody || cause->error.code == 0) return kafka_fail(err, rk, code, what);
    kafka_error_set(err, cause->error.code, "%s%s%s", what ? what : "", what ? ": " : "", cause->error.text);
    return KAFKA_EKAFKA;
}

rd_kafka_resp_err_t kafka_metadata(rd_kafka_t *rk, rd_kafka_topic_t *rkt, bool all, kafka_cause *cause,
                                   rd_kafka_queue_t *queue, int timeout_ms, const rd_kafka_metadata_t **out)
{
    enum { SLICE_MS = 500 };
    int64_t deadline_ms = kafka_now_ms() + timeout_ms;
    int slice = SLICE_MS;
    rd_kafka_resp_err_t code;
    for (;;) {
        int left = kafka_left_ms(deadline_ms);
        code = rd_kafka_metadata(rk, all, rkt, out, left < slice ? left : slice);
        kafka_cause_read(cause, queue);
        if (code == RD_KAFKA_RESP_ERR_NO_ERROR) {
            kafka_cause_forget(cause);
            return code;
        }
        if (code == RD_KAFKA_RESP_ERR__TIMED_OUT)
            slice = timeout_ms; /* a broker is there, and slow: it is asked once more, for all the time */
        else if (code != RD_KAFKA_RESP_ERR__TRANSPORT)
            return code;
        if (kafka_cause_final(cause) || kafka_left_ms(deadline_ms) == 0) return code;
    }
}
