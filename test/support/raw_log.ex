defmodule Kmq.Test.RawLog do
  @moduledoc false
  # Reads a topic as it lies on the broker: Kafka's Fetch request over a socket, record batches taken apart here. It shares
  # no code with what it checks, and shows each byte of key, value and headers. One broker, no TLS, no compression.

  @fetch 1
  @max_bytes 8_000_000

  @type record :: %{
          partition: non_neg_integer,
          offset: non_neg_integer,
          ts: integer,
          key: binary | nil,
          value: binary | nil,
          headers: [{binary, binary | nil}]
        }

  @doc "All records of these partitions, in the order of partition and offset; `[]` for an empty topic."
  @spec read(String.t(), String.t(), pos_integer) :: [record]
  def read(bootstrap, topic, partitions), do: read(bootstrap, topic, partitions, 0)

  @doc "The same as one reads who sees only what transactions have committed, and nothing behind one that is open."
  @spec read_committed(String.t(), String.t(), pos_integer) :: [record]
  def read_committed(bootstrap, topic, partitions), do: read(bootstrap, topic, partitions, 1)

  @doc "The records of one partition from an offset on; what was deleted there is passed."
  @spec read_from(String.t(), String.t(), non_neg_integer, non_neg_integer) :: [record]
  def read_from(bootstrap, topic, partition, from),
    do: with_socket(bootstrap, &partition(&1, {topic, 0}, partition, from, []))

  defp read(bootstrap, topic, partitions, isolation) do
    with_socket(bootstrap, fn socket ->
      Enum.flat_map(0..(partitions - 1), &partition(socket, {topic, isolation}, &1, 0, []))
    end)
  end

  @doc "One past the last offset of a partition, as a reader sees it."
  @spec end_offset(String.t(), String.t(), non_neg_integer) :: non_neg_integer
  def end_offset(bootstrap, topic, partition) do
    with_socket(bootstrap, fn socket -> elem(fetch(socket, {topic, 0}, partition, 0), 0) end)
  end

  defp with_socket(bootstrap, fun) do
    [address | _] = String.split(bootstrap, ",")
    [host, port] = String.split(address, ":")
    options = [:binary, active: false, packet: 4]

    {:ok, socket} =
      :gen_tcp.connect(String.to_charlist(host), String.to_integer(port), options, 5_000)

    try do
      fun.(socket)
    after
      :gen_tcp.close(socket)
    end
  end

  defp partition(socket, topic, partition, from, acc) do
    {stop, batches, aborted} = fetch(socket, topic, partition, from)

    case for record <- batches(batches, partition, aborted), record.offset >= from, do: record do
      [] ->
        acc |> Enum.reverse() |> Enum.concat()

      records ->
        next = List.last(records).offset + 1
        records = Enum.reject(records, & &1[:hidden])

        if next < stop,
          do: partition(socket, topic, partition, next, [records | acc]),
          else: [records | acc] |> Enum.reverse() |> Enum.concat()
    end
  end

  # The leader of a new partition is not there at once.
  @not_yet [3, 5, 6]

  defp fetch(socket, topic, partition, from, tries \\ 100) do
    case ask(socket, topic, partition, from) do
      {:error, error} when error in @not_yet and tries > 0 ->
        Process.sleep(20)
        fetch(socket, topic, partition, from, tries - 1)

      # deleted: what is there begins a little later, in tests
      {:error, 1} when tries > 0 ->
        fetch(socket, topic, partition, from + 1, tries - 1)

      {:error, error} ->
        raise "fetch of #{elem(topic, 0)}-#{partition} at #{from}: Kafka's error #{error}"

      answer ->
        answer
    end
  end

  defp ask(socket, {topic, isolation}, partition, from) do
    request = [
      <<@fetch::16, 4::16, 1::32, string("kmq-test")::binary>>,
      <<-1::32, 100::32, 0::32, @max_bytes::32, isolation::8>>,
      <<1::32, string(topic)::binary, 1::32, partition::32, from::64, @max_bytes::32>>
    ]

    :ok = :gen_tcp.send(socket, request)
    {:ok, <<1::32, _throttle::32, 1::32, answer::binary>>} = :gen_tcp.recv(socket, 0, 10_000)
    {^topic, answer} = take_string(answer)

    <<1::32, ^partition::32, error::16, stop::signed-64, _stable::64, aborted::signed-32,
      answer::binary>> = answer

    listed = max(aborted, 0) * 16
    <<aborted::binary-size(listed), bytes::signed-32, records::binary>> = answer
    aborted = for <<producer::64, first::64 <- aborted>>, do: {producer, first}

    if error == 0,
      do: {stop, binary_part(records, 0, max(bytes, 0)), aborted},
      else: {:error, error}
  end

  # The last batch of an answer may be cut.
  defp batches(
         <<base::64, length::32, batch::binary-size(length), rest::binary>>,
         partition,
         aborted
       ) do
    <<_epoch::32, 2::8, crc::32, checked::binary>> = batch

    <<attributes::16, last_delta::32, first::64, max::64, producer::64, _epoch_and_sequence::48,
      n::32, records::binary>> = checked

    true = crc == crc32c(checked)

    if Bitwise.band(attributes, 7) != 0,
      do: raise("a compressed batch: publish with compression: :none")

    control = Bitwise.band(attributes, 32) != 0
    open = fn {id, from} -> id == producer and from <= base end

    # a control record ends the transaction; what is hidden still says how far the reading has come
    {records, aborted} =
      cond do
        control ->
          {[], List.delete(aborted, Enum.find(aborted, open))}

        Bitwise.band(attributes, 16) != 0 and Enum.any?(aborted, open) ->
          {[%{offset: base + last_delta, hidden: true, partition: partition, ts: 0}], aborted}

        true ->
          {records(records, n, {base, first}, []), aborted}
      end

    stamp = fn record ->
      ts = if Bitwise.band(attributes, 8) != 0, do: max, else: record.ts
      %{record | partition: partition, ts: ts}
    end

    Enum.map(records, stamp) ++ batches(rest, partition, aborted)
  end

  defp batches(_cut, _partition, _aborted), do: []

  defp records(_bytes, 0, _base, acc), do: Enum.reverse(acc)

  defp records(bytes, n, {base, first} = bases, acc) do
    {length, bytes} = varint(bytes)
    <<record::binary-size(length), rest::binary>> = bytes
    <<_attributes::8, record::binary>> = record
    {ts, record} = varint(record)
    {offset, record} = varint(record)
    {key, record} = sized(record)
    {value, record} = sized(record)
    {count, record} = varint(record)
    {headers, <<>>} = headers(record, count, [])

    record = %{
      partition: nil,
      offset: base + offset,
      ts: first + ts,
      key: key,
      value: value,
      headers: headers
    }

    records(rest, n - 1, bases, [record | acc])
  end

  defp headers(bytes, 0, acc), do: {Enum.reverse(acc), bytes}

  defp headers(bytes, n, acc) do
    {name, bytes} = sized(bytes)
    {value, bytes} = sized(bytes)
    headers(bytes, n - 1, [{name, value} | acc])
  end

  defp sized(bytes) do
    case varint(bytes) do
      {-1, rest} ->
        {nil, rest}

      {n, rest} ->
        <<value::binary-size(n), rest::binary>> = rest
        {value, rest}
    end
  end

  defp varint(bytes), do: varint(bytes, 0, 0)

  defp varint(<<more::1, bits::7, rest::binary>>, shift, acc) do
    acc = Bitwise.bor(acc, Bitwise.bsl(bits, shift))

    if more == 1,
      do: varint(rest, shift + 7, acc),
      else: {Bitwise.bxor(Bitwise.bsr(acc, 1), -Bitwise.band(acc, 1)), rest}
  end

  defp string(text), do: <<byte_size(text)::16, text::binary>>

  defp take_string(<<n::16, text::binary-size(n), rest::binary>>), do: {text, rest}

  # Castagnoli's polynomial, reflected; a table made once.
  @crc_table List.to_tuple(
               for byte <- 0..255 do
                 Enum.reduce(1..8, byte, fn _bit, crc ->
                   if Bitwise.band(crc, 1) == 1,
                     do: Bitwise.bxor(Bitwise.bsr(crc, 1), 0x82F63B78),
                     else: Bitwise.bsr(crc, 1)
                 end)
               end
             )

  defp crc32c(bytes), do: Bitwise.bxor(crc32c(bytes, 0xFFFFFFFF), 0xFFFFFFFF)

  defp crc32c(<<>>, crc), do: crc

  defp crc32c(<<byte, rest::binary>>, crc) do
    index = Bitwise.band(Bitwise.bxor(crc, byte), 0xFF)
    crc32c(rest, Bitwise.bxor(elem(@crc_table, index), Bitwise.bsr(crc, 8)))
  end
end
