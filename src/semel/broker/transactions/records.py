"""A transaction as bytes: a record of `__transaction_state` in Kafka's format, or packed for an idle id."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

from semel import faults
from semel.broker.coordinator_runtime import KeyValue
from semel.broker.transactions.states import (
    IDLE,
    NO_EPOCH,
    NO_PARTITIONS,
    NO_PRODUCER_ID,
    NOT_STORED,
    TopicPartition,
    Transaction,
    TxnState,
)
from semel.protocol.api import Format
from semel.protocol.compiler import write_uvarint
from semel.protocol.errors import DecodeError
from semel.protocol.messages.internal_topics import PartitionsSchema, TransactionLogValue
from semel.protocol.schema import int16, tag

KEY_VERSION = 0
VALUE_VERSION = 1
LAST_EPOCH_TAG = 10_000
_VERSION = struct.Struct(">h")
_KEY_HEAD = struct.Struct(">hh")  # version, bytes of the id


class Value(TransactionLogValue):
    """Kafka's value and one field more. Kafka's readers skip tags that they do not know.

    Kafka forgets the last epoch when its coordinator restarts, and then takes a late retry of InitProducerId for a
    zombie. With the field, a retry stays a retry.
    """

    last_producer_epoch: Annotated[int16, tag(LAST_EPOCH_TAG, "1+")] = -1


VALUE = Format(Value, "0-1", flexible="1+")


def encode_key(transactional_id: str) -> bytes:
    """By hand, for speed: TRANSACTION_LOG_KEY says the same in the words of the schema."""
    name = transactional_id.encode()
    return _KEY_HEAD.pack(KEY_VERSION, len(name)) + name


def decode_key(data: bytes) -> str | None:
    """The transactional id; None for a key of a version that a newer broker may have written."""
    (version,) = _VERSION.unpack_from(data)
    if version != KEY_VERSION:
        return None
    (length,) = _VERSION.unpack_from(data, 2)
    if len(data) != 4 + length:
        raise DecodeError(f"a key of the transaction log says its id takes {length} bytes, but {len(data) - 4} follow")
    return str(data[4:], "utf-8")


def encode_value(txn: Transaction) -> bytes:
    """By hand, for speed: VALUE says the same in the words of the schema."""
    parts = [
        _HEAD.pack(VALUE_VERSION, txn.producer_id, txn.epoch, txn.timeout_ms, txn.state),
        _partitions_of(txn),
        _TIMES.pack(txn.updated_ms, txn.started_ms),
        _encode_tags(txn),
    ]
    return b"".join(parts)


_HEAD = struct.Struct(">hqhib")  # version, producer id, epoch, timeout, state
_TIMES = struct.Struct(">qq")  # last update, start
_INDEX = struct.Struct(">i")
_INT64_TAG = struct.Struct(">BBq")  # number of the tag, its size, a producer id
_INT16_TAG = struct.Struct(">BBh")
_LAST_EPOCH_NUMBER = bytes((LAST_EPOCH_TAG & 0x7F | 0x80, LAST_EPOCH_TAG >> 7))
_LAST_EPOCH_TAG = struct.Struct(">2sBh")  # the same with a number that takes two bytes


def _partitions_of(txn: Transaction) -> bytes:
    if txn.state is TxnState.EMPTY:
        return b"\0"  # null
    return _encode_partitions(txn.partitions) if txn.partitions else b"\1"


def _encode_partitions(partitions: frozenset[TopicPartition]) -> bytes:
    if len(partitions) == 1:  # nearly all
        ((topic, partition),) = partitions
        name = topic.encode()
        if len(name) < 0x7F:
            return b"".join((b"\2", bytes((len(name) + 1,)), name, b"\2", _INDEX.pack(partition), b"\0"))
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        by_topic.setdefault(topic, []).append(partition)
    parts = [write_uvarint(len(by_topic) + 1)]
    for topic, indexes in by_topic.items():
        name = topic.encode()
        numbers = struct.pack(f">{len(indexes)}i", *indexes)
        parts += (write_uvarint(len(name) + 1), name, write_uvarint(len(indexes) + 1), numbers, b"\0")
    return b"".join(parts)


def _encode_tags(txn: Transaction) -> bytes:
    """Tags in the order of their numbers, each only where it differs from its default."""
    tags = []
    if txn.previous_producer_id != NO_PRODUCER_ID:
        tags.append(_INT64_TAG.pack(0, 8, txn.previous_producer_id))
    if txn.next_producer_id != NO_PRODUCER_ID:
        tags.append(_INT64_TAG.pack(1, 8, txn.next_producer_id))
    if txn.client_version != 0:
        tags.append(_INT16_TAG.pack(2, 2, txn.client_version))
    if txn.next_epoch != NO_EPOCH:
        tags.append(_INT16_TAG.pack(3, 2, txn.next_epoch))
    if txn.last_epoch != NO_EPOCH:
        tags.append(_LAST_EPOCH_TAG.pack(_LAST_EPOCH_NUMBER, 2, txn.last_epoch))
    return bytes((len(tags),)) + b"".join(tags)


def decode_value(data: bytes) -> Transaction:
    """A record's value. Those of idle ids, which are nearly all that a restart reads, are taken apart by hand."""
    if len(data) > _TAGS_AT and data[:2] == _VERSION_1 and data[_PARTITIONS_AT] <= 1:
        idle = _decode_idle(data)
        if idle is not None:
            return idle
    return decode_value_by_table(data)


_VERSION_1 = _VERSION.pack(1)
_PARTITIONS_AT = _HEAD.size  # the number of topics plus one, or 0 for null, in one byte if there are none
_TIMES_AT = _PARTITIONS_AT + 1
_TAGS_AT = _TIMES_AT + _TIMES.size


def _decode_idle(data: bytes) -> Transaction | None:
    """A value without partitions; None if it has tags in a form that only the table knows."""
    _, producer_id, epoch, timeout_ms, state = _HEAD.unpack_from(data)
    updated_ms, started_ms = _TIMES.unpack_from(data, _TIMES_AT)
    previous = following = NO_PRODUCER_ID
    client_version, last_epoch = 0, NO_EPOCH
    at = _TAGS_AT + 1
    for _ in range(data[_TAGS_AT]):
        tag_and_size = data[at : at + 2]
        if tag_and_size == b"\0\x08":
            _, _, previous = _INT64_TAG.unpack_from(data, at)
            at += _INT64_TAG.size
        elif tag_and_size == b"\x01\x08":
            _, _, following = _INT64_TAG.unpack_from(data, at)
            at += _INT64_TAG.size
        elif tag_and_size == b"\x02\x02":
            _, _, client_version = _INT16_TAG.unpack_from(data, at)
            at += _INT16_TAG.size
        elif tag_and_size == _LAST_EPOCH_NUMBER and data[at + 2] == 2:
            *_, last_epoch = _LAST_EPOCH_TAG.unpack_from(data, at)
            at += _LAST_EPOCH_TAG.size
        else:
            return None
    if at != len(data):
        return None
    owner = (producer_id, previous, following, epoch, last_epoch)
    return Transaction(*owner, timeout_ms, TxnState(state), NO_PARTITIONS, started_ms, updated_ms, client_version)


def decode_value_by_table(data: bytes) -> Transaction:
    """The plain way, as the schema of the record has it."""
    (version,) = _VERSION.unpack_from(data)
    if version not in VALUE.valid:
        raise DecodeError(f"a record of the transaction log has version {version}; this broker reads {VALUE.valid}")
    value = VALUE.decode(data, version, 2)
    return Transaction(
        producer_id=value.producer_id,
        previous_producer_id=value.previous_producer_id,
        next_producer_id=value.next_producer_id,
        epoch=value.producer_epoch,
        last_epoch=value.last_producer_epoch,
        timeout_ms=value.transaction_timeout_ms,
        state=TxnState(value.transaction_status),
        partitions=_partitions(value.transaction_partitions),
        started_ms=value.transaction_start_timestamp_ms,
        updated_ms=value.transaction_last_update_timestamp_ms,
        client_version=value.client_transaction_version,
        next_epoch=value.next_producer_epoch,
    )


def _partitions(topics: list[PartitionsSchema] | None) -> frozenset[TopicPartition]:
    if not topics:
        return NO_PARTITIONS
    return frozenset((topic.topic, partition) for topic in topics for partition in topic.partition_ids)


# --- packed: what an id costs in memory while nothing happens to it -------------------------------------------------

# producer id, previous one, started, updated, epoch, last epoch, timeout, state, client version
_PACKED = struct.Struct("<qqqqhhibb")
_UPDATED = struct.Struct("<q")
_UPDATED_AT = 24


def pack(txn: Transaction) -> bytes:
    """An idle id (no partitions, no next producer id or epoch) in 42 bytes."""
    if txn.partitions or txn.next_producer_id != NO_PRODUCER_ID or txn.is_kept:
        raise AssertionError(f"a transaction in state {txn.state.label} is not idle and cannot be packed")
    return _PACKED.pack(
        txn.producer_id,
        txn.previous_producer_id,
        txn.started_ms,
        txn.updated_ms,
        txn.epoch,
        txn.last_epoch,
        txn.timeout_ms,
        txn.state,
        txn.client_version,
    )


def unpack(data: bytes) -> Transaction:
    producer_id, previous, started_ms, updated_ms, epoch, last_epoch, timeout_ms, state, version = _PACKED.unpack(data)
    owner = (producer_id, previous, NO_PRODUCER_ID, epoch, last_epoch)
    return Transaction(*owner, timeout_ms, TxnState(state), NO_PARTITIONS, started_ms, updated_ms, version)


def updated_ms_of(data: bytes) -> int:
    """When a packed id was last used, without unpacking the rest."""
    updated_ms: int = _UPDATED.unpack_from(data, _UPDATED_AT)[0]
    return updated_ms


# --- Producer ids, and all transactional ids of the broker by the records of `__transaction_state` ---
#
# A producer id is never given out twice: a block is durable before its first id is used.
#
# A million one-time transactional ids is a day's work of some pipelines. An id that nothing happens to is its name
# and 42 packed bytes; only while a transaction runs, or a transition is being written, there is an object for it.


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
