defmodule Kmq.Sandbox.ActionsTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  run_bodies(Kmq.Test.Bodies.Actions)
end
