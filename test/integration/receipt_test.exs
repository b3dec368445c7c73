defmodule Kmq.Integration.ReceiptTest do
  # Receipts of one VM are settled in another one, while the first one lives and after it was killed.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.{Consumer, Publisher}
  alias Kmq.Test.{Holder, Scene, VM}

  @secret "the shop's own secret"

  defp pull_values(consumer, n), do: consumer |> pull(n, 40_000) |> Enum.sort_by(& &1.value)

  @tag timeout: 120_000
  test "left by a VM, settled while it lives and after its death" do
    scene = Scene.new(partitions: 1, max_processing_time: 15_000, receipt_secret: @secret)
    vm = Scene.vm(scene)
    cluster = %{kind: :kafka, hosts: scene.hosts}
    publish(cluster, scene.topic, ~w(a b c d))
    receipts = VM.call(vm, Holder, :take, [scene.options, 4, [leave: true]])
    receipt = Map.new(receipts, fn {receipt, value} -> {value, receipt} end)
    {:ok, publisher} = Publisher.start_link(hosts: scene.hosts, receipt_secret: @secret)

    assert Kmq.settle(publisher, receipt["a"], :ack) == :ok
    VM.kill(vm)
    assert Kmq.settle(publisher, receipt["b"], :ack) == :ok
    assert Kmq.settle(publisher, receipt["c"], {:snooze, 1_000}) == :ok

    {:ok, stranger} =
      Publisher.start_link(hosts: scene.hosts, receipt_secret: String.upcase(@secret))

    assert {:error, %{reason: :receipt}} = Kmq.settle(stranger, receipt["d"], :ack)
    Publisher.close(stranger)
    Publisher.close(publisher)

    # Neither the death of the VM nor the end of its lease changed anything: c comes as it was told to, d when its time is over.
    consumer = consumer(scene.options)
    assert [%{value: "c", attempt: 1}] = c = pull_values(consumer, 1)
    assert [%{value: "d", attempt: 2}] = d = pull_values(consumer, 1)
    assert Kmq.ack(c ++ d, sync: true) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 500) == []
    assert Scene.copies(scene, 4) == 2
  end

  @tag timeout: 120_000
  test "kept in work by a VM that is killed: settled before its lease is over, or it comes again" do
    scene = Scene.new(partitions: 1, lease: 6_000, receipt_secret: @secret)
    vm = Scene.vm(scene)
    cluster = %{kind: :kafka, hosts: scene.hosts}
    publish(cluster, scene.topic, ~w(a b c))
    receipts = VM.call(vm, Holder, :take, [scene.options, 3, [leave: false]])
    receipt = Map.new(receipts, fn {receipt, value} -> {value, receipt} end)
    {:ok, publisher} = Publisher.start_link(hosts: scene.hosts, receipt_secret: @secret)

    # It lives, holds them, and renews them: the verdict counts all the same.
    assert Kmq.settle(publisher, receipt["a"], :ack) == :ok
    VM.kill(vm)
    assert Kmq.settle(publisher, receipt["b"], :ack) == :ok
    Publisher.close(publisher)
    consumer = consumer(scene.options)
    assert [%{value: "c", attempt: 2}] = c = pull_values(consumer, 1)
    assert Kmq.ack(c, sync: true) == :ok
    assert Consumer.pull(consumer, max: 5, wait: 500) == []
    assert Scene.copies(scene, 3) == 1
  end
end
