#!/bin/sh
# fetch.sh NAME POM: brings a pom's jars into the cache, ${XDG_CACHE_HOME:-$HOME/.cache}/kmq/NAME, once. The folder appears whole or not
# at all, and is made anew when the pom has changed.
set -eu
name=$1 pom=$2
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kmq
dir=$cache/$name
if cmp -s "$pom" "$dir/pom.xml"; then exit 0; fi
if ! command -v mvn >/dev/null; then
    echo "fetch.sh: mvn is not there. Install Maven (Debian: apt-get install maven), or run: make setup-test" >&2
    exit 1
fi
tmp=$dir.$$
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp"
echo "fetching $name (once) into $dir"
if ! mvn -q -B -f "$pom" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies -DincludeScope=runtime "-DoutputDirectory=$tmp" </dev/null; then
    echo "fetch.sh: Maven could not fetch $name. It needs its central repository, or a mirror of it set up in ~/.m2/settings.xml." >&2
    exit 1
fi
cp "$pom" "$tmp/pom.xml"
rm -rf "$dir"
mv "$tmp" "$dir"
