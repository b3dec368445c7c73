defmodule Kmq.Sandbox.SyncTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  @n 300
  @late_ms 800

  test "an ack with sync: waits for the commit that covers its message", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["first", "second"])
    consumer = consumer(options(cluster, topic, commit_interval: 600_000))
    [first] = Kmq.Consumer.pull(consumer, wait: scaled(15_000))
    assert Kmq.ack(first, sync: true) == :ok
    late = List.duplicate({:no_error, @late_ms}, 20)
    :ok = Kmq.Sandbox.inject(cluster.sandbox, {:broker_request_errors, 1, :offset_commit, late})
    began = System.monotonic_time(:millisecond)
    [second] = Kmq.Consumer.pull(consumer, wait: scaled(15_000))
    assert Kmq.ack(second, sync: 100) == {:error, :timeout}
    assert Kmq.ack(second) == {:error, :unknown}
    assert Kmq.Consumer.flush(consumer, scaled(10_000)) == :ok
    assert System.monotonic_time(:millisecond) - began >= @late_ms
    :ok = Kmq.Sandbox.inject(cluster.sandbox, {:request_errors, :offset_commit, []})
  end

  test "calls with sync: that come all the time do not lengthen each other's wait", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..@n, do: "#{i}"))
    consumer = consumer(options(cluster, topic))
    messages = pull(consumer, @n)
    :ok = Kmq.Sandbox.inject(cluster.sandbox, {:rtt, -1, 30})
    parent = self()

    # One more every few ms, whether those before have their answer or not.
    last =
      Task.async(fn ->
        for message <- messages do
          spawn_link(fn -> send(parent, {:answer, Kmq.ack(message, sync: true)}) end)
          Process.sleep(5)
        end
      end)

    assert_receive {:answer, :ok}, scaled(1_000)
    assert Task.yield(last, 0) == nil
    for _ <- 2..@n, do: assert_receive({:answer, :ok}, scaled(5_000))
    Task.await(last, :infinity)
  end
end
