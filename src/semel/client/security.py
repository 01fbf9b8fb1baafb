"""TLS and SASL as a client. The SASL exchanges are generators of bytes, so that they can be tested without a socket."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import ssl
from collections.abc import Generator

from semel.client.errors import AuthenticationError, ConfigError
from semel.client.settings import ClientSettings

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
    server_first = (yield f"n,,{first_bare}".encode()).decode()

    fields = _fields(server_first)
    salt, iterations = _challenge(fields, nonce)
    final_bare = f"c=biws,r={fields['r']}"
    signed = f"{first_bare},{server_first},{final_bare}".encode()

    salted = hashlib.pbkdf2_hmac(digest, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", digest)
    signature = hmac.digest(hashlib.new(digest, client_key).digest(), signed, digest)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    server_final = yield f"{final_bare},p={base64.b64encode(proof).decode()}".encode()

    verdict = _fields(server_final.decode())
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


def _fields(message: str) -> dict[str, str]:
    return {part[0]: part[2:] for part in message.split(",") if part[1:2] == "="}


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise AuthenticationError(f"SCRAM: the server sent {text!r}, which is not base64") from None
