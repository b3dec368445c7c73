# Sends orders, one of ten for nobody. With worker.exs and tracker.exs: a queue in three operating system processes.
#
#   mix run examples/sender.exs [N]        KAFKA=host:port, default localhost:9092; the topic "orders" must be there:
#   mix run -e ':ok = Kmq.Topics.create_topic("orders", 4, hosts: "localhost:9092")'
#
# Without a Kafka: this prints the address of one, and is it until Ctrl-C; in the other shells, export KAFKA=127.0.0.1:...
#   mix run --no-halt -e '{:ok, s} = Kmq.Sandbox.start_link(topics: ["orders"]); IO.puts("KAFKA=" <> Kmq.Sandbox.bootstrap(s))'

n = String.to_integer(List.first(System.argv()) || "100")
hosts = System.get_env("KAFKA", "localhost:9092")

{:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts)

orders =
  for i <- 1..n do
    customer = if rem(i, 10) == 0, do: "nobody", else: "customer #{rem(i, 7)}"
    {"orders", "order #{i}", key: customer}
  end

case Kmq.Publisher.publish_many(publisher, orders) do
  {:ok, places} ->
    IO.puts("sender: #{length(places)} orders sent")

  {:error, %Kmq.Error{} = error} ->
    IO.puts(:stderr, "sender: " <> Exception.message(error))
    System.halt(1)

  # A result for each of them.
  {:error, results} ->
    errors = for {:error, error} <- results, do: Exception.message(error)
    IO.puts(:stderr, "sender: #{length(errors)} of #{n} orders are not sent: #{hd(errors)}")
    System.halt(1)
end
