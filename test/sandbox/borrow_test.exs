defmodule Kmq.Sandbox.BorrowTest do
  # A consumer of the same name takes its forerunner's handle over, but not that of another consumer.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Consumer, Handle, Lanes}
  alias OffBroadway.Kmq.Producer

  defp started(options) do
    {:ok, pid} = Consumer.start_link([name: :borrower] ++ options)
    Process.unlink(pid)
    pid
  end

  defp killed(pid) do
    monitor = Process.monitor(pid)
    Process.exit(pid, :kill)
    assert_receive {:DOWN, ^monitor, :process, ^pid, :killed}
  end

  test "the same options: what was in work still counts; others: another group and topic", %{
    cluster: cluster
  } do
    [a, b] = for name <- ["a", "b"], do: queue(cluster, 1, name)
    publish(cluster, a, ["a1", "a2"])
    publish(cluster, b, ["b1"])
    options = options(cluster, a, drain_timeout: 10_000)
    first = started(options)
    [a1, a2] = pull(first, 2)
    killed(first)

    again = started(options)
    assert Kmq.ack(a1, sync: true) == :ok
    assert GenServer.call(again, :handle) == a1.handle
    killed(again)

    other = started(options(cluster, b, group_id: options[:group_id] <> "-2"))
    assert [%{value: "b1", topic: ^b} = b1] = pull(other, 1, 30_000)
    assert b1.handle != a1.handle
    assert Kmq.ack(b1, sync: true) == :ok
    assert Kmq.ack(a2) == {:error, :closed}
    assert Consumer.stop(other) == :ok
  end

  test "without a name nobody can come back: the group has its partitions at once, what is in work can still be settled",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b"])
    # Longer than this test waits for anything.
    options = options(cluster, topic, drain_timeout: 60_000, max_processing_time: 600_000)
    {:ok, first} = Consumer.start_link(options)
    Process.unlink(first)
    [a, b] = pull(first, 2)
    killed(first)
    publish(cluster, topic, ["c"])

    second = start_supervised!({Consumer, options})
    assert [%{value: "c", attempt: 1} = c] = pull(second, 1, 30_000)
    assert Kmq.ack(a, sync: true) == :ok
    assert Kmq.Handle.info(b.handle).partitions |> Enum.map(& &1.open) |> Enum.sum() == 1
    assert Kmq.ack([b, c], sync: true) == :ok

    # Nothing is in work any more: it ends.
    monitor = Process.monitor(a.handle.pid)
    assert_receive {:DOWN, ^monitor, :process, _, _}, scaled(10_000)
    assert Consumer.pull(second, max: 10, wait: 300) == []
  end

  # As a producer does whose transformer raises. By offsets nothing else would bring it back, and the commit would stand for ever.
  for passed <- [0, 2] do
    test "by offsets, what a producer had taken comes again when it ends, if no processor has it (passed on: #{passed})",
         %{cluster: cluster} do
      topic = queue(cluster, 1)
      publish(cluster, topic, ~w(a b))
      config = Config.new!(options(cluster, topic, delivery: :offsets), :producer)
      {:ok, handle} = Handle.open(config, {unique("borrow"), 0})
      on_exit(fn -> Handle.close(handle, 5_000, false) end)

      {first, monitor} =
        spawn_monitor(fn ->
          lanes = Lanes.new(:partition, 1, {10, 5}, false)
          :ok = Handle.attach(handle, self(), lanes)
          assert 2 == eventually(fn -> taken(handle, lanes, unquote(passed)) end, 20_000)
        end)

      assert_receive {:DOWN, ^monitor, :process, ^first, :normal}, scaled(25_000)
      lanes = Lanes.new(:partition, 1, {10, 5}, false)
      :ok = Handle.attach(handle, self(), lanes)

      if unquote(passed) == 2 do
        # Processors have it, and may acknowledge it still.
        publish(cluster, topic, ["c"])
        assert ["c"] == eventually(fn -> with([] <- take(handle, lanes), do: nil) end, 20_000)
      else
        assert ["a", "b"] ==
                 eventually(fn -> with([] <- take(handle, lanes), do: nil) end, 20_000)
      end
    end
  end

  # The same where no order is kept, and so nothing counted.
  test "by offsets and without an order, a producer that raises: what it had taken comes again",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(a b))
    options = options(cluster, topic, delivery: :offsets, ordering: :none)
    broadway = [name: unique("borrow"), index: 0]

    {first, monitor} =
      spawn_monitor(fn ->
        {:producer, state} = Producer.init([broadway: broadway] ++ options)
        {["a", "b"], state} = demanded(state, 2)
        reason = {%RuntimeError{message: "a transformer"}, []}
        Producer.terminate(reason, state)
        exit(reason)
      end)

    assert_receive {:DOWN, ^monitor, :process, ^first, {%RuntimeError{}, []}}, scaled(25_000)
    {:producer, state} = Producer.init([broadway: broadway] ++ options)
    assert {["a", "b"], state} = demanded(state, 2)
    Producer.terminate(:shutdown, state)
  end

  defp demanded(state, n, values \\ [])
  defp demanded(state, n, values) when length(values) >= n, do: {values, state}

  defp demanded(state, n, values) do
    {:noreply, messages, state} =
      if values == [] and state.demand == 0,
        do: Producer.handle_demand(n, state),
        else: Producer.handle_info(assert_receive({:kmq, _, _}, scaled(20_000)), state)

    demanded(state, n, values ++ Enum.map(messages, & &1.data))
  end

  defp taken(handle, lanes, passed) do
    case take(handle, lanes) do
      [] ->
        nil

      values ->
        Lanes.send_out(lanes, 0, length(values))
        Lanes.passed({1, Lanes.carried(lanes), 0, passed})
        length(values)
    end
  end

  defp take(handle, lanes) do
    {batches, unknown} = Handle.take(handle, 10, {lanes.mode, [10]})
    Handle.lanes(handle, for({slot, _, _} <- unknown, do: {slot, 0}))
    for {_, _, _, records, 0} <- batches, record <- records, do: elem(record, 3)
  end
end
