"""The sink: a function for foreachBatch that writes each micro-batch in one transaction.

    sink = semel.sink("localhost:9092", application_id="payments", topic="out")
    df.writeStream.foreachBatch(sink).option("checkpointLocation", path).start()

The order of things, each step in a place of its own: read the ledger (`_open`), decide whether the batch may be written
(`ledger.decide`), own the transactional id before the first one (`_take_over`), write it by a Spark job (`encoding`,
`writing`), audit the counts, commit data, ledger entry and positions together (`_commit`). Anything else aborts and
runs the batch again.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from semel import faults
from semel.client.errors import ConnectionFailedError, FencedError, KafkaError, TimedOutError
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import TransactionHandle, TransactionOwner
from semel.protocol.errors import ErrorCode
from semel.spark.base_sink import BaseSink, BatchReport, SinkError, log
from semel.spark.checksums import Observed, why_state_differs
from semel.spark.committing import audit, write_entry, written_places
from semel.spark.encoding import BadRowError
from semel.spark.guesses import FailedGuessError
from semel.spark.lag import send_positions
from semel.spark.ledger import Batch, Entry, Verdict, decide, refuse_lost_state, topic_of
from semel.spark.ledger_topic import create, last_entry
from semel.spark.options import OptionError
from semel.spark.owners import ONGOING, await_decided, why_in_use
from semel.spark.sink_options import SinkOptions
from semel.spark.targets import Targets
from semel.spark.write_job import Cancelled, Job, Report, WriteJob, check_single_runs


class RefusedError(SinkError):
    """The ledger says that this batch must not be written."""


class FencedSinkError(SinkError):
    """Another driver owns the application id."""


class TimedOutTransactionError(SinkError):
    """The batch took longer than transaction.timeout.ms."""


class Sink(BaseSink):
    """guarantee=exactly_once."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._owner = TransactionOwner(options.producer_settings())
        self._began_s = 0.0
        self.job: Job = WriteJob(self._owner.cluster)
        self._open()

    def _open(self) -> None:
        """Reads the ledger before the query starts. The id is taken now if that takes it from nobody (wrong options
        show at once), else before the first batch is written, when it is clear that it may be: see `_take_over`."""
        cluster, application_id = self._owner.cluster, self.options.application_id
        try:
            create(cluster, application_id)
        except (ConnectionFailedError, TimedOutError) as error:
            raise SinkError(
                f"the sink got no answer from its brokers (bootstrap servers {self.options.bootstrap_servers!r}): "
                f"{error}. Start them, or correct the addresses, and start the query again"
            ) from error
        self._targets = Targets.of(cluster, self.options.topics())
        found = await_decided(cluster, application_id)
        self._last = self._read_ledger()
        if self._last is None and (found is None or found.state != ONGOING):
            self._own()

    def _take_over(self, batch: Batch) -> None:
        """Fences every earlier run, once it is clear that this batch is the next one to be written: a query that is
        refused leaves the owner of its application id in peace."""
        self._last = self._read_ledger()  # others may have written since the sink was made
        if self._is_written(batch):
            return
        self._check_state(batch)
        cluster, application_id = self._owner.cluster, self.options.application_id
        in_use = why_in_use(cluster, application_id, self._last, batch, self._targets.places())
        if in_use:
            raise RefusedError(in_use)
        self._own()
        self._last = self._read_ledger()  # while the id was being taken over, its owner may have finished a batch

    def _own(self) -> None:
        try:
            self._owner.own()
        except KafkaError as error:
            if error.code is not ErrorCode.INVALID_TRANSACTION_TIMEOUT:
                raise
            raise OptionError(
                f"transaction_timeout_ms is {self.options.transaction_timeout_ms}, more than the broker allows; lower "
                "it, or raise the broker's transaction.max.timeout.ms"
            ) from error

    def _read_ledger(self) -> Entry | None:
        options = self.options
        return last_entry(
            self._owner.cluster, options.application_id, must_exist=True, accept_empty=options.adopt_checkpoint
        )

    def close(self) -> None:
        self._owner.close()

    # --- one batch ---

    def _batch(self, df: Any, batch: Batch) -> None:
        if self._owner.identity is None:
            self._take_over(batch)
        if self._is_written(batch):
            self._replay(df, batch)
            self._tell(BatchReport(batch.batch_id, Verdict.ALREADY_WRITTEN.value, 0, 0, 0, 0.0, 0.0))
            return
        self._check_state(batch)
        self._write_until_done(df, batch)

    def _replay(self, df: Any, batch: Batch) -> None:
        """Runs a batch that is written. A stateful plan must run, or Spark fails the query; and it must give the rows
        that were written, or the state is not the one that they came from."""
        assert self._run is not None
        assert self._last is not None
        observed = Observed(df, self.options) if self._run.is_stateful() else None
        (df if observed is None else observed.frame).write.format("noop").mode("overwrite").save()
        if observed is None:
            return
        differs = why_state_differs(batch.batch_id, self._last.checksum, observed.checksum())
        if differs and not self.options.accept_lost_state:
            raise RefusedError(self._explained(differs))
        if differs:
            log.warning("accepted: %s", differs)

    def _check_state(self, batch: Batch) -> None:
        """A new checkpoint is a new start for a query with state, unless the user says that this is meant."""
        assert self._run is not None
        lost = refuse_lost_state(self._last, batch, self.options.application_id)
        if lost is not None and not self.options.accept_lost_state and self._run.is_stateful():
            raise RefusedError(self._explained(lost))

    def _explained(self, reason: str) -> str:
        """A refusal, after what is wrong with the checkpoint itself: that is the cause then."""
        assert self._run is not None
        cause = self._run.short_lived
        return f"application {self.options.application_id!r}: {f'{cause}. ' if cause else ''}{reason}"

    def _is_written(self, batch: Batch) -> bool:
        """What the ledger says: written before, or to be written now; anything else is refused."""
        decision = decide(self._last, batch, adopt=self.options.adopt_checkpoint)
        if decision.verdict is Verdict.REFUSE:
            self._check_state(batch)  # where the state is lost, too, that is the reason, and it has another way out
            raise RefusedError(self._explained(decision.reason))
        return decision.verdict is Verdict.ALREADY_WRITTEN

    def _write_until_done(self, df: Any, batch: Batch) -> None:
        """Aborts and runs the batch again after anything that is not final, a bounded number of times. A guess of the
        sink that failed does not count: it is none of the query's failures, and is not made again."""
        failures = 0
        for attempt in count(1):
            try:
                self._attempt(df, batch, attempt)
                return
            except (SinkError, Cancelled):
                raise
            except FailedGuessError as error:
                if self._settle(batch):
                    return
                self._raise_if_too_long(error)
                log.info("batch %d runs again: %s", batch.batch_id, error)
            except Exception as error:  # also a FencedError: only InitProducerId knows who owns the id
                if is_final(error):
                    self._abort()
                    raise
                if self._settle(batch):
                    return
                self._raise_if_too_long(error)
                failures += 1
                if failures == self.options.max_attempts:
                    raise
                log.warning("batch %d, attempt %d failed and runs again: %s", batch.batch_id, attempt, error)

    def _attempt(self, df: Any, batch: Batch, attempt: int) -> None:
        started_s = self._began_s = time.monotonic()
        faults.hit("sink.before_begin")
        ledger = (topic_of(self.options.application_id), 0)
        self._targets = Targets.of(self._owner.cluster, self.options.topics())  # partitions may have been added
        handle = self._owner.begin([*self._targets.places(), ledger])
        faults.hit("sink.after_begin")
        assert self._run is not None
        observed = Observed(df, self.options) if self._run.is_stateful() else None
        reports = self._write(df if observed is None else observed.frame, batch, handle)
        faults.hit("sink.after_write")
        written_s = time.monotonic()
        if self.options.precautions.count_audit:
            audit(self._owner, self._targets, reports)
        check_single_runs(reports)
        faults.hit("sink.after_audit")
        entry = self._entry(batch, reports, attempt, "" if observed is None else observed.checksum())
        if entry.rows == 0 and batch.starts == batch.ends and self._knows(batch):
            self._abort()  # nothing to say and nothing moved
        else:
            self._commit(handle, batch, entry)
        committed_s = time.monotonic()
        faults.hit("sink.after_commit")
        self._tell(
            BatchReport(
                batch.batch_id,
                Verdict.WRITE.value,
                entry.rows,
                entry.dead_letters,
                attempt,
                (written_s - started_s) * 1000,
                (committed_s - written_s) * 1000,
            )
        )

    def _write(self, df: Any, batch: Batch, handle: TransactionHandle) -> list[Report]:
        try:
            return self.job(df, self.options, self._targets, batch, handle)
        except Cancelled:
            self._abort()
            raise

    def _entry(self, batch: Batch, reports: list[Report], attempt: int, checksum: str) -> Entry:
        assert self._run is not None
        return Entry(
            sequence=0 if self._last is None else self._last.sequence + 1,
            query_id=batch.query_id,
            run_id=self._run.run_id,
            batch_id=batch.batch_id,
            starts=batch.starts,
            ends=batch.ends,
            written=written_places(self._targets, reports),
            rows=sum(r.rows for r in reports),
            dead_letters=sum(r.dead for r in reports),
            attempts=attempt,
            committed_at_ms=int(time.time() * 1000),
            plan=batch.plan,
            dead_letter_topic=self.options.dead_letter_topic,
            checksum=checksum,
        )

    def _knows(self, batch: Batch) -> bool:
        """Whether the query is in the ledger: the next batch must find it there, so its first one is never left out."""
        return self._last is not None and self._last.query_id == batch.query_id

    def _commit(self, handle: TransactionHandle, batch: Batch, entry: Entry) -> None:
        """The ledger entry, the positions and the end: one transaction with the data."""
        write_entry(handle, self.options.application_id, entry, cluster=self._owner.cluster)
        faults.hit("sink.after_ledger")
        send_positions(self._owner, self.options, batch)
        faults.hit("sink.after_offsets")
        try:
            self._owner.end(commit=True)
        except EndUnknownError:
            self._owner.renew()
            self._last = self._read_ledger()
            if self._last is None or self._last.sequence != entry.sequence:
                raise
        self._last = entry

    # --- when it did not work ---

    def _settle(self, batch: Batch) -> bool:
        """After a failure: abort what is open under a new epoch, and see whether the batch is written after all."""
        try:
            self._owner.renew()
        except FencedError as error:
            self._fenced(error)
        self._last = self._read_ledger()
        return self._is_written(batch)

    def _fenced(self, error: FencedError) -> None:
        """Another owner, an id that expired, or our own transaction that took too long: told apart for the user.

        The error must be InitProducerId's. Other requests return INVALID_PRODUCER_ID_MAPPING also where another owner
        got a new producer id, after 32,766 epochs: who took the id then would take it from that owner.
        """
        if error.code is ErrorCode.INVALID_PRODUCER_ID_MAPPING:
            self._own()
            self._last = self._read_ledger()
            return
        self._raise_if_too_long(error)
        raise FencedSinkError(
            f"application id {self.options.application_id!r} was taken over by another driver: {error}. If that is "
            "the one that should run, this one is right to stop; two queries need two application ids"
        ) from error

    def _raise_if_too_long(self, error: Exception) -> None:
        """A batch that failed after more than the time-out: running it again would only take as long again."""
        took_s = time.monotonic() - self._began_s
        limit_ms = self.options.transaction_timeout_ms
        if took_s * 1000 >= limit_ms:
            raise TimedOutTransactionError(
                f"the batch took {took_s:.0f} s, longer than transaction.timeout.ms ({limit_ms} ms), so the "
                "coordinator aborted it. Nothing of it is visible. Raise transaction_timeout_ms (the broker's limit is "
                "transaction.max.timeout.ms), or make batches smaller with maxOffsetsPerTrigger; then start again"
            ) from error

    def _abort(self) -> None:
        """As well as it can be done: a transaction that stays open is aborted by the next owner or the time-out."""
        try:
            self._owner.end(commit=False)
        except KafkaError as error:
            log.warning("the transaction could not be aborted now: %s", error)


def is_final(error: Exception) -> bool:
    """Errors of the query itself: running the batch again would only repeat them."""
    return isinstance(error, OptionError) or BadRowError.__name__ in str(error)
