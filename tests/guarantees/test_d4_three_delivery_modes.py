"""D4: three delivery modes behind one option, each doing what its name says under the same faults.

Faults: kill -9 of an instance at a random moment, and a freeze longer than its session and its transaction last.
"""

from __future__ import annotations

import pytest

from tests.support.broker import KAFKA_IN_FULL, Cluster
from tests.support.process_campaign import Outcome, run_campaign


def check(outcomes: dict[str, Outcome]) -> None:
    for guarantee, outcome in outcomes.items():
        print(
            f"{guarantee}: {outcome.sent} sent, {outcome.lost} lost, {outcome.duplicates} twice; "
            f"{outcome.kills} kills, {outcome.freezes} freezes, {outcome.fenced} fenced, {outcome.aborts} aborts"
        )
        assert outcome.kills >= 1, "no instance was killed"
        assert outcome.freezes >= 1, "no instance was frozen"
        assert outcome.sent > 1000
    exactly, least, most = (outcomes[name] for name in ("exactly_once", "at_least_once", "at_most_once"))
    assert (exactly.lost, exactly.duplicates) == (0, 0)
    assert least.lost == 0
    assert least.duplicates > 0, "no fault hit the moment between output and position: nothing was shown"
    assert most.duplicates == 0
    assert most.lost > 0, "no fault hit the moment between position and output: nothing was shown"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cluster", ["semel", KAFKA_IN_FULL], indirect=True)
def test_three_modes_keep_their_word_under_kills_and_freezes(cluster: Cluster) -> None:
    check(run_campaign(cluster, duration_s=12, seed=1))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_three_modes_keep_their_word_for_two_minutes(cluster: Cluster) -> None:
    check(run_campaign(cluster, duration_s=120, seed=2))
