defmodule Kmq.Integration.TrackerCheckpointTest do
  # The commit of a tracker moves although old messages are open; a restart reads little; a kill at any step loses and doubles nothing.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Config, Tracker}
  alias Kmq.Test.{Markers, VM}

  # Offsets that no group has committed: open for ever, and never due.
  @far 1_000_000
  @long if System.get_env("KMQ_LONG") == "1", do: 20, else: 1

  setup do
    settings(checkpoint_records: 100, checkpoint_pause_ms: 200, trim_records: 100)
    on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)
  end

  defp settings(settings), do: Application.put_env(:kmq, :tracker_settings, Map.new(settings))

  # A queue of one partition with n messages handed out and not acknowledged, their consumer gone.
  defp scene(cluster, n, extra) do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..n, do: "#{i}"))
    options = options(cluster, topic, [tracker: :external] ++ extra)
    consumer = consumer(options)
    pull(consumer, n)
    markers = Config.default_marker_topic(topic, options[:group_id])
    # killed, so that nothing is given back
    Process.unlink(consumer)
    handle = :sys.get_state(consumer).handle.pid
    Process.exit(consumer, :kill)
    Process.exit(handle, :kill)

    %{
      cluster: cluster,
      topic: topic,
      options: Keyword.drop(options, [:fetch_config, :group_config, :tracker]),
      group: options[:group_id],
      markers: markers,
      n: n
    }
  end

  defp start_tracker(scene, failpoints \\ nil, extra \\ []) do
    if failpoints, do: System.put_env("KMQ_FAILPOINTS", failpoints)
    id = {:tracker, scene.topic}
    options = Keyword.merge(scene.options, extra)
    tracker = start_supervised!(Supervisor.child_spec({Tracker, options}, id: id))
    :sys.get_state(tracker)
    System.delete_env("KMQ_FAILPOINTS")
    tracker
  end

  defp stop_tracker(scene), do: stop_supervised!({:tracker, scene.topic})

  defp part(tracker) do
    {:ok, %{partitions: [part]}} = Tracker.info(tracker)
    part
  end

  defp await(tracker, fun, timeout \\ 20_000) do
    eventually(
      fn ->
        with {:ok, %{partitions: [part]} = info} <- Tracker.info(tracker),
             true <- part.state == :ready and fun.(Map.merge(info, part)) do
          Map.merge(info, part)
        else
          other -> raise ExUnit.AssertionError, message: inspect(other)
        end
      end,
      timeout
    )
  end

  defp pairs(scene, rounds, per_round) do
    Markers.write(scene.cluster.hosts, scene.markers, rounds, fn round ->
      for i <- 1..per_round, offset = @far + round * per_round + i, marker <- [:start, :done] do
        if marker == :start,
          do: Markers.start(0, offset, 600_000),
          else: Markers.done(0, offset)
      end
    end)
  end

  defp referred?(part), do: part.checkpoint_as_of >= 0 and part.committed == part.checkpoint_as_of

  defp copies(scene) do
    scene.cluster
    |> records(scene.topic, 1)
    |> Enum.filter(&List.keymember?(&1.headers, "kmq-deliveries", 0))
    |> Enum.map(& &1.value)
    |> Enum.sort()
  end

  defp all_copied_once(scene, tracker, timeout \\ 20_000) do
    await(tracker, &(&1.open == 0 and &1.committed == &1.position), timeout)
    assert copies(scene) == Enum.sort(for i <- 1..scene.n, do: "#{i}")
  end

  test "a message that stays open does not hold the commit; the next tracker reads the checkpoint and little more",
       %{cluster: cluster} do
    scene = scene(cluster, 3, lease: 60_000, max_processing_time: 60_000)
    tracker = start_tracker(scene)
    pairs(scene, 10, 200)
    before = await(tracker, &(&1.open == 3 and &1.committed > 3_500 and referred?(&1)))
    assert before.lag == 0
    stop_tracker(scene)

    tracker = start_tracker(scene)
    ready = await(tracker, &(&1.open == 3))
    assert ready.read < 400
    # as_of is kept, and referred to, as long as it is needed
    assert referred?(ready)

    # Who looks from outside begins there as well. What somebody else has written as of earlier is of no interest: here all that was open then.
    stale = <<0, 0, 1, 1>> <> <<10, 0, 1, 0, 100>> <> <<1, 0, 0>>
    scope = {scene.topic, scene.group}
    Markers.write(cluster.hosts, scene.markers, [Markers.range(scope, 0, 6, stale)])
    assert %{open: 3, oldest: 0, parked: 0, markers: markers} = inspected(scene)
    assert markers < 400
    for offset <- 0..2, do: Markers.write(cluster.hosts, scene.markers, [Markers.done(0, offset)])
    done = await(tracker, &(&1.open == 0 and &1.committed == &1.position))
    assert done.checkpoint_age_ms == -1
  end

  test "an old commit is written anew although there is little behind it", %{cluster: cluster} do
    settings(checkpoint_records: 1_000_000, checkpoint_pause_ms: 100, checkpoint_age_ms: 1_500)
    scene = scene(cluster, 1, lease: 60_000, max_processing_time: 60_000)
    tracker = start_tracker(scene)
    first = await(tracker, &referred?/1).checkpoint_as_of
    second = await(tracker, &(&1.checkpoint_as_of > first and referred?(&1))).checkpoint_as_of
    assert second > first
  end

  test "killed at every step of writing, committing, trimming and loading: nothing is lost, nothing doubled",
       %{cluster: cluster} do
    points =
      ~w(ck_write=kill ck_write=kill@2 ck_durable=kill ck_commit=kill ck_committed=kill trim=kill trimmed=kill
         ck_write=fail@2*1 ck_durable=fail@1*1 ck_commit=fail@1*1 tracker_commit=fail@3*20)

    scenes =
      for point <- points do
        scene = scene(cluster, 20, lease: 9_000, max_processing_time: 9_000)
        # Enough with deadlines of their own for a checkpoint in parts.
        Markers.write(
          cluster.hosts,
          scene.markers,
          for(i <- 1..7_000, do: Markers.start(0, @far + 2 * i, 600_000 + i))
        )

        {point, scene}
      end

    started =
      for {point, scene} <- scenes,
          do: {point, scene, start_tracker(scene, point, trim_markers: true)}

    for {point, scene, tracker} <- started do
      if String.contains?(point, "kill"),
        # One that starts again while the next scene's tracker is started takes its failpoint, too, and is killed once more.
        do:
          eventually(
            fn -> match?({:ok, %{restarts: n}} when n >= 1, Tracker.info(tracker)) end,
            20_000
          )

      # The rest of the way to a commit with a reference, or past it.
      state = await(tracker, &(&1.open in [7_000, 7_020] and referred?(&1)))
      assert state.trimmed > 0 or state.committed < 7_100
      _ = scene
    end

    for {point, scene, tracker} <- started do
      await(tracker, &(&1.open == 7_000), 30_000)
      assert {point, copies(scene)} == {point, Enum.sort(for i <- 1..20, do: "#{i}")}
    end
  end

  test "killed while it loads, and with a checkpoint that cannot be read whole: the one before, or all of M, gives the same",
       %{cluster: cluster} do
    scene = scene(cluster, 10, lease: 6_000, max_processing_time: 6_000)
    tracker = start_tracker(scene)
    pairs(scene, 3, 200)
    await(tracker, &referred?/1)
    stop_tracker(scene)
    # failing: as if a part were gone; then it reads all there is
    tracker = start_tracker(scene, "ck_load=kill")
    eventually(fn -> match?({:ok, %{restarts: 1}}, Tracker.info(tracker)) end, 20_000)
    await(tracker, fn _ -> true end)
    stop_tracker(scene)
    tracker = start_tracker(scene, "ck_load=fail")
    assert await(tracker, fn _ -> true end).read > 1_000
    all_copied_once(scene, tracker)
  end

  test "without a commit it searches M for the newest whole checkpoint, where the start of M is gone",
       %{cluster: cluster} do
    listen()
    scene = scene(cluster, 5, lease: 60_000, max_processing_time: 60_000)
    tracker = start_tracker(scene, nil, trim_markers: true)
    pairs(scene, 10, 200)
    await(tracker, &(&1.trimmed > 1_000 and referred?(&1)))
    stop_tracker(scene)
    # A group without a commit, as ours is when its offsets have expired.
    settings(
      tracker_group: unique("without-commits"),
      checkpoint_records: 100,
      checkpoint_pause_ms: 200
    )

    tracker = start_tracker(scene)
    ready = await(tracker, &(&1.open == 5))
    assert ready.read < 3_000
    # the tracker's; a consumer tells of its group's very first start by the same name
    refute_receive {[:kmq, :offset_reset], _, %{reason: :marker_gap}}, 100
  end

  test "markers that retention took are told with their range; a position that is trimmed away recovers afresh",
       %{cluster: cluster} do
    listen()
    settings(checkpoint_records: 1_000_000_000)
    scene = scene(cluster, 5, lease: 60_000, max_processing_time: 60_000)
    tracker = start_tracker(scene)
    committed = await(tracker, &(&1.open == 5 and &1.committed >= 0)).committed
    # frozen while what it has not read yet goes away
    {:ok, %{os_pid: os_pid}} = Tracker.info(tracker)
    VM.signal(os_pid, :stop)
    pairs(scene, 5, 200)
    delete_before(scene, 1_500)
    VM.signal(os_pid, :cont)

    assert_receive {[:kmq, :offset_reset], %{from: ^committed, to: 1_500},
                    %{reason: :marker_gap, cause: :retention}},
                   20_000

    ready = await(tracker, &(&1.position > 2_000))
    assert ready.open == 0
  end

  test "frozen while another one commits and deletes what is below, it asks again before it tells of a loss",
       %{cluster: cluster} do
    listen()
    # no checkpoint to be found
    settings(checkpoint_records: 1_000_000_000, trim_records: 100)
    scene = scene(cluster, 5, lease: 60_000, max_processing_time: 60_000)
    for offset <- 0..4, do: Markers.write(cluster.hosts, scene.markers, [Markers.done(0, offset)])
    tracker = start_tracker(scene, nil, trim_markers: true)
    pairs(scene, 10, 200)
    await(tracker, &(&1.trimmed > 1_000 and &1.open == 0 and &1.committed == &1.position))
    stop_tracker(scene)

    tracker = start_tracker(scene, "recover_asked=fail@1*1")
    assert await(tracker, fn _ -> true end).read < 100
    refute_receive {[:kmq, :offset_reset], _, %{reason: :marker_gap}}, 100
    stop_tracker(scene)

    # A commit that is gone for good is told as before.
    tracker = start_tracker(scene, "recover_asked=fail")
    await(tracker, fn _ -> true end)

    assert_receive {[:kmq, :offset_reset], %{from: 0}, %{reason: :marker_gap, cause: :no_commit}},
                   scaled(5_000)
  end

  test "trim_markers keeps M small", %{cluster: cluster} do
    scene = scene(cluster, 1, lease: 60_000, max_processing_time: 60_000)
    tracker = start_tracker(scene, nil, trim_markers: true)
    pairs(scene, 10, 200)
    state = await(tracker, &(&1.position - &1.trimmed < 1_000 and &1.trimmed > 3_000))
    assert state.open == 1
    assert low(scene) == part(tracker).trimmed
  end

  @tag timeout: 300_000
  test "restart with much behind it", %{cluster: cluster} do
    settings([])
    # one open message since many markers ago
    scene = scene(cluster, 1, lease: 3_600_000, max_processing_time: 3_600_000)
    tracker = scene |> start_tracker() |> narrow()
    pairs(scene, 50 * @long, 1_000)
    await(tracker, &(&1.lag == 0 and referred?(&1)), 60_000)
    settle = fn part -> part.position - part.committed < 60_000 end
    await(tracker, settle, 60_000)
    stop_tracker(scene)
    {one, one_memory} = ready(scene, 1)

    # many markers written while it was down
    stop_tracker(scene)
    pairs(scene, 25 * @long, 1_000)
    since = System.monotonic_time(:millisecond)
    assert %{open: 1, oldest: 0} = inspected(scene)
    look = System.monotonic_time(:millisecond) - since
    {many, many_memory} = ready(scene, 1)

    # parked messages
    parked = 10_000 * @long
    due = System.os_time(:millisecond) + 3_600_000

    Markers.write(cluster.hosts, scene.markers, 10, fn round ->
      for i <- 1..div(parked, 10) do
        n = (round - 1) * div(parked, 10) + i
        Markers.park({scene.topic, scene.group}, 0, 10_000_000 + 3 * n, 1, due + n)
      end
    end)

    {:ok, %{os_pid: os_pid}} = Tracker.info(tracker(scene))
    await(tracker(scene), &(&1.open == parked + 1 and &1.lag == 0 and referred?(&1)), 60_000)
    writer = memory(os_pid)
    stop_tracker(scene)
    {parks, parks_memory} = ready(scene, parked + 1)

    IO.puts(:stderr, """
    restart, MiB of memory and of address space: one open since #{100_000 * @long} markers #{one} ms, #{inspect(one_memory)}; \
    #{50_000 * @long} markers while down #{many} ms, #{inspect(many_memory)}, a look at them from outside #{look} ms; \
    #{parked} parked #{parks} ms, #{inspect(parks_memory)}, and #{inspect(writer)} while they came
    """)

    # Two, twenty, ten and five seconds are wanted, and printed above; these limits no slow machine excuses.
    assert one < scaled(10_000)
    assert many < scaled(60_000)
    assert look < scaled(60_000)
    assert parks < scaled(20_000)

    for {used, reserved} <- [one_memory, many_memory, parks_memory, writer],
        do: assert(used < 512 and reserved <= 512)
  end

  defp inspected(scene) do
    {:ok, [partition]} =
      scene.options |> Keyword.take([:hosts, :topics, :group_id]) |> Kmq.Inspect.partitions()

    partition
  end

  defp tracker(scene) do
    {_, pid, _, _} =
      List.keyfind(
        Supervisor.which_children(ExUnit.fetch_test_supervisor() |> elem(1)),
        {:tracker, scene.topic},
        0
      )

    pid
  end

  # From the start of the process until it decides, and the most memory it had until then.
  defp ready(scene, open) do
    since = System.monotonic_time(:millisecond)
    tracker = scene |> start_tracker() |> narrow()
    await(tracker, &(&1.open == open), 60_000)
    ms = System.monotonic_time(:millisecond) - since
    {:ok, %{os_pid: os_pid, restarts: 0}} = Tracker.info(tracker)
    {ms, memory(os_pid)}
  end

  # As under `ulimit -v 524288`, where prlimit is installed.
  defp narrow(tracker) do
    os_pid = eventually(fn -> :sys.get_state(tracker).os_pid end)
    if System.find_executable("prlimit"), do: VM.limit(os_pid, :as, 512 * 1024)
    tracker
  end

  defp memory(os_pid),
    do: {div(VM.kilobytes(os_pid, "VmHWM"), 1024), div(VM.kilobytes(os_pid, "VmPeak"), 1024)}

  defp listen do
    :persistent_term.put(Kmq.Test.Scene, self())
    Kmq.Telemetry.put_backend(Kmq.Test.Scene)
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
  end

  defp admin(scene, group, fun) do
    {:ok, admin} =
      :kmq_nif.admin_open([{"bootstrap.servers", scene.cluster.hosts}, {"group.id", group}])

    try do
      fun.(admin)
    after
      :kmq_nif.admin_close(admin)
    end
  end

  defp low(scene) do
    admin(scene, scene.group, fn admin ->
      {:ok, {low, _}} = :kmq_nif.admin_watermarks(admin, scene.markers, 0, 5_000)
      low
    end)
  end

  defp delete_before(scene, offset) do
    admin(scene, scene.group, fn admin ->
      :ok = :kmq_nif.admin_delete_records(admin, scene.markers, 0, offset, 5_000)
    end)
  end
end
