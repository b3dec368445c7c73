defmodule Kmq.Test.MarkerLog do
  @moduledoc false
  # A marker topic's ENDs as they lie on the broker, read with nothing of what is tested.

  alias Kmq.Test.RawLog

  @causes [:ack, :discarded, :redelivered, :dead_lettered, :gone, :expired]

  @doc "`%{{partition, offset} => [{cause, ts}]}`; in :kmq format, which does not say it, the cause is what its header has."
  def ends(hosts, topic, partitions) do
    for record <- RawLog.read(hosts, topic, partitions),
        {offset, cause} <- ended(record),
        reduce: %{} do
      acc ->
        Map.update(
          acc,
          {record.partition, offset},
          [{cause, record.ts}],
          &(&1 ++ [{cause, record.ts}])
        )
    end
  end

  @types {:start, :end, :extend, :retry, :park, :checkpoint, :clock}

  @doc "The markers of a partition from one on, for whoever looks for a fault: `{offset, ts, type, offsets of the queue, the rest of the bytes}`."
  def read_from(hosts, topic, partition, from),
    do: for(record <- RawLog.read_from(hosts, topic, partition, from), do: entry(record))

  defp entry(%{value: <<0x00, 0x4B, 1, type, _crc::32, body::binary>>} = record)
       when type in 1..5 do
    {offsets, rest} = set(body)
    {record.offset, record.ts, elem(@types, type - 1), offsets, rest}
  end

  defp entry(%{value: <<0x00, 0x4B, 1, type, _crc::32, body::binary>>} = record)
       when type in 6..7,
       do: {record.offset, record.ts, elem(@types, type - 1), [], body}

  defp entry(%{key: <<_::32, offset::signed-64>>, value: <<0>>} = record),
    do: {record.offset, record.ts, :end, [offset], ""}

  defp entry(%{key: <<_::32, offset::signed-64>>, value: <<1, rest::binary>>} = record),
    do: {record.offset, record.ts, :start, [offset], rest}

  defp entry(record), do: {record.offset, record.ts, :other, [], record.value}

  defp ended(%{value: <<0x00, 0x4B, 1, 2, _crc::32, body::binary>>}) do
    {offsets, <<cause, _tlvs::binary>>} = set(body)
    for offset <- offsets, do: {offset, Enum.at(@causes, cause)}
  end

  defp ended(%{key: <<_::32, offset::signed-64>>, value: <<0>>}) when offset >= 0,
    do: [{offset, :any}]

  defp ended(_other), do: []

  @doc "An offset set: `{offsets, rest}`."
  def set(body) do
    {base, <<form, rest::binary>>} = uvar(body)
    {n, rest} = uvar(rest)
    if form == 0, do: runs(n, base, rest, []), else: bitmap(n, base, rest)
  end

  defp runs(0, _at, rest, acc), do: {acc |> Enum.reverse() |> Enum.concat(), rest}

  defp runs(n, at, rest, acc) do
    {gap, rest} = uvar(rest)
    {length, rest} = uvar(rest)
    from = at + gap
    runs(n - 1, from + length, rest, [Enum.to_list(from..(from + length - 1)) | acc])
  end

  defp bitmap(bits, base, rest) do
    bytes = div(bits + 7, 8)
    <<map::binary-size(bytes), rest::binary>> = rest

    offsets =
      for i <- 0..(bits - 1),
          Bitwise.band(:binary.at(map, div(i, 8)), Bitwise.bsl(1, rem(i, 8))) != 0,
          do: base + i

    {offsets, rest}
  end

  def uvar(<<0::1, n::7, rest::binary>>), do: {n, rest}

  def uvar(<<1::1, n::7, rest::binary>>) do
    {more, rest} = uvar(rest)
    {n + more * 128, rest}
  end
end
