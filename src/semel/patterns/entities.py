"""Versioned entities: append events to an entity only if it still has the version that was expected.

    accounts = semel.Entities("accounts", bootstrap_servers="localhost:9092")
    accounts.create(partitions=8)
    accounts.owner().run()                                    # in as many processes as you like

    appended = accounts.append("acc-7", 3, [b"withdrawn 20"])  # anywhere else: version 4, or ConflictError
    accounts.view().read("acc-7", after=appended.token)        # waits until it has seen version 4

Commands go to a topic, by entity. The owner of a partition, an instance of `semel.process` with state, decides them in
order, and writes events, replies, snapshots, the new versions and its offsets in one transaction. A second owner of the
same partition is refused by the group's generation, a zombie by its transactional id: so one decision counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from semel.client.dead_letters import REASON_CHARACTERS, reason_of
from semel.client.errors import ConfigError
from semel.client.types import ConsumerRecord
from semel.patterns.entity_view import EntityView, Fold, listed
from semel.patterns.entity_writer import EntityAppend, EntityReply, EntityWriter
from semel.patterns.process import Processor
from semel.patterns.process_output import Output
from semel.patterns.state import KeyedState, State
from semel.patterns.topic_sets import BROKER_TIME, COMPACTED, HOUR, KEPT, create_topics, partition_count
from semel.protocol.partitioning import partition_for_key

RECEIPTS = 16  # of the last appends to an entity
STATE = "versions"


class Receipt(msgspec.Struct, array_like=True, frozen=True):
    """Which command took an entity from one version to another."""

    base: int
    command_id: str
    version: int


class EntityState(msgspec.Struct, array_like=True):
    """What the owner knows of an entity."""

    version: int = 0
    receipts: list[Receipt] = []
    value: bytes | None = None  # the fold of all events, as JSON


_encode_state = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(EntityState).decode
_decode_command = msgspec.json.Decoder(EntityAppend).decode


class Decide:
    """The function of the owner's loop. What is no command is raised, hence a dead letter."""

    def __init__(
        self, name: str, partitions: int, reply_partitions: int, fold: Fold | None, snapshot_every: int, receipts: int
    ) -> None:
        self._events, self._replies, self._snapshots = name, f"{name}.replies", f"{name}.snapshots"
        self._partitions, self._reply_partitions = partitions, reply_partitions
        self._fold, self._every, self._receipts = fold, snapshot_every, receipts

    def __call__(self, record: ConsumerRecord, state: State) -> list[Output]:
        command = self._command(record)
        known: EntityState = state.get(record.key) or EntityState()
        reply = self._known_reply(command, known)
        if reply is not None:
            return [self._reply(command, reply)]
        try:
            new, outputs = self._applied(record, command, known)
            state.put(record.key, new)
        except Exception as error:  # of the user's fold, or a value that is too large: nothing has changed
            refused = EntityReply("", "refused", known.version, reason_of(error)[:REASON_CHARACTERS])
            return [self._reply(command, refused)]
        return [*outputs, self._reply(command, EntityReply("", "appended", new.version))]

    def _command(self, record: ConsumerRecord) -> EntityAppend:
        if not record.key:
            raise ValueError("a command without a key: the key is the entity")
        command = _decode_command(record.value or b"")
        if not command.events or command.expected < 0 or not 0 <= command.reply_to < self._reply_partitions:
            raise ValueError("a command needs events, an expected version from 0 on and a partition for its reply")
        home = partition_for_key(record.key, self._partitions)
        if home != record.partition:
            raise ValueError(
                f"the entity belongs to partition {home} and the command is in {record.partition}: its producer does "
                "not partition by murmur2 (librdkafka: partitioner=murmur2_random)"
            )
        return command

    def _known_reply(self, command: EntityAppend, known: EntityState) -> EntityReply | None:
        """What to reply to a command that changes nothing; None if it is to be applied."""
        for receipt in known.receipts:
            if receipt.base == command.expected and receipt.command_id == command.id:
                return EntityReply("", "appended", receipt.version)
        if command.expected == known.version:
            return None
        oldest = known.receipts[0].base if known.receipts else 0
        if command.expected < oldest:
            return EntityReply("", "forgotten", known.version)
        return EntityReply("", "conflict", known.version)

    def _applied(
        self, record: ConsumerRecord, command: EntityAppend, known: EntityState
    ) -> tuple[EntityState, list[Output]]:
        version = known.version + len(command.events)
        receipts = [*known.receipts, Receipt(known.version, command.id, version)][-self._receipts :]
        outputs = [
            Output(event, record.key, self._events, record.partition, headers=_headers(command, known.version + number))
            for number, event in enumerate(command.events, 1)
        ]
        value = known.value
        if self._fold is not None:
            made = None if value is None else msgspec.json.decode(value)
            for event in command.events:
                made = self._fold(made, event)
            value = msgspec.json.encode(made)
            if version // self._every > known.version // self._every:
                headers = [("version", b"%d" % version)]
                outputs.append(Output(value, record.key, self._snapshots, record.partition, headers=headers))
        return EntityState(version, receipts, value), outputs

    def _reply(self, command: EntityAppend, reply: EntityReply) -> Output:
        body = msgspec.json.encode(msgspec.structs.replace(reply, attempt=command.attempt))
        return Output(body, command.id, self._replies, command.reply_to)


def _headers(command: EntityAppend, version: int) -> list[tuple[str, bytes | None]]:
    return [("version", b"%d" % version), ("source", command.source.encode()), ("command", command.id.encode())]


class Entities(EntityWriter):
    """The entities of one kind, in topics of one name.

    name                the topic of the events; next to it are NAME.commands, NAME.replies, NAME.snapshots (compacted)
                        and NAME.dead, what was no command
    bootstrap_servers   the brokers, as host:port
    source              who appends; in a header of each event
    timeout_ms          how long `append` waits for the reply
    client              more options, of those that all clients have (security.protocol ...), by Kafka's names
    """

    def create(self, partitions: int = 8, replication_factor: int = -1) -> None:
        """Creates the topics that are not there. The number of partitions cannot be changed later."""
        topics = {
            self.name: KEPT,
            f"{self.name}.commands": BROKER_TIME,
            f"{self.name}.replies": HOUR,
            f"{self.name}.snapshots": COMPACTED,
            f"{self.name}.dead": {},
        }
        create_topics(self._options, topics, partitions, replication_factor)

    def owner(
        self,
        *,
        fold: Fold | None = None,
        snapshot_every: int = 50,
        receipts: int = RECEIPTS,
        directory: str | None = None,
        **options: Any,
    ) -> Processor:
        """An instance that decides; `run()` it. Instances share the partitions.

        fold            fold(value, event) -> the entity's new value, of what JSON knows; None at first. With it, the
                        value is written to NAME.snapshots every `snapshot_every` versions
        receipts        how many appends of an entity are remembered by their command ids
        directory       where the versions are kept between runs; see `semel.KeyedState`
        options         of `semel.process`, such as instance
        """
        if snapshot_every < 1 or receipts < 1:
            raise ConfigError("snapshot_every and receipts must be at least 1")
        partitions = self._check_partitions()
        replies = partition_count(self._options, [f"{self.name}.replies"])
        decide = Decide(self.name, partitions, replies, fold, snapshot_every, receipts)
        security = {name: value for name, value in self._options.items() if name != "bootstrap_servers"}
        given = {
            "commit_interval_ms": 0,  # what comes while a transaction ends is the next one
            **options,
            "consumer": {**security, **options.get("consumer", {})},
            "producer": {**security, **options.get("producer", {})},
        }
        return Processor(
            f"{self.name}.commands",
            None,
            decide,
            application_id=self.name,
            bootstrap_servers=self._options["bootstrap_servers"],
            state=KeyedState(STATE, format=(_encode_state, _decode_state), directory=directory),
            dead_letter_topic=f"{self.name}.dead",
            **given,
        )

    def view(self, fold: Fold = listed) -> EntityView:
        """A projection in memory: `fold(value, event)` of all events; by default, a list of them."""
        self._check_partitions()
        return EntityView(self.name, fold, self._options)

    def _check_partitions(self) -> int:
        alike = [self.name, f"{self.name}.commands", f"{self.name}.snapshots"]
        return partition_count(self._options, alike, optional=[f"{self.name}.{STATE}.changelog"])
