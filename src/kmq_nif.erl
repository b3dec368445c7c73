%% @doc The native engine, 1:1: every function here is one in c_src/nif. Elixir's modules and rebar3 users call it; nothing else loads it.
%%
%% Messages to the owner and the borrower of a handle are `{kmq, Ref, What}':
%%   consumer:  `ready' (take again), `{due, Ms}' (owner: poll within Ms)
%%   publisher: `ready' (owner: poll), `space', `{published, Token, Results}' (caller of send)
%% Errors: `{error, {Name, Code, Retriable, Fatal, Text}}' of Kafka, `{error, closed | stale}'; wrong arguments raise badarg.
-module(kmq_nif).

-export([version/0, live/0, errors/0, busy/0, backoff/3, property/2]).
-export([consumer_open/3, consumer_subscribe/1, consumer_topics/2, consumer_attach/2, consumer_poll/1, consumer_take/2, consumer_take/3, consumer_lanes/2, consumer_settle/3,
         consumer_retry/5, consumer_extend/3, consumer_reject/2, consumer_again/1, consumer_assign/3, consumer_reset/3, consumer_rebuild/1, consumer_flush/1, consumer_uncovered/1, consumer_drain/1,
         consumer_close/2, consumer_close/3, consumer_kill/1, consumer_info/1, consumer_pause/4, consumer_seek/4, consumer_set_token/5, consumer_test_fatal/2, consumer_reopen/1, consumer_give_up/1]).
-export([publisher_open/2, publisher_send/4, publisher_space/1, publisher_poll/1, publisher_queued/1, publisher_close/1,
         publisher_set_token/5, publisher_reopen/1, publisher_test_fatal/1]).
-export([admin_open/1, admin_close/1, admin_cluster_id/2, admin_partitions/3, admin_topics/2, admin_create_topic/6,
         admin_create_partitions/4, admin_delete_topic/3, admin_topic_config/3, admin_committed/3, admin_watermarks/4,
         admin_offset_for_time/5, admin_delete_records/5, admin_commit/5, admin_read/6, admin_set_token/5]).

-on_load(init/0).

-define(ABI, 1).

init() ->
    Path = filename:join(priv_dir(), "kmq_nif"),
    case erlang:load_nif(Path, ?ABI) of
        ok -> ok;
        {error, {Reason, Text}} -> {error, {Reason, lists:flatten([Text, hint(Reason, Text, Path)])}}
    end.

priv_dir() ->
    case code:priv_dir(kmq) of
        {error, bad_name} -> filename:join(filename:dirname(filename:dirname(code:which(?MODULE))), "priv");
        Dir -> Dir
    end.

hint(load_failed, Text, Path) ->
    case {filelib:is_file(Path ++ ".so"), string:find(Text, "librdkafka")} of
        {false, _} ->
            " (kmq is not built: `mix deps.compile kmq --force', or `make -C c_src')";
        {true, nomatch} ->
            " (kmq_nif.so is there and cannot be loaded: was it built for another system? `mix deps.compile kmq --force')";
        {true, _} ->
            " (librdkafka 2.0.2 or newer must be installed where kmq runs: Debian, Ubuntu: apt-get install librdkafka1; "
            "Alpine: apk add librdkafka; Fedora: dnf install librdkafka; macOS: brew install librdkafka)"
    end;
hint(load, _Text, _Path) ->
    " (kmq_nif.so is of another build than this module: build kmq again)";
hint(upgrade, _Text, _Path) ->
    " (the native engine cannot be replaced in a running VM: restart it)";
hint(_, _Text, _Path) ->
    "".

-type ref() :: reference().
-type props() :: [{binary(), binary()}].
-type failure() :: {error, {binary(), integer(), boolean(), boolean(), binary()} | atom()}.
-type token() :: {Slot :: integer(), Offset :: integer()}.
-type refused() :: {error, [{integer(), integer(), late | unknown | closed | enomem | full | unsupported}] | closed}.

-spec version() -> {binary(), integer()}.
version() -> erlang:nif_error(not_loaded).
-spec live() -> #{consumers | publishers | admins | clients => non_neg_integer()}.
live() -> erlang:nif_error(not_loaded).
-spec errors() -> [{{binary(), integer(), boolean(), boolean(), binary()}, retried | answered | reported | replaced | stops}].
errors() -> erlang:nif_error(not_loaded).
%% Test builds: how long calls have held a normal scheduler, in its processor's time, since the last call of this.
-spec busy() -> [{atom(), Calls :: integer(), LongestUs :: integer(), LongerThanAMillisecond :: integer()}].
busy() -> erlang:nif_error(not_loaded).
%% Whether this librdkafka takes it; a name with a ? in front may be unknown.
-spec property(binary(), binary()) -> ok | failure().
property(_Name, _Value) -> erlang:nif_error(not_loaded).
-spec backoff(tuple(), integer(), float()) -> non_neg_integer().
backoff(_Spec, _Attempt, _U) -> erlang:nif_error(not_loaded).

-spec consumer_open(props(), props(), map()) -> {ok, ref()} | failure().
consumer_open(_Props, _ProducerProps, _Opts) -> erlang:nif_error(not_loaded).
-spec consumer_subscribe(ref()) -> ok | failure().
consumer_subscribe(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_topics(ref(), [{binary(), binary()}]) -> ok | failure().
consumer_topics(_Ref, _Topics) -> erlang:nif_error(not_loaded).
-spec consumer_attach(ref(), pid() | nil) -> ok.
consumer_attach(_Ref, _Pid) -> erlang:nif_error(not_loaded).
-spec consumer_poll(ref()) -> {[term()], NextMs :: non_neg_integer()} | failure().
consumer_poll(_Ref) -> erlang:nif_error(not_loaded).
-type batch() :: {Slot :: integer(), Topic :: binary(), Partition :: integer(), [tuple()]}.
-spec consumer_take(ref(), non_neg_integer()) -> {[batch()], More :: boolean()} | failure().
consumer_take(_Ref, _Max) -> erlang:nif_error(not_loaded).
-spec consumer_take(ref(), non_neg_integer(), {partition | key, [integer()]}) ->
          {[{integer(), binary(), integer(), [tuple()], Lane :: integer()}], More :: boolean(),
           Unknown :: [{integer(), binary(), integer()}]} | failure().
consumer_take(_Ref, _Max, _Lanes) -> erlang:nif_error(not_loaded).
-spec consumer_lanes(ref(), [{Slot :: integer(), Lane :: integer()}]) -> ok | failure().
consumer_lanes(_Ref, _Lanes) -> erlang:nif_error(not_loaded).
%% A batch, as consumer_take gave it: all of its messages.
-spec consumer_settle(ref(), 0..5, [token() | batch()]) -> ok | refused().
consumer_settle(_Ref, _Cause, _Tokens) -> erlang:nif_error(not_loaded).
-spec consumer_retry(ref(), [{integer(), integer(), non_neg_integer()}], 0..4, 0..3, binary()) -> ok | refused().
consumer_retry(_Ref, _Tokens, _Cause, _Flags, _Text) -> erlang:nif_error(not_loaded).
-spec consumer_extend(ref(), [{integer(), integer(), integer()}], boolean()) -> ok | refused().
consumer_extend(_Ref, _Tokens, _Leave) -> erlang:nif_error(not_loaded).
-spec consumer_reject(ref(), [token()]) -> ok | refused().
consumer_reject(_Ref, _Tokens) -> erlang:nif_error(not_loaded).
-spec consumer_again(ref()) -> ok | failure().
consumer_again(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_assign(ref(), non_neg_integer(), [{binary(), integer(), integer(), boolean()}]) -> ok | failure().
consumer_assign(_Ref, _Epoch, _Partitions) -> erlang:nif_error(not_loaded).
-spec consumer_reset(ref(), integer(), integer()) -> ok | failure().
consumer_reset(_Ref, _Slot, _Offset) -> erlang:nif_error(not_loaded).
-spec consumer_rebuild(ref()) -> ok | failure().
consumer_rebuild(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_flush(ref()) -> ok | failure().
consumer_flush(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_uncovered(ref()) -> [{Slot :: integer(), Committed :: integer()}].
consumer_uncovered(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_drain(ref()) -> ok | failure().
consumer_drain(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_close(ref(), non_neg_integer()) -> ok | failure().
consumer_close(_Ref, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec consumer_close(ref(), non_neg_integer(), Drain :: boolean()) -> ok | failure().
consumer_close(_Ref, _TimeoutMs, _Drain) -> erlang:nif_error(not_loaded).
-spec consumer_kill(ref()) -> ok | failure().
consumer_kill(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_info(ref()) -> {ok, map()} | failure().
consumer_info(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_pause(ref(), binary(), integer(), boolean()) -> ok | {error, not_assigned | closed}.
consumer_pause(_Ref, _Topic, _Partition, _Pause) -> erlang:nif_error(not_loaded).
-spec consumer_seek(ref(), binary(), integer(), non_neg_integer()) -> {ok, From :: integer()} | {error, not_assigned} | failure().
consumer_seek(_Ref, _Topic, _Partition, _Offset) -> erlang:nif_error(not_loaded).
-spec consumer_set_token(ref(), binary(), integer(), binary(), props()) -> ok | failure().
consumer_set_token(_Ref, _Token, _ExpiresMs, _Principal, _Extensions) -> erlang:nif_error(not_loaded).
-spec consumer_reopen(ref()) -> {ok, [{binary(), integer()}]} | failure().
consumer_reopen(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_give_up(ref()) -> {ok, [{binary(), integer()}]} | failure().
consumer_give_up(_Ref) -> erlang:nif_error(not_loaded).
-spec consumer_test_fatal(ref(), producer | consumer) -> ok | failure().
consumer_test_fatal(_Ref, _Which) -> erlang:nif_error(not_loaded).

-spec publisher_open(props(), map()) -> {ok, ref()} | failure().
publisher_open(_Props, _Opts) -> erlang:nif_error(not_loaded).
-spec publisher_send(ref(), binary(), [tuple()], term()) -> {ok, non_neg_integer()} | failure().
publisher_send(_Ref, _Topic, _Messages, _Token) -> erlang:nif_error(not_loaded).
-spec publisher_space(ref()) -> ok | failure().
publisher_space(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_poll(ref()) -> [term()] | failure().
publisher_poll(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_queued(ref()) -> non_neg_integer() | failure().
publisher_queued(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_close(ref()) -> ok | failure().
publisher_close(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_reopen(ref()) -> ok | failure().
publisher_reopen(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_test_fatal(ref()) -> ok | failure().
publisher_test_fatal(_Ref) -> erlang:nif_error(not_loaded).
-spec publisher_set_token(ref(), binary(), integer(), binary(), props()) -> ok | failure().
publisher_set_token(_Ref, _Token, _ExpiresMs, _Principal, _Extensions) -> erlang:nif_error(not_loaded).

-spec admin_open(props()) -> {ok, ref()} | failure().
admin_open(_Props) -> erlang:nif_error(not_loaded).
-spec admin_close(ref()) -> ok | failure().
admin_close(_Ref) -> erlang:nif_error(not_loaded).
-spec admin_cluster_id(ref(), integer()) -> {ok, binary()} | failure().
admin_cluster_id(_Ref, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_partitions(ref(), binary(), integer()) -> {ok, {non_neg_integer(), non_neg_integer()}} | failure().
admin_partitions(_Ref, _Topic, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_topics(ref(), integer()) -> {ok, [{binary(), non_neg_integer()}]} | failure().
admin_topics(_Ref, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_create_topic(ref(), binary(), integer(), integer(), props(), integer()) -> ok | failure().
admin_create_topic(_Ref, _Topic, _N, _Replication, _Config, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_create_partitions(ref(), binary(), integer(), integer()) -> ok | failure().
admin_create_partitions(_Ref, _Topic, _N, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_delete_topic(ref(), binary(), integer()) -> ok | failure().
admin_delete_topic(_Ref, _Topic, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_topic_config(ref(), binary(), integer()) -> {ok, [{binary(), binary() | nil}]} | failure().
admin_topic_config(_Ref, _Topic, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_committed(ref(), [{binary(), integer()}], integer()) -> {ok, [{binary(), integer(), integer()}]} | failure().
admin_committed(_Ref, _Partitions, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_watermarks(ref(), binary(), integer(), integer()) -> {ok, {integer(), integer()}} | failure().
admin_watermarks(_Ref, _Topic, _Partition, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_offset_for_time(ref(), binary(), integer(), integer(), integer()) -> {ok, integer()} | failure().
admin_offset_for_time(_Ref, _Topic, _Partition, _Ms, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_delete_records(ref(), binary(), integer(), integer(), integer()) -> ok | failure().
admin_delete_records(_Ref, _Topic, _Partition, _Before, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_commit(ref(), binary(), integer(), integer(), integer()) -> ok | failure().
admin_commit(_Ref, _Topic, _Partition, _Offset, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_read(ref(), binary(), integer(), non_neg_integer(), 1..20000, integer()) -> {ok, [tuple()]} | failure().
admin_read(_Ref, _Topic, _Partition, _From, _N, _TimeoutMs) -> erlang:nif_error(not_loaded).
-spec admin_set_token(ref(), binary(), integer(), binary(), props()) -> ok | failure().
admin_set_token(_Ref, _Token, _ExpiresMs, _Principal, _Extensions) -> erlang:nif_error(not_loaded).
