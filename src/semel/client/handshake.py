"""What is said first on a connection, and what its failures mean. No I/O: a driver sends the requests of `opening`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Callable, Generator, Iterable, Iterator
from os import strerror
from socket import gaierror
from typing import Any, NamedTuple, Protocol

from semel.client.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    KafkaError,
    RequestTimedOutError,
    UnsupportedByBrokerError,
    error_of,
)
from semel.client.settings import ClientSettings
from semel.client.timing import Deadline
from semel.client.wire import Capabilities, Pending, read_api_versions
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, EncodeError, ErrorCode
from semel.protocol.messages import security as messages
from semel.protocol.messages.cluster import API_VERSIONS, ApiVersionsRequest

# --- TLS and SASL. The SASL exchanges are generators of bytes, so that they can be tested without a socket ---


Exchange = Generator[bytes, bytes, None]  # yields what to send, is sent what came back

MIN_SCRAM_ITERATIONS = 4096
MAX_SCRAM_ITERATIONS = 10_000_000  # a hostile server must not keep this client busy for hours


def tls_context(settings: ClientSettings) -> ssl.SSLContext:
    """A context from the ssl.* options: the system's authorities unless ssl.ca.location names others."""
    try:
        context = ssl.create_default_context(cafile=settings.ssl_ca_location)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl.ca.location={settings.ssl_ca_location!r} cannot be read as PEM: {error}") from error
    if not settings.enable_ssl_certificate_verification:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif not settings.ssl_endpoint_identification_algorithm:
        context.check_hostname = False
    if settings.ssl_certificate_location:
        try:
            context.load_cert_chain(
                settings.ssl_certificate_location, settings.ssl_key_location, settings.ssl_key_password
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"ssl.certificate.location={settings.ssl_certificate_location!r} with "
                f"ssl.key.location={settings.ssl_key_location!r} cannot be used: {error}"
            ) from error
    return context


def sasl_exchange(settings: ClientSettings) -> Exchange:
    user, password = settings.sasl_username or "", settings.sasl_password or ""
    if settings.sasl_mechanism == "PLAIN":
        return plain(user, password)
    return scram(settings.sasl_mechanism.removeprefix("SCRAM-"), user, password)


def plain(user: str, password: str) -> Exchange:
    """RFC 4616."""
    if "\0" in user + password:
        raise ConfigError("sasl.username and sasl.password must not hold a NUL character")
    yield f"\0{user}\0{password}".encode()


def scram(hash_name: str, user: str, password: str, nonce: str | None = None) -> Exchange:
    """RFC 5802 without channel binding. Checks that the server has the password, too."""
    digest = hash_name.replace("-", "").lower()  # SHA-256 -> sha256
    nonce = nonce or secrets.token_urlsafe(24)
    first_bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
    server_first = _text((yield f"n,,{first_bare}".encode()))

    fields = _fields(server_first)
    salt, iterations = _challenge(fields, nonce)
    final_bare = f"c=biws,r={fields['r']}"
    signed = f"{first_bare},{server_first},{final_bare}".encode()

    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    server_final = yield f"{final_bare},p={base64.b64encode(proof).decode()}".encode()

    verdict = _fields(_text(server_final))
    if "e" in verdict:
        raise AuthenticationError(f"SCRAM: the broker refused: {verdict['e']}; check sasl.username and sasl.password")
    expected = hmac.digest(hmac.digest(salted, b"Server Key", digest), signed, digest)
    if not hmac.compare_digest(_decoded(verdict.get("v", "")), expected):
        raise AuthenticationError(
            "SCRAM: the server's signature is wrong, so it does not know the password; is this the right broker?"
        )


def _challenge(fields: dict[str, str], nonce: str) -> tuple[bytes, int]:
    if "e" in fields:
        raise AuthenticationError(f"SCRAM: the broker refused: {fields['e']}; check sasl.username and sasl.password")
    if not fields.get("r", "").startswith(nonce) or fields["r"] == nonce:
        raise AuthenticationError("SCRAM: the server's nonce does not extend the client's; is this the right broker?")
    try:
        iterations = int(fields["i"])
    except (KeyError, ValueError):
        raise AuthenticationError("SCRAM: the server's challenge has no iteration count") from None
    if not MIN_SCRAM_ITERATIONS <= iterations <= MAX_SCRAM_ITERATIONS:
        raise AuthenticationError(
            f"SCRAM: the server wants {iterations} iterations; expected {MIN_SCRAM_ITERATIONS} "
            f"to {MAX_SCRAM_ITERATIONS}"
        )
    return _decoded(fields.get("s", "")), iterations


def _text(message: bytes) -> str:
    try:
        return bytes(message).decode()
    except UnicodeDecodeError:
        raise AuthenticationError(f"SCRAM: the server sent {bytes(message)!r:.100}, which is not text") from None


def _fields(message: str) -> dict[str, str]:
    return {part[0]: part[2:] for part in message.split(",") if part[1:2] == "="}


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise AuthenticationError(f"SCRAM: the server sent {text!r}, which is not base64") from None


CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA")  # parts of names such as SSLV3_ALERT_BAD_CERTIFICATE
SESSION_LIFETIME_USED = 0.85  # of a SASL session, then the connection is replaced
SOFTWARE = ("semel", "0.1.0")
NEXT_ADDRESS_S = 1.0  # how long an address of a host that does not respond holds back the next one


class OpeningRequest(NamedTuple):
    api: Api[Any, Any]
    request: Any
    version: int


Opening = Generator[OpeningRequest, Pending, None]  # is sent each request when it is done


class NewConnection(Protocol):
    """What the opening fills in."""

    capabilities: Capabilities
    session_ends_s: float

    @property
    def address(self) -> str: ...


def opening(connection: NewConnection, settings: ClientSettings, now_s: Callable[[], float]) -> Opening:
    """Gets the broker's API versions and authenticates as the settings say."""
    yield from _negotiation(connection)
    if settings.uses_sasl:
        yield from _authentication(connection, settings, now_s)


def _negotiation(connection: NewConnection) -> Opening:
    version = API_VERSIONS.request.valid.high
    while True:
        pending = yield OpeningRequest(API_VERSIONS, ApiVersionsRequest(*SOFTWARE), version)
        if pending.error is not None:
            raise pending.error
        assert pending.frame is not None
        try:
            response, version = read_api_versions(pending.frame, version)
        except DecodeError as error:
            raise failed(
                connection.address, f"the response to ApiVersions is malformed ({error}); is this a Kafka broker?"
            ) from None
        if response is not None:
            connection.capabilities = Capabilities(response)
            return


def _authentication(connection: NewConnection, settings: ClientSettings, now_s: Callable[[], float]) -> Opening:
    mechanism = settings.sasl_mechanism
    handshake = messages.SASL_HANDSHAKE
    version = connection.capabilities.version_of(handshake)
    offered = (yield OpeningRequest(handshake, messages.SaslHandshakeRequest(mechanism), version)).result()
    if offered.error_code:
        raise AuthenticationError(
            f"{connection.address} refused sasl.mechanism={mechanism}; "
            f"it offers: {', '.join(offered.mechanisms) or 'none'}",
            ErrorCode.of(offered.error_code),
        )
    exchange = sasl_exchange(settings)
    message = next(exchange)
    version = connection.capabilities.version_of(messages.SASL_AUTHENTICATE)
    while True:
        request = messages.SaslAuthenticateRequest(message)
        response = (yield OpeningRequest(messages.SASL_AUTHENTICATE, request, version)).result()
        if response.error_code:
            raise error_of(response.error_code, f"authenticating at {connection.address}", response.error_message)
        try:
            message = exchange.send(response.auth_bytes)
        except StopIteration:
            break
    if response.session_lifetime_ms > 0:
        connection.session_ends_s = now_s() + SESSION_LIFETIME_USED * response.session_lifetime_ms / 1000


# --- the addresses of a host ---
Address = tuple[int, int, int, str, Any]  # as getaddrinfo returns it


def attempts(found: Iterable[Address], deadline: Deadline) -> Iterator[tuple[Address, float]]:
    """The addresses of a host one after the other, each with the seconds that connecting to it may take: one that does
    not respond leaves time for the others."""
    addresses = list(found)
    for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
        share_s = deadline.remaining_s() / left
        yield address, max(0.001, share_s if left == 1 else min(share_s, NEXT_ADDRESS_S))


# --- failures ---
def failed(address: str, cause: str) -> ConnectionFailedError:
    return ConnectionFailedError(f"connection to {address}: {cause}", ErrorCode.NETWORK_EXCEPTION)


def copied(error: KafkaError) -> KafkaError:
    """Each request gets an exception of its own, so that tracebacks do not pile up on a shared one."""
    copy = type(error)(str(error), error.code)
    if isinstance(copy, ConnectionFailedError):
        copy.maybe_sent = True
    return copy


def closed_by_broker(settings: ClientSettings, is_open: bool) -> str:
    """Why, as far as one can tell, before and after the opening."""
    if not is_open:
        return (
            "the other side closed the connection during the handshake; does the port speak "
            f"{settings.security_protocol}? check security.protocol, host and port"
        )
    hint = "" if settings.uses_sasl else " (a broker that wants SASL does this, too: see security.protocol)"
    return f"the broker closed the connection{hint}"


def timed_out(address: str, late: Pending, why: str) -> RequestTimedOutError:
    return RequestTimedOutError(
        f"{address} did not respond to {late.api.name} within its timeout; {why}",
        ErrorCode.REQUEST_TIMED_OUT,
        maybe_sent=True,
    )


def not_encodable(api_name: str, address: str, error: EncodeError) -> UnsupportedByBrokerError:
    return UnsupportedByBrokerError(
        f"{api_name} was not sent to {address}: {error}; a value is of the wrong type or out of range, or this broker "
        "is too old for it",
        ErrorCode.UNSUPPORTED_VERSION,
    )


def not_connected(error: OSError | UnicodeError, address: str, timeout_s: float) -> ConnectionFailedError:
    """Why TCP could not connect. UnicodeError: what no host name can be, such as `a..b`."""
    if isinstance(error, gaierror | UnicodeError):
        unknown = (error.strerror if isinstance(error, gaierror) else None) or error
        cause = f"cannot find {address}: {unknown}; check the host name"
    elif isinstance(error, TimeoutError):
        cause = f"cannot connect to {address} within {timeout_s:.3g} s; check host, port and firewall"
    else:
        why = strerror(error.errno) if error.errno else error  # asyncio has a text of its own
        cause = f"cannot connect to {address}: {why}; is a broker running there?"
    return ConnectionFailedError(cause, ErrorCode.NETWORK_EXCEPTION)


def not_encrypted(error: OSError, address: str) -> KafkaError:
    """Why there is no TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"TLS to {address}: the certificate was refused: {error.verify_message}; "
            "check ssl.ca.location and the host name"
        )
    if isinstance(error, TimeoutError):
        return ConnectionFailedError(
            f"TLS to {address}: no response to the handshake; does the port speak TLS? check security.protocol"
        )
    return refused_certificate(error, address) or ConnectionFailedError(
        f"TLS to {address}: {error}; does the port speak TLS, and does it want a client certificate? "
        "check security.protocol, ssl.certificate.location and ssl.key.location"
    )


def refused_certificate(error: OSError, address: str) -> AuthenticationError | None:
    """The broker's TLS alert about the client's certificate; trying again would not change its mind. None if the
    error is another one."""
    reason = getattr(error, "reason", None) or ""
    if "ALERT" not in reason or not any(word in reason for word in CERTIFICATE_ALERTS):
        return None
    return AuthenticationError(
        f"TLS to {address}: the broker refused the client's certificate or got none ({reason}); "
        "check ssl.certificate.location and ssl.key.location"
    )
