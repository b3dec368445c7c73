defmodule Kmq.Integration.TopicsTest do
  # What is wrong at the start: an error that names the option or the topic and says what to do, in bounded time; and
  # nothing is made by asking, on a broker that makes topics by itself (auto.create.topics.enable is Kafka's default).
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog, only: [capture_log: 1]
  alias Kmq.{Consumer, Error, Publisher, StageHost, Topics, Tracker}
  alias Kmq.Test.{Kafka, TopicLife}

  @bounded_us 20_000_000

  # Every way to start with these options: each must give the same error.
  defp refused(options) do
    {us, errors} =
      :timer.tc(fn ->
        Process.flag(:trap_exit, true)
        {:error, consumer} = Consumer.start_link(options)

        pipeline =
          assert_raise Error, fn ->
            StageHost.start_link(producer: {OffBroadway.Kmq.Producer, options}, handler: & &1)
          end

        {:error, checked} = Topics.check(options)

        if options[:create_topics],
          do: [consumer, pipeline],
          else: [consumer, pipeline, checked]
      end)

    assert us < 3 * @bounded_us
    assert [%Error{} = error] = Enum.uniq(errors)
    flush_exits()
    error
  end

  defp flush_exits do
    receive do
      {:EXIT, _, _} -> flush_exits()
    after
      0 -> :ok
    end
  end

  defp names(cluster) do
    {:ok, topics} = Kafka.topics(cluster.hosts)
    topics
  end

  defp mine(cluster, topic),
    do:
      for({name, n} <- names(cluster), String.starts_with?(name, topic), into: %{}, do: {name, n})

  defp create(cluster, topic, partitions, config),
    do: :ok = Topics.create_topic(topic, partitions, hosts: cluster.hosts, config: config)

  @markers [{"message.timestamp.type", "LogAppendTime"}, {"retention.ms", "172800000"}]

  test "a queue topic that does not exist is named, and not made", %{cluster: cluster} do
    topic = unique("nowhere")

    for create <- [false, true] do
      error = refused(options(cluster, topic, create_topics: create))
      assert error.reason == :topic_missing
      assert error.message =~ inspect(topic)
      assert error.message =~ ":topics"

      assert error.message =~
               "kafka-topics.sh --bootstrap-server #{cluster.hosts} --create --topic #{topic}"
    end

    # The tracker's own start, and its group.
    Process.flag(:trap_exit, true)

    assert {:error, error} =
             Tracker.start_link(
               Keyword.delete(options(cluster, topic), :fetch_config)
               |> Keyword.delete(:group_config)
             )

    assert %Error{reason: :topic_missing} = error
    assert mine(cluster, topic) == %{}
  end

  test "publishing to a topic that does not exist is refused, and does not make it", %{
    cluster: cluster
  } do
    topic = unique("nowhere")
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts)

    assert {:error, %Error{reason: :topic_missing} = error} =
             Publisher.publish(publisher, topic, "v")

    assert error.message =~ inspect(topic)

    there = queue(cluster, 1)
    typo = String.replace(there, "-", "--", global: false)
    assert {:error, error} = Publisher.publish(publisher, typo, "v")
    assert error.message =~ ~s("#{typo}" does not exist: did you mean "#{there}"?)
    error = refused(options(cluster, typo))
    assert error.message =~ "(option :topics) does not exist, did you mean #{inspect(there)}?"

    assert {:error, %Error{reason: :topic_missing}} =
             Publisher.publish_async(publisher, topic, "v")

    assert {:error, %Error{reason: :topic_missing}} =
             Publisher.publish_many(publisher, [{topic, "v"}])

    assert mine(cluster, topic) == %{}

    # It is looked for again: made meanwhile, it works.
    create(cluster, topic, 1, [])
    assert {:ok, %{partition: 0, offset: 0}} = Publisher.publish(publisher, topic, "v")
    assert Publisher.close(publisher) == :ok
  end

  test "marker and dead letter topics that do not exist are named with the commands that make them",
       %{cluster: cluster} do
    topic = queue(cluster, 3)
    options = options(cluster, topic, create_topics: false, group_id: "g")
    error = refused(options)
    assert error.reason == :marker_topic_missing
    marker = "#{topic}__g__markers"
    assert error.message =~ inspect(marker)
    assert error.message =~ "create_topics: true"

    assert error.message =~
             ~r/--create --topic #{marker} --partitions 3 .*--config message.timestamp.type=LogAppendTime/

    assert error.message =~ "--create --topic #{topic}__undelivered --partitions 3"
    assert mine(cluster, topic) == %{topic => 3}

    # The commands are the truth: with what they say, it starts.
    for [_, name, partitions, settings] <-
          Regex.scan(
            ~r/--create --topic (\S+) --partitions (\d+) --replication-factor \d+(.*)/,
            error.message
          ) do
      config =
        for [_, key, value] <- Regex.scan(~r/--config (\S+?)=(\S+)/, settings), do: {key, value}

      create(cluster, name, String.to_integer(partitions), config)
    end

    assert Topics.check(options) == {:ok, %{topic => 3}}

    # Only the dead letter topic is missing.
    :ok = Topics.delete_topic(topic <> "__undelivered", hosts: cluster.hosts)
    eventually(fn -> Kafka.partitions(cluster.hosts, topic <> "__undelivered") == 0 end)
    assert refused(options).reason == :dead_letter_topic_missing
  end

  test "create_topics makes them with the settings they need", %{cluster: cluster} do
    topic =
      queue(cluster, 5, "q",
        config: [{"max.message.bytes", 2_000_000}, {"retention.ms", 7_200_000}]
      )

    options = options(cluster, topic, group_id: "g", max_processing_time: 48 * 3_600_000)
    assert Topics.create(options) == {:ok, %{topic => 5}}
    marker = topic <> "__g__markers"
    dead = topic <> "__undelivered"
    assert mine(cluster, topic) == %{topic => 5, marker => 5, dead => 5}

    assert %{
             "cleanup.policy" => "delete",
             "message.timestamp.type" => "LogAppendTime",
             "min.insync.replicas" => "1",
             "retention.ms" => "691200000"
           } = settings(cluster, marker)

    assert %{
             "cleanup.policy" => "delete",
             "max.message.bytes" => "2065536",
             "retention.ms" => "7200000"
           } = settings(cluster, dead)

    # Once more: all is there.
    assert Topics.create(options) == {:ok, %{topic => 5}}
    assert Topics.check(options) == {:ok, %{topic => 5}}
  end

  defp settings(cluster, topic) do
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    {:ok, list} = :kmq_nif.admin_topic_config(admin, topic, 5_000)
    :kmq_nif.admin_close(admin)
    Map.new(list)
  end

  test "a queue topic that may delete a message before its next attempt is warned of, with the numbers",
       %{cluster: cluster} do
    topic = queue(cluster, 1, "q", config: [{"retention.ms", 3_600_000}])

    warned = fn extra ->
      options = options(cluster, topic, [group_id: "g", max_processing_time: 600_000] ++ extra)
      capture_log(fn -> assert Topics.create(options) == {:ok, %{topic => 1}} end)
    end

    log = warned.(backoff: [10, 3_000_000, 10], max_redeliveries: 2)
    assert log =~ "topic #{inspect(topic)} keeps its records for 3600000 ms only"
    assert log =~ "600000 ms (:max_processing_time)" and log =~ "3000000 ms for its next attempt"
    # what is never waited, or not so long
    refute warned.(backoff: [10, 3_000_000], max_redeliveries: 1) =~ "keeps its records"
    refute warned.(backoff: [2_900_000]) =~ "keeps its records"
    refute warned.(backoff: {:exponential, max: 86_400_000}) =~ "keeps its records"
    assert warned.(backoff: {:linear, min: 2_500_000, jitter: 0.5}) =~ "up to 3750000 ms for its"
  end

  test "a marker topic with too few partitions is refused with both numbers, or grown", %{
    cluster: cluster
  } do
    topic = queue(cluster, 4)
    marker = topic <> "__few"
    create(cluster, marker, 3, @markers)
    create(cluster, topic <> "__undelivered", 4, [])
    options = options(cluster, topic, create_topics: false, marker_topic: marker)
    error = refused(options)
    assert error.reason == :too_few_partitions
    assert error.message =~ inspect(marker)
    assert error.message =~ ":marker_topic"
    assert error.message =~ "has 3 partitions"
    assert error.message =~ "has 4"
    assert error.message =~ "--alter --topic #{marker} --partitions 4"

    assert Topics.create(options) == {:ok, %{topic => 4}}
    eventually(fn -> Kafka.partitions(cluster.hosts, marker) == 4 end)
  end

  test "a marker topic on CreateTime is refused, unless that is accepted", %{cluster: cluster} do
    topic = queue(cluster, 1)
    marker = topic <> "__create-time"
    create(cluster, marker, 1, [{"message.timestamp.type", "CreateTime"}])
    create(cluster, topic <> "__undelivered", 1, [])
    options = options(cluster, topic, create_topics: false, marker_topic: marker)
    error = refused(options)
    assert error.reason == :create_time
    assert error.message =~ inspect(marker)

    assert error.message =~
             "--entity-name #{marker} --add-config message.timestamp.type=LogAppendTime"

    assert error.message =~ "allow_create_time: true"
    assert Topics.check([allow_create_time: true] ++ options) == {:ok, %{topic => 1}}
  end

  test "compacted topics are refused: markers never, the queue unless copies go elsewhere", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    marker = topic <> "__compacted"

    create(cluster, marker, 1, [
      {"message.timestamp.type", "LogAppendTime"},
      {"cleanup.policy", "compact"}
    ])

    create(cluster, topic <> "__undelivered", 1, [])
    error = refused(options(cluster, topic, create_topics: false, marker_topic: marker))
    assert error.reason == :compacted
    assert error.message =~ inspect(marker)
    assert error.message =~ "cleanup.policy=delete"

    compacted = queue(cluster, 2, "compacted", config: [{"cleanup.policy", "compact"}])
    error = refused(options(cluster, compacted))
    assert error.reason == :compacted
    assert error.message =~ inspect(compacted)
    assert error.message =~ ":redeliver_to"
    assert mine(cluster, compacted) == %{compacted => 2}

    retries = queue(cluster, 2, "retries")
    options = options(cluster, [compacted, retries], redeliver_to: %{compacted => retries})
    assert {:ok, %{^compacted => 2, ^retries => 2}} = Topics.create(options)
  end

  test "copies of a compacted topic go to the other one, and come back with their origin", %{
    cluster: cluster
  } do
    compacted = queue(cluster, 2, "compacted", config: [{"cleanup.policy", "compact"}])
    retries = queue(cluster, 2, "retries")
    publish(cluster, compacted, [{"v", key: "k", partition: 1}])

    consumer =
      consumer(
        options(cluster, [compacted, retries],
          redeliver_to: %{compacted => retries},
          max_redeliveries: 1
        )
      )

    [message] = pull(consumer, 1)
    assert Kmq.retry(message, delay: 0) == :ok
    [again] = pull(consumer, 1)
    assert {again.topic, again.partition, again.attempt, again.id} == {retries, 1, 2, message.id}
    assert {again.key, again.value} == {"k", "v"}
    assert Kmq.retry(again, delay: 0) == :ok
    [dead] = await_records(cluster, compacted <> "__undelivered", 2, 1)
    assert {dead.partition, dead.key, dead.value} == {1, "k", "v"}
    assert length(records(cluster, compacted, 2)) == 1
  end

  test "nobody there: an error that names the hosts, within seconds" do
    # Nothing listens on the one; the other takes connections and never says anything.
    {:ok, silent} = :gen_tcp.listen(0, [:binary, active: false, ip: {127, 0, 0, 1}])
    {:ok, port} = :inet.port(silent)

    ["127.0.0.1:1", "127.0.0.1:#{port}"]
    |> Task.async_stream(
      fn hosts ->
        Process.flag(:trap_exit, true)
        options = options(%{kind: :kafka, hosts: hosts}, "orders")
        {us, result} = :timer.tc(fn -> Consumer.start_link(options) end)
        assert {:error, %Error{reason: :unreachable, retriable?: true} = error} = result
        assert error.message =~ ":hosts (#{hosts})"
        assert us < @bounded_us
      end,
      timeout: 60_000
    )
    |> Enum.each(&assert({:ok, _} = &1))

    :gen_tcp.close(silent)
  end

  test "bad options raise at once, in the words of Broadway", %{cluster: cluster} do
    good = options(cluster, "orders")

    for {change, words} <- [
          {[group_idd: "g"], ~r/unknown option :group_idd.*did you mean :group_id/},
          {[hosts: "localhost"], ~r/:hosts.*no port/},
          {[hosts: "::1:9092"], ~r/:hosts.*brackets/},
          {[topics: ["a b"]], ~r/:topics.*"a b"/},
          {[topics: []], ~r/:topics/},
          {[lease: 10], ~r/:lease.*1000/},
          {[max_redeliveries: -1], ~r/:max_redeliveries/},
          {[backoff: {:exponential, min: 10, max: 1}], ~r/:backoff.*:min/},
          {[dead_letter_topic: "orders"], ~r/:dead_letter_topic.*"orders"/},
          {[marker_topic: "orders"], ~r/:marker_topic.*"orders"/},
          {[group_id: String.duplicate("g", 240)], ~r/marker_topic/},
          {[group_id: "a group"], ~r/marker_topic/},
          {[delivery: :exactly_once],
           ~r/:delivery.*expected one of :markers, :offsets, :at_most_once/},
          {[redelivery: :exactly_once],
           ~r/:redelivery.*expected one of :idempotent, :transactional/},
          {[kafka_config: [consumer: ["group.id": "g"]]], ~r/group.id.*:group_id/}
        ] do
      options = Keyword.merge(good, change)
      assert_raise ArgumentError, words, fn -> Consumer.start_link(options) end

      assert_raise ArgumentError, words, fn ->
        StageHost.start_link(producer: {OffBroadway.Kmq.Producer, options}, handler: & &1)
      end
    end

    # A property that librdkafka does not know is named, and its value is not shown.
    options = Keyword.merge(good, kafka_config: [common: ["no.such.property": "secret-7"]])
    error = assert_raise ArgumentError, fn -> Consumer.start_link(options) end
    assert error.message =~ "no.such.property"
    refute error.message =~ "secret-7"
  end

  @quick [common: ["topic.metadata.refresh.interval.ms": "1000"]]

  test "a queue topic that grows under its consumer: the marker topic grows with it", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    consumer = consumer(options(cluster, topic, kafka_config: @quick))
    publish(cluster, topic, ["0"])
    assert [%{value: "0"} = first] = pull(consumer, 1)
    :ok = Kmq.ack(first)

    TopicLife.grow(cluster, topic, 3)
    publish(cluster, topic, for(p <- 1..2, do: {"#{p}", partition: p}))
    messages = pull(consumer, 2, 40_000)
    assert Enum.sort(Enum.map(messages, &{&1.partition, &1.value})) == [{1, "1"}, {2, "2"}]
    :ok = Kmq.ack(messages)
  end

  test "where it may not be grown, its partitions wait, and it is said until it has grown", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    options = options(cluster, topic, kafka_config: @quick)
    {:ok, _} = Topics.create(options)
    consumer = consumer(Keyword.put(options, :create_topics, false))
    publish(cluster, topic, ["0"])
    assert [first] = pull(consumer, 1)
    :ok = Kmq.ack(first)
    markers = Topics.marker_topic(topic, options[:group_id])

    log =
      ExUnit.CaptureLog.capture_log(fn ->
        TopicLife.grow(cluster, topic, 2)
        publish(cluster, topic, [{"1", partition: 1}])

        eventually(fn -> waiting(consumer) > 0 end)
        assert Consumer.pull(consumer, max: 10, wait: 1_500) == []
      end)

    assert log =~ "markers are not written to #{markers}-1"
    TopicLife.grow(cluster, markers, 2)
    assert [%{value: "1"}] = pull(consumer, 1, 40_000)
  end

  defp waiting(consumer), do: Kmq.Handle.info(GenServer.call(consumer, :handle)).waiting
end
