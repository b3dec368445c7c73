defmodule Kmq.CommandLine do
  @moduledoc false
  # What the mix tasks share: arguments, plain and JSON output, exit codes. 0 = done, 1 = it failed, 2 = wrong arguments. What failed is a
  # line on standard error; with --json also an object on standard output, {"error":{"reason":...,"message":...,"retriable":...}}.

  alias Kmq.{Error, Options}

  @common [hosts: :string, options: :string, json: :boolean, help: :boolean]

  @doc """
  Parses, starts Kmq, calls `fun` with words, options and the connection, and ends the task as its result says:
  `:ok`, `{:error, %Kmq.Error{}}`, or `{:usage, text}`.

  Texts call options as they are called here; `called` are those whose name differs, `[group_id: "--group"]`.
  """
  @spec run([String.t()], String.t(), keyword, ([String.t()], keyword, keyword -> term), keyword) ::
          :ok
  def run(args, usage, switches, fun, called \\ []) do
    {options, words} = parse(args, @common ++ switches)

    if options[:help] do
      IO.puts(usage)
    else
      Mix.Task.run("app.start")
      Logger.configure(level: :error)
      Application.put_env(:kmq, :waiting, :stderr)
      result = call(fun, words, options)
      finish(in_switches(result, switches, called), options)
    end
  rescue
    error in ErlangError -> unread(error, __STACKTRACE__)
  end

  # Whoever read the output has gone, as `| head` does: what others end by SIGPIPE for, without a word.
  defp unread(%{original: :terminated}, _stacktrace), do: System.halt(128 + 13)
  defp unread(error, stacktrace), do: reraise(error, stacktrace)

  @doc "Options and words; the first option that is wrong ends the task."
  @spec parse([String.t()], keyword) :: {keyword, [String.t()]}
  def parse(args, switches) do
    case OptionParser.parse(args, strict: switches) do
      {options, words, []} ->
        {options, words}

      {options, words, [{option, value} | _]} ->
        # Who asks for help need not have the rest right.
        if options[:help], do: {options, words}, else: bad_usage(wrong(option, value, switches))
    end
  end

  defp wrong(option, value, switches) do
    case Enum.find(switches, fn {name, _type} -> switch(name) == option end) do
      nil ->
        names = for {name, _type} <- switches, do: switch(name)
        hint = if meant = Options.meant(option, names), do: ", " <> meant
        "unknown option #{option}#{hint}"

      {_name, :boolean} ->
        "#{option} takes no value, got: #{value}"

      {_name, type} when value == nil ->
        "#{option} needs a value#{if type == :integer, do: ", a whole number"}"

      {_name, _integer} ->
        "#{option} takes a whole number, got: #{value}"
    end
  end

  defp switch(name), do: "--" <> (name |> to_string() |> String.replace("_", "-"))

  # Who has written --group does not know of :group_id.
  defp in_switches(:ok, _switches, _called), do: :ok

  defp in_switches({:error, %Error{} = error}, switches, called),
    do: {:error, %{error | message: in_switches(error.message, switches, called)}}

  defp in_switches({:usage, text}, switches, called),
    do: {:usage, in_switches(text, switches, called)}

  defp in_switches(text, switches, called) do
    names =
      for {name, _type} <- @common ++ switches, into: %{}, do: {to_string(name), switch(name)}

    names = for {name, switch} <- called, into: names, do: {to_string(name), switch}

    Regex.replace(~r/(required option )?(?<![\w:.]):([a-z_]+)( option)?/, text, fn all,
                                                                                   _,
                                                                                   name,
                                                                                   _ ->
      Map.get(names, name, all)
    end)
  end

  defp call(fun, words, options) do
    fun.(words, options, connection(options))
  rescue
    # Bad values of options: the caller's mistake, told without a stack trace.
    error in ArgumentError -> {:usage, Exception.message(error)}
    error in Error -> {:error, error}
  end

  defp connection(options) do
    [hosts: options[:hosts] || "localhost:9092"] ++ file(options[:options])
  end

  @doc "Of a pipeline: what was given of its topics and its group."
  @spec queue(keyword, [String.t()]) :: keyword
  def queue(options, words \\ []) do
    topics = Keyword.get_values(options, :topic) ++ words

    if(topics == [], do: [], else: [topics: topics]) ++
      if(options[:group], do: [group_id: options[:group]], else: [])
  end

  # Further options of Kmq (client_config, kafka_config, marker_topic ...) as an Elixir keyword list.
  defp file(nil), do: []

  defp file(path) do
    case File.read(path) do
      {:ok, text} ->
        options = eval(text, path)

        Keyword.keyword?(options) ||
          raise ArgumentError,
                "--options: #{path} holds no keyword list; it is to be like [client_config: [ssl: true]]"

        Keyword.delete(options, :hosts)

      {:error, reason} ->
        raise ArgumentError, "--options: cannot read #{path}: #{:file.format_error(reason)}"
    end
  end

  # What is wrong with it, and where, but never a line of it: passwords may stand there.
  defp eval(text, path) do
    {options, _binding} = Code.eval_string(text, [], file: path)
    options
  rescue
    error -> raise ArgumentError, "--options: #{path}#{line(error)} is no Elixir: #{what(error)}"
  end

  defp line(%{line: line}), do: ", line #{line},"
  defp line(_error), do: ""

  # Behind a colon the parser quotes the file.
  defp what(%{description: text}), do: text |> String.split(":", parts: 2) |> hd()
  defp what(error), do: Exception.message(error)

  defp finish(:ok, _options), do: :ok

  defp finish({:error, %Error{reason: :invalid_option} = error}, _options),
    do: bad_usage(error.message)

  defp finish({:error, error}, options) do
    IO.puts(:stderr, "error: " <> Exception.message(error))
    error = %{reason: error.reason, message: error.message, retriable: error.retriable?}
    if options[:json], do: IO.puts(json(%{error: error}))
    exit({:shutdown, 1})
  end

  defp finish({:usage, text}, _options), do: bad_usage(text)

  @doc "Says what is wrong with the arguments, and ends the task."
  @spec bad_usage(String.t()) :: no_return
  def bad_usage(text) do
    IO.puts(:stderr, "#{text}\nsee --help")
    exit({:shutdown, 2})
  end

  @doc "The value of a `--header`."
  @spec header(String.t()) :: {String.t(), String.t()}
  def header(text) do
    case String.split(text, "=", parts: 2) do
      [name, value] -> {name, value}
      [_] -> raise ArgumentError, "expected --header NAME=VALUE, got: #{text}"
    end
  end

  @doc "A moment, of the option of that name."
  @spec at(atom, String.t()) :: DateTime.t()
  def at(name, text) do
    case DateTime.from_iso8601(text) do
      {:ok, at, _offset} ->
        at

      {:error, _} ->
        raise ArgumentError, "expected --#{name} as 2026-12-24T18:00:00Z, got: #{text}"
    end
  end

  @doc "Key, value and such on lines, or as JSON."
  @spec put(term, keyword, (term -> iodata)) :: :ok
  def put(value, options, plain) do
    IO.puts(if(options[:json], do: json(value), else: plain.(value)))
  end

  @doc "Rows under each other, the first one the heads."
  @spec table([[term]]) :: iodata
  def table(rows) do
    rows = for row <- rows, do: Enum.map(row, &cell/1)

    widths =
      rows |> Enum.zip_with(fn column -> column |> Enum.map(&String.length/1) |> Enum.max() end)

    rows
    |> Enum.map(fn row ->
      row
      |> Enum.zip_with(widths, &String.pad_trailing/2)
      |> Enum.join("  ")
      |> String.trim_trailing()
    end)
    |> Enum.intersperse("\n")
  end

  defp cell(nil), do: "-"
  defp cell(text) when is_binary(text), do: printable(text)
  defp cell(other), do: to_string(other)

  @doc "Bytes for a person."
  @spec printable(binary | nil) :: String.t()
  def printable(nil), do: "-"
  def printable(text), do: if(String.printable?(text), do: text, else: inspect(text, limit: 40))

  @doc "A time for a person."
  @spec seconds(integer) :: String.t()
  def seconds(ms) when ms < 10_000, do: "#{Float.round(ms / 1_000, 1)} s"
  def seconds(ms), do: "#{div(ms, 1_000)} s"

  @doc "JSON; bytes that are no text are `{\"base64\": ...}`."
  @spec json(term) :: iodata
  def json(nil), do: "null"
  def json(value) when is_boolean(value) or is_number(value), do: to_string(value)
  def json(value) when is_atom(value), do: json(Atom.to_string(value))

  def json(value) when is_binary(value) do
    if String.valid?(value),
      do: [?", escape(value), ?"],
      else: json(%{base64: Base.encode64(value)})
  end

  def json(list) when is_list(list), do: [?[, Enum.map_intersperse(list, ?,, &json/1), ?]]

  def json(map) when is_map(map) do
    pairs =
      map |> Enum.sort() |> Enum.map_intersperse(?,, fn {k, v} -> [json(k), ?:, json(v)] end)

    [?{, pairs, ?}]
  end

  defp escape(text) do
    for <<char::utf8 <- text>>, into: "" do
      case char do
        ?" -> "\\\""
        ?\\ -> "\\\\"
        ?\n -> "\\n"
        ?\r -> "\\r"
        ?\t -> "\\t"
        c when c < 0x20 -> "\\u" <> String.pad_leading(Integer.to_string(c, 16), 4, "0")
        c -> <<c::utf8>>
      end
    end
  end
end
