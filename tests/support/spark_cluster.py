"""A Spark standalone cluster out of the pip package: a master and two workers as processes of their own.

The workers are on two loopback addresses, so that Spark takes them for two machines: speculation never starts a copy of
a task on the machine where it runs already. Everything can be found by process id, to be frozen or killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark

from semel.local.apache_kafka import free_ports
from semel.local.processes import Process
from semel.prove.injection import Injection, spark_python
from tests.support.jvm import spark_options
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("127.0.0.2", "127.0.0.3")
CORES = 8  # offered by each worker, not really there: several applications at once, each with one core per worker


class SparkCluster:
    """Use it as a context manager. `url` is the master to give to a session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local = folder / "local"  # shuffle files are here
        self.work = folder / "work"
        (self.port,) = free_ports(1)
        self.master: Process | None = None
        self.workers: list[Process] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def __enter__(self) -> SparkCluster:
        for each in (self.local, self.work):
            each.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in (*self.workers, *filter(None, [self.master])):
            family = list(descendants(process.pid))  # Python workers are in groups of their own
            process.kill()
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def conf(self) -> dict[str, str]:
        """What an application should ask for: one core on each worker."""
        return {
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": spark_options(),
            "spark.driver.host": "127.0.0.1",
            "spark.default.parallelism": "4",  # more tasks than can run at once: some begin when others are done
        }

    def _start(self) -> None:
        here = ["--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"]
        self.master = self._daemon("127.0.0.1", "org.apache.spark.deploy.master.Master", *here)
        offer = ["--cores", str(CORES), "--memory", "8g", "--webui-port", "0", "--work-dir", str(self.work)]
        self.master.wait_for_line("elected leader|New state: ALIVE", timeout_s=120)
        worker = "org.apache.spark.deploy.worker.Worker"
        self.workers = [self._daemon(host, worker, "--host", host, *offer, self.url) for host in HOSTS]
        for each in self.workers:
            each.wait_for_line("Successfully registered with master", timeout_s=120)

    def _daemon(self, host: str, name: str, *words: str) -> Process:
        environment = {
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{spark_options()} -Dspark.master.rest.enabled=false",
            "SPARK_LOCAL_IP": host,  # or the pages of master and workers are open to the world
            "SPARK_LOCAL_DIRS": str(self.local),
            "PYTHONPATH": str(ROOT),  # executors and their Python workers see the tests' modules
            "PYSPARK_PYTHON": sys.executable,
        }
        command = [Path(pyspark.__file__).parent / "bin" / "spark-class", name, *words]
        return Process(command, env=environment, cwd=self.folder)

    # --- to be killed ---

    @contextlib.contextmanager
    def frozen_host_of(self, executor: int) -> Iterator[None]:
        """Spark's daemon that started an executor stands still: as a machine that others hear nothing from."""
        (daemon,) = (worker for worker in self.workers if executor in descendants(worker.pid))
        os.kill(daemon.pid, signal.SIGSTOP)  # it alone, not what it started
        try:
            yield
        finally:
            os.kill(daemon.pid, signal.SIGCONT)

    def delete_shuffle_files(self) -> int:
        """As a disk that fails does; how many there were."""
        files = [f for f in self.local.rglob("shuffle_*") if f.is_file()]
        for file in files:
            file.unlink()
        return len(files)


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
