// Kafka Streams as a peer: copies one topic to another, job after job in one warm JVM. With CACHE_BYTES it counts the
// records of each key instead (RocksDB, changelog).
// java -cp ... StreamsPeer.java THREADS GUARANTEE COMMIT_MS [CACHE_BYTES]
// A job is a line on stdin: BOOTSTRAP APPLICATION IN OUT [COMMIT_MS]. It answers "first" when the first record is there and runs until
// the next line comes ("stop"), which it answers with "stopped".
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Produced;

public class StreamsPeer {
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
        settings.put("commit.interval.ms", job.length > 4 ? job[4] : args[2]);
        settings.put("auto.offset.reset", "earliest");
        settings.put("state.dir", state.toString());
        settings.put("default.key.serde", Serdes.ByteArray().getClass());
        settings.put("default.value.serde", Serdes.ByteArray().getClass());
        AtomicBoolean begun = new AtomicBoolean();
        StreamsBuilder builder = new StreamsBuilder();
        KStream<byte[], byte[]> records = builder.<byte[], byte[]>stream(job[2])
            .peek((key, value) -> { if (!begun.get() && begun.compareAndSet(false, true)) System.out.println("first"); });
        if (args.length > 3) {
            settings.put("statestore.cache.max.bytes", args[3]);
            records.groupByKey().count().toStream().to(job[3], Produced.with(Serdes.ByteArray(), Serdes.Long()));
        } else {
            records.to(job[3]);
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.start();
        return streams;
    }
}
