defmodule Kmq.Testing do
  @moduledoc """
  For your own ExUnit tests: a queue of its own for each test or test module, and functions that wait until a message has
  come to its end. No Kafka, no Docker, no JVM, no sleeping.

      defmodule Shop.OrdersTest do
        use ExUnit.Case, async: true
        import Kmq.Testing

        setup_all do
          queue = start_queue!()
          start_supervised!({Shop.Orders, options(queue)})
          await_ready(queue)
          %{queue: queue}
        end

        test "an order is shipped", %{queue: queue} do
          order = publish(queue, "flour")
          assert await_acked(queue, order) == :ok
        end

        test "an order without a customer is a dead letter", %{queue: queue} do
          order = publish(queue, "flour", headers: [{"customer", ""}])
          assert %{cause: "rejected", error: "no customer"} = await_dead_lettered(queue, order)
        end
      end

  What they say is read from the topics themselves, from outside: it is true for a pipeline, a `Kmq.Consumer`, and for whatever
  else settles messages, on this node or another one. [Testing](testing.md) has the whole story, and what a test costs.

  All waiting ends: after `:timeout` ms (default 5,000, times `:kmq, :testing_scale` of the application environment, for slow
  machines) the functions raise `Kmq.Testing.TimeoutError`, which says where each message is.
  """

  alias Kmq.{Config, DeadLetter, Error, Options, Publisher, Sandbox, Tracker}
  alias Kmq.Testing.Watch

  defmodule Queue do
    @moduledoc """
    A queue of a test, made by `Kmq.Testing.start_queue!/1`.

      * `:topic`, `:group_id` - names nobody else has
      * `:hosts` - where it is
      * `:sandbox` - the sandbox it is in, for `Kmq.Sandbox.inject/2`
    """
    @enforce_keys [:topic, :group_id, :hosts, :sandbox, :partitions, :own?, :options]
    defstruct @enforce_keys

    @type t :: %__MODULE__{
            topic: String.t(),
            group_id: String.t(),
            hosts: String.t(),
            sandbox: pid,
            partitions: pos_integer,
            own?: boolean,
            options: keyword
          }
  end

  defmodule TimeoutError do
    @moduledoc "What a test waited for did not happen in time; the message says where things are."
    defexception [:message]
  end

  @typedoc "A published message: partition and offset of its first publication."
  @type ref :: {partition :: non_neg_integer, offset :: non_neg_integer}

  @typedoc """
  Where a message is.

    * `:waiting` - in the queue topic, and not handed out yet
    * `:open` - in work, waiting for its next attempt, or delayed
    * `:acked`, `:discarded`, `:expired`, `:gone` - its ends; `:gone`: deleted by the topic before it could come again. With
      `marker_format: :kmq` what was discarded counts as `:acked`: its markers do not tell them apart
    * `:passed` - not for this group: a filter, or a copy for another group
    * `{:dead_lettered, letter}` - with its `Kmq.DeadLetter`
  """
  @type status ::
          :waiting
          | :open
          | :acked
          | :discarded
          | :expired
          | :gone
          | :passed
          | {:dead_lettered, DeadLetter.t()}

  @timeout_ms 5_000
  @ready_ms 20_000
  @pause_ms 10
  @own_options [
    partitions: [type: {:custom, Options.Types, :integer_in, [1, 1_000]}, default: 1],
    sandbox: [type: :any, default: :shared]
  ]

  # ---- a queue

  @doc """
  A topic and a group of its own, on a sandbox that all tests of this VM share.

    * `:partitions` - of the topic (default 1)
    * `:sandbox` - `:shared` (default); `:own` for tests that inject faults, or a sandbox started by yourself. An own one ends
      with the test, or in `setup_all` with the module
    * all others - options of the pipeline or consumer, as `options/2` takes them

  Call it from the test, `setup` or `setup_all`: the queue's own processes end with the one that called. In `iex` it works too; then an own
  sandbox lives as long as the VM.
  """
  @spec start_queue!(keyword) :: Queue.t()
  def start_queue!(options \\ []) do
    known_options(options)
    {options, extra} = Keyword.split(options, Keyword.keys(@own_options))
    options = Options.validate!(options, @own_options)
    partitions = options[:partitions]
    {sandbox, own?} = sandbox(options[:sandbox])
    hosts = Sandbox.bootstrap(sandbox)
    suffix = Base.encode16(:crypto.strong_rand_bytes(5), case: :lower)
    topic = "queue-" <> suffix

    queue = %Queue{
      topic: topic,
      group_id: "group-" <> suffix,
      hosts: hosts,
      sandbox: sandbox,
      partitions: partitions,
      own?: own?,
      options: extra
    }

    # Also those that a consumer would make: a mock cluster makes what it is asked about, with partitions of its own choice.
    config = config(queue, [])
    made = [topic | Map.values(config.marker_topics) ++ Map.values(config.dead_letter_topics)]
    for topic <- Enum.uniq(made), do: create_topic(sandbox, topic, partitions)

    {:ok, _pid} = Watch.start_link(queue, config)
    queue
  end

  # A typo of its own options is none of a pipeline's.
  defp known_options(options) do
    keyword!(options, "options of start_queue!")
    names = Keyword.keys(@own_options) ++ Keyword.keys(Options.schema(:producer))

    for name <- Keyword.keys(options),
        name not in names,
        hint = Options.meant(name, names),
        do: raise(ArgumentError, "unknown option #{inspect(name)} of start_queue!, #{hint}")
  end

  # One that several queues name, for dead letters say, is there already.
  defp create_topic(sandbox, topic, partitions) do
    with {:error, error} <- Sandbox.create_topic(sandbox, topic, partitions),
         do: error.reason == :topic_already_exists || raise(error)
  end

  @doc """
  Options for `OffBroadway.Kmq.Producer` or `Kmq.Consumer` that read this queue: its hosts, topic and group, `create_topics: true`, and
  short times, so that a retry comes after 20 ms (`backoff: [20]`) and a stop does not wait. `extra` wins over all of them.
  """
  @spec options(Queue.t(), keyword) :: keyword
  def options(queue, extra \\ []) do
    queue!(queue)
    keyword!(extra, "options")

    [
      hosts: queue.hosts,
      topics: [queue.topic],
      group_id: queue.group_id,
      create_topics: true,
      lease: 1_000,
      max_processing_time: 10_000,
      backoff: [20],
      drain_timeout: 5_000
    ]
    |> Keyword.merge(queue.options)
    |> Keyword.merge(extra)
  end

  @doc """
  Waits until a consumer of the queue has its partitions, and the tracker too: from then on everything takes milliseconds.
  Default time limit 20 s. Without it the first message of the test waits for the same.
  """
  @spec await_ready(Queue.t(), keyword) :: :ok
  def await_ready(queue, options \\ []) do
    queue!(queue)
    config = config(queue, [])
    consumer = {queue.group_id, queue.topic}
    tracker = {Tracker.tracker_group(queue.group_id), config.marker_topics[queue.topic]}
    groups = if config.delivery == :markers, do: [consumer, tracker], else: [consumer]

    # Positions are committed as soon as they are known, by consumers and trackers alike.
    for {group, topic} <- groups do
      until(options, @ready_ms, fn ->
        if map_size(Watch.committed(queue, group, topic)) == queue.partitions,
          do: {:done, :ok},
          else: {:wait, fn -> "nobody of group #{group} reads #{topic} yet" end}
      end)
    end

    :ok
  end

  @doc """
  Publishes a value, or a list of values and `{value, options}`; returns the message's `t:ref/0`, or a list of them. Options are those of
  `Kmq.Publisher.publish/4`.
  """
  @spec publish(Queue.t(), binary | nil, keyword) :: ref
  @spec publish(Queue.t(), [binary | {binary | nil, keyword}], keyword) :: [ref]
  def publish(queue, values, options \\ [])

  def publish(queue, values, options) when is_list(values) and length(values) >= 0 do
    queue!(queue)
    keyword!(options)

    messages =
      for value <- values do
        case value do
          {value, own} -> {queue.topic, value, Keyword.merge(options, keyword!(own))}
          value -> {queue.topic, value, options}
        end
      end

    places = ok!(Publisher.publish_many(Watch.publisher(queue), messages))
    for place <- places, do: {place.partition, place.offset}
  end

  def publish(queue, value, options) do
    [ref] = publish(queue, [{value, options}], [])
    ref
  end

  defp keyword!(options, what \\ "a message's options") do
    Keyword.keyword?(options) ||
      raise ArgumentError,
            "expected #{what} to be a keyword list, got: #{inspect(options, limit: 5)}"

    options
  end

  @doc "Makes the sandbox of this queue misbehave: see the table of `Kmq.Sandbox`. Only where it is the queue's own."
  @spec inject(Queue.t(), Sandbox.fault()) :: :ok
  def inject(%Queue{own?: true} = queue, fault), do: ok!(Sandbox.inject(queue.sandbox, fault))

  def inject(queue, _fault) do
    queue!(queue)

    raise ArgumentError,
          "this sandbox is shared with other tests; start the queue with sandbox: :own to inject faults"
  end

  # ---- waiting

  @doc "Where messages are now: one for a ref, a list for a list."
  @spec status(Queue.t(), ref | [ref]) :: status | [status]
  def status(queue, refs) do
    list = refs!(queue, refs)
    look = Watch.look(queue)
    like(refs, for(ref <- list, do: place(ref, look)))
  end

  @doc """
  Waits until all of them have come to an end, whichever: acknowledged, discarded, dead-lettered. Returns how, in the order of the refs.

      assert [:acked, {:dead_lettered, letter}] = await_settled(queue, [good, bad])
  """
  @spec await_settled(Queue.t(), ref | [ref], keyword) :: status | [status]
  def await_settled(queue, refs, options \\ []) do
    statuses =
      await(queue, refs, options, "settled", fn status -> status not in [:waiting, :open] end)

    like(refs, statuses)
  end

  @doc """
  Waits until all of them are acknowledged. A message that comes to another end raises at once.
  """
  @spec await_acked(Queue.t(), ref | [ref], keyword) :: :ok
  def await_acked(queue, refs, options \\ []) do
    await(queue, refs, options, "acked", fn
      :acked -> true
      status -> if status in [:waiting, :open], do: false, else: :never
    end)

    :ok
  end

  @doc """
  Waits until all of them are in the dead letter topic; returns the `Kmq.DeadLetter`, or a list of them. A message that comes to
  another end raises at once.
  """
  @spec await_dead_lettered(Queue.t(), ref | [ref], keyword) :: DeadLetter.t() | [DeadLetter.t()]
  def await_dead_lettered(queue, refs, options \\ []) do
    statuses =
      await(queue, refs, options, "dead-lettered", fn
        {:dead_lettered, _} -> true
        status -> if status in [:waiting, :open], do: false, else: :never
      end)

    like(refs, for({:dead_lettered, letter} <- statuses, do: letter))
  end

  @doc """
  Waits until a message has been sent back to the queue at least `n` times; returns the causes of all its copies, oldest first.

      assert await_redelivered(queue, order, 2) == ["failed", "timeout"]
  """
  @spec await_redelivered(Queue.t(), ref, pos_integer | keyword, keyword) :: [String.t()]
  def await_redelivered(queue, ref, n \\ 1, options \\ [])

  # Who has options and means once.
  def await_redelivered(queue, ref, [{_, _} | _] = options, []),
    do: await_redelivered(queue, ref, 1, options)

  def await_redelivered(queue, ref, n, options) do
    [ref] = refs!(queue, [ref])

    (is_integer(n) and n > 0) ||
      raise ArgumentError, "expected how often, a positive integer, got: #{inspect(n)}"

    until(options, @timeout_ms, fn ->
      look = Watch.look(queue)
      causes = for {_place, cause} <- Enum.reverse(Map.get(look.copies, ref, [])), do: cause
      status = place(ref, look)

      cond do
        length(causes) >= n -> {:done, causes}
        status in [:waiting, :open] -> {:wait, fn -> missing(queue, ref, causes, n, status) end}
        true -> {:never, missing(queue, ref, causes, n, status)}
      end
    end)
  end

  defp missing(queue, ref, causes, n, status) do
    "#{inspect(ref)} of #{queue.topic} was redelivered #{length(causes)} times, not #{n}; it is #{words(status)}"
  end

  defp await(queue, refs, options, what, check) do
    refs = refs!(queue, refs)

    until(options, @timeout_ms, fn ->
      look = Watch.look(queue)
      statuses = for ref <- refs, do: place(ref, look)
      checks = Enum.map(statuses, check)

      cond do
        Enum.all?(checks, &(&1 == true)) -> {:done, statuses}
        :never in checks -> {:never, where(queue, refs, statuses, checks, what)}
        true -> {:wait, fn -> where(queue, refs, statuses, checks, what) end}
      end
    end)
  end

  defp where(queue, refs, statuses, checks, what) do
    lines =
      for {ref, status, ok} <- Enum.zip([refs, statuses, checks]), ok != true, do: {ref, status}

    shown = for {ref, status} <- Enum.take(lines, 10), do: "\n  #{inspect(ref)}: #{words(status)}"
    more = if length(lines) > 10, do: "\n  and #{length(lines) - 10} more", else: ""

    "#{length(lines)} of #{length(refs)} messages of #{queue.topic} are not #{what}:#{shown}#{more}"
  end

  defp words(:waiting), do: "not handed out yet: is a consumer of this group running, and ready?"
  defp words(:open), do: "open: in work, waiting for its next attempt, or delayed"
  defp words(:gone), do: "gone: deleted by the topic"
  defp words(:passed), do: "passed by: a filter does not want it"

  defp words({:dead_lettered, letter}),
    do:
      "a dead letter, cause #{letter.cause}, attempts #{letter.attempts}, error #{inspect(letter.error)}"

  defp words(end_), do: Atom.to_string(end_)

  # fun -> {:done, result} | {:wait, why} | {:never, text}
  defp until(options, default, fun) do
    options = Options.validate!(options, timeout: [type: :non_neg_integer, default: default])
    ms = round(options[:timeout] * Application.get_env(:kmq, :testing_scale, 1))
    repeat(fun, ms, System.monotonic_time(:millisecond) + ms)
  end

  defp repeat(fun, ms, deadline) do
    case fun.() do
      {:done, result} ->
        result

      {:never, text} ->
        raise TimeoutError, message: text

      {:wait, why} ->
        if System.monotonic_time(:millisecond) > deadline,
          do: raise(TimeoutError, message: "after #{ms} ms: " <> why.())

        receive do
        after
          @pause_ms -> repeat(fun, ms, deadline)
        end
    end
  end

  # ---- where a message is

  defp place(ref, look) do
    case look.dead do
      %{^ref => letter} -> {:dead_lettered, letter}
      _ -> newest(ref, look)
    end
  end

  defp newest(ref, look) do
    {p, offset} =
      case look.copies do
        %{^ref => [{newest, _cause} | _]} -> newest
        _ -> ref
      end

    book = Map.get(look.books, p, %{open: %{}, ended: %{}})
    passed? = Map.get(look.commits, p, 0) > offset

    cond do
      is_map_key(book.open, offset) -> :open
      is_map_key(book.ended, offset) -> ended(book.ended[offset])
      not passed? -> :waiting
      look.delivery == :markers -> :passed
      true -> :acked
    end
  end

  defp ended(0), do: :acked
  defp ended(1), do: :discarded
  defp ended(4), do: :gone
  defp ended(5), do: :expired
  # Redelivered or dead-lettered: the next look finds the copy.
  defp ended(_), do: :open

  # ---- what is given

  defp queue!(%Queue{} = queue), do: queue

  defp queue!(other) do
    raise ArgumentError,
          "expected a queue as start_queue! gives it, got: #{inspect(other, limit: 5)}"
  end

  defp refs!(queue, refs) when is_list(refs) and length(refs) >= 0 do
    queue!(queue)
    Enum.map(refs, &ref!(&1, queue))
  end

  defp refs!(queue, ref), do: [ref!(ref, queue!(queue))]

  defp ref!({partition, offset} = ref, queue)
       when is_integer(partition) and is_integer(offset) and offset >= 0 do
    partition in 0..(queue.partitions - 1) ||
      raise ArgumentError,
            "no message of this queue, it has #{queue.partitions} partitions, numbered from 0: #{inspect(ref)}"

    ref
  end

  defp ref!(other, _queue) do
    raise ArgumentError,
          "expected {partition, offset} as publish/3 gives it, or a list of them, got: #{inspect(other, limit: 5)}"
  end

  defp config(queue, options),
    do: Config.new!(queue |> options(options) |> Keyword.delete(:name), :producer)

  # ---- the sandbox

  defp sandbox(:shared),
    do: {shared(__MODULE__.Sandbox, {Sandbox, name: __MODULE__.Sandbox}), false}

  defp sandbox(:own) do
    {:ok, pid} = DynamicSupervisor.start_child(Kmq.SandboxSupervisor, temporary({Sandbox, []}))
    hosts = Sandbox.bootstrap(pid)

    # After all that the test has started is down, and that includes its trackers: no last line about a cluster that is gone.
    on_exit(fn ->
      await_trackers(hosts)
      DynamicSupervisor.terminate_child(Kmq.SandboxSupervisor, pid)
    end)

    {pid, true}
  end

  defp sandbox(other) do
    # Asked, so that what is none says so.
    _hosts = Sandbox.bootstrap(other)
    {GenServer.whereis(other), true}
  end

  # Outside of tests and their setups there is nobody to wait for.
  defp on_exit(fun) do
    if Code.ensure_loaded?(ExUnit.Callbacks), do: apply(ExUnit.Callbacks, :on_exit, [fun])
  rescue
    ArgumentError -> :ok
  end

  defp shared(name, spec) do
    case Process.whereis(name) do
      nil ->
        case DynamicSupervisor.start_child(Kmq.SandboxSupervisor, temporary(spec)) do
          {:ok, pid} -> pid
          {:error, {:already_started, pid}} -> pid
        end

      pid ->
        pid
    end
  end

  defp temporary(spec), do: Supervisor.child_spec(spec, restart: :temporary)

  defp await_trackers(hosts) do
    keys = [{{{Tracker, hosts, :_, :_}, :"$1", :_}, [], [:"$1"]}]

    for pid <- Registry.select(Kmq.Registry, keys) do
      monitor = Process.monitor(pid)

      receive do
        {:DOWN, ^monitor, _, _, _} -> :ok
      after
        @timeout_ms -> :ok
      end
    end
  end

  defp like(refs, [one]) when not is_list(refs), do: one
  defp like(_refs, list), do: list

  defp ok!(:ok), do: :ok
  defp ok!({:ok, value}), do: value
  defp ok!({:error, %Error{} = error}), do: raise(error)

  defp ok!({:error, results}) when is_list(results) do
    {:error, error} = Enum.find(results, &match?({:error, _}, &1))
    raise error
  end
end
