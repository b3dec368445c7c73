/* settings - the configuration file of the daemon, and how it becomes a tracker_config.
 *
 *      # one "key = value" a line; a line that begins with # is a comment; blanks around both are dropped
 *      group = shop
 *      queue = orders                               again for each queue
 *      queue.orders.markers = orders__shop__markers           where the names are not the default ones
 *      kafka.bootstrap.servers = kafka1:9092,kafka2:9092      any property of librdkafka
 *      kafka.sasl.password = env:KAFKA_PASSWORD               a value from the environment ...
 *      kafka.ssl.key.password = file:/run/secrets/key         ... or from a file, without the newline at its end
 *
 *      token_file = /run/secrets/token              for sasl.mechanism OAUTHBEARER: read when needed, again every 30 s
 *
 * So secrets are never in argv, and need not be in this file. An unknown key or property, a key that comes twice and a value that does
 * not fit are refused with the number of the line; so are, with the key, topics that get in each other's way: dead letters that lead
 * back to their queue, markers that are a queue, and such. A byte order mark at the beginning is skipped.
 *
 * Thread rule: pure but for the files and the environment it reads. */
#ifndef TRACKER_SETTINGS_H
#define TRACKER_SETTINGS_H

#include "command.h"

typedef struct tracker_settings {
    tracker_config config; /* all strings owned */
    bool json;             /* log lines as JSON, else as text */
    char *metrics_file;    /* NULL = none */
    char *token_file;      /* of OAUTHBEARER, read again every 30 s; NULL = none */
    int64_t metrics_interval_ms;
    int64_t metrics_port; /* 0 = none; of 127.0.0.1, where it was built in */
    int64_t log_level;    /* syslog's: of librdkafka's lines, the most talkative that is shown */
} tracker_settings;

/* Reads a whole file. NULL, or what is wrong, in words (static buffer); then nothing is left to be freed. */
const char *tracker_settings_read(const char *path, tracker_settings *out);
void tracker_settings_free(tracker_settings *settings);

#endif
