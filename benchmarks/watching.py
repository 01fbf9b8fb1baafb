"""What it costs a broker to be watched: a page of `semel ui` open in a browser, and its metrics scraped every second.

    semel bench watching

Pairs of runs in turns, with the same broker: produce requests as fast as it takes them, watched and alone. Watched
means what the page does: it follows `/api/live`, reads its view again at each of its events (every two seconds), and
the doctor every fifteen seconds; and a GET of `/metrics` every second. The page's server and the load are processes of
their own on the same machine. A second row has what the broker itself spends on it while it does nothing else, in
percent of a core: that hardly depends on what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import urlopen

from benchmarks.contestants import create_topics, topic, write_to_all
from benchmarks.harness import Report, compare, interleave
from benchmarks.produce_cpu import cpu_us
from semel.local.brokers import SemelBroker, semel_command
from semel.local.processes import Process, free_ports

BENCH = "watching"
WATCHED, ALONE = "watched", "alone"
PARTITIONS = 10
LIMIT_PERCENT = 2.0
SCRAPE_EVERY_S = 1.0
DOCTOR_EVERY_S = 15.0
IDLE_S = 20.0
SHAPE = ("--partitions", "4", "--connections", "4", "--records", "10", "--record-bytes", "1000")


def run(report: Report, quick: bool = False) -> None:
    for topics in (10,) if quick else (10, 1_000):
        (port,) = free_ports(1)
        with SemelBroker(None, "--fsync", "os", "--metrics", str(port)) as broker:
            write_to_all(broker, create_topics(broker, topics, PARTITIONS), PARTITIONS)
            case = f"{topics:,} topics x {PARTITIONS} partitions"
            _throughput(report, broker, port, case, quick)
            _idle(report, broker, port, case, 5.0 if quick else IDLE_S)


def _throughput(report: Report, broker: SemelBroker, port: int, case: str, quick: bool) -> None:
    requests = 20_000 if quick else 150_000

    def watched() -> float:
        with watching(broker, port):
            return _rate(broker, requests)

    values = interleave({WATCHED: watched, ALONE: lambda: _rate(broker, requests)}, runs=2 if quick else 7)
    compare(report, bench=BENCH, case=f"produce, {case}", unit="requests/s", values=values, subject=WATCHED)


def _rate(broker: SemelBroker, requests: int) -> float:
    with topic(broker) as name:
        words = (sys.executable, "-m", "benchmarks.produce_load", "closed", broker.bootstrap, name, *SHAPE)
        done = subprocess.run([*words, "--requests", str(requests)], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["requests_per_s"])


def _idle(report: Report, broker: SemelBroker, port: int, case: str, seconds: float) -> None:
    assert broker.process is not None
    pid = broker.process.pid
    shares = []
    for _ in range(3):
        with watching(broker, port):
            before_us, started_s = cpu_us(pid), time.monotonic()
            time.sleep(seconds)
            shares.append((cpu_us(pid) - before_us) / (time.monotonic() - started_s) / 10_000)
    values = {WATCHED: shares, "limit": [LIMIT_PERCENT]}
    compare(
        report, bench=BENCH, case=f"idle, {case}", unit="% of a core", values=values, better="lower", subject=WATCHED
    )


# --- watching ---
@contextmanager
def watching(broker: SemelBroker, metrics_port: int) -> Iterator[None]:
    """A page and a scraper, until the block ends. What they cannot read is an error."""
    words = semel_command("ui", "--brokers", broker.bootstrap, "--listen", "127.0.0.1:0")
    with Process(words) as server:
        watchers = Watchers(server.wait_for_line(r"^semel ui on (?P<url>http://[^/\s]+)")["url"], metrics_port)
        watchers.start()
        try:
            yield
        finally:
            watchers.stop()
    if watchers.errors:
        raise watchers.errors[0]


class Watchers:
    """What a browser and Prometheus request, each in a thread of its own."""

    def __init__(self, url: str, metrics_port: int) -> None:
        self.errors: list[Exception] = []
        self._url = url
        self._stopping = threading.Event()
        scraped = f"http://127.0.0.1:{metrics_port}/metrics"
        self._threads = [
            threading.Thread(target=self._guarded, args=work)
            for work in (
                (self._look,),
                (self._every, DOCTOR_EVERY_S, f"{url}/api/doctor"),
                (self._every, SCRAPE_EVERY_S, scraped),
            )
        ]

    def start(self) -> None:
        for view in ("doctor", "topics"):  # as the page does when it is opened
            _read(f"{self._url}/api/{view}")
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self.errors.append(error)

    def _every(self, seconds: float, address: str) -> None:
        while not self._stopping.wait(seconds):
            _read(address)

    def _look(self) -> None:
        """Reads the view again at each event."""
        with urlopen(f"{self._url}/api/live", timeout=60) as events:
            for line in events:
                if self._stopping.is_set():
                    return
                if line.startswith(b"data:"):
                    _read(f"{self._url}/api/topics")


def _read(address: str) -> None:
    with urlopen(address, timeout=60) as response:
        response.read()
