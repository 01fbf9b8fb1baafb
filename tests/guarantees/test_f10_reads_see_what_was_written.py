"""F10: a write returns a token, and a read with that token waits until the write is visible in its projection.

Fault: an open transaction of another producer keeps the events from all readers, while the reply is there already.
"""

from __future__ import annotations

import threading

import pytest

from semel import Entities, TimedOutError, wait_for_version
from semel.client.producer import Producer
from semel.protocol.partitioning import partition_for_key
from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_a_read_with_the_token_waits_for_the_write(cluster: Cluster) -> None:
    bootstrap, name = cluster.bootstrap, cluster.unique("accounts")
    with Entities(name, bootstrap_servers=bootstrap) as entities:
        entities.create(partitions=2)
        owner = entities.owner(fold=lambda total, event: (total or 0) + int(event), snapshot_every=2)
        thread = threading.Thread(target=owner.run)
        thread.start()
        try:
            _check_reads(entities, bootstrap)
        finally:
            owner.stop()
            thread.join(PATIENCE_S)


def _check_reads(entities: Entities, bootstrap: str) -> None:
    first = entities.append("e", 0, [b"5", b"6"])
    with (
        entities.view(fold=lambda total, event: (total or 0) + int(event)) as view,
        Producer(bootstrap_servers=bootstrap, transactional_id=f"{entities.name}-other") as other,
    ):
        assert view.read("e", after=first.token) == (2, 11)
        other.init_transactions()
        other.begin_transaction()
        place = partition_for_key(b"e", 2)
        other.send(entities.name, b"not an event", partition=place).result()
        second = entities.append("e", 2, [b"100"])
        assert view.read("e").version == 2, "without the token it is what this view has seen: too little"
        with pytest.raises(TimedOutError, match=r"has version 2 in this view, version 3 was not seen within 200 ms"):
            view.read("e", after=second.token, timeout_ms=200)
        with pytest.raises(TimedOutError, match="the projection has version 2"):
            wait_for_version(second.token, lambda entity: view.read(entity).version, timeout_ms=200)
        threading.Timer(0.1, other.abort_transaction).start()
        assert view.read("e", after=second.token) == (3, 111)
        assert wait_for_version(second.token, lambda entity: view.read(entity).version) == 3
        with pytest.raises(ValueError, match="the token is of 'e'"):
            view.read("f", after=second.token)
    with entities.view() as fresh:  # of the events alone
        assert fresh.read("e") == (3, [b"5", b"6", b"100"])
        assert fresh.read("no such") == (0, None) or fresh.read("no such") == (0, [])
    with entities.view(fold=lambda total, event: (total or 0) + int(event)) as snapshot:
        assert snapshot.read("e") == (3, 111)
