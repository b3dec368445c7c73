defmodule Kmq.TestingTest do
  # What users' own tests are given. The group of a queue forms once, for the module.
  use ExUnit.Case, async: true

  import Kmq.Testing
  alias Kmq.{Consumer, StageHost}
  alias Kmq.Testing.TimeoutError

  @moduletag :capture_log
  @moduletag timeout: 120_000

  setup_all do
    Application.put_env(:kmq, :testing_scale, Kmq.Test.Eventually.scale())
    queue = start_queue!(partitions: 2, max_redeliveries: 2, on_failure: :retry)
    producer = {OffBroadway.Kmq.Producer, options(queue)}

    start_supervised!(%{
      id: :pipeline,
      start: {StageHost, :start_link, [[producer: producer, handler: &handle/1, max_demand: 1]]},
      shutdown: 10_000
    })

    await_ready(queue)
    %{queue: queue}
  end

  defp handle(%{data: data, metadata: %{attempt: attempt}} = message) do
    case {data, attempt} do
      {"bad", _} -> failed(message, "always")
      {"twice", attempt} when attempt < 3 -> failed(message, "not yet")
      {"reject", _} -> failed(message, {:reject, "no customer"})
      {"discard", _} -> failed(message, {:discard, "not worth it"})
      {"later", 1} -> failed(message, {:retry, 60_000})
      _ -> message
    end
  end

  defp failed(message, reason), do: %{message | status: {:failed, reason}}

  test "acked: one, many, in any partition", %{queue: queue} do
    one = publish(queue, "flour")
    assert await_acked(queue, one) == :ok
    many = publish(queue, for(i <- 1..50, do: {"#{i}", partition: rem(i, 2)}))
    assert await_acked(queue, many) == :ok
    assert status(queue, [one | many]) == List.duplicate(:acked, 51)
  end

  test "every end has its name, in the order of the refs", %{queue: queue} do
    refs = publish(queue, ~w(flour reject discard twice bad))

    assert [:acked, {:dead_lettered, rejected}, :discarded, :acked, {:dead_lettered, bad}] =
             await_settled(queue, refs)

    assert %{value: "reject", cause: "rejected", error: "no customer", attempts: 1} = rejected
    assert %{value: "bad", cause: "failed", error: "always", attempts: 3} = bad
  end

  test "redelivered n times, dead-lettered", %{queue: queue} do
    twice = publish(queue, "twice", key: "k")
    assert await_redelivered(queue, twice) |> hd() == "failed"
    assert await_redelivered(queue, twice, 2) == ["failed", "failed"]
    assert await_acked(queue, twice) == :ok
    bad = publish(queue, "bad")
    assert %{cause: "failed", value: "bad"} = await_dead_lettered(queue, bad)

    assert [%{value: "bad"}, %{value: "reject"}] =
             await_dead_lettered(queue, [bad, publish(queue, "reject")])
  end

  test "what cannot come any more raises at once, what does not come in time says where it is", %{
    queue: queue
  } do
    reject = publish(queue, "reject")
    assert {:dead_lettered, _} = await_settled(queue, reject)

    error = assert_raise TimeoutError, fn -> await_acked(queue, reject, timeout: 600_000) end

    assert error.message =~
             ~r/1 of 1 messages of queue-.* are not acked:\n  \{[01], \d+\}: a dead letter, cause rejected/

    flour = publish(queue, "flour")
    assert await_acked(queue, flour) == :ok

    assert_raise TimeoutError, ~r/was redelivered 0 times, not 1; it is acked/, fn ->
      await_redelivered(queue, flour, 1, timeout: 600_000)
    end

    assert_raise TimeoutError, ~r/not dead-lettered:\n.*: acked/, fn ->
      await_dead_lettered(queue, flour, timeout: 600_000)
    end

    later = publish(queue, "later")
    error = assert_raise TimeoutError, fn -> await_settled(queue, later, timeout: 300) end
    assert error.message =~ "open: in work, waiting for its next attempt, or delayed"
    assert status(queue, later) == :open
  end

  test "what is no queue, no message of it, no option: told by name", %{queue: queue} do
    order = publish(queue, "flour")
    refs = ~r/expected \{partition, offset\} as publish\/3 gives it, or a list of them, got: /

    for call <- [&status(queue, &1), &await_settled(queue, &1), &await_redelivered(queue, &1)],
        bad <- [:x, nil, {0, -1}, %{partition: 0, offset: 0}, "0"] do
      assert_raise ArgumentError, refs, fn -> call.(bad) end
    end

    for bad <- [[order | order], [order, :x]],
        do: assert_raise(ArgumentError, refs, fn -> status(queue, bad) end)

    assert_raise ArgumentError, ~r/it has 2 partitions, numbered from 0: \{7, 0\}/, fn ->
      await_acked(queue, {7, 0})
    end

    for call <- [
          &status(&1, order),
          &options/1,
          &publish(&1, ["v"]),
          &inject(&1, {:rtt, 1, 1}),
          &await_ready/1
        ],
        bad <- [nil, :x, "queue-1"] do
      assert_raise ArgumentError, ~r/expected a queue as start_queue! gives it, got: /, fn ->
        call.(bad)
      end
    end

    for {options, text} <- [
          {[sandbox: "x"],
           ~s(Kmq.Sandbox.bootstrap/1 takes a Kmq.Sandbox, its pid or its name, got: "x")},
          {[sandbox: self()],
           "Kmq.Sandbox.bootstrap/1 takes a Kmq.Sandbox, and #{inspect(self())} is no process of Kmq"},
          {[partitions: 0],
           "invalid value for :partitions option: expected an integer from 1 to 1000, got: 0"},
          {5, "expected options of start_queue! to be a keyword list, got: 5"}
        ] do
      assert_raise ArgumentError, text, fn -> start_queue!(options) end
    end

    assert_raise ArgumentError,
                 ~r/expected a message's options to be a keyword list, got: 5/,
                 fn ->
                   publish(queue, "v", 5)
                 end

    # The count may be left out.
    assert await_acked(queue, order) == :ok
    later = publish(queue, "later")

    assert_raise TimeoutError, ~r/0 times, not 1/, fn ->
      await_redelivered(queue, later, timeout: 50)
    end

    assert_raise ArgumentError, ~r/a positive integer, got: 0/, fn ->
      await_redelivered(queue, later, 0)
    end
  end

  test "a queue whose process has ended says so" do
    task = Task.async(fn -> start_queue!() end)
    queue = Task.await(task, 60_000)

    Kmq.Test.Eventually.eventually(fn ->
      error = catch_error(status(queue, {0, 0}))
      assert %Kmq.Error{reason: :closed, message: text} = error

      assert text =~
               "the queue #{queue.topic} is closed: it ends with the process that has called start_queue!"
    end)
  end

  test "a queue of its own, with faults", %{queue: shared} do
    assert_raise ArgumentError, ~r/sandbox: :own/, fn -> inject(shared, {:rtt, 1, 10}) end

    for {options, meant} <- [{[partition: 3], ":partitions"}, {[sanbox: :own], ":sandbox"}] do
      text = ~r/unknown option :\w+ of start_queue!, did you mean #{meant}\?/
      assert_raise ArgumentError, text, fn -> start_queue!(options) end
    end

    queue = start_queue!(sandbox: :own)
    refute queue.hosts == shared.hosts

    assert_raise ArgumentError, ~r/did you mean :broker_down\?/, fn ->
      inject(queue, {:brokerdown, 1})
    end

    first = publish(queue, "flour")
    assert status(queue, first) == :waiting

    assert_raise TimeoutError, ~r/not handed out yet/, fn ->
      await_settled(queue, first, timeout: 50)
    end

    consumer = start_supervised!({Consumer, options(queue, max_processing_time: 2_000)})
    assert [%{value: "flour"}] = Consumer.pull(consumer, wait: 60_000)
    await_ready(queue)
    # It is not settled in time, so it comes again; meanwhile the brokers are slow.
    inject(queue, {:rtt, 1, 50})
    assert [%{attempt: 2} = again] = Consumer.pull(consumer, wait: 60_000)
    inject(queue, {:rtt, 1, 0})
    assert ["timeout" | _] = await_redelivered(queue, first)
    assert Kmq.ack(again) == :ok
    assert await_acked(queue, first) == :ok
  end

  # guides/testing.md says so. One of three must be so quick, whatever else this machine does.
  test "a test with a queue of its own takes less than two seconds" do
    took =
      for i <- 1..3 do
        {us, :ok} =
          :timer.tc(fn ->
            queue = start_queue!()
            consumer = start_supervised!({Consumer, options(queue)}, id: i)
            order = publish(queue, "flour")
            [%{attempt: 1} = message] = Consumer.pull(consumer, wait: 60_000)
            :ok = Kmq.retry(message)
            [%{attempt: 2} = again] = Consumer.pull(consumer, wait: 60_000)
            :ok = Kmq.ack(again)
            :ok = await_acked(queue, order)
            stop_supervised!(i)
          end)

        div(us, 1_000)
      end

    assert Enum.min(took) < 2_000, inspect(took)
  end
end
