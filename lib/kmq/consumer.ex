defmodule Kmq.Consumer do
  @moduledoc """
  Messages on demand, for iex and for those without Broadway.

      {:ok, consumer} = Kmq.Consumer.start_link(hosts: [localhost: 9092], topics: ["orders"], group_id: "shop", create_topics: true)
      [message] = Kmq.Consumer.pull(consumer, max: 1, wait: 5_000)
      Kmq.ack(message)

  Messages are settled by `Kmq.ack/1`, `Kmq.retry/2`, `Kmq.reject/2` and `Kmq.discard/1`, from any process. What the puller
  forgets counts as failed when `:max_processing_time` is over. Any number of processes may pull; a message goes to one of them.

  ## Options

  #{Kmq.Options.docs(:consumer)}
  """

  use GenServer

  require Logger

  alias Kmq.{Ask, Config, Error, Handle, Info, Message, Options}

  @reopen_ms 1_000
  @call_margin_ms 5_000

  # waiting: pulls that found nothing, oldest first: [{from, max, timer, monitor}]
  # pullers: who has pulled, where an end waits for what is in work; stoppers: who is told how it ended
  # opening: the monitor of the process that opens the handle anew; it may take as long as Kafka does, and pulls must end in time
  # fenced: why it is no member any more, for good
  defstruct [
    :config,
    :key,
    :handle,
    :monitor,
    :opening,
    :fenced,
    waiting: [],
    pullers: %{},
    stoppers: []
  ]

  @pull [
    max: [type: {:custom, Options.Types, :integer_in, [1, 1_000_000]}, default: 1],
    wait: [type: {:custom, Options.Types, :integer_in, [0, 86_400_000]}, default: 0]
  ]

  @doc """
  Starts a member of the group. Bad options raise; a missing topic or an unreachable cluster is `{:error, %Kmq.Error{}}`.
  """
  @spec start_link(keyword) :: GenServer.on_start()
  def start_link(options) do
    config = Config.new!(options, :consumer)

    with :ok <- Kmq.Application.started(),
         do: GenServer.start_link(__MODULE__, config, Keyword.take(options, [:name]))
  end

  @doc "For a supervisor; it leaves a stop the time to hand back what is not settled."
  @spec child_spec(keyword) :: Supervisor.child_spec()
  def child_spec(options) do
    %{
      id: Options.peek(options, :name) || __MODULE__,
      start: {__MODULE__, :start_link, [Kmq.Security.hide(options)]},
      shutdown: drain(Options.peek(options, :drain_timeout)) + 2_000
    }
  end

  # What is none is told by start_link/1.
  defp drain(ms) when is_integer(ms) and ms > 0, do: ms
  defp drain(_default), do: 30_000

  @doc """
  Up to `:max` messages (default 1). Where there is none yet, it waits up to `:wait` ms (default 0) for the first.

  Raises `Kmq.Error` when the consumer has ended, before or while this waited (reason `:closed`), and when it has lost its place in the group to
  another one with the same `group_instance_id` (`:fenced_instance_id`): it does not join again, stop it.
  """
  @spec pull(GenServer.server(), keyword) :: [Message.t()]
  def pull(consumer, options \\ []) do
    # Checked in the caller: a wrong argument is its own bug, and not the consumer's.
    [max: max, wait: wait] = Options.validate!(options, @pull)

    case Ask.call(__MODULE__, "pull/2", consumer, {:pull, max, wait}, wait + @call_margin_ms) do
      {:error, error} -> raise error
      messages -> messages
    end
  end

  @doc """
  Waits until all that was settled before this call is written to Kafka: for `timeout_ms` at most, then it is `{:error, %Kmq.Error{reason: :timeout}}`
  and written later. A consumer that has ended is `{:error, %Kmq.Error{reason: :closed}}`.
  """
  @spec flush(GenServer.server(), timeout) :: :ok | {:error, Error.t()}
  def flush(consumer, timeout_ms \\ 5_000) do
    timeout_ms = Options.Types.timeout!(timeout_ms)

    case Ask.call(__MODULE__, "flush/2", consumer, :handle, @call_margin_ms) do
      nil ->
        {:error, Error.new(:closed, "the consumer has no connection", retriable?: true)}

      %Handle{} = handle ->
        with {:error, error} <- Handle.flush(handle, timeout_ms),
             do: {:error, Error.from_native(error)}

      {:error, error} ->
        {:error, error}
    end
  end

  @doc """
  Other queue topics from now on. Those that are new are checked first; what is in work of the others can still be settled. `[]` reads nothing
  until there are topics again; at its start a consumer needs one. See `OffBroadway.Kmq.Producer.update_topics/2`.
  """
  @spec update_topics(GenServer.server(), [String.t()]) :: :ok | {:error, Error.t()}
  defdelegate update_topics(consumer, topics), to: Kmq.Control

  @doc """
  Leaves the group: acks and commits are written, what is not settled goes back and comes again at once, at no attempt.

  It does not wait for messages that other processes hold. What they acknowledge afterwards is told `:late` or `:closed`, and has come again: let them finish first.

  What could not be written within `:drain_timeout`, as without a broker, is `{:error, %Kmq.Error{reason: :timeout}}`: the consumer has ended all the same,
  and what was acknowledged last may come again.

  With `delivery: :offsets` it waits, for `:drain_timeout` at most, while another process that has pulled is alive and something is in work: that may
  still be settled. For what the caller itself has pulled it does not wait.

  One that has ended before is `{:error, %Kmq.Error{reason: :closed}}`; one that has not ended after `timeout` ms goes on doing so, and that is
  `{:error, %Kmq.Error{reason: :timeout}}`.
  """
  @spec stop(GenServer.server(), timeout) :: :ok | {:error, Error.t()}
  def stop(consumer, timeout \\ :infinity) do
    timeout = Options.Types.timeout!(timeout)

    # Nothing comes to an alias that is none any more: a caller whose time was over finds no message of it.
    tell = :erlang.alias()

    try do
      with :ok <- Ask.call(__MODULE__, "stop/2", consumer, {:stopper, self(), tell}, timeout),
           :ok <- Ask.stop(__MODULE__, "stop/2", consumer, timeout),
           do: said(tell)
    after
      :erlang.unalias(tell)
      said(tell)
    end
  end

  defp said(tell) do
    receive do
      {^tell, %Error{} = error} -> {:error, error}
    after
      0 -> :ok
    end
  end

  # ---- GenServer

  @impl true
  def init(config) do
    Process.flag(:trap_exit, true)
    name = config.name || self()
    state = %__MODULE__{config: Config.for_index(config, 0), key: {:consumer, name}}
    Info.register({:consumer, state.key, config.group_id})

    case Handle.open(state.config, state.key) do
      {:ok, handle} -> {:ok, attached(state, handle)}
      {:error, error} -> {:stop, error}
    end
  end

  @impl true
  def handle_call({:pull, _max, _wait}, _from, %{fenced: %Error{} = error} = state),
    do: {:reply, {:error, error}, state}

  def handle_call({:pull, max, wait}, {pid, _tag} = from, state) do
    case if(state.waiting == [], do: take(state, max), else: []) do
      [] when wait == 0 ->
        {:reply, [], state}

      [] ->
        timer = Process.send_after(self(), {:expired, from}, wait)

        {:noreply,
         %{state | waiting: state.waiting ++ [{from, max, timer, Process.monitor(pid)}]}}

      messages ->
        {:reply, messages, pulled(state, pid)}
    end
  end

  def handle_call(:handle, _from, state), do: {:reply, state.handle, state}

  def handle_call({:stopper, pid, tell}, _from, state) do
    pullers = Map.delete(state.pullers, pid)
    {:reply, :ok, %{state | pullers: pullers, stoppers: [tell | state.stoppers]}}
  end

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:kmq, ref, :ready}, %{handle: %{ref: ref}} = state),
    do: {:noreply, serve(state)}

  # Whoever comes back takes the other one's place: it stays away.
  def handle_info(
        {:kmq, ref, {:down, %Error{reason: :fenced_instance_id} = error}},
        %{handle: %{ref: ref}} = state
      ) do
    Process.demonitor(state.monitor, [:flush])
    Enum.each(state.waiting, &reply(&1, {:error, error}))
    {:noreply, %{state | handle: nil, monitor: nil, waiting: [], fenced: error}}
  end

  def handle_info({:kmq, ref, {:down, %Error{} = error}}, %{handle: %{ref: ref}} = state) do
    Logger.error("kmq: #{inspect(state.key)}: the consumer ended: #{error.message}")
    if error.retriable?, do: {:noreply, reopen_later(state)}, else: {:stop, error, state}
  end

  def handle_info({:DOWN, monitor, :process, _pid, reason}, %{monitor: monitor} = state) do
    Logger.error("kmq: #{inspect(state.key)}: the consumer's process ended: #{inspect(reason)}")
    {:noreply, reopen_later(state)}
  end

  def handle_info({:DOWN, monitor, :process, _pid, reason}, %{opening: monitor} = state) do
    state = %{state | opening: nil}

    case reason do
      {:opened, {:ok, handle}} -> {:noreply, state |> attached(handle) |> serve()}
      {:opened, {:error, %Error{retriable?: false} = error}} -> {:stop, error, state}
      _later -> {:noreply, reopen_later(state)}
    end
  end

  # A puller died while it waited: nothing may be handed to it.
  def handle_info({:DOWN, monitor, :process, _pid, _reason}, state) do
    {gone, waiting} = Enum.split_with(state.waiting, &(elem(&1, 3) == monitor))
    Enum.each(gone, fn {_from, _max, timer, _monitor} -> Process.cancel_timer(timer) end)
    {:noreply, %{state | waiting: waiting}}
  end

  def handle_info({:expired, from}, state) do
    {expired, waiting} = Enum.split_with(state.waiting, &(elem(&1, 0) == from))
    Enum.each(expired, &reply(&1, []))
    {:noreply, %{state | waiting: waiting}}
  end

  def handle_info({:kmq, ref, {:topics, topics}}, %{handle: %{ref: ref}} = state) do
    {:ok, config} = Config.with_topics(state.config, topics)
    {:noreply, %{state | config: config}}
  end

  def handle_info(:reopen, %{handle: nil, opening: nil} = state) do
    %{config: config, key: key} = state
    {_pid, monitor} = spawn_monitor(fn -> exit({:opened, Handle.open(config, key)}) end)
    {:noreply, %{state | opening: monitor}}
  end

  def handle_info(:reopen, state), do: {:noreply, state}
  def handle_info({:kmq, _ref, _event}, state), do: {:noreply, state}
  def handle_info({:EXIT, _pid, reason}, state) when reason in [:normal], do: {:noreply, state}
  def handle_info({:EXIT, _pid, reason}, state), do: {:stop, reason, state}

  def handle_info(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  @impl true
  def terminate(_reason, state) do
    Enum.each(state.waiting, &reply(&1, {:error, Ask.closed(__MODULE__)}))
    close(state)
  end

  defp close(%{handle: nil}), do: :ok

  defp close(state) do
    drain? =
      Enum.any?(state.pullers, fn {pid, _} -> node(pid) != node() or Process.alive?(pid) end)

    with {:error, error} <- Handle.close(state.handle, state.config.drain_timeout, drain?) do
      Logger.warning("kmq: #{inspect(state.key)}: closed, but not in order: #{inspect(error)}")
      Enum.each(state.stoppers, &send(&1, {&1, error}))
    end

    :ok
  end

  # Who may have something in work, where an end waits for that. Those that have ended are forgotten now and then.
  defp pulled(%{config: %{delivery: :offsets}} = state, pid) do
    known = state.pullers

    known =
      if map_size(known) >= 100 and not is_map_key(known, pid),
        do: Map.filter(known, fn {pid, _} -> node(pid) != node() or Process.alive?(pid) end),
        else: known

    %{state | pullers: Map.put(known, pid, true)}
  end

  defp pulled(state, _pid), do: state

  defp attached(state, handle) do
    Handle.attach(handle, self())
    %{state | handle: handle, monitor: Process.monitor(handle.pid)}
  end

  defp reopen_later(state) do
    state.monitor && Process.demonitor(state.monitor, [:flush])
    Process.send_after(self(), :reopen, @reopen_ms)
    %{state | handle: nil, monitor: nil}
  end

  defp take(%{handle: nil}, _max), do: []

  defp take(state, max) do
    state.handle |> Handle.take(max) |> Message.from_batches(state.handle, state.config)
  end

  defp serve(%{waiting: []} = state), do: state

  defp serve(%{waiting: [{_from, max, _timer, _monitor} = waiter | rest]} = state) do
    case take(state, max) do
      [] ->
        state

      messages ->
        reply(waiter, messages)
        {{pid, _tag}, _, _, _} = waiter
        serve(pulled(%{state | waiting: rest}, pid))
    end
  end

  defp reply({from, _max, timer, monitor}, messages) do
    Process.cancel_timer(timer)
    Process.demonitor(monitor, [:flush])
    GenServer.reply(from, messages)
  end
end
