defmodule Kmq.Beginning do
  @moduledoc false
  # Where reading begins: at the commit; without one as :offset_reset_policy says; and where a position is no longer there.
  #
  # All of it asks brokers and may block: Kmq.Handle runs it in a process of its own. What a broker refuses is raised, and asked for again.

  require Logger

  alias Kmq.{Config, Error, Security, Topics}

  @admin_timeout 10_000

  @type place :: {topic :: String.t(), partition :: non_neg_integer}
  @typedoc "Where a partition is read from, and whether the group's commit says so."
  @type position ::
          {topic :: String.t(), partition :: non_neg_integer, offset :: non_neg_integer,
           commit? :: boolean}

  @doc """
  Where to begin with partitions that were just assigned.

  `resets`: those that begin anew, whatever the commit says. `seen`: topics this consumer has been assigned partitions of before; one of
  these without a commit is a new topic of the same name.

  `:offset_reset_policy` holds at the group's very first start: when no partition of the topic has a commit. A partition that was born later
  begins at its beginning, and so does a topic that was made anew.

  A queue topic may have grown: its marker topic is grown first, where that is wanted. Where not, START fails and says so, and these
  partitions wait until it has grown.
  """
  @spec positions(Config.t(), [place], MapSet.t(place), MapSet.t(String.t())) :: [position]
  def positions(_config, [], _resets, _seen), do: []

  def positions(config, partitions, resets, seen) do
    with_admin(config, fn admin ->
      mine = Enum.group_by(partitions, &elem(&1, 0), &elem(&1, 1))

      counts =
        Map.new(mine, fn {topic, mine} ->
          {count, _} = ok!(:kmq_nif.admin_partitions(admin, topic, @admin_timeout))
          {topic, max(count, Enum.max(mine) + 1)}
        end)

      grow_companions(config, admin, counts)
      all = for {topic, count} <- counts, partition <- 0..(count - 1), do: {topic, partition}
      commits = ok!(:kmq_nif.admin_committed(admin, all, @admin_timeout))

      commits =
        for {topic, partition, offset} <- commits,
            offset >= 0,
            into: %{},
            do: {{topic, partition}, offset}

      begun = MapSet.new(commits, fn {{topic, _}, _} -> topic end) |> MapSet.union(seen)
      for place <- partitions, do: position(config, admin, place, commits, resets, begun)
    end)
  end

  defp grow_companions(%{create_topics: false}, _admin, _counts), do: :ok

  defp grow_companions(config, admin, counts) do
    with false <- Topics.companions?(config, admin, counts, @admin_timeout),
         {:error, error} <- Topics.prepare(config),
         do: Logger.error("kmq: #{config.group_id}: #{Exception.message(error)}")
  end

  defp position(config, admin, {topic, partition} = place, commits, resets, begun) do
    reset? = MapSet.member?(resets, place)

    case commits do
      %{^place => offset} when not reset? ->
        {topic, partition, offset, true}

      _ ->
        policy = if reset? or topic not in begun, do: config.offset_reset_policy, else: :earliest
        {topic, partition, first_offset(policy, admin, topic, partition), false}
    end
  end

  defp first_offset({:timestamp, ms}, admin, topic, partition) do
    case ok!(:kmq_nif.admin_offset_for_time(admin, topic, partition, ms, @admin_timeout)) do
      offset when offset >= 0 -> offset
      _none -> first_offset(:latest, admin, topic, partition)
    end
  end

  defp first_offset(policy, admin, topic, partition) do
    {low, high} = ok!(:kmq_nif.admin_watermarks(admin, topic, partition, @admin_timeout))
    if policy == :latest, do: high, else: low
  end

  @doc """
  A position that is out of range: retention overtook the group, or the topic was made anew. It goes on at the first message there is;
  `:again` where the position is there after all.
  """
  @spec instead_of(Config.t(), String.t(), non_neg_integer, non_neg_integer) ::
          non_neg_integer | :again
  def instead_of(config, topic, partition, position) do
    with_admin(config, fn admin ->
      {low, high} = ok!(:kmq_nif.admin_watermarks(admin, topic, partition, @admin_timeout))
      if position >= low and position <= high, do: :again, else: low
    end)
  end

  @doc """
  Is it still the topic that these records, `{offset, ms}`, were read from? A record of another time in the place of one of them, or an
  end before it, says that it is not: `{:made_anew, its first offset}`. Else `:again`; what was deleted meanwhile says nothing.
  """
  @spec doubted(Config.t(), String.t(), non_neg_integer, [{non_neg_integer, integer}]) ::
          {:made_anew, non_neg_integer} | :again
  def doubted(config, topic, partition, witnesses) do
    with_admin(config, fn admin ->
      {low, high} = ok!(:kmq_nif.admin_watermarks(admin, topic, partition, @admin_timeout))
      other? = &other?(admin, topic, partition, &1, low, high)
      if Enum.any?(witnesses, other?), do: {:made_anew, low}, else: :again
    end)
  end

  defp other?(_admin, _topic, _partition, {offset, _ms}, _low, high) when offset >= high, do: true
  defp other?(_admin, _topic, _partition, {offset, _ms}, low, _high) when offset < low, do: false

  defp other?(admin, topic, partition, {offset, ms}, _low, _high) do
    case ok!(:kmq_nif.admin_read(admin, topic, partition, offset, 1, @admin_timeout)) do
      [{^offset, time, _, _, _, _, _, _}] -> time != ms
      [] -> false
    end
  end

  defp with_admin(config, fun),
    do: ok!(Security.with_admin(config.admin_props, @admin_timeout, &{:ok, fun.(&1)}))

  defp ok!({:ok, value}), do: value
  defp ok!({:error, error}), do: raise(Error.from_native(error, "where to begin"))
end
