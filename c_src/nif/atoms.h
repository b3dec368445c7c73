/* Atoms, made once at load: one list, no atom ever from outside data. X(name) or X2(C name, text). */
#ifndef KMQ_ATOMS_H
#define KMQ_ATOMS_H
#include <erl_nif.h>

/* clang-format off */
#define KMQ_ATOMS(X, X2) \
    X(ok) X(error) X(nil) X(kmq) X(ready) X(due) X(closed) X(stale) X(late) X(unknown) X(assign) \
    X(assigned) X(revoked) X(commit_failed) X(committed) X(log) X(stats) X(token) X(out_of_range) \
    X(rebuild) X(start_failed) X(start_works) X(end_failed) X(markers_anew) X(timeout) X(flushed) X(published) X(space) X(range) \
    X(format) X(lease_ms) X(max_processing_ms) X(start_ahead) X(max_in_flight) X(commit_interval_ms) \
    X(ack_flush_ms) X(revoke_wait_ms) X(count_header) X(group_id) X(topics) X(producer) X(instance) \
    X(idempotent) X(open) X(key) X(waiting) X(ends) X(in_flight) X(floor) X(topic) X(partition) X(offset) \
    X(slot) X(started) X(oldest_open) X(repeats) X(handed_out) X(settled) X(foreign_copies) \
    X(partitions) X(consumers) X(publishers) X(admins) X(clients) X(exponential) X(linear) X(list) \
    X(max_poll_ms) X(store_bytes) X(delivery) X(markers) X(none) X(no_markers) X(lost) X(state) X(epoch) \
    X(retired) X(badarg) X(retries) X(position) X(gated) X(tag) X(header) X(routing) X(filter) X(ttl_ms) \
    X(on_expired) X(discard) X(full) X(filtered) X(parked) X(expired) X(max_redeliveries) X(drain_ms) X(drain_on_revoke) \
    X(paused) X(buffered) X(lag) X(oldest_open_ms) X2(end_, "end") X(not_assigned) X(reopen) \
    X(outage) X(settling) X(connected) X(passing) X(connection) X(commit) X(retried) X(answered) X(reported) X(replaced) X(stops) \
    X(cooperative) X(leaving) X(doubted) X(looks) \
    X(offsets) X(at_most_once) X(unsupported) X(overdue) X(undelayed) X(undrained) X(letters) \
    X2(true_, "true") X2(false_, "false")
/* clang-format on */

struct kmq_atoms {
#define X(name) ERL_NIF_TERM name;
#define X2(name, text) ERL_NIF_TERM name;
    KMQ_ATOMS(X, X2)
#undef X
#undef X2
};
extern struct kmq_atoms atoms;
void atoms_load(ErlNifEnv *env);

#endif
