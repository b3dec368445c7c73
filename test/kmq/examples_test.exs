defmodule Kmq.ExamplesTest do
  # What examples/ shows is run as it stands there.
  use ExUnit.Case, async: true

  import Kmq.Test.Eventually
  alias Kmq.Test.Outside

  @moduletag timeout: scaled(120_000)

  # Runs beside this VM until it ends or the test does; its lines come as messages.
  defp beside(script, args, hosts) do
    elixir = System.find_executable("elixir")
    paths = Enum.flat_map(Outside.code_paths(), &["-pa", &1])

    port =
      Port.open({:spawn_executable, elixir}, [
        :binary,
        :exit_status,
        :stderr_to_stdout,
        line: 10_000,
        env: [{'KAFKA', String.to_charlist(hosts)}],
        args: paths ++ ["--app", "kmq", Path.join("examples", script) | args]
      ])

    {:os_pid, os_pid} = Port.info(port, :os_pid)
    on_exit(fn -> System.cmd("kill", ["-KILL", "#{os_pid}"], stderr_to_stdout: true) end)
    port
  end

  defp lines(port, ends?, acc \\ []) do
    receive do
      {^port, {:data, {:eol, line}}} ->
        acc = [line | acc]
        if ends?.(line), do: Enum.reverse(acc), else: lines(port, ends?, acc)

      {^port, {:exit_status, status}} ->
        flunk("ended with #{status}: #{acc |> Enum.reverse() |> Enum.join("\n")}")
    after
      scaled(60_000) -> flunk("no end: #{acc |> Enum.reverse() |> Enum.join("\n")}")
    end
  end

  test "sender, worker, tracker: three processes" do
    # Theirs is a cluster elsewhere; what a broker would be asked to make is there.
    topics = for t <- ~w(orders orders__shop__markers orders__undelivered), into: %{}, do: {t, 2}
    sandbox = start_supervised!({Kmq.Sandbox, topics: topics})
    hosts = Kmq.Sandbox.bootstrap(sandbox)

    tracker = beside("tracker.exs", [], hosts)
    worker = beside("worker.exs", ["40"], hosts)
    sender = beside("sender.exs", ["40"], hosts)

    assert lines(sender, &(&1 =~ "sent")) == ["sender: 40 orders sent"]
    worked = lines(worker, &(&1 =~ "orders done"))
    assert List.last(worked) == "worker: 40 orders done"
    # One line for each event that matters, and silence otherwise.
    {mine, logged} = worked |> Enum.reject(&(&1 == "")) |> Enum.split_with(&(&1 =~ ~r/^worker: /))

    assert for(
             line <- logged,
             not (line =~ ~r/kmq: .* (assigned|gave back|no commit found for) orders/),
             do: line
           ) ==
             []

    assert mine |> Enum.uniq() |> length() == 41
    assert Enum.count(mine, &(&1 =~ "rejected")) == 4
    assert Enum.any?(mine, &(&1 =~ "at attempt 2"))
    assert tracker |> lines(&(&1 =~ "dead_lettered: 4")) |> Enum.any?(&(&1 =~ "redelivered: "))
  end

  test "the Livebook page" do
    cells = ~r/^```elixir\n(.*?)^```/ms |> Regex.scan(File.read!("examples/queue.livemd"))
    [[_, install] | cells] = cells
    assert install =~ "Mix.install"
    script = Path.join(Outside.tmp_dir!("livebook"), "page.exs")
    File.write!(script, "{:ok, _} = Application.ensure_all_started(:kmq)\n" <> unscoped(cells))

    assert {output, 0} = Outside.elixir(script)
    assert output =~ ~r/\{"order \d+", 2\}/
    assert output =~ ~r/\{"order \d+", "failed", "still no flour", 2\}/
  end

  # Each cell's last value is shown, and what it binds stays.
  defp unscoped(cells) do
    Enum.map_join(cells, "\n", fn [_, cell] ->
      {:__block__, _, expressions} = Code.string_to_quoted!("(\n:ok\n" <> cell <> "\n)")
      {shown, before} = List.pop_at(expressions, -1)
      Enum.map_join(before, "\n", &Macro.to_string/1) <> "\nIO.inspect(#{Macro.to_string(shown)})"
    end)
  end

  @tag :broadway
  test "the Broadway pipeline" do
    assert {output, 0} = run_pipeline()
    assert output =~ "99 orders shipped; dead letter: order 7, no such customer"
  end

  defp run_pipeline do
    script = Path.join(Outside.tmp_dir!("pipeline"), "pipeline.exs")
    start = "{:ok, _} = Application.ensure_all_started(:kmq)\n"
    File.write!(script, start <> File.read!("examples/pipeline.exs"))
    Outside.elixir(script)
  end
end
