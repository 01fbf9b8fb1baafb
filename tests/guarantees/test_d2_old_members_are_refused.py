"""D2: group membership fences (KIP-447). After a rebalance the old member's commit is refused, without one
transactional id per partition: each member has its own id and keeps it."""

from __future__ import annotations

import sys

from confluent_kafka.admin import AdminClient, NewTopic

from semel.local.brokers import SemelBroker
from semel.local.processes import Process
from tests.support.broker import Cluster
from tests.support.reading import read_values
from tests.support.waiting import PATIENCE_S

RECORDS = 40
PARTITIONS = 2


def start_member(bootstrap: str, name: str, group: str, source: str, target: str, *hold: str) -> Process:
    module = "tests.guarantees.pipeline_member"
    return Process([sys.executable, "-m", module, bootstrap, name, group, source, target, *hold], stdin=True)


def create_topics(bootstrap: str, *names: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in names]).values():
        future.result(PATIENCE_S)


def fill(bootstrap: str, topic: str) -> list[bytes]:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap})
    values = [b"%03d" % number for number in range(RECORDS)]
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS)
    assert producer.flush(PATIENCE_S) == 0
    return values


def test_frozen_member_cannot_commit_after_the_group_went_on(cluster: Cluster) -> None:
    group, source, target = cluster.unique("d2-group"), cluster.unique("d2-in"), cluster.unique("d2-out")
    create_topics(cluster.bootstrap, source, target)
    values = fill(cluster.bootstrap, source)
    with start_member(cluster.bootstrap, f"{group}-a", group, source, target, "1") as frozen:
        held = int(frozen.wait_for_line(r"^holding (\d+)", 40)[1])
        frozen.pause()  # its heartbeats stop, its transaction stays open
        with start_member(cluster.bootstrap, f"{group}-b", group, source, target) as new_member:
            new_member.wait_for_line(rf"^assigned {PARTITIONS}$", 60)
            new_member.wait_for_line(
                rf"^committed {RECORDS}$", 60
            )  # everything: nothing of the frozen member was committed
            frozen.resume()
            frozen.write("go\n")
            refusal = frozen.wait_for_line(r"^(refused|committed) (\S+)", 60)
            assert held > 0, "the frozen member held records when it was frozen"
            assert refusal[1] == "refused", refusal[0]
            assert refusal[2] in ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID")
            frozen.wait(60)  # it aborts what it held
    seen = sorted(value for _, _, value in read_values(cluster.bootstrap, target))
    assert seen == values, "every record is there once"


def test_old_member_is_refused_also_after_kill_9_of_the_broker(semel_broker: SemelBroker) -> None:
    """The group's generation is as durable as its positions: a restarted broker still knows who is out."""
    bootstrap = semel_broker.bootstrap
    create_topics(bootstrap, "in", "out")
    values = fill(bootstrap, "in")
    with start_member(bootstrap, "a", "g", "in", "out", "1") as frozen:
        frozen.wait_for_line(r"^holding (\d+)", 40)
        frozen.pause()
        with start_member(bootstrap, "b", "g", "in", "out") as new_member:
            new_member.wait_for_line(rf"^assigned {PARTITIONS}$", 60)
            new_member.wait_for_line(rf"^committed {RECORDS}$", 60)
            semel_broker.kill()
            semel_broker.start()
            frozen.resume()
            frozen.write("go\n")
            refusal = frozen.wait_for_line(r"^(refused|committed) (\S+)", 60)
            assert refusal[1] == "refused", refusal[0]
            frozen.wait(60)
    assert sorted(value for _, _, value in read_values(bootstrap, "out")) == values
