defmodule Kmq.Integration.QueueTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Queue)
end
