defmodule Kmq.Integration.ViewsTest do
  # Gauges after all that changes a partition's offsets; and transactions, which have offsets that are no messages.
  use Kmq.Test.ClusterCase, on: :kafka, async: false

  alias Kmq.Consumer
  alias Kmq.Test.{Gauges, Kafka, Transactions}

  run_bodies(Kmq.Test.Bodies.Views)

  defp row(consumer, partition \\ 0),
    do: Enum.find(Kmq.info(consumer).partitions, &(&1.partition == partition))

  defp delete_before(cluster, topic, partition, offset) do
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    :ok = :kmq_nif.admin_delete_records(admin, topic, partition, offset, 10_000)
    :kmq_nif.admin_close(admin)
  end

  test "messages deleted unread are no lag", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..10, do: "#{i}"))
    Gauges.listen()
    options = options(cluster, topic, gauge_interval: 20)
    consumer = consumer(options)
    assert Kmq.ack(pull(consumer, 10), sync: true) == :ok
    eventually(fn -> assert row(consumer).lag == 0 end)
    Consumer.stop(consumer)

    publish(cluster, topic, for(i <- 11..100, do: "#{i}"))
    delete_before(cluster, topic, 0, 95)
    consumer = consumer(options)
    eventually(fn -> assert %{lag: 5} = row(consumer) end, 20_000)
    assert Enum.map(pull(consumer, 5), & &1.value) == Enum.map(96..100, &"#{&1}")
    eventually(fn -> assert row(consumer).lag == 0 end)
    Gauges.assert_sane(Gauges.all())

    for {[:kmq, :partition], %{lag: lag}, _} <- Gauges.all(), do: assert(lag <= 10)
  end

  test "a topic made anew: the lag is the new one's, or is not told", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..500, do: "#{i}"))
    Gauges.listen()
    consumer = consumer(options(cluster, topic, gauge_interval: 20))
    assert Kmq.ack(pull(consumer, 500), sync: true) == :ok
    eventually(fn -> assert row(consumer).lag == 0 end)

    :ok = Kafka.delete_topic(cluster.hosts, topic)
    eventually(fn -> Kafka.partitions(cluster.hosts, topic) == 0 end, 20_000)
    :ok = Kafka.create_topic(cluster.hosts, topic, 1)
    Gauges.clear()
    publish(cluster, topic, for(i <- 1..7, do: "new #{i}"))

    assert Kmq.ack(pull(consumer, 7, 60_000), sync: true) == :ok
    eventually(fn -> assert %{lag: 0, end: 7, committed: 7} = row(consumer) end, 20_000)
    events = Gauges.all()
    Gauges.assert_sane(events)
    for {[:kmq, :partition], %{lag: lag}, _} <- events, do: assert(lag <= 7)
  end

  describe "transactions" do
    if why = Transactions.missing() do
      IO.puts("left out: transactions of another producer (#{why})")
      @describetag skip: why
    end

    test "what is aborted is handed out to nobody who reads what is committed, and holds neither commit nor lag",
         %{cluster: cluster} do
      {dir, class_path} = Transactions.compile()
      on_exit(fn -> File.rm_rf!(dir) end)
      topic = queue(cluster, 1)
      port = Transactions.start(class_path, cluster.hosts, unique("txn"))
      send = fn values -> Transactions.tell(port, Enum.map(values, &"send #{topic} 0 #{&1}")) end
      tell = &Transactions.tell(port, &1)

      options = options(cluster, topic, max_redeliveries: 1)
      committed = consumer(options)

      dirty_options =
        Keyword.merge(options, group_id: unique("g"), isolation_level: :read_uncommitted)

      dirty = consumer(dirty_options)

      # Without markers the floor of the commit is another: the lowest that is not settled, or not handed out.
      plain =
        for delivery <- [:offsets, :at_most_once] do
          options = options(cluster, topic, delivery: delivery, group_id: unique("g"))
          {options, consumer(options)}
        end

      # offsets: 0 1 | 2 = end of the aborted one | 3 4 | 5 = end of the good one | 6 7 | 8 | open from 9 on
      tell.("begin")
      send.(["a1", "a2"])
      tell.(["abort", "begin"])
      send.(["b1", "b2"])
      tell.(["commit", "begin"])
      send.(["c1", "c2"])
      tell.(["abort", "begin"])
      send.(["open"])

      messages = pull(committed, 2)
      assert Enum.map(messages, &{&1.offset, &1.value}) == [{3, "b1"}, {4, "b2"}]
      assert Kmq.ack(messages, sync: true) == :ok
      assert Consumer.pull(committed, max: 10, wait: 300) == []

      # What is aborted behind them is passed, up to the transaction that is open.
      eventually(fn -> assert %{committed: 9, end: 10, open: 0} = row(committed) end)

      for {options, consumer} <- plain do
        assert [%{offset: 3, value: "b1"}, %{offset: 4, value: "b2"}] =
                 [b1, b2] = pull(consumer, 2)

        assert Kmq.ack(b2) == :ok
        if options[:delivery] == :offsets, do: assert(row(consumer).committed in [nil, 0, 3])
        assert Kmq.ack(b1) == :ok
        eventually(fn -> assert %{committed: 9, end: 10} = row(consumer) end)
        assert Consumer.pull(consumer, max: 10, wait: 300) == []
      end

      all = pull(dirty, 7)
      assert Enum.map(all, & &1.value) == ["a1", "a2", "b1", "b2", "c1", "c2", "open"]
      [first | rest] = all
      assert Kmq.ack(rest) == :ok

      # One that was aborted comes again, and is dead-lettered, like any other.
      assert Kmq.retry(first, delay: 0) == :ok
      [again] = pull(dirty, 1)
      assert {again.value, again.attempt, again.id} == {"a1", 2, first.id}
      assert Kmq.retry(again, delay: 0) == :ok
      assert [%{value: "a1"}] = await_records(cluster, topic <> "__undelivered", 1, 1)

      tell.("commit")
      [last] = pull(committed, 1)
      assert last.value == "open"
      assert Kmq.ack(last, sync: true) == :ok

      for {_, consumer} <- plain do
        assert [%{value: "open"} = message] = pull(consumer, 1)
        assert Kmq.ack(message, sync: true) == :ok
      end

      for consumer <- [committed, dirty] ++ Enum.map(plain, &elem(&1, 1)) do
        eventually(fn -> assert %{lag: 0, open: 0} = Kmq.info(consumer).total end, 10_000)
      end

      ends = Kmq.Test.Checker.ends(cluster.hosts, topic, 1)

      for options <- [options, dirty_options] ++ Enum.map(plain, &elem(&1, 0)),
          group = options[:group_id],
          do: assert(committed(cluster, group, topic, 1) == Map.to_list(ends))

      Transactions.stop(port)
    end
  end
end
