defmodule Kmq.ConfigTest do
  use ExUnit.Case, async: true

  alias Kmq.{Config, Error}

  @base [hosts: "localhost:9092", topics: ["orders"], group_id: "shop"]

  defp config(options), do: Config.new!(Keyword.merge(@base, options))

  defp message(options) do
    {:error, %Error{reason: :invalid_option, message: message}} =
      Config.new(Keyword.merge(@base, options))

    message
  end

  defp property(config, list \\ :consumer_props, name) do
    config
    |> Map.fetch!(list)
    |> Kmq.Security.reveal()
    |> List.keyfind(name, 0, {name, nil})
    |> elem(1)
  end

  describe "topics" do
    test "default names" do
      config = config([])
      assert config.marker_topics == %{"orders" => "orders__shop__markers"}
      assert config.dead_letter_topics == %{"orders" => "orders__undelivered"}
      assert config.redeliver_topics == %{"orders" => "orders"}
    end

    test "several topics, names by map or one for all" do
      config =
        config(
          topics: ["a", "b"],
          marker_topic: %{"a" => "ma"},
          dead_letter_topic: "dead",
          redeliver_to: %{"a" => "b"}
        )

      assert config.marker_topics == %{"a" => "ma", "b" => "b__shop__markers"}
      assert config.dead_letter_topics == %{"a" => "dead", "b" => "dead"}
      assert config.redeliver_topics == %{"a" => "b", "b" => "b"}
    end

    test "a topic of copies has the dead letter topic of its source" do
      config = config(topics: ["a", "copies"], redeliver_to: %{"a" => "copies"})
      assert config.dead_letter_topics == %{"a" => "a__undelivered", "copies" => "a__undelivered"}
    end

    test "a marker topic is no queue" do
      for delivery <- [:markers, :offsets, :at_most_once] do
        assert message(topics: ["orders", "orders__shop__markers"], delivery: delivery) ==
                 "invalid value for :topics option: \"orders__shop__markers\" is a marker topic, which is Kmq's own: name the queue topic. " <>
                   "Kmq.Inspect and mix kmq.inspect show what is in it"
      end

      assert {:error, %Error{message: message}} =
               Config.with_topics(config([]), ["orders", "a__b__markers"])

      assert message =~ "\"a__b__markers\" is a marker topic"
      for topic <- ["markers", "__markers", "a__markers"], do: config(topics: [topic])
    end

    test "names that a group id makes impossible name the option to set" do
      assert message(group_id: "my shop") ==
               "the marker topic of \"orders\" and group \"my shop\", \"orders__my shop__markers\", has characters Kafka does not take in " <>
                 "a topic's name (letters, digits, dot, _ and - only): name one by :marker_topic"

      assert message(group_id: String.duplicate("g", 240)) =~
               "is 257 characters long, Kafka takes 249: name one by :marker_topic"

      assert config(group_id: "my shop", marker_topic: "m").marker_topics == %{"orders" => "m"}

      assert message(topics: [String.duplicate("q", 240)], marker_topic: "m") =~
               ": name one by :dead_letter_topic"
    end

    test "circles are refused" do
      assert message(dead_letter_topic: "orders") ==
               "invalid value for :dead_letter_topic option: \"orders\" is one of :topics, dead letters would come round again"

      assert message(dead_letter_topic: "orders__shop__markers") ==
               "invalid value for :dead_letter_topic option: \"orders__shop__markers\" is a marker topic"

      assert message(marker_topic: "orders") ==
               "invalid value for :marker_topic option: \"orders\" is one of :topics"

      assert message(topics: ["a", "b"], marker_topic: "m") =~ "cannot share \"m\", give a map"

      assert message(topics: ["orders__undelivered"]) ==
               "\"orders__undelivered\" is a dead letter topic itself: name another topic for what fails again by :dead_letter_topic"

      assert config(topics: ["orders__undelivered"], dead_letter_topic: "given_up").topics == [
               "orders__undelivered"
             ]

      assert message(redeliver_to: "elsewhere") ==
               "invalid value for :redeliver_to option: \"elsewhere\" must be one of :topics, or nobody reads the copies"

      assert message(marker_topic: %{"x" => "m"}) ==
               "invalid value for :marker_topic option: \"x\" is not one of :topics"
    end
  end

  describe "properties" do
    test "defaults" do
      config = config([])

      for {name, value} <- [
            {"bootstrap.servers", "localhost:9092"},
            {"client.id", "kmq-shop"},
            {"group.id", "shop"},
            {"session.timeout.ms", "30000"},
            {"heartbeat.interval.ms", "5000"},
            {"max.poll.interval.ms", "40000"},
            {"partition.assignment.strategy", "roundrobin"},
            {"auto.offset.reset", "error"},
            {"fetch.wait.max.ms", "100"},
            {"fetch.min.bytes", "1"},
            {"fetch.message.max.bytes", "1048576"},
            {"socket.nagle.disable", "true"},
            {"security.protocol", nil}
          ] do
        assert {name, property(config, name)} == {name, value}
      end

      assert property(config, :admin_props, "group.id") == "shop"
      assert property(config, :producer_props, "linger.ms") == "0"
      assert property(config, :tracker_props, "bootstrap.servers") == "localhost:9092"
      assert property(config, :tracker_props, "group.id") == nil
    end

    test "broadway_kafka's names" do
      config =
        config(
          group_config: [
            session_timeout_seconds: 10,
            heartbeat_rate_seconds: 2,
            rebalance_timeout_seconds: 90,
            group_instance_id: "w",
            offset_commit_interval_seconds: 5
          ],
          fetch_config: [min_bytes: 2, max_bytes: 3, max_wait_time: 4],
          client_config: [client_id_prefix: "p-", connect_timeout: 5_000, request_timeout: 6_000]
        )

      for {name, value} <- [
            {"session.timeout.ms", "10000"},
            {"heartbeat.interval.ms", "2000"},
            {"max.poll.interval.ms", "90000"},
            {"group.instance.id", "w"},
            {"fetch.min.bytes", "2"},
            {"fetch.message.max.bytes", "3"},
            {"fetch.wait.max.ms", "4"},
            {"client.id", "p-kmq-shop"},
            {"socket.connection.setup.timeout.ms", "5000"},
            {"socket.timeout.ms", "6000"}
          ] do
        assert {name, property(config, name)} == {name, value}
      end

      assert config.commit_interval == 5_000
      assert property(Config.for_index(config, 3), "group.instance.id") == "w-3"

      too_seldom = fn option, heartbeat, session, longer ->
        "invalid value for #{option}: #{heartbeat} ms is more than half of the session timeout of #{session} ms, so one late heartbeat " <>
          "would end the membership. Give a third of it or less, or a longer #{longer}"
      end

      group = &"#{inspect(&1)} option of :group_config"
      [beat, session] = Enum.map([:heartbeat_rate_seconds, :session_timeout_seconds], group)

      assert message(group_config: [session_timeout_seconds: 5]) ==
               too_seldom.(beat, 5_000, 5_000, session)

      assert message(group_config: [session_timeout_seconds: 30, heartbeat_rate_seconds: 29]) ==
               too_seldom.(beat, 29_000, 30_000, session)

      own = "heartbeat.interval.ms of the :kafka_config option"

      assert message(kafka_config: [consumer: ["heartbeat.interval.ms": 16_000]]) ==
               too_seldom.(own, 16_000, 30_000, session)

      assert message(kafka_config: [consumer: ["session.timeout.ms": 9_000]]) ==
               too_seldom.(beat, 5_000, 9_000, "session.timeout.ms of the :kafka_config option")

      # More than a third is said, a third is what Kafka recommends.
      for {heartbeat, said?} <- [{15, true}, {10, false}] do
        log =
          ExUnit.CaptureLog.capture_log(fn ->
            config(group_config: [session_timeout_seconds: 30, heartbeat_rate_seconds: heartbeat])
          end)

        assert log =~ "15000 ms is more than a third of the session timeout of 30000 ms" == said?
      end

      assert message(group_config: [session_timeout_seconds: 3_601]) ==
               "invalid value for :session_timeout_seconds option of :group_config: expected at most 3600, got: 3601"
    end

    test "kafka_config comes last, by kind of client" do
      config =
        config(
          kafka_config: [
            common: ["socket.nagle.disable": false],
            consumer: [{"queued.min.messages", 7}],
            producer: %{"linger.ms" => 1.5},
            tracker: [{"fetch.min.bytes", 9}]
          ]
        )

      assert property(config, "socket.nagle.disable") == "false"
      assert property(config, "queued.min.messages") == "7"
      assert property(config, :producer_props, "linger.ms") == "1.5"
      assert property(config, :tracker_props, "fetch.min.bytes") == "9"
      assert property(config, :tracker_props, "queued.min.messages") == nil

      assert config.consumer_props
             |> Enum.map(&elem(&1, 0))
             |> Enum.frequencies()
             |> Map.values()
             |> Enum.uniq() == [1]
    end

    test "kafka_config takes what this librdkafka knows, and says so before a client is opened" do
      {version, _} = :kmq_nif.version()

      for group <- [:common, :consumer, :producer, :tracker] do
        assert message(kafka_config: [{group, foo: 1}]) ==
                 "invalid value for :kafka_config option: foo: unknown property (librdkafka #{version}); its CONFIGURATION.md has them all"

        assert message(kafka_config: [{group, "fetch.min.bytes": "many"}]) ==
                 "invalid value for :kafka_config option: fetch.min.bytes: value refused (librdkafka #{version}); its CONFIGURATION.md has them all"
      end

      assert {:error, %Error{reason: :invalid_option, message: text}} =
               Config.publisher(hosts: "h:1", kafka_config: [producer: [{"linger", 5}]])

      assert text =~ "linger: unknown property"
      assert property(config(kafka_config: [common: ["?foo": 1]]), "?foo") == "1"
      # A secret's value is nobody's to try.
      secret = fn -> raise "not now" end
      assert %Config{} = config(kafka_config: [common: ["ssl.key.password": secret]])
      assert message(kafka_config: [common: ["sasl.passwords": secret]]) =~ "sasl.passwords"
    end

    test "kafka_config cannot take the ground from under the guarantees" do
      assert message(kafka_config: [common: ["group.id": "x"]]) ==
               "invalid value for :kafka_config option: group.id cannot be set here: use :group_id"

      assert message(
               kafka_config: [consumer: ["partition.assignment.strategy": "cooperative-sticky"]]
             ) ==
               "invalid value for :kafka_config option: partition.assignment.strategy cannot be set here: use :assignor"

      assert message(kafka_config: [all: []]) ==
               "invalid value for :kafka_config option: unknown group :all, expected :common, :consumer, :producer or :tracker"
    end
  end

  describe "assignor" do
    test "one, or eager ones in their order" do
      for {assignor, property} <- [
            {:range, "range"},
            {[:range, :roundrobin], "range,roundrobin"},
            {[:roundrobin], "roundrobin"}
          ] do
        assert property(config(assignor: assignor), "partition.assignment.strategy") == property
      end

      for bad <- [:sticky, "range", [], [:range, :range], [:range, :other]] do
        assert message(assignor: bad) ==
                 "invalid value for :assignor option: expected :roundrobin, :range, both of these in a list, or :cooperative_sticky"
      end

      assert message(assignor: [:range, :cooperative_sticky]) ==
               "invalid value for :assignor option: members that take everything back and members that do not cannot share a group: " <>
                 ":cooperative_sticky stands alone, stop all members before the change"
    end

    test "cooperative-sticky is refused where the library loses assignments with it" do
      assert Config.assignor([:cooperative_sticky], {"2.10.0", 0x020A00FF}) ==
               {:error,
                "invalid value for :assignor option: :cooperative_sticky needs librdkafka 2.10.1 or newer, this is 2.10.0: " <>
                  "with it a group may hang or lose partitions. Use :roundrobin or :range, or run with a newer librdkafka.so.1"}

      assert Config.assignor([:cooperative_sticky], {"2.10.1", 0x020A01FF}) == :ok
      assert Config.assignor([:roundrobin], {"2.0.2", 0x020002FF}) == :ok

      {text, number} = :kmq_nif.version()

      if number < 0x020A01FF,
        do: assert(message(assignor: :cooperative_sticky) =~ "this is #{text}"),
        else: assert(Config.cooperative?(config(assignor: :cooperative_sticky)))
    end
  end

  describe "TLS and SASL" do
    test "peers are verified by default" do
      config = config(client_config: [ssl: true])
      assert property(config, "security.protocol") == "ssl"
      assert property(config, "enable.ssl.certificate.verification") == "true"
      assert property(config, "ssl.endpoint.identification.algorithm") == "https"
    end

    test "Erlang's options" do
      file = __ENV__.file

      config =
        config(
          client_config: [
            ssl: [
              cacertfile: Path.dirname(file),
              certfile: String.to_charlist(file),
              keyfile: file,
              password: "pw",
              verify: :verify_none
            ],
            sasl: {:scram_sha_512, "u", "p"}
          ]
        )

      for {name, value} <- [
            {"security.protocol", "sasl_ssl"},
            {"ssl.ca.location", Path.dirname(file)},
            {"ssl.certificate.location", file},
            {"ssl.key.location", file},
            {"ssl.key.password", "pw"},
            {"enable.ssl.certificate.verification", "false"},
            {"ssl.endpoint.identification.algorithm", "none"},
            {"sasl.mechanism", "SCRAM-SHA-512"},
            {"sasl.username", "u"},
            {"sasl.password", "p"}
          ],
          list <- [:consumer_props, :producer_props, :tracker_props, :admin_props] do
        assert {name, property(config, list, name)} == {name, value}
      end
    end

    test "user and password from a file" do
      path = Path.join(System.tmp_dir!(), "kmq-sasl-#{System.unique_integer([:positive])}")
      File.write!(path, "someone\nsecret\n")
      on_exit(fn -> File.rm(path) end)
      config = config(client_config: [sasl: {:plain, path}])
      assert property(config, "security.protocol") == "sasl_plaintext"
      assert property(config, "sasl.username") == "someone"
      assert property(config, "sasl.password") == "secret"
      assert message(client_config: [sasl: {:plain, path <> "-"}]) =~ "no such file or directory"
    end

    test "what does not map names the property to use" do
      assert message(client_config: [ssl: [ciphers: []]]) ==
               "invalid value for :ssl option of :client_config: :ciphers cannot be passed on, use kafka_config: [common: [\"ssl.cipher.suites\": ...]]"

      assert message(client_config: [ssl: [depth: 3]]) =~ ":depth has no twin in librdkafka"

      assert message(client_config: [ssl: [server_name_indication: ~c"x"]]) =~
               ":server_name_indication takes :disable only"

      assert message(client_config: [ssl: [keyfile: "no/such.key"]]) =~
               "cannot read \"no/such.key\" (:keyfile): no such file or directory"

      assert message(client_config: [sasl: {:oauthbearer, fn _ -> :ok end}]) =~
               "expected {:oauthbearer, function}"

      assert message(client_config: [sasl: {:callback, Mod, []}]) =~ "is brod's; use kafka_config"
    end

    test "a secret may be a function, and is one from the start" do
      config =
        config(
          client_config: [
            ssl: [password: fn -> "key" end],
            sasl: {:plain, "u", fn -> "pw" end}
          ],
          receipt_secret: fn -> "0123456789abcdef" end
        )

      assert property(config, "sasl.password") == "pw"
      assert property(config, "ssl.key.password") == "key"
      assert config.receipt_secret.() == "0123456789abcdef"

      assert message(receipt_secret: fn -> "short" end) =~ "at least 16 bytes"
      assert message(client_config: [sasl: {:plain, "u", 7}]) =~ "as a function that gives one"

      config = config(client_config: [sasl: {:plain, "u", fn -> {:no, :string} end}])

      assert_raise ArgumentError, "the function given for sasl.password gave no string", fn ->
        Kmq.Security.reveal(config.consumer_props)
      end
    end

    test "one that is given as text is a function in all properties" do
      plain = config(client_config: [ssl: [password: "hunter2"], sasl: {:plain, "u", "hunter2"}])
      refute :io_lib.format("~p", [plain]) |> List.to_string() =~ "hunter2"
    end

    test "tokens: a function, or a mechanism that finds them by itself" do
      fun = fn -> {:ok, "t"} end
      config = config(client_config: [ssl: true, sasl: {:oauthbearer, fun}])
      assert property(config, "sasl.mechanism") == "OAUTHBEARER"
      assert Kmq.Security.token_source(config.consumer_props) == fun
      assert Kmq.Security.token_source(config.tracker_props) == fun

      config = config(client_config: [sasl: {:oauthbearer, {Kernel, :elem, [{1, "t"}, 1]}}])
      assert Kmq.Security.token_source(config.admin_props).() == "t"

      assert message(kafka_config: [common: ["sasl.mechanism": "OAUTHBEARER"]]) =~
               "OAUTHBEARER needs tokens: give them by client_config"

      mechanism = &[common: [{:"sasl.mechanism", "OAUTHBEARER"}, &1]]
      assert config(kafka_config: mechanism.({:"enable.sasl.oauthbearer.unsecure.jwt", true}))

      # Not every librdkafka is built with it.
      own = mechanism.({:"sasl.oauthbearer.method", "oidc"})

      if :kmq_nif.property("sasl.oauthbearer.method", "oidc") == :ok,
        do: assert(config(kafka_config: own)),
        else: assert(message(kafka_config: own) =~ "sasl.oauthbearer.method: value refused")
    end

    test "nobody opens an admin client past the tokens" do
      for path <- Path.wildcard("lib/**/*.ex"),
          path != "lib/kmq/security.ex",
          File.read!(path) =~ ~r/kmq_nif\.(admin|consumer|publisher)_open/,
          do: flunk("#{path}: use Kmq.Security")
    end

    test "what a supervisor prints of a child has no secret in it" do
      options =
        Keyword.merge(@base,
          client_config: [
            ssl: [password: "hunter2"],
            sasl: {:plain, "u", "hunter2"}
          ],
          kafka_config: [common: %{"ssl.keystore.password": "hunter2"}],
          receipt_secret: "hunter2hunter2hunter2"
        )

      for module <- [Kmq.Consumer, Kmq.Publisher, Kmq.Tracker] do
        spec = module.child_spec(options)
        refute inspect(spec, limit: :infinity) =~ "hunter2"
        refute :io_lib.format("~p", [spec]) |> List.to_string() =~ "hunter2"
        %{start: {_, _, [hidden]}} = spec
        assert Config.new!(Keyword.drop(hidden, [:name])).receipt_secret.() =~ "hunter2"
      end

      bearer = [client_config: [sasl: {:oauthbearer, {Kernel, :elem, [{"hunter2"}, 0]}}]]
      refute inspect(Kmq.Consumer.child_spec(bearer)) =~ "hunter2"
    end

    test "secrets show in no message and no inspect" do
      refute message(client_config: [sasl: {:gssapi, "u", "hunter2"}]) =~ "hunter2"
      refute message(client_config: [sasl: "hunter2"]) =~ "hunter2"
      refute message(client_config: [ssl: [password: :hunter2]]) =~ "hunter2"

      config =
        config(
          client_config: [sasl: {:plain, "u", "hunter2"}],
          kafka_config: [common: ["sasl.password": "hunter2"]]
        )

      refute inspect(config, limit: :infinity) =~ "hunter2"
      refute inspect(%{state: config}, limit: :infinity, pretty: true) =~ "hunter2"
      # as Erlang's own logger prints it
      refute :io_lib.format("~p", [config]) |> List.to_string() =~ "hunter2"
      refute Exception.message(Error.new(:kafka, "x")) =~ "hunter2"
    end
  end

  test "options without a twin are taken and said to do nothing" do
    log =
      ExUnit.CaptureLog.capture_log(fn ->
        config(
          receive_interval: 100,
          shared_client: true,
          group_config: [rejoin_delay_seconds: 1],
          client_config: [query_api_versions: true]
        )
      end)

    assert log =~
             "these options do nothing here: :receive_interval, :shared_client, :rejoin_delay_seconds of :group_config, " <>
               ":query_api_versions of :client_config"
  end

  test "bad options raise in the bang variant" do
    assert_raise ArgumentError, "unknown option :leese, did you mean :lease?", fn ->
      config(leese: 1)
    end
  end

  test "publisher" do
    assert {:ok, valid, derived} =
             Config.publisher(
               hosts: "h:1",
               queue_bytes: 2_048,
               kafka_config: [producer: ["linger.ms": 7]]
             )

    assert valid[:acks] == :all
    props = Map.new(derived.producer_props)
    assert props["partitioner"] == "murmur2_random"
    assert props["queue.buffering.max.kbytes"] == "2"
    assert props["linger.ms"] == "7"

    assert {:error, %Error{message: "unknown option :topics, " <> _}} =
             Config.publisher(hosts: "h:1", topics: [])
  end

  test "delivery: :offsets keeps the order of partitions, unless another one is asked for" do
    options = [hosts: [localhost: 9092], topics: ["q"], group_id: "g"]
    ordering = fn more -> Config.new!(options ++ more).ordering end
    assert ordering.([]) == :none
    assert ordering.(delivery: :offsets, on_failure: :ack) == :partition
    assert ordering.(delivery: :offsets, on_failure: :ack, ordering: nil) == :partition
    assert ordering.(delivery: :offsets, on_failure: :ack, ordering: :none) == :none
    assert ordering.(delivery: :offsets, on_failure: :ack, ordering: :key) == :key
    assert ordering.(delivery: :at_most_once, on_failure: :ack) == :none
  end

  describe "deliveries without markers" do
    test "a failed message is kept where nothing is said, or dropped where that is what was asked for" do
      assert config([]).on_failure == :retry
      assert config(delivery: :offsets).on_failure == :reject
      assert config(delivery: :at_most_once).on_failure == :discard
      assert config(delivery: :offsets, on_failure: :ack).on_failure == :ack
    end

    test "what is not to be had is refused, with what is" do
      assert message(delivery: :offsets, on_failure: :retry) ==
               "invalid value for :on_failure option: :retry needs delivery: :markers; with delivery: :offsets nothing is delivered again, " <>
                 "so it is one of :ack, :reject, :discard"

      assert message(delivery: :at_most_once, on_success: :manual) =~
               "invalid value for :on_success option: :manual needs delivery: :markers; with delivery: :at_most_once"

      assert {:error, %Error{message: message}} =
               Config.new(@base ++ [delivery: :offsets], :tracker)

      assert message ==
               "invalid value for :delivery option: a tracker reads markers, and delivery: :offsets has none"
    end

    test "options about markers say that they do nothing" do
      log = fn options ->
        ExUnit.CaptureLog.capture_log(fn -> Config.new(@base ++ options, :producer) end)
      end

      options = [lease: 5_000, marker_topic: "m", backoff: [1], tracker: :embedded]
      assert log.(options) == ""

      assert log.([delivery: :offsets] ++ options) =~
               "these options do nothing here: :marker_topic, :lease, :backoff"
    end

    test "a dead letter topic must be there where messages go to it for certain" do
      needed = &config([delivery: :offsets] ++ &1).dead_letters
      assert config([]).dead_letters == :required
      assert needed.([]) == :required
      assert needed.(on_failure: :ack) == :optional
      assert needed.(on_failure: :discard, on_success: :reject) == :required
      assert needed.(on_failure: :ack, ttl: 5) == :required
      assert needed.(on_failure: :ack, ttl: 5, on_expired: :discard) == :optional
      assert config(delivery: :at_most_once).dead_letters == :optional
      {:ok, pull} = Config.new(@base ++ [delivery: :offsets], :consumer)
      assert {pull.dead_letters, pull.on_failure} == {:optional, nil}
    end

    test "a group whose marker topic would have no name has none" do
      long = String.duplicate("g", 240)
      assert message(group_id: long) =~ "name one by :marker_topic"
      assert config(group_id: long, delivery: :offsets).group_id == long
    end
  end
end
