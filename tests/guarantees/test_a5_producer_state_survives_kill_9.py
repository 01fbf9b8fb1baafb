"""A5: producer state survives kill -9: snapshot file + replay of the log's tail."""

from __future__ import annotations

from pathlib import Path

from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from tests.support.direct import DirectClient, batch_of
from tests.support.reading import read_values


def test_duplicates_are_known_after_kill_9_from_snapshot_and_tail(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "data") as broker:
        with DirectClient(broker.bootstrap) as client:
            client.create_topic("a5", segment_bytes="1048576")  # rolls often: each roll leaves a snapshot
            pid, epoch = client.new_producer()
            batches = [batch_of([b"%04d" % n * 10_000], pid=pid, epoch=epoch, sequence=n) for n in range(100)]
            for n, batch in enumerate(batches):
                assert client.produce("a5", batch) == (0, n)
        broker.kill()
        snapshots = sorted((tmp_path / "data" / "a5-0").glob("*.snapshot"))
        assert snapshots, "no segment was rolled, so no snapshot was there to start from"
        broker.start()
        with DirectClient(broker.bootstrap) as client:
            assert [client.produce("a5", b) for b in batches[-5:]] == [(0, n) for n in range(95, 100)]
            gap = client.produce("a5", batch_of([b"x"], pid=pid, epoch=epoch, sequence=101))
            assert gap[0] is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            assert client.produce("a5", batch_of([b"next"], pid=pid, epoch=epoch, sequence=100)) == (0, 100)
        assert len(read_values(broker.bootstrap, "a5")) == 101


def test_a_lost_snapshot_is_rebuilt_from_the_log(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "data") as broker:
        with DirectClient(broker.bootstrap) as client:
            client.create_topic("a5", segment_bytes="1048576")
            pid, epoch = client.new_producer()
            batches = [batch_of([b"%04d" % n * 10_000], pid=pid, epoch=epoch, sequence=n) for n in range(100)]
            for batch in batches:
                client.produce("a5", batch)
        broker.kill()
        for number, path in enumerate(sorted((tmp_path / "data" / "a5-0").glob("*.snapshot"))):
            path.write_bytes(path.read_bytes()[:-3]) if number % 2 else path.unlink()
        broker.start()
        with DirectClient(broker.bootstrap) as client:
            assert [client.produce("a5", b) for b in batches[-5:]] == [(0, n) for n in range(95, 100)]
        assert len(read_values(broker.bootstrap, "a5")) == 100
