%% The raw side of the port programs (kmq_tracker, kmq_sandbox): frames of external terms, {packet, 4}.
%%
%%   {Id, Command, Args} -> {Id, Reply};  {0, Event} unsolicited;  first frame {0, {ready, Version, ...}}
%%
%% open/1 and send/4 are for a process that receives by itself ({Port, {data, Frame}}, {Port, {exit_status, N}});
%% start/1 and call/5 are for a shell. Closing the port closes the program's stdin, which ends it in an orderly way.
-module(kmq_port).

-export([program/1, open/1, open/2, close/1, encode/3, decode/1, send/4, start/1, start/2, call/5]).

-export_type([id/0, reply/0]).

-type id() :: pos_integer().
-type reply() :: {id(), term()} | {0, {ready, pos_integer()} | {event, atom(), map()}}.

%% Where a program lies: priv/Name of this application.
-spec program(string()) -> file:filename_all().
program(Name) ->
    Priv = case code:priv_dir(kmq) of
        {error, bad_name} -> filename:join(filename:dirname(filename:dirname(code:which(?MODULE))), "priv");
        Dir -> Dir
    end,
    filename:join(Priv, Name).

-spec open(file:filename_all()) -> {ok, port()} | {error, file:posix() | badarg}.
open(Path) -> open(Path, []).

%% The sandbox takes the number of its brokers: open(kmq_port:program("kmq_sandbox"), ["1"]).
-spec open(file:filename_all(), [string()]) -> {ok, port()} | {error, file:posix() | badarg}.
open(Path, Args) ->
    try open_port({spawn_executable, Path}, [binary, exit_status, {packet, 4}, {args, Args}]) of
        Port -> {ok, Port}
    catch
        error:Reason -> {error, Reason}
    end.

-spec close(port()) -> ok.
close(Port) ->
    try port_close(Port) of
        true -> ok
    catch
        error:badarg -> ok
    end.

-spec encode(id(), atom(), term()) -> binary().
encode(Id, Command, Args) when is_integer(Id), Id > 0, is_atom(Command) ->
    term_to_binary({Id, Command, Args}).

-spec decode(binary()) -> reply().
decode(Frame) -> binary_to_term(Frame).

%% ok, or {error, closed} when the program is gone.
-spec send(port(), id(), atom(), term()) -> ok | {error, closed}.
send(Port, Id, Command, Args) ->
    try port_command(Port, encode(Id, Command, Args)) of
        true -> ok
    catch
        error:badarg -> {error, closed}
    end.

%% Opens a program and waits for its first frame.
-spec start(file:filename_all()) -> {ok, port()} | {error, term()}.
start(Path) ->
    case start(Path, []) of
        {ok, Port, _Ready} -> {ok, Port};
        Error -> Error
    end.

%% The same with arguments; tells the first frame, {ready, Version, ...}: of the sandbox it names the brokers.
-spec start(file:filename_all(), [string()]) -> {ok, port(), tuple()} | {error, term()}.
start(Path, Args) ->
    case open(Path, Args) of
        {ok, Port} ->
            receive
                {Port, {data, Frame}} ->
                    case decode(Frame) of
                        {0, Ready} when element(1, Ready) =:= ready -> {ok, Port, Ready};
                        Other -> close(Port), {error, {not_ready, Other}}
                    end;
                {Port, {exit_status, Status}} ->
                    {error, {exit_status, Status}}
            after 10000 ->
                close(Port),
                {error, timeout}
            end;
        Error ->
            Error
    end.

%% Sends a command and waits for its reply; events that come meanwhile stay in the mailbox.
-spec call(port(), id(), atom(), term(), timeout()) -> term() | {error, closed | timeout | {exit_status, integer()}}.
call(Port, Id, Command, Args, Timeout) ->
    case send(Port, Id, Command, Args) of
        ok -> wait(Port, Id, Timeout, []);
        Error -> Error
    end.

wait(Port, Id, Timeout, Others) ->
    receive
        {Port, {data, Frame}} ->
            case decode(Frame) of
                {Id, Reply} -> put_back(Others), Reply;
                _ -> wait(Port, Id, Timeout, [{Port, {data, Frame}} | Others])
            end;
        {Port, {exit_status, Status}} ->
            put_back(Others),
            {error, {exit_status, Status}}
    after Timeout ->
        put_back(Others),
        {error, timeout}
    end.

put_back(Others) -> lists:foreach(fun(Message) -> self() ! Message end, lists:reverse(Others)).
