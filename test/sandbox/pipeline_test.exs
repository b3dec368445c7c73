defmodule Kmq.Sandbox.PipelineTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  run_bodies(Kmq.Test.Bodies.Pipeline)
end
