# make bench: Kmq beside its peers and beside librdkafka alone, on real Kafka on the same machine, in one run: only the ratios mean something.
#
#   bench.exs [--kafka HOST:PORT] [--messages N] [--partitions 8] [--bytes 100] [--keyed] [--runs 3] [--only NAME,NAME] [--quick] [--save]
#
# Without --kafka it starts the broker of the tests (its jars must be in the cache: `make setup-test`). --keyed gives each message a
# key and two headers. --save writes the table into bench/RESULTS.md. --quick: few lines, one run, and floors that must not be missed.
#
# Every consuming line reads the same topic, with a group of its own each time. The first tenth of its messages is its warm-up, for ours and the
# peers alike (first records of new marker partitions, JIT compilers, queues that fill): the clock goes from there to the last. The lines go
# in turn, run after run: what the machine does meanwhile hits all of them. Before the first run each goes once over a quarter of its messages.

Code.require_file("support.exs", __DIR__)

defmodule Bench do
  @moduledoc false
  import Bench.Support

  # name, title, share of the messages it works on (the slow ones would take minutes), target, and what the target is a ratio of
  @lines [
    {"alone", "librdkafka alone in C, pop and free", 1, nil, nil},
    {"plain-jvm", "Kafka's plain consumer (JVM)", 1, nil, nil},
    {"share-jvm", "Kafka's share consumer, explicit acks (JVM)", 0.5, nil, nil},
    {"kmq-jvm", "kmq's client with its tracker (JVM)", 0.2, nil, nil},
    {"pull", "NIF pull, no markers", 1, 0.6, "alone"},
    {"offsets", "NIF pull, delivery by offsets, acks", 1, nil, nil},
    {"range", "NIF pull, range markers and acks, START durable before hand-out", 1, 0.95, "pull"},
    {"range-share", "the same, against the share consumer", 0, 1.5, "share-jvm"},
    {"kmq", "NIF pull, kmq markers and acks, our tracker running", 0.5, 2.0, "kmq-jvm"},
    {"stage-100", "stage host, range markers, max_demand 100", 1, nil, nil},
    {"stage-10", "stage host, range markers, max_demand 10", 0.5, nil, nil},
    {"broadway-100", "Broadway, range markers, max_demand 100", 1, nil, nil},
    {"broadway-10", "Broadway, range markers, max_demand 10", 0.5, nil, nil},
    {"memory-100", "Broadway, an in-memory producer, max_demand 100: its ceiling", 1, nil, nil},
    {"memory-10", "the same, max_demand 10", 0.5, nil, nil},
    {"produce", "librdkafka alone in C, produce", 1, nil, nil},
    {"publish", "publish_many, delivery reports", 1, 0.8, "produce"}
  ]

  # Well under the noise seen: below them something is broken, not slow.
  @quick ["alone", "pull", "range", "produce", "publish"]
  @floors [{"pull", "alone", 0.1}, {"range", "pull", 0.12}, {"publish", "produce", 0.05}]

  def main(args) do
    options =
      options!(args,
        kafka: :string,
        messages: :integer,
        partitions: :integer,
        bytes: :integer,
        keyed: :boolean,
        runs: :integer,
        only: :string,
        quick: :boolean,
        save: :boolean
      )

    with_kafka(options[:kafka], fn bootstrap ->
      bytes = options[:bytes] || 100
      quick = options[:quick] || false

      run(%{
        bootstrap: bootstrap,
        messages:
          options[:messages] || if(quick, do: 2_000_000, else: div(1_600_000_000, bytes + 300)),
        partitions: options[:partitions] || 8,
        bytes: bytes,
        keyed: options[:keyed] || false,
        runs: options[:runs] || if(quick, do: 1, else: 3),
        only: if(quick, do: @quick, else: options[:only] && String.split(options[:only], ",")),
        quick: quick,
        save: options[:save] || false,
        classes: java_classes(quick),
        alone: alone()
      })
    end)
  end

  defp run(b) do
    b = Map.put(b, :topic, "bench-#{System.system_time(:millisecond)}")
    head = describe(b)
    IO.puts(head)
    :ok = Kmq.Topics.create_topic(b.topic, b.partitions, hosts: b.bootstrap)
    note("publishing #{b.messages} messages of #{b.bytes} bytes ...")
    _ = produce(b, b.topic, b.messages)

    lines = for {name, _, share, _, _} = line <- @lines, share > 0, wanted?(name, b), do: line

    # Not counted: the broker compiles what each line has it do while it does it, and the line would pay for it.
    unless b.quick do
      for {name, title, share, _, _} <- lines do
        note("warming up: #{title} ...")
        line(name, b, share / 4, 0)
      end
    end

    results =
      for run <- 1..b.runs, {name, title, share, _, _} <- lines do
        note("run #{run}/#{b.runs}: #{title} ...")
        {name, line(name, b, share, run)}
      end
      |> Enum.group_by(&elem(&1, 0), &elem(&1, 1))

    text = table(results)
    IO.puts(text)

    if b.save do
      shape = "#{b.bytes}#{if b.keyed, do: "-keyed"}"

      save(
        shape,
        "Throughput, #{b.bytes} bytes#{if b.keyed, do: ", keys and headers"}",
        head,
        text
      )
    end

    if b.quick, do: floors(results)
  end

  # In a process of its own: no line inherits the heap of another.
  defp line(name, b, share, run) do
    n = b.messages * share
    b = Map.merge(b, %{messages: round(n), warm: round(n / 10)})
    Task.await(Task.async(fn -> measure(name, b, "#{name}-#{run}") end), :infinity)
  end

  defp wanted?(name, b) do
    (b.only == nil or name in b.only or name == "alone") and
      (not String.ends_with?(name, "-jvm") or b.classes != nil) and
      (not (String.starts_with?(name, "broadway") or String.starts_with?(name, "memory")) or
         broadway?())
  end

  defp broadway?, do: Code.ensure_loaded?(Broadway)

  defp describe(b) do
    shape = if b.keyed, do: ", each with a key and two headers", else: ""
    broadway = if broadway?(), do: "", else: ", Broadway is not loaded: its lines are left out"
    jvm = if b.classes, do: "", else: ", the JVM's peers are left out"

    head(
      "#{b.messages} messages of #{b.bytes} bytes#{shape} in #{b.partitions} partitions, #{b.runs} runs, a consumer's first tenth is its warm-up#{broadway}#{jvm}"
    )
  end

  # ---- the JVM's peers

  defp jars(name) do
    home = System.get_env("XDG_CACHE_HOME") || Path.join(System.user_home!(), ".cache")
    Path.join([home, "kmq", name, "*"])
  end

  defp java_classes(true), do: nil

  defp java_classes(_) do
    out = Path.join(Mix.Project.build_path(), "bench")
    File.mkdir_p!(out)

    sources = [
      {"bench/peers/Consumers.java", "kafka-4.3.1"},
      {"bench/peers/Kmq.java", "kmq-jvm-0.2"}
    ]

    if System.find_executable("javac") do
      for {source, cache} <- sources do
        {_, 0} =
          System.cmd("javac", ["-d", out, "-cp", jars(cache), "bench/peers/Usage.java", source])
      end

      out
    end
  end

  defp java(b, cache, args) do
    args = ["-Xmx1g", "-cp", "#{b.classes}:#{jars(cache)}" | args]
    {out, 0} = System.cmd("sh", ["-c", ~s(exec java "$@" 2>/dev/null), "sh" | args])
    parse(out)
  end

  # MESSAGES SECONDS CPU_SECONDS RSS_KB -> {messages a second, CPU us per message, MB}
  defp parse(out) do
    [n, seconds, cpu, rss] =
      out |> String.split("\n", trim: true) |> List.last() |> String.split()

    n = String.to_integer(n)

    {n / String.to_float(seconds), String.to_float(cpu) * 1.0e6 / n,
     String.to_integer(rss) / 1024}
  end

  defp produce(b, topic, n) do
    args = ["produce", b.bootstrap, topic, "#{b.partitions}", "#{n}", "#{b.bytes}"]
    {out, 0} = System.cmd(b.alone, args ++ if(b.keyed, do: ["keyed"], else: []))
    parse(out)
  end

  # ---- one measurement

  defp measure("alone", b, id) do
    args = ["consume", b.bootstrap, b.topic, group(b, id), "#{b.messages}", "#{b.warm}"]
    {out, 0} = System.cmd(b.alone, args ++ if(b.keyed, do: ["keyed"], else: []))
    parse(out)
  end

  defp measure("plain-jvm", b, id), do: jvm_consumer("plain", b, id)
  defp measure("share-jvm", b, id), do: jvm_consumer("share", b, id)

  defp measure("kmq-jvm", b, id) do
    markers = "#{b.topic}-#{id}-m"
    :ok = Kmq.Topics.create_topic(markers, b.partitions, hosts: b.bootstrap)
    args = ["Kmq", b.bootstrap, b.topic, markers, group(b, id), "#{b.messages}", "#{b.warm}"]
    java(b, "kmq-jvm-0.2", args)
  end

  defp measure("pull", b, id), do: pull(b, id, [tracker: :external], :no_markers)

  defp measure("offsets", b, id),
    do: pull(b, id, [delivery: :offsets, on_failure: :ack, tracker: :external], :acks)

  defp measure("range", b, id), do: pull(b, id, [tracker: :external], :acks)
  defp measure("kmq", b, id), do: pull(b, id, [marker_format: :kmq, tracker: :embedded], :acks)
  defp measure("stage-" <> demand, b, id), do: stage(b, id, String.to_integer(demand))

  defp measure("broadway-" <> demand, b, id) do
    broadway(
      b,
      String.to_integer(demand),
      {OffBroadway.Kmq.Producer, options(b, id) ++ [tracker: :external]}
    )
  end

  defp measure("memory-" <> demand, b, _id),
    do: broadway(b, String.to_integer(demand), {Bench.Memory, {:binary.copy("x", b.bytes)}})

  defp measure("produce", b, id) do
    topic = "#{b.topic}-#{id}"
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.bootstrap)
    produce(b, topic, b.messages)
  end

  @senders 8

  defp measure("publish", b, id) do
    topic = "#{b.topic}-#{id}"
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.bootstrap)
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.bootstrap, compression: :none)
    value = :binary.copy("x", b.bytes)

    options =
      if b.keyed,
        do: [headers: [{"content-type", "text/plain"}, {"trace", "4bf92f3577b34da6"}]],
        else: []

    chunk = 5_000
    rounds = div(b.messages, chunk * @senders)

    batch = fn ->
      for i <- 1..chunk,
          do: {topic, value, [partition: rem(i, b.partitions)] ++ keyed(b, i) ++ options}
    end

    # Several at once, as the senders of a real program are; each makes its messages once, as the C program does.
    senders =
      for _ <- 1..@senders do
        Task.async(fn ->
          batch = batch.()
          receive(do: (:go -> :ok))
          for _ <- 1..rounds, do: {:ok, _} = Kmq.Publisher.publish_many(publisher, batch)
        end)
      end

    start = {now_us(), cpu_ms()}
    for sender <- senders, do: send(sender.pid, :go)
    Task.await_many(senders, :infinity)
    result = since(start, rounds * chunk * @senders)
    GenServer.stop(publisher)
    result
  end

  defp keyed(%{keyed: true}, i), do: [key: "key-#{i}"]
  defp keyed(_, _), do: []

  defp jvm_consumer(kind, b, id) do
    java(b, "kafka-4.3.1", [
      "Consumers",
      kind,
      b.bootstrap,
      b.topic,
      group(b, id),
      "#{b.messages}",
      "#{b.warm}"
    ])
  end

  defp counter(b) do
    counter = :counters.new(1, [:write_concurrency])

    count = fn message ->
      :counters.add(counter, 1, 1)
      message
    end

    wait = fn ->
      deadline = System.monotonic_time(:second) + 300
      from = wait_count(counter, b.warm, deadline)
      start = {now_us(), cpu_ms()}
      to = wait_count(counter, b.messages, deadline)
      since(start, to - from)
    end

    {count, wait}
  end

  defp wait_count(counter, n, deadline) do
    count = :counters.get(counter, 1)
    if System.monotonic_time(:second) > deadline, do: raise("#{count} of #{n} messages in 300 s")
    if count < n, do: receive(after: (2 -> wait_count(counter, n, deadline))), else: count
  end

  defp stage(b, id, demand) do
    {count, wait} = counter(b)

    {:ok, host} =
      Kmq.StageHost.start_link(
        producer: {OffBroadway.Kmq.Producer, options(b, id) ++ [tracker: :external]},
        handler: count,
        concurrency: 4,
        max_demand: demand
      )

    result = wait.()
    Kmq.StageHost.stop(host)
    result
  end

  defp broadway(b, demand, producer) do
    {:ok, _} = Application.ensure_all_started(:broadway)
    {count, wait} = counter(b)
    :persistent_term.put({__MODULE__, :count}, count)

    {:ok, pid} =
      apply(Broadway, :start_link, [
        Bench.Pipeline,
        [
          name: Bench.Pipeline,
          producer: [module: producer, concurrency: 1],
          processors: [default: [concurrency: 4, max_demand: demand]]
        ]
      ])

    result = wait.()
    apply(Broadway, :stop, [pid])
    result
  end

  defp group(b, id), do: "#{b.topic}-#{id}"

  defp options(b, id) do
    [
      hosts: b.bootstrap,
      topics: [b.topic],
      group_id: group(b, id),
      marker_topic: "#{b.topic}-#{id}-m",
      create_topics: true
    ]
  end

  defp pull(b, id, extra, how) do
    config = Kmq.Config.new!(options(b, id) ++ extra, :producer)
    config = if how == :no_markers, do: %{config | delivery: :no_markers}, else: config
    {:ok, handle} = Kmq.Handle.open(config, {:bench, id})
    :ok = Kmq.Handle.attach(handle, self())
    result = loop(handle, how == :acks, b, 0, nil)
    :ok = Kmq.Handle.close(handle, 30_000)
    flush_wakes()
    result
  end

  @take 2_000

  defp loop(_handle, _ack?, %{messages: n}, got, {start, from}) when got >= n,
    do: since(start, got - from)

  defp loop(handle, ack?, b, got, nil) when got >= b.warm,
    do: loop(handle, ack?, b, got, {{now_us(), cpu_ms()}, got})

  defp loop(handle, ack?, b, got, start) do
    case Kmq.Handle.take(handle, @take) do
      [] ->
        receive do
          {:kmq, _, :ready} -> loop(handle, ack?, b, got, start)
        after
          10_000 -> raise "no message for 10 s (#{got}): #{inspect(Kmq.Handle.info(handle))}"
        end

      batches ->
        count = Enum.reduce(batches, 0, fn {_, _, _, messages}, sum -> sum + length(messages) end)
        if ack?, do: :ok = :kmq_nif.consumer_settle(handle.ref, 0, batches)
        loop(handle, ack?, b, got + count, start)
    end
  end

  defp since({start, start_cpu}, n) do
    seconds = max(now_us() - start, 1) / 1.0e6
    {n / seconds, (cpu_ms() - start_cpu) * 1000 / n, rss_mb()}
  end

  # ---- the table

  defp table(results) do
    rows =
      for {name, title, _, target, of} <- @lines, results[source(name)] do
        name = source(name)
        rates = Enum.map(results[name], &elem(&1, 0))
        rate = median(results[name], 0)
        base = results["alone"] && median(results["alone"], 0)

        "| #{title} | #{thousands(rate)} (#{thousands(Enum.min(rates))} - #{thousands(Enum.max(rates))}) | " <>
          "#{float(median(results[name], 1))} | #{round(median(results[name], 2))} | #{float(rate / base)} | #{target(target, of, rate, results)} |"
      end

    """
    | line | msg/s, median (spread) | CPU us per message | memory MB | of the first line | target |
    |---|---|---|---|---|---|
    #{Enum.join(rows, "\n")}
    """
  end

  # One measurement, two targets.
  defp source("range-share"), do: "range"
  defp source(name), do: name

  defp target(nil, _, _, _), do: "-"

  defp target(target, of, rate, results) do
    case results[of] do
      nil -> "#{float(target)} of #{of}, which was not run"
      base -> "#{float(rate / median(base, 0))} of #{of}, wanted #{float(target)}"
    end
  end

  defp floors(results) do
    bad =
      for {name, of, floor} <- @floors,
          ratio = median(results[name], 0) / median(results[of], 0),
          ratio < floor,
          do: "#{name} is at #{float(ratio)} of #{of}, the floor is #{float(floor)}"

    if bad == [] do
      IO.puts(
        "above the floors: " <>
          Enum.map_join(@floors, ", ", fn {name, of, f} -> "#{name} #{float(f)} of #{of}" end)
      )
    else
      Enum.each(bad, &IO.puts(:stderr, "bench-quick: " <> &1))
      System.halt(1)
    end
  end

  defp median(list, index), do: list |> Enum.map(&elem(&1, index)) |> median()
end

defmodule Bench.Pipeline do
  @moduledoc false
  # Broadway's callbacks; it need not be there to compile this.
  def handle_message(_processor, message, _context) do
    :persistent_term.get({Bench, :count}).(message)
  end

  def process_name({:via, _, _} = name, _base), do: name
  def process_name(name, base), do: :"#{name}.#{base}"
end

defmodule Bench.Memory do
  @moduledoc false
  # A producer that has what is asked for at once: what Broadway itself costs.
  def init({value}) do
    template = apply(Broadway.Message, :__struct__, [])
    ack = apply(Broadway.NoopAcknowledger, :init, [])
    {:producer, %{template | data: value, acknowledger: ack}}
  end

  def handle_demand(demand, message), do: {:noreply, List.duplicate(message, demand), message}
  def handle_info(_, state), do: {:noreply, [], state}
  def terminate(_, _), do: :ok
end

Bench.main(System.argv())
