defmodule Kmq.Advice do
  @moduledoc false
  # What a broker's refusal means in the words of the options, and what to do.

  alias Kmq.{Config, Error, Security}

  @doc "The error with a message that says what to do, or nil when there is none for it."
  @spec explain(Error.t(), Config.t()) :: Error.t() | nil
  def explain(%Error{name: name} = error, config) do
    with text when is_binary(text) <- text(name, config), do: %{error | message: text}
  end

  defp text("INCONSISTENT_GROUP_PROTOCOL", config) do
    "the group refuses this member: :assignor is #{assignors(config)} here, and the others have none of these " <>
      "(or are no consumers). Give all members of #{inspect(config.group_id)} the same; it joins as soon as it can"
  end

  defp text("INVALID_SESSION_TIMEOUT", config) do
    {_, ms} = List.keyfind(config.consumer_props, "session.timeout.ms", 0)

    "the group refuses this member: a session timeout of #{ms} ms (:session_timeout_seconds of :group_config) is outside of what " <>
      "the broker allows (its group.min.session.timeout.ms and group.max.session.timeout.ms)"
  end

  defp text("GROUP_MAX_SIZE_REACHED", config) do
    "the group #{inspect(config.group_id)} is full (the broker's group.max.size): this member waits until another one leaves"
  end

  defp text("GROUP_AUTHORIZATION_FAILED", config) do
    "no right to be a member of #{inspect(config.group_id)}: #{user(config)} needs READ on that group; it joins as soon as it may"
  end

  defp text("TOPIC_AUTHORIZATION_FAILED", config) do
    "no right to read #{Enum.map_join(config.topics, ", ", &inspect/1)}: #{user(config)} needs READ on the topic; reading goes on as soon as " <>
      "it may (within half a minute)"
  end

  defp text("_AUTHENTICATION", config) do
    "the brokers do not let #{user(config)} in: look at :sasl of :client_config; it is tried again" <>
      Security.known_trouble(
        "#{List.keyfind(config.consumer_props, "sasl.mechanism", 0, {"", ""}) |> elem(1)}"
      )
  end

  defp text(_other, _config), do: nil

  # What librdkafka says of a connection, in the words of the options: what it is, and what to look at. The first that fits.
  @connections [
    {["security.protocol", "SSL listener", "SASL authentication"],
     "the broker has closed a new connection",
     "it stops or starts just now; or, if this goes on, :ssl and :sasl of :client_config do not fit this listener"},
    {["Connection refused"], "the connection is refused", "does a broker listen there?"},
    {["ailed to resolve", "not known", "resolution"], "its name cannot be resolved",
     "is it right in :hosts, and in the broker's advertised.listeners?"},
    {["setup timed out", "Operation timed out", "Connection timed out"],
     "the connection is not answered", "is the address right, does a firewall stand between?"},
    {["Disconnected", "reset by peer", "Broken pipe"], "the broker has closed the connection",
     nil}
  ]

  # One that was there for a second and is lost was let in: librdkafka asks for TLS and SASL all the same. Of one that is lost sooner nobody can
  # tell which it was: a broker that restarts, or one that wants TLS.
  defp rows(text) do
    case Regex.run(~r/after (\d+)ms in state UP/, text) do
      [_, ms] when byte_size(ms) > 3 ->
        [{["Disconnected"], "the broker has closed the connection", "is a broker there?"}]

      _new ->
        []
    end ++ @connections
  end

  @doc """
  The error of a broken connection in our words. With `advice?: false` without the question what to look at.

      iex> text = "kafka-1:9092/1: Connect to ipv4#10.0.0.1:9092 failed: Connection refused (after 1ms in state CONNECT) (_TRANSPORT)"
      iex> Kmq.Advice.connection(Kmq.Error.new(:transport, text)).message
      "kafka-1:9092/1: the connection is refused: does a broker listen there? (_TRANSPORT)"
  """
  @spec connection(Error.t(), keyword) :: Error.t()
  def connection(%Error{} = error, options \\ []) do
    with [_, who, text, name] <-
           Regex.run(~r/\A(.*?[^ ]+:\d+(?:\/[^ ]+)?: )(.*) (\(_[A-Z_]+\))\z/s, error.message),
         {_, what, look} <-
           Enum.find(rows(text), fn {words, _, _} -> String.contains?(text, words) end) do
      advice = if look != nil and Keyword.get(options, :advice?, true), do: ": " <> look
      %{error | message: "#{who}#{what}#{advice} #{name}"}
    else
      _other -> error
    end
  end

  @doc "What to do when markers are not written because of rights, to be added to the error; or nothing."
  @spec markers(String.t()) :: String.t()
  def markers(what) do
    if what =~ "AUTHORIZATION_FAILED",
      do: ". Grant WRITE on the marker topic: it goes on by itself",
      else: ""
  end

  # Who it is for the broker; a certificate's or token's name is not known here.
  defp user(config) do
    case List.keyfind(config.consumer_props, "sasl.username", 0) do
      {_, user} when is_binary(user) -> "User:#{user}"
      _ -> "its principal"
    end
  end

  defp assignors(config), do: Enum.map_join(config.assignor, " or ", &inspect/1)
end
