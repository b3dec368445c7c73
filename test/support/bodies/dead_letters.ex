defmodule Kmq.Test.Bodies.DeadLetters do
  @moduledoc false
  # Dead letters are looked at and sent back, on any cluster.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.{Consumer, DeadLetters}

  defp where(cluster), do: [hosts: cluster.hosts]

  # n rejected messages, their number as key, every third for another reason; the consumer goes on.
  defp dead(cluster, n, extra \\ []) do
    topic = queue(cluster, 2)
    options = options(cluster, topic, extra)

    publish(
      cluster,
      topic,
      for(
        i <- 1..n,
        do: {"v#{i}", key: "#{i}", partition: rem(i, 2), headers: [{"h", "#{i}"}], ttl: 60_000}
      )
    )

    consumer = consumer(options)

    for message <- pull(consumer, n) do
      third = rem(String.to_integer(message.key), 3) == 0
      assert Kmq.reject(message, if(third, do: "third", else: "other")) == :ok
    end

    await_records(cluster, topic <> "__undelivered", 2, n)
    {topic, consumer, options}
  end

  body "each dead letter tells its end", %{cluster: cluster} do
    {topic, _consumer, options} = dead(cluster, 6)
    letters = topic |> DeadLetters.stream(where(cluster)) |> Enum.sort_by(& &1.key)
    assert Enum.map(letters, & &1.key) == ~w(1 2 3 4 5 6)

    for letter <- letters do
      assert letter.topic == topic <> "__undelivered"
      assert letter.value == "v" <> letter.key
      assert {letter.cause, letter.attempts, letter.deliveries} == {"rejected", 1, 1}
      assert letter.group == options[:group_id]
      assert {^topic, partition, _offset, _ts} = letter.origin
      assert partition == rem(String.to_integer(letter.key), 2)
    end

    assert DeadLetters.show(topic, hd(letters).partition, hd(letters).offset, where(cluster)) ==
             {:ok, hd(letters)}

    assert {:error, %{reason: :not_found}} = DeadLetters.show(topic, 0, 1_000, where(cluster))

    filtered =
      &Enum.sort(
        for letter <- DeadLetters.stream(topic, where(cluster) ++ [filter: &1]), do: letter.key
      )

    assert filtered.(key: "4") == ["4"]
    assert filtered.(headers: [{"h", "5"}]) == ["5"]
    assert filtered.(attempts: 1..3, cause: ["rejected", "crash"]) == ~w(1 2 3 4 5 6)
    assert filtered.(since: DateTime.utc_now()) == []
    assert filtered.(until: DateTime.utc_now(), origin: topic) == ~w(1 2 3 4 5 6)
    assert filtered.(&(&1.error == "third")) == ["3", "6"]
    assert_raise ArgumentError, fn -> filtered.(cuase: "crash") end
  end

  body "a redrive sends back what it is asked to, once, and as new messages", %{cluster: cluster} do
    {topic, consumer, options} = dead(cluster, 9, max_redeliveries: 0)
    self = self()
    redrive = &DeadLetters.redrive(topic, where(cluster) ++ &1)

    assert redrive.(dry_run: true) == {:ok, %{read: 9, redriven: 9, skipped: 0, total: 9}}
    filter = [headers: [{"h", "4"}]]
    assert {:ok, %{read: 9, redriven: 1, skipped: 8}} = redrive.(filter: filter)
    assert {:ok, %{read: 0, redriven: 0, total: 0}} = redrive.(filter: filter)
    [four] = pull(consumer, 1)
    assert {four.key, four.value, four.attempt, four.deliveries} == {"4", "v4", 1, 1}
    assert {^topic, 0, _, _} = four.id
    headers = Map.new(four.headers)
    assert headers["kmq-redriven"] =~ topic <> "__undelivered/0/"
    assert headers["kmq-group"] == options[:group_id]
    refute Map.has_key?(headers, "kmq-error") or Map.has_key?(headers, "kmq-expires")

    # It may fail again, and is the same message by its id.
    assert Kmq.reject(four, "again") == :ok
    await_records(cluster, topic <> "__undelivered", 2, 10)

    # In two parts: the second one goes on where the first one stopped.
    assert redrive.(max: 4, progress: &send(self, {:progress, &1})) ==
             {:ok, %{read: 4, redriven: 4, skipped: 0, total: 10}}

    assert_received {:progress, %{read: 4, total: 10}}
    # Of those that match the second one is left for the next time, with all behind it.
    assert {:ok, %{read: read, redriven: 1, skipped: skipped, total: 10}} =
             redrive.(filter: &(&1.key in ["4", "5", "6"]), max: 1, dry_run: true)

    assert read == skipped + 1 and read < 10
    assert redrive.(rate: 50) == {:ok, %{read: 6, redriven: 6, skipped: 0, total: 6}}
    assert {:ok, %{redriven: 0}} = redrive.([])
    back = pull(consumer, 10)
    keys = Enum.sort(Enum.map(back, & &1.key))
    assert keys == Enum.sort(~w(1 2 3 4 4 5 6 7 8 9))
    assert Enum.all?(back, &(&1.attempt == 1))
    assert Kmq.ack(back, sync: true) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 300) == []

    # Each kind of filter, counted only.
    dry = fn filter ->
      {:ok, summary} = redrive.(filter: filter, dry_run: true)
      {summary.redriven, summary.skipped}
    end

    began = List.last(Enum.sort(for l <- DeadLetters.stream(topic, where(cluster)), do: l.ts))
    at = DateTime.from_unix!(began, :millisecond)
    after_all = DateTime.add(at, 1, :second)
    assert dry.(key: "4") == {2, 8}
    assert dry.(headers: [{"h", "5"}]) == {1, 9}
    assert dry.(cause: "rejected") == {10, 0}
    assert dry.(cause: ["crash", "failed"]) == {0, 10}
    assert dry.(attempts: 1) == {10, 0}
    assert dry.(attempts: 2..9) == {0, 10}
    assert dry.(since: after_all) == {0, 10}
    assert dry.(until: after_all, since: ~U[2020-01-01 00:00:00Z]) == {10, 0}
    assert dry.(group: options[:group_id], origin: topic) == {10, 0}
    assert dry.(group: "another") == {0, 10}

    # Elsewhere, for whoever reads there.
    other = queue(cluster, 1, "other")
    assert {:ok, %{redriven: 2}} = redrive.(to: other, filter: [key: "4", attempts: 1])
    # the same filter in other words
    assert {:ok, %{redriven: 0}} = redrive.(to: other, filter: [attempts: 1, key: "4"])

    moved =
      Enum.to_list(DeadLetters.stream("other", where(cluster) ++ [dead_letter_topic: other]))

    assert Enum.map(moved, &{&1.key, &1.group}) == [{"4", nil}, {"4", nil}]
    assert_raise ArgumentError, fn -> redrive.(filter: fn _ -> true end) end
    assert_raise ArgumentError, fn -> redrive.(to: topic <> "__undelivered") end

    # A sandbox makes each topic that it is asked about.
    if cluster.kind == :kafka do
      assert {:error, %{reason: :topic_missing}} =
               DeadLetters.redrive(unique("no"), where(cluster))
    end
  end

  body "what has expired lives again when it is sent back, by a time of its own and by its pipeline's",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    old = System.os_time(:millisecond) - 60_000
    publish(cluster, topic, [{"old", timestamp: old}, {"short", ttl: 1}, "fresh"])
    consumer = consumer(options(cluster, topic, ttl: 30_000, max_redeliveries: 1, backoff: [0]))
    [fresh] = pull(consumer, 1)
    assert {fresh.value, Kmq.ack(fresh)} == {"fresh", :ok}
    await_records(cluster, topic <> "__undelivered", 1, 2)
    letters = Enum.to_list(DeadLetters.stream(topic, where(cluster)))
    assert Enum.map(letters, & &1.cause) == ["expired", "expired"]

    assert {:ok, %{redriven: 2}} = DeadLetters.redrive(topic, where(cluster))
    back = pull(consumer, 2)
    # also when it fails and comes once more
    assert Kmq.retry(back) == :ok
    again = pull(consumer, 2)
    assert Enum.sort(for m <- again, do: {m.value, m.attempt}) == [{"old", 2}, {"short", 2}]
    assert Enum.sort(for m <- again, do: m.id) == Enum.sort(for l <- letters, do: l.origin)
    assert Kmq.ack(again, sync: true) == :ok
  end

  body "where topics share a dead letter topic, each gets its own back", %{cluster: cluster} do
    dead = queue(cluster, 1, "dead")
    topics = for name <- ["a", "b"], do: queue(cluster, 1, name)
    consumer = consumer(options(cluster, topics, dead_letter_topic: dead))
    for topic <- topics, do: publish(cluster, topic, ["of " <> topic])
    assert Kmq.reject(pull(consumer, 2), "no") == :ok
    await_records(cluster, dead, 1, 2)
    redrive = &DeadLetters.redrive(&1, where(cluster) ++ [dead_letter_topic: dead])

    for topic <- topics do
      assert redrive.(topic) == {:ok, %{read: 2, redriven: 1, skipped: 1, total: 2}}
      [back] = pull(consumer, 1)
      assert {back.topic, back.value, Kmq.ack(back)} == {topic, "of " <> topic, :ok}
      assert {:ok, %{total: 0}} = redrive.(topic)
    end

    assert Consumer.pull(consumer, max: 5, wait: 300) == []
  end

  body "a dead letter copied back by hand with all its headers dies with its next failure, or is done as any other",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    options = options(cluster, topic, max_redeliveries: 1, backoff: [0])
    consumer = consumer(options)
    publish(cluster, topic, for(i <- 1..10, do: {"v#{i}", key: "#{i}", headers: [{"h", "#{i}"}]}))
    assert Kmq.retry(pull(consumer, 10)) == :ok
    assert Kmq.retry(pull(consumer, 10), reason: "twice") == :ok
    dead = topic <> "__undelivered"
    await_records(cluster, dead, 1, 10)
    letters = Enum.to_list(DeadLetters.stream(topic, where(cluster)))
    assert Enum.all?(letters, &({&1.cause, &1.attempts} == {"failed", 2}))

    Enum.each(letters, &by_hand(cluster, topic, &1))
    back = pull(consumer, 10)
    # Its count and where it was first are as they were; what went wrong is told, too.
    assert Enum.all?(back, &(&1.attempt == 3))
    assert Enum.sort(for m <- back, do: m.id) == Enum.sort(for l <- letters, do: l.origin)
    {fail, good} = Enum.split(back, 5)
    assert Kmq.ack(good, sync: true) == :ok
    assert Kmq.retry(fail, sync: true) == :ok
    await_records(cluster, dead, 1, 15)
    assert Consumer.pull(consumer, max: 10, wait: 300) == []
    again = topic |> DeadLetters.stream(where(cluster)) |> Enum.drop(10)
    assert Enum.sort(for l <- again, do: l.key) == Enum.sort(for m <- fail, do: m.key)
    assert Enum.all?(again, &({&1.cause, &1.attempts} == {"failed", 3}))

    assert Enum.all?(
             again,
             &(List.keyfind(&1.headers, "h", 0) == {"h", &1.key} and &1.origin != nil)
           )

    # A redrive of the same ones begins their counts again.
    assert {:ok, %{redriven: 5}} =
             DeadLetters.redrive(topic, where(cluster) ++ [filter: [attempts: 3]])

    assert Enum.map(pull(consumer, 5), & &1.attempt) == [1, 1, 1, 1, 1]
  end

  # By kcat where it is installed: nothing of ours looks at what it writes.
  defp by_hand(cluster, topic, letter) do
    case System.find_executable("kcat") do
      nil ->
        publish(cluster, topic, [{letter.value, key: letter.key, headers: letter.headers}])

      kcat ->
        headers = for {name, value} <- letter.headers, do: ["-H", "#{name}=#{value}"]

        args =
          ["-P", "-q", "-b", cluster.hosts, "-t", topic, "-p", "0", "-k", letter.key] ++
            Enum.concat(headers)

        file = Path.join(System.tmp_dir!(), unique("letter"))
        File.write!(file, letter.value)
        assert {_, 0} = System.cmd(kcat, args ++ [file], stderr_to_stdout: true)
        File.rm!(file)
    end
  end
end
