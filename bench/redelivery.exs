# make bench-redelivery: how fast the tracker redelivers, one way and the other, on real Kafka on the same machine.
#
#   make bench-redelivery ARGS="--messages 400000 --partitions 8 --bytes 100 --runs 1"     --kafka HOST:PORT (make: KAFKA=)
#
# Throughput: all are due when the tracker starts; from its first report of copies to the last message. Latency: one message at a time, on
# an idle topic, as the tracker reports it (deadline to acknowledged copy, or to commit).

Code.require_file("support.exs", __DIR__)

defmodule Bench.Redelivery do
  @moduledoc false
  import Bench.Support
  import Bitwise

  @ways [:idempotent, :transactional]

  def main(args) do
    options =
      options!(args,
        kafka: :string,
        messages: :integer,
        partitions: :integer,
        bytes: :integer,
        runs: :integer
      )

    with_kafka(options[:kafka], fn bootstrap ->
      b = %{
        hosts: bootstrap,
        messages: options[:messages] || 400_000,
        partitions: options[:partitions] || 8,
        bytes: options[:bytes] || 100
      }

      results =
        for run <- 1..(options[:runs] || 1), way <- @ways do
          rate = throughput(b, way, run)
          {median, most} = latency(b, way, run)
          note("run #{run}, #{way}: #{round(rate)} msg/s, #{median} / #{most} ms")
          {way, {rate, median, most}}
        end

      table(b, results)
    end)
  end

  defp throughput(b, way, run) do
    {topic, options} = queue(b, b.messages, way, "t#{run}")
    per = div(b.messages, b.partitions)

    starts =
      for p <- 0..(b.partitions - 1),
          first <- 0..(per - 1)//1_000,
          do: start(topic, options, p, first, min(1_000, per - first), 0)

    write(b, options, starts)
    {:ok, tracker} = Kmq.Tracker.start_link(options)
    {first, last, n, before} = count(per * b.partitions, nil)
    :ok = Kmq.Tracker.stop(tracker)
    (n - before) / max(last - first, 1) * 1000
  end

  # The first report's messages are those before the clock.
  defp count(want, nil) do
    receive do
      {:redelivered, n, at} -> count(want, {at, at, n, n})
    after
      60_000 -> raise "nothing is redelivered"
    end
  end

  defp count(want, {_, _, n, _} = result) when n >= want, do: result

  defp count(want, {first, last, n, before}) do
    receive do
      {:redelivered, more, at} -> count(want, {first, at, n + more, before})
    after
      60_000 -> raise "#{n} of #{want} after #{last - first} ms"
    end
  end

  @singles 40

  defp latency(b, way, run) do
    {topic, options} = queue(%{b | partitions: 1}, @singles, way, "l#{run}")
    {:ok, tracker} = Kmq.Tracker.start_link(options)
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.hosts, compression: :none)

    late =
      for i <- 0..(@singles - 1) do
        {value, place} = start(topic, options, 0, i, 1, 700)
        {:ok, _} = Kmq.Publisher.publish(publisher, options[:marker_topic], value, place)

        receive do
          {:late, ms} -> ms
        after
          30_000 -> raise "number #{i} is not redelivered: #{inspect(Kmq.Tracker.info(tracker))}"
        end
      end

    :ok = Kmq.Publisher.close(publisher)
    :ok = Kmq.Tracker.stop(tracker)
    flush()
    # the first makes connections
    [_ | late] = late
    {median(late), Enum.max(late)}
  end

  defp flush do
    receive do
      {what, _} when what == :late -> flush()
      {:redelivered, _, _} -> flush()
    after
      0 -> :ok
    end
  end

  # A queue of n messages, all below the group's commit; its options.
  defp queue(b, n, way, name) do
    topic = "redelivery-#{name}-#{way}-#{System.system_time(:millisecond)}"
    :ok = Kmq.Topics.create_topic(topic, b.partitions, hosts: b.hosts)

    options = [
      hosts: b.hosts,
      topics: [topic],
      group_id: topic,
      marker_topic: topic <> "-m",
      create_topics: true,
      redelivery: way,
      redelivery_rate: 1_000_000,
      backoff: [0]
    ]

    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :tracker))
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.hosts)
    value = String.duplicate("x", b.bytes)

    for chunk <- Enum.chunk_every(0..(n - 1), 20_000) do
      {:ok, _} =
        Kmq.Publisher.publish_many(
          publisher,
          for(i <- chunk, do: {topic, value, partition: rem(i, b.partitions)}),
          timeout: 60_000
        )
    end

    :ok = Kmq.Publisher.close(publisher)

    {:ok, admin} = :kmq_nif.admin_open([{"bootstrap.servers", b.hosts}, {"group.id", topic}])

    for p <- 0..(b.partitions - 1) do
      {:ok, {_, high}} = :kmq_nif.admin_watermarks(admin, topic, p, 10_000)
      :ok = :kmq_nif.admin_commit(admin, topic, p, high, 10_000)
    end

    :kmq_nif.admin_close(admin)
    :persistent_term.put(__MODULE__, self())
    Kmq.Telemetry.put_backend(__MODULE__)
    {topic, options}
  end

  @doc false
  def execute([:kmq, :redelivered], measured, _) do
    to = :persistent_term.get(__MODULE__)
    send(to, {:redelivered, measured.count, System.monotonic_time(:millisecond)})
    if measured.count == 1, do: send(to, {:late, measured.late_max_ms})
    :ok
  end

  def execute(_event, _measured, _meta), do: :ok

  # A START as guides/format.md has it.
  defp start(topic, options, partition, first, count, lease_ms) do
    crc = :erlang.crc32([topic, 0, options[:group_id]])
    set = uvar(first) <> <<0>> <> uvar(1) <> uvar(0) <> uvar(count)

    {<<0, 0x4B, 1, 1, crc::32>> <> set <> uvar(lease_ms),
     key: <<partition::32, -1::64>>, partition: partition}
  end

  defp uvar(n) when n < 0x80, do: <<n>>
  defp uvar(n), do: <<bor(band(n, 0x7F), 0x80)>> <> uvar(n >>> 7)

  defp write(b, options, records) do
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.hosts, compression: :none)

    {:ok, _} =
      Kmq.Publisher.publish_many(
        publisher,
        for({value, place} <- records, do: {options[:marker_topic], value, place}),
        timeout: 60_000
      )

    :ok = Kmq.Publisher.close(publisher)
  end

  defp table(b, results) do
    IO.puts(head("#{b.messages} messages of #{b.bytes} bytes in #{b.partitions} partitions"))

    IO.puts(
      "| redelivery | msg/s, best of the runs | late, median ms | late, most ms | target msg/s |"
    )

    IO.puts("|---|---|---|---|---|")
    by = Enum.group_by(results, &elem(&1, 0), &elem(&1, 1))

    for {way, target} <- [idempotent: 50_000, transactional: 20_000] do
      {rate, median, most} = Enum.max(by[way])
      IO.puts("| #{way} | #{round(rate)} | #{median} | #{most} | #{target} |")
    end
  end
end

Bench.Redelivery.main(System.argv())
