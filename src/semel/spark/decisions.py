"""What the ledger says about a batch, wherever the ledger is: in a topic or in a table."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ClassVar, Protocol

from semel.spark.base_sink import SinkError
from semel.spark.checksums import why_state_differs
from semel.spark.ledger import (
    TOPIC_WORDS,
    LedgerEntry,
    LedgerWords,
    MicroBatch,
    Verdict,
    decide,
    refuse_lost_state,
)

log = logging.getLogger("semel.spark")


class RefusedError(SinkError):
    """The ledger says that this batch must not be written."""


class FencedSinkError(SinkError):
    """Another driver owns the application id."""


class LedgerOptions(Protocol):
    """What the user says about an application and its ledger."""

    @property
    def application_id(self) -> str: ...
    @property
    def adopt_checkpoint(self) -> bool: ...
    @property
    def accept_lost_state(self) -> bool: ...


class LedgerRule:
    """Holds the last entry of a ledger against batches. Who reads the ledger sets `last`."""

    words: ClassVar[LedgerWords] = TOPIC_WORDS

    def __init__(self, options: LedgerOptions) -> None:
        self.options = options
        self.last: LedgerEntry | None = None

    def is_written(self, batch: MicroBatch, is_stateful: Callable[[], bool], cause: str = "") -> bool:
        """What the ledger says: written before, or to be written now; anything else is refused."""
        options = self.options
        decision = decide(self.last, batch, adopt=options.adopt_checkpoint, words=self.words)
        lost = refuse_lost_state(self.last, batch, options.application_id)
        if lost is not None and not options.accept_lost_state and is_stateful():
            reason = lost  # where the batch is refused, too, this is the cause, and it has another way out
        elif decision.verdict is Verdict.REFUSE:
            reason = decision.reason
        else:
            return decision.verdict is Verdict.ALREADY_WRITTEN
        raise RefusedError(f"application {options.application_id!r}: {f'{cause}. ' if cause else ''}{reason}")

    def check_replay(self, batch: MicroBatch, checksum: str) -> None:
        """A batch that ran again must have given the rows that were written, or the state of the query is not the one
        that they came from."""
        written = "" if self.last is None else self.last.checksum
        differs = why_state_differs(batch.batch_id, written, checksum)
        if differs and not self.options.accept_lost_state:
            raise RefusedError(f"application {self.options.application_id!r}: {differs}")
        if differs:
            log.warning("accepted: %s", differs)
