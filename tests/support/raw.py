"""Single requests of the transaction protocol, right or wrong."""

from semel.bench.peers.raw_client import Appended, Fetched, Owner, RawClient, patiently

__all__ = ["Appended", "Fetched", "Owner", "RawClient", "patiently"]
