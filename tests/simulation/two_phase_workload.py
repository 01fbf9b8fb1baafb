"""Owners of one transactional id that prepare their transactions (KIP-939), and a database that decides about them.

An owner prepares, has the database decide, and ends the transaction. It may die at each of these points; the next owner
ends what it left as the database says, seconds or minutes later.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from semel.client.errors import FencedError, KafkaError
from semel.client.producer.batches import Identity
from semel.client.producer.transaction import PreparedTransaction
from semel.client.producer.transaction_states import ProducerTxnState
from semel.protocol.errors import Recovery
from semel.protocol.messages.transactions import InitProducerIdRequest
from tests.simulation.transactional_process import TRANSACTION_TIMEOUT_MS, TransactionalProcess
from tests.simulation.workloads import DRAIN_S, Disturbances, committed_values
from tests.simulation.world import World, simulated

OWNERS, TRANSACTIONS = 5, 8
DEATH_RATE = 0.12  # at each of three points of a transaction
LONG_PAUSE_S = 3 * TRANSACTION_TIMEOUT_MS / 1000  # without an owner: a transaction with a timeout would be aborted


class DecidingDatabase:
    """What survives everything. An owner takes it over first: from then on no earlier one can decide."""

    def __init__(self) -> None:
        self.generation = 0
        self.decided: PreparedTransaction | None = None
        self.values: list[bytes] = []
        self.prepared: PreparedTransaction | None = None  # the last one
        self.ends_sent: set[PreparedTransaction] = set()

    def take_over(self) -> int:
        self.generation += 1
        return self.generation

    def decide(self, generation: int, prepared: PreparedTransaction, values: list[bytes]) -> bool:
        """False: a newer owner has the database."""
        if generation != self.generation:
            return False
        self.decided = prepared
        self.values += values
        return True


class TwoPhaseProcess(TransactionalProcess):
    init_version = 6

    def __init__(self, world: World, name: str, database: DecidingDatabase, death_rate: float, **options: Any) -> None:
        super().__init__(world, "owner", name, TRANSACTIONS, two_phase_commit=True, **options)
        self._database = database
        self._generation = 0
        self._death_rate = death_rate
        self.died = False

    @property
    def is_over(self) -> bool:
        return self.died or super().is_over

    def _dies(self, where: str) -> bool:
        if self._world.rng.random() < self._death_rate and self._world.may_strike():
            self._world.note(f"{self._name} dies {where}")
            self.died = True
            self._world.processes.remove(self)
            self._client.cut()
        return self.died

    # --- recovery ---
    def _init(self) -> None:
        if not self._generation:
            self._generation = self._database.take_over()
        super()._init()

    def _init_request(self, stale: Identity | tuple[()] = ()) -> InitProducerIdRequest:
        request = super()._init_request(stale)
        request.enable2_pc, request.keep_prepared_txn = True, not stale
        return request

    def _initialized(self, response: Any) -> None:
        if isinstance(response, KafkaError):
            super()._initialized(response)
            return
        ongoing = Identity(response.ongoing_txn_producer_id, response.ongoing_txn_producer_epoch)
        left, database = self._database.prepared, self._database
        if self._generation != database.generation:  # this request or its response was late; a newer owner decides now
            raise FencedError("the database has a newer owner")
        if left is not None and left not in database.ends_sent:
            assert ongoing == left, f"{left} was prepared, and nobody ended it; the coordinator has {ongoing}"
        if ongoing.producer_id < 0:
            super()._initialized(response)
            return
        self._world.note(f"{self._name} keeps {ongoing}")
        identity = Identity(response.producer_id, response.producer_epoch)
        kept = self.transaction.kept(identity, ongoing, 2)
        self._left += 1  # it is not one of its own
        if self.transaction.is_to_commit(database.decided):
            self._end_as_decided(kept)
        else:
            database.ends_sent.add(kept)
            self._abort()

    # --- a transaction of its own ---
    def _all_written(self) -> None:
        self.core.prepare(self.transaction)
        self._step = self._prepare

    def _prepare(self) -> None:
        if self.transaction.state is not ProducerTxnState.PREPARING:
            self._abort()
        elif self.core.is_drained(self.transaction):
            prepared = self.transaction.is_prepared()
            if self.transaction.end_request() is not None:  # else the coordinator knows nothing of it
                self._database.prepared = prepared
            self._step = self._decide
            self._dies("with a prepared transaction")

    def _decide(self) -> None:
        prepared = self.transaction.prepared
        assert prepared is not None
        if self._world.rng.random() < 0.1:
            self._database.ends_sent.add(prepared)
            self._abort()
            return
        if not self._database.decide(self._generation, prepared, self._values):
            raise FencedError("the database has a newer owner")
        self._values = []  # whatever comes now, they are to be visible
        if not self._dies("after the decision"):
            self._end_as_decided(prepared)

    def _end_as_decided(self, prepared: PreparedTransaction) -> None:
        self._database.ends_sent.add(prepared)
        self.core.commit(self.transaction)
        self._step = self._deliver

    def _commit_ended(self, response: Any) -> None:
        is_refused = isinstance(response, KafkaError) and response.recovery not in (Recovery.RETRY, Recovery.FENCED)
        assert not is_refused, f"a decided transaction cannot be committed: {response}"
        super()._commit_ended(response)
        if not self.is_over:
            self._dies("after the end")


def two_phase(seed: int, data: Path, on_start: Callable[[World], None] = lambda world: None) -> World:
    """What the database decided is visible, once, and nothing else is."""
    with simulated(seed, data) as world:
        on_start(world)
        rng = world.rng
        world.broker.settings["transaction.two.phase.commit.enable"] = "true"
        world.broker.start()
        assert world.run(lambda: world.broker.is_up)
        disturbances, database, owners = Disturbances(world), DecidingDatabase(), list[TwoPhaseProcess]()
        for number in range(OWNERS):
            is_last = number + 1 == OWNERS
            options = {"batch_size": rng.choice([150, 2_000]), "delivery_timeout_ms": rng.choice([1_500, 60_000])}
            owner = TwoPhaseProcess(
                world, f"p{number}", database, 0.0 if is_last else DEATH_RATE, request_timeout_ms=1_000, **options
            )
            owner.cut_rate, world.stall_rate = rng.random() * 0.2, rng.random() * 0.03
            owners.append(owner)
            world.processes.append(owner)
            if not is_last:
                world.run(lambda owner=owner: owner.is_over, rng.random() * 5.0)  # type: ignore[misc]
                if owner.died and rng.random() < 0.5:
                    world.run_for(LONG_PAUSE_S)
        disturbances.end()
        for owner in owners:
            owner.cut_rate = 0.0
        world.stall_rate = 0.0
        assert world.run(lambda: all(owner.is_over for owner in owners), DRAIN_S), "not every owner came to an end"
        if owners[-1].fenced:  # by a request of an earlier owner that was late; somebody starts another one
            owners.append(TwoPhaseProcess(world, "last", database, 0.0, request_timeout_ms=1_000))
            world.processes.append(owners[-1])
            assert world.run(lambda: owners[-1].is_over, DRAIN_S), "the last owner did not come to an end"
        assert not owners[-1].fenced, "the newest owner was fenced"
        world.run_for(10.0)  # markers
        visible = [value for values in committed_values(world) for value in values]
        assert len(visible) == len(set(visible)), "a record is visible twice"
        missing, extra = set(database.values) - set(visible), set(visible) - set(database.values)
        assert not missing, f"decided, but not visible: {sorted(missing)}"
        assert not extra, f"visible, but not decided: {sorted(filter(None, extra))}"
        return world
