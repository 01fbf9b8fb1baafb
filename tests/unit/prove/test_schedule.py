"""A schedule is a value: the same seed gives the same one, and a saved one comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.prove.command import CampaignOptionError, CampaignOptions, plan, schedule_of
from semel.prove.injection import COMPACTION_POINTS, FILES_POINTS
from semel.prove.schedule import BROKER, NODE, ScheduleError, load_schedule
from semel.prove.table_workloads import WORKLOADS, TableWorkload
from tests.mutants import AIMED, HUNTS, MUTANTS
from tests.support.boundaries import boundaries
from tests.support.broker import ROOT

BUILT_IN = [name for name in WORKLOADS if name != "app"]


@pytest.mark.parametrize("workload", BUILT_IN)
def test_same_seed_gives_the_same_schedule_and_another_seed_another(workload: str) -> None:
    first, again = (plan(7, [workload], "exactly_once", 5, own_broker=True) for _ in range(2))
    other = plan(8, [workload], "exactly_once", 5, own_broker=True)
    assert first == again
    assert first.plans != other.plans


def test_saved_schedule_comes_back(tmp_path: Path) -> None:
    schedule = plan(7, BUILT_IN, "exactly_once", 3, own_broker=True)
    schedule.save(tmp_path / "s.json")
    assert load_schedule(tmp_path / "s.json") == schedule
    assert schedule_of(CampaignOptions(replay=str(tmp_path / "s.json"))) == schedule


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("no json", "not a schedule"), ('{"seed": 1, "scenes": [], "format": 9}', "format 9")],
)
def test_file_that_is_no_schedule_is_refused(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "s.json").write_text(content)
    with pytest.raises(ScheduleError, match=said):
        load_schedule(tmp_path / "s.json")


@pytest.mark.parametrize("workload", BUILT_IN)
@pytest.mark.parametrize("own_broker", [True, False])
def test_all_faults_together_hit_every_boundary_of_a_commit(workload: str, own_broker: bool) -> None:
    kind = WORKLOADS[workload]
    faults = kind.faults("exactly_once", broker=own_broker)
    # the lists of executors and of tables have points of their own
    has_sink = workload.startswith("spark") and workload != "spark-executors" and "postgres" not in workload
    wanted = boundaries(broker=own_broker, sink=has_sink)
    if workload.startswith("spark"):
        wanted -= {name for name in wanted if "abort" in name}  # the loop's list has these
    if issubclass(kind, TableWorkload):
        wanted -= {"TxnOffsetCommit.request", "TxnOffsetCommit.response"}  # its offsets are in the database
    if workload == "files":
        wanted = {*FILES_POINTS, *COMPACTION_POINTS}  # its commits are manifests
    assert wanted - {fault.boundary for fault in faults} == set()
    rounds = -(-len(faults) // kind.faults_per_round)
    schedule = plan(3, [workload], "exactly_once", rounds, own_broker=own_broker)
    faults = [fault for planned in schedule.plans for round_ in planned.rounds for fault in round_.faults]
    assert {fault.boundary for fault in faults} >= wanted


@pytest.mark.parametrize("workload", BUILT_IN)
def test_foreign_cluster_is_never_killed(workload: str) -> None:
    faults = WORKLOADS[workload].faults("exactly_once", broker=False)
    assert all(fault.target != BROKER for fault in faults)


def test_every_mutant_is_looked_for() -> None:
    assert sorted([*HUNTS, *AIMED]) == sorted(MUTANTS)
    assert all((ROOT / test).exists() for test in AIMED.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (CampaignOptions(workloads=("lop",)), "no workload 'lop'"),
        (CampaignOptions(workloads=("spark-stream-writer",), guarantee="at_least_once"), "runs with exactly_once only"),
        (CampaignOptions(mutant="x"), "no mutant 'x'"),
        (CampaignOptions(mutant="no_count_audit", brokers="localhost:9092"), "leave --brokers out"),
        (CampaignOptions(mutant="no_count_audit", nodes=3), "leave --brokers out, and --nodes"),
        (CampaignOptions(nodes=3, brokers="localhost:9092"), "leave --brokers out"),
        (CampaignOptions(nodes=1), "2 nodes or more"),
        (CampaignOptions(rounds=0), "at least 1"),
        (CampaignOptions(app="nowhere:run"), "cannot be imported"),
        (CampaignOptions(app="json"), "module:function"),
        (CampaignOptions(app="json:loads"), "no 'expected'"),
        (CampaignOptions(app="json:loads", workloads=("loop",)), "leave --workload out"),
        (CampaignOptions(replay="/nowhere.json"), "cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: CampaignOptions, said: str) -> None:
    with pytest.raises(CampaignOptionError, match=said):
        schedule_of(options)


def test_schedule_with_deaths_of_the_broker_is_not_replayed_on_a_foreign_cluster(tmp_path: Path) -> None:
    plan(7, ["loop"], "exactly_once", 30, own_broker=True).save(tmp_path / "s.json")
    with pytest.raises(CampaignOptionError, match="kills the broker"):
        schedule_of(CampaignOptions(replay=str(tmp_path / "s.json"), brokers="localhost:9092"))


@pytest.mark.parametrize("workload", BUILT_IN)
def test_on_several_nodes_every_leader_that_matters_moves(workload: str) -> None:
    schedule = plan(7, [workload], "exactly_once", 40, own_broker=False, nodes=3)
    faults = [fault for planned in schedule.plans for round_ in planned.rounds for fault in round_.faults]
    moves = [fault for fault in faults if fault.what == "move_leader"]
    assert {fault.leads for fault in moves} == set(WORKLOADS[workload].led("exactly_once"))
    assert len(moves) > len(faults) / 6
    assert {fault.what for fault in faults if fault.target == NODE} == {
        "move_leader",
        "kill",
        "stop",
        "restart",
        "cut_off",
        "too_few_replicas",
        "rolling_restart",
    }


def test_schedule_of_a_cluster_is_not_replayed_on_a_foreign_one(tmp_path: Path) -> None:
    plan(7, ["loop"], "exactly_once", 3, own_broker=False, nodes=3).save(tmp_path / "s.json")
    assert schedule_of(CampaignOptions(replay=str(tmp_path / "s.json"))).nodes == 3
    with pytest.raises(CampaignOptionError, match="leave --brokers out"):
        schedule_of(CampaignOptions(replay=str(tmp_path / "s.json"), brokers="localhost:9092"))
