defmodule Kmq.Integration.TrackerRestartTest do
  # What is due while the tracker is killed waits for its successor, not for its session: the group knows both as one member.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Test.{Markers, VM}
  alias Kmq.Tracker

  # Longer than any of these tests would wait for it.
  @session [tracker: ["session.timeout.ms": 45_000, "heartbeat.interval.ms": 1_000]]

  defp scene(cluster, n, extra \\ []) do
    topic = queue(cluster, 1)

    options =
      options(cluster, topic, [tracker: :external, backoff: [0], kafka_config: @session] ++ extra)

    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
    left_behind(cluster, topic, options)
    {topic, options}
  end

  test "killed with messages due: they come as soon as it runs again", %{cluster: cluster} do
    {topic, options} = scene(cluster, 50)
    tracker = tracker(options)
    {:ok, %{os_pid: first}} = Tracker.info(tracker)
    VM.signal(first, :stop)
    mark(cluster, topic, options, for(i <- 0..49, do: Markers.start(0, i, 500)))
    killed = System.monotonic_time(:millisecond)
    VM.signal(first, :kill)
    eventually(fn -> length(copies(cluster, topic)) == 50 end, 5_000)
    IO.puts(:stderr, "copied #{System.monotonic_time(:millisecond) - killed} ms after the kill")
    nothing_open(tracker)
    assert {:ok, %{restarts: 1, os_pid: second}} = Tracker.info(tracker)
    assert second != first
    assert length(copies(cluster, topic)) == 50
  end

  test "ended in an orderly way it leaves the group: another one has its partitions at once", %{
    cluster: cluster
  } do
    {topic, options} = scene(cluster, 1)
    first = tracker(options)
    stop_tracker(first)
    began = System.monotonic_time(:millisecond)
    tracker(options)

    IO.puts(
      :stderr,
      "ready #{System.monotonic_time(:millisecond) - began} ms after the end of the other one"
    )

    assert System.monotonic_time(:millisecond) - began < scaled(10_000)
    mark(cluster, topic, options, [Markers.start(0, 0, 0)])
    eventually(fn -> length(copies(cluster, topic)) == 1 end, 10_000)
  end

  test "one that was taken for dead is fenced by its successor and ends", %{cluster: cluster} do
    {topic, options} = scene(cluster, 20)
    id = "kmq-test-" <> unique("i")
    static = [tracker: [{:"group.instance.id", id} | @session[:tracker]]]
    frozen = tracker(options, kafka_config: static)
    {:ok, %{os_pid: os_pid}} = Tracker.info(frozen)
    VM.signal(os_pid, :stop)
    on_exit(fn -> VM.signal(os_pid, :kill) end)
    mark(cluster, topic, options, for(i <- 0..19, do: Markers.start(0, i, 0)))
    second = tracker(options, kafka_config: static)
    eventually(fn -> length(copies(cluster, topic)) == 20 end, 10_000)
    nothing_open(second)
    # woken, it reads what has happened, or is told before that it is another one's now
    VM.signal(os_pid, :cont)
    eventually(fn -> not VM.os_alive?(os_pid) end, 15_000)
    assert length(copies(cluster, topic)) == 20
  end
end
