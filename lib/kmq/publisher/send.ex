defmodule Kmq.Publisher.Send do
  @moduledoc false
  # A synchronous publish, in the process that publishes (or, with a limit of time, in one that does it for that process): what must be known of
  # the topics, the messages into the local queue, their reports.
  #
  #   groups of entries --known, delays fit--> publisher_send --{published, token, results}--> results in the order given
  #                                              '-> no room: waits for it

  alias Kmq.{Ask, Error, Telemetry}
  alias Kmq.Publisher.{Entries, Refusal}

  # Reports are given up so long after delivery_timeout: librdkafka looks at its timeouts when a broker's thread wakes, which for a broker that
  # is down is when it connects again, up to reconnect.backoff.max.ms (10 s) late. What is later than that is a dead publisher.
  @report_margin_ms 15_000
  # The publisher asks for 15 s.
  @ask_ms 30_000

  @doc """
  Publishes, and waits for the last word; for at most `timeout` ms, where that is a number.
  """
  @spec publish(pid, map, [Entries.group()], map, timeout | nil) ::
          {:ok, [Kmq.Publisher.place()]} | {:error, Error.t() | list}
  def publish(pid, info, groups, delays, timeout)
      when is_integer(timeout) and timeout < info.delivery_timeout + @report_margin_ms,
      do: in_time(pid, info, delays, groups, deadline(timeout))

  # Not before the last word.
  def publish(pid, info, groups, delays, timeout) do
    with :ok <- ready(pid, info, groups, delays, :infinity) do
      by = deadline(timeout || info.delivery_timeout)
      {answer, _late} = publish_now(pid, info, groups, by, nil)
      answer
    end
  end

  @doc "Whether the topics are there and keep their records for long enough; asked once for each topic, until `by`."
  @spec ready(pid, map, [Entries.group()], map, deadline) :: :ok | {:error, Error.t()}
  def ready(pid, info, groups, delays, by) do
    with :ok <- known_topics(pid, info, groups, by), do: delays_fit(pid, info, delays, by)
  end

  # Whoever has set a limit is kept no longer. What becomes of the messages is waited for by another process: no report comes to a mailbox where
  # nobody expects it any more, and telemetry tells each once.
  defp in_time(pid, info, delays, groups, by) do
    caller = self()
    tag = make_ref()

    {_helper, monitor} =
      spawn_monitor(fn ->
        start = System.monotonic_time()

        case ready(pid, info, groups, delays, by) do
          :ok ->
            {answer, late} = publish_now(pid, info, groups, by, by)
            send(caller, {tag, answer})
            report_late(late, pid, info, start)

          error ->
            send(caller, {tag, error})
        end
      end)

    receive do
      {^tag, answer} ->
        Process.demonitor(monitor, [:flush])
        answer

      {:DOWN, ^monitor, _, _, reason} ->
        {:error, Error.new(:kafka, "publishing failed: #{inspect(reason, limit: 5)}")}
    end
  end

  # {answer, [{topic, token, n}] whose report is still to come}
  defp publish_now(pid, info, groups, by, report_by) do
    start = System.monotonic_time()
    {told, late} = send_all(pid, info, groups, by, report_by)

    if Enum.all?(told, &written?/1) do
      places = Enum.map(told, &places/1)
      report_written(groups, places, System.monotonic_time() - start)
      {{:ok, in_order(groups, places)}, []}
    else
      results = Enum.map(told, &results/1)
      {results, late} = alone(pid, info, groups, results, late, by, report_by)
      results = explained(groups, results, info, by)
      # Nobody waits for those of a publisher that does not report at all.
      report_sync(groups, results, if(report_by, do: late, else: []), start)
      {answer(in_order(groups, results)), late}
    end
  end

  defp report_late([], _pid, _info, _start), do: :ok

  defp report_late(late, pid, info, start) do
    monitor = Process.monitor(pid)
    by = deadline(info.delivery_timeout + @report_margin_ms)

    for {topic, token, n} = one <- late do
      case await({:sent, token, n}, info.ref, monitor, by) do
        :late -> report_failed(topic, List.duplicate(:timeout, n))
        told -> report_sync([one], [results([told])], [], start)
      end
    end
  end

  # A message that is due later than its topic keeps it would be lost: it is refused here, where somebody can do something.
  defp delays_fit(pid, info, delays, by) do
    Enum.reduce_while(delays, :ok, fn {topic, delay}, :ok ->
      case retention(pid, info, topic, by) do
        {:ok, kept} when is_integer(kept) and delay >= kept ->
          {:halt, {:error, too_long(topic, delay, kept)}}

        {:ok, _kept} ->
          {:cont, :ok}

        error ->
          {:halt, error}
      end
    end)
  end

  defp retention(pid, info, topic, by) do
    case known(info, {:retention, topic}) do
      [{_, kept}] -> {:ok, kept}
      [] -> ask(pid, {:retention, topic}, by)
      error -> error
    end
  end

  # The table goes with its owner.
  defp known(info, key) do
    :ets.lookup(info.topics, key)
  rescue
    ArgumentError -> {:error, Ask.closed(Kmq.Publisher)}
  end

  defp ask(pid, {_what, topic} = question, by) do
    with {:error, %Error{reason: :timeout} = error} <-
           Ask.ask(Kmq.Publisher, pid, question, min(left(by), @ask_ms)) do
      text =
        "no answer about the topic #{inspect(topic)} in time: nothing is written. Is a broker there?"

      {:error, %{error | message: text}}
    end
  end

  defp too_long(topic, delay, kept) do
    Error.new(
      :delay_too_long,
      "a delay of #{delay} ms is not shorter than #{inspect(topic)} keeps its records (retention.ms=#{kept}): the message would be gone before " <>
        "it is due"
    )
  end

  defp known_topics(pid, info, groups, by) do
    Enum.reduce_while(groups, :ok, fn {topic, _, _}, :ok ->
      case known_topic(pid, info, topic, by) do
        :ok -> {:cont, :ok}
        error -> {:halt, error}
      end
    end)
  end

  defp known_topic(pid, info, topic, by) do
    case known(info, topic) do
      [_] -> :ok
      [] -> ask(pid, {:topic, topic}, by)
      error -> error
    end
  end

  # All groups are sent before any report is waited for. What is told of each group: lists of results, in its order; and what is not told by then.
  # Without a limit: as long as a living publisher may take.
  defp send_all(pid, info, groups, by, report_by) do
    monitor = Process.monitor(pid)

    pending =
      for {topic, _indexes, entries} <- groups do
        {topic, send_group(info.ref, monitor, topic, entries, by)}
      end

    report_by = report_by || deadline(info.delivery_timeout + @report_margin_ms)

    told =
      for {_topic, steps} <- pending do
        for step <- steps, do: await(step, info.ref, monitor, report_by)
      end

    Process.demonitor(monitor, [:flush])
    late(pending, told)
  end

  defp late(pending, told) do
    if Enum.any?(told, &(:late in &1)) do
      late =
        for {{topic, steps}, lists} <- Enum.zip(pending, told),
            {{:sent, token, n}, :late} <- Enum.zip(steps, lists),
            do: {topic, token, n}

      {for(
         {{_, steps}, lists} <- Enum.zip(pending, told),
         do: Enum.zip_with(steps, lists, &told/2)
       ), late}
    else
      {told, []}
    end
  end

  defp told({:sent, _token, n}, :late) do
    text = "no broker has acknowledged it in time: it may still be written"
    List.duplicate({:error, Error.new(:timeout, text, retriable?: true)}, n)
  end

  defp told(_step, results), do: results

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
  defp alone(_pid, _info, [{_topic, _indexes, [_one]}], results, late, _by, _report_by),
    do: {results, late}

  defp alone(pid, info, groups, results, late, by, report_by) do
    groups
    |> Enum.zip(results)
    |> Enum.map_reduce(late, fn {{topic, _indexes, entries}, results}, late ->
      if Enum.any?(results, &too_large?/1),
        do: one_by_one(pid, info, topic, Enum.zip(entries, results), late, by, report_by),
        else: {results, late}
    end)
  end

  # When something else stands in the way, it does so for the rest as well: waiting for each of them would have no end.
  defp one_by_one(pid, info, topic, pairs, late, by, report_by) do
    {results, {_stopped, late}} =
      Enum.map_reduce(pairs, {nil, late}, fn {entry, result}, {stopped, late} ->
        cond do
          not too_large?(result) ->
            {result, {stopped, late}}

          stopped ->
            {stopped, {stopped, late}}

          true ->
            {[lists], more} = send_all(pid, info, [{topic, nil, [entry]}], by, report_by)
            [result] = results(lists)
            other? = match?({:error, _}, result) and not too_large?(result)
            {result, {if(other?, do: result), more ++ late}}
        end
      end)

    {results, late}
  end

  defp explained(groups, results, info, by) do
    for {{topic, _indexes, entries}, results} <- Enum.zip(groups, results),
        do: Refusal.explain(results, topic, entries, info, left(by))
  end

  defp too_large?({:error, %Error{reason: :msg_size_too_large}}), do: true
  defp too_large?(_result), do: false

  defp send_group(_ref, _monitor, _topic, [], _deadline), do: []

  # A call takes as many as it has time for; none: there is no room.
  defp send_group(ref, monitor, topic, entries, deadline) do
    token = make_ref()

    case native_send(ref, topic, entries, token) do
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

  @doc "Messages into the local queue. All that it does not take was refused before; should there be more, it is a message's fault and nobody else's."
  @spec native_send(reference, String.t(), [Entries.entry()], term) ::
          {:ok, non_neg_integer} | {:error, term}
  def native_send(ref, topic, entries, token) do
    :kmq_nif.publisher_send(ref, topic, entries, token)
  rescue
    ArgumentError -> {:error, Error.new(:invalid_option, "a message that cannot be sent")}
  end

  defp await_space(ref, monitor, deadline) do
    _ = :kmq_nif.publisher_space(ref)

    receive do
      {:kmq, ^ref, :space} -> :ok
      {:DOWN, ^monitor, _, _, _} -> {:error, Ask.closed(Kmq.Publisher)}
    after
      left(deadline) -> {:error, full()}
    end
  end

  @doc false
  @spec full() :: Error.t()
  def full,
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
      left(deadline) -> :late
    end
  end

  # The publisher ended; what it had to report may be in the mailbox already.
  defp closed_late(ref, token, n) do
    receive do
      {:kmq, ^ref, {:published, ^token, results}} -> results
    after
      0 -> List.duplicate({:error, Ask.closed(Kmq.Publisher)}, n)
    end
  end

  @doc "What the native side reports of a message."
  @spec result(tuple) :: {:ok, Kmq.Publisher.place()} | {:error, Error.t()}
  def result({:error, %Error{}} = error), do: error

  # It is closed: what librdkafka says of that is no help.
  def result({:error, {"_DESTROY", _, _, _, _}}) do
    text = "the publisher was closed before a broker had acknowledged this: it may be written"
    {:error, Error.new(:closed, text)}
  end

  def result({:error, error}), do: {:error, Error.from_native(error)}
  def result({partition, offset}), do: {:ok, %{partition: partition, offset: offset}}

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

  # What is late is told when it is known.
  defp report_sync(groups, results, late, start) do
    duration = System.monotonic_time() - start

    for {{topic, _indexes, _entries}, results} <- Enum.zip(groups, results) do
      reasons = for {:error, error} <- results, do: error.reason
      report_published(topic, length(results) - length(reasons), duration)
      later = for {^topic, _token, n} <- late, _ <- 1..n, do: :timeout
      report_failed(topic, reasons -- later)
    end
  end

  defp report_published(topic, count, duration) do
    count > 0 &&
      Telemetry.execute([:kmq, :publish], %{count: count, duration: duration}, %{topic: topic})
  end

  @doc "Tells of those that were not published, why."
  @spec report_failed(String.t(), [Error.reason()]) :: :ok
  def report_failed(topic, reasons) do
    Enum.each(Enum.frequencies(reasons), fn {reason, count} ->
      Telemetry.execute([:kmq, :publish, :error], %{count: count}, %{topic: topic, reason: reason})
    end)
  end

  @typedoc "In this VM's monotonic ms."
  @type deadline :: integer | :infinity

  @doc false
  @spec deadline(timeout) :: deadline
  def deadline(:infinity), do: :infinity
  def deadline(timeout), do: System.monotonic_time(:millisecond) + timeout

  @doc false
  @spec left(deadline) :: timeout
  def left(:infinity), do: :infinity
  def left(deadline), do: max(deadline - System.monotonic_time(:millisecond), 0)
end
