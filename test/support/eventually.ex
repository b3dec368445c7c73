defmodule Kmq.Test.Eventually do
  @moduledoc false
  # Waiting in tests: for a condition, never for a time. KMQ_TEST_SCALE stretches every limit, for slow or loaded machines.

  @interval_ms 20

  @doc "A time limit in milliseconds, stretched by KMQ_TEST_SCALE (default 1)."
  @spec scaled(non_neg_integer) :: non_neg_integer
  def scaled(ms), do: round(ms * scale())

  @spec scale() :: float
  def scale do
    case Float.parse(System.get_env("KMQ_TEST_SCALE", "1")) do
      {scale, ""} when scale > 0 -> scale
      _ -> raise "KMQ_TEST_SCALE must be a positive number"
    end
  end

  @doc """
  Calls `fun` until it gives something truthy without a failed assertion, and returns that.
  When the (scaled) time is over, the last failure is the test's.
  """
  @spec eventually((() -> result), non_neg_integer) :: result when result: term
  def eventually(fun, timeout_ms \\ 5_000) do
    attempt(fun, now() + scaled(timeout_ms), timeout_ms)
  end

  defp attempt(fun, deadline, timeout_ms) do
    case try_once(fun) do
      {:ok, result} ->
        result

      failure ->
        if now() < deadline do
          Process.sleep(@interval_ms)
          attempt(fun, deadline, timeout_ms)
        else
          give_up(failure, timeout_ms)
        end
    end
  end

  defp try_once(fun) do
    result = fun.()
    if result, do: {:ok, result}, else: {:falsy, result}
  rescue
    error in [ExUnit.AssertionError, MatchError] -> {:raised, error, __STACKTRACE__}
  end

  defp give_up({:raised, error, stacktrace}, _timeout_ms), do: reraise(error, stacktrace)

  defp give_up({:falsy, result}, timeout_ms) do
    raise ExUnit.AssertionError,
      message: "still #{inspect(result)} after #{scaled(timeout_ms)} ms"
  end

  defp now, do: System.monotonic_time(:millisecond)
end
