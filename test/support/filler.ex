defmodule Kmq.Test.Filler do
  @moduledoc false
  # Makes offsets by the million: one record batch (Kafka's format 2, gzip), built once and sent many times. The broker gives each its own
  # offsets, and reads each record; only the bytes on the way are few.

  import Bitwise

  @per_batch 100_000
  @produce 0

  @doc "Appends `count` records (a multiple of 100,000), all with this key and without a value, to a partition."
  @spec fill(String.t(), String.t(), non_neg_integer, pos_integer, binary) :: :ok
  def fill(hosts, topic, partition, count, key) when rem(count, @per_batch) == 0 do
    [host, port] = hosts |> String.split(",") |> hd() |> String.split(":")
    options = [:binary, active: false, packet: 4]

    {:ok, socket} =
      :gen_tcp.connect(String.to_charlist(host), String.to_integer(port), options, 5_000)

    batch = batch(key)

    try do
      for _ <- 1..div(count, @per_batch), do: :ok = send_batch(socket, topic, partition, batch)
      :ok
    after
      :gen_tcp.close(socket)
    end
  end

  # Produce 3: transactional id, acks, timeout, topics.
  defp send_batch(socket, topic, partition, batch) do
    size = IO.iodata_length(batch)
    head = [<<@produce::16, 3::16, 1::32>>, string("kmq-test"), <<-1::16, -1::16, 30_000::32>>]
    body = [<<1::32>>, string(topic), <<1::32, partition::32, size::32>>, batch]
    :ok = :gen_tcp.send(socket, [head, body])

    {:ok, <<1::32, 1::32, n::16, _::binary-size(n), rest::binary>>} =
      :gen_tcp.recv(socket, 0, 60_000)

    <<1::32, ^partition::32, 0::16, _offset_time_start_throttle::binary>> = rest
    :ok
  end

  defp batch(key) do
    now = System.system_time(:millisecond)
    last = @per_batch - 1
    records = :zlib.gzip(for delta <- 0..last, do: record(delta, key))

    # attributes (1: gzip), last offset's delta, first and last time, no producer, its epoch and sequence, how many
    checked =
      <<1::16, last::32, now::64, now::64, -1::64, -1::16, -1::32, @per_batch::32,
        records::binary>>

    body = <<0::32, 2::8, crc32c(checked)::32, checked::binary>>
    <<0::64, byte_size(body)::32, body::binary>>
  end

  # attributes, time's delta, offset's delta, key, a null value, no headers
  defp record(delta, key) do
    body = [0, varint(0), varint(delta), varint(byte_size(key)), key, varint(-1), varint(0)]
    [varint(IO.iodata_length(body)), body]
  end

  defp varint(n), do: unsigned(bxor(n <<< 1, n >>> 63))
  defp unsigned(n) when n < 128, do: [n]
  defp unsigned(n), do: [bor(band(n, 127), 128) | unsigned(n >>> 7)]

  defp string(text), do: <<byte_size(text)::16, text::binary>>

  # Castagnoli's polynomial, reflected.
  @crc_table List.to_tuple(
               for byte <- 0..255 do
                 Enum.reduce(1..8, byte, fn _bit, crc ->
                   if band(crc, 1) == 1, do: bxor(crc >>> 1, 0x82F63B78), else: crc >>> 1
                 end)
               end
             )

  defp crc32c(bytes), do: bxor(crc32c(bytes, 0xFFFFFFFF), 0xFFFFFFFF)
  defp crc32c(<<>>, crc), do: crc

  defp crc32c(<<byte, rest::binary>>, crc),
    do: crc32c(rest, bxor(elem(@crc_table, band(bxor(crc, byte), 0xFF)), crc >>> 8))
end
