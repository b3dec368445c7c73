defmodule Kmq.BroadwayKafkaOptionsTest do
  # Every option of broadway_kafka: its default, a good value and what becomes of it in librdkafka, a bad one and what is said.
  # guides/coming-from-broadway_kafka.md has the same table, in words.
  use ExUnit.Case, async: false

  alias Kmq.{Config, Error}

  @base [hosts: [localhost: 9092], topics: ["orders"], group_id: "shop"]
  @offsets [delivery: :offsets, on_failure: :ack]

  # A key file, a certificate: only that it can be read is looked at.
  @file_here __ENV__.file

  # option, or {group, option}
  #   default    what holds where nothing is said: properties of librdkafka, or fields of the configuration
  #   good       a value => the same
  #   bad        a value => the message, behind "invalid value for ... option: "
  #   idle       values that are taken, and said to do nothing
  @table [
    hosts: %{
      good: [
        {["kafka-1": 9092, "kafka-2": 9093],
         %{"bootstrap.servers" => "kafka-1:9092,kafka-2:9093"}},
        {[{"kafka-1", 9092}, {"kafka-2", 9093}],
         %{"bootstrap.servers" => "kafka-1:9092,kafka-2:9093"}},
        {"kafka-1:9092,kafka-2:9093,kafka-3:9094",
         %{"bootstrap.servers" => "kafka-1:9092,kafka-2:9093,kafka-3:9094"}}
      ],
      bad: [
        {:host, "expected a keyword list, a list of {host, port} or a string, got: :host"},
        {"host", "\"host\" has no port, write \"host:9092\""},
        {"host:9092,", "an empty entry (a comma too many?)"},
        {[], "expected at least one host"}
      ]
    },
    group_id: %{
      good: [{"accounts", %{"group.id" => "accounts"}}],
      bad: [
        {:group, "expected a non-empty string, got: :group"},
        {"", "expected a non-empty string, got: \"\""}
      ]
    },
    topics: %{
      good: [{["a", "b"], %{topics: ["a", "b"]}}],
      bad: [
        {"a", "expected a list of strings, got: \"a\""},
        {["a", :b], "expected a list of strings, got: :b in it"},
        {[], "expected at least one topic"}
      ]
    },
    receive_interval: %{
      idle: [0, 2_000],
      bad: [{-1, "expected a non-negative integer, got: -1"}]
    },
    reconnect_timeout: %{
      idle: [1_000],
      bad: [{"1 s", "expected a non-negative integer, got: \"1 s\""}]
    },
    offset_commit_on_ack: %{
      default: %{commit_interval: 200},
      good: [{true, %{commit_interval: 200}}, {false, %{commit_interval: 5_000}}],
      bad: [{:never, "expected true or false, got: :never"}]
    },
    offset_reset_policy: %{
      # broadway_kafka's is :latest
      default: %{:offset_reset_policy => :earliest, "auto.offset.reset" => "error"},
      good: [
        {:earliest, %{offset_reset_policy: :earliest}},
        {:latest, %{:offset_reset_policy => :latest, "auto.offset.reset" => "error"}},
        {{:timestamp, 1_700_000_000_000}, %{offset_reset_policy: {:timestamp, 1_700_000_000_000}}}
      ],
      bad: [
        {:newest, "expected :earliest, :latest or {:timestamp, ms}, got: :newest"},
        {{:timestamp, -1},
         "expected :earliest, :latest or {:timestamp, ms}, got: {:timestamp, -1}"}
      ]
    },
    begin_offset: %{
      default: %{begin_offset: :assigned},
      good: [{:assigned, %{begin_offset: :assigned}}, {:reset, %{begin_offset: :reset}}],
      bad: [{:start, "expected one of :assigned, :reset, got: :start"}]
    },
    shared_client: %{
      idle: [true, false],
      bad: [{1, "expected true or false, got: 1"}]
    },
    group_config: %{
      good: [{[], %{"session.timeout.ms" => "30000"}}],
      bad: [{:none, {:whole, "expected :group_config to be a keyword list, got: :none"}}]
    },
    fetch_config: %{
      good: [{[], %{"fetch.min.bytes" => "1"}}],
      bad: [
        {5,
         {:whole,
          "expected :fetch_config to be a keyword list of :min_bytes, :max_bytes, :max_wait_time, got: 5"}}
      ]
    },
    client_config: %{
      good: [{[], %{"client.id" => "kmq-shop"}}],
      # It may hold a password.
      bad: [
        {[:ssl],
         {:whole,
          "expected :client_config to be a keyword list, got: :\"a list that is not one\""}}
      ]
    }
  ]

  @nested [
    {{:group_config, :offset_commit_interval_seconds},
     %{
       default: %{commit_interval: 200},
       good: [{5, %{commit_interval: 5_000}}],
       bad: [{0, "expected an integer from 1 to 86400, got: 0"}]
     }},
    {{:group_config, :rejoin_delay_seconds},
     %{idle: [1], bad: [{-1, "expected a non-negative integer, got: -1"}]}},
    {{:group_config, :session_timeout_seconds},
     %{
       default: %{"session.timeout.ms" => "30000"},
       good: [{45, %{"session.timeout.ms" => "45000", "max.poll.interval.ms" => "45000"}}],
       bad: [
         {0, "expected a positive integer, got: 0"},
         {3_601, "expected at most 3600, got: 3601"}
       ]
     }},
    {{:group_config, :heartbeat_rate_seconds},
     %{
       default: %{"heartbeat.interval.ms" => "5000"},
       good: [{3, %{"heartbeat.interval.ms" => "3000"}}],
       bad: [
         {1.5, "expected a positive integer, got: 1.5"},
         {16,
          "16000 ms is more than half of the session timeout of 30000 ms, so one late heartbeat would end the membership. " <>
            "Give a third of it or less, or a longer :session_timeout_seconds option of :group_config"}
       ]
     }},
    {{:group_config, :rebalance_timeout_seconds},
     %{
       # 30, and what a drain (30 s) and its commit need
       default: %{"max.poll.interval.ms" => "40000"},
       good: [
         {30, %{"max.poll.interval.ms" => "40000"}},
         {120, %{"max.poll.interval.ms" => "120000"}}
       ],
       bad: [
         {0, "expected an integer from 1 to 86400, got: 0"},
         {86_401, "expected an integer from 1 to 86400, got: 86401"}
       ]
     }},
    {{:fetch_config, :min_bytes},
     %{
       default: %{"fetch.min.bytes" => "1"},
       good: [{10, %{"fetch.min.bytes" => "10"}}],
       bad: [{0, "expected an integer from 1 to 100000000, got: 0"}]
     }},
    {{:fetch_config, :max_bytes},
     %{
       default: %{"fetch.message.max.bytes" => "1048576"},
       good: [{10_240, %{"fetch.message.max.bytes" => "10240"}}],
       bad: [{"1 MB", "expected an integer from 1 to 1000000000, got: \"1 MB\""}]
     }},
    {{:fetch_config, :max_wait_time},
     %{
       default: %{"fetch.wait.max.ms" => "100"},
       good: [{500, %{"fetch.wait.max.ms" => "500"}}],
       bad: [{0, "expected an integer from 1 to 300000, got: 0"}]
     }},
    {{:client_config, :client_id_prefix},
     %{
       default: %{"client.id" => "kmq-shop"},
       good: [{"node-1 ", %{"client.id" => "node-1 kmq-shop"}}],
       bad: [
         {:node, "expected a string, got: :node"},
         {"a\0b", "expected UTF-8 text without NUL, got: <<97, 0, 98>>"}
       ]
     }},
    {{:client_config, :sasl},
     %{
       default: %{"sasl.mechanism" => nil, "security.protocol" => nil},
       good: [
         {:undefined, %{"sasl.mechanism" => nil}},
         {{:plain, "user", "secret"},
          %{
            "sasl.mechanism" => "PLAIN",
            "sasl.username" => "user",
            "sasl.password" => "secret",
            "security.protocol" => "sasl_plaintext"
          }},
         {{:scram_sha_256, "user", "secret"}, %{"sasl.mechanism" => "SCRAM-SHA-256"}},
         {{:scram_sha_512, "user", "secret"}, %{"sasl.mechanism" => "SCRAM-SHA-512"}}
       ],
       bad: [
         {{:plain, "no such file"}, "cannot read \"no such file\": no such file or directory"},
         {{:callback, Some.Module, []},
          "{:callback, module, options} is brod's; use kafka_config: [common: [\"sasl.mechanism\": ...]]"},
         {{:gssapi, "user", "secret"},
          "expected {mechanism, user, password} or {mechanism, file}, the mechanism one of :plain, :scram_sha_256, :scram_sha_512; " <>
            "or {:oauthbearer, function}; others by kafka_config: [common: [\"sasl.mechanism\": ...]]"}
       ]
     }},
    {{:client_config, :ssl},
     %{
       default: %{"security.protocol" => nil},
       good: [
         {false, %{"security.protocol" => nil}},
         # broadway_kafka checks what OTP checks by default: before 26 nothing
         {true, %{"security.protocol" => "ssl", "enable.ssl.certificate.verification" => "true"}},
         {[cacertfile: @file_here, certfile: @file_here, keyfile: @file_here],
          %{
            "ssl.ca.location" => @file_here,
            "ssl.certificate.location" => @file_here,
            "ssl.key.location" => @file_here
          }},
         {[verify: :verify_none], %{"enable.ssl.certificate.verification" => "false"}}
       ],
       bad: [
         {"ca.pem", "expected true, false or a keyword list"},
         {[versions: [:"tlsv1.3"]],
          ":versions has no twin in librdkafka, see kafka_config: [common: [\"ssl...\": ...]]"}
       ]
     }},
    {{:client_config, :connect_timeout},
     %{
       default: %{"socket.connection.setup.timeout.ms" => nil},
       good: [{5_000, %{"socket.connection.setup.timeout.ms" => "5000"}}],
       bad: [{999, "expected an integer from 1000 to 3600000, got: 999"}]
     }},
    {{:client_config, :request_timeout},
     %{
       default: %{"socket.timeout.ms" => nil},
       good: [{240_000, %{"socket.timeout.ms" => "240000"}}],
       bad: [
         {999, "expected an integer from 1000 to 300000, got: 999"},
         {300_001, "expected an integer from 1000 to 300000, got: 300001"}
       ]
     }},
    {{:client_config, :query_api_versions},
     %{idle: [true, false], bad: [{"no", "expected true or false, got: \"no\""}]}},
    {{:client_config, :extra_sock_opts}, %{idle: [[:inet6], [sndbuf: 5]], bad: []}}
  ]

  defp options({group, name}, value), do: options(group, [{name, value}])
  defp options(name, value), do: Keyword.merge(@base ++ @offsets, [{name, value}])

  defp look(config, property) when is_binary(property) do
    config.consumer_props
    |> Kmq.Security.reveal()
    |> List.keyfind(property, 0, {property, nil})
    |> elem(1)
  end

  defp look(config, field), do: Map.fetch!(config, field)

  defp assert_all(config, wanted, what),
    do:
      for(
        {name, value} <- wanted,
        do: assert({what, name, look(config, name)} == {what, name, value})
      )

  defp message(path, {:whole, text}) when is_atom(path), do: text

  defp message({group, name}, text),
    do: "invalid value for #{inspect(name)} option of #{inspect(group)}: #{text}"

  defp message(name, text), do: "invalid value for #{inspect(name)} option: #{text}"

  defp idle_name({group, name}), do: "#{inspect(name)} of #{inspect(group)}"
  defp idle_name(name), do: inspect(name)

  # Whether librdkafka takes all of it, too: a client that is never connected.
  defp taken!(config) do
    {:ok, admin} = Kmq.Security.admin_open(config.admin_props, 1_000)
    :kmq_nif.admin_close(admin)
  end

  for {path, row} <- @table ++ @nested do
    @path path
    @row row
    test "#{inspect(path)}" do
      default = Config.new!(@base ++ @offsets)
      assert_all(default, Map.get(@row, :default, %{}), :default)

      for {value, wanted} <- Map.get(@row, :good, []) do
        {result, log} = logged(fn -> Config.new(options(@path, value)) end)
        assert {value, {:ok, config}} = {value, result}
        assert_all(config, wanted, value)
        refute log =~ "do nothing"
        unless @path == {:client_config, :ssl}, do: taken!(config)
      end

      for {value, text} <- @row.bad do
        assert {:error, %Error{reason: :invalid_option, message: message}} =
                 Config.new(options(@path, value))

        assert {value, message} == {value, message(@path, text)}
      end

      for value <- Map.get(@row, :idle, []) do
        {result, log} = logged(fn -> Config.new(options(@path, value)) end)
        assert {:ok, config} = result
        assert log =~ "these options do nothing here: " <> idle_name(@path)

        assert Kmq.Security.reveal(config.consumer_props) ==
                 Kmq.Security.reveal(default.consumer_props)
      end
    end
  end

  defp logged(fun) do
    ExUnit.CaptureLog.with_log([level: :info], fun)
  end

  test "the table has every option of broadway_kafka, and there is no other of these groups but one" do
    for group <- [:group_config, :fetch_config, :client_config] do
      known = Keyword.keys(Kmq.Options.schema(:producer)[group][:keys])
      mine = for {{^group, name}, _} <- @nested, do: name
      assert Enum.sort(known) -- [:group_instance_id] == Enum.sort(mine)
    end
  end

  test "the guide names each, with the defaults here" do
    guide = File.read!("guides/coming-from-broadway_kafka.md")
    groups = [:group_config, :fetch_config, :client_config]

    for {path, row} <- @table ++ @nested, path not in groups do
      name = if is_tuple(path), do: elem(path, 1), else: path
      assert [line] = Regex.run(~r/^\|[^|]*`#{name}`.*$/m, guide)
      assert Map.has_key?(row, :idle) == (line =~ "nothing" and not (line =~ "Else nothing"))
    end
  end

  test "required ones" do
    for name <- [:hosts, :group_id, :topics] do
      assert {:error, %Error{message: message}} = Config.new(Keyword.delete(@base, name))
      assert message == "required option #{inspect(name)} is missing"
    end
  end

  test "when commits are written: with the acks, or now and then" do
    interval = fn options -> Config.new!(@base ++ @offsets ++ options).commit_interval end
    seconds = [group_config: [offset_commit_interval_seconds: 9]]
    assert interval.([offset_commit_on_ack: true] ++ seconds) == 200
    assert interval.([offset_commit_on_ack: false] ++ seconds) == 9_000
    assert interval.([commit_interval: 20, offset_commit_on_ack: false] ++ seconds) == 20

    # Elsewhere a commit does not say what is done.
    for delivery <- [:markers, :at_most_once] do
      {config, log} =
        logged(fn -> Config.new!(@base ++ [delivery: delivery, offset_commit_on_ack: false]) end)

      assert config.commit_interval == 200
      assert log =~ "these options do nothing here: :offset_commit_on_ack"
    end
  end
end
