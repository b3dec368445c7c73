defmodule Kmq.Integration.RightsTest do
  # The table of guides/security.md, right by right. With all of them everything works: security_test.exs has that, with the same rights.
  # Here each is taken away alone, and what the table says is said. All rows at the same time, each on topics and a group of its own.
  use ExUnit.Case

  import Kmq.Test.ClusterCase
  import Kmq.Test.Eventually

  alias Kmq.{Consumer, Publisher, Topics, Tracker}
  alias Kmq.Test.{Kafka, Scene, SecuredKafka}

  @moduletag :integration
  @moduletag :secured
  @moduletag :capture_log
  @moduletag timeout: 240_000

  @page "guides/security.md"
  @external_resource @page
  @row ~r/^\| (publisher|consumer|tracker) \| (topic|group) `([^`]+)` \| `([A-Z_]+)` \| [^|]* \| ([^`]*)`([^`]+)` \|$/m
  @users %{"publisher" => "sender", "consumer" => "app", "tracker" => "tracker"}

  setup_all do
    kafka = start_supervised!(%{id: :kafka, start: {SecuredKafka, :start_link, []}})
    %{dir: Kafka.dir(kafka), hosts: Kafka.bootstrap(kafka), sasl: Kafka.listener(kafka, "SASL")}
  end

  test "without one row of the table what it says is said, and nothing comes of it", context do
    rows = for [_ | cells] <- Regex.scan(@row, File.read!(@page)), do: List.to_tuple(cells)
    assert length(rows) == 12
    Scene.listen()
    tasks = for row <- rows, do: {row, Task.async(fn -> without(row, rows, context) end)}
    for _ <- rows, do: assert_receive({:provoked, _topic}, scaled(120_000))

    for {{_, _, _, _, effect, says} = row, task} <- tasks do
      send(task.pid, {:names, self()})
      assert_receive {:names, topic, group, refusal}, scaled(1_000)
      said = named(says, topic, group)

      # What refuses says so itself; else the event does.
      if effect =~ "fails" or effect =~ "no start",
        do: assert(Exception.message(refusal) =~ said, inspect(row)),
        else: await_event(said, topic, group, row)

      send(task.pid, :stop)
      assert Task.await(task, scaled(60_000)) == if(effect =~ "dead letters go", do: 1, else: 0)
    end

    nothing_left()
  end

  defp named(text, topic, group),
    do: text |> String.replace("<Q>", topic) |> String.replace("<group>", group)

  defp await_event(said, topic, group, row) do
    receive do
      {[:kmq, :error], _, %{error: %{message: text}, group: ^group}} ->
        text =~ said || await_event(said, topic, group, row)
    after
      scaled(60_000) -> flunk("nobody said #{inspect(said)}: #{inspect(row)}")
    end
  end

  # Gives all rights but this one, does what needs it, and waits. The result: how many dead letters there are.
  defp without(row, rows, context) do
    Process.flag(:trap_exit, true)
    [topic, group] = [unique("q"), unique("g")]
    :ok = Topics.create_topic(topic, 1, hosts: context.hosts)
    {:ok, _} = Topics.create(hosts: context.hosts, topics: [topic], group_id: group)

    for {who, resource, name, operation, _, _} <- List.delete(rows, row) do
      operation = operation |> String.downcase() |> String.to_existing_atom()
      grant = {String.to_existing_atom(resource), named(name, topic, group), [operation]}
      :ok = SecuredKafka.allow(context.hosts, @users[who], [grant])
    end

    who = elem(row, 0)
    mine = [topics: [topic], group_id: group]

    door = [
      hosts: context.sasl,
      client_config: SecuredKafka.client(context.dir, @users[who], :plain)
    ]

    {refusal, stop} = provoke(who, door, [hosts: context.hosts] ++ mine, mine)
    test = hd(Process.get(:"$callers"))
    send(test, {:provoked, topic})
    receive do: ({:names, pid} -> send(pid, {:names, topic, group, refusal}))
    receive do: (:stop -> :ok)
    stop.()
    topic |> Kmq.DeadLetters.stream(hosts: context.hosts) |> Enum.count()
  end

  defp provoke("publisher", door, _others, topics: [topic], group_id: _) do
    {:ok, publisher} = Publisher.start_link(door)
    {:error, error} = Publisher.publish(publisher, topic, "flour")
    {error, fn -> Publisher.close(publisher) end}
  end

  defp provoke("consumer", door, others, mine) do
    case Consumer.start_link(door ++ mine ++ [tracker: :external]) do
      {:error, error} ->
        {error, fn -> :ok end}

      {:ok, consumer} ->
        publish(others)
        assert Consumer.pull(consumer, wait: 1_000) == []
        {nil, fn -> Consumer.stop(consumer) end}
    end
  end

  defp provoke("tracker", door, others, mine) do
    with {:ok, tracker} <- Tracker.start_link(door ++ mine) do
      publish(others)
      {:ok, consumer} = Consumer.start_link(others ++ [tracker: :external])
      [failed, rejected] = pull(consumer, 2, 60_000)
      :ok = Kmq.retry(failed, delay: 0, sync: true)
      :ok = Kmq.reject(rejected, "mouldy", sync: true)

      stop = fn ->
        assert Consumer.pull(consumer) == []
        Consumer.stop(consumer)
        GenServer.stop(tracker)
      end

      {nil, stop}
    else
      {:error, error} -> {error, fn -> :ok end}
    end
  end

  defp publish(others) do
    {:ok, publisher} = Publisher.start_link(hosts: others[:hosts])
    [topic] = others[:topics]
    {:ok, _} = Publisher.publish_many(publisher, [{topic, "flour"}, {topic, "sugar"}])
    :ok = Publisher.close(publisher)
  end
end
