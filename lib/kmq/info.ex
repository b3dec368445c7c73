defmodule Kmq.Info do
  @moduledoc """
  What a consumer, a pipeline, a publisher or a tracker holds just now: the answer of `Kmq.info/1`. In iex it shows as a table.

  `:kind` is `:consumer`, `:pipeline`, `:publisher` or `:tracker`; `:name` and `:group` say whose it is; `:members` are the members of
  the group in it, one for each producer of a pipeline: `%{index:, connected?:, unwritten:}`.

  Of each partition of a consumer or pipeline, in `:partitions`:

    * `:topic`, `:partition`, and `:member`, the index of the member that has it
    * `:state` - `:assigned`; `:paused` (see `Kmq.pause/2`); `:released`: no longer assigned here, some of its messages are still in work
    * `:end` - one past the last message, as the broker told it with the last messages; `nil`: not known yet
    * `:committed` - the group's commit as this member has it acknowledged; `nil`: none yet
    * `:lag` - how far the group is behind the end: what was not handed out yet (with `delivery: :offsets` what is not settled), and what
      was, until its commit is acknowledged. 0 when all is done; `nil` where it is not known (nothing was fetched yet, the topic is a new one)
    * `:buffered` - fetched by the engine and not handed out
    * `:started` - of these, ready to be handed out: their START is durable (in modes without markers: all)
    * `:open` - handed out and not settled
    * `:oldest_open_ms` - how long ago the oldest of these was handed out, 0 when nothing is open. Known to the thousandth part of
      `:max_processing_time`; of a message whose time was extended at least so much

  `:total` has the sums (`:oldest_open_ms`: the maximum; `:lag` over the partitions where it is known), `:assigned`, the number of
  partitions, and `:unwritten`: settled, and the marker that says so is not sent yet.

  All of it is known in the process itself: it costs no question to a broker, and is as old as the last answer of one.

  Of a publisher there is `total: %{queued: n}`: messages no broker has acknowledged yet. Of a tracker `:partitions` has `:topic` (of the
  queue), `:partition`, `:lag` (markers not read yet), `:open`, `:oldest_open_ms`, `:due` and `:next_due_ms` (`nil`: never); see `Kmq.Tracker.info/1`.
  """

  alias Kmq.{Ask, CommandLine, Handle, Telemetry, Tracker}

  defstruct [:kind, :name, :group, members: [], partitions: [], total: %{}]

  @type partition :: %{required(atom) => term}
  @type t :: %__MODULE__{
          kind: :consumer | :pipeline | :publisher | :tracker,
          name: term,
          group: String.t() | nil,
          members: [map],
          partitions: [partition],
          total: %{atom => integer}
        }

  # ---- who is who: processes of Kmq say so in the registry

  @doc false
  # Called by the process itself. `{:consumer, key, group}`, `{:producer, {name, index}, group}`, `{:publisher, ref, nil}`,
  # `{:tracker, name, group}`, `{:sandbox, name, nil}`
  @spec register({atom, term, String.t() | nil}) :: :ok
  def register(who) do
    {:ok, _} = Registry.register(Kmq.Registry, {:info, self()}, who)
    :ok
  end

  @modules %{
    consumer: Kmq.Consumer,
    producer: OffBroadway.Kmq.Producer,
    publisher: Kmq.Publisher,
    tracker: Tracker,
    sandbox: Kmq.Sandbox
  }

  @doc false
  # What runs in a process of this node, where it is one of Kmq's that a user may know.
  @spec module(pid) :: module | nil
  def module(pid) do
    with {kind, _name, _group} <- registered(pid), do: @modules[kind]
  end

  @doc false
  # Whether that is the name of a pipeline of this node.
  @spec pipeline?(term) :: boolean
  def pipeline?(name), do: members(name) != []

  @doc false
  # The handles of a consumer or pipeline: `{kind, name, group, [{index, key}]}`; others as they registered, with their pid.
  @spec find(term) ::
          {:consumer | :pipeline, term, String.t(), [{non_neg_integer, term}]}
          | {:publisher | :tracker, term, String.t() | nil, pid}
  def find(server) do
    case {members(server), pid(server)} do
      {[_ | _] = members, _pid} ->
        [{_, group} | _] = members
        keys = Enum.sort(for {index, _group} <- members, do: {index, {server, index}})
        {:pipeline, server, group, keys}

      {[], pid} when is_pid(pid) ->
        pid |> registered() |> found(pid, server)

      {[], nil} ->
        unknown(server)
    end
  end

  defp found({:consumer, key, group}, _pid, server), do: {:consumer, server, group, [{0, key}]}
  defp found({:producer, {name, _index}, _group}, _pid, _server), do: find(name)
  defp found({:sandbox, _name, _group}, _pid, server), do: unknown(server)
  defp found({kind, _own, group}, pid, server), do: {kind, server, group, pid}
  defp found(nil, _pid, server), do: unknown(server)

  defp unknown(server) do
    raise ArgumentError,
          "expected a consumer, a pipeline's name, a publisher or a tracker that runs on this node, got: #{inspect(server)}"
  end

  defp pid(server) do
    case Ask.resolve(server) do
      pid when is_pid(pid) -> pid
      _none_or_elsewhere -> nil
    end
  end

  defp registered(pid) do
    case Registry.lookup(Kmq.Registry, {:info, pid}) do
      [{^pid, who}] -> who
      [] -> nil
    end
  end

  # Its producers; and where one is just started again, the member of the group that waits for it.
  defp members(name) do
    # Names may look like patterns: they are compared, not matched.
    producers =
      for {{:producer, {^name, index}, group}} <- registered_producers(),
          into: %{},
          do: {index, group}

    members =
      for {{^name, index}, pid} <- registered_members(),
          is_integer(index) and not is_map_key(producers, index),
          {_pid, receipts} <- Registry.lookup(Kmq.Registry, {:receipts, pid}),
          into: producers,
          do: {index, receipts.group}

    Map.to_list(members)
  end

  defp registered_producers do
    Registry.select(Kmq.Registry, [
      {{{:info, :_}, :_, {:producer, {:"$1", :"$2"}, :"$3"}}, [],
       [{{{{:producer, {{:"$1", :"$2"}}, :"$3"}}}}]}
    ])
  end

  defp registered_members,
    do: Registry.select(Kmq.Registry, [{{{:native, :"$1"}, :"$2", :_}, [], [{{:"$1", :"$2"}}]}])

  # ---- looking

  @doc false
  @spec get(term) :: t
  def get(server) do
    case find(server) do
      {:publisher, name, _group, pid} ->
        %__MODULE__{kind: :publisher, name: name, total: %{queued: Kmq.Publisher.queued(pid)}}

      {:tracker, name, group, pid} ->
        tracker(name, group, Tracker.info(pid))

      {kind, name, group, keys} ->
        views = for {index, key} <- keys, do: {index, view(key)}

        partitions =
          for {index, {_, rows}} <- views, row <- rows, do: Map.put(row, :member, index)

        members =
          for {index, {unwritten, _}} <- views,
              do: %{index: index, connected?: unwritten != nil, unwritten: unwritten || 0}

        %__MODULE__{
          kind: kind,
          name: name,
          group: group,
          members: members,
          partitions: Enum.sort_by(partitions, &{&1.topic, &1.partition, &1.member}),
          total: total(partitions, members)
        }
    end
  end

  defp view(key) do
    case Registry.lookup(Kmq.Registry, {:native, key}) do
      [{pid, ref}] -> view_of(%Handle{pid: pid, ref: ref})
      [] -> {nil, []}
    end
  end

  defp view_of(handle) do
    info = Handle.info(handle)
    {info.ends, rows(info)}
  end

  @doc false
  # One row for each partition: what is assigned, with what is still open of its earlier assignments.
  @spec rows(map) :: [partition]
  def rows(%{partitions: slots}) do
    slots
    |> Enum.group_by(&{&1.topic, &1.partition})
    |> Enum.map(fn {{topic, partition}, slots} ->
      row(Enum.find(slots, &(&1.state == :assigned)), slots, %{topic: topic, partition: partition})
    end)
    |> Enum.sort_by(&{&1.topic, &1.partition})
  end

  defp row(assigned, slots, place) do
    Map.merge(place, %{
      state: state(assigned),
      end: known(assigned, :end),
      committed: known(assigned, :committed),
      lag: known(assigned, :lag),
      buffered: if(assigned, do: assigned.buffered, else: 0),
      started: if(assigned, do: assigned.started, else: 0),
      open: slots |> Enum.map(& &1.open) |> Enum.sum(),
      oldest_open_ms: slots |> Enum.map(& &1.oldest_open_ms) |> Enum.max() |> max(0)
    })
  end

  defp state(nil), do: :released
  defp state(%{paused: true}), do: :paused
  defp state(_slot), do: :assigned

  defp known(nil, _key), do: nil
  defp known(slot, key), do: if(slot[key] >= 0, do: slot[key])

  defp total(rows, members) do
    sums = for key <- [:lag, :buffered, :started, :open], do: {key, sum(rows, key)}

    Map.new(sums)
    |> Map.put(:assigned, Enum.count(rows, &(&1.state != :released)))
    |> Map.put(:oldest_open_ms, rows |> Enum.map(& &1.oldest_open_ms) |> Enum.max(fn -> 0 end))
    |> Map.put(:unwritten, members |> Enum.map(& &1.unwritten) |> Enum.sum())
  end

  defp sum(rows, key), do: rows |> Enum.map(&(Map.get(&1, key) || 0)) |> Enum.sum()

  defp tracker(name, group, {:ok, info}) do
    rows =
      for p <- info.partitions do
        %{
          topic: p.topic,
          partition: p.partition,
          state: p.state,
          lag: p.lag,
          open: p.open,
          oldest_open_ms: max(p.oldest_age_ms, 0),
          due: p.due,
          next_due_ms: if(p.next_due_ms >= 0, do: p.next_due_ms)
        }
      end

    total = Map.new([:lag, :open, :due], &{&1, sum(rows, &1)})
    rows = Enum.sort_by(rows, &{&1.topic, &1.partition})
    %__MODULE__{kind: :tracker, name: name, group: group, partitions: rows, total: total}
  end

  # Its program does not run just now: there is nothing to say.
  defp tracker(name, group, {:error, _error}),
    do: %__MODULE__{kind: :tracker, name: name, group: group}

  # ---- gauges

  @doc false
  # What is known goes out, what is not known does not: a series that stops is better than one that lies.
  @spec gauges(Handle.t(), term, String.t()) :: :ok
  def gauges(%Handle{} = handle, key, group) do
    {unwritten, rows} = view_of(handle)
    meta = %{handle: key, group: group}

    for row <- rows do
      values = Map.take(row, [:buffered, :started, :open, :oldest_open_ms])
      values = if row.lag, do: Map.put(values, :lag, row.lag), else: values

      Telemetry.execute(
        [:kmq, :partition],
        values,
        Map.merge(meta, Map.take(row, [:topic, :partition, :state]))
      )
    end

    total = total(rows, [%{unwritten: unwritten}])
    total = if Enum.any?(rows, & &1.lag), do: total, else: Map.delete(total, :lag)
    Telemetry.execute([:kmq, :member], total, meta)
  end

  # ---- in iex

  @doc false
  @spec table(t) :: iodata
  def table(%__MODULE__{kind: :publisher} = info),
    do: "#{info.total.queued} messages in its queue"

  def table(%__MODULE__{partitions: []}), do: "no partitions"

  def table(%__MODULE__{kind: :tracker} = info) do
    heads = ["TOPIC", "PARTITION", "STATE", "LAG", "OPEN", "OLDEST", "DUE", "NEXT DUE"]

    rows =
      for p <- info.partitions do
        next = p.next_due_ms && "in #{seconds(p.next_due_ms)}"

        [p.topic, p.partition, "#{p.state}", p.lag, p.open] ++
          [oldest(p), p.due, next]
      end

    CommandLine.table([heads | rows] ++ [sums(info, [:lag, :open, nil, :due, nil])])
  end

  def table(%__MODULE__{} = info) do
    heads = ["TOPIC", "PARTITION", "STATE", "END", "COMMITTED", "LAG", "BUFFERED", "STARTED"]

    rows =
      for p <- info.partitions do
        [p.topic, p.partition, "#{p.state}", p.end, p.committed, p.lag, p.buffered, p.started] ++
          [p.open, oldest(p)]
      end

    sums = sums(info, ["", "", :lag, :buffered, :started, :open, nil])
    CommandLine.table([heads ++ ["OPEN", "OLDEST"] | rows] ++ [sums])
  end

  defp sums(info, columns) do
    ["sum", "", ""] ++
      Enum.map(columns, fn
        nil -> ""
        text when is_binary(text) -> text
        key -> info.total[key]
      end)
  end

  defp oldest(%{open: 0}), do: "-"
  defp oldest(%{oldest_open_ms: ms}), do: seconds(ms)

  defp seconds(ms), do: CommandLine.seconds(ms)

  defimpl Inspect do
    import Inspect.Algebra

    def inspect(info, options) do
      of = if info.group, do: " of #{Kernel.inspect(info.group)}", else: ""

      lines = info |> Kmq.Info.table() |> IO.iodata_to_binary() |> String.split("\n")

      head = concat(["#Kmq.Info<#{info.kind} ", to_doc(info.name, options), of])
      body = for line <- lines, do: concat(line(), "  " <> line)
      concat([head | body] ++ [line(), ">"])
    end
  end
end
