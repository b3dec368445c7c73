defmodule Kmq.Topics do
  @moduledoc """
  The topics a queue needs: beside the queue topic its marker topic (`<topic>__<group>__markers`, one for each group) and its
  dead letter topic (`<topic>__undelivered`).

  A pipeline checks them when it starts, and makes what is missing with `create_topics: true`. The functions here do the
  same beforehand, for deployments where the application may not create topics:

      Kmq.Topics.create(hosts: [localhost: 9092], topics: ["orders"], group_id: "shop")

  | topic | partitions | settings it is made with |
  |---|---|---|
  | marker topic | as the queue topic | `cleanup.policy=delete`, `message.timestamp.type=LogAppendTime`, `min.insync.replicas` and replication as the queue topic, `retention.ms` 1 day or 4 times `:max_processing_time` |
  | dead letter topic | as the queue topic | replication as the queue topic, `max.message.bytes` 64 KiB above it, `retention.ms` as it |

  With `delivery: :offsets` or `:at_most_once` there is no marker topic, and a dead letter topic must be there only where it is needed for
  certain (see `:create_topics`); a queue topic may be compacted then.

  Checked are: that all exist; partitions (at least as many as the queue topic's); that the marker topic stamps its records on
  arrival; that neither it nor (without `:redeliver_to`) the queue topic is compacted. Retention and replication of an existing
  marker topic are warned about, and a queue topic that may delete a message before its next attempt. What the cluster's access control hides is skipped, with a line in the log. No topic is ever
  made by asking for it.
  """

  require Logger

  alias Kmq.{Backoff, Config, Error, Options, Reach, Sandbox, Security}
  alias Kmq.Options.Types

  @where [:hosts, :client_config, :kafka_config]
  # Kafka's own bounds: an int32, an int16.
  @partitions {:custom, Types, :integer_in, [1, 0x7FFF_FFFF]}
  @create Keyword.take(Options.schema(:publisher), @where) ++
            [
              replication: [type: {:custom, Types, :integer_in, [1, 0x7FFF]}],
              config: [type: {:custom, Types, :topic_config, []}, default: []]
            ]

  @timeout_ms 15_000
  @day_ms 86_400_000
  # Headers added to a dead letter: count, deliveries, cause, group, origin, error text.
  @headroom_bytes 65_536

  @typedoc "Partitions of each queue topic."
  @type partitions :: %{String.t() => pos_integer}

  @doc "The default name of the marker topic of a queue topic and a group."
  @spec marker_topic(String.t(), String.t()) :: String.t()
  def marker_topic(topic, group_id),
    do: Config.default_marker_topic(text!(topic, "topic"), text!(group_id, "group"))

  @doc "The default name of the dead letter topic of a queue topic."
  @spec dead_letter_topic(String.t()) :: String.t()
  def dead_letter_topic(topic), do: Config.default_dead_letter_topic(text!(topic, "topic"))

  defp text!(text, _what) when is_binary(text), do: text

  defp text!(other, what),
    do: raise(ArgumentError, "expected the #{what}'s name, a string, got: #{inspect(other)}")

  @doc "Makes the marker and dead letter topics of a pipeline with these options that are missing, and checks all."
  @spec create(keyword) :: {:ok, partitions} | {:error, Error.t()}
  def create(options) do
    with {:ok, config} <- Config.new(options), do: prepare(%{config | create_topics: true})
  end

  @doc "Checks the topics of a pipeline with these options; makes nothing."
  @spec check(keyword) :: {:ok, partitions} | {:error, Error.t()}
  def check(options) do
    with {:ok, config} <- Config.new(options), do: prepare(%{config | create_topics: false})
  end

  @doc """
  Makes an ordinary topic, a queue topic for example. Of the options `:hosts`, `:client_config`, `:kafka_config` say where;
  `:replication` (default the broker's) and `:config` (`[{"retention.ms", "60000"}]`) how.
  """
  @spec create_topic(String.t(), pos_integer, keyword) :: :ok | {:error, Error.t()}
  def create_topic(topic, partitions, options) do
    with :ok <- argument(:topic, topic, {:custom, Types, :topic, []}),
         :ok <- argument(:partitions, partitions, @partitions),
         {:ok, valid} <- valid(options, @create),
         connection = Keyword.take(options, @where),
         {:ok, %{admin_props: props, bootstrap: bootstrap}} <- Config.connection(connection) do
      replication = valid[:replication] || -1
      config = valid[:config]

      case sandbox(bootstrap) do
        {:ok, sandbox} ->
          Sandbox.create_topic(sandbox, topic, partitions)

        :error ->
          with_admin(props, bootstrap, fn admin, deadline ->
            how = {partitions, replication, config}

            with {:ok, _id} <- Reach.cluster_id(admin, bootstrap, left(deadline)),
                 :ok <- make(admin, topic, how, deadline),
                 do: await_partitions(admin, topic, partitions, deadline)
          end)
      end
    end
  end

  @doc "Deletes a topic and all that is in it."
  @spec delete_topic(String.t(), keyword) :: :ok | {:error, Error.t()}
  def delete_topic(topic, connection) do
    with :ok <- argument(:topic, topic, {:custom, Types, :topic, []}),
         {:ok, %{admin_props: props, bootstrap: bootstrap}} <- Config.connection(connection) do
      with_admin(props, bootstrap, fn admin, deadline ->
        with {:ok, _id} <- Reach.cluster_id(admin, bootstrap, left(deadline)) do
          native(
            :kmq_nif.admin_delete_topic(admin, topic, left(deadline)),
            "deleting #{inspect(topic)}"
          )
        end
      end)
    end
  end

  # What is no option of a call, told as one.
  defp argument(name, value, type) do
    case Options.check(value, type) do
      {:ok, _value} ->
        :ok

      {:error, message} ->
        {:error, Error.new(:invalid_option, "invalid value for the #{name}: " <> message)}
    end
  end

  defp valid(options, schema) do
    with {:error, message} <- Options.validate(options, schema),
         do: {:error, Error.new(:invalid_option, message)}
  end

  @doc false
  # Partitions of a topic, 0 = it does not exist.
  @spec partitions(String.t(), String.t(), Config.props(), pos_integer) ::
          {:ok, non_neg_integer} | {:error, Error.t()}
  def partitions(topic, bootstrap, props, timeout_ms) do
    with_admin(props, bootstrap, timeout_ms, fn admin, deadline ->
      with {:ok, _id} <- Reach.cluster_id(admin, bootstrap, left(deadline)),
           {:ok, {n, _replication}} <- ask_partitions(admin, topic, deadline),
           do: {:ok, n}
    end)
  end

  @doc false
  # Says that a topic does not exist, and which one may be meant.
  @spec missing(String.t(), String.t(), Config.props(), pos_integer) :: {:error, Error.t()}
  def missing(topic, bootstrap, props, timeout_ms) do
    with_admin(props, bootstrap, timeout_ms, fn admin, deadline ->
      {:error, Reach.missing(admin, topic, left(deadline))}
    end)
  end

  @doc false
  # How long a topic keeps its records, in ms; nil: for ever, or nobody says (a sandbox, access control).
  @spec retention(String.t(), String.t(), Config.props(), pos_integer) ::
          {:ok, non_neg_integer | nil} | {:error, Error.t()}
  def retention(topic, bootstrap, props, timeout_ms) do
    with_admin(props, bootstrap, timeout_ms, fn admin, deadline ->
      with {:ok, kind} <- cluster(admin, %{bootstrap: bootstrap}, deadline),
           {:ok, settings} <- settings(%{admin: admin, deadline: deadline, kind: kind}, topic) do
        kept = integer(settings["retention.ms"])
        {:ok, if(kept && kept >= 0 && not compacted?(settings), do: kept)}
      end
    end)
  end

  @doc false
  # What a topic takes: its partitions (0: it does not exist), and max.message.bytes; nil: nobody says (a sandbox, access control).
  @spec takes(String.t(), String.t(), Config.props(), pos_integer) ::
          {:ok, {non_neg_integer, pos_integer | nil}} | {:error, Error.t()}
  def takes(topic, bootstrap, props, timeout_ms) do
    with_admin(props, bootstrap, timeout_ms, fn admin, deadline ->
      with {:ok, kind} <- cluster(admin, %{bootstrap: bootstrap}, deadline),
           {:ok, {n, _replication}} <- ask_partitions(admin, topic, deadline),
           do: {:ok, {n, max_message_bytes(kind, admin, topic, deadline)}}
    end)
  end

  defp max_message_bytes(:kafka, admin, topic, deadline) do
    with {:ok, settings} <- :kmq_nif.admin_topic_config(admin, topic, left(deadline)),
         {_, bytes} <- List.keyfind(settings, "max.message.bytes", 0) do
      integer(bytes)
    else
      _hidden -> nil
    end
  end

  defp max_message_bytes(_mock, _admin, _topic, _deadline), do: nil

  @doc false
  # All that must be true before a consumer or tracker of this configuration starts: within 15 s, or an error.
  @spec prepare(Config.t()) :: {:ok, partitions} | {:error, Error.t()}
  def prepare(%Config{} = config) do
    with_admin(config.admin_props, config.bootstrap, fn admin, deadline ->
      with {:ok, kind} <- cluster(admin, config, deadline) do
        run = %{admin: admin, deadline: deadline, kind: kind, config: config}

        with :ok <- transactions(kind, config),
             {:ok, queues} <- queues(run),
             :ok <- targets(run, queues),
             :ok <- companions(run, queues),
             do: {:ok, Map.new(queues, fn {topic, {n, _replication}} -> {topic, n} end)}
      end
    end)
  end

  @doc false
  # Whether the marker and dead letter topics of these queue topics are there and as large: a few questions, where prepare/1 asks for everything.
  @spec companions?(Config.t(), reference, partitions, pos_integer) :: boolean
  def companions?(config, admin, queues, timeout_ms) do
    markers = if config.delivery == :markers, do: config.marker_topics, else: %{}

    Enum.all?(queues, fn {topic, n} ->
      Enum.all?([markers[topic], config.dead_letter_topics[topic]], fn name ->
        name == nil or
          match?(
            {:ok, {found, _}} when found >= n,
            :kmq_nif.admin_partitions(admin, name, timeout_ms)
          )
      end)
    end)
  end

  # ---- the cluster

  # :kafka, :mock (no admin requests, no settings), or {:sandbox, pid}: a mock cluster whose control is in this VM.
  defp cluster(admin, config, deadline) do
    case Reach.cluster_id(admin, config.bootstrap, left(deadline)) do
      {:ok, "mockCluster" <> _} ->
        case sandbox(config.bootstrap) do
          {:ok, pid} -> {:ok, {:sandbox, pid}}
          :error -> {:ok, :mock}
        end

      {:ok, _id} ->
        {:ok, :kafka}

      error ->
        error
    end
  end

  defp sandbox(bootstrap), do: Sandbox.find(bootstrap)

  defp transactions(kind, %{redelivery: :transactional}) when kind != :kafka do
    {:error,
     Error.new(
       :invalid_option,
       ":redelivery is :transactional, and a sandbox has no transactions: set it to :idempotent there"
     )}
  end

  defp transactions(_kind, _config), do: :ok

  # ---- queue topics

  defp queues(run) do
    collect(run.config.topics, fn topic ->
      case ask_partitions(run.admin, topic, run.deadline) do
        {:ok, {0, _}} -> {:error, missing_queue(topic, run)}
        {:ok, found} -> with :ok <- queue_settings(run, topic), do: {:ok, {topic, found}}
        {:error, error} -> {:error, error}
      end
    end)
  end

  defp missing_queue(topic, run) do
    meant = Options.meant(topic, Reach.topics(run.admin, left(run.deadline)))

    Error.new(
      :topic_missing,
      "topic #{inspect(topic)} (option :topics) does not exist#{if meant, do: ", #{meant}", else: "."} Create it, for example:\n" <>
        "  kafka-topics.sh --bootstrap-server #{run.config.bootstrap} --create --topic #{topic} --partitions 8"
    )
  end

  # What is not copied cannot become the newest of its key.
  defp queue_settings(%{config: %{delivery: delivery}}, _topic) when delivery != :markers, do: :ok

  defp queue_settings(run, topic) do
    target = run.config.redeliver_topics[topic]

    with {:ok, settings} <- settings(run, topic) do
      cond do
        not compacted?(settings) ->
          warn_of_retention(run.config, topic, integer(settings["retention.ms"]))

        target == topic ->
          {:error,
           Error.new(
             :compacted,
             "topic #{inspect(topic)} is compacted: a copy for another attempt would make an old value of its key the newest. Name another " <>
               "topic for copies by :redeliver_to (and list it in :topics)"
           )}

        true ->
          :ok
      end
    end
  end

  # The next attempt is a copy of the record, which must still be there.
  defp warn_of_retention(config, topic, kept) do
    wait = longest_wait(config.backoff, config.max_redeliveries)
    in_work = config.max_processing_time

    if kept != nil and kept in 0..(in_work + wait) do
      Logger.warning(
        "kmq: topic #{inspect(topic)} keeps its records for #{kept} ms only (retention.ms). A message that is in work for up to #{in_work} ms " <>
          "(:max_processing_time) and then waits up to #{wait} ms for its next attempt (:backoff) may be gone by then, and is lost"
      )
    end

    :ok
  end

  # It grows with the attempts, but for a list: that has 64 entries at most.
  defp longest_wait(_backoff, 0), do: 0

  defp longest_wait(backoff, attempts) do
    Enum.max(
      for n <- [attempts | Enum.to_list(1..min(attempts, 64))], do: Backoff.delay(backoff, n, 1.0)
    )
  end

  # A copy goes to the same partition number.
  defp targets(%{config: %{delivery: delivery}}, _queues) when delivery != :markers, do: :ok

  defp targets(run, queues) do
    sizes = Map.new(queues)

    each(run.config.redeliver_topics, fn {topic, target} ->
      {n, _} = sizes[topic]
      {target_n, _} = sizes[target]

      if target_n >= n,
        do: :ok,
        else: {:error, too_few(:redeliver_to, target, target_n, topic, n)}
    end)
  end

  # ---- marker and dead letter topics: missing ones are collected, so that one error prints all commands

  defp companions(run, queues) do
    markers =
      for {topic, found} <- queues,
          run.config.delivery == :markers,
          do: {:marker_topic, run.config.marker_topics[topic], topic, found}

    dead_letters =
      queues
      |> Enum.group_by(fn {topic, _found} -> run.config.dead_letter_topics[topic] end)
      |> Enum.map(fn {name, sources} ->
        {topic, found} = Enum.max_by(sources, fn {_topic, {n, _}} -> n end)
        {:dead_letter_topic, name, topic, found}
      end)

    with {:ok, results} <- collect(markers ++ wanted(run, dead_letters), &companion(run, &1)) do
      case for({:missing, kind, command} <- results, do: {kind, command}) do
        [] -> :ok
        missing -> {:error, missing_companions(missing)}
      end
    end
  end

  # One that may never be needed is made where topics are made, and else only looked for, to say that it is not there.
  defp wanted(%{config: %{dead_letters: :optional, create_topics: false}} = run, dead_letters) do
    if run.kind == :kafka, do: Enum.each(dead_letters, &mention(run, &1))
    []
  end

  defp wanted(_run, dead_letters), do: dead_letters

  defp mention(run, {_kind, name, topic, _found} = wanted) do
    with {:ok, {0, _}} <- ask_partitions(run.admin, name, run.deadline),
         {:ok, {:missing, _, command}} <- missing(run, wanted) do
      Logger.info(
        "kmq: #{inspect(topic)} has no dead letter topic; a message that is rejected would wait for it. It is made with:\n" <>
          command
      )
    end
  end

  defp companion(run, {_kind, name, topic, {n, _}} = wanted) do
    with :ok <- before(run, wanted),
         {:ok, found} <- ask_partitions(run.admin, name, run.deadline) do
      case found do
        {0, _} when run.config.create_topics -> create_companion(run, wanted)
        {0, _} -> missing(run, wanted)
        {few, _} when few < n and run.config.create_topics -> grow(run, wanted, few)
        {few, _} when few < n -> {:error, too_few(elem(wanted, 0), name, few, topic, n)}
        {_enough, replication} -> existing(run, wanted, replication)
      end
    end
  end

  # A mock broker makes a topic of 4 partitions of each question about one: here making comes before asking.
  defp before(
         %{kind: {:sandbox, pid}, config: %{create_topics: true}},
         {_kind, name, _topic, {n, _}}
       ) do
    _already_there = Sandbox.create_topic(pid, name, n)
    :ok
  end

  defp before(_run, _wanted), do: :ok

  defp create_companion(run, {kind, name, topic, {n, replication}}) do
    with {:ok, config} <- wanted_settings(run, kind, topic) do
      Logger.info("kmq: creating #{inspect(name)} with #{n} partitions")

      case make(run.admin, name, {n, replication, config}, run.deadline) do
        # Someone else was faster.
        {:error, %Error{reason: :topic_already_exists}} -> present(run, name, n)
        :ok -> present(run, name, n)
        error -> error
      end
    end
  end

  defp make(admin, name, {n, replication, config}, deadline) do
    result = :kmq_nif.admin_create_topic(admin, name, n, replication, config, left(deadline))
    native(result, "creating #{inspect(name)}")
  end

  defp grow(run, {_kind, name, topic, {n, _}}, few) do
    Logger.info(
      "kmq: growing #{inspect(name)} from #{few} to #{n} partitions, as many as #{inspect(topic)} has"
    )

    case run.kind do
      :kafka ->
        result = :kmq_nif.admin_create_partitions(run.admin, name, n, left(run.deadline))
        with :ok <- native(result, "growing #{inspect(name)}"), do: present(run, name, n)

      _mock ->
        {:error, too_few(:marker_topic, name, few, topic, n)}
    end
  end

  defp present(run, name, n) do
    with :ok <- await_partitions(run.admin, name, n, run.deadline), do: {:ok, :present}
  end

  # The controller makes a topic, the brokers hear of it a moment later: until then it is missing for whoever asks them.
  defp await_partitions(admin, topic, n, deadline) do
    case ask_partitions(admin, topic, deadline) do
      {:ok, {found, _replication}} when found >= n -> :ok
      {:error, %Error{retriable?: false} = error} -> {:error, error}
      _not_yet -> await_later(admin, topic, n, deadline)
    end
  end

  @again_ms 20

  defp await_later(admin, topic, n, deadline) do
    if left(deadline) > @again_ms do
      receive do
      after
        @again_ms -> await_partitions(admin, topic, n, deadline)
      end
    else
      {:error,
       Error.new(:timeout, "#{inspect(topic)} was made, but no broker knows it yet",
         retriable?: true
       )}
    end
  end

  defp missing(run, {kind, name, topic, {n, replication}}) do
    with {:ok, config} <- wanted_settings(run, kind, topic) do
      command =
        "  kafka-topics.sh --bootstrap-server #{run.config.bootstrap} --create --topic #{name} --partitions #{n} " <>
          "--replication-factor #{replication}" <>
          Enum.map_join(config, fn {k, v} -> " --config #{k}=#{v}" end)

      {:ok, {:missing, {kind, name, topic}, command}}
    end
  end

  defp missing_companions(missing) do
    {{first, _, _}, _} = hd(missing)

    what =
      Enum.map_join(missing, " and ", fn {{kind, name, topic}, _} ->
        "the #{word(kind)} topic #{inspect(name)} of #{inspect(topic)}"
      end)

    commands = Enum.map_join(missing, "\n", &elem(&1, 1))

    reason =
      if first == :marker_topic, do: :marker_topic_missing, else: :dead_letter_topic_missing

    Error.new(
      reason,
      "missing: #{what}. Set create_topics: true, run mix kmq.topics create, or create with:\n" <>
        commands
    )
  end

  defp word(:marker_topic), do: "marker"
  defp word(:dead_letter_topic), do: "dead letter"
  defp word(:redeliver_to), do: "redelivery"

  defp too_few(option, name, few, topic, n) do
    Error.new(
      :too_few_partitions,
      "the #{word(option)} topic #{inspect(name)} (option #{inspect(option)}) has #{few} partitions, #{inspect(topic)} has #{n}: " <>
        "it needs as many. Grow it with:\n  kafka-topics.sh --alter --topic #{name} --partitions #{n}"
    )
  end

  # ---- settings

  defp existing(run, {:dead_letter_topic, _name, _topic, _found}, _replication)
       when run.kind == :kafka,
       do: {:ok, :present}

  defp existing(run, {:marker_topic, name, topic, {_n, queue_replication}}, replication)
       when run.kind == :kafka do
    with {:ok, settings} <- settings(run, name),
         :ok <- marker_settings(run.config, name, settings) do
      keep = retention_ms(run.config)
      retention = integer(settings["retention.ms"])

      if retention != nil and retention >= 0 and retention < keep do
        Logger.warning(
          "kmq: marker topic #{inspect(name)} keeps its records for #{retention} ms only, less than #{keep} ms (1 day or 4 times " <>
            ":max_processing_time): markers of messages in work may be gone before they are settled"
        )
      end

      if replication < queue_replication do
        Logger.warning(
          "kmq: marker topic #{inspect(name)} has #{replication} replicas, #{inspect(topic)} has #{queue_replication}: its loss would cost " <>
            "redeliveries"
        )
      end

      {:ok, :present}
    end
  end

  defp existing(_run, _wanted, _replication), do: {:ok, :present}

  defp marker_settings(config, name, settings) do
    cond do
      compacted?(settings) ->
        {:error,
         Error.new(
           :compacted,
           "marker topic #{inspect(name)} is compacted (cleanup.policy=#{settings["cleanup.policy"]}): markers would be lost. Set it to delete:\n" <>
             "  kafka-configs.sh --alter --entity-type topics --entity-name #{name} --add-config cleanup.policy=delete"
         )}

      settings["message.timestamp.type"] == "CreateTime" and not config.allow_create_time ->
        {:error,
         Error.new(
           :create_time,
           "marker topic #{inspect(name)} is on CreateTime: deadlines would hang on the clients' clocks. Set it to LogAppendTime:\n" <>
             "  kafka-configs.sh --alter --entity-type topics --entity-name #{name} --add-config message.timestamp.type=LogAppendTime\n" <>
             "or accept it by allow_create_time: true"
         )}

      true ->
        :ok
    end
  end

  defp wanted_settings(run, :marker_topic, topic) do
    with {:ok, queue} <- settings(run, topic) do
      {:ok,
       [
         {"cleanup.policy", "delete"},
         {"message.timestamp.type", "LogAppendTime"},
         {"retention.ms", to_string(retention_ms(run.config))}
       ] ++ copied(queue, "min.insync.replicas", & &1)}
    end
  end

  defp wanted_settings(run, :dead_letter_topic, topic) do
    with {:ok, queue} <- settings(run, topic) do
      larger = fn bytes -> to_string((integer(bytes) || 1_048_588) + @headroom_bytes) end

      {:ok,
       [{"cleanup.policy", "delete"}] ++
         copied(queue, "min.insync.replicas", & &1) ++
         copied(queue, "retention.ms", & &1) ++ copied(queue, "max.message.bytes", larger)}
    end
  end

  defp copied(settings, name, fun) do
    case settings[name] do
      nil -> []
      value -> [{name, fun.(value)}]
    end
  end

  defp retention_ms(config), do: max(@day_ms, 4 * config.max_processing_time)
  defp compacted?(settings), do: String.contains?(settings["cleanup.policy"] || "", "compact")

  defp integer(nil), do: nil

  defp integer(text) do
    case Integer.parse(text) do
      {n, ""} -> n
      _ -> nil
    end
  end

  # The settings of a topic; none on a mock cluster and where access control hides them.
  defp settings(%{kind: :kafka} = run, topic) do
    case native(
           :kmq_nif.admin_topic_config(run.admin, topic, left(run.deadline)),
           "settings of #{inspect(topic)}"
         ) do
      {:ok, list} ->
        {:ok, Map.new(list)}

      {:error, %Error{reason: reason}}
      when reason in [:topic_authorization_failed, :cluster_authorization_failed] ->
        Logger.warning(
          "kmq: the settings of #{inspect(topic)} are hidden by the cluster's access control: not checked"
        )

        {:ok, %{}}

      error ->
        error
    end
  end

  defp settings(_run, _topic), do: {:ok, %{}}

  # ---- asking

  defp ask_partitions(admin, topic, deadline) do
    native(
      :kmq_nif.admin_partitions(admin, topic, left(deadline)),
      "asking for topic #{inspect(topic)}"
    )
  end

  defp native({:error, error}, context) do
    error = Error.from_native(error, context)

    if error.reason in [
         :topic_authorization_failed,
         :cluster_authorization_failed,
         :group_authorization_failed
       ],
       do:
         {:error,
          %{error | message: error.message <> ". Who needs which right is in guides/security.md"}},
       else: {:error, error}
  end

  defp native(result, _context), do: result

  defp with_admin(props, bootstrap, timeout_ms \\ @timeout_ms, fun) do
    deadline = System.monotonic_time(:millisecond) + timeout_ms

    with {:error, error} <- Security.with_admin(props, timeout_ms, &fun.(&1, deadline)),
         do: {:error, Error.from_native(error, "a client for #{bootstrap}")}
  end

  defp left(deadline), do: max(deadline - System.monotonic_time(:millisecond), 1)

  defp collect(items, fun) do
    items
    |> Enum.reduce_while({:ok, []}, fn item, {:ok, acc} ->
      case fun.(item) do
        {:ok, value} -> {:cont, {:ok, [value | acc]}}
        {:error, error} -> {:halt, {:error, error}}
      end
    end)
    |> case do
      {:ok, acc} -> {:ok, Enum.reverse(acc)}
      error -> error
    end
  end

  defp each(items, fun) do
    Enum.reduce_while(items, :ok, fn item, :ok ->
      case fun.(item) do
        :ok -> {:cont, :ok}
        error -> {:halt, error}
      end
    end)
  end
end
