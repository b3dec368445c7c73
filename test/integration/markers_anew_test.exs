defmodule Kmq.Integration.MarkersAnewTest do
  # The marker topic is deleted and made again under a living consumer: what is in work is known in the new one, too.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog
  alias Kmq.Consumer

  test "what is in work when its marker topic is made anew comes again, and the rest is acknowledged",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..10, do: "m#{i}"))
    options = options(cluster, topic, lease: 1_500, max_processing_time: 12_000, backoff: [0])
    markers = "#{topic}__#{options[:group_id]}__markers"
    consumer = consumer(options)
    [m1, m2 | held] = pull(consumer, 10)
    assert Kmq.ack([m1, m2], sync: true) == :ok

    log =
      capture_log(fn ->
        :ok = Kmq.Test.Kafka.delete_topic(cluster.hosts, markers)

        eventually(
          fn ->
            assert Kmq.Topics.create_topic(markers, 1,
                     hosts: cluster.hosts,
                     config: [{"message.timestamp.type", "LogAppendTime"}]
                   ) == :ok
          end,
          20_000
        )

        # Nobody acknowledges them: they time out, and only a START in the new topic lets them come again.
        again = pull(consumer, 8, 60_000)
        assert Enum.sort(Enum.map(again, & &1.value)) == Enum.sort(Enum.map(held, & &1.value))
        assert Kmq.ack(again, sync: true) == :ok
      end)

    assert log =~ "the marker topic was made anew"
    assert Consumer.pull(consumer, max: 10, wait: 500) == []
    assert Consumer.stop(consumer) == :ok
  end
end
