import com.sun.management.OperatingSystemMXBean;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;

/** What a peer of `make bench` used, as its last line: MESSAGES SECONDS CPU_SECONDS RSS_KB, from the moment on that the caller names. */
class Usage {
    static long cpu() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    static void end(long messages, long start, long startCpu) throws Exception {
        double seconds = (System.nanoTime() - start) / 1e9;
        System.out.printf("%d %.6f %.6f %d%n", messages, seconds, (cpu() - startCpu) / 1e9, rssKb());
        Runtime.getRuntime().halt(0);
    }

    private static long rssKb() throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status")))
            if (line.startsWith("VmHWM:")) return Long.parseLong(line.replaceAll("[^0-9]", ""));
        return 0;
    }
}
