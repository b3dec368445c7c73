defmodule Kmq.Test.Relay do
  @moduledoc false
  # Bytes from one address to another, until it is stopped: then all its connections are cut and nobody listens any more.

  @doc "Listens at `{ip, port}` and passes on to `{ip, port}`."
  def start({ip, port}, to) do
    family = if tuple_size(ip) == 8, do: :inet6, else: :inet
    test = self()

    pid =
      spawn(fn ->
        Process.flag(:trap_exit, true)
        options = [:binary, family, ip: ip, active: false, reuseaddr: true, backlog: 64]
        {:ok, listener} = :gen_tcp.listen(port, options)
        send(test, {:listening, self()})
        relay = self()
        spawn_link(fn -> accept(listener, to, relay) end)

        receive do
          :stop -> exit(:shutdown)
        end
      end)

    receive do
      {:listening, ^pid} -> pid
    after
      5_000 -> raise "no relay at #{inspect({ip, port})}"
    end
  end

  def stop(pid) do
    monitor = Process.monitor(pid)
    Process.exit(pid, :kill)

    receive do
      {:DOWN, ^monitor, _, _, _} -> :ok
    end
  end

  defp accept(listener, {ip, port} = to, relay) do
    {:ok, client} = :gen_tcp.accept(listener)

    pid =
      spawn(fn ->
        Process.link(relay)

        receive do
          :go -> :ok
        end

        {:ok, server} = :gen_tcp.connect(ip, port, [:binary, active: true])
        :ok = :inet.setopts(client, active: true)
        pass(client, server)
      end)

    :ok = :gen_tcp.controlling_process(client, pid)
    send(pid, :go)
    accept(listener, to, relay)
  end

  defp pass(client, server) do
    receive do
      {:tcp, ^client, bytes} -> :gen_tcp.send(server, bytes) && pass(client, server)
      {:tcp, ^server, bytes} -> :gen_tcp.send(client, bytes) && pass(client, server)
      {:tcp_closed, _} -> Enum.each([client, server], &:gen_tcp.close/1)
      {:tcp_error, _, _} -> Enum.each([client, server], &:gen_tcp.close/1)
    end
  end
end
