defmodule Kmq.StageHost.Worker do
  @moduledoc false
  # A consumer stage and processor in one: a loop, because a process that runs users' code needs no more.

  alias Kmq.StageHost.Batcher

  @spec start_link([pid], %{atom => pid}, non_neg_integer, keyword) :: pid
  def start_link(stages, batchers, index, options) do
    spawn_link(fn ->
      # Asked for again in portions of max - min, as GenStage's consumers do.
      portion = options[:max_demand] - options[:min_demand]
      work = %{options: options, batchers: batchers, portion: portion, index: index}
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
    send(stage, {:"$gen_producer", {self(), ref}, {:ask, options[:max_demand]}})
    {ref, stage}
  end

  defp loop(subscriptions, work) do
    receive do
      {:"$gen_consumer", {stage, ref}, events} when is_list(events) ->
        work(events, {stage, ref}, work)
        loop(subscriptions, work)

      # The host drains: with the last of them it is over.
      {:"$gen_consumer", {_stage, ref}, {:cancel, _reason}} ->
        Process.demonitor(ref, [:flush])
        subscriptions = Map.delete(subscriptions, ref)
        if subscriptions != %{}, do: loop(subscriptions, work)

      {:DOWN, ref, :process, _stage, _reason} ->
        loop(Map.delete(subscriptions, ref), work)

      {:stage, stage} ->
        {ref, stage} = subscribe(stage, work)
        loop(Map.put(subscriptions, ref, stage), work)
    end
  end

  defp work([], _from, _work), do: :ok

  defp work(events, {stage, ref} = from, %{options: options} = work) do
    {now, later} = Enum.split(events, work.portion)
    handled = Enum.map(now, &handle(&1, options[:handler]))
    {successful, failed} = Enum.split_with(handled, &(&1.status == :ok))
    failed = handle_failed(failed, options[:handle_failed])

    if work.batchers == %{} do
      acknowledge(successful, failed)
    else
      acknowledge([], failed)
      pass_on(successful, work.batchers)
    end

    send(stage, {:"$gen_producer", {self(), ref}, {:ask, length(now)}})
    work(later, from, work)
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
