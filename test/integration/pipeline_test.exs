defmodule Kmq.Integration.PipelineTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Pipeline)
end
