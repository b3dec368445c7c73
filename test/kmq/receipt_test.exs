defmodule Kmq.ReceiptTest do
  use ExUnit.Case, async: true

  alias Kmq.Receipt

  @secret "0123456789abcdef"

  defp info(extra \\ []) do
    Map.merge(
      %{
        format: :range,
        group: "workers",
        marker_topics: %{"orders" => "orders__workers__markers"},
        backoff: {:exponential, 1_000, 300_000, 2.0, 0.2},
        secret: fn -> nil end
      },
      Map.new(extra)
    )
  end

  test "in and out again, in both formats and with every kind of backoff" do
    for format <- [:range, :kmq],
        backoff <- [
          {:exponential, 1, 2, 1.5, 0.0},
          {:linear, 1, 9, 3.0, 0.25},
          {:list, [5], 0.0},
          {:list, [5, 10, 5], 0.0}
        ],
        secret <- [nil, @secret] do
      info = info(format: format, backoff: backoff, secret: fn -> secret end)
      receipt = Receipt.encode(info, {"orders", 7, 123_456_789, 2})
      assert receipt =~ ~r/\Akmq1\.[A-Za-z0-9_-]+\z/

      assert Receipt.decode(receipt, secret) ==
               {:ok,
                %{
                  format: format,
                  partition: 7,
                  offset: 123_456_789,
                  attempt: 2,
                  group: "workers",
                  topic: "orders",
                  marker_topic: "orders__workers__markers",
                  backoff: backoff
                }}
    end
  end

  test "a signed one that was changed anywhere is refused, and so is one of somebody else" do
    receipt = Receipt.encode(info(secret: fn -> @secret end), {"orders", 7, 5, 1})
    "kmq1." <> text = receipt
    {:ok, bytes} = Base.url_decode64(text, padding: false)

    for i <- 0..(byte_size(bytes) - 1) do
      <<head::binary-size(i), byte, tail::binary>> = bytes
      changed = head <> <<Bitwise.bxor(byte, 1)>> <> tail
      text = "kmq1." <> Base.url_encode64(changed, padding: false)
      assert {:error, %{reason: :receipt}} = Receipt.decode(text, @secret)
    end

    # Of its last character, too, some bits stand for nothing.
    for i <- 0..(byte_size(text) - 1), letter <- [?A, ?B, ?C, ?D, ?_, ?=] do
      <<head::binary-size(i), char, tail::binary>> = text

      if letter != char do
        changed = "kmq1." <> head <> <<letter>> <> tail
        assert {:error, %{reason: :receipt}} = Receipt.decode(changed, @secret)
      end
    end

    assert {:error, %{reason: :receipt}} = Receipt.decode(receipt <> "=", @secret)

    assert {:error, %{message: "the receipt is not signed with" <> _}} =
             Receipt.decode(receipt, "another secret of 16 bytes")

    assert {:error, %{message: "the receipt is signed, and" <> _}} = Receipt.decode(receipt, nil)
    unsigned = Receipt.encode(info(), {"orders", 7, 5, 1})

    assert {:error, %{message: "the receipt is not signed"}} = Receipt.decode(unsigned, @secret)
  end

  test "what is none is refused, whatever it is" do
    unsigned = Receipt.encode(info(), {"orders", 7, 5, 1})

    cut =
      for n <- 0..(byte_size(unsigned) - 1),
          do: binary_part(unsigned, 0, n)

    for text <- ["", "kmq1.", "kmq2.abc", "kmq1.!!", 5, nil, unsigned <> "AAAA" | cut],
        secret <- [nil, @secret] do
      assert {:error, %{reason: :receipt}} = Receipt.decode(text, secret)
    end
  end

  test "its markers are those of the format" do
    {:ok, receipt} = Receipt.decode(Receipt.encode(info(), {"orders", 7, 1_000, 1}), nil)
    head = <<0, 0x4B, 1>>
    scope = <<0xC55EEED1::32, 0xE8, 0x07, 0, 1, 0, 1>>
    key = <<7::32, -1::64>>

    for {verdict, value} <- [
          {:ack, head <> <<2>> <> scope <> <<0>>},
          {:discard, head <> <<2>> <> scope <> <<1>>},
          {:release, head <> <<4>> <> scope <> <<0, 2, 0>>},
          {{:snooze, 300}, head <> <<4>> <> scope <> <<0xAC, 0x02, 3, 0>>},
          {{:retry, 0}, head <> <<4>> <> scope <> <<0, 0, 1>>},
          {{:reject, "boom"}, head <> <<4>> <> scope <> <<0, 4, 3, 1, 4, "boom">>}
        ] do
      assert Receipt.marker(receipt, verdict) ==
               {"orders__workers__markers", value, key: key, partition: 7, headers: []}
    end

    kmq = %{receipt | format: :kmq}
    key = <<7::32, 1_000::64>>

    assert {_, <<0>>, key: ^key, partition: 7, headers: [{"kmq-group", "workers"}]} =
             Receipt.marker(kmq, :ack)

    assert {_, <<1, 300::64>>, options} = Receipt.marker(kmq, {:snooze, 300})

    assert options[:headers] == [
             {"kmq-group", "workers"},
             {"kmq-cause", "snoozed"},
             {"kmq-flags", "0"}
           ]

    for verdict <- [:done, {:snooze, "x"}] do
      assert_raise ArgumentError, ~r/^expected a verdict, :ack, .*{:snooze, ms}, .*got: /, fn ->
        Receipt.marker(receipt, verdict)
      end
    end

    assert_raise ArgumentError, ~r/^a receipt takes no function: give ms or a backoff/, fn ->
      Receipt.marker(receipt, {:retry, fn _attempt, _reason -> 5 end})
    end
  end
end
