defmodule Kmq.Telemetry do
  @moduledoc """
  The events Kmq emits, through `:telemetry` where that library is loaded (Broadway brings it).

  Metadata never holds payloads, keys or headers. `handle` is `{pipeline_name, producer_index}` for a pipeline, and
  `{:consumer, name}` for a `Kmq.Consumer`. `group` is the group id.

  | event | measurements | metadata | when |
  |---|---|---|---|
  | `[:kmq, :assignments_revoked, :start]` | `system_time`, `monotonic_time` | `handle, group, partitions` | partitions are being taken away |
  | `[:kmq, :assignments_revoked, :stop]` | `duration`, `monotonic_time` | `handle, group, partitions` | they are gone |
  | `[:kmq, :assignments_revoked, :exception]` | `duration`, `monotonic_time` | and `kind, reason, stacktrace` | it failed |
  | `[:kmq, :assigned]` | `count` | `handle, group, partitions` | partitions were given to this handle |
  | `[:kmq, :take]` | `count` | `handle, group` | messages were handed to a producer |
  | `[:kmq, :start]` | `count`, `latency_ms` | `handle, topic, partition` | STARTs became durable |
  | `[:kmq, :commit]` | `offset` | `handle, topic, partition` | a commit was acknowledged |
  | `[:kmq, :ack]` | `count` | `handle, action` (`:ack, :retry, :reject, :discard`) | messages were settled |
  | `[:kmq, :ack, :error]` | `count` | `handle, action, reason`, `offsets` (at most 10 of `{slot, offset}`) | settling failed: these come again |
  | `[:kmq, :late_ack]` | `count` | `handle, action`, `offsets` | the time limit had passed before: these come again |
  | `[:kmq, :redelivered]` | `count`, `late_ms` | `group, topic, partition, cause` | copies went back to the queue topic |
  | `[:kmq, :dead_lettered]` | `count` | `group, topic, partition, cause` | messages went to the dead letter topic |
  | `[:kmq, :gone]` | `count` | `group, topic, partition, offsets` | due messages were no longer in the queue topic |
  | `[:kmq, :released]` | `count` | `handle, topic, partition` | messages were given back untouched |
  | `[:kmq, :malformed]` | `count` | `group, topic, partition, kind` (`:foreign, :malformed, :newer`) | records of the marker topic that are not ours |
  | `[:kmq, :lag]` | `lag` | `handle, topic, partition` | messages behind the end of the queue topic, never negative |
  | `[:kmq, :open]` | `count`, `oldest_age_ms` | `group, topic, partition` | handed out and not settled, as the tracker sees it |
  | `[:kmq, :tracker, :start]` | `system_time` | `group` | a tracker program was started |
  | `[:kmq, :tracker, :stop]` | `system_time` | `group, reason` | it ended; it is started again unless its last user is gone |
  | `[:kmq, :tracker, :lag]` | `lag` | `group, topic, partition` | markers it has not read yet |
  | `[:kmq, :offset_reset]` | `from`, `to` | `handle, topic, partition, reason` | reading began elsewhere than at the commit |
  | `[:kmq, :fenced]` | `count` | `handle, group` | the group has moved on without this handle |
  | `[:kmq, :publish]` | `count`, `duration` | `topic` | a synchronous publish was acknowledged |
  | `[:kmq, :publish, :error]` | `count` | `topic, reason` | messages were not published |
  | `[:kmq, :error]` | `count` | `handle` or `group`, `error` (a `t:Kmq.Error.t/0`) | anything else worth an alarm |

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
