"""Programs of a campaign for entities and sagas: their owners, orchestrators and participants, and their callers."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from semel.client.errors import KafkaError
from semel.patterns.entities import Entities
from semel.patterns.entity_writer import AppendUncertainError, ConflictError
from semel.patterns.saga_states import SagaStep
from semel.patterns.sagas import Sagas, StepCall, StepFailedError
from semel.prove.checker.histories import AppendCall, read_calls
from semel.prove.checker.reading import read
from semel.prove.inputs import TRANSACTION_SIZE, key_of

WRITERS = 50
ATTEMPT_TIMEOUT_MS = 8_000


def say_working() -> Callable[[Any], None]:
    """For `on_settled`: says once that the pipeline works."""
    said: list[bool] = []

    def tell(_: Any) -> None:
        if not said:
            said.append(True)
            print("working", flush=True)

    return tell


# --- entities ---
def run_entity_owner(options: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    entities = Entities(options.pop("name"), bootstrap_servers=options.pop("bootstrap_servers"))
    entities.create(options.pop("partitions"))
    entities.owner(fold=lambda total, _: (total or 0) + 1, on_settled=say_working(), **options).run()
    return 0


class EntityWriters:
    """Appends each number once to its entity, from many threads. What a call led to is noted before and after it, as an
    application does in its database, so that another process goes on where this one was killed."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._path = Path(options["history"])
        self._lock = threading.Lock()
        self._known: dict[str, int] = {}
        self._calls: dict[int, list[AppendCall]] = {}
        for call in read_calls(self._path):
            self._calls.setdefault(int(call.command.partition(".")[0]), []).append(call)
        self._file = self._path.open("a")
        self._file.write("\n")  # behind a line that was not finished
        self._entities = Entities(
            options["name"],
            bootstrap_servers=options["brokers"],
            source="writers",
            client={"client_id": "producer", "request_timeout_ms": 2_500},
        )

    def run(self) -> int:
        self._entities.create(self._options["partitions"])
        failed: list[BaseException] = []

        def work(first: int) -> None:
            try:
                for number in range(first, self._options["upto"] * TRANSACTION_SIZE, WRITERS):
                    self._once(number)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=[first]) for first in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        print(f"fed {self._options['upto']}", flush=True)
        return 0

    def _note(self, **what: Any) -> None:
        with self._lock:
            self._file.write(json.dumps({**what, "at_s": time.monotonic()}) + "\n")
            self._file.flush()

    def _once(self, number: int) -> None:
        calls = self._calls.get(number, [])
        if any(call.outcome == "appended" for call in calls):
            return
        open_call = next((call for call in calls if not call.outcome), None)
        tries, entity = len(calls), key_of(number).decode()
        while True:
            if open_call is None:
                expected = self._known.get(entity, 0)
                open_call = AppendCall(f"{number}.{tries}", entity, expected, 0.0)
                self._note(command=open_call.command, entity=entity, expected=expected)
            outcome, version = self._settle(number, open_call)
            self._note(command=open_call.command, outcome=outcome, version=version)
            self._known[entity] = max(version, self._known.get(entity, 0))
            if outcome == "appended":
                return
            open_call, tries = None, tries + 1

    def _settle(self, number: int, call: AppendCall) -> tuple[str, int]:
        """The same command until its outcome is known."""
        while True:
            try:
                done = self._entities.append(
                    call.entity,
                    call.expected,
                    [b"%07d" % number],
                    command_id=call.command,
                    timeout_ms=ATTEMPT_TIMEOUT_MS,
                )
                return "appended", done.version
            except ConflictError as error:
                return "conflict", error.version
            except AppendUncertainError as error:
                if error.version >= 0:  # the owner has forgotten; the topic has not
                    return self._look_up(call, error.version)
                print(f"again: {error}", flush=True)
            except KafkaError as error:
                print(f"again after {type(error).__name__}: {error}", flush=True)
                time.sleep(0.2)

    def _look_up(self, call: AppendCall, version: int) -> tuple[str, int]:
        for event in read(self._options["direct"], [self._options["name"]]):
            if (event.header("command") or b"").decode() == call.command:
                return "appended", int(event.header("version") or b"0")
        return "conflict", version


def run_entity_writers(options: dict[str, Any]) -> int:
    return EntityWriters(options).run()


# --- sagas: transfers between accounts, in three steps of which the later two may be refused ---
ACCOUNTS = 8


def transfer(number: int) -> dict[str, Any]:
    target = "closed" if number % 5 == 4 else f"account-{(number * 3 + 1) % ACCOUNTS}"
    return {"from": f"account-{number % ACCOUNTS}", "to": target, "cents": 100 + number, "refused": number % 7 == 6}


def _book(call: StepCall, account: str, cents: int) -> int:
    balance: int = call.state.get(account, 0) + cents
    call.state.put(account, balance)
    return balance


def _debit(call: StepCall) -> int:
    return _book(call, call.data["from"], -call.data["cents"])


def _put_back(call: StepCall) -> int:
    return _book(call, call.data["from"], call.data["cents"])


def _credit(call: StepCall) -> int:
    balance = _book(call, call.data["to"], call.data["cents"])
    if call.data["to"] == "closed":
        raise StepFailedError("the account is closed")  # after it was booked: the booking is undone
    return balance


def _take_back(call: StepCall) -> int:
    return _book(call, call.data["to"], -call.data["cents"])


def _confirm(call: StepCall) -> None:
    if call.data["refused"]:
        raise StepFailedError("not confirmed")


def transfers(name: str, brokers: str, delay_ms: int = 0, **options: Any) -> Sagas:
    steps = [
        SagaStep("debit", _debit, _put_back, service="accounts", key=lambda data: data["from"]),
        SagaStep("credit", _credit, _take_back, service="accounts", key=lambda data: data["to"]),
        SagaStep("confirm", _confirm, service="accounts", delay_ms=delay_ms),
    ]
    return Sagas(name, steps, bootstrap_servers=brokers, tick_ms=200, **options)


def run_saga_loop(options: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sagas = transfers(options.pop("name"), options.pop("bootstrap_servers"), options.pop("delay_ms", 0))
    sagas.create(options.pop("partitions"))
    role = options.pop("role")
    options["on_settled"] = say_working()
    loop = sagas.orchestrator(**options) if role == "orchestrator" else sagas.participant("accounts", **options)
    loop.run()
    return 0


def run_saga_starts(options: dict[str, Any]) -> int:
    """Starts all of them, again after a crash: an id starts once."""
    sagas = transfers(
        options["name"], options["brokers"], client={"client_id": "producer", "request_timeout_ms": 2_500}
    )
    sagas.create(options["partitions"])
    done, state = 0, Path(options["state"])
    if state.exists():
        done = int(state.read_text() or "0")
    for number in range(done, options["upto"] * TRANSACTION_SIZE):
        while True:
            try:
                sagas.start(f"s-{number}", transfer(number))
                break
            except KafkaError as error:
                print(f"again after {type(error).__name__}: {error}", flush=True)
                time.sleep(0.2)
        if number % TRANSACTION_SIZE == TRANSACTION_SIZE - 1:
            aside = state.with_suffix(".new")
            aside.write_text(str(number + 1))
            aside.rename(state)
    sagas.close()
    print(f"fed {options['upto']}", flush=True)
    return 0
