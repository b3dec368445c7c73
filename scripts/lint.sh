#!/bin/sh
# lint.sh: what `make lint` looks at beside the compilers' warnings. All of it runs, then it says whether something was found.
set -eu
cd "$(dirname "$0")/.."
bad=

step() {
    echo "lint: $1"
    shift
    "$@" || bad=1
}

first() { for name; do command -v "$name" && return; done; }
clang_format=${CLANG_FORMAT:-$(first clang-format-14 clang-format)}
clang_tidy=${CLANG_TIDY:-$(first clang-tidy-14 clang-tidy)}

erlang_includes() {
    erl -noshell -eval 'io:format("-isystem~s/erts-~s/include -isystem~s", [code:root_dir(), erlang:system_info(version), code:lib_dir(erl_interface, include)]), halt().' </dev/null
}

c_format() {
    find c_src test/c bench -name '*.[ch]' -print0 | xargs -0 "$clang_format" --dry-run -Werror
}

# A file that has not changed since it was found good, nor any header, nor the choice of checks, is not looked at again.
c_tidy() {
    done_dir=_build/lint/tidy
    mkdir -p "$done_dir"
    # shellcheck disable=SC2046 # a list of files
    common=$(cat .clang-tidy $(find c_src -name '*.h' | sort) | cksum | tr ' ' '-')
    flags="-std=c11 -D_POSIX_C_SOURCE=200809L -D_DEFAULT_SOURCE -DKMQ_FAILPOINTS $(erlang_includes) $(pkg-config --cflags rdkafka)"
    flags="$flags -Ic_src/core -Ic_src/kafka -Ic_src/nif -Ic_src/tracker -Ic_src/sandbox"
    total=$(find c_src -name '*.c' | wc -l)
    export done_dir common flags clang_tidy total
    # shellcheck disable=SC2016 # for the inner shell
    find c_src -name '*.c' | sort | awk '{ print NR, $0 }' | xargs -P "$(getconf _NPROCESSORS_ONLN)" -n 2 sh -c '
        n=$1; shift
        mark=$done_dir/$(echo "$1" | tr / _)-$common-$(cksum <"$1" | tr " " -)
        [ -e "$mark" ] && exit 0
        echo "  $n/$total $1"
        # One call, so that the lines of two files do not mix.
        if out=$("$clang_tidy" --quiet "$1" -- $flags 2>&1); then
            rm -f "$done_dir/$(echo "$1" | tr / _)"-*
            touch "$mark"
        else
            printf "%s\n" "$out" | grep -v "warnings generated"
            exit 1
        fi' sh
}

scripts() {
    find scripts test/support bench .ci c_src -name '*.sh' -print0 | xargs -0 shellcheck .ci/run
}

step "mix format" mix format --check-formatted
step "clang-format" c_format
step "shellcheck" scripts
step "clang-tidy" c_tidy
[ -z "$bad" ] || { echo "lint: found the above; make format mends formats"; exit 1; }
