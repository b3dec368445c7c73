defmodule Kmq.Test.Gauges do
  @moduledoc false
  # All telemetry of the VM, in an ets table of the test's process.

  import ExUnit.Assertions
  import ExUnit.Callbacks, only: [on_exit: 1]

  @table __MODULE__

  @spec listen() :: :ok
  def listen do
    :ets.new(@table, [:named_table, :public, :ordered_set])
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
    Kmq.Telemetry.put_backend(__MODULE__)
  end

  @doc false
  def execute(event, measurements, metadata) do
    :ets.insert(
      @table,
      {System.unique_integer([:monotonic]), {event, measurements, metadata}}
    )

    :ok
  rescue
    ArgumentError -> :ok
  end

  @spec all() :: [{[atom], map, map}]
  def all, do: for({_, event} <- :ets.tab2list(@table), do: event)

  @spec clear() :: true
  def clear, do: :ets.delete_all_objects(@table)

  @doc "The last `[:kmq, :member]` of a consumer."
  @spec member(pid) :: map | nil
  def member(consumer) do
    Enum.find_value(Enum.reverse(all()), fn
      {[:kmq, :member], values, %{handle: {:consumer, ^consumer}}} -> values
      _ -> nil
    end)
  end

  # -1: never; a clock's own count.
  @may_be_negative [
    {[:kmq, :open], :next_due_ms},
    {[:kmq, :tracker, :lag], :checkpoint_age_ms},
    {[:kmq, :assignments_revoked, :stop], :monotonic_time}
  ]

  @doc "No measurement of any event is negative, but those that may be."
  def assert_sane(events) do
    for {name, values, _meta} = event <- events, {key, value} <- values do
      assert value >= 0 or {name, key} in @may_be_negative, inspect(event)
    end

    :ok
  end
end
