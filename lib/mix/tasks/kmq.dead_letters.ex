defmodule Mix.Tasks.Kmq.DeadLetters do
  @shortdoc "Lists dead letters, shows one, sends them back"
  @moduledoc """
  Looks at the dead letters of a queue topic, and sends them back.

      mix kmq.dead_letters list orders --cause timeout
      mix kmq.dead_letters show orders 3 17
      mix kmq.dead_letters redrive orders --cause timeout --rate 100
      mix kmq.dead_letters redrive orders --dry-run

  `show` takes partition and offset of the dead letter topic. `redrive` is `Kmq.DeadLetters.redrive/2`: it goes on where it
  was interrupted, and says how far it is.

  Which ones (all conditions must hold):

    * `--cause`, `--failed-group`, `--key`, `--origin` - cause, consumer group it failed in, key, topic it was published to
    * `--header NAME=VALUE` - may be given several times
    * `--attempts` - so many failed attempts
    * `--since`, `--until` - ISO 8601, `2026-12-24T18:00:00Z`

  Of `redrive`:

    * `--rate` - at most so many a second
    * `--dry-run` - counts only
    * `--to` - another topic
    * `--max` - stops after so many
    * `--position` - the consumer group that keeps the position

  Of all:

    * `--dead-letter-topic` - where it is not `<topic>__undelivered`
    * `--hosts` - brokers to ask first (`localhost:9092`)
    * `--options` - a file with a keyword list: `client_config`, `kafka_config`
    * `--json` - JSON; `list` has an object on each line

  The exit code is 0, 1 when something failed, 2 for wrong arguments.
  """
  use Mix.Task

  import Kmq.CommandLine
  alias Kmq.DeadLetters

  @switches [
    cause: :string,
    failed_group: :string,
    key: :string,
    origin: :string,
    header: :keep,
    attempts: :integer,
    since: :string,
    until: :string,
    rate: :integer,
    dry_run: :boolean,
    to: :string,
    max: :integer,
    position: :string,
    dead_letter_topic: :string
  ]

  @impl true
  def run(args),
    do:
      run(args, @moduledoc, @switches, &dead_letters/3, headers: "--header", group: "--position")

  defp dead_letters(["list", topic], options, connection) do
    letters = DeadLetters.stream(topic, where(options, connection) ++ filter(options))

    if options[:json] do
      Enum.each(letters, &IO.puts(json(map(&1))))
    else
      heads = ["PARTITION", "OFFSET", "KEY", "CAUSE", "ATTEMPTS", "DEAD SINCE", "ERROR"]

      rows =
        for l <- letters,
            do: [l.partition, l.offset, l.key, l.cause, l.attempts, time(l.ts), l.error]

      IO.puts(if(rows == [], do: none(options), else: table([heads | rows])))
    end
  end

  defp dead_letters(["show", topic, partition, offset], options, connection) do
    with {partition, ""} when partition >= 0 <- Integer.parse(partition),
         {offset, ""} when offset >= 0 <- Integer.parse(offset) do
      with {:ok, letter} <-
             DeadLetters.show(topic, partition, offset, where(options, connection)),
           do: put(map(letter), options, fn _ -> plain(letter) end)
    else
      _ -> {:usage, "expected numbers for partition and offset, got: #{partition} #{offset}"}
    end
  end

  defp dead_letters(["redrive", topic], options, connection) do
    settings =
      Keyword.take(options, [:rate, :dry_run, :to, :max]) ++
        if(options[:position], do: [group: options[:position]], else: [])

    all =
      where(options, connection) ++ filter(options) ++ settings ++ [progress: progress(options)]

    with {:ok, summary} <- DeadLetters.redrive(topic, all) do
      put(summary, options, fn s ->
        did = if options[:dry_run], do: "would go back", else: "went back"
        "#{s.redriven} #{did}, #{s.skipped} were left alone, #{s.read} of #{s.total} read"
      end)
    end
  end

  defp dead_letters(_words, _options, _connection),
    do: {:usage, "expected list TOPIC, show TOPIC PARTITION OFFSET, or redrive TOPIC"}

  defp none(options) do
    if filter(options) == [], do: "no dead letters", else: "no dead letters of this kind"
  end

  defp where(options, connection), do: connection ++ Keyword.take(options, [:dead_letter_topic])

  defp filter(options) do
    headers = for text <- Keyword.get_values(options, :header), do: header(text)

    conditions =
      Keyword.take(options, [:cause, :key, :origin, :attempts]) ++
        if(options[:failed_group], do: [group: options[:failed_group]], else: []) ++
        if(headers == [], do: [], else: [headers: headers]) ++
        for name <- [:since, :until], text = options[name], do: {name, at(name, text)}

    if conditions == [], do: [], else: [filter: conditions]
  end

  # A line now and then, on standard error: standard output is the result.
  defp progress(options) do
    Process.delete(__MODULE__)

    fn summary ->
      line = "#{summary.redriven + summary.skipped} of #{summary.total}"

      # The last one comes again at the end.
      unless options[:json] || Process.put(__MODULE__, line) == line,
        do: IO.puts(:stderr, line)
    end
  end

  defp map(letter) do
    letter
    |> Map.from_struct()
    |> Map.update!(:headers, &Enum.map(&1, fn {name, value} -> [name, value] end))
    |> Map.update!(:origin, &(&1 && Tuple.to_list(&1)))
    |> Map.update!(:pointer, &(&1 && Tuple.to_list(&1)))
  end

  defp plain(letter) do
    origin = letter.origin && letter.origin |> Tuple.to_list() |> Enum.take(3) |> Enum.join("/")

    rows =
      [
        ["topic", "#{letter.topic}/#{letter.partition}/#{letter.offset}"],
        ["dead since", time(letter.ts)],
        ["cause", letter.cause],
        ["error", letter.error],
        ["attempts", letter.attempts],
        ["deliveries", letter.deliveries],
        ["group", letter.group],
        ["origin", origin],
        ["key", letter.key]
      ] ++ for({name, value} <- letter.headers, do: ["header #{name}", value])

    [table(rows), "\n\n", printable(letter.value)]
  end

  defp time(ms), do: ms |> DateTime.from_unix!(:millisecond) |> DateTime.to_iso8601()
end
