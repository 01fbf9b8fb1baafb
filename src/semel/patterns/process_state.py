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
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from semel import faults
from semel.client.consumer import Consumer
from semel.client.errors import AbortableError, KafkaError
from semel.client.producer import Producer
from semel.client.types import ConsumerRecord, OffsetAndMetadata, TopicPartition
from semel.patterns.changelog import Changelog
from semel.patterns.process_modes import ExactlyOnce
from semel.patterns.process_output import Emitter, Made
from semel.patterns.state import Changes, KeyedState, State, StateError, StateStore

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
        made = Made([], [])
        if self.tables:
            for partition, table in _by_partition(batch):
                self._partition = partition
                self._add_table(table, made)
        else:
            self._add_records(batch, made)
        self.state.leave()
        return made

    def _add_records(self, records: list[ConsumerRecord], made: Made) -> None:
        outputs, function, to_rows, state = made.outputs, self.function, self._rows_of, self.state
        for record in records:
            state.enter(record.partition)
            try:
                outputs += to_rows(function(record, state), record)
            except KafkaError:
                raise
            except Exception as error:
                state.roll_back()
                self._add_bad(record, record, error, made)

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
        import pyarrow as pa

        sent: dict[int, Changes] = {}
        for place, at in progress.items():
            changes = sent.setdefault(place.partition, self._state.pending(place.partition))
            key, value = self._changelog.covered(place.topic, at.offset)
            changes[key] = value
        table = pa.table(
            {
                "key": pa.array([key for changes in sent.values() for key in changes], pa.binary()),
                "value": pa.array([value for changes in sent.values() for value in changes.values()], pa.binary()),
                "partition": pa.array([number for number, changes in sent.items() for _ in changes], pa.int32()),
            }
        )
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
        if self._stores is not None:
            self._stores.doubt()
        super().drop()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._stores is not None:
                self._stores.close()
