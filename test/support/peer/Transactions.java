import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

/**
 * A transactional producer for the tests: `Transactions <bootstrap> <transactional id>`. It reads commands, one a line (`begin`, `send <topic>
 * <partition> <value>`, `commit`, `abort`), and says "ok" after each. It ends when its stdin does.
 */
public class Transactions {
    public static void main(String[] args) throws Exception {
        Properties properties = new Properties();
        properties.put("bootstrap.servers", args[0]);
        properties.put("transactional.id", args[1]);
        properties.put("key.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        properties.put("value.serializer", "org.apache.kafka.common.serialization.StringSerializer");
        KafkaProducer<String, String> producer = new KafkaProducer<>(properties);
        producer.initTransactions();
        System.out.println("ready");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        String line;
        while ((line = in.readLine()) != null) {
            String[] words = line.split(" ", 4);
            switch (words[0]) {
                case "begin": producer.beginTransaction(); break;
                case "send": producer.send(new ProducerRecord<>(words[1], Integer.parseInt(words[2]), null, words[3])).get(); break;
                case "commit": producer.commitTransaction(); break;
                case "abort": producer.abortTransaction(); break;
                default: throw new IllegalArgumentException(line);
            }
            System.out.println("ok");
        }
        Runtime.getRuntime().halt(0);
    }
}
