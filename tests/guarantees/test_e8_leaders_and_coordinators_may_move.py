"""E8: a transaction that many processes write holds on a cluster of three nodes while leaders and coordinators move.

Each fault comes at its moment: a proxy has the leader moved while a frame passes. `semel prove --nodes 3` moves, kills
and freezes them at any time, under the loop and under Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from semel import Admin, Consumer, Producer, process
from semel.client.admin.calls import NewTopic
from semel.client.admin.risks import risks
from semel.client.cluster import Cluster
from semel.client.immediate import run
from semel.client.log_reading import fetch_once
from semel.client.producer.coordinator import EndUnknownError
from semel.client.producer.handle import Opening, PartitionWriter, TransactionOwner
from semel.client.settings import ClientSettings, ProducerSettings
from semel.client.timing import Deadline
from semel.local.apache_kafka import ApacheKafka, KafkaCluster
from semel.prove.checker.reading import read
from semel.prove.proxy import Effect, Proxy, Rule
from tests import mutants
from tests.support.prove import Proof, prove
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

ROWS = 30
# A follower learns how far readers may read from the response to its next fetch, which waits so long for new records.
LATE_HIGH_WATERMARK = {"replica.fetch.wait.max.ms": "10000"}
TRANSACTIONS = "__transaction_state"
_numbers = count(1)


def create(bootstrap: str, topic: str) -> str:
    with Admin(bootstrap_servers=bootstrap) as admin:
        admin.create_topic(topic, partitions=1)
    return topic


@pytest.fixture(scope="module")
def nodes(kafka_installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """Three nodes; their internal topics are there."""
    with KafkaCluster(tmp_path_factory.mktemp("nodes"), properties=LATE_HIGH_WATERMARK) as cluster:
        with Producer(bootstrap_servers=cluster.bootstrap, transactional_id="first") as producer:
            producer.init_transactions()
        with Consumer(bootstrap_servers=cluster.bootstrap, group_id="first") as consumer:
            consumer.committed([(create(cluster.bootstrap, "first"), 0)])
        yield cluster


class Site(NamedTuple):
    """A topic and a transactional id of one test, behind a proxy."""

    nodes: KafkaCluster
    proxy: Proxy
    topic: str
    settings: ProducerSettings

    def move_leader(self) -> None:
        self.nodes.move_leader(self.topic, 0)

    def kill_leader(self) -> None:
        self.nodes.leader_of(self.topic, 0).kill()

    def move_coordinator(self) -> None:
        self.nodes.move_leader(TRANSACTIONS, self._coordinators_partition)

    def kill_coordinator(self) -> None:
        self.nodes.leader_of(TRANSACTIONS, self._coordinators_partition).kill()

    @property
    def _coordinators_partition(self) -> int:
        return self.nodes.partition_of(TRANSACTIONS, self.settings.transactional_id or "")

    def visible(self, at_least: int) -> list[bytes | None]:
        """Committed values, once there are so many; read around the proxy, by another client."""
        seen = eventually(lambda: read(self.nodes.bootstrap, [self.topic]), lambda found: len(found) >= at_least)
        return [record.value for record in seen]


@pytest.fixture
def site(nodes: KafkaCluster) -> Iterator[Site]:
    nodes.await_in_sync(PATIENCE_S)
    number = next(_numbers)
    with Proxy(nodes.bootstrap) as proxy:
        settings = ProducerSettings.of(
            bootstrap_servers=proxy.bootstrap, transactional_id=f"moves-{number}", request_timeout_ms=5_000
        )
        yield Site(nodes, proxy, create(nodes.bootstrap, f"moves-{number}"), settings)
    for node in nodes.nodes.values():
        if node.process is None or not node.process.running:  # a test has killed it
            node.start()


def rows(prefix: str, first: int, last: int) -> pa.Table:
    return pa.table({"value": [f"{prefix}-{number}".encode() for number in range(first, last)]})


def values(*prefixes: str) -> list[bytes]:
    return [f"{prefix}-{number}".encode() for prefix in prefixes for number in range(ROWS)]


def write(owner: TransactionOwner, topic: str, prefix: str) -> None:
    """As one task does, and then the driver: the opening handshake, the rest, the audit of the counts."""
    with owner.begin([(topic, 0)]).writer() as writer:
        opening = writer.open(topic, 0, rows(prefix, 0, 1), mark=7)
        assert opening.is_owner
        assert opening.mark == 7
        writer.write(topic, 0, rows(prefix, 1, ROWS))
        (written,) = writer.finish(PATIENCE_S)
    assert written.record_count == ROWS
    assert owner.last_sequences([(topic, 0)]) == {(topic, 0): written.last_sequence}


class Moment(NamedTuple):
    api: str
    effect: Effect
    act: Callable[[Site], None]
    nth: int = 1


MOMENTS = {
    "the leader moves before the opening is acknowledged": Moment("Produce", Effect.PASS, Site.move_leader),
    "the opening's response is lost while the leader moves": Moment("Produce", Effect.DROP_RESPONSE, Site.move_leader),
    "the leader moves before the opening is read back": Moment("Fetch", Effect.DROP_REQUEST, Site.move_leader),
    "the leader dies before the opening is read back": Moment("Fetch", Effect.DROP_REQUEST, Site.kill_leader),
    "the leader moves between two batches": Moment("Produce", Effect.DROP_RESPONSE, Site.move_leader, nth=2),
    "the leader moves before the audit": Moment("DescribeProducers", Effect.DROP_REQUEST, Site.move_leader),
    "the leader dies before the audit": Moment("DescribeProducers", Effect.DROP_REQUEST, Site.kill_leader),
    "the coordinator moves while the id is taken": Moment("InitProducerId", Effect.DROP_REQUEST, Site.move_coordinator),
    "the coordinator dies while the id is taken": Moment("InitProducerId", Effect.DROP_REQUEST, Site.kill_coordinator),
}
ENDS = {
    "the response is lost while the coordinator moves": Moment("EndTxn", Effect.DROP_RESPONSE, Site.move_coordinator),
    "the request is lost while the coordinator moves": Moment("EndTxn", Effect.DROP_REQUEST, Site.move_coordinator),
    "the response is lost and the coordinator is dead": Moment("EndTxn", Effect.DROP_RESPONSE, Site.kill_coordinator),
}


def at(site: Site, moment: Moment) -> Rule:
    return site.proxy.add(Rule(moment.api, moment.effect, nth=moment.nth, then=lambda: moment.act(site)))


def cases(moments: dict[str, Moment]) -> list[Any]:
    """A node that dies takes seconds to come back: those are for `make test-full`."""
    deaths = (Site.kill_leader, Site.kill_coordinator)
    marks = {name: [pytest.mark.full] if moment.act in deaths else [] for name, moment in moments.items()}
    return [pytest.param(moment, id=name.replace(" ", "_"), marks=marks[name]) for name, moment in moments.items()]


@pytest.mark.parametrize("moment", cases(MOMENTS))
def test_a_transaction_is_written_once_whatever_moves(site: Site, moment: Moment) -> None:
    rule = at(site, moment)
    with TransactionOwner(site.settings) as owner:
        owner.own(PATIENCE_S)
        write(owner, site.topic, "first")
        owner.end(commit=True)
        write(owner, site.topic, "second")
        owner.end(commit=True)
    rule.assert_fired()
    assert site.visible(2 * ROWS) == values("first", "second")


@pytest.mark.parametrize("moment", cases(ENDS))
def test_an_end_without_a_response_is_settled_whatever_moves(site: Site, moment: Moment) -> None:
    """It is never guessed: the id is renewed, and the log says how it ended."""
    with TransactionOwner(site.settings) as owner:
        owner.own(PATIENCE_S)
        write(owner, site.topic, "first")
        rule = at(site, moment)
        try:
            owner.end(commit=True)
            is_known = True
        except EndUnknownError:
            is_known = False
            owner.renew(PATIENCE_S)
        rule.assert_fired()
        write(owner, site.topic, "second")
        owner.end(commit=True)
    seen = site.visible(ROWS)
    assert seen in ((values("first", "second"),) if is_known else (values("first", "second"), values("second")))


# --- a new leader whose high watermark lags ---
def two_attempts(site: Site, topic: str) -> tuple[Opening, bool]:
    """How the second of two attempts at one partition fares whose opening was acknowledged, and whose read-back meets a
    new leader; and whether that leader did not show the opening yet.

    One follower stands still meanwhile: until it counts as out of sync, the new leader cannot be sure of the record."""
    nodes, frozen, was_empty = site.nodes, list[ApacheKafka](), list[bool]()
    rule = Rule("Fetch", Effect.DROP_REQUEST, then=lambda: move())

    before = nodes.partitions(topic)[0]
    new, other = (replica for replica in before.replicas if replica != before.leader)
    nodes.prefer(topic, 0, new)

    def move() -> None:
        frozen.append(nodes.nodes[other])
        frozen[0].pause()
        nodes.elect(topic, 0, new)
        with Cluster(ClientSettings.of(bootstrap_servers=nodes.nodes[new].bootstrap)) as cluster:
            was_empty.append(not len(fetch_once(cluster, (topic, 0), 0, Deadline(PATIENCE_S))))

    try:
        with TransactionOwner(site.settings) as owner:
            owner.own(PATIENCE_S)
            handle = owner.begin([(topic, 0)])
            with handle.writer() as first, handle.writer() as second:
                assert first.open(topic, 0, rows("first", 0, 1), mark=7).is_owner
                site.proxy.add(rule)
                opening = second.open(topic, 0, rows("second", 0, 1), mark=8, timeout_s=PATIENCE_S)
            rule.assert_fired()
            owner.end(commit=False)
    finally:
        for node in frozen:
            node.resume()
    return opening, was_empty == [True]


def second_opening(site: Site) -> Opening:
    """Of an attempt whose read-back met a new leader that lags; now and then that leader is quicker."""
    for number in range(5):
        site.nodes.await_in_sync(PATIENCE_S)
        opening, was_empty = two_attempts(site, create(site.nodes.bootstrap, f"{site.topic}-{number}"))
        if was_empty:
            return opening
    pytest.fail("the new leader never lagged: the fault did not fire")


@pytest.mark.full  # the leader must lag, which takes several attempts; the move before the read-back is above
def test_an_opening_that_the_new_leader_does_not_show_yet_is_waited_for(site: Site) -> None:
    opening = second_opening(site)
    assert not opening.is_owner
    assert opening.mark == 7


@pytest.mark.full  # the new leader must lag for long enough, which a busy machine may not allow
def test_without_that_wait_two_attempts_would_own_a_partition(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionWriter, "_read_back", PartitionWriter._read_back)  # is put back at the end
    mutants.install("no_wait_for_new_leader")
    assert second_opening(site).is_owner  # and so is the first


# --- a cluster that cannot keep its promise ---
def test_what_is_at_risk_is_said_by_name_with_its_setting(
    nodes: KafkaCluster, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.await_in_sync(PATIENCE_S)
    poor = {
        "one-replica": NewTopic("one-replica", 1, 1),
        "one-in-sync": NewTopic("one-in-sync", 1, 3, {"min.insync.replicas": "1"}),
        "too-many": NewTopic("too-many", 1, 3, {"min.insync.replicas": "4"}),
        "unclean": NewTopic("unclean", 1, 3, {"unclean.leader.election.enable": "true"}),
        "sound": NewTopic("sound", 1, 3),
    }
    with Admin(bootstrap_servers=nodes.bootstrap) as admin:
        admin.create_topics(poor.values())
        found = {name: run(risks(admin.calls, [name])) for name in poor}
    assert found.pop("sound") == []
    assert {name: len(said) for name, said in found.items()} == dict.fromkeys(found, 1)
    assert all(repr(name) in said for name, (said,) in found.items())
    assert "kafka-reassign-partitions" in found["one-replica"][0]
    assert "Set min.insync.replicas=2" in found["one-in-sync"][0]
    assert "lower min.insync.replicas to at most 2" in found["too-many"][0]
    assert "unclean.leader.election.enable=false" in found["unclean"][0]

    shared = {"bootstrap_servers": nodes.bootstrap, "application_id": "at-risk", "stop_at_end": True}
    process("sound", "one-replica", lambda record: record, **shared)
    assert [record.message for record in caplog.records if "at risk" in record.message] == [
        f"at risk: {found['one-replica'][0]}"
    ]


# --- campaigns ---
@pytest.mark.parametrize("workload", ["loop", pytest.param("spark", marks=pytest.mark.full)])
def test_a_short_campaign_on_three_nodes_violates_nothing(
    kafka_installation: Path, tmp_path: Path, workload: str
) -> None:
    # the seed moves leaders and coordinators, and kills the node of a coordinator once: the rest is in full
    options = ("--nodes", "3", "--rounds", "1", "--faults-per-round", "5", "--seed", "3095")
    proof = prove(tmp_path, "--workload", workload, *options, timeout_s=500)
    assert proof.violations == [], proof.told
    assert proof.code == 0, proof.told
    assert any(kind.endswith(" node") for kind in proof.result["faults_by_kind"]), proof.told


LONG = {  # rounds of 24 faults: 1,056 in all
    "loop": 18,
    "chain": 6,
    "spark": 6,
    "spark-any-order": 4,
    "spark-stateful": 4,
    "spark-stream-writer": 3,
    "spark-executors": 3,
}
FAULTS = 24
MOVING = ("move_leader node", "kill node", "stop node", "restart node", "rolling_restart node")
STANDSTILL_S = 30.0  # longer than the faults
ENDS_ITS_QUERY = (
    "spark-stream-writer",
)  # it cannot run a batch again by itself; whoever runs the query starts it again
RESTARTED = ("kill", "restart", "takeover", "checkpoint_lost")  # of a process of the pipeline


def moved(proof: Proof) -> int:
    """Faults that gave a partition another leader."""
    return sum(many for kind, many in proof.result["faults_by_kind"].items() if kind in MOVING)


def check_rounds(proof: Proof) -> None:
    """No query ended or stood still; a process that was killed has the time that it needs to start."""
    for round_ in proof.result["details"]:
        restarts = any(f["what"] in RESTARTED and f["target"] not in ("node", "producer") for f in round_["fired"])
        limit_s = STANDSTILL_S + (round_["start_s"] if restarts else 0.0)
        assert round_["caught_up_s"] <= limit_s, f"round {round_['number'] + 1}: {proof.told}"
        assert round_["workload"] in ENDS_ITS_QUERY or round_["ends"] == [], "\n".join(round_["ends"])


def campaign(folder: Path, workload: str, rounds: int, *options: str, timeout_s: float = 7_000) -> Proof:
    words = ("--workload", workload, "--nodes", "3", "--rounds", str(rounds), "--faults-per-round", str(FAULTS))
    return prove(folder, *words, *options, timeout_s=timeout_s)


@pytest.mark.full
@pytest.mark.timeout(14_000)
def test_a_thousand_faults_on_three_nodes_violate_nothing(kafka_installation: Path, tmp_path: Path) -> None:
    fired = moves = 0
    for workload, rounds in LONG.items():
        proof = campaign(tmp_path, workload, rounds)
        assert proof.violations == [], proof.told
        assert proof.code == 0, proof.told
        check_rounds(proof)
        fired += proof.result["faults_fired"]
        moves += moved(proof)
    assert fired >= 1_000
    assert moves >= 200


@pytest.mark.full
@pytest.mark.timeout(3_600)
def test_at_least_once_pays_its_price_on_three_nodes(kafka_installation: Path, tmp_path: Path) -> None:
    proof = campaign(tmp_path, "loop", 6, "--guarantee", "at_least_once", "--seed", "3", timeout_s=3_500)
    assert proof.code == 0, proof.told
    assert proof.result["allowed"].get("duplicated", 0) > 0, proof.told
