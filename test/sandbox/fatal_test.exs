defmodule Kmq.Sandbox.FatalTest do
  use Kmq.Test.ClusterCase, on: :sandbox
  run_bodies(Kmq.Test.Bodies.Fatal)
end
