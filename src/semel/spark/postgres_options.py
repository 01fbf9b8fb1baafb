"""The options of `semel.postgres_sink`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semel.sinks.postgres.database import Database
from semel.sinks.postgres.moving import DELETE, INSERT, MODES, UPSERT
from semel.spark.ledger import MicroBatch
from semel.spark.options import OptionError
from semel.spark.sink_options import Precautions, check_application_id, choice

STOP, DEAD_LETTER = "stop", "dead_letter"


@dataclass(frozen=True)
class PostgresOptions:
    """See `semel.postgres_sink` for what they mean."""

    database: Database
    application_id: str
    table: str
    mode: str = INSERT
    key: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    operation_column: str | None = None
    on_error: str = STOP
    max_tasks: int | None = None
    max_attempts: int = 3
    retry_timeout_ms: int = 60_000
    adopt_checkpoint: bool = False
    accept_lost_state: bool = False
    on_batch: Callable[[Any], None] | None = None
    precautions: Precautions = field(default_factory=Precautions)

    def __post_init__(self) -> None:
        check_application_id(self.application_id)
        choice("mode", self.mode, MODES)
        choice("on_error", self.on_error, (STOP, DEAD_LETTER))
        if self.max_attempts < 1:
            raise OptionError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.max_tasks is not None and self.max_tasks < 1:
            raise OptionError(f"max_tasks is {self.max_tasks}; it must be at least 1")
        self._check_mode()

    def _check_mode(self) -> None:
        if self.mode == INSERT and self.key:
            raise OptionError(f"mode={INSERT!r} has no key; use mode={UPSERT!r}, or leave key out")
        if self.mode != UPSERT and (self.order_by or self.operation_column):
            raise OptionError(f"order_by and operation_column belong to mode={UPSERT!r}, the mode is {self.mode!r}")
        if self.mode == DELETE and not self.key:
            raise OptionError(f"mode={DELETE!r} needs key=[...]: the columns by which rows are deleted")
        if self.operation_column is not None and not self.order_by:
            raise OptionError(
                "operation_column needs order_by=[...]: a batch may hold several changes of one key, and only a column "
                "(an offset, a version, a time) says which is the last"
            )

    @property
    def owner(self) -> str:
        """The name of the owner row."""
        return f"spark:{self.application_id}"

    @property
    def schema(self) -> str:
        return self.database.schema

    @property
    def sets_aside(self) -> bool:
        return self.on_error == DEAD_LETTER

    def aside(self) -> set[str]:
        """Columns of the rows that the table need not have."""
        return {*self.order_by, *([self.operation_column] if self.operation_column else [])}

    @property
    def transaction_timeout_ms(self) -> float:
        """A database ends no transaction because of its length."""
        return math.inf

    def refuse_loop(self, batch: MicroBatch) -> str | None:
        return None  # nothing that it writes is read by a topic's source
