"""Who we are, remembered from batch to batch of one Spark application.

Spark plans, commits and aborts each batch in Python processes that share nothing but environment variables. One of them
is a folder of this application alone (`SPARK_LOCAL_DIRS`), so a small file there can hold the producer's identity. With
it the next batch renews the identity that it had, and a driver that was frozen while another one took over is refused.
Without it (a new application) the id is taken over.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from semel.client.producer.handle import TransactionHandle
from semel.client.settings import ProducerSettings


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

    def recall(self) -> TransactionHandle | None:
        """The transaction that was begun last, or None for an application that has begun none."""
        try:
            found = json.loads(self._path.read_text()) if self._path else None
        except FileNotFoundError:
            return None
        return None if found is None else TransactionHandle(self._settings, **found)
