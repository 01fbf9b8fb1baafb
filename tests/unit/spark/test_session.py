"""Which Python Spark's workers are: the user's choice, else this one; on a local master with the installed pyspark."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark import SparkContext

from semel.spark import session
from tests.support.waiting import PATIENCE_S

HERE = [None, "local", "local[2]", "local[2,4]"]


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "SEMEL_PYTHON", "PYSPARK_SUBMIT_ARGS", *session.ELSEWHERE):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards, whatever the function sets
        monkeypatch.delenv(name)
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)  # another test of this process may have one


@pytest.mark.parametrize("master", HERE)
def test_local_workers_are_started_by_the_launcher(master: str | None) -> None:
    session._choose_python(master)
    assert os.environ["PYSPARK_PYTHON"] == str(session.LAUNCHER)
    assert os.environ["SEMEL_PYTHON"] == sys.executable


@pytest.mark.parametrize("master", ["spark://host:7077", "local-cluster[2,1,1024]", "yarn"])
def test_workers_of_a_cluster_are_this_python(master: str) -> None:
    session._choose_python("local[2]")  # in the same program, before
    session._choose_python(master)
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize("name", session.ELSEWHERE)
def test_signs_of_another_spark_are_respected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "something")
    session._choose_python(None)
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    session._choose_python("local[2]")
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_launcher_takes_sparks_zips_off_the_path_and_nothing_else() -> None:
    path = "/s/python/lib/pyspark.zip:/s/python/lib/py4j-0.10.9.9-src.zip:/a folder/of mine:/s/jars/spark.jar"
    program = "import os, sys; print(os.environ['PYTHONPATH'], sys.argv[1:])"
    done = subprocess.run(
        [str(session.LAUNCHER), "-c", program, "a word", "*"],
        env={"SEMEL_PYTHON": sys.executable, "PYTHONPATH": path, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "/a folder/of mine:/s/jars/spark.jar ['a word', '*']\n"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The settings that a session would be made with."""
    from pyspark.sql import SparkSession

    def make(**words: str) -> dict[str, str]:
        monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda builder: dict(builder._options))
        monkeypatch.setattr(SparkSession, "builder", SparkSession.Builder())
        return dict(session.spark_session(**words))

    return make


def test_small_packets_to_and_from_workers_wait_for_nobody(made: Callable[..., dict[str, str]]) -> None:
    """TCP holds them back for up to 40 ms. The user has the last word."""
    name = "spark.python.unix.domain.socket.enabled"
    assert made()[name] == "true"
    assert made(spark__python__unix__domain__socket__enabled="false")[name] == "false"


def test_rows_of_the_state_are_not_counted_unless_the_user_wants_it(made: Callable[..., dict[str, str]]) -> None:
    name = "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows"
    assert made()[name] == "false"
    assert made(**{name.replace(".", "__"): "true"})[name] == "true"


def test_workers_are_forked_from_a_process_with_semel_only_where_the_launcher_starts_them(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., dict[str, str]]
) -> None:
    """Elsewhere Spark's Python may have no semel."""
    name = "spark.python.daemon.module"
    assert made(master="local[2]")[name] == "semel.spark.daemon"
    assert made(master="local[2]", spark__python__daemon__module="mine")[name] == "mine"
    assert name not in made(master="spark://host:7077")
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    assert name not in made(master="local[2]")


def test_checkpoints_of_a_cluster_are_written_as_spark_does(made: Callable[..., dict[str, str]]) -> None:
    assert session.LOCAL_SETTINGS.items() <= made(master="local[2]").items()
    assert not session.LOCAL_SETTINGS.keys() & made(master="spark://host:7077").keys()


SUBMITTED = [
    "--master spark://host:7077 pyspark-shell",
    "--name 'two words' --master=yarn pyspark-shell",
    "--conf spark.master=k8s://https://host pyspark-shell",
    "--conf=spark.master=local[2] --master yarn pyspark-shell",
    "--remote sc://host pyspark-shell",
    "--properties-file my.conf pyspark-shell",
]


@pytest.mark.parametrize("arguments", SUBMITTED)
def test_a_cluster_in_the_arguments_of_spark_submit_is_respected(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., dict[str, str]], arguments: str
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    assert not session.LOCAL_SETTINGS.keys() & made().keys()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize(
    "arguments", ["--master local[4] pyspark-shell", "--driver-memory 2g pyspark-shell", "pyspark-shell", "--name 'x"]
)
def test_arguments_of_spark_submit_that_name_no_cluster_change_nothing(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., dict[str, str]], arguments: str
) -> None:
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    assert session.LOCAL_SETTINGS.items() <= made().items()
    assert os.environ["PYSPARK_PYTHON"] == str(session.LAUNCHER)


def test_a_master_among_the_settings_is_respected(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., dict[str, str]]
) -> None:
    """What the caller names comes before the arguments of spark-submit, as in Spark."""
    assert not session.LOCAL_SETTINGS.keys() & made(spark__master="spark://host:7077").keys()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert not session.LOCAL_SETTINGS.keys() & made(master="local[2]", spark__master="yarn").keys()
    assert not session.LOCAL_SETTINGS.keys() & made(spark__remote="sc://host").keys()
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--master yarn pyspark-shell")
    assert session.LOCAL_SETTINGS.items() <= made(spark__master="local[2]").items()


def test_a_context_that_runs_already_says_where_tasks_run(
    monkeypatch: pytest.MonkeyPatch, made: Callable[..., dict[str, str]]
) -> None:
    """Spark returns its session, with our settings added to it."""
    monkeypatch.setattr(SparkContext, "_active_spark_context", SimpleNamespace(master="spark://host:7077"))
    assert not session.LOCAL_SETTINGS.keys() & made(master="local[2]").keys()
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"JAVA_HOME": "{folder}"}, "JAVA_HOME is {folder}, and there is no bin/java in it"),
        ({"PATH": "{folder}"}, "JAVA_HOME is not set, and there is no java on the PATH"),
    ],
)
def test_java_that_is_not_there_is_named(tmp_path: Path, environment: dict[str, str], reason: str) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")  # of Spark's script
    (tmp_path / "bash").symlink_to("/bin/bash")
    base = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    changed = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    done = subprocess.run(
        [sys.executable, "-c", "import semel; semel.spark_session()"],
        env={**base, **changed},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"semel: Spark needs Java 17 or newer: {reason.format(folder=tmp_path)}"), done.stderr
    assert "`semel doctor --environment`" in last


def test_settings_are_as_they_were_when_two_queries_have_changed_them_at_once() -> None:
    """Both write frames of the program's own session."""
    settings = {"spark.sql.adaptive.enabled": "true"}
    program = SimpleNamespace(conf=SimpleNamespace(get=settings.get, set=settings.__setitem__))
    one, other = (session.changed(program, {"spark.sql.adaptive.enabled": "false"}) for _ in range(2))
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert settings == {"spark.sql.adaptive.enabled": "false"}, "the other one has not done"
    other.__exit__(None, None, None)
    assert settings == {"spark.sql.adaptive.enabled": "true"}
    with session.changed(program, {"spark.sql.adaptive.enabled": "false"}):
        assert settings == {"spark.sql.adaptive.enabled": "false"}
    assert settings == {"spark.sql.adaptive.enabled": "true"}
