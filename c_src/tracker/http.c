/* http - see http.h. */
#include "http.h"

#include <stdlib.h>

#ifndef KMQ_HTTP

bool tracker_http_built(void) { return false; }
bool tracker_http_start(int port)
{
    (void)port;
    return false;
}
void tracker_http_publish(char *text, size_t n)
{
    (void)n;
    free(text);
}

#else

#include <arpa/inet.h>
#include <microhttpd.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

enum { CONNECTIONS = 32, TIMEOUT_S = 3 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *published;
static size_t published_n;

bool tracker_http_built(void) { return true; }

static enum MHD_Result answer(struct MHD_Connection *connection, unsigned status, const void *text, size_t n)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(n, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    if (!response) return MHD_NO;
    MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8");
    enum MHD_Result result = MHD_queue_response(connection, status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result serve(void *ctx, struct MHD_Connection *connection, const char *path, const char *method,
                             const char *version, const char *upload, size_t *upload_size, void **state)
{
    static const char wrong_method[] = "only GET\n", no_such[] = "there is /metrics\n";
    (void)ctx, (void)version, (void)upload, (void)upload_size, (void)state;
    if (strcmp(method, MHD_HTTP_METHOD_GET) != 0)
        return answer(connection, MHD_HTTP_METHOD_NOT_ALLOWED, wrong_method, sizeof wrong_method - 1);
    if (strcmp(path, "/metrics") != 0) return answer(connection, MHD_HTTP_NOT_FOUND, no_such, sizeof no_such - 1);
    pthread_mutex_lock(&lock);
    enum MHD_Result result = answer(connection, MHD_HTTP_OK, published ? published : "", published_n);
    pthread_mutex_unlock(&lock);
    return result;
}

bool tracker_http_start(int port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old); /* signals are the loop's */
    struct MHD_Daemon *daemon =
        MHD_start_daemon(MHD_USE_AUTO_INTERNAL_THREAD, (uint16_t)port, NULL, NULL, serve, NULL, MHD_OPTION_SOCK_ADDR,
                         &address, MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT,
                         (unsigned)TIMEOUT_S, MHD_OPTION_END);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return daemon != NULL; /* it lives as long as the process */
}

void tracker_http_publish(char *text, size_t n)
{
    pthread_mutex_lock(&lock);
    char *before = published;
    published = text;
    published_n = n;
    pthread_mutex_unlock(&lock);
    free(before);
}

#endif
