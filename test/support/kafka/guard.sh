#!/bin/sh
# guard.sh DIR COMMAND ARGS...: runs the command in DIR with its output in DIR/kafka.log, says its pid, and when stdin ends kills it and
# removes DIR: what the test VM started goes with it, however it dies.
dir=$1
shift
cd "$dir" || exit 1
exec 3<&0 2>/dev/null
"$@" </dev/null >>kafka.log 2>&1 3<&- &
pid=$!
echo "$pid"
( while read -r _; do :; done <&3; : >over; kill -KILL "$pid" ) &
guard=$!
wait "$pid"
code=$?
kill "$guard"
if [ -e over ]; then cd / && rm -rf "$dir"; fi
exit "$code"
