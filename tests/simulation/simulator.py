"""Whole runs of two or three workers in one thread's time, with faults: the links and the session are the real ones.

What is simulated is the network, the clock and who runs when; a seed decides. A run of minutes takes milliseconds:

>>> print(Case.parse("seed=1 workers=2 steps=2 faults=npu/0:update.begun=kill@2"))
seed=1 workers=2 steps=2 faults=npu/0:update.begun=kill@2
>>> found = simulate(Case.parse("seed=1 workers=2 steps=2 lines=gpu/0>npu/0=cut:3@6"))
>>> found.wrong, [outcome.applied for outcome in found.outcomes.values()]
([], [2, 2])
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tests.simulation import carrier
from tests.simulation.carrier import BadLine, Cable
from tests.simulation.case import (
    DEADLY,
    PATIENCE,
    PROGRAM,
    Case,
    Found,
    Numbers,
    Outcome,
    Pupil,
    bound_of,
    is_planned,
    judge,
)
from tests.simulation.stepping import Gone, Over, Turns
from whale_nebula import faults as failpoints
from whale_nebula.errors import NebulaError, RunError
from whale_nebula.faults import Action, Drop, Fault, FaultPlan, failpoint, raise_fault
from whale_nebula.runtime.session.session import Session
from whale_nebula.transport import base, deadlines, mailbox, outbox, peer
from whale_nebula.transport.base import Receiver, lost_error
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.mailbox import Waiters
from whale_nebula.transport.peer import PeerLink
from whale_nebula.wire import frame
from whale_nebula.wire.greeting import Greeting

__all__ = ["Case", "Found", "simulate"]

LIMIT = 600.0
NOTICED = 1.0  # after how long a dead worker's address has refused twice
_DEADLINES = Deadlines(patience=PATIENCE, silence=4.0, grace=2.0)
_CHUNK, _BUDGET = 1024, 8192
_SWAPPED = (peer, outbox, mailbox, deadlines, base, carrier)


def simulate(case: Case) -> Found:
    """Run one case, and judge it. No other link of this process may be open meanwhile."""
    world = _World(case)
    with world.swapped():
        world.begin()
        world.turns.run()
    return world.found()


class _World:
    """The workers of a case, and all that is between them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.draw = random.Random(case.seed)
        self.turns = Turns(self.draw, limit=LIMIT)
        self.outcomes = {worker: Outcome() for worker in case.row}
        self.plans = {w: FaultPlan(case.faults, worker=w, act=partial(self._act, w)) for w in case.row}
        self.cables: dict[frozenset[str], Cable] = {}
        self.lines: list[BadLine] = []
        self.struck: list[object] = []
        self.when: float | None = None

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Threads that take turns, small chunks, and failpoints that know whose code runs."""
        chunk, frame.CHUNK_BYTES = frame.CHUNK_BYTES, _CHUNK
        try:
            with self.turns.instead_of_threads(_SWAPPED), failpoints.apply_plan(_Everyone(self)):
                yield
        finally:
            frame.CHUNK_BYTES = chunk

    def begin(self) -> None:
        """Lay the cables and start the workers."""
        row = self.case.row
        for one in range(len(row)):
            for other in range(one + 1, len(row)):
                self._lay(row[one], row[other])
        for worker in row:
            self._start(worker)

    def _lay(self, here: str, there: str) -> None:
        ends = {here, there}
        faults = [fault for fault in self.case.lines if {fault.source, fault.destination} == ends]
        line = BadLine(faults, self.draw, self.turns.sleep, self._later)
        line.cable = self.cables[frozenset(ends)] = _Cable(self, here, there, line)
        self.lines.append(line)

    def _start(self, worker: str) -> None:
        self.turns.spawn(partial(self._script, worker), worker, worker, awaited=True)

    def _later(self, seconds: float, work: Any) -> None:
        def wait() -> None:
            self.turns.sleep(seconds)
            work()

        self.turns.spawn(wait, "later")

    # What a worker does.

    def _script(self, worker: str) -> None:
        outcome = self.outcomes[worker]
        waiters = Waiters()
        links = {there: self._link(worker, there, waiters) for there in self.case.row if there != worker}
        session = Session(worker, links, PATIENCE, leave=lambda: _leave(links))
        try:
            outcome.held = self._course(worker, session, links, outcome)
        except Exception as error:
            outcome.error, outcome.at = error, self.turns.now()
            with contextlib.suppress(RunError):
                session.fail(error)
            with contextlib.suppress(RunError):
                session.close()
        self._leave_port(worker, "its process has ended")

    def _course(self, worker: str, session: Session, links: Mapping[str, PeerLink], outcome: Outcome) -> Numbers:
        session.hello({})
        session.agree("lesson", "digest", [], lambda ours, theirs: "nothing")
        pupil = Pupil(self.case.row, worker, links, PATIENCE)
        for step in range(self.case.steps):
            sheet = {"program": PROGRAM, "name": "lesson", "step": step, "rows": 1, "inputs": {}}
            try:
                session.start_step(sheet)
                pupil.step(step, lambda sheet=sheet: session.check_step(sheet))  # type: ignore[misc]
            except BaseException as failure:
                if not isinstance(failure, Over | Gone):
                    session.fail(failure)
                raise
            outcome.applied += 1
            failpoint("step.after")
        session.meet("the end")
        session.close()
        outcome.leftover = sum(len(link._inbox._tensors) for link in links.values())
        return pupil.held

    def _link(self, here: str, there: str, waiters: Waiters) -> PeerLink:
        cable = self.cables[frozenset((here, there))]
        end = next(each for each in cable.ends if each.here == here)
        return PeerLink(
            end,
            Greeting("simulated", here, there),
            self.case.row,
            expect=bound_of,
            budget=_BUDGET,
            window=2 * _BUDGET,
            deadlines=_DEADLINES,
            announce=lambda wait: None,
            waiters=waiters,
            now=self.turns.now,
        )

    def _leave_port(self, worker: str, why: str) -> None:
        """Nobody listens at its address any more: who dials it, or looks for it, is refused twice."""
        for ends, cable in self.cables.items():
            if worker in ends:
                self._later(NOTICED, partial(cable.kill, worker, lost_error(worker, why)))

    # What happens to it.

    def _act(self, worker: str, fault: Fault, drop: Drop | None) -> None:
        self.struck.append(fault)
        if fault.action in DEADLY:
            self.when = self.turns.now()
        match fault.action:
            case Action.KILL:
                self._kill(worker)
            case Action.FREEZE if fault.seconds and fault.seconds < PATIENCE:
                self.turns.freeze(worker, fault.seconds)
                self.turns.sleep(fault.seconds)
            case Action.FREEZE:
                self.outcomes[worker].killed = self.turns.now()
                self.turns.kill(worker)
                self._stop()
            case Action.DELAY:
                self.turns.sleep(fault.seconds)
            case Action.DROP if drop is not None:
                drop(f"failpoint {fault}")
            case Action.RAISE:
                raise_fault(fault)

    def _kill(self, worker: str) -> None:
        self.outcomes[worker].killed = self.turns.now()
        self._later(0.0, partial(self._mourn, worker))
        self.turns.kill(worker)
        self._stop()

    def _mourn(self, worker: str) -> None:
        """What the network does when a process is no more."""
        for ends, cable in self.cables.items():
            if worker in ends:
                cable.cut(f"'{worker}' is gone", mends=False)
        if self.case.restart:
            self._later(self.case.restart, partial(self._again, worker))
        else:
            self._leave_port(worker, "it was killed")

    def _again(self, worker: str) -> None:
        self.turns.revive(worker)
        self._start(worker)

    def _stop(self) -> None:
        """The thread that brought death to a worker goes no further in its code."""
        if self.turns.me.worker:
            self.turns.block()
        raise Gone

    # What came of it.

    def found(self) -> Found:
        """The outcomes, judged."""
        reached = sum((plan.reached for plan in self.plans.values()), Counter[str]())
        struck = [*self.struck, *(fault for line in self.lines for fault in line.struck)]
        found = Found(self.case, self.outcomes, reached, struck, self.turns.time, self.turns.hangs, self.when)
        found.wrong = judge(found)
        found.wrong += [f"{name} broke: {error!r}" for name, error in self.turns.broken if not is_planned(error)]
        return found


class _Everyone(FaultPlan):
    """Leads a failpoint to the plan of the worker whose code reached it."""

    def __init__(self, world: _World) -> None:
        super().__init__()
        self._world = world

    def reach(self, point: str, drop: Drop | None = None) -> None:
        turns = self._world.turns
        if turns.mine() and not turns.over:
            self._world.plans[turns.me.acting].reach(point, drop)


class _Cable(Cable):
    """A cable that calls into links as the workers whose they are."""

    def __init__(self, world: _World, here: str, there: str, plan: BadLine) -> None:
        self._world = world
        super().__init__(here, there, plan)

    def _started(self, worker: str, receiver: Receiver) -> None:
        super()._started(worker, _Ear(self._world, worker, receiver))


class _Ear:
    """A worker's link as the network calls it: not while the worker stands still, and not once it is dead."""

    def __init__(self, world: _World, worker: str, receiver: Receiver) -> None:
        self._turns = world.turns
        self._worker = worker
        self._receiver = receiver
        self._given_up = False

    def up(self, connection: int) -> None:
        self._call(partial(self._receiver.up, connection))

    def message(self, data: bytes) -> None:
        self._call(partial(self._receiver.message, data))

    def down(self, why: str) -> None:
        self._call(partial(self._receiver.down, why))

    def lost(self, error: NebulaError) -> None:
        self._call(partial(self._receiver.lost, error))

    def _call(self, work: Any) -> None:
        if seconds := self._turns.stands(self._worker):
            self._turns.sleep(seconds)
        if self._given_up or not self._turns.lives(self._worker):
            return
        me = self._turns.me
        before, me.acting = me.acting, self._worker
        try:
            work()
        except Gone:
            pass
        except RunError as error:  # what a carrier does with an error of its link: it gives up
            self._given_up = True
            self._receiver.lost(error)
        finally:
            me.acting = before


def _leave(links: Mapping[str, PeerLink]) -> None:
    for link in links.values():
        link.part()
    for link in links.values():
        link.close()
