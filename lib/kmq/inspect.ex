defmodule Kmq.Inspect do
  @moduledoc false
  # What of a queue is open, read from its topics by one that is no member of any group. For a look now and then: it begins where the
  # tracker would begin after a restart, reads on to the end, and keeps an entry for each open message.
  #
  #     from = the tracker's commit                    last
  #      |  S S E  S E E ... K K K  S E S ...           |      K: a CHECKPOINT. What is open since before `from` comes by it

  import Bitwise
  alias Kmq.{Config, Error, Reach, Security, Tracker}

  @timeout_ms 15_000
  @chunk 10_000
  # So many markers, and it is said how far it is.
  @told 50_000

  @type partition :: %{
          topic: String.t(),
          partition: non_neg_integer,
          end_offset: non_neg_integer,
          committed: non_neg_integer | nil,
          lag: non_neg_integer,
          markers: non_neg_integer,
          open: non_neg_integer,
          parked: non_neg_integer,
          oldest: non_neg_integer | nil,
          oldest_since_ms: integer | nil,
          next_due_ms: integer | nil
        }

  @typedoc "How far it is with the markers of a partition; told while it takes longer than a moment."
  @type progress ::
          (topic :: String.t(), non_neg_integer, read :: pos_integer, of :: pos_integer -> any)

  @spec partitions(keyword, progress) :: {:ok, [partition]} | {:error, Error.t()}
  def partitions(options, progress \\ fn _, _, _, _ -> :ok end) do
    with {:ok, config} <- Config.new(options, :tracker) do
      with_admin(config.admin_props, config.group_id, fn queue ->
        tracker_group = Tracker.tracker_group(config.group_id)

        with {:ok, id} <- Reach.cluster_id(queue, config.bootstrap, @timeout_ms) do
          with_admin(config.admin_props, tracker_group, fn markers ->
            config.topics |> collect(&topic({queue, markers, id}, config, &1, progress))
          end)
        end
      end)
    end
  end

  defp with_admin(props, group, fun) do
    # What a transaction wrote and gave up is no marker.
    props =
      [{"group.id", group}, {"isolation.level", "read_committed"}] ++
        Enum.reject(props, fn {name, _} -> name in ["group.id", "isolation.level"] end)

    native(Security.with_admin(props, @timeout_ms, fun))
  end

  defp topic({queue, markers, cluster}, config, topic, progress) do
    marker_topic = config.marker_topics[topic]

    with {:ok, n} <- size(queue, cluster, topic),
         :ok <- marked(queue, cluster, marker_topic, config.group_id),
         {:ok, commits} <- commits(queue, topic, n),
         {:ok, marker_commits} <- commits(markers, marker_topic, n) do
      collect(0..(n - 1), fn partition ->
        with {:ok, {low, high}} <-
               native(:kmq_nif.admin_watermarks(queue, topic, partition, @timeout_ms)),
             {:ok, {first, last}} <-
               native(:kmq_nif.admin_watermarks(markers, marker_topic, partition, @timeout_ms)),
             from = max(marker_commits[partition] || first, first),
             told = fn at -> progress.(topic, partition, at - from, last - from) end,
             book = %{book(config, topic) | from: from},
             {:ok, book} <- read(markers, {marker_topic, partition}, from, last, told, book) do
          {:ok, [row(topic, partition, {low, high}, commits[partition], last - from, book)]}
        end
      end)
    end
  end

  defp row(topic, partition, {low, high}, committed, markers, book) do
    {oldest, lease} = Enum.min(book.open, fn -> {nil, nil} end)

    %{
      topic: topic,
      partition: partition,
      end_offset: high,
      committed: committed,
      lag: high - (committed || low),
      markers: markers,
      open: map_size(book.open),
      parked: Enum.count(book.open, fn {_, lease} -> lease.kind == :parked end),
      oldest: oldest,
      oldest_since_ms: lease && lease.since,
      next_due_ms:
        book.open |> Enum.map(fn {_, lease} -> lease.due end) |> Enum.min(fn -> nil end)
    }
  end

  defp size(admin, cluster, topic) do
    case native(Reach.partitions(admin, cluster, topic, @timeout_ms)) do
      {:ok, 0} -> {:error, Reach.missing(admin, topic, @timeout_ms)}
      result -> result
    end
  end

  # Its name is derived, so nobody has mistyped it.
  defp marked(admin, cluster, marker_topic, group) do
    case native(Reach.partitions(admin, cluster, marker_topic, @timeout_ms)) do
      {:ok, 0} ->
        text =
          "group #{inspect(group)} has no markers: topic #{inspect(marker_topic)} does not exist. Is the group's name right (and :marker_topic, if " <>
            "it has one of its own)? With delivery: :offsets or :at_most_once there is none, the group's commits say all there is to say"

        {:error, Error.new(:marker_topic_missing, text)}

      {:ok, _n} ->
        :ok

      error ->
        error
    end
  end

  defp commits(admin, topic, n) do
    asked = for partition <- 0..(n - 1), do: {topic, partition}

    with {:ok, list} <- native(:kmq_nif.admin_committed(admin, asked, @timeout_ms)),
         do: {:ok, for({_, p, offset} <- list, offset >= 0, into: %{}, do: {p, offset})}
  end

  defp read(_admin, _partition, from, last, _told, book) when from >= last, do: {:ok, book}

  defp read(admin, {topic, partition} = place, from, last, told, book) do
    n = min(@chunk, last - from)

    with {:ok, records} <-
           native(:kmq_nif.admin_read(admin, topic, partition, from, n, @timeout_ms)) do
      if div(from, @told) != div(from + n, @told), do: told.(from + n)
      read(admin, place, from + n, last, told, Enum.reduce(records, book, &apply_record/2))
    end
  end

  defp collect(items, fun) do
    Enum.reduce_while(items, {:ok, []}, fn item, {:ok, acc} ->
      case fun.(item) do
        {:ok, list} -> {:cont, {:ok, acc ++ list}}
        error -> {:halt, error}
      end
    end)
  end

  defp native({:error, error}), do: {:error, Error.from_native(error, "inspect")}
  defp native(result), do: result

  # ---- the fold over markers: guides/format.md

  @doc false
  # ended: %{offset => cause} of all that ended, for those who ask for it; else nil, it grows with every message.
  @spec book(Config.t(), String.t(), map | nil) :: map
  def book(config, topic, ended \\ nil) do
    # touched: opened or ended since the place where reading began, so that an older state in a CHECKPOINT is of no interest; bits, by
    # 32 offsets
    %{
      open: %{},
      ended: ended,
      touched: %{},
      # A CHECKPOINT of an earlier state knows nothing of what ended between it and this place.
      from: 0,
      now: 0,
      crc: :erlang.crc32([topic, 0, config.group_id]),
      group: config.group_id
    }
  end

  @doc false
  def apply_record({_offset, ts, key, value, headers, _, _, _}, book) do
    book = %{book | now: max(book.now, ts)}
    crc = book.crc

    case {key, value} do
      {<<_::32, -1::signed-64>>, <<0, 0x4B, 1, type, ^crc::32, body::binary>>} ->
        range(type, body, book)

      {<<_::32, offset::64>>, <<0>>} ->
        if ours?(headers, book), do: close([offset], 0, book), else: book

      {<<_::32, offset::64>>, <<1, ms::64, _::binary>>} ->
        if ours?(headers, book), do: single(offset, ms, Map.new(headers), book), else: book

      _foreign ->
        book
    end
  rescue
    # Not a marker, whatever it looks like.
    MatchError -> book
  end

  defp ours?(headers, book),
    do: List.keyfind(headers, "kmq-group", 0, {nil, book.group}) |> elem(1) == book.group

  defp single(offset, ms, headers, book) do
    case headers["kmq-cause"] do
      none when none in [nil, "crash"] -> open([offset], book, book.now + ms, :lease)
      "parked" -> open([offset], book, String.to_integer(headers["kmq-due"]), :parked)
      "extended" -> renew([offset], book, book.now + ms, [:lease], :lease)
      _retry -> renew([offset], book, book.now + ms, [:lease, :retry, :parked], :retry)
    end
  end

  defp range(1, body, book) do
    {offsets, rest} = set(body)
    {lease, _} = uvar(rest)
    open(offsets, book, book.now + lease, :lease)
  end

  defp range(2, body, book) do
    {offsets, <<cause, _::binary>>} = set(body)
    close(offsets, cause, book)
  end

  defp range(3, body, book) do
    {offsets, rest} = set(body)
    {lease, _} = uvar(rest)
    renew(offsets, book, book.now + lease, [:lease], :lease)
  end

  defp range(4, body, book) do
    {offsets, rest} = set(body)
    {delay, _} = uvar(rest)
    renew(offsets, book, book.now + delay, [:lease, :retry, :parked], :retry)
  end

  defp range(5, body, book) do
    {offsets, rest} = set(body)
    {due, _} = uvar(rest)
    open(offsets, book, due, :parked)
  end

  # What was open before the place where reading begins; what came after it is known better already.
  defp range(6, body, book) do
    {as_of, rest} = uvar(body)
    {_part, rest} = uvar(rest)
    {_parts, rest} = uvar(rest)
    {n, rest} = uvar(rest)
    if as_of >= book.from, do: entries(book, n, rest), else: book
  end

  defp range(_clock, _body, book), do: book

  defp entries(book, 0, _rest), do: book

  defp entries(book, n, bytes) do
    {offsets, rest} = set(bytes)
    {due, <<_cause, flags, rest::binary>>} = uvar(rest)
    kind = if (flags &&& 4) != 0, do: :parked, else: :lease
    lease = %{due: due, kind: kind, since: nil}
    untouched = Enum.reject(offsets, &touched?(&1, book))
    open = Enum.reduce(untouched, book.open, &Map.put_new(&2, &1, lease))
    entries(%{book | open: open}, n - 1, rest)
  end

  defp open(offsets, book, due, kind) do
    lease = %{due: due, kind: kind, since: book.now}
    ended = book.ended && Map.drop(book.ended, offsets)

    %{
      touch(offsets, book)
      | open: Enum.reduce(offsets, book.open, &Map.put(&2, &1, lease)),
        ended: ended
    }
  end

  defp close(offsets, cause, book) do
    # An END of what is not open does nothing.
    ended =
      if book.ended,
        do: for(o <- offsets, is_map_key(book.open, o), into: book.ended, do: {o, cause})

    %{touch(offsets, book) | open: Map.drop(book.open, offsets), ended: ended}
  end

  defp touch(offsets, book), do: %{book | touched: Enum.reduce(offsets, book.touched, &mark/2)}

  defp mark(offset, touched) do
    word = offset >>> 5
    bit = 1 <<< (offset &&& 31)

    case touched do
      %{^word => bits} when (bits &&& bit) != 0 -> touched
      %{^word => bits} -> %{touched | word => bits ||| bit}
      %{} -> Map.put(touched, word, bit)
    end
  end

  defp touched?(offset, book),
    do: (Map.get(book.touched, offset >>> 5, 0) &&& 1 <<< (offset &&& 31)) != 0

  defp renew(offsets, book, due, kinds, kind) do
    open =
      Enum.reduce(offsets, book.open, fn offset, open ->
        case open do
          %{^offset => lease} ->
            if lease.kind in kinds,
              do: %{open | offset => %{lease | due: due, kind: kind}},
              else: open

          _not_open ->
            open
        end
      end)

    %{book | open: open}
  end

  defp set(bytes) do
    {base, <<form, rest::binary>>} = uvar(bytes)
    {n, rest} = uvar(rest)
    if form == 0, do: runs(n, base, rest, []), else: bitmap(n, base, rest)
  end

  defp runs(0, _at, rest, acc), do: {acc |> Enum.reverse() |> Enum.concat(), rest}

  defp runs(n, at, bytes, acc) do
    {gap, rest} = uvar(bytes)
    {length, rest} = uvar(rest)
    from = at + gap
    runs(n - 1, from + length, rest, [Enum.to_list(from..(from + length - 1)//1) | acc])
  end

  defp bitmap(bits, base, bytes) do
    size = div(bits + 7, 8)
    <<map::binary-size(size), rest::binary>> = bytes

    offsets =
      for {byte, i} <- Enum.with_index(:binary.bin_to_list(map)),
          bit <- 0..7,
          (byte &&& 1 <<< bit) != 0,
          do: base + i * 8 + bit

    {offsets, rest}
  end

  defp uvar(bytes), do: uvar(bytes, 0, 0)
  defp uvar(<<0::1, bits::7, rest::binary>>, shift, acc), do: {acc ||| bits <<< shift, rest}

  defp uvar(<<1::1, bits::7, rest::binary>>, shift, acc) when shift < 64,
    do: uvar(rest, shift + 7, acc ||| bits <<< shift)
end
