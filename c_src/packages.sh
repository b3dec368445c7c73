#!/bin/sh
# packages.sh build|run: one line, the command that installs what kmq needs on this system: to be built, or to run once it is built
# (what the image of a release needs). KMQ_OS_RELEASE names another file than /etc/os-release.
case $(uname -s) in
Darwin) system=macos ;;
*)
    release=${KMQ_OS_RELEASE:-/etc/os-release}
    system=$(sed -n 's/^ID=//p; s/^ID_LIKE=//p' "$release" 2>/dev/null | tr -d '"' | tr '\n' ' ')
    ;;
esac
case ${1:-build}/$system in
run/macos*) echo "brew install librdkafka" ;;
run/*debian* | run/*ubuntu*) echo "apt-get install librdkafka1" ;;
run/*alpine*) echo "apk add librdkafka" ;;
run/*fedora* | run/*rhel*) echo "dnf install librdkafka" ;;
run/*arch*) echo "pacman -S librdkafka" ;;
run/*suse*) echo "zypper install librdkafka1" ;;
build/macos*) echo "xcode-select --install; brew install librdkafka pkg-config erlang" ;;
build/*debian* | build/*ubuntu*) echo "apt-get install gcc libc6-dev make pkg-config librdkafka-dev erlang-dev" ;;
build/*alpine*) echo "apk add gcc musl-dev make pkgconf librdkafka-dev erlang-dev" ;;
build/*fedora* | build/*rhel*) echo "dnf install gcc make pkgconf-pkg-config librdkafka-devel erlang" ;;
build/*arch*) echo "pacman -S gcc make pkgconf librdkafka erlang" ;;
build/*suse*) echo "zypper install gcc make pkg-config librdkafka-devel erlang" ;;
run/*) echo "install librdkafka, 2.0.2 or newer" ;;
*) echo "install a C11 compiler, GNU make, pkg-config, librdkafka (2.0.2 or newer) and Erlang, all with headers" ;;
esac
