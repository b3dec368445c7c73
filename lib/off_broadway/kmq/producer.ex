defmodule OffBroadway.Kmq.Producer do
  @moduledoc """
  A Broadway producer that makes Kafka topics a message queue: every message is acknowledged on its own, in any order;
  what is not acknowledged in time is delivered again; what keeps failing goes to a dead letter topic.

  ## Example

      defmodule Shop.Orders do
        use Broadway

        def start_link(_options) do
          Broadway.start_link(__MODULE__,
            name: __MODULE__,
            producer: [
              module:
                {OffBroadway.Kmq.Producer,
                 hosts: [localhost: 9092], topics: ["orders"], group_id: "shop", create_topics: true}
            ],
            processors: [default: [concurrency: 50]]
          )
        end

        @impl true
        def handle_message(_processor, message, _context) do
          case Shop.ship(message.data) do
            :ok -> message
            {:error, :busy} -> Broadway.Message.failed(message, {:retry, 5_000})
            {:error, reason} -> Broadway.Message.failed(message, {:reject, reason})
          end
        end
      end

  ## Options

  #{Kmq.Options.docs(:producer)}

  ## Acknowledgements

  A message that succeeds gets `:on_success` (`:ack`), one that fails gets `:on_failure` (`:retry`):

  | | |
  |---|---|
  | `:ack` | done |
  | `:retry` | delivered again after the `:backoff`; to the dead letter topic once it has failed 1 + `:max_redeliveries` times |
  | `{:retry, delay}` | the same with ms, a backoff of its own, or a function of attempt and reason that gives ms |
  | `:release` | given back untouched, at no attempt: delivered again soon |
  | `{:snooze, delay}` | not ready yet, at no attempt: delivered again after so many ms |
  | `:reject` | to the dead letter topic now |
  | `:discard` | dropped, without a dead letter |
  | `:noop` | nothing: it counts as failed when `:max_processing_time` is over |
  | `:manual` | left to whoever has its receipt (`Kmq.receipt/1`), for `:max_processing_time`, also after the end of this VM |

  A handler can say so for one message:

    * by the reason of the failure: `Broadway.Message.failed(message, {:retry, 5_000})`, `{:retry, 5_000, reason}`,
      `{:snooze, 5_000}`, `{:reject, reason}`, `{:discard, reason}`, or `raise Kmq.Reject, "reason"`. The words `:retry`,
      `:release`, `:reject` and `:discard` alone do the same; any other reason is a failure as `:on_failure` has it
    * beforehand: `Broadway.Message.configure_ack(message, on_failure: :reject)`

  With `delivery: :offsets` or `:at_most_once` there are `:ack`, `:reject` and `:discard` only, and `:on_failure` has another default: see
  [Deliveries](delivery.md).

  The reason goes first, then what was configured for the message, then the producer's option. The reason's text is kept
  in the dead letter's `kmq-error` header.

  Acks go from the processor or batcher straight into the consumer's ledger. One that comes too late (the message was
  in work for longer than `:max_processing_time`) is reported by `[:kmq, :late_ack]` and in the log, never silently dropped.

  ## Ordering

  By default there is none: each message goes to the next free processor. `ordering: :partition` sends the messages of a partition to
  one processor, one after the other, `ordering: :key` those of a key; null keys go to any. Partitions are spread evenly over the processors, and
  over the consumers of each batcher; all producers of a pipeline share these places, and a rebalance waits for what is in work. A `:partition_by`
  of one's own is refused then: it would break the order. Without an order it is allowed.

  A message that is tried again comes behind its successors. [Order](ordering.md) says which order is kept when what fails.

  `Broadway.test_message/3` and `Broadway.test_batch/3` work with an order, too: messages go where `metadata: %{topic:, partition:, offset:, key:}` sends
  them, to the first processor without.

  ## Batching

  Without an order nothing of Kafka's partitions has to be kept, so batchers are free to build batches as they like. With
  `ordering: :partition` a batch holds messages of one partition (its `batch_key` is `{topic, partition}`). With either order the
  batches of a partition or key go to one consumer of the batcher, in order. A message waits in a batch at no risk: its
  consumer renews it, and `:max_processing_time` counts from its hand-out.

  ## Metadata

    * `topic`, `partition`, `offset`, `key`, `ts`, `headers` - as broadway_kafka's, but a null key or value is `nil`
    * `attempt` - 1 + the failures so far
    * `deliveries` - how often it has been delivered, this time included; what was given back untouched (released, or in the first
      window of an assignment that was taken away again) is in it
    * `id` - `{topic, partition, offset, ts}` of its first publication, the same for all copies

  ## Concurrency

  One producer is enough for most pipelines: `producer: [concurrency: 1]` hands out several hundred thousand messages
  a second. More producers are more members of the consumer group. The number of processors is independent of the number of
  partitions; only with `ordering: :partition` those beyond the number of partitions stay idle. Raise the processors' `:max_demand` for short handlers: Broadway's own cost per message halves.

  ## Stopping

  On shutdown nothing more is handed out, the processors finish what they have, then acks and commits are written and the
  group is left, within Broadway's `:shutdown`. What was fetched and not handed out is left to the next consumer, at no attempt.

  ## Telemetry

  See `Kmq.Telemetry`.
  """

  require Logger

  alias Kmq.{Ask, Config, Error, Handle, Lanes, Message, Ordering, Telemetry, Topics}
  alias OffBroadway.Kmq.Acknowledger

  @reopen_ms 1_000
  @look_ms 50
  # Broadway kills what is not down in :shutdown; the handle's end must be reported before.
  @margin_ms 1_000
  @default_shutdown_ms 30_000

  # The shape of Broadway's message, for hosts without Broadway.
  @plain %{
    data: nil,
    metadata: %{},
    acknowledger: nil,
    batcher: :default,
    batch_key: :default,
    batch_mode: :bulk,
    status: :ok
  }

  # handle nil: not open (yet, or again). demand: what was asked for and not emitted. gathering: its hand-out is
  # asked for.
  # Where an order is kept: order = %{scope:, processors: their names by lane, demand: {max, min}, batchers?:}, lanes what the processors
  # want, processors their monitors by pid, dying those of them that were there when one of them ended, full the lanes that the last look
  # found without room and what was done of them, look? whether another look is under way, asked the lanes whose processors were asked whether
  # they are through.
  defstruct [
    :config,
    :key,
    :handle,
    :monitor,
    :template,
    :shutdown,
    :order,
    :lanes,
    demand: 0,
    gathering: false,
    draining: false,
    processors: %{},
    dying: nil,
    full: %{},
    look?: false,
    asked: %{}
  ]

  @doc """
  Other queue topics from now on, for all producers of a pipeline that runs on this node: those that are new are checked (and with
  `create_topics: true` their marker and dead letter topics made) and read, those that are not named are given back. `[]` reads nothing
  until there are topics again. (At its start a pipeline needs one: an empty list there is more likely a mistake than a wish.)

  What is in work of a topic that is not read any more can still be acknowledged, and is redelivered where it is not; the tracker
  of a pipeline (`tracker: :embedded`) covers all topics it has ever had. New topics go by the options: `:marker_topic` and the like
  as maps apply to the topics they name, all others have the default names.

      OffBroadway.Kmq.Producer.update_topics(Shop.Orders, ["orders", "returns"])

  It lasts as long as the pipeline: after a start it reads the topics of its options again. When it fails for one of several producers, call
  it again. `{:error, %Kmq.Error{reason: :closed}}`: nothing runs by that name just now, or, as the message says, some of its producers have no
  connection and keep the topics they had.
  """
  @spec update_topics(pipeline :: term, [String.t()]) :: :ok | {:error, Error.t()}
  defdelegate update_topics(pipeline, topics), to: Kmq.Control

  # ---- Broadway.Producer

  @doc false
  @spec prepare_for_start(module, keyword) :: {[], keyword}
  def prepare_for_start(module, broadway) do
    {producer_module, options} = broadway[:producer][:module]
    config = Config.new!(options, :producer)
    refuse_partition_by(config.ordering, broadway)

    with :ok <- Kmq.Application.started(),
         {:ok, _partitions} <- Topics.prepare(config) do
      :ok
    else
      {:error, error} -> raise error
    end

    {order, broadway} = order(config.ordering, module, broadway)
    # From here on the options are a struct that shows no secret when it is printed.
    producer =
      Keyword.put(
        broadway[:producer],
        :module,
        {producer_module, [config: config, order: order]}
      )

    {[], Keyword.put(broadway, :producer, producer)}
  end

  defp refuse_partition_by(:none, _broadway), do: :ok

  defp refuse_partition_by(ordering, broadway) do
    stages =
      for group <- [:processors, :batchers],
          {name, options} <- broadway[group] || [],
          do: {group, name, options}

    for {group, name, options} <- stages, options[:partition_by] do
      raise ArgumentError,
            "the option :partition_by of #{group} #{inspect(name)} would break the order that ordering: #{inspect(ordering)} " <>
              "keeps (delivery: :offsets means ordering: :partition): leave it out, or set ordering: :none and keep an order of your own"
    end

    if broadway[:partition_by] do
      raise ArgumentError,
            "the option :partition_by would break the order that ordering: #{inspect(ordering)} keeps (delivery: :offsets means " <>
              "ordering: :partition): leave it out, or set ordering: :none and keep an order of your own"
    end
  end

  defp order(:none, _module, broadway), do: {nil, broadway}

  # Constants only in these functions: they run for each message, in producers and batchers.
  defp order(ordering, module, broadway) do
    [{processors, options} | other] = broadway[:processors]
    concurrency = options[:concurrency] || System.schedulers_online() * 2
    options = Keyword.put(options, :concurrency, concurrency)
    batchers = broadway[:batchers] || []

    sizes = [
      {{:processors, processors}, concurrency}
      | for({name, options} <- batchers, do: {{:batcher, name}, options[:concurrency] || 1})
    ]

    scopes = scopes(ordering, broadway[:name], sizes)
    scope = scopes[{:processors, processors}]
    options = Keyword.put(options, :partition_by, &Ordering.processor(&1, scope))

    batchers =
      for {name, options} <- batchers do
        scope = scopes[{:batcher, name}]
        {name, Keyword.put(options, :partition_by, &Ordering.batcher(&1, scope))}
      end

    broadway =
      Keyword.merge(broadway, processors: [{processors, options} | other], batchers: batchers)

    max = options[:max_demand] || 10

    order = %{
      scope: scope,
      processors: names(module, broadway[:name], processors, concurrency),
      demand: {max, options[:min_demand] || div(max, 2)},
      batchers?: batchers != []
    }

    {order, broadway}
  end

  # As Broadway.topology/1 and the callback process_name/2 document them.
  defp names(module, broadway, processors, concurrency) do
    name =
      if function_exported?(module, :process_name, 2),
        do: &module.process_name(broadway, &1),
        else: &:"#{broadway}.Broadway.#{&1}"

    List.to_tuple(for ix <- 0..(concurrency - 1), do: name.("Processor_#{processors}_#{ix}"))
  end

  defp scopes(:key, _name, sizes), do: Map.new(sizes, fn {set, size} -> {set, {:key, size}} end)

  defp scopes(:partition, name, sizes) do
    numbers = Ordering.prepare(name, sizes)
    Map.new(sizes, fn {set, size} -> {set, {:partition, numbers[set], size}} end)
  end

  @doc false
  @spec prepare_for_draining(struct) :: {:noreply, [], struct}
  def prepare_for_draining(state) do
    state.handle && Handle.drain(state.handle)
    {:noreply, [], %{state | draining: true}}
  end

  # ---- GenStage

  @doc false
  @spec init(keyword) :: {:producer, struct}
  def init(options) do
    # Without this terminate/2 would not run, and the group would wait for a session timeout.
    Process.flag(:trap_exit, true)
    {broadway, options} = Keyword.pop(options, :broadway, [])
    config = Keyword.get_lazy(options, :config, fn -> Config.new!(options, :producer) end)
    name = broadway[:name]
    index = broadway[:index] || 0
    Kmq.Info.register({:producer, {name, index}, config.group_id})

    state = %__MODULE__{
      config: %{Config.for_index(config, index) | name: name},
      key: {name || self(), index},
      template: template(),
      shutdown: broadway[:shutdown] || @default_shutdown_ms,
      order: options[:order]
    }

    if config.ordering != :none and state.order == nil do
      raise ArgumentError,
            "ordering: #{inspect(config.ordering)} needs a host that calls prepare_for_start/2, as Broadway does"
    end

    state = %{state | lanes: lanes(state.order)}

    case open(state) do
      {:ok, state} -> {:producer, state}
      {:error, error} -> raise error
    end
  end

  @doc false
  @spec handle_demand(pos_integer, struct) :: {:noreply, [map], struct}
  def handle_demand(demand, state) do
    state = watch_processors(%{state | demand: state.demand + demand})

    # Others ask, too: one hand-out for all of them. Where an order is kept each ask is for room of its own.
    cond do
      state.gathering ->
        {:noreply, [], state}

      state.lanes == nil and
          Process.info(self(), :message_queue_len) != {:message_queue_len, 0} ->
        send(self(), {:kmq, :asked})
        {:noreply, [], %{state | gathering: true}}

      true ->
        take(state)
    end
  end

  @doc false
  @spec handle_info(term, struct) ::
          {:noreply, [map], struct} | {:stop, term, struct}
  def handle_info({:kmq, ref, :ready}, %{handle: %{ref: ref}} = state), do: take(state)

  # Another member has this one's group_instance_id. Whoever comes back takes it again, so this one does not: it stays, without messages,
  # and what is in work is still acknowledged.
  def handle_info(
        {:kmq, ref, {:down, %Error{reason: :fenced_instance_id}}},
        %{handle: %{ref: ref}} = state
      ) do
    Process.demonitor(state.monitor, [:flush])
    {:noreply, [], %{state | handle: nil, monitor: nil}}
  end

  # A fatal error of the client: by now the handle is closed, only a new one helps.
  def handle_info({:kmq, ref, {:down, %Error{} = error}}, %{handle: %{ref: ref}} = state) do
    Logger.error("kmq: #{inspect(state.key)}: the consumer ended: #{error.message}")
    if error.retriable?, do: {:noreply, [], reopen_later(state)}, else: {:stop, error, state}
  end

  def handle_info({:DOWN, monitor, :process, _pid, reason}, %{monitor: monitor} = state)
      when monitor != nil do
    Logger.error("kmq: #{inspect(state.key)}: the consumer's process ended: #{inspect(reason)}")
    {:noreply, [], reopen_later(state)}
  end

  def handle_info({:kmq, :room}, state), do: take(state)
  def handle_info({:kmq, :asked}, state), do: take(%{state | gathering: false})
  def handle_info({:kmq, :look}, state), do: take(%{state | look?: false})

  def handle_info({{:kmq, :through, lane, number}, _answer}, state) do
    state = %{state | asked: Map.delete(state.asked, lane)}

    if Lanes.through(state.lanes, lane, number, state.demand),
      do: take(state),
      else: {:noreply, [], state}
  end

  def handle_info({:DOWN, _monitor, :process, pid, _reason}, %{processors: processors} = state)
      when is_map_key(processors, pid),
      do: processor_down(pid, state)

  def handle_info({:kmq, :reopen}, %{handle: nil, draining: false} = state) do
    case open(state) do
      {:ok, state} -> take(state)
      {:error, error} -> {:stop, error, state}
    end
  end

  # For the next handle, if this one ends.
  def handle_info({:kmq, ref, {:topics, topics}}, %{handle: %{ref: ref}} = state) do
    {:ok, config} = Config.with_topics(state.config, topics)
    {:noreply, [], %{state | config: config}}
  end

  # Wake-ups of a handle that was replaced.
  def handle_info({:kmq, _ref, _event}, state), do: {:noreply, [], state}
  def handle_info({:kmq, :reopen}, state), do: {:noreply, [], state}
  def handle_info({:EXIT, _pid, _reason}, state), do: {:noreply, [], state}

  def handle_info(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, [], state}
  end

  @doc false
  @spec handle_cast(term, struct) :: {:noreply, [], struct}
  def handle_cast(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, [], state}
  end

  @doc false
  @spec handle_call(term, GenServer.from(), struct) :: {:reply, term, [], struct}
  def handle_call(request, _from, state),
    do: {:reply, Ask.unknown(__MODULE__, request), [], state}

  @doc false
  # An orderly end closes the handle. After a crash it lives on: what is in work is still acknowledged, and the restarted
  # producer takes it over.
  @spec terminate(term, struct) :: :ok
  def terminate(reason, %{handle: %Handle{}} = state) do
    cond do
      orderly?(reason) -> close(state)
      # It may have ended with messages that no processor has, as by a transformer that raises. With markers the time limit brings them
      # back, lanes count them; here nobody would know, and the commit would stand for ever. Better handled twice.
      state.lanes == nil and state.config.delivery == :offsets -> Handle.again(state.handle)
      true -> :ok
    end

    :ok
  end

  def terminate(_reason, _state), do: :ok

  defp close(state) do
    timeout = max(min(state.config.drain_timeout, within(state.shutdown)), 0)

    with {:error, error} <- Handle.close(state.handle, timeout) do
      Logger.warning(
        "kmq: #{inspect(state.key)}: closed, but not in order: #{inspect(error)}; " <>
          "what was not written is delivered again"
      )
    end
  end

  defp orderly?(reason), do: reason in [:normal, :shutdown] or match?({:shutdown, _}, reason)

  defp within(:infinity), do: @default_shutdown_ms
  defp within(:brutal_kill), do: 0
  defp within(ms), do: ms - @margin_ms

  # ---- the handle

  # Errors that may pass do not take the pipeline down: it stays and tries again.
  defp open(state) do
    case Handle.open(state.config, state.key) do
      {:ok, handle} ->
        Handle.attach(handle, self(), state.lanes)
        monitor = Process.monitor(handle.pid)
        {:ok, %{state | handle: handle, monitor: monitor}}

      {:error, %Error{retriable?: true} = error} ->
        Logger.error("kmq: #{inspect(state.key)}: not open yet: #{error.message}")
        {:ok, reopen_later(state)}

      {:error, error} ->
        {:error, error}
    end
  end

  defp reopen_later(state) do
    state.monitor && Process.demonitor(state.monitor, [:flush])
    Process.send_after(self(), {:kmq, :reopen}, @reopen_ms)
    %{state | handle: nil, monitor: nil}
  end

  # ---- messages

  defp take(%{demand: 0} = state), do: {:noreply, [], state}
  defp take(%{draining: true} = state), do: {:noreply, [], state}
  defp take(%{handle: nil} = state), do: {:noreply, [], state}

  # Nothing for processors that are about to end: it would end with them.
  defp take(%{dying: [_ | _]} = state), do: {:noreply, [], state}

  defp take(%{lanes: nil, demand: demand} = state) do
    {messages, left} =
      state.handle
      |> Handle.take(demand)
      |> Enum.reverse()
      |> batches(state, [], demand)

    taken(messages, left, state)
  end

  defp take(%{lanes: lanes, demand: demand, order: %{scope: scope}} = state) do
    rooms = Lanes.rooms(lanes, demand)

    if Enum.any?(rooms, &(&1 > 0)) do
      {batches, unknown} = Handle.take(state.handle, demand, {lanes.mode, rooms})
      ask_again(unknown, scope, state.handle)
      # Numbered from the first to the last, built from the last to the first.
      numbered = batches |> Enum.reverse() |> Enum.map(&number(&1, lanes)) |> Enum.reverse()
      {messages, left} = batches(numbered, state, [], demand)
      state = if left > 0, do: hungry(state, rooms, used(numbered)), else: state
      taken(messages, left, state)
    else
      {:noreply, [], ask_through(state, rooms, %{})}
    end
  end

  defp hungry(state, rooms, used) do
    Lanes.hungry(state.lanes, rooms, used)
    ask_through(state, rooms, used)
  end

  # What counts a lane's messages may have been taken from them. So where nothing was done of a full one from one look to the next, its
  # processor is asked; and another look comes soon, whoever else calls.
  defp ask_through(state, rooms, used) do
    full = Lanes.full(state.lanes, rooms, used)

    state =
      for {lane, done, number} <- full,
          state.full[lane] == done and not is_map_key(state.asked, lane),
          pid = GenServer.whereis(elem(state.order.processors, lane)),
          reduce: state do
        state ->
          # As :sys.statistics(pid, :get) does it, without waiting.
          from = {self(), {:kmq, :through, lane, number}}
          send(pid, {:system, from, {:debug, {:statistics, :get}}})
          %{state | asked: Map.put(state.asked, lane, true)}
      end

    state = %{state | full: Map.new(full, fn {lane, done, _number} -> {lane, done} end)}

    if state.look? or Enum.all?(full, &is_map_key(state.asked, elem(&1, 0))) do
      state
    else
      Process.send_after(self(), {:kmq, :look}, @look_ms)
      %{state | look?: true}
    end
  end

  # Partitions that are new to the engine: told where they go, they are looked at again.
  defp ask_again([], _scope, _handle), do: :ok

  defp ask_again(unknown, scope, handle) do
    Handle.lanes(
      handle,
      for {slot, topic, partition} <- unknown do
        {slot, Ordering.lane(%{metadata: %{topic: topic, partition: partition}}, scope)}
      end
    )

    send(self(), {:kmq, handle.ref, :ready})
  end

  defp number({slot, topic, partition, records, lane}, lanes),
    do: {slot, topic, partition, records, {lane, Lanes.send_out(lanes, lane, length(records))}}

  defp used(batches) do
    Enum.reduce(batches, %{}, fn {_slot, _topic, _partition, records, {lane, _seq}}, used ->
      Map.update(used, lane, length(records), &(&1 + length(records)))
    end)
  end

  # Each message has the name twice, and a term of a process is copied with each message that is sent; one that stands in a persistent
  # term is not. The names of topics that were read stay there, a few bytes each.
  defp name(topic) do
    with nil <- :persistent_term.get({__MODULE__, topic}, nil) do
      :persistent_term.put({__MODULE__, topic}, topic)
      :persistent_term.get({__MODULE__, topic})
    end
  end

  defp taken(messages, left, %{demand: demand} = state) do
    if left < demand do
      metadata = %{handle: state.key, group: state.config.group_id}
      Telemetry.execute([:kmq, :take], %{count: demand - left}, metadata)
    end

    {:noreply, messages, %{state | demand: left}}
  end

  # From the last batch to the first, so that the list is built once and comes out in order.
  defp batches([], _state, messages, demand), do: {messages, demand}

  defp batches([{slot, topic, partition, records} | rest], state, messages, demand) do
    messages = records(records, {slot, name(topic), partition, state, :default}, nil, messages)
    batches(rest, state, messages, demand - length(records))
  end

  defp batches([{slot, topic, partition, records, {lane, seq}} | rest], state, messages, demand) do
    # A batch of one partition, where that is what the order is about; by key they may be mixed.
    batch_key = if state.lanes.mode == :partition, do: {topic, partition}, else: :default
    mark = {Lanes.carried(state.lanes), lane, seq}
    messages = records(records, {slot, topic, partition, state, batch_key}, mark, messages)
    batches(rest, state, messages, demand - length(records))
  end

  defp records([], _of, _mark, tail), do: tail

  defp records([record | rest], {slot, topic, partition, state, batch_key} = of, mark, tail) do
    {offset, ts, key, value, headers, attempt, deliveries, origin} = record

    {marked, mark} =
      record |> Acknowledger.carried(topic, partition, state.config.delivery) |> mark(mark)

    message = %{
      state.template
      | data: value,
        batch_key: batch_key,
        metadata: %{
          topic: topic,
          partition: partition,
          offset: offset,
          key: key,
          ts: ts,
          headers: headers,
          attempt: attempt,
          deliveries: deliveries,
          id: Message.id(origin, topic, partition, offset, ts)
        },
        acknowledger: {Acknowledger, state.handle.pid, {slot, offset, marked}}
    }

    [message | records(rest, of, mark, tail)]
  end

  defp mark(attempt, nil), do: {attempt, nil}

  defp mark(attempt, {carried, lane, seq}),
    do: {{attempt, carried, lane, seq + 1}, {carried, lane, seq + 1}}

  # ---- processors, where an order is kept

  defp lanes(nil), do: nil

  defp lanes(%{scope: scope, processors: processors, demand: demand, batchers?: batchers?}),
    do: Lanes.new(elem(scope, 0), tuple_size(processors), demand, batchers?)

  # What a processor had when it ended does not count any more. GenStage does not tell a producer who its consumers are, but it
  # monitors them in this process; each of them is there before it asks for anything.
  defp watch_processors(%{lanes: nil} = state), do: state

  defp watch_processors(%{lanes: %{n: n}, processors: known} = state)
       when map_size(known) >= n,
       do: state

  defp watch_processors(%{processors: known} = state) do
    {:monitors, monitors} = Process.info(self(), :monitors)

    new =
      for {:process, pid} <- monitors,
          is_pid(pid) and not is_map_key(known, pid),
          not match?(%{pid: ^pid}, state.handle),
          into: %{},
          do: {pid, true}

    Enum.each(new, fn {pid, true} -> Process.monitor(pid) end)
    state.handle && Handle.workers(state.handle, Map.keys(new))
    %{state | processors: Map.merge(known, new)}
  end

  # At a stop they have worked off what they had, and batchers still work on it.
  defp processor_down(pid, %{draining: true} = state),
    do: {:noreply, [], %{state | processors: Map.delete(state.processors, pid)}}

  # Broadway ends all processors when one ends, and starts all anew when the last is gone.
  defp processor_down(pid, state) do
    dying = List.delete(state.dying || Map.keys(state.processors), pid)
    state = %{state | processors: Map.delete(state.processors, pid), dying: dying}

    if dying == [] do
      Lanes.reset(state.lanes)
      state = %{state | asked: %{}, full: %{}}
      # Batchers end with them: nobody has anything of it.
      state.handle && Handle.again(state.handle)
      take(%{state | dying: nil})
    else
      {:noreply, [], state}
    end
  end

  defp template do
    if Code.ensure_loaded?(Broadway.Message),
      do: apply(Broadway.Message, :__struct__, []),
      else: @plain
  end
end
