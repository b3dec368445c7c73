defmodule Kmq.Publisher.Entries do
  @moduledoc false
  # Messages as a user gives them, checked, as the native side takes them. It runs in the process that publishes: what is wrong is its own mistake.

  alias Kmq.Options

  import Bitwise

  @typedoc "With all that it has: what the schema makes of a message."
  @type native ::
          {partition :: integer, key :: binary | nil, value :: binary | nil,
           headers :: [{binary, binary | nil}], timestamp :: non_neg_integer}

  @typedoc "As the native side takes it: what needs no more than a look, as it was given."
  @type entry ::
          native
          | {topic :: String.t(), value :: binary | nil}
          | {topic :: String.t(), value :: binary | nil, keyword}

  @typedoc "Those of a topic, and where they stood; `nil` where there is but one topic: no indexes are needed, and none are made."
  @type group :: {topic :: String.t(), indexes :: [non_neg_integer] | nil, [entry]}

  @doc "The messages by topic, topics in the order of first appearance."
  @spec groups(term) :: [group]
  def groups(messages) do
    case messages do
      [] ->
        []

      [first | _] ->
        {topic, _, _} = parts(first)

        cond do
          as_given?(messages, topic) -> [{topic, nil, messages}]
          entries = entries_of(messages, topic, []) -> [{topic, nil, entries}]
          true -> by_topic(messages)
        end

      other ->
        raise ArgumentError, "expected a list of messages, got: #{inspect(other, limit: 5)}"
    end
  end

  # Of thousands of messages each term that is made would be copied by the garbage collector.
  defp as_given?([], _topic), do: true

  defp as_given?([{topic, value} | rest], topic)
       when is_binary(topic) and (is_binary(value) or is_nil(value)),
       do: as_given?(rest, topic)

  defp as_given?([{topic, value, options} | rest], topic)
       when is_binary(topic) and (is_binary(value) or is_nil(value)),
       do: plain?(options, 0) and as_given?(rest, topic)

  defp as_given?(_messages, _topic), do: false

  # nil: they are of several topics.
  defp entries_of([], _topic, entries), do: Enum.reverse(entries)
  defp entries_of(rest, _topic, _entries) when not is_list(rest), do: improper(rest)

  defp entries_of([message | rest], topic, entries) do
    case parts(message) do
      {^topic, value, options} ->
        entries_of(rest, topic, [entry(topic, value, options) | entries])

      _other ->
        nil
    end
  end

  defp improper(rest) do
    raise ArgumentError,
          "expected a list of messages that ends with [], not with #{inspect(rest, limit: 5)}"
  end

  defp by_topic(messages) when length(messages) > 0 do
    pairs =
      Enum.with_index(messages, fn message, index ->
        {topic, value, options} = parts(message)
        {topic, {index, entry(topic, value, options)}}
      end)

    by_topic = Enum.group_by(pairs, &elem(&1, 0), &elem(&1, 1))

    for topic <- pairs |> Enum.map(&elem(&1, 0)) |> Enum.uniq() do
      {indexes, entries} = Enum.unzip(by_topic[topic])
      {topic, indexes, entries}
    end
  end

  defp by_topic(messages), do: messages |> last() |> improper()

  defp last([_ | rest]), do: last(rest)
  defp last(rest), do: rest

  defp parts({topic, value}), do: {topic, value, []}
  defp parts({topic, value, options}), do: {topic, value, options}

  defp parts(other),
    do:
      raise(
        ArgumentError,
        "expected {topic, value} or {topic, value, options}, got: #{inspect(other)}"
      )

  defp entry(topic, value, options) do
    is_binary(topic) ||
      raise ArgumentError, "expected the topic to be a string, got: #{inspect(topic)}"

    is_binary(value) || is_nil(value) ||
      raise(ArgumentError, "expected the value to be a binary or nil, got: #{inspect(value)}")

    if plain?(options, 0) do
      {topic, value, options}
    else
      options = Options.validate!(options, :publish)

      {options[:partition] || -1, options[:key], value, kmq_headers(options),
       options[:timestamp] || 0}
    end
  end

  # What most messages have and what needs no more than a look, each at most once (a bit of `seen`); everything else goes through the schema.
  defp plain?([], _seen), do: true

  defp plain?([{:key, key} | rest], seen) when is_binary(key) and (seen &&& 1) == 0,
    do: plain?(rest, seen ||| 1)

  defp plain?([{:partition, partition} | rest], seen)
       when partition in 0..0x7FFFFFFF and (seen &&& 2) == 0,
       do: plain?(rest, seen ||| 2)

  defp plain?([{:headers, [_ | _] = headers} | rest], seen) when (seen &&& 4) == 0,
    do: Options.Types.headers?(headers) and plain?(rest, seen ||| 4)

  defp plain?([{:timestamp, timestamp} | rest], seen)
       when timestamp in 1..0x7FFFFFFFFFFFFFFF and (seen &&& 8) == 0,
       do: plain?(rest, seen ||| 8)

  defp plain?(_options, _seen), do: false

  @doc "The same, with all that it has: smaller, where it goes to another process."
  @spec native(entry) :: native
  def native({_topic, value}), do: {-1, nil, value, [], 0}

  def native({_topic, value, options}) do
    {options[:partition] || -1, options[:key], value, options[:headers] || [],
     options[:timestamp] || 0}
  end

  def native(native), do: native

  # What consumers, trackers and filters read. They stand first: the first of a name counts.
  defp kmq_headers(options) do
    now = System.os_time(:millisecond)
    due = due(options, now)

    [
      {"kmq-tags", options[:tags] && Enum.join(options[:tags], ",")},
      {"kmq-routing-key", options[:routing_key]},
      {"kmq-due", due && to_string(due)},
      {"kmq-expires", options[:ttl] && to_string((due || now) + options[:ttl])}
    ]
    |> Enum.reject(fn {_name, value} -> value in [nil, ""] end)
    |> Kernel.++(options[:headers])
  end

  # Now or earlier is no delay.
  defp due(options, now) do
    due =
      cond do
        options[:delay] && options[:at] ->
          raise ArgumentError, "one of :delay and :at says when, not both"

        delay = options[:delay] ->
          now + delay

        at = options[:at] ->
          DateTime.to_unix(at, :millisecond)

        true ->
          now
      end

    if due > now, do: due
  end

  @doc "The longest delay by topic, of those that have delayed messages."
  @spec delays([tuple]) :: %{String.t() => pos_integer}
  def delays(messages) do
    now = System.os_time(:millisecond)

    delayed = for {_topic, _value, options} = message <- messages, delayed?(options), do: message

    for {topic, _value, options} <- delayed, due = due(options, now), reduce: %{} do
      longest -> Map.update(longest, topic, due - now, &max(&1, due - now))
    end
  end

  defp delayed?([]), do: false
  defp delayed?([{name, _} | _rest]) when name in [:delay, :at], do: true
  defp delayed?([_ | rest]), do: delayed?(rest)
end
