/* token - see token.h. */
#include "token.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TOKEN_BYTES = 65536 };

/* A file's token says nothing about its end: who writes the file knows. Long enough that librdkafka does not ask in between. */
static const int64_t file_token_ms = 24 * 3600 * INT64_C(1000);

void tracker_token_init(tracker_token *token)
{
    *token = (tracker_token){.version = 0};
    pthread_mutex_init(&token->lock, NULL);
}

void tracker_token_clear(kafka_token *token)
{
    for (size_t i = 0; i < token->n_extensions; i++) {
        free((void *)(uintptr_t)token->extensions[i].name);
        free((void *)(uintptr_t)token->extensions[i].value);
    }
    free((void *)(uintptr_t)token->extensions);
    free((void *)(uintptr_t)token->token);
    free((void *)(uintptr_t)token->principal);
    *token = (kafka_token){.token = NULL};
}

void tracker_token_set(tracker_token *token, kafka_token *fresh)
{
    pthread_mutex_lock(&token->lock);
    tracker_token_clear(&token->token);
    token->token = *fresh;
    token->version++;
    pthread_mutex_unlock(&token->lock);
    *fresh = (kafka_token){.token = NULL};
}

/* True with the lock held when there is something new. */
static bool newer(tracker_token *token, uint32_t *seen)
{
    pthread_mutex_lock(&token->lock);
    if (token->version != *seen) {
        *seen = token->version;
        return true;
    }
    pthread_mutex_unlock(&token->lock);
    return false;
}

int tracker_token_give(tracker_token *token, uint32_t *seen, kafka_consumer *consumer, kafka_producer *producer,
                       kafka_error *err)
{
    int rc = KAFKA_OK;
    if (!newer(token, seen)) return KAFKA_OK;
    if (consumer) rc = kafka_consumer_set_token(consumer, &token->token, err);
    if (producer && rc == KAFKA_OK) rc = kafka_producer_set_token(producer, &token->token, err);
    pthread_mutex_unlock(&token->lock);
    return rc;
}

int tracker_token_give_admin(tracker_token *token, uint32_t *seen, kafka_admin *admin, kafka_error *err)
{
    if (!newer(token, seen)) return KAFKA_OK;
    int rc = kafka_admin_set_token(admin, &token->token, err);
    pthread_mutex_unlock(&token->lock);
    return rc;
}

int tracker_token_give_reader(tracker_token *token, uint32_t *seen, kafka_reader *reader, kafka_error *err)
{
    if (!newer(token, seen)) return KAFKA_OK;
    int rc = kafka_reader_set_token(reader, &token->token, err);
    pthread_mutex_unlock(&token->lock);
    return rc;
}

int tracker_token_give_txn(tracker_token *token, uint32_t *seen, kafka_txn *txn, kafka_error *err)
{
    if (!newer(token, seen)) return KAFKA_OK;
    int rc = kafka_txn_set_token(txn, &token->token, err);
    pthread_mutex_unlock(&token->lock);
    return rc;
}

const char *tracker_token_read(const char *path, kafka_token *out)
{
    struct timespec now;
    const char *wrong = NULL;
    FILE *file = fopen(path, "r");
    if (!file) return strerror(errno);
    char *text = calloc(1, TOKEN_BYTES + 1);
    size_t n = text ? fread(text, 1, TOKEN_BYTES + 1, file) : 0;
    if (!text || ferror(file)) wrong = "cannot be read";
    fclose(file);
    if (!wrong && n > TOKEN_BYTES) wrong = "is longer than a token";
    if (!wrong) {
        text[strcspn(text, "\r\n")] = 0;
        for (const char *c = text; *c; c++)
            if (*c <= ' ' || *c > '~') wrong = "does not hold a token";
        if (!text[0]) wrong = "is empty";
    }
    char *principal = wrong ? NULL : strdup("kmq");
    if (!wrong && !principal) wrong = "no memory";
    if (wrong) {
        free(text);
        return wrong;
    }
    clock_gettime(CLOCK_REALTIME, &now);
    *out = (kafka_token){.token = text,
                         .principal = principal,
                         .expires_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000 + file_token_ms};
    return NULL;
}
