defmodule Kmq.Integration.ThreeBrokersTest do
  # One of three brokers stands still, as after a cut in the network: connections stay, nothing answers. Its partitions have other leaders
  # soon, and whoever waits for an answer of it must go there. The one that coordinates the group, which is the worst.
  use ExUnit.Case, async: false
  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, Scene, Worker}

  @moduletag :integration
  @moduletag :capture_log

  @partitions 6
  # The handlers' sleep bounds what is handled in a second: enough for the whole time.
  @sleep 10
  @concurrency 20

  # Until the frozen one's partitions have other leaders it takes a broker's session; until its last requests are given up, `request_timeout`.
  # Without that all wait until it goes on: so the limit is below the time it is frozen. The second is Kafka's and our own defaults, and a long
  # run: three JVMs take a small machine for themselves.
  @runs [
    [frozen: 18_000, session: 3_000, limit: 16_000, request_timeout: 5_000],
    [frozen: 90_000, session: 9_000, limit: 30_000, request_timeout: 10_000]
  ]

  for run <- @runs, frozen = div(run[:frozen], 1_000) do
    if frozen > 30, do: @tag(:slow)
    @tag timeout: scaled(run[:frozen] + 180_000)
    test "a broker frozen for #{frozen} s: all partitions are read again within #{div(run[:limit], 1_000)} s, none is lost" do
      frozen(unquote(run))
    end
  end

  defp frozen(run) do
    nodes = Kafka.start_cluster!(3, config: %{"broker.session.timeout.ms" => run[:session]})

    run = [n: div((run[:frozen] + 5_000) * @concurrency, @sleep)] ++ run
    scene = scene(nodes, run)
    Scene.publish(scene, 0..(run[:n] - 1))
    :ok = Scene.work(scene, nil, sleep: @sleep, concurrency: @concurrency)
    Scene.await_handled(scene, run[:n], 1_000)

    number = Kafka.coordinator(scene.hosts, scene.group)
    frozen = Enum.at(nodes, number - 1)
    # Our own questions go to one that answers.
    [first | _] = nodes -- [frozen]
    scene = %{scene | hosts: Kafka.bootstrap(first)}

    :ok = Kafka.pause(frozen)
    at = now()
    {:ok, cont} = Task.start_link(fn -> Process.sleep(run[:frozen]) && Kafka.cont(frozen) end)
    stalls = watch(scene, at, run)
    refute Process.alive?(cont)

    IO.puts(:stderr, "\none of three frozen, stalls [from, for] in ms: #{inspect(stalls)}")

    for {_partition, of_it} <- stalls, [_from, ms] <- of_it, do: assert(ms < scaled(run[:limit]))

    checker = Scene.check(scene, run[:n])
    assert Checker.missing(checker) == []
    IO.puts(:stderr, "#{checker.twice} handled twice, #{checker.raised} with a raised count")
    assert Scene.dead(scene) == 0
    :ok = Worker.stop()
  end

  # The set-up's questions go to the first; the pipeline has all.
  defp scene(nodes, run) do
    [first | _] = hosts = Enum.map(nodes, &Kafka.bootstrap/1)
    client = [request_timeout: run[:request_timeout]]

    scene =
      Scene.new(
        hosts: first,
        partitions: @partitions,
        replicas: 3,
        calm: true,
        client_config: client
      )

    %{scene | options: Keyword.put(scene.options, :hosts, Enum.join(hosts, ","))}
  end

  defp now, do: System.monotonic_time(:millisecond)

  # Of each partition, until all is handled: when nothing of it was handled, and for how long; only what is more than a moment.
  defp watch(scene, begun, run) do
    {:ok, device} = :file.open(Path.join(scene.dir, "handled"), [:read, :raw, :binary])
    parts = Map.new(0..(@partitions - 1), &{&1, %{n: 0, last: begun, stalls: []}})
    parts = watch(device, begun, parts, "", run)
    :file.close(device)
    for {partition, %{stalls: stalls}} <- Enum.sort(parts), do: {partition, Enum.reverse(stalls)}
  end

  defp watch(device, begun, parts, rest, run) do
    {lines, rest} = lines(device, rest)
    at = now()

    parts =
      lines
      |> Enum.frequencies_by(&(&1 |> String.split() |> Enum.at(3) |> String.to_integer()))
      |> Enum.reduce(parts, fn {partition, n}, parts ->
        Map.update!(parts, partition, &progress(&1, n, at, begun))
      end)

    cond do
      Enum.all?(parts, fn {_, part} -> done?(part, run) end) ->
        parts

      at - begun > run[:frozen] + scaled(60_000) ->
        Map.new(parts, fn {p, part} -> {p, over(part, at, begun, run)} end)

      true ->
        Process.sleep(100) && watch(device, begun, parts, rest, run)
    end
  end

  defp done?(part, run), do: part.n >= div(run[:n], @partitions)

  defp over(part, at, begun, run),
    do: if(done?(part, run), do: part, else: progress(part, 0, at, begun))

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
