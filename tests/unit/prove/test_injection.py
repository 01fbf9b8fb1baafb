"""Faults are injected from outside: a point fires once, at the visit that was named, and prints so before it acts."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel
from semel import faults
from semel.prove.injection import (
    BROKER_POINTS,
    POINTS,
    FaultError,
    Injection,
    Patch,
    ProcessInjector,
    command,
    spark_python,
)
from tests.mutants import MUTANTS
from tests.support.broker import ROOT

TWICE = "from semel import faults; faults.hit('marker.before'); print('one', flush=True); faults.hit('marker.before')"
SINK = "from semel import faults; faults.hit('sink.after_write'); print('alive')"


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.install(None)


def arm(text: str) -> None:
    faults.install(ProcessInjector(Injection(text)))


def run(text: str, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A program with faults, as a process."""
    program = folder / "program.py"
    program.write_text(code)
    words = command(Injection(text), program)
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


# --- the port ---


def test_nothing_is_armed_by_default() -> None:
    assert not faults.armed
    faults.hit("marker.before")
    asyncio.run(faults.reach("marker.before"))
    assert faults.clock_offset_ms() == 0
    assert faults.files("/nowhere") is None


OLD = {
    "SEMEL_MUTANTS": "respond_before_fsync,no_require_stable,ledger_by_batch_id",
    "SEMEL_FAULTS": "Produce.before_response:kill",
    "SEMEL_SINK_FAULTS": "sink.after_write:kill",
    "SEMEL_SIMULATE_POWER_CUT": "1",
    "SEMEL_CONTROL": "/nowhere",
}
LOOK = """
import sys
from semel import faults
from semel.broker.clock import Clock, system_clock
from semel.storage.files import DiskFiles, files_for
from semel.storage.sync import SyncGroup
from semel.client.group import offsets
from semel.client.producer import handle
from semel.spark import ledger, writing
import semel.broker.connection, semel.broker.transactions.coordinator
faults.hit("Produce.before_response")
faults.hit("sink.after_write")
assert not faults.armed
assert type(system_clock()) is Clock
assert type(files_for(sys.argv[1])) is DiskFiles
assert writing.Precautions().handshake and writing.Precautions().count_audit
assert not any(name.startswith(("semel.prove", "tests", "benchmarks")) for name in sys.modules)
print("nothing")
"""


def test_no_environment_variable_switches_a_fault_or_a_deliberate_bug_on(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOOK, str(tmp_path / "data")]
    done = subprocess.run(words, env={**OLD, "PATH": ""}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "nothing\n"), done.stderr
    assert not list(tmp_path.iterdir()), "no journal of a power cut"


def test_the_product_reads_no_environment_variable_for_faults() -> None:
    source = "\n".join(path.read_text() for path in Path(semel.__path__[0]).rglob("*.py"))
    assert [name for name in OLD if name in source] == []


# --- named points ---


def test_kill_prints_its_name_and_ends_the_process_at_once(tmp_path: Path) -> None:
    done = run("marker.before:kill:2", TWICE, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "one\n"
    assert done.stderr == "fault fired: marker.before\n"


def test_exit_ends_the_process_with_its_code(tmp_path: Path) -> None:
    done = run("marker.before:exit", TWICE, tmp_path)
    assert (done.returncode, done.stdout) == (3, "")


def test_a_delay_lets_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    arm("add.before_log:delay=50")

    async def both() -> list[str]:
        order: list[str] = []

        async def delayed() -> None:
            await faults.reach("add.before_log")
            order.append("delayed")

        async def other() -> None:
            order.append("other")

        await asyncio.gather(delayed(), other())
        return order

    assert asyncio.run(both()) == ["other", "delayed"]
    assert "fault fired: add.before_log" in capsys.readouterr().err


def test_a_fault_fires_once(capsys: pytest.CaptureFixture[str]) -> None:
    arm("marker.before:delay=1")
    for _ in range(3):
        faults.hit("marker.before")
    assert capsys.readouterr().err.count("fault fired") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere:kill", "no fault point 'nowhere'"),
        ("sink.nowhere:kill", "sink.before_begin"),
        ("marker.before", "no action"),
        ("marker.before:explode", "no action"),
        ("marker.before:kill:often", "name:action:n"),
        ("marker.before:delay=long", "delay=MS"),
    ],
)
def test_what_is_not_a_fault_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(FaultError, match=re.escape(says)):
        arm(text)


def test_every_point_in_the_code_is_in_the_table_and_the_other_way_round() -> None:
    folders = [Path(semel.__path__[0]) / name for name in ("broker", "patterns", "sinks", "spark")]
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    used = set(re.findall(r'faults\.(?:hit|reach)\(f?"([^"]+)"\)', source))
    assert {"marker.before", "{point}.before_log", "{slot.served.name}.after_response", "task.after_rows"} <= used
    patterns = [re.compile(re.sub(r"\\\{[^}]*\\\}", r"[A-Za-z_]+", re.escape(name)) + r"\Z") for name in used]
    assert [name for name in POINTS if not any(pattern.match(name) for pattern in patterns)] == []
    assert all(name in POINTS for name in used if "{" not in name)


# --- armed by files ---


def test_armed_file_kills_one_process_and_holds_its_id(tmp_path: Path) -> None:
    (tmp_path / "sink.after_write@1").write_text("kill")
    first, second = run(f"@{tmp_path}", SINK, tmp_path), run(f"@{tmp_path}", SINK, tmp_path)
    assert (first.returncode, first.stdout) == (-9, "")
    assert "fault fired: sink.after_write" in first.stderr
    assert int((tmp_path / "sink.after_write@1.fired").read_text()) > 0
    assert second.stdout == "alive\n"


def test_armed_file_can_wait_for_a_process_that_comes_again(tmp_path: Path) -> None:
    armed = tmp_path / "sink.after_write@1"
    armed.write_text("kill:2")
    assert run(f"@{tmp_path}", SINK, tmp_path).stdout == "alive\n"  # there once
    assert armed.exists()
    three_times = "from semel import faults\nfor n in (1, 2, 3): faults.hit('sink.after_write') or print(n)"
    assert run(f"@{tmp_path}", three_times, tmp_path).returncode == -9
    assert not armed.exists()


def test_plain_armed_file_counts_from_when_it_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arm(f"@{tmp_path}")
    for _ in range(5):
        faults.hit("marker.before")
    (tmp_path / "marker.before").write_text("pass:2")
    faults.hit("marker.before")
    assert not (tmp_path / "marker.before.fired").exists()
    faults.hit("marker.before")
    assert (tmp_path / "marker.before.fired").exists()
    assert capsys.readouterr().err == "fault fired: marker.before\n"


# --- programs ---


@pytest.mark.parametrize("how", [("-m", "semel"), (str(Path(semel.__path__[0]) / "__main__.py"),)])
def test_a_program_with_faults_gets_its_arguments_and_gives_its_exit_code(how: tuple[str, ...]) -> None:
    words = command(Injection("marker.before:kill"), *how, "broker", "--no-such-option")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr


def test_a_line_of_code_runs_with_faults_too() -> None:
    """Spark finds out which Python it has in this way."""
    words = command(Injection("marker.before:kill"), "-c", "import sys; print(sys.argv, __name__)", "word")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['-c', 'word'] __main__\n", done.stderr


def test_without_faults_a_program_is_started_as_it_is(tmp_path: Path) -> None:
    assert command(Injection(), "-m", "semel") == [sys.executable, "-m", "semel"]


def test_what_spark_starts_has_the_faults_too(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(SINK)
    python = spark_python(Injection("sink.after_write:kill"), tmp_path / "python with faults")["PYSPARK_PYTHON"]
    done = subprocess.run([python, tmp_path / "worker.py"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -9
    assert "fault fired: sink.after_write" in done.stderr


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_still_has_something_to_replace(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('installed')")
    words = command(Injection(patch=Patch(str(ROOT), "tests.mutants", name)), program)
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "installed\n", done.stderr


def test_the_points_of_the_broker_name_every_api() -> None:
    assert {"Produce.before_response", "EndTxn.after_response"} <= set(BROKER_POINTS)
