"""An instance of the processing loop: `python -m semel.prove.workers.loop JSON`. Copies, and names the unit of work."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any

from semel.client.errors import FencedError
from semel.patterns.process import Output, Processor

FENCED = 3


class Copier:
    """Each record goes on as it is, with a header that names the unit of work."""

    def __init__(self, name: str, delay_s: float) -> None:
        self._name = f"{name}-{os.getpid()}"
        self._unit = 0
        self._delay_s = delay_s

    def __call__(self, record: Any) -> Output:
        if self._delay_s:
            time.sleep(self._delay_s)
        return Output(record.value, record.key, headers=[("txn", f"{self._name}-{self._unit}".encode())])

    def settled(self, stats: Any) -> None:
        if not self._unit:
            print("working", flush=True)
        self._unit += 1


def main(options: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop has its own handler there is nothing to end
    copier = Copier(options["instance"], options.pop("delay_ms") / 1000)
    try:
        Processor(options.pop("source"), options.pop("sink"), copier, on_settled=copier.settled, **options).run()
    except FencedError as error:
        print(f"fenced: {error}", flush=True)
        return FENCED
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    sys.exit(main(json.loads(sys.argv[1])))
