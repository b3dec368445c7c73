defmodule Kmq.Test.Bodies.Publisher do
  @moduledoc false
  # What a user of Kmq.Publisher can rely on, on any cluster.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.{Error, Publisher}

  # org.apache.kafka.common.utils.Utils.murmur2 of kafka-clients 4.3.1: {key, hash}.
  @murmur2 [
    {"", 275_646_681},
    {"a", -1_563_381_124},
    {"ab", 316_155_434},
    {"abc", 479_470_107},
    {"abcd", -1_323_649_548},
    {"abcde", 461_995_741},
    {"21", -973_932_308},
    {"foobar", -790_332_482},
    {"customer 7", -551_276_946},
    {"a-little-bit-long-string", -985_981_536},
    {"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971},
    {<<0>>, 375_494_588},
    {<<0, 0, 0, 0>>, 850_957_120},
    {<<255, 254, 128, 0, 127>>, -1_602_569_320}
  ]

  defp publisher(cluster, options \\ []) do
    options = Keyword.merge([hosts: cluster.hosts, compression: :none], options)

    start_supervised!(%{
      id: make_ref(),
      start: {Publisher, :start_link, [options]},
      restart: :temporary
    })
  end

  body "what it reports is where it is, with every byte as it was", %{cluster: cluster} do
    topic = queue(cluster, 3)
    publisher = publisher(cluster)

    assert Publisher.publish(publisher, topic, "first", partition: 1) ==
             {:ok, %{partition: 1, offset: 0}}

    options = [
      partition: 1,
      key: "",
      headers: [{"a", nil}, {"a", ""}, {"b", <<0>>}],
      timestamp: 1_234_567_890_123
    ]

    assert Publisher.publish(publisher, topic, nil, options) == {:ok, %{partition: 1, offset: 1}}

    assert [first, second] = records(cluster, topic, 3)

    assert {first.partition, first.offset, first.key, first.value, first.headers} ==
             {1, 0, nil, "first", []}

    assert abs(first.ts - System.os_time(:millisecond)) < 60_000
    assert {second.partition, second.offset, second.key, second.value} == {1, 1, "", nil}
    assert second.headers == [{"a", nil}, {"a", ""}, {"b", <<0>>}]
    assert second.ts == 1_234_567_890_123
  end

  body "keys go to the partitions that Java's clients send them to", %{cluster: cluster} do
    partitions = 7
    topic = queue(cluster, partitions)
    publisher = publisher(cluster)

    for {key, hash} <- @murmur2 do
      expected = rem(Bitwise.band(hash, 0x7FFFFFFF), partitions)
      assert {:ok, %{partition: partition}} = Publisher.publish(publisher, topic, "v", key: key)
      assert {key, partition} == {key, expected}
    end

    # Without a key they are spread, batch by batch.
    seen = :atomics.new(partitions, [])

    eventually(fn ->
      {:ok, %{partition: partition}} = Publisher.publish(publisher, topic, "v")
      :atomics.put(seen, partition + 1, 1)
      assert Enum.sum(for p <- 1..partitions, do: :atomics.get(seen, p)) == partitions
    end)
  end

  body "publish_many: places in the order given, partitions in order, several topics", %{
    cluster: cluster
  } do
    one = queue(cluster, 2)
    two = queue(cluster, 1)
    publisher = publisher(cluster)
    assert Publisher.publish_many(publisher, []) == {:ok, []}

    messages =
      for i <- 1..5_000,
          do: if(rem(i, 3) == 0, do: {two, "#{i}"}, else: {one, "#{i}", partition: rem(i, 2)})

    assert {:ok, places} = Publisher.publish_many(publisher, messages)

    stored =
      for topic <- [one, two],
          record <- records(cluster, topic, if(topic == one, do: 2, else: 1)),
          into: %{},
          do: {{topic, record.partition, record.offset}, record.value}

    for {message, place} <- Enum.zip(messages, places) do
      assert stored[{elem(message, 0), place.partition, place.offset}] == elem(message, 1)
    end

    for {topic, partition} <- [{one, 0}, {one, 1}, {two, 0}] do
      values =
        for {{^topic, ^partition, offset}, value} <- stored,
            do: {offset, String.to_integer(value)}

      sorted = values |> Enum.sort() |> Enum.map(&elem(&1, 1))
      assert sorted == Enum.sort(sorted)
    end
  end

  body "one that cannot be sent fails alone, in its place", %{cluster: cluster} do
    topic = queue(cluster, 2)
    publisher = publisher(cluster)
    large = :binary.copy("x", 3_000_000)

    messages = [
      {topic, "a"},
      {topic, large},
      {topic, "b"},
      {topic, "c", partition: 77},
      {topic, "d"}
    ]

    assert {:error, results} = Publisher.publish_many(publisher, messages)
    assert [{:ok, _}, {:error, too_large}, {:ok, _}, {:error, no_partition}, {:ok, _}] = results
    assert %Error{reason: :msg_size_too_large} = too_large
    # In numbers: what it is, what is taken.
    assert too_large.message =~ "of 3000000 bytes (key, value and headers) is too large for"
    assert too_large.message =~ inspect(topic)
    assert too_large.message =~ "sends 1000000 at most (message.max.bytes of :kafka_config)"

    if cluster.kind == :kafka,
      do: assert(too_large.message =~ "the topic takes 1048588 (its max.message.bytes)")

    assert %Error{reason: :unknown_partition} = no_partition
    assert no_partition.message =~ ~s("#{topic}" has no partition 77: it has 2, numbered from 0)

    assert {:error, %Error{reason: :msg_size_too_large}} =
             Publisher.publish(publisher, topic, large)

    values = for record <- records(cluster, topic, 2), do: record.value
    assert Enum.sort(values) == ["a", "b", "d"]
  end

  body "async: queued when it returns, reported by flush", %{cluster: cluster} do
    topic = queue(cluster, 4)
    publisher = publisher(cluster)
    for i <- 1..1_000, do: assert(Publisher.publish_async(publisher, topic, "#{i}") == :ok)

    assert Publisher.publish_many_async(publisher, for(i <- 1_001..3_000, do: {topic, "#{i}"})) ==
             :ok

    assert Publisher.flush(publisher) == :ok
    assert Publisher.queued(publisher) == 0
    values = for record <- records(cluster, topic, 4), do: String.to_integer(record.value)
    assert Enum.sort(values) == Enum.to_list(1..3_000)
    assert Publisher.close(publisher) == :ok
    assert {:error, %Error{reason: :closed}} = Publisher.publish(publisher, topic, "v")
    assert {:error, %Error{reason: :closed}} = Publisher.publish_async(publisher, topic, "v")
    assert {:error, %Error{reason: :closed}} = Publisher.close(publisher)
  end

  body "a full queue makes publishing wait, and loses nothing", %{cluster: cluster} do
    topic = queue(cluster, 2)
    publisher = publisher(cluster, queue_messages: 50, linger: 0)
    watcher = watch_queue(publisher)

    tasks =
      for task <- 1..4 do
        Task.async(fn ->
          if rem(task, 2) == 0 do
            {:ok, _} =
              Publisher.publish_many(publisher, for(i <- 1..1_000, do: {topic, "#{task}-#{i}"}))
          else
            for i <- 1..1_000, do: :ok = Publisher.publish_async(publisher, topic, "#{task}-#{i}")
          end
        end)
      end

    Task.await_many(tasks, 30_000)
    assert Publisher.flush(publisher) == :ok
    send(watcher, {:stop, self()})
    assert_receive {:most, most}, 5_000
    # Its length counts reports that were not read yet, too.
    assert most in 1..150

    values = for record <- records(cluster, topic, 2), do: record.value
    assert Enum.sort(values) == Enum.sort(for task <- 1..4, i <- 1..1_000, do: "#{task}-#{i}")
  end

  defp watch_queue(publisher) do
    spawn_link(fn -> watch_queue(publisher, 0) end)
  end

  defp watch_queue(publisher, most) do
    receive do
      {:stop, pid} -> send(pid, {:most, most})
    after
      1 -> watch_queue(publisher, max(most, Publisher.queued(publisher)))
    end
  end
end
