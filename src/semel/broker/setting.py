"""One setting: how it is read, what it may be, and how it is written."""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple


class SettingError(Exception):
    """A setting that is unknown, means nothing here, or has a value that cannot be."""


class Setting(NamedTuple):
    """One row: how a setting is read and what it does."""

    name: str
    kind: str  # "int", "long", "short", "double", "boolean", "string", "list", "class", "password"
    default: Any  # None: not set
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    dynamic: bool = False  # may be altered while the broker runs
    topic: str | None = None  # the topic setting whose default this is
    no_effect: str = ""  # why Kafka's setting is accepted, kept and shown, but does nothing here

    def parse(self, text: str) -> Any:
        text = text.strip()
        try:
            value = _PARSERS[self.kind](text)
        except ValueError:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {self._expected()}") from None
        problem = self._problem(value)
        if problem:
            raise SettingError(f"Invalid value {text} for configuration {self.name}: {problem}")
        return value

    def _expected(self) -> str:
        if self.kind == "boolean":
            return "Expected value to be either true or false"
        return f"Not a number of type {self.kind.upper()}"

    def _problem(self, value: Any) -> str | None:
        if self.choices:
            words = value if isinstance(value, tuple) else (value,)
            is_right = all(str(word) in self.choices for word in words)
            return None if is_right else f"String must be one of: {', '.join(self.choices)}"
        if self.minimum is not None and value < self.minimum:
            return f"Value must be at least {self.minimum}"
        if self.maximum is not None and value > self.maximum:
            return f"Value must be no more than {self.maximum}"
        return None


def _parse_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _parse_int(text: str) -> int:
    if not text.isascii() or "_" in text:  # Python would take them
        raise ValueError(text)
    return int(text)


def _parse_double(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return value


_PARSERS: dict[str, Any] = {
    "int": _parse_int,
    "long": _parse_int,
    "short": _parse_int,
    "double": _parse_double,
    "boolean": _parse_boolean,
    "string": str,
    "class": str,
    "password": str,
    "list": lambda text: tuple(word.strip() for word in text.split(",") if word.strip()),
}


def as_text(value: Any) -> str | None:
    """A value as configuration files and DescribeConfigs write it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)
