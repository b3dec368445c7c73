defmodule Kmq.Test.Outside do
  @moduledoc false
  # Programs beside this VM, as users start them: scripts, mix and rebar3 in projects of their own. What they print is collected.

  import Kmq.Test.Eventually, only: [scale: 0]

  @doc "The code paths of this VM that are not Erlang's or Elixir's own: Kmq, and what ERL_LIBS brings."
  @spec code_paths() :: [String.t()]
  def code_paths do
    root = to_string(:code.root_dir())
    elixir = :elixir |> :code.lib_dir() |> to_string() |> Path.dirname()

    for path <- :code.get_path(),
        path = Path.expand(to_string(path)),
        Path.basename(path) == "ebin",
        not String.starts_with?(path, [root <> "/", elixir <> "/"]),
        do: path
  end

  @doc "A folder that ends with the test; `name` may hold blanks."
  @spec tmp_dir!(String.t()) :: Path.t()
  def tmp_dir!(name) do
    dir =
      Path.join(System.tmp_dir!(), "kmq #{System.pid()}-#{System.unique_integer([:positive])}")

    dir = Path.join(dir, name)
    File.mkdir_p!(dir)
    ExUnit.Callbacks.on_exit(fn -> File.rm_rf!(Path.dirname(dir)) end)
    dir
  end

  @doc "Runs a program to its end: output and exit status. Options as `System.cmd/3`."
  @spec run(String.t(), [String.t()], keyword) :: {String.t(), non_neg_integer}
  def run(program, args, options \\ []) do
    # It is a program of its own: nothing of how this test run was started is meant for it.
    mine = for name <- ~w(MIX_ENV MIX_BUILD_PATH MIX_TEST_PARTITION MIX_TARGET), do: {name, nil}
    {env, options} = Keyword.pop(options, :env, [])
    options = [env: mine ++ [{"LC_ALL", "C.UTF-8"} | env], stderr_to_stdout: true] ++ options
    System.cmd(program, args, options)
  end

  @doc "Runs an Elixir script with the code paths of this VM."
  @spec elixir(Path.t(), [String.t()], keyword) :: {String.t(), non_neg_integer}
  def elixir(script, args \\ [], options \\ []) do
    paths = Enum.flat_map(code_paths(), &["-pa", &1])
    run(System.find_executable("elixir"), paths ++ [script | args], options)
  end

  @doc "Runs a test file's text in a VM of its own."
  @spec run_tests(String.t()) :: {String.t(), non_neg_integer}
  def run_tests(text) do
    script = Path.join(tmp_dir!("test"), "guide_test.exs")

    File.write!(script, """
    {:ok, _} = Application.ensure_all_started(:kmq)
    if Code.ensure_loaded?(Broadway), do: {:ok, _} = Application.ensure_all_started(:broadway)
    Application.put_env(:kmq, :testing_scale, #{scale()})
    ExUnit.start(timeout: #{round(60_000 * scale())})
    #{text}
    """)

    elixir(script)
  end
end
