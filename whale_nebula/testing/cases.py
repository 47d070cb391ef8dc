"""Which cases are simulated: every failpoint with every action on every worker, and as many random ones as you like."""

from __future__ import annotations

import random
from collections.abc import Iterator

from whale_nebula.faults import POINTS, Action, Fault
from whale_nebula.testing.case import NAMES, PATIENCE, Case
from whale_nebula.testing.line_faults import Ill, LineFault

# A simulated worker has no certificate, and tells of a failure only where there is one.
REACHED = tuple(name for name in POINTS if not name.startswith("certificate.") and name != "failure.telling")
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
                        yield Case(hit, faults=(fault,), lines=_broken(point))
    for ill in Ill:
        for here, there in (NAMES[:2], NAMES[1::-1]):
            for number in range(0, 40, 2):
                for seconds in _seconds_of(ill):
                    yield Case(number, lines=(LineFault(here, there, ill, number, seconds),))


def _broken(point: str) -> tuple[LineFault, ...]:
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
    draw = random.Random(seed)  # noqa: S311 - nothing secret
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
