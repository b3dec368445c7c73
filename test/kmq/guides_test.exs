defmodule Kmq.GuidesTest do
  # What the guides and the README show at an iex prompt is what happens: each page is run from its top to its end.
  use ExUnit.Case

  import Kmq.Test.Eventually

  @moduletag :capture_log
  @moduletag timeout: 120_000

  pages = ["README.md" | Path.wildcard("guides/*.md")]

  for page <- pages, File.read!(page) =~ ~r/^iex> /m do
    @external_resource page
    test page do
      Process.flag(:trap_exit, true)

      unquote(page)
      |> File.read!()
      |> sessions()
      |> Enum.each(fn examples -> Enum.reduce(examples, [], &run(unquote(page), &1, &2)) end)

      stop_linked()
      eventually(fn -> assert Enum.all?(:kmq_nif.live(), fn {_, n} -> n == 0 end) end, 20_000)
    end
  end

  # Each block with a prompt is a session of its own.
  defp sessions(text) do
    for [_, block] <- Regex.scan(~r/^```elixir\n(.*?)^```/ms, text),
        block =~ ~r/^iex> /m,
        do: block |> String.split("\n") |> examples([])
  end

  # [{expression, expected or ""}]
  defp examples([], acc), do: Enum.reverse(acc)

  defp examples(["iex> " <> code | rest], acc) do
    {more, rest} = Enum.split_while(rest, &String.starts_with?(&1, "...> "))
    code = Enum.join([code | Enum.map(more, &String.trim_leading(&1, "...> "))], "\n")

    {expected, rest} =
      Enum.split_while(rest, &(&1 != "" and not String.starts_with?(&1, "iex> ")))

    examples(rest, [{code, Enum.join(expected, "\n")} | acc])
  end

  defp examples([_ | rest], acc), do: examples(rest, acc)

  defp run(page, {code, expected}, binding) do
    {value, binding} = Code.eval_string(code, binding, file: page)

    if expected != "" do
      {wanted, _} = Code.eval_string(expected, binding, file: page)
      assert {code, value} == {code, wanted}
    end

    binding
  end

  # What a session has started and not stopped: consumers first, the sandbox last.
  defp stop_linked do
    {:links, links} = Process.info(self(), :links)

    for pid <- Enum.reverse(Enum.sort(links)), is_pid(pid) do
      Process.exit(pid, :shutdown)
      assert_receive {:EXIT, ^pid, _}, scaled(20_000)
    end
  end
end
