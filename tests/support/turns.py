"""In which order and company tests run when several run at once.

Two cores: what takes long begins, so that the end of a run is not one long test. Tests of one file stay together, as
they share what they set up; tests on Spark stay together too, in two groups, since a Spark takes seconds to start and
keeps a core busy; and tests that are long and share nothing go to whichever process is free. Most tests wait (for a
timeout, a rebalance, a restart), some compute all the time: of those only a few run at once, beside many that wait.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

FIRST = ("spark", "simulation", "demo", "guarantees", "prove", "audit", "kafka", "clients")  # folders; all others later
SPARK = {
    "drivers": re.compile(  # with programs of their own, on a cluster or not
        r"tests/spark/test_(bad_input|declarative|modes|stage_reruns|two_attempts|worker_memory)"
        r"|tests/guarantees/test_(d6|e[1-57]|f1_spark)_"
    ),
    "session": re.compile(
        r"tests/spark/(?!test_source_offsets|test_stream_writer_protocol)"  # they need no Spark
        r"|tests/guarantees/test_e[69]_"
    ),
}
ALONE = re.compile(
    r"tests/guarantees/test_(b4|g3|acknowledged)_|tests/kafka/test_(consumer_groups|process|transactions)\.py"
)
COMPUTING = re.compile(
    r"(drivers|session)$|tests/(simulation|unit/(protocol|storage))/|tests/guarantees/test_g5_"
)  # groups
COMPUTING_AT_ONCE = 3


def turn(item: pytest.Item) -> int:
    folder = item.path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


def company(nodeid: str) -> str:
    """The name of the group whose tests run in one process, one after the other."""
    for name, tests in SPARK.items():
        if tests.match(nodeid):
            return name
    return nodeid if ALONE.match(nodeid) else nodeid.partition("::")[0]


class Turns(LoadScopeScheduling):
    """xdist's, with our groups."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # by the number of tests; ours are in order of their length

    def _split_scope(self, nodeid: str) -> str:
        return company(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """A test that took its process with it has failed; the rest of its group goes on without it. What is done is
        not handed out again: a process that gets nothing to do would wait for ever."""
        work = self.assigned_work[node]
        crashed = next((test for group in work.values() for test, is_done in group.items() if not is_done), None)
        if crashed is not None:
            work[company(crashed)][crashed] = True
        self.assigned_work[node] = {name: group for name, group in work.items() if not all(group.values())}
        super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: Any) -> None:
        running = [
            name for work in self.assigned_work.values() for name, group in work.items() if not all(group.values())
        ]
        if sum(map(bool, map(COMPUTING.match, running))) >= COMPUTING_AT_ONCE:
            waiting = next((name for name in self.workqueue if not COMPUTING.match(name)), None)
            if waiting is not None:
                self.workqueue.move_to_end(waiting, last=False)
        with suppress(
            OSError
        ):  # it died after its last report: the group is noted as its own, and remove_node hands it on
            super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections:
            return  # it has just replaced another and has not collected yet
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) < 2:  # it keeps its last test until it knows what comes next
            super()._reschedule(node)
