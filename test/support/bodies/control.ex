defmodule Kmq.Test.Bodies.Control do
  @moduledoc false
  # Pause, resume and seek, on any cluster.

  use Kmq.Test.ClusterCase.Bodies

  import ExUnit.Callbacks, only: [on_exit: 1]

  alias Kmq.{Consumer, Error, Handle}

  defp row(consumer, partition),
    do: Enum.find(Kmq.info(consumer).partitions, &(&1.partition == partition))

  defp by_partition(messages, partition),
    do: for(message <- messages, message.partition == partition, do: message)

  body "a paused partition is not read and keeps what is in work, others go on", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    each = 200
    publish(cluster, topic, for(i <- 1..(2 * each), do: {"#{i}", partition: rem(i, 2)}))
    consumer = consumer(options(cluster, topic, start_ahead: 60))

    first = pull_until(consumer, &(by_partition(&1, 0) != [] and by_partition(&1, 1) != []))

    assert :ok = Kmq.pause(consumer, {topic, 0})
    assert %{state: :paused, lag: lag} = row(consumer, 0)
    open = by_partition(first, 0)

    # All of the other one comes, although what is STARTed of the paused one fills the room.
    others = pull_until(consumer, &(length(&1 ++ by_partition(first, 1)) >= each))
    assert by_partition(others, 0) == []
    assert Consumer.pull(consumer, max: 10, wait: 500) == []
    assert Kmq.ack(open, sync: true) == :ok
    assert Kmq.ack(by_partition(first, 1) ++ others, sync: true) == :ok
    assert %{state: :paused, open: 0} = row(consumer, 0)
    assert row(consumer, 0).lag == each - length(open)
    assert lag >= each - length(open)
    eventually(fn -> assert %{state: :assigned, lag: 0} = row(consumer, 1) end)

    # None of a list is paused when one is not here.
    assert {:error, %Error{reason: :not_assigned, message: text}} =
             Kmq.pause(consumer, [{topic, 1}, {topic, 7}])

    assert text =~ "#{topic}-7"
    assert row(consumer, 1).state == :assigned
    assert {:error, %Error{reason: :not_assigned}} = Kmq.resume(consumer, {topic, 7})
    assert_raise ArgumentError, fn -> Kmq.pause(consumer, :some) end

    # On: in order, each once, at the first attempt.
    assert :ok = Kmq.resume(consumer, :all)
    rest = pull(consumer, each - length(open))
    assert Enum.all?(rest, &(&1.attempt == 1 and &1.deliveries == 1))
    assert Enum.map(open ++ rest, & &1.offset) == Enum.to_list(0..(each - 1))
    assert Kmq.ack(rest, sync: true) == :ok
    eventually(fn -> assert %{lag: 0, open: 0} = Kmq.info(consumer).total end)
  end

  body "at most once: what is committed ahead of a paused partition is not the others' window",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..400, do: {"#{i}", partition: 0}))
    options = options(cluster, topic, delivery: :at_most_once, start_ahead: 50)
    {:ok, handle} = Handle.open(Kmq.Config.new!(options, :consumer), {__MODULE__, topic})
    on_exit(fn -> Handle.close(handle, 5_000) end)
    :ok = Handle.attach(handle, self())

    take = fn max ->
      for {_, _, p, records} <- Handle.take(handle, max), r <- records, do: {p, elem(r, 0)}
    end

    # A whole window is asked for, and none of it taken.
    eventually(
      fn ->
        rows = Handle.info(handle).partitions
        if Enum.all?(rows, &(&1.committed < 50)), do: assert(take.(100) == [])
        assert Enum.any?(rows, &(&1.partition == 0 and &1.committed == 50))
      end,
      15_000
    )

    assert :kmq_nif.consumer_pause(handle.ref, topic, 0, true) == :ok
    publish(cluster, topic, for(i <- 1..20, do: {"#{i}", partition: 1}))
    for i <- 0..19, do: assert([{1, i}] == eventually(fn -> with([] <- take.(1), do: nil) end))

    # It is still there.
    assert :kmq_nif.consumer_pause(handle.ref, topic, 0, false) == :ok
    assert [{0, 0}] = eventually(fn -> with([] <- take.(1), do: nil) end)
  end

  body "a seek back hands out again, its commit goes back, and what was in work stays so", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    n = 3_000
    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
    options = options(cluster, topic, start_ahead: 700, commit_interval: 50)
    consumer = consumer(options)
    [kept | done] = pull(consumer, 500)
    at = 1 + length(done)
    assert Kmq.ack(done, sync: true) == :ok
    group = options[:group_id]
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, at}] end)

    assert Kmq.seek(consumer, {topic, 0}, 100) == :ok
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, 100}] end)
    again = pull(consumer, n - 100)
    assert Enum.map(again, & &1.offset) == Enum.to_list(100..(n - 1))
    assert Kmq.ack(kept) == :ok
    assert Kmq.ack(again, sync: true) == :ok
    eventually(fn -> assert committed(cluster, group, topic, 1) == [{0, n}] end)
    eventually(fn -> assert %{lag: 0, open: 0} = Kmq.info(consumer).total end)

    # To the beginning, while all of it is in work a second time, a third time.
    for _ <- 1..2 do
      assert Kmq.seek(consumer, {topic, 0}, :beginning) == :ok
      once_more = pull(consumer, n)
      assert Enum.map(once_more, & &1.offset) == Enum.to_list(0..(n - 1))
      Process.put(:open, once_more)
    end

    assert Kmq.ack(Process.get(:open), sync: true) == :ok
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    Consumer.stop(consumer)
    eventually(fn -> assert open(options) == 0 end)
    assert length(records(cluster, topic, 1)) == n
  end

  # What the marker topic says is open.
  defp open(options) do
    {:ok, partitions} =
      Kmq.Inspect.partitions(Keyword.drop(options, [:group_config, :fetch_config]))

    partitions |> Enum.map(& &1.open) |> Enum.sum()
  end

  body "a seek forward skips: nothing between is handed out, or comes again", %{cluster: cluster} do
    topic = queue(cluster, 1)
    n = 2_000
    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
    options = options(cluster, topic, start_ahead: 500, lease: 1_000)
    consumer = consumer(options)
    [kept | done] = pull(consumer, 10)
    assert Kmq.ack(done) == :ok

    # What it has STARTed ahead, and not handed out, is ended. It reads on when somebody takes.
    eventually(fn ->
      assert Kmq.ack(Consumer.pull(consumer, max: 1, wait: 100)) == :ok
      assert row(consumer, 0).started >= 400
    end)

    assert Kmq.seek(consumer, {topic, 0}, 1_990) == :ok
    rest = pull(consumer, 10)
    assert Enum.map(rest, & &1.offset) == Enum.to_list(1_990..1_999)
    assert Kmq.ack([kept | rest], sync: true) == :ok
    eventually(fn -> assert committed(cluster, options[:group_id], topic, 1) == [{0, n}] end)
    eventually(fn -> assert open(options) == 0 end)

    # Longer than the lease: a tracker has had its chance.
    assert Consumer.pull(consumer, max: 10, wait: 2_500) == []
    assert length(records(cluster, topic, 1)) == n

    publish(cluster, topic, ["unseen"])
    assert Kmq.pause(consumer, :all) == :ok
    assert Kmq.seek(consumer, {topic, 0}, :end) == :ok
    assert Kmq.resume(consumer, :all) == :ok
    publish(cluster, topic, ["seen"])
    assert ["seen"] = Enum.map(pull(consumer, 1), & &1.value)

    assert {:error, %Error{reason: :offset_out_of_range, message: text}} =
             Kmq.seek(consumer, {topic, 0}, n + 3)

    assert text =~ "offset #{n + 3} is not there: the partition has 0 to #{n + 2}"
    assert {:error, %Error{reason: :not_assigned}} = Kmq.seek(consumer, {topic, 1}, 0)
    assert {:error, %Error{reason: :not_assigned}} = Kmq.seek(consumer, {"other", 0}, 0)
    assert_raise ArgumentError, fn -> Kmq.seek(consumer, {topic, 0}, -1) end
    assert_raise ArgumentError, fn -> Kmq.seek(consumer, topic, 0) end

    if cluster.kind == :sandbox do
      assert {:error, %Error{reason: :unsupported_feature}} =
               Kmq.seek(consumer, {topic, 0}, DateTime.utc_now())
    end
  end
end
