import com.softwaremill.kmq.KafkaClients;
import com.softwaremill.kmq.KmqClient;
import com.softwaremill.kmq.KmqConfig;
import com.softwaremill.kmq.RedeliveryTracker;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * The JVM's kmq, client and tracker, as a peer of `make bench`: `Kmq BOOTSTRAP TOPIC MARKERS GROUP COUNT WARM` works off COUNT
 * messages with its tracker running in the same JVM, and prints MESSAGES SECONDS CPU_SECONDS RSS_KB, counted behind the first WARM of them.
 */
public class Kmq {
    public static void main(String[] args) throws Exception {
        long count = Long.parseLong(args[4]), warm = Long.parseLong(args[5]), got = 0, countedFrom = 0;
        long start = 0, startCpu = 0, last = System.nanoTime();
        KafkaClients clients = new KafkaClients(args[0]);
        KmqConfig config = new KmqConfig(args[1], args[2], args[3], args[3] + "-redelivery", 90_000, 1_000);
        RedeliveryTracker.start(clients, config);
        KmqClient<byte[], byte[]> client = new KmqClient<>(config, clients, ByteArrayDeserializer.class, ByteArrayDeserializer.class, 100);
        while (got < count) {
            ConsumerRecords<byte[], byte[]> records = client.nextBatch();
            long now = System.nanoTime();
            if (start == 0 && got >= warm && !records.isEmpty()) {
                countedFrom = got;
                start = now;
                startCpu = Usage.cpu();
            }
            if (!records.isEmpty()) last = now;
            if (now - last > 60_000_000_000L) throw new IllegalStateException("no message for 60 s (" + got + ")");
            for (ConsumerRecord<byte[], byte[]> record : records) client.processed(record);
            got += records.count();
        }
        Usage.end(got - countedFrom, start, startCpu);
    }
}
