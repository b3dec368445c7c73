defmodule Kmq.Application do
  @moduledoc false
  use Application

  alias Kmq.Error

  @doc "Whether it runs: without it nothing of Kmq does."
  @spec started() :: :ok | {:error, Error.t()}
  def started do
    if Process.whereis(Kmq.Registry),
      do: :ok,
      else:
        {:error,
         Error.new(
           :not_started,
           "the application :kmq is not started: call Application.ensure_all_started(:kmq) first, or run iex with `iex -S mix`"
         )}
  end

  # The native part is loaded here, so that a machine without librdkafka is told so at the start, and not by an undefined
  # function at the first message.
  @impl true
  def start(_type, _args) do
    case :code.ensure_loaded(:kmq_nif) do
      {:module, _} ->
        Kmq.Supervisor.start_link([])

      {:error, reason} ->
        {:error, "kmq: the native part cannot be loaded (#{reason}); the warning above says why"}
    end
  end
end
