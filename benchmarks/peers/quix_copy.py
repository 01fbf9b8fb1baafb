"""Quix Streams as a peer: copies one topic to another, exactly once. It runs in a virtual environment of its own.

    python quix_copy.py '{"brokers": ..., "id": ..., "source": ..., "target": ..., "commit_s": 1.0}'

It says "first" when the first record is there, and runs until it is ended.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from quixstreams import Application  # type: ignore[import-not-found]


def main(job: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    application = Application(
        broker_address=job["brokers"],
        consumer_group=job["id"],
        auto_offset_reset="earliest",
        processing_guarantee="exactly-once",
        commit_interval=job["commit_s"],
        loglevel=None,
        use_changelog_topics=False,
        consumer_extra_config={"isolation.level": "read_committed"},
    )
    source = application.topic(
        job["source"], key_serializer="bytes", key_deserializer="bytes", value_deserializer="bytes"
    )
    target = application.topic(job["target"], key_serializer="bytes", value_serializer="bytes")
    frame = application.dataframe(source)
    begun: list[bool] = []

    def told(value: bytes) -> None:
        if not begun:
            begun.append(True)
            print("first", flush=True)

    frame = frame.update(told)
    frame.to_topic(target)
    application.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
