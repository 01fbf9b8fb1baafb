"""What is fed in: numbered records in numbered transactions. Pure, so that producer and checker agree on it."""

from __future__ import annotations

from semel.prove.checker.check import Expectation
from semel.prove.checker.reading import Seen

TRANSACTION_SIZE = 20
ABORT_EVERY = 4  # so often a transaction that is aborted comes first
KEYS = 29


def tag_of(number: int) -> str:
    return f"feed-{number}"


def records_of(number: int) -> list[tuple[bytes, bytes]]:
    """(key, value) of each record of a transaction."""
    first = number * TRANSACTION_SIZE
    return [(key_of(n), b"%07d" % n) for n in range(first, first + TRANSACTION_SIZE)]


def aborted_records(number: int) -> list[tuple[bytes, bytes]]:
    return [(key, b"x" + value) for key, value in records_of(number)]


def key_of(number: int) -> bytes:
    return b"key-%d" % (number % KEYS)


def transaction_of(seen: Seen) -> int | None:
    """The number of the transaction that a record of the source was fed with."""
    tag = seen.header("txn")
    return int(tag.rpartition(b"-")[2]) if tag else None


def values_up_to(transactions: int) -> list[str]:
    return [value.decode() for number in range(transactions) for _, value in records_of(number)]


def forbidden_up_to(transactions: int) -> frozenset[str]:
    return frozenset(value.decode() for number in range(transactions) for _, value in aborted_records(number))


def by_key(seen: Seen) -> tuple[str, int] | None:
    """The order that a partition must keep: numbers of a key rise."""
    value = seen.value or b""
    return ((seen.key or b"").decode(), int(value)) if value.isdigit() else None


def source_expectation(topic: str, transactions: int) -> Expectation:
    """The source itself is the work of a transactional producer that was killed, too."""
    return Expectation(
        (topic,),
        ids=dict.fromkeys(values_up_to(transactions), 1),
        order=by_key,
        forbidden=forbidden_up_to(transactions),
        transactions={
            tag_of(number): frozenset(value.decode() for _, value in records_of(number))
            for number in range(transactions)
        },
    )
