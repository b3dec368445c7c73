defmodule Kmq.Supervisor do
  @moduledoc false
  # Everything that outlives one pipeline process:
  #
  #   Kmq.Supervisor (one_for_one)
  #     Kmq.Registry            who owns which handle, tracker, sandbox, publisher
  #     Kmq.Ordering            which processor has which partition, of pipelines that keep an order
  #     Kmq.HandleSupervisor    one Kmq.Handle per consumer: it survives the producer that borrows it
  #     Kmq.TrackerSupervisor   the trackers of pipelines: their crashes never restart a pipeline
  #     Kmq.TokenSupervisor     one Kmq.Token for each function that gives OAUTHBEARER tokens
  #     Kmq.SandboxSupervisor   sandboxes that nobody else supervises
  use Supervisor

  @spec start_link(keyword) :: Supervisor.on_start()
  def start_link(opts), do: Supervisor.start_link(__MODULE__, opts, name: __MODULE__)

  @impl true
  def init(_opts) do
    :ok = Kmq.Ordering.make_table()

    children = [
      {Registry, keys: :unique, name: Kmq.Registry},
      Kmq.Ordering,
      dynamic(Kmq.TokenSupervisor, 1_000, 10),
      dynamic(Kmq.HandleSupervisor, 1_000, 10),
      # A tracker that cannot start is tried again by its own backoff; a burst of them must not take the handles down.
      dynamic(Kmq.TrackerSupervisor, 1_000, 10),
      dynamic(Kmq.SandboxSupervisor, 1_000, 10)
    ]

    Supervisor.init(children, strategy: :one_for_one)
  end

  defp dynamic(name, max_restarts, max_seconds) do
    options = [
      name: name,
      strategy: :one_for_one,
      max_restarts: max_restarts,
      max_seconds: max_seconds
    ]

    Supervisor.child_spec({DynamicSupervisor, options}, id: name)
  end
end
