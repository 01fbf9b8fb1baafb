"""The producer's options, by Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semel.client.errors import ConfigError
from semel.client.settings import ClientSettings

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True, kw_only=True)
class ProducerSettings(ClientSettings):
    """Batches are larger than the Java client's by default: about 400 KB was fastest on Apache Kafka."""

    acks: str = "all"
    enable_idempotence: bool | None = None  # None: yes, unless acks or max.in.flight rule it out
    transactional_id: str | None = None
    transaction_timeout_ms: int = 60_000
    transaction_version_max: int = 2  # the newest generation of the protocol to speak, where the cluster has it
    compression_type: str = "none"
    batch_size: int = 400 * 1024
    linger_ms: float = 5
    buffer_memory: int = 32 * 1024 * 1024
    max_block_ms: int = 60_000
    max_request_size: int = 1024 * 1024
    delivery_timeout_ms: int = 120_000
    max_in_flight_requests_per_connection: int = 5
    retries: int = 2**31 - 1

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        **ClientSettings._choices,
        "acks": ("all", "-1", "0", "1"),
        "compression_type": COMPRESSIONS,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch_size", "buffer_memory", "max_request_size", "max_in_flight_requests_per_connection"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '.')} is {getattr(self, name)}; it must be at least 1")
        if self.linger_ms < 0 or self.retries < 0:
            raise ConfigError(f"linger.ms ({self.linger_ms}) and retries ({self.retries}) must not be negative")
        if self.transaction_version_max not in (1, 2):
            raise ConfigError(f"transaction.version.max is {self.transaction_version_max}; it must be 1 or 2")
        if self.transactional_id == "":
            raise ConfigError(
                "transactional.id is empty; give it a name that is the same at every start, or leave it out"
            )
        if self.delivery_timeout_ms < self.linger_ms:
            raise ConfigError(
                f"delivery.timeout.ms ({self.delivery_timeout_ms}) is shorter than linger.ms ({self.linger_ms})"
            )
        if self.enable_idempotence or self.transactional_id is not None:
            self._check_idempotence()

    def _check_idempotence(self) -> None:
        why = "transactional.id" if self.transactional_id is not None else "enable.idempotence=true"
        if self.enable_idempotence is False:
            raise ConfigError("transactional.id needs enable.idempotence=true; leave that option out")
        if not self.acks_all:
            raise ConfigError(f"{why} needs acks=all, not acks={self.acks}")
        if self.max_in_flight_requests_per_connection > 5:
            raise ConfigError(
                f"{why} needs max.in.flight.requests.per.connection of at most 5, "
                f"not {self.max_in_flight_requests_per_connection}"
            )
        if self.retries == 0:
            raise ConfigError(f"{why} needs retries above 0")

    @property
    def acks_all(self) -> bool:
        return self.acks in ("all", "-1")

    @property
    def acks_number(self) -> int:
        return -1 if self.acks_all else int(self.acks)

    @property
    def is_idempotent(self) -> bool:
        if self.enable_idempotence is not None:
            return self.enable_idempotence
        return self.acks_all and self.max_in_flight_requests_per_connection <= 5 and self.retries > 0

    @property
    def compression(self) -> int:
        return COMPRESSIONS.index(self.compression_type)
