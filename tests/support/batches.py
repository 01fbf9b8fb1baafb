"""Record sets of tests."""

from __future__ import annotations

from collections.abc import Iterator

from semel.protocol.batch import DEFAULT_LIMIT_BYTES, Buffer, iter_headers
from semel.protocol.rows import DecodedBatch, decode_batch


def decode_batches(data: Buffer, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> Iterator[DecodedBatch]:
    """Every whole batch of a record set, control batches and aborted ones too. A partial last one is left out."""
    for at, _ in iter_headers(data):
        yield decode_batch(data, at, limit_bytes)
