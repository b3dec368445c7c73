/* daemon - the tracker without a BEAM: events become lines on stdout, gauges and counters a file for Prometheus.
 *
 *      event (external term, as it would go to the owner) --+--> one line: text  "2026-01-31T12:00:00.123Z WARNING redelivered topic=orders ..."
 *                                                           |          or JSON  {"time":"...","level":"warning","event":"redelivered","topic":"orders",...}
 *                                                           '--> counters by (topic, partition, cause), latest gauges --every few seconds--> file
 *
 * The file is written beside its place and renamed: a reader sees the old or the new one, whole.
 * Only terms that the program itself has written come in here. Values in events are never secrets: properties are not among them.
 *
 * Thread rule: the loop's. */
#ifndef TRACKER_DAEMON_H
#define TRACKER_DAEMON_H

#include "settings.h"

typedef struct tracker_daemon tracker_daemon;

/* Lines go to out_fd. NULL: no memory. Borrows settings. */
tracker_daemon *tracker_daemon_new(const tracker_settings *settings, int out_fd);
void tracker_daemon_del(tracker_daemon *daemon);

/* One frame's body, {0, {event, Name, #{...}}}; what is not an event is ignored. */
void tracker_daemon_event(tracker_daemon *daemon, const char *term, size_t n);
/* Writes the metrics file, if there is one to be written. False: it cannot be (see errno). */
bool tracker_daemon_metrics(const tracker_daemon *daemon);

#endif
