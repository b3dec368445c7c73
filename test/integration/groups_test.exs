defmodule Kmq.Integration.GroupsTest do
  # A group refuses a member, or keeps one whatever its work does.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Test.Scene

  describe "a group that refuses a member" do
    setup do
      Scene.listen()
    end

    # The error that the telemetry tells, which is what is logged.
    defp said(name, handle) do
      assert_receive {[:kmq, :error], %{count: 1},
                      %{error: %{name: ^name} = error, handle: ^handle}},
                     scaled(20_000)

      error.message
    end

    defp assigned(consumer) do
      info = Kmq.Handle.info(GenServer.call(consumer, :handle))
      Enum.count(info.partitions, &(&1.state == :assigned))
    end

    test "for its assignor: said, and it joins when it can", %{cluster: cluster} do
      topic = queue(cluster, 2)
      options = options(cluster, topic)
      first = start_supervised!({Kmq.Consumer, options}, id: :first)
      eventually(fn -> assigned(first) == 2 end, 20_000)
      second = consumer(options ++ [assignor: :range])

      assert said("INCONSISTENT_GROUP_PROTOCOL", {:consumer, second}) ==
               "the group refuses this member: :assignor is :range here, and the others have none of these " <>
                 "(or are no consumers). Give all members of #{inspect(options[:group_id])} the same; it joins as soon as it can"

      # One that knows both gets in, beside the first as beside the second.
      third = consumer(options ++ [assignor: [:range, :roundrobin]])
      eventually(fn -> assigned(third) == 1 and assigned(first) == 1 end, 20_000)
      stop_supervised!(:first)
      eventually(fn -> assigned(second) == 1 and assigned(third) == 1 end, 30_000)
    end

    @tag :cooperative
    test "because the others give everything back and it does not", %{cluster: cluster} do
      topic = queue(cluster, 2)
      options = options(cluster, topic)
      first = start_supervised!({Kmq.Consumer, options}, id: :first)
      eventually(fn -> assigned(first) == 2 end, 20_000)
      second = consumer(options ++ [assignor: :cooperative_sticky])

      assert said("INCONSISTENT_GROUP_PROTOCOL", {:consumer, second}) =~
               ":assignor is :cooperative_sticky here"

      stop_supervised!(:first)
      eventually(fn -> assigned(second) == 2 end, 30_000)
    end

    test "for its session timeout", %{cluster: cluster} do
      topic = queue(cluster, 1)
      options = options(cluster, topic, group_config: [session_timeout_seconds: 3_600])
      consumer = consumer(options)

      assert said("INVALID_SESSION_TIMEOUT", {:consumer, consumer}) =~
               "a session timeout of 3600000 ms (:session_timeout_seconds of :group_config) is outside of what the broker allows"
    end
  end

  describe "a member" do
    # A group that has given somebody an id waits for a JoinGroup with it until a session is over.
    for {assignor, tags} <- [roundrobin: [], cooperative_sticky: [cooperative: true]] do
      for {tag, value} <- tags, do: @tag([{tag, value}])

      test "that is stopped in any moment of its joining keeps nobody waiting (#{assignor})", %{
        cluster: cluster
      } do
        topic = queue(cluster, 2)

        options =
          options(cluster, topic,
            assignor: unquote(assignor),
            group_config: [session_timeout_seconds: 300],
            kafka_config: [consumer: ["heartbeat.interval.ms": 200]]
          )

        config = Kmq.Config.new!(options, :consumer)

        open = fn ->
          {:ok, handle} = Kmq.Handle.open(config, {__MODULE__, make_ref()})
          :ok = Kmq.Handle.attach(handle, self())
          on_exit(fn -> Kmq.Handle.close(handle, 5_000) end)
          handle
        end

        assigned = fn handle ->
          Enum.count(Kmq.Handle.info(handle).partitions, &(&1.state == :assigned))
        end

        first = open.()
        eventually(fn -> assigned.(first) == 2 end, 20_000)

        for ms <- 0..80//8 do
          second = open.()
          refute_receive :not_so_soon, ms
          assert Kmq.Handle.close(second, 20_000) == :ok
        end

        third = open.()
        eventually(fn -> assigned.(first) == 1 and assigned.(third) == 1 end, 30_000)
      end
    end

    # Time in which nothing is done is what is tested: so many times max.poll.interval.ms.
    @poll_ms if System.get_env("KMQ_LONG") == "1", do: 6_000, else: scaled(2_000)
    @times 10

    defp pipeline(options, concurrency, handler) do
      {:ok, host} =
        Kmq.StageHost.start_link(
          name: {__MODULE__, make_ref()},
          producer: {OffBroadway.Kmq.Producer, options},
          concurrency: concurrency,
          max_demand: 1,
          handler: handler
        )

      [stage] = Kmq.StageHost.stages(host)
      %{inner: %{handle: handle}} = :sys.get_state(stage)
      {host, handle}
    end

    defp share(handle),
      do: Enum.count(Kmq.Handle.info(handle).partitions, &(&1.state == :assigned))

    @tag timeout: scaled(120_000) + @times * @poll_ms
    test "stays one, whatever its work does: all processors busy, or no demand at all", %{
      cluster: cluster
    } do
      topic = queue(cluster, 4)
      test = self()

      options =
        options(cluster, topic,
          kafka_config: [
            consumer: [
              "session.timeout.ms": @poll_ms,
              "max.poll.interval.ms": @poll_ms,
              "heartbeat.interval.ms": div(@poll_ms, 10)
            ]
          ],
          max_processing_time: 600_000
        )

      handler = fn message ->
        send(test, {:at_work, self(), message.data, message.metadata.attempt})
        receive(do: (:go -> message))
      end

      {host, busy} = pipeline(options, 4, handler)
      idle = consumer(options)
      idle_handle = GenServer.call(idle, :handle)
      eventually(fn -> share(busy) == 2 and share(idle_handle) == 2 end, 20_000)

      publish(cluster, topic, for(i <- 0..39, do: {"#{i}", partition: rem(i, 4)}))
      held = pull(idle, 5)

      working =
        for _ <- 1..4 do
          assert_receive {:at_work, pid, value, 1}, scaled(10_000)
          {pid, value}
        end

      epochs = fn -> {Kmq.Handle.info(busy).epoch, Kmq.Handle.info(idle_handle).epoch} end
      before = epochs.()
      Process.sleep(@times * @poll_ms)

      # Still members of the same generation, nobody has got what is another one's, acks are good.
      assert epochs.() == before
      refute_received {:at_work, _, _, _}
      assert Kmq.ack(held, sync: true) == :ok
      for {pid, _} <- working, do: send(pid, :go)
      rest = pull_rest(idle, 20 - length(held))
      assert Kmq.ack(rest) == :ok
      handled = for(_ <- 5..20, do: go()) ++ Enum.map(working, &elem(&1, 1))
      all = handled ++ Enum.map(held ++ rest, & &1.value)
      assert Enum.sort(all) == Enum.sort(for i <- 0..39, do: "#{i}")
      assert epochs.() == before
      Kmq.StageHost.stop(host)
    end

    defp pull_rest(consumer, n), do: pull(consumer, n, 20_000)

    defp go do
      assert_receive {:at_work, pid, value, 1}, scaled(10_000)
      send(pid, :go)
      value
    end

    test "whose handler is stuck for ever loses that message, and nothing else", %{
      cluster: cluster
    } do
      topic = queue(cluster, 2)
      test = self()
      options = options(cluster, topic, max_processing_time: 1_500)

      handler = fn message ->
        attempt = message.metadata.attempt
        send(test, {:handled, message.data, attempt, self()})

        if message.data == "stuck" and attempt == 1,
          do: receive(do: (:go -> message)),
          else: message
      end

      {host, handle} = pipeline(options, 3, handler)

      publish(cluster, topic, [
        {"stuck", partition: 0} | for(i <- 1..99, do: {"#{i}", partition: rem(i, 2)})
      ])

      assert_receive {:handled, "stuck", 1, stuck}, scaled(20_000)
      epoch = Kmq.Handle.info(handle).epoch
      assert_receive {:handled, "stuck", 2, _other}, scaled(20_000)
      for i <- 1..99, value = "#{i}", do: assert_receive({:handled, ^value, 1, _}, scaled(10_000))
      assert Kmq.Handle.info(handle).epoch == epoch
      send(stuck, :go)
      Kmq.StageHost.stop(host)
      refute_received {:handled, _, _, _}
    end
  end

  describe "a full partition" do
    test "takes nothing from the others: in work, and waiting", %{cluster: cluster} do
      topic = queue(cluster, 3)

      options =
        options(cluster, topic, max_in_flight: 100, start_ahead: 300, max_processing_time: 300_000)

      publish(cluster, topic, for(i <- 1..5_000, do: {"#{i}", partition: 0}))
      consumer = consumer(options)
      held = pull(consumer, 100)
      handle = GenServer.call(consumer, :handle)

      # Nothing more of the full one, however often it is asked, and the bounds hold.
      assert Kmq.Consumer.pull(consumer, max: 1_000, wait: 300) == []
      assert %{open: 100} = partition(handle, 0)

      publish(cluster, topic, for(i <- 1..10, p <- 1..2, do: {"#{i}", partition: p}))
      others = pull(consumer, 20)
      assert Enum.sort(Enum.uniq(Enum.map(others, & &1.partition))) == [1, 2]
      assert %{open: 100} = partition(handle, 0)

      # An ack makes room for one.
      assert Kmq.ack(Enum.take(held, 10)) == :ok
      assert length(pull(consumer, 10)) == 10
      assert Kmq.Consumer.pull(consumer, max: 1_000, wait: 100) == []
      assert %{open: 100} = partition(handle, 0)
    end

    test "lets a nearly empty one have its turns, also where processors are slow", %{
      cluster: cluster
    } do
      topic = queue(cluster, 2)
      test = self()
      publish(cluster, topic, for(i <- 1..20_000, do: {"#{i}", partition: 0}))
      publish(cluster, topic, for(i <- 1..10, do: {"#{i}", partition: 1}))

      handler = fn message ->
        Process.sleep(1)
        send(test, {:handled, message.metadata.partition})
        message
      end

      {host, _handle} = pipeline(options(cluster, topic), 4, handler)
      before = until_done(10, 0)
      IO.puts("\n10 messages beside 20,000: done after #{before} of these")
      assert before < 5_000
      Kmq.StageHost.stop(host)
    end

    defp until_done(0, n), do: n

    defp until_done(left, n) do
      receive do
        {:handled, 1} -> until_done(left - 1, n)
        {:handled, 0} -> until_done(left, n + 1)
      after
        scaled(20_000) -> flunk("#{left} of 10 are not handled, #{n} others are")
      end
    end

    test "and what a consumer holds is bounded: by count, by bytes", %{cluster: cluster} do
      topic = queue(cluster, 4)
      big = :binary.copy("x", 100_000)
      publish(cluster, topic, for(i <- 0..1_199, do: {big, partition: rem(i, 4)}))

      consumer = consumer(options(cluster, topic, start_ahead: 50))
      handle = GenServer.call(consumer, :handle)
      # and as many again in shares, one for each partition
      settled(handle, 50 + 4 * 13)
      taken = Kmq.Consumer.pull(consumer, max: 1, wait: 10_000)
      assert length(taken) == 1
      settled(handle, 60 + 4 * 13)
      Kmq.ack(taken)

      # 32 MiB, and what is popped at once beyond it: up to 256 messages.
      consumer = consumer(options(cluster, topic, start_ahead: 100_000))
      handle = GenServer.call(consumer, :handle)
      buffered = settled(handle, 336 + 256)
      assert buffered >= 335
    end

    # So much is fetched ahead and not more.
    defp settled(handle, most) do
      buffered = buffered(handle)
      Process.sleep(500)

      if buffered > 0 and buffered(handle) == buffered do
        assert buffered <= most
        buffered
      else
        settled(handle, most)
      end
    end

    defp buffered(handle),
      do: Enum.sum(for p <- Kmq.Handle.info(handle).partitions, do: p.buffered)

    defp partition(handle, partition),
      do: Enum.find(Kmq.Handle.info(handle).partitions, &(&1.partition == partition))
  end
end
