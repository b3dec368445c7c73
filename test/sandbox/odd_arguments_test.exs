defmodule Kmq.Sandbox.OddArgumentsTest do
  # Every public function, and every option, with what nobody would give it, one argument at a time: an answer, or an error in words, soon;
  # never a clause that does not match, never an "argument error", and no process ends by it.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.{Config, Consumer, DeadLetters, Options, Publisher, Sandbox, Testing, Topics, Tracker}

  @odd [nil, :atom, true, -1, 0, 2 ** 70, 1.5, "", "x", <<255>>, "a\0b", 'abc', [], [[]], [nil]] ++
         [[1 | 2], ["x" | "y"], [a: 1], [{:a, 1}, :b], %{}, %{a: 1}, {}, {:a}, {1, 2, 3}] ++
         [{:via, Registry, {Kmq.Registry, 1}}, ~D[2026-01-01], URI.parse("x")]

  # What says nothing to a user.
  @raw ~r/argument error|badarg|errors were found|no function clause|protocol .* not implemented|construction of binary/

  setup %{cluster: cluster} do
    Process.flag(:trap_exit, true)
    topic = queue(cluster, 2)
    options = options(cluster, topic)
    consumer = consumer(options)
    publisher = start(Publisher, hosts: cluster.hosts)

    tracker =
      start(
        Tracker,
        Keyword.take(options, [:hosts, :topics, :create_topics]) ++ [group_id: unique("g")]
      )

    publish(cluster, topic, ["a", "b"])
    [message, other] = pull(consumer, 2)
    queue = Testing.start_queue!()
    ended = spawn(fn -> :ok end)

    %{
      ours: [consumer, publisher, tracker, cluster.sandbox],
      to: {cluster.sandbox, [hosts: cluster.hosts], topic, consumer, publisher, queue},
      message: message,
      odd:
        @odd ++
          [self(), ended, make_ref(), fn -> :ok end, %{other | slot: nil}, %{other | handle: nil}]
    }
  end

  defp start(module, options) do
    start_supervised!(%{
      id: make_ref(),
      start: {module, :start_link, [options]},
      restart: :temporary
    })
  end

  @tag timeout: 120_000
  test "functions", %{to: to, message: message, odd: odd, ours: ours} do
    {sandbox, where, topic, consumer, publisher, queue} = to
    receipt = Kmq.receipt(message)

    for fun <- [
          &Kmq.ack/1,
          &Kmq.ack(message, &1),
          &Kmq.retry/1,
          &Kmq.retry(message, &1),
          &Kmq.release/1,
          &Kmq.discard(message, &1),
          &Kmq.reject/1,
          &Kmq.reject(message, "no", &1),
          &Kmq.snooze(message, &1),
          &Kmq.extend(message, &1),
          &Kmq.extend(message, 5, &1),
          &Kmq.leave/1,
          &Kmq.receipt/1,
          &Kmq.settle(&1, receipt, :ack),
          &Kmq.settle(publisher, &1, :ack),
          &Kmq.settle(publisher, receipt, &1),
          &Kmq.settle(publisher, receipt, {:retry, &1}),
          &Kmq.settle(publisher, receipt, {:snooze, &1}),
          &Kmq.info/1,
          &Kmq.pause(&1, :all),
          &Kmq.pause(consumer, &1),
          &Kmq.pause(consumer, {&1, 0}),
          &Kmq.resume(consumer, {topic, &1}),
          &Kmq.seek(consumer, &1, :end),
          &Kmq.seek(consumer, {topic, 0}, &1),
          &Kmq.seek(consumer, {topic, 0}, {:timestamp, &1}),
          &Consumer.pull/1,
          &Consumer.pull(consumer, &1),
          &Consumer.flush(consumer, &1),
          &Consumer.stop(consumer, {:bad, &1}),
          &Consumer.update_topics(&1, [topic]),
          &Consumer.update_topics(consumer, {:bad, &1}),
          &Consumer.update_topics(consumer, [{:bad, &1}]),
          &Publisher.publish(&1, topic, "v"),
          &Publisher.publish(publisher, &1, "v"),
          &Publisher.publish(publisher, topic, "v", &1),
          &Publisher.publish_many(publisher, &1),
          &Publisher.publish_many(publisher, [{topic, "v"}, &1]),
          &Publisher.publish_many(publisher, [{topic, "v", &1}]),
          &Publisher.publish_many(publisher, [], &1),
          &Publisher.publish_async(publisher, &1, "v"),
          &Publisher.publish_many_async(publisher, [&1]),
          &Publisher.flush(publisher, &1),
          &Publisher.queued/1,
          &Publisher.close/1,
          &Topics.create/1,
          &Topics.check/1,
          &Topics.create_topic(&1, 1, where),
          &Topics.create_topic(topic, &1, where),
          &Topics.create_topic(topic, 1, &1),
          &Topics.create_topic(topic, 1, where ++ [config: &1]),
          &Topics.create_topic(topic, 1, where ++ [replication: &1]),
          &Topics.delete_topic(topic, &1),
          &Topics.marker_topic(&1, "g"),
          &Topics.marker_topic(topic, &1),
          &Topics.dead_letter_topic/1,
          &DeadLetters.stream(&1, where),
          &DeadLetters.stream(topic, &1),
          &DeadLetters.show(topic, &1, 0, where),
          &DeadLetters.show(topic, 0, &1, where),
          &DeadLetters.redrive(topic, where ++ [filter: &1, dry_run: true, group: "g"]),
          &DeadLetters.redrive(topic, where ++ [rate: &1, dry_run: true]),
          &Sandbox.start_link/1,
          &Sandbox.start_link(topics: {:bad, &1}),
          &Sandbox.bootstrap/1,
          &Sandbox.find/1,
          &Sandbox.create_topic(&1, topic),
          &Sandbox.create_topic(sandbox, {:bad, &1}),
          &Sandbox.create_topic(sandbox, topic, &1),
          &Sandbox.inject(&1, {:rtt, 1, 0}),
          &Sandbox.inject(sandbox, &1),
          &Sandbox.inject(sandbox, {:bad, &1}),
          &Sandbox.inject(sandbox, {:rtt, &1, :bad}),
          &Sandbox.inject(sandbox, {:request_errors, &1, []}),
          &Sandbox.inject(sandbox, {:topic_error, &1, :no_error}),
          &Tracker.info/1,
          &Tracker.start_link/1,
          &Tracker.child_spec/1,
          &Consumer.start_link/1,
          &Consumer.child_spec/1,
          &Publisher.start_link/1,
          &Publisher.child_spec/1,
          &Testing.start_queue!({:bad, &1}),
          &Testing.start_queue!(sandbox: {:bad, &1}),
          &Testing.options/1,
          &Testing.options(queue, &1),
          &Testing.publish(queue, [{"v", &1}]),
          &Testing.publish(queue, [{:bad, &1}]),
          &Testing.status(&1, {0, 0}),
          &Testing.status(queue, &1),
          &Testing.await_acked(queue, &1, timeout: 0),
          &Testing.await_settled(queue, [], &1),
          &Testing.await_redelivered(queue, {0, 0}, &1, timeout: 0),
          &Kmq.Backoff.parse/1
        ],
        odd <- odd,
        do: tell(fun, odd)

    for pid <- ours, do: assert(Process.alive?(pid))
    assert is_list(Consumer.pull(consumer))
  end

  test "options", %{to: {_sandbox, where, topic, _consumer, publisher, _queue}, odd: odd} do
    base = where ++ [topics: [topic], group_id: "g"]

    groups =
      for {group, spec} <- Options.schema(:producer),
          {name, _} <- spec[:keys] || [],
          do: {group, name}

    funs =
      for(
        name <- Keyword.keys(Options.schema(:producer)),
        do: &Config.new(Keyword.put(base, name, &1))
      ) ++
        for(
          name <- Keyword.keys(Options.schema(:publisher)),
          do: &Config.publisher(Keyword.put(where, name, &1))
        ) ++
        for(
          name <- Keyword.keys(Options.schema(:publish)),
          do: &Publisher.publish_async(publisher, topic, "v", [{name, &1}])
        ) ++
        for({group, name} <- groups, do: &Config.new(Keyword.put(base, group, [{name, &1}]))) ++
        for(
          name <- [:common, :consumer, :producer, :tracker],
          do: &Config.new(base ++ [kafka_config: [{name, &1}]])
        )

    for fun <- funs, odd <- odd, do: tell(fun, odd)
    assert Process.alive?(publisher)
  end

  defp tell(fun, odd) do
    began = System.monotonic_time(:millisecond)
    said = said(fun, odd)
    shown = "#{inspect(fun)} of #{inspect(odd, limit: 5)}: #{said}"
    refute said =~ @raw, shown
    assert System.monotonic_time(:millisecond) - began < scaled(5_000), shown
  end

  defp said(fun, odd) do
    case fun.(odd) do
      {:error, %Kmq.Error{message: message}} -> message
      {:ok, pid} when is_pid(pid) -> GenServer.stop(pid) |> inspect()
      _answer -> ""
    end
  rescue
    error in [ArgumentError, Kmq.Error, Kmq.Testing.TimeoutError] -> Exception.message(error)
  end
end
