defmodule Kmq.OptionsTest do
  use ExUnit.Case, async: true

  alias Kmq.Options

  doctest Kmq.Backoff

  @base [hosts: [localhost: 9092], topics: ["orders"], group_id: "shop"]

  defp one(name, value), do: Options.validate(Keyword.put(@base, name, value), :producer)

  defp publish(name, value), do: Options.validate([{name, value}], :publish)

  defp message(name, value) do
    {:error, message} = one(name, value)
    message
  end

  # option, default, a good value and its normal form, a bad value and the exact message
  @table [
    {:delivery, :markers, :offsets, :offsets, :exactly_once,
     "invalid value for :delivery option: expected one of :markers, :offsets, :at_most_once, got: :exactly_once"},
    {:marker_format, :range, :kmq, :kmq, :jason,
     "invalid value for :marker_format option: expected one of :range, :kmq, got: :jason"},
    {:ordering, :none, :key, :key, :message,
     "invalid value for :ordering option: expected one of :none, :partition, :key, got: :message"},
    {:lease, 30_000, 1_000, 1_000, 999,
     "invalid value for :lease option: expected an integer of at least 1000, got: 999"},
    {:max_processing_time, 300_000, 100, 100, "1 s",
     "invalid value for :max_processing_time option: expected an integer of at least 100, got: \"1 s\""},
    {:max_redeliveries, 3, 0, 0, -1,
     "invalid value for :max_redeliveries option: expected a non-negative integer, got: -1"},
    {:backoff, {:exponential, 1_000, 300_000, 2.0, 0.2}, [1, 2], {:list, [1, 2], 0.0}, [],
     "invalid value for :backoff option: expected {:exponential, options}, {:linear, options} or a list of ms, got: []"},
    {:start_ahead, 2_000, 1, 1, 0,
     "invalid value for :start_ahead option: expected a positive integer, got: 0"},
    {:ack_flush_interval, 5, 0, 0, :never,
     "invalid value for :ack_flush_interval option: expected a non-negative integer, got: :never"},
    {:commit_interval, 200, 1_000, 1_000, 0,
     "invalid value for :commit_interval option: expected a positive integer, got: 0"},
    {:max_in_flight, 100_000, 1, 1, 1.5,
     "invalid value for :max_in_flight option: expected a positive integer, got: 1.5"},
    {:drain_timeout, 30_000, 1, 1, :infinity,
     "invalid value for :drain_timeout option: expected ms, an integer from 1 to 3600000, got: :infinity"},
    {:offset_reset_policy, :earliest, {:timestamp, 5}, {:timestamp, 5}, :first,
     "invalid value for :offset_reset_policy option: expected :earliest, :latest or {:timestamp, ms}, got: :first"},
    {:begin_offset, :assigned, :reset, :reset, 0,
     "invalid value for :begin_offset option: expected one of :assigned, :reset, got: 0"},
    {:marker_topic, :absent, "m", "m", "m!",
     "invalid value for :marker_topic option: \"m!\" has characters Kafka does not take in a topic's name (letters, digits, dot, _ and - only)"},
    {:dead_letter_topic, :absent, %{"orders" => "d"}, %{"orders" => "d"}, :d,
     "invalid value for :dead_letter_topic option: expected a string or a map from topic to topic, got: :d"},
    {:dead_letter_oversize, :wait, :pointer, :pointer, :later,
     "invalid value for :dead_letter_oversize option: expected one of :wait, :pointer, got: :later"},
    {:redeliver_to, :absent, "orders", "orders", "",
     "invalid value for :redeliver_to option: \"\" is empty"},
    {:count_header, "kmq-redelivery-count", "n", "n", "",
     "invalid value for :count_header option: expected a non-empty string, got: \"\""},
    {:create_topics, false, true, true, "yes",
     "invalid value for :create_topics option: expected true or false, got: \"yes\""},
    {:allow_create_time, false, true, true, 1,
     "invalid value for :allow_create_time option: expected true or false, got: 1"},
    {:tracker, :embedded, :external, :external, :none,
     "invalid value for :tracker option: expected one of :embedded, :external, got: :none"},
    {:redelivery, :idempotent, :transactional, :transactional, :exactly_once,
     "invalid value for :redelivery option: expected one of :idempotent, :transactional, got: :exactly_once"},
    {:redelivery_rate, 10_000, 1, 1, 0,
     "invalid value for :redelivery_rate option: expected a positive integer, got: 0"},
    {:trim_markers, false, true, true, 1,
     "invalid value for :trim_markers option: expected true or false, got: 1"},
    {:on_success, :ack, :noop, :noop, :commit,
     "invalid value for :on_success option: expected :ack, :retry, {:retry, delay_ms | backoff}, :release, {:snooze, delay_ms}, :reject, :discard, :noop or :manual, got: :commit"},
    {:on_failure, :absent, {:retry, [5]}, {:retry, {:list, [5], 0.0}}, {:snooze, -1},
     "invalid value for :on_failure option: expected a delay of 0 to 2592000000 ms (30 days), got: -1"},
    {:gauge_interval, 5_000, 0, 0, -1,
     "invalid value for :gauge_interval option: expected an integer from 0 to 86400000, got: -1"},
    {:isolation_level, :read_committed, :read_uncommitted, :read_uncommitted, :serializable,
     "invalid value for :isolation_level option: expected one of :read_committed, :read_uncommitted, got: :serializable"},
    {:filter, [], [tags: ["a"], headers: [{"h", "1"}], routing: ["a.*.#"]],
     [{:tag, "a"}, {:header, "h", "1"}, {:routing, "a.*.#"}], [tags: ["a,b"]],
     "invalid value for :filter option: expected a list of strings without commas, got: [\"a,b\"]"},
    {:ttl, :absent, 5, 5, 0,
     "invalid value for :ttl option: expected a positive integer, got: 0"},
    {:on_expired, :reject, :discard, :discard, :ack,
     "invalid value for :on_expired option: expected one of :reject, :discard, got: :ack"},
    {:receipt_secret, :absent, "sixteen bytes 16", "sixteen bytes 16", "short",
     "invalid value for :receipt_secret option: expected a binary of at least 16 bytes"},
    {:kafka_config, [], [common: ["socket.keepalive.enable": true]],
     [common: [{"socket.keepalive.enable", "true"}]], [consumer: ["enable.auto.commit": true]],
     "invalid value for :kafka_config option: enable.auto.commit cannot be set here: Kmq commits by itself"},
    {:assignor, [:roundrobin], :range, [:range], :sticky,
     "invalid value for :assignor option: expected :roundrobin, :range, both of these in a list, or :cooperative_sticky"}
  ]

  for {name, default, good, normal, bad, text} <- @table do
    test "option #{name}" do
      name = unquote(name)
      {:ok, defaults} = Options.validate(@base, :producer)

      assert Keyword.get(defaults, name, :absent) == unquote(Macro.escape(default))

      {:ok, valid} = one(name, unquote(Macro.escape(good)))
      assert valid[name] == unquote(Macro.escape(normal))
      assert message(name, unquote(Macro.escape(bad))) == unquote(text)
    end
  end

  test "every option of a pipeline is in the table, or tested apart" do
    apart =
      ~w(hosts topics group_id group_config fetch_config client_config)a ++
        ~w(receive_interval reconnect_timeout offset_commit_on_ack shared_client)a

    assert Enum.sort(Keyword.keys(Options.schema(:producer))) ==
             Enum.sort(Enum.map(@table, &elem(&1, 0)) ++ apart)
  end

  test "required options" do
    for name <- [:hosts, :topics, :group_id] do
      assert Options.validate(Keyword.delete(@base, name), :producer) ==
               {:error, "required option #{inspect(name)} is missing"}
    end

    assert message(:topics, []) == "invalid value for :topics option: expected at least one topic"

    assert message(:topics, ["a", :b]) ==
             "invalid value for :topics option: expected a list of strings, got: :b in it"

    assert message(:topics, ["a", "a"]) ==
             "invalid value for :topics option: \"a\" is named twice"

    assert message(:topics, [".."]) ==
             "invalid value for :topics option: \"..\" is not a name Kafka takes"

    assert message(:topics, [String.duplicate("a", 250)]) =~
             "is 250 characters long, Kafka takes 249"

    assert message(:group_id, "") ==
             "invalid value for :group_id option: expected a non-empty string, got: \"\""

    assert message(:group_id, nil) == "required option :group_id is missing"
  end

  test "unknown names suggest the nearest, also in nested options" do
    assert message(:leese, 1) == "unknown option :leese, did you mean :lease?"

    assert message(:max_redelivery, 1) ==
             "unknown option :max_redelivery, did you mean :max_redeliveries?"

    assert message(:xyz, 1) =~
             "unknown option :xyz, known options are: :hosts, :topics, :group_id"

    assert message(:group_config, session_timeout: 1) ==
             "unknown option :session_timeout of :group_config, did you mean :session_timeout_seconds?"

    assert message(:fetch_config, max_wait_time: 0) ==
             "invalid value for :max_wait_time option of :fetch_config: expected an integer from 1 to 300000, got: 0"

    assert message(:client_config, [1]) ==
             "expected :client_config to be a keyword list, got: :\"a list that is not one\""
  end

  test "hosts in all their forms" do
    good = [
      {[localhost: 9092], "localhost:9092"},
      {[{"kafka-1", 9092}, {"kafka-2", 9093}], "kafka-1:9092,kafka-2:9093"},
      {[{~c"kafka-1", 9092}], "kafka-1:9092"},
      {[{{127, 0, 0, 1}, 9092}], "127.0.0.1:9092"},
      {[{{0, 0, 0, 0, 0, 0, 0, 1}, 9092}], "[::1]:9092"},
      {["kafka-1:9092", "kafka-2:9092"], "kafka-1:9092,kafka-2:9092"},
      {~c"localhost:9092", "localhost:9092"},
      {"h:1", "h:1"},
      {"kafka-1:9092,kafka-2:9092", "kafka-1:9092,kafka-2:9092"},
      {" kafka-1:9092 , kafka-2:9092 ", "kafka-1:9092,kafka-2:9092"},
      {"localhost.:9092", "localhost.:9092"},
      {"[::1]:9092", "[::1]:9092"},
      {[{"::1", 9092}], "[::1]:9092"},
      {[{"[::1]", 9092}], "[::1]:9092"},
      {"[fe80::1%lo]:9092", "[fe80::1%lo]:9092"},
      {"h:65535", "h:65535"}
    ]

    for {value, bootstrap} <- good do
      assert {:ok, valid} = one(:hosts, value)
      assert {value, Kmq.Config.bootstrap(valid[:hosts])} == {value, bootstrap}
    end

    bad = [
      {"h", "\"h\" has no port, write \"h:9092\""},
      {"::1:9092",
       "\"::1:9092\" is ambiguous, write an IPv6 address in brackets: \"[::1]:9092\""},
      {"http://a:9092",
       "\"http://a:9092\": hosts are host:port without a scheme; TLS is :ssl of :client_config"},
      {["ssl://h"],
       "\"ssl://h\": hosts are host:port without a scheme; TLS is :ssl of :client_config"},
      {"h:0", "\"h:0\": a port is between 1 and 65535"},
      {"h:70000", "\"h:70000\": a port is between 1 and 65535"},
      {"h:9092,", "an empty entry (a comma too many?)"},
      {"", "an empty entry (a comma too many?)"},
      {"h:", "\"h:\" is not host:port"},
      {"h:9092x", "\"h:9092x\" is not host:port"},
      {":9092", "a host is empty"},
      {"[::1]", "\"[::1]\" is not [address]:port"},
      {"[zz]:9092x", "\"[zz]:9092x\" is not [address]:port"},
      {[{"a b", 9092}], "\"a b\" is not the name of a host"},
      {[{"1:2", 9092}], "\"1:2\" is not an IPv6 address"},
      {[{"h", -1}], "\"h:-1\": a port is between 1 and 65535"},
      {[:localhost], "expected {host, port}, got: :localhost"},
      {[], "expected at least one host"},
      {:localhost, "expected a keyword list, a list of {host, port} or a string, got: :localhost"}
    ]

    for {value, text} <- bad do
      assert {value, message(:hosts, value)} ==
               {value, "invalid value for :hosts option: " <> text}
    end
  end

  test "filters that cannot be" do
    for {value, text} <- [
          {:vip, "expected a keyword list, got: :vip"},
          {[tag: ["a"]], "unknown clause :tag, expected :tags, :headers or :routing"},
          {[headers: [{"a", nil}]], "expected a value for each of :headers, got: [{\"a\", nil}]"},
          {[routing: ["a.b", ""]],
           "expected a list of non-empty strings for :routing, got: [\"a.b\", \"\"]"},
          {[routing: ["a*.b"]], "\"a*.b\": * and # stand for whole words between dots"},
          {[routing: List.duplicate("a.b.c", 129)], "patterns of 516 words, at most 512 fit"}
        ] do
      assert message(:filter, value) == "invalid value for :filter option: " <> text
    end
  end

  test "options of a message" do
    assert {:ok, valid} = publish(:headers, [{"a", nil}, {"a", <<0>>}])
    assert valid[:headers] == [{"a", nil}, {"a", <<0>>}]

    assert publish(:headers, [{"", "x"}]) ==
             {:error,
              "invalid value for :headers option: expected a list of {name, value}, at most 4000, the name a string, not empty, without NUL, " <>
                "the value a binary or nil, " <>
                "got: [{\"\", \"x\"}]"}

    assert publish(:partition, -1) ==
             {:error,
              "invalid value for :partition option: expected an integer from 0 to 2147483647, got: -1"}

    assert publish(:key, 5) ==
             {:error, "invalid value for :key option: expected a binary or nil, got: 5"}

    for {name, bad, text} <- [
          {:tags, ["a,b"], "expected a list of strings without commas, got: [\"a,b\"]"},
          {:routing_key, "", "expected a non-empty string, got: \"\""},
          {:delay, -1, "expected a non-negative integer, got: -1"},
          {:at, 5, "expected a DateTime, got: 5"},
          {:ttl, 0, "expected a positive integer, got: 0"}
        ] do
      assert publish(name, bad) == {:error, "invalid value for #{inspect(name)} option: " <> text}
    end
  end

  test "backoffs that cannot be" do
    for {value, text} <- [
          {{:exponential, min: -1},
           "expected :min of the backoff to be ms, an integer from 0 to 31622400000 (366 days), got: -1"},
          {{:linear, step: 1.0e300},
           "expected :step of the backoff to be ms, an integer from 0 to 31622400000 (366 days), got: 1.0e300"},
          {{:exponential, factor: 0.5},
           "expected :factor of the backoff to be between 1 and 1000, got: 0.5"},
          {{:exponential, jitter: 2},
           "expected :jitter of the backoff to be between 0 and 1, got: 2"},
          {{:linear, factor: 2}, "unknown option :factor of the backoff"},
          {{:linear, [1]}, "expected the backoff's options to be a keyword list, got: [1]"},
          {List.duplicate(1, 65), "expected a backoff list of at most 64 waits, got: 65"},
          {[1, :b],
           "expected a backoff list of integers from 0 to 31622400000 (ms, 366 days), got: [1, :b]"},
          {fn _, _ -> 1 end,
           "a function works for explicit retries only (on_failure: {:retry, function}), the tracker is C"}
        ] do
      assert Kmq.Backoff.parse(value) == {:error, text}
    end

    assert Kmq.Backoff.parse({:linear, min: 10, max: 50}) == {:ok, {:linear, 10, 50, 10.0, 0.2}}

    assert Kmq.Backoff.parse({:exponential, min: 400_000}) ==
             {:ok, {:exponential, 400_000, 400_000, 2.0, 0.2}}
  end

  test "the docs name every option" do
    docs = Options.docs(:producer)

    for {name, spec} <- Options.schema(:producer),
        key <- [name | Keyword.keys(spec[:keys] || [])] do
      assert docs =~ "* `#{inspect(key)}` ("
    end
  end

  test "an option of something else says whose it is" do
    assert {:error, text} = Options.validate([on_failure: :ack] ++ @base, :consumer)

    assert text ==
             "unknown option :on_failure, it is one of a pipeline's producer (OffBroadway.Kmq.Producer)"

    assert {:error, text} = Options.validate([linger: 5] ++ @base, :producer)
    assert text == "unknown option :linger, it is one of Kmq.Publisher.start_link/1"
  end
end
