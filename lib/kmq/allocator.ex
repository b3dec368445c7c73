defmodule Kmq.Allocator do
  @moduledoc false
  # Which of `size` workers each key (a partition) belongs to, as a pure structure.
  #
  # A *holder* (a producer of the pipeline) takes keys and gives them back. A key is always with one worker, however many
  # holders have it: around a rebalance one may have it already that another has not given back yet.
  #
  #   held     has a holder: stays where it is
  #   busy     given back with work left: stays where it is, or two workers could have it at once
  #   free     given back in order, or never seen: may go anywhere
  #
  # Free keys that are taken are spread so that loads differ by one at most, as far as those that must stay allow; within that a
  # key goes back to the worker that had it last. So the loads stay even, however skewed the keys that come back are.
  #
  # Memory: one entry for each key that was ever taken. Costs: taking n keys is O((n + size) log) and O(all keys).

  @enforce_keys [:size]
  defstruct [:size, places: %{}, homes: %{}]

  @opaque t :: %__MODULE__{
            size: pos_integer,
            places: %{key => {index, [holder]}},
            homes: %{key => index}
          }
  @type key :: term
  @type holder :: term
  @type index :: non_neg_integer

  @doc """
  Nobody holds anything.

      iex> Kmq.Allocator.new(2) |> Kmq.Allocator.to_map()
      %{0 => [], 1 => []}
  """
  @spec new(pos_integer) :: t
  def new(size) when is_integer(size) and size > 0, do: %__MODULE__{size: size}

  @doc "How many workers there are."
  @spec size(t) :: pos_integer
  def size(t), do: t.size

  @doc """
  A holder takes keys, beside those it has.

      iex> t = Kmq.Allocator.new(2) |> Kmq.Allocator.take(:p0, [:a, :b, :c, :d])
      iex> Kmq.Allocator.to_map(t)
      %{0 => [:a, :c], 1 => [:b, :d]}
      iex> t |> Kmq.Allocator.give_back(:p0, [:b, :d], :free) |> Kmq.Allocator.to_map()
      %{0 => [:a, :c], 1 => []}

  What is held stays; what is free is spread evenly, and goes home where that is even:

      iex> t = Kmq.Allocator.new(2) |> Kmq.Allocator.take(:p0, [:a, :b, :c, :d])
      iex> t = Kmq.Allocator.give_back(t, :p0, [:a, :b, :c, :d], :free)
      iex> t |> Kmq.Allocator.take(:p0, [:d, :c]) |> Kmq.Allocator.to_map()
      %{0 => [:c], 1 => [:d]}
      iex> t |> Kmq.Allocator.take(:p0, [:a, :c]) |> Kmq.Allocator.to_map()
      %{0 => [:a], 1 => [:c]}
  """
  @spec take(t, holder, [key]) :: t
  def take(t, holder, keys) do
    {known, free} =
      keys |> Enum.uniq() |> Enum.sort() |> Enum.split_with(&is_map_key(t.places, &1))

    places =
      Enum.reduce(known, t.places, fn key, places ->
        Map.update!(places, key, fn {index, holders} -> {index, Enum.uniq([holder | holders])} end)
      end)

    spread(%{t | places: places}, holder, free)
  end

  @doc """
  A holder gives keys back: `:free` with nothing in work, `:busy` with something left. A key that others hold, too, stays with
  them; one that nobody holds has no worker any more, unless it is busy.

      iex> t = Kmq.Allocator.new(2) |> Kmq.Allocator.take(:p0, [:a, :b]) |> Kmq.Allocator.take(:p1, [:b])
      iex> t = t |> Kmq.Allocator.give_back(:p0, [:a], :busy) |> Kmq.Allocator.give_back(:p0, [:b], :free)
      iex> {Kmq.Allocator.fetch(t, :a), Kmq.Allocator.fetch(t, :b)}
      {{:ok, 0}, {:ok, 1}}
      iex> t |> Kmq.Allocator.give_back(:p1, [:b], :free) |> Kmq.Allocator.fetch(:b)
      :error
  """
  @spec give_back(t, holder, [key], :free | :busy) :: t
  def give_back(t, holder, keys, how) when how in [:free, :busy] do
    Enum.reduce(keys, t, fn key, t ->
      case t.places do
        %{^key => {index, holders}} -> left(t, key, index, List.delete(holders, holder), how)
        _ -> t
      end
    end)
  end

  defp left(t, key, index, [], :free),
    do: %{t | places: Map.delete(t.places, key), homes: Map.put(t.homes, key, index)}

  defp left(t, key, index, holders, _how),
    do: %{t | places: Map.put(t.places, key, {index, holders})}

  @doc "The worker of a key that is held or busy."
  @spec fetch(t, key) :: {:ok, index} | :error
  def fetch(t, key) do
    case t.places do
      %{^key => {index, _holders}} -> {:ok, index}
      _ -> :error
    end
  end

  @doc "Every worker with the keys that somebody holds."
  @spec to_map(t) :: %{index => [key]}
  def to_map(t) do
    held = for {key, {index, [_ | _]}} <- t.places, do: {index, key}
    none = Map.new(0..(t.size - 1), &{&1, []})

    held
    |> Enum.sort(:desc)
    |> Enum.reduce(none, fn {index, key}, map -> Map.update!(map, index, &[key | &1]) end)
  end

  @doc "All keys that have a worker, with it."
  @spec places(t) :: [{key, index}]
  def places(t), do: for({key, {index, _}} <- t.places, do: {key, index})

  # ---- spreading

  defp spread(t, _holder, []), do: t

  defp spread(t, holder, free) do
    loads = Map.new(to_map(t), fn {index, keys} -> {index, length(keys)} end)
    {level, extra} = level(Map.values(loads), length(free))

    # First those whose last worker has room below the level, or may be one of those above it.
    {loads, extra, placed, strangers} =
      Enum.reduce(free, {loads, extra, [], []}, fn key, {loads, extra, placed, strangers} ->
        home = Map.get(t.homes, key)
        load = loads[home]

        cond do
          load == nil or load > level or (load == level and extra == 0) ->
            {loads, extra, placed, [key | strangers]}

          load == level ->
            {Map.put(loads, home, load + 1), extra - 1, [{key, home} | placed], strangers}

          true ->
            {Map.put(loads, home, load + 1), extra, [{key, home} | placed], strangers}
        end
      end)

    {_loads, _extra, placed} =
      strangers
      |> Enum.reverse()
      |> Enum.reduce({loads, extra, placed}, fn key, {loads, extra, placed} ->
        {index, load} = Enum.min_by(loads, fn {index, load} -> {load, index} end)
        {Map.put(loads, index, load + 1), extra, [{key, index} | placed]}
      end)

    places = Map.new(placed, fn {key, index} -> {key, {index, [holder]}} end)
    %{t | places: Map.merge(t.places, places), homes: Map.drop(t.homes, free)}
  end

  # n more, always to the emptiest: afterwards nobody is below `level` and `extra` of those at it have one more.
  defp level(loads, n), do: level(Enum.min(loads), loads, n)

  defp level(level, loads, n) do
    at = Enum.count(loads, &(&1 <= level))

    if n < at,
      do: {level, n},
      else: level(level + 1, loads, n - at)
  end
end
