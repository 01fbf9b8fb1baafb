"""B5: markers (commit, abort) are control records in every partition touched, and in the offsets topic."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semel.local.apache_kafka import java_tool
from semel.protocol.partitioning import coordinator_partition
from tests.support.crashes import GROUP, SOURCE, TOPICS, MortalBroker, Persistent
from tests.support.reading import read_topic

pytestmark = pytest.mark.kafka
MARKER = re.compile(r"isControl: true.*?endTxnMarker: (COMMIT|ABORT)", re.S)


def markers(folder: Path, topic: str, partition: int) -> list[str]:
    """The kinds of markers in a partition, as Kafka's own tool reads the file."""
    files = ",".join(str(path) for path in sorted((folder / f"{topic}-{partition}").glob("*.log")))
    dump = java_tool("DumpLogSegments", "--files", files, "--print-data-log").stdout
    return MARKER.findall(dump)


@pytest.mark.parametrize("is_v2", [False, True], ids=["TV1", "TV2"])
def test_every_partition_has_its_marker_after_a_death_between_them(
    tmp_path: Path, is_v2: bool, kafka_installation: Path
):
    with MortalBroker(tmp_path / "broker") as broker:
        producer = Persistent(broker, is_v2)
        for topic in (*TOPICS, SOURCE):
            producer.client.create_topic(topic)
        producer.run("id", b"one", 1, commit=True)
        producer.run("id", b"two", 2, commit=False)
        producer.client.settled("id")  # its markers would meet the fault, if the restart had to write them
        broker.arm("marker.after:kill:2")
        producer = Persistent(broker, is_v2, "marker.after")
        producer.run("id", b"three", 3, commit=True)
        producer.client.settled("id")
        assert broker.deaths == 1
        seen = [[record.value for record in read_topic(broker.bootstrap, topic)] for topic in TOPICS]
        assert seen == [[b"one", b"three"]] * 2
        broker.broker.stop()
        folder = broker.broker.directory
        offsets = ("__consumer_offsets", coordinator_partition(GROUP, 50))
        for topic, partition in (*((topic, 0) for topic in TOPICS), offsets):
            found = markers(folder, topic, partition)
            # a marker that was written before the death may be there twice: readers do not mind
            assert [kind for kind, former in zip(found, ["", *found], strict=False) if kind != former] == [
                "COMMIT",
                "ABORT",
                "COMMIT",
            ], f"{topic}-{partition}: {found}"
        assert not list((folder / f"{SOURCE}-0").glob("*.log")) or markers(folder, SOURCE, 0) == []
