defmodule Kmq.Integration.PeerTest do
  # The JVM's kmq 0.2 and Kmq on one queue: its client before our tracker, our client before its tracker.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Topics, Tracker}

  @source Path.expand("../support/peer/Peer.java", __DIR__)

  missing =
    cond do
      System.find_executable("javac") == nil ->
        "no javac here; Debian: apt-get install default-jdk-headless"

      not File.exists?(Path.join(Kmq.Test.Kafka.peer_jars(), "pom.xml")) ->
        "no jars of the JVM's kmq; `make test` fetches them"

      true ->
        nil
    end

  if missing do
    IO.puts("left out: the JVM's kmq as a peer (#{missing})")
    @moduletag skip: missing
  end

  setup_all do
    dir = Path.join(System.tmp_dir!(), unique("kmq-peer"))
    File.mkdir_p!(dir)
    on_exit(fn -> File.rm_rf!(dir) end)
    classpath = Path.join(Kmq.Test.Kafka.peer_jars(), "*")

    {text, status} =
      System.cmd("javac", ["-nowarn", "-cp", classpath, "-d", dir, @source],
        stderr_to_stdout: true
      )

    if status != 0, do: flunk("javac: " <> text)
    %{dir: dir, classpath: "#{dir}:#{classpath}"}
  end

  # Its stdin is our port: it ends when that is closed, also by the death of this VM.
  defp peer(context, role, options, timeout_ms) do
    [topic] = options[:topics]
    log = Path.join(context.dir, "#{role}.log")

    java = [
      "-Xmx128m",
      "-XX:TieredStopAtLevel=1",
      "-cp",
      context.classpath,
      "Peer",
      role,
      context.cluster.hosts,
      topic,
      "#{topic}__#{options[:group_id]}__markers",
      options[:group_id],
      "#{timeout_ms}"
    ]

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        :exit_status,
        line: 10_000,
        args: [
          "-c",
          ~s(log=$1; shift; exec "$@" 2>"$log"),
          "sh",
          log,
          System.find_executable("java") | java
        ]
      ])

    assert_receive {^port, {:data, {:eol, "ready"}}}, scaled(30_000)
    on_exit(fn -> File.rm(log) end)
    port
  end

  defp stop_peer(port) do
    Port.close(port)
    :ok
  end

  defp got(port, fun, timeout_ms, acc) do
    if fun.(acc) do
      acc
    else
      receive do
        {^port, {:data, {:eol, "got " <> rest}}} ->
          [partition, offset, value] = String.split(rest, " ", parts: 3)

          got(
            port,
            fun,
            timeout_ms,
            acc ++ [{value, String.to_integer(partition), String.to_integer(offset)}]
          )

        {^port, {:exit_status, status}} ->
          flunk("the peer ended with #{status}")
      after
        scaled(timeout_ms) -> flunk("the peer got only #{inspect(acc, limit: 50)}")
      end
    end
  end

  test "what its client drops, our tracker brings back", %{cluster: cluster} = context do
    topic = queue(cluster, 3)

    options =
      Keyword.drop(options(cluster, topic, marker_format: :kmq), [:group_config, :fetch_config])

    {:ok, _} = Topics.create(options)
    tracker = start_supervised!({Tracker, options})
    client = peer(context, "client", options, 2_000)

    values = for i <- 1..60, do: if(rem(i, 20) == 0, do: "drop #{i}", else: "good #{i}")
    began = System.monotonic_time(:millisecond)

    publish(
      cluster,
      topic,
      for(
        {value, i} <- Enum.with_index(values),
        do: {value, key: "k#{i}", partition: rem(i, 3), headers: [{"h", "#{i}"}]}
      )
    )

    all = got(client, &(length(&1) >= 63), 30_000, [])
    assert System.monotonic_time(:millisecond) - began >= 2_000
    counts = all |> Enum.map(&elem(&1, 0)) |> Enum.frequencies()

    assert Enum.all?(counts, fn {value, n} ->
             n == if(String.starts_with?(value, "drop"), do: 2, else: 1)
           end)

    # Copies in the partition of the first, with what Kmq adds: the peer has lost nothing it could not have had.
    copies =
      for record <- records(cluster, topic, 3),
          List.keymember?(record.headers, "kmq-origin", 0),
          do: record

    assert Enum.sort(Enum.map(copies, & &1.value)) == ["drop 20", "drop 40", "drop 60"]

    for copy <- copies do
      {_, partition, _} = Enum.find(all, &(elem(&1, 0) == copy.value))
      assert copy.partition == partition
      headers = Map.new(copy.headers)
      assert %{"kmq-redelivery-count" => <<1>>, "kmq-cause" => "crash"} = headers
      assert headers["kmq-group"] == options[:group_id]
      assert "drop " <> i = copy.value

      assert {copy.key, headers["h"]} ==
               {"k#{String.to_integer(i) - 1}", "#{String.to_integer(i) - 1}"}
    end

    # They were settled the second time: nothing more comes, although its time has passed.
    assert_no_more(client, 3_000)
    assert length(records(cluster, topic, 3)) == 63
    assert Process.alive?(tracker)
    stop_peer(client)
  end

  defp assert_no_more(port, ms), do: refute_receive({^port, {:data, {:eol, "got " <> _}}}, ms)

  test "what our client drops, its tracker brings back", %{cluster: cluster} = context do
    topic = queue(cluster, 3)

    options =
      options(cluster, topic, marker_format: :kmq, tracker: :external, max_processing_time: 3_000)

    {:ok, _} = Topics.create(options)
    tracker = peer(context, "tracker", options, 3_000)

    values = for i <- 1..60, do: if(rem(i, 20) == 0, do: "drop #{i}", else: "good #{i}")

    publish(
      cluster,
      topic,
      for({value, i} <- Enum.with_index(values), do: {value, key: "k#{i}", partition: rem(i, 3)})
    )

    consumer = consumer(options)
    messages = pull(consumer, 60)
    {dropped, good} = Enum.split_with(messages, &String.starts_with?(&1.value, "drop"))
    assert Kmq.ack(good) == :ok

    again = pull(consumer, 3, 30_000)

    assert Enum.sort(Enum.map(again, &{&1.value, &1.key, &1.partition})) ==
             Enum.sort(Enum.map(dropped, &{&1.value, &1.key, &1.partition}))

    assert Kmq.ack(again) == :ok
    assert Consumer.flush(consumer) == :ok

    # A Java tracker died of none of our bytes: it goes on, and what was settled stays so.
    assert Consumer.pull(consumer, max: 10, wait: 4_000) == []
    publish(cluster, topic, ["drop once more"])
    [last] = pull(consumer, 1)
    [copy] = pull(consumer, 1, 30_000)
    assert copy.value == last.value
    assert Kmq.ack(copy) == :ok
    assert length(records(cluster, topic, 3)) == 65
    stop_peer(tracker)
  end
end
