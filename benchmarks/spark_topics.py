"""The topics of the Spark benchmark: keyed records of varying length, some with headers, some in aborted
transactions."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

PARTITIONS = 4
ROUND_BYTES = 8_000_000  # of one transaction
HEADER_EVERY = 8  # records
ABORTED_EVERY = 20  # transactions
TOPIC_CONFIG = {"file.delete.delay.ms": "1000", "segment.bytes": str(128 << 20)}


class Input(NamedTuple):
    """A topic to read."""

    topic: str
    size: str
    record_count: int  # committed
    value_bytes: int  # of all committed records
    lasts: dict[tuple[str, int], int]  # of each partition, the offset after its last record

    @property
    def offset_count(self) -> int:
        return sum(self.lasts.values())

    def compare(self, bootstrap: str, target: str, who: str) -> None:
        """The copy must hold what the source holds."""
        found = count_committed(bootstrap, target)
        if found != (self.record_count, self.value_bytes):
            raise RuntimeError(
                f"{who} wrote {found} (records, bytes of values), expected {(self.record_count, self.value_bytes)}"
            )


def filled(
    bootstrap: str,
    size: str,
    value_bytes: int,
    record_count: int,
    partitions: int = PARTITIONS,
    make: Callable[[int, int], Any] | None = None,
    later: Callable[[Any, int], Any] = lambda table, number: table,
) -> Input:
    """A topic with about so many committed records, whose values have `value_bytes` on average (`rows` makes them).
    Each transaction has the same ones, as `later` changes them for its number: event time goes on."""
    from semel.client.admin import LATEST, Admin
    from semel.client.producer import Producer

    name = fresh_topic(bootstrap, "bench-in", partitions)
    table = (make or rows)(value_bytes, min(record_count, ROUND_BYTES // value_bytes))
    committed = number = size_bytes = 0
    with Producer(bootstrap_servers=bootstrap, transactional_id=name) as producer:
        producer.init_transactions()
        while committed * table.num_rows < record_count:
            producer.begin_transaction()
            sent = later(table, number)
            producer.send_table(name, sent)
            number += 1
            if number % ABORTED_EVERY == 0:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
                committed += 1
                size_bytes += sum(lengths(sent))
    with Admin(bootstrap_servers=bootstrap) as admin:
        ends = admin.list_offsets({(name, p): LATEST for p in range(partitions)})
    lasts = {(name, p): end.offset - 1 for (_, p), end in ends.items()}  # the marker of the last commit is no record
    return Input(name, size, committed * table.num_rows, size_bytes, lasts)


def fresh_topic(bootstrap: str, prefix: str, partitions: int = PARTITIONS) -> str:
    from semel.client.admin import Admin

    name = f"{prefix}-{time.time_ns()}"
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(name, partitions, configs=TOPIC_CONFIG)
    return name


def removed(bootstrap: str, topic: str) -> None:
    """Deleted, so that the disk does not fill."""
    from semel.client.admin import Admin

    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.delete_topics([topic])


def rows(value_bytes: int, count: int) -> Any:
    """key, value and headers. Lengths vary between half of the average and one and a half."""
    import pyarrow as pa

    rng = random.Random(value_bytes)
    pool = rng.randbytes(value_bytes * 64)
    values = []
    for _ in range(count):
        length = rng.randint(value_bytes // 2, value_bytes * 3 // 2)
        start = rng.randrange(len(pool) - length)
        values.append(pool[start : start + length])
    keys = [b"key-%d" % rng.randrange(100_000) for _ in range(count)]
    kind = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
    headers = [
        [{"key": "trace", "value": b"%d" % number}] if number % HEADER_EVERY == 0 else None for number in range(count)
    ]
    return pa.table(
        {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary()), "headers": pa.array(headers, kind)}
    )


def orders(value_bytes: int, count: int) -> Any:
    """key and value: orders as JSON, within an hour of event time. One in a thousand cannot be read."""
    import pyarrow as pa

    rng = random.Random(value_bytes)
    began = datetime(2026, 1, 1, tzinfo=UTC)
    values = []
    for number in range(count):
        order = {
            "order_id": number,
            "user": f"user-{rng.randrange(10_000)}",
            "product": rng.randrange(1_000),
            "amount": round(rng.uniform(1, 100), 2),
            "currency": rng.choice(("EUR", "USD", "GBP")),
            "at": (began + timedelta(hours=number / count)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        missing = value_bytes - len(json.dumps(order))
        if missing > 20:
            order["note"] = "x" * rng.randint(missing // 2, missing * 3 // 2)
        values.append(b"not JSON" if number % 1_000 == 999 else json.dumps(order).encode())
    keys = [b"%d" % number for number in range(count)]
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def in_hour(table: Any, number: int) -> Any:
    """The same orders in another hour."""
    import pyarrow as pa
    import pyarrow.compute as pc

    hour = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=number)).strftime("%Y-%m-%dT%H")
    texts = table.column("value").cast(pa.string())
    moved = pc.replace_substring(texts, '"at": "2026-01-01T00', f'"at": "{hour}').cast(pa.binary())
    return table.set_column(table.column_names.index("value"), "value", moved)


def lengths(table: Any) -> list[int]:
    import pyarrow.compute as pc

    return pc.binary_length(table.column("value")).to_pylist()  # type: ignore[no-any-return]


def count_committed(bootstrap: str, topic: str) -> tuple[int, int]:
    """(records, bytes of their values) that a reader of committed data sees."""
    import pyarrow.compute as pc

    from semel.client.consumer import Consumer

    count = size = 0
    with Consumer(
        bootstrap_servers=bootstrap, isolation_level="read_committed", auto_offset_reset="earliest"
    ) as consumer:
        places = [(topic, p) for p in range(PARTITIONS)]
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        while any(consumer.position(place) < end for place, end in ends.items()):
            table = consumer.poll_table(timeout_ms=1000)
            if table is not None and table.num_rows:
                count += table.num_rows
                size += pc.sum(pc.binary_length(table.column("value"))).as_py() or 0
    return count, size
