defmodule Kmq.ErrorsGuideTest do
  # guides/errors.md and the table in the code are the same, name by name.
  use ExUnit.Case, async: true

  alias Kmq.Error

  @guide File.read!("guides/errors.md")

  # %{name => class}
  defp guide do
    [_intro | sections] = String.split(@guide, ~r/^## /m)

    for section <- sections,
        [title, body] = String.split(section, "\n", parts: 2),
        [_, cell] <- Regex.scan(~r/^\| (`[^|]*`) \|/m, body),
        [_, name] <- Regex.scan(~r/`([^`]+)`/, cell),
        reduce: %{} do
      classes ->
        refute Map.has_key?(classes, name), "#{name} is there twice"
        Map.put(classes, name, title |> String.downcase() |> String.to_existing_atom())
    end
  end

  test "every error of the library has its row, under what becomes of it in the code" do
    guide = guide()
    errors = for {{name, _, _, _, _}, class} <- :kmq_nif.errors(), into: %{}, do: {name, class}
    assert map_size(errors) > 150

    for {name, class} <- errors do
      # A newer library knows more: these are reported, as the guide says.
      assert Map.get(guide, name, :reported) == class, name
    end

    assert Map.keys(guide) -- Map.keys(errors) == []
    # The oldest library is what the guide was written by.
    {_, version} = :kmq_nif.version()
    if version < 0x02010000, do: assert(Map.keys(errors) -- Map.keys(guide) == [])
  end

  test "its reason is its name, retriable and fatal are what its class says" do
    for {{name, _, retriable, fatal, _} = native, class} <- :kmq_nif.errors(),
        Map.has_key?(guide(), name) do
      error = Error.from_native(native)
      assert error.retriable? == (class == :retried), name
      assert error.fatal? == class in [:replaced, :stops], name
      assert {error.retriable?, error.fatal?} == {retriable, fatal}

      assert Atom.to_string(error.reason) ==
               name |> String.trim_leading("_") |> String.downcase()
    end
  end
end
