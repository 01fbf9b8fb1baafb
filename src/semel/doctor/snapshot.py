"""The state of a cluster at one moment, as far as the checks need it: read through the admin client, with few requests.

A cluster does not hold still while it is read. Where a check compares what two brokers say, the snapshot has what was
read before and after, so that something that ended in between is not taken for something that hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from semel.client.admin.calls import AdminCalls, TopicInfo
from semel.client.admin.observation import TransactionStep
from semel.client.admin.risks import risks
from semel.client.admin.transactions import ProducerInfo, TransactionInfo
from semel.client.cluster_calls import ClusterCalls
from semel.client.errors import KafkaError, TimedOutError
from semel.client.log_view import COMMITTED, OPEN, records_between
from semel.client.timing import Deadline
from semel.client.types import TopicPartition
from semel.protocol.errors import DecodeError
from semel.protocol.messages.internal_topics import OFFSET_COMMIT_KEY
from semel.spark.ledger import SUFFIX, LedgerEntry, LedgerError, decode
from semel.spark.offsets import lowest

OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
AUTHORIZER = "authorizer.class.name"
EARLIEST, LATEST = -2, -1
PRODUCERS_OF_AT_MOST = 20_000  # partitions whose producers are all looked at; beyond it, those that hold back readers
IDS_DESCRIBED_AT_MOST = 20_000
LEDGER_RECORDS = 100
LEDGERS_AT_MOST = 200
COMMITS_READ = 200  # records of each partition of the offsets topic
GROUPS_AT_MOST = 2_000
BROKER_SETTINGS = ("transaction.partition.verification.enable", "transaction.max.timeout.ms", AUTHORIZER)

OpenTransaction = tuple[TopicPartition, int, int, int]  # partition, producer id, epoch, first offset


class Bounds(msgspec.Struct, frozen=True):
    start: int
    stable: int
    end: int


EMPTY = Bounds(0, 0, 0)


class GroupSeen(msgspec.Struct, frozen=True):
    state: str
    committed: dict[TopicPartition, int]
    unstable: list[TopicPartition]


class CommitSeen(msgspec.Struct, frozen=True):
    """A committed offset in the offsets topic, and whether a transaction wrote it."""

    group: str
    topic: str
    partition: int
    offset: int
    in_transaction: bool


class Snapshot(msgspec.Struct):
    """Everything that the checks look at."""

    now_ms: int
    brokers: int = 1
    transaction_version: int = 2
    bounds: dict[TopicPartition, Bounds] = {}  # of partitions with a leader
    leaderless: set[TopicPartition] = set()
    producers: dict[TopicPartition, list[ProducerInfo]] = {}
    transactions: dict[str, TransactionInfo] = {}
    ids: list[str] = []
    still_open: set[OpenTransaction] = set()  # before and after the responses of the coordinators
    known_later: set[tuple[int, TopicPartition]] = set()  # (producer id, partition) that a coordinator names meanwhile
    groups: dict[str, GroupSeen] = {}
    commits: list[CommitSeen] = []
    ledgers: dict[str, list[LedgerEntry]] = {}
    ledger_problems: dict[str, str] = {}
    steps: list[TransactionStep] | None = None
    settings: dict[str, str | None] = {}
    risks: list[str] = []
    not_looked_at: list[str] = []
    coordinators_away: int = 0  # partitions of the transactions topic without a leader: nobody lists their ids


async def take_snapshot(
    calls: AdminCalls, timeout_ms: float = 10_000, on_step: Callable[[int, str], None] = lambda number, what: None
) -> Snapshot:
    """Reads a cluster. What the user may not see, or an old broker does not serve, is noted and left out. `on_step` is
    called before each of the STEPS with its number and what it reads."""
    deadline = calls.cluster.deadline(timeout_ms / 1000)
    reader = _Reader(calls, deadline, Snapshot(int(time.time() * 1000)))
    await reader.read(on_step)
    return reader.found


async def ledger_entries(
    calls: ClusterCalls[Any], name: str, start: int, end: int, deadline: Deadline
) -> list[LedgerEntry]:
    """The committed entries in a part of a ledger; none if it is a topic of the user's that happens to end like one."""
    entries = []
    async for record in records_between(calls, (name, 0), start, end, deadline):
        if record.state == COMMITTED and not record.marker and record.value:
            try:
                entries.append(decode(record.value))
            except LedgerError:
                return []
    return entries


class _Reader:
    def __init__(self, calls: AdminCalls, deadline: Deadline, found: Snapshot) -> None:
        self._calls, self._deadline, self.found = calls, deadline, found

    async def read(self, on_step: Callable[[int, str], None]) -> None:
        self._cluster = await self._calls.describe_cluster(timeout_ms=self._left_ms())
        self.found.brokers = len(self._cluster.brokers)
        self.found.transaction_version = self._cluster.features.get("transaction.version", 0)
        for number, (what, step) in enumerate(STEPS.items()):
            on_step(number, what)
            try:
                await step(self)
            except TimedOutError as error:
                raise TimedOutError(
                    f"the cluster could not be examined within {self._deadline.total_s:.3g} s; the time was over at "
                    f"{what}. Give it more (--timeout). {error}",
                    error.code,
                ) from error
            except KafkaError as error:
                self.found.not_looked_at.append(f"{what}: {error}")

    def _left_ms(self) -> float:
        return max(1.0, self._deadline.remaining_s() * 1000)

    # --- topics ---
    async def _read_bounds(self) -> None:
        topics = await self._calls.describe_topics(timeout_ms=self._left_ms())
        self.found.coordinators_away = sum(
            part.leader < 0 for topic in topics if topic.name == TRANSACTIONS_TOPIC for part in topic.partitions
        )
        places = self._places_with_leaders(topics)
        if self.found.leaderless:
            self.found.not_looked_at.append(f"{len(self.found.leaderless)} partitions have no leader")
        ends = await self._offsets(places, LATEST, False)
        used = [place for place, end in ends.items() if end > 0]  # of the others all three are 0
        stables, starts = await self._offsets(used, LATEST, True), await self._offsets(used, EARLIEST, False)
        self.found.bounds = {place: EMPTY for place, end in ends.items() if end == 0} | {
            # what was written after the first response is left for the next look
            place: Bounds(starts[place], min(stables[place], ends[place]), ends[place])
            for place in used
            if place in starts and place in stables
        }

    def _places_with_leaders(self, topics: Iterable[TopicInfo]) -> list[TopicPartition]:
        """The others are noted: nobody responds for them."""
        leaders = {
            TopicPartition(topic.name, part.partition): part.leader for topic in topics for part in topic.partitions
        }
        self.found.leaderless |= {place for place, leader in leaders.items() if leader < 0}
        return [place for place, leader in leaders.items() if leader >= 0]

    async def _offsets(self, places: list[TopicPartition], at: int, committed: bool) -> dict[TopicPartition, int]:
        return await self._calls.offsets_of_existing(places, at, int(committed), self._left_ms()) if places else {}

    # --- transactions ---
    async def _read_transactions(self) -> None:
        found = self.found
        self.found.ids = [
            entry.transactional_id for entry in await self._calls.list_transactions(timeout_ms=self._left_ms())
        ]
        places = self._places_of_producers()
        before = await self._producers(places)
        found.transactions = await self._transactions()
        opened = _open_ones(before)
        suspects = opened - _known(opened, found.transactions.values())
        if suspects:
            after = _open_ones(await self._producers({place for place, *_ in suspects}))
            found.still_open = opened & after
            again = await self._transactions()
            found.known_later = {
                (each.producer_id, place)
                for each in again.values()
                if each.state not in _ENDED
                for place in each.partitions
            }
        found.producers = before

    def _places_of_producers(self) -> Iterable[TopicPartition]:
        bounds = self.found.bounds
        if len(bounds) <= PRODUCERS_OF_AT_MOST:
            return [place for place, each in bounds.items() if each.end > each.start]
        self.found.not_looked_at.append(f"epochs of producers: there are {len(bounds)} partitions")
        return [place for place, each in bounds.items() if each.stable < each.end]

    async def _producers(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, list[ProducerInfo]]:
        return await self._calls.producers_of(places, timeout_ms=self._left_ms())

    async def _transactions(self) -> dict[str, TransactionInfo]:
        states = () if len(self.found.ids) <= IDS_DESCRIBED_AT_MOST else _UNDER_WAY
        found = await self._calls.describe_transactions(states, timeout_ms=self._left_ms())
        return {each.transactional_id: each for each in found}

    async def _read_decisions_again(self) -> None:
        """One that was being ended when it was looked at, however long it had been open, has ended by now."""
        if any(each.state in _FINISHING for each in self.found.transactions.values()):
            now = await self._transactions()
            self.found.transactions |= {
                name: now[name]
                for name, each in self.found.transactions.items()
                if each.state in _FINISHING and name in now
            }

    # --- groups ---
    async def _read_groups(self) -> None:
        committed = await self._calls.committed_of_all(timeout_ms=self._left_ms())
        if len(committed) > GROUPS_AT_MOST:
            self.found.not_looked_at.append(f"{len(committed) - GROUPS_AT_MOST} of {len(committed)} groups")
        self.found.groups = {
            group: GroupSeen(
                each.state, {place: at.offset for place, at in each.committed.items()}, sorted(each.unstable)
            )
            for group, each in list(committed.items())[:GROUPS_AT_MOST]
        }

    async def _read_commits(self) -> None:
        """The last commits of each group, as the offsets topic has them."""
        for place, bounds in self.found.bounds.items():
            if place.topic != OFFSETS_TOPIC or bounds.end <= bounds.start:
                continue
            offset = max(bounds.start, bounds.end - COMMITS_READ)
            async for record in records_between(self._calls.cluster, place, offset, bounds.end, self._deadline):
                if not record.marker and record.key is not None and record.state in (COMMITTED, OPEN):
                    self._add_commit(record.key, record.value, record.offset, record.is_transactional)

    def _add_commit(self, key: bytes, value: bytes | None, offset: int, in_transaction: bool) -> None:
        version = int.from_bytes(key[:2], "big")
        if version > 1 or value is None:  # not a committed offset, or one that was deleted
            return
        try:
            where, _ = OFFSET_COMMIT_KEY.decode_from(key, 0, 2)
        except DecodeError:
            return
        self.found.commits.append(CommitSeen(where.group, where.topic, where.partition, offset, in_transaction))

    # --- ledgers ---
    async def _read_ledgers(self) -> None:
        names = sorted({place.topic for place in self.found.bounds if place.topic.endswith(SUFFIX)})
        if len(names) > LEDGERS_AT_MOST:
            self.found.not_looked_at.append(f"{len(names) - LEDGERS_AT_MOST} of {len(names)} ledgers")
        for name in names[:LEDGERS_AT_MOST]:
            deadline = self._calls.cluster.deadline(self._left_ms() / 2000)  # what is left is for the others
            try:
                await self._read_ledger(name, deadline)
            except KafkaError as error:  # a topic that was deleted meanwhile, for instance
                self.found.not_looked_at.append(f"{name}: {error}")

    async def _read_ledger(self, name: str, deadline: Deadline) -> None:
        entries = await self._entries(name, deadline)
        if entries is None:
            return
        settings = await self._calls.describe_configs(topic=name, timeout_ms=deadline.remaining_s() * 1000)
        self.found.ledgers[name] = entries
        partitions = sum(place.topic == name for place in self.found.bounds)
        policy = settings["cleanup.policy"].value if "cleanup.policy" in settings else "compact"
        if partitions != 1:
            self.found.ledger_problems[name] = f"it has {partitions} partitions, and a ledger has 1"
        elif policy != "compact":
            self.found.ledger_problems[name] = f"it has cleanup.policy={policy}, so its entries are deleted in time"

    async def _entries(self, name: str, deadline: Deadline) -> list[LedgerEntry] | None:
        """The last entries; None: it is a topic of the user's that happens to end like a ledger."""
        place = TopicPartition(name, 0)
        bounds = self.found.bounds.get(place)
        if bounds is None or bounds.end <= bounds.start:
            return None
        start = max(bounds.start, bounds.end - LEDGER_RECORDS)
        return await ledger_entries(self._calls.cluster, name, start, bounds.end, deadline) or None

    async def _read_ends_again(self) -> None:
        """Committed offsets and ledgers were read after the ends of the topics: what they name beyond these may have
        been written in between."""
        bounds = self.found.bounds
        suspects = {place for place, end in self._reached() if place not in bounds or end > bounds[place].end}
        suspects -= self.found.leaderless
        if any(place not in bounds for place in suspects):  # or created in between
            topics = await self._calls.describe_topics(timeout_ms=self._left_ms())
            suspects &= {*self._places_with_leaders(topics), *bounds}
        for place, end in (await self._offsets(sorted(suspects), LATEST, False)).items():
            before = bounds.get(place, EMPTY)
            bounds[place] = Bounds(before.start, before.stable, max(end, before.end))

    def _reached(self) -> Iterator[tuple[TopicPartition, int]]:
        """Partitions, and up to where somebody has read or written them."""
        for group in self.found.groups.values():
            yield from group.committed.items()
        for entries in self.found.ledgers.values():
            last = max(entries, key=lambda entry: entry.sequence)
            for written in last.written:
                yield TopicPartition(written.topic, written.partition), written.last_offset + 1
            for topic, parts in lowest(last.ends).offsets.items():
                yield from ((TopicPartition(topic, index), offset) for index, offset in parts.items())

    # --- the rest ---
    async def _read_steps(self) -> None:
        self.found.steps = await self._calls.transaction_events(limit=10_000, timeout_ms=self._left_ms())

    async def _read_settings(self) -> None:
        self.found.settings = {AUTHORIZER: "unknown"}  # there may be one that hides the settings, and ids with them
        node = min(broker.node_id for broker in self._cluster.brokers)
        settings = await self._calls.describe_configs(broker=node, timeout_ms=self._left_ms())
        self.found.settings = {name: settings[name].value for name in BROKER_SETTINGS if name in settings}
        outputs = {each.topic for entries in self.found.ledgers.values() for each in entries[-1].written}
        self.found.risks = await risks(self._calls, sorted(outputs | set(self.found.ledgers)))


STEPS = {
    "offsets of topics": _Reader._read_bounds,
    "transactions": _Reader._read_transactions,
    "groups": _Reader._read_groups,
    "commits of groups": _Reader._read_commits,
    "ledgers": _Reader._read_ledgers,
    "ends of topics once more": _Reader._read_ends_again,
    "events of the broker": _Reader._read_steps,
    "settings of brokers": _Reader._read_settings,
    "decisions once more": _Reader._read_decisions_again,
}
_FINISHING = ("PrepareCommit", "PrepareAbort")
_ENDED = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")
_UNDER_WAY = ("Ongoing", "PrepareCommit", "PrepareAbort")


def _open_ones(producers: Mapping[TopicPartition, list[ProducerInfo]]) -> set[OpenTransaction]:
    return {
        (place, each.producer_id, each.epoch, each.transaction_start)
        for place, entries in producers.items()
        for each in entries
        if each.transaction_start >= 0
    }


def _known(opened: set[OpenTransaction], transactions: Iterable[TransactionInfo]) -> set[OpenTransaction]:
    """Those that a coordinator knows."""
    known = {
        (each.producer_id, place) for each in transactions if each.state not in _ENDED for place in each.partitions
    }
    return {each for each in opened if (each[1], each[0]) in known}
