defmodule Kmq.ZombieTest do
  # A VM that is frozen until the group has given its partitions away, and then goes on: it reads again, its late acks settle nothing of
  # others, and no commit of its old generation takes the group back.
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true

  setup_all do
    %{hosts: Kafka.bootstrap()}
  end

  test "frozen for longer than its session, then let go on" do
    scene = Scene.new(partitions: 4, start_ahead: 100)
    [frozen, other] = for _ <- 1..2, do: Scene.vm(scene)
    on_exit(fn -> VM.signal(frozen, :cont) end)
    for vm <- [frozen, other], do: :ok = Scene.work(scene, vm, sleep: 2)
    for vm <- [frozen, other], do: await_share(vm, 2)
    Scene.publish(scene, 0..1_999)
    Scene.await_handled(scene, 3_000, 300)

    VM.signal(frozen, :stop)
    await_share(other, 4)
    Scene.await_handled(scene, 3_000, Scene.check(scene, 3_000).handled + 200)
    before = Scene.committed(scene)
    VM.signal(frozen, :cont)

    # It reads again, beside the other one.
    await_share(frozen, 2)
    Scene.publish(scene, 2_000..2_999)
    Scene.await_all(scene, 3_000, 60_000)
    Scene.await_committed(scene)
    assert Enum.all?(Scene.committed(scene), fn {p, offset} -> offset >= before[p] end)
    checker = Scene.check(scene, 3_000)

    IO.puts("\na VM frozen for longer than its session: #{checker.twice} of 3000 handled twice")

    # What it had in hand (4 workers with 10 each), what it settled after its last commit, and what it handed out before it heard of its
    # loss. Were its late acks and commits let in, or were it to go on reading as before, it would be most of a thousand.
    assert checker.twice <= 40 + 400
    assert Checker.missing(checker) == []
    assert Scene.dead(scene) == 0
    for vm <- [frozen, other], do: :ok = VM.call(vm, Worker, :stop, [])
  end

  defp await_share(vm, partitions) do
    eventually(
      fn ->
        [%{partitions: list}] = VM.call(vm, Worker, :info, [])
        assert Enum.count(list, &(&1.state == :assigned)) == partitions
      end,
      30_000
    )
  end
end
