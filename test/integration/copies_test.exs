defmodule Kmq.Integration.CopiesTest do
  # Copies in the queue topic: whose they are, and how often one is made of what says nonsense about itself.
  use Kmq.Test.ClusterCase, on: :kafka

  import Kmq.Test.LeftBehind, only: [copies: 2, copies: 3, tracker: 1]

  alias Kmq.{Consumer, Tracker}

  @count "kmq-redelivery-count"

  @tag timeout: 180_000
  test "three groups on one queue: each has all messages, and its own copies only", %{
    cluster: cluster
  } do
    topic = queue(cluster, 2)
    values = for i <- 0..29, do: "#{i}"
    publish(cluster, topic, for(i <- 0..29, do: {"#{i}", partition: rem(i, 2)}))

    # Of each group others fail, some in several groups: that many times.
    fails = %{
      0 => %{"0" => 1, "1" => 2, "2" => 1},
      1 => %{"2" => 2, "3" => 1},
      2 => %{}
    }

    groups =
      for {g, failing} <- fails do
        options = options(cluster, topic, lease: 600_000, max_processing_time: 600_000)
        {g, failing, options, consumer(options)}
      end

    expected = fn failing ->
      Enum.sort(for v <- values, attempt <- 1..(1 + Map.get(failing, v, 0)), do: {v, attempt})
    end

    for {_, failing, _, consumer} <- groups do
      n = length(expected.(failing))

      got =
        Enum.reduce_while(Stream.cycle([:go]), [], fn _, got ->
          came = pull(consumer, 1, 40_000)

          for m <- came do
            if m.attempt <= Map.get(failing, m.value, 0),
              do: assert(Kmq.retry(m, delay: 0) == :ok),
              else: assert(Kmq.ack(m) == :ok)
          end

          got = got ++ Enum.map(came, &{&1.value, &1.attempt})
          if length(got) >= n, do: {:halt, got}, else: {:cont, got}
        end)

      assert Enum.sort(got) == expected.(failing)
    end

    # Each copy says whose it is; the others pass it without a hand-out, and their commits do not stay behind it.
    written =
      for r <- copies(cluster, topic, 2),
          do: {r.value, :proplists.get_value("kmq-group", r.headers)}

    assert Enum.sort(written) ==
             Enum.sort(
               for {_, failing, options, _} <- groups,
                   {v, n} <- failing,
                   _ <- 1..n,
                   do: {v, options[:group_id]}
             )

    ends = Kmq.Test.LeftBehind.high(cluster, topic, 2)

    for {_, _, options, consumer} <- groups do
      eventually(
        fn -> assert committed(cluster, options[:group_id], topic, 2) == ends end,
        20_000
      )

      assert Consumer.pull(consumer, max: 10) == []
    end

    assert records(cluster, topic <> "__undelivered", 2) == []
  end

  # What a header says, and the attempt that makes of it.
  @broken [
    {"null", [{@count, nil}]},
    {"empty", [{@count, ""}]},
    {"two bytes", [{@count, <<0, 1>>}]},
    {"ascii", [{@count, "7"}]},
    {"negative", [{@count, <<0xFF>>}]},
    {"nine bytes", [{@count, <<0::72>>}]},
    {"twice", [{@count, <<0>>}, {@count, <<200>>}]},
    {"good", []}
  ]

  @tag timeout: 180_000
  test "broken and repeated counts end in the dead letters, after no more deliveries than a good one",
       %{cluster: cluster} do
    topic = queue(cluster, 1)

    options =
      options(cluster, topic,
        tracker: :external,
        max_redeliveries: 2,
        max_processing_time: 1_000,
        lease: 600_000,
        backoff: [0]
      )

    publish(cluster, topic, for({value, headers} <- @broken, do: {value, headers: headers}))
    tracker = tracker(options)
    consumer = consumer(options)
    dead = topic <> "__undelivered"

    # Taken and forgotten, again and again.
    deadline = System.monotonic_time(:millisecond) + scaled(60_000)
    {letters, came} = forget_until(consumer, cluster, dead, deadline, [])
    assert Enum.sort(Enum.map(letters, & &1.value)) == Enum.sort(Enum.map(@broken, &elem(&1, 0)))
    assert came["good"] == 3
    for {value, n} <- came, do: assert(n in 1..3, "#{value} came #{n} times")

    for r <- letters ++ copies(cluster, topic),
        do: assert([_] = for({@count, count} <- r.headers, do: count))

    assert {:ok, %{restarts: 0, partitions: [%{open: 0}]}} = Tracker.info(tracker)
    assert Consumer.pull(consumer, max: 10) == []
  end

  # The dead letters when all are there, and how often each message came.
  defp forget_until(consumer, cluster, dead, deadline, came) do
    came = came ++ Enum.map(Consumer.pull(consumer, max: 100, wait: 300), & &1.value)
    letters = records(cluster, dead, 1)

    cond do
      length(letters) >= length(@broken) -> {letters, Enum.frequencies(came)}
      System.monotonic_time(:millisecond) > deadline -> flunk("#{inspect(came)} came")
      true -> forget_until(consumer, cluster, dead, deadline, came)
    end
  end
end
