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

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from semel.client.consumer import Consumer
from semel.client.dead_letters import REASON_CHARACTERS, reason_of
from semel.client.errors import ConfigError, TimedOutError
from semel.client.timing import Backoff, Deadline, timeout_in_ms
from semel.client.types import ConsumerRecord, TopicPartition
from semel.patterns.entity_writer import EntityAppend, EntityReply, EntityWriter
from semel.patterns.process import Processor
from semel.patterns.process_output import Output
from semel.patterns.state import KeyedState, State, StateError
from semel.patterns.topics import (
    BROKER_TIME,
    COMPACTED,
    HOUR,
    KEPT,
    POLL_MS,
    create_topics,
    partition_count,
    read_up_to,
)
from semel.protocol.partitioning import partition_for_key

# --- Reading entities: a projection that is made of their events, and how to wait until one has what was written ---
#
# A view reads the snapshots first and then the events; what it has of an entity is always the fold of its events up to
# one version. It lives in memory and reads while it is used. Projections elsewhere (a table, a cache) store the header
# `version` with what they make of an event, and `wait_for_version` waits for them.


Fold = Callable[[Any, bytes], Any]


def listed(value: list[bytes] | None, event: bytes) -> list[bytes]:
    """The fold that keeps all events. The view copies the list when it is read."""
    events = [] if value is None else value
    events.append(event)
    return events


class EntityValue(NamedTuple):
    """An entity as of a version; 0: there is none."""

    version: int
    value: Any


def parse_token(token: str) -> tuple[str, int]:
    """Entity and version that a token of `append` names."""
    number, at, entity = token.partition("@")
    if not at or not number.isdecimal() or not entity:
        raise ConfigError(f"invalid token {token!r}: expected VERSION@ENTITY, as append() returns it")
    return entity, int(number)


def _version(record: ConsumerRecord) -> int | None:
    raw = dict(record.headers).get("version")
    return int(raw) if raw is not None and raw.isdigit() else None


class EntityView:
    """The fold of the events of every entity. One thread at a time uses it."""

    def __init__(self, name: str, fold: Fold, options: Mapping[str, Any]) -> None:
        self.name, self._fold = name, fold
        self._values: dict[bytes, EntityValue] = {}
        self._unapplied: deque[ConsumerRecord] = deque()  # read, and then the fold raised
        fixed = {"isolation_level": "read_committed", "auto_offset_reset": "earliest", "enable_auto_commit": False}
        self._consumer = Consumer({**options, **fixed})
        try:
            if fold is not listed:
                self._read_snapshots()
            self._assign(name)
            self.refresh()
        except BaseException:
            self.close()
            raise

    def _assign(self, topic: str) -> list[TopicPartition]:
        places = [TopicPartition(topic, number) for number in sorted(self._consumer.partitions_for(topic))]
        self._consumer.assign(places)
        self._consumer.seek_to_beginning(*places)
        return places

    def _read_snapshots(self) -> None:
        places = self._assign(f"{self.name}.snapshots")
        for records in read_up_to(self._consumer, self._consumer.end_offsets(places)):
            for record in records:
                version = _version(record)
                if version is not None and record.key is not None and record.value is not None:
                    self._values[record.key] = EntityValue(version, msgspec.json.decode(record.value))

    # -- reading -------------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Reads what is committed at this moment."""
        self._apply(())
        places = list(self._consumer.assignment())
        for records in read_up_to(self._consumer, self._consumer.end_offsets(places)):
            self._apply(records)

    @timeout_in_ms
    def read(self, entity: str, *, after: str | None = None, timeout_ms: float = 10_000) -> EntityValue:
        """The entity as this view knows it: with `after`, a token of `append`, once it has that version."""
        wanted = 0
        if after is not None:
            named, wanted = parse_token(after)
            if named != entity:
                raise ConfigError(f"the token is of {named!r}, not of {entity!r}")
        key, deadline_s = entity.encode(), time.monotonic() + timeout_ms / 1000
        self._apply(self._consumer.poll(0))
        while (found := self._values.get(key, EntityValue(0, None))).version < wanted:
            left_ms = (deadline_s - time.monotonic()) * 1000
            if left_ms <= 0:
                raise TimedOutError(
                    f"{entity!r} has version {found.version} in this view, version {wanted} was not seen within "
                    f"{timeout_ms:g} ms; it comes when the transaction that wrote it is readable"
                )
            self._apply(self._consumer.poll(min(left_ms, POLL_MS)))
        return EntityValue(found.version, list(found.value or ())) if self._fold is listed else found

    def _apply(self, records: Iterable[ConsumerRecord]) -> None:
        """An event that the fold raises for is the next one again: the consumer has gone past it and past others."""
        self._unapplied.extend(records)
        while self._unapplied:
            self._apply_one(self._unapplied[0])
            self._unapplied.popleft()

    def _apply_one(self, record: ConsumerRecord) -> None:
        version = _version(record)
        if version is None or record.key is None:
            return  # not written by an owner
        known = self._values.get(record.key, EntityValue(0, None))
        if version > known.version + 1:
            raise StateError(
                f"{record.key!r} goes from version {known.version} to {version} at {record.topic}-"
                f"{record.partition} offset {record.offset}: events between were deleted, and no snapshot covers "
                "them. Keep events longer than the owner takes to write snapshots (retention.ms, snapshot_every)"
            )
        if version == known.version + 1:
            self._values[record.key] = EntityValue(version, self._fold(known.value, record.value or b""))

    def close(self) -> None:
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@timeout_in_ms
def wait_for_version(token: str, version_of: Callable[[str], int | None], *, timeout_ms: float = 10_000) -> int:
    """For a projection of one's own: calls `version_of(entity)` until it has what the token names."""
    entity, wanted = parse_token(token)
    deadline, pauses = Deadline(timeout_ms / 1000), Backoff(2, 200)
    while (found := version_of(entity) or 0) < wanted:
        if deadline.expired:
            raise TimedOutError(
                f"the projection has version {found} of {entity!r}, not {wanted}, after {timeout_ms:g} ms"
            )
        time.sleep(pauses.next_s())
    return found


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
