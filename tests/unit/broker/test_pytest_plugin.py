"""The fixtures that semel gives to other people's tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import socket

def connect(broker):
    host, port = broker.bootstrap.split(":")
    socket.create_connection((host, int(port)), 10).close()

def test_fresh(semel_broker):
    connect(semel_broker)

def test_shared(semel_session_broker):
    connect(semel_session_broker)

def test_shared_again(semel_session_broker):
    connect(semel_session_broker)
"""


def test_fixtures_start_real_brokers(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
