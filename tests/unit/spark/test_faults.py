"""Faults that are armed by files hit exactly one process each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from semel.spark import faults

PROGRAM = "from semel.spark import faults; faults.reach('sink.after_write'); print('alive')"


def run(setting: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={faults.VARIABLE: setting, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_armed_file_kills_one_process_and_says_which(tmp_path: Path):
    (tmp_path / "sink.after_write@1").write_text("kill")
    first, second = run(f"@{tmp_path}"), run(f"@{tmp_path}")
    assert (first.returncode, first.stdout) == (-9, "")
    assert "fault fired: sink.after_write" in first.stderr
    assert int((tmp_path / "sink.after_write@1.fired").read_text()) > 0
    assert second.stdout == "alive\n"


def test_armed_file_can_wait_for_a_process_that_comes_again(tmp_path: Path):
    armed = tmp_path / "sink.after_write@1"
    armed.write_text("kill:2")
    assert run(f"@{tmp_path}").stdout == "alive\n"  # there once
    assert armed.exists()
    program = "from semel.spark import faults; [faults.reach('sink.after_write') or print(n) for n in (1, 2, 3)]"
    assert run(f"@{tmp_path}", program).returncode == -9
    assert not armed.exists()


def test_nothing_happens_unless_it_is_set():
    assert run("").stdout == "alive\n"


@pytest.mark.parametrize("text", ["sink.nowhere:kill", "sink.after_write:pray"])
def test_unknown_points_and_actions_are_refused(text: str):
    with pytest.raises(ValueError, match=r"sink\.before_begin"):
        faults._parse(text)
