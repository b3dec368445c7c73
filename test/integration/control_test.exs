defmodule Kmq.Integration.ControlTest do
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Consumer

  run_bodies(Kmq.Test.Bodies.Control)

  defp row(consumer, partition),
    do: Enum.find(Kmq.info(consumer).partitions, &(&1.partition == partition))

  test "a time: the first message at or after it, the end where there is none", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    start = System.os_time(:millisecond) - 100_000

    publish(
      cluster,
      topic,
      for(i <- 0..99, do: {"#{i}", timestamp: start + i * 1_000, partition: 0})
    )

    consumer = consumer(options(cluster, topic))
    assert Kmq.ack(pull(consumer, 100), sync: true) == :ok
    assert :ok = Kmq.seek(consumer, {topic, 0}, {:timestamp, start + 89_500})
    messages = pull(consumer, 10)
    assert Enum.map(messages, & &1.offset) == Enum.to_list(90..99)
    assert :ok = Kmq.seek(consumer, {topic, 0}, DateTime.from_unix!(start + 99_000, :millisecond))
    assert [%{offset: 99}] = pull(consumer, 1)
    assert :ok = Kmq.seek(consumer, {topic, 0}, DateTime.add(DateTime.utc_now(), 3_600, :second))
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    eventually(fn -> assert %{lag: 0} = Kmq.info(consumer).total end)
  end

  test "a pause outlives rebalances, and is this consumer's alone; longer than max.poll.interval it is still a member",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 0..19, do: {"#{i}", partition: rem(i, 2)}))

    options =
      options(cluster, topic,
        drain_timeout: 1_000,
        kafka_config: [consumer: ["max.poll.interval.ms": 6_000]]
      )

    one = consumer(options)
    eventually(fn -> assert %{assigned: 2} = Kmq.info(one).total end, 15_000)
    assert :ok = Kmq.pause(one, [{topic, 0}, {topic, 1}])
    began = System.monotonic_time(:millisecond)

    two = consumer(options)
    eventually(fn -> assert %{assigned: 1} = Kmq.info(two).total end, 20_000)
    # What the other one gets, it reads.
    theirs = pull(two, 10)
    [theirs_partition] = theirs |> Enum.map(& &1.partition) |> Enum.uniq()
    mine = 1 - theirs_partition
    assert Kmq.ack(theirs, sync: true) == :ok
    assert %{state: :paused} = row(one, mine)

    Consumer.stop(two)
    eventually(fn -> assert %{assigned: 2} = Kmq.info(one).total end, 20_000)
    assert %{state: :paused} = row(one, theirs_partition)
    publish(cluster, topic, [{"more", partition: theirs_partition}])
    left = max(began + 7_000 - System.monotonic_time(:millisecond), 0)
    assert Consumer.pull(one, max: 10, wait: left) == []
    assert %{assigned: 2, lag: 11} = Kmq.info(one).total

    assert :ok = Kmq.resume(one, {topic, theirs_partition})
    assert ["more"] = Enum.map(pull(one, 1), & &1.value)
    assert :ok = Kmq.resume(one, :all)
    assert 10 = length(pull(one, 10))
  end

  test "deliveries by offsets: the lag is what is not settled; pause, seek back and forward", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    n = 300
    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))

    options =
      options(cluster, topic, delivery: :offsets, create_topics: false, commit_interval: 50)

    consumer = consumer(options)
    group = options[:group_id]
    first = pull(consumer, n)
    assert %{open: ^n, lag: ^n} = Kmq.info(consumer).total
    {done, open} = Enum.split(first, 100)
    assert Kmq.ack(done) == :ok
    eventually(fn -> assert %{open: 200, lag: 200} = Kmq.info(consumer).total end)
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, 100}] end)

    # Back: what is open keeps its old slot, and counts for nothing new.
    assert Kmq.seek(consumer, {topic, 0}, 50) == :ok
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, 50}] end)
    again = pull(consumer, n - 50)
    assert Enum.map(again, & &1.offset) == Enum.to_list(50..(n - 1))
    _ = Kmq.ack(open)
    assert [{0, 50}] = committed(cluster, group, topic, 1)
    assert Kmq.ack(again) == :ok
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, n}] end)
    eventually(fn -> assert %{open: 0, lag: 0} = Kmq.info(consumer).total end)

    # Forward, and only when it is let go on.
    publish(cluster, topic, for(i <- 1..20, do: "more #{i}"))
    assert Kmq.pause(consumer, {topic, 0}) == :ok
    assert Kmq.seek(consumer, {topic, 0}, n + 15) == :ok
    _ = Consumer.pull(consumer, max: 100, wait: 300)
    assert Kmq.resume(consumer, {topic, 0}) == :ok
    last = pull_until(consumer, &Enum.any?(&1, fn m -> m.offset == n + 19 end))
    assert Enum.map(last, & &1.offset) == Enum.to_list((n + 15)..(n + 19))
    assert Kmq.ack(last) == :ok
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, n + 20}] end)
    eventually(fn -> assert %{open: 0, lag: 0} = Kmq.info(consumer).total end)
  end

  test "a pipeline by its name: the partition is found, whichever member has it", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 0..199, do: {"#{i}", partition: rem(i, 2)}))
    name = :"pipeline_#{System.unique_integer([:positive])}"
    test = self()

    start_supervised!(%{
      id: name,
      start:
        {Kmq.StageHost, :start_link,
         [
           [
             name: name,
             producer: {OffBroadway.Kmq.Producer, options(cluster, topic)},
             handler: fn message ->
               send(test, {:handled, message.metadata.partition, message.metadata.offset})
               message
             end,
             producers: 2
           ]
         ]}
    })

    # Each of the two has one, and all is done.
    eventually(
      fn ->
        info = Kmq.info(name)
        assert %{assigned: 2, lag: 0, open: 0} = info.total
        assert Enum.sort(Enum.map(info.partitions, & &1.member)) == [0, 1]
        assert %{kind: :pipeline, members: [%{index: 0}, %{index: 1}]} = info
      end,
      30_000
    )

    assert :ok = Kmq.pause(name, {topic, 1})
    flush()
    assert :ok = Kmq.seek(name, {topic, 1}, 90)
    assert :ok = Kmq.seek(name, {topic, 0}, 95)
    for offset <- 95..99, do: assert_receive({:handled, 0, ^offset}, scaled(5_000))
    refute_received {:handled, 1, _}
    assert :ok = Kmq.resume(name, {topic, 1})
    for offset <- 90..99, do: assert_receive({:handled, 1, ^offset}, scaled(5_000))
  end

  defp flush do
    receive do
      {:handled, _, _} -> flush()
    after
      0 -> :ok
    end
  end
end
