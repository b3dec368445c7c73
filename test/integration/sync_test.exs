defmodule Kmq.Integration.SyncTest do
  # What sync: has confirmed is over: a VM that is killed right after the answer brings nothing back.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Consumer
  alias Kmq.Test.{Holder, VM}

  for {format, action} <- [range: :ack, range: :discard, kmq: :ack] do
    test "killed right after #{action}, sync: true (#{format})", %{cluster: cluster} do
      topic = queue(cluster, 1)
      # No commit comes by itself.
      options = options(cluster, topic, marker_format: unquote(format), commit_interval: 600_000)

      vm = VM.start()
      :ok = VM.call(vm, Holder, :keep, [options])
      n = ahead_of_commit(cluster, topic, options[:group_id], vm, 0)
      assert VM.call(vm, Holder, :settle, [unquote(action), [[sync: true]]]) == :ok
      VM.kill(vm)
      assert committed(cluster, options[:group_id], topic, 1) == [{0, n}]

      publish(cluster, topic, ["afterwards"])
      consumer = consumer(options)
      assert [%{value: "afterwards"} = message] = pull(consumer, 1, 30_000)
      assert Kmq.ack(message, sync: true) == :ok
      assert Consumer.pull(consumer, max: 10, wait: 500) == []
    end
  end

  # For a while after an assignment each hand-out is committed at once.
  defp ahead_of_commit(cluster, topic, group, vm, n) do
    publish(cluster, topic, ["#{n}"])
    assert [{^n, 1, _}] = VM.call(vm, Holder, :next, [1])

    covered? =
      try do
        eventually(fn -> committed(cluster, group, topic, 1) == [{0, n + 1}] end, 500)
      rescue
        ExUnit.AssertionError -> false
      end

    if covered?, do: ahead_of_commit(cluster, topic, group, vm, n + 1), else: n + 1
  end
end
