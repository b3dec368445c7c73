defmodule Kmq.Sandbox.PipelineTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  # As in Kmq.Sandbox.QueueTest: what takes long here runs on real Kafka alone.
  run_bodies(Kmq.Test.Bodies.Pipeline,
    except: [
      "a stop in the middle of the work: nothing twice, nothing counted, the rest for the next",
      "slow handlers: longer than the lease, with the rest waiting in the workers and in the engine"
    ]
  )
end
