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
    retry_backoff_max_ms: int = 1_000
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
        check_addresses(self.bootstrap_servers)
        for name, allowed in self._choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{dotted(name)} is {value!r}; it must be one of {', '.join(map(str, allowed))}")
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_timeout_ms") and value <= 0:
                raise ConfigError(f"{dotted(item.name)} is {value}; it must be a positive number of milliseconds")
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
        return cls(**values)

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
        found = dict(re.findall(r'\b(username|password)\s*=\s*"((?:[^"\\]|\\.)*)"', str(jaas)))
        if set(found) != {"username", "password"}:
            raise ConfigError(
                'sasl.jaas.config must name username="..." and password="..." of a PLAIN or SCRAM login module; '
                "or set sasl.username and sasl.password"
            )
        out |= {f"sasl.{name}": re.sub(r"\\(.)", r"\1", text) for name, text in found.items()}
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


def check_addresses(addresses: Iterable[str]) -> None:
    """Raises unless there is at least one address and each can be read."""
    if not [parse_address(address) for address in addresses]:
        raise ConfigError("bootstrap.servers is empty; give one or more brokers as 'host:port,host:port'")


def _known_name(given: str, known: Mapping[str, Any], owner: str) -> str:
    name = given.strip().replace(".", "_").replace("-", "_").lower()
    name = ALIASES.get(name, name)
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
