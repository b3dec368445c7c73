defmodule Kmq.GuidesTest do
  # What the guides and the README show at an iex prompt is what happens: each page is run from its top to its end.
  use ExUnit.Case

  import ExUnit.CaptureIO
  import Kmq.Test.Eventually
  alias Kmq.Test.Outside

  @moduletag :capture_log
  @moduletag timeout: 120_000

  pages = ["README.md" | Path.wildcard("guides/*.md")]
  @pages pages

  # What the reader of a page has already.
  @shop """
  defmodule Shop do
    def ship(order) do
      send(:guide_reader, {:shipped, order})
      :ok
    end
  end
  """
  @orders """
  defmodule Shop.Orders do
    use Broadway

    def handle_message(_processor, message, _context) do
      Shop.ship(message.data)
      message
    end

    def handle_batch(_batcher, messages, _info, _context), do: messages
  end
  """

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
      for {block, line} <- blocks(page), kind(block) not in [:session, :tests] do
        quoted = parse(block, file: page, line: line)
        if kind(block) == :module and broadway_if_needed?(block), do: compile(quoted, page)
        shown = if is_list(quoted), do: [quoted], else: producers(quoted)
        Enum.each(shown, &assert_options/1)

        assert kind(block) == :module or shown != [] or quoted_deps?(quoted),
               "#{page}:#{line}: nothing is done with this block"
      end
    end

    # What the tests find of a page is all there is in it.
    @tag page: page
    test "#{page}: no block is passed over", %{page: page} do
      lines = page |> File.read!() |> String.split("\n")
      fences = for line <- lines, line =~ ~r/^\s*(```|~~~)/, do: line
      assert Enum.uniq(fences) -- ["```", "```elixir", "```sh"] == []
      opened = fences |> Enum.take_every(2) |> Enum.count(&(&1 == "```elixir"))

      assert fences
             |> Enum.drop(1)
             |> Enum.take_every(2)
             |> Enum.uniq()
             |> Enum.all?(&(&1 == "```"))

      assert opened == length(blocks(page))

      prompts = Enum.count(lines, &(&1 =~ ~r/^iex> /))
      assert prompts == page |> File.read!() |> sessions() |> Enum.map(&length/1) |> Enum.sum()
      # An indented one is a picture of what iex shows: of one thing only.
      for line <- lines,
          line =~ ~r/^\s+iex> /,
          do: assert(line == "    iex> Kmq.info(Shop.Orders)")
    end
  end

  test "the table of Kmq.info/1 has the columns that it is shown with" do
    [_, heads] = Regex.run(~r/#Kmq.Info<.*\n\s+(TOPIC .*)\n/, File.read!("guides/control.md"))

    info =
      struct(Kmq.Info, kind: :pipeline, partitions: [partition()], total: Map.new(partition()))

    [shown | _] = info |> Kmq.Info.table() |> IO.iodata_to_binary() |> String.split("\n")
    assert String.split(shown) == String.split(heads)
  end

  defp partition do
    numbers = ~w(partition end committed lag buffered started open oldest_open_ms)a
    Map.merge(Map.new(numbers, &{&1, 1}), %{topic: "orders", state: :assigned})
  end

  # Each command is taken as it stands there, but for the hosts; what it does is tasks_test's.
  test "the mix tasks that pages show have these words and options" do
    sandbox = start_supervised!({Kmq.Sandbox, topics: %{"orders" => 4}})
    hosts = Kmq.Sandbox.bootstrap(sandbox)

    commands =
      for page <- @pages,
          [_, task, rest] <-
            Regex.scan(~r/^ {4}mix (kmq\.\w+)((?: \S+)*)/m, File.read!(page)),
          do: {page, task, OptionParser.split(rest)}

    assert length(commands) >= 8

    for {page, task, args} <- commands do
      args = Enum.map(args, &String.replace(&1, "kafka-1:9092", hosts))
      args = if "--hosts" in args, do: args, else: args ++ ["--hosts", hosts]
      assert quietly(task, args) in [:ok, 1], "#{page}: mix #{task} #{Enum.join(args, " ")}"
    end
  end

  defp quietly(task, args) do
    level = Logger.level()

    ExUnit.CaptureIO.capture_io(:stderr, fn ->
      ExUnit.CaptureIO.capture_io(fn ->
        send(self(), {:status, catch_exit(exit(Mix.Task.get!(task).run(args)))})
      end)
    end)

    Logger.configure(level: level)
    assert_received {:status, status}
    with {:shutdown, code} <- status, do: code
  end

  # A pipeline that a page shows is started as it stands there, on a Kafka of its own, and handles a message.
  for page <- pages, page != "guides/testing.md", File.read!(page) =~ "Broadway.start_link(" do
    @external_resource page
    @tag :broadway
    @tag page: page
    test "#{page}: its pipelines work", %{page: page} do
      {:ok, _} = Application.ensure_all_started(:broadway)
      Process.register(self(), :guide_reader)
      sandbox = start_supervised!({Kmq.Sandbox, topics: %{"orders" => 2}})
      hosts = Kmq.Sandbox.bootstrap(sandbox)
      {:ok, publisher} = Kmq.Publisher.start_link(hosts: hosts)
      shop = Code.compile_string(@shop)

      for {block, line} <- blocks(page), block =~ "Broadway.start_link(" do
        quoted =
          block
          |> parse(file: page, line: line)
          |> Macro.prewalk(fn
            [localhost: 9092] -> hosts
            other -> other
          end)

        {pipeline, modules} = start(quoted)
        {:ok, _} = Kmq.Publisher.publish(publisher, "orders", "flour")
        assert_receive {:shipped, "flour"}, scaled(20_000)
        :ok = apply(Broadway, :stop, [pipeline])
        forget(modules)
      end

      forget(shop)
      :ok = Kmq.Publisher.close(publisher)
    end
  end

  defp start({:defmodule, _, _} = quoted) do
    [{module, _}] = modules = Code.compile_quoted(quoted)
    {:ok, _} = apply(module, :start_link, [[]])
    {module, modules}
  end

  defp start(quoted) do
    [{module, _}] = modules = Code.compile_string(@orders)
    {{:ok, _}, _} = Code.eval_quoted(quoted)
    {module, modules}
  end

  # A whole test file in a page is run as one, in a VM of its own.
  for page <- pages, File.read!(page) =~ "use ExUnit.Case" do
    @external_resource page
    if File.read!(page) =~ "use Broadway", do: @tag(:broadway)
    @tag page: page
    test "#{page}: its tests pass", %{page: page} do
      for {block, _line} <- blocks(page), kind(block) == :tests do
        {output, status} = Outside.run_tests(block)
        assert {output, status} == {output, 0}
        assert output =~ ~r/[1-9]\d* tests?, 0 failures/
      end
    end
  end

  defp kind(block) do
    cond do
      block =~ ~r/^iex> /m -> :session
      block =~ "use ExUnit.Case" -> :tests
      block =~ ~r/\A(#.*\n)*defmodule / -> :module
      true -> :other
    end
  end

  # The options of each producer in a piece of code.
  defp producers(quoted) do
    {_, found} =
      Macro.prewalk(quoted, [], fn
        {{:__aliases__, _, [:OffBroadway, :Kmq, :Producer]}, options} = node, found
        when is_list(options) ->
          {node, [options | found]}

        node, found ->
          {node, found}
      end)

    found
  end

  # A project's dependencies: test/kmq/dependency_test.exs has them built.
  defp quoted_deps?({:def, _, [{:deps, _, _}, [do: deps]]}),
    do: match?({[{:kmq, [path: _]} | _], _}, Code.eval_quoted(deps))

  defp quoted_deps?(_quoted), do: false

  # What is shown as options is accepted as options. The files that it names are there.
  defp assert_options(quoted) do
    file = Path.join(Outside.tmp_dir!("secrets"), "file")
    File.write!(file, "shop\npassword\n")

    there =
      Macro.prewalk(quoted, fn
        "/" <> _ -> file
        other -> other
      end)

    {shown, _} = Code.eval_quoted(there)
    needed = [hosts: "localhost:9092", topics: ["orders"], group_id: "shop"]
    assert {:ok, _} = needed |> Keyword.merge(shown) |> Kmq.Config.new()
  end

  # A part of a list of options is shown without its brackets.
  defp parse(block, where) do
    case Code.string_to_quoted("[" <> block <> "]", where) do
      {:ok, [{:__block__, _, _}]} -> Code.string_to_quoted!(block, where)
      {:ok, [{_, _} | _] = options} -> options
      _no_part -> Code.string_to_quoted!(block, where)
    end
  end

  defp broadway_if_needed?(block), do: not (block =~ "Broadway") or Code.ensure_loaded?(Broadway)

  # What its reader has at home is not there; the compiler finds nothing else.
  defp compile(quoted, page) do
    said = capture_io(:stderr, fn -> quoted |> Code.compile_quoted(page) |> forget() end)
    warnings = said |> String.split("\n") |> Enum.filter(&(&1 =~ "warning:"))
    assert Enum.reject(warnings, &(&1 =~ "Shop.")) == []
  end

  defp forget(modules) do
    for {module, _} <- modules do
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
