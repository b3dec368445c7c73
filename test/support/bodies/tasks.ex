defmodule Kmq.Test.Bodies.Tasks do
  @moduledoc false
  # The mix tasks as an operator uses them: output, JSON and exit codes.

  use Kmq.Test.ClusterCase.Bodies

  import ExUnit.CaptureIO
  alias Mix.Tasks.Kmq, as: Tasks

  # {exit code, standard output, standard error}
  defp mix(task, args, input \\ "") do
    level = Logger.level()
    self = self()

    err =
      capture_io(:stderr, fn ->
        out =
          capture_io(input, fn ->
            code =
              try do
                task.run(args)
                0
              catch
                :exit, {:shutdown, code} -> code
              end

            send(self, {:code, code})
          end)

        send(self, {:out, out})
      end)

    Logger.configure(level: level)
    Application.delete_env(:kmq, :waiting)
    assert_received {:code, code}
    assert_received {:out, out}
    {code, out, err}
  end

  body "topics, publish, inspect and dead letters from the command line", %{cluster: cluster} do
    topic = queue(cluster, 2)
    group = unique("g")
    hosts = ["--hosts", cluster.hosts]
    of = ["--topic", topic, "--group", group] ++ hosts

    if cluster.kind == :kafka do
      {1, "", err} = mix(Tasks.Topics, ["check" | of])
      assert err =~ "kafka-topics.sh" and err =~ Kmq.Topics.marker_topic(topic, group)
      {1, "", err} = mix(Tasks.Inspect, of)
      assert err =~ "group #{inspect(group)} has no markers" and err =~ "delivery: :offsets"
    end

    assert {0, out, ""} = mix(Tasks.Topics, ["create" | of])
    assert out =~ ~r/TOPIC\s+PARTITIONS\n#{topic}\s+2\n/
    by_word = [topic | List.delete(of, topic) -- ["--topic"]]
    assert {0, _, ""} = mix(Tasks.Topics, ["check" | by_word])
    assert {0, _, ""} = mix(Tasks.Inspect, by_word)
    assert {0, out, ""} = mix(Tasks.Topics, ["check", "--json" | of])
    assert out == ~s({"partitions":{"#{topic}":2}}\n)

    assert {0, out, ""} =
             mix(
               Tasks.Publish,
               [topic, "one", "--key", "k", "--partition", "0", "--tag", "a"] ++ hosts
             )

    assert out == "#{topic}, partition 0, offset 0\n"

    assert {0, "3 messages\n", ""} =
             mix(
               Tasks.Publish,
               [topic, "--partition", "1", "--header", "h=1"] ++ hosts,
               "a\nb\nc\n"
             )

    assert {0, out, ""} = mix(Tasks.Inspect, ["--json" | of])
    assert out =~ ~s("lag":1) and out =~ ~s("lag":3)

    consumer = consumer(options(cluster, topic, group_id: group))
    [bad | _] = messages = pull(consumer, 4)
    assert Kmq.reject(bad, ~s(quotes " and\nlines)) == :ok
    dead = topic <> "__undelivered"
    await_records(cluster, dead, 2, 1)

    eventually(
      fn ->
        {0, out, ""} = mix(Tasks.Inspect, of)
        rows = out |> String.split("\n", trim: true) |> tl() |> Enum.map(&String.split/1)
        assert Enum.map(rows, &Enum.take(&1, 3)) == [[topic, "0", "0"], [topic, "1", "0"]]
        assert rows |> Enum.map(&String.to_integer(Enum.at(&1, 3))) |> Enum.sum() == 3
      end,
      10_000
    )

    assert Kmq.ack(messages -- [bad], sync: true) == :ok
    assert {0, out, ""} = mix(Tasks.DeadLetters, ["list", topic] ++ hosts)
    assert out =~ ~r/PARTITION\s+OFFSET\s+KEY\s+CAUSE/
    assert out =~ ~r/#{bad.partition}\s+0\s+\S+\s+rejected\s+1/
    assert {0, out, ""} = mix(Tasks.DeadLetters, ["list", topic, "--json"] ++ hosts)
    assert out =~ ~s("error":"quotes \\" and\\nlines") and out =~ ~s("cause":"rejected")

    assert {0, out, ""} =
             mix(Tasks.DeadLetters, ["list", topic, "--json", "--cause", "crash"] ++ hosts)

    assert out == ""
    show = ["show", topic, "#{bad.partition}", "0"] ++ hosts
    assert {0, out, ""} = mix(Tasks.DeadLetters, show)
    assert out =~ ~r/origin\s+#{topic}\/#{bad.partition}\/#{bad.offset}/
    assert String.ends_with?(out, bad.value <> "\n")

    assert {0, out, err} = mix(Tasks.DeadLetters, ["redrive", topic, "--dry-run"] ++ hosts)
    assert length(String.split(err, "1 of 1\n")) == 2
    assert out == "1 would go back, 0 were left alone, 1 of 1 read\n"
    assert {0, out, ""} = mix(Tasks.DeadLetters, ["redrive", topic, "--json"] ++ hosts)
    assert out == ~s({"read":1,"redriven":1,"skipped":0,"total":1}\n)
    [again] = pull(consumer, 1)
    assert {again.id, again.attempt} == {bad.id, 1}
    assert Kmq.ack(again, sync: true) == :ok

    # What waits: how many, the oldest of them, and when the first is due.
    assert {0, _, ""} =
             mix(Tasks.Publish, [topic, "x", "--partition", "0", "--delay", "60000"] ++ hosts)

    eventually(
      fn ->
        {0, out, ""} = mix(Tasks.Inspect, of)
        [row, idle] = out |> String.split("\n", trim: true) |> tl()
        assert row =~ ~r/^#{topic}\s+0\s+0\s+1\s+1\s+\d+ \([\d.]+ s\)\s+in [1-5]\d s\s+\d+$/
        assert idle =~ ~r/^#{topic}\s+1\s+0\s+0\s+0\s+-\s+-\s+\d+$/
      end,
      15_000
    )

    {0, out, ""} = mix(Tasks.Inspect, ["--json" | of])
    [_, due] = Regex.run(~r/"next_due_ms":(\d+)/, out)
    assert (String.to_integer(due) - System.os_time(:millisecond)) in 1..60_000
    assert out =~ ~s("parked":1) and out =~ ~s("oldest_since_ms":)
  end

  body "a file of options that is none: what is wrong and where, and nothing that stands in it",
       %{
         cluster: cluster
       } do
    file = Path.join(System.tmp_dir!(), unique("kmq-options"))
    on_exit(fn -> File.rm(file) end)
    args = ["check", "--topic", "t", "--group", "g", "--hosts", cluster.hosts, "--options", file]

    assert {2, "", err} = mix(Tasks.Topics, args)
    assert err =~ "--options: cannot read #{file}: no such file or directory"

    for {text, expected} <- [
          {~s([topics: ["a"],\n client_config: [sasl: {:plain, "u", "secret"}),
           ~r/, line \d, is no Elixir: /},
          {"[a: 1\n b: 2]", ~r/, line 2, is no Elixir: syntax error before$/m},
          {"root:x:0", ~r/, line 1, is no Elixir: (?!.*root)/s},
          {"[a: no_such_function()]", ~r/, line 1, is no Elixir: undefined function/},
          {"[a: 1 / 0]", ~r/ is no Elixir: bad argument in arithmetic/},
          {"5", ~r/ holds no keyword list; it is to be like \[client_config: \[ssl: true\]\]/}
        ] do
      File.write!(file, text)
      assert {2, "", err} = mix(Tasks.Topics, args)
      assert err =~ "--options: " <> file
      assert err =~ expected
      refute err =~ "secret"
    end
  end

  body "wrong arguments are 2, a cluster that is not there is 1, help is help", %{
    cluster: cluster
  } do
    hosts = ["--hosts", cluster.hosts]

    for task <- [Tasks.Topics, Tasks.Publish, Tasks.Inspect, Tasks.DeadLetters] do
      assert {0, out, ""} = mix(task, ["--help"])
      assert out =~ "mix kmq." and out =~ "exit code"
      assert {2, "", err} = mix(task, ["--no-such-option"])
      assert err =~ "--no-such-option" and err =~ "--help"
      assert {2, "", _} = mix(task, ["surplus", "words", "here"] ++ hosts)
    end

    assert {2, "", err} = mix(Tasks.Publish, ["t", "v", "--delay", "-5"] ++ hosts)
    assert err =~ "--delay"
    assert {2, "", err} = mix(Tasks.Publish, ["t", "v", "--at", "tomorrow"] ++ hosts)
    assert err =~ "tomorrow"
    assert {2, "", _} = mix(Tasks.DeadLetters, ["list", "t", "--since", "long ago"] ++ hosts)
    assert {2, "", _} = mix(Tasks.Topics, ["check", "--group", "g"] ++ hosts)
    nobody = ["--hosts", "localhost:1", "--topic", "t", "--group", "g"]
    assert {1, "", err} = mix(Tasks.Topics, ["check" | nobody])

    # Whoever waits is told for what; in the end, what to look at.
    assert [waiting, error] = String.split(err, "\n", trim: true)

    assert waiting =~
             ~r/^no broker of :hosts \(localhost:1\) has answered yet, giving up in 1\d s$/

    assert error =~ "error: no broker"
    assert error =~ "Is the address right"
    assert {1, out, err} = mix(Tasks.Topics, ["check", "--json" | nobody])
    assert [^waiting, "error: " <> message] = String.split(err, "\n", trim: true)

    assert out ==
             ~s({"error":{"message":"#{message}","reason":"unreachable","retriable":true}}\n)
  end

  body "what is mistyped is not shown as empty", %{cluster: cluster} do
    topic = queue(cluster, 1)
    hosts = ["--hosts", cluster.hosts]
    typo = String.replace(topic, "-", "--", global: false)
    :ok = Kmq.Topics.create_topic(topic <> "__undelivered", 1, hosts: cluster.hosts)

    assert {1, "", err} = mix(Tasks.DeadLetters, ["list", typo] ++ hosts)
    assert err =~ ~s("#{typo}__undelivered" does not exist: did you mean "#{topic}"?)
    assert {1, "", _} = mix(Tasks.DeadLetters, ["redrive", typo] ++ hosts)
    assert {1, "", err} = mix(Tasks.Inspect, ["--topic", typo, "--group", "g"] ++ hosts)
    assert err =~ ~s("#{typo}" does not exist: did you mean "#{topic}"?)
    assert {2, "", err} = mix(Tasks.DeadLetters, ["list", topic, "--hosst", "localhost:1"])
    assert err =~ ~s(option --hosst, did you mean "--hosts"?)
    # Asking has made nothing.
    assert {1, "", _} = mix(Tasks.DeadLetters, ["list", typo] ++ hosts)

    # There, and nothing was ever rejected.
    assert {0, "no dead letters\n", ""} = mix(Tasks.DeadLetters, ["list", topic] ++ hosts)

    assert {0, "no dead letters of this kind\n", ""} =
             mix(Tasks.DeadLetters, ["list", topic, "--cause", "crash"] ++ hosts)

    assert {0, "", ""} = mix(Tasks.DeadLetters, ["list", topic, "--json"] ++ hosts)

    # One that was too large to have its value.
    pointing = [{"kmq-pointer", topic <> "/0/17/1700000000000"}, {"kmq-value-bytes", "9000000"}]
    publish(cluster, topic <> "__undelivered", [{nil, headers: pointing}])
    assert {0, out, ""} = mix(Tasks.DeadLetters, ["list", topic, "--json"] ++ hosts)
    assert out =~ ~s("pointer":["#{topic}",0,17,1700000000000]) and out =~ ~s("value":null)
    assert {0, out, ""} = mix(Tasks.DeadLetters, ["show", topic, "0", "0"] ++ hosts)
    assert out =~ ~r/header kmq-pointer\s+#{topic}\/0\/17/
  end

  body "what is wrong with an option is told by the name it has on the command line", %{
    cluster: cluster
  } do
    hosts = ["--hosts", cluster.hosts]

    for {task, args, text} <- [
          {Tasks.Publish, ["t", "v", "--delay", "soon"],
           "--delay takes a whole number, got: soon"},
          {Tasks.Publish, ["t", "v", "--delay"], "--delay needs a value, a whole number"},
          {Tasks.Publish, ["t", "v", "--key"], "--key needs a value"},
          {Tasks.Publish, ["t", "v", "--json=yes"], "--json takes no value, got: yes"},
          {Tasks.Publish, ["t", "v", "--dealy", "5"],
           ~s(unknown option --dealy, did you mean "--delay"?)},
          {Tasks.Publish, ["t", "v", "--partition", "-1"],
           "invalid value for --partition: expected an integer from 0 to 2147483647, got: -1"},
          {Tasks.Publish, ["t", "v", "--tag", "a,b"],
           ~s(invalid value for --tag: expected a list of strings without commas, got: ["a,b"])},
          {Tasks.Publish, ["t", "v", "--routing-key", ""],
           ~s(invalid value for --routing-key: expected a non-empty string, got: "")},
          {Tasks.Publish, ["t", "v", "--delay", "5", "--at", "2026-12-24T18:00:00Z"],
           "one of --delay and --at says when, not both"},
          {Tasks.Publish, ["t", "v", "--hosts", "kafka"],
           ~s(invalid value for --hosts: "kafka" has no port, write "kafka:9092")},
          {Tasks.Topics, ["check", "--group", "g"], "--topic is missing"},
          {Tasks.Topics, ["check", "--topic", "t"], "--group is missing"},
          {Tasks.Topics, ["check", "--topic", "a/b", "--group", "g"],
           ~s(invalid value for --topic: "a/b" has characters Kafka does not take)},
          {Tasks.Inspect, ["--group", "g"], "--topic is missing"},
          {Tasks.Inspect, ["--topic", "t"], "--group is missing"},
          {Tasks.Inspect, ["--topic", "t", "--group", ""],
           ~s(invalid value for --group: expected a non-empty string, got: "")},
          {Tasks.DeadLetters, ["redrive", "t", "--rate", "0"],
           "invalid value for --rate: expected a positive integer, got: 0"},
          {Tasks.DeadLetters, ["redrive", "t", "--position", ""],
           ~s(invalid value for --position: expected a non-empty string, got: "")},
          {Tasks.DeadLetters, ["redrive", "t", "--dead-letter-topic", "a b"],
           ~s(invalid value for --dead-letter-topic: "a b" has characters)},
          {Tasks.DeadLetters, ["list", "t", "--attempts", "-1"],
           "expected --attempts to be a non-negative integer or a range of them, got: -1"},
          {Tasks.DeadLetters, ["show", "t", "0", "x"],
           "expected numbers for partition and offset, got: 0 x"},
          {Tasks.DeadLetters, ["show", "t", "-1", "0"],
           "expected numbers for partition and offset, got: -1 0"},
          {Tasks.Demo, ["--workers", "0"], "--workers: 1 to 1000, got: 0"},
          {Tasks.Demo, ["--messages", "many"], "--messages takes a whole number, got: many"},
          {Tasks.Demo, ["now"], "expected no words, only options, got: now"},
          {Tasks.Tracker, ["--config"], "--config needs a value"}
        ] do
      more = if task in [Tasks.Demo, Tasks.Tracker] or "--hosts" in args, do: [], else: hosts
      assert {2, "", err} = mix(task, args ++ more)
      assert err =~ text
      refute err =~ "option :"
    end

    # An option of the file has no other name.
    file = Path.join(System.tmp_dir!(), unique("kmq-options"))
    on_exit(fn -> File.rm(file) end)
    File.write!(file, "[max_redeliveries: -1]")
    args = ["check", "--topic", "t", "--group", "g", "--options", file] ++ hosts
    assert {2, "", err} = mix(Tasks.Topics, args)
    assert err =~ "invalid value for :max_redeliveries option: expected a non-negative integer"
  end
end
