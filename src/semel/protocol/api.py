"""An API of the wire protocol: its key, its request and response in all versions, and their headers and frames.

A frame on the wire is a 32-bit size, a header and a body. Which header belongs to a body follows from the version:
flexible requests have header version 2 (with tagged fields), others version 1; flexible responses have header version
1, except ApiVersions, whose response always has version 0 so that any client can read it.
"""

from __future__ import annotations

import struct
from functools import cache
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

from semel.protocol.compiler import Decoder, Encoder, decoder_of, encoder_of, read_uvarint
from semel.protocol.errors import DecodeError, EncodeError, UnsupportedVersionError
from semel.protocol.schema import Buffer, Struct, parse_versions

Message = TypeVar("Message", bound=Struct)
Request = TypeVar("Request", bound=Struct)
Response = TypeVar("Response", bound=Struct)

API_VERSIONS_KEY = 18
_FRAME_SIZE = struct.Struct(">i")
_REQUEST_START = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id
_RESPONSE_START = struct.Struct(">i")  # correlation id


class Format(Generic[Message]):
    """A message type with its versions: bytes to struct and back."""

    __slots__ = ("_decoders", "_encoders", "flexible", "name", "struct", "valid")

    def __init__(self, struct_type: type[Message], valid: str, flexible: str = "none") -> None:
        self.struct = struct_type
        self.name = struct_type.__name__
        self.valid = parse_versions(valid)
        self.flexible = parse_versions(flexible)
        self._decoders: dict[int, Decoder] = {}  # by version, of those in use
        self._encoders: dict[int, Encoder] = {}

    def __repr__(self) -> str:
        return f"Format({self.name}, versions {self.valid})"

    def check(self, version: int) -> None:
        if version not in self.valid:
            raise UnsupportedVersionError(f"{self.name} has versions {self.valid}, not {version}")

    def decode_from(self, data: Buffer, version: int, at: int = 0) -> tuple[Message, int]:
        """The message at a position, and the position after it."""
        decode = self._decoders.get(version)
        if decode is None:
            self.check(version)
            decode = self._decoders[version] = decoder_of(self.struct, version, version in self.flexible)
        buf = data if isinstance(data, memoryview) else memoryview(data)
        try:
            return decode(buf, at, len(buf))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise DecodeError(f"{self.name} version {version} is cut short or malformed: {error}") from error

    def decode(self, data: Buffer, version: int, at: int = 0) -> Message:
        """The message that fills the rest of the buffer; bytes left over are an error."""
        message, end = self.decode_from(data, version, at)
        if end != len(data):
            raise DecodeError(f"{self.name} version {version} ends at byte {end}, but {len(data) - end} bytes follow")
        return message

    def encode_parts(self, message: Message, version: int) -> list[Buffer]:
        """The message as a list of buffers; record sets in it are handed through without a copy."""
        encode = self._encoders.get(version)
        if encode is None:
            self.check(version)
            encode = self._encoders[version] = encoder_of(self.struct, version, version in self.flexible)
        parts: list[Buffer] = []
        try:
            encode(message, parts.append)
        except (struct.error, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise EncodeError(f"{self.name} version {version} cannot be encoded: {error}") from error
        return parts

    def encode(self, message: Message, version: int) -> bytes:
        return b"".join(self.encode_parts(message, version))


class RequestHeader(NamedTuple):
    """What every request starts with, and where its body starts in the frame."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body_at: int


class Api(Generic[Request, Response]):
    """One row of the protocol: request and response share their versions."""

    __slots__ = ("key", "name", "request", "response")

    def __init__(
        self, key: int, request: type[Request], response: type[Response], versions: str, flexible: str = "none"
    ) -> None:
        self.key = key
        self.name = request.__name__.removesuffix("Request")
        self.request = Format(request, versions, flexible)
        self.response = Format(response, versions, flexible)

    def __repr__(self) -> str:
        return f"Api({self.key} {self.name}, versions {self.request.valid})"

    def frame_request(self, request: Request, version: int, correlation_id: int, client_id: str | None) -> list[Buffer]:
        """A whole request frame, ready for the socket."""
        body = self.request.encode_parts(request, version)
        name = (client_id or "").encode()
        start = _REQUEST_START.pack(self.key, version, correlation_id, -1 if client_id is None else len(name)) + name
        if version in self.request.flexible:
            start += b"\0"
        return _framed(start, body)

    def frame_response(self, response: Response, version: int, correlation_id: int) -> list[Buffer]:
        """A whole response frame, ready for the socket."""
        body = self.response.encode_parts(response, version)
        start = _RESPONSE_START.pack(correlation_id)
        if self._has_tags_in_response_header(version):
            start += b"\0"
        return _framed(start, body)

    def read_response(self, frame: Buffer, version: int) -> tuple[int, Response]:
        """(correlation id, response) of a frame without its size."""
        if len(frame) < 4:
            raise DecodeError(f"a response starts with 4 bytes of correlation id, but the frame has {len(frame)}")
        (correlation_id,) = _RESPONSE_START.unpack_from(frame)
        at = _skip_header_tags(frame, 4) if self._has_tags_in_response_header(version) else 4
        return correlation_id, self.response.decode(frame, version, at)

    def _has_tags_in_response_header(self, version: int) -> bool:
        return self.key != API_VERSIONS_KEY and version in self.response.flexible


def read_request_header(frame: Buffer, flexible_from: dict[int, int]) -> RequestHeader:
    """The header of a request frame (without its size). `flexible_from` says from which version an API has tags in it.

    An API or version that nobody knows is still given its first four fields, so that it can be refused by name.
    """
    if len(frame) < _REQUEST_START.size:
        raise DecodeError(
            f"a request header takes at least {_REQUEST_START.size} bytes, but the frame has {len(frame)}"
        )
    api_key, version, correlation_id, length = _REQUEST_START.unpack_from(frame)
    at = _REQUEST_START.size + max(length, 0)
    if length < -1 or at > len(frame):
        raise DecodeError(f"the client id says it takes {length} bytes, but the frame has {len(frame)}")
    try:
        client_id = None if length == -1 else str(frame[_REQUEST_START.size : at], "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError(f"the client id is not UTF-8: {error}") from error
    if version >= flexible_from.get(api_key, 0x7FFF):
        at = _skip_header_tags(frame, at)
    return RequestHeader(api_key, version, correlation_id, client_id, at)


def _skip_header_tags(frame: Buffer, at: int) -> int:
    try:
        count, at = read_uvarint(frame, at)
        for _ in range(count):
            _, at = read_uvarint(frame, at)
            size, at = read_uvarint(frame, at)
            at += size
    except IndexError:
        raise DecodeError("the tagged fields of the header are cut short") from None
    if at > len(frame):
        raise DecodeError(f"the tagged fields of the header end at byte {at}, but the frame has {len(frame)}")
    return at


def _framed(start: bytes, body: list[Buffer]) -> list[Buffer]:
    return [_FRAME_SIZE.pack(len(start) + sum(map(len, body))) + start, *body]


# --- which APIs there are: key, module of its messages, name, first version with tagged fields ---
#
# The modules are loaded when first used, so that a program pays only for the APIs that it calls.


# key: (module in `messages`, name, first flexible version or None)
APIS: dict[int, tuple[str, str, int | None]] = {
    0: ("records", "produce", 9),
    1: ("records", "fetch", 12),
    2: ("records", "list_offsets", 6),
    3: ("cluster", "metadata", 9),
    8: ("offsets", "offset_commit", 8),
    9: ("offsets", "offset_fetch", 6),
    10: ("cluster", "find_coordinator", 3),
    11: ("groups", "join_group", 6),
    12: ("groups", "heartbeat", 4),
    13: ("groups", "leave_group", 4),
    14: ("groups", "sync_group", 4),
    15: ("groups", "describe_groups", 5),
    16: ("groups", "list_groups", 3),
    17: ("security", "sasl_handshake", None),
    18: ("cluster", "api_versions", 3),
    19: ("topics", "create_topics", 5),
    20: ("topics", "delete_topics", 4),
    21: ("records", "delete_records", 2),
    22: ("transactions", "init_producer_id", 2),
    23: ("records", "offset_for_leader_epoch", 4),
    24: ("transactions", "add_partitions_to_txn", 3),
    25: ("transactions", "add_offsets_to_txn", 3),
    26: ("transactions", "end_txn", 3),
    27: ("transactions", "write_txn_markers", 1),
    28: ("transactions", "txn_offset_commit", 3),
    29: ("security", "describe_acls", 2),
    30: ("security", "create_acls", 2),
    31: ("security", "delete_acls", 2),
    32: ("configs", "describe_configs", 4),
    33: ("configs", "alter_configs", 2),
    34: ("topics", "alter_replica_log_dirs", 2),
    35: ("topics", "describe_log_dirs", 2),
    36: ("security", "sasl_authenticate", 2),
    37: ("topics", "create_partitions", 2),
    38: ("security", "create_delegation_token", 2),
    39: ("security", "renew_delegation_token", 2),
    40: ("security", "expire_delegation_token", 2),
    41: ("security", "describe_delegation_token", 2),
    42: ("groups", "delete_groups", 2),
    43: ("topics", "elect_leaders", 2),
    44: ("configs", "incremental_alter_configs", 1),
    45: ("topics", "alter_partition_reassignments", 0),
    46: ("topics", "list_partition_reassignments", 0),
    47: ("offsets", "offset_delete", None),
    48: ("configs", "describe_client_quotas", 1),
    49: ("configs", "alter_client_quotas", 1),
    50: ("security", "describe_user_scram_credentials", 0),
    51: ("security", "alter_user_scram_credentials", 0),
    55: ("cluster", "describe_quorum", 0),
    57: ("cluster", "update_features", 0),
    60: ("cluster", "describe_cluster", 0),
    61: ("transactions", "describe_producers", 0),
    64: ("cluster", "unregister_broker", 0),
    65: ("transactions", "describe_transactions", 0),
    66: ("transactions", "list_transactions", 0),
    68: ("groups", "consumer_group_heartbeat", 0),
    69: ("groups", "consumer_group_describe", 0),
    74: ("configs", "list_config_resources", 0),
    75: ("cluster", "describe_topic_partitions", 0),
    20000: ("transactions", "describe_transaction_events", 0),  # semel's own
}

FIRST_OWN_KEY = 20000  # from here on: APIs that Kafka does not have
FLEXIBLE_FROM: dict[int, int] = {key: first for key, (_, _, first) in APIS.items() if first is not None}
# Kafka's names, such as AddPartitionsToTxn
NAMES: dict[int, str] = {key: name.title().replace("_", "") for key, (_, name, _) in APIS.items()}


@cache
def api_of(key: int) -> Api[Any, Any]:
    if key not in APIS:
        raise UnsupportedVersionError(f"there is no API with key {key}")
    module, name, _ = APIS[key]
    api: Api[Any, Any] = getattr(import_module(f"semel.protocol.messages.{module}"), name.upper())
    return api
