"""The changelog of a store: a compacted topic, partitioned as the source is, that holds every committed change.

Next to the values there is one record for each partition of a source (`Covered`): up to which offset of it the state
was made. It is written in the transaction that commits this offset: where they differ, one of them was moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import TimedOutError
from semel.client.settings import ConsumerSettings
from semel.client.types import TopicPartition
from semel.patterns.state import RESERVED, Changes, KeyedState, StateError, StateStore, StoreIdentity

LATEST = -1
RETENTION = "delete.retention.ms"
CONFIG = {"cleanup.policy": "compact", RETENTION: str(7 * 24 * 3_600_000)}
STALLED_S = 30.0  # nothing more can be read for so long
POLL_MS = 100
POLL_RECORDS = 50_000
OF_A_GROUP = ("group_id", "group_instance_id", "group_protocol", "group_remote_assignor")


class Covered(msgspec.Struct, frozen=True):
    """Up to which offset of a partition of the source the state was made, and by whom."""

    application_id: str
    store: str
    version: int
    offset: int


_decode_covered = msgspec.json.Decoder(Covered).decode


def covered_key(topic: str) -> bytes:
    return RESERVED + topic.encode()


class Changelog:
    def __init__(self, application_id: str, state: KeyedState, sources: list[str], options: Mapping[str, Any]) -> None:
        """`options` are those of the loop's consumer."""
        self.topic = f"{application_id}.{state.name}.changelog"
        self.sources = sources
        self.application_id = application_id
        self._state = state
        kept = {name: value for name, value in options.items() if name not in OF_A_GROUP}
        fixed = {"isolation_level": "read_committed", "auto_offset_reset": "none"}
        self._settings = ConsumerSettings.of({**kept, **fixed})
        self._topic_id = ""
        self._count = 0
        self._retention_ms = 0

    # -- the topic -----------------------------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Creates the topic, or makes sure that it fits."""
        with Admin(self._settings) as admin:
            counts = {info.name: len(info.partitions) for info in admin.describe_topics(self.sources)}
            if len(set(counts.values())) > 1:
                raise StateError(
                    f"the sources have different numbers of partitions ({counts}), so records of one key are not in "
                    "partitions of one number, and their state would not be together; copy one of them to a topic "
                    "that is partitioned like the other"
                )
            count = max(counts.values())
            admin.create_topic(self.topic, count, configs=CONFIG, if_not_exists=True)
            info = admin.describe_topics([self.topic])[0]
            configs = admin.describe_configs(topic=self.topic)
        if len(info.partitions) != count:
            raise self._moved(f"{len(info.partitions)} partitions, {self.sources[0]!r} has {count}")
        policy = configs["cleanup.policy"].value
        if policy != "compact":
            raise StateError(
                f"the changelog {self.topic!r} has cleanup.policy={policy}, which deletes state; it must be compact. "
                "If nothing has been deleted yet, change it; else start over under another application id"
            )
        self._count = count
        self._topic_id, self._retention_ms = info.topic_id, int(configs[RETENTION].value or 0)

    def _moved(self, what: str) -> StateError:
        return StateError(
            f"the changelog {self.topic!r} has {what}: keys have moved to other partitions than their state. Start "
            "over under another application id, which reads the source from its beginning"
        )

    # -- partitions ----------------------------------------------------------------------------------------------------
    def identity(self, partition: int) -> StoreIdentity:
        """Raises for a partition that the source got while the loop runs."""
        if partition >= self._count:
            raise self._moved(f"{self._count} partitions, the source got partition {partition}")
        state = self._state
        return StoreIdentity(self.application_id, state.name, state.version, partition, self._topic_id)

    def covered(self, topic: str, offset: int) -> tuple[bytes, bytes]:
        """Key and value of the record that says up to where the state goes."""
        state = self._state
        content = Covered(self.application_id, state.name, state.version, offset)
        return covered_key(topic), msgspec.json.encode(content)

    def catch_up(self, stores: dict[int, StateStore], is_stopping: Callable[[], bool]) -> None:
        """Brings stores to the end of the changelog, which includes what others committed. A store that does not fit
        is replaced in `stores`.

        To be called when the committed offsets of the source are known to be stable. What was committed with them may
        have no marker here yet, so this reads up to the high watermark, and waits for open transactions before it."""
        places = {TopicPartition(self.topic, number): number for number in stores}
        with Consumer(self._settings) as consumer:
            with Admin(self._settings) as admin:
                found = admin.list_offsets(dict.fromkeys(places, LATEST))
            ends = {place: at.offset for place, at in found.items()}
            starts = consumer.beginning_offsets(list(places))
            for place, number in places.items():
                self._check_start(place, starts[place])
                stores[number] = self._fitting(stores[number], ends[place])
            behind = {place: end for place, end in ends.items() if stores[places[place]].offset < end}
            if behind:
                self._read(consumer, behind, stores, is_stopping)

    def _check_start(self, place: TopicPartition, start: int) -> None:
        if start > 0:
            raise StateError(
                f"records of the changelog {place} below offset {start} were deleted, and state with them; start over "
                "under another application id"
            )

    def _fitting(self, store: StateStore, end: int) -> StateStore:
        if store.offset > end:
            return store.move_aside(
                f"the local state is at changelog offset {store.offset}, the changelog ends at {end}"
            )
        age_ms = int(time.time() * 1000) - store.saved_ms
        if store.saved_ms and not 0 <= age_ms <= self._retention_ms // 2:
            # Deletions since then may have been compacted away; if the clock was changed it cannot be known.
            return store.move_aside(f"the local state was written {age_ms // 1000} s ago, too long to follow deletions")
        return store

    def _read(
        self,
        consumer: Consumer,
        ends: Mapping[TopicPartition, int],
        stores: Mapping[int, StateStore],
        is_stopping: Callable[[], bool],
    ) -> None:
        consumer.assign(ends)
        for place in ends:
            consumer.seek(place, stores[place.partition].offset)
        began_s = progress_s = time.monotonic()
        left = dict(ends)
        while left:
            table = consumer.poll_table(POLL_MS, max_records=POLL_RECORDS)
            for batch in table.to_batches():
                keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
                changes: Changes = dict(zip(keys, values, strict=True))
                last = batch.column("offset")[len(keys) - 1].as_py()
                stores[batch.column("partition")[0].as_py()].advance(changes, last + 1)
            if table.num_rows:
                progress_s = time.monotonic()
            for place in [place for place, end in left.items() if consumer.position(place) >= end]:
                stores[place.partition].advance({}, max(stores[place.partition].offset, left.pop(place)))
                consumer.pause(place)
            if left:
                self._check_patience(left, stores, began_s, progress_s, is_stopping)

    def _check_patience(
        self,
        left: Mapping[TopicPartition, int],
        stores: Mapping[int, StateStore],
        began_s: float,
        progress_s: float,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Returns to the loop at times, which must poll; what was restored is kept."""
        now_s = time.monotonic()
        place, end = next(iter(left.items()))
        where = f"restoring {place}: at offset {stores[place.partition].offset} of {end}"
        if now_s - progress_s > STALLED_S:
            raise TimedOutError(
                f"{where}, and nothing more can be read for {STALLED_S:g} s; an open transaction may be in the way "
                "until its timeout (`semel txn list` shows it)"
            )
        if now_s - began_s > self._settings.max_poll_interval_ms / 2000 or is_stopping():
            raise TimedOutError(f"{where}; to be continued")

    # -- does it fit the offsets? --------------------------------------------------------------------------------------
    def check_covered(self, store: StateStore, topic: str, committed: int | None) -> None:
        """The state and the committed offset of a partition of the source must be of one transaction."""
        number = store.identity.partition
        raw = store.get(covered_key(topic))
        if raw is None:
            self._check_new(store, topic, committed)
            return
        covered = _decode_covered(raw)
        expected = Covered(self.application_id, self._state.name, self._state.version, covered.offset)
        if covered != expected:
            raise StateError(
                f"the changelog {self.topic}-{number} was written by {covered}; expected {expected}. Of another "
                "application: choose another name for the state. Of another version: go back to it, or start over "
                "with another name or application id"
            )
        if committed != covered.offset:
            raise StateError(
                f"the state of {topic}-{number} was made of the records up to offset {covered.offset}, and the group "
                f"{self.application_id!r} has committed {'nothing' if committed is None else committed}: processing "
                "from there would count records twice or not at all. To go on where the state ends, set the offset to "
                f"{covered.offset} (`semel group reset {self.application_id} --topic {topic}:{number} "
                f"--to-offset {covered.offset}`); to process them again, choose another application id"
            )

    def _check_new(self, store: StateStore, topic: str, committed: int | None) -> None:
        number = store.identity.partition
        if not store.is_empty() and all(store.get(covered_key(source)) is None for source in self.sources):
            raise StateError(
                f"the changelog {self.topic}-{number} has records that say nothing of their source; they are not "
                "semel's. Choose another name for the state"
            )
        if committed is not None and not self._state.adopt:
            raise StateError(
                f"the group {self.application_id!r} has committed offset {committed} of {topic}-{number}, and the "
                f"changelog {self.topic!r} has no state for it: it was lost, or the loop had no state so far. To begin "
                "with empty state at this offset, say KeyedState(..., adopt=True); to make the state of all records, "
                "choose another application id"
            )
