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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from whale_nebula.errors import NebulaError, OptionError, RunError
from whale_nebula.runtime.session import Session
from whale_nebula.testing import carrier, failpoints
from whale_nebula.testing.carrier import Cable
from whale_nebula.testing.failpoints import failpoint
from whale_nebula.testing.fault_plan import Action, Drop, Fault, FaultPlan, fail
from whale_nebula.testing.lesson import PROGRAM, Numbers, Pupil, bound, undisturbed
from whale_nebula.testing.line_faults import BadLine, Ill, LineFault
from whale_nebula.testing.stepping import Gone, Over, Turns
from whale_nebula.transport import clock, mailbox, outbox, peer, tally
from whale_nebula.transport.base import lost
from whale_nebula.transport.carrier import Receiver
from whale_nebula.transport.deadlines import Deadlines
from whale_nebula.transport.peer import PeerLink
from whale_nebula.wire import frame
from whale_nebula.wire.greeting import Greeting

NAMES = ("gpu/0", "npu/0", "tpu/0")
PATIENCE, LIMIT = 20.0, 600.0
NOTICED = 1.0  # after how long a dead worker's address has refused twice
_DEADLINES = Deadlines(patience=PATIENCE, silence=4.0, grace=2.0)
_CHUNK, _BUDGET = 1024, 8192
_DEADLY = (Action.KILL, Action.RAISE)
_SWAPPED = (peer, outbox, mailbox, clock, tally, carrier)


@dataclass(frozen=True, slots=True)
class Case:
    """A run and what goes wrong in it; as text it is all that is needed to run it again.

    `restart`: a worker that is killed comes again after so many seconds.
    """

    seed: int
    workers: int = 2
    steps: int = 3
    faults: tuple[Fault, ...] = ()
    lines: tuple[LineFault, ...] = ()
    restart: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` wrote."""
        try:
            parts = dict(word.split("=", 1) for word in text.split())
            unknown = parts.keys() - {"seed", "workers", "steps", "faults", "lines", "restart"}
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))} is no part of a case")
            return cls(
                int(parts["seed"]),
                int(parts.get("workers", 2)),
                int(parts.get("steps", 3)),
                tuple(map(Fault.parse, filter(None, parts.get("faults", "").split(",")))),
                tuple(map(LineFault.parse, filter(None, parts.get("lines", "").split(",")))),
                float(parts.get("restart", 0)),
            )
        except (KeyError, ValueError) as error:
            raise OptionError(f"{text!r} is no case", why=str(error), mend="seed=1 workers=2 steps=3") from None

    def __str__(self) -> str:
        parts = [f"seed={self.seed} workers={self.workers} steps={self.steps}"]
        parts += ["faults=" + ",".join(map(str, self.faults))] if self.faults else []
        parts += ["lines=" + ",".join(map(str, self.lines))] if self.lines else []
        parts += [f"restart={self.restart:g}"] if self.restart else []
        return " ".join(parts)

    @property
    def row(self) -> tuple[str, ...]:
        """Its workers."""
        return NAMES[: self.workers]


@dataclass(slots=True)
class Outcome:
    """How one worker ended: by itself (`held` is what it holds), by an error, or killed."""

    applied: int = 0
    held: Numbers | None = None
    error: BaseException | None = None
    at: float = 0.0
    killed: float | None = None
    leftover: int = 0


@dataclass(slots=True)
class Found:
    """What came of a case; `wrong` says in words what must not be."""

    case: Case
    outcomes: dict[str, Outcome]
    reached: Counter[str]
    struck: list[object]
    seconds: float = 0.0
    hangs: bool = False
    when: float | None = None  # a worker was killed, or failed
    wrong: list[str] = field(default_factory=list)

    @property
    def went_on(self) -> bool:
        """Whether every worker came to its end."""
        return all(outcome.held is not None for outcome in self.outcomes.values())


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
        self.draw = random.Random(case.seed)  # noqa: S311 - nothing secret
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
            with self.turns.instead_of_threads(_SWAPPED), failpoints.planned(_Everyone(self)):
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
        links = {there: self._link(worker, there) for there in self.case.row if there != worker}
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

    def _link(self, here: str, there: str) -> PeerLink:
        cable = self.cables[frozenset((here, there))]
        end = next(each for each in cable.ends if each.here == here)
        return PeerLink(
            end,
            Greeting("simulated", here, there),
            self.case.row,
            expect=bound,
            budget=_BUDGET,
            window=2 * _BUDGET,
            deadlines=_DEADLINES,
            announce=lambda wait: None,
            now=self.turns.now,
        )

    def _leave_port(self, worker: str, why: str) -> None:
        """Nobody listens at its address any more: who dials it, or looks for it, is refused twice."""
        for ends, cable in self.cables.items():
            if worker in ends:
                self._later(NOTICED, partial(cable.kill, worker, lost(worker, why)))

    # What happens to it.

    def _act(self, worker: str, fault: Fault, drop: Drop | None) -> None:
        self.struck.append(fault)
        if fault.action in _DEADLY:
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
                fail(fault)

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
        found.wrong += [f"{name} broke: {error!r}" for name, error in self.turns.broken if not _planned(error)]
        return found


class _Everyone(FaultPlan):
    """Leads a failpoint to the plan of the worker whose code reached it."""

    def __init__(self, world: _World) -> None:
        super().__init__()
        self._world = world

    def reach(self, point: str, drop: Drop | None = None) -> None:
        """A failpoint is reached."""
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
        """A fresh connection."""
        self._call(partial(self._receiver.up, connection))

    def message(self, data: bytes) -> None:
        """A frame."""
        self._call(partial(self._receiver.message, data))

    def down(self, why: str) -> None:
        """The connection is gone."""
        self._call(partial(self._receiver.down, why))

    def lost(self, error: NebulaError) -> None:
        """There will be none."""
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


def _planned(error: BaseException) -> bool:
    return isinstance(error, RunError) and "failpoint" in str(error)


def fatal(case: Case) -> bool:
    """Whether such a case may stop a run; all others must go on."""
    frozen = [f for f in case.faults if f.action is Action.FREEZE and (not f.seconds or f.seconds >= PATIENCE)]
    longest = max([0.0, *(fault.seconds for fault in case.lines), *(fault.seconds for fault in case.faults)])
    return (
        bool(frozen)
        or any(fault.action in _DEADLY for fault in case.faults)
        or any(fault.ill is Ill.LOSE for fault in case.lines)
        or longest >= PATIENCE / 2
    )


def judge(found: Found) -> list[str]:
    """What must not be: a hang, another model, a stop without a name, one that ends well where others do not."""
    case, outcomes = found.case, found.outcomes
    living = {worker: each for worker, each in outcomes.items() if each.killed is None}
    wrong = ["it hangs"] if found.hangs else []
    expected = dict(zip(case.row, undisturbed(case.workers, case.steps), strict=True))
    for worker, each in outcomes.items():
        if each.held is not None and (each.held.tobytes() != expected[worker].tobytes() or each.leftover):
            wrong.append(f"{worker} has come to something else ({each.leftover} tensors are left)")
    for worker, each in living.items():
        if each.held is None and each.error is None and not found.hangs:
            wrong.append(f"{worker} has no end")
        if each.error is not None:
            wrong += _misnamed(case, worker, each.error)
    if not fatal(case) and not found.went_on:
        wrong.append(f"it stopped: {next((str(e.error) for e in outcomes.values() if e.error), 'nobody said why')}")
    applied = [each.applied for each in outcomes.values()]
    if max(applied) - min(applied) > 1 and not case.restart:
        wrong.append(f"steps applied: {applied}")
    if any(each.held is not None for each in living.values()) and min(a.applied for a in living.values()) < case.steps:
        wrong.append(f"one has ended well, and not all have taken all steps: {applied}")
    return wrong + _late(found, living)


def _misnamed(case: Case, worker: str, error: BaseException) -> list[str]:
    if not isinstance(error, NebulaError):
        return [f"{worker} stopped by {error!r}"]
    others = [each for each in case.row if each != worker]
    named = _planned(error) or any(each in str(error) for each in others)
    return [] if named else [f"{worker} stopped without a name: {error}"]


def _late(found: Found, living: Mapping[str, Outcome]) -> list[str]:
    """The peers of a worker that is dead or has failed stop within two seconds."""
    (only,) = found.struck if len(found.struck) == 1 else (None,)
    if found.when is None or only is None or found.case.restart:
        return []  # something else may have kept them
    limit = found.when + 2.0
    late = {worker: each.at - found.when for worker, each in living.items() if each.error and each.at > limit}
    return [f"{worker} stopped {seconds:.1f} s after another" for worker, seconds in late.items()]
