# A Broadway pipeline on a queue: retries, a dead letter, and how many it handled. In a project that has :kmq and :broadway:
#
#   mix run examples/pipeline.exs        KAFKA=host:port; without it on a Kafka of its own inside this VM

defmodule Shop.Pipeline do
  use Broadway

  def start_link(options) do
    Broadway.start_link(__MODULE__,
      name: __MODULE__,
      context: options[:owner],
      producer: [module: {OffBroadway.Kmq.Producer, options[:kmq]}],
      processors: [default: [concurrency: 10]],
      batchers: [shipping: [concurrency: 2, batch_size: 20, batch_timeout: 50]]
    )
  end

  @impl true
  def handle_message(_processor, message, _context) do
    case {message.data, message.metadata.attempt} do
      {"order 7", _} -> Broadway.Message.failed(message, {:reject, "no such customer"})
      {"order " <> _, 1} -> maybe(message)
      _ -> Broadway.Message.put_batcher(message, :shipping)
    end
  end

  # Every fifth fails at its first attempt.
  defp maybe(message) do
    if rem(message.metadata.offset, 5) == 0,
      do: Broadway.Message.failed(message, {:retry, 100}),
      else: Broadway.Message.put_batcher(message, :shipping)
  end

  @impl true
  def handle_batch(:shipping, messages, _info, owner) do
    send(owner, {:shipped, length(messages)})
    messages
  end
end

defmodule Count do
  def until(n, limit) when n >= limit, do: n

  def until(n, limit) do
    receive do
      {:shipped, more} -> until(n + more, limit)
    after
      60_000 -> raise "only #{n} orders in a minute"
    end
  end
end

{:ok, _} = Application.ensure_all_started(:broadway)

hosts =
  System.get_env("KAFKA") ||
    with {:ok, sandbox} <- Kmq.Sandbox.start_link(topics: %{"orders" => 4}),
         do: Kmq.Sandbox.bootstrap(sandbox)

kmq = [hosts: hosts, topics: ["orders"], group_id: "shop", create_topics: true]
{:ok, _pid} = Shop.Pipeline.start_link(kmq: kmq, owner: self())

{:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts)
{:ok, _} = Kmq.Publisher.publish_many(publisher, for(i <- 1..100, do: {"orders", "order #{i}"}))

shipped = Count.until(0, 99)

# The dead letter is there when the tracker has moved it, a moment later.
[letter] =
  Stream.repeatedly(fn -> "orders" |> Kmq.DeadLetters.stream(hosts: hosts) |> Enum.to_list() end)
  |> Enum.find(&(&1 != []))

IO.puts("#{shipped} orders shipped; dead letter: #{letter.value}, #{letter.error}")
:ok = Broadway.stop(Shop.Pipeline)
