"""SASL exchanges against the vectors of their RFCs, and servers that lie."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from semel.client.errors import AuthenticationError, ConfigError
from semel.client.handshake import Exchange, plain, scram, tls_context
from semel.client.settings import ClientSettings


def finish(exchange: Exchange, message: bytes) -> None:
    with pytest.raises(StopIteration):
        exchange.send(message)


def test_plain_is_one_message() -> None:
    exchange = plain("user", "pass")
    assert next(exchange) == b"\0user\0pass"
    finish(exchange, b"")
    with pytest.raises(ConfigError):
        next(plain("a\0b", "x"))


def test_scram_sha_256_as_in_rfc_7677() -> None:
    exchange = scram("SHA-256", "user", "pencil", nonce="rOprNGfwEbeRWgbNEkqO")
    assert next(exchange) == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    final = exchange.send(f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode())
    assert final == f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    finish(exchange, b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


def server_of(exchange: Exchange, user: str, password: str, iterations: int = 4096) -> bytes:
    """Plays an honest server with SHA-512; the last message that it sends."""
    first = next(exchange).decode()
    bare = first.removeprefix("n,,")
    nonce = bare.split("r=")[1] + "server"
    server_first = f"r={nonce},s={base64.b64encode(b'salt').decode()},i={iterations}"
    final = exchange.send(server_first.encode()).decode()
    without_proof, proof = final.rsplit(",p=", 1)
    salted = hashlib.pbkdf2_hmac("sha512", password.encode(), b"salt", iterations)
    stored = hashlib.sha512(hmac.digest(salted, b"Client Key", "sha512")).digest()
    signed = f"{bare},{server_first},{without_proof}".encode()
    signature = hmac.digest(stored, signed, "sha512")
    key = bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True))
    assert hashlib.sha512(key).digest() == stored, "the client's proof is wrong"
    assert bare.startswith(f"n={user}")
    return b"v=" + base64.b64encode(hmac.digest(hmac.digest(salted, b"Server Key", "sha512"), signed, "sha512"))


def test_scram_sha_512_with_a_name_that_needs_escaping() -> None:
    exchange = scram("SHA-512", "a=b,c", "päss")
    finish(exchange, server_of(exchange, "a=3Db=2Cc", "päss"))


def test_a_server_that_does_not_know_the_password_is_found_out() -> None:
    exchange = scram("SHA-512", "user", "right")
    verdict = server_of(exchange, "user", "right")
    wrong = bytearray(base64.b64decode(verdict[2:]))
    wrong[0] ^= 1
    with pytest.raises(AuthenticationError, match="does not know the password"):
        exchange.send(b"v=" + base64.b64encode(wrong))


@pytest.mark.parametrize(
    ("challenge", "message"),
    [
        ("r=other,s=c2FsdA==,i=4096", "nonce"),
        ("r=mine,s=c2FsdA==,i=4096", "nonce"),
        ("r=mineX,s=c2FsdA==,i=1000", "1000 iterations"),
        ("r=mineX,s=c2FsdA==,i=99999999999", "iterations"),
        ("r=mineX,s=c2FsdA==", "no iteration count"),
        ("r=mineX,s=!!!,i=4096", "not base64"),
        ("e=unknown-user", "unknown-user"),
        ("r=\udcff", "not text"),
    ],
)
def test_a_wrong_challenge_is_refused(challenge: str, message: str) -> None:
    exchange = scram("SHA-256", "user", "pass", nonce="mine")
    next(exchange)
    with pytest.raises(AuthenticationError, match=message):
        exchange.send(challenge.encode(errors="surrogateescape"))


def test_certificates_that_cannot_be_read_are_named() -> None:
    settings = ClientSettings.of({"bootstrap.servers": "a:1", "ssl.ca.location": "/no/such/file.pem"})
    with pytest.raises(ConfigError, match=r"ssl\.ca\.location='/no/such/file\.pem'"):
        tls_context(settings)
    settings = ClientSettings.of({"bootstrap.servers": "a:1", "ssl.certificate.location": "/no/such/cert.pem"})
    with pytest.raises(ConfigError, match=r"ssl\.certificate\.location"):
        tls_context(settings)
