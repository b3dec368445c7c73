defmodule Kmq.Application do
  @moduledoc false
  use Application

  @impl true
  def start(_type, _args), do: Kmq.Supervisor.start_link([])
end
