defmodule Kmq.Test.Scene do
  @moduledoc false
  # The stage of an integration test: a queue topic, a group, marker and dead letter topics and a folder of its own, all of which are
  # gone afterwards; and the proof that nothing native was left behind. KMQ_TEST_KEEP=1 keeps the folder, with the VMs' logs.
  import ExUnit.Assertions
  import ExUnit.Callbacks, only: [on_exit: 1]
  import Kmq.Test.Eventually

  alias Kmq.Test.{Checker, Kafka, VM, Worker}

  @enforce_keys [:hosts, :topic, :group, :partitions, :dir, :options]
  defstruct [:hosts, :topic, :group, :partitions, :dir, :options]

  @type t :: %__MODULE__{}

  # Members and trackers that are killed are missed after 2 s.
  @quick [
    consumer: ["session.timeout.ms": 2_000, "heartbeat.interval.ms": 300],
    tracker: ["session.timeout.ms": 2_000, "heartbeat.interval.ms": 300]
  ]

  @doc """
  Makes the topics. Options: `:hosts` (default: the shared cluster), `:partitions` (4), `:replicas` (1), all others are the pipeline's and go before
  the ones for tests: a lease of 2 s, no wait before a retry. `calm: true`: sessions and leases of the usual length, for tests in which
  nobody dies.
  """
  @spec new(keyword) :: t
  def new(options \\ []) do
    {own, options} = Keyword.split(options, [:hosts, :partitions, :replicas, :calm])
    hosts = own[:hosts] || Kafka.bootstrap()
    partitions = own[:partitions] || 4
    id = "#{System.unique_integer([:positive])}-#{System.pid()}"
    topic = "kmq-test-#{id}"
    dir = Path.join(System.tmp_dir!(), topic)
    File.mkdir_p!(dir)
    IO.puts(:stderr, "scene #{topic}: seed #{seed()}")

    defaults = [
      hosts: hosts,
      topics: [topic],
      group_id: "g",
      create_topics: true,
      lease: if(own[:calm], do: 30_000, else: 2_000),
      backoff: [0],
      drain_timeout: 10_000,
      kafka_config: if(own[:calm], do: [consumer: ["heartbeat.interval.ms": 300]], else: @quick)
    ]

    scene = %__MODULE__{
      hosts: hosts,
      topic: topic,
      group: "g-#{id}",
      partitions: partitions,
      dir: dir,
      options: Keyword.merge(Keyword.put(defaults, :group_id, "g-#{id}"), options)
    }

    on_exit(fn -> strike(scene) end)
    :ok = Kafka.create_topic(hosts, topic, partitions, %{}, own[:replicas] || 1)
    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(scene.options, :producer))
    scene
  end

  @doc "The seed of a test run: KMQ_SEED, else ExUnit's own."
  @spec seed() :: integer
  def seed do
    case System.get_env("KMQ_SEED") do
      nil -> ExUnit.configuration()[:seed]
      text -> String.to_integer(text)
    end
  end

  @spec markers(t) :: String.t()
  def markers(scene), do: Kmq.Config.default_marker_topic(scene.topic, scene.group)

  @spec dead_letters(t) :: String.t()
  def dead_letters(scene), do: Kmq.Config.default_dead_letter_topic(scene.topic)

  @spec publish(t, Range.t()) :: :ok
  def publish(scene, range),
    do: Checker.publish(scene.hosts, scene.topic, scene.partitions, range)

  @doc "Another VM of this scene; see `Kmq.Test.VM.start/1`."
  @spec vm(t, keyword) :: VM.t()
  def vm(scene, options \\ []), do: VM.start([dir: scene.dir] ++ options)

  @doc "A worker in a VM, or (`nil`) in this one, on the scene's queue. Options as `Kmq.Test.Worker.start/1` has them; `:options` go before the scene's."
  @spec work(t, VM.t() | nil, keyword) :: :ok
  def work(scene, vm, options \\ []) do
    options = options(scene, options)
    if vm, do: VM.call(vm, Worker, :start, [options]), else: work_here(options)
  end

  defp work_here(options) do
    on_exit(fn ->
      try do
        Worker.stop(options)
      catch
        :exit, _ -> :ok
      end
    end)

    Worker.start(options)
  end

  @doc "The same in a VM that may die before it answers."
  @spec work_and_die(t, VM.t(), keyword) :: :ok
  def work_and_die(scene, vm, options \\ []) do
    options = options(scene, options)

    try do
      VM.call(vm, Worker, :start, [options])
    rescue
      RuntimeError -> :ok
    end

    VM.await_exit(vm, scaled(20_000))
  end

  defp options(scene, options) do
    {pipeline, options} = Keyword.pop(options, :options, [])

    [options: Keyword.merge(scene.options, pipeline), file: Path.join(scene.dir, "handled")] ++
      options
  end

  @doc "What workers have written so far, of n messages."
  @spec check(t, pos_integer) :: Checker.t()
  def check(scene, n), do: Checker.read(Path.join(scene.dir, "handled"), n)

  @doc "Waits until at least `count` of n messages are handled."
  @spec await_handled(t, pos_integer, pos_integer, pos_integer) :: Checker.t()
  def await_handled(scene, n, count, timeout \\ 40_000) do
    eventually(
      fn ->
        checker = check(scene, n)
        assert Checker.handled(checker) >= count
        checker
      end,
      timeout
    )
  end

  @doc "Waits until none of n messages is missing."
  @spec await_all(t, pos_integer, pos_integer) :: Checker.t()
  def await_all(scene, n, timeout \\ 40_000) do
    checker = await_handled(scene, n, n, timeout)
    assert Checker.missing(checker) == []
    checker
  end

  @doc "Copies that trackers have written to the queue topic, beyond the n messages published."
  @spec copies(t, non_neg_integer) :: non_neg_integer
  def copies(scene, n), do: Checker.count(scene.hosts, scene.topic, scene.partitions) - n

  @spec dead(t) :: non_neg_integer
  def dead(scene), do: Checker.count(scene.hosts, dead_letters(scene), scene.partitions)

  @spec committed(t) :: %{non_neg_integer => integer}
  def committed(scene) do
    # A coordinator that has just been started does not answer yet.
    eventually(
      fn -> Checker.committed(scene.hosts, scene.group, scene.topic, scene.partitions) end,
      20_000
    )
  end

  @doc "Waits until the group has committed the end of every partition."
  @spec await_committed(t, pos_integer) :: true
  def await_committed(scene, timeout \\ 10_000) do
    eventually(
      fn ->
        assert committed(scene) == Checker.ends(scene.hosts, scene.topic, scene.partitions)
        true
      end,
      timeout
    )
  end

  @doc "Telemetry comes to the calling process, as `{event, measurements, metadata}`."
  @spec listen() :: :ok
  def listen do
    :persistent_term.put(__MODULE__, self())
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
    Kmq.Telemetry.put_backend(__MODULE__)
  end

  @doc false
  def execute(event, measurements, metadata) do
    send(:persistent_term.get(__MODULE__), {event, measurements, metadata})
    :ok
  end

  # After the test's own processes have ended.
  defp strike(scene) do
    eventually(
      fn ->
        assert %{consumers: 0, publishers: 0, admins: 0, clients: 0} = :kmq_nif.live()
        # Other modules' sandboxes are their own affair.
        assert [] = for({_, "kmq_tracker" = name} <- VM.port_programs(), do: name)
        true
      end,
      20_000
    )

    # A node that the test has ended with takes its topics with it.
    with {:ok, topics} <- Kafka.topics(scene.hosts) do
      for {topic, _} <- topics,
          String.starts_with?(topic, scene.topic),
          do: Kafka.delete_topic(scene.hosts, topic)
    end

    if System.get_env("KMQ_TEST_KEEP") != "1", do: File.rm_rf!(scene.dir)
  end
end
