defmodule Kmq.Sandbox.CooperativeTest do
  # A cooperative group in bad moments, which the sandbox makes on demand.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Handle, Sandbox}
  alias Kmq.Test.Scene

  @moduletag :cooperative
  @moduletag timeout: scaled(180_000)

  setup(%{cluster: cluster}, do: refuse_commits(cluster, []))

  defp config(cluster, topic) do
    cluster
    |> options(topic,
      assignor: :cooperative_sticky,
      group_id: topic,
      # What is held here is held as long as the waits may take.
      drain_timeout: scaled(30_000),
      lease: scaled(10_000),
      max_processing_time: scaled(120_000),
      # whose commits are not to be refused
      tracker: :external,
      # The sandbox gives nobody longer than its session to give back.
      group_config: [
        session_timeout_seconds: div(scaled(12_000), 1_000),
        heartbeat_rate_seconds: 1
      ],
      kafka_config: [consumer: ["heartbeat.interval.ms": 200]]
    )
    |> Config.new!(:consumer)
  end

  defp open(config) do
    {:ok, handle} = Handle.open(config, {__MODULE__, make_ref()})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)
    handle
  end

  defp parts(handle, state),
    do: Enum.sort(for %{state: ^state} = p <- Handle.info(handle).partitions, do: p.partition)

  defp now(handle, max) do
    for {slot, _topic, _partition, records} <- Handle.take(handle, max),
        record <- records,
        do: {slot, elem(record, 0), elem(record, 3)}
  end

  defp take(_handle, 0), do: []

  defp take(handle, n) do
    messages = eventually(fn -> with([] <- now(handle, n), do: nil) end, 20_000)
    messages ++ take(handle, n - length(messages))
  end

  defp ack(handle, messages),
    do: Handle.settle(handle, :ack, for({slot, offset, _} <- messages, do: {slot, offset}))

  defp values(messages), do: Enum.sort(for {_, _, value} <- messages, do: value)

  defp numbers(cluster, topic, range),
    do: publish(cluster, topic, for(i <- range, do: {"#{i}", partition: rem(i, 2)}))

  defp refuse_commits(cluster, errors),
    do: :ok = Sandbox.inject(cluster.sandbox, {:request_errors, :offset_commit, errors})

  test "commits that are refused because the group is sharing out go again; what moves is given back after them",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    config = config(cluster, topic)
    first = open(config)
    eventually(fn -> parts(first, :assigned) == [0, 1] end, 20_000)
    Scene.listen()

    # the first window, which is handed out when its commit is acknowledged
    refuse_commits(cluster, List.duplicate(:rebalance_in_progress, 3))
    numbers(cluster, topic, 0..9)
    work = take(first, 10)

    refuse_commits(cluster, List.duplicate(:rebalance_in_progress, 10_000))
    numbers(cluster, topic, 10..19)
    work = work ++ take(first, 10)
    second = open(config)
    [moves] = eventually(fn -> with([] <- parts(first, :leaving), do: nil) end, 60_000)
    assert parts(second, :assigned) == []

    refuse_commits(cluster, [])
    eventually(fn -> parts(second, :assigned) == [moves] end, 60_000)
    assert now(second, 10) == []
    numbers(cluster, topic, 20..23)
    more = take(first, 2)
    assert values(more ++ take(second, 2)) == ~w(20 21 22 23)
    assert ack(first, work ++ more) == :ok
    assert Handle.flush(first, 10_000) == :ok
    refute_received {[:kmq, :error], _, _}
  end

  test "a lost assignment: all begins anew where it is committed, and what is in work stays this consumer's",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    config = config(cluster, topic)
    handle = open(config)
    numbers(cluster, topic, 0..9)
    work = take(handle, 10)

    eventually(
      fn -> committed(cluster, topic, topic, 2) == [{0, 5}, {1, 5}] end,
      10_000
    )

    # handed out, and not committed
    refuse_commits(cluster, List.duplicate(:rebalance_in_progress, 10_000))
    numbers(cluster, topic, 10..13)
    again = take(handle, 4)
    %{epoch: epoch} = Handle.info(handle)
    Scene.listen()
    :ok = Sandbox.inject(cluster.sandbox, {:request_errors, :heartbeat, [:unknown_member_id]})
    eventually(fn -> Handle.info(handle).epoch > epoch end, 20_000)
    # There is nobody any more who would take a last commit: it is not waited for.
    assert_receive {[:kmq, :assignments_revoked, :stop], _, %{partitions: [_, _]}}, scaled(3_000)
    refuse_commits(cluster, [])
    eventually(fn -> parts(handle, :assigned) == [0, 1] end, 60_000)

    numbers(cluster, topic, 14..15)
    fresh = take(handle, 6)
    assert values(fresh) == ~w(10 11 12 13 14 15)
    old = MapSet.new(work ++ again, &elem(&1, 0))
    assert Enum.all?(fresh, fn {slot, _, _} -> slot not in old end)
    # Acks of both lives count.
    assert ack(handle, work) == :ok
    assert ack(handle, fresh) == :ok
    assert ack(handle, again) == :ok
    assert Handle.flush(handle, 10_000) == :ok
    assert now(handle, 10) == []
  end
end
