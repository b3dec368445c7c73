/* resource - the three kinds of native handle, and how their lives end.
 *
 *   open --(close, owner's death, last reference gone)--> closed        each NIF: resource_get, then its own lock and state
 *
 * Destructors and the owner's death never block: clients go to the adapter's reaper thread. A closed handle answers
 * {error, closed}. Counters of what is open feed kmq_nif:live/0. */
#ifndef KMQ_RESOURCE_H
#define KMQ_RESOURCE_H

#include <erl_nif.h>
#include <stdatomic.h>
#include <stdbool.h>

extern ErlNifResourceType *consumer_type, *publisher_type, *admin_type;
extern _Atomic int live_consumers, live_publishers, live_admins;

bool resources_load(ErlNifEnv *env);
void consumer_dtor(ErlNifEnv *env, void *object);
void consumer_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor);
void publisher_dtor(ErlNifEnv *env, void *object);
void publisher_down(ErlNifEnv *env, void *object, ErlNifPid *pid, ErlNifMonitor *monitor);
void admin_dtor(ErlNifEnv *env, void *object);

#define KMQ_NIF(name) ERL_NIF_TERM name(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[])

/* How a call on a normal scheduler is entered, also by itself when it goes on: in test builds by way of a clock (kmq_nif.c). */
#ifdef KMQ_FAILPOINTS
#define NORMAL(name) timed_##name
KMQ_NIF(timed_consumer_poll);
KMQ_NIF(timed_consumer_take);
KMQ_NIF(timed_consumer_settle);
KMQ_NIF(timed_consumer_retry);
KMQ_NIF(timed_consumer_extend);
KMQ_NIF(timed_consumer_info);
KMQ_NIF(timed_publisher_send);
KMQ_NIF(timed_publisher_poll);
#else
#define NORMAL(name) nif_##name
#endif

KMQ_NIF(nif_consumer_open);
KMQ_NIF(nif_consumer_subscribe);
KMQ_NIF(nif_consumer_topics);
KMQ_NIF(nif_consumer_attach);
KMQ_NIF(nif_consumer_poll);
KMQ_NIF(nif_consumer_take);
KMQ_NIF(nif_consumer_lanes);
KMQ_NIF(nif_consumer_settle);
KMQ_NIF(nif_consumer_retry);
KMQ_NIF(nif_consumer_extend);
KMQ_NIF(nif_consumer_reject);
KMQ_NIF(nif_consumer_again);
KMQ_NIF(nif_consumer_assign);
KMQ_NIF(nif_consumer_reset);
KMQ_NIF(nif_consumer_rebuild);
KMQ_NIF(nif_consumer_flush);
KMQ_NIF(nif_consumer_uncovered);
KMQ_NIF(nif_consumer_drain);
KMQ_NIF(nif_consumer_close);
KMQ_NIF(nif_consumer_kill);
KMQ_NIF(nif_consumer_info);
KMQ_NIF(nif_consumer_pause);
KMQ_NIF(nif_consumer_seek);
KMQ_NIF(nif_consumer_reopen);
KMQ_NIF(nif_consumer_give_up);
KMQ_NIF(nif_consumer_set_token);
KMQ_NIF(nif_consumer_test_fatal);
KMQ_NIF(nif_publisher_open);
KMQ_NIF(nif_publisher_send);
KMQ_NIF(nif_publisher_space);
KMQ_NIF(nif_publisher_poll);
KMQ_NIF(nif_publisher_queued);
KMQ_NIF(nif_publisher_close);
KMQ_NIF(nif_publisher_reopen);
KMQ_NIF(nif_publisher_test_fatal);
KMQ_NIF(nif_publisher_set_token);
KMQ_NIF(nif_admin_open);
KMQ_NIF(nif_admin_close);
KMQ_NIF(nif_admin_cluster_id);
KMQ_NIF(nif_admin_partitions);
KMQ_NIF(nif_admin_topics);
KMQ_NIF(nif_admin_create_topic);
KMQ_NIF(nif_admin_create_partitions);
KMQ_NIF(nif_admin_delete_topic);
KMQ_NIF(nif_admin_topic_config);
KMQ_NIF(nif_admin_committed);
KMQ_NIF(nif_admin_watermarks);
KMQ_NIF(nif_admin_offset_for_time);
KMQ_NIF(nif_admin_delete_records);
KMQ_NIF(nif_admin_commit);
KMQ_NIF(nif_admin_read);
KMQ_NIF(nif_admin_set_token);

#endif
