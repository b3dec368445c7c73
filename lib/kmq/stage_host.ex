defmodule Kmq.StageHost do
  @moduledoc false
  # Drives a GenStage producer module without GenStage: what Broadway does for it, by the public message protocol, in the
  # least code that is honest. The demo and the bench use it where Broadway is not loaded, the tests to see each message.
  #
  #   StageHost (owner, restarts workers)
  #     |- Stage  x producers   runs the module's callbacks; knows its consumers and their demand
  #     |- Worker x concurrency subscribes to every stage, asks, runs the handler, acknowledges, asks again
  #
  #   worker -> stage   {:"$gen_producer", {worker, ref}, {:subscribe, nil, options} | {:ask, n} | {:cancel, reason}}
  #   stage -> worker   {:"$gen_consumer", {stage, ref}, [event] | {:cancel, reason}}
  #
  # Stopping is Broadway's order: prepare_for_draining in every stage, then its consumers are cancelled behind the last
  # events; workers finish what they have and end; then the stages end with :shutdown.

  use GenServer

  alias Kmq.StageHost.{Stage, Worker}

  defstruct [:name, :options, :stages, workers: %{}, stopping: nil]

  @type handler :: (map -> map)

  @doc """
  Options: `:producer` `{module, options}`, `:handler` (message -> message; raising fails the message), `:concurrency` (8),
  `:producers` (1), `:max_demand` (10), `:min_demand` (half of it), `:shutdown` (30_000), `:name`.
  """
  @spec start_link(keyword) :: GenServer.on_start()
  def start_link(options) do
    options =
      Keyword.validate!(options, [
        :producer,
        :handler,
        :name,
        :min_demand,
        concurrency: 8,
        producers: 1,
        max_demand: 10,
        shutdown: 30_000
      ])

    # In the caller, so that bad options and missing topics raise there, as with Broadway.start_link/2.
    options = prepare(options)
    GenServer.start_link(__MODULE__, options)
  end

  @doc "The workers' pids, for tests and demos that kill them."
  @spec workers(pid) :: [pid]
  def workers(host), do: GenServer.call(host, :workers)

  @doc "The stages' pids."
  @spec stages(pid) :: [pid]
  def stages(host), do: GenServer.call(host, :stages)

  @doc "Drains and stops."
  @spec stop(pid, timeout) :: :ok
  def stop(host, timeout \\ :infinity) do
    monitor = Process.monitor(host)
    :ok = GenServer.call(host, :drain, timeout)

    receive do
      {:DOWN, ^monitor, _, _, _} -> :ok
    end
  end

  defp prepare(options) do
    {module, _} = options[:producer]

    broadway = [
      name: options[:name] || make_ref(),
      producer: [module: options[:producer], concurrency: options[:producers]],
      processors: [
        default: [concurrency: options[:concurrency], max_demand: options[:max_demand]]
      ],
      batchers: [],
      shutdown: options[:shutdown]
    ]

    Code.ensure_loaded!(module)

    broadway =
      if function_exported?(module, :prepare_for_start, 2) do
        {[], broadway} = module.prepare_for_start(__MODULE__, broadway)
        broadway
      else
        broadway
      end

    options
    |> Keyword.put(:producer, broadway[:producer][:module])
    |> Keyword.put(:broadway, broadway)
    |> Keyword.put_new(:min_demand, div(options[:max_demand], 2))
  end

  @impl true
  def init(options) do
    Process.flag(:trap_exit, true)

    stages =
      for index <- 0..(options[:producers] - 1) do
        {:ok, stage} =
          GenServer.start_link(Stage, {options[:producer], options[:broadway], index})

        stage
      end

    state = %__MODULE__{name: options[:name], options: options, stages: stages}
    {:ok, Enum.reduce(1..options[:concurrency], state, fn _, state -> start_worker(state) end)}
  end

  @impl true
  def handle_call(:workers, _from, state), do: {:reply, Map.keys(state.workers), state}
  def handle_call(:stages, _from, state), do: {:reply, state.stages, state}

  def handle_call(:drain, from, state) do
    GenServer.reply(from, :ok)
    Enum.each(state.stages, &send(&1, :drain))
    stop_when_empty(%{state | stopping: true})
  end

  @impl true
  def handle_info({:EXIT, pid, reason}, state) do
    cond do
      Map.has_key?(state.workers, pid) ->
        state = %{state | workers: Map.delete(state.workers, pid)}
        if state.stopping, do: stop_when_empty(state), else: {:noreply, start_worker(state)}

      pid in state.stages ->
        {:stop, {:stage_down, reason}, state}

      true ->
        {:stop, reason, state}
    end
  end

  @impl true
  def terminate(_reason, state) do
    Enum.each(Map.keys(state.workers), &Process.exit(&1, :shutdown))
    Enum.each(state.stages, &end_stage(&1, state.options[:shutdown]))
  end

  defp stop_when_empty(%{workers: workers} = state) when map_size(workers) == 0,
    do: {:stop, :normal, state}

  defp stop_when_empty(state), do: {:noreply, state}

  defp start_worker(state) do
    worker = Worker.start_link(state.stages, state.options)
    %{state | workers: Map.put(state.workers, worker, true)}
  end

  # As a supervisor ends a child.
  defp end_stage(stage, timeout) do
    monitor = Process.monitor(stage)
    Process.exit(stage, :shutdown)

    receive do
      {:DOWN, ^monitor, _, _, _} -> :ok
    after
      timeout -> Process.exit(stage, :kill)
    end
  end
end

defmodule Kmq.StageHost.Stage do
  @moduledoc false
  # A producer stage: the module's callbacks on one side, subscribed consumers with their demand on the other.
  use GenServer

  # consumers: %{ref => {pid, monitor, demand}}; owed: demand of consumers that died, which the module was asked for already;
  # waiting: events that nobody has asked for any more, in order.
  defstruct [:module, :inner, consumers: %{}, owed: 0, waiting: []]

  @impl true
  def init({{module, options}, broadway, index}) do
    Process.flag(:trap_exit, true)
    options = Keyword.put(options, :broadway, Keyword.put(broadway, :index, index))

    case module.init(options) do
      {:producer, inner} -> {:ok, %__MODULE__{module: module, inner: inner}}
      {:producer, inner, _options} -> {:ok, %__MODULE__{module: module, inner: inner}}
    end
  end

  @impl true
  def handle_info({:"$gen_producer", {pid, ref}, {:subscribe, _current, _options}}, state) do
    consumer = {pid, Process.monitor(pid), 0}
    {:noreply, %{state | consumers: Map.put(state.consumers, ref, consumer)}}
  end

  def handle_info({:"$gen_producer", {_pid, ref}, {:ask, n}}, state) do
    case state.consumers do
      %{^ref => {pid, monitor, demand}} ->
        state = %{state | consumers: Map.put(state.consumers, ref, {pid, monitor, demand + n})}
        ask(dispatch(state, []), n)

      _unknown ->
        {:noreply, state}
    end
  end

  def handle_info({:"$gen_producer", {_pid, ref}, {:cancel, _reason}}, state),
    do: {:noreply, forget(state, ref)}

  def handle_info({:DOWN, monitor, :process, pid, reason}, state) do
    case Enum.find(state.consumers, fn {_ref, {_pid, other, _demand}} -> other == monitor end) do
      {ref, _consumer} ->
        {:noreply, forget(state, ref)}

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

  def handle_info(:cancel_consumers, state) do
    Enum.each(state.consumers, fn {ref, {pid, monitor, _demand}} ->
      Process.demonitor(monitor, [:flush])
      send(pid, {:"$gen_consumer", {self(), ref}, {:cancel, :shutdown}})
    end)

    {:noreply, %{state | consumers: %{}}}
  end

  def handle_info(message, state),
    do: inner(state, state.module.handle_info(message, state.inner))

  @impl true
  def terminate(reason, state), do: state.module.terminate(reason, state.inner)

  # What a dead consumer had asked for is still on its way: the next one is not asked for again.
  defp ask(state, n) do
    paid = min(n, state.owed)
    state = %{state | owed: state.owed - paid}

    if n > paid,
      do: inner(state, state.module.handle_demand(n - paid, state.inner)),
      else: {:noreply, state}
  end

  defp inner(state, {:noreply, events, inner}),
    do: {:noreply, dispatch(%{state | inner: inner}, events)}

  defp inner(state, {:stop, reason, inner}), do: {:stop, reason, %{state | inner: inner}}

  defp forget(state, ref) do
    case Map.pop(state.consumers, ref) do
      {nil, _} ->
        state

      {{_pid, monitor, demand}, consumers} ->
        Process.demonitor(monitor, [:flush])
        %{state | consumers: consumers, owed: state.owed + demand}
    end
  end

  # To the consumer with the largest demand first, as GenStage.DemandDispatcher.
  defp dispatch(%{waiting: []} = state, []), do: state
  defp dispatch(%{waiting: []} = state, events), do: send_out(state, events)
  defp dispatch(state, events), do: send_out(%{state | waiting: []}, state.waiting ++ events)

  defp send_out(state, []), do: state

  defp send_out(state, events) do
    case Enum.max_by(state.consumers, fn {_ref, {_pid, _monitor, demand}} -> demand end, fn ->
           nil
         end) do
      {ref, {pid, monitor, demand}} when demand > 0 ->
        {now, later} = Enum.split(events, demand)
        send(pid, {:"$gen_consumer", {self(), ref}, now})
        left = demand - length(now)
        send_out(%{state | consumers: Map.put(state.consumers, ref, {pid, monitor, left})}, later)

      _nobody_asks ->
        %{state | waiting: events}
    end
  end
end

defmodule Kmq.StageHost.Worker do
  @moduledoc false
  # A consumer stage and processor in one: a loop, because a process that runs users' code needs no more.

  @spec start_link([pid], keyword) :: pid
  def start_link(stages, options) do
    spawn_link(fn ->
      run(stages, options[:handler], options[:max_demand], options[:min_demand])
    end)
  end

  defp run(stages, handler, max, min) do
    subscriptions =
      Map.new(stages, fn stage ->
        ref = Process.monitor(stage)

        send(
          stage,
          {:"$gen_producer", {self(), ref}, {:subscribe, nil, max_demand: max, min_demand: min}}
        )

        send(stage, {:"$gen_producer", {self(), ref}, {:ask, max}})
        {ref, stage}
      end)

    # Asked for again in portions of max - min, as GenStage's consumers do.
    loop(subscriptions, handler, max - min)
  end

  defp loop(subscriptions, _handler, _portion) when map_size(subscriptions) == 0, do: :ok

  defp loop(subscriptions, handler, portion) do
    receive do
      {:"$gen_consumer", {stage, ref}, events} when is_list(events) ->
        work(events, {stage, ref}, handler, portion)
        loop(subscriptions, handler, portion)

      {:"$gen_consumer", {_stage, ref}, {:cancel, _reason}} ->
        Process.demonitor(ref, [:flush])
        loop(Map.delete(subscriptions, ref), handler, portion)

      {:DOWN, ref, :process, _stage, _reason} ->
        loop(Map.delete(subscriptions, ref), handler, portion)
    end
  end

  defp work([], _from, _handler, _portion), do: :ok

  defp work(events, {stage, ref} = from, handler, portion) do
    {now, later} = Enum.split(events, portion)
    now |> Enum.map(&handle(&1, handler)) |> acknowledge()
    send(stage, {:"$gen_producer", {self(), ref}, {:ask, length(now)}})
    work(later, from, handler, portion)
  end

  # As Broadway's processor: what a handler raises, throws or exits with fails its message.
  defp handle(message, handler) do
    handler.(message)
  catch
    kind, reason ->
      %{message | status: {kind, normal(kind, reason, __STACKTRACE__), __STACKTRACE__}}
  end

  defp normal(:error, reason, stacktrace), do: Exception.normalize(:error, reason, stacktrace)
  defp normal(_kind, reason, _stacktrace), do: reason

  defp acknowledge(messages) do
    messages
    |> Enum.group_by(fn %{acknowledger: {module, ack_ref, _data}} -> {module, ack_ref} end)
    |> Enum.each(fn {{module, ack_ref}, messages} ->
      {successful, failed} = Enum.split_with(messages, &(&1.status == :ok))
      module.ack(ack_ref, successful, failed)
    end)
  end
end
