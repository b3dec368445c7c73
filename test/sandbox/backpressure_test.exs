defmodule Kmq.Sandbox.BackpressureTest do
  # The marker producer's queue is full, the broker slow: every END is written all the same, nobody spins.
  use Kmq.Test.ClusterCase, on: :sandbox, async: false

  alias Kmq.{Consumer, Sandbox}

  for {format, n} <- [range: 200_000, kmq: 15_000] do
    @tag timeout: 180_000
    test "#{n} acks in one call, a queue of 1,000 and 50 ms to the broker: #{format}", %{
      cluster: cluster
    } do
      topic = queue(cluster, 8)
      publish(cluster, topic, for(i <- 1..unquote(n), do: {"#{i}", partition: rem(i, 8)}))

      options =
        options(cluster, topic,
          marker_format: unquote(format),
          max_processing_time: 600_000,
          lease: 60_000,
          tracker: :external,
          start_ahead: 5_000,
          kafka_config: [producer: ["queue.buffering.max.messages": 1_000]]
        )

      consumer = consumer(options)
      messages = take(consumer, unquote(n), [])
      :ok = Sandbox.inject(cluster.sandbox, {:rtt, 1, 50})
      :kmq_nif.busy()
      began = System.monotonic_time(:millisecond)

      # The call itself waits for nobody: what is settled is a bit in a set, the ENDs are written as the broker takes them.
      assert Kmq.ack(Enum.shuffle(messages)) == :ok
      called = System.monotonic_time(:millisecond) - began
      assert Consumer.flush(consumer, scaled(60_000)) == :ok
      took = System.monotonic_time(:millisecond) - began
      {_, polls, longest, _} = List.keyfind(:kmq_nif.busy(), :consumer_poll, 0)
      :ok = Sandbox.inject(cluster.sandbox, {:rtt, 1, 0})

      IO.puts(
        :stderr,
        "#{unquote(format)}: #{unquote(n)} acks in #{called} ms, written in #{took} ms with #{polls} polls, the longest #{longest} us"
      )

      # Not more than some polls for each round trip and each slice of work.
      assert polls < 500 + took
      assert %{open: 0, unwritten: 0} = Kmq.info(consumer).total
      Consumer.stop(consumer)

      eventually(
        fn ->
          {:ok, partitions} =
            Kmq.Inspect.partitions(Keyword.drop(options, [:group_config, :fetch_config]))

          assert partitions |> Enum.map(& &1.open) |> Enum.sum() == 0
        end,
        30_000
      )
    end
  end

  # Each is a request to the broker: at 1,000 acks a second one for each poll was the half of a pipeline's cost there.
  test "ENDs are written once in ack_flush_interval, whatever the consumer is polled for meanwhile",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..200, do: "#{i}"))
    interval = 10_000

    options =
      options(cluster, topic,
        marker_topic: topic <> "-m",
        tracker: :external,
        ack_flush_interval: interval
      )

    consumer = consumer(options)
    one = fn -> Consumer.pull(consumer, max: 1, wait: scaled(10_000)) end
    [first] = one.()
    began = System.monotonic_time(:millisecond)
    :ok = Kmq.ack(first)

    # Each hand-out, soon after the assignment, brings a commit and so a poll or two.
    for _ <- 2..200 do
      [message] = one.()
      :ok = Kmq.ack(message)
    end

    assert Consumer.flush(consumer, scaled(10_000)) == :ok
    took = System.monotonic_time(:millisecond) - began

    ends =
      Enum.count(
        records(cluster, topic <> "-m", 1),
        &match?(<<0, 0x4B, 1, 2, _::binary>>, &1.value)
      )

    # One for each interval that began, and the flush's own.
    assert ends in 1..(div(took, interval) + 2)
  end

  defp take(_consumer, 0, acc), do: acc

  defp take(consumer, n, acc) do
    messages = Consumer.pull(consumer, max: 1_000, wait: scaled(30_000))
    assert messages != []
    take(consumer, n - length(messages), messages ++ acc)
  end
end
