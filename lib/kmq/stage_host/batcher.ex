defmodule Kmq.StageHost.Batcher do
  @moduledoc false
  # Collects messages by batch key (and by consumer, where there is a partition_by) until a batch is full, old enough or has a message
  # that must be flushed; its consumers run the batch handler and acknowledge.
  #
  #   worker --pass--> Batcher  %{key => {messages, n, timer}}  --full, timeout, flush--> queue of a consumer --> handler, ack
  #
  # A worker waits while as many batches are ready as there are consumers, so that a slow batch handler is felt by the producer.
  use GenServer

  alias Kmq.StageHost.Worker

  defstruct [:name, :options, :host, open: %{}, ready: [], idle: [], consumers: %{}, waiting: []]

  @spec start_link(atom, keyword, keyword) :: GenServer.on_start()
  def start_link(name, options, host_options) do
    options = Keyword.merge([concurrency: 1, batch_size: 100, batch_timeout: 1_000], options)

    GenServer.start_link(__MODULE__, {name, options, host_options})
  end

  @doc "Hands messages over; returns when there is room for more."
  @spec pass(pid, [map]) :: :ok
  def pass(batcher, messages), do: GenServer.call(batcher, {:pass, messages}, :infinity)

  @doc "Gives out what there is; returns when all of it is done."
  @spec flush(pid) :: :ok
  def flush(batcher), do: GenServer.call(batcher, :flush, :infinity)

  @impl true
  def init({name, options, host}) do
    Process.flag(:trap_exit, true)
    state = %__MODULE__{name: name, options: options, host: host}
    {:ok, Enum.reduce(0..(options[:concurrency] - 1), state, &start_consumer/2)}
  end

  @impl true
  def handle_call({:pass, messages}, from, state) do
    state = messages |> Enum.reduce(state, &collect/2) |> give_out()
    {:noreply, reply(%{state | waiting: state.waiting ++ [{:room, from}]})}
  end

  def handle_call(:flush, from, state) do
    state = state.open |> Map.keys() |> Enum.reduce(state, &close(&2, &1, :flush)) |> give_out()
    {:noreply, reply(%{state | waiting: state.waiting ++ [{:empty, from}]})}
  end

  def handle_call(request, _from, state),
    do: {:reply, Kmq.Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Kmq.Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:timeout, timer, key}, state) do
    case state.open do
      %{^key => {_, _, ^timer}} -> {:noreply, state |> close(key, :timeout) |> give_out()}
      _ -> {:noreply, state}
    end
  end

  def handle_info({:done, index}, state),
    do: {:noreply, %{state | idle: state.idle ++ [index]} |> give_out() |> reply()}

  # What it had is lost, as with Broadway; the next one goes on.
  def handle_info({:EXIT, pid, reason}, state) do
    case Map.pop(state.consumers, pid) do
      {nil, _} ->
        {:stop, reason, state}

      {index, consumers} ->
        state = %{state | consumers: consumers, idle: List.delete(state.idle, index)}
        {:noreply, index |> start_consumer(state) |> give_out() |> reply()}
    end
  end

  def handle_info(message, state) do
    Kmq.Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  defp collect(message, %{options: options} = state) do
    index = if fun = options[:partition_by], do: rem(fun.(message), options[:concurrency])
    key = {message.batch_key, index}

    {messages, n, timer} =
      Map.get_lazy(state.open, key, fn ->
        {[], 0, :erlang.start_timer(options[:batch_timeout], self(), key)}
      end)

    state = %{state | open: Map.put(state.open, key, {[message | messages], n + 1, timer})}

    cond do
      n + 1 >= options[:batch_size] -> close(state, key, :size)
      message.batch_mode == :flush -> close(state, key, :flush)
      true -> state
    end
  end

  defp close(state, {batch_key, index} = key, trigger) do
    {{messages, n, timer}, open} = Map.pop(state.open, key)
    :erlang.cancel_timer(timer)

    info = %{
      batcher: state.name,
      batch_key: batch_key,
      partition: index,
      size: n,
      trigger: trigger
    }

    %{state | open: open, ready: state.ready ++ [{index, Enum.reverse(messages), info}]}
  end

  # In order; a batch whose consumer is busy does not hold up those of others.
  defp give_out(state) do
    Enum.reduce(state.ready, %{state | ready: []}, fn {wanted, messages, info} = batch, state ->
      case Enum.find(state.idle, &(wanted == nil or &1 == wanted)) do
        nil ->
          %{state | ready: state.ready ++ [batch]}

        index ->
          {pid, _} = Enum.find(state.consumers, fn {_pid, other} -> other == index end)
          send(pid, {:batch, messages, info})
          %{state | idle: List.delete(state.idle, index)}
      end
    end)
  end

  defp reply(state) do
    room? = length(state.ready) <= state.options[:concurrency]
    empty? = state.ready == [] and length(state.idle) == map_size(state.consumers)

    {now, later} =
      Enum.split_with(state.waiting, fn
        {:room, _} -> room?
        {:empty, _} -> empty?
      end)

    Enum.each(now, fn {_, from} -> GenServer.reply(from, :ok) end)
    %{state | waiting: later}
  end

  defp start_consumer(index, state) do
    {batcher, host} = {self(), state.host}
    pid = spawn_link(fn -> consume(batcher, index, host) end)
    %{state | consumers: Map.put(state.consumers, pid, index), idle: state.idle ++ [index]}
  end

  defp consume(batcher, index, host) do
    receive do
      {:batch, messages, info} ->
        {successful, failed} =
          messages |> run(info, host[:batch_handler]) |> Enum.split_with(&(&1.status == :ok))

        Worker.acknowledge(successful, Worker.handle_failed(failed, host[:handle_failed]))
        send(batcher, {:done, index})
        consume(batcher, index, host)
    end
  end

  defp run(messages, info, handler) do
    handler.(info.batcher, messages, info)
  catch
    kind, reason -> Enum.map(messages, &Worker.failed(&1, kind, reason, __STACKTRACE__))
  end
end
