defmodule Kmq.Test.VM do
  @moduledoc false
  # A second BEAM, to be killed, frozen and asked.
  #
  #   test VM --(fd 3: {id, module, function, args})--> other VM     {:packet, 4} frames of external terms
  #           <-(fd 4: {id, {:ok, value} | {:raised, text}})--
  #
  # Its stdin is empty, what it prints goes to a log file. It ends when the test VM does, however that happens: descriptor 3 says so.
  # Each call runs in a process of its own there; what is to last (a pipeline, a tracker) is started without a link.
  use GenServer

  @enforce_keys [:pid, :os_pid, :log]
  defstruct [:pid, :os_pid, :log]

  @type t :: %__MODULE__{pid: pid, os_pid: pos_integer, log: Path.t()}

  @ready_ms 30_000

  @doc """
  Starts a VM with the application `:kmq` and waits until it answers. Options: `:failpoints` (as `KMQ_FAILPOINTS` has it), `:dir`
  for its log, `:args` for `erl`.
  """
  @spec start(keyword) :: t
  def start(options \\ []) do
    {:ok, pid} = GenServer.start_link(__MODULE__, options)
    GenServer.call(pid, :vm, @ready_ms)
  end

  @doc "Calls a function there. What it raises is raised here."
  @spec call(t, module, atom, list, timeout) :: term
  def call(vm, module, function, args, timeout \\ 30_000) do
    case GenServer.call(vm.pid, {:call, {module, function, args}}, timeout) do
      {:ok, value} -> value
      {:raised, text} -> raise "in VM #{vm.os_pid}: #{text}"
      :down -> raise "VM #{vm.os_pid} is down; its log:\n" <> tail(vm)
    end
  end

  @doc "SIGKILL, and its end awaited."
  @spec kill(t) :: :ok
  def kill(vm) do
    signal(vm, :kill)
    await_exit(vm)
  end

  @doc "`:kill`, `:stop`, `:cont` or `:term` to the VM, or to any process by its id."
  @spec signal(t | pos_integer, :kill | :stop | :cont | :term) :: :ok
  def signal(%__MODULE__{os_pid: os_pid}, signal), do: signal(os_pid, signal)

  def signal(os_pid, signal) when signal in [:kill, :stop, :cont, :term] and os_pid > 1 do
    name = signal |> Atom.to_string() |> String.upcase()
    {_, _} = System.cmd("kill", ["-#{name}", Integer.to_string(os_pid)], stderr_to_stdout: true)
    :ok
  end

  @doc "What a process may have from now on: `:data` (heaps and stacks) or `:as` (address space, `ulimit -v`), in KiB. Needs prlimit."
  @spec limit(pos_integer, :data | :as, pos_integer) :: :ok
  def limit(os_pid, resource, kilobytes) when os_pid > 1 do
    arguments = ["--pid", "#{os_pid}", "--#{resource}=#{kilobytes * 1024}"]
    {"", 0} = System.cmd("prlimit", arguments, stderr_to_stdout: true)
    :ok
  end

  @doc "A line of /proc/PID/status in KiB: `\"VmHWM\"`, the most memory a process had; `\"VmPeak\"`, the most address space."
  @spec kilobytes(pos_integer, String.t()) :: non_neg_integer
  def kilobytes(os_pid, name) do
    [_, kb] = Regex.run(~r/^#{name}:\s+(\d+) kB$/m, File.read!("/proc/#{os_pid}/status"))
    String.to_integer(kb)
  end

  @doc "Waits until the VM has ended."
  @spec await_exit(t, timeout) :: :ok
  def await_exit(vm, timeout \\ 30_000) do
    GenServer.call(vm.pid, :await_exit, timeout)
  catch
    :exit, {reason, _} when reason in [:noproc, :normal] -> :ok
  end

  @spec alive?(t) :: boolean
  def alive?(vm), do: os_alive?(vm.os_pid)

  @doc "The end of its log."
  @spec tail(t) :: String.t()
  def tail(vm) do
    case File.read(vm.log) do
      {:ok, text} -> text |> String.split("\n") |> Enum.take(-60) |> Enum.join("\n")
      {:error, _} -> "(none)"
    end
  end

  @doc "The port programs of a VM (by default of this one): `[{os_pid, name}]`."
  @spec port_programs(t | nil) :: [{pos_integer, String.t()}]
  def port_programs(vm \\ nil) do
    vm_pid = if vm, do: vm.os_pid, else: String.to_integer(System.pid())
    processes = processes()
    starters = for {pid, parent, "erl_child_setup"} <- processes, parent == vm_pid, do: pid
    for {pid, parent, name} <- processes, parent in starters, do: {pid, name}
  end

  @doc "Whether a process runs; a zombie does not."
  @spec os_alive?(pos_integer) :: boolean
  def os_alive?(os_pid) do
    case stat(os_pid) do
      {state, _parent, _name} -> state not in ["Z", "X"]
      nil -> false
    end
  end

  defp processes do
    for entry <- File.ls!("/proc"),
        {pid, ""} <- [Integer.parse(entry)],
        {state, parent, name} <- [stat(pid)],
        state not in ["Z", "X"],
        do: {pid, parent, name}
  end

  # "pid (name) state parent ...": a name may hold blanks and brackets.
  defp stat(os_pid) do
    with {:ok, text} <- File.read("/proc/#{os_pid}/stat"),
         [_, name, rest] <- Regex.run(~r/^\d+ \((.*)\) (.*)/s, text) do
      [state, parent | _] = String.split(rest)
      {state, String.to_integer(parent), name}
    else
      _ -> nil
    end
  end

  # ---- here

  @impl true
  def init(options) do
    Process.flag(:trap_exit, true)
    dir = Keyword.get_lazy(options, :dir, &System.tmp_dir!/0)
    log = Path.join(dir, "vm-#{System.unique_integer([:positive])}-#{System.pid()}.log")

    erl = Path.join(:code.root_dir(), "bin/erl")
    paths = Enum.reject(:code.get_path(), &List.starts_with?(&1, :code.root_dir() ++ '/'))
    paths = for path <- paths, path != '.', do: List.to_string(path)

    args =
      ["-c", ~s(log=$1; shift; exec "$@" </dev/null >>"$log" 2>&1), "sh", log, erl] ++
        ["-noinput", "-boot", "start_clean", "+sbwt", "none"] ++
        Keyword.get(options, :args, []) ++
        ["-pa" | paths] ++
        ["-s", Atom.to_string(__MODULE__), "boot"]

    env = [
      {'KMQ_FAILPOINTS',
       if(points = options[:failpoints], do: String.to_charlist(points), else: false)},
      {'ERL_CRASH_DUMP_SECONDS', '0'}
    ]

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        :exit_status,
        :nouse_stdio,
        packet: 4,
        args: args,
        env: env
      ])

    {:os_pid, os_pid} = Port.info(port, :os_pid)
    vm = %__MODULE__{pid: self(), os_pid: os_pid, log: log}
    {:ok, %{vm: vm, port: port, ready: false, asking: [], calls: %{}, next: 1, exiting: []}}
  end

  @impl true
  def handle_call(:vm, _from, %{ready: true} = state), do: {:reply, state.vm, state}
  def handle_call(:vm, from, state), do: {:noreply, %{state | asking: [from | state.asking]}}
  def handle_call({:call, _}, _from, %{port: nil} = state), do: {:reply, :down, state}

  def handle_call({:call, {module, function, args}}, from, state) do
    frame = :erlang.term_to_binary({state.next, module, function, args})

    if send_frame(state.port, frame),
      do:
        {:noreply, %{state | calls: Map.put(state.calls, state.next, from), next: state.next + 1}},
      else: {:reply, :down, state}
  end

  def handle_call(:await_exit, _from, %{port: nil} = state), do: {:reply, :ok, state}

  def handle_call(:await_exit, from, state),
    do: {:noreply, %{state | exiting: [from | state.exiting]}}

  # A port that has just ended raises.
  defp send_frame(port, frame) do
    Port.command(port, frame)
  rescue
    ArgumentError -> false
  end

  @impl true
  def handle_info({port, {:data, frame}}, %{port: port} = state) do
    case :erlang.binary_to_term(frame) do
      :ready ->
        Enum.each(state.asking, &GenServer.reply(&1, state.vm))
        {:noreply, %{state | ready: true, asking: []}}

      {id, result} ->
        {from, calls} = Map.pop(state.calls, id)
        from && GenServer.reply(from, result)
        {:noreply, %{state | calls: calls}}
    end
  end

  def handle_info({port, {:exit_status, _}}, %{port: port} = state) do
    Enum.each(state.calls, fn {_, from} -> GenServer.reply(from, :down) end)
    Enum.each(state.exiting, &GenServer.reply(&1, :ok))

    if state.ready,
      do: {:noreply, %{state | port: nil, calls: %{}, exiting: []}},
      else: {:stop, {:vm_did_not_start, tail(state.vm)}, state}
  end

  # A killed VM closes its descriptors before its exit status is known.
  def handle_info({:EXIT, port, _reason}, %{port: port} = state), do: {:noreply, state}
  def handle_info({:EXIT, _parent, reason}, state), do: {:stop, reason, state}
  def handle_info(_other, state), do: {:noreply, state}

  @impl true
  def terminate(_reason, %{port: nil}), do: :ok

  def terminate(_reason, state) do
    signal(state.vm, :kill)
    :ok
  end

  # ---- there

  @doc false
  def boot do
    spawn(fn ->
      port = Port.open({:fd, 3, 4}, [:binary, :eof, packet: 4])
      Application.load(:logger)

      Application.put_env(:logger, :console,
        device: :standard_error,
        format: "$time [$level] $message\n"
      )

      {:ok, _} = Application.ensure_all_started(:kmq)
      Port.command(port, :erlang.term_to_binary(:ready))
      serve(port)
    end)
  end

  defp serve(port) do
    receive do
      {^port, {:data, frame}} ->
        {id, module, function, args} = :erlang.binary_to_term(frame)
        server = self()
        spawn(fn -> send(server, {:result, id, run(module, function, args)}) end)
        serve(port)

      {:result, id, result} ->
        Port.command(port, :erlang.term_to_binary({id, result}))
        serve(port)

      {^port, :eof} ->
        :erlang.halt(0, flush: false)
    end
  end

  defp run(module, function, args) do
    {:ok, apply(module, function, args)}
  catch
    kind, reason -> {:raised, Exception.format(kind, reason, __STACKTRACE__)}
  end
end
