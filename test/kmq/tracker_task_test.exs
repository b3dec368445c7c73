defmodule Kmq.TrackerTaskTest do
  # mix kmq.tracker and the end of its daemon, whoever begins it. No cluster is needed: without one the daemon waits for it.
  use ExUnit.Case, async: true

  import ExUnit.CaptureIO
  import Kmq.Test.Eventually
  alias Kmq.Test.{Outside, VM}
  alias Mix.Tasks.Kmq.Tracker

  setup do
    dir = Outside.tmp_dir!("tracker-task")
    conf = Path.join(dir, "tracker.conf")
    File.write!(conf, "group = g\nqueue = q\nkafka.bootstrap.servers = localhost:1\n")
    %{conf: conf}
  end

  # {exit code, standard output, standard error}
  defp mix(args) do
    self = self()

    err =
      capture_io(:stderr, fn ->
        out = capture_io(fn -> send(self, {:code, code(args)}) end)
        send(self, {:out, out})
      end)

    assert_received {:code, code}
    assert_received {:out, out}
    {code, out, err}
  end

  defp code(args) do
    Tracker.run(args)
    0
  catch
    :exit, {:shutdown, code} -> code
  end

  # A task of its own and its daemon's process id.
  defp start(conf) do
    {:ok, io} = StringIO.open("")

    task =
      spawn(fn ->
        Process.group_leader(self(), io)
        code(["--config", conf]) |> exit()
      end)

    pid =
      eventually(fn ->
        assert [pid] = daemons(conf)
        pid
      end)

    on_exit(fn -> System.cmd("kill", ["-KILL", "#{pid}"], stderr_to_stdout: true) end)
    {task, Process.monitor(task), pid}
  end

  defp daemons(conf) do
    for file <- Path.wildcard("/proc/[0-9]*/cmdline"),
        {:ok, line} <- [File.read(file)],
        [program, "--config", ^conf | _] <- [String.split(line, <<0>>)],
        String.ends_with?(program, "kmq_tracker"),
        do: file |> Path.dirname() |> Path.basename() |> String.to_integer()
  end

  test "help, and what is no argument of it" do
    assert {0, out, ""} = mix(["--help"])
    assert out =~ "mix kmq.tracker --config" and out =~ "exit code"
    assert {2, "", err} = mix(["--no-such-option"])
    assert err =~ "--no-such-option" and err =~ "--help"
    assert {2, "", err} = mix([])
    assert err =~ "--config FILE"
  end

  test "a daemon that cannot start: its words and its exit code" do
    assert {2, out, ""} = mix(["--config", "/nonexistent"])
    assert out =~ "kmq_tracker: /nonexistent: No such file"
  end

  test "a daemon that is killed ends the task", %{conf: conf} do
    {_task, monitor, pid} = start(conf)
    System.cmd("kill", ["-KILL", "#{pid}"])
    assert_receive {:DOWN, ^monitor, _, _, 137}, 20_000
  end

  test "a daemon that is told to end ends the task with 0", %{conf: conf} do
    {_task, monitor, pid} = start(conf)
    System.cmd("kill", ["-TERM", "#{pid}"])
    assert_receive {:DOWN, ^monitor, _, _, 0}, 20_000
  end

  test "no task, no daemon", %{conf: conf} do
    {task, monitor, pid} = start(conf)
    Process.exit(task, :kill)
    assert_receive {:DOWN, ^monitor, _, _, :killed}
    eventually(fn -> not VM.os_alive?(pid) end)
  end
end
