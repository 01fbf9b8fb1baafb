"""A member of a loop into a table and a topic, as a process: BOOTSTRAP DSN APPLICATION_ID TOPIC OUTPUT [named].

It prints `settled N` after its N-th unit of work.
"""

from __future__ import annotations

import logging
import sys

import semel
from tests.guarantees.test_f9_topics_and_tables_in_one_decision import OPTIONS, both

bootstrap, dsn, application_id, topic, output, *words = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
semel.process(
    topic,
    semel.Postgres(dsn, table="entries", with_topics=True),
    both(output),
    application_id=application_id,
    bootstrap_servers=bootstrap,
    instance="the one" if "named" in words else None,
    on_settled=lambda stats: print(f"settled {stats.commits}", flush=True),
    **OPTIONS,
)
