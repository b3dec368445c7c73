defmodule Kmq.Sandbox.TasksTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  run_bodies(Kmq.Test.Bodies.Tasks)
end
