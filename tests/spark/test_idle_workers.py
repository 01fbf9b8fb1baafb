"""Workers that Spark does not need any more."""

from __future__ import annotations

import io
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import pytest
from pyspark.serializers import read_int

from semel.spark.source import StreamReader
from tests.support.waiting import until

# PySpark's daemon, whose workers have imported semel's source: they run tasks, or plan.
DAEMON = """
import importlib, runpy, sys
sys.argv = ["pyspark.daemon", sys.argv[1]]
importlib.import_module(sys.argv[1])
import semel.spark.source
runpy.run_module("pyspark.daemon", run_name="__main__")
"""


def number(stream: IO[bytes]) -> int:
    found: int = struct.unpack(">i", stream.read(4))[0]
    return found


@pytest.fixture
def short_path() -> Iterator[str]:
    """The path of a socket has at most 107 bytes; pytest's folders may be longer."""
    with TemporaryDirectory(prefix="semel-") as folder:
        yield folder


@pytest.mark.parametrize("module", ["pyspark.worker", "pyspark.sql.worker.plan_data_source_read"])
def test_worker_whose_connection_spark_closes_when_it_is_idle_prints_no_traceback(module: str, short_path: str) -> None:
    named = {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": short_path,
        "SPARK_REUSE_WORKER": "1",
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
    }
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON, module],
        env={**os.environ, **named},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        path = daemon.stdout.read(number(daemon.stdout)).decode()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            with connection.makefile("rb") as answers:
                worker = number(answers)
        until(lambda: not Path(f"/proc/{worker}").exists(), "the worker lives on")
        daemon.stdin.close()
        assert daemon.stderr.read().decode() == ""


def end_of_file() -> None:
    raise EOFError


class EndedError(BaseException):
    """In place of the end of the process."""


def test_source_whose_connection_spark_closes_when_a_query_stops_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ended(code: int) -> None:
        raise EndedError(code)

    def ends_in(fails: Callable[[], object]) -> None:  # as in PySpark's runner
        try:
            fails()
        finally:
            StreamReader({"kafka.bootstrap.servers": "h:1", "subscribe": "t"}).stop()

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(EndedError, match="0"):
        ends_in(lambda: read_int(io.BytesIO()))
    with pytest.raises(EOFError, match=r"^$"):  # of anything else: is reported, as any failure
        ends_in(end_of_file)
