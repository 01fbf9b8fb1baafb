"""`semel prove` as a command: your own pipeline, bad input, Ctrl-C, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from semel.local.brokers import SemelBroker, semel_command
from semel.local.processes import Process
from semel.prove.checker.reading import create_topics, read, topics_like
from semel.prove.schedule import Fault, Round, Schedule, WorkloadPlan
from tests.support.prove import prove
from tests.support.waiting import PATIENCE_S, eventually, until

DOCS = (Path(__file__).parents[3] / "docs/prove.md").read_text()


def example() -> str:
    """The pipeline in the documentation."""
    found = re.search(r"```python\n(# mypipeline.py.*?)```", DOCS, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.timeout(120)
def test_own_pipeline_from_the_documentation_is_proved(tmp_path: Path) -> None:
    (tmp_path / "mypipeline.py").write_text(example())
    kill = Fault("kill", "app", at_ms=900)
    Schedule(1, [WorkloadPlan("app", "exactly_once", [Round([kill], 6)], _names("expected"))]).save(tmp_path / "s.json")
    proof = prove(tmp_path, "--replay", "s.json")
    assert (proof.code, proof.result["faults_fired"]) == (0, 1), proof.told


@pytest.mark.timeout(120)
def test_own_pipeline_that_forgets_a_record_is_found_out(tmp_path: Path) -> None:
    text = example() + "\n\ndef wrong(value):\n    return [b'seen ' + value, b'also ' + value]\n"
    (tmp_path / "mypipeline.py").write_text(text)
    kill = Fault("kill", "app", at_ms=900)
    Schedule(1, [WorkloadPlan("app", "exactly_once", [Round([kill], 3)], _names("wrong"))]).save(tmp_path / "s.json")
    proof = prove(tmp_path, "--replay", "s.json")
    assert proof.code == 1
    assert proof.kinds == {"lost"}
    assert {violation["record"] for violation in proof.violations} >= {"also 0000000"}


@pytest.mark.timeout(120)
def test_own_pipeline_whose_function_raises_never_came_up_and_shows_its_error(tmp_path: Path) -> None:
    """What it did not write is not lost by a broken guarantee."""
    text = example() + "\n\ndef broken(**_):\n    raise ValueError('no such column: amount')\n"
    (tmp_path / "mypipeline.py").write_text(text)
    proof = prove(tmp_path, "--app", "mypipeline:broken", "--rounds", "1", "--stuck-after", "30")
    assert (proof.code, proof.violations) == (4, []), proof.told
    assert "ended with exit code 1" in proof.told
    assert "ValueError: no such column: amount" in proof.told
    assert "ValueError: no such column: amount" in proof.result["error"]


def test_pipeline_of_which_nothing_is_expected_shows_nothing(tmp_path: Path) -> None:
    """Whatever it does, nothing of it would be missing."""
    text = example() + "\n\ndef broken(**_):\n    raise ValueError('boom')\n\n\ndef nothing(value):\n    return []\n"
    (tmp_path / "mypipeline.py").write_text(text)
    proof = prove(tmp_path, "--app", "mypipeline:broken", "--expected", "mypipeline:nothing", "--rounds", "1")
    assert proof.code == 4, proof.told
    assert "no output is expected" in proof.result["error"]


@pytest.mark.timeout(120)
def test_own_pipeline_that_writes_nothing_never_came_up(tmp_path: Path) -> None:
    text = (
        example() + "\n\ndef idle(**_):\n    print('nothing to do', flush=True)\n    import time\n    time.sleep(600)\n"
    )
    (tmp_path / "mypipeline.py").write_text(text)
    proof = prove(tmp_path, "--app", "mypipeline:idle", "--rounds", "1", "--stuck-after", "6")
    assert (proof.code, proof.violations) == (4, []), proof.told
    assert "nothing to do" in proof.told


@pytest.mark.timeout(120)
def test_own_pipeline_that_breaks_under_faults_is_shown_with_its_error(tmp_path: Path) -> None:
    """It works at first, and cannot take a record of the first round."""
    text = example().replace('b"seen " + record.value,', "check(record.value),")
    text += """

def check(value):
    import time
    if value == b"0000070":
        time.sleep(3)  # a process that ends at once is started again all the time
        raise ValueError("seventy")
    return b"seen " + value
"""
    (tmp_path / "mypipeline.py").write_text(text)
    cut = Fault("drop_request", "network", api="Produce")  # a kill would cost the next one the session of the dead
    Schedule(1, [WorkloadPlan("app", "exactly_once", [Round([cut], 4)], _names("expected"))]).save(tmp_path / "s.json")
    proof = prove(tmp_path, "--replay", "s.json")
    assert proof.code == 1, proof.told
    assert "ended with exit code 1" in proof.told
    assert "ValueError: seventy" in proof.told
    assert "starting" in proof.told, "progress"


def _names(expected: str) -> dict[str, str]:
    return {"app": "mypipeline:run", "expected": f"mypipeline:{expected}", "stuck_after_s": "20"}


def test_campaign_without_a_fault_that_fires_shows_nothing(tmp_path: Path) -> None:
    never = Fault("drop_request", "network", api="DeleteTopics")
    Schedule(1, [WorkloadPlan("loop", "exactly_once", [Round([never], 2)])]).save(tmp_path / "s.json")
    proof = prove(tmp_path, "--replay", "s.json")
    assert (proof.code, proof.violations) == (3, [])
    assert "no fault fired" in proof.told


def test_unreachable_cluster_is_named_in_one_line(tmp_path: Path) -> None:
    with Process(semel_command("prove", "--brokers", "127.0.0.1:1", "--save", str(tmp_path / "s.json"))) as process:
        assert process.wait(PATIENCE_S) == 4
        assert "no broker can be reached: 127.0.0.1:1 (Connection refused)" in process.output
        assert "Traceback" not in process.output


def test_topics_that_exist_are_not_touched(tmp_path: Path, shared_semel_broker: SemelBroker) -> None:
    brokers = shared_semel_broker.bootstrap
    create_topics(brokers, {"precious.0.in": 1})
    producer = Producer({"bootstrap.servers": brokers})
    producer.produce("precious.0.in", b"gold")
    assert producer.flush(PATIENCE_S) == 0
    proof = prove(tmp_path, "--brokers", brokers, "--prefix", "precious", "--delete-topics", "--rounds", "1")
    assert proof.code == 4
    assert "exist already" in proof.told
    assert [seen.value for seen in read(brokers, ["precious.0.in"])] == [b"gold"]


@pytest.mark.timeout(120)
def test_ctrl_c_stops_its_processes_and_says_what_is_left_behind(
    tmp_path: Path, shared_semel_broker: SemelBroker
) -> None:
    command = semel_command("prove", "--brokers", shared_semel_broker.bootstrap, "--prefix", "cut-short")
    process = Process([*command, "--save", str(tmp_path / "s.json"), "--seed", "1"])
    try:
        wait_for_topics(shared_semel_broker.bootstrap, "cut-short.")
        time.sleep(1)  # anywhere in the middle
        children = _descendants(process.pid)
        assert children, "it has started processes"
        os.kill(process.pid, 2)
        assert process.wait(PATIENCE_S) == 130
        wait_for_the_end_of(children)
        assert "left behind on" in process.output
        assert "cut-short.0.in" in process.output
        assert topics_like(shared_semel_broker.bootstrap, "cut-short."), "there was no question, so nothing was deleted"
        assert "Traceback" not in process.output
        assert json.loads((tmp_path / "s.json").read_text())["seed"] == 1
    finally:
        process.kill()


def wait_for_topics(brokers: str, prefix: str) -> None:
    until(lambda: topics_like(brokers, prefix), "no topics were created")


def wait_for_the_end_of(processes: list[int]) -> None:
    eventually(
        lambda: [pid for pid in processes if Path("/proc", str(pid), "cmdline").exists()],
        lambda left: not left,
        otherwise="some of its processes did not end",
    )


def _descendants(pid: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]
