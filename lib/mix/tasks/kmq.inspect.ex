defmodule Mix.Tasks.Kmq.Inspect do
  @shortdoc "What of a queue is open, by partition"
  @moduledoc """
  Shows of each partition of a queue: what is not handed out yet, what is open, since when, and when something is due.

      mix kmq.inspect --topic orders --group shop

  | column | |
  |---|---|
  | LAG | messages behind the group's commit: not handed out yet |
  | OPEN | handed out or waiting (for a retry, for their time) and not settled |
  | PARKED | of these, delayed messages |
  | OLDEST | the lowest open offset, and for how long its marker is there |
  | NEXT DUE | when the first of them is due, if nothing happens before |
  | MARKERS | markers a tracker reads after a restart |

  It reads them as well, as one that belongs to no group: it disturbs nobody. A million takes some seconds; what takes longer than one says
  on standard error how far it is.

    * `--topic` - the queue topic; several times for several. It may stand there without `--topic`
    * `--group` - the consumer group
    * `--hosts` - brokers to ask first (`localhost:9092`)
    * `--options` - a file with a keyword list of further options of the pipeline
    * `--json` - all numbers as JSON, times in ms since 1970

  The exit code is 0, 1 when the cluster cannot be asked, 2 for wrong arguments.
  """
  use Mix.Task

  import Kmq.CommandLine

  @impl true
  def run(args) do
    switches = [topic: :keep, group: :string]
    run(args, @moduledoc, switches, &show/3, topics: "--topic", group_id: "--group")
  end

  defp show(topics, options, connection) do
    pipeline = Keyword.merge(connection, queue(options, topics))
    since = System.monotonic_time(:millisecond)

    # Whoever has waited for a second is told for what.
    progress = fn topic, partition, read, of ->
      if System.monotonic_time(:millisecond) - since > 1_000,
        do: IO.puts(:stderr, "#{topic}, partition #{partition}: #{read} of #{of} markers read")
    end

    with {:ok, partitions} <- Kmq.Inspect.partitions(pipeline, progress) do
      put(%{partitions: partitions}, options, fn _ -> plain(partitions) end)
    end
  end

  defp plain(partitions) do
    now = System.os_time(:millisecond)
    heads = ["TOPIC", "PARTITION", "LAG", "OPEN", "PARKED", "OLDEST", "NEXT DUE", "MARKERS"]

    rows =
      for p <- partitions do
        oldest = p.oldest && "#{p.oldest}#{age(now, p.oldest_since_ms)}"
        due = p.next_due_ms && "in #{seconds(p.next_due_ms - now)}"
        [p.topic, p.partition, p.lag, p.open, p.parked, oldest, due, p.markers]
      end

    table([heads | rows])
  end

  defp age(_now, nil), do: ""
  defp age(now, since), do: " (#{seconds(now - since)})"
end
