defmodule Kmq.Error do
  @moduledoc """
  What went wrong, as a value.

  Every function of Kmq that can fail for a reason outside of the program returns `{:error, %Kmq.Error{}}`;
  raising is kept for callers' bugs (bad options raise `ArgumentError`, and so does a process of another kind than a function takes). It is
  an exception too, so that it can be raised or given to `Exception.message/1`.

  A process that has ended, before a call or while it waits, is `{:error, %Kmq.Error{reason: :closed}}`; one that does not answer in time is
  `:timeout`. Functions whose answer is the value itself (`Kmq.Consumer.pull/2`, `Kmq.Publisher.queued/1`, `Kmq.Sandbox.bootstrap/1`, those of
  `Kmq.Testing`) raise the error instead.

    * `:reason` - an atom, see `t:reason/0`
    * `:code` - the number librdkafka or the broker gave, or `nil`
    * `:name` - Kafka's own name of the error (`"NOT_LEADER_FOR_PARTITION"`), or `nil`
    * `:retriable?` - whether the same call may succeed later
    * `:fatal?` - whether the client that reported it is beyond use
    * `:message` - a sentence for a person: what is wrong and what to do
  """

  @kafka_names ~w(
    _BAD_MSG _BAD_COMPRESSION _DESTROY _FAIL _TRANSPORT _CRIT_SYS_RESOURCE _RESOLVE _MSG_TIMED_OUT _PARTITION_EOF
    _UNKNOWN_PARTITION _FS _UNKNOWN_TOPIC _ALL_BROKERS_DOWN _INVALID_ARG _TIMED_OUT _QUEUE_FULL _ISR_INSUFF _NODE_UPDATE
    _SSL _WAIT_COORD _UNKNOWN_GROUP _IN_PROGRESS _PREV_IN_PROGRESS _EXISTING_SUBSCRIPTION _ASSIGN_PARTITIONS
    _REVOKE_PARTITIONS _CONFLICT _STATE _UNKNOWN_PROTOCOL _NOT_IMPLEMENTED _AUTHENTICATION _NO_OFFSET _OUTDATED
    _TIMED_OUT_QUEUE _UNSUPPORTED_FEATURE _WAIT_CACHE _INTR _KEY_SERIALIZATION _VALUE_SERIALIZATION
    _KEY_DESERIALIZATION _VALUE_DESERIALIZATION _PARTIAL _READ_ONLY _NOENT _UNDERFLOW _INVALID_TYPE _RETRY _PURGE_QUEUE
    _PURGE_INFLIGHT _FATAL _INCONSISTENT _GAPLESS_GUARANTEE _MAX_POLL_EXCEEDED _UNKNOWN_BROKER _NOT_CONFIGURED _FENCED
    _APPLICATION _ASSIGNMENT_LOST _NOOP _AUTO_OFFSET_RESET
    UNKNOWN OFFSET_OUT_OF_RANGE INVALID_MSG UNKNOWN_TOPIC_OR_PART INVALID_MSG_SIZE LEADER_NOT_AVAILABLE
    NOT_LEADER_FOR_PARTITION REQUEST_TIMED_OUT BROKER_NOT_AVAILABLE REPLICA_NOT_AVAILABLE MSG_SIZE_TOO_LARGE
    STALE_CTRL_EPOCH OFFSET_METADATA_TOO_LARGE NETWORK_EXCEPTION COORDINATOR_LOAD_IN_PROGRESS
    COORDINATOR_NOT_AVAILABLE NOT_COORDINATOR TOPIC_EXCEPTION RECORD_LIST_TOO_LARGE NOT_ENOUGH_REPLICAS
    NOT_ENOUGH_REPLICAS_AFTER_APPEND INVALID_REQUIRED_ACKS ILLEGAL_GENERATION INCONSISTENT_GROUP_PROTOCOL
    INVALID_GROUP_ID UNKNOWN_MEMBER_ID INVALID_SESSION_TIMEOUT REBALANCE_IN_PROGRESS INVALID_COMMIT_OFFSET_SIZE
    TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED CLUSTER_AUTHORIZATION_FAILED INVALID_TIMESTAMP
    UNSUPPORTED_SASL_MECHANISM ILLEGAL_SASL_STATE UNSUPPORTED_VERSION TOPIC_ALREADY_EXISTS INVALID_PARTITIONS
    INVALID_REPLICATION_FACTOR INVALID_REPLICA_ASSIGNMENT INVALID_CONFIG NOT_CONTROLLER INVALID_REQUEST
    UNSUPPORTED_FOR_MESSAGE_FORMAT POLICY_VIOLATION OUT_OF_ORDER_SEQUENCE_NUMBER DUPLICATE_SEQUENCE_NUMBER
    INVALID_PRODUCER_EPOCH INVALID_TXN_STATE INVALID_PRODUCER_ID_MAPPING INVALID_TRANSACTION_TIMEOUT
    CONCURRENT_TRANSACTIONS TRANSACTION_COORDINATOR_FENCED TRANSACTIONAL_ID_AUTHORIZATION_FAILED SECURITY_DISABLED
    OPERATION_NOT_ATTEMPTED KAFKA_STORAGE_ERROR LOG_DIR_NOT_FOUND SASL_AUTHENTICATION_FAILED UNKNOWN_PRODUCER_ID
    REASSIGNMENT_IN_PROGRESS NON_EMPTY_GROUP GROUP_ID_NOT_FOUND FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH
    UNSUPPORTED_COMPRESSION_TYPE STALE_BROKER_EPOCH OFFSET_NOT_AVAILABLE MEMBER_ID_REQUIRED
    PREFERRED_LEADER_NOT_AVAILABLE GROUP_MAX_SIZE_REACHED FENCED_INSTANCE_ID ELIGIBLE_LEADERS_NOT_AVAILABLE
    ELECTION_NOT_NEEDED NO_REASSIGNMENT_IN_PROGRESS GROUP_SUBSCRIBED_TO_TOPIC INVALID_RECORD UNSTABLE_OFFSET_COMMIT
    THROTTLING_QUOTA_EXCEEDED PRODUCER_FENCED RESOURCE_NOT_FOUND UNACCEPTABLE_CREDENTIAL
    FETCH_SESSION_ID_NOT_FOUND INVALID_FETCH_SESSION_EPOCH LISTENER_NOT_FOUND TOPIC_DELETION_DISABLED DUPLICATE_RESOURCE
    DELEGATION_TOKEN_AUTH_DISABLED DELEGATION_TOKEN_NOT_FOUND DELEGATION_TOKEN_OWNER_MISMATCH
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED DELEGATION_TOKEN_AUTHORIZATION_FAILED DELEGATION_TOKEN_EXPIRED
    INVALID_PRINCIPAL_TYPE INCONSISTENT_VOTER_SET INVALID_UPDATE_VERSION FEATURE_UPDATE_FAILED
    PRINCIPAL_DESERIALIZATION_FAILURE
  )
  # Kafka's names become atoms through this table only: what a broker sends never makes a new atom.
  @reasons Map.new(@kafka_names, fn name ->
             {name, name |> String.trim_leading("_") |> String.downcase() |> String.to_atom()}
           end)

  @typedoc """
  Why. Of Kmq itself:

    * `:invalid_option` - an option has a value that cannot work; the message names it
    * `:unreachable` - no broker of `:hosts` answered in time
    * `:topic_missing`, `:marker_topic_missing`, `:dead_letter_topic_missing` - a topic does not exist
    * `:too_few_partitions` - a marker or dead letter topic has fewer partitions than its queue topic
    * `:create_time` - a marker topic does not stamp its records on arrival (`LogAppendTime`)
    * `:compacted` - a topic is compacted that must not be
    * `:closed` - the handle, consumer, publisher, tracker or sandbox is closed, or its node is out of reach
    * `:not_started` - the application `:kmq` is not started
    * `:timeout` - not done in the time given; it may still be done later
    * `:unknown_call` - a process of Kmq was asked what it does not know, by a `GenServer.call/2` of one's own
    * `:queue_full` - the publisher's local queue had no room in the time given
    * `:delay_too_long` - a message would be due later than its topic keeps it
    * `:receipt` - a receipt is not one, or not signed with this secret
    * `:not_assigned` - a partition is not assigned to this consumer just now
    * `:not_yet` - this version does not have it
    * `:tracker` - the tracker program does not run or refused; `:sandbox` - the same of the sandbox
    * `:kafka` - any other error of Kafka: see `:name` and `:code`

  All others are Kafka's names in lower case without a leading underscore: `:transport`, `:msg_timed_out`,
  `:unknown_topic_or_part`, `:topic_authorization_failed`, `:msg_size_too_large`, `:fenced_instance_id` and so on.
  """
  @type reason :: atom

  @type t :: %__MODULE__{
          reason: reason,
          code: integer | nil,
          name: String.t() | nil,
          retriable?: boolean,
          fatal?: boolean,
          message: String.t()
        }

  defexception reason: :kafka, code: nil, name: nil, retriable?: false, fatal?: false, message: ""

  @doc """
  An error of Kmq's own.

      iex> Kmq.Error.new(:closed, "the publisher is closed").reason
      :closed
  """
  @spec new(reason, String.t(), keyword) :: t
  def new(reason, message, fields \\ []) when is_atom(reason) and is_binary(message) do
    struct!(%__MODULE__{reason: reason, message: message}, fields)
  end

  @doc false
  # A program of priv that cannot be started.
  @spec no_program(reason, Path.t(), term) :: t
  def no_program(reason, path, why) do
    text =
      case why do
        :enoent ->
          "is not there. Build kmq again (`mix deps.compile kmq --force`); in a release, see that it takes the `priv` folder of kmq with it"

        :eacces ->
          "may not be executed: has it lost its x bit, is its file system mounted noexec?"

        other ->
          "cannot be started: #{inspect(other)}"
      end

    new(reason, "the program #{path} #{text}")
  end

  @doc false
  # What the NIF, the tracker and the sandbox give back behind `:error`.
  @spec from_native(term, String.t() | nil) :: t
  def from_native(error, context \\ nil)

  def from_native({name, code, retriable, fatal, text}, context) do
    %__MODULE__{
      reason: Map.get(@reasons, name, :kafka),
      name: name,
      code: code,
      retriable?: retriable,
      fatal?: fatal,
      message: prefix(context) <> text <> " (" <> name <> ")"
    }
  end

  def from_native(%__MODULE__{} = error, _context), do: error

  def from_native(:closed, context), do: new(:closed, prefix(context) <> "it is closed")

  def from_native(:timeout, context),
    do: new(:timeout, prefix(context) <> "no answer in time", retriable?: true)

  def from_native(reason, context) when is_atom(reason),
    do: new(reason, prefix(context) <> Atom.to_string(reason))

  def from_native({reason, detail}, context) when is_atom(reason) do
    detail = if is_binary(detail), do: detail, else: inspect(detail)
    new(reason, prefix(context) <> detail)
  end

  def from_native(other, context), do: new(:kafka, prefix(context) <> inspect(other))

  defp prefix(nil), do: ""
  defp prefix(context), do: context <> ": "
end
