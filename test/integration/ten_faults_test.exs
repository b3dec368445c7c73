defmodule Kmq.Integration.TenFaultsTest do
  # What softwaremill/kmq does wrong, one test each, in both marker formats where it applies: Kmq does not.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Test.{BrokerAdmin, Markers, Scene}
  alias Kmq.Tracker

  @count "kmq-redelivery-count"

  setup do: listen()

  # A START as a pipeline in this format writes it.
  defp start(:kmq, _scope, partition, offset, ms), do: Markers.start(partition, offset, ms)

  defp start(:range, scope, partition, offset, ms),
    do: Markers.start_range(scope, partition, offset, 1, ms)

  # n messages on each of `partitions`, that are the tracker's alone.
  defp scene(cluster, format, messages, options \\ []) do
    {partitions, options} = Keyword.pop(options, :partitions, 1)
    {settings, options} = Keyword.pop(options, :topic, [])
    topic = queue(cluster, partitions, "q", settings)

    options =
      options(
        cluster,
        topic,
        [tracker: :external, backoff: [0], marker_format: format] ++ options
      )

    publish(cluster, topic, messages)
    left_behind(cluster, topic, options, partitions)
    {topic, options, {topic, options[:group_id]}}
  end

  for format <- [:range, :kmq] do
    test "1: it commits in the group it reads with, so a restart reads next to nothing (#{format})",
         %{cluster: cluster} do
      {topic, options, scope} = scene(cluster, unquote(format), for(i <- 1..20, do: "#{i}"))
      first = tracker(options)

      mark(
        cluster,
        topic,
        options,
        for(i <- 0..19, do: start(unquote(format), scope, 0, i, 0))
      )

      eventually(fn -> length(copies(cluster, topic)) == 20 end)
      nothing_open(first)
      stop_tracker(first)
      second = tracker(options)
      assert {:ok, %{partitions: [%{read: read}]}} = Tracker.info(second)
      assert read <= 2
      assert length(copies(cluster, topic)) == 20
    end

    test "4: where the original is gone, no neighbour is redelivered in its place, nor ended (#{format})",
         %{cluster: cluster} do
      {topic, options, scope} = scene(cluster, unquote(format), for(i <- 0..9, do: "#{i}"))
      forget(cluster, topic, 0, 5)
      tracker = tracker(options)

      # of the neighbours only 8 is due
      mark(
        cluster,
        topic,
        options,
        for(i <- [0, 2, 4, 8], do: start(unquote(format), scope, 0, i, 0)) ++
          [start(unquote(format), scope, 0, 5, 3_600_000)]
      )

      eventually(fn -> assert {:ok, %{gone: 3}} = Tracker.info(tracker) end)
      eventually(fn -> assert ["8"] = Enum.map(copies(cluster, topic), & &1.value) end)
      eventually(fn -> match?({:ok, %{partitions: [%{open: 1}]}}, Tracker.info(tracker)) end)
      assert [%{value: "8"}] = copies(cluster, topic)
    end

    test "5: malformed markers are counted and passed over; the tracker goes on (#{format})", %{
      cluster: cluster
    } do
      {topic, options, scope} = scene(cluster, unquote(format), ["0", "1"])
      tracker = tracker(options)
      key = <<0::32, 0::64>>
      magic = <<0x00, 0x4B, 1>>
      crc = :erlang.crc32([topic, 0, options[:group_id]])

      odd =
        for {key, value} <- [
              {key, nil},
              {key, ""},
              {key, <<1>>},
              {key, <<1, 0, 0, 0>>},
              {nil, <<0>>},
              {"", <<0>>},
              {"short", <<1, 0::64>>},
              {<<-1::32, -1::64>>, <<1, -1::64>>},
              {<<0::32, -1::64>>, <<magic::binary, 1, crc::32>>},
              {<<0::32, -1::64>>, <<magic::binary, 1, crc::32, 255, 255, 255, 255, 255>>},
              {<<0::32, -1::64>>, <<magic::binary, 4, crc::32, 0, 0, 255, 255, 255, 255, 15>>}
            ],
            do: {value, key: key, partition: 0}

      mark(cluster, topic, options, odd ++ [start(unquote(format), scope, 0, 1, 0)] ++ odd)
      eventually(fn -> assert ["1"] = Enum.map(copies(cluster, topic), & &1.value) end)
      nothing_open(tracker)
      assert {:ok, %{restarts: 0, partitions: [%{malformed: n, lag: 0}]}} = Tracker.info(tracker)
      assert n >= 10
      assert_receive {[:kmq, :malformed], %{count: _}, %{kind: :malformed}}, scaled(5_000)
    end

    test "6: copies and dead letters keep key, headers, partition, and when it was published (#{format})",
         %{cluster: cluster} do
      headers = [{"a", "1"}, {"a", "2"}, {"nil", nil}, {"empty", ""}]
      ts = System.os_time(:millisecond) - 3_600_000
      count = {@count, <<3>>}

      {topic, options, scope} =
        scene(
          cluster,
          unquote(format),
          [
            {"again", key: "k", partition: 1, headers: headers, timestamp: ts},
            {"dead", key: "d", partition: 1, headers: headers ++ [count], timestamp: ts}
          ],
          partitions: 2
        )

      tracker(options)

      mark(
        cluster,
        topic,
        options,
        for(i <- 0..1, do: start(unquote(format), scope, 1, i, 0))
      )

      [dead] = await_records(cluster, topic <> "__undelivered", 2, 1)

      [copy] =
        eventually(fn ->
          with [_] = one <- copies(cluster, topic, 2), do: one, else: (_ -> nil)
        end)

      for {record, key, n, offset} <- [{copy, "k", 1, 0}, {dead, "d", 4, 1}] do
        assert {record.key, record.partition} == {key, 1}
        assert Enum.take(record.headers, 4) == headers
        assert {@count, <<n>>} in record.headers
        assert {"kmq-origin", "#{topic}/1/#{offset}/#{ts}"} in record.headers
        assert {"kmq-cause", "crash"} in record.headers
      end
    end

    test "7: one that fails has no other sent again, and is not forgotten itself (#{format})", %{
      cluster: cluster
    } do
      small = [config: [{"max.message.bytes", "50000"}]]
      large = String.duplicate("l", 49_850)
      values = for(i <- 0..48, do: "#{i}")

      topic = queue(cluster, 1, "q", small)

      options =
        options(cluster, topic, tracker: :external, backoff: [0], marker_format: unquote(format))

      # by itself: a batch that is too large is refused as a whole
      publish(cluster, topic, [large])
      publish(cluster, topic, values)
      left_behind(cluster, topic, options)
      scope = {topic, options[:group_id]}
      tracker = tracker(options)
      mark(cluster, topic, options, for(i <- 0..49, do: start(unquote(format), scope, 0, i, 0)))
      eventually(fn -> assert length(copies(cluster, topic)) == 49 end, 10_000)
      eventually(fn -> match?({:ok, %{partitions: [%{open: 1}]}}, Tracker.info(tracker)) end)
      # after its next try the others are still there once, and when it can, it comes
      BrokerAdmin.set_config(cluster.hosts, topic, [{"max.message.bytes", 100_000}])
      nothing_open(tracker)

      assert copies(cluster, topic) |> Enum.map(& &1.value) |> Enum.sort() ==
               Enum.sort([large | values])
    end

    test "8: with nothing open its commit is at the end (#{format})", %{cluster: cluster} do
      {topic, options, _scope} =
        scene(cluster, unquote(format), for(i <- 0..9, do: {"#{i}", partition: rem(i, 2)}),
          partitions: 2
        )

      tracker = tracker(options)
      nothing_open(tracker)
      group = Tracker.tracker_group(options[:group_id])
      markers = markers(topic, options)

      eventually(fn ->
        assert committed(cluster, group, markers, 2) == high(cluster, markers, 2)
        true
      end)
    end

    test "9: two groups on one marker topic do not settle each other's messages (#{format})", %{
      cluster: cluster
    } do
      topic = queue(cluster, 1)
      shared = unique("markers")

      [one, two] =
        for _ <- 1..2,
            do:
              options(cluster, topic,
                tracker: :external,
                backoff: [0],
                marker_format: unquote(format),
                marker_topic: shared,
                lease: 3_600_000,
                max_processing_time: 3_600_000
              )

      publish(cluster, topic, ["0", "1", "2"])
      first = consumer(one)
      held = pull(first, 3)
      second = consumer(two)
      second |> pull(3) |> Enum.each(&(:ok = Kmq.ack(&1, sync: true)))

      # the other group's ENDs are in the topic, and these are still open
      tracker = tracker(one)
      assert {:ok, %{partitions: [%{open: 3}]}} = Tracker.info(tracker)

      # its own count
      Enum.each(held, &(:ok = Kmq.ack(&1, sync: true)))
      nothing_open(tracker)
      assert copies(cluster, topic) == []
    end
  end

  for format <- [:range, :kmq] do
    test "2: a second tracker that joins loses nothing that is in flight (#{format})", %{
      cluster: cluster
    } do
      n = 400

      {topic, options, scope} =
        scene(cluster, unquote(format), for(i <- 0..(n - 1), do: {"#{i}", partition: rem(i, 8)}),
          partitions: 8
        )

      tracker(options)
      # due all the time, for as long as the other one needs to join
      mark(
        cluster,
        topic,
        options,
        for(i <- 0..(n - 1), do: start(unquote(format), scope, rem(i, 8), div(i, 8), 300 + i * 8))
      )

      other =
        start_supervised!(
          {Tracker, Keyword.drop(options, [:fetch_config, :group_config, :tracker])},
          id: :other
        )

      eventually(
        fn ->
          assert copies(cluster, topic, 8) |> Enum.uniq_by(& &1.value) |> length() == n
          true
        end,
        20_000
      )

      {:ok, %{partitions: parts}} = Tracker.info(other)
      assert parts != []
      # nobody was killed: what was in flight was finished before it was given up
      assert length(copies(cluster, topic, 8)) == n
    end

    test "3: a failed START is written again, and nothing is committed past it (#{format})" do
      scene =
        Scene.new(calm: true, start_ahead: 50, partitions: 1, marker_format: unquote(format))

      n = 300
      Scene.publish(scene, 0..(n - 1))
      vm = Scene.vm(scene, failpoints: "start_report=fail@2*5")
      :ok = Scene.work(scene, vm)
      checker = Scene.await_all(scene, n)
      assert {checker.twice, checker.raised, Scene.dead(scene)} == {0, 0, 0}
    end
  end

  test "9: two queues cannot have one marker topic" do
    assert_raise ArgumentError, ~r/cannot share "m", give a map/, fn ->
      Kmq.Config.new!(
        [hosts: "h:1", topics: ["a", "b"], group_id: "g", marker_topic: "m"],
        :consumer
      )
    end
  end

  # the same in :kmq format: tracker_time_test.exs
  test "10: one client's fast clock expires nobody", %{cluster: cluster} do
    topic = queue(cluster, 1)

    options =
      options(cluster, topic,
        tracker: :external,
        backoff: [0],
        marker_format: :range,
        allow_create_time: true
      )

    long = "99999999999"

    :ok =
      Kmq.Topics.create_topic(markers(topic, options), 1,
        hosts: cluster.hosts,
        config: [
          {"message.timestamp.type", "CreateTime"},
          {"message.timestamp.before.max.ms", long},
          {"message.timestamp.after.max.ms", long}
        ]
      )

    publish(cluster, topic, ["0", "1", "2"])
    left_behind(cluster, topic, options)
    scope = {topic, options[:group_id]}
    tracker = tracker(options)

    mark(
      cluster,
      topic,
      options,
      for(i <- 0..1, do: start(:range, scope, 0, i, 60_000))
    )

    # an hour ahead, and one behind
    for hours <- [1, -1] do
      {value, at} = start(:range, scope, 0, 2, 7_200_000)
      ts = System.os_time(:millisecond) + hours * 3_600_000
      mark(cluster, topic, options, [{value, at ++ [timestamp: ts]}])
    end

    # something of now, and it is not late for the clock that ran ahead
    mark(cluster, topic, options, [start(:range, scope, 0, 2, 500)])
    eventually(fn -> assert ["2"] = Enum.map(copies(cluster, topic), & &1.value) end, 30_000)

    eventually(fn ->
      match?({:ok, %{partitions: [%{open: 2, due: 0}]}}, Tracker.info(tracker))
    end)

    assert [%{value: "2"}] = copies(cluster, topic)
  end
end
