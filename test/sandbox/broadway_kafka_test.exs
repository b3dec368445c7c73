defmodule Kmq.Sandbox.BroadwayKafkaTest do
  # Errors that a broker answers with, under a pipeline with `delivery: :offsets`: the producer lives, and all goes on.
  use Kmq.Test.ClusterCase, on: :sandbox

  import ExUnit.CaptureLog

  alias Kmq.Test.{Checker, Host, Scene}

  defp start(options, handled) do
    host =
      Host.start(:stage_host, options, fn message ->
        :ets.insert(handled, {message.metadata.offset, self()})
        message
      end)

    {host, Host.producers(host)}
  end

  defp committed(cluster, options, topic),
    do: Checker.committed(cluster.hosts, options[:group_id], topic, 1)[0]

  test "errors that pass, of each kind of request: tried again, each message once, the same producer",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    options = options(cluster, topic, delivery: :offsets, on_failure: :ack, commit_interval: 20)
    handled = :ets.new(:handled, [:public, :duplicate_bag])

    # From the first request on.
    for {api, errors} <- [
          find_coordinator: [:coordinator_not_available, :transport],
          join_group: [:not_coordinator],
          offset_fetch: [:coordinator_load_in_progress]
        ],
        do: :ok = Kmq.Sandbox.inject(cluster.sandbox, {:request_errors, api, errors})

    publish(cluster, topic, for(i <- 0..99, do: "#{i}"))
    {host, producers} = start(options, handled)
    eventually(fn -> assert committed(cluster, options, topic) == 100 end, 40_000)

    for {api, errors, i} <- [
          {:fetch, [:not_leader_for_partition, :request_timed_out, :transport], 1},
          {:fetch, [:unknown_topic_or_part, :kafka_storage_error, :broker_not_available], 2},
          {:offset_commit, [:request_timed_out, :coordinator_load_in_progress, :transport], 3},
          {:offset_commit, [:not_coordinator, :coordinator_not_available], 4},
          {:heartbeat, [:coordinator_not_available, :request_timed_out], 5}
        ] do
      :ok = Kmq.Sandbox.inject(cluster.sandbox, {:request_errors, api, errors})
      publish(cluster, topic, for(j <- 0..19, do: "#{i} #{j}"))
      wanted = 100 + 20 * i

      eventually(
        fn -> assert {api, committed(cluster, options, topic)} == {api, wanted} end,
        40_000
      )
    end

    assert Host.producers(host) == producers
    offsets = handled |> :ets.tab2list() |> Enum.map(&elem(&1, 0)) |> Enum.sort()
    assert Enum.uniq(offsets) == Enum.to_list(0..199)
    assert length(offsets) == 200
    assert Host.stop(host) == :ok
  end

  test "commits that are refused for good: said, the producer lives, and the next ones count", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    options = options(cluster, topic, delivery: :offsets, on_failure: :ack, commit_interval: 20)
    handled = :ets.new(:handled, [:public, :duplicate_bag])
    publish(cluster, topic, for(i <- 0..9, do: "#{i}"))
    {host, producers} = start(options, handled)
    eventually(fn -> assert committed(cluster, options, topic) == 10 end, 40_000)

    log =
      capture_log(fn ->
        refused = [:group_authorization_failed, :offset_metadata_too_large]
        :ok = Kmq.Sandbox.inject(cluster.sandbox, {:request_errors, :offset_commit, refused})
        publish(cluster, topic, for(i <- 10..19, do: "#{i}"))
        eventually(fn -> assert :ets.info(handled, :size) == 20 end, 40_000)
        eventually(fn -> assert committed(cluster, options, topic) == 20 end, 40_000)
      end)

    assert log =~ "needs READ on that group"
    assert log =~ "OFFSET_METADATA_TOO_LARGE"
    assert Host.producers(host) == producers
    assert Host.stop(host) == :ok
  end

  # A commit that is due and cannot go out must not have the consumer's process polled again and again until it can.
  test "commits that the group refuses for a while: nothing spins until they are taken again", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)

    options = options(cluster, topic, commit_interval: 20, tracker: :external)
    publish(cluster, topic, ["first"])
    consumer = consumer(options)
    assert Kmq.ack(pull(consumer, 1), sync: true) == :ok
    refused = {:request_errors, :offset_commit, [:rebalance_in_progress]}
    :ok = Kmq.Sandbox.inject(cluster.sandbox, refused)
    Scene.listen()
    publish(cluster, topic, ["second"])
    assert Kmq.ack(pull(consumer, 1)) == :ok

    assert_receive {[:kmq, :error, :passing], _, %{error: %{reason: :rebalance_in_progress}}},
                   scaled(15_000)

    # Each hand-out makes a commit due; none goes out for 5 s.
    publish(cluster, topic, ["third"])
    assert Kmq.ack(pull(consumer, 1)) == :ok
    :kmq_nif.busy()
    Process.sleep(1_000)
    {_, polls, _, _} = List.keyfind(:kmq_nif.busy(), :consumer_poll, 0)
    assert polls < 100
    eventually(fn -> assert committed(cluster, options, topic) == 3 end, 20_000)
  end

  test "an acknowledger that raises leaves the producer alive, and the others' acks good", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)

    options =
      options(cluster, topic,
        delivery: :offsets,
        on_failure: :ack,
        commit_interval: 20,
        drain_timeout: 500
      )

    handled = :ets.new(:handled, [:public, :duplicate_bag])
    publish(cluster, topic, for(i <- 0..19, do: "#{i}"))

    host =
      Host.start(:stage_host, options, fn message ->
        :ets.insert(handled, {message.metadata.offset, self()})

        if message.metadata.offset == 7,
          do: %{message | acknowledger: {Host.Raising, nil, nil}},
          else: message
      end)

    producers = Host.producers(host)
    eventually(fn -> assert :ets.info(handled, :size) == 20 end, 40_000)
    # The one that nobody has settled holds the commit.
    eventually(fn -> assert committed(cluster, options, topic) == 7 end, 20_000)
    assert Host.producers(host) == producers
    assert Host.stop(host) == :ok
    assert committed(cluster, options, topic) == 7
  end
end
