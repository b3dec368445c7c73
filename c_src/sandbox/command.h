/* command - what the sandbox can be told: topics and faults of its mock cluster.
 *
 * Each request is one frame {Id, Command, Args} in the external term format, Args a tuple; each reply one frame {Id,
 * Reply}.
 *
 *      create_topic            {Topic, Partitions}
 *      broker_down, broker_up  {Broker}                      Broker: 1 ..., or -1 for all of them
 *      rtt                     {Broker, Ms}                  each answer of the broker takes so long; 0 ends it
 *      request_errors          {Api, [Error]}                the next requests fail with these, in order; [] forgets
 * what is left broker_request_errors   {Broker, Api, [{Error, Ms}]}  the same at one broker, each answer late by Ms;
 * Error may be no_error topic_error             {Topic, Error}                in metadata answers, until no_error is
 * set coordinator             {Group, Broker} partition_leader        {Topic, Partition, Broker}    Broker -1: without
 * a leader
 *
 *      Topic, Group :: binary    Api, Error :: atom          Error: librdkafka's name in small letters, with or without
 * its leading underscore (not_enough_replicas, transport) Reply :: ok | {error, Reason} Reason :: badarg |
 * unknown_command | {unknown_api, Atom} | {unknown_error, Atom} | {kafka, Name :: binary, Code, Text :: binary}
 *
 * Costs: one hop to the mock's thread a command.  Thread rule: the loop's thread alone. */
#ifndef SANDBOX_COMMAND_H
#define SANDBOX_COMMAND_H

#include <stddef.h>
#include <stdint.h>

#include <ei.h>
#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>

/* Carries out the request in body (borrowed) and appends the reply term, version byte first, to reply (emptied before).
 * 0, or -1 when body is no request at all or memory is out: the stream cannot be trusted any more, end. */
int sandbox_command(rd_kafka_mock_cluster_t *cluster, const uint8_t *body, size_t len, ei_x_buff *reply);

#endif
