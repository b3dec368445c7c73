defmodule Kmq.Test.TopicLife do
  @moduledoc false
  # Tests in which a topic is deleted under its consumers, run in a VM of their own: should librdkafka (before 2.6.1) not destroy a client
  # after that, only the test that has seen to it finds it, and not whoever counts native handles afterwards.

  import ExUnit.Assertions
  import Kmq.Test.Eventually
  import Kmq.Test.ClusterCase, only: [publish: 3, pull: 2, pull: 3]

  alias Kmq.{Config, Consumer, Handle, Security, Topics}
  alias Kmq.Test.Kafka

  def assigned(consumer) do
    info = Handle.info(GenServer.call(consumer, :handle))
    Enum.sort(for %{state: :assigned} = p <- info.partitions, do: p.partition)
  end

  @doc "More partitions; returns when brokers know them."
  def grow(cluster, topic, n) do
    {:ok, %{admin_props: props}} = Config.connection(hosts: cluster.hosts)

    :ok =
      Security.with_admin(
        props,
        10_000,
        &:kmq_nif.admin_create_partitions(&1, topic, n, 10_000)
      )

    eventually(fn -> Kafka.partitions(cluster.hosts, topic) == n end)
  end

  @doc "Deletes what lies before an offset."
  def delete_records(cluster, topic, partition, before) do
    {:ok, %{admin_props: props}} = Config.connection(hosts: cluster.hosts)

    :ok =
      Security.with_admin(
        props,
        10_000,
        &:kmq_nif.admin_delete_records(&1, topic, partition, before, 10_000)
      )
  end

  defp delete(cluster, topic) do
    :ok = Topics.delete_topic(topic, hosts: cluster.hosts)
    eventually(fn -> Kafka.partitions(cluster.hosts, topic) == 0 end, 10_000)
  end

  defp start(options) do
    {:ok, consumer} = Consumer.start_link(options)
    consumer
  end

  defp stopped_in_time(consumer) do
    {us, :ok} = :timer.tc(fn -> Consumer.stop(consumer) end)
    assert us < scaled(10_000) * 1_000
  end

  defp destroyed do
    eventually(fn -> assert :kmq_nif.live().clients == 0 end, 20_000)
    :ok
  end

  @doc "Deleted and made anew; `noticed?`: the group has given its partitions back in between."
  def anew(cluster, topic, options, noticed?) do
    consumer = start(options)
    eventually(fn -> assigned(consumer) == [0] end, 20_000)
    publish(cluster, topic, for(i <- 1..300, do: "old #{i}"))
    old = pull(consumer, 300)
    {open, done} = Enum.split(old, 20)
    assert Kmq.ack(done, sync: true) == :ok

    delete(cluster, topic)
    if noticed?, do: eventually(fn -> assigned(consumer) == [] end, 20_000)
    :ok = Topics.create_topic(topic, 1, hosts: cluster.hosts)
    publish(cluster, topic, for(i <- 1..30, do: "new #{i}"))

    new = pull(consumer, 30, 60_000)
    assert Enum.map(new, &{&1.value, &1.attempt}) == for(i <- 1..30, do: {"new #{i}", 1})

    # An ack of the old life must not settle what stands in its place now.
    assert {:error, refused} = Kmq.ack(open)
    assert length(refused) == 20
    {lost, kept} = Enum.split_with(new, &(&1.offset in [3, 4]))
    assert Kmq.ack(kept, sync: true) == :ok
    assert Kmq.retry(lost, delay: 0) == :ok
    again = pull(consumer, 2)
    assert Enum.sort(Enum.map(again, &{&1.value, &1.attempt})) == [{"new 4", 2}, {"new 5", 2}]
    assert Kmq.ack(again, sync: true) == :ok
    %{partitions: partitions} = Kmq.info(consumer)
    assert Enum.all?(partitions, &(&1.lag == nil or &1.lag >= 0))
    stopped_in_time(consumer)
    destroyed()
  end

  @doc "Six consumers of a topic that is deleted, closed one by one."
  def six(cluster, topic, options) do
    consumers = for _ <- 1..6, do: start(options)
    publish(cluster, topic, for(i <- 0..599, do: {"#{i}", partition: rem(i, 6)}))
    eventually(fn -> Enum.all?(consumers, &(length(assigned(&1)) == 1)) end, 40_000)
    for consumer <- consumers, do: pull(consumer, 1)
    [first, second | _] = consumers
    for consumer <- [first, second], do: :ok = Kmq.pause(consumer, :all)
    :ok = Kmq.resume(first, :all)
    delete(cluster, topic)
    Enum.each(consumers, &stopped_in_time/1)
    destroyed()
  end

  @parts 4

  @doc """
  A topic of several partitions, deleted and made anew again and again under its consumer, with more or less time in between: each time all
  messages of the new one come, from every partition. How long that took, in ms.
  """
  def again_and_again(cluster, topic, options, rounds, seed) do
    :rand.seed(:exsss, {seed, 7, 7})
    consumer = start(options)
    eventually(fn -> assigned(consumer) == Enum.to_list(0..(@parts - 1)) end, 20_000)
    times = for round <- 1..rounds, do: round(cluster, topic, consumer, round)
    stopped_in_time(consumer)
    :ok = destroyed()
    times
  end

  defp round(cluster, topic, consumer, round) do
    # Some have many, some few, at first some nothing: where a partition stands is below or above the end of the one that takes its place.
    # Within what that one has at once, five, is what nobody can tell from a position (guides/groups.md): there are five of the round before.
    few = if round == 1, do: [0, 10], else: [1, 10]

    values = for p <- 0..(@parts - 1), n = Enum.random([200 | few]), i <- 1..n//1, do: {p, i}

    publish(cluster, topic, for({p, i} <- values, do: {"#{round} #{p} #{i}", partition: p}))
    messages = pull(consumer, length(values), 60_000)
    # Half of it is in work when the topic goes.
    _ = Kmq.ack(Enum.take_random(messages, div(length(values), 2)))

    :ok = Topics.delete_topic(topic, hosts: cluster.hosts)
    Process.sleep(Enum.random([0, 0, 50, 300, 1_000, 3_000]))

    eventually(
      fn -> :ok == Topics.create_topic(topic, @parts, hosts: cluster.hosts) end,
      20_000
    )

    Process.sleep(Enum.random([0, 0, 200, 2_000]))
    new = for p <- 0..(@parts - 1), i <- 1..5, do: {"new #{round} #{p} #{i}", partition: p}
    publish(cluster, topic, new)
    begun = System.monotonic_time(:millisecond)
    wanted = MapSet.new(new, &elem(&1, 0))
    all = pull_all(consumer, wanted, begun + scaled(45_000), MapSet.new())
    ms = System.monotonic_time(:millisecond) - begun

    assert MapSet.size(all) == MapSet.size(wanted),
           "round #{round}: missing #{inspect(MapSet.to_list(MapSet.difference(wanted, all)), limit: 30)}; " <>
             inspect(Handle.info(GenServer.call(consumer, :handle)), limit: :infinity)

    ms
  end

  # All are acknowledged; what is left of the old topic does not count.
  defp pull_all(consumer, wanted, deadline, seen) do
    messages = Consumer.pull(consumer, max: 500, wait: 100)
    _ = Kmq.ack(messages)
    seen = for m <- messages, m.value in wanted, into: seen, do: m.value

    if MapSet.size(seen) < MapSet.size(wanted) and
         System.monotonic_time(:millisecond) < deadline,
       do: pull_all(consumer, wanted, deadline, seen),
       else: seen
  end
end
