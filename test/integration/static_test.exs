defmodule Kmq.Integration.StaticTest do
  # Static members: a restart moves nothing, and of two with the same id one stops for good.
  use Kmq.Test.ClusterCase, on: :kafka

  import ExUnit.CaptureLog

  alias Kmq.{Config, Consumer, Handle, StageHost}
  alias Kmq.Test.Scene

  @partitions 4

  defp member(cluster, topic, id, extra \\ []) do
    options(
      cluster,
      topic,
      Keyword.merge(
        [
          group_id: topic,
          group_config: [
            group_instance_id: id,
            session_timeout_seconds: 20,
            heartbeat_rate_seconds: 1
          ],
          kafka_config: [consumer: ["heartbeat.interval.ms": 200]]
        ],
        extra
      )
    )
  end

  defp open(options, index) do
    config = options |> Config.new!(:consumer) |> Config.for_index(index)
    {:ok, handle} = Handle.open(config, {__MODULE__, make_ref()})
    :ok = Handle.attach(handle, self())
    on_exit(fn -> Handle.close(handle, 5_000) end)
    handle
  end

  defp assigned(handle),
    do: Enum.sort(for %{state: :assigned} = p <- Handle.info(handle).partitions, do: p.partition)

  test "a restart within the session timeout: it gets what it had, and the others notice nothing",
       %{cluster: cluster} do
    topic = queue(cluster, @partitions)
    # Of one pipeline with three producers: the index makes them three members.
    options = member(cluster, topic, "shop")
    others = for index <- 1..2, do: open(options, index)
    first = open(options, 0)
    all = [first | others]

    eventually(
      fn ->
        shares = Enum.map(all, &assigned/1)
        [] not in shares and Enum.sort(Enum.concat(shares)) == Enum.to_list(0..(@partitions - 1))
      end,
      20_000
    )

    mine = assigned(first)
    epochs = Enum.map(others, &Handle.info(&1).epoch)

    assert Handle.close(first, 10_000) == :ok
    publish(cluster, topic, for(p <- 0..(@partitions - 1), do: {"#{p}", partition: p}))
    again = open(options, 0)
    eventually(fn -> assigned(again) == mine end, 15_000)
    messages = eventually(fn -> with([] <- Handle.take(again, 10), do: nil) end, 10_000)

    for {slot, _, _, records} <- messages,
        do: Handle.settle(again, :ack, Enum.map(records, &{slot, elem(&1, 0)}))

    assert Enum.map(others, &Handle.info(&1).epoch) == epochs
  end

  test "of two with the same id the one that was there stops: said once, and it does not come back",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    test = self()
    Scene.listen()
    publish(cluster, topic, ["in work"])

    handler = fn message ->
      send(test, {:at_work, self()})

      receive do
        :go -> message
      end
    end

    {:ok, host} =
      StageHost.start_link(
        producer: {OffBroadway.Kmq.Producer, member(cluster, topic, "same")},
        handler: handler,
        concurrency: 1,
        max_demand: 1
      )

    assert_receive {:at_work, worker}, scaled(20_000)

    log =
      capture_log(fn ->
        consumer = consumer(member(cluster, topic, "same"))
        assert_receive {[:kmq, :fenced], %{count: 1}, %{group: ^topic}}, scaled(20_000)

        # What is in work is acknowledged; then its handle is closed.
        send(worker, :go)
        assert_receive {[:kmq, :ack], %{count: 1}, _}, scaled(10_000)
        eventually(fn -> :kmq_nif.live().consumers == 1 end, 20_000)

        # The pipeline lives, idle, and the other one has its place.
        values = for i <- 1..20, do: "#{i}"
        publish(cluster, topic, values)
        messages = pull(consumer, 20, 20_000)
        assert Enum.map(messages, & &1.value) == values
        assert Enum.all?(messages, &(&1.attempt == 1))
        :ok = Kmq.ack(messages)
        [stage] = StageHost.stages(host)
        assert %{inner: %{handle: nil}} = :sys.get_state(stage)
        StageHost.stop(host)
      end)

    assert log =~
             "another member has the same group_instance_id; this consumer stops, and stays stopped"

    refute_received {[:kmq, :fenced], _, _}
    refute_received {:at_work, _}
  end

  test "a pull consumer that was fenced says so to whoever pulls", %{cluster: cluster} do
    topic = queue(cluster, 1)
    first = consumer(member(cluster, topic, "same"))
    eventually(fn -> length(assigned(GenServer.call(first, :handle))) == 1 end, 20_000)
    waiting = Task.async(fn -> catch_error(Consumer.pull(first, wait: 60_000)) end)
    second = consumer(member(cluster, topic, "same"))
    assert %Kmq.Error{reason: :fenced_instance_id} = Task.await(waiting, scaled(20_000))
    assert_raise Kmq.Error, fn -> Consumer.pull(first) end
    publish(cluster, topic, ["v"])
    assert [message] = pull(second, 1)
    assert Kmq.ack(message) == :ok
  end

  for delivery <- [:markers, :offsets] do
    test "a fenced one has no partitions any more, and confirms nothing that comes again (#{delivery})",
         %{cluster: cluster} do
      topic = queue(cluster, 1)

      # No commit comes by itself.
      options =
        member(cluster, topic, "same", delivery: unquote(delivery), commit_interval: 600_000)

      first = consumer(options)
      {covered, uncovered} = ahead_of_commit(cluster, topic, first, [])
      n = length(covered)
      second = consumer(options)
      assert_raise Kmq.Error, fn -> Consumer.pull(first, wait: scaled(20_000)) end

      # What is in work may be finished; nothing else is its own.
      states = for row <- Kmq.info(first).partitions, do: row.state
      assert states in [[:released], []]
      assert Kmq.info(first).total.assigned == 0
      assert {:error, %Kmq.Error{reason: :not_assigned}} = Kmq.pause(first, {topic, 0})

      if unquote(delivery) == :markers do
        assert Kmq.ack(covered, sync: true) == :ok
        assert Kmq.ack(uncovered, sync: true) == {:error, :late}
        # It is said what is true: it comes again, and what was confirmed does not.
        assert [%{offset: ^n} = again] = pull(second, 1, 20_000)
        assert Kmq.ack(again, sync: true) == :ok
        assert Consumer.pull(second, wait: 500) == []
      else
        assert {:error, reason} = Kmq.ack(uncovered, sync: true)
        assert reason in [:late, :closed]
        messages = pull(second, n + 1, 20_000)
        assert Enum.map(messages, & &1.offset) == Enum.to_list(0..n)
        assert Kmq.ack(messages, sync: true) == :ok
      end
    end
  end

  # For a while after an assignment each hand-out is committed at once, with markers.
  defp ahead_of_commit(cluster, topic, consumer, covered) do
    n = length(covered)
    publish(cluster, topic, ["#{n}"])
    [message] = pull(consumer, 1, 20_000)

    covered? =
      try do
        eventually(fn -> committed(cluster, topic, topic, 1) == [{0, n + 1}] end, 500)
      rescue
        ExUnit.AssertionError -> false
      end

    if covered?,
      do: ahead_of_commit(cluster, topic, consumer, covered ++ [message]),
      else: {covered, message}
  end
end
