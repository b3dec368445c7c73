defmodule Kmq.StageHost.Worker do
  @moduledoc false
  # A consumer stage and processor in one: a loop, because a process that runs users' code needs no more.

  alias Kmq.StageHost.Batcher

  @spec start_link([pid], %{atom => pid}, non_neg_integer, keyword) :: pid
  def start_link(stages, batchers, index, options) do
    spawn_link(fn ->
      {:via, _, {registry, name}} =
        Kmq.StageHost.process_name(options[:name], "Processor_default_#{index}")

      # Of a name that is the user's there may be two hosts: nobody looks for the workers of the second.
      _ = Registry.register(registry, name, nil)
      work = %{options: options, batchers: batchers, index: index}
      stages |> Map.new(&subscribe(&1, work)) |> loop(work)
    end)
  end

  defp subscribe(stage, %{options: options, index: index}) do
    ref = Process.monitor(stage)

    subscription = [
      max_demand: options[:max_demand],
      min_demand: options[:min_demand],
      partition: index
    ]

    send(stage, {:"$gen_producer", {self(), ref}, {:subscribe, nil, subscription}})
    ask({stage, ref}, options[:max_demand])
    {ref, {stage, options[:max_demand]}}
  end

  defp ask(_from, 0), do: :ok
  defp ask({stage, ref}, n), do: send(stage, {:"$gen_producer", {self(), ref}, {:ask, n}})

  defp loop(subscriptions, work) do
    receive do
      {:"$gen_consumer", {stage, ref}, events} when is_list(events) ->
        {^stage, pending} = subscriptions[ref]
        pending = work(events, {stage, ref}, pending, work)
        loop(Map.put(subscriptions, ref, {stage, pending}), work)

      # As each process of OTP answers it, when it is through with what came before.
      {:system, from, {:debug, {:statistics, :get}}} ->
        GenServer.reply(from, {:ok, :no_statistics})
        loop(subscriptions, work)

      # The host drains: with the last of them it is over.
      {:"$gen_consumer", {_stage, ref}, {:cancel, _reason}} ->
        Process.demonitor(ref, [:flush])
        subscriptions = Map.delete(subscriptions, ref)
        if subscriptions != %{}, do: loop(subscriptions, work)

      {:DOWN, ref, :process, _stage, _reason} ->
        loop(Map.delete(subscriptions, ref), work)

      {:stage, stage} ->
        {ref, subscription} = subscribe(stage, work)
        loop(Map.put(subscriptions, ref, subscription), work)
    end
  end

  # As GenStage's consumers: in portions of max - min at most, and when min or less of what was asked for is still to come
  # it is asked for again, up to max, behind the portion. The rest of what is pending is returned.
  defp work([], _from, pending, _work), do: pending

  defp work(events, from, pending, %{options: options} = work) do
    {now, later} = Enum.split(events, options[:max_demand] - options[:min_demand])
    handled = Enum.map(now, &handle(&1, options[:handler]))
    {successful, failed} = Enum.split_with(handled, &(&1.status == :ok))
    failed = handle_failed(failed, options[:handle_failed])

    if work.batchers == %{} do
      acknowledge(successful, failed)
    else
      acknowledge([], failed)
      pass_on(successful, work.batchers)
    end

    pending = pending - length(now)
    more = if pending <= options[:min_demand], do: options[:max_demand] - pending, else: 0
    ask(from, more)
    work(later, from, pending + more, work)
  end

  defp pass_on(messages, batchers) do
    messages
    |> Enum.group_by(& &1.batcher)
    |> Enum.each(fn {batcher, messages} ->
      Batcher.pass(Map.fetch!(batchers, batcher), messages)
    end)
  end

  # As Broadway's processor: what a handler raises, throws or exits with fails its message.
  defp handle(message, handler) do
    handler.(message)
  catch
    kind, reason -> failed(message, kind, reason, __STACKTRACE__)
  end

  @doc "A message that failed so, as Broadway has it."
  @spec failed(map, atom, term, list) :: map
  def failed(message, kind, reason, stacktrace),
    do: %{message | status: {kind, normal(kind, reason, stacktrace), stacktrace}}

  defp normal(:error, reason, stacktrace), do: Exception.normalize(:error, reason, stacktrace)
  defp normal(_kind, reason, _stacktrace), do: reason

  @doc "What the user's handle_failed makes of them; of one that raises, nothing."
  @spec handle_failed([map], nil | ([map] -> [map])) :: [map]
  def handle_failed([], _fun), do: []
  def handle_failed(failed, nil), do: failed

  def handle_failed(failed, fun) do
    fun.(failed)
  catch
    _kind, _reason -> failed
  end

  @doc "Broadway's call of the acknowledgers: one for each ack_ref. One that raises leaves the worker alive."
  @spec acknowledge([map], [map]) :: :ok
  def acknowledge(successful, failed) do
    by_ref = fn messages ->
      Enum.group_by(messages, fn %{acknowledger: {module, ack_ref, _}} -> {module, ack_ref} end)
    end

    {successful, failed} = {by_ref.(successful), by_ref.(failed)}

    for {module, ack_ref} = key <- Enum.uniq(Map.keys(successful) ++ Map.keys(failed)) do
      try do
        module.ack(ack_ref, Map.get(successful, key, []), Map.get(failed, key, []))
      catch
        kind, reason ->
          require Logger
          Logger.error(Exception.format(kind, reason, __STACKTRACE__))
      end
    end

    :ok
  end
end
