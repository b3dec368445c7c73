defmodule Kmq.Integration.CooperativeTest do
  # A group that rebalances incrementally: what moves is taken away, what stays is not even interrupted.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Config, Handle}
  alias Kmq.Test.Kafka

  @moduletag :cooperative

  @partitions 4

  defp config(cluster, topic, extra \\ []) do
    options =
      options(cluster, topic,
        kafka_config: [
          common: ["topic.metadata.refresh.interval.ms": 500],
          consumer: ["heartbeat.interval.ms": 200]
        ],
        assignor: :cooperative_sticky,
        group_id: topic
      )

    struct!(Config.new!(options, :consumer), extra)
  end

  defp open(config) do
    {:ok, handle} = Handle.open(config, {__MODULE__, make_ref()})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)
    handle
  end

  # %{assigned: [{partition, slot}]}
  defp parts(handle) do
    handle
    |> Handle.info()
    |> Map.fetch!(:partitions)
    |> Enum.group_by(& &1.state, &{&1.partition, &1.slot})
    |> Map.new(fn {state, parts} -> {state, Enum.sort(parts)} end)
  end

  defp assigned(handle), do: Map.get(parts(handle), :assigned, [])

  defp now(handle, max) do
    for {slot, _topic, partition, records} <- Handle.take(handle, max),
        record <- records,
        do: {slot, elem(record, 0), partition, String.to_integer(elem(record, 3))}
  end

  defp take(_handle, 0), do: []

  defp take(handle, n) do
    messages = eventually(fn -> with([] <- now(handle, n), do: nil) end, 15_000)
    messages ++ take(handle, n - length(messages))
  end

  defp ack(handle, messages),
    do: Handle.settle(handle, :ack, for({slot, offset, _, _} <- messages, do: {slot, offset}))

  defp numbers(cluster, topic, range),
    do: publish(cluster, topic, for(i <- range, do: {"#{i}", partition: rem(i, @partitions)}))

  defp grow(cluster, topic, n) do
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    :ok = :kmq_nif.admin_create_partitions(admin, topic, n, 10_000)
    :kmq_nif.admin_close(admin)
  end

  test "what stays keeps its slot and flows while what moves is drained", %{cluster: cluster} do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic, ordering: :partition, drain_timeout: 60_000)
    numbers(cluster, topic, 0..3)
    first = open(config)
    work = take(first, 4)
    before = assigned(first)
    assert length(before) == @partitions

    # So much is fetched ahead: librdkafka itself fetches nothing until a revocation is answered.
    numbers(cluster, topic, 4..43)
    eventually(fn -> Handle.info(first).waiting == 40 end, 10_000)

    # Two are to move, and wait for what is in work; the other two go on.
    second = open(config)
    %{leaving: leaving} = eventually(fn -> %{leaving: _} = parts(first) end, 20_000)
    stay = before -- leaving
    assert {length(leaving), length(stay)} == {2, 2}
    more = take(first, 20)

    assert Enum.sort(Enum.uniq(for {slot, _, partition, _} <- more, do: {partition, slot})) ==
             stay

    assert now(first, 10) == []
    assert assigned(second) == []

    ack(first, work)
    eventually(fn -> length(assigned(second)) == 2 end, 20_000)
    assert assigned(first) == stay
    rest = take(second, 20)
    assert Enum.sort(Enum.map(more ++ rest, &elem(&1, 3))) == Enum.to_list(4..43)
    ack(first, more)
    ack(second, rest)
    assert Handle.flush(first, 10_000) == :ok
    ends = for partition <- 0..3, do: {partition, 11}
    eventually(fn -> committed(cluster, topic, topic, @partitions) == ends end, 10_000)

    # The second leaves: what the first has stays as it is, and the rest comes back.
    assert Handle.close(second, 10_000) == :ok
    eventually(fn -> length(assigned(first)) == @partitions end, 20_000)
    assert stay -- assigned(first) == []
  end

  test "without a drain, too, only what moves is retired", %{cluster: cluster} do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic)
    numbers(cluster, topic, 0..7)
    first = open(config)
    work = take(first, 8)
    before = assigned(first)
    second = open(config)
    eventually(fn -> length(assigned(second)) == 2 end, 20_000)
    assert assigned(first) -- before == []
    # Acks of what moved are good: the messages are this consumer's until they are settled.
    assert ack(first, work) == :ok
    assert Handle.flush(first, 10_000) == :ok
    assert now(second, 10) == []

    assert %{assigned: _} =
             parts = eventually(fn -> with(%{retired: _} <- parts(first), do: nil) end)

    assert map_size(parts) == 1
  end

  # The look-up of positions asks a cluster that is not there.
  defp blind(handle) do
    :sys.replace_state(handle.pid, fn state ->
      %{state | config: %{state.config | admin_props: [{"bootstrap.servers", "127.0.0.1:1"}]}}
    end)
  end

  defp seeing(handle, config), do: :sys.replace_state(handle.pid, &%{&1 | config: config})

  test "what stays flows, and the group goes on, while it is looked up where what is new begins",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic)
    first = open(config)
    second = open(config)
    eventually(fn -> length(assigned(first)) == 2 and length(assigned(second)) == 2 end, 30_000)
    before = assigned(first)
    blind(first)
    epoch = Handle.info(first).epoch
    assert Handle.close(second, 10_000) == :ok
    eventually(fn -> Handle.info(first).epoch > epoch end, 20_000)
    mine = fn range -> for i <- range, rem(i, @partitions) in places(before), do: i end
    numbers(cluster, topic, 0..39)
    taken = take(first, 20)
    assert Enum.sort(for {_, _, _, i} <- taken, do: i) == mine.(0..39)
    assert ack(first, taken) == :ok

    # Two of its four are another one's before it knows where all of them begin.
    third = open(config)
    eventually(fn -> length(assigned(third)) == 2 end, 30_000)
    numbers(cluster, topic, 40..79)
    seeing(first, config)
    eventually(fn -> length(assigned(first)) == 2 end, 30_000)

    rest =
      eventually(
        fn ->
          for handle <- [first, third], new = [_ | _] <- [now(handle, 100)] do
            :ok = ack(handle, new)
            Process.put(:got, new ++ Process.get(:got, []))
          end

          assert length(Process.get(:got, [])) == 60
          Process.get(:got)
        end,
        20_000
      )

    assert Enum.sort(for {_, _, _, i} <- taken ++ rest, do: i) == Enum.to_list(0..79)
  end

  defp places(parts), do: for({partition, _slot} <- parts, do: partition)

  test "a topic that grows: the new partition is added to the others", %{cluster: cluster} do
    topic = queue(cluster, @partitions)

    handle = open(config(cluster, topic))
    eventually(fn -> length(assigned(handle)) == @partitions end, 20_000)
    before = assigned(handle)
    grow(cluster, topic, @partitions + 1)
    eventually(fn -> length(assigned(handle)) == @partitions + 1 end, 20_000)
    assert before -- assigned(handle) == []
    publish(cluster, topic, [{"7", partition: @partitions}])
    assert [{_, 0, @partitions, 7}] = messages = take(handle, 1)
    assert ack(handle, messages) == :ok
  end

  test "a member without partitions leaves at once, so that the others need not wait for it", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    # A session that nobody would wait for.
    options =
      options(cluster, topic,
        kafka_config: [consumer: ["heartbeat.interval.ms": 200]],
        group_config: [session_timeout_seconds: 300],
        assignor: :cooperative_sticky,
        group_id: topic
      )

    config = Config.new!(options, :consumer)
    first = open(config)
    eventually(fn -> length(assigned(first)) == 1 end, 20_000)
    second = open(config)
    # It has been told its share, which is nothing.
    eventually(fn -> Handle.info(second).epoch > 0 end, 20_000)
    assert assigned(second) == []
    assert Handle.close(second, 20_000) == :ok

    # The next rebalance would wait for one that is still a member.
    third = open(config)
    assert Handle.close(first, 20_000) == :ok
    eventually(fn -> length(assigned(third)) == 1 end, 30_000)
  end

  test "a member that does not know yet where its partitions begin leaves at once, too", %{
    cluster: cluster
  } do
    topic = queue(cluster, @partitions)

    options =
      options(cluster, topic,
        kafka_config: [consumer: ["heartbeat.interval.ms": 200]],
        group_config: [session_timeout_seconds: 300],
        assignor: :cooperative_sticky,
        group_id: topic
      )

    config = Config.new!(options, :consumer)
    first = open(config)
    eventually(fn -> length(assigned(first)) == @partitions end, 20_000)
    second = open(config)
    blind(second)
    # Two are taken from the first, and wait with the second.
    eventually(fn -> length(assigned(first)) == 2 and Handle.info(second).epoch > 1 end, 20_000)
    assert assigned(second) == []
    assert Handle.close(second, 20_000) == :ok
    eventually(fn -> length(assigned(first)) == @partitions end, 20_000)
  end

  test "members that leave while all wait for another one's drain say so: the rest has everything soon",
       %{cluster: cluster} do
    topic = queue(cluster, @partitions)

    options =
      options(cluster, topic,
        kafka_config: [consumer: ["heartbeat.interval.ms": 200]],
        group_config: [session_timeout_seconds: 300],
        assignor: :cooperative_sticky,
        ordering: :partition,
        drain_timeout: 60_000,
        group_id: topic
      )

    config = Config.new!(options, :consumer)
    numbers(cluster, topic, 0..3)
    first = open(config)
    work = take(first, 4)
    second = open(config)
    eventually(fn -> %{leaving: [_, _]} = parts(first) end, 20_000)
    third = open(config)

    # The second comes back to this new round when its heartbeat tells it, the third is new: nobody is answered before the first has drained.
    eventually(fn -> Kafka.group(cluster.hosts, topic) == {"PreparingRebalance", 3} end, 20_000)
    refute_receive :five_heartbeats, 1_000

    leaving =
      for member <- [second, third], do: Task.async(fn -> Handle.close(member, 30_000) end)

    assert Enum.map(leaving, &Task.yield(&1, 1_000)) == [nil, nil]
    ack(first, work)
    assert Enum.map(leaving, &Task.await(&1, 40_000)) == [:ok, :ok]
    eventually(fn -> length(assigned(first)) == @partitions end, 20_000)
    numbers(cluster, topic, 4..11)
    assert length(take(first, 8)) == 8
  end
end
