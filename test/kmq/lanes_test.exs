defmodule Kmq.LanesTest do
  use ExUnit.Case, async: true

  alias Kmq.{Lanes, Ordering}
  alias OffBroadway.Kmq.{Acknowledger, Producer}

  defp mark(lanes, lane, seq), do: {1, Lanes.carried(lanes), lane, seq}

  test "room is what was asked for and is not there yet" do
    lanes = Lanes.new(:partition, 2, 10, nil)
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
    lanes = Lanes.new(:key, 3, 10, nil)
    for lane <- 0..2, do: Lanes.send_out(lanes, lane, 10)
    assert Lanes.rooms(lanes, 20) == [0, 0, 0]
    assert Lanes.rooms(lanes, 23) == [3, 3, 3]
    assert Lanes.rooms(lanes, 30) == [10, 10, 10]
  end

  test "new processors have nothing" do
    lanes = Lanes.new(:key, 2, 3, nil)
    for lane <- 0..1, do: Lanes.send_out(lanes, lane, 3)
    Lanes.reset(lanes)
    assert Lanes.rooms(lanes, 0) == [3, 3]
    # Late words of the old ones change nothing.
    Lanes.left(mark(lanes, 0, 2))
    Lanes.send_out(lanes, 0, 1)
    assert Lanes.rooms(lanes, 0) == [2, 3]
  end

  test "with batchers: who found no room is told once when there is some" do
    lanes = Lanes.new(:partition, 2, 1, self())
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
    lanes = Lanes.new(:partition, 2, 2, self())
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
      lanes = Lanes.new(:key, 1, 1, self())
      rooms = Lanes.rooms(lanes, 0)
      Lanes.send_out(lanes, 0, 1)
      left = Task.async(fn -> Lanes.left(mark(lanes, 0, 1)) end)
      Lanes.hungry(lanes, rooms, %{0 => 1})
      Task.await(left)
      assert_received {:kmq, :room}
    end
  end

  test "a producer gives nothing to processors that end together, and begins anew when the last is gone" do
    lanes = Lanes.new(:partition, 2, 1, nil)
    for lane <- 0..1, do: Lanes.send_out(lanes, lane, 1)
    [a, b] = for _ <- 1..2, do: spawn(fn -> :ok end)

    state =
      struct(Producer,
        lanes: lanes,
        order: {{:partition, 0, 2}, 2, 1, false},
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
