defmodule Kmq.Integration.TrackerFleetTest do
  # Two to four trackers over sixteen partitions that are joined, stopped, killed, frozen and woken at random under load, for a minute.
  # KMQ_SEED repeats a run as far as chance is ours; KMQ_LONG=1 runs for ten minutes.
  use ExUnit.Case
  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, MarkerLog, Markers, Scene, VM, Worker}
  alias Kmq.Tracker

  @moduletag :integration
  @moduletag :capture_log
  @long System.get_env("KMQ_LONG") == "1"
  @ms if @long, do: 600_000, else: 60_000
  @n if @long, do: 150_000, else: 15_000
  @fail_every 3
  # A tracker that is killed or frozen is missed after a session of 2 s. Every fault takes all partitions from everybody for a moment; now
  # and then the next one comes before that is over.
  @served_ms 10_000

  setup_all do
    %{hosts: Kmq.Test.Kafka.bootstrap()}
  end

  @tag timeout: @ms + scaled(240_000)
  test "none is lost, and every partition is served soon after" do
    # checkpoints and deletions all the time, so that faults meet them, too
    settings = %{
      checkpoint_records: 20,
      checkpoint_pause_ms: 100,
      checkpoint_age_ms: 2_000,
      trim_records: 50
    }

    Application.put_env(:kmq, :tracker_settings, settings)
    on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)

    scene =
      Scene.new(partitions: 16, tracker: :external, redelivery_rate: 2_000, trim_markers: true)

    :rand.seed(:exsss, {Scene.seed(), 7, 7})
    options = Keyword.delete(scene.options, :tracker)
    :ok = Scene.listen()
    fleet = Enum.reduce(1..2, %{}, fn _, fleet -> join(fleet, options) end)
    :ok = Scene.work(scene, nil, fail_every: @fail_every)
    # one in each partition is open all the time, so that there is something to be written down
    mark(scene, &Markers.start(&1, 1_000_000, 3_600_000))

    parent = self()
    publisher = Task.async(fn -> publish(scene, parent) end)
    until = System.monotonic_time(:millisecond) + @ms
    fleet = trouble(fleet, options, until, %{})
    :ok = Task.await(publisher, :infinity)
    calm = System.monotonic_time(:millisecond)

    checker = Scene.await_all(scene, @n, 90_000)

    IO.puts(
      :stderr,
      "all handled #{System.monotonic_time(:millisecond) - calm} ms after the last fault"
    )

    failed = div(@n + @fail_every - 1, @fail_every)
    assert map_size(checker.failed) == failed
    assert Scene.dead(scene) == 0
    doubles = Scene.copies(scene, @n) - failed
    IO.puts(:stderr, "#{doubles} copies more than failures")

    told = told(%{checkpoints: 0, gaps: 0, late: [], ends: []})

    IO.puts(
      :stderr,
      "#{told.checkpoints} checkpoints; programs ended: #{inspect(Enum.frequencies(told.ends))}; due and not served for at most #{longest(told.late)}"
    )

    assert told.checkpoints > 0
    assert told.gaps == 0
    assert Enum.max(told.late) < scaled(@served_ms)

    mark(scene, &Markers.done(&1, 1_000_000))

    # every partition has one tracker that is caught up, and nothing is open
    try do
      eventually(
        fn ->
          parts = parts(fleet)
          assert parts |> Enum.map(& &1.partition) |> Enum.sort() == Enum.to_list(0..15)
          assert Enum.reject(parts, &settled?/1) == []
          true
        end,
        30_000
      )
    rescue
      error in ExUnit.AssertionError ->
        try do
          tell(scene, fleet)
        after
          reraise error, __STACKTRACE__
        end
    end

    for {id, _} <- fleet, do: stop_supervised!(id)
    assert Checker.missing(Scene.check(scene, @n)) == []
  end

  defp parts(fleet) do
    for {_, tracker} <- fleet, {:ok, info} <- [Tracker.info(tracker)], p <- info.partitions, do: p
  end

  defp settled?(part), do: part.state == :ready and part.open == 0 and part.due == 0

  # What helps to see why they are not: who has them, what their markers say, what the consumer still has, and where its group is.
  defp tell(scene, fleet) do
    say = fn what, term -> IO.puts(:stderr, "#{what}: #{inspect(term, limit: :infinity)}") end

    for {id, tracker} <- fleet do
      info = with {:ok, info} <- Tracker.info(tracker), do: Map.delete(info, :partitions)
      say.("#{inspect(id)}", info)
    end

    markers = Scene.markers(scene)
    ends = Checker.ends(scene.hosts, markers, scene.partitions)

    for part <- parts(fleet), not settled?(part) do
      say.("not settled", part)
      from = max(ends[part.partition] - 40, 0)

      for line <- MarkerLog.read_from(scene.hosts, markers, part.partition, from),
          do: say.("  marker", line)

      for info <- Worker.info(),
          row <- info.partitions,
          row.partition == part.partition,
          do: say.("  consumer", row)
    end

    say.("the group's commits", Scene.committed(scene))
    say.("the queue's ends", Checker.ends(scene.hosts, scene.topic, scene.partitions))
    say.("its consumers", for(info <- Worker.info(), do: Map.delete(info, :partitions)))
  end

  defp mark(scene, fun),
    do: Markers.write(scene.hosts, Scene.markers(scene), Enum.map(0..15, fun))

  defp told(acc) do
    receive do
      {[:kmq, :tracker, :checkpoint], _, _} ->
        told(%{acc | checkpoints: acc.checkpoints + 1})

      {[:kmq, :tracker, :stop], _, %{reason: reason}} ->
        told(%{acc | ends: [reason | acc.ends]})

      {[:kmq, :redelivered], %{late_max_ms: ms}, _} ->
        told(%{acc | late: [ms | acc.late]})

      {[:kmq, :offset_reset], _, %{reason: :marker_gap}} ->
        told(%{acc | gaps: acc.gaps + 1})

      {[:kmq | _], _, _} ->
        told(acc)
    after
      0 -> acc
    end
  end

  defp longest(late) do
    sorted = Enum.sort(late)
    at = fn share -> Enum.at(sorted, floor((length(sorted) - 1) * share)) end

    "#{List.last(sorted)} ms (of each 100 ms and partition the latest: median #{at.(0.5)} ms, p99 #{at.(0.99)} ms)"
  end

  # In step with the time there is, so that trouble meets load.
  defp publish(scene, _parent) do
    size = 200
    steps = div(@n, size)
    began = System.monotonic_time(:millisecond)

    for step <- 0..(steps - 1) do
      Scene.publish(scene, (step * size)..((step + 1) * size - 1))
      next = began + div(@ms * (step + 1), steps + 5)
      Process.sleep(max(next - System.monotonic_time(:millisecond), 0))
    end

    :ok
  end

  defp join(fleet, options) do
    id = {:tracker, System.unique_integer()}
    tracker = start_supervised!(Supervisor.child_spec({Tracker, options}, id: id))
    Map.put(fleet, id, tracker)
  end

  # frozen: os_pid => when it is woken
  defp trouble(fleet, options, until, frozen) do
    now = System.monotonic_time(:millisecond)
    {awake, frozen} = Enum.split_with(frozen, fn {_, at} -> at <= now or now >= until end)
    for {os_pid, _} <- awake, do: VM.signal(os_pid, :cont)
    frozen = Map.new(frozen)

    if now >= until do
      fleet
    else
      {fleet, frozen} = fault(:rand.uniform(4), fleet, options, frozen, now)
      Process.sleep(500 + :rand.uniform(3_000))
      trouble(fleet, options, until, frozen)
    end
  end

  defp fault(1, fleet, options, frozen, _now) when map_size(fleet) < 4,
    do: {join(fleet, options), frozen}

  defp fault(2, fleet, _options, frozen, _now) when map_size(fleet) > 2 do
    {id, _} = Enum.random(fleet)
    # one that is frozen would not end in an orderly way, and so is killed
    stop_supervised!(id)
    {Map.delete(fleet, id), frozen}
  end

  # One stays awake: where all are frozen, nobody is there to serve.
  defp fault(3, fleet, _options, frozen, now) do
    case Enum.shuffle(os_pids(fleet) -- Map.keys(frozen)) do
      [os_pid, _awake | _] ->
        VM.signal(os_pid, :stop)
        # shorter than a session of 2 s, or longer
        {fleet, Map.put(frozen, os_pid, now + 500 + :rand.uniform(4_000))}

      _one ->
        {fleet, frozen}
    end
  end

  defp fault(_kill, fleet, _options, frozen, _now) do
    with [_ | _] = os_pids <- os_pids(fleet), do: VM.signal(Enum.random(os_pids), :kill)
    {fleet, frozen}
  end

  # Not asked of the programs: they may be frozen.
  defp os_pids(fleet) do
    for {_, tracker} <- fleet,
        %{port: port, os_pid: os_pid} when port != nil and os_pid != nil <- [
          :sys.get_state(tracker)
        ],
        do: os_pid
  end
end

defmodule Kmq.Integration.TrackerHeartbeatTest do
  # Exactly one program for each configured tracker: ended, or silent, it is started again, and a pipeline does not notice.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Test.VM
  alias Kmq.Tracker

  test "a frozen program is killed and started again, its pipeline goes on", %{cluster: cluster} do
    Application.put_env(:kmq, :tracker_beat_ms, 300)
    on_exit(fn -> Application.delete_env(:kmq, :tracker_beat_ms) end)
    topic = queue(cluster, 1)
    consumer = consumer(options(cluster, topic, lease: 1_000))
    publish(cluster, topic, ["a"])
    assert [message] = pull(consumer, 1)
    [{_, tracker, _, _}] = DynamicSupervisor.which_children(Kmq.TrackerSupervisor)

    {:ok, %{os_pid: first, restarts: 0}} =
      eventually(fn -> with {:error, _} <- Tracker.info(tracker), do: nil end)

    VM.signal(first, :stop)

    assert {:ok, %{restarts: 1, os_pid: second}} =
             eventually(
               fn ->
                 with {:ok, %{restarts: n} = info} when n > 0 <- Tracker.info(tracker),
                      do: {:ok, info},
                      else: (_ -> nil)
               end,
               10_000
             )

    assert second != first
    refute VM.os_alive?(first)
    assert [_one] = for({_, "kmq_tracker"} = program <- VM.port_programs(), do: program)
    assert :ok = Kmq.ack(message)
  end

  test "killed twenty times: one program in the end, and none besides", %{cluster: cluster} do
    topic = queue(cluster, 1)
    options = options(cluster, topic)
    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))
    tracker = start_supervised!({Tracker, Keyword.drop(options, [:fetch_config, :group_config])})

    for i <- 1..20 do
      VM.signal(eventually(fn -> :sys.get_state(tracker).os_pid end), :kill)
      eventually(fn -> :sys.get_state(tracker).restarts == i end)
      # without waiting for the pause
      send(tracker, :open)
    end

    eventually(
      fn -> match?({:ok, %{partitions: [%{state: :ready}]}}, Tracker.info(tracker)) end,
      20_000
    )

    assert [{os_pid, _}] = for({_, "kmq_tracker"} = program <- VM.port_programs(), do: program)
    # no descriptor of this VM's went along: frames in and out, stderr, and its own
    fds =
      for fd <- File.ls!("/proc/#{os_pid}/fd"),
          {:ok, to} <- [File.read_link("/proc/#{os_pid}/fd/#{fd}")],
          do: to

    refute Enum.any?(fds, &(&1 =~ "beam" or &1 =~ ".beam"))
    assert length(fds) < 60
  end
end
