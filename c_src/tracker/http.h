/* http - the metrics on a port of the loopback interface: an optional build (make HTTP=1, with libmicrohttpd), which the default one does
 * without.
 *
 *      loop --publish--> text, under a lock --GET /metrics--> libmicrohttpd's own thread
 *
 * Nothing of the loop is touched by that thread; it sends what was published last. Bounds: 32 connections, each ended after
 * 3 s in which nothing comes or goes (others wait as long), and the text once more for each of them. Only 127.0.0.1 is listened on: who is let in is a proxy's business. */
#ifndef TRACKER_HTTP_H
#define TRACKER_HTTP_H

#include <stdbool.h>
#include <stddef.h>

bool tracker_http_built(void);
/* One server a process. False: cannot listen (errno). */
bool tracker_http_start(int port);
/* Takes text (malloc); n bytes of it count. */
void tracker_http_publish(char *text, size_t n);

#endif
