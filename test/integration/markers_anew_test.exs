defmodule Kmq.Integration.MarkersAnewTest do
  # The marker topic is deleted and made again under a living consumer: what is in work is known in the new one, too.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog
  alias Kmq.{Consumer, Tracker}
  alias Kmq.Test.Scene

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
end
