defmodule Kmq.Integration.EverythingRestartsTest do
  # The count of attempts and the wait before the next one are in Kafka: the consumer's VM and the tracker's are both killed, both are
  # started anew, and the message comes when it was to come, as the attempt it was to be.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Test.{Holder, VM, Worker}

  @waits [6_000, 4_000, 2_000]

  defp now, do: System.monotonic_time(:millisecond)

  defp tracker_pids(vm), do: for({pid, "kmq_tracker"} <- VM.port_programs(vm), do: pid)

  # {consumer's VM, tracker's VM}
  defp start(options) do
    tracker = VM.start()

    :ok =
      VM.call(tracker, Worker, :start_tracker, [
        Keyword.drop(options, ~w(tracker group_config fetch_config)a)
      ])

    consumer = VM.start()
    :ok = VM.call(consumer, Holder, :keep, [options])
    {consumer, tracker}
  end

  defp kill({consumer, tracker}) do
    pids = tracker_pids(tracker)
    assert [_] = pids
    for pid <- pids, do: VM.signal(pid, :kill)
    VM.kill(tracker)
    VM.kill(consumer)
    eventually(fn -> not Enum.any?(pids, &VM.os_alive?/1) end)
  end

  # What comes next, and that it came no sooner than `wait` after `since`, nor much later.
  defp comes({consumer, _} = vms, since, wait, attempt) do
    assert [{_offset, ^attempt, "late"}] = VM.call(consumer, Holder, :next, [1], scaled(40_000))
    waited = now() - since
    IO.puts(:stderr, "attempt #{attempt} after #{waited} ms, #{wait} wanted")
    assert waited >= wait

    # A new VM, a new member of the group, a new tracker: all of it takes its time, within the wait or beyond it.
    assert waited < wait + scaled(10_000)
    vms
  end

  for format <- [:range, :kmq] do
    @tag timeout: scaled(120_000)
    test "attempt and spacing survive a restart of everything (#{format})", %{cluster: cluster} do
      topic = queue(cluster, 1)
      quick = ["session.timeout.ms": 2_000, "heartbeat.interval.ms": 300]

      options =
        options(cluster, topic,
          marker_format: unquote(format),
          tracker: :external,
          lease: 2_000,
          max_processing_time: 4_000,
          backoff: @waits,
          max_redeliveries: 3,
          kafka_config: [consumer: quick, tracker: quick]
        )
        |> Keyword.delete(:group_config)

      {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))
      publish(cluster, topic, ["late"])
      [first, second, third] = @waits
      vms = start(options)
      assert [{0, 1, "late"}] = VM.call(elem(vms, 0), Holder, :next, [1])

      # It fails, and everything is gone before it comes again.
      since = now()

      assert VM.call(elem(vms, 0), Holder, :settle, [:retry, [[sync: true, reason: "one"]]]) ==
               :ok

      kill(vms)
      vms = options |> start() |> comes(since, first, 2)

      # In work when everything is killed: a crash, told by its lease (in the other format by its time limit), counts and waits as well.
      since = now()
      kill(vms)
      vms = options |> start() |> comes(since, second, 3)

      since = now()

      assert VM.call(elem(vms, 0), Holder, :settle, [:retry, [[sync: true, reason: "three"]]]) ==
               :ok

      kill(vms)
      vms = options |> start() |> comes(since, third, 4)

      # That was the last: a dead letter now.
      assert VM.call(elem(vms, 0), Holder, :settle, [:retry, [[sync: true, reason: "four"]]]) ==
               :ok

      kill(vms)
      vms = start(options)
      [dead] = await_records(cluster, topic <> "__undelivered", 1, 1, 20_000)
      assert {"kmq-cause", "failed"} in dead.headers
      [letter] = Enum.to_list(Kmq.DeadLetters.stream(topic, hosts: cluster.hosts))
      assert {letter.attempts, letter.deliveries, letter.error} == {4, 4, "four"}
      kill(vms)
    end
  end
end
