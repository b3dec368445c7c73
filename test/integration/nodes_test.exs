defmodule Kmq.Integration.NodesTest do
  # From any process on any node: what one node was handed is settled by another one, while the first lives and while it dies.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Publisher}
  alias Kmq.Test.{Nodes, Scene, VM}

  # Where the machine has no loopback by that name, or no sockets, there is nothing to show.
  defp two_nodes(scene) do
    id = System.unique_integer([:positive])

    with {:ok, a, node} <- Nodes.start(scene, "a-#{id}-#{System.pid()}"),
         {:ok, b, _} <- Nodes.start(scene, "b-#{id}-#{System.pid()}") do
      {a, b, node}
    else
      {:error, reason} -> IO.puts("left out: distribution does not start: #{inspect(reason)}")
    end
  end

  defp by_value(messages), do: Map.new(messages, &{&1.value, &1})

  @tag timeout: 180_000
  test "every action, by another node" do
    scene = Scene.new(calm: true, partitions: 1, max_processing_time: scaled(5_000))
    with {a, b, node} <- two_nodes(scene), do: every_action(scene, a, b, node)
  end

  defp every_action(scene, a, b, node) do
    names = ~w(ack retry release snooze extend reject discard leave forget)
    publish(%{hosts: scene.hosts}, scene.topic, names)
    m = by_value(VM.call(b, Nodes, :hold, [node, scene.options, length(names)], 90_000))
    assert node(m["ack"].handle.pid) == node
    there = &VM.call(b, Kmq, &1, &2)

    assert there.(:extend, [m["extend"], 600_000]) == :ok
    assert there.(:ack, [m["ack"], [sync: true]]) == :ok
    assert there.(:retry, [m["retry"], [delay: 0, reason: "not yet", sync: true]]) == :ok
    assert there.(:release, [m["release"]]) == :ok
    assert there.(:snooze, [m["snooze"], 100]) == :ok
    assert there.(:reject, [m["reject"], "never"]) == :ok
    assert there.(:discard, [m["discard"]]) == :ok

    # Its receipt, made and used on a node that was never handed it.
    receipt = there.(:receipt, [m["leave"]])
    assert there.(:leave, [m["leave"], [sync: true]]) == :ok
    {:ok, publisher} = Publisher.start_link(hosts: scene.hosts)
    assert Kmq.settle(publisher, receipt, :ack) == :ok
    :ok = Publisher.close(publisher)

    # What is settled is so, whoever did it and whoever asks.
    assert there.(:ack, [m["ack"]]) == {:error, :unknown}
    both = [m["discard"], m["leave"]]
    assert {:error, refused} = there.(:ack, [both])

    assert Enum.map(refused, fn {message, reason} -> {message.value, reason} end) |> Enum.sort() ==
             [{"discard", :unknown}, {"leave", :unknown}]

    # The rest comes again, the forgotten one when its time is over; the extended one is still in work then.
    again = VM.call(a, Nodes, :more, [4], 90_000)

    assert again |> Enum.map(&{&1.value, &1.attempt, &1.deliveries}) |> Enum.sort() ==
             [{"forget", 2, 2}, {"release", 1, 2}, {"retry", 2, 2}, {"snooze", 1, 2}]

    assert there.(:ack, [[m["extend"] | again], [sync: true]]) == :ok
    dead = scene.topic <> "__undelivered"
    [letter] = await_records(%{hosts: scene.hosts}, dead, 1, 1)

    assert {letter.value, letter.headers |> Map.new() |> Map.get("kmq-error")} ==
             {"reject", "never"}

    VM.kill(a)

    consumer = consumer(scene.options)
    assert Consumer.pull(consumer, max: 5, wait: 3_000) == []
  end

  @tag timeout: 180_000
  test "a publisher of another node: asked as one of this node, also by mistake" do
    scene = Scene.new(partitions: 1)
    with {a, b, _node} <- two_nodes(scene), do: asked_from_afar(scene, a, b)
  end

  defp asked_from_afar(scene, a, b) do
    publisher = VM.call(a, Nodes, :publisher, [[hosts: scene.hosts]])
    there = &VM.call(b, &1, &2, [publisher | &3])

    assert {:ok, %{offset: 0}} = there.(Publisher, :publish, [scene.topic, "one"])
    # Each node counts the time by its own clock.
    assert there.(Publisher, :publish_async, [scene.topic, "two"]) == :ok
    assert there.(Publisher, :flush, [scaled(10_000)]) == :ok
    assert there.(Publisher, :queued, []) == 0

    for {module, function} <- [
          {Consumer, :pull},
          {Consumer, :flush},
          {Consumer, :stop},
          {Kmq.Sandbox, :bootstrap},
          {Kmq.Sandbox, :stop},
          {Kmq.Tracker, :info},
          {Kmq.Tracker, :stop}
        ] do
      error = assert_raise(RuntimeError, fn -> there.(module, function, []) end)

      assert error.message =~
               ~r/#{inspect(module)}.#{function}.* takes a #{inspect(module)}, and .* is a Kmq.Publisher/
    end

    assert_raise RuntimeError, ~r/unknown option :dealy/, fn ->
      there.(Publisher, :publish, [scene.topic, "v", [dealy: 1]])
    end

    assert {:ok, %{offset: 2}} = there.(Publisher, :publish, [scene.topic, "three"])
    VM.kill(a)

    eventually(fn ->
      for {function, args} <- [
            {:publish, [scene.topic, "v"]},
            {:publish_async, [scene.topic, "v"]},
            {:flush, []},
            {:close, []}
          ],
          do: assert({:error, %Kmq.Error{reason: :closed}} = there.(Publisher, function, args))
    end)
  end

  @tag timeout: 180_000
  test "by its handle and by receipts, while the node that was handed them dies" do
    scene = Scene.new(partitions: 1, lease: scaled(6_000))
    with {a, b, node} <- two_nodes(scene), do: dying(scene, a, b, node)
  end

  defp dying(scene, a, b, node) do
    values = for i <- 1..240, do: "#{i}"
    publish(%{hosts: scene.hosts}, scene.topic, values)
    messages = VM.call(b, Nodes, :hold, [node, scene.options, 240], 90_000)
    {acked, rest} = Enum.split(messages, 160)
    {by_receipt, kept} = Enum.split(rest, 60)
    receipts = for m <- by_receipt, do: {m.value, VM.call(b, Kmq, :receipt, [m])}
    {:ok, publisher} = Publisher.start_link(hosts: scene.hosts)
    test = self()

    acks =
      for part <- Enum.chunk_every(acked, 40) do
        Task.async(fn ->
          for m <- part do
            result = VM.call(b, Kmq, :ack, [m, [sync: true]])
            send(test, :settled)
            {m.value, result}
          end
        end)
      end

    settling =
      Task.async(fn ->
        for {value, receipt} <- receipts, do: {value, Kmq.settle(publisher, receipt, :ack)}
      end)

    for _ <- 1..40, do: assert_receive(:settled, scaled(10_000))
    VM.kill(a)
    results = acks |> Task.await_many(scaled(60_000)) |> Enum.concat()
    settled = Task.await(settling, scaled(60_000))
    :ok = Publisher.close(publisher)

    # A receipt needs nobody. An ack is confirmed, or it is told that it is not.
    assert Enum.all?(settled, fn {_, result} -> result == :ok end)
    of = Enum.group_by(results, &elem(&1, 1), &elem(&1, 0))
    assert Map.keys(of) -- [:ok, {:error, :closed}, {:error, :timeout}] == []
    assert [_ | _] = of[:ok]
    assert [_ | _] = lost = of[{:error, :closed}]
    assert VM.call(b, Kmq, :ack, [hd(kept)]) == {:error, :closed}
    assert_raise RuntimeError, ~r/is closed/, fn -> VM.call(b, Kmq, :receipt, [hd(kept)]) end

    # What was told as closed comes again, and what nobody settled; nothing that was confirmed.
    due = MapSet.new(lost ++ Enum.map(kept, & &1.value))
    consumer = consumer(scene.options)
    came = pull_and_ack(consumer, due, [])
    unsure = Map.get(of, {:error, :timeout}, [])
    assert Enum.map(came, & &1.value) -- (MapSet.to_list(due) ++ unsure) == []
    assert Enum.all?(came, &(&1.attempt == 2))
  end

  @tag :slow
  @tag timeout: 180_000
  test "a node that does not answer: told in bounded time" do
    scene = Scene.new(calm: true, partitions: 1)
    with {a, b, node} <- two_nodes(scene), do: frozen(scene, a, b, node)
  end

  defp frozen(scene, a, b, node) do
    publish(%{hosts: scene.hosts}, scene.topic, ["one"])
    [message] = VM.call(b, Nodes, :hold, [node, scene.options, 1], 90_000)
    VM.signal(a, :stop)
    assert VM.call(b, Kmq, :ack, [message], 60_000) == {:error, :timeout}
    # Woken, it does what it was told to.
    VM.signal(a, :cont)
    eventually(fn -> VM.call(b, Kmq, :ack, [message]) == {:error, :unknown} end)
  end

  # What crashed comes in small groups: each must be settled before the next.
  defp pull_and_ack(consumer, due, came) do
    if MapSet.size(due) == 0 do
      came
    else
      more = pull(consumer, 1, 30_000)
      assert Kmq.ack(more, sync: true) == :ok
      due = Enum.reduce(more, due, &MapSet.delete(&2, &1.value))
      pull_and_ack(consumer, due, came ++ more)
    end
  end
end
