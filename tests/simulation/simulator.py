"""Complete runs of two or three workers with faults, in one process; links and sessions are real.

The network, the clock and the order of threads are simulated from a seed. A run of minutes takes milliseconds:

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
from tests.simulation.carrier import Cable, FaultyLine
from tests.simulation.case import (
    DEADLY,
    PATIENCE,
    PROGRAM,
    Case,
    CaseResult,
    Numbers,
    Outcome,
    SimulatedWorker,
    find_bound,
    find_violations,
    is_injected,
)
from tests.simulation.simulated_threads import Scheduler, SimulationEnded, WorkerKilled
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

__all__ = ["Case", "CaseResult", "simulate"]

LIMIT = 600.0
DETECTION_SECONDS = 1.0  # seconds until a dead worker's address has refused twice
_DEADLINES = Deadlines(patience=PATIENCE, silence=4.0, grace=2.0)
_CHUNK, _BUDGET = 1024, 8192
_SIMULATED_MODULES = (peer, outbox, mailbox, deadlines, base, carrier)


def simulate(case: Case) -> CaseResult:
    """Run one case, and list its violations. No other link of this process may be open meanwhile."""
    simulation = _Simulation(case)
    with simulation.install():
        simulation.begin()
        simulation.scheduler.run()
    return simulation.result()


class _Simulation:
    """The workers of a case, and the cables between them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.draw = random.Random(case.seed)
        self.scheduler = Scheduler(self.draw, limit=LIMIT)
        self.outcomes = {worker: Outcome() for worker in case.worker_names}
        self.plans = {w: FaultPlan(case.faults, worker=w, act=partial(self._apply_fault, w)) for w in case.worker_names}
        self.cables: dict[frozenset[str], Cable] = {}
        self.lines: list[FaultyLine] = []
        self.applied_faults: list[object] = []
        self.failed_at: float | None = None

    @contextlib.contextmanager
    def install(self) -> Iterator[None]:
        """Context with simulated threads, small chunks, and failpoints of the worker whose code runs."""
        chunk, frame.CHUNK_BYTES = frame.CHUNK_BYTES, _CHUNK
        try:
            with self.scheduler.replace_threading(_SIMULATED_MODULES), failpoints.apply_plan(_WorkerFaultPlans(self)):
                yield
        finally:
            frame.CHUNK_BYTES = chunk

    def begin(self) -> None:
        """Create the cables and start the workers."""
        worker_names = self.case.worker_names
        for index in range(len(worker_names)):
            for other in range(index + 1, len(worker_names)):
                self._connect_pair(worker_names[index], worker_names[other])
        for worker in worker_names:
            self._start(worker)

    def _connect_pair(self, here: str, there: str) -> None:
        ends = {here, there}
        faults = [fault for fault in self.case.lines if {fault.source, fault.destination} == ends]
        line = FaultyLine(faults, self.draw, self.scheduler.sleep, self._schedule)
        line.cable = self.cables[frozenset(ends)] = _SimulatedCable(self, here, there, line)
        self.lines.append(line)

    def _start(self, worker: str) -> None:
        self.scheduler.spawn(partial(self._run_worker, worker), worker, worker, awaited=True)

    def _schedule(self, seconds: float, work: Any) -> None:
        def wait() -> None:
            self.scheduler.sleep(seconds)
            work()

        self.scheduler.spawn(wait, "later")

    # The workers.

    def _run_worker(self, worker: str) -> None:
        outcome = self.outcomes[worker]
        waiters = Waiters()
        links = {there: self._make_link(worker, there, waiters) for there in self.case.worker_names if there != worker}
        session = Session(worker, links, PATIENCE, leave=lambda: _close_links(links))
        try:
            outcome.state = self._run_steps(worker, session, links, outcome)
        except Exception as error:
            outcome.error, outcome.ended_at = error, self.scheduler.now()
            with contextlib.suppress(RunError):
                session.fail(error)
            with contextlib.suppress(RunError):
                session.close()
        self._close_port(worker, "its process has ended")

    def _run_steps(self, worker: str, session: Session, links: Mapping[str, PeerLink], outcome: Outcome) -> Numbers:
        session.hello({})
        session.agree("lesson", "digest", [], lambda ours, theirs: "nothing")
        simulated_worker = SimulatedWorker(self.case.worker_names, worker, links, PATIENCE)
        for step in range(self.case.steps):
            sheet = {"program": PROGRAM, "name": "lesson", "step": step, "rows": 1, "inputs": {}}
            try:
                session.start_step(sheet)
                simulated_worker.step(step, lambda sheet=sheet: session.check_step(sheet))  # type: ignore[misc]
            except BaseException as failure:
                if not isinstance(failure, SimulationEnded | WorkerKilled):
                    session.fail(failure)
                raise
            outcome.applied += 1
            failpoint("step.after")
        session.meet("the end")
        session.close()
        outcome.leftover_tensors = sum(len(link._inbox._tensors) for link in links.values())
        return simulated_worker.state

    def _make_link(self, here: str, there: str, waiters: Waiters) -> PeerLink:
        cable = self.cables[frozenset((here, there))]
        end = next(each for each in cable.ends if each.here == here)
        return PeerLink(
            end,
            Greeting("simulated", here, there),
            self.case.worker_names,
            expect=find_bound,
            budget=_BUDGET,
            window=2 * _BUDGET,
            deadlines=_DEADLINES,
            announce=lambda wait: None,
            waiters=waiters,
            now=self.scheduler.now,
        )

    def _close_port(self, worker: str, why: str) -> None:
        """Simulate a closed port: after a while, other workers are refused twice and give up."""
        for ends, cable in self.cables.items():
            if worker in ends:
                self._schedule(DETECTION_SECONDS, partial(cable.kill, worker, lost_error(worker, why)))

    # Faults.

    def _apply_fault(self, worker: str, fault: Fault, drop: Drop | None) -> None:
        self.applied_faults.append(fault)
        if fault.action in DEADLY:
            self.failed_at = self.scheduler.now()
        match fault.action:
            case Action.KILL:
                self._kill(worker)
            case Action.FREEZE if fault.seconds and fault.seconds < PATIENCE:
                self.scheduler.freeze(worker, fault.seconds)
                self.scheduler.sleep(fault.seconds)
            case Action.FREEZE:
                self.outcomes[worker].killed_at = self.scheduler.now()
                self.scheduler.kill(worker)
                self._stop_thread()
            case Action.DELAY:
                self.scheduler.sleep(fault.seconds)
            case Action.DROP if drop is not None:
                drop(f"failpoint {fault}")
            case Action.RAISE:
                raise_fault(fault)

    def _kill(self, worker: str) -> None:
        self.outcomes[worker].killed_at = self.scheduler.now()
        self._schedule(0.0, partial(self._disconnect_killed, worker))
        self.scheduler.kill(worker)
        self._stop_thread()

    def _disconnect_killed(self, worker: str) -> None:
        """Break the connections of a killed process."""
        for ends, cable in self.cables.items():
            if worker in ends:
                cable.disconnect(f"'{worker}' is gone", reconnects=False)
        if self.case.restart:
            self._schedule(self.case.restart, partial(self._restart, worker))
        else:
            self._close_port(worker, "it was killed")

    def _restart(self, worker: str) -> None:
        self.scheduler.revive(worker)
        self._start(worker)

    def _stop_thread(self) -> None:
        """Stop the current thread, which has killed a worker."""
        if self.scheduler.current_thread.worker:
            self.scheduler.block()
        raise WorkerKilled

    def result(self) -> CaseResult:
        """The outcomes, with violations."""
        reached = sum((plan.reached for plan in self.plans.values()), Counter[str]())
        applied_faults = [*self.applied_faults, *(fault for line in self.lines for fault in line.applied_faults)]
        result = CaseResult(
            self.case,
            self.outcomes,
            reached,
            applied_faults,
            self.scheduler.time,
            self.scheduler.is_hanging,
            self.failed_at,
        )
        result.wrong = find_violations(result)
        result.wrong += [
            f"{name} broke: {error!r}" for name, error in self.scheduler.unexpected_errors if not is_injected(error)
        ]
        return result


class _WorkerFaultPlans(FaultPlan):
    """Applies a failpoint by the plan of the worker whose code reached it."""

    def __init__(self, simulation: _Simulation) -> None:
        super().__init__()
        self._simulation = simulation

    def reach(self, point: str, drop: Drop | None = None) -> None:
        scheduler = self._simulation.scheduler
        if scheduler.is_current() and not scheduler.is_over:
            self._simulation.plans[scheduler.current_thread.acting].reach(point, drop)


class _SimulatedCable(Cable):
    """A cable that calls links in the name of their workers."""

    def __init__(self, simulation: _Simulation, here: str, there: str, frame_filter: FaultyLine) -> None:
        self._simulation = simulation
        super().__init__(here, there, frame_filter)

    def _attach(self, worker: str, receiver: Receiver) -> None:
        super()._attach(worker, _ReceiverProxy(self._simulation, worker, receiver))


class _ReceiverProxy:
    """A worker's link, as called by the network: not while the worker is frozen, and not once it is dead."""

    def __init__(self, simulation: _Simulation, worker: str, receiver: Receiver) -> None:
        self._scheduler = simulation.scheduler
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
        if seconds := self._scheduler.frozen_seconds(self._worker):
            self._scheduler.sleep(seconds)
        if self._given_up or not self._scheduler.is_alive(self._worker):
            return
        current_thread = self._scheduler.current_thread
        before, current_thread.acting = current_thread.acting, self._worker
        try:
            work()
        except WorkerKilled:
            pass
        except RunError as error:  # as a carrier does: it gives up
            self._given_up = True
            self._receiver.lost(error)
        finally:
            current_thread.acting = before


def _close_links(links: Mapping[str, PeerLink]) -> None:
    for link in links.values():
        link.send_farewell()
    for link in links.values():
        link.close()
