defmodule Kmq.Sandbox.QueueTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  run_bodies(Kmq.Test.Bodies.Queue)
end
