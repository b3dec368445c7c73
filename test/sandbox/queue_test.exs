defmodule Kmq.Sandbox.QueueTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  # What does not hang on the cluster runs on real Kafka alone.
  run_bodies(Kmq.Test.Bodies.Queue,
    except: [
      "the same in the format of the JVM's kmq",
      "a second ack is told so, and settles nothing else",
      "longer than the lease is no fault, with a thousand messages before it, in the engine and in hand",
      "several topics in one consumer, each with its own markers and dead letters"
    ]
  )
end
