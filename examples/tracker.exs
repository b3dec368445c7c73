# The tracker of worker.exs, in a VM of its own: brings back what was not done in time, or failed. Ends with Ctrl-C.
#
#   mix run examples/tracker.exs        KAFKA=host:port, default localhost:9092
#
# Without Erlang the same is `kmq_tracker --config examples/tracker.conf`.

options = [
  hosts: System.get_env("KAFKA", "localhost:9092"),
  topics: ["orders"],
  group_id: "shop",
  create_topics: true
]

tracker =
  case Kmq.Tracker.start_link(options) do
    {:ok, tracker} ->
      tracker

    {:error, error} ->
      IO.puts(:stderr, "tracker: " <> Exception.message(error))
      System.halt(1)
  end

report = fn report, before ->
  now =
    case Kmq.Tracker.info(tracker) do
      {:ok, info} -> Map.take(info, [:redelivered, :dead_lettered])
      {:error, _starting} -> before
    end

  if now != before, do: IO.puts("tracker: #{inspect(now)}")
  Process.sleep(1_000)
  report.(report, now)
end

report.(report, %{})
