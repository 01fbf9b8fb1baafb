"""How busy the machine is: a limit on elapsed time says something on a quiet one only."""

from __future__ import annotations

import os
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
WAITING_MAX_PERCENT = 20.0  # of the last ten seconds, in which somebody waited for a processor


def is_quiet() -> bool:
    """Whether the limit holds for what has just been measured. The load is an average of a minute, and the tests of a
    run that has just begun keep the machine busy before it shows: Linux also says how long programs waited lately."""
    if os.getloadavg()[0] > (os.cpu_count() or 1) + 1:
        return False
    try:
        some = PRESSURE.read_text().splitlines()[0]
    except OSError:
        return True
    return float(some.partition("avg10=")[2].split()[0]) <= WAITING_MAX_PERCENT
