defmodule Kmq.Integration.DelayTest do
  # Delayed messages while their tracker is killed: each comes, none early, none late but for the time without a tracker.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Publisher}
  alias Kmq.Test.VM

  @n 10_000
  @at_once 100
  @longest_ms if System.get_env("KMQ_LONG") == "1", do: 30_000, else: 20_000
  @kills [5_000, 10_000, 15_000]
  @year_ms 365 * 86_400_000

  defp now, do: System.os_time(:millisecond)

  # A message without a delay has no such header: due when it was published.
  defp due(message, began) do
    case List.keyfind(message.headers, "kmq-due", 0) do
      {_, due} -> String.to_integer(due)
      nil -> began
    end
  end

  defp kill_tracker do
    programs = for {pid, "kmq_tracker"} <- VM.port_programs(), do: pid
    assert [_] = programs
    for pid <- programs, do: VM.signal(pid, :kill)
    now()
  end

  # {messages with when they came, the kills}, the newest first
  defp collect(consumer, due, killed, got, values) do
    {due, killed} =
      with [at | rest] <- due, true <- now() >= at do
        {rest, [kill_tracker() | killed]}
      else
        _not_yet -> {due, killed}
      end

    messages = Consumer.pull(consumer, max: 500, wait: 100)
    :ok = Kmq.ack(messages)
    at = now()
    got = Enum.map(messages, &{&1, at}) ++ got
    values = Enum.reduce(messages, values, &MapSet.put(&2, &1.value))

    if (due == [] and MapSet.size(values) >= @n) or stale?(got),
      do: {got, killed},
      else: collect(consumer, due, killed, got, values)
  end

  defp stale?([{_, at} | _]), do: now() > at + scaled(30_000)
  defp stale?([]), do: false

  defp p99(list), do: list |> Enum.sort() |> Enum.at(div(length(list) * 99, 100))

  # The first that was due after a kill: from then on there is a tracker again.
  defp back(killed, got, began) do
    Enum.min(for {message, at} <- got, due(message, began) > killed, do: at)
  end

  @tag timeout: 180_000
  test "#{@n} random delays, the tracker killed three times", %{cluster: cluster} do
    topic = queue(cluster, 4, "q", config: [{"retention.ms", "-1"}])
    short = queue(cluster, 1, "short", config: [{"retention.ms", "20000"}])
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)
    # the rate is for what failed, and would hold these up
    consumer = consumer(options(cluster, topic, redelivery_rate: 500))
    [] = Consumer.pull(consumer, wait: 0)

    assert_raise ArgumentError, ~r/:delay.*-1/, fn ->
      Publisher.publish(publisher, topic, "x", delay: -1)
    end

    for delay <- [30_000, @year_ms] do
      assert {:error, error} = Publisher.publish(publisher, short, "x", delay: delay)
      assert error.reason == :delay_too_long
      assert error.message =~ "#{delay} ms" and error.message =~ "retention.ms=20000"
    end

    began = now()

    delays =
      List.duplicate(0, @at_once) ++
        for _ <- 1..(@n - @at_once), do: 1_000 + :rand.uniform(@longest_ms - 1_000)

    messages =
      for {delay, i} <- Enum.with_index(delays), do: {topic, "#{i}", key: "#{i}", delay: delay}

    years = for i <- 1..10, do: {topic, "next year #{i}", delay: @year_ms}
    {:ok, _} = Publisher.publish_many(publisher, messages ++ years)
    Publisher.close(publisher)

    {got, killed} = collect(consumer, Enum.map(@kills, &(began + &1)), [], [], MapSet.new())
    assert length(killed) == length(@kills)
    values = Enum.frequencies_by(got, fn {message, _} -> message.value end)
    assert Enum.sort(Map.keys(values)) == Enum.sort(for i <- 0..(@n - 1), do: "#{i}")
    early = for {message, at} <- got, at < due(message, began), do: due(message, began) - at
    assert early == []
    assert Enum.all?(got, fn {message, _} -> message.attempt == 1 end)

    # A killed tracker repeats at most what it had in flight.
    repeated = Enum.sum(Map.values(values)) - @n
    outages = for at <- Enum.reverse(killed), do: {at, back(at, got, began)}
    # The oldest of each is the first that came.
    first = got |> Enum.reverse() |> Enum.uniq_by(fn {message, _} -> message.value end)

    lates =
      for {message, at} <- first do
        due = due(message, began)
        at - Enum.max([due | for({kill, back} <- outages, kill < at, back in due..at, do: back)])
      end

    IO.puts(
      :stderr,
      "late: p50 #{Enum.at(Enum.sort(lates), div(@n, 2))} ms, p99 #{p99(lates)} ms; without a tracker for " <>
        "#{Enum.map_join(outages, ", ", fn {kill, back} -> back - kill end)} ms; #{repeated} came twice"
    )

    assert repeated < 500
    for {kill, back} <- outages, do: assert(back - kill < scaled(5_000))
    assert p99(lates) < scaled(1_000)
  end
end
