defmodule Kmq.Integration.ThreeBrokersTest do
  # One of three brokers stands still, as after a cut in the network: connections stay, nothing answers. Its partitions have other leaders
  # soon, and whoever waits for an answer of it must go there. The one that coordinates the group, which is the worst.
  use ExUnit.Case, async: false
  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, Worker}

  @moduletag :integration
  @moduletag :capture_log

  # A long run: three JVMs take a small machine for themselves.
  @moduletag :slow

  @frozen_ms 90_000
  # 9 s until the frozen one's partitions have other leaders, 10 s until its last requests are given up; without that all wait until it goes on.
  @limit_ms 30_000
  @partitions 6
  # The handlers' sleep bounds what is handled in a second: enough for the whole time.
  @sleep 10
  @concurrency 20
  @n div((@frozen_ms + 10_000) * @concurrency, @sleep)

  @tag timeout: scaled(@frozen_ms + 180_000)
  test "a broker frozen for #{div(@frozen_ms, 1_000)} s: all partitions are read again within 30 s, none is lost" do
    nodes = Kafka.start_cluster!(3, config: %{"broker.session.timeout.ms" => 9_000})
    scene = scene(nodes)
    Scene.publish(scene, 0..(@n - 1))
    :ok = Scene.work(scene, nil, sleep: @sleep, concurrency: @concurrency)
    Scene.await_handled(scene, @n, 1_000)

    number = Kafka.coordinator(scene.hosts, scene.group)
    frozen = Enum.at(nodes, number - 1)
    # Our own questions go to one that answers.
    [first | _] = nodes -- [frozen]
    scene = %{scene | hosts: Kafka.bootstrap(first)}

    :ok = Kafka.pause(frozen)
    at = now()
    {:ok, cont} = Task.start_link(fn -> Process.sleep(@frozen_ms) && Kafka.cont(frozen) end)
    stalls = watch(scene, at)
    refute Process.alive?(cont)

    IO.puts(:stderr, "\none of three frozen, stalls [from, for] in ms: #{inspect(stalls)}")
    for {_partition, of_it} <- stalls, [_from, ms] <- of_it, do: assert(ms < scaled(@limit_ms))

    checker = Scene.check(scene, @n)
    assert Checker.missing(checker) == []
    IO.puts(:stderr, "#{checker.twice} handled twice, #{checker.raised} with a raised count")
    assert Scene.dead(scene) == 0
    :ok = Worker.stop()
  end

  # The set-up's questions go to the first; the pipeline has all.
  defp scene(nodes) do
    [first | _] = hosts = Enum.map(nodes, &Kafka.bootstrap/1)
    scene = Scene.new(hosts: first, partitions: @partitions, replicas: 3, calm: true)
    %{scene | options: Keyword.put(scene.options, :hosts, Enum.join(hosts, ","))}
  end

  defp now, do: System.monotonic_time(:millisecond)

  # Of each partition, until all is handled: when nothing of it was handled, and for how long; only what is more than a moment.
  defp watch(scene, begun) do
    {:ok, device} = :file.open(Path.join(scene.dir, "handled"), [:read, :raw, :binary])
    parts = Map.new(0..(@partitions - 1), &{&1, %{n: 0, last: begun, stalls: []}})
    parts = watch(device, begun, parts, "")
    :file.close(device)
    for {partition, %{stalls: stalls}} <- Enum.sort(parts), do: {partition, Enum.reverse(stalls)}
  end

  defp watch(device, begun, parts, rest) do
    {lines, rest} = lines(device, rest)
    at = now()

    parts =
      lines
      |> Enum.frequencies_by(&(&1 |> String.split() |> Enum.at(3) |> String.to_integer()))
      |> Enum.reduce(parts, fn {partition, n}, parts ->
        Map.update!(parts, partition, &progress(&1, n, at, begun))
      end)

    cond do
      Enum.all?(parts, fn {_, part} -> done?(part) end) ->
        parts

      at - begun > @frozen_ms + scaled(60_000) ->
        Map.new(parts, fn {p, part} -> {p, over(part, at, begun)} end)

      true ->
        Process.sleep(100) && watch(device, begun, parts, rest)
    end
  end

  defp done?(part), do: part.n >= div(@n, @partitions)
  defp over(part, at, begun), do: if(done?(part), do: part, else: progress(part, 0, at, begun))

  defp progress(part, n, at, begun) do
    stall = if at - part.last > 3_000, do: [[part.last - begun, at - part.last]], else: []
    %{n: part.n + n, last: at, stalls: stall ++ part.stalls}
  end

  defp lines(device, rest) do
    case :file.read(device, 1_048_576) do
      {:ok, bytes} ->
        {lines, [rest]} = Enum.split(String.split(rest <> bytes, "\n"), -1)
        {lines, rest}

      :eof ->
        {[], rest}
    end
  end
end
