"""The state machine as a picture and as a grid, for the docs: `python -m semel.broker.transactions.diagram`."""

from __future__ import annotations

from semel.broker.transactions.states import CELLS, CHECKS, TransactionEvent, TxnRule, TxnState

SEEN = [state for state in TxnState if state not in (TxnState.DEAD, TxnState.PREPARE_EPOCH_FENCE)]


def diagram() -> str:
    """A Mermaid state diagram: one arrow for each pair of states, with the events that lead along it."""
    arrows: dict[tuple[TxnState, TxnState], list[str]] = {}
    for (state, event), rules in CELLS.items():
        for rule in rules:
            if rule.to is not None and event.value not in arrows.setdefault((state, rule.to), []):
                arrows[state, rule.to].append(event.value)
    lines = ["stateDiagram-v2", f"    [*] --> {TxnState.EMPTY.label}: {TransactionEvent.INIT.value}"]
    lines += [f"    {a.label} --> {b.label}: {', '.join(events)}" for (a, b), events in sorted(arrows.items())]
    return "\n".join([*lines, f"    {TxnState.DEAD.label} --> [*]"])


def grid() -> str:
    """Every cell: the first guard that holds decides. `=` means that nothing changes."""
    lines = ["| event | first | in state | then |", "|---|---|---|---|"]
    for event in TransactionEvent:
        checks = "; ".join(f"{guard.text}: {error.name}" for guard, error in CHECKS[event]) or "-"
        for number, (states, rules) in enumerate(_cells_of(event)):
            names = ", ".join(state.label for state in states)
            text = "; ".join(map(_describe, rules))
            lines.append(
                f"| {event.value if number == 0 else ''} | {checks if number == 0 else ''} | {names} | {text} |"
            )
    return "\n".join(lines)


def _cells_of(event: TransactionEvent) -> list[tuple[list[TxnState], tuple[TxnRule, ...]]]:
    """The cells of an event, states with the same rules together."""
    groups: list[tuple[list[TxnState], tuple[TxnRule, ...]]] = []
    for state in SEEN:
        rules = CELLS[state, event]
        for states, known in groups:
            if known == rules:
                states.append(state)
                break
        else:
            groups.append(([state], rules))
    return groups


def _describe(rule: TxnRule) -> str:
    when = "" if rule.when.text == "always" else f"{rule.when.text}: "
    to = "=" if rule.to is None else f"-> {rule.to.label}"
    if rule.to is not None and rule.change is not None:
        to += f" ({rule.change.__name__})"
    return f"{when}{to}" if rule.error.name == "NONE" else f"{when}{rule.error.name} {to}".removesuffix(" =")


if __name__ == "__main__":
    print(f"{diagram()}\n\n{grid()}")
