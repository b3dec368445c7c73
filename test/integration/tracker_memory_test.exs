defmodule Kmq.Integration.TrackerMemoryTest do
  # A tracker that gets no more memory ends, says so, is started again, and nothing is lost: all it knew is in the marker topic.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.Tracker
  alias Kmq.Test.{Markers, VM}

  setup do: listen()

  if !System.find_executable("prlimit"), do: @moduletag(skip: "prlimit is not installed")

  test "with no memory left it ends, is started again, and copies what is due", %{
    cluster: cluster
  } do
    n = 200
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external, backoff: [0])
    publish(cluster, topic, for(i <- 0..(n - 1), do: "#{i}"))
    left_behind(cluster, topic, options)
    tracker = tracker(options)
    {:ok, %{os_pid: os_pid}} = Tracker.info(tracker)
    VM.limit(os_pid, :data, VM.kilobytes(os_pid, "VmData") + 2_048)

    # open for ever, each with a deadline of its own
    far = for i <- 1..150_000, do: Markers.start(0, 1_000_000 + 2 * i, 3_600_000 + i)

    mark(cluster, topic, options, for(i <- 0..(n - 1), do: Markers.start(0, i, 1_000)) ++ far)

    assert_receive {[:kmq, :tracker, :stop], _, %{reason: {:exit_status, status}}},
                   scaled(30_000)

    IO.puts(:stderr, "without memory: ended with status #{status}")
    # 3 is ours; librdkafka's own assertions and the kernel end a process by a signal
    assert status in [3, 134, 137, 139]

    eventually(
      fn ->
        assert {:ok, %{restarts: r, partitions: [%{open: 150_000, state: :ready}]}} =
                 Tracker.info(tracker)

        assert r >= 1
      end,
      30_000
    )

    assert copies(cluster, topic) |> Enum.map(& &1.value) |> Enum.uniq() |> Enum.sort() ==
             Enum.sort(for i <- 0..(n - 1), do: "#{i}")
  end
end
