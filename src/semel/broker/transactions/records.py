"""A transaction as bytes: a record of `__transaction_state` in Kafka's format, or packed for an idle id."""

from __future__ import annotations

import struct
from typing import Annotated

from semel.broker.transactions.states import (
    NO_EPOCH,
    NO_PARTITIONS,
    NO_PRODUCER_ID,
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
