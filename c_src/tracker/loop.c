/* loop - the tracker's event loop: one thread, one poll(), everything else beside it.
 *
 *   poll( stdin, stdout when frames wait, signal, consumer control, marker records, producer, helper threads; timeout = next deadline )
 *
 *   IDLE --configure--> CHECKING --topics exist--> RUNNING <--> REVOKING        REVOKE: new copies stop; those under way, their ENDs
 *     |                    |                        |    |                      and the commit are waited for, bounded; then unassign
 *     +--------- EOF, SIGTERM, stop ----------------+----+--> STOPPING -> LEAVING -> CLOSING -> ENDED
 *
 * The end takes less than 2 s in every state: each step has its own limit, alarm() stands behind them, and no helper thread is
 * waited for. Order within a turn: input, then what Kafka says, then decisions, then output; ENDs of the turn are coalesced.
 * Where an assigned partition begins is recover.c's. */
#include "tracker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    OUT_BYTES = 8 << 20,
    OUT_HIGH = 4 << 20,
    SUMS_MS = 100,
    REVOKE_MS = 5000,
    REVOKE_COMMIT_MS = 2000,
    STOP_MS = 700,
    STOP_COMMIT_MS = 400,
    LEAVE_MS = 200,
    CLOSE_MS = 400,
    LAST_WORDS_MS = 100,
    RETRY_MS = 1000,
    ASLEEP_MS = 1000
};

void tracker_no_memory(void)
{
    fputs("kmq_tracker: out of memory\n", stderr);
    _exit(3);
}

void *tracker_alloc(size_t size)
{
    void *p = calloc(1, size ? size : 1);
    if (!p) tracker_no_memory();
    return p;
}

int64_t tracker_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* ------------------------------------------------------------------ events */

void tracker_event_send(tracker *t)
{
    if (t->daemon) {
        tracker_daemon_event(t->daemon, t->scratch.buff, (size_t)t->scratch.index);
        return;
    }
    /* Events are dropped when nobody reads them; replies are not: input is not read meanwhile. */
    frame_out_put(&t->out, t->scratch.buff, (size_t)t->scratch.index);
}

static void reply_atom(tracker *t, int64_t id, const char *atom)
{
    tracker_reply_begin(&t->scratch, id);
    tracker_put_atom(&t->scratch, atom);
    tracker_event_send(t);
}

static void reply_error(tracker *t, int64_t id, const char *reason, const char *detail)
{
    tracker_reply_begin(&t->scratch, id);
    ei_x_encode_tuple_header(&t->scratch, 2);
    tracker_put_atom(&t->scratch, "error");
    if (detail) {
        ei_x_encode_tuple_header(&t->scratch, 2);
        tracker_put_atom(&t->scratch, reason);
        tracker_put_atom(&t->scratch, detail);
    } else {
        tracker_put_atom(&t->scratch, reason);
    }
    tracker_event_send(t);
}

/* ------------------------------------------------------------------ tokens */

enum { TOKEN_AGAIN_MS = 10000, TOKEN_FILE_MS = 30000, TOKEN_FILE_AGAIN_MS = 5000, TOKEN_LEAST_MS = 1000 };

static int64_t wall_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* To the loop's own clients; the helper threads look for themselves. */
static void token_give(tracker *t)
{
    kafka_error err;
    if (tracker_token_give(&t->token, &t->token_seen, t->consumer, t->producer, &err) != KAFKA_OK)
        tracker_alarm(t, &t->alarm_ms[ALARM_TOKEN], "token", NULL, -1, "%s", err.text);
}

static void token_file(tracker *t)
{
    kafka_token fresh;
    const char *wrong = tracker_token_read(t->token_file, &fresh);
    t->token_ask_ms = t->now_ms + (wrong ? TOKEN_FILE_AGAIN_MS : TOKEN_FILE_MS);
    if (wrong) {
        tracker_alarm(t, &t->alarm_ms[ALARM_TOKEN], "token", NULL, -1, "token_file: %s: %s", t->token_file, wrong);
        return;
    }
    if (t->token.token.token && strcmp(t->token.token.token, fresh.token) == 0 &&
        t->token.token.expires_ms - wall_ms() > fresh.expires_ms - t->token.token.expires_ms) {
        tracker_token_clear(&fresh); /* the same, and young enough */
        return;
    }
    tracker_token_set(&t->token, &fresh);
}

/* A token is asked for at 80 % of the life of the one before, and again until it comes. */
static void token_step(tracker *t)
{
    if (t->now_ms >= t->token_ask_ms) {
        if (t->token_file) {
            token_file(t);
        } else {
            t->token_ask_ms = t->now_ms + TOKEN_AGAIN_MS;
            tracker_event_begin(&t->scratch, "token", 0);
            tracker_event_send(t);
        }
    }
    token_give(t);
}

void tracker_token_want(tracker *t)
{
    if (t->token_ask_ms == INT64_MAX) t->token_ask_ms = t->now_ms;
}

/* ------------------------------------------------------------------ parts */

tracker_queue *tracker_queue_of(tracker *t, const char *markers)
{
    for (size_t i = 0; i < t->config.n_queues; i++)
        if (strcmp(t->queues[i].markers, markers) == 0) return &t->queues[i];
    return NULL;
}

static void parts_clear(tracker *t)
{
    tracker_sums_tell(t);
    while (t->parts) {
        tracker_part *part = t->parts;
        t->parts = part->next;
        part->gone = true;
        part->records = NULL;
        tracker_past_keep(t, part);
        tracker_checkpoint_drop(part);
        tracker_ahead_drop(t, part);
        tracker_txn_part_drop(t, part);
        tracker_part_put(part);
    }
    tracker_redeliver_drop(t);
}

/* The first comes last next time, so that no partition is always served first. */
static void parts_rotate(tracker *t)
{
    tracker_part *first = t->parts, **end = &t->parts;
    if (!first || !first->next) return;
    t->parts = first->next;
    first->next = NULL;
    while (*end) end = &(*end)->next;
    *end = first;
}

/* ------------------------------------------------------------------ assignment */

static void unassign(tracker *t)
{
    kafka_error err;
    kafka_partition *partitions = NULL;
    size_t n = 0;
    for (tracker_part *part = t->parts; part; part = part->next) n++;
    partitions = tracker_alloc(n * sizeof *partitions);
    n = 0;
    for (tracker_part *part = t->parts; part; part = part->next)
        partitions[n++] = (kafka_partition){.topic = part->queue->markers, .partition = part->partition};
    parts_clear(t);
    if (kafka_consumer_unassign(t->consumer, &err) != KAFKA_OK) tracker_error_event(t, &err);
    if (n) tracker_partitions_event(t, "revoked", partitions, n);
    free(partitions);
    if (t->mode == MODE_REVOKING) t->mode = MODE_RUNNING;
}

/* Where a topic grows, librdkafka joins anew without waiting for what it takes away: then this is in its place. */
static void on_assign(tracker *t, const kafka_event *event)
{
    kafka_error err;
    t->epoch++;
    if (t->mode == MODE_REVOKING || t->parts) unassign(t);
    if (t->mode != MODE_RUNNING || event->n_partitions == 0) {
        kafka_consumer_assign(t->consumer, NULL, 0, &err);
        return;
    }
    tracker_recover(t, event->partitions, event->n_partitions);
}

static void on_revoke(tracker *t, const kafka_event *event)
{
    t->epoch++;
    if (t->mode != MODE_RUNNING || event->lost || !t->parts) {
        unassign(t);
        return;
    }
    t->mode = MODE_REVOKING;
    t->final_commit = false;
    t->step_until_ms = t->now_ms + REVOKE_MS;
    tracker_redeliver_drop(t);
}

/* What is under way first, then the last commit. True when both are done, or their time is up. */
static bool wound_up(tracker *t, int64_t commit_limit_ms)
{
    bool in_time = t->now_ms < t->step_until_ms;
    if (!t->final_commit) {
        if (in_time && (t->n_copies || t->n_txns || t->n_ends || t->n_commits)) return false;
        t->final_commit = true;
        t->step_until_ms = t->now_ms + commit_limit_ms;
        tracker_commits_send(t);
        return t->n_commits == 0;
    }
    return !in_time || t->n_commits == 0;
}

/* ------------------------------------------------------------------ start */

typedef struct check_job {
    helper_job job;
    const tracker_config *config;
    int rc;
    kafka_error error;
    char cluster[128];
    int counts[][4]; /* per queue: markers, queue, copies, dead letters */
} check_job;

static void check_run(helper_job *job, void *thread)
{
    check_job *check = (check_job *)(void *)job;
    kafka_admin *admin = tracker_group_admin(thread, &check->error);
    check->rc =
        admin ? kafka_admin_cluster_id(admin, check->cluster, sizeof check->cluster, TRACKER_ASK_MS, &check->error)
              : KAFKA_EKAFKA;
    for (size_t i = 0; i < check->config->n_queues; i++) {
        const tracker_queue_config *queue = &check->config->queues[i];
        const char *topics[] = {queue->markers, queue->topic, queue->copies, queue->dead_letters};
        int replication;
        for (size_t k = 0; k < 4 && check->rc == KAFKA_OK; k++)
            check->rc = kafka_admin_partitions(admin, topics[k], TRACKER_ASK_MS, &check->counts[i][k], &replication,
                                               &check->error);
    }
}

static bool consumer_open(tracker *t, kafka_error *err)
{
    kafka_property ours[] = {{"session.timeout.ms", "6000"},
                             {"heartbeat.interval.ms", "1500"},
                             {"partition.assignment.strategy", "roundrobin"},
                             {"queued.min.messages", "50000"},
                             {"queued.max.messages.kbytes", "8192"},
                             {"socket.nagle.disable", "true"},
                             {"fetch.error.backoff.ms", "100"},
                             {NULL, NULL},
                             {NULL, NULL},
                             {NULL, NULL},
                             {NULL, NULL}};
    size_t n = 7, n_topics = t->config.n_queues;
    if (t->sandbox) { /* a mock broker sleeps the wait out, whatever comes, and each rebalance takes a session */
        ours[n++] = (kafka_property){"fetch.wait.max.ms", "10"};
        ours[n++] = (kafka_property){"session.timeout.ms", "3000"};
    }
    /* Started again after a kill, it is the same member, and gets its partitions at once instead of after the session. */
    if (t->config.instance && !t->sandbox) ours[n++] = (kafka_property){"group.instance.id", t->config.instance};
    if (kafka_version_number() >= 0x02020000) ours[n++] = (kafka_property){"fetch.queue.backoff.ms", "10"};
    kafka_property *props = tracker_alloc((n + t->config.n_props + 3) * sizeof *props);
    const char **topics = tracker_alloc(n_topics * sizeof *topics);
    memcpy(props, ours, n * sizeof *props);
    memcpy(props + n, t->config.props, t->config.n_props * sizeof *props);
    n += t->config.n_props;
    props[n++] = (kafka_property){"group.id", t->config.tracker_group};
    props[n++] = (kafka_property){"isolation.level", "read_committed"}; /* an aborted END has ended nothing */
    props[n++] =
        (kafka_property){"auto.offset.reset", "error"}; /* a position that is gone must be told, not skipped over */
    for (size_t i = 0; i < n_topics; i++) topics[i] = t->queues[i].markers;
    kafka_wake control = {.fd = t->control_wake[1]}, records = {.fd = t->records_wake[1]};
    int rc = kafka_consumer_open(props, n, &control, &records, &t->consumer, err);
    if (rc == KAFKA_OK) rc = kafka_consumer_subscribe(t->consumer, topics, n_topics, err);
    if (rc != KAFKA_OK && t->consumer) {
        kafka_consumer_destroy(t->consumer, NULL, NULL);
        t->consumer = NULL;
    }
    free(props);
    free(topics);
    return rc == KAFKA_OK;
}

static void target_init(tracker_target *target, const char *topic, bool dead, int n_partitions)
{
    target->topic = topic;
    target->dead = dead;
    target->n_partitions = n_partitions;
    target->state = n_partitions > 0 ? TARGET_OPEN : TARGET_MISSING;
}

static void check_done(helper_job *job, void *owner)
{
    check_job *check = (check_job *)(void *)job;
    tracker *t = owner;
    kafka_error err;
    const char *missing = NULL, *how = "";
    t->checking = false;
    t->check_ms = t->now_ms + RETRY_MS;
    if (t->mode != MODE_CHECKING) goto done;
    if (check->rc != KAFKA_OK) {
        tracker_failed(t, ALARM_CHECK, &check->error, "kafka", "cannot look at the topics");
        goto done;
    }
    for (size_t i = 0; i < t->config.n_queues; i++) {
        tracker_queue *queue = &t->queues[i];
        if (check->counts[i][0] == 0) {
            missing = queue->markers;
            how = "does not exist: mix kmq.topics create makes it, or a pipeline with create_topics: true";
        }
        if (check->counts[i][1] == 0) {
            missing = queue->topic;
            how = "does not exist: it is the queue, create it first";
        }
        target_init(&queue->copies, t->config.queues[i].copies, false, check->counts[i][2]);
        target_init(&queue->dead_letters, t->config.queues[i].dead_letters, true, check->counts[i][3]);
    }
    if (missing) {
        tracker_alarm(t, &t->alarm_ms[ALARM_CHECK], "missing_topic", missing, -1, "%s", how);
        goto done;
    }
    t->sandbox = strncmp(check->cluster, "mockCluster", 11) == 0;
    if (t->sandbox && t->config.transactional) {
        tracker_alarm(t, &t->alarm_ms[ALARM_CHECK], "transaction", NULL, -1,
                      "a sandbox has no transactions: redelivery = idempotent, or a real Kafka");
        goto done;
    }
    if ((!t->producer && !tracker_producer_open(t, &err)) || !consumer_open(t, &err)) {
        tracker_error_event(t, &err);
        goto done;
    }
    t->token_seen = 0; /* the consumer is new */
    t->mode = MODE_RUNNING;
    tracker_event_begin(&t->scratch, "started", 0);
    tracker_event_send(t);
done:
    free(check);
}

static void check_start(tracker *t)
{
    check_job *check = tracker_alloc(sizeof *check + t->config.n_queues * sizeof check->counts[0]);
    check->job.run = check_run;
    check->job.done = check_done;
    check->config = &t->config;
    t->checking = true;
    helper_give(&t->asks, &check->job);
}

/* t->config is there. */
static void begin(tracker *t)
{
    t->queues = tracker_alloc(t->config.n_queues * sizeof *t->queues);
    for (size_t i = 0; i < t->config.n_queues; i++) {
        tracker_queue *queue = &t->queues[i];
        queue->topic = t->config.queues[i].topic;
        queue->markers = t->config.queues[i].markers;
        kmq_marker_scope_init(&queue->scope, queue->topic, strlen(queue->topic), t->config.group,
                              strlen(t->config.group));
    }
    tracker_rate_init(&t->rate, t->config.rate, t->now_ms);
    for (size_t i = 0; i < sizeof t->threads / sizeof t->threads[0]; i++)
        t->threads[i] = tracker_thread_new(&t->config, &t->token);
    if (helper_start(&t->asks, t->jobs_wake[1], t->threads, 1, tracker_thread_rest, TRACKER_REST_S) ||
        helper_start(&t->loads, t->jobs_wake[1], t->threads + 1, 2, tracker_thread_rest, TRACKER_REST_S) ||
        helper_start(&t->reads, t->jobs_wake[1], t->threads + 3, 5, tracker_thread_rest, TRACKER_REST_S) ||
        helper_start(&t->aheads, t->jobs_wake[1], t->threads + 8, 1, tracker_thread_rest, TRACKER_REST_S)) {
        fputs("kmq_tracker: cannot start threads\n", stderr);
        t->status = 2;
        t->mode = MODE_ENDED;
        return;
    }
    t->mode = MODE_CHECKING;
    check_start(t);
}

static void configure(tracker *t, const tracker_command *command)
{
    if (t->mode != MODE_IDLE) {
        reply_error(t, command->id, "already_configured", NULL);
        return;
    }
    const char *wrong = tracker_config_decode(command, &t->config);
    if (wrong) {
        reply_error(t, command->id, "badarg", wrong);
        return;
    }
    begin(t);
    reply_atom(t, command->id, "ok");
}

static void take_token(tracker *t, const tracker_command *command)
{
    kafka_token fresh;
    const char *wrong = tracker_token_decode(command, &fresh);
    if (wrong) {
        tracker_token_clear(&fresh);
        reply_error(t, command->id, "badarg", wrong);
        return;
    }
    int64_t left = fresh.expires_ms - wall_ms();
    t->token_ask_ms = t->now_ms + (left / 5 * 4 > TOKEN_LEAST_MS ? left / 5 * 4 : TOKEN_LEAST_MS);
    tracker_token_set(&t->token, &fresh);
    token_give(t);
    reply_atom(t, command->id, "ok");
}

/* ------------------------------------------------------------------ info */

static const char *mode_name(tracker_mode mode)
{
    switch (mode) {
    case MODE_IDLE: return "idle";
    case MODE_CHECKING: return "checking";
    case MODE_RUNNING: return "running";
    case MODE_REVOKING: return "revoking";
    case MODE_STOPPING:
    case MODE_LEAVING:
    case MODE_CLOSING:
    case MODE_ENDED: break;
    }
    return "stopping";
}

static const char *state_name(tracker_part_state state)
{
    switch (state) {
    case PART_NEW: return "new";
    case PART_REPLAY: return "replay";
    case PART_READY: return "ready";
    case PART_STOPPED: break;
    }
    return "stopped";
}

static int64_t lag_of(const tracker_part *part)
{
    return part->known_end > part->position ? part->known_end - part->position : 0;
}

/* Five pairs about what is open. */
static void open_gauges(tracker *t, const tracker_part *part)
{
    ei_x_buff *out = &t->scratch;
    tracker_part_gauges gauges;
    tracker_part_measure(t, part, &gauges);
    tracker_pair_int(out, "oldest_age_ms", gauges.oldest_age_ms);
    tracker_pair_int(out, "next_due_ms", gauges.next_due_ms);
    tracker_pair_int(out, "due", gauges.due);
    tracker_pair_int(out, "checkpoint_age_ms", gauges.checkpoint_age_ms);
    tracker_pair_int(out, "checkpoint_as_of", part->reference.as_of);
}

static void reply_info(tracker *t, int64_t id)
{
    ei_x_buff *out = &t->scratch;
    tracker_reply_begin(out, id);
    ei_x_encode_map_header(out, 11);
    tracker_pair_atom(out, "state", mode_name(t->mode));
    tracker_pair_int(out, "uptime_ms", t->now_ms - t->started_ms);
    tracker_pair_text(out, "librdkafka", kafka_version());
    tracker_pair_int(out, "os_pid", getpid());
    tracker_pair_int(out, "redelivered", t->n_redelivered);
    tracker_pair_int(out, "dead_lettered", t->n_dead_lettered);
    tracker_pair_int(out, "gone", t->n_gone);
    tracker_pair_int(out, "read_ahead", t->n_ahead);
    tracker_pair_int(out, "read_ahead_bytes", (int64_t)t->ahead_bytes);
    tracker_pair_int(out, "unacknowledged_ends", (int64_t)t->n_ends);
    tracker_put_atom(out, "partitions");
    for (tracker_part *part = t->parts; part; part = part->next) {
        ei_x_encode_list_header(out, 1);
        ei_x_encode_map_header(out, 20);
        tracker_pair_text(out, "topic", part->queue->topic);
        tracker_pair_int(out, "partition", part->partition);
        tracker_pair_atom(out, "state", state_name(part->state));
        tracker_pair_int(out, "open", kmq_lease_book_open(&part->book));
        tracker_pair_int(out, "in_flight", (int64_t)part->n_active);
        tracker_pair_int(out, "held", (int64_t)part->n_held);
        tracker_pair_int(out, "position", part->position);
        tracker_pair_int(out, "committed", part->committed);
        tracker_pair_int(out, "lag", lag_of(part));
        tracker_pair_int(out, "read", part->n_read);
        tracker_pair_int(out, "below", part->below);
        tracker_pair_int(out, "late_acks", part->n_late);
        tracker_pair_int(out, "malformed", part->n_malformed);
        tracker_pair_int(out, "foreign", part->n_foreign);
        tracker_pair_int(out, "trimmed", part->trimmed);
        open_gauges(t, part);
    }
    ei_x_encode_empty_list(out);
    tracker_event_send(t);
}

static void late_tell(tracker *t, tracker_part *part)
{
    if (part->n_late == part->told_late) return;
    tracker_part_event(t, "late_acks", part, 1);
    tracker_pair_int(&t->scratch, "count", part->n_late - part->told_late);
    tracker_event_send(t);
    part->told_late = part->n_late;
}

static void malformed_tell(tracker *t, tracker_part *part)
{
    if (part->n_malformed == part->told_malformed && part->n_foreign == part->told_foreign) return;
    tracker_part_event(t, "malformed", part, 3);
    tracker_pair_int(&t->scratch, "malformed", part->n_malformed - part->told_malformed);
    tracker_pair_int(&t->scratch, "foreign", part->n_foreign - part->told_foreign);
    tracker_pair_int(&t->scratch, "offset", part->odd_offset);
    tracker_event_send(t);
    part->told_malformed = part->n_malformed;
    part->told_foreign = part->n_foreign;
}

static void gauges(tracker *t)
{
    int64_t waiting = (int64_t)(t->pauses.n + kmq_heap_count(&t->spaced));
    for (size_t i = 0; i < t->config.n_queues; i++)
        waiting += (int64_t)(t->queues[i].copies.waits.n + t->queues[i].dead_letters.waits.n +
                             t->queues[i].copies.blocked.n + t->queues[i].dead_letters.blocked.n);
    for (tracker_part *part = t->parts; part; part = part->next) {
        malformed_tell(t, part);
        late_tell(t, part);
    }
    tracker_event_begin(&t->scratch, "gauges", 3);
    tracker_pair_int(&t->scratch, "in_flight", (int64_t)t->n_active);
    tracker_pair_int(&t->scratch, "waiting", waiting);
    tracker_put_atom(&t->scratch, "partitions");
    for (tracker_part *part = t->parts; part; part = part->next) {
        tracker_part_mark(part, t->now_ms);
        ei_x_encode_list_header(&t->scratch, 1);
        ei_x_encode_map_header(&t->scratch, 9);
        tracker_pair_text(&t->scratch, "topic", part->queue->topic);
        tracker_pair_int(&t->scratch, "partition", part->partition);
        tracker_pair_int(&t->scratch, "open", kmq_lease_book_open(&part->book));
        tracker_pair_int(&t->scratch, "lag", lag_of(part));
        open_gauges(t, part);
    }
    ei_x_encode_empty_list(&t->scratch);
    tracker_event_send(t);
}

/* ------------------------------------------------------------------ the end */

static void stop(tracker *t)
{
    if (t->mode >= MODE_STOPPING) return;
    alarm(2); /* stands behind every wait below */
    if (t->mode < MODE_RUNNING || !t->consumer) {
        t->mode = MODE_ENDED;
        return;
    }
    t->mode = MODE_STOPPING;
    t->final_commit = false;
    t->step_until_ms = t->now_ms + STOP_MS;
    tracker_redeliver_drop(t);
}

/* A member with an id of its own stays in the group when it only closes: its partitions would wait for its session to end. */
static void leave_begin(tracker *t)
{
    kafka_error err;
    t->mode = MODE_LEAVING;
    t->step_until_ms = t->now_ms + LEAVE_MS;
    bool is_static = (t->config.instance && !t->sandbox) ||
                     kafka_property_get(t->config.props, t->config.n_props, "group.instance.id");
    if (!is_static || kafka_consumer_unsubscribe(t->consumer, &err) != KAFKA_OK) t->step_until_ms = t->now_ms;
}

static void close_begin(tracker *t)
{
    kafka_error err;
    t->mode = MODE_CLOSING;
    t->epoch++;
    t->step_until_ms = t->now_ms + CLOSE_MS;
    if (kafka_consumer_close_begin(t->consumer, &err) != KAFKA_OK) t->mode = MODE_ENDED;
}

static void mode_step(tracker *t)
{
    switch (t->mode) {
    case MODE_IDLE: break;
    case MODE_CHECKING:
        if (!t->checking && t->now_ms >= t->check_ms) check_start(t);
        break;
    case MODE_RUNNING: break;
    case MODE_REVOKING:
        if (wound_up(t, REVOKE_COMMIT_MS)) unassign(t);
        break;
    case MODE_STOPPING:
        if (wound_up(t, STOP_COMMIT_MS)) leave_begin(t);
        if (t->mode == MODE_STOPPING) break;
        /* fall through */
    case MODE_LEAVING: /* the revocation clears the parts */
        if (!t->parts || t->now_ms >= t->step_until_ms) close_begin(t);
        break;
    case MODE_CLOSING:
        if (kafka_consumer_closed(t->consumer) || t->now_ms >= t->step_until_ms) t->mode = MODE_ENDED;
        break;
    case MODE_ENDED: break;
    }
}

/* ------------------------------------------------------------------ input */

static void run_command(tracker *t, const tracker_command *command)
{
    switch (command->verb) {
    case TRACKER_CONFIGURE: configure(t, command); break;
    case TRACKER_TOKEN: take_token(t, command); break;
    case TRACKER_INFO: reply_info(t, command->id); break;
    case TRACKER_PING: reply_atom(t, command->id, "pong"); break;
    case TRACKER_STOP:
        t->stop_id = command->id;
        stop(t);
        break;
    case TRACKER_UNKNOWN: reply_error(t, command->id, "unknown_command", NULL); break;
    }
}

static void malformed(tracker *t, const char *what)
{
    fprintf(stderr, "kmq_tracker: %s: the frames on stdin are not to be trusted any more\n", what);
    t->status = 1;
    t->mode = MODE_ENDED;
}

static void read_input(tracker *t)
{
    const uint8_t *body;
    size_t len;
    int rc = frame_in_read(&t->in);
    if (rc != FRAME_OK) {
        t->input_ended = true;
        if (rc == FRAME_ENOMEM)
            malformed(t, "no memory for a frame");
        else if (frame_in_rest(&t->in))
            malformed(t, "stdin ended within a frame");
        else
            stop(t);
        return;
    }
    while (t->mode != MODE_ENDED && (rc = frame_in_next(&t->in, &body, &len)) != 0) {
        tracker_command command;
        if (rc < 0)
            malformed(t, "a frame is too long");
        else if (tracker_command_decode(body, len, &command))
            malformed(t, "a frame is not {Id, Command, Args}");
        else
            run_command(t, &command);
    }
}

static void consumer_events(tracker *t)
{
    kafka_event event;
    while (t->consumer && kafka_consumer_poll(t->consumer, &event)) {
        switch (event.type) {
        case KAFKA_EVENT_ASSIGN: on_assign(t, &event); break;
        case KAFKA_EVENT_REVOKE: on_revoke(t, &event); break;
        case KAFKA_EVENT_COMMIT: tracker_commit_done(t, &event); break;
        case KAFKA_EVENT_ERROR:
            tracker_client_error(t, &event.error);
            if (event.error.fatal) { /* the owner starts us again: all state is in M */
                if (t->daemon) fprintf(stderr, "kmq_tracker: %s\n", event.error.text);
                t->status = 2;
                t->mode = MODE_ENDED;
            }
            break;
        case KAFKA_EVENT_LOG: tracker_log_event(t, event.level, event.text); break;
        case KAFKA_EVENT_TOKEN: tracker_token_want(t); break;
        case KAFKA_EVENT_UP:
        case KAFKA_EVENT_DOWN: kafka_outage_link(&t->outage, &event, t->now_ms); break;
        case KAFKA_EVENT_STATS:
        case KAFKA_EVENT_TIMES: /* never asked */
        case KAFKA_EVENT_NONE: break;
        }
        kafka_event_free(&event);
    }
}

static void jobs_done(tracker *t)
{
    helper_job *job;
    if (!t->queues) return;
    while ((job = helper_take(&t->asks)) || (job = helper_take(&t->loads)) || (job = helper_take(&t->reads)) ||
           (job = helper_take(&t->aheads)) || (job = tracker_txn_done(t)))
        job->done(job, t);
}

/* ------------------------------------------------------------------ the loop */

static void least(int64_t *wait, int64_t other)
{
    if (other < *wait) *wait = other;
}

static int next_deadline(const tracker *t)
{
    int64_t wait = TRACKER_TICK_MS, now = t->now_ms;
    if (t->mode == MODE_ENDED) return 0;
    if (t->mode == MODE_IDLE) return -1;
    if (t->mode == MODE_CHECKING && !t->checking) least(&wait, t->check_ms - now);
    if (t->mode >= MODE_REVOKING) least(&wait, t->step_until_ms - now);
    if (t->mode == MODE_CLOSING) least(&wait, 5); /* closed() has no wake-up of its own */
    for (const tracker_part *part = t->parts; part; part = part->next) least(&wait, tracker_part_wait(t, part));
    if (t->token_ask_ms != INT64_MAX) least(&wait, t->token_ask_ms - now);
    least(&wait, t->tick_ms - now);
    if (tracker_commits_wanted(t)) least(&wait, t->commit_ms - now);
    if (tracker_sums_open(t)) least(&wait, t->sums_ms - now);
    if (t->recover_waiting) least(&wait, t->recover_retry_ms - now);
    least(&wait, tracker_send_wait(t));
    least(&wait, tracker_redeliver_wait(t));
    least(&wait, tracker_txn_wait(t));
    int64_t rate = tracker_rate_wait(&t->rate, now);
    if (rate > 0) least(&wait, rate);
    return wait < 0 ? 0 : (int)wait;
}

static void drain_pipe(int fd)
{
    char bytes[256];
    while (read(fd, bytes, sizeof bytes) == (ssize_t)sizeof bytes) continue;
}

static void metrics(tracker *t)
{
    t->metrics_ms = t->now_ms + t->metrics_interval_ms;
    if (!tracker_daemon_metrics(t->daemon))
        tracker_alarm(t, &t->alarm_ms[ALARM_METRICS], "metrics_file", NULL, -1, "cannot be written: %s",
                      strerror(errno));
}

static void turn(tracker *t)
{
    token_step(t);
    consumer_events(t);
    jobs_done(t);
    tracker_producer_step(t);
    tracker_redeliver_step(t); /* before decisions: what it gives back is due again */
    for (tracker_part *part = t->parts, *next; part; part = next) {
        next = part->next; /* reading may replace it */
        if (part->hot) tracker_part_read(t, part);
    }
    bool planned = false;
    for (tracker_part *part = t->parts; part; part = part->next) {
        tracker_part_step(t, part);
        planned |= tracker_redeliver_take(t, part);
        tracker_ahead_step(t, part);
        tracker_checkpoint_step(t, part);
        tracker_trim_step(t, part);
    }
    if (planned) tracker_redeliver_step(t);
    for (tracker_part *part = t->parts; part && !t->witnessing; part = part->next) tracker_witness_step(t, part);
    tracker_txn_step(t);
    parts_rotate(t);
    tracker_commits_ask(t);
    tracker_ends_flush(t);
    tracker_recover_again(t);
    if (t->now_ms >= t->commit_ms) {
        t->commit_ms = t->now_ms + TRACKER_COMMIT_MS;
        if (t->mode == MODE_RUNNING) tracker_commits_send(t);
    }
    if (t->now_ms >= t->sums_ms) {
        t->sums_ms = t->now_ms + SUMS_MS;
        tracker_sums_tell(t);
    }
    if (t->now_ms >= t->tick_ms) {
        t->tick_ms = t->now_ms + TRACKER_TICK_MS;
        tracker_outage_step(t);
        if (t->mode == MODE_RUNNING) gauges(t);
    }
    if (t->daemon && t->now_ms >= t->metrics_ms) metrics(t);
    mode_step(t);
}

/* The process did not run for a while (stopped, swapped, suspended): others may have redelivered meanwhile. What was decided before
 * and is not with the producer yet is decided again, behind a new CLOCK. */
static void woken(tracker *t)
{
    t->woken_ms = t->now_ms;
    for (tracker_part *part = t->parts; part; part = part->next) part->decide_until_ms = 0;
    tracker_redeliver_drop(t);
}

enum { IN, OUT, SIGNAL, CONTROL, RECORDS, PRODUCER, JOBS, N_FDS };

static void wait_and_read(tracker *t)
{
    struct pollfd fds[N_FDS] = {
        [IN] = {.fd = t->input_ended ? -1 : t->in.fd, .events = frame_out_waiting(&t->out) < OUT_HIGH ? POLLIN : 0},
        [OUT] = {.fd = frame_out_waiting(&t->out) ? t->out.fd : -1, .events = POLLOUT},
        [SIGNAL] = {.fd = t->signal_fd, .events = POLLIN},
        [CONTROL] = {.fd = t->control_wake[0], .events = POLLIN},
        [RECORDS] = {.fd = t->records_wake[0], .events = POLLIN},
        [PRODUCER] = {.fd = t->producer_wake[0], .events = POLLIN},
        [JOBS] = {.fd = t->jobs_wake[0], .events = POLLIN},
    };
    int timeout_ms = next_deadline(t);
    int n = poll(fds, N_FDS, timeout_ms);
    int64_t before_ms = t->now_ms;
    t->now_ms = tracker_now_ms();
    if (timeout_ms >= 0 && t->now_ms - before_ms - timeout_ms > ASLEEP_MS) woken(t);
    if (n <= 0) return;
    for (int i = CONTROL; i < N_FDS; i++)
        if (fds[i].revents & POLLIN) drain_pipe(fds[i].fd); /* before the queues are: a wake-up in between stays */
    if (fds[RECORDS].revents & POLLIN)
        for (tracker_part *part = t->parts; part; part = part->next) part->hot = true;
    if (fds[SIGNAL].revents & POLLIN) {
        drain_pipe(t->signal_fd);
        stop(t);
    }
    if (fds[IN].revents) read_input(t);
}

static int make_pipe(int pipe_fds[2])
{
    if (pipe(pipe_fds)) return -1;
    for (int i = 0; i < 2; i++) {
        int flags = fcntl(pipe_fds[i], F_GETFL);
        if (flags < 0 || fcntl(pipe_fds[i], F_SETFL, flags | O_NONBLOCK) || fcntl(pipe_fds[i], F_SETFD, FD_CLOEXEC))
            return -1;
    }
    return 0;
}

/* Bits that tell this process's CLOCKs from others'; not a secret. */
static uint64_t random_bits(void)
{
    uint64_t bits = (uint64_t)tracker_now_ms() << 20 ^ (uint64_t)getpid();
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, &bits, sizeof bits) != (ssize_t)sizeof bits) bits ^= (uint64_t)time(NULL) << 32;
        close(fd);
    }
    return bits;
}

/* The last words, then the owner closes our stdin; it has what is left of the two seconds. */
static void farewell(tracker *t)
{
    if (t->stop_id) reply_atom(t, t->stop_id, "ok");
    frame_out_drain(&t->out, LAST_WORDS_MS);
    int64_t until_ms = tracker_now_ms() + 1000;
    while (t->stop_id && !t->input_ended && t->status == 0) {
        struct pollfd fd = {.fd = t->in.fd, .events = POLLIN};
        int64_t left = until_ms - tracker_now_ms();
        if (left <= 0 || poll(&fd, 1, (int)left) == 0) break;
        if (fd.revents && frame_in_read(&t->in) != FRAME_OK) break;
        t->in.at = t->in.have; /* what comes after stop is not answered */
    }
}

/* NULL: cannot start. */
static tracker *open_loop(int in_fd, int out_fd, int signal_fd)
{
    tracker *t = tracker_alloc(sizeof *t);
    kmq_alloc libc = kmq_alloc_libc();
    kmq_heap_init(&t->spaced, &libc);
    frame_in_init(&t->in, in_fd, FRAME_MAX_BYTES);
    frame_out_init(&t->out, out_fd, OUT_BYTES);
    t->signal_fd = signal_fd;
    t->now_ms = t->started_ms = tracker_now_ms();
    t->sent.next = t->sent.previous = &t->sent;
    tracker_token_init(&t->token);
    t->token_ask_ms = INT64_MAX;
    t->instance = random_bits() & ~UINT64_C(0xffffffff);
    if (ei_x_new(&t->scratch) || make_pipe(t->records_wake) || make_pipe(t->control_wake) ||
        make_pipe(t->producer_wake) || make_pipe(t->jobs_wake)) {
        fputs("kmq_tracker: cannot start\n", stderr);
        return NULL;
    }
    return t;
}

static int serve(tracker *t)
{
    while (t->mode != MODE_ENDED) {
        if (frame_out_flush(&t->out) != FRAME_OK) {
            int fd = t->out.fd;
            t->input_ended = true; /* nobody listens: as if stdin had ended */
            frame_out_free(&t->out);
            frame_out_init(&t->out, fd, 0);
            stop(t);
        }
        wait_and_read(t);
        if (t->mode != MODE_IDLE) turn(t);
    }
    return t->status;
}

int tracker_run(int in_fd, int out_fd, int signal_fd)
{
    tracker *t = open_loop(in_fd, out_fd, signal_fd);
    if (!t) return 2;
    t->scratch.index = 0;
    ei_x_encode_version(&t->scratch);
    ei_x_encode_tuple_header(&t->scratch, 2);
    tracker_put_int(&t->scratch, 0);
    ei_x_encode_tuple_header(&t->scratch, 2);
    tracker_put_atom(&t->scratch, "ready");
    tracker_put_int(&t->scratch, TRACKER_PROTOCOL);
    tracker_event_send(t);
    serve(t);
    farewell(t);
    return t->status;
}

int tracker_run_daemon(tracker_settings *settings, int out_fd, int signal_fd)
{
    tracker *t = open_loop(-1, -1, signal_fd);
    if (!t) return 2;
    t->input_ended = true;
    t->daemon = tracker_daemon_new(settings, out_fd);
    if (!t->daemon) tracker_no_memory();
    t->metrics_interval_ms = settings->metrics_interval_ms;
    t->config = settings->config;
    settings->config = (tracker_config){0};
    t->token_file = settings->token_file;
    if (t->token_file) token_file(t); /* before anything connects */
    begin(t);
    serve(t);
    tracker_daemon_metrics(t->daemon);
    tracker_event_begin(&t->scratch, "stopped", 1);
    tracker_pair_int(&t->scratch, "status", t->status);
    tracker_event_send(t);
    return t->status;
}
