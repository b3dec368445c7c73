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
    assert {:ok, %{redriven: 4}} = redrive.(max: 4, progress: &send(self, {:progress, &1}))
    assert_received {:progress, %{total: 10}}
    assert {:ok, %{redriven: 6}} = redrive.(rate: 50)
    assert {:ok, %{redriven: 0}} = redrive.([])
    back = pull(consumer, 10)
    keys = Enum.sort(Enum.map(back, & &1.key))
    assert keys == Enum.sort(~w(1 2 3 4 4 5 6 7 8 9))
    assert Enum.all?(back, &(&1.attempt == 1))
    assert Kmq.ack(back, sync: true) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 300) == []

    # Elsewhere, for whoever reads there.
    other = queue(cluster, 1, "other")
    assert {:ok, %{redriven: 2}} = redrive.(to: other, filter: [key: "4"])

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
end
