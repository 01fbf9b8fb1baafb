"""`semel broker` starts in a blink and is small. Generous limits for a busy machine; `semel bench broker` measures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.contestants import resident_mb, start_to_metadata_s
from semel.local.brokers import SemelBroker
from tests.support.machine import is_quiet

START_MAX_S = 1.5  # measured: 0.2, nearly all of it processor time
IDLE_MAX_MB = 80  # measured: 35


def cpu_s(process_id: int) -> float:
    """The processor time that a process has taken so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_broker_answers_soon_after_its_start_and_takes_little_memory(tmp_path: Path) -> None:
    with SemelBroker(tmp_path / "broker") as broker:
        broker.stop()
        start_s = start_to_metadata_s(broker)
        assert broker.process is not None
        assert cpu_s(broker.process.pid) < START_MAX_S
        if is_quiet():  # else most of the time is spent waiting for a processor
            assert start_s < START_MAX_S
        assert resident_mb(broker) < IDLE_MAX_MB
