defmodule Kmq.Integration.BroadwayKafkaTest do
  # What users of broadway_kafka take for granted, with `delivery: :offsets, on_failure: :ack`: where a group goes on, order and commits, a
  # broker that goes away, offsets that are not there, or not one after the other. Pipelines on both hosts: Kmq.Test.Bodies.BroadwayKafka.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog

  alias Kmq.{Consumer, Telemetry}
  alias Kmq.Test.{BrokerAdmin, Checker, Filler, Host, Kafka, RawLog}

  @moduletag timeout: 120_000

  defmodule Backend do
    def execute([:kmq, :offset_reset], measurements, metadata) do
      pid = Process.whereis(:broadway_kafka_test)
      pid && send(pid, {:reset, measurements, metadata})
    end

    def execute(_event, _measurements, _metadata), do: :ok
  end

  # A node of its own: it is restarted, and compacts at once.
  setup_all do
    {:ok, kafka} = Kafka.start(config: %{"log.cleaner.backoff.ms" => 100})
    %{kafka: kafka, cluster: %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}}
  end

  setup do
    Process.register(self(), :broadway_kafka_test)
    Telemetry.put_backend(Backend)
    on_exit(fn -> Telemetry.put_backend(nil) end)
  end

  # A puller says for itself what becomes of a message, a pipeline has `on_failure: :ack`, too.
  defp as_it_was(cluster, topic, extra \\ []),
    do: options(cluster, topic, [delivery: :offsets, commit_interval: 20] ++ extra)

  defp committed(cluster, options, partitions \\ 1) do
    [topic] = options[:topics]
    Checker.committed(cluster.hosts, options[:group_id], topic, partitions)
  end

  defp values(messages), do: Enum.map(messages, & &1.value)

  defp delete_before(cluster, topic, offset) do
    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}])
    :ok = :kmq_nif.admin_delete_records(admin, topic, 0, offset, 10_000)
    :kmq_nif.admin_close(admin)
  end

  # ---- where a group goes on

  test "the same group goes on where another client has stopped, whatever it wrote beside the offset",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 0..39, do: {"#{i}", partition: rem(i, 2)}))

    members =
      for more <- [[delivery: :offsets, offset_reset_policy: :latest], []] do
        options = options(cluster, topic, more)
        group = options[:group_id]
        :ok = BrokerAdmin.commit(cluster.hosts, group, topic, [{0, 7, "+1/<0.1.0>"}, {1, 12, ""}])
        {options, consumer(options)}
      end

    for {options, consumer} <- members do
      messages = pull(consumer, 13 + 8)
      assert Consumer.pull(consumer, max: 10, wait: 200) == []

      for {partition, first} <- [{0, 7}, {1, 12}] do
        offsets = for %{partition: ^partition} = m <- messages, do: m.offset
        assert offsets == Enum.to_list(first..19)
      end

      assert Kmq.ack(messages, sync: true) == :ok
      eventually(fn -> assert committed(cluster, options, 2) == %{0 => 20, 1 => 20} end)
    end
  end

  test "a plain consumer's commits, and a plain consumer behind ours", %{cluster: cluster} do
    case System.find_executable("kcat") do
      nil ->
        IO.puts("left out: a group shared with kcat (no kcat here; Debian: apt-get install kcat)")

      kcat ->
        topic = queue(cluster, 1)
        publish(cluster, topic, for(i <- 1..30, do: "#{i}"))
        options = as_it_was(cluster, topic)

        read = fn n ->
          group = [
            "-b",
            cluster.hosts,
            "-G",
            options[:group_id],
            "-X",
            "auto.offset.reset=earliest"
          ]

          args = group ++ ["-X", "session.timeout.ms=6000", "-q", "-c", "#{n}", topic]
          {text, 0} = System.cmd(kcat, args, stderr_to_stdout: true)
          String.split(text)
        end

        assert read.(10) == for(i <- 1..10, do: "#{i}")
        assert committed(cluster, options) == %{0 => 10}
        consumer = consumer(options)
        [first | _] = messages = pull(consumer, 20)
        assert first.value == "11"
        assert Kmq.ack(Enum.take(messages, 12), sync: true) == :ok
        Consumer.stop(consumer)
        assert read.(8) == for(i <- 23..30, do: "#{i}")
    end
  end

  # ---- offsets that are not there

  # Retention overtook the group; or its commit is of an earlier topic of the same name, beyond the end of this one.
  test "out of range, in both directions: it goes on at the first message there is, and says so, whatever the policy",
       %{
         cluster: cluster
       } do
    cases =
      for policy <- [:earliest, :latest], {n, from, first} <- [{100, 10, 95}, {5, 5_000, 0}] do
        topic = queue(cluster, 1)
        publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
        options = as_it_was(cluster, topic, offset_reset_policy: policy)
        :ok = BrokerAdmin.commit(cluster.hosts, options[:group_id], topic, [{0, from, ""}])
        if first > 0, do: delete_before(cluster, topic, first)
        {topic, options, n, from, first}
      end

    log =
      capture_log(fn ->
        consumers = for {_, options, _, _, _} <- cases, do: consumer(options)

        for {consumer, {topic, options, n, from, first}} <- Enum.zip(consumers, cases) do
          messages = pull(consumer, n - first)
          assert values(messages) == for(i <- first..(n - 1), do: "#{i}")
          assert Kmq.ack(messages, sync: true) == :ok

          assert_received {:reset, %{from: ^from, to: ^first},
                           %{topic: ^topic, reason: :out_of_range}}

          eventually(fn -> assert committed(cluster, options) == %{0 => n} end)
          assert Kmq.info(consumer).total.lag == 0
        end
      end)

    for {topic, _, _, from, _} <- cases,
        do: assert(log =~ "#{topic}-0: offset #{from} is not there")
  end

  # ---- offsets that are not one after the other

  test "a commit in the middle of a compressed batch: nothing below it comes again", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)

    {:ok, publisher} =
      Kmq.Publisher.start_link(hosts: cluster.hosts, linger: 200, compression: :gzip)

    {:ok, _} = Kmq.Publisher.publish_many(publisher, for(i <- 0..199, do: {topic, "#{i}"}))
    :ok = Kmq.Publisher.close(publisher)
    options = as_it_was(cluster, topic)
    :ok = BrokerAdmin.commit(cluster.hosts, options[:group_id], topic, [{0, 77, ""}])
    consumer = consumer(options)
    messages = pull(consumer, 123)
    assert Enum.map(messages, & &1.offset) == Enum.to_list(77..199)
    assert Kmq.ack(messages, sync: true) == :ok
    assert Consumer.pull(consumer, max: 10, wait: 200) == []
  end

  defp compacted(cluster) do
    queue(cluster, 1, "compacted",
      config: [
        {"cleanup.policy", "compact"},
        {"segment.ms", "100"},
        {"min.cleanable.dirty.ratio", "0.01"}
      ]
    )
  end

  # The last segment is not compacted: each try makes another one. Last of all there is a "stop".
  defp await_compacted(cluster, topic, compacted?) do
    eventually(
      fn ->
        publish(cluster, topic, [{"end", key: "end"}])
        compacted?.()
      end,
      30_000
    )

    [_] = publish(cluster, topic, [{"stop", key: "stop"}])
  end

  defp pull_all(consumer, timeout \\ 30_000),
    do: pull_until(consumer, &(List.last(&1, %{value: nil}).value == "stop"), timeout)

  defp log_bytes(kafka, topic) do
    for file <- Path.wildcard(Path.join([Kafka.dir(kafka), "data", topic <> "-0", "*.log"])),
        {:ok, %{size: size}} <- [File.stat(file)],
        reduce: 0,
        do: (sum -> sum + size)
  end

  test "a compacted topic: acknowledged in any order, the commit passes the holes", %{
    cluster: cluster
  } do
    topic = compacted(cluster)

    key = fn
      10 -> "ten"
      i when i <= 111 -> "again and again"
      i -> "#{i}"
    end

    publish(cluster, topic, for(i <- 0..140, do: {"#{i}", key: key.(i)}))
    left = [10 | Enum.to_list(111..140)]

    await_compacted(cluster, topic, fn ->
      cluster.hosts |> RawLog.read(topic, 1) |> Enum.map(& &1.offset) |> Enum.take(31) == left
    end)

    options = as_it_was(cluster, topic)
    consumer = consumer(options)
    [ten | others] = pull_all(consumer)
    {rest, ends} = Enum.split(others, 30)
    assert [ten.offset | Enum.map(rest, & &1.offset)] == left
    for message <- Enum.shuffle(rest), do: assert(Kmq.ack(message) == :ok)
    assert Kmq.ack(ends, sync: true) == :ok
    assert committed(cluster, options)[0] <= 10
    assert Kmq.ack(ten, sync: true) == :ok
    stop = RawLog.end_offset(cluster.hosts, topic, 0)
    eventually(fn -> assert committed(cluster, options) == %{0 => stop} end)
    assert Kmq.info(consumer).total.lag == 0
  end

  @million 1_000_000

  test "a hole of a million costs no memory, and holds nothing", %{cluster: cluster, kafka: kafka} do
    topic = compacted(cluster)
    publish(cluster, topic, [{"before", key: "before"}])
    :ok = Filler.fill(cluster.hosts, topic, 0, @million, "k")
    publish(cluster, topic, [{"after", key: "after"}])
    # Of the million the last one stays.
    before = log_bytes(kafka, topic)
    await_compacted(cluster, topic, fn -> log_bytes(kafka, topic) < div(before, 10) end)

    options = as_it_was(cluster, topic, max_in_flight: 1_000)
    consumer = consumer(options)
    [before | others] = pull_all(consumer)
    assert before.value == "before"
    assert [@million, _ | _] = Enum.map(others, & &1.offset)

    native = :erlang.memory(:system)
    assert Kmq.ack(others, sync: true) == :ok
    # Only what is said about one message and one hole: the span is not counted.
    assert :erlang.memory(:system) - native < 1_048_576
    assert committed(cluster, options)[0] <= 0
    assert Kmq.info(consumer).total.open == 1
    assert Kmq.ack(before, sync: true) == :ok
    eventually(fn -> assert committed(cluster, options)[0] > @million end)
  end

  # ---- a broker that goes away

  test "the broker is killed and started again under a pipeline: the same producer goes on, in order, nothing is lost",
       %{cluster: cluster, kafka: kafka} do
    topic = queue(cluster, 4)
    n = 2_000
    publish(cluster, topic, for(i <- 0..(n - 1), do: {"#{i}", partition: rem(i, 4)}))
    seen = :ets.new(:seen, [:public, :ordered_set])
    count = :counters.new(1, [])

    # Long enough for a restart: the membership is kept, and with it what is in work.
    options =
      as_it_was(cluster, topic, on_failure: :ack, group_config: [session_timeout_seconds: 60])

    host =
      Host.start(:stage_host, options, fn message ->
        :counters.add(count, 1, 1)
        at = System.unique_integer([:monotonic])
        :ets.insert(seen, {at, message.metadata.partition, message.metadata.offset})
        Process.sleep(2)
        message
      end)

    handled = fn -> :counters.get(count, 1) end
    eventually(fn -> handled.() >= 300 end, 20_000)
    producers = Host.producers(host)
    :ok = Kafka.restart(kafka)
    ends = Map.new(0..3, &{&1, div(n, 4)})
    eventually(fn -> assert committed(cluster, options, 4) == ends end, 60_000)
    assert Host.producers(host) == producers

    for partition <- 0..3 do
      offsets = for [o] <- :ets.match(seen, {:_, partition, :"$1"}), do: o
      assert Enum.uniq(offsets) == Enum.to_list(0..(div(n, 4) - 1))
    end

    # It is as good as before.
    publish(cluster, topic, [{"more", partition: 3}])
    eventually(fn -> assert committed(cluster, options, 4)[3] == div(n, 4) + 1 end, 20_000)
    assert Host.stop(host) == :ok
  end
end
