"""What every Python worker does once."""

from __future__ import annotations

import gc

_settled = False


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
