defmodule Kmq.Lanes do
  @moduledoc false
  # How much each processor of a pipeline still wants, as one producer sees it.
  #
  # Where an order is kept, GenStage's PartitionDispatcher tells a producer only the sum of what its processors ask for. A
  # producer that spends the sum on one busy processor has nothing left for the others: they wait although they are free, and what
  # waits for the busy one in the dispatcher is lost when that one dies. So a producer counts for itself:
  #
  #   sent[lane]    number of the last message emitted to that processor
  #   passed[lane]  number of the last one that the dispatcher has seen: a rate limit may hold messages between the two
  #   done[lane]    number of the last one that left it: acknowledged, or arrived in a batcher
  #   room          sure - (sent - done), sure = min_demand + 1
  #
  # Why `sure`. A processor asks for max_demand at first, and again, up to max_demand, when it has worked off a portion of at most max - min
  # and min_demand or less of what it has asked for is still to come. So at any time more than min_demand of it are: that much is its own, and
  # what else it may have asked for depends on the portions, which nobody outside knows. What is promised is never more than was asked for.
  #
  # Two things say more. What is asked for in all, beyond what all other lanes can have asked for (max_demand each), must be this lane's: that is its
  # least room. With a demand of everything every lane is empty, whatever was counted.
  #
  # A message carries its number in its ack data, and whoever finds it has left raises `done`: processors work in order, so a number
  # that was missed (a handler took the acknowledger away) is made good by the next one. Where a handler takes all of them away, no
  # next one comes. So where a lane is found without room twice (a second look comes within 50 ms), and nothing was done of it between, its processor
  # is asked whether it is through: by a system message, which it answers when it has worked off what was sent to it before. One question a
  # lane is on its way at a time.
  #
  #   without batchers   an answer proves it
  #   with batchers      a processor that waits for a batcher puts what comes aside, and answers all the same. So an answer counts only as
  #                      far as the demand bears it out: what is asked for, less what is surely asked for by the other lanes (through/3).
  #
  # Atomics, because `done` is written by processors and batchers: 4 x n counters, [sent | done | waiting | passed]. `waiting` is set by a
  # producer that found no room, and tells the next one that raises `done` to wake it.
  #
  # Why a producer that goes away hungry is called again.
  #
  #   without batchers   `done` is raised before the processor asks. Where max <= 2 min + 1, as it is by default, a lane without room asks
  #                      before all that is sent to it is worked off, and at that time there is room. Else as with batchers.
  #   with batchers      it asks first, and `done` is raised when the batcher has its messages, after the last ask maybe. So each lane
  #                      that is full when the producer goes away has `waiting` set: whether it was before the hand-out (rooms/2),
  #                      or the hand-out has used up the room that it was given (hungry/3). Set, then looked at again: what was made
  #                      since the room was counted is seen by the one or said by the other. Whoever clears the mark sends `room`, and `room` is a take.

  @enforce_keys [:mode, :n, :max, :sure, :ref]
  defstruct [:mode, :n, :max, :sure, :ref, :wake, batchers?: false]

  @type t :: %__MODULE__{
          mode: :partition | :key,
          n: pos_integer,
          max: pos_integer,
          sure: pos_integer,
          ref: :atomics.atomics_ref(),
          wake: pid | nil,
          batchers?: boolean
        }
  @typedoc "In a message's ack data, in the place of its attempt."
  @type mark ::
          {attempt :: pos_integer | Kmq.LetterWriter.original(),
           {:atomics.atomics_ref(), pos_integer, pid | nil}, lane :: non_neg_integer,
           seq :: pos_integer}

  @doc "For the calling producer: it gets `{:kmq, :room}` where its processors do not ask again by themselves."
  @spec new(:partition | :key, pos_integer, {max :: pos_integer, min :: non_neg_integer}, boolean) ::
          t
  def new(mode, n, {max, min}, batchers?) do
    %__MODULE__{
      mode: mode,
      n: n,
      max: max,
      sure: min + 1,
      ref: :atomics.new(4 * n, []),
      wake: if(batchers? or max > 2 * min + 1, do: self()),
      batchers?: batchers?
    }
  end

  @doc "The room of each lane, where so many messages are asked for in all."
  @spec rooms(t, non_neg_integer) :: [integer]
  def rooms(lanes, demand), do: rooms(lanes, demand - (lanes.n - 1) * lanes.max, lanes.n, [])

  defp rooms(_lanes, _least, 0, acc), do: acc

  defp rooms(%{n: n} = lanes, least, ix, acc) do
    room =
      case room(lanes, ix) do
        room when room > 0 or lanes.wake == nil ->
          room

        _none ->
          # Whoever makes room from here on says so; who has made some just now is seen.
          :atomics.put(lanes.ref, 2 * n + ix, 1)
          room(lanes, ix)
      end

    rooms(lanes, least, ix - 1, [max(room, least) | acc])
  end

  @doc "The caller wants more than it got within these rooms, of which it used so much: whoever makes more of a room that is used up says so."
  @spec hungry(t, [integer], %{(lane :: non_neg_integer) => pos_integer}) :: :ok
  def hungry(%{wake: nil}, _rooms, _used), do: :ok

  def hungry(%{ref: ref, n: n, wake: wake} = lanes, rooms, used) do
    for {given, lane} <- Enum.with_index(rooms), given <= Map.get(used, lane, 0) do
      :atomics.put(ref, 2 * n + lane + 1, 1)
      if room(lanes, lane + 1) > 0, do: say_room(ref, 2 * n + lane + 1, wake)
    end

    :ok
  end

  defp say_room(ref, waiting, wake) do
    if :atomics.get(ref, waiting) == 1 && :atomics.exchange(ref, waiting, 0) == 1,
      do: send(wake, {:kmq, :room})
  end

  defp room(%{ref: ref, n: n, sure: sure}, ix),
    do: sure - (:atomics.get(ref, ix) - :atomics.get(ref, n + ix))

  @doc "Of the lanes that have used up their rooms those with something in their processors: how much is done, and the number of the last message there."
  @spec full(t, [integer], %{(lane :: non_neg_integer) => pos_integer}) :: [
          {lane :: non_neg_integer, done :: non_neg_integer, number :: pos_integer}
        ]
  def full(%{ref: ref, n: n}, rooms, used) do
    for {given, lane} <- Enum.with_index(rooms),
        given <= Map.get(used, lane, 0),
        done = :atomics.get(ref, n + lane + 1),
        passed = :atomics.get(ref, 3 * n + lane + 1),
        passed > done,
        do: {lane, done, passed}
  end

  @doc "Its processor says that it is through with so many, with that demand in all: was something of it not known?"
  @spec through(t, non_neg_integer, pos_integer, non_neg_integer) :: boolean
  def through(%{ref: ref, n: n} = lanes, lane, number, demand) do
    new = number - :atomics.get(ref, n + lane + 1)
    true? = new > 0 and (not lanes.batchers? or new + surely_asked(lanes) <= demand)
    true? && raise_to(ref, n + lane + 1, number)
    true?
  end

  defp surely_asked(lanes),
    do: Enum.reduce(1..lanes.n, 0, &(max(room(lanes, &1), 0) + &2))

  @doc "So many are emitted to a lane; the number before the first of them."
  @spec send_out(t, non_neg_integer, pos_integer) :: non_neg_integer
  def send_out(lanes, lane, count), do: :atomics.add_get(lanes.ref, lane + 1, count) - count

  @doc "The dispatcher has seen it."
  @spec passed(mark) :: :ok
  def passed({_attempt, {ref, n, _wake}, lane, seq}), do: :atomics.put(ref, 3 * n + lane + 1, seq)

  @doc "Was something emitted that the dispatcher has not seen? Of a producer that has ended: it is nobody's."
  @spec lost?(t) :: boolean
  def lost?(%{ref: ref, n: n}),
    do: Enum.any?(1..n, &(:atomics.get(ref, &1) > :atomics.get(ref, 3 * n + &1)))

  @doc "What messages of these lanes carry."
  @spec carried(t) :: {:atomics.atomics_ref(), pos_integer, pid | nil}
  def carried(lanes), do: {lanes.ref, lanes.n, lanes.wake}

  @doc "It has left its processor. Anything but a mark is nobody's."
  @spec left(mark | term) :: :ok
  def left({_attempt, {ref, n, wake}, lane, seq}) do
    raise_to(ref, n + lane + 1, seq)

    wake && say_room(ref, 2 * n + lane + 1, wake)
    :ok
  end

  def left(_attempt), do: :ok

  defp raise_to(ref, ix, seq), do: raise_to(ref, ix, seq, :atomics.get(ref, ix))

  defp raise_to(_ref, _ix, seq, now) when now >= seq, do: :ok

  defp raise_to(ref, ix, seq, now) do
    case :atomics.compare_exchange(ref, ix, now, seq) do
      :ok -> :ok
      other -> raise_to(ref, ix, seq, other)
    end
  end

  @doc "The processors are new: nothing is with them."
  @spec reset(t) :: :ok
  def reset(%{ref: ref, n: n}) do
    for ix <- 1..n, do: raise_to(ref, n + ix, :atomics.get(ref, ix))
    :ok
  end
end
