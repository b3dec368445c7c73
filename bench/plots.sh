#!/bin/sh
# make bench-plots: pictures of what bench-latency and bench-growth have measured, with gnuplot, into _build/bench/*.png.
set -eu
dir=_build/bench
plotted=

# A percentile axis that gives the tail its room: 90 %, 99 % and 99.9 % are as far apart.
if [ -s $dir/latency.csv ]; then
    gnuplot -e "dir='$dir'" bench/latency.gp
    plotted="$plotted $dir/latency.png $dir/redelivery.png"
fi
if [ -s $dir/growth.csv ]; then
    gnuplot -e "dir='$dir'" bench/growth.gp
    plotted="$plotted $dir/growth.png"
fi
if [ -z "$plotted" ]; then
    echo "bench-plots: nothing is measured yet: make bench-latency, make bench-growth"
    exit 1
fi
echo "plotted:$plotted"
