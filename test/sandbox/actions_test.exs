defmodule Kmq.Sandbox.ActionsTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  # As in Kmq.Sandbox.QueueTest: what takes long here runs on real Kafka alone.
  run_bodies(Kmq.Test.Bodies.Actions,
    except: [
      "an extended message may take longer, or less; its neighbours may not",
      "an ack with sync is in the marker topic when it returns",
      "who takes too long waits as one that fails does; good ones do not wait with them",
      "a delayed message outlives its consumer and its tracker",
      "a message that expires while it waits for its retry is dead",
      "a filter that wants nothing of a topic leaves no lag",
      "a receipt settles a message without its consumer, and also after its end"
    ]
  )
end
