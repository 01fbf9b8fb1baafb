"""Apache Kafka as one KRaft node in a folder of its own, or as a cluster of several, and the tools that come with it.

The jars come from `make kafka` (.cache/kafka/libs) or from the folder that SEMEL_KAFKA_LIBS names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from semel.client.admin.calls import Admin, PartitionInfo
from semel.client.cluster_calls import NodeTarget
from semel.client.errors import error_of
from semel.client.immediate import run
from semel.client.timing import Deadline
from semel.local import checkout
from semel.local.brokers import BrokerProcess
from semel.local.processes import Process, ProcessFailed, free_ports
from semel.protocol.api import Api
from semel.protocol.errors import ErrorCode
from semel.protocol.messages import topics as messages
from semel.protocol.partitioning import coordinator_partition

VERSION = "4.3.1"  # the reference; SEMEL_KAFKA_LIBS may name another one
TRANSACTION_VERSIONS_SINCE = (4, 0)  # before, there is the first generation only
QUICK_JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")  # for what lives for a second, or has little to do

TOOLS = {
    "ConfigCommand": "kafka.admin.ConfigCommand",
    "ConsoleConsumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "ConsoleProducer": "org.apache.kafka.tools.ConsoleProducer",
    "ConsumerGroupCommand": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "ConsumerPerformance": "org.apache.kafka.tools.ConsumerPerformance",
    "DumpLogSegments": "org.apache.kafka.tools.DumpLogSegments",
    "FeatureCommand": "org.apache.kafka.tools.FeatureCommand",
    "GetOffsetShell": "org.apache.kafka.tools.GetOffsetShell",
    "ProducerPerformance": "org.apache.kafka.tools.ProducerPerformance",
    "StorageTool": "kafka.tools.StorageTool",
    "TopicCommand": "org.apache.kafka.tools.TopicCommand",
    "TransactionsCommand": "org.apache.kafka.tools.TransactionsCommand",
    "VerifiableConsumer": "org.apache.kafka.tools.VerifiableConsumer",
    "VerifiableProducer": "org.apache.kafka.tools.VerifiableProducer",
}
BEFORE_4 = {  # they have moved since
    "ConsoleProducer": "kafka.tools.ConsoleProducer",
    "DumpLogSegments": "kafka.tools.DumpLogSegments",
}


class KafkaMissing(Exception):
    """Apache Kafka or Java is not there; the message says how to get it."""


class ToolFailed(Exception):
    """One of Kafka's tools ended with an error; the message has its output."""


def kafka_libs() -> Path:
    """The folder with Kafka's jars."""
    named = os.environ.get("SEMEL_KAFKA_LIBS")
    bases = (Path.cwd(), *Path.cwd().parents, checkout.ROOT)
    candidates = [Path(named)] if named else [base / ".cache/kafka/libs" for base in bases]
    for libs in candidates:
        if (libs / f"kafka_2.13-{VERSION}.jar").exists() or (named and kafka_version(libs)):
            return libs
    where = f"in SEMEL_KAFKA_LIBS={named}" if named else "in .cache/kafka/libs"
    raise KafkaMissing(f"Apache Kafka {VERSION} is not {where}; `make kafka` fetches it (needs Java and Maven)")


def kafka_version(libs: Path) -> tuple[int, ...]:
    """Of the jars in a folder; () if there are none of Kafka."""
    names = [path.name for path in libs.glob("kafka_2.13-*.jar")]
    return tuple(int(number) for number in re.findall(r"\d+", names[0].partition("-")[2])) if names else ()


def java() -> str:
    """The Java runtime to use: JAVA_HOME's, or the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if found is None:
        raise KafkaMissing("there is no `java` on the PATH (nor under JAVA_HOME); Apache Kafka needs Java 17 or newer")
    return found


def quick_jvm() -> list[str]:
    """Options for a JVM that lives for a second, or has little to do. Where `class_archive` is there, the classes are
    mapped from it instead of being parsed from the jars: a node starts in half of the processor time."""
    archive = class_archive()
    return [*QUICK_JVM, f"-XX:SharedArchiveFile={archive}"] if archive.exists() else [*QUICK_JVM]


def class_archive() -> Path:
    """Where the class data of Kafka is or would be, for this Java and these jars."""
    libs = kafka_libs()
    files = [Path(java()).resolve(), *sorted(libs.glob("kafka_2.13-*.jar"))]
    key = " ".join(f"{file} {file.stat().st_mtime_ns}" for file in files)
    return libs.parent / f"classes-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsa"


# --- tools ---


def tool_command(name: str, *arguments: str | Path, heap_mb: int = 512) -> list[str]:
    """The command line of one of Kafka's tools: a name from TOOLS or any main class."""
    return [
        java(),
        f"-Xmx{heap_mb}m",
        *quick_jvm(),
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
        "-cp",
        f"{kafka_libs()}/*",
        _main_class(name),
        *(str(argument) for argument in arguments),
    ]


def _main_class(name: str) -> str:
    if name in BEFORE_4 and kafka_version(kafka_libs()) < (4,):
        return BEFORE_4[name]
    return TOOLS.get(name, name)


def java_tool(
    name: str,
    *arguments: str | Path,
    stdin: str | None = None,
    timeout_s: float = 180,
    check: bool = True,
    heap_mb: int = 512,
) -> subprocess.CompletedProcess[str]:
    """Runs one of Kafka's tools to its end and returns its stdout, stderr and exit code; raises if it failed."""
    command = tool_command(name, *arguments, heap_mb=heap_mb)
    try:
        done = subprocess.run(
            command, input=stdin or "", capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise ToolFailed(
            f"{name} did not end within {timeout_s} s; it said:\n{late.stdout!r}\n{late.stderr!r}"
        ) from None
    if check and done.returncode != 0:
        raise ToolFailed(f"{name} ended with code {done.returncode}; it said:\n{done.stdout}\n{done.stderr}")
    return done


def start_tool(name: str, *arguments: str | Path, stdin: bool = False) -> Process:
    """Starts a tool that runs on, such as a console consumer; stop it with `kill` or `terminate`."""
    return Process(tool_command(name, *arguments), stdin=stdin)


# --- the broker ---


class Quorum(NamedTuple):
    """The controllers of a cluster: every node is a broker and a controller."""

    cluster_id: str
    controller_ports: dict[int, int]  # by node

    @property
    def size(self) -> int:
        return len(self.controller_ports)


class ApacheKafka(BrokerProcess):
    """One node of Apache Kafka. `start` formats the folder the first time; ports and data stay over restarts.

    fsync="os" is Kafka's own default (the operating system writes when it likes); "commit" forces every batch to
    the disk before it is acknowledged, as semel's default does, so that a comparison is fair.
    """

    timeout_ms = 180_000  # 4 s where nothing else runs

    def __init__(
        self,
        directory: Path | None = None,
        *,
        transaction_version: Literal[0, 1, 2] = 2,
        fsync: Literal["os", "commit"] = "os",
        heap_mb: int = 1024,
        jvm: Sequence[str] = (),
        properties: Mapping[str, str] | None = None,
        node_id: int = 1,
        quorum: Quorum | None = None,
    ) -> None:
        super().__init__(directory, "semel-apache-kafka-")
        self.transaction_version = transaction_version
        self.fsync = fsync
        self.heap_mb = heap_mb
        self.jvm = tuple(jvm)
        self.properties = dict(properties or {})
        self.node_id = node_id
        self.port, alone = free_ports(2)
        self._quorum = quorum or Quorum(new_cluster_id(), {node_id: alone})

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def controller_port(self) -> int:
        return self._quorum.controller_ports[self.node_id]

    def start(self, *, timeout_ms: float | None = None) -> Self:
        """Returns when the node takes requests."""
        self.launch()
        return self.await_ready(timeout_ms=timeout_ms)

    def launch(self) -> None:
        """Begins to start: a node of a cluster is ready when a majority of its nodes has been launched."""
        if not self._configuration.exists():
            self._format()
        self._launch(Process(self._command(), cwd=self.directory))

    def await_ready(self, *, timeout_ms: float | None = None) -> Self:
        self._await_ready(r"Kafka Server started", timeout_ms)
        return self

    def tool(self, name: str, *arguments: str | Path, stdin: str | None = None, timeout_s: float = 180) -> str:
        """What one of Kafka's tools says when pointed at this node."""
        words = ("--bootstrap-server", self.bootstrap, *arguments)
        return java_tool(name, *words, stdin=stdin, timeout_s=timeout_s).stdout

    # --- inside ---

    @property
    def _configuration(self) -> Path:
        return self.directory / "server.properties"

    def _format(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / "server.properties.new"
        draft.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        words = ["format", "-t", self._quorum.cluster_id, "-c", str(draft)]
        if kafka_version(kafka_libs()) >= TRANSACTION_VERSIONS_SINCE:
            words += ["--feature", f"transaction.version={self.transaction_version}"]
        java_tool("StorageTool", *words)
        draft.rename(self._configuration)  # its presence says that the folder is formatted

    def _settings(self) -> dict[str, str]:
        controllers, copies = self._quorum.controller_ports, str(self._quorum.size)
        in_sync = str(self._quorum.size // 2 + 1)
        settings = {
            "process.roles": "broker,controller",
            "node.id": str(self.node_id),
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": ",".join(f"{node}@127.0.0.1:{port}" for node, port in controllers.items()),
            "log.dirs": str(self.directory / "data"),
            "group.initial.rebalance.delay.ms": "0",
            # after kill -9 the node may only register again when its old session has ended: 9 s by default
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
            # every node keeps a copy, and a majority has each write; few partitions of the internal topics start faster
            "default.replication.factor": copies,
            "min.insync.replicas": in_sync,
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": "8",
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": in_sync,
            "transaction.state.log.num.partitions": "8",
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": in_sync,
        }
        if self.fsync == "commit":
            settings["log.flush.interval.messages"] = "1"
        return {**settings, **self.properties}

    def _command(self) -> list[str]:
        return [
            java(),
            f"-Xmx{self.heap_mb}m",
            *self.jvm,
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",  # says when the node is ready
            "-cp",
            f"{kafka_libs()}/*",
            "kafka.Kafka",
            str(self._configuration),
        ]


def new_cluster_id() -> str:
    """As Kafka writes the id of a cluster; one that begins with a dash would be taken for an option."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "x")


# --- several nodes on this machine, each a broker and a controller: leaders and coordinators can move ---
#
# with KafkaCluster(folder) as cluster:
#     cluster.move_leader("orders", 0)              # by an election
#     cluster.leader_of("orders", 0).kill()         # the hard way


PREFERRED = 0  # the kind of election that follows the order of replicas
HEAP_MB = 400
LOOK_EVERY_S = 0.2


class NoOtherReplicaError(Exception):
    """There is no replica in sync that could lead."""


class KafkaCluster:
    """Nodes 1 to `nodes`. Ports and data stay over restarts of a node. Use it as a context manager."""

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        *,
        transaction_version: Literal[0, 1, 2] = 2,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        numbers = range(1, nodes + 1)
        quorum = Quorum(new_cluster_id(), dict(zip(numbers, free_ports(nodes), strict=True)))
        self.nodes = {
            number: ApacheKafka(
                directory / f"node-{number}",
                node_id=number,
                quorum=quorum,
                transaction_version=transaction_version,
                heap_mb=HEAP_MB,
                jvm=quick_jvm(),
                properties=properties,
            )
            for number in numbers
        }

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes.values())

    def start(self) -> Self:
        """Returns when every node takes requests."""
        for node in self.nodes.values():
            node.launch()
        for node in self.nodes.values():
            node.await_ready()
        return self

    def close(self) -> None:
        for node in self.nodes.values():
            node.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- leaders ---
    def leader_of(self, topic: str, partition: int) -> ApacheKafka:
        """The node that leads a partition; those of the internal topics are led by the coordinators."""
        return self.nodes[self.partitions(topic)[partition].leader]

    def partitions(self, topic: str) -> dict[int, PartitionInfo]:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            (info,) = admin.describe_topics([topic])
            return {part.partition: part for part in info.partitions}

    def partition_of(self, topic: str, owner: str, number: int = 0) -> int:
        """The partition of an internal topic that a group or transactional id belongs to; of another topic, any."""
        count = len(self.partitions(topic))
        return coordinator_partition(owner, count) if owner else number % count

    def configure(self, topic: str, settings: Mapping[str, str]) -> None:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            admin.alter_configs(settings, topic=topic)

    def await_in_sync(self, timeout_s: float) -> None:
        """Waits until every replica of every partition is in sync."""
        deadline = Deadline(timeout_s)
        while behind := self._behind():
            if deadline.expired:
                raise ProcessFailed(f"replicas of {', '.join(behind[:5])} are not in sync after {timeout_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def _behind(self) -> list[str]:
        with Admin(bootstrap_servers=self.bootstrap) as admin:
            return [
                f"{topic.name}-{part.partition}"
                for topic in admin.describe_topics()
                for part in topic.partitions
                if len(part.in_sync) < len(part.replicas)
            ]

    def move_leader(self, topic: str, partition: int) -> int:
        """Has another replica that is in sync elected; the number of the new leader."""
        before = self.partitions(topic)[partition]
        others = [replica for replica in before.replicas if replica != before.leader]
        chosen = next((replica for replica in others if replica in before.in_sync), None)
        if chosen is None:
            raise NoOtherReplicaError(f"{topic}-{partition} has no other replica in sync: {before}")
        self.prefer(topic, partition, chosen)
        self.elect(topic, partition, chosen)
        return chosen

    def prefer(self, topic: str, partition: int, chosen: int) -> None:
        """Puts this replica first, so that it is the one to be elected."""
        others = [each for each in self.partitions(topic)[partition].replicas if each != chosen]
        moved = messages.ReassignableTopic(topic, [messages.ReassignablePartition(partition, [chosen, *others])])
        request = messages.AlterPartitionReassignmentsRequest(topics=[moved])
        response = self._call(chosen, messages.ALTER_PARTITION_REASSIGNMENTS, request)
        for result in response.responses[0].partitions if response.responses else ():
            _check(result.error_code, f"reassigning {topic}-{partition}: {result.error_message}")

    def elect(self, topic: str, partition: int, preferred: int) -> None:
        """Has the preferred replica lead, if it is in sync."""
        request = messages.ElectLeadersRequest(PREFERRED, [messages.PartitionsOfTopic(topic, [partition])])
        response = self._call(preferred, messages.ELECT_LEADERS, request)
        for result in response.replica_election_results[0].partition_result:
            if result.error_code != ErrorCode.ELECTION_NOT_NEEDED:
                _check(result.error_code, f"electing a leader of {topic}-{partition}: {result.error_message}")

    def _call(self, node: int, api: Api[Any, Any], request: Any) -> Any:
        """Of a node that can be reached: it passes on what is for the controller."""
        with Admin(bootstrap_servers=self.nodes[node].bootstrap) as admin:
            return run(admin.calls.cluster.call(NodeTarget(node), api, request, timeout_s=60.0))


def _check(code: int, what: str) -> None:
    if code:
        raise error_of(code, what)
