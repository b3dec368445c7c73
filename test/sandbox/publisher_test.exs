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
    # All of them are told what the first question has found.
    {us, results} =
      :timer.tc(fn ->
        ["orders", "bills", "returns"]
        |> Task.async_stream(&Publisher.publish(publisher, &1, "v"),
          max_concurrency: 3,
          timeout: 60_000
        )
        |> Enum.map(fn {:ok, result} -> result end)
      end)

    for result <- results do
      assert {:error, %Error{} = error} = result
      assert error.reason in [:transport, :timed_out, :all_brokers_down, :unreachable]
    end

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

  defmodule Backend do
    def execute([:kmq, :publish | _] = event, %{count: n}, metadata),
      do: Kmq.Sandbox.PublisherTest |> Process.whereis() |> tell({event, n, metadata})

    def execute(_event, _measurements, _metadata), do: :ok

    defp tell(nil, _event), do: :ok
    defp tell(pid, event), do: send(pid, event)
  end

  defp listen do
    Process.register(self(), __MODULE__)
    Kmq.Telemetry.put_backend(Backend)
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
  end

  # {what is said of the topic: written or why not, how many}
  defp told(topic) do
    receive do
      {[:kmq, :publish], n, %{topic: ^topic}} -> {:written, n}
      {[:kmq, :publish, :error], n, %{topic: ^topic, reason: reason}} -> {reason, n}
    after
      scaled(30_000) -> flunk("nothing was said of #{topic}")
    end
  end

  defp mortal(id, options) do
    sandbox = start_supervised!(Kmq.Sandbox, id: id)
    hosts = Kmq.Sandbox.bootstrap(sandbox)
    topic = queue(%{kind: :sandbox, hosts: hosts}, 1)
    soon = [common: ["reconnect.backoff.max.ms": 300]]
    {:ok, publisher} = Publisher.start_link([hosts: hosts, kafka_config: soon] ++ options)
    assert {:ok, _} = Publisher.publish(publisher, topic, "v")
    {sandbox, publisher, topic}
  end

  defp timed(fun) do
    {us, result} = :timer.tc(fun)
    {div(us, 1_000), result}
  end

  test "a timeout is the whole call's; what became of the message is told once, and nobody's mailbox" do
    {sandbox, publisher, topic} = mortal(:late, delivery_timeout: 60_000)
    listen()
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_down, 1})

    {ms, result} = timed(fn -> Publisher.publish(publisher, topic, "one", timeout: 300) end)
    assert {:error, %Error{reason: :timeout, retriable?: true} = error} = result
    assert error.message =~ "may still be written"
    assert ms in 300..scaled(5_000)

    messages = [{topic, "two"}, {topic, "three"}]
    {ms, result} = timed(fn -> Publisher.publish_many(publisher, messages, timeout: 300) end)

    assert {:error, [{:error, %Error{reason: :timeout}}, {:error, %Error{reason: :timeout}}]} =
             result

    assert ms in 300..scaled(5_000)
    refute_received {[:kmq, :publish | _], _, _}

    # They were on their way, and are there when a broker is.
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_up, 1})
    assert Enum.sort([told(topic), told(topic)]) == [{:written, 1}, {:written, 2}]

    assert {:ok, %{offset: 4}} = Publisher.publish(publisher, topic, "four", timeout: 60_000)
    assert told(topic) == {:written, 1}
    refute_received _any
    assert Publisher.close(publisher) == :ok
  end

  test "a timeout of what is refused by the topic, and of what fails in time, changes nothing" do
    {_sandbox, publisher, topic} = mortal(:refused, delivery_timeout: 60_000)
    large = :binary.copy("x", 3_000_000)
    messages = [{topic, "a"}, {topic, large}, {topic, "b"}]

    assert {:error, [{:ok, _}, {:error, %Error{reason: :msg_size_too_large}}, {:ok, _}]} =
             Publisher.publish_many(publisher, messages, timeout: 30_000)

    assert Publisher.publish_many(publisher, [], timeout: 0) == {:ok, []}
    refute_received _any
    Publisher.close(publisher)
  end

  # While nobody answers about one topic, everything else of the publisher goes on.
  test "a topic nobody tells about: nobody waits longer than was asked for" do
    {sandbox, publisher, topic} = mortal(:silent, delivery_timeout: 60_000)
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_down, 1})

    for publish <- [&Publisher.publish/4, &Publisher.publish_async/4] do
      {ms, result} = timed(fn -> publish.(publisher, "another", "v", timeout: 300) end)
      assert {:error, %Error{reason: :timeout} = error} = result
      assert error.message =~ ~s(no answer about the topic "another" in time: nothing is written)
      assert ms in 300..scaled(5_000)
    end

    {ms, 0} = timed(fn -> Publisher.queued(publisher) end)
    assert ms < scaled(2_000)
    assert Publisher.publish_async(publisher, topic, "w") == :ok

    :ok = Kmq.Sandbox.inject(sandbox, {:broker_up, 1})
    assert Publisher.close(publisher) == :ok
  end

  test "the end of a publisher tells what was not reported, by topic" do
    {sandbox, publisher, topic} = mortal(:ended, delivery_timeout: 60_000)
    listen()
    :ok = Kmq.Sandbox.inject(sandbox, {:broker_down, 1})
    for i <- 1..7, do: :ok = Publisher.publish_async(publisher, topic, "#{i}")

    waits = Task.async(fn -> Publisher.publish(publisher, topic, "sync") end)
    eventually(fn -> Publisher.queued(publisher) == 8 end)
    assert {:error, %Error{reason: :timeout}} = Publisher.close(publisher, 100)
    assert {:error, %Error{reason: :closed} = error} = Task.await(waits)
    assert error.message =~ "may be written" or error.message =~ "is closed"
    assert Enum.sort([told(topic), told(topic)]) == [{:closed, 1}, {:closed, 7}]
    refute_received {[:kmq, :publish | _], _, _}
    _ = sandbox
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
