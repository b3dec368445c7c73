defmodule Kmq.Test.Bodies.Queue do
  @moduledoc false
  # What a user of Kmq.Consumer can rely on, on any cluster.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.Consumer

  # key, value, headers: what Kafka can hold and programs forget.
  defp odd_messages do
    many = for i <- 1..500, do: {"header-#{rem(i, 50)}", "value #{i}"}
    large = :binary.copy(<<0, 1, 2, 253, 254, 255>>, 150_000)

    [
      {nil, nil, []},
      {"", "", []},
      {nil, "", [{"a", nil}]},
      {"", nil, [{"a", ""}, {"a", nil}, {"a", "again"}]},
      {<<0, 255>>, <<255, 0>>, [{"bytes", <<0, 1, 255>>}, {"kmq-tags", "the user's own"}]},
      {"many", "headers", many},
      {"large", large, [{"h", "1"}]}
    ]
  end

  defp dead_letters_are_whole(cluster, format, cause) do
    # 7 messages into 3 partitions, each where it says.
    topic = queue(cluster, 3)
    dead = topic <> "__undelivered"
    odd = odd_messages()
    ts = System.os_time(:millisecond) - 3_600_000

    places =
      publish(
        cluster,
        topic,
        for {{key, value, headers}, i} <- Enum.with_index(odd) do
          {value, key: key, headers: headers, partition: rem(i, 3), timestamp: ts + i}
        end
      )

    options =
      options(cluster, topic,
        marker_format: format,
        max_processing_time: 1_000,
        lease: 1_000,
        max_redeliveries: 2
      )

    consumer = consumer(options)
    got = pull_until(consumer, &(length(&1) >= 3 * length(odd)), 40_000)
    records = await_records(cluster, dead, 3, length(odd), 20_000)

    # Delivered 1 + 2 times, with 1, 2, 3 on them, byte for byte the same, under one id.
    by_id = Enum.group_by(got, & &1.id)
    assert map_size(by_id) == length(odd)

    for {{key, value, headers}, i} <- Enum.with_index(odd) do
      place = Enum.at(places, i)
      id = {topic, place.partition, place.offset, ts + i}
      deliveries = Map.fetch!(by_id, id)
      assert Enum.map(deliveries, & &1.attempt) == [1, 2, 3]
      assert Enum.map(deliveries, & &1.deliveries) == [1, 2, 3]

      for message <- deliveries do
        assert message.key === key
        assert message.value === value
        assert message.partition == place.partition
        assert Enum.take(message.headers, length(headers)) === headers
      end

      assert [dead] = for(record <- records, origin(record) == id, do: record)
      assert dead.key === key
      assert dead.value === value
      assert dead.partition == place.partition
      assert Enum.take(dead.headers, length(headers)) === headers

      assert Enum.sort(Enum.drop(dead.headers, length(headers))) == [
               {"kmq-cause", cause},
               {"kmq-deliveries", "3"},
               {"kmq-group", options[:group_id]},
               {"kmq-origin", Enum.join(Tuple.to_list(id), "/")},
               {"kmq-redelivery-count", <<3>>}
             ]
    end

    # And that was all: nobody is handed anything any more, nothing more is dead.
    assert Consumer.pull(consumer, max: 10, wait: 1_500) == []
    assert length(records(cluster, dead, 3)) == length(odd)
  end

  defp origin(record) do
    {_, text} = List.keyfind(record.headers, "kmq-origin", 0)
    [topic, partition, offset, ts] = String.split(text, "/")
    {topic, String.to_integer(partition), String.to_integer(offset), String.to_integer(ts)}
  end

  # Most messages have no headers, and that is seen without asking librdkafka: those that have some must not be taken for such.
  body "headers are seen, whatever the value, among a thousand messages without any", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    values = [nil, "", "v", <<0>>, "ends in zero" <> <<0>>, :binary.copy("long ", 2_000)]

    messages =
      for i <- 1..1_000 do
        headers = if rem(i, 7) == 0, do: for(n <- 0..rem(i, 3), do: {"h#{n}", "#{i}"}), else: []
        {Enum.at(values, rem(i, length(values))), key: "#{i}", headers: headers}
      end

    publish(cluster, topic, messages)
    consumer = consumer(options(cluster, topic))
    got = pull_until(consumer, &(length(&1) >= 1_000), 30_000)
    assert for(m <- got, do: {m.value, key: m.key, headers: m.headers}) == messages
  end

  body "never acknowledged: delivered 1 + max_redeliveries times, then dead once, byte for byte",
       %{cluster: cluster} do
    dead_letters_are_whole(cluster, :range, "timeout")
  end

  body "the same in the format of the JVM's kmq", %{cluster: cluster} do
    dead_letters_are_whole(cluster, :kmq, "crash")
  end

  body "acks in random order, from other processes, one by one and in lists", %{cluster: cluster} do
    topic = queue(cluster, 4)
    n = 2_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    options = options(cluster, topic)
    consumer = consumer(options)
    messages = pull(consumer, n)
    assert Enum.sort(Enum.map(messages, & &1.value)) == Enum.sort(Enum.map(1..n, &"#{&1}"))
    assert Enum.all?(messages, &(&1.attempt == 1 and &1.deliveries == 1))

    {singles, lists} = messages |> Enum.shuffle() |> Enum.split(500)
    assert Enum.all?(singles, &(Kmq.ack(&1) == :ok))

    lists
    |> Enum.chunk_every(97)
    |> Task.async_stream(&Kmq.ack/1, max_concurrency: 8)
    |> Enum.each(fn result -> assert result == {:ok, :ok} end)

    assert Consumer.flush(consumer) == :ok
    assert_settled(cluster, consumer, options, topic, 4, n)
  end

  # All that was handed out is settled, for good: the commit is at the end, another consumer of the group gets nothing,
  # no copy was ever made.
  defp assert_settled(cluster, consumer, options, topic, partitions, n) do
    eventually(
      fn ->
        commits = committed(cluster, options[:group_id], topic, partitions)
        assert Enum.sum(for {_, offset} <- commits, do: max(offset, 0)) == n
      end,
      10_000
    )

    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    Consumer.stop(consumer)
    assert length(records(cluster, topic, partitions)) == n
  end

  body "a second ack is told so, and settles nothing else", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b", "c", "d"])
    consumer = consumer(options(cluster, topic))
    [a, b, c, d] = pull(consumer, 4)

    assert Kmq.ack(a) == :ok
    assert Kmq.ack(a) == {:error, :unknown}
    assert Kmq.discard(a) == {:error, :unknown}
    assert Kmq.retry(a) == {:error, :unknown}
    assert Kmq.reject(a, "too late") == {:error, :unknown}

    # The ones of a list that are in work are settled, the others named.
    assert Kmq.ack([a, b]) == {:error, [{a, :unknown}]}
    assert Kmq.ack(b) == {:error, :unknown}
    assert Kmq.ack([c, c]) == {:error, [{c, :unknown}]}

    # A message that was never handed out has no place in the ledger.
    assert Kmq.ack(%{d | offset: d.offset + 1_000}) == {:error, :unknown}
    assert Kmq.ack(d) == :ok

    Consumer.stop(consumer)
    assert Kmq.ack(d) == {:error, :closed}
    assert Kmq.ack([c, d]) == {:error, [{c, :closed}, {d, :closed}]}
    assert records(cluster, topic <> "__undelivered", 1) == []
  end

  body "an ack after max_processing_time is told that it is late, and the message comes again", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["slow", "quick"])
    consumer = consumer(options(cluster, topic, max_processing_time: 1_000))
    [slow, quick] = pull(consumer, 2)
    assert Kmq.ack(quick) == :ok

    [again] = pull(consumer, 1)
    assert {again.value, again.attempt, again.deliveries} == {"slow", 2, 2}
    assert again.id == slow.id
    assert Kmq.ack(slow) == {:error, :late}
    assert Kmq.ack(again) == :ok
    assert Consumer.flush(consumer) == :ok
    assert Consumer.pull(consumer, max: 10, wait: 1_500) == []
    assert length(records(cluster, topic, 1)) == 3
  end

  body "longer than the lease is no fault, with a thousand messages before it, in the engine and in hand",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    n = 2_000
    publish(cluster, topic, for(i <- 1..n, do: "#{i}"))
    options = options(cluster, topic, lease: 1_000, start_ahead: n)
    consumer = consumer(options)

    # A thousand in hand and not worked on; behind them the next ones have their START and wait in the engine.
    in_hand = pull(consumer, 1_000)
    kept_busy(3_500)
    waited = pull(consumer, n - length(in_hand))
    assert Enum.all?(in_hand ++ waited, &(&1.attempt == 1 and &1.deliveries == 1))
    assert Enum.map(in_hand ++ waited, & &1.value) == Enum.map(1..n, &"#{&1}")

    kept_busy(3_500)
    assert Kmq.ack(in_hand) == :ok
    assert Kmq.ack(waited) == :ok
    assert Consumer.flush(consumer) == :ok
    assert_settled(cluster, consumer, options, topic, 1, n)
  end

  # A handler that takes its time: the time itself is what is tested.
  defp kept_busy(ms), do: Process.sleep(ms)

  body "retry waits as it is told, reject goes to the dead letters with its reason, discard is gone",
       %{cluster: cluster} do
    topic = queue(cluster, 1)

    publish(
      cluster,
      topic,
      for(v <- ~w(retry later default reject discard), do: {v, key: v, headers: [{"h", v}]})
    )

    options = options(cluster, topic, backoff: [300], max_redeliveries: 1)
    consumer = consumer(options)
    messages = Map.new(pull(consumer, 5), &{&1.value, &1})
    began = System.monotonic_time(:millisecond)

    assert Kmq.retry(messages["retry"], delay: 0, reason: "at once") == :ok
    assert Kmq.retry(messages["later"], delay: 1_500) == :ok
    assert Kmq.retry(messages["default"]) == :ok
    assert Kmq.reject(messages["reject"], "not an order: " <> String.duplicate("ä", 400)) == :ok
    assert Kmq.discard(messages["discard"]) == :ok

    again =
      for _ <- 1..3 do
        [message] = pull_one(consumer)
        {message, System.monotonic_time(:millisecond) - began}
      end

    waits = Map.new(again, fn {message, ms} -> {message.value, ms} end)
    assert Map.keys(waits) == ["default", "later", "retry"]
    assert waits["default"] >= 300
    assert waits["later"] >= 1_500
    assert {%{value: "later"}, _} = List.last(again)

    for {message, _ms} <- again do
      assert {message.attempt, message.deliveries} == {2, 2}
      assert message.id == messages[message.value].id
      assert {message.key, message.headers |> hd()} == {message.value, {"h", message.value}}
    end

    # The second failure of one that may be redelivered once.
    {[once_more], done} =
      again |> Enum.map(&elem(&1, 0)) |> Enum.split_with(&(&1.value == "retry"))

    assert Kmq.ack(done) == :ok
    assert Kmq.retry(once_more, delay: 0, reason: {:still, "no"}) == :ok

    records = await_records(cluster, topic <> "__undelivered", 1, 2)
    dead = Map.new(records, &{&1.value, Map.new(&1.headers)})
    assert Map.keys(dead) == ["reject", "retry"]
    rejected = dead["reject"]
    assert rejected["kmq-cause"] == "rejected"
    assert String.valid?(rejected["kmq-error"])
    assert String.starts_with?(rejected["kmq-error"], "not an order: ää")
    assert byte_size(rejected["kmq-error"]) in 509..512
    assert rejected["kmq-deliveries"] == "1"
    assert dead["retry"]["kmq-cause"] == "failed"
    assert dead["retry"]["kmq-error"] == inspect({:still, "no"})
    assert dead["retry"]["kmq-redelivery-count"] == <<2>>
    assert dead["retry"]["kmq-deliveries"] == "2"
    assert Consumer.pull(consumer, max: 10, wait: 500) == []
  end

  defp pull_one(consumer) do
    eventually(
      fn -> match?([_], message = Consumer.pull(consumer, wait: 100)) && message end,
      10_000
    )
  end

  body "two groups on one topic: each has all messages, and only its own copies", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    n = 40
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
    one = consumer(options_one = options(cluster, topic))
    two = consumer(options_two = options(cluster, topic))

    # What one fails, comes again to one. Two has it once, at attempt 1.
    first = pull(one, n)
    {fail, good} = Enum.split_with(first, &(String.to_integer(&1.value) <= 10))
    assert Kmq.retry(fail, delay: 0) == :ok
    assert Kmq.ack(good) == :ok
    again = pull(one, 10)
    assert Enum.sort(Enum.map(again, & &1.value)) == Enum.sort(Enum.map(fail, & &1.value))
    assert Enum.all?(again, &(&1.attempt == 2))
    assert Kmq.ack(again) == :ok

    others = pull(two, n)
    assert Enum.all?(others, &(&1.attempt == 1 and &1.deliveries == 1))
    assert Kmq.ack(others) == :ok
    assert Consumer.pull(two, max: 100, wait: 1_000) == []
    assert Consumer.pull(one, max: 100, wait: 100) == []

    # The copies are in the topic for all to see, and both groups are past them.
    assert length(records(cluster, topic, 2)) == n + 10

    for options <- [options_one, options_two] do
      eventually(
        fn ->
          commits = committed(cluster, options[:group_id], topic, 2)
          assert Enum.sum(for {_, offset} <- commits, do: max(offset, 0)) == n + 10
        end,
        10_000
      )
    end
  end

  body "dead letters are messages like any other: another group works on them", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, [{"bad", key: "k", headers: [{"h", "1"}]}])
    consumer = consumer(options(cluster, topic))
    [bad] = pull(consumer, 1)
    assert Kmq.reject(bad, "no") == :ok
    await_records(cluster, topic <> "__undelivered", 1, 1)

    second =
      consumer(options(cluster, topic <> "__undelivered", dead_letter_topic: unique("dead-dead")))

    [dead] = pull(second, 1)
    assert {dead.key, dead.value} == {"k", "bad"}
    assert {"kmq-error", "no"} in dead.headers
    assert dead.id == bad.id
    assert Kmq.ack(dead) == :ok
  end

  body "several topics in one consumer, each with its own markers and dead letters", %{
    cluster: cluster
  } do
    sizes = [1, 3, 6]
    topics = for size <- sizes, do: queue(cluster, size)

    for {topic, size} <- Enum.zip(topics, sizes) do
      publish(cluster, topic, for(i <- 1..30, do: {"#{i}", partition: rem(i, size)}))
    end

    options = options(cluster, topics)
    consumer = consumer(options)
    messages = pull(consumer, 90)
    by_topic = Enum.group_by(messages, & &1.topic)

    for topic <- topics do
      assert Enum.sort(Enum.map(by_topic[topic], & &1.value)) ==
               Enum.sort(Enum.map(1..30, &"#{&1}"))
    end

    # One of each topic is rejected, one tried again.
    for topic <- topics do
      [bad, again | good] = by_topic[topic]
      assert Kmq.reject(bad, topic) == :ok
      assert Kmq.retry(again, delay: 0) == :ok
      assert Kmq.ack(good) == :ok
    end

    again = pull(consumer, 3)
    assert Enum.sort(Enum.map(again, & &1.topic)) == Enum.sort(topics)
    assert Kmq.ack(again) == :ok

    for {topic, size} <- Enum.zip(topics, sizes) do
      [dead] = await_records(cluster, topic <> "__undelivered", size, 1)
      assert {"kmq-error", topic} in dead.headers
      assert length(records(cluster, topic, size)) == 31
    end
  end

  body "a consumer that leaves hands back at no attempt what it has not settled", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..20, do: {"#{i}", partition: rem(i, 2)}))
    options = options(cluster, topic)
    first = consumer(options)
    messages = pull(first, 20)
    {done, open} = Enum.split(messages, 12)
    assert Kmq.ack(done) == :ok
    Consumer.stop(first)

    second = consumer(options)
    again = pull(second, 8)
    assert Enum.sort(Enum.map(again, & &1.value)) == Enum.sort(Enum.map(open, & &1.value))
    assert Enum.all?(again, &(&1.attempt == 1 and &1.deliveries == 2))
    assert Kmq.ack(again) == :ok
    assert Consumer.pull(second, max: 10, wait: 500) == []
  end

  body "a wrong argument is its caller's fault, and an impossible delay is refused", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a"])
    consumer = consumer(options(cluster, topic))

    for wrong <- [[max: 0], [max: 2 ** 63], [wait: -1], [wait: 2 ** 40], [max: :all]],
        do: assert_raise(ArgumentError, fn -> Consumer.pull(consumer, wrong) end)

    [message] = pull(consumer, 1)

    for wrong <- [-1, 31 * 86_400_000, 2 ** 62] do
      assert_raise ArgumentError, ~r/30 days/, fn -> Kmq.retry(message, delay: wrong) end
      assert_raise ArgumentError, ~r/30 days/, fn -> Kmq.snooze(message, wrong) end
    end

    assert Kmq.ack(message) == :ok
  end
end
