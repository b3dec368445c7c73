/* hurry - consumer groups of the mock cluster that form at once. */
#ifndef SANDBOX_HURRY_H
#define SANDBOX_HURRY_H

#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>

/* What the mock's log says (debug context "mock"), in the thread that says it. Other lines are none of its business. */
void hurry_line(const char *text);

/* Once, when the cluster is there: what its library can be asked for. */
void hurry_cluster(rd_kafka_mock_cluster_t *cluster);

#endif
