defmodule Kmq.Reach do
  @moduledoc false
  # The first question to a cluster: is anybody there? Whoever waits for longer than a moment is told for what, and for how long; in the end the
  # error says what to look at.

  require Logger

  alias Kmq.{Advice, Error, Options, Security}

  @patient_ms 1_500

  @doc "The cluster's id, or why nobody answered within `timeout_ms`."
  @spec cluster_id(reference, String.t(), pos_integer) :: {:ok, String.t()} | {:error, Error.t()}
  def cluster_id(admin, bootstrap, timeout_ms) do
    teller = teller(bootstrap, timeout_ms)
    result = :kmq_nif.admin_cluster_id(admin, timeout_ms)
    send(teller, :answered)
    with {:error, error} <- result, do: {:error, unreachable(error, bootstrap)}
  end

  @doc """
  Partitions of a topic, 0 = it does not exist. A mock cluster makes the topic that it is asked about: it is asked for all of them.
  """
  @spec partitions(reference, String.t(), String.t(), pos_integer) ::
          {:ok, non_neg_integer} | {:error, term}
  def partitions(admin, "mockCluster" <> _, topic, timeout_ms) do
    with {:ok, topics} <- :kmq_nif.admin_topics(admin, timeout_ms),
         do: {:ok, topics |> Map.new() |> Map.get(topic, 0)}
  end

  def partitions(admin, _cluster_id, topic, timeout_ms) do
    with {:ok, {n, _replication}} <- :kmq_nif.admin_partitions(admin, topic, timeout_ms),
         do: {:ok, n}
  end

  @doc "A topic that is not there, and which one may be meant."
  @spec missing(reference, String.t(), pos_integer) :: Error.t()
  def missing(admin, topic, timeout_ms) do
    hint = if meant = Options.meant(topic, topics(admin, timeout_ms)), do: ": " <> meant, else: ""
    Error.new(:topic_missing, "topic #{inspect(topic)} does not exist#{hint}")
  end

  @doc "The names of all topics; none where nobody says."
  @spec topics(reference, pos_integer) :: [String.t()]
  def topics(admin, timeout_ms) do
    case :kmq_nif.admin_topics(admin, timeout_ms) do
      {:ok, topics} -> Enum.map(topics, &elem(&1, 0))
      {:error, _error} -> []
    end
  end

  # Not linked: nobody who traps exits need know of it.
  defp teller(bootstrap, timeout_ms) do
    asker = self()

    spawn(fn ->
      monitor = Process.monitor(asker)

      receive do
        :answered -> :ok
        {:DOWN, ^monitor, _, _, _} -> :ok
      after
        @patient_ms ->
          left = div(timeout_ms - @patient_ms, 1_000)

          tell("no broker of :hosts (#{bootstrap}) has answered yet, giving up in #{left} s")
      end
    end)
  end

  # On a command line there is no log: `Kmq.CommandLine` says where it goes instead.
  defp tell(text) do
    case Application.fetch_env(:kmq, :waiting) do
      {:ok, device} -> IO.puts(device, text)
      :error -> Logger.warning("kmq: " <> text)
    end
  end

  defp unreachable(error, bootstrap) do
    error = error |> Error.from_native() |> Advice.connection(advice?: false)
    cause = String.replace_prefix(error.message, "cluster id: ", "")

    {reason, advice} =
      case error.reason do
        :ssl ->
          {:ssl,
           "Look at :ssl of :client_config: :cacertfile must hold the CA that signed the broker's certificate, the broker must be called by a name " <>
             "that stands in it (server_name_indication: :disable does without), and it must be a TLS listener"}

        :authentication ->
          {:authentication,
           "Look at :sasl of :client_config: mechanism, user and password, or the token" <>
             Security.known_trouble(error.message)}

        :token ->
          {:token, "Nothing connects without"}

        _other ->
          {:unreachable,
           "Is the address right, does a broker listen there, do :ssl and :sasl of :client_config fit it?"}
      end

    %{
      error
      | reason: reason,
        retriable?: true,
        message: "no broker of :hosts (#{bootstrap}) answered: #{cause}. #{advice}"
    }
  end
end
