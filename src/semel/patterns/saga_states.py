"""What a saga does next: a table of (status, event), pure. The orchestrator's loop journals what it returns.

    running       step after step is ordered; each reply leads to the next
    compensating  a step failed, or did not reply in time: what was done before is undone, last step first. If the one
                  without a reply cannot be undone and was done all the same, the saga is running again
    done, compensated   the two ends

A compensation is tried until it works. From the moment on when it has used up its tries, or its reply is overdue, it is
`stuck`, which `semel saga list --stuck` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from semel.client.errors import ConfigError, FatalError

LONGEST_BACKOFF_MS = 60_000
ENDED = ("done", "compensated")


class SagaStepError(FatalError):
    """A saga needs a step that this program does not have."""


class SagaStep(msgspec.Struct, frozen=True):
    """One step of a saga.

    name        of the step; sagas that are under way name their steps, so it must not change while they are
    do          do(call) -> a result that JSON knows; raises StepFailedError where it is refused for good
    undo        undo(call) takes back what `do` did; None: nothing takes it back, or there is nothing to take back
    service     which participant runs it; its commands are in the topic NAME.SERVICE.commands
    key         key(data) -> text: what the commands are partitioned by, hence whose state `call.state` has; by default
                the id of the saga
    timeout_ms  without a reply for so long, the saga is compensated
    retries     so often `do` is called again after an error that is not a StepFailedError; `undo` is called until it
                works, and counts as stuck after so many
    backoff_ms  before the first of these, doubled each time
    delay_ms    how long to wait before the step
    """

    name: str
    do: Callable[[Any], Any]
    undo: Callable[[Any], Any] | None = None
    service: str = "steps"
    key: Callable[[Any], str] | None = None
    timeout_ms: int = 60_000
    retries: int = 3
    backoff_ms: int = 1_000
    delay_ms: int = 0


class SagaState(msgspec.Struct):
    """A saga as its log has it."""

    saga: str
    status: str
    steps: list[str]
    keys: list[str]  # what the commands of each step are partitioned by
    data: Any
    at: int = 0  # the step that is done or undone
    reached: int = -1  # the last one that was ordered
    waits_for: str = ""  # reply, delay or retry; forget when it has ended
    due_ms: int = 0
    since_ms: int = 0  # when the step began
    tries: int = 0
    stuck: bool = False
    error: str = ""
    results: dict[str, Any] = {}

    @property
    def step(self) -> str:
        return self.steps[self.at]

    @property
    def action(self) -> str:
        return "do" if self.status == "running" else "undo"


class SagaOrder(msgspec.Struct, frozen=True):
    """A command to a participant: do, undo, or forget, as JSON. `attempt` tells retries apart."""

    saga: str
    step: str
    action: str
    attempt: int
    key: str
    data: Any = None
    results: dict[str, Any] = {}
    reply_to: int = -1


class SagaReply(msgspec.Struct, frozen=True):
    """status: done, failed (for good), error (perhaps not the next time), or kept: it was done, and has no undo."""

    step: str
    action: str
    attempt: int
    status: str
    result: Any = None
    error: str = ""


class SagaTable:
    """The steps of a kind of saga, and what follows from an event. Each function of the table changes the saga and
    returns whether its step is to be ordered now."""

    def __init__(self, steps: Iterable[SagaStep], keep_ms: int) -> None:
        self.steps: dict[str, SagaStep] = {step.name: step for step in steps}
        self._keep_ms = keep_ms
        self._table: Mapping[tuple[str, str], Callable[[SagaState, int, Any], bool]] = {
            ("running", "done"): self._next,
            ("running", "failed"): self._compensate_before,
            ("running", "error"): self._retry_or_compensate,
            ("running", "timeout"): self._compensate_this,
            ("running", "due"): self._order,
            ("compensating", "done"): self._previous,
            ("compensating", "kept"): self._go_on,
            ("compensating", "failed"): self._retry,
            ("compensating", "error"): self._retry,
            ("compensating", "timeout"): self._overdue,
            ("compensating", "due"): self._order,
        }

    def begin(self, saga: str, data: Any, now_ms: int) -> tuple[SagaState, list[SagaOrder]]:
        keys = [saga if step.key is None else step.key(data) for step in self.steps.values()]
        if not all(isinstance(key, str) for key in keys):
            raise TypeError(f"the keys of the steps are {keys}; expected text")
        state = SagaState(saga, "running", list(self.steps), keys, data)
        return state, self._orders(state, self._enter(state, now_ms))

    def handle(self, state: SagaState, event: str, now_ms: int, reply: SagaReply | None = None) -> list[SagaOrder]:
        """Changes the saga; the commands that follow. An event that the table does not have changes nothing."""
        self.check(state)
        function = self._table.get((state.status, event))
        return [] if function is None else self._orders(state, function(state, now_ms, reply))

    def check(self, state: SagaState) -> None:
        """A program that does not know a step of a saga could neither do nor undo it."""
        unknown = [name for name in state.steps if name not in self.steps]
        if state.status not in ENDED and unknown:
            raise SagaStepError(
                f"saga {state.saga!r} is {state.status} at step {state.step!r} and has the step {unknown[0]!r}, which "
                f"this program does not have (it has {', '.join(self.steps)}). Go back to a version that has it and "
                "let its sagas end (`semel saga list` shows them); then remove the step"
            )

    def _orders(self, state: SagaState, is_ordered: bool) -> list[SagaOrder]:
        if state.status in ENDED:
            reached = list(zip(state.steps, state.keys, strict=True))[: state.reached + 1]
            return [SagaOrder(state.saga, name, "forget", 0, key) for name, key in reached]
        if not is_ordered:
            return []
        key = state.keys[state.at]
        return [SagaOrder(state.saga, state.step, state.action, state.tries, key, state.data, state.results)]

    # -- forwards ------------------------------------------------------------------------------------------------------
    def _enter(self, state: SagaState, now_ms: int) -> bool:
        state.tries, state.since_ms = 0, now_ms
        delay_ms = self.steps[state.step].delay_ms
        if delay_ms:
            state.waits_for, state.due_ms = "delay", now_ms + delay_ms
            return False
        return self._order(state, now_ms)

    def _order(self, state: SagaState, now_ms: int, _: Any = None) -> bool:
        state.tries += 1
        state.reached = max(state.reached, state.at)
        state.waits_for, state.due_ms = "reply", now_ms + self.steps[state.step].timeout_ms
        return True

    def _next(self, state: SagaState, now_ms: int, reply: SagaReply) -> bool:
        state.results[state.step] = reply.result
        if state.at + 1 == len(state.steps):
            return self._end(state, "done", now_ms)
        state.at += 1
        return self._enter(state, now_ms)

    def _retry_or_compensate(self, state: SagaState, now_ms: int, reply: SagaReply) -> bool:
        if state.tries > self.steps[state.step].retries:
            return self._compensate_before(state, now_ms, reply)
        return self._wait(state, now_ms, reply.error)

    def _wait(self, state: SagaState, now_ms: int, error: str) -> bool:
        backoff_ms = self.steps[state.step].backoff_ms * 2 ** min(state.tries - 1, 20)
        state.waits_for, state.due_ms, state.error = "retry", now_ms + min(backoff_ms, LONGEST_BACKOFF_MS), error
        return False

    # -- backwards -----------------------------------------------------------------------------------------------------
    def _compensate_before(self, state: SagaState, now_ms: int, reply: SagaReply) -> bool:
        """The step did nothing."""
        state.error = f"{state.step}: {reply.error}"
        return self._undo_from(state, state.at - 1, now_ms)

    def _compensate_this(self, state: SagaState, now_ms: int, _: Any) -> bool:
        """The step may have been done, or may be done yet: the participant gets `undo` behind it, and knows. Also of a
        step that has none: to undo those before it, and have it done later, would leave a part of the saga."""
        state.error = f"{state.step}: no reply within {self.steps[state.step].timeout_ms} ms"
        return self._undo(state, state.at, now_ms)

    def _undo_from(self, state: SagaState, at: int, now_ms: int) -> bool:
        while at >= 0 and self.steps[state.steps[at]].undo is None:
            at -= 1
        if at < 0:
            return self._end(state, "compensated", now_ms)
        return self._undo(state, at, now_ms)

    def _undo(self, state: SagaState, at: int, now_ms: int) -> bool:
        state.status, state.at, state.tries, state.since_ms, state.stuck = "compensating", at, 0, now_ms, False
        return self._order(state, now_ms)

    def _previous(self, state: SagaState, now_ms: int, _: Any) -> bool:
        return self._undo_from(state, state.at - 1, now_ms)

    def _go_on(self, state: SagaState, now_ms: int, reply: SagaReply) -> bool:
        """The step without a reply was done, only late."""
        if state.at < state.reached:  # one behind it failed, so this one is as good as undone
            return self._previous(state, now_ms, reply)
        state.status, state.stuck, state.error = "running", False, ""
        return self._next(state, now_ms, reply)

    def _retry(self, state: SagaState, now_ms: int, reply: SagaReply) -> bool:
        state.stuck = state.tries > self.steps[state.step].retries
        return self._wait(state, now_ms, f"undo of {state.step}: {reply.error}")

    def _overdue(self, state: SagaState, now_ms: int, _: Any) -> bool:
        """The command is in its topic, so another one would not help."""
        step = self.steps[state.step]
        state.stuck, state.due_ms = True, now_ms + step.timeout_ms
        state.error = f"undo of {state.step}: no reply within {step.timeout_ms} ms; is {step.service!r} running?"
        return False

    def _end(self, state: SagaState, status: str, now_ms: int) -> bool:
        state.status, state.waits_for, state.stuck = status, "forget", False
        state.due_ms, state.since_ms = now_ms + self._keep_ms, now_ms
        return False


def check_steps(steps: list[SagaStep]) -> None:
    names = [step.name for step in steps]
    if not names or len(set(names)) < len(names) or not all(names):
        raise ConfigError(f"a saga needs steps with different names, not {names}")
    for step in steps:
        for option, lowest in (("timeout_ms", 1), ("retries", 0), ("backoff_ms", 0), ("delay_ms", 0)):
            value = getattr(step, option)
            if type(value) is not int or value < lowest:
                raise ConfigError(f"step {step.name!r} has {option}={value!r}; expected a whole number from {lowest}")
