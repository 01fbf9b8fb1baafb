"""The consumer's options, by Kafka's names and with Kafka's defaults; where a default differs, the comment says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from semel.client.assignors import ASSIGNORS
from semel.client.errors import ConfigError
from semel.client.settings import ClientSettings, dotted

_POSITIVE = (
    "auto_commit_interval_ms",
    "heartbeat_interval_ms",
    "max_poll_interval_ms",
    "fetch_max_bytes",
    "max_partition_fetch_bytes",
    "max_poll_records",
    "prefetch_bytes",
)


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings(ClientSettings):
    group_id: str | None = None
    group_instance_id: str | None = None
    auto_offset_reset: str = "latest"
    isolation_level: str = "read_committed"  # Kafka: read_uncommitted, which shows records of aborted transactions
    enable_auto_commit: bool = True
    auto_commit_interval_ms: int = 5_000

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    partition_assignment_strategy: tuple[str, ...] = ("range", "cooperative-sticky")

    fetch_min_bytes: int = 1
    fetch_max_wait_ms: int = 500
    fetch_max_bytes: int = 52_428_800
    max_partition_fetch_bytes: int = 4_194_304  # Kafka: 1 MiB; columns are decoded faster in larger pieces
    prefetch_bytes: int = 33_554_432  # read ahead while less than this waits for the program
    max_poll_records: int = 500

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        **ClientSettings._choices,
        "auto_offset_reset": ("earliest", "latest", "none"),
        "isolation_level": ("read_committed", "read_uncommitted"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{dotted(name)} is {getattr(self, name)}; it must be above 0")
        if self.group_id == "":
            raise ConfigError("group.id is empty; give it a name, or leave it out to read without a group")
        if self.group_instance_id is not None and not (self.group_id and self.group_instance_id):
            raise ConfigError("group.instance.id makes a static member: it must not be empty and needs a group.id")
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat.interval.ms is {self.heartbeat_interval_ms}, which must be below session.timeout.ms "
                f"({self.session_timeout_ms}); a third of it is usual"
            )
        unknown = [name for name in self.partition_assignment_strategy if name not in ASSIGNORS]
        if unknown or not self.partition_assignment_strategy:
            raise ConfigError(
                f"partition.assignment.strategy is {','.join(self.partition_assignment_strategy)!r}; "
                f"it must be one or more of {', '.join(ASSIGNORS)}"
            )

    @property
    def reads_committed(self) -> bool:
        return self.isolation_level == "read_committed"

    @property
    def isolation(self) -> int:
        """The isolation level as requests carry it."""
        return 1 if self.reads_committed else 0
