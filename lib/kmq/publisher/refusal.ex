defmodule Kmq.Publisher.Refusal do
  @moduledoc false
  # Why a message was refused, in numbers: how large it was and what is taken, which partitions there are. Brokers and librdkafka only say that.
  #
  # The topic is asked for what it takes, at most once a minute, and in the process that publishes.

  alias Kmq.{Error, Topics}

  @ask_ms 5_000
  @known_ms 60_000
  # librdkafka's default.
  @client_bytes "1000000"

  @type entry ::
          {partition :: integer, binary | nil, binary | nil, [{binary, binary | nil}], integer}
  @type result :: {:ok, term} | {:error, Error.t()}
  @typedoc "What the producer itself takes, a table for what was asked, and how to ask."
  @type source :: %{
          required(:max_bytes) => String.t(),
          required(:topics) => :ets.table(),
          required(:bootstrap) => String.t(),
          required(:admin_props) => Kmq.Config.props(),
          optional(atom) => term
        }

  @doc "The most that a producer with these properties sends in one message."
  @spec max_bytes(Kmq.Config.props()) :: String.t()
  def max_bytes(props), do: Map.get(Map.new(props), "message.max.bytes", @client_bytes)

  @doc """
  The results of these entries, the errors among them with a message that says more where there is more to say: as far as that can be found out
  in `ms`.
  """
  @spec explain([result], String.t(), [entry], source, timeout) :: [result]
  def explain(results, topic, entries, source, ms) do
    if Enum.any?(results, &explained?/1) do
      taken = taken(topic, source, max(min(ms, @ask_ms), 1))

      Enum.zip_with(entries, results, fn entry, result ->
        if explained?(result),
          do: {:error, more(elem(result, 1), topic, entry, taken, source)},
          else: result
      end)
    else
      results
    end
  end

  @explained [:msg_size_too_large, :unknown_partition]

  defp explained?({:error, %Error{reason: reason}}), do: reason in @explained
  defp explained?(_result), do: false

  defp more(%{reason: :msg_size_too_large} = error, topic, entry, taken, source) do
    say(
      error,
      "a message of #{bytes(entry)} bytes (key, value and headers) is too large for #{inspect(topic)}: " <>
        "#{limit(taken)}this publisher sends #{source.max_bytes} at most (message.max.bytes of :kafka_config)"
    )
  end

  defp more(%{reason: :unknown_partition} = error, topic, entry, {n, _bytes}, _source)
       when n > 0 do
    say(
      error,
      "#{inspect(topic)} has no partition #{elem(entry, 0)}: it has #{n}, numbered from 0"
    )
  end

  defp more(error, topic, entry, _taken, _source),
    do: say(error, "#{inspect(topic)} has no partition #{elem(entry, 0)}")

  defp say(error, text), do: %{error | message: "#{text} (#{error.name})"}

  defp limit({_n, nil}), do: ""
  defp limit({_n, bytes}), do: "the topic takes #{bytes} (its max.message.bytes), "

  defp bytes({_partition, key, value, headers, _timestamp}) do
    size(key) + size(value) +
      Enum.sum(for {name, value} <- headers, do: size(name) + size(value))
  end

  defp size(nil), do: 0
  defp size(bytes), do: byte_size(bytes)

  # {partitions (0: not known), max.message.bytes (nil: not known)}
  defp taken(topic, source, ms) do
    now = System.monotonic_time(:millisecond)

    case :ets.lookup(source.topics, {:taken, topic}) do
      [{_, at, taken}] when now - at < @known_ms -> taken
      _ -> ask(topic, source, now, ms)
    end
  rescue
    # The table ended with its publisher.
    ArgumentError -> {0, nil}
  end

  defp ask(topic, source, now, ms) do
    taken =
      case Topics.takes(topic, source.bootstrap, source.admin_props, ms) do
        {:ok, taken} -> taken
        {:error, _error} -> {0, nil}
      end

    :ets.insert(source.topics, {{:taken, topic}, now, taken})
    taken
  end
end
