defmodule Kmq.Integration.BytesTest do
  # The bytes on the wire, read back without our codec.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Consumer

  # Vectors printed by the JVM's kmq 0.2 and 0.3.2: {key, value} in hex.
  @v10_start_0_1_10000 {"000000000000000000000001", "010000000000002710"}
  @v11_end_1_1000 {"0000000100000000000003e8", "00"}
  @v13_end_0_0 {"000000000000000000000000", "00"}
  @v3_start_1_1000_1000 {"0000000100000000000003e8", "0100000000000003e8"}

  defp hex(bytes), do: Base.encode16(bytes, case: :lower)

  defp marker_topic(options), do: "#{hd(options[:topics])}__#{options[:group_id]}__markers"

  # The tracker writes CLOCKs into the same topic: END of no message for a Java peer.
  defp clock?(%{key: <<_::32, -1::signed-64>>}), do: true
  defp clock?(_record), do: false

  test "a :kmq pipeline writes what the JVM's kmq writes", %{cluster: cluster} do
    topic = queue(cluster, 2)

    publish(
      cluster,
      topic,
      for(_ <- 1..3, do: {"zero", partition: 0}) ++ for(_ <- 0..1_000, do: {"one", partition: 1})
    )

    options = options(cluster, topic, marker_format: :kmq, max_processing_time: 10_000)
    consumer = consumer(options)
    messages = pull(consumer, 1_004)
    assert Kmq.ack(messages) == :ok
    assert Consumer.flush(consumer) == :ok
    Consumer.stop(consumer)

    {clocks, markers} = cluster |> records(marker_topic(options), 2) |> Enum.split_with(&clock?/1)
    pairs = for marker <- markers, do: {hex(marker.key), hex(marker.value)}
    assert Enum.member?(pairs, @v10_start_0_1_10000)
    assert Enum.member?(pairs, @v11_end_1_1000)
    assert Enum.member?(pairs, @v13_end_0_0)

    # One START and one END for each message, nothing else, each in the partition of its message, START first.
    assert length(markers) == 2 * 1_004

    for message <- messages do
      key = <<message.partition::32, message.offset::64>>
      mine = for marker <- markers, marker.key == key, do: {marker.partition, marker.value}
      assert mine == [{message.partition, <<1, 10_000::64>>}, {message.partition, <<0>>}]
    end

    # What a Java peer does not know, it must be able to take for an END of nothing.
    for clock <- clocks do
      assert clock.key == <<clock.partition::32, -1::64>>
      assert <<0, _::binary>> = clock.value
    end

    # Headers are free for us: the group.
    for %{value: <<1, _::binary>>} = start <- markers,
        do: assert(start.headers == [{"kmq-group", options[:group_id]}])

    for %{value: <<0>>} = done <- markers,
        do: assert(done.headers == [{"kmq-group", options[:group_id]}])

    kcat(
      cluster,
      marker_topic(options),
      for(
        record <- clocks ++ markers,
        do: {record.partition, record.offset, hex(record.key), hex(record.value)}
      )
    )
  end

  test "another time limit, a retry and a rejection in :kmq format", %{cluster: cluster} do
    topic = queue(cluster, 2)
    publish(cluster, topic, for(_ <- 0..1_000, do: {"one", partition: 1}))

    options =
      options(cluster, topic, marker_format: :kmq, max_processing_time: 1_000, tracker: :external)

    consumer = consumer(options)
    messages = pull(consumer, 1_001)
    [again, bad | good] = messages
    assert Kmq.retry(again, delay: 777, reason: "busy") == :ok
    assert Kmq.reject(bad, "bad") == :ok
    assert Kmq.ack(good) == :ok
    assert Consumer.flush(consumer) == :ok

    markers = records(cluster, marker_topic(options), 2)
    assert Enum.member?(for(m <- markers, do: {hex(m.key), hex(m.value)}), @v3_start_1_1000_1000)
    group = {"kmq-group", options[:group_id]}

    assert [start, retry] =
             for(m <- markers, m.key == <<1::32, again.offset::64>>, do: {m.value, m.headers})

    assert start == {<<1, 1_000::64>>, [group]}
    assert {<<1, 777::64>>, headers} = retry

    assert Enum.sort(headers) ==
             Enum.sort([group, {"kmq-cause", "failed"}, {"kmq-flags", "1"}, {"kmq-error", "busy"}])

    assert [_start, {<<1, 0::64>>, headers}] =
             for(m <- markers, m.key == <<1::32, bad.offset::64>>, do: {m.value, m.headers})

    assert Enum.sort(headers) ==
             Enum.sort([
               group,
               {"kmq-cause", "rejected"},
               {"kmq-flags", "3"},
               {"kmq-error", "bad"}
             ])
  end

  test "a :range pipeline writes one record for a batch, which a Java peer takes for an END of nothing",
       %{cluster: cluster} do
    topic = queue(cluster, 1)
    n = 1_000
    publish(cluster, topic, for(_ <- 1..n, do: "v"))
    options = options(cluster, topic, lease: 7_000)
    consumer = consumer(options)
    messages = pull(consumer, n)
    assert Kmq.ack(messages) == :ok
    assert Consumer.flush(consumer) == :ok
    Consumer.stop(consumer)

    markers = records(cluster, marker_topic(options), 1)
    crc = :erlang.crc32([topic, 0, options[:group_id]])

    types =
      for marker <- markers do
        assert marker.key == <<0::32, -1::64>>
        assert marker.headers == []
        assert <<0x00, 0x4B, 1, type, ^crc::32, body::binary>> = marker.value
        assert byte_size(marker.value) < 64
        {type, body}
      end

    # A few records for a thousand messages, and all of them cover 0..999 once.
    starts = for {1, body} <- types, do: ranges(body)
    ends = for {2, body} <- types, do: ranges(body)
    assert Enum.sort(Enum.concat(starts)) == Enum.to_list(0..(n - 1))
    assert Enum.sort(Enum.concat(ends)) == Enum.to_list(0..(n - 1))
    assert length(starts) <= 20
    # START's body ends in its lease: 7000 as a uvar.
    for {1, body} <- types, do: assert(String.contains?(body, <<0xD8, 0x36>>))

    kcat(
      cluster,
      marker_topic(options),
      for(m <- markers, do: {m.partition, m.offset, hex(m.key), hex(m.value)})
    )
  end

  # An offset set of form 0, decoded as the format's page says.
  defp ranges(body) do
    {base, <<0, body::binary>>} = uvar(body)
    {n, body} = uvar(body)

    {offsets, _} =
      Enum.flat_map_reduce(1..n, {base, body}, fn _, {at, body} ->
        {gap, body} = uvar(body)
        {length, body} = uvar(body)
        first = at + gap
        {Enum.to_list(first..(first + length - 1)), {first + length, body}}
      end)

    offsets
  end

  defp uvar(bytes), do: uvar(bytes, 0, 0)

  defp uvar(<<1::1, bits::7, rest::binary>>, shift, acc),
    do: uvar(rest, shift + 7, acc + Bitwise.bsl(bits, shift))

  defp uvar(<<0::1, bits::7, rest::binary>>, shift, acc),
    do: {acc + Bitwise.bsl(bits, shift), rest}

  # A second pair of eyes, where it is installed: librdkafka's own command line reader.
  defp kcat(cluster, topic, expected) do
    case System.find_executable("kcat") do
      nil ->
        IO.puts(
          "left out: kcat's reading of the markers (no kcat here; Debian: apt-get install kcat)"
        )

      kcat ->
        {text, 0} =
          System.cmd(
            kcat,
            [
              "-C",
              "-b",
              cluster.hosts,
              "-t",
              topic,
              "-o",
              "beginning",
              "-e",
              "-q",
              "-f",
              "%p %o %K %k %S %s\\n"
            ],
            stderr_to_stdout: true
          )

        seen = kcat_records(text, [])
        assert expected -- seen == []
        # A tracker on its way out may have written another CLOCK.
        for {_, _, key, _} <- seen -- expected,
            do: assert(String.ends_with?(key, "ffffffffffffffff"))
    end
  end

  # "partition offset key-length key value-length value\n": lengths first, since keys and values are bytes.
  defp kcat_records("", acc), do: acc

  defp kcat_records(text, acc) do
    [partition, offset, key_size, rest] = String.split(text, " ", parts: 4)
    key_size = String.to_integer(key_size)
    <<key::binary-size(key_size), " ", rest::binary>> = rest
    [value_size, rest] = :binary.split(rest, " ")
    value_size = String.to_integer(value_size)
    <<value::binary-size(value_size), "\n", rest::binary>> = rest

    kcat_records(rest, [
      {String.to_integer(partition), String.to_integer(offset), hex(key), hex(value)} | acc
    ])
  end
end
