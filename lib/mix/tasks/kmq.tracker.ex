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

  The topics must be there: `Kmq.Topics`, or a pipeline with `create_topics: true`, makes them.
  """
  use Mix.Task

  @impl true
  def run(args) do
    Mix.Task.run("compile")

    case OptionParser.parse(args, strict: [config: :string, print: :boolean]) do
      {[config: file], [], []} -> daemon(file)
      {[print: true], [], []} -> Mix.shell().info(to_string(:kmq_port.program('kmq_tracker')))
      _other -> Mix.raise("usage: mix kmq.tracker --config FILE | --print")
    end
  end

  # Its stdin is this VM's: when the VM is killed, the daemon is not left behind.
  defp daemon(file) do
    program = :kmq_port.program('kmq_tracker')

    script =
      ~S("$0" --config "$1" & pid=$!; trap 'kill $pid' TERM INT; cat >/dev/null; kill $pid 2>/dev/null; wait $pid)

    port =
      Port.open({:spawn_executable, System.find_executable("sh")}, [
        :binary,
        :exit_status,
        :stderr_to_stdout,
        args: ["-c", script, to_string(program), file]
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
