defmodule Kmq.Integration.FlappingTest do
  # Demand that comes and goes, and a group that rebalances meanwhile: librdkafka pauses and resumes all partitions inside, and older ways of reading it
  # lost messages over that. 100,000 numbered messages, or with KMQ_LONG=1 a million: each comes once.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Publisher}

  @n if(System.get_env("KMQ_LONG") == "1", do: 1_000_000, else: 100_000)
  @partitions 4
  @moduletag timeout: scaled(600_000)

  for {assignor, delivery} <- [
        {:roundrobin, :markers},
        {:roundrobin, :offsets},
        {:cooperative_sticky, :markers}
      ] do
    if assignor == :cooperative_sticky, do: @tag(:cooperative)

    test "no number is missing, none comes twice (#{assignor}, #{delivery})", %{cluster: cluster} do
      topic = queue(cluster, @partitions)
      fill(cluster, topic)

      options =
        options(cluster, topic,
          delivery: unquote(delivery),
          assignor: unquote(assignor),
          kafka_config: [consumer: ["heartbeat.interval.ms": 200]],
          lease: 60_000,
          drain_timeout: 20_000,
          max_processing_time: 600_000
        )

      seen = :counters.new(@n, [])
      stays = consumer(options)
      flapping = for consumer <- [stays], do: flap(consumer, seen)
      await(seen, div(@n, 4))

      # Two rebalances: one joins, and leaves again.
      {:ok, joins} = Consumer.start_link(options)
      eventually(fn -> assert %{assigned: 2} = Kmq.info(joins).total end, 30_000)
      other = flap(joins, seen)
      await(seen, div(@n, 2))
      stop(other)
      :ok = Consumer.stop(joins)
      eventually(fn -> assert %{assigned: @partitions} = Kmq.info(stays).total end, 30_000)

      await(seen, @n)
      Enum.each(flapping, &stop/1)
      times = Enum.frequencies(for i <- 1..@n, do: :counters.get(seen, i))
      assert times == %{1 => @n}
    end
  end

  defp fill(cluster, topic) do
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts)

    for chunk <- Stream.chunk_every(0..(@n - 1), 5_000) do
      messages = for i <- chunk, do: {topic, Integer.to_string(i), partition: rem(i, @partitions)}
      {:ok, _} = Publisher.publish_many(publisher, messages)
    end

    :ok = Publisher.close(publisher)
  end

  # So many different ones, at least.
  defp await(seen, n) do
    eventually(fn -> different(seen) >= n end, 120_000 + div(n, 4))
  end

  defp different(seen), do: Enum.count(1..@n, &(:counters.get(seen, &1) > 0))

  # Pulls for a while and rests for a while, each 100 to 500 ms. What it has when it is told to stop it acknowledges.
  defp flap(consumer, seen), do: Task.async(fn -> flap_on(consumer, seen) end)

  defp flap_on(consumer, seen) do
    pull_until_time(consumer, seen, now() + 100 + :rand.uniform(400))

    receive do
      :enough -> :ok
    after
      100 + :rand.uniform(400) -> flap_on(consumer, seen)
    end
  end

  defp pull_until_time(consumer, seen, until) do
    messages = Consumer.pull(consumer, max: 1 + :rand.uniform(1_000), wait: 50)
    for message <- messages, do: :counters.add(seen, String.to_integer(message.value) + 1, 1)
    :ok = Kmq.ack(messages)
    if now() < until, do: pull_until_time(consumer, seen, until)
  end

  defp stop(task) do
    send(task.pid, :enough)
    Task.await(task, scaled(20_000))
  end

  defp now, do: System.monotonic_time(:millisecond)
end
