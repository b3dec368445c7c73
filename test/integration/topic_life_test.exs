defmodule Kmq.Integration.TopicLifeTest do
  # What becomes of a topic while it is read: it grows, it is deleted, it is made anew.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Topics}
  alias Kmq.Test.{Scene, TopicLife, VM}

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
