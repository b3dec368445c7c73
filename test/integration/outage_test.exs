defmodule Kmq.Integration.OutageTest do
  # Delayed messages, and everything is down: consumer, tracker and broker are killed together. What becomes due meanwhile comes at the
  # start, what becomes due later when it is due; with both ways of redelivery.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Test.{Holder, Kafka, RawLog, Scene, VM}

  @n 100

  defp now, do: System.os_time(:millisecond)

  defp due(message) do
    {_, due} = List.keyfind(message.headers, "kmq-due", 0)
    String.to_integer(due)
  end

  @tag timeout: 240_000
  test "delayed messages outlive it: none lost, none early, one copy of each" do
    kafka = Kafka.start!()
    cluster = %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}

    scenes =
      for way <- [:idempotent, :transactional],
          do: Scene.new(hosts: cluster.hosts, partitions: 2, redelivery: way)

    vm = Scene.vm(hd(scenes))
    for scene <- scenes, do: :ok = VM.call(vm, Holder, :wait, [scene.options])
    # one half within the outage, the other half after it
    first = now() + scaled(7_000)
    second = first + scaled(12_000)

    for scene <- scenes do
      publish(
        cluster,
        scene.topic,
        for i <- 1..@n do
          at = if(rem(i, 4) < 2, do: first, else: second) + div(i, 2)
          {"#{i}", partition: rem(i, 2), at: DateTime.from_unix!(at, :millisecond)}
        end
      )
    end

    # A commit covers a delayed message when that is parked.
    Enum.each(scenes, &Scene.await_committed/1)
    assert Enum.map(scenes, &copies/1) == [0, 0]
    trackers = for {pid, "kmq_tracker"} <- VM.port_programs(vm), do: pid
    assert length(trackers) == 2
    Enum.each(trackers, &VM.signal(&1, :kill))
    VM.kill(vm)
    :ok = Kafka.halt(kafka)
    assert now() < first, "too slow for its times: KMQ_TEST_SCALE"
    eventually(fn -> now() > first + @n end, 60_000)
    :ok = Kafka.resume(kafka)
    began = now()

    for scene <- scenes do
      consumer = consumer(scene.options)
      Task.async(fn -> {scene, collect(consumer, began, [])} end)
    end
    |> Task.await_many(:infinity)
    |> Enum.each(fn {scene, got} -> check(scene, got, began) end)

    Kafka.stop(kafka)
  end

  defp check(scene, got, began) do
    assert got |> Enum.map(fn {m, _} -> m.value end) |> Enum.uniq() |> length() == @n
    assert length(got) == @n
    assert for({m, at} <- got, at < due(m), do: due(m) - at) == []
    assert Enum.all?(got, fn {m, _} -> {m.attempt, m.deliveries} == {1, 1} end)
    assert copies(scene) == @n

    came = Enum.max(for {m, at} <- got, due(m) < began, do: at)
    later = for {m, at} <- got, due(m) > came, do: at - due(m)

    IO.puts(
      :stderr,
      "#{scene.options[:redelivery]}: due meanwhile within #{came - began} ms of the start, #{length(later)} others at most " <>
        "#{Enum.max(later, fn -> 0 end)} ms late"
    )

    assert came - began < scaled(20_000)
    assert Enum.all?(later, &(&1 < scaled(2_000)))
  end

  # Of a transaction that was given up nobody sees anything.
  defp copies(scene) do
    Enum.count(
      RawLog.read_committed(scene.hosts, scene.topic, 2),
      &List.keymember?(&1.headers, "kmq-deliveries", 0)
    )
  end

  defp collect(_consumer, _began, got) when length(got) >= @n, do: got

  defp collect(consumer, began, got) do
    assert now() - began < scaled(60_000), "only #{length(got)} came"
    messages = Kmq.Consumer.pull(consumer, max: @n, wait: 200)
    if messages != [], do: :ok = Kmq.ack(messages, sync: true)
    collect(consumer, began, for(m <- messages, do: {m, now()}) ++ got)
  end
end
