defmodule Kmq.Test.Worker do
  @moduledoc false
  # What a test's consumer does with numbered messages, in this VM or another: works on them through the Broadway producer, on
  # the stage host, and writes down what it has handled. One line for each, written by write(2) before the message is acknowledged,
  # so that a SIGKILL takes nothing back:
  #
  #   <what> <number> <attempt> <partition> <offset>     what: h = handled, f = failed on purpose, k = about to kill the VM
  use GenServer

  alias Kmq.StageHost

  @doc """
  Starts a worker, not linked. Options:

    * `:options` - the producer's
    * `:file` - where the lines go, appended
    * `:name` - of the process and the pipeline (default `#{inspect(__MODULE__)}`)
    * `:concurrency` (4), `:max_demand` (10), `:producers` (1)
    * `:sleep` - ms for each message (default 0)
    * `:fail_every` - messages whose number is divisible by it fail at their first attempt
    * `:kill_at` - the number of the message that kills the VM with SIGKILL
    * `:never` - numbers that always fail
  """
  @spec start(keyword) :: :ok | {:error, term}
  def start(options) do
    with {:ok, _pid} <- GenServer.start(__MODULE__, options, name: name(options)), do: :ok
  end

  @doc "Drains and stops: what is in work is finished, the group is left."
  @spec stop(keyword, timeout) :: :ok
  def stop(options \\ [], timeout \\ 30_000), do: GenServer.stop(name(options), :normal, timeout)

  @doc "What the handles of this worker hold (see `Kmq.Handle.info/1`)."
  @spec info(keyword) :: [map]
  def info(options \\ []), do: Enum.map(handles(options), &Kmq.Handle.info/1)

  @doc "Starts a tracker of its own, not linked."
  @spec start_tracker(keyword) :: :ok
  def start_tracker(options), do: keep(fn -> Kmq.Tracker.start_link(options) end)

  @doc "Starts a sandbox, not linked."
  @spec start_sandbox() :: :ok
  def start_sandbox, do: keep(fn -> Kmq.Sandbox.start_link() end)

  # A process that nobody ends holds the link.
  defp keep(start) do
    caller = self()

    keeper =
      spawn(fn ->
        send(caller, {self(), start.()})
        Process.sleep(:infinity)
      end)

    receive do
      {^keeper, {:ok, _pid}} -> :ok
    end
  end

  @doc "Makes the clients of its handles fatal: `:producer`, of markers, or `:consumer`."
  @spec test_fatal(:producer | :consumer, keyword) :: :ok
  def test_fatal(which, options \\ []) do
    for handle <- handles(options), do: :ok = GenServer.call(handle.pid, {:test_fatal, which})
    :ok
  end

  defp name(options), do: options[:name] || __MODULE__

  defp handles(options) do
    for stage <- StageHost.stages(GenServer.call(name(options), :host)),
        %{inner: %{handle: %Kmq.Handle{} = handle}} <- [:sys.get_state(stage)],
        do: handle
  end

  @impl true
  def init(options) do
    Process.flag(:trap_exit, true)
    plan = Map.new(Keyword.take(options, [:file, :sleep, :fail_every, :kill_at, :never]))

    host_options = [
      name: name(options),
      producer: {OffBroadway.Kmq.Producer, options[:options]},
      handler: &handle(&1, plan),
      concurrency: options[:concurrency] || 4,
      producers: options[:producers] || 1,
      max_demand: options[:max_demand] || 10
    ]

    case StageHost.start_link(host_options) do
      {:ok, host} -> {:ok, host}
      {:error, reason} -> {:stop, reason}
    end
  end

  @impl true
  def handle_call(:host, _from, host), do: {:reply, host, host}

  @impl true
  def handle_info({:EXIT, host, reason}, host), do: {:stop, reason, nil}
  def handle_info(_other, host), do: {:noreply, host}

  @impl true
  def terminate(:normal, host) when is_pid(host), do: StageHost.stop(host)
  def terminate(_reason, _host), do: :ok

  defp handle(message, plan) do
    number = String.to_integer(message.data)
    sleep = plan[:sleep] || 0
    if sleep > 0, do: Process.sleep(sleep)

    cond do
      plan[:kill_at] == number ->
        note(plan, "k", number, message)
        System.cmd("kill", ["-KILL", System.pid()])
        Process.sleep(:infinity)

      fails?(plan, number, message.metadata.attempt) ->
        note(plan, "f", number, message)
        raise "fails on purpose"

      true ->
        note(plan, "h", number, message)
        message
    end
  end

  defp fails?(%{fail_every: every}, number, 1) when rem(number, every) == 0, do: true
  defp fails?(%{never: numbers}, number, _attempt), do: number in numbers
  defp fails?(_plan, _number, _attempt), do: false

  # Opened by each process for itself: raw files belong to one.
  defp note(plan, what, number, message) do
    file =
      Process.get(:kmq_test_file) ||
        with {:ok, file} <- :file.open(plan.file, [:append, :raw, :binary]) do
          Process.put(:kmq_test_file, file)
          file
        end

    %{attempt: attempt, partition: partition, offset: offset} = message.metadata
    :ok = :file.write(file, "#{what} #{number} #{attempt} #{partition} #{offset}\n")
  end
end
