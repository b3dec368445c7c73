defmodule Kmq.Integration.ExpiredCommitsTest do
  # A group that was away for so long that the broker has forgotten its commits. Where it begins is said; what is ended is not redelivered by a
  # tracker that reads its markers from the beginning.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Kmq.Test.{ClusterCase, Eventually}

  alias Kmq.{Consumer, Topics, Tracker}
  alias Kmq.Test.{BrokerAdmin, Checker, Kafka, Scene}

  @moduletag :integration
  @moduletag :capture_log

  @partitions 2

  setup do
    on_exit(&nothing_left/0)
    Scene.listen()
  end

  describe "the commits are gone, as the broker takes them when they expire" do
    setup do: %{cluster: %{kind: :kafka, hosts: Kafka.bootstrap()}}

    for policy <- [:earliest, :latest] do
      test "offset_reset_policy: #{policy}", %{cluster: cluster} do
        away(cluster, unquote(policy), fn groups ->
          for group <- groups, do: :ok = BrokerAdmin.delete_group(cluster.hosts, group)
        end)
      end
    end
  end

  describe "offsets.retention.minutes=1" do
    @describetag :slow
    @describetag timeout: scaled(300_000)

    setup do
      config = %{
        "offsets.retention.minutes" => 1,
        "offsets.retention.check.interval.ms" => 1_000
      }

      kafka = start_supervised!(%{id: :kafka, start: {Kafka, :start, [[config: config]]}})
      %{cluster: %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}}
    end

    test "a group that was stopped, and one that only had nothing to do", %{cluster: cluster} do
      topic = queue(cluster, @partitions)
      options = options(cluster, topic, offset_reset_policy: :latest)
      idle = start_supervised!({Consumer, options}, id: :idle)
      eventually(fn -> assert %{assigned: @partitions} = Kmq.info(idle).total end, 20_000)
      :ok = settle(cluster, idle, topic, options[:group_id], 20)
      commits = committed(cluster, options[:group_id], topic, @partitions)

      for policy <- [:earliest, :latest] do
        away(cluster, policy, fn groups ->
          for group <- groups, do: eventually(fn -> gone?(cluster, group, topic) end, 120_000)
        end)
      end

      # Longer than its commits would have been kept.
      assert committed(cluster, options[:group_id], topic, @partitions) == commits
      stop_supervised!(:idle)
      publish(cluster, topic, ["next"])
      again = consumer(options)
      assert [%{value: "next"}] = pull(again, 1)
      assert Consumer.pull(again, max: 10, wait: 300) == []
    end

    defp gone?(cluster, group, topic) do
      markers = Topics.marker_topic(topic, group)
      topic = if String.ends_with?(group, "kmq_tracker"), do: markers, else: topic
      Enum.all?(committed(cluster, group, topic, @partitions), &match?({_, -1001}, &1))
    end
  end

  defp settle(cluster, consumer, topic, group, n) do
    publish(cluster, topic, for(i <- 1..n, do: {"old #{i}", partition: rem(i, @partitions)}))
    messages = pull(consumer, n, 20_000)
    {retried, done} = Enum.split(messages, 2)
    assert Kmq.ack(done, sync: true) == :ok
    assert Kmq.retry(retried, delay: 0) == :ok
    again = pull(consumer, 2, 20_000)
    assert Enum.map(again, & &1.attempt) == [2, 2]
    assert Kmq.ack(again, sync: true) == :ok
    all = n + 2

    eventually(
      fn ->
        assert Enum.sum(for {_, o} <- committed(cluster, group, topic, @partitions), do: o) == all
      end,
      20_000
    )

    :ok
  end

  defp away(cluster, policy, expire) do
    topic = queue(cluster, @partitions)
    options = options(cluster, topic, offset_reset_policy: policy)
    group = options[:group_id]
    markers = Topics.marker_topic(topic, group)
    trackers = Tracker.tracker_group(group)

    first = start_supervised!({Consumer, options}, id: topic)
    eventually(fn -> assert %{assigned: @partitions} = Kmq.info(first).total end, 20_000)
    :ok = settle(cluster, first, topic, group, 20)
    read_to_the_end(cluster, trackers, markers)
    stop_supervised!(topic)
    expire.([group, trackers])
    publish(cluster, topic, for(i <- 0..9, do: {"away #{i}", partition: rem(i, @partitions)}))
    ends = Checker.ends(cluster.hosts, topic, @partitions)
    flush()

    log =
      capture_log(fn ->
        again = consumer(options)
        eventually(fn -> assert %{assigned: @partitions} = Kmq.info(again).total end, 20_000)

        # Said for each partition, whatever comes of it.
        for partition <- 0..(@partitions - 1) do
          to = if policy == :earliest, do: 0, else: ends[partition]

          assert_receive {[:kmq, :offset_reset], %{to: ^to},
                          %{topic: ^topic, partition: ^partition, reason: :no_commit}}
        end

        publish(cluster, topic, ["next"])
        all = if policy == :earliest, do: 20 + 2 + 10 + 1, else: 1
        messages = pull(again, all)
        assert List.last(Enum.sort_by(messages, & &1.ts)).value == "next"
        assert Kmq.ack(messages, sync: true) == :ok
        read_to_the_end(cluster, trackers, markers)
        assert Consumer.pull(again, max: 100, wait: 200) == []
      end)

    assert log =~ "no commit found for #{topic}"
    # None of those that were ended has been copied.
    assert Checker.count(cluster.hosts, topic, @partitions) == 20 + 2 + 10 + 1
  end

  # All markers are read, and none is held by something open.
  defp read_to_the_end(cluster, trackers, markers) do
    eventually(
      fn ->
        assert Checker.committed(cluster.hosts, trackers, markers, @partitions) ==
                 Checker.ends(cluster.hosts, markers, @partitions)
      end,
      30_000
    )
  end

  defp flush do
    receive do
      {[:kmq | _], _, _} -> flush()
    after
      0 -> :ok
    end
  end
end
