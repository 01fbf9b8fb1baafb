"""A Spark session with what semel needs, and nothing else changed; and settings that are changed for a while."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger("semel.spark")

LAUNCHER = Path(__file__).with_name("python.sh")
# Who has set one of these may have another Spark, or a cluster.
ELSEWHERE = ("SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "PYSPARK_GATEWAY_PORT", "MASTER", "SPARK_REMOTE")

UNKNOWN = "unknown"  # a master that this program cannot know

# Only what exactly-once on Python sources needs, and what costs nothing; each can be overridden.
SETTINGS = {
    # State in RocksDB with changelogs: a batch uploads what changed, not the whole state.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Else Spark reads every key before it writes or removes it, only to count the rows (docs/decisions/0172).
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
    # A stage that runs again with other rows is noticed (Spark 4.2 and later have it on by default).
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "true",
    # Between Spark and its Python workers. Over TCP the second small packet of a task waits for the acknowledgement of
    # the first, up to 40 ms, and a task of a query has three such conversations.
    "spark.python.unix.domain.socket.enabled": "true",
}

# Where everything stays on this machine, checkpoints most likely too. Spark's usual way to write them starts a program
# (readlink) for every look at a local file, as Hadoop's own library for that is not in PySpark: 60 ms a batch. This is
# the one that it uses for file systems that know no other: a new file, then a rename.
LOCAL_SETTINGS = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}

# Where the launcher starts the Python workers, they have this semel.
LAUNCHED_SETTINGS = {"spark.python.daemon.module": "semel.spark.daemon"}


def spark_session(app_name: str = "semel", *, master: str | None = None, **settings: Any) -> Any:
    """SparkSession.builder...getOrCreate() with these settings; `settings` are Spark's names with dots as "__".

    semel works with a session made in another way, too: PYSPARK_PYTHON must then be the Python that has semel.
    """
    named = {name.replace("__", "."): str(value) for name, value in settings.items()}
    wanted = UNKNOWN if "spark.remote" in named else _effective_master(named.get("spark.master", master))
    _choose_python(wanted)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    local = LOCAL_SETTINGS if stays_here(wanted) else {}
    is_launched = os.environ["PYSPARK_PYTHON"] == str(LAUNCHER)
    launched = LAUNCHED_SETTINGS if is_launched else {}
    for name, value in {**SETTINGS, **local, **launched, **named}.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            error.add_note(_java_advice())
        raise
    reserve_environment(session, shares_workers=is_launched)
    return session


def _java_advice() -> str:
    """Why Java did not start, where it can be seen: Spark says only that it did not."""
    home = os.environ.get("JAVA_HOME")
    if home and not os.path.exists(os.path.join(home, "bin", "java")):
        reason = f"JAVA_HOME is {home}, and there is no bin/java in it"
    elif not home and shutil.which("java") is None:
        reason = "JAVA_HOME is not set, and there is no java on the PATH"
    else:
        reason = "what it printed above says why it did not start"
    return f"semel: Spark needs Java 17 or newer: {reason}; `semel doctor --environment` says what is there"


# What Spark sets for the Python process of a stream's source. The values stand until it does so.
SOURCE_ENVIRONMENT = {
    "SPARK_LOCAL_DIRS": tempfile.gettempdir(),
    "SPARK_AUTH_SOCKET_TIMEOUT": "15",
    "SPARK_BUFFER_SIZE": "65536",
    "SPARK_PYTHON_RUNTIME": "PYTHON_WORKER",
}
_reserving = threading.Lock()


def reserve_environment(session: Any, *, shares_workers: bool = False) -> None:
    """Enters the names above into the environment that Spark keeps for the source `semel`.

    All queries of a JVM share that map, and Spark's threads add to it without a lock when queries start. Two at once
    leave it with a wrong size, and then no query that reads the source can be serialized until the program ends. With
    the names in it they only replace values, which harms nothing.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    if not hasattr(session, "_jsparkSession"):
        return  # Spark Connect: the map is on the server
    try:
        with _reserving:
            found = session._jsparkSession.sessionState().dataSourceManager().lookupDataSource("semel")
            environment = found.dataSourceCls().envVars()
            if shares_workers and not any(map(environment.containsKey, SOURCE_ENVIRONMENT)):  # no query has started
                environment.remove("PYTHONPATH")
                environment.putAll(session.sparkContext.environment)
            for name, value in SOURCE_ENVIRONMENT.items():
                environment.putIfAbsent(name, value)
    except (Py4JError, PySparkException) as error:
        log.debug("the environment of Spark's sources is left as it is: %s", error)  # Spark's Python has no semel


def _effective_master(named: str | None) -> str:
    """The master that the session will have, as Spark decides: a context that runs already, what the caller names, the
    arguments of spark-submit; else this machine. UNKNOWN where it cannot be known here."""
    from pyspark import SparkContext

    running = SparkContext._active_spark_context
    if running is not None:
        return str(running.master)
    return named or _submitted_master(os.environ.get("PYSPARK_SUBMIT_ARGS", "")) or "local[*]"


def _submitted_master(arguments: str) -> str | None:
    """The master that spark-submit is given, or None. Its own option comes before a setting."""
    try:
        words = iter(shlex.split(arguments))
    except ValueError:
        return None  # Spark will say what is wrong with them
    by_option = by_setting = None
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--remote", "--properties-file"):
            return UNKNOWN
        if option not in ("--master", "--conf", "-c"):
            continue
        value = value if equals else next(words, "")
        if option == "--master":
            by_option = value
        elif value.startswith("spark.master="):
            by_setting = value.partition("=")[2]
    return by_option or by_setting


def _choose_python(master: str | None) -> None:
    """PYSPARK_PYTHON, unless the user has set it: this Python, and on this machine by way of the launcher."""
    if os.environ.get("PYSPARK_PYTHON", str(LAUNCHER)) != str(LAUNCHER):
        return
    os.environ["PYSPARK_PYTHON"] = sys.executable
    if stays_here(master) and os.access(LAUNCHER, os.X_OK):
        os.environ["SEMEL_PYTHON"] = sys.executable
        os.environ["PYSPARK_PYTHON"] = str(LAUNCHER)


def stays_here(master: str | None) -> bool:
    """Whether Spark's tasks run in this program's own JVM, with the pyspark that is installed here."""
    if any(name in os.environ for name in ELSEWHERE):
        return False
    return master is None or master == "local" or master.startswith("local[")


def reserve_environment_of_active() -> None:
    """The same in the session that this thread works with, however it was made, if there is one."""
    if "pyspark.sql" in sys.modules:
        from pyspark.sql import SparkSession

        session = SparkSession.getActiveSession()
        if session is not None:
            reserve_environment(session)


_changes: dict[tuple[int, str], tuple[int, str]] = {}  # by session and name: how many want it, what it was before
_changing = threading.Lock()


@contextmanager
def changed(session: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """The session with other settings; when the last one who wants them is done, it has those it had. The session of a
    batch belongs to one query; frames that a function makes in the program's own are written in that, by many."""
    with _changing:
        for name, value in settings.items():
            wanted, before = _changes.get((id(session), name)) or (0, session.conf.get(name))
            _changes[id(session), name] = wanted + 1, before
            session.conf.set(name, value)
    try:
        yield
    finally:
        with _changing:
            for name in settings:
                wanted, before = _changes.pop((id(session), name))
                if wanted > 1:
                    _changes[id(session), name] = wanted - 1, before
                else:
                    session.conf.set(name, before)
