defmodule Kmq.Integration.FatalTest do
  use Kmq.Test.ClusterCase, on: :kafka
  run_bodies(Kmq.Test.Bodies.Fatal)
end
