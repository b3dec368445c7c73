defmodule Kmq.RebalanceTest do
  # Where nothing dies, every message is handled exactly once, at its first attempt.
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true

  # A bound of the numbers published while nobody counts.
  @most 100_000

  setup_all do
    %{hosts: Kafka.bootstrap()}
  end

  for format <- [:range, :kmq] do
    test "without faults none comes twice, none with a raised count (#{format})" do
      scene = Scene.new(calm: true, marker_format: unquote(format))
      n = 5_000
      Scene.publish(scene, 0..(n - 1))
      :ok = Scene.work(scene, nil)
      Scene.await_all(scene, n)
      Scene.await_committed(scene)
      :ok = Worker.stop()
      once(scene, n)
      # Not even given back untouched, as by a rebalance.
      assert Scene.copies(scene, n) == 0
    end
  end

  for assignor <- [:roundrobin, :cooperative_sticky] do
    if assignor == :cooperative_sticky, do: @tag(:cooperative)

    test "consumers that join and leave under load: none comes twice, none with a raised count (#{assignor})" do
      scene = Scene.new(calm: true, partitions: 6, assignor: unquote(assignor))
      [first, second, third] = for _ <- 1..3, do: Scene.vm(scene)
      feeder = Task.async(fn -> feed(scene, 0) end)

      :ok = Scene.work(scene, first, sleep: 1)
      Scene.await_handled(scene, @most, 500)
      :ok = Scene.work(scene, second, sleep: 1)
      await_share(second, 3)
      more(scene)
      :ok = Scene.work(scene, third, sleep: 1)
      await_share(third, 2)
      more(scene)
      :ok = VM.call(first, Worker, :stop, [])
      await_share(third, 3)
      more(scene)
      :ok = VM.call(second, Worker, :stop, [])
      await_share(third, 6)
      more(scene)

      send(feeder.pid, :enough)
      n = Task.await(feeder, scaled(20_000))
      Scene.await_all(scene, n)
      Scene.await_committed(scene)
      :ok = VM.call(third, Worker, :stop, [])
      once(scene, n)
    end
  end

  test "a pipeline that is stopped and started under load: none comes twice" do
    scene = Scene.new(calm: true)
    n = 3_000
    Scene.publish(scene, 0..(n - 1))

    for _ <- 1..3 do
      :ok = Scene.work(scene, nil, sleep: 1)
      Scene.await_handled(scene, n, min(n, Checker.handled(Scene.check(scene, n)) + 300))
      :ok = Worker.stop()
    end

    :ok = Scene.work(scene, nil)
    Scene.await_all(scene, n)
    :ok = Worker.stop()
    once(scene, n)
  end

  # New messages all the time, until it is enough: their number.
  defp feed(scene, from) do
    Scene.publish(scene, from..(from + 299))

    receive do
      :enough -> from + 300
    after
      50 -> feed(scene, from + 300)
    end
  end

  defp more(scene) do
    Scene.await_handled(scene, @most, Checker.handled(Scene.check(scene, @most)) + 300)
  end

  defp await_share(vm, partitions) do
    eventually(
      fn ->
        [%{partitions: list}] = VM.call(vm, Worker, :info, [])
        assert Enum.count(list, &(&1.state == :assigned)) == partitions
        true
      end,
      20_000
    )
  end

  # Read again at the end: what came late counts, too.
  defp once(scene, n) do
    checker = Scene.check(scene, n)
    assert Checker.missing(checker) == []
    assert Checker.twice(checker) == []
    assert checker.raised == 0
    assert Scene.dead(scene) == 0
  end
end
