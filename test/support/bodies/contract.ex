defmodule Kmq.Test.Bodies.Contract do
  @moduledoc false
  # What Broadway expects of a producer and a user of Broadway of a pipeline, on the stage host and on the real one (`kind`).

  use Kmq.Test.ClusterCase.Bodies

  import ExUnit.CaptureLog
  alias Kmq.Test.{BrokerAdmin, Checker, Host, Scene}

  defp tell(test, message) do
    send(test, {:handled, message.metadata})
    message
  end

  defp handled(n) do
    for _ <- 1..n//1 do
      assert_receive {:handled, metadata}, scaled(30_000)
      metadata
    end
  end

  defp rest(acc \\ []) do
    receive do
      {:handled, metadata} -> rest([metadata | acc])
    after
      0 -> acc
    end
  end

  # {what is open by the markers, what is committed}, of all partitions.
  defp open_and_committed(options) do
    {:ok, partitions} =
      options |> Keyword.take([:hosts, :topics, :group_id]) |> Kmq.Inspect.partitions()

    {Enum.sum(Enum.map(partitions, & &1.open)),
     Enum.sum(Enum.map(partitions, &(&1.committed || 0)))}
  end

  # How many markers of that kind a place has, in the format with one for each message.
  defp marked(cluster, options, partitions, kind) do
    [topic] = options[:topics]

    for %{key: <<partition::32, offset::signed-64>>, value: <<^kind, _::binary>>} <-
          records(cluster, topic <> "__#{options[:group_id]}__markers", partitions),
        # The tracker's own are of no message.
        offset >= 0,
        reduce: %{} do
      acc -> Map.update(acc, {partition, offset}, 1, &(&1 + 1))
    end
  end

  body "a stop under load ends in its time, all that was handed out is acknowledged, no marker is left open",
       context do
    stop_under_load(context, :none)
  end

  body "the same with an order", context do
    stop_under_load(context, :partition)
  end

  defp stop_under_load(%{cluster: cluster, kind: kind}, ordering) do
    topic = queue(cluster, 4)
    n = 6_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    test = self()
    options = options(cluster, topic, ordering: ordering, marker_format: :kmq)

    handler = fn message ->
      Process.sleep(1)
      tell(test, message)
    end

    host = Host.start(kind, options, handler, producers: 2, max_demand: 20, shutdown: 5_000)
    first = handled(300)
    at = System.monotonic_time(:millisecond)
    assert Host.stop(host) == :ok
    took = System.monotonic_time(:millisecond) - at
    assert took <= scaled(6_000)

    all = first ++ rest()
    assert length(all) < n
    assert Enum.all?(all, &(&1.attempt == 1))
    places = MapSet.new(all, &{&1.partition, &1.offset})
    assert MapSet.size(places) == length(all)
    started = marked(cluster, options, 4, 1)
    ended = marked(cluster, options, 4, 0)
    assert Enum.all?(places, &is_map_key(ended, &1))
    {:ok, list} = Kmq.Inspect.partitions(Keyword.take(options, [:hosts, :topics, :group_id]))
    committed = Map.new(list, &{&1.partition, &1.committed})

    # Each place below the commit was handed out and is ended, or was given back: a second START, due at once, whose copy may be ended by
    # now. What is STARTed from the commit on is the group's, and its next owner's.
    below = for {partition, to} <- committed, offset <- 0..(to - 1)//1, do: {partition, offset}
    given_back = Enum.reject(below, &(&1 in places))
    for place <- given_back, do: assert(started[place] >= 2)
    for {place, _n} <- ended, do: assert(place in places or place in given_back)
    assert Enum.all?(places, &(&1 in below))
    # A copy would come behind its successors: with an order the commit goes back instead.
    if ordering == :partition, do: assert(given_back == [])
  end

  # A stop ends the processors while batches are still worked on.
  body "a stop with messages in batchers: none of them comes again", %{
    cluster: cluster,
    kind: kind
  } do
    seed = Scene.seed()
    :rand.seed(:exsss, {seed, 5, 2})
    IO.puts(:stderr, "stop with batchers: seed #{seed}")
    test = self()

    for own <- [[delivery: :offsets], [ordering: :partition], [ordering: :key], []] do
      topic = queue(cluster, 4)

      numbers =
        &publish(cluster, topic, for(i <- &1, do: {"#{i}", partition: rem(i, 4), key: "#{i}"}))

      # Renewals that a slow machine lets lapse would be copies.
      options = options(cluster, topic, [lease: 30_000] ++ own)
      gate = :atomics.new(1, [])

      # As many consumers as messages: no processor waits for one.
      extra = [
        max_demand: 1 + :rand.uniform(9),
        batchers: [
          default: [concurrency: 24, batch_size: 4 + :rand.uniform(6), batch_timeout: 50]
        ],
        batch_handler: fn :default, messages, _info ->
          Enum.each(messages, &tell(test, &1))
          eventually(fn -> assert :atomics.get(gate, 1) == 1 end, 30_000)
          messages
        end
      ]

      numbers.(1..24)
      host = Host.start(kind, options, & &1, extra)
      first = handled(1)
      processors = Host.processors(host)
      stop = Task.async(fn -> Host.stop(host) end)
      # The real ones end behind their batchers.
      if kind == :stage_host,
        do: eventually(fn -> not Enum.any?(processors, &Process.alive?/1) end, 20_000)

      :atomics.put(gate, 1, 1)
      assert Task.await(stop, scaled(30_000)) == :ok
      first = first ++ rest()
      numbers.(25..100)
      host = Host.start(kind, options, & &1, extra)
      all = first ++ handled(100 - length(first))
      assert Host.stop(host) == :ok
      assert rest() == []
      assert all |> Enum.uniq_by(& &1.id) |> length() == 100
      assert Enum.all?(all, &(&1.attempt == 1))
    end
  end

  body "ten pipelines of a group, started and stopped at once: each message once", %{
    cluster: cluster,
    kind: kind
  } do
    topic = queue(cluster, 4)
    n = 400
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    test = self()
    options = options(cluster, topic)
    handler = &tell(test, &1)

    hosts =
      1..10
      |> Enum.map(fn _ -> Task.async(fn -> Host.launch(kind, options, handler, []) end) end)
      |> Task.await_many(scaled(20_000))

    Enum.each(hosts, &Host.watch/1)
    all = handled(n)

    hosts
    |> Enum.map(fn host -> Task.async(fn -> Host.stop(host) end) end)
    |> Task.await_many(scaled(30_000))

    all = all ++ rest()
    assert length(all) == n
    assert Enum.all?(all, &(&1.attempt == 1))
    assert open_and_committed(options) == {0, n}
  end

  body "only what went well is ended: raised, thrown, exited, failed, half a batch, acknowledged at once, configured",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 1)
    test = self()

    values =
      ~w(good raise throw exit failed half-good half-bad now configured noop raising-ack last)

    publish(cluster, topic, values)
    # One END for each message, and what failed stays open for the time of this test.
    options = options(cluster, topic, marker_format: :kmq, backoff: [600_000])

    handler = fn message ->
      case message.data do
        "raise" ->
          raise "oh"

        "throw" ->
          throw(:ball)

        "exit" ->
          exit(:gone)

        "failed" ->
          Host.failed(message, "no")

        "now" ->
          message = Host.ack_immediately(message)
          Host.failed(message, "too late to fail")

        "configured" ->
          message |> Host.configure_ack(on_failure: :ack) |> Host.failed("so what")

        "noop" ->
          Host.configure_ack(message, on_success: :noop)

        "raising-ack" ->
          Host.failed(%{message | acknowledger: {Host.Raising, :ref, nil}}, "x")

        _ ->
          message
      end
    end

    host =
      Host.start(kind, options, handler,
        concurrency: 2,
        max_demand: 1,
        batchers: [default: [concurrency: 1, batch_size: 5, batch_timeout: 500]],
        batch_handler: fn :default, messages, info ->
          send(test, {:batch, info.batch_key, info.size})

          for message <- messages do
            if message.data == "half-bad", do: Host.failed(message, "half"), else: message
          end
        end,
        handle_failed: fn messages ->
          for message <- messages, do: send(test, {:failed, message.data})
          messages
        end
      )

    producers = Host.producers(host)
    good = ~w(good half-good now configured last)

    eventually(
      fn ->
        ended =
          for %{key: <<0::32, offset::64>>, value: <<0>>} <-
                records(cluster, topic <> "__#{options[:group_id]}__markers", 1),
              do: Enum.at(values, offset)

        assert Enum.sort(ended) == Enum.sort(good)
      end,
      20_000
    )

    # Those that failed have a RETRY (a START with the new time) behind their START, those left alone only the one.
    eventually(fn ->
      starts =
        for(
          %{key: <<0::32, offset::64>>, value: <<1, _::binary>>} <-
            records(cluster, topic <> "__#{options[:group_id]}__markers", 1),
          do: Enum.at(values, offset)
        )
        |> Enum.frequencies()

      twice = for {value, 2} <- starts, do: value
      assert Enum.sort(twice) == ~w(exit failed half-bad raise throw)
    end)

    for value <- ~w(raise throw exit failed now configured raising-ack half-bad),
        do: assert_receive({:failed, ^value}, scaled(5_000))

    refute_received {:failed, _}
    assert_receive {:batch, :default, _size}
    assert Host.producers(host) == producers
    assert Host.stop(host) == :ok
  end

  body "a marker topic that refuses acknowledgements: it is said with the messages, and they are written when it takes them",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 1)
    n = 20
    publish(cluster, topic, for(i <- 1..n, do: "#{i}"))
    test = self()
    options = options(cluster, topic, ack_flush_interval: 0)
    Scene.listen()

    handler = fn message ->
      send(test, {:at, self(), message.metadata.offset})

      receive do
        :go -> tell(test, message)
      after
        scaled(30_000) -> exit(:no_go)
      end
    end

    log =
      capture_log(fn ->
        host = Host.start(kind, options, handler, concurrency: n, max_demand: 1)
        pids = for _ <- 1..n, do: assert_receive({:at, pid, _}, scaled(15_000)) && pid
        assert length(Enum.uniq(pids)) == n
        markers = topic <> "__#{options[:group_id]}__markers"
        BrokerAdmin.set_config(cluster.hosts, markers, [{"max.message.bytes", 10}])
        for pid <- pids, do: send(pid, :go)
        handled(n)
        producers = Host.producers(host)
        # Refused and written again, until the topic takes them.
        assert_receive {[:kmq, :error], _,
                        %{error: %{message: "acknowledgements are not written" <> _}}},
                       scaled(15_000)

        BrokerAdmin.set_config(cluster.hosts, markers, [{"max.message.bytes", 1_000_000}])
        eventually(fn -> assert {0, ^n} = open_and_committed(options) end, 20_000)
        assert Host.producers(host) == producers
        assert Host.stop(host) == :ok
      end)

    assert log =~
             ~r/acknowledgements are not written to #{topic}.*-0, \d+ messages from offset \d+/
  end

  body "a producer killed with messages in work: acks count, the pipeline goes on, none comes again",
       %{cluster: cluster, kind: kind} do
    for own <- [[], [delivery: :offsets, ordering: :none], [delivery: :at_most_once]] do
      topic = queue(cluster, 2)
      n = 200
      publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
      test = self()
      gate = :atomics.new(1, [])

      handler = fn message ->
        send(test, {:at, self()})
        eventually(fn -> assert :atomics.get(gate, 1) == 1 end, 30_000)
        tell(test, message)
      end

      # Renewals that a slow machine lets lapse would be copies.
      options = options(cluster, topic, [lease: 30_000] ++ own)
      Scene.listen()
      host = Host.start(kind, options, handler, concurrency: 4, max_demand: 5)
      # All of them have all that they have asked for: nothing is on its way when it ends.
      for _ <- 1..4, do: assert_receive({:at, _pid}, scaled(15_000))
      await_taken(20)
      Kmq.Telemetry.put_backend(nil)
      [producer] = Host.producers(host)
      Process.exit(producer, :kill)

      eventually(fn ->
        assert [other] = Host.producers(host) -- [producer]
        is_pid(other)
      end)

      :atomics.put(gate, 1, 1)
      all = handled(n)
      assert all |> Enum.uniq_by(& &1.id) |> length() == n
      assert Enum.all?(all, &(&1.attempt == 1))
      assert Host.stop(host) == :ok
      assert rest() == []
      committed = Checker.committed(cluster.hosts, options[:group_id], topic, 2)
      assert committed == %{0 => div(n, 2), 1 => div(n, 2)}
    end
  end

  defp await_taken(0), do: :ok

  defp await_taken(n) do
    assert_receive {[:kmq, :take], %{count: count}, _}, scaled(15_000)
    await_taken(n - count)
  end

  body "processors killed again and again while messages wait: none discarded, none lost, none late that waited",
       context do
    kill_and_kill(context, :none)
  end

  body "and killed with an order", context do
    kill_and_kill(context, :partition)
  end

  defp kill_and_kill(%{cluster: cluster, kind: kind}, ordering) do
    topic = queue(cluster, 4)
    n = if System.get_env("KMQ_LONG") == "1", do: 50_000, else: 5_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    handled = :ets.new(:handled, [:public])
    limit = 3_000

    handler = fn message ->
      :ets.insert(handled, {message.metadata.id, message.metadata.attempt})
      message
    end

    options = options(cluster, topic, ordering: ordering, max_processing_time: limit)

    log =
      capture_log(fn ->
        host = Host.start(kind, options, handler, concurrency: 4, max_demand: 1)

        for round <- 1..8 do
          # A kill when the next part is done: no time is waited for.
          eventually(fn -> assert :ets.info(handled, :size) >= div(n * round, 10) end, 30_000)
          with [pid | _] <- Enum.shuffle(Host.processors(host)), do: Process.exit(pid, :kill)
        end

        eventually(fn -> assert :ets.info(handled, :size) == n end, 40_000)
        assert Host.lost(host) == 0
        assert Host.stop(host) == :ok
      end)

    refute log =~ "discard"
    # What each of them had in its hands when it ended, with the three that end beside it.
    again = Enum.count(:ets.tab2list(handled), fn {_id, attempt} -> attempt > 1 end)
    assert again <= 8 * 4 * 2
    assert open_and_committed(options) |> elem(0) == 0
  end
end
