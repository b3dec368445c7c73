defmodule Kmq.Message do
  @moduledoc """
  A message that was handed out by a `Kmq.Consumer`, until it is settled by one of `Kmq`'s functions.

    * `:topic`, `:partition`, `:offset` - where it stands in the queue topic
    * `:key`, `:value` - `nil` and `""` differ
    * `:headers` - `[{name, value}]`, a value may be `nil`
    * `:ts` - when it was published, ms since 1970
    * `:attempt` - 1 + the failures so far
    * `:deliveries` - how often it has been delivered, this time included; what was given back untouched is in it
    * `:id` - `{topic, partition, offset, ts}` of its *first* publication: the same for all copies of a message
  """

  @enforce_keys [:topic, :partition, :offset, :handle, :slot]
  @derive {Inspect, except: [:handle, :slot, :backoff, :original]}
  defstruct [
    :topic,
    :partition,
    :offset,
    :key,
    :value,
    :ts,
    :id,
    :handle,
    :slot,
    :backoff,
    :original,
    headers: [],
    attempt: 1,
    deliveries: 1
  ]

  @typedoc "The stable id of a message and all its copies."
  @type id ::
          {topic :: String.t(), partition :: non_neg_integer, offset :: non_neg_integer,
           ts :: integer}

  @type t :: %__MODULE__{
          topic: String.t(),
          partition: non_neg_integer,
          offset: non_neg_integer,
          key: binary | nil,
          value: binary | nil,
          headers: [{String.t(), binary | nil}],
          ts: integer,
          attempt: pos_integer,
          deliveries: pos_integer,
          id: id,
          handle: struct,
          slot: non_neg_integer,
          backoff: Kmq.Backoff.normal(),
          original: tuple | nil
        }

  @doc false
  # Batches as Kmq.Handle.take/2 gives them. Where no tracker can read it again, the original is kept: whoever rejects the message
  # may have put something else in its place.
  @spec from_batches([tuple], Kmq.Handle.t(), Kmq.Config.t()) :: [t]
  def from_batches(batches, handle, config) do
    keep? = config.delivery != :markers

    for {slot, topic, partition, records} <- batches,
        {offset, ts, key, value, headers, attempt, deliveries, origin} = record <- records do
      %__MODULE__{
        topic: topic,
        partition: partition,
        offset: offset,
        key: key,
        value: value,
        headers: headers,
        ts: ts,
        attempt: attempt,
        deliveries: deliveries,
        id: id(origin, topic, partition, offset, ts),
        handle: handle,
        slot: slot,
        backoff: config.backoff,
        original: if(keep?, do: {topic, partition, record})
      }
    end
  end

  @doc false
  # `origin` is the kmq-origin header of a copy, nil for a message on its first way.
  @spec id(binary | nil, String.t(), non_neg_integer, non_neg_integer, integer) :: id
  def id(nil, topic, partition, offset, ts), do: {topic, partition, offset, ts}

  def id(origin, topic, partition, offset, ts) do
    with [first_topic, first_partition, first_offset, first_ts] <- String.split(origin, "/"),
         {first_partition, ""} <- Integer.parse(first_partition),
         {first_offset, ""} <- Integer.parse(first_offset),
         {first_ts, ""} <- Integer.parse(first_ts) do
      {first_topic, first_partition, first_offset, first_ts}
    else
      # A header of that name which is not ours: the message is its own origin.
      _ -> {topic, partition, offset, ts}
    end
  end
end
