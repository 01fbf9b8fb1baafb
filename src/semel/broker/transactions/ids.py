"""Producer ids, and all transactional ids of the broker as the records of `__transaction_state` tell them.

A producer id is never given out twice: a block is durable before its first id is used.

A million one-time transactional ids is a day's work of some pipelines. An id that nothing happens to is its name and 42
packed bytes; only while a transaction runs, or a transition is being written, there is an object for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import NamedTuple

from semel import faults
from semel.broker.coordinator_runtime import KeyValue
from semel.broker.transactions.records import (
    decode_key,
    decode_value,
    encode_key,
    encode_value,
    pack,
    unpack,
    updated_ms_of,
)
from semel.broker.transactions.states import IDLE, NO_EPOCH, NOT_STORED, Transaction

BLOCK_SIZE = 1000


class ProducerIds:
    """Hands out ids. After a crash the rest of the block is lost, as on Kafka; there are 2^63 ids."""

    def __init__(self, reserve: Callable[[int], range]) -> None:
        """`reserve(count)` gives ids that were never given out, durably (Broker.reserve_producer_ids)."""
        self._reserve = reserve
        self._block = range(0)
        self.floor = 0

    def skip_to(self, first: int) -> None:
        """Never hands out an id below `first`: for ids found in the log, should the store have been lost."""
        self.floor = max(self.floor, first)

    def peek(self) -> int:
        """The id that `take` will give."""
        while not self._block or self._block[-1] < self.floor:
            self._block = self._next_block()
        return max(self._block[0], self.floor)

    def take(self) -> int:
        producer_id = self.peek()
        self._block = range(producer_id + 1, self._block.stop)
        return producer_id

    def _next_block(self) -> range:
        if faults.armed:
            faults.hit("producer_ids.before_store")
        size = max(BLOCK_SIZE, self.floor - self._block.stop + BLOCK_SIZE)
        block = self._reserve(size)
        if faults.armed:
            faults.hit("producer_ids.after_store")
        return block


class TransactionRecord(NamedTuple):
    """The new value of an id; None forgets it."""

    transactional_id: str
    value: Transaction | None


class ActiveId:
    """An id with an open transaction or a pending transition."""

    __slots__ = ("_settled", "id", "is_pending", "txn")

    def __init__(self, transactional_id: str, txn: Transaction) -> None:
        self.id = transactional_id
        self.txn = txn
        self.is_pending = False
        self._settled: asyncio.Future[None] | None = None

    def settled(self) -> asyncio.Future[None]:
        """Done when the transition that is pending now is over."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        return self._settled

    def release(self) -> None:
        self.is_pending = False
        if self._settled is not None:
            self._settled.set_result(None)
            self._settled = None


class TransactionalIds:
    """The state of the transaction coordinator (`CoordinatorState`): values change by `replay` alone.

    Whether a transition is pending is not persistent: `hold` and `release`.
    """

    def __init__(self, producer_ids: ProducerIds) -> None:
        self._producer_ids = producer_ids
        self._active: dict[str, ActiveId] = {}
        self._idle: dict[str, bytes] = {}

    # --- persistent ---------------------------------------------------------------------------------------------------
    def encode(self, record: TransactionRecord) -> KeyValue:
        return encode_key(record.transactional_id), None if record.value is None else encode_value(record.value)

    def decode(self, offset: int, key: bytes, value: bytes | None) -> TransactionRecord | None:
        transactional_id = decode_key(key)
        if transactional_id is None:
            return None
        return TransactionRecord(transactional_id, None if value is None else decode_value(value))

    def replay(self, partition: int, offset: int, record: TransactionRecord, producer_id: int | None) -> None:
        transactional_id, txn = record
        floor = self._producer_ids.floor
        if txn is not None and (txn.producer_id >= floor or txn.next_producer_id >= floor):
            self._producer_ids.skip_to(max(txn.producer_id, txn.next_producer_id) + 1)
        active = self._active.get(transactional_id)
        if active is not None and active.is_pending:
            active.txn = NOT_STORED if txn is None else txn
            return
        self._active.pop(transactional_id, None)
        self._idle.pop(transactional_id, None)
        if txn is None:
            return
        if txn.state in IDLE:
            self._idle[transactional_id] = pack(txn)
        else:
            self._active[transactional_id] = ActiveId(transactional_id, txn)

    def end_transaction(self, partition: int, producer_id: int, commit: bool) -> None:
        """The transaction log has no transactions of its own."""

    def clear(self, partition: int, has: Callable[[str], bool]) -> None:
        for transactional_id in [*self._active, *self._idle]:
            if has(transactional_id):
                self.replay(partition, -1, TransactionRecord(transactional_id, None), None)

    # --- transient ----------------------------------------------------------------------------------------------------
    def hold(self, active: ActiveId) -> None:
        """A transition starts: until `release` the id is pending."""
        active.is_pending = True
        self._idle.pop(active.id, None)
        self._active[active.id] = active

    def release(self, active: ActiveId) -> None:
        """The transition is over. An id that was never stored, or is no more, is dropped."""
        if active.txn.state in IDLE:
            self._active.pop(active.id, None)
            if active.txn.epoch != NO_EPOCH:
                self._idle[active.id] = pack(active.txn)
        active.release()

    # --- reading ------------------------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    def active(self) -> list[ActiveId]:
        return list(self._active.values())

    def find(self, transactional_id: str) -> Transaction | None:
        """The value of an id, to look at."""
        active = self._active.get(transactional_id)
        if active is not None:
            return active.txn
        packed = self._idle.get(transactional_id)
        return unpack(packed) if packed is not None else None

    def get(self, transactional_id: str) -> ActiveId | None:
        """The id as an object, to decide about. An idle one is not kept as such: see `hold`."""
        active = self._active.get(transactional_id)
        if active is None:
            packed = self._idle.get(transactional_id)
            if packed is not None:
                active = ActiveId(transactional_id, unpack(packed))
        return active

    def items(self) -> Iterator[tuple[str, Transaction]]:
        for transactional_id, active in list(self._active.items()):
            yield transactional_id, active.txn
        for transactional_id, packed in list(self._idle.items()):
            yield transactional_id, unpack(packed)

    def unused_since(self, limit_ms: int) -> Iterator[str]:
        """Idle ids whose last use is this long ago. The ids are those of the moment: look again before acting."""
        return (id_ for id_, packed in list(self._idle.items()) if updated_ms_of(packed) <= limit_ms)
