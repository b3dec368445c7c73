defmodule Kmq.Sandbox.ViewsTest do
  # The telemetry backend is one for the VM.
  use Kmq.Test.ClusterCase, on: :sandbox, async: false
  run_bodies(Kmq.Test.Bodies.Views)
end
