defmodule Kmq.Security do
  @moduledoc false
  # TLS and SASL: options to librdkafka's properties, and the one place where a secret is plain.
  #
  # A secret is kept as a function: printed, by Elixir or by Erlang, it shows nothing. So are those of a configuration from its validation on;
  # child_spec/1 and Broadway's start hide those in the options themselves (`hide/1`), since supervisors print what they start.
  # `consumer_open/3`, `publisher_open/2`, `admin_open/2` and `reveal/1` call them, right before the native side gets them.
  #
  # Properties are [{name, value | (-> value)}], and, where tokens come from a function, one `{:oauthbearer, function}`.

  alias Kmq.{Error, Token}

  @type value :: String.t() | (() -> String.t())
  @type props :: [{String.t(), value} | {:oauthbearer, Token.source()}]

  # ---- options to properties. Messages never show a value: it may be the secret.

  @doc "The properties of `:ssl` and `:sasl` of `:client_config`."
  @spec props(keyword) :: {:ok, props} | {:error, String.t()}
  def props(client) do
    with {:ok, ssl} <- ssl(client[:ssl]),
         {:ok, sasl} <- sasl(client[:sasl]) do
      protocol =
        case {ssl, sasl} do
          {nil, nil} -> []
          {_, nil} -> [{"security.protocol", "ssl"}]
          {nil, _} -> [{"security.protocol", "sasl_plaintext"}]
          {_, _} -> [{"security.protocol", "sasl_ssl"}]
        end

      {:ok, protocol ++ (ssl || []) ++ (sasl || [])}
    end
  end

  defp ssl(value) when value in [nil, false], do: {:ok, nil}
  defp ssl(true), do: ssl([])

  defp ssl(options) when is_list(options) do
    if Keyword.keyword?(options) do
      verified = Keyword.get(options, :verify, :verify_peer) != :verify_none
      named = verified and Keyword.get(options, :server_name_indication) != :disable

      base = [
        {"enable.ssl.certificate.verification", to_string(verified)},
        {"ssl.endpoint.identification.algorithm", if(named, do: "https", else: "none")}
      ]

      Enum.reduce_while(options, {:ok, base}, fn option, {:ok, acc} ->
        case ssl_option(option) do
          {:ok, props} ->
            {:cont, {:ok, acc ++ props}}

          {:error, message} ->
            {:halt, {:error, "invalid value for :ssl option of :client_config: " <> message}}
        end
      end)
    else
      ssl(:not_a_keyword_list)
    end
  end

  defp ssl(_other),
    do:
      {:error,
       "invalid value for :ssl option of :client_config: expected true, false or a keyword list"}

  @ssl_text [
    cacertfile: "ssl.ca.location",
    certfile: "ssl.certificate.location",
    keyfile: "ssl.key.location"
  ]
  @ssl_instead %{
    cacerts: "ssl.ca.pem",
    cert: "ssl.certificate.pem",
    certs_keys: "ssl.certificate.pem and ssl.key.pem",
    key: "ssl.key.pem",
    ciphers: "ssl.cipher.suites",
    supported_groups: "ssl.curves.list",
    eccs: "ssl.curves.list",
    signature_algs: "ssl.sigalgs.list",
    customize_hostname_check: "ssl.endpoint.identification.algorithm",
    crl_cache: "ssl.crl.location",
    crl_check: "ssl.crl.location"
  }

  defp ssl_option({:verify, value}) when value in [:verify_peer, :verify_none], do: {:ok, []}

  defp ssl_option({:verify, _value}),
    do: {:error, "expected :verify_peer or :verify_none for :verify"}

  defp ssl_option({:server_name_indication, :disable}), do: {:ok, []}

  defp ssl_option({:server_name_indication, _name}) do
    {:error,
     ":server_name_indication takes :disable only, the name of the broker is what is checked " <>
       "(kafka_config: [common: [\"ssl.endpoint.identification.algorithm\": ...]])"}
  end

  defp ssl_option({:password, value}) do
    case secret(value) do
      {:ok, password} -> {:ok, [{"ssl.key.password", password}]}
      :error -> {:error, "expected a string, or a function that gives one, for :password"}
    end
  end

  # A file that is not there is said here, by its option; librdkafka would say it of its property, at the first connection.
  defp ssl_option({name, value}) when name in [:cacertfile, :certfile, :keyfile] do
    with {:ok, path} <- path(value),
         :ok <- readable(path) do
      {:ok, [{@ssl_text[name], path}]}
    else
      :error ->
        {:error, "expected a string for #{inspect(name)}"}

      {:error, reason} ->
        {:error,
         "cannot read #{inspect(to_string(value))} (#{inspect(name)}): #{:file.format_error(reason)}"}
    end
  end

  defp ssl_option({name, _value}) do
    case @ssl_instead[name] do
      nil ->
        {:error,
         "#{inspect(name)} has no twin in librdkafka, see kafka_config: [common: [\"ssl...\": ...]]"}

      property ->
        {:error,
         "#{inspect(name)} cannot be passed on, use kafka_config: [common: [\"#{property}\": ...]]"}
    end
  end

  # A folder of CA certificates is good, too.
  defp readable(path) do
    case File.open(path, [:read]) do
      {:ok, file} -> File.close(file)
      {:error, :eisdir} -> :ok
      error -> error
    end
  end

  defp path(value) when is_binary(value) and value != "", do: {:ok, value}

  defp path(value) when is_list(value) and value != [] do
    if List.ascii_printable?(value), do: {:ok, List.to_string(value)}, else: :error
  end

  defp path(_other), do: :error

  @mechanisms %{plain: "PLAIN", scram_sha_256: "SCRAM-SHA-256", scram_sha_512: "SCRAM-SHA-512"}

  defp sasl(value) when value in [nil, :undefined], do: {:ok, nil}

  defp sasl({mechanism, user, password})
       when is_map_key(@mechanisms, mechanism) and is_binary(user) and user != "" do
    case secret(password) do
      {:ok, password} ->
        {:ok,
         [
           {"sasl.mechanism", @mechanisms[mechanism]},
           {"sasl.username", user},
           {"sasl.password", password}
         ]}

      :error ->
        sasl_error("expected the password as a string, or as a function that gives one")
    end
  end

  defp sasl({:oauthbearer, source}) do
    case Token.source(source) do
      {:ok, source} ->
        {:ok, [{"sasl.mechanism", "OAUTHBEARER"}, {:oauthbearer, source}]}

      :error ->
        sasl_error(
          "expected {:oauthbearer, function}, the function without arguments, or {module, function, arguments}"
        )
    end
  end

  defp sasl({mechanism, file})
       when is_map_key(@mechanisms, mechanism) and (is_binary(file) or is_list(file)) do
    with {:ok, text} <- File.read(file),
         [user, password | _] when user != "" and password != "" <-
           text |> String.split(["\r\n", "\n"]) |> Enum.map(&String.trim/1) do
      sasl({mechanism, user, password})
    else
      {:error, reason} ->
        sasl_error("cannot read #{inspect(file)}: #{:file.format_error(reason)}")

      _ ->
        sasl_error("#{inspect(file)} does not hold a user and a password on two lines")
    end
  end

  defp sasl({:callback, _module, _options}) do
    sasl_error(
      "{:callback, module, options} is brod's; use kafka_config: [common: [\"sasl.mechanism\": ...]]"
    )
  end

  defp sasl(_secret) do
    sasl_error(
      "expected {mechanism, user, password} or {mechanism, file}, the mechanism one of :plain, :scram_sha_256, :scram_sha_512; " <>
        "or {:oauthbearer, function}; others by kafka_config: [common: [\"sasl.mechanism\": ...]]"
    )
  end

  defp sasl_error(message),
    do: {:error, "invalid value for :sasl option of :client_config: " <> message}

  # ---- secrets as functions

  @doc "A secret of an option, hidden."
  @spec secret(term) :: {:ok, (() -> String.t())} | :error
  def secret(value) when is_function(value, 0), do: {:ok, value}

  def secret(value) when is_binary(value) and value != "", do: {:ok, fn -> value end}

  def secret(value) when is_list(value) and value != [] do
    if List.ascii_printable?(value), do: secret(List.to_string(value)), else: :error
  end

  def secret(_other), do: :error

  @doc "Whether a property of librdkafka holds a secret."
  @spec secret_property?(String.t()) :: boolean
  def secret_property?(name),
    do:
      String.contains?(name, ["password", "secret"]) or
        name in ["ssl.key.pem", "sasl.oauthbearer.config"]

  @doc "Options as a user wrote them, their secrets hidden; what is not understood stays, and is refused later."
  @spec hide(keyword) :: keyword
  def hide(options) do
    options
    |> update(:client_config, &hide_client/1)
    |> update(:kafka_config, &hide_groups/1)
    |> update(:receipt_secret, &hidden/1)
  end

  @doc "The same of a valid `:client_config`."
  @spec hide_client(term) :: term
  def hide_client(client) do
    client
    |> update(:ssl, fn ssl -> update(ssl, :password, &hidden/1) end)
    |> update(:sasl, fn
      {mechanism, user, password} ->
        {mechanism, user, hidden(password)}

      {:oauthbearer, {_, _, _} = source} ->
        with {:ok, fun} <- Token.source(source), do: {:oauthbearer, fun}

      other ->
        other
    end)
  end

  @doc "The same of a `:kafka_config`."
  @spec hide_groups(term) :: term
  def hide_groups(groups) do
    if Keyword.keyword?(groups),
      do: Enum.map(groups, fn {group, list} -> {group, hide_properties(list)} end),
      else: groups
  end

  defp hide_properties(list)
       when (is_list(list) and length(list) >= 0) or (is_map(list) and not is_struct(list)) do
    Enum.map(list, fn
      {name, value} when is_atom(name) or is_binary(name) ->
        if secret_property?(to_string(name)), do: {name, hidden(value)}, else: {name, value}

      other ->
        other
    end)
  end

  defp hide_properties(other), do: other

  defp hidden(value) when is_function(value) or value in [nil, :undefined], do: value
  defp hidden(value), do: fn -> value end

  defp update(list, key, fun) do
    if Keyword.keyword?(list) and Keyword.has_key?(list, key),
      do: Keyword.update!(list, key, fun),
      else: list
  end

  @doc "Properties as the native side takes them. For the moment of a call: nobody keeps them."
  @spec reveal(props) :: [{String.t(), String.t()}]
  def reveal(props) do
    Enum.flat_map(props, fn
      {:oauthbearer, _source} -> []
      {name, value} when is_function(value, 0) -> [{name, told(name, value)}]
      {name, value} -> [{name, value}]
    end)
  end

  defp told(name, function) do
    case value_of(function) do
      {:ok, value} when is_binary(value) -> value
      {:ok, value} when is_atom(value) or is_number(value) or is_list(value) -> to_string(value)
      {:ok, _other} -> no_string(name, "gave no string")
      {:raised, what} -> no_string(name, "raised #{inspect(what)}")
    end
  end

  # The message of what is raised, and the arguments in its stack trace, may hold what it was about to give.
  defp value_of(function) do
    {:ok, function.()}
  rescue
    error -> {:raised, error.__struct__}
  end

  defp no_string(name, why) do
    reraise ArgumentError, [message: "the function given for #{name} #{why}"], []
  end

  @doc "Where tokens come from, or nil."
  @spec token_source(props) :: Token.source() | nil
  def token_source(props), do: List.keyfind(props, :oauthbearer, 0, {nil, nil}) |> elem(1)

  @doc """
  What is wrong with these properties taken together, or nil: a mechanism that needs tokens and nobody who gives any.
  """
  @spec problem(props) :: String.t() | nil
  def problem(props) do
    get = fn name -> props |> List.keyfind(name, 0, {name, nil}) |> elem(1) end
    mechanism = get.("sasl.mechanism") || get.("sasl.mechanisms") || ""

    if String.upcase(mechanism) == "OAUTHBEARER" and token_source(props) == nil and
         get.("sasl.oauthbearer.method") != "oidc" and
         get.("enable.sasl.oauthbearer.unsecure.jwt") != "true" do
      "sasl.mechanism OAUTHBEARER needs tokens: give them by client_config: [sasl: {:oauthbearer, function}], or (where librdkafka " <>
        "has it) set sasl.oauthbearer.method to oidc"
    end
  end

  @doc "What is known of an authentication that failed, to be added to the error; or nothing."
  @spec known_trouble(String.t()) :: String.t()
  def known_trouble(text) do
    {version, number} = :kmq_nif.version()

    if text =~ "SCRAM" and number < 0x02060000,
      do:
        ". SCRAM of librdkafka before 2.6.0 (here is #{version}) is refused by brokers from 3.7.2, 3.8.1 and 3.9.0 on, whatever the " <>
          "password: use a newer librdkafka, or PLAIN over TLS",
      else: ""
  end

  # ---- opening clients

  @doc "As `:kmq_nif.consumer_open/3`."
  @spec consumer_open(props, props, map) :: {:ok, reference} | {:error, term}
  def consumer_open(props, producer_props, options) do
    {props, producer_props} = {reveal(props), reveal(producer_props)}
    native(fn -> :kmq_nif.consumer_open(props, producer_props, options) end)
  end

  @doc "As `:kmq_nif.publisher_open/2`."
  @spec publisher_open(props, map) :: {:ok, reference} | {:error, term}
  def publisher_open(props, options) do
    props = reveal(props)
    native(fn -> :kmq_nif.publisher_open(props, options) end)
  end

  @doc "As `:kmq_nif.admin_open/1`, with a token where one is needed: that may take up to `timeout_ms`."
  @spec admin_open(props, pos_integer) :: {:ok, reference} | {:error, term}
  def admin_open(props, timeout_ms) do
    with {:ok, token} <- token(token_source(props), timeout_ms),
         plain = reveal(props),
         {:ok, admin} <- native(fn -> :kmq_nif.admin_open(plain) end),
         do: with_token(admin, token)
  end

  @doc "Runs a function with an admin client, as `admin_open/2` gives it: its result, or the error of the opening."
  @spec with_admin(props, pos_integer, (reference -> result)) :: result | {:error, term}
        when result: term
  def with_admin(props, timeout_ms, fun) do
    with {:ok, admin} <- admin_open(props, timeout_ms) do
      try do
        fun.(admin)
      after
        :kmq_nif.admin_close(admin)
      end
    end
  end

  @doc "A fresh token for an admin client that lives for long; where none is to be had the old one stays."
  @spec admin_renew(reference, props, pos_integer) :: :ok
  def admin_renew(admin, props, timeout_ms) do
    with {:ok, token} when token != nil <- token(token_source(props), timeout_ms),
         do: set_token(:admin_set_token, admin, token)

    :ok
  end

  defp token(nil, _timeout_ms), do: {:ok, nil}
  defp token(source, timeout_ms), do: Token.fetch(source, timeout_ms)

  defp with_token(admin, nil), do: {:ok, admin}

  defp with_token(admin, token) do
    case set_token(:admin_set_token, admin, token) do
      :ok ->
        {:ok, admin}

      {:error, error} ->
        :kmq_nif.admin_close(admin)
        {:error, Error.from_native(error, "OAUTHBEARER")}
    end
  end

  @doc "Gives a token to a native client: `:consumer_set_token`, `:publisher_set_token` or `:admin_set_token`."
  @spec set_token(atom, reference, Token.t()) :: :ok | {:error, term}
  def set_token(function, ref, token) do
    native(fn ->
      {token, expires_ms, principal, extensions} = token.()
      apply(:kmq_nif, function, [ref, token, expires_ms, principal, extensions])
    end)
  end

  # An exception of the native side shows the arguments of the call in its stack trace.
  defp native(fun) do
    fun.()
  rescue
    ArgumentError ->
      reraise ArgumentError, [message: "a native client takes no such properties"], []
  end
end
