defmodule Kmq.Test.Holder do
  @moduledoc false
  # In a VM of its own: a consumer that takes messages, hands out their receipts and gives them up, or keeps them.

  @doc "Takes n messages; {receipt, value} of each. `leave: true` gives them up."
  @spec take(keyword, pos_integer, keyword) :: [{String.t(), binary}]
  def take(options, n, how) do
    caller = self()

    # The call's process ends with the answer; what holds the consumer must not.
    holder =
      spawn(fn ->
        {:ok, consumer} = Kmq.Consumer.start_link(options)
        messages = pull(consumer, n, [])
        receipts = Enum.map(messages, &{Kmq.receipt(&1), &1.value})
        if how[:leave], do: :ok = Kmq.leave(messages, sync: true)
        send(caller, {:receipts, self(), receipts})
        Process.sleep(:infinity)
      end)

    receive do
      {:receipts, ^holder, receipts} -> receipts
    end
  end

  @doc "A consumer that only is there: what is not handed out is parked or expires."
  @spec wait(keyword) :: :ok
  def wait(options) do
    caller = self()

    spawn(fn ->
      {:ok, _consumer} = Kmq.Consumer.start_link(options)
      send(caller, :waits)
      Process.sleep(:infinity)
    end)

    receive do
      :waits -> :ok
    end
  end

  @doc "A consumer whose messages stay with it: `next/1` and `settle/1`."
  @spec keep(keyword) :: :ok
  def keep(options) do
    {:ok, _} =
      Agent.start(fn -> {elem({:ok, _} = Kmq.Consumer.start_link(options), 1), []} end,
        name: __MODULE__,
        timeout: 30_000
      )

    :ok
  end

  @doc "Takes n more; their offsets, attempts and values."
  @spec next(pos_integer) :: [{non_neg_integer, pos_integer, binary}]
  def next(n) do
    take = fn {consumer, held} ->
      messages = pull(consumer, n, [])
      {Enum.map(messages, &{&1.offset, &1.attempt, &1.value}), {consumer, held ++ messages}}
    end

    Agent.get_and_update(__MODULE__, take, :infinity)
  end

  @doc "What it has read was looked at: it is known to be of its topics as they are (c_src/nif/witness.c)."
  @spec looked :: :ok
  def looked do
    handle = Agent.get(__MODULE__, fn {consumer, _} -> GenServer.call(consumer, :handle) end)
    looks = fn -> Kmq.Handle.info(handle).looks end
    # The first may have been under way already.
    before = looks.()
    Kmq.Test.Eventually.eventually(fn -> looks.() >= before + 2 end, 20_000)
    :ok
  end

  @doc "Takes more until all these values have come; offsets, attempts and values."
  @spec until([binary]) :: [{non_neg_integer, pos_integer, binary}]
  def until(values) do
    take = fn {consumer, held} ->
      messages = pull_all(consumer, MapSet.new(values), [])
      {Enum.map(messages, &{&1.offset, &1.attempt, &1.value}), {consumer, held ++ messages}}
    end

    Agent.get_and_update(__MODULE__, take, :infinity)
  end

  defp pull_all(consumer, values, acc) do
    if Enum.all?(values, fn value -> Enum.any?(acc, &(&1.value == value)) end),
      do: acc,
      else: pull_all(consumer, values, acc ++ Kmq.Consumer.pull(consumer, max: 500, wait: 10_000))
  end

  @doc "Settles all it holds by a function of `Kmq`, and these further arguments."
  @spec settle(atom, list) :: Kmq.result()
  def settle(action, arguments) do
    settle = fn {consumer, held} -> {apply(Kmq, action, [held | arguments]), {consumer, []}} end
    Agent.get_and_update(__MODULE__, settle, :infinity)
  end

  defp pull(_consumer, 0, acc), do: acc

  defp pull(consumer, n, acc) do
    messages = Kmq.Consumer.pull(consumer, max: n, wait: 10_000)
    pull(consumer, n - length(messages), acc ++ messages)
  end
end
