defmodule Kmq.Tracker do
  @moduledoc """
  The process that runs `kmq_tracker`, the program that redelivers what is not acknowledged in time.

  A pipeline starts a tracker by itself (`tracker: :embedded`, the default): one for each group and set of marker topics in a VM,
  however many producers use it; it ends when the last of them is gone. For a tracker of its own, with pipelines that say
  `tracker: :external`, put it into a supervision tree, with the same options as the pipelines:

      children = [
        {Kmq.Tracker, hosts: [localhost: 9092], topics: ["orders"], group_id: "shop"}
      ]

  Any number of trackers of a group share its work, on any number of nodes: they are members of a Kafka consumer group
  called `<group_id>__kmq_tracker`, and each takes some partitions of the marker topics. Queues of the same group are kept apart by their
  marker topics: a tracker gets partitions of those only that it has subscribed to.

  The program runs outside of the VM: a fault in it takes nothing down, it is started again after a pause of 0.1 seconds, which doubles,
  up to 10, when it ends within 5 seconds (also when it has not answered for 15 seconds), and all it needs to know is in the marker topic. It ends by itself within two seconds when the VM is gone.

  Events are in `Kmq.Telemetry`. Alarms (a missing dead letter topic, a marker of a newer version) are logged as errors, at
  most every half minute each.
  """

  use GenServer
  require Logger

  alias Kmq.{
    Advice,
    Ask,
    CommandLine,
    Config,
    Error,
    Info,
    Noted,
    Options,
    Security,
    Telemetry,
    Token,
    Topics
  }

  @protocol 1
  @call_ms 5_000
  # A pipeline that restarts finds its tracker still there.
  @linger_ms 500
  # The program's own limit is 2 s.
  @stop_ms 2_500
  @pause_min_ms 100
  @pause_max_ms 10_000
  # A program that has run so long was not at fault for the last exit. No longer: where programs are killed every few seconds, each
  # tracker would be away for most of the time.
  @steady_ms 5_000
  # A program that says nothing for so many beats, though asked each time, is frozen or stuck: it is killed and started again. Beats
  # are counted, not time: after the VM itself has been frozen, one beat is late, and the answers are already there.
  @beat_ms 5_000
  @beats_missed 3

  @typedoc "A tracker: the result of `start_link/1`, or its name."
  @type tracker :: GenServer.server()

  # ---- embedded

  @doc false
  # The tracker of this configuration, started if need be; it runs as long as one of its users lives.
  @spec acquire(Config.t(), pid) :: {:ok, pid} | {:error, Error.t()}
  def acquire(%Config{} = config, user \\ self()), do: acquire(config, user, 5)

  defp acquire(_config, _user, 0),
    do: {:error, Error.new(:tracker, "the tracker cannot be started", retriable?: true)}

  defp acquire(config, user, tries) do
    spec = %{
      id: __MODULE__,
      start: {__MODULE__, :start_embedded, [config, user]},
      restart: :transient,
      shutdown: 5_000
    }

    case DynamicSupervisor.start_child(Kmq.TrackerSupervisor, spec) do
      {:ok, pid} -> {:ok, pid}
      {:error, {:already_started, pid}} -> use_it(pid, config, user, tries)
      {:error, %Error{} = error} -> {:error, error}
      {:error, reason} -> {:error, Error.new(:tracker, "no tracker: " <> inspect(reason))}
    end
  catch
    :exit, reason ->
      {:error, Error.new(:tracker, "no tracker: " <> inspect(reason), retriable?: true)}
  end

  @doc false
  # The user needs it no more, though it lives on.
  @spec release(pid, pid) :: :ok
  def release(tracker, user \\ self()), do: GenServer.cast(tracker, {:release, user})

  # It may be ending just now: then another one is started.
  defp use_it(pid, config, user, tries) do
    case GenServer.call(pid, {:use, user}) do
      :ok -> {:ok, pid}
      {:error, :ending} -> acquire(config, user, tries - 1)
    end
  catch
    :exit, {reason, _} when reason in [:noproc, :normal, :shutdown] ->
      acquire(config, user, tries - 1)
  end

  @doc false
  def start_embedded(config, user) do
    GenServer.start_link(__MODULE__, {config, user},
      name: {:via, Registry, {Kmq.Registry, key(config)}}
    )
  end

  defp key(config) do
    {__MODULE__, config.bootstrap, config.group_id,
     config.marker_topics |> Map.values() |> Enum.sort()}
  end

  # ---- standalone

  @doc "A child of a supervisor; the options are those of a pipeline, and `:name`."
  @spec child_spec(keyword) :: Supervisor.child_spec()
  def child_spec(options) do
    %{
      id: Options.peek(options, :name) || __MODULE__,
      start: {__MODULE__, :start_link, [Security.hide(options)]},
      shutdown: 5_000
    }
  end

  @doc """
  Starts a tracker of its own.

  Checks the topics first, and with `create_topics: true` makes those that are missing; returns an error in at most 15 seconds.
  """
  @spec start_link(keyword) :: GenServer.on_start() | {:error, Error.t()}
  def start_link(options) do
    with {:ok, config} <- Config.new(options, :tracker),
         :ok <- Kmq.Application.started(),
         {:ok, _partitions} <- Topics.prepare(config) do
      GenServer.start_link(__MODULE__, {config, nil}, Keyword.take(options, [:name]))
    end
  end

  @doc """
  What the program says about itself: `:state`, totals, `:restarts`, and `:partitions`. Of each partition of a marker topic that this
  tracker has: `:open`, how long the oldest of these is known here (`:oldest_age_ms`), when something is due next (`:next_due_ms`, -1 =
  never), how many are `:due` and not yet copied, `:position`, `:committed` and `:lag` in the marker topic, the age of the
  checkpoint that the commit refers to (`:checkpoint_age_ms`, -1 = none is needed).
  """
  @spec info(tracker) :: {:ok, map} | {:error, Error.t()}
  def info(tracker), do: call(tracker, :info, "info/1")

  @doc false
  @spec ping(tracker) :: :pong | {:error, Error.t()}
  def ping(tracker) do
    with {:ok, pong} <- call(tracker, :ping, "ping/1"), do: pong
  end

  @doc "Ends it: commits are made, the group is left. One that has ended before is `{:error, %Kmq.Error{reason: :closed}}`."
  @spec stop(tracker) :: :ok | {:error, Error.t()}
  def stop(tracker), do: Ask.stop(__MODULE__, "stop/1", tracker, :infinity)

  defp call(tracker, command, asked),
    do: Ask.call(__MODULE__, asked, tracker, {:command, command}, @call_ms + 1_000)

  # ---- process
  #
  #   port nil, restart timer --open--> port, :starting --{ready}[, token]--> :configuring --ok--> :running --exit--> port nil, restart timer
  #   last user gone --linger--> :ending (stop sent, name given up) --exit--> ended

  @impl true
  def init({config, user}) do
    Process.flag(:trap_exit, true)

    state = %{
      config: config,
      embedded: user != nil,
      users: %{},
      port: nil,
      status: :down,
      started_at: nil,
      pause_ms: @pause_min_ms,
      next_id: 1,
      calls: %{},
      linger: nil,
      os_pid: nil,
      instance: instance(),
      missed: 0,
      restarts: 0,
      # who was asked for a token: its monitor; nil = nobody
      token: nil
    }

    Process.send_after(self(), :beat, beat_ms())
    Info.register({:tracker, config.name, config.group_id})

    {:ok, if(user, do: add_user(state, user), else: state), {:continue, :open}}
  end

  @impl true
  def handle_continue(:open, state), do: {:noreply, open(state)}

  @impl true
  def handle_call({:use, _user}, _from, %{status: :ending} = state),
    do: {:reply, {:error, :ending}, state}

  def handle_call({:use, user}, _from, state), do: {:reply, :ok, add_user(state, user)}

  def handle_call({:command, command}, from, %{status: :running} = state) do
    {:noreply, command(state, command, [], from)}
  end

  def handle_call({:command, _command}, _from, state), do: {:reply, not_running(), state}
  def handle_call(request, _from, state), do: {:reply, Ask.unknown(__MODULE__, request), state}

  @impl true
  def handle_cast({:release, user}, state) do
    case Enum.find(state.users, fn {_monitor, pid} -> pid == user end) do
      {monitor, _pid} ->
        Process.demonitor(monitor, [:flush])
        {:noreply, linger(%{state | users: Map.delete(state.users, monitor)})}

      nil ->
        {:noreply, state}
    end
  end

  def handle_cast(request, state) do
    Ask.dropped(__MODULE__, request)
    {:noreply, state}
  end

  @impl true
  def handle_info({port, {:data, frame}}, %{port: port} = state) do
    {:noreply, frame(:kmq_port.decode(frame), %{state | missed: 0})}
  end

  def handle_info({port, {:exit_status, status}}, %{port: port} = state),
    do: exited({:exit_status, status}, state)

  def handle_info({:EXIT, port, reason}, %{port: port} = state), do: exited(reason, state)
  def handle_info({:EXIT, port, _reason}, state) when is_port(port), do: {:noreply, state}
  def handle_info({:EXIT, _from, reason}, state), do: {:stop, reason, state}

  def handle_info({:kmq_token, :tracker, token}, %{token: monitor} = state)
      when monitor != nil do
    Process.demonitor(monitor, [:flush])
    {:noreply, got_token(%{state | token: nil}, token)}
  end

  def handle_info({:kmq_token, :tracker, _late}, state), do: {:noreply, state}

  def handle_info({:DOWN, monitor, :process, _pid, _reason}, %{token: monitor} = state),
    do: {:noreply, want_token(%{state | token: nil})}

  def handle_info({:DOWN, monitor, :process, _pid, _reason}, state) do
    {:noreply, linger(%{state | users: Map.delete(state.users, monitor)})}
  end

  def handle_info(:open, %{port: nil} = state), do: {:noreply, open(state)}

  def handle_info({:late, id}, state) do
    case Map.pop(state.calls, id) do
      {{from, _timer}, calls} ->
        reply(from, {:error, Error.from_native(:timeout, "the tracker program")})
        {:noreply, %{state | calls: calls}}

      {nil, _calls} ->
        {:noreply, state}
    end
  end

  def handle_info(:linger, %{users: users} = state) when map_size(users) > 0,
    do: {:noreply, %{state | linger: nil}}

  def handle_info(:linger, state) do
    Registry.unregister(Kmq.Registry, key(state.config))
    ending(%{state | status: :ending})
  end

  def handle_info(:beat, state) do
    Process.send_after(self(), :beat, beat_ms())
    {:noreply, beat(state)}
  end

  def handle_info(:give_up, %{status: :ending} = state), do: {:stop, :normal, state}

  def handle_info({port, _old}, state) when is_port(port), do: {:noreply, state}
  def handle_info(:open, state), do: {:noreply, state}

  def handle_info(other, state) do
    Logger.debug("kmq tracker: unknown message #{inspect(other, limit: 5)}")
    {:noreply, state}
  end

  # Nobody to serve any more, so this may wait: the program needs a moment for its last commit.
  @impl true
  def terminate(_reason, %{port: nil}), do: :ok

  def terminate(_reason, %{port: port, status: status, next_id: id}) do
    if status != :ending, do: :kmq_port.send(port, id, :stop, [])
    await_exit(port, System.monotonic_time(:millisecond) + @stop_ms)
    :kmq_port.close(port)
  end

  defp await_exit(port, deadline) do
    receive do
      {^port, {:exit_status, _}} ->
        :ok

      {^port, {:data, frame}} ->
        # The answer to `stop` is the last frame: then it waits for its stdin to close.
        case :kmq_port.decode(frame) do
          {0, _event} -> await_exit(port, deadline)
          {_id, :ok} -> :ok
          {_id, _other} -> await_exit(port, deadline)
        end
    after
      max(deadline - System.monotonic_time(:millisecond), 0) -> :ok
    end
  end

  # ---- users

  defp add_user(state, user) do
    if state.linger, do: Process.cancel_timer(state.linger)

    users =
      if user in Map.values(state.users),
        do: state.users,
        else: Map.put(state.users, Process.monitor(user), user)

    %{state | users: users, linger: nil}
  end

  defp linger(%{users: users, embedded: true, linger: nil, status: status} = state)
       when map_size(users) == 0 and status != :ending,
       do: %{state | linger: Process.send_after(self(), :linger, @linger_ms)}

  defp linger(state), do: state

  defp ending(%{port: nil} = state), do: {:stop, :normal, state}

  defp ending(state) do
    Process.send_after(self(), :give_up, @stop_ms)
    {:noreply, command(state, :stop, [], :stop)}
  end

  # ---- the program

  defp open(state) do
    program = :kmq_port.program('kmq_tracker')

    case :kmq_port.open(program) do
      {:ok, port} ->
        now = System.monotonic_time(:millisecond)

        Telemetry.execute([:kmq, :tracker, :start], %{system_time: System.system_time()}, %{
          group: state.config.group_id
        })

        os_pid =
          case Port.info(port, :os_pid) do
            {:os_pid, os_pid} -> os_pid
            nil -> nil
          end

        %{state | port: port, status: :starting, started_at: now, os_pid: os_pid, missed: 0}

      {:error, reason} ->
        error = Error.no_program(:tracker, to_string(program), reason)
        metadata = %{group: state.config.group_id, error: error}
        Telemetry.execute([:kmq, :error], %{count: 1}, metadata)
        note(:program, fn -> Logger.error("#{name(state)}: #{error.message}") end)
        later(state)
    end
  end

  defp beat(%{port: nil} = state), do: state
  defp beat(%{status: :ending} = state), do: state

  defp beat(%{missed: @beats_missed, os_pid: os_pid} = state) do
    Logger.error("#{name(state)}: the program does not answer, it is killed")

    if os_pid,
      do: System.cmd("kill", ["-KILL", Integer.to_string(os_pid)], stderr_to_stdout: true)

    %{state | missed: 0}
  end

  defp beat(state), do: command(%{state | missed: state.missed + 1}, :ping, [], :beat)

  defp beat_ms, do: Application.get_env(:kmq, :tracker_beat_ms, @beat_ms)

  defp later(state) do
    Process.send_after(self(), :open, state.pause_ms)
    %{state | pause_ms: min(state.pause_ms * 2, @pause_max_ms)}
  end

  defp exited(reason, state) do
    for {_id, {from, timer}} <- state.calls do
      Process.cancel_timer(timer)
      reply(from, not_running())
    end

    Telemetry.execute([:kmq, :tracker, :stop], %{system_time: System.system_time()}, %{
      group: state.config.group_id,
      reason: reason
    })

    down = %{state | port: nil, os_pid: nil, calls: %{}}

    if state.status == :ending do
      {:stop, :normal, down}
    else
      lived = System.monotonic_time(:millisecond) - state.started_at
      down = if lived > @steady_ms, do: %{down | pause_ms: @pause_min_ms}, else: down

      Logger.warning(
        "#{name(state)}: the program ended (#{inspect(reason)}), started again in #{down.pause_ms} ms"
      )

      {:noreply, later(%{down | status: :down, restarts: state.restarts + 1})}
    end
  end

  defp command(state, command, args, from) do
    id = state.next_id
    timer = Process.send_after(self(), {:late, id}, @call_ms)
    :kmq_port.send(state.port, id, command, args)
    %{state | next_id: id + 1, calls: Map.put(state.calls, id, {from, timer})}
  end

  # Where tokens are needed the first one goes first: without, the program could not even look at the topics.
  defp frame({0, {:ready, @protocol}}, state) do
    if Security.token_source(state.config.tracker_props),
      do: want_token(state),
      else: configure(state)
  end

  defp frame({0, {:ready, version}}, state) do
    Logger.error(
      "#{name(state)}: the program speaks protocol #{version}, not #{@protocol}: it is of another build"
    )

    :kmq_port.close(state.port)
    later(%{state | port: nil, status: :down})
  end

  defp frame({0, {:event, :token, _info}}, state), do: want_token(state)

  defp frame({0, {:event, event, info}}, state) do
    event(event, info, state)
    state
  end

  defp frame({id, reply}, state) do
    case Map.pop(state.calls, id) do
      {nil, _calls} ->
        state

      {{from, timer}, calls} ->
        Process.cancel_timer(timer)
        answered(from, reply, %{state | calls: calls})
    end
  end

  defp configure(state),
    do: %{command(state, :configure, settings(state), :configure) | status: :configuring}

  defp want_token(%{token: nil} = state) do
    case Security.token_source(state.config.tracker_props) do
      nil -> state
      source -> %{state | token: Token.request(source, :tracker)}
    end
  end

  defp want_token(state), do: state

  defp got_token(%{port: nil} = state, _token), do: state

  defp got_token(state, token) do
    {token, expires_ms, principal, extensions} = token.()

    args = %{
      token: token,
      expires_ms: expires_ms,
      principal: principal,
      extensions: extensions
    }

    state = command(state, :token, args, :token)
    if state.status == :starting, do: configure(state), else: state
  end

  defp answered(:token, {:error, reason}, state) do
    Logger.error("#{name(state)}: the program refuses a token: #{inspect(reason)}")
    state
  end

  defp answered(:configure, :ok, state), do: %{state | status: :running}

  defp answered(:configure, {:error, reason}, state) do
    Logger.error("#{name(state)}: the program refuses its configuration: #{inspect(reason)}")
    state
  end

  # It waits for its stdin to close; the exit status comes no more then.
  defp answered(:stop, _reply, state) do
    send(self(), :give_up)
    state
  end

  defp answered(from, {:error, reason}, state) do
    reply(from, {:error, Error.from_native(reason, "the tracker program")})
    state
  end

  defp answered(from, %{} = info, state) do
    reply(from, {:ok, Map.put(info, :restarts, state.restarts)})
    state
  end

  defp answered(from, reply, state) do
    reply(from, {:ok, reply})
    state
  end

  defp reply(from, _result) when is_atom(from), do: :ok
  defp reply(from, result), do: GenServer.reply(from, result)

  defp not_running,
    do:
      {:error, Error.new(:tracker, "the tracker program does not run just now", retriable?: true)}

  # The group knows the programs of this process as one member: after a kill the next one has its partitions at once, and one that
  # is not gone yet is fenced.
  defp instance, do: "kmq-" <> Base.encode16(:crypto.strong_rand_bytes(10), case: :lower)

  defp settings(%{config: config, instance: instance}) do
    %{
      instance: instance,
      props: Security.reveal(config.tracker_props),
      group: config.group_id,
      tracker_group: tracker_group(config.group_id),
      format: config.marker_format,
      max_redeliveries: config.max_redeliveries,
      dead_letter_oversize: config.dead_letter_oversize,
      backoff: Kmq.Backoff.to_text(config.backoff),
      count_header: config.count_header,
      rate: config.redelivery_rate,
      redelivery: config.redelivery,
      trim_markers: config.trim_markers,
      queues:
        for topic <- config.topics do
          %{
            topic: topic,
            markers: config.marker_topics[topic],
            dead_letters: config.dead_letter_topics[topic],
            copies: config.redeliver_topics[topic]
          }
        end
    }
    |> Map.merge(Application.get_env(:kmq, :tracker_settings, %{}))
  end

  @doc "The Kafka consumer group that the trackers of a group share their work by."
  @spec tracker_group(String.t()) :: String.t()
  def tracker_group(group_id), do: group_id <> "__kmq_tracker"

  # ---- events

  defp event(:redelivered, info, state) do
    Telemetry.execute([:kmq, :redelivered], late(info), caused(info, state))

    Logger.debug(fn ->
      "#{where(info, state)}: #{info.count} redelivered (#{info.cause}), #{info.lateness_max_ms} ms late at most"
    end)
  end

  defp event(:dead_lettered, info, state) do
    Telemetry.execute([:kmq, :dead_lettered], late(info), caused(info, state))
    Logger.warning("#{where(info, state)}: #{info.count} dead-lettered (#{info.cause})")
  end

  defp event(:gone, info, state) do
    Telemetry.execute(
      [:kmq, :gone],
      %{count: info.count},
      Map.put(place(info, state), :offsets, [info.offset])
    )

    Logger.warning(
      "#{where(info, state)}: #{info.count} due messages were no longer in the topic, the last at offset #{info.offset}"
    )
  end

  defp event(:malformed, info, state) do
    for kind <- [:malformed, :foreign], count = info[kind], count > 0 do
      Telemetry.execute(
        [:kmq, :malformed],
        %{count: count},
        Map.put(place(info, state), :kind, kind)
      )
    end

    total = info.malformed + info.foreign

    Logger.warning(
      "#{where(info, state)}: #{total} records of its marker topic are not ours, the last at offset #{info.offset}"
    )
  end

  defp event(:late_acks, info, state) do
    Telemetry.execute([:kmq, :tracker, :late_acks], %{count: info.count}, place(info, state))

    Logger.warning(
      "#{where(info, state)}: #{info.count} were acknowledged after they had been redelivered"
    )
  end

  defp event(:gauges, info, state) do
    Telemetry.execute(
      [:kmq, :tracker, :work],
      %{in_flight: info.in_flight, waiting: info.waiting, restarts: state.restarts},
      %{group: state.config.group_id}
    )

    for partition <- info.partitions do
      meta = place(partition, state)

      Telemetry.execute(
        [:kmq, :open],
        %{
          count: partition.open,
          oldest_age_ms: partition.oldest_age_ms,
          next_due_ms: partition.next_due_ms,
          due: partition.due
        },
        meta
      )

      Telemetry.execute(
        [:kmq, :tracker, :lag],
        %{lag: partition.lag, checkpoint_age_ms: partition.checkpoint_age_ms},
        meta
      )
    end
  end

  defp event(:alarm, info, state) do
    error = Error.new(:tracker, "#{info.reason}: #{info.text}")

    Telemetry.execute([:kmq, :error], %{count: 1}, %{
      group: state.config.group_id,
      error: error,
      alarm: info.reason
    })

    Logger.error("#{where(info, state)}: #{info.reason}: #{info.text}")
  end

  defp event(:error, info, state) do
    error = native(%{info | text: info.text <> advice(info.name, state.config.group_id)})
    Telemetry.execute([:kmq, :error], %{count: 1}, %{group: state.config.group_id, error: error})
    note(info.name, fn -> Logger.warning("#{name(state)}: #{Exception.message(error)}") end)
  end

  defp event(:outage, info, state) do
    error = info |> native() |> Advice.connection()
    Telemetry.execute([:kmq, :error], %{count: 1}, %{group: state.config.group_id, error: error})
    # One whose last user is gone ends in a moment; its sandbox may have gone before.
    level = if state.embedded and state.users == %{}, do: :debug, else: :warning
    Logger.log(level, "#{name(state)}: #{error.message}; it connects again by itself")
  end

  defp event(:connected, info, state) do
    metadata = %{group: state.config.group_id, what: :connection}
    Telemetry.execute([:kmq, :recovered], %{count: 1}, metadata)
    Logger.info("#{name(state)}: connected again after #{CommandLine.seconds(info.ms)}")
  end

  defp event(:passing, info, state) do
    error = native(info)
    metadata = %{group: state.config.group_id, what: info.reason, error: error}
    Telemetry.execute([:kmq, :error, :passing], %{count: 1}, metadata)
    Logger.debug("#{name(state)}: #{info.reason}: #{error.message}")
  end

  defp event(:marker_gap, info, state) do
    lost =
      if info.reason == :recreated,
        do: "read or committed up to #{info.from} before, #{info.open} messages were open",
        else: "markers #{info.from}..#{info.to - 1} were deleted before they were read"

    Telemetry.execute(
      [:kmq, :offset_reset],
      %{from: info.from, to: info.to, open: info.open},
      place(info, state) |> Map.put(:reason, :marker_gap) |> Map.put(:cause, info.reason)
    )

    Logger.error(
      "#{where(info, state)}: #{lost} (#{gap(info.reason)}): " <>
        "messages that were open in them may be lost"
    )
  end

  defp event(:checkpoint, info, state) do
    Telemetry.execute(
      [:kmq, :tracker, :checkpoint],
      Map.take(info, [:open, :parts, :bytes]),
      place(info, state)
    )

    Logger.debug(fn ->
      "#{where(info, state)}: checkpoint of #{info.open} open messages as of marker #{info.as_of}, #{info.bytes} bytes"
    end)
  end

  defp event(:log, info, state),
    do: Logger.log(level(info.level), "#{name(state)}: librdkafka: #{info.text}")

  defp event(kind, info, state) when kind in [:assigned, :revoked] do
    Logger.debug(fn -> "#{name(state)}: #{kind}: #{inspect(info.partitions, limit: 20)}" end)
  end

  defp event(:ready, info, state) do
    Logger.debug(fn ->
      "#{where(info, state)}: caught up after #{info.markers} markers in #{info.ms} ms, #{info.open} open" <>
        if(info.loaded > 0, do: ", #{info.loaded} of them from a checkpoint", else: "")
    end)
  end

  defp event(_started, _info, _state), do: :ok

  defp native(info),
    do: Error.from_native({info.name, info.code, info.retriable, info.fatal, info.text})

  defp gap(:retention), do: "does the marker topic keep its records for long enough?"
  defp gap(:no_commit), do: "the trackers' group has no commit, and there is no checkpoint"
  defp gap(:no_checkpoint), do: "the checkpoint that the commit refers to is gone"
  defp gap(:recreated), do: "the marker topic is another one than before"

  defp late(info),
    do: %{count: info.count, late_ms: info.lateness_ms, late_max_ms: info.lateness_max_ms}

  defp caused(info, state), do: Map.put(place(info, state), :cause, info.cause)

  defp place(info, state),
    do: %{group: state.config.group_id, topic: info.topic, partition: info.partition}

  defp advice("GROUP_AUTHORIZATION_FAILED", group_id) do
    ": nothing is redelivered before it has the right READ on the group #{inspect(tracker_group(group_id))}"
  end

  defp advice(_name, _group_id), do: ""

  defp name(state), do: "kmq tracker of group #{state.config.group_id}"

  defp where(%{topic: nil}, state), do: name(state)
  defp where(%{partition: -1} = info, state), do: name(state) <> ", " <> info.topic
  defp where(info, state), do: name(state) <> ", " <> info.topic <> "/#{info.partition}"

  # Telemetry has each.
  defp note(what, fun),
    do: Process.put(:noted, Noted.note(Process.get(:noted, %{}), what, fun))

  # What matters comes as an event of its own; librdkafka is talkative about passing troubles.
  defp level(level) when level <= 2, do: :warning
  defp level(_other), do: :debug
end
