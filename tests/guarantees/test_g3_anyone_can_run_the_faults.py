"""G3: anyone can run the faults: kill or freeze any process at every protocol step, cut and delay the network, and have
the outcome checked by an independent client, replayable by seed.

The short campaign runs the workloads with a fixed seed (`make test` the loop, `make test-full` all); the
long one, on both brokers, has more than 1,000 faults and hits every boundary of a commit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from semel.prove.schedule import Fault, Round, Schedule, WorkloadPlan
from tests.support.boundaries import boundaries
from tests.support.broker import Cluster
from tests.support.prove import held, prove

SHORT = {"loop": 2}  # rounds; every fault of the sink alone is in test_e1 to test_e7
MORE = {"chain": 2, "state": 3, "entities": 3, "sagas": 3, "spark": 1, "spark-any-order": 1, "spark-stateful": 1}
LONG = {
    "loop": 60,
    "chain": 12,
    "state": 30,
    "entities": 30,
    "sagas": 30,
    "spark": 16,
    "spark-any-order": 12,
    "spark-stateful": 12,
    "spark-executors": 6,
}
FAULTS = {"loop": 12, "chain": 12, "state": 12, "entities": 12, "sagas": 12}  # in each round; 8 in those of Spark


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workload", [*SHORT, *(pytest.param(workload, marks=pytest.mark.full) for workload in MORE)])
def test_short_campaign_violates_nothing(tmp_path: Path, workload: str) -> None:
    rounds = str((SHORT | MORE)[workload])
    held(prove(tmp_path, "--workload", workload, "--rounds", rounds, "--seed", "11"), faults=3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cluster", [pytest.param("apache_kafka", marks=pytest.mark.kafka)], indirect=True)
def test_short_campaign_on_apache_kafka_violates_nothing(tmp_path: Path, cluster: Cluster) -> None:
    options = ("--workload", "loop", "--rounds", "1", "--seed", "12", "--brokers", cluster.bootstrap)
    proof = held(prove(tmp_path, *options, "--prefix", cluster.unique("prove"), "--delete-topics"), faults=3)
    assert "deleted" in proof.told


# --- the checker is awake ---


def schedule(workload: str, guarantee: str, rounds: list[list[Fault]]) -> Schedule:
    return Schedule(1, [WorkloadPlan(workload, guarantee, [Round(faults) for faults in rounds])])


PRICES = {
    "at_least_once": ("duplicated", "Produce"),  # killed after the output, before the position
    "at_most_once": ("lost", "OffsetCommit"),  # killed after the position, before the output
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("guarantee", ["at_least_once", pytest.param("at_most_once", marks=pytest.mark.full)])
def test_lesser_guarantees_pay_their_price_under_the_same_faults(tmp_path: Path, guarantee: str) -> None:
    kind, api = PRICES[guarantee]
    kills = [Fault("kill", worker, api=api, side="response", nth=2) for worker in ("worker-a", "worker-b")]
    schedule("loop", guarantee, [kills, kills]).save(tmp_path / "replay.json")
    proof = held(prove(tmp_path, "--replay", str(tmp_path / "replay.json")), faults=2)
    assert proof.result["allowed"].get(kind, 0) > 0, proof.told
    assert set(proof.result["allowed"]) <= {kind, "reordered", "offsets disagree with output"}


# --- the long campaign ---


@pytest.mark.full
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("cluster", ["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)], indirect=True)
def test_long_campaign_of_a_thousand_faults_violates_nothing_and_hits_every_boundary(
    cluster: Cluster, tmp_path: Path
) -> None:
    fired, hit = 0, Counter[str]()
    for workload, rounds in LONG.items():
        options = ["--workload", workload, "--rounds", str(rounds), "--faults-per-round", str(FAULTS.get(workload, 8))]
        if cluster.name == "apache_kafka":
            options += ["--brokers", cluster.bootstrap, "--prefix", cluster.unique("long"), "--delete-topics"]
        proof = held(prove(tmp_path, *options, "--seed", "2024", timeout_s=3_000), faults=rounds)
        fired += proof.result["faults_fired"]
        hit.update(proof.result["boundaries"])
    assert fired >= 1_000
    missed = boundaries(broker=cluster.name == "semel", sink=True) - set(hit)
    assert missed == set()
