defmodule Kmq.Integration.OrderingTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Ordering)
end
