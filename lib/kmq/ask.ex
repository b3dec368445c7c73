defmodule Kmq.Ask do
  @moduledoc false
  # A question to a process of Kmq's, from a user's process. Whatever comes of it is an answer:
  #
  #   it has ended, or ends meanwhile; nobody has that name    {:error, %Kmq.Error{reason: :closed}}
  #   no answer in time                                        {:error, %Kmq.Error{reason: :timeout}}
  #   a process of another kind, or what can be no process     ArgumentError, and the process asked lives on
  #
  # Before a process of this node is asked it is looked at: one that is none of ours would not live through a question it does not know. Ours
  # do, by unknown/2; so those of another node need no look.

  alias Kmq.{Error, Info}

  require Logger

  @who {__MODULE__, :who}

  @doc "Asks a process that must run `module`; `function` is who asks, as in \"pull/2\"."
  @spec call(module, String.t(), term, term, timeout) :: term | {:error, Error.t()}
  def call(module, function, server, request, timeout) do
    with {:ok, process} <- whereis(module, function, server) do
      case ask(module, process, request, timeout) do
        {:error, %Error{reason: :unknown_call} = error} ->
          raise ArgumentError, wrong(module, function, server) <> error.message

        answer ->
          answer
      end
    end
  end

  @doc "Stops it, and waits for its end."
  @spec stop(module, String.t(), term, timeout) :: :ok | {:error, Error.t()}
  def stop(module, function, server, timeout) do
    with {:ok, process} <- whereis(module, function, server),
         :ok <- elsewhere(module, function, server, process) do
      GenServer.stop(process, :normal, timeout)
    end
  catch
    :exit, reason when reason in [:noproc, :normal, :shutdown] -> {:error, closed(module)}
    :exit, :timeout -> {:error, late(module, timeout)}
    :exit, {:timeout, _} -> {:error, late(module, timeout)}
    :exit, reason -> {:error, ended(module, reason)}
  end

  # One of another node must not be stopped before it is known what it is.
  defp elsewhere(_module, _function, _server, pid) when is_pid(pid) and node(pid) == node(),
    do: :ok

  defp elsewhere(module, function, server, process) do
    case ask(module, process, @who, 5_000) do
      {:ok, ^module} -> :ok
      {:ok, other} -> raise ArgumentError, wrong(module, function, server) <> a(other)
      {:error, error} -> {:error, error}
    end
  end

  @doc "The same of a process that is known to be one."
  @spec ask(module, pid | {atom, node}, term, timeout) :: term | {:error, Error.t()}
  def ask(module, process, request, timeout) do
    GenServer.call(process, request, timeout)
  catch
    :exit, {:timeout, _} -> {:error, late(module, timeout)}
    :exit, {reason, _} -> {:error, ended(module, reason)}
    :exit, reason -> {:error, ended(module, reason)}
  end

  @doc """
  Where it is: `{:ok, process}`, `{:error, error}` when it has ended. Raises where that is no process of this kind.
  """
  @spec whereis(module, String.t(), term) ::
          {:ok, pid | {atom, node}} | {:error, Error.t()}
  def whereis(module, function, server) do
    case process(module, function, server) do
      nil -> {:error, closed(module, server)}
      pid when is_pid(pid) and node(pid) == node() -> looked_at(module, function, server, pid)
      elsewhere -> {:ok, elsewhere}
    end
  end

  @doc "What a name stands for, whatever runs there; nil where nothing does."
  @spec process(module, String.t(), term) :: pid | {atom, node} | nil
  def process(_module, _function, pid) when is_pid(pid), do: pid

  def process(module, function, name) do
    case resolve(name) do
      :no_name ->
        raise ArgumentError,
              "#{asked(module, function)} takes #{a(module)}, its pid or its name, got: #{inspect(name, limit: 5)}"

      process ->
        process
    end
  end

  @doc "What a name stands for; `:no_name` where it can be none."
  @spec resolve(term) :: pid | {atom, node} | nil | :no_name
  def resolve(pid) when is_pid(pid), do: pid
  def resolve(name) when name in [nil, true, false], do: :no_name

  def resolve(name) do
    GenServer.whereis(name)
  rescue
    _no_name_at_all -> :no_name
  end

  defp looked_at(module, function, server, pid) do
    cond do
      what(pid) == module -> {:ok, pid}
      not Process.alive?(pid) -> {:error, closed(module)}
      true -> raise ArgumentError, wrong(module, function, server) <> is(server, pid)
    end
  end

  defp wrong(module, function, server),
    do: "#{asked(module, function)} takes #{a(module)}, and #{inspect(server)} is "

  # Some are functions of Kmq itself.
  defp asked(_module, "Kmq." <> _ = function), do: function
  defp asked(module, function), do: "#{inspect(module)}.#{function}"

  # What runs there: one of ours, or nil.
  defp what(pid), do: Info.module(pid) || starting(pid)

  # It has its name before it can say who it is.
  defp starting(pid) do
    with {:dictionary, dictionary} <- Process.info(pid, :dictionary),
         {:"$initial_call", {module, :init, 1}} <- List.keyfind(dictionary, :"$initial_call", 0) do
      module
    else
      _ -> nil
    end
  end

  defp is(server, pid) do
    ours = Info.module(pid)

    cond do
      ours -> a(ours)
      Info.pipeline?(server) -> "a pipeline"
      true -> "no process of Kmq"
    end
  end

  defp a(module), do: "a " <> inspect(module)

  # ---- what comes of it

  @doc "It has ended."
  @spec closed(module | String.t()) :: Error.t()
  def closed(module), do: Error.new(:closed, "the #{word(module)} is closed")

  @doc "Nobody has that name: it has ended, or the name is mistyped."
  @spec closed(module | String.t(), term) :: Error.t()
  def closed(module, name) do
    text = "the #{word(module)} is closed: nobody is registered as #{inspect(name, limit: 5)}"
    Error.new(:closed, text)
  end

  defp ended(module, {:nodedown, node}) do
    text = "the node of the #{word(module)}, #{node}, is out of reach"
    Error.new(:closed, text, retriable?: true)
  end

  defp ended(module, :noconnection),
    do: Error.new(:closed, "the node of the #{word(module)} is out of reach", retriable?: true)

  defp ended(module, _reason), do: closed(module)

  defp late(module, timeout) do
    Error.new(:timeout, "the #{word(module)} has not answered within #{timeout} ms",
      retriable?: true
    )
  end

  defp word(word) when is_binary(word), do: word
  defp word(module), do: module |> Module.split() |> List.last() |> String.downcase()

  # ---- of the process asked

  @doc "The answer to a call that a process does not know."
  @spec unknown(module, term) :: {:ok, module} | {:error, Error.t()}
  def unknown(module, @who), do: {:ok, module}

  def unknown(module, request) do
    text = "#{a(module)}, which has no answer to #{inspect(request, limit: 5)}"
    {:error, Error.new(:unknown_call, text)}
  end

  @doc "A cast or a message that a process does not know: said, and dropped."
  @spec dropped(module, term) :: :ok
  def dropped(module, message) do
    shown = inspect(message, limit: 5, printable_limit: 100)
    Logger.warning("kmq: #{inspect(module)}: an unknown message was dropped: #{shown}")
  end
end
