defmodule Kmq.OrderingTest do
  use ExUnit.Case

  import Kmq.Test.Eventually
  alias Kmq.Ordering
  alias OffBroadway.Kmq.Producer

  doctest Kmq.Ordering

  @options [hosts: [localhost: 1], topics: ["t"], group_id: "g"]

  defp broadway(options, extra) do
    Keyword.merge(
      [
        name: make_ref(),
        producer: [module: {Producer, @options ++ options}, concurrency: 1],
        processors: [default: [concurrency: 4]],
        batchers: []
      ],
      extra
    )
  end

  defp lane(number, size, partition),
    do:
      Ordering.lane(%{metadata: %{topic: "t", partition: partition}}, {:partition, number, size})

  # A stand-in for a handle: it holds partitions as long as it lives.
  defp holder(pipeline, index, places) do
    test = self()

    pid =
      spawn_link(fn ->
        :ok = Ordering.assigned(pipeline, index, places)
        send(test, {:held, self()})

        receive do
          {:revoke, places, busy} ->
            :ok = Ordering.revoked(pipeline, index, places, busy)
            send(test, {:revoked, self()})
        end

        receive do
          :never -> :ok
        end
      end)

    assert_receive {:held, ^pid}
    pid
  end

  defp stop(pid) do
    Process.unlink(pid)
    Process.exit(pid, :kill)
  end

  test "a partition_by of the user's own is refused where it would break the order, and says what to do" do
    own = fn _message -> 0 end

    for ordering <- [:partition, :key],
        {where, extra} <- [
          {"processors :default", [processors: [default: [concurrency: 2, partition_by: own]]]},
          {"batchers :sql", [batchers: [sql: [concurrency: 2, partition_by: own]]]}
        ] do
      assert_raise ArgumentError,
                   "the option :partition_by of #{where} would break the order that ordering: #{inspect(ordering)} keeps " <>
                     "(delivery: :offsets means ordering: :partition): leave it out, or set ordering: :none and keep an order of your own",
                   fn ->
                     Producer.prepare_for_start(Some, broadway([ordering: ordering], extra))
                   end
    end

    assert_raise ArgumentError, ~r/^the option :partition_by would break the order/, fn ->
      Producer.prepare_for_start(Some, broadway([ordering: :key], partition_by: own))
    end
  end

  test "a host that does not call prepare_for_start/2 cannot keep an order" do
    assert_raise ArgumentError,
                 "ordering: :key needs a host that calls prepare_for_start/2, as Broadway does",
                 fn -> Producer.init(@options ++ [ordering: :key]) end
  end

  test "a message without a place in Kafka goes somewhere, always to the same" do
    for scope <- [{:key, 4}, {:partition, 0, 4}],
        metadata <- [
          %{},
          %{topic: "t"},
          %{key: nil},
          %{key: "k"},
          %{key: :k},
          %{partition: nil, offset: nil, key: nil},
          %{topic: nil, partition: nil, key: nil},
          %{topic: "t", partition: 3}
        ],
        message = %{data: 1, metadata: metadata, acknowledger: {Test, :ref, :data}} do
      lane = Ordering.processor(message, scope)
      assert lane in 0..3
      assert Ordering.processor(message, scope) == lane
      assert Ordering.batcher(message, scope) in 0..3
    end
  end

  test "keys differ by all their bytes, and null from empty" do
    lane = fn key -> Ordering.lane(%{metadata: %{topic: "t", key: key}}, {:key, 1_000_000}) end
    keys = ["", "a", "a\0b", "a\0c", "a\0", "\0a", String.duplicate("a\0", 32_768)]
    assert keys |> Enum.map(lane) |> Enum.uniq() |> length() == length(keys)
    # As the engine has it: another topic, another place.
    assert lane.("a") == rem(:erlang.crc32("t\0a"), 1_000_000)

    nulls =
      for o <- 0..99,
          do: Ordering.lane(%{metadata: %{key: nil, partition: 0, offset: o}}, {:key, 4})

    assert Enum.frequencies(nulls) == %{0 => 25, 1 => 25, 2 => 25, 3 => 25}
  end

  test "all producers of a pipeline share its sets: what moves between them stays with its processor" do
    name = make_ref()
    %{p: p, b: b} = Ordering.prepare(name, p: 2, b: 3)
    one = holder(name, 0, for(i <- 0..3, do: {"t", i}))
    before = for i <- 0..3, do: {lane(p, 2, i), lane(b, 3, i)}
    assert Enum.frequencies_by(before, &elem(&1, 0)) == %{0 => 2, 1 => 2}

    # The second has two of them already when the first gives them back.
    two = holder(name, 1, [{"t", 1}, {"t", 2}])
    send(one, {:revoke, [{"t", 1}, {"t", 2}], []})
    assert_receive {:revoked, ^one}
    assert before == for(i <- 0..3, do: {lane(p, 2, i), lane(b, 3, i)})
    stop(one)
    stop(two)
  end

  test "what was given back in order may move, what is in work may not" do
    name = make_ref()
    %{p: p} = Ordering.prepare(name, p: 2)
    one = holder(name, 0, for(i <- 0..3, do: {"t", i}))
    [a, b, c, d] = for i <- 0..3, do: lane(p, 2, i)
    assert {a, b} == {c, d}
    # 0 and 2 have the same processor; they come back alone.
    send(one, {:revoke, for(i <- 0..3, do: {"t", i}), [{"t", 0}, {"t", 2}]})
    assert_receive {:revoked, ^one}
    two = holder(name, 1, [{"t", 0}, {"t", 2}])
    assert {lane(p, 2, 0), lane(p, 2, 2)} == {a, a}
    stop(two)

    other = make_ref()
    %{p: p} = Ordering.prepare(other, p: 2)
    three = holder(other, 0, for(i <- 0..3, do: {"t", i}))
    send(three, {:revoke, for(i <- 0..3, do: {"t", i}), []})
    assert_receive {:revoked, ^three}
    four = holder(other, 1, [{"t", 0}, {"t", 2}])
    assert lane(p, 2, 0) != lane(p, 2, 2)
    Enum.each([one, three, four], &stop/1)
  end

  test "a crash of the process that allocates forgets nothing" do
    name = make_ref()
    %{p: p} = Ordering.prepare(name, p: 4)
    one = holder(name, 0, for(i <- 0..7, do: {"t", i}))
    before = for i <- 0..7, do: lane(p, 4, i)
    old = Process.whereis(Ordering)
    Process.exit(old, :kill)
    eventually(fn -> Process.whereis(Ordering) not in [nil, old] end)
    assert before == for(i <- 0..7, do: lane(p, 4, i))
    # It goes on from there, and still hears of ends.
    two = holder(name, 1, [{"t", 1}])
    assert before == for(i <- 0..7, do: lane(p, 4, i))
    assert %{p: ^p} = Ordering.prepare(name, p: 4)
    stop(one)
    stop(two)
  end

  test "other processors of the same pipeline: its handles' partitions are placed anew; nobody left, nothing left" do
    name = make_ref()
    test = self()

    owner =
      spawn(fn ->
        send(test, {:numbers, Ordering.prepare(name, p: 4)})

        receive do
          {:prepare, sets} -> send(test, {:numbers, Ordering.prepare(name, sets)})
        end

        receive do
          :end -> :ok
        end
      end)

    assert_receive {:numbers, %{p: old}}
    one = holder(name, 0, for(i <- 0..7, do: {"t", i}))
    send(owner, {:prepare, [p: 2]})
    assert_receive {:numbers, %{p: p}}
    assert p != old
    assert Enum.frequencies(for i <- 0..7, do: lane(p, 2, i)) == %{0 => 4, 1 => 4}

    send(owner, :end)
    stop(one)
    eventually(fn -> :ets.match_object(Ordering, {{p, :_, :_}, :_}) == [] end)
    eventually(fn -> :ets.lookup(Ordering, {:pipeline, name}) == [] end)
  end
end
