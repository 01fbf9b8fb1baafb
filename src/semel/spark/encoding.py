"""Rows to record batches, before the shuffle: what the first half of a write job does in every task.

Each row gets its target. All rows of a target that a task has seen are encoded together, whole columns at a time,
and leave as a few binary rows: (target, count, bytes of a record batch). So the shuffle moves a handful of large rows
and not the records, and no record crosses the JVM again. Producer id and sequence are stamped on later, by the task
that writes.

Memory: one or two times COLLECT_BYTES of input, and as much again while it is encoded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from semel.client.cluster import Cluster
from semel.client.dead_letters import SIZE_HEADER, reason_headers
from semel.client.errors import KafkaError
from semel.client.settings import ProducerSettings
from semel.protocol.batch import HEADER_SIZE
from semel.protocol.errors import ErrorCode
from semel.spark.sink_options import MURMUR2, SPREAD, SinkOptions
from semel.spark.stages import ENCODE, FROM_SPARK, pulled, stage
from semel.spark.topics import NO_LIMIT, TopicLimits

TOPIC_TIMEOUT_S = 5.0


class TargetError(ValueError):
    """A topic that rows are sent to and the cluster does not have."""


class TargetTopic(NamedTuple):
    name: str
    first: int  # number of its partition 0
    partitions: int


class Targets:
    """Topics and partitions as numbers, in a fixed order. Small and picklable: it goes to every task."""

    def __init__(self, partitions_by_topic: dict[str, int], limits: Mapping[str, TopicLimits] | None = None) -> None:
        self.topics: list[TargetTopic] = []
        self.limits = [(limits or {}).get(name, TopicLimits()) for name in partitions_by_topic]  # as `topics`
        first = 0
        for name, count in partitions_by_topic.items():
            self.topics.append(TargetTopic(name, first, count))
            first += count
        self.count = first
        self._by_name = {topic.name: index for index, topic in enumerate(self.topics)}

    def index(self, name: str | None) -> int:
        """Which of `topics`; -1 if it is none of them."""
        return self._by_name.get(name, -1) if name is not None else -1

    def place(self, number: int) -> tuple[str, int]:
        topic = next(t for t in reversed(self.topics) if t.first <= number)
        return topic.name, number - topic.first

    def compression(self, topic: str) -> str | None:
        """How the broker stores batches of a topic; None: as they come, or not known."""
        return self.limits[self._by_name[topic]].compression

    def places(self) -> list[tuple[str, int]]:
        return [(topic.name, p) for topic in self.topics for p in range(topic.partitions)]

    @classmethod
    def of(cls, cluster: Cluster, topics: list[str], limits: Mapping[str, TopicLimits] | None = None) -> Targets:
        """How many partitions each topic has, by metadata that is requested again when it is older than
        metadata.max.age.ms. A topic that was created just now is waited for."""
        found = {}
        for name in dict.fromkeys(topics):
            try:
                found[name] = len(cluster.partitions(name, TOPIC_TIMEOUT_S))
            except KafkaError as error:
                if error.code is ErrorCode.NETWORK_EXCEPTION:
                    raise  # nothing is known of the topic
                raise TargetError(
                    f"output topic {name!r} cannot be written: {error}. Create it first (`semel topic create "
                    f"{name}`), or correct the option that names it (topic, topics, dead_letter_topic)"
                ) from error
        return cls(found, limits)


COLLECT_BYTES = 16 * 1024 * 1024
RECORD_OVERHEAD_BYTES = 512  # of a record and its batch beside key, value and headers
RECORD_BYTES = 10  # of these: attributes, a time as it is behind a mark (7), the offset, the number of headers
HEADER_OVERHEAD_BYTES = 6  # of a header beside its key and value
BLOB_COLUMNS = "target integer, count integer, dead integer, data binary"


class BadRowError(ValueError):
    """A row that cannot be written, and no dead-letter topic to put it."""


@dataclass(frozen=True)
class Routing:
    """How rows become records of which partition. Picklable."""

    targets: Targets
    topic: str | None  # the default, for rows without a topic of their own
    dead_letter: str | None
    partitioner: str
    batch_id: int
    timestamp_ms: int
    max_record_bytes: int
    batch_bytes: int
    compression: int
    allowed: frozenset[str] = field(default_factory=frozenset)


def routing_of(options: SinkOptions, targets: Targets, batch_id: int, settings: ProducerSettings) -> Routing:
    return Routing(
        targets=targets,
        topic=options.topic,
        dead_letter=options.dead_letter_topic,
        partitioner=options.partitioner,
        batch_id=batch_id,
        timestamp_ms=int(time.time() * 1000),
        max_record_bytes=options.max_request_size - RECORD_OVERHEAD_BYTES,
        batch_bytes=settings.batch_size,
        compression=settings.compression,
        allowed=frozenset(t for t in (options.topic, *options.extra_topics) if t is not None),
    )


class Encoder:
    """`partition`: where rows go that name none, whatever their key; modulo the partitions of their topic."""

    def __init__(self, routing: Routing, task: int, partition: int | None = None) -> None:
        import numpy as np
        import pyarrow as pa

        from semel.protocol import arrow_numbers
        from semel.protocol.vector_varints import length_sizes

        self._np, self._pa, self._numbers, self._length_sizes = np, pa, arrow_numbers, length_sizes
        self._routing = routing
        self._task = task
        self._partition = partition
        self._rounds = 0
        self._opened: set[int] = set()  # targets whose first row has left

    def blobs(self, batches: Iterator[Any]) -> Iterator[tuple[int, int, int, memoryview]]:
        """(target, record count, 1 if dead letters, record batch) of all rows. The first row of each target leaves by
        itself: who writes it opens the partition with it, and writes all others as they are."""
        for table in self._collected(batches):
            with stage(ENCODE):
                encoded = list(self._encode(table))
            yield from encoded

    def _collected(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Larger tables out of Spark's Arrow batches, which hold 10,000 rows at most."""
        held: list[Any] = []
        size = 0
        for part in in_parts(pulled(batches, FROM_SPARK)):
            held.append(with_bytes(part))
            size += part.nbytes
            if size >= COLLECT_BYTES:
                yield self._pa.Table.from_batches(held)
                held, size = [], 0
            del part
        if held:
            yield self._pa.Table.from_batches(held)

    def _encode(self, table: Any) -> Iterator[tuple[int, int, int, memoryview]]:
        from semel.protocol.columns_encode import ColumnEncoder

        if not table.num_rows:
            return
        table = with_readable_texts(table)
        targets, dead = self._targets(table)
        if dead is not None:
            table = self._with_reasons(table, dead)
        encoder = ColumnEncoder(
            _column(table, "value"),
            _column(table, "key"),
            _column(table, "headers"),
            self._timestamps(table),
        )
        order = self._np.argsort(targets, kind="stable")
        counts = self._np.bincount(targets, minlength=self._routing.targets.count)
        used = self._np.flatnonzero(counts).tolist()
        parts = [(target, rows) for target in used for rows in self._first_alone(target, int(counts[target]))]
        groups = encoder.encode_groups(
            order,
            [rows for _, rows in parts],
            [0] * len(parts),
            transactional=False,
            compression=self._routing.compression,
            max_batch_bytes=self._routing.batch_bytes,
        )
        dead = self._dead_topic() or TargetTopic("", 0, 0)
        for (target, _), group in zip(parts, groups, strict=True):
            is_dead = int(dead.first <= target < dead.first + dead.partitions)
            for batch in group:
                yield target, batch.record_count, is_dead, batch.buffer

    def _timestamps(self, table: Any) -> Any:
        """The time of each record; of one that has none, that of writing."""
        if "timestamp" not in table.column_names:
            return self._routing.timestamp_ms
        return filled_times(table.column("timestamp"), self._routing.timestamp_ms)

    def _times(self, table: Any) -> Any:
        """The same in milliseconds, of a table with a column of them."""
        from semel.protocol.columns_encode import milliseconds

        return milliseconds(self._timestamps(table))

    def _first_alone(self, target: int, rows: int) -> list[int]:
        """So many rows of a target, in parts."""
        is_whole = target in self._opened or rows == 1
        self._opened.add(target)
        return [rows] if is_whole else [1, rows - 1]

    # --- which way ---
    def _targets(self, table: Any) -> tuple[Any, Any]:
        """(target of each row, reason why it is a dead letter or None where it is not) as arrays."""
        np, routing = self._np, self._routing
        topics, reasons = self._topics(table)
        firsts = np.array([t.first for t in routing.targets.topics] or [0], np.int64)
        sizes = np.array([t.partitions for t in routing.targets.topics] or [1], np.int64)
        known = np.maximum(topics, 0)
        partitions = self._partitions(table, sizes[known])
        outside = (partitions < 0) | (partitions >= sizes[known])
        reasons = self._mark(reasons, outside & (topics >= 0), "partition out of range")
        bytes_of_rows = self._sizes(table)
        too_large = bytes_of_rows > routing.max_record_bytes
        reasons = self._mark(reasons, too_large, "record larger than max.request.size")
        reasons = self._beyond_limits(table, known, bytes_of_rows, reasons)
        if "headers" in table.column_names:
            nameless = self._nameless_headers(table.column("headers").combine_chunks())
            reasons = self._mark(reasons, nameless, "a header has no name")
        if "bad" in table.column_names:
            reasons = self._marked_bad(reasons, table.column("bad"))
        targets = firsts[known] + np.where(outside, 0, partitions)
        if reasons is None:
            return targets, None
        return self._to_dead_letters(table, targets, reasons), reasons

    def _topics(self, table: Any) -> tuple[Any, Any]:
        """Each row's topic as an index, and reasons for rows whose topic is not known."""
        np, routing = self._np, self._routing
        default = routing.targets.index(routing.topic)
        if "topic" not in table.column_names:
            return np.full(table.num_rows, default, np.int64), None
        column = table.column("topic").combine_chunks().dictionary_encode()
        names = column.dictionary.to_pylist()
        found = np.array(
            [routing.targets.index(n) if n in routing.allowed else -1 for n in names] + [default], np.int64
        )
        indices = self._numbers.filled(column.indices, len(names))
        topics = found[indices]
        return topics, self._mark(None, topics < 0, "unknown topic")

    def _partitions(self, table: Any, sizes: Any) -> Any:
        """The partition inside the topic: given, by key, or shared out."""
        np = self._np
        chosen = self._spread(table.num_rows, sizes)
        if self._partition is not None:
            chosen = self._partition % sizes
        elif "hash" in table.column_names:
            hashes = table.column("hash").combine_chunks()
            chosen = np.where(self._numbers.valid(hashes), self._numbers.filled(hashes, 0) % sizes, chosen)
        elif "key" in table.column_names and self._routing.partitioner == MURMUR2:
            chosen = self._by_key(table.column("key"), sizes, chosen)
        if "partition" in table.column_names:
            given = table.column("partition").combine_chunks()
            chosen = np.where(self._numbers.valid(given), self._numbers.to_numpy(given), chosen)
        return chosen.astype(np.int64)

    def _by_key(self, keys: Any, sizes: Any, otherwise: Any) -> Any:
        from semel.protocol.partitioning import murmur2_column

        hashes = murmur2_column(keys).astype(self._np.int64) & 0x7FFFFFFF
        return self._np.where(self._numbers.valid(keys), hashes % sizes, otherwise)

    def _spread(self, rows: int, sizes: Any) -> Any:
        """Rows without a key. By the task and the round, never by chance: a task that runs again does the same again.

        With the partitioner `none` the round does not count: a task keeps to the one partition that it owns.
        """
        self._rounds += self._routing.partitioner != SPREAD
        return self._np.full(rows, self._task + self._routing.batch_id + self._rounds, self._np.int64) % sizes

    # --- rows that cannot be written ---
    def _beyond_limits(self, table: Any, topics: Any, sizes: Any, reasons: Any) -> Any:
        """The reasons, with those for rows that their topic does not take."""
        np, limits = self._np, self._routing.targets.limits
        if any(limit.needs_key for limit in limits):
            has_key = self._numbers.valid(table.column("key")) if "key" in table.column_names else False
            keyless = np.array([limit.needs_key for limit in limits])[topics] & ~np.array(has_key)
            reasons = self._mark(reasons, keyless, "a compacted topic takes no record without a key")
        most_bytes = np.array([self._most_bytes(limit) for limit in limits])[topics]
        if (sizes + RECORD_OVERHEAD_BYTES > most_bytes).any():
            too_large = self._batch_sizes(table) > most_bytes
            reasons = self._mark(reasons, too_large, "record larger than max.message.bytes of the topic")
        if "timestamp" in table.column_names:
            times = self._times(table)
            outside, texts = self._outside(times, limits, topics), np.full(len(times), None, object)
            texts[outside] = [f"timestamp {at} (ms) is further from now than the topic allows" for at in times[outside]]
            reasons = self._mark(reasons, outside, texts)
        return reasons

    def _most_bytes(self, limit: TopicLimits) -> int:
        """Of a batch. What it takes compressed is not known yet."""
        return NO_LIMIT if self._routing.compression else limit.max_batch_bytes

    def _outside(self, times: Any, limits: list[TopicLimits], topics: Any) -> Any:
        """Rows whose time is further from now than their topic allows."""
        np, now_ms = self._np, self._routing.timestamp_ms
        before = np.array([limit.before_ms for limit in limits])[topics]
        after = np.array([limit.after_ms for limit in limits])[topics]
        return (times < now_ms - before) | (times > now_ms + after)

    def _sizes(self, table: Any) -> Any:
        """Bytes of the key, the value and the headers of each row."""
        import pyarrow.compute as pc

        sizes = self._np.zeros(table.num_rows, self._np.int64)
        for name in ("key", "value"):
            if name in table.column_names:
                sizes += self._numbers.filled(pc.binary_length(table.column(name)), 0)
        if "headers" in table.column_names:
            sizes += self._header_bytes(table.column("headers").combine_chunks())
        return sizes

    def _batch_sizes(self, table: Any) -> Any:
        """Bytes of a batch that has nothing but the row, and opens a partition."""
        records = self._np.full(table.num_rows, RECORD_BYTES, self._np.int64)
        for name in ("key", "value"):
            records += self._with_length(table.column(name)) if name in table.column_names else 1
        if "headers" in table.column_names:
            records += self._header_fields(table.column("headers").combine_chunks())
        return HEADER_SIZE + self._length_sizes(records) + records

    def _with_length(self, column: Any) -> Any:
        """Bytes of each value as it is in a record, behind its length."""
        import pyarrow.compute as pc

        lengths = self._numbers.filled(pc.binary_length(column), -1)
        return self._length_sizes(lengths) + self._np.maximum(lengths, 0)

    def _header_fields(self, headers: Any) -> Any:
        """Bytes of the headers of each row, without their number where that takes one byte."""
        flat = headers.flatten()
        counts = self._numbers.filled(headers.value_lengths(), 0)
        each = sum(self._with_length(flat.field(number)) for number in range(2))
        return self._by_row(headers, each) + self._length_sizes(counts) - 1

    def _header_bytes(self, headers: Any) -> Any:
        import pyarrow.compute as pc

        flat = headers.flatten()
        each = sum(self._numbers.filled(pc.binary_length(flat.field(i)), 0) for i in range(2))
        return self._by_row(headers, each + HEADER_OVERHEAD_BYTES)

    def _nameless_headers(self, headers: Any) -> Any:
        """Rows with a header that is null, or whose name is."""
        np, flat = self._np, headers.flatten()
        names = flat.field(0)
        if not flat.null_count and not names.null_count:
            return np.zeros(len(headers), bool)
        is_nameless = ~(self._numbers.valid(flat) & self._numbers.valid(names))
        return self._by_row(headers, is_nameless.astype(np.int64)) > 0

    def _by_row(self, headers: Any, each: Any) -> Any:
        """The sum over the headers of each row, of a number for each header."""
        np = self._np
        before = np.concatenate([[0], np.cumsum(each)])
        counts = self._numbers.filled(headers.value_lengths(), 0)
        ends = np.cumsum(counts)
        return before[ends] - before[ends - counts]

    def _mark(self, reasons: Any, rows: Any, reason: Any) -> Any:
        """The reasons, with another one for rows that have none yet: one text, or an array with a text for each row."""
        if not rows.any():
            return reasons
        if reasons is None:
            reasons = self._np.full(len(rows), None, object)
        new = rows & (reasons == None)  # noqa: E711 (an array)
        reasons[new] = reason if isinstance(reason, str) else reason[new]
        return reasons

    def _marked_bad(self, reasons: Any, column: Any) -> Any:
        """A column that says so: true, or a text that says why. One step for all rows, however many texts there are."""
        values = column.to_numpy(zero_copy_only=False)
        reason = "marked as bad" if self._pa.types.is_boolean(column.type) else values
        return self._mark(reasons, values.astype(bool), reason)

    def _to_dead_letters(self, table: Any, targets: Any, reasons: Any) -> Any:
        bad = reasons != None  # noqa: E711 (an array)
        topic = self._dead_topic()
        if topic is None:
            row = int(self._np.flatnonzero(bad)[0])
            shown = {name: table.column(name)[row].as_py() for name in table.column_names if name != "headers"}
            raise BadRowError(
                f"{int(bad.sum())} rows cannot be written; the first: {reasons[row]}: {str(shown)[:300]}. Correct "
                "them in the query, or give the sink a dead_letter_topic"
            )
        partition = (self._task + self._routing.batch_id) % topic.partitions
        return self._np.where(bad, topic.first + partition, targets)

    def _dead_topic(self) -> TargetTopic | None:
        dead = self._routing.targets.index(self._routing.dead_letter)
        return None if dead < 0 else self._routing.targets.topics[dead]

    def _with_reasons(self, table: Any, reasons: Any) -> Any:
        """Dead letters say in their headers why they are dead and where they were going. Slow, and rare."""
        pa = self._pa
        topics = table.column("topic").to_pylist() if "topic" in table.column_names else [None] * table.num_rows
        headers = named_headers(table)
        sizes, cut = self._sizes(table).tolist(), self._np.zeros(table.num_rows, bool)
        bad = reasons != None  # noqa: E711 (an array)
        limit = self._routing.targets.limits[self._routing.targets.index(self._routing.dead_letter)]
        most_bytes = max(0, min(self._routing.max_record_bytes, limit.max_batch_bytes - RECORD_OVERHEAD_BYTES))
        for row in self._np.flatnonzero(bad).tolist():
            why = reason_headers(str(reasons[row]), topics[row] or self._routing.topic)
            cut[row] = sizes[row] + sum(len(value) for _, value in why) > most_bytes
            if cut[row]:
                (name, reason), topic = why
                why = [(name, reason[: most_bytes // 4]), topic, (SIZE_HEADER, b"%d" % sizes[row])]
            kept = [] if cut[row] else headers[row] or []
            headers[row] = [*kept, *({"key": name, "value": value} for name, value in why)]
        kind = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
        if "headers" in table.column_names:
            table = table.drop_columns(["headers"])
        table = table.append_column("headers", pa.array(headers, kind))
        if "timestamp" in table.column_names:
            table = self._at_possible_times(table, bad, limit)
        return self._beginnings(table, cut, most_bytes) if cut.any() else table

    def _at_possible_times(self, table: Any, bad: Any, limit: TopicLimits) -> Any:
        """Dead letters whose time their topic would not take either have that of writing."""
        import pyarrow.compute as pc

        times = self._times(table)
        outside = bad & self._outside(times, [limit], self._np.zeros(len(times), int))
        if not outside.any():
            return table
        column = table.column("timestamp")
        kept = pc.if_else(self._numbers.to_arrow(outside), self._pa.scalar(None, column.type), column)
        return table.set_column(table.column_names.index("timestamp"), "timestamp", kept)

    def _beginnings(self, table: Any, cut: Any, most_bytes: int) -> Any:
        """Rows that are too large for a dead letter, too, keep what surely fits: the beginning of key and value, and of
        the reason."""
        import pyarrow.compute as pc

        for name, most in {"key": most_bytes // 4, "value": most_bytes // 2}.items():
            if name in table.column_names:
                whole = table.column(name).cast(self._pa.binary())  # a text may be cut in the middle of a character
                chosen = pc.if_else(self._pa.array(cut), pc.binary_slice(whole, 0, most), whole)
                table = table.set_column(table.column_names.index(name), name, chosen)
        return table


def filled_times(column: Any, now_ms: int) -> Any:
    """A column of times with another one where it has none."""
    import pyarrow as pa

    from semel.protocol.arrow_numbers import scalar

    return column.fill_null(scalar(now_ms, pa.timestamp("ms")).cast(column.type)) if column.null_count else column


def with_bytes(batch: Any) -> Any:
    """A batch whose keys and values are bytes; texts become such without a copy."""
    import pyarrow as pa

    bytes_of = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    for number, name in enumerate(batch.schema.names):
        kind = bytes_of.get(batch.schema.field(number).type)
        if name in ("key", "value") and kind is not None:
            batch = batch.set_column(number, name, batch.column(number).cast(kind))
    return batch


def with_readable_texts(table: Any) -> Any:
    """A table whose topics and reasons are UTF-8. Spark makes strings of any bytes: `cast(value AS string)`, say."""
    import pyarrow as pa

    for number, name in enumerate(table.column_names):
        column = table.column(number)
        if name in ("topic", "bad") and not pa.types.is_boolean(column.type):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                texts = [_text(value) for value in column.cast(pa.binary()).to_pylist()]
                table = table.set_column(number, name, pa.array(texts, pa.string()))
    return table


def named_headers(table: Any) -> list[Any]:
    """The headers of each row that have a name, in texts that are UTF-8."""
    import pyarrow as pa

    if "headers" not in table.column_names:
        return [None] * table.num_rows
    raw = pa.list_(pa.struct([pa.field("key", pa.binary()), pa.field("value", pa.binary())]))
    return [
        [
            {"key": _text(header["key"]), "value": header["value"]}
            for header in row or ()
            if header is not None and header["key"] is not None
        ]
        for row in table.column("headers").cast(raw).to_pylist()
    ]


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def in_parts(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches that are larger than what is encoded at once (Spark's have up to 64 MB) in slices of at least that size:
    none of them waits for more, and keeps the whole batch in memory."""
    for batch in batches:
        slices = max(1, batch.nbytes // COLLECT_BYTES)
        ends = [batch.num_rows * number // slices for number in range(slices + 1)]
        for start, end in pairwise(ends):
            yield batch.slice(start, end - start)
        del batch  # or it is held while Spark gives the next


def _column(table: Any, name: str) -> Any:
    return table.column(name) if name in table.column_names else None
