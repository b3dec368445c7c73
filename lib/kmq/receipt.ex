defmodule Kmq.Receipt do
  @moduledoc false
  # Who has a receipt can settle a message without its consumer: it names what a marker needs. All integers big-endian.
  #
  #     "kmq1." base64url(  flags u8 | partition i32 | offset i64 | attempt u32
  #                       | n u16, group | n u16, queue topic | n u16, marker topic | n u16, backoff (text)
  #                       | the first 16 bytes of HMAC-SHA256 over all before, when flags has bit 1  )
  #
  # flags: bit 0 = the marker topic is in the kmq format, bit 1 = signed. The markers' bytes are in guides/format.md.

  alias Kmq.{Backoff, Error}
  alias OffBroadway.Kmq.Acknowledger

  @prefix "kmq1."
  @mac_bytes 16
  @text_bytes 512

  @type t :: %{
          format: :range | :kmq,
          partition: non_neg_integer,
          offset: non_neg_integer,
          attempt: pos_integer,
          group: String.t(),
          topic: String.t(),
          marker_topic: String.t(),
          backoff: Backoff.normal()
        }

  @doc "What all receipts of a consumer share."
  @spec info(Kmq.Config.t()) :: map
  def info(config) do
    %{
      delivery: config.delivery,
      format: config.marker_format,
      group: config.group_id,
      marker_topics: config.marker_topics,
      backoff: config.backoff,
      # Kept as a function: printed, it shows nothing.
      secret: config.receipt_secret || fn -> nil end
    }
  end

  @doc "The handle of a message, and where the message stands."
  @spec place(Kmq.Message.t() | map) :: {Kmq.Handle.t(), tuple}
  def place(%Kmq.Message{handle: %Kmq.Handle{} = handle} = message),
    do: {handle, {message.topic, message.partition, message.offset, message.attempt}}

  def place(%{
        acknowledger: {Acknowledger, pid, _data},
        metadata: %{topic: topic, partition: partition, offset: offset, attempt: attempt}
      })
      when is_pid(pid),
      do: {%Kmq.Handle{pid: pid, ref: nil}, {topic, partition, offset, attempt}}

  def place(other),
    do: raise(ArgumentError, "expected a message of Kmq, got: #{inspect(other, limit: 5)}")

  @spec encode(map, tuple) :: String.t()
  def encode(info, {topic, partition, offset, attempt}) do
    secret = info.secret.()
    format = if info.format == :kmq, do: 1, else: 0
    flags = if secret, do: format + 2, else: format

    payload =
      <<flags, partition::32, offset::64, attempt::32>> <>
        text(info.group) <>
        text(topic) <> text(info.marker_topics[topic]) <> text(Backoff.to_text(info.backoff))

    @prefix <> Base.url_encode64(payload <> mac(secret, payload), padding: false)
  end

  defp text(text), do: <<byte_size(text)::16, text::binary>>

  defp decode_backoff(text) do
    case String.split(text, " ") do
      ["list", jitter | [_ | _] = list] ->
        {:list, Enum.map(list, &String.to_integer/1), String.to_float(jitter)}

      [kind, min, max, third, jitter] when kind in ["exponential", "linear"] ->
        {String.to_existing_atom(kind), String.to_integer(min), String.to_integer(max),
         String.to_float(third), String.to_float(jitter)}
    end
  end

  defp mac(nil, _payload), do: ""

  defp mac(secret, payload),
    do: binary_part(:crypto.mac(:hmac, :sha256, secret, payload), 0, @mac_bytes)

  @doc "With a secret only what is signed with it, without one only what is not signed."
  @spec decode(term, binary | nil) :: {:ok, t} | {:error, Error.t()}
  def decode(@prefix <> text, secret) do
    # One text for the same bytes: the bits beyond the last byte are not signed.
    with {:ok, bytes} <- Base.url_decode64(text, padding: false),
         ^text <- Base.url_encode64(bytes, padding: false),
         {:ok, payload} <- verified(bytes, secret),
         {:ok, receipt} <- fields(payload) do
      {:ok, receipt}
    else
      {:error, message} -> refused(message)
      _error_or_another_text -> refused("this is no receipt")
    end
  end

  def decode(_other, _secret), do: refused("this is no receipt")

  defp refused(message), do: {:error, Error.new(:receipt, message)}

  defp verified(<<flags, _::binary>> = bytes, nil) do
    if flags < 2,
      do: {:ok, bytes},
      else: {:error, "the receipt is signed, and the publisher has no :receipt_secret"}
  end

  defp verified(<<flags, _::binary>> = bytes, secret) when byte_size(bytes) > @mac_bytes do
    {payload, mac} = :erlang.split_binary(bytes, byte_size(bytes) - @mac_bytes)

    cond do
      flags < 2 -> {:error, "the receipt is not signed"}
      same?(mac, mac(secret, payload)) -> {:ok, payload}
      true -> {:error, "the receipt is not signed with this publisher's :receipt_secret"}
    end
  end

  defp verified(_bytes, _secret), do: :error

  # In constant time: how long it takes tells nothing about the right one.
  defp same?(a, b) do
    :crypto.exor(a, b) == <<0::size(@mac_bytes)-unit(8)>>
  end

  defp fields(
         <<flags, partition::32, offset::64, attempt::32, n::16, group::binary-size(n), m::16,
           topic::binary-size(m), k::16, marker_topic::binary-size(k), b::16,
           backoff::binary-size(b)>>
       )
       when flags < 4 and partition < 0x8000_0000 and offset < 0x8000_0000_0000_0000 do
    {:ok,
     %{
       format: if(rem(flags, 2) == 1, do: :kmq, else: :range),
       partition: partition,
       offset: offset,
       attempt: attempt,
       group: group,
       topic: topic,
       marker_topic: marker_topic,
       backoff: decode_backoff(backoff)
     }}
  rescue
    _not_ours -> :error
  end

  defp fields(_other), do: :error

  # ---- markers: {type, body} of the range format, {START's value, headers} of the kmq format

  @causes %{failed: {0, 1}, released: {2, 0}, snoozed: {3, 0}, rejected: {4, 3}}

  @verdicts ":ack, :discard, :release, {:snooze, ms}, :retry, {:retry, ms | backoff}, :reject or {:reject, reason}"

  @doc "The record that says so: `{topic, value, options}` for a publisher."
  @spec marker(t, Kmq.verdict()) :: {String.t(), binary, keyword}
  def marker(receipt, verdict) do
    case verdict do
      :ack -> settled(receipt, 0)
      :discard -> settled(receipt, 1)
      :release -> again(receipt, :released, 0, nil)
      {:snooze, ms} when is_integer(ms) -> again(receipt, :snoozed, delay(ms, 1), nil)
      :retry -> again(receipt, :failed, Backoff.delay(receipt.backoff, receipt.attempt), nil)
      {:retry, delay} -> again(receipt, :failed, delay(delay, receipt.attempt), nil)
      :reject -> again(receipt, :rejected, 0, nil)
      {:reject, reason} -> again(receipt, :rejected, 0, Kmq.reason_text(reason))
      other -> raise ArgumentError, "expected a verdict, #{@verdicts}, got: #{inspect(other)}"
    end
  end

  @most Kmq.Options.Types.max_delay_ms()

  defp delay(ms, _attempt) when is_integer(ms) do
    if ms in 0..@most,
      do: ms,
      else: raise(ArgumentError, "a delay is 0 to #{@most} ms (30 days), got: #{inspect(ms)}")
  end

  defp delay(function, _attempt) when is_function(function) do
    raise ArgumentError,
          "a receipt takes no function: give ms or a backoff with {:retry, ...}, got: #{inspect(function)}"
  end

  defp delay(backoff, attempt) do
    case Backoff.parse(backoff) do
      {:ok, normal} -> Backoff.delay(normal, attempt)
      {:error, message} -> raise ArgumentError, "invalid delay: " <> message
    end
  end

  defp settled(%{format: :kmq} = receipt, _cause),
    do: record(receipt, receipt.offset, <<0>>, [{"kmq-group", receipt.group}])

  defp settled(receipt, cause), do: record(receipt, -1, range(receipt, 2, <<cause>>), [])

  defp again(%{format: :kmq} = receipt, cause, delay, text) do
    {_code, flags} = @causes[cause]

    headers = [
      {"kmq-group", receipt.group},
      {"kmq-cause", to_string(cause)},
      {"kmq-flags", to_string(flags)}
    ]

    headers = if text, do: headers ++ [{"kmq-error", text}], else: headers
    record(receipt, receipt.offset, <<1, delay::64>>, headers)
  end

  defp again(receipt, cause, delay, text) do
    {code, flags} = @causes[cause]
    tlv = if text, do: <<1>> <> uvar(min(byte_size(text), @text_bytes)) <> text, else: ""
    record(receipt, -1, range(receipt, 4, uvar(delay) <> <<code, flags>> <> tlv), [])
  end

  # A set of one offset: base, form 0, 1 run, gap 0, length 1.
  defp range(receipt, type, body) do
    crc = :erlang.crc32([receipt.topic, 0, receipt.group])
    <<0, 0x4B, 1, type, crc::32>> <> uvar(receipt.offset) <> <<0, 1, 0, 1>> <> body
  end

  defp uvar(n) when n < 128, do: <<n>>
  defp uvar(n), do: <<1::1, rem(n, 128)::7, uvar(div(n, 128))::binary>>

  defp record(receipt, offset, value, headers) do
    key = <<receipt.partition::32, offset::64>>
    {receipt.marker_topic, value, key: key, partition: receipt.partition, headers: headers}
  end
end
