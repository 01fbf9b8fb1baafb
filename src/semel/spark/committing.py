"""The last steps of a transaction, the same for a micro-batch and a batch job: audit the counts, write the entry."""

from __future__ import annotations

from typing import Any

from semel.client.cluster import Cluster
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.spark.ledger import Entry, Written, topic_of
from semel.spark.targets import Targets
from semel.spark.write_job import Report


class UnevenError(RuntimeError):
    """The log does not hold what the tasks reported: the transaction must be aborted."""


def audit(owner: TransactionOwner, targets: Targets, reports: list[Report]) -> None:
    """The log must hold exactly what the winners reported: catches rows of a dead attempt in a partition that the
    winner had no rows for, which no handshake can see."""
    reported = {targets.place(r.target): r.sequence for r in reports}
    found = owner.last_sequences(targets.places())
    if found != reported:
        wrong = {place for place in {*found, *reported} if found.get(place) != reported.get(place)}
        numbers = {place: (reported.get(place), found.get(place)) for place in sorted(wrong)[:5]}
        raise UnevenError(
            f"tasks reported other counts than the log holds; last sequences (reported, found): {numbers}"
        )


def written_places(targets: Targets, reports: list[Report]) -> list[Written]:
    written = [Written(*targets.place(r.target), r.rows, r.first, r.last) for r in reports]
    return sorted(written, key=lambda w: (w.topic, w.partition))


def write_entry(
    handle: TransactionHandle,
    application_id: str,
    entry: Entry,
    key: bytes | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Puts the entry into the transaction; over the connections of a cluster, if there is one."""
    import pyarrow as pa

    columns: dict[str, Any] = {"key": [key or entry.key], "value": [entry.encode()]}
    row = pa.table({name: pa.array(values, pa.binary()) for name, values in columns.items()})
    with handle.writer(cluster) as writer:
        writer.write(topic_of(application_id), 0, row)
        writer.finish()
