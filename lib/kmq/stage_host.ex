defmodule Kmq.StageHost do
  @moduledoc false
  # Drives a GenStage producer module without GenStage: what Broadway does for it, by the public message protocol, in the
  # least code that is honest. The demo and the bench use it where Broadway is not loaded, the tests to see each message.
  #
  #   StageHost (owner, restarts workers and stages)
  #     |- Stage   x producers    runs the module's callbacks; knows its consumers and their demand
  #     |- Worker  x concurrency  subscribes to every stage, asks, runs the handler, acknowledges, asks again
  #     '- Batcher x batchers     collects what the workers send it, by batch key; its consumers run the batch handler
  #
  #   worker -> stage   {:"$gen_producer", {worker, ref}, {:subscribe, nil, options} | {:ask, n} | {:cancel, reason}}
  #   stage -> worker   {:"$gen_consumer", {stage, ref}, [event] | {:cancel, reason}}
  #
  # A module whose prepare_for_start/2 gives the processors a partition_by gets a worker for each partition, as GenStage's
  # PartitionDispatcher does it: the module hears the sum of what is asked for, and what waits for a worker ends with it. All workers
  # are then ended and started together, as Broadway does it always; without, each for itself, which is harder on the module.
  #
  # A module that emits more than was asked for ends its stage: GenStage would keep up to 10,000 events and discard the rest.
  #
  # Stopping is Broadway's order: prepare_for_draining in every stage, then its consumers are cancelled behind the last
  # events; workers finish what they have and end; batchers give out what they have; then the stages end with :shutdown.

  use GenServer

  alias Kmq.StageHost.{Batcher, Stage, Worker}

  defstruct [:name, :options, :stages, batchers: %{}, workers: %{}, ending: false, stopping: nil]

  @type handler :: (map -> map)

  @doc """
  Options: `:producer` `{module, options}`, `:handler` (message -> message; raising fails the message), `:concurrency` (8),
  `:producers` (1), `:max_demand` (10), `:min_demand` (half of it), `:shutdown` (30_000), `:name`, `:handle_failed` (messages ->
  messages), `:processors` and `:batchers` (more of Broadway's options for them), `:batch_handler` (batcher, messages, info ->
  messages). With batchers a message goes to the one it names when it succeeds.
  """
  @spec start_link(keyword) :: GenServer.on_start()
  def start_link(options) do
    options =
      Keyword.validate!(options, [
        :producer,
        :handler,
        :name,
        :min_demand,
        :handle_failed,
        :batch_handler,
        processors: [],
        batchers: [],
        concurrency: 8,
        producers: 1,
        max_demand: 10,
        shutdown: 30_000
      ])

    # In the caller, so that bad options and missing topics raise there, as with Broadway.start_link/2.
    options = prepare(options)
    GenServer.start_link(__MODULE__, options)
  end

  @doc "The name of one of its processes, as Broadway has it for the names that its pipeline's module gives."
  @spec process_name(term, String.t()) :: {:via, module, term}
  def process_name(host, base), do: {:via, Registry, {Kmq.Registry, {__MODULE__, host, base}}}

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

    name = options[:name] || make_ref()

    broadway = [
      name: name,
      producer: [module: options[:producer], concurrency: options[:producers]],
      processors: [
        default:
          [concurrency: options[:concurrency], max_demand: options[:max_demand]] ++
            options[:processors]
      ],
      batchers: options[:batchers],
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
    |> Keyword.put(:name, name)
    |> Keyword.put(:producer, broadway[:producer][:module])
    |> Keyword.put(:broadway, broadway)
    |> Keyword.put(:batchers, broadway[:batchers])
    |> Keyword.put(:partition_by, broadway[:processors][:default][:partition_by])
    |> Keyword.put_new(:min_demand, div(options[:max_demand], 2))
  end

  @impl true
  def init(options) do
    Process.flag(:trap_exit, true)

    stages = for index <- 0..(options[:producers] - 1), do: start_stage(options, index)

    batchers =
      for {name, batcher} <- options[:batchers], into: %{} do
        {:ok, pid} = Batcher.start_link(name, batcher, options)
        {name, pid}
      end

    state = %__MODULE__{
      name: options[:name],
      options: options,
      stages: stages,
      batchers: batchers
    }

    {:ok, start_workers(state, 0..(options[:concurrency] - 1))}
  end

  @impl true
  def handle_call(:workers, _from, state), do: {:reply, Map.keys(state.workers), state}
  def handle_call(:stages, _from, state), do: {:reply, state.stages, state}

  def handle_call(:drain, from, state) do
    GenServer.reply(from, :ok)
    Enum.each(state.stages, &send(&1, :drain))
    stop_when_empty(%{state | stopping: true})
  end

  def handle_call(request, _from, state),
    do: {:reply, Kmq.Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Kmq.Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:EXIT, pid, reason}, state) do
    case Map.pop(state.workers, pid) do
      {nil, _} ->
        cond do
          pid in state.stages -> stage_down(pid, reason, state)
          pid in Map.values(state.batchers) -> {:stop, {:batcher_down, reason}, state}
          true -> {:stop, reason, state}
        end

      {index, workers} ->
        worker_down(index, %{state | workers: workers})
    end
  end

  def handle_info(message, state) do
    Kmq.Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  @impl true
  def terminate(_reason, state) do
    Enum.each(Map.keys(state.workers), &Process.exit(&1, :shutdown))
    Enum.each(Map.values(state.batchers), &end_child(&1, state.options[:shutdown]))
    Enum.each(state.stages, &end_child(&1, state.options[:shutdown]))
  end

  defp start_stage(options, index) do
    dispatcher = if fun = options[:partition_by], do: {options[:concurrency], fun}, else: :demand

    {:ok, stage} =
      GenServer.start_link(Stage, {options[:producer], options[:broadway], index, dispatcher})

    stage
  end

  defp stage_down(_pid, reason, %{stopping: true} = state),
    do: {:stop, {:stage_down, reason}, state}

  # Another takes its place, to which the workers that are there subscribe, too.
  defp stage_down(pid, _reason, state) do
    index = Enum.find_index(state.stages, &(&1 == pid))
    stage = start_stage(state.options, index)
    for worker <- Map.keys(state.workers), do: send(worker, {:stage, stage})
    {:noreply, %{state | stages: List.replace_at(state.stages, index, stage)}}
  end

  defp worker_down(_index, %{stopping: true} = state), do: stop_when_empty(state)

  defp worker_down(index, %{options: options} = state) do
    cond do
      options[:partition_by] == nil ->
        {:noreply, start_workers(state, [index])}

      state.workers == %{} ->
        {:noreply, start_workers(%{state | ending: false}, 0..(options[:concurrency] - 1))}

      true ->
        state.ending || Enum.each(Map.keys(state.workers), &Process.exit(&1, :shutdown))
        {:noreply, %{state | ending: true}}
    end
  end

  defp stop_when_empty(%{workers: workers} = state) when map_size(workers) == 0 do
    Enum.each(Map.values(state.batchers), &Batcher.flush/1)
    {:stop, :normal, state}
  end

  defp stop_when_empty(state), do: {:noreply, state}

  defp start_workers(state, indexes) do
    workers =
      Map.new(indexes, &{Worker.start_link(state.stages, state.batchers, &1, state.options), &1})

    %{state | workers: Map.merge(state.workers, workers)}
  end

  # As a supervisor ends a child.
  defp end_child(stage, timeout) do
    monitor = Process.monitor(stage)
    Process.exit(stage, :shutdown)

    receive do
      {:DOWN, ^monitor, _, _, _} -> :ok
    after
      timeout -> Process.exit(stage, :kill)
    end
  end
end
