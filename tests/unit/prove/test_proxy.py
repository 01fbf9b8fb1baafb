"""The proxy does to a frame what its rule says, once, and nothing to others."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from semel.client.errors import KafkaError
from semel.client.producer import Producer as OurProducer
from semel.prove.checker.check import Expectation, check
from semel.prove.checker.reading import create_topics
from semel.prove.proxy import Effect, Proxy, Rule
from tests.support.broker import Cluster
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy(cluster.bootstrap) as proxy:
        yield proxy


def test_foreign_client_works_through_it_and_stays_behind_it(cluster: Cluster, proxy: Proxy) -> None:
    topic = cluster.unique("proxied")
    create_topics(proxy.bootstrap, {topic: 1})
    producer = Producer({"bootstrap.servers": proxy.bootstrap})
    producer.produce(topic, b"1")
    assert producer.flush(PATIENCE_S) == 0
    brokers = AdminClient({"bootstrap.servers": proxy.bootstrap}).list_topics(timeout=PATIENCE_S).brokers
    assert {f"{broker.host}:{broker.port}" for broker in brokers.values()} == {proxy.bootstrap}
    assert proxy.cut_all() > 0


CASES = [("semel", effect) for effect in Effect if effect is not Effect.PASS]
CASES += [("apache_kafka", effect) for effect in (Effect.DROP_RESPONSE, Effect.DUPLICATE_REQUEST)]


@pytest.mark.parametrize("api", ["Produce", "EndTxn", "InitProducerId"])
@pytest.mark.parametrize(
    ("cluster", "effect"),
    [
        pytest.param(*case, marks=[pytest.mark.kafka] * (case[0] == "apache_kafka"), id=f"{case[0]}-{case[1].name}")
        for case in CASES
    ],
    indirect=["cluster"],
)
def test_transaction_survives(cluster: Cluster, proxy: Proxy, api: str, effect: Effect) -> None:
    topic = cluster.unique("disturbed")
    create_topics(cluster.bootstrap, {topic: 1})
    rule = proxy.add(Rule(api, effect, delay_ms=200))
    other = proxy.add(Rule(api, effect, client="somebody else"))
    producer = OurProducer(
        bootstrap_servers=proxy.bootstrap,
        transactional_id=topic,
        request_timeout_ms=5_000,  # the response that is withheld comes earlier, also on a busy machine
        retry_backoff_ms=20,
        delivery_timeout_ms=20_000,
    )
    try:
        producer.init_transactions(timeout_ms=PATIENCE_S * 1000)
        producer.begin_transaction()
        producer.send(topic, b"1")
        producer.commit_transaction(timeout_ms=PATIENCE_S * 1000)
    except KafkaError as error:
        pytest.fail(f"{api} {effect.value}: {error}")
    finally:
        producer.close(timeout_ms=5000)
    assert rule.fired.is_set(), "the fault was not exercised"
    assert not other.fired.is_set()
    assert check(Expectation((topic,), ids={"1": 1}), cluster.bootstrap).violations == []


def test_delay_takes_as_long_as_it_says(cluster: Cluster, proxy: Proxy) -> None:
    rule = proxy.add(Rule("Metadata", Effect.DELAY_RESPONSE, delay_ms=600))
    began_s = time.monotonic()
    AdminClient({"bootstrap.servers": proxy.bootstrap}).list_topics(timeout=PATIENCE_S)
    assert rule.fired.is_set()
    assert time.monotonic() - began_s >= 0.6


def test_rule_for_an_api_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no API 'EndTx'"):
        Rule("EndTx", Effect.PASS)
