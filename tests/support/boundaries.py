"""What a campaign must hit: the steps of a commit that have a name."""

from __future__ import annotations

from semel.prove.injection import SINK_POINTS, TASK_POINTS
from semel.prove.schedule import ABORT_POINTS, COMMIT_POINTS, TRANSACTION_APIS


def boundaries(*, broker: bool, sink: bool) -> set[str]:
    """Everything on the way of an exactly-once commit; with the points of a broker of one's own, and of the sink."""
    named = {f"{api}.{side}" for api in TRANSACTION_APIS for side in ("request", "response")}
    named |= {*COMMIT_POINTS, *ABORT_POINTS, "EndTxn.before_response", "EndTxn.after_response"} if broker else set()
    return named | ({*SINK_POINTS, *TASK_POINTS} if sink else set())
