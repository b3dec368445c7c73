defmodule Kmq.LetterWriter do
  @moduledoc false
  # Writes the dead letters of one handle whose delivery has no tracker: what was rejected, and what expired.
  #
  #   reject -> the engine marks it (nobody else settles it, the commit waits) -> written -> acknowledged -> settled
  #                                                                              '-> failed: said, and written again
  #
  # The letters are the tracker's, byte for byte but for their place: see `tracker_rewrite` in c_src/tracker/copy.c. Held are at most
  # `max_in_flight` of a partition, because each is still in work. The producer is made for the first letter.
  #
  # The handle's orderly end waits for the letters; what is left then is tried further for `drain_timeout`. When this process crashes,
  # the handle ends, too: what is marked is not committed, so it comes again.
  use GenServer, restart: :temporary

  require Logger
  alias Kmq.{Ask, Error, Security, Telemetry, Token, Topics}

  @pause_ms 500
  @chunk 500
  @look_ms 10_000
  @say_every_ms 10_000
  @dead_lettered 3

  @typedoc "The record as the engine gave it, and where it stands."
  @type original :: {topic :: String.t(), partition :: non_neg_integer, record :: tuple}

  defstruct [
    :config,
    :ref,
    :handle,
    :publisher,
    :pause,
    :token,
    topics: %{},
    looking: %{},
    waiting: %{},
    out: %{},
    said: %{},
    ending: false
  ]

  @doc "The writer of the handle that calls this; found by the handle's pid."
  @spec start_link(Kmq.Config.t(), reference) :: GenServer.on_start()
  def start_link(config, ref), do: GenServer.start_link(__MODULE__, {config, ref, self()})

  @doc "The writer of a handle of this node."
  @spec whereis(pid) :: pid | nil
  def whereis(handle) do
    case Registry.lookup(Kmq.Registry, {:letters, handle}) do
      [{writer, _}] -> writer
      [] -> nil
    end
  end

  @doc "Takes over what is in work; the letters are written when it has returned, or later."
  @spec reject(pid, [{integer, integer, original}], String.t() | nil) ::
          :ok | {:error, [Kmq.Handle.refusal()]}
  def reject(writer, entries, text), do: GenServer.call(writer, {:reject, entries, text}, 10_000)

  @doc "What the engine has marked as expired, `[{slot, topic, partition, record}]`."
  @spec expired(pid, [tuple]) :: :ok
  def expired(writer, letters), do: GenServer.cast(writer, {:expired, letters})

  @doc "Its handle has other topics."
  @spec update(pid, Kmq.Config.t()) :: :ok
  def update(writer, config), do: GenServer.cast(writer, {:update, config})

  @impl true
  def init({config, ref, handle}) do
    {:ok, _} = Registry.register(Kmq.Registry, {:letters, handle}, nil)
    {:ok, %__MODULE__{config: config, ref: ref, handle: Process.monitor(handle)}}
  end

  @impl true
  def handle_call({:reject, entries, text}, _from, state) do
    tokens = for {slot, offset, _} <- entries, do: {slot, offset}

    case :kmq_nif.consumer_reject(state.ref, tokens) do
      :ok ->
        {:reply, :ok, take(state, entries, "rejected", text)}

      {:error, :closed} ->
        {:reply, {:error, for({slot, offset} <- tokens, do: {slot, offset, :closed})}, state}

      {:error, refused} ->
        {:reply, {:error, refused}, take(state, taken(entries, refused), "rejected", text)}
    end
  end

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  # The same message twice in one call is refused once: the first of them is taken.
  defp taken(entries, refused) do
    refused = Enum.frequencies_by(refused, fn {slot, offset, _} -> {slot, offset} end)

    {taken, _} =
      entries
      |> Enum.reverse()
      |> Enum.flat_map_reduce(refused, fn {slot, offset, _} = entry, left ->
        case left do
          %{{^slot, ^offset} => n} when n > 0 -> {[], %{left | {slot, offset} => n - 1}}
          _ -> {[entry], left}
        end
      end)

    taken
  end

  @impl true
  def handle_cast({:update, config}, state), do: {:noreply, %{state | config: config}}

  def handle_cast({:expired, letters}, state) do
    entries =
      for {slot, topic, partition, record} <- letters,
          do: {slot, elem(record, 0), {topic, partition, record}}

    {:noreply, take(state, entries, "expired", nil)}
  end

  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:kmq, ref, :ready}, %{publisher: ref} = state) when ref != nil do
    case :kmq_nif.publisher_poll(ref) do
      events when is_list(events) -> {:noreply, Enum.reduce(events, state, &event/2)}
      {:error, _closed} -> {:noreply, state}
    end
  end

  # Also of a publisher that was replaced: what it had is told as failed.
  def handle_info({:kmq, _ref, {:published, token, results}}, state) do
    state |> published(token, results) |> noreply()
  end

  def handle_info({:kmq_token, :letters, token}, %{token: monitor} = state) when monitor != nil do
    Process.demonitor(monitor, [:flush])
    state.publisher && Security.set_token(:publisher_set_token, state.publisher, token)
    {:noreply, %{state | token: nil}}
  end

  def handle_info({:kmq_token, _tag, _token}, state), do: {:noreply, state}

  def handle_info({:kmq, _ref, :space}, state), do: {:noreply, send_all(state)}
  def handle_info({:kmq, _ref, _other}, state), do: {:noreply, state}
  def handle_info(:again, state), do: {:noreply, send_all(%{state | pause: nil})}

  def handle_info({:settle, letters}, state), do: {:noreply, settle(state, letters)}

  def handle_info({:DOWN, handle, :process, _pid, _reason}, %{handle: handle} = state) do
    Process.send_after(self(), :over, state.config.drain_timeout)
    noreply(%{state | ending: true})
  end

  def handle_info(:over, state) do
    Logger.error("kmq: #{state.config.group_id}: #{held(state)} dead letters were not written")
    {:stop, :normal, state}
  end

  def handle_info({:DOWN, monitor, :process, _pid, _reason}, %{token: monitor} = state),
    do: {:noreply, event({:token, nil}, %{state | token: nil})}

  def handle_info({:DOWN, monitor, :process, _pid, reason}, %{looking: looking} = state)
      when is_map_key(looking, monitor) do
    {topic, looking} = Map.pop(looking, monitor)
    {:noreply, looked(%{state | looking: looking}, topic, reason)}
  end

  def handle_info(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  # ---- letters: {slot, offset, source, topic and partition, cause, {key, value, headers}}

  defp take(state, entries, cause, text) do
    entries
    |> Enum.group_by(fn {_, _, {topic, _, _}} -> state.config.dead_letter_topics[topic] end)
    |> Enum.reduce(state, fn {topic, entries}, state ->
      letters = Enum.map(entries, &letter(&1, cause, text, state.config))
      waiting = Map.update(state.waiting, topic, letters, &(&1 ++ letters))
      send_topic(%{state | waiting: waiting}, topic)
    end)
  end

  defp letter({slot, offset, {topic, partition, record}}, cause, text, config) do
    {_offset, _ts, key, value, _headers, _attempt, _deliveries, _origin} = record

    {slot, offset, {topic, partition}, cause,
     {key, value, headers(record, topic, partition, cause, text, config)}}
  end

  @own ["kmq-deliveries", "kmq-cause", "kmq-group", "kmq-origin", "kmq-error"]

  @doc false
  # Those of the message, then Kmq's own, one of each.
  def headers(record, topic, partition, cause, text, config) do
    {offset, ts, _key, _value, headers, attempt, deliveries, origin} = record
    own = [config.count_header | @own]
    # What expired was not tried; `attempt` counts the one that failed now, too.
    failures = if cause == "expired", do: attempt - 1, else: attempt
    origin = origin || "#{topic}/#{partition}/#{offset}/#{ts}"

    Enum.reject(headers, fn {name, _} -> name in own end) ++
      [
        {config.count_header, count(failures)},
        {"kmq-deliveries", Integer.to_string(deliveries)},
        {"kmq-cause", cause},
        {"kmq-group", config.group_id},
        {"kmq-origin", origin}
      ] ++ if(text in [nil, ""], do: [], else: [{"kmq-error", text}])
  end

  defp count(n) when n < 128, do: <<n>>
  defp count(n), do: <<min(n, 0x7FFF_FFFF)::32>>

  # ---- sending

  defp send_all(state), do: Enum.reduce(Map.keys(state.waiting), state, &send_topic(&2, &1))

  defp send_topic(%{pause: pause} = state, _topic) when pause != nil, do: state

  defp send_topic(state, topic) do
    case {state.waiting[topic], state.topics[topic]} do
      {[], _} -> %{state | waiting: Map.delete(state.waiting, topic)}
      {nil, _} -> state
      {_letters, nil} -> look(state, topic)
      {letters, partitions} -> state |> open() |> send_letters(topic, letters, partitions)
    end
  end

  # How many partitions it has, and whether it is there: a producer to a missing topic would only say so after half a minute.
  defp look(state, topic) do
    if topic in Map.values(state.looking) do
      state
    else
      config = state.config

      {_pid, monitor} =
        spawn_monitor(fn ->
          if config.create_topics, do: Topics.prepare(config)
          answer = Topics.partitions(topic, config.bootstrap, config.admin_props, @look_ms)
          exit({:looked, answer})
        end)

      %{state | looking: Map.put(state.looking, monitor, topic)}
    end
  end

  defp looked(state, topic, {:looked, {:ok, n}}) when n > 0,
    do: send_topic(%{state | topics: Map.put(state.topics, topic, n)}, topic)

  defp looked(state, topic, reason) do
    error =
      case reason do
        {:looked, {:ok, 0}} ->
          Error.new(
            :dead_letter_topic_missing,
            "the dead letter topic #{inspect(topic)} does not exist. Create it, for example:\n" <>
              "  kafka-topics.sh --bootstrap-server #{state.config.bootstrap} --create --topic #{topic} --partitions 8",
            retriable?: true
          )

        {:looked, {:error, error}} ->
          error

        crash ->
          Error.new(:kafka, "looking for #{inspect(topic)}: #{inspect(crash)}", retriable?: true)
      end

    state |> failed(topic, error) |> pause()
  end

  # The topic's own limit decides what is too large, not the client's; what does not go through is said soon.
  defp open(%{publisher: nil} = state) do
    mine = [{"message.max.bytes", "100000000"}, {"message.timeout.ms", "10000"}]

    props =
      Enum.reject(state.config.producer_props, &List.keymember?(mine, elem(&1, 0), 0)) ++ mine

    case Security.publisher_open(props, %{idempotent: true}) do
      {:ok, ref} -> %{state | publisher: ref}
      {:error, error} -> state |> failed(nil, Error.from_native(error)) |> pause()
    end
  end

  defp open(state), do: state

  defp send_letters(%{publisher: nil} = state, _topic, _letters, _partitions), do: state

  defp send_letters(state, topic, letters, partitions) do
    {chunk, rest} = Enum.split(letters, @chunk)

    entries =
      for {_, _, {_, partition}, _, {key, value, headers}} <- chunk,
          do: {rem(partition, partitions), key, value, headers, 0}

    token = make_ref()

    case :kmq_nif.publisher_send(state.publisher, topic, entries, token) do
      {:ok, 0} ->
        _ = :kmq_nif.publisher_space(state.publisher)
        state

      {:ok, n} ->
        {sent, unsent} = Enum.split(chunk, n)

        state = %{
          state
          | out: Map.put(state.out, token, {topic, sent}),
            waiting: Map.put(state.waiting, topic, unsent ++ rest)
        }

        send_topic(state, topic)

      {:error, error} ->
        state |> failed(topic, Error.from_native(error)) |> close() |> pause()
    end
  end

  defp published(state, token, results) do
    case Map.pop(state.out, token) do
      {nil, _} ->
        state

      {{topic, letters}, out} ->
        {written, unwritten} =
          letters |> Enum.zip(results) |> Enum.split_with(&(not match?({_, {:error, _}}, &1)))

        %{state | out: out}
        |> settle(Enum.map(written, &elem(&1, 0)))
        |> unwritten(topic, unwritten)
    end
  end

  defp unwritten(state, _topic, []), do: state

  # Perhaps the topic has changed: it is looked at again.
  defp unwritten(state, topic, [{_, {:error, native}} | _] = unwritten) do
    letters = Enum.map(unwritten, &elem(&1, 0))
    waiting = Map.update(state.waiting, topic, letters, &(letters ++ &1))

    %{state | waiting: waiting, topics: Map.delete(state.topics, topic)}
    |> failed(topic, Error.from_native(native))
    |> pause()
  end

  defp settle(state, []), do: state

  defp settle(state, letters) do
    tokens = for {slot, offset, _, _, _} <- letters, do: {slot, offset}

    # Late: the partition is another's by now, who gets the message, too. Closed: so does the next one.
    with {:error, refused} when is_list(refused) <-
           :kmq_nif.consumer_settle(state.ref, @dead_lettered, tokens) do
      again = for {slot, offset, :enomem} <- refused, do: {slot, offset}
      again = Enum.filter(letters, fn {slot, offset, _, _, _} -> {slot, offset} in again end)
      again != [] && Process.send_after(self(), {:settle, again}, @pause_ms)
    end

    letters
    |> Enum.frequencies_by(fn {_, _, place, cause, _} -> {place, cause} end)
    |> Enum.each(fn {{{topic, partition}, cause}, count} ->
      Telemetry.execute(
        [:kmq, :dead_lettered],
        %{count: count, late_ms: 0, late_max_ms: 0},
        %{group: state.config.group_id, topic: topic, partition: partition, cause: cause}
      )
    end)

    state
  end

  # ---- when it fails

  defp pause(%{pause: nil} = state),
    do: %{state | pause: Process.send_after(self(), :again, @pause_ms)}

  defp pause(state), do: state

  defp close(%{publisher: nil} = state), do: state

  defp close(state) do
    _ = :kmq_nif.publisher_close(state.publisher)
    %{state | publisher: nil}
  end

  defp event({:error, native}, state) do
    error = Error.from_native(native)
    state = failed(state, nil, error)
    if error.fatal?, do: state |> close() |> pause(), else: state
  end

  defp event({:token, _config}, %{token: nil} = state) do
    case Security.token_source(state.config.producer_props) do
      nil -> state
      source -> %{state | token: Token.request(source, :letters)}
    end
  end

  defp event(_log, state), do: state

  # The same thing is said once in ten seconds.
  defp failed(state, topic, error) do
    now = System.monotonic_time(:millisecond)
    what = {topic, error.reason}

    if now - Map.get(state.said, what, now - 2 * @say_every_ms) > @say_every_ms do
      text = "dead letters are not written#{topic && " to #{inspect(topic)}"}: #{error.message}"

      Logger.error(
        "kmq: #{state.config.group_id}: #{text}. #{held(state)} wait and are written again"
      )

      Telemetry.execute([:kmq, :error], %{count: 1}, %{
        group: state.config.group_id,
        error: %{error | message: text}
      })

      %{state | said: Map.put(state.said, what, now)}
    else
      state
    end
  end

  # ---- the end

  defp held(state) do
    waiting = state.waiting |> Map.values() |> Enum.map(&length/1) |> Enum.sum()
    out = state.out |> Map.values() |> Enum.map(fn {_, letters} -> length(letters) end)
    waiting + Enum.sum(out)
  end

  defp noreply(state) do
    if state.ending and held(state) == 0, do: {:stop, :normal, state}, else: {:noreply, state}
  end
end
