"""B6: routing. Coordinator partition = abs(java hash of the transactional id) % partitions of the transaction log."""

from __future__ import annotations

import pytest

from semel.local.brokers import SemelBroker
from tests.support.transactional import transactional


def java_hash(text: str) -> int:
    """String.hashCode as the Java language defines it, independent of the product."""
    units = text.encode("utf-16-be")
    value = 0
    for at in range(0, len(units), 2):
        value = (31 * value + int.from_bytes(units[at : at + 2], "big")) % 2**32
    return value - 2**32 if value >= 2**31 else value


@pytest.mark.parametrize("partitions", [50, 7])
def test_every_id_is_kept_where_kafka_would_look_for_it(tmp_path, partitions: int):
    ids = ["first-id", "orders-0", "polygenelubricants", "Größe-\N{SNOWMAN}", "\N{ROCKET}", "x" * 300]
    options = ("--set", f"transaction.state.log.num.partitions={partitions}")
    with SemelBroker(tmp_path / "broker", *options) as broker:
        for id_ in ids:
            transactional(broker.bootstrap, id_)
        broker.kill()
        assert java_hash("polygenelubricants") == -(2**31), "the one whose absolute value does not exist"
        broker.start()
        for id_ in ids:
            value = java_hash(id_)
            expected = (0 if value == -(2**31) else abs(value)) % partitions
            found = [
                int(path.parent.name.rpartition("-")[2])
                for path in broker.directory.glob("__transaction_state-*/*.log")
                if id_.encode() in path.read_bytes()
            ]
            assert found == [expected], id_
        assert len(list(broker.directory.glob("__transaction_state-*"))) == partitions
        for id_ in ids:
            transactional(broker.bootstrap, id_)  # the restarted broker finds them all again
