defmodule Kmq.Integration.MarkersAnewTest do
  # The marker topic is deleted and made again under a living consumer: what is in work is known in the new one, too.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog
  import Kmq.Test.LeftBehind

  alias Kmq.{Consumer, Tracker}
  alias Kmq.Test.{Markers, Scene, VM}

  defp create(cluster, markers) do
    config = [{"message.timestamp.type", "LogAppendTime"}]

    eventually(
      fn ->
        assert Kmq.Topics.create_topic(markers, 1, hosts: cluster.hosts, config: config) == :ok
      end,
      20_000
    )
  end

  test "what is in work when its marker topic is made anew comes again, and the rest is acknowledged",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..10, do: "m#{i}"))
    options = options(cluster, topic, lease: 1_500, max_processing_time: 12_000, backoff: [0])
    markers = "#{topic}__#{options[:group_id]}__markers"
    consumer = consumer(options)
    # The old topic has some length: by offsets that go back a new one is known.
    publish(cluster, topic, for(i <- 1..30, do: "before #{i}"))
    {before, [m1, m2 | held]} = consumer |> pull(40) |> Enum.split_with(&(&1.value =~ "before"))
    for message <- before, do: assert(Kmq.ack(message, sync: true) == :ok)
    assert Kmq.ack([m1, m2], sync: true) == :ok

    log =
      capture_log(fn ->
        :ok = Kmq.Test.Kafka.delete_topic(cluster.hosts, markers)

        create(cluster, markers)

        # Nobody acknowledges them: they time out, and only a START in the new topic lets them come again.
        again = pull(consumer, 8, 60_000)
        assert Enum.sort(Enum.map(again, & &1.value)) == Enum.sort(Enum.map(held, & &1.value))
        assert Kmq.ack(again, sync: true) == :ok
      end)

    assert log =~ "the marker topic was made anew"
    assert Consumer.pull(consumer, max: 10, wait: 500) == []
    assert Consumer.stop(consumer) == :ok
  end

  # Lost: a position beyond the end. Vanished: the group gives the partition back in between, and the new one has no commit.
  for vanished <- [false, true] do
    test "the tracker tells what it knew to be open in the one before (noticed in between: #{vanished})",
         %{cluster: cluster} do
      Scene.listen()
      topic = queue(cluster, 1)
      publish(cluster, topic, for(i <- 1..10, do: "m#{i}"))

      options =
        options(cluster, topic,
          lease: 60_000,
          max_processing_time: 600_000,
          kafka_config: [common: ["topic.metadata.refresh.interval.ms": 500]]
        )

      markers = "#{topic}__#{options[:group_id]}__markers"
      consumer = consumer(options ++ [tracker: :external])
      alone = Keyword.drop(options, [:fetch_config, :group_config, :drain_timeout])
      tracker = start_supervised!({Tracker, alone})
      [done | held] = pull(consumer, 10)
      assert Kmq.ack(done, sync: true) == :ok

      eventually(
        fn ->
          match?({:ok, %{partitions: [%{open: 9}]}}, Tracker.info(tracker))
        end,
        20_000
      )

      :ok = Kmq.Test.Kafka.delete_topic(cluster.hosts, markers)

      if unquote(vanished),
        do: eventually(fn -> match?({:ok, %{partitions: []}}, Tracker.info(tracker)) end, 30_000)

      create(cluster, markers)

      assert_receive {[:kmq, :offset_reset], %{from: from, to: 0, open: 9},
                      %{partition: 0, reason: :marker_gap, cause: :recreated}},
                     scaled(30_000)

      assert from > 0
      assert length(held) == 9
      assert Consumer.stop(consumer) == :ok
    end
  end

  # To whoever goes on reading by offsets nothing has happened.
  describe "made anew and grown past where the tracker was" do
    setup %{cluster: cluster} do
      listen()
      topic = queue(cluster, 1)
      options = options(cluster, topic, tracker: :external, backoff: [0])
      publish(cluster, topic, for(i <- 0..9, do: "#{i}"))
      left_behind(cluster, topic, options)
      on_exit(fn -> Application.delete_env(:kmq, :tracker_settings) end)
      %{topic: topic, options: options, markers: markers(topic, options)}
    end

    # Four are open, or have been; then the tracker stands still until the topic is another one that is longer.
    defp anew(context, tracker, open) do
      %{cluster: cluster, topic: topic, options: options} = context
      mark(cluster, topic, options, for(i <- 0..3, do: Markers.start(0, i, 600_000)))

      if open == 0,
        do: mark(cluster, topic, options, for(i <- 0..3, do: Markers.done(0, i)))

      [{0, high}] = high(cluster, context.markers, 1)

      {position, committed} =
        eventually(fn ->
          with {:ok, %{partitions: [%{open: ^open, position: p, committed: c}]}}
               when p >= high and c >= 0 and (open > 0 or c == p) <- Tracker.info(tracker),
               do: {p, c},
               else: (_ -> nil)
        end)

      {:ok, %{os_pid: os_pid}} = Tracker.info(tracker)
      VM.signal(os_pid, :stop)
      :ok = Kmq.Test.Kafka.delete_topic(cluster.hosts, context.markers)
      create(cluster, context.markers)
      # what lies below the position is due at once, the rest is somebody else's
      new = for(i <- 5..9, do: Markers.start(0, i, 0))
      rest = for(i <- 1..(position + 20), do: Markers.done(0, 1_000 + i))
      mark(cluster, topic, options, new ++ rest)
      VM.signal(os_pid, :cont)
      {committed, os_pid}
    end

    defp all_of_the_new_one(%{cluster: cluster, topic: topic}, tracker) do
      eventually(fn -> assert length(copies(cluster, topic)) == 5 end, 30_000)
      nothing_open(tracker, 30_000)
      values = copies(cluster, topic) |> Enum.map(& &1.value) |> Enum.sort()
      assert values == for(i <- 5..9, do: "#{i}")
    end

    test "a tracker that goes on reading finds out", context do
      Application.put_env(:kmq, :tracker_settings, %{witness_ms: 500})
      tracker = tracker(context.options)
      anew(context, tracker, 4)

      assert_receive {[:kmq, :offset_reset], %{to: 0, open: 4},
                      %{partition: 0, reason: :marker_gap, cause: :recreated}},
                     scaled(30_000)

      all_of_the_new_one(context, tracker)
      refute_received {[:kmq, :offset_reset], _, %{reason: :marker_gap}}
    end

    test "one that begins at a commit which was made too late finds out", context do
      Application.put_env(:kmq, :tracker_settings, %{witness_ms: 600_000})
      tracker = tracker(context.options)
      {before, os_pid} = anew(context, tracker, 0)
      group = Tracker.tracker_group(context.options[:group_id])

      eventually(
        fn ->
          [{0, offset}] = committed(context.cluster, group, context.markers, 1)
          offset > before
        end,
        20_000
      )

      VM.signal(os_pid, :kill)

      assert_receive {[:kmq, :offset_reset], %{from: from, to: 0},
                      %{partition: 0, reason: :marker_gap, cause: :recreated}},
                     scaled(30_000)

      assert from > before
      all_of_the_new_one(context, tracker)
    end
  end
end
