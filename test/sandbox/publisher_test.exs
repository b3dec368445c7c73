defmodule Kmq.Sandbox.PublisherTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Error, Publisher}

  run_bodies(Kmq.Test.Bodies.Publisher)

  test "no broker: errors that say so, in bounded time, and it goes on when one is back" do
    # Nobody listens there; the topic is asked for within 15 s, so this runs beside the next.
    nobody = Task.async(fn -> nobody_answers("127.0.0.1:1") end)
    goes_away()
    Task.await(nobody, 40_000)
  end

  defp nobody_answers(hosts) do
    {:ok, publisher} = Publisher.start_link(hosts: hosts, delivery_timeout: 1_000)
    {us, result} = :timer.tc(fn -> Publisher.publish(publisher, "orders", "v") end)
    assert {:error, %Error{} = error} = result
    assert error.reason in [:transport, :timed_out, :all_brokers_down, :unreachable]
    assert us < 20_000_000
    Publisher.close(publisher)
  end

  # publish_async said :ok of each: an orderly end waits for what is on its way.
  test "stopped by its supervisor with thousands on their way: all of them are published" do
    sandbox = start_supervised!(Kmq.Sandbox, id: :slow)
    cluster = %{kind: :sandbox, hosts: Kmq.Sandbox.bootstrap(sandbox)}
    topic = queue(cluster, 1)
    start_supervised!({Publisher, hosts: cluster.hosts, name: :stopped, compression: :none})
    assert {:ok, _} = Publisher.publish(:stopped, topic, "first")
    :ok = Kmq.Sandbox.inject(sandbox, {:rtt, 1, 300})
    for i <- 1..5_000, do: :ok = Publisher.publish_async(:stopped, topic, "#{i}")
    assert Publisher.queued(:stopped) > 0
    stop_supervised!(:stopped)
    :ok = Kmq.Sandbox.inject(sandbox, {:rtt, 1, 0})
    assert length(records(cluster, topic, 1)) == 5_001
  end

  test "a timeout that is none is refused in the caller" do
    sandbox = start_supervised!(Kmq.Sandbox, id: :timeouts)
    publisher = start_supervised!({Publisher, hosts: Kmq.Sandbox.bootstrap(sandbox)})

    for bad <- [2 ** 70, -1, "x", nil] do
      assert_raise ArgumentError, ~r/a timeout is milliseconds/, fn ->
        Publisher.flush(publisher, bad)
      end
    end

    assert Publisher.flush(publisher, 1_000) == :ok
  end

  # What is queued is reported as failed, what finds no room says so.
  defp goes_away do
    sandbox = start_supervised!(Kmq.Sandbox, id: :mortal)
    cluster = %{kind: :sandbox, hosts: Kmq.Sandbox.bootstrap(sandbox)}
    topic = queue(cluster, 1)
    # librdkafka looks at timeouts when it tries to connect again: by default up to 10 s apart.
    soon = [common: ["reconnect.backoff.max.ms": 300]]

    options = [
      hosts: cluster.hosts,
      delivery_timeout: 1_500,
      queue_messages: 10,
      kafka_config: soon
    ]

    {:ok, publisher} = Publisher.start_link(options)
    assert {:ok, _} = Publisher.publish(publisher, topic, "v")
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_down, 1})

    for i <- 1..10, do: assert(Publisher.publish_async(publisher, topic, "#{i}") == :ok)

    {us, full} =
      :timer.tc(fn -> Publisher.publish_async(publisher, topic, "11", timeout: 200) end)

    assert {:error, %Error{reason: :queue_full, retriable?: true}} = full
    assert us in 200_000..5_000_000

    assert {:error, %Error{reason: :queue_full}} =
             Publisher.publish(publisher, topic, "12", timeout: 200)

    assert {:error, %Error{reason: :kafka} = error} = Publisher.flush(publisher, 20_000)
    assert error.message =~ "10 messages were not published"
    assert {:error, %Error{reason: :msg_timed_out}} = Publisher.publish(publisher, topic, "13")

    # It is there again, and so is the publisher.
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_up, 1})

    assert eventually(
             fn -> match?({:ok, _}, Publisher.publish(publisher, topic, "14")) end,
             10_000
           )

    assert Publisher.close(publisher) == :ok
  end
end
