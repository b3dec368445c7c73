defmodule Kmq.Noted do
  @moduledoc false
  # A trouble is said when it begins; it is over, and would be said again, when it did not come for half a minute.

  @quiet_ms 30_000

  @typedoc "When each was met last."
  @type t :: %{optional(term) => integer}

  @doc "Runs `fun`, which says it, unless this trouble goes on."
  @spec note(t, term, (() -> term)) :: t
  def note(noted, what, fun) do
    now = System.monotonic_time(:millisecond)
    if now - Map.get(noted, what, now - 2 * @quiet_ms) > @quiet_ms, do: fun.()
    Map.put(noted, what, now)
  end
end
