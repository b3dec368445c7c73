import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.config.ConfigResource;

/**
 * Kafka's own Java consumers, as peers of `make bench`: `Consumers plain|share BOOTSTRAP TOPIC GROUP COUNT WARM` reads COUNT messages, once
 * each, and prints MESSAGES SECONDS CPU_SECONDS RSS_KB, counted behind the first WARM of them. plain commits every second; share
 * acknowledges every message for itself (KIP-932, explicit).
 */
public class Consumers {
    private static long got, warm, countedFrom, start, startCpu, last;

    public static void main(String[] args) throws Exception {
        long count = Long.parseLong(args[4]);
        warm = Long.parseLong(args[5]);
        Properties props = new Properties();
        props.put("bootstrap.servers", args[1]);
        props.put("group.id", args[3]);
        props.put("key.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        props.put("value.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        if (args[0].equals("plain")) plain(props, args[2], count);
        else share(props, args[2], count);
        Usage.end(got - countedFrom, start, startCpu);
    }

    private static void plain(Properties props, String topic, long count) {
        props.put("auto.offset.reset", "earliest");
        props.put("enable.auto.commit", "true");
        props.put("auto.commit.interval.ms", "1000");
        props.put("max.poll.records", "5000");
        KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(props);
        consumer.subscribe(List.of(topic));
        while (got < count) counted(consumer.poll(Duration.ofMillis(200)));
    }

    private static void share(Properties props, String topic, long count) throws Exception {
        String group = props.getProperty("group.id");
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", props.getProperty("bootstrap.servers")))) {
            admin.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.GROUP, group),
                    List.of(new AlterConfigOp(new ConfigEntry("share.auto.offset.reset", "earliest"), AlterConfigOp.OpType.SET))))
                .all().get();
        }
        props.put("share.acknowledgement.mode", "explicit");
        props.put("max.poll.records", "5000");
        KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(props);
        consumer.subscribe(List.of(topic));
        while (got < count) {
            ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
            counted(records);
            for (ConsumerRecord<byte[], byte[]> record : records) consumer.acknowledge(record, AcknowledgeType.ACCEPT);
            if (!records.isEmpty()) consumer.commitAsync();
        }
        consumer.commitSync();
    }

    private static void counted(ConsumerRecords<byte[], byte[]> records) {
        long now = System.nanoTime();
        if (start == 0 && got >= warm && !records.isEmpty()) {
            countedFrom = got;
            start = now;
            startCpu = Usage.cpu();
        }
        if (last == 0 || !records.isEmpty()) last = now;
        if (now - last > 60_000_000_000L) throw new IllegalStateException("no message for 60 s (" + got + ")");
        got += records.count();
    }
}
