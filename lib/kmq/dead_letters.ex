defmodule Kmq.DeadLetters do
  @moduledoc """
  What failed for good: to look at, and to send back.

      connection = [hosts: [localhost: 9092]]
      "orders" |> Kmq.DeadLetters.stream(connection) |> Enum.frequencies_by(& &1.cause)
      Kmq.DeadLetters.redrive("orders", connection ++ [filter: [cause: "timeout"], rate: 100])

  All functions take the name of the queue topic; its dead letter topic is `<topic>__undelivered`, or what `:dead_letter_topic`
  names. Options that say where: `:hosts`, `:client_config`, `:kafka_config`.

  ## Filters

  A function that takes a `Kmq.DeadLetter`, or a list of conditions that must all hold:

    * `:cause` - `"timeout"`, or a list of causes
    * `:group` - the consumer group it failed in
    * `:key` - the key
    * `:headers` - `[{name, value}]`, each of which it has
    * `:attempts` - a number or a range of failed attempts
    * `:since`, `:until` - `DateTime`s between which it became a dead letter
    * `:origin` - the topic it was published to first
  """

  require Logger
  alias Kmq.{Config, DeadLetter, Error, Options, Publisher, Reach, Security, Topics}
  alias Options.Types

  @read_ms 15_000
  @chunk 100
  @where [:hosts, :client_config, :kafka_config]
  @read Keyword.take(Options.schema(:publisher), @where) ++
          [
            filter: [type: {:custom, Types, :letter_filter, []}],
            dead_letter_topic: [type: {:custom, Types, :topic, []}],
            count_header: [
              type: {:custom, Types, :count_header, []},
              default: "kmq-redelivery-count"
            ]
          ]
  @redrive @read ++
             [
               to: [type: {:custom, Types, :topic, []}],
               rate: [type: :pos_integer],
               max: [type: :pos_integer],
               dry_run: [type: :boolean, default: false],
               progress: [type: {:custom, Types, :function_of_one, []}],
               group: [type: {:custom, Types, :non_empty_string, []}]
             ]
  @redriven "kmq-redriven"
  @pointing ["kmq-pointer", "kmq-value-bytes"]

  @typedoc "See the section about filters."
  @type filter :: keyword | (DeadLetter.t() -> boolean)

  @typedoc "What a redrive did: dead letters read, sent back, left alone, and how many there were to be read."
  @type summary :: %{
          read: non_neg_integer,
          redriven: non_neg_integer,
          skipped: non_neg_integer,
          total: non_neg_integer
        }

  @doc """
  All dead letters of a topic that are there now, partition by partition, as a lazy stream. Nothing is committed anywhere.
  An error raises `Kmq.Error`.

    * `:filter`
    * `:dead_letter_topic`, `:count_header` - where the pipeline has others than the defaults
  """
  @spec stream(String.t(), keyword) :: Enumerable.t()
  def stream(topic, options) do
    run = run!(topic, options, @read)

    Stream.resource(
      fn ->
        admin = ok!(open(run, run.dead_letter_topic <> "__read"))
        {admin, ok!(spans(admin, run, false))}
      end,
      fn
        {admin, []} -> {:halt, {admin, []}}
        {admin, [span | spans]} -> next(admin, run, span, spans)
      end,
      fn {admin, _spans} -> :kmq_nif.admin_close(admin) end
    )
  end

  defp next(admin, run, span, spans) do
    {letters, rest} = ok!(read(admin, run, span))
    {Enum.filter(letters, &wanted?(&1, run.filter)), {admin, List.wrap(rest) ++ spans}}
  end

  @doc "One of them, by partition and offset of the dead letter topic."
  @spec show(String.t(), non_neg_integer, non_neg_integer, keyword) ::
          {:ok, DeadLetter.t()} | {:error, Error.t()}
  def show(topic, partition, offset, options) do
    run = run!(topic, options, @read)
    number!(partition, "partition", 0x7FFF_FFFF)
    number!(offset, "offset", 0x7FFF_FFFF_FFFF_FFFE)

    with_admin(run, run.dead_letter_topic <> "__read", fn admin ->
      with {:ok, spans} <- spans(admin, run, false),
           {:ok, {[letter], _rest}} <- read_one(admin, run, spans, partition, offset) do
        {:ok, letter}
      else
        {:error, error} ->
          {:error, error}

        _gone ->
          {:error,
           Error.new(
             :not_found,
             "#{run.dead_letter_topic}-#{partition} has no offset #{offset}"
           )}
      end
    end)
  end

  defp number!(n, _what, most) when is_integer(n) and n in 0..most, do: :ok

  defp number!(other, what, most) do
    raise ArgumentError,
          "expected the #{what}, an integer from 0 to #{most}, got: #{inspect(other)}"
  end

  defp read_one(admin, run, spans, partition, offset) do
    case Enum.find(spans, fn {p, from, to} -> p == partition and offset in from..(to - 1)//1 end) do
      nil -> :gone
      _span -> read(admin, run, {partition, offset, offset + 1})
    end
  end

  @doc """
  Sends dead letters back to where they came from, in the order they stand there, and returns when it has come to the end as it
  was at the start.

  A message that goes back is new: its counts begin again, a time to live of its own is over with, that of a pipeline (`:ttl`)
  begins again. It keeps its key, value and other
  headers and its `id` (`kmq-origin`), and says by `kmq-redriven` which dead letter it was. Only the group it failed in
  gets it. The dead letters stay where they are: Kafka deletes them when their retention is over.

  A dead letter without its value (`dead_letter_oversize: :pointer`) is sent with the one it points to; where that is gone, it
  is left alone, with a warning.

  The position is kept as a consumer group of its own, `<dead letter topic>__redrive`, so an interrupted redrive goes on where it
  stopped, and the next one begins behind it. With a filter or `:to` it is another group for each of them: what one
  redrive left alone, another one still finds. The same holds for each topic where several share a dead letter topic: only those go back whose
  `origin` is the topic named, or nobody knows. What both match, both send, as do two of the same group at once.

    * `:filter` - which; with a function give it a `:group`
    * `:to` - another topic to send them to; then whoever reads it gets them
    * `:rate` - at most so many a second
    * `:dry_run` - reads and counts only: nothing is sent, no position kept
    * `:max` - stops after so many
    * `:progress` - a function that takes the `t:summary/0` so far, called now and then
    * `:group` - the name of the consumer group that keeps the position
    * `:dead_letter_topic`, `:count_header` - where the pipeline has others than the defaults
  """
  @spec redrive(String.t(), keyword) :: {:ok, summary} | {:error, Error.t()}
  def redrive(topic, options) do
    run = run!(topic, options, @redrive)

    if run.to == run.dead_letter_topic,
      do: raise(ArgumentError, "invalid value for :to option: it is the dead letter topic itself")

    if run.to == nil and run.dead_letter_topic == topic,
      do:
        raise(
          ArgumentError,
          "invalid value for :dead_letter_topic option: #{inspect(topic)} is the topic that they would go back to"
        )

    with_admin(run, group(run), fn admin ->
      with {:ok, spans} <- spans(admin, run, true) do
        total = Enum.sum(for {_, from, to} <- spans, do: to - from)
        summary = %{read: 0, redriven: 0, skipped: 0, total: total}
        with_publisher(run, &redrive_all(admin, &1, run, spans, summary))
      end
    end)
  end

  # ---- options

  defp run!(topic, options, schema) do
    with {:ok, topic} <- Types.topic(topic),
         {:ok, valid} <- Options.validate(options, schema),
         connection = Keyword.take(options, @where),
         {:ok, %{admin_props: props, bootstrap: bootstrap}} <- Config.connection(connection) do
      %{
        topic: topic,
        dead_letter_topic: valid[:dead_letter_topic] || Topics.dead_letter_topic(topic),
        count_header: valid[:count_header],
        filter: valid[:filter],
        bootstrap: bootstrap,
        props: props,
        connection: Security.hide(connection),
        to: valid[:to],
        home: home(topic, valid[:to], valid[:dead_letter_topic]),
        rate: valid[:rate],
        max: valid[:max] || :infinity,
        dry_run: valid[:dry_run],
        progress: valid[:progress] || fn _summary -> :ok end,
        group: valid[:group]
      }
    else
      {:error, %Error{message: message}} -> raise ArgumentError, message
      {:error, message} -> raise ArgumentError, message
    end
  end

  # One that has another name may be that of several topics: of their letters only this topic's go back to it.
  defp home(_topic, to, named) when to != nil or named == nil, do: nil
  defp home(topic, nil, named), do: if(named != Topics.dead_letter_topic(topic), do: topic)

  defp at_home?(_letter, %{home: nil}), do: true
  defp at_home?(%{origin: nil}, _run), do: true
  defp at_home?(%{origin: origin}, %{home: home}), do: elem(origin, 0) == home

  # The group that keeps the position.
  defp group(%{group: group}) when is_binary(group), do: group

  defp group(%{filter: nil, to: nil, home: nil} = run),
    do: run.dead_letter_topic <> "__redrive"

  defp group(%{filter: filter, dry_run: false}) when is_function(filter) do
    raise ArgumentError, "a redrive with a function as its filter needs a :group of its own"
  end

  defp group(%{filter: filter, to: to} = run) do
    filter = if is_list(filter), do: Enum.sort(filter), else: filter
    which = if run.home, do: {filter || [], to, run.home}, else: {filter || [], to}
    hash = :crypto.hash(:sha256, inspect(which, limit: :infinity))
    encoded = Base.encode16(binary_part(hash, 0, 5), case: :lower)
    run.dead_letter_topic <> "__redrive-" <> encoded
  end

  defp wanted?(_letter, nil), do: true
  defp wanted?(letter, function) when is_function(function), do: function.(letter)
  defp wanted?(letter, conditions), do: Enum.all?(conditions, &holds?(&1, letter))

  defp holds?({:cause, causes}, letter),
    do: letter.cause in Enum.map(List.wrap(causes), &to_string/1)

  defp holds?({:group, group}, letter), do: letter.group == group
  defp holds?({:key, key}, letter), do: letter.key == key
  defp holds?({:headers, headers}, letter), do: Enum.all?(headers, &(&1 in letter.headers))
  defp holds?({:attempts, n}, letter) when is_integer(n), do: letter.attempts == n
  defp holds?({:attempts, range}, letter), do: letter.attempts in range
  defp holds?({:since, at}, letter), do: letter.ts >= DateTime.to_unix(at, :millisecond)
  defp holds?({:until, at}, letter), do: letter.ts < DateTime.to_unix(at, :millisecond)
  defp holds?({:origin, topic}, letter), do: match?({^topic, _, _, _}, letter.origin)

  # ---- reading

  # What a transaction wrote and gave up is nobody's dead letter.
  defp props(run, group) do
    [{"group.id", group}, {"isolation.level", "read_committed"}] ++
      Enum.reject(run.props, fn {name, _} -> name in ["group.id", "isolation.level"] end)
  end

  defp open(run, group) do
    with {:error, error} <- Security.admin_open(props(run, group), @read_ms),
         do: {:error, opened(error, run)}
  end

  defp with_admin(run, group, fun) do
    with {:error, error} <- Security.with_admin(props(run, group), @read_ms, fun),
         do: {:error, opened(error, run)}
  end

  defp opened(error, run), do: Error.from_native(error, "a client for #{run.bootstrap}")

  # What there is to read, [{partition, from, to}]: from the beginning, or from the group's position.
  defp spans(admin, run, from_position?) do
    topic = run.dead_letter_topic

    with {:ok, id} <- Reach.cluster_id(admin, run.bootstrap, @read_ms),
         {:ok, n} <- native(Reach.partitions(admin, id, topic, @read_ms)),
         true <- n > 0 || {:error, missing(admin, run)},
         {:ok, positions} <- positions(admin, topic, n, from_position?) do
      Enum.reduce_while(0..(n - 1), {:ok, []}, fn partition, {:ok, spans} ->
        case native(:kmq_nif.admin_watermarks(admin, topic, partition, @read_ms)) do
          {:ok, {low, high}} ->
            from = max(positions[partition] || low, low)
            spans = if from < high, do: spans ++ [{partition, from, high}], else: spans
            {:cont, {:ok, spans}}

          error ->
            {:halt, error}
        end
      end)
    end
  end

  defp positions(_admin, _topic, _n, false), do: {:ok, %{}}

  defp positions(admin, topic, n, true) do
    asked = for partition <- 0..(n - 1), do: {topic, partition}

    with {:ok, list} <- native(:kmq_nif.admin_committed(admin, asked, @read_ms)) do
      {:ok, for({_, partition, offset} <- list, offset >= 0, into: %{}, do: {partition, offset})}
    end
  end

  # It is the queue topic that was named.
  defp missing(admin, run) do
    topics = Reach.topics(admin, @read_ms)
    queues = topics |> Enum.map(&String.replace_suffix(&1, "__undelivered", "")) |> Enum.uniq()

    hint =
      cond do
        run.topic in topics ->
          ": no dead letter of #{inspect(run.topic)} was ever written, or it has another name (:dead_letter_topic)"

        meant = Options.meant(run.topic, queues) ->
          ": " <> meant

        true ->
          ""
      end

    Error.new(:topic_missing, "topic #{inspect(run.dead_letter_topic)} does not exist#{hint}")
  end

  # The next letters of a span, and what is left of it (nil: nothing).
  defp read(admin, run, {partition, from, to}) do
    n = min(@chunk, to - from)
    topic = run.dead_letter_topic
    Security.admin_renew(admin, run.props, @read_ms)

    with {:ok, records} <-
           native(:kmq_nif.admin_read(admin, topic, partition, from, n, @read_ms)) do
      letters = Enum.map(records, &DeadLetter.new(&1, topic, partition, run.count_header))
      {:ok, {letters, if(from + n < to, do: {partition, from + n, to})}}
    end
  end

  defp native({:error, error}), do: {:error, Error.from_native(error, "dead letters")}
  defp native(result), do: result

  defp ok!({:ok, value}), do: value
  defp ok!({:error, error}), do: raise(error)

  # ---- sending back

  defp with_publisher(%{dry_run: true}, fun), do: fun.(nil)

  defp with_publisher(run, fun) do
    with {:ok, publisher} <- Publisher.start_link(run.connection) do
      try do
        fun.(publisher)
      after
        Publisher.close(publisher)
      end
    end
  end

  defp redrive_all(_admin, _publisher, run, [], summary) do
    run.progress.(summary)
    {:ok, summary}
  end

  defp redrive_all(admin, publisher, run, [{partition, from, to} = span | spans], summary) do
    with {:ok, {letters, rest}} <- read(admin, run, span) do
      through = if rest, do: elem(rest, 1), else: to

      case send_back(admin, publisher, run, partition, batches(letters, run, from), summary) do
        {:ok, summary} ->
          # Also past what is gone: compaction, control records.
          gone = if letters == [], do: from, else: List.last(letters).offset + 1
          summary = %{summary | read: summary.read + (through - gone)}

          with :ok <- commit(admin, run, partition, through),
               do: redrive_all(admin, publisher, run, List.wrap(rest) ++ spans, summary)

        {:enough, summary} ->
          run.progress.(summary)
          {:ok, summary}

        {:error, error} ->
          {:error, error}
      end
    end
  end

  # Of at most a second's worth each: [{letters, from, next offset}].
  defp batches(letters, run, from) do
    letters
    |> Enum.chunk_every(min(run.rate || @chunk, @chunk))
    |> Enum.map_reduce(from, fn letters, from ->
      next = List.last(letters).offset + 1
      {{letters, from, next}, next}
    end)
    |> elem(0)
  end

  defp send_back(_admin, _publisher, _run, _partition, [], summary), do: {:ok, summary}

  defp send_back(admin, publisher, run, partition, [{letters, from, next} | rest], summary) do
    {wanted, over} =
      letters
      |> Enum.filter(&(at_home?(&1, run) and wanted?(&1, run.filter)))
      |> Enum.split(room(run, summary))

    next = if over == [], do: next, else: hd(over).offset
    passed = Enum.count(letters, &(&1.offset < next))
    began = System.monotonic_time(:millisecond)

    with {:ok, whole} <- whole(admin, run, wanted),
         :ok <- publish(publisher, run, whole),
         :ok <- commit(admin, run, partition, next) do
      summary = %{
        summary
        | read: summary.read + (next - from),
          redriven: summary.redriven + length(whole),
          skipped: summary.skipped + passed - length(whole)
      }

      run.progress.(summary)

      if over != [] or summary.redriven == run.max do
        {:enough, summary}
      else
        pace(run, length(wanted), began)
        send_back(admin, publisher, run, partition, rest, summary)
      end
    end
  end

  defp room(%{max: :infinity}, _summary), do: @chunk
  defp room(run, summary), do: run.max - summary.redriven

  defp pace(%{rate: nil}, _n, _began), do: :ok
  defp pace(%{dry_run: true}, _n, _began), do: :ok

  defp pace(%{rate: rate}, n, began) do
    wait = began + div(n * 1_000, rate) - System.monotonic_time(:millisecond)

    receive do
    after
      max(wait, 0) -> :ok
    end
  end

  # Letters that only point to their value get it; those whose original is gone are left out.
  defp whole(_admin, %{dry_run: true}, letters), do: {:ok, letters}

  defp whole(admin, _run, letters) do
    Enum.reduce_while(letters, {:ok, []}, fn letter, {:ok, acc} ->
      case original(admin, letter) do
        {:ok, letter} -> {:cont, {:ok, [letter | acc]}}
        :gone -> {:cont, {:ok, acc}}
        error -> {:halt, error}
      end
    end)
    |> case do
      {:ok, letters} -> {:ok, Enum.reverse(letters)}
      error -> error
    end
  end

  defp original(_admin, %{pointer: nil} = letter), do: {:ok, letter}

  defp original(admin, %{pointer: {topic, partition, offset, _ts}} = letter) do
    case native(:kmq_nif.admin_read(admin, topic, partition, offset, 1, @read_ms)) do
      {:ok, [{^offset, _, key, value, headers, _, _, _}]} ->
        users = Enum.reject(headers, fn {name, _} -> String.starts_with?(name, "kmq-") end)

        ours =
          for {"kmq-" <> _ = name, value} <- letter.headers,
              name not in @pointing,
              do: {name, value}

        {:ok, %{letter | key: key, value: value, headers: users ++ ours}}

      {:ok, _gone} ->
        Logger.warning(
          "#{letter.topic}/#{letter.partition}/#{letter.offset} is left alone: its value, at " <>
            "#{topic}/#{partition}/#{offset}, is gone"
        )

        :gone

      error ->
        error
    end
  end

  defp publish(nil, _run, _letters), do: :ok
  defp publish(_publisher, _run, []), do: :ok

  defp publish(publisher, run, letters) do
    case Publisher.publish_many(publisher, Enum.map(letters, &message(&1, run))) do
      {:ok, _places} ->
        :ok

      {:error, %Error{} = error} ->
        {:error, error}

      # Some are sent, the position stands before them: they may be sent twice, none is left out.
      {:error, results} ->
        Enum.find(results, &match?({:error, _}, &1))
    end
  end

  @dropped ["kmq-deliveries", "kmq-cause", "kmq-error", "kmq-due", "kmq-expires", @redriven]

  defp message(letter, run) do
    home = letter.origin && elem(letter.origin, 0)
    target = run.to || run.topic
    stays? = target == run.topic or target == home
    dropped = [run.count_header | if(stays?, do: @dropped, else: ["kmq-group" | @dropped])]
    mine = {@redriven, "#{letter.topic}/#{letter.partition}/#{letter.offset} #{letter.cause}"}
    kept = Enum.reject(letter.headers, fn {name, _} -> name in dropped end)
    options = [key: letter.key, headers: kept ++ born_again(letter) ++ [mine]]

    {target, letter.value,
     if(run.to, do: options, else: [{:partition, letter.partition} | options])}
  end

  # The time to live of a pipeline would begin with its first publication: it begins now.
  defp born_again(%{origin: nil}), do: []
  defp born_again(_letter), do: [{"kmq-due", to_string(System.os_time(:millisecond))}]

  defp commit(_admin, %{dry_run: true}, _partition, _offset), do: :ok

  defp commit(admin, run, partition, offset) do
    native(:kmq_nif.admin_commit(admin, run.dead_letter_topic, partition, offset, @read_ms))
  end
end
