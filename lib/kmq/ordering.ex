defmodule Kmq.Ordering do
  @moduledoc false
  # Which processor, and which consumer of each batcher, a message goes to where an order is kept.
  #
  #   prepare_for_start ── prepare/2 ─┐                         a row for each allocated partition:
  #   Kmq.Handle ── assigned/3 ───────┼─> this process ─writes─> ETS {{set, topic, partition}, index}
  #              ── revoked/4 ────────┘   Kmq.Allocator, one for        ▲
  #                                       each set of a pipeline        └─ reads: partition_by, in producers and batchers
  #
  # A pipeline has a set of processors and one of consumers for each batcher. All its producer indices share them, so that a
  # partition that moves from one to the other stays with its processor. A handle says what it has before its first message is
  # handed out, and what it gave back after the drain; so a reader finds the row, and never waits.
  #
  # The table is Kmq.Supervisor's: it and the state in it outlive a crash of this process. Memory: a row for each partition and
  # set, and the pipeline's own, which goes when neither its owner (who prepared it) nor a handle of it is left.
  use GenServer

  alias Kmq.{Allocator, Lanes}
  alias OffBroadway.Kmq.Acknowledger

  @table __MODULE__
  @timeout 5_000

  @typedoc "What a partition_by needs: nothing but constants."
  @type scope ::
          {:partition, set :: pos_integer, size :: pos_integer} | {:key, size :: pos_integer}
  @type place :: {topic :: String.t(), partition :: non_neg_integer}

  @doc "Makes the table, in the process that shall own it."
  @spec make_table() :: :ok
  def make_table do
    :ets.new(@table, [:named_table, :public, :set, read_concurrency: true])
    :ok
  end

  @spec start_link(term) :: GenServer.on_start()
  def start_link(_), do: GenServer.start_link(__MODULE__, nil, name: __MODULE__)

  @doc "The sets of a pipeline that the caller starts, by name with their sizes: their numbers. What its handles still have is placed."
  @spec prepare(term, [{term, pos_integer}]) :: %{term => pos_integer}
  def prepare(pipeline, sets),
    do: GenServer.call(__MODULE__, {:prepare, pipeline, sets, self()}, @timeout)

  @doc "The calling handle, the index-th of its pipeline, has these partitions, beside what it had."
  @spec assigned(term, non_neg_integer, [place]) :: :ok
  def assigned(pipeline, index, places),
    do: GenServer.call(__MODULE__, {:assigned, pipeline, index, self(), places}, @timeout)

  @doc "It has given these back; `busy`: those of which something is still in work."
  @spec revoked(term, non_neg_integer, [place], [place]) :: :ok
  def revoked(pipeline, index, places, busy),
    do: GenServer.call(__MODULE__, {:revoked, pipeline, index, places, busy}, @timeout)

  # ---- readers, on the hot path

  @doc "Broadway's partition_by for processors. A message from a producer knows its lane, one from a test has metadata at most."
  @spec processor(map, scope) :: non_neg_integer
  def processor(%{acknowledger: {Acknowledger, _, {_, _, {_, _, lane, _} = mark}}}, _scope) do
    Lanes.passed(mark)
    lane
  end

  def processor(message, scope), do: lane(message, scope)

  @doc "Broadway's partition_by for the consumers of a batcher. A message that is seen here has left its processor."
  @spec batcher(map, scope) :: non_neg_integer
  def batcher(message, scope) do
    with %{acknowledger: {Acknowledger, _, data}} <- message, do: Lanes.left(elem(data, 2))
    lane(message, scope)
  end

  @doc """
  Where a message goes by its metadata. Keys differ by all their bytes, and `nil` from `""`; null keys are spread. What has no
  place in Kafka (a test's message) goes to the first.

      iex> a = Kmq.Ordering.lane(%{metadata: %{topic: "t", key: "a"}}, {:key, 8})
      iex> a == Kmq.Ordering.lane(%{metadata: %{topic: "t", key: "a", partition: 7, offset: 9}}, {:key, 8})
      true
      iex> for offset <- 0..3, do: Kmq.Ordering.lane(%{metadata: %{topic: "t", key: nil, partition: 0, offset: offset}}, {:key, 4})
      [0, 1, 2, 3]
      iex> Kmq.Ordering.lane(%{metadata: %{}}, {:key, 4})
      0
  """
  @spec lane(map, scope) :: non_neg_integer
  def lane(%{metadata: %{topic: topic, partition: partition}}, {:partition, set, size}) do
    :ets.lookup_element(@table, {set, topic, partition}, 2)
  rescue
    # Not allocated (a test's message), or of a pipeline that is over.
    ArgumentError -> :erlang.phash2({topic, partition}, size)
  end

  # By another hash than Kafka's partitioner: with the same one the keys of one partition would share few processors.
  def lane(%{metadata: %{key: key} = metadata}, {:key, size}) when is_binary(key) do
    topic = if is_binary(metadata[:topic]), do: metadata.topic, else: ""
    rem(:erlang.crc32([topic, 0, key]), size)
  end

  def lane(%{metadata: %{partition: partition, offset: offset}}, {:key, size})
      when is_integer(partition) and is_integer(offset),
      do: rem(abs(partition + offset), size)

  def lane(%{metadata: %{key: key}}, {:key, size}), do: :erlang.phash2(key, size)
  def lane(_message, _scope), do: 0

  # ---- the process

  @impl true
  def init(_) do
    # After a crash: the pipelines are in the table, their processes are watched anew.
    monitors =
      for {{:pipeline, name}, pipeline} <- :ets.match_object(@table, {{:pipeline, :_}, :_}),
          {what, pid} <- [
            {:owner, pipeline.owner} | Enum.map(pipeline.holders, &{elem(&1, 0), elem(&1, 1).pid})
          ],
          pid != nil,
          into: %{},
          do: {Process.monitor(pid), {name, what, pid}}

    {:ok, monitors}
  end

  @impl true
  def handle_call({:prepare, name, sets, owner}, _from, monitors) do
    old = fetch(name)
    pipeline = if old && same?(old, sets), do: old, else: fresh(name, sets, old)
    put(name, %{pipeline | owner: owner})
    numbers = Map.new(pipeline.sets, fn {set, {number, _allocator}} -> {set, number} end)
    {:reply, numbers, Map.put(monitors, Process.monitor(owner), {name, :owner, owner})}
  end

  def handle_call({:assigned, name, index, pid, places}, _from, monitors) do
    case fetch(name) do
      nil ->
        {:reply, :ok, monitors}

      pipeline ->
        {holder, monitors} =
          case pipeline.holders do
            %{^index => %{pid: ^pid} = holder} ->
              {holder, monitors}

            _ ->
              monitors = Map.put(monitors, Process.monitor(pid), {name, index, pid})
              {%{pid: pid, places: []}, monitors}
          end

        pipeline = forget_other(name, pipeline, index, pid)
        holder = %{holder | places: Enum.uniq(places ++ holder.places)}
        pipeline = %{pipeline | holders: Map.put(pipeline.holders, index, holder)}
        put(name, change(name, pipeline, &Allocator.take(&1, index, places)))
        {:reply, :ok, monitors}
    end
  end

  def handle_call({:revoked, name, index, places, busy}, {pid, _}, monitors) do
    with %{holders: %{^index => %{pid: ^pid}}} = pipeline <- fetch(name),
         do: put(name, give_back(name, pipeline, index, places, busy))

    {:reply, :ok, monitors}
  end

  def handle_call(request, _from, monitors),
    do: {:reply, Kmq.Ask.unknown(__MODULE__, request), monitors}

  @impl true
  def handle_cast(request, monitors) do
    Kmq.Ask.dropped(__MODULE__, request)
    {:noreply, monitors}
  end

  @impl true
  def handle_info({:DOWN, monitor, :process, _pid, _reason}, monitors) do
    case Map.pop(monitors, monitor) do
      {nil, monitors} ->
        {:noreply, monitors}

      {{name, what, pid}, monitors} ->
        with %{} = pipeline <- fetch(name), do: gone(name, pipeline, what, pid)
        {:noreply, monitors}
    end
  end

  def handle_info(_message, monitors), do: {:noreply, monitors}

  defp gone(name, %{owner: pid} = pipeline, :owner, pid),
    do: keep_or_delete(name, %{pipeline | owner: nil})

  defp gone(name, pipeline, index, pid) do
    case pipeline.holders do
      %{^index => %{pid: ^pid, places: places}} ->
        # What was in work when it ended may be so for a while.
        pipeline = give_back(name, pipeline, index, places, places)
        keep_or_delete(name, %{pipeline | holders: Map.delete(pipeline.holders, index)})

      _ ->
        :ok
    end
  end

  defp keep_or_delete(name, %{owner: nil, holders: holders} = pipeline) when holders == %{} do
    for {_set, {number, _}} <- pipeline.sets,
        do: :ets.match_delete(@table, {{number, :_, :_}, :_})

    :ets.delete(@table, {:pipeline, name})
  end

  defp keep_or_delete(name, pipeline), do: put(name, pipeline)

  # Another handle had that index before, and was not seen to end yet.
  defp forget_other(name, pipeline, index, pid) do
    case pipeline.holders do
      %{^index => %{pid: other, places: places}} when other != pid ->
        give_back(name, pipeline, index, places, places)

      _ ->
        pipeline
    end
  end

  defp give_back(name, pipeline, index, places, busy) do
    free = places -- busy

    pipeline =
      change(name, pipeline, fn allocator ->
        allocator
        |> Allocator.give_back(index, busy, :busy)
        |> Allocator.give_back(index, free, :free)
      end)

    case pipeline.holders do
      %{^index => holder} ->
        put_in(pipeline.holders[index], %{holder | places: holder.places -- places})

      _ ->
        pipeline
    end
  end

  # Rows are written before anyone may need them, and go only when nobody holds their partition.
  defp change(_name, pipeline, fun) do
    sets =
      Map.new(pipeline.sets, fn {set, {number, allocator}} ->
        before = Allocator.places(allocator)
        allocator = fun.(allocator)
        now = Allocator.places(allocator)
        :ets.insert(@table, for({{topic, p}, index} <- now, do: {{number, topic, p}, index}))

        for {{topic, p} = place, _} <- before,
            Allocator.fetch(allocator, place) == :error,
            do: :ets.delete(@table, {number, topic, p})

        {set, {number, allocator}}
      end)

    %{pipeline | sets: sets}
  end

  defp same?(pipeline, sets) do
    Map.new(pipeline.sets, fn {set, {_, allocator}} -> {set, Allocator.size(allocator)} end) ==
      Map.new(sets)
  end

  # Its processors are new ones: of what the last life had in work nothing is with them.
  defp fresh(name, sets, old) do
    old &&
      for {_set, {number, _}} <- old.sets, do: :ets.match_delete(@table, {{number, :_, :_}, :_})

    sets =
      Map.new(sets, fn {set, size} ->
        {set, {System.unique_integer([:positive]), Allocator.new(size)}}
      end)

    holders = if old, do: old.holders, else: %{}
    pipeline = %{owner: nil, sets: sets, holders: holders}

    Enum.reduce(holders, pipeline, fn {index, %{places: places}}, pipeline ->
      change(name, pipeline, &Allocator.take(&1, index, places))
    end)
  end

  defp fetch(name) do
    case :ets.lookup(@table, {:pipeline, name}) do
      [{_, pipeline}] -> pipeline
      [] -> nil
    end
  end

  defp put(name, pipeline), do: :ets.insert(@table, {{:pipeline, name}, pipeline})
end
