# make bench-idle: what an idle consumer, publisher and tracker cost together: processor time and wake-ups, over 20 s.
#
#   make bench-idle ARGS="--seconds 20 --partitions 8 --save"     --kafka HOST:PORT (make: KAFKA=)
#
# First the VM alone, with the application started and nothing else; then with a pipeline (a handle, its tracker) and a publisher that have
# worked on a thousand messages each and have had nothing to do for 36 s. Wake-ups are context switches, of all threads. Under 1 % of a core is wanted.
# About a minute and a half. _build/bench/idle.csv has the same.

Code.require_file("support.exs", __DIR__)

defmodule Bench.Idle do
  @moduledoc false
  import Bench.Support

  @target_percent 1.0

  def main(args) do
    options =
      options!(args, kafka: :string, seconds: :integer, partitions: :integer, save: :boolean)

    seconds = options[:seconds] || 20
    partitions = options[:partitions] || 8

    with_kafka(options[:kafka], fn hosts ->
      head = head("#{partitions} partitions, idle for #{seconds} s")
      IO.puts(head)
      note("the VM alone, #{seconds} s ...")
      [alone] = watch([{"the VM alone, Kmq started", System.pid()}], seconds)
      {tracker, stop} = work(hosts, partitions)
      note("idle, #{seconds} s ...")

      [vm, tracker] =
        watch(
          [{"the VM with a handle and a publisher", System.pid()}, {"its tracker", tracker}],
          seconds
        )

      stop.()
      rows = [alone, vm, tracker, sum(vm, tracker)]

      write_csv(
        "idle.csv",
        "what,percent of a core,wake-ups a second,MB",
        Enum.map(rows, &Tuple.to_list/1)
      )

      text = table(rows)
      IO.puts(text)
      if options[:save], do: save("idle", "Idle", head, text)
    end)
  end

  defp work(hosts, partitions) do
    topic = "idle-#{System.system_time(:millisecond)}"
    :ok = Kmq.Topics.create_topic(topic, partitions, hosts: hosts)
    handled = :counters.new(1, [])

    {:ok, host} =
      Kmq.StageHost.start_link(
        producer:
          {OffBroadway.Kmq.Producer,
           hosts: hosts, topics: [topic], group_id: topic, create_topics: true},
        handler: fn message ->
          :counters.add(handled, 1, 1)
          message
        end
      )

    {:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts)
    messages = for i <- 1..1000, do: {topic, "#{i}", partition: rem(i, partitions)}
    {:ok, _} = Kmq.Publisher.publish_many(publisher, messages)
    wait_for("1000 messages", 60, fn -> :counters.get(handled, 1) == 1000 end)
    tracker = wait_for("a tracker", 60, fn -> port_program("kmq_tracker") end)

    # What follows the work: ENDs, commits, the tracker's reading of them, and 30 s until its helpers rest.
    receive(after: (36_000 -> :ok))

    {tracker,
     fn ->
       Kmq.Publisher.close(publisher)
       Kmq.StageHost.stop(host)
     end}
  end

  defp watch(processes, seconds) do
    before = for {_, pid} <- processes, do: process(pid)
    receive(after: (seconds * 1000 -> :ok))

    for {{title, pid}, {cpu, switches}} <- Enum.zip(processes, before) do
      {cpu_after, switches_after} = process(pid)

      {title, (cpu_after - cpu) / seconds * 100, (switches_after - switches) / seconds,
       rss_mb(pid)}
    end
  end

  defp sum({_, cpu, switches, mb}, {_, cpu2, switches2, mb2}),
    do: {"together", cpu + cpu2, switches + switches2, mb + mb2}

  defp table(rows) do
    lines =
      for {title, percent, switches, mb} <- rows do
        target =
          if title == "together",
            do:
              "under #{float(@target_percent, 1)} %: #{if percent < @target_percent, do: "kept", else: "MISSED"}",
            else: "-"

        "| #{title} | #{float(percent)} | #{round(switches)} | #{round(mb)} | #{target} |"
      end

    """
    | idle | % of a core | wake-ups a second | memory MB | target |
    |---|---|---|---|---|
    #{Enum.join(lines, "\n")}
    """
  end
end

Bench.Idle.main(System.argv())
