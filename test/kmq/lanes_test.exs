defmodule Kmq.LanesTest do
  use ExUnit.Case, async: true

  alias Kmq.{Lanes, Ordering}
  alias OffBroadway.Kmq.{Acknowledger, Producer}

  defp mark(lanes, lane, seq), do: {1, Lanes.carried(lanes), lane, seq}

  test "room is what was asked for and is not there yet" do
    lanes = Lanes.new(:partition, 2, {10, 9}, false)
    assert Lanes.rooms(lanes, 0) == [10, 10]
    assert Lanes.send_out(lanes, 1, 4) == 0
    assert Lanes.send_out(lanes, 1, 2) == 4
    assert Lanes.rooms(lanes, 0) == [10, 4]
    Lanes.left(mark(lanes, 1, 4))
    # Behind the last one that left are those before it, too; an older one takes nothing back.
    Lanes.left(mark(lanes, 1, 2))
    assert Lanes.rooms(lanes, 0) == [10, 8]
    Lanes.left({1, 2})
    Lanes.left(1)
  end

  test "what the others cannot have asked for is this lane's" do
    lanes = Lanes.new(:key, 3, {10, 9}, false)
    for lane <- 0..2, do: Lanes.send_out(lanes, lane, 10)
    assert Lanes.rooms(lanes, 20) == [0, 0, 0]
    assert Lanes.rooms(lanes, 23) == [3, 3, 3]
    assert Lanes.rooms(lanes, 30) == [10, 10, 10]
  end

  test "more than min_demand of what a processor has asked for is its own, whatever its portions; less is not promised" do
    lanes = Lanes.new(:partition, 2, {10, 5}, false)
    assert Lanes.rooms(lanes, 20) == [10, 10]
    Lanes.send_out(lanes, 0, 4)
    Lanes.left(mark(lanes, 0, 4))
    # It has not asked again: 6 of its 10 are left.
    assert Lanes.rooms(lanes, 16) == [6, 6]
  end

  test "who is through with all it got is asked, once its acknowledgers are taken away" do
    for {batchers?, demand, known?} <- [{false, 0, true}, {true, 2, true}, {true, 1, false}] do
      lanes = Lanes.new(:partition, 2, {2, 1}, batchers?)
      for _ <- 1..2, do: Lanes.send_out(lanes, 0, 1)
      # Held back by a rate limit: nobody can be through with it.
      assert Lanes.full(lanes, [0, 2], %{}) == []
      Ordering.processor(%{acknowledger: {Acknowledger, nil, {0, 0, mark(lanes, 0, 2)}}}, nil)
      assert Lanes.full(lanes, [0, 2], %{}) == [{0, 0, 2}]
      # Lane 1 has not got anything: its two are its own.
      demand = demand + if(batchers?, do: 2, else: 0)
      assert Lanes.through(lanes, 0, 2, demand) == known?
      assert Lanes.rooms(lanes, 0) == if(known?, do: [2, 2], else: [0, 2])
      # An answer that comes late.
      if known?, do: refute(Lanes.through(lanes, 0, 1, 10))
    end
  end

  # Processors as GenStage's consumers, with whatever portions come about; some take their messages' marks away.
  test "whatever the portions: a producer that keeps to its rooms never emits what was not asked for, and none stands still" do
    seed = ExUnit.configuration()[:seed]
    IO.puts(:stderr, "lanes: seed #{seed}")
    :rand.seed(:exsss, {seed, 5, 3})

    for round <- 1..300 do
      n = :rand.uniform(4)
      max = :rand.uniform(12)
      min = :rand.uniform(max) - 1
      lanes = Lanes.new(:key, n, {max, min}, false)
      idle = %{pending: max, mail: [], seq: 0, sent: 0, asked: max}
      state = %{lanes: lanes, max: max, min: min, demand: n * max, loses: rem(round, 3)}
      processors = Map.new(0..(n - 1), &{&1, idle})

      {state, processors} =
        Enum.reduce(1..200, {state, processors}, fn _, acc ->
          if :rand.uniform(2) == 1, do: emit(acc), else: work(acc, :rand.uniform(n) - 1)
        end)

      # All of it is worked off; each lane has room again, at the latest when its processor says that it is through.
      {state, processors} = Enum.reduce(0..(n - 1), {state, processors}, &work_off(&2, &1))
      for {lane, p} <- processors, do: Lanes.through(lanes, lane, p.sent, state.demand)
      assert Enum.all?(Lanes.rooms(lanes, state.demand), &(&1 > min))
    end
  end

  defp emit({state, processors}) do
    rooms = Lanes.rooms(state.lanes, state.demand)

    Enum.reduce(Enum.with_index(rooms), {state, processors}, fn {room, lane}, {state, all} ->
      count = min(room, state.demand) |> max(0) |> then(&:rand.uniform(&1 + 1)) |> Kernel.-(1)
      p = all[lane]
      assert p.sent + count <= p.asked, "#{inspect(state)} #{inspect(p)}"
      Lanes.send_out(state.lanes, lane, count)
      mail = if count > 0, do: p.mail ++ [count], else: p.mail

      {%{state | demand: state.demand - count},
       %{all | lane => %{p | sent: p.sent + count, mail: mail}}}
    end)
  end

  # The first portion of its first delivery, and what it asks for behind it.
  defp work({state, all}, lane) do
    case all[lane] do
      %{mail: []} ->
        {state, all}

      %{mail: [count | mail]} = p ->
        now = min(count, state.max - state.min)
        mail = if count > now, do: [count - now | mail], else: mail
        seq = p.seq + now
        lost? = state.loses == 2 or (state.loses == 1 and :rand.uniform(2) == 1)
        unless lost?, do: Lanes.left(mark(state.lanes, lane, seq))
        pending = p.pending - now
        more = if pending <= state.min, do: state.max - pending, else: 0
        p = %{p | mail: mail, seq: seq, pending: pending + more, asked: p.asked + more}
        {%{state | demand: state.demand + more}, %{all | lane => p}}
    end
  end

  defp work_off({_state, all} = acc, lane),
    do: if(all[lane].mail == [], do: acc, else: acc |> work(lane) |> work_off(lane))

  test "new processors have nothing" do
    lanes = Lanes.new(:key, 2, {3, 2}, false)
    for lane <- 0..1, do: Lanes.send_out(lanes, lane, 3)
    Lanes.reset(lanes)
    assert Lanes.rooms(lanes, 0) == [3, 3]
    # Late words of the old ones change nothing.
    Lanes.left(mark(lanes, 0, 2))
    Lanes.send_out(lanes, 0, 1)
    assert Lanes.rooms(lanes, 0) == [2, 3]
  end

  test "with batchers: who found no room is told once when there is some" do
    lanes = Lanes.new(:partition, 2, {1, 0}, true)
    Lanes.send_out(lanes, 0, 1)
    Lanes.left(mark(lanes, 0, 1))
    refute_received {:kmq, :room}

    Lanes.send_out(lanes, 0, 1)
    assert Lanes.rooms(lanes, 0) == [0, 1]
    message = %{metadata: %{}, acknowledger: {Acknowledger, nil, {0, 0, mark(lanes, 0, 2)}}}
    assert Ordering.batcher(message, {:key, 4}) == 0
    assert_received {:kmq, :room}
    Ordering.batcher(message, {:key, 4})
    refute_received {:kmq, :room}
    assert Lanes.rooms(lanes, 0) == [1, 1]
  end

  test "with batchers: room that the hand-out itself has used up is said, too, and seen when it was made meanwhile" do
    lanes = Lanes.new(:partition, 2, {2, 1}, true)
    Lanes.send_out(lanes, 0, 1)
    assert [1, 2] = rooms = Lanes.rooms(lanes, 0)
    Lanes.send_out(lanes, 0, 1)
    Lanes.hungry(lanes, rooms, %{0 => 1})
    refute_received {:kmq, :room}
    Lanes.left(mark(lanes, 0, 1))
    assert_received {:kmq, :room}

    # Between the look and the end of the hand-out.
    assert [1, 2] = rooms = Lanes.rooms(lanes, 0)
    Lanes.send_out(lanes, 0, 1)
    Lanes.left(mark(lanes, 0, 3))
    refute_received {:kmq, :room}
    Lanes.hungry(lanes, rooms, %{0 => 1})
    assert_received {:kmq, :room}

    # What is not used up is nobody's concern.
    assert [2, 2] = rooms = Lanes.rooms(lanes, 0)
    Lanes.hungry(lanes, rooms, %{0 => 1})
    Lanes.left(mark(lanes, 0, 4))
    refute_received {:kmq, :room}
  end

  test "whoever makes room and whoever misses it cannot pass each other by" do
    for _ <- 1..2_000 do
      lanes = Lanes.new(:key, 1, {1, 0}, true)
      rooms = Lanes.rooms(lanes, 0)
      Lanes.send_out(lanes, 0, 1)
      left = Task.async(fn -> Lanes.left(mark(lanes, 0, 1)) end)
      Lanes.hungry(lanes, rooms, %{0 => 1})
      Task.await(left)
      assert_received {:kmq, :room}
    end
  end

  test "a producer gives nothing to processors that end together, and begins anew when the last is gone" do
    lanes = Lanes.new(:partition, 2, {1, 0}, false)
    for lane <- 0..1, do: Lanes.send_out(lanes, lane, 1)
    [a, b] = for _ <- 1..2, do: spawn(fn -> :ok end)

    state =
      struct(Producer,
        lanes: lanes,
        order: %{
          scope: {:partition, 0, 2},
          processors: {nil, nil},
          demand: {1, 0},
          batchers?: false
        },
        processors: %{a => true, b => true},
        demand: 1
      )

    down = &{:DOWN, make_ref(), :process, &1, :killed}
    assert {:noreply, [], state} = Producer.handle_info(down.(a), state)
    assert state.dying == [b]
    # It would fail without a handle, if it took anything.
    assert {:noreply, [], state} = Producer.handle_info({:kmq, :room}, %{state | handle: :none})
    assert {:noreply, [], state} = Producer.handle_info(down.(b), %{state | handle: nil})
    assert {state.dying, state.processors} == {nil, %{}}
    assert Lanes.rooms(lanes, 0) == [1, 1]
  end
end
