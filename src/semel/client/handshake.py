"""What is said first on a connection, and what its failures mean. No I/O: a driver sends the requests of `opening`."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Generator
from os import strerror
from socket import gaierror
from typing import Any, NamedTuple, Protocol

from semel.client.errors import (
    AuthenticationError,
    ConnectionFailedError,
    KafkaError,
    RequestTimedOutError,
    UnsupportedByBrokerError,
    error_of,
)
from semel.client.security import sasl_exchange
from semel.client.settings import ClientSettings
from semel.client.wire import Capabilities, Pending, read_api_versions
from semel.protocol.api import Api
from semel.protocol.errors import DecodeError, EncodeError, ErrorCode
from semel.protocol.messages import security as messages
from semel.protocol.messages.cluster import API_VERSIONS, ApiVersionsRequest

CERTIFICATE_ALERTS = ("CERTIFICATE", "UNKNOWN_CA")  # parts of names such as SSLV3_ALERT_BAD_CERTIFICATE
SESSION_LIFETIME_USED = 0.85  # of a SASL session, then the connection is replaced
SOFTWARE = ("semel", "0.1.0")


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
