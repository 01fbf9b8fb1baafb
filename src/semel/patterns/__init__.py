"""Patterns of exactly-once programs, built on the client."""
