"""One transaction of an application, the same for a micro-batch of a sink or a stream writer and for a batch job.

    decide   may the batch be written? The ledger says it, and who takes the id over is sure of it first
    begin    open the transaction for every partition that rows may go to, and for the ledger
    write    by whoever has the handle: a `WriteJob`, or the tasks of a writer
    audit    the log must hold what the tasks reported
    commit   ledger entry, source offsets and the end, together with the rows
    settle   after a failure: the next epoch aborts what is open, and the ledger says whether the batch is written

`docs/architecture.md` shows the calls of one micro-batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from semel import faults
from semel.client.admin.calls import AdminCalls
from semel.client.admin.risks import warn_of_risks
from semel.client.errors import FencedError, KafkaError
from semel.client.immediate import Closing, run
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import TransactionHandle, TransactionOwner, WrittenPartition
from semel.client.types import OffsetAndMetadata
from semel.protocol.errors import ErrorCode
from semel.spark.base_sink import FencedSinkError, LedgerRule, RefusedError, SinkError
from semel.spark.checksums import of_rows
from semel.spark.encoding import Targets
from semel.spark.ledger import LedgerEntry, MicroBatch, Written, topic_of
from semel.spark.ledger_topic import create, last_entry
from semel.spark.offsets import lowest
from semel.spark.options import OptionError
from semel.spark.owners import DriverState, await_decided, why_in_use
from semel.spark.sink_options import SinkOptions
from semel.spark.topics import TopicLimits, is_here, limits_of
from semel.spark.write_job import check_single_runs
from semel.spark.writing import Report

log = logging.getLogger("semel.spark")


class TimedOutTransactionError(SinkError):
    """The batch took longer than transaction.timeout.ms."""


class UnevenError(RuntimeError):
    """The log does not hold what the tasks reported: the transaction must be aborted."""


class BatchTransaction(LedgerRule, Closing):
    """The transactions of one application id in one process, one after the other.

    `state` remembers the producer's identity for the next process of the same Spark application; a sink lives in one.
    """

    def __init__(self, options: SinkOptions, state: DriverState | None = None) -> None:
        super().__init__(options)
        self.options: SinkOptions = options
        self.owner = TransactionOwner(options.producer_settings())
        self.targets = Targets({})
        self._limits: dict[str, TopicLimits] = {}
        self._state = state
        self._began_s: float | None = None
        self._handle: TransactionHandle | None = None

    def close(self) -> None:
        self.owner.close()

    def open(self) -> None:
        """Makes sure that the ledger and the topics are there. Takes nothing from anybody."""
        create(self.owner.cluster, self.options.application_id)
        self._limits = limits_of(self.owner.cluster, self.options.topics())
        self.targets = Targets.of(self.owner.cluster, self.options.topics(), self._limits)

    def own_if_free(self) -> None:
        """Takes an id that nobody ever had, so that wrong options show before the query starts. One that was used may
        belong to a query that waits for its first row."""
        found = await_decided(self.owner.cluster, self.options.application_id)
        self.read_ledger()
        if self.last is None and found is None:
            self.own()

    def resume(self, handle: TransactionHandle, targets: Targets, last: LedgerEntry | None) -> None:
        """Goes on, in another process, with a transaction that was begun."""
        self.owner.resume(handle)
        self._handle, self.targets, self.last = handle, targets, last

    @property
    def handle(self) -> TransactionHandle:
        assert self._handle is not None, "begin() or resume() comes first"
        return self._handle

    # --- decide ---
    def decide(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """Whether the batch is to be written; False: it is written. Raises RefusedError if it must not be, after what
        is wrong with the checkpoint itself (`cause`).

        The first time, every earlier run is fenced, but only once it is clear that this batch is the next one: a query
        that is refused does not disturb the owner of its application id.
        """
        if self.owner.identity is None:
            if self._is_written_in_new_ledger(batch, is_stateful, cause):
                return False
            self._refuse_in_use(batch)
            self.own()
            self.read_ledger()  # while the id was being taken over, its owner may have finished a batch
        return not self.is_written(batch, is_stateful, cause)

    def _is_written_in_new_ledger(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str) -> bool:
        """Others may have written since this object was made. The end of a transaction is acknowledged before its
        marker is in the ledger; so an entry that a refused batch continues may become visible only now."""
        self.read_ledger()
        try:
            return self.is_written(batch, is_stateful, cause)
        except RefusedError:
            await_decided(self.owner.cluster, self.options.application_id)
            self.read_ledger()
            return self.is_written(batch, is_stateful, cause)

    def _refuse_in_use(self, batch: MicroBatch) -> None:
        """Before the first batch of a Spark application. After that the id is ours, or the coordinator knows better."""
        if self._state is not None and self._state.last_handle() is not None:
            return
        options, places = self.options, self.targets.places()
        in_use = why_in_use(self.owner.cluster, options.application_id, self.last, batch, places)
        if in_use:
            raise RefusedError(in_use)

    def own(self) -> None:
        """The first time in a Spark application the id is taken over; after that it must still be ours."""
        known = None if self._state is None else self._state.last_handle()
        if known is None:
            self._take_over()
        else:
            self.owner.resume(known)
            self.renew()
        self.remember()

    def _take_over(self) -> None:
        cluster, topics = self.owner.cluster, [*self.options.topics(), topic_of(self.options.application_id)]
        run(warn_of_risks(AdminCalls(cluster.settings, cluster.calls), topics, log))
        try:
            self.owner.own()
        except KafkaError as error:
            if error.code is not ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                raise
            raise OptionError(
                f"transaction_timeout_ms is {self.options.transaction_timeout_ms}, more than the broker allows; lower "
                "it, or raise the broker's transaction.max.timeout.ms"
            ) from error

    def read_ledger(self, *, accept_empty: bool = False) -> None:
        options = self.options
        accept_empty = accept_empty or options.adopt_checkpoint
        self.last = last_entry(self.owner.cluster, options.application_id, must_exist=True, accept_empty=accept_empty)

    # --- begin, audit ---
    def begin(self) -> TransactionHandle:
        """Opens the transaction. Partitions may have been added to the topics since the last one."""
        self._began_s = time.monotonic()
        faults.hit("sink.before_begin")
        self.targets = Targets.of(self.owner.cluster, self.options.topics(), self._limits)
        self._handle = self.owner.begin([*self.targets.places(), (topic_of(self.options.application_id), 0)])
        self.remember()
        faults.hit("sink.after_begin")
        return self._handle

    def audit(self, reports: list[Report]) -> None:
        """The log must hold exactly what the winners reported: catches rows of a dead attempt in a partition that the
        winner had no rows for, which no handshake can see."""
        faults.hit("sink.after_write")
        if self.options.precautions.count_audit:
            reported = {self.targets.place(r.target): r.sequence for r in reports}
            found = self.owner.last_sequences(self.targets.places())
            if found != reported:
                wrong = {place for place in {*found, *reported} if found.get(place) != reported.get(place)}
                numbers = {place: (reported.get(place), found.get(place)) for place in sorted(wrong)[:5]}
                raise UnevenError(
                    f"tasks reported other counts than the log holds; last sequences (reported, found): {numbers}"
                )
        check_single_runs(reports)
        faults.hit("sink.after_audit")

    # --- commit ---
    def commit(
        self, batch: MicroBatch, reports: list[Report], run_id: str, checksum: str = "", attempts: int = 1
    ) -> LedgerEntry:
        """The ledger entry, the source offsets and the end: one transaction with the rows. A batch without rows that
        moved nothing is aborted, unless it is the first of its query: the next batch must find that in the ledger."""
        entry = self.entry(batch, reports, run_id, of_rows(checksum, sum(r.rows for r in reports)), attempts)
        is_known = self.last is not None and self.last.query_id == batch.query_id
        if entry.rows == 0 and batch.ends and batch.starts == batch.ends and is_known:
            self.abort()
        else:
            write_entry(self.handle, self.options.application_id, entry, self.owner)
            faults.hit("sink.after_ledger")
            send_source_offsets(self.owner, self.options, batch.ends)
            faults.hit("sink.after_offsets")
            self._end(entry)
        self.remember()
        faults.hit("sink.after_commit")
        return entry

    def entry(self, batch: MicroBatch, reports: list[Report], run_id: str, checksum: str, attempts: int) -> LedgerEntry:
        written = [Written(*self.targets.place(r.target), r.rows, r.first, r.last) for r in reports]
        return self.next_entry(
            batch,
            run_id,
            checksum,
            attempts,
            written=sorted(written, key=lambda w: (w.topic, w.partition)),
            rows=sum(r.rows for r in reports),
            dead_letters=sum(r.dead for r in reports),
            dead_letter_topic=self.options.dead_letter_topic,
            took_ms=0 if self._began_s is None else int((time.monotonic() - self._began_s) * 1000),
        )

    def _end(self, entry: LedgerEntry) -> None:
        """EndTxn. If its outcome is unknown, the epoch is never used again, and the ledger says how it ended."""
        try:
            self.owner.end(commit=True)
        except EndUnknownError:
            self.renew()
            self.read_ledger(accept_empty=True)
            if self.last is None or self.last.sequence != entry.sequence:
                raise
        self.last = entry

    # --- when it did not work ---
    def settle(self, batch: MicroBatch, error: Exception, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """After a failure: aborts what is open under a new epoch. True if the batch is written after all; else it may
        run again, unless it took too long."""
        self.renew()
        self.read_ledger()
        if self.is_written(batch, is_stateful, cause):
            return True
        self.raise_if_too_long(error)
        return False

    def renew(self) -> None:
        """The next epoch, if the id is still ours. One that expired belongs to nobody and is taken anew.

        Only InitProducerId's error counts. Other requests return INVALID_PRODUCER_ID_MAPPING also where another owner
        got a new producer id, after 32,766 epochs: who took the id then would take it from that owner.
        """
        try:
            self.owner.renew()
        except FencedError as error:
            if error.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
                self._take_over()
                return
            self.raise_if_too_long(error)
            raise FencedSinkError(
                f"application id {self.options.application_id!r} was taken over by another driver: {error}. If that "
                "is the one that should run, this one is right to stop; else start this Spark application again. Two "
                "queries need two application ids"
            ) from error

    def raise_if_too_long(self, error: Exception) -> None:
        """A batch that failed after more than the timeout: running it again would only take as long again."""
        took_s = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        limit_ms = self.options.transaction_timeout_ms
        if took_s * 1000 >= limit_ms:
            raise TimedOutTransactionError(
                f"the batch took {took_s:.0f} s, longer than transaction.timeout.ms ({limit_ms} ms), so the "
                "coordinator aborted it. Nothing of it is visible. Raise transaction_timeout_ms (the broker's limit is "
                "transaction.max.timeout.ms), or make batches smaller with maxOffsetsPerTrigger; then start again"
            ) from error

    def abort(self) -> None:
        """As well as it can be done: a transaction that stays open is aborted by the next owner or the timeout.

        Under a new epoch, because tasks that Spark has not killed yet may still write. EndTxn raises it with TV2 only;
        with TV1 a broker that does not verify writes would take them, into the next transaction of this id.
        """
        try:
            if self.owner.generation == 1:
                self.owner.renew()
            else:
                self.owner.end(commit=False)
            self.remember()
        except KafkaError as error:
            log.warning("the transaction could not be aborted now: %s", error)

    def remember(self) -> None:
        if self._state is not None and self.owner.identity is not None:
            self._state.remember(*self.owner.identity, self.owner.generation)


def write_entry(
    handle: TransactionHandle, application_id: str, entry: LedgerEntry, owner: TransactionOwner
) -> WrittenPartition:
    """Puts the entry into the transaction, over the owner's connections."""
    with handle.writer(owner.cluster) as writer:
        writer.write(topic_of(application_id), 0, entry_table(entry))
        [written] = writer.finish()
        return written


def entry_table(entry: LedgerEntry) -> Any:
    """The record of an entry."""
    import pyarrow as pa

    columns: dict[str, Any] = {"key": [entry.key], "value": [entry.encode()]}
    return pa.table({name: pa.array(values, pa.binary()) for name, values in columns.items()})


def source_offsets(
    lines: Iterable[str | None], allowed: Callable[[str], bool]
) -> dict[tuple[str, int], OffsetAndMetadata]:
    """Source offsets for the group, for lag tools. The same topic in two sources: the lower offset."""
    return {
        (topic, partition): OffsetAndMetadata(offset)
        for topic, parts in lowest(lines).offsets.items()
        if allowed(topic)
        for partition, offset in parts.items()
    }


def send_source_offsets(owner: TransactionOwner, options: SinkOptions, ends: list[str | None]) -> None:
    """Source offsets for the group, in the transaction: those of topics that this cluster has."""
    offsets = source_offsets(ends, lambda topic: options.stores_offsets and is_here(owner.cluster, topic))
    if not offsets:
        return
    try:
        owner.send_offsets(offsets, options.application_id)
    except KafkaError:
        for topic, _ in offsets:
            owner.cluster.metadata.forget(topic)  # perhaps it was deleted meanwhile: look before the next try
        raise
