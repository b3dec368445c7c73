# latency.png, redelivery.png from latency.csv: see plots.sh.
set datafile separator ","
csv = dir."/latency.csv"
set terminal pngcairo size 1500,560 font "sans,11" background "white"
set output dir."/latency.png"
# x = nines: 0 = 0 %, 1 = 90 %, 2 = 99 %, 3 = 99.9 %
nines(p) = p >= 100 ? NaN : -log10(1 - p / 100.0)
set xtics ("0" 0, "50" 0.30103, "75" 0.60206, "90" 1, "95" 1.30103, "99" 2, "99.9" 3, "99.99" 4)
set xrange [0:4]
set logscale y
set yrange [0.1:*]
set grid lt 1 lw 0.7 lc rgb "#e0e0e0"
set rmargin 4
set xlabel "percentile"
set key bottom right box lc rgb "#bbbbbb" opaque spacing 1.2
set format y "%g"
rates = system("awk -F, 'NR > 1 && $1 != \"redelivery\" && !seen[$2]++ {print $2}' ".csv)
pick(line, rate) = sprintf("< awk -F, '$1 == \"%s\" && $2 == \"%s\" {print $3 \",\" $4}' %s", line, rate, csv)
has(line, rate) = int(system(sprintf("awk -F, '$1 == \"%s\" && $2 == \"%s\" {n++} END {print n + 0}' %s", line, rate, csv)))
names = "plain offsets markers"
titles = "'librdkafka alone in C' 'delivery: :offsets' 'delivery: :markers'"
array color[3] = ["#777777", "#1f77b4", "#d62728"]
set multiplot layout 1,words(rates) title "From publish to handler, Kafka on the same machine" font "sans,14"
do for [i = 1:words(rates)] {
    rate = word(rates, i)
    set title rate." messages a second"
    if (i == 1) { set ylabel "milliseconds (log)" } else { unset ylabel }
    plot for [k = 1:3] (has(word(names, k), rate) ? pick(word(names, k), rate) : "/dev/null") using (nines($1)):($2 / 1000.0) \
        with lines lw 2.2 lc rgb color[k] title word(titles, k)
}
unset multiplot

if (has("redelivery", "200") > 0) {
    set terminal pngcairo size 760,520 font "sans,11" background "white"
    set output dir."/redelivery.png"
    set title "Redelivery: how late the handler has a failed message again" font "sans,13"
    set ylabel "milliseconds after the end of the delay (log)"
    set yrange [1:*]
    plot pick("redelivery", "200") using (nines($1)):($2 / 1000.0) with lines lw 2.2 lc rgb "#d62728" title "200 failing messages a second", \
         150 with lines dt 2 lc rgb "#777777" title "150 ms: the target for 99 %"
}
