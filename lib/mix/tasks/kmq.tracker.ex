defmodule Mix.Tasks.Kmq.Tracker do
  @shortdoc "Runs the tracker as a daemon of its own"
  @moduledoc """
  Runs `kmq_tracker`, the program that redelivers what is not acknowledged in time, without a pipeline beside it.

      mix kmq.tracker --config tracker.conf
      mix kmq.tracker --print

  It runs in the foreground and writes one line per event to stdout; SIGTERM, or Ctrl-C twice, ends it in an orderly way. Pipelines of the
  group then say `tracker: :external`. `--print` says where the program is: it needs no Erlang, and can be copied and started by
  itself (`kmq_tracker --config FILE`) where librdkafka is installed.

  The file has a `key = value` on each line; `examples/tracker.conf` has all keys:

      group = shop
      queue = orders
      kafka.bootstrap.servers = localhost:9092
      kafka.sasl.password = env:KAFKA_PASSWORD

  The topics must be there: `mix kmq.topics create`, or a pipeline with `create_topics: true`, makes those beside the queue.

    * `--config` - the file
    * `--print` - where the program is

  The exit code is the daemon's: 0 after an orderly end, 2 when it cannot start or go on (or for wrong arguments here), 3 without memory,
  128 and the number of the signal that has killed it.
  """
  use Mix.Task

  alias Kmq.CommandLine

  @impl true
  def run(args) do
    case CommandLine.parse(args, config: :string, print: :boolean, help: :boolean) do
      {[help: true], []} ->
        IO.puts(@moduledoc)

      {[config: file], []} ->
        Mix.Task.run("compile")
        daemon(file)

      {[print: true], []} ->
        Mix.Task.run("compile")
        Mix.shell().info(program())

      _other ->
        CommandLine.bad_usage("usage: mix kmq.tracker --config FILE | --print")
    end
  end

  defp program, do: to_string(:kmq_port.program('kmq_tracker'))

  # The shell's stdin is this VM's end of a pipe: when the VM is killed, the loop of `read` ends, and with it the daemon. It runs beside the
  # wait, not before it, so that the end of the daemon is the end of the task; and without the stdout, the end of which the port waits for.
  # A wait that a signal has cut short is no status yet.
  @script ~S"""
  exec 3<&0
  "$0" --config "$1" </dev/null 3<&- & pid=$!
  { while read -r _; do :; done; kill $pid; } <&3 >/dev/null 2>&1 & watch=$!
  exec 3<&-
  trap 'kill $pid 2>/dev/null' TERM INT HUP
  wait $pid; status=$?
  while kill -0 $pid 2>/dev/null; do wait $pid; status=$?; done
  kill $watch 2>/dev/null
  exit $status
  """
  defp daemon(file) do
    port =
      Port.open({:spawn_executable, System.find_executable("sh")}, [
        :binary,
        :exit_status,
        :stderr_to_stdout,
        args: ["-c", @script, program(), file]
      ])

    case pass_on(port) do
      0 -> :ok
      status -> exit({:shutdown, status})
    end
  end

  defp pass_on(port) do
    receive do
      {^port, {:data, bytes}} ->
        IO.write(bytes)
        pass_on(port)

      {^port, {:exit_status, status}} ->
        status
    end
  end
end
