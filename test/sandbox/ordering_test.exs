defmodule Kmq.Sandbox.OrderingTest do
  # On real Kafka in each run (test/integration); here for the engine's code under the sanitizers.
  use Kmq.Test.ClusterCase, on: :sandbox

  @moduletag :sanitizer

  setup do: %{kind: :stage_host}

  run_bodies(Kmq.Test.Bodies.Ordering,
    except: [
      "pipelines join and leave in the middle of the work: each partition in order, nowhere twice, without a copy",
      "a message that fails comes behind its successors, in its own worker; across a stop the order is kept"
    ]
  )
end
