/* command - the protocol between the port program and its owner. The grammar stands at the head of command.c. */
#ifndef TRACKER_COMMAND_H
#define TRACKER_COMMAND_H

#include <ei.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kafka.h"
#include "spacing.h"

enum { TRACKER_PROTOCOL = 1 };

typedef struct tracker_queue_config {
    char *topic, *markers, *dead_letters, *copies;
} tracker_queue_config;

/* What configure brings. All strings are owned. */
typedef struct tracker_config {
    kafka_property *props;
    size_t n_props;
    char *group;         /* the consumer group whose messages these are */
    char *tracker_group; /* the group in which trackers share the marker partitions */
    char *count_header;
    char *instance;  /* NULL, or what the trackers of one owner are to the group: one member, whichever of them runs */
    bool kmq_format; /* of what is written; both are read */
    int64_t max_redeliveries;
    bool pointer;            /* a dead letter that is too large goes without its value; else it waits */
    tracker_spacing spacing; /* after a crash or a time-out */
    int64_t rate;            /* copies per second; 0 = no limit */
    /* CHECKPOINT: markers that the commit lags behind, and for how long at least; and how old a commit may be at all */
    int64_t checkpoint_records, checkpoint_pause_ms, checkpoint_age_ms;
    bool transactional; /* copies, ENDs and our commit in one transaction */
    int64_t transaction_timeout_ms;
    int64_t witness_ms;   /* between two looks whether a marker topic is still the one it was */
    bool trim;            /* delete markers below an acknowledged commit ... */
    int64_t trim_records; /* ... so many at once */
    tracker_queue_config *queues;
    size_t n_queues;
} tracker_config;

void tracker_config_defaults(tracker_config *config);
void tracker_config_free(tracker_config *config);

typedef enum tracker_verb {
    TRACKER_CONFIGURE,
    TRACKER_TOKEN,
    TRACKER_INFO,
    TRACKER_PING,
    TRACKER_STOP,
    TRACKER_UNKNOWN
} tracker_verb;

typedef struct tracker_command {
    int64_t id;
    tracker_verb verb;
    const char *args; /* encoded; borrowed from the frame */
    int at;           /* where the arguments begin in args */
} tracker_command;

/* 0, or -1: not a command (the stream is not to be trusted any more). */
int tracker_command_decode(const uint8_t *frame, size_t len, tracker_command *out);
/* Fills config from a configure's arguments. NULL, or the name of what is missing or wrong (static); config is freed then. */
const char *tracker_config_decode(const tracker_command *command, tracker_config *config);

/* The token of a token command, all strings owned. NULL, or what is missing or wrong (static). */
const char *tracker_token_decode(const tracker_command *command, kafka_token *out);

/* Replies and events are written into a buffer of the caller, begun with the version byte. */
void tracker_reply_begin(ei_x_buff *out, int64_t id);                  /* {Id, ... one term follows */
void tracker_event_begin(ei_x_buff *out, const char *name, int pairs); /* {0, {event, Name, #{ ... pairs follow */
void tracker_put_atom(ei_x_buff *out, const char *atom);
void tracker_put_int(ei_x_buff *out, int64_t number);
void tracker_put_text(ei_x_buff *out, const char *text); /* NULL = nil */
void tracker_put_bytes(ei_x_buff *out, const void *bytes, size_t n);
/* key => value of a map */
void tracker_pair_atom(ei_x_buff *out, const char *key, const char *atom);
void tracker_pair_int(ei_x_buff *out, const char *key, int64_t number);
void tracker_pair_text(ei_x_buff *out, const char *key, const char *text);

#endif
