"""What every Python worker does once, and what it keeps from one task to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from semel.client.cluster import Cluster
from semel.client.settings import ClientSettings

KEPT_CLUSTERS = 8  # a worker serves all queries of its executor

_settled = False
_clusters: dict[ClientSettings, Cluster] = {}  # not in use now; the oldest first


def settle_worker() -> None:
    """Once per worker: PySpark's daemon collects garbage after every task, which costs more than a small batch. What
    the imports left behind never becomes garbage, so it need not be looked at again."""
    global _settled
    if not _settled:
        import pyarrow  # noqa: F401

        import semel.protocol.columns_decode
        import semel.protocol.columns_encode  # noqa: F401

        gc.collect()
        gc.freeze()
        _settled = True


@contextmanager
def worker_cluster(settings: ClientSettings) -> Iterator[Cluster]:
    """Connections and metadata that stay for the next task of this worker: a small batch would spend more time on
    connecting than on its rows. After a failure, or a task that ended early, they are closed: nothing is left in them
    that another task could stumble over."""
    cluster = _clusters.pop(settings, None) or Cluster(settings)
    try:
        yield cluster
    except BaseException:
        cluster.close()
        raise
    _keep(settings, cluster)


def _keep(settings: ClientSettings, cluster: Cluster) -> None:
    if settings in _clusters:
        cluster.close()  # two were in use at once
        return
    _clusters[settings] = cluster
    while len(_clusters) > KEPT_CLUSTERS:
        _clusters.pop(next(iter(_clusters))).close()
