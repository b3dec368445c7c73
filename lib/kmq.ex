defmodule Kmq do
  @moduledoc """
  A message queue on Apache Kafka: every message is acknowledged on its own, in any order, from any process on any node.
  What is not acknowledged in time is delivered again; what keeps failing goes to a dead letter topic.

    * `OffBroadway.Kmq.Producer` - messages for Broadway, the usual way
    * `Kmq.Consumer` - messages on demand, for iex and for those without Broadway
    * `Kmq.Publisher` - messages into a topic
    * `Kmq.Tracker` - redelivery, where it is to run apart from the consumers
    * `Kmq.DeadLetters` - what failed for good: to look at, and to send back
    * `Kmq.Topics` - the marker and dead letter topics
    * `Kmq.Sandbox` - a small Kafka inside this VM, for iex, demos and tests
    * `Kmq.Telemetry` - all events
    * `Kmq.Info` - what `info/1` tells

  The functions here settle what a `Kmq.Consumer` has handed out:

      {:ok, consumer} = Kmq.Consumer.start_link(hosts: [localhost: 9092], topics: ["orders"], group_id: "shop")
      for message <- Kmq.Consumer.pull(consumer, max: 10, wait: 1_000) do
        case work(message.value) do
          :ok -> Kmq.ack(message)
          {:error, :busy} -> Kmq.retry(message, delay: 5_000)
          {:error, reason} -> Kmq.reject(message, reason)
        end
      end

  Each takes a message or a list of them, goes straight into the consumer's ledger without a hop through a process (on
  another node: through the consumer's handle), and says what it could not do.
  """

  alias Kmq.{Backoff, Control, Handle, Info, Message, Options, Publisher, Receipt}
  alias Kmq.Options.Types

  @typedoc """
  Why a message was not settled. None of them is lost.

    * `:late` - its time limit had passed, or its partition belongs to someone else by now: it comes again. An action
      that settles is told so once, then `:unknown`. With `sync:` also: settled, but its partition was lost (a static member was fenced, or this one
      was thrown out of its group) before the group's commit covered it
    * `:unknown` - it is not in work: it was settled before, or never handed out
    * `:closed` - the consumer is closed: it comes again after its lease
    * `:enomem` - no memory for it: it is as before
    * `:full` - of `extend/3` only: 65,536 messages of its partition have a time limit of their own already
    * `:unsupported` - the consumer's `:delivery` has no such action (see [Deliveries](delivery.md)): the message is as before
    * `:timeout` - with `sync:`: settled, but Kafka has not confirmed it in time; it is tried further. From another node also:
      the consumer's node has not answered within 10 s; it is settled or it comes again
  """
  @type failure :: :late | :unknown | :closed | :enomem | :full | :unsupported | :timeout

  @typedoc "For one message the reason, for a list the messages concerned; all others of the list are settled."
  @type result :: :ok | {:error, failure} | {:error, [{Message.t(), failure}, ...]}

  @typedoc """
  Every function that settles takes `sync: true` (or a time-out in ms; `true` means 30,000): it returns when Kafka has
  confirmed what it settled, the marker and, where that was not there before, the group's commit that covers the message:
  a crash from then on does not bring it back. Without it that happens within a few ms (`:ack_flush_interval`), and the commit within
  `:commit_interval`; a crash before makes the message come again, as a new delivery or, after the marker and before the commit, at no attempt.
  """
  @type sync :: {:sync, boolean | pos_integer}

  @sync [sync: [type: {:custom, Types, :sync, []}]]
  @retry [delay: [type: {:custom, Types, :retry_delay, []}], reason: [type: :any]] ++ @sync

  @doc "It is done. It will not be delivered again."
  @spec ack(Message.t() | [Message.t()], [sync]) :: result
  def ack(messages, options \\ []) do
    settle_all(messages, sync(options), &Handle.settle(&1, :ack, coordinates(&2)))
  end

  @doc """
  It failed; deliver it again later, or dead-letter it when it has used up its attempts.

    * `:delay` - ms, or a backoff as the option `:backoff` takes it, or a function of the attempt and the reason; default is the
      consumer's `:backoff`
    * `:reason` - any term; a short text of it is kept with the message
    * `:sync` - see `t:sync/0`

  A bad `:delay`, or one of more than 30 days, raises `ArgumentError`.
  """
  @spec retry(Message.t() | [Message.t()], keyword) :: result
  def retry(messages, options \\ []) do
    options = Options.validate!(options, @retry)
    {delay, reason} = {options[:delay], options[:reason]}

    settle_all(messages, options[:sync], fn handle, of_handle ->
      entries =
        for message <- of_handle do
          wait = wait(delay || message.backoff, message.attempt, reason)
          {message.slot, message.offset, wait}
        end

      Handle.retry(handle, entries, :failed, reason_text(reason))
    end)
  end

  @doc """
  Give it back untouched: another consumer, or this one, gets it soon. That is no attempt; its `deliveries` count.
  """
  @spec release(Message.t() | [Message.t()], [sync]) :: result
  def release(messages, options \\ []) do
    settle_all(messages, sync(options), &Handle.retry(&1, timed(&2, 0), :released))
  end

  @doc "It is not ready yet: deliver it again in `delay_ms`. That is no attempt; its `deliveries` count."
  @spec snooze(Message.t() | [Message.t()], non_neg_integer, [sync]) :: result
  def snooze(messages, delay_ms, options \\ []) do
    delay_ms = ms!(delay_ms, "snooze")
    settle_all(messages, sync(options), &Handle.retry(&1, timed(&2, delay_ms), :snoozed))
  end

  @doc """
  Its handler needs more time: it may be in work for `ms` from now on, in place of what is left of `:max_processing_time`.
  It stays in work, and can be extended again.
  """
  @spec extend(Message.t() | [Message.t()], non_neg_integer, [sync]) :: result
  def extend(messages, ms, options \\ []) do
    ms = ms!(ms, "extend")
    settle_all(messages, sync(options), &Handle.extend(&1, timed(&2, ms)))
  end

  @doc "To the dead letter topic now, with `reason` in its `kmq-error` header."
  @spec reject(Message.t() | [Message.t()], term, [sync]) :: result
  def reject(messages, reason \\ nil, options \\ [])

  def reject(_messages, [{:sync, _}] = options, []) do
    raise ArgumentError,
          "Kmq.reject takes the reason before the options: Kmq.reject(message, nil, #{inspect(options)})"
  end

  def reject(messages, reason, options) do
    text = reason_text(reason)
    settle_all(messages, sync(options), &Handle.reject(&1, originals(&2), text))
  end

  @doc "Drop it: no other attempt and no dead letter."
  @spec discard(Message.t() | [Message.t()], [sync]) :: result
  def discard(messages, options \\ []) do
    settle_all(messages, sync(options), &Handle.settle(&1, :discard, coordinates(&2)))
  end

  @doc """
  Leave it to whoever has its receipt: this consumer forgets it, and may end. What is not settled by then comes again after
  `:max_processing_time`, as a failed attempt. Take the receipt first.
  """
  @spec leave(Message.t() | [Message.t()], [sync]) :: result
  def leave(messages, options \\ []) do
    settle_all(messages, sync(options), &Handle.leave(&1, coordinates(&2)))
  end

  @doc """
  A receipt: a short text, fit for URLs, by which any process of any VM can settle this message with `settle/3`.

  Takes a `Kmq.Message` or, of a pipeline, a `Broadway.Message`. Where the consumer has a `:receipt_secret` it is signed. A
  closed consumer, and one without markers, gives none: `ArgumentError`.
  """
  @spec receipt(Message.t() | map) :: String.t()
  def receipt(message) do
    {handle, place} = Receipt.place(message)

    case Handle.receipt_info(handle) do
      nil ->
        raise ArgumentError, "the consumer of this message is closed"

      %{delivery: delivery} when delivery != :markers ->
        raise ArgumentError,
              "a receipt needs delivery: :markers, this consumer has #{inspect(delivery)}"

      info ->
        Receipt.encode(info, place)
    end
  end

  @typedoc "What a receipt can say about its message; as the functions of the same names."
  @type verdict ::
          :ack
          | :discard
          | :release
          | :retry
          | :reject
          | {:snooze, non_neg_integer}
          | {:retry, non_neg_integer | Backoff.t()}
          | {:reject, reason :: term}

  @doc """
  Settles the message of a receipt, through a `Kmq.Publisher` of the same cluster; no consumer is needed. `:ok` means that
  Kafka has it.

  The message may have come again meanwhile (its time was over, its consumer died): then this settles nothing, and nobody can
  tell. `:retry` without a delay waits as the consumer's `:backoff` says.

  `{:error, %Kmq.Error{reason: :receipt}}`: it is none, or not signed with the publisher's `:receipt_secret`.
  """
  @spec settle(GenServer.server(), String.t(), verdict) :: :ok | {:error, Kmq.Error.t()}
  def settle(publisher, receipt, verdict) do
    with {:ok, secret} <- Publisher.receipt_secret(publisher),
         {:ok, receipt} <- Receipt.decode(receipt, secret) do
      {topic, value, options} = Receipt.marker(receipt, verdict)

      with {:ok, _place} <- Publisher.publish(publisher, topic, value, options), do: :ok
    end
  end

  @doc """
  What a consumer, a pipeline (by its name), a publisher or a tracker of this node holds just now: a `t:Kmq.Info.t/0`, which iex
  shows as a table. It asks no broker. Anything else raises `ArgumentError`.

      iex> Kmq.info(Shop.Orders)
      #Kmq.Info<pipeline Shop.Orders of "shop"
        TOPIC   PARTITION  STATE     END   COMMITTED  LAG  BUFFERED  STARTED  OPEN  OLDEST
        orders  0          assigned  1200  1180       20   20        20       50    0.3 s
        orders  1          assigned  987   987        0    0         0        3     0.1 s
        sum                                           20   20        20       53
      >
  """
  @spec info(GenServer.server()) :: Info.t()
  def info(server), do: Info.get(server)

  @typedoc "A place in a partition: an offset, its first or last one, or the first message at or after a time."
  @type place :: non_neg_integer | :beginning | :end | {:timestamp, ms :: integer} | DateTime.t()

  @doc """
  Partitions of a consumer, or of a pipeline (by its name), are read no more until `resume/2`: `{topic, partition}`, a list, or `:all` that are
  assigned now.

  Membership goes on, what is in work can be settled, other partitions go on. The pause holds for this consumer also after a
  rebalance, and ends with it; another consumer that is given the partition reads it.

  `{:error, %Kmq.Error{reason: :not_assigned}}`: one of them is not here just now; then none was paused. `:closed`, as of `resume/2` and `seek/3`:
  nothing runs there just now.
  """
  @spec pause(GenServer.server(), {String.t(), non_neg_integer} | [tuple] | :all) ::
          :ok | {:error, Kmq.Error.t()}
  def pause(server, partitions), do: Control.pause(server, partitions, true)

  @doc "Reads paused partitions on. One that is not paused reads on, too."
  @spec resume(GenServer.server(), {String.t(), non_neg_integer} | [tuple] | :all) ::
          :ok | {:error, Kmq.Error.t()}
  def resume(server, partitions), do: Control.pause(server, partitions, false)

  @doc """
  Goes on at another place of a partition, `{topic, partition}`, of a consumer or a pipeline (by its name).

    * back: all from there on is handed out again, also what is done. It is a new delivery at the attempt its record says
    * forward: what lies between is skipped. It is not handed out and not redelivered
    * what is in work stays so, and can be settled; if the seek goes back before it, it is handed out once more all the same

  The group's commit goes there with the next commit, in both directions. `{:error, error}` with the reason `:not_assigned`; `:offset_out_of_range`, with
  what there is; or why the place could not be looked up. A sandbox knows no times (`:unsupported_feature`).
  """
  @spec seek(GenServer.server(), {String.t(), non_neg_integer}, place) ::
          :ok | {:error, Kmq.Error.t()}
  def seek(server, partition, to), do: Control.seek(server, partition, to)

  defp coordinates(messages), do: for(message <- messages, do: {message.slot, message.offset})

  defp timed(messages, ms), do: for(message <- messages, do: {message.slot, message.offset, ms})

  defp originals(messages),
    do: for(message <- messages, do: {message.slot, message.offset, message.original})

  defp ms!(ms, call) do
    most = Types.max_delay_ms()

    if is_integer(ms) and ms in 0..most,
      do: ms,
      else:
        raise(ArgumentError, "#{call} takes ms, from 0 to #{most} (30 days), got: #{inspect(ms)}")
  end

  # nil, or how long to wait for Kafka.
  defp sync([]), do: nil
  defp sync(options), do: Options.validate!(options, @sync)[:sync]

  defp settle_all(%Message{handle: %Handle{} = handle} = message, sync, fun) do
    case settle_of(handle, [message], sync, fun) do
      :ok -> :ok
      {:error, [{_message, reason} | _]} -> {:error, reason}
    end
  end

  defp settle_all([], _sync, _fun), do: :ok

  # length/1: a list that does not end with [] is none.
  defp settle_all([%Message{handle: %Handle{} = handle} | _] = messages, sync, fun)
       when length(messages) > 0 do
    if Enum.all?(messages, &match?(%Message{handle: ^handle}, &1)) do
      settle_of(handle, messages, sync, fun)
    else
      # Before the first of them is settled.
      Enum.each(messages, &(match?(%Message{handle: %Handle{}}, &1) || no_message(&1)))

      messages
      |> Enum.group_by(& &1.handle)
      |> Enum.flat_map(fn {handle, of_handle} ->
        case settle_of(handle, of_handle, sync, fun) do
          :ok -> []
          {:error, failed} -> failed
        end
      end)
      |> case do
        [] -> :ok
        failed -> {:error, failed}
      end
    end
  end

  defp settle_all([other | _] = list, _sync, _fun) when length(list) > 0, do: no_message(other)
  defp settle_all(other, _sync, _fun), do: no_message(other)

  defp no_message(%Message{} = message) do
    raise ArgumentError,
          "expected a message that a Kmq.Consumer has handed out, got one that was made by hand: #{inspect(message, limit: 5)}"
  end

  defp no_message(other) do
    in_broadway =
      if is_map(other) and is_map_key(other, :acknowledger),
        do:
          ". A pipeline's messages are settled by Broadway: return them, or say what becomes of them by Broadway.Message.failed/2"

    raise ArgumentError,
          "expected a Kmq.Message or a list of them, got: #{inspect(other, limit: 5)}#{in_broadway}"
  end

  defp settle_of(handle, messages, nil, fun) do
    with {:error, failed} <- fun.(handle, messages), do: {:error, failed(failed, messages)}
  end

  defp settle_of(handle, messages, sync, fun) do
    failed =
      case settle_of(handle, messages, nil, fun) do
        :ok -> []
        {:error, failed} -> failed
      end

    refused = Enum.map(failed, &elem(&1, 0))
    settled = messages -- refused

    with [_ | _] <- settled, {:error, _} <- confirmed(handle, settled, sync) do
      {:error, failed ++ Enum.map(settled, &{&1, :timeout})}
    else
      {:ok, late} when late != [] -> {:error, failed ++ Enum.map(late, &{&1, :late})}
      _confirmed -> if failed == [], do: :ok, else: {:error, failed}
    end
  end

  # Those that the group hands out again all the same: their partition was lost before a commit covered them.
  defp confirmed(handle, messages, timeout) do
    with {:ok, uncovered} <- Handle.confirm(handle, timeout) do
      late? = &(is_map_key(uncovered, &1.slot) and &1.offset >= uncovered[&1.slot])
      {:ok, Enum.filter(messages, late?)}
    end
  end

  defp failed(failed, messages) do
    by_place = Map.new(messages, &{{&1.slot, &1.offset}, &1})
    for {slot, offset, reason} <- failed, do: {Map.fetch!(by_place, {slot, offset}), reason}
  end

  @doc false
  # ms before the attempt after this one.
  @spec wait(
          non_neg_integer | Backoff.normal() | (pos_integer, term -> non_neg_integer),
          pos_integer,
          term
        ) ::
          non_neg_integer
  def wait(function, attempt, reason) when is_function(function, 2) do
    case function.(attempt, reason) do
      ms when is_integer(ms) -> ms!(ms, "a retry")
      other -> raise ArgumentError, "a backoff function gave #{inspect(other)}, expected ms"
    end
  end

  def wait(delay, attempt, _reason), do: Backoff.delay(delay, attempt)

  # Markers keep at most 512 bytes of it.
  @text_bytes 512

  @doc false
  # A short text of any reason: what is kept with a message, in UTF-8; nil where there is none.
  @spec reason_text(term) :: String.t() | nil
  def reason_text(nil), do: nil
  def reason_text(reason), do: reason |> text() |> cut(@text_bytes)

  defp text(exception) when is_exception(exception), do: Exception.message(exception)

  defp text(text) when is_binary(text) do
    if String.valid?(text), do: text, else: inspect(text, limit: 50)
  end

  defp text(reason) when is_atom(reason), do: Atom.to_string(reason)
  defp text(reason), do: inspect(reason, limit: 20, printable_limit: 200)

  defp cut(text, max) when byte_size(text) <= max, do: text

  defp cut(text, max) do
    head = binary_part(text, 0, max)

    case String.chunk(head, :valid) do
      [valid] -> valid
      chunks -> chunks |> Enum.filter(&String.valid?/1) |> Enum.join()
    end
  end
end
