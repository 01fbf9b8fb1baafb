"""The transaction coordinator: a pure state machine, its journal, and the handlers of its APIs."""

from semel.broker.transactions.coordinator import TransactionCoordinator

__all__ = ["TransactionCoordinator"]
