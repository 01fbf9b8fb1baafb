"""Faults at named points of programs of Spark, and processes by process id, to be frozen or killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from semel.local.processes import family
from semel.local.spark_cluster import SparkCluster
from semel.prove.injection import Injection, spark_python
from tests.support.waiting import until


class Faults:
    """Arms named points by files, for programs that are started with `injection` and `spark_python`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._passing: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def injection(self) -> Injection:
        return Injection(f"@{self.folder}")

    def spark_python(self) -> dict[str, str]:
        return spark_python(self.injection, self.folder.with_name(f"{self.folder.name}-python"))

    def arm(self, name: str, action: str, times: int = 1) -> None:
        """The next `times` processes that reach the point are killed or stopped, or (`pass`) tell that they were."""
        self.disarm(name)
        (self._passing.add if action == "pass" else self._passing.discard)(name)
        for number in range(1, times + 1):
            draft = self.folder / "draft"
            draft.write_text(action)
            draft.rename(self.folder / f"{name}@{number}")

    def disarm(self, name: str = "") -> None:
        for file in self.folder.glob(f"{name}*"):
            file.unlink()

    def fired(self, name: str, times: int = 1, timeout_s: float = 120) -> list[int]:
        """Waits until the point was reached so often; the processes that reached it, dead or standing still."""
        files = [self.folder / f"{name}@{number}.fired" for number in range(1, times + 1)]
        until(lambda: all(f.exists() for f in files), f"the point {name} was not reached {times} times", timeout_s)
        pids = [int(file.read_text()) for file in files]
        for pid in pids if name not in self._passing else []:
            until(lambda pid=pid: state_of(pid) in ("T", "Z", ""), f"process {pid} goes on")
        return pids


# --- processes by /proc ---


def state_of(pid: int) -> str:
    """One letter, as ps shows it: T is stopped, Z dead and not yet buried; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def executor_of(pid: int) -> int:
    """The JVM that a Python worker belongs to."""
    while "CoarseGrainedExecutorBackend" not in command_of(pid):
        pid = parent_of(pid)
        assert pid > 1, "the process is not a worker of an executor"
    return pid


def descendants(pid: int) -> Iterator[int]:
    """Children and their children."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                is_child = parent_of(int(entry.name)) == pid
            except OSError:
                continue
            if is_child:
                yield int(entry.name)
                yield from descendants(int(entry.name))


def kill_tree(pid: int) -> None:
    """kill -9 of a process, then of what it started."""
    family = [pid, *descendants(pid)]
    for each in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    for each in family:
        until(lambda each=each: state_of(each) in ("", "Z"), f"process {each} did not end")


# --- a standalone cluster ---


@contextlib.contextmanager
def frozen_host_of(cluster: SparkCluster, executor: int) -> Iterator[None]:
    """Spark's daemon that started an executor stands still: as a machine that others hear nothing from."""
    (daemon,) = (worker for worker in cluster.workers if executor in (pid for pid, *_ in family(worker.pid)))
    os.kill(daemon.pid, signal.SIGSTOP)  # it alone, not what it started
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def delete_shuffle_files(cluster: SparkCluster) -> int:
    """As a disk that fails does; how many there were."""
    files = [f for f in cluster.local.rglob("shuffle_*") if f.is_file()]
    for file in files:
        file.unlink()
    return len(files)
