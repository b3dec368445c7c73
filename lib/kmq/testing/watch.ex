defmodule Kmq.Testing.Watch do
  @moduledoc false
  # What the topics of a test's queue say about its messages, read from outside. One process for each queue, so that each look reads
  # only what is new; it is linked to the process that started the queue, and ends with it.
  #
  # Read in the opposite order of the writes - commits, then markers, then dead letters and copies - so that what an older record
  # promises is always there: a commit has its START, an END of a redelivery its copy.
  #
  # The end of a partition is asked for as "the offset of the time -1", one question: for both watermarks, and for a reading that comes to
  # the end by itself, the mock cluster takes 40 ms.

  use GenServer

  alias Kmq.{Ask, DeadLetter, Error, Inspect, Message, Publisher}

  @call_ms 10_000
  @close_ms 1_000
  @chunk 1_000
  # Kafka's time for the end of a partition.
  @latest -1

  # next: {topic, partition} => offset to read next.
  defstruct [:queue, :config, :admin, :publisher, next: %{}, books: %{}, copies: %{}, dead: %{}]

  @type look :: %{
          delivery: atom,
          commits: %{non_neg_integer => integer},
          books: map,
          copies: map,
          dead: map
        }

  @spec start_link(Kmq.Testing.Queue.t(), Kmq.Config.t()) :: GenServer.on_start()
  def start_link(queue, config),
    do: GenServer.start_link(__MODULE__, {queue, config}, name: name(queue))

  @doc "The queue's publisher."
  @spec publisher(Kmq.Testing.Queue.t()) :: pid
  def publisher(queue), do: call(queue, :publisher)

  @spec look(Kmq.Testing.Queue.t()) :: look
  def look(queue), do: call(queue, :look)

  @doc "Positions of a group in a topic of the queue, by partition; those it has none for are missing."
  @spec committed(Kmq.Testing.Queue.t(), String.t(), String.t()) :: %{non_neg_integer => integer}
  def committed(queue, group, topic), do: call(queue, {:committed, group, topic})

  defp call(queue, request) do
    case Ask.call(__MODULE__, "look/1", name(queue), request, 2 * @call_ms) do
      {:ok, result} ->
        result

      {:error, %Error{reason: :closed} = error} ->
        text =
          "the queue #{queue.topic} is closed: it ends with the process that has called start_queue!"

        raise %{error | message: text}

      {:error, error} ->
        raise error
    end
  end

  defp name(queue), do: {:via, Registry, {Kmq.Registry, {__MODULE__, queue.topic}}}

  @impl true
  def init({queue, config}) do
    Process.flag(:trap_exit, true)

    with {:ok, admin} <- open(config, queue.group_id),
         {:ok, publisher} <- Publisher.start_link(hosts: queue.hosts) do
      {:ok, %__MODULE__{queue: queue, config: config, admin: admin, publisher: publisher}}
    else
      {:error, error} -> {:stop, error}
    end
  end

  @impl true
  def handle_call(:publisher, _from, state), do: {:reply, {:ok, state.publisher}, state}

  def handle_call(:look, _from, state) do
    case look_now(state) do
      {:ok, look, state} -> {:reply, {:ok, look}, state}
      {:error, error} -> {:reply, {:error, error}, state}
    end
  end

  def handle_call({:committed, group, topic}, _from, state) do
    result =
      with {:ok, admin} <- open(state.config, group) do
        try do
          commits(admin, topic, state.queue.partitions)
        after
          :kmq_nif.admin_close(admin)
        end
      end

    {:reply, result, state}
  end

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({:EXIT, _pid, reason}, state), do: {:stop, reason, state}

  def handle_info(message, state) do
    Ask.dropped(__MODULE__, message)
    {:noreply, state}
  end

  @impl true
  def terminate(_reason, state) do
    _closed_before? = Publisher.close(state.publisher, @close_ms)
    :kmq_nif.admin_close(state.admin)
  end

  defp open(config, group) do
    props = [{"group.id", group} | List.keydelete(config.admin_props, "group.id", 0)]
    native(Kmq.Security.admin_open(props, 10_000))
  end

  defp look_now(%{queue: queue, config: config} = state) do
    markers = config.marker_topics[queue.topic]
    letters = config.dead_letter_topics[queue.topic]

    with {:ok, commits} <- commits(state.admin, queue.topic, queue.partitions),
         {:ok, state} <- read(state, markers, &marker/3),
         {:ok, state} <- read(state, letters, &letter/3),
         {:ok, state} <- read(state, queue.topic, &copy/3) do
      look = Map.take(state, [:books, :copies, :dead])
      {:ok, Map.merge(look, %{commits: commits, delivery: config.delivery}), state}
    end
  end

  defp commits(admin, topic, partitions) do
    asked = for p <- 0..(partitions - 1), do: {topic, p}

    with {:ok, list} <- native(:kmq_nif.admin_committed(admin, asked, @call_ms)),
         do: {:ok, for({_, p, offset} <- list, offset >= 0, into: %{}, do: {p, offset})}
  end

  defp read(state, topic, apply) do
    Enum.reduce_while(0..(state.queue.partitions - 1), {:ok, state}, fn p, {:ok, state} ->
      case read(state, topic, p, apply) do
        {:ok, state} -> {:cont, {:ok, state}}
        error -> {:halt, error}
      end
    end)
  end

  defp read(state, topic, p, apply) do
    with {:ok, last} <-
           native(:kmq_nif.admin_offset_for_time(state.admin, topic, p, @latest, @call_ms)),
         do: read(state, topic, p, Map.get(state.next, {topic, p}, 0), last, apply)
  end

  defp read(state, topic, p, from, last, _apply) when from >= last,
    do: {:ok, %{state | next: Map.put(state.next, {topic, p}, from)}}

  defp read(state, topic, p, from, last, apply) do
    n = min(@chunk, last - from)

    with {:ok, records} <-
           native(:kmq_nif.admin_read(state.admin, topic, p, from, n, @call_ms)) do
      state = Enum.reduce(records, state, &apply.(&2, p, &1))
      read(state, topic, p, from + n, last, apply)
    end
  end

  defp native({:error, error}), do: {:error, Error.from_native(error, "looking at the queue")}
  defp native(result), do: result

  defp marker(state, p, record) do
    book = state.books[p] || Inspect.book(state.config, state.queue.topic, %{})
    %{state | books: Map.put(state.books, p, Inspect.apply_record(record, book))}
  end

  # Of each message the places of its copies, newest first, and why.
  defp copy(%{queue: queue} = state, p, {offset, ts, _key, _value, headers, _, _, _}) do
    headers = headers |> Enum.reverse() |> Map.new()
    {topic, p0, o0, _} = Message.id(headers["kmq-origin"], queue.topic, p, offset, ts)

    if headers["kmq-group"] == queue.group_id and topic == queue.topic and {p0, o0} != {p, offset} do
      copy = {{p, offset}, headers["kmq-cause"] || "crash"}
      %{state | copies: Map.update(state.copies, {p0, o0}, [copy], &[copy | &1])}
    else
      state
    end
  end

  defp letter(%{queue: queue, config: config} = state, p, record) do
    topic = config.dead_letter_topics[queue.topic]
    letter = DeadLetter.new(record, topic, p, config.count_header)

    with true <- letter.group in [nil, queue.group_id],
         {origin, p0, o0, _} when origin == queue.topic <- letter.origin do
      %{state | dead: Map.put(state.dead, {p0, o0}, letter)}
    else
      _not_ours -> state
    end
  end
end
