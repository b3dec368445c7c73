defmodule Kmq.Options.Types do
  @moduledoc false
  # The custom types of Kmq.Options: each takes a value and gives {:ok, normal form} or {:error, what is wrong with it}.

  @type result :: {:ok, term} | {:error, String.t()}

  # ---- what all of them rest on

  # A struct is a map that cannot be walked through.
  defguardp is_plain_map(value) when is_map(value) and not is_struct(value)

  # {:bad, the first that is not right}, which may be nil or false; or nil.
  defp wrong(list, right?) do
    case Enum.drop_while(list, right?) do
      [] -> nil
      [bad | _] -> {:bad, bad}
    end
  end

  @doc "Does every list in it end with `[]`?"
  @spec proper?(term) :: boolean
  def proper?(list) when is_list(list) and length(list) >= 0, do: Enum.all?(list, &proper?/1)
  def proper?(list) when is_list(list), do: false
  def proper?(tuple) when is_tuple(tuple), do: tuple |> Tuple.to_list() |> proper?()
  def proper?(map) when is_map(map) and not is_struct(map), do: map |> Map.to_list() |> proper?()
  def proper?(_other), do: true

  # ---- small ones

  @spec integer_from(term, integer) :: result
  def integer_from(value, from) when is_integer(value) and value >= from, do: {:ok, value}

  def integer_from(value, from),
    do: {:error, "expected an integer of at least #{from}, got: #{inspect(value)}"}

  @spec integer_in(term, integer, integer) :: result
  def integer_in(value, least, most) when is_integer(value) and value >= least and value <= most,
    do: {:ok, value}

  def integer_in(value, least, most),
    do: {:error, "expected an integer from #{least} to #{most}, got: #{inspect(value)}"}

  @doc "What may be empty, but can be a C string."
  @spec text(term) :: result
  def text(""), do: {:ok, ""}
  def text(value) when is_binary(value), do: non_empty_string(value)
  def text(value), do: {:error, "expected a string, got: #{inspect(value)}"}

  @spec non_empty_string(term) :: result
  def non_empty_string(value) when is_binary(value) and value != "" do
    if String.valid?(value) and not String.contains?(value, <<0>>),
      do: {:ok, value},
      else: {:error, "expected UTF-8 text without NUL, got: #{inspect(value)}"}
  end

  def non_empty_string(value), do: {:error, "expected a non-empty string, got: #{inspect(value)}"}

  @doc "A time in ms with a bound: what is waited for must end."
  @spec ms_up_to(term, pos_integer) :: result
  def ms_up_to(value, most) when is_integer(value) and value > 0 and value <= most,
    do: {:ok, value}

  def ms_up_to(value, most),
    do: {:error, "expected ms, an integer from 1 to #{most}, got: #{inspect(value)}"}

  @doc "The header of the count: not one of Kmq's others."
  @spec count_header(term) :: result
  def count_header("kmq-redelivery-count" = value), do: {:ok, value}

  def count_header("kmq-" <> _ = value),
    do: {:error, "expected a name that does not begin with kmq-, got: #{inspect(value)}"}

  def count_header(value), do: non_empty_string(value)

  # The marker of a retry and the message itself must both still be there when it is due.
  @max_delay_ms 30 * 86_400_000

  @doc "The longest delay of a retry or snooze: 30 days, in ms."
  @spec max_delay_ms() :: pos_integer
  def max_delay_ms, do: @max_delay_ms

  @spec binary_or_nil(term) :: result
  def binary_or_nil(value) when is_binary(value) or is_nil(value), do: {:ok, value}
  def binary_or_nil(value), do: {:error, "expected a binary or nil, got: #{inspect(value)}"}

  # What Erlang waits for at most.
  @timeout_max 4_294_967_295

  @spec timeout(term) :: result
  def timeout(:infinity), do: {:ok, :infinity}
  def timeout(ms) when is_integer(ms) and ms in 0..@timeout_max, do: {:ok, ms}

  def timeout(value) do
    {:error,
     "a timeout is milliseconds, 0 to #{@timeout_max}, or :infinity, got: #{inspect(value)}"}
  end

  @doc "As `timeout/1`, of an argument; raises `ArgumentError`."
  @spec timeout!(term) :: timeout
  def timeout!(value) do
    case timeout(value) do
      {:ok, timeout} -> timeout
      {:error, message} -> raise ArgumentError, message
    end
  end

  @sync_ms 30_000

  @doc "Whether, and for how many ms, a call waits for Kafka; nil: it does not."
  @spec sync(term) :: result
  def sync(true), do: {:ok, @sync_ms}
  def sync(false), do: {:ok, nil}
  def sync(ms) when is_integer(ms) and ms in 1..@timeout_max, do: {:ok, ms}

  def sync(value),
    do: {:error, "expected true, false or ms, 1 to #{@timeout_max}, got: #{inspect(value)}"}

  @doc "ms, a backoff or a function of attempt and reason."
  @spec retry_delay(term) :: result
  def retry_delay(value) do
    case disposition({:retry, value}) do
      {:ok, {:retry, delay}} ->
        {:ok, delay}

      {:error, "expected {:exponential, options}" <> _} ->
        {:error,
         "expected ms, a function of the attempt and the reason, {:exponential, options}, {:linear, options} or a list of ms, got: #{inspect(value)}"}

      {:error, message} ->
        {:error, message}
    end
  end

  @doc "What is there now, and what is known but comes with a later version."
  @spec later(term, list, list) :: result
  def later(value, now, later) do
    cond do
      value in now ->
        {:ok, value}

      value in later ->
        {:error,
         "#{inspect(value)} is not there yet; this version has #{Enum.map_join(now, ", ", &inspect/1)}"}

      true ->
        {:error, "expected #{Enum.map_join(now, ", ", &inspect/1)}, got: #{inspect(value)}"}
    end
  end

  @spec secret(term) :: result
  def secret(value) when is_binary(value) and byte_size(value) >= 16, do: {:ok, value}

  def secret(value) when is_function(value, 0) do
    # A supervisor's child specification and the options of a start hide it so.
    case value.() do
      text when is_binary(text) and byte_size(text) >= 16 -> {:ok, value}
      _never_shown -> secret(nil)
    end
  end

  def secret(_never_shown), do: {:error, "expected a binary of at least 16 bytes"}

  @spec datetime(term) :: result
  def datetime(%DateTime{} = value), do: {:ok, value}
  def datetime(value), do: {:error, "expected a DateTime, got: #{inspect(value)}"}

  @spec tags(term) :: result
  def tags(value) do
    if is_list(value) and Enum.all?(value, &tag?/1),
      do: {:ok, value},
      else: {:error, "expected a list of strings without commas, got: #{inspect(value)}"}
  end

  defp tag?(value), do: is_binary(value) and value != "" and not String.contains?(value, ",")

  # What the native filter takes: words of all patterns and one state more for each.
  @filter_states 512

  @doc "Normal form: `[{:tag, tag} | {:header, name, value} | {:routing, pattern}]`."
  @spec filter(term) :: result
  def filter(value) do
    cond do
      not Keyword.keyword?(value) ->
        {:error, "expected a keyword list, got: #{inspect(value)}"}

      bad = wrong(Keyword.keys(value), &(&1 in [:tags, :headers, :routing])) ->
        {:error, "unknown clause #{inspect(elem(bad, 1))}, expected :tags, :headers or :routing"}

      true ->
        with {:ok, tags} <- tags(value[:tags] || []),
             {:ok, headers} <- filter_headers(value[:headers] || []),
             {:ok, patterns} <- patterns(value[:routing] || []) do
          {:ok,
           Enum.map(tags, &{:tag, &1}) ++
             Enum.map(headers, fn {name, value} -> {:header, name, value} end) ++
             Enum.map(patterns, &{:routing, &1})}
        end
    end
  end

  defp filter_headers(value) do
    with {:ok, headers} <- headers(value) do
      if Enum.all?(headers, fn {_name, value} -> is_binary(value) end),
        do: {:ok, headers},
        else: {:error, "expected a value for each of :headers, got: #{inspect(headers)}"}
    end
  end

  defp patterns(value) do
    cond do
      not (is_list(value) and Enum.all?(value, &(is_binary(&1) and &1 != ""))) ->
        {:error, "expected a list of non-empty strings for :routing, got: #{inspect(value)}"}

      bad = Enum.find(value, &bad_pattern?/1) ->
        {:error, "#{inspect(bad)}: * and # stand for whole words between dots"}

      states(value) > @filter_states ->
        {:error, "patterns of #{states(value)} words, at most #{@filter_states} fit"}

      true ->
        {:ok, value}
    end
  end

  defp words(pattern), do: String.split(pattern, ".")
  defp states(patterns), do: Enum.sum(Enum.map(patterns, &(length(words(&1)) + 1)))

  defp bad_pattern?(pattern) do
    pattern
    |> words()
    |> Enum.any?(&(&1 not in ["*", "#"] and String.contains?(&1, ["*", "#"])))
  end

  # Of Kmq.DeadLetters: what each condition takes.
  @conditions [
    cause: "a cause, a string or an atom, or a list of them",
    group: "a string, or nil: of no group",
    key: "a binary, or nil",
    headers:
      "a list of {name, value}, the name a string, not empty, without NUL, the value a binary or nil",
    attempts: "a non-negative integer or a range of them",
    since: "a DateTime",
    until: "a DateTime",
    origin: "a topic's name, a string"
  ]

  @doc "Which dead letters: a function, or a keyword list of conditions; nil where there are none."
  @spec letter_filter(term) :: result
  def letter_filter([]), do: {:ok, nil}
  def letter_filter(value) when is_function(value, 1), do: {:ok, value}

  def letter_filter(value) do
    cond do
      not Keyword.keyword?(value) ->
        {:error,
         "expected a keyword list or a function that takes a Kmq.DeadLetter, got: #{inspect(value)}"}

      bad = Enum.find(value, &(not condition?(&1))) ->
        {:error, bad_condition(bad)}

      true ->
        {:ok, value}
    end
  end

  defp bad_condition({name, value}) do
    case @conditions[name] do
      nil ->
        names = Enum.map_join(@conditions, ", ", fn {name, _} -> inspect(name) end)
        "unknown condition #{inspect(name)}, expected one of #{names}"

      expected ->
        "expected #{inspect(name)} to be #{expected}, got: #{inspect(value)}"
    end
  end

  defp condition?({:cause, causes}),
    do: causes |> List.wrap() |> Enum.all?(&(is_binary(&1) or is_atom(&1)))

  defp condition?({name, value}) when name in [:group, :key],
    do: is_binary(value) or is_nil(value)

  defp condition?({:headers, headers}), do: headers?(headers)
  defp condition?({:attempts, n}) when is_integer(n), do: n >= 0
  defp condition?({:attempts, value}), do: is_struct(value, Range)
  defp condition?({name, value}) when name in [:since, :until], do: is_struct(value, DateTime)
  defp condition?({:origin, value}), do: is_binary(value)
  defp condition?(_other), do: false

  @spec function_of_one(term) :: result
  def function_of_one(value) when is_function(value, 1), do: {:ok, value}

  def function_of_one(value),
    do: {:error, "expected a function that takes one argument, got: #{inspect(value)}"}

  # The native side takes 4,096, and some are Kmq's own.
  @headers_max 4_000

  @spec headers(term) :: result
  def headers(value) do
    if headers?(value),
      do: {:ok, value},
      else:
        {:error,
         "expected a list of {name, value}, at most #{@headers_max}, the name a string, not empty, without NUL, the value a binary or nil, got: #{inspect(value)}"}
  end

  @doc "Is it a list of headers?"
  @spec headers?(term) :: boolean
  def headers?(value), do: headers?(value, 0)

  defp headers?([header | rest], n) when n < @headers_max,
    do: header?(header) and headers?(rest, n + 1)

  defp headers?(rest, _n), do: rest == []

  # A name is a C string on its way.
  defp header?({name, value}) when is_binary(name) and (is_binary(value) or is_nil(value)),
    do: name != "" and :binary.match(name, <<0>>) == :nomatch

  defp header?(_other), do: false

  @spec offset_reset_policy(term) :: result
  def offset_reset_policy(value) when value in [:earliest, :latest], do: {:ok, value}

  def offset_reset_policy({:timestamp, ms})
      when is_integer(ms) and ms in 0..0x3FFF_FFFF_FFFF_FFFF,
      do: {:ok, {:timestamp, ms}}

  def offset_reset_policy(value),
    do: {:error, "expected :earliest, :latest or {:timestamp, ms}, got: #{inspect(value)}"}

  @doc "What becomes of a message: an action, its backoff in normal form."
  @spec disposition(term) :: result
  def disposition(value)
      when value in [:ack, :retry, :release, :reject, :discard, :noop, :manual],
      do: {:ok, value}

  def disposition({action, delay}) when action in [:snooze, :retry] and is_integer(delay) do
    if delay in 0..@max_delay_ms,
      do: {:ok, {action, delay}},
      else: {:error, "expected a delay of 0 to #{@max_delay_ms} ms (30 days), got: #{delay}"}
  end

  def disposition({:retry, function}) when is_function(function, 2), do: {:ok, {:retry, function}}

  def disposition({:retry, backoff}) do
    with {:ok, backoff} <- Kmq.Backoff.parse(backoff), do: {:ok, {:retry, backoff}}
  end

  def disposition(value) do
    {:error,
     "expected :ack, :retry, {:retry, delay_ms | backoff}, :release, {:snooze, delay_ms}, :reject, :discard, :noop or :manual, got: #{inspect(value)}"}
  end

  @doc "Whether a delivery has that disposition; `:ok` or what is wrong with it."
  @spec supported(term, atom, atom) :: :ok | {:error, String.t()}
  def supported(_disposition, _option, :markers), do: :ok

  def supported(disposition, _option, _delivery)
      when disposition in [nil, :ack, :reject, :discard],
      do: :ok

  def supported(disposition, option, delivery) do
    {:error,
     "invalid value for #{inspect(option)} option: #{inspect(disposition)} needs delivery: :markers; with delivery: #{inspect(delivery)} " <>
       "nothing is delivered again, so it is one of :ack, :reject, :discard"}
  end

  # ---- topics

  @spec topics(term) :: result
  def topics([]), do: {:error, "expected at least one topic"}

  def topics(value) when is_list(value) do
    cond do
      bad = wrong(value, &is_binary/1) ->
        {:error, "expected a list of strings, got: #{inspect(elem(bad, 1))} in it"}

      bad = Enum.find(value, &(topic_problem(&1) != nil)) ->
        {:error, "#{inspect(bad)} #{topic_problem(bad)}"}

      value != Enum.uniq(value) ->
        {:error, "#{inspect(hd(value -- Enum.uniq(value)))} is named twice"}

      true ->
        {:ok, value}
    end
  end

  def topics(value), do: {:error, "expected a list of strings, got: #{inspect(value)}"}

  @spec topic(term) :: result
  def topic(value) when is_binary(value) do
    case topic_problem(value) do
      nil -> {:ok, value}
      problem -> {:error, "#{inspect(value)} #{problem}"}
    end
  end

  def topic(value), do: {:error, "expected a topic's name, a string, got: #{inspect(value)}"}

  @doc "Of a sandbox, `[{name, partitions} | name]`: a map, keyword or list of names."
  @spec sandbox_topics(term) :: result
  def sandbox_topics(value) when is_list(value) or is_plain_map(value),
    do: collect(value, &sandbox_topics_entry/1)

  def sandbox_topics(value) do
    {:error,
     "expected a map of topic to number of partitions or a list of topics, got: #{inspect(value)}"}
  end

  defp sandbox_topics_entry({name, n}) when is_integer(n) and n in 1..10_000,
    do: with({:ok, name} <- sandbox_topic(name), do: {:ok, {name, n}})

  defp sandbox_topics_entry({name, n}) do
    {:error,
     "expected a number of partitions of #{inspect(name)}, from 1 to 10000, got: #{inspect(n)}"}
  end

  defp sandbox_topics_entry(name), do: sandbox_topic(name)

  @doc "A topic's name; an atom is one, too."
  @spec sandbox_topic(term) :: result
  def sandbox_topic(name) when is_atom(name) and name not in [nil, true, false],
    do: topic(Atom.to_string(name))

  def sandbox_topic(name), do: topic(name)

  @spec topic_or_map(term) :: result
  def topic_or_map(value) when is_binary(value), do: topic(value)

  def topic_or_map(value) when is_plain_map(value) do
    Enum.find_value(value, {:ok, value}, fn
      {topic, name} when is_binary(topic) and is_binary(name) ->
        if problem = topic_problem(name), do: {:error, "#{inspect(name)} #{problem}"}

      other ->
        {:error, "expected a map from topic to topic, got #{inspect(other)} in it"}
    end)
  end

  def topic_or_map(value),
    do: {:error, "expected a string or a map from topic to topic, got: #{inspect(value)}"}

  @doc "Settings of a topic, `[{name, value}]` or a map: normal form `[{binary, binary}]`."
  @spec topic_config(term) :: result
  def topic_config(value) when is_list(value) or is_plain_map(value) do
    collect(value, fn
      {name, value} when (is_atom(name) and name != nil) or is_binary(name) ->
        if text?(name) and text?(value),
          do: {:ok, {to_string(name), to_string(value)}},
          else: {:error, "expected a string, number, boolean or atom, got: #{inspect(value)}"}

      other ->
        {:error,
         "expected {\"retention.ms\", \"60000\"} and the like, got #{inspect(other)} in it"}
    end)
  end

  def topic_config(value),
    do: {:error, "expected a list of {name, value}, got: #{inspect(value)}"}

  defp text?(value),
    do: printable?(value) and not String.contains?(to_string(value), <<0>>)

  @doc "What is wrong with a topic's name, or nil."
  @spec topic_problem(String.t()) :: String.t() | nil
  def topic_problem(name) do
    cond do
      name == "" ->
        "is empty"

      name in [".", ".."] ->
        "is not a name Kafka takes"

      byte_size(name) > 249 ->
        "is #{byte_size(name)} characters long, Kafka takes 249"

      name =~ ~r/\A[a-zA-Z0-9._-]+\z/ ->
        nil

      true ->
        "has characters Kafka does not take in a topic's name (letters, digits, dot, _ and - only)"
    end
  end

  # ---- hosts: normal form [{host, port}], the host without brackets

  @spec hosts(term) :: {:ok, [{String.t(), 1..65_535}]} | {:error, String.t()}
  def hosts(value) when is_binary(value) do
    value |> String.split(",") |> Enum.map(&String.trim/1) |> collect(&host_text/1)
  end

  def hosts([]), do: {:error, "expected at least one host"}

  def hosts(value) when is_list(value) do
    cond do
      List.ascii_printable?(value) -> value |> List.to_string() |> hosts()
      true -> collect(value, &host_term/1)
    end
  end

  def hosts(value),
    do:
      {:error,
       "expected a keyword list, a list of {host, port} or a string, got: #{inspect(value)}"}

  defp collect(values, fun) do
    Enum.reduce_while(values, {:ok, []}, fn value, {:ok, acc} ->
      case fun.(value) do
        {:ok, host} -> {:cont, {:ok, acc ++ [host]}}
        {:error, message} -> {:halt, {:error, message}}
      end
    end)
  end

  defp host_term({host, port}) when is_integer(port) do
    with {:ok, host} <- host_name(host), do: host_port(unbracket(host), port)
  end

  defp host_term({host, port}) when is_binary(port), do: host_text("#{host}:#{port}")
  defp host_term(text) when is_binary(text), do: host_text(String.trim(text))
  defp host_term(other), do: {:error, "expected {host, port}, got: #{inspect(other)}"}

  defp host_name(host) when is_binary(host), do: {:ok, host}

  defp host_name(host) when is_atom(host) and host not in [nil, true, false],
    do: {:ok, Atom.to_string(host)}

  defp host_name(host) when is_tuple(host) do
    case :inet.ntoa(host) do
      {:error, _} -> {:error, "expected a host, got: #{inspect(host)}"}
      text -> {:ok, List.to_string(text)}
    end
  end

  defp host_name(host) when is_list(host) and host != [] do
    if List.ascii_printable?(host),
      do: {:ok, List.to_string(host)},
      else: {:error, "expected a host, got: #{inspect(host)}"}
  end

  defp host_name(host), do: {:error, "expected a host, got: #{inspect(host)}"}

  defp host_text(""), do: {:error, "an empty entry (a comma too many?)"}

  defp host_text("[" <> _ = text) do
    case Regex.run(~r/\A\[([^\]]+)\]:(\d+)\z/, text) do
      [_, host, port] -> host_port(host, String.to_integer(port))
      nil -> {:error, "#{inspect(text)} is not [address]:port"}
    end
  end

  defp host_text(text) do
    if text =~ "://",
      do:
        {:error,
         "#{inspect(text)}: hosts are host:port without a scheme; TLS is :ssl of :client_config"},
      else: host_and_port(text)
  end

  defp host_and_port(text) do
    case String.split(text, ":") do
      [_host] ->
        {:error, "#{inspect(text)} has no port, write \"#{text}:9092\""}

      [host, port] ->
        host_text(text, host, Integer.parse(port))

      _more ->
        {:error,
         "#{inspect(text)} is ambiguous, write an IPv6 address in brackets: \"[::1]:9092\""}
    end
  end

  defp host_text(_text, host, {port, ""}), do: host_port(host, port)
  defp host_text(text, _host, _other), do: {:error, "#{inspect(text)} is not host:port"}

  defp host_port(host, port) when port in 1..65_535 do
    cond do
      host == "" -> {:error, "a host is empty"}
      String.contains?(host, ":") -> ipv6(host, port)
      host =~ ~r/\A[^\s,\[\]\/@]+\z/ -> {:ok, {host, port}}
      true -> {:error, "#{inspect(host)} is not the name of a host"}
    end
  end

  defp host_port(host, port),
    do: {:error, "#{inspect("#{host}:#{port}")}: a port is between 1 and 65535"}

  # A zone ("fe80::1%eth0") is the resolver's business; what stands before it must be an address.
  defp ipv6(host, port) do
    [address | _zone] = String.split(host, "%", parts: 2)

    case :inet.parse_ipv6strict_address(String.to_charlist(address)) do
      {:ok, _} -> {:ok, {host, port}}
      {:error, _} -> {:error, "#{inspect(host)} is not an IPv6 address"}
    end
  end

  defp unbracket(host) do
    case Regex.run(~r/\A\[(.+)\]\z/, host) do
      [_, inner] -> inner
      nil -> host
    end
  end

  # ---- assignors: normal form a list of one, or of eager ones in their order

  @eager [:roundrobin, :range]

  @spec assignor(term) :: result
  def assignor(value) when value in [:cooperative_sticky | @eager], do: {:ok, [value]}
  def assignor([:cooperative_sticky]), do: {:ok, [:cooperative_sticky]}

  def assignor([_ | _] = values) do
    cond do
      :cooperative_sticky in values and Enum.any?(@eager, &(&1 in values)) ->
        {:error,
         "members that take everything back and members that do not cannot share a group: :cooperative_sticky stands alone, " <>
           "stop all members before the change"}

      Enum.uniq(values) == values and Enum.all?(values, &(&1 in @eager)) ->
        {:ok, values}

      true ->
        assignor(nil)
    end
  end

  def assignor(_other) do
    {:error, "expected :roundrobin, :range, both of these in a list, or :cooperative_sticky"}
  end

  # ---- librdkafka properties: normal form [common: [{binary, binary}], ...]

  @kafka_groups [:common, :consumer, :producer, :tracker]
  @reserved %{
    "bootstrap.servers" => "use :hosts",
    "metadata.broker.list" => "use :hosts",
    "group.id" => "use :group_id",
    "enable.auto.commit" => "Kmq commits by itself",
    "auto.commit.enable" => "Kmq commits by itself",
    "enable.auto.offset.store" => "Kmq commits by itself",
    "auto.offset.reset" => "use :offset_reset_policy",
    "enable.partition.eof" => "Kmq sets it",
    "enable.idempotence" => "Kmq sets it",
    "transactional.id" => "Kmq sets it",
    "acks" => "use :acks of Kmq.Publisher; Kmq's own producers need all",
    "request.required.acks" => "use :acks of Kmq.Publisher; Kmq's own producers need all",
    "allow.auto.create.topics" => "topics are never made by asking for them",
    "log.queue" => "Kmq sets it",
    "partition.assignment.strategy" => "use :assignor",
    "group.protocol" => "it is not there yet"
  }

  @spec kafka_config(term) :: result
  def kafka_config(value) do
    if Keyword.keyword?(value) or value == [] do
      case Keyword.keys(value) -- @kafka_groups do
        [] ->
          properties(value)

        [name | _] ->
          {:error,
           "unknown group #{inspect(name)}, expected :common, :consumer, :producer or :tracker"}
      end
    else
      {:error, "expected [common: ..., consumer: ..., producer: ..., tracker: ...]"}
    end
  end

  defp properties(groups) do
    Enum.reduce_while(groups, {:ok, []}, fn {group, properties}, {:ok, acc} ->
      case property_list(properties) do
        {:ok, list} -> {:cont, {:ok, acc ++ [{group, list}]}}
        {:error, message} -> {:halt, {:error, message}}
      end
    end)
  end

  defp property_list(properties) when is_list(properties) or is_plain_map(properties),
    do: collect(properties, &property/1)

  defp property_list(_other), do: {:error, "expected a list of librdkafka's properties"}

  defp property({name, value}) when is_atom(name) or is_binary(name) do
    name = to_string(name)

    cond do
      reason = @reserved[name] ->
        {:error, "#{name} cannot be set here: #{reason}"}

      is_function(value, 0) and Kmq.Security.secret_property?(name) ->
        known({name, value}, "secret")

      not printable?(value) ->
        {:error, "expected a string, number, boolean or atom for #{name}"}

      true ->
        known({name, to_string(value)}, to_string(value))
    end
  end

  defp property(_other), do: {:error, "expected a list of {name, value}"}

  # Tried on a configuration of librdkafka's, so that a name that is none does not wait for the first client. A plugin would be loaded.
  defp known({"plugin.library.paths", _} = property, _value), do: {:ok, property}

  defp known({name, _} = property, value) do
    case :kmq_nif.property(name, value) do
      :ok ->
        {:ok, property}

      {:error, {_name, _code, _retriable, _fatal, text}} ->
        {:error, "#{text}; its CONFIGURATION.md has them all"}
    end
  end

  defp printable?(value),
    do: is_binary(value) or is_number(value) or (is_atom(value) and not is_nil(value))
end
