defmodule Kmq.Integration.DelayTest do
  # Delayed messages while their tracker is killed: each comes, none early.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Publisher}
  alias Kmq.Test.VM

  @n 10_000
  @longest_ms 12_000

  defp now, do: System.os_time(:millisecond)

  defp due(message) do
    {_, due} = List.keyfind(message.headers, "kmq-due", 0)
    String.to_integer(due)
  end

  defp kill_tracker do
    for {pid, "kmq_tracker"} <- VM.port_programs() do
      {_, 0} = System.cmd("kill", ["-9", to_string(pid)])
    end
  end

  # [{message, when it came}]
  defp collect(consumer, kills, acc) do
    kills =
      case kills do
        [at | rest] ->
          if now() >= at do
            assert [_ | _] = kill_tracker()
            rest
          else
            kills
          end

        [] ->
          []
      end

    messages = Consumer.pull(consumer, max: 500, wait: 200)
    :ok = Kmq.ack(messages)
    acc = Enum.map(messages, &{&1, now()}) ++ acc

    cond do
      length(acc) >= @n and length(Enum.uniq_by(acc, fn {m, _} -> m.value end)) == @n -> acc
      now() > hd(kills ++ [0]) + 60_000 and kills == [] and messages == [] and stale?(acc) -> acc
      true -> collect(consumer, kills, acc)
    end
  end

  defp stale?([]), do: false
  defp stale?([{_, at} | _]), do: now() > at + scaled(20_000)

  @tag timeout: 120_000
  test "#{@n} random delays, the tracker killed twice", %{cluster: cluster} do
    topic = queue(cluster, 4)
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)
    # the rate is for what failed, and would hold these up
    consumer = consumer(options(cluster, topic, redelivery_rate: 500))
    [] = Consumer.pull(consumer, wait: 0)
    began = now()

    messages =
      for i <- 1..@n do
        {topic, "#{i}", key: "#{i}", delay: 1_000 + :rand.uniform(@longest_ms - 1_000)}
      end

    {:ok, _} = Publisher.publish_many(publisher, messages)
    Publisher.close(publisher)
    got = collect(consumer, [began + 4_000, began + 8_000], [])
    values = Enum.frequencies_by(got, fn {message, _} -> message.value end)
    assert map_size(values) == @n

    # A killed tracker repeats at most what it had in flight.
    assert Enum.sum(Map.values(values)) - @n < 500
    early = for {message, at} <- got, at < due(message), do: due(message) - at
    assert early == []
    assert Enum.all?(got, fn {message, _} -> message.attempt == 1 end)

    lates = got |> Enum.map(fn {message, at} -> at - due(message) end) |> Enum.sort()
    quiet = for {message, at} <- got, due(message) < began + 3_500, do: at - due(message)
    p99 = fn list -> list |> Enum.sort() |> Enum.at(div(length(list) * 99, 100)) end

    IO.puts(
      "late: p50 #{Enum.at(lates, div(@n, 2))} ms, p99 #{p99.(lates)} ms, before the first kill #{p99.(quiet)} ms"
    )

    assert p99.(quiet) < scaled(1_000)
    assert p99.(lates) < scaled(5_000)
  end
end
