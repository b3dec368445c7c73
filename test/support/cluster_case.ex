defmodule Kmq.Test.ClusterCase do
  @moduledoc false
  # Tests that run on a cluster: `use Kmq.Test.ClusterCase, on: :sandbox` or `on: :kafka` (tagged :integration). What must hold on both is
  # written once, as a body in a module of test/support/bodies, and run on each by `run_bodies/1`:
  #
  #     defmodule Kmq.Test.Bodies.Queue do
  #       use Kmq.Test.ClusterCase.Bodies
  #       body "an ack is for one message", %{cluster: cluster} do ... end
  #     end
  #
  # Each test has topics and a group of its own. At its end no native handle may be left.

  use ExUnit.CaseTemplate

  import ExUnit.Assertions
  import Kmq.Test.Eventually
  alias Kmq.{Consumer, Publisher, Topics}
  alias Kmq.Test.{RawLog, VM}

  using options do
    quote do
      import Kmq.Test.ClusterCase
      import Kmq.Test.Eventually

      if unquote(options[:on]) == :kafka, do: @moduletag(:integration)
      @moduletag :capture_log
      setup_all do: start_cluster(unquote(options[:on]))
    end
  end

  @doc false
  def start_cluster(:sandbox) do
    sandbox = ExUnit.Callbacks.start_supervised!(Kmq.Sandbox)
    %{cluster: %{kind: :sandbox, hosts: Kmq.Sandbox.bootstrap(sandbox), sandbox: sandbox}}
  end

  def start_cluster(:kafka), do: %{cluster: %{kind: :kafka, hosts: Kmq.Test.Kafka.bootstrap()}}

  setup do
    seed = ExUnit.configuration()[:seed]
    :rand.seed(:exsss, {seed, 1, 2})
    on_exit(&nothing_left/0)
    :ok
  end

  # A client may be half a minute in rd_kafka_destroy while its broker is slow.
  @doc "All native handles are closed, all clients destroyed and all trackers have ended, or soon will."
  def nothing_left do
    eventually(
      fn ->
        assert Map.new(:kmq_nif.live(), fn {what, _} -> {what, 0} end) == :kmq_nif.live()
        assert for({_, "kmq_tracker"} = program <- VM.port_programs(), do: program) == []
      end,
      40_000
    )
  end

  @doc "Runs every body of a module as a test of this one; `except:` lists the names of those that are not for here."
  defmacro run_bodies(module, options \\ []) do
    quote bind_quoted: [module: module, options: options] do
      except = Keyword.get(options, :except, [])
      [] = except -- Enum.map(module.bodies(), &elem(&1, 0))

      for {name, function} <- module.bodies(), name not in except do
        @tag timeout: Kmq.Test.Eventually.scaled(60_000)
        test name, context do
          apply(unquote(module), unquote(function), [context])
        end
      end
    end
  end

  # ---- topics

  @doc "A name nobody else has."
  def unique(name),
    do: name <> "-" <> Base.encode16(:crypto.strong_rand_bytes(5), case: :lower)

  @doc "A queue topic of its own."
  def queue(cluster, partitions, name \\ "q", settings \\ []) do
    topic = unique(name)
    :ok = Topics.create_topic(topic, partitions, [hosts: cluster.hosts] ++ settings)
    topic
  end

  @doc "Options of a pipeline or consumer that come to the point soon."
  def options(cluster, topics, extra \\ []) do
    session = if cluster.kind == :sandbox, do: 3, else: 6

    Keyword.merge(
      [
        hosts: cluster.hosts,
        topics: List.wrap(topics),
        group_id: unique("g"),
        create_topics: true,
        lease: 2_000,
        max_processing_time: 30_000,
        backoff: [50],
        drain_timeout: 5_000,
        group_config: [session_timeout_seconds: session, heartbeat_rate_seconds: 1],
        fetch_config: [max_wait_time: 50]
      ],
      extra
    )
  end

  # ---- in and out

  @doc "Publishes `{value, options}` or values, durable when it returns. Uncompressed, so that RawLog can read it."
  def publish(cluster, topic, messages) do
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)

    messages =
      Enum.map(messages, fn
        {value, options} -> {topic, value, options}
        value -> {topic, value}
      end)

    {:ok, places} = Publisher.publish_many(publisher, messages)
    :ok = Publisher.close(publisher)
    places
  end

  @doc "A pull consumer, stopped in an orderly way at the end of the test."
  def consumer(options) do
    id = make_ref()
    start = {Consumer, :start_link, [options]}
    start_supervised!(%{id: id, start: start, shutdown: 10_000, restart: :temporary})
  end

  @doc "Pulls until `n` messages have come."
  def pull(consumer, n, timeout_ms \\ 15_000),
    do: pull_until(consumer, &(length(&1) >= n), timeout_ms, [])

  @doc "Pulls until `fun` of all messages so far says so."
  def pull_until(consumer, fun, timeout_ms \\ 15_000),
    do: pull_until(consumer, fun, timeout_ms, [])

  defp pull_until(consumer, fun, timeout_ms, acc) do
    deadline = System.monotonic_time(:millisecond) + scaled(timeout_ms)
    pull_by(consumer, fun, deadline, acc)
  end

  defp pull_by(consumer, fun, deadline, acc) do
    acc = acc ++ Consumer.pull(consumer, max: 500, wait: 100)

    cond do
      fun.(acc) ->
        acc

      System.monotonic_time(:millisecond) > deadline ->
        raise ExUnit.AssertionError,
          message:
            "#{length(acc)} messages came in time: #{inspect(Enum.map(acc, &{&1.value, &1.attempt}), limit: 20, printable_limit: 200)}"

      true ->
        pull_by(consumer, fun, deadline, acc)
    end
  end

  @doc "All records of a topic, as they lie on the broker."
  def records(cluster, topic, partitions), do: RawLog.read(cluster.hosts, topic, partitions)

  @doc "Offsets of the markers of a topic in `:range` or `:kmq` format that ENDs settle: waits until `n` records are in a topic."
  def await_records(cluster, topic, partitions, n, timeout_ms \\ 15_000) do
    eventually(
      fn ->
        records = records(cluster, topic, partitions)
        if length(records) < n, do: raise_count(topic, length(records), n), else: records
      end,
      timeout_ms
    )
  end

  defp raise_count(topic, have, want),
    do: raise(ExUnit.AssertionError, message: "#{topic} has #{have} records, expected #{want}")

  @doc "Kmq's own headers of a record, and the user's."
  def split_headers(record) do
    {ours, users} =
      Enum.split_with(record.headers, fn {name, _} -> String.starts_with?(name, "kmq-") end)

    {ours, users}
  end

  @doc "Of each partition the group's committed offset, -1001 where there is none."
  def committed(cluster, group, topic, partitions) do
    {:ok, admin} =
      :kmq_nif.admin_open([{"bootstrap.servers", cluster.hosts}, {"group.id", group}])

    try do
      {:ok, list} =
        :kmq_nif.admin_committed(admin, for(p <- 0..(partitions - 1), do: {topic, p}), 5_000)

      for {_, partition, offset} <- Enum.sort(list), do: {partition, offset}
    after
      :kmq_nif.admin_close(admin)
    end
  end
end

defmodule Kmq.Test.ClusterCase.Bodies do
  @moduledoc false

  defmacro __using__(_options) do
    quote do
      import ExUnit.Assertions
      import ExUnit.Callbacks
      import Kmq.Test.ClusterCase, except: [run_bodies: 1, run_bodies: 2]
      import Kmq.Test.ClusterCase.Bodies
      import Kmq.Test.Eventually

      Module.register_attribute(__MODULE__, :bodies, accumulate: true)
      @before_compile Kmq.Test.ClusterCase.Bodies
    end
  end

  defmacro __before_compile__(_env) do
    quote do
      @doc "Names and functions of all bodies, in their order."
      def bodies, do: Enum.reverse(@bodies)
    end
  end

  @doc "A test's name and what it does, to be run on each cluster."
  defmacro body(name, context, do: block) do
    function = String.to_atom("body " <> name)

    quote do
      @bodies {unquote(name), unquote(function)}
      @doc false
      def unquote(function)(unquote(context)), do: unquote(block)
    end
  end
end
