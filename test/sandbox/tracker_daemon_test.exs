defmodule Kmq.Sandbox.TrackerDaemonTest do
  # What a daemon says that is to do what its cluster cannot.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.Test.Outside

  test "transactions on a sandbox: it says that there are none, and waits", %{cluster: cluster} do
    topic = queue(cluster, 1)
    options = options(cluster, topic)
    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))
    conf = Path.join(Outside.tmp_dir!("daemon"), "conf")

    File.write!(conf, """
    group = #{options[:group_id]}
    queue = #{topic}
    redelivery = transactional
    kafka.bootstrap.servers = #{cluster.hosts}
    """)

    program = to_string(:kmq_port.program('kmq_tracker'))

    port =
      Port.open({:spawn_executable, program}, [
        :binary,
        :stderr_to_stdout,
        line: 2_000,
        args: ["--config", conf]
      ])

    {:os_pid, pid} = Port.info(port, :os_pid)
    on_exit(fn -> System.cmd("kill", ["-KILL", "#{pid}"], stderr_to_stdout: true) end)
    text = line(port, ~r/alarm/)
    assert text =~ "reason=transaction"
    assert text =~ "a sandbox has no transactions: redelivery = idempotent, or a real Kafka"
  end

  defp line(port, wanted) do
    assert_receive {^port, {:data, {:eol, text}}}, scaled(20_000)
    if text =~ wanted, do: text, else: line(port, wanted)
  end
end
