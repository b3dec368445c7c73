defmodule Kmq.Test.Host do
  @moduledoc false
  # A pipeline of functions, on the stage host or on the real Broadway: what holds for one must hold for the other.
  #
  #   handler        message -> message
  #   batch_handler  batcher, messages, info -> messages
  #   handle_failed  messages -> messages
  import ExUnit.Callbacks, only: [on_exit: 2]

  alias Kmq.StageHost

  @enforce_keys [:kind, :pid]
  defstruct [:kind, :pid, :name]

  @doc "Options as `Kmq.StageHost.start_link/1` has them, and `:rate_limiting` of the real thing."
  def start(kind, options, handler, extra \\ []) do
    host = launch(kind, options, handler, extra)
    watch(host)
    host
  end

  @doc "A failed test leaves no pipeline behind. To be called by the test's own process."
  def watch(host), do: on_exit(host, fn -> if Process.alive?(host.pid), do: stop(host) end)

  @doc "As start/4, from any process."
  def launch(:stage_host, options, handler, extra) do
    {:ok, pid} =
      [producer: {OffBroadway.Kmq.Producer, options}, handler: handler, concurrency: 4]
      |> Keyword.merge(extra)
      |> StageHost.start_link()

    started(%__MODULE__{kind: :stage_host, pid: pid})
  end

  def launch(:broadway, options, handler, extra) do
    name = Keyword.get_lazy(extra, :name, fn -> :"host_#{System.unique_integer([:positive])}" end)

    context = %{
      handler: handler,
      batch_handler: extra[:batch_handler],
      handle_failed: extra[:handle_failed] || (& &1)
    }

    processors =
      Keyword.take(extra, [:max_demand, :min_demand])
      |> Keyword.merge(extra[:processors] || [])
      |> Keyword.put(:concurrency, extra[:concurrency] || 4)

    producer =
      [module: {OffBroadway.Kmq.Producer, options}, concurrency: extra[:producers] || 1] ++
        Keyword.take(extra, [:rate_limiting])

    {:ok, pid} =
      apply(Broadway, :start_link, [
        __MODULE__.Pipeline,
        [
          name: name,
          context: context,
          # A supervisor above would start it again; here each test says how many ends it wants to see.
          max_restarts: 1_000,
          producer: producer,
          processors: [default: processors],
          batchers: extra[:batchers] || [],
          shutdown: extra[:shutdown] || 30_000,
          resubscribe_interval: 20
        ]
      ])

    started(%__MODULE__{kind: :broadway, pid: pid, name: name})
  end

  defp started(host) do
    Process.unlink(host.pid)
    host
  end

  def stop(%{kind: :stage_host, pid: pid}), do: StageHost.stop(pid)
  def stop(%{kind: :broadway, name: name}), do: apply(Broadway, :stop, [name])

  @doc "The processes that run the handler."
  def processors(%{kind: :stage_host, pid: pid}), do: StageHost.workers(pid)

  def processors(%{kind: :broadway, name: name}) do
    [%{concurrency: n}] = apply(Broadway, :topology, [name])[:processors]

    for i <- 0..(n - 1),
        pid = Process.whereis(:"#{name}.Broadway.Processor_default_#{i}"),
        do: pid
  end

  def producers(%{kind: :stage_host, pid: pid}), do: StageHost.stages(pid)

  def producers(%{kind: :broadway, name: name}) do
    for name <- apply(Broadway, :producer_names, [name]), pid = Process.whereis(name), do: pid
  end

  @doc "Events that were lost in a dispatcher; the real one does not say."
  def lost(%{kind: :stage_host} = host),
    do: host |> producers() |> Enum.map(&GenServer.call(&1, :lost)) |> Enum.sum()

  def lost(_host), do: 0

  @doc "As Broadway.Message's."
  def failed(message, reason), do: %{message | status: {:failed, reason}}

  def configure_ack(%{acknowledger: {module, ack_ref, data}} = message, options) do
    {:ok, data} = module.configure(ack_ref, data, options)
    %{message | acknowledger: {module, ack_ref, data}}
  end

  def ack_immediately(%{acknowledger: {module, ack_ref, _}} = message) do
    if is_struct(message) do
      apply(Broadway.Message, :ack_immediately, [message])
    else
      module.ack(ack_ref, [message], [])
      %{message | acknowledger: {__MODULE__.Nothing, nil, nil}}
    end
  end

  @doc "As a user who settles it in a way of his own, like Broadway.NoopAcknowledger."
  def take_acknowledger(message), do: %{message | acknowledger: {__MODULE__.Nothing, nil, nil}}

  defmodule Nothing do
    @moduledoc false
    def ack(_ref, _successful, _failed), do: :ok
  end

  defmodule Raising do
    @moduledoc false
    def ack(_ref, _successful, _failed), do: raise("no ack")
  end

  defmodule Pipeline do
    @moduledoc false
    def handle_message(_processor, message, %{handler: handler}), do: handler.(message)

    def handle_batch(batcher, messages, info, %{batch_handler: handler}),
      do: handler.(batcher, messages, info)

    def handle_failed(messages, %{handle_failed: fun}), do: fun.(messages)
  end
end
