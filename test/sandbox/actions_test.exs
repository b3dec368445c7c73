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

  test "more time limits of their own than a partition has room for are refused one by one", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    n = 65_540
    publish(cluster, topic, for(i <- 1..n, do: "#{i}"))
    consumer = consumer(options(cluster, topic, lease: 60_000, max_processing_time: 600_000))
    messages = pull(consumer, n, 60_000)
    assert {:error, failed} = Kmq.extend(messages, 900_000)
    assert length(failed) == n - 65_536
    assert Enum.all?(failed, &match?({_, :full}, &1))
    # They are as they were.
    assert Kmq.ack(messages, sync: true) == :ok
  end
end
