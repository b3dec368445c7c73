defmodule Kmq.Integration.PublisherTest do
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Publisher

  run_bodies(Kmq.Test.Bodies.Publisher)

  test "of a batch that its topic refuses only what is too large by itself fails", %{
    cluster: cluster
  } do
    topic = queue(cluster, 1, "small", config: [{"max.message.bytes", "20000"}])
    {:ok, publisher} = Publisher.start_link(hosts: cluster.hosts, compression: :none)
    large = String.duplicate("x", 30_000)
    values = for i <- 1..20, do: if(i == 7, do: large, else: "#{i}")

    assert {:error, results} = Publisher.publish_many(publisher, Enum.map(values, &{topic, &1}))
    assert {:error, %{reason: :msg_size_too_large}} = Enum.at(results, 6)
    assert for({:ok, place} <- List.delete_at(results, 6), do: place) |> length() == 19
    expected = Enum.sort(values -- [large])
    assert cluster |> records(topic, 1) |> Enum.map(& &1.value) |> Enum.sort() == expected

    # None is, and all of them are.
    thousands = for i <- 1..40, do: {topic, String.duplicate("#{rem(i, 10)}", 1_000)}
    assert {:ok, places} = Publisher.publish_many(publisher, thousands)
    assert length(Enum.uniq(places)) == 40
    assert {:error, %{reason: :msg_size_too_large}} = Publisher.publish(publisher, topic, large)
    :ok = Publisher.close(publisher)
  end
end
