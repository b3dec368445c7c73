defmodule Kmq.Integration.SchedulersTest do
  # No call holds a normal scheduler: in processor time, which a busy machine does not stretch, and in what the VM itself calls a long
  # schedule, which it does.
  use Kmq.Test.ClusterCase, on: :kafka, async: false

  alias Kmq.Consumer

  # What is said to hold is 1 ms; a call ends its own work after 0.4. A thread that shares its core pays for the caches of others, too:
  # some may be over, and one by much. Without the slices it were half of them.
  @limit_us 50_000
  @over_percent 25

  defp watch do
    me = self()

    spawn_link(fn ->
      :erlang.system_monitor(self(), [{:long_schedule, 2}])
      send(me, :watching)
      watching(0)
    end)
    |> tap(fn _ -> assert_receive :watching end)
  end

  defp watching(n) do
    receive do
      {:monitor, _pid, :long_schedule, _info} -> watching(n + 1)
      {:count, to} -> send(to, {:long_schedules, n})
    end
  end

  defp report(what) do
    busy = :kmq_nif.busy()

    for {function, calls, longest, over} <- busy, calls > 0 do
      IO.puts(
        :stderr,
        "#{what}: #{function} #{calls} calls, longest #{longest} us, #{over} over 1 ms"
      )

      assert longest < @limit_us, "#{what}: #{function} #{longest} us"

      assert over <= max(3, div(calls * @over_percent, 100)),
             "#{what}: #{over} of #{calls} calls of #{function} over 1 ms"
    end

    busy
  end

  for format <- [:range, :kmq] do
    test "under load, with a thousand acks at once, and a hundred thousand: #{format}", %{
      cluster: cluster
    } do
      if :kmq_nif.busy() == [], do: flunk("this build does not measure: VARIANT=test does")
      n = 120_000
      topic = queue(cluster, 4)
      :kmq_nif.busy()
      watcher = watch()
      publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))

      options =
        options(cluster, topic,
          marker_format: unquote(format),
          start_ahead: 20_000,
          max_in_flight: n,
          max_processing_time: 600_000,
          tracker: :external
        )

      consumer = consumer(options)
      messages = take(consumer, n, [])
      report("#{unquote(format)}, pulled")

      # In an order that leaves holes everywhere: the most that a renewal and an END can have to name.
      {many, some} = messages |> Enum.shuffle() |> Enum.split(100_000)
      for list <- Enum.chunk_every(some, 1_000), do: assert(Kmq.ack(list) == :ok)
      report("#{unquote(format)}, a thousand acks at once")
      assert Kmq.ack(many) == :ok
      assert Consumer.flush(consumer, scaled(30_000)) == :ok
      report("#{unquote(format)}, a hundred thousand acks at once")
      assert %{open: 0, unwritten: 0} = Kmq.info(consumer).total

      send(watcher, {:count, self()})
      assert_receive {:long_schedules, long}, 5_000
      :erlang.system_monitor(:undefined)
      IO.puts(:stderr, "#{unquote(format)}: #{long} schedules of 2 ms and more in the whole VM")
      Consumer.stop(consumer)
    end
  end

  test "with messages of 100 kB", %{cluster: cluster} do
    n = 300
    topic = queue(cluster, 4)
    value = :binary.copy("x", 100_000)
    :kmq_nif.busy()
    publish(cluster, topic, for(i <- 1..n, do: {value, partition: rem(i, 4)}))
    consumer = consumer(options(cluster, topic, tracker: :external))
    messages = take(consumer, n, [])
    assert Enum.all?(messages, &(&1.value == value))
    assert Kmq.ack(messages) == :ok
    assert Consumer.flush(consumer, scaled(30_000)) == :ok
    report("100 kB")
    Consumer.stop(consumer)
  end

  defp take(_consumer, 0, acc), do: acc

  defp take(consumer, n, acc) do
    messages = Consumer.pull(consumer, max: 1_000, wait: scaled(15_000))
    assert messages != []
    take(consumer, n - length(messages), messages ++ acc)
  end
end
