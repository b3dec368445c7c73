defmodule Kmq.Sandbox.LogTest do
  # What a person sees at the default level: one line for each event that matters, and silence otherwise.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Kmq.Testing
  alias Kmq.{Consumer, Publisher, Sandbox}
  import Kmq.Test.Eventually, only: [scaled: 1]
  alias Kmq.Test.Eventually

  @moduletag timeout: 120_000

  setup do
    Application.put_env(:kmq, :testing_scale, Eventually.scale())
    on_exit(fn -> Eventually.eventually(fn -> :kmq_nif.live().clients == 0 end, 15_000) end)
  end

  defp lines(log) do
    for line <- String.split(log, "\n", trim: true),
        line =~ "kmq",
        not (line =~ "[debug]"),
        do: line
  end

  defmodule Backend do
    def execute(event, _measurements, metadata) do
      pid = Process.whereis(:log_test)
      pid && send(pid, {event, metadata, self()})
    end
  end

  test "a queue at work, from its start to its end" do
    listen()
    queue = start_queue!(sandbox: :own)

    log =
      capture_log(fn ->
        {:ok, consumer} = Consumer.start_link(options(queue))
        await_ready(queue)
        [good, bad, late] = publish(queue, ~w(good bad late))

        for message <- Consumer.pull(consumer, max: 3, wait: 5_000) do
          case message.value do
            "good" -> Kmq.ack(message)
            "bad" -> Kmq.reject(message, "no such customer")
            "late" -> Kmq.retry(message)
          end
        end

        await_dead_lettered(queue, bad)
        [again] = Consumer.pull(consumer, wait: 5_000)
        Kmq.ack(again)
        await_acked(queue, [good, late])
        # Its line is written when this event is over.
        assert_receive {[:kmq, :dead_lettered], _, tracker}, 15_000
        :sys.get_state(tracker)
        Consumer.stop(consumer)
      end)

    # Assigned, where it begins, the dead letter, given back.
    assert [_, _, _, _] = lines = lines(log)

    for text <- ["assigned queue-", "no commit found", "1 dead-lettered (rejected)", "gave back"],
        do: assert(Enum.count(lines, &(&1 =~ text)) == 1)
  end

  test "a publisher without brokers says so once, however often it tries" do
    listen()
    sandbox = start_supervised!({Sandbox, topics: ["orders"]})

    {:ok, publisher} =
      Publisher.start_link(hosts: Sandbox.bootstrap(sandbox), delivery_timeout: 1_500)

    {:ok, _} = Publisher.publish(publisher, "orders", "flour")

    log =
      capture_log(fn ->
        Sandbox.inject(sandbox, {:broker_down, 1})

        assert {:error, %{reason: :msg_timed_out}} =
                 Publisher.publish(publisher, "orders", "milk")

        assert {:error, %{reason: :msg_timed_out}} =
                 Publisher.publish(publisher, "orders", "milk")

        Sandbox.inject(sandbox, {:broker_up, 1})

        Eventually.eventually(
          fn -> {:ok, _} = Publisher.publish(publisher, "orders", "tea") end,
          20_000
        )

        assert_receive {[:kmq, :recovered], %{handle: :publisher, what: :connection}, pid},
                       scaled(10_000)

        # Its line is written when this event is over.
        :sys.get_state(pid)
        Publisher.close(publisher)
      end)

    assert [lost, back] = lines(log)
    assert lost =~ ~r/\[warning\] kmq: publisher: .*_TRANSPORT.*connects again by itself/
    assert back =~ ~r/\[info\] kmq: publisher: connected again after [\d.]+ s/
  end

  # Two clients of librdkafka, and each of them tries for ever; its tracker is another process.
  test "a consumer that loses its brokers says so once, and that they are back" do
    listen()
    queue = start_queue!(sandbox: :own)
    {:ok, consumer} = Consumer.start_link(options(queue))
    await_ready(queue)
    order = publish(queue, "flour")
    [message] = Consumer.pull(consumer, wait: 5_000)

    log =
      capture_log(fn ->
        for _ <- 1..2 do
          inject(queue, {:broker_down, 1})
          for whose <- [:consumer, :tracker], do: outage([:kmq, :error], whose)
          inject(queue, {:broker_up, 1})
          for whose <- [:consumer, :tracker], do: outage([:kmq, :recovered], whose)
        end
      end)

    for whose <- [
          ~r/kmq: .* of #{queue.group_id}: /,
          ~r/kmq tracker of group #{queue.group_id}: /
        ],
        what <- [~r/\[warning\].*_TRANSPORT.*connects again by itself/, ~r/connected again after/] do
      assert Enum.count(lines(log), &(&1 =~ whose and &1 =~ what)) == 2, log
    end

    # The watch of Kmq.Testing has a publisher.
    assert Enum.reject(lines(log), &(&1 =~ "publisher")) |> length() == 8, log
    assert Kmq.ack(message) == :ok
    await_acked(queue, order)
    Consumer.stop(consumer)
  end

  defp outage(event, :consumer) do
    assert_receive({^event, %{handle: {:consumer, _}}, pid}, scaled(30_000))
    :sys.get_state(pid)
  end

  defp outage(event, :tracker) do
    assert_receive(
      {^event, metadata, pid} when not is_map_key(metadata, :handle),
      scaled(30_000)
    )

    :sys.get_state(pid)
  end

  # While a group forms or its coordinator moves, commits are refused and go with the next: guides/errors.md calls for no alarm.
  test "a commit that is refused for a moment is no alarm" do
    listen()
    queue = start_queue!(sandbox: :own)
    {:ok, consumer} = Consumer.start_link(options(queue, commit_interval: 50))
    await_ready(queue)

    log =
      capture_log(fn ->
        for error <- [:illegal_generation, :coordinator_load_in_progress] do
          inject(queue, {:request_errors, :offset_commit, List.duplicate(error, 6)})
          order = publish(queue, "flour")
          [message] = Consumer.pull(consumer, wait: 20_000)
          Kmq.ack(message)

          assert_receive {[:kmq, :error, :passing], %{what: :commit, error: %{reason: ^error}},
                          _},
                         scaled(20_000)

          inject(queue, {:request_errors, :offset_commit, []})
          await_acked(queue, order)
        end

        Consumer.stop(consumer)
      end)

    refute log =~ ~r/\[(warning|error)\]/
    refute_received {[:kmq, :error], _, _}
    assert log =~ ~r/\[debug\].*commit: /
  end

  # A leader has moved, and who is asked does not know it yet.
  test "a tracker that cannot find out at once where to begin is no alarm" do
    listen()
    queue = start_queue!(sandbox: :own)
    inject(queue, {:request_errors, :list_offsets, List.duplicate(:not_leader_for_partition, 30)})

    log =
      capture_log(fn ->
        {:ok, tracker} =
          queue |> options() |> Keyword.delete(:drain_timeout) |> Kmq.Tracker.start_link()

        assert_receive {[:kmq, :error, :passing], %{what: :assignment, error: error}, _},
                       scaled(20_000)

        assert error.reason == :not_leader_for_partition
        inject(queue, {:request_errors, :list_offsets, []})

        Eventually.eventually(
          fn -> match?({:ok, %{partitions: [_]}}, Kmq.Tracker.info(tracker)) end,
          20_000
        )

        Kmq.Tracker.stop(tracker)
      end)

    refute log =~ ~r/\[(warning|error)\]/
    assert log =~ "cannot find out where to begin"
  end

  defp listen do
    Process.register(self(), :log_test)
    Kmq.Telemetry.put_backend(Backend)
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
  end
end
