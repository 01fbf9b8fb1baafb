"""How faults are inflicted: each is armed at its moment, then looked at again and again until its effect is over.

Everything here runs on one thread that polls (`Inflictor.poll`), but for the signal that a process gets at an API: that
comes from the proxy's thread, so that it arrives before the frame does.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from semel.local.processes import Process
from semel.prove.database import Cut
from semel.prove.proxy import Effect, Rule
from semel.prove.schedule import BROKER, DATABASE, NETWORK, NODE, Fault
from semel.prove.testbed import Outage, OwnBroker, SupervisedProcess, Testbed, send
from semel.prove.workloads import Workload

TASK, EXECUTOR = "task", "executor"  # processes that belong to the driver
ZOMBIE_AFTER_S = 1.0  # a frozen process wakes up so long after its replacement has begun to work
ZOMBIE_SLEEPS_S = 25.0  # at most, should the replacement find nothing to do
ZOMBIE_LIVES_S = 20.0  # by then it has done whatever it could


_numbers = count(1)
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "takeover": signal.SIGSTOP,
    "restart": signal.SIGTERM,
}


class Running:
    """A fault on its way: waiting for its moment, armed, fired, over."""

    def __init__(self, fault: Fault, testbed: Testbed, workload: Workload | None) -> None:
        self.fault = fault
        self.testbed = testbed
        self.workload = workload
        self.armed = False
        self.fired_s = 0.0
        self.over = False
        self.frozen: list[int] = []  # processes that a supervised one has started
        self._zombie: Zombie | None = None

    @property
    def fired(self) -> bool:
        return self.fired_s > 0

    def arm(self) -> None:
        """Its moment has come."""
        self.armed = True

    def poll(self) -> None:
        """After `arm`, until it is over."""

    def disarm(self) -> None:
        """Takes back what has not happened, and ends what lasts."""

    def _fire(self) -> None:
        if not self.fired:
            self.fired_s = time.monotonic()

    @property
    def _lasted(self) -> bool:
        return self.fired and time.monotonic() - self.fired_s >= self.fault.for_ms / 1000

    def _poll_zombie(self, supervised: SupervisedProcess) -> None:
        self._zombie = self._zombie or Zombie(supervised)
        self._zombie.poll()
        self.over = self._zombie.over

    @property
    def own(self) -> OwnBroker:
        assert self.testbed.own is not None, f"{self.fault} needs a broker of one's own"
        return self.testbed.own

    @property
    def supervised(self) -> SupervisedProcess:
        return self.testbed.processes[self.fault.target]

    @property
    def process(self) -> Process | None:
        """The target's, where it is one."""
        return self.own.process if self.fault.target == BROKER else self.supervised.process


class OnTheWire(Running):
    """Something happens to a frame."""

    def arm(self) -> None:
        super().arm()
        self._rule = self.testbed.proxy.add(self._make_rule())

    def _make_rule(self) -> Rule:
        effect = Effect[self.fault.what.upper()]
        return Rule(self.fault.api, effect, nth=self.fault.nth, delay_ms=self.fault.for_ms, client=self.fault.client)

    def poll(self) -> None:
        if self._rule.fired.is_set():
            self._fire()
            self.over = True

    def disarm(self) -> None:
        if self.armed:
            self.testbed.proxy.remove(self._rule)


class AtAnApi(OnTheWire):
    """A process is killed, frozen or replaced when one of its own frames passes."""

    _hit: Process | None = None

    def _make_rule(self) -> Rule:
        is_request = self.fault.side == "request"
        return Rule(
            self.fault.api,
            Effect.DROP_REQUEST if is_request and self.fault.what == "kill" else Effect.PASS,
            nth=self.fault.nth,
            client="driver" if self.fault.target in (TASK, EXECUTOR) else self.fault.target,
            on_request=is_request,
            then=self._act,
        )

    def _act(self) -> None:
        """On the proxy's thread."""
        if self.fault.point:  # the broker delays the request there
            (self.own.faults / self.fault.point).write_text(f"delay={self.fault.for_ms}")
        if self.fault.target in (TASK, EXECUTOR):
            _kill_part(self)
        else:
            self._hit = self.supervised.process
            self.supervised.signal_at_once(_SIGNALS[self.fault.what])

    def poll(self) -> None:
        if not self._rule.fired.is_set():
            return
        self._fire()
        if self.fault.what == "takeover":
            self._poll_zombie(self.supervised)
        elif self.fault.what == "restart":
            self._start_again()
        elif self.fault.what == "kill":
            self.over = True
        elif self._lasted:
            self.supervised.thaw()
            self.over = True

    def _start_again(self) -> None:
        """When it has ended. One that was not ready for SIGTERM yet dies of it, and is started again by others."""
        if self.supervised.process is not self._hit:
            self.over = True
        elif self._hit is None or not self._hit.running:
            self.supervised.start()
            self.over = True

    def disarm(self) -> None:
        super().disarm()
        if self.fired and not self.over and self._zombie is None:
            self.supervised.thaw()


class InTheDatabase(Running):
    """The database's server dies or restarts, or a connection to it breaks at COMMIT."""

    def arm(self) -> None:
        super().arm()
        assert self.workload is not None
        assert self.workload.database is not None, "this workload has no database"
        self._database = self.workload.database
        if self.fault.what.startswith("cut_"):
            kind: Cut = "before" if self.fault.what == "cut_before_commit" else "after"
            self._cuts_before = self._database.proxy.cuts
            self._database.proxy.arm(kind, skip=self.fault.nth - 1)
            return
        if self.fault.what == "kill_backend":
            self._database.kill_a_backend()
        else:
            self._database.restart(with_kill=self.fault.what == "kill")
        self._fire()
        self.over = True

    def poll(self) -> None:
        if not self.over and self._database.proxy.cuts > self._cuts_before:
            self._fire()
            self.over = True

    def disarm(self) -> None:
        if self.armed and not self.over:
            self._database.proxy.disarm()


class AtABrokersPoint(Running):
    """The broker dies, loses its power, is frozen or delayed exactly there."""

    _times = 0

    def arm(self) -> None:
        super().arm()
        self._write()

    def _write(self) -> None:
        action = {"power_cut": "kill", "delay": f"delay={self.fault.for_ms}"}.get(self.fault.what, self.fault.what)
        (self.own.faults / f"{self.fault.point}.fired").unlink(missing_ok=True)
        if self.fault.what == "power_cut":
            self.own.cuts_at[self.fault.point] = self.fault.seed
        (self.own.faults / self.fault.point).write_text(f"{action}:{self.fault.nth}")

    def poll(self) -> None:
        if (self.own.faults / f"{self.fault.point}.fired").exists() and not self.over:
            self._fire()
            self._times += 1
            if self._times < self.fault.times:
                self._write()
                return
        if self.fired and self.fault.what != "stop":
            self.over = True
        elif self._lasted:
            self.own.process.resume()
            self.over = True

    def disarm(self) -> None:
        if not self.armed:
            return
        (self.own.faults / self.fault.point).unlink(missing_ok=True)
        self.own.cuts_at.pop(self.fault.point, None)
        if self.fault.what == "stop":
            self.own.process.resume()


class AtASinksPoint(Running):
    """The driver or a task of it is killed, frozen or replaced exactly there."""

    def arm(self) -> None:
        super().arm()
        self._file = self.testbed.sink_faults / f"{self.fault.point}@{next(_numbers)}"
        written = self._file.with_name(f"{self._file.name}.new")  # read by others as soon as it has its name
        written.write_text(f"{'kill' if self.fault.what == 'kill' else 'stop'}:{self.fault.nth}")
        written.rename(self._file)

    @property
    def _mark(self) -> Path:
        """Is there when it has happened, and holds the process id."""
        return self._file.with_name(f"{self._file.name}.fired")

    def poll(self) -> None:
        if not self._mark.exists():
            return
        self._fire()
        if self.fault.what == "kill":
            self.over = True
        elif self.fault.what == "takeover":
            self._poll_zombie(self.testbed.processes["driver"])
        elif self._lasted:
            self._thaw()

    def _thaw(self) -> None:
        send(signal.SIGCONT, [int(self._mark.read_text())])
        self.over = True

    def disarm(self) -> None:
        if not self.armed:
            return
        self._file.unlink(missing_ok=True)
        if self.fault.what == "stop" and self.fired and not self.over:
            self._thaw()


class OnANode(Running):
    """Something happens to the node of a cluster that leads a partition."""

    _outage: Outage | None = None

    def arm(self) -> None:
        super().arm()
        assert self.testbed.nodes is not None, f"{self.fault} needs a cluster of one's own"
        assert self.workload is not None
        led = self.workload.led_topic(self.fault.leads or "output")
        self._outage = self.testbed.nodes.begin(self.fault, *led)

    def poll(self) -> None:
        assert self._outage is not None
        if self._outage.fired.is_set():
            self._fire()
        self.over = self._outage.over

    def disarm(self) -> None:
        if self._outage is not None:
            self._outage.end()
            self.poll()


class AtAnyTime(Running):
    """What needs no more than a moment."""

    def arm(self) -> None:
        super().arm()
        if _ACTS[self.fault.what](self) is not False:
            self._fire()

    def poll(self) -> None:
        if self._lasted:
            self.disarm()

    def disarm(self) -> None:
        if self.armed and not self.over:
            self.over = True
            if self.fault.what in _ENDS:
                _ENDS[self.fault.what](self)


def _part(running: Running) -> list[int]:
    """Processes of the driver that a fault is for; of the executors, one."""
    driver = running.testbed.processes["driver"]
    return driver.tasks() if running.fault.target == TASK else driver.executors()[:1]


def _kill_part(running: Running) -> bool:
    return send(signal.SIGKILL, _part(running)) > 0


def _kill(running: Running) -> bool:
    if running.fault.target in (TASK, EXECUTOR):
        return _kill_part(running)
    if running.process is not None:
        running.process.kill()
    return True


def _power_cut(running: Running) -> None:
    running.own.power_cut_seed = running.fault.seed
    running.own.process.kill()


def _stop(running: Running) -> bool:
    if running.fault.target in (TASK, EXECUTOR):
        running.frozen = _part(running)
        return send(signal.SIGSTOP, running.frozen) > 0
    if running.process is None or not running.process.running:
        return False
    running.process.pause()
    return True


def _thaw(running: Running) -> None:
    if running.fault.target in (TASK, EXECUTOR):
        send(signal.SIGCONT, running.frozen)
        return
    if running.process is not None and running.process.running:
        running.process.resume()


def _restart(running: Running) -> None:
    if running.fault.target == BROKER:
        if running.own.process.running:
            running.own.broker.stop(timeout_ms=20_000)
    else:
        running.supervised.restart()


def _clock(running: Running) -> None:
    now = running.own.control.clock_offset_ms
    running.own.control.set(clock_offset_ms=now + running.fault.step_ms)


def _checkpoint_lost(running: Running) -> None:
    assert running.workload is not None
    assert running.workload.checkpoint is not None, "this workload has no checkpoint"
    _kill(running)
    shutil.rmtree(running.workload.checkpoint, ignore_errors=True)


_ACTS: dict[str, Callable[[Running], bool | None]] = {
    "kill": _kill,
    "power_cut": _power_cut,
    "stop": _stop,
    "restart": _restart,
    "clock": _clock,
    "disk_full": lambda running: running.own.control.set(disk_is_full=True),
    "checkpoint_lost": _checkpoint_lost,
}
_ENDS: dict[str, Callable[[Running], None]] = {
    "stop": _thaw,
    "disk_full": lambda running: running.own.control.set(disk_is_full=False),
}


class Zombie:
    """A process that stands still while a replacement takes over, and then wakes up."""

    def __init__(self, supervised: SupervisedProcess) -> None:
        self._replacement = supervised
        self._old = supervised.replace()
        self._replaced_s = time.monotonic()
        self._awake_s = 0.0
        self._working_s = 0.0
        self.over = False

    def poll(self) -> None:
        now_s = time.monotonic()
        process = self._replacement.process
        works = process is not None and "working" in process.output
        if not self._working_s and (works or now_s - self._replaced_s >= ZOMBIE_SLEEPS_S):
            self._working_s = now_s
        if self._working_s and not self._awake_s and now_s - self._working_s >= ZOMBIE_AFTER_S:
            self._old.resume()
            self._awake_s = now_s
        if self._awake_s and (not self._old.running or now_s - self._awake_s >= ZOMBIE_LIVES_S):
            self._old.kill()
            self.over = True


def running_of(fault: Fault, testbed: Testbed, workload: Workload | None) -> Running:
    """The way in which a fault is inflicted follows from where it happens."""
    if fault.target == NETWORK:
        kind: type[Running] = OnTheWire
    elif fault.target == NODE:
        kind = OnANode
    elif fault.target == DATABASE:
        kind = InTheDatabase
    elif fault.api:
        kind = AtAnApi
    elif fault.point:
        kind = AtABrokersPoint if fault.target == BROKER else AtASinksPoint
    else:
        kind = AtAnyTime
    return kind(fault, testbed, workload)


class Inflictor:
    def __init__(self, faults: list[Fault], testbed: Testbed, workload: Workload | None = None) -> None:
        self.running = [running_of(fault, testbed, workload) for fault in faults]
        self._began_s = time.monotonic()

    def poll(self) -> None:
        now_ms = (time.monotonic() - self._began_s) * 1000
        for running in self.running:
            if not running.armed and now_ms >= running.fault.at_ms:
                running.arm()
            if running.armed and not running.over:
                running.poll()

    @property
    def lasting(self) -> bool:
        """Whether something that has begun is not over, or has yet to begin."""
        return any(not running.armed or (running.fired and not running.over) for running in self.running)

    def disarm(self) -> None:
        for running in self.running:
            running.disarm()

    @property
    def fired(self) -> list[Fault]:
        return [running.fault for running in self.running if running.fired]
