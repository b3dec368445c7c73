defmodule Kmq.ProducerTest do
  use ExUnit.Case, async: true

  alias OffBroadway.Kmq.Producer

  # The handle is none: what a hand-out would have got stays asked for.
  test "who asks while others ask, too, gets one hand-out with them" do
    state = %Producer{}

    assert {:noreply, [], %{demand: 5, gathering: false} = state} =
             Producer.handle_demand(5, state)

    refute_received {:kmq, :asked}

    send(self(), :another_ask)

    assert {:noreply, [], %{demand: 10, gathering: true} = state} =
             Producer.handle_demand(5, state)

    assert {:noreply, [], %{demand: 15, gathering: true} = state} =
             Producer.handle_demand(5, state)

    assert_received :another_ask
    assert_received {:kmq, :asked}
    refute_received {:kmq, :asked}

    assert {:noreply, [], %{demand: 15, gathering: false}} =
             Producer.handle_info({:kmq, :asked}, state)
  end
end
