"""Deliberate bugs, to show that tests and `semel prove` would find them. Off unless SEMEL_MUTANTS names them.

A mutant never makes a program do more than it should, only less: it leaves out one precaution. Each is looked up once,
when its module is imported, so it costs nothing when it is off.
"""

from __future__ import annotations

import os

VARIABLE = "SEMEL_MUTANTS"

MUTANTS = {
    "answer_before_fsync": "the broker acknowledges an append before it is on the disk",
    "answer_before_journal": "the transaction coordinator answers before its journal entry is durable",
    "no_require_stable": "a consumer that takes over does not wait for positions of transactions that have not ended",
    "init_without_expected_epoch": "a transaction's owner renews its epoch without saying which one it has",
    "no_opening_handshake": "a Spark task writes a partition without asking whether another attempt has it",
    "no_count_audit": "the Spark sink commits without comparing what tasks reported with what the log holds",
    "ledger_by_batch_id": "the Spark sink decides by the batch's number alone whether it was written",
}


class MutantError(Exception):
    """SEMEL_MUTANTS names a bug that nobody built in."""


def _read(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    unknown = sorted(names - set(MUTANTS))
    if unknown:
        raise MutantError(f"{VARIABLE} names {', '.join(unknown)}; the mutants are {', '.join(sorted(MUTANTS))}")
    return names


ACTIVE = _read(os.environ.get(VARIABLE, ""))
