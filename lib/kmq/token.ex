defmodule Kmq.Token do
  @moduledoc false
  # Tokens for OAUTHBEARER: one process for each function that gives them, for all clients of the VM that use it.
  #
  #   nobody asks --ask--> asking (the function runs in a process of its own, bounded) --token--> told to all who wait
  #                           ^                          |
  #                           +--- pause, doubling <-- failed: said once
  #
  # A token that has lived for less than 70 % of its life is given again without asking: librdkafka wants a new one at 80 %, and a consumer,
  # its marker producer, a tracker and admin clients share it. Who waits and dies is forgotten. After @idle_ms without a question the process ends.
  #
  # The token itself is kept as a function (see Kmq.Security) and travels as one.

  use GenServer, restart: :temporary

  require Logger

  alias Kmq.{Error, Telemetry}

  @limit_ms 30_000
  @pause_min_ms 1_000
  @pause_max_ms 10_000
  @idle_ms 60_000
  @fresh 0.7
  @supervisor Kmq.TokenSupervisor

  @typedoc "A function without arguments; the same one has the same process."
  @type source :: (() -> term)
  @typedoc "Printed it shows nothing; called it gives token, end of life (ms since 1970), principal, extensions."
  @type t :: (() -> {String.t(), integer, String.t(), [{String.t(), String.t()}]})

  @doc "A function, or `{module, function, arguments}` (which may hold secrets) as one."
  @spec source(term) :: {:ok, source} | :error
  def source(value) when is_function(value, 0), do: {:ok, value}

  def source({module, function, args})
      when is_atom(module) and is_atom(function) and is_list(args),
      do: {:ok, fn -> apply(module, function, args) end}

  def source(_other), do: :error

  @doc "A token, within the time given."
  @spec fetch(source, pos_integer) :: {:ok, t} | {:error, Error.t()}
  def fetch(source, timeout_ms),
    do: fetch(source, make_ref(), System.monotonic_time(:millisecond) + timeout_ms)

  defp fetch(source, tag, deadline) do
    monitor = request(source, tag)

    receive do
      {:kmq_token, ^tag, token} ->
        Process.demonitor(monitor, [:flush])
        {:ok, token}

      # It had nothing to do for long enough, just now.
      {:DOWN, ^monitor, _, _, _} ->
        fetch(source, tag, deadline)
    after
      max(deadline - System.monotonic_time(:millisecond), 0) ->
        Process.demonitor(monitor, [:flush])
        given_up(source, tag)
    end
  end

  defp given_up(source, tag) do
    why = last_failure(source, tag)

    receive do
      {:kmq_token, ^tag, token} -> {:ok, token}
    after
      0 -> {:error, missing(why)}
    end
  end

  @doc """
  Asks for a token. It comes as `{:kmq_token, tag, token}`, whenever there is one: a function that fails is tried again. Monitored: when
  `{:DOWN, monitor, ...}` comes, ask again.
  """
  @spec request(source, term) :: reference
  def request(source, tag) do
    pid = process(source)
    monitor = Process.monitor(pid)
    send(pid, {:want, self(), tag})
    monitor
  end

  defp last_failure(source, tag) do
    GenServer.call(process(source), {:forget, self(), tag})
  catch
    :exit, _ -> "no answer in time"
  end

  defp missing(why),
    do:
      Error.new(:token, "no OAUTHBEARER token from the function of :sasl: #{why}",
        retriable?: true
      )

  # By its hash: what a function holds is in no name.
  defp key(source), do: {__MODULE__, :crypto.hash(:sha256, :erlang.term_to_binary(source))}

  defp process(source) do
    case Registry.lookup(Kmq.Registry, key(source)) do
      [{pid, _}] ->
        pid

      [] ->
        case DynamicSupervisor.start_child(@supervisor, {__MODULE__, source}) do
          {:ok, pid} -> pid
          {:error, {:already_started, pid}} -> pid
        end
    end
  end

  def start_link(source) do
    GenServer.start_link(__MODULE__, source, name: {:via, Registry, {Kmq.Registry, key(source)}})
  end

  # ---- what a function may return

  @doc false
  # {:ok, token} or {:error, words}. Words never hold what was returned: it may be the token.
  @spec normal(term, integer) :: {:ok, t, integer} | {:error, String.t()}
  def normal(result, now_ms) do
    case result do
      {:ok, token} when is_binary(token) -> checked(token, claim_ms(token), "", [], now_ms)
      {:ok, %{token: token} = map} -> from_map(token, map, now_ms)
      {:error, reason} when is_atom(reason) -> {:error, "{:error, #{inspect(reason)}}"}
      {:error, reason} when is_binary(reason) -> {:error, clip(reason)}
      {:error, _reason} -> {:error, "it gave {:error, ...}"}
      _other -> {:error, "it returned something else than {:ok, token} or {:ok, %{token: ...}}"}
    end
  end

  defp from_map(token, map, now_ms) do
    expires =
      case map do
        %{expires_in: ms} when is_integer(ms) -> now_ms + ms
        %{expires_at: %DateTime{} = at} -> DateTime.to_unix(at, :millisecond)
        %{expires_at: _} -> :bad
        %{expires_in: _} -> :bad
        _ -> is_binary(token) && claim_ms(token)
      end

    checked(token, expires, map[:principal] || "", map[:extensions] || [], now_ms)
  end

  defp checked(token, expires, principal, extensions, now_ms) do
    extensions = pairs(extensions)

    cond do
      not (is_binary(token) and token =~ ~r/\A[\x21-\x7e]+\z/) ->
        {:error, "the token is not a printable string"}

      expires == nil ->
        {:error,
         "the token does not say when it ends (no JWT with exp): return %{token: ..., expires_in: ms}"}

      not is_integer(expires) ->
        {:error, "expected ms for :expires_in or a DateTime for :expires_at"}

      expires <= now_ms ->
        {:error, "the token has expired already"}

      not (is_binary(principal) and String.printable?(principal)) ->
        {:error, "expected a string for :principal"}

      extensions == :bad ->
        {:error, "expected a map or list of names and strings for :extensions"}

      true ->
        principal = if principal == "", do: "kmq", else: principal
        {:ok, fn -> {token, expires, principal, extensions} end, expires}
    end
  end

  defp pairs(extensions)
       when (is_map(extensions) and not is_struct(extensions)) or
              (is_list(extensions) and length(extensions) >= 0) do
    Enum.reduce_while(extensions, [], fn
      {name, value}, acc when (is_atom(name) or is_binary(name)) and is_binary(value) ->
        name = to_string(name)

        if name =~ ~r/\A[A-Za-z]+\z/ and name != "auth" and value =~ ~r/\A[\x20-\x7e\t\r\n]*\z/,
          do: {:cont, [{name, value} | acc]},
          else: {:halt, :bad}

      _other, _acc ->
        {:halt, :bad}
    end)
  end

  defp pairs(_other), do: :bad

  # `exp` of a JWT, in ms; nil where it is none.
  defp claim_ms(token) do
    with [_head, body, _signature] <- String.split(token, "."),
         {:ok, json} <- Base.url_decode64(body, padding: false),
         [_, seconds] <- Regex.run(~r/"exp"\s*:\s*(\d+(?:\.\d+)?)/, json),
         {seconds, _} <- Float.parse(seconds) do
      trunc(seconds * 1_000)
    else
      _ -> nil
    end
  end

  defp clip(text) do
    text = if String.printable?(text), do: text, else: inspect(text)
    if String.length(text) > 200, do: String.slice(text, 0, 200) <> "...", else: text
  end

  # ---- the process

  @impl true
  def init(source) do
    {:ok,
     %{
       source: source,
       token: nil,
       fresh_until: nil,
       worker: nil,
       timer: nil,
       waiting: [],
       pause_ms: pause_ms(),
       failure: nil
     }, @idle_ms}
  end

  # What comes with this call is why there is none yet.
  @impl true
  def handle_call({:forget, pid, tag}, _from, state) do
    {gone, waiting} = Enum.split_with(state.waiting, fn {p, t, _} -> p == pid and t == tag end)
    Enum.each(gone, fn {_, _, monitor} -> Process.demonitor(monitor, [:flush]) end)

    why =
      cond do
        state.failure -> state.failure
        state.worker -> "it has not returned yet"
        true -> "no answer in time"
      end

    continue({:reply, why, %{state | waiting: waiting}})
  end

  def handle_call(request, _from, state),
    do: continue({:reply, Kmq.Ask.unknown(__MODULE__, request), state})

  @impl true
  def handle_cast(request, state) do
    Kmq.Ask.dropped(__MODULE__, request)
    continue({:noreply, state})
  end

  @impl true
  def handle_info({:want, pid, tag}, state) do
    if state.token && now() < state.fresh_until do
      send(pid, {:kmq_token, tag, state.token})
      continue({:noreply, state})
    else
      waiting = [{pid, tag, Process.monitor(pid)} | state.waiting]
      continue({:noreply, ask(%{state | waiting: waiting})})
    end
  end

  def handle_info({:result, pid, result}, %{worker: {pid, monitor, timer}} = state) do
    Process.demonitor(monitor, [:flush])
    :erlang.cancel_timer(timer)
    continue({:noreply, answered(result.(), %{state | worker: nil})})
  end

  def handle_info({:DOWN, monitor, _, pid, _reason}, %{worker: {pid, monitor, timer}} = state) do
    :erlang.cancel_timer(timer)
    continue({:noreply, failed("its process was killed", %{state | worker: nil})})
  end

  def handle_info({:timeout, timer, :limit}, %{worker: {pid, monitor, timer}} = state) do
    Process.demonitor(monitor, [:flush])
    Process.exit(pid, :kill)
    text = "it did not return within #{limit_ms()} ms"
    continue({:noreply, failed(text, %{state | worker: nil})})
  end

  def handle_info({:timeout, timer, :again}, %{timer: timer} = state),
    do: continue({:noreply, ask(%{state | timer: nil})})

  def handle_info({:DOWN, monitor, _, _, _}, state) do
    waiting = Enum.reject(state.waiting, fn {_, _, m} -> m == monitor end)
    continue({:noreply, %{state | waiting: waiting}})
  end

  def handle_info(:timeout, state), do: {:stop, :normal, state}
  def handle_info(_late, state), do: continue({:noreply, state})

  defp continue(result) do
    state = elem(result, tuple_size(result) - 1)

    if state.waiting == [] and state.worker == nil,
      do: Tuple.append(result, @idle_ms),
      else: result
  end

  defp ask(%{waiting: []} = state), do: state
  defp ask(%{worker: worker} = state) when worker != nil, do: state
  defp ask(%{timer: timer} = state) when timer != nil, do: state

  defp ask(state) do
    owner = self()
    source = state.source

    # The result travels in a function; what raises is caught: a crash report would show it.
    {pid, monitor} =
      spawn_monitor(fn ->
        result = run(source)
        send(owner, {:result, self(), fn -> result end})
      end)

    %{state | worker: {pid, monitor, :erlang.start_timer(limit_ms(), self(), :limit)}}
  end

  defp run(source) do
    {:returned, source.()}
  rescue
    exception -> {:failed, "it raised #{inspect(exception.__struct__)}"}
  catch
    :exit, _reason -> {:failed, "it exited"}
    :throw, _value -> {:failed, "it threw something"}
  end

  defp answered({:failed, text}, state), do: failed(text, state)

  defp answered({:returned, result}, state) do
    now = now()

    case normal(result, now) do
      {:ok, token, expires} ->
        for {pid, tag, monitor} <- state.waiting do
          Process.demonitor(monitor, [:flush])
          send(pid, {:kmq_token, tag, token})
        end

        state.failure && Logger.info("kmq: OAUTHBEARER: there is a token again")

        %{
          state
          | token: token,
            fresh_until: now + trunc((expires - now) * @fresh),
            waiting: [],
            failure: nil,
            pause_ms: pause_ms()
        }

      {:error, text} ->
        failed(text, state)
    end
  end

  # Said when it begins; the text may change later, and is then in the error of who gives up waiting.
  defp failed(text, state) do
    unless state.failure do
      error = missing(text)
      Logger.error("kmq: #{error.message}; tried again, at the latest every 10 s")
      Telemetry.execute([:kmq, :error], %{count: 1}, %{handle: :oauthbearer, error: error})
    end

    timer = :erlang.start_timer(state.pause_ms, self(), :again)
    pause_ms = min(state.pause_ms * 2, @pause_max_ms)
    %{state | failure: text, timer: timer, pause_ms: pause_ms}
  end

  defp pause_ms, do: Application.get_env(:kmq, :token_pause_ms, @pause_min_ms)
  defp limit_ms, do: Application.get_env(:kmq, :token_limit_ms, @limit_ms)
  defp now, do: System.os_time(:millisecond)
end
