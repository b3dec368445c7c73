defmodule Kmq.Sandbox do
  @moduledoc """
  A Kafka of its own for `iex`, demos and your ExUnit tests: no installation, no JVM, ready in a tenth of a second.

      {:ok, sandbox} = Kmq.Sandbox.start_link(topics: %{"orders" => 8})
      hosts = Kmq.Sandbox.bootstrap(sandbox)

  `hosts` is what the `:hosts` option of a pipeline, consumer or publisher takes. In a test:

      setup do
        sandbox = start_supervised!({Kmq.Sandbox, topics: %{"orders" => 8}})
        %{hosts: Kmq.Sandbox.bootstrap(sandbox)}
      end

  It is librdkafka's mock cluster in an operating system process of its own, `kmq_sandbox`: brokers that speak Kafka's
  protocol on free ports of 127.0.0.1, with all data in memory. The process ends with the `Kmq.Sandbox` process, and when
  the whole VM is killed.

  ## Options

    * `:brokers` - how many brokers, up to 100; they have the ids 1, 2 ... (default 1)
    * `:topics` - topics to start with: a map or keyword of name to number of partitions, or a list of names
    * `:partitions` - partitions of topics that are named without a number (default 4)
    * `:name` - a name for the process, as in `GenServer.start_link/3`

  ## Faults

  `inject/2` makes the cluster misbehave, to see what your code does then:

  | fault | what happens |
  |---|---|
  | `{:broker_down, id}` | the broker closes its connections and takes no new ones; its data stay, its partitions keep their leader |
  | `{:broker_up, id}` | it takes connections again |
  | `{:rtt, id, ms}` | each of its answers takes so long; 0 ends it |
  | `{:request_errors, api, errors}` | the next requests of this kind fail, one error each, in order; `[]` forgets what is left |
  | `{:broker_request_errors, id, api, [{error, ms}]}` | the same at one broker, each answer late by so much; `:no_error` is only late |
  | `{:topic_error, topic, error}` | what metadata says about the topic, until `:no_error` is set |
  | `{:coordinator, group, id}` | the group is coordinated by this broker from now on |
  | `{:partition_leader, topic, partition, id}` | the partition is led by this broker; -1: by none |

  A broker id of -1 means all brokers, except of `:broker_request_errors`. `api` is one of `:produce`, `:fetch`, `:list_offsets`, `:offset_commit`,
  `:offset_fetch`, `:find_coordinator`, `:join_group`, `:heartbeat`, `:leave_group`, `:sync_group`, `:api_versions`,
  `:init_producer_id`, `:add_partitions_to_txn`, `:add_offsets_to_txn`, `:end_txn`, `:txn_offset_commit`. `error` is the name
  of an error in small letters: `:not_enough_replicas`, `:request_timed_out`, `:not_leader_for_partition` ...; `:transport`
  closes the connection instead of answering.

  ## Limits

  It is for tests and for trying things out, not a broker:

    * A partition keeps its newest 5 MiB and at most 100,000 record batches; what is older is dropped, read or not.
    * Record timestamps are the producer's (CreateTime); there is no LogAppendTime and no look-up of offsets by time.
    * No admin requests: topics are made with `create_topic/3`, or by their first use, then with 4 partitions.
    * No transactions as a reader would see them: what was aborted is read like the rest.
    * No access control, TLS, SASL, retention by time or compaction.
    * A group forms 0.2 s after its first member has come, and a rebalance among several takes a session timeout less a second.
      Consumers in this VM use a session timeout of 4 s here unless they set another. (The mock cluster's own 3 s for the first member are
      cut short by a trick of the ELF loader's, see `c_src/sandbox/hurry.c`; on macOS that takes librdkafka 2.6.)
    * All members of a group must name the same assignor, or the cluster's process dies (and this process with it).
    * An empty fetch waits the whole `max_wait_time`: 10 to 50 ms make a quick test.
  """

  use GenServer

  alias Kmq.{Ask, Error, Options}

  # The program's own limits.
  @brokers_max 100
  @partitions_max 10_000
  @partitions {:custom, Options.Types, :integer_in, [1, @partitions_max]}

  @options [
    name: [type: :any],
    brokers: [type: {:custom, Options.Types, :integer_in, [1, @brokers_max]}, default: 1],
    topics: [type: {:custom, Options.Types, :sandbox_topics, []}, default: []],
    partitions: [type: @partitions, default: 4]
  ]

  @start_ms 10_000
  @call_ms 10_000
  @protocol 1
  @fault_bytes 1_048_576
  @faults ~w(broker_down broker_up rtt request_errors broker_request_errors topic_error coordinator partition_leader)a
  @apis ~w(produce fetch list_offsets offset_commit offset_fetch find_coordinator join_group heartbeat leave_group
           sync_group api_versions init_producer_id add_partitions_to_txn add_offsets_to_txn end_txn txn_offset_commit)a

  @type sandbox :: GenServer.server()
  @type option ::
          {:brokers, pos_integer}
          | {:topics, %{optional(topic) => pos_integer} | [{topic, pos_integer}] | [topic]}
          | {:partitions, pos_integer}
          | {:name, GenServer.name()}
  @type topic :: String.t() | atom
  @type broker :: pos_integer | -1
  @type fault ::
          {:broker_down, broker}
          | {:broker_up, broker}
          | {:rtt, broker, ms :: non_neg_integer}
          | {:request_errors, api :: atom, [error :: atom]}
          | {:broker_request_errors, broker, api :: atom,
             [{error :: atom, ms :: non_neg_integer}]}
          | {:topic_error, String.t(), error :: atom}
          | {:coordinator, group :: String.t(), broker}
          | {:partition_leader, String.t(), partition :: non_neg_integer, broker}

  @doc """
  Starts a cluster and returns when its brokers listen and its topics are there.
  """
  @spec start_link([option]) :: GenServer.on_start()
  def start_link(opts \\ []) do
    opts = Options.validate!(opts, @options)

    with :ok <- Kmq.Application.started(),
         do: GenServer.start_link(__MODULE__, with_partitions(opts), Keyword.take(opts, [:name]))
  end

  @doc """
  The brokers' addresses, `"127.0.0.1:40001,127.0.0.1:40002"`: a value for the `:hosts` option. Raises `Kmq.Error` when the sandbox has ended.
  """
  @spec bootstrap(sandbox) :: String.t()
  def bootstrap(sandbox), do: sandbox |> ask(:bootstrap, "bootstrap/1") |> value!()

  defp ask(sandbox, request, asked),
    do: Ask.call(__MODULE__, asked, sandbox, request, @call_ms)

  defp value!({:error, error}), do: raise(error)
  defp value!(value), do: value

  @doc """
  Creates a topic. `partitions` is the sandbox's `:partitions` option by default.

  The cluster may also be named by its `bootstrap/1` string, when it lives in this VM.
  """
  @spec create_topic(sandbox | String.t(), topic, pos_integer | nil) :: :ok | {:error, Error.t()}
  def create_topic(sandbox, topic, partitions \\ nil)

  def create_topic(bootstrap, topic, partitions) when is_binary(bootstrap) do
    case find(bootstrap) do
      {:ok, pid} -> create_topic(pid, topic, partitions)
      :error -> raise ArgumentError, "no sandbox of this VM listens on #{bootstrap}"
    end
  end

  def create_topic(sandbox, topic, partitions) do
    topic = check!(topic, {:custom, Options.Types, :sandbox_topic, []}, "a topic")
    asked = "create_topic/3"

    with n when is_integer(n) <- partitions || ask(sandbox, :partitions, asked) do
      n = check!(n, @partitions, "partitions")
      command(sandbox, :create_topic, {topic, n}, asked)
    else
      {:error, error} -> {:error, error}
      other -> check!(other, @partitions, "partitions")
    end
  end

  defp check!(value, type, what) do
    case Options.check(value, type) do
      {:ok, value} -> value
      {:error, message} -> raise ArgumentError, "#{what}: #{message}"
    end
  end

  @doc """
  Makes the cluster misbehave; see the table of faults above.
  """
  @spec inject(sandbox, fault) :: :ok | {:error, Error.t()}
  def inject(sandbox, fault)
      when is_tuple(fault) and tuple_size(fault) > 1 and is_atom(elem(fault, 0)) do
    [name | args] = Tuple.to_list(fault)
    name in @faults || unknown(name, "is no fault of Kmq.Sandbox", @faults)

    # What the program cannot read at all it takes for a broken pipe.
    unless plain?(args) and :erlang.external_size(args) <= @fault_bytes,
      do: raise(ArgumentError, "bad arguments for #{inspect(name)}: #{inspect(args, limit: 5)}")

    command(sandbox, name, List.to_tuple(args), "inject/2")
  end

  def inject(_sandbox, fault) do
    raise ArgumentError,
          "a fault is a tuple like {:broker_down, 1}, see Kmq.Sandbox, got: #{inspect(fault)}"
  end

  defp plain?(list) when is_list(list),
    do: not List.improper?(list) and Enum.all?(list, &plain?/1)

  defp plain?(pair) when is_tuple(pair), do: pair |> Tuple.to_list() |> plain?()
  defp plain?(n) when is_integer(n), do: abs(n) < 0x8000_0000_0000_0000
  defp plain?(other), do: is_atom(other) or is_binary(other)

  @doc """
  The sandbox of this VM that one of these addresses belongs to.
  """
  @spec find(String.t()) :: {:ok, pid} | :error
  def find(bootstrap) when is_binary(bootstrap) do
    bootstrap
    |> addresses()
    |> Enum.find_value(:error, fn address ->
      case Registry.lookup(Kmq.Registry, {__MODULE__, address}) do
        [{pid, _}] -> {:ok, pid}
        [] -> nil
      end
    end)
  end

  def find(_no_addresses), do: :error

  @doc """
  Ends the cluster. All that was in it is gone. One that has ended before is `{:error, %Kmq.Error{reason: :closed}}`.
  """
  @spec stop(sandbox) :: :ok | {:error, Error.t()}
  def stop(sandbox), do: Ask.stop(__MODULE__, "stop/1", sandbox, :infinity)

  @impl true
  def init(opts) do
    Process.flag(:trap_exit, true)
    Kmq.Info.register({:sandbox, opts[:name], nil})
    program = :kmq_port.program('kmq_sandbox')

    case :kmq_port.open(program, [Integer.to_charlist(opts[:brokers])]) do
      {:ok, port} -> ready(port, opts)
      {:error, reason} -> {:stop, Error.no_program(:sandbox, to_string(program), reason)}
    end
  end

  # The program listens within milliseconds, and nothing can be said about the cluster before: so this waits.
  defp ready(port, opts) do
    receive do
      {^port, {:data, frame}} ->
        {0, {:ready, @protocol, bootstrap}} = :erlang.binary_to_term(frame)

        for address <- addresses(bootstrap),
            do: Registry.register(Kmq.Registry, {__MODULE__, address}, nil)

        state = %{
          port: port,
          bootstrap: bootstrap,
          partitions: opts[:partitions],
          next_id: 1,
          calls: %{}
        }

        create_first(opts[:topics], state)

      {^port, {:exit_status, status}} ->
        {:stop, not_started("its program ended with status #{status}")}
    after
      @start_ms -> {:stop, not_started("its program has not answered within #{@start_ms} ms")}
    end
  end

  defp not_started(why), do: Error.new(:sandbox, "the sandbox does not start: #{why}")

  defp create_first(topics, %{port: port} = state) do
    Enum.reduce_while(topics, {:ok, state}, fn {topic, partitions}, ok ->
      send_command(port, 0, :create_topic, {topic, partitions})

      receive do
        {^port, {:data, frame}} ->
          case :erlang.binary_to_term(frame) do
            {0, :ok} -> {:cont, ok}
            {0, {:error, reason}} -> {:halt, {:stop, not_created(topic, reason)}}
          end

        {^port, {:exit_status, status}} ->
          {:halt, {:stop, not_started("its program ended with status #{status}")}}
      after
        @start_ms -> {:halt, {:stop, not_started("no answer about the topic #{topic}")}}
      end
    end)
  end

  defp not_created(topic, {:kafka, name, code, text}),
    do: Error.from_native({name, code, false, false, text}, "creating #{inspect(topic)}")

  defp not_created(topic, reason), do: not_started("#{inspect(topic)}: #{inspect(reason)}")

  @impl true
  def handle_call(:bootstrap, _from, state), do: {:reply, state.bootstrap, state}
  def handle_call(:partitions, _from, state), do: {:reply, state.partitions, state}

  def handle_call({:command, name, args}, from, %{next_id: id} = state) do
    send_command(state.port, id, name, args)
    {:noreply, %{state | next_id: id + 1, calls: Map.put(state.calls, id, from)}}
  end

  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({port, {:data, frame}}, %{port: port} = state) do
    {id, reply} = :erlang.binary_to_term(frame)
    {from, calls} = Map.pop!(state.calls, id)
    GenServer.reply(from, reply)
    {:noreply, %{state | calls: calls}}
  end

  def handle_info({port, {:exit_status, status}}, %{port: port} = state) do
    {:stop, {:sandbox_exit, status}, state}
  end

  def handle_info({:EXIT, port, reason}, %{port: port} = state),
    do: {:stop, {:sandbox_exit, reason}, state}

  def handle_info({:EXIT, _from, reason}, state), do: {:stop, reason, state}
  def handle_info(_other, state), do: {:noreply, state}

  # Closing the port closes the program's stdin, which ends it.
  @impl true
  def terminate(_reason, %{port: port}) do
    if Port.info(port), do: Port.close(port)
    :ok
  end

  defp command(sandbox, name, args, asked) do
    case ask(sandbox, {:command, name, args}, asked) do
      :ok ->
        :ok

      {:error, %Error{} = error} ->
        {:error, error}

      {:error, {:kafka, text_name, code, text}} ->
        {:error, Error.from_native({text_name, code, false, false, text})}

      {:error, {:unknown_api, api}} ->
        unknown(api, "is no kind of request that the sandbox knows", @apis)

      {:error, {:unknown_error, error}} ->
        unknown(error, "is no error name of librdkafka", errors())

      {:error, :badarg} ->
        raise ArgumentError, "bad arguments for #{inspect(name)}: #{inspect(args)}"
    end
  end

  defp unknown(name, what, names) do
    hint = if meant = Options.meant(name, names), do: ": " <> meant, else: ""
    raise ArgumentError, "#{inspect(name)} #{what}#{hint}"
  end

  # As one names them here. None of them is made an atom for this.
  defp errors do
    for {{name, _, _, _, _} = native, _class} <- :kmq_nif.errors(), uniq: true do
      case Error.from_native(native).reason do
        :kafka -> name
        reason -> reason
      end
    end
  end

  defp send_command(port, id, name, args),
    do: Port.command(port, :erlang.term_to_binary({id, name, args}))

  defp addresses(bootstrap), do: String.split(bootstrap, ",", trim: true)

  defp with_partitions(opts) do
    topics =
      for topic <- opts[:topics],
          do: if(is_tuple(topic), do: topic, else: {topic, opts[:partitions]})

    Keyword.put(opts, :topics, topics)
  end
end
