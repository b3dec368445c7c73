defmodule Kmq.AllocatorTest do
  use ExUnit.Case, async: true

  alias Kmq.Allocator

  doctest Kmq.Allocator

  defp loads(t), do: t |> Allocator.to_map() |> Map.values() |> Enum.map(&length/1)
  defp spread(t), do: Enum.max(loads(t)) - Enum.min(loads(t))

  test "a rebalance that takes every second partition leaves no worker idle" do
    t = Allocator.new(4) |> Allocator.take(0, Enum.to_list(0..15))
    t = Allocator.give_back(t, 0, Enum.to_list(0..15), :free)
    # Partitions 0, 4, 8 and 12 were all at the first worker.
    t = Allocator.take(t, 0, [0, 4, 8, 12])
    assert loads(t) == [1, 1, 1, 1]
    assert Allocator.fetch(t, 0) == {:ok, 0}
  end

  test "what stays goes home, whatever else comes and goes" do
    t = Allocator.new(3) |> Allocator.take(0, Enum.to_list(0..8))
    before = Map.new(Allocator.places(t))

    t =
      t
      |> Allocator.give_back(0, Enum.to_list(0..8), :free)
      |> Allocator.take(0, Enum.to_list(8..0//-1))

    assert Map.new(Allocator.places(t)) == before
  end

  test "the new holder is there before the old one has gone: the partition stays where it is" do
    t = Allocator.new(2) |> Allocator.take(0, [:a, :b]) |> Allocator.take(1, [:c])
    {:ok, index} = Allocator.fetch(t, :b)
    t = Allocator.take(t, 1, [:b])
    assert Allocator.fetch(t, :b) == {:ok, index}
    t = Allocator.give_back(t, 0, [:a, :b], :free)
    assert Allocator.fetch(t, :b) == {:ok, index}
  end

  test "one that was given back with work left stays, uneven or not" do
    t = Allocator.new(2) |> Allocator.take(0, [0, 1, 2, 3])
    t = Allocator.give_back(t, 0, [0, 1, 2, 3], :busy)
    t = Allocator.take(t, 1, [0, 2])
    assert Allocator.to_map(t) == %{0 => [0, 2], 1 => []}
    # New ones make up for it.
    assert Allocator.to_map(Allocator.take(t, 1, [4, 5])) == %{0 => [0, 2], 1 => [4, 5]}
  end

  test "random takes and returns: one worker a key, never moved while held or busy, even where nothing must stay" do
    seed = ExUnit.configuration()[:seed]
    IO.puts("allocator: seed #{seed}")
    :rand.seed(:exsss, {seed, 4, 5})

    for _ <- 1..200 do
      size = :rand.uniform(6)
      keys = Enum.to_list(1..:rand.uniform(20))

      Enum.reduce(1..30, {Allocator.new(size), %{}}, fn _, {t, held} ->
        holder = :rand.uniform(3)
        some = Enum.filter(keys, fn _ -> :rand.uniform(2) == 1 end)
        before = Map.new(Allocator.places(t))
        mine = Map.get(held, holder, MapSet.new())

        {t, mine, free?} =
          case :rand.uniform(3) do
            1 ->
              {Allocator.take(t, holder, some), MapSet.union(mine, MapSet.new(some)), false}

            2 ->
              {Allocator.give_back(t, holder, some, :free),
               MapSet.difference(mine, MapSet.new(some)), true}

            3 ->
              {Allocator.give_back(t, holder, some, :busy),
               MapSet.difference(mine, MapSet.new(some)), false}
          end

        held = Map.put(held, holder, mine)
        now = Map.new(Allocator.places(t))
        all = Enum.reduce(Map.values(held), MapSet.new(), &MapSet.union/2)
        for key <- all, do: assert(is_map_key(now, key))

        for {key, index} <- before, not free? or key in all do
          assert now[key] == index
        end

        if t |> Allocator.to_map() |> Map.values() |> List.flatten() |> length() == map_size(now) and
             before == %{},
           do: assert(spread(t) <= 1)

        {t, held}
      end)
    end
  end

  test "even after every generation in which all was given back in order" do
    seed = ExUnit.configuration()[:seed]
    :rand.seed(:exsss, {seed, 6, 7})

    Enum.reduce(1..300, {Allocator.new(5), []}, fn _, {t, mine} ->
      t = Allocator.give_back(t, 0, mine, :free)
      mine = Enum.filter(1..24, fn _ -> :rand.uniform(3) == 1 end)
      before = t
      t = Allocator.take(t, 0, mine)
      assert spread(t) <= 1
      # Nobody moves who could have stayed: at each worker either all came home, or it is full.
      assert before != t or mine == []
      {t, mine}
    end)
  end
end
