"""The tests' own tools: a child process is awaited, frozen and killed, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from semel.local.processes import Process, ProcessFailed, _guardian
from tests.support.waiting import until

PRINT_THEN_SLEEP = "print('hello 42', flush=True); import time; time.sleep(600)"  # longer than a test waits for its end


def python(code: str, **options) -> Process:
    return Process([sys.executable, "-c", code], **options)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_waits_for_a_line_and_returns_its_match() -> None:
    with python(PRINT_THEN_SLEEP) as process:
        assert process.wait_for_line(r"hello (\d+)")[1] == "42"
        assert process.running
    assert process.returncode == -signal.SIGKILL


def test_an_early_end_is_reported_with_code_and_output() -> None:
    with (
        python("import sys; print('no disk', file=sys.stderr); sys.exit(3)") as process,
        pytest.raises(ProcessFailed, match=r"(?s)ended with code 3 .*no disk"),
    ):
        process.wait_for_line("ready")


def test_a_missing_line_is_reported_after_the_time_limit() -> None:
    with python(PRINT_THEN_SLEEP) as process, pytest.raises(ProcessFailed, match=r"(?s)within 0.3 s.*hello 42"):
        process.wait_for_line("never said", timeout_s=0.3)


def test_only_new_lines_count_when_asked() -> None:
    with python("while True: print('got', input(), flush=True)", stdin=True) as process:
        process.write("one\n")
        process.wait_for_line("got one")
        seen = process.line_count
        process.write("two\n")
        assert process.wait_for_line("got (.*)", after=seen)[1] == "two"


def test_a_frozen_process_stands_still_until_resumed() -> None:
    with python("while True: print('got', input(), flush=True)", stdin=True) as process:
        process.write("one\n")
        process.wait_for_line("got one")
        process.pause()
        process.write("two\n")
        with pytest.raises(ProcessFailed, match="did not say"):
            process.wait_for_line("got two", timeout_s=0.3)
        process.resume()
        process.wait_for_line("got two")


def test_a_process_that_is_gone_gets_no_signal_as_its_number_may_be_another_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    with python("pass") as waited_for, python("pass") as seen:
        waited_for.wait()
        until(lambda: not seen.running)
        assert not {waited_for.pid, seen.pid} & _guardian._groups
        monkeypatch.setattr(os, "killpg", lambda group, _: sent.append(group))
    assert sent == []


def test_what_a_process_has_left_of_its_group_is_killed() -> None:
    with python("import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)") as process:
        child = int(process.wait_for_line(r"(\d+)")[1])
        until(lambda: not process.running)
        assert alive(child)
        process.kill()
    until(lambda: not alive(child))


def test_terminate_lets_it_end_in_order_and_kill_ends_a_frozen_one() -> None:
    orderly = "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True); signal.pause()"
    with python(orderly) as process:
        process.wait_for_line("up")
        assert process.terminate() == 7
    with python(PRINT_THEN_SLEEP) as process:
        process.pause()
        process.kill()
        assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(not os.path.exists("/proc"), reason="looks into /proc")
@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)", "raise SystemExit(1)"])
def test_a_child_never_outlives_its_parent(end: str) -> None:
    parent = (
        "import os, sys\n"
        "from semel.local.processes import Process\n"
        f"child = Process([sys.executable, '-c', {PRINT_THEN_SLEEP!r}])\n"
        "child.wait_for_line('hello')\n"
        "print('child', child.pid, flush=True)\n"
        "input()\n"
        f"{end}\n"
    )
    with python(parent, stdin=True) as process:
        child_pid = int(process.wait_for_line(r"child (\d+)")[1])
        assert alive(child_pid)
        process.write("\n")
        process.wait()
        until(lambda: not alive(child_pid), "the child outlived its parent")
