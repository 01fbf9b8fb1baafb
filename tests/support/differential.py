"""Random sequences of requests, sent to two brokers in lockstep: what each answered, in words that both share.

Producer ids differ from broker to broker, so a player knows the ids that it was given by number: the first, the second.
Everything else that is random comes from the seed and is the same on both sides.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.peers.raw_client import NOT_READY, Owner, RawClient, eventually
from semel.protocol.errors import ErrorCode

TopicPartition = tuple[str, int]
UNKNOWN_TOPIC = "no-such-topic"


class Who(NamedTuple):
    """A producer as the player remembers it; `id_number` counts the producer ids that this player has seen."""

    id_number: int
    epoch: int


@dataclass
class Player:
    """One broker's side of a sequence."""

    bootstrap: str
    run: str  # a name that no other run on this broker has
    partitions: list[TopicPartition] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # producer ids in the order of their first appearance
    owners: dict[str, list[Who]] = field(default_factory=dict)  # every owner that an id was given, in order
    sequences: dict[tuple[int, int, TopicPartition], int] = field(default_factory=dict)
    last_batch: dict[tuple[int, int, TopicPartition], tuple[int, list[bytes]]] = field(default_factory=dict)
    states: dict[str, tuple[str, Who]] = field(default_factory=dict)  # what `state` last saw

    def __post_init__(self) -> None:
        self.client = RawClient(self.bootstrap)
        self.topic, self.source, self.group = (f"{self.run}-{name}" for name in ("out", "in", "group"))
        self.client.create_topic(self.topic, 2)
        self.client.create_topic(self.source, 1)
        self.partitions = [(self.topic, 0), (self.topic, 1)]
        for name in ("a", "b"):
            self.client.ready(f"{self.run}-{name}", self.group)

    # --- who is who ---

    def number_of(self, producer_id: int) -> int:
        if producer_id < 0:
            return producer_id
        if producer_id not in self.ids:
            self.ids.append(producer_id)
        return self.ids.index(producer_id)

    def wire(self, who: Who) -> tuple[int, int]:
        """As the broker knows a producer; numbers that were never given stand for an id that nobody has."""
        known = 0 <= who.id_number < len(self.ids)
        return self.ids[who.id_number] if known else 900_000_000, who.epoch

    def learn(self, id_: str, producer_id: int, epoch: int) -> None:
        who = Who(self.number_of(producer_id), epoch)
        known = self.owners.setdefault(id_, [])
        if not known or known[-1] != who:
            known.append(who)

    # --- what is done, and what was answered ---

    def own(self, id_: str, **options: Any) -> Owner:
        """InitProducerId, once the coordinator has loaded its journal."""
        return eventually(lambda: self.client.init(id_, **options), done=lambda answer: answer.error not in NOT_READY)

    def init(self, id_: str, version: int, expected: Who | None, timeout_ms: int) -> Any:
        wire = self.wire(expected) if expected else (-1, -1)
        answer = self.own(id_, timeout_ms=timeout_ms, expected=wire, version=version)
        if answer.error is ErrorCode.NONE:
            self.learn(id_, answer.producer_id, answer.epoch)
        return answer.error.name, self.number_of(answer.producer_id), answer.epoch

    def add(self, id_: str, who: Who, partitions: list[int], unknown: bool, version: int) -> Any:
        wanted = [self.partitions[n] for n in partitions] + ([(UNKNOWN_TOPIC, 0)] if unknown else [])
        answer = self.client.add_partitions(id_, *self.wire(who), wanted, version)
        return sorted((name.removeprefix(self.run), index, code.name) for (name, index), code in answer.items())

    def produce(
        self, id_: str, who: Who, partition: int, sequence: str, count: int, version: int, transactional: bool, tag: str
    ) -> Any:
        place = self.partitions[partition]
        key = (*who, place)
        first, values = self.sequences.get(key, 0), [f"{tag}-{n}".encode() for n in range(count)]
        if sequence == "repeat" and key in self.last_batch:
            first, values = self.last_batch[key]
        elif sequence == "gap":
            first += 3
        answer = self._produce(id_, who, place, values, first, version, transactional)
        if answer.error is ErrorCode.NONE:
            self.sequences[key] = first + len(values)
            self.last_batch[key] = (first, values)
        return answer.error.name, answer.offset

    def _produce(
        self, id_: str, who: Who, place: TopicPartition, values: list[bytes], first: int, version: int, is_txn: bool
    ) -> Any:
        """Kafka answers NOT_ENOUGH_REPLICAS while it verifies, which is a moment in time and no answer."""
        return eventually(
            lambda: self.client.produce(
                id_ if is_txn else None,
                *self.wire(who),
                place,
                values,
                sequence=first,
                transactional=is_txn,
                version=version,
            ),
            done=lambda answer: answer.error is not ErrorCode.NOT_ENOUGH_REPLICAS,
        )

    def add_offsets(self, id_: str, who: Who, version: int) -> Any:
        return self.client.add_offsets(id_, *self.wire(who), self.group, version).name

    def offsets(self, id_: str, who: Who, offset: int, unknown: bool, member: Any, version: int) -> Any:
        offsets = {(self.source, 0): offset} | ({(UNKNOWN_TOPIC, 0): 1} if unknown else {})
        answer = self.client.commit_offsets(
            id_, *self.wire(who), self.group, offsets, version=version, member=tuple(member)
        )
        return sorted((name.removeprefix(self.run), index, code.name) for (name, index), code in answer.items())

    def end(self, id_: str, who: Who, commit: bool, version: int) -> Any:
        answer = self.client.end(id_, *self.wire(who), commit=commit, version=version)
        if version < 5:
            return answer.error.name
        if answer.error is ErrorCode.NONE:
            self.learn(id_, answer.producer_id, answer.epoch)
        return answer.error.name, self.number_of(answer.producer_id), answer.epoch

    def time_out(self, id_: str) -> Any:
        """Lets a transaction of this id run into its timeout, then its producer tries to commit and to recover."""
        if self.states.get(id_, ("", None))[0] == "Ongoing":
            return "not now"
        first = self.own(id_, timeout_ms=1)
        who = (first.producer_id, first.epoch)
        added = self.client.add_partitions(id_, *who, [self.partitions[0]])
        eventually(lambda: self.client.describe(id_), done=lambda txn: txn.transaction_state != "Ongoing")
        self.client.settled(id_)
        ended = [self.client.end(id_, *who, commit=commit, version=5).error.name for commit in (True, False)]
        again = self.client.init(id_, expected=who)
        self.learn(id_, again.producer_id, again.epoch)
        codes = [first.error.name, *(code.name for code in added.values()), *ended, again.error.name]
        return codes, self.number_of(again.producer_id), first.epoch, again.epoch

    # --- what can be seen ---

    def state(self, id_: str) -> Any:
        """The id as an operator sees it, when no markers are on their way."""
        txn = self.client.settled(id_)
        if txn.error_code:
            return ErrorCode.of(txn.error_code).name
        self.states[id_] = (txn.transaction_state, Who(self.number_of(txn.producer_id), txn.producer_epoch))
        topics = sorted(
            (topic.topic.removeprefix(self.run), sorted(topic.partitions))
            for topic in txn.topics
            if not topic.topic.startswith("__")
        )
        offsets = any(topic.topic.startswith("__") for topic in txn.topics)
        timeout_ms = txn.transaction_timeout_ms
        return txn.transaction_state, self.number_of(txn.producer_id), txn.producer_epoch, timeout_ms, topics, offsets

    def visible(self) -> Any:
        """Every record and position, as readers of both isolation levels see them."""
        seen = []
        for partition in self.partitions:
            for committed in (True, False):
                fetched = self.client.fetch(partition, committed=committed)
                controls = [(self.number_of(pid), epoch, key) for pid, epoch, key in fetched.control_batches]
                seen.append((fetched.error.name, fetched.values, fetched.last_stable_offset, controls))
        code, offset = self.client.committed(self.group, (self.source, 0))
        return seen, code.name, offset, self.client.committed(self.group, (self.source, 0), stable=False)[1]


class Step(NamedTuple):
    """One request of a sequence, the same for every player."""

    name: str
    arguments: tuple[Any, ...]

    def on(self, player: Player) -> Any:
        return getattr(player, self.name)(*self.arguments)


class Script:
    """Chooses the next step from a seed and from what has happened so far (which is the same on both sides)."""

    def __init__(self, seed: int, player: Player) -> None:
        self._random = random.Random(seed)
        self._player = player
        self._count = 0
        self._ids = [f"{player.run}-{name}" for name in ("a", "b")]

    def next(self) -> tuple[str, Step]:
        self._count += 1
        id_ = self._random.choice(self._ids)
        if id_ not in self._player.owners and self._random.random() < 0.8:
            return id_, self._init(id_)
        choices: list[tuple[int, Callable[[str], Step]]] = [
            (3, self._init),
            (6, self._add),
            (10, self._produce),
            (3, self._add_offsets),
            (4, self._offsets),
            (9, self._end),
            (1, lambda id_: Step("time_out", (id_,))),
        ]
        make = self._random.choices([make for _, make in choices], [weight for weight, _ in choices])[0]
        return id_, make(id_)

    def _who(self, id_: str, *, future: bool = True) -> Who:
        known = self._player.owners.get(id_) or [Who(99, 0)]
        current = known[-1]
        weights = [14, 2, 1, 1 if future else 0, 1]
        kind = self._random.choices(["current", "former", "stale", "future", "foreign"], weights)[0]
        return {
            "current": current,
            "former": known[max(len(known) - 2, 0)],
            "stale": current._replace(epoch=max(current.epoch - 1, 0)),
            "future": current._replace(epoch=current.epoch + 1),
            "foreign": Who(99, current.epoch),
        }[kind]

    def _init(self, id_: str) -> Step:
        version = self._random.randint(0, 5)
        expected = self._who(id_) if version >= 3 and self._random.random() < 0.6 else None
        state, owner = self._player.states.get(id_, ("", None))
        if expected and state == "Ongoing" and expected != owner:
            expected = None  # intended difference, with a test of its own: a zombie meets its new owner's transaction
        timeout_ms = self._random.choice([60_000, 60_000, 60_000, 30_000, 0, 900_001])
        return Step("init", (id_, version, expected, timeout_ms))

    def _add(self, id_: str) -> Step:
        partitions = self._random.choice([[0], [1], [0, 1]])
        return Step("add", (id_, self._who(id_), partitions, self._random.random() < 0.1, self._random.randint(0, 3)))

    def _produce(self, id_: str) -> Step:
        sequence = self._random.choices(["next", "repeat", "gap"], [10, 2, 1])[0]
        version = self._random.choice([3, 7, 9, 10, 11, 11, 12, 12, 12, 12])
        transactional = self._random.random() < 0.95
        # Intended difference: Kafka remembers a verification that failed for an epoch from the future, and refuses what
        # comes later with OUT_OF_ORDER_SEQUENCE_NUMBER. It has a test of its own.
        return Step(
            "produce",
            (
                id_,
                self._who(id_, future=False),
                self._random.randint(0, 1),
                sequence,
                self._random.randint(1, 3),
                version,
                transactional,
                f"r{self._count}",
            ),
        )

    def _add_offsets(self, id_: str) -> Step:
        return Step("add_offsets", (id_, self._who(id_), self._random.randint(0, 3)))

    def _offsets(self, id_: str) -> Step:
        member = self._random.choice([(-1, "", None), (-1, "", None), (-1, "", None), (3, "gone", None)])
        unknown = self._random.random() < 0.1
        return Step(
            "offsets", (id_, self._who(id_), self._count, unknown, member, self._random.choice([0, 2, 3, 4, 5, 5]))
        )

    def _end(self, id_: str) -> Step:
        return Step(
            "end", (id_, self._who(id_), self._random.random() < 0.6, self._random.choice([0, 1, 2, 3, 4, 5, 5, 5]))
        )
