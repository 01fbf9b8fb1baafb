"""Programs started as child processes: wait for what they print, freeze them, kill them, and never leave one behind.

Nothing outlives its parent: a guardian process learns of every child and kills what is left when the parent is gone,
however it went (an exception, Ctrl-C, SIGTERM, even SIGKILL).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

KEPT_LINES = 10_000
KEPT_PORTS = 64

_GUARDIAN = """
import os, signal, sys
alive = set()
for line in sys.stdin:
    (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
for group in alive:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class ProcessFailed(Exception):
    """A child process ended, or did not say what was awaited; the message has the end of its output."""


class Process:
    """A running child process, the leader of its own process group. Use it as a context manager or call `kill`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bool = False,
    ) -> None:
        self.command = [str(word) for word in command]
        self._popen = subprocess.Popen(
            self.command,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        _guardian.watch(self.pid)
        self._is_gone = False  # nothing is left of its group, so the number may be that of another one
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._read_count = 0
        self._readers = [self._follow(self._popen.stdout), self._follow(self._popen.stderr)]

    # --- what it says ---

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def returncode(self) -> int | None:
        code = self._popen.poll()
        if code is not None:
            self._look_whether_gone()
        return code

    @property
    def output(self) -> str:
        """The last lines of stdout and stderr, as they came."""
        with self._changed:
            return "\n".join(self._lines)

    def wait_for_line(self, pattern: str, timeout_s: float = 30, after: int = 0) -> re.Match[str]:
        """Waits for a line on stdout or stderr in which the pattern is found.

        Earlier lines count too, except the first `after` (see `line_count`).
        """
        expression = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        seen = after
        with self._changed:
            while True:
                for line in self._since(seen):
                    if found := expression.search(line):
                        return found
                seen = self._read_count
                if not any(reader.is_alive() for reader in self._readers):
                    raise self._failure(f"ended with code {self._popen.wait()} before it said {pattern!r}")
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    raise self._failure(f"did not say {pattern!r} within {timeout_s} s")
                # Readers notify on every line and at their end; the limit is for the moment until they count as dead.
                self._changed.wait(min(remaining_s, 0.2))

    def lines(self, after: int = 0) -> list[str]:
        """What it said after the first so many lines, as far as that is still known."""
        with self._changed:
            return self._since(after)

    @property
    def line_count(self) -> int:
        """How many lines were read so far; pass it as `after` to wait for a new one."""
        with self._changed:
            return self._read_count

    def wait(self, timeout_s: float = 30) -> int:
        """Waits for its end; the exit code (negative: the signal that killed it)."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failure(f"did not end within {timeout_s} s") from None
        self._look_whether_gone()
        self._forget()
        return code

    def write(self, text: str) -> None:
        """To its stdin, at once. Needs `stdin=True`."""
        assert self._popen.stdin is not None, "start the process with stdin=True to write to it"
        self._popen.stdin.write(text)
        self._popen.stdin.flush()

    def close_stdin(self) -> None:
        assert self._popen.stdin is not None, "start the process with stdin=True to close its stdin"
        self._popen.stdin.close()

    # --- what is done to it ---

    def terminate(self, timeout_s: float = 30) -> int:
        """Sends SIGTERM and waits; the exit code. Kills it, and says so, if it does not."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # a frozen process does not see the request otherwise
        try:
            return self.wait(timeout_s)
        except ProcessFailed:
            self.kill()
            raise

    def interrupt(self, timeout_s: float = 30) -> int:
        """As Ctrl-C does: SIGINT, then waits; the exit code."""
        self._signal(signal.SIGINT)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to it and its children, as `kill -9` does, frozen or not; returns when it is gone."""
        self._signal(signal.SIGKILL)
        self._popen.wait()
        self._forget()

    def pause(self) -> None:
        """Freezes it (SIGSTOP) and returns when it stands still."""
        self._signal(signal.SIGSTOP)
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Lets it go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- inside ---

    def _follow(self, stream: IO[str] | None) -> threading.Thread:
        def read() -> None:
            assert stream is not None
            for line in stream:
                with self._changed:
                    self._lines.append(line.rstrip("\n"))
                    self._read_count += 1
                    self._changed.notify_all()
            stream.close()
            with self._changed:
                self._changed.notify_all()

        reader = threading.Thread(target=read, name=f"output of {self.pid}", daemon=True)
        reader.start()
        return reader

    def _since(self, count: int) -> list[str]:
        new = self._read_count - count
        return list(self._lines)[-new:] if new > 0 else []

    def _signal(self, number: int) -> None:
        if not self._is_gone:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says "permission" for a zombie
                os.killpg(self.pid, number)

    def _look_whether_gone(self) -> None:
        """After its end. While one process of the group is alive, the system gives its number to nobody else."""
        if not self._is_gone:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                self._is_gone = True
                _guardian.release(self.pid)
            except PermissionError:
                pass

    def _forget(self) -> None:
        if not self._is_gone:
            _guardian.release(self.pid)
        for reader in self._readers:
            reader.join(5)

    def _failure(self, what: str) -> ProcessFailed:
        tail = "\n".join(list(self._lines)[-40:])
        return ProcessFailed(f"`{' '.join(self.command)[:200]}` {what}; its last output:\n{tail}")


class _Guardian:
    """Talks to the guardian process, which is started with the first child and ends by itself with its parent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner_pid = 0
        self._groups: set[int] = set()
        self._lock = threading.Lock()

    def watch(self, group: int) -> None:
        with self._lock:
            self._groups.add(group)
            self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        with self._lock:
            self._groups.discard(group)
            self._tell(f"-{group}\n")

    def kill_all(self) -> None:
        """At the normal end of the parent: the same, without waiting for the guardian to notice."""
        if self._owner_pid != os.getpid():
            return  # a forked child must not kill what belongs to its parent
        for group in list(self._groups):
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)

    def _tell(self, line: str) -> None:
        if self._process is None or self._owner_pid != os.getpid():
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _GUARDIAN], stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        self._owner_pid = os.getpid()
        atexit.register(self.kill_all)


_guardian = _Guardian()


def family(root: int) -> list[tuple[int, int, str]]:
    """(process, its parent, its command line) of all descendants: Python workers have process groups of their own."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                parents[int(entry)] = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
    members = [root]
    for member in members:
        members += [pid for pid, parent in parents.items() if parent == member]
    found = []
    for pid in members[1:]:
        with contextlib.suppress(OSError):
            command = Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append((pid, parents[pid], command))
    return found


_kept: deque[socket.socket] = deque()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 for servers, all different. Other programs are not given them while this program runs: a
    server that is down for a moment, or has not started yet, would find its port taken.

    Linux lets a server listen on a port that is bound here and on which nobody listens; elsewhere the ports are free at
    this moment, no more. The oldest of more than 64 are released."""
    bound = [socket.socket() for _ in range(count)]
    for each in bound:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in bound]
    _kept.extend(bound)
    while _kept and (len(_kept) > KEPT_PORTS or sys.platform != "linux"):
        _kept.popleft().close()
    return ports
