defmodule Kmq.Integration.DeliveryTest do
  # :offsets and :at_most_once on real Kafka: where the commit stands, what dead letters look like and wait for, what a pipeline does
  # with what fails. What each action comes to is in Kmq.Sandbox.DeliveryTest, deaths are in Kmq.DeliveryCrashTest.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog

  alias Kmq.{Consumer, DeadLetters, StageHost, Telemetry, Topics}
  alias Kmq.Test.{BrokerAdmin, Checker}

  defmodule Backend do
    def execute(event, measurements, metadata) do
      pid = Process.whereis(:delivery_test)
      pid && send(pid, {event, measurements, metadata})
    end
  end

  setup do
    Process.register(self(), :delivery_test)
    Telemetry.put_backend(Backend)
    on_exit(fn -> Telemetry.put_backend(nil) end)
  end

  defp committed(cluster, options, partitions \\ 1) do
    [topic] = options[:topics]
    Checker.committed(cluster.hosts, options[:group_id], topic, partitions)
  end

  defp letters(cluster, topic),
    do: topic |> DeadLetters.stream(hosts: cluster.hosts) |> Enum.to_list()

  # ---- :offsets

  test "the commit stands at the lowest message that is not settled; a partition that is full stops, the other goes on",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 0..99, do: {"#{i}", partition: rem(i, 2)}))

    options = options(cluster, topic, delivery: :offsets, max_in_flight: 20, commit_interval: 20)

    consumer = consumer(options)
    first = pull(consumer, 40)
    assert Consumer.pull(consumer, max: 100, wait: 200) == []
    [oldest | others] = first |> Enum.filter(&(&1.partition == 0)) |> Enum.sort_by(& &1.offset)
    assert {oldest.offset, length(others)} == {0, 19}

    # Out of order, all but the lowest: partition 0 goes on by what is settled, its commit does not.
    assert Kmq.ack(Enum.shuffle(others), sync: true) == :ok
    assert committed(cluster, options, 2)[0] == 0
    ack_all = fn messages -> Enum.each(Enum.shuffle(messages), &(:ok = Kmq.ack(&1))) end
    ack_all.(Enum.filter(first, &(&1.partition == 1)))

    pull_until(consumer, fn messages ->
      ack_all.(messages -- Process.get(:acked, []))
      Process.put(:acked, messages)
      length(messages) == 60
    end)

    eventually(fn -> assert committed(cluster, options, 2) == %{0 => 0, 1 => 50} end)
    assert Kmq.ack(oldest, sync: true) == :ok
    assert committed(cluster, options, 2) == %{0 => 50, 1 => 50}
    assert Kmq.ack(oldest) == {:error, :unknown}

    # There is no marker topic, and nobody asked for one.
    {:ok, all} = Kmq.Test.Kafka.topics(cluster.hosts)
    assert [_, _] = for({name, _} <- all, String.starts_with?(name, topic), do: name)
  end

  test "no topic is needed but a dead letter topic, where messages go to it for certain; a compacted queue will do",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 2, "q", config: [{"cleanup.policy", "compact"}])
    options = options(cluster, topic, delivery: :offsets, create_topics: false)

    mine = fn ->
      {:ok, all} = Kmq.Test.Kafka.topics(cluster.hosts)
      Enum.sort(for {name, _} <- all, String.starts_with?(name, topic), do: name)
    end

    assert {:error, error} = Topics.check(options)
    assert error.reason == :dead_letter_topic_missing
    assert error.message =~ "kafka-topics.sh"
    refute error.message =~ "markers"
    assert Topics.check(options ++ [on_failure: :ack]) == {:ok, %{topic => 2}}
    assert Topics.check(Keyword.put(options, :delivery, :at_most_once)) == {:ok, %{topic => 2}}
    consumer = consumer(options)
    publish(cluster, topic, [{"a", key: "k"}])
    assert Kmq.ack(pull(consumer, 1), sync: true) == :ok
    assert mine.() == [topic]

    assert Topics.create(options) == {:ok, %{topic => 2}}
    assert mine.() == [topic, topic <> "__undelivered"]
    assert Topics.check(options) == {:ok, %{topic => 2}}
  end

  test "a dead letter is the tracker's, byte for byte, also when the handler has changed its message",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)

    headers =
      [{"a", "1"}, {"a", nil}, {"kmq-redelivery-count", <<2>>}, {"b", <<0, 255>>}] ++
        [{"kmq-deliveries", "7"}, {"kmq-cause", "timeout"}, {"kmq-origin", "elsewhere/0/3/4"}]

    publish(cluster, topic, [
      {"plain", key: "k"},
      {nil, key: ""},
      {"copied", key: nil, headers: headers},
      {String.duplicate("x", 20_000), key: <<0, 1>>, headers: [{"h", ""}]}
    ])

    found =
      for delivery <- [:markers, :offsets, :at_most_once] do
        options =
          options(cluster, topic,
            delivery: delivery,
            dead_letter_topic: "#{topic}-#{delivery}",
            group_id: "g"
          )
          |> Keyword.put(:group_id, unique("g"))

        consumer = consumer(options)

        for message <- pull(consumer, 4) do
          changed = %{message | value: "changed", key: "changed", headers: [{"changed", "1"}]}
          assert Kmq.reject(changed, "no such customer") == :ok
        end

        letters =
          eventually(
            fn ->
              letters =
                topic
                |> DeadLetters.stream(
                  hosts: cluster.hosts,
                  dead_letter_topic: "#{topic}-#{delivery}"
                )
                |> Enum.sort_by(& &1.value)

              assert length(letters) == 4
              letters
            end,
            15_000
          )

        Consumer.stop(consumer)

        for letter <- letters do
          assert {"kmq-group", options[:group_id]} in letter.headers
          same = List.keyreplace(letter.headers, "kmq-group", 0, {"kmq-group", "its group"})
          %{letter | topic: nil, offset: nil, ts: nil, group: nil, headers: same}
        end
      end

    assert [markers, markers, markers] = found
  end

  test "what the dead letter topic does not take waits, is said, and holds its commit; the others go on",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    dead = topic <> "__undelivered"

    options =
      options(cluster, topic, delivery: :offsets, create_topics: false, commit_interval: 20)

    consumer = consumer(options)
    publish(cluster, topic, ["small", String.duplicate("x", 5_000), "good"])
    [small, large, good] = pull(consumer, 3)

    # Not there at all.
    log =
      capture_log(fn ->
        assert Kmq.reject(small, "no") == :ok
        assert Kmq.reject(small, "no") == {:error, :unknown}
        assert Kmq.ack(small) == {:error, :unknown}

        assert_receive {[:kmq, :error], %{count: 1},
                        %{error: %{reason: :dead_letter_topic_missing}}},
                       scaled(10_000)
      end)

    assert log =~ "the dead letter topic #{inspect(dead)} does not exist"
    assert log =~ "kafka-topics.sh"
    assert Kmq.ack(good) == :ok
    assert Kmq.ack(good, sync: 500) == {:error, :unknown}
    assert committed(cluster, options)[0] == 0

    # There, and stricter than one of them.
    :ok =
      Topics.create_topic(dead, 1, hosts: cluster.hosts, config: [{"max.message.bytes", "1000"}])

    eventually(fn -> assert committed(cluster, options)[0] == 1 end, 15_000)
    assert Kmq.reject(large, "too large", sync: 500) == {:error, :timeout}

    assert_receive {[:kmq, :error], _, %{error: %{reason: :msg_size_too_large}}}, scaled(15_000)
    publish(cluster, topic, ["next"])
    [next] = pull(consumer, 1)
    assert Kmq.ack(next) == :ok
    assert committed(cluster, options)[0] == 1

    :ok = BrokerAdmin.set_config(cluster.hosts, dead, [{"max.message.bytes", "1000000"}])
    eventually(fn -> assert committed(cluster, options)[0] == 4 end, 15_000)
    assert [%{value: "small"}, %{error: "too large"}] = letters(cluster, topic)
    assert_receive {[:kmq, :dead_lettered], %{count: 1}, %{cause: "rejected", topic: ^topic}}

    # And back.
    assert {:ok, %{redriven: 2}} = DeadLetters.redrive(topic, hosts: cluster.hosts)
    again = pull(consumer, 2)
    assert Enum.map(again, &{&1.id, &1.attempt}) == [{small.id, 1}, {large.id, 1}]
    assert Kmq.ack(again, sync: true) == :ok
    assert committed(cluster, options)[0] == 6
  end

  test "thousands that have expired become dead letters, and are counted done", %{
    cluster: cluster
  } do
    for delivery <- [:offsets, :at_most_once], on_expired <- [:reject, :discard] do
      topic = queue(cluster, 1)
      n = 2_000

      publish(
        cluster,
        topic,
        for(i <- 1..n, do: {"#{i}", ttl: if(rem(i, 100) == 0, do: 60_000, else: 1)})
      )

      options = options(cluster, topic, delivery: delivery, on_expired: on_expired)
      consumer = consumer(options)
      alive = pull(consumer, div(n, 100))
      assert Enum.map(alive, & &1.value) == for(i <- 1..n, rem(i, 100) == 0, do: "#{i}")
      assert Kmq.ack(alive, sync: true) == :ok
      eventually(fn -> assert committed(cluster, options)[0] == n end, 15_000)
      letters = letters(cluster, topic)
      assert length(letters) == if(on_expired == :reject, do: n - length(alive), else: 0)
      assert Enum.all?(letters, &(&1.cause == "expired" and &1.attempts == 0))
      Consumer.stop(consumer)
    end
  end

  # A group of its own, quick to notice who joins; consumers of it with so many ms for what is in work.
  defp members(cluster, topic) do
    group = unique("g")

    fn drain_timeout ->
      options(cluster, topic,
        delivery: :offsets,
        group_id: group,
        drain_timeout: drain_timeout,
        kafka_config: [consumer: ["heartbeat.interval.ms": 200]]
      )
    end
  end

  defp states(consumer) do
    %{partitions: partitions} = Kmq.Handle.info(GenServer.call(consumer, :handle))
    partitions |> Enum.map(& &1.state) |> Enum.sort()
  end

  test "a partition that is taken away waits for what is in work; what is settled then is committed",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 2)
    publish(cluster, topic, [{"a", partition: 0}, {"b", partition: 1}])
    options = members(cluster, topic)
    first = consumer(options.(60_000))
    work = pull(first, 2)
    second = consumer(options.(60_000))
    eventually(fn -> assert states(first) == [:leaving, :leaving] end, 15_000)
    # Nothing more of it is handed out meanwhile, to nobody.
    publish(cluster, topic, [{"c", partition: 0}])
    assert Consumer.pull(second, wait: 300) ++ Consumer.pull(first, wait: 300) == []
    assert Kmq.ack(work) == :ok
    eventually(fn -> assert states(second) == [:assigned] end, 15_000)
    assert committed(cluster, options.(1), 2) == %{0 => 1, 1 => 1}

    assert [%{value: "c", attempt: 1}] =
             rest =
             eventually(fn ->
               with([] <- Consumer.pull(second, []) ++ Consumer.pull(first, []), do: nil)
             end)

    assert Kmq.ack(rest) == :ok
    assert Consumer.pull(second, wait: 300) ++ Consumer.pull(first, wait: 300) == []
  end

  test "who takes longer than that is told that it is late, and the next one has the message", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, [{"a", partition: 0}, {"b", partition: 1}])
    options = members(cluster, topic)
    first = consumer(options.(1_000))
    [one, other] = work = pull(first, 2)
    second = consumer(options.(1_000))
    again = pull(second, 1) ++ pull(first, 1)
    assert Enum.sort(Enum.map(again, &{&1.value, &1.attempt})) == [{"a", 1}, {"b", 1}]
    assert {:error, late} = Kmq.ack(work)

    assert Enum.sort_by(late, &elem(&1, 0).value) ==
             Enum.sort_by([{one, :late}, {other, :late}], &elem(&1, 0).value)

    assert Kmq.reject(one, "no") == {:error, :late}
    assert committed(cluster, options.(1), 2) |> Map.values() |> Enum.max() <= 0
    assert Kmq.ack(again, sync: true) == :ok
    assert committed(cluster, options.(1), 2) == %{0 => 1, 1 => 1}

    # An end is bounded, too.
    publish(cluster, topic, [{"c", partition: 0}])
    consumers = [first, second]

    [c] =
      eventually(fn -> with [] <- Enum.flat_map(consumers, &Consumer.pull(&1, [])), do: nil end)

    log = capture_log(fn -> Enum.each(consumers, &Consumer.stop/1) end)
    assert log =~ "closes while messages are in work"
    assert Kmq.ack(c) == {:error, :closed}
    third = consumer(options.(1_000))
    assert [%{value: "c", attempt: 1}] = messages = pull(third, 1)
    assert Kmq.ack(messages) == :ok
  end

  test "a stop waits for what others have in work, not for what its caller has", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["theirs"])
    options = options(cluster, topic, delivery: :offsets, drain_timeout: 60_000)
    consumer = consumer(options)
    me = self()

    worker =
      spawn_link(fn ->
        [message] = pull(consumer, 1)
        send(me, :pulled)
        receive(do: (:ack -> send(me, {:acked, Kmq.ack(message)})))
        Process.sleep(:infinity)
      end)

    assert_receive :pulled, scaled(15_000)
    stop = Task.async(fn -> Consumer.stop(consumer) end)
    assert Task.yield(stop, 300) == nil
    send(worker, :ack)
    assert_receive {:acked, :ok}, scaled(5_000)
    assert Task.await(stop, scaled(15_000)) == :ok
    assert committed(cluster, options)[0] == 1

    publish(cluster, topic, ["mine"])
    consumer = consumer(options)
    assert [%{value: "mine"}] = pull(consumer, 1)
    assert Consumer.stop(consumer, scaled(15_000)) == :ok
    assert committed(cluster, options)[0] == 1
  end

  # ---- pipelines

  defp pipeline(options, handler, extra \\ []) do
    {:ok, host} =
      StageHost.start_link(
        [producer: {OffBroadway.Kmq.Producer, options}, handler: handler, concurrency: 2] ++ extra
      )

    host
  end

  defp handle(%{data: value} = message) do
    case value do
      "good" -> message
      "raises" -> raise "by intent"
      "throws" -> throw(:by_intent)
      "exits" -> exit(:by_intent)
      "failed" -> %{message | status: {:failed, "no"}}
      "retry" -> %{message | status: {:failed, {:retry, 5_000}}}
      "release" -> %{message | status: {:failed, :release}}
      "rejected" -> raise Kmq.Reject, "not this one"
      "discarded" -> %{message | status: {:failed, {:discard, "old"}}}
      "changed" -> %{message | data: :changed, metadata: %{}, status: {:failed, "changed"}}
    end
  end

  @fates ~w(good raises throws exits failed retry release rejected discarded changed)

  test "a pipeline: only what is good is acknowledged, and nothing hangs", %{cluster: cluster} do
    for {delivery, on_failure, dead} <- [
          {:offsets, [], @fates -- ["good", "discarded"]},
          {:offsets, [on_failure: :ack], ["rejected"]},
          {:at_most_once, [], ["rejected"]},
          {:at_most_once, [on_failure: :reject], @fates -- ["good", "discarded"]}
        ] do
      topic = queue(cluster, 2)
      publish(cluster, topic, for(v <- @fates, p <- [0, 1], do: {v, partition: p}))
      options = options(cluster, topic, [delivery: delivery] ++ on_failure)

      log =
        capture_log(fn ->
          host = pipeline(options, &handle/1)
          n = length(@fates)

          eventually(fn -> assert committed(cluster, options, 2) == %{0 => n, 1 => n} end, 20_000)
          wanted = Enum.sort(dead ++ dead)

          eventually(fn ->
            assert Enum.sort(Enum.map(letters(cluster, topic), & &1.value)) == wanted
          end)

          :ok = StageHost.stop(host)
        end)

      # What is not to be had is said, with the messages concerned.
      for action <- [:retry, :release] do
        assert log =~ "messages failed with #{inspect(action)}, which needs delivery: :markers"

        assert_received {[:kmq, :ack, :error], %{count: _},
                         %{action: ^action, reason: :unsupported, offsets: [_ | _]}}
      end

      for letter <- letters(cluster, topic),
          letter.value == "changed",
          do: assert(letter.error == "changed")
    end
  end

  test "configured for one message: what the delivery has", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b"])
    options = options(cluster, topic, delivery: :offsets, on_failure: :ack)
    me = self()

    host =
      pipeline(options, fn message ->
        {module, ref, data} = message.acknowledger

        assert_raise ArgumentError,
                     "invalid value for :on_failure option: :retry needs delivery: :markers; with delivery: :offsets nothing is " <>
                       "delivered again, so it is one of :ack, :reject, :discard",
                     fn -> module.configure(ref, data, on_failure: :retry) end

        {:ok, data} = module.configure(ref, data, on_failure: :reject, on_success: :discard)
        send(me, :configured)
        status = if message.data == "a", do: :ok, else: {:failed, "b"}
        %{message | acknowledger: {module, ref, data}, status: status}
      end)

    for _ <- 1..2, do: assert_receive(:configured, scaled(15_000))
    eventually(fn -> assert committed(cluster, options)[0] == 2 end, 15_000)
    assert [%{value: "b", error: "b"}] = letters(cluster, topic)
    :ok = StageHost.stop(host)
  end

  # ---- at most once

  test "at most once: no more is committed ahead than it may, and an end takes that back", %{
    cluster: cluster
  } do
    for start_ahead <- [1, 50] do
      topic = queue(cluster, 1)
      publish(cluster, topic, for(i <- 0..499, do: "#{i}"))
      options = options(cluster, topic, delivery: :at_most_once, start_ahead: start_ahead)
      consumer = consumer(options)

      handed =
        for _ <- 1..20, reduce: 0 do
          handed ->
            messages = Consumer.pull(consumer, max: 5, wait: scaled(15_000))

            assert Enum.map(messages, & &1.offset) ==
                     Enum.to_list(handed..(handed + length(messages) - 1))

            ahead = committed(cluster, options)[0] - handed - length(messages)
            assert ahead in 0..start_ahead
            handed + length(messages)
        end

      assert handed >= 20
      :ok = Consumer.stop(consumer)
      assert committed(cluster, options)[0] == handed
    end
  end
end
