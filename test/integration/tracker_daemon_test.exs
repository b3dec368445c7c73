defmodule Kmq.Integration.TrackerDaemonTest do
  # kmq_tracker --config FILE: no BEAM has a part in it but as the one who looks on.
  use Kmq.Test.ClusterCase, on: :kafka

  setup do
    dir = Path.join(System.tmp_dir!(), unique("kmq-daemon"))
    File.mkdir_p!(dir)
    on_exit(fn -> File.rm_rf!(dir) end)
    %{dir: dir, program: to_string(:kmq_port.program('kmq_tracker'))}
  end

  # Runs it under a shell that ends with this VM; its output is in a file.
  defp start(context, conf, env \\ []) do
    file = Path.join(context.dir, "conf")
    log = Path.join(context.dir, "log")
    File.write!(file, conf)
    File.write!(log, "")
    script = ~S("$0" --config "$1" </dev/null >"$2" 2>&1 & echo $!; wait $!; echo "exit $?")

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        line: 100,
        env: for({name, value} <- env, do: {to_charlist(name), to_charlist(value)}),
        args: ["-c", script, context.program, file, log]
      ])

    assert_receive {^port, {:data, {:eol, pid}}}, 5_000
    on_exit(fn -> System.cmd("kill", ["-KILL", pid], stderr_to_stdout: true) end)
    %{port: port, pid: pid, log: log}
  end

  defp term(%{port: port, pid: pid}) do
    System.cmd("kill", ["-TERM", pid])
    assert_receive {^port, {:data, {:eol, "exit " <> status}}}, 2_500
    String.to_integer(status)
  end

  test "redelivers, says so in lines and metrics, and ends in an orderly way", context do
    %{cluster: cluster, dir: dir} = context
    topic = queue(cluster, 2)

    options =
      options(cluster, topic, lease: 1_000, max_processing_time: 1_500, tracker: :external)

    publish(cluster, topic, [{"a", partition: 0}, {"b", partition: 1}])
    metrics = Path.join(dir, "metrics")
    secret = Path.join(dir, "secret")
    File.write!(secret, "#{cluster.hosts}\n")
    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))

    daemon =
      start(
        context,
        """
        group = #{options[:group_id]}
        queue = #{topic}
        log = json
        metrics_file = #{metrics}
        metrics_interval_ms = 200
        kafka.bootstrap.servers = file:#{secret}
        kafka.client.id = env:KMQ_TEST_ID
        """,
        [{"KMQ_TEST_ID", "not-to-be-seen"}]
      )

    consumer = consumer(options)
    assert consumer |> pull(2) |> Enum.map(& &1.attempt) == [1, 1]
    assert again = pull(consumer, 2)
    assert Enum.map(again, & &1.attempt) == [2, 2]
    Enum.each(again, &(:ok = Kmq.ack(&1)))

    eventually(fn ->
      text = File.read!(metrics)

      assert text =~
               ~r/^kmq_tracker_redelivered_total\{topic="#{topic}",partition="0",cause="timeout"\} 1$/m

      # all is acknowledged: gauges are back at zero
      assert text =~ ~r/^kmq_tracker_open\{topic="#{topic}",partition="0"\} 0$/m

      assert text =~
               ~r/^kmq_tracker_oldest_open_age_seconds\{topic="#{topic}",partition="1"\} 0$/m

      refute text =~ "next_due_seconds{"
      true
    end)

    assert File.read!("/proc/#{daemon.pid}/cmdline") |> String.split(<<0>>) |> length() == 4
    assert term(daemon) == 0
    log = File.read!(daemon.log)
    refute log =~ "not-to-be-seen"

    for line <- String.split(log, "\n", trim: true),
        do: assert(line =~ ~r/^\{"time":"[^"]+Z","level":"[a-z]+","event":"[a-z_]+".*\}$/)

    assert log =~
             ~r/"event":"redelivered","topic":"#{topic}","partition":1,"cause":"timeout","count":1/

    assert log =~ ~s("event":"stopped","status":0)
    # left the group and committed: both partitions to their end
    assert [{0, a}, {1, b}] =
             committed(
               cluster,
               Kmq.Tracker.tracker_group(options[:group_id]),
               Kmq.Config.default_marker_topic(topic, options[:group_id]),
               2
             )

    assert a > 0 and b > 0
  end

  test "waits for Kafka and its topics, and says what it waits for; SIGTERM ends it then, too",
       context do
    daemon =
      start(
        context,
        "group = g\nqueue = #{unique("missing")}\nkafka.bootstrap.servers = #{context.cluster.hosts}\n"
      )

    eventually(fn ->
      log = File.read!(daemon.log)
      # It has no option to make it.
      refute log =~ "create_topics"
      assert log =~ ~r/Z error alarm reason=missing_topic topic=missing-/
      assert log =~ "does not exist: it is the queue, create it first"
    end)

    assert term(daemon) == 0
  end

  test "a bad configuration is refused with the line", context do
    daemon = start(context, "group = g\nqueu = q\n")
    port = daemon.port
    assert_receive {^port, {:data, {:eol, "exit 2"}}}, 5_000
    assert File.read!(daemon.log) =~ "conf:2: unknown key queu"
  end
end
