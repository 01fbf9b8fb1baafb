"""TLS and SASL as a client, against an Apache Kafka that asks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka.admin import AdminClient, ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from semel.aio import AsyncProducer
from semel.client.errors import AuthenticationError, KafkaError
from semel.client.producer import Producer
from semel.local.apache_kafka import ApacheKafka, quick_jvm
from semel.local.processes import free_ports
from tests.support.event_loop import in_loop
from tests.support.missing import skip_loudly
from tests.support.reading import read_topic
from tests.support.waiting import PATIENCE_S, eventually

USER, PASSWORD = "alice", "s3cret,with=signs"
MECHANISMS = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class Secured(NamedTuple):
    """Where an Apache Kafka listens, and the files that its clients need."""

    ports: dict[str, int]
    folder: Path

    def options(self, listener: str, **options: str) -> dict[str, str]:
        protocols = {"PLAINTEXT": "PLAINTEXT", "TLS": "SSL", "SASL": "SASL_PLAINTEXT", "BOTH": "SASL_SSL"}
        base = {
            "bootstrap.servers": f"localhost:{self.ports[listener]}",
            "security.protocol": protocols[listener],
            "max.block.ms": "60000",
        }
        if listener in ("TLS", "BOTH"):
            base["ssl.ca.location"] = str(self.folder / "ca.pem")
        if listener == "TLS":
            base["ssl.certificate.location"] = str(self.folder / "client.pem")
            base["ssl.key.location"] = str(self.folder / "client.key")
        if listener in ("SASL", "BOTH"):
            base |= {"sasl.username": USER, "sasl.password": PASSWORD}
        return base | {name.replace("_", "."): value for name, value in options.items()}


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)


def make_certificates(folder: Path) -> None:
    """An authority, and certificates of it for the broker (localhost) and for a client."""
    if shutil.which("openssl") is None:
        skip_loudly("there is no `openssl` to make certificates with")
    openssl(
        folder,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=ca",
    )
    (folder / "names.txt").write_text("subjectAltName=DNS:localhost")
    for name in ("broker", "client"):
        openssl(
            folder,
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        words = [
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
        ]
        openssl(folder, *words, "-days", "2", "-extfile", "names.txt")
    (folder / "keystore.pem").write_text((folder / "broker.key").read_text() + (folder / "broker.pem").read_text())


def broker_settings(folder: Path, ports: dict[str, int], plaintext: int, controller: int) -> dict[str, str]:
    plain = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
    scram = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    settings = {
        "listeners": ",".join(
            [f"PLAINTEXT://127.0.0.1:{plaintext}", f"CONTROLLER://127.0.0.1:{controller}"]
            + [f"{name}://localhost:{port}" for name, port in ports.items()]
        ),
        "advertised.listeners": ",".join(
            [f"PLAINTEXT://127.0.0.1:{plaintext}"] + [f"{name}://localhost:{port}" for name, port in ports.items()]
        ),
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,SASL:SASL_PLAINTEXT,BOTH:SASL_SSL"
        ),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "keystore.pem"),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / "ca.pem"),
        "listener.name.tls.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
    }
    for listener in ("sasl", "both"):
        settings[f"listener.name.{listener}.plain.sasl.jaas.config"] = plain
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            settings[f"listener.name.{listener}.{mechanism}.sasl.jaas.config"] = scram
    return settings


@pytest.fixture(scope="module")
def secured(kafka_installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    make_certificates(folder)
    kafka = ApacheKafka(folder / "node", jvm=quick_jvm())
    tls, sasl, both = free_ports(3)
    ports = {"TLS": tls, "SASL": sasl, "BOTH": both}
    kafka.properties |= broker_settings(folder, ports, kafka.port, kafka.controller_port)
    with kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            credential = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(USER, credential, PASSWORD.encode())
            for done in admin.alter_user_scram_credentials([change]).values():
                done.result(PATIENCE_S)
        yield Secured({**ports, "PLAINTEXT": kafka.port}, folder)


Write = Callable[[dict[str, str]], int]


@pytest.fixture(params=["blocking", "asyncio"])
def write_one(request: pytest.FixtureRequest) -> Write:
    """Writes a record and returns its offset, with either driver of the client."""

    def blocking(options: dict[str, str]) -> int:
        with Producer(options) as producer:
            return producer.send("secured", b"x").result(timeout_ms=PATIENCE_S * 1000).offset

    async def awaited(options: dict[str, str]) -> int:
        async with AsyncProducer(options) as producer:
            offset: int = (await (await producer.send("secured", b"x"))).offset
            return offset

    return blocking if request.param == "blocking" else lambda options: in_loop(awaited(options))


def test_tls_with_a_client_certificate(secured: Secured, write_one: Write) -> None:
    assert write_one(secured.options("TLS")) >= 0


@pytest.mark.parametrize("driver", ["blocking", "asyncio"])
def test_nothing_that_was_sent_without_acknowledgement_is_lost_at_close(secured: Secured, driver: str) -> None:
    """Below TLS, no event says when all is written."""
    topic, options = f"unacked-{driver}", secured.options("TLS", acks="0")
    value = os.urandom(10_000)

    async def send() -> None:
        async with AsyncProducer(options) as producer:
            for _ in range(500):
                await producer.send(topic, value)

    if driver == "asyncio":
        in_loop(send())
    else:
        with Producer(options) as producer:
            for _ in range(500):
                producer.send(topic, value)
    bootstrap = secured.options("PLAINTEXT")["bootstrap.servers"]
    eventually(lambda: len(read_topic(bootstrap, topic)), lambda found: found == 500)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("listener", ["SASL", "BOTH"])
def test_sasl_with_and_without_tls(secured: Secured, write_one: Write, listener: str, mechanism: str) -> None:
    options = secured.options(listener, sasl_mechanism=mechanism)
    assert write_one(options) >= 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_is_refused_at_once(secured: Secured, write_one: Write, mechanism: str) -> None:
    with pytest.raises(AuthenticationError, match=r"check sasl\.username and sasl\.password"):
        write_one(secured.options("SASL", sasl_mechanism=mechanism, sasl_password="wrong"))


def test_an_unknown_authority_is_refused_at_once(secured: Secured, write_one: Write) -> None:
    options = secured.options("BOTH")
    del options["ssl.ca.location"]
    with pytest.raises(AuthenticationError, match=r"certificate was refused.*ssl\.ca\.location"):
        write_one(options)


def test_a_certificate_for_another_host_is_refused(secured: Secured, write_one: Write) -> None:
    options = secured.options("BOTH", bootstrap_servers=f"127.0.0.1:{secured.ports['BOTH']}")
    with pytest.raises(AuthenticationError, match="host name"):
        write_one(options)


@pytest.mark.parametrize(
    ("listener", "changes", "message"),
    [
        ("TLS", {"security_protocol": "PLAINTEXT"}, r"security\.protocol"),
        ("BOTH", {"security_protocol": "SASL_PLAINTEXT"}, r"security\.protocol"),
        ("SASL", {"security_protocol": "PLAINTEXT"}, r"security\.protocol"),
        ("SASL", {"security_protocol": "SASL_SSL"}, r"does the port speak TLS"),
    ],
)
def test_a_wrong_protocol_is_explained_within_the_timeout(
    secured: Secured, write_one: Write, listener: str, changes: dict[str, str], message: str
) -> None:
    options = secured.options(listener, **changes, request_timeout_ms="2500", max_block_ms="4000")
    with pytest.raises(KafkaError, match=message):
        write_one(options)


def test_a_missing_client_certificate_is_explained(secured: Secured, write_one: Write) -> None:
    options = secured.options("TLS")
    del options["ssl.certificate.location"]
    del options["ssl.key.location"]
    with pytest.raises(AuthenticationError, match=r"refused the client's certificate.*ssl\.certificate\.location"):
        write_one(options)
