defmodule Kmq.Integration.DeadLettersTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.DeadLetters)
end
