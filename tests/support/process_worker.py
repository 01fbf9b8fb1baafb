"""One instance of the processing loop as a program: `python -m tests.support.process_worker '{"guarantee": ...}'`."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from typing import Any

from semel.client.errors import FencedError
from semel.patterns.process import Output, Processor

FENCED = 3


class Window:
    """Says when a kill would hurt, and keeps that moment open for a while: positions committed and output not sent, or
    output sent and positions not committed."""

    OPEN_S = 0.2

    def __init__(self, guarantee: str) -> None:
        self._after_s = (
            0.0 if guarantee == "at_most_once" else 0.12
        )  # some batches of the unit of work are sent by then
        self._began_s: float | None = None
        self._told = False

    def record(self) -> None:
        now_s = time.monotonic()
        self._began_s = now_s if self._began_s is None else self._began_s
        if not self._told and now_s - self._began_s >= self._after_s:
            self._told = True
            print("window", flush=True)
            time.sleep(self.OPEN_S)

    def settled(self, stats: Any) -> None:
        self._began_s, self._told = None, False
        print(f"settled {stats.records_in} {stats.commits} {stats.aborts}", flush=True)


def main(options: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the loop has its own handler there is nothing to end
    print("started", flush=True)
    delay_s = options.pop("delay_ms", 0) / 1000
    window = Window(options["guarantee"])

    def copy(record: Any) -> Output:
        window.record()
        if delay_s:
            time.sleep(delay_s)
        return Output(record.value, record.key)

    function = (lambda table: table) if options.get("tables") else copy
    try:
        stats = Processor(
            options.pop("source"), options.pop("sink"), function, on_settled=window.settled, **options
        ).run()
    except FencedError as error:
        print(f"fenced: {error}", flush=True)
        return FENCED
    print(f"stopped {stats.records_in} {stats.commits} {stats.aborts}", flush=True)
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    sys.exit(main(json.loads(sys.argv[1])))
