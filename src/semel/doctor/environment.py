"""What this machine has: Python, Java, Spark, packages, disk, files, the port of the broker."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import msgspec

from semel.client.errors import ConfigError
from semel.client.settings import parse_address

SPARK_NEEDS_JAVA = 17
FREE_BYTES = 1 << 30
OPEN_FILES = 1024
OPTIONAL = {"pyspark": "spark", "confluent-kafka": "prove", "starlette": "ui"}


class Fact(msgspec.Struct, frozen=True):
    name: str
    seen: str
    is_well: bool = True
    cure: str = ""


def look_around(brokers: str) -> list[Fact]:
    return [*_python(), *_packages(), *_java(), *_system(), *_brokers(brokers)]


def _python() -> Iterator[Fact]:
    version = ".".join(map(str, sys.version_info[:3]))
    free_threaded = not getattr(sys, "_is_gil_enabled", lambda: True)()
    well = sys.version_info >= (3, 11) and not free_threaded
    kind = ", free-threaded" if free_threaded else ""
    yield Fact(
        "python", f"{version}{kind} at {sys.executable}", well, "" if well else "semel needs 3.11 to 3.14, with the GIL"
    )


def _packages() -> Iterator[Fact]:
    yield Fact("semel", _version("semel") or "not installed as a package")
    for package, extra in OPTIONAL.items():
        version = _version(package)
        yield Fact(package, version or f"not installed; pip install 'semel[{extra}]' brings it")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _java() -> Iterator[Fact]:
    needed = _version("pyspark") is not None
    home = os.environ.get("JAVA_HOME")
    program = os.path.join(home, "bin", "java") if home else shutil.which("java")
    cure = "install a Java runtime 17 or newer, or set JAVA_HOME"
    if program is None or not os.path.exists(program):
        missing = f"JAVA_HOME is {home}, and there is no bin/java in it" if home else "not found"
        yield Fact("java", missing + ("" if needed else "; only Spark needs it"), not needed, cure if needed else "")
        return
    try:
        done = subprocess.run([program, "-version"], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Fact("java", f"{program} does not run: {error}", not needed, cure)
        return
    said = done.stderr.decode(errors="replace")  # first the options that it takes from JAVA_TOOL_OPTIONS, if any
    found = re.search(r'^.* version "(\d+).*$', said, re.MULTILINE)
    line = found[0] if found else f"no version in {said!r}"
    well = not needed or (found is not None and int(found[1]) >= SPARK_NEEDS_JAVA)
    yield Fact("java", f"{line} at {program}", well, "" if well else cure)


def _system() -> Iterator[Fact]:
    free = shutil.disk_usage(".").free
    yield Fact(
        "disk", f"{free / 2**30:.1f} GiB free here", free >= FREE_BYTES, "" if free >= FREE_BYTES else "free some"
    )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    well = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    yield Fact("open files", f"ulimit -n is {soft}", well, "" if well else f"raise it: ulimit -n {OPEN_FILES}")
    yield Fact("processors", str(os.cpu_count()))


def _brokers(brokers: str) -> Iterator[Fact]:
    for address in brokers.split(","):
        try:
            with socket.create_connection(parse_address(address), timeout=2):
                yield Fact("broker", f"{address} accepts connections")
        except ConfigError as error:
            yield Fact("broker", str(error), False)
        except (OSError, UnicodeError) as error:  # the latter: no host name, such as `a..b`
            yield Fact(
                "broker", f"{address} cannot be reached: {error}", False, "start one: semel broker --data ./data"
            )
