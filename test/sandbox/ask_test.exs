defmodule Kmq.Sandbox.AskTest do
  # Questions to the wrong process, to one that has ended, and what nobody knows: an error in the caller, and everybody lives on.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Consumer, Error, Publisher, Sandbox, Tracker}

  # {the kind it takes, its name, the call}
  @calls [
    {Consumer, "pull/2", &Consumer.pull/1},
    {Consumer, "flush/2", &Consumer.flush/1},
    {Consumer, "stop/2", &Consumer.stop/1},
    {Publisher, "publish/4", &__MODULE__.publish/1},
    {Publisher, "publish_many/3", &__MODULE__.publish_many/1},
    {Publisher, "publish_async/4", &__MODULE__.publish_async/1},
    {Publisher, "publish_many_async/3", &__MODULE__.publish_many_async/1},
    {Publisher, "flush/2", &Publisher.flush/1},
    {Publisher, "queued/1", &Publisher.queued/1},
    {Publisher, "close/2", &Publisher.close/1},
    {Publisher, "Kmq.settle/3", &__MODULE__.settle/1},
    {Sandbox, "bootstrap/1", &Sandbox.bootstrap/1},
    {Sandbox, "create_topic/3", &__MODULE__.create_topic/1},
    {Sandbox, "create_topic/3", &__MODULE__.create_some_topic/1},
    {Sandbox, "inject/2", &__MODULE__.inject/1},
    {Sandbox, "stop/1", &Sandbox.stop/1},
    {Tracker, "info/1", &Tracker.info/1},
    {Tracker, "stop/1", &Tracker.stop/1}
  ]

  def publish(to), do: Publisher.publish(to, "t", "v")
  def publish_many(to), do: Publisher.publish_many(to, [{"t", "v"}])
  def publish_async(to), do: Publisher.publish_async(to, "t", "v")
  def publish_many_async(to), do: Publisher.publish_many_async(to, [{"t", "v"}])
  def settle(to), do: Kmq.settle(to, "kmq1.x", :ack)
  def create_topic(to), do: Sandbox.create_topic(to, "t")
  def create_some_topic(to), do: Sandbox.create_topic(to, "t", 1)
  def inject(to), do: Sandbox.inject(to, {:rtt, 1, 0})

  defp asked(_kind, "Kmq." <> _ = function), do: function
  defp asked(kind, function), do: "#{inspect(kind)}.#{function}"

  defp start(module, options) do
    start_supervised!(%{
      id: make_ref(),
      start: {module, :start_link, [options]},
      restart: :temporary
    })
  end

  # One of each kind.
  defp all(cluster) do
    topic = queue(cluster, 1)
    options = options(cluster, topic, tracker: :external)
    consumer = consumer(options)

    # Its topics are there by now.
    of_tracker = Keyword.take(options, [:hosts, :topics, :group_id, :create_topics])

    %{
      Consumer => consumer,
      Publisher => start(Publisher, hosts: cluster.hosts),
      Sandbox => start(Sandbox, []),
      Tracker => start(Tracker, of_tracker)
    }
  end

  test "a call to a process of another kind is refused in the caller", %{cluster: cluster} do
    ours = all(cluster)
    {:ok, agent} = Agent.start_link(fn -> 1 end)

    for {kind, function, call} <- @calls,
        {other, pid} <- Map.put(ours, Agent, agent),
        other != kind do
      error = assert_raise(ArgumentError, fn -> call.(pid) end)
      is = if other == Agent, do: "no process of Kmq", else: "a #{inspect(other)}"

      assert error.message ==
               "#{asked(kind, function)} takes a #{inspect(kind)}, and #{inspect(pid)} is #{is}"

      assert Process.alive?(pid)
    end

    # What is started in place of another one has a name, too.
    Process.register(ours[Publisher], :kmq_ask_test_publisher)

    assert_raise ArgumentError, ~r/and :kmq_ask_test_publisher is a Kmq.Publisher/, fn ->
      Consumer.pull(:kmq_ask_test_publisher)
    end

    # As a pipeline's: its producers say whose they are.
    Process.register(agent, :kmq_ask_test_pipeline)
    Kmq.Info.register({:producer, {:kmq_ask_test_pipeline, 0}, "g"})

    assert_raise ArgumentError, ~r/and :kmq_ask_test_pipeline is a pipeline$/, fn ->
      Consumer.pull(:kmq_ask_test_pipeline)
    end

    for server <- [ours[Publisher], ours[Sandbox], ours[Tracker], agent],
        call <- [
          &Kmq.pause(&1, :all),
          &Kmq.resume(&1, {"t", 0}),
          &Kmq.seek(&1, {"t", 0}, :end),
          &Consumer.update_topics(&1, ["t"])
        ] do
      assert_raise ArgumentError, ~r/expected a consumer/, fn -> call.(server) end
      assert Process.alive?(server)
    end

    for server <- [ours[Sandbox], agent],
        do: assert_raise(ArgumentError, ~r/that runs on this node/, fn -> Kmq.info(server) end)
  end

  test "what can be no process is refused by name", %{cluster: cluster} do
    _ = cluster

    # A sandbox may be named by its addresses, too.
    for {kind, function, call} <- @calls,
        other <- [nil, true, 5, "x", [], %{}, {}, {:via, NoSuchModule, 1}, make_ref()],
        not (function == "create_topic/3" and other == "x") do
      error = assert_raise(ArgumentError, fn -> call.(other) end)

      assert error.message ==
               "#{asked(kind, function)} takes a #{inspect(kind)}, its pid or its name, got: #{inspect(other)}"
    end
  end

  @raising ["pull/2", "queued/1", "bootstrap/1"]

  test "one that has ended, or a name of nobody: closed", %{cluster: cluster} do
    _ = cluster
    {dead, monitor} = spawn_monitor(fn -> :ok end)
    assert_receive {:DOWN, ^monitor, _, _, _}

    for {_kind, function, call} <- @calls, server <- [dead, :nobody, {:global, :nobody}] do
      error =
        if function in @raising do
          assert_raise(Error, fn -> call.(server) end)
        else
          assert {:error, %Error{} = error} = call.(server)
          error
        end

      assert {function, error.reason} == {function, :closed}
      assert error.message =~ "is closed"
      if server != dead, do: assert(error.message =~ "nobody is registered as #{inspect(server)}")
    end

    for server <- [dead, :nobody, {:global, :nobody}],
        call <- [
          &Kmq.pause(&1, {"t", 0}),
          &Kmq.resume(&1, :all),
          &Kmq.seek(&1, {"t", 0}, :end),
          &Consumer.update_topics(&1, ["t"])
        ] do
      assert {:error, %Error{reason: :closed} = error} = call.(server)
      nobody = if server == dead, do: "", else: ": nobody is registered as #{inspect(server)}"
      assert error.message == "the consumer or pipeline is closed" <> nobody
    end
  end

  test "what is asked when it ends is answered", %{cluster: cluster} do
    consumer = consumer(options(cluster, queue(cluster, 1)))
    monitors = fn -> length(:sys.get_state(consumer).waiting) end

    waiting =
      for _ <- 1..2 do
        Task.async(fn ->
          try do
            Consumer.pull(consumer, wait: 60_000)
          rescue
            error in Error -> error
          end
        end)
      end

    eventually(fn -> assert monitors.() == 2 end)
    assert Consumer.stop(consumer) == :ok
    for task <- waiting, do: assert(%Error{reason: :closed} = Task.await(task))
    assert {:error, %Error{reason: :closed}} = Consumer.stop(consumer)
    assert {:error, %Error{reason: :closed}} = Consumer.flush(consumer)
  end

  # Its member of the group lives on, and a new producer takes it.
  test "a pipeline whose only producer is just started again", %{cluster: cluster} do
    config = Kmq.Config.new!(options(cluster, queue(cluster, 1)), :producer)
    {:ok, handle} = Kmq.Handle.open(config, {:kmq_ask_test_restarting, 0})
    on_exit(fn -> Kmq.Handle.close(handle, 5_000) end)
    info = Kmq.info(:kmq_ask_test_restarting)
    assert %{kind: :pipeline, members: [%{index: 0, connected?: true}]} = info
    assert info.group == config.group_id
    assert Kmq.pause(:kmq_ask_test_restarting, :all) == :ok
    assert Consumer.update_topics(:kmq_ask_test_restarting, config.topics) == :ok
  end

  # It may have something in work that the end waits for.
  test "who waits for messages when it ends is told at once, and can still settle what it has", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a"])
    consumer = consumer(options(cluster, topic, delivery: :offsets, drain_timeout: 20_000))

    working =
      Task.async(fn ->
        [message] = pull(consumer, 1)
        error = catch_error(Consumer.pull(consumer, wait: 60_000))
        {error.reason, Kmq.ack(message)}
      end)

    # It has its message, and waits for another.
    eventually(fn -> assert %{open: 1} = Kmq.info(consumer).total end, 20_000)
    eventually(fn -> assert [_] = :sys.get_state(consumer).waiting end)
    assert Consumer.stop(consumer) == :ok
    assert Task.await(working) == {:closed, :ok}
  end

  # What a process does not know, it says, or drops; also those that nobody is to know of.
  test "calls, casts and messages that nobody knows end no process", %{cluster: cluster} do
    ours = all(cluster)
    plain = consumer(options(cluster, queue(cluster, 1), delivery: :offsets))
    test = self()

    token =
      Kmq.Token.request(
        fn -> {:ok, %{token: "t", expires_in: 60_000}} end,
        {:kmq_ask_test, test}
      )

    assert_receive {:kmq_token, _, _}, scaled(5_000)
    queue = Kmq.Testing.start_queue!()

    handles =
      for {:native, _key} = key <- keys(), {pid, _} <- Registry.lookup(Kmq.Registry, key), do: pid

    writers =
      for {:letters, _handle} = key <- keys(),
          {pid, _} <- Registry.lookup(Kmq.Registry, key),
          do: pid

    others =
      for {module, _} = key when module in [Kmq.Token, Kmq.Testing.Watch] <- keys(),
          {pid, _} <- Registry.lookup(Kmq.Registry, key),
          do: pid

    assert length(handles) >= 2 and length(writers) >= 1 and length(others) >= 2

    pids =
      Map.values(ours) ++ [plain, Process.whereis(Kmq.Ordering)] ++ handles ++ writers ++ others

    for pid <- pids do
      monitor = Process.monitor(pid)

      assert {:error, %Error{reason: :unknown_call} = error} =
               GenServer.call(pid, {:what, "is this"})

      assert error.message =~ ~s(has no answer to {:what, "is this"})
      GenServer.cast(pid, :what)
      send(pid, :what)
      send(pid, {:DOWN, make_ref(), :process, self(), :normal})
      send(pid, {make_ref(), :late})
      assert {:error, %Error{}} = GenServer.call(pid, :again)
      refute_received {:DOWN, ^monitor, _, _, _}
      Process.demonitor(monitor, [:flush])
    end

    Process.demonitor(token, [:flush])
    assert Kmq.Testing.await_settled(queue, []) == []
    assert Publisher.queued(ours[Publisher]) == 0
    assert Consumer.pull(ours[Consumer]) == []
  end

  defp keys, do: Registry.select(Kmq.Registry, [{{:"$1", :_, :_}, [], [:"$1"]}])

  test "messages that are none, or were made by hand", %{cluster: cluster} do
    topic = queue(cluster, 1)
    consumer = consumer(options(cluster, topic))
    publish(cluster, topic, ["a", "b"])
    [a, b] = pull(consumer, 2)

    for bad <- [%{a | handle: nil}, %{a | handle: %{pid: self(), ref: make_ref()}}],
        call <- [
          &Kmq.ack/1,
          &Kmq.retry/1,
          &Kmq.release/1,
          &Kmq.reject/1,
          &Kmq.discard/1,
          &Kmq.leave/1,
          &Kmq.snooze(&1, 5),
          &Kmq.extend(&1, 5)
        ],
        messages <- [bad, [bad], [b, bad]] do
      assert_raise ArgumentError, ~r/expected a message that a Kmq.Consumer has handed out/, fn ->
        call.(messages)
      end
    end

    assert_raise ArgumentError, ~r/expected a message of Kmq/, fn ->
      Kmq.receipt(%{a | handle: nil})
    end

    for call <- [&Kmq.ack/1, &Kmq.reject/1, &Kmq.leave/1] do
      assert_raise ArgumentError, ~r/expected a Kmq.Message or a list of them/, fn ->
        call.([a | b])
      end
    end

    # One of an earlier life: its reference is of nobody.
    handle = %{a.handle | ref: make_ref()}
    actions = [&Kmq.ack/1, &Kmq.retry/1, &Kmq.leave/1, &Kmq.extend(&1, 5)]
    for call <- actions, do: assert(call.(%{a | handle: handle}) == {:error, :closed})

    for call <- actions do
      assert_raise ArgumentError, ~r/one of these was changed/, fn -> call.(%{a | slot: nil}) end
    end

    assert Kmq.ack([a, b], sync: true) == :ok
  end
end
