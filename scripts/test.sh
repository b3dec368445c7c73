#!/bin/sh
# test.sh: all Elixir tests, in three parts side by side, for they wait more than they compute; each has a VM and a Kafka of its own. What failed is
# said again at the end, where a log is looked at first.
#
# A test that failed beside the others runs once more, alone and with the same seed: a time limit that a busy machine missed is told from a fault.
# Both outcomes are printed. No second chance: a lost message, a file or a VM that failed as a whole, and more than MOST failures.
set -eu
cd "$(dirname "$0")/.."
logs=_build/c/parts
MOST=4

# A VM that hangs is a failure, too.
limit=
if command -v timeout >/dev/null; then limit="timeout -k 60 2700"; fi

part() {
    MIX_TEST_PARTITION=$1 $limit mix test --partitions 3 || touch "$logs/$1.failed"
}

failures() { grep -cE '^ +[0-9]+\) ' "$1" || true; }

# The lines "file:line" below each failed test's name.
places() { grep -A 1 -E '^ +[0-9]+\) test ' "$1" | grep -oE '[^ ]+_test\.exs:[0-9]+$' || true; }

# What each failed test says: not its name, which may be about what is lost, nor where it stands; the stack trace has both once more.
messages() {
    awk '/^ +[0-9]+\) /{ left = 8; next } /^ +(stacktrace|The following output)/{ left = 0 } left > 0 { left--; if (!/_test\.exs:[0-9]+$/) print }' "$1"
}

may_be_time() {
    n=$(failures "$1")
    [ "$n" -ge 1 ] && [ "$n" -le "$MOST" ] && [ "$(places "$1" | wc -l)" = "$n" ] && ! messages "$1" | grep -qiE 'missing\(|lost'
}

alone() {
    log=$logs/$1.log
    echo "part $1 failed:"
    grep -A 8 -E '^ +[0-9]+\) ' "$log" || tail -n 20 "$log"
    may_be_time "$log" || return 1
    seed=$(sed -n 's/^seed \([0-9]*\),.*/\1/p' "$log" | head -n 1)
    echo "once more, alone:"
    for place in $(places "$log" | sort -u); do
        ok=1
        $limit mix test --seed "$seed" "$place" >"$logs/$1.again" 2>&1 || ok=
        cat "$logs/$1.again"
        [ -n "$ok" ] && ! grep -q "All tests have been excluded" "$logs/$1.again" || return 1
    done
    echo "failed beside other tests, passed alone: $(places "$log" | sort -u | tr '\n' ' ')"
}

MIX_ENV="test" mix compile
rm -rf "$logs"
mkdir -p "$logs"
part 2 >"$logs/2.log" 2>&1 &
part 3 >"$logs/3.log" 2>&1 &
echo "three parts of the Elixir tests, the first:"
part 1 2>&1 | tee "$logs/1.log"
wait
for n in 2 3; do
    echo "part $n:"
    cat "$logs/$n.log"
done
bad=
for n in 1 2 3; do
    [ ! -e "$logs/$n.failed" ] || alone "$n" || bad=1
done
[ -z "$bad" ]
