defmodule Kmq.ErrorTest do
  use ExUnit.Case, async: true

  alias Kmq.Error

  doctest Kmq.Error
  doctest Kmq.Advice

  # As librdkafka says it.
  test "a lost connection, in our words" do
    for {text, ours} <- [
          {"publisher: h:9092/1: Disconnected: verify that security.protocol is correctly configured, broker might require SASL authentication (after 2ms in state UP) (_TRANSPORT)",
           "publisher: h:9092/1: the broker has closed a new connection: it stops or starts just now; or, if this goes on, :ssl and :sasl of :client_config do not fit this listener (_TRANSPORT)"},
          {"h:9092/bootstrap: Disconnected while requesting ApiVersion: might be caused by incorrect security.protocol configuration (connecting to a SSL listener?) or broker version is < 0.10 (see api.version.request) (after 0ms in state APIVERSION_QUERY) (_TRANSPORT)",
           "h:9092/bootstrap: the broker has closed a new connection: it stops or starts just now; or, if this goes on, :ssl and :sasl of :client_config do not fit this listener (_TRANSPORT)"},
          {"GroupCoordinator: h:9092: Disconnected (after 940ms in state UP) (_TRANSPORT)",
           "GroupCoordinator: h:9092: the broker has closed the connection (_TRANSPORT)"},
          {"h:9092/1: Disconnected: verify that security.protocol is correctly configured, broker might require SASL authentication (after 4940ms in state UP) (_TRANSPORT)",
           "h:9092/1: the broker has closed the connection: is a broker there? (_TRANSPORT)"},
          {"h:9092/1: Failed to resolve 'h:9092': Name or service not known (after 1ms in state CONNECT) (_RESOLVE)",
           "h:9092/1: its name cannot be resolved: is it right in :hosts, and in the broker's advertised.listeners? (_RESOLVE)"},
          {"h:9092/1: Connection setup timed out in state CONNECT (after 30028ms in state CONNECT) (_TRANSPORT)",
           "h:9092/1: the connection is not answered: is the address right, does a firewall stand between? (_TRANSPORT)"},
          {"h:9092/1: Socket open failed: Too many open files (_TRANSPORT)",
           "h:9092/1: Socket open failed: Too many open files (_TRANSPORT)"},
          {"2/2 brokers are down (_ALL_BROKERS_DOWN)", "2/2 brokers are down (_ALL_BROKERS_DOWN)"}
        ] do
      assert Kmq.Advice.connection(Error.new(:transport, text)).message == ours
    end
  end

  test "without the application: what to start" do
    start = """
    for start <- [
          fn -> Kmq.Consumer.start_link(hosts: "127.0.0.1:1", topics: ["a"], group_id: "g") end,
          fn -> Kmq.Publisher.start_link(hosts: "127.0.0.1:1") end,
          fn -> Kmq.Sandbox.start_link() end,
          fn -> Kmq.Tracker.start_link(hosts: "127.0.0.1:1", topics: ["a"], group_id: "g") end,
          # As Broadway does, which makes an error of its start_link of what is raised.
          fn ->
            producer = {OffBroadway.Kmq.Producer, hosts: "127.0.0.1:1", topics: ["a"], group_id: "g"}
            try do
              OffBroadway.Kmq.Producer.prepare_for_start(nil, producer: [module: producer])
            rescue
              error in Kmq.Error -> {:error, error}
            end
          end
        ] do
      {:error, %Kmq.Error{reason: :not_started} = error} = start.()
      IO.puts(error.message)
    end
    """

    ebin = to_charlist(Application.app_dir(:kmq, "ebin"))
    {out, 0} = System.cmd("elixir", ["-pa", "#{ebin}", "-e", start], stderr_to_stdout: true)
    said = String.split(out, "\n", trim: true)
    assert length(said) == 5
    assert Enum.all?(said, &(&1 =~ "Application.ensure_all_started(:kmq)"))
  end

  test "Kafka's names become reasons, unknown ones no atoms" do
    assert %Error{
             reason: :transport,
             name: "_TRANSPORT",
             code: -195,
             retriable?: true,
             fatal?: false,
             message: "publishing: broker down (_TRANSPORT)"
           } = Error.from_native({"_TRANSPORT", -195, true, false, "broker down"}, "publishing")

    assert Error.from_native({"TOPIC_ALREADY_EXISTS", 36, false, false, ""}).reason ==
             :topic_already_exists

    assert %Error{reason: :kafka, name: "BRAND_NEW_ERROR"} =
             Error.from_native({"BRAND_NEW_ERROR", 999, false, false, ""})
  end

  test "other shapes" do
    assert %Error{reason: :closed, message: "the publisher: it is closed"} =
             Error.from_native(:closed, "the publisher")

    assert %Error{reason: :bad_frame, message: "too long"} =
             Error.from_native({:bad_frame, "too long"})

    error = Error.new(:timeout, "late", retriable?: true)
    assert Error.from_native(error, "context") == error
    assert Exception.message(error) == "late"
    assert_raise Error, "late", fn -> raise error end
  end

  test "where no broker answers, all that asks for one says what to look at" do
    connection = [hosts: "127.0.0.1:1"]
    {:ok, publisher} = Kmq.Publisher.start_link(connection)

    asks = [
      fn -> Kmq.Publisher.publish(publisher, "q", "v") end,
      fn -> Kmq.DeadLetters.redrive("q", connection) end,
      fn -> Kmq.DeadLetters.show("q", 0, 0, connection) end,
      fn -> Kmq.Inspect.partitions([topics: ["q"], group_id: "g"] ++ connection) end,
      fn -> Kmq.Topics.create_topic("q", 1, connection) end,
      fn -> Kmq.Topics.delete_topic("q", connection) end
    ]

    for {:ok, result} <- Task.async_stream(asks, & &1.(), max_concurrency: 6, timeout: 60_000) do
      assert {:error, %Error{reason: :unreachable, message: text}} = result
      assert text =~ "no broker of :hosts (127.0.0.1:1) answered"
      assert text =~ "Is the address right, does a broker listen there"
    end
  end

  test "where no broker answers, a start says so long before it gives up" do
    connection = [hosts: "127.0.0.1:1", kafka_config: []]
    {:ok, %{admin_props: props, bootstrap: hosts}} = Kmq.Config.connection(connection)

    log =
      ExUnit.CaptureLog.capture_log(fn ->
        assert {:error, %Error{reason: :unreachable, message: text}} =
                 Kmq.Topics.retention("q", hosts, props, 4_500)

        assert text =~ "no broker of :hosts (127.0.0.1:1) answered"
        assert text =~ "the connection is refused (_TRANSPORT). Is the address right"
      end)

    assert log =~ ~r/no broker of :hosts \(127.0.0.1:1\) has answered yet, giving up in [23] s/
  end
end
