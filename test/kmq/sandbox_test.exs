defmodule Kmq.SandboxTest do
  use ExUnit.Case, async: true

  import Kmq.Test.Eventually

  alias Kmq.Sandbox
  alias Kmq.Test.Kafka

  test "listens at once, with the topics asked for" do
    sandbox = start_supervised!({Sandbox, brokers: 3, topics: %{"orders" => 8, invoices: 2}})
    bootstrap = Sandbox.bootstrap(sandbox)

    assert length(String.split(bootstrap, ",")) == 3
    assert {:ok, %{"orders" => 8, "invoices" => 2}} = Kafka.topics(bootstrap)
  end

  test "topics by name alone get the default number of partitions" do
    sandbox = start_supervised!({Sandbox, partitions: 3, topics: ["a", "b"]})
    assert :ok = Sandbox.create_topic(sandbox, "c")
    assert :ok = Sandbox.create_topic(sandbox, "d", 5)

    assert {:ok, %{"a" => 3, "b" => 3, "c" => 3, "d" => 5}} =
             Kafka.topics(Sandbox.bootstrap(sandbox))
  end

  test "a topic that exists is an error, not a crash" do
    sandbox = start_supervised!({Sandbox, topics: ["a"]})

    assert {:error, %Kmq.Error{reason: :topic_already_exists, code: 36}} =
             Sandbox.create_topic(sandbox, "a")
  end

  test "is found by each of its addresses, and by their list" do
    sandbox = start_supervised!({Sandbox, brokers: 2})
    bootstrap = Sandbox.bootstrap(sandbox)

    for address <- [bootstrap | String.split(bootstrap, ",")] do
      assert Sandbox.find(address) == {:ok, sandbox}
    end

    assert :ok = Sandbox.create_topic(bootstrap, "by-address", 1)
    :ok = Sandbox.stop(sandbox)
    eventually(fn -> Sandbox.find(bootstrap) == :error end)

    assert_raise ArgumentError, ~r/no sandbox/, fn ->
      Sandbox.create_topic(bootstrap, "late", 1)
    end
  end

  test "a broker that is down takes no connections, until it is up" do
    sandbox = start_supervised!({Sandbox, topics: ["a"]})
    bootstrap = Sandbox.bootstrap(sandbox)

    assert :ok = Sandbox.inject(sandbox, {:broker_down, 1})
    eventually(fn -> match?({:error, _}, Kafka.topics(bootstrap)) end)
    assert :ok = Sandbox.inject(sandbox, {:broker_up, 1})
    eventually(fn -> assert {:ok, %{"a" => 4}} = Kafka.topics(bootstrap) end)
  end

  # The mock cluster's own times are 3 s for a first join, and for one behind a leave a session timeout more. One of three must
  # be quicker, whatever else this machine does.
  test "a group forms at once, also when its last member has just left" do
    bootstrap = Sandbox.bootstrap(start_supervised!(Sandbox))

    took =
      for group <- ["g1", "g2", "g3"] do
        {us, _member} =
          :timer.tc(fn ->
            leave(bootstrap, group, join(bootstrap, group))
            join(bootstrap, group)
          end)

        us
      end

    assert Enum.min(took) < 2_900_000, inspect(took)
  end

  # JoinGroup and LeaveGroup, version 0; no answer to the first one before the group has formed.
  defp join(bootstrap, group) do
    consumer = [Kafka.string("roundrobin"), <<0::32>>]
    body = [<<30_000::32>>, Kafka.string(""), Kafka.string("consumer"), <<1::32>>, consumer]
    {:ok, answer} = Kafka.request(bootstrap, 11, 0, [Kafka.string(group), body], 60_000)
    <<0::16, _generation::32, n::16, _protocol::binary-size(n), rest::binary>> = answer
    <<n::16, _leader::binary-size(n), n::16, member::binary-size(n), _members::binary>> = rest
    member
  end

  defp leave(bootstrap, group, member) do
    body = [Kafka.string(group), Kafka.string(member)]
    {:ok, <<0::16>>} = Kafka.request(bootstrap, 13, 0, body)
  end

  test "a slow broker is slow, until it is not" do
    sandbox = start_supervised!({Sandbox, topics: ["a"]})
    bootstrap = Sandbox.bootstrap(sandbox)

    assert :ok = Sandbox.inject(sandbox, {:rtt, 1, 300})
    assert {us, {:ok, _}} = :timer.tc(fn -> Kafka.topics(bootstrap) end)
    assert us >= 290_000
    assert :ok = Sandbox.inject(sandbox, {:rtt, 1, 0})
  end

  test "request errors: a transport error closes the connection, the list is used up in order" do
    sandbox = start_supervised!({Sandbox, topics: ["a"]})
    bootstrap = Sandbox.bootstrap(sandbox)

    errors = [:transport, :_transport, :coordinator_not_available]
    assert :ok = Sandbox.inject(sandbox, {:request_errors, :find_coordinator, errors})
    assert {:error, :closed} = coordinator(bootstrap)
    assert {:error, :closed} = coordinator(bootstrap)
    assert {:ok, 15} = coordinator(bootstrap)
    assert {:ok, 0} = coordinator(bootstrap)

    errors = [:transport, :transport]
    assert :ok = Sandbox.inject(sandbox, {:request_errors, :find_coordinator, errors})
    assert :ok = Sandbox.inject(sandbox, {:request_errors, :find_coordinator, []})
    assert {:ok, 0} = coordinator(bootstrap)

    late = {:broker_request_errors, 1, :find_coordinator, [{:no_error, 300}]}
    assert :ok = Sandbox.inject(sandbox, late)
    assert {us, {:ok, 0}} = :timer.tc(fn -> coordinator(bootstrap) end)
    assert us >= 290_000
  end

  test "all other faults are taken" do
    sandbox = start_supervised!({Sandbox, brokers: 2, topics: ["a"]})

    for fault <- [
          {:topic_error, "a", :topic_authorization_failed},
          {:topic_error, "a", :no_error},
          {:coordinator, "group", 2},
          {:partition_leader, "a", 0, 2},
          {:partition_leader, "a", 0, -1},
          {:request_errors, :produce, [:not_enough_replicas, :no_error]}
        ] do
      assert :ok = Sandbox.inject(sandbox, fault)
    end

    assert {:error, %Kmq.Error{reason: :unknown_topic_or_part}} =
             Sandbox.inject(sandbox, {:partition_leader, "a", 99, 1})

    assert {:error, %Kmq.Error{}} = Sandbox.inject(sandbox, {:broker_down, 7})
  end

  test "callers' bugs raise, and name what is wrong" do
    sandbox = start_supervised!({Sandbox, []})

    for {fault, text} <- [
          {{:sideways, 1}, ":sideways is no fault of Kmq.Sandbox$"},
          {:broker_down, "a fault is a tuple like {:broker_down, 1}"},
          {{:rtt, self(), 5}, "bad arguments for :rtt: "},
          {{:rtt, 1, 2 ** 70}, "bad arguments for :rtt: "},
          {{:request_errors, :produce, [:a | :b]}, "bad arguments for :request_errors: "},
          {{:broker_dwon, 1}, ":broker_dwon .*: did you mean :broker_down\\?"},
          {{:request_errors, :produced, [:transport]}, ":produced .*: did you mean :produce\\?"},
          {{:request_errors, :produce, [:transprot]},
           ":transprot .*: did you mean :transport\\?"},
          {{:rtt, 1, -5}, "rtt"},
          {{:rtt, 1}, "rtt"},
          {{:topic_error, "no such/topic", :transport}, "topic_error"}
        ] do
      assert_raise ArgumentError, ~r/#{text}/, fn -> Sandbox.inject(sandbox, fault) end
    end

    assert_raise ArgumentError, ~r/:brokers/, fn -> Sandbox.start_link(brokers: 0) end
    assert_raise ArgumentError, ~r/:broker\b/, fn -> Sandbox.start_link(broker: 1) end
  end

  test "an error pushed before a typo in the same list is not pushed" do
    sandbox = start_supervised!({Sandbox, []})
    fault = {:request_errors, :find_coordinator, [:transport, :transprot]}
    assert_raise ArgumentError, fn -> Sandbox.inject(sandbox, fault) end
    assert {:ok, 0} = coordinator(Sandbox.bootstrap(sandbox))
  end

  @tag :capture_log
  test "stop ends the program; its death ends the process" do
    Process.flag(:trap_exit, true)
    {:ok, sandbox} = Sandbox.start_link()
    pid = os_pid(sandbox)
    :ok = Sandbox.stop(sandbox)
    eventually(fn -> not alive?(pid) end, 2_000)

    {:ok, sandbox} = Sandbox.start_link()
    {_, 0} = System.cmd("kill", ["-KILL", "#{os_pid(sandbox)}"])
    assert_receive {:EXIT, ^sandbox, {:sandbox_exit, 137}}
  end

  test "a frame that is no request ends the program with a reason" do
    path = Application.app_dir(:kmq, "priv/kmq_sandbox")
    request = :erlang.term_to_binary({1, :create_topic, {"a", 1}})

    for frame <- [
          "",
          <<131>>,
          "hello",
          binary_part(request, 0, byte_size(request) - 1),
          request <> <<0>>,
          # claims more than is there
          <<131, 104, 3, 97, 1, 119, 255>>,
          <<131, 108, 255, 255, 255, 255, 97, 1>>,
          :erlang.term_to_binary({1, :create_topic}),
          :erlang.term_to_binary({:one, :create_topic, {}}),
          :erlang.term_to_binary({1.5, :create_topic, {}}),
          :erlang.term_to_binary(self())
        ] do
      args = ["-c", "exec '#{path}' 1 2>&1 >/dev/null"]
      sh = {:spawn_executable, "/bin/sh"}
      port = Port.open(sh, [:binary, :exit_status, args: args])
      true = Port.command(port, [<<byte_size(frame)::32>>, frame])
      assert_receive {^port, {:data, "kmq_sandbox: malformed request" <> _}}
      assert_receive {^port, {:exit_status, 2}}
    end
  end

  test "dies within two seconds when its VM is killed" do
    code = """
    {:ok, sandbox} = Kmq.Sandbox.start_link()
    {:os_pid, pid} = Port.info(:sys.get_state(sandbox).port, :os_pid)
    IO.puts("sandbox \#{pid} vm \#{System.pid()}")
    Process.sleep(:infinity)
    """

    paths =
      for path <- :code.get_path(),
          path = to_string(path),
          path =~ "/lib/kmq/",
          arg <- ["-pa", path],
          do: arg

    args = paths ++ ["-e", "{:ok, _} = Application.ensure_all_started(:kmq)", "-e", code]
    elixir = System.find_executable("elixir")

    port =
      Port.open({:spawn_executable, elixir}, [
        :binary,
        :exit_status,
        :stderr_to_stdout,
        line: 1_000,
        args: args
      ])

    line = receive_line(port, "sandbox ")
    [sandbox, vm] = Regex.run(~r/sandbox (\d+) vm (\d+)/, line, capture: :all_but_first)
    assert alive?(sandbox)
    {_, 0} = System.cmd("kill", ["-KILL", vm])
    eventually(fn -> not alive?(sandbox) end, 2_000)
  end

  # FindCoordinator 0: its error code.
  defp coordinator(bootstrap) do
    with {:ok, <<code::16, _::binary>>} <- Kafka.request(bootstrap, 10, 0, Kafka.string("group")),
         do: {:ok, code}
  end

  defp receive_line(port, start) do
    receive do
      {^port, {:data, {:eol, line}}} ->
        if String.starts_with?(line, start), do: line, else: receive_line(port, start)

      {^port, {:exit_status, code}} ->
        flunk("the second VM ended with #{code}")
    after
      scaled(20_000) -> flunk("the second VM says nothing")
    end
  end

  defp os_pid(sandbox) do
    {:os_pid, pid} = Port.info(:sys.get_state(sandbox).port, :os_pid)
    pid
  end

  # A zombie that nobody has waited for yet is dead too.
  defp alive?(pid) do
    case System.cmd("ps", ["-o", "stat=", "-p", "#{pid}"]) do
      {stat, 0} -> not String.starts_with?(String.trim(stat), "Z")
      _ -> false
    end
  end
end
