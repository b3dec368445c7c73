defmodule Kmq.Integration.SecurityTest do
  # TLS, SASL and access control on one broker that has it all; see Kmq.Test.SecuredKafka. The set-up is done on its plain listener,
  # where everybody may do everything.
  use ExUnit.Case

  import Kmq.Test.ClusterCase

  alias Kmq.{Publisher, Topics}
  alias Kmq.Test.{Kafka, SecuredKafka}

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
end
