# make bench-latency: from publish to handler, at fixed rates, beside a plain librdkafka consumer in C; and how late redelivery is.
#
#   make bench-latency ARGS="--rates 1000,20000,100000 --seconds 4 --runs 3 --only markers,offsets --linger 0 --demand 100 --save"
#
#   --kafka HOST:PORT  a cluster that runs (make: KAFKA=); else the broker of the tests is started
#   --rates N,N        messages a second           --seconds N  measured in each run, after 2 s to warm up
#   --runs N           each line in its turn, so many times; the table has medians of the runs, and the greatest of all
#   --only NAME,NAME   of markers, offsets, plain, redelivery; plain is always measured
#   --bytes N          of a message (100)          --partitions N  (8)
#   --linger MS        of the sender (0)           --demand N      the stage host's max_demand (100); it has 4 workers
#   --flush MS         ack_flush_interval (5)      --save          into bench/RESULTS.md
#
# Every line has the same sender in turn: a C program that writes the time into each message. What is measured is from there to the handler's
# first line (for plain: to the return of rd_kafka_consumer_poll), by the clock of this machine. About 3 minutes.
#
# Late redelivery: messages fail once, at 200 a second, and are to come again 500 ms later; how much later the handler has them is counted from the end of the
# delay. It includes what writes the failure down, the copy, and the copy's own START.
#
# _build/bench/latency.csv has the curves: line, rate, percentile, us.

Code.require_file("support.exs", __DIR__)

defmodule Bench.Latency do
  @moduledoc false
  import Bench.Support

  @lines [
    {"plain", "librdkafka alone in C"},
    {"offsets", "stage host, delivery by offsets"},
    {"markers", "stage host, range markers"}
  ]
  @warm_up_s 2
  # ours above plain's, us, where it is a target
  @target_rate 20_000
  @targets [{50, 1_500}, {95, 5_000}]
  @late_target_ms 150

  def main(args) do
    options =
      options!(args,
        kafka: :string,
        rates: :string,
        seconds: :integer,
        runs: :integer,
        only: :string,
        bytes: :integer,
        partitions: :integer,
        linger: :string,
        demand: :integer,
        flush: :integer,
        save: :boolean
      )

    b = %{
      rates:
        (options[:rates] || "1000,20000,100000")
        |> String.split(",")
        |> Enum.map(&String.to_integer/1),
      seconds: options[:seconds] || 4,
      runs: options[:runs] || 3,
      only: String.split(options[:only] || "markers,offsets,redelivery", ",") ++ ["plain"],
      bytes: options[:bytes] || 100,
      partitions: options[:partitions] || 8,
      linger: options[:linger] || "0",
      demand: options[:demand] || 100,
      flush: options[:flush] || 5
    }

    with_kafka(options[:kafka], fn bootstrap ->
      b = Map.put(b, :hosts, bootstrap)

      head =
        head(
          "#{b.bytes} bytes, #{b.partitions} partitions, sender's linger #{b.linger} ms, max_demand #{b.demand}, " <>
            "#{b.runs} runs of #{b.seconds} s"
        )

      IO.puts(head)
      warm_up(b)

      results =
        Map.new(
          for run <- 1..b.runs,
              rate <- b.rates,
              {line, _} <- lines(b),
              do: measure(b, run, rate, line)
        )

      late = if "redelivery" in b.only, do: redelivery(b)
      write_curves(b, results, late)
      text = table(b, results) <> late_table(late)
      IO.puts(text)
      if options[:save], do: save("latency", "Latency", head, text)
    end)
  end

  defp lines(b), do: Enum.filter(@lines, fn {name, _} -> name in b.only end)

  # A broker that has just begun is slow: nobody is to be the first.
  defp warm_up(b) do
    note("warming up ...")
    for {line, _} <- @lines, do: measure(%{b | seconds: 1, runs: 0}, 0, 20_000, line)
  end

  # ---- one run

  defp measure(b, run, rate, line) do
    topic = "latency-#{line}-#{rate}-#{run}-#{System.system_time(:millisecond)}"
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.hosts)
    skip = rate * @warm_up_s
    {late, cpu} = measure(line, b, topic, rate, skip + rate * b.seconds)
    sorted = late |> Enum.drop(skip) |> Enum.sort() |> List.to_tuple()

    note(
      "run #{run}/#{b.runs}, #{rate} msg/s, #{line}: p50 #{ms(percentile(sorted, 50))}, p95 #{ms(percentile(sorted, 95))} ms, " <>
        "#{float(cpu)} us CPU per message"
    )

    {{run, rate, line}, {sorted, cpu}}
  end

  defp measure("plain", b, topic, rate, count) do
    file = Path.join(data_dir(), "plain.#{System.pid()}.us")
    port = spawn_alone(["latency", b.hosts, topic, topic, count, file])
    "ready" = wait_line(port, 30)
    sender = send_at(b, topic, rate, count)
    {_, cpu} = wait_result(port, 120)
    wait_result(sender, 60)
    late = for <<us::little-32 <- File.read!(file)>>, do: us
    File.rm(file)
    {late, cpu}
  end

  defp measure(line, b, topic, rate, count) do
    late = :atomics.new(count, [])
    next = :atomics.new(1, [])

    handler = fn message ->
      <<sent::64, _::binary>> = message.data
      us = :os.system_time(:microsecond) - sent
      i = :atomics.add_get(next, 1, 1)
      if i <= count, do: :atomics.put(late, i, us)
      message
    end

    host = start_host(b, topic, line, handler)
    cpu = cpu_ms()
    sender = send_at(b, topic, rate, count)
    wait_for("#{count} messages", div(count, rate) + 60, fn -> :atomics.get(next, 1) >= count end)
    cpu = cpu_ms() - cpu
    wait_result(sender, 60)
    Kmq.StageHost.stop(host)
    {for(i <- 1..count, do: :atomics.get(late, i)), cpu * 1000 / count}
  end

  defp send_at(b, topic, rate, count),
    do: spawn_alone(["rate", b.hosts, topic, b.partitions, count, b.bytes, rate, b.linger])

  defp start_host(b, topic, line, handler, extra \\ []) do
    delivery =
      if line == "offsets",
        do: [delivery: :offsets, on_failure: :ack],
        else: [create_topics: true, marker_topic: topic <> "-m", ack_flush_interval: b.flush]

    name = String.to_atom(topic)

    {:ok, host} =
      Kmq.StageHost.start_link(
        producer:
          {OffBroadway.Kmq.Producer,
           [hosts: b.hosts, topics: [topic], group_id: topic] ++ delivery ++ extra},
        handler: handler,
        name: name,
        concurrency: 4,
        max_demand: b.demand
      )

    wait_for("an assignment", 30, fn -> assigned(name) == b.partitions end)
    host
  end

  # At first there is no consumer to ask yet.
  defp assigned(name) do
    Kmq.info(name).total[:assigned]
  rescue
    ArgumentError -> 0
  end

  # ---- redelivery

  @delay_ms 500
  @failing 2_000
  @failing_rate 200

  defp redelivery(b) do
    topic = "latency-redelivery-#{System.system_time(:millisecond)}"
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.hosts)
    late = :atomics.new(@failing, signed: true)
    next = :atomics.new(1, [])
    failed = :ets.new(:failed, [:public])

    handler = fn message ->
      now = :os.system_time(:microsecond)
      <<sent::64, _::binary>> = message.data

      if message.metadata.attempt == 1 do
        :ets.insert(failed, {sent, message.metadata.partition, now})
        Map.put(message, :status, {:failed, {:retry, @delay_ms}})
      else
        [{_, _, at}] = :ets.lookup(failed, sent)
        i = :atomics.add_get(next, 1, 1)
        if i <= @failing, do: :atomics.put(late, i, now - at - @delay_ms * 1000)
        message
      end
    end

    host = start_host(b, topic, "markers", handler, backoff: [@delay_ms])
    wait_for("a tracker", 30, fn -> port_program("kmq_tracker") end)
    sender = send_at(b, topic, @failing_rate, @failing)
    wait_for("#{@failing} messages again", 120, fn -> :atomics.get(next, 1) >= @failing end)
    wait_result(sender, 60)
    Kmq.StageHost.stop(host)
    # the first second's make connections
    sorted =
      for(i <- (@failing_rate + 1)..@failing, do: :atomics.get(late, i))
      |> Enum.sort()
      |> List.to_tuple()

    note(
      "redelivery: p50 #{ms(percentile(sorted, 50))}, p99 #{ms(percentile(sorted, 99))} ms late"
    )

    sorted
  end

  # ---- results

  @curve Enum.map(0..98, &(&1 / 1)) ++ [99.0, 99.2, 99.4, 99.6, 99.8, 99.9, 99.95, 99.99, 100.0]

  defp write_curves(b, results, late) do
    rows =
      for {line, _} <- lines(b), rate <- b.rates, p <- @curve do
        us = median(for run <- 1..b.runs, do: percentile(elem(results[{run, rate, line}], 0), p))
        [line, rate, p, us]
      end

    late =
      if late,
        do: for(p <- @curve, do: ["redelivery", @failing_rate, p, percentile(late, p)]),
        else: []

    write_csv("latency.csv", "line,rate,percentile,us", rows ++ late)
  end

  defp table(b, results) do
    rows =
      for rate <- b.rates, {line, title} <- lines(b) do
        at = fn p, line ->
          for run <- 1..b.runs, do: percentile(elem(results[{run, rate, line}], 0), p)
        end

        cells = for p <- [50, 95, 99], do: ms(median(at.(p, line)))
        cpu = median(for run <- 1..b.runs, do: elem(results[{run, rate, line}], 1))
        above = fn p -> median(Enum.zip_with(at.(p, line), at.(p, "plain"), &(&1 - &2))) end

        "| #{thousands(rate)} | #{title} | #{Enum.join(cells, " | ")} | #{ms(Enum.max(at.(100, line)))} | " <>
          "#{if line == "plain", do: "- | -", else: "#{ms(above.(50))} | #{ms(above.(95))}"} | #{float(cpu)} | #{target(rate, line, above)} |"
      end

    """
    | msg/s | line | p50 ms | p95 ms | p99 ms | max ms | above plain: p50 | p95 | CPU us per message | target |
    |---|---|---|---|---|---|---|---|---|---|
    #{Enum.join(rows, "\n")}
    """
  end

  defp target(@target_rate, "markers", above) do
    Enum.map_join(@targets, ", ", fn {p, us} ->
      "p#{p} at most #{ms(us)} above: #{if above.(p) <= us, do: "kept", else: "MISSED"}"
    end)
  end

  defp target(_, _, _), do: "-"

  defp late_table(nil), do: ""

  defp late_table(late) do
    [p50, p95, p99, most] = for p <- [50, 95, 99, 100], do: percentile(late, p)

    """

    | redelivery, from the end of the delay to the handler | p50 ms | p95 ms | p99 ms | max ms | earliest ms | target |
    |---|---|---|---|---|---|---|
    | #{@failing_rate} failing a second, 500 ms delay | #{ms(p50)} | #{ms(p95)} | #{ms(p99)} | #{ms(most)} | #{ms(elem(late, 0))} | p99 at most #{@late_target_ms} ms: #{if p99 <= @late_target_ms * 1000, do: "kept", else: "MISSED"} |
    """
  end
end

Bench.Latency.main(System.argv())
