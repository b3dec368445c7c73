defmodule Mix.Tasks.Compile.KmqNative do
  @moduledoc false
  # Builds the NIF and the two port programs with `make -C c_src`, as elixir_make would: that one cannot be had without Hex.
  # KMQ_VARIANT names another variant than the environment's, KMQ_WERROR=1 makes the C compiler's warnings errors; MAKE, CC,
  # CFLAGS, RDKAFKA_CFLAGS and RDKAFKA_LIBS reach make as they are.

  use Mix.Task.Compiler

  @impl true
  def run(_args) do
    priv = priv_dir()

    # A `priv` that rebar3 or a plain `make` left in the source tree has been linked here by Mix. Each environment has
    # its own variant of the programs, so each gets its own folder.
    if match?({:ok, _}, File.read_link(priv)), do: File.rm!(priv)
    File.mkdir_p!(priv)

    make(["all" | variables(priv)])
  end

  @impl true
  def clean do
    make(["clean" | variables(priv_dir())])
  end

  defp variables(priv) do
    default = if Mix.env() == :test, do: "test", else: "release"
    variant = System.get_env("KMQ_VARIANT") || default
    werror = if System.get_env("KMQ_WERROR") == "1", do: ["WERROR=1"], else: []
    ["PRIV=#{priv}", "VARIANT=#{variant}"] ++ werror
  end

  defp make(args) do
    make = System.get_env("MAKE") || "make"

    unless System.find_executable(make) do
      Mix.raise("kmq: #{make} is missing, and kmq has a part in C. Needed: #{needed()}")
    end

    jobs = "-j#{System.schedulers_online()}"
    c_src = Path.join(File.cwd!(), "c_src")

    case System.cmd(make, ["--no-print-directory", "-C", c_src, jobs | args],
           into: IO.stream(),
           stderr_to_stdout: true
         ) do
      {_, 0} ->
        {:noop, []}

      {_, code} ->
        Mix.raise(
          "kmq: the C part could not be built (#{make} ended with #{code}); what is wrong is said above"
        )
    end
  end

  defp needed do
    {command, 0} = System.cmd("sh", [Path.join([File.cwd!(), "c_src", "packages.sh"]), "build"])
    String.trim(command)
  end

  defp priv_dir, do: Mix.Project.app_path() |> Path.join("priv") |> Path.expand()
end

defmodule Kmq.MixProject do
  use Mix.Project

  @version "0.1.0"

  def project do
    [
      app: :kmq,
      version: @version,
      elixir: "~> 1.14",
      elixirc_paths: elixirc_paths(Mix.env()),
      erlc_paths: ["src"],
      erlc_options: [:debug_info, :warnings_as_errors],
      compilers: [:kmq_native] ++ Mix.compilers(),
      start_permanent: Mix.env() == :prod,
      deps: deps(),
      description: description(),
      package: package(),
      name: "Kmq",
      docs: docs()
    ]
  end

  def application do
    [extra_applications: [:logger, :crypto], mod: {Kmq.Application, []}]
  end

  defp elixirc_paths(:test), do: ["lib", "test/support"]
  defp elixirc_paths(_), do: ["lib"]

  # Without Hex every task refuses to run when any package is listed, even an optional one. Kmq compiles, tests and runs
  # without packages: Broadway and telemetry are called only where they are. So they are listed where Hex is loaded; and where
  # Kmq itself is being worked on, by the tasks that offer to install Hex. Of another project's dependency nobody should be asked that.
  defp deps do
    own? = Mix.Project.get() in [nil, __MODULE__]
    fetching? = Enum.any?(System.argv(), &(&1 =~ ~r/^(deps|hex)\./))

    if Code.ensure_loaded?(Hex) or (own? and fetching?) do
      [
        {:broadway, "~> 1.3", optional: true},
        {:telemetry, "~> 1.0"},
        {:ex_doc, "~> 0.30", only: :dev, runtime: false}
      ]
    else
      []
    end
  end

  defp description do
    "A message queue on Apache Kafka: acknowledge each message on its own, redelivery, dead letters. With a Broadway producer."
  end

  defp package do
    [
      licenses: ["Apache-2.0"],
      links: %{},
      files:
        ~w(lib src c_src guides examples mix.exs rebar.config .formatter.exs README.md ARCHITECTURE.md CONTRIBUTING.md CHANGELOG.md LICENSE)
    ]
  end

  @first ~w(introduction semantics delivery actions testing)
  @running ~w(operations tracker tuning errors control)

  # Guides that are named here come first, the others by their names.
  defp docs do
    guides = Path.wildcard("guides/*.md")
    named = for name <- @first ++ @running, "guides/#{name}.md" in guides, do: "guides/#{name}.md"
    running = for name <- @running, do: "guides/#{name}.md"
    coming = Path.wildcard("guides/coming-from-*.md")
    others = guides -- (named ++ coming)

    [
      main: "introduction",
      extras:
        ["README.md"] ++
          named ++
          others ++
          coming ++
          ["examples/queue.livemd", "bench/RESULTS.md", "bench/NOTES.md"] ++
          ["ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"],
      groups_for_extras: [
        Guides: (named ++ others) -- running,
        "Running it": running,
        "Coming from": coming,
        "About Kmq": ~r"^(bench/|ARCHITECTURE|CONTRIBUTING|CHANGELOG)"
      ],
      # These are about what is inside, too.
      skip_undefined_reference_warnings_on: ["ARCHITECTURE.md", "bench/NOTES.md"],
      groups_for_modules: [
        Messages: [Kmq, Kmq.Message, Kmq.Consumer, OffBroadway.Kmq.Producer, Kmq.Publisher],
        "Dead letters": [Kmq.DeadLetters, Kmq.DeadLetter, Kmq.Reject],
        Tests: [Kmq.Testing, Kmq.Testing.Queue, Kmq.Testing.TimeoutError, Kmq.Sandbox]
      ]
    ]
  end
end
