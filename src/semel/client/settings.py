"""Options by Kafka's names: `bootstrap.servers` in a dict, `bootstrap_servers` as a keyword; unknown names are refused.

Settings are frozen, picklable values. Each side (producer, consumer, admin) has its own class with the common options
below and its own; a class attribute `bootstrap_servers` is the option `bootstrap.servers`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from semel.client.errors import ConfigError
from semel.client.group.assignors import ASSIGNORS

Settings = TypeVar("Settings", bound="ClientSettings")

# Names that other clients use for the same thing.
ALIASES = {
    "bootstrap_server": "bootstrap_servers",
    "metadata_broker_list": "bootstrap_servers",
    "sasl_mechanisms": "sasl_mechanism",
    "sasl_plain_username": "sasl_username",
    "sasl_plain_password": "sasl_password",
    "ssl_cafile": "ssl_ca_location",
    "ssl_certfile": "ssl_certificate_location",
    "ssl_keyfile": "ssl_key_location",
    "ssl_password": "ssl_key_password",
    "request_required_acks": "acks",
    "two_phase_commit": "transaction_two_phase_commit_enable",
    "compression_codec": "compression_type",
    "queue_buffering_max_ms": "linger_ms",
    "message_timeout_ms": "delivery_timeout_ms",
    "message_max_bytes": "max_request_size",
    "max_in_flight": "max_in_flight_requests_per_connection",
}

SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """What every kind of client needs to reach a cluster."""

    bootstrap_servers: tuple[str, ...]
    client_id: str = "semel"

    request_timeout_ms: int = 30_000
    default_api_timeout_ms: int = 60_000
    socket_connection_setup_timeout_ms: int = 10_000
    metadata_max_age_ms: int = 300_000
    allow_auto_create_topics: bool = True
    retry_backoff_ms: int = 50
    retry_backoff_max_ms: int = 300  # Kafka's 1,000 adds half a second to every election that is waited for
    reconnect_backoff_ms: int = 50
    reconnect_backoff_max_ms: int = 1_000
    send_buffer_bytes: int = -1
    receive_buffer_bytes: int = -1

    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str | None = None
    sasl_password: str | None = field(default=None, repr=False)
    ssl_ca_location: str | None = None
    ssl_certificate_location: str | None = None
    ssl_key_location: str | None = None
    ssl_key_password: str | None = field(default=None, repr=False)
    ssl_endpoint_identification_algorithm: str = "https"
    enable_ssl_certificate_verification: bool = True

    _choices: ClassVar[dict[str, tuple[str, ...]]] = {
        "security_protocol": SECURITY_PROTOCOLS,
        "sasl_mechanism": SASL_MECHANISMS,
    }

    def __post_init__(self) -> None:
        if not [parse_address(address) for address in self.bootstrap_servers]:
            raise ConfigError("bootstrap.servers is empty; give one or more brokers as 'host:port,host:port'")
        for name, allowed in self._choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{dotted(name)} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_timeout_ms") and value <= 0:
                raise ConfigError(f"{dotted(item.name)} is {value}; it must be a positive number of milliseconds")
            if item.name.endswith("_ms") and not value >= 0:  # nan is not
                raise ConfigError(f"{dotted(item.name)} is {value}; it must be a number of milliseconds from 0 up")
        if self.uses_sasl and (self.sasl_username is None or self.sasl_password is None):
            raise ConfigError(
                f"security.protocol={self.security_protocol} needs sasl.username and sasl.password; "
                "set both, or use a protocol without SASL"
            )

    @property
    def uses_sasl(self) -> bool:
        return self.security_protocol.startswith("SASL_")

    @property
    def uses_tls(self) -> bool:
        return self.security_protocol.endswith("SSL")

    @classmethod
    def of(cls: type[Settings], options: Mapping[str, Any] | None = None, /, **keywords: Any) -> Settings:
        """From a dict with Kafka's dotted names, from keywords, or both (keywords win)."""
        known = {item.name: item for item in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {}
        for given, value in from_java({**(options or {}), **keywords}).items():
            name = _known_name(str(given), known, cls.__name__)
            values[name] = _converted(name, value, hints[name])
        if "bootstrap_servers" not in values:
            raise ConfigError("bootstrap.servers is missing; give one or more brokers as 'host:port,host:port'")
        settings = cls(**values)
        settings._check_given(values)
        return settings

    def _check_given(self, given: Iterable[str]) -> None:
        """Raises if one of the options that were given does not go with the others, even with its default value."""

    def replace(self: Settings, **changes: Any) -> Settings:
        return dataclasses.replace(self, **changes)

    def common(self, **changes: Any) -> ClientSettings:
        """Only the options of `ClientSettings`, for a helper connection of another kind."""
        names = [item.name for item in dataclasses.fields(ClientSettings)]
        return ClientSettings(**{name: getattr(self, name) for name in names} | changes)


def from_java(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the Java client that say the same in another form: JAAS for SASL, PEM stores for TLS."""
    named = {str(name).replace("_", "."): value for name, value in options.items()}
    out = {name: value for name, value in options.items() if str(name).replace("_", ".") not in _JAVA_OPTIONS}
    jaas = named.get("sasl.jaas.config")
    if jaas is not None:
        found = {name: "".join(texts) for name, *texts in re.findall(_JAAS_OPTION, str(jaas))}
        if not {"username", "password"} <= set(found):
            raise ConfigError(
                'sasl.jaas.config must name username="..." and password="..." of a PLAIN or SCRAM login module; '
                "or set sasl.username and sasl.password"
            )
        out |= {f"sasl.{name}": re.sub(r"\\(.)", r"\1", found[name]) for name in ("username", "password")}
    for store, option in (("truststore", "ssl.ca.location"), ("keystore", "ssl.certificate.location")):
        place = named.get(f"ssl.{store}.location")
        if place is None:
            continue
        if str(named.get(f"ssl.{store}.type", "JKS")).upper() != "PEM":
            raise ConfigError(
                f"ssl.{store}.location={place!r} is a Java key store, which only Java reads; export it as PEM "
                f"(keytool -list -rfc, openssl pkcs12) and set {option}"
            )
        out[option] = place
    return out


def common_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options of a client of some kind that every kind has."""
    common = {item.name for item in dataclasses.fields(ClientSettings)}
    return {
        name: value for name, value in options.items() if field_name(name) in common or dotted(name) in _JAVA_OPTIONS
    }


# name=value; Java takes values in either kind of quotes, and words without.
_JAAS_OPTION = r"""([\w.$-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([\w.$-]+))"""

_JAVA_OPTIONS = frozenset(
    {
        "sasl.jaas.config",
        "ssl.truststore.location",
        "ssl.truststore.type",
        "ssl.keystore.location",
        "ssl.keystore.type",
    }
)


def dotted(name: str) -> str:
    """A field's name as Kafka spells it."""
    return name.replace("_", ".")


def parse_address(address: str) -> tuple[str, int]:
    """'host:port' or '[v6]:port', with an optional listener name before '://'."""
    found = re.fullmatch(r"(?:[A-Za-z_]+://)?(?:\[([^\]]+)\]|([^:/\s]+)):(\d{1,5})/?", address.strip())
    if not found or not 0 < int(found[3]) < 65536:
        raise ConfigError(f"bootstrap.servers has {address!r}; expected host:port, such as localhost:9092")
    return found[1] or found[2], int(found[3])


def field_name(given: str) -> str:
    """The name of the field that an option is for, however it is spelt."""
    name = given.strip().replace(".", "_").replace("-", "_").lower()
    return ALIASES.get(name, name)


def _known_name(given: str, known: Mapping[str, Any], owner: str) -> str:
    name = field_name(given)
    if name in known:
        return name
    near = difflib.get_close_matches(name, [*known, *ALIASES], n=1, cutoff=0.6)
    hint = f"did you mean {dotted(ALIASES.get(near[0], near[0]))!r}?" if near else "see the list of options"
    raise ConfigError(f"{owner.removesuffix('Settings').lower()} has no option {given!r}; {hint}")


_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}


def _converted(name: str, value: Any, hint: Any) -> Any:
    """A value as the option's type; text is read, so that options from files and Spark work."""
    optional = type(None) in typing.get_args(hint)
    if value is None and optional:
        return None
    kind = next((arg for arg in typing.get_args(hint) if arg is not type(None)), hint) if optional else hint
    try:
        return _READERS[typing.get_origin(kind) or kind](value)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{dotted(name)} is {value!r}; expected {getattr(kind, '__name__', kind)}") from error


def _read_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(text)
    return text in _TRUE


def _read_int(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _read_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(value)
    return str(value)


def _read_tuple(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    return tuple(_read_text(part).strip() for part in parts if _read_text(part).strip())


_READERS: dict[Any, Any] = {bool: _read_bool, int: _read_int, float: float, str: _read_text, tuple: _read_tuple}


# -- the producer ------------------------------------------------------------------------------------------------------
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")


@dataclass(frozen=True, kw_only=True)
class ProducerSettings(ClientSettings):
    """Batches are larger than the Java client's by default: about 400 KB was fastest on Apache Kafka."""

    acks: str = "all"
    enable_idempotence: bool | None = None  # None: yes, unless acks or max.in.flight rule it out
    transactional_id: str | None = None
    transaction_timeout_ms: int = 60_000
    transaction_two_phase_commit_enable: bool = False  # KIP-939: no timeout, and a new owner can keep what is open
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
        if self.transaction_two_phase_commit_enable:
            self._check_two_phase_commit()
        if self.delivery_timeout_ms < self.linger_ms:
            raise ConfigError(
                f"delivery.timeout.ms ({self.delivery_timeout_ms}) is shorter than linger.ms ({self.linger_ms})"
            )
        if self.enable_idempotence or self.transactional_id is not None:
            self._check_idempotence()

    def _check_two_phase_commit(self) -> None:
        if self.transactional_id is None:
            raise ConfigError("transaction.two.phase.commit.enable needs a transactional.id")
        if self.transaction_timeout_ms != ProducerSettings.transaction_timeout_ms:
            raise ConfigError(
                f"transaction.timeout.ms is {self.transaction_timeout_ms}; with transaction.two.phase.commit.enable "
                "a transaction has no timeout; leave one of the two out"
            )

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


# -- the consumer ------------------------------------------------------------------------------------------------------
_POSITIVE = (
    "auto_commit_interval_ms",
    "heartbeat_interval_ms",
    "max_poll_interval_ms",
    "fetch_max_bytes",
    "max_partition_fetch_bytes",
    "max_poll_records",
    "prefetch_bytes",
)


# Options that go with one group.protocol only, and what to do about them under the other.
_OF_ONE_PROTOCOL = {
    "session_timeout_ms": ("classic", "the broker's group.consumer.session.timeout.ms counts"),
    "heartbeat_interval_ms": ("classic", "the broker's group.consumer.heartbeat.interval.ms counts"),
    "partition_assignment_strategy": ("classic", "the broker assigns, by group.remote.assignor"),
    "group_remote_assignor": ("consumer", "use partition.assignment.strategy"),
}


@dataclass(frozen=True, kw_only=True)
class ConsumerSettings(ClientSettings):
    group_id: str | None = None
    group_instance_id: str | None = None
    group_protocol: str = "classic"  # consumer: KIP-848
    group_remote_assignor: str | None = None
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
        "group_protocol": ("classic", "consumer"),
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
        self._check_given([name for name in _OF_ONE_PROTOCOL if getattr(self, name) != _DEFAULTS[name]])
        unknown = [name for name in self.partition_assignment_strategy if name not in ASSIGNORS]
        if unknown or not self.partition_assignment_strategy:
            raise ConfigError(
                f"partition.assignment.strategy is {','.join(self.partition_assignment_strategy)!r}; "
                f"it must be one or more of {', '.join(ASSIGNORS)}"
            )

    def _check_given(self, given: Iterable[str]) -> None:
        """Raises if an option was given that has no meaning under the group's protocol."""
        for name in given:
            needed, instead = _OF_ONE_PROTOCOL.get(name, (self.group_protocol, ""))
            if needed != self.group_protocol:
                raise ConfigError(f"{dotted(name)} cannot be set when group.protocol={self.group_protocol}; {instead}")

    @property
    def reads_committed(self) -> bool:
        return self.isolation_level == "read_committed"

    @property
    def isolation(self) -> int:
        """The isolation level as requests carry it."""
        return 1 if self.reads_committed else 0


_DEFAULTS = {item.name: item.default for item in dataclasses.fields(ConsumerSettings)}
