defmodule Kmq.Options do
  @moduledoc false
  # One schema a kind of process: it validates, it fills in defaults, and it writes the option docs. The shape is
  # NimbleOptions' (type, default, required, doc, keys), which cannot be a dependency where Kmq is built; only the types used
  # here are known.

  alias Kmq.Options.Types

  @typedoc "As NimbleOptions': `name: [type:, default:, required:, doc:, keys:, type_doc:]`."
  @type schema :: keyword(keyword)

  @group_config [
    offset_commit_interval_seconds: [
      type: {:custom, Types, :integer_in, [1, 86_400]},
      type_doc: "`1..86_400`",
      doc:
        "The same as `:commit_interval`, in seconds; `:commit_interval` wins, and with `delivery: :offsets` `offset_commit_on_ack: true`."
    ],
    session_timeout_seconds: [
      type: :pos_integer,
      default: 30,
      doc:
        "After so long without a heartbeat the group takes a member for dead (`session.timeout.ms`). When another member joins before that is over, an eager " <>
          "`:assignor` lets the whole group stand still until then: give less here, or `:cooperative_sticky`, or a `:group_instance_id`."
    ],
    heartbeat_rate_seconds: [
      type: :pos_integer,
      default: 5,
      doc:
        "`heartbeat.interval.ms`: a third of the session timeout at most. Beyond it the log says so, beyond the half of it it is refused."
    ],
    rebalance_timeout_seconds: [
      type: {:custom, Types, :integer_in, [1, 86_400]},
      type_doc: "`1..86_400`",
      default: 30,
      doc:
        "How long a rebalance waits for a member (`max.poll.interval.ms`). Raised to the session timeout and to " <>
          "`:drain_timeout` plus 10 seconds where it is below them."
    ],
    group_instance_id: [
      type: {:custom, Types, :non_empty_string, []},
      type_doc: "`t:String.t/0`",
      doc:
        "Static membership: the producer's index is put behind it (`\"worker-7-0\"`), one id for each member."
    ],
    rejoin_delay_seconds: [type: :non_neg_integer, doc: "Does nothing here."]
  ]

  @fetch_config [
    min_bytes: [
      type: {:custom, Types, :integer_in, [1, 100_000_000]},
      type_doc: "`1..100_000_000`",
      default: 1,
      doc: "`fetch.min.bytes`."
    ],
    max_bytes: [
      type: {:custom, Types, :integer_in, [1, 1_000_000_000]},
      type_doc: "`1..1_000_000_000`",
      default: 1_048_576,
      doc: "`fetch.message.max.bytes`: for one partition in one answer."
    ],
    max_wait_time: [
      type: {:custom, Types, :integer_in, [1, 300_000]},
      type_doc: "`1..300_000`",
      doc:
        "`fetch.wait.max.ms`: how long a broker with nothing new keeps the question; a partition whose local queue was full when it was asked waits as long. Default 100; with a `Kmq.Sandbox` of " <>
          "this VM 20, because that one is not woken by new messages."
    ]
  ]

  @client_config [
    client_id_prefix: [
      type: {:custom, Types, :text, []},
      type_doc: "`t:String.t/0`",
      default: "",
      doc: "Stands in front of the client id `kmq-<group>`."
    ],
    connect_timeout: [
      type: {:custom, Types, :integer_in, [1_000, 3_600_000]},
      type_doc: "`1_000..3_600_000`",
      doc: "`socket.connection.setup.timeout.ms`."
    ],
    request_timeout: [
      type: {:custom, Types, :integer_in, [1_000, 300_000]},
      type_doc: "`1_000..300_000`",
      doc:
        "`socket.timeout.ms`: how long a broker that stands still is waited for, before its partitions' next leaders are asked. 10,000 by default; " <>
          "librdkafka's 60,000 for a publisher with other `:acks` than `:all`."
    ],
    ssl: [
      type: :any,
      default: false,
      type_doc: "`t:boolean/0` or `t:keyword/0`",
      doc:
        "`true`, or Erlang's `cacertfile, certfile, keyfile, password, verify, server_name_indication: :disable`. Peers and " <>
          "their names are verified unless `verify: :verify_none` is given."
    ],
    sasl: [
      type: :any,
      default: :undefined,
      type_doc: "`t:tuple/0`",
      doc:
        "`{:plain | :scram_sha_256 | :scram_sha_512, user, password}` (the password a string or a function), `{mechanism, file}` with the two " <>
          "on two lines, or `{:oauthbearer, function}`: see [Security](guides/security.md)."
    ],
    query_api_versions: [type: :boolean, doc: "Does nothing here."],
    extra_sock_opts: [
      type: :any,
      type_doc: "`t:list/0`",
      doc: "Does nothing here; IPv6 needs no option."
    ]
  ]

  @connection [
    hosts: [
      type: {:custom, Types, :hosts, []},
      required: true,
      type_doc: "`t:keyword/0`, list or `t:String.t/0`",
      doc:
        "Brokers to ask first: `[localhost: 9092]`, `[{\"kafka-1\", 9092}]`, `\"kafka-1:9092,kafka-2:9092\"`, `\"[::1]:9092\"`."
    ]
  ]

  @client [
    client_config: [
      type: :keyword_list,
      keys: @client_config,
      default: [],
      doc: "Connection, TLS and SASL."
    ],
    kafka_config: [
      type: {:custom, Types, :kafka_config, []},
      default: [],
      type_doc: "`t:keyword/0`",
      doc:
        "Any property of librdkafka, as `[common: [...], consumer: [...], producer: [...], tracker: [...]]`. They come last and " <>
          "win over everything else, except the few on which the guarantees rest: those are refused, naming the option to use. So is what this " <>
          "librdkafka does not know; `\"?name\"` is left out where it does not."
    ]
  ]

  @group @connection ++
           [
             topics: [
               type: {:custom, Types, :topics, []},
               required: true,
               type_doc: "list of `t:String.t/0`",
               doc: "The queue topics to read."
             ],
             group_id: [
               type: {:custom, Types, :non_empty_string, []},
               required: true,
               type_doc: "`t:String.t/0`",
               doc: "The consumer group."
             ],
             delivery: [
               type: {:in, [:markers, :offsets, :at_most_once]},
               default: :markers,
               doc:
                 "`:markers`: each message is acknowledged on its own, and delivered again until it is. `:offsets`: the group's commit follows the " <>
                   "lowest message that is not settled (as broadway_kafka's). `:at_most_once`: committed before it is handed out. " <>
                   "See [Deliveries](delivery.md)."
             ],
             marker_format: [
               type: {:in, [:range, :kmq]},
               default: :range,
               doc:
                 "`:range`: one marker for a batch. `:kmq`: one for each message, in the bytes of softwaremill's kmq."
             ],
             ordering: [
               type: {:in, [:none, :partition, :key]},
               default: :none,
               doc:
                 "`:none`: each message goes to the next free worker. `:partition`: the messages of a partition go to one processor " <>
                   "(and to one consumer of each batcher), one after the other. `:key`: those of a key do; null keys go to any. A revocation " <>
                   "then waits for what is in work, up to `:drain_timeout`. `delivery: :offsets` implies `:partition` where nothing is given."
             ],
             lease: [
               type: {:custom, Types, :integer_from, [1_000]},
               default: 30_000,
               type_doc: "`t:pos_integer/0`",
               doc:
                 "After so many ms the messages of a *dead* consumer come back. A living one renews all it holds."
             ],
             max_processing_time: [
               type: {:custom, Types, :integer_from, [100]},
               default: 300_000,
               type_doc: "`t:pos_integer/0`",
               doc:
                 "How long, in ms, a message may be in work. Then it counts as failed and comes again; a later ack is told so. With " <>
                   "`:offsets` it stays in work, and only an event says that it has held the commit for so long."
             ],
             max_redeliveries: [
               type: :non_neg_integer,
               default: 3,
               doc:
                 "A message is delivered 1 + so many times, then it goes to the dead letter topic."
             ],
             backoff: [
               type: {:custom, Kmq.Backoff, :parse, []},
               default: {:exponential, min: 1_000, max: 300_000, factor: 2, jitter: 0.2},
               type_doc: "`t:Kmq.Backoff.t/0`",
               doc:
                 "The wait before a message comes again that failed, took too long or was lost in a crash."
             ],
             start_ahead: [
               type: :pos_integer,
               default: 2_000,
               doc:
                 "So many messages of a consumer get their START before anyone asks for them. With `:at_most_once`: so many are committed " <>
                   "ahead of their hand-out at most, which a crash loses."
             ],
             ack_flush_interval: [
               type: :non_neg_integer,
               default: 5,
               doc: "ENDs are collected for at most so many ms."
             ],
             commit_interval: [
               type: :pos_integer,
               default: 200,
               doc: "ms between two commits of a consumer."
             ],
             max_in_flight: [
               type: :pos_integer,
               default: 100_000,
               doc:
                 "Handed out and not settled, at most, by partition (with `:at_most_once` what is handed out is settled). Bytes are " <>
                   "bounded by the fetch options."
             ],
             drain_timeout: [
               type: {:custom, Types, :ms_up_to, [3_600_000]},
               default: 30_000,
               type_doc: "`1..3_600_000`",
               doc: "How long, in ms, a stop or the next owner waits for what is in work."
             ],
             offset_reset_policy: [
               type: {:custom, Types, :offset_reset_policy, []},
               default: :earliest,
               type_doc: "`:earliest | :latest | {:timestamp, ms}`",
               doc:
                 "Where the group begins at its very first start. Partitions that are born later begin at 0."
             ],
             begin_offset: [
               type: {:in, [:assigned, :reset]},
               default: :assigned,
               doc:
                 "`:reset`: each member begins at `:offset_reset_policy` where it is given a partition for the first time, whatever was committed."
             ],
             marker_topic: [
               type: {:custom, Types, :topic_or_map, []},
               type_doc: "`t:String.t/0` or map",
               doc:
                 "Default `<topic>__<group>__markers`. A map `%{topic => marker_topic}` for several topics."
             ],
             dead_letter_topic: [
               type: {:custom, Types, :topic_or_map, []},
               type_doc: "`t:String.t/0` or map",
               doc: "Default `<topic>__undelivered`. One for all, or a map."
             ],
             dead_letter_oversize: [
               type: {:in, [:wait, :pointer]},
               default: :wait,
               doc:
                 "What becomes of a message that is too large for the dead letter topic. `:wait`: it waits, with an alarm, until that topic takes it. " <>
                   "`:pointer`: it is written without its value, with headers that say where the original is (`kmq-pointer`) and how large (`kmq-value-bytes`)."
             ],
             redeliver_to: [
               type: {:custom, Types, :topic_or_map, []},
               type_doc: "`t:String.t/0` or map",
               doc:
                 "Where copies for another attempt go: the queue topic itself by default. Another topic must be one of `:topics`. " <>
                   "Needed when the queue topic is compacted."
             ],
             count_header: [
               type: {:custom, Types, :count_header, []},
               default: "kmq-redelivery-count",
               type_doc: "`t:String.t/0`",
               doc: "The header that counts failed attempts."
             ],
             create_topics: [
               type: :boolean,
               default: false,
               doc:
                 "Make marker and dead letter topics that are missing. Otherwise the error prints the command. Without markers a dead " <>
                   "letter topic must be there only where it is needed for certain: for `:reject` as `:on_success` or `:on_failure`, and for `:ttl`."
             ],
             allow_create_time: [
               type: :boolean,
               default: false,
               doc:
                 "Accept a marker topic that is not on `LogAppendTime`; deadlines then hang on the clients' clocks."
             ],
             tracker: [
               type: {:in, [:embedded, :external]},
               default: :embedded,
               doc:
                 "`:embedded` runs a tracker beside the consumers of this VM, where there are markers; `:external` starts none."
             ],
             redelivery: [
               type: {:in, [:idempotent, :transactional]},
               default: :idempotent,
               doc:
                 "How the tracker writes copies. `:idempotent`: a tracker that is killed or cut off repeats at most what it had in flight. " <>
                   "`:transactional`: it repeats nothing, at a price (the guide on the tracker has it); on a real Kafka only. All trackers of a " <>
                   "group should say the same."
             ],
             redelivery_rate: [
               type: :pos_integer,
               default: 10_000,
               doc:
                 "Copies a second of what failed, at most, for each tracker. What was only delayed comes at its time, whatever the rate."
             ],
             trim_markers: [
               type: :boolean,
               default: false,
               doc:
                 "The tracker deletes markers that nobody needs any more (below its own acknowledged commit), a few thousand at once. " <>
                   "Needs the right to delete records of the marker topics. Otherwise they are left to the topics' retention."
             ]
           ] ++ @client

  @dispositions "`:ack`, `:retry`, `{:retry, delay_ms | backoff}`, `:release`, `{:snooze, delay_ms}`, `:reject`, `:discard`, `:noop` or `:manual`; " <>
                  "without markers `:ack`, `:reject` or `:discard`"

  @consumer @group ++
              [
                gauge_interval: [
                  type: {:custom, Types, :integer_in, [0, 86_400_000]},
                  default: 5_000,
                  type_doc: "`0..86_400_000`",
                  doc:
                    "ms between two `[:kmq, :partition]` and `[:kmq, :member]` events of a consumer; 0: none, `Kmq.Telemetry.gauges/0` emits them."
                ],
                isolation_level: [
                  type: {:in, [:read_committed, :read_uncommitted]},
                  default: :read_committed,
                  doc:
                    "Messages of open and aborted transactions are not handed out (`:read_committed`), or handed out like all others."
                ],
                assignor: [
                  type: {:custom, Types, :assignor, []},
                  default: :roundrobin,
                  type_doc: "`:roundrobin`, `:range`, both in a list, or `:cooperative_sticky`",
                  doc:
                    "How the members of the group share its partitions; all must have one in common. `:cooperative_sticky` takes away only what " <>
                      "moves, the rest goes on meanwhile; it needs librdkafka 2.10.1 and goes with no other."
                ],
                filter: [
                  type: {:custom, Types, :filter, []},
                  default: [],
                  type_doc: "`t:keyword/0`",
                  doc:
                    "What this group wants of its topics; the rest counts as done unseen. `tags: [\"vip\", ...]` (one of them), " <>
                      "`headers: [{name, value}, ...]` (all), `routing: [\"orders.*.eu.#\", ...]` (one of these patterns); of several kinds all."
                ],
                ttl: [
                  type: :pos_integer,
                  doc:
                    "Messages that are older than so many ms when their turn comes are not handed out. A message's own `ttl:` counts, too."
                ],
                on_expired: [
                  type: {:in, [:reject, :discard]},
                  default: :reject,
                  doc:
                    "What becomes of these: the dead letter topic, cause `expired`, or nothing."
                ],
                receipt_secret: [
                  type: {:custom, Types, :secret, []},
                  type_doc: "`t:binary/0`",
                  doc: "Signs receipts (`Kmq.receipt/1`); at least 16 bytes."
                ],
                group_config: [
                  type: :keyword_list,
                  keys: @group_config,
                  default: [],
                  doc: "The group protocol."
                ],
                fetch_config: [
                  type: :keyword_list,
                  keys: @fetch_config,
                  default: [],
                  doc: "Reading from the brokers."
                ]
              ]

  @producer @consumer ++
              [
                on_success: [
                  type: {:custom, Types, :disposition, []},
                  default: :ack,
                  type_doc: "disposition",
                  doc: "What becomes of a message that succeeded: " <> @dispositions <> "."
                ],
                on_failure: [
                  type: {:custom, Types, :disposition, []},
                  type_doc: "disposition",
                  doc:
                    "What becomes of a message that failed: the same. `:retry` waits as `:backoff` says. The default is `:retry`; with " <>
                      "`delivery: :offsets` `:reject`, with `:at_most_once` `:discard`."
                ],
                receive_interval: [
                  type: :non_neg_integer,
                  doc: "broadway_kafka's. Does nothing here: messages wake their consumer."
                ],
                reconnect_timeout: [
                  type: :non_neg_integer,
                  doc: "broadway_kafka's. Does nothing here: librdkafka connects again by itself."
                ],
                offset_commit_on_ack: [
                  type: :boolean,
                  doc:
                    "broadway_kafka's. With `delivery: :offsets`, `true`: commits follow `:commit_interval`; `false`: `:offset_commit_interval_seconds` " <>
                      "of `:group_config`, 5 where it is not given. Does nothing with another delivery."
                ],
                shared_client: [type: :boolean, doc: "broadway_kafka's. Does nothing here."]
              ]

  @pull @consumer ++
          [name: [type: :any, type_doc: "any `t:GenServer.name/0`", doc: "The process's name."]]

  @tracker @group ++
             [
               name: [
                 type: :any,
                 type_doc: "any `t:GenServer.name/0`",
                 doc: "The process's name."
               ]
             ]

  @publisher @connection ++
               [
                 name: [
                   type: :any,
                   type_doc: "any `t:GenServer.name/0`",
                   doc: "The process's name."
                 ],
                 partitioner: [
                   type:
                     {:in,
                      [
                        :murmur2_random,
                        :murmur2,
                        :consistent_random,
                        :consistent,
                        :random,
                        :fnv1a_random,
                        :fnv1a
                      ]},
                   default: :murmur2_random,
                   doc: "Which partition a key goes to; the default is what Java clients do."
                 ],
                 acks: [
                   type: {:in, [:all, 1, 0]},
                   default: :all,
                   doc: "Anything but `:all` may lose messages."
                 ],
                 compression: [
                   type: {:in, [:lz4, :none, :gzip, :snappy, :zstd]},
                   default: :lz4,
                   doc: "Of whole batches."
                 ],
                 linger: [
                   type: {:custom, Types, :integer_in, [0, 900_000]},
                   default: 1,
                   type_doc: "`0..900_000`",
                   doc: "ms to wait for more messages before a batch is sent."
                 ],
                 delivery_timeout: [
                   type: {:custom, Types, :integer_in, [1_000, 0x7FFF_FFFF]},
                   default: 120_000,
                   type_doc: "`t:pos_integer/0`",
                   doc:
                     "After so many ms a message that no broker acknowledged is reported as failed."
                 ],
                 queue_bytes: [
                   type: {:custom, Types, :integer_in, [1_024, 0x7FFF_FFFF * 1024]},
                   default: 67_108_864,
                   type_doc: "`t:pos_integer/0`",
                   doc: "Bytes that may wait in this VM for a broker; then publishing waits."
                 ],
                 queue_messages: [
                   type: {:custom, Types, :integer_in, [1, 0x7FFF_FFFF]},
                   type_doc: "`t:pos_integer/0`",
                   default: 200_000,
                   doc: "Messages that may wait in this VM for a broker; then publishing waits."
                 ],
                 receipt_secret: [
                   type: {:custom, Types, :secret, []},
                   type_doc: "`t:binary/0`",
                   doc: "Receipts (`Kmq.settle/3`) must be signed with it."
                 ]
               ] ++ @client

  @publish [
    key: [
      type: {:custom, Types, :binary_or_nil, []},
      type_doc: "`t:binary/0` or `nil`",
      doc: "The partitioner's food. `nil` and `\"\"` differ."
    ],
    headers: [
      type: {:custom, Types, :headers, []},
      default: [],
      type_doc: "list of `{name, value}`",
      doc: "Values may be `nil`. Order and repetitions are kept."
    ],
    partition: [
      type: {:custom, Types, :integer_in, [0, 0x7FFF_FFFF]},
      type_doc: "`t:non_neg_integer/0`",
      doc: "Instead of the partitioner's choice."
    ],
    timestamp: [type: :pos_integer, doc: "ms since 1970; default now."],
    timeout: [
      type: :timeout,
      doc:
        "How long the call may take, in ms: see `Kmq.Publisher`. For `publish_async/4`, how long it may wait for room in the local queue. Without it " <>
          "both wait for what the publisher's `:delivery_timeout` allows."
    ],
    tags: [
      type: {:custom, Types, :tags, []},
      type_doc: "list of `t:String.t/0`",
      doc: "What consumers may filter by, without commas (header `kmq-tags`)."
    ],
    routing_key: [
      type: {:custom, Types, :non_empty_string, []},
      type_doc: "`t:String.t/0`",
      doc: "Words between dots that consumers may filter by (header `kmq-routing-key`)."
    ],
    delay: [
      type: :non_neg_integer,
      doc:
        "Not handed out for so many ms (header `kmq-due`). More than the topic keeps its records is refused."
    ],
    at: [
      type: {:custom, Types, :datetime, []},
      type_doc: "`t:DateTime.t/0`",
      doc: "The same, with the time itself. One that is past means at once."
    ],
    ttl: [
      type: :pos_integer,
      doc:
        "Not handed out any more after so many ms, counted from when it could be (header `kmq-expires`)."
    ]
  ]

  @configure_ack [
    on_success: [type: {:custom, Types, :disposition, []}, doc: "As the producer's."],
    on_failure: [type: {:custom, Types, :disposition, []}, doc: "As the producer's."]
  ]

  @idle ~w(receive_interval reconnect_timeout shared_client)a
  @idle_nested [
    group_config: ~w(rejoin_delay_seconds)a,
    client_config: ~w(query_api_versions extra_sock_opts)a
  ]

  @doc "The schema of `:producer`, `:consumer` (pull), `:tracker`, `:publisher`, `:publish` or `:configure_ack`."
  @spec schema(atom) :: schema
  def schema(:producer), do: @producer
  def schema(:consumer), do: @pull
  def schema(:tracker), do: @tracker
  def schema(:publisher), do: @publisher
  def schema(:publish), do: @publish
  def schema(:configure_ack), do: @configure_ack

  @doc "All options with their defaults, or a sentence that names the option. Also for calls that have a few."
  @spec validate(term, schema | atom) :: {:ok, keyword} | {:error, String.t()}
  def validate(options, kind) when is_atom(kind), do: validate(options, schema(kind))

  def validate(options, schema) when is_list(schema) do
    with :ok <- check_keyword(options, nil, schema), do: validate_keys(options, schema, nil)
  end

  @doc "As `validate/2`; raises `ArgumentError`."
  @spec validate!(term, schema | atom) :: keyword
  def validate!(options, schema) do
    case validate(options, schema) do
      {:ok, options} -> options
      {:error, message} -> raise ArgumentError, message
    end
  end

  @doc "One value, as an option of that type takes it: in its normal form, or what is wrong with it."
  @spec check(term, term) :: {:ok, term} | {:error, String.t()}
  def check(value, type), do: checked(value, type, [], nil)

  @doc "An option of what may be no list of options at all: that is told when the process starts, not when it is specified."
  @spec peek(term, atom) :: term
  def peek(options, name), do: if(Keyword.keyword?(options), do: options[name])

  @doc "Names of the options given that have no meaning here (they are broadway_kafka's)."
  @spec idle(keyword) :: [String.t()]
  def idle(options) do
    top = for name <- @idle, Keyword.has_key?(options, name), do: inspect(name)

    nested =
      for {group, names} <- @idle_nested,
          name <- names,
          Keyword.has_key?(Keyword.get(options, group) || [], name),
          do: "#{inspect(name)} of #{inspect(group)}"

    top ++ nested
  end

  @doc "The options as a Markdown list."
  @spec docs(schema | atom) :: String.t()
  def docs(kind) when is_atom(kind), do: docs(schema(kind))
  def docs(schema), do: schema |> docs_lines("") |> IO.iodata_to_binary()

  defp docs_lines(schema, indent) do
    for {name, spec} <- schema, spec[:doc] != false do
      [
        indent,
        "  * `",
        inspect(name),
        "` (",
        type_doc(spec),
        ") - ",
        required_doc(spec),
        spec[:doc] || "",
        default_doc(spec)
      ] ++
        ["\n\n"] ++ if(spec[:keys], do: docs_lines(spec[:keys], indent <> "    "), else: [])
    end
  end

  defp required_doc(spec), do: if(spec[:required], do: "Required. ", else: "")

  defp default_doc(spec) do
    cond do
      not Keyword.has_key?(spec, :default) or spec[:keys] != nil -> ""
      true -> " The default is `#{inspect(spec[:default])}`."
    end
  end

  defp type_doc(spec) do
    case spec[:type_doc] || spec[:type] do
      text when is_binary(text) -> text
      {:in, values} -> Enum.map_join(values, " or ", &"`#{inspect(&1)}`")
      :keyword_list -> "`t:keyword/0`"
      :string -> "`t:String.t/0`"
      :any -> "any"
      type -> "`t:#{type}/0`"
    end
  end

  # ---- validation

  # Where an option belongs that was given to another: the first that has it.
  @elsewhere [
    producer: "a pipeline's producer (OffBroadway.Kmq.Producer)",
    publisher: "Kmq.Publisher.start_link/1",
    publish: "Kmq.Publisher.publish/4"
  ]

  defp check_keyword(options, parent, schema) do
    if Keyword.keyword?(options),
      do: :ok,
      else:
        {:error,
         "expected #{of(parent, "options")} to be a keyword list#{few(schema)}, got: #{inspect(redact(options))}"}
  end

  # Who has forgotten the name of one of a few options is told it.
  defp few(schema) when length(schema) > 4, do: ""
  defp few(schema), do: " of " <> Enum.map_join(schema, ", ", fn {name, _} -> inspect(name) end)

  defp of(nil, what), do: what
  defp of(parent, _what), do: inspect(parent)

  defp validate_keys(options, schema, parent) do
    with :ok <- known(options, schema, parent), do: each(schema, options, parent, [])
  end

  defp known(options, schema, parent) do
    case Enum.reject(Keyword.keys(options), &Keyword.has_key?(schema, &1)) do
      [] -> :ok
      [name | _] -> {:error, unknown(name, Keyword.keys(schema), parent)}
    end
  end

  defp unknown(name, names, parent) do
    where = if parent, do: " of #{inspect(parent)}", else: ""

    elsewhere =
      for {kind, whose} <- @elsewhere, !parent, Keyword.has_key?(schema(kind), name), do: whose

    hint =
      if elsewhere != [],
        do: "it is one of #{hd(elsewhere)}",
        else:
          meant(name, names) || "known options are: " <> Enum.map_join(names, ", ", &inspect/1)

    "unknown option #{inspect(name)}#{where}, #{hint}"
  end

  @doc """
  The one of these names that a mistyped one is like, as a question; or nil.

      iex> Kmq.Options.meant(:partition, [:partitions, :sandbox])
      "did you mean :partitions?"
      iex> Kmq.Options.meant("ordrs", ["orders", "bills"])
      ~S(did you mean "orders"?)
      iex> Kmq.Options.meant(:x, [:partitions])
      nil
  """
  @spec meant(atom | String.t(), [atom | String.t()]) :: String.t() | nil
  def meant(_name, []), do: nil

  def meant(name, names) do
    {nearest, likeness} =
      names
      |> Enum.map(&{&1, String.jaro_distance(to_string(name), to_string(&1))})
      |> Enum.max_by(&elem(&1, 1))

    if likeness > 0.75, do: "did you mean #{inspect(nearest)}?"
  end

  defp each([], _options, _parent, acc), do: {:ok, Enum.reverse(acc)}

  defp each([{name, spec} | rest], options, parent, acc) do
    case fetch(options, name, spec) do
      {:ok, value} ->
        case checked(value, spec[:type], spec, name) do
          {:ok, value} -> each(rest, options, parent, [{name, value} | acc])
          {:error, message} -> {:error, invalid(name, parent, message)}
          {:nested, message} -> {:error, message}
        end

      :absent ->
        each(rest, options, parent, acc)

      :required ->
        where = if parent, do: " of #{inspect(parent)}", else: ""
        {:error, "required option #{inspect(name)}#{where} is missing"}
    end
  end

  # nil for an option without a default means "not given", so that options can be passed through.
  defp fetch(options, name, spec) do
    case Keyword.fetch(options, name) do
      {:ok, nil} -> if spec[:required], do: :required, else: default(spec)
      {:ok, value} -> {:ok, value}
      :error -> if spec[:required], do: :required, else: default(spec)
    end
  end

  defp default(spec) do
    case Keyword.fetch(spec, :default) do
      {:ok, value} -> {:ok, value}
      :error -> :absent
    end
  end

  defp invalid(name, nil, message), do: "invalid value for #{inspect(name)} option: #{message}"

  defp invalid(name, parent, message),
    do: "invalid value for #{inspect(name)} option of #{inspect(parent)}: #{message}"

  # What goes through a list may then rely on it that it ends. It is not shown: it may hold a password.
  defp checked(value, type, spec, name) do
    if Types.proper?(value),
      do: value(value, type, spec, name),
      else: {:error, "expected lists that end with [], not with something else behind a |"}
  end

  # What no int64 of the native side could hold.
  @integer_max 0x3FFF_FFFF_FFFF_FFFF

  defp value(value, :any, _spec, _name), do: {:ok, value}

  defp value(value, type, _spec, _name)
       when type in [:pos_integer, :non_neg_integer] and is_integer(value) and
              value > @integer_max,
       do: expected("an integer up to #{@integer_max}", value)

  defp value(value, :boolean, _spec, _name) when is_boolean(value), do: {:ok, value}
  defp value(value, :boolean, _spec, _name), do: expected("true or false", value)
  defp value(value, :string, _spec, _name) when is_binary(value), do: {:ok, value}
  defp value(value, :string, _spec, _name), do: expected("a string", value)

  defp value(value, :pos_integer, _spec, _name) when is_integer(value) and value > 0,
    do: {:ok, value}

  defp value(value, :pos_integer, _spec, _name), do: expected("a positive integer", value)

  defp value(value, :non_neg_integer, _spec, _name) when is_integer(value) and value >= 0,
    do: {:ok, value}

  defp value(value, :non_neg_integer, _spec, _name), do: expected("a non-negative integer", value)
  defp value(value, :timeout, _spec, _name), do: Types.timeout(value)

  defp value(value, {:in, values}, _spec, _name) do
    if value in values,
      do: {:ok, value},
      else: expected("one of #{Enum.map_join(values, ", ", &inspect/1)}", value)
  end

  defp value(value, {:custom, module, function, args}, _spec, _name),
    do: apply(module, function, [value | args])

  defp value(value, :keyword_list, spec, name) do
    nested =
      with :ok <- check_keyword(value, name, spec[:keys]),
           do: validate_keys(value, spec[:keys], name)

    with {:error, message} <- nested, do: {:nested, message}
  end

  defp expected(what, value), do: {:error, "expected #{what}, got: #{inspect(value)}"}

  # A wrong list of options may hold a password.
  defp redact(value) when is_list(value), do: :"a list that is not one"
  defp redact(value), do: value
end
