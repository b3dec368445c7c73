defmodule Kmq.Sandbox.ViewsTest do
  # The telemetry backend is one for the VM.
  use Kmq.Test.ClusterCase, on: :sandbox, async: false

  # The rest is tried on real Kafka alone.
  run_bodies(Kmq.Test.Bodies.Views,
    except: [
      "whose it is: a consumer, a pipeline, a publisher, a tracker, each as a table in iex"
    ]
  )
end
