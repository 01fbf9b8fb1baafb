"""Whether somebody else is writing under an application id: asked before the id is taken from them.

A second query that was given a copied application id must be refused, and the first one must go on. The ledger refuses
most of them, before anything is fenced. What is left is a query that continues where the ledger ends, or finds it
empty: a restart with a new checkpoint looks like that, and so does a second copy of a running query. A dead owner
writes nothing more; a live one is seen at work.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from semel.client.admin.transactions import TransactionInfo, describe_transaction
from semel.client.cluster import Cluster
from semel.client.errors import KafkaError, UnsupportedByBrokerError
from semel.client.log_reading import last_sequences
from semel.client.producer.batches import Identity, Place
from semel.client.producer.handle import TransactionHandle
from semel.client.settings import ProducerSettings
from semel.protocol.errors import ErrorCode
from semel.spark.ledger import LedgerEntry, MicroBatch

RECENT_MS = 10_000  # an entry that is younger may be that of a live owner between two batches
QUIET_S = 2.0  # an owner that does nothing for so long is not taken for alive
LONGEST_S = 10.0  # an owner that is never quiet for so long is
LOOK_AGAIN_S = 0.1
ONGOING, COMMITTED = "Ongoing", "CompleteCommit"
ENDING = ("PrepareCommit", "PrepareAbort")


def transaction_of(cluster: Cluster, transactional_id: str) -> TransactionInfo | None:
    """What the coordinator knows of an id; None if it was never used, or if the broker cannot say."""
    try:
        return describe_transaction(cluster, transactional_id, cluster.deadline())
    except UnsupportedByBrokerError:
        return None
    except KafkaError as error:
        if error.code is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
            return None
        raise


def await_decided(cluster: Cluster, transactional_id: str) -> TransactionInfo | None:
    """The state of an id, once a transaction whose end is decided has its markers: its entry is visible then."""
    deadline = cluster.deadline()
    while True:
        found = transaction_of(cluster, transactional_id)
        if found is None or found.state not in ENDING or deadline.expired:
            return found
        time.sleep(LOOK_AGAIN_S)


class Sign(NamedTuple):
    """What changes while somebody writes under an id."""

    identity: Identity
    state: str
    started_ms: int
    sequences: dict[Place, int]


def sign_of(cluster: Cluster, transactional_id: str, places: Iterable[Place]) -> Sign | None:
    found = transaction_of(cluster, transactional_id)
    if found is None:
        return None
    identity = Identity(found.producer_id, found.epoch)
    sequences = last_sequences(cluster, places, identity, cluster.deadline().remaining_s())
    return Sign(identity, found.state, found.start_time_ms, sequences)


def live_owner(cluster: Cluster, transactional_id: str, last: LedgerEntry | None, places: list[Place]) -> Sign | None:
    """Watches the owner of an id, if it may be alive. Returns what it did last if it never stopped, None if it is
    quiet. What a dead driver's tasks still had in hand is over soon."""
    sign = sign_of(cluster, transactional_id, places)
    is_open = sign is not None and sign.state == ONGOING
    is_recent = last is not None and abs(time.time() * 1000 - last.committed_at_ms) < RECENT_MS
    if not is_open and not is_recent:
        return None
    began_s = quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < QUIET_S:
        time.sleep(LOOK_AGAIN_S)
        now = sign_of(cluster, transactional_id, places)
        if now != sign:
            sign, quiet_since_s = now, time.monotonic()
            if quiet_since_s - began_s > LONGEST_S:
                return sign
    return None


def why_in_use(
    cluster: Cluster, application_id: str, last: LedgerEntry | None, batch: MicroBatch, places: list[Place]
) -> str:
    """Why the id must not be taken for a batch that the ledger would let through; "" if nothing speaks against it."""
    if last is not None and last.query_id == batch.query_id:
        return ""  # a restart: whoever has the id is an earlier run of this query
    seen = live_owner(cluster, application_id, last, places)
    if seen is None:
        return ""
    return (
        f"application id {application_id!r} is in use: {'a query' if last is None else f'query {last.query_id}'} is "
        f"writing under it now (producer {seen.identity.producer_id}, epoch {seen.identity.epoch}). It was left alone, "
        "and nothing was written. Two queries need two application ids; to replace the running one, stop it first"
    )


class DriverState:
    """The identity that this Spark application last had under an application id."""

    def __init__(self, settings: ProducerSettings) -> None:
        folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
        cluster = hashlib.sha256(",".join(map(str, settings.bootstrap_servers)).encode()).hexdigest()[:12]
        self._settings = settings
        self._path = Path(folder) / f"semel-{settings.transactional_id}-{cluster}.json" if folder else None

    def remember(self, producer_id: int, epoch: int, generation: int) -> None:
        if self._path is None or not self._path.parent.is_dir():
            return
        new = self._path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"producer_id": producer_id, "epoch": epoch, "generation": generation}))
        new.replace(self._path)

    def last_handle(self) -> TransactionHandle | None:
        """The transaction that was begun last, or None for an application that has begun none."""
        try:
            found = json.loads(self._path.read_text()) if self._path else None
        except FileNotFoundError:
            return None
        return None if found is None else TransactionHandle(self._settings, **found)
