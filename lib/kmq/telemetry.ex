defmodule Kmq.Telemetry do
  @moduledoc """
  The events Kmq emits, through `:telemetry` where that library is loaded (Broadway brings it).

  Metadata never holds payloads, keys or headers. `group` is the group id. `handle` is `{pipeline_name, producer_index}` for a
  pipeline and `{:consumer, name}` for a `Kmq.Consumer`; in the events of acks it is the pid of the handle's process.

  Of consumers:

  | event | measurements | metadata | when |
  |---|---|---|---|
  | `[:kmq, :assigned]` | `count` | `handle, group, partitions` | partitions were given to this handle |
  | `[:kmq, :assignments_revoked, :stop]` | `duration`, `monotonic_time` | `handle, group, partitions` | they are gone |
  | `[:kmq, :take]` | `count` | `handle, group` | messages were handed to a producer |
  | `[:kmq, :ack]` | `count` | `handle, action` (`:ack, :retry, :reject, :discard`) | Broadway settled messages |
  | `[:kmq, :ack, :error]` | `count` | `handle, action, reason`, `offsets` (at most 10 of `{slot, offset}`) | settling failed, see `t:Kmq.failure/0`; the action is `:settle` where the consumer had ended before |
  | `[:kmq, :late_ack]` | `count` | `handle, action, reason`, `offsets` | the time limit had passed before: these come again |
  | `[:kmq, :partition]` | `lag`, `buffered`, `started`, `open`, `oldest_open_ms` | `handle, group, topic, partition`, `state` (`:assigned, :paused, :released`) | what it holds of a partition, each `:gauge_interval`; see `Kmq.Info`. Never negative; `lag` is left out where it is not known |
  | `[:kmq, :member]` | `assigned`, `lag`, `buffered`, `started`, `open`, `oldest_open_ms`, `unwritten` | `handle, group` | the sums of it |
  | `[:kmq, :offset_reset]` | `from`, `to` | `handle, group, topic, partition, reason` | reading went on elsewhere: messages were deleted unread, or the topic is a new one (`:out_of_range`); the topic is a new one that has grown past `from` already (`:made_anew`); or it begins without a commit, then there is no `from` (`:no_commit`) |
  | `[:kmq, :recovered]` | `count` | `handle, group, topic`, `what` (`:markers`) | markers that could not be written (`[:kmq, :error]` said so) are written again |
  | `[:kmq, :fenced]` | `count` | `handle, group` | another member has this one's `group_instance_id` |

  Of consumers without markers (`delivery: :offsets` or `:at_most_once`); these write their dead letters themselves, so `[:kmq, :dead_lettered]` is
  theirs, too:

  | event | measurements | metadata | when |
  |---|---|---|---|
  | `[:kmq, :overdue]` | `count`, `age_ms` | `handle, group, topic, partition, offset` | one message has held the commit for `:max_processing_time`; once for each |
  | `[:kmq, :undelayed]` | `count` | `handle, group` | delayed messages were handed out at once; once a minute |

  Of trackers, for each partition of a queue topic:

  | event | measurements | metadata | when |
  |---|---|---|---|
  | `[:kmq, :redelivered]` | `count`, `late_ms` (sum), `late_max_ms` | `group, topic, partition, cause` | copies went back to the queue topic |
  | `[:kmq, :dead_lettered]` | `count`, `late_ms` (sum), `late_max_ms` | `group, topic, partition, cause` | messages went to the dead letter topic |
  | `[:kmq, :gone]` | `count` | `group, topic, partition, offsets` | due messages were no longer in the queue topic |
  | `[:kmq, :malformed]` | `count` | `group, topic, partition, kind` (`:malformed, :foreign`) | records of the marker topic that are not ours |
  | `[:kmq, :open]` | `count`, `oldest_age_ms`, `next_due_ms` (-1: never), `due` | `group, topic, partition` | handed out and not settled; of these due and not copied yet; each second |
  | `[:kmq, :tracker, :lag]` | `lag`, `checkpoint_age_ms` (-1: none is needed) | `group, topic, partition` | markers it has not read yet; the age of the checkpoint its commit refers to; each second |
  | `[:kmq, :tracker, :work]` | `in_flight`, `waiting`, `restarts` | `group` | messages being copied, messages whose copy cannot be written just now, how often the program was started again; each second |
  | `[:kmq, :tracker, :late_acks]` | `count` | `group, topic, partition` | acknowledged by somebody after they had been redelivered: these are handled twice |
  | `[:kmq, :tracker, :checkpoint]` | `open`, `parts`, `bytes` | `group, topic, partition` | what is open was written to the end of the marker topic, so that a restart need not read further back |
  | `[:kmq, :offset_reset]` | `from`, `to`, `open` | `group, topic, partition`, `reason` (`:marker_gap`), `cause` (`:retention, :no_commit, :no_checkpoint, :recreated`) | markers were deleted unread; `open`: of a topic that was made anew, what this tracker knew to be open in the one before |
  | `[:kmq, :tracker, :start]` | `system_time` | `group` | a tracker program was started |
  | `[:kmq, :tracker, :stop]` | `system_time` | `group, reason` | it ended; it is started again unless its last user is gone |

  Of publishers and all:

  | event | measurements | metadata | when |
  |---|---|---|---|
  | `[:kmq, :publish]` | `count`, `duration` | `topic` | a synchronous publish was acknowledged |
  | `[:kmq, :publish, :error]` | `count` | `topic, reason` | messages were not published. With a `timeout:` when it is known, which may be after the call; `:closed`: not reported when the publisher ended, they may be written |
  | `[:kmq, :error]` | `count` | `handle` or `group`, `error` (a `t:Kmq.Error.t/0`) | anything else worth an alarm. Brokers that are out of reach: once for each outage |
  | `[:kmq, :recovered]` | `count` | `handle` or `group`, `what` (`:connection`) | they are there again |
  | `[:kmq, :error, :passing]` | `count` | `handle` or `group`, `error`, `what` (`:connection, :commit`, of trackers `:assignment, :kafka, :group_commits`, too) | no alarm: it is tried again, and mostly passes. What does not for 30 seconds comes as `[:kmq, :error]`; a commit that a group which moves on refuses never does |

  Durations are in native time units, as is usual; what ends in `_ms` is in milliseconds.

      :telemetry.attach("dead letters", [:kmq, :dead_lettered], fn _event, %{count: n}, meta, _ ->
        Logger.error("\#{n} dead letters of \#{meta.topic} (\#{meta.cause})")
      end, nil)
  """

  @key {__MODULE__, :backend}

  @doc false
  @spec execute([atom], map, map) :: :ok
  def execute(event, measurements, metadata) do
    case backend() do
      nil -> :ok
      module -> module.execute(event, measurements, metadata)
    end
  end

  @doc false
  @spec listened?() :: boolean
  def listened?, do: backend() != nil

  @doc """
  Emits `[:kmq, :partition]` and `[:kmq, :member]` of all consumers of this VM now: for a poller of one's own, with
  `gauge_interval: 0`.
  """
  @spec gauges() :: :ok
  def gauges do
    handles =
      Registry.select(Kmq.Registry, [
        {{{:native, :"$1"}, :"$2", :"$3"}, [], [{{:"$1", :"$2", :"$3"}}]}
      ])

    for {key, pid, ref} <- handles, [{^pid, %{group: group}}] <- [receipts(pid)] do
      Kmq.Info.gauges(%Kmq.Handle{pid: pid, ref: ref}, key, group)
    end

    :ok
  end

  defp receipts(pid), do: Registry.lookup(Kmq.Registry, {:receipts, pid})

  @doc false
  # A module with execute/3 in the place of :telemetry (tests), or nil to look again.
  @spec put_backend(module | nil) :: :ok
  def put_backend(nil) do
    :persistent_term.erase(@key)
    :ok
  end

  def put_backend(module) when is_atom(module), do: :persistent_term.put(@key, {:ok, module})

  # Looked for once: an event must cost nothing where nobody can listen.
  defp backend do
    case :persistent_term.get(@key, nil) do
      {:ok, module} ->
        module

      nil ->
        module = if Code.ensure_loaded?(:telemetry), do: :telemetry
        :persistent_term.put(@key, {:ok, module})
        module
    end
  end
end
