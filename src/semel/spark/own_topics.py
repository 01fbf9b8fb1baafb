"""Topics that an application writes about itself: its ledger and its dead letters. A query that reads them as input
makes new ones with every batch, without end.

A pattern leaves out every ledger, as it leaves out Kafka's internal topics, and the dead letters of the application
that the source is told (`applicationId`). A ledger is known by what is in it: a topic of the user's that happens to end
in ".ledger" is read. The sink refuses a batch that reads its own topics all the same (`ledger.refuse_loop`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from semel.client.cluster import Cluster
from semel.client.metadata import TopicMetadata
from semel.spark.ledger import SUFFIX, LedgerError, decode, topic_of
from semel.spark.ledger_topic import EARLIEST, LATEST, last_entry
from semel.spark.planning import Range
from semel.spark.positions import list_offsets
from semel.spark.reading import RangeReader

LOOK_BYTES = 64 << 10


class OwnTopics:
    """What a pattern leaves out; one object for each reader of the source."""

    def __init__(self, cluster: Cluster, application_id: str | None) -> None:
        self._cluster = cluster
        self._application_id = application_id
        self._looked_at: dict[tuple[str, bytes], bool] = {}  # name and id of a topic -> whether it is a ledger

    def __call__(self, matching: Iterable[TopicMetadata]) -> set[str]:
        """Those of the topics that are not read."""
        found = {topic.name for topic in matching if topic.name.endswith(SUFFIX) and self._is_ledger(topic)}
        if self._application_id is None:
            return found
        ledger = topic_of(self._application_id)
        if ledger not in self._cluster.metadata.topics:
            return found
        last = last_entry(self._cluster, self._application_id, accept_empty=True)
        dead_letters = last.dead_letter_topic if last else None
        return found | {ledger} | ({dead_letters} if dead_letters else set())

    def _is_ledger(self, topic: TopicMetadata) -> bool:
        """One without a record counts as one until it has some: there is nothing to be read in it."""
        if len(topic.partitions) != 1:
            return False
        place, key = (topic.name, 0), (topic.name, bytes(topic.topic_id))
        if key not in self._looked_at:
            start, end = (list_offsets(self._cluster, {place: at}, True)[topic.name][0] for at in (EARLIEST, LATEST))
            reader = RangeReader(
                self._cluster,
                Range(topic.name, 0, start, end),
                read_committed=True,
                fail_on_data_loss=False,
                fetch_bytes=LOOK_BYTES,
            )
            first = next(reader.tables(headers=False), None)
            if first is None:
                return True
            self._looked_at[key] = is_entry(first.column("value")[0].as_py())
        return self._looked_at[key]


def is_entry(value: bytes | None) -> bool:
    """Whether a record is one of a ledger, of this version of semel or another."""
    try:
        decode(value or b"")
    except LedgerError:
        return True
    except (msgspec.MsgspecError, ValueError, RecursionError):  # anything may be in a topic of the user's
        return False
    return True
