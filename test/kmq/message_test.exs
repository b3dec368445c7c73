defmodule Kmq.MessageTest do
  use ExUnit.Case, async: true

  alias Kmq.{Handle, Message}

  @handle %Handle{pid: nil, ref: nil}

  test "batches become messages, in order, nil and empty kept apart" do
    batches = [
      {1, "q", 0,
       [{5, 100, nil, "", [], 1, 1, nil}, {7, 101, "", nil, [{"h", nil}], 2, 3, "q/0/1/50"}]},
      {2, "r", 9, [{0, 102, "k", "v", [], 1, 1, nil}]}
    ]

    assert [a, b, c] =
             Message.from_batches(batches, @handle, %{
               backoff: {:list, [1], 0.0},
               delivery: :markers
             })

    assert {a.topic, a.partition, a.offset, a.key, a.value, a.slot} == {"q", 0, 5, nil, "", 1}
    assert {b.key, b.value, b.headers, b.attempt, b.deliveries} == {"", nil, [{"h", nil}], 2, 3}
    assert {c.topic, c.partition, c.offset, c.slot} == {"r", 9, 0, 2}
    assert Enum.map([a, b, c], & &1.id) == [{"q", 0, 5, 100}, {"q", 0, 1, 50}, {"r", 9, 0, 102}]
  end

  test "an origin header that is not ours is no origin" do
    for header <- ["", "q/0/1", "q/x/1/2", "q/0/1/2/3", "q/0/1/2x", <<255, 0>>] do
      assert Message.id(header, "t", 1, 2, 3) == {"t", 1, 2, 3}
    end
  end

  test "inspect shows the message and nothing of the engine" do
    text =
      inspect(%Message{topic: "q", partition: 0, offset: 1, handle: @handle, slot: 3, value: "v"})

    assert text =~ "value: \"v\""
    refute text =~ "Kmq.Handle"
  end

  test "reasons become short UTF-8 texts" do
    assert Kmq.reason_text("not JSON") == "not JSON"
    assert Kmq.reason_text(:timeout) == "timeout"
    assert Kmq.reason_text(%Kmq.Reject{message: "no"}) == "no"
    assert Kmq.reason_text({:error, 5}) == "{:error, 5}"
    assert Kmq.reason_text(<<255>>) == "<<255>>"
    long = String.duplicate("ä", 400)
    assert Kmq.reason_text(long) == String.duplicate("ä", 256)
    odd = "x" <> long
    assert Kmq.reason_text(odd) == "x" <> String.duplicate("ä", 255)
  end

  test "nothing to settle is done" do
    assert Kmq.ack([]) == :ok
  end

  test "what is no message is said, and what settles a pipeline's" do
    assert_raise ArgumentError, ~r/expected a Kmq.Message or a list of them, got: "flour"$/, fn ->
      Kmq.ack("flour")
    end

    assert_raise ArgumentError, ~r/got: .*settled by Broadway: return them, or/, fn ->
      Kmq.retry([%{data: "flour", acknowledger: nil}], delay: 5)
    end

    # options where the reason belongs
    assert_raise ArgumentError, ~r/Kmq.reject\(message, nil, \[sync: true\]\)/, fn ->
      Kmq.reject([], sync: true)
    end

    assert Kmq.ack([]) == :ok
  end
end
