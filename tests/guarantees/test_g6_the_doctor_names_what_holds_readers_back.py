"""G6: planted ailments are found by name, in little time, with a command that cures them; on healthy clusters the
doctor says nothing. On semel's broker and on Apache Kafka.

What cannot be planted here: `at-risk` needs several brokers (tests/unit/doctor), `unfinished-decision` a broker that
cannot write markers. Only on semel's broker: `fenced-again` (Apache Kafka keeps no list) and `prepared-transaction`
(KIP-939 is not in Apache Kafka 4.3).
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.cli import main
from semel.client import Producer, TopicPartition
from semel.client.admin import Admin
from semel.client.immediate import run
from semel.doctor.checks import Examination, Limits, examine
from semel.doctor.findings import Certainty, Diagnosis
from semel.local.brokers import SemelBroker
from semel.protocol.errors import ErrorCode
from semel.spark.ledger import LedgerEntry, Written
from tests.support.broker import Cluster
from tests.support.direct import DirectClient, batch_of
from tests.support.machine import is_quiet
from tests.support.waiting import PATIENCE_S, until

FOUND_WITHIN_S = 2.0
VERIFICATION = "transaction.partition.verification.enable"
LIMITS = Limits(long_transaction_s=0.0, leaking_ids=20, two_phase_s=0.0)


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[Admin]:
    with Admin(bootstrap_servers=cluster.bootstrap) as made:
        yield made


def look_at(admin: Admin, limits: Limits | None = None) -> Examination:
    return run(examine(admin.calls, limits, PATIENCE_S * 1000))


def found(admin: Admin, name: str, where: str, limits: Limits = LIMITS) -> list[Diagnosis]:
    """What the doctor says by this name about this thing. Other tests share the cluster and plant other things."""
    return [each for each in look_at(admin, limits).findings if each.name == name and where in each.where]


def find_in_time(admin: Admin, name: str, where: str, limits: Limits = LIMITS) -> Diagnosis:
    """In one look that takes no longer. The broker shows what was planted when it has noted it, which may be later."""

    def look() -> tuple[Examination, float, Diagnosis] | None:
        started_s = time.thread_time()
        examined = look_at(admin, limits)
        computed_s = time.thread_time() - started_s
        findings = [each for each in examined.findings if each.name == name and where in each.where]
        assert len(findings) <= 1
        return (examined, computed_s, findings[0]) if findings else None

    found_at = until(look, f"{name} was not found about {where}")
    assert found_at is not None
    examined, computed_s, finding = found_at
    assert computed_s < FOUND_WITHIN_S
    if is_quiet():  # else most of the time is spent waiting for a processor
        looks = (look_at(admin, limits).took_ms for _ in range(3))
        assert examined.took_ms < FOUND_WITHIN_S * 1000 or min(looks) < FOUND_WITHIN_S * 1000
    return finding


def cure(finding: Diagnosis, cluster: Cluster) -> None:
    """Runs the command of a finding, as a user would."""
    assert finding.is_command
    words = shlex.split(finding.cure)
    assert words[0] == "semel"
    assert main([*words[1:], "-b", cluster.bootstrap]) == 0


@contextmanager
def open_transaction(cluster: Cluster, topic: str, transactional_id: str) -> Iterator[Producer]:
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=transactional_id) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(topic, b"open").result()
        yield producer


def test_a_hanging_transaction_is_found_and_the_command_ends_it(cluster: Cluster, admin: Admin) -> None:
    topic, id_ = cluster.unique("hung"), cluster.unique("forgotten")
    admin.create_topic(topic, partitions=2)
    node = admin.describe_cluster().brokers[0].node_id
    admin.alter_configs({VERIFICATION: "false"}, broker=node)
    try:
        with DirectClient(cluster.bootstrap) as client:
            pid, epoch = client.new_producer(id_)
            batch = batch_of([b"x"], pid=pid, epoch=epoch, sequence=0, transactional=True)

            def write() -> bool:  # no request goes to the coordinator, so it does not know
                return client.produce(topic, batch, partition=1, transactional_id=id_, version=11)[0] == ErrorCode.NONE

            until(write, "the write was not taken")
        assert find_in_time(admin, "unverified-writes", "brokers").certainty is Certainty.CERTAIN
    finally:
        admin.alter_configs({VERIFICATION: None}, broker=node)
    finding = find_in_time(admin, "hanging-transaction", topic)
    assert finding.where == f"{topic}-1"
    assert finding.certainty is Certainty.CERTAIN
    cure(finding, cluster)
    until(lambda: not found(admin, "hanging-transaction", topic), "the cure does not help")
    ends = admin.list_offsets({(topic, 1): -1}, read_committed=True)
    assert ends[TopicPartition(topic, 1)].offset == 2, "the last stable offset has passed the marker"


def test_a_long_transaction_and_the_group_behind_it_are_found(cluster: Cluster, admin: Admin) -> None:
    topic, id_, group = (cluster.unique(stem) for stem in ("held", "slow", "behind"))
    admin.create_topic(topic, partitions=1)
    with open_transaction(cluster, topic, id_):
        admin.alter_group_offsets(group, {(topic, 0): 0})
        finding = find_in_time(admin, "long-transaction", id_)
        assert "holds back 1 offsets" in finding.seen
        assert not found(admin, "long-transaction", id_, Limits()), "not long by its own timeout"
        behind = find_in_time(admin, "group-behind-transaction", group)
        assert behind.cure == finding.cure
        cure(finding, cluster)
        until(lambda: not found(admin, "long-transaction", id_), "the cure does not help")
        assert not found(admin, "group-behind-transaction", group)


def test_offsets_that_are_pending_are_found(cluster: Cluster, admin: Admin) -> None:
    topic, id_, group = (cluster.unique(stem) for stem in ("source", "committer", "pending"))
    admin.create_topic(topic, partitions=1)
    admin.alter_group_offsets(group, {(topic, 0): 0})
    with open_transaction(cluster, topic, id_) as producer:
        producer.send_offsets_to_transaction({(topic, 0): 1}, semel.client.GroupMetadata(group))
        finding = find_in_time(admin, "unstable-offsets", group)
        assert f"{topic}-0" in finding.seen
        producer.commit_transaction()
    until(lambda: not found(admin, "unstable-offsets", group), "it is still found")


def test_a_committed_offset_that_is_not_in_the_log_is_found(cluster: Cluster, admin: Admin) -> None:
    topic, group = cluster.unique("short"), cluster.unique("late")
    admin.create_topic(topic, partitions=1)
    with Producer(bootstrap_servers=cluster.bootstrap) as producer:
        for _ in range(5):
            producer.send(topic, b"x")
    admin.alter_group_offsets(group, {(topic, 0): 1})
    admin.delete_records({(topic, 0): 4})
    finding = find_in_time(admin, "group-out-of-range", group)
    assert "from offset 1 to 4 were deleted" in finding.seen
    cure(finding, cluster)
    assert admin.group_offsets(group)[TopicPartition(topic, 0)].offset == 4
    assert not found(admin, "group-out-of-range", group)


def test_automatic_commits_beside_transactions_are_found(cluster: Cluster, admin: Admin) -> None:
    topic, id_, group = (cluster.unique(stem) for stem in ("mixed", "pipeline", "both"))
    admin.create_topic(topic, partitions=1)
    with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=id_) as producer:
        producer.init_transactions()
        for number in range(3):
            with producer.transaction():
                producer.send(topic, b"x")
                producer.send_offsets_to_transaction({(topic, 0): number}, semel.client.GroupMetadata(group))
            assert not found(admin, "autocommit-beside-transactions", group) or number == 2

            def commit(offset: int = number) -> bool:  # as a consumer with enable.auto.commit does
                admin.alter_group_offsets(group, {(topic, 0): offset})
                return True

            if number:
                until(commit, "no commit")
    finding = find_in_time(admin, "autocommit-beside-transactions", group)
    cure(finding, cluster)
    assert "3 came with a transaction" in finding.seen


def test_ids_that_leak_are_found(cluster: Cluster, admin: Admin) -> None:
    stem = cluster.unique("leaky").replace("-", "_").rstrip("0123456789")
    with DirectClient(cluster.bootstrap) as client:
        for number in range(20):
            client.new_producer(f"{stem}-{1_700_000_000 + 61 * number}")  # the seconds of its starts
    finding = find_in_time(admin, "leaking-ids", stem)
    assert finding.where == f"{stem}-*"
    assert not found(admin, "leaking-ids", stem, Limits())
    cure(finding, cluster)


def test_a_worn_out_epoch_is_found(cluster: Cluster, admin: Admin) -> None:
    topic = cluster.unique("worn")
    admin.create_topic(topic, partitions=1)
    with DirectClient(cluster.bootstrap) as client:
        pid, _ = client.new_producer()
        code, _ = client.produce(topic, batch_of([b"x"], pid=pid, epoch=32_700, sequence=0))
        assert code == ErrorCode.NONE
    finding = find_in_time(admin, "worn-out-epoch", f"producer {pid}")
    assert "epoch 32700" in finding.seen
    cure(finding, cluster)


def ledger(cluster: Cluster, admin: Admin, application: str, entry: LedgerEntry, policy: str = "compact") -> None:
    admin.create_topic(f"{application}.ledger", partitions=1, configs={"cleanup.policy": policy})
    with Producer(
        bootstrap_servers=cluster.bootstrap, transactional_id=application, transaction_timeout_ms=10_000
    ) as producer:
        producer.init_transactions()
        with producer.transaction():
            producer.send(f"{application}.ledger", entry.encode(), entry.key)


def entry_of(took_ms: int = 0, written: list[Written] | None = None) -> LedgerEntry:
    return LedgerEntry(0, "q", "r", 7, [None], ["{}"], written or [], took_ms=took_ms)


def test_a_timeout_that_batches_nearly_exceed_is_found(cluster: Cluster, admin: Admin) -> None:
    application = cluster.unique("payments")
    ledger(cluster, admin, application, entry_of(took_ms=9_000))
    finding = find_in_time(admin, "timeout-too-short", application)
    assert "batch 7 took 9.0 s, the timeout is 10.0 s" in finding.seen
    assert not found(admin, "ledger-misfit", application)
    quick = cluster.unique("quick")
    ledger(cluster, admin, quick, entry_of(took_ms=900))
    assert not found(admin, "timeout-too-short", quick)


def test_a_ledger_that_does_not_fit_is_found(cluster: Cluster, admin: Admin) -> None:
    application, topic = cluster.unique("orphan"), cluster.unique("out")
    admin.create_topic(topic, partitions=1)
    ledger(cluster, admin, application, entry_of(written=[Written(topic, 0, 10, 0, 9)]))
    until(lambda: found(admin, "ledger-misfit", application), "a new topic may take a moment to be known")
    finding = find_in_time(admin, "ledger-misfit", application)
    assert f"wrote offset 9 of {topic}-0, but that ends at 0" in finding.seen


def test_a_ledger_whose_entries_expire_is_found_and_cured(cluster: Cluster, admin: Admin) -> None:
    application = cluster.unique("expiring")
    ledger(cluster, admin, application, entry_of(), policy="delete")
    finding = find_in_time(admin, "ledger-misfit", application)
    assert "cleanup.policy=delete" in finding.seen
    cure(finding, cluster)
    until(lambda: not found(admin, "ledger-misfit", application), "the cure does not help")


@pytest.mark.parametrize("cluster", ["semel"], indirect=True)
def test_a_producer_that_is_fenced_again_and_again_is_found_on_semels_broker(cluster: Cluster, admin: Admin) -> None:
    topic, id_ = cluster.unique("disputed"), cluster.unique("twins")
    admin.create_topic(topic, partitions=1)
    with DirectClient(cluster.bootstrap, client_id="zombie") as client:
        pid, epoch = client.new_producer(id_)
        client.new_producer(id_)
        for _ in range(5):
            code, _, _ = client.init_producer_id(id_, pid, epoch)
            assert code == ErrorCode.PRODUCER_FENCED
    finding = find_in_time(admin, "fenced-again", id_)
    assert "5 requests were refused" in finding.seen
    assert "zombie" in finding.seen


def test_nothing_is_said_about_a_healthy_cluster_under_load(cluster: Cluster, admin: Admin) -> None:
    """While the doctor looks, transactions begin and end, a group commits the end of its topic, and an application
    writes its ledger: none of this is a finding, although the doctor reads one thing after the other."""
    topic, group, reader, application = (cluster.unique(stem) for stem in ("busy", "readers", "caught-up", "app"))
    admin.create_topic(topic, partitions=3)
    admin.create_topic(f"{application}.ledger", partitions=1, configs={"cleanup.policy": "compact"})
    names = [cluster.unique("writer") for _ in range(3)]
    stopping = threading.Event()
    counts: list[int] = []

    def follow() -> None:
        """A reader that has read everything, and the ledger of an application that has just written."""
        sequence = 0
        with (
            Producer(bootstrap_servers=cluster.bootstrap) as producer,
            Producer(bootstrap_servers=cluster.bootstrap, transactional_id=application) as owner,
        ):
            owner.init_transactions()
            while not stopping.is_set():
                last = producer.send(topic, b"x", partition=2).result().offset
                admin_of_reader.alter_group_offsets(reader, {(topic, 2): last + 1})
                entry = LedgerEntry(sequence, "q", "r", sequence, [None], ["{}"], [Written(topic, 2, 1, last, last)])
                with owner.transaction():
                    owner.send(f"{application}.ledger", entry.encode(), entry.key)
                sequence += 1
        counts.append(sequence)

    def load(name: str) -> None:
        count = 0
        with Producer(bootstrap_servers=cluster.bootstrap, transactional_id=name) as producer:
            producer.init_transactions()
            while not stopping.is_set():
                with producer.transaction():
                    for partition in range(3):
                        producer.send(topic, b"x", partition=partition)
                    producer.send_offsets_to_transaction({(topic, 0): count}, semel.client.GroupMetadata(group))
                count += 1
        counts.append(count)

    admin_of_reader = Admin(bootstrap_servers=cluster.bootstrap)
    threads = [*(threading.Thread(target=load, args=(name,)) for name in names), threading.Thread(target=follow)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: {group, reader} <= set(admin.committed_of_all()), "no load")
        said = []
        ends_s = time.monotonic() + 3
        while time.monotonic() < ends_s:
            mine = (topic, group, reader, application, *names)
            findings = look_at(admin).findings
            said += [each for each in findings if any(name in each.where for name in mine)]
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        admin_of_reader.close()
    assert said == []
    assert len(counts) == len(threads)
    assert sum(counts) > 20, "there was no load"


def test_topics_that_are_deleted_while_it_looks_hold_nothing_up(
    cluster: Cluster, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, fleeting = (
        cluster.unique("kept"),
        [cluster.unique("short"), f"{cluster.unique('brief')}.ledger", cluster.unique("last")],
    )
    for topic in (kept, *fleeting):
        admin.create_topic(topic, partitions=1)
        with Producer(bootstrap_servers=cluster.bootstrap) as producer:
            producer.send(topic, b"x").result()
    moments = iter(fleeting)
    original = admin.calls.offsets_of_existing

    async def meanwhile(places: list, *rest: Any) -> dict:
        """Each look at the offsets comes when one more topic has just been deleted."""
        topic = next(moments, None)
        if topic:
            with Admin(bootstrap_servers=cluster.bootstrap) as other:
                other.delete_topics(topic)
                until(lambda: topic not in other.list_topics(), f"{topic} is not deleted")
        return await original(places, *rest)

    id_ = cluster.unique("forgotten")
    with open_transaction(cluster, kept, id_):
        find_in_time(admin, "long-transaction", id_)
        monkeypatch.setattr(admin.calls, "offsets_of_existing", meanwhile)
        examined = look_at(admin, LIMITS)
    assert next(moments, None) is None, "no topic was deleted while it looked"
    assert [each for each in examined.findings if each.name == "long-transaction" and each.where == id_]
    assert not [each for each in examined.not_looked_at if "offsets of topics" in each]
    assert examined.took_ms < PATIENCE_S * 1000 / 2, "it waited for topics that are not there"


# --- the command ---


def test_the_command_prints_json_and_says_by_its_exit_code_whether_something_was_found(
    cluster: Cluster, admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, id_ = cluster.unique("shown"), cluster.unique("shown'id")
    admin.create_topic(topic, partitions=1)
    with open_transaction(cluster, topic, id_):
        assert (
            main(["doctor", "-b", cluster.bootstrap, "--timeout", "120", "--long-transaction", "0.001", "--json"]) == 3
        )
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (line,) = [each for each in lines if each["name"] == "long-transaction" and each["where"] == id_]
        assert line["certainty"] == "certain"
        assert set(line) == {"name", "where", "certainty", "title", "seen", "meaning", "cure", "is_command"}
        assert main(["doctor", "-b", cluster.bootstrap, "--timeout", "120", "--long-transaction", "0.001"]) == 3
        assert f"cure: {line['cure']}\n" in capsys.readouterr().out
        assert main(shlex.split(line["cure"])[1:]) == 0, "with the brokers in it, as it is printed"


def test_a_prepared_transaction_that_nobody_finishes_is_found(tmp_path: Path) -> None:
    """Of semel's broker; Apache Kafka 4.3 does not have two-phase commit."""
    setting = "transaction.two.phase.commit.enable=true"
    with (
        SemelBroker(tmp_path / "broker", "--set", setting) as broker,
        Admin(bootstrap_servers=broker.bootstrap) as admin,
    ):
        admin.create_topic("ledgered", partitions=1)
        options = {"bootstrap_servers": broker.bootstrap, "transactional_id": "bank"}
        with Producer(**options, two_phase_commit=True) as producer:
            producer.init_transactions()
            producer.begin_transaction()
            producer.send("ledgered", b"x").result()
            producer.prepare_transaction()
        finding = find_in_time(admin, "prepared-transaction", "bank")
        assert not found(admin, "long-transaction", "bank"), "it has no timeout to be long by"
        assert not found(admin, "prepared-transaction", "bank", Limits()), "not before a minute"
        cure(finding, Cluster("semel", broker))
        until(lambda: not found(admin, "prepared-transaction", "bank"), "the cure does not help")
