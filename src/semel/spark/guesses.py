"""What the sink does on the assumption that rows are as they mostly are, and how it says that they were not."""

from __future__ import annotations


class FailedGuessError(RuntimeError):
    """Rows were not as expected. The batch is aborted and runs again in the way that is always right. No failure of the
    query: it costs none of its attempts. Each kind of guess is made until it fails, so once in a query at most."""
