"""How busy the machine is: a limit on elapsed time says something on a quiet one only."""

from __future__ import annotations

import os


def is_quiet() -> bool:
    return os.getloadavg()[0] <= (os.cpu_count() or 1) + 1
