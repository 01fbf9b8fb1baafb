import java.util.Properties;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;

/**
 * What transactions cost: the same producer without and with them, in turns in one warm process.
 *
 * Arguments: bootstrap topic recordBytes transactionMs sliceMs pairs. Prints "without with" in records/s for every pair, each from the
 * first record to the last acknowledgement or commit. Every second pair begins with transactions.
 */
public class TransactionCost {
    private final String topic;
    private final byte[] value;
    private final long transactionMs;
    private final long sliceMs;
    private final AtomicReference<Exception> failure = new AtomicReference<>();

    TransactionCost(String topic, int recordBytes, long transactionMs, long sliceMs) {
        this.topic = topic;
        this.value = new byte[recordBytes];
        new java.util.Random(1).nextBytes(value);
        this.transactionMs = transactionMs;
        this.sliceMs = sliceMs;
    }

    public static void main(String[] words) throws Exception {
        TransactionCost cost = new TransactionCost(
            words[1], Integer.parseInt(words[2]), Long.parseLong(words[3]), Long.parseLong(words[4]));
        try (KafkaProducer<byte[], byte[]> plain = producer(words[0], null);
             KafkaProducer<byte[], byte[]> transactional = producer(words[0], words[1])) {
            transactional.initTransactions();
            for (int warm = 0; warm < 3; warm++) {
                cost.without(plain);
                cost.with(transactional);
            }
            for (int pair = 0; pair < Integer.parseInt(words[5]); pair++) {
                boolean first = pair % 2 == 0;
                double with = first ? 0 : cost.with(transactional);
                double without = cost.without(plain);
                with = first ? cost.with(transactional) : with;
                System.out.printf(java.util.Locale.ROOT, "%.1f %.1f%n", without, with);
            }
        }
    }

    private static KafkaProducer<byte[], byte[]> producer(String bootstrap, String transactionalId) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("acks", "all");
        settings.put("key.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        settings.put("value.serializer", "org.apache.kafka.common.serialization.ByteArraySerializer");
        if (transactionalId != null) {
            settings.put("transactional.id", transactionalId);
        }
        return new KafkaProducer<>(settings);
    }

    private double without(KafkaProducer<byte[], byte[]> producer) throws Exception {
        long started = System.nanoTime();
        long count = send(producer, started, sliceMs);
        producer.flush();
        return rate(count, started);
    }

    private double with(KafkaProducer<byte[], byte[]> producer) throws Exception {
        long started = System.nanoTime();
        long count = 0;
        while (System.nanoTime() - started < sliceMs * 1_000_000) {
            producer.beginTransaction();
            count += send(producer, System.nanoTime(), transactionMs);
            producer.commitTransaction();
        }
        return rate(count, started);
    }

    private long send(KafkaProducer<byte[], byte[]> producer, long from, long forMs) {
        long count = 0;
        while (System.nanoTime() - from < forMs * 1_000_000) {
            producer.send(new ProducerRecord<>(topic, value), (place, error) -> {
                if (error != null) {
                    failure.compareAndSet(null, error);
                }
            });
            count++;
        }
        return count;
    }

    private double rate(long count, long started) throws Exception {
        if (failure.get() != null) {
            throw failure.get();
        }
        return count / ((System.nanoTime() - started) / 1e9);
    }
}
