defmodule Kmq.Config do
  @moduledoc false
  # Validated options of a pipeline, a pull consumer or a tracker, with everything that follows from them; the one place
  # that turns options into librdkafka's properties. All other code reads this struct and no options.
  #
  # Two fields are not what the user wrote: `hosts` is [{host, port}], `backoff` is a Kmq.Backoff.normal().
  #
  # Memory: with its queues split, librdkafka's limits are per partition. In the worst case (a backlog in every partition) a
  # consumer holds, per assigned partition,
  #
  #     min(queued.min.messages x (value + ~300 B), queued.max.messages.kbytes + messages x ~300 B)
  #
  # = 20,000 x 400 B = 8 MB for 100-byte messages with the settings below, 4 MiB + 4,096 x 300 B = 5.4 MB for 1 kB ones, and what one
  # answer of the broker goes beyond that. They can be that small because a full queue costs no second: from librdkafka 2.2 on by
  # fetch.queue.backoff.ms, before by c_src/kafka/nudge.c. Other limits: `kafka_config: [consumer: [...]]`.

  alias Kmq.{Error, Options, Security}

  @derive {Inspect,
           except: [
             :client_config,
             :kafka_config,
             :consumer_props,
             :producer_props,
             :tracker_props,
             :admin_props,
             :receipt_secret
           ]}

  @options Keyword.keys(Options.schema(:producer)) --
             ~w(receive_interval reconnect_timeout offset_commit_on_ack shared_client)a
  @derived [
    name: nil,
    kind: :producer,
    bootstrap: "",
    marker_topics: %{},
    dead_letter_topics: %{},
    redeliver_topics: %{},
    dead_letters: :required,
    consumer_props: [],
    producer_props: [],
    tracker_props: [],
    admin_props: []
  ]
  defstruct Enum.map(@options, &{&1, nil}) ++ @derived

  @typedoc "Secrets in it are functions: see Kmq.Security."
  @type props :: Security.props()
  @type t :: %__MODULE__{
          hosts: [{String.t(), 1..65_535}],
          topics: [String.t()],
          group_id: String.t(),
          backoff: Kmq.Backoff.normal(),
          name: term,
          kind: :producer | :consumer | :tracker,
          bootstrap: String.t(),
          marker_topics: %{String.t() => String.t()},
          dead_letter_topics: %{String.t() => String.t()},
          redeliver_topics: %{String.t() => String.t()},
          dead_letters: :required | :optional,
          consumer_props: props,
          producer_props: props,
          tracker_props: props,
          admin_props: props
        }

  @doc "The configuration that these options mean; `kind` is `:producer` (Broadway's), `:consumer` or `:tracker`."
  @spec new(keyword, :producer | :consumer | :tracker) :: {:ok, t} | {:error, Error.t()}
  def new(options, kind \\ :producer) do
    with {:ok, valid} <- Options.validate(options, kind),
         {:ok, valid} <- delivery(valid, kind),
         {:ok, topics} <- derive_topics(valid),
         {:ok, security} <- Security.props(valid[:client_config]),
         :ok <- timing(valid),
         :ok <- assignor(valid[:assignor], :kmq_nif.version()),
         valid = hide(valid),
         config = build(valid, kind, topics, security),
         :ok <- heartbeats(config.consumer_props, valid),
         :ok <- whole(config.admin_props) do
      idle = Options.idle(options) ++ idle_by_delivery(options, valid[:delivery])
      idle != [] && warn_idle(idle)
      {:ok, %{config | ordering: ordering(valid, options)}}
    else
      {:error, message} -> {:error, Error.new(:invalid_option, message)}
    end
  end

  defp whole(props) do
    case Security.problem(props) do
      nil -> :ok
      text -> {:error, "invalid value for :kafka_config option: " <> text}
    end
  end

  # From here on no secret is plain.
  defp hide(valid), do: Security.hide(valid)

  @doc "As `new/2`; raises `ArgumentError`."
  @spec new!(keyword, :producer | :consumer | :tracker) :: t
  def new!(options, kind \\ :producer) do
    case new(options, kind) do
      {:ok, config} -> config
      {:error, error} -> raise ArgumentError, error.message
    end
  end

  @doc "The configuration of the index-th member of a pipeline: a static member needs an id of its own."
  @spec for_index(t, non_neg_integer) :: t
  def for_index(config, index) do
    props =
      Enum.map(config.consumer_props, fn
        {"group.instance.id", id} -> {"group.instance.id", "#{id}-#{index}"}
        property -> property
      end)

    %{config | consumer_props: props}
  end

  @doc "The same with other queue topics, which may be none. Topics that are not there any more have no say in maps of topics."
  @spec with_topics(t, [String.t()]) :: {:ok, t} | {:error, Error.t()}
  def with_topics(config, topics) do
    options = for name <- @options, do: {name, Map.get(config, name)}

    with {:ok, topics} <- if(topics == [], do: {:ok, []}, else: Options.Types.topics(topics)),
         maps =
           for(
             name <- [:marker_topic, :dead_letter_topic, :redeliver_to],
             is_map(options[name]),
             do: {name, Map.take(options[name], topics)}
           ),
         options = Keyword.merge(options, [{:topics, topics} | maps]),
         {:ok, derived} <- derive_topics(options) do
      {:ok, config |> struct!(topics: topics) |> struct!(derived)}
    else
      {:error, message} ->
        {:error, Error.new(:invalid_option, "invalid value for topics: " <> message)}
    end
  end

  @doc "The configuration of a tracker for the topics of both."
  @spec cover(t, t) :: t
  def cover(config, other) do
    %{
      config
      | topics: Enum.uniq(other.topics ++ config.topics),
        marker_topics: Map.merge(other.marker_topics, config.marker_topics),
        dead_letter_topics: Map.merge(other.dead_letter_topics, config.dead_letter_topics),
        redeliver_topics: Map.merge(other.redeliver_topics, config.redeliver_topics)
    }
  end

  @doc "Validated publisher options and the properties of its producer and of its admin client."
  @spec publisher(keyword) ::
          {:ok, keyword, %{bootstrap: String.t(), producer_props: props, admin_props: props}}
          | {:error, Error.t()}
  def publisher(options) do
    with {:ok, valid} <- Options.validate(options, :publisher),
         {:ok, security} <- Security.props(valid[:client_config]),
         valid = hide(valid),
         bootstrap = bootstrap(valid[:hosts]),
         common = common_props(bootstrap, "kmq-publisher", valid, security),
         admin = merge([common, valid[:kafka_config][:common]]),
         :ok <- whole(admin) do
      producer = [
        {"partitioner", to_string(valid[:partitioner])},
        {"acks", to_string(valid[:acks])},
        {"compression.codec", to_string(valid[:compression])},
        {"linger.ms", to_string(valid[:linger])},
        {"message.timeout.ms", to_string(valid[:delivery_timeout])},
        {"queue.buffering.max.kbytes", to_string(max(div(valid[:queue_bytes], 1024), 1))},
        {"queue.buffering.max.messages", to_string(valid[:queue_messages])},
        # What is reported at once is freed at once, in one call on a scheduler.
        {"batch.num.messages", "2000"}
      ]

      extra = valid[:kafka_config]

      {:ok, valid,
       %{
         bootstrap: bootstrap,
         producer_props: merge([common, producer, extra[:common], extra[:producer]]),
         admin_props: admin
       }}
    else
      {:error, message} -> {:error, Error.new(:invalid_option, message)}
    end
  end

  @doc "Properties for asking a cluster about topics: `hosts`, `client_config` and `kafka_config` only."
  @spec connection(keyword) ::
          {:ok, %{bootstrap: String.t(), admin_props: props}} | {:error, Error.t()}
  def connection(options) do
    schema = Keyword.take(Options.schema(:publisher), [:hosts, :client_config, :kafka_config])

    with {:ok, valid} <- Options.validate(options, schema),
         {:ok, security} <- Security.props(valid[:client_config]),
         valid = hide(valid),
         bootstrap = bootstrap(valid[:hosts]),
         common = common_props(bootstrap, "kmq-admin", valid, security),
         admin = merge([common, valid[:kafka_config][:common]]),
         :ok <- whole(admin) do
      {:ok, %{bootstrap: bootstrap, admin_props: admin}}
    else
      {:error, message} -> {:error, Error.new(:invalid_option, message)}
    end
  end

  @doc "`\"h:p,h:p\"`, IPv6 addresses in brackets."
  @spec bootstrap([{String.t(), 1..65_535}]) :: String.t()
  def bootstrap(hosts) do
    Enum.map_join(hosts, ",", fn {host, port} ->
      if String.contains?(host, ":"), do: "[#{host}]:#{port}", else: "#{host}:#{port}"
    end)
  end

  defp warn_idle(names) do
    require Logger
    Logger.info("kmq: these options do nothing here: " <> Enum.join(names, ", "))
  end

  # Who commits what is done is used to it that a partition's messages are worked on one after the other.
  defp ordering(valid, options) do
    if valid[:delivery] == :offsets and options[:ordering] == nil,
      do: :partition,
      else: valid[:ordering]
  end

  # ---- what a delivery has

  # A failed message must not be lost in silence: where nothing is delivered again, it is kept as a dead letter; where that is what
  # was asked for, it is dropped.
  @on_failure %{markers: :retry, offsets: :reject, at_most_once: :discard}

  defp delivery(valid, kind) do
    delivery = valid[:delivery]

    with :ok <- tracked(delivery, kind),
         :ok <- Options.Types.supported(valid[:on_success], :on_success, delivery),
         :ok <- Options.Types.supported(valid[:on_failure], :on_failure, delivery) do
      default = if kind == :producer, do: [on_failure: @on_failure[delivery]], else: []
      {:ok, Keyword.merge(default, valid)}
    end
  end

  defp tracked(delivery, :tracker) when delivery != :markers do
    {:error,
     "invalid value for :delivery option: a tracker reads markers, and delivery: #{inspect(delivery)} has none"}
  end

  defp tracked(_delivery, _kind), do: :ok

  @for_offsets ~w(offset_commit_on_ack)a

  @for_markers ~w(marker_format marker_topic redeliver_to lease max_redeliveries backoff ack_flush_interval allow_create_time
    redelivery redelivery_rate trim_markers dead_letter_oversize receipt_secret)a

  defp idle_by_delivery(options, delivery) do
    idle =
      case delivery do
        :markers -> @for_offsets
        :offsets -> @for_markers
        :at_most_once -> @for_offsets ++ @for_markers
      end

    for name <- idle, Keyword.get(options, name) != nil, do: inspect(name)
  end

  # With a tracker dead letters can always come up. Without one it must be there where the options send messages there.
  defp dead_letters(%{delivery: :markers}), do: :required

  defp dead_letters(config) do
    rejects? = :reject in [config.on_success, config.on_failure]
    expires? = config.ttl != nil and config.on_expired == :reject
    if rejects? or expires?, do: :required, else: :optional
  end

  # ---- topics

  @doc "`<topic>__<group>__markers`"
  @spec default_marker_topic(String.t(), String.t()) :: String.t()
  def default_marker_topic(topic, group_id), do: topic <> "__" <> group_id <> "__markers"

  @doc "`<topic>__undelivered`"
  @spec default_dead_letter_topic(String.t()) :: String.t()
  def default_dead_letter_topic(topic), do: topic <> "__undelivered"

  defp derive_topics(valid) do
    topics = valid[:topics]

    with :ok <- no_markers(topics),
         {:ok, redeliver} <- named(:redeliver_to, valid, topics, & &1),
         :ok <- redeliver_known(redeliver, topics),
         {:ok, markers} <-
           named(:marker_topic, valid, topics, &default_marker_topic(&1, valid[:group_id])),
         {:ok, dead_letters} <-
           named(:dead_letter_topic, valid, topics, &dead_letter_default(&1, redeliver)),
         :ok <- marker_names(markers, topics, valid, valid[:delivery]),
         :ok <- dead_letter_names(dead_letters, markers, topics) do
      {:ok,
       %{marker_topics: markers, dead_letter_topics: dead_letters, redeliver_topics: redeliver}}
    end
  end

  # Its records are no messages, and the markers about them would be about markers.
  defp no_markers(topics) do
    case Enum.find(topics, &(&1 =~ ~r/.__.+__markers\z/)) do
      nil ->
        :ok

      topic ->
        {:error,
         "invalid value for :topics option: #{inspect(topic)} is a marker topic, which is Kmq's own: name the queue topic. " <>
           "Kmq.Inspect and mix kmq.inspect show what is in it"}
    end
  end

  # A topic that takes another one's copies shares its dead letter topic: that is where its reader looks.
  defp dead_letter_default(topic, redeliver) do
    sources = for {source, ^topic} <- redeliver, source != topic, do: source

    case sources do
      [source] -> default_dead_letter_topic(source)
      _ -> default_dead_letter_topic(topic)
    end
  end

  defp named(option, valid, topics, default) do
    case valid[option] do
      nil ->
        {:ok, Map.new(topics, &{&1, default.(&1)})}

      name when is_binary(name) ->
        {:ok, Map.new(topics, &{&1, name})}

      map ->
        case Map.keys(map) -- topics do
          [] ->
            {:ok, Map.new(topics, &{&1, Map.get_lazy(map, &1, fn -> default.(&1) end)})}

          [other | _] ->
            {:error,
             "invalid value for #{inspect(option)} option: #{inspect(other)} is not one of :topics"}
        end
    end
  end

  defp redeliver_known(redeliver, topics) do
    case Enum.find(redeliver, fn {_topic, target} -> target not in topics end) do
      nil ->
        :ok

      {_topic, target} ->
        {:error,
         "invalid value for :redeliver_to option: #{inspect(target)} must be one of :topics, or nobody reads the copies"}
    end
  end

  defp marker_names(_markers, _topics, _valid, delivery) when delivery != :markers, do: :ok

  defp marker_names(markers, topics, valid, _delivery) do
    given = valid[:marker_topic] != nil

    Enum.find_value(markers, :ok, fn {topic, marker} ->
      problem = Kmq.Options.Types.topic_problem(marker)
      twin = Enum.find(topics, &(&1 != topic and markers[&1] == marker))

      cond do
        problem && not given ->
          {:error,
           "the marker topic of #{inspect(topic)} and group #{inspect(valid[:group_id])}, #{inspect(marker)}, #{problem}: name one by :marker_topic"}

        marker in topics ->
          {:error, "invalid value for :marker_topic option: #{inspect(marker)} is one of :topics"}

        twin ->
          {:error,
           "invalid value for :marker_topic option: #{inspect(topic)} and #{inspect(twin)} cannot share #{inspect(marker)}, give a map"}

        true ->
          nil
      end
    end)
  end

  defp dead_letter_names(dead_letters, markers, topics) do
    marker_names = Map.values(markers)

    Enum.find_value(dead_letters, :ok, fn {topic, dead_letter} ->
      problem = Kmq.Options.Types.topic_problem(dead_letter)

      cond do
        problem ->
          {:error,
           "the dead letter topic of #{inspect(topic)}, #{inspect(dead_letter)}, #{problem}: name one by :dead_letter_topic"}

        dead_letter in topics ->
          {:error,
           "invalid value for :dead_letter_topic option: #{inspect(dead_letter)} is one of :topics, dead letters would come round again"}

        dead_letter in marker_names ->
          {:error,
           "invalid value for :dead_letter_topic option: #{inspect(dead_letter)} is a marker topic"}

        String.ends_with?(dead_letter, "__undelivered__undelivered") ->
          {:error,
           "#{inspect(topic)} is a dead letter topic itself: name another topic for what fails again by :dead_letter_topic"}

        true ->
          nil
      end
    end)
  end

  # ---- time

  defp timing(valid) do
    group = valid[:group_config] || []
    session = group[:session_timeout_seconds]

    cond do
      session && session > 3_600 ->
        {:error,
         "invalid value for :session_timeout_seconds option of :group_config: expected at most 3600, got: #{session}"}

      valid[:max_processing_time] > 7 * 86_400_000 ->
        {:error,
         "invalid value for :max_processing_time option: expected at most a week in ms, got: #{valid[:max_processing_time]}"}

      valid[:lease] > 86_400_000 ->
        {:error,
         "invalid value for :lease option: expected at most a day in ms, got: #{valid[:lease]}"}

      true ->
        :ok
    end
  end

  # One heartbeat may be late or lost: where only one fits into a session, that ends the membership. Kafka's own rule is a third.
  defp heartbeats(props, valid) do
    {session, session_option} = beat(props, valid, "session.timeout.ms", :session_timeout_seconds)

    {heartbeat, option} = beat(props, valid, "heartbeat.interval.ms", :heartbeat_rate_seconds)

    cond do
      2 * heartbeat > session ->
        {:error,
         "invalid value for #{option}: #{heartbeat} ms is more than half of the session timeout of #{session} ms, so one late heartbeat " <>
           "would end the membership. Give a third of it or less, or a longer #{session_option}"}

      3 * heartbeat > session ->
        require Logger

        Logger.warning(
          "kmq: #{option}: #{heartbeat} ms is more than a third of the session timeout of #{session} ms"
        )

      true ->
        :ok
    end
  end

  defp beat(props, valid, name, group_option) do
    {_, value} = List.keyfind(props, name, 0)

    own? =
      for(group <- [:common, :consumer], do: valid[:kafka_config][group] || [])
      |> Enum.any?(&List.keymember?(&1, name, 0))

    option =
      if own?,
        do: "#{name} of the :kafka_config option",
        else: "#{inspect(group_option)} option of :group_config"

    # Checked before: librdkafka takes it for a number.
    {value |> String.trim() |> String.to_integer(), option}
  end

  # ---- assignor

  @doc false
  # Older libraries loop, hang or lose assignments with it.
  @spec assignor([atom] | nil, {binary, integer}) :: :ok | {:error, String.t()}
  def assignor([:cooperative_sticky], {version, number}) when number < 0x020A01FF do
    {:error,
     "invalid value for :assignor option: :cooperative_sticky needs librdkafka 2.10.1 or newer, this is #{version}: " <>
       "with it a group may hang or lose partitions. Use :roundrobin or :range, or run with a newer librdkafka.so.1"}
  end

  def assignor(_assignor, _version), do: :ok

  @doc "Whether a rebalance takes away only what moves."
  @spec cooperative?(t) :: boolean
  def cooperative?(config), do: config.assignor == [:cooperative_sticky]

  defp strategy(assignor) do
    Enum.map_join(assignor || [:roundrobin], ",", fn
      :cooperative_sticky -> "cooperative-sticky"
      eager -> to_string(eager)
    end)
  end

  # ---- properties

  defp build(valid, kind, topics, security) do
    bootstrap = bootstrap(valid[:hosts])
    common = common_props(bootstrap, "kmq-" <> valid[:group_id], valid, security)
    extra = valid[:kafka_config]

    props = %{
      consumer_props:
        merge([common, consumer_props(valid, bootstrap), extra[:common], extra[:consumer]]),
      producer_props: merge([common, producer_props(), extra[:common], extra[:producer]]),
      tracker_props: merge([common, extra[:common], extra[:tracker]]),
      admin_props: merge([common, [{"group.id", valid[:group_id]}], extra[:common]])
    }

    %__MODULE__{name: valid[:name], kind: kind, bootstrap: bootstrap, commit_interval: nil}
    |> struct!(Keyword.take(valid, @options))
    |> struct!(commit_interval: commit_interval(valid))
    |> struct!(topics)
    |> struct!(props)
    |> then(&%{&1 | dead_letters: dead_letters(&1)})
  end

  # broadway_kafka commits with each ack, or (offset_commit_on_ack: false) each 5 s where nothing is said. Ours are never further apart.
  defp commit_interval(valid) do
    seconds = (valid[:group_config] || [])[:offset_commit_interval_seconds]
    default = Options.schema(:producer)[:commit_interval][:default]
    on_ack = if valid[:delivery] == :offsets, do: valid[:offset_commit_on_ack]

    cond do
      valid[:commit_interval] != default -> valid[:commit_interval]
      on_ack == true -> default
      seconds != nil -> seconds * 1_000
      on_ack == false -> 5_000
      true -> default
    end
  end

  defp common_props(bootstrap, client_id, valid, security) do
    client = valid[:client_config]

    [
      {"bootstrap.servers", bootstrap},
      {"client.id", client[:client_id_prefix] <> client_id},
      {"client.software.name", "kmq"},
      # Nagle costs START's round trip half of its p95.
      {"socket.nagle.disable", "true"},
      {"socket.keepalive.enable", "true"},
      # A broker that is back is found again within 2 s, not within 10.
      {"reconnect.backoff.max.ms", "2000"}
    ] ++
      optional("socket.connection.setup.timeout.ms", client[:connect_timeout]) ++
      optional("socket.timeout.ms", client[:request_timeout]) ++ security
  end

  defp consumer_props(valid, bootstrap) do
    group = valid[:group_config] || []
    fetch = valid[:fetch_config] || []
    {session, heartbeat} = session(group, bootstrap)
    rebalance = Keyword.get(group, :rebalance_timeout_seconds, 30) * 1_000

    # It must leave a drain its time: a member that is thrown out while it drains has drained for nothing.
    max_poll = Enum.max([rebalance, session, valid[:drain_timeout] + 10_000])

    [
      {"group.id", valid[:group_id]},
      {"session.timeout.ms", to_string(session)},
      {"heartbeat.interval.ms", to_string(heartbeat)},
      {"max.poll.interval.ms", to_string(max_poll)},
      {"partition.assignment.strategy", strategy(valid[:assignor])},
      # The engine decides where to begin; a library that resets by itself skips messages silently.
      {"auto.offset.reset", "error"},
      {"isolation.level", to_string(valid[:isolation_level] || :read_committed)},
      # The end of a partition is told: what is no message before it (ends of transactions) is passed by the commit.
      {"enable.partition.eof", "true"},
      # Partitions added to a topic are noticed in half a minute, not in five.
      {"topic.metadata.refresh.interval.ms", "30000"},
      {"queued.min.messages", "20000"},
      {"queued.max.messages.kbytes", "4096"},
      {"fetch.max.bytes", "16777216"},
      {"fetch.min.bytes", to_string(Keyword.get(fetch, :min_bytes, 1))},
      {"fetch.message.max.bytes", to_string(Keyword.get(fetch, :max_bytes, 1_048_576))},
      {"fetch.wait.max.ms", to_string(fetch[:max_wait_time] || default_max_wait(bootstrap))}
    ] ++ optional("group.instance.id", group[:group_instance_id])
  end

  # The engine's own producer: STARTs and ENDs. It waits for nobody, the engine collects by itself.
  defp producer_props do
    [
      {"acks", "all"},
      {"linger.ms", "0"},
      # A marker topic that has grown is noticed soon: its new partitions wait for it.
      {"topic.metadata.refresh.interval.ms", "10000"},
      {"queue.buffering.max.messages", "500000"},
      {"queue.buffering.max.kbytes", "65536"},
      # What is reported at once is freed at once, in one call on a scheduler; in the format with a record for each message that is much.
      {"batch.num.messages", "2000"},
      {"message.timeout.ms", "120000"}
    ]
  end

  # The mock broker lets every rebalance after the first last a session time-out less a second. Its own sandbox in this VM
  # gets a short one that a busy machine can bear, unless the user asks for another than the default.
  defp session(group, bootstrap) do
    session = Keyword.get(group, :session_timeout_seconds, 30) * 1_000
    heartbeat = Keyword.get(group, :heartbeat_rate_seconds, 5) * 1_000
    if session == 30_000 and sandbox?(bootstrap), do: {4_000, 500}, else: {session, heartbeat}
  end

  # The mock broker sleeps through new messages; where it lives in this VM nobody wants to wait a second for each.
  defp default_max_wait(bootstrap), do: if(sandbox?(bootstrap), do: 20, else: 100)

  defp sandbox?(bootstrap) do
    is_pid(Process.whereis(Kmq.Registry)) and match?({:ok, _}, Kmq.Sandbox.find(bootstrap))
  end

  defp optional(_name, nil), do: []
  defp optional(name, value), do: [{name, to_string(value)}]

  # Later ones win; the order of first appearance stays.
  defp merge(lists) do
    all = Enum.flat_map(lists, &(&1 || []))
    last = Map.new(all)
    all |> Enum.map(&elem(&1, 0)) |> Enum.uniq() |> Enum.map(&{&1, last[&1]})
  end
end
