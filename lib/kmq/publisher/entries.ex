defmodule Kmq.Publisher.Entries do
  @moduledoc false
  # Messages as a user gives them, checked, as the native side takes them. It runs in the process that publishes: what is wrong is its own mistake.

  alias Kmq.Options

  @typedoc "As the native side takes it."
  @type entry ::
          {partition :: integer, key :: binary | nil, value :: binary | nil,
           headers :: [{binary, binary | nil}], timestamp :: non_neg_integer}

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

        case native_of(messages, topic, []) do
          {:ok, entries} -> [{topic, nil, entries}]
          :several -> native_by_topic(messages)
        end

      other ->
        raise ArgumentError, "expected a list of messages, got: #{inspect(other, limit: 5)}"
    end
  end

  defp native_of([], _topic, entries), do: {:ok, Enum.reverse(entries)}
  defp native_of(rest, _topic, _entries) when not is_list(rest), do: improper(rest)

  defp native_of([message | rest], topic, entries) do
    case parts(message) do
      {^topic, value, options} ->
        native_of(rest, topic, [native_message(topic, value, options) | entries])

      _other ->
        :several
    end
  end

  defp improper(rest) do
    raise ArgumentError,
          "expected a list of messages that ends with [], not with #{inspect(rest, limit: 5)}"
  end

  defp native_by_topic(messages) when length(messages) > 0 do
    pairs =
      Enum.with_index(messages, fn message, index ->
        {topic, value, options} = parts(message)
        {topic, {index, native_message(topic, value, options)}}
      end)

    by_topic = Enum.group_by(pairs, &elem(&1, 0), &elem(&1, 1))

    for topic <- pairs |> Enum.map(&elem(&1, 0)) |> Enum.uniq() do
      {indexes, entries} = Enum.unzip(by_topic[topic])
      {topic, indexes, entries}
    end
  end

  defp native_by_topic(messages), do: messages |> last() |> improper()

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

  defp native_message(topic, value, options) do
    is_binary(topic) ||
      raise ArgumentError, "expected the topic to be a string, got: #{inspect(topic)}"

    is_binary(value) || is_nil(value) ||
      raise(ArgumentError, "expected the value to be a binary or nil, got: #{inspect(value)}")

    case plain(options, value, -1, :none, [], 0) do
      :others ->
        options = Options.validate!(options, :publish)

        {options[:partition] || -1, options[:key], value, kmq_headers(options),
         options[:timestamp] || 0}

      message ->
        message
    end
  end

  # What most messages have and what needs no more than a look, each at most once; everything else goes through the schema.
  defp plain([], value, partition, :none, headers, timestamp),
    do: {partition, nil, value, headers, timestamp}

  defp plain([], value, partition, key, headers, timestamp),
    do: {partition, key, value, headers, timestamp}

  defp plain([{:key, key} | rest], value, partition, :none, headers, timestamp)
       when is_binary(key),
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain([{:partition, partition} | rest], value, -1, key, headers, timestamp)
       when partition in 0..0x7FFFFFFF,
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain([{:headers, [_ | _] = headers} | rest], value, partition, key, [], timestamp) do
    if Options.Types.headers?(headers),
      do: plain(rest, value, partition, key, headers, timestamp),
      else: :others
  end

  defp plain([{:timestamp, timestamp} | rest], value, partition, key, headers, 0)
       when timestamp in 1..0x7FFFFFFFFFFFFFFF,
       do: plain(rest, value, partition, key, headers, timestamp)

  defp plain(_options, _value, _partition, _key, _headers, _timestamp), do: :others

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
