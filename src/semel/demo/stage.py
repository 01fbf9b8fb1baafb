"""The broker, the producer and the program under test: started, killed, started again, and never left behind."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semel.broker.embedded import Broker
from semel.client.admin import Admin, NewTopic
from semel.demo.feeder import Feeder
from semel.demo.plan import GUARANTEES
from semel.demo.workloads import Topics, Workload
from semel.local.processes import Process

POLL_S = 0.05
DRIVERS = {"spark": "semel.demo.driver", "process": "semel.demo.loop_driver"}


class StageError(Exception):
    """The demo could not go on; the message says why."""


class Stage:
    """Everything that a demo starts. Use it as a context manager."""

    def __init__(self, workload: Workload, engine: str, seed: int, per_s: float, *, keep: bool = False) -> None:
        self.workload = workload
        self.engine = engine
        self.prefix = f"demo-{workload.name}"
        self.folder = Path(tempfile.mkdtemp(prefix="semel-demo-"))
        self._keep = keep
        self.broker = Broker(self.folder / "broker", settings={"group.initial.rebalance.delay.ms": 0})
        self._seed, self._per_s = seed, per_s
        self.feeder: Feeder | None = None
        self.driver: Process | None = None
        self._read_lines = 0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes; the folder goes, unless it is to be kept."""
        if self.driver is not None:
            self.driver.kill()
        self.broker.stop()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- the broker and the producer ---

    def start_broker(self) -> None:
        self.broker.start()

    def create_topics(self) -> None:
        wanted = {name: count for g in GUARANTEES for name, count in Topics.of(self.prefix, g).partitions().items()}
        with Admin(bootstrap_servers=self.broker.bootstrap) as admin:
            admin.create_topics([NewTopic(name, count) for name, count in wanted.items()])

    def start_feeder(self) -> Feeder:
        source = Topics.of(self.prefix, GUARANTEES[0]).source
        self.feeder = Feeder(self.broker.bootstrap, source, self.workload, self._seed, self._per_s)
        self.feeder.start()
        return self.feeder

    # --- the program ---

    def start_driver(self) -> None:
        job = {
            "brokers": self.broker.bootstrap,
            "workload": self.workload.name,
            "prefix": self.prefix,
            "folder": str(self.folder / "checkpoints"),
        }
        command = [sys.executable, "-m", DRIVERS[self.engine], json.dumps(job)]
        self.driver = Process(command, stdin=True, cwd=self.folder)
        self._read_lines = 0

    def command(self, *words: object) -> None:
        assert self.driver is not None
        self.driver.write(" ".join(map(str, words)) + "\n")

    def kill_driver(self) -> None:
        """kill -9 of the program and its JVM."""
        assert self.driver is not None
        self.driver.kill()

    def events(self, timeout_s: float) -> Iterator[dict[str, Any] | None]:
        """What the program says, as it says it; None now and then, so that the caller can look at the clock."""
        assert self.driver is not None
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            running = self.driver.running
            if not running:
                self.driver.wait()  # until its last words are here
            lines = self.driver.lines(self._read_lines)
            self._read_lines += len(lines)
            for line in lines:
                if line.startswith('{"event"'):
                    yield json.loads(line)
            if not lines:
                if not running:
                    raise StageError(f"the program ended by itself:\n{self._last_words()}")
                yield None
                time.sleep(POLL_S)
        raise StageError(f"the program did not get on within {timeout_s:.0f} s:\n{self._last_words()}")

    def _last_words(self) -> str:
        assert self.driver is not None
        return "\n".join(self.driver.output.splitlines()[-30:])
