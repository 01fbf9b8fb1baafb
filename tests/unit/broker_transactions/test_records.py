"""Records of the transaction log, and what an idle id costs."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.broker.transactions.records import (
    KEY_VERSION,
    VALUE,
    VALUE_VERSION,
    Value,
    decode_key,
    decode_value,
    decode_value_by_table,
    encode_key,
    encode_value,
    pack,
    unpack,
    updated_ms_of,
)
from semel.broker.transactions.states import IDLE, Transaction, TxnState
from semel.protocol.errors import DecodeError
from semel.protocol.messages.internal_topics import TRANSACTION_LOG_KEY, PartitionsSchema, TransactionLogKey

int64 = st.integers(-1, 2**63 - 1)
epochs = st.integers(-1, 2**15 - 1)
transactions = st.builds(
    Transaction,
    producer_id=int64,
    previous_producer_id=int64,
    next_producer_id=int64,
    epoch=epochs,
    last_epoch=epochs,
    next_epoch=epochs,
    timeout_ms=st.integers(1, 2**31 - 1),
    state=st.sampled_from([state for state in TxnState if state is not TxnState.EMPTY]),
    partitions=st.frozensets(st.tuples(st.text(min_size=1, max_size=9), st.integers(0, 999)), max_size=6),
    started_ms=int64,
    updated_ms=int64,
    client_version=st.sampled_from([0, 2]),
)

VERSION = struct.Struct(">h")


def encode_key_by_table(transactional_id: str) -> bytes:
    return VERSION.pack(KEY_VERSION) + TRANSACTION_LOG_KEY.encode(TransactionLogKey(transactional_id), KEY_VERSION)


def encode_value_by_table(txn: Transaction) -> bytes:
    """The plain way, as the schema of the record has it."""
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(txn.partitions):
        by_topic.setdefault(topic, []).append(partition)
    value = Value(
        producer_id=txn.producer_id,
        previous_producer_id=txn.previous_producer_id,
        next_producer_id=txn.next_producer_id,
        producer_epoch=txn.epoch,
        transaction_timeout_ms=txn.timeout_ms,
        transaction_status=txn.state,
        transaction_partitions=(
            None if txn.state is TxnState.EMPTY else [PartitionsSchema(topic, ids) for topic, ids in by_topic.items()]
        ),
        transaction_last_update_timestamp_ms=txn.updated_ms,
        transaction_start_timestamp_ms=txn.started_ms,
        client_transaction_version=txn.client_version,
        last_producer_epoch=txn.last_epoch,
        next_producer_epoch=txn.next_epoch,
    )
    return VERSION.pack(VALUE_VERSION) + VALUE.encode(value, VALUE_VERSION)


@given(transactions)
def test_a_value_survives_the_log(txn: Transaction):
    assert decode_value(encode_value(txn)) == txn


@given(transactions, st.booleans())
def test_the_fast_encoder_writes_what_the_table_says(txn: Transaction, is_empty: bool):
    if is_empty:
        txn = txn._replace(state=TxnState.EMPTY, partitions=frozenset())
    value = encode_value(txn)
    assert value == encode_value_by_table(txn)
    assert decode_value(value) == decode_value_by_table(value) == txn


@given(transactions, st.sampled_from(sorted(IDLE)))
def test_an_idle_id_survives_packing(txn: Transaction, state: TxnState):
    idle = txn._replace(state=state, partitions=frozenset(), next_producer_id=-1, next_epoch=-1)
    assert unpack(pack(idle)) == idle
    assert updated_ms_of(pack(idle)) == idle.updated_ms


def test_a_busy_id_is_not_packed():
    txn = Transaction(1, 1, -1, 0, -1, 1, TxnState.ONGOING, frozenset({("a", 0)}), 0, 0, 0)
    with pytest.raises(AssertionError, match="Ongoing"):
        pack(txn)


@given(st.text())
def test_a_key_is_the_transactional_id(text: str):
    assert decode_key(encode_key(text)) == text
    assert encode_key(text) == encode_key_by_table(text)


def test_records_of_newer_brokers_are_left_alone_or_refused_by_name():
    assert decode_key(b"\x00\x07whatever") is None
    with pytest.raises(DecodeError, match="version 7"):
        decode_value(b"\x00\x07")
    with pytest.raises(DecodeError, match="says its id takes 9 bytes"):
        decode_key(b"\x00\x00\x00\x09short")


def test_tags_of_newer_brokers_are_skipped():
    txn = Transaction(7, 7, -1, 3, 2, 60_000, TxnState.COMPLETE_ABORT, frozenset(), 5, 6, 2)
    value = encode_value(txn)
    tags_at = len(value) - (1 + 10 + 4 + 5)
    assert value[tags_at] == 3
    with_more = value[:tags_at] + b"\x04" + value[tags_at + 1 :] + b"\xff\x7f\x01!"
    assert decode_value(with_more) == txn


def test_an_empty_id_has_null_partitions_as_kafka_writes_it():
    txn = Transaction(7, 7, -1, 3, 2, 60_000, TxnState.EMPTY, frozenset(), -1, 1_700_000_000_000, 0)
    value = encode_value(txn)
    assert value[:2] == b"\x00\x01"
    assert value[2:17] == (7).to_bytes(8, "big") + (3).to_bytes(2, "big") + (60_000).to_bytes(4, "big") + b"\x00"
    assert value[17] == 0  # compact null
    assert decode_value(value) == txn


MEASURE = """
import resource, sys
from semel.broker.transactions.records import ProducerIds, TransactionalIds, TransactionRecord
from semel.broker.transactions.states import Transaction, TxnState
def used_kb(): return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
ids, count = TransactionalIds(ProducerIds(range)), 200_000
before = used_kb()
for n in range(count):
    txn = Transaction(n, n, -1, 1, -1, 60_000, TxnState.COMPLETE_COMMIT, frozenset(), n, n, 0)
    ids.replay(0, n, TransactionRecord(f"pipeline-7-task-{n:08d}", txn), None)
print((used_kb() - before) * 1024 // count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_one_time_ids_fit_into_a_quarter_of_a_gigabyte():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) <= 256, f"an idle id takes {done.stdout.strip()} bytes"
