"""G3: with a deliberate bug switched on, the campaign finds it within its default length: no check without teeth.

Faults: those that bring the bug out, see `tests.mutants.HUNTS`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import HUNTS
from tests.support.prove import prove

CHEAP = {"respond_before_fsync"}  # without Spark, and found in its first round
HARM = {  # what each of them may lead to; at least one of it must be named
    "respond_before_fsync": {"lost", "non-monotonic read", "partial transaction", "offsets disagree with output"},
    "respond_before_log": {"lost", "partial transaction", "offsets disagree with output", "aborted data read"},
    "no_require_stable": {"duplicated"},
    "init_without_expected_epoch": {"duplicated"},
    "no_opening_handshake": {"lost", "duplicated"},
    "no_count_audit": {"duplicated"},
    "ledger_by_batch_id": {"lost", "offsets disagree with output"},
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mutant", [name if name in CHEAP else pytest.param(name, marks=pytest.mark.full) for name in HUNTS]
)
def test_mutant_is_found(tmp_path: Path, mutant: str) -> None:
    proof = prove(tmp_path, "--mutant", mutant, "--seed", "5", timeout_s=380)
    assert proof.code == 1, proof.told
    assert proof.kinds & HARM[mutant], proof.told
    assert proof.result["faults_fired"] > 0
