"""Quix Streams as a peer: counts the records of each key, exactly once, with its RocksDB state and changelog topic.

    python quix_count.py '{"brokers": ..., "id": ..., "source": ..., "target": ..., "commit_s": 1.0, "folder": ...}'

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
        state_dir=job["folder"],
        consumer_extra_config={"isolation.level": "read_committed"},
    )
    source = application.topic(
        job["source"], key_serializer="bytes", key_deserializer="bytes", value_deserializer="bytes"
    )
    target = application.topic(job["target"], key_serializer="bytes", value_serializer="bytes")
    frame = application.dataframe(source)
    begun: list[bool] = []

    def counted(value: bytes, state: Any) -> bytes:
        if not begun:
            begun.append(True)
            print("first", flush=True)
        total = state.get("total", 0) + 1
        state.set("total", total)
        return b"%d" % total

    frame = frame.apply(counted, stateful=True)
    frame.to_topic(target)
    application.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
