"""How a dead letter looks: the record as it was, with headers that say why it is one and where it was going."""

from __future__ import annotations

REASON_HEADER = "semel.dead-letter.reason"
TOPIC_HEADER = "semel.dead-letter.topic"  # where it was going
SOURCE_HEADER = "semel.dead-letter.source"  # where it was read: topic, partition and offset, as in orders-3@17
SIZE_HEADER = "semel.dead-letter.bytes"  # of the record, where it was too large and only its beginning is kept
REASON_CHARACTERS = 2_000  # an error may quote all of its input


def reason_of(error: BaseException) -> str:
    """An error as a reason that any sink can hold: without half characters, which JSON can bring into a text."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()


def reason_headers(reason: str, topic: str | None) -> list[tuple[str, bytes]]:
    return [
        (REASON_HEADER, reason[:REASON_CHARACTERS].encode(errors="replace")),
        (TOPIC_HEADER, (topic or "").encode()),
    ]
