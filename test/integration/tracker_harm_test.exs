defmodule Kmq.Integration.TrackerHarmTest do
  # One bad message harms no other: what cannot be copied ends, or waits with an alarm and recovers by itself, while all the others
  # are copied once and on time.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind

  alias Kmq.{DeadLetters, Tracker}
  alias Kmq.Test.{BrokerAdmin, Kafka, Markers}

  @count "kmq-redelivery-count"

  setup do: listen()

  @tag timeout: 180_000
  test "of a hundred due at once one is gone, one too large for its queue, one for a dead letter topic that is missing, stricter or denied" do
    kafka =
      Kafka.start!(
        config: Map.put(BrokerAdmin.acl_config(), "auto.create.topics.enable", "false")
      )

    cluster = %{kind: :kafka, hosts: Kafka.bootstrap(kafka)}
    troubles = [:missing, :stricter, :denied]

    topics =
      for t <- troubles,
          into: %{},
          do: {t, queue(cluster, 1, "#{t}", config: [{"max.message.bytes", "100000"}])}

    all = Map.values(topics)
    dead = fn trouble -> topics[trouble] <> "__undelivered" end
    options = options(cluster, all, tracker: :external, backoff: [0])

    for {_, topic} <- topics do
      # 0 will be gone, 40 is too large for another header, 70 has used up its attempts
      # each by itself: a batch that is too large is refused as a whole
      poison = {String.duplicate("p", 5_000), headers: [{@count, <<3>>}]}
      publish(cluster, topic, for(i <- 0..39, do: "#{i}"))
      publish(cluster, topic, [String.duplicate("l", 99_850)])
      publish(cluster, topic, for(i <- 41..99, do: if(i == 70, do: poison, else: "#{i}")))
    end

    left_behind(cluster, all, options)

    for topic <- all, do: forget(cluster, topic, 0, 1)
    BrokerAdmin.set_config(cluster.hosts, dead.(:stricter), [{"max.message.bytes", 1_000}])
    BrokerAdmin.deny_write(cluster.hosts, dead.(:denied))

    t = tracker(options)
    eventually(fn -> match?({:ok, %{partitions: [_, _, _]}}, Tracker.info(t)) end, 20_000)
    ready(t)
    :ok = Kafka.delete_topic(cluster.hosts, dead.(:missing))

    for topic <- all,
        do: mark(cluster, topic, options, for(i <- 0..99, do: Markers.start(0, i, 1_500)))

    due = System.monotonic_time(:millisecond) + 1_500

    # the others: once, and soon
    for topic <- all,
        do:
          eventually(
            fn ->
              assert length(copies(cluster, topic)) == 97
              true
            end,
            10_000
          )

    IO.puts(
      :stderr,
      "97 of 100 in each of three queues within #{System.monotonic_time(:millisecond) - due} ms of their deadline"
    )

    # each of the three ends, or waits with an alarm, and nothing of it is ended
    good = Enum.to_list(1..99) -- [40, 70]
    ended = &ends(cluster, &1, options)

    for topic <- all do
      eventually(
        fn ->
          assert Enum.sort(for({{0, o}, [{:redelivered, _}]} <- ended.(topic), do: o)) == good
          assert [{:gone, _}] = ended.(topic)[{0, 0}]
          refute ended.(topic)[{0, 40}] || ended.(topic)[{0, 70}]
          true
        end,
        5_000
      )
    end

    eventually(
      fn ->
        text = fn reason, trouble ->
          Enum.any?(alarms(), fn {r, m} -> r == reason and m =~ trouble end)
        end

        assert text.(:dead_letter_topic, "does not exist")
        assert text.(:dead_letter_topic, "TOPIC_AUTHORIZATION_FAILED")
        assert text.(:too_large, topics[:stricter] <> "/0/70")
        for topic <- all, do: assert(text.(:too_large, topic <> "/0/40"))
        true
      end,
      10_000
    )

    {:ok, info} = Tracker.info(t)
    assert Enum.map(info.partitions, & &1.open) == [2, 2, 2]

    # and each recovers by itself
    for topic <- all,
        do: BrokerAdmin.set_config(cluster.hosts, topic, [{"max.message.bytes", 200_000}])

    :ok = Kafka.create_topic(cluster.hosts, dead.(:missing), 1)
    BrokerAdmin.set_config(cluster.hosts, dead.(:stricter), [{"max.message.bytes", 100_000}])
    BrokerAdmin.allow_write(cluster.hosts, dead.(:denied))

    nothing_open(t, 30_000)

    for {trouble, topic} <- topics do
      values = Enum.map(copies(cluster, topic), & &1.value)
      assert length(values) == 98
      assert Enum.uniq(values) == values
      assert [letter] = records(cluster, dead.(trouble), 1)
      assert letter.value == String.duplicate("p", 5_000)
      assert {@count, <<4>>} in letter.headers
      # the copy is safe before its END is there
      assert [{:dead_lettered, ts}] = ended.(topic)[{0, 70}]
      assert ts >= letter.ts
    end

    # what is open in the node goes before it
    for {id, _, _, _} <- Supervisor.which_children(elem(ExUnit.fetch_test_supervisor(), 1)),
        do: stop_supervised!(id)

    Kafka.stop(kafka)
  end

  test "dead_letter_oversize: :pointer writes it without its value; a redrive sends it with its value",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    dead = queue(cluster, 1, "small", config: [{"max.message.bytes", "1200"}])

    options =
      options(cluster, topic,
        tracker: :external,
        backoff: [0],
        dead_letter_topic: dead,
        dead_letter_oversize: :pointer
      )

    large = String.duplicate("v", 50_000)
    count = {@count, <<3>>}

    publish(cluster, topic, [
      {large, key: "k", headers: [{"user", "1"}, count]},
      {large, key: "k2", headers: [{"user", String.duplicate("h", 3_000)}, count]},
      {"small", key: "k3", headers: [count]}
    ])

    left_behind(cluster, [topic], options)
    t = tracker(options)

    mark(cluster, topic, options, for(i <- 0..2, do: Markers.start(0, i, 0)))
    letters = await_records(cluster, dead, 1, 3, 30_000)
    nothing_open(t)
    refute Enum.any?(alarms(), &match?({:too_large, _}, &1))

    by =
      Map.new(letters, fn l ->
        {_, origin} = List.keyfind(l.headers, "kmq-origin", 0)
        {origin |> String.split("/") |> Enum.at(2), l}
      end)

    assert %{value: "small", key: "k3"} = by["2"]
    refute List.keymember?(by["2"].headers, "kmq-pointer", 0)
    assert %{value: nil, key: "k"} = by["0"]
    assert {"user", "1"} in by["0"].headers
    # not even its headers fit
    assert %{value: nil, key: nil} = by["1"]

    for i <- ["0", "1"] do
      headers = Map.new(by[i].headers)
      assert headers["kmq-value-bytes"] == "50000"
      assert headers["kmq-pointer"] =~ ~r"^#{topic}/0/#{i}/\d+$"
      assert headers[@count] == <<4>>
    end

    pointed =
      for l <- DeadLetters.stream(topic, hosts: cluster.hosts, dead_letter_topic: dead),
          l.pointer,
          do: l.pointer

    assert [{^topic, 0, 0, _}, {^topic, 0, 1, _}] = Enum.sort(pointed)

    assert {:ok, %{redriven: 3}} =
             DeadLetters.redrive(topic, hosts: cluster.hosts, dead_letter_topic: dead)

    consumer = consumer(options)
    back = pull(consumer, 3)

    assert Enum.sort(Enum.map(back, &{&1.key, byte_size(&1.value), &1.attempt})) == [
             {"k", 50_000, 1},
             {"k2", 50_000, 1},
             {"k3", 5, 1}
           ]

    assert {"user", String.duplicate("h", 3_000)} in Enum.find(back, &(&1.key == "k2")).headers
    refute Enum.any?(back, &List.keymember?(&1.headers, "kmq-pointer", 0))
    Enum.each(back, &(:ok = Kmq.ack(&1)))

    # what it points to may be gone: then it is left alone
    forget(cluster, topic, 0, 2)

    assert {:ok, %{redriven: 1, skipped: 2}} =
             DeadLetters.redrive(topic,
               hosts: cluster.hosts,
               dead_letter_topic: dead,
               group: unique("again")
             )
  end
end
