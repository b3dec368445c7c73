defmodule Kmq.Integration.DrainTest do
  # Where an order is kept, a partition changes hands only when nothing handed out of it is in work any more; the wait is bounded.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Config, Handle}

  @partitions 4

  defp config(cluster, topic, extra) do
    # Quick to notice a rebalance.
    options =
      options(cluster, topic,
        kafka_config: [consumer: ["heartbeat.interval.ms": 200]],
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

  defp states(handle),
    do: Enum.frequencies(for %{state: state} <- Handle.info(handle).partitions, do: state)

  defp assigned(handle), do: Map.get(states(handle), :assigned, 0)

  # Messages of a handle: [{slot, offset, value}].
  defp take(_handle, 0), do: []

  defp take(handle, n) do
    messages = eventually(fn -> with([] <- now(handle, n), do: nil) end, 15_000)

    messages ++ take(handle, n - length(messages))
  end

  defp now(handle, max) do
    for {slot, _topic, _partition, records} <- Handle.take(handle, max),
        record <- records,
        do: {slot, elem(record, 0), elem(record, 3)}
  end

  defp ack(handle, messages),
    do: Handle.settle(handle, :ack, for({slot, offset, _} <- messages, do: {slot, offset}))

  defp numbers(cluster, topic, range),
    do: publish(cluster, topic, for(i <- range, do: {"#{i}", partition: rem(i, @partitions)}))

  test "a revocation waits for what is in work, and hands out nothing meanwhile", %{
    cluster: cluster
  } do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic, ordering: :partition, drain_timeout: 60_000)
    numbers(cluster, topic, 0..39)
    first = open(config)
    work = take(first, 40)

    second = open(config)
    eventually(fn -> states(first) == %{leaving: @partitions} end, 20_000)
    numbers(cluster, topic, 40..79)
    ack(first, Enum.drop(work, 1))
    # Settled but for one message: nothing has changed hands, nothing more is out.
    eventually(fn -> Enum.sum(for p <- Handle.info(first).partitions, do: p.ends) == 0 end)
    assert now(first, 100) == []
    assert states(first) == %{leaving: @partitions}
    assert assigned(second) == 0

    assert ack(first, Enum.take(work, 1)) == :ok
    eventually(fn -> assigned(first) == 2 and assigned(second) == 2 end, 20_000)

    # Each of the others once, wherever it is now, and at its first attempt.
    rest = take(first, 20) ++ take(second, 20)

    assert Enum.sort(for {_, _, value} <- rest, do: String.to_integer(value)) ==
             Enum.to_list(40..79)

    ack(first, rest)
  end

  test "a handler that is stuck delays it to the bound, and its ack stays good", %{
    cluster: cluster
  } do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic, ordering: :partition, drain_timeout: 2_000)
    numbers(cluster, topic, 0..7)
    first = open(config)
    work = take(first, 8)

    second = open(config)
    eventually(fn -> states(first)[:leaving] == @partitions end, 20_000)
    begun = System.monotonic_time(:millisecond)
    eventually(fn -> assigned(second) == 2 end, 20_000)
    waited = System.monotonic_time(:millisecond) - begun
    # Three quarters: the rest is left to the last commit.
    assert waited >= 1_300
    IO.puts("\na revocation with a handler that is stuck: given up after #{waited} ms of 2000")

    assert ack(first, work) == :ok
    assert Handle.flush(first, 10_000) == :ok
    eventually(fn -> states(first) == %{assigned: 2} end)
    assert now(second, 10) == []
  end

  test "without an order to keep nothing waits", %{cluster: cluster} do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic, drain_timeout: 60_000)
    numbers(cluster, topic, 0..7)
    first = open(config)
    work = take(first, 8)

    second = open(config)
    eventually(fn -> assigned(first) == 2 and assigned(second) == 2 end, 20_000)
    assert states(first)[:retired] == @partitions
    assert ack(first, work) == :ok
  end

  # Elsewhere an un-assign that was put off until a drain was over threw away what had been assigned meanwhile: a member that reads nothing.
  # librdkafka joins anew when a topic grows, without waiting for the answer to its revocation.
  for {mode, tags} <- [
        {[assignor: :roundrobin], []},
        {[assignor: :roundrobin, delivery: :offsets], []},
        {[assignor: :cooperative_sticky], [cooperative: true]}
      ] do
    for {tag, value} <- tags, do: @tag([{tag, value}])

    test "a topic that grows in the middle of a drain: what is assigned meanwhile is kept, and read (#{inspect(mode)})",
         %{cluster: cluster} do
      topic = queue(cluster, @partitions)

      options =
        [
          kafka_config: [
            common: ["topic.metadata.refresh.interval.ms": 300],
            consumer: ["heartbeat.interval.ms": 200]
          ],
          group_id: topic,
          drain_timeout: 60_000
        ] ++ unquote(mode)

      config = cluster |> options(topic, options) |> Config.new!(:consumer)
      config = struct!(config, ordering: :partition)
      numbers(cluster, topic, 0..4)
      first = open(config)
      work = take(first, 5)
      second = open(config)
      eventually(fn -> states(first)[:leaving] > 0 end, 20_000)

      # The group has to share out anew, long before the drain may end.
      {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
      :ok = :kmq_nif.admin_create_partitions(admin, topic, @partitions + 2, 10_000)
      :kmq_nif.admin_close(admin)
      handles = [first, second]
      eventually(fn -> assert Enum.sum(Enum.map(handles, &assigned/1)) >= 4 end, 30_000)
      if unquote(mode[:delivery]) == nil, do: assert(ack(first, work) == :ok)
      eventually(fn -> assert Enum.map(handles, &assigned/1) == [3, 3] end, 30_000)

      publish(
        cluster,
        topic,
        for(i <- 0..59, do: {"new #{i}", partition: rem(i, @partitions + 2)})
      )

      rest =
        eventually(
          fn ->
            for handle <- handles, record <- now(handle, 100), do: new(record, handle)
            assert length(Process.get(:new, [])) == 60
            Process.get(:new)
          end,
          5_000
        )

      assert Enum.sort(for {value, _} <- rest, do: value) ==
               Enum.sort(for i <- 0..59, do: "new #{i}")

      assert length(Enum.uniq(for {_, handle} <- rest, do: handle)) == 2
      for handle <- handles, do: assert(Handle.flush(handle, 10_000) == :ok)
    end
  end

  # What came again of the first five (by offsets) is not counted.
  defp new({slot, offset, value}, handle) do
    :ok = ack(handle, [{slot, offset, value}])

    if String.starts_with?(value, "new"),
      do: Process.put(:new, [{value, handle.pid} | Process.get(:new, [])])
  end

  test "closing in the middle of a drain waits for nobody", %{cluster: cluster} do
    topic = queue(cluster, @partitions)
    config = config(cluster, topic, ordering: :partition, drain_timeout: 60_000)
    numbers(cluster, topic, 0..7)
    first = open(config)
    take(first, 8)
    second = open(config)
    eventually(fn -> states(first)[:leaving] == @partitions end, 20_000)

    {us, :ok} = :timer.tc(fn -> Handle.close(first, 30_000) end)
    assert us < scaled(10_000) * 1_000
    eventually(fn -> assigned(second) == @partitions end, 20_000)
    # What was open comes back as copies, at no attempt.
    assert Enum.sort(for {_, _, value} <- take(second, 8), do: value) ==
             for(i <- 0..7, do: "#{i}")
  end
end
