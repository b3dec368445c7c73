defmodule Kmq.Test.Kafka do
  @moduledoc false
  # A real Kafka for the tests: one KRaft node on free ports of 127.0.0.1, its data in a temporary folder.
  #
  #     Kmq.Test.Kafka.bootstrap()                 the address of the one that all tests share; started at the first call
  #     {:ok, kafka} = Kmq.Test.Kafka.start()      one of one's own, for tests that stop, freeze or restart it
  #
  # The jars are put into the cache by test/support/kafka/fetch.sh (`make test` calls it). With KMQ_KAFKA=host:port the shared
  # one is that cluster instead. The JVM runs under guard.sh, whose stdin is this VM's port: it dies with the VM.
  #
  # create_topic/4 and topics/1 speak Kafka's protocol themselves: they must not depend on what the tests test.

  use GenServer

  @version "4.3.1"
  @start_ms 90_000
  @tries 3
  @here Path.join(__DIR__, "kafka")

  ## Where it comes from

  @doc "`:ok`, or `{:missing, why}` in words for a person."
  def available do
    cond do
      System.get_env("KMQ_KAFKA") ->
        :ok

      not File.exists?(Path.join(jars(), "pom.xml")) ->
        {:missing, "no Kafka in #{jars()}; `make test` fetches it"}

      System.find_executable("java") == nil ->
        {:missing, "no java; `make setup-test` installs it"}

      true ->
        :ok
    end
  end

  @doc "The folder of Kafka's jars."
  def jars, do: cache("kafka-#{@version}")

  @doc "The folder of the jars of the JVM kmq."
  def peer_jars, do: cache("kmq-jvm-0.2")

  defp cache(name) do
    home = System.get_env("XDG_CACHE_HOME") || Path.join(System.user_home!(), ".cache")
    Path.join([home, "kmq", name])
  end

  ## The shared one

  @doc "The address of the shared cluster, which is started when it does not run yet."
  def bootstrap do
    case System.get_env("KMQ_KAFKA") do
      nil -> bootstrap(shared())
      address -> address
    end
  end

  @doc "The shared node's process. Tests that harm a node start one of their own."
  def shared do
    # Nobody restarts this one: on a loaded machine it must not be thought dead by its own controller.
    patient = [config: %{"broker.session.timeout.ms" => 30_000}]

    case GenServer.start(__MODULE__, patient, name: __MODULE__, timeout: :infinity) do
      {:ok, pid} -> pid
      {:error, {:already_started, pid}} -> pid
      {:error, reason} -> raise "Kafka does not start: #{inspect(reason)}"
    end
  end

  @doc "Ends the shared node, if it runs. Its data are deleted."
  def stop_shared do
    if pid = Process.whereis(__MODULE__), do: stop(pid)
    :ok
  end

  ## One node

  @doc """
  Starts a node, linked to the caller. Options: `config: %{"server.property" => value}`; `jvm: [flag]` instead of the
  flags for a small JVM that starts fast (a benchmark wants others); `listeners: [{name, protocol, address, advertised host, or "host:port"}]`
  beside the plain one (their addresses: `listener/2`); `format: [argument]` for StorageTool; `prepare: fun` of the node's folder,
  called before anything runs.
  """
  def start(opts \\ []), do: GenServer.start_link(__MODULE__, opts, timeout: :infinity)

  @doc "As start/1; raises when it does not start."
  def start!(opts \\ []) do
    case start(opts) do
      {:ok, kafka} -> kafka
      {:error, reason} -> raise "Kafka does not start: #{inspect(reason)}"
    end
  end

  @doc """
  Starts `n` nodes of one cluster, each a broker and a controller, linked to the caller; what they keep for themselves has a replica on each of
  them. Ends when all of them know all of them.
  """
  def start_cluster!(n, opts \\ []) do
    {brokers, controllers} = Enum.split(free_ports(2 * n), n)

    voters =
      Enum.map_join(Enum.with_index(controllers, 1), ",", fn {p, i} -> "#{i}@127.0.0.1:#{p}" end)

    cluster = %{id: cluster_id(), voters: voters, n: n}

    nodes =
      for {{port, controller}, i} <- Enum.with_index(Enum.zip(brokers, controllers), 1),
          do: start!([node: Map.merge(cluster, %{number: i, ports: [port, controller]})] ++ opts)

    for node <- nodes, do: :ok = GenServer.call(node, {:await_brokers, n}, :infinity)
    nodes
  end

  @doc "The number of the node that coordinates a group; -1: none does, for now."
  def coordinator(bootstrap, group) do
    with {:ok, <<_throttle::32, 0::16, rest::binary>>} <-
           request(bootstrap, 10, 1, [string(group), 0]) do
      {_message, <<node::signed-32, _::binary>>} = take_string(rest)
      node
    else
      _ -> -1
    end
  end

  @doc "The state of a group as its coordinator sees it, `\"Stable\"` and so on, and how many members it has (DescribeGroups 0)."
  def group(bootstrap, group) do
    {:ok, <<1::32, 0::16, rest::binary>>} = request(bootstrap, 15, 0, [<<1::32>>, string(group)])
    {^group, rest} = take_string(rest)
    {state, rest} = take_string(rest)
    {_type, rest} = take_string(rest)
    {_protocol, <<members::32, _::binary>>} = take_string(rest)
    {state, members}
  end

  @doc "The node's address."
  def bootstrap(kafka), do: GenServer.call(kafka, :bootstrap, :infinity)

  @doc "The address of one of its other listeners."
  def listener(kafka, name), do: GenServer.call(kafka, {:listener, name}, :infinity) |> elem(1)

  @doc "Where it listens itself, when what it advertises is another place."
  def listens_at(kafka, name), do: GenServer.call(kafka, {:listener, name}, :infinity) |> elem(0)

  @doc "The node's folder."
  def dir(kafka), do: GenServer.call(kafka, :dir, :infinity)

  @doc "The JVM's operating system pid, or nil while it is stopped."
  def os_pid(kafka), do: GenServer.call(kafka, :os_pid, :infinity)

  @doc "Kills the JVM (SIGKILL, or an orderly SIGTERM). The data stay; `resume/1` starts it again at the same address."
  def halt(kafka, how \\ :kill) when how in [:kill, :term],
    do: GenServer.call(kafka, {:halt, how}, :infinity)

  @doc "Starts a halted node again; returns when it answers."
  def resume(kafka), do: GenServer.call(kafka, :resume, :infinity)

  @doc "Halts and resumes."
  def restart(kafka, how \\ :kill) do
    :ok = halt(kafka, how)
    resume(kafka)
  end

  @doc "Freezes the JVM (SIGSTOP): connections stay, nothing answers."
  def pause(kafka), do: GenServer.call(kafka, {:signal, "STOP"})

  @doc "Lets a frozen JVM go on (SIGCONT)."
  def cont(kafka), do: GenServer.call(kafka, {:signal, "CONT"})

  @doc "Ends the node and deletes its data."
  def stop(kafka), do: GenServer.stop(kafka, :normal, :infinity)

  @doc "The broker's log so far."
  def log(kafka), do: GenServer.call(kafka, :log)

  ## Topics, in Kafka's own bytes

  @doc "Creates a topic on the node at `bootstrap` and waits until its partitions have leaders."
  def create_topic(bootstrap, topic, partitions \\ 1, config \\ %{}, replicas \\ 1) do
    pairs = for {name, value} <- config, do: [string(to_string(name)), string(to_string(value))]

    body = [
      <<1::32>>,
      [string(topic), <<partitions::32, replicas::16, 0::32>>, <<length(pairs)::32>>, pairs],
      <<15_000::32, 0>>
    ]

    with {:ok, <<_throttle::32, 1::32, rest::binary>>} <- request(bootstrap, 19, 2, body) do
      {^topic, <<code::signed-16, rest::binary>>} = take_string(rest)

      case code do
        0 -> wait_for_leaders(bootstrap, topic, partitions, deadline(15_000))
        _ -> {:error, {code, rest |> take_string() |> elem(0)}}
      end
    end
  end

  @doc "Deletes a topic; what else is there to say."
  def delete_topic(bootstrap, topic) do
    with {:ok, <<_throttle::32, 1::32, rest::binary>>} <-
           request(bootstrap, 20, 1, [<<1::32>>, string(topic), <<15_000::32>>]) do
      {^topic, <<code::signed-16>>} = take_string(rest)
      if code == 0, do: :ok, else: {:error, code}
    end
  end

  @doc "All topics with their number of partitions, without the broker's own (`__consumer_offsets` ...). Creates none."
  def topics(bootstrap) do
    with {:ok, topics} <- metadata(bootstrap) do
      {:ok, for({name, false, leaders} <- topics, into: %{}, do: {name, length(leaders)})}
    end
  end

  @doc "Number of a topic's partitions, 0 when it does not exist."
  def partitions(bootstrap, topic) do
    {:ok, topics} = topics(bootstrap)
    Map.get(topics, topic, 0)
  end

  defp wait_for_leaders(bootstrap, topic, partitions, deadline) do
    with {:ok, topics} <- metadata(bootstrap),
         {_, _, leaders} <- List.keyfind(topics, topic, 0),
         true <- length(leaders) == partitions and Enum.all?(leaders, &(&1 >= 0)) do
      :ok
    else
      _ ->
        if now() < deadline do
          Process.sleep(10)
          wait_for_leaders(bootstrap, topic, partitions, deadline)
        else
          {:error, :no_leader}
        end
    end
  end

  # Metadata 1 with a null list: all topics. [{name, internal?, [leader]}]
  defp metadata(bootstrap),
    do: with({:ok, {_brokers, topics}} <- cluster(bootstrap), do: {:ok, topics})

  defp cluster(bootstrap) do
    with {:ok, <<n::32, rest::binary>>} <- request(bootstrap, 3, 1, <<-1::32>>) do
      {brokers, rest} =
        take_many(rest, n, fn <<id::32, rest::binary>> ->
          {_host, <<_port::32, rest::binary>>} = take_string(rest)
          {_rack, rest} = take_string(rest)
          {id, rest}
        end)

      <<_controller::32, n::32, rest::binary>> = rest
      {topics, ""} = take_many(rest, n, &take_topic/1)
      {:ok, {brokers, topics}}
    end
  end

  defp take_topic(<<_error::16, rest::binary>>) do
    {name, <<internal, n::32, rest::binary>>} = take_string(rest)

    {leaders, rest} =
      take_many(rest, n, fn <<_error::16, _id::32, leader::signed-32, r::32, rest::binary>> ->
        <<_replicas::binary-size(r)-unit(32), i::32, rest::binary>> = rest
        <<_isr::binary-size(i)-unit(32), rest::binary>> = rest
        {leader, rest}
      end)

    {{name, internal == 1, leaders}, rest}
  end

  defp take_many(rest, n, fun),
    do: Enum.map_reduce(List.duplicate(nil, n), rest, fn _, rest -> fun.(rest) end)

  defp take_string(<<-1::signed-16, rest::binary>>), do: {nil, rest}
  defp take_string(<<n::16, text::binary-size(n), rest::binary>>), do: {text, rest}

  @doc "A string as Kafka writes it."
  def string(text), do: [<<byte_size(text)::16>>, text]

  @doc "One request by its API key and version, to the first node of `bootstrap`; the answer's body."
  def request(bootstrap, api, version, body, timeout \\ 20_000) do
    [first | _] = String.split(bootstrap, ",")
    [host, port] = String.split(first, ":")
    options = [:binary, active: false, packet: 4, packet_size: 0]

    with {:ok, socket} <-
           :gen_tcp.connect(to_charlist(host), String.to_integer(port), options, 2_000) do
      try do
        with :ok <-
               :gen_tcp.send(socket, [<<api::16, version::16, 1::32>>, string("kmq-test"), body]),
             {:ok, <<1::32, answer::binary>>} <- :gen_tcp.recv(socket, 0, timeout) do
          {:ok, answer}
        end
      after
        :gen_tcp.close(socket)
      end
    end
  end

  ## The process that owns the JVM

  @impl true
  def init(opts) do
    Process.flag(:trap_exit, true)

    case available() do
      :ok ->
        dir =
          Path.join(
            System.tmp_dir!(),
            "kmq-kafka-#{System.pid()}-#{System.unique_integer([:positive])}"
          )

        File.mkdir_p!(dir)
        if prepare = opts[:prepare], do: prepare.(dir)
        state = %{dir: dir, opts: opts, port: nil, os_pid: nil, bootstrap: nil, listeners: %{}}

        # the nodes of a cluster have told each other their ports
        case first_start(state, if(opts[:node], do: 1, else: @tries)) do
          {:ok, state} ->
            {:ok, state}

          {:error, reason} ->
            File.rm_rf(dir)
            {:stop, reason}
        end

      {:missing, why} ->
        {:stop, why}
    end
  end

  # Between our finding a free port and the JVM's listening on it somebody else may take it: then with other ports.
  defp first_start(state, tries) do
    others = state.opts[:listeners] || []
    [port, controller] = if node = state.opts[:node], do: node.ports, else: free_ports(2)
    ports = free_ports(length(others))

    others =
      for {{name, protocol, at, as}, port} <- Enum.zip(others, ports) do
        as =
          if String.contains?(as, ":") and not String.ends_with?(as, "]"),
            do: as,
            else: "#{as}:#{port}"

        {name, protocol, "#{at}:#{port}", as}
      end

    File.rm_rf!(Path.join(state.dir, "data"))

    File.write!(
      Path.join(state.dir, "server.properties"),
      properties(state, port, controller, others)
    )

    listeners = Map.new(others, fn {name, _, at, as} -> {name, {at, as}} end)
    state = %{state | listeners: listeners}

    with :ok <- format(state),
         {:ok, state} <- run(%{state | bootstrap: "127.0.0.1:#{port}"}) do
      {:ok, state}
    else
      {:error, _} when tries > 1 -> first_start(state, tries - 1)
      error -> error
    end
  end

  defp free_ports(n) do
    sockets =
      for _ <- 1..n do
        {:ok, socket} = :gen_tcp.listen(0, ip: {127, 0, 0, 1})
        socket
      end

    ports = for socket <- sockets, {:ok, port} = :inet.port(socket), do: port
    Enum.each(sockets, &:gen_tcp.close/1)
    ports
  end

  defp properties(state, port, controller, others) do
    protocols = for {name, protocol, _, _} <- others, do: ",#{name}:#{protocol}"
    listen = for {name, _, at, _} <- others, do: ",#{name}://#{at}"
    advertise = for {name, _, _, as} <- others, do: ",#{name}://#{as}"

    node = state.opts[:node] || %{number: 1, voters: "1@127.0.0.1:#{controller}", n: 1}

    %{
      "process.roles" => "broker,controller",
      "node.id" => node.number,
      "controller.quorum.voters" => node.voters,
      "controller.listener.names" => "CONTROLLER",
      "listeners" =>
        "PLAINTEXT://127.0.0.1:#{port},CONTROLLER://127.0.0.1:#{controller}#{listen}",
      "advertised.listeners" => "PLAINTEXT://127.0.0.1:#{port}#{advertise}",
      "listener.security.protocol.map" => "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT#{protocols}",
      "log.dirs" => Path.join(state.dir, "data"),
      "offsets.topic.replication.factor" => node.n,
      "offsets.topic.num.partitions" => 4,
      "transaction.state.log.replication.factor" => node.n,
      "transaction.state.log.min.isr" => 1,
      "transaction.state.log.num.partitions" => 4,
      "share.coordinator.state.topic.replication.factor" => node.n,
      "share.coordinator.state.topic.min.isr" => 1,
      "share.coordinator.state.topic.num.partitions" => 2,
      "group.initial.rebalance.delay.ms" => 0,
      "group.min.session.timeout.ms" => 500,
      # a killed node may register again when its old session is over
      "broker.session.timeout.ms" => 3_000,
      "broker.heartbeat.interval.ms" => 500,
      # so that "it is not created by our asking" is a test and not a setting
      "auto.create.topics.enable" => true,
      "log.initial.task.delay.ms" => 1_000,
      "log.retention.check.interval.ms" => 1_000,
      "num.network.threads" => 2,
      "num.io.threads" => 4
    }
    |> Map.merge(Map.new(state.opts[:config] || %{}))
    |> Enum.map_join(fn {name, value} -> "#{name}=#{value}\n" end)
  end

  # The first bit is 0: one that began with "-" would be an option to Kafka's tools.
  defp cluster_id,
    do: Base.url_encode64(<<0::1, :crypto.strong_rand_bytes(16)::bitstring-127>>, padding: false)

  defp format(state) do
    id = if node = state.opts[:node], do: node.id, else: cluster_id()

    args =
      java_args(state) ++
        ["kafka.tools.StorageTool", "format", "-t", id, "-c", "server.properties"] ++
        (state.opts[:format] || [])

    case System.cmd("java", args, cd: state.dir, stderr_to_stdout: true) do
      {_, 0} -> :ok
      {text, _} -> {:error, {:format, text}}
    end
  end

  defp run(state) do
    args =
      [state.dir, System.find_executable("java")] ++
        java_args(state) ++ ["kafka.Kafka", "server.properties"]

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        :exit_status,
        line: 100,
        args: [Path.join(@here, "guard.sh") | args]
      ])

    receive do
      {^port, {:data, {:eol, pid}}} ->
        state = %{state | port: port, os_pid: String.to_integer(pid)}
        # one alone of a cluster answers nothing yet
        if state.opts[:node], do: {:ok, state}, else: wait_ready(state)

      {^port, {:exit_status, code}} ->
        {:error, {:guard, code}}
    end
  end

  defp java_args(state) do
    jvm = state.opts[:jvm] || ["-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]

    jvm ++
      [
        "-Dlog4j2.configurationFile=#{Path.join(@here, "log4j2.properties")}",
        "-cp",
        Path.join(jars(), "*")
      ]
  end

  # Ready when a client can list topics and the node has a leader for what it makes, not after a time.
  defp wait_ready(%{port: port} = state, n \\ 1, deadline \\ deadline(@start_ms)) do
    receive do
      {^port, {:exit_status, code}} -> {:error, {:kafka_exit, code, tail(state)}}
    after
      50 ->
        case cluster(state.bootstrap) do
          {:ok, {brokers, _topics}} when length(brokers) >= n -> {:ok, state}
          _ -> if now() < deadline, do: wait_ready(state, n, deadline), else: not_ready(state)
        end
    end
  end

  defp not_ready(state) do
    kill(state)
    {:error, {:not_ready, tail(state)}}
  end

  defp tail(state) do
    case File.read(log_file(state)) do
      {:ok, text} -> text |> String.split("\n") |> Enum.take(-30) |> Enum.join("\n")
      _ -> ""
    end
  end

  defp log_file(state), do: Path.join(state.dir, "kafka.log")

  @impl true
  def handle_call(:bootstrap, _from, state), do: {:reply, state.bootstrap, state}

  def handle_call({:listener, name}, _from, state),
    do: {:reply, Map.fetch!(state.listeners, name), state}

  def handle_call(:dir, _from, state), do: {:reply, state.dir, state}
  def handle_call(:os_pid, _from, state), do: {:reply, state.os_pid, state}
  def handle_call(:log, _from, state), do: {:reply, File.read!(log_file(state)), state}

  def handle_call({:halt, how}, _from, state), do: {:reply, :ok, halted(state, how)}

  def handle_call({:await_brokers, n}, _from, state) do
    case wait_ready(state, n) do
      {:ok, state} -> {:reply, :ok, state}
      error -> {:stop, :await_brokers, error, state}
    end
  end

  def handle_call(:resume, _from, %{port: nil} = state) do
    case run(state) do
      {:ok, state} -> {:reply, :ok, state}
      error -> {:stop, :resume, error, state}
    end
  end

  def handle_call(:resume, _from, state), do: {:reply, :ok, state}

  def handle_call({:signal, name}, _from, %{os_pid: pid} = state) when pid != nil do
    signal(pid, name)
    {:reply, :ok, state}
  end

  @impl true
  def handle_info({port, {:exit_status, code}}, %{port: port} = state) do
    {:stop, {:kafka_exit, code, tail(state)}, %{state | port: nil, os_pid: nil}}
  end

  def handle_info({:EXIT, port, _}, state) when is_port(port), do: {:noreply, state}
  def handle_info({:EXIT, _, reason}, state), do: {:stop, reason, state}
  def handle_info(_, state), do: {:noreply, state}

  @impl true
  def terminate(_reason, state) do
    halted(state, :kill)
    File.rm_rf(state.dir)
  end

  defp halted(%{port: nil} = state, _how), do: state

  defp halted(state, :kill) do
    kill(state)
    await_exit(state)
  end

  defp halted(state, :term) do
    signal(state.os_pid, "TERM")
    await_exit(state)
  end

  defp kill(state), do: signal(state.os_pid, "KILL")

  defp await_exit(%{port: port} = state) do
    receive do
      {^port, {:exit_status, _}} -> :ok
    after
      30_000 -> kill(state)
    end

    %{state | port: nil, os_pid: nil}
  end

  defp signal(pid, name),
    do: System.cmd("kill", ["-#{name}", Integer.to_string(pid)], stderr_to_stdout: true)

  defp deadline(ms), do: now() + ms
  defp now, do: System.monotonic_time(:millisecond)
end
