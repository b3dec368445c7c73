defmodule Mix.Tasks.Kmq.Topics do
  @shortdoc "Makes or checks the marker and dead letter topics of a queue"
  @moduledoc """
  Makes what is missing of a queue's topics, or says what is missing.

      mix kmq.topics create --topic orders --group shop --hosts kafka-1:9092
      mix kmq.topics check  --topic orders --group shop

    * `--topic` - the queue topic; several times for several. Without `--topic` it may stand behind `create` or `check`
    * `--group` - the consumer group
    * `--hosts` - brokers to ask first (`localhost:9092`)
    * `--options` - a file with a keyword list of further options of the pipeline (`[client_config: [ssl: true]]`)
    * `--json` - the result as JSON

  The exit code is 0 when all is there, 1 when not or when the cluster cannot be asked, 2 for wrong arguments. With `--json` a 1 has an object,
  too: `{"error":{"message":...,"reason":"topic_missing","retriable":false}}`.
  """
  use Mix.Task

  import Kmq.CommandLine

  @impl true
  def run(args) do
    switches = [topic: :keep, group: :string]
    run(args, @moduledoc, switches, &topics/3, topics: "--topic", group_id: "--group")
  end

  defp topics([what | topics], options, connection) when what in ["create", "check"] do
    pipeline = Keyword.merge(connection, queue(options, topics))

    result =
      if what == "create", do: Kmq.Topics.create(pipeline), else: Kmq.Topics.check(pipeline)

    with {:ok, partitions} <- result do
      put(%{partitions: partitions}, options, fn _ ->
        table([["TOPIC", "PARTITIONS"] | Enum.map(partitions, &Tuple.to_list/1)])
      end)
    end
  end

  defp topics(_words, _options, _connection), do: {:usage, "expected create or check"}
end
