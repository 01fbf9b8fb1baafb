"""The gate holds every pipeline at its point, and lets nobody stand there for nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from semel.demo.program import EXACTLY_ONCE, FAULTS, GUARANTEES, Gate
from semel.prove.injection import SINK_POINTS
from tests.support.waiting import PATIENCE_S


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, str | None]] = []
        self._new = threading.Condition()

    def __call__(self, event: str, **facts: Any) -> None:
        with self._new:
            self.events.append((event, facts.get("guarantee")))
            self._new.notify_all()

    def await_event(self, event: str) -> None:
        with self._new:
            assert self._new.wait_for(lambda: event in [name for name, _ in self.events], PATIENCE_S), self.events


def walk(gate: Gate, guarantee: str, point: str, passed: list[str]) -> threading.Thread:
    def run() -> None:
        gate.work_for(guarantee)
        gate.hit(point)
        passed.append(guarantee)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_all_pipelines_are_held_at_their_points_until_the_gate_opens() -> None:
    told, passed = Told(), list[str]()
    gate = Gate(GUARANTEES, told)
    gate.arm("half-way", 0)
    points = FAULTS[0].points
    threads = [walk(gate, guarantee, points[guarantee], passed) for guarantee in GUARANTEES]
    told.await_event("all_held")
    assert passed == []
    assert {who for event, who in told.events if event == "held"} == set(GUARANTEES)
    gate.open()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(passed) == sorted(GUARANTEES)


def test_other_points_other_threads_and_early_batches_pass() -> None:
    told = Told()
    gate = Gate(GUARANTEES, told)
    gate.arm("half-way", 1)
    gate.hit("sink.after_offsets")  # a thread that works for nobody
    gate.work_for(EXACTLY_ONCE)
    gate.hit("sink.after_offsets")  # its first batch is not finished yet
    gate.count(EXACTLY_ONCE)
    gate.hit("sink.after_write")
    assert told.events == []
    thread = walk(gate, EXACTLY_ONCE, "sink.after_offsets", [])
    told.await_event("held")
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_arming_again_lets_those_go_that_are_held() -> None:
    told, passed = Told(), list[str]()
    gate = Gate(GUARANTEES, told)
    gate.arm("half-way", 0)
    thread = walk(gate, EXACTLY_ONCE, "sink.after_offsets", passed)
    told.await_event("held")
    gate.arm("committed", 0)
    thread.join(PATIENCE_S)
    assert passed == [EXACTLY_ONCE]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_name_points_that_exist(fault: Any) -> None:
    assert set(fault.points) == set(GUARANTEES)
    assert set(fault.points.values()) <= {*SINK_POINTS, "returned"}
