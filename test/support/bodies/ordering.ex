defmodule Kmq.Test.Bodies.Ordering do
  @moduledoc false
  # What is worked on one after the other where an order is asked for, on any cluster. `kind` says whether on the stage host
  # (which ends the stage of a producer that emits more than was asked for) or on the real Broadway.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.Test.Host

  # Who has what in hands: an entry of each subject that is being worked on, and a note of every overlap.
  defp book do
    {:ets.new(:in_work, [:public]), :ets.new(:seen, [:public, :duplicate_bag]),
     :counters.new(2, [])}
  end

  defp work({in_work, seen, counters}, subject, message, fun) do
    :counters.add(counters, 1, 1)
    unless :ets.insert_new(in_work, {subject, self()}), do: :counters.add(counters, 2, 1)
    :ets.insert(seen, {subject, message.metadata.offset, self(), message.metadata.attempt})
    fun.()
    :ets.delete(in_work, subject)
    message
  end

  defp handled({_, _, counters}), do: :counters.get(counters, 1)
  defp overlaps({_, _, counters}), do: :counters.get(counters, 2)

  defp await(book, n, timeout \\ 20_000) do
    eventually(fn -> assert handled(book) >= n end, timeout)
  end

  # Of each subject what came, in the order of its handling.
  defp seen({_, seen, _}) do
    seen |> :ets.tab2list() |> Enum.group_by(&elem(&1, 0), &Tuple.delete_at(&1, 0))
  end

  defp place(message), do: {message.metadata.topic, message.metadata.partition}

  body "the messages of a partition go to one worker, in order; the workers share the partitions evenly",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 8)
    n = 1_600
    book = book()

    host =
      Host.start(
        kind,
        options(cluster, topic, ordering: :partition),
        fn message -> work(book, place(message), message, fn -> :ok end) end,
        producers: 2
      )

    # A partition that is done before the second producer has joined may have been with another worker.
    eventually(
      fn ->
        %{partitions: rows} = host |> Host.producers() |> hd() |> Kmq.info()
        assert [4, 4] = rows |> Enum.frequencies_by(&{&1.member, &1.state}) |> Map.values()
      end,
      30_000
    )

    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 8)}))
    await(book, n)
    assert overlaps(book) == 0

    seen = seen(book)
    assert map_size(seen) == 8

    for {_place, list} <- seen do
      offsets = Enum.map(list, &elem(&1, 0))
      assert offsets == Enum.to_list(0..199)
    end

    assert [2, 2, 2, 2] =
             seen
             |> Enum.group_by(fn {_, list} -> list |> List.last() |> elem(1) end)
             |> Enum.map(fn {_, places} -> length(places) end)

    assert Host.stop(host) == :ok
  end

  body "by key: one key in one worker at a time, in order; null keys in any; odd keys differ",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 2)
    big = String.duplicate("k", 64 * 1024)
    keys = [nil, "", "a\0b", "a\0c", big, "x", "y", "z", "u", "v"]
    n = 1_000

    publish(
      cluster,
      topic,
      for(i <- 1..n, do: {"#{i}", partition: rem(i, 2), key: Enum.at(keys, rem(div(i, 2), 10))})
    )

    book = book()
    nulls = :counters.new(1, [])
    most = :atomics.new(1, [])

    handler = fn message ->
      case message.metadata.key do
        nil ->
          # Several of them are in work at once.
          :counters.add(nulls, 1, 1)
          now = :counters.get(nulls, 1)
          :atomics.get(most, 1) < now && :atomics.put(most, 1, now)
          Process.sleep(5)
          subject = {nil, message.metadata.partition, message.metadata.offset}
          work(book, subject, message, fn -> :counters.sub(nulls, 1, 1) end)

        key ->
          work(book, key, message, fn -> :ok end)
      end
    end

    host = Host.start(kind, options(cluster, topic, ordering: :key), handler, max_demand: 4)
    await(book, n)
    assert overlaps(book) == 0
    assert :atomics.get(most, 1) > 1

    seen = seen(book)

    for key <- tl(keys) do
      list = Map.fetch!(seen, key)
      assert length(list) == 100
      assert [_one] = list |> Enum.map(&elem(&1, 1)) |> Enum.uniq()
    end

    assert Enum.count(seen, fn {subject, _} -> match?({nil, _, _}, subject) end) == 100
    assert Host.stop(host) == :ok
  end

  body "a worker that is stuck holds up its own partitions, nobody else's", %{
    cluster: cluster,
    kind: kind
  } do
    topic = queue(cluster, 4)
    n = 4_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    book = book()
    gate = :counters.new(1, [])

    handler = fn message ->
      work(book, place(message), message, fn ->
        if message.metadata.partition == 0 and message.metadata.offset == 0,
          do: eventually(fn -> assert :counters.get(gate, 1) == 1 end, 30_000)
      end)
    end

    host =
      Host.start(kind, options(cluster, topic, ordering: :partition, start_ahead: 100), handler,
        max_demand: 2
      )

    # All of the three others, while the fourth stands with its first.
    await(book, 3_001)
    assert length(seen(book)[{topic, 0}]) == 1
    :counters.add(gate, 1, 1)
    await(book, n)
    assert overlaps(book) == 0
    assert Host.lost(host) == 0
    assert Host.stop(host) == :ok
  end

  body "by key, too: other partitions go on while one key is stuck", %{
    cluster: cluster,
    kind: kind
  } do
    topic = queue(cluster, 2)
    # Keys of partition 1 that are other workers'.
    scope = {:key, 4}
    lane = fn key -> Kmq.Ordering.lane(%{metadata: %{topic: topic, key: key}}, scope) end
    others = Enum.filter(1..40, &(lane.("#{&1}") != lane.("stuck"))) |> Enum.map(&"#{&1}")

    publish(
      cluster,
      topic,
      for(i <- 1..500, do: {"#{i}", partition: 0, key: "stuck"}) ++
        for(i <- 1..500, do: {"#{i}", partition: 1, key: Enum.random(others)})
    )

    book = book()
    gate = :counters.new(1, [])

    handler = fn message ->
      work(book, message.metadata.key, message, fn ->
        if message.metadata.key == "stuck",
          do: eventually(fn -> assert :counters.get(gate, 1) == 1 end, 30_000)
      end)
    end

    host = Host.start(kind, options(cluster, topic, ordering: :key), handler, max_demand: 2)
    await(book, 501)
    assert length(seen(book)["stuck"]) == 1
    :counters.add(gate, 1, 1)
    await(book, 1_000)
    assert overlaps(book) == 0
    assert Host.stop(host) == :ok
  end

  body "batches: of one partition, in order, one after the other; the worker's room does not wait for them",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 4)
    n = 1_200
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    book = book()
    test = self()

    host =
      Host.start(
        kind,
        options(cluster, topic, ordering: :partition),
        fn message -> message end,
        # A batch holds far more than the workers' demand, and none would fill without it.
        max_demand: 4,
        batchers: [default: [concurrency: 3, batch_size: 150, batch_timeout: 20_000]],
        batch_handler: fn :default, [first | _] = messages, info ->
          send(test, {:batch, info.batch_key, length(messages), info.trigger})
          places = messages |> Enum.map(&place/1) |> Enum.uniq()
          work(book, {:batch, places}, first, fn -> Process.sleep(2) end)
          for message <- messages, do: work(book, place(message), message, fn -> :ok end)
          messages
        end
      )

    await(book, n + 8)
    assert overlaps(book) == 0

    for _ <- 1..8 do
      assert_receive {:batch, {^topic, _}, 150, :size}
    end

    for {{_, p}, list} <- seen(book), is_integer(p) do
      assert Enum.map(list, &elem(&1, 0)) == Enum.to_list(0..299)
      assert [_one] = list |> Enum.map(&elem(&1, 1)) |> Enum.uniq()
    end

    assert Host.stop(host) == :ok
  end

  body "workers that are killed: nothing that waited is lost or late, the order is kept from there on",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 4)
    n = 2_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    book = book()

    handler = fn message ->
      if message.metadata.attempt == 1 and message.metadata.offset in [50, 150, 250] and
           message.metadata.partition == rem(message.metadata.offset, 4),
         do: Process.exit(self(), :kill)

      work(book, {message.metadata.id, message.metadata.attempt}, message, fn -> :ok end)
    end

    options = options(cluster, topic, ordering: :partition, max_processing_time: 2_000)
    host = Host.start(kind, options, handler, max_demand: 1)

    eventually(
      fn -> assert seen(book) |> Map.keys() |> Enum.uniq_by(&elem(&1, 0)) |> length() == n end,
      30_000
    )

    # What was in the hands of the killed and of those that ended with them, nothing else.
    again = Enum.count(seen(book), fn {{_id, attempt}, _} -> attempt > 1 end)
    assert again in 3..12
    assert Host.lost(host) == 0
    assert Host.stop(host) == :ok
  end

  body "a producer that is killed: acks count, its worker keeps the partition, the next one goes on",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 2)
    n = 1_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
    book = book()
    test = self()

    handler = fn message ->
      if message.metadata.offset == 100 and message.metadata.partition == 0 do
        send(test, {:at, self()})
        assert_receive_go()
      end

      work(book, place(message), message, fn -> :ok end)
    end

    options = options(cluster, topic, ordering: :partition, max_processing_time: 3_000)
    host = Host.start(kind, options, handler, max_demand: 2)
    assert_receive {:at, worker}, scaled(15_000)
    [stage] = Host.producers(host)
    Process.exit(stage, :kill)
    eventually(fn -> assert Host.producers(host) != [stage] end)
    send(worker, :go)

    eventually(
      fn ->
        places = for {place, list} <- seen(book), {offset, _, _} <- list, do: {place, offset}
        assert length(Enum.uniq(places)) >= n
      end,
      30_000
    )

    assert overlaps(book) == 0

    for {_place, list} <- seen(book),
        do: assert([_one] = list |> Enum.map(&elem(&1, 1)) |> Enum.uniq())

    assert Host.stop(host) == :ok
  end

  body "pipelines join and leave in the middle of the work: each partition in order, nowhere twice, without a copy",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 4)
    n = 2_400
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    book = book()
    # Renewals that a slow machine lets lapse would be copies, too.
    options = options(cluster, topic, ordering: :partition, lease: 30_000)

    handler = fn message ->
      work(book, place(message), message, fn -> Process.sleep(1) end)
    end

    extra = [producers: 2, concurrency: 3, max_demand: 4]
    stays = Host.start(kind, options, handler, extra)

    for round <- 1..3 do
      await(book, 300 * round)
      comes = Host.start(kind, options, handler, extra)
      await(book, 300 * round + 150)
      assert Host.stop(comes) == :ok
    end

    await(book, n)
    assert Host.stop(stays) == :ok
    assert for({_, list} <- seen(book), {_, _, attempt} = one <- list, attempt > 1, do: one) == []

    for {_place, list} <- seen(book),
        do: assert(Enum.map(list, &elem(&1, 0)) == Enum.to_list(0..599))

    assert {handled(book), overlaps(book)} == {n, 0}
    assert length(records(cluster, topic, 4)) == n
  end

  # Broadway's own NoopAcknowledger, ack_immediately, or one of the user's: what counts a processor's messages is gone with it.
  body "handlers that take the acknowledger away, from some messages or from all: nothing stands still, the order is kept",
       %{cluster: cluster, kind: kind} do
    n = 400

    for {own, demand, batchers?} <- [
          {[ordering: :partition], [max_demand: 5], false},
          {[ordering: :key], [max_demand: 10, min_demand: 0], false},
          {[delivery: :offsets, on_failure: :ack], [max_demand: 4], false},
          {[ordering: :partition], [max_demand: 4], true},
          {[ordering: :key], [max_demand: 1], true}
        ],
        taken? <- [&(rem(&1, 50) < 20), fn _ -> true end] do
      topic = queue(cluster, 4)

      publish(
        cluster,
        topic,
        for(i <- 0..(n - 1), do: {"#{i}", partition: rem(i, 4), key: "#{rem(i, 7)}"})
      )

      book = book()
      subject = if own[:ordering] == :key, do: & &1.metadata.key, else: &place/1

      handler = fn message ->
        message = work(book, subject.(message), message, fn -> :ok end)
        number = String.to_integer(message.data)

        cond do
          not taken?.(div(number, 4)) -> message
          rem(number, 3) == 0 -> Host.ack_immediately(message)
          # A batcher does not see those that have failed.
          rem(number, 3) == 1 -> message |> Host.take_acknowledger() |> Host.failed("no")
          true -> Host.take_acknowledger(message)
        end
      end

      batchers =
        if batchers?,
          do: [
            batchers: [default: [concurrency: 2, batch_size: 10, batch_timeout: 50]],
            batch_handler: fn :default, messages, _info -> messages end
          ],
          else: []

      # Without markers a stop waits for what nobody acknowledges; renewals that a slow machine lets lapse would be copies.
      options = options(cluster, topic, [drain_timeout: 3_000, lease: 30_000] ++ own)
      {Task.async(fn -> Host.launch(kind, options, handler, demand ++ batchers) end), book, own}
    end
    |> Enum.map(fn {start, book, own} -> {Task.await(start, scaled(30_000)), book, own} end)
    |> Enum.map(fn {host, book, own} ->
      Host.watch(host)
      {host, book, own}
    end)
    |> Enum.each(fn {host, book, own} ->
      await(book, n)
      assert Host.stop(host) == :ok
      assert {handled(book), overlaps(book)} == {n, 0}
      # Those of a key are of several partitions.
      if own[:ordering] != :key do
        for {_place, list} <- seen(book),
            do: assert(Enum.map(list, &elem(&1, 0)) == Enum.to_list(0..99))
      end
    end)
  end

  # What guides/ordering.md says of a retry, a release and a stop.
  body "a message that fails comes behind its successors, in its own worker; across a stop the order is kept",
       %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 2)
    test = self()

    publish(
      cluster,
      topic,
      for(i <- 1..40, do: {"#{i}", partition: rem(i, 2), key: "k#{rem(i, 2)}"})
    )

    handler = fn message ->
      send(test, {:at, message.metadata.key, message.data, message.metadata.attempt, self()})

      cond do
        message.metadata.attempt > 1 -> message
        message.data == "3" -> Host.failed(message, "no")
        message.data == "4" -> Host.failed(message, {:discard, "gone"})
        message.data == "21" -> Host.failed(message, {:retry, 0})
        true -> message
      end
    end

    at = fn n ->
      for _ <- 1..n do
        assert_receive {:at, key, data, attempt, pid}, scaled(20_000)
        {key, String.to_integer(data), attempt, pid}
      end
    end

    options = options(cluster, topic, ordering: :key, backoff: [1])
    host = Host.start(kind, options, handler, max_demand: 2)
    first = at.(42)

    for key <- ["k0", "k1"] do
      mine = for {^key, data, attempt, pid} <- first, do: {data, attempt, pid}
      assert [_one] = mine |> Enum.map(&elem(&1, 2)) |> Enum.uniq()
      firsts = for {data, 1, _} <- mine, do: data
      assert firsts == Enum.sort(firsts) and length(firsts) == 20
    end

    again = for {"k1", data, 2, _} <- first, do: data
    assert Enum.sort(again) == [3, 21]
    order = for {"k1", data, attempt, _} <- first, do: {data, attempt}
    index = fn what -> Enum.find_index(order, &(&1 == what)) end
    assert index.({3, 2}) > index.({5, 1})
    assert Host.stop(host) == :ok

    # A stop in the middle of the next ones.
    publish(
      cluster,
      topic,
      for(i <- 101..500, do: {"#{i}", partition: rem(i, 2), key: "k#{rem(i, 2)}"})
    )

    host = Host.start(kind, options, handler, max_demand: 2)
    second = at.(50)
    assert Host.stop(host) == :ok
    host = Host.start(kind, options, handler, max_demand: 2)

    all =
      Enum.reduce_while(Stream.cycle([1]), second, fn _, all ->
        if length(all) < 400, do: {:cont, all ++ at.(1)}, else: {:halt, all}
      end)

    for key <- ["k0", "k1"] do
      mine = for {^key, data, attempt, _} <- all, do: {data, attempt}
      assert mine == for(i <- 101..500, "k#{rem(i, 2)}" == key, do: {i, 1})
    end

    assert Host.stop(host) == :ok
    refute_received {:at, _, _, _, _}
  end

  body "delivery :offsets keeps the order of partitions unasked, across a stop, and in batches",
       %{
         cluster: cluster,
         kind: kind
       } do
    topic = queue(cluster, 4)
    n = 800
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    book = book()
    options = options(cluster, topic, delivery: :offsets, on_failure: :ack)

    extra = [
      max_demand: 5,
      batchers: [default: [concurrency: 2, batch_size: 10, batch_timeout: 50]],
      batch_handler: fn :default, messages, info ->
        for message <- messages do
          assert info.batch_key == place(message)
          work(book, place(message), message, fn -> :ok end)
        end
      end
    ]

    host = Host.start(kind, options, & &1, extra)
    await(book, 200)
    assert Host.stop(host) == :ok
    host = Host.start(kind, options, & &1, extra)
    await(book, n)
    assert Host.stop(host) == :ok
    assert {handled(book), overlaps(book)} == {n, 0}

    for {_place, list} <- seen(book),
        do: assert(Enum.map(list, &elem(&1, 0)) == Enum.to_list(0..199))
  end

  # What is not fetched yet waits in librdkafka's queues, which wake nobody twice; a worker that got less than its portion asks for nothing.
  body "a backlog far beyond what is fetched ahead: nobody waits for a demand that does not come",
       %{cluster: cluster, kind: kind} do
    n = 240

    for {partitions, own} <- [
          {1, [delivery: :offsets, start_ahead: 7]},
          {2, [delivery: :offsets, start_ahead: 3, max_in_flight: 4]},
          {2, [ordering: :partition, start_ahead: 1]},
          {1, [ordering: :key, start_ahead: 1]}
        ] do
      topic = queue(cluster, partitions)

      publish(
        cluster,
        topic,
        for(i <- 1..n, do: {"#{i}", partition: rem(i, partitions), key: "#{rem(i, 5)}"})
      )

      book = book()

      host =
        Host.start(
          kind,
          options(cluster, topic, own),
          fn message ->
            work(book, {place(message), message.metadata.offset}, message, fn -> :ok end)
          end,
          max_demand: 5
        )

      await(book, n)
      assert Host.stop(host) == :ok
      assert {handled(book), overlaps(book)} == {n, 0}
    end
  end

  body "without an order a partition_by is the user's own", %{cluster: cluster, kind: kind} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(i <- 1..200, do: {"#{i}", partition: rem(i, 2)}))
    book = book()
    own = fn message -> rem(String.to_integer(message.data), 3) end

    host =
      Host.start(
        kind,
        options(cluster, topic),
        fn message -> work(book, own.(message), message, fn -> :ok end) end,
        processors: [partition_by: own]
      )

    await(book, 200)
    assert overlaps(book) == 0

    for {_, list} <- seen(book),
        do: assert([_one] = list |> Enum.map(&elem(&1, 1)) |> Enum.uniq())

    assert Host.stop(host) == :ok
  end

  defp assert_receive_go do
    receive do
      :go -> :ok
    after
      scaled(20_000) -> exit(:no_go)
    end
  end
end
