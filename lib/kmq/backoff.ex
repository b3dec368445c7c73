defmodule Kmq.Backoff do
  @moduledoc """
  How long a failed message waits before it comes again.

    * `{:exponential, min: 1_000, max: 300_000, factor: 2, jitter: 0.2}` - `min` ms before the first retry, each wait `factor`
      times the one before, at most `max`
    * `{:linear, min: 1_000, max: 60_000, step: 1_000, jitter: 0.2}` - each wait `step` ms longer (default: `min`)
    * `[1_000, 5_000, 60_000]` - these, the last one for all further retries; at most 64

  `jitter: 0.2` varies each wait by up to 20 % in either direction, so that messages that failed together do not come back
  together. The arithmetic is the C core's, the same for consumer and tracker: it neither overflows nor gets negative.
  """

  @typedoc "As a user writes it."
  @type t :: {:exponential, keyword} | {:linear, keyword} | [non_neg_integer]

  @typedoc "As C reads it: factor, step and jitter are floats, all times in ms."
  @type normal ::
          {:exponential, min :: non_neg_integer, max :: non_neg_integer, factor :: float,
           jitter :: float}
          | {:linear, min :: non_neg_integer, max :: non_neg_integer, step :: non_neg_integer,
             jitter :: float}
          | {:list, [non_neg_integer, ...], jitter :: float}

  # A wait of more than a year is a mistake in units.
  @longest 366 * 86_400_000
  @longest_list 64

  @doc """
  The normal form, or what is wrong.

      iex> Kmq.Backoff.parse({:exponential, min: 3_000, max: 10_000})
      {:ok, {:exponential, 3000, 10000, 2.0, 0.2}}
      iex> Kmq.Backoff.parse([100, 200])
      {:ok, {:list, [100, 200], 0.0}}
      iex> Kmq.Backoff.parse({:exponential, min: 5, max: 4})
      {:error, "expected :min of the backoff to be at most :max, got: 5 and 4"}
  """
  @spec parse(term) :: {:ok, normal} | {:error, String.t()}
  def parse({kind, options}) when kind in [:exponential, :linear] and is_list(options) do
    names =
      if kind == :exponential,
        do: [:min, :max, :factor, :jitter],
        else: [:min, :max, :step, :jitter]

    with :ok <- names(options, names),
         min = Keyword.get(options, :min, 1_000),
         max = Keyword.get(options, :max, max(300_000, if(is_integer(min), do: min, else: 0))),
         jitter = Keyword.get(options, :jitter, 0.2),
         :ok <- ms(min, :min),
         :ok <- ms(max, :max),
         :ok <- ordered(min, max),
         :ok <- fraction(jitter) do
      rest(kind, options, min, max, jitter / 1)
    end
  end

  def parse([_ | _] = list) when length(list) > @longest_list,
    do:
      {:error, "expected a backoff list of at most #{@longest_list} waits, got: #{length(list)}"}

  def parse([_ | _] = list) when length(list) > 0 do
    if Enum.all?(list, &(is_integer(&1) and &1 in 0..@longest)),
      do: {:ok, {:list, list, 0.0}},
      else:
        {:error,
         "expected a backoff list of integers from 0 to #{@longest} (ms, 366 days), got: #{inspect(list)}"}
  end

  # Normal forms are their own normal form: a validated option may be validated again.
  def parse({kind, min, max, third, jitter} = normal)
      when kind in [:exponential, :linear] and is_integer(min) and is_integer(max) and
             is_number(third) and is_float(jitter),
      do: {:ok, normal}

  def parse({:list, [_ | _], jitter} = normal) when is_float(jitter), do: {:ok, normal}

  def parse(function) when is_function(function, 2) do
    {:error,
     "a function works for explicit retries only (on_failure: {:retry, function}), the tracker is C"}
  end

  def parse(other) do
    {:error,
     "expected {:exponential, options}, {:linear, options} or a list of ms, got: #{inspect(other)}"}
  end

  @doc false
  # Numbers between blanks, as the tracker and receipts have it.
  @spec to_text(normal) :: String.t()
  def to_text({:list, list, jitter}), do: Enum.join([:list, jitter | list], " ")

  def to_text({kind, min, max, third, jitter}),
    do: Enum.join([kind, min, max, third, jitter], " ")

  defp names(options, names) do
    cond do
      not Keyword.keyword?(options) ->
        {:error, "expected the backoff's options to be a keyword list, got: #{inspect(options)}"}

      Keyword.keys(options) -- names != [] ->
        {:error, "unknown option #{inspect(hd(Keyword.keys(options) -- names))} of the backoff"}

      true ->
        :ok
    end
  end

  defp ms(value, _name) when is_integer(value) and value in 0..@longest, do: :ok

  defp ms(value, name),
    do:
      {:error,
       "expected #{inspect(name)} of the backoff to be ms, an integer from 0 to #{@longest} (366 days), got: #{inspect(value)}"}

  defp ordered(min, max) when min <= max, do: :ok

  defp ordered(min, max),
    do: {:error, "expected :min of the backoff to be at most :max, got: #{min} and #{max}"}

  defp fraction(value) when is_number(value) and value >= 0 and value <= 1, do: :ok

  defp fraction(value),
    do: {:error, "expected :jitter of the backoff to be between 0 and 1, got: #{inspect(value)}"}

  defp rest(:exponential, options, min, max, jitter) do
    case Keyword.get(options, :factor, 2) do
      factor when is_number(factor) and factor >= 1 and factor <= 1_000 ->
        {:ok, {:exponential, min, max, factor / 1, jitter}}

      factor ->
        {:error,
         "expected :factor of the backoff to be between 1 and 1000, got: #{inspect(factor)}"}
    end
  end

  defp rest(:linear, options, min, max, jitter) do
    step = Keyword.get(options, :step, min)
    with :ok <- ms(step, :step), do: {:ok, {:linear, min, max, step / 1, jitter}}
  end

  @doc """
  The wait before the `attempt`-th retry (1 = the first) in ms. `u` in `[0, 1)` is the random number for the jitter.
  """
  @spec delay(normal | non_neg_integer, pos_integer, float) :: non_neg_integer
  def delay(backoff, attempt, u \\ :rand.uniform())
  def delay(ms, _attempt, _u) when is_integer(ms), do: ms
  def delay(backoff, attempt, u), do: :kmq_nif.backoff(backoff, attempt, u)
end
