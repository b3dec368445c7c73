defmodule Kmq.Sandbox.DeadLettersTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  run_bodies(Kmq.Test.Bodies.DeadLetters)
end
