"""One step of a member towards its target assignment. Pure.

STABLE       nothing to do until there is a new target
UNREVOKED    the member was told to give partitions back; it stays at its epoch until it no longer reports them
UNRELEASED   the member has its new epoch and what is free; the rest comes when others have given it back
"""

from __future__ import annotations

from collections.abc import Callable

from semel.broker.groups.consumer.model import NOTHING, Current, MemberState, Partitions


def reconcile(
    current: Current,
    target_epoch: int,
    target: Partitions,
    owned: Partitions | None,
    is_free: Callable[[tuple[bytes, int]], bool],
) -> Current:
    """What the member has next. `owned` is what it says it has; None: it did not say."""
    if current.state is MemberState.STABLE:
        return current if current.epoch == target_epoch else _next(current, target_epoch, target, owned, is_free)
    if current.state is MemberState.UNREVOKED:
        if _still_owns(owned, current.revoking):
            return current
        return _next(current, target_epoch, target, owned, is_free, epoch=current.epoch + 1)
    return _next(current, target_epoch, target, owned, is_free)


def _next(
    current: Current,
    target_epoch: int,
    target: Partitions,
    owned: Partitions | None,
    is_free: Callable[[tuple[bytes, int]], bool],
    epoch: int | None = None,
) -> Current:
    kept = current.assigned & target
    revoking = current.assigned - target
    if revoking and _still_owns(owned, revoking):
        stays = current.at_epoch(current.epoch if epoch is None else epoch)
        return stays._replace(state=MemberState.UNREVOKED, assigned=kept, revoking=revoking)
    wanted = target - kept
    free = frozenset(filter(is_free, wanted))
    state = MemberState.STABLE if free == wanted else MemberState.UNRELEASED
    return current.at_epoch(target_epoch)._replace(state=state, assigned=kept | free, revoking=NOTHING)


def _still_owns(owned: Partitions | None, revoking: Partitions) -> bool:
    return owned is None or bool(owned & revoking)
