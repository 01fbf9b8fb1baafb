"""A1: a producer gets a 64-bit id; every batch carries id, epoch and a per-partition sequence that starts at 0."""

from __future__ import annotations

from collections import defaultdict

from semel.local.brokers import SemelBroker
from tests.support.direct import DirectClient
from tests.support.load import Load


def test_sequences_run_from_zero_without_gaps_over_a_broker_restart(semel_broker: SemelBroker) -> None:
    with DirectClient(semel_broker.bootstrap) as client:
        client.create_topic("a1", 2)
    with Load(semel_broker.bootstrap, "a1", 2) as load:
        load.wait_for(300)
        semel_broker.kill()
        at_the_kill = len(load.acknowledged)
        semel_broker.start()
        load.wait_for(300)
    assert load.failures == []
    assert len(load.acknowledged) > at_the_kill  # the same producer went on
    with DirectClient(semel_broker.bootstrap) as client:
        headers = {p: client.headers("a1", partition=p) for p in range(2)}
    owners = {(h.producer_id, h.producer_epoch) for found in headers.values() for h in found}
    assert len(owners) == 1
    assert owners.pop()[0] >= 0
    expected: dict[int, int] = defaultdict(int)
    for partition, found in headers.items():
        for header in found:
            assert header.base_sequence == expected[partition]
            expected[partition] += header.record_count


def test_ids_are_never_handed_out_twice_over_kill_9(semel_broker: SemelBroker) -> None:
    seen: list[int] = []
    for _ in range(4):
        with DirectClient(semel_broker.bootstrap) as client:
            for _ in range(5):
                code, producer_id, epoch = client.init_producer_id()
                assert (code, epoch) == (0, 0)
                seen.append(producer_id)
        semel_broker.kill()
        semel_broker.start()
    assert len(set(seen)) == len(seen)
