defmodule Kmq.Control do
  @moduledoc false
  # Pause, resume, seek and other topics, of consumers and pipelines: whose partition it is, and where a place is. See guides/control.md.

  alias Kmq.{Ask, Error, Handle, Info, Options, Security, Topics}

  @ask_ms 10_000
  # The three questions of position/4, and a bit.
  @seek_ms 35_000

  @type partition :: {topic :: String.t(), partition :: non_neg_integer}
  @type place :: non_neg_integer | :beginning | :end | {:timestamp, integer} | DateTime.t()

  @spec pause(term, partition | [partition] | :all, boolean) :: :ok | {:error, Error.t()}
  def pause(server, partitions, pause?) do
    wanted = if partitions == :all, do: :all, else: Enum.map(listed(partitions), &partition!/1)

    with {:ok, handles, _missing} <- handles(server) do
      assigned = assigned(handles)
      wanted = if wanted == :all, do: Map.keys(assigned), else: wanted

      case Enum.reject(wanted, &Map.has_key?(assigned, &1)) do
        missing when missing == [] or not pause? ->
          wanted |> Enum.reject(&paused(&1, assigned, handles, pause?)) |> result(server)

        missing ->
          result(missing, server)
      end
    end
  end

  # What is assigned here; a pause of what is away just now can be ended all the same, by whichever member remembers it.
  defp paused({topic, partition} = place, assigned, handles, pause?) do
    handles = if handle = assigned[place], do: [handle], else: handles

    handles
    |> Enum.map(&:kmq_nif.consumer_pause(&1.ref, topic, partition, pause?))
    |> Enum.member?(:ok)
  end

  @spec seek(term, partition, place) :: :ok | {:error, Error.t()}
  def seek(server, place, to) do
    place = partition!(place)
    to = place!(to)

    with {:ok, handles, _missing} <- handles(server) do
      case assigned(handles) do
        %{^place => handle} -> GenServer.call(handle.pid, {:seek, place, to}, @seek_ms)
        _ -> result([place], server)
      end
    end
  catch
    :exit, {:timeout, _} -> {:error, Error.new(:timeout, "no answer in time", retriable?: true)}
    :exit, _ -> {:error, Error.new(:closed, "the consumer is closed")}
  end

  defp result([], _server), do: :ok
  defp result(missing, server), do: {:error, not_assigned(missing, server)}

  @doc "The error of a partition that is not here (any more)."
  @spec not_assigned([partition], term) :: Error.t()
  def not_assigned(missing, server) do
    names = Enum.map_join(missing, ", ", fn {topic, partition} -> "#{topic}-#{partition}" end)

    Error.new(:not_assigned, "#{names}: not assigned to #{inspect(server)} just now",
      retriable?: true
    )
  end

  defp listed(partitions) when is_list(partitions) and length(partitions) >= 0, do: partitions
  defp listed(partition), do: [partition]

  defp partition!({topic, partition} = place)
       when is_binary(topic) and is_integer(partition) and partition in 0..0x7FFF_FFFF,
       do: place

  defp partition!(other),
    do: raise(ArgumentError, "expected {topic, partition}, got: #{inspect(other)}")

  # The native side's int64.
  @most 0x3FFF_FFFF_FFFF_FFFF

  # Before 1970 there is no record: the first one is at or after that, too.
  defp place!(%DateTime{} = time), do: {:timestamp, max(DateTime.to_unix(time, :millisecond), 0)}
  defp place!({:timestamp, ms} = place) when is_integer(ms) and ms in 0..@most, do: place
  defp place!(place) when place in [:beginning, :end], do: place
  defp place!(offset) when is_integer(offset) and offset >= 0, do: offset

  defp place!(other) do
    raise ArgumentError,
          "expected an offset, :beginning, :end, {:timestamp, ms} or a DateTime, got: #{inspect(other)}"
  end

  @topics_ms 10_000

  @doc "Other queue topics, in every member. The topics are checked here, so that no consumer waits for it."
  @spec update_topics(term, [String.t()]) :: :ok | {:error, Error.t()}
  def update_topics(server, topics) do
    with :ok <- topics!(topics),
         {:ok, [first | _] = handles, missing} <- handles(server),
         {:ok, config} <- ask(first, {:with_topics, topics}),
         {:ok, _partitions} <- Topics.prepare(config),
         :ok <- each(handles, &ask(&1, {:update_topics, topics})) do
      if missing == 0, do: :ok, else: {:error, unconnected(server, missing, length(handles))}
    else
      {:ok, [], _missing} ->
        message = "#{inspect(server)} has no connection just now"
        {:error, Error.new(:closed, message, retriable?: true)}

      error ->
        error
    end
  end

  # It would go on with the topics it had, as soon as it has a connection again.
  defp unconnected(server, missing, connected) do
    text =
      "#{missing} of the #{missing + connected} members of #{inspect(server)} have no connection just now, and the topics they had: " <>
        "call it again"

    Error.new(:closed, text, retriable?: true)
  end

  # Also when nobody is there to say so.
  defp topics!([]), do: :ok

  defp topics!(topics) do
    case Options.check(topics, {:custom, Options.Types, :topics, []}) do
      {:ok, _topics} ->
        :ok

      {:error, message} ->
        {:error, Error.new(:invalid_option, "invalid value for topics: " <> message)}
    end
  end

  defp each([], _fun), do: :ok
  defp each([handle | rest], fun), do: with(:ok <- fun.(handle), do: each(rest, fun))

  defp ask(handle, request) do
    GenServer.call(handle.pid, request, @topics_ms)
  catch
    :exit, {:timeout, _} -> {:error, Error.new(:timeout, "no answer in time", retriable?: true)}
    :exit, _ -> {:error, Error.new(:closed, "the consumer is closed")}
  end

  # %{{topic, partition} => handle}
  defp assigned(handles) do
    for handle <- handles,
        %{state: :assigned} = p <- Handle.info(handle).partitions,
        into: %{},
        do: {{p.topic, p.partition}, handle}
  end

  @kind "consumer or pipeline"

  # {:ok, those of its members that have a connection, how many have none}
  defp handles(server) do
    with :ok <- runs(server) do
      case Info.find(server) do
        {kind, _name, _group, keys} when kind in [:consumer, :pipeline] ->
          handles =
            for {_index, key} <- keys,
                {pid, ref} <- Registry.lookup(Kmq.Registry, {:native, key}),
                do: %Handle{pid: pid, ref: ref}

          {:ok, handles, length(keys) - length(handles)}

        _other ->
          raise ArgumentError,
                "expected a consumer or a pipeline's name, got: #{inspect(server)}"
      end
    end
  end

  # A process that was there, or a name that stands for nothing; a pipeline has one that nothing need run by.
  defp runs(server) do
    case Ask.resolve(server) do
      pid when is_pid(pid) and node(pid) == node() ->
        if Process.alive?(pid), do: :ok, else: {:error, Ask.closed(@kind)}

      nil ->
        if Info.pipeline?(server), do: :ok, else: {:error, Ask.closed(@kind, server)}

      _elsewhere_or_no_name ->
        :ok
    end
  end

  # ---- in a process of its own: it asks the cluster

  @doc "The offset of a place."
  @spec position(Kmq.Config.t(), partition, place) :: {:ok, non_neg_integer} | {:error, Error.t()}
  def position(config, {topic, partition}, to) do
    Security.with_admin(config.admin_props, @ask_ms, fn admin ->
      with {:ok, {low, high}} <-
             :kmq_nif.admin_watermarks(admin, topic, partition, @ask_ms),
           {:ok, offset} <- offset(to, admin, topic, partition, low, high) do
        if offset in low..high, do: {:ok, offset}, else: out_of_range(offset, low, high)
      end
    end)
    |> native()
  end

  defp offset(:beginning, _admin, _topic, _partition, low, _high), do: {:ok, low}
  defp offset(:end, _admin, _topic, _partition, _low, high), do: {:ok, high}

  defp offset({:timestamp, ms}, admin, topic, partition, _low, high) do
    with {:ok, cluster} <- :kmq_nif.admin_cluster_id(admin, @ask_ms),
         :ok <- real(cluster),
         {:ok, offset} <- :kmq_nif.admin_offset_for_time(admin, topic, partition, ms, @ask_ms) do
      {:ok, if(offset >= 0, do: offset, else: high)}
    end
  end

  defp offset(offset, _admin, _topic, _partition, _low, _high), do: {:ok, offset}

  defp real("mockCluster" <> _),
    do: {:error, Error.new(:unsupported_feature, "a sandbox does not know where a time is")}

  defp real(_cluster), do: :ok

  defp out_of_range(offset, low, high) do
    {:error,
     Error.new(
       :offset_out_of_range,
       "offset #{offset} is not there: the partition has #{low} to #{high}"
     )}
  end

  defp native({:error, error}), do: {:error, Error.from_native(error, "seek")}
  defp native(ok), do: ok
end
