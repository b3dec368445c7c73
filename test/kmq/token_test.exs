defmodule Kmq.TokenTest do
  # Where OAUTHBEARER tokens come from: functions of users, which fail, hang and return what they like.
  use ExUnit.Case

  import ExUnit.CaptureLog
  import Kmq.Test.Eventually

  alias Kmq.Token

  @now 1_700_000_000_000

  defp jwt(claims) do
    part = &Base.url_encode64(&1, padding: false)
    part.(~s({"alg":"none"})) <> "." <> part.(claims) <> "."
  end

  describe "what a function may return" do
    test "a token that says when it ends, or one with a time" do
      token = jwt(~s({"sub":"me","exp":1700000060}))
      assert {:ok, fun, 1_700_000_060_000} = Token.normal({:ok, token}, @now)
      assert fun.() == {token, 1_700_000_060_000, "kmq", []}

      assert {:ok, _, 1_700_000_000_500} =
               Token.normal({:ok, jwt(~s({"exp" : 1700000000.5}))}, @now)

      assert {:ok, fun, at} =
               Token.normal(
                 {:ok,
                  %{
                    token: "opaque",
                    expires_in: 5_000,
                    principal: "me",
                    extensions: %{cluster: "c-1"}
                  }},
                 @now
               )

      assert {at, fun.()} == {@now + 5_000, {"opaque", @now + 5_000, "me", [{"cluster", "c-1"}]}}

      at = DateTime.from_unix!(@now + 7_000, :millisecond)
      assert {:ok, _, expires} = Token.normal({:ok, %{token: "opaque", expires_at: at}}, @now)
      assert expires == @now + 7_000
      refute inspect(fun) =~ "opaque"
    end

    test "anything else is refused in words that do not show it" do
      for {result, text} <- [
            {:hunter2, "it returned something else than {:ok, token}"},
            {{:ok, nil}, "it returned something else"},
            {{:ok, "hunter2"}, "does not say when it ends"},
            {{:ok, jwt(~s({"exp":1}))}, "the token has expired already"},
            {{:ok, %{token: "hunter2", expires_in: 0}}, "the token has expired already"},
            {{:ok, %{token: "hunter2", expires_in: "soon"}}, "expected ms for :expires_in"},
            {{:ok, %{token: "hunter2", expires_at: @now}}, "a DateTime for :expires_at"},
            {{:ok, %{token: "hun ter2", expires_in: 9}}, "the token is not a printable string"},
            {{:ok, %{token: "hunter2\0", expires_in: 9}}, "the token is not a printable string"},
            {{:ok, %{token: 'hunter2', expires_in: 9}}, "the token is not a printable string"},
            {{:ok, %{token: "t", expires_in: 9, principal: :me}},
             "expected a string for :principal"},
            {{:ok, %{token: "t", expires_in: 9, extensions: %{auth: "hunter2"}}}, ":extensions"},
            {{:ok, %{token: "t", expires_in: 9, extensions: [{"a=b", "hunter2"}]}},
             ":extensions"},
            {{:error, %{secret: "hunter2"}}, "it gave {:error, ...}"},
            {{:error, :nxdomain}, "{:error, :nxdomain}"},
            {{:error, "no such tenant"}, "no such tenant"}
          ] do
        assert {:error, words} = Token.normal(result, @now)
        assert {result, words} == {result, words} and words =~ text
        refute words =~ "hunter2"
      end
    end
  end

  describe "the process" do
    # A function that answers as the test says, and counts.
    setup do
      Application.put_env(:kmq, :token_pause_ms, 50)
      on_exit(fn -> Application.delete_env(:kmq, :token_pause_ms) end)

      {:ok, agent} =
        Agent.start_link(fn -> {0, fn _n -> {:ok, %{token: "t", expires_in: 60_000}} end} end)

      fun = fn ->
        {n, answer} =
          Agent.get_and_update(agent, fn {n, answer} -> {{n + 1, answer}, {n + 1, answer}} end)

        answer.(n)
      end

      %{
        fun: fun,
        calls: fn -> Agent.get(agent, &elem(&1, 0)) end,
        answer: fn answer -> Agent.update(agent, fn {n, _} -> {n, answer} end) end
      }
    end

    test "asks once for all who want one at a time, and again when most of its life is over",
         context do
      tokens =
        1..20
        |> Enum.map(fn _ -> Task.async(fn -> Token.fetch(context.fun, 5_000) end) end)
        |> Task.await_many(10_000)

      assert Enum.all?(tokens, &match?({:ok, _}, &1))
      assert context.calls.() == 1

      # 70 % of its life
      context.answer.(fn n -> {:ok, %{token: "t#{n}", expires_in: 1_000}} end)
      other = fn -> context.fun.() end
      assert {:ok, first} = Token.fetch(other, 5_000)

      eventually(fn ->
        assert {:ok, next} = Token.fetch(other, 5_000)
        assert elem(next.(), 0) != elem(first.(), 0)
      end)

      # before it ended
      assert elem(first.(), 1) > System.os_time(:millisecond) - scaled(2_000)
    end

    test "one that fails is tried again, said once, and what it said is in the error of who gives up",
         context do
      log =
        capture_log(fn ->
          for {fails, text} <- [
                {fn _ -> raise "hunter2" end, "it raised RuntimeError"},
                {fn _ -> throw("hunter2") end, "it threw something"},
                {fn _ -> exit("hunter2") end, "it exited"},
                {fn _ -> :hunter2 end, "it returned something else"}
              ] do
            context.answer.(fails)

            eventually(fn ->
              assert {:error, error} = Token.fetch(context.fun, 200)
              assert {error.reason, error.retriable?} == {:token, true}

              assert error.message =~
                       "no OAUTHBEARER token from the function of :sasl: " <> text
            end)
          end

          context.answer.(fn _ -> {:ok, %{token: "t", expires_in: 60_000}} end)
          assert {:ok, _} = Token.fetch(context.fun, scaled(60_000))
        end)

      assert length(Regex.scan(~r/no OAUTHBEARER token/, log)) == 1
      assert length(Regex.scan(~r/there is a token again/, log)) == 1
      refute log =~ "hunter2"
    end

    test "one that hangs is bounded, and its process ended", context do
      test = self()
      Application.put_env(:kmq, :token_limit_ms, 200)
      on_exit(fn -> Application.delete_env(:kmq, :token_limit_ms) end)

      context.answer.(fn
        1 ->
          send(test, {:hangs, self()})
          Process.sleep(:infinity)

        _ ->
          {:ok, %{token: "t", expires_in: 60_000}}
      end)

      assert {:ok, _} = Token.fetch(context.fun, scaled(20_000))
      assert_received {:hangs, pid}
      refute Process.alive?(pid)
    end

    test "a killed process of the function, a client that died while waiting, the same function asked again after all that",
         context do
      context.answer.(fn
        1 -> Process.exit(self(), :kill)
        _ -> {:ok, %{token: "t", expires_in: 60_000}}
      end)

      {dead, monitor} = spawn_monitor(fn -> Token.request(context.fun, :me) end)
      assert_receive {:DOWN, ^monitor, _, ^dead, _}
      assert {:ok, _} = Token.fetch(context.fun, scaled(20_000))
    end

    test "its state, name and child specification show nothing", context do
      context.answer.(fn _ -> {:ok, %{token: "hunter2", expires_in: 60_000}} end)
      assert {:ok, _} = Token.fetch(context.fun, 5_000)

      for {_, pid, _, _} <- DynamicSupervisor.which_children(Kmq.TokenSupervisor) do
        refute inspect(:sys.get_status(pid), limit: :infinity) =~ "hunter2"
        refute :io_lib.format("~p", [:sys.get_status(pid)]) |> List.to_string() =~ "hunter2"
      end
    end
  end
end
