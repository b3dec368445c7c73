defmodule Kmq.Integration.TrackerTxnTest do
  # redelivery: :transactional. Copies, ENDs and the tracker's own commit are visible together or not at all, whoever is killed, frozen
  # or woken in between; and who else reads the queue is not held up for longer than a session.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Tracker
  alias Kmq.Test.{Markers, MarkerLog, RawLog, VM}

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

  describe "killed in the middle:" do
    for {point, left_open} <- [
          {"txn_begin", false},
          {"txn_offsets", false},
          {"txn_copies", true},
          {"txn_ends", true},
          {"txn_committed", false}
        ] do
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

  defp stopped?(os_pid) do
    case File.read("/proc/#{os_pid}/stat") do
      {:ok, stat} -> stat |> String.split(") ") |> List.last() |> String.starts_with?("T")
      _ -> false
    end
  end
end
