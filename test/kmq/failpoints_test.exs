defmodule Kmq.FailpointsTest do
  # Each point at which a program can be killed is explained, and a test kills or fails one there: in each mode in which it can fire.
  use ExUnit.Case, async: true

  defp points(folders) do
    for folder <- folders,
        file <- Path.wildcard("c_src/#{folder}/*.c"),
        [_, name] <- Regex.scan(~r/KMQ_FAILPOINT\("(\w+)"\)/, File.read!(file)),
        uniq: true,
        do: name
  end

  test "ARCHITECTURE.md has all of them" do
    [_, section] = "ARCHITECTURE.md" |> File.read!() |> String.split("\n## Failpoints\n")

    for point <- points(~w(kafka nif tracker)),
        do: assert(section =~ "`#{point}`", "#{point} is not explained")
  end

  test "each has its test" do
    tests = "test/**/*_test.exs" |> Path.wildcard() |> List.delete("test/kmq/failpoints_test.exs")
    c_tests = Path.wildcard("test/c/*.c")
    text = Enum.map_join(tests ++ c_tests, &File.read!/1)
    for point <- points(~w(kafka nif tracker)), do: assert(text =~ point, "no test has #{point}")

    # Without markers those of the commit and of dead letters, with markers all but these.
    letters = ~w(reject_write reject_settle)
    crash = File.read!("test/integration/crash_test.exs")
    for point <- points(["nif"]) -- letters, do: assert(crash =~ "#{point}=kill", point)

    [offsets, at_most_once] =
      "test/integration/delivery_crash_test.exs"
      |> File.read!()
      |> String.split("\n  test \"")
      |> Enum.filter(&(&1 =~ "killed at every point"))

    for part <- [offsets, at_most_once],
        point <- ~w(handout_commit commit_ack) ++ letters,
        do: assert(part =~ "#{point}=kill", point)
  end
end
