defmodule Kmq.Sandbox.GroupsTest do
  # What several brokers can do to a group: three of them, moved about by faults.
  use ExUnit.Case, async: false

  import ExUnit.CaptureLog
  import Kmq.Test.ClusterCase
  import Kmq.Test.Eventually

  alias Kmq.{Consumer, Handle, Sandbox}

  @moduletag :capture_log

  setup do
    on_exit(&nothing_left/0)
    sandbox = start_supervised!({Sandbox, brokers: 3})
    %{sandbox: sandbox, cluster: %{kind: :sandbox, hosts: Sandbox.bootstrap(sandbox)}}
  end

  defp handle(consumer), do: GenServer.call(consumer, :handle)

  test "the coordinator moves, and its old broker goes: acks, commits and membership go on", %{
    cluster: cluster,
    sandbox: sandbox
  } do
    topic = queue(cluster, 2)
    options = options(cluster, topic)
    consumer = consumer(options)
    publish(cluster, topic, for(i <- 0..9, do: {"#{i}", partition: rem(i, 2)}))
    first = pull(consumer, 10, 20_000)

    for broker <- [2, 3, 1] do
      :ok = Sandbox.inject(sandbox, {:coordinator, options[:group_id], broker})
      publish(cluster, topic, for(i <- 0..9, do: {"b#{broker}-#{i}", partition: rem(i, 2)}))
      messages = pull(consumer, 10, 30_000)
      assert Enum.all?(messages, &(&1.attempt == 1))
      assert Kmq.ack(messages, sync: true) == :ok

      eventually(
        fn ->
          info = Handle.info(handle(consumer))

          assert Enum.all?(
                   info.partitions,
                   &(&1.state == :retired or &1.committed == &1.position)
                 )

          assert Enum.count(info.partitions, &(&1.state == :assigned)) == 2
        end,
        20_000
      )
    end

    # What was in work before all that is still this consumer's.
    assert Kmq.ack(first, sync: true) == :ok
  end

  test "one partition of the marker topic cannot be written: the others go on, its commit stands still",
       %{cluster: cluster, sandbox: sandbox} do
    topic = queue(cluster, 2)
    # The sandbox gives nobody longer than its session for a rebalance.
    options = options(cluster, topic, tracker: :external, drain_timeout: 500)
    markers = Kmq.Topics.marker_topic(topic, options[:group_id])
    {:ok, _} = Kmq.Topics.create(options)
    # The queue stays where it is; the markers of partition 1 go to a broker that is about to go.
    for p <- 0..1, do: :ok = Sandbox.inject(sandbox, {:partition_leader, topic, p, 1})
    :ok = Sandbox.inject(sandbox, {:partition_leader, markers, 0, 1})
    :ok = Sandbox.inject(sandbox, {:partition_leader, markers, 1, 3})
    :ok = Sandbox.inject(sandbox, {:coordinator, options[:group_id], 1})
    publish(cluster, topic, for(i <- 0..19, do: {"#{i}", partition: rem(i, 2)}))
    :ok = Sandbox.inject(sandbox, {:broker_down, 3})

    consumer = consumer(options)
    messages = pull(consumer, 10, 20_000)
    assert Enum.uniq(Enum.map(messages, & &1.partition)) == [0]
    handle = handle(consumer)

    eventually(
      fn ->
        parts = Map.new(Handle.info(handle).partitions, &{&1.partition, &1})
        assert %{committed: 10, waiting: 0} = parts[0]
        assert %{waiting: 10, handed_out: 0, open: 0} = parts[1]
        assert parts[1].committed <= 0
      end,
      10_000
    )

    assert Kmq.ack(messages, sync: true) == :ok

    # A member joins before the reports have come: what was only sent is the group's again.
    second = consumer(options)
    eventually(fn -> assigned(second) == 1 and assigned(consumer) == 1 end, 30_000)
    :ok = Sandbox.inject(sandbox, {:broker_up, 3})

    rest = eventually(fn -> with([] <- rest([consumer, second]), do: nil) end, 40_000)
    rest = rest ++ more([consumer, second], 10 - length(rest))
    assert Enum.sort(Enum.map(rest, & &1.offset)) == Enum.to_list(0..9)
    assert Enum.all?(rest, &(&1.partition == 1 and &1.attempt == 1))
    assert Kmq.ack(rest) == :ok
  end

  defp assigned(consumer),
    do: Enum.count(Handle.info(handle(consumer)).partitions, &(&1.state == :assigned))

  defp rest(consumers), do: Enum.flat_map(consumers, &Consumer.pull(&1, max: 100))

  defp more(_consumers, 0), do: []

  defp more(consumers, n) do
    messages = eventually(fn -> with([] <- rest(consumers), do: nil) end, 40_000)
    messages ++ more(consumers, n - length(messages))
  end

  test "client.rack reaches the library", %{cluster: cluster} do
    topic = queue(cluster, 1)
    level = Logger.level()
    Logger.configure(level: :debug)
    on_exit(fn -> Logger.configure(level: level) end)

    log =
      capture_log(fn ->
        consumer =
          consumer(
            options(cluster, topic,
              kafka_config: [consumer: ["client.rack": "eu-1a", debug: "conf"]]
            )
          )

        eventually(fn -> assigned(consumer) == 1 end, 20_000)
      end)

    assert log =~ ~r/client\.rack\s*=\s*eu-1a/
  end
end
