defmodule Kmq.Test.SecuredKafka do
  @moduledoc false
  # One broker that has it all: TLS with a CA made for the test, SASL (PLAIN, SCRAM, OAUTHBEARER), access control lists.
  #
  #   plain      PLAINTEXT, 127.0.0.1     for the tests' own set-up: who comes here may do everything
  #   TLS        SSL, "localhost"         anybody; who shows no certificate may do everything
  #   MUTUAL     SSL, "localhost"         asks for the client's certificate
  #   SASL       SASL_SSL, "localhost"    all mechanisms; users, passwords: user/1
  #   CLEAR      SASL_PLAINTEXT           the same without TLS
  #   MOVES      PLAINTEXT                says that it is at a port of "moving.test": a name of test/support/moving, where the test's relay listens
  #   SIX        PLAINTEXT, [::1]         where the machine has that address
  #
  # Users may do what acl/3 grants and nothing else. "root" may do everything.
  #
  # The folder of a node holds: ca.pem, other-ca.pem, client.pem, client.key (encrypted; key_password/0).

  alias Kmq.Test.Kafka

  @users ~w(root app tracker sender)
  @key_password "key-Passw0rd-7"

  @doc "`:ok`, or `{:missing, why}`."
  def available do
    cond do
      System.find_executable("openssl") == nil ->
        {:missing, "no openssl; `make setup-test` installs it"}

      System.get_env("KMQ_KAFKA") && not File.exists?(Path.join(Kafka.jars(), "pom.xml")) ->
        {:missing, "no Kafka of our own in #{Kafka.jars()}"}

      true ->
        Kafka.available()
    end
  end

  @doc "Starts the broker, linked to the caller."
  def start_link do
    Kafka.start(
      prepare: &certificates/1,
      listeners: listeners(),
      format: Enum.flat_map(@users, &scram/1),
      config: config()
    )
  end

  @doc "A user's password; it stands in no log, ever."
  def password(user), do: "#{user}-Passw0rd-7"
  def key_password, do: @key_password

  @doc "`client_config` of a user: mechanism and password over TLS."
  def client(dir, user, mechanism \\ :scram_sha_256) do
    [ssl: [cacertfile: Path.join(dir, "ca.pem")], sasl: {mechanism, user, password(user)}]
  end

  @doc "Whether this machine has ::1."
  def six? do
    case :gen_tcp.listen(0, [:inet6, ip: {0, 0, 0, 0, 0, 0, 0, 1}]) do
      {:ok, socket} -> :gen_tcp.close(socket) == :ok
      {:error, _} -> false
    end
  end

  defp listeners do
    [
      {"TLS", "SSL", "127.0.0.1", "localhost"},
      {"MUTUAL", "SSL", "127.0.0.1", "localhost"},
      {"SASL", "SASL_SSL", "127.0.0.1", "localhost"},
      {"CLEAR", "SASL_PLAINTEXT", "127.0.0.1", "localhost"},
      {"MOVES", "PLAINTEXT", "127.0.0.1", "moving.test:#{moving_port()}"}
    ] ++ if(six?(), do: [{"SIX", "PLAINTEXT", "[::1]", "[::1]"}], else: [])
  end

  defp moving_port do
    {:ok, socket} = :gen_tcp.listen(0, ip: {127, 0, 0, 1})
    {:ok, port} = :inet.port(socket)
    :gen_tcp.close(socket)
    port
  end

  defp scram(user) do
    for mechanism <- ["SCRAM-SHA-256", "SCRAM-SHA-512"],
        text <- ["--add-scram", "#{mechanism}=[name=#{user},password=#{password(user)}]"],
        do: text
  end

  defp config do
    plain =
      "org.apache.kafka.common.security.plain.PlainLoginModule required username=\"root\" password=\"#{password("root")}\" " <>
        Enum.map_join(@users, " ", &"user_#{&1}=\"#{password(&1)}\"") <> ";"

    bearer =
      "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub=\"root\";"

    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"

    sasl =
      for name <- ["sasl", "clear"], into: %{} do
        {"listener.name.#{name}.sasl.enabled.mechanisms",
         "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER"}
      end

    modules =
      for name <- ["sasl", "clear"],
          {mechanism, module} <- [
            {"plain", plain},
            {"scram-sha-256", scram},
            {"scram-sha-512", scram},
            {"oauthbearer", bearer}
          ],
          into: %{},
          do: {"listener.name.#{name}.#{mechanism}.sasl.jaas.config", module}

    %{
      "authorizer.class.name" => "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
      "super.users" => "User:ANONYMOUS;User:root",
      "allow.everyone.if.no.acl.found" => "false",
      "ssl.keystore.type" => "PEM",
      "ssl.keystore.location" => "broker.pem",
      "ssl.truststore.type" => "PEM",
      "ssl.truststore.location" => "ca.pem",
      "listener.name.mutual.ssl.client.auth" => "required",
      "ssl.principal.mapping.rules" => "RULE:^CN=([^,]*).*$/$1/,DEFAULT",
      # a connection whose token has expired is closed, not only refused when it is new
      "listener.name.sasl.oauthbearer.connections.max.reauth.ms" => "3600000",
      "broker.session.timeout.ms" => 30_000
    }
    |> Map.merge(sasl)
    |> Map.merge(modules)
  end

  ## Certificates

  defp certificates(dir) do
    ca(dir, "ca")
    ca(dir, "other-ca")
    signed(dir, "broker", "broker", "subjectAltName=DNS:localhost")
    signed(dir, "client", "app", "extendedKeyUsage=clientAuth")

    File.write!(
      Path.join(dir, "broker.pem"),
      File.read!(Path.join(dir, "broker.key")) <> File.read!(Path.join(dir, "broker.crt"))
    )

    File.rename!(Path.join(dir, "client.crt"), Path.join(dir, "client.pem"))
    clear = Path.join(dir, "client.clear")
    File.rename!(Path.join(dir, "client.key"), clear)

    openssl(
      dir,
      ~w(pkcs8 -topk8 -v2 aes256 -in client.clear -out client.key -passout pass:#{@key_password})
    )
  end

  defp ca(dir, name) do
    openssl(
      dir,
      ~w(req -x509 -newkey rsa:2048 -nodes -days 30 -subj /CN=#{name} -keyout #{name}.key -out #{name}.pem)
    )
  end

  defp signed(dir, name, subject, extension) do
    File.write!(Path.join(dir, "#{name}.ext"), extension <> "\n")

    openssl(
      dir,
      ~w(req -newkey rsa:2048 -nodes -subj /CN=#{subject} -keyout #{name}.key -out #{name}.csr)
    )

    openssl(
      dir,
      ~w(x509 -req -in #{name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -extfile #{name}.ext -out #{name}.crt)
    )
  end

  defp openssl(dir, args) do
    case System.cmd("openssl", args, cd: dir, stderr_to_stdout: true) do
      {_, 0} -> :ok
      {text, _} -> raise "openssl #{hd(args)}: #{text}"
    end
  end

  ## Access control, in Kafka's own bytes

  @resources %{topic: 2, group: 3, cluster: 4, transactional_id: 5}
  @operations %{
    all: 2,
    read: 3,
    write: 4,
    create: 5,
    delete: 6,
    alter: 7,
    describe: 8,
    cluster_action: 9,
    describe_configs: 10,
    alter_configs: 11,
    idempotent_write: 12
  }

  @doc "Grants: `[{:topic | :group | :cluster | :transactional_id, name, [operation]}]`; a name that ends in * is a prefix."
  def allow(bootstrap, user, grants) do
    entries = entries(user, grants)

    {:ok, <<_throttle::32, n::32, rest::binary>>} =
      Kafka.request(bootstrap, 30, 1, [<<length(entries)::32>>, entries])

    # each: error code 0 and a text
    true = n == length(entries) and accepted?(rest)
    :ok
  end

  defp accepted?(""), do: true
  defp accepted?(<<0::16, -1::signed-16, rest::binary>>), do: accepted?(rest)
  defp accepted?(<<0::16, n::16, _::binary-size(n), rest::binary>>), do: accepted?(rest)
  defp accepted?(_refused), do: false

  @doc "Takes the same away again."
  def forbid(bootstrap, user, grants) do
    entries = entries(user, grants)

    {:ok, <<_throttle::32, _n::32, 0::16, _rest::binary>>} =
      Kafka.request(bootstrap, 31, 1, [<<length(entries)::32>>, entries])

    :ok
  end

  defp entries(user, grants) do
    for {resource, name, operations} <- grants, operation <- operations do
      {name, pattern} =
        if name != "*" and String.ends_with?(name, "*"),
          do: {String.trim_trailing(name, "*"), 4},
          else: {name, 3}

      [
        <<@resources[resource]>>,
        Kafka.string(name),
        <<pattern>>,
        Kafka.string("User:" <> user),
        Kafka.string("*"),
        <<@operations[operation], 3>>
      ]
    end
  end

  ## Tokens

  @doc "An unsecured JWS of this subject that lives for so many ms."
  def token(user, lifetime_ms) do
    now = System.os_time(:millisecond)
    encode = &Base.url_encode64(&1, padding: false)
    seconds = fn ms -> :erlang.float_to_binary(ms / 1000, decimals: 3) end

    encode.(~s({"alg":"none"})) <>
      "." <>
      encode.(
        ~s({"sub":"#{user}","iat":#{seconds.(now)},"exp":#{seconds.(now + lifetime_ms)},"jti":"#{System.unique_integer()}"})
      ) <> "."
  end
end
