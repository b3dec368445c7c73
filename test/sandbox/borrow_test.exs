defmodule Kmq.Sandbox.BorrowTest do
  # A consumer of the same name takes its forerunner's handle over, but not that of another consumer.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.Consumer

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
end
