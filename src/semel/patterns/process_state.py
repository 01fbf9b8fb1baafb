"""The processing loop with state: a fourth thing in the transaction, next to output, offsets and dead letters.

A unit of work goes: the function changes pending values; these go to the changelog; offsets; commit; only then the
local stores take the values over. After anything else pending values are dropped, and each store reads what the
changelog has beyond it, which also settles commits whose outcome was unknown.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import msgspec

from semel import faults
from semel.client.admin import Admin
from semel.client.consumer import Consumer
from semel.client.errors import AbortableError, KafkaError, TimedOutError
from semel.client.producer import Producer
from semel.client.settings import ConsumerSettings
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.process_modes import ExactlyOnce
from semel.patterns.process_output import Emitter, Made
from semel.patterns.state import RESERVED, Changes, KeyedState, State, StateError, StateStore, StoreIdentity

# --- The changelog of a store: a compacted topic, partitioned as the source is, that holds every committed change ---
#
# Next to the values there is one record for each partition of a source (`Covered`): up to which offset of it the state
# was made. It is written in the transaction that commits this offset: where they differ, one of them was moved.


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
                self._check_progress(left, stores, began_s, progress_s, is_stopping)

    def _check_progress(
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


CHANGELOG_OVERHEAD_BYTES = 200  # of a batch with one record


TEMPORARY = "semel-state-"
OWNER = "owner.lock"


def _temporary_folder() -> tuple[Path, IO[bytes]]:
    """A folder that others recognise as in use. Those of processes that were killed are removed: their locks are free,
    and a lock has its name only once it is held."""
    for left in Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY))
    lock = (folder / "lock.new").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "lock.new").rename(folder / OWNER)
    return folder, lock


def _remove_if_left(folder: Path) -> None:
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return
        with (folder / OWNER).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, or not of this kind


class StateFolder:
    """Where an instance keeps its stores. One process at a time has it."""

    def __init__(self, settings: KeyedState, application_id: str) -> None:
        self._temporary: Path | None = None
        if settings.directory is None:
            self._temporary, self._owner = _temporary_folder()
        root = Path(self._temporary or settings.directory or "")
        self.path = root / quote(application_id, safe="") / quote(settings.name, safe="")
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StateError(
                f"another process uses the state in {self.path}; give each instance a directory of its own"
            ) from error

    def file(self, partition: int) -> Path:
        return self.path / f"{partition}.sqlite"

    def close(self) -> None:
        self._lock.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._owner.close()


class StatefulEmitter(Emitter):
    """Gives the function the state of the partition that its record, or table, is of."""

    state: State
    _partition = -1  # of the table that the function is called with

    def outputs(self, batch: Any) -> Made:
        if not self.tables:
            made = super().outputs(batch)
        else:
            made = Made([], [])
            for partition, table in _by_partition(batch):
                self._partition = partition
                self._add_table(table, made)
        self.state.leave()
        return made

    def _returned(self, records: list[ConsumerRecord], made: Made) -> list[Any]:
        returned: list[Any] = []
        function, state, as_it_is, to_rows = self.function, self.state, self._as_it_is, self._rows_of
        partition, settled, add = -1, state.settled, returned.append
        for record in records:
            if record.partition == partition:
                settled()
            else:
                partition = record.partition
                state.enter(partition)
            try:
                given = function(record, state)
                add(given if type(given) in as_it_is else to_rows(given, record))
            except KafkaError:
                raise
            except Exception as error:
                state.roll_back()
                add(self._instead(record, error, made))
        return returned

    def _add_table(self, table: Any, made: Made) -> None:
        self.state.enter(self._partition)
        try:
            made.outputs.extend(self._checked_tables(self.function(table, self.state)))
        except KafkaError:
            raise
        except Exception as error:
            self.state.roll_back()
            self._add_bad_table(table, error, made)


def _by_partition(table: Any) -> list[tuple[int, Any]]:
    """Parts of a table, whose batches hold one partition each, by topic and partition."""
    parts: dict[tuple[str, int], list[Any]] = {}
    for batch in table.to_batches():
        if batch.num_rows:
            place = (batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py())
            parts.setdefault(place, []).append(batch)
    return [(partition, type(table).from_batches(batches)) for (_, partition), batches in parts.items()]


class Stores:
    """The stores of the partitions that this instance has."""

    def __init__(self, folder: StateFolder, changelog: Changelog, state: State, consumer: Consumer) -> None:
        self._folder, self._changelog, self._state, self._consumer = folder, changelog, state, consumer
        self._open: dict[int, StateStore] = {}
        self._current: set[int] = set()  # those that are known to be at the end of their changelog

    def bring_up(self, numbers: Iterable[int], is_stopping: Callable[[], bool]) -> None:
        """Makes sure that these have exactly what is committed."""
        wanted = {number for number in numbers if number not in self._current}
        if not wanted:
            return
        sources = self._changelog.sources
        places = [TopicPartition(topic, number) for number in sorted(wanted) for topic in sources]
        self._check_assigned(places)
        committed = self._consumer.committed(places)  # waits for transactions that are about to end
        for number in sorted(wanted - self._open.keys()):
            self._open[number] = StateStore(self._folder.file(number), self._changelog.identity(number))
        behind = {number: self._open[number] for number in sorted(wanted)}
        try:
            self._changelog.catch_up(behind, is_stopping)
        finally:
            self._open |= behind
        try:
            for place in places:
                at = committed.get(place)
                self._changelog.check_covered(behind[place.partition], place.topic, None if at is None else at.offset)
        except StateError:
            self._check_still_owned(places, committed)
            raise
        for number, store in behind.items():
            self._state.attach(number, store)
        self._current |= wanted

    def _check_still_owned(
        self, places: list[TopicPartition], committed: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> None:
        """One that was frozen between its two looks compares offsets of before with a changelog of after."""
        if self._consumer.committed(places) != committed:
            raise AbortableError(
                "other instances committed while the state was restored: the group went on without this one"
            )

    def _check_assigned(self, places: list[TopicPartition]) -> None:
        missing = set(places) - self._consumer.assignment()
        if missing:
            raise AbortableError(
                f"{min(missing)} is not assigned to this instance and the other sources' partition of this number is; "
                "they are needed together, and should be after the next rebalance"
            )

    def doubt(self) -> None:
        """Something went wrong: pending values are gone, and the changelog says what was committed."""
        self._state.discard()
        self._current.clear()

    def send(
        self, producer: Producer, progress: dict[TopicPartition, OffsetAndMetadata]
    ) -> tuple[Any, dict[int, Changes]]:
        """Puts the pending values, and what they cover, on their way to the changelog."""
        import numpy as np
        import pyarrow as pa

        from semel.protocol.arrow_numbers import binaries, to_arrow

        sent: dict[int, Changes] = {}
        for place, at in progress.items():
            changes = sent.setdefault(place.partition, self._state.pending(place.partition))
            key, value = self._changelog.covered(place.topic, at.offset)
            changes[key] = value
        numbers = np.repeat(np.array([*sent], np.int32), [*map(len, sent.values())])
        columns = {
            "key": binaries([*chain.from_iterable(sent.values())]),
            "value": binaries([*chain.from_iterable(changes.values() for changes in sent.values())]),
            "partition": to_arrow(numbers),
        }
        table = pa.table(columns)
        return producer.send_table(self._changelog.topic, table), sent

    def advance(self, delivery: Any, sent: dict[int, Changes]) -> None:
        """What was sent is committed."""
        ends: dict[int, int] = {}
        for run in delivery.result():
            ends[run.partition] = max(ends.get(run.partition, 0), run.base_offset + run.record_count)
        self._state.discard()
        for number, changes in sent.items():
            self._open[number].advance(changes, ends[number])

    def release(self, numbers: Iterable[int]) -> None:
        with ExitStack() as stack:  # all are closed, also if one cannot be written
            for number in numbers:
                self._current.discard(number)
                self._state.detach(number)
                store = self._open.pop(number, None)
                if store is not None:
                    stack.callback(store.close)

    def close(self) -> None:
        try:
            self.release(list(self._open))
        finally:
            self._folder.close()


class StatefulExactlyOnce(ExactlyOnce):
    has_state = True

    def __init__(
        self,
        consumer: Consumer,
        make_producer: Callable[[], Producer],
        emitter: StatefulEmitter,
        settings: KeyedState,
        changelog: Changelog,
        is_stopping: Callable[[], bool],
    ) -> None:
        super().__init__(consumer, make_producer, emitter)
        emitter.state = State(settings.codec(), self.producer.settings.max_request_size - CHANGELOG_OVERHEAD_BYTES)
        self._changelog = changelog
        self._is_stopping = is_stopping
        self._settings, self._state = settings, emitter.state
        self._stores: Stores | None = None

    def start(self) -> None:
        folder = StateFolder(self._settings, self._changelog.application_id)
        self._stores = Stores(folder, self._changelog, self._state, self.consumer)
        self._changelog.prepare()
        super().start()

    def assigned(self, partitions: list[TopicPartition]) -> None:
        assert self._stores is not None
        self._stores.bring_up({partition.partition for partition in partitions}, self._is_stopping)

    def released(self, partitions: list[TopicPartition]) -> None:
        if self._stores is not None:
            self._stores.release({partition.partition for partition in partitions})

    def take(self, batch: Any, firsts: dict[TopicPartition, int]) -> None:
        assert self._stores is not None
        self._begin(firsts)
        self._stores.bring_up({partition.partition for partition in firsts}, self._is_stopping)
        super().take(batch, firsts)

    def settle(self) -> None:
        assert self._stores is not None
        if not self.is_working:
            return
        delivery, sent = self._stores.send(self.producer, self._progress())
        if faults.armed:
            faults.hit("state.sent")
        super().settle()
        if faults.armed:
            faults.hit("state.committed")
        self._stores.advance(delivery, sent)

    def drop(self) -> None:
        self._doubt()
        super().drop()

    def abandon(self) -> None:
        self._doubt()
        super().abandon()

    def _doubt(self) -> None:
        if self._stores is not None:
            self._stores.doubt()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._stores is not None:
                self._stores.close()
