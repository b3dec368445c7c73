defmodule Kmq.IsolationTest do
  # Killers: messages that take their VM with them, by a real SIGKILL. What was in work beside them is not counted out with them.
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, RawLog, Scene, VM}

  @moduletag :integration
  @moduletag capture_log: true
  @moduletag timeout: 240_000

  @n 100
  @killer 37

  setup_all do
    %{hosts: Kafka.bootstrap()}
  end

  test "one of a hundred kills the VM: the others are handled, it alone is dead-lettered" do
    scene = Scene.new(max_redeliveries: 3, partitions: 2, drain_timeout: 3_000)
    Scene.publish(scene, 0..(@n - 1))
    work_until_dead(scene)
    only_the_killer_is_dead(scene)
  end

  test "the same when every message's last cause is a crash, after an outage, on its last attempt" do
    scene = Scene.new(max_redeliveries: 1, partitions: 2, drain_timeout: 3_000)
    Scene.publish(scene, 0..(@n - 1))

    # All are in work when the first VM dies.
    vm = Scene.vm(scene)
    :ok = Scene.work(scene, vm, sleep: 60_000, concurrency: 10, max_demand: 20)

    eventually(
      fn ->
        floors = Scene.committed(scene) |> Map.values() |> Enum.sum()
        assert floors == @n
      end,
      20_000
    )

    VM.kill(vm)
    work_until_dead(scene)
    checker = only_the_killer_is_dead(scene)
    # It died once more, and none of the others with it.
    assert checker.killed == %{@killer => [2]}
    assert checker.twice == 0
    assert checker.raised == @n - 1
  end

  # A VM after the other, as a supervisor of the system would have it.
  defp work_until_dead(scene) do
    Enum.find(1..12, fn _ ->
      vm = Scene.vm(scene)
      :ok = start(scene, vm)
      eventually(fn -> not VM.alive?(vm) or done?(scene) end, 60_000)
      VM.alive?(vm)
    end)
  end

  defp start(scene, vm) do
    Scene.work(scene, vm, kill_at: @killer, sleep: 5, concurrency: 10)
  rescue
    RuntimeError -> :ok
  end

  defp done?(scene),
    do: Checker.handled(Scene.check(scene, @n)) == @n - 1 and Scene.dead(scene) > 0

  defp only_the_killer_is_dead(scene) do
    checker = Scene.await_handled(scene, @n, @n - 1)
    assert Checker.missing(checker) == [@killer]
    assert [dead] = RawLog.read(scene.hosts, Scene.dead_letters(scene), scene.partitions)
    assert dead.value == Integer.to_string(@killer)
    assert {"kmq-cause", "crash"} in dead.headers
    checker
  end
end
