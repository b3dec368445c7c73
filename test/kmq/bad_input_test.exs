defmodule Kmq.BadInputTest do
  # What a caller gets wrong is said in the caller, by the name of the option, before anything is asked of anybody.
  use ExUnit.Case, async: true

  alias Kmq.{Consumer, DeadLetters, Message, Publisher, Sandbox, Topics}

  @handle %Kmq.Handle{pid: :none, ref: :none}
  @message %Message{topic: "q", partition: 0, offset: 1, handle: @handle, slot: 1}
  @hosts [hosts: "localhost:1"]
  @timeout "a timeout is milliseconds, 0 to 4294967295, or :infinity, got: "
  @headers "expected a list of {name, value}, at most 4000, the name a string, not empty, without NUL, the value a binary or nil"
  @proper "expected lists that end with [], not with something else behind a |"

  defp raised(fun) do
    fun.()
    "nothing was raised"
  rescue
    error in ArgumentError -> Exception.message(error)
  end

  test "calls of an open message" do
    of_sync = "expected options to be a keyword list of :sync, got: "

    for {name, call, text} <- [
          {"pull", fn -> Consumer.pull(:nobody, 10) end,
           "expected options to be a keyword list of :max, :wait, got: 10"},
          {"pull", fn -> Consumer.pull(:nobody, maxx: 10) end,
           "unknown option :maxx, did you mean :max?"},
          {"pull", fn -> Consumer.pull(:nobody, max: 0) end,
           "invalid value for :max option: expected an integer from 1 to 1000000, got: 0"},
          {"pull", fn -> Consumer.pull(:nobody, wait: :infinity) end,
           "invalid value for :wait option: expected an integer from 0 to 86400000, got: :infinity"},
          {"ack", fn -> Kmq.ack(@message, :sync) end, of_sync <> ":sync"},
          {"ack", fn -> Kmq.ack(@message, sync: 0) end,
           "invalid value for :sync option: expected true, false or ms, 1 to 4294967295, got: 0"},
          {"ack", fn -> Kmq.ack(@message, sync: 10 ** 14) end,
           "invalid value for :sync option: expected true, false or ms, 1 to 4294967295, got: 100000000000000"},
          {"flush", fn -> Consumer.flush(:nobody, -1) end, @timeout <> "-1"},
          {"flush", fn -> Consumer.flush(:nobody, 2 ** 70) end, @timeout <> "#{2 ** 70}"},
          {"stop", fn -> Consumer.stop(:nobody, :soon) end, @timeout <> ":soon"},
          {"ack", fn -> Kmq.ack([@message | @message]) end,
           "expected a Kmq.Message or a list of them, got: " <>
             inspect([@message | @message], limit: 5)},
          {"discard", fn -> Kmq.discard(@message, true) end, of_sync <> "true"},
          {"release", fn -> Kmq.release(@message, 5) end, of_sync <> "5"},
          {"snooze", fn -> Kmq.snooze(@message, 5, 5) end, of_sync <> "5"},
          {"extend", fn -> Kmq.extend(@message, 5, true) end, of_sync <> "true"},
          {"leave", fn -> Kmq.leave(@message, true) end, of_sync <> "true"},
          {"reject", fn -> Kmq.reject(@message, "no", true) end, of_sync <> "true"},
          {"retry", fn -> Kmq.retry(@message, 500) end,
           "expected options to be a keyword list of :delay, :reason, :sync, got: 500"},
          {"retry", fn -> Kmq.retry(@message, dely: 500) end,
           "unknown option :dely, did you mean :delay?"},
          {"retry", fn -> Kmq.retry(@message, delay: -1) end,
           "invalid value for :delay option: expected a delay of 0 to 2592000000 ms (30 days), got: -1"},
          {"retry", fn -> Kmq.retry(@message, delay: :soon) end,
           "invalid value for :delay option: expected ms, a function of the attempt and the reason, {:exponential, options}, {:linear, options} or a list of ms, got: :soon"},
          {"ack", fn -> Kmq.ack([@message, 1]) end,
           "expected a Kmq.Message or a list of them, got: 1"},
          {"ack", fn -> Kmq.ack([@message, %{@message | slot: 2}, nil]) end,
           "expected a Kmq.Message or a list of them, got: nil"}
        ] do
      assert {name, raised(call)} == {name, text}
    end
  end

  test "publishing" do
    for {call, text} <- [
          {fn -> Publisher.publish(:nobody, "t", "v", 5) end,
           "expected options to be a keyword list, got: 5"},
          {fn -> Publisher.publish(:nobody, "t", "v", dealy: 5) end,
           "unknown option :dealy, did you mean :delay?"},
          {fn -> Publisher.publish_many(:nobody, "t") end,
           "expected a list of messages, got: \"t\""},
          {fn -> Publisher.publish_many(:nobody, ["t"]) end,
           "expected {topic, value} or {topic, value, options}, got: \"t\""},
          {fn -> Publisher.publish_many(:nobody, [], 5) end,
           "expected options to be a keyword list of :timeout, got: 5"},
          {fn -> Publisher.publish_many_async(:nobody, [], timeout: -1) end,
           "invalid value for :timeout option: #{@timeout}-1"},
          {fn -> Publisher.publish(:nobody, "t", "v", timeout: 2 ** 32) end,
           "invalid value for :timeout option: #{@timeout}4294967296"},
          {fn -> Publisher.flush(:nobody, 1.5) end, @timeout <> "1.5"},
          {fn -> Publisher.publish_many(:nobody, [{"t", "v"} | {"t", "v"}]) end,
           "expected a list of messages that ends with [], not with {\"t\", \"v\"}"},
          {fn -> Publisher.publish_many(:nobody, [{"t", "v"}, {"u", "v"} | :more]) end,
           "expected a list of messages that ends with [], not with :more"},
          {fn -> Publisher.publish(:nobody, "t", "v", headers: [{"a\0b", "1"}]) end,
           "invalid value for :headers option: " <>
             @headers <> ", got: [{<<97, 0, 98>>, \"1\"}]"},
          {fn -> Publisher.publish(:nobody, "t", "v", headers: [{"a", "1"} | {"b", "2"}]) end,
           "invalid value for :headers option: " <> @proper},
          {fn -> Publisher.publish(:nobody, "t", "v", tags: ["a" | "b"]) end,
           "invalid value for :tags option: " <> @proper},
          {fn -> Publisher.publish(:nobody, "t", "v", [{:key, "k"} | :x]) end,
           "expected options to be a keyword list, got: :\"a list that is not one\""}
        ] do
      assert raised(call) == text
    end
  end

  test "filters of dead letters" do
    for {filter, text} <- [
          {"timeout",
           "expected a keyword list or a function that takes a Kmq.DeadLetter, got: \"timeout\""},
          {[{"cause", "timeout"}],
           "expected a keyword list or a function that takes a Kmq.DeadLetter, got: [{\"cause\", \"timeout\"}]"},
          {[cuase: "timeout"],
           "unknown condition :cuase, expected one of :cause, :group, :key, :headers, :attempts, :since, :until, :origin"},
          {[cause: 5],
           "expected :cause to be a cause, a string or an atom, or a list of them, got: 5"},
          {[cause: ["crash", {}]],
           "expected :cause to be a cause, a string or an atom, or a list of them, got: [\"crash\", {}]"},
          {[group: :shop], "expected :group to be a string, or nil: of no group, got: :shop"},
          {[key: 42], "expected :key to be a binary, or nil, got: 42"},
          {[headers: %{"h" => "1"}],
           "expected :headers to be a list of {name, value}, the name a string, not empty, without NUL, the value a binary or nil, got: %{\"h\" => \"1\"}"},
          {[headers: [{"h", 1}]],
           "expected :headers to be a list of {name, value}, the name a string, not empty, without NUL, the value a binary or nil, got: [{\"h\", 1}]"},
          {[attempts: "3"],
           "expected :attempts to be a non-negative integer or a range of them, got: \"3\""},
          {[attempts: -3],
           "expected :attempts to be a non-negative integer or a range of them, got: -3"},
          {[since: "2026-12-24"], "expected :since to be a DateTime, got: \"2026-12-24\""},
          {[until: ~N[2026-12-24 18:00:00]],
           "expected :until to be a DateTime, got: ~N[2026-12-24 18:00:00]"},
          {[key: "a", origin: :orders],
           "expected :origin to be a topic's name, a string, got: :orders"}
        ],
        read <- [
          &DeadLetters.stream("q", @hosts ++ [filter: &1]),
          &DeadLetters.redrive("q", @hosts ++ [filter: &1])
        ] do
      assert raised(fn -> read.(filter) end) == "invalid value for :filter option: " <> text
    end
  end

  test "options of a redrive" do
    for {options, text} <- [
          {5, "expected options to be a keyword list, got: 5"},
          {[rat: 5], "unknown option :rat, did you mean :rate?"},
          {[rate: 0], "invalid value for :rate option: expected a positive integer, got: 0"},
          {[max: "1"], "invalid value for :max option: expected a positive integer, got: \"1\""},
          {[dry_run: 1], "invalid value for :dry_run option: expected true or false, got: 1"},
          {[to: :other],
           "invalid value for :to option: expected a topic's name, a string, got: :other"},
          {[to: "q__undelivered"],
           "invalid value for :to option: it is the dead letter topic itself"},
          {[dead_letter_topic: "q"],
           "invalid value for :dead_letter_topic option: \"q\" is the topic that they would go back to"},
          {[group: :g], "invalid value for :group option: expected a non-empty string, got: :g"},
          {[progress: :yes],
           "invalid value for :progress option: expected a function that takes one argument, got: :yes"},
          {[dead_letter_topic: "a b"],
           "invalid value for :dead_letter_topic option: \"a b\" has characters Kafka does not take in a topic's name (letters, digits, dot, _ and - only)"},
          {[count_header: 5],
           "invalid value for :count_header option: expected a non-empty string, got: 5"}
        ] do
      options = if is_list(options), do: @hosts ++ options, else: options
      assert raised(fn -> DeadLetters.redrive("q", options) end) == text
    end

    assert raised(fn -> DeadLetters.redrive("q", []) end) == "required option :hosts is missing"

    assert raised(fn -> DeadLetters.show(:q, 0, 0, @hosts) end) ==
             "expected a topic's name, a string, got: :q"

    assert raised(fn -> DeadLetters.show("q", "0", 0, @hosts) end) ==
             "expected the partition, an integer from 0 to 2147483647, got: \"0\""

    assert raised(fn -> DeadLetters.show("q", 0, -1, @hosts) end) ==
             "expected the offset, an integer from 0 to 9223372036854775806, got: -1"
  end

  test "a sandbox" do
    for {options, text} <- [
          {"x",
           "expected options to be a keyword list of :name, :brokers, :topics, :partitions, got: \"x\""},
          {[topic: ["x"]], "unknown option :topic, did you mean :topics?"},
          {[topics: "x"],
           "invalid value for :topics option: expected a map of topic to number of partitions or a list of topics, got: \"x\""},
          {[topics: %{"x" => 0}],
           "invalid value for :topics option: expected a number of partitions of \"x\", from 1 to 10000, got: 0"},
          {[topics: ["x" | "y"]], "invalid value for :topics option: " <> @proper},
          {[brokers: 5_000],
           "invalid value for :brokers option: expected an integer from 1 to 100, got: 5000"},
          {[topics: ["x", 5]],
           "invalid value for :topics option: expected a topic's name, a string, got: 5"},
          {[topics: ["x/y"]],
           "invalid value for :topics option: \"x/y\" has characters Kafka does not take in a topic's name (letters, digits, dot, _ and - only)"},
          {[partitions: 0],
           "invalid value for :partitions option: expected an integer from 1 to 10000, got: 0"}
        ] do
      assert raised(fn -> Sandbox.start_link(options) end) == text
    end
  end

  # A mistake in what is asked for, told before anybody is asked.
  test "topics" do
    for {call, text} <- [
          {fn -> Topics.create_topic(:q, 1, @hosts) end,
           "the topic: expected a topic's name, a string, got: :q"},
          {fn -> Topics.create_topic("a/b", 1, @hosts) end,
           "the topic: \"a/b\" has characters Kafka does not take in a topic's name (letters, digits, dot, _ and - only)"},
          {fn -> Topics.create_topic("q", "3", @hosts) end,
           "the partitions: expected an integer from 1 to 2147483647, got: \"3\""},
          {fn -> Topics.create_topic("q", 1, @hosts ++ [replication: 0]) end,
           ":replication option: expected an integer from 1 to 32767, got: 0"},
          {fn -> Topics.create_topic("q", 1, @hosts ++ [config: "x"]) end,
           ":config option: expected a list of {name, value}, got: \"x\""},
          {fn -> Topics.create_topic("q", 1, @hosts ++ [config: [{"a", %{}}]]) end,
           ":config option: expected a string, number, boolean or atom, got: %{}"},
          {fn -> Topics.create_topic("q", 1, @hosts ++ [config: [{"a", "1"} | "b"]]) end,
           ":config option: " <> @proper},
          {fn -> Topics.delete_topic(nil, @hosts) end,
           "the topic: expected a topic's name, a string, got: nil"}
        ] do
      assert {:error, %Kmq.Error{reason: :invalid_option, message: message}} = call.()
      assert message == "invalid value for " <> text
    end

    assert {:error, %Kmq.Error{message: "unknown option :replicas" <> _}} =
             Topics.create_topic("q", 1, @hosts ++ [replicas: 3])

    assert raised(fn -> Topics.marker_topic(:q, "g") end) ==
             "expected the topic's name, a string, got: :q"

    assert raised(fn -> Topics.dead_letter_topic(nil) end) ==
             "expected the topic's name, a string, got: nil"
  end

  # nil and false are found, too; a struct is no map; who specifies a child is told when it starts.
  test "what is easily overlooked" do
    base = [hosts: "h:1", topics: ["t"], group_id: "g"]

    for {options, text} <- [
          {[topics: [nil]],
           "invalid value for :topics option: expected a list of strings, got: nil in it"},
          {[topics: ["a", false]],
           "invalid value for :topics option: expected a list of strings, got: false in it"},
          {[filter: [nil: 1]],
           "invalid value for :filter option: unknown clause nil, expected :tags, :headers or :routing"},
          {[marker_topic: ~D[2026-01-01]],
           "invalid value for :marker_topic option: expected a string or a map from topic to topic, got: ~D[2026-01-01]"},
          {[kafka_config: [common: ~D[2026-01-01]]],
           "invalid value for :kafka_config option: expected a list of librdkafka's properties"},
          {[topics: ["a" | "b"]], "invalid value for :topics option: " <> @proper},
          {[hosts: [{"h", 1} | :x]], "invalid value for :hosts option: " <> @proper},
          {[kafka_config: [common: ["a" | "b"]]],
           "invalid value for :kafka_config option: " <> @proper},
          {[client_config: [ssl: [:a | :b]]],
           "invalid value for :client_config option: " <> @proper},
          {[offset_reset_policy: {:timestamp, 2 ** 70}],
           "invalid value for :offset_reset_policy option: expected :earliest, :latest or {:timestamp, ms}, got: {:timestamp, #{2 ** 70}}"},
          {[backoff: [1 | 2]], "invalid value for :backoff option: " <> @proper}
        ] do
      options = Keyword.merge(base, options)
      assert raised(fn -> Consumer.start_link(options) end) == text
    end

    assert raised(fn -> Kmq.ack(@message, nil: 1) end) ==
             "unknown option nil, known options are: :sync"

    assert {:error, "expected {:exponential, options}" <> _} = Kmq.Backoff.parse([1 | 2])
    assert {:error, "unknown option nil" <> _} = Kmq.Backoff.parse({:linear, nil: 1})

    for module <- [Consumer, Publisher, Kmq.Tracker],
        options <- [nil, 5, [1 | 2], ~D[2026-01-01], [kafka_config: [common: ~D[2026-01-01]]]] do
      assert %{id: ^module, start: {^module, :start_link, [_]}} = module.child_spec(options)
    end

    assert Consumer.child_spec(drain_timeout: "x").shutdown == 32_000
  end

  test "integers that the native side cannot hold" do
    for name <- [:start_ahead, :max_in_flight, :redelivery_rate, :ttl, :ack_flush_interval] do
      options = [hosts: "h:1", topics: ["t"], group_id: "g"] ++ [{name, 2 ** 70}]

      assert_raise ArgumentError,
                   "invalid value for #{inspect(name)} option: expected an integer up to #{2 ** 62 - 1}, got: #{2 ** 70}",
                   fn -> Kmq.Consumer.start_link(options) end
    end
  end
end
