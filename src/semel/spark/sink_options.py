"""The options of `semel.sink`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semel.client.errors import ConfigError
from semel.client.settings import COMPRESSIONS, ProducerSettings
from semel.spark.encoding import MURMUR2, SPREAD
from semel.spark.ledger import Batch, refuse_loop
from semel.spark.options import OptionError
from semel.spark.writing import Precautions

EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE = "exactly_once", "at_least_once", "at_most_once"
HASH = "hash"
AUTO, ALWAYS = "auto", "always"


@dataclass(frozen=True)
class SinkOptions:
    """See `semel.sink` for what they mean."""

    bootstrap_servers: str
    application_id: str
    topic: str | None = None
    extra_topics: tuple[str, ...] = ()
    dead_letter_topic: str | None = None
    bad_column: str | None = None
    partitioner: str = MURMUR2
    shuffle: str = AUTO
    guarantee: str = EXACTLY_ONCE
    transaction_timeout_ms: int = 600_000
    max_attempts: int = 3
    adopt_checkpoint: bool = False
    accept_lost_state: bool = False
    compression: str = "none"
    max_request_size: int = 1024 * 1024
    source_cluster_is_other: bool = False
    on_batch: Callable[[Any], None] | None = None
    client: Mapping[str, Any] = field(default_factory=dict)
    precautions: Precautions = field(default_factory=Precautions)

    def __post_init__(self) -> None:
        _check_name(self.application_id)
        _choice("partitioner", self.partitioner, (MURMUR2, HASH, SPREAD))
        _choice("shuffle", self.shuffle, (AUTO, ALWAYS))
        _choice("guarantee", self.guarantee, (EXACTLY_ONCE, AT_LEAST_ONCE, AT_MOST_ONCE))
        _choice("compression", self.compression, COMPRESSIONS)
        if self.max_attempts < 1:
            raise OptionError(f"max_attempts is {self.max_attempts}; it must be at least 1")
        if self.topic is None and not self.extra_topics:
            raise OptionError("the sink has no topic; give topic=..., or topics=[...] for rows with a topic column")

    def topics(self) -> list[str]:
        """Every topic that rows may go to."""
        return [t for t in (self.topic, *self.extra_topics, self.dead_letter_topic) if t is not None]

    def position_topics(self, topic: str) -> bool:
        """Whether positions of a source topic belong to this cluster's group, if it has the topic."""
        return not self.source_cluster_is_other

    def refuse_loop(self, batch: Batch) -> str | None:
        """Why a batch must not be written: it reads what the application writes about itself."""
        if self.source_cluster_is_other:
            return None
        return refuse_loop(batch, self.application_id, self.dead_letter_topic)

    def _transaction(self) -> dict[str, Any]:
        if self.guarantee != EXACTLY_ONCE:
            return {}
        return {"transactional.id": self.application_id, "transaction.timeout.ms": self.transaction_timeout_ms}

    def producer_settings(self) -> ProducerSettings:
        try:
            return ProducerSettings.of(
                {
                    **self.client,
                    "bootstrap.servers": self.bootstrap_servers,
                    **self._transaction(),
                    "compression.type": self.compression,
                    "max.request.size": self.max_request_size,
                    "allow.auto.create.topics": False,
                }
            )
        except ConfigError as error:
            raise OptionError(str(error)) from error


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"{name} is {value!r}; expected {', '.join(allowed)}{hint}")


def _check_name(application_id: str) -> None:
    """It becomes a topic's name, a group's and a transactional id."""
    ok = application_id and all(c.isalnum() or c in "._-" for c in application_id) and application_id.isascii()
    if not ok or len(application_id) > 200:
        raise OptionError(
            f"application_id is {application_id!r}; it names the ledger topic, so it has letters, digits, '.', '_' "
            "and '-', at most 200"
        )
