defmodule Kmq.StageHost.Stage do
  @moduledoc false
  # A producer stage: the module's callbacks on one side, subscribed consumers with their demand on the other.
  #
  # Two ways to dispatch, as GenStage's DemandDispatcher and PartitionDispatcher:
  #
  #   :demand           to whoever asks for most
  #   {n, hash}         to the consumer of the event's partition, of which there is one at a time. What that one has not asked for waits
  #                     in a queue of its own, and is gone when it ends.
  #
  # Either way the module is asked for what consumers ask for, less what was asked for by some that have ended since.
  use GenServer

  # consumers: %{ref => {pid, monitor, demand, partition | nil}}; owed: demand of consumers that died, which the module was asked for
  # already; waiting: events that nobody has asked for (any more), in order, by partition; asked: what the module may still emit;
  # lost: events that ended with the consumer they waited for
  defstruct [
    :module,
    :inner,
    :dispatcher,
    consumers: %{},
    owed: 0,
    waiting: %{},
    asked: 0,
    lost: 0,
    cancelling: false
  ]

  @impl true
  def init({{module, options}, broadway, index, dispatcher}) do
    Process.flag(:trap_exit, true)
    options = Keyword.put(options, :broadway, Keyword.put(broadway, :index, index))
    state = %__MODULE__{module: module, dispatcher: dispatcher}

    case module.init(options) do
      {:producer, inner} -> {:ok, %{state | inner: inner}}
      {:producer, inner, _options} -> {:ok, %{state | inner: inner}}
    end
  end

  # What it has itself; everything else is the module's.
  @impl true
  def handle_call(:lost, _from, state), do: {:reply, state.lost, state}

  def handle_call(request, from, state) do
    case state.module.handle_call(request, from, state.inner) do
      {:reply, reply, events, inner} ->
        {:reply, reply, emit(%{state | inner: inner}, events)}

      other ->
        inner(state, other)
    end
  end

  @impl true
  def handle_cast(message, state),
    do: inner(state, state.module.handle_cast(message, state.inner))

  @impl true
  def handle_info({:"$gen_producer", {pid, ref}, {:subscribe, _current, options}}, state) do
    partition = if state.dispatcher != :demand, do: Keyword.fetch!(options, :partition)
    consumer = {pid, Process.monitor(pid), 0, partition}
    {:noreply, %{state | consumers: Map.put(state.consumers, ref, consumer)}}
  end

  def handle_info({:"$gen_producer", {_pid, ref}, {:ask, n}}, state) do
    case state.consumers do
      %{^ref => consumer} ->
        consumer = put_elem(consumer, 2, elem(consumer, 2) + n)
        state = %{state | consumers: Map.put(state.consumers, ref, consumer)}
        state |> dispatch() |> cancel() |> ask(n)

      _unknown ->
        {:noreply, state}
    end
  end

  def handle_info({:"$gen_producer", {_pid, ref}, {:cancel, _reason}}, state),
    do: forget(state, ref)

  def handle_info({:DOWN, monitor, :process, pid, reason}, state) do
    case Enum.find(state.consumers, fn {_ref, consumer} -> elem(consumer, 1) == monitor end) do
      {ref, _consumer} ->
        forget(state, ref)

      nil ->
        inner(
          state,
          state.module.handle_info({:DOWN, monitor, :process, pid, reason}, state.inner)
        )
    end
  end

  def handle_info(:drain, state) do
    # Behind everything that is in the mailbox now, as Broadway's own message to itself is.
    send(self(), :cancel_consumers)
    inner(state, state.module.prepare_for_draining(state.inner))
  end

  def handle_info(:cancel_consumers, state), do: {:noreply, cancel(%{state | cancelling: true})}

  def handle_info(message, state),
    do: inner(state, state.module.handle_info(message, state.inner))

  @impl true
  def terminate(reason, state), do: state.module.terminate(reason, state.inner)

  # Behind the last events: what waits for a consumer goes out first.
  defp cancel(%{cancelling: true, waiting: waiting} = state) when waiting == %{} do
    Enum.each(state.consumers, fn {ref, {pid, monitor, _demand, _partition}} ->
      Process.demonitor(monitor, [:flush])
      send(pid, {:"$gen_consumer", {self(), ref}, {:cancel, :shutdown}})
    end)

    %{state | consumers: %{}}
  end

  defp cancel(state), do: state

  # What a dead consumer had asked for is still on its way: the next one is not asked for again.
  defp ask(state, n) do
    paid = min(n, state.owed)
    demand(%{state | owed: state.owed - paid}, n - paid)
  end

  defp demand(state, 0), do: {:noreply, state}

  defp demand(state, n) do
    state = %{state | asked: state.asked + n}
    inner(state, state.module.handle_demand(n, state.inner))
  end

  defp inner(state, {:noreply, events, inner}),
    do: {:noreply, emit(%{state | inner: inner}, events)}

  defp inner(state, {:stop, reason, inner}), do: {:stop, reason, %{state | inner: inner}}

  defp forget(state, ref) do
    case Map.pop(state.consumers, ref) do
      {nil, _} ->
        {:noreply, state}

      {{_pid, monitor, demand, partition}, consumers} ->
        Process.demonitor(monitor, [:flush])
        state = %{state | consumers: consumers, owed: state.owed + demand}
        if partition, do: lose(state, partition), else: {:noreply, state}
    end
  end

  # They are asked for again, as far as the module can tell.
  defp lose(state, partition) do
    {lost, waiting} = Map.pop(state.waiting, partition, [])
    demand(%{state | waiting: waiting, lost: state.lost + length(lost)}, length(lost))
  end

  defp emit(state, []), do: state

  defp emit(state, events) do
    asked = state.asked - length(events)
    if asked < 0, do: exit({:emitted_beyond_demand, -asked})

    events =
      case state.dispatcher do
        :demand -> %{nil => events}
        {n, hash} -> Enum.group_by(events, &rem(hash.(&1), n))
      end

    waiting = Map.merge(state.waiting, events, fn _, before, more -> before ++ more end)
    dispatch(%{state | asked: asked, waiting: waiting})
  end

  defp dispatch(%{waiting: waiting} = state) when waiting == %{}, do: state

  defp dispatch(state) do
    Enum.reduce(state.waiting, state, fn {partition, events}, state ->
      send_out(%{state | waiting: Map.delete(state.waiting, partition)}, partition, events)
    end)
  end

  defp send_out(state, _partition, []), do: state

  # To the consumer with the largest demand first, of the partition's if there are such.
  defp send_out(state, partition, events) do
    asking = for {ref, {_pid, _monitor, demand, ^partition}} <- state.consumers, do: {demand, ref}

    case Enum.max(asking, fn -> {0, nil} end) do
      {0, _} ->
        %{state | waiting: Map.put(state.waiting, partition, events)}

      {demand, ref} ->
        {pid, monitor, ^demand, ^partition} = state.consumers[ref]
        {now, later} = Enum.split(events, demand)
        send(pid, {:"$gen_consumer", {self(), ref}, now})
        consumer = {pid, monitor, demand - length(now), partition}

        send_out(
          %{state | consumers: Map.put(state.consumers, ref, consumer)},
          partition,
          later
        )
    end
  end
end
