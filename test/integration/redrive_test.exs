defmodule Kmq.Integration.RedriveTest do
  # A redrive whose VM is killed in the middle, twice: the next one goes on where it stopped.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, DeadLetters}
  alias Kmq.Test.{Scene, VM}

  @n 400
  # What is sent between two notes of the position.
  @rate 40

  @tag timeout: 180_000
  test "killed in the middle it goes on: nothing lost, twice only what was in flight" do
    scene = Scene.new(calm: true, partitions: 2)
    cluster = %{kind: :kafka, hosts: scene.hosts}

    publish(
      cluster,
      scene.topic,
      for(i <- 0..(@n - 1), do: {"#{i}", key: "#{i}", partition: rem(i, 2)})
    )

    consumer = consumer(scene.options)
    assert Kmq.reject(pull(consumer, @n), "no", sync: true) == :ok
    await_records(cluster, Scene.dead_letters(scene), 2, @n)
    Consumer.stop(consumer)

    # Each goes further than the one before.
    gone = for goal <- [1, 200], do: kill_in_the_middle(scene, goal)
    assert hd(gone) < List.last(gone) and List.last(gone) < @n

    assert {:ok, summary} = DeadLetters.redrive(scene.topic, hosts: scene.hosts)
    assert summary.read == summary.total and summary.total < @n
    IO.puts(:stderr, "killed after #{inspect(gone)} of #{@n}, then #{summary.redriven}")

    back = redriven(scene)
    by_key = Enum.frequencies_by(back, & &1.key)
    assert map_size(by_key) == @n
    assert by_key |> Map.values() |> Enum.max() <= 3
    assert length(back) - @n <= 2 * @rate

    # The same dead letter, not another one with its key.
    letters = for r <- back, into: %{}, do: {r.key, Map.new(r.headers)["kmq-redriven"]}
    assert letters |> Map.values() |> Enum.uniq() |> length() == @n

    assert {:ok, %{read: 0, redriven: 0}} = DeadLetters.redrive(scene.topic, hosts: scene.hosts)
  end

  defp kill_in_the_middle(scene, goal) do
    vm = Scene.vm(scene)
    options = [hosts: scene.hosts, rate: @rate]
    spawn(fn -> VM.call(vm, DeadLetters, :redrive, [scene.topic, options], 120_000) end)
    eventually(fn -> length(redriven(scene)) >= goal end, 30_000)
    VM.kill(vm)
    length(redriven(scene))
  end

  # As dead letters are read: a publisher compresses, which RawLog does not understand.
  defp redriven(scene) do
    for r <- DeadLetters.stream(scene.topic, hosts: scene.hosts, dead_letter_topic: scene.topic),
        List.keymember?(r.headers, "kmq-redriven", 0),
        do: r
  end
end
