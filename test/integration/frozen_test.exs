defmodule Kmq.Integration.FrozenTest do
  # A broker, or a VM, that stands still: connections stay, nothing answers. Every call ends in its time, and when it goes on, so does all.
  use ExUnit.Case, async: false
  import Kmq.Test.{ClusterCase, Eventually}

  alias Kmq.{Consumer, Error}
  alias Kmq.Test.{Checker, Kafka, Scene, VM, Worker}

  @moduletag :integration
  @moduletag :capture_log

  setup do: on_exit(&nothing_left/0)

  setup_all do
    # Its own controller does not take it for dead while it stands still.
    kafka = Kafka.start!(config: %{"broker.session.timeout.ms" => 60_000})
    %{kafka: kafka, cluster: %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}}
  end

  defp quick(cluster, topic, extra) do
    options(
      cluster,
      topic,
      [
        group_config: [session_timeout_seconds: 2, heartbeat_rate_seconds: 1],
        kafka_config: [consumer: ["heartbeat.interval.ms": 300]]
      ] ++ extra
    )
  end

  # How long it took, and what came of it. The limits are the documented ones and what a loaded machine needs.
  defp within(limit_ms, fun) do
    {us, result} = :timer.tc(fun)
    assert div(us, 1_000) < limit_ms + scaled(2_000), "#{div(us, 1_000)} ms, expected #{limit_ms}"
    result
  end

  defp row(consumer), do: hd(Kmq.info(consumer).partitions)

  test "a frozen broker: taking, settling, looking, steering and a lost assignment end in time; then it goes on",
       %{cluster: cluster, kafka: kafka} do
    topic = queue(cluster, 1)
    n = 600
    publish(cluster, topic, for(i <- 1..n, do: "#{i}"))
    options = quick(cluster, topic, start_ahead: 100, lease: 60_000)
    consumer = consumer(options)
    first = Consumer.pull(consumer, max: 50, wait: 20_000)
    assert first != []
    eventually(fn -> assert row(consumer).started > 0 end)

    :ok = Kafka.pause(kafka)
    # What has its START is handed out, nothing else is.
    ahead = within(1_000, fn -> take_all(consumer, []) end)
    assert Kmq.info(consumer).total.open == length(first ++ ahead)

    {one, more} = Enum.split(first, 1)
    assert within(200, fn -> Kmq.ack(one) end) == :ok

    assert {:error, [{_, :timeout} | _]} = within(700, fn -> Kmq.ack(more, sync: 500) end)

    assert {:error, %Error{retriable?: true}} =
             within(1_000, fn -> Consumer.flush(consumer, 500) end)

    assert within(200, fn -> Kmq.pause(consumer, {topic, 0}) end) == :ok
    assert within(200, fn -> Kmq.resume(consumer, {topic, 0}) end) == :ok
    seek = Task.async(fn -> within(22_000, fn -> Kmq.seek(consumer, {topic, 0}, 0) end) end)

    # Longer than the session: its partitions are the group's again, and nobody waits for the broker to say so.
    eventually(fn -> assert Kmq.info(consumer).total.assigned == 0 end, 20_000)
    assert {:error, %Error{retriable?: true}} = Task.await(seek, 60_000)
    assert Enum.all?(ahead, &(Kmq.ack(&1) == :ok))

    :ok = Kafka.cont(kafka)

    # All come. Twice only what was handed out with nobody to take the commit: its group fetches that again.
    seen = fn messages -> MapSet.new(first ++ ahead ++ messages, & &1.offset) end
    rest = pull_until(consumer, &(MapSet.size(seen.(&1)) == n), 30_000)
    assert Enum.all?(rest, &(&1.attempt == 1))
    before = seen.([])
    twice = Enum.count(rest, &MapSet.member?(before, &1.offset))
    assert length(rest) == n - MapSet.size(before) + twice
    assert Kmq.ack(rest, sync: true) == :ok
    eventually(fn -> assert %{lag: 0, open: 0, unwritten: 0} = Kmq.info(consumer).total end)
    assert Consumer.pull(consumer, max: 10, wait: 500) == []
  end

  defp take_all(consumer, acc) do
    case Consumer.pull(consumer, max: 100, wait: 300) do
      [] -> acc
      messages -> take_all(consumer, acc ++ messages)
    end
  end

  test "a stop while the broker is frozen ends in drain_timeout and a second; what is not written comes again",
       %{cluster: cluster, kafka: kafka} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..20, do: "#{i}"))
    options = quick(cluster, topic, drain_timeout: 2_000)
    consumer = consumer(options)
    messages = pull(consumer, 20)
    {done, open} = Enum.split(messages, 10)
    assert Kmq.ack(done, sync: true) == :ok

    :ok = Kafka.pause(kafka)
    assert Kmq.ack(open) == :ok
    stopped = within(3_000, fn -> Consumer.stop(consumer) end)
    :ok = Kafka.cont(kafka)
    assert {:error, %Kmq.Error{reason: :timeout}} = stopped

    # The ENDs may have got through after all; if not, the messages come again. None of the others does.
    again = consumer(options)
    eventually(fn -> assert %{assigned: 1, lag: 0} = Kmq.info(again).total end, 30_000)
    repeated = Consumer.pull(again, max: 20, wait: 2_500)
    assert Enum.map(repeated, & &1.value) -- Enum.map(open, & &1.value) == []
    assert Kmq.ack(repeated, sync: true) == :ok
  end

  # Its clients, and in transactions threads of its own, wait for Kafka.
  for redelivery <- [:idempotent, :transactional] do
    test "a VM that is killed while the broker is frozen takes its tracker along (#{redelivery})",
         %{cluster: cluster, kafka: kafka} do
      scene = Scene.new(hosts: cluster.hosts, partitions: 2, redelivery: unquote(redelivery))

      n = 2_000
      Scene.publish(scene, 0..(n - 1))
      vm = Scene.vm(scene)
      :ok = Scene.work(scene, vm, fail_every: 2)
      # in the middle of copying
      eventually(fn -> Scene.copies(scene, n) > 0 end, 30_000)
      :ok = Kafka.pause(kafka)
      programs = for {pid, "kmq_tracker"} <- VM.port_programs(vm), do: pid
      assert [_one] = programs
      VM.kill(vm)
      eventually(fn -> not Enum.any?(programs, &VM.os_alive?/1) end, 2_000)
      :ok = Kafka.cont(kafka)
    end
  end

  test "a frozen VM that wakes up as a zombie: its commit moves nothing back, its ENDs harm nobody, it works again",
       %{cluster: cluster} do
    scene = Scene.new(hosts: cluster.hosts, partitions: 2)
    n = 3_000
    Scene.publish(scene, 0..(n - 1))
    zombie = Scene.vm(scene)
    :ok = Scene.work(scene, zombie, sleep: 2)
    Scene.await_handled(scene, n, 300)

    # Twice its session of 2 s, at least; meanwhile another one has its partitions, and its leases are over.
    VM.signal(zombie, :stop)
    :ok = Scene.work(scene, nil, sleep: 1)
    Scene.await_handled(scene, n, n - 200)
    before = Scene.committed(scene)
    VM.signal(zombie, :cont)

    Scene.publish(scene, n..(n + 499))
    Scene.await_all(scene, n + 500)
    later = Scene.committed(scene)
    for {partition, offset} <- before, do: assert(later[partition] >= offset)

    # Reading again: it has its share.
    eventually(
      fn ->
        [%{partitions: partitions}] = VM.call(zombie, Worker, :info, [])
        assert Enum.count(partitions, &(&1.state == :assigned)) == 1
      end,
      30_000
    )

    seen = Checker.handled(Scene.check(scene, n + 500))
    Scene.publish(scene, (n + 500)..(n + 999))
    checker = Scene.await_all(scene, n + 1_000)
    assert Checker.handled(checker) == seen + 500
    Scene.await_committed(scene, 30_000)
    assert Scene.dead(scene) == 0

    IO.puts(
      :stderr,
      "a frozen VM: #{checker.twice} of #{n + 1_000} handled twice, #{checker.raised} with a raised count"
    )

    refute VM.tail(zombie) =~ "terminating"
    :ok = VM.call(zombie, Worker, :stop, [])
    :ok = Worker.stop()
  end
end
