defmodule Kmq.CommitSafetyTest do
  # A commit never covers a message that was not handed out under a durable START: whatever happens to START, to the marker topic or to
  # the broker, the committed offset stays where it was, and the messages are handed out later.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag capture_log: true

  # A node of its own: it is frozen, killed and restarted, and does not make topics again that a test has deleted. Its own controller
  # takes it for dead after 3 s, and lets it come back no sooner.
  setup_all do
    config = %{
      "auto.create.topics.enable" => false,
      "broker.session.timeout.ms" => 3_000,
      "broker.heartbeat.interval.ms" => 500
    }

    {:ok, kafka} = Kafka.start(config: config)
    %{kafka: kafka, hosts: Kafka.bootstrap(kafka)}
  end

  describe "a START that fails" do
    test "for good: nothing is handed out or committed, it is said, and a successor gets all at the first attempt",
         %{hosts: hosts} do
      scene = Scene.new(hosts: hosts)
      n = 500
      Scene.publish(scene, 0..(n - 1))
      vm = Scene.vm(scene, failpoints: "start_report=fail")
      :ok = Scene.work(scene, vm)

      eventually(
        fn ->
          [%{waiting: waiting}] = VM.call(vm, Worker, :info, [])
          waiting == n
        end,
        15_000
      )

      eventually(fn -> VM.tail(vm) =~ "markers are not written" end)
      assert Scene.check(scene, n).handled == 0
      assert Map.values(Scene.committed(scene)) == [0, 0, 0, 0]
      VM.kill(vm)

      :ok = Scene.work(scene, Scene.vm(scene))
      checker = Scene.await_all(scene, n)
      assert {checker.twice, checker.raised, Scene.dead(scene)} == {0, 0, 0}
    end

    test "for a while: it is written again until it is durable", %{hosts: hosts} do
      scene = Scene.new(hosts: hosts, calm: true, start_ahead: 50)
      n = 1_000
      Scene.publish(scene, 0..(n - 1))
      vm = Scene.vm(scene, failpoints: "start_report=fail@3*12")
      :ok = Scene.work(scene, vm)
      Scene.await_all(scene, n)
      Scene.await_committed(scene)
      :ok = VM.call(vm, Worker, :stop, [])
      once(scene, n)
    end

    test "because the marker topic was deleted: its messages are handed out when it is there again",
         %{hosts: hosts} do
      scene =
        Scene.new(
          hosts: hosts,
          calm: true,
          kafka_config: [producer: ["message.timeout.ms": 2_000]]
        )

      n = 400
      Scene.publish(scene, 0..199)
      :ok = Scene.work(scene, nil)
      Scene.await_handled(scene, n, 200)
      Scene.await_committed(scene)
      committed = Scene.committed(scene)

      Scene.listen()

      log =
        capture_log(fn ->
          :ok = Kafka.delete_topic(hosts, Scene.markers(scene))
          Scene.publish(scene, 200..(n - 1))

          eventually(
            fn ->
              [%{waiting: waiting}] = Worker.info()
              waiting == 200
            end,
            15_000
          )

          assert_receive {[:kmq, :error], _,
                          %{error: %{message: "markers are not written" <> _}}},
                         scaled(20_000)
        end)

      assert log =~ "markers are not written"
      assert Scene.committed(scene) == committed
      assert Scene.check(scene, n).handled == 200

      :ok =
        Kafka.create_topic(hosts, Scene.markers(scene), scene.partitions, %{
          "message.timestamp.type" => "LogAppendTime"
        })

      Scene.await_all(scene, n)
      Scene.await_committed(scene)
      :ok = Worker.stop()
      once(scene, n)
    end

    test "because the producer turned fatal: it is replaced, none is lost, none comes twice", %{
      hosts: hosts
    } do
      scene = Scene.new(hosts: hosts, calm: true, start_ahead: 50)
      n = 3_000
      Scene.publish(scene, 0..(n - 1))

      log =
        capture_log(fn ->
          :ok = Scene.work(scene, nil, sleep: 1)

          for share <- [1, 2, 3] do
            Scene.await_handled(scene, n, div(n * share, 5))
            :ok = Worker.test_fatal(:producer)
          end

          Scene.await_all(scene, n)
          Scene.await_committed(scene)
          :ok = Worker.stop()
        end)

      assert log =~ "it is replaced"
      once(scene, n)
    end
  end

  describe "a broker" do
    for how <- [:pause, :halt] do
      test "that goes away (#{how}): the commit covers only what was handed out", %{
        hosts: hosts,
        kafka: kafka
      } do
        scene = Scene.new(hosts: hosts, start_ahead: 200)
        n = 3_000
        Scene.publish(scene, 0..(n - 1))
        vm = Scene.vm(scene)
        :ok = Scene.work(scene, vm, sleep: 1)
        Scene.await_handled(scene, n, 600)

        if unquote(how) == :pause, do: Kafka.pause(kafka), else: Kafka.halt(kafka)
        # All that could still be handed out has been: nothing more is, without a START.
        standstill(scene, n)
        VM.kill(vm)
        if unquote(how) == :pause, do: Kafka.cont(kafka), else: Kafka.resume(kafka)

        checker = Scene.check(scene, n)
        assert checker.handled < n
        covered_was_seen(scene, checker)

        :ok = Scene.work(scene, Scene.vm(scene))
        Scene.await_all(scene, n)
        assert Scene.dead(scene) == 0
      end
    end

    test "restarted under load: nothing is lost", %{hosts: hosts, kafka: kafka} do
      scene = Scene.new(hosts: hosts, calm: true)
      n = 4_000
      Scene.publish(scene, 0..(n - 1))
      :ok = Scene.work(scene, nil, sleep: 1, fail_every: 10)

      Scene.await_handled(scene, n, div(n, 4))
      :ok = Kafka.restart(kafka)

      checker = Scene.await_all(scene, n)
      assert Scene.dead(scene) == 0
      assert map_size(checker.failed) == div(n, 10)
      Scene.await_committed(scene, 20_000)
      :ok = Worker.stop()
    end

    test "frozen when a consumer's VM is killed: its tracker is gone within 2 s all the same", %{
      hosts: hosts,
      kafka: kafka
    } do
      scene = Scene.new(hosts: hosts)
      Scene.publish(scene, 0..99)
      vm = Scene.vm(scene)
      :ok = Scene.work(scene, vm, never: Enum.to_list(0..99))
      Scene.await_handled(scene, 100, 0)
      eventually(fn -> map_size(Scene.check(scene, 100).failed) > 0 end, 15_000)
      [{tracker, "kmq_tracker"}] = VM.port_programs(vm)

      Kafka.pause(kafka)
      VM.kill(vm)
      eventually(fn -> not VM.os_alive?(tracker) end, 2_000)
      Kafka.cont(kafka)
    end
  end

  describe "an idle marker topic" do
    test "is committed to its end by the tracker, which reads nothing again but its own CLOCK", %{
      hosts: hosts
    } do
      scene = Scene.new(hosts: hosts, calm: true)
      n = 500
      Scene.publish(scene, 0..(n - 1))
      :ok = Scene.work(scene, nil)
      Scene.await_all(scene, n)
      Scene.await_committed(scene)
      tracker_committed(scene)
      :ok = Worker.stop()
      tracker_committed(scene)

      tracker = start_supervised!({Kmq.Tracker, scene.options})

      read =
        eventually(
          fn ->
            {:ok, %{partitions: partitions}} = Kmq.Tracker.info(tracker)
            assert length(partitions) == scene.partitions
            assert Enum.all?(partitions, &(&1.state == :ready))
            Enum.map(partitions, &{&1.read, &1.open})
          end,
          15_000
        )

      assert Enum.uniq(read) == [{1, 0}]
      tracker_committed(scene)
    end
  end

  defp once(scene, n) do
    checker = Scene.check(scene, n)
    assert Checker.missing(checker) == []
    assert Checker.twice(checker) == []
    assert checker.raised == 0
    assert Scene.dead(scene) == 0
  end

  # Every offset below the committed one has been handed out: the workers have seen it. What they had been given and not begun
  # (4 workers with 10 each) is all that may be unseen.
  defp covered_was_seen(scene, checker) do
    unseen =
      for {partition, offset} <- Scene.committed(scene), offset > 0, reduce: 0 do
        unseen ->
          unseen +
            Enum.count(
              0..(offset - 1),
              &(not MapSet.member?(Checker.seen(checker, partition), &1))
            )
      end

    assert unseen <= 40
  end

  # A second without a message handled.
  defp standstill(scene, n) do
    handled = Scene.check(scene, n).handled
    Process.sleep(1_000)
    if Scene.check(scene, n).handled != handled, do: standstill(scene, n)
  end

  defp tracker_committed(scene) do
    markers = Scene.markers(scene)

    eventually(
      fn ->
        ends = Checker.ends(scene.hosts, markers, scene.partitions)

        assert Checker.committed(
                 scene.hosts,
                 Kmq.Tracker.tracker_group(scene.group),
                 markers,
                 scene.partitions
               ) ==
                 ends

        true
      end,
      15_000
    )
  end
end
