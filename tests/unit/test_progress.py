"""Long commands show how far they are on a terminal, and nothing on a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from semel import progress
from semel.local.brokers import SemelBroker, semel_command
from semel.progress import ProgressBar
from semel.prove.command import CampaignOutput


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_has_its_part_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = Terminal()
    bar = ProgressBar("proving", 12, "rounds", out)
    bar.show(0, now=True)
    now[0] += 30
    bar.show(3)
    assert out.getvalue().split("\r\x1b[K")[1:] == [
        "proving [........................]   0%, 0 of 12 rounds",
        "proving [######..................]  25%, 3 of 12 rounds, 1:30 left",
    ]
    bar.hide()
    assert out.getvalue().endswith("\r\x1b[K")
    bar.hide()
    assert out.getvalue().count("\r\x1b[K") == 3, "once is enough"


def test_a_count_without_an_end_has_a_rate_and_waits_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = Terminal()
    with ProgressBar("reading", out=out) as bar:
        bar.show(10)
        assert out.getvalue() == "", "what is quick shows nothing"
        now[0] += 2
        for _ in range(100):
            bar.show(5_000)
        assert out.getvalue() == "\r\x1b[Kreading: 5,000 records, 2,500/s", "drawn once, not a hundred times"
    assert out.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("total", [0, -1])
def test_nothing_to_do_is_done(total: int) -> None:
    out = Terminal()
    ProgressBar("auditing", total, "offsets", out).show(0)
    assert "100%" in out.getvalue()


def test_a_line_is_not_longer_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    ProgressBar("proving", 12, "rounds", out).show(1, "x" * 200)
    assert len(out.getvalue().split("\x1b[K")[1]) == 39


def test_lines_of_a_campaign_stand_above_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    output = CampaignOutput(terminal, 12)
    output.say("a broker starts")
    assert terminal.getvalue().startswith("a broker starts\n\r\x1b[Kproving [")
    output.say("another line")
    assert "\r\x1b[Kanother line\n" in terminal.getvalue(), "the bar made way"
    output.hide_bar()
    output.say("results")
    assert terminal.getvalue().endswith("\r\x1b[Kresults\n"), "no bar behind the results"


def run_on_a_terminal(*words: str) -> str:
    """What a command writes to its stderr, which is a terminal; stdout is a pipe."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(semel_command(*words), stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        finally:
            os.close(ours)
        assert process.wait() in (0, 3), seen.decode()  # 3: the doctor found what other tests left
    return seen.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="the end of a terminal is an error on Linux")
def test_commands_draw_on_a_terminal_and_are_silent_on_a_pipe(shared_semel_broker: SemelBroker, tmp_path: Path) -> None:
    brokers = ("-b", shared_semel_broker.bootstrap)
    (tmp_path / "lines").write_bytes(b"x\n" * 1_000)
    written = run_on_a_terminal("produce", "drawn", *brokers, "-c", "1000", str(tmp_path / "lines"))
    assert "writing to drawn [" in written
    assert written.endswith("\r\x1b[K"), "nothing of it stays"
    assert "reading drawn [" in run_on_a_terminal("consume", "drawn", *brokers, "-e")
    assert "examining [" in run_on_a_terminal("doctor", *brokers)
    done = subprocess.run(semel_command("doctor", *brokers), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
