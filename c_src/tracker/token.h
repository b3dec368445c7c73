/* token - the OAUTHBEARER token of the moment, for all clients of the program.
 *
 *      owner's command, or the daemon's file --> tracker_token --version--> consumer, producer (by the loop)
 *                                                             \--version--> each helper thread's clients, before it uses them
 *
 * Invariants: (1) version only grows, 0 = there was no token yet; (2) who sees a version sees its token whole.
 * Thread rule: set by the loop, given by any thread; the lock is held for the copying and for librdkafka's own copy. */
#ifndef TRACKER_TOKEN_H
#define TRACKER_TOKEN_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "kafka.h"

typedef struct tracker_token {
    pthread_mutex_t lock;
    kafka_token token; /* all strings owned */
    uint32_t version;
} tracker_token;

void tracker_token_init(tracker_token *token);
/* Takes what `fresh` holds. */
void tracker_token_set(tracker_token *token, kafka_token *fresh);
void tracker_token_clear(kafka_token *token); /* frees its strings */
/* To those clients that are there (NULL = it is not) when there is a newer one than *seen; *seen is brought up. A token that the library
 * refuses is told in err (KAFKA_EKAFKA), and not tried again. */
int tracker_token_give(tracker_token *token, uint32_t *seen, kafka_consumer *consumer, kafka_producer *producer,
                       kafka_error *err);
int tracker_token_give_admin(tracker_token *token, uint32_t *seen, kafka_admin *admin, kafka_error *err);
int tracker_token_give_reader(tracker_token *token, uint32_t *seen, kafka_reader *reader, kafka_error *err);
int tracker_token_give_txn(tracker_token *token, uint32_t *seen, kafka_txn *txn, kafka_error *err);
/* The first line of a file as a token that is good until it is read again. NULL, or what is wrong with it. */
const char *tracker_token_read(const char *path, kafka_token *out);

#endif
