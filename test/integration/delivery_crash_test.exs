defmodule Kmq.DeliveryCrashTest do
  # VMs are killed by SIGKILL, at exact points and at random ones, one after the other on the same queue. After each death the group's
  # commit is held against what was handled: that is each delivery's guarantee. (:markers is in Kmq.CrashTest.)
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true
  @moduletag timeout: 300_000

  @n 3_000
  @partitions 4

  # Number k is published to partition rem(k, 4) as its div(k, 4)-th message.
  defp below?(number, committed),
    do: div(number, @partitions) < max(committed[rem(number, @partitions)], 0)

  defp numbers(checker), do: Enum.to_list(0..(@n - 1)) -- Checker.missing(checker)

  # A commit that was on its way when its VM died may still arrive; the group is over when its session is.
  defp settled_commits(scene) do
    first = Scene.committed(scene)
    Process.sleep(300)
    if Scene.committed(scene) == first, do: first, else: settled_commits(scene)
  end

  defp dead_numbers(scene) do
    scene.topic
    |> Kmq.DeadLetters.stream(hosts: scene.hosts)
    |> Enum.map(&String.to_integer(&1.value))
  end

  # A VM for each point: one after the other works until it dies there. nil: killed from outside when it has handled so many more.
  defp lives(scene, points, work, check) do
    vms = Enum.map(points, &{&1, Scene.vm(scene, failpoints: if(is_binary(&1), do: &1))})

    for {point, vm} <- vms do
      if is_binary(point) do
        :ok = Scene.work_and_die(scene, vm, work)
      else
        before = Checker.handled(Scene.check(scene, @n))
        :ok = Scene.work(scene, vm, work)
        Scene.await_handled(scene, @n, before + point)
        VM.kill(vm)
      end

      eventually(fn -> not VM.alive?(vm) end)
      check.(point, settled_commits(scene))
    end

    last = Scene.vm(scene)
    :ok = Scene.work(scene, last, Keyword.delete(work, :sleep))
    last
  end

  defp random(most), do: 1 + :rand.uniform(most)

  setup_all do
    %{hosts: Kafka.bootstrap()}
  end

  setup do
    :rand.seed(:exsss, {Scene.seed(), 4, 4})
    :ok
  end

  test ":offsets, killed at every point: nothing is lost, twice comes only what was not committed" do
    scene = Scene.new(delivery: :offsets, commit_interval: 50)
    Scene.publish(scene, 0..(@n - 1))
    work = [sleep: 3, fail_every: 10]

    points = [
      "handout_commit=kill@#{3 + random(4)}",
      "commit_ack=kill@#{2 + random(4)}",
      random(200),
      "reject_write=kill@#{random(4)}",
      "reject_settle=kill@#{random(4)}"
    ]

    IO.puts(:stderr, "points #{inspect(points)}")
    seen = :ets.new(:seen, [:public])

    lives(scene, points, work, fn point, committed ->
      checker = Scene.check(scene, @n)
      done = MapSet.new(numbers(checker) ++ dead_numbers(scene))

      # What the commit says is done: handled, or safe as a dead letter.
      for number <- 0..(@n - 1), below?(number, committed) do
        assert number in done,
               "#{number} is below the commit and not done, after #{inspect(point)}"
      end

      # What comes twice was not below a commit when its first handler's VM died.
      :ets.insert(seen, {point, committed})
    end)

    failing = for number <- 0..(@n - 1), rem(number, 10) == 0, do: number
    checker = Scene.await_handled(scene, @n, @n - length(failing))

    eventually(
      fn -> MapSet.subset?(MapSet.new(failing), MapSet.new(dead_numbers(scene))) end,
      20_000
    )

    Scene.await_committed(scene)

    assert Checker.missing(checker) == failing
    deaths = Enum.map(:ets.tab2list(seen), &elem(&1, 1))

    for number <- Checker.twice(checker) do
      assert Enum.any?(deaths, &(not below?(number, &1))), "#{number} came twice"
    end

    # Nobody counts attempts here.
    assert checker.raised == 0
    assert checker.twice < div(@n, 2)
  end

  test ":at_most_once, killed at every point: nothing is handled twice, and lost is at most a window" do
    window = 100
    scene = Scene.new(delivery: :at_most_once, start_ahead: window, on_failure: :reject)
    Scene.publish(scene, 0..(@n - 1))
    work = [sleep: 3, fail_every: 10]

    points = [
      "handout_commit=kill@#{2 + random(4)}",
      "commit_ack=kill@2",
      "commit_ack=kill@#{2 + random(4)}",
      random(200),
      "reject_write=kill@#{random(4)}",
      "reject_settle=kill@#{random(4)}"
    ]

    IO.puts(:stderr, "points #{inspect(points)}")

    lives(scene, points, work, fn point, committed ->
      checker = Scene.check(scene, @n)
      failed = Map.keys(checker.failed)

      # Nothing is handed out before its commit is acknowledged.
      for number <- numbers(checker) ++ failed do
        assert below?(number, committed), "#{number} is not committed, after #{inspect(point)}"
      end

      # 4 workers with 10 each had some in hand, of what was committed the window was not handed out.
      lost = Enum.count(0..(@n - 1), &below?(&1, committed)) - checker.handled - length(failed)
      so_far = Process.get(:lost, 0)
      assert lost - so_far <= window + 40
      Process.put(:lost, lost)
    end)

    lost = Process.get(:lost)

    checker =
      eventually(
        fn ->
          checker = Scene.check(scene, @n)
          assert checker.handled + map_size(checker.failed) >= @n - lost
          checker
        end,
        40_000
      )

    Scene.await_committed(scene)
    assert Checker.twice(checker) == []
    for {_number, attempts} <- checker.failed, do: assert(attempts == [1])
    assert checker.handled + map_size(checker.failed) == @n - lost
    IO.puts(:stderr, "lost #{lost} in #{length(points)} deaths")
  end

  # Joins, leaves and an orderly end, without a death.
  for delivery <- [:offsets, :at_most_once] do
    test "#{delivery}: another joins, the first stops, then the other: nothing is lost, nothing comes twice" do
      scene = Scene.new(delivery: unquote(delivery), calm: true, start_ahead: 500)
      Scene.publish(scene, 0..(@n - 1))
      first = Scene.vm(scene)
      second = Scene.vm(scene)
      :ok = Scene.work(scene, first, sleep: 2)
      Scene.await_handled(scene, @n, 200)
      :ok = Scene.work(scene, second, sleep: 2)
      eventually(fn -> assigned(second) > 0 end, 20_000)
      :ok = VM.call(first, Worker, :stop, [])
      eventually(fn -> assigned(second) == @partitions end, 20_000)
      checker = Scene.await_all(scene, @n)
      assert checker.twice == 0
      :ok = VM.call(second, Worker, :stop, [])
      Scene.await_committed(scene)
    end
  end

  defp assigned(vm) do
    vm
    |> VM.call(Worker, :info, [])
    |> Enum.flat_map(& &1.partitions)
    |> Enum.count(&(&1.state == :assigned))
  end
end
