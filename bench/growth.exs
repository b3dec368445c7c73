# make bench-growth: does a message cost more when there is more of everything? Partitions, open messages, bytes, demand; and, with it, how long
# calls hold a scheduler, and whether memory grows.
#
#   make bench-growth ARGS="--only partitions,bytes --runs 1 --save"     --kafka HOST:PORT (make: KAFKA=)
#
#   partitions   1 to 64: 400,000 messages of 100 bytes, pulled and acknowledged under range markers, beside librdkafka alone
#   open         1 to 100,000 open messages, of the 200,000 taken first, renewed each second: what the next 400,000 cost
#   bytes        10 B to 100 kB, 200 MB or 400,000 messages, beside librdkafka alone
#   demand       the stage host with max_demand 1 to 1,000
#   memory       30 s at 20,000 messages of 1 kB a second, one in 100 fails once: the VM's and the tracker's memory
#   schedulers   how long one call holds a normal scheduler at most. Only the tests' build counts that: `make bench-growth` runs it in one,
#                whatever --only says
#
# CPU is that of the whole VM, librdkafka's threads included. 3 to 4 minutes and one more for the schedulers. _build/bench/growth.csv:
# what, size, msg/s, us, librdkafka alone's us.

Code.require_file("support.exs", __DIR__)

defmodule Bench.Growth do
  @moduledoc false
  import Bench.Support

  @parts ["partitions", "open", "bytes", "demand", "memory"]

  def main(args) do
    options = options!(args, kafka: :string, only: :string, runs: :integer, save: :boolean)
    only = if options[:only], do: String.split(options[:only], ","), else: @parts

    with_kafka(options[:kafka], fn hosts ->
      b = %{hosts: hosts, runs: options[:runs] || 1, save: options[:save] || false}
      if "schedulers" in only, do: schedulers(b)
      growing = Enum.filter(@parts -- ["memory"], &(&1 in only))
      if growing != [], do: growth(b, growing)
      if "memory" in only, do: memory(b)
    end)
  end

  # ---- growth

  defp growth(b, parts) do
    head = head("100-byte messages in 8 partitions, where nothing else is said, #{b.runs} runs")

    IO.puts(head)
    note("warming up ...")
    topic = filled(b, "warm", 8, 200_000, 100)
    pulled(b, topic, 200_000)

    results =
      for part <- parts do
        {title, cases} = cases(part, b)

        rows =
          for _ <- 1..b.runs, {size, measure} <- cases do
            {rate, cpu, alone} = result = measure.()

            note(
              "#{part} #{thousands(size)}: #{thousands(rate)} msg/s, #{float(cpu)} us" <>
                if(alone, do: " (alone #{float(alone)})", else: "")
            )

            {size, result}
          end

        {part, title, middle(rows)}
      end

    write_csv(
      "growth.csv",
      "what,size,msg/s,us,alone us",
      for(
        {part, _, rows} <- results,
        {size, {rate, cpu, alone}} <- rows,
        do: [part, size, round(rate), float(cpu, 3), alone && float(alone, 3)]
      )
    )

    text = Enum.map_join(results, "\n", fn {_, title, rows} -> growth_table(title, rows) end)
    IO.puts(text)
    if b.save, do: save("growth", "Growth", head, text)
  end

  defp middle(rows) do
    by = Enum.group_by(rows, &elem(&1, 0), &elem(&1, 1))

    for {size, results} <- Enum.sort(by) do
      of = fn i -> results |> Enum.map(&elem(&1, i)) |> median() end
      {size, {of.(0), of.(1), of.(2)}}
    end
  end

  defp growth_table(title, rows) do
    [{_, {_, first, _}} | _] = rows

    lines =
      for {size, {rate, cpu, alone}} <- rows do
        beside = if alone, do: "#{float(alone)} | #{float(cpu / alone)}", else: "- | -"

        "| #{thousands(size)} | #{thousands(rate)} | #{float(cpu)} | #{float(cpu / first)} | #{beside} |"
      end

    """
    | #{title} | msg/s | CPU us per message | of the first row | librdkafka alone, CPU us | ours by alone |
    |---|---|---|---|---|---|
    #{Enum.join(lines, "\n")}
    """
  end

  @messages 400_000
  @held_of 200_000

  defp cases("partitions", b) do
    {"partitions",
     for n <- [1, 2, 4, 8, 16, 32, 64] do
       {n, fn -> beside(b, filled(b, "p#{n}", n, @messages, 100), @messages) end}
     end}
  end

  defp cases("open", b) do
    topic = filled(b, "open", 8, @messages + @held_of, 100)

    {"open messages",
     for n <- [1, 10, 100, 1_000, 10_000, 100_000] do
       {n, fn -> b |> pulled(topic, @messages, n) |> Tuple.append(nil) end}
     end}
  end

  defp cases("bytes", b) do
    {"bytes",
     for bytes <- [10, 100, 1_000, 10_000, 100_000] do
       n = min(@messages, div(200_000_000, bytes))
       {bytes, fn -> beside(b, filled(b, "b#{bytes}", 8, n, bytes), n) end}
     end}
  end

  defp cases("demand", b) do
    topic = filled(b, "demand", 8, @messages, 100)

    {"max_demand, stage host",
     for {demand, n} <- [{1, 50_000}, {10, 200_000}, {100, @messages}, {1_000, @messages}] do
       {demand, fn -> b |> staged(topic, n, demand) |> Tuple.append(nil) end}
     end}
  end

  defp filled(b, name, partitions, n, bytes) do
    topic =
      "growth-#{name}-#{System.unique_integer([:positive])}-#{System.system_time(:millisecond)}"

    :ok = Kmq.Topics.create_topic(topic, partitions, hosts: b.hosts)
    ["produce", b.hosts, topic, partitions, n, bytes] |> spawn_alone() |> wait_result(120)
    topic
  end

  defp beside(b, topic, n) do
    {_, alone} =
      ["consume", b.hosts, topic, topic <> "-alone", n, 0] |> spawn_alone() |> wait_result(120)

    b |> pulled(topic, n) |> Tuple.append(alone)
  end

  # ---- a pull loop

  @take 2_000

  # What n messages cost when `open` others are held: {messages a second, CPU us per message}
  defp pulled(b, topic, n, open \\ 0) do
    group = "#{topic}-#{System.unique_integer([:positive])}"

    config =
      Kmq.Config.new!(
        [
          hosts: b.hosts,
          topics: [topic],
          group_id: group,
          marker_topic: group <> "-m",
          create_topics: true,
          lease: 3_000,
          # the end of a backlog may wait for it, see NOTES.md
          fetch_config: [max_wait_time: 100],
          tracker: :external
        ],
        :producer
      )

    {:ok, handle} = Kmq.Handle.open(config, {:growth, group})
    :ok = Kmq.Handle.attach(handle, self())
    hold(handle, open, 0)
    result = loop(handle, n, 0, nil)
    :ok = Kmq.Handle.close(handle, 30_000)
    flush_wakes()
    result
  end

  # Of the 200,000 messages taken first every so manieth is held.
  defp hold(_handle, 0, _), do: :ok
  defp hold(_handle, _, done) when done >= @held_of, do: :ok

  defp hold(handle, open, done) do
    every = div(@held_of, open)

    tokens =
      for {slot, _, _, records} <- take(handle, min(@take, @held_of - done)),
          record <- records,
          do: {slot, elem(record, 0)}

    settled =
      for {token, i} <- Enum.with_index(tokens, done), rem(i, every) != every - 1, do: token

    :ok = :kmq_nif.consumer_settle(handle.ref, 0, settled)
    hold(handle, open, done + length(tokens))
  end

  defp loop(_handle, n, got, start) when got >= n, do: since(start, got)

  defp loop(handle, n, got, start) do
    batches = take(handle, @take)
    start = start || {now_us(), cpu_ms()}
    count = Enum.reduce(batches, 0, fn {_, _, _, messages}, sum -> sum + length(messages) end)
    :ok = :kmq_nif.consumer_settle(handle.ref, 0, batches)
    loop(handle, n, got + count, start)
  end

  defp take(handle, max) do
    case Kmq.Handle.take(handle, max) do
      [] ->
        receive do
          {:kmq, _, :ready} -> take(handle, max)
        after
          30_000 -> raise "no message for 30 s: #{inspect(Kmq.Handle.info(handle))}"
        end

      batches ->
        batches
    end
  end

  defp since({start, cpu}, n) do
    {n / (max(now_us() - start, 1) / 1.0e6), (cpu_ms() - cpu) * 1000 / n}
  end

  # ---- the stage host

  defp staged(b, topic, n, demand) do
    count = :counters.new(1, [:write_concurrency])
    start = :atomics.new(3, [])

    handler = fn message ->
      if :counters.get(count, 1) == 0 and :atomics.compare_exchange(start, 3, 0, 1) == :ok do
        :atomics.put(start, 1, now_us() - origin())
        :atomics.put(start, 2, cpu_ms())
      end

      :counters.add(count, 1, 1)
      message
    end

    origin()
    host = host(b, topic, handler, demand, tracker: :external)
    wait_for("#{n} messages", 120, fn -> :counters.get(count, 1) >= n end)

    result =
      since({:atomics.get(start, 1) + origin(), :atomics.get(start, 2)}, :counters.get(count, 1))

    Kmq.StageHost.stop(host)
    result
  end

  # Monotonic time is negative, atomics are kept small.
  defp origin do
    case :persistent_term.get(__MODULE__, nil) do
      nil ->
        :persistent_term.put(__MODULE__, now_us())
        origin()

      us ->
        us
    end
  end

  defp host(b, topic, handler, demand, extra) do
    group = "#{topic}-#{System.unique_integer([:positive])}"

    {:ok, host} =
      Kmq.StageHost.start_link(
        producer:
          {OffBroadway.Kmq.Producer,
           [
             hosts: b.hosts,
             topics: [topic],
             group_id: group,
             marker_topic: group <> "-m",
             create_topics: true
           ] ++ extra},
        handler: handler,
        concurrency: 4,
        max_demand: demand
      )

    host
  end

  # ---- memory

  @memory_s 30
  @memory_rate 20_000

  defp memory(b) do
    head =
      head("#{@memory_rate} messages of 1 kB a second for #{@memory_s} s, one in 100 fails once")

    IO.puts(head)
    topic = "growth-memory-#{System.system_time(:millisecond)}"
    :ok = Kmq.Topics.create_topic(topic, 8, hosts: b.hosts)
    count = :counters.new(1, [:write_concurrency])

    handler = fn message ->
      :counters.add(count, 1, 1)

      if message.metadata.attempt == 1 and rem(message.metadata.offset, 100) == 0,
        do: Map.put(message, :status, {:failed, {:retry, 500}}),
        else: message
    end

    host = host(b, topic, handler, 100, [])
    tracker = wait_for("a tracker", 60, fn -> port_program("kmq_tracker") end)
    n = @memory_rate * (@memory_s + 5)
    sender = spawn_alone(["rate", b.hosts, topic, 8, n, 1_000, @memory_rate, 1])
    # queues and heaps have their size after some seconds
    receive(after: (5_000 -> :ok))
    samples = for at <- 0..@memory_s//6, do: sample(at, tracker, count)
    wait_result(sender, 60)
    wait_for("the last message", 60, fn -> :counters.get(count, 1) >= n end)
    Kmq.StageHost.stop(host)
    write_csv("memory.csv", "seconds,messages,VM MB,BEAM MB,tracker MB", samples)
    text = memory_table(samples)
    IO.puts(text)
    if b.save, do: save("memory", "Memory", head, text)
  end

  defp sample(at, tracker, count) do
    if at > 0, do: receive(after: (6_000 -> :ok))

    row = [
      at,
      :counters.get(count, 1),
      round(rss_mb()),
      round(:erlang.memory(:total) / 1_048_576),
      float(rss_mb(tracker), 1)
    ]

    note(
      "#{at} s: #{Enum.join(tl(row), ", ")} (messages; MB of the VM, of these BEAM's own, of the tracker)"
    )

    row
  end

  defp memory_table(samples) do
    lines =
      for [at, n, vm, beam, tracker] <- samples,
          do: "| #{at} | #{thousands(n)} | #{vm} | #{beam} | #{tracker} |"

    """
    | seconds | messages | VM, resident MB | of these BEAM's own | tracker, resident MB |
    |---|---|---|---|---|
    #{Enum.join(lines, "\n")}
    """
  end

  # ---- schedulers

  defp schedulers(b) do
    if :kmq_nif.busy() == [], do: raise("this build does not measure: MIX_ENV=test does")

    head =
      head(
        "longest calls by processor time; schedules of 1 ms and more by the VM's own clock, which a busy machine stretches"
      )

    IO.puts(head)
    small = filled(b, "s100", 8, @messages, 100)
    large = filled(b, "s100k", 8, 3_000, 100_000)

    rows = [
      watched("100 bytes, pulled and acknowledged, range", fn -> pulled(b, small, @messages) end),
      watched("100 kB, pulled and acknowledged", fn -> pulled(b, large, 3_000) end),
      watched("100 kB, stage host, max_demand 10", fn -> staged(b, large, 3_000, 10) end),
      watched("100 bytes, stage host, max_demand 1,000", fn ->
        staged(b, small, 200_000, 1_000)
      end),
      watched("1,000 acks at once, in no order", fn -> shuffled_acks(b, small, 100_000) end),
      watched("publish_many of 5,000", fn -> published(b, small, 200_000) end)
    ]

    text = """
    | load | calls | longest call, us | which | calls over 1 ms | schedules of 1 ms and more |
    |---|---|---|---|---|---|
    #{Enum.join(rows, "\n")}
    """

    IO.puts(text)
    if b.save, do: save("schedulers", "Schedulers", head, text)
  end

  defp watched(title, work) do
    :kmq_nif.busy()
    long = :counters.new(1, [])
    watcher = spawn_link(fn -> count_long(long) end)
    :erlang.system_monitor(watcher, [{:long_schedule, 1}])
    work.()
    :erlang.system_monitor(:undefined)
    busy = :kmq_nif.busy()
    {name, _, longest, _} = Enum.max_by(busy, &elem(&1, 2))
    [calls, over] = for i <- [1, 3], do: busy |> Enum.map(&elem(&1, i)) |> Enum.sum()
    note("#{title}: longest #{longest} us (#{name}), #{over} of #{calls} calls over 1 ms")

    "| #{title} | #{thousands(calls)} | #{longest} | #{name} | #{over} | #{:counters.get(long, 1)} |"
  end

  defp count_long(counter) do
    receive do
      {:monitor, _pid, :long_schedule, _info} ->
        :counters.add(counter, 1, 1)
        count_long(counter)
    end
  end

  # All are taken before the first is acknowledged: the holes are everywhere.
  defp shuffled_acks(b, topic, n) do
    group = "#{topic}-#{System.unique_integer([:positive])}"

    {:ok, consumer} =
      Kmq.Consumer.start_link(
        hosts: b.hosts,
        topics: [topic],
        group_id: group,
        create_topics: true,
        marker_topic: group <> "-m",
        tracker: :external
      )

    messages = pull_all(consumer, n, [])
    for list <- messages |> Enum.shuffle() |> Enum.chunk_every(1_000), do: :ok = Kmq.ack(list)
    :ok = Kmq.Consumer.flush(consumer, 30_000)
    Kmq.Consumer.stop(consumer)
  end

  defp pull_all(_consumer, n, acc) when n <= 0, do: acc

  defp pull_all(consumer, n, acc) do
    messages = Kmq.Consumer.pull(consumer, max: 1_000, wait: 30_000)
    if messages == [], do: raise("no message for 30 s")
    pull_all(consumer, n - length(messages), messages ++ acc)
  end

  defp published(b, topic, n) do
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.hosts)
    batch = for i <- 1..5_000, do: {topic, "value #{i}", partition: rem(i, 8)}
    for _ <- 1..div(n, 5_000), do: {:ok, _} = Kmq.Publisher.publish_many(publisher, batch)
    Kmq.Publisher.close(publisher)
  end
end

Bench.Growth.main(System.argv())
