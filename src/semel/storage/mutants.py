"""Deliberate bugs, to show that tests and `semel prove` would find them. Off unless SEMEL_MUTANTS names them.

A mutant never makes the broker do more than it should, only less: it leaves out one precaution.
"""

from __future__ import annotations

import os

VARIABLE = "SEMEL_MUTANTS"

MUTANTS = {
    "answer_before_fsync": "an append is acknowledged before it is on the disk",
    "answer_before_journal": "a coordinator answers before its journal entry is durable",
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
