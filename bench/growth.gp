# growth.png from growth.csv: see plots.sh.
set datafile separator ","
csv = dir."/growth.csv"
set terminal pngcairo size 1300,900 font "sans,11" background "white"
set output dir."/growth.png"
set logscale xy
set grid lt 1 lw 0.7 lc rgb "#e0e0e0"
set format xy "%g"
set yrange [0.1:100]
set rmargin 4
set key top left box lc rgb "#bbbbbb" opaque spacing 1.2
pick(what) = sprintf("< awk -F, '$1 == \"%s\" {print $2 \",\" $4 \",\" $5}' %s", what, csv)
has(what) = int(system(sprintf("awk -F, '$1 == \"%s\" {n++} END {print n + 0}' %s", what, csv)))
parts = "partitions open bytes demand"
titles = "'partitions' 'open messages' 'bytes of a message' 'max\\_demand (stage host)'"
set multiplot layout 2,2 title "What a message costs when there is more of everything (range markers, 100 bytes)" font "sans,14"
do for [i = 1:4] {
    part = word(parts, i)
    if (has(part) == 0) { unset title; set multiplot next; continue }
    set xlabel word(titles, i)
    set ylabel "CPU, us a message (log)"
    if (part eq "partitions") { set xtics 2 } else { set xtics 10 }
    if (part eq "partitions" || part eq "bytes") {
        plot pick(part) using 1:2 with linespoints pt 7 ps 0.9 lw 2 lc rgb "#d62728" title "pull and ack", \
             pick(part) using 1:3 with linespoints pt 6 ps 0.9 lw 2 lc rgb "#777777" title "librdkafka alone in C"
    } else {
        plot pick(part) using 1:2 with linespoints pt 7 ps 0.9 lw 2 lc rgb "#d62728" title (part eq "demand" ? "stage host" : "pull and ack")
    }
}
unset multiplot
