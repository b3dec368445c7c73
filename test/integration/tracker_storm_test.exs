defmodule Kmq.Integration.TrackerStormTest do
  # After an outage everything that was in work is due at once, and one slow consumer is back. KMQ_LONG=1: 100,000 of them.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Consumer
  alias Kmq.Test.Markers

  @long System.get_env("KMQ_LONG") == "1"
  @n if @long, do: 100_000, else: 8_000
  @rate if @long, do: 10_000, else: 2_000
  @partitions 4

  setup do: listen()

  @tag timeout: 300_000
  test "#{@n} expire at once: they come at the rate, waiting costs no attempt, nothing good is dead-lettered",
       %{cluster: cluster} do
    topic = queue(cluster, @partitions)

    options =
      options(cluster, topic,
        tracker: :external,
        backoff: [0],
        max_redeliveries: 1,
        lease: 2_000,
        max_processing_time: 5_000,
        redelivery_rate: @rate
      )

    each = div(@n, @partitions)

    for chunk <- Enum.chunk_every(0..(@n - 1), 10_000),
        do: publish(cluster, topic, for(i <- chunk, do: {"#{i}", partition: rem(i, @partitions)}))

    left_behind(cluster, topic, Keyword.delete(options, :max_processing_time), @partitions)
    tracker = tracker(options)
    scope = {topic, options[:group_id]}

    # Out of time, each a failed attempt. (What crashed is handed out a few at a time, or alone: isolation_test.exs.)
    mark(
      cluster,
      topic,
      options,
      for p <- 0..(@partitions - 1),
          marker <- [
            Markers.start_range(scope, p, 0, each, 3_600_000),
            Markers.retry_range(scope, p, 0, each, 0, 1, 1)
          ] do
        marker
      end
    )

    # slower than copies come: they wait in the queue for longer than a lease and a time limit
    consumer = consumer(options)
    {us, seen} = :timer.tc(fn -> slowly(consumer, %{}) end)
    IO.puts(:stderr, "#{@n} handled in #{div(us, 1_000)} ms")
    assert map_size(seen) == @n
    assert seen |> Map.values() |> Enum.uniq() == [2]
    nothing_open(tracker, 20_000)
    assert records(cluster, topic <> "__undelivered", @partitions) == []

    stamps = for c <- copies(cluster, topic, @partitions), do: c.ts
    assert length(stamps) == @n
    took = Enum.max(stamps) - Enum.min(stamps)
    IO.puts(:stderr, "copied in #{took} ms, at a rate of #{@rate} a second")
    # a second's worth may have been saved up
    assert took >= div((@n - 5 * div(@rate, 4)) * 1_000, @rate) * 0.9
  end

  defp slowly(consumer, seen) do
    case Consumer.pull(consumer, max: div(@rate, 20), wait: 5_000) do
      [] ->
        seen

      messages ->
        Process.sleep(70)
        :ok = Kmq.ack(messages)
        seen = Enum.reduce(messages, seen, &Map.put(&2, &1.value, &1.attempt))
        if map_size(seen) == @n, do: seen, else: slowly(consumer, seen)
    end
  end

  test "what crashed together does not come back at once", %{cluster: cluster} do
    topic = queue(cluster, 1)
    backoff = {:exponential, min: 1_000, max: 10_000, factor: 2, jitter: 0.5}
    options = options(cluster, topic, tracker: :external, backoff: backoff)
    publish(cluster, topic, for(i <- 1..200, do: "#{i}"))
    left_behind(cluster, topic, options)
    tracker = tracker(options)
    scope = {topic, options[:group_id]}
    mark(cluster, topic, options, [Markers.start_range(scope, 0, 0, 200, 0)])
    eventually(fn -> assert length(copies(cluster, topic)) == 200 end, 15_000)
    nothing_open(tracker)
    stamps = Enum.sort(for c <- copies(cluster, topic), do: c.ts)
    # spread over the second between half the delay and one and a half
    assert List.last(stamps) - hd(stamps) >= 600
    assert Enum.at(stamps, 150) - Enum.at(stamps, 50) >= 200
  end
end
