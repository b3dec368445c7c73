defmodule Kmq.Sandbox.DeliveryTest do
  # The tables of guides/delivery.md against what happens: each cell is tried, and each row has to be known here.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Consumer, DeadLetters, Publisher, Telemetry}

  @guide "guides/delivery.md"
  @external_resource @guide
  @columns %{
    "`:markers`, `:range`" => [delivery: :markers, marker_format: :range],
    "`:markers`, `:kmq`" => [delivery: :markers, marker_format: :kmq],
    "`:offsets`" => [delivery: :offsets],
    "`:at_most_once`" => [delivery: :at_most_once]
  }

  # [{column, %{row => word}}] of a table of the guide that has all columns
  defp tables do
    for block <- Regex.scan(~r/(?:^\|.*\|\n)+/m, File.read!(@guide)),
        [head, _line | rows] =
          block |> hd() |> String.split("\n", trim: true) |> Enum.map(&cells/1),
        tl(head) |> Enum.all?(&is_map_key(@columns, &1)),
        length(head) == 5 do
      for {column, i} <- Enum.with_index(tl(head)),
          do: {column, Map.new(rows, fn [row | words] -> {row, Enum.at(words, i)} end)}
    end
  end

  defp cells(line),
    do: line |> String.split("|") |> Enum.slice(1..-2//1) |> Enum.map(&String.trim/1)

  defmodule Backend do
    def execute([:kmq, :overdue], _measurements, metadata),
      do: :ets.insert(__MODULE__, {metadata.group, metadata.offset})

    def execute(_event, _measurements, _metadata), do: :ok
  end

  test "what can be said about a message", %{cluster: cluster} do
    :ets.new(Backend, [:named_table, :public, :bag])
    Telemetry.put_backend(Backend)
    on_exit(fn -> Telemetry.put_backend(nil) end)
    [actions, _options] = tables()
    assert length(actions) == 4

    # All wait more than they work.
    actions
    |> Enum.map(fn {column, wanted} ->
      Task.async(fn -> {column, wanted, try_all(cluster, column, wanted)} end)
    end)
    |> Task.await_many(scaled(90_000))
    |> Enum.each(fn {column, wanted, found} -> assert {column, found} == {column, wanted} end)
  end

  # A message that kills its VM at once must be below the commit the next time, or it is fetched again for ever.
  test "markers: the first window of an assignment is nobody's until the commit that covers it is acknowledged",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["first", "second"])
    # Refused, and not tried again for 5 s.
    refused = {:request_errors, :offset_commit, [:rebalance_in_progress]}
    :ok = Kmq.Sandbox.inject(cluster.sandbox, refused)
    Kmq.Test.Scene.listen()
    options = options(cluster, topic, tracker: :external)
    {:ok, consumer} = Consumer.start_link(options)
    # The commit goes out with the first take.
    assert Consumer.pull(consumer, max: 2, wait: 10) == []

    early =
      eventually(
        fn ->
          messages = Consumer.pull(consumer, max: 2, wait: 200)
          if messages != [] or refused?(), do: {:got, messages}
        end,
        20_000
      )

    assert early == {:got, []}
    assert Consumer.pull(consumer, max: 2, wait: 1_000) == []
    messages = pull(consumer, 2, 30_000)
    group = options[:group_id]
    assert Kmq.Test.Checker.committed(cluster.hosts, group, topic, 1) == %{0 => 2}
    assert Kmq.ack(messages) == :ok
    :ok = Consumer.stop(consumer)
  end

  defp refused? do
    receive do
      {[:kmq, :error, :passing], _, %{error: %{reason: :rebalance_in_progress}}} -> true
      {[:kmq | _], _, _} -> refused?()
    after
      0 -> false
    end
  end

  test "at most once: what is not committed yet is nobody's, however long that takes", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["first"])
    {:ok, consumer} = Consumer.start_link(options(cluster, topic, delivery: :at_most_once))
    assert [%{value: "first"}] = pull(consumer, 1)
    # Refused, and not tried again for 5 s.
    refused = {:request_errors, :offset_commit, [:rebalance_in_progress]}
    :ok = Kmq.Sandbox.inject(cluster.sandbox, refused)
    Kmq.Test.Scene.listen()
    publish(cluster, topic, ["second"])
    assert Consumer.pull(consumer, wait: 1_000) == []

    assert_receive {[:kmq, :error, :passing], _, %{error: %{reason: :rebalance_in_progress}}},
                   scaled(15_000)

    assert [%{value: "second"}] = pull(consumer, 1, 30_000)
    :ok = Consumer.stop(consumer)
  end

  test "what a pipeline can be told" do
    [_actions, options] = tables()

    for {column, rows} <- options, {row, wanted} <- rows, option <- [:on_success, :on_failure] do
      {value, _} = row |> String.trim("`") |> Code.eval_string()

      given =
        [hosts: "localhost:9092", topics: ["q"], group_id: "g"] ++
          @columns[column] ++ [{option, value}]

      {word, text} =
        case Kmq.Config.new(given) do
          {:ok, _} -> {"yes", ""}
          {:error, error} -> {"refused", error.message}
        end

      assert {column, row, word} == {column, row, wanted}

      if word == "refused" do
        for part <- [
              inspect(option),
              inspect(value),
              inspect(@columns[column][:delivery]),
              ":ack, :reject, :discard"
            ],
            do: assert(text =~ part)
      end
    end
  end

  # ---- one column

  @published [
               "`ack`",
               "`discard`",
               "`reject`",
               "`retry`",
               "`release`",
               "`snooze`",
               "`extend`",
               "`leave`",
               "`receipt`"
             ] ++
               [
                 "settled twice",
                 "over the time limit",
                 "expired",
                 "filtered out",
                 "a copy for another group"
               ]
  @later ["delayed", "in work when its consumer stops"]
  @unseen ["filtered out", "a copy for another group", "expired"]
  @limit_ms 3_000

  defp try_all(cluster, column, wanted) do
    assert Enum.sort(Map.keys(wanted)) == Enum.sort(@published ++ @later)
    topic = queue(cluster, 1)

    options =
      options(
        cluster,
        topic,
        @columns[column] ++
          [
            max_processing_time: scaled(@limit_ms),
            backoff: [0],
            drain_timeout: 1_000,
            filter: [tags: ["t"]]
          ]
      )

    publish(cluster, topic, Enum.map(@published, &{&1, how(&1, topic)}))
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts)
    {:ok, consumer} = Consumer.start_link(options)

    first = pull(consumer, length(@published) - length(@unseen), 20_000)
    results = Map.new(first, &{&1.value, act(&1, publisher)})
    due = now() + 1_500
    {:ok, _} = Publisher.publish(publisher, topic, "delayed", delay: 1_500, tags: ["t"])

    state = %{
      cluster: cluster,
      topic: topic,
      group: options[:group_id],
      consumer: consumer,
      results: results,
      due: due,
      first: Map.new(first, &{&1.value, &1}),
      seen: Enum.map(first, &{&1, nil})
    }

    state =
      await(state, Map.drop(wanted, ["in work when its consumer stops"]), now() + scaled(30_000))

    found = found(state)
    settle_rest(state)
    stopped = stop_in_work(state, publisher, options, wanted["in work when its consumer stops"])
    Publisher.close(publisher)
    Map.put(found, "in work when its consumer stops", stopped)
  end

  defp how("expired", _topic), do: [ttl: 1, tags: ["t"]]
  defp how("filtered out", _topic), do: [tags: ["other"]]

  defp how("a copy for another group", topic),
    do: [tags: ["t"], headers: [{"kmq-group", "other"}, {"kmq-origin", "#{topic}/0/0/1"}]]

  defp how(_row, _topic), do: [tags: ["t"]]

  defp act(message, publisher) do
    case message.value do
      "`ack`" -> Kmq.ack(message)
      "`discard`" -> Kmq.discard(message)
      "`reject`" -> Kmq.reject(message, "no")
      "`retry`" -> Kmq.retry(message)
      "`release`" -> Kmq.release(message)
      "`snooze`" -> Kmq.snooze(message, 100)
      "`extend`" -> Kmq.extend(message, 60_000)
      "`leave`" -> leave(message, publisher)
      "`receipt`" -> receipt(message)
      "settled twice" -> {Kmq.ack(message), Kmq.ack(message)}
      "over the time limit" -> :held
    end
  end

  defp leave(message, publisher) do
    with :ok <- Kmq.leave(message, sync: true) do
      Kmq.settle(publisher, Kmq.receipt(message), :ack)
    end
  end

  defp receipt(message) do
    Kmq.receipt(message)
  rescue
    ArgumentError -> :raised
  after
    :ok = Kmq.ack(message)
  end

  # ---- what came of it

  defp await(state, wanted, deadline) do
    state = look(state)
    found = found(state)

    if found == wanted or now() > deadline do
      state
    else
      await(state, wanted, deadline)
    end
  end

  defp look(state) do
    seen = Enum.map(Consumer.pull(state.consumer, max: 50, wait: 100), &{&1, now()})
    Enum.each(seen, fn {message, _at} -> :ok = Kmq.ack(message) end)
    %{state | seen: state.seen ++ seen}
  end

  defp found(state) do
    dead =
      state.topic
      |> DeadLetters.stream(hosts: state.cluster.hosts)
      |> Enum.map(& &1.value)

    Map.new(@published ++ ["delayed"], &{&1, word(&1, state, dead)})
  end

  defp word(row, state, dead) do
    again = for {%{value: ^row} = message, at} <- state.seen, at != nil, do: {message, at}
    result = state.results[row]

    cond do
      result == {:error, :unsupported} ->
        # In work as before.
        if Process.put({:acked, row}, true), do: "unsupported", else: acked(state.first[row])

      row in dead ->
        "dead letter"

      row == "delayed" ->
        delayed(again, state.due)

      again != [] and row in @unseen ->
        "seen"

      again != [] ->
        if match?({%{attempt: 2}, _}, hd(again)), do: "again, counted", else: "again"

      row in @unseen ->
        "unseen"

      true ->
        quiet(row, result, state)
    end
  end

  defp acked(message),
    do: if(Kmq.ack(message) == :ok, do: "unsupported", else: "unsupported and gone")

  defp delayed([], _due), do: "waits?"
  defp delayed([{_message, at} | _], due), do: if(at >= due, do: "waits", else: "at once")

  defp quiet("`extend`", :ok, state),
    do: if(again?(state, "over the time limit"), do: "longer", else: "longer?")

  defp quiet("`leave`", :ok, _state), do: "receipt"
  defp quiet("`receipt`", text, _state) when is_binary(text), do: "given"
  defp quiet("`receipt`", :raised, _state), do: "raises"
  defp quiet("settled twice", {:ok, {:error, :unknown}}, _state), do: "unknown"
  defp quiet("settled twice", {:ok, :ok}, _state), do: "done"

  defp quiet("over the time limit" = row, :held, state) do
    offset = state.first[row].offset
    if {state.group, offset} in :ets.lookup(Backend, state.group), do: "said", else: "done"
  end

  defp quiet(_row, :ok, _state), do: "done"
  defp quiet(_row, other, _state), do: inspect(other)

  defp again?(state, row),
    do: Enum.any?(state.seen, fn {m, at} -> m.value == row and at != nil end)

  # Nothing is left in work but what the last row is about.
  defp settle_rest(state), do: for({message, _} <- state.seen, do: Kmq.ack(message))

  # What comes again after an orderly end is there before what was published later, or (a copy) soon after it.
  defp stop_in_work(state, publisher, options, wanted) do
    row = "in work when its consumer stops"
    {:ok, _} = Publisher.publish(publisher, state.topic, row, tags: ["t"])
    pull_until(state.consumer, &Enum.any?(&1, fn m -> m.value == row end))
    :ok = Consumer.stop(state.consumer)
    {:ok, _} = Publisher.publish(publisher, state.topic, "the end", tags: ["t"])
    {:ok, consumer} = Consumer.start_link(options)
    needed = if wanted == "gone", do: ["the end"], else: [row, "the end"]
    seen = pull_until(consumer, &(needed -- Enum.map(&1, fn m -> m.value end) == []), 20_000)
    Enum.each(seen, &Kmq.ack/1)
    :ok = Consumer.stop(consumer)

    case Enum.filter(seen, &(&1.value == row)) do
      [] -> "gone"
      [%{attempt: 1}] -> "again"
      [_] -> "again, counted"
    end
  end

  defp now, do: System.monotonic_time(:millisecond)
end
