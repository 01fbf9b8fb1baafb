"""What is in a table, and what is wrong with it: read through psycopg, with nothing of semel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from semel.prove.checker.check import Violation, ViolationKind


def check_table(dsn: str, table: str, column: str, expected: Mapping[str, int]) -> list[Violation]:
    """Every id is in the table as often as it should be."""
    import psycopg
    from psycopg import sql

    query = sql.SQL("SELECT {} FROM {}").format(sql.Identifier(column), sql.Identifier(table))
    with psycopg.connect(dsn) as connection:
        found = Counter(value for (value,) in connection.execute(query))
    violations = []
    for name, times in (Counter(dict(expected)) - found).items():
        detail = f"{found[name]} rows, expected {expected[name]}: {times} missing"
        violations.append(Violation(ViolationKind.LOST, table, -1, -1, name, "", detail))
    for name, times in (found - Counter(dict(expected))).items():
        kind = ViolationKind.DUPLICATED if name in expected else ViolationKind.UNEXPECTED
        detail = f"{found[name]} rows, expected {expected.get(name, 0)}: {times} too many"
        violations.append(Violation(kind, table, -1, -1, name, "", detail))
    return violations
