defmodule Kmq.TrackerTest do
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Tracker}

  setup %{cluster: cluster} do
    topic = queue(cluster, 2)
    options = options(cluster, topic, lease: 1_000)
    test = self()

    Kmq.Telemetry.put_backend(__MODULE__.Listener)
    :persistent_term.put(__MODULE__.Listener, test)

    on_exit(fn ->
      Kmq.Telemetry.put_backend(nil)
      eventually(fn -> DynamicSupervisor.count_children(Kmq.TrackerSupervisor).active == 0 end)
    end)

    %{topic: topic, options: options}
  end

  defmodule Listener do
    def execute(event, measurements, metadata) do
      send(:persistent_term.get(__MODULE__), {event, measurements, metadata})
      :ok
    end
  end

  # The options as a tracker takes them.
  defp start_tracker(options, id \\ :tracker) do
    options = Keyword.drop(options, [:fetch_config, :group_config])
    start_supervised!(Supervisor.child_spec({Tracker, options}, id: id))
  end

  defp running(tracker) do
    eventually(fn -> match?({:ok, %{state: :running}}, Tracker.info(tracker)) end)
    {:ok, info} = Tracker.info(tracker)
    info
  end

  defp alive?(os_pid), do: File.exists?("/proc/#{os_pid}") and not zombie?(os_pid)

  defp zombie?(os_pid) do
    case File.read("/proc/#{os_pid}/stat") do
      {:ok, stat} -> stat =~ ~r/\) Z /
      _gone -> true
    end
  end

  defp kill(os_pid, signal \\ "KILL"), do: System.cmd("kill", ["-#{signal}", "#{os_pid}"])

  describe "the program" do
    test "runs, answers, and is gone after stop", %{options: options} do
      tracker = start_tracker(options)
      info = running(tracker)
      assert Tracker.ping(tracker) == :pong
      assert alive?(info.os_pid)
      stop_supervised!(:tracker)
      eventually(fn -> not alive?(info.os_pid) end, 2_500)
    end

    test "is started again when it is killed", %{options: options} do
      tracker = start_tracker(options)
      %{os_pid: first} = running(tracker)
      kill(first)
      assert_receive {[:kmq, :tracker, :stop], _, %{reason: {:exit_status, _}}}, 5_000
      eventually(fn -> match?({:ok, %{os_pid: pid}} when pid != first, Tracker.info(tracker)) end)
      assert Process.alive?(tracker)
    end

    test "ends within two seconds when its owner is killed", %{options: options} do
      Process.flag(:trap_exit, true)
      {:ok, tracker} = Tracker.start_link(Keyword.drop(options, [:fetch_config, :group_config]))
      %{os_pid: os_pid} = running(tracker)
      Process.exit(tracker, :kill)
      eventually(fn -> not alive?(os_pid) end, 2_500)
    end

    test "takes SIGTERM for an orderly end, and comes again", %{options: options} do
      tracker = start_tracker(options)
      %{os_pid: first} = running(tracker)
      kill(first, "TERM")
      assert_receive {[:kmq, :tracker, :stop], _, %{reason: {:exit_status, 0}}}, 5_000
      eventually(fn -> match?({:ok, %{os_pid: pid}} when pid != first, Tracker.info(tracker)) end)
    end
  end

  describe "sharing" do
    test "users of one configuration share a tracker; the last one takes it along", %{
      options: options
    } do
      {:ok, config} = Config.new(options, :consumer)
      {:ok, _} = Kmq.Topics.prepare(config)
      users = for _ <- 1..2, do: spawn(fn -> Process.sleep(:infinity) end)
      assert [{:ok, tracker}, {:ok, tracker}] = Enum.map(users, &Tracker.acquire(config, &1))
      %{os_pid: os_pid} = running(tracker)
      monitor = Process.monitor(tracker)

      Process.exit(hd(users), :kill)
      refute_receive {:DOWN, ^monitor, _, _, _}, 1_000
      Process.exit(List.last(users), :kill)
      assert_receive {:DOWN, ^monitor, :process, _, :normal}, 5_000
      eventually(fn -> not alive?(os_pid) end, 2_500)
    end

    test "another group has another one", %{options: options} do
      {:ok, config} = Config.new(options, :consumer)

      {:ok, other} =
        Config.new(Keyword.put(options, :group_id, options[:group_id] <> "2"), :consumer)

      user = spawn(fn -> Process.sleep(:infinity) end)
      {:ok, one} = Tracker.acquire(config, user)
      {:ok, two} = Tracker.acquire(other, user)
      assert one != two
      Process.exit(user, :kill)
    end
  end

  describe "redelivery" do
    test "what is not acknowledged comes again, then goes to the dead letter topic, byte-equal",
         %{
           cluster: cluster,
           topic: topic,
           options: options
         } do
      options =
        Keyword.merge(options, max_redeliveries: 1, max_processing_time: 1_500, tracker: :external)

      tracker = start_tracker(options)

      messages = [
        {"one", [partition: 0, key: "k", headers: [{"a", <<0, 1>>}, {"n", nil}, {"e", ""}]]},
        {nil, [partition: 1, key: "", headers: [{"a", "1"}, {"a", "2"}]]}
      ]

      publish(cluster, topic, messages)
      consumer = consumer(options)
      first = pull(consumer, 2)
      assert Enum.map(first, & &1.attempt) == [1, 1]
      again = pull(consumer, 2, 30_000)
      assert Enum.map(again, & &1.attempt) == [2, 2]
      assert Enum.map(again, & &1.deliveries) == [2, 2]

      dead = await_records(cluster, topic <> "__undelivered", 2, 2, 30_000)

      assert [%{partition: 0, key: "k", value: "one"}, %{partition: 1, key: "", value: nil}] =
               dead

      for {record, {_value, options}} <- Enum.zip(dead, messages) do
        {ours, users} = split_headers(record)
        assert users == options[:headers]
        ours = Map.new(ours)
        assert ours["kmq-redelivery-count"] == <<2>>
        assert ours["kmq-deliveries"] == "2"
        assert ours["kmq-cause"] == "timeout" or ours["kmq-cause"] == "crash"
        assert ours["kmq-origin"] =~ ~r"^#{topic}/#{record.partition}/0/\d+$"
      end

      assert_receive {[:kmq, :redelivered], %{count: _, late_ms: late},
                      %{topic: ^topic, cause: _}},
                     1_000

      assert late >= 0
      assert_receive {[:kmq, :dead_lettered], %{count: _}, %{topic: ^topic}}, 5_000

      eventually(fn ->
        {:ok, info} = Tracker.info(tracker)

        info.dead_lettered == 2 and info.redelivered == 2 and
          Enum.all?(info.partitions, &(&1.open == 0 and &1.committed == &1.position))
      end)
    end

    test "an idle marker topic is committed to its end; a restart reads its own CLOCKs only", %{
      cluster: cluster,
      topic: topic,
      options: options
    } do
      publish(cluster, topic, for(i <- 1..20, do: {"#{i}", partition: rem(i, 2)}))
      options = Keyword.put(options, :tracker, :external)
      start_tracker(options, :first)
      consumer = consumer(options)
      consumer |> pull(20) |> Enum.each(&(:ok = Kmq.ack(&1)))
      markers = Config.default_marker_topic(topic, options[:group_id])

      eventually(fn ->
        committed = committed(cluster, Tracker.tracker_group(options[:group_id]), markers, 2)

        committed ==
          for(p <- 0..1, do: {p, Kmq.Test.RawLog.end_offset(cluster.hosts, markers, p)})
      end)

      stop_supervised!(:first)
      tracker = start_tracker(options, :second)

      eventually(
        fn ->
          {:ok, info} = Tracker.info(tracker)

          length(info.partitions) == 2 and
            Enum.all?(info.partitions, &(&1.state == :ready and &1.read == 1))
        end,
        15_000
      )
    end
  end

  test "bad options are refused by name", %{options: options} do
    assert {:error, %Kmq.Error{reason: :invalid_option, message: message}} =
             Tracker.start_link(
               options
               |> Keyword.drop([:fetch_config, :group_config])
               |> Keyword.put(:redelivery_rat, 1)
             )

    assert message =~ "redelivery_rate"
  end

  test "a sandbox has no transactions, and says so", %{options: options} do
    options =
      options
      |> Keyword.drop([:fetch_config, :group_config])
      |> Keyword.put(:redelivery, :transactional)

    assert {:error, %Kmq.Error{reason: :invalid_option, message: message}} =
             Tracker.start_link(options)

    assert message =~ ":redelivery is :transactional, and a sandbox has no transactions"
  end
end
