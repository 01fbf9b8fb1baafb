"""One transaction, many processes: an owner opens and ends it, others write into it with a handle that can be pickled.

    owner = TransactionOwner(settings)          # in the driver
    owner.own()                                 # fences every earlier owner of the transactional id
    handle = owner.begin([("out", 0), ("out", 1)])

    writer = handle.writer()                    # in a task
    opening = writer.open("out", 0, table, mark=attempt_id)
    if opening.is_owner: writer.write("out", 0, more); results = writer.finish()

    owner.last_sequences(...)                   # in the driver: does the log hold what the tasks reported?
    owner.end(commit=True)

Rules that make it safe: every transaction has an epoch of its own, so sequences start at 0 in every partition and
stragglers of an earlier one are refused; at most one writer per partition, which the opening handshake makes sure of;
the owner alone ends the transaction, after the writers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from semel.client.cluster import Cluster
from semel.client.errors import FatalError, IllegalStateError, KafkaError, TimedOutError
from semel.client.immediate import Closing
from semel.client.log_reading import find_end, header_at, last_sequences, opening_header
from semel.client.producer.batches import Identity, Place, ProducerBatch
from semel.client.producer.coordinator import CoordinatorClient, new_identity
from semel.client.producer.identities import NAMES_UP_TO, FixedIdentity
from semel.client.producer.sender import Sender
from semel.client.producer.transaction import VERSIONS
from semel.client.settings import COMPRESSIONS, ProducerSettings
from semel.client.timing import Deadline
from semel.client.types import GroupMetadata, OffsetAndMetadata
from semel.protocol.batch import next_sequence
from semel.protocol.errors import ErrorCode, Recovery


@dataclass(frozen=True)
class TransactionHandle:
    """What a process needs to write into a transaction that another one owns."""

    settings: ProducerSettings
    producer_id: int
    epoch: int
    generation: int  # 1 or 2: TV1 or TV2
    partitions: tuple[Place, ...] = ()  # TV1: only these may be written

    @property
    def transactional_id(self) -> str:
        assert self.settings.transactional_id is not None
        return self.settings.transactional_id

    @property
    def identity(self) -> Identity:
        return Identity(self.producer_id, self.epoch)

    def writer(self, cluster: Cluster | None = None) -> PartitionWriter:
        """A writer with connections of its own, or with those of a cluster that stays open when the writer is closed.
        Close it, or use it in a `with` block."""
        return PartitionWriter(self, cluster=cluster)


@dataclass(frozen=True)
class PlainHandle:
    """The same way of writing without a transaction: every writer is an idempotent producer of its own."""

    settings: ProducerSettings

    def writer(self, cluster: Cluster | None = None) -> PartitionWriter:
        with contextlib.nullcontext(cluster) if cluster is not None else Cluster(self.settings) as requested:
            identity = new_identity(requested, requested.deadline().remaining_s())
        written_as = FixedIdentity(None, identity, (3, NAMES_UP_TO))
        return PartitionWriter(TransactionHandle(self.settings, *identity, generation=2), written_as, cluster)


class Opening(NamedTuple):
    """How the handshake for a partition ended."""

    is_owner: bool  # False: another attempt has this partition; write nothing more to it
    offset: int  # of the opening batch in the log, -1 if the broker refused this one
    mark: int  # whose it is: the mark that was read back, -1 if the log has none (any more)


class WrittenPartition(NamedTuple):
    topic: str
    partition: int
    record_count: int
    first_offset: int
    last_offset: int
    last_sequence: int


class PartitionWriter(Closing):
    """Writes to partitions in the caller's thread: up to five requests in flight, sequences from 0.

    A failure that is not retriable ends the writer: the transaction must be aborted by its owner.
    """

    def __init__(
        self, handle: TransactionHandle, identity: FixedIdentity | None = None, cluster: Cluster | None = None
    ) -> None:
        self.handle = handle
        self.cluster = cluster or Cluster(handle.settings)
        self._lent = cluster is not None
        versions = VERSIONS[handle.generation].produce
        self._identity = identity or FixedIdentity(handle.transactional_id, handle.identity, versions)
        self._sender = Sender(handle.settings, self.cluster, self._identity)
        self._batches: dict[Place, list[ProducerBatch]] = {}
        self._closed = False

    # --- the opening handshake ---
    def open(
        self,
        topic: str,
        partition: int,
        table: Any,
        mark: int,
        timeout_s: float | None = None,
        *,
        compression: str | None = None,
    ) -> Opening:
        """Writes the first rows of a partition as one batch with a mark, and reads back whose mark the log has.

        The mark is the batch's base timestamp; records keep their exact timestamps. Only one of several attempts with
        different marks is the owner, also if their batches look alike to the broker's deduplication. A broker that
        compresses a batch again gives it another base timestamp: `compression` is that of the topic, if it has one.
        """
        place = (topic, partition)
        if place in self._batches:
            raise IllegalStateError(f"{topic}-{partition} was opened before by this writer")
        deadline = self.cluster.deadline(timeout_s)
        settings = self.handle.settings
        if compression is not None:
            settings = replace(settings, compression_type=compression)
        batches = self._encode(place, table, replace(settings, batch_size=settings.max_request_size), mark)
        if len(batches) != 1:
            raise FatalError(f"an opening has the rows of one batch, this one of {len(batches)}; give fewer rows")
        self._batches[place] = []
        try:
            self._add(place, batches)  # a fast broker may refuse it here already
            self.flush(deadline.remaining_s())
        except KafkaError as error:
            if error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:  # another attempt has written more than an opening
                first = opening_header(self.cluster, place, self.handle.identity, deadline.remaining_s())
                return Opening(False, -1, -1 if first is None else first.base_timestamp)
            raise
        return self._read_back(place, batches[0].base_offset, mark, settings.compression, deadline)

    def _read_back(self, place: Place, offset: int, mark: int, compression: int, deadline: Deadline) -> Opening:
        """Whose mark is at the acknowledged offset. A new leader shows nothing there until its high watermark has
        passed the offset: that is waited for, because an opening that cannot be seen may be another attempt's."""
        topic, partition = place
        header = header_at(self.cluster, place, offset, deadline.remaining_s())
        if header.producer_id != self.handle.producer_id or header.producer_epoch != self.handle.epoch:
            raise FatalError(
                f"{topic}-{partition} has a batch of producer {header.producer_id} epoch {header.producer_epoch} at "
                f"offset {offset}, which the broker had acknowledged to this transaction"
            )
        if header.compression != compression:
            raise FatalError(
                f"the broker stored a batch for {topic}-{partition} in the compression "
                f"{COMPRESSIONS[header.compression]} that was sent in {COMPRESSIONS[compression]}, and with that its "
                "mark is lost. The topic's compression.type was changed while it was written, or this user may not "
                "read it (DESCRIBE_CONFIGS on the topic): start again, give the right, or set the same compression here"
            )
        return Opening(header.base_timestamp == mark, offset, header.base_timestamp)

    # --- writing ---
    def write(self, topic: str, partition: int, table: Any) -> None:
        """Puts rows behind what was written to the partition before; sends as far as the network takes it."""
        place = (topic, partition)
        self._batches.setdefault(place, [])
        self._add(place, self._encode(place, table))

    def write_encoded(
        self, topic: str, partition: int, data: bytes | bytearray | memoryview, record_count: int
    ) -> None:
        """Puts an encoded record batch behind what was written before; producer and sequence are stamped on."""
        place = (topic, partition)
        self._check_admitted(place)
        self._batches.setdefault(place, [])
        self._add(place, [self._sender.new_batch(topic, partition, memoryview(bytearray(data)), record_count)])

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until the broker has everything; raises the first failure."""
        deadline = self.cluster.deadline(timeout_s)
        while not self._all_done():
            if deadline.expired:
                raise TimedOutError(f"not everything was acknowledged within {deadline.total_s:.3g} s")
            self._sender.step(deadline.remaining_s())
        self._raise_if_failed()

    def finish(self, timeout_s: float | None = None) -> list[WrittenPartition]:
        """Flushes and says what is in the log now, per partition."""
        self.flush(timeout_s)
        return [_written(place, batches) for place, batches in sorted(self._batches.items()) if batches]

    def last_sequence(self, topic: str, partition: int, timeout_s: float | None = None) -> int | None:
        """What the leader has of this transaction in a partition, written by any attempt: a sign of progress."""
        deadline = self.cluster.deadline(timeout_s)
        found = last_sequences(self.cluster, [(topic, partition)], self.handle.identity, deadline.remaining_s())
        return found.get((topic, partition))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._lent:
                self.cluster.close()
            self._sender.close()

    # --- inside ---
    def _encode(
        self, place: Place, table: Any, settings: ProducerSettings | None = None, base_timestamp: int | None = None
    ) -> list[ProducerBatch]:
        from semel.client.producer.tables import TableEncoder, checked_table

        settings, (topic, partition) = settings or self.handle.settings, place
        self._check_admitted(place)
        checked = checked_table(table)
        if "partition" in checked.column_names:
            checked = checked.drop_columns(["partition"])
        encoder = TableEncoder(
            checked,
            1,  # as if the topic had this partition alone: all rows stay in their order
            lambda _: 0,
            settings,
            settings.batch_size,
            base_timestamp,
        )
        return [
            self._sender.new_batch(topic, partition, encoded.data, encoded.record_count)
            for encoded in encoder.batches()
        ]

    def _check_admitted(self, place: Place) -> None:
        if self.handle.generation == 1 and place not in self.handle.partitions:
            raise IllegalStateError(
                f"{place[0]}-{place[1]} is not in this transaction; the owner must name it in begin() (TV1)"
            )

    def _add(self, place: Place, batches: list[ProducerBatch]) -> None:
        sender = self._sender
        limit_bytes = self.handle.settings.buffer_memory
        for batch in batches:
            while sender.used_bytes and sender.used_bytes + batch.size_bytes > limit_bytes:
                self._raise_if_failed()
                sender.step()
            sender.add(batch)
            self._batches[place].append(batch)
            sender.step(0)
        self._raise_if_failed()

    def _all_done(self) -> bool:
        return all(batch.done for batches in self._batches.values() for batch in batches[-10:])

    def _raise_if_failed(self) -> None:
        if self._closed:
            raise IllegalStateError("this writer is closed")
        error = self._identity.lost()
        if error is not None:
            raise error


def _written(place: Place, batches: list[ProducerBatch]) -> WrittenPartition:
    count = sum(batch.count for batch in batches)
    first, last = batches[0].parts()[0], batches[-1].parts()[-1]
    sequence = next_sequence(last.sequence, last.count - 1)
    return WrittenPartition(*place, count, first.base_offset, last.base_offset + last.count - 1, sequence)


class TransactionOwner(Closing):
    """Owns a transactional id in the name of many writers. Not for several threads at once.

    Every transaction has an epoch of its own. `own` takes the id from its last owner; after that, the identity is only
    ever renewed with the expected one, so a frozen owner that wakes up cannot take the id back.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        if settings.transactional_id is None:
            raise IllegalStateError("a transaction owner needs the option transactional.id")
        self.settings = settings
        self.cluster = Cluster(settings)
        self.generation = 1
        self.identity: Identity | None = None
        self._coordinator = CoordinatorClient(self.cluster, settings, settings.transactional_id)
        self._epoch_used = False
        self._may_be_open = False  # a transaction of the current epoch

    def own(self, timeout_s: float | None = None) -> Identity:
        """Takes the id over: earlier owners are fenced, what they left open is finished first."""
        deadline = self.cluster.deadline(timeout_s)
        self.generation = self._coordinator.generation(deadline.remaining_s())
        self.identity = self._coordinator.init(deadline.remaining_s())
        self._epoch_used = self._may_be_open = False
        return self.identity

    def own_keeping(self, timeout_s: float | None = None) -> Identity | None:
        """The same with two-phase commit: what the last owner left open is kept, and only its `end` is allowed until it
        has one. Returns its identity, by which the caller knows what was decided about it."""
        deadline = self.cluster.deadline(timeout_s)
        self.generation = self._coordinator.generation(deadline.remaining_s())
        self.identity, kept = self._coordinator.init_keeping(deadline.remaining_s())
        self._epoch_used = self._may_be_open = kept is not None
        return kept

    def resume(self, handle: TransactionHandle) -> None:
        """Goes on with a transaction that this owner began in another process, to end it."""
        self.generation = handle.generation
        self.identity = handle.identity
        self._epoch_used = self._may_be_open = True

    def renew(self, timeout_s: float | None = None) -> Identity:
        """The next epoch, if the id is still ours; aborts what was open and settles an end without a response.

        `FencedError` with PRODUCER_FENCED: another owner has it. With INVALID_PRODUCER_ID_MAPPING: it expired.
        """
        deadline = self.cluster.deadline(timeout_s)
        if self._may_be_open:
            self._abort_where_that_is_needed(deadline)
        self.identity = self._coordinator.init(deadline.remaining_s(), self._owned())
        self._epoch_used = self._may_be_open = False
        return self.identity

    def _abort_where_that_is_needed(self, deadline: Deadline) -> None:
        """Elsewhere the renewal aborts what is open, with a marker of the next epoch, which keeps stragglers out of the
        partitions, too. Whether the id is still ours, and how a commit without a response ended, the renewal says."""
        if not self._coordinator.fences_open_transactions(deadline.remaining_s()):
            return
        try:
            self.identity = self._coordinator.end(self._owned(), False, self.generation, deadline).identity
        except KafkaError as error:
            if error.code is not ErrorCode.INVALID_TXN_STATE and error.recovery is not Recovery.FENCED:
                raise

    def begin(self, partitions: Iterable[Place], timeout_s: float | None = None) -> TransactionHandle:
        """Opens a transaction for these partitions; under a new epoch if this one was used."""
        deadline = self.cluster.deadline(timeout_s)
        if self._epoch_used:
            self.renew(deadline.remaining_s())
        places = tuple(partitions)
        if self.generation == 1 and places:
            self._coordinator.add_partitions(self._owned(), places, deadline.remaining_s())
        self._epoch_used = self._may_be_open = True
        return TransactionHandle(self.settings, *self._owned(), self.generation, places)

    def send_offsets(
        self,
        offsets: Mapping[tuple[str, int], OffsetAndMetadata],
        group: GroupMetadata | str,
        timeout_s: float | None = None,
    ) -> None:
        """A group's offsets become part of the transaction."""
        metadata = GroupMetadata.for_transaction(group)
        remaining_s = self.cluster.deadline(timeout_s).remaining_s()
        self._coordinator.commit_offsets(self._owned(), metadata, offsets, self.generation, remaining_s)

    def end(self, commit: bool, timeout_s: float | None = None) -> None:
        """Commits or aborts. `EndUnknownError` if no response came: then `renew`, and read what was committed."""
        response = self._coordinator.end(self._owned(), commit, self.generation, self.cluster.deadline(timeout_s))
        self.identity = response.identity
        self._epoch_used = self.generation == 1  # TV2 has raised it with the end
        self._may_be_open = False

    def last_sequences(self, partitions: Iterable[Place], timeout_s: float | None = None) -> dict[Place, int]:
        """What the log holds of the current transaction: the last sequence per partition that has one."""
        remaining_s = self.cluster.deadline(timeout_s).remaining_s()
        return last_sequences(self.cluster, partitions, self._owned(), remaining_s)

    def how_it_ended(self, written: Mapping[Place, int], timeout_s: float | None = None) -> bool | None:
        """Whether the transaction that wrote these offsets under the current identity was committed, by its markers in
        the log. None: there is none, so it may be open. Raises if the log does not reach back so far."""
        deadline, unreadable = self.cluster.deadline(timeout_s), None
        for place, offset in written.items():
            try:
                found = find_end(self.cluster, place, offset, self._owned().producer_id, deadline)
            except KafkaError as error:
                if error.recovery is Recovery.RETRY:
                    raise
                unreadable = error
                continue
            if found is not None:
                return found
            unreadable = None
            break
        if unreadable is not None:
            raise unreadable
        return None

    def close(self) -> None:
        self.cluster.close()

    def _owned(self) -> Identity:
        if self.identity is None:
            raise IllegalStateError("call own() first")
        return self.identity
