defmodule Kmq.Sandbox.FairTest do
  # What is ready of several partitions is handed out of all of them.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Handle}

  test "of partitions that are all fetched and STARTed none is taken to its end before the others",
       %{cluster: cluster} do
    topic = queue(cluster, 4)
    publish(cluster, topic, for(i <- 0..399, do: {"#{i}", partition: rem(i, 4)}))
    {:ok, handle} = Handle.open(Config.new!(options(cluster, topic), :consumer), {__MODULE__, 1})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)

    started = fn -> Handle.info(handle).partitions |> Enum.map(& &1.started) |> Enum.sum() end
    eventually(fn -> assert started.() == 400 end, 20_000)

    # the first window of each waits for its commit
    eventually(fn -> assert taken(handle) != [] end, 20_000)
    seen = for _ <- 1..12, partition <- taken(handle), into: MapSet.new(), do: partition
    assert MapSet.size(seen) == 4
  end

  defp taken(handle),
    do: for({_slot, _topic, partition, _} <- Handle.take(handle, 5), do: partition)
end
