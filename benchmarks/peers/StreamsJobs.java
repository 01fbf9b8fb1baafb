// Kafka Streams as a peer in ordinary jobs (those of spark_jobs.py), job after job in one warm JVM.
// java -cp ... StreamsJobs.java THREADS GUARANTEE COMMIT_MS
// A job is a line on stdin: BOOTSTRAP APPLICATION WORK IN OUT[,OUT...]. It answers "first" when the first record is there and
// runs until the next line comes ("stop"), which it answers with "stopped".
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.time.Instant;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.TimeWindows;

public class StreamsJobs {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final List<String> CURRENCIES = List.of("EUR", "USD", "GBP");

    public static void main(String[] args) throws Exception {
        BufferedReader jobs = new BufferedReader(new InputStreamReader(System.in));
        System.out.println("ready");
        for (String line = jobs.readLine(); line != null; line = jobs.readLine()) {
            KafkaStreams streams = start(args, line.split(" "));
            jobs.readLine();
            streams.close();
            System.out.println("stopped");
        }
    }

    private static KafkaStreams start(String[] args, String[] job) throws Exception {
        Path state = Files.createTempDirectory("semel-streams");
        state.toFile().deleteOnExit();
        Properties settings = new Properties();
        settings.put("bootstrap.servers", job[0]);
        settings.put("application.id", job[1]);
        settings.put("num.stream.threads", args[0]);
        settings.put("processing.guarantee", args[1]);
        settings.put("commit.interval.ms", args[2]);
        settings.put("auto.offset.reset", "earliest");
        settings.put("state.dir", state.toString());
        settings.put("default.key.serde", Serdes.ByteArray().getClass());
        settings.put("default.value.serde", Serdes.ByteArray().getClass());
        AtomicBoolean begun = new AtomicBoolean();
        StreamsBuilder builder = new StreamsBuilder();
        Consumed<byte[], byte[]> reading = Consumed.with(Serdes.ByteArray(), Serdes.ByteArray());
        if (job[2].equals("count")) {
            reading = reading.withTimestampExtractor((record, before) -> millis(parse((byte[]) record.value()), before));
        }
        KStream<byte[], byte[]> records = builder.stream(job[3], reading)
            .peek((key, value) -> { if (!begun.get() && begun.compareAndSet(false, true)) System.out.println("first"); });
        build(job[2], records, job[4].split(","));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        return streams;
    }

    private static void build(String work, KStream<byte[], byte[]> records, String[] targets) {
        switch (work) {
            case "rekey" -> orders(records)
                .filter((key, order) -> order.get("amount").asDouble() >= 20)
                .map((key, order) -> KeyValue.pair(bytes(order.get("user").asText()), text(gross(order))))
                .to(targets[0]);
            case "count" -> orders(records)
                .map((key, order) -> KeyValue.pair(order.get("user").asText(), bytes("")))
                .groupByKey(Grouped.with(Serdes.String(), Serdes.ByteArray()))
                .windowedBy(TimeWindows.ofSizeAndGrace(Duration.ofMinutes(1), Duration.ofMinutes(1)))
                .count(Materialized.with(Serdes.String(), Serdes.Long()))
                .toStream()
                .map((key, count) -> KeyValue.pair(bytes(key.key()), text(counted(key.key(), key.window().start(), count))))
                .to(targets[0], Produced.with(Serdes.ByteArray(), Serdes.ByteArray()));
            case "join" -> {
                Map<Integer, String> products = new HashMap<>();
                for (int number = 0; number < 1000; number++) products.put(number, "product " + number);
                orders(records)
                    .filter((key, order) -> products.containsKey(order.get("product").asInt()))
                    .map((key, order) -> KeyValue.pair(
                        bytes(Integer.toString(order.get("product").asInt() % 20)), text(named(order, products))))
                    .to(targets[0]);
            }
            case "topics" -> records
                .map((key, value) -> KeyValue.pair(keyOf(key, value), value))
                .to((key, value, context) -> target(parse(value), targets), Produced.with(Serdes.ByteArray(), Serdes.ByteArray()));
            default -> throw new IllegalArgumentException(work);
        }
    }

    private static KStream<byte[], ObjectNode> orders(KStream<byte[], byte[]> records) {
        return records.mapValues(StreamsJobs::parse).filter((key, order) -> order != null);
    }

    private static ObjectNode parse(byte[] value) {
        try {
            return JSON.readTree(value) instanceof ObjectNode order && order.has("order_id") ? order : null;
        } catch (Exception unread) {
            return null;
        }
    }

    private static long millis(ObjectNode order, long before) {
        return order == null ? Math.max(before, 0) : Instant.parse(order.get("at").asText()).toEpochMilli();
    }

    private static ObjectNode gross(ObjectNode order) {
        ObjectNode found = JSON.createObjectNode();
        found.set("order_id", order.get("order_id"));
        found.set("user", order.get("user"));
        found.put("gross", Math.round(order.get("amount").asDouble() * 119) / 100.0);
        found.set("currency", order.get("currency"));
        if (order.has("note")) found.set("note", order.get("note"));
        return found;
    }

    private static ObjectNode counted(String user, long start, long count) {
        return JSON.createObjectNode().put("user", user).put("minute", Instant.ofEpochMilli(start).toString()).put("orders", count);
    }

    private static ObjectNode named(ObjectNode order, Map<Integer, String> products) {
        ObjectNode found = JSON.createObjectNode();
        found.set("order_id", order.get("order_id"));
        found.put("name", products.get(order.get("product").asInt()));
        found.set("amount", order.get("amount"));
        if (order.has("note")) found.set("note", order.get("note"));
        return found;
    }

    private static byte[] keyOf(byte[] key, byte[] value) {
        ObjectNode order = parse(value);
        return order == null ? key : bytes(order.get("user").asText());
    }

    private static String target(ObjectNode order, String[] targets) {
        int place = order == null ? -1 : CURRENCIES.indexOf(order.get("currency").asText());
        return place < 0 ? targets[targets.length - 1] : targets[place];
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static byte[] text(ObjectNode node) {
        try {
            return JSON.writeValueAsBytes(node);
        } catch (Exception impossible) {
            throw new IllegalStateException(impossible);
        }
    }
}
