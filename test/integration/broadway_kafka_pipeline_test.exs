defmodule Kmq.Integration.BroadwayKafkaPipelineTest do
  use Kmq.Test.ClusterCase, on: :kafka

  setup do: %{kind: :stage_host}
  run_bodies(Kmq.Test.Bodies.BroadwayKafka)
end

defmodule Kmq.Integration.BroadwayKafkaBroadwayTest do
  use Kmq.Test.ClusterCase, on: :kafka

  @moduletag :broadway

  setup_all do
    {:ok, _} = Application.ensure_all_started(:broadway)
    %{kind: :broadway}
  end

  run_bodies(Kmq.Test.Bodies.BroadwayKafka)
end
