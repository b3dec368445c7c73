defmodule Kmq.Test.Bodies.Pipeline do
  @moduledoc false
  # What a user of the Broadway producer can rely on, on any cluster. The stage host stands in for Broadway.

  use Kmq.Test.ClusterCase.Bodies

  alias Kmq.StageHost

  defp host(options, handler, extra \\ []) do
    host_options =
      Keyword.merge(
        [producer: {OffBroadway.Kmq.Producer, options}, handler: handler, concurrency: 4],
        extra
      )

    {:ok, host} = StageHost.start_link(host_options)
    Process.unlink(host)
    on_exit_stop(host)
    host
  end

  # A failed test leaves no pipeline behind.
  defp on_exit_stop(host) do
    on_exit(host, fn -> if Process.alive?(host), do: StageHost.stop(host, 10_000) end)
  end

  defp tell(test, message) do
    metadata = Map.put(message.metadata, :at, System.monotonic_time(:millisecond))
    send(test, {:handled, message.data, metadata})
  end

  defp failed(message, reason), do: %{message | status: {:failed, reason}}

  # As Broadway.Message.configure_ack/2.
  defp configure_ack(%{acknowledger: {module, ack_ref, data}} = message, options) do
    {:ok, data} = module.configure(ack_ref, data, options)
    %{message | acknowledger: {module, ack_ref, data}}
  end

  defp dead(cluster, topic, n, partitions \\ 1) do
    for record <- await_records(cluster, topic <> "__undelivered", partitions, n, 20_000),
        into: %{},
        do: {record.value, Map.new(record.headers)}
  end

  defp handled(n, timeout \\ 15_000) do
    for _ <- 1..n//1 do
      assert_receive {:handled, data, metadata}, scaled(timeout)
      {data, metadata}
    end
  end

  body "every message once, with what Kafka knows of it", %{cluster: cluster} do
    topic = queue(cluster, 4)
    n = 2_000

    publish(
      cluster,
      topic,
      for(i <- 1..n, do: {"#{i}", partition: rem(i, 4), key: "k#{i}", headers: [{"i", "#{i}"}]})
    )

    test = self()

    host =
      host(
        options(cluster, topic),
        fn message ->
          tell(test, message)
          message
        end,
        max_demand: 50
      )

    all = handled(n)
    assert Enum.sort(Enum.map(all, &elem(&1, 0))) == Enum.sort(Enum.map(1..n, &"#{&1}"))

    for {data, metadata} <- all do
      i = String.to_integer(data)
      assert %{topic: ^topic, attempt: 1, deliveries: 1, offset: offset, ts: ts} = metadata
      assert metadata.partition == rem(i, 4)
      assert metadata.key == "k#{i}"
      assert metadata.headers == [{"i", data}]
      assert metadata.id == {topic, metadata.partition, offset, ts}
    end

    assert StageHost.stop(host, 20_000) == :ok
    refute_received {:handled, _, _}
    assert length(records(cluster, topic, 4)) == n
    assert records(cluster, topic <> "__undelivered", 4) == []
  end

  body "what becomes of a message that fails, by its reason", %{cluster: cluster} do
    for format <- [:range, :kmq], do: by_its_reason(cluster, format)
  end

  defp by_its_reason(cluster, format) do
    topic = queue(cluster, 1)
    test = self()

    values =
      ~w(ok retry retry-ms retry-reason release snooze reject discard raise raise-reject throw exit plain text)

    publish(cluster, topic, values)

    handler = fn message ->
      tell(test, message)

      if message.metadata.deliveries == 1 do
        case message.data do
          "ok" -> message
          "retry" -> failed(message, {:retry, 0})
          "retry-ms" -> failed(message, {:retry, 1_000})
          "retry-reason" -> failed(message, {:retry, fn 1, :busy -> 10 end, :busy})
          "release" -> failed(message, :release)
          "snooze" -> failed(message, {:snooze, 700})
          "reject" -> failed(message, {:reject, %{code: 7}})
          "discard" -> failed(message, {:discard, "not worth it"})
          "raise" -> raise "oh"
          "raise-reject" -> raise Kmq.Reject, "not JSON"
          "throw" -> throw(:ball)
          "exit" -> exit(:gone)
          "plain" -> failed(message, :no)
          "text" -> failed(message, "because")
        end
      else
        if message.data in ["plain", "raise"],
          do: failed(message, "again: #{message.data}"),
          else: message
      end
    end

    options = [marker_format: format, max_redeliveries: 1, backoff: [20]]
    host = host(options(cluster, topic, options), handler)

    # 14 at first; all but ok, reject, raise-reject and discard come again.
    all = handled(14 + 10)
    again = for {data, %{deliveries: 2} = metadata} <- all, into: %{}, do: {data, metadata}

    assert Enum.sort(Map.keys(again)) ==
             ~w(exit plain raise release retry retry-ms retry-reason snooze text throw)

    first = for {data, %{deliveries: 1} = metadata} <- all, into: %{}, do: {data, metadata}

    for {data, metadata} <- again do
      assert metadata.id == first[data].id
      # who gives a message back uses up no attempt
      assert {data, metadata.attempt} == {data, if(data in ~w(release snooze), do: 1, else: 2)}
    end

    assert again["retry-ms"].at - first["retry-ms"].at >= 1_000
    assert again["snooze"].at - first["snooze"].at >= 700

    dead = dead(cluster, topic, 4)
    assert Enum.sort(Map.keys(dead)) == ~w(plain raise raise-reject reject)
    assert dead["reject"]["kmq-cause"] == "rejected"
    assert dead["reject"]["kmq-error"] == inspect(%{code: 7})
    assert dead["raise-reject"]["kmq-cause"] == "rejected"
    assert dead["raise-reject"]["kmq-error"] == "not JSON"
    assert dead["plain"]["kmq-cause"] == "failed"
    assert dead["plain"]["kmq-error"] == "again: plain"
    assert dead["plain"]["kmq-redelivery-count"] == <<2>>
    assert StageHost.stop(host, 20_000) == :ok
    refute_received {:handled, _, _}
  end

  body "on_success and on_failure of the producer, and configure_ack of one message", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    test = self()
    publish(cluster, topic, ~w(ok bad ok-rejected bad-acked bad-discarded bad-retried noop))

    handler = fn message ->
      tell(test, message)
      again? = message.metadata.attempt > 1

      case message.data do
        "ok" -> message
        "bad" -> failed(message, "bad")
        "ok-rejected" -> configure_ack(message, on_success: :reject)
        "bad-acked" -> message |> configure_ack(on_failure: :ack) |> failed("x")
        "bad-discarded" -> message |> configure_ack(on_failure: :discard) |> failed("x")
        "bad-retried" when again? -> message
        "bad-retried" -> message |> configure_ack(on_failure: {:retry, [10]}) |> failed("x")
        "noop" when again? -> message
        "noop" -> configure_ack(message, on_success: :noop)
      end
    end

    options = options(cluster, topic, on_failure: :reject, max_processing_time: 1_000)
    host = host(options, handler)
    all = handled(7 + 2)
    again = for {data, %{attempt: 2}} <- all, do: data
    assert Enum.sort(again) == ~w(bad-retried noop)

    dead = dead(cluster, topic, 2)
    assert dead["bad"]["kmq-error"] == "bad"
    assert dead["ok-rejected"]["kmq-cause"] == "rejected"
    assert StageHost.stop(host, 20_000) == :ok
    assert length(records(cluster, topic <> "__undelivered", 1)) == 2
  end

  body "on_success: :manual leaves a message to its receipt, and ends with it", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    test = self()
    publish(cluster, topic, ~w(kept settled rejected acked))

    handler = fn message ->
      tell(test, message)
      send(test, {:receipt, message.data, Kmq.receipt(message)})
      if message.data == "acked", do: configure_ack(message, on_success: :ack), else: message
    end

    options =
      options(cluster, topic,
        on_success: :manual,
        max_processing_time: 5_000,
        max_redeliveries: 1,
        receipt_secret: "the secret of this one"
      )

    host = host(options, handler)
    handled(4)

    receipts =
      for _ <- 1..4, into: %{} do
        assert_receive {:receipt, data, receipt}
        {data, receipt}
      end

    # The pipeline may end: what was left is the receipts'.
    assert StageHost.stop(host, 20_000) == :ok

    {:ok, publisher} =
      Kmq.Publisher.start_link(hosts: cluster.hosts, receipt_secret: "the secret of this one")

    assert Kmq.settle(publisher, receipts["settled"], :ack) == :ok
    assert Kmq.settle(publisher, receipts["rejected"], {:reject, "the customer said no"}) == :ok
    Kmq.Publisher.close(publisher)

    host = host(options, handler)
    assert [{"kept", %{attempt: 2}}] = handled(1, 20_000)
    assert %{"rejected" => %{"kmq-error" => "the customer said no"}} = dead(cluster, topic, 1)
    assert StageHost.stop(host, 20_000) == :ok
    refute_received {:handled, _, _}
  end

  body "slow handlers: longer than the lease, with the rest waiting in the workers and in the engine",
       %{cluster: cluster} do
    topic = queue(cluster, 2)
    n = 1_200
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 2)}))
    test = self()
    hold = :atomics.new(1, [])

    # The first message of each worker takes three leases; behind it are up to 200 in its hands, the rest is STARTed.
    handler = fn message ->
      if :atomics.add_get(hold, 1, 1) <= 2, do: Process.sleep(3_500)
      tell(test, message)
      message
    end

    options = options(cluster, topic, lease: 1_000)
    host = host(options, handler, concurrency: 2, max_demand: 200)
    all = handled(n, 20_000)

    assert Enum.all?(all, fn {_, metadata} ->
             metadata.attempt == 1 and metadata.deliveries == 1
           end)

    assert length(Enum.uniq(Enum.map(all, &elem(&1, 0)))) == n
    assert StageHost.stop(host, 20_000) == :ok
    refute_received {:handled, _, _}
    assert length(records(cluster, topic, 2)) == n
  end

  body "a stop in the middle of the work: nothing twice, nothing counted, the rest for the next",
       %{cluster: cluster} do
    topic = queue(cluster, 4)
    n = 3_000
    publish(cluster, topic, for(i <- 1..n, do: {"#{i}", partition: rem(i, 4)}))
    test = self()
    options = options(cluster, topic)

    handler = fn message ->
      tell(test, message)
      message
    end

    # The sandbox takes its time for each rebalance.
    stops = if cluster.kind == :kafka, do: 6, else: 1

    stopped =
      for _ <- 1..stops, reduce: [] do
        so_far ->
          host = host(options, handler, max_demand: 20)
          first = handled(min(100, n - length(so_far)))
          assert StageHost.stop(host, 20_000) == :ok
          so_far ++ first ++ flush([])
      end

    host = host(options, handler, max_demand: 20)
    rest = handled(n - length(stopped))
    assert StageHost.stop(host, 20_000) == :ok
    all = stopped ++ rest ++ flush([])
    assert for({_, %{attempt: attempt}} = message <- all, attempt > 1, do: message) == []
    assert length(all) == n
    assert length(Enum.uniq(Enum.map(all, &elem(&1, 0)))) == n
    assert records(cluster, topic <> "__undelivered", 4) == []
  end

  defp flush(acc) do
    receive do
      {:handled, data, metadata} -> flush([{data, metadata} | acc])
    after
      0 -> acc
    end
  end

  body "a killed worker: what it had comes again, the others are not disturbed", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1)
    publish(cluster, topic, for(i <- 1..100, do: "#{i}"))
    test = self()

    handler = fn message ->
      if message.data == "50" and message.metadata.attempt == 1, do: Process.exit(self(), :kill)
      tell(test, message)
      message
    end

    # It had at most 10 in its hands; they time out.
    host = host(options(cluster, topic, max_processing_time: 1_500), handler, max_demand: 10)

    all = gather(%{}, 100, 20_000)
    assert Enum.sort(Map.keys(all)) == Enum.sort(Enum.map(1..100, &"#{&1}"))
    assert all["50"].attempt == 2
    assert Enum.count(all, fn {_, metadata} -> metadata.attempt > 1 end) <= 10
    assert StageHost.stop(host, 20_000) == :ok
  end

  defp gather(all, n, _timeout) when map_size(all) == n, do: all

  defp gather(all, n, timeout) do
    receive do
      {:handled, data, metadata} -> gather(Map.put(all, data, metadata), n, timeout)
    after
      scaled(timeout) -> all
    end
  end
end
