defmodule Kmq.BackoffTest do
  # Waits between attempts, as a pipeline's options give them: whatever the attempt, they grow up to the cap and never beyond, nor below 0.
  use ExUnit.Case, async: true

  alias Kmq.Backoff

  @attempts [0, 1, 2, 5, 31, 32, 63, 64, 1_000, 2 ** 31 - 1, 2 ** 31]
  @day 86_400_000

  test "from 1 ms to an hour, up to a day, at any attempt and any jitter" do
    for base <- [1, 50, 1_000, 3_600_000],
        {kind, more} <- [
          exponential: [factor: 2],
          exponential: [factor: 1.5],
          linear: [step: 500]
        ],
        jitter <- [0, 0.2, 1],
        {:ok, backoff} = Backoff.parse({kind, [min: base, max: @day, jitter: jitter] ++ more}) do
      # The chance is at its middle: without a jitter.
      waits = for attempt <- @attempts, do: Backoff.delay(backoff, attempt, 0.5)
      assert waits == Enum.sort(waits)
      assert List.last(waits) == @day

      for attempt <- @attempts, u <- [0.0, 0.25, 0.999_999, :rand.uniform()] do
        ms = Backoff.delay(backoff, attempt, u)
        assert is_integer(ms) and ms >= 0 and ms <= @day * (1 + jitter)
      end
    end
  end

  test "a list goes on with its last one" do
    {:ok, list} = Backoff.parse([10, 200, 3_000])

    assert for(attempt <- [1, 2, 3, 4, 2 ** 31], do: Backoff.delay(list, attempt, 0.5))
           |> Enum.uniq() == [10, 200, 3_000]
  end
end
