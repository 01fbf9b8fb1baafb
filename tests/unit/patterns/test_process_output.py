"""What a processing function may return."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord
from semel.patterns.process_columns import TABLE_FROM_ROWS, columns_of, sendable
from semel.patterns.process_output import (
    Emitter,
    Made,
    Output,
    RecordError,
    rows_of,
)

RECORD = ConsumerRecord("in", 1, 5, 1000, b"key", b"value", (("h", b"1"),))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, []),
        (b"new", [Output(b"new", b"key")]),
        ("text", [Output("text", b"key")]),
        (Output(b"v", b"k", "elsewhere"), [Output(b"v", b"k", "elsewhere")]),
        (RECORD, [Output(b"value", b"key", None, None, 1000, (("h", b"1"),))]),
        ([b"a", None, [Output(None, b"t")]], [Output(b"a", b"key"), Output(None, b"t")]),
        ((part for part in (b"a", b"b")), [Output(b"a", b"key"), Output(b"b", b"key")]),
        ([], []),
    ],
)
def test_everything_sensible_becomes_outputs(returned: Any, expected: list[Output]) -> None:
    assert rows_of(returned, RECORD) == expected


@pytest.mark.parametrize("returned", [5, {"value": b"x"}, 1.5, object(), bytearray(b"x")])
def test_nonsense_is_refused_by_type(returned: Any) -> None:
    with pytest.raises(ConfigError, match=type(returned).__name__):
        rows_of(returned, RECORD)


def test_place_of_the_input_does_not_become_the_place_of_the_output() -> None:
    table = pa.table({"topic": ["in"], "partition": [3], "offset": [7], "key": [b"k"], "value": [b"v"]})
    assert sendable(table).column_names == ["key", "value"]
    chosen = sendable(table.append_column("to_partition", pa.array([2])))
    assert chosen.column("partition").to_pylist() == [2]


def test_headers_travel_where_there_are_any() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    without = pa.table({"value": [b"v"], "headers": pa.array([None], kind)})
    assert sendable(without).column_names == ["value"]
    with_some = pa.table({"value": [b"v"], "headers": pa.array([[{"key": "h", "value": b"1"}]], kind)})
    assert sendable(with_some).column_names == ["value", "headers"]


class Recorder:
    """Takes what a producer would."""

    def __init__(self) -> None:
        self.sent: list[tuple] = []

    def send(self, *arguments: Any) -> str:
        self.sent.append(arguments)
        return "delivery"

    def send_table(self, topic: str, table: pa.Table) -> str:
        self.sent.append((topic, table.num_rows))
        return "delivery"


MANY = TABLE_FROM_ROWS


def sent_of(outputs: list[Output]) -> list[tuple]:
    producer = Recorder()
    sent = Emitter(lambda record: None, "sink", tables=False).send(producer, Made(outputs, []))  # type: ignore[arg-type]
    assert sent.records == len(outputs)
    return producer.sent


def table_of(rows: list[Output]) -> pa.Table:
    columns = columns_of(rows)
    assert columns is not None
    return columns.table()


def test_many_plain_rows_are_sent_as_a_table() -> None:
    rows = [Output(b"v%d" % number, None if number % 2 else b"k", None, None, number) for number in range(MANY)]
    assert sent_of(rows) == [("sink", MANY)]
    table = table_of(rows)
    assert table.schema == pa.schema({"key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64()})
    assert [*table.select(["value", "key", "timestamp"]).to_pylist()] == [
        {"value": row.value, "key": row.key, "timestamp": row.timestamp} for row in rows
    ]
    tombstones = [Output(None, b"k", "elsewhere")] * MANY
    assert sent_of(tombstones) == [("elsewhere", MANY)]
    assert table_of(tombstones).column_names == ["key", "value"]
    assert table_of(tombstones).column("value").null_count == MANY


@pytest.mark.parametrize(
    "other",
    [
        Output("text", b"k"),
        Output(b"v", "text"),
        Output(b"v", b"k", "elsewhere"),
        Output(b"v", b"k", None, 0),
        Output(b"v", b"k", None, None, 1000),
        Output(b"v", b"k", None, None, -5),
        Output(b"v", b"k", None, None, datetime.now(UTC)),
        Output(b"v", b"k", None, None, None, (("h", b"1"),)),
        Output(b"v" * 100_000, b"k"),
    ],
)
def test_rows_of_which_one_is_special_are_sent_one_by_one(other: Output) -> None:
    rows = [Output(b"v", b"k")] * MANY
    assert len(sent_of([*rows, other])) == MANY + 1
    assert len(sent_of(rows[1:])) == MANY - 1


def test_function_runs_on_the_whole_batch_before_anything_is_sent() -> None:
    def fail_on_second(record: ConsumerRecord) -> bytes:
        if record.offset == 6:
            raise ValueError("no")
        return b"ok"

    emitter = Emitter(fail_on_second, "sink", tables=False)
    with pytest.raises(RecordError, match="no"):
        emitter.outputs([RECORD, RECORD._replace(offset=6)])


def test_rows_and_tables_go_to_the_sink_or_to_the_topic_they_name() -> None:
    recorder = Recorder()
    emitter = Emitter(lambda record: [b"a", Output(b"b", topic="other")], "sink", tables=False)
    assert emitter.send(recorder, emitter.outputs([RECORD])) == (2, 0, ["delivery"] * 2)  # type: ignore[arg-type]
    assert [arguments[0] for arguments in recorder.sent] == ["sink", "other"]
    table = pa.table({"value": [b"x", b"y"]})
    tables = Emitter(lambda given: {"one": given, "two": given.slice(0, 0)}, None, tables=True)
    recorder = Recorder()
    assert tables.send(recorder, tables.outputs(table)) == (2, 0, ["delivery"])  # type: ignore[arg-type]
    assert recorder.sent == [("one", 2)]
    assert Emitter(lambda _: None, None, tables=True).outputs(table) == ([], [])


def test_missing_sink_is_said() -> None:
    emitter = Emitter(lambda record: b"x", None, tables=False)
    with pytest.raises(ConfigError, match="no sink topic"):
        emitter.send(Recorder(), emitter.outputs([RECORD]))  # type: ignore[arg-type]


def test_a_record_without_a_timestamp_is_passed_on() -> None:
    """It has -1, which the producer refuses; it gets a new one."""
    record = RECORD._replace(timestamp=-1)
    assert rows_of(record, record) == [Output(record.value, record.key, None, None, None, record.headers)]
