defmodule Kmq.Integration.TrackerClockTest do
  # A broker's clock that jumps an hour ahead does not expire what everybody holds.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Test.{Kafka, Markers}
  alias Kmq.Tracker

  # The lease of the first twenty.
  @lease scaled(12_000)

  @tag timeout: 400_000
  test "the broker's clock is an hour ahead all of a sudden: deadlines stay within five seconds of their time" do
    dir = Path.join(System.tmp_dir!(), unique("kmq-broker-clock"))
    File.mkdir_p!(dir)
    on_exit(fn -> File.rm_rf!(dir) end)
    clock = Path.join(dir, "shift")
    File.write!(clock, <<0::native-64>>)
    env = [{"LD_PRELOAD", library(dir)}, {"KMQ_CLOCK_FILE", clock}]
    kafka = with_env(env, fn -> Kafka.start!() end)

    cluster = %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external, backoff: [0])
    publish(cluster, topic, for(i <- 0..20, do: "#{i}"))
    left_behind(cluster, topic, options)
    tracker = tracker(options)
    scope = {topic, options[:group_id]}

    mark(cluster, topic, options, [Markers.start_range(scope, 0, 0, 20, @lease)])
    began = System.monotonic_time(:millisecond)
    # In place: the broker has it mapped, and is an hour ahead with its next look.
    File.open!(clock, [:read, :write], &IO.binwrite(&1, <<3_600_000::native-64>>))
    # what comes now bears the new time: it is due in its time, and the others are not
    mark(cluster, topic, options, [Markers.start_range(scope, 0, 20, 1, 500)])
    markers = records(cluster, markers(topic, options), 1)
    assert List.last(markers).ts - hd(markers).ts > 3_500_000, "the clock did not jump"

    eventually(fn -> assert ["20"] = Enum.map(copies(cluster, topic), & &1.value) end, 15_000)
    assert {:ok, %{partitions: [%{open: open, due: due}]}} = Tracker.info(tracker)
    early = System.monotonic_time(:millisecond) - began < @lease - 6_000
    if early, do: assert({open, due} in [{20, 0}, {21, 0}, {21, 1}])

    eventually(fn -> assert length(copies(cluster, topic)) == 21 end, 25_000)
    took = System.monotonic_time(:millisecond) - began
    IO.puts(:stderr, "due in #{@lease} ms, copied after #{took} ms")
    # the slack is 5 s
    assert took >= @lease - 5_100
    nothing_open(tracker)
    stop_tracker(tracker)
    Kafka.stop(kafka)
  end

  # Programs that shift the clock for everything a JVM looks at take minutes for its start.
  defp library(dir) do
    so = Path.join(dir, "shift.so")
    source = Path.expand("../support/clock/shift.c", __DIR__)
    {"", 0} = System.cmd("cc", ~w(-O2 -shared -fPIC -o) ++ [so, source], stderr_to_stdout: true)
    so
  end

  defp with_env(env, fun) do
    System.put_env(env)
    fun.()
  after
    for {name, _} <- env, do: System.delete_env(name)
  end
end
