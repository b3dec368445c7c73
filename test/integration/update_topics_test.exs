defmodule Kmq.Integration.UpdateTopicsTest do
  # Topics that change while it runs: new ones are read and covered by the tracker, what is in work of the others stays good.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Config, Consumer, Error, StageHost}
  alias OffBroadway.Kmq.Producer

  defp topics(cluster, names, partitions),
    do: for(name <- names, do: queue(cluster, partitions, name))

  defp values(messages), do: Enum.sort(Enum.map(messages, &{&1.topic, &1.value, &1.attempt}))

  defp assigned(consumer) do
    info = Kmq.Handle.info(GenServer.call(consumer, :handle))
    Enum.sort(for %{state: :assigned} = p <- info.partitions, do: {p.topic, p.partition})
  end

  for assignor <- [:roundrobin, :cooperative_sticky] do
    if assignor == :cooperative_sticky, do: @tag(:cooperative)

    test "a pull consumer: other topics, none, and back (#{assignor})", %{cluster: cluster} do
      [a, b] = topics(cluster, ["a", "b"], 2)
      options = options(cluster, a, assignor: unquote(assignor), lease: 1_000)
      consumer = consumer(options)
      publish(cluster, a, ["a1", "a2"])
      publish(cluster, b, ["b1"])
      [a1, a2] = Enum.sort_by(pull(consumer, 2), & &1.value)

      assert Consumer.update_topics(consumer, [b]) == :ok
      assert [%{topic: ^b, value: "b1", attempt: 1} = b1] = pull(consumer, 1)
      assert assigned(consumer) == [{b, 0}, {b, 1}]

      # What is in work of the topic that is gone: acknowledged, renewed beyond its lease, redelivered.
      assert Kmq.ack(a1, sync: true) == :ok
      assert Kmq.retry(b1) == :ok
      assert [%{topic: ^b, value: "b1", attempt: 2} = b1] = pull(consumer, 1)
      assert Kmq.ack(b1) == :ok
      assert Kmq.retry(a2, sync: true) == :ok
      copies = await_records(cluster, a, 2, 3)
      assert length(copies) == 3
      assert Consumer.pull(consumer, max: 10) == []

      # None at all, and both.
      assert Consumer.update_topics(consumer, []) == :ok
      eventually(fn -> assigned(consumer) == [] end, 10_000)
      assert Consumer.update_topics(consumer, [b, a]) == :ok
      publish(cluster, b, ["b2"])
      messages = pull(consumer, 2)
      assert values(messages) == Enum.sort([{a, "a2", 2}, {b, "b2", 1}])
      assert Kmq.ack(messages, sync: true) == :ok

      eventually(
        fn ->
          for topic <- [a, b] do
            committed = committed(cluster, options[:group_id], topic, 2)
            assert committed == for(p <- 0..1, do: {p, end_of(cluster, topic, p)})
          end
        end,
        10_000
      )
    end
  end

  defp end_of(cluster, topic, partition),
    do: Kmq.Test.RawLog.end_offset(cluster.hosts, topic, partition)

  test "what cannot be is refused, and all stays as it was", %{cluster: cluster} do
    [a] = topics(cluster, ["a"], 1)
    consumer = consumer(options(cluster, a, marker_topic: a <> "-m"))
    missing = unique("nowhere")

    assert {:error, %Error{reason: :topic_missing, message: message}} =
             Consumer.update_topics(consumer, [missing])

    assert message =~ inspect(missing)

    for {bad, words} <- [
          {[a, a], "named twice"},
          {["a b"], "characters Kafka does not take"},
          {"a", "expected a list of strings"},
          {[a, missing], "cannot share"}
        ] do
      assert {:error, %Error{reason: :invalid_option, message: message}} =
               Consumer.update_topics(consumer, bad)

      assert message =~ words
    end

    assert {:error, %{reason: :closed}} = Producer.update_topics(:nobody, [a])
    publish(cluster, a, ["v"])
    assert [message] = pull(consumer, 1)
    assert Kmq.ack(message) == :ok
  end

  test "a consumer that is restarted has the topics it had, not those of its options", %{
    cluster: cluster
  } do
    [a, b] = topics(cluster, ["a", "b"], 1)
    options = options(cluster, a, name: __MODULE__.Restarted, drain_timeout: 20_000)
    first = consumer(options)
    eventually(fn -> assigned(first) == [{a, 0}] end, 20_000)
    assert Consumer.update_topics(first, [b]) == :ok
    Process.exit(first, :kill)

    second =
      eventually(fn -> with({:error, _} <- start_supervised({Consumer, options}), do: nil) end)

    {:ok, second} = second
    publish(cluster, b, ["v"])
    assert [message] = pull(second, 1)
    assert Kmq.ack(message) == :ok
    assert %{config: %Config{topics: [^b]}} = :sys.get_state(second)
  end

  test "a pipeline of two producers: several topics, each with its marker topic", %{
    cluster: cluster
  } do
    [a, b, c] = topics = topics(cluster, ["a", "b", "c"], 2)

    options =
      options(cluster, [a, b], marker_topic: %{a => a <> "-m"}, group_id: "g", marker_format: :kmq)

    test = self()

    handler = fn message ->
      %{topic: topic, attempt: attempt} = message.metadata
      send(test, {:handled, topic, message.data, attempt})
      if attempt == 1 and message.data == "again", do: raise("on purpose"), else: message
    end

    {:ok, host} =
      StageHost.start_link(
        name: __MODULE__.Pipeline,
        producer: {Producer, options},
        producers: 2,
        handler: handler
      )

    handled = fn topic, value, attempt ->
      assert_receive {:handled, ^topic, ^value, ^attempt}, scaled(20_000)
    end

    for topic <- topics, do: publish(cluster, topic, ["once", "again"])

    for topic <- [a, b],
        {value, attempt} <- [{"once", 1}, {"again", 1}, {"again", 2}],
        do: handled.(topic, value, attempt)

    assert Producer.update_topics(__MODULE__.Pipeline, [c]) == :ok

    for {value, attempt} <- [{"once", 1}, {"again", 1}, {"again", 2}],
        do: handled.(c, value, attempt)

    publish(cluster, a, ["left"])

    # Every message has its markers in the topic of its queue.
    for {topic, markers} <- [{a, a <> "-m"}, {b, b <> "__g__markers"}, {c, c <> "__g__markers"}] do
      eventually(
        fn -> Enum.sort(ended(cluster, markers)) == handled_offsets(cluster, topic) end,
        10_000
      )
    end

    assert Producer.update_topics(__MODULE__.Pipeline, topics) == :ok
    handled.(a, "left", 1)
    StageHost.stop(host)
    refute_received {:handled, _, _, _}
  end

  test "a producer without a connection keeps the topics it had, and that is said", %{
    cluster: cluster
  } do
    [a, b] = topics(cluster, ["a", "b"], 2)
    name = __MODULE__.Unconnected
    options = options(cluster, a)

    {:ok, host} =
      StageHost.start_link(name: name, producer: {Producer, options}, producers: 2, handler: & &1)

    eventually(
      fn -> assert %{members: [_, _], total: %{assigned: 2}} = Kmq.info(name) end,
      20_000
    )

    [{handle, _}] = Registry.lookup(Kmq.Registry, {:handle, {name, 1}})
    Process.exit(handle, :kill)
    # Its producer takes a second until it opens another one.
    eventually(fn ->
      assert [%{connected?: true}, %{connected?: false}] = Kmq.info(name).members
    end)

    assert {:error, %Error{reason: :closed, retriable?: true, message: message}} =
             Producer.update_topics(name, [b])

    assert message =~ "1 of the 2 members of #{inspect(name)}"
    eventually(fn -> assert Producer.update_topics(name, [b]) == :ok end, 20_000)

    for index <- 0..1 do
      [{handle, _}] = Registry.lookup(Kmq.Registry, {:handle, {name, index}})
      assert %{config: %Config{topics: [^b]}} = :sys.get_state(handle)
    end

    StageHost.stop(host)
  end

  # {partition, offset} of all messages of the queue but the one that nobody reads yet.
  defp handled_offsets(cluster, topic) do
    Enum.sort(
      for %{value: value} = r <- records(cluster, topic, 2),
          value != "left",
          do: {r.partition, r.offset}
    )
  end

  # What ENDs of a marker topic settle; in the :kmq format one each.
  defp ended(cluster, markers) do
    for %{key: <<partition::32, offset::signed-64>>, value: <<0>>} <-
          records(cluster, markers, 2),
        uniq: true,
        do: {partition, offset}
  end
end
