"""The traffic of a training step without the training: numbers go forwards and backwards through workers in a row.

All that a worker gets goes into what it holds, so what all hold at the end is right only if every tensor came once, in
its place, with the right bytes. `undisturbed` says what that is, without any link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from whale_nebula.faults import failpoint
from whale_nebula.transport.protocol import Key
from whale_nebula.wire.assembly import Bound

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


def undisturbed(workers: int, steps: int) -> list[Numbers]:
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


def bound(key: Key) -> Bound | None:
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
        self.held = taught(self.held, gradients, self._shared(step, scalar))
        failpoint("update.after")

    def _forwards(self, step: int) -> Iterator[tuple[int, Numbers]]:
        kept = []
        for micro_batch in range(MICRO_BATCHES):
            failpoint("forward.before")
            came = self._get("forward", step, micro_batch, self._place - 1)
            kept.append(ahead(self.held, np.zeros(WIDTH, np.uint32) if came is None else came, step, micro_batch))
            self._put("forward", step, micro_batch, self._place + 1, kept[-1])
        yield from enumerate(kept)

    def _shared(self, step: int, scalar: Numbers) -> Numbers:
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
