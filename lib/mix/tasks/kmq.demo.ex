defmodule Mix.Tasks.Kmq.Demo do
  @shortdoc "A queue under bad luck: failures, killed workers, and nothing lost"
  @moduledoc """
  Publishes orders and works on them while things go wrong: 3 % of the attempts fail, workers are killed in the middle of a
  message, and a few orders always fail. In the end every order must have been handled, and exactly those that always
  fail must be dead letters.

      mix kmq.demo
      mix kmq.demo --kafka localhost:9092

  Without `--kafka` it runs on the embedded sandbox: no Kafka, no JVM. With it, its topics begin with `kmq-demo-` and are
  deleted in the end.

  The messages go through `OffBroadway.Kmq.Producer`, driven by Broadway where it is loaded, else by a small stage host.

    * `--messages` - how many orders (20,000)
    * `--workers` - how many workers (8)

  The exit code is 1 when an order is lost or wrongly dead-lettered.
  """
  use Mix.Task

  require Logger

  alias Kmq.{CommandLine, Consumer, Publisher, Sandbox, StageHost, Topics}

  @partitions 8
  @group "demo"
  @poison 5
  @kills 20
  @fail_percent 3
  # Orders fail by chance in their first attempts only: what ends as a dead letter was meant to.
  @lucky_attempt 3
  @retry_ms 200
  @limit_ms 50_000
  @warm_up -1
  @progress_ms 500

  @impl true
  def run(args) do
    switches = [kafka: :string, messages: :integer, workers: :integer, help: :boolean]
    {options, words} = CommandLine.parse(args, switches)

    if options[:help],
      do: IO.puts(@moduledoc),
      else: demo(options[:kafka], options[:messages] || 20_000, options[:workers] || 8, words)
  end

  defp demo(_kafka, _messages, _workers, [word | _]),
    do: CommandLine.bad_usage("expected no words, only options, got: #{word}")

  defp demo(_kafka, messages, _workers, []) when messages <= @poison + @kills,
    do: CommandLine.bad_usage("--messages: at least #{@poison + @kills + 1}, got: #{messages}")

  defp demo(_kafka, _messages, workers, []) when workers not in 1..1_000,
    do: CommandLine.bad_usage("--workers: 1 to 1000, got: #{workers}")

  defp demo(kafka, messages, workers, []) do
    Mix.Task.run("app.start")
    Logger.configure(level: :error)
    unless demo(kafka, messages, workers), do: exit({:shutdown, 1})
  end

  # true = nothing lost, nothing wrongly dead-lettered.
  defp demo(kafka, messages, workers) do
    place = place(kafka)
    table = :ets.new(:kmq_demo, [:public, :set, write_concurrency: true])
    chosen = 0..(messages - 1) |> Enum.take_random(@poison + @kills)
    {poison, killers} = Enum.split(chosen, @poison)
    Enum.each(poison, &:ets.insert(table, {{:poison, &1}}))
    Enum.each(killers, &:ets.insert(table, {{:killer, &1}}))

    pipeline = start_pipeline(place, workers, table)
    undertaker = count_dead_letters(place, table)
    warm_up(place, table)

    started = System.monotonic_time(:millisecond)
    publish(place, messages)
    finished? = wait(table, messages, started + @limit_ms, started)
    elapsed = System.monotonic_time(:millisecond) - started

    stop_pipeline(pipeline)
    stop_undertaker(undertaker)
    clean_up(place)
    report(table, messages, poison, elapsed, finished?)
  end

  # ---- where

  defp place(nil) do
    {:ok, sandbox} = Sandbox.start_link(topics: %{"orders" => @partitions})
    IO.puts("sandbox: a Kafka of its own at #{Sandbox.bootstrap(sandbox)}")

    %{
      hosts: Sandbox.bootstrap(sandbox),
      topic: "orders",
      dead: "orders__undelivered",
      sandbox: sandbox
    }
  end

  defp place(hosts) do
    topic = "kmq-demo-#{System.system_time(:second)}"
    IO.puts("Kafka at #{hosts}, topic #{topic}")
    ok!(Topics.create_topic(topic, @partitions, hosts: hosts))
    %{hosts: hosts, topic: topic, dead: topic <> "__undelivered", sandbox: nil}
  end

  defp clean_up(%{sandbox: nil} = place) do
    markers = Topics.marker_topic(place.topic, @group)
    dead_markers = Topics.marker_topic(place.dead, @group <> "-dead")

    for topic <- [place.topic, markers, place.dead, dead_markers, place.dead <> "-twice"],
        do: Topics.delete_topic(topic, hosts: place.hosts)
  end

  # The tracker leaves its group after its last consumer; only then its Kafka may go.
  defp clean_up(%{sandbox: sandbox}) do
    until(
      fn -> DynamicSupervisor.count_children(Kmq.TrackerSupervisor).active == 0 end,
      System.monotonic_time(:millisecond) + 5_000
    )

    Sandbox.stop(sandbox)
  end

  # Consumer and tracker join their groups first, which takes seconds. An order that fails once has gone round when it comes again.
  defp warm_up(place, table) do
    started = System.monotonic_time(:millisecond)
    {:ok, publisher} = Publisher.start_link(hosts: place.hosts)
    {:ok, _place} = Publisher.publish(publisher, place.topic, "#{@warm_up} goes round")
    :ok = Publisher.close(publisher)
    warm? = until(fn -> get(table, :warm) > 0 end, started + @limit_ms)

    unless warm?,
      do: Mix.raise("no redelivery within #{div(@limit_ms, 1000)} s: does the cluster work?")

    IO.puts("everybody is there after #{System.monotonic_time(:millisecond) - started} ms")
  end

  defp until(fun, limit) do
    cond do
      fun.() -> true
      System.monotonic_time(:millisecond) > limit -> false
      true -> Process.sleep(20) && until(fun, limit)
    end
  end

  defp publish(place, messages) do
    {:ok, publisher} = Publisher.start_link(hosts: place.hosts)
    started = System.monotonic_time(:millisecond)

    0..(messages - 1)
    |> Stream.map(fn n ->
      {place.topic, "#{n} #{String.duplicate("x", 80)}",
       [key: "customer #{rem(n, 997)}", partition: rem(n, @partitions)]}
    end)
    |> Stream.chunk_every(2_000)
    |> Enum.each(fn chunk -> {:ok, _places} = Publisher.publish_many(publisher, chunk) end)

    IO.puts("published #{messages} orders in #{System.monotonic_time(:millisecond) - started} ms")
    :ok = Publisher.close(publisher)
  end

  # ---- the pipeline

  defp start_pipeline(place, workers, table) do
    producer =
      {OffBroadway.Kmq.Producer,
       hosts: place.hosts,
       topics: [place.topic],
       group_id: @group,
       create_topics: true,
       max_processing_time: 2_000,
       max_redeliveries: 5,
       backoff: {:linear, min: @retry_ms, max: @retry_ms, step: 0, jitter: 0}}

    if Code.ensure_loaded?(broadway()) do
      IO.puts("driven by Broadway, #{workers} processors")

      {:ok, _} = Application.ensure_all_started(:broadway)

      {:ok, _pid} =
        broadway().start_link(__MODULE__,
          name: __MODULE__,
          context: table,
          max_restarts: 1_000,
          producer: [module: producer, concurrency: 1],
          processors: [default: [concurrency: workers, max_demand: 10]]
        )

      :broadway
    else
      IO.puts("driven by the stage host (Broadway is not loaded), #{workers} workers")

      {:ok, host} =
        StageHost.start_link(
          name: __MODULE__,
          producer: producer,
          concurrency: workers,
          max_demand: 10,
          handler: &handle_message(:default, &1, table)
        )

      host
    end
  end

  defp stop_pipeline(:broadway), do: broadway().stop(__MODULE__)
  defp stop_pipeline(host), do: StageHost.stop(host)

  # Known at run time only: Kmq compiles without it.
  defp broadway, do: Broadway

  @doc false
  # Broadway's callback, and the stage host's handler.
  @spec handle_message(atom, map, :ets.table()) :: map
  def handle_message(_processor, message, table) do
    {n, _} = Integer.parse(message.data)
    attempt = message.metadata.attempt

    if n != @warm_up,
      do: work(message, table, n, attempt),
      else: go_round(message, table, attempt)
  end

  defp go_round(message, _table, 1), do: %{message | status: {:failed, "goes round"}}

  defp go_round(message, table, _attempt) do
    count(table, :warm)
    message
  end

  defp work(message, table, n, attempt) do
    if attempt > 1, do: redelivered(table, n, message.metadata.ts)
    Process.sleep(1)

    cond do
      :ets.member(table, {:poison, n}) ->
        fail(message, table, n, "this one always fails")

      attempt == 1 and :ets.member(table, {:killer, n}) ->
        count(table, :killed)
        Process.exit(self(), :kill)

      attempt <= @lucky_attempt and :rand.uniform(100) <= @fail_percent ->
        fail(message, table, n, "bad luck")

      true ->
        if :ets.update_counter(table, {:handled, n}, 1, {{:handled, n}, 0}) == 1,
          do: count(table, :handled),
          else: count(table, :twice)

        message
    end
  end

  defp fail(message, table, n, reason) do
    count(table, :failed)
    :ets.insert(table, {{:due, n}, System.system_time(:millisecond) + @retry_ms})
    %{message | status: {:failed, reason}}
  end

  # Lateness is that of the tracker: from the moment a message was due to that of its copy. After that it waits in the queue
  # like any other.
  defp redelivered(table, n, copied) do
    count(table, :redelivered)

    case :ets.take(table, {:due, n}) do
      [{_, due}] -> :ets.insert(table, {{:late, make_ref()}, max(copied - due, 0)})
      # After a kill: nobody knows what the worker had in hand.
      [] -> :ok
    end
  end

  defp count(table, name), do: :ets.update_counter(table, name, 1, {name, 0})

  defp get(table, name) do
    case :ets.lookup(table, name) do
      [{_, n}] -> n
      [] -> 0
    end
  end

  # ---- dead letters are read like any queue

  defp count_dead_letters(place, table) do
    {:ok, consumer} =
      Consumer.start_link(
        hosts: place.hosts,
        topics: [place.dead],
        group_id: @group <> "-dead",
        dead_letter_topic: place.dead <> "-twice",
        create_topics: true,
        tracker: :external
      )

    spawn_link(fn -> pull_dead_letters(consumer, table) end)
  end

  defp stop_undertaker(pid) do
    monitor = Process.monitor(pid)
    send(pid, :stop)

    receive do
      {:DOWN, ^monitor, _, _, _} -> :ok
    end
  end

  defp pull_dead_letters(consumer, table) do
    receive do
      :stop -> Consumer.stop(consumer)
    after
      0 ->
        for message <- Consumer.pull(consumer, max: 100, wait: 200) do
          {n, _} = Integer.parse(message.value)
          :ets.update_counter(table, {:dead, n}, 1, {{:dead, n}, 0})
          count(table, :dead)
          Kmq.ack(message)
        end

        pull_dead_letters(consumer, table)
    end
  end

  # ---- the end

  defp wait(table, messages, limit, started) do
    handled = get(table, :handled)
    dead = get(table, :dead)
    now = System.monotonic_time(:millisecond)

    IO.puts(
      "#{:io_lib.format("~5.1f", [(now - started) / 1000])} s  handled #{handled} of #{messages}  failed #{get(table, :failed)}  " <>
        "killed #{get(table, :killed)}  redelivered #{get(table, :redelivered)}  dead letters #{dead}"
    )

    cond do
      handled + dead >= messages ->
        true

      now > limit ->
        false

      true ->
        Process.sleep(@progress_ms)
        wait(table, messages, limit, started)
    end
  end

  defp report(table, messages, poison, elapsed, finished?) do
    dead = for [n, times] <- :ets.match(table, {{:dead, :"$1"}, :"$2"}), do: {n, times}
    handled = get(table, :handled)
    expected = Enum.sort(poison)
    right? = Enum.sort(dead) == Enum.map(expected, &{&1, 1})

    lost =
      Enum.count(
        0..(messages - 1),
        &(not :ets.member(table, {:handled, &1}) and not :ets.member(table, {:dead, &1}))
      )

    late = table |> :ets.match({{:late, :_}, :"$1"}) |> List.flatten() |> Enum.sort()

    rows = [
      {"published", messages},
      {"handled (distinct)", handled},
      {"failed, to be retried", get(table, :failed)},
      {"workers killed at work", get(table, :killed)},
      {"redelivered", get(table, :redelivered)},
      {"dead-lettered",
       "#{length(dead)} (#{if right?, do: "exactly", else: "NOT"} the #{@poison} that always fail)"},
      {"handled twice", get(table, :twice)},
      {"lost", lost},
      {"messages per second", div(messages * 1000, max(elapsed, 1))},
      {"redelivery late by", "#{percentile(late, 50)} ms median, #{percentile(late, 99)} ms p99"}
    ]

    IO.puts("")
    for {name, value} <- rows, do: IO.puts("  #{String.pad_trailing(name, 24)}#{value}")
    IO.puts("")

    IO.puts(
      "  A killed worker takes with it all that it had in hand: that is redelivered, too, and what it had"
    )

    IO.puts("  handled but not yet acknowledged is handled twice.\n")

    unless finished?, do: IO.puts("not finished in #{div(@limit_ms, 1000)} s")
    finished? and lost == 0 and right?
  end

  defp percentile([], _percent), do: "-"
  defp percentile(sorted, percent), do: Enum.at(sorted, div((length(sorted) - 1) * percent, 100))

  defp ok!(:ok), do: :ok
  defp ok!({:error, error}), do: Mix.raise(Exception.message(error))
end
