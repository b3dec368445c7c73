defmodule Kmq.Integration.OffsetResetTest do
  # Where a group begins: at its very first start as the policy says, a partition that is born later at its beginning, and never again.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Consumer
  alias Kmq.Test.{Filler, Scene}

  # What is jumped over.
  @jump if(System.get_env("KMQ_LONG") == "1", do: 5_000_000, else: 200_000)

  defp values(messages), do: Enum.map(messages, & &1.value) |> Enum.sort()

  defp ready(consumer, partitions),
    do:
      eventually(
        fn -> assert %{assigned: ^partitions, lag: 0} = Kmq.info(consumer).total end,
        20_000
      )

  defp epoch(consumer), do: Kmq.Handle.info(GenServer.call(consumer, :handle)).epoch

  defp grow(cluster, topics, n) do
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    for topic <- topics, do: :ok = :kmq_nif.admin_create_partitions(admin, topic, n, 10_000)
    :kmq_nif.admin_close(admin)
  end

  test ":latest: what was there before the first start is not read; a partition born later begins at 0, empty ones are not skipped",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, [{"old", partition: 0}])

    options =
      options(cluster, topic,
        offset_reset_policy: :latest,
        kafka_config: [common: ["topic.metadata.refresh.interval.ms": 1_000]]
      )

    consumer = consumer(options)
    ready(consumer, 2)
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    publish(cluster, topic, [{"new", partition: 0}])
    assert ["new"] = values(messages = pull(consumer, 1))
    assert Kmq.ack(messages, sync: true) == :ok
    # The positions are committed, of what is empty, too: nothing else but the first start is one.
    eventually(fn ->
      assert [{0, 2}, {1, 0}] = committed(cluster, options[:group_id], topic, 2)
    end)

    Consumer.stop(consumer)
    publish(cluster, topic, [{"while away", partition: 1}])

    # Born while nobody was there to see it, with messages in it.
    grow(cluster, [topic, "#{topic}__#{options[:group_id]}__markers"], 3)

    eventually(fn ->
      publish(cluster, topic, [{"born later", partition: 2}])
    end)

    consumer = consumer(options)
    messages = pull_until(consumer, &(values(&1) |> Enum.uniq() |> length() == 2))
    assert Enum.uniq(values(messages)) == ["born later", "while away"]
    assert Enum.map(for(m <- messages, m.partition == 2, do: m), & &1.offset) |> hd() == 0
    assert Kmq.ack(messages, sync: true) == :ok
  end

  test "a time: from the first message at or after it on; the end where there is none", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    start = System.os_time(:millisecond) - 3_600_000

    publish(
      cluster,
      topic,
      for(i <- 0..9, do: {"#{i}", partition: 0, timestamp: start + i * 1_000}) ++
        [{"too old", partition: 1, timestamp: start - 1_000}]
    )

    consumer = consumer(options(cluster, topic, offset_reset_policy: {:timestamp, start + 6_500}))

    assert ["7", "8", "9"] = values(messages = pull(consumer, 3))
    assert Kmq.ack(messages, sync: true) == :ok
    ready(consumer, 2)
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
  end

  test "begin_offset: :reset begins as the policy says at each start, whatever was committed", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b", "c"])
    options = options(cluster, topic)
    first = consumer(options)
    assert Kmq.ack(pull(first, 3), sync: true) == :ok
    ready(first, 1)
    Consumer.stop(first)

    again = consumer(options)
    ready(again, 1)
    assert Consumer.pull(again, max: 10, wait: 300) == []
    Consumer.stop(again)

    reset = consumer(Keyword.put(options, :begin_offset, :reset))
    messages = pull(reset, 3)
    assert {values(messages), Enum.map(messages, & &1.attempt)} == {["a", "b", "c"], [1, 1, 1]}
    assert Kmq.ack(messages, sync: true) == :ok
    ready(reset, 1)

    # A rebalance is no start.
    epoch = epoch(reset)
    other = consumer(options)
    eventually(fn -> assert epoch(reset) > epoch end, 20_000)
    Consumer.stop(other)
    ready(reset, 1)
    assert Consumer.pull(reset, max: 10, wait: 300) == []
    Consumer.stop(reset)

    publish(cluster, topic, ["d"])
    latest = consumer(Keyword.merge(options, begin_offset: :reset, offset_reset_policy: :latest))
    ready(latest, 1)
    assert Consumer.pull(latest, max: 10, wait: 300) == []
    publish(cluster, topic, ["e"])
    assert ["e"] = values(pull(latest, 1))
  end

  test "records deleted under a running consumer: what it has stays its own, and it goes on behind the jump, without keeping count of it",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..3_000, do: String.pad_leading("#{i}", 100)))

    # So little is fetched ahead that the rest is deleted before it is read.
    options =
      options(cluster, topic,
        start_ahead: 20,
        max_processing_time: 300_000,
        kafka_config: [
          consumer: [
            "queued.min.messages": 10,
            "queued.max.messages.kbytes": 16,
            "fetch.message.max.bytes": 16_384
          ]
        ]
      )

    Scene.listen()
    consumer = consumer(options)
    held = pull(consumer, 10)
    :ok = Filler.fill(cluster.hosts, topic, 0, @jump, "k")
    publish(cluster, topic, for(i <- 1..10, do: "after #{i}"))
    native = :erlang.memory(:system)
    behind = @jump + 3_000
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    :ok = :kmq_nif.admin_delete_records(admin, topic, 0, behind, 10_000)
    :kmq_nif.admin_close(admin)

    # What was fetched is handed out, then comes the jump.
    messages = pull_until(consumer, &(List.last(&1, %{value: nil}).value == "after 10"), 60_000)

    {before, last} = Enum.split_with(messages, &(&1.offset < behind))
    assert Enum.map(last, & &1.value) == for(i <- 1..10, do: "after #{i}")
    assert length(before) < 3_000

    assert_receive {[:kmq, :offset_reset], %{to: ^behind, from: from},
                    %{topic: ^topic, reason: :out_of_range}}

    assert from == List.last(held ++ before).offset + 1

    # In any order, from both sides of the jump.
    all = Enum.shuffle(held ++ messages)
    for message <- all, do: assert(Kmq.ack(message) == :ok)
    assert :ok = Consumer.flush(consumer, 10_000)
    assert :erlang.memory(:system) - native < 1_048_576
    stop = behind + 10
    eventually(fn -> assert committed(cluster, options[:group_id], topic, 1) == [{0, stop}] end)
    eventually(fn -> assert %{lag: 0, open: 0, unwritten: 0} = Kmq.info(consumer).total end)
  end
end
