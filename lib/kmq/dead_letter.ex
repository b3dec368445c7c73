defmodule Kmq.DeadLetter do
  @moduledoc """
  A message in a dead letter topic, with what is known about its end.

    * `:topic`, `:partition`, `:offset`, `:ts` - where it stands in the dead letter topic, and since when
    * `:key`, `:value`, `:headers` - as it was; the headers with Kmq's own
    * `:cause` - `"failed"`, `"timeout"`, `"crash"`, `"rejected"`, `"expired"`, or `nil` where something else put it here
    * `:attempts` - failed attempts that counted
    * `:deliveries` - how often it was delivered
    * `:error` - the text of the last failure, or `nil`
    * `:group` - the consumer group it failed in
    * `:origin` - `{topic, partition, offset, ts}` of its first publication
    * `:pointer` - `nil`, or where the value is, `{topic, partition, offset, ts}`: it was too large for this topic, and with
      `dead_letter_oversize: :pointer` was written without it
  """

  defstruct [
    :topic,
    :partition,
    :offset,
    :ts,
    :key,
    :value,
    :cause,
    :error,
    :group,
    :origin,
    :pointer,
    headers: [],
    attempts: 0,
    deliveries: 0
  ]

  @type t :: %__MODULE__{
          topic: String.t(),
          partition: non_neg_integer,
          offset: non_neg_integer,
          ts: integer,
          key: binary | nil,
          value: binary | nil,
          headers: [{String.t(), binary | nil}],
          cause: String.t() | nil,
          attempts: non_neg_integer,
          deliveries: non_neg_integer,
          error: String.t() | nil,
          group: String.t() | nil,
          origin: Kmq.Message.id() | nil,
          pointer: Kmq.Message.id() | nil
        }

  @doc false
  # A record as the native side gives it.
  @spec new(tuple, String.t(), non_neg_integer, String.t()) :: t
  def new(record, topic, partition, count_header) do
    {offset, ts, key, value, headers, _attempt, _deliveries, _id} = record
    found = headers |> Enum.reverse() |> Map.new()

    %__MODULE__{
      topic: topic,
      partition: partition,
      offset: offset,
      ts: ts,
      key: key,
      value: value,
      headers: headers,
      cause: found["kmq-cause"],
      attempts: count(found[count_header]),
      deliveries: decimal(found["kmq-deliveries"]),
      error: found["kmq-error"],
      group: found["kmq-group"],
      origin: origin(found["kmq-origin"]),
      pointer: origin(found["kmq-pointer"])
    }
  end

  # One signed byte, else four.
  defp count(<<n>>) when n < 128, do: n
  defp count(<<n::32>>) when n < 0x8000_0000, do: n
  defp count(_none_or_not_ours), do: 0

  defp decimal(nil), do: 0

  defp decimal(text) do
    case Integer.parse(text) do
      {n, ""} when n >= 0 -> n
      _ -> 0
    end
  end

  defp origin(nil), do: nil

  defp origin(text) do
    case Kmq.Message.id(text, nil, nil, nil, nil) do
      {nil, _, _, _} -> nil
      id -> id
    end
  end
end
