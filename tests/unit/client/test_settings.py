"""Options by Kafka's names: read, converted, refused with the nearest name."""

from __future__ import annotations

import pickle

import pytest

from semel.client.errors import ConfigError
from semel.client.settings import ClientSettings, ConsumerSettings, ProducerSettings, parse_address

BOOT = {"bootstrap.servers": "a:1,b:2"}


def test_dotted_names_keywords_and_aliases_are_the_same_options() -> None:
    dotted = ProducerSettings.of({**BOOT, "linger.ms": "7", "enable.idempotence": "true", "sasl.mechanisms": "PLAIN"})
    keywords = ProducerSettings.of(
        bootstrap_servers=["a:1", "b:2"], linger_ms=7, enable_idempotence=True, sasl_mechanism="PLAIN"
    )
    assert dotted == keywords
    assert dotted.bootstrap_servers == ("a:1", "b:2")
    assert ProducerSettings.of(BOOT, linger_ms=9).linger_ms == 9


def test_settings_survive_pickling_and_hide_passwords() -> None:
    settings = ClientSettings.of(
        {**BOOT, "security.protocol": "SASL_SSL", "sasl.username": "u", "sasl.password": "secret"}
    )
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "bootstrap.servers is missing"),
        ({"bootstrap.servers": ""}, "empty"),
        ({"bootstrap.servers": "host"}, "expected host:port"),
        ({"bootstrap.servers": "host:99999"}, "expected host:port"),
        ({**BOOT, "lingr.ms": 5}, "did you mean 'linger.ms'"),
        ({**BOOT, "zzzzz": 5}, "no option 'zzzzz'"),
        ({**BOOT, "linger.ms": "soon"}, "linger.ms is 'soon'; expected float"),
        ({**BOOT, "batch.size": 1.5}, "batch.size is 1.5; expected int"),
        ({**BOOT, "batch.size": 0}, "at least 1"),
        ({**BOOT, "request.timeout.ms": 0}, "positive"),
        ({**BOOT, "acks": "2"}, "one of all, -1, 0, 1"),
        ({**BOOT, "compression.type": "brotli"}, "one of none, gzip"),
        ({**BOOT, "security.protocol": "TLS"}, "one of PLAINTEXT"),
        ({**BOOT, "security.protocol": "SASL_SSL"}, "needs sasl.username and sasl.password"),
        ({**BOOT, "enable.idempotence": True, "acks": 1}, "needs acks=all"),
        ({**BOOT, "enable.idempotence": "maybe"}, "expected bool"),
        ({**BOOT, "transactional.id": ""}, "transactional.id is empty"),
        ({**BOOT, "transactional.id": "t", "acks": 1}, "transactional.id needs acks=all"),
        ({**BOOT, "transactional.id": "t", "enable.idempotence": False}, "needs enable.idempotence=true"),
        ({**BOOT, "enable.idempotence": True, "max.in.flight": 6}, "at most 5"),
        ({**BOOT, "linger.ms": 200_000}, "shorter than linger.ms"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ProducerSettings.of(options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:9092", ("localhost", 9092)),
        ("[::1]:9092", ("::1", 9092)),
        ("PLAINTEXT://broker.example:1", ("broker.example", 1)),
        (" 10.0.0.1:65535 ", ("10.0.0.1", 65535)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


def test_idempotence_is_on_unless_acks_rule_it_out() -> None:
    assert ProducerSettings.of(BOOT).is_idempotent
    assert not ProducerSettings.of(BOOT, acks=1).is_idempotent
    assert not ProducerSettings.of(BOOT, acks=0).is_idempotent
    assert not ProducerSettings.of(BOOT, enable_idempotence=False).is_idempotent


def test_the_java_clients_forms_of_security_options_are_understood() -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule required"
    settings = ClientSettings.of(
        {
            **BOOT,
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.jaas.config": f'{module} username="al" password="a\\"b;c";',
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": "/ca.pem",
        }
    )
    assert (settings.sasl_username, settings.sasl_password, settings.ssl_ca_location) == ("al", 'a"b;c', "/ca.pem")
    for text, password in {
        "username='al' password='b\"c;d' other=\"x\"": 'b"c;d',
        "username=al password = se-cret_1.2$": "se-cret_1.2$",
        "password=\"username='eve'\" username=al": "username='eve'",
        "username='al' password=''": "",
    }.items():
        quoted = ClientSettings.of({**BOOT, "sasl.jaas.config": f"{module} {text};"})
        assert (quoted.sasl_username, quoted.sasl_password) == ("al", password), "as Java's clients read it"
    with pytest.raises(ConfigError, match="export it as PEM"):
        ClientSettings.of({**BOOT, "ssl.truststore.location": "/store.jks"})
    with pytest.raises(ConfigError, match=r"sasl\.jaas\.config"):
        ClientSettings.of({**BOOT, "sasl.jaas.config": "com.sun.Krb5LoginModule required;"})


@pytest.mark.parametrize("kind", [ClientSettings, ConsumerSettings, ProducerSettings])
def test_no_duration_is_negative_or_nan(kind: type[ClientSettings]) -> None:
    names = [name for name in kind.__dataclass_fields__ if name.endswith("_ms")]
    assert len(names) > 5
    for name in names:
        with pytest.raises(ConfigError, match=name.replace("_", r"\.")):
            kind.of(bootstrap_servers="a:1", **{name: -1})
    with pytest.raises(ConfigError, match=r"linger\.ms is nan"):
        ProducerSettings.of(bootstrap_servers="a:1", linger_ms=float("nan"))
