defmodule Kmq.Integration.TrackerTxnTest do
  # redelivery: :transactional. Copies, ENDs and the tracker's own commit are visible together or not at all, whoever is killed, frozen
  # or woken in between; and who else reads the queue is not held up for longer than a session.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Tracker
  alias Kmq.Test.{Markers, MarkerLog, RawLog}

  @count "kmq-redelivery-count"

  setup do: listen()

  defp options_of(cluster, topic, extra \\ []) do
    options(
      cluster,
      topic,
      [tracker: :external, backoff: [0], redelivery: :transactional, kafka_config: quick()] ++
        extra
    )
  end

  defp quick, do: [tracker: ["session.timeout.ms": 2_000, "heartbeat.interval.ms": 300]]

  # what readers see who are read_committed, as Kmq's consumers are
  defp seen(cluster, topic, partitions \\ 1) do
    for r <- RawLog.read_committed(cluster.hosts, topic, partitions),
        List.keymember?(r.headers, "kmq-deliveries", 0),
        do: r.value
  end

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
end
