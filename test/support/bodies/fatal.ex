defmodule Kmq.Test.Bodies.Fatal do
  @moduledoc false
  # A client of librdkafka that turned fatal is replaced; what is in work does not notice.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.{Consumer, Publisher}

  body "a publisher whose producer turned fatal says what was not published, and goes on", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)
    assert {:ok, _} = Publisher.publish(publisher, topic, "before")
    %{ref: ref} = :sys.get_state(publisher)

    # What is not sent yet when it happens fails, and is told.
    assert :ok = Publisher.publish_many_async(publisher, for(i <- 1..500, do: {topic, "#{i}"}))
    assert :ok = :kmq_nif.publisher_test_fatal(ref)
    flushed = Publisher.flush(publisher, scaled(10_000))

    assert eventually(fn -> match?({:ok, _}, Publisher.publish(publisher, topic, "after")) end)
    assert :ok = Publisher.flush(publisher)
    values = for record <- records(cluster, topic, 1), do: record.value
    assert "before" in values and List.last(values) == "after"
    if flushed == :ok, do: assert(length(values) == 502), else: assert({:error, _} = flushed)
    assert :ok = Publisher.close(publisher)
  end

  body "fatal clients are replaced: what is in work can be settled, the rest comes at no attempt, none twice",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    n = 400
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
    options = options(cluster, topic, start_ahead: 50)
    consumer = consumer(options)
    handle = GenServer.call(consumer, :handle)

    {messages, _} =
      Enum.map_reduce(1..2, [], fn round, open ->
        taken = take(consumer, 100, [])

        # What no acknowledged commit covers when a client is lost is the group's, and would come a second time.
        eventually(fn -> assert Kmq.info(consumer).total.lag == n - 100 * round end)
        began = System.monotonic_time(:millisecond)
        # The second time both, at once.
        if round == 2, do: assert(:ok = GenServer.call(handle.pid, {:test_fatal, :producer}))
        assert :ok = GenServer.call(handle.pid, {:test_fatal, :consumer})

        # It is the same handle: whoever holds a message notices nothing.
        eventually(fn -> assert Kmq.info(consumer).total.assigned == 0 end)
        assert Kmq.ack(Enum.take(taken, 50), sync: true) == :ok
        assert Kmq.ack(open) == :ok
        eventually(fn -> assert Kmq.info(consumer).total.assigned == 2 end, 30_000)

        IO.puts(
          :stderr,
          "fatal consumer client, round #{round}: assigned again after #{System.monotonic_time(:millisecond) - began} ms"
        )

        {taken, Enum.drop(taken, 50)}
      end)

    [_, second] = messages
    assert Kmq.ack(Enum.drop(second, 50)) == :ok
    taken = Enum.concat(messages)
    rest = pull(consumer, n - length(taken))
    assert GenServer.call(consumer, :handle) == handle
    assert Kmq.ack(rest, sync: true) == :ok
    eventually(fn -> assert %{lag: 0, open: 0} = Kmq.info(consumer).total end)
    assert Consumer.pull(consumer, max: 10, wait: 500) == []

    all = taken ++ rest
    assert all |> Enum.map(& &1.value) |> Enum.uniq() |> length() == n
    assert length(all) == n
    assert Enum.all?(all, &(&1.attempt == 1))
  end

  defp take(_consumer, 0, acc), do: acc

  defp take(consumer, n, acc) do
    messages = Consumer.pull(consumer, max: n, wait: scaled(15_000))
    assert messages != []
    take(consumer, n - length(messages), acc ++ messages)
  end
end
