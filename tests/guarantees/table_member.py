"""A member of a loop into a table, as a process: BOOTSTRAP DSN APPLICATION_ID TOPIC [hold] [named] [batch=N].

It prints `settled N` after its N-th transaction. With `hold` it prints `holding` before its first one, and waits for a
line on stdin.
"""

from __future__ import annotations

import logging
import sys

import semel
from semel.patterns.process_postgres import PostgresMode
from tests.guarantees.test_f1_rows_and_offsets_in_one_transaction import deposit

bootstrap, dsn, application_id, topic, *words = sys.argv[1:]
batch = next((int(word[6:]) for word in words if word.startswith("batch=")), 1_000)
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")

if "hold" in words:
    settle = PostgresMode.settle

    def held(mode: PostgresMode) -> None:
        if mode.is_working and not mode.commits and not mode.aborts:
            print("holding", flush=True)
            sys.stdin.readline()
        settle(mode)

    PostgresMode.settle = held  # type: ignore[method-assign]

semel.process(
    topic,
    semel.Postgres(dsn),
    deposit,
    application_id=application_id,
    bootstrap_servers=bootstrap,
    instance="the one" if "named" in words else None,
    max_records=batch,
    commit_interval_ms=20,
    consumer={"session.timeout.ms": 6_000, "heartbeat.interval.ms": 300},
    on_settled=lambda stats: print(f"settled {stats.commits}", flush=True),
)
