defmodule Kmq.Sandbox.FairTest do
  # What is ready of several partitions is handed out of all of them.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Handle}

  test "of partitions that are all fetched and STARTed none is taken to its end before the others",
       %{cluster: cluster} do
    handle = all_started(cluster, 4, 400, 1)

    # the first window of each waits for its commit
    eventually(fn -> assert taken(handle) != [] end, 20_000)
    seen = for _ <- 1..12, partition <- taken(handle), into: MapSet.new(), do: partition
    assert MapSet.size(seen) == 4
  end

  test "beside a backlog that is worked off slowly another partition's messages have their turn",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..3000, do: {"#{i}", partition: 0}))
    options = options(cluster, topic, start_ahead: 10)
    {:ok, handle} = Handle.open(Config.new!(options, :consumer), {__MODULE__, 2})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)

    assert slowly(handle, 20) == List.duplicate(0, 20)
    publish(cluster, topic, for(i <- 1..5, do: {"#{i}", partition: 1}))

    # what it takes until they are fetched, and their turns; a run of one partition would be a thousand
    assert Enum.count(slowly(handle, 200), &(&1 == 1)) == 5
  end

  test "also where callers that were fast, and had much STARTed for them, become slow", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..40_000, do: {"#{i}", partition: 0}))
    {:ok, handle} = Handle.open(Config.new!(options(cluster, topic), :consumer), {__MODULE__, 3})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)

    quickly(handle, 10_000)
    started = fn -> Handle.info(handle).partitions |> Enum.map(& &1.started) |> Enum.sum() end
    eventually(fn -> assert started.() > 2_500 end, 20_000)
    publish(cluster, topic, for(i <- 1..5, do: {"#{i}", partition: 1}))
    assert Enum.count(slowly(handle, 200), &(&1 == 1)) == 5
  end

  test "two partitions that share a processor take turns, however often it has room again", %{
    cluster: cluster
  } do
    handle = all_started(cluster, 2, 600, 4)
    eventually(fn -> assert MapSet.size(sharing(handle, 20)) == 2 end, 20_000)

    # each takes all the room there is, and more is asked for than there is room
    for _ <- 1..40, do: assert(MapSet.size(sharing(handle, 2)) == 2)
  end

  # Messages of partitions in turn, and a handle that holds all of them, ready.
  defp all_started(cluster, partitions, n, id) do
    topic = queue(cluster, partitions)
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, partitions)}))
    {:ok, handle} = Handle.open(Config.new!(options(cluster, topic), :consumer), {__MODULE__, id})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)

    started = fn -> Handle.info(handle).partitions |> Enum.map(& &1.started) |> Enum.sum() end
    eventually(fn -> assert started.() == n end, 20_000)
    handle
  end

  # Of which partitions so many takes were.
  defp sharing(handle, n) do
    for _ <- 1..n, partition <- shared(handle), into: MapSet.new(), do: partition
  end

  defp shared(handle) do
    {batches, unknown} = Handle.take(handle, 100, {:partition, [5]})
    Handle.lanes(handle, for({slot, _, _} <- unknown, do: {slot, 0}))
    for {_slot, _topic, partition, _records, 0} <- batches, do: partition
  end

  defp quickly(_handle, n) when n <= 0, do: :ok
  defp quickly(handle, n), do: quickly(handle, n - length(taken(handle, 2_000)))

  # One after the other, each handled for 10 ms.
  defp slowly(handle, n) do
    for _ <- 1..n do
      [partition] = eventually(fn -> with([] <- taken(handle, 1), do: nil) end, 20_000)
      Process.sleep(10)
      partition
    end
  end

  defp taken(handle, max \\ 5),
    do:
      for(
        {_slot, _topic, partition, records} <- Handle.take(handle, max),
        _ <- records,
        do: partition
      )
end
