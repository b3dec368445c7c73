defmodule Kmq.Test.Transactions do
  @moduledoc false
  # A transactional producer: the JVM's own, told what to do line by line.

  import ExUnit.Assertions
  import Kmq.Test.Eventually

  @source Path.expand("peer/Transactions.java", __DIR__)

  @doc "nil, or why it cannot be had here."
  def missing do
    if System.find_executable("javac") == nil,
      do: "no javac here; Debian: apt-get install default-jdk-headless"
  end

  @doc "The compiled program's class path, in a folder of its own: `{dir, class path}`."
  def compile do
    dir =
      Path.join(
        System.tmp_dir!(),
        "kmq-transactions-#{System.pid()}-#{System.unique_integer([:positive])}"
      )

    File.mkdir_p!(dir)
    jars = Path.join(Kmq.Test.Kafka.jars(), "*")
    args = ["-nowarn", "-cp", jars, "-d", dir, @source]
    {text, status} = System.cmd("javac", args, stderr_to_stdout: true)
    if status != 0, do: flunk("javac: " <> text)
    {dir, "#{dir}:#{jars}"}
  end

  @doc "Its stdin is our port: it ends when that is closed, also by the death of this VM."
  def start(class_path, hosts, id) do
    java = ["-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", class_path, "Transactions", hosts, id]

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        :exit_status,
        line: 10_000,
        args: ["-c", ~s(exec "$@" 2>/dev/null), "sh", System.find_executable("java") | java]
      ])

    assert_receive {^port, {:data, {:eol, "ready"}}}, scaled(30_000)
    port
  end

  def tell(port, commands) do
    for command <- List.wrap(commands) do
      Port.command(port, command <> "\n")
      assert_receive {^port, {:data, {:eol, "ok"}}}, scaled(20_000), command
    end

    :ok
  end

  def stop(port), do: Port.close(port)
end
