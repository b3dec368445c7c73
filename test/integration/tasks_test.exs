defmodule Kmq.Integration.TasksTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Tasks)
end
