defmodule Kmq.Integration.SecurityTest do
  # TLS, SASL and access control on one broker that has it all; see Kmq.Test.SecuredKafka. The set-up is done on its plain listener,
  # where everybody may do everything.
  use ExUnit.Case

  import ExUnit.CaptureLog
  import Kmq.Test.ClusterCase
  import Kmq.Test.Eventually

  alias Kmq.{Consumer, Publisher, Topics}
  alias Kmq.Test.{Kafka, Relay, Scene, SecuredKafka, VM}

  @moduletag :integration
  @moduletag :secured
  @moduletag :capture_log
  @moduletag timeout: 120_000

  setup_all do
    kafka = start_supervised!(%{id: :kafka, start: {SecuredKafka, :start_link, []}})
    dir = Kafka.dir(kafka)

    %{
      kafka: kafka,
      dir: dir,
      cluster: %{kind: :kafka, hosts: Kafka.bootstrap(kafka)},
      tls: Kafka.listener(kafka, "TLS"),
      mutual: Kafka.listener(kafka, "MUTUAL"),
      sasl: Kafka.listener(kafka, "SASL"),
      ca: Path.join(dir, "ca.pem")
    }
  end

  setup do
    on_exit(&nothing_left/0)
    :ok
  end

  defp check(hosts, client, extra \\ []) do
    Topics.check([hosts: hosts, topics: ["q"], group_id: "g", client_config: client] ++ extra)
  end

  defp client(context, user, mechanism \\ :plain),
    do: SecuredKafka.client(context.dir, user, mechanism)

  defp bearer(context, fun),
    do: [ssl: [cacertfile: context.ca], sasl: {:oauthbearer, fun}]

  # Options of a consumer that comes in by that door.
  defp secured(context, topic, hosts, client, extra \\ []),
    do:
      options(
        context.cluster,
        topic,
        Keyword.merge([hosts: hosts, client_config: client], extra)
      )

  # ---- every door, every part

  test "consumer, publisher, admin calls and tracker by each mechanism", context do
    scram? = scram?()

    doors =
      [
        plain: {context.sasl, client(context, "root")},
        clear: {Kafka.listener(context.kafka, "CLEAR"), [sasl: client(context, "root")[:sasl]]},
        bearer:
          {context.sasl, bearer(context, fn -> {:ok, SecuredKafka.token("root", 60_000)} end)},
        certificate: {context.mutual, [ssl: certificate(context)]}
      ] ++
        if scram? do
          [
            scram_256: {context.sasl, client(context, "root", :scram_sha_256)},
            scram_512: {context.sasl, client(context, "root", :scram_sha_512)}
          ]
        else
          []
        end

    # who shows a certificate is its subject
    :ok = SecuredKafka.allow(context.cluster.hosts, "app", everything())

    running =
      for {name, {hosts, client}} <- doors do
        topic = queue(context.cluster, 1, "door-#{name}")
        consumer = consumer(secured(context, topic, hosts, client))
        {:ok, publisher} = Publisher.start_link(hosts: hosts, client_config: client)
        {:ok, _} = Publisher.publish(publisher, topic, "m")
        {name, topic, consumer, publisher}
      end

    for {name, _topic, consumer, publisher} <- running do
      assert {^name, [message]} = {name, pull(consumer, 1)}
      assert :ok = Kmq.retry(message, delay: 0)

      # that it comes again is the tracker's work: markers read, commits asked, the original read, the copy written
      assert {^name, [%{attempt: 2} = again]} = {name, pull(consumer, 1, 20_000)}
      assert :ok = Kmq.ack(again, sync: true)
      :ok = Publisher.close(publisher)
    end

    :ok = SecuredKafka.forbid(context.cluster.hosts, "app", everything())
  end

  defp everything,
    do: [{:topic, "*", [:all]}, {:group, "*", [:all]}, {:cluster, "kafka-cluster", [:all]}]

  defp certificate(context) do
    [
      cacertfile: context.ca,
      certfile: Path.join(context.dir, "client.pem"),
      keyfile: ~c"#{context.dir}/client.key",
      password: SecuredKafka.key_password()
    ]
  end

  # Older ones send a nonce that brokers from 3.7.2, 3.8.1 and 3.9.0 on refuse.
  defp scram? do
    {version, number} = :kmq_nif.version()

    number >= 0x02060000 ||
      IO.puts("left out: SCRAM (librdkafka #{version}, it works from 2.6.0 on)")

    number >= 0x02060000
  end

  # ---- what is refused, and how it reads

  test "a wrong name, an untrusted certificate, a wrong password: refused at once, in words",
       context do
    by_address = String.replace(context.tls, "localhost", "127.0.0.1")
    ssl = [cacertfile: context.ca]

    assert {:error, error} = check(by_address, ssl: ssl)
    assert {error.reason, error.retriable?} == {:ssl, true}
    assert error.message =~ "#{by_address}: the certificate is for another host than this one"
    assert error.message =~ "server_name_indication: :disable"

    assert {:error, error} =
             check(context.tls, ssl: [cacertfile: Path.join(context.dir, "other-ca.pem")])

    assert error.reason == :ssl

    assert error.message =~
             "#{context.tls}: the certificate is not signed by a CA that is trusted here"

    assert error.message =~ ":cacertfile"

    for mechanism <- [:plain, :scram_sha_512] do
      assert {:error, error} = check(context.sasl, ssl: ssl, sasl: {mechanism, "app", "hunter2"})
      assert error.reason == :authentication
      assert error.message =~ context.sasl
      assert error.message =~ ":sasl of :client_config"
      refute error.message =~ "hunter2"
    end

    # without the check of the name, and without any
    assert {:error, %{reason: :topic_missing}} =
             check(by_address, ssl: [server_name_indication: :disable] ++ ssl)

    assert {:error, %{reason: :topic_missing}} = check(context.tls, ssl: [verify: :verify_none])
  end

  test "a key's wrong password, a certificate that is not shown, TLS where there is none",
       context do
    assert {:error, error} =
             check(context.mutual, ssl: Keyword.put(certificate(context), :password, "hunter2"))

    assert error.message =~ "ssl.key.location"
    refute error.message =~ "hunter2"

    short = [client_config: [ssl: [cacertfile: context.ca]]]
    assert {:error, error} = partitions(context.mutual, short)
    assert error.message =~ "alert"
    assert {:error, error} = partitions(context.tls, [])
    # older libraries add: "connecting to a SSL listener?"
    assert error.reason == :unreachable
    assert {:error, error} = partitions(context.cluster.hosts, short)
    assert error.message =~ "SSL handshake failed"
  end

  # Topics.check/1 waits for 15 s where it may get better.
  defp partitions(hosts, extra) do
    {:ok, %{admin_props: props, bootstrap: bootstrap}} =
      Kmq.Config.connection([hosts: hosts] ++ extra)

    Topics.partitions("q", bootstrap, props, 2_000)
  end

  # ---- rights

  for redelivery <- [:idempotent, :transactional] do
    test "the rights of guides/security.md are enough for each part, and nothing more is asked for, redelivery: #{redelivery}",
         context do
      rights(context, unquote(redelivery))
    end
  end

  defp rights(context, redelivery) do
    topic = queue(context.cluster, 1, "rights")
    group = unique("g")

    [markers, letters] =
      names = [Topics.marker_topic(topic, group), Topics.dead_letter_topic(topic)]

    # by somebody who may
    {:ok, _} = Topics.create(hosts: context.cluster.hosts, topics: [topic], group_id: group)

    grant(context, "sender", [{:topic, topic, [:write]}])

    grant(context, "app", [
      {:topic, topic, [:read]},
      {:topic, markers, [:write]},
      {:topic, letters, [:describe]},
      {:group, group, [:read]}
    ])

    grant(context, "tracker", [
      {:topic, topic, [:read, :write]},
      {:topic, markers, [:read, :write]},
      {:topic, letters, [:write]},
      {:group, group, [:describe]},
      {:group, Kmq.Tracker.tracker_group(group), [:read]}
    ])

    if redelivery == :transactional,
      do:
        grant(context, "tracker", [
          {:transactional_id, Kmq.Tracker.tracker_group(group) <> "/*", [:write, :describe]}
        ])

    plain = [create_topics: false, tracker: :external, max_redeliveries: 1, group_id: group]

    log =
      capture_log(fn ->
        start_supervised!(
          {Kmq.Tracker,
           hosts: context.sasl,
           client_config: client(context, "tracker"),
           topics: [topic],
           group_id: group,
           redelivery: redelivery,
           max_redeliveries: 1}
        )

        consumer = consumer(secured(context, topic, context.sasl, client(context, "app"), plain))

        {:ok, publisher} =
          Publisher.start_link(hosts: context.sasl, client_config: client(context, "sender"))

        {:ok, _} = Publisher.publish_many(publisher, [{topic, "a"}, {topic, "b"}])
        assert [%{attempt: 1}, %{attempt: 1}] = messages = pull(consumer, 2)
        Enum.each(messages, &(:ok = Kmq.retry(&1, delay: 0)))
        assert [%{attempt: 2} = again, %{attempt: 2} = bad] = pull(consumer, 2, 20_000)
        assert :ok = Kmq.ack(again, sync: true)
        assert :ok = Kmq.reject(bad, "no good")
        await_records(context.cluster, letters, 1, 1)
        :ok = Publisher.close(publisher)
      end)

    refute log =~ "AUTHORIZATION"

    # settings are read where that is allowed, and where not that is said
    for name <- [topic, markers],
        do:
          assert(
            log =~
              "the settings of #{inspect(name)} are hidden by the cluster's access control: not checked"
          )

    grant(context, "app", for(name <- [topic | names], do: {:topic, name, [:describe_configs]}))
    options = secured(context, topic, context.sasl, client(context, "app"), plain)
    refute capture_log(fn -> assert {:ok, _} = Topics.check(options) end) =~ "not checked"

    # what is missing is named
    assert {:error, error} =
             Topics.check(Keyword.put(options, :client_config, client(context, "sender")))

    assert error.reason == :topic_authorization_failed
    assert error.message =~ inspect(markers)
    assert error.message =~ "guides/security.md"
  end

  test "without the right on its transactional ids a tracker says which, copies nothing otherwise, and goes on when it has it",
       context do
    topic = queue(context.cluster, 1, "ids")
    group = unique("g")
    {:ok, _} = Topics.create(hosts: context.cluster.hosts, topics: [topic], group_id: group)
    tracker_group = Kmq.Tracker.tracker_group(group)

    grant(context, "tracker", [
      {:topic, topic, [:read, :write]},
      {:topic, Topics.marker_topic(topic, group), [:read, :write]},
      {:topic, Topics.dead_letter_topic(topic), [:write]},
      {:group, group, [:describe]},
      {:group, tracker_group, [:read]}
    ])

    Scene.listen()

    start_supervised!(
      {Kmq.Tracker,
       hosts: context.sasl,
       client_config: client(context, "tracker"),
       topics: [topic],
       group_id: group,
       redelivery: :transactional}
    )

    consumer = consumer(options(context.cluster, topic, group_id: group, tracker: :external))
    publish(context.cluster, topic, ["one"])
    [message] = pull(consumer, 1, 30_000)
    assert Kmq.retry(message, delay: 0, sync: true) == :ok

    assert_receive {[:kmq, :error], _, %{alarm: :transaction, error: %{message: text}}},
                   scaled(30_000)

    assert text =~ "nothing is redelivered"

    assert text =~
             "grant WRITE and DESCRIBE on transactional ids with the prefix #{tracker_group}/"

    assert [%{value: "one"}] = records(context.cluster, topic, 1)

    grant(context, "tracker", [{:transactional_id, tracker_group <> "/*", [:write, :describe]}])
    assert [%{value: "one", attempt: 2} = again] = pull(consumer, 1, 60_000)
    assert Kmq.ack(again, sync: true) == :ok
  end

  test "the rights for making topics, for growing them, and for dead letters", context do
    topic = queue(context.cluster, 1, "make")
    group = unique("g")
    [markers, letters] = [Topics.marker_topic(topic, group), Topics.dead_letter_topic(topic)]
    client = client(context, "app")
    options = [hosts: context.sasl, client_config: client, topics: [topic], group_id: group]
    grant(context, "app", [{:topic, topic, [:read]}])
    assert {:error, %{reason: :topic_authorization_failed}} = Topics.create(options)

    grant(
      context,
      "app",
      for(name <- [markers, letters], do: {:topic, name, [:create, :describe]})
    )

    assert {:ok, %{^topic => 1}} = Topics.create(options)

    # Q grows, M with it
    {:ok, admin} = Kmq.Security.admin_open([{"bootstrap.servers", context.cluster.hosts}], 5_000)
    :ok = :kmq_nif.admin_create_partitions(admin, topic, 2, 15_000)
    :kmq_nif.admin_close(admin)
    eventually(fn -> assert Kafka.partitions(context.cluster.hosts, topic) == 2 end)
    assert {:error, _} = Topics.create(options)
    grant(context, "app", for(name <- [markers, letters], do: {:topic, name, [:alter]}))
    eventually(fn -> assert {:ok, %{^topic => 2}} = Topics.create(options) end)

    publish(context.cluster, letters, [{"dead", headers: [{"kmq-cause", "rejected"}]}])
    connection = [hosts: context.sasl, client_config: client]

    grant(context, "app", [
      {:topic, letters, [:read]},
      {:topic, topic, [:write]},
      {:group, letters <> "__redrive", [:read]}
    ])

    assert [%{value: "dead"}] = topic |> Kmq.DeadLetters.stream(connection) |> Enum.to_list()
    assert {:ok, %{redriven: 1}} = Kmq.DeadLetters.redrive(topic, connection)
  end

  # Taken away again at the end of the test.
  defp grant(context, user, grants) do
    :ok = SecuredKafka.allow(context.cluster.hosts, user, grants)
    on_exit(fn -> SecuredKafka.forbid(context.cluster.hosts, user, grants) end)
  end

  test "WRITE on a marker topic taken away: no hand-out, no commit, one event, the other topic goes on; given back: so does this",
       context do
    [a, b] = topics = for name <- ["take-a", "take-b"], do: queue(context.cluster, 2, name)
    group = unique("g")
    {:ok, _} = Topics.create(hosts: context.cluster.hosts, topics: topics, group_id: group)
    write = [{:topic, Topics.marker_topic(a, group), [:write]}]

    grant(context, "app", [
      {:topic, Topics.marker_topic(b, group), [:write]},
      {:topic, "take-*", [:describe]},
      {:topic, a, [:read]},
      {:topic, b, [:read]},
      {:group, group, [:read]}
    ])

    grant(context, "app", write)

    options =
      secured(context, topics, context.sasl, client(context, "app"),
        create_topics: false,
        tracker: :external,
        group_id: group,
        kafka_config: [producer: ["topic.metadata.refresh.interval.ms": 1_000]]
      )

    consumer = consumer(options)

    put = fn values ->
      for t <- topics,
          do: publish(context.cluster, t, for(v <- values, p <- 0..1, do: {v, partition: p}))
    end

    put.(["1", "2"])
    assert 8 = consumer |> pull(8) |> Enum.map(&(:ok = Kmq.ack(&1, sync: true))) |> length()

    both = fn topic -> committed(context.cluster, group, topic, 2) end
    eventually(fn -> assert {both.(a), both.(b)} == {[{0, 2}, {1, 2}], [{0, 2}, {1, 2}]} end)

    Scene.listen()
    :ok = SecuredKafka.forbid(context.cluster.hosts, "app", write)
    put.(["3"])
    # the other topic goes on, and its acks are written
    assert ["3", "3"] = took = pull_acked(consumer, 2)
    put.(["4"])
    assert took ++ pull_acked(consumer, 2) == ["3", "3", "4", "4"]

    assert_receive {[:kmq, :error], _,
                    %{error: %{message: "markers are not written to " <> what}}},
                   scaled(20_000)

    assert what =~
             ~r/^#{a}__#{group}__markers-\d: .*AUTHORIZATION_FAILED.*Grant WRITE on the marker topic/

    eventually(fn -> assert both.(b) == [{0, 4}, {1, 4}] end)
    assert Consumer.pull(consumer, wait: 1_500) == []
    assert both.(a) == [{0, 2}, {1, 2}]
    handle = :sys.get_state(consumer).handle.pid

    :ok = SecuredKafka.allow(context.cluster.hosts, "app", write)
    assert pull_acked(consumer, 4, 30_000) == ["3", "3", "4", "4"]
    assert_receive {[:kmq, :recovered], _, %{what: :markers, topic: topic}}, scaled(20_000)
    assert topic == Topics.marker_topic(a, group)
    eventually(fn -> assert both.(a) == [{0, 4}, {1, 4}] end)
    # nothing was restarted, and it was said once
    assert :sys.get_state(consumer).handle.pid == handle
    refute_received {[:kmq, :error], _, %{error: %{message: "markers are not written" <> _}}}
  end

  defp pull_acked(consumer, n, timeout \\ 20_000) do
    for message <- pull(consumer, n, timeout) do
      :ok = Kmq.ack(message, sync: true)
      message.value
    end
    |> Enum.sort()
  end

  test "READ on the group, then on a queue topic taken away: told once each, and it goes on when it may",
       context do
    [a, b] = topics = for name <- ["read-a", "read-b"], do: queue(context.cluster, 1, name)
    group = unique("g")
    {:ok, _} = Topics.create(hosts: context.cluster.hosts, topics: topics, group_id: group)
    read_group = [{:group, group, [:read]}]
    read_a = [{:topic, a, [:read]}]
    grant(context, "app", [{:topic, b, [:read]}, {:topic, "read-*", [:describe]}])
    grant(context, "app", for(t <- topics, do: {:topic, Topics.marker_topic(t, group), [:write]}))
    grant(context, "app", read_group)
    grant(context, "app", read_a)

    options =
      secured(context, topics, context.sasl, client(context, "app"),
        create_topics: false,
        tracker: :external,
        group_id: group
      )

    consumer = consumer(options)
    put = fn topic, value -> publish(context.cluster, topic, [value]) end
    put.(a, "1")
    assert pull_acked(consumer, 1) == ["1"]
    Scene.listen()

    :ok = SecuredKafka.forbid(context.cluster.hosts, "app", read_group)
    put.(b, "2")

    assert_receive {[:kmq, :error], _, %{error: %{name: "GROUP_AUTHORIZATION_FAILED"} = error}},
                   scaled(30_000)

    assert error.message =~ "User:app needs READ on that group"
    :ok = SecuredKafka.allow(context.cluster.hosts, "app", read_group)
    put.(b, "3")
    # what was handed out in between may have stayed uncommitted, and come again
    assert "3" in (consumer
                   |> pull_until(&Enum.any?(&1, fn m -> m.value == "3" end), 40_000)
                   |> Enum.map(&{Kmq.ack(&1), &1.value})
                   |> Enum.map(&elem(&1, 1)))

    :ok = SecuredKafka.forbid(context.cluster.hosts, "app", read_a)
    put.(a, "4")

    assert_receive {[:kmq, :error], _, %{error: %{name: "TOPIC_AUTHORIZATION_FAILED"} = error}},
                   scaled(40_000)

    assert error.message =~ "needs READ on the topic"
    put.(b, "5")
    assert pull_acked(consumer, 1, 30_000) == ["5"]
    :ok = SecuredKafka.allow(context.cluster.hosts, "app", read_a)
    assert pull_acked(consumer, 1, 60_000) == ["4"]

    refute_received {[:kmq, :error], _,
                     %{error: %{name: "GROUP_AUTHORIZATION_FAILED", message: "no right" <> _}}}
  end

  # ---- tokens

  test "short-lived tokens: renewed in time for all clients by one call; a function that fails is said once, and all go on",
       context do
    test = self()
    mode = start_supervised!({Agent, fn -> :good end})

    fun = fn ->
      send(test, :asked)

      if Agent.get(mode, & &1) == :good,
        do: {:ok, SecuredKafka.token("root", 4_000)},
        else: raise("hunter2")
    end

    topic = queue(context.cluster, 1, "bearer")
    client = bearer(context, fun)
    consumer = consumer(secured(context, topic, context.sasl, client))
    {:ok, publisher} = Publisher.start_link(hosts: context.sasl, client_config: client)

    turn = fn value ->
      {:ok, _} = Publisher.publish(publisher, topic, value)
      assert [%{value: ^value} = message] = pull(consumer, 1, 20_000)
      :ok = Kmq.retry(message, delay: 0)
      assert [%{value: ^value, attempt: 2} = again] = pull(consumer, 1, 20_000)
      :ok = Kmq.ack(again, sync: true)
    end

    # over two lives: the broker closes connections whose token has ended
    began = System.monotonic_time(:millisecond)

    log =
      capture_log(fn ->
        turn.("1")
        eventually(fn -> assert System.monotonic_time(:millisecond) - began > 7_000 end, 8_000)
        turn.("2")
      end)

    refute log =~ "no OAUTHBEARER token"
    asked = received(:asked)

    # consumer, marker producer, publisher, admin calls and the tracker's eight or so clients share it: one each 2.8 s or later
    assert asked <= div(System.monotonic_time(:millisecond) - began, 2_800) + 2

    log =
      capture_log(fn ->
        Agent.update(mode, fn _ -> :bad end)
        eventually(fn -> assert received(:asked) > 0 end)
        # until what they have is over
        ends = System.monotonic_time(:millisecond) + 4_500
        eventually(fn -> assert System.monotonic_time(:millisecond) > ends end, 6_000)
        Agent.update(mode, fn _ -> :good end)
        turn.("3")
      end)

    assert length(
             Regex.scan(
               ~r/no OAUTHBEARER token from the function of :sasl: it raised RuntimeError/,
               log
             )
           ) == 1

    refute log =~ "hunter2"
    :ok = Publisher.close(publisher)
  end

  defp received(message) do
    receive do
      ^message -> 1 + received(message)
    after
      0 -> 0
    end
  end

  test "the daemon takes its token from a file, waits for one, and shows no secret", context do
    dir = folder()
    file = Path.join(dir, "token")
    topic = queue(context.cluster, 1, "daemon")
    group = unique("g")
    {:ok, _} = Topics.create(hosts: context.cluster.hosts, topics: [topic], group_id: group)
    File.write!(file, "")

    conf = """
    group = #{group}
    queue = #{topic}
    log_level = 7
    token_file = #{file}
    kafka.bootstrap.servers = #{context.sasl}
    kafka.security.protocol = SASL_SSL
    kafka.ssl.ca.location = #{context.ca}
    kafka.sasl.mechanism = OAUTHBEARER
    kafka.sasl.password = env:KMQ_TEST_PASSWORD
    """

    %{log: log, pid: pid} = daemon = daemon(dir, conf, [{"KMQ_TEST_PASSWORD", "hunter2"}])
    eventually(fn -> assert File.read!(log) =~ "token_file: #{file}: is empty" end)
    token = SecuredKafka.token("root", 60_000)
    File.write!(file, token <> "\n")

    # clear, so that only the daemon's way in matters
    options = options(context.cluster, topic, group_id: group, tracker: :external)
    consumer = consumer(options)
    publish(context.cluster, topic, ["m"])
    assert [message] = pull(consumer, 1)
    :ok = Kmq.retry(message, delay: 0)
    assert [%{attempt: 2} = again] = pull(consumer, 1, 30_000)
    :ok = Kmq.ack(again, sync: true)

    shown = File.read!(log) <> File.read!("/proc/#{pid}/cmdline")
    for secret <- [token, "hunter2"], do: refute(shown =~ secret)
    term(daemon)
  end

  # ---- secrets

  test "no secret in a log, an inspect, a status, a crash report, an argument or an environment",
       context do
    secrets = [SecuredKafka.password("root"), SecuredKafka.key_password(), "receipts-hunter2"]
    :ok = SecuredKafka.allow(context.cluster.hosts, "app", everything())
    topic = queue(context.cluster, 1, "secret")
    level = Logger.level()
    Logger.configure(level: :debug)
    on_exit(fn -> Logger.configure(level: level) end)

    # all of librdkafka's own words, too
    debug = [common: [debug: "all"]]

    options =
      secured(context, topic, context.sasl, client(context, "root"),
        kafka_config: debug,
        receipt_secret: "receipts-hunter2"
      )

    mutual = [
      hosts: context.mutual,
      client_config: [ssl: certificate(context)],
      kafka_config: debug
    ]

    log =
      capture_log([level: :debug], fn ->
        Process.flag(:trap_exit, true)
        {:ok, supervisor} = Supervisor.start_link([], strategy: :one_for_one)
        # the options as a user writes them
        {:ok, consumer} = Supervisor.start_child(supervisor, {Consumer, options})
        {:ok, publisher} = Supervisor.start_child(supervisor, {Publisher, mutual})
        {:ok, _} = Publisher.publish(publisher, topic, "m")
        assert [message] = pull(consumer, 1)
        :ok = Kmq.retry(message, delay: 0)
        assert [again] = pull(consumer, 1, 20_000)
        assert Kmq.receipt(again) =~ "kmq1."
        :ok = Kmq.ack(again, sync: true)

        state = :sys.get_state(consumer)
        [{handle, _}] = Registry.lookup(Kmq.Registry, {:handle, state.key})

        trackers =
          for {_, pid, _, _} <- DynamicSupervisor.which_children(Kmq.TrackerSupervisor), do: pid

        assert trackers != []

        for pid <- [supervisor, consumer, publisher, handle | trackers] do
          clean(secrets, :sys.get_status(pid))
          clean(secrets, :sys.get_state(pid))
          clean(secrets, Process.info(pid))
        end

        clean(secrets, :ets.tab2list(Kmq.Registry))
        clean(secrets, Supervisor.which_children(supervisor))
        {:ok, spec} = :supervisor.get_childspec(supervisor, Consumer)
        clean(secrets, spec)

        for {os_pid, "kmq_tracker"} <- VM.port_programs(), of <- ["cmdline", "environ"] do
          clean(secrets, File.read!("/proc/#{os_pid}/#{of}"))
        end

        # crash reports with the states that they had, and supervisors' reports: each by what it cannot take
        [tracker] = trackers
        port = :sys.get_state(tracker).port

        for {pid, blow} <- [
              {consumer, fn -> GenServer.call(consumer, {:pull, :many, 0}) end},
              {tracker, fn -> send(tracker, {port, {:data, "no frame"}}) end},
              {handle, fn -> GenServer.call(handle, {:retry, [], :nonsense, nil}) end},
              {publisher, fn -> send(publisher, {:kmq_token, :publisher, :no_token}) end}
            ] do
          monitor = Process.monitor(pid)
          send(pid, {:unknown, self()})

          try do
            blow.()
          catch
            :exit, _ -> :ok
          end

          assert_receive {:DOWN, ^monitor, _, _, reason}, scaled(20_000)
          clean(secrets, reason)
        end

        # wrong ones
        assert {:error, error} =
                 Consumer.start_link(
                   Keyword.put(options, :client_config,
                     sasl: {:plain, "root", "receipts-hunter2"},
                     ssl: [cacertfile: context.ca]
                   )
                 )

        clean(secrets, error)

        for bad <- ["a\0hunter2", fn -> raise "receipts-hunter2" end] do
          broken =
            Keyword.put(options, :client_config,
              sasl: {:plain, "root", bad},
              ssl: [cacertfile: context.ca]
            )

          assert {:error, raised} = error_of(fn -> Consumer.start_link(broken) end)
          clean(["hunter2" | secrets], raised)
        end

        Supervisor.stop(supervisor)
      end)

    clean(["a\0hunter2" | secrets], log)
    # what was looked through was worth it
    assert log =~ "librdkafka"
    assert log =~ "sasl.password"
    assert length(Regex.scan(~r/ terminating/, log)) >= 4
    :ok = SecuredKafka.forbid(context.cluster.hosts, "app", everything())
  end

  # As Elixir prints it, as Erlang does, and the bytes as they are.
  defp clean(secrets, term) do
    texts =
      if is_binary(term) do
        [term]
      else
        [
          inspect(term, limit: :infinity, printable_limit: :infinity, structs: false),
          inspect(term, limit: :infinity, printable_limit: :infinity),
          :io_lib.format("~p ~w", [term, term]) |> IO.iodata_to_binary()
        ]
      end

    for secret <- secrets, text <- texts do
      if String.contains?(text, secret) do
        {at, _} = :binary.match(text, secret)
        flunk("a secret in: ..." <> binary_part(text, max(at - 300, 0), min(at, 300)) <> "<here>")
      end
    end
  end

  defp error_of(fun) do
    case fun.() do
      {:error, _} = error -> error
    end
  rescue
    error -> {:error, {error, __STACKTRACE__}}
  catch
    :exit, reason -> {:error, reason}
  end

  # ---- addresses

  @six SecuredKafka.six?()
  unless @six, do: @tag(skip: "this machine has no ::1")

  test "a broker over ::1", context do
    address = Kafka.listener(context.kafka, "SIX")
    "[::1]:" <> port = address
    topic = queue(context.cluster, 1, "six")

    for hosts <- [
          address,
          [{"::1", String.to_integer(port)}],
          [{{0, 0, 0, 0, 0, 0, 0, 1}, String.to_integer(port)}]
        ] do
      assert {:error, %{reason: :marker_topic_missing}} =
               Topics.check(hosts: hosts, topics: [topic], group_id: unique("g"))
    end

    consumer = consumer(options(context.cluster, topic, hosts: address))
    {:ok, publisher} = Publisher.start_link(hosts: address)
    {:ok, _} = Publisher.publish(publisher, topic, "m")
    assert [message] = pull(consumer, 1)
    :ok = Kmq.ack(message, sync: true)
    :ok = Publisher.close(publisher)
  end

  # The name is resolved by a library of the test's own, loaded into the daemon.
  test "a broker that moved to another address under the same name is found there", context do
    "moving.test:" <> port = hosts = Kafka.listener(context.kafka, "MOVES")
    "127.0.0.1:" <> real = Kafka.listens_at(context.kafka, "MOVES")
    {port, to} = {String.to_integer(port), {{127, 0, 0, 1}, String.to_integer(real)}}
    dir = folder()
    [library, address] = for name <- ["moving.so", "address"], do: Path.join(dir, name)
    source = Path.expand("../support/moving/moving.c", __DIR__)

    {_, 0} =
      System.cmd("cc", ["-shared", "-fPIC", "-o", library, source, "-ldl"], stderr_to_stdout: true)

    topic = queue(context.cluster, 1, "moves")
    options = options(context.cluster, topic, tracker: :external)
    {:ok, _} = Topics.create(Keyword.take(options, [:hosts, :topics, :group_id]))
    consumer = consumer(options)
    move = fn ip -> File.write!(address, ip <> "\n") end

    move.("127.0.0.2")
    old = Relay.start({{127, 0, 0, 2}, port}, to)

    daemon =
      daemon(
        dir,
        "group = #{options[:group_id]}\nqueue = #{topic}\nkafka.bootstrap.servers = #{hosts}\n",
        [
          {"LD_PRELOAD", library},
          {"KMQ_TEST_ADDRESS", address}
        ]
      )

    again = fn value ->
      publish(context.cluster, topic, [value])
      assert [%{value: ^value} = message] = pull(consumer, 1)
      :ok = Kmq.retry(message, delay: 0)
      assert [%{value: ^value, attempt: 2} = message] = pull(consumer, 1, 40_000)
      :ok = Kmq.ack(message, sync: true)
    end

    again.("here")
    move.("127.0.0.3")
    Relay.stop(old)
    new = Relay.start({{127, 0, 0, 3}, port}, to)
    again.("there")
    term(daemon)
    Relay.stop(new)
  end

  defp folder do
    dir = Path.join(System.tmp_dir!(), unique("kmq-security"))
    File.mkdir_p!(dir)
    on_exit(fn -> File.rm_rf!(dir) end)
    dir
  end

  # kmq_tracker by itself, ended with this VM at the latest.
  defp daemon(dir, conf, env) do
    [file, log] = for name <- ["conf", "log"], do: Path.join(dir, name)
    File.write!(file, conf)
    File.write!(log, "")
    script = ~S("$0" --config "$1" </dev/null >"$2" 2>&1 & echo $!; cat; kill $! 2>/dev/null)

    port =
      Port.open({:spawn_executable, "/bin/sh"}, [
        :binary,
        line: 100,
        env: for({name, value} <- env, do: {to_charlist(name), to_charlist(value)}),
        args: ["-c", script, to_string(:kmq_port.program(~c"kmq_tracker")), file, log]
      ])

    assert_receive {^port, {:data, {:eol, pid}}}, scaled(5_000)
    on_exit(fn -> System.cmd("kill", ["-KILL", pid], stderr_to_stdout: true) end)
    %{port: port, pid: pid, log: log}
  end

  defp term(%{pid: pid, port: port}) do
    System.cmd("kill", ["-TERM", pid])
    eventually(fn -> not VM.os_alive?(String.to_integer(pid)) end)
    Port.close(port)
  end

  test "a name with a dot at its end is the same host, or refused by its name", context do
    dotted = String.replace(context.tls, "localhost", "localhost.")

    {:ok, %{admin_props: props, bootstrap: bootstrap}} =
      Kmq.Config.connection(hosts: dotted, client_config: [ssl: [cacertfile: context.ca]])

    case Topics.partitions("q", bootstrap, props, 3_000) do
      {:ok, 0} -> :ok
      {:error, error} -> assert error.message =~ "localhost."
    end
  end
end
