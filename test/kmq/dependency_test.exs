defmodule Kmq.DependencyTest do
  # Kmq in other people's projects, without Hex: fixtures are copied out, built and run as their users would. The C part is built
  # without optimization and once for all: what is under test is the way there.
  use ExUnit.Case, async: true

  import Kmq.Test.Eventually, only: [scaled: 1]
  alias Kmq.Test.Outside

  @moduletag timeout: scaled(300_000)
  @root File.cwd!()

  defp fixture(name) do
    dir = Outside.tmp_dir!("a #{name} project")
    File.cp_r!(Path.join(@root, "test/fixtures/#{name}"), dir)
    dir
  end

  # What the package has, as a repository of its own.
  defp repository(dir) do
    File.mkdir_p!(dir)

    for name <- Mix.Project.config()[:package][:files], File.exists?(Path.join(@root, name)) do
      File.cp_r!(Path.join(@root, name), Path.join(dir, name))
    end

    mine = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "init.defaultBranch=main"]

    for args <- [["init", "-q"], ["add", "-A"], mine ++ ["commit", "-q", "-m", "all of it"]] do
      assert {_, 0} = Outside.run("git", args, cd: dir)
    end

    dir
  end

  defp run!(program, args, options) do
    env = [{"CFLAGS", "-O0"}, {"KMQ_VARIANT", nil}, {"KMQ_WERROR", nil}, {"WERROR", nil}]
    options = Keyword.update(options, :env, env, &(env ++ &1))
    {output, status} = Outside.run(program, args, options)
    assert {output, status} == {output, 0}
    output
  end

  # One after the other, because the C part is built once: as a git dependency, whose folder the others then name.
  test "mix, from git; rebar3; mix, by path, and its release from another folder" do
    dir = fixture("mix")
    from_git(dir)
    kmq = Path.join(dir, "deps/kmq")

    if rebar3 = System.find_executable("rebar3"),
      do: rebar3(rebar3, kmq),
      else: IO.puts("rebar3 is not installed: its part is left out")

    by_path(fixture("mix"), kmq)
  end

  defp from_git(dir) do
    origin = repository(Path.join(Path.dirname(dir), "origin"))
    options = [cd: dir, env: [{"KMQ_FROM", "file://" <> URI.encode(origin)}]]

    # Nobody is asked to install Hex.
    refute run!("mix", ["deps.get"], options) =~ "Hex"
    output = run!("mix", ["run", "-e", "Shop.run()"], options)
    assert output =~ "Generated kmq app"
    assert output =~ "flour: handled in"
    refute output =~ "warning:"
  end

  defp rebar3(rebar3, kmq) do
    shop = fixture("rebar3")
    File.mkdir_p!(Path.join(shop, "_checkouts"))
    File.ln_s!(kmq, Path.join(shop, "_checkouts/kmq"))
    assert run!(rebar3, ["compile"], cd: shop) =~ "Compiling shop"
    ebins = Path.wildcard(Path.join(shop, "_build/default/{lib,checkouts}/*/ebin"))
    assert length(ebins) == 2
    args = ["-noshell", "-pa" | ebins] ++ ["-eval", "shop:run(), init:stop()."]
    assert run!("erl", args, cd: shop) =~ "flour: handled"
  end

  defp by_path(dir, kmq) do
    options = [cd: dir, env: [{"KMQ_FROM", kmq}, {"MIX_ENV", "prod"}]]
    output = run!("mix", ["do", "compile,", "release", "--quiet"], options)
    assert output =~ "Generated shop app"
    refute output =~ "warning:"

    # It stands on its own: what built it is gone.
    release = Path.join(Path.dirname(dir), "a release")
    File.rename!(Path.join(dir, "_build/prod/rel/shop"), release)
    File.rm_rf!(dir)
    File.rm_rf!(kmq)
    elsewhere = Path.join(Path.dirname(release), "elsewhere")
    File.mkdir_p!(elsewhere)

    [priv] = Path.wildcard(Path.join(release, "lib/kmq-*/priv"))
    assert Enum.sort(File.ls!(priv)) == ~w(kmq_nif.so kmq_sandbox kmq_tracker)
    assert %{type: :directory} = File.lstat!(priv)

    env = [{"SHOP_RUN", "1"}, {"RELEASE_DISTRIBUTION", "none"}]
    output = run!(Path.join(release, "bin/shop"), ["start"], cd: elsewhere, env: env)
    assert output =~ "flour: handled in #{elsewhere}"
    refute output =~ "[error]"
    # The broker ends with the program, and its tracker may see it go.
    warnings = output |> String.split("\n") |> Enum.filter(&(&1 =~ "[warning]"))
    assert Enum.reject(warnings, &(&1 =~ ~r/_TRANSPORT|_ALL_BROKERS_DOWN/)) == []
  end

  test "optional packages are listed where Hex is, or to be installed, and never ask for it in other projects" do
    dir = Outside.tmp_dir!("hex")
    stub = ~s|defmodule Hex do\n  def version, do: "9"\nend|
    [{Hex, beam}] = Code.compile_string(stub)
    :code.purge(Hex)
    :code.delete(Hex)
    hex = Path.join(dir, "hex")
    File.mkdir_p!(hex)
    File.write!(Path.join(hex, "Elixir.Hex.beam"), beam)

    script = Path.join(dir, "deps.exs")

    File.write!(script, """
    Mix.start()

    if System.get_env("PARENT") do
      defmodule Parent.MixProject do
        use Mix.Project
        def project, do: [app: :parent, version: "1.0.0"]
      end
    end

    Code.compile_file(#{inspect(Path.join(@root, "mix.exs"))})

    IO.inspect(
      for dep <- Mix.Project.config()[:deps],
          do: {elem(dep, 0), tuple_size(dep) == 3 and elem(dep, 2)[:optional]}
    )
    """)

    deps = fn paths, args, env ->
      {output, status} = Outside.run("elixir", paths ++ [script | args], cd: dir, env: env)
      assert {output, status} == {output, 0}
      output |> String.split("\n", trim: true) |> List.last()
    end

    all = "[broadway: true, telemetry: false, ex_doc: nil]"
    assert deps.([], [], []) == "[]"
    assert deps.(["-pa", hex], [], []) == all
    assert deps.([], ["deps.get"], []) == all
    assert deps.([], ["deps.get"], [{"PARENT", "1"}]) == "[]"
    assert deps.(["-pa", hex], ["deps.get"], [{"PARENT", "1"}]) == all
  end

  describe "what is missing is named, with the command that installs it:" do
    setup do
      dir = Outside.tmp_dir!("missing")
      bin = Path.join(dir, "bin")
      File.mkdir_p!(bin)
      %{dir: dir, bin: bin}
    end

    defp fake(bin, name, text) do
      path = Path.join(bin, name)
      File.write!(path, "#!/bin/sh\n" <> text)
      File.chmod!(path, 0o755)
    end

    defp make(%{dir: dir, bin: bin}, os, args) do
      release = Path.join(dir, "os-release")
      File.write!(release, os)
      env = [{"PATH", bin <> ":" <> System.get_env("PATH")}, {"KMQ_OS_RELEASE", release}]
      # Erlang is asked once for all: it is not what is missing here.
      build =
        Path.join(
          System.tmp_dir!(),
          "kmq-build-#{System.pid()}-#{System.unique_integer([:positive])}"
        )

      on_exit(fn -> File.rm_rf!(build) end)
      variables = ["PRIV=#{Path.join(dir, "priv")}", "BUILD=#{build}"]
      make = ["--no-print-directory", "-C", Path.join(@root, "c_src")] ++ variables
      {output, status} = Outside.run("make", make ++ args, env: env)
      assert status != 0
      [line | _] = String.split(output, "\n")
      line
    end

    # `make` stops before Erlang is looked for where ERTS_INCLUDE and its like are given.
    @erlang ["ERTS_INCLUDE=/nowhere", "EI_INCLUDE=/nowhere", "EI_LIB=/nowhere"]

    test "no headers of librdkafka, on four systems", context do
      fake(context.bin, "pkg-config", "exit 1")
      args = ["RDKAFKA_CFLAGS=-nostdinc" | @erlang]

      for {os, command} <- [
            {"ID=alpine", "apk add gcc musl-dev make pkgconf librdkafka-dev erlang-dev"},
            {"ID=debian",
             "apt-get install gcc libc6-dev make pkg-config librdkafka-dev erlang-dev"},
            {"ID=pop\nID_LIKE=\"ubuntu debian\"", "apt-get install gcc"},
            {"ID=fedora", "dnf install gcc make pkgconf-pkg-config librdkafka-devel erlang"},
            {"ID=other",
             "install a C11 compiler, GNU make, pkg-config, librdkafka (2.0.2 or newer)"}
          ] do
        line = make(context, os, args)
        assert line =~ "kmq: librdkafka/rdkafka.h is missing"
        assert line =~ "Needed: " <> command
      end
    end

    test "the README's table has the same commands", context do
      release = Path.join(context.dir, "os-release")
      fake(context.bin, "uname", ~s([ -n "$KMQ_MACOS" ] && echo Darwin || echo Linux))
      readme = File.read!(Path.join(@root, "README.md"))

      for {name, id} <- [
            {"Debian, Ubuntu", "debian"},
            {"Fedora", "fedora"},
            {"Alpine", "alpine"},
            {"Arch", "arch"},
            {"macOS", ""}
          ] do
        File.write!(release, "ID=#{id}\n")

        env = [
          {"PATH", context.bin <> ":" <> System.get_env("PATH")},
          {"KMQ_OS_RELEASE", release},
          {"KMQ_MACOS", if(id == "", do: "1", else: "")}
        ]

        {command, 0} =
          Outside.run("sh", [Path.join(@root, "c_src/packages.sh"), "build"], env: env)

        assert readme =~ "| #{name} | `#{String.trim(command)}` |"
      end
    end

    test "macOS is known by its name", context do
      fake(context.bin, "uname", "echo Darwin")
      line = make(context, "", ["RDKAFKA_CFLAGS=-nostdinc" | @erlang])
      assert line =~ "Needed: xcode-select --install; brew install librdkafka pkg-config erlang"
    end

    test "no compiler, an old librdkafka, no headers of Erlang", context do
      assert make(context, "ID=debian", ["CC=no-such-cc" | @erlang]) =~
               "the C compiler (no-such-cc) is missing or does not run. Needed: apt-get install gcc"

      old = Path.join(context.dir, "librdkafka")
      File.mkdir_p!(old)
      File.write!(Path.join(old, "rdkafka.h"), "#define RD_KAFKA_VERSION 0x010902ff\n")
      # A path with a blank would need quotes in pkg-config's output, too.
      File.ln_s!(context.dir, link = Path.join(System.tmp_dir!(), "kmq-old-#{System.pid()}"))
      on_exit(fn -> File.rm!(link) end)

      assert make(context, "ID=debian", ["RDKAFKA_CFLAGS=-I#{link}" | @erlang]) =~
               "this librdkafka is older than 2.0.2"

      assert make(context, "ID=alpine", @erlang) =~
               ~r/erl_nif.h is missing in \/nowhere: .* apk add .*erlang-dev/
    end

    test "no make", context do
      script = Path.join(context.dir, "no_make.exs")

      File.write!(script, """
      Mix.start()
      Code.compile_file(#{inspect(Path.join(@root, "mix.exs"))})
      File.cd!(#{inspect(@root)})
      Mix.Tasks.Compile.KmqNative.run([])
      """)

      env = [{"MAKE", "no-such-make"}, {"MIX_BUILD_PATH", Path.join(context.dir, "_build")}]
      {output, status} = Outside.run("elixir", [script], env: env, cd: context.dir)
      assert status != 0
      assert output =~ ~r/kmq: no-such-make is missing, and kmq has a part in C. Needed: \S+/
    end

    # kmq as a release has it, with an empty priv: the folder, and the arguments for elixir.
    defp unpacked(dir) do
      app = Path.join(dir, "kmq")
      File.mkdir_p!(Path.join(app, "priv"))
      File.cp_r!(Application.app_dir(:kmq, "ebin"), Path.join(app, "ebin"))

      others =
        for path <- Outside.code_paths(), Path.basename(Path.dirname(path)) != "kmq", do: path

      {app, Enum.flat_map([Path.join(app, "ebin") | others], &["-pa", &1])}
    end

    test "a program that a release has left out, or may not execute", context do
      {app, paths} = unpacked(context.dir)
      nif = "priv/kmq_nif.so"
      File.cp!(Application.app_dir(:kmq, nif), Path.join(app, nif))
      File.write!(Path.join(app, "priv/kmq_tracker"), "")

      script = """
      {:ok, _} = Application.ensure_all_started(:kmq)
      Process.flag(:trap_exit, true)
      {:error, %Kmq.Error{reason: :sandbox} = error} = Kmq.Sandbox.start_link()
      IO.puts(error.message)
      options = [hosts: "localhost:1", topics: ["orders"], group_id: "shop"]
      {:ok, _} = Kmq.Tracker.acquire(Kmq.Config.new!(options, :producer))
      Process.sleep(2_000)
      """

      assert {output, 0} = Outside.run("elixir", paths ++ ["-e", script])
      assert output =~ ~r"program .*/priv/kmq_sandbox is not there. Build kmq again"
      assert output =~ "in a release, see that it takes the `priv` folder of kmq with it"
      # It is tried again and again, and said once.
      assert [line] = output |> String.split("\n") |> Enum.filter(&(&1 =~ "kmq_tracker"))

      assert line =~
               ~r"kmq tracker of group shop: the program .*/priv/kmq_tracker may not be executed"
    end

    test "no librdkafka where a release runs, or nothing built", context do
      {app, paths} = unpacked(context.dir)
      start = ["-e", "IO.inspect(Application.ensure_all_started(:kmq))"]

      assert {output, 0} = Outside.run("elixir", paths ++ start)
      assert output =~ "kmq is not built: `mix deps.compile kmq --force"
      assert output =~ "kmq: the native part cannot be loaded"

      # A library that was there when it was built, and is not here.
      source = Path.join(context.dir, "x.c")
      File.write!(source, "int x;\n")
      gone = Path.join(context.dir, "librdkafka.so.99")
      so = Path.join(app, "priv/kmq_nif.so")
      shared = ["-shared", "-fPIC", "-o"]
      assert {_, 0} = Outside.run("cc", shared ++ [gone, "-Wl,-soname,librdkafka.so.99", source])
      assert {_, 0} = Outside.run("cc", shared ++ [so, source, "-Wl,--no-as-needed", gone])
      File.rm!(gone)

      assert {output, 0} = Outside.run("elixir", paths ++ start)
      assert output =~ "librdkafka.so.99: cannot open shared object file"
      assert output =~ "Debian, Ubuntu: apt-get install librdkafka1; Alpine: apk add librdkafka"
      assert output =~ "kmq: the native part cannot be loaded"
    end
  end
end
