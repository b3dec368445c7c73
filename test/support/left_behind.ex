defmodule Kmq.Test.LeftBehind do
  @moduledoc false
  # Messages that are the tracker's alone: below the group's commit, nobody works on them, their markers are written by the test.
  #
  #   publish ... -> left_behind(cluster, topics, options) -> tracker(options) -> mark(...) -> copies/2, ends/3, alarms/0

  import ExUnit.Assertions
  import ExUnit.Callbacks
  import Kmq.Test.ClusterCase, only: [consumer: 1, committed: 4, pull: 3, records: 3]
  import Kmq.Test.Eventually

  alias Kmq.{Config, Consumer, Security, Tracker}
  alias Kmq.Test.{MarkerLog, Markers}

  @doc "Acknowledges all that is there, stops the consumer, and returns when the group's commits are at the ends."
  def left_behind(cluster, topics, options, partitions \\ 1) do
    topics = List.wrap(topics)
    ends = for topic <- topics, do: {topic, high(cluster, topic, partitions)}
    n = for({_, ends} <- ends, {_, high} <- ends, do: high) |> Enum.sum()
    consumer = consumer(options)
    consumer |> pull(n, 40_000) |> Enum.each(&(:ok = Kmq.ack(&1)))
    :ok = Consumer.stop(consumer)

    # a partition in which nothing ever was has no commit
    for {topic, ends} <- ends,
        {{p, high}, {p, offset}} <-
          Enum.zip(ends, committed(cluster, options[:group_id], topic, partitions)),
        do: assert(offset == high or high == 0)
  end

  @doc "Of each partition the end of what is there."
  def high(cluster, topic, partitions) do
    with_admin(cluster, fn admin ->
      for p <- 0..(partitions - 1) do
        {:ok, {_, high}} = :kmq_nif.admin_watermarks(admin, topic, p, 5_000)
        {p, high}
      end
    end)
  end

  def with_admin(cluster, fun),
    do: Security.with_admin([{"bootstrap.servers", cluster.hosts}], 10_000, fun)

  @doc "Deletes what is below an offset."
  def forget(cluster, topic, partition, below) do
    :ok =
      with_admin(
        cluster,
        &:kmq_nif.admin_delete_records(&1, topic, partition, below, 5_000)
      )
  end

  @doc "A tracker of its own, ready when this returns. `env:` is in the program's environment."
  def tracker(options, extra \\ []) do
    {env, extra} = Keyword.pop(extra, :env, [])

    options =
      options |> Keyword.drop([:fetch_config, :group_config, :tracker]) |> Keyword.merge(extra)

    System.put_env(env)
    tracker = start_supervised!({Tracker, options}, id: {:tracker, make_ref()})
    :sys.get_state(tracker)
    for {name, _} <- env, do: System.delete_env(name)
    ready(tracker)
    tracker
  end

  @doc "Ends a tracker that `tracker/2` has started, in an orderly way."
  def stop_tracker(tracker) do
    {:ok, supervisor} = ExUnit.fetch_test_supervisor()

    for {id, ^tracker, _, _} <- Supervisor.which_children(supervisor),
        do: ExUnit.Callbacks.stop_supervised!(id)
  end

  def ready(tracker) do
    eventually(
      fn ->
        assert {:ok, %{partitions: [_ | _] = parts}} = Tracker.info(tracker)
        assert Enum.all?(parts, &(&1.state == :ready))
        true
      end,
      30_000
    )
  end

  @doc "Waits until nothing is open, in any of the tracker's partitions."
  def nothing_open(tracker, timeout_ms \\ 15_000) do
    eventually(
      fn ->
        {:ok, %{partitions: parts}} = Tracker.info(tracker)
        assert Enum.all?(parts, &(&1.open == 0 and &1.due == 0))
        true
      end,
      timeout_ms
    )
  end

  def markers(topic, options), do: Config.default_marker_topic(topic, options[:group_id])

  def mark(cluster, topic, options, records),
    do: Markers.write(cluster.hosts, markers(topic, options), records)

  @doc "What trackers have written to a queue topic."
  def copies(cluster, topic, partitions \\ 1) do
    for r <- records(cluster, topic, partitions),
        List.keymember?(r.headers, "kmq-deliveries", 0),
        do: r
  end

  @doc "The ENDs that trackers have written: those of `left_behind/4` itself, which are acks, are not among them."
  def ends(cluster, topic, options, partitions \\ 1) do
    for {place, ends} <- MarkerLog.ends(cluster.hosts, markers(topic, options), partitions),
        left = Enum.reject(ends, &match?({:ack, _}, &1)),
        left != [],
        into: %{},
        do: {place, left}
  end

  @doc "Telemetry comes to the test."
  def listen do
    :persistent_term.put(Kmq.Test.Scene, self())
    Kmq.Telemetry.put_backend(Kmq.Test.Scene)
    on_exit(fn -> Kmq.Telemetry.put_backend(nil) end)
  end

  @doc "All alarms that came so far, since `listen/0`: `[{reason, text}]`."
  def alarms do
    said = drain(Process.get(__MODULE__, []))
    Process.put(__MODULE__, said)
    said
  end

  defp drain(acc) do
    receive do
      {[:kmq, :error], _, %{alarm: reason, error: error}} ->
        drain([{reason, error.message} | acc])
    after
      0 -> acc
    end
  end
end
