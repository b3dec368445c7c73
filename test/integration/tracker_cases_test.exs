defmodule Kmq.Integration.TrackerCasesTest do
  # What has gone wrong in other queues, through a real Kafka: odd orders of markers, messages and markers that retention took, a queue
  # topic that is made anew, a kill between two commits, a count that is off by one.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog
  import Kmq.Test.LeftBehind

  alias Kmq.{Consumer, Tracker}
  alias Kmq.Test.{Kafka, Markers, VM}

  @count "kmq-redelivery-count"

  setup do: listen()

  # n messages of one partition that are the tracker's alone.
  defp scene(cluster, n, extra \\ []) do
    topic = queue(cluster, 1)
    options = options(cluster, topic, [tracker: :external, backoff: [0]] ++ extra)
    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
    left_behind(cluster, topic, options)
    {topic, options}
  end

  defp copied(cluster, topic), do: Map.new(copies(cluster, topic), &{&1.value, &1.ts})

  # The timestamps of the STARTs of one offset, as the broker has them.
  defp started(cluster, topic, options, offset) do
    key = <<0::32, offset::64>>

    for %{key: ^key, value: <<1, _::64>>, ts: ts} <-
          records(cluster, markers(topic, options), 1),
        do: ts
  end

  test "an END first, two STARTs, two ENDs, a START after an END: one deadline each, the latest",
       %{cluster: cluster} do
    {topic, options} = scene(cluster, 6)
    tracker = tracker(options)
    s = fn offset, ms -> Markers.start(0, offset, ms) end
    e = &Markers.done(0, &1)

    mark(
      cluster,
      topic,
      options,
      [e.(0), s.(0, 2_000), s.(1, 2_000), s.(1, 2_000), s.(2, 2_000), e.(2), e.(2)] ++
        [s.(3, 2_000), e.(3), s.(4, 2_000), e.(4), s.(4, 2_000), s.(5, 1_500)] ++
        for(unknown <- 1_000..20_999, do: e.(unknown))
    )

    # short before the others' deadline
    eventually(fn -> Map.has_key?(copied(cluster, topic), "5") end, 10_000)
    mark(cluster, topic, options, [s.(3, 2_000)])
    eventually(fn -> Map.has_key?(copied(cluster, topic), "3") end, 10_000)
    nothing_open(tracker)
    copies = copies(cluster, topic)
    assert copies |> Enum.map(& &1.value) |> Enum.sort() == ["0", "1", "3", "4", "5"]

    for %{value: value, ts: ts} <- copies, value != "5" do
      last = started(cluster, topic, options, String.to_integer(value)) |> List.last()
      assert ts - last >= 2_000, "#{value} came #{ts - last} ms after its last START"
    end

    assert {:ok, %{partitions: [%{open: 0, malformed: 0}]}} = Tracker.info(tracker)
  end

  test "a message that retention took does not hold up those that are due around it", %{
    cluster: cluster
  } do
    n = 250
    {topic, options} = scene(cluster, n)
    forget(cluster, topic, 0, 1)
    tracker = tracker(options)
    # 50 in a second, and in the middle the one that is gone
    due = fn
      0 -> div(n, 2) * 20
      i -> 1_000 + 20 * i
    end

    mark(cluster, topic, options, for(i <- 0..(n - 1), do: Markers.start(0, i, due.(i))))
    eventually(fn -> assert length(copies(cluster, topic)) == n - 1 end, 20_000)
    nothing_open(tracker)

    late =
      for %{value: value, ts: ts} <- copies(cluster, topic) do
        i = String.to_integer(value)
        [start] = started(cluster, topic, options, i)
        ts - start - due.(i)
      end

    histogram = late |> Enum.frequencies_by(&(div(max(&1, 0), 50) * 50)) |> Enum.sort()
    IO.puts(:stderr, "late by so many ms, in steps of 50: #{inspect(histogram)}")
    assert length(late) == n - 1
    assert Enum.min(late) >= 0
    assert Enum.max(late) < scaled(1_000)
    assert_receive {[:kmq, :gone], %{count: 1}, %{offsets: [0]}}, scaled(5_000)
    refute_received {[:kmq, :gone], _, _}
  end

  test "a marker topic that keeps its records for too short is warned of; what it lost is told with its range",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external, backoff: [0])

    :ok =
      Kmq.Topics.create_topic(markers(topic, options), 1,
        hosts: cluster.hosts,
        config: [
          {"message.timestamp.type", "LogAppendTime"},
          {"retention.ms", "1000"},
          {"segment.ms", "1000"}
        ]
      )

    publish(cluster, topic, for(i <- 0..9, do: "#{i}"))
    warned = capture_log(fn -> left_behind(cluster, topic, options) end)
    assert warned =~ "keeps its records for 1000 ms only, less than 86400000 ms"

    first = tracker(options)

    from =
      eventually(fn ->
        with {:ok, %{partitions: [%{committed: n}]}} when n >= 0 <- Tracker.info(first),
             do: n,
             else: (_ -> nil)
      end)

    mark(cluster, topic, options, for(i <- 0..9, do: Markers.start(0, i, 600_000)))
    eventually(fn -> match?({:ok, %{partitions: [%{open: 10}]}}, Tracker.info(first)) end)
    stop_tracker(first)

    # a minute: Kafka looks for the first time half a minute after its start
    [{0, to}] =
      eventually(
        fn ->
          [{0, low}] = low(cluster, topic, options)
          low > from and [{0, low}]
        end,
        60_000
      )

    second = tracker(options)

    assert_receive {[:kmq, :offset_reset], %{from: told, to: ^to},
                    %{reason: :marker_gap, cause: :retention}},
                   scaled(20_000)

    assert told in 0..to
    assert {:ok, %{partitions: [%{open: 0}]}} = Tracker.info(second)
  end

  @tag timeout: scaled(120_000)
  test "a delay that is longer than the marker topic keeps its records: what waits is written again",
       %{cluster: cluster} do
    Application.put_env(:kmq, :tracker_settings, %{checkpoint_age_ms: 1_000})
    on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external)

    :ok =
      Kmq.Topics.create_topic(markers(topic, options), 1,
        hosts: cluster.hosts,
        config: [
          {"message.timestamp.type", "LogAppendTime"},
          {"retention.ms", "#{scaled(6_000)}"},
          {"segment.ms", "1000"}
        ]
      )

    publish(cluster, topic, [{"late", delay: 3_600_000}])
    consumer = consumer(options)
    first = tracker(options)
    eventually(fn -> match?({:ok, %{partitions: [%{open: 1}]}}, Tracker.info(first)) end, 20_000)
    assert Consumer.pull(consumer, wait: 0) == []
    {:ok, %{partitions: [%{position: parked}]}} = Tracker.info(first)

    eventually(
      fn ->
        [{0, low}] = low(cluster, topic, options)
        low > parked
      end,
      60_000
    )

    stop_tracker(first)
    second = tracker(options)
    assert {:ok, %{partitions: [%{open: 1, next_due_ms: due}]}} = Tracker.info(second)
    assert due in 3_000_000..3_600_000
    refute_receive {[:kmq, :offset_reset], _, %{reason: :marker_gap}}, 100
  end

  defp low(cluster, topic, options) do
    with_admin(cluster, fn admin ->
      {:ok, {low, _}} = :kmq_nif.admin_watermarks(admin, markers(topic, options), 0, 5_000)
      [{0, low}]
    end)
  end

  test "a queue topic made anew: what was open in the one before is dropped and told",
       %{cluster: cluster} do
    {topic, options} = scene(cluster, 100)
    tracker = tracker(options)
    mark(cluster, topic, options, for(i <- 80..99, do: Markers.start(0, i, 3_600_000)))
    eventually(fn -> match?({:ok, %{partitions: [%{open: 20}]}}, Tracker.info(tracker)) end)
    :ok = Kafka.delete_topic(cluster.hosts, topic)

    eventually(fn -> Kmq.Topics.create_topic(topic, 1, hosts: cluster.hosts) == :ok end, 20_000)
    publish(cluster, topic, for(i <- 1..10, do: "new #{i}"))
    left_behind(cluster, topic, options)
    mark(cluster, topic, options, for(i <- 80..99, do: Markers.start(0, i, 0)))
    eventually(fn -> assert {:ok, %{gone: 20}} = Tracker.info(tracker) end, 30_000)
    nothing_open(tracker, 30_000)
    assert {:ok, %{gone: 20, redelivered: 0}} = Tracker.info(tracker)
    assert copies(cluster, topic) == []
    assert_receive {[:kmq, :gone], %{count: _}, _}, scaled(5_000)
  end

  test "killed with one of five open, and again when nothing is: it comes once, and nothing is read again",
       %{cluster: cluster} do
    {topic, options} = scene(cluster, 5)
    tracker = tracker(options)

    mark(
      cluster,
      topic,
      options,
      for(i <- 0..4, do: Markers.start(0, i, 3_000)) ++ for(i <- 1..4, do: Markers.done(0, i))
    )

    eventually(fn ->
      match?({:ok, %{partitions: [%{open: 1, committed: c}]}} when c >= 0, Tracker.info(tracker))
    end)

    kill(tracker, 1)
    eventually(fn -> length(copies(cluster, topic)) == 1 end, 15_000)
    nothing_open(tracker)

    eventually(fn ->
      {:ok, %{partitions: [part]}} = Tracker.info(tracker)
      part.committed == part.position
    end)

    kill(tracker, 2)
    # CLOCKs that it has written itself since
    assert {:ok, %{partitions: [%{read: read}]}} = Tracker.info(tracker)
    assert read <= 2
    assert [%{value: "0"}] = copies(cluster, topic)
  end

  defp kill(tracker, nth) do
    {:ok, %{os_pid: os_pid}} = Tracker.info(tracker)
    VM.signal(os_pid, :kill)

    eventually(
      fn ->
        match?(
          {:ok, %{restarts: ^nth, partitions: [%{state: :ready}]}},
          Tracker.info(tracker)
        )
      end,
      30_000
    )
  end

  test "max_redeliveries 0, 1 and 3: so many deliveries and one more, then one dead letter; unread time is not counted",
       %{cluster: cluster} do
    queues =
      for n <- [0, 1, 3] do
        topic = queue(cluster, 1)

        options =
          options(cluster, topic, max_redeliveries: n, max_processing_time: 500, backoff: [0])

        {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))
        publish(cluster, topic, for(i <- 1..5, do: "#{i}"))
        {n, topic, options}
      end

    # three times their limit unread
    Process.sleep(1_500)

    for {n, topic, options} <- queues do
      consumer = consumer(options)
      # never acknowledged
      came = pull_until(consumer, &(length(&1) >= 5 * (n + 1)), 30_000)
      letters = await_records(cluster, topic <> "__undelivered", 1, 5, 20_000)
      assert Consumer.pull(consumer, max: 10, wait: 300) == []

      for {_, deliveries} <- Enum.group_by(came, & &1.value),
          do: assert(Enum.map(deliveries, & &1.attempt) == Enum.to_list(1..(n + 1)))

      assert Enum.sort(Enum.map(letters, & &1.value)) == for(i <- 1..5, do: "#{i}")
      for letter <- letters, do: assert({@count, <<n + 1>>} in letter.headers)

      assert for(copy <- copies(cluster, topic), do: List.keyfind(copy.headers, @count, 0))
             |> Enum.frequencies() ==
               for(i <- 1..n//1, into: %{}, do: {{@count, <<i>>}, 5})

      Consumer.stop(consumer)
    end
  end

  test "a CLOCK that is not read back, whatever keeps it away: the partition is fetched anew, and goes on",
       %{cluster: cluster} do
    {topic, options} = scene(cluster, 1)
    # ready when this returns
    tracker = tracker(options, env: %{"KMQ_FAILPOINTS" => "clock_read=fail@1*1"})
    assert [_once] = for({:marker_topic, text} <- alarms(), text =~ "fetched anew", do: text)
    mark(cluster, topic, options, [Markers.start(0, 0, 100)])
    eventually(fn -> assert Map.keys(copied(cluster, topic)) == ["0"] end, 5_000)
    nothing_open(tracker)
  end
end
