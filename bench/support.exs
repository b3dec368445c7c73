defmodule Bench.Support do
  @moduledoc false
  # What the measurements share: a Kafka of their own, the machine's description, percentiles, processes of the system, and where
  # results go.

  @results "bench/RESULTS.md"

  # Without an address the broker of the tests is started; its jars must be in the cache (`make setup-test`).
  def kafka(nil) do
    # in the tests' build it is there already
    unless Code.ensure_loaded?(Kmq.Test.Kafka),
      do: Code.require_file("test/support/kafka_broker.ex")

    broker = apply(Kmq.Test.Kafka, :start!, [[jvm: ["-Xmx1g"]]])

    {apply(Kmq.Test.Kafka, :bootstrap, [broker]),
     fn -> apply(Kmq.Test.Kafka, :stop, [broker]) end}
  end

  def kafka(bootstrap), do: {bootstrap, fn -> :ok end}

  # The application, a cluster, and the work; the cluster's end is ours in each case.
  def with_kafka(address, fun) do
    {:ok, _} = Application.ensure_all_started(:kmq)
    Logger.configure(level: :error)
    {bootstrap, stop} = kafka(address)

    try do
      fun.(bootstrap)
    after
      stop.()
    end
  end

  def options!(args, strict) do
    case OptionParser.parse(args, strict: strict) do
      {options, [], []} ->
        options

      {_, rest, bad} ->
        raise(ArgumentError, "not understood: #{inspect(rest ++ Enum.map(bad, &elem(&1, 0)))}")
    end
  end

  def head(what) do
    {rdkafka, _} = :kmq_nif.version()

    "#{System.schedulers_online()} schedulers, #{cpu_name()}; OTP #{System.otp_release()}, Elixir #{System.version()}, librdkafka #{rdkafka}, commit #{commit()}\n" <>
      "#{what}; the broker on the same machine\n"
  end

  defp commit do
    case System.cmd("git", ["rev-parse", "--short", "HEAD"], stderr_to_stdout: true) do
      {out, 0} -> String.trim(out)
      _ -> "unknown"
    end
  end

  defp cpu_name do
    with {:ok, text} <- File.read("/proc/cpuinfo"),
         [_, name] <- Regex.run(~r/model name\s*:\s*(.+)/, text),
         do: name,
         else: (_ -> "cpu unknown")
  end

  def note(text), do: IO.puts(:stderr, "  " <> text)

  # The C program beside which we are measured.
  def alone do
    path =
      System.get_env("KMQ_RDKAFKA_ALONE") ||
        raise "KMQ_RDKAFKA_ALONE: the path of the C program (make sets it)"

    Path.expand(path)
  end

  # ---- numbers

  # The list is sorted; p in percent.
  def percentile(sorted, p) when is_tuple(sorted) do
    n = tuple_size(sorted)
    elem(sorted, min(n - 1, max(0, ceil(n * p / 100) - 1)))
  end

  def median(list) do
    sorted = Enum.sort(list)
    Enum.at(sorted, div(length(sorted), 2))
  end

  def ms(us), do: :erlang.float_to_binary(us / 1000, decimals: 2)
  def float(x, decimals \\ 2), do: :erlang.float_to_binary(x / 1, decimals: decimals)

  def thousands(x) do
    x |> round() |> Integer.to_string() |> String.replace(~r/(?<=\d)(?=(\d{3})+$)/, ",")
  end

  # ---- this process and its port programs, by /proc

  def now_us, do: System.monotonic_time(:microsecond)

  # Of the whole VM, librdkafka's threads included, the kernel's work for it, too (the VM's own figure leaves that out); ms.
  def cpu_ms do
    case File.read("/proc/self/stat") do
      {:ok, text} -> text |> String.split(") ") |> List.last() |> String.split() |> ticks()
      _no_proc -> elem(:erlang.statistics(:runtime), 0)
    end
  end

  # The 14th and 15th field, in hundredths of a second; two stand before the bracket.
  defp ticks(fields),
    do: 10 * (fields |> Enum.slice(11, 2) |> Enum.map(&String.to_integer/1) |> Enum.sum())

  def rss_mb(pid \\ "self") do
    with {:ok, text} <- File.read("/proc/#{pid}/status"),
         [_, kb] <- Regex.run(~r/VmRSS:\s+(\d+)/, text),
         do: String.to_integer(kb) / 1024,
         else: (_ -> 0.0)
  end

  # Processor time in s, and how often its threads were put to sleep and waked; of the threads that live.
  def process(pid), do: {cpu_s(pid), switches(pid)}

  # In ns, where the kernel counts them; /proc/PID/stat has hundredths of a second.
  defp cpu_s(pid) do
    for task <- File.ls!("/proc/#{pid}/task"), reduce: 0.0 do
      sum ->
        case File.read("/proc/#{pid}/task/#{task}/schedstat") do
          {:ok, text} -> sum + (text |> String.split() |> hd() |> String.to_integer()) / 1.0e9
          _ -> sum
        end
    end
  end

  defp switches(pid) do
    for task <- File.ls!("/proc/#{pid}/task"),
        {:ok, text} <- [File.read("/proc/#{pid}/task/#{task}/status")],
        [_, n] <- Regex.scan(~r/ctxt_switches:\s+(\d+)/, text),
        reduce: 0,
        do: (sum -> sum + String.to_integer(n))
  end

  # The system's pid of a port program of this VM, "kmq_tracker" for example; nil: none runs.
  def port_program(name) do
    Enum.find_value(Port.list(), fn port ->
      with {:name, path} <- Port.info(port, :name),
           true <- path |> to_string() |> String.contains?(name),
           {:os_pid, pid} <- Port.info(port, :os_pid),
           do: pid,
           else: (_ -> nil)
    end)
  end

  def wait_for(what, seconds, fun), do: wait_until(what, now_us() + seconds * 1_000_000, fun)

  defp wait_until(what, until, fun) do
    cond do
      result = fun.() -> result
      now_us() > until -> raise "#{what}: not within its time"
      true -> receive(after: (20 -> wait_until(what, until, fun)))
    end
  end

  # What a closed consumer had still to say to this process.
  def flush_wakes do
    receive do
      {:kmq, _, _} -> flush_wakes()
    after
      0 -> :ok
    end
  end

  # ---- a C program beside us

  def spawn_alone(args) do
    Port.open({:spawn_executable, alone()}, [
      :binary,
      :exit_status,
      line: 4096,
      args: Enum.map(args, &to_string/1)
    ])
  end

  def wait_line(port, seconds) do
    receive do
      {^port, {:data, {_, line}}} -> line
      {^port, {:exit_status, status}} -> raise "rdkafka_alone ended with #{status}"
    after
      seconds * 1000 -> raise "rdkafka_alone says nothing for #{seconds} s"
    end
  end

  # Its last line: MESSAGES SECONDS CPU_SECONDS RSS_KB -> {messages a second, CPU us per message}
  def wait_result(port, seconds) do
    [n, time, cpu, _rss] = port |> wait_line(seconds) |> String.split()

    receive do
      {^port, {:exit_status, 0}} -> :ok
      {^port, {:exit_status, status}} -> raise "rdkafka_alone ended with #{status}"
    after
      seconds * 1000 -> raise "rdkafka_alone does not end"
    end

    n = String.to_integer(n)
    {n / String.to_float(time), String.to_float(cpu) * 1.0e6 / n}
  end

  # ---- where results go

  def data_dir do
    dir = Path.join(Path.dirname(Path.dirname(Mix.Project.build_path())), "_build/bench")
    File.mkdir_p!(dir)
    dir
  end

  def write_csv(name, header, rows) do
    path = Path.join(data_dir(), name)
    File.write!(path, [header, "\n", for(row <- rows, do: [Enum.join(row, ","), "\n"])])
    note("data: #{Path.relative_to_cwd(path)}")
  end

  # The part of the file between the marks of this name is ours.
  def save(name, title, head, text) do
    {open, close} = {"<!-- #{name} -->", "<!-- end of #{name} -->"}
    section = "#{open}\n## #{title}\n\n```\n#{head}```\n\n#{text}\n#{close}\n"
    old = File.read!(@results)

    new =
      if String.contains?(old, open),
        do: Regex.replace(~r/#{open}.*#{close}\n/s, old, fn _ -> section end),
        else: old <> "\n" <> section

    File.write!(@results, new)
    note("written to #{@results}")
  end
end
