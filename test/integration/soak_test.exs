defmodule Kmq.Integration.SoakTest do
  # Under load all the time: consumers that come and go, then each of them in turn. Nothing is lost, nothing counts as failed, and it goes on
  # fast enough. Half a minute, or with KMQ_LONG=1 five.
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true

  @long System.get_env("KMQ_LONG") == "1"
  @quiet_ms if(@long, do: 40_000, else: 6_000)
  @soak_ms if(@long, do: 240_000, else: 16_000)
  # From one coming or going to the next.
  @period_ms if(@long, do: 10_000, else: 1_500)
  # What of the quiet rate is left. Half the time one of two is away, so it is three quarters at best; of a short period a rebalance takes much,
  # and no slow machine is to fail.
  @left if(@long, do: 0.5, else: 0.2)
  # Bounds of the numbers published while nobody counts.
  @most if(@long, do: 3_000_000, else: 400_000)
  @workers [sleep: 1, concurrency: 4, max_demand: 10]

  setup_all do
    %{hosts: Kafka.bootstrap()}
  end

  for assignor <- [:roundrobin, :cooperative_sticky] do
    if assignor == :cooperative_sticky, do: @tag(:cooperative)
    @tag timeout: scaled(@quiet_ms + @soak_ms + 180_000)
    test "one comes and goes beside another, then each is stopped and started (#{assignor})" do
      seed = Scene.seed()
      :rand.seed(:exsss, {seed, 3, 5})

      scene =
        Scene.new(
          calm: true,
          partitions: 8,
          assignor: unquote(assignor),
          kafka_config: [consumer: ["heartbeat.interval.ms": 500]]
        )

      File.touch!(Path.join(scene.dir, "handled"))
      [stays, moves] = vms = for _ <- 1..2, do: Scene.vm(scene)
      feeder = Task.async(fn -> feed(scene, 0) end)
      for vm <- vms, do: :ok = Scene.work(scene, vm, @workers)
      Scene.await_handled(scene, @most, 1_000)

      quiet = rate(scene, fn -> Process.sleep(@quiet_ms) end)
      {soaked, rounds} = soak(scene, moves)

      IO.puts(
        "\nsoak (#{unquote(assignor)}), seed #{seed}: #{rounds} times gone and back; #{quiet} messages a second before, #{soaked} meanwhile"
      )

      assert soaked > quiet * @left

      for vm <- [stays, moves] do
        :ok = VM.call(vm, Worker, :stop, [])
        handled = handled(scene)
        Scene.await_handled(scene, @most, handled + 500)
        :ok = Scene.work(scene, vm, @workers)
      end

      send(feeder.pid, :enough)
      n = Task.await(feeder, scaled(20_000))
      Scene.await_all(scene, n, 60_000)
      Scene.await_committed(scene)
      for vm <- vms, do: :ok = VM.call(vm, Worker, :stop, [])

      checker = Scene.check(scene, n)
      assert Checker.missing(checker) == []
      # All of them left in order: what was in work was finished.
      assert Checker.twice(checker) == []
      assert {checker.raised, Scene.dead(scene)} == {0, 0}
    end
  end

  # {handled a second, how often it has gone and come back}
  defp soak(scene, moves) do
    until = System.monotonic_time(:millisecond) + @soak_ms
    count = :counters.new(1, [])
    rate = rate(scene, fn -> come_and_go(scene, moves, until, count) end)
    {rate, :counters.get(count, 1)}
  end

  defp come_and_go(scene, vm, until, count) do
    :ok = VM.call(vm, Worker, :stop, [])
    Process.sleep(some_time())
    :ok = Scene.work(scene, vm, @workers)
    Process.sleep(some_time())
    :counters.add(count, 1, 1)
    if System.monotonic_time(:millisecond) < until, do: come_and_go(scene, vm, until, count)
  end

  defp some_time, do: div(@period_ms, 2) + :rand.uniform(@period_ms)

  defp rate(scene, fun) do
    before = handled(scene)
    {us, _} = :timer.tc(fun)
    round((handled(scene) - before) * 1_000_000 / us)
  end

  # Lines, not different numbers: they are compared at the end.
  defp handled(scene) do
    scene.dir
    |> Path.join("handled")
    |> File.stream!([], 65_536)
    |> Enum.reduce(0, fn chunk, n -> n + length(:binary.matches(chunk, "\n")) end)
  end

  # New messages all the time, a few hundred ahead of those who work, until it is enough: their number.
  defp feed(scene, from) do
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: scene.hosts)
    n = feed(scene, publisher, from)
    :ok = Kmq.Publisher.close(publisher)
    n
  end

  defp feed(scene, publisher, from) do
    if from - handled(scene) < 5_000 do
      messages =
        for i <- from..(from + 999),
            do: {scene.topic, Integer.to_string(i), partition: rem(i, scene.partitions)}

      {:ok, _} = Kmq.Publisher.publish_many(publisher, messages)
      again(scene, publisher, from + 1_000, 0)
    else
      again(scene, publisher, from, 50)
    end
  end

  defp again(scene, publisher, from, wait_ms) do
    receive do
      :enough -> from
    after
      wait_ms -> feed(scene, publisher, from)
    end
  end
end
