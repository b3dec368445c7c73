defmodule Kmq.Test.BrokerAdmin do
  @moduledoc false
  # What a cluster's administrator does to a running broker, in Kafka's own bytes: other settings of a topic, who may write to it.

  @doc "Sets settings of a topic (IncrementalAlterConfigs 0)."
  @spec set_config(String.t(), String.t(), [{String.t(), term}]) :: :ok
  def set_config(hosts, topic, pairs) do
    configs = for {name, value} <- pairs, do: [string(name), 0, string(to_string(value))]

    <<_throttle::32, 1::32, 0::16, _::binary>> =
      request(hosts, 44, 0, [<<1::32, 2>>, string(topic), <<length(pairs)::32>>, configs, 0])

    :ok
  end

  @doc "A node that knows access control lists; without any, everybody may do everything."
  def acl_config do
    %{
      "authorizer.class.name" => "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
      "allow.everyone.if.no.acl.found" => "true"
    }
  end

  @topic 2
  @literal 3
  @all 2
  @write 4
  @deny 2
  @allow 3

  @doc "Nobody may write to the topic any more (CreateAcls 1)."
  @spec deny_write(String.t(), String.t()) :: :ok
  def deny_write(hosts, topic) do
    acls =
      for {operation, permission} <- [{@all, @allow}, {@write, @deny}] do
        [@topic, string(topic), @literal, string("User:*"), string("*"), operation, permission]
      end

    <<_throttle::32, 2::32, 0::16, _::binary>> = request(hosts, 30, 1, [<<2::32>>, acls])
    :ok
  end

  @doc "Everybody may, again (DeleteAcls 1)."
  @spec allow_write(String.t(), String.t()) :: :ok
  def allow_write(hosts, topic) do
    filter = [@topic, string(topic), @literal, <<-1::16>>, <<-1::16>>, 1, 1]
    <<_throttle::32, 1::32, 0::16, _::binary>> = request(hosts, 31, 1, [<<1::32>>, filter])
    :ok
  end

  @doc "Commits offsets of a group that has no members (OffsetCommit 2), as another client would; `[{partition, offset, metadata}]`."
  @spec commit(String.t(), String.t(), String.t(), [{non_neg_integer, integer, String.t()}]) ::
          :ok
  def commit(hosts, group, topic, offsets) do
    partitions =
      for {partition, offset, metadata} <- offsets,
          do: [<<partition::32, offset::64>>, string(metadata)]

    body = [
      [string(group), <<-1::32>>, string(""), <<-1::64, 1::32>>],
      [string(topic), <<length(offsets)::32>>, partitions]
    ]

    # The first question for a coordinator makes the topic that it needs.
    Kmq.Test.Eventually.eventually(
      fn ->
        request(hosts, 10, 0, string(group))
        answer = request(hosts, 8, 2, body)
        all = for {partition, _, _} <- offsets, into: <<>>, do: <<partition::32, 0::16>>
        binary_part(answer, byte_size(answer), -byte_size(all)) == all
      end,
      20_000
    )

    :ok
  end

  @doc "Forgets a group that has no members, and with it its commits (DeleteGroups 0)."
  @spec delete_group(String.t(), String.t()) :: :ok
  def delete_group(hosts, group) do
    # The last member is still leaving.
    Kmq.Test.Eventually.eventually(
      fn ->
        <<_throttle::32, 1::32, n::16, ^group::binary-size(n), code::16>> =
          request(hosts, 42, 0, [<<1::32>>, string(group)])

        code == 0
      end,
      20_000
    )

    :ok
  end

  defp request(hosts, api, version, body) do
    [host, port] = hosts |> String.split(",") |> hd() |> String.split(":")
    options = [:binary, active: false, packet: 4]

    {:ok, socket} =
      :gen_tcp.connect(String.to_charlist(host), String.to_integer(port), options, 5_000)

    try do
      :ok = :gen_tcp.send(socket, [<<api::16, version::16, 1::32>>, string("kmq-test"), body])
      {:ok, <<1::32, answer::binary>>} = :gen_tcp.recv(socket, 0, 20_000)
      answer
    after
      :gen_tcp.close(socket)
    end
  end

  defp string(text), do: <<byte_size(text)::16, text::binary>>
end
