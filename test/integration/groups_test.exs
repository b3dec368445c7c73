defmodule Kmq.Integration.GroupsTest do
  # A group refuses a member, or keeps one whatever its work does.
  use Kmq.Test.ClusterCase, on: :kafka

  alias Kmq.Test.Scene

  describe "a group that refuses a member" do
    setup do
      Scene.listen()
    end

    # The error that the telemetry tells, which is what is logged.
    defp said(name, handle) do
      assert_receive {[:kmq, :error], %{count: 1},
                      %{error: %{name: ^name} = error, handle: ^handle}},
                     scaled(20_000)

      error.message
    end

    defp assigned(consumer) do
      info = Kmq.Handle.info(GenServer.call(consumer, :handle))
      Enum.count(info.partitions, &(&1.state == :assigned))
    end

    test "for its assignor: said, and it joins when it can", %{cluster: cluster} do
      topic = queue(cluster, 2)
      options = options(cluster, topic)
      first = start_supervised!({Kmq.Consumer, options}, id: :first)
      eventually(fn -> assigned(first) == 2 end, 20_000)
      second = consumer(options ++ [assignor: :range])

      assert said("INCONSISTENT_GROUP_PROTOCOL", {:consumer, second}) ==
               "the group refuses this member: :assignor is :range here, and the others have none of these " <>
                 "(or are no consumers). Give all members of #{inspect(options[:group_id])} the same; it joins as soon as it can"

      # One that knows both gets in, beside the first as beside the second.
      third = consumer(options ++ [assignor: [:range, :roundrobin]])
      eventually(fn -> assigned(third) == 1 and assigned(first) == 1 end, 20_000)
      stop_supervised!(:first)
      eventually(fn -> assigned(second) == 1 and assigned(third) == 1 end, 30_000)
    end

    @tag :cooperative
    test "because the others give everything back and it does not", %{cluster: cluster} do
      topic = queue(cluster, 2)
      options = options(cluster, topic)
      first = start_supervised!({Kmq.Consumer, options}, id: :first)
      eventually(fn -> assigned(first) == 2 end, 20_000)
      second = consumer(options ++ [assignor: :cooperative_sticky])

      assert said("INCONSISTENT_GROUP_PROTOCOL", {:consumer, second}) =~
               ":assignor is :cooperative_sticky here"

      stop_supervised!(:first)
      eventually(fn -> assigned(second) == 2 end, 30_000)
    end

    test "for its session timeout", %{cluster: cluster} do
      topic = queue(cluster, 1)
      options = options(cluster, topic, group_config: [session_timeout_seconds: 3_600])
      consumer = consumer(options)

      assert said("INVALID_SESSION_TIMEOUT", {:consumer, consumer}) =~
               "a session timeout of 3600000 ms (:session_timeout_seconds of :group_config) is outside of what the broker allows"
    end
  end
end
