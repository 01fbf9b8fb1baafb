"""The same random requests, seeded, to Apache Kafka and to semel: the same codes, the same states, the same records.

A failing run prints its seed and the whole sequence. Where semel answers differently on purpose, it is listed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.broker import SemelBroker
from tests.support.differential import Player, Script, Step
from tests.support.kafka import ApacheKafka

pytestmark = pytest.mark.kafka

STEPS = 60
SCAN = {"transaction.abort.timed.out.transaction.cleanup.interval.ms": "50"}
_runs = count(1)


def is_intended(step: Step, kafka: Any, semel: Any) -> bool:
    """Differences that are wanted. Each leaves both brokers in the same state."""
    return False


@pytest.fixture(scope="module")
def kafka(kafka_installation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    with ApacheKafka(tmp_path_factory.mktemp("kafka") / "node", properties=SCAN) as node:
        yield node


@pytest.fixture(scope="module")
def semel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemelBroker]:
    options = [word for name, value in SCAN.items() for word in ("--set", f"{name}={value}")]
    with SemelBroker(tmp_path_factory.mktemp("semel") / "broker", "--fsync", "os", *options) as broker:
        yield broker


def play(seed: int, kafka: ApacheKafka, semel: SemelBroker, steps: int = STEPS) -> None:
    run = f"s{seed}-{next(_runs)}"
    players = [Player(kafka.bootstrap, run), Player(semel.bootstrap, run)]
    script = Script(seed, players[0])
    story: list[str] = []
    for _ in range(steps):
        id_, step = script.next()
        answers = [step.on(player) for player in players]
        states = [player.state(id_) for player in players]
        story.append(f"{step.name}{step.arguments}\n    kafka {answers[0]}\n    semel {answers[1]}\n    {states[0]}")
        text = "\n".join(story)
        assert answers[0] == answers[1] or is_intended(step, *answers), f"seed {seed}: answers differ\n{text}"
        assert states[0] == states[1], f"seed {seed}: states differ, semel has {states[1]}\n{text}"
    seen = [player.visible() for player in players]
    text = "\n".join([*story, f"kafka {seen[0]}", f"semel {seen[1]}"])
    assert seen[0] == seen[1], f"seed {seed}: readers see different things\n{text}"


@pytest.mark.parametrize("seed", range(12))
def test_semel_answers_as_kafka_does(seed: int, kafka: ApacheKafka, semel: SemelBroker):
    play(seed, kafka, semel)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_semel_answers_as_kafka_does_over_many_seeds(seed: int, kafka: ApacheKafka, semel: SemelBroker):
    play(seed, kafka, semel)
