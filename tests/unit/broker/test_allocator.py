"""Large answers do not pay for their memory again and again, and what is kept is bounded."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from semel.broker.runner import KEPT_BYTES, keep_freed_memory

def faults_of(blocks):
    def use():
        held = [bytes(1 << 20) + b"x" for _ in range(blocks)]
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

plain = faults_of(8)
assert keep_freed_memory()
tuned = faults_of(8)
many = [bytes(1 << 20) + b"x" for _ in range(200)]
del many
resident_kb = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))
print(plain, tuned, resident_kb)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tells glibc what to keep")
def test_freed_blocks_are_used_again_and_a_peak_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    plain, tuned, resident_kb = map(int, done.stdout.split())
    assert plain > 1_000, "without it, every block is paid for again"
    assert tuned < plain / 10
    assert resident_kb < 100_000
