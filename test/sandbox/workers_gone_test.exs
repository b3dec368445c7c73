defmodule Kmq.Sandbox.WorkersGoneTest do
  # By offsets, what a killed processor had comes again. The producer sees to that; here it is killed as well.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.Handle

  defp process(fun) do
    me = self()

    spawn(fn ->
      send(me, {:done, self(), fun.()})
      receive(do: (:end -> :ok))
    end)
  end

  defp killed(pid) do
    monitor = Process.monitor(pid)
    Process.exit(pid, :kill)
    assert_receive {:DOWN, ^monitor, :process, ^pid, _}
  end

  defp take_all(handle, n, got) do
    got = got ++ for {_, _, _, records} <- Handle.take(handle, 10), record <- records, do: record

    if length(got) >= n do
      Enum.map(got, &elem(&1, 0))
    else
      receive(do: ({:kmq, _, :ready} -> :ok), after: (100 -> :ok))
      take_all(handle, n, got)
    end
  end

  defp borrow(config, workers) do
    pid =
      process(fn ->
        {:ok, handle} = Handle.open(config, :workers_gone)
        :ok = Handle.attach(handle, self())
        Handle.workers(handle, workers)
        {handle, take_all(handle, 5, [])}
      end)

    assert_receive {:done, ^pid, result}, 30_000
    {pid, result}
  end

  test "a processor and its producer killed together: what they had comes again", %{
    cluster: cluster
  } do
    for first <- [:worker, :borrower] do
      topic = queue(cluster, 1)
      publish(cluster, topic, for(i <- 0..4, do: "#{i}"))

      config =
        cluster
        |> options(topic, delivery: :offsets, drain_timeout: 30_000)
        |> Kmq.Config.new!(:producer)

      worker = process(fn -> :ok end)
      {borrower, {handle, [0, 1, 2, 3, 4]}} = borrow(config, [worker])
      order = if first == :worker, do: [worker, borrower], else: [borrower, worker]
      Enum.each(order, &killed/1)
      {next, {^handle, again}} = borrow(config, [])
      assert again == [0, 1, 2, 3, 4]

      # One that was killed alone leaves its workers what they have.
      killed(next)
      {:ok, ^handle} = Handle.open(config, :workers_gone)
      :ok = Handle.attach(handle, self())
      assert Handle.take(handle, 10) == []
      assert Handle.close(handle, 5_000) == :ok
    end
  end
end
