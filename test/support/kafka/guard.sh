#!/bin/sh
# guard.sh LOG COMMAND ARGS...: runs the command with its output in LOG, says its pid, and kills it when stdin ends: what the test VM
# started goes with it, however it dies.
log=$1
shift
exec 3<&0 2>/dev/null
"$@" </dev/null >>"$log" 2>&1 3<&- &
pid=$!
echo "$pid"
( while read -r _; do :; done <&3; kill -KILL "$pid" ) &
guard=$!
wait "$pid"
code=$?
kill "$guard"
exit "$code"
