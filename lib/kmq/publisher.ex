defmodule Kmq.Publisher do
  @moduledoc """
  Publishes messages.

      {:ok, publisher} = Kmq.Publisher.start_link(hosts: [localhost: 9092])
      {:ok, %{partition: 3, offset: 17}} = Kmq.Publisher.publish(publisher, "orders", "a value", key: "customer 7")

  Three ways:

    * `publish/4` and `publish_many/3` return when the brokers have acknowledged (`acks: :all`): what they report is durable.
      They run in the calling process; many processes may publish at once, and one batch is built of what they bring.
    * `publish_async/4` returns when the message is in the local queue. That queue is bounded (`:queue_bytes`,
      `:queue_messages`); when it is full the call waits for room: that is the back-pressure. What becomes of the message is
      told by telemetry (`[:kmq, :publish, :error]`) and in the log, and by `flush/2`. An orderly stop (of a supervisor, of the VM by SIGTERM)
      waits up to 8 s for what is on its way; what is left then is said in the log and by telemetry (reason `:closed`).

  A topic that does not exist is refused; it is asked for once, and never made by asking.

  ## How long a call may take

  Without `:timeout` the answer is the last word, which with brokers out of reach comes after `:delivery_timeout` (two minutes), up to
  15 s later. With it the call is over after so many ms, whatever it waits for:

    * `:queue_full` - there was no room in the local queue: the message is not written
    * `:timeout` - the message is on its way, and *may still be written*, until `:delivery_timeout` is over. Who publishes it again may have it twice. What
      became of it is told by telemetry. Before a topic is known: there was no answer about it, and nothing is written

  A publisher that has ended, also while a call waits, is `{:error, %Kmq.Error{reason: :closed}}`; what was on its way then may be written.

  ## Options of `start_link/1`

  #{Kmq.Options.docs(:publisher)}

  ## Options of a message

  #{Kmq.Options.docs(:publish)}
  """

  use GenServer

  require Logger

  alias Kmq.Publisher.{Entries, Refusal, Send}

  alias Kmq.{
    Advice,
    Ask,
    CommandLine,
    Config,
    Error,
    Noted,
    Options,
    Security,
    Telemetry,
    Token,
    Topics
  }

  @topic_check_ms 15_000
  # An outage fails messages by the thousand; the log gets a line a second.
  @log_ms 1_000
  @reopen_ms 1_000
  @many [timeout: [type: :timeout]]

  @typedoc "Where a message is in its topic."
  @type place :: %{partition: non_neg_integer, offset: integer}

  @typedoc "A message for `publish_many/3`, with options as `publish/4` takes them."
  @type message ::
          {topic :: String.t(), value :: binary | nil}
          | {topic :: String.t(), value :: binary | nil, keyword}

  # queue: parked async calls, oldest first: {from, deadline, topic, native messages}. outstanding: sent and not reported, by topic.
  # token: {where tokens come from | nil, monitor of who was asked for one | nil}.
  # askers: who wants to know something of a topic, by question; looking: {pid, monitor, question}, one at a time, in a process of its own,
  # because no answer takes 15 s.
  # flushers: waiting for outstanding to be 0. unlogged: %{topic => {count, error}}, said when log_timer is over.
  defstruct [
    :ref,
    :bootstrap,
    :admin_props,
    :token,
    :topics,
    asking: false,
    queue: :queue.new(),
    outstanding: %{},
    looking: nil,
    askers: %{},
    failed: 0,
    flushers: [],
    unlogged: %{},
    noted: %{},
    log_timer: nil,
    # close/2 has waited already
    flushed?: false
  ]

  # A supervisor's patience, and what of it is for the last reports.
  @shutdown_ms 10_000
  @last_reports_ms 8_000
  @call_ms 5_000

  # ---- API

  @doc "Starts a publisher. Bad options raise `ArgumentError`; an unreachable cluster does not: publishing reports it."
  @spec start_link(keyword) :: GenServer.on_start()
  def start_link(options) do
    case Config.publisher(options) do
      {:ok, valid, derived} ->
        with :ok <- Kmq.Application.started(),
             do:
               GenServer.start_link(__MODULE__, {valid, derived}, Keyword.take(options, [:name]))

      {:error, error} ->
        raise ArgumentError, error.message
    end
  end

  @doc false
  @spec child_spec(keyword) :: Supervisor.child_spec()
  def child_spec(options) do
    %{
      id: Options.peek(options, :name) || __MODULE__,
      start: {__MODULE__, :start_link, [Security.hide(options)]},
      shutdown: @shutdown_ms
    }
  end

  @doc """
  Publishes a message and waits until it is durable.
  """
  @spec publish(GenServer.server(), String.t(), binary | nil, keyword) ::
          {:ok, place} | {:error, Error.t()}
  def publish(publisher, topic, value, options \\ []) do
    case publish_many(publisher, [{topic, value, options}], [], "publish/4") do
      {:ok, [place]} -> {:ok, place}
      {:error, [error]} -> error
      {:error, %Error{} = error} -> {:error, error}
    end
  end

  @doc """
  Publishes messages and waits until all are durable.

  Messages of one partition are written in the order given. Where some fail, there is a result for each message in its
  place: `{:error, [{:ok, place} | {:error, error}, ...]}`. `:timeout` is for all of them: see above.

  A topic's `max.message.bytes` is for what is sent to a partition at once: where one message is too large, or all of them are together, they are
  refused together. Then each is sent once more, one at a time and behind those that were written: what is too large by itself has
  the error (`:msg_size_too_large`), the others are published. `publish_many_async/3` does not, and reports all of them.
  """
  @spec publish_many(GenServer.server(), [message], keyword) ::
          {:ok, [place]} | {:error, Error.t()} | {:error, [{:ok, place} | {:error, Error.t()}]}
  def publish_many(publisher, messages, options \\ []),
    do: publish_many(publisher, messages, options, "publish_many/3")

  defp publish_many(publisher, messages, options, asked) do
    groups = Entries.groups(messages)
    options = Options.validate!(options, @many)

    local(publisher, :publish_many, [messages, options], asked, fn pid ->
      with {:ok, info} <- lookup(pid, asked) do
        timeout = options[:timeout] || message_timeout(messages)
        Send.publish(pid, info, groups, Entries.delays(messages), timeout)
      end
    end)
  end

  @doc """
  Queues a message, or waits for room in the queue, at most `:timeout` ms (default `:delivery_timeout`).

  The errors `:queue_full` and `:timeout` (its topic is not known yet, and nobody has told in time) mean that it was not queued.
  """
  @spec publish_async(GenServer.server(), String.t(), binary | nil, keyword) ::
          :ok | {:error, Error.t()}
  def publish_async(publisher, topic, value, options \\ []),
    do: publish_many_async(publisher, [{topic, value, options}], [], "publish_async/4")

  @doc "Queues messages, as `publish_async/4`. Where only some found room in time, the error tells how many."
  @spec publish_many_async(GenServer.server(), [message], keyword) :: :ok | {:error, Error.t()}
  def publish_many_async(publisher, messages, options \\ []),
    do: publish_many_async(publisher, messages, options, "publish_many_async/3")

  defp publish_many_async(publisher, messages, options, asked) do
    groups = Entries.groups(messages)
    options = Options.validate!(options, @many)

    local(publisher, :publish_many_async, [messages, options], asked, fn pid ->
      with {:ok, info} <- lookup(pid, asked),
           timeout = options[:timeout] || message_timeout(messages),
           by = Send.deadline(timeout || :infinity),
           :ok <- Send.ready(pid, info, groups, Entries.delays(messages), by) do
        by = if timeout, do: by, else: Send.deadline(info.delivery_timeout)

        Enum.reduce_while(groups, :ok, fn {topic, _indexes, entries}, :ok ->
          case Ask.ask(__MODULE__, pid, {:async, topic, entries, by}, :infinity) do
            :ok -> {:cont, :ok}
            error -> {:halt, error}
          end
        end)
      end
    end)
  end

  @doc """
  Waits until all that was queued by `publish_async/4` has been reported.

  The error `:kafka` tells how many were not published since the last flush, `:timeout` that some are not reported yet.
  """
  @spec flush(GenServer.server(), timeout) :: :ok | {:error, Error.t()}
  def flush(publisher, timeout \\ 30_000), do: flush(publisher, timeout, "flush/2")

  # The publisher counts the time: it may be on another node, whose clock is its own.
  defp flush(publisher, timeout, asked) do
    timeout = Options.Types.timeout!(timeout)
    Ask.call(__MODULE__, asked, publisher, {:flush, timeout}, :infinity)
  end

  @doc "Messages in the local queue, not yet acknowledged by a broker. Raises `Kmq.Error` when the publisher has ended."
  @spec queued(GenServer.server()) :: non_neg_integer
  def queued(publisher) do
    case Ask.call(__MODULE__, "queued/1", publisher, :queued, @call_ms) do
      {:error, error} -> raise error
      n -> n
    end
  end

  @doc false
  @spec receipt_secret(GenServer.server()) :: {:ok, binary | nil} | {:error, Error.t()}
  def receipt_secret(publisher) do
    local(publisher, :receipt_secret, [], "Kmq.settle/3", fn pid ->
      with {:ok, info} <- lookup(pid, "Kmq.settle/3"), do: {:ok, info.receipt_secret.()}
    end)
  end

  @doc "Flushes for at most `timeout` ms and stops. What is not published by then is reported as failed."
  @spec close(GenServer.server(), timeout) :: :ok | {:error, Error.t()}
  def close(publisher, timeout \\ 30_000) do
    result = flush(publisher, timeout, "close/2")

    with :ok <- Ask.call(__MODULE__, "close/2", publisher, :flushed, @call_ms),
         :ok <- Ask.stop(__MODULE__, "close/2", publisher, :infinity),
         do: result
  end

  # ---- in the caller

  # A publisher of another node is asked there: native references do not travel.
  defp local(publisher, function, args, asked, fun) do
    case Ask.process(__MODULE__, asked, publisher) do
      pid when is_pid(pid) and node(pid) == node() -> fun.(pid)
      pid when is_pid(pid) -> there(node(pid), function, [pid | args])
      {name, node} -> there(node, function, [name | args])
      nil -> {:error, Ask.closed(__MODULE__, publisher)}
    end
  end

  defp there(node, function, args) do
    :erpc.call(node, __MODULE__, function, args)
  rescue
    error in ErlangError ->
      case error.original do
        {:exception, %{__exception__: true} = exception, stacktrace} ->
          reraise exception, stacktrace

        {:erpc, _reason} ->
          text =
            "the publisher's node, #{node}, is out of reach: what was on its way may be written"

          {:error, Error.new(:closed, text, retriable?: true)}

        _other ->
          reraise error, __STACKTRACE__
      end
  end

  # This one first: it is all that a publish needs to know of a living publisher.
  defp lookup(pid, asked) do
    case Registry.lookup(Kmq.Registry, {__MODULE__, pid}) do
      [{^pid, info}] -> {:ok, info}
      [] -> with {:ok, _starting} <- Ask.whereis(__MODULE__, asked, pid), do: {:error, closed()}
    end
  end

  defp closed, do: Ask.closed(__MODULE__)

  defp message_timeout([{_topic, _value, options}]), do: options[:timeout]
  defp message_timeout(_messages), do: nil

  # ---- the owner

  @impl true
  def init({valid, derived}) do
    Process.flag(:trap_exit, true)

    case Security.publisher_open(derived.producer_props, %{idempotent: valid[:acks] == :all}) do
      {:ok, ref} ->
        topics = :ets.new(__MODULE__, [:public, read_concurrency: true])

        info = %{
          ref: ref,
          topics: topics,
          bootstrap: derived.bootstrap,
          max_bytes: Refusal.max_bytes(derived.producer_props),
          admin_props: derived.admin_props,
          delivery_timeout: valid[:delivery_timeout],
          # Kept as a function: printed, it shows nothing.
          receipt_secret: valid[:receipt_secret] || fn -> nil end
        }

        {:ok, _} = Registry.register(Kmq.Registry, {__MODULE__, self()}, info)
        Kmq.Info.register({:publisher, ref, nil})
        # What was queued before the wake-up was on (the wish for a token) wakes nobody.
        send(self(), {:kmq, ref, :ready})

        {:ok,
         %__MODULE__{
           ref: ref,
           bootstrap: derived.bootstrap,
           admin_props: derived.admin_props,
           token: {Security.token_source(derived.producer_props), nil},
           topics: topics
         }}

      {:error, error} ->
        {:stop, Error.from_native(error, "the publisher")}
    end
  end

  @impl true
  def handle_call({what, _topic} = question, from, state) when what in [:topic, :retention] do
    askers = Map.update(state.askers, question, [from], &[from | &1])
    {:noreply, look(%{state | askers: askers})}
  end

  def handle_call({:async, topic, entries, deadline}, from, state) do
    {:noreply,
     send_queued(%{state | queue: :queue.in({from, deadline, topic, entries, 0}, state.queue)})}
  end

  def handle_call({:flush, timeout}, from, state) do
    timer =
      if timeout != :infinity, do: Process.send_after(self(), {:flush_expired, from}, timeout)

    {:noreply, flushed(%{state | flushers: [{from, timer} | state.flushers]})}
  end

  def handle_call(:flushed, _from, state), do: {:reply, :ok, %{state | flushed?: true}}

  def handle_call(:queued, _from, state),
    do: {:reply, :kmq_nif.publisher_queued(state.ref), state}

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:kmq, ref, :ready}, %{ref: ref} = state) do
    events = :kmq_nif.publisher_poll(ref)
    if Enum.any?(events, &match?({:error, {_, _, _, true, _}}, &1)), do: send(self(), :reopen)
    {:noreply, Enum.reduce(events, state, &event/2)}
  end

  # A producer of librdkafka that turned fatal is of no use any more: another one takes its place.
  def handle_info(:reopen, state) do
    with {:error, error} <- :kmq_nif.publisher_reopen(state.ref) do
      error = Error.from_native(error, "publisher: a new producer, tried again")
      Logger.error("kmq: " <> error.message)
      Process.send_after(self(), :reopen, @reopen_ms)
    end

    {:noreply, state}
  end

  def handle_info({:kmq_token, :publisher, token}, state) do
    {source, monitor} = state.token
    monitor && Process.demonitor(monitor, [:flush])
    _ = Security.set_token(:publisher_set_token, state.ref, token)
    {:noreply, %{state | token: {source, nil}}}
  end

  def handle_info({:DOWN, monitor, _, _, _}, %{token: {source, monitor}} = state),
    do: {:noreply, want_token(%{state | token: {source, nil}})}

  def handle_info({:DOWN, monitor, _, _, reason}, %{looking: {_pid, monitor, question}} = state),
    do: {:noreply, look(looked(question, reason, %{state | looking: nil}))}

  def handle_info({:kmq, ref, {:published, topic, results}}, %{ref: ref} = state) do
    reasons = for {:error, _} = error <- results, {:error, error} = Send.result(error), do: error
    state = if reasons == [], do: state, else: report_async(topic, reasons, state)

    state = %{
      state
      | outstanding: reported(state.outstanding, topic, length(results)),
        failed: state.failed + length(reasons)
    }

    {:noreply, flushed(state)}
  end

  def handle_info({:kmq, ref, :space}, %{ref: ref} = state) do
    {:noreply, send_queued(%{state | asking: false})}
  end

  def handle_info(:log, state), do: {:noreply, log_failed(state)}
  def handle_info(:expire, state), do: {:noreply, expire(state)}

  def handle_info({:flush_expired, from}, state) do
    {expired, flushers} = Enum.split_with(state.flushers, &(elem(&1, 0) == from))

    error =
      Error.new(:timeout, "#{unreported(state)} messages are not reported yet", retriable?: true)

    Enum.each(expired, fn {from, _timer} -> GenServer.reply(from, {:error, error}) end)
    {:noreply, %{state | flushers: flushers}}
  end

  def handle_info({:EXIT, _pid, :normal}, state), do: {:noreply, state}
  def handle_info({:EXIT, _pid, reason}, state), do: {:stop, reason, state}

  def handle_info(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  @impl true
  def terminate(reason, state) do
    orderly? = reason in [:normal, :shutdown] or match?({:shutdown, _}, reason)
    wait = if orderly? and not state.flushed?, do: @last_reports_ms, else: 0
    state = await_reports(state, Send.deadline(wait))
    log_failed(state)

    if unreported(state) > 0 do
      Logger.warning("kmq: publisher closed with #{unreported(state)} messages not reported yet")

      for {topic, n} <- state.outstanding,
          do: Send.report_failed(topic, List.duplicate(:closed, n))
    end

    with {pid, _monitor, _question} <- state.looking, do: Process.exit(pid, :kill)
    :kmq_nif.publisher_close(state.ref)
    :ok
  end

  defp unreported(state), do: state.outstanding |> Map.values() |> Enum.sum()

  defp reported(outstanding, topic, n) do
    case outstanding do
      %{^topic => ^n} -> Map.delete(outstanding, topic)
      %{^topic => more} -> %{outstanding | topic => more - n}
    end
  end

  # publish_async has said :ok of these.
  defp await_reports(%{outstanding: none} = state, _deadline) when none == %{}, do: state

  defp await_reports(%{ref: ref} = state, deadline) do
    receive do
      message
      when message == :reopen or (elem(message, 0) == :kmq and elem(message, 1) == ref) or
             elem(message, 0) == :kmq_token ->
        {:noreply, state} = handle_info(message, state)
        await_reports(state, deadline)
    after
      Send.left(deadline) -> state
    end
  end

  # The next question about a topic.
  defp look(%{looking: nil, askers: askers} = state) when askers != %{} do
    [question | _] = Map.keys(askers)
    %{bootstrap: bootstrap, admin_props: props} = state

    {pid, monitor} = spawn_monitor(fn -> exit({:looked, look(question, bootstrap, props)}) end)
    %{state | looking: {pid, monitor, question}}
  end

  defp look(state), do: state

  defp look({:topic, topic}, bootstrap, props) do
    case Options.Types.topic_problem(topic) do
      nil ->
        case Topics.partitions(topic, bootstrap, props, @topic_check_ms) do
          {:ok, 0} ->
            {:error, error} = Topics.missing(topic, bootstrap, props, @topic_check_ms)
            text = "#{error.message}; it is not made by publishing to it"
            {:error, %{error | message: text}}

          other ->
            other
        end

      problem ->
        {:error, Error.new(:invalid_option, "topic #{inspect(topic)} #{problem}")}
    end
  end

  defp look({:retention, topic}, bootstrap, props),
    do: Topics.retention(topic, bootstrap, props, @topic_check_ms)

  # Only what exists is remembered: what is missing may be made later. Retention is asked once for each topic that gets delayed messages; who
  # changes it starts another publisher.
  defp looked(question, reason, state) do
    answer =
      case {question, reason} do
        {{:topic, topic}, {:looked, {:ok, _n}}} ->
          :ets.insert(state.topics, {topic})
          :ok

        {{:retention, _topic}, {:looked, {:ok, kept}}} ->
          :ets.insert(state.topics, {question, kept})
          {:ok, kept}

        {_question, {:looked, {:error, error}}} ->
          {:error, error}

        {{_what, topic}, crash} ->
          {:error, Error.new(:kafka, "looking at #{inspect(topic)}: #{inspect(crash, limit: 5)}")}
      end

    # Where no broker answers, none does to the next question.
    {told, askers} =
      if nobody_there?(answer),
        do: {Enum.concat(Map.values(state.askers)), %{}},
        else: Map.pop(state.askers, question)

    Enum.each(told, &GenServer.reply(&1, answer))
    %{state | askers: askers}
  end

  defp nobody_there?({:error, %Error{reason: reason}}),
    do: reason in [:unreachable, :ssl, :authentication, :token]

  defp nobody_there?(_answer), do: false

  # Oldest first, until the queue is full: then one question for space, and everybody behind waits.
  defp send_queued(%{asking: true} = state), do: state

  defp send_queued(state) do
    case :queue.out(state.queue) do
      {:empty, _} ->
        state

      {{:value, {from, deadline, topic, entries, done}}, queue} ->
        send_one(state, queue, from, deadline, topic, entries, done)
    end
  end

  defp send_one(state, queue, from, deadline, topic, entries, done) do
    case Send.native_send(state.ref, topic, entries, topic) do
      {:ok, 0} ->
        rest = {from, deadline, topic, entries, done}
        _ = :kmq_nif.publisher_space(state.ref)
        deadline != :infinity && Process.send_after(self(), :expire, Send.left(deadline))
        expire(%{state | queue: :queue.in_r(rest, queue), asking: true})

      {:ok, n} ->
        outstanding = Map.update(state.outstanding, topic, n, &(&1 + n))
        state = %{state | outstanding: outstanding}

        case Enum.drop(entries, n) do
          [] ->
            GenServer.reply(from, :ok)
            send_queued(%{state | queue: queue})

          later ->
            send_one(state, queue, from, deadline, topic, later, done + n)
        end

      {:error, error} ->
        GenServer.reply(
          from,
          {:error, Error.from_native(error, "publishing to #{inspect(topic)}")}
        )

        send_queued(%{state | queue: queue})
    end
  end

  defp expire(state) do
    {expired, queue} =
      state.queue
      |> :queue.to_list()
      |> Enum.split_with(fn {_from, deadline, _, _, _} -> Send.left(deadline) == 0 end)

    Enum.each(expired, fn {from, _deadline, _topic, entries, done} ->
      error = Send.full()
      text = "#{error.message} #{done} messages were queued, #{length(entries)} were not."
      GenServer.reply(from, {:error, %{error | message: text}})
    end)

    %{state | queue: :queue.from_list(queue)}
  end

  defp flushed(%{flushers: [_ | _], outstanding: none} = state) when none == %{} do
    result =
      if state.failed == 0 do
        :ok
      else
        {:error,
         Error.new(:kafka, "#{state.failed} messages were not published", retriable?: true)}
      end

    Enum.each(state.flushers, fn {from, timer} ->
      timer && Process.cancel_timer(timer)
      GenServer.reply(from, result)
    end)

    %{state | flushers: [], failed: 0}
  end

  defp flushed(state), do: state

  defp report_async(topic, [first | _] = errors, state) do
    Send.report_failed(topic, Enum.map(errors, & &1.reason))
    count = length(errors)

    unlogged =
      Map.update(state.unlogged, topic, {count, first}, fn {n, error} -> {n + count, error} end)

    timer = state.log_timer || Process.send_after(self(), :log, @log_ms)
    %{state | unlogged: unlogged, log_timer: timer}
  end

  defp log_failed(state) do
    Enum.each(state.unlogged, fn {topic, {count, error}} ->
      Logger.error(
        "kmq: #{count} messages for #{inspect(topic)} were not published: #{error.message}"
      )
    end)

    %{state | unlogged: %{}, log_timer: nil}
  end

  defp event({:error, error}, state) do
    error = Error.from_native(error, "publisher")
    Telemetry.execute([:kmq, :error], %{count: 1}, %{handle: :publisher, error: error})
    note(state, error.name, fn -> Logger.warning("kmq: " <> error.message) end)
  end

  # As a consumer's: an outage is said once, and its end.
  defp event({:outage, error}, state) do
    error = error |> Error.from_native("publisher") |> Advice.connection()
    Telemetry.execute([:kmq, :error], %{count: 1}, %{handle: :publisher, error: error})
    Logger.warning("kmq: #{error.message}; it connects again by itself")
    state
  end

  # They are there again; whether they stay is looked at a moment later.
  defp event({:settling, ms}, state) do
    Process.send_after(self(), {:kmq, state.ref, :ready}, ms)
    state
  end

  defp event({:connected, ms}, state) do
    Telemetry.execute([:kmq, :recovered], %{count: 1}, %{handle: :publisher, what: :connection})
    Logger.info("kmq: publisher: connected again after #{CommandLine.seconds(ms)}")
    state
  end

  defp event({:passing, what, error}, state) do
    error = Error.from_native(error, "publisher: #{what}")
    metadata = %{handle: :publisher, what: what, error: error}
    Telemetry.execute([:kmq, :error, :passing], %{count: 1}, metadata)
    Logger.debug("kmq: " <> error.message)
    state
  end

  defp event({:log, level, text}, state) do
    Logger.log(log_level(level), "kmq: publisher: " <> text)
    state
  end

  defp event({:token, _config}, state), do: want_token(state)
  defp event(_other, state), do: state

  defp want_token(%{token: {source, nil}} = state) when source != nil,
    do: %{state | token: {source, Token.request(source, :publisher)}}

  defp want_token(state), do: state

  # librdkafka logs each try to connect; what matters arrives as an error too.
  defp log_level(level) when is_integer(level) and level <= 2, do: :error
  defp log_level(_level), do: :debug

  defp note(state, what, fun), do: %{state | noted: Noted.note(state.noted, what, fun)}
end
