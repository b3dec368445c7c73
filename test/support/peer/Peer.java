import com.softwaremill.kmq.KafkaClients;
import com.softwaremill.kmq.KmqClient;
import com.softwaremill.kmq.KmqConfig;
import com.softwaremill.kmq.RedeliveryTracker;
import java.util.HashSet;
import java.util.Set;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * The JVM's kmq as a live peer of the tests: `Peer client|tracker <bootstrap> <queue> <markers> <group> <timeout ms>`.
 * It ends when its stdin does.
 *
 * client: works on messages and says "got <partition> <offset> <value>" for each. The first time that it sees a value which begins
 * with "drop", it drops it: no END is written.
 */
public class Peer {
    private static volatile boolean ended = false;

    public static void main(String[] args) throws Exception {
        KafkaClients clients = new KafkaClients(args[1]);
        // The last: after so long without a marker, the tracker's own clock is the time.
        KmqConfig config = new KmqConfig(args[2], args[3], args[4], args[4] + "-redelivery", Long.parseLong(args[5]), 100);
        Thread stdin = new Thread(Peer::waitForEnd);
        stdin.setDaemon(true);
        stdin.start();
        if (args[0].equals("client")) client(clients, config);
        else RedeliveryTracker.start(clients, config);
        System.out.println("ready");
        stdin.join();
    }

    private static void client(KafkaClients clients, KmqConfig config) {
        Thread worker = new Thread(() -> {
            KmqClient<String, String> client = new KmqClient<>(config, clients, StringDeserializer.class, StringDeserializer.class, 100);
            Set<String> dropped = new HashSet<>();
            while (!ended) {
                for (ConsumerRecord<String, String> record : client.nextBatch()) {
                    System.out.println("got " + record.partition() + " " + record.offset() + " " + record.value());
                    if (!record.value().startsWith("drop") || !dropped.add(record.value())) client.processed(record);
                }
            }
        });
        worker.setDaemon(true);
        worker.start();
    }

    private static void waitForEnd() {
        try {
            while (System.in.read() >= 0) { }
        } catch (java.io.IOException e) {
            // ended all the same
        }
        ended = true;
        Runtime.getRuntime().halt(0);
    }
}
