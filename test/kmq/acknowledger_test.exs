defmodule Kmq.AcknowledgerTest do
  # What cannot be settled is said, by telemetry and in the log; it never raises into Broadway.
  use Kmq.Test.ClusterCase, on: :sandbox

  import ExUnit.CaptureLog
  alias Kmq.{Consumer, Telemetry}
  alias OffBroadway.Kmq.Acknowledger

  defmodule Backend do
    def execute([:kmq, :ack | _] = event, measurements, metadata),
      do: send(:acknowledger_test, {event, measurements, metadata})

    def execute(_event, _measurements, _metadata), do: :ok
  end

  setup do
    Process.register(self(), :acknowledger_test)
    Telemetry.put_backend(Backend)
    on_exit(fn -> Telemetry.put_backend(nil) end)
  end

  defp broadway(message, ack_ref, status) do
    data = {message.slot, message.offset, message.attempt}
    %{data: message.value, status: status, acknowledger: {Acknowledger, ack_ref, data}}
  end

  test "settled twice, and after the end", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(a b c d))
    consumer = consumer(options(cluster, topic, tracker: :external))
    [a, b, c, d] = pull(consumer, 4)
    ack_ref = a.handle.pid
    ok = Enum.map([a, b], &broadway(&1, ack_ref, :ok))

    failed = [
      broadway(c, ack_ref, {:failed, "no"}),
      broadway(d, ack_ref, {:failed, {:discard, "old"}})
    ]

    assert Acknowledger.ack(ack_ref, ok, failed) == :ok
    pid = a.handle.pid

    for {action, count} <- [ack: 2, retry: 1, discard: 1],
        do: assert_received({[:kmq, :ack], %{count: ^count}, %{action: ^action, handle: ^pid}})

    log = capture_log(fn -> assert Acknowledger.ack(ack_ref, ok, []) == :ok end)
    assert log =~ "ack of 2 messages not taken: they are not in work (settled before?)"
    assert_received {[:kmq, :ack, :error], %{count: 2}, %{reason: :unknown, offsets: [_, _]}}
    assert Kmq.ack(a) == {:error, :unknown}
    assert {:error, refused} = Kmq.ack([a, b])

    assert Enum.sort_by(refused, fn {message, _} -> message.offset end) == [
             {a, :unknown},
             {b, :unknown}
           ]

    assert Consumer.stop(consumer) == :ok
    # The registry forgets it a moment later.
    eventually(fn -> Acknowledger.handle(ack_ref) == nil end)
    capture_log(fn -> assert Acknowledger.ack(ack_ref, ok, failed) == :ok end)
    assert_received {[:kmq, :ack, :error], %{count: 4}, %{reason: :closed, action: :settle}}
    assert Kmq.retry(c) == {:error, :closed}
  end

  test "released, snoozed, left to a receipt: by the reason, the message, the pipeline", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(a b c d e))
    consumer = consumer(options(cluster, topic, max_processing_time: 60_000))
    [a, b, c, d, e] = messages = pull(consumer, 5)
    ack_ref = a.handle.pid
    policy = {:manual, :release, {:list, [0], 0.0}}
    later = broadway(c, ack_ref, {:failed, "no"})
    {module, ref, data} = later.acknowledger
    {:ok, data} = Acknowledger.configure(ref, data, on_failure: {:snooze, 0})

    failed = [
      broadway(a, ack_ref, {:failed, {:snooze, 0}}),
      broadway(b, ack_ref, {:failed, "the pipeline releases"}),
      %{later | acknowledger: {module, ref, data}},
      broadway(d, ack_ref, {:failed, :release})
    ]

    receipt = Kmq.receipt(Map.put(broadway(e, ack_ref, :ok), :metadata, Map.from_struct(e)))
    assert Acknowledger.ack(a.handle, policy, [broadway(e, ack_ref, :ok)], failed) == :ok

    for {action, count} <- [snooze: 2, release: 2, manual: 1],
        do: assert_received({[:kmq, :ack], %{count: ^count}, %{action: ^action}})

    assert {:error, refused} = Kmq.ack(messages)
    assert Enum.all?(refused, fn {_, reason} -> reason == :unknown end)
    again = pull(consumer, 4)

    assert Enum.sort(Enum.map(again, &{&1.value, &1.attempt})) ==
             for(v <- ~w(a b c d), do: {v, 1})

    {:ok, publisher} = Kmq.Publisher.start_link(hosts: cluster.hosts)
    assert Kmq.settle(publisher, receipt, :ack) == :ok
    assert Kmq.Publisher.close(publisher) == :ok
    assert Kmq.ack(again, sync: true) == :ok
  end

  test "a reason that is an action's name alone is that action", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ~w(retry release reject discard other))
    consumer = consumer(options(cluster, topic))
    [a | _] = messages = pull(consumer, 5)
    # What the reasons do not say would be dropped.
    policy = {:ack, :discard, {:list, [0], 0.0}}
    failed = Enum.map(messages, &broadway(&1, a.handle.pid, {:failed, String.to_atom(&1.value)}))
    assert Acknowledger.ack(a.handle, policy, [], failed) == :ok

    for {action, count} <- [retry: 1, release: 1, reject: 1, discard: 2],
        do: assert_received({[:kmq, :ack], %{count: ^count}, %{action: ^action}})

    again = pull(consumer, 2)
    assert Enum.sort(for m <- again, do: {m.value, m.attempt}) == [{"release", 1}, {"retry", 2}]
    assert [%{value: "reject"}] = await_records(cluster, topic <> "__undelivered", 1, 1)
    assert Kmq.ack(again, sync: true) == :ok
  end

  test "configure: options as the producer's, bad ones raise", %{cluster: _cluster} do
    assert Acknowledger.configure(:ref, {1, 2, 3}, on_failure: :reject) ==
             {:ok, {1, 2, 3, nil, :reject}}

    assert Acknowledger.configure(:ref, {1, 2, 3, nil, :reject}, on_success: :noop) ==
             {:ok, {1, 2, 3, :noop, :reject}}

    assert_raise ArgumentError, "unknown option :on_fail, did you mean :on_failure?", fn ->
      Acknowledger.configure(:ref, {1, 2, 3}, on_fail: :reject)
    end
  end
end
