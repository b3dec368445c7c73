defmodule Kmq.Integration.TrackerClockTest do
  # A broker's clock that jumps an hour ahead does not expire what everybody holds.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Test.{Kafka, Markers}
  alias Kmq.Tracker

  @faketime Enum.find(
              Path.wildcard("/usr/lib/*/faketime/libfaketimeMT.so.1") ++
                Path.wildcard("/usr/lib*/faketime/libfaketimeMT.so.1"),
              &File.exists?/1
            )

  if @faketime == nil, do: @moduletag(skip: "no faketime")

  # a JVM under faketime starts slowly
  @tag :slow
  @tag timeout: 400_000
  test "the broker's clock is an hour ahead all of a sudden: deadlines stay within five seconds of their time" do
    clock = Path.join(System.tmp_dir!(), unique("kmq-broker-clock"))
    on_exit(fn -> File.rm(clock) end)
    File.write!(clock, "+0s")

    kafka =
      with_env(
        [
          {"LD_PRELOAD", @faketime},
          {"FAKETIME_DONT_FAKE_MONOTONIC", "1"},
          {"DONT_FAKE_MONOTONIC", "1"},
          {"FAKETIME_TIMESTAMP_FILE", clock},
          # read again each second, not at each look: a JVM looks all the time
          {"FAKETIME_CACHE_DURATION", "1"}
        ],
        fn -> Kafka.start!() end
      )

    cluster = %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external, backoff: [0])
    publish(cluster, topic, for(i <- 0..20, do: "#{i}"))
    left_behind(cluster, topic, options)
    tracker = tracker(options)
    scope = {topic, options[:group_id]}

    mark(cluster, topic, options, [Markers.start_range(scope, 0, 0, 20, 12_000)])
    began = System.monotonic_time(:millisecond)
    File.write!(clock, "+3600s")
    # until the broker has noticed
    eventually(fn -> ahead?(cluster) end)
    # what comes now bears the new time: it is due in its time, and the others are not
    mark(cluster, topic, options, [Markers.start_range(scope, 0, 20, 1, 500)])
    markers = records(cluster, markers(topic, options), 1)
    assert List.last(markers).ts - hd(markers).ts > 3_500_000, "the clock did not jump"

    eventually(fn -> assert ["20"] = Enum.map(copies(cluster, topic), & &1.value) end, 15_000)
    assert {:ok, %{partitions: [%{open: open, due: due}]}} = Tracker.info(tracker)
    early = System.monotonic_time(:millisecond) - began < 6_000
    if early, do: assert({open, due} in [{20, 0}, {21, 0}, {21, 1}])

    eventually(fn -> assert length(copies(cluster, topic)) == 21 end, 20_000)
    took = System.monotonic_time(:millisecond) - began
    IO.puts(:stderr, "due in 12000 ms, copied after #{took} ms")
    # the slack is 5 s
    assert took >= 6_900
    nothing_open(tracker)
    stop_tracker(tracker)
    Kafka.stop(kafka)
  end

  defp ahead?(cluster) do
    probe = queue(cluster, 1, "probe", config: [{"message.timestamp.type", "LogAppendTime"}])
    publish(cluster, probe, ["?"])
    [%{ts: ts}] = records(cluster, probe, 1)
    ts - System.os_time(:millisecond) > 3_000_000
  end

  defp with_env(env, fun) do
    System.put_env(env)
    fun.()
  after
    for {name, _} <- env, do: System.delete_env(name)
  end
end
