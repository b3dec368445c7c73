defmodule Kmq.GuidesTest do
  # What the guides and the README show at an iex prompt is what happens: each page is run from its top to its end.
  use ExUnit.Case

  import Kmq.Test.Eventually
  alias Kmq.Test.Outside

  @moduletag :capture_log
  @moduletag timeout: 120_000

  pages = ["README.md" | Path.wildcard("guides/*.md")]

  for page <- pages, File.read!(page) =~ ~r/^iex> /m do
    @external_resource page
    @tag page: page
    test page do
      Process.flag(:trap_exit, true)

      unquote(page)
      |> File.read!()
      |> sessions()
      |> Enum.each(fn examples ->
        env = Code.env_for_eval(file: unquote(page))
        Enum.reduce(examples, {[], env}, &run(&1, &2))
      end)

      stop_linked()
      eventually(fn -> assert Enum.all?(:kmq_nif.live(), fn {_, n} -> n == 0 end) end, 20_000)
    end
  end

  for page <- pages do
    @tag page: page
    test "#{page}: blocks without a prompt are Elixir", %{page: page} do
      for {block, line} <- blocks(page), not (block =~ ~r/^iex> /m) do
        quoted = parse(block, file: page, line: line)
        compilable? = block =~ ~r/\A(#.*\n)*defmodule / and not (block =~ "use ExUnit.Case")
        if compilable? and broadway_if_needed?(block), do: compile(quoted, page)
        if is_list(quoted), do: assert_options(quoted)
      end
    end
  end

  # A whole test file in a page is run as one, in a VM of its own.
  for page <- pages, File.read!(page) =~ "use ExUnit.Case" do
    @external_resource page
    if File.read!(page) =~ "use Broadway", do: @tag(:broadway)
    @tag page: page
    test "#{page}: its tests pass", %{page: page} do
      for {block, _line} <- blocks(page), block =~ "use ExUnit.Case" do
        {output, status} = Outside.run_tests(block)
        assert {output, status} == {output, 0}
        assert output =~ ~r/[1-9]\d* tests?, 0 failures/
      end
    end
  end

  # What is shown as options is accepted as options.
  defp assert_options(quoted) do
    {shown, _} = Code.eval_quoted(quoted)
    needed = [hosts: "localhost:9092", topics: ["orders"], group_id: "shop"]

    unless Keyword.has_key?(shown, :producer),
      do: assert({:ok, _} = needed |> Keyword.merge(shown) |> Kmq.Config.new())
  end

  # A part of a list of options is shown without its brackets.
  defp parse(block, where) do
    with {:error, _} <- Code.string_to_quoted(block, where),
         {:error, _} <- Code.string_to_quoted("[" <> block <> "]", where),
         do: Code.string_to_quoted!(block, where)
  end

  defp broadway_if_needed?(block), do: not (block =~ "Broadway") or Code.ensure_loaded?(Broadway)

  defp compile(quoted, page) do
    for {module, _} <- Code.compile_quoted(quoted, page) do
      :code.purge(module)
      :code.delete(module)
    end
  end

  defp blocks(page) do
    text = File.read!(page)

    for [{_, _}, {at, length}] <- Regex.scan(~r/^```elixir\n(.*?)^```/ms, text, return: :index) do
      line = text |> binary_part(0, at) |> String.split("\n") |> length()
      {binary_part(text, at, length), line}
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

  defp run({code, expected}, {binding, env}) do
    {value, binding, env} =
      code |> Code.string_to_quoted!() |> Code.eval_quoted_with_env(binding, env)

    if expected != "" do
      {wanted, _} = Code.eval_string(expected, binding, env)
      assert {code, value} == {code, wanted}
    end

    {binding, env}
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
