"""The producer: rows with `send`, Arrow tables with `send_table`, transactions.

    with Producer(bootstrap_servers="localhost:9092") as producer:
        place = producer.send("orders", b"value", key=b"key").result()

    producer = Producer({"bootstrap.servers": "localhost:9092", "transactional.id": "billing"})
    producer.init_transactions()
    with producer.transaction() as txn:
        txn.send("orders", b"value")

A thread of its own sends while the program does something else; it starts with the first record and ends with `close`.
If the producer is collected without that, the thread sends what is left and ends: every delivery gets its result.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from semel.client.cluster import Cluster
from semel.client.errors import (
    ClosedError,
    FatalError,
    IllegalStateError,
    KafkaError,
)
from semel.client.immediate import Closing, blocked, run
from semel.client.metrics import ProducerMetrics
from semel.client.producer.base import (
    ProducerBase,
    TransactionBlock,
    unknown_partition,
)
from semel.client.producer.batches import RECORD_OVERHEAD_BYTES, Headers, Row
from semel.client.producer.deliveries import Delivery, TableDelivery, TableShare
from semel.client.producer.sender import Sender
from semel.client.settings import ProducerSettings
from semel.client.timing import Deadline, timeout_in_ms
from semel.client.types import GroupMetadata, OffsetAndMetadata, checked_offsets, number_of
from semel.protocol.partitioning import partition_for_key

if TYPE_CHECKING:
    from semel.client.producer.tables import TableEncoder

log = logging.getLogger("semel.client")

STOP_S = 0.2  # how long close() waits for its thread even if its time is over
EXIT_S = 5.0  # how long a program that ends waits for producers that it has not closed


class Producer(ProducerBase, Closing):
    """Writes records to topics. Threads may share it; processes may not."""

    def __init__(
        self,
        options: Mapping[str, Any] | ProducerSettings | None = None,
        /,
        *,
        key_serializer: Any = None,
        value_serializer: Any = None,
        **keywords: Any,
    ) -> None:
        """Options by Kafka's names: `{"linger.ms": 5}` or `linger_ms=5`. The serializers are functions that make bytes
        or text of a key or value that is not None; `send` applies them, tables hold bytes."""
        super().__init__(options, key_serializer, value_serializer, keywords)
        self._cluster = Cluster(self.settings)
        self._sender: Sender = self._make_sender(
            self._cluster.calls,
            lambda identity, coordinator: Sender(
                self.settings, self._cluster, identity, coordinator, self._forget_count()
            ),
        )
        self._thread: _SenderThread | None = None
        self._start_lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    # --- sending ---
    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int | None = None,
        timestamp: int | datetime | None = None,
        headers: Headers | None = None,
    ) -> Delivery:
        """Puts one record on its way and returns at once; `result()` of the delivery waits for its offset.

        Key and value are bytes, text or None (for a value: the key's tombstone), or anything else that the producer has
        a serializer for.

        The partition is the given one, or the key's (as the Java client hashes it), or one that is kept until a batch
        is full. `timestamp` is in milliseconds since 1970, or a datetime with a time zone; now by default. Blocks
        up to max.block.ms while memory is full or the topic is not known yet.
        """
        self._check_usable()
        transaction = self._sender.core.identity.transaction_number
        now_s = time.time()
        if (  # most records, without the cost of a call
            type(value) is bytes
            and (key is None or type(key) is bytes)
            and timestamp is None
            and headers is None
            and len(value) + (len(key) if key else 0) < self._packer.small_bytes
        ):
            row: Row = (key, value, int(now_s * 1000), ())
            size = RECORD_OVERHEAD_BYTES + len(value) + (len(key) if key else 0)
        else:
            row, size = self._packer.pack(topic, value, key, timestamp, headers, now_s)
        counted = self._partition_counts.get(topic)
        count = counted[0] if counted is not None and now_s < counted[1] else self._count_partitions(topic, now_s)
        if partition is None:
            if row[0] is not None:
                partition = partition_for_key(row[0], count)
            else:
                partition = self._sticky.partition(topic, count, size)
        elif type(partition) is not int or not 0 <= partition < count:
            partition = self._checked_partition(topic, partition, count)
        return self._sender.append(topic, partition, row, size, transaction)

    def send_table(self, topic: str, table: Any) -> TableDelivery:
        """Puts a whole Arrow table on its way: columns `value`, `key`, `headers`, `timestamp`, `partition`, of which
        `value` or `key` must be there. Whole columns become batches; the partition rules are those of `send`. Keys and
        values are bytes or text: the serializers are not applied.

        Returns when the last batch is handed over, which may wait for memory (max.block.ms). Tables of less than a
        batch linger (linger.ms) and share batches with those that follow.
        """
        from semel.client.producer.tables import checked_table

        self._check_usable()
        transaction = self._sender.core.transaction_number
        checked = checked_table(table)
        now_s = time.time()
        encoder = self._table_encoder(
            topic, checked, self._known_count(topic, now_s) or self._count_partitions(topic, now_s)
        )
        add = self._share if encoder.is_small else self._hand_over
        shares = list(add(topic, encoder, transaction))
        return TableDelivery(shares, checked.num_rows, self._sender.changed)

    def _hand_over(self, topic: str, encoder: TableEncoder, transaction: int) -> Iterator[TableShare]:
        """Encodes a table to batches of its own."""
        for encoded in encoder.batches():
            batch = self._sender.new_batch(topic, encoded.partition, encoded.data, encoded.record_count)
            self._sender.add(batch, transaction)
            yield TableShare(batch, 0, batch.count, encoded.rows)

    def _share(self, topic: str, encoder: TableEncoder, transaction: int) -> Iterator[TableShare]:
        """Leaves a small table to linger, so that the next ones go into the same batches."""
        for partition, part, rows in encoder.parts():
            batch, first = self._sender.append_table(topic, partition, part, transaction)
            yield TableShare(batch, first, part.row_count, rows)

    flush = blocked(ProducerBase._flush)
    partitions_for = blocked(ProducerBase._partitions_for)
    init_transactions = blocked(ProducerBase._init_transactions)
    begin_transaction = blocked(ProducerBase._begin_transaction)
    prepare_transaction = blocked(ProducerBase._prepare_transaction)
    complete_transaction = blocked(ProducerBase._complete_transaction)
    commit_transaction = blocked(ProducerBase._commit_transaction)
    abort_transaction = blocked(ProducerBase._abort_transaction)

    def metrics(self) -> ProducerMetrics:
        """What it has sent so far, and what is on its way. Any thread may call it, also after close()."""
        self._check_process()
        with self._sender.lock:
            return self._metrics(self._sender.core)

    # --- transactions ---
    @timeout_in_ms
    def send_offsets_to_transaction(
        self,
        offsets: Mapping[tuple[str, int], OffsetAndMetadata | int],
        group_metadata: GroupMetadata | str,
        *,
        timeout_ms: float | None = None,
    ) -> None:
        """A consumer group's offsets are committed with the transaction. `group_metadata` comes from the consumer
        (`consumer.group_metadata()`): it lets the broker refuse a member that lost its partitions."""
        group = GroupMetadata.for_transaction(group_metadata)
        run(self._transactional().send_offsets(checked_offsets(offsets), group, self._block_s(timeout_ms)))

    def transaction(self) -> ProducerTransaction:
        """`with producer.transaction() as txn:` commits at the end, and aborts if the block raises or the commit could
        not be sent in time."""
        self._transactional()
        return ProducerTransaction(self)

    # --- end ---
    @timeout_in_ms
    def close(self, *, timeout_ms: float | None = None) -> None:
        """Sends what is left (up to the timeout), aborts an open transaction, ends the thread. May be called twice."""
        if os.getpid() != self._owner_pid:
            self._closed = True
            return
        with self._start_lock:  # from here on no thread is started
            if self._closed:
                return
            self._closed = True
        deadline = self._longest(timeout_ms)
        if self._thread is threading.current_thread():
            deadline = Deadline(0)
            log.warning("close() was called by a delivery callback, which cannot wait: what is on its way fails")
        try:
            run(self._finish_work(deadline))
        finally:
            self._shut_down(deadline)

    def _shut_down(self, deadline: Deadline) -> None:
        if self._thread is not None and self._finalizer is not None:
            self._finalizer.detach()
            self._thread.stop()
        self._cluster.close()  # which ends the calls that the thread may wait in
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(deadline.remaining_s(), STOP_S))
        self._sender.fail_all(ClosedError("the producer was closed before this record was acknowledged"))
        if self._thread is None:
            self._sender.close()

    # --- checks ---
    def _check_open(self) -> None:
        super()._check_open()
        self._check_process()

    def _check_process(self) -> None:
        if os.getpid() != self._owner_pid:
            raise IllegalStateError(
                "this producer was made before the process was forked; make one in each process from its `settings`"
            )

    def _check_usable(self) -> None:
        if self._closed or os.getpid() != self._owner_pid:
            self._check_open()
        if self._transactions is not None:
            self._transactions.transaction.check_accepts()
        if self._thread is None:
            self._start()
        elif self._thread.crash is not None:
            raise FatalError(f"the sending thread ended: {self._thread.crash!r}; close this producer") from (
                self._thread.crash
            )

    def _start(self) -> None:
        with self._start_lock:
            self._check_open()  # another thread may have closed it meanwhile
            if self._thread is None:
                thread = _SenderThread(self._sender)
                self._finalizer = weakref.finalize(self, thread.finish)
                self._finalizer.atexit = False  # see _finish_all
                thread.start()
                self._thread = thread

    def _count_partitions(self, topic: str, now_s: float) -> int:
        return self._remember_count(topic, len(self._cluster.partitions(topic, self._block_s(None))), now_s)

    def _checked_partition(self, topic: str, partition: int, count: int) -> int:
        """A number of another type, as columns give it, as one of Python's. A partition that was not there when the
        topic was last looked at may be new."""
        number = number_of(partition)
        if number >= count:
            self._cluster.metadata.forget(topic)
            count = self._count_partitions(topic, time.time())
        if 0 <= number < count:
            return number
        raise unknown_partition(topic, partition, count)


class ProducerTransaction(TransactionBlock):
    """One transaction as a `with` block; what it offers goes to its producer."""

    def __init__(self, producer: Producer) -> None:
        super().__init__(producer)
        self.send = self._of_block(producer.send)
        self.send_table = self._of_block(producer.send_table)
        self.send_offsets = self._of_block(producer.send_offsets_to_transaction)

    def __enter__(self) -> Self:
        run(self._enter())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        run(self._leave(error))


class _SenderThread(threading.Thread):
    """Runs the sender until it is stopped, or finished and nothing is left to send. Has no reference to the
    producer, so that a forgotten one can be collected."""

    def __init__(self, sender: Sender) -> None:
        super().__init__(name="semel-producer", daemon=True)
        self._sender = sender
        self._stopping = False
        self._finishing = False
        self._owner_pid = os.getpid()
        self.crash: BaseException | None = None

    def run(self) -> None:
        sender = self._sender
        sender.changed.sending_thread = threading.get_ident()
        end: KafkaError = ClosedError("the producer was closed before this record was acknowledged")
        _running.add(self)
        try:
            while not self._stopping and not self._finishing:
                sender.step()
            if self._finishing:
                sender.start_flush()
            while not self._stopping and sender.used_bytes:
                sender.step()
        except ClosedError:
            pass
        except BaseException as error:
            self.crash = error
            end = FatalError(f"the sending thread ended: {error!r}")
            log.exception("the sending thread ended")
        finally:
            _running.discard(self)
            sender.fail_all(end)
            sender.changed.sending_thread = None  # the number may be given to another thread
            if self._finishing:
                sender.cluster.close()  # it is not shared
            sender.close()

    def finish(self) -> None:
        """The thread sends what is left and ends. Called by the garbage collector, in any thread and whatever that
        holds: so it does not wait, and the one lock that it takes is held for a system call at most."""
        if os.getpid() == self._owner_pid:  # a forked child has no such thread, and the pipe is the parent's
            self._finishing = True
            self._sender.interrupt()

    def stop(self) -> None:
        """Ends the thread after the step that it is in."""
        self._stopping = True
        self._sender.interrupt()


_running: set[_SenderThread] = set()


@atexit.register
def _finish_all() -> None:
    """A program that ends without close() has its last records sent all the same, if that is quickly done."""
    deadline = Deadline(EXIT_S)
    threads = list(_running)
    for thread in threads:
        thread.finish()
    for thread in threads:
        thread.join(deadline.remaining_s())
        if thread.is_alive():
            log.warning("records were not acknowledged before the program ended; call close() of the producer")
