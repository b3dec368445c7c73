defmodule Kmq.Test.Markers do
  @moduledoc false
  # Marker records written by hand, in the bytes of guides/format.md; nothing of what is tested is used for it.

  import Bitwise

  @doc "A START of one offset, in the :kmq format."
  def start(partition, offset, after_ms),
    do: {<<1, after_ms::64>>, key: <<partition::32, offset::64>>, partition: partition}

  @doc "An END of one offset, in the :kmq format."
  def done(partition, offset),
    do: {<<0>>, key: <<partition::32, offset::64>>, partition: partition}

  @doc "A START of one range; `scope` is `{queue topic, group}`."
  def start_range(scope, partition, first, count, lease_ms),
    do: range(scope, partition, 1, set(first, count) <> uvar(lease_ms))

  @doc "A RETRY of one range; cause and flags as guides/format.md numbers them."
  def retry_range(scope, partition, first, count, delay_ms, cause, flags),
    do: range(scope, partition, 4, set(first, count) <> uvar(delay_ms) <> <<cause, flags>>)

  @doc "An END of one range: acknowledged."
  def done_range(scope, partition, first, count),
    do: range(scope, partition, 2, set(first, count) <> <<0>>)

  @doc "A PARK of one range, due at an epoch time; `scope` is `{queue topic, group}`."
  def park(scope, partition, first, count, due_ms),
    do: range(scope, partition, 5, set(first, count) <> uvar(due_ms))

  @doc "A record of ours of some type and version, with any body."
  def range(scope, partition, type, body, version \\ 1) do
    {topic, group} = scope
    crc = :erlang.crc32([topic, 0, group])

    {<<0x00, 0x4B, version, type, crc::32, body::binary>>,
     key: <<partition::32, -1::64>>, partition: partition}
  end

  defp set(first, count), do: uvar(first) <> <<0>> <> uvar(1) <> uvar(0) <> uvar(count)

  def uvar(n) when n < 0x80, do: <<n>>
  def uvar(n), do: <<bor(band(n, 0x7F), 0x80)>> <> uvar(bsr(n, 7))

  @doc "Writes records to a marker topic and waits until they are durable; `rounds` times the same function of the round's number."
  def write(hosts, topic, records), do: write(hosts, topic, 1, fn _ -> records end)

  def write(hosts, topic, rounds, fun) do
    {:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts, compression: :none)

    for round <- 1..rounds do
      {:ok, _} =
        Kmq.Publisher.publish_many(
          publisher,
          for({value, options} <- fun.(round), do: {topic, value, options}),
          timeout: 60_000
        )
    end

    :ok = Kmq.Publisher.close(publisher)
  end
end
