defmodule Kmq.Test.Checker do
  @moduledoc false
  # Numbered messages: 0 to n - 1 are published, workers write down what they handle (see Kmq.Test.Worker), and here it is counted
  # in a bitmap: none may be missing; where nothing went wrong, none may come twice or with a raised count.

  defstruct [
    :n,
    :first,
    :again,
    handled: 0,
    twice: 0,
    raised: 0,
    failed: %{},
    killed: %{},
    places: %{}
  ]

  @type t :: %__MODULE__{
          n: pos_integer,
          first: :atomics.atomics_ref(),
          again: :atomics.atomics_ref(),
          handled: non_neg_integer,
          twice: non_neg_integer,
          raised: non_neg_integer,
          failed: %{non_neg_integer => [pos_integer]},
          killed: %{non_neg_integer => [pos_integer]},
          places: %{non_neg_integer => MapSet.t()}
        }

  @doc "Publishes the numbers of a range, in turn to each of `partitions` partitions."
  @spec publish(String.t(), String.t(), pos_integer, Range.t()) :: :ok
  def publish(hosts, topic, partitions, range) do
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts)

    range
    |> Stream.map(&{topic, Integer.to_string(&1), partition: rem(&1, partitions)})
    |> Stream.chunk_every(1_000)
    |> Enum.each(fn chunk -> {:ok, _} = Kmq.Publisher.publish_many(publisher, chunk) end)

    :ok = Kmq.Publisher.close(publisher)
  end

  @doc "Reads what workers have written so far. A line that is not whole yet is left out."
  @spec read([Path.t()] | Path.t(), pos_integer) :: t
  def read(files, n) do
    words = div(n + 63, 64)
    checker = %__MODULE__{n: n, first: bits(words), again: bits(words)}

    files
    |> List.wrap()
    |> Enum.flat_map(&lines/1)
    |> Enum.reduce(checker, &count/2)
  end

  defp lines(file) do
    case File.read(file) do
      {:ok, text} -> text |> String.split("\n") |> Enum.drop(-1)
      {:error, :enoent} -> []
    end
  end

  defp count(line, checker) do
    [what | numbers] = String.split(line)
    [number, attempt, partition, offset] = Enum.map(numbers, &String.to_integer/1)
    places = Map.update(checker.places, partition, MapSet.new([offset]), &MapSet.put(&1, offset))
    checker = %{checker | places: places}

    case what do
      "h" ->
        raised(handled(checker, number), attempt)

      "f" ->
        %{checker | failed: Map.update(checker.failed, number, [attempt], &(&1 ++ [attempt]))}

      "k" ->
        %{checker | killed: Map.update(checker.killed, number, [attempt], &(&1 ++ [attempt]))}
    end
  end

  defp handled(checker, number) do
    cond do
      not set?(checker.first, number) ->
        set(checker.first, number)
        %{checker | handled: checker.handled + 1}

      true ->
        set(checker.again, number)
        %{checker | twice: checker.twice + 1}
    end
  end

  defp raised(checker, 1), do: checker
  defp raised(checker, _attempt), do: %{checker | raised: checker.raised + 1}

  defp set?(bits, number) do
    Bitwise.band(:atomics.get(bits, div(number, 64) + 1), bit(number)) != 0
  end

  defp set(bits, number) do
    word = div(number, 64) + 1
    :atomics.put(bits, word, Bitwise.bor(:atomics.get(bits, word), bit(number)))
  end

  defp bits(words), do: :atomics.new(words, signed: false)
  defp bit(number), do: Bitwise.bsl(1, rem(number, 64))

  @doc "How many different numbers were handled."
  @spec handled(t) :: non_neg_integer
  def handled(%__MODULE__{handled: handled}), do: handled

  @doc "Numbers that were never handled."
  @spec missing(t) :: [non_neg_integer]
  def missing(checker),
    do: for(number <- 0..(checker.n - 1), not set?(checker.first, number), do: number)

  @doc "Numbers that were handled more than once."
  @spec twice(t) :: [non_neg_integer]
  def twice(checker),
    do: for(number <- 0..(checker.n - 1), set?(checker.again, number), do: number)

  @doc "The offsets of a partition that workers have seen."
  @spec seen(t, non_neg_integer) :: MapSet.t()
  def seen(checker, partition), do: Map.get(checker.places, partition, MapSet.new())

  # ---- what Kafka holds

  @doc "The committed offsets of a group, by partition; -1001 where there is none."
  @spec committed(String.t(), String.t(), String.t(), pos_integer) :: %{
          non_neg_integer => integer
        }
  def committed(hosts, group, topic, partitions) do
    admin(hosts, group, fn admin ->
      {:ok, list} =
        :kmq_nif.admin_committed(admin, Enum.map(0..(partitions - 1), &{topic, &1}), 10_000)

      Map.new(list, fn {_topic, partition, offset} -> {partition, offset} end)
    end)
  end

  @doc "The end of each partition of a topic."
  @spec ends(String.t(), String.t(), pos_integer) :: %{non_neg_integer => non_neg_integer}
  def ends(hosts, topic, partitions) do
    admin(hosts, "none", fn admin ->
      for partition <- 0..(partitions - 1), into: %{} do
        {:ok, {_low, high}} = :kmq_nif.admin_watermarks(admin, topic, partition, 10_000)
        {partition, high}
      end
    end)
  end

  @doc "How many records a topic has had."
  @spec count(String.t(), String.t(), pos_integer) :: non_neg_integer
  def count(hosts, topic, partitions),
    do: hosts |> ends(topic, partitions) |> Map.values() |> Enum.sum()

  @doc "Runs a function with a client for questions."
  @spec admin(String.t(), String.t(), (reference -> result)) :: result when result: term
  def admin(hosts, group, fun) do
    props = [{"bootstrap.servers", hosts}, {"group.id", group}]
    Kmq.Security.with_admin(props, 10_000, fun)
  end
end
