defmodule Kmq.Sandbox.StopTest do
  # A consumer that stops gives back what is open: from then on nobody acknowledges it with an :ok that means nothing.
  use Kmq.Test.ClusterCase, on: :sandbox

  test "what was acknowledged with :ok while a consumer stopped is not handed out again", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..400, do: {"#{i}", partition: rem(i, 2)}))
    options = options(cluster, topic) |> Keyword.delete(:name)
    {:ok, first} = Kmq.Consumer.start_link(options)
    messages = pull(first, 400, 20_000)

    # Each answer takes so long: what it gives back is on its way while others go on acknowledging.
    :ok = Kmq.Sandbox.inject(cluster.sandbox, {:rtt, 1, 300})
    stop = Task.async(fn -> Kmq.Consumer.stop(first) end)

    answers =
      for message <- messages do
        Process.sleep(3)
        {message.value, Kmq.ack(message)}
      end

    assert Task.await(stop, 30_000) == :ok
    :ok = Kmq.Sandbox.inject(cluster.sandbox, {:rtt, 1, 0})
    done = for {value, :ok} <- answers, into: MapSet.new(), do: value
    assert MapSet.size(done) in 1..399

    {:ok, second} = Kmq.Consumer.start_link(options)
    # A late ack may still come in time for the tracker: of the others as many as come.
    assert Enum.filter(until_none(second), &(&1.value in done)) == []
    :ok = Kmq.Consumer.stop(second)
  end

  test "what could not be written in time is told to who stops it, and to nobody else" do
    sandbox = start_supervised!({Kmq.Sandbox, topics: %{"orders" => 1}}, id: :own)
    cluster = %{kind: :sandbox, hosts: Kmq.Sandbox.bootstrap(sandbox)}
    publish(cluster, "orders", ["flour"])
    {:ok, consumer} = Kmq.Consumer.start_link(options(cluster, "orders", drain_timeout: 1_000))
    [message] = pull(consumer, 1)
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_down, 1})
    :ok = Kmq.ack(message)

    log =
      ExUnit.CaptureLog.capture_log(fn ->
        assert {:error, %Kmq.Error{reason: :timeout}} = Kmq.Consumer.stop(consumer)
      end)

    assert log =~ "closed, but not in order"
    refute Process.alive?(consumer)
    refute_received {_alias, %Kmq.Error{}}
  end

  # It has what is empty: nothing of it can come again.
  test "one that holds nothing has lost nothing, however slow the broker" do
    sandbox = start_supervised!({Kmq.Sandbox, topics: %{"orders" => 1}}, id: :own)
    cluster = %{kind: :sandbox, hosts: Kmq.Sandbox.bootstrap(sandbox)}
    {:ok, consumer} = Kmq.Consumer.start_link(options(cluster, "orders", drain_timeout: 1_000))
    eventually(fn -> assert %{assigned: 1} = Kmq.info(consumer).total end, 20_000)
    :ok = Kmq.Sandbox.inject(sandbox, {:rtt, 1, 60_000})
    assert Kmq.Consumer.stop(consumer) == :ok
  end

  defp until_none(consumer) do
    case Kmq.Consumer.pull(consumer, max: 400, wait: 3_000) do
      [] -> []
      messages -> messages ++ until_none(consumer)
    end
  end
end
