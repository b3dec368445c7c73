defmodule Kmq.Handle do
  @moduledoc false
  # The owner of one native consumer: member of the group, keeper of all that is handed out.
  #
  # A producer or a pull consumer borrows it. When the borrower dies, acks of what is in work still count and leases go on being
  # renewed; the restarted borrower takes the same handle again, by its key. Nobody comes back within drain_timeout: it closes.
  #
  # Messages from the engine (all of them):
  #
  #   {:kmq, ref, {:due, ms}}   poll within ms          {:kmq, ref, :ready}   to the borrower (to us while there is none)
  #
  # Events of a poll: see event/2. What blocks (committed offsets, watermarks) runs in a process of its own, monitored, one at a
  # time per purpose; an answer that comes too late is refused by the engine, by epoch or by slot.
  use GenServer, restart: :temporary

  require Logger

  alias Kmq.{
    Advice,
    Ask,
    Beginning,
    CommandLine,
    Config,
    Control,
    Error,
    Info,
    Lanes,
    LetterWriter,
    Noted,
    Receipt,
    Security,
    Telemetry,
    Token,
    Topics,
    Tracker
  }

  alias Kmq.Ordering

  @enforce_keys [:pid, :ref]
  defstruct [:pid, :ref]

  @type t :: %__MODULE__{pid: pid, ref: reference}
  @type token :: {slot :: integer, offset :: integer}
  @type batch :: {slot :: integer, topic :: binary, partition :: integer, [tuple]}
  @type refusal ::
          {integer, integer, Kmq.failure()}

  @retry_causes %{failed: {0, 1}, released: {2, 0}, snoozed: {3, 0}, rejected: {4, 3}}

  # ---- for the borrower

  @doc "The living handle of that key, or a new one. Topics are checked first; see `Kmq.Topics.prepare/1`."
  @spec open(Kmq.Config.t(), term) :: {:ok, t} | {:error, Error.t()}
  def open(config, key) do
    case Registry.lookup(Kmq.Registry, {:handle, key}) do
      [{pid, _}] -> borrow(pid, config, key)
      [] -> start(config, key)
    end
  end

  defp borrow(pid, config, key) do
    case GenServer.call(pid, {:borrow, config}, 10_000) do
      {:ok, ref} -> {:ok, %__MODULE__{pid: pid, ref: ref}}
      :closing -> wait_and_open(pid, config, key)
    end
  catch
    :exit, _ -> wait_and_open(pid, config, key)
  end

  # The last life of this key is on its way out, bounded by its own close.
  defp wait_and_open(pid, config, key) do
    monitor = Process.monitor(pid)

    receive do
      {:DOWN, ^monitor, _, _, _} -> start(config, key)
    after
      config.drain_timeout + 5_000 ->
        Process.demonitor(monitor, [:flush])
        {:error, Error.new(:timeout, "the handle of #{inspect(key)} does not close")}
    end
  end

  defp start(config, key) do
    with {:ok, _partitions} <- Topics.prepare(config) do
      case DynamicSupervisor.start_child(
             Kmq.HandleSupervisor,
             {__MODULE__, {config, key, self()}}
           ) do
        {:ok, pid} -> borrow(pid, config, key)
        {:error, {:already_started, pid}} -> borrow(pid, config, key)
        {:error, %Error{} = error} -> {:error, error}
        {:error, reason} -> {:error, Error.from_native(reason, "the consumer does not start")}
      end
    end
  end

  def start_link({_config, key, _borrower} = args) do
    GenServer.start_link(__MODULE__, args, name: {:via, Registry, {Kmq.Registry, {:handle, key}}})
  end

  @doc """
  Wake-ups go to `pid`, which then calls `take/2` until it gives fewer than asked for. `lanes`: where it counts what it emits; what a borrower
  before it had taken and not passed on when it ended must come again.
  """
  @spec attach(t, pid, Lanes.t() | nil) :: :ok | {:error, Error.t()}
  def attach(%__MODULE__{pid: handle}, pid, lanes \\ nil),
    do: call(handle, {:attach, pid, lanes}, 10_000)

  @doc "At most `max` messages. Fewer: a `{:kmq, ref, :ready}` comes when there are more."
  @spec take(t, non_neg_integer) :: [batch]
  def take(%__MODULE__{ref: ref}, max) do
    case :kmq_nif.consumer_take(ref, max) do
      {batches, false} ->
        batches

      {batches, true} ->
        send(self(), {:kmq, ref, :ready})
        batches

      {:error, _} ->
        []
    end
  end

  @doc """
  The same within the room of each lane (`Kmq.Lanes`): batches have their lane as a fifth element. Second: `{slot, topic, partition}`
  of those that have messages and no lane yet, see `lanes/2`.
  """
  @spec take(t, non_neg_integer, {:partition | :key, [integer]}) ::
          {[{integer, binary, integer, [tuple], lane :: integer}], [{integer, binary, integer}]}
  def take(%__MODULE__{ref: ref}, max, rooms) do
    case :kmq_nif.consumer_take(ref, max, rooms) do
      {batches, more?, unknown} ->
        if more?, do: send(self(), {:kmq, ref, :ready})
        {batches, unknown}

      {:error, _} ->
        {[], []}
    end
  end

  @doc "Where a partition's messages go from now on."
  @spec lanes(t, [{slot :: integer, lane :: integer}]) :: :ok
  def lanes(%__MODULE__{ref: ref}, list) do
    _ = :kmq_nif.consumer_lanes(ref, list)
    :ok
  end

  @doc "Settles what was handed out, from any process of any node."
  @spec settle(t, :ack | :discard, [token]) :: :ok | {:error, [refusal]}
  def settle(%__MODULE__{pid: pid} = handle, action, tokens) when node(pid) != node() do
    remote(handle, {:settle, action, tokens}, tokens)
  end

  def settle(%__MODULE__{ref: ref}, action, tokens) do
    refused(:kmq_nif.consumer_settle(ref, end_cause(action), tokens), tokens)
  rescue
    ArgumentError -> {:error, unusable(ref, tokens)}
  end

  defp end_cause(:ack), do: 0
  defp end_cause(:discard), do: 1

  @doc "Asks for another delivery after a delay, or (`:rejected`) for the dead letter topic."
  @spec retry(t, [{integer, integer, non_neg_integer}], atom, binary | nil) ::
          :ok | {:error, [refusal]}
  def retry(handle, tokens, cause, text \\ nil)

  def retry(%__MODULE__{pid: pid} = handle, tokens, cause, text) when node(pid) != node() do
    remote(handle, {:retry, tokens, cause, text}, tokens)
  end

  def retry(%__MODULE__{ref: ref}, tokens, cause, text) do
    {code, flags} = Map.fetch!(@retry_causes, cause)
    refused(:kmq_nif.consumer_retry(ref, tokens, code, flags, clip(text)), tokens)
  rescue
    ArgumentError -> {:error, unusable(ref, tokens)}
  end

  @doc "To the dead letter topic. The original is needed where there is no tracker to read it again."
  @spec reject(t, [{integer, integer, LetterWriter.original() | term}], binary | nil) ::
          :ok | {:error, [refusal]}
  def reject(%__MODULE__{pid: pid} = handle, entries, text) when node(pid) != node() do
    remote(handle, {:reject, entries, text}, entries)
  end

  def reject(%__MODULE__{pid: pid} = handle, entries, text) do
    case LetterWriter.whereis(pid) do
      nil ->
        retry(handle, for({slot, offset, _} <- entries, do: {slot, offset, 0}), :rejected, text)

      writer ->
        LetterWriter.reject(writer, entries, clip(text))
    end
  catch
    :exit, _ -> {:error, all_closed(entries)}
  end

  @doc "What is in work may be so for so many ms from now on."
  @spec extend(t, [{integer, integer, non_neg_integer}]) :: :ok | {:error, [refusal]}
  def extend(%__MODULE__{pid: pid} = handle, tokens) when node(pid) != node() do
    remote(handle, {:extend, tokens}, tokens)
  end

  def extend(%__MODULE__{ref: ref}, tokens) do
    refused(:kmq_nif.consumer_extend(ref, tokens, false), tokens)
  rescue
    ArgumentError -> {:error, unusable(ref, tokens)}
  end

  @doc "It is no more of this handle's: whoever has a receipt settles it within the time limit, or it comes again."
  @spec leave(t, [token]) :: :ok | {:error, [refusal]}
  def leave(%__MODULE__{pid: pid} = handle, tokens) when node(pid) != node() do
    remote(handle, {:leave, tokens}, tokens)
  end

  def leave(%__MODULE__{ref: ref}, tokens) do
    timed = for {slot, offset} <- tokens, do: {slot, offset, -1}
    refused(:kmq_nif.consumer_extend(ref, timed, true), tokens)
  rescue
    ArgumentError -> {:error, unusable(ref, tokens)}
  end

  @doc "What a receipt of one of its messages says beside the message's place; nil when it is closed."
  @spec receipt_info(t) :: map | nil
  def receipt_info(%__MODULE__{pid: pid}) when node(pid) != node() do
    GenServer.call(pid, :receipt_info)
  catch
    :exit, _ -> nil
  end

  def receipt_info(%__MODULE__{pid: pid}) do
    case Registry.lookup(Kmq.Registry, {:receipts, pid}) do
      [{^pid, info}] -> info
      [] -> nil
    end
  end

  # The native side holds at most 512 bytes; cut between characters.
  defp clip(nil), do: ""
  defp clip(text) when byte_size(text) <= 512, do: text

  defp clip(text) do
    text |> binary_part(0, 512) |> trim_partial(3)
  end

  defp trim_partial(text, 0), do: text

  defp trim_partial(text, n) do
    if String.valid?(text),
      do: text,
      else: trim_partial(binary_part(text, 0, byte_size(text) - 1), n - 1)
  end

  # A message that was kept beyond the life of its VM has a reference that stands for nothing. Where that is not so, the message was changed.
  defp unusable(ref, tokens) do
    if ours?(ref),
      do:
        raise(
          ArgumentError,
          "expected messages as a consumer has handed them out, one of these was changed"
        ),
      else: all_closed(tokens)
  end

  defp ours?(ref) do
    _ = :kmq_nif.consumer_info(ref)
    true
  rescue
    ArgumentError -> false
  end

  defp refused(:ok, _tokens), do: :ok
  defp refused({:error, list}, _tokens) when is_list(list), do: {:error, list}
  defp refused({:error, :closed}, tokens), do: {:error, all_closed(tokens)}

  defp all_closed(tokens), do: all_refused(tokens, :closed)
  defp all_refused(tokens, reason), do: Enum.map(tokens, &{elem(&1, 0), elem(&1, 1), reason})

  @remote_ms 10_000

  defp remote(%__MODULE__{pid: pid}, request, tokens) do
    GenServer.call(pid, request, @remote_ms)
  catch
    # It may have been settled all the same, or be so when its node answers again.
    :exit, {:timeout, _} -> {:error, all_refused(tokens, :timeout)}
    :exit, _ -> {:error, all_closed(tokens)}
  end

  @doc "What is in work is in nobody's hands any more. With `delivery: :offsets`, where nothing else would, it comes again from the commit on."
  @spec again(t) :: :ok
  def again(%__MODULE__{pid: pid, ref: ref}) do
    _ = :kmq_nif.consumer_again(ref)
    GenServer.cast(pid, :gone_are_made_good)
  end

  @doc """
  Who works for the borrower: where one of them dies and the borrower with it, nobody else would know that what it had must come again.
  """
  @spec workers(t, [pid]) :: :ok
  def workers(%__MODULE__{pid: pid}, pids), do: GenServer.cast(pid, {:workers, self(), pids})

  @doc "Nothing more is handed out."
  @spec drain(t) :: :ok
  def drain(%__MODULE__{ref: ref}) do
    _ = :kmq_nif.consumer_drain(ref)
    :ok
  end

  @doc "Everything settled before this call is durable when it returns `:ok`."
  @spec flush(t, timeout) :: :ok | {:error, Error.t()}
  def flush(handle, timeout), do: with({:ok, _} <- confirm(handle, timeout), do: :ok)

  @doc """
  The same, and from which offset on slots were lost before the group's commit was past it, `%{slot => offset}`: whoever has the partition now
  hands that out again, settled or not.
  """
  @spec confirm(t, timeout) :: {:ok, %{integer => integer}} | {:error, Error.t()}
  def confirm(%__MODULE__{pid: pid}, timeout), do: call(pid, :flush, timeout)

  @doc """
  Leaves the group: what was not handed out is the group's again, what is still open goes back at no attempt, ENDs and
  the last commit are acknowledged. After `timeout` ms it ends all the same, and says so.

  Without markers it waits for what is in work, unless `drain?` is false.
  """
  @spec close(t, non_neg_integer, boolean) :: :ok | {:error, Error.t()}
  def close(%__MODULE__{pid: pid}, timeout, drain? \\ true) do
    case call(pid, {:close, timeout, drain?}, timeout + 3_000) do
      {:error, %Error{reason: :closed}} -> :ok
      other -> other
    end
  end

  @doc "What it holds, by partition."
  @spec info(t) :: map
  def info(%__MODULE__{ref: ref}) do
    case :kmq_nif.consumer_info(ref) do
      {:ok, map} -> map
      {:error, _} -> %{partitions: [], waiting: 0, ends: 0, in_flight: 0, epoch: 0}
    end
  end

  defp call(pid, request, timeout) do
    GenServer.call(pid, request, timeout)
  catch
    :exit, {:timeout, _} ->
      {:error, Error.new(:timeout, "not done in #{timeout} ms", retriable?: true)}

    :exit, _ ->
      {:error, Error.new(:closed, "the consumer is closed")}
  end

  # ---- the process

  @impl true
  def init({config, key, borrower}) do
    Process.flag(:trap_exit, true)

    case Security.consumer_open(
           config.consumer_props ++ version_props(),
           config.producer_props,
           engine_options(config)
         ) do
      {:ok, ref} ->
        state = %{
          ref: ref,
          config: config,
          key: key,
          borrower: nil,
          monitor: nil,
          tracker: nil,
          # What its tracker is there for: all topics this consumer has ever had, open messages may be of any of them.
          covered: config,
          updated: false,
          identity: identity(config),
          # monitor => the borrower that told of this worker; a worker has died, and its borrower has not made that good yet
          workers: %{},
          worker_gone: false,
          # What its borrower counts with, where an order is kept.
          lanes: nil,
          letters: nil,
          timer: nil,
          timer_at: nil,
          resolver: nil,
          # How often in a row it was not found out where to begin.
          unresolved: 0,
          resets: %{},
          seeks: %{},
          begun: MapSet.new(),
          flushers: [],
          next_flushers: [],
          closers: [],
          closing: false,
          # It has left its group for good, and ends when nothing of it is in work.
          leaving: false,
          orphan_timer: nil,
          token: nil,
          noted: %{}
        }

        {:ok, _} = Registry.register(Kmq.Registry, {:receipts, self()}, Receipt.info(config))
        :ok = OffBroadway.Kmq.Acknowledger.register(ref, config)
        {:ok, _} = Registry.register(Kmq.Registry, {:native, key}, ref)
        gauges_later(config)
        state = %{state | letters: letter_writer(config, ref)}
        {:ok, watch(state, borrower), {:continue, :start}}

      {:error, reason} ->
        {:stop, Error.from_native(reason, "the consumer does not start")}
    end
  end

  @impl true
  def handle_continue(:start, state) do
    if tracked?(state.config), do: send(self(), :tracker)

    case :kmq_nif.consumer_subscribe(state.ref) do
      :ok -> {:noreply, poll(state)}
      {:error, reason} -> down(Error.from_native(reason, "subscribe"), state)
    end
  end

  # What makes two configurations the same consumer.
  defp identity(config) do
    Map.take(config, [
      :hosts,
      :topics,
      :group_id,
      :delivery,
      :marker_format,
      :ordering,
      :marker_topics,
      :dead_letter_topics,
      :on_success,
      :on_failure
    ])
  end

  # Where there is no tracker, the handle's own process writes dead letters.
  defp letter_writer(%{delivery: delivery} = config, ref)
       when delivery in [:offsets, :at_most_once] do
    {:ok, writer} = LetterWriter.start_link(config, ref)
    writer
  end

  defp letter_writer(_config, _ref), do: nil

  # Where the library knows it, a full local queue costs 10 ms and not a second.
  defp version_props do
    case :kmq_nif.version() do
      {_, number} when number >= 0x02020000 -> [{"fetch.queue.backoff.ms", "10"}]
      _ -> []
    end
  end

  defp engine_options(config) do
    max_poll =
      config.consumer_props
      |> Map.new()
      |> Map.get("max.poll.interval.ms", "300000")
      |> String.to_integer()

    # Where an order is kept, or a commit says what is done, the next owner begins when the last one is through with its work.
    drain? = config.delivery == :offsets or config.ordering != :none

    %{
      group_id: config.group_id,
      topics: engine_topics(config),
      format: config.marker_format,
      delivery: config.delivery,
      lease_ms: config.lease,
      max_processing_ms: config.max_processing_time,
      start_ahead: config.start_ahead,
      max_in_flight: config.max_in_flight,
      commit_interval_ms: config.commit_interval,
      ack_flush_ms: config.ack_flush_interval,
      revoke_wait_ms: revoke_wait(config, drain?, max_poll),
      drain_on_revoke: drain?,
      cooperative: Config.cooperative?(config),
      drain_ms: config.drain_timeout,
      max_redeliveries: config.max_redeliveries,
      max_poll_ms: max_poll,
      store_bytes: 32 * 1024 * 1024,
      count_header: config.count_header,
      ttl_ms: config.ttl || 0,
      on_expired: config.on_expired || :reject,
      filter: config.filter || [],
      instance: :rand.uniform(0x7FFF_FFFF_FFFF)
    }
  end

  defp engine_topics(config), do: Enum.map(config.topics, &{&1, config.marker_topics[&1]})

  # A member that takes longer than max.poll.interval.ms is thrown out, and has waited for nothing.
  defp revoke_wait(config, drain?, max_poll) do
    most = if drain?, do: config.drain_timeout, else: min(config.drain_timeout, 10_000)
    min(most, div(max_poll * 3, 4))
  end

  @impl true
  def handle_call({:borrow, _config}, _from, %{closing: closing, leaving: leaving} = state)
      when closing or leaving,
      do: {:reply, :closing, state}

  # A life of this name with other options is another consumer: this one ends first, and what it had is the group's again.
  def handle_call({:borrow, config}, {pid, _}, state) do
    if identity(config) == state.identity,
      do: {:reply, {:ok, state.ref}, watch(state, pid)},
      else: {:reply, :closing, close_begin(state, state.config.drain_timeout)}
  end

  def handle_call({:attach, pid, lanes}, _from, state) do
    state =
      if state.worker_gone or lost?(state.lanes, lanes) do
        _ = :kmq_nif.consumer_again(state.ref)
        # At once: what comes next must not be handed out before it.
        poll(%{state | worker_gone: false})
      else
        state
      end

    state = %{state | lanes: lanes}
    # A producer that was restarted knows the topics of its options only.
    if state.updated, do: send(pid, {:kmq, state.ref, {:topics, state.config.topics}})
    {:reply, :kmq_nif.consumer_attach(state.ref, pid), watch(state, pid)}
  end

  def handle_call({:settle, action, tokens}, _from, state) do
    {:reply, settle(handle(state), action, tokens), state}
  end

  def handle_call({:retry, tokens, cause, text}, _from, state) do
    {:reply, retry(handle(state), tokens, cause, text), state}
  end

  def handle_call({:reject, entries, text}, _from, state) do
    {:reply, reject(handle(state), entries, text), state}
  end

  def handle_call({:extend, tokens}, _from, state) do
    {:reply, extend(handle(state), tokens), state}
  end

  def handle_call({:leave, tokens}, _from, state) do
    {:reply, leave(handle(state), tokens), state}
  end

  def handle_call(:receipt_info, _from, state) do
    {:reply, receipt_info(handle(state)), state}
  end

  # One at a time: who comes while it is under way waits for the next, and does not lengthen the wait of those before.
  def handle_call(:flush, from, %{flushers: [_ | _]} = state),
    do: {:noreply, %{state | next_flushers: [from | state.next_flushers]}}

  def handle_call(:flush, from, state) do
    case :kmq_nif.consumer_flush(state.ref) do
      :ok -> {:noreply, poll(%{state | flushers: [from]})}
      {:error, reason} -> {:reply, {:error, Error.from_native(reason, "flush")}, state}
    end
  end

  def handle_call({:seek, place, to}, from, state) do
    config = state.config
    monitor = run(fn -> Control.position(config, place, to) end, 0)
    {:noreply, %{state | seeks: Map.put(state.seeks, monitor, {from, place})}}
  end

  def handle_call({:close, timeout, drain?}, from, state) do
    {:noreply, close_begin(%{state | closers: [from | state.closers]}, timeout, drain?)}
  end

  def handle_call({:with_topics, topics}, _from, state),
    do: {:reply, Config.with_topics(state.config, topics), state}

  def handle_call({:update_topics, _topics}, _from, %{closing: closing, leaving: leaving} = state)
      when closing or leaving,
      do: {:reply, {:error, Error.new(:closed, "the consumer is closed")}, state}

  def handle_call({:update_topics, topics}, _from, state) do
    with {:ok, config} <- Config.with_topics(state.config, topics),
         :ok <- :kmq_nif.consumer_topics(state.ref, engine_topics(config)) do
      Logger.info("kmq: #{name(state)}: topics from now on: #{inspect(topics)}")
      state.borrower && send(state.borrower, {:kmq, state.ref, {:topics, topics}})
      {:reply, :ok, poll(cover(%{state | config: config, updated: true}))}
    else
      {:error, reason} -> {:reply, {:error, Error.from_native(reason, "topics")}, state}
    end
  end

  def handle_call({:test_fatal, which}, _from, state) do
    {:reply, :kmq_nif.consumer_test_fatal(state.ref, which), poll(state)}
  end

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast({:workers, borrower, pids}, state) do
    workers = for pid <- pids, into: state.workers, do: {Process.monitor(pid), borrower}
    {:noreply, %{state | workers: workers}}
  end

  def handle_cast(:gone_are_made_good, state), do: {:noreply, %{state | worker_gone: false}}

  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:kmq, ref, {:due, 0}}, %{ref: ref} = state), do: {:noreply, poll(state)}

  def handle_info({:kmq, ref, {:due, ms}}, %{ref: ref} = state),
    do: {:noreply, schedule(state, ms)}

  def handle_info({:kmq, ref, :ready}, %{ref: ref} = state), do: {:noreply, poll(state)}

  def handle_info({:timeout, timer, :poll}, %{timer: timer} = state) do
    {:noreply, poll(%{state | timer: nil, timer_at: nil})}
  end

  def handle_info({:timeout, timer, :orphan}, %{orphan_timer: timer} = state) do
    Logger.info("kmq: #{name(state)}: nobody took it again, it closes")
    {:noreply, close_begin(state, state.config.drain_timeout)}
  end

  def handle_info({:timeout, _timer, :kill}, state) do
    _ = :kmq_nif.consumer_kill(state.ref)
    closed(:timeout, state)
  end

  def handle_info({:timeout, _old, _what}, state), do: {:noreply, state}

  def handle_info(:gauges, state) do
    Info.gauges(handle(state), state.key, state.config.group_id)
    gauges_later(state.config)
    {:noreply, state}
  end

  def handle_info({:closed, how}, state), do: closed(how, state)

  def handle_info({:leaving, deadline}, state), do: {:noreply, leaving_on(state, deadline)}

  def handle_info({:down, _again}, %{leaving: true} = state), do: {:noreply, state}
  def handle_info({:down, error}, state), do: down(error, state)

  def handle_info(:tracker, state) do
    case Tracker.acquire(state.covered, self()) do
      {:ok, pid} ->
        {:noreply, %{release_tracker(state) | tracker: {Process.monitor(pid), pid}}}

      {:error, error} ->
        Logger.error(
          "kmq: #{name(state)}: no tracker: #{Exception.message(error)}; tried again in 5 s"
        )

        Process.send_after(self(), :tracker, 5_000)
        {:noreply, state}
    end
  end

  # Its supervisor starts it again, but it does not know of us any more.
  def handle_info({:DOWN, monitor, :process, _pid, _reason}, %{tracker: {monitor, _}} = state) do
    unless state.closing, do: Process.send_after(self(), :tracker, 200)
    {:noreply, %{state | tracker: nil}}
  end

  def handle_info({:kmq_token, :handle, token}, %{token: monitor} = state) when monitor != nil,
    do: {:noreply, got_token(state, token)}

  def handle_info({:DOWN, monitor, :process, _pid, _reason}, %{token: monitor} = state),
    do: {:noreply, want_token(%{state | token: nil})}

  def handle_info({:DOWN, monitor, :process, _pid, reason}, %{monitor: monitor} = state) do
    {:noreply, orphaned(%{state | monitor: nil, borrower: nil}, reason)}
  end

  def handle_info(
        {:DOWN, monitor, :process, _pid, reason},
        %{resolver: {_, monitor, epoch, partitions}} = state
      ) do
    state = %{state | resolver: nil}

    case reason do
      {:resolved, positions} ->
        {:noreply, assign(%{state | unresolved: 0}, epoch, positions)}

      failed ->
        {:noreply, state |> unresolved(failed) |> resolve(epoch, partitions, 1_000)}
    end
  end

  # Its borrower makes it good, if it is still there; another one has taken its place, or will.
  def handle_info({:DOWN, monitor, :process, _pid, _reason}, %{workers: workers} = state)
      when is_map_key(workers, monitor) do
    {borrower, workers} = Map.pop(workers, monitor)
    state = %{state | workers: workers}

    if state.borrower in [borrower, nil] do
      {:noreply, %{state | worker_gone: true}}
    else
      _ = :kmq_nif.consumer_again(state.ref)
      {:noreply, state}
    end
  end

  def handle_info({:DOWN, monitor, :process, _pid, reason}, state) do
    case Map.pop(state.resets, monitor) do
      {nil, _} -> {:noreply, sought(state, Map.pop(state.seeks, monitor), reason)}
      {reset, resets} -> {:noreply, reset(%{state | resets: resets}, reset, reason)}
    end
  end

  # What it had marked can only come again when nothing more is committed.
  def handle_info({:EXIT, pid, reason}, %{letters: pid} = state) when pid != nil do
    down(
      Error.new(:closed, "its writer of dead letters ended: #{inspect(reason)}", retriable?: true),
      state
    )
  end

  def handle_info({:EXIT, _pid, _reason}, state), do: {:noreply, state}

  def handle_info(message, state) do
    Logger.debug("kmq: #{name(state)}: unexpected message #{inspect(message)}")
    {:noreply, state}
  end

  # The supervisor, and with it the application, stops: bounded, and as orderly as the time allows.
  @impl true
  def terminate(_reason, state) do
    stop_resolvers(state)
    _ = :kmq_nif.consumer_close(state.ref, 3_000)
    last_polls(state.ref, System.monotonic_time(:millisecond) + 4_000)
    _ = :kmq_nif.consumer_kill(state.ref)
    :ok
  end

  defp last_polls(ref, deadline) do
    with {events, _next} when is_list(events) <- :kmq_nif.consumer_poll(ref),
         false <- Enum.any?(events, &match?({:closed, _}, &1)),
         true <- System.monotonic_time(:millisecond) < deadline do
      receive do
        {:kmq, ^ref, {:due, 0}} -> :ok
      after
        10 -> :ok
      end

      last_polls(ref, deadline)
    end
  end

  # An interval of 0, or nobody who could listen: none.
  defp gauges_later(%{gauge_interval: 0}), do: :ok

  defp gauges_later(config) do
    if Telemetry.listened?(), do: Process.send_after(self(), :gauges, config.gauge_interval)
    :ok
  end

  # ---- polling

  defp handle(state), do: %__MODULE__{pid: self(), ref: state.ref}

  defp poll(state) do
    case :kmq_nif.consumer_poll(state.ref) do
      {:error, _closed} -> state
      {events, next} -> events |> Enum.reduce(state, &event/2) |> schedule(next)
    end
  end

  defp schedule(state, ms) do
    at = System.monotonic_time(:millisecond) + ms

    if state.timer && state.timer_at <= at do
      state
    else
      state.timer && :erlang.cancel_timer(state.timer)
      %{state | timer: :erlang.start_timer(ms, self(), :poll), timer_at: at}
    end
  end

  defp event({:assign, epoch, partitions}, state), do: resolve(state, epoch, partitions, 0)

  defp event({:revoked, _epoch, partitions, lost}, state) do
    # Incrementally, what was just assigned is not among these.
    state =
      if lost or not Config.cooperative?(state.config), do: stop_resolvers(state), else: state

    order(state, fn name, index -> Ordering.revoked(name, index, partitions, busy(state)) end)

    if partitions != [] do
      Logger.info(
        "kmq: #{name(state)}: #{if lost, do: "lost", else: "gave back"} #{describe(partitions)}"
      )

      telemetry(
        [:assignments_revoked, :stop],
        %{duration: 0, monotonic_time: System.monotonic_time()},
        state,
        %{partitions: partitions}
      )
    end

    state
  end

  defp event({:out_of_range, slot, topic, partition, position}, state) do
    look = fn -> Beginning.instead_of(state.config, topic, partition, position) end
    look_up(state, {slot, topic, partition, position}, look)
  end

  # Another topic of the same name may be in its place.
  defp event({:doubted, slot, topic, partition, position, witnesses}, state) do
    look = fn -> Beginning.doubted(state.config, topic, partition, witnesses) end
    look_up(state, {slot, topic, partition, position}, look)
  end

  defp event({:rebuild, error}, state) do
    error = Error.from_native(error, "the marker producer")

    _ = :kmq_nif.consumer_rebuild(state.ref)

    # One without rights is replaced each second, for as long as it has none.
    note(state, {:rebuild, error.name}, fn ->
      Logger.error(
        "kmq: #{name(state)}: #{error.message}; it is replaced, nothing is handed out meanwhile"
      )

      telemetry([:error], %{count: 1}, state, %{error: error})
    end)
  end

  # The client alone is beyond use: what is in work stays in work, and this handle joins its group again with a new one.
  defp event({:reopen, error}, state) do
    error = Error.from_native(error, "the consumer client")

    state =
      note(state, :reopen, fn ->
        Logger.error("kmq: #{name(state)}: #{error.message}; it is replaced")
        telemetry([:error], %{count: 1}, state, %{error: error})
      end)

    case :kmq_nif.consumer_reopen(state.ref) do
      {:ok, partitions} ->
        event({:revoked, 0, partitions, true}, state)

      {:error, :closed} ->
        state

      {:error, reason} ->
        error = Error.from_native(reason, "a new consumer client, tried again")

        note(state, :reopen_failed, fn ->
          Logger.error("kmq: #{name(state)}: #{error.message}")
        end)
    end
  end

  # Told when it begins and when it is over, not each time.
  defp event({:start_failed, what}, state) do
    error =
      Error.new(
        :kafka,
        "markers are not written to #{what}: nothing is handed out, they are written again" <>
          Advice.markers(what),
        retriable?: true
      )

    Logger.error("kmq: #{name(state)}: #{error.message}")
    telemetry([:error], %{count: 1}, state, %{error: error})
    state
  end

  defp event({:start_works, topic}, state) do
    Logger.info("kmq: #{name(state)}: markers are written to #{topic} again")
    telemetry([:recovered], %{count: 1}, state, %{topic: topic, what: :markers})
    state
  end

  defp event({:markers_anew, what}, state) do
    note(state, {:markers_anew, what}, fn ->
      error =
        Error.new(
          :kafka,
          "#{what}: the marker topic was made anew, or lost its end: what this consumer holds is written into it again. Messages that waited " <>
            "there for another delivery, and were held by nobody, are lost"
        )

      Logger.error("kmq: #{name(state)}: #{error.message}")
      telemetry([:error], %{count: 1}, state, %{error: error})
    end)
  end

  defp event({:end_failed, what}, state) do
    note(state, {:end_failed, what}, fn ->
      error =
        Error.new(
          :kafka,
          "acknowledgements are not written to #{what}: they are written again until they are",
          retriable?: true
        )

      Logger.error("kmq: #{name(state)}: #{error.message}")
      telemetry([:error], %{count: 1}, state, %{error: error})
    end)
  end

  defp event({:commit_failed, error}, state) do
    note(state, {:commit_failed, elem(error, 0)}, fn ->
      error = Error.from_native(error, "commit")
      error = Advice.explain(error, state.config) || error
      Logger.warning("kmq: #{name(state)}: #{error.message}")
      telemetry([:error], %{count: 1}, state, %{error: error})
    end)
  end

  defp event({:error, native}, state) do
    error = Error.from_native(native)

    if error.fatal? do
      unless state.leaving, do: send(self(), {:down, error})
      state
    else
      note(state, {:error, error.name}, fn ->
        advice = Advice.explain(error, state.config)
        error = advice || error

        Logger.log(
          if(advice, do: :error, else: :warning),
          "kmq: #{name(state)}: #{error.message}"
        )

        telemetry([:error], %{count: 1}, state, %{error: error})
      end)
    end
  end

  # Brokers are out of reach: said once, and when they are there again. What both clients say meanwhile is the same.
  defp event({:outage, error}, state) do
    error = error |> Error.from_native() |> Advice.connection()
    Logger.warning("kmq: #{name(state)}: #{error.message}; it connects again by itself")
    telemetry([:error], %{count: 1}, state, %{error: error})
    state
  end

  defp event({:connected, ms}, state) do
    Logger.info("kmq: #{name(state)}: connected again after #{CommandLine.seconds(ms)}")
    telemetry([:recovered], %{count: 1}, state, %{what: :connection})
    state
  end

  defp event({:passing, what, error}, state), do: passing(state, what, Error.from_native(error))

  defp event({:log, level, text}, state) do
    Logger.log(log_level(level), fn -> "kmq: #{name(state)}: librdkafka: #{text}" end)
    state
  end

  defp event({:expired, letters}, state) do
    LetterWriter.expired(state.letters, letters)
    state
  end

  defp event({:overdue, topic, partition, offset}, state) do
    ms = state.config.max_processing_time
    metadata = %{topic: topic, partition: partition, offset: offset}

    Logger.warning(
      "kmq: #{name(state)}: #{topic}-#{partition}: offset #{offset} is in work and has held the commit for #{ms} ms"
    )

    telemetry([:overdue], %{count: 1, age_ms: ms}, state, metadata)
    state
  end

  defp event({:undelayed, count}, state) do
    Logger.warning(
      "kmq: #{name(state)}: #{count} delayed messages are handed out at once: delays need delivery: :markers"
    )

    telemetry([:undelayed], %{count: count}, state, %{})
    state
  end

  defp event(:undrained, state) do
    Logger.warning(
      "kmq: #{name(state)}: closes while messages are in work: what is not settled by now comes again"
    )

    state
  end

  defp event({:token, _config}, state), do: want_token(state)

  defp event({:closed, how}, state) do
    send(self(), {:closed, how})
    state
  end

  defp event(:flushed, state) do
    Enum.each(state.flushers, &GenServer.reply(&1, {:ok, uncovered(state)}))
    # Closed meanwhile: the end answers them.
    if state.next_flushers != [], do: _ = :kmq_nif.consumer_flush(state.ref)
    %{state | flushers: state.next_flushers, next_flushers: []}
  end

  defp event(_other, state), do: state

  defp uncovered(state), do: Map.new(:kmq_nif.consumer_uncovered(state.ref))

  # librdkafka logs each lost connection; what matters arrives as an error too.
  defp log_level(level) when level <= 2, do: :error
  defp log_level(_level), do: :debug

  # Tried again, and nobody need look.
  defp passing(state, what, error) do
    Logger.debug(fn -> "kmq: #{name(state)}: #{what}: #{error.message}" end)
    telemetry([:error, :passing], %{count: 1}, state, %{what: what, error: error})
    state
  end

  defp note(state, what, fun), do: %{state | noted: Noted.note(state.noted, what, fun)}

  # ---- order

  defp order(%{config: %{ordering: :none}}, _fun), do: :ok

  defp order(%{key: {name, index}} = state, fun) do
    fun.(name, index)
  catch
    :exit, reason ->
      Logger.error("kmq: #{name(state)}: the allocation of partitions failed: #{inspect(reason)}")
  end

  defp order(_pulled, _fun), do: :ok

  # Given back although something of it is still in work: it took longer than the drain.
  defp busy(state) do
    for %{state: :retired, open: open, topic: topic, partition: partition} <-
          info(handle(state)).partitions,
        open > 0,
        do: {topic, partition}
  end

  # ---- where to begin

  # Runs in a process of its own, whose exit reason is the answer; an answer that raises is asked for again.
  defp run(fun, delay) do
    {_pid, monitor} =
      spawn_monitor(fn ->
        if delay > 0, do: :timer.sleep(delay)
        exit(answer(fun))
      end)

    monitor
  end

  # Raised in a process of its own it would be a stack trace in the log.
  defp answer(fun) do
    {:resolved, fun.()}
  rescue
    error -> {:failed, error}
  end

  @unresolved_most 3

  # A leader or a coordinator moves: it passes. What does not, or cannot, is told.
  defp unresolved(state, {:failed, error}) do
    error = if is_struct(error, Error), do: error, else: Error.new(:kafka, inspect(error))
    state = %{state | unresolved: state.unresolved + 1}

    if error.retriable? and state.unresolved < @unresolved_most do
      passing(state, :assignment, error)
    else
      note(state, {:unresolved, error.reason}, fn ->
        Logger.error("kmq: #{name(state)}: #{error.message}; tried again until it works")
        telemetry([:error], %{count: 1}, state, %{error: error})
      end)
    end
  end

  defp unresolved(state, _killed), do: state

  defp resolve(state, epoch, partitions, delay) do
    state = stop_resolvers(state)
    config = state.config
    resets = resets(state, partitions)
    seen = MapSet.new(state.begun, &elem(&1, 0))

    {pid, monitor} =
      spawn_monitor(fn ->
        receive do
          :stop -> :ok
        after
          delay -> exit(answer(fn -> Beginning.positions(config, partitions, resets, seen) end))
        end
      end)

    %{state | resolver: {pid, monitor, epoch, partitions}}
  end

  # A start begins anew, a rebalance does not.
  defp resets(%{config: %{begin_offset: :reset}} = state, partitions),
    do: partitions |> MapSet.new() |> MapSet.difference(state.begun)

  defp resets(_state, _partitions), do: MapSet.new()

  defp stop_resolvers(%{resolver: nil} = state), do: state

  defp stop_resolvers(%{resolver: {pid, monitor, _, _}} = state) do
    Process.demonitor(monitor, [:flush])
    Process.exit(pid, :kill)
    %{state | resolver: nil}
  end

  defp assign(state, epoch, positions) do
    # Before the first message: whoever gets one knows where it goes.
    order(state, fn name, index ->
      Ordering.assigned(
        name,
        index,
        for({topic, partition, _, _} <- positions, do: {topic, partition})
      )
    end)

    case :kmq_nif.consumer_assign(state.ref, epoch, positions) do
      :ok ->
        partitions = Enum.map(positions, fn {topic, partition, _, _} -> {topic, partition} end)
        level = if partitions == [], do: :debug, else: :info
        Logger.log(level, "kmq: #{name(state)}: assigned #{describe(partitions)}")
        telemetry([:assigned], %{count: length(partitions)}, state, %{partitions: partitions})

        note_beginnings(
          state,
          for({topic, p, offset, false} <- Enum.sort(positions), do: {topic, p, offset})
        )

        poll(%{state | begun: MapSet.union(state.begun, MapSet.new(partitions))})

      {:error, :stale} ->
        order(state, fn name, index ->
          Ordering.revoked(name, index, for({t, p, _, _} <- positions, do: {t, p}), [])
        end)

        state

      {:error, :closed} ->
        state

      {:error, reason} ->
        Logger.error("kmq: #{name(state)}: #{Error.from_native(reason, "assign").message}")
        resolve(state, epoch, Enum.map(positions, fn {t, p, _, _} -> {t, p} end), 1_000)
    end
  end

  # The first start of a group, or one whose commits are gone: nobody should have to guess which, nor where it begins.
  defp note_beginnings(_state, []), do: :ok

  defp note_beginnings(state, without) do
    places = for {topic, partition, _offset} <- without, do: {topic, partition}
    offsets = for {_topic, _partition, offset} <- without, do: offset

    Logger.info(
      "kmq: #{name(state)}: no commit found for #{describe(places)}, reading begins there at #{list(offsets)} " <>
        "(offset_reset_policy: #{inspect(state.config.offset_reset_policy)})"
    )

    for {topic, partition, offset} <- without do
      metadata = %{topic: topic, partition: partition, reason: :no_commit}
      telemetry([:offset_reset], %{to: offset}, state, metadata)
    end
  end

  # Of a slot whose position is in question; one question at a time.
  defp look_up(state, {slot, _, _, _} = place, look) do
    if Enum.any?(state.resets, fn {_, {{s, _, _, _}, _}} -> s == slot end),
      do: state,
      else: %{state | resets: Map.put(state.resets, run(look, 0), {place, look})}
  end

  defp reset(state, {{slot, _topic, _partition, _position}, _look}, {:resolved, :again}) do
    _ = :kmq_nif.consumer_reset(state.ref, slot, -1)
    poll(state)
  end

  defp reset(state, {place, _look}, {:resolved, {:made_anew, offset}}) do
    begun_again(state, place, offset, :made_anew, fn position ->
      "the topic was deleted and made anew, and reaches as far as offset #{position} again: it is read from its beginning, at #{offset}"
    end)
  end

  defp reset(state, {place, _look}, {:resolved, offset}) do
    begun_again(state, place, offset, :out_of_range, fn position ->
      "offset #{position} is not there (retention, or a new topic of the same name); reading goes on at #{offset}"
    end)
  end

  defp reset(state, {_place, look} = reset, _crash),
    do: %{state | resets: Map.put(state.resets, run(look, 1_000), reset)}

  defp begun_again(state, {slot, topic, partition, position}, offset, reason, words) do
    case :kmq_nif.consumer_reset(state.ref, slot, offset) do
      # The partition was taken away meanwhile.
      {:error, :stale} ->
        state

      _done_or_again ->
        Logger.error("kmq: #{name(state)}: #{topic}-#{partition}: #{words.(position)}")

        telemetry([:offset_reset], %{from: position, to: offset}, state, %{
          topic: topic,
          partition: partition,
          reason: reason
        })

        poll(state)
    end
  end

  defp sought(state, {nil, _seeks}, _reason), do: state

  defp sought(state, {{from, {topic, partition} = place}, seeks}, reason) do
    state = %{state | seeks: seeks}

    with {:resolved, {:ok, offset}} <- reason,
         {:ok, before} <- :kmq_nif.consumer_seek(state.ref, topic, partition, offset) do
      Logger.info(
        "kmq: #{name(state)}: #{topic}-#{partition}: sought from #{before} to #{offset}"
      )

      telemetry([:offset_reset], %{from: before, to: offset}, state, %{
        topic: topic,
        partition: partition,
        reason: :seek
      })

      GenServer.reply(from, :ok)
      poll(state)
    else
      failed ->
        GenServer.reply(from, {:error, seek_error(failed, place, state)})
        state
    end
  end

  defp seek_error({:resolved, {:error, %Error{} = error}}, _place, _state), do: error

  defp seek_error({:error, :not_assigned}, place, state),
    do: Control.not_assigned([place], state.key)

  defp seek_error({:error, native}, _place, _state), do: Error.from_native(native, "seek")

  defp seek_error(_crash, _place, _state),
    do: Error.new(:kafka, "the place could not be looked up", retriable?: true)

  # ---- tracker

  defp tracked?(config), do: config.tracker == :embedded and config.delivery == :markers

  defp cover(state) do
    covered = Config.cover(state.config, state.covered)

    Registry.update_value(Kmq.Registry, {:receipts, self()}, fn _ -> Receipt.info(covered) end)

    if covered.marker_topics != state.covered.marker_topics and tracked?(covered),
      do: send(self(), :tracker)

    state.letters && LetterWriter.update(state.letters, covered)
    %{state | covered: covered}
  end

  # After the next one has been acquired, which may be the same.
  defp release_tracker(%{tracker: nil} = state), do: state

  defp release_tracker(%{tracker: {monitor, pid}} = state) do
    Process.demonitor(monitor, [:flush])
    Tracker.release(pid)
    %{state | tracker: nil}
  end

  # ---- borrower

  defp watch(%{borrower: pid} = state, pid), do: state

  defp watch(state, pid) do
    state.monitor && Process.demonitor(state.monitor, [:flush])
    state.orphan_timer && :erlang.cancel_timer(state.orphan_timer)
    %{state | borrower: pid, monitor: Process.monitor(pid), orphan_timer: nil}
  end

  # A producer may end with what it has taken, as by a transformer that raises.
  defp lost?(nil, _lanes), do: false
  defp lost?(%{ref: ref}, %{ref: ref}), do: false
  defp lost?(before, _lanes), do: Lanes.lost?(before)

  defp orphaned(%{closing: closing, leaving: leaving} = state, _reason) when closing or leaving,
    do: state

  # Nobody can come back for one without a name: its group has the partitions at once.
  defp orphaned(%{key: {:consumer, pid}} = state, reason)
       when is_pid(pid) and reason not in [:normal, :shutdown] do
    Logger.info("kmq: #{name(state)}: its process ended, it leaves the group: #{inspect(reason)}")
    _ = :kmq_nif.consumer_topics(state.ref, [])
    state |> poll() |> leave()
  end

  defp orphaned(state, reason) do
    wait = if reason in [:normal, :shutdown], do: 0, else: state.config.drain_timeout
    %{state | orphan_timer: :erlang.start_timer(wait, self(), :orphan)}
  end

  # ---- the end

  defp close_begin(state, timeout, drain? \\ true)
  defp close_begin(%{closing: true} = state, _timeout, _drain?), do: state

  defp close_begin(state, timeout, drain?) do
    state = stop_resolvers(state)

    case :kmq_nif.consumer_close(state.ref, timeout, drain?) do
      :ok ->
        :erlang.start_timer(timeout + 1_000, self(), :kill)
        poll(%{state | closing: true})

      {:error, :closed} ->
        send(self(), {:closed, :ok})
        %{state | closing: true}
    end
  end

  defp closed(how, state) do
    reply =
      if how == :ok,
        do: :ok,
        else:
          {:error,
           Error.new(
             :timeout,
             "#{name(state)}: closed, but not everything was acknowledged in time",
             retriable?: false
           )}

    Enum.each(state.closers, &GenServer.reply(&1, reply))

    Enum.each(
      state.flushers ++ state.next_flushers,
      &GenServer.reply(&1, if(how == :ok, do: {:ok, uncovered(state)}, else: reply))
    )

    {:stop, :normal, %{state | closers: [], flushers: [], next_flushers: []}}
  end

  # Another member has this one's place. It does not come back, or the two would take it from each other for ever; what is in work may
  # be finished, by the markers it is still this consumer's.
  defp down(%Error{reason: :fenced_instance_id} = error, state) do
    Logger.error(
      "kmq: #{name(state)}: another member has the same group_instance_id; this consumer stops, and stays stopped: #{error.message}"
    )

    telemetry([:error], %{count: 1}, state, %{error: error})
    telemetry([:fenced], %{count: 1}, state, %{})
    state.borrower && send(state.borrower, {:kmq, state.ref, {:down, error}})
    {:noreply, state |> stop_resolvers() |> give_up() |> leave()}
  end

  defp down(error, state) do
    Logger.error("kmq: #{name(state)}: #{error.message}; this consumer stops")
    telemetry([:error], %{count: 1}, state, %{error: error})

    state.borrower && send(state.borrower, {:kmq, state.ref, {:down, error}})
    {:stop, :normal, state}
  end

  # The library does not say that its partitions are another's now.
  defp give_up(state) do
    case :kmq_nif.consumer_give_up(state.ref) do
      {:ok, partitions} -> event({:revoked, 0, partitions, true}, state)
      {:error, :closed} -> state
    end
  end

  @leaving_ms 100

  # What is in work may be finished, for drain_timeout at most.
  defp leave(state) do
    _ = :kmq_nif.consumer_drain(state.ref)
    deadline = System.monotonic_time(:millisecond) + state.config.drain_timeout
    leaving_on(%{state | leaving: true}, deadline)
  end

  defp leaving_on(state, deadline) do
    open = for %{open: open, ends: ends} <- info(handle(state)).partitions, do: open + ends

    if Enum.sum(open) > 0 and System.monotonic_time(:millisecond) < deadline do
      Process.send_after(self(), {:leaving, deadline}, @leaving_ms)
      state
    else
      close_begin(state, state.config.drain_timeout)
    end
  end

  # ---- OAUTHBEARER

  # The engine gives it to the consumer and to its producer. nil: nobody was asked, or the answer is there.
  defp want_token(%{token: nil} = state) do
    case Security.token_source(state.config.consumer_props) do
      nil -> state
      source -> %{state | token: Token.request(source, :handle)}
    end
  end

  defp want_token(state), do: state

  defp got_token(state, token) do
    Process.demonitor(state.token, [:flush])
    _ = Security.set_token(:consumer_set_token, state.ref, token)
    %{state | token: nil}
  end

  # ---- words

  defp name(state), do: "#{inspect(state.key)} of #{state.config.group_id}"

  defp describe([]), do: "nothing"

  defp describe(partitions) do
    partitions
    |> Enum.group_by(&elem(&1, 0), &elem(&1, 1))
    |> Enum.map_join(", ", fn {topic, list} -> "#{topic}-#{list(Enum.sort(list))}" end)
  end

  defp list(numbers), do: inspect(numbers, charlists: :as_lists, limit: 20)

  defp telemetry(event, measurements, state, metadata) do
    Telemetry.execute(
      [:kmq | event],
      measurements,
      Map.merge(%{handle: state.key, group: state.config.group_id}, metadata)
    )
  end
end
