defmodule Kmq.Integration.TopicLifeTest do
  # What becomes of a topic while it is read: it grows, it is deleted, it is made anew.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Topics}
  alias Kmq.Test.{Holder, Scene, TopicLife, VM}

  @quick [common: ["topic.metadata.refresh.interval.ms": 500]]

  defp assigned(consumer), do: TopicLife.assigned(consumer)

  defp vm do
    vm = VM.start()
    on_exit(fn -> File.rm(vm.log) end)
    vm
  end

  # A message may be in work for as long as such a test takes.
  defp patient(cluster, topic, extra),
    do: options(cluster, topic, [kafka_config: @quick, max_processing_time: 600_000] ++ extra)

  test "the marker topic grows first, then the queue: its new partitions are read at once", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    options = options(cluster, topic, kafka_config: @quick)
    {:ok, _} = Topics.create(options)
    consumer = consumer(Keyword.put(options, :create_topics, false))
    eventually(fn -> assigned(consumer) == [0] end, 20_000)
    TopicLife.grow(cluster, Topics.marker_topic(topic, options[:group_id]), 3)
    TopicLife.grow(cluster, topic, 3)
    publish(cluster, topic, for(p <- 0..2, do: {"#{p}", partition: p}))
    messages = pull(consumer, 3, 40_000)

    assert Enum.sort(Enum.map(messages, &{&1.partition, &1.value})) ==
             for(p <- 0..2, do: {p, "#{p}"})

    assert Kmq.ack(messages, sync: true) == :ok
  end

  # Noticed: the group has given its partitions back meanwhile. Not noticed: a position that is not there any more.
  for {policy, noticed} <- [{:earliest, false}, {:latest, false}, {:latest, true}] do
    test "deleted and made anew: all of the new one is handled, nothing of the old one (#{policy}, noticed: #{noticed})",
         %{cluster: cluster} do
      topic = queue(cluster, 1)
      options = patient(cluster, topic, offset_reset_policy: unquote(policy))
      args = [cluster, topic, options, unquote(noticed)]
      assert VM.call(vm(), TopicLife, :anew, args, scaled(100_000)) == :ok
    end
  end

  @rounds String.to_integer(
            System.get_env(
              "KMQ_ROUNDS",
              if(System.get_env("KMQ_LONG") == "1", do: "30", else: "3")
            )
          )
  for {assignor, tags} <- [roundrobin: [], cooperative_sticky: [cooperative: true]] do
    for {tag, value} <- tags, do: @tag([{tag, value}])
    @tag timeout: scaled(60_000 + @rounds * 60_000)
    test "deleted and made anew again and again, with four partitions (#{assignor})", %{
      cluster: cluster
    } do
      topic = queue(cluster, 4)
      options = patient(cluster, topic, assignor: unquote(assignor))
      args = [cluster, topic, options, @rounds, Scene.seed()]
      time = scaled(60_000 + @rounds * 60_000)
      times = VM.call(vm(), TopicLife, :again_and_again, args, time)
      IO.puts("\nmade anew #{@rounds} times: all new messages after #{inspect(times)} ms")
    end
  end

  @old 40
  # As many as were read, more of two partitions, and times that the broker gives.
  @grown [
    {"same", [40], []},
    {"more", [60, 90], []},
    {"stamped", [40], [{"message.timestamp.type", "LogAppendTime"}]}
  ]

  test "deleted, made anew and grown past what was read before anybody looks: all of the new one is handled",
       %{cluster: cluster} do
    topics =
      for {name, counts, config} <- @grown do
        topic = queue(cluster, length(counts), name, config: config)
        publish(cluster, topic, numbers("old", Enum.map(counts, fn _ -> @old end)))
        {topic, counts, config}
      end

    options =
      patient(cluster, for({topic, _, _} <- topics, do: topic),
        group_config: [session_timeout_seconds: 30, heartbeat_rate_seconds: 1]
      )

    vm = vm()
    :ok = VM.call(vm, Holder, :keep, [options])
    partitions = topics |> Enum.map(fn {_, counts, _} -> length(counts) end) |> Enum.sum()
    VM.call(vm, Holder, :next, [partitions * @old], scaled(60_000))
    assert VM.call(vm, Holder, :settle, [:ack, [[sync: true]]], scaled(30_000)) == :ok

    # It sees nothing of it while it happens.
    :ok = VM.signal(vm, :stop)
    for {topic, counts, config} <- topics, do: anew(cluster, topic, counts, config)
    :ok = VM.signal(vm, :cont)

    values =
      for {topic, counts, _} <- topics, {value, _} <- numbers("new #{topic}", counts), do: value

    got = VM.call(vm, Holder, :until, [values], scaled(60_000))
    assert Enum.all?(got, fn {_offset, attempt, _value} -> attempt == 1 end)
    assert VM.tail(vm) =~ "was deleted and made anew, and reaches as far as offset #{@old} again"
    # Of the one that has no more than was read nothing was handed out before.
    [{same, _, _} | _] = topics
    mine = for {_, _, value} <- got, String.starts_with?(value, "new #{same} "), do: value
    assert length(mine) == @old
    VM.kill(vm)
  end

  # What was read beyond the old end is committed, so that the next assignment begins there.
  test "the same, and the partition is given back and comes again before anybody looks",
       %{cluster: cluster} do
    [topic, other] = for name <- ["a", "b"], do: queue(cluster, 1, name)
    publish(cluster, topic, numbers("old", [@old]))

    options =
      patient(cluster, [topic, other],
        group_config: [session_timeout_seconds: 30, heartbeat_rate_seconds: 1]
      )

    vm = vm()
    :ok = VM.call(vm, Holder, :keep, [options])
    VM.call(vm, Holder, :next, [@old], scaled(60_000))
    assert VM.call(vm, Holder, :settle, [:ack, [[sync: true]]], scaled(30_000)) == :ok
    :ok = VM.call(vm, Holder, :looked, [], scaled(30_000))

    :ok = VM.signal(vm, :stop)
    anew(cluster, topic, [@old + 20], [])
    :ok = VM.signal(vm, :cont)

    VM.call(vm, Holder, :next, [20], scaled(60_000))
    noticed? = fn -> VM.tail(vm) =~ "was deleted and made anew" end

    eventually(fn ->
      noticed?.() or committed(cluster, options[:group_id], topic, 1) == [{0, @old + 20}]
    end)

    TopicLife.grow(cluster, other, 2)
    values = for {value, _} <- numbers("new #{topic}", [@old + 20]), do: value
    VM.call(vm, Holder, :until, [values], scaled(60_000))
    assert noticed?.()
    VM.kill(vm)
  end

  defp anew(cluster, topic, counts, config) do
    :ok = Topics.delete_topic(topic, hosts: cluster.hosts)

    eventually(fn ->
      :ok == Topics.create_topic(topic, length(counts), hosts: cluster.hosts, config: config)
    end)

    publish(cluster, topic, numbers("new #{topic}", counts))
  end

  defp numbers(name, counts) do
    for {count, p} <- Enum.with_index(counts),
        i <- 1..count,
        do: {"#{name} #{p} #{i}", partition: p}
  end

  # What looks like another topic at first sight, by its times, is not one.
  @hour 3_600_000
  test "the same topic is the same, whatever times its messages bear, and whatever is deleted of it",
       %{cluster: cluster} do
    now = System.os_time(:millisecond)

    odd = [
      equal: fn _i -> now end,
      ancient: fn _i -> 1 end,
      backwards: fn i -> now - 2 * i * @hour end,
      future_first: fn i -> if i == 0, do: now + 24 * 365 * @hour, else: now + i end,
      future_last: fn i -> if i == 9, do: now + 24 * 365 * @hour, else: now + i end,
      mixed: fn i -> now + rem(i * 7, 10) * 1_000 end,
      deleted: fn i -> now + i end
    ]

    anytime = [{"message.timestamp.after.max.ms", "9223372036854775807"}, {"retention.ms", "-1"}]
    topic = queue(cluster, length(odd), "odd", config: anytime)
    stamped = queue(cluster, 1, "stamped", config: [{"message.timestamp.type", "LogAppendTime"}])

    publish_ten = fn from ->
      for {{_name, time}, p} <- Enum.with_index(odd), i <- from..(from + 9) do
        {"#{p} #{i}", partition: p, timestamp: time.(i)}
      end
      |> then(&publish(cluster, topic, &1))

      publish(cluster, stamped, for(i <- from..(from + 9), do: "stamped #{i}"))
    end

    Scene.listen()
    consumer = consumer(options(cluster, [topic, stamped]))
    eventually(fn -> Kmq.info(consumer).total.assigned == length(odd) + 1 end, 20_000)
    all = 10 * (length(odd) + 1)

    for from <- [0, 10] do
      publish_ten.(from)
      messages = pull(consumer, all, 20_000)
      assert Kmq.ack(messages, sync: true) == :ok
    end

    looked(consumer, 2)

    TopicLife.delete_records(cluster, topic, length(odd) - 1, 20)
    publish_ten.(20)
    messages = pull(consumer, all, 20_000)
    assert Kmq.ack(messages, sync: true) == :ok
    looked(consumer, 2)
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    refute_received {[:kmq, :offset_reset], _, %{reason: :made_anew}}
    refute_received {[:kmq, :offset_reset], _, %{reason: :out_of_range}}
  end

  # Twice: the first may have been under way already.
  defp looked(consumer, times) do
    handle = GenServer.call(consumer, :handle)
    before = Kmq.Handle.info(handle).looks
    eventually(fn -> assert Kmq.Handle.info(handle).looks >= before + times end, 20_000)
  end

  test "deleted while it is read: each of six consumers closes in time", %{cluster: cluster} do
    topic = queue(cluster, 6)
    options = options(cluster, topic, kafka_config: @quick)
    assert VM.call(vm(), TopicLife, :six, [cluster, topic, options], scaled(100_000)) == :ok
  end

  test "a partition that was empty at the first start begins where it was then", %{
    cluster: cluster
  } do
    topic = queue(cluster, 3)
    options = options(cluster, topic, offset_reset_policy: :latest)
    Scene.listen()
    publish(cluster, topic, for(i <- 1..5, do: {"before #{i}", partition: 0}))
    first = start_supervised!({Consumer, options})
    eventually(fn -> length(assigned(first)) == 3 end, 20_000)

    eventually(
      fn -> committed(cluster, options[:group_id], topic, 3) == [{0, 5}, {1, 0}, {2, 0}] end,
      10_000
    )

    # It says where it began, and that nobody had been there before.
    for {partition, to} <- [{0, 5}, {1, 0}, {2, 0}] do
      assert_received {[:kmq, :offset_reset], %{to: ^to},
                       %{topic: ^topic, partition: ^partition, reason: :no_commit}}
    end

    stop_supervised!(Consumer)
    publish(cluster, topic, for(i <- 1..10, p <- 1..2, do: {"#{i}", partition: p}))
    second = consumer(options)
    messages = pull(second, 20)
    assert Enum.frequencies(Enum.map(messages, & &1.partition)) == %{1 => 10, 2 => 10}
    assert Kmq.ack(messages) == :ok
    refute_received {[:kmq, :offset_reset], _, _}
  end
end
