"""A simulated run: its faults as a line of text, and its result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tests.simulation.carrier import Ill, LineFault
from whale_nebula.errors import NebulaError, OptionError, RunError
from whale_nebula.faults import POINTS, Action, Fault, failpoint
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.buffers import Bound

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

PROGRAM, MICRO_BATCHES = 1, 2
WIDTH, NARROW = 640, 128  # with chunks of 1 KiB: a boundary of three, and a gradient of one
SIZES = {"forward": WIDTH, "backward": NARROW, "scalar": 1}


def fresh(place: int) -> Numbers:
    """What the worker at this place of the row holds at the start."""
    return np.arange(WIDTH, dtype=np.uint32) * np.uint32(2 * place + 1)


def ahead(held: Numbers, came: Numbers, step: int, micro_batch: int) -> Numbers:
    """What a worker sends forwards."""
    return held * np.uint32(3) + came * np.uint32(5) + np.uint32(7 * step + micro_batch)


def back(kept: Numbers, came: Numbers) -> Numbers:
    """What a worker sends backwards."""
    return kept[:NARROW] + came * np.uint32(11)


def taught(held: Numbers, gradients: Sequence[Numbers], scalar: Numbers) -> Numbers:
    """What it holds after a step."""
    held = held * np.uint32(13) + scalar
    for gradient in gradients:
        held[:NARROW] += gradient
    return held


def run_undisturbed(workers: int, steps: int) -> list[Numbers]:
    """What each worker holds at the end of a good run."""
    held = [fresh(place) for place in range(workers)]
    for step in range(steps):
        gradients: list[list[Numbers]] = [[] for _ in held]
        scalar = np.zeros(1, np.uint32)
        for micro_batch in range(MICRO_BATCHES):
            came, kept = np.zeros(WIDTH, np.uint32), []
            for each in held:
                came = ahead(each, came, step, micro_batch)
                kept.append(came)
            scalar = scalar + came[:1]
            returned = np.zeros(NARROW, np.uint32)
            for place in reversed(range(workers)):
                returned = back(kept[place], returned)
                gradients[place].append(returned)
        held = [taught(each, own, scalar) for each, own in zip(held, gradients, strict=True)]
    return held


def bound_of(key: Key) -> Bound | None:
    """What may come."""
    known = key.program == PROGRAM and key.kind in SIZES and key.phase == 0
    return Bound("uint32", (SIZES[key.kind],)) if known else None


class Pupil:
    """One worker of the row, with its links."""

    def __init__(self, row: Sequence[str], worker: str, links: Any, patience: float) -> None:
        self.held = fresh(row.index(worker))
        self._row, self._worker, self._links, self._patience = row, worker, links, patience
        self._place = row.index(worker)

    def step(self, step: int, checked: Callable[[], object]) -> None:
        """Take one step; `checked` returns once all agree to it."""
        gradients, scalar = [], np.zeros(1, np.uint32)
        for micro_batch, kept in self._forwards(step):
            scalar = scalar + kept[:1]
            failpoint("backward.before")
            came = self._get("backward", step, micro_batch, self._place + 1)
            gradients.append(back(kept, np.zeros(NARROW, np.uint32) if came is None else came))
            self._put("backward", step, micro_batch, self._place - 1, gradients[-1])
        checked()
        failpoint("update.before")
        failpoint("update.begun")
        self.held = taught(self.held, gradients, self._share_of(step, scalar))
        failpoint("update.after")

    def _forwards(self, step: int) -> Iterator[tuple[int, Numbers]]:
        kept = []
        for micro_batch in range(MICRO_BATCHES):
            failpoint("forward.before")
            came = self._get("forward", step, micro_batch, self._place - 1)
            kept.append(ahead(self.held, np.zeros(WIDTH, np.uint32) if came is None else came, step, micro_batch))
            self._put("forward", step, micro_batch, self._place + 1, kept[-1])
        yield from enumerate(kept)

    def _share_of(self, step: int, scalar: Numbers) -> Numbers:
        """The last one's scalar, at all."""
        last = len(self._row) - 1
        if self._place != last:
            return self._take("scalar", step, -1, last)
        for place in range(last):
            self._put("scalar", step, -1, place, scalar)
        return scalar

    def _get(self, kind: str, step: int, micro_batch: int, place: int) -> Numbers | None:
        return self._take(kind, step, micro_batch, place) if 0 <= place < len(self._row) else None

    def _take(self, kind: str, step: int, micro_batch: int, place: int) -> Numbers:
        there = self._row[place]
        key = self._key(kind, step, micro_batch, there, self._worker)
        came: Numbers = self._links[there].receive(key, self._patience)
        return came

    def _put(self, kind: str, step: int, micro_batch: int, place: int, numbers: Numbers) -> None:
        if 0 <= place < len(self._row):
            there = self._row[place]
            self._links[there].send(self._key(kind, step, micro_batch, self._worker, there), numbers)

    def _key(self, kind: Any, step: int, micro_batch: int, source: str, destination: str) -> Key:
        return Key(kind, PROGRAM, step, 0, micro_batch, 0, source, destination)


NAMES = ("gpu/0", "npu/0", "tpu/0")
PATIENCE = 20.0


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


# A simulated worker has no certificate, and tells of a failure only where there is one.
_ELSEWHERE = ("certificate.", "checkpoint.", "failure.telling")  # the simulated runs renew and save nothing
REACHED = tuple(name for name in POINTS if not name.startswith(_ELSEWHERE))
_SECONDS = {Action.DELAY: (0.5,), Action.FREEZE: (3.0, 0.0)}
_ONCE = ("hello.", "agree.", "meet.", "link.")
_LONG = 2 * PATIENCE


def grid(hits: tuple[int, ...] = (1, 2, 3, 5)) -> Iterator[Case]:
    """Each failpoint × worker × action × how often it was reached before; then each ill of a line × frame × way."""
    for point in REACHED:
        for worker in NAMES[:2]:
            for action in Action:
                if action is Action.DROP and not POINTS[point].connection:
                    continue
                for seconds in _SECONDS.get(action, (0.0,)):
                    for hit in (1,) if point.startswith(_ONCE) else hits:
                        fault = Fault(point, action, seconds, hit, worker=worker)
                        yield Case(hit, faults=(fault,), lines=_faults_of_point(point))
    for ill in Ill:
        for here, there in (NAMES[:2], NAMES[1::-1]):
            for number in range(0, 40, 2):
                for seconds in _seconds_of(ill):
                    yield Case(number, lines=(LineFault(here, there, ill, number, seconds),))


def _faults_of_point(point: str) -> tuple[LineFault, ...]:
    """What brings a failpoint about that is about broken connections."""
    if not point.startswith(("connection.", "frames.")):
        return ()
    return tuple(LineFault(*NAMES[:2], Ill.RESET, number) for number in (6, 9, 12, 15, 18))


def _seconds_of(ill: Ill) -> tuple[float, ...]:
    return (0.5, 5.0, _LONG) if ill in (Ill.CUT, Ill.SILENCE) else (0.0,)


def random_case(seed: int) -> Case:
    """A case with one to three faults of both kinds; the seed is all that it depends on.

    >>> random_case(7) == random_case(7)
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
            faults.append(_fault(draw, NAMES[:workers], steps))
        else:
            lines.append(_line(draw, NAMES[:workers], steps))
    kills = any(fault.action is Action.KILL for fault in faults)
    restart = draw.choice((0.0, 0.5, 3.0)) if kills else 0.0
    return Case(seed, workers, steps, tuple(faults), tuple(lines), restart)


def _fault(draw: random.Random, row: tuple[str, ...], steps: int) -> Fault:
    point = draw.choice((*REACHED, "failure.telling"))
    actions = [action for action in Action if action is not Action.DROP or POINTS[point].connection]
    action = draw.choice(actions)
    seconds = draw.choice(_SECONDS.get(action, (0.0,)))
    return Fault(point, action, seconds, draw.randint(1, 2 * steps), worker=draw.choice(row))


def _line(draw: random.Random, row: tuple[str, ...], steps: int) -> LineFault:
    here, there = draw.sample(row, 2)
    ill = draw.choice(list(Ill))
    return LineFault(here, there, ill, draw.randrange(6 + 7 * steps), draw.choice(_seconds_of(ill)))


DEADLY = (Action.KILL, Action.RAISE)


def is_planned(error: BaseException) -> bool:
    """Whether a failpoint raised it."""
    return isinstance(error, RunError) and "failpoint" in str(error)


def fatal(case: Case) -> bool:
    """Whether such a case may stop a run; all others must go on."""
    frozen = [f for f in case.faults if f.action is Action.FREEZE and (not f.seconds or f.seconds >= PATIENCE)]
    longest = max([0.0, *(fault.seconds for fault in case.lines), *(fault.seconds for fault in case.faults)])
    return (
        bool(frozen)
        or any(fault.action in DEADLY for fault in case.faults)
        or any(fault.ill is Ill.LOSE for fault in case.lines)
        or longest >= PATIENCE / 2
    )


def judge(found: Found) -> list[str]:
    """What must not be: a hang, another model, a stop without a name, one that ends well where others do not."""
    case, outcomes = found.case, found.outcomes
    living = {worker: each for worker, each in outcomes.items() if each.killed is None}
    wrong = ["it hangs"] if found.hangs else []
    expected = dict(zip(case.row, run_undisturbed(case.workers, case.steps), strict=True))
    for worker, each in outcomes.items():
        if each.held is not None and (each.held.tobytes() != expected[worker].tobytes() or each.leftover):
            wrong.append(f"{worker} has come to something else ({each.leftover} tensors are left)")
    for worker, each in living.items():
        if each.held is None and each.error is None and not found.hangs:
            wrong.append(f"{worker} has no end")
        if each.error is not None:
            wrong += _misnamed_workers(case, worker, each.error)
    if not fatal(case) and not found.went_on:
        wrong.append(f"it stopped: {next((str(e.error) for e in outcomes.values() if e.error), 'nobody said why')}")
    applied = [each.applied for each in outcomes.values()]
    if max(applied) - min(applied) > 1 and not case.restart:
        wrong.append(f"steps applied: {applied}")
    if any(each.held is not None for each in living.values()) and min(a.applied for a in living.values()) < case.steps:
        wrong.append(f"one has ended well, and not all have taken all steps: {applied}")
    return wrong + _late(found, living)


def _misnamed_workers(case: Case, worker: str, error: BaseException) -> list[str]:
    if not isinstance(error, NebulaError):
        return [f"{worker} stopped by {error!r}"]
    others = [each for each in case.row if each != worker]
    named = is_planned(error) or any(each in str(error) for each in others)
    return [] if named else [f"{worker} stopped without a name: {error}"]


def _late(found: Found, living: Mapping[str, Outcome]) -> list[str]:
    """The peers of a worker that is dead or has failed stop within two seconds."""
    (only,) = found.struck if len(found.struck) == 1 else (None,)
    if found.when is None or only is None or found.case.restart:
        return []  # something else may have kept them
    limit = found.when + 2.0
    late = {worker: each.at - found.when for worker, each in living.items() if each.error and each.at > limit}
    return [f"{worker} stopped {seconds:.1f} s after another" for worker, seconds in late.items()]
