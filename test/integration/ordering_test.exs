defmodule Kmq.Integration.OrderingTest do
  use Kmq.Test.ClusterCase, on: :kafka

  setup do: %{kind: :stage_host}
  run_bodies(Kmq.Test.Bodies.Ordering)
end

defmodule Kmq.Integration.BroadwayOrderingTest do
  use Kmq.Test.ClusterCase, on: :kafka

  @moduletag :broadway

  setup_all do
    {:ok, _} = Application.ensure_all_started(:broadway)
    %{kind: :broadway}
  end

  run_bodies(Kmq.Test.Bodies.Ordering)
end

defmodule Kmq.Integration.OrderingCrashTest do
  use ExUnit.Case

  alias Kmq.Test.Scene

  @moduletag :integration
  @moduletag :slow
  @moduletag timeout: 240_000

  test "a VM is killed: what it had in work comes again behind its successors, the rest in order" do
    n = 600
    scene = Scene.new(partitions: 2)
    Scene.publish(scene, 0..(n - 1))
    work = [options: [ordering: :partition], max_demand: 4, concurrency: 2, sleep: 1]
    Scene.work_and_die(scene, Scene.vm(scene), [kill_at: 200] ++ work)
    :ok = Scene.work(scene, Scene.vm(scene), work)
    Scene.await_all(scene, n)

    lines =
      for line <-
            scene.dir |> Path.join("handled") |> File.read!() |> String.split("\n", trim: true),
          ["h" | numbers] <- [String.split(line)],
          do: Enum.map(numbers, &String.to_integer/1)

    for partition <- 0..1 do
      first = for [number, 1, ^partition, _] <- lines, do: number
      assert first == Enum.uniq(Enum.sort(first))
      again = for [number, attempt, ^partition, _] when attempt > 1 <- lines, do: number
      # In work, or done so shortly before that their ENDs were not written yet.
      assert length(again) < 60
      # All numbers of the partition, those in work at the crash among the later ones.
      assert Enum.uniq(Enum.sort(first ++ again)) ==
               Enum.filter(0..(n - 1), &(rem(&1, 2) == partition))
    end

    assert [_ | _] = for([number, attempt, _, _] when attempt > 1 <- lines, do: number)
  end
end
