defmodule Kmq.Test.Bodies.Actions do
  @moduledoc false
  # What a user can say about a message beside ack, retry, reject and discard; and what a publisher can say of it beforehand.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.{Consumer, Publisher}

  defp now, do: System.monotonic_time(:millisecond)

  defp pull_one(consumer) do
    [message] = Consumer.pull(consumer, max: 1, wait: scaled(15_000))
    message
  end

  body "released and snoozed messages come again, when they are to, at no attempt", %{
    cluster: cluster
  } do
    for format <- [:range, :kmq] do
      topic = queue(cluster, 1)
      publish(cluster, topic, ["release", "snooze", "list 1", "list 2"])
      options = options(cluster, topic, marker_format: format, max_redeliveries: 0)
      consumer = consumer(options)
      first = [release, snooze | list] = pull(consumer, 4)
      began = now()
      assert Kmq.snooze(snooze, 1_500) == :ok
      assert Kmq.release(release, sync: true) == :ok
      assert Kmq.snooze(list, 0) == :ok
      assert Kmq.release(release) == {:error, :unknown}
      assert Kmq.snooze([snooze], 5) == {:error, [{snooze, :unknown}]}

      again = pull(consumer, 4)
      assert now() - began >= 1_500
      assert List.last(again).value == "snooze"
      assert Enum.sort(Enum.map(again, & &1.id)) == Enum.sort(Enum.map(first, & &1.id))
      assert Enum.all?(again, &(&1.attempt == 1 and &1.deliveries == 2))

      # Nothing counted: where a failure would be one too many, it may be given back as often as one likes.
      assert Kmq.release(again) == :ok
      third = pull(consumer, 4)
      assert Enum.all?(third, &(&1.attempt == 1 and &1.deliveries == 3))
      assert Kmq.ack(third, sync: true) == :ok
      assert records(cluster, topic <> "__undelivered", 1) == []
      Consumer.stop(consumer)
    end
  end

  defp actions do
    [
      ack: &Kmq.ack/1,
      retry: &Kmq.retry(&1, delay: 60_000),
      release: &Kmq.release/1,
      snooze: &Kmq.snooze(&1, 60_000),
      extend: &Kmq.extend(&1, 60_000),
      reject: &Kmq.reject(&1, "no"),
      discard: &Kmq.discard/1,
      leave: &Kmq.leave/1
    ]
  end

  body "each action takes one message or a list, and names what it could not do", %{
    cluster: cluster
  } do
    for format <- [:range, :kmq], do: each_action(cluster, format)
  end

  defp each_action(cluster, format) do
    topic = queue(cluster, 1)
    names = Keyword.keys(actions())
    publish(cluster, topic, for(name <- names, i <- 1..7, do: "#{name} #{i}"))
    options = options(cluster, topic, marker_format: format, max_processing_time: 120_000)
    consumer = consumer(options)
    messages = Map.new(pull(consumer, 7 * length(names)), &{&1.value, &1})
    of = fn name, i -> Map.fetch!(messages, "#{name} #{i}") end

    # The sixth and seventh of each are too late.
    late = for name <- names, i <- [6, 7], do: of.(name, i)
    assert Kmq.extend(late, 100) == :ok

    for {name, action} <- actions() do
      [one, two, three, four, five] = for i <- 1..5, do: of.(name, i)
      assert {name, action.(one)} == {name, :ok}
      assert {name, action.([two, three])} == {name, :ok}
      if name == :extend, do: assert(Kmq.ack(one) == :ok)
      assert {name, action.(one)} == {name, {:error, :unknown}}
      assert {name, action.([one, four])} == {name, {:error, [{one, :unknown}]}}
      assert {name, action.([])} == {name, :ok}
      expected = if name == :extend, do: :ok, else: {:error, :unknown}
      assert {name, action.(four)} == {name, expected}
      assert Kmq.ack(five) == :ok
    end

    again = late_ones(consumer, length(late))
    assert Enum.all?(again, &(&1.attempt == 2))

    for {name, action} <- actions() do
      assert {name, action.(of.(name, 6))} == {name, {:error, :late}}
      assert {name, action.([of.(name, 7)])} == {name, {:error, [{of.(name, 7), :late}]}}
      # told once to who settles
      expected = if name == :extend, do: :late, else: :unknown
      assert {name, action.(of.(name, 7))} == {name, {:error, expected}}
    end

    Consumer.stop(consumer)

    for {name, action} <- actions() do
      assert {name, action.(of.(name, 1))} == {name, {:error, :closed}}
      assert {name, action.([of.(name, 6)])} == {name, {:error, [{of.(name, 6), :closed}]}}
    end
  end

  # In the kmq format they count as crashed, and no more than eight of these are in work at once.
  defp late_ones(_consumer, left) when left <= 0, do: []

  defp late_ones(consumer, left) do
    late = consumer |> pull_until(fn all -> Enum.any?(all, &late?/1) end) |> Enum.filter(&late?/1)
    assert Kmq.ack(late) == :ok
    late ++ late_ones(consumer, left - length(late))
  end

  defp late?(message), do: message.value =~ ~r/ [67]$/

  body "an extended message may take longer, or less; its neighbours may not", %{cluster: cluster} do
    for format <- [:range, :kmq] do
      topic = queue(cluster, 1)
      publish(cluster, topic, ["slow", "quick", "short"])
      options = options(cluster, topic, marker_format: format, max_processing_time: 2_000)
      consumer = consumer(options)
      [slow, quick, short] = pull(consumer, 3)
      assert Kmq.extend(slow, 60_000, sync: true) == :ok
      assert Kmq.extend(slow, 30_000) == :ok
      assert Kmq.extend([short], 300) == :ok
      began = now()

      # The one with less time first, then the one that nobody extended.
      again = pull_one(consumer)
      assert {again.value, again.attempt} == {"short", 2}
      assert Kmq.ack(again) == :ok
      assert now() - began < 2_000
      assert Kmq.extend(short, 1_000) == {:error, :late}
      again = pull_one(consumer)
      assert {again.value, again.attempt} == {"quick", 2}
      assert Kmq.ack(again) == :ok
      assert Kmq.ack(quick) == {:error, :late}
      assert Consumer.pull(consumer, max: 5, wait: 1_000) == []
      assert Kmq.ack(slow) == :ok
      assert Kmq.extend(slow, 1_000) == {:error, :unknown}
      Consumer.stop(consumer)
      assert Kmq.extend(slow, 1_000) == {:error, :closed}
    end
  end

  body "an ack with sync is in the marker topic when it returns", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b"])
    options = options(cluster, topic, ack_flush_interval: 2_000)
    consumer = consumer(options)
    [a, b] = pull(consumer, 2)
    markers = Kmq.Topics.marker_topic(topic, options[:group_id])

    ends = fn ->
      Enum.count(records(cluster, markers, 1), &match?(<<0, 0x4B, 1, 2, _::binary>>, &1.value))
    end

    assert Kmq.ack([a, a], sync: 5_000) == {:error, [{a, :unknown}]}
    assert ends.() == 1
    assert Kmq.discard(b, sync: true) == :ok
    assert ends.() == 2
    assert_raise ArgumentError, fn -> Kmq.ack(a, sync: 0) end
    assert_raise ArgumentError, fn -> Kmq.snooze(a, -1) end
  end

  body "who takes too long waits as one that fails does; good ones do not wait with them", %{
    cluster: cluster
  } do
    # In the kmq format the tracker sees nothing but a lapsed lease: a crash.
    for {format, cause} <- [range: "timeout", kmq: "crash"] do
      topic = queue(cluster, 1)

      options =
        options(cluster, topic,
          marker_format: format,
          max_processing_time: 300,
          backoff: [700, 1_400],
          max_redeliveries: 2
        )

      consumer = consumer(options)
      publish(cluster, topic, ["hangs"])

      times =
        for attempt <- 1..3 do
          message = pull_one(consumer)
          assert {message.value, message.attempt} == {"hangs", attempt}
          now()
        end

      [first, second] = Enum.zip_with(tl(times), times, &-/2)

      # Seen from here: who came late himself is followed the sooner. Never early by the broker's clock: the tracker's tests.
      assert first in (300 + 700 - scaled(150))..(300 + 700 + scaled(900))
      assert second in (300 + 1_400 - scaled(900))..(300 + 1_400 + scaled(900))

      # The last one does not wait: there is nothing to wait for.
      publish(cluster, topic, for(i <- 1..200, do: "good #{i}"))
      good = pull(consumer, 200)
      assert Kmq.ack(good, sync: true) == :ok
      [dead] = await_records(cluster, topic <> "__undelivered", 1, 1)
      assert {"kmq-cause", cause} in dead.headers
      Consumer.stop(consumer)
    end
  end

  body "those that wait for their next attempt hold no slot: a thousand good ones pass them by",
       %{
         cluster: cluster
       } do
    topic = queue(cluster, 1)
    wait_ms = scaled(8_000)
    options = options(cluster, topic, max_in_flight: 10, backoff: [wait_ms], start_ahead: 100)
    consumer = consumer(options)
    publish(cluster, topic, for(i <- 1..10, do: "bad #{i}"))
    bad = pull(consumer, 10)
    # there is room for ten
    publish(cluster, topic, for(i <- 1..1_000, do: "good #{i}"))
    assert Consumer.pull(consumer, max: 5, wait: 300) == []
    began = now()
    assert Kmq.retry(bad) == :ok
    one_by_one(consumer, 1_000)
    assert now() - began < wait_ms

    again = pull(consumer, 10)
    assert now() - began >= wait_ms
    assert Enum.all?(again, &(&1.attempt == 2 and &1.value =~ "bad"))
    assert Kmq.ack(again, sync: true) == :ok
    Consumer.stop(consumer)
  end

  defp one_by_one(_consumer, left) when left <= 0, do: :ok

  defp one_by_one(consumer, left) do
    [_ | _] = messages = Consumer.pull(consumer, max: 100, wait: 5_000)
    assert length(messages) <= 10
    assert Enum.all?(messages, &(&1.value =~ "good"))
    assert Kmq.ack(messages) == :ok
    one_by_one(consumer, left - length(messages))
  end

  # ---- delay

  body "delayed messages come when they are due, never before, and hold nobody up", %{
    cluster: cluster
  } do
    for format <- [:range, :kmq] do
      topic = queue(cluster, 2)
      {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)
      consumer = consumer(options(cluster, topic, marker_format: format))
      joined = if cluster.kind == :sandbox, do: 3_500, else: 1_500
      due = fn delay -> [key: "k", headers: [{"h", "1"}], delay: delay] end

      messages = for delay <- [1_500, 700, 2_500, 0], do: {topic, "#{delay}", due.(delay)}

      past = {topic, "past", at: DateTime.add(DateTime.utc_now(), -5, :second)}
      at = {topic, "at", at: DateTime.add(DateTime.utc_now(), 1, :second)}
      began = System.os_time(:millisecond)
      {:ok, places} = Publisher.publish_many(publisher, messages ++ [past, at])

      got =
        for _ <- 1..6 do
          message = pull_one(consumer)
          {message, System.os_time(:millisecond)}
        end

      waits = Map.new(got, fn {message, at} -> {message.value, at - began} end)
      assert Map.keys(waits) == Enum.sort(["1500", "700", "2500", "0", "past", "at"])

      for delay <- [700, 1_500, 2_500] do
        assert waits["#{delay}"] >= delay
        assert waits["#{delay}"] < max(delay, joined) + scaled(1_500)
      end

      assert waits["at"] >= 900

      assert Enum.all?(got, fn {message, _} -> {message.attempt, message.deliveries} == {1, 1} end)

      ids = for {message, _} <- got, do: Tuple.to_list(message.id) |> Enum.take(3)

      assert Enum.sort(ids) ==
               Enum.sort(for place <- places, do: [topic, place.partition, place.offset])

      assert Kmq.ack(Enum.map(got, &elem(&1, 0)), sync: true) == :ok
      # One copy of each that waited, none of the others.
      assert length(records(cluster, topic, 2)) == 6 + 4
      assert Consumer.pull(consumer, max: 10, wait: 500) == []
      Publisher.close(publisher)
      Consumer.stop(consumer)
    end
  end

  body "a delayed message outlives its consumer and its tracker", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, [{"later", delay: 4_000}, {"now", []}])
    options = options(cluster, topic)
    first = consumer(options)
    now = pull_one(first)
    assert now.value == "now"
    assert Kmq.ack(now) == :ok

    eventually(
      fn -> assert committed(cluster, options[:group_id], topic, 1) == [{0, 2}] end,
      10_000
    )

    Consumer.stop(first)
    second = consumer(options)
    later = pull_one(second)
    assert {later.value, later.attempt, later.deliveries} == {"later", 1, 1}
    {_, due} = List.keyfind(later.headers, "kmq-due", 0)
    assert later.ts >= String.to_integer(due)
    assert Kmq.ack(later, sync: true) == :ok
    assert length(records(cluster, topic, 1)) == 3
  end

  body "delays that cannot be are refused", %{cluster: cluster} do
    topic = queue(cluster, 1)
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts)

    assert_raise ArgumentError, ~r/:delay.*-5/, fn ->
      Publisher.publish(publisher, topic, "x", delay: -5)
    end

    assert_raise ArgumentError, ~r/:at/, fn -> Publisher.publish(publisher, topic, "x", at: 5) end

    assert_raise ArgumentError, fn ->
      Publisher.publish(publisher, topic, "x", at: DateTime.utc_now(), delay: 5)
    end

    if cluster.kind == :kafka do
      kept = queue(cluster, 1, "short", config: [{"retention.ms", "3600000"}])
      assert {:error, error} = Publisher.publish(publisher, kept, "x", delay: 3_600_000)
      assert error.reason == :delay_too_long
      assert error.message =~ "3600000 ms" and error.message =~ "retention.ms=3600000"
      assert {:ok, _} = Publisher.publish(publisher, kept, "x", delay: 3_500_000)
      year = DateTime.add(DateTime.utc_now(), 365 * 86_400, :second)

      assert {:error, %{reason: :delay_too_long}} =
               Publisher.publish(publisher, topic, "x", at: year)

      forever = queue(cluster, 1, "forever", config: [{"retention.ms", "-1"}])
      assert {:ok, _} = Publisher.publish(publisher, forever, "x", at: year)
    end

    Publisher.close(publisher)
  end

  # ---- time to live

  body "what has expired is not handed out: dead-lettered, or dropped", %{cluster: cluster} do
    for {on_expired, format} <- [reject: :range, discard: :range, reject: :kmq] do
      topic = queue(cluster, 1)
      old = System.os_time(:millisecond) - 60_000

      publish(cluster, topic, [
        {"fresh", ttl: 60_000},
        {"stale", ttl: 1},
        {"old", timestamp: old, key: "k", headers: [{"h", "1"}]},
        {"plain", []}
      ])

      options =
        options(cluster, topic, marker_format: format, ttl: 30_000, on_expired: on_expired)

      consumer = consumer(options)
      got = pull(consumer, 2)
      assert Enum.map(got, & &1.value) == ["fresh", "plain"]
      assert Kmq.ack(got, sync: true) == :ok
      dead = if on_expired == :reject, do: ["old", "stale"], else: []
      records = await_records(cluster, topic <> "__undelivered", 1, length(dead))
      assert Enum.sort(Enum.map(records, & &1.value)) == dead

      for record <- records do
        assert {"kmq-cause", "expired"} in record.headers
        assert {"kmq-redelivery-count", <<0>>} in record.headers
      end

      assert Consumer.pull(consumer, max: 5, wait: 500) == []
      assert length(records(cluster, topic, 1)) == 4
      Consumer.stop(consumer)
    end
  end

  body "a message that expires while it waits for its retry is dead", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["first"])
    consumer = consumer(options(cluster, topic))
    assert Kmq.ack(pull_one(consumer)) == :ok
    publish(cluster, topic, [{"short", ttl: 1_500}])
    assert Kmq.retry(pull_one(consumer), delay: 1_600) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 2_500) == []
    [dead] = await_records(cluster, topic <> "__undelivered", 1, 1)
    assert {"kmq-cause", "expired"} in dead.headers
    assert {"kmq-redelivery-count", <<1>>} in dead.headers
  end

  # ---- filter

  body "a filter: what it wants is handed out, the rest counts as done without a marker", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)

    messages =
      for i <- 1..3_000 do
        tags = if rem(i, 100) == 0, do: ["vip", "all"], else: ["all"]
        {"#{i}", tags: tags, routing_key: "orders.#{rem(i, 3)}.eu", partition: rem(i, 2)}
      end

    publish(cluster, topic, messages ++ [{"no headers", partition: 0}])
    options = options(cluster, topic, filter: [tags: ["vip"], routing: ["orders.*.eu", "never"]])
    consumer = consumer(options)
    got = pull(consumer, 30)
    wanted = for i <- 100..3_000//100, do: "#{i}"
    assert Enum.sort(Enum.map(got, & &1.value)) == Enum.sort(wanted)

    # A copy keeps its tags and comes again.
    [failed | good] = got
    assert Kmq.retry(failed, delay: 0) == :ok
    assert Kmq.ack(good, sync: true) == :ok
    again = pull_one(consumer)
    assert {again.value, again.attempt} == {failed.value, 2}
    assert {"kmq-tags", "vip,all"} in again.headers
    assert Kmq.ack(again, sync: true) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 300) == []

    # The lag is gone, and only what was handed out has markers.
    eventually(
      fn ->
        commits = committed(cluster, options[:group_id], topic, 2)
        assert Enum.sum(for {_, offset} <- commits, do: offset) == 3_002
      end,
      10_000
    )

    assert length(records(cluster, topic <> "__#{options[:group_id]}__markers", 2)) < 200
    Consumer.stop(consumer)
  end

  body "a filter that wants nothing of a topic leaves no lag", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..5_000, do: {"#{i}", headers: [{"a", "b"}]}))
    options = options(cluster, topic, filter: [headers: [{"a", "c"}]])
    consumer = consumer(options)
    assert Consumer.pull(consumer, max: 5, wait: 4_000) == []

    eventually(
      fn -> assert committed(cluster, options[:group_id], topic, 1) == [{0, 5_000}] end,
      10_000
    )
  end

  body "what waits is asked again when it comes, by the filter of that time", %{cluster: cluster} do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(v <- ~w(failed snoozed done), do: {v, tags: ["vip"]}))
    options = options(cluster, topic, backoff: [500]) |> Keyword.delete(:name)
    first = consumer(options ++ [filter: [tags: ["vip"]]])
    messages = pull(first, 3)
    [failed, snoozed, done] = Enum.sort_by(messages, & &1.offset)
    assert Kmq.retry(failed, delay: 500) == :ok
    assert Kmq.snooze(snoozed, 500) == :ok
    assert Kmq.ack(done, sync: true) == :ok
    assert Consumer.stop(first) == :ok

    second = consumer(options ++ [filter: [tags: ["press"]]])
    # Both copies are there, and done: nothing is open, nothing was handed out, nothing is dead.
    await_records(cluster, topic, 1, 5)

    eventually(
      fn ->
        assert committed(cluster, options[:group_id], topic, 1) == [{0, 5}]
        where = Keyword.take(options, [:hosts, :topics, :group_id])
        assert {:ok, [%{open: 0}]} = Kmq.Inspect.partitions(where)
      end,
      20_000
    )

    assert Consumer.pull(second, max: 5) == []
    assert Enum.to_list(Kmq.DeadLetters.stream(topic, hosts: cluster.hosts)) == []
    assert Consumer.stop(second) == :ok
  end

  # ---- receipts

  @secret "a secret of the shop"

  body "a receipt settles a message without its consumer, and also after its end", %{
    cluster: cluster
  } do
    for format <- [:range, :kmq] do
      topic = queue(cluster, 1)
      publish(cluster, topic, ~w(ack discard reject snooze retry nobody))

      options =
        options(cluster, topic,
          marker_format: format,
          max_processing_time: 4_000,
          receipt_secret: @secret
        )

      consumer = consumer(options)
      messages = pull(consumer, 6)
      receipts = Map.new(messages, &{&1.value, Kmq.receipt(&1)})
      assert Kmq.leave(messages, sync: true) == :ok
      assert Kmq.ack(hd(messages)) == {:error, :unknown}
      assert Kmq.Handle.info(hd(messages).handle).partitions |> hd() |> Map.fetch!(:open) == 0
      Consumer.stop(consumer)

      {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, receipt_secret: @secret)
      assert Kmq.settle(publisher, receipts["ack"], :ack) == :ok
      assert Kmq.settle(publisher, receipts["ack"], :ack) == :ok
      assert Kmq.settle(publisher, receipts["discard"], :discard) == :ok
      assert Kmq.settle(publisher, receipts["reject"], {:reject, "not for us"}) == :ok
      assert Kmq.settle(publisher, receipts["snooze"], {:snooze, 0}) == :ok
      assert Kmq.settle(publisher, receipts["retry"], :retry) == :ok

      assert {:error, %{reason: :receipt}} =
               Kmq.settle(publisher, receipts["nobody"] <> "A", :ack)

      Publisher.close(publisher)
      {:ok, stranger} = Publisher.start_link(hosts: cluster.hosts)
      assert {:error, %{reason: :receipt}} = Kmq.settle(stranger, receipts["nobody"], :ack)
      Publisher.close(stranger)

      # The first of them wait in work for the last one, which comes when its four seconds are over.
      second = consumer(Keyword.put(options, :max_processing_time, 60_000))
      again = pull(second, 3)

      assert Enum.sort(Enum.map(again, &{&1.value, &1.attempt})) ==
               [{"nobody", 2}, {"retry", 2}, {"snooze", 1}]

      assert Kmq.ack(again, sync: true) == :ok
      [dead] = await_records(cluster, topic <> "__undelivered", 1, 1)
      assert dead.value == "reject"
      assert {"kmq-error", "not for us"} in dead.headers
      assert Consumer.pull(second, max: 10, wait: 500) == []
      Consumer.stop(second)
    end
  end
end
