defmodule Kmq.Sandbox.TrackerHttpTest do
  # The daemon's metrics on a loopback port: a build of its own, with libmicrohttpd.
  use Kmq.Test.ClusterCase, on: :sandbox

  alias Kmq.Test.{Outside, VM}

  @moduletag :http

  setup_all do
    build = Path.join(Path.dirname(Mix.Project.build_path()), "c")
    dir = Path.join(System.tmp_dir!(), unique("kmq-http"))
    on_exit(fn -> File.rm_rf!(dir) end)
    args = ["-C", "c_src", "HTTP=1", "PARTS=kmq_tracker", "BUILD=#{build}", "PRIV=#{dir}"]
    {text, 0} = System.cmd("make", args, stderr_to_stdout: true)
    refute text =~ "warning"
    %{program: Path.join(dir, "kmq_tracker")}
  end

  defp free_port do
    {:ok, socket} = :gen_tcp.listen(0, ip: {127, 0, 0, 1})
    {:ok, port} = :inet.port(socket)
    :gen_tcp.close(socket)
    port
  end

  # Its end is told as `{port, {:exit_status, n}}`.
  defp daemon(context, http) do
    topic = queue(context.cluster, 1)
    options = options(context.cluster, topic)
    {:ok, _} = Kmq.Topics.prepare(Kmq.Config.new!(options, :consumer))
    conf = Path.join(Outside.tmp_dir!("http"), "conf")

    File.write!(conf, """
    group = #{options[:group_id]}
    queue = #{topic}
    kafka.bootstrap.servers = #{context.cluster.hosts}
    metrics_port = #{http}
    metrics_interval_ms = 100
    """)

    arguments = [:binary, :exit_status, :stderr_to_stdout, args: ["--config", conf]]
    port = Port.open({:spawn_executable, context.program}, arguments)
    {:os_pid, pid} = Port.info(port, :os_pid)
    on_exit(fn -> VM.signal(pid, :kill) end)
    %{port: port, pid: pid}
  end

  defp connect(http) do
    {:ok, socket} = :gen_tcp.connect({127, 0, 0, 1}, http, [:binary, active: false], 5_000)
    socket
  end

  defp get(http, what \\ "GET /metrics", timeout_ms \\ 5_000) do
    socket = connect(http)
    :ok = :gen_tcp.send(socket, what <> " HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    all(socket, "", timeout_ms)
  end

  defp all(socket, acc, timeout_ms) do
    case :gen_tcp.recv(socket, 0, scaled(timeout_ms)) do
      {:ok, bytes} -> all(socket, acc <> bytes, timeout_ms)
      {:error, :closed} -> acc
      {:error, reason} -> acc <> inspect(reason)
    end
  end

  defp up(http) do
    eventually(
      fn ->
        assert {:ok, socket} = :gen_tcp.connect({127, 0, 0, 1}, http, [])
        :gen_tcp.close(socket)
        assert get(http) =~ "kmq_tracker_restarts_total 0"
      end,
      20_000
    )
  end

  test "are what Prometheus reads, and nothing else is there", context do
    http = free_port()
    %{port: port, pid: pid} = daemon(context, http)
    up(http)
    text = get(http)
    assert text =~ ~r"^HTTP/1.1 200 "
    assert text =~ "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
    [_head, body] = String.split(text, "\r\n\r\n", parts: 2)

    for line <- String.split(body, "\n", trim: true),
        do: assert(line =~ ~r/^(# (HELP|TYPE) )?kmq_tracker_[a-z_]+(\{.*\})? ?\S+/)

    assert get(http, "GET /") =~ ~r"^HTTP/1.1 404 "
    assert get(http, "POST /metrics") =~ ~r"^HTTP/1.1 405 "
    assert get(http, "no method") =~ ~r"^HTTP/1.1 4\d\d "
    # From elsewhere there is nothing to be seen.
    for {:ok, addresses} <- [:inet.getifaddrs()],
        {_, settings} <- addresses,
        {:addr, {a, _, _, _} = address} when a != 127 <- settings,
        do: assert({:error, _} = :gen_tcp.connect(address, http, [], 1_000))

    VM.signal(pid, :term)
    assert_receive {^port, {:exit_status, 0}}, scaled(2_500)
  end

  test "a port that is taken is said", context do
    {:ok, socket} = :gen_tcp.listen(0, ip: {127, 0, 0, 1})
    {:ok, http} = :inet.port(socket)
    %{port: port} = daemon(context, http)
    assert_receive {^port, {:data, text}}, scaled(5_000)
    assert text =~ "metrics_port: cannot listen on 127.0.0.1:#{http}: Address already in use"
    assert_receive {^port, {:exit_status, 2}}, scaled(5_000)
  end

  test "clients that say nothing, half of it, or do not read hold up neither the next scrape nor the end",
       context do
    http = free_port()
    %{port: port, pid: pid} = daemon(context, http)
    up(http)
    # More than it has places for.
    slow =
      for i <- 1..60 do
        socket = connect(http)

        case rem(i, 3) do
          0 ->
            :ok

          1 ->
            :gen_tcp.send(socket, "GET /metrics HTTP/1.1\r\nhost: x\r\nx-half: ")

          2 ->
            :gen_tcp.send(
              socket,
              String.duplicate("GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", 500)
            )
        end

        socket
      end

    # It waits for a place, not for ever.
    assert get(http, "GET /metrics", 15_000) =~ ~r"^HTTP/1.1 200 "
    more = for _ <- 1..60, do: connect(http)
    VM.signal(pid, :term)
    assert_receive {^port, {:exit_status, 0}}, scaled(2_500)
    for socket <- slow ++ more, do: :gen_tcp.close(socket)
  end
end
