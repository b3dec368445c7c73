defmodule Kmq.Test.Bodies.BroadwayKafka do
  @moduledoc false
  # A pipeline of broadway_kafka's with another module's name and two more options, on the stage host or the real Broadway (`kind`).

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.Test.{Checker, Host}

  # All that its options can say, those without an equal here among them.
  defp theirs(options) do
    Keyword.merge(options,
      delivery: :offsets,
      on_failure: :ack,
      create_topics: false,
      receive_interval: 100,
      reconnect_timeout: 500,
      offset_commit_on_ack: true,
      offset_reset_policy: :earliest,
      begin_offset: :assigned,
      shared_client: false,
      group_config: [
        offset_commit_interval_seconds: 1,
        rejoin_delay_seconds: 2,
        session_timeout_seconds: 6,
        heartbeat_rate_seconds: 1,
        rebalance_timeout_seconds: 10
      ],
      fetch_config: [min_bytes: 1, max_bytes: 10_240, max_wait_time: 100],
      client_config: [
        client_id_prefix: "shop-",
        connect_timeout: 5_000,
        request_timeout: 240_000,
        query_api_versions: true,
        extra_sock_opts: [:inet]
      ]
    )
    |> Keyword.drop([:lease, :backoff])
  end

  body(
    "one partition: each message once, in order, in one processor and one batch consumer, and all is committed",
    context,
    do: whole(context, 1)
  )

  body(
    "four partitions: each message once, each in order, in one processor and one batch consumer, and all is committed",
    context,
    do: whole(context, 4)
  )

  defp whole(%{cluster: cluster, kind: kind}, partitions) do
    topic = queue(cluster, partitions)
    n = 1_200
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, partitions)}))
    seen = :ets.new(:seen, [:public, :ordered_set])

    note = fn layer, %{metadata: m} ->
      at = System.unique_integer([:monotonic])
      :ets.insert(seen, {{layer, at}, m.topic, m.partition, m.offset, self()})
    end

    options = theirs(options(cluster, topic))

    host =
      Host.start(
        kind,
        options,
        fn message ->
          note.(:processor, message)
          # What fails is acknowledged like the rest.
          if rem(message.metadata.offset, 50) == 0, do: raise("no"), else: message
        end,
        producers: 2,
        concurrency: 3,
        max_demand: 10,
        batchers: [default: [concurrency: 4, batch_size: 20, batch_timeout: 50]],
        batch_handler: fn :default, messages, %{batch_key: {^topic, partition}} ->
          for message <- messages do
            ^partition = message.metadata.partition
            note.(:batcher, message)
          end

          messages
        end
      )

    each = div(n, partitions)
    ends = Map.new(0..(partitions - 1), &{&1, each})

    eventually(
      fn -> Checker.committed(cluster.hosts, options[:group_id], topic, partitions) == ends end,
      30_000
    )

    all = Enum.to_list(0..(each - 1))
    good = Enum.reject(all, &(rem(&1, 50) == 0))

    for partition <- 0..(partitions - 1), {layer, wanted} <- [processor: all, batcher: good] do
      found = :ets.match(seen, {{layer, :_}, topic, partition, :"$1", :"$2"})
      assert {layer, partition, Enum.map(found, &hd/1)} == {layer, partition, wanted}
      assert [_one] = found |> Enum.map(&List.last/1) |> Enum.uniq()
    end

    assert Host.stop(host) == :ok
  end
end
