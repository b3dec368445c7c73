defmodule Kmq.Sandbox.LogTest do
  # What a person sees at the default level: one line for each event that matters, and silence otherwise.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Kmq.Testing
  alias Kmq.{Consumer, Publisher, Sandbox}
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
    def execute([:kmq, :dead_lettered], _measurements, _metadata),
      do: send(:log_test, {:dead_lettered, self()})

    def execute(_event, _measurements, _metadata), do: :ok
  end

  test "a queue at work, from its start to its end" do
    Process.register(self(), :log_test)
    Kmq.Telemetry.put_backend(Backend)
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
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
        assert_receive {:dead_lettered, tracker}, 15_000
        :sys.get_state(tracker)
        Consumer.stop(consumer)
      end)

    # Assigned, where it begins, the dead letter, given back.
    assert [_, _, _, _] = lines = lines(log)

    for text <- ["assigned queue-", "no commit found", "1 dead-lettered (rejected)", "gave back"],
        do: assert(Enum.count(lines, &(&1 =~ text)) == 1)
  end

  test "a publisher without brokers says so once, however often it tries" do
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

        Publisher.close(publisher)
      end)

    assert length(lines(log)) in 1..2

    assert lines(log) |> Enum.map(&Regex.run(~r/\((_\w+)\)$/, &1)) |> Enum.uniq() |> length() ==
             length(lines(log))
  end
end
