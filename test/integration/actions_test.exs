defmodule Kmq.Integration.ActionsTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Actions)
end
