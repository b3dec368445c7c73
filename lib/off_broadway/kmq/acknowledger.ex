defmodule OffBroadway.Kmq.Acknowledger do
  @moduledoc false
  # Broadway's acknowledger (its callbacks; no behaviour is named, Broadway may not be there).
  #
  #   ack_ref   the handle's pid: Broadway groups by it, so an ack call holds all it can. It is copied and hashed with every message, and
  #             a pid is one word; what belongs to it, {nif_ref, policy}, stands in the registry while the handle lives
  #   ack_data  {slot, offset, attempt}, or {slot, offset, attempt, on_success, on_failure} once configured (nil = the policy's).
  #             Without markers the original, {topic, partition, record}, stands in the place of the attempt: a dead letter is written from it.
  #             Where an order is kept, it is a Kmq.Lanes.mark() with that in its place: acknowledged, it has left its processor
  #
  # One pass sorts the messages by what becomes of them, then one call into the ledger for each action (and error text).
  # It runs in the processor or batcher that called it, with no hop through the producer.
  #
  # Nothing here may raise: Broadway would take it for a fault of the pipeline. A settlement that fails is reported by
  # telemetry and in the log, and the message comes again.

  require Logger

  alias Kmq.{Handle, Lanes, Reject, Telemetry}
  alias Kmq.Options.Types

  @typedoc "What becomes of messages: on success, on failure, and the backoff of a plain `:retry`."
  @type policy :: {on_success :: term, on_failure :: term, Kmq.Backoff.normal()}
  @typedoc "The same of a delivery without markers, which has no retry."
  @type plain_policy :: {:offsets | :at_most_once, on_success :: term, on_failure :: term, nil}
  @type ack_ref :: pid

  @lookup_ms 5_000

  @doc "Called by the handle, once: what its pid stands for in an ack_ref."
  @spec register(reference, Kmq.Config.t()) :: :ok
  def register(ref, config) do
    {:ok, _} = Registry.register(Kmq.Registry, {__MODULE__, self()}, {ref, policy_of(config)})
    :ok
  end

  defp policy_of(%{delivery: :markers} = config),
    do: {config.on_success || :ack, config.on_failure || :retry, config.backoff}

  defp policy_of(config), do: {config.delivery, config.on_success, config.on_failure, nil}

  @doc "The handle of a message, nil where it has ended, and its policy."
  @spec handle(ack_ref) :: {Handle.t(), policy | plain_policy} | nil
  def handle(pid) when not is_pid(pid), do: nil

  def handle(pid) when node(pid) == node() do
    case Registry.lookup(Kmq.Registry, {__MODULE__, pid}) do
      [{^pid, {ref, policy}}] -> {%Handle{pid: pid, ref: ref}, policy}
      [] -> nil
    end
  end

  def handle(pid) do
    :erpc.call(node(pid), __MODULE__, :handle, [pid], @lookup_ms)
  catch
    _, _ -> nil
  end

  @doc "What stands in the place of a message's attempt: see above."
  @spec carried(tuple, String.t(), non_neg_integer, atom) ::
          pos_integer | Kmq.LetterWriter.original()
  def carried(record, _topic, _partition, :markers), do: elem(record, 5)
  def carried(record, topic, partition, _delivery), do: {topic, partition, record}

  @spec ack(ack_ref, [map], [map]) :: :ok
  def ack(pid, successful, failed) do
    left(successful)
    left(failed)

    case handle(pid) do
      {handle, policy} ->
        ack(handle, policy, successful, failed)

      nil ->
        entries = for message <- successful ++ failed, do: data(message)
        refused = for {slot, offset, _, _, _} <- entries, do: {slot, offset, :closed}
        report({:error, refused}, %Handle{pid: pid, ref: nil}, :settle, entries)
    end
  end

  @spec ack(Handle.t(), policy | plain_policy, [map], [map]) :: :ok
  def ack(handle, policy, successful, failed) do
    {delivery, {on_success, _on_failure, _backoff} = policy} = policy(policy)
    {acked, rest} = succeeded(successful, on_success, [], [])
    # In the order of their offsets: the ledger settles a run as one.
    acked != [] && settle(handle, :ack, Enum.reverse(acked))

    (rest ++ Enum.map(failed, &failed(&1, policy)))
    |> possible(delivery, policy, handle)
    |> Enum.reduce(%{}, &plan(&1, &2, policy))
    |> Enum.each(fn {action, entries} -> settle(handle, action, entries) end)
  end

  # All of one handle's messages have marks, or none.
  defp left([%{acknowledger: {_, _, data}} | _] = messages) when tuple_size(elem(data, 2)) == 4 do
    Enum.each(messages, fn %{acknowledger: {_, _, data}} -> Lanes.left(elem(data, 2)) end)
  end

  defp left(_messages), do: :ok

  defp policy({delivery, on_success, on_failure, backoff}),
    do: {delivery, {on_success, on_failure, backoff}}

  defp policy(policy), do: {:markers, policy}

  @spec configure(ack_ref, tuple, keyword) :: {:ok, tuple}
  def configure(ack_ref, ack_data, options) do
    options = Kmq.Options.validate!(options, :configure_ack)
    configurable!(ack_ref, options)

    {slot, offset, attempt, on_success, on_failure} =
      case ack_data do
        {slot, offset, attempt} -> {slot, offset, attempt, nil, nil}
        configured -> configured
      end

    {:ok,
     {slot, offset, attempt, options[:on_success] || on_success,
      options[:on_failure] || on_failure}}
  end

  defp configurable!(pid, options) do
    with {_handle, {delivery, _, _, _}} <- handle(pid),
         {name, value} <- Enum.find(options, &(supported(&1, delivery) != :ok)),
         {:error, message} <- Types.supported(value, name, delivery),
         do: raise(ArgumentError, message)
  end

  defp supported({name, value}, delivery), do: Types.supported(value, name, delivery)

  # The hot path: plain success of the usual policy is a list of places, everything else a planned message.
  defp succeeded([], _on_success, acked, rest), do: {acked, rest}

  defp succeeded([message | messages], :ack, acked, rest) do
    case message.acknowledger do
      {_, _, {slot, offset, _}} ->
        succeeded(messages, :ack, [{slot, offset} | acked], rest)

      {_, _, {slot, offset, _, on_success, _}} when on_success in [nil, :ack] ->
        succeeded(messages, :ack, [{slot, offset} | acked], rest)

      {_, _, {slot, offset, attempt, on_success, _}} ->
        succeeded(messages, :ack, acked, [{slot, offset, attempt, on_success, nil} | rest])
    end
  end

  defp succeeded([message | messages], on_success, acked, rest) do
    {slot, offset, attempt, own, _} = data(message)
    planned = {slot, offset, attempt, own || on_success, nil}
    succeeded(messages, on_success, acked, [planned | rest])
  end

  defp data(%{acknowledger: {_, _, {slot, offset, attempt}}}),
    do: {slot, offset, attempt, nil, nil}

  defp data(%{acknowledger: {_, _, data}}), do: data

  # What the reason itself asks for goes before what the message was configured for, that before the pipeline's option.
  defp failed(message, {_on_success, on_failure, _backoff}) do
    {slot, offset, attempt, _, own} = data(message)

    case reason(message.status) do
      {:tagged, disposition, reason} -> {slot, offset, attempt, disposition, reason}
      {:plain, reason} -> {slot, offset, attempt, own || on_failure, reason}
    end
  end

  defp reason({:failed, tag}) when tag in [:retry, :release, :reject, :discard],
    do: {:tagged, tag, nil}

  defp reason({:failed, {:retry, delay} = tag}), do: tagged(tag, {:retry, delay}, nil)
  defp reason({:failed, {:retry, delay, reason}}), do: tagged(reason, {:retry, delay}, reason)
  defp reason({:failed, {:snooze, delay} = tag}), do: tagged(tag, {:snooze, delay}, nil)
  defp reason({:failed, {:reject, reason}}), do: {:tagged, :reject, reason}
  defp reason({:failed, {:discard, reason}}), do: {:tagged, :discard, reason}
  defp reason({:failed, %Reject{} = reject}), do: {:tagged, :reject, reject}
  defp reason({:error, %Reject{} = reject, _stacktrace}), do: {:tagged, :reject, reject}
  defp reason({:failed, reason}), do: {:plain, reason}
  defp reason({:error, reason, _stacktrace}), do: {:plain, reason}
  defp reason({kind, reason, _stacktrace}), do: {:plain, {kind, reason}}
  defp reason(other), do: {:plain, other}

  # A delay that is none is a reason like any other: the handler meant a retry, the policy knows when.
  defp tagged(plain, disposition, reason) do
    case Types.disposition(disposition) do
      {:ok, disposition} ->
        {:tagged, disposition, reason}

      {:error, message} ->
        Logger.warning("kmq: a message failed with a delay that is none: " <> message)
        {:plain, plain}
    end
  end

  # What a handler asks for and the delivery does not have is said, and the message gets what the pipeline has for failures.
  defp possible(planned, :markers, _policy, _handle), do: planned

  defp possible(planned, delivery, {_on_success, on_failure, _backoff}, handle) do
    {possible, not_possible} =
      Enum.split_with(planned, fn {_, _, _, disposition, _} ->
        Types.supported(disposition, :on_failure, delivery) == :ok
      end)

    not_possible
    |> Enum.group_by(fn {_, _, _, disposition, _} -> name(disposition) end)
    |> Enum.each(fn {action, list} ->
      say_unsupported(action, list, delivery, on_failure, handle)
    end)

    possible ++ Enum.map(not_possible, &put_elem(&1, 3, on_failure))
  end

  defp name({action, _delay}), do: action
  defp name(action), do: action

  defp say_unsupported(action, list, delivery, on_failure, handle) do
    shown = for {slot, offset, _, _, _} <- Enum.take(list, 10), do: {slot, offset}
    metadata = %{handle: handle.pid, action: action, reason: :unsupported, offsets: shown}
    Telemetry.execute([:kmq, :ack, :error], %{count: length(list)}, metadata)

    Logger.warning(
      "kmq: #{length(list)} messages failed with #{inspect(action)}, which needs delivery: :markers; with #{inspect(delivery)} they get " <>
        "on_failure, #{inspect(on_failure)}. First of them, {slot, offset}: #{inspect(shown)}"
    )
  end

  defp plan({slot, offset, attempt, disposition, reason}, plan, {_, _, backoff}) do
    case disposition do
      :noop ->
        plan

      :manual ->
        add(plan, :manual, {slot, offset})

      :ack ->
        add(plan, :ack, {slot, offset})

      :discard ->
        add(plan, :discard, {slot, offset})

      :release ->
        add(plan, {:released, nil}, {slot, offset, 0})

      {:snooze, delay} ->
        add(plan, {:snoozed, nil}, {slot, offset, delay})

      :reject ->
        add(plan, {:rejected, Kmq.reason_text(reason)}, {slot, offset, unmarked(attempt)})

      :retry ->
        retry(plan, slot, offset, attempt, backoff, backoff, reason)

      {:retry, delay} ->
        retry(plan, slot, offset, attempt, delay, backoff, reason)
    end
  end

  defp unmarked({carried, _, _, _}), do: carried
  defp unmarked(carried), do: carried

  defp retry(plan, slot, offset, attempt, delay, backoff, reason) do
    add(
      plan,
      {:failed, Kmq.reason_text(reason)},
      {slot, offset, wait(delay, backoff, unmarked(attempt), reason)}
    )
  end

  # A user's function may fail; the message must not hang in work for that.
  defp wait(delay, backoff, attempt, reason) do
    Kmq.wait(delay, attempt, reason)
  rescue
    exception ->
      Logger.error("kmq: the backoff function failed: " <> Exception.message(exception))
      Kmq.wait(backoff, attempt, reason)
  end

  defp add(plan, action, entry), do: Map.update(plan, action, [entry], &[entry | &1])

  @actions %{failed: :retry, released: :release, snoozed: :snooze}

  defp settle(handle, action, entries) when action in [:ack, :discard] do
    report(Handle.settle(handle, action, entries), handle, action, entries)
  end

  defp settle(handle, :manual, entries) do
    report(Handle.leave(handle, entries), handle, :manual, entries)
  end

  defp settle(handle, {:rejected, text}, entries) do
    report(Handle.reject(handle, entries, text), handle, :reject, entries)
  end

  defp settle(handle, {cause, text}, entries) do
    action = Map.fetch!(@actions, cause)
    report(Handle.retry(handle, entries, cause, text), handle, action, entries)
  end

  defp report(:ok, handle, action, entries), do: settled(length(entries), handle, action)

  defp report({:error, failed}, handle, action, entries) when is_list(failed) do
    settled(length(entries) - length(failed), handle, action)

    failed
    |> Enum.group_by(&elem(&1, 2), &{elem(&1, 0), elem(&1, 1)})
    |> Enum.each(fn {reason, places} ->
      shown = Enum.take(places, 10)
      count = length(places)
      metadata = %{handle: handle.pid, action: action, reason: reason, offsets: shown}
      event = if reason == :late, do: [:kmq, :late_ack], else: [:kmq, :ack, :error]
      Telemetry.execute(event, %{count: count}, metadata)

      Logger.warning(
        "kmq: #{action} of #{count} messages not taken: #{meaning(reason)}. First of them, {slot, offset}: #{inspect(shown)}"
      )
    end)
  end

  defp report({:error, reason}, handle, action, _entries) do
    Telemetry.execute([:kmq, :ack, :error], %{count: 1}, %{
      handle: handle.pid,
      action: action,
      reason: reason,
      offsets: []
    })

    Logger.warning("kmq: #{action} failed (#{inspect(reason)}): the messages come again")
  end

  defp meaning(:late), do: "they were in work for too long, and come again"
  defp meaning(:unknown), do: "they are not in work (settled before?)"
  defp meaning(:unsupported), do: "this delivery has no such action"
  defp meaning(:closed), do: "the consumer is closed, they come again"

  defp meaning(:timeout),
    do: "their consumer's node does not answer, they are settled or come again"

  defp meaning(reason), do: to_string(reason)

  defp settled(0, _handle, _action), do: :ok

  defp settled(count, handle, action) do
    Telemetry.execute([:kmq, :ack], %{count: count}, %{handle: handle.pid, action: action})
  end
end
