defmodule Kmq.Test.Bodies.Views do
  @moduledoc false
  # What Kmq.info/1 and the gauges say, on any cluster.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.Consumer
  alias Kmq.Test.Gauges

  body "lag, open and the rest are counted, in no event negative, and all zero when all is acked",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    n = 300
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
    Gauges.listen()

    options =
      options(cluster, topic, start_ahead: 40, gauge_interval: 20, max_processing_time: 600_000)

    consumer = consumer(options)
    total = fn -> Kmq.info(consumer).total end

    # Nothing is handed out: the whole topic is behind the commit.
    eventually(
      fn ->
        assert %{assigned: 2, lag: ^n, open: 0, oldest_open_ms: 0, unwritten: 0} = total.()
        assert %{buffered: b, started: s} = total.()
        assert s in 40..b
      end,
      15_000
    )

    first = pull(consumer, 100)
    began = System.monotonic_time(:millisecond)
    lag = n - length(first)
    eventually(fn -> assert %{lag: ^lag} = total.() end)
    assert total.().open == length(first)
    eventually(fn -> assert total.().oldest_open_ms >= 100 end)
    assert total.().oldest_open_ms <= System.monotonic_time(:millisecond) - began + 1_000

    # The oldest is what is oldest of those that are left.
    [kept | done] = first
    assert Kmq.ack(done) == :ok
    assert %{open: 1} = total.()
    rest = pull(consumer, n - length(first))
    assert Kmq.extend(kept, 20_000) == :ok
    eventually(fn -> assert total.().oldest_open_ms >= 1_000 end, 10_000)
    assert Kmq.ack([kept | rest], sync: true) == :ok

    zero = %{
      assigned: 2,
      lag: 0,
      buffered: 0,
      started: 0,
      open: 0,
      oldest_open_ms: 0,
      unwritten: 0
    }

    eventually(fn -> assert total.() == zero end)
    last = eventually(fn -> Gauges.member(consumer) == zero && Gauges.all() end)
    assert Enum.any?(last, fn {_, values, _} -> values[:open] == length(first) end)
    Gauges.assert_sane(last)

    # Started again: what is done stays done.
    Consumer.stop(consumer)
    Gauges.clear()
    again = consumer(options)
    eventually(fn -> assert Kmq.info(again).total == zero end, 15_000)
    eventually(fn -> Gauges.member(again) == zero end)
    Gauges.assert_sane(Gauges.all())
  end

  body "whose it is: a consumer, a pipeline, a publisher, a tracker, each as a table in iex", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, ["a", "b", "c"])
    name = :"views_#{System.unique_integer([:positive])}"
    options = options(cluster, topic, name: name, tracker: :external)
    consumer = consumer(options)
    [a, b, c] = pull(consumer, 3)
    eventually(fn -> assert %{lag: 0, open: 3} = Kmq.info(name).total end)

    info = Kmq.info(consumer)
    assert %Kmq.Info{kind: :consumer, name: ^consumer, partitions: [row]} = info
    assert info.group == options[:group_id]

    assert %{state: :assigned, member: 0, topic: ^topic, partition: 0, end: 3, committed: 3} = row

    assert [head, columns, row, sum, ">"] = String.split(inspect(Kmq.info(name)), "\n")
    assert head == "#Kmq.Info<consumer #{inspect(name)} of #{inspect(options[:group_id])}"

    assert String.split(columns) ==
             ~w(TOPIC PARTITION STATE END COMMITTED LAG BUFFERED STARTED OPEN OLDEST)

    assert [^topic, "0", "assigned", "3", "3", "0", "0", "0", "3" | _age] = String.split(row)
    assert String.split(sum) == ~w(sum 0 0 0 3)
    assert inspect([info]) =~ "#Kmq.Info<consumer"

    {:ok, publisher} = Kmq.Publisher.start_link(hosts: cluster.hosts)
    assert %{kind: :publisher, total: %{queued: 0}} = Kmq.info(publisher)
    assert inspect(Kmq.info(publisher)) =~ "0 messages in its queue"
    :ok = Kmq.Publisher.close(publisher)

    tracker =
      start_supervised!(
        {Kmq.Tracker, Keyword.drop(options, [:name, :group_config, :fetch_config])}
      )

    eventually(
      fn ->
        assert %{kind: :tracker, total: %{open: 3, lag: 0}, partitions: [p]} = Kmq.info(tracker)
        assert {p.state, p.open, p.due} == {:ready, 3, 0}
      end,
      20_000
    )

    assert inspect(Kmq.info(tracker)) =~ ~r/TOPIC .*\n  #{topic} .* ready /

    assert Kmq.ack([a, b, c], sync: true) == :ok
    eventually(fn -> assert %{open: 0, lag: 0} = Kmq.info(tracker).total end)

    for other <- [self(), :nobody, "text", {:via, Registry, {Kmq.Registry, :none}}] do
      assert_raise ArgumentError, ~r/expected a consumer, a pipeline's name/, fn ->
        Kmq.info(other)
      end
    end
  end
end
