"""Small tables share batches while they linger, and each still knows where its rows went."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from semel.client.errors import ConfigError
from semel.client.producer.accumulator import Accumulator
from semel.client.producer.batches import Identity, ProducerBatch, split
from semel.client.producer.deliveries import DeliveryCondition, TableDelivery, TableShare
from semel.client.producer.tables import TableEncoder, checked_table
from semel.client.settings import ProducerSettings
from semel.protocol.rows import decode_batch


def encoder_of(table: pa.Table, partitions: int = 1, batch_size: int = 10_000) -> TableEncoder:
    settings = ProducerSettings.of(bootstrap_servers="nowhere:1")
    return TableEncoder(checked_table(table), partitions, lambda _: 0, settings, batch_size)


class Sending:
    """An accumulator that tables are given to as the producer does it."""

    def __init__(self, **options: Any) -> None:
        settings = ProducerSettings.of(bootstrap_servers="nowhere:1", batch_size=10_000, **options)
        self.accumulator = Accumulator(settings)

    def send(self, table: pa.Table, partitions: int = 1) -> TableDelivery:
        shares = []
        for partition, part, rows in encoder_of(table, partitions).parts():
            batch = self.accumulator.append_table("t", partition, part)
            if batch is None:
                batch = self.accumulator.append_new_table("t", partition, part, 0.0)
            shares.append(TableShare(batch, batch.count - part.row_count, part.row_count, rows))
        return TableDelivery(shares, table.num_rows, DeliveryCondition())

    def batches(self, partition: int = 0) -> list[ProducerBatch]:
        batches = list(self.accumulator.queues["t", partition].batches())
        for batch in batches:
            batch.encode(0)
        return batches


def values_of(batch: ProducerBatch) -> list[bytes | None]:
    assert batch.data is not None
    return [record.value for record in decode_batch(batch.data).records]


def values(*texts: str | None) -> pa.Table:
    return pa.table({"value": pa.array(texts, pa.string())})


def test_tables_that_follow_each_other_share_a_batch_in_their_order() -> None:
    sending = Sending()
    for number in range(50):
        sending.send(values(f"{number}a", None, f"{number}b"))
    (batch,) = sending.batches()
    assert values_of(batch) == [v for n in range(50) for v in (b"%da" % n, None, b"%db" % n)]


def test_a_full_batch_is_closed_and_the_next_table_begins_another() -> None:
    sending = Sending()
    for number in range(5):
        sending.send(values(str(number) * 4000))
    assert [len(values_of(batch)) for batch in sending.batches()] == [2, 2, 1]


def test_rows_and_tables_of_other_kinds_keep_their_order_in_batches_of_their_own() -> None:
    sending = Sending()
    sending.send(values("first"))
    sending.send(pa.table({"value": pa.array([b"second"], pa.binary())}))
    row = (None, b"third", 0, ())
    assert sending.accumulator.append("t", 0, row, 40) is None, "no row goes into a batch of tables"
    sending.accumulator.append_new("t", 0, row, 40, 0.0)
    sending.send(values("fourth"))
    found = [values_of(batch) for batch in sending.batches()]
    assert found == [[b"first"], [b"second"], [b"third"], [b"fourth"]]


def test_keys_are_routed_and_timestamps_kept() -> None:
    sending = Sending()
    keys = [b"%d" % number for number in range(40)]
    table = pa.table({"key": keys, "value": keys, "timestamp": pa.array(range(40), pa.int64())})
    sending.send(table, partitions=4)
    sending.send(table, partitions=4)
    found: list[tuple[bytes | None, int]] = []
    for partition in range(4):
        (batch,) = sending.batches(partition)
        assert batch.data is not None
        found += [(record.key, record.timestamp) for record in decode_batch(batch.data).records]
    assert sorted(found) == sorted([(key, number) for number, key in enumerate(keys)] * 2)


def test_each_table_learns_the_offsets_of_its_own_rows() -> None:
    sending = Sending()
    first, second = sending.send(values("a", "b")), sending.send(values("c", "d", "e"))
    (batch,) = sending.batches()
    batch.finish(100, -1)
    assert [offset.tolist() for offset in (first.places()[1], second.places()[1])] == [[100, 101], [102, 103, 104]]
    assert [(run.base_offset, run.record_count) for run in second.result()] == [(102, 3)]


def test_offsets_are_right_when_a_shared_batch_was_split() -> None:
    sending = Sending()
    first, second = sending.send(values("a", "b", "c")), sending.send(values("d", "e"))
    (batch,) = sending.batches()
    batch.stamp(Identity(1, 0), 0, False)
    halves = split(batch)  # two and three records
    halves[0].finish(10, -1)
    halves[1].finish(50, -1)
    assert first.places()[1].tolist() == [10, 11, 50]
    assert second.places()[1].tolist() == [51, 52]
    assert [(run.base_offset, run.record_count) for run in first.result()] == [(10, 2), (50, 1)]


def test_tables_with_headers_or_as_large_as_a_batch_do_not_wait() -> None:
    assert encoder_of(values("small")).is_small
    assert not encoder_of(values("x" * 10_000)).is_small
    headers = pa.array([[("name", b"value")]], pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))
    assert not encoder_of(values("small").append_column("headers", headers)).is_small


MOMENT = datetime(2020, 1, 1, tzinfo=UTC)
MOMENT_MS = int(MOMENT.timestamp()) * 1000


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Tokyo"])
def test_times_of_every_unit_are_milliseconds_and_a_row_without_one_has_now(unit: str, zone: str | None) -> None:
    moment = pa.array([MOMENT, None], pa.timestamp("us", "UTC")).cast(
        pa.timestamp(unit, zone) if zone else pa.timestamp(unit)
    )
    encoder = encoder_of(pa.table({"value": ["a", "b"], "timestamp": moment}))
    ((_, part, _),) = encoder.parts()
    assert part.timestamp.to_pylist() == [MOMENT_MS, encoder.now_ms]
    (batch,) = encoder.batches()
    assert [record.timestamp for record in decode_batch(batch.data).records] == [MOMENT_MS, encoder.now_ms]


@pytest.mark.parametrize("column", [[1.5], ["2020-01-01"], [date(2020, 1, 1)], [[1]]], ids=str)
def test_a_column_that_holds_no_times_is_refused_to_the_caller(column: list[Any]) -> None:
    with pytest.raises(ConfigError, match="column 'timestamp' has type"):
        checked_table(pa.table({"value": ["a"], "timestamp": column}))


def test_a_column_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="each column once, not value, value"):
        checked_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["value", "value"]))


@pytest.mark.parametrize("column", [pa.array([2**63], pa.uint64()), pa.array([2**62], pa.timestamp("s"))], ids=str)
def test_a_time_that_is_too_large_is_refused_to_the_caller(column: pa.Array) -> None:
    with pytest.raises(ConfigError, match="column 'timestamp' has a time that is no 64-bit number"):
        list(encoder_of(pa.table({"value": ["a"], "timestamp": column})).parts())
