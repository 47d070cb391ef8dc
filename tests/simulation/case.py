"""A simulated run: its faults as a line of text, and its result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tests.simulation.carrier import LineFault, LineFaultKind
from whale_nebula.errors import NebulaError, OptionError, RunError
from whale_nebula.faults import POINTS, Action, Fault, failpoint
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

PROGRAM, MICRO_BATCHES = 1, 2
WIDTH, NARROW = 640, 128  # with chunks of 1 KiB: a boundary of three, and a gradient of one
SIZES = {"forward": WIDTH, "backward": NARROW, "scalar": 1}


def make_initial_state(place: int) -> Numbers:
    """The initial state of the worker at this position."""
    return np.arange(WIDTH, dtype=np.uint32) * np.uint32(2 * place + 1)


def compute_forward(state: Numbers, received: Numbers, step: int, micro_batch: int) -> Numbers:
    """The value that a worker sends forward."""
    return state * np.uint32(3) + received * np.uint32(5) + np.uint32(7 * step + micro_batch)


def compute_backward(outputs: Numbers, received: Numbers) -> Numbers:
    """The value that a worker sends backward."""
    return outputs[:NARROW] + received * np.uint32(11)


def apply_update(state: Numbers, gradients: Sequence[Numbers], scalar: Numbers) -> Numbers:
    """The state after a step."""
    state = state * np.uint32(13) + scalar
    for gradient in gradients:
        state[:NARROW] += gradient
    return state


def run_undisturbed(workers: int, steps: int) -> list[Numbers]:
    """The final state of each worker in a run without faults."""
    state = [make_initial_state(place) for place in range(workers)]
    for step in range(steps):
        gradients: list[list[Numbers]] = [[] for _ in state]
        scalar = np.zeros(1, np.uint32)
        for micro_batch in range(MICRO_BATCHES):
            received, outputs = np.zeros(WIDTH, np.uint32), []
            for each in state:
                received = compute_forward(each, received, step, micro_batch)
                outputs.append(received)
            scalar = scalar + received[:1]
            returned = np.zeros(NARROW, np.uint32)
            for place in reversed(range(workers)):
                returned = compute_backward(outputs[place], returned)
                gradients[place].append(returned)
        state = [apply_update(each, own, scalar) for each, own in zip(state, gradients, strict=True)]
    return state


def find_bound(key: Key) -> Bound | None:
    """The limit of a received tensor, if the plan has it."""
    known = key.program == PROGRAM and key.kind in SIZES and key.phase == 0
    return Bound("uint32", (SIZES[key.kind],)) if known else None


class SimulatedWorker:
    """A worker of the pipeline, with its links."""

    def __init__(self, worker_names: Sequence[str], worker: str, links: Any, patience: float) -> None:
        self.state = make_initial_state(worker_names.index(worker))
        self._row, self._worker, self._links, self._patience = worker_names, worker, links, patience
        self._place = worker_names.index(worker)

    def step(self, step: int, checked: Callable[[], object]) -> None:
        """Run one step; `checked` returns once all workers agree to it."""
        gradients, scalar = [], np.zeros(1, np.uint32)
        for micro_batch, outputs in self._run_forwards(step):
            scalar = scalar + outputs[:1]
            failpoint("backward.before")
            received = self._receive_optional("backward", step, micro_batch, self._place + 1)
            gradients.append(compute_backward(outputs, np.zeros(NARROW, np.uint32) if received is None else received))
            self._send("backward", step, micro_batch, self._place - 1, gradients[-1])
        checked()
        failpoint("update.before")
        failpoint("update.begun")
        self.state = apply_update(self.state, gradients, self._exchange_scalar(step, scalar))
        failpoint("update.after")

    def _run_forwards(self, step: int) -> Iterator[tuple[int, Numbers]]:
        outputs = []
        for micro_batch in range(MICRO_BATCHES):
            failpoint("forward.before")
            received = self._receive_optional("forward", step, micro_batch, self._place - 1)
            outputs.append(
                compute_forward(
                    self.state, np.zeros(WIDTH, np.uint32) if received is None else received, step, micro_batch
                )
            )
            self._send("forward", step, micro_batch, self._place + 1, outputs[-1])
        yield from enumerate(outputs)

    def _exchange_scalar(self, step: int, scalar: Numbers) -> Numbers:
        """Distribute the last worker's scalar to all."""
        last = len(self._row) - 1
        if self._place != last:
            return self._receive("scalar", step, -1, last)
        for place in range(last):
            self._send("scalar", step, -1, place, scalar)
        return scalar

    def _receive_optional(self, kind: str, step: int, micro_batch: int, place: int) -> Numbers | None:
        return self._receive(kind, step, micro_batch, place) if 0 <= place < len(self._row) else None

    def _receive(self, kind: str, step: int, micro_batch: int, place: int) -> Numbers:
        there = self._row[place]
        key = self._make_key(kind, step, micro_batch, there, self._worker)
        received: Numbers = self._links[there].receive(key, self._patience)
        return received

    def _send(self, kind: str, step: int, micro_batch: int, place: int, numbers: Numbers) -> None:
        if 0 <= place < len(self._row):
            there = self._row[place]
            self._links[there].send(self._make_key(kind, step, micro_batch, self._worker, there), numbers)

    def _make_key(self, kind: Any, step: int, micro_batch: int, source: str, destination: str) -> Key:
        return Key(kind, PROGRAM, step, 0, micro_batch, 0, source, destination)


NAMES = ("gpu/0", "npu/0", "tpu/0")
PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A run with its faults; its text contains all that is needed to repeat it.

    `restart`: seconds after which a killed worker is restarted.
    """

    seed: int
    workers: int = 2
    steps: int = 3
    faults: tuple[Fault, ...] = ()
    lines: tuple[LineFault, ...] = ()
    restart: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the text form."""
        try:
            parts = dict(word.split("=", 1) for word in text.split())
            unknown = parts.keys() - {"seed", "workers", "steps", "faults", "lines", "restart"}
            if unknown:
                raise ValueError(f"{', '.join(sorted(unknown))} is not part of a case")
            return cls(
                int(parts["seed"]),
                int(parts.get("workers", 2)),
                int(parts.get("steps", 3)),
                tuple(map(Fault.parse, filter(None, parts.get("faults", "").split(",")))),
                tuple(map(LineFault.parse, filter(None, parts.get("lines", "").split(",")))),
                float(parts.get("restart", 0)),
            )
        except (KeyError, ValueError) as error:
            raise OptionError(f"{text!r} is not a case", why=str(error), mend="seed=1 workers=2 steps=3") from None

    def __str__(self) -> str:
        parts = [f"seed={self.seed} workers={self.workers} steps={self.steps}"]
        parts += ["faults=" + ",".join(map(str, self.faults))] if self.faults else []
        parts += ["lines=" + ",".join(map(str, self.lines))] if self.lines else []
        parts += [f"restart={self.restart:g}"] if self.restart else []
        return " ".join(parts)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The names of its workers."""
        return NAMES[: self.workers]


@dataclass(slots=True)
class Outcome:
    """The end of one worker: normally, with its final `state`, by an error, or killed."""

    applied: int = 0
    state: Numbers | None = None
    error: BaseException | None = None
    ended_at: float = 0.0
    killed_at: float | None = None
    leftover_tensors: int = 0


@dataclass(slots=True)
class CaseResult:
    """The result of a case; `wrong` lists violations in words."""

    case: Case
    outcomes: dict[str, Outcome]
    reached: Counter[str]
    applied_faults: list[object]
    seconds: float = 0.0
    is_hanging: bool = False
    failed_at: float | None = None  # the time at which a worker was killed or failed
    wrong: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every worker completed the run."""
        return all(outcome.state is not None for outcome in self.outcomes.values())


# A simulated worker has no certificate, and reports a failure only if there is one.
_UNREACHABLE = ("certificate.", "checkpoint.", "failure.telling")  # the simulated runs renew and save nothing
REACHABLE_POINTS = tuple(name for name in POINTS if not name.startswith(_UNREACHABLE))
_SECONDS_BY_ACTION = {Action.DELAY: (0.5,), Action.FREEZE: (3.0, 0.0)}
_SINGLE_HIT_POINTS = ("hello.", "agree.", "meet.", "link.")
_LONG = 2 * PATIENCE


def generate_grid(hits: tuple[int, ...] = (1, 2, 3, 5)) -> Iterator[Case]:
    """Each failpoint × worker × action × hit; then each fault of a line × frame × direction."""
    for point in REACHABLE_POINTS:
        for worker in NAMES[:2]:
            for action in Action:
                if action is Action.DROP and not POINTS[point].connection:
                    continue
                for seconds in _SECONDS_BY_ACTION.get(action, (0.0,)):
                    for hit in (1,) if point.startswith(_SINGLE_HIT_POINTS) else hits:
                        fault = Fault(point, action, seconds, hit, worker=worker)
                        yield Case(hit, faults=(fault,), lines=_list_resets(point))
    for kind in LineFaultKind:
        for here, there in (NAMES[:2], NAMES[1::-1]):
            for number in range(0, 40, 2):
                for seconds in _list_seconds(kind):
                    yield Case(number, lines=(LineFault(here, there, kind, number, seconds),))


def _list_resets(point: str) -> tuple[LineFault, ...]:
    """Resets that cause a failpoint of broken connections."""
    if not point.startswith(("connection.", "frames.")):
        return ()
    return tuple(LineFault(*NAMES[:2], LineFaultKind.RESET, number) for number in (6, 9, 12, 15, 18))


def _list_seconds(kind: LineFaultKind) -> tuple[float, ...]:
    return (0.5, 5.0, _LONG) if kind in (LineFaultKind.CUT, LineFaultKind.SILENCE) else (0.0,)


def make_random_case(seed: int) -> Case:
    """A case with one to three faults of both kinds, which depends only on the seed.

    >>> make_random_case(7) == make_random_case(7)
    True
    """
    draw = random.Random(seed)
    workers = draw.choice((2, 2, 3))
    steps = draw.randint(1, 4)
    count = draw.choice((1, 1, 2, 2, 3))
    faults: list[Fault] = []
    lines: list[LineFault] = []
    for _ in range(count):
        if draw.random() < 0.4:
            faults.append(_draw_fault(draw, NAMES[:workers], steps))
        else:
            lines.append(_draw_line_fault(draw, NAMES[:workers], steps))
    kills = any(fault.action is Action.KILL for fault in faults)
    restart = draw.choice((0.0, 0.5, 3.0)) if kills else 0.0
    return Case(seed, workers, steps, tuple(faults), tuple(lines), restart)


def _draw_fault(draw: random.Random, worker_names: tuple[str, ...], steps: int) -> Fault:
    point = draw.choice((*REACHABLE_POINTS, "failure.telling"))
    actions = [action for action in Action if action is not Action.DROP or POINTS[point].connection]
    action = draw.choice(actions)
    seconds = draw.choice(_SECONDS_BY_ACTION.get(action, (0.0,)))
    return Fault(point, action, seconds, draw.randint(1, 2 * steps), worker=draw.choice(worker_names))


def _draw_line_fault(draw: random.Random, worker_names: tuple[str, ...], steps: int) -> LineFault:
    here, there = draw.sample(worker_names, 2)
    kind = draw.choice(list(LineFaultKind))
    return LineFault(here, there, kind, draw.randrange(6 + 7 * steps), draw.choice(_list_seconds(kind)))


DEADLY = (Action.KILL, Action.RAISE)


def is_injected(error: BaseException) -> bool:
    """Whether a failpoint raised the error."""
    return isinstance(error, RunError) and "failpoint" in str(error)


def may_stop(case: Case) -> bool:
    """Whether the case may stop a run; all others must complete."""
    frozen = [f for f in case.faults if f.action is Action.FREEZE and (not f.seconds or f.seconds >= PATIENCE)]
    longest = max([0.0, *(fault.seconds for fault in case.lines), *(fault.seconds for fault in case.faults)])
    return (
        bool(frozen)
        or any(fault.action in DEADLY for fault in case.faults)
        or any(fault.kind is LineFaultKind.LOSE for fault in case.lines)
        or longest >= PATIENCE / 2
    )


def find_violations(result: CaseResult) -> list[str]:
    """List violations: a hang, another state, an error that names no worker, a worker that completes alone."""
    case, outcomes = result.case, result.outcomes
    living = {worker: each for worker, each in outcomes.items() if each.killed_at is None}
    wrong = ["it hangs"] if result.is_hanging else []
    expected = dict(zip(case.worker_names, run_undisturbed(case.workers, case.steps), strict=True))
    for worker, each in outcomes.items():
        if each.state is not None and (each.state.tobytes() != expected[worker].tobytes() or each.leftover_tensors):
            wrong.append(f"{worker} has come to something else ({each.leftover_tensors} tensors are left)")
    for worker, each in living.items():
        if each.state is None and each.error is None and not result.is_hanging:
            wrong.append(f"{worker} has no end")
        if each.error is not None:
            wrong += _misnamed_workers(case, worker, each.error)
    if not may_stop(case) and not result.is_complete:
        wrong.append(f"it stopped: {next((str(e.error) for e in outcomes.values() if e.error), 'nobody said why')}")
    applied = [each.applied for each in outcomes.values()]
    if max(applied) - min(applied) > 1 and not case.restart:
        wrong.append(f"steps applied: {applied}")
    if any(each.state is not None for each in living.values()) and min(a.applied for a in living.values()) < case.steps:
        wrong.append(f"one has ended well, and not all have taken all steps: {applied}")
    return wrong + _find_late_stops(result, living)


def _misnamed_workers(case: Case, worker: str, error: BaseException) -> list[str]:
    if not isinstance(error, NebulaError):
        return [f"{worker} stopped by {error!r}"]
    others = [each for each in case.worker_names if each != worker]
    named = is_injected(error) or any(each in str(error) for each in others)
    return [] if named else [f"{worker} stopped without a name: {error}"]


def _find_late_stops(result: CaseResult, living: Mapping[str, Outcome]) -> list[str]:
    """Violations of the rule that peers of a dead or failed worker stop within two seconds."""
    (only,) = result.applied_faults if len(result.applied_faults) == 1 else (None,)
    if result.failed_at is None or only is None or result.case.restart:
        return []  # another fault may have delayed them
    limit = result.failed_at + 2.0
    late = {
        worker: each.ended_at - result.failed_at
        for worker, each in living.items()
        if each.error and each.ended_at > limit
    }
    return [f"{worker} stopped {seconds:.1f} s after another" for worker, seconds in late.items()]
