"""What a program gives to `send`, as a row: serialized, checked, with its size. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from semel.client.errors import ConfigError, RecordTooLargeError, SerializationError
from semel.client.producer.batches import RECORD_OVERHEAD_BYTES, Row
from semel.client.serde import InContext, checked
from semel.client.types import timestamp_ms
from semel.protocol.batch import HEADER_SIZE

Bytes = bytes | bytearray | memoryview | str
Serializer = Callable[[Any], Bytes] | InContext
Headers = Iterable[tuple[str, Bytes | None]] | Mapping[str, Bytes | None]


class RecordPacker:
    """Makes rows for one producer, with its serializers and its limit of size."""

    def __init__(self, key_serializer: Any, value_serializer: Any, max_request_size: int) -> None:
        of_key, of_value = checked(key_serializer=key_serializer, value_serializer=value_serializer)
        self._serializers: tuple[Serializer | None, Serializer | None] = of_key, of_value
        self._serializes = key_serializer is not None or value_serializer is not None
        self._in_context = isinstance(of_key, InContext) or isinstance(of_value, InContext)
        self._max_bytes = max_request_size
        # Of key and value: bytes of fewer need no check and no change. None of them if there are serializers.
        self.small_bytes = 0 if self._serializes else max_request_size - RECORD_OVERHEAD_BYTES - HEADER_SIZE

    def pack(
        self, topic: str, value: Any, key: Any, timestamp: int | datetime | None, headers: Headers | None, now_s: float
    ) -> tuple[Row, int]:
        """The row, and how many bytes it takes at most."""
        if self._serializes:
            of_key, of_value = self._serializers
            given = key
            headers = _as_pairs(headers) if self._in_context else headers  # to which serializers may add
            key = _serialized(key, of_key, "key", topic, headers, given)
            value = _serialized(value, of_value, "value", topic, headers, given)
        value = value if type(value) is bytes or value is None else _as_bytes(value, "value")
        key = key if type(key) is bytes or key is None else _as_bytes(key, "key")
        packed = () if headers is None else _as_headers(headers)
        size = RECORD_OVERHEAD_BYTES + (len(value) if value else 0) + (len(key) if key else 0)
        if packed:
            size += sum(10 + 3 * len(name) + len(data or b"") for name, data in packed)
        if size + HEADER_SIZE > self._max_bytes:
            raise _too_large(size + HEADER_SIZE, self._max_bytes)
        return (key, value, int(now_s * 1000) if timestamp is None else timestamp_ms(timestamp), packed), size


def _serialized(data: Any, serializer: Serializer | None, part: str, topic: str, headers: Any, key: Any) -> Any:
    """A key or value through its serializer; `key` is the record's, as it was given."""
    if serializer is None or data is None:
        return data
    try:
        made = serializer(data, topic, headers) if isinstance(serializer, InContext) else serializer(data)
        if made is None:
            raise ValueError("it became None, which would be a tombstone; send None for that")
        return made
    except Exception as error:
        raise SerializationError(
            f"a record for {topic!r} with the key {key!r:.200}: the {part} cannot be serialized: "
            f"{type(error).__name__}: {error}; nothing of it was sent",
            None,
            topic,
            key,
        ) from error


def _as_bytes(data: Any, what: str) -> bytes:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise ConfigError(f"a record's {what} is bytes, text or None, not {type(data).__name__}; encode it first")


def _as_pairs(headers: Headers | None) -> list[tuple[str, Bytes | None]]:
    return list(headers.items() if isinstance(headers, Mapping) else headers or ())


def _as_headers(headers: Headers) -> tuple[tuple[str, bytes | None], ...]:
    packed = []
    for name, value in _as_pairs(headers):
        if not isinstance(name, str) or not _is_utf8(name):
            raise ConfigError(f"a header's name is text that can be written as UTF-8, not {name!r}")
        packed.append((name, None if value is None else _as_bytes(value, f"header {name!r}")))
    return tuple(packed)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(size_bytes: int, limit_bytes: int) -> RecordTooLargeError:
    return RecordTooLargeError(
        f"the record takes about {size_bytes} bytes; max.request.size is {limit_bytes}: raise it (and the topic's "
        "max.message.bytes), or write smaller records"
    )
