"""Brokers for tests: `semel_broker` is a fresh one, `cluster` runs a test on semel and on Apache Kafka."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from semel.local.apache_kafka import ApacheKafka, KafkaMissing, java, kafka_libs
from semel.local.brokers import SemelBroker
from semel.local.postgres import PostgresMissing, PostgresServer, programs
from semel.spark.session import LAUNCHER
from tests.support.broker import ROOT, Cluster
from tests.support.jvm import spark_options
from tests.support.missing import MARK, skip_loudly
from tests.support.shared_kafka import RETENTION, KafkaOwner, shared_kafka, start_kafka
from tests.support.turns import Turns, turn

if TYPE_CHECKING:
    from tests.support.spark_driver import SparkSite

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: programs would not hear a Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_options())  # of every driver that a test starts
# The Python of every session starts by way of the launcher: from Spark's zip it takes three times as long.
os.environ.setdefault("SEMEL_PYTHON", sys.executable)
os.environ.setdefault("PYSPARK_PYTHON", str(LAUNCHER))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # brokers and drivers start by the hundred, and faster when compiled

# An example that takes long says that the machine is busy, and nothing about the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

OWNER = pytest.StashKey[KafkaOwner]()
OWNER_PORT = "port_of_the_owner_of_apache_kafka"
HANGS_AFTER_S = 30.0  # after its timeout


@pytest.fixture
def semel_broker(tmp_path: Path) -> Iterator[SemelBroker]:
    """A fresh broker for this test alone, to be killed and restarted at will."""
    with SemelBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture(scope="session")
def shared_semel_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemelBroker]:
    """One broker for all tests that leave it alive."""
    folder = tmp_path_factory.mktemp("shared-semel") / "broker"
    with SemelBroker(folder, *(f"--set={name}={value}" for name, value in RETENTION.items())) as broker:
        yield broker


@pytest.fixture(scope="session")
def kafka_installation() -> Path:
    """Where Kafka's jars are; skips, loudly, where there are none or no Java."""
    try:
        java()
        return kafka_libs()
    except KafkaMissing as missing:
        skip_loudly(str(missing))


@pytest.fixture(scope="session")
def apache_kafka(
    kafka_installation: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApacheKafka]:
    """One Apache Kafka node for all tests that leave it alive, whichever process of pytest they run in."""
    folder = tmp_path_factory.mktemp("apache-kafka") / "node"
    if hasattr(request.config, "workerinput"):
        yield shared_kafka(request.config.workerinput[OWNER_PORT], folder)
        return
    with start_kafka(folder) as kafka:
        yield kafka


@pytest.fixture(params=["semel", pytest.param("apache_kafka", marks=pytest.mark.kafka)])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The test runs twice: on semel's broker and on Apache Kafka."""
    fixture = {"semel": "shared_semel_broker", "apache_kafka": "apache_kafka"}[request.param]
    return Cluster(request.param, request.getfixturevalue(fixture))


@pytest.fixture(scope="session")
def postgres_installation() -> Path:
    """Where PostgreSQL's programs are; skips, loudly, where there are none."""
    try:
        return programs()
    except PostgresMissing as missing:
        skip_loudly(str(missing))


@pytest.fixture(scope="session")
def postgres(postgres_installation: Path) -> Iterator[PostgresServer]:
    """One server for all tests that leave it alive."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def dsn(postgres: PostgresServer) -> str:
    """A fresh database for this test alone."""
    return postgres.create_database()


@pytest.fixture
def mortal_postgres(postgres_installation: Path) -> Iterator[PostgresServer]:
    """A server for this test alone, to be killed and restarted at will."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSite]:
    """A Spark standalone cluster with two workers, and drivers that are kept from test to test."""
    from semel.local.spark_cluster import SparkCluster
    from tests.support.spark_driver import SparkSite

    folder = tmp_path_factory.mktemp("spark")
    with SparkCluster(folder / "cluster", spark_options(), ROOT) as spark_cluster:
        site = SparkSite(folder, spark_cluster)
        yield site
        site.close()


@pytest.fixture
def spark(shared_spark: SparkSite) -> Iterator[SparkSite]:
    yield shared_spark
    shared_spark.settle()


@pytest.fixture(scope="session")
def shared_local_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSite]:
    """Drivers that run their tasks themselves: a third of the JVMs, where only the driver matters."""
    from tests.support.spark_driver import SparkSite

    site = SparkSite(tmp_path_factory.mktemp("local-spark"), None)
    yield site
    site.close()


@pytest.fixture
def local_spark(shared_local_spark: SparkSite) -> Iterator[SparkSite]:
    yield shared_local_spark
    shared_local_spark.settle()


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Spark session for tests that need one in their own process: started once per process, with short jobs."""
    import semel

    made = semel.spark_session(
        "tests",
        master="local[2]",
        spark__ui__enabled="false",
        spark__sql__shuffle__partitions="2",
        spark__local__dir=str(tmp_path_factory.mktemp("spark-local")),
        spark__sql__warehouse__dir=str(tmp_path_factory.mktemp("spark-warehouse")),
    )
    made.sparkContext.setLogLevel("OFF")
    machine = made.sparkContext._gateway.proc
    yield made
    if machine.poll() is None:
        made.stop()
    else:  # whoever needed it has failed; no other test should
        warnings.warn(f"the JVM of the Spark session ended by itself, with exit code {machine.poll()}", stacklevel=1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """pytest's timeout is a signal, which a thread that waits inside a C library never sees: such a test would hang
    for ever. It ends with its process, which is started anew where several run at once."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + HANGS_AFTER_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Eight thousand tests are a million objects that stay: no look for garbage among them, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long ones first: they would be the end of a run on several processes."""
    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Before pytest starts one of several processes: it learns where to ask for Apache Kafka."""
    if OWNER not in node.config.stash:
        folder = tempfile.TemporaryDirectory(prefix="semel-tests-kafka-", ignore_cleanup_errors=True)
        node.config.stash[OWNER] = owner = KafkaOwner(Path(folder.name) / "node")
        node.config.add_cleanup(folder.cleanup)
        node.config.add_cleanup(owner.close)  # the last one that was added comes first
    node.workerinput[OWNER_PORT] = node.config.stash[OWNER].port


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Turns:
    return Turns(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around everybody else's, so that it has the last word
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """The last lines of a run name what it could not test."""
    yield
    reasons = Counter(
        str(report.longrepr[2]).split(MARK, 1)[1]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and MARK in str(report.longrepr[2])
    )
    for reason, number in reasons.items():
        terminalreporter.write_sep("!", f"{number} TESTS DID NOT RUN", red=True, bold=True)
        terminalreporter.write_line(reason, red=True, bold=True)
