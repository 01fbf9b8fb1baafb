"""Many records at once are made, and sent, as one by one: the same rows, dead letters and state."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from semel.client.consumer.decode import ROWS, Records, joined
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.process_output import AT_ONCE, Emitter, Output, RecordError
from semel.patterns.process_state import StatefulEmitter
from semel.patterns.state import KeyedState, State, StateStore, StoreIdentity
from semel.protocol.columns_decode import decode_record_set
from semel.protocol.rows import Record, encode_batch

COUNT = 3 * AT_ONCE + 10
LIMIT_BYTES = 2_000
Rows = list[tuple[Any, ...]]


def read(seed: int = 1, *, headers: bool = False, no_time: bool = False) -> Records:
    """Records of two topics, as a loop reads them."""
    chooser = random.Random(seed)
    parts = []
    for place in (TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)):
        records = [
            Record(
                number,
                -1 if no_time and number % 100 == 0 else 1_000 + number,
                chooser.choice([None, b"", b"k%d" % chooser.randrange(9)]),
                chooser.choice([None, b"", b"v" * chooser.randrange(30)]),
                (("h", b"%d" % number), ("n", None)) if headers and number % 2 else (),
            )
            for number in range(COUNT)
        ]
        parts.append((place, decode_record_set(encode_batch(records), headers=True).table))
    return Records(joined(parts, ROWS))


class Sink:
    """The rows of each topic that a producer would write, in their order, and how often it was called."""

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = defaultdict(list)
        self.calls = 0

    def send(self, topic: str, value: Any, key: Any, partition: Any, timestamp: Any, headers: Any) -> None:
        self.calls += 1
        value, key = (each.encode() if isinstance(each, str) else each for each in (value, key))
        self.rows[topic].append((value, key, partition, timestamp, tuple(headers or ())))

    def send_table(self, topic: str, table: pa.Table) -> None:
        self.calls += 1
        for row in table.to_pylist():
            headers = tuple((each["key"], each["value"]) for each in row.get("headers") or ())
            self.rows[topic].append((row["value"], row["key"], row.get("partition"), row.get("timestamp"), headers))


def written(emitter: Emitter, batch: Any) -> tuple[Sink, tuple[int, int]]:
    sink = Sink()
    sent = emitter.send(sink, emitter.outputs(batch))  # type: ignore[arg-type]
    assert sent.records + sent.dead_letters == sum(map(len, sink.rows.values()))
    return sink, (sent.records, sent.dead_letters)


def mixed(record: ConsumerRecord) -> Any:
    """Something else for every few hundred records, with exceptions among them."""
    kind = (record.offset // 150) % 4
    if record.offset % 97 == 0:
        raise ValueError("no")
    if record.offset % 89 == 0:
        return Output("text", "key", headers=[("h", b"1")])
    return (b"%d" % record.offset, record, Output(record.value, b"k", "elsewhere"), [b"one", None, b"two"])[kind]


FUNCTIONS: dict[str, Callable[[ConsumerRecord], Any]] = {
    "itself": lambda record: record,
    "filtered": lambda record: record if record.offset % 3 else None,
    "nothing": lambda record: None,
    "empty": lambda record: [],
    "value": lambda record: b"%d" % record.offset,
    "some values": lambda record: b"%d" % record.offset if record.offset % 3 else None,
    "changed": lambda record: record._replace(value=b"new"),
    "output": lambda record: Output(b"new", b"k", None, None, record.timestamp),
    "two topics": lambda record: Output(b"new", b"k", ["x", "y"][record.offset % 2]),
    "tombstone": lambda record: Output(None, record.key),
    "text": lambda record: "text" if record.offset % 2 else b"bytes",
    "several": lambda record: (part for part in (b"a", None, record)),
    "too large": lambda record: b"v" * (3_000 if record.offset % 50 == 0 else 10),
    "large": lambda record: b"v" * 9_000,
    "mixed": mixed,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("limit_bytes", [None, LIMIT_BYTES])
def test_many_at_once_are_written_as_one_by_one(name: str, limit_bytes: int | None) -> None:
    emitter = Emitter(FUNCTIONS[name], "out", False, dead_letter_topic="dead", max_record_bytes=limit_bytes)
    for batch in (read(), read(headers=True), read(no_time=True)):
        sink, counts = written(emitter, batch)
        plain, plain_counts = written(emitter, [*batch])
        assert sink.rows == plain.rows
        assert counts == plain_counts
    if name in ("itself", "filtered", "value", "some values", "output", "tombstone"):
        assert written(emitter, read())[0].calls <= 2


def test_function_is_called_once_for_each_record_in_their_order_and_the_error_names_it() -> None:
    called = []

    def fail(record: ConsumerRecord) -> bytes:
        called.append(record)
        if len(called) == COUNT + 300:
            raise ValueError("no")
        return b"x"

    batch = read()
    with pytest.raises(RecordError, match=r"a-1 at offset 299: .*no"):
        Emitter(fail, "out", False).outputs(batch)
    assert called == [*batch][: COUNT + 300]


@pytest.mark.parametrize("limit_bytes", [None, LIMIT_BYTES])
def test_state_of_a_record_that_fails_is_as_it_was(tmp_path: Path, limit_bytes: int | None) -> None:
    def count(record: ConsumerRecord, state: State) -> Any:
        key = record.key or b"none"
        total = state.get(key, 0) + 1
        state.put(key, total)
        if record.offset % 7 == 0:
            raise ValueError("no")
        return b"v" * 3_000 if record.offset % 11 == 0 else b"%d" % total

    found = []
    for number, batch in enumerate((read(), [*read()])):
        emitter = StatefulEmitter(count, "out", False, dead_letter_topic="dead", max_record_bytes=limit_bytes)
        emitter.state = State(KeyedState(format="int64").codec(), 1_000)
        for partition in (0, 1):
            identity = StoreIdentity("app", "s", 1, partition, "topic")
            emitter.state.attach(partition, StateStore(tmp_path / f"{number}-{partition}.sqlite", identity))
        sink, counts = written(emitter, batch)
        found.append((sink.rows, counts, [dict(emitter.state.pending(partition)) for partition in (0, 1)]))
    assert found[0] == found[1]
    assert found[0][2][0]


@pytest.mark.parametrize("name", ["itself", "value", "output"])
def test_garbage_collector_has_nothing_to_do(name: str) -> None:
    """It took a third of the loop's processor time: rows that live until their unit of work ends are looked at again
    and again."""
    emitter, batch = Emitter(FUNCTIONS[name], "out", False), read()
    written(emitter, batch)  # what is imported is imported
    runs: list[str] = []

    def note(phase: str, about: dict[str, int]) -> None:
        runs.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    try:
        emitter.outputs(batch)
    finally:
        gc.callbacks.remove(note)
    assert len(runs) <= 2
