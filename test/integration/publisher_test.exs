defmodule Kmq.Integration.PublisherTest do
  use Kmq.Test.ClusterCase, on: :kafka

  run_bodies(Kmq.Test.Bodies.Publisher)
end
