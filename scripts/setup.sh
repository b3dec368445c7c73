#!/bin/sh
# setup.sh build|test|lint|plots: makes sure that what this needs is installed. On Debian and Ubuntu, as root or with sudo, it installs what
# is missing; elsewhere it says what to install. When nothing is missing it asks no package manager anything.
set -eu
what=${1:-build}
missing='' debian=''

# need NAME DEBIAN_PACKAGES: said to be missing when the last command failed
need() {
    missing="$missing $1"
    debian="$debian $2"
}
have() { command -v "$1" >/dev/null 2>&1; }
header() {
    for dir in /usr/include /usr/local/include /opt/homebrew/include "$@"; do
        [ -e "$dir/$header" ] && return 0
    done
    return 1
}
rdkafka() {
    [ -n "${RDKAFKA_LIBS:-}" ] || pkg-config --exists "rdkafka >= 2.0.2" 2>/dev/null
}
nif_header() {
    header=erl_nif.h
    header /usr/lib/erlang/usr/include /usr/local/lib/erlang/usr/include /usr/lib64/erlang/usr/include && return 0
    have erl || return 1
    root=$(erl -noshell -eval 'io:put_chars(code:root_dir()), halt().' </dev/null)
    [ -e "$root/usr/include/erl_nif.h" ]
}

check() {
    missing='' debian=''
    have make || need make make
    have "${CC:-cc}" || need "a C compiler" "gcc libc6-dev"
    have pkg-config || need pkg-config pkg-config
    rdkafka || need "librdkafka 2.0.2 or newer" librdkafka-dev
    have erl || need Erlang/OTP erlang-nox
    nif_header || need "Erlang's C headers" erlang-dev
    have mix || need "Elixir 1.14 or newer" elixir
    if [ "$what" = test ]; then
        header=cmocka.h
        header || need cmocka libcmocka-dev
        have ps || need ps procps
        have kcat || need kcat kcat
        have faketime || need faketime faketime
        have openssl || need openssl openssl
        have git || need git git
        have rebar3 || need rebar3 rebar3
        if [ -z "${KMQ_KAFKA:-}" ]; then
            have javac || need "a JDK, 17 or newer" default-jdk-headless
            have mvn || need Maven maven
        fi
    fi
    if [ "$what" = lint ]; then
        have clang-format-14 || have clang-format || need clang-format clang-format-14
        have clang-tidy-14 || have clang-tidy || need clang-tidy clang-tidy-14
        have shellcheck || need shellcheck shellcheck
    fi
    if [ "$what" = plots ]; then
        have gnuplot || need gnuplot gnuplot-nox
    fi
    [ -z "$missing" ]
}

give_up() {
    echo "kmq: missing:$missing"
    echo "Install what is missing, then run make again:"
    echo "  Debian, Ubuntu: apt-get install$debian"
    case $what in
    build) extra='' extra_arch='' extra_fedora='' extra_alpine='' ;;
    test)
        extra=" cmocka kcat git rebar3 openssl libfaketime openjdk maven"
        extra_arch=" cmocka procps-ng kcat git rebar3 openssl libfaketime jdk-openjdk maven"
        extra_fedora=" libcmocka-devel procps-ng kcat git rebar3 openssl libfaketime java-latest-openjdk-devel maven"
        extra_alpine=" cmocka-dev procps kcat git rebar3 openssl libfaketime openjdk17 maven"
        ;;
    lint) extra=" clang-format llvm shellcheck" extra_arch=" clang shellcheck" extra_fedora=" clang-tools-extra ShellCheck" extra_alpine=" clang-extra-tools shellcheck" ;;
    plots) extra=" gnuplot" extra_arch=" gnuplot" extra_fedora=" gnuplot" extra_alpine=" gnuplot" ;;
    esac
    case $(uname -s) in
    Darwin)
        echo "  macOS:  xcode-select --install; brew install pkg-config librdkafka erlang elixir$extra"
        ;;
    *)
        echo "  Fedora: dnf install make gcc pkgconf-pkg-config librdkafka-devel erlang elixir$extra_fedora"
        echo "  Arch:   pacman -S make gcc pkgconf librdkafka erlang elixir$extra_arch"
        echo "  Alpine: apk add make gcc musl-dev pkgconf librdkafka-dev erlang erlang-dev elixir$extra_alpine"
        ;;
    esac
    exit 1
}

if check; then exit 0; fi
if ! have apt-get; then give_up; fi
if [ "$(id -u)" = 0 ]; then
    sudo=
elif have sudo; then
    sudo=sudo
else
    echo "kmq: no root and no sudo, so nothing can be installed from here."
    give_up
fi
echo "kmq: installing$debian (missing:$missing)"
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of packages
if ! { $sudo apt-get update -q && $sudo apt-get install -q -y --no-install-recommends $debian; } </dev/null; then
    echo "kmq: apt-get failed; its message is above. Is there a network, is another apt-get running?"
    exit 1
fi
check || give_up
