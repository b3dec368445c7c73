# make bench: Kmq beside librdkafka alone, on real Kafka on the same machine, in one run: only the ratios mean something.
#
#   mix run --no-start bench/bench.exs [--kafka HOST:PORT] [--messages 1000000] [--partitions 8] [--bytes 100] [--runs 3] [--only NAME]
#
# Without --kafka it starts the broker of the tests (its jars must be in the cache: `make setup-test`).
# Every line reads the same topic, with a group of its own each time; measured from the first message to the last.

defmodule Bench do
  @moduledoc false

  @lines [
    {"alone", "librdkafka alone in C, pop and free", 1.0},
    {"pull", "NIF pull, no markers", 0.5},
    {"range", "NIF pull, range markers and acks", 0.45},
    {"kmq", "NIF pull, kmq markers and acks", nil},
    {"stage", "stage host, range markers, max_demand 100", nil}
  ]

  def main(args) do
    {options, _, bad} =
      OptionParser.parse(args,
        strict: [
          kafka: :string,
          messages: :integer,
          partitions: :integer,
          bytes: :integer,
          runs: :integer,
          only: :string
        ]
      )

    if bad != [], do: raise(ArgumentError, "unknown option #{inspect(bad)}")
    {:ok, _} = Application.ensure_all_started(:kmq)
    Logger.configure(level: :warning)
    {bootstrap, stop} = kafka(options[:kafka])

    try do
      run(%{
        bootstrap: bootstrap,
        messages: options[:messages] || 1_000_000,
        partitions: options[:partitions] || 8,
        bytes: options[:bytes] || 100,
        runs: options[:runs] || 3,
        only: options[:only] && String.split(options[:only], ","),
        alone:
          System.get_env("KMQ_RDKAFKA_ALONE") ||
            raise("KMQ_RDKAFKA_ALONE: the path of the C program (make bench sets it)")
      })
    after
      stop.()
    end
  end

  defp kafka(nil) do
    Code.require_file("test/support/kafka_broker.ex")
    # the tests keep their JVM small; here it must not hold back what is measured
    broker = apply(Kmq.Test.Kafka, :start!, [[jvm: ["-Xmx1g"]]])

    {apply(Kmq.Test.Kafka, :bootstrap, [broker]),
     fn -> apply(Kmq.Test.Kafka, :stop, [broker]) end}
  end

  defp kafka(bootstrap), do: {bootstrap, fn -> :ok end}

  defp run(b) do
    topic = "bench-#{System.system_time(:millisecond)}"
    b = Map.put(b, :topic, topic)
    head(b)
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.bootstrap)
    note("publishing #{b.messages} messages of #{b.bytes} bytes ...")

    {_, 0} =
      System.cmd(b.alone, [
        "produce",
        b.bootstrap,
        topic,
        "#{b.partitions}",
        "#{b.messages}",
        "#{b.bytes}"
      ])

    lines =
      for {name, _, _} = line <- @lines,
          b.only == nil or name in b.only or name == "alone",
          do: line

    # The lines in turn, run after run: what the machine does meanwhile hits all of them.
    results =
      for run <- 1..b.runs, {name, title, _} <- lines do
        note("run #{run}/#{b.runs}: #{title} ...")
        {name, measure(name, b, "#{name}-#{run}")}
      end

    table(lines, Enum.group_by(results, &elem(&1, 0), &elem(&1, 1)), b)
  end

  defp head(b) do
    {rdkafka, _} = :kmq_nif.version()

    commit =
      with {out, 0} <-
             System.cmd("git", ["rev-parse", "--short", "HEAD"], stderr_to_stdout: true),
           do: String.trim(out)

    cpu = cpu_name()

    IO.puts("""
    #{System.schedulers_online()} schedulers, #{cpu}; OTP #{System.otp_release()}, Elixir #{System.version()}, librdkafka #{rdkafka}, commit #{inspect(commit)}
    #{b.messages} messages of #{b.bytes} bytes in #{b.partitions} partitions, #{b.runs} runs, the broker on the same machine
    """)
  end

  defp cpu_name do
    with {:ok, text} <- File.read("/proc/cpuinfo"),
         [_, name] <- Regex.run(~r/model name\s*:\s*(.+)/, text),
         do: name,
         else: (_ -> "cpu unknown")
  end

  defp note(text), do: IO.puts(:stderr, "  " <> text)

  # ---- one measurement: {messages per second, CPU us per message}

  defp measure("alone", b, id) do
    {out, 0} =
      System.cmd(b.alone, ["consume", b.bootstrap, b.topic, group(b, id), "#{b.messages}"])

    [n, seconds, cpu] = String.split(out)
    n = String.to_integer(n)
    {n / String.to_float(seconds), String.to_float(cpu) * 1.0e6 / n}
  end

  defp measure("pull", b, id), do: pull(b, id, delivery: :no_markers)
  defp measure("range", b, id), do: pull(b, id, [])
  defp measure("kmq", b, id), do: pull(b, id, marker_format: :kmq)

  defp measure("stage", b, id) do
    counter = :counters.new(1, [:write_concurrency])
    first = :atomics.new(2, [])
    me = self()

    handler = fn message ->
      if :counters.get(counter, 1) == 0 and :atomics.compare_exchange(first, 1, 0, 1) == :ok,
        do: send(me, {:first, now(), cpu()})

      :counters.add(counter, 1, 1)
      message
    end

    {:ok, host} =
      Kmq.StageHost.start_link(
        producer: {OffBroadway.Kmq.Producer, options(b, id)},
        handler: handler,
        concurrency: 4,
        max_demand: 100
      )

    {start, start_cpu} = receive(do: ({:first, at, cpu} -> {at, cpu}))
    wait_count(counter, b.messages)
    result = {b.messages / seconds_since(start), (cpu() - start_cpu) * 1000 / b.messages}
    Kmq.StageHost.stop(host)
    result
  end

  defp wait_count(counter, n) do
    if :counters.get(counter, 1) < n do
      receive(after: (2 -> wait_count(counter, n)))
    end
  end

  defp group(b, id), do: "#{b.topic}-#{id}"

  defp options(b, id) do
    [
      hosts: b.bootstrap,
      topics: [b.topic],
      group_id: group(b, id),
      marker_topic: "#{b.topic}-#{id}-m",
      create_topics: true,
      # Local queues that hold more than a second's worth: librdkafka before 2.2 rests a second when one is full.
      kafka_config: [
        consumer: ["queued.min.messages": "1000000", "queued.max.messages.kbytes": "65536"]
      ],
      tracker: if(System.get_env("KMQ_BENCH_TRACKER"), do: :embedded, else: :external)
    ]
  end

  defp pull(b, id, extra) do
    config =
      Kmq.Config.new!(Keyword.merge(options(b, id), Keyword.delete(extra, :delivery)), :producer)

    config = if extra[:delivery], do: %{config | delivery: extra[:delivery]}, else: config
    config = Map.merge(config, tuning())
    {:ok, handle} = Kmq.Handle.open(config, {:bench, id})
    :ok = Kmq.Handle.attach(handle, self())
    ack? = extra[:delivery] == nil
    result = loop(handle, ack?, b.messages, 0, nil)
    :ok = Kmq.Handle.close(handle, 30_000)
    flush_wakes()
    result
  end

  defp tuning do
    case System.get_env("KMQ_BENCH_START_AHEAD") do
      nil -> %{}
      n -> %{start_ahead: String.to_integer(n)}
    end
  end

  defp flush_wakes do
    receive do
      {:kmq, _, _} -> flush_wakes()
    after
      0 -> :ok
    end
  end

  @take 5_000

  defp loop(_handle, _ack?, n, got, {start, start_cpu}) when got >= n do
    {n / seconds_since(start), (cpu() - start_cpu) * 1000 / n}
  end

  defp loop(handle, ack?, n, got, start) do
    case Kmq.Handle.take(handle, @take) do
      [] ->
        receive do
          {:kmq, _, :ready} -> loop(handle, ack?, n, got, start)
        after
          10_000 ->
            raise "no message for 10 s (#{got} of #{n}): #{inspect(Kmq.Handle.info(handle))}"
        end

      batches ->
        start = start || {now(), cpu()}
        count = Enum.reduce(batches, 0, fn {_, _, _, messages}, sum -> sum + length(messages) end)

        if ack? do
          for {slot, _, _, messages} <- batches do
            :ok = Kmq.Handle.settle(handle, :ack, Enum.map(messages, &{slot, elem(&1, 0)}))
          end
        end

        loop(handle, ack?, n, got + count, start)
    end
  end

  defp now, do: System.monotonic_time(:microsecond)
  defp seconds_since(start), do: max(now() - start, 1) / 1.0e6
  # of the whole process, librdkafka's threads included; ms
  defp cpu, do: elem(:erlang.statistics(:runtime), 0)

  # ---- the table

  defp table(lines, results, _b) do
    base = median(results["alone"], 0)
    IO.puts("| line | msg/s, median (spread) | CPU us per message | ratio | target |")
    IO.puts("|---|---|---|---|---|")

    for {name, title, target} <- lines do
      rates = Enum.map(results[name], &elem(&1, 0))
      rate = median(results[name], 0)

      IO.puts(
        "| #{title} | #{thousands(rate)} (#{thousands(Enum.min(rates))} - #{thousands(Enum.max(rates))}) | " <>
          "#{float(median(results[name], 1))} | #{float(rate / base)} | #{if target, do: float(target), else: "-"} |"
      )
    end
  end

  defp median(list, index) do
    sorted = list |> Enum.map(&elem(&1, index)) |> Enum.sort()
    Enum.at(sorted, div(length(sorted), 2))
  end

  defp float(x), do: :erlang.float_to_binary(x / 1, decimals: 2)

  defp thousands(x) do
    x |> round() |> Integer.to_string() |> String.replace(~r/(?<=\d)(?=(\d{3})+$)/, ",")
  end
end

Bench.main(System.argv())
