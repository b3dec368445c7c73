defmodule Kmq.StageHostTest do
  use ExUnit.Case, async: true

  alias Kmq.StageHost

  # A producer that has numbers, as a GenStage module would: never more than asked for.
  defmodule Numbers do
    def prepare_for_start(_module, broadway) do
      {module, options} = broadway[:producer][:module]
      {[], put_in(broadway[:producer][:module], {module, [prepared: true] ++ options})}
    end

    def init(options) do
      Process.flag(:trap_exit, true)

      send(
        options[:test],
        {:init, options[:prepared], options[:broadway][:index], options[:broadway][:name]}
      )

      {:producer,
       %{test: options[:test], next: 0, last: options[:last], draining: false, asked: 0}}
    end

    def handle_demand(n, state) do
      state = %{state | asked: state.asked + n}
      emit(state)
    end

    def handle_info(:more, state), do: emit(%{state | last: state.last + 100})
    def handle_info(_message, state), do: {:noreply, [], state}

    def prepare_for_draining(state) do
      send(state.test, :draining)
      {:noreply, [], %{state | draining: true}}
    end

    def terminate(reason, state) do
      send(state.test, {:terminated, reason})
      :ok
    end

    def ack(test, successful, failed) do
      send(test, {:ack, Enum.map(successful, & &1.data), Enum.map(failed, &{&1.data, &1.status})})
      :ok
    end

    defp emit(%{draining: true} = state), do: {:noreply, [], state}

    defp emit(state) do
      n = min(state.asked, state.last - state.next)

      events =
        for data <- Enum.take(state.next..(state.next + n), n),
            do: %{data: data, status: :ok, acknowledger: {__MODULE__, state.test, data}}

      {:noreply, events, %{state | next: state.next + n, asked: state.asked - n}}
    end
  end

  defp start(options) do
    {last, options} = Keyword.pop(options, :last)
    test = self()

    {:ok, host} =
      StageHost.start_link(
        [producer: {Numbers, test: test, last: last}, name: :numbers] ++ options
      )

    host
  end

  defp acked(n, acc \\ [])
  defp acked(n, acc) when length(acc) >= n, do: Enum.sort(acc)

  defp acked(n, acc) do
    assert_receive {:ack, successful, _failed}, 2_000
    acked(n, successful ++ acc)
  end

  defp acked_until(last, acc \\ []) do
    if last in acc do
      Enum.sort(acc)
    else
      assert_receive {:ack, successful, _failed}, 2_000
      acked_until(last, successful ++ acc)
    end
  end

  test "every event once, to workers that asked for it" do
    test = self()

    host =
      start(
        last: 1_000,
        concurrency: 3,
        max_demand: 7,
        handler: fn message ->
          send(test, {:worker, self()})
          message
        end
      )

    assert_receive {:init, true, 0, :numbers}
    assert acked(1_000) == Enum.to_list(0..999)
    assert length(StageHost.workers(host)) == 3
    assert StageHost.stop(host) == :ok
    assert_received :draining
    assert_received {:terminated, :shutdown}
  end

  test "what a handler raises, throws or exits with fails its message" do
    host =
      start(
        last: 4,
        concurrency: 1,
        max_demand: 10,
        handler: fn
          %{data: 0} -> raise "oh"
          %{data: 1} -> throw(:ball)
          %{data: 2} -> exit(:gone)
          message -> %{message | status: {:failed, :no}}
        end
      )

    assert_receive {:ack, [], failed}, 2_000

    assert [
             {0, {:error, %RuntimeError{message: "oh"}, [_ | _]}},
             {1, {:throw, :ball, [_ | _]}},
             {2, {:exit, :gone, [_ | _]}},
             {3, {:failed, :no}}
           ] = failed

    StageHost.stop(host)
  end

  test "a killed worker takes what it had with it; its demand goes to the next one" do
    test = self()

    host =
      start(
        last: 100,
        concurrency: 1,
        max_demand: 10,
        handler: fn
          %{data: 5} ->
            send(test, {:dying, self()})
            Process.exit(self(), :kill)

          message ->
            message
        end
      )

    assert_receive {:dying, pid}, 2_000

    # 0..4 were the first portion, 5..9 were in the worker's hands, 10..14 in its mailbox perhaps; from there on all is as before.
    acked = acked_until(99)
    assert acked == Enum.uniq(acked)
    assert acked -- Enum.to_list(10..14) == Enum.to_list(0..4) ++ Enum.to_list(15..99)
    refute pid in StageHost.workers(host)
    StageHost.stop(host)
  end

  test "a stop lets workers finish what they have" do
    host =
      start(
        last: 20,
        concurrency: 2,
        max_demand: 10,
        handler: fn message ->
          Process.sleep(10)
          message
        end
      )

    assert_receive {:init, _, _, _}
    assert StageHost.stop(host) == :ok
    assert_received {:terminated, :shutdown}
    {:messages, messages} = Process.info(self(), :messages)
    acked = for {:ack, successful, _} <- messages, data <- successful, do: data
    assert acked == Enum.uniq(acked)
  end

  # Partitions by the number: what its prepare_for_start would set.
  defp by(n), do: [processors: [partition_by: fn message -> rem(message.data, n) end]]

  test "by partition: one worker for each, in order; what waits for one holds up no other" do
    test = self()

    host =
      start(
        [
          last: 300,
          concurrency: 3,
          max_demand: 50,
          handler: fn message ->
            send(test, {:at, rem(message.data, 3), message.data, self()})
            message
          end
        ] ++ by(3)
      )

    all =
      for _ <- 1..300 do
        assert_receive {:at, partition, data, pid}, 2_000
        {partition, data, pid}
      end

    for partition <- 0..2 do
      mine = for {^partition, data, pid} <- all, do: {data, pid}
      assert Enum.map(mine, &elem(&1, 0)) == Enum.to_list(partition..299//3)
      assert [_] = mine |> Enum.map(&elem(&1, 1)) |> Enum.uniq()
    end

    StageHost.stop(host)
  end

  test "by partition: workers end and start together, and what waits for one is lost" do
    test = self()

    host =
      start(
        [
          last: 20,
          concurrency: 2,
          max_demand: 2,
          handler: fn
            %{data: 0} ->
              send(test, {:dying, self()})
              Process.sleep(:infinity)

            message ->
              message
          end
        ] ++ by(2)
      )

    assert_receive {:dying, pid}, 2_000
    [stage] = StageHost.stages(host)
    # The odd ones go on until the even ones have eaten the demand: this module does not count.
    waits = fn -> :sys.get_state(stage).waiting[0] end
    Kmq.Test.Eventually.eventually(fn -> waits.() != nil end)
    before = StageHost.workers(host)
    Process.exit(pid, :kill)
    Kmq.Test.Eventually.eventually(fn -> length(StageHost.workers(host) -- before) == 2 end)
    Kmq.Test.Eventually.eventually(fn -> GenServer.call(stage, :lost) > 0 end)
    StageHost.stop(host)
  end

  defmodule Greedy do
    def init(_options), do: {:producer, :ok}

    def handle_demand(n, state),
      do:
        {:noreply, for(i <- 0..n, do: %{data: i, status: :ok, acknowledger: {nil, nil, nil}}),
         state}

    def handle_info(_message, state), do: {:noreply, [], state}
    def prepare_for_draining(state), do: {:noreply, [], state}
    def terminate(_reason, _state), do: :ok
  end

  test "a module that emits more than was asked for ends its stage" do
    {:ok, host} =
      StageHost.start_link(producer: {Greedy, []}, concurrency: 1, max_demand: 5, handler: & &1)

    [stage] = StageHost.stages(host)
    monitor = Process.monitor(stage)
    Process.unlink(host)
    assert_receive {:DOWN, ^monitor, _, _, reason}, 2_000
    assert reason in [{:emitted_beyond_demand, 1}, :noproc]
    Process.exit(host, :kill)
  end

  test "batches: by size, by time, by a flush; failed by half, by a raise; handle_failed sees them" do
    test = self()

    host =
      start(
        last: 25,
        concurrency: 2,
        max_demand: 10,
        handler: fn message ->
          Map.merge(message, %{batcher: :b, batch_key: :k, batch_mode: :bulk})
        end,
        batchers: [b: [concurrency: 1, batch_size: 10, batch_timeout: 50]],
        batch_handler: fn :b, messages, info ->
          send(test, {:batch, info.trigger, info.size, info.batch_key})
          if Enum.any?(messages, &(&1.data == 24)), do: raise("oh")
          for m <- messages, do: if(m.data == 3, do: %{m | status: {:failed, :three}}, else: m)
        end,
        handle_failed: fn messages ->
          send(test, {:failed, Enum.map(messages, & &1.data)})
          messages
        end
      )

    assert_receive {:batch, :size, 10, :k}, 2_000
    assert_receive {:batch, :size, 10, :k}, 2_000
    assert_receive {:batch, :timeout, 5, :k}, 2_000
    assert_receive {:failed, [3]}, 2_000
    assert_receive {:failed, [_, _, _, _, _] = raised}, 2_000
    assert 24 in raised
    send(hd(StageHost.stages(host)), :more)
    assert_receive {:batch, :size, 10, :k}, 2_000
    # A stop gives out what is collected.
    assert StageHost.stop(host) == :ok
    assert_received {:terminated, :shutdown}
  end

  test "a stage that ends is started again, and the workers are with it" do
    test = self()
    host = start(last: 10, concurrency: 2, handler: &send_back(test, &1))
    assert_receive {:handled, _}, 2_000
    [stage] = StageHost.stages(host)
    Process.exit(stage, :kill)
    assert_receive {:init, _, 0, _}, 2_000
    Kmq.Test.Eventually.eventually(fn -> StageHost.stages(host) not in [[stage], []] end)
    # Numbers begin again with the new one.
    for _ <- 1..10, do: assert_receive({:handled, _}, 2_000)
    StageHost.stop(host)
  end

  defp send_back(test, message) do
    send(test, {:handled, message.data})
    message
  end

  test "bad options raise in the caller" do
    assert_raise ArgumentError, ~r/unknown keys \[:workers\]/, fn ->
      StageHost.start_link(workers: 3)
    end
  end
end
