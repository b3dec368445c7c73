defmodule Kmq.BroadwayTest do
  # The producer under the real thing, unchanged: runs where Broadway is loaded (ERL_LIBS), and says so where it is not.
  use Kmq.Test.ClusterCase, on: :sandbox

  @moduletag :broadway
  @moduletag timeout: 60_000
  @compile {:no_warn_undefined, [Broadway, Broadway.Message]}

  # Brought by ERL_LIBS it is no dependency of the project, and nobody has started it.
  setup_all do
    {:ok, _} = Application.ensure_all_started(:broadway)
    :ok
  end

  defmodule Pipeline do
    @compile {:no_warn_undefined, Broadway.Message}

    def handle_message(_processor, message, %{test: test} = context) do
      send(test, {:message, message})

      case {message.data, message.metadata.attempt} do
        {"raise", 1} ->
          raise "oh"

        {"reject", _} ->
          raise Kmq.Reject, "not ours"

        {"retry", 1} ->
          Broadway.Message.failed(message, {:retry, 10})

        {"configured", 1} ->
          message
          |> Broadway.Message.configure_ack(on_failure: {:retry, [20]})
          |> Broadway.Message.failed("x")

        {"kill", 1} ->
          Process.exit(self(), :kill)

        {"once", _} ->
          place = {message.metadata.topic, message.metadata.partition}

          if :persistent_term.get(place, nil) == nil do
            :persistent_term.put(place, :killed)
            Process.exit(self(), :kill)
          end

          message

        _ ->
          if context[:batch], do: Broadway.Message.put_batcher(message, :default), else: message
      end
    end

    def handle_batch(_batcher, messages, info, %{test: test}) do
      send(test, {:batch, Enum.map(messages, & &1.data), info.size})

      Enum.map(messages, fn message ->
        if message.data == "7" and message.metadata.attempt == 1,
          do: Broadway.Message.failed(message, "half"),
          else: message
      end)
    end

    def handle_failed(messages, %{test: test}) do
      for message <- messages, do: send(test, {:failed, message.data})
      messages
    end
  end

  defp start(options, extra \\ []) do
    name = :"broadway_#{System.unique_integer([:positive])}"
    {context, extra} = Keyword.pop(extra, :context, %{})

    {:ok, pid} =
      Broadway.start_link(
        Pipeline,
        Keyword.merge(
          [
            name: name,
            context: Map.put(context, :test, self()),
            max_restarts: 100,
            producer: [module: {OffBroadway.Kmq.Producer, options}, concurrency: 1],
            processors: [default: [concurrency: 4]]
          ],
          extra
        )
      )

    Process.unlink(pid)
    on_exit(name, fn -> if Process.alive?(pid), do: Broadway.stop(name) end)
    name
  end

  defp messages(n) do
    for _ <- 1..n do
      assert_receive {:message, message}, scaled(15_000)
      message
    end
  end

  test "messages are Broadway's, each comes once, a stop leaves nothing behind", %{
    cluster: cluster
  } do
    topic = queue(cluster, 4)
    publish(cluster, topic, for(i <- 1..1_000, do: {"#{i}", partition: rem(i, 4), key: "k"}))
    name = start(options(cluster, topic))
    messages = messages(1_000)
    assert Enum.all?(messages, &is_struct(&1, Broadway.Message))
    assert messages |> Enum.map(& &1.data) |> Enum.uniq() |> length() == 1_000

    assert %{
             topic: ^topic,
             partition: _,
             offset: _,
             key: "k",
             ts: _,
             headers: [],
             attempt: 1,
             deliveries: 1,
             id: _
           } = hd(messages).metadata

    assert Broadway.stop(name) == :ok
    refute_received {:message, _}
  end

  test "failures: by reason, by configure_ack, by a raise, a rejection, a killed processor", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(ok raise reject retry configured))
    name = start(options(cluster, topic))
    all = messages(5 + 3)
    again = for %{metadata: %{attempt: 2}} = message <- all, do: message.data
    assert Enum.sort(again) == ~w(configured raise retry)

    assert [%{value: "reject", headers: headers}] =
             await_records(cluster, topic <> "__undelivered", 1, 1, 20_000)

    assert {"kmq-error", "not ours"} in headers
    assert_received {:failed, "reject"}
    assert Broadway.stop(name) == :ok
  end

  test "a killed processor: what it had comes again, the rest goes on", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(1 2 kill 3 4))

    name =
      start(options(cluster, topic, max_processing_time: 1_000),
        processors: [default: [concurrency: 1, max_demand: 1]]
      )

    all = messages(6)
    assert for(%{metadata: %{attempt: 2}} = message <- all, do: message.data) == ["kill"]
    assert Enum.sort(Enum.uniq(Enum.map(all, & &1.data))) == ~w(1 2 3 4 kill)
    assert Broadway.stop(name) == :ok
  end

  defp committed(cluster, options, partitions) do
    [topic] = options[:topics]
    Kmq.Test.Checker.committed(cluster.hosts, options[:group_id], topic, partitions)
  end

  test "by offsets, a killed processor: what it had comes again, and the commit goes on", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(v <- ~w(1 2 once 3 4), p <- [0, 1], do: {v, partition: p}))
    options = options(cluster, topic, delivery: :offsets, commit_interval: 20)
    name = start(options, processors: [default: [concurrency: 2, max_demand: 2]])
    eventually(fn -> assert committed(cluster, options, 2) == %{0 => 5, 1 => 5} end, 30_000)
    all = for %{data: data} <- messages(12), do: data
    assert Enum.sort(Enum.uniq(all)) == ~w(1 2 3 4 once)
    assert Enum.count(all, &(&1 == "once")) >= 4
    assert Broadway.stop(name) == :ok
  end

  test "by offsets, batches: only what failed is a dead letter, all are done", %{cluster: cluster} do
    for {on_failure, dead} <- [{[], ["7"]}, {[on_failure: :ack], []}] do
      topic = queue(cluster, 2)
      publish(cluster, topic, for(i <- 1..20, do: {"#{i}", partition: rem(i, 2)}))
      options = options(cluster, topic, [delivery: :offsets, commit_interval: 20] ++ on_failure)

      name =
        start(options,
          context: %{batch: true},
          batchers: [default: [concurrency: 2, batch_size: 10, batch_timeout: 100]]
        )

      eventually(fn -> assert committed(cluster, options, 2) == %{0 => 10, 1 => 10} end, 20_000)
      assert Broadway.stop(name) == :ok
      letters = Kmq.DeadLetters.stream(topic, hosts: cluster.hosts)
      assert Enum.map(letters, & &1.value) == dead
      assert for(%{data: data} <- messages(20), do: data) |> Enum.uniq() |> length() == 20
    end
  end

  test "batches: half of one fails, only that comes again", %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..20, do: {"#{i}", partition: rem(i, 2)}))

    name =
      start(options(cluster, topic),
        context: %{batch: true},
        batchers: [default: [concurrency: 1, batch_size: 10, batch_timeout: 100]]
      )

    all = messages(21)
    assert for(%{metadata: %{attempt: 2}} = message <- all, do: message.data) == ["7"]
    assert Broadway.stop(name) == :ok
  end

  test "rate limiting and several producers", %{cluster: cluster} do
    topic = queue(cluster, 4)
    publish(cluster, topic, for(i <- 1..200, do: {"#{i}", partition: rem(i, 4)}))
    options = options(cluster, topic)

    name =
      start(options,
        producer: [
          module: {OffBroadway.Kmq.Producer, options},
          concurrency: 2,
          rate_limiting: [allowed_messages: 100, interval: 200]
        ]
      )

    assert messages(200) |> Enum.map(& &1.data) |> Enum.uniq() |> length() == 200
    assert Broadway.stop(name) == :ok
    refute_received {:message, _}
  end

  test "rate limiting with an order: in order, and none is lost", %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..200, do: {"#{i}", partition: rem(i, 2)}))
    options = options(cluster, topic, ordering: :partition)

    name =
      start(options,
        producer: [
          module: {OffBroadway.Kmq.Producer, options},
          concurrency: 1,
          rate_limiting: [allowed_messages: 50, interval: 100]
        ],
        processors: [default: [concurrency: 2, max_demand: 4]]
      )

    all = messages(200)

    for partition <- 0..1 do
      offsets = for %{metadata: %{partition: ^partition} = metadata} <- all, do: metadata.offset
      assert offsets == Enum.to_list(0..99)
    end

    assert Broadway.stop(name) == :ok
  end

  test "test messages go through, with an order or without, whatever their metadata", %{
    cluster: cluster
  } do
    for ordering <- [:none, :partition, :key],
        batchers <- [[], [default: [concurrency: 2, batch_size: 2]]] do
      topic = queue(cluster, 1)

      name =
        start(options(cluster, topic, ordering: ordering),
          context: %{batch: batchers != []},
          processors: [default: [concurrency: 3, max_demand: 2]],
          batchers: batchers
        )

      for metadata <- [
            %{},
            %{topic: topic, partition: 0, offset: 1, key: "k", ts: 1, headers: [], attempt: 1},
            %{topic: topic, partition: 99, offset: 1, key: nil, attempt: 1},
            %{topic: "other", key: 7, attempt: 1}
          ] do
        metadata = Map.put_new(metadata, :attempt, 1)
        ref = Broadway.test_message(name, "one", metadata: metadata)
        assert_receive {:ack, ^ref, [%{data: "one"}], []}, scaled(5_000)
        ref = Broadway.test_batch(name, ~w(a b c d e f), metadata: metadata, batch_mode: :flush)
        assert acked(ref, 6) == ~w(a b c d e f)
      end

      # What comes from Kafka still does.
      publish(cluster, topic, ["real"])
      assert_receive {:message, %{data: "real"}}, scaled(15_000)
      assert Broadway.stop(name) == :ok
    end
  end

  defp acked(ref, n, acc \\ [])
  defp acked(_ref, n, acc) when length(acc) >= n, do: Enum.sort(acc)

  defp acked(ref, n, acc) do
    assert_receive {:ack, ^ref, successful, []}, scaled(5_000)
    acked(ref, n, acc ++ Enum.map(successful, & &1.data))
  end

  test "a partition_by that would break the order is start_link's error", %{cluster: cluster} do
    Process.flag(:trap_exit, true)
    producer = {OffBroadway.Kmq.Producer, options(cluster, "q", ordering: :key)}

    for where <- [[], [processors: [default: [partition_by: fn _ -> 0 end]]]] do
      own = if where == [], do: [partition_by: fn _ -> 0 end], else: []

      assert {:error,
              {%ArgumentError{message: "the option :partition_by of processors :default " <> _},
               _}} =
               Broadway.start_link(
                 Pipeline,
                 Keyword.merge(
                   [name: :broadway_own, producer: [module: producer], processors: [default: []]],
                   where ++ own
                 )
               )
    end
  end

  test "bad options are start_link's error", %{cluster: cluster} do
    Process.flag(:trap_exit, true)
    producer = {OffBroadway.Kmq.Producer, options(cluster, "q", leese: 1)}

    assert {:error, {%ArgumentError{message: "unknown option :leese, did you mean :lease?"}, _}} =
             Broadway.start_link(Pipeline,
               name: :broadway_bad,
               producer: [module: producer],
               processors: [default: []]
             )
  end
end
