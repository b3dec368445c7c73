defmodule Kmq.Test.Nodes do
  @moduledoc false
  # VMs that are nodes of one cluster, each started by `Kmq.Test.VM`. The test's own VM is none: what it hands from one to the other (messages
  # with their handles) keeps its node through `term_to_binary`.
  #
  # No epmd is needed, nor left behind: the nodes find each other by files in the scene's folder (`-epmd_module`), on the loopback.
  alias Kmq.Test.{Scene, VM}

  @cookie :kmq_test

  @doc "A VM of this scene that is a node: `{:ok, vm, node}`, or why distribution cannot be had here."
  @spec start(Scene.t(), String.t()) :: {:ok, VM.t(), node} | {:error, term}
  def start(scene, name) do
    args = ["-epmd_module", Atom.to_string(__MODULE__), "-start_epmd", "false"]
    vm = Scene.vm(scene, args: args)

    case VM.call(vm, __MODULE__, :join, [name, scene.dir]) do
      {:ok, node} -> {:ok, vm, node}
      error -> error
    end
  end

  # ---- there

  @doc false
  def join(name, dir) do
    :persistent_term.put(__MODULE__, dir)
    Application.put_env(:kernel, :inet_dist_use_interface, {127, 0, 0, 1})

    with {:ok, _} <- :net_kernel.start([:"#{name}@localhost", :shortnames]) do
      Node.set_cookie(@cookie)
      {:ok, node()}
    end
  end

  @doc "Lets another node take n messages and keep their consumer."
  @spec hold(node, keyword, pos_integer) :: [Kmq.Message.t()]
  def hold(node, options, n), do: :erpc.call(node, __MODULE__, :hold, [options, n], 60_000)

  @doc false
  def hold(options, n) do
    caller = self()

    holder =
      spawn(fn ->
        {:ok, consumer} = Kmq.Consumer.start_link(options)
        send(caller, {:held, self(), pull(consumer, n, [])})
        serve(consumer)
      end)

    Process.register(holder, __MODULE__)

    receive do
      {:held, ^holder, messages} -> messages
    end
  end

  @doc "A publisher there that lives as long as its node."
  @spec publisher(keyword) :: pid
  def publisher(options) do
    caller = self()

    spawn(fn ->
      {:ok, publisher} = Kmq.Publisher.start_link(options)
      send(caller, {:publisher, publisher})
      Process.sleep(:infinity)
    end)

    receive do
      {:publisher, publisher} -> publisher
    end
  end

  @doc "The next n messages of the consumer of `hold/3`, on its own node."
  @spec more(pos_integer) :: [Kmq.Message.t()]
  def more(n) do
    send(__MODULE__, {:more, self(), n})

    receive do
      {:more, messages} -> messages
    end
  end

  defp serve(consumer) do
    receive do
      {:more, from, n} -> send(from, {:more, pull(consumer, n, [])})
    end

    serve(consumer)
  end

  # It has no limit of its own: the call that waits for it has one.
  defp pull(_consumer, n, acc) when length(acc) >= n, do: acc

  defp pull(consumer, n, acc),
    do: pull(consumer, n, acc ++ Kmq.Consumer.pull(consumer, max: n - length(acc), wait: 10_000))

  # ---- in place of epmd

  @doc false
  def start_link, do: :ignore

  @doc false
  def register_node(name, port, _family \\ :inet) do
    file = place(name)
    File.write!(file <> ".new", Integer.to_string(port))
    File.rename!(file <> ".new", file)
    {:ok, :rand.uniform(3)}
  end

  @doc false
  def listen_port_please(_name, _host), do: {:ok, 0}

  @doc false
  def address_please(name, _host, _family) do
    case File.read(place(name)) do
      {:ok, port} -> {:ok, {127, 0, 0, 1}, String.to_integer(port), 5}
      {:error, _} -> {:error, :nxdomain}
    end
  end

  @doc false
  def port_please(name, host), do: port_please(name, host, :infinity)

  @doc false
  def port_please(name, host, _timeout) do
    case address_please(name, host, :inet) do
      {:ok, _, port, version} -> {:port, port, version}
      _ -> :noport
    end
  end

  @doc false
  def names(_host), do: {:error, :address}

  defp place(name), do: Path.join(:persistent_term.get(__MODULE__), "node-#{name}")
end
