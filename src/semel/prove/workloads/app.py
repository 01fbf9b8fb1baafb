"""The user's own pipeline from topic to topic, with their function that says what is expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from semel.prove.app import load
from semel.prove.checker import Expectation, Seen
from semel.prove.decks import PLAIN_APIS, READ_APIS, TRANSACTION_APIS, broker_cards, network_cards, process_cards
from semel.prove.inputs import values_up_to
from semel.prove.schedule import Fault
from semel.prove.workloads.base import Workload


class AppWorkload(Workload):
    name = "app"
    help = "your own pipeline: --app module:function"
    spread_ms = 2_000

    @classmethod
    def deck(cls, guarantee: str, *, broker: bool) -> list[Fault]:
        apis = TRANSACTION_APIS if guarantee == "exactly_once" else PLAIN_APIS
        cards = [*network_cards((*apis, *READ_APIS), ""), *cls.producer_cards()]
        cards += [card for card in process_cards("app", ()) for _ in range(6)]
        return [*cards, *broker_cards(("EndTxn.before_response", "EndTxn.after_response"))] if broker else cards

    def groups(self) -> list[tuple[str, str]]:
        return []  # whether it has one is its own business

    def start(self) -> None:
        self.run(
            "app",
            "app",
            {
                "app": self.options["app"],
                "brokers": self.stage.proxy.bootstrap,
                "source": self.source,
                "output": self.outputs[0],
                "application_id": self.application,
            },
        )

    def _outputs_of(self, transactions: int) -> Counter[str]:
        """How often each value must be in the output."""
        function = load(self.options["expected"])
        found: Counter[str] = Counter()
        for value in values_up_to(transactions):
            found.update(_text(out) for out in function(value.encode()))
        return found

    def expectation(self, transactions: int) -> Expectation:
        return Expectation(self.outputs, ids=self._outputs_of(transactions))

    def complete(self, seen: Iterable[Seen], transactions: int) -> bool:
        return not self._outputs_of(transactions) - Counter(_text(record.value or b"") for record in seen)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
