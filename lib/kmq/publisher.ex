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
      waits up to 8 s for what is on its way; what is left then is said in the log.

  A topic that does not exist is refused; it is asked for once, and never made by asking.

  ## Options of `start_link/1`

  #{Kmq.Options.docs(:publisher)}

  ## Options of a message

  #{Kmq.Options.docs(:publish)}
  """

  use GenServer

  require Logger

  alias Kmq.Publisher.Refusal
  alias Kmq.{CommandLine, Config, Error, Noted, Options, Security, Telemetry, Token, Topics}

  @topic_check_ms 15_000
  # librdkafka looks at its timeouts when a broker's thread wakes, which for a broker that is down is when it connects again:
  # up to reconnect.backoff.max.ms (10 s) late. What is later than that is a dead publisher.
  @report_margin_ms 15_000
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

  # queue: parked async calls, oldest first: {from, deadline, topic, native messages}. outstanding: sent and not reported.
  # token: {where tokens come from | nil, monitor of who was asked for one | nil}.
  # flushers: waiting for outstanding to be 0. unlogged: %{topic => {count, error}}, said when log_timer is over.
  defstruct [
    :ref,
    :bootstrap,
    :admin_props,
    :token,
    :topics,
    asking: false,
    queue: :queue.new(),
    outstanding: 0,
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
  @timeout_max 4_294_967_295

  # ---- API

  @doc "Starts a publisher. Bad options raise `ArgumentError`; an unreachable cluster does not: publishing reports it."
  @spec start_link(keyword) :: GenServer.on_start()
  def start_link(options) do
    case Config.publisher(options) do
      {:ok, valid, derived} ->
        GenServer.start_link(__MODULE__, {valid, derived}, Keyword.take(options, [:name]))

      {:error, error} ->
        raise ArgumentError, error.message
    end
  end

  @doc false
  @spec child_spec(keyword) :: Supervisor.child_spec()
  def child_spec(options) do
    %{
      id: options[:name] || __MODULE__,
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
    case publish_many(publisher, [{topic, value, options}]) do
      {:ok, [place]} -> {:ok, place}
      {:error, [error]} -> error
      {:error, %Error{} = error} -> {:error, error}
    end
  end

  @doc """
  Publishes messages and waits until all are durable.

  Messages of one partition are written in the order given. Where some fail, there is a result for each message in its
  place: `{:error, [{:ok, place} | {:error, error}, ...]}`. `:timeout` is the wait for room in the local queue.

  A topic's `max.message.bytes` is for what is sent to a partition at once: where one message is too large, or all of them are together, they are
  refused together. Then each is sent once more, one at a time and behind those that were written: what is too large by itself has
  the error (`:msg_size_too_large`), the others are published. `publish_many_async/3` does not, and reports all of them.
  """
  @spec publish_many(GenServer.server(), [message], keyword) ::
          {:ok, [place]} | {:error, Error.t()} | {:error, [{:ok, place} | {:error, Error.t()}]}
  def publish_many(publisher, messages, options \\ []) do
    groups = native(messages)
    options = Options.validate!(options, @many)

    local(publisher, :publish_many, [messages, options], fn pid ->
      with {:ok, info} <- lookup(pid),
           :ok <- known_topics(pid, info, groups),
           :ok <- delays_fit(pid, info, messages) do
        start = System.monotonic_time()
        timeout = options[:timeout] || message_timeout(messages) || info.delivery_timeout
        told = send_all(pid, info, groups, timeout)

        if Enum.all?(told, &written?/1) do
          places = Enum.map(told, &places/1)
          report_written(groups, places, System.monotonic_time() - start)
          {:ok, in_order(groups, places)}
        else
          results = alone(pid, info, groups, Enum.map(told, &results/1), timeout)
          results = explained(groups, results, info)
          report_sync(groups, results, System.monotonic_time() - start)
          answer(in_order(groups, results))
        end
      end
    end)
  end

  @doc """
  Queues a message, or waits for room in the queue, at most `:timeout` ms (default `:delivery_timeout`).

  The error `:queue_full` means that it was not queued.
  """
  @spec publish_async(GenServer.server(), String.t(), binary | nil, keyword) ::
          :ok | {:error, Error.t()}
  def publish_async(publisher, topic, value, options \\ []),
    do: publish_many_async(publisher, [{topic, value, options}])

  @doc "Queues messages, as `publish_async/4`. Where only some found room in time, the error tells how many."
  @spec publish_many_async(GenServer.server(), [message], keyword) :: :ok | {:error, Error.t()}
  def publish_many_async(publisher, messages, options \\ []) do
    groups = native(messages)
    options = Options.validate!(options, @many)

    local(publisher, :publish_many_async, [messages, options], fn pid ->
      with {:ok, info} <- lookup(pid),
           :ok <- known_topics(pid, info, groups),
           :ok <- delays_fit(pid, info, messages) do
        timeout = options[:timeout] || message_timeout(messages) || info.delivery_timeout

        Enum.reduce_while(groups, :ok, fn {topic, _indexes, entries}, :ok ->
          case call(pid, {:async, topic, entries, deadline(timeout)}, :infinity) do
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
  def flush(publisher, timeout \\ 30_000),
    do: call(publisher, {:flush, deadline(timeout)}, :infinity)

  @doc "Messages in the local queue, not yet acknowledged by a broker."
  @spec queued(GenServer.server()) :: non_neg_integer
  def queued(publisher), do: GenServer.call(publisher, :queued)

  @doc false
  @spec receipt_secret(GenServer.server()) :: {:ok, binary | nil} | {:error, Error.t()}
  def receipt_secret(publisher) do
    local(publisher, :receipt_secret, [], fn pid ->
      with {:ok, info} <- lookup(pid), do: {:ok, info.receipt_secret.()}
    end)
  end

  @doc "Flushes for at most `timeout` ms and stops. What is not published by then is reported as failed."
  @spec close(GenServer.server(), timeout) :: :ok | {:error, Error.t()}
  def close(publisher, timeout \\ 30_000) do
    result = flush(publisher, timeout)
    :ok = GenServer.call(publisher, :flushed)
    GenServer.stop(publisher)
    result
  catch
    :exit, _already_gone -> {:error, closed()}
  end

  # ---- in the caller

  # A publisher of another node is asked there: native references do not travel.
  defp local(publisher, function, args, fun) do
    case GenServer.whereis(publisher) do
      pid when is_pid(pid) and node(pid) == node() -> fun.(pid)
      pid when is_pid(pid) -> :erpc.call(node(pid), __MODULE__, function, [pid | args])
      {name, node} -> :erpc.call(node, __MODULE__, function, [name | args])
      nil -> {:error, closed()}
    end
  end

  defp lookup(pid) do
    case Registry.lookup(Kmq.Registry, {__MODULE__, pid}) do
      [{^pid, info}] -> {:ok, info}
      [] -> {:error, closed()}
    end
  end

  defp closed, do: Error.new(:closed, "the publisher is closed")

  defp call(publisher, request, timeout) do
    GenServer.call(publisher, request, timeout)
  catch
    :exit, {reason, _} when reason in [:noproc, :normal, :shutdown] -> {:error, closed()}
    :exit, {{:shutdown, _}, _} -> {:error, closed()}
  end

  # [{topic, indexes, [{partition, key, value, headers, timestamp}]}], topics in the order of first appearance. One topic: no
  # indexes are needed, and none are made.
  defp native(messages) do
    case messages do
      [] ->
        []

      [first | _] ->
        {topic, _, _} = parts(first)

        case native_of(messages, topic, []) do
          {:ok, entries} -> [{topic, nil, entries}]
          :several -> native_by_topic(messages)
        end

      other ->
        raise ArgumentError, "expected a list of messages, got: #{inspect(other, limit: 5)}"
    end
  end

  defp native_of([], _topic, entries), do: {:ok, Enum.reverse(entries)}

  defp native_of([message | rest], topic, entries) do
    case parts(message) do
      {^topic, value, options} ->
        native_of(rest, topic, [native_message(topic, value, options) | entries])

      _other ->
        :several
    end
  end

  defp native_by_topic(messages) do
    pairs =
      Enum.with_index(messages, fn message, index ->
        {topic, value, options} = parts(message)
        {topic, {index, native_message(topic, value, options)}}
      end)

    by_topic = Enum.group_by(pairs, &elem(&1, 0), &elem(&1, 1))

    for topic <- pairs |> Enum.map(&elem(&1, 0)) |> Enum.uniq() do
      {indexes, entries} = Enum.unzip(by_topic[topic])
      {topic, indexes, entries}
    end
  end

  defp parts({topic, value}), do: {topic, value, []}
  defp parts({topic, value, options}), do: {topic, value, options}

  defp parts(other),
    do:
      raise(
        ArgumentError,
        "expected {topic, value} or {topic, value, options}, got: #{inspect(other)}"
      )

  defp native_message(topic, value, options) do
    is_binary(topic) ||
      raise ArgumentError, "expected the topic to be a string, got: #{inspect(topic)}"

    is_binary(value) || is_nil(value) ||
      raise(ArgumentError, "expected the value to be a binary or nil, got: #{inspect(value)}")

    case plain(options, value, -1, :none, [], 0) do
      :others ->
        options = Options.validate!(options, :publish)

        {options[:partition] || -1, options[:key], value, kmq_headers(options),
         options[:timestamp] || 0}

      message ->
        message
    end
  end

  # What most messages have and what needs no more than a look, each at most once; everything else goes through the schema.
  defp plain([], value, partition, :none, headers, timestamp),
    do: {partition, nil, value, headers, timestamp}

  defp plain([], value, partition, key, headers, timestamp),
    do: {partition, key, value, headers, timestamp}

  defp plain([{:key, key} | rest], value, partition, :none, headers, timestamp)
       when is_binary(key),
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain([{:partition, partition} | rest], value, -1, key, headers, timestamp)
       when partition in 0..0x7FFFFFFF,
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain([{:headers, [_ | _] = headers} | rest], value, partition, key, [], timestamp) do
    if Options.Types.headers?(headers),
      do: plain(rest, value, partition, key, headers, timestamp),
      else: :others
  end

  defp plain([{:timestamp, timestamp} | rest], value, partition, key, headers, 0)
       when timestamp in 1..0x7FFFFFFFFFFFFFFF,
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain(_options, _value, _partition, _key, _headers, _timestamp), do: :others

  # What consumers, trackers and filters read. They stand first: the first of a name counts.
  defp kmq_headers(options) do
    now = System.os_time(:millisecond)
    due = due(options, now)

    [
      {"kmq-tags", options[:tags] && Enum.join(options[:tags], ",")},
      {"kmq-routing-key", options[:routing_key]},
      {"kmq-due", due && to_string(due)},
      {"kmq-expires", options[:ttl] && to_string((due || now) + options[:ttl])}
    ]
    |> Enum.reject(fn {_name, value} -> value in [nil, ""] end)
    |> Kernel.++(options[:headers])
  end

  # Now or earlier is no delay.
  defp due(options, now) do
    due =
      cond do
        options[:delay] && options[:at] ->
          raise ArgumentError, "one of :delay and :at says when, not both"

        delay = options[:delay] ->
          now + delay

        at = options[:at] ->
          DateTime.to_unix(at, :millisecond)

        true ->
          now
      end

    if due > now, do: due
  end

  # A message that is due later than its topic keeps it would be lost: it is refused here, where somebody can do something.
  defp delays_fit(pid, info, messages) do
    now = System.os_time(:millisecond)

    delayed = for {_topic, _value, options} = message <- messages, delayed?(options), do: message

    longest =
      for {topic, _value, options} <- delayed, due = due(options, now), reduce: %{} do
        longest -> Map.update(longest, topic, due - now, &max(&1, due - now))
      end

    Enum.reduce_while(longest, :ok, fn {topic, delay}, :ok ->
      case retention(pid, info, topic) do
        {:ok, kept} when is_integer(kept) and delay >= kept ->
          {:halt, {:error, too_long(topic, delay, kept)}}

        {:ok, _kept} ->
          {:cont, :ok}

        error ->
          {:halt, error}
      end
    end)
  end

  defp delayed?([]), do: false
  defp delayed?([{name, _} | _rest]) when name in [:delay, :at], do: true
  defp delayed?([_ | rest]), do: delayed?(rest)

  defp retention(pid, info, topic) do
    case :ets.lookup(info.topics, {:retention, topic}) do
      [{_, kept}] -> {:ok, kept}
      [] -> call(pid, {:retention, topic}, @topic_check_ms + @report_margin_ms)
    end
  end

  defp too_long(topic, delay, kept) do
    Error.new(
      :delay_too_long,
      "a delay of #{delay} ms is longer than #{inspect(topic)} keeps its records (retention.ms=#{kept}): the message would be gone before " <>
        "it is due"
    )
  end

  defp message_timeout([{_topic, _value, options}]), do: options[:timeout]
  defp message_timeout(_messages), do: nil

  defp known_topics(pid, info, groups) do
    Enum.reduce_while(groups, :ok, fn {topic, _, _}, :ok ->
      case :ets.member(info.topics, topic) ||
             call(pid, {:topic, topic}, @topic_check_ms + @report_margin_ms) do
        known when known in [true, :ok] -> {:cont, :ok}
        error -> {:halt, error}
      end
    end)
  end

  # All groups are sent before any report is waited for. What is told of each group: lists of results, in its order.
  defp send_all(pid, info, groups, timeout) do
    monitor = Process.monitor(pid)
    deadline = deadline(timeout)

    pending =
      for {topic, _indexes, entries} <- groups do
        send_group(info.ref, monitor, topic, entries, deadline)
      end

    reports_by = deadline(info.delivery_timeout + @report_margin_ms)

    told =
      for steps <- pending do
        for step <- steps, do: await(step, info.ref, monitor, reports_by)
      end

    Process.demonitor(monitor, [:flush])
    told
  end

  # The common case makes no list but the last one: of thousands of messages each would be copied by the garbage collector.
  defp written?(lists), do: Enum.all?(lists, &all_written?/1)

  defp all_written?([]), do: true
  defp all_written?([{partition, _} | rest]) when is_integer(partition), do: all_written?(rest)
  defp all_written?(_results), do: false

  defp places(lists), do: lists |> Enum.reverse() |> Enum.reduce([], &places/2)

  defp places([], later), do: later

  defp places([{partition, offset} | rest], later),
    do: [%{partition: partition, offset: offset} | places(rest, later)]

  defp results(lists), do: for(list <- lists, result <- list, do: result(result))

  # Refused with others: who knows which one it was.
  defp alone(_pid, _info, [{_topic, _indexes, [_one]}], results, _timeout), do: results

  defp alone(pid, info, groups, results, timeout) do
    for {{topic, _indexes, entries}, results} <- Enum.zip(groups, results) do
      if Enum.any?(results, &too_large?/1),
        do: one_by_one(pid, info, topic, Enum.zip(entries, results), timeout),
        else: results
    end
  end

  # When something else stands in the way, it does so for the rest as well: waiting for each of them would have no end.
  defp one_by_one(pid, info, topic, pairs, timeout) do
    {results, _stopped} =
      Enum.map_reduce(pairs, nil, fn {entry, result}, stopped ->
        cond do
          not too_large?(result) -> {result, stopped}
          stopped -> {stopped, stopped}
          true -> send_one(pid, info, topic, entry, timeout)
        end
      end)

    results
  end

  defp send_one(pid, info, topic, entry, timeout) do
    [lists] = send_all(pid, info, [{topic, nil, [entry]}], timeout)
    [result] = results(lists)
    other? = match?({:error, _}, result) and not too_large?(result)
    {result, if(other?, do: result)}
  end

  defp explained(groups, results, info) do
    for {{topic, _indexes, entries}, results} <- Enum.zip(groups, results),
        do: Refusal.explain(results, topic, entries, info)
  end

  defp too_large?({:error, %Error{reason: :msg_size_too_large}}), do: true
  defp too_large?(_result), do: false

  defp send_group(_ref, _monitor, _topic, [], _deadline), do: []

  # A call takes as many as it has time for; none: there is no room.
  defp send_group(ref, monitor, topic, entries, deadline) do
    token = make_ref()

    case :kmq_nif.publisher_send(ref, topic, entries, token) do
      {:ok, 0} ->
        case await_space(ref, monitor, deadline) do
          :ok -> send_group(ref, monitor, topic, entries, deadline)
          {:error, error} -> [{:failed, error, length(entries)}]
        end

      {:ok, n} ->
        later = Enum.drop(entries, n)
        [{:sent, token, n} | send_group(ref, monitor, topic, later, deadline)]

      {:error, error} ->
        [{:failed, Error.from_native(error, "publishing to #{inspect(topic)}"), length(entries)}]
    end
  end

  defp await_space(ref, monitor, deadline) do
    _ = :kmq_nif.publisher_space(ref)

    receive do
      {:kmq, ^ref, :space} -> :ok
      {:DOWN, ^monitor, _, _, _} -> {:error, closed()}
    after
      left(deadline) -> {:error, full()}
    end
  end

  defp full,
    do:
      Error.new(
        :queue_full,
        "the publisher's local queue had no room in time: is a broker there?",
        retriable?: true
      )

  defp await({:failed, error, n}, _ref, _monitor, _deadline),
    do: List.duplicate({:error, error}, n)

  defp await({:sent, token, n}, ref, monitor, deadline) do
    receive do
      {:kmq, ^ref, {:published, ^token, results}} -> results
      {:DOWN, ^monitor, _, _, _} -> closed_late(ref, token, n)
    after
      left(deadline) ->
        List.duplicate({:error, Error.new(:timeout, "no report in time", retriable?: true)}, n)
    end
  end

  # The publisher ended; what it had to report may be in the mailbox already.
  defp closed_late(ref, token, n) do
    receive do
      {:kmq, ^ref, {:published, ^token, results}} -> results
    after
      0 -> List.duplicate({:error, closed()}, n)
    end
  end

  defp result({:error, %Error{}} = error), do: error
  defp result({:error, error}), do: {:error, Error.from_native(error)}
  defp result({partition, offset}), do: {:ok, %{partition: partition, offset: offset}}

  defp in_order([{_topic, nil, _entries}], [results]), do: results

  defp in_order(groups, results) do
    groups
    |> Enum.zip(results)
    |> Enum.flat_map(fn {{_topic, indexes, _entries}, results} -> Enum.zip(indexes, results) end)
    |> Enum.sort_by(&elem(&1, 0))
    |> Enum.map(&elem(&1, 1))
  end

  defp answer(results) do
    if Enum.all?(results, &match?({:ok, _}, &1)),
      do: {:ok, Enum.map(results, &elem(&1, 1))},
      else: {:error, results}
  end

  defp report_written(groups, places, duration) do
    for {{topic, _indexes, _entries}, places} <- Enum.zip(groups, places),
        do: report_published(topic, length(places), duration)
  end

  defp report_sync(groups, results, duration) do
    for {{topic, _indexes, _entries}, results} <- Enum.zip(groups, results) do
      reasons = for {:error, error} <- results, do: error.reason
      report_published(topic, length(results) - length(reasons), duration)
      report_failed(topic, reasons)
    end
  end

  defp report_published(topic, count, duration) do
    count > 0 &&
      Telemetry.execute([:kmq, :publish], %{count: count, duration: duration}, %{topic: topic})
  end

  defp report_failed(topic, reasons) do
    Enum.each(Enum.frequencies(reasons), fn {reason, count} ->
      Telemetry.execute([:kmq, :publish, :error], %{count: count}, %{topic: topic, reason: reason})
    end)
  end

  defp deadline(:infinity), do: :infinity

  defp deadline(timeout) when timeout in 0..@timeout_max,
    do: System.monotonic_time(:millisecond) + timeout

  defp deadline(timeout) do
    raise ArgumentError,
          "a timeout is milliseconds, 0 to #{@timeout_max}, or :infinity, got: #{inspect(timeout)}"
  end

  defp left(:infinity), do: :infinity
  defp left(deadline), do: max(deadline - System.monotonic_time(:millisecond), 0)

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
  def handle_call({:topic, topic}, _from, state) do
    {:reply, check_topic(topic, state), state}
  end

  def handle_call({:retention, topic}, _from, state) do
    {:reply, ask_retention(topic, state), state}
  end

  def handle_call({:async, topic, entries, deadline}, from, state) do
    {:noreply,
     send_queued(%{state | queue: :queue.in({from, deadline, topic, entries, 0}, state.queue)})}
  end

  def handle_call({:flush, deadline}, from, state) do
    timer =
      if deadline != :infinity,
        do: Process.send_after(self(), {:flush_expired, from}, left(deadline))

    {:noreply, flushed(%{state | flushers: [{from, timer} | state.flushers]})}
  end

  def handle_call(:flushed, _from, state), do: {:reply, :ok, %{state | flushed?: true}}

  def handle_call(:queued, _from, state),
    do: {:reply, :kmq_nif.publisher_queued(state.ref), state}

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

  def handle_info({:kmq, ref, {:published, topic, results}}, %{ref: ref} = state) do
    reasons = for {:error, _} = error <- results, {:error, error} = result(error), do: error
    state = if reasons == [], do: state, else: report_async(topic, reasons, state)

    state = %{
      state
      | outstanding: state.outstanding - length(results),
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
      Error.new(:timeout, "#{state.outstanding} messages are not reported yet", retriable?: true)

    Enum.each(expired, fn {from, _timer} -> GenServer.reply(from, {:error, error}) end)
    {:noreply, %{state | flushers: flushers}}
  end

  def handle_info({:EXIT, _pid, :normal}, state), do: {:noreply, state}
  def handle_info({:EXIT, _pid, reason}, state), do: {:stop, reason, state}

  def handle_info(message, state) do
    Logger.warning("kmq: publisher: an unknown message was dropped: #{inspect(message)}")
    {:noreply, state}
  end

  @impl true
  def terminate(reason, state) do
    orderly? = reason in [:normal, :shutdown] or match?({:shutdown, _}, reason)
    wait = if orderly? and not state.flushed?, do: @last_reports_ms, else: 0
    state = await_reports(state, deadline(wait))
    log_failed(state)

    state.outstanding > 0 &&
      Logger.warning("kmq: publisher closed with #{state.outstanding} messages not reported yet")

    :kmq_nif.publisher_close(state.ref)
    :ok
  end

  # publish_async has said :ok of these.
  defp await_reports(%{outstanding: 0} = state, _deadline), do: state

  defp await_reports(%{ref: ref} = state, deadline) do
    receive do
      message
      when message == :reopen or (elem(message, 0) == :kmq and elem(message, 1) == ref) or
             elem(message, 0) == :kmq_token ->
        {:noreply, state} = handle_info(message, state)
        await_reports(state, deadline)
    after
      left(deadline) -> state
    end
  end

  # Only what exists is remembered: what is missing may be made later.
  defp check_topic(topic, state) do
    case Options.Types.topic_problem(topic) do
      nil ->
        case Topics.partitions(topic, state.bootstrap, state.admin_props, @topic_check_ms) do
          {:ok, 0} ->
            {:error, error} =
              Topics.missing(topic, state.bootstrap, state.admin_props, @topic_check_ms)

            text = "#{error.message}; it is not made by publishing to it"
            {:error, %{error | message: text}}

          {:ok, _n} ->
            :ets.insert(state.topics, {topic})
            :ok

          error ->
            error
        end

      problem ->
        {:error, Error.new(:invalid_option, "topic #{inspect(topic)} #{problem}")}
    end
  end

  # Asked once for each topic that gets delayed messages; who changes it starts another publisher.
  defp ask_retention(topic, state) do
    with {:ok, kept} <-
           Topics.retention(topic, state.bootstrap, state.admin_props, @topic_check_ms) do
      :ets.insert(state.topics, {{:retention, topic}, kept})
      {:ok, kept}
    end
  end

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
    case :kmq_nif.publisher_send(state.ref, topic, entries, topic) do
      {:ok, 0} ->
        rest = {from, deadline, topic, entries, done}
        _ = :kmq_nif.publisher_space(state.ref)
        deadline != :infinity && Process.send_after(self(), :expire, left(deadline))
        expire(%{state | queue: :queue.in_r(rest, queue), asking: true})

      {:ok, n} ->
        state = %{state | outstanding: state.outstanding + n}

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
      |> Enum.split_with(fn {_from, deadline, _, _, _} -> left(deadline) == 0 end)

    Enum.each(expired, fn {from, _deadline, _topic, entries, done} ->
      error = full()
      text = "#{error.message} #{done} messages were queued, #{length(entries)} were not."
      GenServer.reply(from, {:error, %{error | message: text}})
    end)

    %{state | queue: :queue.from_list(queue)}
  end

  defp flushed(%{flushers: [_ | _], outstanding: 0} = state) do
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
    report_failed(topic, Enum.map(errors, & &1.reason))
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
    error = Error.from_native(error, "publisher")
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
