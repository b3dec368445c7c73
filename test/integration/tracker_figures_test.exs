defmodule Kmq.Integration.TrackerFiguresTest do
  # Every figure that a tracker is to tell, as telemetry of an embedded one and as metrics of a daemon, from the same story; and all
  # gauges are back at zero when all is acknowledged.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Test.{BrokerAdmin, Markers, VM}

  @count "kmq-redelivery-count"

  # One message for each thing that can happen: 0 gone, 1 redelivered (crash), 2 redelivered (failed), 3 for a dead letter topic that does
  # not take it at first, 4 open for long, 5 acknowledged too late.
  defp story(cluster, checkpoints) do
    topic = queue(cluster, 1)
    dead = queue(cluster, 1, "dead", config: [{"max.message.bytes", "1000"}])
    options = options(cluster, topic, tracker: :external, backoff: [0], dead_letter_topic: dead)
    large = {String.duplicate("d", 3_000), headers: [{@count, <<3>>}]}
    publish(cluster, topic, ["0", "1", "2", large, "4", "5"])
    left_behind(cluster, topic, options)
    forget(cluster, topic, 0, 1)
    scope = {topic, options[:group_id]}
    {topic, dead, options, scope, checkpoints}
  end

  defp happen(cluster, {topic, _dead, options, scope, n}) do
    # RETRY: failed, counts, due at once
    failed = Markers.range(scope, 0, 4, <<2, 0, 1, 0, 1, 0, 0, 1>>)

    mark(
      cluster,
      topic,
      options,
      [
        Markers.start(0, 4, 3_600_000),
        Markers.start(0, 2, 3_600_000),
        failed,
        {"?", key: "??", partition: 0}
      ] ++
        for(i <- [0, 1, 3, 5], do: Markers.start(0, i, 0))
    )

    eventually(fn -> assert length(copies(cluster, topic)) == 3 end, 10_000)
    # enough for a checkpoint; and an acknowledgement of what has been redelivered
    for _ <- 1..4,
        do: mark(cluster, topic, options, for(_ <- 1..n, do: Markers.done_range(scope, 0, 5, 1)))
  end

  defp over(cluster, {topic, dead, options, scope, _}) do
    BrokerAdmin.set_config(cluster.hosts, dead, [{"max.message.bytes", 100_000}])
    await_records(cluster, dead, 1, 1)
    mark(cluster, topic, options, [Markers.done_range(scope, 0, 4, 1)])
  end

  @settings %{checkpoint_records: 10, checkpoint_pause_ms: 100}

  @tag timeout: 120_000
  test "as telemetry", %{cluster: cluster} do
    Application.put_env(:kmq, :tracker_settings, @settings)
    on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)
    story = {topic, _, options, _, _} = story(cluster, 10)
    tracker = tracker(options)
    listen()
    happen(cluster, story)

    until(fn seen ->
      assert %{count: 1} = seen[{[:kmq, :redelivered], :failed}]
      assert %{count: _, late_ms: _, late_max_ms: _} = seen[{[:kmq, :redelivered], :crash}]
      assert %{count: 1} = seen[{[:kmq, :gone], nil}]
      assert %{count: 1} = seen[{[:kmq, :malformed], :malformed}]
      assert %{count: n} = seen[{[:kmq, :tracker, :late_acks], nil}]
      assert n > 0
      assert %{open: _, parts: _, bytes: _} = seen[{[:kmq, :tracker, :checkpoint], nil}]

      assert %{count: 2, oldest_age_ms: age, next_due_ms: next, due: 1} =
               seen[{[:kmq, :open], nil}]

      assert next in 3_000_000..3_600_000
      assert age > 0
      assert %{in_flight: 0, waiting: 1, restarts: 0} = seen[{[:kmq, :tracker, :work], nil}]
      assert %{lag: 0, checkpoint_age_ms: age} = seen[{[:kmq, :tracker, :lag], nil}]
      assert age >= 0
      assert %{count: _} = seen[{[:kmq, :error], :too_large}]
    end)

    over(cluster, story)
    # told in sums, so first what it has to say, then the kill
    until(fn seen -> assert %{count: 1} = seen[{[:kmq, :dead_lettered], :crash}] end)
    {:ok, %{os_pid: os_pid}} = Kmq.Tracker.info(tracker)
    VM.signal(os_pid, :kill)

    until(fn seen ->
      assert %{system_time: _} = seen[{[:kmq, :tracker, :stop], nil}]
      assert %{in_flight: 0, waiting: 0, restarts: 1} = seen[{[:kmq, :tracker, :work], nil}]

      assert %{count: 0, oldest_age_ms: 0, next_due_ms: -1, due: 0} = seen[{[:kmq, :open], nil}]

      assert %{lag: 0, checkpoint_age_ms: -1} = seen[{[:kmq, :tracker, :lag], nil}]
    end)

    assert length(copies(cluster, topic)) == 3
  end

  # The last of each kind of event, by its cause.
  defp until(fun) do
    eventually(
      fn ->
        seen = drain(Process.get(:seen, %{}))
        Process.put(:seen, seen)
        fun.(seen)
        true
      end,
      20_000
    )
  end

  defp drain(seen) do
    receive do
      {[:kmq | _] = event, measurements, meta} ->
        kind = meta[:cause] || meta[:kind] || meta[:alarm]
        drain(Map.put(seen, {event, kind}, measurements))
    after
      0 -> seen
    end
  end

  @tag timeout: 120_000
  test "as metrics of a daemon", %{cluster: cluster} do
    dir = Path.join(System.tmp_dir!(), unique("kmq-figures"))
    File.mkdir_p!(dir)
    on_exit(fn -> File.rm_rf!(dir) end)
    story = {topic, dead, options, _, _} = story(cluster, 10)
    metrics = Path.join(dir, "metrics")

    File.write!(Path.join(dir, "conf"), """
    group = #{options[:group_id]}
    queue = #{topic}
    queue.#{topic}.dead_letters = #{dead}
    kafka.bootstrap.servers = #{cluster.hosts}
    kafka.group.instance.id = #{unique("daemon")}
    checkpoint_records = 10
    checkpoint_pause_ms = 100
    metrics_file = #{metrics}
    metrics_interval_ms = 200
    """)

    pid = daemon(dir)
    eventually(fn -> assert series(metrics)["lag"] == 0 end, 20_000)
    happen(cluster, story)

    eventually(
      fn ->
        m = series(metrics)
        assert m["redelivered_total failed"] == 1
        assert m["redelivered_total crash"] == 2
        assert m["gone_total"] == 1
        assert m["malformed_total"] == 1
        assert m["late_acks_total"] > 0
        assert m["checkpoints_total"] > 0
        assert m["checkpoint_age_seconds"] >= 0
        assert {m["open"], m["due"], m["lag"]} == {2, 1, 0}
        assert m["next_due_seconds"] > 3_000
        assert m["oldest_open_age_seconds"] > 0
        assert {m["in_flight"], m["waiting"], m["restarts_total"]} == {0, 1, 0}
        assert m["alarms_total too_large"] >= 1
        assert m["start_time_seconds"] > 1_000_000_000
        true
      end,
      20_000
    )

    VM.signal(pid, :kill)
    eventually(fn -> not VM.os_alive?(pid) end)
    pid = daemon(dir)
    over(cluster, story)

    eventually(
      fn ->
        m = series(metrics)
        assert m["restarts_total"] == 1
        assert m["dead_lettered_total crash"] == 1
        assert {m["open"], m["due"], m["lag"], m["oldest_open_age_seconds"]} == {0, 0, 0, 0}
        assert {m["in_flight"], m["waiting"]} == {0, 0}
        refute m["next_due_seconds"] || m["checkpoint_age_seconds"]
        true
      end,
      20_000
    )

    System.cmd("kill", ["-TERM", "#{pid}"])
    eventually(fn -> not VM.os_alive?(pid) end)
  end

  defp daemon(dir) do
    program = to_string(:kmq_port.program('kmq_tracker'))
    script = ~S("$0" --config "$1/conf" </dev/null >>"$1/log" 2>&1 & echo $!)
    {pid, 0} = System.cmd("/bin/sh", ["-c", script, program, dir])
    pid = String.to_integer(String.trim(pid))
    on_exit(fn -> VM.signal(pid, :kill) end)
    pid
  end

  # "name" or "name cause|reason" => value
  defp series(file) do
    for line <- file |> File.read!() |> String.split("\n"),
        [_, name, labels, value] <-
          [Regex.run(~r/^kmq_tracker_([a-z_]+)(?:\{(.*)\})? (\S+)$/, line)],
        into: %{} do
      kind = Regex.run(~r/(?:cause|reason)="([^"]*)"/, labels)
      {number, ""} = Float.parse(value)

      {if(kind, do: name <> " " <> List.last(kind), else: name),
       if(number == trunc(number), do: trunc(number), else: number)}
    end
  rescue
    File.Error -> %{}
  end
end
