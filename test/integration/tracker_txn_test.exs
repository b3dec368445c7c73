defmodule Kmq.Integration.TrackerTxnTest do
  # redelivery: :transactional. Copies, ENDs and the tracker's own commit are visible together or not at all, whoever is killed, frozen
  # or woken in between; and who else reads the queue is not held up for longer than a session.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Tracker
  alias Kmq.Test.{BrokerAdmin, Kafka, Markers, MarkerLog, RawLog, VM}

  @count "kmq-redelivery-count"

  setup do: listen()

  # It would be that long until a broker frees what a dead tracker has left open: within a test nobody but the successor does.
  setup do
    Application.put_env(:kmq, :tracker_settings, %{transaction_timeout_ms: 300_000})
    on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)
  end

  defp options_of(cluster, topic, extra) do
    options(
      cluster,
      topic,
      [tracker: :external, backoff: [0], redelivery: :transactional, kafka_config: quick()] ++
        extra
    )
  end

  defp quick, do: [tracker: ["session.timeout.ms": 2_000, "heartbeat.interval.ms": 300]]

  # what readers see who are read_committed, as Kmq's consumers are
  defp seen(cluster, topic, partitions) do
    for r <- visible(cluster, topic, partitions),
        List.keymember?(r.headers, "kmq-deliveries", 0),
        do: r.value
  end

  defp visible(cluster, topic, partitions),
    do: RawLog.read_committed(cluster.hosts, topic, partitions)

  defp once?(cluster, topic, range, partitions \\ 1),
    do: Enum.sort(seen(cluster, topic, partitions)) == Enum.sort(numbers(range))

  # n messages below the group's commit, in one partition
  defp left(cluster, n, extra \\ []) do
    topic = queue(cluster, 1)
    options = options_of(cluster, topic, extra)
    publish(cluster, topic, numbers(0..(n - 1)))
    left_behind(cluster, [topic], options)
    {topic, options}
  end

  defp due(cluster, topic, options, range),
    do: mark(cluster, topic, options, for(i <- range, do: Markers.start(0, i, 0)))

  defp failpoints(text), do: [env: [{"KMQ_FAILPOINTS", text}]]
  defp now, do: System.monotonic_time(:millisecond)

  defp handle(_consumer, n, got) when length(got) >= n, do: got

  defp handle(consumer, n, got) do
    messages = pull(consumer, 1)
    Enum.each(messages, &(:ok = Kmq.ack(&1)))
    handle(consumer, n, got ++ messages)
  end

  defp numbers(range), do: Enum.map(range, &Integer.to_string/1)

  for format <- [:range, :kmq] do
    test "copies, dead letters, ENDs and the commit (#{format})", %{cluster: cluster} do
      topic = queue(cluster, 2)
      options = options_of(cluster, topic, marker_format: unquote(format))
      n = 300

      publish(
        cluster,
        topic,
        for(
          i <- 0..(n - 1),
          do: {"#{i}", partition: rem(i, 2), key: "k#{i}", headers: [{"h", "#{i}"}]}
        ) ++
          [{"poison", partition: 0, headers: [{@count, <<3>>}]}]
      )

      left_behind(cluster, [topic], options, 2)
      t = tracker(options)
      half = div(n, 2)

      mark(
        cluster,
        topic,
        options,
        for(p <- 0..1, i <- 0..(half - 1), do: Markers.start(p, i, 0))
      )

      mark(cluster, topic, options, [Markers.start(0, half, 0)])
      eventually(fn -> length(seen(cluster, topic, 2)) >= n end, 15_000)
      nothing_open(t)

      assert Enum.sort(seen(cluster, topic, 2)) == Enum.sort(numbers(0..(n - 1)))

      for r <- copies(cluster, topic, 2) do
        assert r.key == "k" <> r.value
        assert {"h", r.value} in r.headers
        assert {@count, <<1>>} in r.headers
      end

      assert [%{value: "poison"}] =
               RawLog.read_committed(cluster.hosts, topic <> "__undelivered", 2)

      ends = MarkerLog.ends(cluster.hosts, markers(topic, options), 2)

      for {place, ends} <- ends,
          do: assert(length(List.delete_at(ends, 0)) == 1, inspect({place, ends}))

      # committed to the end: nothing is open, and a successor reads nothing again
      {:ok, %{partitions: parts}} = Tracker.info(t)

      eventually(fn ->
        {:ok, %{partitions: parts}} = Tracker.info(t)
        assert Enum.all?(parts, &(&1.committed == &1.position and &1.lag == 0))
        true
      end)

      group = Tracker.tracker_group(options[:group_id])
      by = Map.new(parts, &{&1.partition, &1})

      for {p, offset} <- committed(cluster, group, markers(topic, options), 2),
          do: assert(offset >= by[p].committed)

      # few of what has crashed are out at once
      consumer = consumer(options)
      got = handle(consumer, 40, [])
      assert Enum.all?(got, &(&1.attempt == 2))
      assert alarms() == []
    end
  end

  test "more partitions at work than there are producers: they take turns", %{cluster: cluster} do
    n = 40
    topic = queue(cluster, n)
    options = options_of(cluster, topic, [])
    publish(cluster, topic, for(p <- 0..(n - 1), i <- 0..4, do: {"#{p}/#{i}", partition: p}))
    left_behind(cluster, [topic], options, n)
    t = tracker(options)
    mark(cluster, topic, options, for(p <- 0..(n - 1), i <- 0..4, do: Markers.start(p, i, 0)))
    expected = for p <- 0..(n - 1), i <- 0..4, do: "#{p}/#{i}"
    eventually(fn -> length(seen(cluster, topic, n)) >= length(expected) end, 60_000)
    nothing_open(t, 60_000)
    assert Enum.sort(seen(cluster, topic, n)) == Enum.sort(expected)
    assert alarms() == []
  end

  describe "killed in the middle:" do
    for {point, left_open} <- [
          {"txn_begin", false},
          {"txn_offsets", false},
          {"txn_copies", true},
          {"txn_ends", true},
          {"txn_committed", false}
        ] do
      if point in ["txn_begin", "txn_copies", "txn_committed"], do: @tag(:slow)

      test "#{point}: none lost, none twice, and other readers of the queue go on", %{
        cluster: cluster
      } do
        n = 200
        {topic, options} = left(cluster, n)
        t = tracker(options, failpoints("#{unquote(point)}=kill"))
        due(cluster, topic, options, 0..(n - 1))
        eventually(fn -> :sys.get_state(t).restarts == 1 end, 20_000)
        killed = now()

        publish(cluster, topic, ["fresh"])
        fresh? = fn -> Enum.any?(visible(cluster, topic, 1), &(&1.value == "fresh")) end
        if unquote(left_open), do: refute(fresh?.())
        eventually(fresh?, 20_000)

        if unquote(left_open),
          do:
            IO.puts(
              :stderr,
              "killed at #{unquote(point)}: readers go on after #{now() - killed} ms, session 2000 ms"
            )

        eventually(fn -> match?({:ok, %{partitions: [_]}}, Tracker.info(t)) end, 20_000)
        ready(t)
        nothing_open(t)
        assert once?(cluster, topic, 0..(n - 1))
      end
    end
  end

  describe "frozen until another has taken over, then woken:" do
    # The last one: aborted once, then frozen before its producer is made anew. Woken, it fences its successor; but it is refused as
    # no member of the group's generation.
    for point <- [
          "txn_begin=stop",
          "txn_offsets=stop",
          "txn_copies=stop",
          "txn_ends=stop",
          "txn_committed=stop",
          "txn_copies=fail@1*1,txn_open=stop@2"
        ] do
      if point in ["txn_begin=stop", "txn_copies=stop", "txn_committed=stop"], do: @tag(:slow)

      test "#{point}: nothing twice", %{cluster: cluster} do
        n = 200
        {topic, options} = left(cluster, n + 20)
        zombie = tracker(options, failpoints(unquote(point)))
        {:ok, %{os_pid: os_pid}} = Tracker.info(zombie)
        on_exit(fn -> VM.signal(os_pid, :cont) end)
        due(cluster, topic, options, 0..(n - 1))
        eventually(fn -> stopped?(os_pid) end, 10_000)

        other = tracker(options)
        nothing_open(other)
        assert once?(cluster, topic, 0..(n - 1))
        VM.signal(os_pid, :cont)

        # it is awake, and whichever of the two has the partition then does what comes next
        eventually(fn -> match?({:ok, %{state: :running}}, Tracker.info(zombie)) end, 10_000)
        due(cluster, topic, options, n..(n + 19))
        eventually(fn -> once?(cluster, topic, 0..(n + 19)) end, 20_000)
      end
    end
  end

  @tag timeout: 120_000
  test "of a hundred due at once one is gone, one too large, and one for a dead letter topic that is stricter or denied: the others once" do
    kafka = Kafka.start!(config: BrokerAdmin.acl_config())
    cluster = %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}

    topics =
      for t <- [:stricter, :denied],
          into: %{},
          do: {t, queue(cluster, 1, "#{t}", config: [{"max.message.bytes", "100000"}])}

    all = Map.values(topics)
    dead = fn trouble -> topics[trouble] <> "__undelivered" end
    options = options_of(cluster, all, [])

    for topic <- all do
      poison = {String.duplicate("p", 5_000), headers: [{@count, <<3>>}]}
      publish(cluster, topic, numbers(0..39))
      publish(cluster, topic, [String.duplicate("l", 99_850)])
      publish(cluster, topic, for(i <- 41..99, do: if(i == 70, do: poison, else: "#{i}")))
    end

    left_behind(cluster, all, options)
    for topic <- all, do: forget(cluster, topic, 0, 1)
    BrokerAdmin.set_config(cluster.hosts, dead.(:stricter), [{"max.message.bytes", 1_000}])
    BrokerAdmin.deny_write(cluster.hosts, dead.(:denied))
    t = tracker(options)
    for topic <- all, do: due(cluster, topic, options, 0..99)
    began = now()
    good = Enum.to_list(1..99) -- [40, 70]

    for topic <- all,
        do:
          eventually(
            fn -> Enum.sort(seen(cluster, topic, 1)) == Enum.sort(numbers(good)) end,
            20_000
          )

    IO.puts(:stderr, "97 of 100 in each of two queues after #{now() - began} ms")

    # each of the others waits with an alarm, and keeps nobody: what comes next is not held up by it
    eventually(
      fn ->
        said = alarms()
        text = fn reason, text -> Enum.any?(said, fn {r, m} -> r == reason and m =~ text end) end
        assert text.(:dead_letter_topic, "TOPIC_AUTHORIZATION_FAILED")
        assert text.(:too_large, topics[:stricter] <> "/0/70")
        for topic <- all, do: assert(text.(:too_large, topic <> "/0/40"))
        true
      end,
      10_000
    )

    {:ok, info} = Tracker.info(t)
    assert Enum.map(info.partitions, & &1.open) == [2, 2]

    # and each recovers by itself
    for topic <- all,
        do: BrokerAdmin.set_config(cluster.hosts, topic, [{"max.message.bytes", 200_000}])

    BrokerAdmin.set_config(cluster.hosts, dead.(:stricter), [{"max.message.bytes", 100_000}])
    BrokerAdmin.allow_write(cluster.hosts, dead.(:denied))
    nothing_open(t, 30_000)

    for {trouble, topic} <- topics do
      values = seen(cluster, topic, 1)
      assert length(values) == 98
      assert Enum.uniq(values) == values
      assert [letter] = visible(cluster, dead.(trouble), 1)
      assert letter.value == String.duplicate("p", 5_000)
    end

    # what is open in the node goes before it
    for {id, _, _, _} <- Supervisor.which_children(elem(ExUnit.fetch_test_supervisor(), 1)),
        do: stop_supervised!(id)

    Kafka.stop(kafka)
  end

  # KMQ_SEED repeats a run as far as chance is ours.
  test "three trackers over eight partitions, killed, frozen and woken at random: each exactly once",
       %{
         cluster: cluster
       } do
    long = System.get_env("KMQ_LONG") == "1"
    {partitions, steps} = {8, if(long, do: 1_200, else: 50)}
    size = 40
    n = steps * size
    topic = queue(cluster, partitions)
    options = options_of(cluster, topic, [])
    seed = Kmq.Test.Scene.seed()
    IO.puts(:stderr, "seed #{seed}")
    :rand.seed(:exsss, {seed, 3, 3})
    publish(cluster, topic, for(i <- 0..(n - 1), do: {"#{i}", partition: rem(i, partitions)}))
    left_behind(cluster, [topic], options, partitions)
    [_ | _] = fleet = for _ <- 1..3, do: start_tracker(options)

    frozen =
      Enum.reduce(0..(steps - 1), %{}, fn step, frozen ->
        of_step = (step * size)..((step + 1) * size - 1)

        mark(
          cluster,
          topic,
          options,
          for(i <- of_step, do: Markers.start(rem(i, partitions), div(i, partitions), 0))
        )

        Process.sleep(100)
        {awake, frozen} = Enum.split_with(frozen, fn {_, at} -> at <= now() end)
        for {os_pid, _} <- awake, do: VM.signal(os_pid, :cont)
        if rem(step, 8) == 3, do: harm(fleet, Map.new(frozen)), else: Map.new(frozen)
      end)

    for {os_pid, _} <- frozen, do: VM.signal(os_pid, :cont)
    eventually(fn -> once?(cluster, topic, 0..(n - 1), partitions) end, 60_000)

    # nothing comes late: who was frozen is served, too
    eventually(
      fn ->
        parts = for t <- fleet, {:ok, info} <- [Tracker.info(t)], p <- info.partitions, do: p
        assert Enum.sort(Enum.map(parts, & &1.partition)) == Enum.to_list(0..(partitions - 1))
        assert Enum.all?(parts, &(&1.state == :ready and &1.open == 0))
        true
      end,
      30_000
    )

    assert once?(cluster, topic, 0..(n - 1), partitions)
  end

  defp start_tracker(options) do
    options = Keyword.drop(options, [:fetch_config, :group_config, :tracker])
    start_supervised!(Supervisor.child_spec({Tracker, options}, id: {:tracker, make_ref()}))
  end

  defp harm(fleet, frozen) do
    case :sys.get_state(Enum.random(fleet)) do
      %{port: port, os_pid: os_pid} when port != nil and os_pid != nil ->
        if :rand.uniform(2) == 1 or Map.has_key?(frozen, os_pid) do
          VM.signal(os_pid, :kill)
          Map.delete(frozen, os_pid)
        else
          on_exit(fn -> VM.signal(os_pid, :cont) end)
          VM.signal(os_pid, :stop)
          # shorter than a session of 2 s, or longer
          Map.put(frozen, os_pid, now() + 500 + :rand.uniform(4_000))
        end

      _ ->
        frozen
    end
  end

  defp stopped?(os_pid) do
    case File.read("/proc/#{os_pid}/stat") do
      {:ok, stat} -> stat |> String.split(") ") |> List.last() |> String.starts_with?("T")
      _ -> false
    end
  end
end
