defmodule Kmq.Integration.SecurityTest do
  # TLS, SASL and access control on one broker that has it all; see Kmq.Test.SecuredKafka. The set-up is done on its plain listener,
  # where everybody may do everything.
  use ExUnit.Case

  import ExUnit.CaptureLog
  import Kmq.Test.ClusterCase
  import Kmq.Test.Eventually

  alias Kmq.{Consumer, Publisher, Topics}
  alias Kmq.Test.{Kafka, Scene, SecuredKafka}

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
    assert error.message =~ "connecting to a SSL listener?"
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

  test "the rights of guides/security.md are enough for each part, and nothing more is asked for",
       context do
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

    plain = [create_topics: false, tracker: :external, max_redeliveries: 1, group_id: group]

    log =
      capture_log(fn ->
        start_supervised!(
          {Kmq.Tracker,
           hosts: context.sasl,
           client_config: client(context, "tracker"),
           topics: [topic],
           group_id: group,
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
end
