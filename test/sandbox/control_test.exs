defmodule Kmq.Sandbox.ControlTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  # Most is tried on real Kafka alone.
  run_bodies(Kmq.Test.Bodies.Control,
    except: [
      "a paused partition is not read and keeps what is in work, others go on",
      "a seek forward skips: nothing between is handed out, or comes again"
    ]
  )
end
