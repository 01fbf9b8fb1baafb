"""Where a campaign runs: a broker, the proxy in front of it, and processes that are watched over and started again."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from semel.client.admin.risks import MIN_IN_SYNC
from semel.client.errors import KafkaError
from semel.client.timing import Deadline
from semel.local.apache_kafka import ApacheKafka, KafkaCluster, KafkaMissing, NoOtherReplicaError
from semel.local.brokers import SemelBroker
from semel.local.processes import Process, ProcessFailed, family
from semel.local.spark_cluster import SparkCluster
from semel.prove.injection import Control, Injection, Patch, command, spark_python
from semel.prove.powercut import cut_power
from semel.prove.proxy import Proxy
from semel.prove.schedule import Fault

# --- several nodes under a campaign: leaders and coordinators move, by elections and because nodes go ---
#
# One node is down at a time, and the next outage waits until every replica is in sync again: what three copies are
# for. Leaders and coordinators also move while a node is down.


RETRY_S = 0.2
RESTORED_S = 180.0
SETTINGS = {"group.min.session.timeout.ms": "500"}
AT_ANY_TIME = ("move_leader",)  # also while a node is down


class NodesError(Exception):
    """The cluster cannot be started, or does not come back."""


class Outage:
    """One fault on its way: it waits for its turn, happens, and ends when every replica is in sync again."""

    def __init__(self, inflict: Callable[[Outage], None]) -> None:
        self.fired = threading.Event()
        self._ending = threading.Event()
        self._inflict = inflict
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="outage", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.is_ending:
            try:
                self._inflict(self)
                return
            except (KafkaError, NoOtherReplicaError):
                self.wait(RETRY_S)  # the cluster is busy with something else
            except (ProcessFailed, NodesError) as error:
                self.error = error
                return

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_ending(self) -> bool:
        return self._ending.is_set()

    def wait(self, seconds: float) -> None:
        self._ending.wait(seconds)

    def end(self) -> None:
        """Takes back what has not happened, and waits for the end of what has."""
        self._ending.set()
        self._thread.join(2 * RESTORED_S)
        if self.error is not None:
            raise NodesError(f"a node of the cluster does not come back: {self.error}")


def _generation(version: str) -> Literal[0, 1, 2]:
    known: dict[str, Literal[0, 1, 2]] = {"0": 0, "1": 1, "2": 2}
    if version not in known:
        raise NodesError(f"transaction.version is {version!r}; expected 0, 1 or 2")
    return known[version]


class Nodes:
    def __init__(self, folder: Path, count: int, settings: tuple[str, ...] = ()) -> None:
        given = dict(setting.split("=", 1) for setting in settings)
        version = given.pop("transaction.version", "2")
        self.proxy: Proxy | None = None
        self._lock = threading.Lock()
        try:
            self.cluster = KafkaCluster(
                folder / "nodes", count, transaction_version=_generation(version), properties={**SETTINGS, **given}
            )
            self.cluster.start()
        except (KafkaMissing, ProcessFailed) as error:
            raise NodesError(str(error)) from error

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap

    def close(self) -> None:
        self.cluster.close()

    def begin(self, fault: Fault, topic: str, owner: str) -> Outage:
        """`owner`: the group or transactional id whose partition of an internal topic is meant."""

        turn = contextlib.nullcontext() if fault.what in AT_ANY_TIME else self._lock

        def inflict(outage: Outage) -> None:
            with turn:
                if not outage.is_ending:
                    place = topic, self.cluster.partition_of(topic, owner, fault.seed)
                    _ACTS[fault.what](self, outage, fault, place)

        return Outage(inflict)

    # --- what happens, one at a time ---
    def _move(self, outage: Outage, _: Fault, place: tuple[str, int]) -> None:
        self.cluster.move_leader(*place)
        outage.fired.set()

    def _kill(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        node = self.cluster.leader_of(*place)
        node.kill()
        outage.fired.set()
        outage.wait(fault.for_ms / 1000)
        self._start(node)

    def _stop(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        node = self.cluster.leader_of(*place)
        node.pause()
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            node.resume()
        self.cluster.await_in_sync(RESTORED_S)

    def _restart(self, outage: Outage, _: Fault, place: tuple[str, int]) -> None:
        self._restart_node(outage, self.cluster.leader_of(*place))

    def _roll(self, outage: Outage, _: Fault, __: tuple[str, int]) -> None:
        for node in self.cluster.nodes.values():
            self._restart_node(outage, node)

    def _restart_node(self, outage: Outage, node: ApacheKafka) -> None:
        """In order: it hands its partitions over before it ends."""
        node.stop()
        outage.fired.set()
        self._start(node)

    def _start(self, node: ApacheKafka) -> None:
        node.start()
        self.cluster.await_in_sync(RESTORED_S)

    def _cut_off(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        """Clients do not reach it; the other nodes do, so it goes on leading."""
        assert self.proxy is not None
        self.proxy.refuse(self.cluster.leader_of(*place).bootstrap)
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            self.proxy.admit()

    def _require_too_many(self, outage: Outage, fault: Fault, place: tuple[str, int]) -> None:
        """A write needs more replicas in sync than there are."""
        topic = place[0]
        self.cluster.configure(topic, {MIN_IN_SYNC: str(len(self.cluster.nodes) + 1)})
        outage.fired.set()
        try:
            outage.wait(fault.for_ms / 1000)
        finally:
            self._take_back(topic, {MIN_IN_SYNC: str(len(self.cluster.nodes) // 2 + 1)})

    def _take_back(self, topic: str, settings: dict[str, str]) -> None:
        """However busy the cluster is: with the setting left as it was, nothing could be written any more."""
        deadline = Deadline(RESTORED_S)
        while True:
            try:
                return self.cluster.configure(topic, settings)
            except KafkaError as error:
                if deadline.expired:
                    raise NodesError(f"{settings} could not be set on topic {topic!r}: {error}") from error
                time.sleep(RETRY_S)


_ACTS: dict[str, Callable[[Nodes, Outage, Fault, tuple[str, int]], None]] = {
    "move_leader": Nodes._move,
    "kill": Nodes._kill,
    "stop": Nodes._stop,
    "restart": Nodes._restart,
    "rolling_restart": Nodes._roll,
    "cut_off": Nodes._cut_off,
    "too_few_replicas": Nodes._require_too_many,
}


RESTARTS_MAX = 60  # of one process while a workload runs, beyond those that faults ask for
SHOWS_STACKS = signal.SIGUSR1  # a worker prints what each of its threads does
PYTHON_DAEMON = re.compile(r"-m (pyspark|semel\.spark)\.daemon ")  # it and what it forked
QUICK_END_S = 0.4  # a process that ends sooner is not started again at once
BROKER_SETTINGS = ("group.min.session.timeout.ms=500", "group.initial.rebalance.delay.ms=0")


class TestbedError(Exception):
    """The campaign cannot go on: nothing can be said about the guarantee."""


class SupervisedProcess:
    """A process that should run. One that ends is started again, as a supervisor would do."""

    def __init__(self, name: str, make: Callable[[], Process]) -> None:
        self.name = name
        self._make = make
        self.process: Process | None = None
        self.wanted = False
        self.ends: list[str] = []  # exit code and last output of those that ended by themselves with an error
        self.has_finished = False  # it ended by itself, without an error
        self.hosts: Sequence[Process] = ()  # others that start processes for it: the workers of a Spark cluster
        self._old: list[Process] = []  # replaced while frozen; they wake up as zombies
        self._started_s = 0.0

    def start(self) -> None:
        self.wanted = True
        self.has_finished = False
        self.process = self._make()
        self._started_s = time.monotonic()

    def supervise(self) -> None:
        """Starts it again if it ended; unless it ended well."""
        process = self.process
        if not self.wanted or process is None or process.running:
            return
        if time.monotonic() - self._started_s < QUICK_END_S:
            return
        code = process.returncode
        process.kill()  # what it left of its group
        if code == 0:
            self.wanted, self.has_finished = False, True
            return
        if code is not None and code > 0:
            self.ends.append(f"{self.name} ended with exit code {code}; its last output:\n{process.output[-3000:]}")
        if len(self.ends) > RESTARTS_MAX:
            raise TestbedError(f"{self.name} keeps ending by itself. {self.ends[-1]}")
        self.start()

    def signal_at_once(self, number: signal.Signals) -> None:
        """From the proxy's thread: nothing is waited for."""
        if self.process is not None and self.process.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def thaw(self) -> None:
        if self.process is not None and self.process.running:
            self.process.resume()

    def replace(self) -> Process:
        """Starts a second one while the first stands still; returns the first."""
        assert self.process is not None
        old = self.process
        self._old.append(old)
        self.start()
        return old

    def restart(self) -> None:
        """In order: SIGTERM, and again."""
        if self.process is not None and self.process.running:
            try:
                self.process.terminate(15)
            except ProcessFailed:
                self.process.kill()
        self.start()

    def stop(self) -> None:
        self.wanted = False
        for process in (*self._old, self.process):
            if process is not None:
                process.kill()

    def tasks(self) -> list[int]:
        """The Python workers of a Spark driver or of its executors: those that a daemon has forked."""
        daemons = {pid: parent for pid, parent, command in self._family() if PYTHON_DAEMON.search(command)}
        return [pid for pid, parent in daemons.items() if parent in daemons]

    def executors(self) -> list[int]:
        """The JVMs that were started as executors for a Spark driver."""
        return [pid for pid, _, command in self._family() if "CoarseGrainedExecutorBackend" in command]

    def _family(self) -> list[tuple[int, int, str]]:
        roots = [each.pid for each in (self.process, *self.hosts) if each is not None and each.running]
        return [member for root in roots for member in family(root)]


def send(number: signal.Signals, processes: Iterable[int]) -> int:
    """Sends a signal to each that is still there; to how many."""
    sent = 0
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            sent += 1
    return sent


class OwnBroker:
    """The embedded broker as a process that may be killed, frozen, unplugged, and lied to about time and space."""

    def __init__(self, folder: Path, patch: Patch | None = None, settings: tuple[str, ...] = ()) -> None:
        self.faults = folder / "broker-faults"
        self.faults.mkdir(parents=True)
        self.control = Control.create(folder / "control")
        injection = Injection(f"@{self.faults}", str(folder / "control"), power_cut=True, patch=patch)
        options = [word for setting in (*BROKER_SETTINGS, *settings) for word in ("--set", setting)]
        self.broker = SemelBroker(
            folder / "broker", *options, "--log-level", "warning", semel=command(injection, "-m", "semel")
        )
        self.broker.start()
        self.power_cut_seed: int | None = None  # its next death takes what was not synced
        self.cuts_at: dict[str, int] = {}  # the same at a point: its name and the seed
        self.deaths = 0

    @property
    def bootstrap(self) -> str:
        return self.broker.bootstrap

    @property
    def process(self) -> Process:
        assert self.broker.process is not None
        return self.broker.process

    def supervise(self) -> None:
        """A broker that died is started again, after the power cut if one is planned, and once its disk is free."""
        if self.process.running or self.control.disk_is_full:
            return
        self.process.kill()
        self.deaths += 1
        for point in [point for point in self.cuts_at if (self.faults / f"{point}.fired").exists()]:
            self.power_cut_seed = self.cuts_at.pop(point)
        if self.power_cut_seed is not None:
            luck = random.Random(self.power_cut_seed) if self.power_cut_seed else None
            cut_power(self.broker.directory, luck)
            self.power_cut_seed = None
        try:
            self.broker.start()
        except ProcessFailed as failure:
            if "fault fired" not in str(failure):  # else a fault at its recovery killed it again
                raise TestbedError(f"the broker does not come up again: {failure}") from failure

    def close(self) -> None:
        self.broker.close()
        self.control.close()


class Testbed:
    """Everything that runs. `brokers`: an existing cluster, which is not touched but by requests through the proxy.
    `nodes`: so many nodes of Apache Kafka instead of semel's broker."""

    def __init__(
        self,
        brokers: str | None = None,
        patch: Patch | None = None,
        settings: tuple[str, ...] = (),
        nodes: int | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="semel-prove-"))
        self.patch = patch  # changes semel in every process, to show that the checker finds a bug
        self.sink_faults = self.folder / "sink-faults"
        self.sink_faults.mkdir()
        self.own: OwnBroker | None = None
        self.nodes: Nodes | None = None
        self.spark: SparkCluster | None = None  # of the workload that needs one
        self.processes: dict[str, SupervisedProcess] = {}
        try:
            if nodes is not None:
                self.nodes = Nodes(self.folder, nodes, settings)
                self.direct = self.nodes.bootstrap
            elif brokers is None:
                self.own = OwnBroker(self.folder, patch, settings)
                self.direct = self.own.bootstrap
            else:
                self.direct = first_reachable(brokers)
            self.proxy = Proxy(self.direct)
            if self.nodes is not None:
                self.nodes.proxy = self.proxy
        except BaseException:
            self.close()
            raise

    def add_process(self, name: str, *program: str, spark: bool = False) -> SupervisedProcess:
        """A Python process of this campaign, with the faults at named points; so has what a Spark driver starts."""
        injection = Injection(f"@{self.sink_faults}", patch=self.patch)
        env = spark_python(injection, self.folder / "python") if spark else {}
        supervised = self.processes[name] = SupervisedProcess(
            name, lambda: Process(command(injection, *program), env=env)
        )
        return supervised

    def start_spark_cluster(self, folder: Path, java_options: str) -> SparkCluster:
        """Runs until `clear`."""
        self.spark = SparkCluster(folder, java_options)
        return self.spark.start()

    def supervise(self) -> None:
        if self.own is not None:
            self.own.supervise()
        for supervised in list(self.processes.values()):
            supervised.supervise()

    def show_stacks(self) -> None:
        """Has every process of a pipeline that stands still say where it stands."""
        running = [supervised.process for supervised in self.processes.values() if supervised.process is not None]
        counts = [(process, process.line_count) for process in running if process.running]
        for process, _ in counts:
            send(SHOWS_STACKS, [process.pid])
        for process, before in counts:
            with contextlib.suppress(ProcessFailed):
                process.wait_for_line("most recent call first", 5, after=before)

    def last_output(self, producer: str) -> str:
        """How each process ended by itself, if it did, and its last output otherwise. A producer that has finished has
        nothing to say."""
        words = []
        for name, supervised in self.processes.items():
            if name == producer and supervised.has_finished:
                continue
            output = supervised.process.output[-3000:] if supervised.process is not None else ""
            if supervised.ends:
                words.append(supervised.ends[-1])
            elif supervised.has_finished:
                words.append(f"{name} ended with exit code 0; its last output:\n{output}")
            else:
                words.append(f"{name} is running; its last output:\n{output}")
        return "\n".join(words)

    def clear(self) -> None:
        for supervised in self.processes.values():
            supervised.stop()
        self.processes.clear()
        if self.spark is not None:
            self.spark.close()
            self.spark = None

    def close(self) -> None:
        self.clear()
        if hasattr(self, "proxy"):
            self.proxy.close()
        if self.own is not None:
            self.own.close()
        if self.nodes is not None:
            self.nodes.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def first_reachable(brokers: str) -> str:
    """The first address of a list that takes connections."""
    tried = []
    for address in (part.strip() for part in brokers.split(",") if part.strip()):
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal():
            raise TestbedError(f"--brokers is {brokers!r}; expected HOST:PORT, or several with commas between")
        try:
            socket.create_connection((host, int(port)), 5).close()
            return address
        except OSError as error:
            tried.append(f"{address} ({error.strerror or error})")
    raise TestbedError(f"no broker can be reached: {', '.join(tried) or 'no address given'}")
