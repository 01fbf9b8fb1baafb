"""A Spark standalone cluster out of the pip package: a master and two workers as processes of their own.

The workers are on two loopback addresses, so that Spark takes them for two machines: speculation never starts a copy of
a task on the machine where it runs already. Everything can be found by process id, to be frozen or killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from semel.local.processes import Process, family, free_ports

HOSTS = ("127.0.0.2", "127.0.0.3")
CORES = 8  # offered by each worker, not really there: several applications at once, each with one core per worker


class SparkCluster:
    """Use it as a context manager. `url` is the master to give to a session.

    `java_options`: of the JVMs. `python_path`: a folder whose modules executors and their Python workers see."""

    def __init__(self, folder: Path, java_options: str = "", python_path: Path | None = None) -> None:
        self.folder = folder
        self.local = folder / "local"  # shuffle files are here
        self.work = folder / "work"
        self._java_options = java_options
        self._python_path = python_path
        (self.port,) = free_ports(1)
        self.master: Process | None = None
        self.workers: list[Process] = []

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def start(self) -> SparkCluster:
        """Returns when both workers are registered."""
        for each in (self.local, self.work):
            each.mkdir(parents=True)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> SparkCluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in (*self.workers, *filter(None, [self.master])):
            started = family(process.pid)  # Python workers are in groups of their own
            process.kill()
            for pid, *_ in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def conf(self) -> dict[str, str]:
        """What an application should ask for: one core on each worker."""
        return {
            "spark.cores.max": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": self._java_options,
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
        import pyspark

        home = Path(pyspark.__file__).parent
        environment = {
            "SPARK_HOME": str(home),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{self._java_options} -Dspark.master.rest.enabled=false",
            "SPARK_LOCAL_IP": host,  # or the pages of master and workers are open to the world
            "SPARK_LOCAL_DIRS": str(self.local),
            "PYSPARK_PYTHON": sys.executable,
            **({} if self._python_path is None else {"PYTHONPATH": str(self._python_path)}),
        }
        return Process([home / "bin" / "spark-class", name, *words], env=environment, cwd=self.folder)
