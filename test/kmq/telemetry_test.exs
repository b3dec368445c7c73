defmodule Kmq.TelemetryTest do
  # The backend is one for the VM.
  use ExUnit.Case, async: false

  alias Kmq.Telemetry

  defmodule Backend do
    def execute(event, measurements, metadata), do: send(metadata.test, {event, measurements})
  end

  setup do
    on_exit(fn -> Telemetry.put_backend(nil) end)
  end

  test "events go to the backend" do
    Telemetry.put_backend(Backend)
    Telemetry.execute([:kmq, :ack], %{count: 2}, %{test: self()})
    assert_received {[:kmq, :ack], %{count: 2}}
  end

  test "nobody there: an event is nothing" do
    Telemetry.put_backend(nil)
    assert Telemetry.execute([:kmq, :ack], %{count: 2}, %{test: self()}) == :ok
  end
end
