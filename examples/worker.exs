# Works on the orders of sender.exs: each fails at first now and then, those of nobody are rejected. Any number of them may run.
#
#   mix run examples/worker.exs [N]        ends after N orders are done; without N with Ctrl-C
#                                          KAFKA=host:port, default localhost:9092
#
# What it gives back is brought again by tracker.exs. Kill it in mid work (kill -9), start it again: nothing is lost.

defmodule Worker do
  def loop(_consumer, done, limit) when done >= limit, do: done

  def loop(consumer, done, limit) do
    messages = Kmq.Consumer.pull(consumer, max: 10, wait: 1_000)
    loop(consumer, done + Enum.count(messages, &(handle(&1) == :done)), limit)
  end

  defp handle(%{key: "nobody"} = message) do
    :ok = Kmq.reject(message, "no such customer")
    IO.puts("worker: #{message.value} rejected")
    :done
  end

  # Bad luck at the first attempt of every seventh.
  defp handle(%{attempt: 1} = message) when rem(message.offset, 7) == 0 do
    :ok = Kmq.retry(message, delay: 200, reason: "bad luck")
    :again
  end

  defp handle(message) do
    :ok = Kmq.ack(message)
    again = if message.attempt > 1, do: " at attempt #{message.attempt}"
    IO.puts("worker: #{message.value} done#{again}")
    :done
  end
end

limit = if n = List.first(System.argv()), do: String.to_integer(n), else: :infinity

options = [
  hosts: System.get_env("KAFKA", "localhost:9092"),
  topics: ["orders"],
  group_id: "shop",
  create_topics: true,
  # tracker.exs is the tracker.
  tracker: :external
]

consumer =
  case Kmq.Consumer.start_link(options) do
    {:ok, consumer} ->
      consumer

    {:error, error} ->
      IO.puts(:stderr, "worker: " <> Exception.message(error))
      System.halt(1)
  end

done = Worker.loop(consumer, 0, limit)
Kmq.Consumer.stop(consumer)
IO.puts("worker: #{done} orders done")
