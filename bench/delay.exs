# make bench-delay: how late delayed messages are when thousands of them are due in each second, scattered over all that wait.
#
#   make bench-delay ARGS="--parked 150000 --rate 10000 --partitions 4 --bytes 100 --save"
#
#   --kafka HOST:PORT  a cluster that runs (make: KAFKA=); else the broker of the tests is started
#   --parked N         messages that wait at first     --rate N    of them are due in a second, each at random
#   --partitions N, --bytes N
#
# "in the queue": the broker's time of the copy minus the time it was due. "handed out": by this machine's clock, to a pull consumer that does
# nothing but acknowledge. The first second is not counted. Half a minute.

Code.require_file("support.exs", __DIR__)

defmodule Bench.Delay do
  @moduledoc false
  import Bench.Support

  # to publish and park all of them before the first is due
  @lead_ms 15_000
  @warm_up_ms 1_000

  def main(args) do
    options =
      options!(args,
        kafka: :string,
        parked: :integer,
        rate: :integer,
        partitions: :integer,
        bytes: :integer,
        save: :boolean
      )

    b = %{
      parked: options[:parked] || 150_000,
      rate: options[:rate] || 10_000,
      partitions: options[:partitions] || 4,
      bytes: options[:bytes] || 100
    }

    with_kafka(options[:kafka], fn hosts ->
      head =
        head(
          "#{b.parked} messages of #{b.bytes} bytes wait in #{b.partitions} partitions, #{b.rate} are due in a second"
        )

      IO.puts(head)
      text = b |> Map.put(:hosts, hosts) |> run() |> table()
      IO.puts(text)
      if options[:save], do: save("delay", "Delayed messages", head, text)
    end)
  end

  defp run(b) do
    topic = "delay-#{System.system_time(:millisecond)}"

    :ok =
      Kmq.Topics.create_topic(topic, b.partitions,
        hosts: b.hosts,
        config: [{"message.timestamp.type", "LogAppendTime"}]
      )

    {:ok, publisher} = Kmq.Publisher.start_link(hosts: b.hosts)

    {:ok, consumer} =
      Kmq.Consumer.start_link(
        hosts: b.hosts,
        topics: [topic],
        group_id: topic,
        marker_topic: topic <> "-m",
        create_topics: true
      )

    puller = Task.async(fn -> pull(consumer, b.parked, []) end)
    began = System.os_time(:millisecond) + @lead_ms
    value = String.duplicate("x", b.bytes)
    window = div(b.parked * 1_000, b.rate)

    for part <- Enum.chunk_every(1..b.parked, 20_000) do
      messages =
        for _ <- part do
          due = DateTime.from_unix!(began + :rand.uniform(window), :millisecond)
          {topic, value, at: due}
        end

      {:ok, _} = Kmq.Publisher.publish_many(publisher, messages, timeout: 60_000)
    end

    spare = began - System.os_time(:millisecond)
    note("published #{spare} ms before the first is due")
    # what is due when it is published is not delayed at all
    if spare < 0, do: raise("too slow to publish #{b.parked} messages in #{@lead_ms} ms")
    wait_for("the first", 60, fn -> System.os_time(:millisecond) > began + @warm_up_ms end)
    pid = port_program("kmq_tracker")
    {cpu, _} = process(pid)
    at = System.os_time(:millisecond)

    wait_for("the last second", 600, fn -> System.os_time(:millisecond) > began + window - 500 end)

    core = (elem(process(pid), 0) - cpu) * 1_000 / (System.os_time(:millisecond) - at)
    rss = rss_mb(pid)
    got = Task.await(puller, 120_000)
    {:ok, info} = tracker_info()
    Kmq.Consumer.stop(consumer)
    Kmq.Publisher.close(publisher)

    counted = for {due, _, _} = one <- got, due > began + @warm_up_ms, do: one

    %{
      queue: sorted(for {due, ts, _} <- counted, do: ts - due),
      out: sorted(for {due, _, now} <- counted, do: now - due),
      n: length(counted),
      core: core,
      rss: rss,
      ahead: info[:read_ahead]
    }
  end

  defp tracker_info do
    [{_, tracker, _, _}] = DynamicSupervisor.which_children(Kmq.TrackerSupervisor)
    Kmq.Tracker.info(tracker)
  end

  # [{due, the copy's time, when it came}]
  defp pull(_consumer, 0, got), do: got

  defp pull(consumer, left, got) do
    messages = Kmq.Consumer.pull(consumer, max: 2_000, wait: 60_000)
    now = System.os_time(:millisecond)
    if messages == [], do: raise("#{left} messages do not come")
    :ok = Kmq.ack(messages)

    got =
      Enum.reduce(messages, got, fn message, got ->
        {_, due} = List.keyfind(message.headers, "kmq-due", 0)
        [{String.to_integer(due), message.ts, now} | got]
      end)

    pull(consumer, left - length(messages), got)
  end

  defp sorted(list), do: list |> Enum.sort() |> List.to_tuple()

  defp table(r) do
    line = fn name, lates ->
      [least, p50, p95, p99, most] = for p <- [0, 50, 95, 99, 100], do: percentile(lates, p)

      "| #{name} | #{least} | #{p50} | #{p95} | #{p99} | #{most} |\n"
    end

    "| late, ms | least | p50 | p95 | p99 | most |\n|---|---|---|---|---|---|\n" <>
      line.("in the queue", r.queue) <>
      line.("handed out", r.out) <>
      "\n#{r.n} counted; the tracker: #{float(r.core)} of a core, #{round(r.rss)} MB, read ahead #{inspect(r.ahead)}\n"
  end
end

Bench.Delay.main(System.argv())
