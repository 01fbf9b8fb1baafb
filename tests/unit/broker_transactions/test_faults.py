"""Fault points: known by name, fire once, at the visit that was asked for, and say so before they act."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel.broker
from semel.broker import faults


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.arm("")


def run(faults_text: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from semel.broker import faults\n{code}"],
        env={"SEMEL_FAULTS": faults_text},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_nothing_is_armed_by_default():
    assert not faults.armed


def test_kill_says_its_name_and_dies_at_once():
    done = run(
        "marker.before:kill:2", "faults.hit('marker.before'); print('one', flush=True); faults.hit('marker.before')"
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "one\n"
    assert done.stderr == "fault fired: marker.before\n"


def test_exit_ends_the_process_with_its_code():
    done = run("marker.after:exit", "faults.hit('marker.after'); print('not reached')")
    assert (done.returncode, done.stdout) == (3, "")


def test_a_delay_lets_others_go_on(capsys: pytest.CaptureFixture[str]):
    faults.arm("add.before_journal:delay=50")

    async def both() -> list[str]:
        order: list[str] = []

        async def delayed() -> None:
            await faults.reach("add.before_journal")
            order.append("delayed")

        async def other() -> None:
            order.append("other")

        await asyncio.gather(delayed(), other())
        return order

    assert asyncio.run(both()) == ["other", "delayed"]
    assert "fault fired: add.before_journal" in capsys.readouterr().err


def test_a_fault_fires_once(capsys: pytest.CaptureFixture[str]):
    faults.arm("marker.before:delay=1")
    for _ in range(3):
        faults.hit("marker.before")
    assert capsys.readouterr().err.count("fault fired") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nowhere:kill", "no fault point 'nowhere'"),
        ("marker.before", "no action"),
        ("marker.before:explode", "no action"),
        ("marker.before:kill:often", "name:action:n"),
        ("marker.before:delay=long", "delay=MS"),
    ],
)
def test_what_is_not_a_fault_is_refused_by_name(text: str, says: str):
    with pytest.raises(faults.FaultError, match=re.escape(says)):
        faults.arm(text)


def test_every_point_in_the_code_is_in_the_table_and_the_other_way_round():
    source = "\n".join(path.read_text() for path in Path(semel.broker.__path__[0]).rglob("*.py"))
    used = set(re.findall(r'faults\.(?:hit|reach)\(f?"([^"]+)"\)', source))
    assert {"marker.before", "{point}.before_journal", "{slot.served.name}.after_answer"} <= used
    patterns = [re.compile(re.sub(r"\\\{[^}]*\\\}", r"[A-Za-z_]+", re.escape(name)) + r"\Z") for name in used]
    unused = [name for name in faults.POINTS if not any(pattern.match(name) for pattern in patterns)]
    assert not unused
    assert all(name in faults.POINTS for name in used if "{" not in name)
