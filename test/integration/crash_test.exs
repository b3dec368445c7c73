defmodule Kmq.CrashTest do
  # Programs are killed, by SIGKILL and at exact points; nothing is lost, and what nobody had in work comes at no attempt.
  use ExUnit.Case, async: false

  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true

  describe "a consumer's VM" do
    # In the format of one marker a message the lease is the whole processing time.
    for format <- [:range, :kmq] do
      test "killed in the middle of its work: a successor finishes it (#{format})" do
        scene = Scene.new(marker_format: unquote(format), max_processing_time: scaled(3_000))
        n = 3_000
        Scene.publish(scene, 0..(n - 1))
        vm = Scene.vm(scene)
        successor = Scene.vm(scene)

        :ok = Scene.work(scene, vm, sleep: 1)
        Scene.await_handled(scene, n, div(n, 4))
        VM.kill(vm)
        before = Checker.handled(Scene.check(scene, n))
        assert before < n

        :ok = Scene.work(scene, successor)
        checker = Scene.await_all(scene, n)

        # What was in work (4 workers with 10 each) and acks of the last moment come again, not everything.
        assert checker.twice < 500
        assert Scene.dead(scene) == 0
      end
    end

    # {where it kills itself, what nobody had in work yet}; the second time in the other format, whose STARTs and ENDs are one for each message
    for {point, untouched} <- [
          {"start_report=kill", true},
          {"start_handout=kill", true},
          {"start_handout=kill@5", false},
          {"handout_commit=kill@4", false},
          {"commit_ack=kill@3", false},
          {"ack_end=kill", false}
        ],
        format <- [:range, :kmq] do
      if format == :kmq, do: @tag(:slow)

      test "killed at #{point}: a successor finishes its work (#{format})" do
        scene =
          Scene.new(
            start_ahead: 50,
            marker_format: unquote(format),
            max_processing_time: if(unquote(format) == :kmq, do: 3_000, else: 300_000)
          )

        n = 1_000
        Scene.publish(scene, 0..(n - 1))
        vm = Scene.vm(scene, failpoints: unquote(point))
        successor = Scene.vm(scene)

        :ok = Scene.work_and_die(scene, vm)
        before = Scene.check(scene, n)
        :ok = Scene.work(scene, successor)
        checker = Scene.await_all(scene, n)
        assert Scene.dead(scene) == 0

        if unquote(untouched) do
          assert before.handled == 0
          assert {checker.twice, checker.raised, Scene.copies(scene, n)} == {0, 0, 0}
        end

        # Acknowledged, but not yet written: it comes again.
        if unquote(point) == "ack_end=kill",
          do: eventually(fn -> Scene.check(scene, n).raised > 0 end, 15_000)
      end
    end

    test "killed by a message again and again: its count rises, it is dead-lettered, and no other is" do
      scene = Scene.new(max_redeliveries: 1, partitions: 1)
      n = 40
      killer = 7
      Scene.publish(scene, 0..(n - 1))

      # It dies until the message is counted out; each time it begins with what is not committed.
      deaths =
        Enum.find(1..5, fn _ ->
          vm = Scene.vm(scene)
          :ok = Scene.work(scene, vm, kill_at: killer, concurrency: 1, max_demand: 1)
          eventually(fn -> not VM.alive?(vm) or Scene.dead(scene) > 0 end, 20_000)
          VM.alive?(vm)
        end)

      checker = Scene.await_handled(scene, n, n - 1)
      assert Checker.missing(checker) == [killer]
      %{^killer => attempts} = checker.killed
      assert Enum.dedup(attempts) == [1, 2]
      assert length(attempts) == deaths - 1
      assert Scene.dead(scene) == 1
    end

    test "killed: its tracker and its sandbox are gone within 2 s" do
      scene = Scene.new()
      vm = Scene.vm(scene)
      :ok = VM.call(vm, Worker, :start_sandbox, [])
      :ok = Scene.work(scene, vm)

      programs =
        eventually(fn ->
          programs = VM.port_programs(vm)

          assert ["kmq_sandbox", "kmq_tracker"] =
                   programs |> Enum.map(&elem(&1, 1)) |> Enum.sort()

          programs
        end)

      VM.kill(vm)
      eventually(fn -> not Enum.any?(programs, fn {pid, _} -> VM.os_alive?(pid) end) end, 2_000)
    end
  end

  describe "a tracker" do
    test "killed in the middle of redelivery: the next one goes on, the pipeline does not notice" do
      scene = Scene.new(redelivery_rate: 400)
      n = 1_500
      Scene.publish(scene, 0..(n - 1))
      vm = Scene.vm(scene)
      :ok = Scene.work(scene, vm, fail_every: 2)
      failing = div(n, 2)

      for share <- [5, 2] do
        eventually(fn -> Scene.copies(scene, n) > div(failing, share) end, 20_000)
        [tracker] = trackers(vm)
        VM.signal(tracker, :kill)
        eventually(fn -> trackers(vm) not in [[], [tracker]] end)
      end

      checker = Scene.await_all(scene, n)
      assert map_size(checker.failed) == failing
      assert Scene.dead(scene) == 0
      # A killed tracker repeats at most what was in flight.
      assert Scene.copies(scene, n) - failing < 400
      assert [%{}] = VM.call(vm, Worker, :info, [])
    end

    # Between copy and END; before the CLOCK of a decision.
    for point <- ["copy_end=kill", "clock=kill@6"] do
      test "killed at #{point}: repeats at most what was in flight" do
        scene = Scene.new(tracker: :external)
        n = 300
        Scene.publish(scene, 0..(n - 1))
        vm = Scene.vm(scene)
        apart = Scene.vm(scene, failpoints: unquote(point))
        :ok = VM.call(apart, Worker, :start_tracker, [tracker_options(scene)])
        [doomed] = eventually(fn -> [_] = trackers(apart) end)
        # Its successor in that VM is not to die.
        :ok = VM.call(apart, System, :delete_env, ["KMQ_FAILPOINTS"])

        :ok = Scene.work(scene, vm, fail_every: 3)
        eventually(fn -> not VM.os_alive?(doomed) end, 20_000)
        checker = Scene.await_all(scene, n)
        assert Scene.dead(scene) == 0
        assert checker.raised >= 100
        assert Scene.copies(scene, n) >= 100
        assert Scene.copies(scene, n) <= 200
      end
    end

    test "a second one shares the work, and takes it over from the first when that is killed" do
      scene = Scene.new(tracker: :external, redelivery_rate: 300)
      n = 2_000
      Scene.publish(scene, 0..(n - 1))
      first = Scene.vm(scene)
      second = Scene.vm(scene)
      :ok = VM.call(first, Worker, :start_tracker, [tracker_options(scene)])
      :ok = Scene.work(scene, second, fail_every: 2)
      eventually(fn -> Scene.copies(scene, n) > 200 end, 20_000)

      :ok = VM.call(second, Worker, :start_tracker, [tracker_options(scene)])
      eventually(fn -> Scene.copies(scene, n) > 500 end, 20_000)
      VM.kill(first)

      checker = Scene.await_all(scene, n)
      assert map_size(checker.failed) == 1_000
      assert Scene.dead(scene) == 0
      assert Scene.copies(scene, n) - 1_000 < 400
    end

    test "frozen until another has taken over, then let go on: repeats at most what was in flight" do
      scene = Scene.new(tracker: :external, redelivery_rate: 200)
      n = 2_000
      Scene.publish(scene, 0..(n - 1))
      first = Scene.vm(scene)
      second = Scene.vm(scene)
      :ok = VM.call(first, Worker, :start_tracker, [tracker_options(scene)])
      :ok = Scene.work(scene, second, fail_every: 2)
      eventually(fn -> Scene.copies(scene, n) > 100 end, 20_000)

      [frozen] = trackers(first)
      # A frozen process would not even see that its VM is gone.
      on_exit(fn -> VM.signal(frozen, :cont) end)
      VM.signal(frozen, :stop)
      copies = Scene.copies(scene, n)
      :ok = VM.call(second, Worker, :start_tracker, [tracker_options(scene)])
      eventually(fn -> Scene.copies(scene, n) > copies + 200 end, 20_000)
      VM.signal(frozen, :cont)

      checker = Scene.await_all(scene, n)
      assert map_size(checker.failed) == 1_000
      assert Scene.dead(scene) == 0
      assert Scene.copies(scene, n) - 1_000 < 400
      assert VM.os_alive?(frozen)
    end
  end

  defp trackers(vm), do: for({pid, "kmq_tracker"} <- VM.port_programs(vm), do: pid)

  defp tracker_options(scene), do: Keyword.delete(scene.options, :tracker)

  # A JVM that is started while a test's clock runs would be in its time.
  setup_all do
    %{hosts: Kafka.bootstrap()}
  end
end
