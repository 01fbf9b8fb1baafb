"""The transaction coordinator: a pure state machine, the state that its log keeps, and the handlers of its APIs."""

from semel.broker.transactions.coordinator import TransactionCoordinator

__all__ = ["TransactionCoordinator"]
