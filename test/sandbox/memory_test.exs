defmodule Kmq.Sandbox.MemoryTest do
  # Each message is a binary of its own: who keeps one keeps no other, be it small (copied twice) or large (copied once).
  use Kmq.Test.ClusterCase, on: :sandbox, async: false

  alias Kmq.Consumer

  # What else the VM's processes hold meanwhile.
  @slack 200_000

  for {n, bytes} <- [{10_000, 1_000}, {400, 12_000}] do
    test "one of #{n} messages of #{bytes} bytes is kept: the memory of the others comes back", %{
      cluster: cluster
    } do
      {n, bytes} = {unquote(n), unquote(bytes)}
      topic = queue(cluster, 4)
      publish_all(cluster, topic, n, bytes)
      consumer = consumer(options(cluster, topic, tracker: :external))
      {kept, all} = keep_one(consumer, n, bytes)
      assert byte_size(kept) == bytes
      assert :binary.referenced_byte_size(kept) == bytes

      eventually(fn ->
        back = all - binary_memory()
        assert back > (n - 1) * bytes - @slack, "of #{n * bytes} bytes #{back} came back"
      end)

      assert %{open: 0} = Kmq.info(consumer).total
      assert :erlang.phash2(kept) > 0
      Consumer.stop(consumer)
    end
  end

  # In functions of their own: nothing of the others is left on this process's stack.
  defp publish_all(cluster, topic, n, bytes) do
    publish(
      cluster,
      topic,
      for(i <- 1..n, do: {:binary.copy(<<i>>, bytes), partition: rem(i, 4)})
    )
  end

  defp keep_one(consumer, n, bytes) do
    messages = take(consumer, n, [])
    all = binary_memory()
    assert all > n * bytes
    assert Kmq.ack(messages) == :ok
    assert Consumer.flush(consumer, scaled(10_000)) == :ok
    {Enum.at(messages, div(n, 2)).value, all}
  end

  defp take(_consumer, 0, acc), do: acc

  defp take(consumer, n, acc) do
    messages = Consumer.pull(consumer, max: 1_000, wait: scaled(15_000))
    assert messages != []
    take(consumer, n - length(messages), messages ++ acc)
  end

  defp binary_memory do
    Enum.each(Process.list(), &:erlang.garbage_collect/1)
    :erlang.memory(:binary)
  end
end
