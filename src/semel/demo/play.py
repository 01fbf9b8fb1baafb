"""What happens in a demo, in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from semel.demo.plan import FAULTS, GUARANTEES, Fault
from semel.demo.screen import Screen
from semel.demo.stage import Stage
from semel.demo.workloads import Outcome, Topics

START_TIMEOUT_S = 120.0
GET_ON_TIMEOUT_S = 120.0
BROKER_DOWN_S = 0.8
# Batches that each pipeline has finished since the arming, before it is held: enough for the next one to have output.
BATCHES_BEFORE = 1


class Moment(NamedTuple):
    """Something that happened, on the wall clock."""

    at_s: float
    who: str  # "driver" or "broker"
    what: str  # "up", "killed", "down"
    text: str


class Story(NamedTuple):
    """How it went."""

    started_s: float
    ended_s: float
    moments: list[Moment]
    held: list[tuple[str, str, str]]  # fault, guarantee, point: proof that every pipeline stood where it should
    failures: list[tuple[str, str]]  # guarantee, error of a query that was started again


class Play:
    """Runs faults on a stage, one after the other."""

    def __init__(self, stage: Stage, screen: Screen, faults: Sequence[Fault] = FAULTS) -> None:
        self._stage = stage
        self._screen = screen
        self._faults = faults
        self._started_s = time.time()
        self._moments: list[Moment] = []
        self._held: list[tuple[str, str, str]] = []
        self._failures: list[tuple[str, str]] = []

    def run(self) -> Story:
        self._begin()
        for fault in self._faults:
            self._inflict(fault)
        self._finish()
        return Story(self._started_s, time.time(), self._moments, self._held, self._failures)

    # --- scenes ---

    def _begin(self) -> None:
        self._stage.start_broker()
        self._note("broker", "up", f"broker is up on {self._stage.broker.bootstrap}")
        self._stage.create_topics()
        self._stage.start_feeder()
        self._start_driver()

    def _inflict(self, fault: Fault) -> None:
        self._stage.command("arm", fault.name, BATCHES_BEFORE)
        self._await("all_held", fault)
        if fault.victim == "driver":
            self._stage.kill_driver()
            self._note("driver", "killed", f"kill -9: the driver, {fault.what}", bad=True)
            self._start_driver()
        else:
            self._stage.broker.kill()
            self._note("broker", "killed", f"kill -9: the broker, {fault.what}", bad=True)
            self._stage.command("open")
            self._pause(BROKER_DOWN_S)
            self._stage.start_broker()
            self._note("broker", "up", "broker is up again")

    def _finish(self) -> None:
        feeder = self._stage.feeder
        assert feeder is not None
        feeder.finish()
        self._screen.moment(f"producer is done: {feeder.committed:,} {self._stage.workload.records}; draining")
        self._stage.command("finish")
        self._await("finished")
        self._stage.kill_driver()
        self._note("driver", "down", "all three have read everything")

    # --- pieces ---

    def _start_driver(self) -> None:
        again = " again" if any(moment.who == "driver" for moment in self._moments) else ""
        name = "Spark" if self._stage.engine == "spark" else "program"
        for lane in self._screen.lanes.values():
            lane.state = f"{name} is starting"
        self._stage.start_driver()
        self._await("started", timeout_s=START_TIMEOUT_S)
        self._note("driver", "up", f"{name} is up{again}, with three pipelines")

    def _await(self, wanted: str, fault: Fault | None = None, timeout_s: float = GET_ON_TIMEOUT_S) -> None:
        for event in self._stage.events(timeout_s):
            self._show_feeder()
            self._screen.refresh()
            if event is None:
                continue
            self._take(event, fault)
            if event["event"] == wanted:
                return

    def _take(self, event: dict[str, Any], fault: Fault | None) -> None:
        lane = self._screen.lanes.get(event.get("guarantee", ""))
        if event["event"] == "batch" and lane is not None:
            lane.add(event["rows"])
        elif event["event"] == "held" and lane is not None and fault is not None:
            lane.state = f"held at {event['point']}"
            self._held.append((fault.name, event["guarantee"], event["point"]))
        elif event["event"] == "query_failed":
            self._failures.append((event["guarantee"], event["error"]))
            self._screen.moment(f"{event['guarantee']}: its query failed and is started again")

    def _show_feeder(self) -> None:
        feeder = self._stage.feeder
        if feeder is None:
            return
        if feeder.error is not None:
            raise feeder.error
        aborted = f", {feeder.aborted:,} taken back" if feeder.aborted else ""
        records = self._stage.workload.records
        self._screen.footer = f"{self._screen.elapsed_s:.0f} s · producer: {feeder.committed:,} {records}{aborted}"

    def _pause(self, duration_s: float) -> None:
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            self._screen.refresh()
            time.sleep(0.05)

    def _note(self, who: str, what: str, text: str, *, bad: bool = False) -> None:
        self._moments.append(Moment(time.time(), who, what, text))
        self._screen.moment(text, bad=bad)


def judge(stage: Stage) -> list[Outcome]:
    """Reads all topics through the independent client and counts."""
    from semel.demo.reading import read

    outcomes = []
    for guarantee in GUARANTEES:
        topics = Topics.of(stage.prefix, guarantee)
        source, output, rejected = (
            read(stage.broker.bootstrap, topic) for topic in (topics.source, topics.output, topics.rejected)
        )
        outcomes.append(stage.workload.judge(guarantee, source, output, rejected))
    return outcomes
