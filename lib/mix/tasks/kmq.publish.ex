defmodule Mix.Tasks.Kmq.Publish do
  @shortdoc "Publishes messages from the command line"
  @moduledoc """
  Publishes a value, or each line of standard input as a value of its own, and waits until they are durable.

      mix kmq.publish orders "two pounds of flour" --key 42
      mix kmq.publish orders --delay 60000 --tag vip < orders.txt

    * `--key`, `--partition` - of all of them
    * `--header NAME=VALUE`, `--tag TAG` - may be given several times
    * `--routing-key`, `--delay` (ms), `--at` (ISO 8601), `--ttl` (ms) - as `Kmq.Publisher.publish/4`
    * `--hosts` - brokers to ask first (`localhost:9092`)
    * `--options` - a file with a keyword list of further options of the publisher
    * `--json` - the result as JSON

  The exit code is 0 when all are durable, 1 when not, 2 for wrong arguments.
  """
  use Mix.Task

  import Kmq.CommandLine
  alias Kmq.Publisher

  @switches [
    key: :string,
    partition: :integer,
    header: :keep,
    tag: :keep,
    routing_key: :string,
    delay: :integer,
    at: :string,
    ttl: :integer
  ]

  # Lines that are published together.
  @together 500

  @impl true
  def run(args),
    do: run(args, @moduledoc, @switches, &publish/3, headers: "--header", tags: "--tag")

  defp publish([topic], options, connection) do
    values = :stdio |> IO.stream(:line) |> Stream.map(&String.trim_trailing(&1, "\n"))
    publish(topic, values, options, connection)
  end

  defp publish([topic, value], options, connection),
    do: publish(topic, [value], options, connection)

  defp publish(_words, _options, _connection),
    do: {:usage, "expected a topic, and one value at most"}

  defp publish(topic, values, options, connection) do
    message = message(options)

    with {:ok, publisher} <- Publisher.start_link(connection),
         {:ok, n, last} <- all(publisher, topic, values, message),
         :ok <- Publisher.close(publisher) do
      put(Map.merge(%{published: n}, last || %{}), options, fn _ ->
        if n == 1,
          do: "#{topic}, partition #{last.partition}, offset #{last.offset}",
          else: "#{n} messages"
      end)
    end
  end

  defp all(publisher, topic, values, options) do
    values
    |> Stream.chunk_every(@together)
    |> Enum.reduce_while({:ok, 0, nil}, fn values, {:ok, n, _last} ->
      case Publisher.publish_many(publisher, for(value <- values, do: {topic, value, options})) do
        {:ok, places} -> {:cont, {:ok, n + length(places), List.last(places)}}
        {:error, [_ | _] = results} -> {:halt, Enum.find(results, &match?({:error, _}, &1))}
        {:error, error} -> {:halt, {:error, error}}
      end
    end)
  end

  defp message(options) do
    tags = Keyword.get_values(options, :tag)
    headers = for text <- Keyword.get_values(options, :header), do: header(text)

    [headers: headers] ++
      if(tags == [], do: [], else: [tags: tags]) ++
      if(options[:at], do: [at: at(:at, options[:at])], else: []) ++
      Keyword.take(options, [:key, :partition, :routing_key, :delay, :ttl])
  end
end
